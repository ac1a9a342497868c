"""`JobView`: what `hyperpod top`, `hyperpod serve` and `hyperpod status --json` show of a running job. Plain data.

`job_view` is a pure function of what `report.watch` has read. Stores and ledgers are untrusted: a heartbeat or a status
with impossible values is ignored, and texts are cut and made printable.

[Note: clocks] As in `recovery.watchdog`, no clock of another machine is read. The age of a heartbeat is the time since
this process has first seen it, so it is a lower bound, and 0 at the first look.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, Self

from hyperpod_plugins.elastic.store.records import printable
from hyperpod_plugins.recovery.watchdog import HEARTBEATS_MISSED_S, Heartbeat
from hyperpod_plugins.report.live_ledgers import LedgerFigures
from hyperpod_plugins.report.run_report import Incident
from hyperpod_plugins.report.text import duration

RankState = Literal[
    "running",  # its last heartbeat is recent
    "late",  # no new heartbeat for 5 s
    "joining",  # a process of this rank has started, and has sent no heartbeat yet
    "gone",  # its process has ended, and no other one has started
]
JobState = Literal[
    "starting",  # no rank has begun to train
    "running",
    "ended",
    "unreachable",  # the store does not answer
]
MAX_RANKS = 4096
"""Ranks of a view; those beyond are counted only."""
NUM_INCIDENTS = 5
_MAX_TEXT = 200
_MAX_NUMBER = 1 << 53
_WINDOW_S = 30.0
_STATUS_FIELDS = ("ranks", "replicas", "shard_degree", "tensor_degree", "waiting", "asked", "generation")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """A rank, and where it stands."""

    rank: int
    worker_id: int
    incarnation: int
    """Of the present process of that worker."""
    state: RankState
    host: str = ""
    """Empty if no ledger says."""
    pid: int | None = None
    step: int | None = None
    """Number of steps it has committed; None before it knows."""
    generation: int | None = None
    activity: str = ""
    """What its main thread is doing, in words."""
    waits_for: str = ""
    """Process group in whose collective it waits; empty if it does not."""
    collective: int = 0
    """Number of this collective in its group; 0 if unknown."""
    waited_s: float = 0.0
    """Seconds that it had waited in it when it sent its heartbeat."""
    heartbeat_age_s: float | None = None
    """Seconds since this reader has first seen its last heartbeat; None if it has sent none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """A running job at one moment."""

    run_id: str
    state: JobState
    message: str = ""
    """Why it is in that state; empty while it runs."""
    round: int = 0
    """How often all processes have been restarted."""
    generation: int = 0
    num_ranks: int = 0
    num_replicas: int = 0
    """0 if the job has no ElasticTraining; so are the degrees."""
    shard_degree: int = 0
    tensor_degree: int = 0
    num_waiting: int = 0
    """Processes that wait to join."""
    num_requested: int = 0
    """Replicas that were requested; 0 without a request."""
    ranks: Sequence[RankView] = ()
    step: int | None = None
    """Steps committed by the rank that has committed most."""
    steps_per_s: float | None = None
    """Over the last 30 s; None until two looks have seen steps."""
    events: str = ""
    """Folder of the ledgers; empty if there are none. The figures below come from there, and are None without it."""
    part_read: float = 1.0
    """Part of the ledgers that has been read, in `0..1`: the figures cover that."""
    goodput: float | None = None
    ettr: float | None = None
    snapshot_age_s: float | None = None
    checkpoint_age_s: float | None = None
    incidents: Sequence[str] = ()
    """The last five, oldest first, one line each."""

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain values for JSON."""
        return asdict(self)

    def unreachable(self, message: str) -> Self:
        """The same, of a job whose store does not answer."""
        return replace(self, state="unreachable", message=_text(message))

    def ended(self, message: str) -> Self:
        """The same, of a job that has ended."""
        return replace(self, state="ended", message=_text(message), steps_per_s=None)

    def rank_of(self, number: int) -> RankView | None:
        """The rank of a number."""
        return next((each for each in self.ranks if each.rank == number), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReading:
    """What was read of a job at one moment."""

    run_id: str
    status: Mapping[str, Any]
    """As an agent answers to `hyperpod status`."""
    round: int = 0
    worker_ids: Sequence[int] = ()
    """In the order of their ranks."""
    incarnations: Mapping[int, int] = field(default_factory=dict[int, int])
    """Present incarnation of each worker."""
    heartbeats: Mapping[int, Heartbeat] = field(default_factory=dict[int, Heartbeat])
    """Those that are valid, by worker_id."""
    silent_s: Mapping[int, float] = field(default_factory=dict[int, float])
    """Age of each of them, from `HeartbeatAges`."""
    exited: frozenset[int] = frozenset()
    """Workers whose present process has ended."""
    steps_per_s: float | None = None
    events: str = ""
    figures: LedgerFigures | None = None


def job_view(reading: JobReading) -> JobView:
    """Make the view of what was read.

    Raises:
        ValueError: the status lacks a field, or one of its fields is not a count.
    """
    status = {name: _count(reading.status, name) for name in _STATUS_FIELDS}
    figures = LedgerFigures() if reading.figures is None else reading.figures
    ranks = [
        _rank_view(reading, figures, rank, worker_id) for rank, worker_id in enumerate(reading.worker_ids[:MAX_RANKS])
    ]
    return JobView(
        run_id=_text(reading.run_id),
        state="running" if ranks else "starting",
        message="" if ranks else "no rank has begun to train",
        round=reading.round,
        generation=status["generation"],
        num_ranks=status["ranks"],
        num_replicas=status["replicas"],
        shard_degree=status["shard_degree"],
        tensor_degree=status["tensor_degree"],
        num_waiting=status["waiting"],
        num_requested=status["asked"],
        ranks=ranks,
        step=max((each.step for each in ranks if each.step is not None), default=None),
        steps_per_s=_rounded(reading.steps_per_s),
        events=_text(reading.events),
        part_read=round(figures.part_read, 4),
        goodput=_rounded(figures.goodput),
        ettr=_rounded(figures.ettr),
        snapshot_age_s=_rounded(figures.snapshot_age_s),
        checkpoint_age_s=_rounded(figures.checkpoint_age_s),
        incidents=[incident_line(each, figures.began_s) for each in figures.incidents[-NUM_INCIDENTS:]],
    )


def _rank_view(reading: JobReading, figures: LedgerFigures, rank: int, worker_id: int) -> RankView:
    incarnation = reading.incarnations.get(worker_id, 0)
    heartbeat = reading.heartbeats.get(worker_id)
    host, pid = figures.places.get((worker_id, incarnation), ("", None))
    known = RankView(
        rank=rank, worker_id=worker_id, incarnation=incarnation, state="joining", host=_text(host), pid=pid
    )
    if worker_id in reading.exited:
        known = replace(known, state="gone")
    if heartbeat is None or heartbeat.incarnation < incarnation:  # that of a process that is gone
        return known
    silent_s = reading.silent_s.get(worker_id, 0.0)
    state = known.state if known.state == "gone" else "late" if silent_s > HEARTBEATS_MISSED_S else "running"
    return replace(
        known,
        state=state,
        step=heartbeat.committed if heartbeat.committed >= 0 else None,
        generation=heartbeat.generation,
        activity=heartbeat.activity,
        waits_for=heartbeat.waits_for,
        collective=heartbeat.collective,
        waited_s=round(heartbeat.waited_s, 3),
        heartbeat_age_s=round(silent_s, 3),
    )


def incident_line(incident: Incident, began_s: float) -> str:
    """An incident in one line, such as `after 20.3 s: rank 3: killed by SIGKILL; replace in 0.25 s, 0 steps lost`."""
    who = f"rank {incident.rank}: " if incident.rank is not None else ""
    line = f"after {duration(max(0.0, incident.at_s - began_s))}: {who}{_one_line(incident.cause)}"
    if incident.level == "none":
        return _text(line)
    is_resize = incident.kind == "resize"
    is_told = incident.steps_lost is not None and incident.kind != "restart" and (incident.steps_lost or not is_resize)
    lost = f", {incident.steps_lost} steps lost" if is_told else ""
    done = "resized" if is_resize and incident.level != "checkpoint" else _DONE.get(incident.level, incident.level)
    return _text(f"{line}; {done} in {duration(incident.total_s)}{lost}")


_DONE = {
    "retry": "step run again",
    "replace": "replaced",
    "snapshot": "back to a snapshot",
    "checkpoint": "all restarted",
}


def heartbeat_from(values: object) -> Heartbeat | None:
    """Convert what a store holds to a heartbeat; None if it is not one. Fields of a later version are left out."""
    if not isinstance(values, dict):
        return None
    given: dict[str, Any] = {}
    for each in fields(Heartbeat):
        if each.name not in values:
            continue  # the constructor refuses if it must be there
        value = _checked(values[each.name], each.type)
        if value is None:
            return None
        given[each.name] = value
    try:
        return Heartbeat.from_dict(given)
    except TypeError:
        return None


def _checked(value: object, kind: Any) -> int | float | str | None:
    """The value if it is of this kind, within bounds; else None."""
    if kind is str:
        return _text(value) if isinstance(value, str) else None
    if kind is bool:
        return value if isinstance(value, bool) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    if kind is int and not isinstance(value, int):
        return None
    return value if abs(value) <= _MAX_NUMBER else None


class StepRate:
    """Steps per second in a window of 30 s, from the steps that each look has seen."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def update(self, step: int | None, now_s: float) -> float | None:
        """Note the committed steps at a look; returns the rate, or None if there is none yet."""
        if step is None:
            return None
        if self._seen and step < self._seen[-1][1]:  # a return to earlier steps, or another fit
            self._seen.clear()
        self._seen.append((now_s, step))
        while len(self._seen) > 2 and self._seen[0][0] < now_s - _WINDOW_S:
            self._seen.popleft()
        (first_s, first), (last_s, last) = self._seen[0], self._seen[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else None


def _count(values: Mapping[str, Any], name: str) -> int:
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_NUMBER:
        raise ValueError(f"{name} of the status must be a count, but is {value!r:.100}")
    return value


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 4)


def _text(text: str) -> str:
    """At most 200 characters on one line, all printable."""
    line = _one_line(text[: 4 * _MAX_TEXT])
    return line if len(line) <= _MAX_TEXT else f"{line[: _MAX_TEXT - 3]}..."


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()))
