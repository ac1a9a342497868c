"""Into how many logical shards a step is cut, so that the allowed numbers of replicas can share them."""

import pytest

from hyperpod_plugins.elastic.membership.elastic_spec import ElasticPolicy
from hyperpod_plugins.elastic.scaling.batch import StepBatch
from hyperpod_plugins.errors import ConfigError


@pytest.mark.parametrize(
    ("global_batch", "micro_batch", "shards", "policy", "parts", "serving"),
    [
        pytest.param(12, 4, 1, {"max_replicas": 4}, 12, (1, 2, 3, 4), id="all of one to four"),
        pytest.param(12, 4, 1, {"max_replicas": 2}, 4, (1, 2), id="larger micro-batches where fewer are allowed"),
        pytest.param(64, 8, 1, {"max_replicas": 8, "replica_sizes": (1, 2, 4, 8)}, 8, (1, 2, 4, 8), id="powers of two"),
        pytest.param(64, 8, 1, {"max_replicas": 4}, 8, (1, 2, 4), id="three cannot divide it"),
        pytest.param(64, 8, 4, {"max_replicas": 4}, 4, (1, 2, 4), id="four ranks for each part"),
        pytest.param(64, 4, 2, {"max_replicas": 1}, 8, (1,), id="the micro-batch is the limit"),
        pytest.param(1, 1, 1, {"max_replicas": 1}, 1, (1,), id="one sample"),
    ],
)
def test_parts(global_batch, micro_batch, shards, policy, parts, serving):
    limits = ElasticPolicy(**policy)
    batch = StepBatch(global_batch_size=global_batch, micro_batch_size=micro_batch).in_logical_shards(limits, shards)
    assert (batch.num_logical_shards, batch.feasible_sizes(limits, shards)) == (parts, serving)
    for size in serving:
        split = batch.split(size, shards)
        assert (split.num_replicas, split.data_ranks_per_replica, split.num_micro_steps) == (
            size,
            shards,
            parts // size,
        )
        assert split.micro_batch_size <= micro_batch


@pytest.mark.parametrize(
    ("batch", "policy", "shards", "words"),
    [
        ({"global_batch_size": 7}, {}, 2, "Use 6 or 8"),
        ({"global_batch_size": 1}, {}, 2, "Use 2[.]"),
        ({"global_batch_size": 8}, {"max_replicas": 5, "replica_sizes": (3, 5)}, 1, "Numbers that divide 8"),
        ({"samples_per_replica": 8}, {"max_replicas": 2}, 1, "give global_batch_size"),
    ],
)
def test_batches_that_cannot_be_cut(batch, policy, shards, words):
    with pytest.raises(ConfigError, match=words):
        StepBatch(**batch, micro_batch_size=4).in_logical_shards(ElasticPolicy(**policy), shards)
