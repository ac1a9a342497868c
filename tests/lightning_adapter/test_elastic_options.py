"""`ElasticTraining` refuses what cannot be, before anything starts, and says what would fit."""

import contextlib
import signal
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from hyperpod_plugins.data import BatchSplit, ElasticSampler
from hyperpod_plugins.elastic import JobStore
from hyperpod_plugins.elastic.membership.elastic_spec import ElasticPolicy, elastic_spec_of
from hyperpod_plugins.errors import ConfigError, NotBuiltYetError
from hyperpod_plugins.lightning import ElasticTraining
from hyperpod_plugins.lightning.datamodule import TrainerLoader, batch_split
from hyperpod_plugins.lightning.elastic_training import ElasticState
from hyperpod_plugins.lightning.module_checks import (
    check_limit,
    check_validation_interval,
    refuse_frequency_of_schedules,
    refuse_own_micro_steps,
)
from hyperpod_plugins.parallel import ParallelConfig


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"policy": ElasticPolicy(), "max_replicas": 2}, r"a policy, or limits \(max_replicas\), not both"),
        ({"global_batch_size": 0}, "they are 0 and 0"),
        ({"global_batch_size": -8}, "global_batch_size must be at least 1, but is -8"),
        ({"micro_batch_size": 0}, "micro_batch_size must be at least 1, but is 0"),
        ({"max_replica": 2}, "max_replica"),
        ({"min_replicas": 3, "max_replicas": 2}, "min is 3 and max 2"),
        ({"samples_per_replica": 4}, "they are 8 and 4"),
        ({"global_batch_size": 0, "samples_per_replica": 4}, "samples_per_replica needs max_replicas"),
        ({"lr_scaling": "linear"}, "are for a batch that follows the world: give samples_per_replica"),
        ({"lr_scaling": "adascale"}, "are for a batch that follows the world: give samples_per_replica"),
        ({"global_batch_size": 0, "samples_per_replica": 4, "reproducible": True}, "reproducible=True is for a global"),
        ({"reference_batch_size": 4}, "are for a batch that follows the world"),
        ({"lr_scaling": "cubic"}, "must be one of none, linear, sqrt"),
        ({"policy": {"minReplicas": 2, "maxReplicas": 1}}, "min is 2 and max 1"),
        ({"policy": {"minReplicas": 1, "maxReplicas": 2, "scalingTimeout": 3}}, "has no key scalingTimeout"),
        ({"policy": {"enabled": True, "micro_batch_sizes": [2]}}, "elasticity block says the batch"),
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
def job_store():
    return JobStore(torch.distributed.HashStore())


def lay_out(job_store, world_size, **options):
    epoch_loop = type("Loop", (), {"update_lr_schedulers": lambda *_: None})()
    fit_loop = SimpleNamespace(epoch_loop=epoch_loop, _combined_loader=None)
    trainer = SimpleNamespace(fit_loop=fit_loop, optimizers=[])
    if "samples_per_replica" not in options and "policy" not in options:
        options["global_batch_size"] = 8
    options = {"micro_batch_size": 2} | options
    elasticity = ElasticState(ElasticTraining(**options), job_store)
    config = ParallelConfig(hybrid_shard_degree=2)
    _, topology = elasticity.setup_world(config, world_size, ranks_per_node=world_size, trainer=trainer)
    return elasticity, topology, trainer


def open_with(elasticity, trainer, *loaders):
    trainer.fit_loop._combined_loader = SimpleNamespace(flattened=list(loaders), _mode="max_size_cycle")
    elasticity.publish_spec(trainer)


def test_the_batch_is_shared_out_over_the_ranks_that_there_are(job_store):
    for world_size, micro_steps in ((2, 2), (4, 1), (6, 1)):
        _, topology, trainer = lay_out(job_store, world_size)
        assert topology.replicate_degree == world_size // 2
        assert trainer.accumulate_grad_batches == micro_steps


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("context_parallel_degree", {"reproducible": True}, "by reproducible=True and AdaScale"),
        ("context_parallel_degree", {"shard_degrees": (4,)}, "by shard_degrees and tensor_degrees"),
        ("expert_parallel_degree", {"shard_degrees": (4,)}, "by shard_degrees and tensor_degrees"),
    ],
)
def test_degrees_that_are_not_served_yet(job_store, name, options, words):
    elasticity = ElasticState(ElasticTraining(global_batch_size=8, micro_batch_size=2, **options), job_store)
    with pytest.raises(NotBuiltYetError, match=f"{name}=2 is not served yet {words}"):
        elasticity.setup_world(ParallelConfig(**{name: 2}), 4, ranks_per_node=4, trainer=SimpleNamespace())


