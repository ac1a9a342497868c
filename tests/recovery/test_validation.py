"""A validation draws random numbers, and the training after it draws what it would have drawn without."""

import pytest
import torch
from recovery.faults import run_job

pytestmark = pytest.mark.spawns


def test_a_validation_does_not_disturb_the_training_after_it(tmp_path):
    jobs = {}
    for every in (3, 16):  # batches; an epoch has 16, and dropout and transforms of samples and batches draw in each
        environ = {"LAYOUT": "replicas", "STEPS": "16", "VALIDATE_EVERY": str(every)}
        jobs[every] = run_job("ranks_lightning.py", tmp_path / str(every), num_ranks=2, environ=environ)
        assert jobs[every].code == 0, jobs[every].output[-8000:]
    often, once = (jobs[every] for every in (3, 16))
    assert [len(logged(job, "val")[0]) for job in (often, once)] == [5, 1]
    assert len(logged(often, "loss_step")[0]) == 16
    assert logged(often, "loss_step") == logged(once, "loss_step")
    assert len(drawn(often)[0]) == 18  # after each batch, and at the begin and the end of the epoch
    assert drawn(often) == drawn(once)
    for one, other in zip(often.results(2), once.results(2), strict=True):
        one, other = one["state"], other["state"]
        assert one.keys() == other.keys()
        assert all(torch.equal(value, other[name]) for name, value in one.items())


def drawn(job):
    """Numbers that the hooks of each rank drew."""
    return [{line["at"]: line["value"] for line in lines} for lines in job.records("drawn", 2)]


def logged(job, name):
    """Values of one metric that each rank logged."""
    return [[line["metrics"][name] for line in lines if name in line["metrics"]] for lines in job.records("metrics", 2)]
