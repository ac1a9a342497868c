"""The life of a fault in one process: what a step returns when another rank is lost, with stand-ins for the others."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from hyperpod_plugins.comm import break_groups, group_health
from hyperpod_plugins.elastic import FailureRecord
from hyperpod_plugins.errors import ConfigError, PeerLost, RecoveryError
from hyperpod_plugins.parallel import Topology
from hyperpod_plugins.recovery import NO_STATE, Arrival, RetryPolicy, StepTransaction, step
from hyperpod_plugins.recovery.protocols import StepFailed
from hyperpod_plugins.recovery.quorum import FormedGeneration, MustReenterLoop, ReplacementTimeout
from hyperpod_plugins.recovery.watchdog import StepTimes


class Others:
    """A member of a job of two ranks, and the training loop; rank 1 is `peer`, which joins each generation."""

    rank, is_joining, has_torn_state, is_elastic, wants_resize = 0, False, False, False, False
    can_undo = can_undo_exceptions = True
    local_steps, rank_local_states, equal_local_step = None, None, -1
    pending_saves, saving_group = (), "a group"

    def __init__(self, peer, losses=(), outside=None, is_replaced=True):
        self.job = SimpleNamespace(incarnation=0)
        self.job_store = SimpleNamespace(set=lambda key, value: None, end=lambda number, failure: None)
        self.worker_id, self.generation, self.committed = 0, 0, 0
        self.step_times = StepTimes()
        self.peer, self.losses, self.outside, self.done = peer, list(losses), outside, []
        self.is_replaced = is_replaced
        """Whether a process comes in place of rank 2, in a job of three ranks."""

    def join_next(self, arrival, stopped):
        self.generation += 1
        stopped(self.generation)
        group_health.reset()
        if self.outside is not None:
            raise MustReenterLoop(self.generation)
        formed = FormedGeneration(number=self.generation, arrivals={0: arrival, 1: self.peer})
        if not self.is_replaced:
            raise ReplacementTimeout(formed, "a test", restarts_all=False)
        return formed

    def wait_for_stops(self, number):
        return SimpleNamespace(step=self.outside)

    stopped_s = 0.0

    def end_generation(self):
        return FailureRecord(kind="collective", cause="a test")

    def root_cause(self, failure, lost):
        return failure

    def fail(self, kind, cause):
        self.done.append("fail")
        break_groups(cause)

    def note(self, **changes):
        vars(self).update(changes)

    def restore(self, plan, rank):
        self.done.append(f"restore {plan.step}")
        if self.losses and self.losses.pop(0):
            raise PeerLost("a test")

    def undo_step(self):
        self.done.append("undo")

    def follow_final_save(self, patience_s):
        self.done.append("follow")
        raise RecoveryError("the job ends")

    def save(self, path, *, is_alone, snapshots=None):
        self.done.append("save")
        return "saved"

    def __getattr__(self, name):
        quiet = ("begin", "connect_survivors", "end_iteration", "give_up", "note_equal_local_state", "publish_stop")
        if name in quiet:
            return lambda *args, **kwargs: None
        if name == "share_rank_local_state":
            return lambda step: False
        if name == "capture_state":
            return lambda: b"state"
        raise AttributeError(name)


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: None)
    yield
    group_health.reset()


def transaction_of(others, repairs, world_size=2):
    return StepTransaction(
        others,
        others,
        Topology(world_size=world_size, shard_degree=1),
        policy=RetryPolicy(),
        device=torch.device("cpu"),
        on_repair=repairs.append,
    )


def run_step(others, monkeypatch, *, lost_in=None, commit_raises=None, world_size=2):
    """Run a step in which rank 1 is lost in `lost_in`, "compute" or "vote", and count the calls."""
    votes, repairs = [], []

    def vote(value, passed=None):
        votes.append(value)
        if lost_in == "vote" and len(votes) == 1:
            break_groups("a test")
            return None
        return 0

    def compute():
        others.done.append("compute")
        if lost_in == "compute" and others.done.count("compute") == 1:
            break_groups("a test")
        if lost_in == "exception" and others.done.count("compute") == 1:
            raise ValueError("of this rank")
        return len(others.done)

    def commit(result):
        others.done.append("commit")
        assert (others.committed, others.has_torn_state) == (NO_STATE, True)  # in case this does not return
        if commit_raises is not None:
            raise commit_raises
        return None if lost_in is None else result

    monkeypatch.setattr(step, "commit_vote", vote)
    transaction = transaction_of(others, repairs, world_size)
    try:
        return transaction.run(compute, commit), repairs
    finally:
        assert others.done.count("commit") <= 1


def test_a_commit_knows_its_step_although_this_rank_counts_as_one_without_a_state(monkeypatch):
    monkeypatch.setattr(step, "commit_vote", lambda value, passed=None: 0)
    others = Others(None)
    others.committed = 3
    transaction = transaction_of(others, [])
    assert transaction.run(lambda: None, lambda _: (transaction.step, others.committed)) == (3, NO_STATE)
    assert transaction.step == 4


@pytest.mark.parametrize("is_equal", [True, False])
@pytest.mark.parametrize("wants_resize", [True, False])
def test_a_vote_tells_both_whether_states_are_equal_and_whether_the_job_changes_its_size(
    monkeypatch, is_equal, wants_resize
):
    """Each is known, whichever rank says it: equal states outlive a rank that is lost as the world changes."""
    told, voted = [], []

    def vote(mine, passed=None):
        voted.append(mine)
        return mine

    monkeypatch.setattr(step, "commit_vote", vote)
    others = Others(None)
    others.note_equal_local_state = lambda step, *, is_equal: told.append(is_equal)
    others.is_elastic, others.wants_resize, others.share_rank_local_state = (
        True,
        wants_resize,
        lambda step: not is_equal,
    )
    transaction = transaction_of(others, [])
    transaction.run(lambda: None, lambda _: None)
    assert (told, transaction._must_resize) == ([is_equal], wants_resize)
    assert voted == [2 * wants_resize + (not is_equal)]


BEHIND, AHEAD = Arrival(incarnation=0, committed=0), Arrival(incarnation=0, committed=1)
NEW = Arrival(incarnation=1)


@pytest.mark.parametrize(
    ("peer", "losses", "lost_in", "done"),
    [
        (BEHIND, [], None, "compute, commit"),
        (BEHIND, [], "compute", "compute, undo, restore 0, compute, commit"),
        (BEHIND, [], "vote", "compute, undo, restore 0, compute, commit"),
        (BEHIND, [], "exception", "compute, fail, undo, restore 0, compute, commit"),
        (NEW, [], "vote", "compute, undo, restore 0, compute, commit"),
        (BEHIND, [True, True], "vote", "compute, undo, restore 0, restore 0, restore 0, compute, commit"),
        (AHEAD, [], "vote", "compute, commit, restore 1"),  # the peer has seen the vote pass
        (AHEAD, [True], "vote", "compute, commit, restore 1"),  # the hooks of the step come first
    ],
)
def test_a_step_is_committed_once_whenever_a_peer_is_lost(monkeypatch, peer, losses, lost_in, done):
    others = Others(peer, losses)
    result, repairs = run_step(others, monkeypatch, lost_in=lost_in)
    assert ", ".join(others.done) == done
    assert (others.committed, others.has_torn_state) == (1, False)
    assert result == (None if lost_in is None else done.split(", ").index("commit"))
    assert [each.rolled_forward for each in repairs] == ([] if lost_in is None or losses == [True] else [peer is AHEAD])


@pytest.mark.parametrize(("resumes_at", "done"), [(1, "compute, commit"), (0, "compute, undo")])
def test_a_rank_whose_peers_are_outside_a_step_commits_theirs_or_leaves_its_own(monkeypatch, resumes_at, done):
    others = Others(BEHIND, outside=resumes_at)
    with pytest.raises(MustReenterLoop) if resumes_at == 0 else nullcontext():
        assert run_step(others, monkeypatch, lost_in="vote") == (1, [])
    assert ", ".join(others.done) == done
    assert others.committed == resumes_at


@pytest.mark.parametrize(
    ("raised", "ends_with", "done"),
    [
        (PeerLost("a test"), PeerLost, "compute, commit"),  # the loops are entered again, with another rank's state
        (RuntimeError("out of memory"), StepFailed, "compute, commit, fail"),  # this process is replaced
        (KeyboardInterrupt(), KeyboardInterrupt, "compute, commit, fail"),
        (ConfigError("a test"), ConfigError, "compute, commit, fail"),
    ],
)
@pytest.mark.parametrize("peer", [None, AHEAD], ids=["after the vote", "rolled forward"])
def test_a_commit_that_raises_leaves_no_state(monkeypatch, peer, raised, ends_with, done):
    others = Others(peer)
    lost_in = None if peer is None else "vote"
    with pytest.raises(ends_with):
        run_step(others, monkeypatch, lost_in=lost_in, commit_raises=raised)
    assert ", ".join(others.done) == done
    assert (others.committed, others.has_torn_state) == (NO_STATE, True)
    assert group_health.is_unavailable == ("fail" in done)


@pytest.mark.parametrize(
    ("raised", "ends_with", "done"),
    [
        (None, ReplacementTimeout, "compute, commit, save"),
        (PeerLost("a test"), RecoveryError, "compute, commit, follow"),  # it waits while the others save
        (RuntimeError("out of memory"), StepFailed, "compute, commit, fail"),
    ],
)
def test_at_the_end_a_state_is_saved_unless_its_commit_raised(monkeypatch, raised, ends_with, done):
    others = Others(AHEAD, is_replaced=False)
    with pytest.raises(ends_with):
        run_step(others, monkeypatch, lost_in="vote", commit_raises=raised, world_size=3)
    assert ", ".join(others.done) == done


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_world_takes_over_right_after_the_vote_that_wished_for_it_or_not_at_all(monkeypatch, is_lost):
    """After a fault, other ranks do not know of it: a replacement was not there, and others may be ahead."""
    others = Others(Arrival(incarnation=0, committed=1))
    others.is_elastic, votes, repairs = True, iter([2, None, 0] if is_lost else [2, 1, 0]), []
    others.yield_to_next_world = lambda: others.done.append("yield")
    monkeypatch.setattr(step, "reshard_if_asked", lambda *_: None)

    def vote(value, passed=None):
        result = next(votes)
        if result is None:
            others.peer = Arrival(incarnation=0, committed=2)  # it has seen the vote pass
            break_groups("a test")
        return result

    monkeypatch.setattr(step, "commit_vote", vote)
    transaction = transaction_of(others, repairs)
    for number in range(3):
        transaction.run(lambda: None, lambda _, number=number: others.done.append(f"commit {number}"))
        if is_lost and number == 0:
            break_groups("a test")
    wanted = "commit 0, restore 1, commit 1, restore 2, commit 2" if is_lost else "commit 0, yield, commit 1, commit 2"
    assert ", ".join(others.done) == wanted
    assert [each.rolled_forward for each in repairs] == ([False, True] if is_lost else [])
