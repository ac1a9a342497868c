"""A clean environment for every test, and the harness for real ranks as the fixture `run_ranks`."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location("harness", Path(__file__).parent / "harness.py")
harness = importlib.util.module_from_spec(_spec)
sys.modules["harness"] = harness
_spec.loader.exec_module(harness)


@pytest.fixture(scope="session")
def run_ranks():
    return harness.run_ranks


@pytest.fixture(autouse=True)
def clean_environ():
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