def test_a_number_of_processes_that_the_limits_do_not_allow(job_store):
    with pytest.raises(ConfigError, match=r"has 3 replicas of 2 ranks, and ElasticTraining allows \[1, 2\]"):
        lay_out(job_store, 6, max_replicas=2)


def test_a_batch_that_no_allowed_size_can_share(job_store):
    with pytest.raises(ConfigError, match=r"a global batch of 8 .* can be spread over none of"):
        lay_out(job_store, 12, min_replicas=5, max_replicas=6)


def loader(global_batch_size, pads=False):
    split = BatchSplit(global_batch_size=global_batch_size, micro_batch_size=2, data_world_size=4, pads_last_step=pads)
    return TrainerLoader(SimpleNamespace(), list(range(64)), ElasticSampler(64, split, drop_last=not pads))


@pytest.mark.parametrize(
    ("loaders", "words"),
    [
        (
            lambda: [torch.utils.data.DataLoader(list(range(64)), batch_size=2)],
            "found DataLoader. Return a DataLoader over a map-",
        ),
        (lambda: [loader(16)], "its own global batch of 8, but found a global batch of 16"),
    ],
)
def test_loaders_that_do_not_count_samples(job_store, loaders, words):
    elasticity, _, trainer = lay_out(job_store, 4)
    with pytest.raises(ConfigError, match=words):
        open_with(elasticity, trainer, *loaders())
    assert elastic_spec_of(job_store) is None


def ordinary(**options):
    return torch.utils.data.DataLoader(list(range(64)), **({"batch_size": 2} | options))


def test_an_ordinary_loader_is_divided_among_the_ranks_of_each_world(job_store):
    orders = []
    for world_size in (2, 4):
        elasticity, _, trainer = lay_out(job_store, world_size)
        found = []
        for trainer.global_rank in range(world_size):
            found.append(torch.cat(list(elasticity.divided(ordinary(shuffle=True), trainer, seed=3))))
        steps = torch.stack(found).view(world_size, 8, -1).transpose(0, 1).reshape(8, 8)
        orders.append(steps.sort().values.tolist())
    assert orders[0] == orders[1]  # the same samples in each step, whatever the world
    assert sorted(i for step in orders[0] for i in step) == list(range(64)) != [i for step in orders[0] for i in step]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (ordinary(batch_size=4), r"the train DataLoader has batch_size=4, .* at most 2 samples at once"),
        (ordinary(batch_size=None), "ElasticTraining takes a torch.utils.data.DataLoader over a map-style dataset"),
        (ordinary(sampler=[3, 4]), "the DataLoader has the sampler list"),
        (ordinary(sampler=torch.utils.data.RandomSampler(range(64), num_samples=9)), "yields 9 of 64 samples"),
    ],
)
def test_an_ordinary_loader_that_no_other_world_could_continue(job_store, given, words):
    elasticity, _, trainer = lay_out(job_store, 4)
    with pytest.raises(ConfigError, match=words):
        elasticity.divided(given, trainer, seed=3)


def test_the_order_of_a_distributed_sampler(job_store):
    elasticity, _, trainer = lay_out(job_store, 4)
    trainer.global_rank = 0
    sampler = torch.utils.data.DistributedSampler(range(64), num_replicas=4, rank=0, shuffle=False)
    assert next(iter(elasticity.divided(ordinary(sampler=sampler), trainer, seed=3))).tolist() == [0, 1]
    orders = [
        next(iter(elasticity.divided(ordinary(sampler=each), trainer, seed=3))).tolist()
        for seed in (1, 1, 2)
        for each in [torch.utils.data.DistributedSampler(range(64), num_replicas=4, rank=0, seed=seed)]
    ]
    assert orders[0] == orders[1] != orders[2]


def test_what_fits_lets_others_come_in(job_store):
    elasticity, _, trainer = lay_out(job_store, 4, max_replicas=4)
    open_with(elasticity, trainer, loader(8))
    assert elastic_spec_of(job_store).replica_size == 2
    assert elastic_spec_of(job_store).sizes == (1, 2, 3, 4)


