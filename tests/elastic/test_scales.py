"""`scale_config` and `uneven_batch` of HyperPod recipes become a table of batches by number of replicas."""

import copy

import pytest

from hyperpod_plugins.elastic.policy_sources import read_policy
from hyperpod_plugins.elastic.scales import read_scales
from hyperpod_plugins.errors import ConfigError, UnknownKeyError

UNEVEN = {
    "use_uneven_batch": True,
    "num_dp_groups_with_small_batch_size": 16,
    "small_local_batch_size": 5,
    "large_local_batch_size": 6,
}


def arguments(**values):
    return {"training_config": {"training_args": values}}


RECIPE = {
    "trainer": {"num_nodes": 2, "devices": 8},
    **arguments(train_batch_size=64, micro_train_batch_size=4, learning_rate=1e-4),
    "elastic_policy": {"is_elastic": True, "min_nodes": 1, "max_nodes": 4, "scaling_timeout": 600},
    "scale_config": {
        2: {
            "trainer": {"num_nodes": 2},
            **arguments(train_batch_size=128, micro_train_batch_size=8, learning_rate=4e-4),
        },
        3: arguments(train_batch_size=128, learning_rate=4e-4, uneven_batch=UNEVEN),
        4: arguments(train_batch_size=128, learning_rate=4e-4),
        "6": arguments(train_batch_size=128, learning_rate=4e-4),
    },
}


def changed(scale, **values):
    recipe = copy.deepcopy(RECIPE)
    recipe["scale_config"].setdefault(scale, {}).setdefault("training_config", {}).setdefault(
        "training_args", {}
    ).update(values)
    return recipe


def settled(recipe, per_node=8, per_replica=8, tensor=1):
    """Allowed sizes, and the batch, on nodes of that many ranks."""
    found = read_policy(recipe)
    ranks = {"ranks_per_node": per_node, "ranks_per_replica": per_replica}
    policy = found.in_replicas(**ranks, data_ranks_per_replica=per_replica // tensor)
    found.scales.check_shares(ranks_per_node=per_node, tensor_degree=tensor)
    batch = found.scales.batch(**ranks)
    return batch.serving(policy, per_replica // tensor), batch


def test_a_table_from_nodes_to_batches():
    sizes, batch = settled(RECIPE)
    assert sizes == (2, 3, 4)
    assert not batch.follows_world
    splits = {size: batch.split(size, 8) for size in sizes}
    assert {split.global_batch_size for split in splits.values()} == {128}
    assert [splits[size].micro_batch_size for size in sizes] == [8, 4, 4]
    assert [splits[size].micro_steps for size in sizes] == [1, 2, 1]
    assert splits[3].micro_step_sizes(128) == [72, 56]  # 8 of 24 ranks have 6 samples, the others 5


def test_nodes_become_replicas():
    sizes, batch = settled(RECIPE, per_replica=4)
    assert sizes == (4, 6, 8)
    assert [batch.split(size, 4).micro_batch_size for size in sizes] == [8, 4, 4]
    with pytest.raises(ConfigError, match="3 nodes of 8 ranks is no whole number"):
        settled(RECIPE, per_replica=16)


def test_shares_that_must_be_even():
    off = {"use_uneven_batch": False}
    recipe = changed(3, uneven_batch=UNEVEN)
    recipe["training_config"]["training_args"]["uneven_batch"] = off
    assert settled(recipe)[0] == (2, 3, 4)
    assert settled(changed(3, uneven_batch=off))[0] == (2, 4)
    plain = {key: value for key, value in recipe.items() if key != "scale_config"}
    plain["elastic_policy"] = plain["elastic_policy"] | {"max_nodes": 5}
    assert settled(plain)[0] == (1, 2, 4)
    plain["training_config"]["training_args"]["train_batch_size"] = 100
    with pytest.raises(ConfigError, match="use_uneven_batch: true"):
        settled(plain)


def test_batches_that_differ_follow_the_world():
    sizes, batch = settled(changed(4, train_batch_size=256))
    assert batch.follows_world
    assert [batch.at(size) for size in sizes] == [128, 128, 256]
    with pytest.raises(ConfigError, match="known for 2, 3, 4, 6 replicas"):
        batch.at(5)


def test_the_same_bits_for_every_size():
    recipe = {**RECIPE, "scale_config": {n: arguments(train_batch_size=128) for n in (1, 2, 4)}}
    _, batch = settled(recipe)
    policy = read_policy(recipe).in_replicas(ranks_per_node=8, ranks_per_replica=8, data_ranks_per_replica=8)
    cut = batch.in_logical_shards(policy, 8)
    assert cut.serving(policy, 8) == (1, 2, 4)
    assert cut.num_logical_shards == 4


def test_sizes_that_were_given_beside_the_recipe():
    bare = {"elastic_policy": RECIPE["elastic_policy"], "scale_config": {1: {}, 2: {}}}
    filled = read_policy(bare).scales.fill(32, 4)
    assert filled.batch(ranks_per_node=8, ranks_per_replica=8).at(2) == 32
    assert read_scales(RECIPE).fill(128, 0).nodes == (2, 3, 4, 6)
    assert read_policy({"elastic_policy": RECIPE["elastic_policy"]}).scales is None
    off = RECIPE["elastic_policy"] | {"is_elastic": False}
    assert read_policy({**RECIPE, "elastic_policy": off}).scales is None


@pytest.mark.parametrize(
    ("recipe", "error", "words"),
    [
        (changed(3, uneven_batch=UNEVEN | {"num_dp_groups_with_small_batch_size": 15}), ConfigError, "16 x 5 . 8 x 6"),
        (changed(3, uneven_batch=UNEVEN | {"small_local_batch_size": 4}), ConfigError, "16 x 5 . 8 x 6"),
        (changed(3, uneven_batch={"small": 4}), UnknownKeyError, "small_local_batch_size"),
        (changed(3, learning_rate=5e-4), ConfigError, "0.0004, 0.0005.*lr_scaling"),
        (changed(3, max_steps=10), ConfigError, "max_steps to 10"),
        (changed("all", max_steps=10), ConfigError, "numbers of nodes.*'all'"),
        (RECIPE | {"scale_config": {2: {"trainer": {"num_nodes": 3}}}}, ConfigError, "must be 2"),
        (RECIPE | {"scale_config": {9: {}}}, ConfigError, "none lies in 1 .. 4"),
        (
            RECIPE | {"elastic_policy": RECIPE["elastic_policy"] | {"replica_increment_step": 1}},
            ConfigError,
            "both say which numbers",
        ),
        (RECIPE | {"model": {"train_batch_size": 32}}, ConfigError, "several times, differently: 64, 32"),
        (
            {"elastic_policy": RECIPE["elastic_policy"], "scale_config": {1: arguments(train_batch_size=8), 2: {}}},
            ConfigError,
            "train_batch_size for some numbers of nodes, and not for 2",
        ),
        ({"elastic_policy": RECIPE["elastic_policy"], "scale_config": {1: {}}}, ConfigError, "Give ElasticTraining"),
    ],
)
def test_what_cannot_be_honoured(recipe, error, words):
    with pytest.raises(error, match=words):
        settled(recipe)


def test_sizes_that_were_given_otherwise():
    with pytest.raises(ConfigError, match="global_batch_size=32 is given, and the recipe says 128"):
        read_scales(RECIPE).fill(32, 0)
