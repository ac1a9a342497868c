"""Which part of a parameter each rank has in the layouts of transformers, and the whole, put together from the parts.

[Note: order of cuts] Axes of transformers' meshes cut a parameter in this order, whatever their order in the mesh:
first those along which a rank computes with its part (`tp`, `ep`), then those over which FSDP2 shards that part
(`fsdp`, `efsdp`). Each gives a rank one consecutive chunk; but for a packed parameter (gate and up) `tp` gives it a
chunk of each of `split_factor` groups. `DTensor.full_tensor` does not know that order, and fails if chunks are uneven
(torch 2.13).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard  # pyright: ignore[reportPrivateUsage]

from hyperpod_plugins.errors import NotBuiltYetError

_FSDP_AXES = ("fsdp", "efsdp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How one axis of a mesh divides a dimension of a parameter among its ranks."""

    axis: str
    """Name of the axis."""
    dim: int
    """The dimension that is divided."""
    num_ranks: int
    """Number of ranks on the axis."""
    num_groups: int = 1
    """Number of groups of which a rank has a chunk each, as of a packed parameter."""


def cuts_of(parameter: DTensor) -> list[Cut]:
    """Return how a parameter of transformers is divided, in order; see [Note: order of cuts].

    Raises:
        NotBuiltYetError: it has a placement that is not known.
    """
    mesh = parameter.device_mesh
    found: list[Cut] = []
    for name, size, placement in zip(mesh.mesh_dim_names or (), mesh.shape, parameter.placements, strict=True):
        kept: Any = placement
        if isinstance(placement, Replicate):
            continue
        if not isinstance(placement, Shard | _StridedShard):
            raise NotBuiltYetError(f"a parameter that transformers has placed as {placement} cannot be adopted.")
        is_packed = isinstance(placement, _StridedShard) and name not in _FSDP_AXES
        groups: int = kept.split_factor if is_packed else 1
        found.append(Cut(axis=name, dim=kept.dim % parameter.ndim, num_ranks=size, num_groups=groups))
    return sorted(found, key=lambda cut: cut.axis in _FSDP_AXES)


def pieces(size: int, dim: int, cuts: Sequence[Cut], indices: Sequence[int]) -> list[range]:
    """Return what a rank has of a dimension, as consecutive pieces in the order in which it has them.

    Args:
        size: of the whole dimension.
        dim: the dimension; cuts of others are ignored.
        cuts: in order.
        indices: index of the rank on the axis of each cut.
    """
    held = [range(size)]
    for cut, index in zip(cuts, indices, strict=True):
        if cut.dim != dim:
            continue
        groups = [held]
        if cut.num_groups > 1:
            width = -(-size // cut.num_groups)
            groups = [_window(held, begin, begin + width) for begin in range(0, size, width)]
        held = [piece for group in groups for piece in _chunk(group, cut.num_ranks, index)]
    return held


def _chunk(held: Sequence[range], num_chunks: int, index: int) -> list[range]:
    """The chunk of that index of consecutive pieces, as `torch.chunk` splits, but empty beyond the last chunk."""
    step = -(-sum(map(len, held)) // num_chunks)
    return _window(held, index * step, (index + 1) * step)


def _window(held: Sequence[range], begin: int, end: int) -> list[range]:
    """What lies from `begin` to `end` in pieces one after the other."""
    found: list[range] = []
    for piece in held:
        inside = piece[max(begin, 0) : max(end, 0)]
        begin, end = begin - len(piece), end - len(piece)
        if len(inside):
            found.append(inside)
    return found


def has_known_part(parameter: DTensor) -> bool:
    """Whether this rank's part of a parameter of transformers has the shape that the layout gives it."""
    cuts, mesh = cuts_of(parameter), parameter.device_mesh
    place = dict(zip(mesh.mesh_dim_names or (), mesh.get_coordinate() or (), strict=True))
    held = _held(parameter, cuts, [place[cut.axis] for cut in cuts])
    local = parameter.to_local()
    return list(local.shape) == _shape(held) or (not local.numel() and not all(_shape(held)))


@torch.no_grad()
def gather_whole(parameter: DTensor, root: DeviceMesh, device: torch.device) -> Tensor:
    """Return a whole parameter of transformers; the first rank that holds a part sends it to all ranks.

    Args:
        parameter: this rank's part; see `has_known_part`.
        root: transformers' mesh of all ranks that has the axes of the parameter's.
        device: of the result, on which the default process group communicates.
    """
    cuts, local = cuts_of(parameter), parameter.to_local()
    whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
    for indices in product(*(range(cut.num_ranks) for cut in cuts)):
        place = dict(zip((cut.axis for cut in cuts), indices, strict=True))
        source = int(root.mesh[tuple(place.get(axis, 0) for axis in root.mesh_dim_names or ())])
        held = _held(parameter, cuts, indices)
        part = local.to(device).contiguous() if source == dist.get_rank() else whole.new_empty(_shape(held))
        if part.numel():
            dist.broadcast(part, src=source)
        _put(whole, part, held)
    return whole


def _held(parameter: DTensor, cuts: Sequence[Cut], indices: Sequence[int]) -> list[list[range]]:
    """What a rank has of each dimension of a parameter."""
    return [pieces(size, dim, cuts, indices) for dim, size in enumerate(parameter.shape)]


def _shape(held: Sequence[Sequence[range]]) -> list[int]:
    return [sum(map(len, each)) for each in held]


def _put(whole: Tensor, part: Tensor, held: Sequence[Sequence[range]]) -> None:
    """Copy a part into the whole, piece by piece."""
    placed: list[list[tuple[range, slice]]] = []
    for along_dim in held:
        begins = [sum(map(len, along_dim[:index])) for index in range(len(along_dim))]
        placed.append(
            [(piece, slice(begin, begin + len(piece))) for piece, begin in zip(along_dim, begins, strict=True)]
        )
    for combination in product(*placed):
        there = tuple(slice(piece.start, piece.stop) for piece, _ in combination)
        whole[there] = part[tuple(here for _, here in combination)]
