"""The view of a running job: from sound and damaged stores and ledgers, as text, and over HTTP."""

import argparse
import contextlib
import http.client
import json
import os
import socket
import threading
import time
from dataclasses import replace

import pytest
import torch.distributed as dist
from report.live_cost import write_ledgers
from report.synthetic_ledgers import SyntheticRun

from hyperpod_plugins import cli
from hyperpod_plugins.elastic import JobStore
from hyperpod_plugins.elastic.membership.admission import publish_initial_world
from hyperpod_plugins.elastic.rendezvous.control import Controller, Ticket
from hyperpod_plugins.elastic.rendezvous.store import RendezvousClosing, RendezvousStore
from hyperpod_plugins.elastic.store.world import WorldPlan
from hyperpod_plugins.env import JobEnv
from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.recovery.watchdog import Heartbeat
from hyperpod_plugins.report import serve_command, watch
from hyperpod_plugins.report.live import (
    JobReading,
    JobView,
    RankView,
    StepRate,
    heartbeat_from,
    incident_line,
    job_view,
)
from hyperpod_plugins.report.live_ledgers import LedgerFigures, LiveLedgers
from hyperpod_plugins.report.live_text import plain_lines, rate_text, screen, shown_ranks
from hyperpod_plugins.report.make_report import run_report
from hyperpod_plugins.report.run_report import Incident
from hyperpod_plugins.report.serve_command import is_named, names_of, open_server
from hyperpod_plugins.report.top_command import Action, Prompt, split_keys
from hyperpod_plugins.report.watch import JobWatch, WatchOptions

STATUS = {
    "ranks": 2,
    "replicas": 0,
    "shard_degree": 0,
    "tensor_degree": 0,
    "waiting": 1,
    "asked": 0,
    "generation": 3,
}
INCIDENT = Incident(
    at_s=120.0, kind="failure", cause="killed by SIGKILL", rank=3, host="", step=9, steps_lost=0, generation=1,
    level="replace", detect_s=0.0, assemble_s=0.2, restore_s=0.05, redone_s=0.0, total_s=0.25,
)  # fmt: skip


def beat(**more):
    usual = {"incarnation": 0, "generation": 3, "committed": 7, "activity": "computing step 7", "in_step": True}
    return Heartbeat(**{**usual, "is_loading": False, "waits_for": "", "waited_s": 0.0, "sequence": 5, **more})


def reading(heartbeat=None, *, incarnation=0, silent_s=0.0, **more):
    """Of a job of two ranks, the first of which is as the others say."""
    heartbeats = {1: beat()} | ({} if heartbeat is None else {0: heartbeat})
    incarnations, silent = {0: incarnation, 1: 0}, {0: silent_s, 1: 0.2}
    return JobReading(run_id="job", status=STATUS, worker_ids=(0, 1), incarnations=incarnations, heartbeats=heartbeats,
                 silent_s=silent, **more)  # fmt: skip


# -- the view --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seen", "state", "step"),
    [
        (reading(beat()), "running", 7),
        (reading(beat(), silent_s=4.9), "running", 7),
        (reading(beat(), silent_s=5.1), "late", 7),
        (reading(None), "joining", None),
        (reading(beat(), incarnation=1), "joining", None),  # its successor has not sent any yet
        (reading(beat(incarnation=1), incarnation=1), "running", 7),
        (reading(beat(incarnation=1), incarnation=0), "running", 7),  # it is published later
        (reading(beat(), silent_s=9.0, exited=frozenset({0})), "gone", 7),
        (reading(None, exited=frozenset({0})), "gone", None),
        (reading(beat(committed=-1)), "running", None),
    ],
)
def test_where_a_rank_stands(seen, state, step):
    view = job_view(seen)
    assert (view.ranks[0].state, view.ranks[0].step) == (state, step)
    assert (view.ranks[1].state, view.state, view.generation, view.num_waiting) == ("running", "running", 3, 1)
    assert json.loads(json.dumps(view.to_dict(), allow_nan=False))["ranks"][0]["state"] == state


