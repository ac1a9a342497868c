"""FSDP2, DDP and DCP over our groups: equal to gloo, counted exactly, and unaware of inner groups being replaced."""

import atexit
import dataclasses
import os
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from device import DEVICE
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from hyperpod_plugins import comm
from hyperpod_plugins.comm import GroupKey, ResilientProcessGroup
from hyperpod_plugins.errors import CommError

SHARD_RANKS = {0: [0, 1], 1: [2, 3]}
REPLICATE_RANKS = {0: [0, 2], 1: [1, 3]}


def mesh_2x2(make_group):
    """A mesh (replicate, shard) for four ranks, each axis with its own group."""
    replica, shard = divmod(dist.get_rank(), 2)
    groups = [
        make_group("replicate", ("shard", shard), REPLICATE_RANKS[shard]),
        make_group("shard", ("replicate", replica), SHARD_RANKS[replica]),
    ]
    return DeviceMesh.from_group(groups, DEVICE, mesh=torch.arange(4).view(2, 2), mesh_dim_names=("replicate", "shard"))


def ours(axis, where, ranks):
    return comm.new_axis_group(GroupKey(axis, (where,)), ranks)


def gloo(axis, where, ranks):
    return dist.new_group(ranks, backend="gloo", use_local_synchronization=True)


class Training:
    """A small network under FSDP2, with data that depends on the rank and the step alone."""

    def __init__(self, mesh, data_index=None):
        self.data_index = dist.get_rank() if data_index is None else data_index
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        for block in (self.model[0], self.model[2], self.model):
            fully_shard(block, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.mesh = mesh
        self.num_steps = 0

    def run(self, num_steps):
        for _ in range(num_steps):
            generator = torch.Generator().manual_seed(1000 * self.num_steps + self.data_index)
            batch = torch.randn(8, 16, generator=generator)
            loss = (self.model(batch) - batch).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.num_steps += 1
        return self

    def tensors(self):
        """Local parameters and moments; the latter made up with zeros before the first step."""
        tensors = []
        for parameter in self.model.parameters():
            state = self.optimizer.state[parameter]
            if not state:
                state |= {"step": torch.zeros(()), "exp_avg": parameter * 0, "exp_avg_sq": parameter * 0}
            moments = [state["exp_avg"].detach().to_local(), state["exp_avg_sq"].detach().to_local()]
            tensors += [parameter.detach().to_local(), state["step"], *moments]
        return tensors


def assert_equal(left, right):
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def replace_every_inner_group(generation):
    """Fresh connections for all groups, at the same sizes; the former ones end when everybody has changed over."""
    former = []
    for group in comm.live_groups().values():
        ranks = dist.get_process_group_ranks(group)
        spec = comm.spec_for_generation(group, generation=generation, rank=group.rank(), global_ranks=ranks)
        inner = comm.connect(spec, group.options, dist.get_world_size(), group.key)
        former.append(group.replace_inner(inner, generation=generation, global_ranks=ranks))
    dist.barrier()
    for group in former:
        group.shutdown()


def check_counters(mesh):
    """One step of FSDP2, whose collectives can be listed by hand."""
    subject = Training(mesh)
    comm.reset_traffic()
    subject.run(1)
    counted = comm.traffic()
    num_bytes = sum(p.numel() for p in subject.model.parameters()) * 4
    # Two blocks, gathered in forward and in backward; the root has no parameters of its own. Norms go in one call.
    assert counted["shard"].calls == {"all_gather": 4, "reduce_scatter": 2, "all_reduce": 1}
    assert counted["shard"].payload_bytes["all_gather"] == 2 * num_bytes
    assert counted["shard"].payload_bytes["reduce_scatter"] == num_bytes
    assert counted["shard"].payload_bytes["all_reduce"] == 4 * len(list(subject.model.parameters()))
    assert counted["replicate"].calls == {"all_reduce": 2}
    assert counted["replicate"].payload_bytes == {"all_reduce": num_bytes // 2}
    assert counted["shard"].num_bytes == sum(counted["shard"].payload_bytes.values())
    assert "world" not in counted
    return counted


def check_seam(mesh, expected):
    """New connections under the same groups in the middle of training change nothing."""
    subject = Training(mesh).run(3)
    former = mesh.get_group("shard").inner
    replace_every_inner_group(generation=3)
    assert mesh.get_group("shard").inner is not former
    assert {group.generation for group in comm.live_groups().values()} == {3}
    subject.run(3)
    assert_equal(subject.tensors(), expected)
    group = mesh.get_group("shard")
    with pytest.raises(CommError, match="numbers only grow"):
        group.replace_inner(group.connected, generation=3, global_ranks=[0, 1])
    with pytest.raises(CommError, match="2 members, but 3 global ranks"):
        group.replace_inner(group.connected, generation=4, global_ranks=[0, 1, 2])


def check_axis_groups(mesh):
    """Every key has its own group; asking again returns it; the impossible is refused."""
    names = {mesh.get_group(axis).key.name for axis in ("replicate", "shard")}
    assert set(comm.live_groups()) == {"world"} | names
    assert mesh_2x2(ours).get_group("shard") is mesh.get_group("shard")
    rank = dist.get_rank()
    alone = comm.new_axis_group(GroupKey("tensor", (("at", rank),)), [rank])
    alike = comm.new_axis_group(GroupKey("expert", (("at", rank),)), [rank])
    everybody = comm.new_axis_group(GroupKey("context"), [0, 1, 2, 3])
    assert alone is not alike
    assert (alone.size(), everybody.size(), everybody.rank()) == (1, 4, rank)
    assert everybody is not dist.group.WORLD
    assert everybody.group_desc == "context"
    with pytest.raises(CommError, match="already exists with ranks"):
        comm.new_axis_group(GroupKey("context"), [rank])
    with pytest.raises(CommError, match="not a member"):
        comm.new_axis_group(GroupKey("other"), [(rank + 1) % 4])
    assert comm.live_groups()["context"] is everybody
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=everybody)
    dist.destroy_process_group(everybody)
    assert "context" not in comm.live_groups()
    with pytest.raises(CommError, match="after it was destroyed"):
        everybody.allreduce([tensor])
    again = comm.new_axis_group(GroupKey("context"), [0, 1, 2, 3])  # the store still holds the keys of the first
    dist.all_reduce(tensor, group=again)
    assert tensor.item() == 16
    for group in (again, alone, alike):
        dist.destroy_process_group(group)


def check_device_mesh(expected):
    """`init_device_mesh` makes our groups too, and its axes are counted by their names."""
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("replicate", "shard"))
    assert isinstance(mesh.get_group("shard"), ResilientProcessGroup)
    comm.reset_traffic()
    subject = Training(mesh).run(6)
    assert_equal(subject.tensors(), expected)
    assert set(comm.traffic()) == {"replicate", "shard"}
    whole = torch.arange(32.0).view(8, 4)
    sharded = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    assert torch.equal(sharded.redistribute(mesh, [Shard(1), Replicate()]).full_tensor(), whole)
    assert torch.equal((sharded @ sharded.T).full_tensor(), whole @ whole.T)


