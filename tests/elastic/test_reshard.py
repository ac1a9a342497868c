"""When all processes start again with other degrees, and what may be asked for: decided from the job store."""

from dataclasses import replace

import pytest
import torch.distributed as dist

from hyperpod_plugins.elastic import FailureRecord, JobStore
from hyperpod_plugins.elastic.membership.admission import add_candidate, announce_preemption, publish_initial_world
from hyperpod_plugins.elastic.membership.elastic_spec import (
    ElasticPolicy,
    ElasticSpec,
    ReplicaLayout,
    elastic_spec_of,
    publish_elastic_spec,
)
from hyperpod_plugins.elastic.membership.reshard import (
    drop_request,
    exit_surplus,
    poll_requests,
    request_degrees,
    requested_degrees,
    restart_layout,
    why_not_reshard,
)
from hyperpod_plugins.elastic.membership.restart_policy import NOT_NEEDED, JobRestart
from hyperpod_plugins.elastic.rendezvous.store import RoundEnd
from hyperpod_plugins.elastic.store.world import WorldPlan

POLICY = ElasticPolicy(max_replicas=4, faulty_scale_down_timeout_s=30.0)
LAYOUTS = tuple(ReplicaLayout(shard_degree=shard, sizes=(1, 2, 3, 4)) for shard in (4, 2, 1))
TERMS = ElasticSpec(policy=POLICY, replica_size=4, sizes=(1, 2, 3, 4), layouts=LAYOUTS)


@pytest.fixture
def job_store():
    return JobStore(dist.HashStore())


@pytest.mark.parametrize(
    ("world_size", "missing", "waited_s", "spec", "degree"),
    [
        pytest.param(4, (3,), 29.0, TERMS, None, id="a replacement may come"),
        pytest.param(4, (3,), 30.0, TERMS, 2, id="three are left of four"),
        pytest.param(4, (1, 2, 3), 30.0, TERMS, 1, id="one is left"),
        pytest.param(8, (3,), 30.0, TERMS, None, id="a replica is whole, and goes on without a restart"),
        pytest.param(8, (3, 6), 30.0, TERMS, None, id="a whole replica can be put together"),
        pytest.param(8, (3, 7), 30.0, TERMS, 4, id="a shard is lost, and enough are left for its degree"),
        pytest.param(
            8, (3, 6), 30.0, replace(TERMS, sizes=(2, 3)), 4, id="one replica is fewer than the policy allows"
        ),
        pytest.param(4, (3,), 30.0, replace(TERMS, layouts=LAYOUTS[:1]), None, id="no other degree is allowed"),
    ],
)
def test_when_a_world_cannot_go_on(job_store, world_size, missing, waited_s, spec, degree):
    world = WorldPlan.initial(world_size)
    publish_initial_world(job_store, world)
    layout = restart_layout(job_store, spec, world, dict.fromkeys(missing, 0), waited_s)
    assert (None if layout is None else layout.shard_degree) == degree


def test_nobody_waits_for_those_that_have_left(job_store):
    world = WorldPlan.initial(4)
    publish_initial_world(job_store, world)
    for worker_id in (2, 3):
        announce_preemption(job_store, worker_id, incarnation=0)
    assert restart_layout(job_store, TERMS, world, {2: 1, 3: 1}, waited_s=0.0).shard_degree == 2


def test_those_that_wait_take_part_in_a_start_of_all(job_store):
    world = WorldPlan.initial(4)
    publish_initial_world(job_store, world)
    for worker_id in (4, 5):
        add_candidate(job_store, worker_id, job_store.next_incarnation(worker_id), world)
    assert restart_layout(job_store, TERMS, world, {2: 0, 3: 0}, waited_s=30.0).shard_degree == 4


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        pytest.param((2, 0), None, id="possible"),
        pytest.param((4, 1), "the job has shard degree 4 with tensor degree 1 already", id="as it is"),
        pytest.param(
            (3, 0),
            "shard degree 3 with tensor degree 1 is not possible in this job; allowed shard degrees (each "
            "with a tensor degree): 4 with 1, 2",
            id="3",
        ),
        pytest.param((0, 2), "shard degree 4 with tensor degree 2 is not possible", id="tensor"),
        pytest.param((8, 0), "shard degree 8 with 8 ranks or more: there are 4", id="too few"),
    ],
)
def test_what_may_be_asked_for(job_store, asked, words):
    world = WorldPlan.initial(4)
    publish_initial_world(job_store, world)
    spec = replace(TERMS, layouts=(*LAYOUTS, ReplicaLayout(shard_degree=8, sizes=(1,))))
    why_not = why_not_reshard(job_store, spec, world, *asked)
    assert why_not is None if words is None else words in why_not


def test_the_first_request_of_a_round_counts(job_store):
    world = WorldPlan.initial(4)
    publish_initial_world(job_store, world)
    publish_elastic_spec(job_store, TERMS)
    assert not poll_requests(job_store, world)
    request_degrees(job_store, (2, 1))
    request_degrees(job_store, (1, 1))
    assert requested_degrees(job_store) == (2, 1)
    assert poll_requests(job_store, world)
    assert why_not_reshard(job_store, TERMS, world, 2, 0) is None
    assert "about to start again with shard degree 2" in why_not_reshard(job_store, TERMS, world, 1, 0)
    drop_request(job_store)
    assert why_not_reshard(job_store, TERMS, world, 1, 0) is None


def test_terms_travel(job_store):
    spec = replace(TERMS, tensor_degree=2)
    publish_elastic_spec(job_store, spec)
    assert elastic_spec_of(job_store) == spec
    assert spec.degrees == (2, 2)


def test_what_was_asked_for_reaches_the_next_round():
    restart = JobRestart(
        failure=FailureRecord(kind="request", cause="x", reporter="y"), shard_degree=2, tensor_degree=1
    )
    end = RoundEnd.of(JobRestart.from_json(restart.to_json()), before=None)
    assert (end.shard_degree, end.tensor_degree) == (2, 1)
    assert RoundEnd.from_json(end.to_json()) == end


@pytest.mark.parametrize("is_replaced", [True, False])
def test_an_initial_process_that_is_one_too_many(job_store, is_replaced):
    publish_elastic_spec(job_store, TERMS)
    if is_replaced:
        job_store.arm()
    with pytest.raises(SystemExit) as ended:
        exit_surplus(job_store, 2, is_replaced=is_replaced)
    assert ended.value.code == (NOT_NEEDED if is_replaced else 0)
