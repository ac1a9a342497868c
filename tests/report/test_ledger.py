"""The ledger of a process: each second is booked once, and nothing that goes wrong in it reaches the training."""

import json
import logging
import math
import os
import random
import time
from collections.abc import Mapping
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from hyperpod_plugins import ledger as module
from hyperpod_plugins.events import Event, record
from hyperpod_plugins.ledger import Ledger, TimeCategory
from hyperpod_plugins.report.run_files import read_run

STARTED_S = 100.0
"""When the process started, by the clock of these tests; its ledger is opened two seconds later."""
UNIX_S = 1_700_000_000.0
IDENTITY = {"run_id": "run", "worker_id": 3, "incarnation": 1, "restart": 0}


class Clock:
    """Stands in for the module `time`, and goes on when a test says so."""

    CLOCK_BOOTTIME = 7

    def __init__(self):
        self.now_s = STARTED_S + 2.0

    def monotonic(self):
        return self.now_s

    def time(self):
        return self.now_s + UNIX_S

    def after(self, seconds):
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(module, "_process_start_s", lambda: STARTED_S)
    return clock


class Book:
    """A ledger that is open, and what it has written."""

    def __init__(self, path):
        self.path, self.ledger, self.waited_s = path, Ledger(), 0.0

    def open(self):
        self.ledger.open(self.path, IDENTITY, waited_s=lambda: self.waited_s)

    def lines(self, *kinds):
        """Lines of some kinds, or all but those that say what is still open; closes the ledger."""
        self.ledger.close()
        return [
            line
            for line in map(json.loads, self.path.read_text().splitlines())
            if (line["kind"] in kinds if kinds else line["kind"] != "open")
        ]

    def seconds(self):
        return [line["seconds"] for line in self.lines("time", "step")]


@pytest.fixture
def make_book(clock, tmp_path):
    books = []

    def make(name="a/folder/worker-3.jsonl"):
        books.append(Book(tmp_path / name))
        books[-1].open()
        return books[-1]

    yield make
    for book in books:
        book.ledger.close()


@pytest.fixture
def book(make_book):
    return make_book()


def until(condition, what):
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.02)


# -- where the time goes ----------------------------------------------------------------------------------------------


def test_the_first_line_says_which_process_it_is_and_when_it_started(book):
    head, *_, end = book.lines()
    assert head["kind"] == "process"
    assert head["format"] == module.LEDGER_FORMAT
    assert head["pid"] == os.getpid()
    assert head["at_s"] == UNIX_S + STARTED_S
    assert head["host"]
    assert head.items() >= IDENTITY.items()
    assert end == {"kind": "end", "at_s": UNIX_S + STARTED_S + 2.0}


def test_time_since_the_start_of_the_process_is_set_up_until_a_category_begins(book, clock):
    clock.after(1.0)
    book.ledger.enter(TimeCategory.EVALUATION)
    clock.after(4.0)
    book.ledger.enter(TimeCategory.SETUP)
    clock.after(0.5)
    assert book.seconds() == [{"setup": 3.0}, {"evaluation": 4.0}, {"setup": 0.5}]


def test_a_step_has_one_line_with_the_seconds_of_all_its_categories(book, clock):
    ledger = book.ledger
    ledger.enter(TimeCategory.STEP)
    for number in (1, 2):
        ledger.enter(TimeCategory.DATA_WAIT)
        clock.after(0.25)
        ledger.enter(TimeCategory.STEP)
        clock.after(1.0)
        with ledger.phase(TimeCategory.SNAPSHOT):
            clock.after(0.125)
        clock.after(0.5)
        book.waited_s += 0.75
        ledger.note(samples=number)
        ledger.commit(number)
        assert ledger.category is TimeCategory.OTHER
        clock.after(2.0)
    first, second = book.lines("step")
    assert first["seconds"] == {"data_wait": 0.25, "step": 1.5, "snapshot": 0.125}
    assert second["seconds"] == {"data_wait": 0.25, "step": 1.5, "snapshot": 0.125, "other": 2.0}
    assert [(each["step"], each["samples"], each["waited_s"]) for each in (first, second)] == [
        (1, 1, 0.75),
        (2, 2, 0.75),
    ]


