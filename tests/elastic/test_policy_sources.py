"""Policies in others' formats: told apart and checked at once; in replicas when it is known what those are."""

import json

import pytest

from hyperpod_plugins.elastic.membership.elastic_spec import ElasticPolicy
from hyperpod_plugins.elastic.scaling.policy_formats import PolicyFormat, batch_of, read_policy
from hyperpod_plugins.errors import ConfigError, UnknownKeyError

MANIFEST = {"minReplicas": 2, "maxReplicas": 8, "replicaIncrementStep": 2, "scalingTimeoutInSeconds": 40}
RECIPE = {"is_elastic": True, "min_nodes": 2, "max_nodes": 8, "replica_increment_step": 2, "scaling_timeout": 40}
DEEPSPEED = {"enabled": True, "max_train_batch_size": 96, "micro_batch_sizes": [4, 6], "min_gpus": 4, "max_gpus": 16}
NODES_OF_8 = {"ranks_per_node": 8, "replica_size": 16, "data_ranks_per_replica": 16}

BLOCKS = [
    (MANIFEST, PolicyFormat.MANIFEST),
    ({"elasticPolicy": MANIFEST}, PolicyFormat.MANIFEST),
    ({"kind": "HyperPodPyTorchJob", "spec": {"nprocPerNode": "8", "elasticPolicy": MANIFEST}}, PolicyFormat.MANIFEST),
    (RECIPE, PolicyFormat.RECIPE),
    ({"elastic_policy": RECIPE, "trainer": {"num_nodes": 2}}, PolicyFormat.RECIPE),
]


@pytest.mark.parametrize(("given", "format"), BLOCKS)
def test_nodes_become_replicas(given, format):
    found = read_policy(given)
    assert found.format is format
    policy = found.in_replicas(**NODES_OF_8)
    assert policy.sizes == (1, 2, 3, 4)
    assert policy.scaling_timeout_s == 40
    assert found.deepspeed is None


def test_ours_stays_what_it_is():
    policy = ElasticPolicy(max_replicas=3)
    assert read_policy(policy) is policy


def test_deepspeed_says_the_batch_too():
    found = read_policy({"elasticity": DEEPSPEED | {"min_time": 20}, "zero_optimization": {}})
    assert found.deepspeed.global_batch_size == 96
    policy = found.in_replicas(ranks_per_node=8, replica_size=4, data_ranks_per_replica=4)
    assert policy.sizes == (1, 2, 3, 4)
    assert policy.min_stable_s == 1200.0
    batch = batch_of(found.deepspeed, 0, 0, 0)
    assert (batch.global_batch_size, batch.micro_batch_size) == (96, 6)
    with pytest.raises(ConfigError, match="says the batch: 96"):
        batch_of(found.deepspeed, 0, 0, 4)
    with pytest.raises(ConfigError, match="is a multiple of the 5 data-parallel ranks"):
        found.in_replicas(ranks_per_node=5, replica_size=5, data_ranks_per_replica=5)


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_a_file(tmp_path, suffix):
    path = tmp_path / f"policy.{suffix}"
    path.write_text(json.dumps({"spec": {"elasticPolicy": MANIFEST}}))  # which is YAML as well
    for given in (path, str(path)):
        assert read_policy(given).block == MANIFEST


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({}, UnknownKeyError, r"\(none\), which tell no known format"),
        ({"replicas": 3}, UnknownKeyError, "the keys replicas, which tell no known format"),
        (MANIFEST | {"maxReplica": 3}, UnknownKeyError, "has no key maxReplica"),
        (RECIPE | {"max_node": 3}, UnknownKeyError, "has no key max_node"),
        (DEEPSPEED | {"gpus": 3}, UnknownKeyError, "has no key gpus"),
        (MANIFEST | {"maxReplicas": 1}, ConfigError, "min is 2 and max 1"),
        (MANIFEST | {"maxReplicas": 7}, ConfigError, "Use 6 or 8"),
        ({"minReplicas": 2}, ConfigError, "how far the job may grow"),
        (MANIFEST | {"maxReplicas": "many"}, ConfigError, "elasticPolicy of the policy holds a value of a wrong type"),
        (DEEPSPEED | {"enabled": False}, ConfigError, "not enabled"),
        ({"elasticPolicy": MANIFEST, "elasticity": DEEPSPEED}, ConfigError, "several formats"),
    ],
)
def test_refused_at_once(given, error, words):
    with pytest.raises(error, match=words):
        read_policy(given)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("none.json", None, "cannot be read"),
        ("policy.json", "minReplicas: 2", "is not JSON"),
        ("policy.yaml", "a: [", "is no YAML"),
        ("policy.yml", "- 1", "no table"),
    ],
)
def test_files_that_are_none(tmp_path, name, text, words):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_policy(tmp_path / name)


def test_discrete_values_say_their_own_limits():
    found = read_policy({"replicaDiscreteValues": [2, 4, 8]})
    assert found.in_replicas(**NODES_OF_8).sizes == (1, 2, 4)
    with pytest.raises(ConfigError, match="Use a multiple of 2 nodes"):
        read_policy({"replicaDiscreteValues": [1, 4]}).in_replicas(**NODES_OF_8)


@pytest.mark.parametrize(
    ("keys", "sizes"),
    [
        ({"replicaIncrementStep": 2, "replicaDiscreteValues": None}, (2, 4)),
        ({"replicaIncrementStep": None, "replicaDiscreteValues": [2, 3, 4]}, (2, 3, 4)),
    ],
)
def test_a_null_in_a_manifest_is_an_absent_key(keys, sizes):
    found = read_policy({"minReplicas": 2, "maxReplicas": 4, "scalingTimeoutInSeconds": None, **keys})
    assert found.in_replicas(**NODES_OF_8 | {"replica_size": 8}).sizes == sizes
    with pytest.raises(ConfigError, match="not both"):
        read_policy({"minReplicas": 1, "replicaIncrementStep": 2, "replicaDiscreteValues": [2, 4]})
