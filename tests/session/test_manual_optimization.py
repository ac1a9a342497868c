"""Loops that step their optimizers by hand, such as a GAN: they train as one process of plain torch, or are refused."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hyperpod_plugins.comm.runtime import runtime
from hyperpod_plugins.data import BatchSplit
from hyperpod_plugins.data.sampler import ElasticSampler
from hyperpod_plugins.elastic.membership.elastic_spec import ElasticPolicy
from hyperpod_plugins.elastic.scaling.batch import StepBatch
from hyperpod_plugins.errors import ConfigError, LoopError
from hyperpod_plugins.parallel import clip_grad_norm_
from hyperpod_plugins.session import Session
from hyperpod_plugins.session.manual_optimization import (
    EqualShares,
    check_means,
    refuse_session_options,
    refuse_train_options,
)

WIDTH, NUM_SAMPLES, GLOBAL_BATCH, NUM_STEPS = 6, 40, 8, 10

# -- what is refused, as pure functions -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"backward": print}, r"^backward is not possible .*call it in the function"),
        ({"max_grad_norm": 1.0}, r"^max_grad_norm is not possible .*clip_grad_norm_\(parameters, max_norm\)"),
        ({"non_finite": "skip"}, r"^non_finite='skip' is not possible .*Check it in the function"),
    ],
)
def test_options_of_train_for_what_the_function_does(options, words):
    allowed = {"backward": torch.Tensor.backward, "max_grad_norm": 0.0, "non_finite": "auto"}
    refuse_train_options(**allowed)
    with pytest.raises(ConfigError, match=words):
        refuse_train_options(**{**allowed, **options})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"samples_per_replica": 4}, "samples_per_replica .*Use global_batch_size"),
        ({"reproducible": True}, "reproducible=True of the Session .*Leave it out"),
        ({"has_other_degrees": True}, "shard_degrees and tensor_degrees .*Leave them out"),
    ],
)
def test_options_of_a_session_that_are_not_exact(options, words):
    allowed = {"samples_per_replica": 0, "reproducible": False, "has_other_degrees": False}
    refuse_session_options(**allowed)
    with pytest.raises(ConfigError, match=words):
        refuse_session_options(**{**allowed, **options})


@pytest.mark.parametrize(
    ("global_batch", "micro_batch", "sizes", "chosen"),
    [
        (24, 12, (1, 2, 3, 4), (1, 2, 3, 4)),
        (24, 12, (1, 2, 3, 4, 5), (1, 2, 3, 4)),  # 5 replicas of 2 ranks: 2.4 samples a rank
        (24, 8, (1, 2, 3, 4), (2, 3, 4)),  # one replica would have to accumulate
        (24, 4, (3, 4), (3, 4)),
    ],
)
def test_worlds_in_which_each_rank_has_one_batch_of_equal_size(global_batch, micro_batch, sizes, chosen):
    batch = StepBatch(global_batch_size=global_batch, micro_batch_size=micro_batch)
    shares = EqualShares.of(batch, sizes, present=chosen[0], data_ranks_per_replica=2)
    assert shares.sizes == chosen
    assert shares.data_degrees == tuple(2 * size for size in chosen)
    for size in set(sizes) - set(chosen):
        with pytest.raises(ConfigError, match=rf"over {2 * size} data-parallel ranks .*divide the batch in the functi"):
            EqualShares.of(batch, sizes, present=size, data_ranks_per_replica=2)


@pytest.mark.parametrize(
    ("num_samples", "drop_last", "degrees", "start", "uneven"),
    [
        (24, False, (2, 4), 0, 0),
        (26, True, (2, 4), 0, 0),
        (26, False, (2,), 0, 0),
        (26, False, (2, 4), 0, 2),  # two samples for four ranks
        (25, False, (2,), 0, 1),
        (24, False, (2,), 3, 5),  # a job with another batch has begun the epoch
        (24, False, (2,), 6, 0),
    ],
)
def test_the_last_step_of_an_epoch(num_samples, drop_last, degrees, start, uneven):
    split = BatchSplit(global_batch_size=8, micro_batch_size=8, data_world_size=2, allows_idle_ranks=True)
    sampler = ElasticSampler(num_samples, split, drop_last=drop_last)
    sampler.load_state_dict(sampler.state_dict() | {"position": start, "step_start": start})
    shares = EqualShares(sizes=(1, 2), data_degrees=degrees)
    if not uneven:
        shares.refuse_uneven_end(sampler)
        return
    with pytest.raises(ConfigError, match=rf"in steps of 8 has {uneven}, .*drop_last=True"):
        shares.refuse_uneven_end(sampler)


def test_what_the_function_may_return():
    for returned in (0.5, torch.ones(1), {"a": torch.ones(()), "b": 3}):
        check_means(returned)
    for returned in (None, {}, torch.ones(2), {"a": "b"}, (1.0, 2.0)):
        with pytest.raises(LoopError, match=f"a dict of these. It returned {type(returned).__name__}"):
            check_means(returned)


# -- the same as plain torch ------------------------------------------------------------------------------------------


def net():
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))


@dataclass
class Gan:
    """A generator and a discriminator, with an optimizer and a scheduler each; the same code for plain and sharded."""

    shard: Any = field(default=lambda model: model)
    num_critic_steps: int = 2

    def __post_init__(self):
        torch.manual_seed(0)
        self.models = nn.ModuleDict({name: self.shard(net()) for name in ("generator", "discriminator")})
        self.generator, self.discriminator = self.models.values()
        self.optimizers = [
            torch.optim.SGD(self.generator.parameters(), lr=0.1, momentum=0.9),
            torch.optim.SGD(self.discriminator.parameters(), lr=0.05, momentum=0.5, nesterov=True),
        ]
        self.schedulers = [torch.optim.lr_scheduler.StepLR(each, 3, 0.7) for each in self.optimizers]

    def step(self, batch, clip=clip_grad_norm_):
        (real,) = batch
        of_generator, of_discriminator = self.optimizers
        losses = {}
        for _ in range(self.num_critic_steps):
            fake = self.generator(real.flip(1))
            of_discriminator.zero_grad()
            on_real, on_fake = self.discriminator(real), self.discriminator(fake.detach())
            losses["discriminator"] = (on_real - 1).square().mean() + on_fake.square().mean()
            losses["discriminator"].backward()
            clip(self.discriminator.parameters(), 0.5)
            with torch.no_grad():  # after backward, as for a line of a log
                losses["accuracy"] = (self.discriminator(real) > 0.5).float().mean()
            of_discriminator.step()
        of_generator.zero_grad()
        losses["generator"] = torch.zeros(())
        for part in real.chunk(2):  # accumulated
            loss = (self.discriminator(self.generator(part.flip(1))) - 1).square().mean() / 2
            loss.backward()
            losses["generator"] += loss.detach()
        of_generator.step()
        for scheduler in self.schedulers:
            scheduler.step()
        return losses

    def state(self):
        state = {name: whole(value) for name, value in self.models.state_dict().items()}
        for index, optimizer in enumerate(self.optimizers):
            state[f"{index}.lr"] = torch.tensor(optimizer.param_groups[0]["lr"])
            for number, values in enumerate(optimizer.state.values()):
                state[f"{index}.{number}"] = whole(values["momentum_buffer"])
        return state


def whole(value):
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()


def samples():
    return torch.randn(NUM_SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))


def train(session, batch_size, gan=None, **options):
    """Train with a session; results of the steps and the state at the end."""
    gan = gan or Gan(session.parallelize)
    session.train(gan.models, gan.optimizers, gan.schedulers, manual_optimization=True, **options)
    results = []
    for step in session.steps(DataLoader(TensorDataset(samples()), batch_size=batch_size), epochs=2):
        with step:
            results.append(step.run(gan.step))
    return [{name: float(value) for name, value in each.items()} for each in results], gan.state()


def train_plainly():
    gan, results = Gan(), []
    for begin in range(0, NUM_STEPS * GLOBAL_BATCH, GLOBAL_BATCH):
        at = begin % NUM_SAMPLES
        parts = gan.step((samples()[at : at + GLOBAL_BATCH],), nn.utils.clip_grad_norm_)
        results.append({name: float(value.detach()) for name, value in parts.items()})
    return results, gan.state()


def train_in_layouts():
    by_layout = []
    for degree in (2, 1):
        session = Session(hybrid_shard_degree=degree, global_batch_size=GLOBAL_BATCH)
        by_layout.append(train(session, 4))
    return by_layout


@pytest.mark.spawns
def test_ranks_train_as_one_process(run_ranks):
    """Sharded, and replicated. Halves of a rank's part are other halves of the batch, with the same mean gradient."""
    wanted, state = train_plainly()
    for by_layout in run_ranks(train_in_layouts, world_size=2):
        for results, found in by_layout:
            assert len(results) == NUM_STEPS
            for result, expected in zip(results, wanted, strict=True):
                assert result == pytest.approx(expected, rel=5e-6)
            for name, value in state.items():
                error = (found[name] - value).norm() / value.norm()
                assert error < 5e-7, (name, error)