def test_what_belongs_to_no_step_has_lines_of_its_own(book, clock):
    ledger = book.ledger
    ledger.enter(TimeCategory.STEP)
    clock.after(1.0)
    ledger.commit(1)
    clock.after(0.5)
    with ledger.phase(TimeCategory.CHECKPOINT_SAVE):
        clock.after(3.0)
    clock.after(0.25)
    ledger.commit(2)
    kinds = [(line["kind"], line["seconds"]) for line in book.lines("time", "step")]
    assert kinds[1:] == [
        ("step", {"step": 1.0}),
        ("time", {"other": 0.5}),
        ("time", {"checkpoint_save": 3.0}),
        ("step", {"other": 0.25}),
    ]


def test_phases_nest_and_each_second_belongs_to_the_inner_one(book, clock):
    ledger = book.ledger
    ledger.enter(TimeCategory.RESTORE)
    with ledger.phase(TimeCategory.CHECKPOINT_RESTORE):
        clock.after(1.0)
        with ledger.phase(TimeCategory.CAPACITY_WAIT):
            clock.after(2.0)
        clock.after(4.0)
        with ledger.phase(TimeCategory.CHECKPOINT_RESTORE):
            clock.after(8.0)
        assert ledger.category is TimeCategory.CHECKPOINT_RESTORE
    assert ledger.category is TimeCategory.RESTORE
    clock.after(16.0)
    assert book.seconds() == [
        {"setup": 2.0},
        {"checkpoint_restore": 1.0},
        {"capacity_wait": 2.0},
        {"checkpoint_restore": 12.0},
        {"restore": 16.0},
    ]


def test_a_phase_decorates_a_function_that_may_be_called_within_itself(book, clock):
    @book.ledger.phase(TimeCategory.CHECKPOINT_SAVE)
    def save(depth):
        clock.after(1.0)
        if depth:
            save(depth - 1)

    save(2)
    assert book.ledger.category is TimeCategory.SETUP
    save(0)
    assert book.seconds() == [{"setup": 2.0}, {"checkpoint_save": 3.0}, {"checkpoint_save": 1.0}]


def test_a_phase_ends_with_an_exception_too(book, clock):
    book.ledger.enter(TimeCategory.STEP)

    @book.ledger.phase(TimeCategory.EVALUATION)
    def evaluate():
        clock.after(1.0)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        evaluate()
    assert book.ledger.category is TimeCategory.STEP
    clock.after(0.5)
    assert book.seconds() == [{"setup": 2.0}, {"evaluation": 1.0}, {"step": 0.5}]


def test_a_phase_that_a_fault_ends_leaves_what_the_repair_has_begun(book, clock):
    ledger = book.ledger
    ledger.enter(TimeCategory.STEP)

    @ledger.phase(TimeCategory.SNAPSHOT)
    def copy():
        clock.after(1.0)
        ledger.interrupt(0.0, TimeCategory.ASSEMBLE)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        copy()
    assert ledger.category is TimeCategory.ASSEMBLE


def test_the_time_until_each_item_is_there_is_waiting_for_data(book, clock):
    ledger = book.ledger

    def items():
        for each in "ab":
            clock.after(1.0)
            yield each
        clock.after(4.0)

    ledger.enter(TimeCategory.OTHER)
    found = []
    for item in ledger.waits_for_data(items()):
        found.append(item)
        assert ledger.category is TimeCategory.OTHER
        clock.after(0.5)
    ledger.commit(1)
    assert found == ["a", "b"]
    assert ledger.category is TimeCategory.OTHER
    assert book.lines("step")[0]["seconds"] == {"data_wait": 6.0, "other": 1.0}


def test_a_source_of_data_that_fails_fails_as_without_the_ledger_and_its_time_is_booked(book, clock):
    ledger = book.ledger

    def items():
        yield 1
        clock.after(2.0)
        raise KeyError("of the data")

    ledger.enter(TimeCategory.OTHER)
    with pytest.raises(KeyError, match="of the data"):
        list(ledger.waits_for_data(items()))
    assert ledger.category is TimeCategory.OTHER
    ledger.commit(1)
    assert book.lines("step")[0]["seconds"] == {"data_wait": 2.0}


