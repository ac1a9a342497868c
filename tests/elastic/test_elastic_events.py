"""What a loop written by hand hears of a job that is about to change."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from hyperpod_plugins.elastic import JobStore, elastic_event_detected
from hyperpod_plugins.elastic.membership import elastic_events
from hyperpod_plugins.elastic.membership.admission import announce_preemption, publish_initial_world
from hyperpod_plugins.elastic.store.world import WorldPlan


@pytest.mark.spawns
def test_all_ranks_hear_what_one_was_told_after_the_same_step(tmp_path):
    program = Path(__file__).with_name("ranks_notices.py")
    ranks = [
        subprocess.Popen([sys.executable, str(program), str(rank), str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    said = [json.loads(rank.communicate(timeout=60)[0]) for rank in ranks]
    assert said == [[5, [], True], [5, ["heard"], True]]


@pytest.fixture
def job_store(monkeypatch):
    """Of a job with two members, as this process finds it."""
    job_store = JobStore(dist.HashStore())
    monkeypatch.setenv("HYPERPOD_STORE", "localhost:1")
    monkeypatch.setattr(JobStore, "connect", lambda job: job_store)
    monkeypatch.setattr(elastic_events, "_notices", elastic_events._Notices())
    monkeypatch.setattr(elastic_events, "_ASK_EVERY_S", 0.0)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, *elastic_events.NOTICES)}
    yield job_store
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_job_that_does_not_recover_in_place_says_nothing(job_store):
    assert not elastic_event_detected()


def test_a_planned_world(job_store):
    publish_initial_world(job_store, WorldPlan.initial(2))
    assert not elastic_event_detected()
    job_store.set("wanted_world", b"1")
    assert elastic_event_detected()


def test_a_node_that_got_notice(job_store):
    publish_initial_world(job_store, WorldPlan.initial(2))
    assert not elastic_event_detected()
    announce_preemption(job_store, 1, 0)
    assert elastic_event_detected()


@pytest.mark.parametrize(("address", "is_over"), [("localhost:1", True), ("etcd://localhost:1/job", False)])
def test_a_store_that_does_not_answer(job_store, monkeypatch, address, is_over):
    """One that an agent serves ends with the job; etcd may answer again."""

    def lost(_):
        raise dist.DistNetworkError("connection reset")

    monkeypatch.setenv("HYPERPOD_STORE", address)
    monkeypatch.setattr(elastic_events, "world_or_none", lost)
    assert elastic_event_detected() is is_over
