"""Buddy snapshots: who keeps whose, what is restorable, two of each, and jobs that lose every copy of a shard."""

import os
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from recovery.faults import TORCHRUN, run_job
from torch import nn

from hyperpod_plugins.comm import GroupKey, Reconfiguration, break_groups, new_axis_group
from hyperpod_plugins.errors import ConfigError, StateLost
from hyperpod_plugins.parallel import Topology
from hyperpod_plugins.recovery import (
    NO_STATE,
    Arrival,
    RecoveryLevel,
    Snapshot,
    SnapshotPolicy,
    Snapshots,
    TrainingState,
    plan_recovery,
    snapshot_memory,
)
from hyperpod_plugins.recovery.plan import buddies, newest_restorable_step, restorable_steps, sources_of
from hyperpod_plugins.recovery.snapshot import MAX_STALLS, SnapshotBuffer
from hyperpod_plugins.recovery.snapshot_memory import SharedMemory

# -- who keeps whose --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("topology", "expected"),
    [
        (Topology(world_size=1), (0,)),
        (Topology(world_size=4, shard_degree=4), (1, 2, 3, 0)),
        (Topology(world_size=4, shard_degree=2), (3, 2, 1, 0)),  # one node: the other replica, and the other shard
        (Topology(world_size=6, shard_degree=2), (3, 2, 5, 4, 1, 0)),
        (Topology(world_size=4, shard_degree=2, tensor_degree=2), (1, 2, 3, 0)),
        (Topology(world_size=4, shard_degree=4, ranks_per_node=2), (2, 3, 0, 1)),
        # with two nodes, a whole node further lies the replica: one more
        (Topology(world_size=8, shard_degree=4, ranks_per_node=4), (5, 6, 7, 4, 1, 2, 3, 0)),
        (Topology(world_size=8, shard_degree=4, ranks_per_node=2), (2, 3, 4, 5, 6, 7, 0, 1)),
        (Topology(world_size=8, shard_degree=2, ranks_per_node=2), (3, 2, 5, 4, 7, 6, 1, 0)),
    ],
)
def test_the_shortest_move_that_leaves_node_and_shard_is_taken(topology, expected):
    assert buddies(topology) == expected


def topologies():
    for world, shard, tensor, per_node in product(range(1, 17), (1, 2, 4, 8), (1, 2), (0, 1, 2, 3, 4, 8)):
        if world % (shard * tensor) == 0:
            yield Topology(world_size=world, shard_degree=shard, tensor_degree=tensor, ranks_per_node=per_node)


@pytest.mark.parametrize("topology", list(topologies()), ids=str)
def test_buddies_are_a_permutation_without_fixed_points_and_leave_the_node_where_that_is_possible(topology):
    found = buddies(topology)
    ranks = range(topology.world_size)
    assert sorted(found) == list(ranks)
    assert topology.world_size == 1 or all(found[rank] != rank for rank in ranks)
    assert [found[source_rank] for source_rank in sources_of(found)] == list(ranks)
    nodes = [topology.node_of(rank) for rank in ranks]
    if 2 * max(nodes.count(node) for node in nodes) <= topology.world_size:
        assert all(nodes[rank] != nodes[found[rank]] for rank in ranks)
    if topology.ranks_per_node and topology.world_size % topology.ranks_per_node == 0 and topology.shard_degree > 1:
        places = min(topology.ranks_per_node, topology.world_size)
        if places > topology.tensor_degree:
            assert all(found[rank] not in topology.replicas_of(rank) for rank in ranks)


def test_nodes_of_different_sizes_keep_nothing_at_home():
    node_of = [0, 1, 1, 1, 2, 2].__getitem__
    found = buddies(Topology(world_size=6, shard_degree=6), node_of)
    assert all(node_of(rank) != node_of(buddy) for rank, buddy in enumerate(found))


def test_a_step_is_restorable_if_each_rank_or_its_buddy_has_it():
    buddy_of = (1, 2, 0)
    everybody = {0: (5, 10), 1: (5, 10), 2: (5, 10)}
    assert restorable_steps(everybody, {}, buddy_of) == {5, 10}
    assert restorable_steps({**everybody, 1: ()}, {2: (5,)}, buddy_of) == {5}
    assert restorable_steps({**everybody, 1: ()}, {0: (5,)}, buddy_of) == set()


# -- the plan ---------------------------------------------------------------------------------------------------------

FULL = Topology(world_size=4, shard_degree=4)
HYBRID = Topology(world_size=4, shard_degree=2)


def survivor(committed, *steps):
    return Arrival(incarnation=0, committed=committed, snapshots=steps, source_snapshots=steps)


def joiner():
    return Arrival(incarnation=1)