def test_a_source_that_is_left_early_changes_nothing(book):
    waiting = book.ledger.waits_for_data([1, 2, 3])
    assert next(waiting) == 1
    book.ledger.enter(TimeCategory.STEP)
    waiting.close()
    assert book.ledger.category is TimeCategory.STEP


# -- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("noticed_s", "lost"),
    [
        (1.0, {"redone": 2.0, "detect": 1.0}),
        (0.0, {"redone": 3.0, "detect": 0.0}),
        (7.0, {"redone": 0.0, "detect": 3.0}),  # never more than there was
        (-5.0, {"redone": 3.0, "detect": 0.0}),  # the clock of the one who has reported the failure is ahead
    ],
)
def test_a_fault_turns_the_step_into_lost_work_and_the_time_until_it_was_noticed(book, clock, noticed_s, lost):
    ledger = book.ledger
    ledger.enter(TimeCategory.DATA_WAIT)
    clock.after(0.5)
    ledger.enter(TimeCategory.STEP)
    clock.after(3.0)
    ledger.interrupt(noticed_s, TimeCategory.ASSEMBLE)
    clock.after(4.0)
    ledger.enter(TimeCategory.RESTORE)
    clock.after(5.0)
    ledger.enter(TimeCategory.STEP)
    clock.after(6.0)
    ledger.commit(1)
    kept = {name: value for name, value in lost.items() if value}
    assert book.seconds()[1:] == [
        {"data_wait": 0.5} | kept,
        {"assemble": 4.0},
        {"restore": 5.0},
        {"step": 6.0},
    ]


def test_a_fault_between_two_steps_costs_no_step(book, clock):
    ledger = book.ledger
    ledger.enter(TimeCategory.STEP)
    clock.after(1.0)
    ledger.commit(1)
    clock.after(2.0)
    ledger.interrupt(1.5, TimeCategory.ASSEMBLE)
    assert book.seconds()[1:] == [{"step": 1.0}, {"other": 2.0}]


# -- the law ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_the_seconds_of_all_lines_are_the_time_from_the_start_of_the_process_to_the_last_line(book, clock, seed):
    draw, ledger, step = random.Random(seed), book.ledger, 0
    with_phase = [
        TimeCategory.SNAPSHOT,
        TimeCategory.CHECKPOINT_SAVE,
        TimeCategory.CHECKPOINT_RESTORE,
        TimeCategory.DATA_WAIT,
    ]

    def act(depth):
        nonlocal step
        clock.after(draw.expovariate(10) if draw.random() < 0.9 else draw.expovariate(0.1))
        match draw.randrange(6):
            case 0 | 1:
                ledger.enter(draw.choice(list(TimeCategory)))
            case 2:
                step += 1
                ledger.commit(step)
            case 3:
                ledger.interrupt(draw.expovariate(5), TimeCategory.ASSEMBLE)
            case 4 if depth:
                with ledger.phase(draw.choice(with_phase)):
                    for _ in range(draw.randrange(4)):
                        act(depth - 1)
            case _:
                list(ledger.waits_for_data(range(2)))

    for _ in range(400):
        act(3)
    lines = book.lines()
    began_s, until_s = lines[0]["at_s"], lines[0]["at_s"]
    for line in lines[1:]:
        if line["kind"] in ("time", "step"):
            assert all(value >= 0 for value in line["seconds"].values())
            length_s = line["at_s"] - until_s
            assert sum(line["seconds"].values()) == pytest.approx(length_s, abs=2e-5), line
            until_s = line["at_s"]
    assert lines[-1]["at_s"] == until_s
    total_s = sum(value for line in lines for value in line.get("seconds", {}).values())
    assert total_s == pytest.approx(until_s - began_s, rel=1e-5)
    assert step > 20


def test_a_category_that_is_open_for_long_is_written_before_it_ends(book, clock):
    book.ledger.enter(TimeCategory.CAPACITY_WAIT)
    clock.after(0.9)
    clock.after(5.0)
    until(lambda: book.path.exists() and '"open"' in book.path.read_text(), "no line says that the category is open")
    (line,) = book.lines("open")
    assert (line["category"], line["at_s"] - line["since_s"]) == ("capacity_wait", pytest.approx(5.9))


