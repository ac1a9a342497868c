"""What the resilient backend costs: the same FSDP2 step over "hyperpod" and over plain "gloo".

    python benchmarks/comm_overhead.py --rounds 60

Hybrid sharding, 2 replicas x 2 shards. A second plain-gloo contender runs beside: its ratio must be 1.00, and the
width of its interval is the smallest overhead that this machine can show.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks import harness, ranks, report

WIDTH = 384
DEPTH = 4
BATCH = 64
LIMIT = 1.02  # of a step of about 50 ms


def train(turns: Iterator[int], backend: str) -> list[float]:
    """Train a plain MLP with FSDP2 over `backend`; the losses of this rank."""
    if backend == "hyperpod":
        from hyperpod_plugins.comm import register

        register()
    dist.init_process_group(backend)
    assert dist.get_backend() == backend
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(DEPTH)))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    torch.manual_seed(dist.get_rank())
    inputs = torch.randn(BATCH, WIDTH)
    losses = []
    for _ in turns:
        loss = (model(inputs) - inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def main() -> None:
    harness.leave_cleanly_on_sigterm()
    arguments = harness.argument_parser("Overhead of backend 'hyperpod' over plain 'gloo'.").parse_args()
    schedule = harness.Schedule.from_arguments(arguments, rounds=240, starts=8, steps=3)
    names = {"gloo": "gloo", "gloo again (control)": "gloo", "hyperpod": "hyperpod"}
    contenders = [
        ranks.Contender(name=name, train=train, world_size=4, kwargs={"backend": backend})
        for name, backend in names.items()
    ]
    comparison = harness.compare("FSDP2 2 x 2 step", contenders, schedule)
    report.print_comparison(comparison)
    for run in comparison.runs[1:]:
        print(report.ratio_line(comparison, run, LIMIT))
    report.write_results("comm_overhead", [comparison], arguments.json, {"limit": LIMIT})


if __name__ == "__main__":
    main()
