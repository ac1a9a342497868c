"""What a job says at its start and after a fault."""

import logging
from dataclasses import replace

import pytest

from hyperpod_plugins.elastic import FailureRecord
from hyperpod_plugins.parallel import Topology
from hyperpod_plugins.recovery import RecoveryOptions, Repair
from hyperpod_plugins.recovery.config import log_once
from hyperpod_plugins.recovery.plan import RecoveryLevel


@pytest.mark.parametrize(
    ("topology", "options", "says"),
    [
        (
            Topology(world_size=4, shard_degree=2),
            {},
            "costs no committed step: its replacement takes its state from another of the 2",
        ),
        (
            Topology(world_size=4, shard_degree=4),
            {},
            "since the last buddy snapshot (one after each step, or as many as cost 0.5 %",
        ),
        (
            Topology(world_size=4, shard_degree=4),
            {"snapshot_every_steps": 9},
            "snapshot (one after every 9 steps), as each shard",
        ),
        (
            Topology(world_size=4, shard_degree=4),
            {"snapshot_every_steps": 0},
            "the last checkpoint, as each shard exists once",
        ),
        (Topology(world_size=4, shard_degree=4), {}, "Set hybrid_shard_degree below 4 to lose none"),
        (Topology(world_size=1), {}, "the last checkpoint, as each shard exists once. Use more ranks to lose none"),
        (Topology(world_size=4, shard_degree=1, tensor_degree=4), {}, "Use more ranks to lose none"),
    ],
)
def test_what_the_loss_of_a_rank_costs(topology, options, says):
    assert says in RecoveryOptions(**options).cost_of_loss(topology)


def test_the_cost_is_logged_once(caplog):
    with caplog.at_level(logging.WARNING):
        for cost in ("costs much", "costs much", "costs nothing"):
            log_once(cost)
    assert [each.getMessage() for each in caplog.records] == ["recovery: costs much", "recovery: costs nothing"]


def repair(cause, kind="process", level=RecoveryLevel.SNAPSHOT):
    failure = FailureRecord(kind=kind, cause=cause, worker_id=1)
    seconds = {"noticed_s": 0.0, "quorum_s": 0.1, "restored_s": 0.1}
    return Repair(
        failure=failure,
        step=3,
        generation=1,
        level=level,
        receivers=(1,),
        rolled_forward=False,
        steps_lost=7,
        **seconds,
    )


def test_a_return_to_a_snapshot_is_one_line():
    first, second = repair("killed by SIGKILL"), repair("all ranks return to the snapshot of step 3", "request")
    assert str(first).endswith("7 steps lost, going on after step 3: all ranks return to the snapshot of step 3")
    assert [each.is_reported_by(0, 2) for each in (first, second)] == [True, False]
    assert not str(repair("killed by SIGKILL", level=RecoveryLevel.REPLACE)).endswith("snapshot of step 3")
    unknown = replace(first, steps_lost=None)
    assert "an unknown number of steps lost, going on after step 3" in str(unknown)
    assert unknown.event().details["steps_lost"] == "unknown"
