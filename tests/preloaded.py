"""What ranks of tests need, imported and computed before they are forked: seconds of each of thousands otherwise."""

import contextlib
import gc
import importlib

import lightning.pytorch  # noqa: F401
import torch
import torch._dynamo  # the first step of an optimizer imports it
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
import transformers

import hyperpod_plugins.accelerate
import hyperpod_plugins.elastic.launcher.main
import hyperpod_plugins.lightning
import hyperpod_plugins.session  # noqa: F401
from hyperpod_plugins.parallel.module_chains import find_chains

_OPTIONAL = (
    "datasets",  # accelerate imports it for each loader
    "peft",
    "torchao.float8",
    "torchmetrics",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.qwen3.modeling_qwen3",
)
for name in _OPTIONAL:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)

_config = transformers.LlamaConfig(
    vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
)
with torch.device("meta"):
    find_chains(
        transformers.AutoModelForCausalLM.from_config(_config)
    )  # parses the sources of transformers, and keeps what it found

gc.collect()
gc.freeze()  # as a fork server does: what is forked neither looks at these objects, nor frees each of them as it ends
