"""Under any schedule of joins, losses and kills each sample comes once an epoch, in the seed's order, and counts 1."""

import json
import os
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperpod_plugins.data import ElasticSampler, sample_order
from hyperpod_plugins.elastic.scaling.batch import StepBatch
from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.lightning.datamodule import TrainerLoader

SEED = 3
SHARE = 1 if os.environ.get("HYPERPOD_ALL_CASES") == "1" else 4  # of the examples of the two long laws


class Counts(SimpleNamespace):
    def load_state_dict(self, values):
        vars(self).update(values)


class Rank:
    """One rank as Lightning runs it: a loader, a count of batches, and windows that end by that count."""

    def __init__(self, batch, num_samples, num_replicas, shards, rank, state):
        split = batch.split(num_replicas, shards)
        self.counts = Counts(ready=0, completed=0)
        loop = SimpleNamespace(
            _combined_loader=None, epoch_loop=SimpleNamespace(batch_progress=SimpleNamespace(current=self.counts))
        )
        drop_last = not split.pads_last_step and num_samples % split.global_batch_size > 0
        sampler = ElasticSampler(num_samples, split, data_rank=rank, seed=SEED, drop_last=drop_last)
        self.loader = TrainerLoader(SimpleNamespace(fit_loop=loop), list(range(num_samples)), sampler)
        self.sampler, self.split = sampler, split
        if state is not None:
            self.loader.load_state_dict(json.loads(state))
        self.lists = iter(self.loader)

    def micro_step(self):
        """Ids, their weight, and whether the window ends."""
        if self.counts.ready == len(self.loader):
            assert next(self.lists, None) is None  # Lightning's epoch ends where the sampler's does
            self.lists, self.counts.ready = iter(self.loader), 0
        ids = next(self.lists).tolist()
        weight = self.sampler.weight(self.counts.ready)
        size = self.sampler.step_size(self.counts.ready)
        self.counts.ready += 1
        ends = self.counts.ready % self.split.num_micro_steps == 0 or self.counts.ready == len(self.loader)
        return ids, weight, ends, size


class Job:
    """Its ranks, and what it has trained on."""

    def __init__(self, batch, num_samples, shards):
        self.batch, self.num_samples, self.shards = batch, num_samples, shards
        self.state, self.steps, self.epochs = None, [], []

    def begin(self, num_replicas):
        """Another world, or the same one again after a kill, from the state before the present step."""
        self.num_replicas = num_replicas
        self.ranks = [
            Rank(self.batch, self.num_samples, num_replicas, self.shards, rank, self.state)
            for rank in range(num_replicas * self.shards)
        ]

    def step(self, is_killed_after=None):
        micro_steps = self.ranks[0].split.num_micro_steps
        trained, totals = [], {}
        for number in range(micro_steps):
            if number == is_killed_after:
                return
            done = [rank.micro_step() for rank in self.ranks]
            assert {ends for _, _, ends, _ in done} == {number == micro_steps - 1}
            for ids, weight, _, size in done:
                assert 1 <= len(ids) <= self.batch.micro_batch_size
                for each in ids if weight else ():
                    trained.append(each)
                    totals[each] = weight / len(ids) / len(self.ranks) / micro_steps * size
        assert all(total == pytest.approx(1.0) for total in totals.values())
        assert len(trained) == size == len(totals)
        states = {json.dumps(rank.loader.state_dict()) for rank in self.ranks}
        assert len(states) == 1
        (self.state,) = states
        self.steps.append((self.num_replicas, trained))

    def check(self, *, is_whole):
        """Each epoch in order; whole, or without an incomplete last batch."""
        left_out = 0 if is_whole else self.num_samples % self.batch.global_batch_size
        epoch, seen, wanted = 0, [], None
        for _, trained in self.steps:
            if wanted is None:
                order = sample_order(range(self.num_samples), num_samples=self.num_samples, seed=SEED, epoch=epoch)
                wanted = order.tolist()[: self.num_samples - left_out]
            seen += trained
            assert seen == wanted[: len(seen)]
            if len(seen) == len(wanted):
                epoch, seen, wanted = epoch + 1, [], None


events = st.lists(
    st.tuples(st.integers(1, 5), st.integers(0, 6), st.one_of(st.none(), st.integers(0, 3))), min_size=1, max_size=6
)


def play(batch, num_samples, shards, schedule):
    """Worlds in turn, each for some steps; a number at the end is a kill after so many micro-steps of the next one."""
    job = Job(batch, num_samples, shards)
    for num_replicas, num_steps, killed_after in schedule:
        job.begin(num_replicas)
        for _ in range(num_steps):
            job.step()
        if killed_after is not None:
            job.step(is_killed_after=min(killed_after, job.ranks[0].split.num_micro_steps - 1))
            job.begin(num_replicas)
            job.step()
    return job


@pytest.mark.slow_single
@settings(max_examples=200 // SHARE, deadline=None)
@given(events, st.integers(1, 3), st.integers(1, 4), st.integers(0, 7), st.integers(5, 60))
def test_a_batch_that_follows_the_world(schedule, shards, micro, extra, num_samples):
    batch = StepBatch(samples_per_replica=shards * max(1, micro - 1) + extra, micro_batch_size=max(2, micro))
    job = play(batch, num_samples, shards, schedule)
    job.check(is_whole=True)
    left = num_samples
    for num_replicas, trained in job.steps:
        assert len(trained) == min(left, num_replicas * batch.samples_per_replica)
        left = left - len(trained) or num_samples


@pytest.mark.slow_single
@settings(max_examples=100 // SHARE, deadline=None)
@given(events, st.integers(1, 3), st.integers(2, 4), st.integers(15, 30), st.integers(30, 90))
def test_a_batch_that_stays(schedule, shards, micro, size, num_samples):
    job = play(StepBatch(global_batch_size=size, micro_batch_size=micro), num_samples, shards, schedule)
    job.check(is_whole=num_samples % size == 0)
    assert all(len(trained) == size for _, trained in job.steps)


def test_the_law():
    """5,000 samples at batch 500 are 10 steps, each sample once, whatever the worlds."""
    job = play(StepBatch(global_batch_size=500, micro_batch_size=8), 5000, 1, [(4, 3, 1), (7, 2, None), (1, 4, None)])
    assert len(job.steps) == 10
    assert sorted(i for _, trained in job.steps for i in trained) == list(range(5000))
    job.check(is_whole=True)


def test_the_law_where_the_batch_follows():
    batch = StepBatch(samples_per_replica=125, micro_batch_size=8)
    job = play(batch, 5000, 1, [(4, 3, 1), (7, 2, None), (1, 10, None)])
    assert [len(trained) for _, trained in job.steps] == [500] * 4 + [875] * 2 + [125] * 10
    assert sorted(i for _, trained in job.steps for i in trained) == list(range(5000))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "they are 0 and 0"),
        ({"global_batch_size": 8, "samples_per_replica": 8}, "they are 8 and 8"),
        ({"samples_per_replica": -1}, "samples_per_replica must be at least 1, but is -1"),
    ],
)
def test_impossible_batches(options, words):
    with pytest.raises(ConfigError, match=words):
        StepBatch(micro_batch_size=2, **options)


def test_padding_and_leaving_out_are_two_things():
    split = StepBatch(samples_per_replica=4, micro_batch_size=2).split(2, 1)
    with pytest.raises(ConfigError, match="drop_last=True leaves out"):
        ElasticSampler(40, split)
