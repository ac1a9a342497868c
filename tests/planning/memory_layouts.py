"""Layouts whose plans of memory are compared with what four ranks need, in steps that run.

    python tests/planning/memory_layouts.py      # all of them, as a table; the suite has IN_SUITE

What a rank needs is counted as it trains a small Llama or Mixtral on the CPU: parameters, gradients, states, what is
gathered, and activations; in forward and backward, and in the optimizer's step. In one step gradients are kept from the
step before, and the optimizer loops over parameters; in another, gradients are dropped between steps and the optimizer
works on all parameters at once, as torch does by default on GPUs.
"""

import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
import transformers
from harness import run_ranks

from hyperpod_plugins.comm import GroupKey, new_axis_group
from hyperpod_plugins.parallel import ParallelConfig
from hyperpod_plugins.planning import TrackedMemory, TrainingShape, UncountedPool, plan_memory
from hyperpod_plugins.recovery.snapshot import SnapshotPolicy, Snapshots
from hyperpod_plugins.recovery.state_transfer import TrainingState

SHAPE = TrainingShape(micro_batch_size=2, sequence_length=256)
SHAPES = {
    "kept": replace(SHAPE, keeps_gradients=True, optimizer_implementation="for_loop"),
    "dropped": replace(SHAPE, optimizer_implementation="foreach"),
}
TOLERANCE = 0.03
WAYS = {
    "whole": {},
    "recomputed": {"activation_checkpointing": "full"},
    "selective": {"activation_checkpointing": "selective"},
    "offloaded": {"activation_offload": True},
    "chunks and tiles": {"activation_offload": True, "loss_chunks": 4, "mlp_tiles": 4},
}
SNAPSHOTS_OF = "full shard 4, recomputed"
LAYOUTS = {
    "replicas": {"hybrid_shard_degree": 1},
    "hsdp 2x2": {"hybrid_shard_degree": 2},
    "full shard 4, recomputed": {"activation_checkpointing": "full"},
    "full shard 4, offloaded, chunks, tiles": WAYS["chunks and tiles"],
    "full shard 4, parameters on the host": {"param_offload": True},
    "full shard 4, optimizer on the host": {"optimizer_offload": True},
    "tp 2 x shard 2": {"tensor_parallel_degree": 2},
    "tp 2 x shard 2, recomputed, loss parallel": {
        "tensor_parallel_degree": 2,
        "activation_checkpointing": "full",
        "loss_parallel": True,
    },
    "tp 2 x shard 2, split sequence": {"tensor_parallel_degree": 2, "sequence_parallel": True},
    "tp 2 x shard 2, split sequence, offloaded, chunks": {
        "tensor_parallel_degree": 2,
        "sequence_parallel": True,
        "activation_offload": True,
        "loss_chunks": 4,
    },
    "hsdp 2x2, recomputed, chunks, tiles": {
        "hybrid_shard_degree": 2,
        "activation_checkpointing": "full",
        "loss_chunks": 4,
        "mlp_tiles": 4,
    },
    "bf16, offloaded, chunks": {"precision": "bf16-mixed", "activation_offload": True, "loss_chunks": 4},
    "bf16, offloaded, chunks, tiles": {"precision": "bf16-mixed", **WAYS["chunks and tiles"]},
    "float8, gathered in float8": {
        "precision": "bf16-mixed",
        "float8_recipe": "tensorwise",
        "float8_all_gather": True,
    },
    "contexts of 2": {"context_parallel_degree": 2},
    "contexts of 2, recomputed": {"context_parallel_degree": 2, "activation_checkpointing": "full"},
    "contexts of 4, keys gathered, offloaded, chunks, tiles": {
        "context_parallel_degree": 4,
        **WAYS["chunks and tiles"],
    },
    "contexts of 2, tp 2": {"context_parallel_degree": 2, "tensor_parallel_degree": 2},
    "contexts of 2, tp 2, split sequence, recomputed": {
        "context_parallel_degree": 2,
        "tensor_parallel_degree": 2,
        "sequence_parallel": True,
        "activation_checkpointing": "full",
    },
    "experts 2 x shard 2": {"precision": "bf16-mixed", "expert_parallel_degree": 2},
    "experts 2, tp 2": {"precision": "bf16-mixed", "expert_parallel_degree": 2, "tensor_parallel_degree": 2},
    "experts 4, contexts of 2": {
        "precision": "bf16-mixed",
        "expert_parallel_degree": 4,
        "context_parallel_degree": 2,
    },
    "float8 rowwise, recomputed": {
        "precision": "bf16-mixed",
        "float8_recipe": "rowwise",
        "activation_checkpointing": "full",
    },
}
IN_SUITE = (  # each kind of layout, and each way to save memory; products in bfloat16 take long on a CPU
    "replicas",
    "hsdp 2x2",
    "full shard 4, recomputed",
    "full shard 4, optimizer on the host",
    "tp 2 x shard 2, split sequence, offloaded, chunks",
    "float8, gathered in float8",
    "contexts of 4, keys gathered, offloaded, chunks, tiles",
    "contexts of 2, tp 2",
    "experts 4, contexts of 2",
    "experts 2, tp 2",
)


