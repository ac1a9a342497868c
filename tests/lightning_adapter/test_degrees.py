"""Which degrees a program allows, and how many of its processes a job begins with."""

import pytest

from hyperpod_plugins.elastic.membership.elastic_spec import ElasticPolicy, ElasticSpec, ReplicaLayout
from hyperpod_plugins.errors import ConfigError, DegreeError
from hyperpod_plugins.lightning import ElasticTraining
from hyperpod_plugins.parallel import ParallelConfig
from hyperpod_plugins.recovery.degrees import initial_world_size, layouts_of, with_degrees


def options(**given):
    return ElasticTraining(**{"global_batch_size": 8, "micro_batch_size": 2} | given)


@pytest.mark.parametrize(
    ("given", "degree", "order"),
    [
        pytest.param({}, 2, [], id="only the strategy's"),
        pytest.param({"shard_degrees": (1, 4)}, 0, [(4, 1), (1, 1)], id="the largest first"),
        pytest.param({"shard_degrees": (1, 4)}, 2, [(2, 1), (4, 1), (1, 1)], id="the strategy's first"),
        pytest.param(
            {"shard_degrees": [2, 1], "tensor_degrees": [2]}, 2, [(2, 1), (2, 2), (1, 2), (1, 1)], id="tensor degrees"
        ),
    ],
)
def test_what_is_allowed(given, degree, order):
    layouts = layouts_of(options(**given), ParallelConfig(hybrid_shard_degree=degree), ranks_per_node=4)
    assert [each.degrees for each in layouts] == order


def test_numbers_of_replicas_follow_from_the_degrees():
    layouts = layouts_of(options(shard_degrees=(4, 1)), ParallelConfig(), ranks_per_node=4)
    assert [each.sizes for each in layouts] == [(1, 2), (1, 2, 3, 4, 5, 6, 7, 8)]  # of 8 samples each rank needs one


def test_what_was_asked_for_comes_first(monkeypatch):
    for name, value in (("STORE", "localhost:1"), ("DEGREES", "1x1")):
        monkeypatch.setenv(f"HYPERPOD_{name}", value)
    layouts = layouts_of(options(shard_degrees=(4, 1)), ParallelConfig(hybrid_shard_degree=4), ranks_per_node=4)
    assert [each.degrees for each in layouts] == [(1, 1), (4, 1)]


@pytest.mark.parametrize(
    ("given", "config", "words"),
    [
        ({"shard_degrees": (2, 0)}, {}, r"shard_degrees must be whole numbers from 1 on, but are \[2, 0\]"),
        ({"tensor_degrees": ("2",)}, {}, "tensor_degrees must be whole numbers"),
        ({"tensor_degrees": (2,)}, {}, "give shard_degrees too, or the hybrid_shard_degree"),
        ({"shard_degrees": (16,)}, {}, "a global batch of 8 .* can be spread over none of"),
        ({"shard_degrees": (2,), "reproducible": True}, {}, "leave out shard_degrees and tensor_degrees, or it"),
        (
            {"shard_degrees": (2,), "tensor_degrees": (1,)},
            {"tensor_parallel_degree": 2, "sequence_parallel": True},
            "sequence_parallel=True needs tensor_parallel_degree > 1",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(given, config, words):
    with pytest.raises(ConfigError, match=words):
        layouts_of(options(**given), ParallelConfig(**config), ranks_per_node=4)


@pytest.mark.parametrize(
    ("world_size", "initial_size", "degree"), [(8, 8, 4), (7, 4, 4), (4, 4, 4), (3, 2, 2), (2, 2, 2), (1, 1, 1)]
)
def test_a_job_begins_with_what_is_there(world_size, initial_size, degree):
    allowed, config = options(shard_degrees=(4, 2, 1)), ParallelConfig()
    assert initial_world_size(allowed, config, world_size, ranks_per_node=1) == initial_size
    layouts = layouts_of(allowed, config, ranks_per_node=1)
    # A replacement finds the same.
    assert with_degrees(config, None, layouts, initial_size).hybrid_shard_degree == degree
    assert with_degrees(config, None, layouts, world_size).hybrid_shard_degree == degree


def test_who_comes_later_is_told():
    layouts = (ReplicaLayout(shard_degree=4, sizes=(1,)), ReplicaLayout(shard_degree=1, tensor_degree=2, sizes=(1, 2)))
    spec = ElasticSpec(policy=ElasticPolicy(), replica_size=2, sizes=(1, 2), tensor_degree=2, layouts=layouts)
    config = with_degrees(ParallelConfig(), spec, layouts, world_size=4)
    assert (config.hybrid_shard_degree, config.tensor_parallel_degree) == (1, 2)


def test_too_few_processes():
    with pytest.raises(
        DegreeError, match="1 ranks are here, and this job may have shard degree 2 with 2 ranks or more"
    ):
        initial_world_size(options(shard_degrees=(2,)), ParallelConfig(), 1, ranks_per_node=1)
