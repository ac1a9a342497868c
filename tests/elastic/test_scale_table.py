"""`scale_config` and `uneven_batch` of HyperPod recipes become a table of batches by number of replicas."""

import copy
from dataclasses import replace

import pytest

from hyperpod_plugins.data import ElasticSampler
from hyperpod_plugins.elastic.membership.elastic_spec import ElasticPolicy
from hyperpod_plugins.elastic.scaling.batch_config import BatchConfig
from hyperpod_plugins.elastic.scaling.policy_formats import read_policy, read_scales
from hyperpod_plugins.errors import ConfigError, UnknownKeyError
from hyperpod_plugins.parallel import Topology

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
    ranks = {"ranks_per_node": per_node, "replica_size": per_replica}
    found = replace(found, scales=found.scales.feasible_on(**ranks, ranks_per_share=tensor))
    policy = found.in_replicas(**ranks, data_ranks_per_replica=per_replica // tensor)
    batch = found.scales.batch(**ranks)
    return batch.feasible_sizes(policy, per_replica // tensor), batch


def test_a_table_from_nodes_to_batches():
    sizes, batch = settled(RECIPE)
    assert sizes == (2, 3, 4)
    assert not batch.follows_world
    splits = {size: batch.split(size, 8) for size in sizes}
    assert {split.global_batch_size for split in splits.values()} == {128}
    assert [splits[size].micro_batch_size for size in sizes] == [8, 4, 4]
    assert [splits[size].num_micro_steps for size in sizes] == [1, 2, 1]
    assert splits[3].micro_step_sizes(128) == [72, 56]  # 8 of 24 ranks have 6 samples, the others 5


def test_nodes_become_replicas():
    sizes, batch = settled(RECIPE, per_replica=4)
    assert sizes == (4, 6, 8)
    assert [batch.split(size, 4).micro_batch_size for size in sizes] == [8, 4, 4]
    assert settled(RECIPE, per_replica=16)[0] == (1, 2)
    [dropped] = read_scales(RECIPE).feasible_on(ranks_per_node=8, replica_size=16, ranks_per_share=1).dropped
    assert "3 nodes are left out: scale_config of 3 nodes of 8 ranks is no whole number of replicas" in dropped
    with pytest.raises(ConfigError, match=r"no number of nodes that can be trained as it says\. 3 nodes are left out"):
        settled(RECIPE | {"scale_config": {3: arguments(train_batch_size=128)}}, per_replica=16)


def as_rendered(**policy):
    """A recipe in the shape of those that a cluster's vendor ships: micro-batches only where shares are even."""
    even = {n: arguments(train_batch_size=128, micro_train_batch_size=128 // 8 // n) for n in (1, 2, 4)}
    uneven = {
        3: arguments(train_batch_size=128, uneven_batch=UNEVEN),
        6: arguments(
            train_batch_size=128,
            uneven_batch={
                "use_uneven_batch": True,
                "num_dp_groups_with_small_batch_size": 16,
                "small_local_batch_size": 2,
                "large_local_batch_size": 3,
            },
        ),
    }
    return {
        "trainer": {"num_nodes": 2, "devices": 8},
        **arguments(train_batch_size=64, micro_train_batch_size=1),
        "elastic_policy": {"is_elastic": True, "min_nodes": 1, "max_nodes": 6, **policy},
        "scale_config": even | uneven,
    }


def test_uneven_scales_that_leave_the_micro_batch_out():
    sizes, batch = settled(as_rendered())
    assert sizes == (1, 2, 3, 4, 6)
    split = batch.split(3, 8)
    assert split.micro_step_sizes(128) == [24] * 5 + [8]  # 8 of 24 ranks have a sixth sample, the others weight 0
    assert batch.split(6, 8).micro_step_sizes(128) == [48, 48, 32]
    for size in sizes:
        samplers = [ElasticSampler(512, batch.split(size, 8), data_rank=rank) for rank in range(size * 8)]
        used = [i for each in samplers for n, ids in enumerate(each) for i in (ids if each.weight(n) else ())]
        assert sorted(used) == list(range(512)), size
    assert batch.infeasible_reasons(ElasticPolicy(max_replicas=6), 8) == ()


def test_scales_that_other_ranks_cannot_train_are_dropped_and_said():
    sizes, _ = settled(as_rendered(), per_node=4, per_replica=4)
    assert sizes == (1, 2, 4)
    dropped = read_scales(as_rendered()).feasible_on(ranks_per_node=4, replica_size=4, ranks_per_share=1).dropped
    assert [text[:22] for text in dropped] == ["3 nodes are left out: ", "6 nodes are left out: "]
    assert "gives 16 ranks the small batch, but there are 12" in dropped[0]
    recipe = as_rendered()
    recipe["scale_config"][3] = arguments(train_batch_size=128, uneven_batch={"use_uneven_batch": False})
    sizes, batch = settled(recipe)
    assert sizes == (1, 2, 4, 6)
    [why] = batch.infeasible_reasons(ElasticPolicy(max_replicas=6), 8)
    assert "3 replicas are left out" in why
    assert "use_uneven_batch: false" in why


def test_a_recipe_that_is_not_elastic_keeps_the_nodes_of_its_trainer():
    found = read_policy(as_rendered(is_elastic=False))
    assert found.is_fixed
    sizes, batch = settled(as_rendered(is_elastic=False))
    assert sizes == (2,)
    assert batch.split(2, 8) == replace(batch.split(2, 8), global_batch_size=64, micro_batch_size=1, data_world_size=16)


def test_a_rate_that_differs_from_the_one_elsewhere_is_said():
    [said] = read_scales(RECIPE).remarks
    assert "the learning rate 0.0004, and elsewhere it is 0.0001" in said
    assert read_scales(as_rendered()).remarks == ()


def test_a_rate_of_a_scale_beyond_the_limits_does_not_count():
    recipe = changed(6, learning_rate=5e-4)
    assert settled(recipe)[0] == (2, 3, 4)


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
    assert [batch.global_batch_at(size) for size in sizes] == [128, 128, 256]
    with pytest.raises(ConfigError, match="known for 2, 3, 4, 6 replicas"):
        batch.global_batch_at(5)


def test_the_same_bits_for_every_size():
    recipe = {**RECIPE, "scale_config": {n: arguments(train_batch_size=128) for n in (1, 2, 4)}}
    _, batch = settled(recipe)
    policy = read_policy(recipe).in_replicas(ranks_per_node=8, replica_size=8, data_ranks_per_replica=8)
    cut = batch.in_logical_shards(policy, 8)
    assert cut.feasible_sizes(policy, 8) == (1, 2, 4)
    assert cut.num_logical_shards == 4


def test_sizes_that_were_given_beside_the_recipe():
    bare = {"elastic_policy": RECIPE["elastic_policy"], "scale_config": {1: {}, 2: {}}}
    filled = read_policy(bare).scales.fill(32, 4)
    assert filled.batch(ranks_per_node=8, replica_size=8).global_batch_at(2) == 32
    assert read_scales(RECIPE).fill(128, 0).nodes == (2, 3, 4, 6)
    assert read_policy({"elastic_policy": RECIPE["elastic_policy"]}).scales is None


@pytest.mark.parametrize(
    ("recipe", "error", "words"),
    [
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
            "says train_batch_size for some numbers of nodes, and not for 2",
        ),
        (
            {
                "elastic_policy": RECIPE["elastic_policy"],
                "scale_config": {
                    1: arguments(train_batch_size=8, micro_batch_size=1),
                    2: arguments(train_batch_size=8),
                },
            },
            ConfigError,
            "says micro_train_batch_size for some numbers of nodes, and not for 2",
        ),
        ({"elastic_policy": RECIPE["elastic_policy"], "scale_config": {1: {}}}, ConfigError, "Give ElasticTraining"),
    ],
)
def test_what_cannot_be_honoured(recipe, error, words):
    with pytest.raises(error, match=words):
        settled(recipe)


@pytest.mark.parametrize("wrong", [{"num_dp_groups_with_small_batch_size": 15}, {"small_local_batch_size": 4}])
def test_shares_that_are_not_ours(wrong):
    recipe = changed(3, uneven_batch=UNEVEN | wrong)
    assert settled(recipe)[0] == (2, 4)
    [why] = read_scales(recipe).feasible_on(ranks_per_node=8, replica_size=8, ranks_per_share=1).dropped
    assert "it is shared out as 16 x 5 + 8 x 6" in why


def test_sizes_that_were_given_otherwise():
    with pytest.raises(ConfigError, match="global_batch_size=32 is given, and the recipe says 128"):
        read_scales(RECIPE).fill(32, 0)


@pytest.mark.parametrize(("num_small", "small", "is_right"), [(2, 2, True), (6, 1, False)])
def test_ranks_of_a_context_share_what_a_recipe_gives_one_rank(num_small, small, is_right):
    """Of eight ranks, each two read the same samples: ten of them are two for two pairs, and three for the others."""
    uneven = {
        "use_uneven_batch": True,
        "num_dp_groups_with_small_batch_size": num_small,
        "small_local_batch_size": small,
        "large_local_batch_size": small + 1,
    }
    recipe = {
        "elastic_policy": {"is_elastic": True, "min_nodes": 1, "max_nodes": 4},
        "training_config": {"train_batch_size": 10, "micro_train_batch_size": 4},
        "scale_config": {"2": {"train_batch_size": 10, "uneven_batch": uneven}},
    }
    topology = Topology(world_size=8, shard_degree=4, context_degree=2, ranks_per_node=4)
    sizes = {"global_batch_size": 0, "samples_per_replica": 0, "micro_batch_size": 0}
    given = BatchConfig.of(recipe, {}, **sizes, reproducible=False)
    if is_right:
        assert given.resolve(topology).policy.sizes == (2,)
    else:
        with pytest.raises(ConfigError, match="but there are 4 data-parallel ranks"):
            given.resolve(topology)