def test_a_job_that_has_not_begun():
    view = job_view(JobReading(run_id="job", status=dict.fromkeys(STATUS, 0)))
    assert (view.state, view.ranks, view.step) == ("starting", [], None)
    assert plain_lines(view) == ["job job: starting, generation 0", "no rank has begun to train"]


@pytest.mark.parametrize("value", [None, -1, "2", True, 2.0, 1 << 60, [2]])
def test_a_status_that_is_none_is_refused(value):
    with pytest.raises(ValueError, match="waiting of the status must be a count"):
        job_view(replace(reading(beat()), status=STATUS | {"waiting": value}))


@pytest.mark.parametrize(
    "changed",
    [
        {"committed": "7"}, {"committed": None}, {"committed": 1.5}, {"committed": True}, {"committed": 1 << 60},
        {"activity": 3}, {"activity": ["x"]}, {"waited_s": "long"}, {"waited_s": float("nan")},
        {"waited_s": float("inf")}, {"in_step": 1}, {"sequence": None}, {"incarnation": {}},
    ],
)  # fmt: skip
def test_a_damaged_heartbeat_is_none(changed):
    assert heartbeat_from(beat().to_dict() | changed) is None


@pytest.mark.parametrize("values", [None, [], "x", 3, {}, {"incarnation": 0}])
def test_what_is_no_heartbeat(values):
    assert heartbeat_from(values) is None


def test_a_heartbeat_of_another_version_and_one_with_escapes():
    assert heartbeat_from(beat().to_dict() | {"mood": "good"}) == beat()
    older = {name: value for name, value in beat().to_dict().items() if name not in ("world_number", "collective")}
    assert heartbeat_from(older) == beat()
    found = heartbeat_from(beat(activity="\x1b[2J[red]up\n" + "x" * 100_000).to_dict())
    assert found is not None
    assert found.activity.startswith("\\x1b[2J[red]up xxx")
    assert len(found.activity) <= 200


def test_texts_of_ledgers_are_one_printable_line():
    figures = LedgerFigures(
        incidents=[replace(INCIDENT, cause="\x1b]0;mine\x07\nnext")] * 9,
        began_s=100.0,
        places={(0, 0): ("\x1b[31mhost", 12)},
        goodput=float("nan"),
        ettr=0.98765,
    )
    view = job_view(reading(beat(), figures=figures, events="/a\nfolder"))
    assert view.ranks[0].host == "\\x1b[31mhost"
    assert len(view.incidents) == 5
    assert (view.goodput, view.ettr) == (None, 0.9877)
    assert all(line.isprintable() for line in plain_lines(view))


def test_an_incident_in_a_line():
    assert incident_line(INCIDENT, 100.0) == "after 20.0 s: rank 3: killed by SIGKILL; replaced in 0.25 s, 0 steps lost"
    unrepaired = replace(INCIDENT, level="none", rank=None)
    assert incident_line(unrepaired, 100.0) == "after 20.0 s: killed by SIGKILL"
    restart = replace(INCIDENT, level="checkpoint", kind="restart", total_s=200.0)
    assert incident_line(restart, 100.0).endswith("; all restarted in 3 min 20 s")


@pytest.mark.parametrize(
    ("cause", "level", "told"),
    [
        ("grows from 2 to 3", "replace", "grows from 2 to 3; resized in 0.25 s"),
        ("shrinks from 3 to 2", "retry", "shrinks from 3 to 2; resized in 0.25 s"),
        ("other degrees", "checkpoint", "other degrees; all restarted in 0.25 s"),
    ],
)
def test_a_change_of_size_is_no_repair(cause, level, told):
    resize = replace(INCIDENT, kind="resize", cause=cause, level=level, rank=None)
    assert incident_line(resize, 100.0) == f"after 20.0 s: {told}"


def test_a_change_of_size_that_loses_steps_says_so():
    resize = replace(INCIDENT, kind="resize", cause="shrinks from 3 to 2", level="snapshot", rank=None, steps_lost=3)
    assert incident_line(resize, 100.0).endswith("; resized in 0.25 s, 3 steps lost")


