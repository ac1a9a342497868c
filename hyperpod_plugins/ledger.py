"""The ledger of a process: where the time of its main thread goes, as lines of JSON in a file of its own.

At each moment the main thread is in one category of time, so the categories of a process add up to its wall time.
`ledger.enter` says that another one begins; a `phase` is one with an end. A thread of its own writes what has come
together, a few times a second, so a step pays for some readings of the clock and a short list.

A file has, for each process, one line `process`, then lines `step` (a committed step, with the
seconds of each category since the line before), `time` (the same without a step), `event` (an `Event`), and `end`.
The loss of a step that a device computes has a line `loss` of its own, as the host does not wait for it.
Lines of a killed process end somewhere, the last one perhaps in its middle. `report.run_files` reads them.
"""

import atexit
import itertools
import json
import logging
import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, TypeVar, cast, final

import torch

from hyperpod_plugins.env import events_folder
from hyperpod_plugins.events import Event, listen

log = logging.getLogger(__name__)
T = TypeVar("T")

LEDGER_FORMAT: Final = 1
"""Version of the lines, in the line `process`."""
_WRITE_EVERY_S = 0.25
_OPEN_S, _OPEN_SHARE = 1.0, 0.05
"""A line says that a category is open after a second, and again each time that 5 % more have passed: of a killed
process little is known otherwise."""
_MAX_QUEUED_LOSSES = 64
_LAST_LOOKS, _BETWEEN_LOOKS_S = 200, 0.005
"""How often and how long a ledger that is closed looks for the last losses."""

DeviceCopy = tuple[torch.Tensor, Callable[[], bool]]
"""A tensor in host memory, and whether the device has written it."""


def _copy_from_cuda(value: torch.Tensor) -> DeviceCopy | None:
    """Queue a copy of a tensor of one value to pinned memory; None while a CUDA graph is captured."""
    if torch.cuda.is_current_stream_capturing():
        return None
    host = torch.empty((), dtype=value.dtype, pin_memory=True)
    host.copy_(value.reshape(()), non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(value.device))
    return host, event.query


COPIERS: dict[str, Callable[[torch.Tensor], DeviceCopy | None]] = {"cuda": _copy_from_cuda}
"""For each device type that has a queue: function that queues a copy of one value to the host. Losses on other devices
but the CPU are not read."""


class TimeCategory(StrEnum):
    """What the main thread of a process does; the members are those of Google's goodput library, where it has them.

    See docs/reference/ledger.md for how they correspond.
    """

    SETUP = "setup"
    """From the start of the process to its first step."""
    STEP = "step"
    """Computing a step, its vote and its commit: the time that counts, unless the step is lost."""
    DATA_WAIT = "data_wait"
    """Waiting for a batch."""
    CHECKPOINT_SAVE = "checkpoint_save"
    CHECKPOINT_RESTORE = "checkpoint_restore"
    SNAPSHOT = "snapshot"
    """Copying the state for a snapshot."""
    DETECT = "detect"
    """From a failure until this rank stopped for it."""
    ASSEMBLE = "assemble"
    """Until all members of the next generation were connected; for a replacement, since it had started."""
    RESTORE = "restore"
    """Until all members had their state, and could begin the step again."""
    REDONE = "redone"
    """Steps, and parts of a step, that were computed and then lost."""
    CAPACITY_WAIT = "capacity_wait"
    """Waiting for nodes."""
    RESIZE = "resize"
    """Changing the number of replicas or the degrees."""
    STRAGGLER_WAIT = "straggler_wait"
    """Waiting in a step for slower ranks; a part of `STEP` that only the reader of all ledgers can tell."""
    EVALUATION = "evaluation"
    OTHER = "other"
    """Hooks between steps, logging, and everything else."""


_INSIDE_A_STEP = frozenset({TimeCategory.STEP, TimeCategory.DATA_WAIT, TimeCategory.SNAPSHOT, TimeCategory.OTHER})
"""Categories that alternate many times a second: a line that covers a step has the sum of each."""


def _nothing_waited() -> float:
    return 0.0


