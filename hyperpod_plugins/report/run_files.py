"""Reads the ledgers of a run: one `ProcessRecord` for each process that wrote one, whatever state the files are in.

Ledgers are written by processes that are killed, over networks and by other versions, so nothing in them is trusted: a
line that is torn, is not JSON, lacks a field or has one of another type is left out, and counted in `Run.problems`.
"""

import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.ledger import LEDGER_FORMAT, TimeCategory

MAX_LINE_BYTES = 1 << 20
_TOLERANCE_S = 1e-3
"""Difference between a line's seconds and the time since the line before that is rounding."""
_MAX_TEXT = 2000
_LATE_LOSS_SPANS = 1000
"""A loss belongs to one of so many spans before it."""
_OVERLAP_S = 5.0
"""Clocks of two nodes may differ by so much."""
_MAX_S = 1e11
"""Unix time of the year 5138, after which nothing happens, and longer than anything takes."""
_MAX_WHOLE = 1 << 63
_CATEGORIES = frozenset(TimeCategory)


@dataclass(slots=True)
class LedgerSpan:
    """Time of a process between two lines of its ledger."""

    begin_s: float
    """Unix time, as all times here."""
    end_s: float
    seconds: dict[str, float]
    """By category, in the order in which they began; they add up to the span."""
    step: "StepLine | None" = None
    """The step that was committed at its end."""
    is_counted: bool = True
    """Whether its step counts; if not, it was lost later."""

    @property
    def duration_s(self) -> float:
        """Length of the span."""
        return self.end_s - self.begin_s


@dataclass(frozen=True, slots=True)
class StepLine:
    """A committed step, as one process reports it."""

    entry: int
    """Number of the call of the program that trains, such as a fit."""
    number: int
    """Number of the step in it, counted from 1."""
    waited_s: float
    """Seconds that the process has waited for its peers in collectives since its step before."""
    loss: float | None
    samples: int | None
    """Of the step, over all ranks."""
    world_size: int
    generation: int


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process has ended, as its agent reports it."""

    at_s: float
    worker_id: int
    incarnation: int
    pid: int
    code: int
    """Exit code, or minus the number of a signal."""
    cause: str
    is_requested: bool
    """Whether the agent itself has ended it."""


@dataclass(frozen=True, slots=True)
class RunEvent:
    """An `Event` of a process."""

    name: str
    at_s: float
    duration_s: float
    details: Mapping[str, Any]
    worker_id: int
    """Of the process that has recorded it."""
    restart: int


@dataclass(slots=True)
class ProcessRecord:
    """What the ledger of one process says."""

    run_id: str
    host: str
    pid: int
    began_s: float
    worker_id: int | None
    """None for an agent."""
    incarnation: int = 0
    restart: int = 0
    launch: int = 0
    """How often the whole job had been launched before; see `Run`."""
    rank: int | None = None
    """Its last rank; None if it has never begun a step."""
    spans: list[LedgerSpan] = field(default_factory=list[LedgerSpan])
    events: list[RunEvent] = field(default_factory=list[RunEvent])
    exits: list[Exit] = field(default_factory=list[Exit])
    has_ended: bool = False
    """Whether the ledger was closed, as it is when the program ends by itself."""

    @property
    def ended_s(self) -> float:
        """End of its last span."""
        return self.spans[-1].end_s if self.spans else self.began_s


@dataclass(frozen=True, slots=True)
class Run:
    """All ledgers of a run."""

    workers: Sequence[ProcessRecord]
    """In the order of their start."""
    agents: Sequence[ProcessRecord]
    problems: Sequence[str]

    @property
    def exits(self) -> list[Exit]:
        """All exits that agents report, in the order of time."""
        return sorted((each for agent in self.agents for each in agent.exits), key=lambda each: each.at_s)

    def processes_of_exits(self) -> dict[Exit, ProcessRecord | None]:
        """The process that has ended so, for each exit in the order of time; None for one that has no ledger.

        In containers, those of another launch may have the same numbers, so it is the last one that had begun.
        """
        known: defaultdict[tuple[int | None, int, int], list[ProcessRecord]] = defaultdict(list)
        for each in self.workers:
            known[each.worker_id, each.incarnation, each.pid].append(each)
        return {
            each: next(
                (
                    process
                    for process in reversed(known[each.worker_id, each.incarnation, each.pid])
                    if process.began_s <= each.at_s
                ),
                None,
            )
            for each in self.exits
        }


def read_run(folder: Path) -> Run:
    """Read all ledgers in a folder (`*.jsonl`).

    Raises:
        ConfigError: the folder does not exist, or no ledger in it names a worker.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"there is no folder {folder}. Give the folder of a run's ledgers: the value of HYPERPOD_EVENTS when it ran"
        )
    problems: list[str] = []
    records: list[ProcessRecord] = []
    for path in sorted(folder.glob("*.jsonl")):
        records += _read_file(path, problems)
    workers = sorted((each for each in records if each.worker_id is not None), key=lambda each: each.began_s)
    if not workers:
        what = f": {problems[0]}" if problems else ", and no file *.jsonl that names a worker"
        raise ConfigError(
            f"{folder} has no ledger of a worker{what}. Start the job with HYPERPOD_EVENTS={folder} to get them"
        )
    number_launches(workers)
    _tell_other_jobs(workers, problems)
    return Run(workers, [each for each in records if each.worker_id is None], problems)


