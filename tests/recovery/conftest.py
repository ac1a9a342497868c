"""A job that several tests compare theirs with, and the nodes of elastic ones."""

import numpy as np
import pytest
from recovery.elastic_nodes import NUM_SAMPLES, Nodes
from recovery.faults import PRELOAD, run_job

from hyperpod_plugins.data import write_tokens


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """`ranks_transaction.py` with four ranks, to which nothing happens."""
    job = run_job("ranks_transaction.py", tmp_path_factory.mktemp("undisturbed"), args=PRELOAD, timeout_s=120)
    assert job.code == 0, job.output[-8000:]
    return job


@pytest.fixture(scope="session")
def tokens(tmp_path_factory):
    """A file whose samples of one token are their own ids."""
    path = tmp_path_factory.mktemp("tokens") / "ids"
    write_tokens(path, [np.arange(NUM_SAMPLES + 1)], vocab_size=NUM_SAMPLES + 1, progress=False)
    return path


@pytest.fixture
def nodes(tmp_path, tokens):
    nodes = Nodes(tmp_path, tokens)
    yield nodes
    nodes.clear()