@pytest.mark.parametrize(
    ("interval", "limit", "refused"),
    [
        (4, 1.0, ""),
        (3, 1.0, "every 3 batches falls between the 2 micro-steps .* with 1 replicas"),
        (0.5, 1.0, ""),
        (0.2, 1.0, "every 3 batches falls between the 2 micro-steps .* with 1 replicas"),  # of 16; here it is 1 of 8
        (1.0, 1.0, ""),
        (0.5, 6, "every 3 batches"),
    ],
)
def test_validation_within_a_step_of_a_smaller_world(job_store, interval, limit, refused):
    elasticity, _, trainer = lay_out(job_store, 4)
    assert elasticity.options.possible_micro_steps == {1, 2}
    open_with(elasticity, trainer, loader(8))
    worlds = elasticity.epoch_lengths(trainer)
    assert worlds[1] == (2, 16)
    assert worlds[2] == (1, 8)
    here = limit if isinstance(limit, int) else 8
    vars(trainer).update(
        callbacks=[elasticity.options],
        enable_validation=True,
        check_val_every_n_epoch=1,
        val_check_interval=interval,
        val_check_batch=interval if isinstance(interval, int) else max(1, int(here * interval)),
        num_training_batches=here,
        limit_train_batches=limit,
    )
    with pytest.raises(ConfigError, match=refused) if refused else contextlib.nullcontext():
        check_validation_interval(trainer, worlds)


@pytest.mark.parametrize(
    ("limit", "worlds", "follows_world", "refused"),
    [
        (1.0, {1: (2, 16), 2: (1, 8)}, False, ""),
        (0.5, {1: (2, 16), 2: (1, 8)}, False, ""),  # four steps
        (1.0, {1: (1, 16), 2: (1, 8)}, True, ""),
        (4, {1: (2, 16)}, False, ""),
        (3, {}, False, ""),  # not an elastic job
        (4, {1: (2, 16), 2: (2, 16)}, False, ""),
        (20, {1: (2, 16), 2: (1, 8)}, False, ""),  # more than there are
        (4, {1: (2, 16), 2: (1, 8)}, False, r"ends an epoch after 4 of 16 \(1\), 4 of 8 \(2\) batches"),
        (0.7, {1: (2, 16), 2: (1, 8)}, False, "after 11 of 16"),
        (3, {1: (2, 16), 2: (2, 16)}, False, "after 3 of 16"),  # within a step, which another size begins again
        (0.5, {1: (1, 16), 2: (1, 8)}, True, "whole number of steps of a constant global batch"),
    ],
)
def test_limits_that_mean_other_samples_at_another_size(limit, worlds, follows_world, refused):
    trainer = SimpleNamespace(limit_train_batches=limit)
    with pytest.raises(ConfigError, match=refused) if refused else contextlib.nullcontext():
        check_limit(trainer, worlds, follows_world=follows_world)


def test_validation_counted_over_sizes_with_different_numbers_of_micro_steps(job_store):
    elasticity, _, trainer = lay_out(job_store, 4)
    open_with(elasticity, trainer, loader(8))
    vars(trainer).update(
        callbacks=[elasticity.options],
        enable_validation=True,
        check_val_every_n_epoch=None,
        val_check_interval=4,
        val_check_batch=4,
        num_training_batches=8,
        limit_train_batches=1.0,
    )
    with pytest.raises(ConfigError, match="sizes at which a step has 1, 2 of them"):
        check_validation_interval(trainer, elasticity.epoch_lengths(trainer))
    check_validation_interval(trainer, {1: (2, 16), 2: (2, 16)})


@pytest.mark.parametrize(("mode", "length"), [("max_size_cycle", 8), ("max_size", 8), ("min_size", 4)])
def test_the_epoch_of_several_loaders(job_store, mode, length):
    elasticity, _, trainer = lay_out(job_store, 4)
    split = BatchSplit(global_batch_size=8, micro_batch_size=2, data_world_size=4)
    short = TrainerLoader(SimpleNamespace(), list(range(32)), ElasticSampler(32, split, drop_last=True))
    trainer.fit_loop._combined_loader = SimpleNamespace(flattened=[loader(8), short], _mode=mode)
    assert elasticity.epoch_lengths(trainer)[2] == (1, length)


