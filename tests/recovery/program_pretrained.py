# ruff: noqa: E402 (warnings are off before the imports that would give them)
"""What `test_pretrained.py` runs: a pretrained model, loaded straight into shards by every rank or by rank 0."""

import os
import warnings

warnings.filterwarnings("ignore")

import torch
from faults import Faults
from transformers import AutoModelForCausalLM, LlamaConfig

from hyperpod_plugins.delayed_init import delayed_init
from hyperpod_plugins.session import Session

torch.set_num_threads(1)
faults = Faults()
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
CONFIG = LlamaConfig(vocab_size=32, tie_word_embeddings=False, **SIZES)


def build(values):
    """The model, without values; with `rank_0`, no other rank looks at the files."""
    with delayed_init():
        if values == "rank_0" and faults.rank:
            return AutoModelForCausalLM.from_config(CONFIG)
        return AutoModelForCausalLM.from_pretrained(os.environ["PRETRAINED"], dtype="float32")


def main():
    values = os.environ["VALUES"]
    session = Session({"hybrid_shard_degree": 2, "delayed_values": values}, global_batch_size=8)
    model = session.parallelize(build(values))
    session.train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), max_grad_norm=1.0)
    tokens = torch.randint(32, (64, 8), generator=torch.Generator().manual_seed(0)).to(session.device)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tokens), batch_size=2)

    def loss_of(batch):
        loss = model(input_ids=batch[0], labels=batch[0]).loss
        faults.at("forward", step.index)
        return loss

    losses = {}
    for step in session.steps(loader, epochs=1):
        with step:
            losses[step.index] = float(step.run(loss_of))
    state = {name: each.detach().to_local().cpu() for name, each in model.named_parameters()}
    state |= {name: each.cpu() for name, each in model.named_buffers()}
    torch.save({"state": state, "last": losses[max(losses)]}, faults.folder / f"result-{faults.rank}.pt")


if __name__ == "__main__":
    main()
