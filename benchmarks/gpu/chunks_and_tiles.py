"""Loss in chunks and MLPs in tiles against the whole: peak memory and time of a step with recomputation by block.

    python benchmarks/gpu/chunks_and_tiles.py
    python benchmarks/gpu/chunks_and_tiles.py --tokens 32768 --chunks 32 --tiles 8

The model has 8 of the layers of Qwen3 4B, and its vocabulary of 151,936 words. No limit is set for these.
"""

import sys
from functools import partial

from benchmarks import memory
from benchmarks.gpu import one_device
from benchmarks.gpu.offload import build
from benchmarks.gpu.one_device import Found
from benchmarks.memory import Way


def main(arguments: list[str] | None = None) -> int:
    args = one_device.arguments_of(__doc__.splitlines()[0], arguments, tokens=16_384, chunks=16, tiles=8)
    device, found = one_device.this_device(), Found(reference="whole")
    if args.quick:
        args.tokens, args.chunks, args.tiles, model = 128, 2, 2, one_device.with_gradients(memory.build(device))
    else:
        model = one_device.recipe_model("qwen3_4b_long_context", device, num_hidden_layers=8)
    ways = {
        "whole": Way(checkpointing="ours"),
        "chunked loss": Way(checkpointing="ours", chunks=args.chunks),
        "tiled MLP": Way(checkpointing="ours", tiles=args.tiles),
        "chunked loss + tiled MLP": Way(checkpointing="ours", chunks=args.chunks, tiles=args.tiles),
    }
    builds = {name: partial(build, way, model, args.tokens) for name, way in ways.items()}
    # Each MLP compares its tiles with the whole in its first batch.
    one_device.compare(found, f"{args.tokens} tokens", builds, args, tokens=args.tokens, warmup=2)
    one_device.tell("chunks_and_tiles", found, [], args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
