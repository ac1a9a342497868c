"""Activation memory of a training step of a Hugging Face model, and how many tokens fit into that of the plain one.

    python benchmarks/memory.py              # a table: peak memory and time of one step, for each way to train it
    python benchmarks/memory.py --quick

Each way trains the same small Llama for one step at growing lengths: as it is (`plain`), with transformers' own
gradient checkpointing, with it and its offload, and with ours: recomputation, prefetching offload, chunked loss and
tiled MLPs, one after the other. On the CPU, where the host is the device, the peak is that of a tracker which counts
the bytes of every tensor that an operation returns, except those that an offload keeps on the host; temporary memory
inside operations is not seen, and transformers' offload, which pins memory, does not run. On a GPU the peak is the
allocator's.
"""

import argparse
import functools
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import report
from hyperpod_plugins.memory import ActivationOffload, HostPool, chunk_loss, recompute_blocks, tile_mlps
from hyperpod_plugins.planning import TrackedMemory, UncountedPool

LAYERS, WIDTH, HEADS, VOCABULARY = 4, 256, 4, 8192
PINS = "transformers offload"
ACCELERATE = "accelerate offload"
SAVES = "save_on_cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How a step is trained."""

    checkpointing: str = "none"
    """`none`, `transformers` (its own), `transformers offload`, `accelerate offload` (their own), `ours`, or torch's
    `save_on_cpu` without recomputation."""
    offloads: bool = False
    chunks: int = 1
    tiles: int = 1


WAYS = {
    "plain": Way(),
    "transformers recompute": Way(checkpointing="transformers"),
    "transformers recompute + offload": Way(checkpointing=PINS),
    "recompute": Way(checkpointing="ours"),
    "recompute + offload": Way(checkpointing="ours", offloads=True),
    "recompute + offload + chunked loss": Way(checkpointing="ours", offloads=True, chunks=8),
    "recompute + offload + chunked loss + tiled MLP": Way(checkpointing="ours", offloads=True, chunks=8, tiles=8),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One step of one way."""

    way: str
    tokens: int
    peak_mib: float
    """Above what model and gradients take."""
    step_s: float
    loss: float
    stored_mib: float = 0.0
    """What our offload copied to the host."""


def build(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=1 << 20,
        use_cache=False,
    )
    return LlamaForCausalLM(config).to(device).train()


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What one step took."""

    loss: float
    seconds: float
    peak_bytes: int
    """Above what was allocated when it began."""


def apply(way: Way, model: nn.Module, device: torch.device, tracker: TrackedMemory) -> ActivationOffload | None:
    """Set a model up for a way to train it; our offload, where it has one."""
    if way.chunks > 1:
        chunk_loss(model, way.chunks)
    if way.tiles > 1:
        tile_mlps(model, way.tiles)
    blocks: Any = model.model.layers
    # Older versions of transformers have the second name only.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    if way.checkpointing == "ours":
        recompute_blocks(blocks)
    elif way.checkpointing == "transformers":
        enable({"use_reentrant": False})
    elif way.checkpointing == PINS:
        enable({"use_reentrant": False}, offload=True)
    elif way.checkpointing == ACCELERATE:
        offload_as_accelerate(model)
    elif way.checkpointing == SAVES:
        save_on_host(model, is_pinned=device.type == "cuda")
    if not way.offloads:
        return None
    pool = UncountedPool(device, tracker) if device.type == "cpu" else HostPool(device)
    offload = ActivationOffload(device, pool=pool)
    offload.attach(blocks)
    return offload


def save_on_host(model: Any, *, is_pinned: bool) -> None:
    """Keep all that autograd saves of a model on the host, with torch's `save_on_cpu` around its forward."""
    forward = model.forward

    @functools.wraps(forward)
    def saving(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.save_on_cpu(pin_memory=is_pinned):
            return forward(*args, **kwargs)

    model.forward = saving


def offload_as_accelerate(model: Any) -> None:
    """Do what Accelerate's FSDP2 plugin does for `activation_checkpointing_offload`, by its own function."""
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_apply_ac

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[type(model.model.layers[0]).__name__],
        activation_checkpointing=True,
        activation_checkpointing_offload=True,
    )
    fsdp2_apply_ac(SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin)), model)


