"""Ledgers of real jobs whose ranks are killed, that restart and that grow: the report says what was done to them."""

import contextlib
import os
import random
import signal
import time
from collections import Counter, defaultdict
from itertools import accumulate
from statistics import mean

import pytest
from recovery.elastic_nodes import Nodes
from recovery.faults import PRELOAD, left_processes, run_job, start

from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.report.make_report import run_report
from hyperpod_plugins.report.measured_times import stage_times
from hyperpod_plugins.report.run_files import read_run

SIGKILL = "killed by SIGKILL"
STEPS = 12
FAULTS = [  # in different ranks and phases, of which two within a step are two failures and one repair
    ["backward", 3, 1, "kill"],
    ["forward", 6, 2, "raise"],
    ["voted", 8, 0, "kill"],
]
LOOP = "../session/program_loop.py"

pytestmark = pytest.mark.spawns


def run(script, folder, **options):
    events = folder / "events"
    options["environ"] = options.get("environ", {}) | {"HYPERPOD_EVENTS": str(events)}
    job = run_job(script, folder, timeout_s=150, **options)
    assert job.code == 0, job.output[-8000:]
    assert job.num_faults == len(options.get("faults", ())), job.output[-8000:]
    return job, run_report(events)


def assert_whole(report):
    """All ranks have ended as their program wanted, and it is known of each second what they did."""
    assert report.is_complete
    assert report.verdict.action == "continue"
    assert not report.problems
    for rank in report.ranks:
        assert rank.processes[-1].ending == "finished"
        assert sum(rank.seconds.values()) == pytest.approx(rank.wall_s, rel=1e-3)
        assert rank.wall_s == pytest.approx(rank.processes[-1].ended_at_s - rank.processes[0].began_at_s, rel=1e-3)
        assert rank.seconds["step"] > 0
    assert sum(each.seconds for each in report.categories) == pytest.approx(sum(each.wall_s for each in report.ranks))
    assert list(report.steps.step) == list(range(1, report.headline.steps_committed + 1))


def assert_small(folder):
    """A rank writes less than 4 KB a step, and less than that in any line."""
    for path in folder.glob("worker-*.jsonl"):
        lines = path.read_bytes().splitlines()
        assert max(map(len, lines)) < 4096
        num_steps = sum(b'"kind":"step"' in line for line in lines)
        assert num_steps == 0 or len(path.read_bytes()) / num_steps < 4096, path


def losses(folder):
    """The loss of each rank in each step that counts."""
    found = defaultdict(dict)
    for process in read_run(folder).workers:
        for span in process.spans:
            if span.step is not None:
                assert span.step.loss is not None
                found[span.step.number][process.worker_id] = span.step.loss
    return found


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    environ = {"STEPS": str(STEPS), "BATCH": "3"}
    return run("ranks_lightning.py", tmp_path_factory.mktemp("calm"), environ=environ)


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory):
    environ = {"STEPS": str(STEPS), "BATCH": "3"}
    return run("ranks_lightning.py", tmp_path_factory.mktemp("disturbed"), faults=FAULTS, environ=environ)


def test_an_undisturbed_job_has_neither_failures_nor_what_they_cost(calm):
    job, report = calm
    assert_whole(report)
    assert_small(job.folder / "events")
    headline = report.headline
    assert (headline.num_failures, headline.failures_cost_s, headline.ettr, report.incidents) == (0, 0.0, 1.0, [])
    assert {len(each.processes) for each in report.ranks} == {1}
    for rank in report.ranks:
        assert rank.seconds.keys() >= {
            "setup",
            "data_wait",
            "snapshot",
            "evaluation",
            "checkpoint_save",
            "step",
            "other",
        }
    assert report.steps.world_size == [4] * STEPS


