"""Workers of torchrun's agent: they inherit the environment of the agent process, which is this one."""

import contextlib
import math
import os
import select
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hyperpod_plugins.elastic.process import RESOLVER_OPTIONS, signal_name
from hyperpod_plugins.elastic.rendezvous.slots import NodeAssignment
from hyperpod_plugins.env import JobEnv

_GRACE_S = 2.0
"""How long workers may run on after another one of their node has failed.

torchrun ends them too, but waits 30 s for a worker that catches SIGTERM and keeps waiting for its peers.
"""


def prepare_agent_environ() -> None:
    """Set variables of the agent process; call it before the agent opens a store and assigns ranks."""
    environ = os.environ  # noqa: TID251  (written, not read)
    environ.setdefault("RES_OPTIONS", RESOLVER_OPTIONS)
    environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    environ.pop("TORCH_ELASTIC_WORKER_IDENTICAL", None)  # with it, torch's agent does not report its worker count


def set_worker_environ(job: JobEnv) -> None:
    """Set the variables of the job store for torchrun's workers that start later; `worker_environ` is for ours."""
    os.environ.update(job.to_environ())  # noqa: TID251  (written, as torchrun's workers inherit it)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedWorker:
    """A failed worker."""

    assignment: NodeAssignment
    """The assignment for which it was started."""
    worker_id: int
    how: str
    """How it failed, in words; empty for SIGTERM, which torchrun sends when another worker has failed."""


class WorkerMonitor:
    """Watches the worker processes of torchrun's agent, which is this process; it has none under `HyperPodAgent`."""

    def __init__(self) -> None:
        """Create a monitor without workers."""
        self._workers: dict[int, tuple[int, int, NodeAssignment]] = {}  # pidfd -> (worker_id, pid, assignment)
        self._to_kill: set[int] = set()
        self._doomed_s = math.inf
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)

    def wake(self) -> None:
        """Make `watch` return; may be called from any thread."""
        os.eventfd_write(self._wake, 1)

    def adopt(self, assignment: NodeAssignment) -> bool:
        """Find workers that were started for an assignment since the last call; returns whether any are known."""
        known = {pid for _, pid, _ in self._workers.values()}
        for worker_id, pid in _children(assignment.incarnation):
            if worker_id in assignment.worker_ids and pid not in known:
                with contextlib.suppress(ProcessLookupError):
                    self._workers[os.pidfd_open(pid)] = (worker_id, pid, assignment)
        return bool(self._workers)

    def kill(self, assignment: NodeAssignment, worker_id: int) -> None:
        """Kill a worker; torchrun handles its exit."""
        _kill(pid for other, pid, whose in self._workers.values() if other == worker_id and whose is assignment)

    def kill_all(self) -> None:
        """Kill all workers before this process exits at once, as torchrun would leave them behind."""
        _kill(pid for _, pid, _ in list(self._workers.values()))

    def watch(self, until_s: float) -> FailedWorker | None:
        """Wait until a worker fails, or until `until_s` of the monotonic clock; returns the failed worker, if any."""
        while (left_s := min(until_s, self._doomed_s) - time.monotonic()) > 0:
            for descriptor in self._ready(left_s):
                if descriptor == self._wake:
                    os.eventfd_read(self._wake)
                    return None
                worker_id, _, assignment = self._workers.pop(descriptor)
                how = _how_it_failed(descriptor)
                os.close(descriptor)
                if how is not None:
                    return FailedWorker(assignment=assignment, worker_id=worker_id, how=how)
        if time.monotonic() >= self._doomed_s:
            _kill(pid for _, pid, _ in self._workers.values() if pid in self._to_kill)
            self._doomed_s = math.inf
        return None

    def _ready(self, timeout_s: float) -> list[int]:
        poll = select.poll()
        for descriptor in (self._wake, *self._workers):
            poll.register(descriptor, select.POLLIN)
        return [descriptor for descriptor, _ in poll.poll(1000 * timeout_s)]

    def kill_after_grace(self) -> None:
        """Kill the present workers after a grace period of `_GRACE_S`, while `watch` is called."""
        self._to_kill = {pid for _, pid, _ in self._workers.values()}
        self._doomed_s = time.monotonic() + _GRACE_S


def _kill(pids: Iterable[int]) -> None:
    """Kill processes and all that they have started: torchrun gives each worker a session of its own."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _children(incarnation: int) -> Iterator[tuple[int, int]]:
    """Rank and pid of each child of this process that is a worker of this incarnation."""
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread or process has ended meanwhile
            for pid in (task / "children").read_text().split():
                lines = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                environ = dict(line.split(b"=", 1) for line in lines if b"=" in line)
                if b"RANK" in environ and environ.get(b"HYPERPOD_INCARNATION") == str(incarnation).encode():
                    yield int(environ[b"RANK"]), int(pid)


def _how_it_failed(descriptor: int) -> str | None:
    """How an ended process failed; None if it succeeded, or if torchrun has reaped it already."""
    try:
        end = os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if end is None or (end.si_code == os.CLD_EXITED and end.si_status == 0):
        return None
    if end.si_code == os.CLD_EXITED:
        return f"ended with exit code {end.si_status}"
    return "" if end.si_status == signal.SIGTERM else f"was killed by {signal_name(end.si_status)}"
