"""smddp as its users meet it: a stand-in that registers a real backend, and refuses what the library refuses."""

import importlib
import sys
import warnings

import pytest
import torch
import torch.distributed as dist
from smddp_library import write_library
from torch import nn
from torch._C._distributed_c10d import AllreduceCoalescedOptions, AllreduceOptions
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from hyperpod_plugins import comm
from hyperpod_plugins.comm import CommOptions, GroupKey, smddp
from hyperpod_plugins.comm.smddp import MeanBySumGroup
from hyperpod_plugins.errors import BackendUnavailable


@pytest.fixture
def library(tmp_path):
    return write_library(tmp_path)


def mean_of_ranks():
    tensor = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    return tensor.item()


def direct(folder, is_imported_first):
    """`init_process_group("smddp")` reaches the library, whether or not the user imported it."""
    comm.register()
    sys.path.insert(0, folder)
    if is_imported_first:
        importlib.import_module(smddp.MODULE)
    dist.init_process_group("smddp")
    assert type(dist.group.WORLD).__name__ == "SMDDPGroup"
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    with pytest.raises(RuntimeError, match="SMDDP does not support: ReduceOp"):
        mean_of_ranks()
    with pytest.raises(RuntimeError, match="SMDDP does not support sub-groups"):
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return tensor.tolist()


@pytest.mark.spawns
@pytest.mark.parametrize("is_imported_first", [True, False])
def test_init_process_group_smddp_runs_the_library(run_ranks, library, is_imported_first):
    environ = {"HYPERPOD_INSTANCE_TYPE": "ml.p4d.24xlarge"}
    arguments = (direct, library, is_imported_first)
    assert run_ranks(*arguments, world_size=2, environ=environ, timeout_s=60) == [[2.0, 2.0]] * 2


def direct_on_another_instance(folder):
    """The library is there and does not run on this instance: a warning and gloo."""
    comm.register()
    sys.path.insert(0, folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dist.init_process_group("smddp")
    assert not isinstance(dist.group.WORLD.inner, MeanBySumGroup)
    return sum("this is ml.g5.xlarge" in str(each.message) for each in caught), mean_of_ranks()


def strictly_direct_on_another_instance(folder):
    comm.register()
    sys.path.insert(0, folder)
    with pytest.raises(BackendUnavailable, match=r"this is ml\.g5\.xlarge"):
        dist.init_process_group("smddp", pg_options=CommOptions(strict=True))


@pytest.mark.spawns
def test_init_process_group_smddp_refuses_an_instance_on_which_it_does_not_run(run_ranks, library):
    environ = {"HYPERPOD_INSTANCE_TYPE": "ml.g5.xlarge"}
    found = run_ranks(direct_on_another_instance, library, world_size=2, environ=environ, timeout_s=60)
    assert found == [(1, 0.5), (0, 0.5)]  # one warning in the job
    run_ranks(strictly_direct_on_another_instance, library, world_size=1, environ=environ, timeout_s=60)


def bare_mean(group):
    tensor = torch.tensor([float(dist.get_rank())])
    group.allreduce([tensor], dist.ReduceOp.AVG).wait()
    return tensor.item()


def named_mean(group):
    tensor, options = torch.tensor([float(dist.get_rank())]), AllreduceOptions()
    options.reduceOp = dist.ReduceOp.AVG
    group.allreduce([tensor], opts=options).wait()
    return tensor.item()


def coalesced_mean():
    tensor, options = torch.tensor([float(dist.get_rank())]), AllreduceCoalescedOptions()
    options.reduceOp = dist.ReduceOp.AVG
    dist.group.WORLD.allreduce_coalesced([tensor], options).wait()
    return tensor.item()


def parameters_after_training(group):
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",))
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(8, 8), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        generator = torch.Generator().manual_seed(step * 10 + dist.get_rank())
        model(torch.randn(4, 8, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.to_local().detach() for p in model.parameters()]


def through_hyperpod(folder):
    """Over `hyperpod`, means are served, other groups than the world's too, and training equals gloo."""
    sys.path.insert(0, folder)
    dist.init_process_group("hyperpod", pg_options=CommOptions(transport="smddp", strict=True))
    rank = dist.get_rank()
    world = dist.group.WORLD
    assert isinstance(world.inner, MeanBySumGroup)
    assert type(world.inner.inner).__name__ == "SMDDPGroup"
    assert mean_of_ranks() == 0.5
    assert bare_mean(world) == named_mean(world) == coalesced_mean() == 0.5
    future = dist.all_reduce(torch.tensor([rank + 1.0]), dist.ReduceOp.AVG, async_op=True).get_future()
    assert future.wait()[0].item() == 1.5

    alone = comm.new_axis_group(GroupKey("tensor", (("shard", rank),)), [rank])
    assert not isinstance(alone.inner, MeanBySumGroup)
    everybody = comm.new_axis_group(GroupKey("shard"), [0, 1])
    assert isinstance(everybody.inner, MeanBySumGroup)
    ours = parameters_after_training(everybody)
    gloo = parameters_after_training(dist.new_group(backend="gloo"))
    assert all(torch.equal(a, b) for a, b in zip(ours, gloo, strict=True))
    everyone = [None, None]
    dist.all_gather_object(everyone, rank)
    return everyone


@pytest.mark.spawns
def test_hyperpod_lives_with_what_smddp_lacks(run_ranks, library):
    environ = {"HYPERPOD_INSTANCE_TYPE": "ml.p4d.24xlarge"}
    assert run_ranks(through_hyperpod, library, world_size=2, environ=environ, timeout_s=60) == [[0, 1]] * 2


def without_library(folder):
    """Absent, or present on another kind of instance: one warning that says why, and gloo."""
    comm.register()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dist.init_process_group("smddp")
        dist.new_group([0, 1])
    reasons = [str(w.message) for w in caught if "smddp was asked for" in str(w.message)]
    mean = mean_of_ranks()
    dist.destroy_process_group()
    with pytest.raises(BackendUnavailable, match="its library cannot be imported"):
        dist.init_process_group("hyperpod", pg_options=CommOptions(transport="smddp", strict=True))
    sys.path.insert(0, folder)
    with pytest.raises(BackendUnavailable, match=r"this is ml\.g5\.xlarge"):
        dist.init_process_group("hyperpod", pg_options=CommOptions(transport="smddp", strict=True))
    with pytest.raises(BackendUnavailable, match="nccl: it serves cuda tensors only"):
        dist.init_process_group("hyperpod", pg_options=CommOptions(transport="nccl"))
    return reasons, mean


@pytest.mark.spawns
def test_without_the_library_one_warning_says_why(run_ranks, library):
    environ, told = {"HYPERPOD_INSTANCE_TYPE": "ml.g5.xlarge"}, []
    for reasons, mean in run_ranks(without_library, library, world_size=2, environ=environ, timeout_s=60):
        assert mean == 0.5
        told += reasons
    assert len(told) == 1  # the first rank says it for all
    assert "its library cannot be imported" in told[0]
    assert "Collectives use gloo instead" in told[0]
