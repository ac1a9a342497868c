"""Allocate and initialise a model on the meta device; each rank keeps its own part of every parameter.

[Note: order of splitting]
FSDP2 shards parameters after tensor parallelism has, but its mesh axis comes first. `_StridedShard` records this: its
dimension is split after all plain shards. Splitting in that order gives each rank one slice of the full tensor,
possibly uneven or empty, without communication.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard  # pyright: ignore[reportPrivateUsage]

from hyperpod_plugins.delayed_init.replay import ReplayReport, replay
from hyperpod_plugins.delayed_init.reset_parameters import find_initializers, reset_module
from hyperpod_plugins.delayed_init.tape import Tape, View, binding_of, full_name, own_tensors, release_tapes, tapes_of
from hyperpod_plugins.errors import InitializationError, format_list


def materialize(model: nn.Module, *, device: torch.device | str = "cpu", seed: int = 0) -> ReplayReport:
    """Allocate all meta parameters and buffers of a model on `device` and give them their initial values.

    Parameters may be DTensors; each rank keeps its part, and about one full parameter is in memory at a time. Tensors
    that have memory already are left alone. Tensors built under `delayed_init` become bitwise equal to the result of
    building eagerly, and the random generators end in the same state. Modules built under `torch.device("meta")` are
    initialised one by one from `seed`, by `reset_parameters` or by `_init_weights` of the Hugging Face model that
    contains them.

    There is no communication: `seed` and the `rng_state` of the tapes must be equal on all ranks.

    Raises:
        InitializationError: a tensor is neither on a tape nor covered by an initialiser, never received values, or
            has changed its shape since it was built.
    """
    recorded, unrecorded = _split(model)
    _refuse_valueless(recorded)
    initializers = find_initializers(model, unrecorded)
    allocate(model, torch.device(device))

    reports = [_replay_into(tape, [slot for slot in recorded if slot.tape is tape]) for tape in tapes_of(model)]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        for initializer in initializers:
            reset_module(initializer, copy_shard_)
    release_tapes(model)
    return ReplayReport(
        num_ops=sum(report.num_ops for report in reports), peak_bytes=max((r.peak_bytes for r in reports), default=0)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slot:
    """A meta tensor of a module whose value is on a tape."""

    name: str
    module: nn.Module
    key: str
    tape: Tape
    view: View

    @property
    def tensor(self) -> torch.Tensor:
        return own_tensors(self.module)[self.key]


def _split(model: nn.Module) -> tuple[list[_Slot], set[str]]:
    """Slots of the meta tensors that are on a tape, and the names of the other meta tensors."""
    recorded: list[_Slot] = []
    unrecorded: set[str] = set()
    for module_name, module in model.named_modules():
        binding = binding_of(module)
        for key, tensor in own_tensors(module).items():
            if not tensor.is_meta:
                continue
            name = full_name(module_name, key)
            if binding is not None and key in binding.views:
                slot = _Slot(name=name, module=module, key=key, tape=binding.tape, view=binding.views[key])
                recorded.append(slot)
            else:
                unrecorded.add(name)
    return recorded, unrecorded


def _replay_into(tape: Tape, slots: list[_Slot]) -> ReplayReport:
    def fill(index: int, full: torch.Tensor) -> None:
        slot = slots[index]
        if slot.tensor.shape != full.shape:
            raise InitializationError(
                f"{slot.name} was built with the shape {tuple(full.shape)}, but has {tuple(slot.tensor.shape)} now. "
                "Give a module its final shape before delayed_init ends."
            )
        copy_shard_(slot.tensor, full)

    return replay(tape, [slot.view for slot in slots], fill)


@torch.no_grad()
def copy_shard_(target: torch.Tensor, full: torch.Tensor) -> None:
    """Copy this rank's part of a full tensor into a tensor or DTensor of the same global shape."""
    if isinstance(target, DTensor):
        part = local_slice(full, target.device_mesh, target.placements)
        target.to_local().copy_(part)
    else:
        target.copy_(full)


def local_slice(full: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> torch.Tensor:
    """View of this rank's part of a full tensor under the given placements.

    Raises:
        InitializationError: a placement is `Partial` or unknown, or this rank lies outside the mesh.
    """
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise InitializationError(f"this rank does not lie on the mesh {mesh}, but holds a part of a parameter on it.")
    return slice_at(full, tuple(mesh.shape), tuple(coordinate), placements)


def slice_at(
    full: torch.Tensor, mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> torch.Tensor:
    """View of the part of a full tensor at one coordinate of a mesh; see [Note: order of splitting]."""
    axes = range(len(placements))
    strided = [axis for axis in axes if isinstance(placements[axis], _StridedShard)]
    plain = [axis for axis in axes if isinstance(placements[axis], Shard) and axis not in strided]
    for axis in [*plain, *reversed(strided)]:
        placement = placements[axis]
        assert isinstance(placement, Shard | _StridedShard)
        full = _chunk(full, placement.dim, mesh_shape[axis], coordinate[axis])
    others = [placements[axis] for axis in axes if axis not in plain and axis not in strided]
    if not all(isinstance(placement, Replicate) for placement in others):
        raise InitializationError(f"a parameter with the placements {placements} cannot be filled from a full tensor.")
    return full


def _chunk(tensor: torch.Tensor, dim: int, num_chunks: int, index: int) -> torch.Tensor:
    """The chunk of that index as `torch.chunk` splits, but empty beyond the last chunk."""
    size = tensor.size(dim)
    step = -(-size // num_chunks)
    start = min(index * step, size)
    return tensor.narrow(dim, start, min(step, size - start))


def _refuse_valueless(slots: list[_Slot]) -> None:
    valueless = [
        slot.name
        for slot in slots
        if isinstance(slot.tensor, nn.Parameter)
        and not slot.tape.versions[slot.view.version].is_written
        and 0 not in slot.view.size
    ]
    if valueless:
        raise InitializationError(
            f"no code gave values to {format_list(valueless)}: the constructor allocated it (torch.empty or "
            "torch.Tensor) without writing any values. Initialise it in the constructor, for example with "
            "torch.nn.init."
        )


def allocate(model: nn.Module, device: torch.device) -> None:
    """Replace meta tensors by uninitialised ones on the device, keeping tied parameters and their attributes."""
    twins: dict[int, torch.Tensor] = {}  # by id of the meta tensor, which `held` keeps alive
    held: list[torch.Tensor] = []
    for module in model.modules():
        for name, tensor in own_tensors(module).items():
            if not tensor.is_meta or isinstance(tensor, DTensor):
                continue
            if id(tensor) not in twins:
                held.append(tensor)
                twins[id(tensor)] = _allocate_like(tensor, device)
            setattr(module, name, twins[id(tensor)])
    # FSDP2 tracks its DTensors, so allocate them as `Module.to_empty` does, which keeps the parameter objects.
    if any(tensor.is_meta for tensor in model.parameters()):
        model._apply(  # pyright: ignore[reportPrivateUsage]
            lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor
        )


def _allocate_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    memory = torch.empty_like(tensor, device=device, requires_grad=False)
    if not isinstance(tensor, nn.Parameter):
        return memory
    twin = torch.Tensor._make_subclass(type(tensor), memory, tensor.requires_grad)  # pyright: ignore
    vars(twin).update(vars(tensor))
    return twin