def test_the_rate_is_that_of_a_window_and_begins_anew_after_a_return():
    rate = StepRate()
    assert rate.update(None, 0.0) is None
    assert rate.update(10, 1.0) is None
    assert rate.update(30, 11.0) == 2.0
    assert rate.update(30, 41.0) == 0.0  # nothing in the last 30 s
    assert rate.update(5, 42.0) is None
    assert rate.update(9, 44.0) == 2.0
    assert (rate_text(0.0), rate_text(0.25), rate_text(2.5), rate_text(1234.5)) == (
        "0 steps/s", "4.0 s a step", "2.5 steps/s", "1234 steps/s",
    )  # fmt: skip


# -- text ------------------------------------------------------------------------------------------------------------


def rank(number, state="running", step=7, **more):
    return RankView(rank=number, worker_id=number, incarnation=0, state=state, step=step, **more)


def test_plain_lines():
    waits = rank(1, "late", activity="computing step 7", waits_for="world", collective=31, waited_s=12.25,
                 heartbeat_age_s=6.0, host="node7", pid=41)  # fmt: skip
    view = JobView(run_id="job", state="running", generation=2, round=1, num_ranks=4, num_replicas=2, shard_degree=2,
                   tensor_degree=1, num_waiting=2, num_requested=3, ranks=[rank(0), waits], step=7, steps_per_s=2.0,
                   goodput=0.912, ettr=0.98, snapshot_age_s=130.0, part_read=0.5, incidents=["after 3 s"])  # fmt: skip
    assert plain_lines(view) == [
        "job job: running, 4 ranks in 2 replicas (shard degree 2, tensor degree 1), generation 2, 1 restart, "
        "2 processes waiting to join, 3 replicas requested",
        "step: 7, 2 steps/s",
        "goodput: 91.2%",
        "ETTR: 98.0%",
        "last snapshot: 2 min 10 s ago",
        "ledgers: 50% read so far",
        "rank 0: running, step 7",
        "rank 1: late, step 7, waits for 12.2 s in collective 31 of the world group; computing step 7, last heartbeat "
        "6.0 s ago, node7, pid 41",
        "incident after 3 s",
    ]


def test_a_terminal_shows_the_ranks_that_need_attention():
    ranks = [rank(number, step=100 + number) for number in range(20)]
    ranks[11], ranks[15] = rank(11, "gone", step=None), rank(15, "late", step=300)
    assert [each.rank for each in shown_ranks(ranks, 4)] == [0, 1, 11, 15]
    assert shown_ranks(ranks, 20) == ranks
    assert shown_ranks(ranks, 0) == []


