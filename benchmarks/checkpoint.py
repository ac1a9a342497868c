"""Time of saving and loading a sharded checkpoint, against torch.distributed.checkpoint (DCP) with the same state.

    python benchmarks/checkpoint.py              # 60 M parameters with AdamW's state (0.7 GB) on 2 ranks
    python benchmarks/checkpoint.py --quick      # 4 M

Ours is DCP with a checksum of each part, files that are synced to disk, and a folder that appears complete or not at
all; `dcp` writes and reads the same state dict with DCP's own writer (`sync_files`, its default) and reader. Both run
in each round, in alternating order, in the same processes; every load is compared with what was saved. The time is that
of the slowest rank; files are read from the page cache, so that a checksum weighs most.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.multiprocessing.spawn import spawn

from hyperpod_plugins.parallel import CheckpointWriter, ParallelConfig, build_mesh, load_checkpoint, parallelize

WIDTH = 1024
CONTENDERS = "hyperpod", "dcp"
ACTIONS = "save", "load"


def trained(parameters: int, world_size: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A sharded stack of linear layers with about that many parameters, and its AdamW after a step."""
    config = ParallelConfig(hybrid_shard_degree=world_size)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(max(1, parameters // WIDTH**2))]
    model = parallelize(nn.Sequential(*layers), build_mesh(config.topology(world_size), "cpu"), config)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(1, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def actions(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> dict[str, Callable[[], Any]]:
    """What is timed, by `contender action`."""
    writer = CheckpointWriter()

    def state() -> dict[str, Any]:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        return {"model": of_model, "optimizer": of_optimizer}

    return {
        "hyperpod save": lambda: writer.save(folder / "hyperpod", model=model, optimizers=[optimizer]),
        "hyperpod load": lambda: load_checkpoint(folder / "hyperpod", model=model, optimizers=[optimizer]),
        "dcp save": lambda: dcp.save(state(), storage_writer=dcp.FileSystemWriter(folder / "dcp", overwrite=True)),
        "dcp load": lambda: dcp.load(state(), checkpoint_id=folder / "dcp"),
    }


def forget(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Set all values to zero."""
    with torch.no_grad():
        for value in values(model, optimizer):
            value.zero_()


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """This rank's part of the parameters and of the optimizer's state."""
    found = [*model.parameters(), *(each for state in optimizer.state.values() for each in state.values())]
    return [getattr(each, "_local_tensor", each).detach() for each in found]


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """A number that depends on each value of this rank's shards."""
    return sum(float(each.double().square().sum()) for each in values(model, optimizer))


warnings.filterwarnings("ignore", message="Detected an existing checkpoint")


def rank_main(rank: int, world_size: int, parameters: int, rounds: int, folder: str, out: str) -> None:
    """One rank: all rounds; the first rank writes down the times of the slowest."""
    torch.set_num_threads(1)
    dist.init_process_group("hyperpod", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model, optimizer = trained(parameters, world_size)
    todo, saved = actions(model, optimizer, Path(folder)), digest(model, optimizer)
    seconds: dict[str, list[float]] = {name: [] for name in todo}
    for turn in range(rounds + 1):  # the first warms up
        for contender in CONTENDERS if turn % 2 else CONTENDERS[::-1]:
            for action in ACTIONS:
                if action == "load":
                    forget(model, optimizer)
                dist.barrier()
                began_s = time.perf_counter()
                todo[f"{contender} {action}"]()
                took = torch.tensor(time.perf_counter() - began_s, dtype=torch.float64)
                dist.all_reduce(took, op=dist.ReduceOp.MAX)
                if turn:
                    seconds[f"{contender} {action}"].append(float(took))
            if digest(model, optimizer) != saved:
                raise SystemExit(f"{contender} did not load what it had saved")
    if rank == 0:
        Path(out).write_text(json.dumps(seconds))
    dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--parameters", type=int, default=60 * 10**6)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", type=Path, help="write the times there")
    parser.add_argument("--quick", action="store_true", help="4 M parameters, 2 rounds")
    args = parser.parse_args(arguments)
    parameters, rounds = (4 * 10**6, 2) if args.quick else (args.parameters, args.rounds)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "seconds.json")
        spawn(rank_main, (args.ranks, parameters, rounds, folder, str(out)), nprocs=args.ranks)
        seconds: dict[str, list[float]] = json.loads(out.read_text())
    gigabytes = 3 * 4 * parameters / args.ranks / 1e9
    for action in ACTIONS:
        ours, theirs = seconds[f"hyperpod {action}"], seconds[f"dcp {action}"]
        ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
        more = statistics.median(a - b for a, b in zip(ours, theirs, strict=True)) / gigabytes
        sys.stdout.write(
            f"  {action}: hyperpod / dcp {statistics.median(ratios):.2f} ({ratios[0]:.2f} .. {ratios[-1]:.2f}), "
            f"{more:+.2f} s a GB on a rank; hyperpod {statistics.median(ours):.2f} s\n"
        )
    if args.json:
        args.json.write_text(json.dumps(seconds, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
