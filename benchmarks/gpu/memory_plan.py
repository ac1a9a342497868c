"""Plans of memory against an allocator: what `plan_memory` says of steps on one device, and what they take.

    python benchmarks/gpu/memory_plan.py                    # 12 of the layers of Qwen3 4B, 8,192 tokens
    python benchmarks/gpu/memory_plan.py --tokens 32768

Each way trains three steps with AdamW and torch's defaults, in bfloat16 throughout, with FSDP2 over one rank; the peak
of the last one counts, with parameters, gradients and optimizer state. On a CPU it is that of a tracker, as in
`benchmarks/memory.py`. The margin of a plan for fragmentation is not part of the comparison: the memory that the
allocator has reserved is told beside it.

Limit: a plan is within 10 % of what is allocated.
"""

import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu import one_device
from benchmarks.gpu.one_device import Found, Limit
from benchmarks.memory import Sample
from hyperpod_plugins.memory import tile_mlps
from hyperpod_plugins.parallel import ParallelConfig, build_mesh, parallelize
from hyperpod_plugins.parallel.config import Precision
from hyperpod_plugins.parallel.parallelize import save_activation_memory
from hyperpod_plugins.planning import GIB, MemoryPlan, TrackedMemory, TrainingShape, UncountedPool, plan_memory

REFERENCE = "plain"
WAYS: dict[str, dict[str, Any]] = {
    REFERENCE: {},
    "recompute": {"activation_checkpointing": "full"},
    "recompute, selective": {"activation_checkpointing": "selective"},
    "recompute + offload": {"activation_offload": True},
    "recompute + offload + chunked loss + tiled MLP": {"activation_offload": True, "loss_chunks": 8, "mlp_tiles": 4},
}
SIZES = {"num_hidden_layers": 12}
SMALL = {
    "num_hidden_layers": 4,
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
WITHIN = 0.1
NUM_STEPS = 3  # optimizer state and pool exist in the last one


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """What the last step took."""

    allocated: float
    reserved: float
    """By the allocator of a GPU; 0 on a CPU."""
    seconds: float
    loss: float
    """Of the first step."""


def sizes_of(sizes: dict[str, int]) -> Any:
    """The configuration of the recipe's model, with other sizes."""
    model = yaml.safe_load((one_device.RECIPES / "qwen3_4b_long_context.yaml").read_text())["model"]
    return AutoConfig.for_model(**(model | sizes | {"use_cache": False}))


def train(sizes: Any, config: ParallelConfig, tokens: int) -> Peak:
    """Train from random values, and measure."""
    device, tracker = one_device.this_device(), TrackedMemory()
    is_cuda = device.type == "cuda"
    before = torch.cuda.memory_allocated() if is_cuda else 0
    dtype = torch.bfloat16 if config.precision == "bf16-true" else torch.float32
    batch = torch.randint(sizes.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(1)).to(device)
    losses, began_s = [], 0.0
    with nullcontext() if is_cuda else tracker:
        torch.manual_seed(0)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(sizes, dtype=dtype).train()
        if config.mlp_tiles > 1:
            tile_mlps(model, config.mlp_tiles, device=device)
        save_activation_memory(model, config, device, None if is_cuda else UncountedPool(device, tracker))
        shards = ParallelConfig(precision=config.precision)
        parallelize(model, build_mesh(shards.topology(1), device.type), shards)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        for _ in range(NUM_STEPS):
            if is_cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            tracker.peak, began_s = tracker.current, time.perf_counter()
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    if is_cuda:
        torch.cuda.synchronize()
    return Peak(
        allocated=torch.cuda.max_memory_allocated() - before if is_cuda else tracker.peak,
        reserved=torch.cuda.max_memory_reserved() if is_cuda else 0.0,
        seconds=time.perf_counter() - began_s,
        loss=losses[0],
    )


def judged(way: str, plan: MemoryPlan, peak: Peak) -> Limit:
    """Whether a plan is near enough."""
    ratio = plan.peak / peak.allocated
    reserved = f"; reserved {peak.reserved / GIB:.2f}, planned for the device {plan.device / GIB:.2f}"
    return Limit(
        what=f"{way}: planned within {WITHIN:.0%} of what is allocated",
        measured=f"{plan.peak / GIB:.3f} of {peak.allocated / GIB:.3f} GiB ({ratio:.3f})"
        + reserved * bool(peak.reserved),
        held="met" if abs(ratio - 1) <= WITHIN else "missed",
    )


def main(arguments: list[str] | None = None) -> int:
    args = one_device.arguments_of(__doc__.splitlines()[0], arguments, tokens=8192)
    precision: Precision = "32-true" if args.quick else "bf16-true"
    tokens = 256 if args.quick else args.tokens
    dist.init_process_group("hyperpod", store=dist.HashStore(), rank=0, world_size=1)
    sizes, found, limits = sizes_of(SMALL if args.quick else SIZES), Found(reference=REFERENCE), list[Limit]()
    for way, options in WAYS.items():
        config = ParallelConfig.of(options, precision=precision)
        shape = TrainingShape(
            micro_batch_size=1,
            sequence_length=tokens,
            optimizer_implementation="auto" if torch.cuda.is_available() else "for_loop",
        )
        plan = plan_memory(sizes, config, shape, world_size=1)
        try:
            peak = train(sizes, config, tokens)
        except torch.OutOfMemoryError:
            found.left[way] = f"out of memory at {tokens} tokens, of which the plan says, in GiB: {plan}"
            continue
        finally:
            one_device.free(one_device.this_device())
        found.samples.append(
            Sample(way=way, tokens=tokens, peak_mib=peak.allocated / 2**20, step_s=peak.seconds, loss=peak.loss)
        )
        limits.append(judged(way, plan, peak))
    dist.destroy_process_group()
    one_device.tell("memory_plan", found, limits, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