def test_sizes_that_cannot_share_the_parts_of_a_reproducible_batch(job_store):
    """Four logical shards for 1, 2 or 4 replicas: a world of 3 is never planned."""
    elasticity, _, trainer = lay_out(job_store, 4, max_replicas=4, reproducible=True)
    assert trainer.accumulate_grad_batches == 2
    split = elasticity.options.split
    loader = TrainerLoader(SimpleNamespace(), list(range(64)), ElasticSampler(64, split, drop_last=True))
    open_with(elasticity, trainer, loader)
    assert elastic_spec_of(job_store).sizes == (1, 2, 4)
    with pytest.raises(ConfigError, match=r"has 3 replicas of 2 ranks, and ElasticTraining allows \[1, 2, 4\]"):
        lay_out(JobStore(torch.distributed.HashStore()), 6, max_replicas=4, reproducible=True)


@pytest.mark.parametrize(
    ("automatic", "callbacks", "words"),
    [
        (False, [], "needs automatic optimization"),
        (True, [GradientAccumulationScheduler({0: 1, 2: 4})], "GradientAccumulationScheduler sets the number"),
    ],
)
def test_programs_that_say_how_many_micro_steps_there_are(automatic, callbacks, words):
    module = SimpleNamespace(automatic_optimization=automatic)
    with pytest.raises(ConfigError, match=words):
        refuse_own_micro_steps(SimpleNamespace(lightning_module=module, callbacks=callbacks))


def test_a_schedule_that_would_run_faster_in_a_larger_job():
    scheduler = torch.optim.lr_scheduler.ExponentialLR(torch.optim.SGD([torch.ones(1)]), 0.9)
    of_steps = SimpleNamespace(scheduler=scheduler, interval="step", frequency=2)
    of_epochs = SimpleNamespace(scheduler=scheduler, interval="epoch", frequency=2)
    trainer = SimpleNamespace(lr_scheduler_configs=[of_epochs, of_steps])
    refuse_frequency_of_schedules(trainer, {1: (2, 12), 2: (2, 6)})
    refuse_frequency_of_schedules(SimpleNamespace(lr_scheduler_configs=[of_epochs]), {1: (3, 12), 2: (2, 6)})
    with pytest.raises(ConfigError, match=r"ExponentialLR has .*frequency=2, .*a step has 2, 3 of them: .*frequency=1"):
        refuse_frequency_of_schedules(trainer, {1: (3, 12), 2: (2, 6)})


FOLLOWS = {"samples_per_replica": 4, "max_replicas": 4}


def split_for(elasticity, world_size):
    """What a loader that leaves the sizes to the callback is told."""
    trainer = SimpleNamespace(callbacks=[elasticity.options])
    return batch_split(trainer, world_size, global_batch_size=0, micro_batch_size=0)


def test_a_batch_that_follows_the_world(job_store):
    for world_size, batch in ((2, 4), (4, 8), (8, 16)):
        elasticity, _, trainer = lay_out(job_store, world_size, **FOLLOWS)
        assert trainer.accumulate_grad_batches == 1
        split = split_for(elasticity, world_size)
        assert (split.global_batch_size, split.data_world_size, split.pads_last_step) == (batch, world_size, True)


def test_the_first_world_says_what_the_schedule_counts_in(job_store):
    elasticity, _, trainer = lay_out(job_store, 4, **FOLLOWS)
    open_with(elasticity, trainer, loader(8, pads=True))
    later, _, _ = lay_out(job_store, 8, **FOLLOWS)
    for each in (elasticity, later):
        assert each.options.state_dict()["course"]["reference_batch_size"] == 8
    told, _, _ = lay_out(job_store, 8, **FOLLOWS, reference_batch_size=6)
    assert told.options.state_dict()["course"]["reference_batch_size"] == 6


def test_loaders_whose_batch_does_not_follow(job_store):
    elasticity, _, trainer = lay_out(job_store, 4, **FOLLOWS)
    with pytest.raises(ConfigError, match="a global batch of 8 that does not follow the world"):
        open_with(elasticity, trainer, loader(8))