def step_of(model: nn.Module, tokens: int, device: torch.device, *, seed: int = 1) -> Callable[[], float]:
    """Forward and backward of random tokens; returns the loss. The first call creates the gradients."""
    vocabulary, generator = model.config.vocab_size, torch.Generator().manual_seed(seed)
    batch = torch.randint(vocabulary, (1, tokens), generator=generator).to(device)

    def step() -> float:
        model.zero_grad(set_to_none=False)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        return float(loss.detach())

    return step


def measured(step: Callable[[], float], model: nn.Module, device: torch.device, tracker: TrackedMemory) -> Taken:
    """Run one step of a model that has gradients already."""
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        for parameter in model.parameters():
            tracker.leave_out(parameter)
            tracker.leave_out(parameter.grad)
        before = tracker.peak = tracker.current
    began_s = time.perf_counter()
    with nullcontext() if is_cuda else tracker:
        loss = step()
    if is_cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began_s
    peak = torch.cuda.max_memory_allocated() if is_cuda else tracker.peak
    return Taken(loss=loss, seconds=seconds, peak_bytes=peak - before)


def run(name: str, tokens: int, device: torch.device) -> Sample:
    """Train one step that counts, after one that creates gradients and the pool."""
    model, tracker = build(device), TrackedMemory()
    offload = apply(WAYS[name], model, device, tracker)
    step = step_of(model, tokens, device)
    step()
    taken = measured(step, model, device, tracker)
    return Sample(
        way=name,
        tokens=tokens,
        peak_mib=taken.peak_bytes / 2**20,
        step_s=taken.seconds,
        loss=taken.loss,
        stored_mib=0.0 if offload is None else offload.stored_bytes / 2 / 2**20,
    )


def longest(limit_mib: float, name: str, lengths: list[int], device: torch.device) -> Sample | None:
    """The longest step of one way whose peak is at most `limit_mib`."""
    best = None
    for tokens in lengths:
        sample = run(name, tokens, device)
        if sample.peak_mib > limit_mib:
            return best
        best = sample
    return best


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1024, help="length of the plain step")
    parser.add_argument(
        "--json", type=Path, help="where to write the samples (default: benchmarks/results/memory.json)"
    )
    parser.add_argument("--quick", action="store_true", help="256 tokens")
    args = parser.parse_args(arguments)
    tokens = 256 if args.quick else args.tokens
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ways = [name for name, way in WAYS.items() if device.type == "cuda" or way.checkpointing != PINS]
    samples = [run(name, tokens, device) for name in ways]
    plain = samples[0]
    sys.stdout.write(
        f"one step of {tokens} tokens, {LAYERS} layers of width {WIDTH}, vocabulary {VOCABULARY}, on {device}\n"
    )
    for sample in samples:
        sys.stdout.write(
            f"  {sample.way:48} peak {sample.peak_mib:8.1f} MiB  {sample.peak_mib / plain.peak_mib:5.2f} of plain  "
            f"step {sample.step_s / plain.step_s:5.2f}  loss {sample.loss:.7f}\n"
        )
    last = list(WAYS)[-1]
    lengths = [factor * tokens for factor in (4, 8, 12, 16)]
    best = longest(plain.peak_mib, last, lengths, device)
    factor = 0 if best is None else best.tokens // tokens
    sys.stdout.write(f"in the memory of the plain step, {last} trains {factor} times the tokens\n")
    theory_mib = (LAYERS - 1) * tokens * WIDTH * 4 / 2**20  # the last layer keeps its input
    stored = {sample.way: sample.stored_mib for sample in samples}["recompute + offload"]
    sys.stdout.write(f"offloaded {stored:.2f} MiB of {theory_mib:.2f}, {stored / theory_mib:.1%}\n")
    found = {
        "device": str(device),
        "samples": [asdict(each) for each in samples],
        "longest": None if best is None else asdict(best),
    }
    report.write_results("memory", [], args.json, found)
    return int(factor < 8 or stored < 0.95 * theory_mib)


if __name__ == "__main__":
    sys.exit(main())
