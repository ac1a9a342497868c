"""Audit of every sample handed out, over cuts and changes of the world."""

import json
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperpod_plugins.data import BatchSplit, Cursor, ElasticSampler, sample_order
from hyperpod_plugins.errors import ConfigError, DatasetChanged


def sampler(num_samples=40, global_batch=8, micro_batch=2, world=1, rank=0, **options):
    split = BatchSplit(global_batch_size=global_batch, micro_batch_size=micro_batch, data_world_size=world)
    return ElasticSampler(num_samples, split, data_rank=rank, **options)


class Job:
    """All ranks of one job; a step counts as trained when its last micro-step was consumed."""

    def __init__(self, world, state=None, **options):
        self.ranks = [sampler(world=world, rank=rank, **options) for rank in range(world)]
        if state is not None:
            for rank in self.ranks:
                rank.load_state_dict(json.loads(state))
        self.iterators = [iter(rank) for rank in self.ranks]
        self.open_step = []

    def run_micro_step(self):
        """Returns the global batch of the step that this micro-step completed, if it did."""
        lists = [next(iterator, None) for iterator in self.iterators]
        if None in lists:
            assert lists == [None] * len(lists)  # all ranks end together
            self.iterators = [iter(rank) for rank in self.ranks]
            lists = [next(iterator) for iterator in self.iterators]
        assert len({str(rank.state_dict()) for rank in self.ranks}) == 1
        self.open_step += [sample for part in lists for sample in part]
        cursor = self.ranks[0].cursor
        if cursor.position != cursor.step_start:
            return None
        done, self.open_step = self.open_step, []
        return done


def run(segments, **options):
    """Steps trained by a job that changes its world at each cut; a step torn by a change is run again."""
    steps, state, open_step, old_world = [], None, [], None
    for world, num_micro_steps in segments:
        job = Job(world, state, **options)
        job.open_step = open_step if world == old_world else []
        for _ in range(num_micro_steps):
            step = job.run_micro_step()
            steps += [step] if step else []
        state, open_step, old_world = json.dumps(job.ranks[-1].state_dict()), job.open_step, world
    return steps


def undisturbed(num_samples, global_batch, num_steps, seed=0, drop_last=True):
    steps, epoch = [], 0
    while len(steps) < num_steps:
        order = sample_order(range(num_samples), num_samples=num_samples, seed=seed, epoch=epoch).tolist()
        chunks = [order[start : start + global_batch] for start in range(0, num_samples, global_batch)]
        steps += [chunk for chunk in chunks if len(chunk) == global_batch or not drop_last]
        epoch += 1
    return steps[:num_steps]


segments = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 25)), min_size=1, max_size=6)


@settings(max_examples=150, deadline=None)
@given(segments, st.integers(2, 4), st.sampled_from([6, 12, 13, 17]), st.integers(17, 60))
def test_changing_the_world_at_any_cut_trains_the_same_steps(segments, micro_batch, global_batch, num_samples):
    options = {"num_samples": num_samples, "global_batch": global_batch, "micro_batch": micro_batch}
    steps = run(segments, **options)
    assert steps == undisturbed(num_samples, global_batch, len(steps))


@settings(max_examples=60, deadline=None)
@given(segments, st.integers(18, 60).filter(lambda n: n % 12 == 0 or n % 12 >= 6))
def test_the_same_when_the_last_batch_is_kept(segments, num_samples):
    steps = run(segments, num_samples=num_samples, global_batch=12, micro_batch=2, drop_last=False)
    assert steps == undisturbed(num_samples, 12, len(steps), drop_last=False)


@settings(max_examples=60, deadline=None)
@given(st.sets(st.integers(0, 60), max_size=5), st.integers(0, 2), st.integers(1, 3))
def test_the_state_law(resuming_equals_never_stopping, cuts, rank, micro_batch):
    resuming_equals_never_stopping(
        lambda: sampler(num_samples=50, global_batch=12, micro_batch=micro_batch, world=3, rank=rank), 60, cuts
    )


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([4, 6, 10]), st.integers(1, 4)), min_size=2, max_size=4))
def test_changing_the_global_batch_loses_and_repeats_nothing_within_an_epoch(plan):
    state, seen = None, []
    for global_batch, num_micro_steps in plan:
        source = sampler(num_samples=400, global_batch=global_batch, micro_batch=global_batch)
        if state:
            source.load_state_dict(state)
        seen += [sample for ids in islice(iter(source), num_micro_steps) for sample in ids]
        state = source.state_dict()
    assert seen == sample_order(range(len(seen)), num_samples=400, seed=0, epoch=0).tolist()


def test_a_state_saved_at_the_last_batch_means_the_next_epoch():
    source = sampler()
    iterator = iter(source)
    for _ in range(len(source)):
        next(iterator)
    assert source.cursor == Cursor(epoch=1)  # before the iterator knows that it is exhausted
    resumed = sampler()
    resumed.load_state_dict(source.state_dict())
    resumed.set_epoch(1)
    assert len(list(resumed)) == len(source)
    assert resumed.cursor == Cursor(epoch=2)


@pytest.mark.parametrize("epoch", [0, 1])
def test_set_epoch_keeps_a_restored_position_until_it_was_used(epoch):
    source = sampler()
    everything = list(source)
    source = sampler()
    iterator = iter(source)
    for _ in range(5):
        next(iterator)
    state = source.state_dict()
    resumed = sampler()
    resumed.load_state_dict(state)
    resumed.set_epoch(epoch)
    assert list(resumed) == everything[5:]
    assert resumed.cursor == Cursor(epoch=1)
    resumed.set_epoch(epoch + 1)  # the trainer's next number is our next epoch
    assert resumed.cursor == Cursor(epoch=1)
    resumed.set_epoch(epoch + 2)
    assert resumed.cursor == Cursor(epoch=2)


def test_each_iteration_starts_the_epoch_unless_a_state_was_loaded():
    source = sampler()
    first = next(iter(source))
    assert next(iter(source)) == first
    source.set_epoch(1)
    assert next(iter(source)) != first


def test_epochs_differ_and_cover_everything():
    source = sampler(num_samples=40, world=1)
    epochs = [[sample for ids in source for sample in ids] for _ in range(3)]
    assert all(sorted(epoch) == list(range(40)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize(
    ("changed", "named"),
    [({"num_samples": 41}, "num_samples"), ({"seed": 1}, "seed"), ({"shuffle": False}, "shuffle"),
     ({"fingerprint": "other"}, "fingerprint")],
)  # fmt: skip
def test_a_state_of_other_data_is_refused(changed, named):
    with pytest.raises(DatasetChanged, match=named):
        sampler(**changed).load_state_dict(sampler().state_dict())


@pytest.mark.parametrize(
    "alter",
    [
        lambda state: state.pop("position"),
        lambda state: state.update(position=1000),
        lambda state: state.update(position=3),
        lambda state: state.update(step_start=8),
        lambda state: state.update(order="other"),
    ],
)
def test_an_altered_state_is_refused(alter):
    source = sampler()
    next(iter(source))
    state = source.state_dict()
    alter(state)
    with pytest.raises(DatasetChanged):
        sampler().load_state_dict(state)


def test_bad_arguments_are_refused():
    with pytest.raises(ConfigError, match="data_rank=2"):
        sampler(world=2, rank=2)
    with pytest.raises(ConfigError, match="fewer than one global batch"):
        sampler(num_samples=7)
    with pytest.raises(ConfigError, match="drop_last=True"):
        sampler(num_samples=41, world=4, drop_last=False)
