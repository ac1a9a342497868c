"""Detects what hangs: ranks, from the last heartbeat of each, and the device of this rank, whose queue must drain.

`Watchdog` sends the heartbeats of this process. A rank that hangs sends no heartbeats, or reports that it is somewhere
other than in the collective where the others wait for it. A long collective alone is not evidence of a hang. Inside a
step, and for a rank that loads its data, the limit follows the job's own step time. A rank outside a step (a
validation, a callback of the first rank) gets the general limit, even from ranks that already wait for it in their next
step.

`synchronize_or_raise` waits for an asynchronous device: its pending work cannot be voted for, written or shown yet.

[Note: clocks] No clock of another machine is read. A heartbeat carries a number that counts up, and a reader measures
on its own monotonic clock how long that number has been unchanged; see `HeartbeatAges`.
"""

import re
import sys
import threading
import time
from collections import deque
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from types import FrameType
from typing import Any, NamedTuple, Protocol, Self

import torch
import torch.distributed as dist

from hyperpod_plugins.comm import Phase, current_wait, group_health, record_queue
from hyperpod_plugins.elastic import FailureRecord, JobStore
from hyperpod_plugins.elastic.store.world import WorldPlan
from hyperpod_plugins.env import JobEnv
from hyperpod_plugins.errors import ConfigError, DeviceHung
from hyperpod_plugins.recovery.plan import NO_STATE

HEARTBEATS_MISSED_S = 5.0
"""Longest silence of a process that counts as alive."""
_PART_HEARD = 0.5
"""Longest silence, as a fraction of the limit, for which a rank's last heartbeat is believed to be still true."""
_HEARTBEAT_S = 1.0
_STAGGER_S = 0.01
_LOOK_S = 1.0
_PART_OF_LIMIT = 0.125
_LOOKS_A_SECOND = 200.0
"""Limit for all ranks together; each look reads the heartbeats of all ranks."""
_LOADING = re.compile(r"/torch/utils/data/|/loops/fetchers\.py$|/hyperpod_plugins/data/loader\.py$")
_DRAIN_LIMIT_S = 30.0
_DRAIN_POLL_S = 0.0001