@dataclass(frozen=True, slots=True)
class _QueuedLoss:
    """The loss of a step that is on its way from a device."""

    step: int
    value: torch.Tensor
    is_there: Callable[[], bool]


@final
class Ledger:
    """Books the time of a process's main thread by category, and writes it to a file; inactive until it is opened.

    Call its methods from the main thread, except `note_event` and `totals`. An inactive ledger does nothing.
    """

    def __init__(self) -> None:
        self.is_active = False
        self._category = TimeCategory.SETUP
        self._since_s = 0.0
        """When the present category began, by the monotonic clock."""
        self._seconds: dict[str, float] = {}
        """By category, since the last line."""
        self._totals: dict[str, float] = {}
        self.world: dict[str, int] = {}
        """Rank, number of ranks, replicas and generation; empty before the first step of a job with recovery."""
        self._details: dict[str, Any] = {}
        self._result: Any = None
        """What `note_loss` was given since the last step."""
        self._queued_losses: deque[_QueuedLoss] = deque(maxlen=_MAX_QUEUED_LOSSES)
        self._waited_s, self._waited_before_s = _nothing_waited, 0.0
        self._lines: deque[Mapping[str, Any]] = deque()
        self._to_unix_s = 0.0
        self._opened_as: tuple[Path | None, dict[str, Any]] | None = None
        """Path and identity of the last time."""
        self._file: _LedgerFile | None = None
        self._end_listening: Callable[[], None] = _nothing
        self._forgets_in_children = False
        self._told_open_s = 0.0
        """When the last line `open` was written; of the thread that writes."""
        self._entry_numbers = itertools.count()

    # -- opening and closing --------------------------------------------------------------------------------------

    def open(
        self, path: Path | None, identity: Mapping[str, Any], *, waited_s: Callable[[], float] = _nothing_waited
    ) -> None:
        """Begin to book, with the time since this process started as `SETUP`; does nothing while it is open.

        Opened again after `close`, for the same file and identity, it goes on: the time in between is `OTHER`.

        Args:
            path: The file, whose folders are created; None to write nothing, for `goodput_metrics` alone.
            identity: What tells this process from others, such as its worker id; JSON.
            waited_s: Seconds for which the main thread has waited for peers in collectives so far.
        """
        if self.is_active:
            return
        opened_as = path, dict(identity)
        goes_on, self._opened_as = opened_as == self._opened_as, opened_as
        self._lines = deque()
        if goes_on:
            self._category = TimeCategory.OTHER
        else:
            self._begin(identity)
        self._waited_s, self._waited_before_s = waited_s, waited_s()
        self._file = None if path is None else _LedgerFile(path, self._lines, self._still_open)
        if self._file is not None:
            self._file.start()
        else:
            self._lines = deque(maxlen=0)
        if not self._forgets_in_children:
            os.register_at_fork(after_in_child=self._forget)
            self._forgets_in_children = True
        self._end_listening = listen(self.note_event)
        self.is_active = True
        atexit.register(self.close)

    def open_without_recovery(self, rank: int, *, waited_s: Callable[[], float] = _nothing_waited) -> bool:
        """Open the ledger for one entry of a program that trains without recovery; return whether it was not open.

        It is written to a file if HYPERPOD_EVENTS names a folder.

        Args:
            rank: of this process.
            waited_s: see `open`.
        """
        if self.is_active:
            return False
        folder = events_folder()
        path = None if folder is None else Path(folder, f"worker-{rank}-0.0-{os.getpid()}.jsonl")
        self.open(path, {"run_id": "", "worker_id": rank}, waited_s=waited_s)
        self.write("entry", entry=next(self._entry_numbers))
        return True

    def _begin(self, identity: Mapping[str, Any]) -> None:
        """Begin with the start of this process."""
        now_s = time.monotonic()
        self._to_unix_s = time.time() - now_s
        began_s = min(_process_start_s(), now_s)
        self._category, self._since_s, self._seconds = TimeCategory.SETUP, began_s, {}
        self._totals, self.world = {}, {}
        head = {"kind": "process", "format": LEDGER_FORMAT, "at_s": self._unix(began_s), "pid": os.getpid()}
        self._lines.append(head | {"host": socket.gethostname()} | dict(identity))

    def close(self) -> None:
        """Write what is left, and stop writing."""
        if not self.is_active:
            return
        self._book()
        self._settle()
        for _ in range(_LAST_LOOKS):
            self._write_losses()
            if not self._queued_losses:
                break
            threading.Event().wait(_BETWEEN_LOOKS_S)
        self._queued_losses.clear()  # of a device that hangs
        self._lines.append({"kind": "end", "at_s": self._unix(self._since_s)})
        self.is_active = False
        self._end_listening()
        if self._file is not None:
            self._file.stop()
        atexit.unregister(self.close)

    def _forget(self) -> None:
        """In a forked process: this ledger is its parent's."""
        self._opened_as = None
        self._queued_losses.clear()
        if self.is_active:
            self.is_active = False
            self._end_listening()
            atexit.unregister(self.close)

    # -- booking --------------------------------------------------------------------------------------------------

    @property
    def category(self) -> TimeCategory:
        """The present category."""
        return self._category

    def enter(self, category: TimeCategory) -> None:
        """End the present category and begin another one."""
        if not self.is_active:
            return
        before = self._book()
        self._category = category
        if category != before and (category not in _INSIDE_A_STEP or before not in _INSIDE_A_STEP):
            self._settle()

    def waits_for_data(self, items: Iterable[T]) -> Generator[T]:
        """Yield the items, and book the time until each is there as `DATA_WAIT`."""
        iterator = iter(items)
        while True:
            with self.phase(TimeCategory.DATA_WAIT):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item

    @contextmanager
    def phase(self, category: TimeCategory) -> Generator[None]:
        """Context in which the time belongs to `category`; afterwards, that of before goes on."""
        before = self._category
        self.enter(category)
        try:
            yield
        finally:
            if self._category is category:  # otherwise the block has entered another one, after a fault
                self.enter(before)

    def interrupt(self, noticed_s: float, category: TimeCategory) -> None:
        """A fault has ended what was under way: what was computed since the last step is lost.

        Args:
            noticed_s: How long before now the fault had happened; at most the time since then is booked as `DETECT`.
            category: What begins now.
        """
        if not self.is_active:
            return
        self._book()
        seconds = self._seconds
        lost_s = seconds.pop(TimeCategory.STEP, 0.0)
        detect_s = min(max(noticed_s, 0.0), lost_s)
        for booked in (seconds, self._totals):
            _add(booked, TimeCategory.REDONE, lost_s - detect_s)
            _add(booked, TimeCategory.DETECT, detect_s)
        _add(self._totals, TimeCategory.STEP, -lost_s)
        self._settle()
        self._category, self._result = category, None

    def note(self, **details: Any) -> None:
        """Add details, JSON, to the line of the present step."""
        if self.is_active:
            self._details |= details

    def note_loss(self, result: Any) -> None:
        """Add the loss to the line of the present step: a number, a tensor of one, or what a dict calls `loss`.

        It is read in `commit`: while an optimizer writes, nothing may fail, and nothing may wait for a device. If a
        device has it, `commit` does not wait either: it queues a copy, and a later step writes what has arrived.
        """
        if self.is_active:
            self._result = result

    def commit(self, step: int) -> None:
        """A step is committed, the `step`-th, counted from 1: write its line. What follows is `OTHER`."""
        if not self.is_active:
            return
        self._book()
        self._category = TimeCategory.OTHER
        details, self._details = self._details, {}
        result, self._result = self._result, None
        self._write_losses()
        self._settle({"step": step} | self._loss_in(step, result) | details)

    def _loss_in(self, step: int, result: Any) -> dict[str, float | None]:
        """The loss in a program's result, as a detail of a step; empty if there is none, or a device has it."""
        try:
            value = _loss_of(result)
            if isinstance(value, torch.Tensor) and value.device.type in COPIERS:
                copy = COPIERS[value.device.type](value)
                self._queued_losses.extend([] if copy is None else [_QueuedLoss(step, *copy)])
            elif value is not None:
                return {"loss": _finite(float(value))}
        except Exception:  # whatever the program's own types raise, its step is committed
            log.debug("the loss of a step cannot be read", exc_info=True)
        return {}

    def _write_losses(self) -> None:
        """Write the losses that have arrived from a device."""
        queued = self._queued_losses
        try:
            while queued and queued[0].is_there():
                loss = queued.popleft()
                self.write("loss", step=loss.step, loss=_finite(float(loss.value)))
        except RuntimeError:  # of the device, which fails the program as well
            log.debug("a loss cannot be read from its device", exc_info=True)
            queued.clear()

    def note_world(self, **world: int) -> None:
        """Write rank, number of ranks and the like, if they have changed."""
        if self.is_active and world != self.world:
            self.world = world
            self.write("world", **world)

    def totals(self) -> dict[str, float]:
        """Seconds of this process by category, up to now; from any thread, as it books nothing."""
        found, category, since_s = {**self._totals}, self._category, self._since_s
        if self.is_active:
            _add(found, category, max(0.0, time.monotonic() - since_s))
        return found

    def write(self, kind: str, **fields: Any) -> None:
        """Write a line of another kind, with the present time."""
        if self.is_active:
            self._lines.append({"kind": kind, "at_s": self._unix(time.monotonic())} | fields)

    def note_event(self, event: Event) -> None:
        """Write an event; from any thread."""
        if self.is_active:
            self._lines.append({"kind": "event"} | asdict(event))

    def _book(self) -> TimeCategory:
        """Book the time up to now to the present category, and return that."""
        now_s = time.monotonic()
        passed_s = now_s - self._since_s
        _add(self._seconds, self._category, passed_s)
        _add(self._totals, self._category, passed_s)
        self._since_s = now_s
        return self._category

    def _settle(self, fields: Mapping[str, Any] | None = None) -> None:
        """Write a line for the time since the last one."""
        seconds, self._seconds = self._seconds, {}
        waited_s = self._waited_s()
        own_wait_s, self._waited_before_s = waited_s - self._waited_before_s, waited_s
        shown = {name: round(value, 6) for name, value in seconds.items() if value > 0}
        if fields is None and not shown:
            return
        line = {"kind": "time" if fields is None else "step", "at_s": self._unix(self._since_s), "seconds": shown}
        if fields is not None:
            line |= {"waited_s": round(own_wait_s, 6), **fields}
        self._lines.append(line)

    def _still_open(self) -> dict[str, Any] | None:
        """A line that says which category has been open for long; called by the thread that writes."""
        now_s = time.monotonic()
        since_s, category = self._since_s, self._category
        told_s = max(self._told_open_s, since_s)
        if now_s - told_s < max(_OPEN_S, _OPEN_SHARE * (now_s - since_s)):
            return None
        self._told_open_s = now_s
        return {"kind": "open", "at_s": self._unix(now_s), "category": category, "since_s": self._unix(since_s)}

    def _unix(self, monotonic_s: float) -> float:
        return round(self._to_unix_s + monotonic_s, 6)


