"""Collectives over a shard axis that crosses nodes, in two stages: within each node, and across nodes.

With `n` nodes of `r` ranks each, and `S` bytes in the whole tensor, a ring over all ranks sends `(nr - 1) / nr * S`
bytes out of each node. In two stages these are `(n - 1) / n * S`: each rank exchanges its part with the ranks of the
same index on other nodes, and the rest stays within nodes. Two nodes of eight ranks send half as much.

    all-gather       rank r of each node gathers across nodes; then the ranks of a node gather what each has received
    reduce-scatter   the ranks of a node reduce their parts for each node; then each sum travels to its node

[Note: which collectives are chosen] A reduction adds in another order than a flat one. So that no run differs from
another one by what was faster on a day, reductions take two stages wherever there are such nodes and gloo connects
them. Gathers only copy: they take two stages where a measurement at the start says that this is faster. Its result is
in the store, for processes that join later.
"""

# Not every supported torch has the new names of these collectives.
# pyright: reportDeprecated=false

import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from hyperpod_plugins.comm import group_health
from hyperpod_plugins.comm.health import Phase
from hyperpod_plugins.comm.process_group import ResilientProcessGroup
from hyperpod_plugins.parallel.topology import node_groups

_MEASURED_BYTES, _NUM_TRIALS = 2**20, 3
_LIMIT = 0.9
"""Two stages are chosen for gathers if they take at most this part of the time."""
_PATIENCE = timedelta(seconds=60)
_choices: WeakKeyDictionary[dist.ProcessGroup, bool] = WeakKeyDictionary()
"""Whether gathers over a shard group take two stages."""


def use_node_collectives(units: Iterable[nn.Module], mesh: DeviceMesh) -> None:
    """Have FSDP2 units gather and reduce in two stages, if their shard axis crosses nodes and gloo connects these.

    All ranks call this together, except those that join a running job.

    Args:
        units: FSDP2 units over the last axis of `mesh`.
        mesh: of `build_mesh`, or a part of it.
    """
    groups = node_groups(mesh)
    if groups is None or mesh.device_type != "cpu":
        return
    group, within, across = groups
    gather, reduce = NodeAllGather(within, across), NodeReduceScatter(within, across)
    if group not in _choices:
        _choices[group] = _is_faster(gather, group)
    for unit in units:
        assert isinstance(unit, FSDPModule)
        unit.set_custom_reduce_scatter(cast(Any, reduce))  # its type has no public name
        if _choices[group]:
            unit.set_custom_all_gather(cast(Any, gather))


class _Buffers:
    """How FSDP2 has buffers allocated, and the groups of both stages."""

    def __init__(self, within: dist.ProcessGroup, across: dist.ProcessGroup) -> None:
        """Use groups in which a rank has the same place as on its node, and as its node has among the nodes.

        Args:
            within: the ranks of the shard axis on this node.
            across: one rank on each node: those with the same index on it.
        """
        self._within, self._across = within, across

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a new tensor."""
        return torch.empty(*size, dtype=dtype, device=device)


class NodeAllGather(_Buffers):
    """FSDP2's all-gather: first across nodes, then within them."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Gather `input_tensor` of each rank into `output_tensor`, in the order of ranks.

        Args:
            output_tensor: `(group size x n,)`.
            input_tensor: `(n,)`.
            group: the shard group, whose ranks are node by node.
            async_op: ignored: when this returns, the result is there, or queued as that of any collective.
        """
        num_nodes = self._across.size()
        received = torch.empty(num_nodes, input_tensor.numel(), dtype=input_tensor.dtype, device=input_tensor.device)
        dist.all_gather_into_tensor(received.view(-1), input_tensor, group=self._across)
        for of_node, part in zip(output_tensor.view(num_nodes, -1), received, strict=True):
            dist.all_gather_into_tensor(of_node, part, group=self._within)


class NodeReduceScatter(_Buffers):
    """FSDP2's reduce-scatter: first within nodes, then across them."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        """Reduce this rank's part of all inputs into `output_tensor`.

        Args:
            output_tensor: `(n,)`.
            input_tensor: `(group size x n,)`.
            group: the shard group, whose ranks are node by node.
            op: a sum or a mean; others are left to `group`.
            async_op: see `NodeAllGather`.
        """
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        num_nodes = self._across.size()
        sums = torch.empty(num_nodes, output_tensor.numel(), dtype=input_tensor.dtype, device=input_tensor.device)
        for of_node, part in zip(input_tensor.view(num_nodes, -1), sums, strict=True):
            dist.reduce_scatter_tensor(part, of_node, op=op, group=self._within)
        dist.reduce_scatter_tensor(output_tensor, sums.view(-1), op=op, group=self._across)
        return None


def _is_faster(gather: NodeAllGather, group: ResilientProcessGroup) -> bool:
    """Whether gathers in two stages are faster, for all ranks of the job alike."""
    key = "/".join(["two_stages", *(f"{name}_{degree}" for name, degree in group.key.coordinates if "of_" in name)])
    if group_health.phase is Phase.DETACHED:
        group.root_store.wait([key], _PATIENCE)
        return group.root_store.get(key) == b"1"
    whole = torch.zeros(_MEASURED_BYTES // 4 // group.size() * group.size())
    part = whole[: whole.numel() // group.size()].clone()

    def flat() -> None:
        dist.all_gather_into_tensor(whole, part, group=group)

    times_s = torch.tensor([_duration_s(flat), _duration_s(lambda: gather(whole, part, group))])
    dist.all_reduce(times_s, dist.ReduceOp.MAX)
    flat_s, staged_s = times_s.tolist()
    if dist.get_rank() == 0:
        group.root_store.set(key, "1" if staged_s <= _LIMIT * flat_s else "0")
    return staged_s <= _LIMIT * flat_s


def _duration_s(call: Callable[[], object]) -> float:
    """Shortest of some durations of a collective; the first call, which may connect, is not measured."""
    call()
    durations_s: list[float] = []
    for _ in range(_NUM_TRIALS):
        dist.barrier()
        began_s = time.perf_counter()
        call()
        durations_s.append(time.perf_counter() - began_s)
    return min(durations_s)
