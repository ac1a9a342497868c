"""A job that several tests compare theirs with, and the nodes of elastic ones."""

import pytest
from recovery.elastic_nodes import Nodes, write_ids
from recovery.faults import PRELOAD, run_job


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """`ranks_transaction.py` with four ranks, to which nothing happens."""
    job = run_job("ranks_transaction.py", tmp_path_factory.mktemp("undisturbed"), args=PRELOAD, timeout_s=120)
    assert job.code == 0, job.output[-8000:]
    return job


@pytest.fixture(scope="session")
def tokens(tmp_path_factory):
    """A file whose samples of one token are their own ids."""
    return write_ids(tmp_path_factory.mktemp("tokens") / "ids")


@pytest.fixture
def nodes(tmp_path, tokens):
    nodes = Nodes(tmp_path, tokens)
    yield nodes
    nodes.clear()