@pytest.mark.parametrize(("width", "height"), [(120, 30), (40, 8), (20, 3), (300, 100)])
def test_a_terminal_of_any_size_gets_the_text_and_no_markup(width, height):
    rich = pytest.importorskip("rich.console")
    view = job_view(reading(beat(activity="[bold red]x[/] [link=file:///]"), silent_s=7.0))
    console = rich.Console(width=width, height=height, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    with console.file:
        console.print(screen(view, "prompt", width, height))
        text = console.export_text()
    assert all(len(line) <= width for line in text.splitlines())
    if width >= 120:
        assert "[bold red]x[/] [link=file:///]" in text
        assert "late" in text


# -- keys ------------------------------------------------------------------------------------------------------------

VIEW = JobView(run_id="job", state="running", num_ranks=12, ranks=[rank(number) for number in range(12)])


@pytest.mark.parametrize(
    ("keys", "action"),
    [
        ("q", Action()),
        ("\x04", Action()),
        ("k1y", Action(kill=VIEW.ranks[1])),
        ("k11y", Action(kill=VIEW.ranks[11])),
        ("k12\x7f0\x7f1y", Action(kill=VIEW.ranks[11])),
        ("xk3\ny", Action(kill=VIEW.ranks[3])),
        ("k12y", None),  # there is none
        ("ky", None),
        ("k1n", None),
        ("k1\x1b", None),
        ("k1qy", None),
        ("1y", None),
        ("k\u0661y", None),
        ("k99999999999999y", None),
    ],
)
def test_keys(keys, action):
    prompt = Prompt()
    found = [prompt.press(key, VIEW, 0.0) for key in keys]
    assert found[-1] == action
    assert not any(found[:-1])


def test_the_line_of_keys_says_what_happens():
    prompt = Prompt()
    assert prompt.text(0.0).startswith("q: quit")
    for key in "k1":
        prompt.press(key, VIEW, 0.0)
    assert prompt.text(0.0) == "kill which rank? 1_   (y: send SIGKILL, Esc: do not)"
    prompt.press("y", VIEW, 0.0)
    assert prompt.text(1.0) == "the agent of rank 1 was asked to kill its process (worker 1)"
    assert prompt.text(9.0).startswith("q: quit")
    for key in "k77y":
        prompt.press(key, VIEW, 9.0)
    assert prompt.text(9.0) == "there is no rank 77 among the 12 ranks of the job"


def test_arrows_are_no_keys():
    assert split_keys(b"\x1b[A") == []
    assert split_keys(b"\x1b") == ["\x1b"]
    assert split_keys(b"k1y") == ["k", "1", "y"]
    assert split_keys(b"\xff") == ["\ufffd"]


# -- ledgers ---------------------------------------------------------------------------------------------------------


def append(path, *lines):
    with path.open("a") as file:
        file.writelines((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)


def read_all(ledgers, now_s=0.0):
    for _ in range(100):
        figures = ledgers.read(now_s)
        if figures.part_read >= 1.0:
            return figures
    raise AssertionError(figures)


def test_figures_agree_with_the_report_while_the_run_goes_on(tmp_path):
    """Ranks that wait for each other; one is lost and replaced; and two steps are lost."""
    write_ledgers(tmp_path, 2, 50, step_s=1.0, waited_s=0.3)
    ledgers = LiveLedgers(tmp_path)
    for is_last in (False, True):
        figures, report = read_all(ledgers), run_report(tmp_path).headline
        assert figures.goodput == pytest.approx(report.goodput, abs=1e-6)
        assert figures.ettr == pytest.approx(report.ettr, abs=1e-6)
        for number in range(0 if is_last else 2):
            step = {"kind": "step", "seconds": {"step": 1.0}, "waited_s": 0.0}
            lines = ({**step, "at_s": 1010.0 + n, "step": n} for n in range(51, 61))
            append(tmp_path / f"worker-{number}-0.0.jsonl", *lines)
    head = {"format": 1, "pid": 7, "host": "node0", "run_id": "synthetic", "worker_id": 1, "incarnation": 1}
    append(
        tmp_path / "worker-1-0.1.jsonl",
        {"kind": "process", "at_s": 1090.0, "restart": 0, **head},
        {"kind": "time", "at_s": 1093.0, "seconds": {"setup": 2.5, "restore": 0.5}},
        {"kind": "world", "at_s": 1093.0, "rank": 1, "world_size": 2, "replicas": 2, "generation": 1},
        {"kind": "entry", "at_s": 1093.0, "entry": 0},
        *({"kind": "step", "at_s": 1035.0 + n, "seconds": {"step": 1.0}, "waited_s": 0.0, "step": n} for n in (59, 60)),
    )
    figures = read_all(ledgers)
    again = read_all(LiveLedgers(tmp_path))
    assert (again.goodput, again.ettr) == pytest.approx((figures.goodput, figures.ettr))
    report = run_report(tmp_path).headline
    assert report.steps_lost == 2
    assert figures.goodput == pytest.approx(report.goodput, abs=0.01)
    assert figures.ettr == pytest.approx(report.ettr, abs=0.01)
    assert figures.places[1, 1] == ("node0", 7)


def test_what_restarted_processes_load_is_lost_in_both(tmp_path):
    """Before the first step; a load after the steps is none of the failure."""
    run = SyntheticRun(2).steps(4).restart(0, back_to=4, load_s=16.0).steps(2).phase("checkpoint_restore", 8.0)
    figures, report = read_all(LiveLedgers(run.write(tmp_path))), run_report(tmp_path).headline
    assert figures.ettr == pytest.approx(report.ettr, abs=1e-3)
    assert report.ettr == pytest.approx(1 - 21.0 / (run.wall_s - 2.0), abs=1e-3)


def test_a_line_is_read_when_it_is_whole(tmp_path):
    write_ledgers(tmp_path, 1, 2)
    path = tmp_path / "worker-0-0.0.jsonl"
    whole = path.read_text()
    path.write_text(whole[:20])
    ledgers = LiveLedgers(tmp_path)
    assert read_all(ledgers).num_processes == 0
    path.write_text(whole[:-20])
    first = read_all(ledgers)
    path.write_text(whole)
    assert read_all(ledgers).goodput > first.goodput
    assert read_all(ledgers).goodput == pytest.approx(run_report(tmp_path).headline.goodput)


def test_damaged_ledgers_are_read_as_far_as_they_go(tmp_path):
    write_ledgers(tmp_path, 2, 20)
    before = read_all(LiveLedgers(tmp_path))
    append(
        tmp_path / "worker-0-0.0.jsonl",
        "{", "null", "[1]", "[" * 100_000, '{"kind": 3}', '{"kind": "step"}',
        '{"kind": "step", "at_s": NaN, "seconds": {}, "step": 1, "waited_s": 0}',
        '{"kind": "step", "at_s": 1e300, "seconds": {"step": 1}, "step": 1, "waited_s": 0}',
        '{"kind": "time", "at_s": 1030, "seconds": {"step": -5}}', "x" * (3 << 20), '{"kind": "entry", "entry": "x"}',
    )  # fmt: skip
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\x00" * 1000)
    (tmp_path / "list.jsonl").write_text("[]\n" * 1000)
    (tmp_path / "later.jsonl").write_text('{"kind": "process", "format": 99, "at_s": 1}\n')
    (tmp_path / "folder.jsonl").mkdir()
    ledgers = LiveLedgers(tmp_path)
    after = read_all(ledgers)
    assert (after.goodput, after.ettr) == pytest.approx((before.goodput, before.ettr))
    for path in tmp_path.glob("worker*"):
        path.unlink()
    assert read_all(ledgers).goodput == pytest.approx(before.goodput)
    assert read_all(LiveLedgers(tmp_path / "absent")) == LedgerFigures()


def test_ages_are_told_without_the_clock_of_another_machine(tmp_path):
    """Of copies, with a writer whose clock is years behind."""
    write_ledgers(tmp_path, 1, 20)
    path = tmp_path / "worker-0-0.0.jsonl"
    assert read_all(LiveLedgers(tmp_path)).snapshot_age_s is None
    step = {"kind": "step", "seconds": {"step": 1.0}, "waited_s": 0.0}
    append(
        path,
        {**step, "at_s": 1031.0, "step": 21, "snapshot": 20},
        {"kind": "time", "at_s": 1032.0, "seconds": {"checkpoint_save": 1.0}},
        *({**step, "at_s": 1012.0 + n, "step": n} for n in (22, 23)),
    )
    ledgers = LiveLedgers(tmp_path)
    figures = read_all(ledgers, now_s=5.0)
    assert (figures.snapshot_age_s, figures.checkpoint_age_s) == (4.0, 3.0)
    assert read_all(ledgers, now_s=6.5).snapshot_age_s == 5.5


def test_a_run_that_stands_still_loses_goodput(tmp_path):
    write_ledgers(tmp_path, 1, 20)
    ledgers = LiveLedgers(tmp_path)
    now, soon, later = (read_all(ledgers, now_s=now_s).goodput for now_s in (5.0, 7.0, 1000.0))
    assert now == soon
    assert later < 0.1 * now


# -- the store -------------------------------------------------------------------------------------------------------


@pytest.fixture
def served(tmp_path, monkeypatch):
    """(ticket, job store) of a job of two ranks that a thread of this process answers for."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("HYPERPOD_EVENTS", raising=False)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    controller = Controller(JobEnv(store_host="127.0.0.1", store_port=server.port, run_id="job"))
    ticket = Ticket.find("job")
    job_store = ticket.job_store()
    publish_initial_world(job_store, WorldPlan.initial(2))
    yield ticket, job_store
    controller.close()


def test_a_watch_reads_the_store_and_writes_nothing_there(served):
    ticket, job_store = served
    job_store.heartbeat(0, beat(generation=0).to_dict())
    job_store.sub_store("beat").set("1", b"{damaged")
    looking = JobWatch(ticket)
    view = looking.look()
    num_keys = ticket.connect().num_keys()  # reading a counter that is absent creates it, once
    assert [each.state for each in view.ranks] == ["running", "joining"]
    assert (view.step, view.ranks[0].activity) == (7, "computing step 7")
    time.sleep(0.05)
    assert looking.look().ranks[0].heartbeat_age_s >= 0.05
    assert ticket.connect().num_keys() == num_keys
    job_store.heartbeat(0, beat(generation=0, sequence=6).to_dict())
    assert looking.look().ranks[0].heartbeat_age_s == 0.0


def test_a_store_with_something_else_in_it(served):
    ticket, job_store = served
    looking = JobWatch(ticket)
    assert looking.look().state == "running"
    job_store.append("replaced", lambda _: "no numbers")
    view = looking.look()
    assert view.state == "unreachable"
    assert "holds a value that no process of a job writes" in view.message
    assert not looking.is_given_up


def test_a_kill_is_asked_of_the_agent_for_the_process_that_was_shown(served):
    ticket, job_store = served
    looking = JobWatch(ticket)
    looking.ask_to_kill(RankView(rank=1, worker_id=1, incarnation=4, state="running"))
    looking.look()
    assert job_store.new_kills() == [(1, 4)]
    looking.look()
    assert job_store.new_kills() == []


def test_the_end_of_a_job_is_no_error(served, capsys):
    ticket, _ = served
    looking = JobWatch(ticket)
    assert looking.look().state == "running"
    RendezvousStore(ticket.connect()).close(RendezvousClosing(cause="rank 1 failed\x1b[2J", is_success=False))
    view = looking.look()
    assert (view.state, view.message) == ("ended", "the job has ended: rank 1 failed\\x1b[2J")
    assert view.num_ranks == 2
    assert cli.main(["top", "--once"]) == 0
    assert "job job: ended" in capsys.readouterr().out


def test_a_ticket_that_is_gone_means_that_the_job_has_ended(served):
    ticket, _ = served
    looking = JobWatch(ticket)
    ticket.path.unlink()
    assert looking.look().state == "ended"


def test_a_store_that_vanishes_is_asked_again_for_a_while(served, monkeypatch):
    ticket, _ = served
    gone = replace(ticket, port=1)
    gone.path.write_text(gone.to_json())
    looking = JobWatch(gone)
    view = looking.look()
    assert view.state == "unreachable"
    assert "has not answered" in view.message
    assert not looking.is_given_up
    monkeypatch.setattr(watch, "RETRY_S", 0.0)
    looking.look()
    assert looking.is_given_up
    with pytest.raises(ConfigError, match="has not answered"):
        watch.look_twice(looking)
    stale = JobWatch(replace(gone, pid=1 << 30))
    assert "was killed" in stale.look().message
    assert stale.is_given_up


def test_a_store_that_hangs_is_told_by_the_clock(served, monkeypatch):
    ticket, _ = served
    looking, may_end = JobWatch(ticket), threading.Event()
    assert looking.look().state == "running"
    monkeypatch.setattr(JobStore, "heartbeats", lambda *_: may_end.wait(30) and {})
    monkeypatch.setattr(watch, "_HANGS_S", 0.1)
    thread = threading.Thread(target=looking.look)
    thread.start()
    until_s = time.monotonic() + 10
    while looking.view.state != "unreachable":
        assert time.monotonic() < until_s
        time.sleep(0.02)
    assert looking.view.num_ranks == 2
    may_end.set()
    thread.join(10)
    assert looking.view.state == "running"


def test_a_thread_that_fails_is_told(served, monkeypatch):
    looking = JobWatch(served[0])
    monkeypatch.setattr(watch, "job_view", lambda _: 1 / 0)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    looking.start()
    until_s = time.monotonic() + 20
    while not looking.is_given_up:
        assert time.monotonic() < until_s
        time.sleep(0.02)
    assert looking.view.state == "unreachable"
    assert "has failed" in looking.view.message


def test_no_job_and_impossible_arguments(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert cli.main(["top", "--once"]) == 1
    assert "Start one with hyperpodrun" in capsys.readouterr().err
    assert cli.main(["serve", "--port", "0"]) == 2
    for arguments, told in (
        (["top", "--interval", "0"], "--interval=0 must be"),
        (["top", "--interval", "nan"], "--interval=nan must be"),
        (["serve", "--events", str(tmp_path / "absent")], "is not a folder"),
    ):
        assert cli.main(arguments) == 2
        assert told in capsys.readouterr().err


def test_status_of_a_job_as_json(served, capsys):
    _, job_store = served
    job_store.heartbeat(0, beat(generation=0).to_dict())
    assert cli.main(["status", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["run_id"], found["num_ranks"], found["ranks"][0]["step"]) == ("job", 2, 7)


def test_the_ticket_names_the_folder_of_the_ledgers(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("HYPERPOD_EVENTS", "ledgers")
    monkeypatch.chdir(tmp_path)
    controller = Controller(JobEnv(store_host="127.0.0.1", store_port=1, run_id="job"))
    try:
        assert JobWatch(Ticket.find(None)).events == str(tmp_path / "ledgers")
        assert WatchOptions(events=str(tmp_path)).watch().events == str(tmp_path)
    finally:
        controller.close()


# -- the page --------------------------------------------------------------------------------------------------------


class StandIn:
    """A watch of a job that never changes."""

    view = job_view(reading(beat(activity="</script><b>x")))
    events = ""


@pytest.fixture
def site():
    """Its server, and a function that asks: (method, path, headers) -> (status, headers, text)."""
    server = open_server(StandIn(), "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()

    def ask(method, path, headers=None):
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
        try:
            connection.request(method, path, headers=headers or {})
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read().decode()
        finally:
            connection.close()

    yield server, ask
    server.shutdown()
    thread.join(10)
    server.server_close()


def test_the_page_and_the_json(site):
    _, ask = site
    status, headers, page = ask("GET", "/")
    assert status == 200
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
    assert headers["Content-Security-Policy"] == policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert "Access-Control-Allow-Origin" not in headers
    assert not any(bad in page for bad in ("innerHTML", "insertAdjacent", "document.write", "src=", "http:", "https:"))
    status, headers, text = ask("GET", "/status.json?x=1")
    assert (status, headers["Content-Type"]) == (200, "application/json")
    assert json.loads(text) == json.loads(json.dumps(StandIn.view.to_dict()))
    assert json.loads(text)["ranks"][0]["activity"] == "</script><b>x"
    status, headers, text = ask("HEAD", "/status.json")
    assert (status, text) == (200, "")
    assert int(headers["Content-Length"]) > 100


@pytest.mark.parametrize("path", ["/x", "/status", "/../etc/passwd", "/status.json/", "/report/x", "/%2e%2e"])
def test_nothing_else_is_there(site, path):
    assert site[1]("GET", path)[0] == 404


def test_a_report_needs_ledgers(site):
    status, _, text = site[1]("GET", "/report")
    assert status == 404
    assert "HYPERPOD_EVENTS" in text


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "ODD"])
def test_no_other_method(site, method):
    status, headers, _ = site[1](method, "/status.json")
    assert (status, headers["Allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize(
    ("header", "is_ours"),
    [
        ("localhost:1", True), ("127.0.0.1", True), ("[::1]:8265", True), ("LOCALHOST", True), ("evil.example", False),
        ("localhost.evil.example:8265", False), ("127.0.0.1.evil.example", False), ("", False), ("10.0.0.1", False),
        ("localhost:80:80", False), ("[::1", False), ("[::1]x", False), ("x" * 1000, False),
    ],
)  # fmt: skip
def test_only_names_of_this_server_are_answered(site, header, is_ours):
    assert is_named(header, names_of("127.0.0.1")) is (is_ours or header == "[::1")
    if header != "[::1":
        assert site[1]("GET", "/status.json", {"Host": header})[0] == (200 if is_ours else 403)


def test_names_of_a_server_for_others():
    names = names_of("0.0.0.0")
    assert is_named("10.0.0.1:8265", names)
    assert is_named(f"{socket.gethostname()}:8265", names)
    assert is_named("node7:8265", names_of("node7"))
    assert not is_named("evil.example", names)


def test_connections_that_say_nothing_are_ended_and_few_are_kept(site, monkeypatch):
    server, ask = site
    monkeypatch.setattr(serve_command.ViewHandler, "timeout", 0.5)
    silent = [socket.create_connection(("127.0.0.1", server.server_port), 10) for _ in range(40)]
    try:
        for each in silent:
            each.settimeout(10)
            with contextlib.suppress(ConnectionError):
                assert each.recv(1) == b""
    finally:
        for each in silent:
            each.close()
    until_s = time.monotonic() + 10
    while True:
        try:
            assert ask("GET", "/")[0] == 200
            return
        except (ConnectionError, http.client.BadStatusLine):
            assert time.monotonic() < until_s
            time.sleep(0.05)


def test_a_slow_request_is_ended(site, monkeypatch):
    """One byte at a time, each within the limit."""
    server, _ = site
    monkeypatch.setattr(serve_command, "_REQUEST_S", 0.5)
    with socket.create_connection(("127.0.0.1", server.server_port), 10) as connection:
        began_s = time.monotonic()
        try:
            while True:
                connection.sendall(b"G")
                time.sleep(0.05)
                assert time.monotonic() < began_s + 10
        except ConnectionError:
            pass


@pytest.mark.parametrize(
    "data", [b"\r\n\r\n", b"\xff\xfe\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9\r\n\r\n", b"GET / x y\r\n"]
)
def test_what_is_no_request(site, data, capsys):
    server, ask = site
    with socket.create_connection(("127.0.0.1", server.server_port), 10) as connection:
        connection.sendall(data)
        connection.settimeout(10)
        answer = connection.recv(10_000)
    assert b" 200 " not in answer.split(b"\r\n")[0]
    assert ask("GET", "/")[0] == 200
    assert not capsys.readouterr().err


def test_ports_that_cannot_be_had(site):
    with pytest.raises(ConfigError, match="another port"):
        open_server(StandIn(), "127.0.0.1", site[0].server_port)
    with pytest.raises(ConfigError, match="between 0 and 65535"):
        open_server(StandIn(), "127.0.0.1", 65536)
    with pytest.raises(ConfigError, match=r"cannot listen on --host=no\.such\.host\.invalid"):
        open_server(StandIn(), "no.such.host.invalid", 0)


def test_a_warning_for_a_host_that_others_reach(served, monkeypatch, capsys):
    monkeypatch.setattr(serve_command.ViewServer, "serve_forever", lambda *_, **__: None)
    for host, told in (("127.0.0.1", False), ("0.0.0.0", True)):
        arguments = argparse.Namespace(run_id=None, events=None, host=host, port=0)
        assert serve_command.run_serve(arguments) == 0
        said = capsys.readouterr().out
        assert f"http://{host}:" in said
        assert ("anyone who can reach port" in said) is told