def _tell_other_jobs(workers: Sequence[ProcessRecord], problems: list[str]) -> None:
    """Add a problem if jobs of several names ran at once; one after the other is a job that is launched again."""
    times: dict[str, tuple[float, float]] = {}
    for each in workers:
        began_s, ended_s = times.get(each.run_id, (each.began_s, each.ended_s))
        times[each.run_id] = min(began_s, each.began_s), max(ended_s, each.ended_s)
    ordered = sorted((*span, name) for name, span in times.items())
    for (_, ended_s, name), (began_s, _, other) in itertools.pairwise(ordered):
        if began_s < ended_s - _OVERLAP_S:
            problems.append(f"jobs {name!r} and {other!r} wrote to this folder at once: give each a folder of its own")


def number_launches(workers: Sequence[ProcessRecord]) -> None:
    """Number the launches of the job: one begins with a worker's first process of a run that has been there before."""
    launch, seen = 0, set[tuple[Any, ...]]()
    for each in workers:
        key = (each.worker_id, each.restart, each.incarnation)
        if key in seen:
            launch, seen = launch + 1, set()
        seen.add(key)
        each.launch = launch


def _read_file(path: Path, problems: list[str]) -> list[ProcessRecord]:
    """The processes of one file: those that were launched again append to it."""
    readers: list[ProcessReader] = []
    num_bad = Counter[str]()
    reader: ProcessReader | None = None
    try:
        for fields in _lines(path, num_bad):
            try:
                if fields["kind"] == "process":
                    reader = None  # what follows is not of the one before, even if this line cannot be read
                    reader = ProcessReader(fields)
                    readers.append(reader)
                elif reader is not None:
                    reader.read(fields)
                else:
                    num_bad["of an unknown process"] += 1
            except _LaterFormatError:
                num_bad["from a later version of hyperpod_plugins, which this one cannot read"] += 1
            except (KeyError, TypeError, ValueError, OverflowError):
                num_bad["with missing or impossible fields"] += 1
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {error.strerror}")
    for what, number in sorted(num_bad.items()):
        problems.append(f"{path.name}: {number} {'line' if number == 1 else 'lines'} left out: {what}")
    for reader in readers:
        reader.finish()
    return [reader.record for reader in readers]