def test_the_start_of_this_process_is_before_now_and_not_before_the_machine_s():
    now_s = time.monotonic()
    started_s = module._process_start_s()
    assert started_s <= time.monotonic()
    assert started_s > now_s - time.clock_gettime(time.CLOCK_BOOTTIME)
    child = os.fork()
    if child == 0:
        os._exit(0 if module._process_start_s() >= started_s else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# -- lines ------------------------------------------------------------------------------------------------------------


class Shard:
    """Stands in for the part of a loss that a rank has."""

    def __init__(self, is_whole):
        self.is_whole = is_whole

    def is_replicate(self):
        return self.is_whole


def spread(value, *, is_whole):
    class Spread(torch.Tensor):
        placements = (Shard(is_whole),)

        def to_local(self):
            assert is_whole
            return self.as_subclass(torch.Tensor)

    return torch.tensor(value).as_subclass(Spread)


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (torch.tensor(0.5), 0.5),
        (torch.tensor([[0.5]], requires_grad=True) * 2, 1.0),
        (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
        ({"loss": torch.tensor(1.5), "other": 3}, 1.5),
        (torch.tensor(math.nan), None),
        (torch.tensor(-math.inf), None),
        (0.25, 0.25),
        ({"loss": 2}, 2.0),
        ({"loss": math.nan}, None),
        (spread(0.5, is_whole=True), 0.5),
    ],
)
def test_the_loss_is_that_of_a_tensor_a_number_or_a_dict(book, result, expected):
    book.ledger.note_loss(result)
    book.ledger.commit(1)
    book.ledger.commit(2)
    first, second = book.lines("step")
    assert first["loss"] == expected
    assert "loss" not in second


@pytest.mark.parametrize(
    "result",
    [
        None,
        "loss",
        True,
        {},
        {"loss": None},
        torch.ones(2),
        torch.empty(0),
        torch.tensor(1j),
        torch.empty((), device="meta"),
        spread(0.5, is_whole=False),  # to read it would communicate
    ],
)
def test_a_result_without_a_loss_adds_none(book, result):
    book.ledger.note_loss(result)
    book.ledger.commit(1)
    assert "loss" not in book.lines("step")[0]


class Unreadable(Mapping):
    """A result of a program whose own code fails."""

    def __getitem__(self, name):
        raise RuntimeError(name)

    def __iter__(self):
        return iter(())

    def __len__(self):
        return 0


@pytest.mark.parametrize(
    "result",
    [10**400, {"loss": -(10**400)}, Unreadable(), torch.ones(1).to_mkldnn()],
    ids=["huge", "huge in a dict", "mapping that raises", "mkldnn"],
)
def test_a_loss_that_cannot_be_read_fails_no_step(book, result):
    book.ledger.note_loss(result)
    book.ledger.commit(1)
    (step,) = book.lines("step")
    assert step["step"] == 1
    assert "loss" not in step


def test_a_loss_is_read_once_the_step_is_committed_and_not_while_the_optimizer_writes(book):
    loss = torch.tensor(1.0)
    book.ledger.note_loss(loss)
    loss.fill_(2.0)  # what has been read before is not noticed
    book.ledger.commit(1)
    assert book.lines("step")[0]["loss"] == 2.0


class Device:
    """Stands in for a device: the host has a copy after so many looks, or never; what is not there yet is garbage."""

    def __init__(self, num_looks):
        self.num_looks, self.is_broken = num_looks, False

    def copy(self, value):
        host, looks = torch.tensor(-1.0), [0]

        def is_there():
            if self.is_broken:
                raise RuntimeError("CUDA error: device-side assert triggered")
            looks[0] += 1
            if looks[0] > self.num_looks:
                host.copy_(value)
            return looks[0] > self.num_looks

        return host, is_there


@pytest.fixture
def device(monkeypatch):
    device = Device(num_looks=1)
    monkeypatch.setitem(module.COPIERS, "cpu", device.copy)
    return device


class OnDevice(torch.Tensor):
    """A loss that the host does not have: to read it would wait for the device."""

    def __float__(self):
        raise AssertionError("the host waits for the device")

    item = tolist = __float__


