"""The ways to recover that are compared, each as the commands that start its job.

The peers run with the settings that their documentation gives, and once more with the shortest intervals with which
they worked here. See docs/benchmarks.md for what each setting does.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.recovery_jobs.job import ROOT, Command, free_port

PROGRAMS = Path(__file__).parent
WORLD_SIZE = 2
# Stock torch for the peers: our package is not loaded by `import torch`.
STOCK = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONPATH": str(ROOT)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One contender."""

    name: str
    program: str
    """Ways with the same program share the undisturbed run that they are compared with."""
    commands: Callable[[Path], Sequence[Command]]
    """The processes of a job, given the Python that has the peers' packages."""
    package: str = ""
    """What must be installed there."""
    is_ours: bool = False


def torchrun(_: Path) -> list[Command]:
    """All workers are restarted, and load the last checkpoint.

    Without the variable, torch 2.13 lets the restarted ranks meet in a store that still holds dead addresses, which
    costs 0.4 s where it works; with it a rank of the job hosts a new store.
    """
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD_SIZE}"]
    environ = {**STOCK, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return [Command(argv=[*argv, "--max-restarts=3", str(PROGRAMS / "program_torchrun.py")], environ=environ)]


def torchft(python: Path, *, is_tuned: bool) -> list[Command]:
    """A replica group a rank, each with a torchrun that restarts it, and a lighthouse.

    As documented (`is_tuned` false), a dead replica is given up after 5 s of silence, and the others go on without
    it. Tuned and exact: half a second, and the quorum waits for the replacement, so no step is taken without it.
    """
    port = free_port()
    options = {"min_replicas": WORLD_SIZE if is_tuned else 1, "quorum_tick_ms": 50 if is_tuned else 100}
    options |= {"join_timeout_ms": 10000} | ({"heartbeat_timeout_ms": 500} if is_tuned else {})
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    lighthouse = [str(python.with_name("torchft_lighthouse")), "--bind", f"[::]:{port}", *arguments]
    replicas = [
        Command(
            argv=[
                *(str(python), "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=1"),
                *("--max-restarts=10", f"--master-port={free_port()}", str(PROGRAMS / "program_torchft.py")),
            ],
            environ={
                **STOCK,
                "REPLICA_GROUP_ID": str(rank),
                "TORCHFT_LIGHTHOUSE": f"http://localhost:{port}",
                "TORCHFT_EXACT": str(int(is_tuned)),
            },
        )
        for rank in range(WORLD_SIZE)
    ]
    return [Command(argv=lighthouse, environ=STOCK, is_service=True), *replicas]


def nvrx(python: Path, *, is_fast: bool) -> list[Command]:
    """Bare processes, one of them a spare, for nobody starts a new one; state comes from the last checkpoint.

    The intervals of its threads are 1 s by default; `is_fast` sets them to 0.1 s.
    """
    ports = (free_port(), free_port())
    num_processes = WORLD_SIZE + 1
    return [
        Command(
            argv=[str(python), str(PROGRAMS / "program_nvrx.py")],
            environ={
                **STOCK,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(num_processes),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(ports[0]),
                "NVRX_STORE_PORT": str(ports[1]),
                "NVRX_INTERVAL_S": "0.1" if is_fast else "1.0",
            },
        )
        for rank in range(num_processes)
    ]


def hyperpodrun(_: Path) -> list[Command]:
    """The lost worker is replaced; the other waits, and gives it its state."""
    argv = [sys.executable, "-m", "hyperpod_plugins.elastic.launcher.main", f"--nproc-per-node={WORLD_SIZE}"]
    return [Command(argv=[*argv, str(PROGRAMS / "program_hyperpod.py")])]


def torchrun_hyperpod(_: Path) -> list[Command]:
    """Stock torchrun with our rendezvous, one node a rank: the lost node's worker starts afresh, the other waits."""
    argv = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=3"]
    argv += ["--rdzv-backend=hyperpod", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=job"]
    return [Command(argv=[*argv, str(PROGRAMS / "program_hyperpod.py")]) for _ in range(WORLD_SIZE)]


WAYS = (
    Way(name="torchrun + checkpoint", program="torchrun", commands=torchrun),
    Way(
        name="torchft as documented",
        program="torchft",
        commands=lambda python: torchft(python, is_tuned=False),
        package="torchft",
    ),
    Way(
        name="torchft tuned, exact",
        program="torchft",
        commands=lambda python: torchft(python, is_tuned=True),
        package="torchft",
    ),
    Way(
        name="NVRx, one spare",
        program="nvrx",
        commands=lambda python: nvrx(python, is_fast=False),
        package="nvidia_resiliency_ext",
    ),
    Way(
        name="NVRx, one spare, fast",
        program="nvrx",
        commands=lambda python: nvrx(python, is_fast=True),
        package="nvidia_resiliency_ext",
    ),
    Way(name="hyperpodrun", program="hyperpod", commands=hyperpodrun, is_ours=True),
    Way(name="torchrun, rendezvous hyperpod", program="hyperpod", commands=torchrun_hyperpod),
)
