"""A process's way into a generation, where the groups cannot be formed."""

import pytest
import torch.distributed as dist

from hyperpod_plugins.comm import Reform
from hyperpod_plugins.elastic.membership import MembershipPolicy
from hyperpod_plugins.elastic.world import World
from hyperpod_plugins.env import JobEnv
from hyperpod_plugins.errors import PeerLost, RecoveryError
from hyperpod_plugins.recovery import Arrival, HangPolicy, Member

pytestmark = pytest.mark.slow_single


def test_groups_that_cannot_be_formed_are_not_tried_for_ever(monkeypatch):
    tried = []

    def run(attempt):
        tried.append(attempt)
        raise PeerLost("a test")

    monkeypatch.setattr(Reform, "run", run)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    member = Member(
        JobEnv(store_host="127.0.0.1", store_port=store.port, run_id="job"),
        place=0,
        world=World.of_founders(1),
        policy=MembershipPolicy(replacement_timeout_s=0.5),
        hangs=HangPolicy(),
    )
    numbers = []
    with pytest.raises(RecoveryError, match=r"groups could not be formed \d+ times .* though all ranks were there"):
        member.join_next(Arrival(incarnation=0, committed=3), numbers.append)
    assert len(tried) >= 10
    assert numbers == sorted(set(numbers))  # each time as another generation
