"""What a job says at its start and after a fault."""

import logging
from dataclasses import replace

import pytest

from hyperpod_plugins.elastic import FailureRecord
from hyperpod_plugins.parallel import Topology
from hyperpod_plugins.recovery import RecoveryOptions, Repair
from hyperpod_plugins.recovery.config import log_once
from hyperpod_plugins.recovery.plan import RecoveryLevel

TWO_NODES = Topology(world_size=4, shard_degree=2, ranks_per_node=2)
TORCHRUN = {"restarts_node": True}


@pytest.mark.parametrize(
    ("topology", "options", "says"),
    [
        (
            Topology(world_size=4, shard_degree=2),
            {},
            "of a rank costs no committed step: its replacement takes its state from another of the 2",
        ),
        (
            Topology(world_size=4, shard_degree=2),
            {},
            "all ranks of a node at once costs the steps since the last buddy snapshot (one after each step, or as "
            "many as cost 0.2 % of the time)",
        ),
        (
            Topology(world_size=4, shard_degree=2),
            {"snapshot_every_steps": 0},
            "all ranks of a node at once costs the steps since the last checkpoint. Spread the replicas",
        ),
        (TWO_NODES, {}, "the loss of a rank, or of all ranks of a node, costs no committed step"),
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


@pytest.mark.parametrize(
    ("topology", "start", "says"),
    [
        (
            Topology(world_size=4, shard_degree=2),
            TORCHRUN,
            "the loss of a rank costs the steps since the last buddy snapshot (one after each step, or as many as cost "
            "0.5 % of the time), as torchrun restarts all ranks of a node with the first that fails. Start the program "
            "with hyperpodrun",
        ),
        (
            Topology(world_size=4, shard_degree=2),
            {**TORCHRUN, "outlives": False},
            "of a rank costs the steps since the last checkpoint, as torchrun",
        ),
        (TWO_NODES, TORCHRUN, "the loss of a rank, or of all ranks of a node, costs no committed step"),
        (
            Topology(world_size=4, shard_degree=4),
            TORCHRUN,
            "as each shard exists once and torchrun restarts all ranks of a node with the first that fails. Set "
            "hybrid_shard_degree below 4 and start the program with hyperpodrun, which replaces one rank alone, to",
        ),
        (
            Topology(world_size=4, shard_degree=4),
            {"outlives": False},
            "shard exists once. The loss of all ranks at once costs those since the last checkpoint. Set hybrid_shard",
        ),
        (
            Topology(world_size=4, shard_degree=4, ranks_per_node=2),
            {**TORCHRUN, "outlives": False},
            "of a rank costs the steps since the last buddy snapshot (",
        ),
    ],
)
def test_what_the_loss_of_a_rank_costs_depends_on_the_launcher(topology, start, says):
    assert says in RecoveryOptions().cost_of_loss(topology, **start)


@pytest.mark.parametrize(
    ("topology", "takes", "sends"),
    [
        (Topology(world_size=4, shard_degree=4), True, True),
        (Topology(world_size=4, shard_degree=4, ranks_per_node=2), True, True),
        (Topology(world_size=4, shard_degree=2), True, False),
        (Topology(world_size=4, shard_degree=1, ranks_per_node=4), True, False),
        (TWO_NODES, False, True),
        (Topology(world_size=4, shard_degree=2, ranks_per_node=3), True, True),  # the copies of rank 0 and rank 2
        (Topology(world_size=1), False, True),
    ],
)
def test_snapshots_are_taken_where_all_copies_of_a_shard_are_on_one_node(topology, takes, sends):
    policy = RecoveryOptions().snapshots(topology)
    assert (policy.every_steps > 0, policy.needs_buddies) == (takes, sends)
    chosen = RecoveryOptions(snapshot_every_steps=7).snapshots(topology)
    assert (chosen.every_steps, chosen.needs_buddies) == ((7, True) if topology.world_size > 1 else (0, True))
    assert RecoveryOptions(snapshot_every_steps=0).snapshots(topology).every_steps == 0
    unreplicated = RecoveryOptions(snapshot_every_steps="unreplicated").snapshots(topology)
    assert (unreplicated.every_steps > 0) == (takes and topology.replicate_degree == 1)


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