@dataclass(frozen=True)
class Comparison:
    """Bytes of one layout."""

    name: str
    planned: float
    used: tuple[float, ...]
    """By each rank; where experts are divided, their mean, as some ranks get more rows and others fewer."""

    @property
    def fits(self):
        return all(abs(each - self.planned) <= TOLERANCE * self.planned for each in self.used)


def sizes(layers=4, width=128, **options):
    return transformers.LlamaConfig(
        vocab_size=options.pop("vocab_size", 2048),
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
        **options,
    )


def mixtral(**options):
    return transformers.MixtralConfig(
        vocab_size=2048, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=8, use_cache=False, experts_implementation="grouped_mm", **options,
    )  # fmt: skip


def model_for(config):
    """The configuration of the model that a layout is measured with."""
    return mixtral() if config.expert_parallel_degree > 1 else sizes()


def tokens(generator=None):
    return torch.randint(2048, (SHAPE.micro_batch_size, SHAPE.sequence_length), generator=generator)


def leave_host_out(tracker, set_attribute=setattr):
    """Have offloaded activations count for nothing: in these runs, the host is the device."""
    module = import_module("hyperpod_plugins.parallel.parallelize")
    set_attribute(module, "HostPool", lambda device, budget_bytes=0: UncountedPool(device, tracker, budget_bytes))


def measured(layouts):
    from hyperpod_plugins.parallel import build_mesh, loss_parallel_context, parallelize

    dist.init_process_group("hyperpod")
    peaks = defaultdict(list)
    for name, options in layouts.items():
        config, tracker = ParallelConfig.of(options), TrackedMemory()
        leave_host_out(tracker)
        topology = config.topology(dist.get_world_size())
        mesh = build_mesh(topology, "cpu")
        samples = torch.Generator().manual_seed(topology.data_rank(dist.get_rank()))
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(model_for(config))
        with tracker:
            parallelize(model, mesh, config)
            optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
            for gradients in ("none", *SHAPES, *SHAPES, *SHAPES, *SHAPES):  # the first makes gradients and states
                if gradients == "dropped":
                    optimizer.zero_grad()
                optimizer.param_groups[0]["foreach"] = gradients == "dropped"
                tracker.peak = tracker.current
                with loss_parallel_context(config):
                    model(input_ids=(batch := tokens(samples)), labels=batch).loss.backward()
                peaks[name, gradients, "backward"].append(tracker.peak)
                tracker.peak = tracker.current
                optimizer.step()
                peaks[name, gradients, "optimizer step"].append(tracker.peak)
                optimizer.zero_grad(set_to_none=False)
        if name == SNAPSHOTS_OF:
            kept = snapshots_kept(model, optimizer, config)
    # On a busy machine, a thread of gloo may let go of a message late: the smallest peak is what a step needs.
    return {part: min(found) for part, found in peaks.items()}, kept


def snapshots_kept(model, optimizer, config):
    """Bytes of the snapshots that this rank keeps, its own and those of another."""
    topology = config.topology(dist.get_world_size())
    group = new_axis_group(GroupKey("snapshot", is_strict=True), range(topology.world_size))
    snapshots = Snapshots(SnapshotPolicy(every_steps=1), TrainingState(model, [optimizer]), topology, group)
    for step in range(4):
        snapshots.maybe_snapshot(step, lambda: b"")
    snapshots.wait()
    buffers = snapshots._own, snapshots._of_source
    return sum(buffer.find(step).data.nbytes for buffer in buffers for step in buffer.steps)


def planned_parts(config, shape):
    """Bytes of both peaks of a step, where the host is the device."""
    plan = plan_memory(model_for(config), config, shape, world_size=4)
    if shape.keeps_gradients or not config.param_offload:  # else gradients grow in host memory, which a plan leaves out
        yield "backward", plan.in_backward + plan.host_state
    yield "optimizer step", plan.in_optimizer_step + plan.host_state + plan.host_temporary


def compare(names: Iterable[str] = LAYOUTS, timeout_s: float = 600.0):
    """A `Comparison` of each layout; and the bytes of snapshots that were planned, and that each rank keeps."""
    layouts = {name: LAYOUTS[name] for name in (*names, SNAPSHOTS_OF)}
    found = run_ranks(measured, layouts, world_size=4, timeout_s=timeout_s)
    comparisons = []
    for name, options in layouts.items():
        for gradients, shape in SHAPES.items():
            for part, planned in planned_parts(ParallelConfig.of(options), shape):
                used = [peaks[name, gradients, part] for peaks, _ in found]
                if "expert_parallel_degree" in options:
                    used = [sum(used) / len(used)]
                comparisons.append(Comparison(f"{name}: {part}, gradients {gradients}", planned, tuple(used)))
    shape, config = replace(SHAPE, has_snapshots=True), ParallelConfig.of(LAYOUTS[SNAPSHOTS_OF])
    snapshots = plan_memory(sizes(), config, shape, world_size=4).host_snapshots
    return comparisons, snapshots, [kept for _, kept in found]


def main() -> int:
    """Print the table; 1 if a plan is wrong."""
    comparisons, _, _ = compare()
    for each in comparisons:
        used = ", ".join(f"{one / each.planned:.3f}" for one in each.used)
        print(f"{each.name:90} {each.planned / 2**20:7.2f} MiB planned, used {used}  {'' if each.fits else 'WRONG'}")
    return int(not all(each.fits for each in comparisons))


if __name__ == "__main__":
    sys.exit(main())
