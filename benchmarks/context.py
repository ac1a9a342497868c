"""Step time of a small Llama with context parallelism, against plain data parallelism with as many tokens a rank.

    python benchmarks/context.py --rounds 60

    none       each of two ranks trains on its own sample          (the reference)
    context 2  both ranks train on both samples, each on its part of the tokens

Both compute the same global batch, with sharding over the two ranks. Where the degree divides the heads of keys and
values, attention exchanges heads (Ulysses). In the second comparison, of a model with one such head, keys and values
are gathered, or go round a ring. All must show the same losses.
"""

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist

from benchmarks import harness, ranks, report
from benchmarks.throughput import DEVICE, RandomTokens, largest_loss_difference, make_model, make_optimizer
from hyperpod_plugins.parallel import ParallelConfig, build_mesh, parallelize
from hyperpod_plugins.parallel.config import ContextCommType

SEQUENCE = 512
HEADS = 8
LIMIT = 1.10  # what exchanged heads may take more than no context parallelism


def train(
    turns: Iterator[int], degree: int, comm_type: ContextCommType, key_value_heads: int, sequence: int
) -> list[float]:
    """A plain loop; the losses of the global batch."""
    if DEVICE == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    dist.init_process_group("hyperpod")
    world_size = dist.get_world_size()
    config = ParallelConfig(hybrid_shard_degree=world_size, context_parallel_degree=degree, context_comm_type=comm_type)
    mesh = build_mesh(config.topology(world_size), DEVICE)
    model = parallelize(make_model(sequence, HEADS, key_value_heads).to(DEVICE), mesh, config)
    optimizer = make_optimizer(model)
    samples = [RandomTokens(rank, sequence) for rank in (range(world_size) if degree > 1 else [dist.get_rank()])]
    losses = []
    for step, _ in enumerate(turns):
        tokens = torch.stack([sample[step] for sample in samples]).to(DEVICE)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    mean = torch.stack(losses)
    dist.all_reduce(mean)
    return (mean / world_size).tolist()


def compare(
    comm_types: Mapping[str, ContextCommType], key_value_heads: int, sequence: int, schedule: harness.Schedule
) -> harness.Comparison:
    """Compare ways to communicate, by their names, with none."""
    sizes = {"key_value_heads": key_value_heads, "sequence": sequence}
    whole = {"degree": 1, "comm_type": "auto"}
    ways = {"none": whole, "none again (control)": whole}
    ways |= {f"context 2, {name}": {"degree": 2, "comm_type": comm_type} for name, comm_type in comm_types.items()}
    contenders = [
        ranks.Contender(name=name, train=train, world_size=2, kwargs={**way, **sizes}) for name, way in ways.items()
    ]
    title = f"Llama, {sequence} tokens a rank, {HEADS} heads, {key_value_heads} of keys and values, {DEVICE}"
    return harness.compare(title, contenders, schedule)


def main() -> None:
    harness.leave_cleanly_on_sigterm()
    parser = harness.argument_parser("Step time with context parallelism against none, at equal tokens a rank.")
    parser.add_argument("--sequence", type=int, default=SEQUENCE, help="tokens of a sample")
    arguments = parser.parse_args()
    ranks.preload(["transformers.models.llama.modeling_llama", "hyperpod_plugins.parallel"])
    schedule = harness.Schedule.from_arguments(arguments, rounds=60, starts=6, steps=2)
    comparisons, differences = [], {}
    exchanged: dict[str, ContextCommType] = {"heads exchanged": "a2a"}
    others: dict[str, ContextCommType] = {"keys gathered": "all_gather", "keys in a ring": "p2p"}
    for comm_types, key_value_heads, limit in ((exchanged, HEADS, LIMIT), (others, 1, None)):
        comparison = compare(comm_types, key_value_heads, arguments.sequence, schedule)
        comparisons.append(comparison)
        report.print_comparison(comparison)
        for run in comparison.runs[1:]:
            print(report.ratio_line(comparison, run, limit if run is comparison.runs[-1] else None))
            differences[f"{comparison.title}: {run.name}"] = largest_loss_difference(run, comparison.runs[0])
    for name, difference in differences.items():
        print(f"{name}: largest relative loss difference {difference:.1e}")
    report.write_results("context", comparisons, arguments.json, {"loss_difference": differences})


if __name__ == "__main__":
    main()
