"""One contender's rank processes: started once, then blocked in a pipe until it is their turn.

Inside a rank, `train(turns, **kwargs)` sees its turns as a plain iterator that yields once a step:

    def train(turns, width):
        ...                                 # set up: process group, model, optimizer
        for step in turns:                  # blocks between turns, ends when the benchmark does
            ...                             # one training step

The clock runs from one `next` to the next, so it sees everything between two steps, a framework's loop included.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_PRELOADED = ["torch.distributed.fsdp", "torch._dynamo"]  # the first optimizer step imports the second: seconds
# glibc gives large freed blocks back to the kernel and asks for them again: up to 6,000 page faults a step of 105 ms,
# or none, as it happens in a process, and 5 % of its time. For all contenders alike it keeps them.
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(2**31 - 1))
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**31 - 1))
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(_PRELOADED)


class ContenderFailed(RuntimeError):
    """A rank of a contender raised, died, or did not answer before its deadline."""


def cpu_seconds() -> dict[str, float]:
    """Processor time of this process, all threads: what a step costs, however long it waited for a busy machine."""
    return {"cpu_s": time.process_time()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way to run the workload."""

    name: str
    train: Callable[..., Any]
    """`train(turns, **kwargs)`, called on every rank; importable by name; what it returns must be picklable."""
    world_size: int
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    meter: Callable[[], dict[str, float]] = cpu_seconds
    """Counters that only grow (bytes, calls), read on every rank at both ends of a turn; reported per step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a contender shall do with its turn."""

    lead_in: int
    """Steps that are not timed: caches of a process that slept are cold."""
    steps: int
    """Steps that are timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one rank saw in one turn."""

    start_s: float
    end_s: float
    measures: dict[str, float]
    """Growth of every counter during the timed steps."""


def preload(modules: Sequence[str]) -> None:
    """Import further modules once in the fork server instead of once in each rank; before the first rank starts."""
    _context.set_forkserver_preload([*_PRELOADED, *modules])


class RankGroup:
    """The processes of one contender, seen from outside. Every wait has a deadline; leaving the block kills them."""

    def __init__(self, contender: Contender, folder: Path) -> None:
        self.contender = contender
        # The ranks' rendezvous; port 0 lets the kernel choose, so that contenders never collide.
        self._store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=120)
        )
        self._logs = [folder / f"{contender.name}-{rank}.log".replace("/", "_") for rank in range(contender.world_size)]
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []

    def __enter__(self) -> "RankGroup":
        for rank, log in enumerate(self._logs):
            ours, theirs = _context.Pipe()
            environ = torchrun_environ(rank, self.contender.world_size, self._store.port)
            process = _context.Process(target=_rank_main, args=(self.contender, theirs, environ, str(log)), daemon=True)
            self._pipes.append(ours)
            self._processes.append(process)
            process.start()
            theirs.close()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join(10)
        for pipe in self._pipes:
            pipe.close()

    def wait_ready(self, timeout_s: float) -> None:
        """Return when every rank has set itself up and asks for its first step."""
        self._gather("ready", timeout_s)

    def take_turn(self, order: Order, timeout_s: float) -> list[Turn]:
        """Let the ranks run `order` while everybody else waits; their reports, by rank."""
        self._tell(order)
        return self._gather("turn", timeout_s)

    def finish(self, timeout_s: float) -> list[Any]:
        """End the ranks' iteration and return what `train` returned, by rank."""
        self._tell(None)
        return self._gather("result", timeout_s)

    def _tell(self, order: Order | None) -> None:
        for pipe in self._pipes:
            # A rank that is gone has left its last words in the pipe or the log: _gather reports them.
            with suppress(BrokenPipeError):
                pipe.send(order)

    def _gather(self, kind: str, timeout_s: float) -> list[Any]:
        deadline_s = time.monotonic() + timeout_s
        answers: dict[int, Any] = {}
        while len(answers) < len(self._pipes):
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
            ready = wait(list(waiting), timeout=max(0.0, deadline_s - time.monotonic()))
            if not ready:
                late = ", ".join(map(str, waiting.values()))
                raise self._failure(f"rank {late} did not report '{kind}' within {timeout_s:.0f} s")
            for pipe in ready:
                rank = waiting[pipe]
                try:
                    answer, value = pipe.recv()
                except (EOFError, ConnectionResetError):
                    raise self._failure(f"rank {rank} died before it reported '{kind}'") from None
                if answer != kind:
                    raise self._failure(f"rank {rank} reported '{answer}' instead of '{kind}':\n{value}")
                answers[rank] = value
        return [answers[rank] for rank in range(len(self._pipes))]

    def _failure(self, cause: str) -> ContenderFailed:
        tails = [f"--- log of rank {rank} ---\n{_tail(log)}" for rank, log in enumerate(self._logs)]
        return ContenderFailed("\n".join([f"contender '{self.contender.name}': {cause}", *tails]))


def torchrun_environ(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The variables torchrun would set on one node, with a store that the benchmark itself hosts."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "benchmark",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": "1",
    }


def take_turns(pipe: Connection, meter: Callable[[], dict[str, float]]) -> Iterator[int]:
    """Yield the number of each step to run; time and meter the timed ones of every turn."""
    step = 0
    pipe.send(("ready", None))
    while (order := pipe.recv()) is not None:
        for _ in range(order.lead_in):
            yield step
            step += 1
        before, start_s = meter(), now_s()
        for _ in range(order.steps):
            yield step
            step += 1
        end_s, after = now_s(), meter()
        measures = {name: after[name] - before[name] for name in after}
        pipe.send(("turn", Turn(start_s=start_s, end_s=end_s, measures=measures)))


def now_s() -> float:
    """The clock all processes of this machine share, after queued device work has ended."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.monotonic()


def _rank_main(contender: Contender, pipe: Connection, environ: Mapping[str, str], log: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the benchmark's to handle: it kills us
    threading.Thread(target=_die_with_benchmark, daemon=True).start()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(environ)
    torch.set_num_threads(1)
    try:
        result = contender.train(take_turns(pipe, contender.meter), **contender.kwargs)
        pipe.send(("result", result))
    except BaseException:  # noqa: BLE001  a process ends here, and the benchmark must learn why
        pipe.send(("error", traceback.format_exc()))
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: tearing down process groups whose peers are already gone can abort or block.
    os._exit(0)


def _die_with_benchmark() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _tail(log: Path, num_bytes: int = 3000) -> str:
    return log.read_bytes()[-num_bytes:].decode(errors="replace") if log.exists() else "(empty)"
