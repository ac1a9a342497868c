"""For training loops written by hand: is this job about to change, so that it is time to save and to end?"""

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from hyperpod_plugins.elastic.launcher.signal_queue import NOTICES
from hyperpod_plugins.elastic.membership.admission import leaving_of, pending_world, world_or_none
from hyperpod_plugins.elastic.store.job_store import JobStore
from hyperpod_plugins.env import JobEnv
from hyperpod_plugins.errors import ConfigError

_ASK_EVERY_S = 1.0


class _Notices:
    """What this process has heard."""

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
            raise ConfigError("call watch_elastic_events() in the main thread: only there can signals be handled.")
        self._pid = os.getpid()
        for number in (signal.SIGTERM, *NOTICES):
            self._before[number] = signal.signal(number, self._hear)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a process that a loader has forked, which is to end
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.is_told = True
        before = self._before[number]
        if callable(before):
            before(number, frame)

    def is_planned(self) -> bool:
        """Whether the job store of the job says that it is about to change; asked at most once a second."""
        now_s = time.monotonic()
        if now_s - self._asked_s < _ASK_EVERY_S:
            return self._is_planned
        self._asked_s = now_s
        try:
            self._is_planned = self._ask()
        except dist.DistError:
            self._is_planned = True  # the agent that serves the store has ended, and the job with it
        return self._is_planned

    def _ask(self) -> bool:
        if self._job_store is None:
            job = JobEnv.from_environ()
            if job is None:
                return False
            self._job_store = JobStore.connect(job)
        world = world_or_none(self._job_store)
        if world is None:
            return False
        return pending_world(self._job_store) > world.number or bool(leaving_of(self._job_store, world.worker_ids))


_notices = _Notices()


def watch_elastic_events() -> None:
    """From now on SIGTERM, SIGUSR1 and SIGUSR2 do not end this process; `elastic_event_detected` tells of them.

    Call it first thing in the program, in the main thread: until then each of these signals ends the process. Handlers
    that were there before are called too.

    Raises:
        ConfigError: this is not the main thread.
    """
    _notices.watch()


def elastic_event_detected() -> bool:
    """Whether the job is about to change; for all ranks to call after each step, and the same on all of them.

    True from the first call on which any rank had got SIGTERM, SIGUSR1 or SIGUSR2 since it began to watch (see
    `watch_elastic_events`; the first call begins it too), or on which rank 0 has found, asking at most once a second,
    that a job which recovers in place has planned a world of another size or has a node that got notice. `hyperpodrun`
    passes notices on to the workers of a program that does not change its size in place.

    It does not see the loss of a process, nor nodes that wait for a job whose program cannot take them in.

    Costs one all-reduce of one number over the default process group; without a group each process speaks for itself.

    Raises:
        ConfigError: the first call, and not in the main thread.
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
    """A kind of device that the default group communicates on: the CPU where it can, so that no GPU waits."""
    kinds = [part.partition(":")[0] for part in dist.get_backend_config().split(",")]
    return "cpu" if "cpu" in kinds else kinds[0]