def test_a_loss_on_a_device_is_written_with_a_later_step(book, device):
    for step in range(1, 5):
        book.ledger.note_loss(torch.tensor(step / 2).as_subclass(OnDevice))
        book.ledger.commit(step)
    book.ledger.note_loss({"loss": torch.tensor(math.inf).as_subclass(OnDevice)})
    book.ledger.commit(5)
    lines = [(line["kind"], line["step"], line.get("loss", "unknown")) for line in book.lines("step", "loss")]
    assert lines == [
        ("step", 1, "unknown"),
        ("step", 2, "unknown"),  # the device has not come so far
        ("loss", 1, 0.5),
        ("step", 3, "unknown"),
        ("loss", 2, 1.0),
        ("step", 4, "unknown"),
        ("loss", 3, 1.5),
        ("step", 5, "unknown"),
        ("loss", 4, 2.0),
        ("loss", 5, None),
    ]
    [process] = read_run(book.path.parent).workers
    assert [span.step.loss for span in process.spans if span.step is not None] == [0.5, 1.0, 1.5, 2.0, None]


def test_a_loss_that_arrives_late_is_that_of_the_last_step_of_its_number(book, device):
    """Another entry counts its steps from 1 again; the loss of a step that was lost stays."""
    device.num_looks = 0
    for loss in (1.0, 2.0):
        for step in (1, 2):
            book.ledger.note_loss(torch.tensor(loss + step / 4))
            book.ledger.commit(step)
    book.lines()
    [process] = read_run(book.path.parent).workers
    assert [span.step.loss for span in process.spans if span.step is not None] == [1.25, 1.5, 2.25, 2.5]


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_device_that_hangs_or_fails_holds_nothing_up(book, device, is_broken):
    device.num_looks, device.is_broken = 10**9, is_broken
    for step in range(1, 101):
        book.ledger.note_loss(torch.tensor(0.5))
        book.ledger.commit(step)
    began_s = time.monotonic()
    book.ledger.close()
    assert time.monotonic() - began_s < 10
    assert [line["step"] for line in book.lines("step")] == [*range(1, 101)]
    assert book.lines()[-1]["kind"] == "end"
    assert not book.lines("loss")


def test_a_loss_on_a_device_without_a_queue_is_not_read(book):
    class Elsewhere(torch.Tensor):
        is_cpu, device = False, torch.device("xpu", 0)

    book.ledger.note_loss(torch.tensor(0.5).as_subclass(Elsewhere))
    book.ledger.commit(1)
    assert "loss" not in book.lines("step")[0]


def test_what_json_cannot_express_ends_no_writing(book):
    within_itself = []
    within_itself.append(within_itself)
    book.ledger.note(names={("a", 1): 2.0})
    book.ledger.commit(1)
    book.ledger.note(within_itself=within_itself)
    book.ledger.commit(2)
    book.ledger.commit(3)
    book.ledger.close()
    lines = [json.loads(line) for line in book.path.read_text().splitlines() if line]
    steps = [line for line in lines if line["kind"] == "step"]
    assert [line["step"] for line in steps] == [1, 3]
    assert steps[0]["names"] == {"('a', 1)": 2.0}
    assert lines[-1]["kind"] == "end"


def refuse(name):
    raise AssertionError(f"{name} is no JSON")


def test_all_lines_are_strict_json_whatever_they_are_given(book):
    book.ledger.note(nan=math.nan, list=[1.0, math.inf, {"deep": -math.inf}], path=book.path, tensor=torch.tensor(1))
    book.ledger.commit(1)
    record(Event(name="recovery.retry", at_s=math.inf, details={"cause": 'a "\n\u2028\0 \ud800', "nan": math.nan}))
    book.ledger.write("world", rank=math.nan)
    book.ledger.close()
    lines = [json.loads(line, parse_constant=refuse) for line in book.path.read_bytes().splitlines()]
    step, event, world = lines[-4:-1]
    assert step["nan"] is None
    assert step["list"] == [1.0, None, {"deep": None}]
    assert step["path"] == str(book.path)
    assert event["details"] == {"cause": 'a "\n\u2028\0 \ud800', "nan": None}
    assert event["at_s"] is None
    assert world["rank"] is None


