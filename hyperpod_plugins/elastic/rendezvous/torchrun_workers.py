"""Workers of an agent that is not ours: torchrun starts them, and they inherit the environment of its process."""

import contextlib
import math
import os
import select
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hyperpod_plugins.elastic.process import RESOLVER, signal_name
from hyperpod_plugins.elastic.rendezvous.slots import NodeAssignment
from hyperpod_plugins.env import JobEnv

_GRACE_S = 2.0
"""How long workers may go on after another one of their node has failed.

torchrun ends them anyway, but waits 30 s for one that catches SIGTERM and goes on waiting for its peers.
"""


def prepare() -> None:
    """Set what must hold in the agent itself, before it opens a store and assigns ranks."""
    environ = os.environ  # noqa: TID251  (written, not read)
    environ.setdefault("RES_OPTIONS", RESOLVER)
    environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    environ.pop("TORCH_ELASTIC_WORKER_IDENTICAL", None)  # with it, torch's agent tells nobody how many workers it has


def set_worker_environ(job: JobEnv) -> None:
    """Tell workers that this process starts later how to reach the job store, as `worker_environ` does for our own."""
    os.environ.update(job.to_environ())  # noqa: TID251  (written, for torchrun's workers inherit it)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A worker that has come to a bad end."""

    assignment: NodeAssignment
    """What it was started for."""
    rank: int
    how: str
    """In words; empty for SIGTERM, which torchrun sends when another one has failed."""


class WorkerMonitor:
    """The worker processes of torchrun's agent, which is this process; empty under an agent of ours."""

    def __init__(self) -> None:
        """Nobody is known yet."""
        self._workers: dict[
            int, tuple[int, int, NodeAssignment]
        ] = {}  # descriptor of the process: (rank, pid, its seat)
        self._doomed: set[int] = set()
        self._doomed_s = math.inf
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)

    def wake(self) -> None:
        """Have `watch` return."""
        os.eventfd_write(self._wake, 1)

    def adopt(self, assignment: NodeAssignment) -> bool:
        """Find the workers that have been started for a seat since the last call; whether there are any."""
        known = {pid for _, pid, _ in self._workers.values()}
        for rank, pid in _children(assignment.incarnation):
            if rank in assignment.ranks and pid not in known:
                with contextlib.suppress(ProcessLookupError):
                    self._workers[os.pidfd_open(pid)] = (rank, pid, assignment)
        return bool(self._workers)

    def kill(self, assignment: NodeAssignment, rank: int) -> None:
        """End a worker; torchrun sees to the rest."""
        _kill(pid for other, pid, whose in self._workers.values() if other == rank and whose is assignment)

    def kill_all(self) -> None:
        """End all workers, for this process ends at once, and torchrun would leave them behind."""
        _kill(pid for _, pid, _ in list(self._workers.values()))

    def watch(self, until_s: float) -> Failed | None:
        """Wait until one of them has failed, and tell how, or until a time of the monotonic clock."""
        while (left_s := min(until_s, self._doomed_s) - time.monotonic()) > 0:
            for descriptor in self._ready(left_s):
                if descriptor == self._wake:
                    os.eventfd_read(self._wake)
                    return None
                rank, _, assignment = self._workers.pop(descriptor)
                how = _how_it_failed(descriptor)
                os.close(descriptor)
                if how is not None:
                    return Failed(assignment=assignment, rank=rank, how=how)
        if time.monotonic() >= self._doomed_s:
            _kill(pid for _, pid, _ in self._workers.values() if pid in self._doomed)
            self._doomed_s = math.inf
        return None

    def _ready(self, timeout_s: float) -> list[int]:
        poll = select.poll()
        for descriptor in (self._wake, *self._workers):
            poll.register(descriptor, select.POLLIN)
        return [descriptor for descriptor, _ in poll.poll(1000 * timeout_s)]

    def kill_after_grace(self) -> None:
        """End all that run now in a moment."""
        self._doomed = {pid for _, pid, _ in self._workers.values()}
        self._doomed_s = time.monotonic() + _GRACE_S


def _kill(pids: Iterable[int]) -> None:
    """End processes and all that they have started: torchrun gives each worker a session of its own."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _children(incarnation: int) -> Iterator[tuple[int, int]]:
    """Rank and pid of each child of this process that is a worker of this incarnation."""
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread, or the process, has ended meanwhile
            for pid in (task / "children").read_text().split():
                lines = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                environ = dict(line.split(b"=", 1) for line in lines if b"=" in line)
                if b"RANK" in environ and environ.get(b"HYPERPOD_INCARNATION") == str(incarnation).encode():
                    yield int(environ[b"RANK"]), int(pid)


def _how_it_failed(descriptor: int) -> str | None:
    """How a process that has ended did so; None where it ended well, or torchrun was faster and took the news."""
    try:
        end = os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if end is None or (end.si_code == os.CLD_EXITED and end.si_status == 0):
        return None
    if end.si_code == os.CLD_EXITED:
        return f"ended with exit code {end.si_status}"
    return "" if end.si_status == signal.SIGTERM else f"was killed by {signal_name(end.si_status)}"
