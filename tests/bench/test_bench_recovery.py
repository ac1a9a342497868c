"""From events to seconds lost."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from benchmarks import recovery
from benchmarks.membership_scale import CASES, SimulatedMember
from benchmarks.recovery_jobs import peers
from benchmarks.recovery_jobs.timeline import Outcome, medians, outcome_of, speed_up, step_time
from hyperpod_plugins.env import JobEnv


def commit(at_s, step, rank, *, pid=None, world=2):
    return {"at_s": at_s, "event": "committed", "step": step, "rank": rank, "pid": pid or rank, "world": world}


def told(at_s, event, rank=1, pid=None, **details):
    return {"at_s": at_s, "event": event, "rank": rank, "pid": pid or rank, **details}


HEALTHY = [commit(step + rank / 100, step, rank) for step in range(10) for rank in (0, 1)]


def outcome(*after, fault_step=10):
    fault = told(10.0, "fault", step=fault_step)
    return outcome_of(sorted([*HEALTHY, fault, *after], key=lambda each: each["at_s"]), 2)


def test_a_restart_from_a_checkpoint_computes_steps_again():
    again = [commit(13.0 + step / 2 + rank / 100, step, rank, pid=7 + rank) for step in range(5, 12) for rank in (0, 1)]
    found = outcome(told(11.0, "process_started", pid=8), *again)
    assert found.step_s == pytest.approx(1.0)
    assert found.steps_lost == 5
    assert found.first_s == pytest.approx(5.5)
    assert found.full_s == pytest.approx(5.51)
    assert found.regain_s == pytest.approx(8.01)
    assert list(found.milestones) == ["process_started", "committed"]


STAGES = {"detected": 0.05, "aborted": 0.01, "assembled": 0.2, "restored": 0.1, "first step": 0.14}


def test_a_repair_in_place_loses_nothing_and_tells_its_stages():
    repair = {"incident_s": 10.05, "noticed_s": 0.01, "assembled_s": 0.2, "restored_s": 0.1, "is_joining": False}
    found = outcome(commit(10.5, 10, 0), commit(10.6, 10, 1, pid=9), told(10.51, "repaired", rank=0, **repair))
    assert (found.first_s, found.full_s, found.regain_s) == pytest.approx((0.5, 0.6, 0.6))
    assert found.steps_lost == found.steps_reduced == 0
    assert found.stages == pytest.approx(STAGES)


def test_a_smaller_world_is_not_the_whole_one():
    """A survivor that goes on alone has not brought the job back; the joiner takes over a state that is further."""
    alone = [commit(10.5, 10, 0, world=1), commit(11.5, 11, 0, world=1)]
    found = outcome(*alone, commit(12.5, 12, 0), commit(12.6, 12, 1, pid=9))
    assert (found.first_s, found.full_s, found.regain_s) == pytest.approx((0.5, 2.6, 2.6))
    assert found.steps_reduced == 2
    assert outcome(*alone).regain_s is None


def test_a_survivor_that_ends_the_step_before_has_not_recovered():
    slow = [each for each in HEALTHY if each != commit(9.0, 9, 0)]
    events = [*slow, told(10.0, "fault", step=10), commit(10.1, 9, 0), commit(12.0, 10, 0), commit(12.1, 10, 1, pid=9)]
    found = outcome_of(events, 2)
    assert found.steps_lost == 0
    assert found.first_s == pytest.approx(2.0)


def test_an_undisturbed_run_has_fingerprints_and_no_loss():
    done = [told(11.0, "done", rank=rank, fingerprint="same", loss=float(rank)) for rank in (1, 0)]
    found = outcome_of([*HEALTHY, *done], 2)
    assert (found.fingerprints, found.losses, found.num_done) == (("same",), (0.0, 1.0), 2)
    assert found.first_s is None


def test_nobody_came_back():
    assert outcome().first_s is None
    assert step_time([]) is None


def test_medians_and_ratio():
    trials = [Outcome(step_s=0.1, regain_s=value) for value in (3.0, 1.0, 2.0)]
    assert medians(trials)["regain_s"] == 2.0
    assert medians([*trials, Outcome(step_s=0.1)])["regain_s"] is None
    assert speed_up(5.0, 0.5) == 10.0
    assert speed_up(None, 0.5) is None
    assert speed_up(5.0, None) is None


def test_a_peer_that_is_not_installed_is_reported(monkeypatch, tmp_path):
    monkeypatch.setattr(peers, "PYTHON", tmp_path / "python")
    records = recovery.records_of(["torchft", "hyperpodrun"])
    troubles = {record.way.name: record.trouble for record in records}
    assert "benchmarks.recovery_jobs.peers" in troubles["torchft as documented"]
    assert troubles["hyperpodrun"] == ""
    assert recovery.lines_of(records)[0][1:] == ["-"] * (len(recovery.COLUMNS) - 1)


@pytest.mark.parametrize("case", CASES)
def test_simulated_members_see_one_plan(case):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = JobEnv(store_host="127.0.0.1", store_port=store.port, run_id="job")
    members = [SimulatedMember.of(job, rank, 3, 60.0) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda member: CASES[case](member, 1), members, timeout=90))
    plans = [member.job_store.plan(1) for member in members]
    assert plans[0] is not None
    assert plans[0].keys() == set(range(3))
    assert plans == [plans[0]] * 3
