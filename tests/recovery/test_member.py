"""A process's way into a generation, where the groups cannot be formed."""

import pytest
import torch.distributed as dist

from hyperpod_plugins.comm import Reform
from hyperpod_plugins.elastic import Incident
from hyperpod_plugins.elastic.ledger import RESTART_KEY
from hyperpod_plugins.elastic.membership import MembershipPolicy
from hyperpod_plugins.elastic.world import World
from hyperpod_plugins.env import JobEnv
from hyperpod_plugins.errors import PeerLost, RecoveryError, StateLost
from hyperpod_plugins.recovery import Arrival, HangPolicy, Member, farewell

pytestmark = pytest.mark.slow_single


def test_groups_that_cannot_be_formed_are_not_tried_for_ever(monkeypatch):
    tried = []

    def run(attempt):
        tried.append(attempt)
        raise PeerLost("a test")

    monkeypatch.setattr(Reform, "run", run)
    member, _store = member_of_one(replacement_timeout_s=0.5)
    numbers = []
    with pytest.raises(RecoveryError, match=r"groups could not be formed \d+ times .* though all ranks were there"):
        member.join_next(Arrival(incarnation=0, committed=3), numbers.append)
    assert len(tried) >= 10
    assert numbers == sorted(set(numbers))  # each time as another generation


def member_of_one(replacement_timeout_s):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    member = Member(
        JobEnv(store_host="127.0.0.1", store_port=store.port, run_id="job"),
        place=0,
        world=World.of_founders(1),
        policy=MembershipPolicy(replacement_timeout_s=replacement_timeout_s),
        hangs=HangPolicy(),
    )
    return member, store


def test_a_job_that_gets_no_further_starts_again_from_a_checkpoint(monkeypatch):
    """Groups are formed each time, and break before a step is committed; steps that are committed count anew."""
    monkeypatch.setattr(Reform, "run", lambda attempt: None)
    monkeypatch.setattr(farewell, "_FAREWELL_S", 0.0)
    member, _store = member_of_one(replacement_timeout_s=0.1)

    def come_together(times):
        for _ in range(times):
            formed = member.join_next(Arrival(incarnation=0, committed=member.committed), lambda number: None)
            member.ledger.end(formed.number, Incident(kind="collective", cause="a test"))

    for member.committed in range(4):
        come_together(times=10)
    with pytest.raises(StateLost, match=r"the job came together \d+ times in .* without getting further than step 3"):
        come_together(times=10000)
    assert member.ledger.find(RESTART_KEY) is not None
