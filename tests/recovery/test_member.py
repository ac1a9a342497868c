"""A process's way into a generation, where the groups cannot be formed, and what ends the job."""

from types import SimpleNamespace

import pytest
import torch.distributed as dist

from hyperpod_plugins.comm import Reconfiguration
from hyperpod_plugins.elastic import FailureRecord
from hyperpod_plugins.elastic.membership.quorum_policy import QuorumPolicy
from hyperpod_plugins.elastic.membership.restart_policy import JobRestart
from hyperpod_plugins.elastic.store.entry_records import EndedEntry, record_end
from hyperpod_plugins.elastic.store.job_store import GAVE_UP_KEY, RESTART_KEY
from hyperpod_plugins.elastic.store.world import WorldPlan
from hyperpod_plugins.env import JobEnv
from hyperpod_plugins.errors import PeerLost, RecoveryError, StateLost
from hyperpod_plugins.parallel import Topology
from hyperpod_plugins.recovery import Arrival, HangPolicy, Member, restart_all
from hyperpod_plugins.recovery.plan import FinalSavePlan, RecoveryPlan
from hyperpod_plugins.recovery.protocols import RetryPolicy
from hyperpod_plugins.recovery.quorum import FormedGeneration, ReplacementTimeout
from hyperpod_plugins.recovery.restart_all import SavedCheckpoints
from hyperpod_plugins.recovery.shutdown import JobShutdown, restart_without_missing
from hyperpod_plugins.recovery.step import end_generation_for_return

pytestmark = pytest.mark.slow_single


def test_groups_that_cannot_be_formed_are_not_tried_for_ever(monkeypatch):
    tried = []

    def run(attempt):
        tried.append(attempt)
        raise PeerLost("a test")

    monkeypatch.setattr(Reconfiguration, "run", run)
    member, _store = member_of_one(replacement_timeout_s=0.5)
    numbers = []
    with pytest.raises(RecoveryError, match=r"groups could not be formed \d+ times .* though all ranks were there"):
        member.join_next(Arrival(incarnation=0, committed=3), numbers.append)
    assert len(tried) >= 10
    assert numbers == sorted(set(numbers))  # each time as another generation


def member_of_one(replacement_timeout_s=1.0, num_ranks=1):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    member = Member(
        JobEnv(store_host="127.0.0.1", store_port=store.port, run_id="job"),
        worker_id=0,
        world=WorldPlan.initial(num_ranks),
        policy=QuorumPolicy(replacement_timeout_s=replacement_timeout_s),
        hangs=HangPolicy(),
    )
    return member, store


def test_a_job_that_gets_no_further_starts_again_from_a_checkpoint(monkeypatch):
    """Groups are formed each time, and break before a step is committed; steps that are committed count anew."""
    monkeypatch.setattr(Reconfiguration, "run", lambda attempt: None)
    monkeypatch.setattr(restart_all, "_FINAL_SAVE_S", 0.0)
    member, _store = member_of_one(replacement_timeout_s=0.1)

    def come_together(times):
        for _ in range(times):
            formed = member.join_next(Arrival(incarnation=0, committed=member.committed), lambda number: None)
            member.job_store.end(formed.number, FailureRecord(kind="collective", cause="a test"))

    for member.committed in range(4):
        come_together(times=10)
    with pytest.raises(StateLost, match=r"the job came together \d+ times in .* without getting further than step 3"):
        come_together(times=10000)
    assert member.job_store.try_get(RESTART_KEY) is not None


def test_connections_that_end_are_no_loss_unless_a_process_was_lost():
    """A peer whose program is done ends its connections, too."""
    member, _store = member_of_one(num_ranks=2)
    assert member.unrepaired_loss() is None
    ended = member.job_store.end(0, FailureRecord(kind="collective", cause="a connection has ended"))
    assert member.unrepaired_loss() is None
    member.job_store.next_incarnation(1)
    assert member.unrepaired_loss() == ended
    killed = FailureRecord(kind="process", cause="killed by SIGKILL", worker_id=1, at_s=ended.at_s)
    member.job_store.record_exit(killed)
    assert member.unrepaired_loss() == killed
    member.generation = 1
    assert member.unrepaired_loss() is None


