"""A clean environment for every test, and the harness for real ranks as the fixture `run_ranks`."""

import os
import signal
from pathlib import Path

if os.environ.get("HYPERPOD_TEST_DEVICE", "cpu") == "cpu":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks; see docs/gpu-status.md
# Before torch is imported: several tests run at a time, and threads that wait for each other's turn take most of it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import harness
import hypothesis
import pytest
from launched import Job

from hyperpod_plugins.comm.runtime import group_health
from hyperpod_plugins.elastic.process import RESOLVER_OPTIONS

# torch's store asks for the name of each client; an answer that does not come costs 5 s by default.
os.environ.setdefault("RES_OPTIONS", RESOLVER_OPTIONS)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a command in the background; programs inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
hypothesis.settings.register_profile("shared machine", deadline=None)  # a slow example is no failure
hypothesis.settings.load_profile("shared machine")


VARIANTS = Path(__file__).with_name("variants.txt")


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items):
    listed = {line for line in VARIANTS.read_text().splitlines() if line and not line.startswith("#")}
    for item in items:
        if item.nodeid in listed:
            item.add_marker("variant")


def pytest_collection_finish(session):
    if any(item.get_closest_marker("spawns") for item in session.items):
        harness.start_fork_server()  # before a benchmark under test starts one that imports less


@pytest.fixture(scope="session")
def run_ranks():
    return harness.run_ranks


@pytest.fixture(autouse=True)
def clean_environ():
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def no_recording():
    """A member that a test left in its job would record the collectives of all later tests."""
    yield
    left = [name for name in ("on_set_up", "on_dropped") if getattr(group_health, name) is not None]
    group_health.on_set_up = group_health.on_dropped = None
    assert not left, f"the test left {left} behind: leave the job (Member.leave), or call runtime.reset()"


@pytest.fixture
def launch(tmp_path):
    """Starts a `launched.Job`; all of them are gone when the test ends."""
    jobs = []

    def launch(script, *options, **more):
        jobs.append(Job(tmp_path, script, *options, **more))
        return jobs[-1]

    yield launch
    for job in jobs:
        job.clear()