def arrivals(committed, steps, lost):
    return {rank: joiner() if rank in lost else survivor(committed, *steps) for rank in range(4)}


def test_one_lost_rank_of_a_full_sharding_returns_everybody_to_the_newest_snapshot():
    plan = plan_recovery(arrivals(13, (5, 10), {1}), FULL)
    assert (plan.level, plan.step, plan.steps_lost) == (RecoveryLevel.SNAPSHOT, 10, 3)
    assert (dict(plan.senders), plan.roll_forward) == ({1: 2}, ())


@pytest.mark.parametrize(("before", "steps_lost"), [((30, 30, 29, 30), 26), ((NO_STATE,) * 4, None)])
def test_new_processes_say_how_many_steps_are_lost_if_any_knows(before, steps_lost):
    """The processes that they replace have left their snapshots, and the number of steps that they had committed."""
    new = {rank: replace(joiner(), snapshots=(4,), last_committed=last) for rank, last in enumerate(before)}
    plan = plan_recovery(new, HYBRID)
    assert (plan.level, plan.step, plan.steps_lost, dict(plan.senders)) == (RecoveryLevel.SNAPSHOT, 4, steps_lost, {})


def test_a_live_replica_is_preferred_to_a_snapshot():
    plan = plan_recovery(arrivals(13, (5, 10), {1}), HYBRID)
    assert (plan.level, plan.step, plan.steps_lost, dict(plan.senders)) == (RecoveryLevel.REPLACE, 13, 0, {1: 3})


def test_both_replicas_of_a_shard_come_from_their_buddies():
    plan = plan_recovery(arrivals(13, (5, 10), {1, 3}), HYBRID)
    assert (plan.level, plan.step, dict(plan.senders)) == (RecoveryLevel.SNAPSHOT, 10, {1: 2, 3: 0})


def test_an_exchange_that_only_some_completed_does_not_count():
    given = arrivals(13, (5, 10), {1})
    given[2] = Arrival(incarnation=0, committed=13, snapshots=(5, 10), source_snapshots=(5,))
    assert plan_recovery(given, FULL).step == 5
    assert newest_restorable_step(given, FULL) == 5


def test_nobody_is_lost_and_nothing_is_returned_to():
    assert plan_recovery(arrivals(13, (5, 10), set()), FULL).level is RecoveryLevel.RETRY


@pytest.mark.parametrize(
    ("steps", "lost", "words"),
    [
        ((), {1}, "no rank that is left holds a snapshot"),
        ((10,), {1, 2}, "nothing is left of the ranks [1], whose buddies are [2]"),
        ((10,), {0, 1, 2, 3}, "no rank that is left holds the training state"),
    ],
)
def test_the_end_of_the_ladder_says_why_each_rung_failed(steps, lost, words):
    with pytest.raises(StateLost) as raised:
        plan_recovery(arrivals(13, steps, lost), FULL)
    assert words in str(raised.value)


def test_an_arrival_survives_the_job_store():
    import json

    arrival = survivor(13, 5, 10)
    assert Arrival.from_dict(json.loads(json.dumps(arrival.to_dict()))) == arrival


@pytest.mark.parametrize("values", [{"every_steps": -1}, {"memory_fraction": 0.0}, {"memory_fraction": 1.5}])
def test_impossible_policies_are_refused(values):
    with pytest.raises(ConfigError):
        SnapshotPolicy(**values)


# -- two of each ------------------------------------------------------------------------------------------------------


def taken(shelf, step, keep):
    data = shelf.allocate(8, keep=keep)
    data.fill_(step)
    shelf.put(Snapshot(step=step, header=b"", trainer=b"", data=data))
    return data


def test_the_complete_snapshot_is_not_overwritten_while_the_next_is_taken():
    shelf = SnapshotBuffer(is_pinned=False)
    first = taken(shelf, 5, keep=NO_STATE)
    second = taken(shelf, 10, keep=5)
    assert shelf.steps == (5, 10)
    third = taken(shelf, 15, keep=5)  # the exchange of step 10 was interrupted
    assert shelf.steps == (5, 15)
    assert third.data_ptr() == second.data_ptr()
    assert first.eq(5).all()
    fourth = taken(shelf, 20, keep=15)
    assert shelf.steps == (15, 20)
    assert fourth.data_ptr() == first.data_ptr()
    assert shelf.find(15).data.eq(15).all()


def test_a_snapshot_of_another_size_gets_memory_of_its_own():
    shelf = SnapshotBuffer(is_pinned=False)
    taken(shelf, 5, keep=NO_STATE)
    assert shelf.allocate(16, keep=NO_STATE).numel() == 16
    assert shelf.steps == ()


