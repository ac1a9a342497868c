"""The batches of a rank, grouped by step, where the last step of an epoch is smaller."""

import pytest

from hyperpod_plugins.data import ElasticSampler, StatefulLoader
from hyperpod_plugins.elastic.scaling.batch import StepBatch
from hyperpod_plugins.session.loop import iterate_steps

NUM_SAMPLES = 16


def steps_of(batch, num_replicas, state=None):
    """Steps of two epochs: of each, number of samples, whether it ends the epoch, and each rank's batches."""
    found = []
    for rank in range(num_replicas):
        split = batch.split(num_replicas, 1)
        sampler = ElasticSampler(NUM_SAMPLES, split, data_rank=rank, shuffle=False, drop_last=False)
        loader = StatefulLoader(list(range(NUM_SAMPLES)), sampler)
        if state is not None:
            loader.load_state_dict(state)
        found.append(list(iterate_steps(loader, 2)))
    return list(zip(*found, strict=True))


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_a_last_step_with_fewer_samples_than_micro_steps(num_replicas):
    """Micro-steps without a sample belong to their step, and every sample of a step counts the same."""
    batch = StepBatch(samples_per_replica=7, micro_batch_size=3)
    steps = steps_of(batch, num_replicas)
    assert len(steps) == 2 * -(-NUM_SAMPLES // (7 * num_replicas))
    position = 0
    for ranks in steps:
        size = min(7 * num_replicas, NUM_SAMPLES - position)
        assert {(step.num_samples, step.ends_epoch, len(step.batches)) for step in ranks} == {
            (size, position + size == NUM_SAMPLES, 3)
        }
        counts = dict.fromkeys(range(position, position + size), 0.0)
        for step in ranks:
            for ids, weight in zip(step.batches, step.weights, strict=True):
                for each in ids.tolist():
                    counts[each] += weight / len(ids) / num_replicas / 3 * size
        assert counts == pytest.approx(dict.fromkeys(counts, 1.0))
        position = (position + size) % NUM_SAMPLES


def test_a_constant_batch_whose_last_step_has_fewer_micro_steps():
    steps = steps_of(StepBatch(global_batch_size=12, micro_batch_size=3), 1)
    assert [(step.num_samples, step.ends_epoch, len(step.batches)) for (step,) in steps] == 2 * [
        (12, False, 4),
        (4, True, 2),
    ]


def test_an_epoch_that_another_world_began():
    batch = StepBatch(samples_per_replica=7, micro_batch_size=3)
    sampler = ElasticSampler(NUM_SAMPLES, batch.split(2, 1), data_rank=0, shuffle=False, drop_last=False)
    state = sampler.state_dict() | {"position": 14, "step_start": 14}
    steps = steps_of(batch, 1, state)
    assert [(step.num_samples, step.epoch, len(step.batches)) for (step,) in steps] == [
        (2, 0, 3),
        (7, 1, 3),
        (7, 1, 3),
        (2, 1, 3),
    ]