class _LedgerFile:
    """Appends lines to a file from a thread of its own."""

    def __init__(
        self, path: Path, lines: deque[Mapping[str, Any]], still_open: Callable[[], Mapping[str, Any] | None]
    ) -> None:
        self._path, self._lines, self._still_open = path, lines, still_open
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hyperpod-ledger", daemon=True)
        self._num_failed = 0
        self._is_at_line_start = False
        """Whether the file is known to end with a whole line."""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Write what is left."""
        self._is_ending.set()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while True:
            is_last = self._is_ending.wait(_WRITE_EVERY_S)
            line = self._still_open() if not self._lines else None
            if line is not None:
                self._lines.append(line)
            self._write()
            if is_last:
                return

    def _write(self) -> None:
        """Append the lines that have come together, in one call, so that those of two processes never mix."""
        lines = self._lines
        found: list[str] = []
        while lines:
            found.append(_line(lines.popleft()))
        if not found:
            return
        try:
            if not self._is_at_line_start:
                self._path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                # What a killed process has left there, or this one on a full disk, may end in the middle of a line.
                is_torn = not self._is_at_line_start and _is_torn(file)
                data = ("\n" * is_torn + "".join(found)).encode()
                self._is_at_line_start = False
                while data:
                    data = data[os.write(file, data) :]
                self._is_at_line_start = True
            finally:
                os.close(file)
        except OSError as error:
            self._num_failed += 1
            if self._num_failed == 1:
                log.warning("the ledger %s cannot be written: %s. Reports of this run will lack it", self._path, error)


def _line(fields: Mapping[str, Any]) -> str:
    """A line of strict JSON: numbers that are not finite become null, and what JSON does not know becomes text.

    What cannot be written at all, such as a list within itself, becomes an empty line, which readers skip.
    """
    try:
        return json.dumps(fields, separators=(",", ":"), default=str, allow_nan=False) + "\n"
    except (TypeError, ValueError):
        pass
    try:
        return json.dumps(_finite(fields), separators=(",", ":"), default=str) + "\n"
    except (TypeError, ValueError, RecursionError) as error:
        log.warning("a line of the kind %r cannot be written to the ledger: %s", fields.get("kind"), error)
        return "\n"


def _finite(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {str(name): _finite(each) for name, each in value.items()}
        case list() | tuple():
            return [_finite(each) for each in value]
        case _:
            return value


def _loss_of(result: Any) -> torch.Tensor | float | None:
    """The loss in a program's result: a number or a plain tensor of one value; None if there is none to be read.

    A loss of which this rank has a part is not read, as that would communicate.
    """
    value = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(value, torch.Tensor):
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None
    placements = getattr(value, "placements", None)
    if placements is not None:
        if not all(each.is_replicate() for each in placements):
            return None
        value = cast(Any, value).to_local()
    if value.numel() != 1 or value.is_complex() or not (value.is_cpu or value.device.type in COPIERS):
        return None
    return value.detach()


def _is_torn(file: int) -> bool:
    """Whether a file ends in the middle of a line."""
    size = os.fstat(file).st_size
    return size > 0 and os.pread(file, 1, size - 1) != b"\n"


def _add(seconds: dict[str, float], category: str, value: float) -> None:
    seconds[category] = seconds.get(category, 0.0) + value


def _process_start_s() -> float:
    """When this process was started or forked, by the monotonic clock; now if the system does not say."""
    now_s = time.monotonic()
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return now_s
    return now_s - max(age_s, 0.0)


def _nothing() -> None:
    return None


ledger = Ledger()
"""The ledger of this process."""


def goodput_metrics() -> dict[str, float]:
    """Figures of this process for a tracker, such as `accelerator.log(goodput_metrics(), step=step)`.

    Returns:
        `goodput`: the part of its time in steps that count, in `0..1`; `ettr`: the part of its time after the set-up
        that failures and changes of size have not cost; `world_size` and `generation` where they are known; and
        `seconds/CATEGORY`. Empty if no ledger is open: set HYPERPOD_EVENTS for a job of `hyperpodrun` or a `Session`,
        use the callback `GoodputMonitor`, or give `log_with` to the Accelerator of a `HyperPodPlugin`.
    """
    totals = ledger.totals() if ledger.is_active else {}
    whole_s = sum(totals.values())
    if whole_s <= 0:
        return {}
    after_setup_s = whole_s - totals.get(TimeCategory.SETUP, 0.0)
    lost_s = sum(totals.get(each, 0.0) for each in _LOST)
    found = {"goodput": totals.get(TimeCategory.STEP, 0.0) / whole_s}
    if after_setup_s > 0:
        found["ettr"] = 1 - lost_s / after_setup_s
    found |= {name: float(ledger.world[name]) for name in ("world_size", "generation") if name in ledger.world}
    return found | {f"seconds/{category}": value for category, value in totals.items() if value > 0}


_LOST = (
    TimeCategory.DETECT,
    TimeCategory.ASSEMBLE,
    TimeCategory.RESTORE,
    TimeCategory.REDONE,
    TimeCategory.RESIZE,
    TimeCategory.CAPACITY_WAIT,
)