@pytest.fixture
def make_session(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "HYPERPOD_STORE"):
        monkeypatch.delenv(name, raising=False)
    yield Session
    if dist.is_initialized():
        dist.destroy_process_group()
    runtime.reset()


@pytest.mark.slow_single
def test_one_process_trains_as_plain_torch(make_session):
    session = make_session(global_batch_size=GLOBAL_BATCH)
    results, found = train(session, GLOBAL_BATCH)
    wanted, state = train_plainly()
    assert results == [pytest.approx(each, rel=5e-6) for each in wanted]
    for name, value in state.items():
        assert (found[name] - value).norm() / value.norm() < 5e-7, name


# -- what a loop must not do ------------------------------------------------------------------------------------------


def refused(session, function, error=LoopError, match="", after=lambda gan: None):
    gan = Gan(session.parallelize)
    session.train(gan.models, gan.optimizers, gan.schedulers, manual_optimization=True)

    def loop():
        for step in session.steps(DataLoader(TensorDataset(samples()), batch_size=GLOBAL_BATCH)):
            with step:
                step.run(lambda batch: function(gan, batch))
                after(gan)

    with pytest.raises(error, match=match):
        loop()


@pytest.mark.slow_single
def test_steps_that_a_fault_would_not_undo(make_session):
    session = make_session()

    def with_another(gan, batch):
        losses = gan.step(batch)
        torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1).step()
        return losses

    def without_zero_grad(gan, batch):
        loss = gan.discriminator(batch[0]).square().mean()
        loss.backward()
        gan.optimizers[1].step()
        return loss

    refused(session, Gan.step, match="outside of the function", after=lambda gan: gan.optimizers[0].step())
    refused(session, with_another, match="steps a SGD that session.train was not given")
    refused(session, without_zero_grad, LoopError, match=r"has stepped before: of .*Call optimizer\.zero_grad\(\)")
    refused(session, lambda gan, batch: gan.step(batch) and None, match="It returned NoneType")