def test_events_are_written_until_the_ledger_is_closed(book):
    event = Event(name="recovery.retry", at_s=1.5, duration_s=0.25, details={"step": 3})
    record(event)
    found = book.lines("event")
    record(event)
    assert found == [
        {"kind": "event", "name": "recovery.retry", "at_s": 1.5, "duration_s": 0.25, "details": {"step": 3}}
    ]
    assert book.lines("event") == found


def test_a_step_has_less_than_four_kilobytes(book, clock):
    ledger = book.ledger
    for category in TimeCategory:
        ledger.enter(category)
        clock.after(1234.56789)
    ledger.interrupt(3.0, TimeCategory.ASSEMBLE)
    ledger.note(samples=2**62)
    ledger.note_loss(torch.tensor(1 / 3, dtype=torch.float64))
    book.waited_s = 9876.54321
    ledger.commit(2**40)
    book.lines()
    assert len(book.path.read_bytes()) < 4096


def test_closing_writes_all_and_a_second_opening_goes_on(book, clock):
    for step in range(1, 5001):
        book.ledger.enter(TimeCategory.STEP)
        clock.after(0.001)
        book.ledger.commit(step)
    book.open()  # while it is open: nothing
    assert [line["step"] for line in book.lines("step")] == list(range(1, 5001))
    clock.after(3.0)
    book.open()
    clock.after(1.0)
    book.ledger.enter(TimeCategory.EVALUATION)
    clock.after(2.0)
    lines = book.lines()
    assert [line["kind"] for line in lines if line["kind"] != "step"] == [
        *("process", "time", "end"),
        *("time", "time", "end"),
    ]
    assert [line["seconds"] for line in lines[-3:-1]] == [{"other": 4.0}, {"evaluation": 2.0}]
    (process,) = read_run(book.path.parent).workers
    assert process.has_ended
    assert process.ended_s - process.began_s == pytest.approx(2.0 + 5.0 + 6.0)
    assert sum(book.ledger.totals().values()) == pytest.approx(13.0)


def test_a_process_that_is_killed_after_its_ledger_was_opened_again_has_not_ended_by_itself(book, clock):
    book.ledger.close()
    book.open()
    clock.after(1.0)
    book.ledger.enter(TimeCategory.EVALUATION)
    until(lambda: book.path.read_text().endswith('{"other":1.0}}\n'), "no line")
    (process,) = read_run(book.path.parent).workers
    assert not process.has_ended


def test_asking_for_totals_books_nothing_as_other_threads_may_ask(book, clock):
    book.ledger.enter(TimeCategory.STEP)
    clock.after(1.0)
    before = dict(vars(book.ledger)), dict(book.ledger._seconds), dict(book.ledger._totals)
    assert book.ledger.totals() == {"setup": 2.0, "step": 1.0}
    assert (vars(book.ledger), book.ledger._seconds, book.ledger._totals) == before


def test_a_ledger_that_was_never_opened_does_nothing(tmp_path):
    ledger = Ledger()
    ledger.enter(TimeCategory.STEP)
    with ledger.phase(TimeCategory.SNAPSHOT):
        ledger.note(samples=1)
    ledger.note_loss(torch.tensor(1.0))
    ledger.interrupt(1.0, TimeCategory.ASSEMBLE)
    ledger.commit(1)
    ledger.write("world", rank=1)
    ledger.note_event(Event(name="a", at_s=0.0))
    assert list(ledger.waits_for_data("ab")) == ["a", "b"]
    ledger.close()
    assert not ledger.is_active
    assert ledger.category is TimeCategory.SETUP
    assert not ledger._lines
    assert not ledger._seconds
    assert not ledger._details


# -- the file ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def heard(caplog, monkeypatch):
    for name in ("hyperpod_plugins", "hyperpod_plugins.ledger"):
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    caplog.set_level(logging.WARNING)
    return lambda: [each for each in caplog.records if "ledger" in each.getMessage()]


def test_a_folder_that_cannot_be_created_gives_one_warning_and_the_training_goes_on(make_book, tmp_path, heard):
    (tmp_path / "a").write_text("a file where a folder should be")
    book = make_book()
    until(heard, "no warning")
    for step in range(3):
        book.ledger.commit(step)
    book.ledger.close()
    (warning,) = heard()
    assert "cannot be written" in warning.getMessage()
    assert str(book.path) in warning.getMessage()