def test_the_failures_of_a_job_are_those_that_were_made(disturbed):
    job, report = disturbed
    assert_whole(report)
    assert_small(job.folder / "events")
    told = [(each.kind, each.level, each.rank, each.cause, each.step, each.steps_lost) for each in report.incidents]
    assert told == [
        ("failure", "replace", 1, SIGKILL, 3, 0),
        ("failure", "retry", 2, "Transient: fault at forward of step 6", 6, 0),
        ("failure", "replace", 0, SIGKILL, 9, 0),  # all others had voted, and committed the step
    ]
    for incident in report.incidents:
        assert min(incident.detect_s, incident.assemble_s, incident.restore_s) > 0
        stages_s = incident.detect_s + incident.assemble_s + incident.restore_s
        assert incident.total_s == pytest.approx(stages_s, rel=1e-6)
        assert incident.host
    headline = report.headline
    assert (headline.num_failures, headline.num_repairs, headline.num_restarts) == (3, 3, 0)
    assert (headline.steps_committed, headline.steps_lost) == (STEPS, 0)
    endings = [[process.ending for process in rank.processes] for rank in report.ranks]
    assert endings == [[SIGKILL, "finished"], [SIGKILL, "finished"], ["finished"], ["finished"]]
    for rank in report.ranks:
        assert rank.seconds["assemble"] > 0
        assert rank.seconds["restore"] > 0
        assert rank.seconds["redone"] > 0


def test_the_losses_of_a_disturbed_job_are_those_of_an_undisturbed_one(calm, disturbed):
    job, report = calm
    wanted, found = losses(job.folder / "events"), losses(disturbed[0].folder / "events")
    assert sorted(found) == sorted(wanted) == list(range(1, STEPS + 1))
    for step, own in found.items():
        assert own.items() <= wanted[step].items(), step
        # A killed process has not written the lines of its last moments; the other three ranks have.
        assert len(own) >= 3, step
    assert report.steps.loss == [mean(wanted[step].values()) for step in sorted(wanted)]
    logged = [
        {
            line["step"] + 1: float.fromhex(line["metrics"]["loss_step"])
            for line in lines
            if "loss_step" in line["metrics"]
        }
        for lines in job.records("metrics")
    ]
    for rank, own in enumerate(logged):
        assert own == {step: wanted[step][rank] for step in wanted}, rank


def test_each_rank_knows_how_many_samples_a_step_had(calm, disturbed):
    """64 samples are 16 for each of 4 ranks: 5 batches of 3 and one of 1; a replacement skips those that were read."""
    for job, report in (calm, disturbed):
        sizes = {step: [12, 12, 12, 12, 12, 4][(step - 1) % 6] for step in range(1, STEPS + 1)}
        assert [*report.steps.samples] == [*accumulate(sizes.values())]
        for process in read_run(job.folder / "events").workers:
            for span in process.spans:
                assert span.step is None or span.step.samples == sizes[span.step.number]


def test_a_job_that_restarts_from_a_checkpoint_tells_why_and_what_was_lost(tmp_path):
    """A rank raises an exception; later both are killed, which have no replica, four steps after a checkpoint."""
    last = [["forward", 14, rank, action] for rank in range(2) for action in ("sleep 1", "kill")]
    environ = {"SAVE": "1", "SHARDS": "2", "SNAPSHOTS": "100000"}
    faults = [["backward", 3, 0, "raise"], *last]
    _, report = run(LOOP, tmp_path, num_ranks=2, faults=faults, args=PRELOAD, environ=environ)
    assert_whole(report)
    assert_small(tmp_path / "events")
    exception, restart = report.incidents
    assert (exception.kind, exception.level, exception.rank, exception.step) == ("failure", "retry", 0, 3)
    assert exception.cause == "Transient: fault at backward of step 3"
    assert (restart.kind, restart.level, restart.step, restart.steps_lost) == ("restart", "checkpoint", 10, 4)
    assert restart.rank in (0, 1)
    assert restart.cause == f"{SIGKILL}; rank {1 - restart.rank}: {SIGKILL}"
    assert min(restart.assemble_s, restart.restore_s, restart.redone_s) > 0
    headline = report.headline
    assert (headline.num_failures, headline.num_repairs, headline.num_restarts) == (3, 1, 1)
    assert (headline.steps_committed, headline.steps_lost) == (30, 4)
    for rank in report.ranks:
        assert rank.seconds["checkpoint_save"] > 0
        assert rank.seconds["restore"] >= sum(rank.checkpoint_loads_s) > 0
        assert rank.seconds["redone"] > 1.0  # they have slept in the step in which they were killed
        assert [each.restart for each in rank.processes][-1] == 1
    assert report.steps.global_batch == [12] * 30
    assert report.steps.samples == [12 * step for step in range(1, 31)]


class LoopNodes(Nodes):
    """Agents of a job that runs `program_loop.py`."""

    script = LOOP


