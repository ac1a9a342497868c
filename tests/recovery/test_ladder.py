"""The last recovery levels, in one process: which checkpoint, how often, and which agent decides."""

import pytest
from torch._C._distributed_c10d import HashStore

from hyperpod_plugins.elastic import FailureRecord, JobStore
from hyperpod_plugins.elastic.membership.restart_policy import JobRestart, JobRestartBudget
from hyperpod_plugins.elastic.store.entry_records import EndedEntry, record_end
from hyperpod_plugins.elastic.store.job_store import RESTART_KEY
from hyperpod_plugins.env import JobEnv
from hyperpod_plugins.errors import StateLost
from hyperpod_plugins.events import Event, listen, record
from hyperpod_plugins.parallel.topology import Topology
from hyperpod_plugins.recovery import Arrival, RecoveryLevel, plan_recovery, restart_all
from hyperpod_plugins.recovery.protocols import Attempts, RetryPolicy
from hyperpod_plugins.recovery.restart_all import (
    SavedCheckpoints,
    check_no_newer_checkpoint,
    known_checkpoints,
    newest_checkpoint,
)

HSDP = Topology(world_size=4, shard_degree=2)


def restart(step, path="/ckpt"):
    return JobRestart(failure=FailureRecord(kind="process", cause="all died"), resume_from=path, step=step)


def test_a_job_that_gets_further_may_begin_again_as_often_as_it_likes():
    budget = JobRestartBudget(max_restarts=2)
    assert [budget.why_not_restart(restart(step)) for step in (5, 5, 9, 9, 12)] == [None] * 5


def test_a_job_that_gets_no_further_stops():
    budget = JobRestartBudget(max_restarts=2)
    assert [budget.why_not_restart(restart(5)) for _ in range(2)] == [None, None]
    assert "2 times from step 5" in budget.why_not_restart(restart(5))


@pytest.mark.parametrize(("path", "words"), [("/a/b.ckpt", "from /a/b.ckpt (step 7)"), ("", "from the beginning")])
def test_a_restart_survives_the_job_store_and_says_where_it_begins(path, words):
    first = restart(7, path)
    assert JobRestart.from_json(first.to_json()) == first
    assert words in str(first)


def test_who_asks_first_for_a_restart_is_heard():
    job_store = JobStore(HashStore())
    job_store.set_if_absent("restart", b"first")
    job_store.set_if_absent("restart", b"second")
    assert job_store.try_get("restart") == b"first"


def test_the_newest_checkpoint_is_the_last_that_is_still_there(tmp_path):
    job_store = JobStore(HashStore())
    saved = SavedCheckpoints(job_store)
    assert newest_checkpoint(known_checkpoints(job_store)) == ("", 0)
    paths = [tmp_path / name for name in ("a", "b", "c")]
    for step, path in enumerate(paths):
        path.mkdir()
        saved.add(str(path), step)
    assert newest_checkpoint(known_checkpoints(job_store)) == (str(paths[2]), 2)
    paths[2].rmdir()  # by somebody else
    assert newest_checkpoint(known_checkpoints(job_store)) == (str(paths[1]), 1)
    saved.discard(str(paths[1]))
    saved.add(str(paths[0]), 8)  # overwritten
    assert newest_checkpoint(known_checkpoints(job_store)) == (str(paths[0]), 8)


@pytest.mark.parametrize(("loses_steps", "num_told"), [(True, 1), (False, 0)])
def test_a_restart_without_a_checkpoint_says_how_to_save_one(loses_steps, num_told, monkeypatch, caplog):
    monkeypatch.setattr(restart_all, "_FINAL_SAVE_S", 0.0)
    job_store, lost = JobStore(HashStore()), StateLost("a test")
    with pytest.raises(StateLost):
        restart_all.restart_all(job_store, JobEnv(run_id="job"), 1, lost, loses_steps=loses_steps)
    told = [each.getMessage() for each in caplog.records if "ALL STEPS SO FAR ARE LOST" in each.getMessage()]
    assert len(told) == num_told
    assert all("session.save(...)" in each and "ModelCheckpoint" in each for each in told)
    assert JobRestart.from_json(job_store.try_get(RESTART_KEY)).resume_from == ""


@pytest.mark.parametrize(
    ("saved", "num_ended", "is_refused"),
    [
        pytest.param(6, 0, True, id="newer"),
        pytest.param(5, 0, False, id="of the same step"),
        pytest.param(None, 0, False, id="none"),
        pytest.param(6, 1, False, id="of an entry that has ended"),
    ],
)
def test_a_checkpoint_that_is_newer_than_all_snapshots_wins(tmp_path, saved, num_ended, is_refused):
    job_store = JobStore(HashStore())
    if saved is not None:
        SavedCheckpoints(job_store).add(str(tmp_path), saved)
    for number in range(num_ended):
        record_end(job_store, EndedEntry(number=number, kind="fit"))
    if not is_refused:
        check_no_newer_checkpoint(5, job_store)
        return
    with pytest.raises(StateLost, match=f"checkpoint {tmp_path} is newer than the snapshots of step 5"):
        check_no_newer_checkpoint(5, job_store)


def test_a_rank_that_is_lost_eight_times_in_one_step_ends_the_job():
    attempts = Attempts(RetryPolicy(), worker_id=0)

    def lose(rank, kind="process"):
        return attempts.abort_reason(FailureRecord(kind=kind, cause="killed by SIGKILL", worker_id=rank), None, step=5)

    assert {lose(rank) for rank in (1, 2, 3) for _ in range(7)} == {""}  # each has its own budget
    assert {lose(1, kind="collective") for _ in range(20)} == {""}  # no rank was lost
    why = lose(2)
    assert why == "worker 2 was lost 8 times in step 5, the last time because: killed by SIGKILL"
    arrivals = {0: Arrival(incarnation=0, committed=5, abort_reason=why), 1: Arrival(incarnation=7, committed=5)}
    plan = plan_recovery(arrivals | {2: Arrival(incarnation=8), 3: Arrival(incarnation=7, committed=5)}, HSDP)
    assert (plan.level, plan.abort_reason) == (RecoveryLevel.STOP, why)
    attempts.succeeded()
    assert lose(2) == ""  # in another step


def test_one_process_that_must_end_ends_the_job_after_all_have_their_state():
    arrivals = {rank: Arrival(incarnation=0, committed=7, voted_step=-1) for rank in range(3)}
    arrivals[3] = Arrival(incarnation=1)
    arrivals[1] = Arrival(incarnation=0, committed=7, abort_reason="ValueError in step 7, 3 times")
    plan = plan_recovery({rank: Arrival.from_dict(each.to_dict()) for rank, each in arrivals.items()}, HSDP)
    assert (plan.level, plan.step, dict(plan.senders)) == (RecoveryLevel.STOP, 7, {3: 1})
    assert plan.abort_reason == "ValueError in step 7, 3 times"


def test_events_reach_listeners_until_they_stop_listening():
    heard = []

    def fails(event):
        raise RuntimeError("of the listener alone")

    ends = [listen(each) for each in (fails, heard.append)]
    event = Event(name="recovery.retry", at_s=1.5, duration_s=0.25, details={"step": 3})
    record(event)
    for end in ends:
        end()
    record(event)
    assert heard == [event]