def test_a_full_disk_gives_one_warning_and_the_training_goes_on(clock, heard):
    book = Book(module.Path("/dev/full"))
    book.open()
    until(heard, "no warning")
    for step in range(3):
        book.ledger.commit(step)
    book.ledger.close()
    (warning,) = heard()
    assert "No space left" in warning.getMessage()


def test_after_a_write_that_failed_midway_the_next_one_begins_a_line(make_book, monkeypatch):
    original, is_full = os.write, True

    def write(file, data):
        if not is_full or not data.startswith(b'{"kind":"process'):
            return original(file, data)
        original(file, data[:40])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "os", SimpleNamespace(**vars(os) | {"write": write}))
    book = make_book()
    until(lambda: book.path.exists() and book.path.stat().st_size == 40, "nothing was written")
    is_full = False
    book.ledger.commit(1)
    book.ledger.close()
    torn, *whole = book.path.read_text().splitlines()
    assert len(torn) == 40
    assert [json.loads(line)["kind"] for line in whole] == ["step", "end"]


def test_a_process_that_comes_after_one_that_was_torn_is_read(make_book, tmp_path, clock):
    first = make_book("events/worker.jsonl")
    first.ledger.commit(1)
    first.lines()
    torn = b'{"kind":"step","at_s":17000'
    first.path.write_bytes(first.path.read_bytes() + torn)
    second = make_book("events/worker.jsonl")
    second.ledger.commit(2)
    second.ledger.close()
    run = read_run(tmp_path / "events")
    assert [[span.step.number for span in each.spans if span.step] for each in run.workers] == [[1], [2]]


def test_lines_of_processes_that_share_a_file_never_mix(tmp_path):
    path, children = tmp_path / "shared.jsonl", []
    for number in range(3):
        child = os.fork()
        if child == 0:
            ledger = Ledger()
            ledger.open(path, {"run_id": "run", "worker_id": number}, waited_s=lambda: 0.0)
            for step in range(1, 2001):
                ledger.note(filling="x" * (step % 300), worker=number)
                ledger.commit(step)
                if step % 200 == 0:
                    time.sleep(0.05)
            ledger.close()
            os._exit(0)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0]
    lines = [json.loads(line) for line in path.read_text().splitlines() if line]  # an empty one ends what looked torn
    for number in range(3):
        steps = [line["step"] for line in lines if line["kind"] == "step" and line["worker"] == number]
        assert steps == list(range(1, 2001))


# -- child processes --------------------------------------------------------------------------------------------------


def test_a_forked_process_writes_nothing_and_its_parent_goes_on(book):
    child = os.fork()
    if child == 0:
        book.ledger.commit(66)
        record(Event(name="of the child", at_s=0.0))
        was_active = book.ledger.is_active
        book.ledger.close()
        os._exit(1 if was_active else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    book.ledger.commit(1)
    record(Event(name="of the parent", at_s=0.0))
    lines = book.lines()
    assert [line["kind"] for line in lines] == ["process", "step", "event", "end"]
    assert (lines[1]["step"], lines[2]["name"]) == (1, "of the parent")


def test_a_forked_process_can_open_a_ledger_of_its_own(book, tmp_path):
    child = os.fork()
    if child == 0:
        book.ledger.open(tmp_path / "child.jsonl", IDENTITY, waited_s=lambda: 0.0)
        book.ledger.commit(7)
        book.ledger.close()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    own = [json.loads(line) for line in (tmp_path / "child.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in own] == ["process", "step", "end"]
    assert own[0]["pid"] == child
    assert [line["kind"] for line in book.lines()] == ["process", "time", "end"]


def test_workers_of_a_dataloader_write_nothing(book):
    class Items(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            book.ledger.commit(100 + index)
            return index

    loader = DataLoader(Items(), num_workers=2, multiprocessing_context="fork", timeout=60)
    assert [int(item) for item in loader] == [0, 1, 2, 3]
    book.ledger.commit(1)
    assert [line["step"] for line in book.lines("step")] == [1]
