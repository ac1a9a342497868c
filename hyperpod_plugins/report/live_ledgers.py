"""Follows the ledgers of a running job: reads what is new in each file, and keeps sums instead of lines.

[Note: cost] A call of `LiveLedgers.read` makes one `stat` for each file, and parses the new lines, at most 6 MB. On
one busy core of a small virtual machine, 64 ranks cost 3.5 ms a step, and 0.7 ms if nothing is new. Catching up with a
run of 10,000 steps on 64 ranks (86 MB) takes 12 s in 14 calls of at most 1.0 s; until then the figures cover the part
that has been read. Memory does not grow with the number of steps: a process keeps two spans, its last events, and the
seconds of its last 4096 steps, 46 MB here. Measured by `tests/report/live_cost.py`.

The figures agree with those of `report.make_report` up to what only all lines together tell: a step that was lost more
than 4096 steps ago counts with the mean duration of a step, and the time after the last line of a killed process counts
as repair.

No clocks of two machines are compared: ages are differences between lines of one file, and since this process has read
the last one.
"""

import os
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from hyperpod_plugins.ledger import TimeCategory
from hyperpod_plugins.report.incidents import incidents_of
from hyperpod_plugins.report.make_report import ELASTIC_CATEGORIES, FAILURE_CATEGORIES
from hyperpod_plugins.report.run_files import (
    MAX_LINE_BYTES,
    LedgerSpan,
    ProcessReader,
    ProcessRecord,
    Run,
    load_line,
    number_launches,
)
from hyperpod_plugins.report.run_report import Incident
from hyperpod_plugins.report.timelines import StepKey, Timeline

_PART_BYTES = 1 << 15
"""Read of one file at a time, so that all ranks advance together."""
_LOOK_BYTES = 1 << 22
"""Read in one call, and the rest of a part of each file."""
_MAX_FILES = 4096
_MAX_EVENTS = 200
"""Of a process."""
_RECENT_STEPS = 4096
_LINE_DELAY_S = 3.0
"""A process that computes may have written no line for so long."""
_LOST = (*FAILURE_CATEGORIES, *ELASTIC_CATEGORIES)


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerFigures:
    """What the ledgers of a running job say; None where they do not (yet)."""

    part_read: float = 1.0
    """Part of their bytes that has been read, in `0..1`."""
    num_processes: int = 0
    """Worker processes that have written one."""
    goodput: float | None = None
    """Part of the ranks' wall time in steps that counted, in `0..1`."""
    ettr: float | None = None
    """Part of the time after the set-up that failures and changes of size did not cost."""
    incidents: Sequence[Incident] = ()
    """Oldest first."""
    began_s: float = 0.0
    """Unix time of the start of the first process, by its machine's clock."""
    places: Mapping[tuple[int, int], tuple[str, int]] = field(default_factory=dict[tuple[int, int], tuple[str, int]])
    """Host and pid by worker_id and incarnation."""
    snapshot_age_s: float | None = None
    """Seconds since the last snapshot was begun."""
    checkpoint_age_s: float | None = None
    """Seconds since the last checkpoint was saved."""