def check_ddp():
    """DDP calls the group from C++."""

    def trained(group):
        torch.manual_seed(1)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            model(torch.randn(4, 8, generator=generator)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return list(model.state_dict().values())

    assert_equal(trained(dist.group.WORLD), trained(dist.new_group(backend="gloo")))


def check_checkpoint(mesh):
    """DCP saves through our groups, at once and in the background, and loads into another layout."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, src=0)
    saved = Training(mesh).run(2)
    dcp.save({"model": saved.model.state_dict()}, checkpoint_id=f"{folder[0]}/now")
    dcp.async_save({"model": saved.model.state_dict()}, checkpoint_id=f"{folder[0]}/later").result()
    for name in ("now", "later"):
        loaded = Training(init_device_mesh(DEVICE, (4,)))
        state = loaded.model.state_dict()
        dcp.load({"model": state}, checkpoint_id=f"{folder[0]}/{name}")
        loaded.model.load_state_dict(state)
        whole = [p.full_tensor() for p in loaded.model.parameters()]
        assert_equal(whole, [p.full_tensor() for p in saved.model.parameters()])


def num_sockets():
    links = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return sum(os.path.lexists(link) and os.readlink(link).startswith("socket:") for link in links)


def check_end(mesh, num_sockets_before):
    """Destroying closes every connection, though models and meshes still hold the groups; exit does it too."""
    held = Training(mesh).run(1)
    world = dist.group.WORLD
    dist.barrier()
    dist.destroy_process_group()
    assert comm.live_groups() == {}
    assert num_sockets() <= num_sockets_before + 1  # the store's
    with pytest.raises(CommError, match="after it was destroyed"):
        world.allreduce([torch.ones(1)])
    assert held.mesh is mesh
    del world
    before = num_sockets()
    dist.init_process_group("hyperpod")
    dist.barrier()
    assert num_sockets() > before
    atexit._run_exitfuncs()
    assert not dist.is_initialized()
    assert num_sockets() == before


def four_ranks_over_gloo():
    """The reference, in processes of its own: DTensor confuses meshes that are equal in all but their groups."""
    dist.init_process_group("gloo")
    return Training(mesh_2x2(gloo)).run(6).tensors()


def four_ranks(expected_by_rank):
    num_sockets_before = num_sockets()
    dist.init_process_group("hyperpod")
    assert dist.get_backend() == "hyperpod"
    expected = expected_by_rank[dist.get_rank()]
    mesh = mesh_2x2(ours)
    check_axis_groups(mesh)
    counted = check_counters(mesh)
    check_seam(mesh, expected)
    check_device_mesh(expected)
    check_ddp()
    check_checkpoint(mesh)
    check_end(mesh, num_sockets_before)
    return counted["shard"].calls


@pytest.mark.spawns
def test_four_ranks_train_as_over_gloo_through_replaced_connections(run_ranks):
    expected = run_ranks(four_ranks_over_gloo, world_size=4, timeout_s=60)
    calls = run_ranks(four_ranks, expected, world_size=4, timeout_s=90)
    assert calls == [calls[0]] * 4


NUM_STEPS_BEFORE = NUM_STEPS_AFTER = 3


def four_from_the_start():
    """What the grown job must arrive at: until the growth, the second replica repeats the first one's work."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("hyperpod")
    reference = Training(mesh_2x2(ours), data_index=rank % 2).run(NUM_STEPS_BEFORE)
    reference.data_index = rank
    return reference.run(NUM_STEPS_AFTER).tensors()


def grown_from_two():
    """Ranks 0 and 1 train; then 2 and 3 join them as a second replica."""
    rank = int(os.environ["RANK"])
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*address, is_master=False)

    is_joining = rank >= 2
    alone = dist.PrefixStore(f"joiner {rank}", store)
    first_store = dist.PrefixStore("first", store)
    if is_joining:
        dist.init_process_group("hyperpod", store=alone, rank=0, world_size=1)
        groups = [comm.new_axis_group(key, [0]) for key in keys(rank)]
    else:
        dist.init_process_group("hyperpod", store=first_store, rank=rank, world_size=2)
        replicate, shard = keys(rank)
        groups = [comm.new_axis_group(replicate, [rank]), comm.new_axis_group(shard, [0, 1])]
        mesh = DeviceMesh.from_group(
            groups, DEVICE, mesh=torch.arange(2).view(1, 2), mesh_dim_names=("replicate", "shard")
        )
        subject = Training(mesh).run(NUM_STEPS_BEFORE)

    world = dist.group.WORLD
    replica, index = divmod(rank, 2)
    members = {world: [0, 1, 2, 3], groups[0]: REPLICATE_RANKS[index], groups[1]: SHARD_RANKS[replica]}
    for group, ranks in members.items():
        spec = comm.spec_for_generation(group, generation=1, rank=ranks.index(rank), global_ranks=ranks)
        spec = dataclasses.replace(spec, store=dist.PrefixStore(group.key.store_prefix(1), store))
        group.replace_inner(comm.connect(spec, group.options, 4, group.key), generation=1, global_ranks=ranks)
    assert (dist.get_rank(), dist.get_world_size()) == (rank, 4)
    assert [group.size() for group in groups] == [2, 2]
    assert dist.get_process_group_ranks(groups[0]) == REPLICATE_RANKS[index]

    if is_joining:
        subject = Training(
            DeviceMesh.from_group(
                groups, DEVICE, mesh=torch.arange(4).view(2, 2), mesh_dim_names=("replicate", "shard")
            )
        )
        subject.num_steps = NUM_STEPS_BEFORE
    for tensor in subject.tensors():
        dist.broadcast(tensor, group=groups[0], group_src=0)
    subject.data_index = rank
    return subject.run(NUM_STEPS_AFTER).tensors()


def keys(rank):
    replica, shard = divmod(rank, 2)
    return GroupKey("replicate", (("shard", shard),)), GroupKey("shard", (("replicate", replica),))


@pytest.mark.spawns
def test_two_ranks_grow_to_four_under_the_same_groups(run_ranks):
    grown = run_ranks(grown_from_two, world_size=4, timeout_s=60)
    for left, right in zip(grown, run_ranks(four_from_the_start, world_size=4, timeout_s=60), strict=True):
        assert_equal(left, right)
