"""What ranks of tests need, imported and computed before they are forked: seconds of each of thousands otherwise."""

import contextlib
import ctypes
import gc
import importlib
from pathlib import Path

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


def use_huge_pages():
    """Have the kernel hold the memory of this process in huge pages where it can, so that a fork copies fewer tables.

    A fork takes a third of the processor time then. What is written afterwards is copied by small pages as before.
    """
    madvise, huge = ctypes.CDLL(None).madvise, 2 << 20
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, access, _, _, inode, *name = line.split(maxsplit=5)
        begin, end = (int(each, 16) for each in place.split("-"))
        begin, end = -(-begin // huge) * huge, end // huge * huge
        if access == "rw-p" and inode == "0" and name in ([], ["[heap]"]) and begin < end:
            madvise(begin, end - begin, 25)  # MADV_COLLAPSE; where that is not possible, all stays as it is


gc.collect()
use_huge_pages()
gc.freeze()  # as a fork server does: what is forked neither looks at these objects, nor frees each of them as it ends