def test_adam_is_looked_at_before_training(job_store):
    elasticity, _, trainer = lay_out(job_store, 2, **FOLLOWS, lr_scaling="sqrt", scale_adam=True)
    trainer.optimizers = [torch.optim.Adam([torch.nn.Parameter(torch.ones(1))], betas=(0.6, 0.9))]
    with pytest.raises(ConfigError, match=r"up to 2\.5 times is possible"):
        open_with(elasticity, trainer, loader(4, pads=True))


def test_adascale_warns_of_adam_and_leaves_sgd_alone(job_store, caplog):
    elasticity, _, trainer = lay_out(job_store, 4, **FOLLOWS, lr_scaling="adascale")
    assert elasticity.options.averages_replicas
    parameters = [torch.nn.Parameter(torch.ones(1))]
    trainer.global_rank, trainer.optimizers = 0, [torch.optim.SGD(parameters, lr=0.1, momentum=0.9)]
    open_with(elasticity, trainer, loader(8, pads=True))
    assert not caplog.records
    trainer.optimizers = [torch.optim.AdamW(parameters)]
    open_with(elasticity, trainer, loader(8, pads=True))
    assert "was made for SGD with momentum. AdamW divides" in caplog.text
    trainer.global_rank = 1
    open_with(elasticity, trainer, loader(8, pads=True))
    assert len(caplog.records) == 1


def test_samples_of_a_replica_that_its_ranks_cannot_share(job_store):
    with pytest.raises(ConfigError, match=r"over the 2 data-parallel ranks of a replica\. Use a multiple of 2"):
        lay_out(job_store, 4, samples_per_replica=1, max_replicas=4)


def test_a_policy_that_counts_nodes(job_store):
    block = {"minReplicas": 1, "maxReplicas": 2}
    elasticity, _, _ = lay_out(job_store, 4, policy=block, global_batch_size=8)
    assert elasticity._sizes == (2, 4)  # of nodes of four ranks, in replicas of two


def test_deepspeed_says_the_sizes(job_store):
    block = {"enabled": True, "max_train_batch_size": 24, "micro_batch_sizes": [2, 3], "min_gpus": 2, "max_gpus": 8}
    elasticity, _, trainer = lay_out(job_store, 4, policy=block, micro_batch_size=0)
    split = split_for(elasticity, 4)
    assert (split.global_batch_size, split.micro_batch_size) == (24, 3)
    assert trainer.accumulate_grad_batches == 2
    assert elasticity._sizes == (1, 2, 3, 4)


def test_a_recipe_says_the_sizes_by_nodes(job_store):
    recipe = {
        "elastic_policy": {"min_nodes": 1, "max_nodes": 2},
        "training": {"train_batch_size": 16, "micro_train_batch_size": 4},
        "scale_config": {1: {}, 2: {"training": {"micro_train_batch_size": 2}}},
    }
    elasticity, _, trainer = lay_out(job_store, 2, policy=recipe, micro_batch_size=0)
    split = split_for(elasticity, 2)
    assert (split.global_batch_size, split.micro_batch_size) == (16, 4)
    assert trainer.accumulate_grad_batches == 2
    with pytest.raises(ConfigError, match="Leave out samples_per_replica"):
        ElasticTraining(policy=recipe, samples_per_replica=8)
    recipe["scale_config"][2] = {"training": {"train_batch_size": 32}}
    elasticity, _, _ = lay_out(job_store, 4, policy=recipe, micro_batch_size=0, lr_scaling="linear")
    assert elasticity._sizes == (2, 4)  # of nodes of four ranks, in replicas of two
    assert elasticity.options.batch.global_batch_at(4) == 32
    with pytest.raises(ConfigError, match="adascale"):
        ElasticTraining(policy=recipe, lr_scaling="adascale")


def test_sizes_that_nobody_says():
    with pytest.raises(ConfigError, match="leave the sizes to ElasticTraining, and this Trainer does not have"):
        batch_split(SimpleNamespace(callbacks=[]), 2, global_batch_size=8, micro_batch_size=0)


def test_sizes_without_an_agent():
    callback = ElasticTraining(micro_batch_size=2, **FOLLOWS)
    trainer = SimpleNamespace(callbacks=[callback], strategy=None)
    assert batch_split(trainer, 3, global_batch_size=0, micro_batch_size=0).global_batch_size == 12
    assert callback.state_dict() == {}
    assert callback.lr_factor == 1.0
    with pytest.raises(ConfigError, match="known only when the Trainer has set up the processes"):
        _ = callback.global_batch_size
