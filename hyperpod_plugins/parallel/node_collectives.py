"""Collectives over a shard axis that crosses nodes, in two stages: within each node, and across nodes.

With `n` nodes of `r` ranks each, and `S` bytes in the whole tensor, a ring over all ranks sends `(nr - 1) / nr * S`
bytes out of each node. In two stages these are `(n - 1) / n * S`: each rank exchanges its part with the ranks of the
same index on other nodes, and the rest stays within nodes. Two nodes of eight ranks send half as much.

    all-gather       rank r of each node gathers across nodes; then the ranks of a node gather what each has received
    reduce-scatter   the ranks of a node reduce their parts for each node; then each sum travels to its node

They are used only if the configuration asks for them (`node_collectives`), as all nodes must have the same number of
ranks, which no rank knows of the others. A reduction adds in another order in two stages, so whether it has two must
not depend on what was faster on a day. A gather has the same bits in both ways: `node_collectives="auto"` measures both
as the job starts, and gathers in two stages if that is faster. Processes that replace lost ones take over what the
others have found, from the store.
"""

# Not every supported torch has the new names of these collectives.
# pyright: reportDeprecated=false

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from statistics import quantiles
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from hyperpod_plugins.comm import group_health
from hyperpod_plugins.comm.process_group import ResilientProcessGroup
from hyperpod_plugins.parallel.topology import node_groups

log = logging.getLogger(__name__)
NodeCollectives = bool | Literal["auto"]
_NUM_TRIALS, _NUM_WARM = 15, 3
_MOST_BYTES = 2**26
"""Of a gathered unit that is measured."""
_TWO_STAGES, _ONE_STAGE = "two stages", "one stage"
_GAIN = 0.95
"""Two stages must take less than this part of the time, so that noise does not choose them."""


def use_node_collectives(units: Sequence[nn.Module], mesh: DeviceMesh, chosen: NodeCollectives = True) -> None:
    """Have FSDP2 units gather and reduce in two stages, if their shard axis takes several whole nodes.

    Args:
        units: FSDP2 units over the last axis of `mesh`.
        mesh: of `build_mesh` for a topology with `node_collectives`, or a part of it.
        chosen: with `auto`, only gathers have two stages, and only if they are faster here. All ranks measure together.
    """
    groups = node_groups(mesh)
    if groups is None:
        if dist.get_rank() == 0:
            log.warning(
                "node_collectives=%r has no effect: the shard axis (%d ranks) does not take several whole nodes of "
                "two or more ranks each.",
                chosen,
                mesh.size(mesh.ndim - 1),
            )
        return
    gather, reduce = NodeAllGather(*groups), NodeReduceScatter(*groups)
    if chosen == "auto" and not _is_faster(gather, units, mesh):
        return
    for unit in units:
        assert isinstance(unit, FSDPModule)
        if chosen != "auto":
            unit.set_custom_reduce_scatter(cast(Any, reduce))  # its type has no public name
        unit.set_custom_all_gather(cast(Any, gather))


def _is_faster(gather: "NodeAllGather", units: Iterable[nn.Module], mesh: DeviceMesh) -> bool:
    """Whether gathers in two stages are faster for the largest of some units, as all ranks of the job have found."""
    group, world = mesh.get_group(mesh.ndim - 1), dist.group.WORLD
    store = world.root_store if isinstance(world, ResilientProcessGroup) else None
    own = _part_bytes(units, group.size())
    key = _store_key(gather, own, group.size())
    if store is not None and store.check([key]):  # all ranks have measured before, or this process replaces another
        return store.get(key) == _TWO_STAGES.encode()
    if group_health.suppresses_collectives:
        return False  # the others have not come so far
    device = torch.device(mesh.device_type)
    given = torch.zeros(own, dtype=torch.uint8, device=device)
    taken = torch.empty(own * group.size(), dtype=torch.uint8, device=device)
    ways: list[Callable[[], object]] = [
        lambda: dist.all_gather_into_tensor(taken, given, group=group),
        lambda: gather(taken, given, group),
    ]
    times: list[list[float]] = [[], []]
    for trial in range(_NUM_TRIALS):
        for way, seconds in zip(ways, times, strict=True):
            _synchronize(device)
            began = time.perf_counter()
            way()
            _synchronize(device)
            if trial >= _NUM_WARM:
                seconds.append(time.perf_counter() - began)
    # Whatever else happens makes some slower, and none faster.
    quick = [quantiles(seconds, n=4)[0] for seconds in times]
    slowest = torch.tensor(quick, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    flat, staged = slowest.tolist()
    is_faster = 0.0 < staged < _GAIN * flat
    if store is not None:
        store.set(key, _TWO_STAGES if is_faster else _ONE_STAGE)
    if dist.get_rank() == 0:
        log.warning(
            'node_collectives="auto": gathers of %.1f MiB take %.2f ms in two stages and %.2f ms in one, so they have '
            "%s.",
            taken.nbytes / 2**20,
            1e3 * staged,
            1e3 * flat,
            "two" if is_faster else "one",
        )
    return is_faster


def _part_bytes(units: Iterable[nn.Module], num_ranks: int) -> int:
    """What a rank has of the largest unit, or of as much of it as is measured."""
    largest = max(sum(each.nbytes for each in unit.parameters()) for unit in units)
    return max(1, min(largest, _MOST_BYTES) // num_ranks)


def _store_key(gather: "NodeAllGather", part_bytes: int, num_ranks: int) -> str:
    return f"node_gathers/{gather.num_nodes}x{num_ranks // gather.num_nodes}/{part_bytes}"


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Buffers:
    """How FSDP2 has buffers allocated, and the groups of both stages."""

    def __init__(self, within: dist.ProcessGroup, across: dist.ProcessGroup) -> None:
        """Use groups in which a rank has the same place as on its node, and as its node has among the nodes.

        Args:
            within: the ranks of the shard axis on this node.
            across: one rank on each node: those with the same index on it.
        """
        self._within, self._across = within, across

    @property
    def num_nodes(self) -> int:
        """Number of nodes of the shard axis."""
        return self._across.size()

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
        num_nodes = self.num_nodes
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
        num_nodes = self.num_nodes
        sums = torch.empty(num_nodes, output_tensor.numel(), dtype=input_tensor.dtype, device=input_tensor.device)
        for of_node, part in zip(input_tensor.view(num_nodes, -1), sums, strict=True):
            dist.reduce_scatter_tensor(part, of_node, op=op, group=self._within)
        dist.reduce_scatter_tensor(output_tensor, sums.view(-1), op=op, group=self._across)
        return None
