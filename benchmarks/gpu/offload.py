"""Activations on the host: peak memory and time of a step beside recomputation and the built-in offloads.

    python benchmarks/gpu/offload.py                    # 4,096 to 262,144 tokens on Qwen3 4B: for hours
    python benchmarks/gpu/offload.py --tokens 32768 --rounds 8

`none` keeps all activations, `recompute` the inputs of blocks. `torch save_on_cpu` is `save_on_cpu(pin_memory=True)`
around the model, without recomputation. Two libraries put it around recomputed blocks: transformers'
`activation_checkpointing_enable(offload=True)` (5.16 and later), and Accelerate's `activation_checkpointing_offload`
(1.15 and later, by its own function). TRL's and torchtune's offloads are not of these libraries. All contenders compute
their loss in chunks. A contender that runs out of memory takes no part in longer steps, nor does `torch save_on_cpu`
where the host has no memory for all activations: some seventeen times the inputs of blocks.

Limits, for an H200: from 32,768 tokens on, our offload takes at most 0.5 % more than recomputation, and less than both
others; a model of 4 to 8 B parameters trains on 262,144 tokens. Before any step is timed, gradients of steps of several
lengths must have the same bits with our offload and without, or it computes with what is not copied yet.
"""

import argparse
import sys
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from benchmarks import memory
from benchmarks.gpu import one_device
from benchmarks.gpu.one_device import Found, Limit, Step
from benchmarks.memory import ACCELERATE, PINS, SAVES, Way
from hyperpod_plugins.memory.host_pool import host_share
from hyperpod_plugins.planning import TrackedMemory

LENGTHS = [4096 << power for power in range(7)]
LONG, LONGEST = 32_768, 262_144
REFERENCE, OURS = "recompute", "recompute + offload"
BUILT_IN = ("transformers offload", "Accelerate offload")
ALL_SAVED = "torch save_on_cpu"
COMPARED_LENGTHS = [8192, 512, 4096, 1024, 16_384, 2048, 8192, 4096]
TIMES_INPUTS = 2 * 17  # what it keeps, and pinned memory in powers of two
WAYS = {
    REFERENCE: Way(checkpointing="ours"),
    "none": Way(),
    BUILT_IN[0]: Way(checkpointing=PINS),
    BUILT_IN[1]: Way(checkpointing=ACCELERATE),
    ALL_SAVED: Way(checkpointing=SAVES),
    OURS: Way(checkpointing="ours", offloads=True),
}


def build(way: Way, model: nn.Module, tokens: int) -> Step:
    """A contender with modules of its own."""
    own, tracker, device = one_device.shared_copy(model), TrackedMemory(), one_device.this_device()
    memory.apply(way, own, device, tracker)
    return one_device.tracked_step(own, memory.step_of(own, tokens, device), tracker)


def fit_on_host(model: nn.Module, tokens: int, times: int) -> bool:
    """Whether the host has memory for the inputs of all blocks, some times over."""
    sizes = model.config
    return times * sizes.num_hidden_layers * tokens * sizes.hidden_size * 2 <= 0.6 * host_share()


def needs_host_alone(model: nn.Module, tokens: int, names: Collection[str]) -> bool:
    """Whether the host cannot hold what all contenders keep there: ours, up to twice that of the other two, and all."""
    return not fit_on_host(model, tokens, 3 + TIMES_INPUTS * (ALL_SAVED in names))


def limits_of(found: Found, lengths: list[int]) -> list[Limit]:
    """The limits above, for each length that they name."""
    limits = []
    for tokens in (each for each in lengths if each >= LONG):
        what, title = f"{OURS} at {tokens} tokens", title_of(tokens)
        limits.append(found.judge(f"{what}: at most 1.005 of {REFERENCE}", title, (OURS, REFERENCE), 1.005))
        limits += [found.judge(f"{what}: faster than {each}", title, (OURS, each), 1.0) for each in BUILT_IN]
    [*reached] = (each for each in found.samples if each.way == OURS and each.tokens >= LONGEST)
    held = "not measured"
    if LONGEST in lengths:
        held = "met" if reached else f"missed: {found.left.get(OURS, 'it did not run')}"
    measured = f"peak {reached[0].peak_mib / 1024:.1f} GiB besides model and gradients" if reached else ""
    limits.append(Limit(what=f"{OURS} of a model of 4 B parameters at {LONGEST} tokens", measured=measured, held=held))
    return limits


