"""When a job grows and shrinks, and how others write down within what limits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperpod_plugins.elastic.membership.elastic_spec import ElasticPolicy, ReplicaView, next_size
from hyperpod_plugins.elastic.scaling.policy_formats import (
    policy_of_manifest,
    policy_of_recipe,
    read_deepspeed,
    recipe_at,
    uneven_batch_size,
)
from hyperpod_plugins.errors import ConfigError, UnknownKeyError

ONE_TO_FOUR = ElasticPolicy(min_replicas=1, max_replicas=4, min_stable_s=100.0)


@pytest.mark.parametrize(
    ("values", "sizes"),
    [
        ({"max_replicas": 4}, (1, 2, 3, 4)),
        ({"min_replicas": 2, "max_replicas": 8, "replica_increment": 3}, (2, 5, 8)),
        ({"max_replicas": 8, "replica_sizes": (8, 2, 4)}, (2, 4, 8)),
    ],
)
def test_allowed_sizes(values, sizes):
    assert ElasticPolicy(**values).sizes == sizes


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"min_replicas": 4, "max_replicas": 2}, "min is 4 and max 2"),
        ({"min_replicas": 0}, "1 <= min"),
        ({"min_replicas": 2, "max_replicas": 8, "replica_increment": 4}, "Use 6 or 10"),
        ({"max_replicas": 4, "replica_sizes": (2, 8)}, r"\[8\].*outside 1 .. 4"),
        ({"max_replicas": 4, "replica_sizes": (2,), "replica_increment": 2}, "not both"),
        ({"scaling_timeout_s": -1.0}, "scaling_timeout_s"),
        ({"min_stable_s": 7200.0}, "max_backoff_s"),
    ],
)
def test_impossible_policies_are_refused(values, words):
    with pytest.raises(ConfigError, match=words):
        ElasticPolicy(**values)


def test_only_sizes_that_serve_the_batch_are_used():
    policy = ElasticPolicy(max_replicas=4)
    assert policy.serving(global_batch_size=8, data_ranks_per_replica=2, max_micro_batch=1) == (1, 2, 4)
    assert policy.serving(global_batch_size=5, data_ranks_per_replica=2, max_micro_batch=4) == (1, 2)
    with pytest.raises(ConfigError, match="multiple of 2"):
        policy.serving(global_batch_size=1, data_ranks_per_replica=2, max_micro_batch=4)


@pytest.mark.parametrize(
    ("view", "size"),
    [
        pytest.param({"now": 2, "healthy": 2}, 2, id="nothing happens"),
        pytest.param({"now": 2, "healthy": 2, "waiting": 1, "since_arrival_s": 10.0}, 2, id="more may come"),
        pytest.param({"now": 2, "healthy": 2, "waiting": 1, "since_arrival_s": 70.0}, 3, id="nobody else came"),
        pytest.param({"now": 2, "healthy": 2, "waiting": 2, "since_arrival_s": 0.0}, 4, id="no more are allowed"),
        pytest.param({"now": 2, "healthy": 2, "waiting": 7, "since_arrival_s": 0.0}, 4, id="spares stay outside"),
        pytest.param({"now": 2, "healthy": 2, "waiting": 2, "since_change_s": 50.0}, 2, id="it has just changed"),
        pytest.param(
            {"now": 2, "healthy": 2, "waiting": 2, "since_change_s": 150.0, "num_setbacks": 1}, 2, id="it did not last"
        ),
        pytest.param({"now": 3, "healthy": 2, "since_loss_s": 5.0}, 3, id="a replacement may come"),
        pytest.param({"now": 3, "healthy": 2, "since_loss_s": 31.0}, 2, id="no replacement came"),
        pytest.param(
            {"now": 3, "healthy": 2, "waiting": 1, "since_loss_s": 0.0, "since_change_s": 1.0}, 3, id="a spare"
        ),
        pytest.param({"now": 3, "healthy": 3, "leaving": 1}, 2, id="notice was given"),
        pytest.param({"now": 3, "healthy": 3, "leaving": 1, "waiting": 1}, 3, id="notice was given, and a spare waits"),
        pytest.param({"now": 1, "healthy": 0, "since_loss_s": 1e6}, 1, id="it waits rather than go on with none"),
        pytest.param({"now": 4, "healthy": 4, "requested": 2}, 2, id="asked to shrink"),
        pytest.param({"now": 2, "healthy": 2, "waiting": 2, "requested": 3}, 3, id="asked to grow by less than wait"),
    ],
)
def test_the_next_size(view, size):
    assert next_size(ReplicaView(**view), ONE_TO_FOUR) == size


@given(st.integers(1, 4), st.integers(0, 4), st.integers(0, 6), st.integers(0, 4), st.integers(0, 200))
def test_it_is_allowed_and_can_be_had(now, healthy, waiting, leaving, seconds):
    healthy, leaving = min(healthy, now), min(leaving, healthy, now)
    view = ReplicaView(
        now=now,
        healthy=healthy,
        waiting=waiting,
        leaving=leaving,
        since_change_s=seconds,
        since_arrival_s=seconds,
        since_loss_s=seconds,
    )
    size = next_size(view, ONE_TO_FOUR)
    assert size in ONE_TO_FOUR.sizes
    assert size == now or size <= healthy - leaving + waiting


# -- formats of others ------------------------------------------------------------------------------------------------


def test_a_manifest_counts_pods():
    block = {
        "minReplicas": 2,
        "maxReplicas": 8,
        "replicaIncrementStep": 2,
        "gracefulShutdownTimeoutInSeconds": 900,
        "scalingTimeoutInSeconds": 120,
        "faultyScaleDownTimeoutInSeconds": 45,
    }
    policy = policy_of_manifest(block, ranks_per_node=8, replica_size=16)
    assert policy == ElasticPolicy(
        min_replicas=1,
        max_replicas=4,
        replica_increment=1,
        graceful_shutdown_timeout_s=900,
        scaling_timeout_s=120,
        faulty_scale_down_timeout_s=45,
    )
    discrete = {"minReplicas": 1, "maxReplicas": 4, "replicaDiscreteValues": [1, 2, 4]}
    assert policy_of_manifest(discrete, ranks_per_node=8, replica_size=4).sizes == (2, 4, 8)
    assert policy_of_manifest(block, ranks_per_node=8, replica_size=4).sizes == (4, 8, 12, 16)


@pytest.mark.parametrize(
    ("block", "error", "words"),
    [
        ({"minReplicas": 1, "maxReplica": 2}, UnknownKeyError, "no key maxReplica; it has"),
        ({"maxReplicas": 2, "replicaIncrementStep": 1, "replicaDiscreteValues": [2]}, ConfigError, "not both"),
        ({"minReplicas": 1, "maxReplicas": 3}, ConfigError, "multiple of 2 nodes"),
    ],
)
def test_impossible_manifests(block, error, words):
    with pytest.raises(error, match=words):
        policy_of_manifest(block, ranks_per_node=8, replica_size=16)


def test_a_recipe():
    block = {
        "is_elastic": True,
        "min_nodes": 1,
        "max_nodes": 4,
        "replica_increment_step": 1,
        "use_graceful_shutdown": True,
        "scaling_timeout": 600,
        "graceful_shutdown_timeout": 1200,
        "faulty_timeout": 60,
    }
    policy = policy_of_recipe(block, ranks_per_node=8, replica_size=8)
    assert policy.sizes == (1, 2, 3, 4)
    assert (policy.scaling_timeout_s, policy.graceful_shutdown_timeout_s) == (600, 1200)
    assert policy_of_recipe({**block, "is_elastic": False}, ranks_per_node=8, replica_size=8).sizes == (4,)


def test_a_scale_of_a_recipe_is_laid_over_it():
    recipe = {
        "training_config": {"lr": 4e-4, "micro": 4},
        "scale_config": {2: {"training_config": {"micro": 2}}, "4": {"training_config": {"micro": 1}}},
    }
    assert recipe_at(recipe, 1) == {"training_config": {"lr": 4e-4, "micro": 4}}
    assert recipe_at(recipe, 2) == {"training_config": {"lr": 4e-4, "micro": 2}}
    assert recipe_at(recipe, 4) == {"training_config": {"lr": 4e-4, "micro": 1}}


@pytest.mark.parametrize(("ranks", "small"), [(24, (16, 5, 6)), (48, (16, 2, 3))])
def test_uneven_batches_sum_to_the_global_batch(ranks, small):
    names = ("num_dp_groups_with_small_batch_size", "small_local_batch_size", "large_local_batch_size")
    block = {"use_uneven_batch": True, **dict(zip(names, small, strict=True))}
    assert uneven_batch_size(block, data_degree=ranks) == 128
    assert uneven_batch_size({"use_uneven_batch": False}, data_degree=ranks) == 0
    with pytest.raises(ConfigError, match="16 ranks the small batch"):
        uneven_batch_size(block, data_degree=8)


def test_the_block_of_deepspeed():
    block = {
        "enabled": True,
        "max_train_batch_size": 10000,
        "micro_batch_sizes": [8, 12, 16, 17],
        "min_gpus": 32,
        "max_gpus": 1500,
        "min_time": 20,
        "version": 0.1,
    }
    found = read_deepspeed(block)
    assert found.global_batch_size == 9792  # the example of DeepSpeed's own documentation and tests
    assert len(found.world_sizes) == 23
    for world in found.world_sizes:
        assert found.global_batch_size % (world * found.micro_batch_at(world)) == 0
    with pytest.raises(ConfigError, match="nearest number"):
        found.micro_batch_at(31)


@pytest.mark.parametrize(
    ("block", "error", "words"),
    [
        ({"enabled": False}, ConfigError, "not enabled"),
        ({"enabled": True, "micro_batches": [2]}, UnknownKeyError, "no key micro_batches"),
        ({"enabled": True, "micro_batch_sizes": [4096]}, ConfigError, "max_train_batch_size"),
        ({"enabled": True, "min_gpus": 9000, "max_gpus": 9001}, ConfigError, "no number of GPUs"),
    ],
)
def test_impossible_blocks_of_deepspeed(block, error, words):
    with pytest.raises(error, match=words):
        read_deepspeed(block)
