"""Detection of elastic events for hand-written loops: whether the job is about to change, so that the loop saves."""

import logging
import os
import signal
import threading
import time
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from hyperpod_plugins.elastic.launcher.signal_queue import NOTICES
from hyperpod_plugins.elastic.membership.admission import pending_world, preempted_workers, world_or_none
from hyperpod_plugins.elastic.store.job_store import JobStore
from hyperpod_plugins.env import JobEnv
from hyperpod_plugins.errors import ConfigError

log = logging.getLogger(__name__)
_ASK_EVERY_S = 1.0


class _Notices:
    """Preemption notices that this process has received, and changes of size that the job store announces."""

    def __init__(self) -> None:
        self.is_told = False
        self._pid = 0
        self._before: dict[int, Any] = {}
        self._job_store: JobStore | None = None
        self._asked_s = -_ASK_EVERY_S
        self._is_planned = False

    def watch(self) -> None:
        if self._pid == os.getpid():
            return
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError("call watch_elastic_events() in the main thread: Python handles signals only there.")
        self._pid = os.getpid()
        for number in (signal.SIGTERM, *NOTICES):
            self._before[number] = signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # forked by a data loader: such a process must exit
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.is_told = True
        before = self._before[number]
        if callable(before):
            before(number, frame)

    def is_planned(self) -> bool:
        """Whether the job store says that the job is about to change; reads the store at most once a second."""
        now_s = time.monotonic()
        if now_s - self._asked_s < _ASK_EVERY_S:
            return self._is_planned
        self._asked_s = now_s
        try:
            self._is_planned = self._read_store()
        except dist.DistError as error:
            log.warning("the store of the job does not answer: %s", error)
            job = JobEnv.from_environ()
            if job is not None and not job.etcd_url:  # which may answer again
                self._is_planned = True  # the agent that serves the store has exited, and the job with it
        return self._is_planned

    def _read_store(self) -> bool:
        if self._job_store is None:
            job = JobEnv.from_environ()
            if job is None:
                return False
            self._job_store = JobStore.connect(job)
        world = world_or_none(self._job_store)
        if world is None:
            return False
        return pending_world(self._job_store) > world.number or bool(
            preempted_workers(self._job_store, world.worker_ids)
        )


_notices = _Notices()


def watch_elastic_events() -> None:
    """Catch SIGTERM, SIGUSR1 and SIGUSR2 from now on, for `elastic_event_detected` to report.

    Call this first in the program, in the main thread: until then each of these signals ends the process. Handlers
    that were installed before are still called.

    Raises:
        ConfigError: not called in the main thread.
    """
    _notices.watch()


def elastic_event_detected() -> bool:
    """Return whether the job is about to change; all ranks call this after each step and get the same answer.

    The answer is True once any rank has received SIGTERM, SIGUSR1 or SIGUSR2 since it began to watch (see
    `watch_elastic_events`; the first call of this function also begins to watch). It is also True once rank 0 finds
    in the job store, which it reads at most once a second, that a job with in-place recovery has planned a world of
    another size or has a worker with a preemption notice, or that the agent which serves the store has exited.
    `hyperpodrun` passes notices on to the workers of a program that does not change its size in place.

    It does not detect the loss of a process, nor nodes that wait for a job whose program cannot take them in.

    Costs one all-reduce of one number over the default process group; without a process group each process answers
    for itself.

    Raises:
        ConfigError: this is the first call, and not in the main thread.
    """
    _notices.watch()
    is_connected = dist.is_available() and dist.is_initialized()
    is_first = not is_connected or dist.get_rank() == 0
    heard = _notices.is_told or (is_first and _notices.is_planned())
    if not is_connected:
        return heard
    vote = torch.full((1,), float(heard), device=_device())
    dist.all_reduce(vote, op=dist.ReduceOp.MAX)
    return bool(vote.item())


def _device() -> str:
    """Device type that the default group communicates on: the CPU where possible, to avoid a wait for the GPU."""
    kinds = [part.partition(":")[0] for part in dist.get_backend_config().split(",")]
    return "cpu" if "cpu" in kinds else kinds[0]
