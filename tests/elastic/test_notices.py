"""What a loop written by hand hears of a job that is about to change."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from hyperpod_plugins.elastic import Ledger, elastic_event_detected, notices
from hyperpod_plugins.elastic.joining import found, give_notice
from hyperpod_plugins.elastic.world import World


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
def ledger(monkeypatch):
    """Of a job with two members, as this process finds it."""
    ledger = Ledger(dist.HashStore())
    monkeypatch.setenv("HYPERPOD_STORE", "localhost:1")
    monkeypatch.setattr(Ledger, "connect", lambda job: ledger)
    monkeypatch.setattr(notices, "_notices", notices._Notices())
    monkeypatch.setattr(notices, "_ASK_EVERY_S", 0.0)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, *notices.NOTICES)}
    yield ledger
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_job_that_does_not_recover_in_place_says_nothing(ledger):
    assert not elastic_event_detected()


def test_a_planned_world(ledger):
    found(ledger, World.of_founders(2))
    assert not elastic_event_detected()
    ledger.put("wanted_world", b"1")
    assert elastic_event_detected()


def test_a_node_that_got_notice(ledger):
    found(ledger, World.of_founders(2))
    assert not elastic_event_detected()
    give_notice(ledger, 1, 0)
    assert elastic_event_detected()


def test_a_store_that_is_gone(ledger, monkeypatch):
    def lost(_):
        raise dist.DistNetworkError("connection reset")

    monkeypatch.setattr(notices, "world_or_none", lost)
    assert elastic_event_detected()