def exchange(rank_that_breaks):
    """Three ranks take snapshots, are interrupted in one, and one of them loses everything."""
    torch.set_num_threads(1)
    dist.init_process_group("hyperpod")
    rank, topology = dist.get_rank(), Topology(world_size=3, shard_degree=3)
    group = new_axis_group(GroupKey("snapshot", is_strict=True), range(3))
    model = nn.Linear(4, 3 + rank)  # of another size on each rank
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = TrainingState(model, [optimizer], verify=True)

    def make(policy):
        return Snapshots(policy, state, topology, group)

    snapshots = make(SnapshotPolicy(every_steps=5))
    checksums = {}
    for step in range(11):
        checksums[step] = state.checksum()
        snapshots.maybe_snapshot(step, lambda step=step: f"trainer {rank} at {step}".encode())
        model(torch.ones(4)).sum().backward()
        optimizer.step()
    snapshots.wait()
    after_ten = snapshots.own_steps, snapshots.source_steps
    if rank == rank_that_breaks:
        break_groups("a test")
    snapshots.maybe_snapshot(15, lambda: b"")
    snapshots.wait()
    interrupted = snapshots.own_steps, snapshots.source_steps

    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    break_groups("a test")
    Reconfiguration(1, store=dist.PrefixStore("again", store), timeout_s=20).run()
    if rank == 1:
        snapshots = make(SnapshotPolicy(every_steps=5))
        model.weight.data.zero_()
        optimizer.state.clear()
    snapshots.resume_at(10)
    snapshots.redistribute(10, {1: snapshots.buddy if rank == 1 else buddies(topology)[1]})
    snapshots.load(10)
    returned = snapshots.take_returned()
    is_off = turn_off_and_repair(snapshots, partial(make, SnapshotPolicy(every_steps=5)), store)
    is_equal = state.checksum() == checksums[10]
    too_much = make(SnapshotPolicy(every_steps=1, memory_fraction=1e-12))
    too_much.maybe_snapshot(0, lambda: b"")
    with pytest.raises(ConfigError, match="bytes of host memory"):
        too_much.maybe_snapshot(1, lambda: b"")
    left_out = make(SnapshotPolicy(every_steps=1, memory_fraction=1e-12, is_required=False))
    for step in range(3):
        left_out.maybe_snapshot(step, lambda: b"")
    again, alone = snapshots.take_returned(), keep_in_shared_memory(partial(Snapshots, state=state, group=group))
    return after_ten, interrupted, is_equal, returned.trainer, again, left_out.own_steps, is_off, alone


def keep_in_shared_memory(make):
    """Steps of the snapshots of a rank and of its source rank, and what the next process finds of them.

    In the second case, rank 1 has no room in shared memory; in the third, it has no parameters, as ranks may have.
    """
    policy, found = SnapshotPolicy(every_steps=1, needs_buddies=False), []
    make = partial(make, policy, topology=Topology(world_size=3, shard_degree=1))
    snapshot_memory._MIN_FREE_PART = 0
    without = partial(make, state=TrainingState(nn.Identity(), []))
    is_one = dist.get_rank() == 1
    for is_short, create in ((False, make), (is_one, make), (False, without if is_one else make)):
        snapshot_memory._MIN_FREE_BYTES = 2**60 if is_short else 0
        with TemporaryDirectory() as folder:
            memory = SharedMemory(folder=Path(folder), worker_id=0, identity_of=str, is_replacement=False)
            snapshots = create(memory=memory)
            for step in (1, 2, 3):
                snapshots.maybe_snapshot(step, lambda: b"trainer")
                snapshots.wait()
                snapshots.record_committed(step + 1)
            found.append((snapshots.own_steps, snapshots.source_steps, snapshots.last_committed))
            for is_new in (True, False):
                new = create(memory=replace(memory, is_replacement=is_new))
                found.append((new.own_steps, new.source_steps, new.last_committed))
    return found


def turn_off_and_repair(snapshots, make, store):
    """Whether they are off after three stalled exchanges, after a repair in which rank 1 is new, and so once more."""
    snapshots._num_stalls = MAX_STALLS
    found = []
    for generation in (2, 3):
        for step in (20, 25):
            snapshots.maybe_snapshot(step, lambda: b"")
            snapshots.wait()
        found.append(snapshots._is_off)
        break_groups("a test")
        Reconfiguration(generation, store=dist.PrefixStore(f"again {generation}", store), timeout_s=20).run()
        if dist.get_rank() == 1:
            snapshots = make()
        snapshots.resume_at(10)
        found.append(snapshots._is_off)
    return found