class _Tail:
    """One file: how far it has been read, and the process that writes it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.offset = self.size = 0
        self.reader: ProcessReader | None = None
        self.newest_s = self.newest_read_s = 0.0
        """Time of the newest line by the clock of its writer, and when it was read by this process's."""
        self.snapshot_s: float | None = None
        self.checkpoint_s: float | None = None
        self._is_skipping = False
        """Whether the present line is too long."""
        self._is_given_up = False

    @property
    def is_at_end(self) -> bool:
        """Whether all complete lines have been read."""
        return self.offset >= self.size

    def refresh(self) -> None:
        """Look how long the file is."""
        if self._is_given_up:
            return
        try:
            self.size = self._path.stat().st_size
        except OSError:
            self.size = self.offset

    def first_line(self) -> Any:
        """The first line, parsed; None while it is not complete."""
        try:
            with self._path.open("rb") as file:
                line = file.readline(MAX_LINE_BYTES)
            if line.endswith(b"\n"):
                self.offset = len(line)
                return load_line(line)
        except (OSError, ValueError, RecursionError):
            self.give_up()
        self.size = self.offset
        return None

    def give_up(self) -> None:
        """Do not read this file any more: it is not a ledger."""
        self.offset, self._is_given_up = self.size, True

    def lines(self) -> list[Any]:
        """The next lines, parsed; those that are damaged are left out."""
        try:
            with self._path.open("rb") as file:
                data = self._part(file)
        except OSError:
            self.size = self.offset
            return []
        found: list[Any] = []
        for line in data:
            try:
                found.append(load_line(line))
            except (ValueError, RecursionError):
                continue
        return found

    def _part(self, file: BinaryIO) -> list[bytes]:
        """The next complete lines; an incomplete one is read again later, unless it is too long."""
        file.seek(self.offset)
        data = file.read(_PART_BYTES)
        if b"\n" not in data and len(data) == _PART_BYTES:
            data += file.read(MAX_LINE_BYTES)
        end = data.rfind(b"\n") + 1
        if not end:
            if len(data) > MAX_LINE_BYTES:
                self.offset, self._is_skipping = self.offset + len(data), True
            else:
                self.size = self.offset
            return []
        self.offset += end
        is_rest, self._is_skipping = self._is_skipping, False
        return data[:end].splitlines()[int(is_rest) :]

    def age_s(self, at_s: float | None, now_s: float) -> float | None:
        """Seconds since a time of this file's writer."""
        return None if at_s is None else max(0.0, self.newest_s - at_s) + max(0.0, now_s - self.newest_read_s)


class _WorkerSums:
    """Where the time of one worker went, over its processes."""

    def __init__(self) -> None:
        self.tails: list[_Tail] = []
        self.processes: list[ProcessRecord] = []
        self._seconds: dict[str, float] = {}
        self._num_steps = 0
        self._gaps_s = 0.0
        """Between its processes."""
        self._recent: deque[tuple[StepKey, float]] = deque(maxlen=_RECENT_STEPS)
        self._open: LedgerSpan | None = None
        """What is known after the last line."""
        self._has_stepped = False
        """Whether the present process has committed a step."""

    def begin(self, record: ProcessRecord) -> None:
        """Another process begins, unless it is the present one."""
        if self.processes and self.processes[-1] is record:
            return
        if self.processes:
            ended_s = self.processes[-1].ended_s
            if self._open is not None:
                ended_s = self._open.end_s
                self.add(self._open)
            self._gaps_s += max(0.0, record.began_s - ended_s)
        self._open, self._has_stepped = None, False
        self.processes.append(record)

    def add(self, span: LedgerSpan) -> None:
        """Add a span of the present process."""
        record = self.processes[-1]
        is_replacement = len(self.processes) > 1 or record.incarnation > 0 or record.restart > 0
        moved: dict[str, str] = {TimeCategory.SETUP: TimeCategory.ASSEMBLE} if is_replacement else {}
        self._has_stepped |= span.step is not None
        if is_replacement and not self._has_stepped:
            moved[TimeCategory.CHECKPOINT_RESTORE] = TimeCategory.RESTORE
        for category, value in span.seconds.items():
            self._add(moved.get(category, category), value)
        if span.step is not None:
            key = span.step.entry, span.step.number
            self._lose_from(key)
            self._recent.append((key, span.seconds.get(TimeCategory.STEP, 0.0)))
            self._num_steps += 1

    def set_open(self, span: LedgerSpan | None) -> None:
        """Say what the present process is known to do since its last line."""
        self._open = span

    def book_wait(self, seconds: float) -> None:
        """A part of its steps was spent waiting for slower ranks."""
        self._move(TimeCategory.STEP, TimeCategory.STRAGGLER_WAIT, seconds)

    def _lose_from(self, key: StepKey) -> None:
        """A step is committed: if it, or later ones, had been committed before, those were lost."""
        lowest: StepKey | None = None
        while self._recent and self._recent[-1][0] >= key:
            lowest, step_s = self._recent.pop()
            self._num_steps -= 1
            self._move(TimeCategory.STEP, TimeCategory.REDONE, step_s)
        if lowest is None or self._recent or lowest[0] != key[0]:
            return
        num_forgotten = min(lowest[1] - key[1], self._num_steps)
        if num_forgotten > 0:
            lost_s = self._seconds.get(TimeCategory.STEP, 0.0) * num_forgotten / self._num_steps
            self._move(TimeCategory.STEP, TimeCategory.REDONE, lost_s)
            self._num_steps -= num_forgotten

    def _move(self, source: str, target: str, seconds: float) -> None:
        seconds = min(seconds, self._seconds.get(source, 0.0))
        self._add(source, -seconds)
        self._add(target, seconds)

    def _add(self, category: str, seconds: float) -> None:
        self._seconds[category] = self._seconds.get(category, 0.0) + seconds

    def times(self, now_s: float) -> tuple[float, float, float, float]:
        """Wall time, time in steps that count, time lost to failures and changes of size, and time of the set-up."""
        late = {} if self._open is None else self._open.seconds
        silent_s = now_s - max(tail.newest_read_s for tail in self.tails)
        if self.processes[-1].has_ended or silent_s <= _LINE_DELAY_S:
            silent_s = 0.0

        def total(categories: Iterable[str]) -> float:
            return sum(self._seconds.get(each, 0.0) + late.get(each, 0.0) for each in categories)

        rest_s = self._gaps_s + silent_s
        return (
            total(TimeCategory) + rest_s,
            total([TimeCategory.STEP]),
            total(_LOST) + rest_s,
            total([TimeCategory.SETUP]),
        )