def test_a_job_that_grows_has_changed_its_size_and_not_failed(tmp_path):
    events = tmp_path / "events"
    nodes = LoopNodes(tmp_path, "")
    nodes.environ |= {"REPLICAS": "4", "SAMPLES": "120", "SHARDS": "1", "HYPERPOD_EVENTS": str(events)}
    nodes.args += PRELOAD
    try:
        nodes.start("a")
        nodes.await_size(1)
        nodes.start("b")
        nodes.await_size(2)
        num_steps = nodes.finish()
    finally:
        nodes.clear()
    report = run_report(events)
    assert_whole(report)
    (incident,) = report.incidents
    assert (incident.kind, incident.rank, incident.steps_lost) == ("resize", None, 0)
    assert "grows from 1 to 2" in incident.cause
    headline = report.headline
    assert (headline.num_failures, headline.num_resizes, headline.steps_committed) == (0, 1, num_steps)
    assert headline.failures_cost_s == 0.0
    assert all(rank.seconds["resize"] > 0 for rank in report.ranks)
    assert list(report.steps.world_size) == [1] * incident.step + [2] * (num_steps - incident.step)


def test_a_job_that_has_lost_a_node_says_when_another_one_was_there(tmp_path):
    events = tmp_path / "events"
    nodes = LoopNodes(tmp_path, "")
    nodes.environ |= {"REPLICAS": "4", "SAMPLES": "400", "SHARDS": "1", "HYPERPOD_EVENTS": str(events)}
    nodes.args += PRELOAD
    try:
        nodes.start("a")
        nodes.await_size(1)  # it serves the store
        nodes.start("b")
        nodes.await_size(2)
        lost_s = time.time()
        nodes.lose("b")
        nodes.await_size(1)
        asked_s = time.time()
        nodes.start("c")
        nodes.await_size(2)
        until_s = time.time()
        nodes.finish()
    finally:
        nodes.clear()
    report = run_report(events)
    (repair_s,) = stage_times(report)["repair_s"]
    (failure,) = [each for each in report.incidents if each.kind == "failure"]
    assert failure.node_back_s == repair_s
    assert asked_s - lost_s - failure.detect_s - 1.0 <= repair_s <= until_s - lost_s
    assert failure.assemble_s < repair_s  # it has gone on without the node
    assert failure.detect_s < failure.assemble_s  # which includes the wait for the node before that


@pytest.mark.variant
@pytest.mark.parametrize("seed", [1, 2])
def test_a_soak_s_ledgers_agree_with_its_kills(tmp_path, seed):
    """Any process at any time, also while the one before is repaired: number, rank and cause are those of the kills."""
    draw, events, killed = random.Random(seed), tmp_path / "events", []
    environ = {
        "STEPS": "120",
        "STEP_S": "0.05",
        "REPLACEMENT_S": "120",
        "PATIENCE": "1000",
        "HYPERPOD_EVENTS": str(events),
    }
    agent = start("ranks_lightning.py", tmp_path, environ=environ)
    deadline_s = time.monotonic() + 200
    try:
        while len(killed) < 10 and agent.poll() is None:
            assert time.monotonic() < deadline_s, (tmp_path / "output").read_text()[-8000:]
            time.sleep(draw.choice([0.2, 1.0, 3.0]) if killed else 0.5)
            live = trained(events) - set(killed)
            chosen = draw.choice(sorted(live)) if len(live) > 2 else None
            if chosen is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(chosen[1], signal.SIGKILL)
                    killed.append(chosen)
        assert agent.wait(max(1.0, deadline_s - time.monotonic())) == 0, (tmp_path / "output").read_text()[-8000:]
    finally:
        agent.kill()
        agent.wait(10)
        for pid in left_processes(agent.mark, patience_s=5.0):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    report = run_report(events)
    assert_whole(report)
    assert report.headline.num_failures == len(killed) >= 5
    found = Counter()
    for incident in report.incidents:
        first, *others = incident.cause.split("; ")
        assert first == SIGKILL
        found[incident.rank] += 1
        found.update(int(each.removeprefix("rank ").removesuffix(f": {SIGKILL}")) for each in others)
    assert found == Counter(worker_id for worker_id, _ in killed)
    ended = {(rank.rank, each.pid): each.ending for rank in report.ranks for each in rank.processes}
    assert {who for who, ending in ended.items() if ending == SIGKILL} == set(killed)


def trained(events):
    """Worker and pid of the processes that have committed a step."""
    if not events.is_dir():
        return set()
    with contextlib.suppress(ConfigError):
        workers = read_run(events).workers
        return {(each.worker_id, each.pid) for each in workers if any(span.step for span in each.spans)}
    return set()