@pytest.mark.slow_single
@pytest.mark.parametrize(
    ("options", "of_loader", "of_train", "words"),
    [
        ({"global_batch_size": 8}, {"batch_size": 4}, {}, "8 samples a rank, and the loader's batch_size is 4"),
        ({"global_batch_size": 12}, {"batch_size": 12}, {}, None),  # one rank has any last step
        ({"samples_per_replica": 8}, {"batch_size": 8}, {}, "samples_per_replica of the Session"),
        ({"global_batch_size": 8}, {"batch_size": 8}, {"max_grad_norm": 1.0}, "max_grad_norm is not possible"),
        (
            {"global_batch_size": 8, "reproducible": True, "elastic": ElasticPolicy(max_replicas=2)},
            {"batch_size": 8},
            {},
            "reproducible=True of the Session",
        ),
        (
            {"global_batch_size": 8, "elastic": True, "shard_degrees": (2,)},
            {"batch_size": 8},
            {},
            "shard_degrees and tensor_degrees",
        ),
    ],
)
def test_refused_before_the_first_step(make_session, options, of_loader, of_train, words):
    session = make_session(**options)
    gan = Gan(session.parallelize)

    def begin():
        session.train(gan.models, gan.optimizers, gan.schedulers, manual_optimization=True, **of_train)
        session.steps(DataLoader(TensorDataset(samples()), **of_loader))

    if words is None:
        begin()
        return
    with pytest.raises(ConfigError, match=words):
        begin()
