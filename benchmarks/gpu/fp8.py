"""Linear layers in float8 against bfloat16: time of a compiled step of 8,192 tokens.

    python benchmarks/gpu/fp8.py

The model has 16 of the layers of Llama 3.1 8B and a small vocabulary, so that its head, which stays in bfloat16, is a
small part as in the whole model. Blocks are compiled one by one, as after `parallelize`. With one device nothing is
gathered. `te-fp8` takes no part: Transformer Engine's layers are not compiled. On a CPU float8 is emulated, and nothing
is compiled. A device without float8 units is told by the refusal that a job would get.

Limits, for an H200: tensor-wise at least 15 % faster than bfloat16, row-wise at least 8 %.
"""

import argparse
import sys
from functools import partial

from torch import nn

from benchmarks import memory
from benchmarks.gpu import one_device
from benchmarks.gpu.one_device import Found, Limit, Step
from hyperpod_plugins.planning import TrackedMemory
from hyperpod_plugins.precision import convert_linears

REFERENCE, TENSOR_WISE, ROW_WISE = "bfloat16", "tensorwise", "rowwise"
FASTER = {TENSOR_WISE: 1.15, ROW_WISE: 1.08}
SIZES = {"num_hidden_layers": 16, "vocab_size": 32_768}
SMALL = {
    "num_hidden_layers": 3,
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
WARMUP = 3  # compiles


def build(recipe: str, model: nn.Module, tokens: int) -> Step:
    """A contender with modules of its own."""
    own, device = one_device.shared_copy(model), one_device.this_device()
    blocks = list(own.model.layers)
    if recipe != REFERENCE:
        sys.stdout.write(f"{convert_linears(own, recipe, device, blocks=blocks)}\n")
    if device.type == "cuda":
        for block in blocks:
            block.compile()
    return one_device.tracked_step(own, memory.step_of(own, tokens, device), TrackedMemory())


def run(args: argparse.Namespace) -> tuple[Found, list[Limit]]:
    """One comparison, and its limits."""
    device, found = one_device.this_device(), Found(reference=REFERENCE)
    sizes = SMALL if args.quick else SIZES
    model = one_device.recipe_model("llama3_8b_long_context", device, **sizes)
    builds = {name: partial(build, name, model, args.tokens) for name in (REFERENCE, *FASTER)}
    title = f"{sizes['num_hidden_layers']} layers, {args.tokens} tokens"
    one_device.compare(found, title, builds, args, tokens=args.tokens, warmup=1 if args.quick else WARMUP)
    limits = [
        found.judge(f"{name}: {faster:.2f} times as fast as {REFERENCE}", title, (name, REFERENCE), 1 / faster)
        for name, faster in FASTER.items()
    ]
    return found, limits


def main(arguments: list[str] | None = None) -> int:
    args = one_device.arguments_of(__doc__.splitlines()[0], arguments, tokens=8192)
    if args.quick:
        args.tokens = 64
    one_device.tell("fp8", *run(args), args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
