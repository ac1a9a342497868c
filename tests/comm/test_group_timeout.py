"""How long a collective waits for a peer that does not come can be changed while a group lives."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from device import DEVICE

from hyperpod_plugins.comm import CommOptions, GroupKey, ResilientProcessGroup
from hyperpod_plugins.errors import PeerLost
from hyperpod_plugins.parallel import Topology, build_mesh


def wait_for_a_late_peer(timeout_s, late_s):
    """Seconds that rank 0 waits for rank 1 in a group that was made with another timeout."""
    dist.init_process_group("hyperpod", timeout=timedelta(seconds=60))
    group = dist.new_group(backend="hyperpod")
    dist.all_reduce(torch.ones(1), group=group)  # connected
    group.set_timeout(timedelta(seconds=timeout_s))
    began = time.monotonic()
    try:
        if dist.get_rank() == 1:
            time.sleep(late_s)
        else:
            dist.all_reduce(torch.ones(1), group=group)
    except RuntimeError as error:
        return time.monotonic() - began, str(error), group.timeout
    return time.monotonic() - began, "", group.timeout


@pytest.mark.spawns
def test_a_new_timeout_holds_from_the_next_collective_on(run_ranks):
    (waited_s, message, kept), _ = run_ranks(wait_for_a_late_peer, 1.0, late_s=8.0, world_size=2, timeout_s=60)
    assert "imed out" in message
    assert 0.5 < waited_s < 6.0
    assert kept == timedelta(seconds=1)


def test_a_timeout_set_while_the_group_has_no_connections_holds_for_the_next_generation():
    group = ResilientProcessGroup(
        None,
        rank=0,
        size=1,
        key=GroupKey("shard"),
        options=CommOptions(),
        root_store=dist.HashStore(),
        timeout=timedelta(seconds=60),
    )
    with pytest.raises(PeerLost):
        group.set_timeout(timedelta(seconds=5))
    assert group.timeout == timedelta(seconds=5)


def timeouts_of_axes():
    dist.init_process_group("hyperpod", timeout=timedelta(seconds=45))
    mesh = build_mesh(Topology(world_size=2, shard_degree=2), DEVICE)
    return [mesh.get_group(axis).timeout.total_seconds() for axis in mesh.mesh_dim_names]


@pytest.mark.spawns
def test_the_groups_of_a_mesh_have_the_timeout_of_the_default_group(run_ranks):
    assert run_ranks(timeouts_of_axes, world_size=2, timeout_s=60) == [[45.0] * 3] * 2
