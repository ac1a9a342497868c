"""A model of transformers for presets that need one; what Accelerate's files have no key for, it gives the plugin."""

import json
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from hyperpod_plugins.accelerate import HyperPodPlugin

PRESET = Path(sys.argv[1]).stem
OPTIONS = {"long-context": {"loss_chunks": 2, "mlp_tiles": 2}, "experts": {"expert_parallel_degree": 2}}
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "use_cache": False,
}
accelerator = HyperPodPlugin.from_environ(**OPTIONS.get(PRESET, {})).accelerator()
torch.manual_seed(0)
if PRESET == "experts":
    model = MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4))
else:
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
counting = (torch.arange(16)[:, None] + torch.arange(32)) % 64  # each token is the one before plus one
model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(counting, batch_size=4))
losses = []
for _ in range(3):
    for batch in loader:
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
if accelerator.is_main_process:
    asked = accelerator.plugin.config
    degrees = asked.context_parallel_degree, asked.expert_parallel_degree
    assert degrees == ((1, 2) if PRESET == "experts" else (2, 1))
    assert (asked.loss_chunks, asked.mlp_tiles) == ((2, 2) if PRESET == "long-context" else (1, 1))
    report = {
        "layout": list(accelerator.topology.shape),
        "precision": asked.precision,
        "recomputes": asked.activation_checkpointing != "none",
        "offloads": asked.sm_activation_offloading,
        "float8": False,
        "backend": torch.distributed.get_backend(),
        "losses": losses,
    }
    Path(sys.argv[1]).write_text(json.dumps(report))
accelerator.end_training()
