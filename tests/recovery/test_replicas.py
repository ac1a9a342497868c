"""A fit whose replicas drift apart; `test_rehearsal.py` has the same of a Session, and the rules of the comparison."""

import re

import pytest
from recovery.faults import run_job

pytestmark = pytest.mark.spawns


def test_a_fit_whose_replicas_drift_apart_by_one_bit_ends_by_name(tmp_path):
    environ = {"LAYOUT": "replicas", "COMPARE": "2", "FLIP_AT": "3"}
    job = run_job("ranks_lightning.py", tmp_path, num_ranks=3, environ=environ)
    assert job.code == 1, job.output[-8000:]
    told = re.findall(r"ReplicasDiffer: (.*)", job.output)
    words = r"step 4: rank 1 \(.*\) does not hold the same bits as its replicas, ranks 0, 2: .*parameter net.norm.w"
    assert told, job.output[-8000:]
    assert all(re.search(words, each) for each in told), told
    assert not list(tmp_path.glob("result-*"))