class LiveLedgers:
    """The ledgers in a folder, as they grow; not thread-safe."""

    def __init__(self, folder: Path) -> None:
        """Read nothing yet; the folder need not exist."""
        self._folder = folder
        self._tails: dict[str, _Tail] = {}
        self._workers: dict[int, _WorkerSums] = {}
        self._agents: list[ProcessRecord] = []
        self._waits: OrderedDict[StepKey, dict[int, tuple[float, float]]] = OrderedDict()
        """Of each step that not all ranks have reported: what a worker has waited, and its time in the step."""
        self._incidents: Sequence[Incident] = ()
        self._is_changed = False
        """Whether there may be new incidents."""

    def read(self, now_s: float) -> LedgerFigures:
        """Read what is new, at most 4 MB; `now_s` is the time by this process's monotonic clock."""
        self._find_files()
        for tail in self._tails.values():
            tail.refresh()
        budget = _LOOK_BYTES
        while budget > 0 and (readable := self._readable()):
            for tail in readable:
                before = tail.offset
                self._read_part(tail, now_s)
                budget -= max(1, tail.offset - before)
        return self._figures(now_s)

    def _find_files(self) -> None:
        try:
            names = sorted(each for each in os.listdir(self._folder) if each.endswith(".jsonl"))
        except OSError:
            return
        for name in names[:_MAX_FILES]:
            if name not in self._tails:
                self._tails[name] = _Tail(self._folder / name)

    def _readable(self) -> list[_Tail]:
        """The files to be read next: of each worker the oldest that has more, since its steps must come in order."""
        unread = [tail for tail in self._tails.values() if not tail.is_at_end]
        new = [tail for tail in unread if tail.reader is None]
        if new:  # their first lines tell whose turn it is
            return new
        of_agents = [tail for tail in unread if tail.reader is not None and tail.reader.record.worker_id is None]
        oldest = [next((tail for tail in each.tails if not tail.is_at_end), None) for each in self._workers.values()]
        return of_agents + [tail for tail in oldest if tail is not None]

    def _read_part(self, tail: _Tail, now_s: float) -> None:
        if tail.reader is None:
            self._begin(tail)
            tail.newest_read_s = now_s
            return
        for fields in tail.lines():
            if isinstance(fields, dict):
                self._take(tail, fields, now_s)

    def _begin(self, tail: _Tail) -> None:
        """Read the first line of a file, or give the file up if it is not a ledger."""
        first = tail.first_line()
        if first is None:
            return
        try:
            self._adopt(tail, ProcessReader(first))
        except (KeyError, TypeError, ValueError, OverflowError):
            tail.give_up()

    def _adopt(self, tail: _Tail, reader: ProcessReader) -> None:
        """A process begins in this file."""
        tail.reader, record, self._is_changed = reader, reader.record, True
        if record.worker_id is None:
            self._agents.append(record)
            return
        worker = self._workers.setdefault(record.worker_id, _WorkerSums())
        if tail not in worker.tails:
            worker.tails = sorted([*worker.tails, tail], key=_began_s)

    def _take(self, tail: _Tail, fields: dict[str, Any], now_s: float) -> None:
        """Take one line."""
        reader = tail.reader
        assert reader is not None
        record = reader.record
        num_before = len(record.spans)
        try:
            if fields["kind"] == "process":  # the job was launched again
                self._adopt(tail, ProcessReader(fields))
                return
            reader.read(fields)
        except (KeyError, TypeError, ValueError, OverflowError):
            return
        self._is_changed |= fields["kind"] in ("event", "exit", "world")
        del record.events[:-_MAX_EVENTS], record.exits[:-_MAX_EVENTS]
        new = record.spans[num_before:]
        first = next((each for each in record.spans if each.step is not None), None)
        last = record.spans[-1:]
        record.spans = last if first is None or first in last else [first, *last]
        if record.worker_id is not None:
            worker = self._workers[record.worker_id]
            worker.begin(record)
            for span in new:
                worker.add(span)
                self._note_wait(record.worker_id, span)
            open_span = reader.open_span()
            worker.set_open(open_span)
            tail.newest_s = record.ended_s if open_span is None else open_span.end_s
            tail.newest_read_s = now_s
            if "snapshot" in fields:
                tail.snapshot_s = record.ended_s
            if any(TimeCategory.CHECKPOINT_SAVE in each.seconds for each in new):
                tail.checkpoint_s = record.ended_s

    def _note_wait(self, worker_id: int, span: LedgerSpan) -> None:
        """When all ranks have reported a step, book what each has waited for the last one."""
        step = span.step
        if step is None:
            return
        waits = self._waits.setdefault((step.entry, step.number), {})
        waits[worker_id] = step.waited_s, span.seconds.get(TimeCategory.STEP, 0.0)
        if len(waits) >= max(step.world_size, 1):
            del self._waits[step.entry, step.number]
            least_s = min(waited_s for waited_s, _ in waits.values())
            for each, (waited_s, step_s) in waits.items():
                self._workers[each].book_wait(min(waited_s - least_s, step_s))
        if len(self._waits) > _RECENT_STEPS:
            self._waits.popitem(last=False)

    def _figures(self, now_s: float) -> LedgerFigures:
        size = sum(each.size for each in self._tails.values())
        part_read = sum(each.offset for each in self._tails.values()) / size if size else 1.0
        workers = [each for each in self._workers.values() if each.processes]
        if not workers:
            return LedgerFigures(part_read=part_read)
        if self._is_changed:
            self._incidents, self._is_changed = self._find_incidents(), False
        wall_s, step_s, lost_s, setup_s = (sum(each) for each in zip(*(w.times(now_s) for w in workers), strict=True))
        tails = [each.tails[-1] for each in workers]
        snapshots = [tail.age_s(tail.snapshot_s, now_s) for tail in tails]
        checkpoints = [tail.age_s(tail.checkpoint_s, now_s) for tail in tails]
        processes = [record for each in workers for record in each.processes]
        return LedgerFigures(
            part_read=part_read,
            num_processes=len(processes),
            goodput=step_s / wall_s if wall_s > 0 else None,
            ettr=1 - lost_s / (wall_s - setup_s) if wall_s > setup_s else None,
            incidents=self._incidents,
            began_s=min(each.began_s for each in processes),
            places={(each.worker_id or 0, each.incarnation): (each.host, each.pid) for each in processes},
            snapshot_age_s=min((each for each in snapshots if each is not None), default=None),
            checkpoint_age_s=min((each for each in checkpoints if each is not None), default=None),
        )

    def _find_incidents(self) -> Sequence[Incident]:
        workers = sorted((each for w in self._workers.values() for each in w.processes), key=lambda each: each.began_s)
        number_launches(workers)
        timelines = [
            Timeline(worker_id, worker.processes, [None] * len(worker.processes))
            for worker_id, worker in sorted(self._workers.items())
            if worker.processes
        ]
        return incidents_of(Run(workers, self._agents, []), timelines)[0]


def _began_s(tail: _Tail) -> float:
    return 0.0 if tail.reader is None else tail.reader.record.began_s