def all_return(member, times, lost_at, steps_lost=2):
    """To the snapshot of two steps before; one process stands for all ranks."""
    plan = RecoveryPlan(step=lost_at - 2, roll_forward=(), senders={}, steps_lost=steps_lost, is_return=True)
    for _ in range(times):
        member.generation += 1
        for _ in range(member.world.size):
            end_generation_for_return(plan, member, RetryPolicy().max_losses)


def test_eight_returns_from_one_step_end_the_job():
    member, _store = member_of_one(num_ranks=2)
    all_return(member, times=7, lost_at=5)
    assert member.job_store.ended(member.generation).cause == "all ranks return to the snapshot of step 3"
    all_return(member, times=7, lost_at=6)  # the job got further
    assert member.job_store.try_get(GAVE_UP_KEY) is None
    with pytest.raises(RecoveryError, match="the state after step 5 was lost 8 times"):
        all_return(member, times=1, lost_at=5)
    assert "lost 8 times" in FailureRecord.from_json(member.job_store.try_get(GAVE_UP_KEY)).cause


def test_returns_from_an_unknown_step_are_counted_by_themselves():
    """Not as losses of the state of their snapshot, too."""
    member, _store = member_of_one(num_ranks=2)
    all_return(member, times=7, lost_at=7, steps_lost=None)
    all_return(member, times=7, lost_at=5)
    assert member.job_store.try_get(GAVE_UP_KEY) is None
    with pytest.raises(RecoveryError, match="the state of a step after 5 was lost 8 times"):
        all_return(member, times=1, lost_at=7, steps_lost=None)


def test_returns_of_an_earlier_fit_do_not_count():
    member, _store = member_of_one(num_ranks=2)
    for number in range(2):
        all_return(member, times=7, lost_at=5)
        record_end(member.job_store, EndedEntry(number=number, kind="fit"))


def loop_that_saves(path):
    return SimpleNamespace(saving_group="saving", save=lambda given, **_: path)


def test_a_job_whose_rank_is_lost_too_often_saves_what_its_ranks_hold_and_ends():
    member, _store = member_of_one()
    plan = RecoveryPlan(step=5, roll_forward=(), senders={}, abort_reason="worker 2 was lost 8 times in step 5")
    with pytest.raises(RecoveryError, match="worker 2 was lost 8 times in step 5"):
        JobShutdown(member, loop_that_saves("/saved")).end_job(plan, plan.abort_reason, error=None)
    assert "step 5 was saved as /saved" in FailureRecord.from_json(member.job_store.try_get(GAVE_UP_KEY)).cause


@pytest.mark.parametrize(("saved_step", "begins_at"), [(9, 10), (11, 11)])
def test_those_that_are_left_write_snapshots_unless_a_checkpoint_is_newer(monkeypatch, tmp_path, saved_step, begins_at):
    monkeypatch.setattr(Reconfiguration, "run", lambda attempt: None)
    monkeypatch.setattr(restart_all, "_FINAL_SAVE_S", 0.0)
    member, _store = member_of_one(num_ranks=2)
    checkpoint, rescued = tmp_path / "checkpoint", tmp_path / "rescued"
    checkpoint.mkdir()
    SavedCheckpoints(member.job_store).add(str(checkpoint), saved_step)
    left = {0: Arrival(incarnation=0, snapshots=(10,), source_snapshots=(10,))}
    late = ReplacementTimeout(FormedGeneration(number=1, arrivals=left), "rank 1 does not come back", restarts_all=True)
    snapshots = SimpleNamespace(find=lambda owner, step: (owner, step), is_intact=lambda step: True)
    shutdown = JobShutdown(member, loop_that_saves(str(rescued)))
    nothing = FinalSavePlan(roll_forward=(), savers=(), step=-1)
    topology = Topology(world_size=2, shard_degree=2, ranks_per_node=1)
    with pytest.raises(StateLost, match="rank 1 does not come back"):
        restart_without_missing(late, nothing, member, shutdown, topology, snapshots)
    restart = JobRestart.from_json(member.job_store.try_get(RESTART_KEY))
    assert (restart.resume_from, restart.step) == (str(rescued if begins_at == 10 else checkpoint), begins_at)