@contextmanager
def deterministic() -> Generator[None]:
    """Let attention and embeddings add up their gradients in the same order each time, where they can."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def compare_bits(model: nn.Module, lengths: Sequence[int], chunks: int) -> Limit:
    """Whether gradients of recomputed steps have the same bits with our offload, each step with other tokens.

    Recomputation without the offload is compared with itself, too: if it differs, there is nothing to compare with.
    """
    device, tracker = one_device.this_device(), TrackedMemory()
    first, again, ours = (one_device.shared_copy(model) for _ in range(3))  # their gradients are those of the model
    offload = None
    for own, name in ((first, REFERENCE), (again, REFERENCE), (ours, OURS)):
        offload = memory.apply(replace(WAYS[name], chunks=chunks), own, device, tracker)
    assert offload is not None
    equal = {id(own): 0 for own in (again, ours)}
    with deterministic():
        for seed, tokens in enumerate(lengths):
            memory.step_of(first, tokens, device, seed=seed)()
            wanted = [each.grad.clone() for each in first.parameters()]
            for own in (again, ours):
                memory.step_of(own, tokens, device, seed=seed)()
                found = (each.grad for each in own.parameters())
                equal[id(own)] += all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))
    steps, stored = len(lengths), offload.stored_bytes
    what = f"{OURS}: gradients of {steps} steps of {min(lengths)} to {max(lengths)} tokens have the bits of {REFERENCE}"
    measured = f"{equal[id(ours)]} equal, {stored / 2**20:.1f} MiB offloaded"
    if stored and equal[id(ours)] == steps:
        held = "met"
    elif not stored or equal[id(again)] == steps:
        held = "missed"
    else:
        held = f"not decided: {REFERENCE} repeats its own bits in {equal[id(again)]} steps"
    return Limit(what=what, measured=measured, held=held)


def title_of(tokens: int) -> str:
    return f"{tokens} tokens"


def model_of(args: argparse.Namespace) -> nn.Module:
    """The model that all contenders train."""
    device = one_device.this_device()
    if args.quick:
        return one_device.with_gradients(memory.build(device))
    return one_device.recipe_model("qwen3_4b_long_context", device, max_position_embeddings=1 << 20)


def run(model: nn.Module, args: argparse.Namespace) -> Found:
    """All lengths, one after the other."""
    device, found = one_device.this_device(), Found(reference=REFERENCE)
    ways = {name: replace(way, chunks=args.chunks) for name, way in WAYS.items()}
    if device.type == "cpu":
        del ways[BUILT_IN[0]]
        found.left[BUILT_IN[0]] = "it pins memory, which needs a GPU"
    for tokens in args.tokens:
        if ALL_SAVED not in found.left and not fit_on_host(model, tokens, TIMES_INPUTS):
            found.left[ALL_SAVED] = f"the host has no memory for all activations of {tokens} tokens"
        builds = {name: partial(build, way, model, tokens) for name, way in ways.items() if name not in found.left}
        if not builds:
            break
        one_by_one = needs_host_alone(model, tokens, builds)
        one_device.compare(found, title_of(tokens), builds, args, tokens=tokens, one_by_one=one_by_one)
    return found


def main(arguments: list[str] | None = None) -> int:
    args = one_device.arguments_of(__doc__.splitlines()[0], arguments, tokens=LENGTHS, chunks=32)
    compared = COMPARED_LENGTHS
    if args.quick:
        args.tokens, args.chunks, compared = [64, 128], 2, [128, 64, 96]
    model = model_of(args)
    bits = compare_bits(model, compared, args.chunks)
    one_device.free(one_device.this_device())
    found = run(model, args)
    one_device.tell("offload", found, [bits, *limits_of(found, args.tokens)], args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