def _lines(path: Path, num_bad: Counter[str]) -> Iterator[dict[str, Any]]:
    """Each line that is a JSON object; the last one of a killed process may be torn, which is not damage."""
    with path.open("rb") as file:
        while line := file.readline(MAX_LINE_BYTES):
            if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                num_bad["too long"] += 1
                while (rest := file.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                    pass
                continue
            if not line.strip():
                continue
            try:
                fields = load_line(line)
            except (ValueError, RecursionError):
                if line.endswith(b"\n"):
                    num_bad["not JSON"] += 1
                continue
            if isinstance(fields, dict):
                yield fields
            else:
                num_bad["not JSON objects"] += 1


class _LaterFormatError(ValueError):
    """A ledger was written by a later version."""


def load_line(line: bytes) -> Any:
    """Parse a line.

    Raises:
        ValueError: it is not JSON, or has NaN or infinity.
        RecursionError: it is nested too deeply.
    """
    return json.loads(line, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> float:
    raise ValueError(name)


class ProcessReader:
    """Reads the lines of one process into `record`."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        """Begin with its line `process`.

        Raises:
            KeyError: a field is missing.
            TypeError: one has the wrong type.
            ValueError: one has an impossible value.
            _LaterFormatError: its format is a later one.
        """
        if _whole(fields, "format") > LEDGER_FORMAT:
            raise _LaterFormatError
        worker_id = fields.get("worker_id")
        self.record = ProcessRecord(
            run_id=_text(fields, "run_id"),
            host=_text(fields, "host"),
            pid=_whole(fields, "pid"),
            began_s=_time(fields),
            worker_id=None if worker_id is None else _whole(fields, "worker_id"),
            incarnation=_whole(fields, "incarnation") if "incarnation" in fields else 0,
            restart=_whole(fields, "restart") if "restart" in fields else 0,
        )
        self._entry = 0
        self._open: tuple[float, str] | None = None
        """The last time that is known of a category that is open, and that category."""
        self._world_size, self._generation = 0, 0

    def read(self, fields: Mapping[str, Any]) -> None:
        """Read a line; raises as the constructor does."""
        record = self.record
        at_s = _time(fields)
        match fields["kind"]:
            case "time":
                self._add(at_s, _seconds(fields))
            case "step":
                self._add(at_s, _seconds(fields), self._step(fields))
            case "loss":
                self._add_loss(_whole(fields, "step"), _loss(fields))
            case "open":
                self._open = at_s, _category(fields["category"])
                record.has_ended = False
            case "entry":
                self._entry = _whole(fields, "entry")
            case "world":
                record.rank = _whole(fields, "rank")
                self._world_size, self._generation = _whole(fields, "world_size"), _whole(fields, "generation")
            case "event":
                details = fields.get("details")
                record.events.append(
                    RunEvent(
                        name=_text(fields, "name"),
                        at_s=at_s,
                        duration_s=min(max(_number(fields, "duration_s"), 0.0), _MAX_S),
                        details=details if isinstance(details, dict) else {},
                        worker_id=-1 if record.worker_id is None else record.worker_id,
                        restart=record.restart,
                    )
                )
            case "exit":
                record.exits.append(_exit(fields, at_s))
            case "end":
                record.has_ended = True
            case _:
                pass  # of a later version that says more

    def _step(self, fields: Mapping[str, Any]) -> StepLine:
        return StepLine(
            entry=self._entry,
            number=_whole(fields, "step"),
            waited_s=max(0.0, _number(fields, "waited_s")),
            loss=_loss(fields),
            samples=_whole(fields, "samples") if "samples" in fields else None,
            world_size=self._world_size,
            generation=self._generation,
        )

    def _add_loss(self, number: int, loss: float | None) -> None:
        """Add a loss that was not known yet when its step was written, some steps before."""
        for span in itertools.islice(reversed(self.record.spans), _LATE_LOSS_SPANS):
            if span.step is not None and span.step.number == number and span.step.loss is None:
                span.step = replace(span.step, loss=loss)
                return

    def _add(self, at_s: float, seconds: dict[str, float], step: StepLine | None = None) -> None:
        """Add a span up to `at_s`, and one of `OTHER` before it if a line is missing between."""
        self._open = None
        self.record.has_ended = False  # a program that trains again opens its ledger again
        spans, before_s = self.record.spans, self.record.ended_s
        total_s = sum(seconds.values())
        begin_s, at_s = at_s - total_s, max(at_s, before_s)
        if begin_s - before_s > _TOLERANCE_S:
            spans.append(LedgerSpan(before_s, begin_s, {TimeCategory.OTHER: begin_s - before_s}))
        else:  # up to rounding; a clock that was set back has no effect on the sum
            begin_s = before_s
        if total_s > _TOLERANCE_S**3:
            scale = (at_s - begin_s) / total_s
            seconds = {name: value * scale for name, value in seconds.items()}
        else:
            seconds = {TimeCategory.OTHER: at_s - begin_s}
        spans.append(LedgerSpan(begin_s, at_s, seconds, step))

    def open_span(self) -> LedgerSpan | None:
        """The time since the last line, in the category that is open, as far as is known; None if no line says."""
        before_s = self.record.ended_s
        if self._open is None or self._open[0] <= before_s:
            return None
        at_s, category = self._open
        return LedgerSpan(before_s, at_s, {category: at_s - before_s})

    def finish(self) -> None:
        """No other line comes: add the span that is open."""
        span = self.open_span()
        self.record.spans += [] if span is None else [span]


def _number(fields: Mapping[str, Any], name: str) -> float:
    value = fields[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(name)
    if not math.isfinite(value):
        raise ValueError(name)
    return float(value)


def _loss(fields: Mapping[str, Any]) -> float | None:
    return None if fields.get("loss") is None else _number(fields, "loss")


def _time(fields: Mapping[str, Any]) -> float:
    """Unix time of a line."""
    value = _number(fields, "at_s")
    if not 0 <= value < _MAX_S:
        raise ValueError("at_s")
    return value


def _whole(fields: Mapping[str, Any], name: str) -> int:
    value = fields[name]
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(name)
    if abs(value) >= _MAX_WHOLE:
        raise ValueError(name)
    return value


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields[name]
    if not isinstance(value, str):
        raise TypeError(name)
    return value[:_MAX_TEXT]


def _category(value: object) -> str:
    """A category; one of a later version counts as `OTHER`."""
    return value if isinstance(value, str) and value in _CATEGORIES else TimeCategory.OTHER


def _seconds(fields: Mapping[str, Any]) -> dict[str, float]:
    given = fields["seconds"]
    if not isinstance(given, dict):
        raise TypeError("seconds")
    found: dict[str, float] = {}
    for name in given:
        value = _number(given, name)
        if not 0 <= value < _MAX_S:
            raise ValueError("seconds")
        category = _category(name)
        found[category] = found.get(category, 0.0) + value
    return found


def _exit(fields: Mapping[str, Any], at_s: float) -> Exit:
    return Exit(
        at_s=at_s,
        worker_id=_whole(fields, "worker_id"),
        incarnation=_whole(fields, "incarnation"),
        pid=_whole(fields, "pid"),
        code=_whole(fields, "code"),
        cause=_text(fields, "cause"),
        is_requested=fields.get("is_requested") is True,
    )
