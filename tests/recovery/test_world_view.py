"""What a member does about places that nobody fills: shrink, start all again, or wait."""

from dataclasses import replace

import pytest
import torch.distributed as dist

from hyperpod_plugins.elastic import JobStore
from hyperpod_plugins.elastic.membership.admission import publish_initial_world
from hyperpod_plugins.elastic.membership.elastic_spec import (
    ElasticPolicy,
    ElasticSpec,
    ReplicaLayout,
    publish_elastic_spec,
)
from hyperpod_plugins.elastic.store.world import WorldPlan
from hyperpod_plugins.errors import StateLost
from hyperpod_plugins.recovery.watchdog import Heartbeat
from hyperpod_plugins.recovery.world_view import WorldView

now_s = [0.0]
POLICY = ElasticPolicy(max_replicas=2, faulty_scale_down_timeout_s=30.0)


def worlds(*shard_degrees, world_size=4):
    job_store, world = JobStore(dist.HashStore()), WorldPlan.initial(world_size)
    publish_initial_world(job_store, world)
    if shard_degrees:
        layouts = tuple(ReplicaLayout(shard_degree=degree, sizes=(1, 2)) for degree in shard_degrees)
        publish_elastic_spec(
            job_store, ElasticSpec(policy=POLICY, replica_size=shard_degrees[0], sizes=(1, 2), layouts=layouts)
        )
    return WorldView(job_store, world, clock=lambda: now_s[0]), job_store


def test_whole_replicas_go_on_without_a_restart():
    found_worlds, job_store = worlds(2, 1)
    assert found_worlds.shrink_without(0, {3: 0}, 31.0, "rank 0")
    assert job_store.world(1).worker_ids == (0, 1)


def test_where_no_replica_is_whole_all_start_again():
    found_worlds, job_store = worlds(4, 2, 1)
    assert not found_worlds.shrink_without(0, {3: 0}, 29.0, "rank 0")
    with pytest.raises(StateLost, match=r"fewer replicas of shard degree 4 .*; what is there may have shard degree 2"):
        found_worlds.shrink_without(0, {3: 0}, 31.0, "rank 0")
    assert job_store.ended(0) is None


@pytest.mark.parametrize(
    ("incarnation", "is_speaking", "is_awaited"), [(1, True, True), (1, False, False), (0, True, False)]
)
def test_a_replacement_that_sets_itself_up_is_awaited(incarnation, is_speaking, is_awaited):
    found_worlds, job_store = worlds(4, 2, 1)
    said = {"generation": 1, "committed": -1, "activity": "", "in_step": False, "is_loading": False, "waits_for": ""}
    heartbeat = Heartbeat(**said, incarnation=incarnation, waited_s=0.0, sequence=1)
    job_store.heartbeat(3, heartbeat.to_dict())
    now_s[0] = 100.0
    assert not found_worlds.shrink_without(0, {3: 1}, 1.0, "rank 0")
    now_s[0] = 160.0
    if is_speaking:
        job_store.heartbeat(3, replace(heartbeat, sequence=2).to_dict())
    if is_awaited:
        assert not found_worlds.shrink_without(0, {3: 1}, 61.0, "rank 0")
    else:
        with pytest.raises(StateLost):
            found_worlds.shrink_without(0, {3: 1}, 61.0, "rank 0")


def test_a_job_that_allows_nothing_waits_and_says_what_would_fit():
    found_worlds, _ = worlds(4)
    assert not found_worlds.shrink_without(0, {3: 0}, 31.0, "rank 0")
    said = found_worlds.what_would_fit(0, {3: 0})
    assert "3 ranks are left, and this job may have shard degree 4 with 4 ranks or more. Allow smaller degrees" in said
    rigid, _ = worlds()
    assert rigid.what_would_fit(0, {3: 0}) == ""
