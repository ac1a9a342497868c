"""When replicas are compared, and a fit whose replicas drift apart; `test_rehearsal.py` has the same of a Session."""

import re

import pytest
import torch
from recovery.faults import run_job

from hyperpod_plugins.recovery.replica_comparison import is_due, previous_comparison, sampled


def test_replicas_are_compared_early_and_then_seldom():
    due = [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 3072, 4096]
    assert [step for step in range(5000) if is_due(step, "auto")] == due
    assert [step for step in range(10) if is_due(step, 3)] == [0, 3, 6, 9]
    assert not any(is_due(step, 0) for step in range(10))
    assert [previous_comparison(step, "auto") for step in due] == [None, *due[:-1]]
    assert [previous_comparison(step, 3) for step in (0, 3, 6)] == [None, 0, 3]


def test_samples_are_spread_over_each_tensor_and_in_the_end_are_all_of_it():
    large, small = torch.arange(100_000), torch.arange(5)
    seen = set()
    for step in (step for step in range(20_000) if is_due(step, "auto")):
        found = sampled({"large": large, "small": small}, step)
        assert torch.equal(found["small"], small)
        assert 14_000 < len(found["large"]) <= 16_384
        assert found["large"].diff().unique().tolist() == [7]
        seen.update(found["large"].tolist())
    assert seen == {*range(100_000)}
    many = sampled({str(index): large for index in range(1000)}, 0)
    assert 2**19 < sum(map(len, many.values())) <= 2**20


@pytest.mark.spawns
def test_a_fit_whose_replicas_drift_apart_by_one_bit_ends_by_name(tmp_path):
    environ = {"LAYOUT": "replicas", "COMPARE": "2", "FLIP_AT": "3"}
    job = run_job("ranks_lightning.py", tmp_path, num_ranks=3, environ=environ)
    assert job.code == 1, job.output[-8000:]
    told = re.findall(r"ReplicasDiffer: (.*)", job.output)
    words = r"step 4: rank 1 \(.*\) does not hold the same bits as its replicas, ranks 0, 2: .*parameter net.norm.w"
    assert told, job.output[-8000:]
    assert all(re.search(words, each) for each in told), told
    assert not list(tmp_path.glob("result-*"))