@dataclass(frozen=True, slots=True, kw_only=True)
class HangPolicy:
    """How long a wait in a collective must last before it counts as a hang."""

    floor_s: float = 30.0
    """Shortest wait in a collective of a step, in seconds, that counts as a hang."""
    factor: float = 10.0
    """The same, as a multiple of the job's median step time; the longer of the two applies."""
    early_s: float = 300.0
    """The same before the step time is known, if longer than `floor_s`: the first steps compile and warm up."""
    outside_s: float = 900.0
    """Wait for a rank outside a step, in seconds, that counts as a hang."""

    def __post_init__(self) -> None:
        """Check the values."""
        for name, value in asdict(self).items():
            if value <= 0:
                raise ConfigError(f"{name} of HangPolicy must be positive, but is {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """What one rank reports about itself, about once a second."""

    incarnation: int
    generation: int
    committed: int
    activity: str
    """What its main thread is doing, in words."""
    in_step: bool
    """Whether its main thread is inside a step."""
    is_loading: bool
    """Whether it is fetching its next batch."""
    waits_for: str
    """Process group in whose collective its thread or its device waits; empty if it does not wait."""
    waited_s: float
    """Seconds it has waited in this collective."""
    collective: int = 0
    """Number of this collective in its group, counted within the generation; 0 if unknown."""
    sequence: int
    """Counts the heartbeats of this process; if it is unchanged, there is no new heartbeat."""
    world_number: int = 0
    """Number of the world it is in."""
    in_world_s: float = 0.0
    """Seconds since it became a member of that world."""

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain values for the job store."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`."""
        return cls(**values)

    @property
    def is_outside(self) -> bool:
        """Whether it runs code of the program outside a step: a hook, a save, a validation."""
        return not (self.in_step or self.is_loading or self.waits_for)

    def is_alive(self, incarnation: int, silent_s: float, limit_s: float = HEARTBEATS_MISSED_S) -> bool:
        """Whether it is from process `incarnation` and not older than `limit_s` seconds."""
        return self.incarnation == incarnation and silent_s <= limit_s


class Status(NamedTuple):
    """What the main thread of a member does, as its other threads see it; each step replaces it several times."""

    activity: str = "setting up"
    in_step: bool = False
    committed: int = NO_STATE
    generation: int = 0
    entered_s: float | None = None
    """When the process joined its present world, on its monotonic clock; None until it has."""


class HeartbeatAges:
    """Measures how long each rank has sent no new heartbeat, on this process's own clock; not thread-safe."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[tuple[int, int], float]] = {}

    def update(self, heartbeats: Mapping[int, Heartbeat], now_s: float) -> dict[int, float]:
        """Compare the present heartbeats with those at the last look.

        Args:
            heartbeats: The last heartbeat of each worker that has sent one, by worker_id.
            now_s: Time of this look on this process's monotonic clock.

        Returns:
            Seconds of silence of each worker in `heartbeats`: a lower bound, because a heartbeat may have been sent
            just after the last look, and may already be old at the first.
        """
        for worker_id, heartbeat in heartbeats.items():
            said = heartbeat.incarnation, heartbeat.sequence
            if worker_id not in self._seen or self._seen[worker_id][0] != said:
                self._seen[worker_id] = said, now_s
        return {worker_id: now_s - self._seen[worker_id][1] for worker_id in heartbeats}


@dataclass(frozen=True, slots=True, kw_only=True)
class HangSuspect:
    """A worker that is suspected of hanging."""

    worker_id: int
    incarnation: int
    cause: str


class StepTimes:
    """The job's own step times, from its last steps."""

    def __init__(self, num_steps: int = 20, num_before: int = 3) -> None:
        """Use the last `num_steps` steps, and skip the first `num_before`, which warm up."""
        self._durations_s: deque[float] = deque(maxlen=num_steps)
        self._before = num_before
        self._last_s: float | None = None

    def record_commit(self, now_s: float) -> None:
        """Note that a step was committed."""
        if self._last_s is not None:
            if self._before > 0:
                self._before -= 1
            else:
                self._durations_s.append(now_s - self._last_s)
        self._last_s = now_s

    def limit_s(self, policy: HangPolicy) -> float:
        """Longest wait inside a step, in seconds, that does not count as a hang."""
        if not self._durations_s:
            return max(policy.floor_s, policy.early_s)
        return max(policy.floor_s, policy.factor * median(self._durations_s))


def is_loading(frame: FrameType | None) -> bool:
    """Whether a thread, given its innermost frame, is in a data loader or in Lightning's data fetcher."""
    while frame is not None:
        if _LOADING.search(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False


def look_every_s(limit_s: float, world_size: int) -> float:
    """Seconds between two looks at the heartbeats of all ranks, for a rank that waits but has not reached its limit.

    Silence is measured from the first look at an unchanged heartbeat, so some looks must come before the limit. They
    are rare enough that thousands of ranks can wait for one that computes for a long time.
    """
    return max(_LOOK_S, limit_s * _PART_OF_LIMIT, world_size / _LOOKS_A_SECOND)


def furthest_behind(
    heartbeats: Mapping[int, Heartbeat], own: Heartbeat, silent_s: Mapping[int, float], limit_s: float
) -> frozenset[int]:
    """Workers in the oldest incomplete collective of the group in which this rank waits for a later collective.

    Empty while any rank does not wait in a collective, because the ranks behind may be waiting for it. A rank that
    was stopped just after it reported that it waits is such a rank, too. So the result is also empty while any rank
    has been silent for half of the limit: its last heartbeat then dates from before this rank began to wait, since
    this rank has looked from an eighth of the limit on.
    """
    heard_s = _PART_HEARD * limit_s
    if any(
        not heartbeat.waits_for or silent_s.get(worker_id, 0.0) > heard_s for worker_id, heartbeat in heartbeats.items()
    ):
        return frozenset()
    behind = {
        worker_id: heartbeat.collective
        for worker_id, heartbeat in heartbeats.items()
        if heartbeat.generation == own.generation
        and heartbeat.waits_for == own.waits_for
        and 0 < heartbeat.collective < own.collective
    }
    oldest = min(behind.values(), default=0)
    return frozenset(worker_id for worker_id, number in behind.items() if number == oldest)


def diagnose(
    heartbeats: Mapping[int, Heartbeat],
    own: Heartbeat,
    limit_s: float,
    policy: HangPolicy,
    silent_s: Mapping[int, float],
) -> list[HangSuspect]:
    """Workers to be replaced, if this rank has waited too long.

    Args:
        heartbeats: Last heartbeat of each rank, including this one, by worker_id.
        own: Present heartbeat of this rank.
        limit_s: Longest wait inside a step, in seconds.
        policy: Limits outside a step.
        silent_s: Seconds for which each worker has sent no new heartbeat, from `HeartbeatAges`.
    """
    limit_s = limit_s if own.in_step else policy.outside_s
    if not own.waits_for or own.waited_s <= limit_s:
        return []
    behind = furthest_behind(heartbeats, own, silent_s, limit_s)
    found: list[HangSuspect] = []
    for worker_id, heartbeat in sorted(heartbeats.items()):
        silence_s = silent_s.get(worker_id, 0.0)
        is_granted_more = not (heartbeat.in_step or heartbeat.is_loading) and own.waited_s <= policy.outside_s
        if silence_s > limit_s and silence_s > HEARTBEATS_MISSED_S:
            cause = f"has not been heard of for {silence_s:.0f} s; it was {heartbeat.activity}"
        elif worker_id in behind:
            cause = (
                f"waits in collective {heartbeat.collective} of the {own.waits_for} group, which this rank has "
                f"completed; it is {heartbeat.activity}"
            )
        elif is_granted_more or heartbeat.waits_for or heartbeat.generation != own.generation:
            continue
        elif silence_s <= HEARTBEATS_MISSED_S:
            cause = (
                f"did not come to the {own.waits_for} collective for {own.waited_s:.0f} s; it is {heartbeat.activity}"
            )
        else:
            continue
        found.append(HangSuspect(worker_id=worker_id, incarnation=heartbeat.incarnation, cause=cause))
    return found


class WatchedMember(Protocol):
    """What `Watchdog` reads and calls of the member, in its own thread."""

    job: JobEnv
    worker_id: int
    hangs: HangPolicy
    step_times: StepTimes
    status: Status
    is_elastic: bool

    @property
    def world(self) -> WorldPlan:
        """The present world of this process."""
        ...

    @property
    def rank(self) -> int:
        """Its rank in this world."""
        ...

    def end(self, generation: int, failure: FailureRecord) -> FailureRecord:
        """End a generation; return what ended it first."""
        ...

    def poll_worlds(self) -> None:
        """Poll for requests and new worlds."""
        ...

    def on_lost_store(self, error: Exception) -> None:
        """Break the groups, because the job store is gone."""
        ...


class Watchdog:
    """A thread that sends a heartbeat and looks for ranks that hang, about once a second."""

    def __init__(self, member: WatchedMember, job_store: JobStore) -> None:
        """Use the connection `job_store`; call `start` and `stop` in the main thread."""
        self._member = member
        self._job_store = job_store
        self._ages = HeartbeatAges()
        self._num_sent = 0
        self._next_look_s = 0.0
        self._is_stopped = False

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name="hyperpod_heartbeat_loop", daemon=True).start()

    def stop(self) -> None:
        """Tell the thread to end after its present round."""
        self._is_stopped = True

    def _run(self) -> None:
        try:
            while not self._is_stopped:
                own = self._heartbeat()
                self._job_store.heartbeat(self._member.worker_id, own.to_dict())
                self._check_hangs(own)
                if self._member.is_elastic:
                    self._member.poll_worlds()
                time.sleep(_HEARTBEAT_S)
        except dist.DistError as error:
            if not self._is_stopped:
                self._member.on_lost_store(error)

    def _heartbeat(self) -> Heartbeat:
        wait, status = current_wait(), self._member.status
        self._num_sent += 1
        return Heartbeat(
            incarnation=self._member.job.incarnation,
            generation=status.generation,
            committed=status.committed,
            activity=status.activity,
            in_step=status.in_step,
            is_loading=not status.in_step and is_loading(_main_frame()),
            waits_for="" if wait is None else wait[0].name,
            waited_s=0.0 if wait is None else wait[2],
            collective=0 if wait is None else wait[1],
            sequence=self._num_sent,
            world_number=self._member.world.number,
            in_world_s=0.0 if status.entered_s is None else time.monotonic() - status.entered_s,
        )

    def _check_hangs(self, own: Heartbeat) -> None:
        """End the generation and have the hanging process killed, if this rank has waited for it too long."""
        if not own.waits_for:
            return
        limit_s = self._member.step_times.limit_s(self._member.hangs)
        first_s, now_s = min(limit_s, self._member.hangs.outside_s), time.monotonic()
        is_late = (
            own.waited_s > first_s + self._member.rank * _STAGGER_S
        )  # staggered by rank: the first rank to look ends the wait of all
        between_s = look_every_s(first_s, self._member.world.size)
        if not is_late and (own.waited_s < between_s or now_s < self._next_look_s):
            return
        self._next_look_s = now_s + between_s
        heard = self._job_store.heartbeats(self._member.world.worker_ids)
        heartbeats = {worker_id: Heartbeat.from_dict(each) for worker_id, each in heard.items()}
        silent_s = self._ages.update(heartbeats, time.monotonic())
        for suspect in diagnose(heartbeats, own, limit_s, self._member.hangs, silent_s) if is_late else ():
            failure = FailureRecord(
                kind="hang",
                cause=suspect.cause,
                worker_id=suspect.worker_id,
                incarnation=suspect.incarnation,
                step=own.committed,
            )
            if self._member.end(own.generation, failure).reporter == f"rank {self._member.rank}":
                self._job_store.ask_to_kill(suspect.worker_id, suspect.incarnation)


def _main_frame() -> FrameType | None:
    """The innermost frame of the main thread."""
    return sys._current_frames().get(threading.main_thread().ident or 0)  # pyright: ignore[reportPrivateUsage]


def synchronize_or_raise(device: torch.device) -> None:
    """Wait until all work queued on a device is done; returns at once on the CPU.

    While the groups are healthy there is no time limit: the other ranks find out which rank hangs. Once the groups
    are broken, their collectives are aborted, and the queue must drain.

    Raises:
        DeviceHung: The queue has not drained within 30 s after the groups broke.
    """
    is_done = record_queue(device)
    broken_s: float | None = None
    while is_done is not None and not is_done():
        now_s = time.monotonic()
        if group_health.cause is not None:
            broken_s = now_s if broken_s is None else broken_s
            if now_s - broken_s > _DRAIN_LIMIT_S:
                raise DeviceHung(
                    f"the queue of {device} did not end within {_DRAIN_LIMIT_S:.0f} s after its groups broke"
                )
        time.sleep(_DRAIN_POLL_S)


@contextmanager
def completed_outside_step(device: torch.device) -> Generator[None]:
    """Context for a collective outside a step whose result is used: at its end, the result is there, or an exception.

    The result of a collective that was aborted is what was in the memory before, see [Note: garbage that is read] in
    `comm/health.py`; a metric or a logged mean would show it. Inside a step the vote finds out, and nothing waits.

    Raises:
        PeerLost: a rank was lost; raised at the end of the context, outside a step only.
        DeviceHung: see `synchronize_or_raise`.
    """
    with group_health.checks_host_read():
        yield
    if group_health.phase is Phase.STRICT:
        synchronize_or_raise(device)
        with group_health.checks_host_read():
            pass
