"""A job that several tests compare theirs with."""

import pytest
from recovery.faults import PRELOAD, run_job


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """`ranks_transaction.py` with four ranks, to which nothing happens."""
    job = run_job("ranks_transaction.py", tmp_path_factory.mktemp("undisturbed"), args=PRELOAD, timeout_s=120)
    assert job.code == 0, job.output[-8000:]
    return job