@pytest.mark.spawns
def test_ranks_keep_the_last_complete_snapshot_and_get_it_back():
    for rank, found in enumerate(run_ranks(exchange, 0, world_size=3)):
        after_ten, (own, of_source), is_equal, trainer, again, left_out, is_off, alone = found
        assert after_ten == ((5, 10), (5, 10))
        assert 10 in own
        assert 10 in of_source
        assert is_equal
        assert trainer == f"trainer {rank} at 10".encode()
        assert again is None
        assert left_out == ()
        assert is_off == [True, False, True, False]  # also where a rank that is new has not seen what stood still
        kept, nothing = (2, 3), ((), (), NO_STATE)
        left = () if rank == 1 else kept
        roomy = [(kept, (), 4), (kept, (), 4), nothing]
        assert alone == [*roomy, (kept, kept, 4), (left, left, 4), nothing, *roomy]


# -- jobs -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Undisturbed jobs by layout, each run once."""
    done = {}

    def undisturbed(layout):
        if layout not in done:
            done[layout] = run(tmp_path_factory.mktemp(layout), layout).results()
        return done[layout]

    return undisturbed


RDZV = ("--rdzv-backend", "hyperpod", "--nnodes", "1", "--max-restarts", "3")


def run(folder, layout, *faults, is_private=False, **options):
    environ = {
        "LAYOUT": layout,
        "SNAPSHOT_EVERY": "5",
        "STEPS": "16",
        "AVERAGE": "1",
        "PRIVATE_SNAPSHOTS": "1" if is_private else "",
    }
    return run_job("ranks_snapshot.py", folder, faults=faults, environ=environ, **options)


def assert_equal(results, undisturbed):
    for found, expected in zip(results, undisturbed, strict=True):
        assert (found["step"], found["epoch"], found["lr"]) == (expected["step"], expected["epoch"], expected["lr"])
        assert found["state"].keys() == expected["state"].keys()
        for name, value in expected["state"].items():
            assert torch.equal(found["state"][name], value), name


@pytest.mark.spawns
@pytest.mark.parametrize(
    ("layout", "faults", "num_redone"),
    [
        ("full", [["backward", 13, 1, "kill"]], 3),
        pytest.param("hsdp", [["backward", 13, 0, "kill"], ["backward", 13, 2, "kill"]], 3, marks=pytest.mark.variant),
        (  # a rank is replaced in a step of which a snapshot is taken, and its shard is lost later
            "hsdp",
            [["forward", 5, 2, "kill"], ["backward", 13, 0, "kill"], ["backward", 13, 2, "kill"]],
            3,
        ),
    ],
    ids=["full sharding", "both replicas", "both replicas, one of them twice"],
)
def test_a_job_that_loses_every_copy_of_a_shard_returns_to_the_last_snapshot(
    jobs, tmp_path, layout, faults, num_redone
):
    job = run(tmp_path, layout, *faults)
    assert job.code == 0, job.output[-8000:]
    assert job.num_faults == len(faults)
    assert f"{num_redone} steps lost, going on after step {13 - num_redone}" in job.output
    assert_equal(job.results(), jobs(layout))


@pytest.mark.spawns
def test_stock_torchrun_ends_all_workers_with_one(jobs, tmp_path):
    """A Trainer's snapshots outlive all of its processes, and so does where each of them stood."""
    job = run(tmp_path, "full", ["backward", 11, 1, "kill"], launcher=TORCHRUN, args=RDZV, timeout_s=250.0)
    assert job.code == 0, job.output[-8000:]
    assert job.num_faults == 1
    assert "all ranks return to the snapshot of step 10" in job.output  # the last checkpoint is of step 6
    assert_equal(job.results(), jobs("full"))


ON_THE_WAY_BACK = [
    ["forward", 7, 0, "kill"],
    ["send", 7, 2, "kill"],  # the last that has this shard, while it gives it: back to the snapshot of step 5
    ["take", 5, 0, "kill"],  # a joiner, before it has its snapshot
    ["load", 5, 3, "kill"],  # a survivor, when all have theirs
    ["backward", 13, 0, "kill"],
    ["backward", 13, 2, "kill"],
    ["give", 10, 3, "kill"],  # the last that has the snapshot of rank 2: back to the checkpoint of step 12
]


@pytest.mark.spawns
def test_more_ranks_are_lost_on_the_way_back_to_a_snapshot(jobs, tmp_path):
    job = run(tmp_path, "hsdp", *ON_THE_WAY_BACK, is_private=True)  # else replacements find their predecessors' copies
    assert job.code == 0, job.output[-8000:]
    assert job.num_faults == len(ON_THE_WAY_BACK)
    assert "2 steps lost, going on after step 5" in job.output
    assert f"from {tmp_path}/checkpoints/step=12.ckpt (step 12)" in job.output
    assert_equal(job.results(), jobs("hsdp"))
