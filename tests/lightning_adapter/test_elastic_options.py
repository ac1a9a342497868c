"""`ElasticTraining` refuses what cannot be, before anything starts, and says what would fit."""

import signal
from types import SimpleNamespace

import pytest
import torch

from hyperpod_plugins.data import BatchSplit, ElasticSampler
from hyperpod_plugins.elastic import Ledger
from hyperpod_plugins.elastic.joining import terms_of
from hyperpod_plugins.elastic.policy import ElasticPolicy
from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.lightning import ElasticTraining
from hyperpod_plugins.lightning.datamodule import TrainerLoader
from hyperpod_plugins.lightning.elastic import Elasticity
from hyperpod_plugins.parallel import ParallelConfig


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"policy": ElasticPolicy(), "max_replicas": 2}, r"a policy, or limits \(max_replicas\), not both"),
        ({"global_batch_size": 0}, "they are 0 and 0"),
        ({"global_batch_size": -8}, "at least 1, but are -8 and 2"),
        ({"micro_batch_size": 0}, "at least 1, but are 8 and 0"),
        ({"max_replica": 2}, "max_replica"),
        ({"min_replicas": 3, "max_replicas": 2}, "min is 3 and max 2"),
        ({"max_replicas": 6, "replica_increment": 2}, "never reaches max_replicas=6. Use 5 or 7"),
    ],
)
def test_impossible_options(options, words):
    with pytest.raises(ConfigError, match=words):
        ElasticTraining(**{"global_batch_size": 8, "micro_batch_size": 2} | options)


@pytest.fixture
def handlers():
    """Of SIGUSR1 and SIGUSR2: the default, and the program's own."""
    before = {
        signal.SIGUSR1: signal.signal(signal.SIGUSR1, signal.SIG_DFL),
        signal.SIGUSR2: signal.signal(signal.SIGUSR2, print),
    }
    yield lambda: [signal.getsignal(number) for number in before]
    for number, handler in before.items():
        signal.signal(number, handler)


def test_no_worker_dies_of_a_notice(handlers, monkeypatch):
    ElasticTraining(global_batch_size=8, micro_batch_size=2)
    assert handlers() == [signal.SIG_DFL, print]  # no agent has started this process
    monkeypatch.setenv("HYPERPOD_STORE", "localhost:1")
    ElasticTraining(global_batch_size=8, micro_batch_size=2)
    assert handlers() == [signal.SIG_IGN, print]


@pytest.fixture
def ledger():
    return Ledger(torch.distributed.HashStore())


def lay_out(ledger, world_size, **options):
    trainer = SimpleNamespace()
    elasticity = Elasticity(ElasticTraining(global_batch_size=8, micro_batch_size=2, **options), ledger)
    config = ParallelConfig(hybrid_shard_degree=2)
    return elasticity, elasticity.lay_out(config, world_size, ranks_per_node=world_size, trainer=trainer), trainer


def test_the_batch_is_shared_out_over_the_ranks_that_there_are(ledger):
    for world_size, micro_steps in ((2, 2), (4, 1), (6, 1)):
        _, topology, trainer = lay_out(ledger, world_size)
        assert topology.replicate_degree == world_size // 2
        assert trainer.accumulate_grad_batches == micro_steps


def test_a_number_of_processes_that_the_limits_do_not_allow(ledger):
    with pytest.raises(ConfigError, match=r"has 3 replicas of 2 ranks, and ElasticTraining allows \[1, 2\]"):
        lay_out(ledger, 6, max_replicas=2)


def test_a_batch_that_no_allowed_size_can_share(ledger):
    with pytest.raises(ConfigError, match=r"a global batch of 8 .* can be spread over none of"):
        lay_out(ledger, 12, min_replicas=5, max_replicas=6)


def loader(global_batch_size):
    split = BatchSplit(global_batch_size=global_batch_size, micro_batch_size=2, data_world_size=4)
    return TrainerLoader(SimpleNamespace(), list(range(64)), ElasticSampler(64, split))


@pytest.mark.parametrize(
    ("loaders", "words"),
    [
        (lambda: [torch.utils.data.DataLoader(list(range(64)), batch_size=2)], "found DataLoader. Use a TokenData"),
        (lambda: [loader(16)], "its own global batch of 8, but found a global batch of 16"),
    ],
)
def test_loaders_that_do_not_count_samples(ledger, loaders, words):
    elasticity, _, trainer = lay_out(ledger, 4)
    trainer.fit_loop = SimpleNamespace(_combined_loader=SimpleNamespace(flattened=loaders()))
    with pytest.raises(ConfigError, match=words):
        elasticity.open(trainer)
    assert terms_of(ledger) is None


def test_what_fits_lets_others_come_in(ledger):
    elasticity, _, trainer = lay_out(ledger, 4, max_replicas=4)
    trainer.fit_loop = SimpleNamespace(_combined_loader=SimpleNamespace(flattened=[loader(8)]))
    elasticity.open(trainer)
    assert terms_of(ledger).replica_size == 2
    assert terms_of(ledger).sizes == (1, 2, 3, 4)
