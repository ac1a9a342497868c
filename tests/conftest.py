"""A clean environment for every test, and the harness for real ranks as the fixture `run_ranks`."""

import os

import harness
import pytest


@pytest.fixture(scope="session")
def run_ranks():
    return harness.run_ranks


@pytest.fixture(autouse=True)
def clean_environ():
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
