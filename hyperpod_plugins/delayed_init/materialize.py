"""Allocate and initialise a model on the meta device; each rank keeps its own part of every parameter.

[Note: order of splitting]
FSDP2 shards parameters after tensor parallelism has, but its mesh axis comes first. `_StridedShard` records this: its
dimension is split after all plain shards. Splitting in that order gives each rank one slice of the full tensor,
possibly uneven or empty, without communication.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard  # pyright: ignore[reportPrivateUsage]

from hyperpod_plugins.delayed_init.reset_parameters import find_initializers, reset_module
from hyperpod_plugins.delayed_init.tape import (
    ReplayReport,
    Tape,
    View,
    binding_of,
    full_name,
    own_tensors,
    rebind,
    release_tapes,
    replay,
    tapes_of,
)
from hyperpod_plugins.delayed_init.weight_files import files_digest
from hyperpod_plugins.errors import InitializationError, format_list


def materialize(
    model: nn.Module,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
    filled: "Callable[[_Slot, torch.Tensor], None] | None" = None,
    on_host: Collection[int] = (),
) -> ReplayReport:
    """Allocate all meta parameters and buffers of a model on `device` and give them their initial values.

    Parameters may be DTensors; each rank keeps its part, and about one full parameter is in memory at a time. Tensors
    that have memory already are left alone. Tensors built under `delayed_init` become bitwise equal to the result of
    building eagerly, and the random generators end in the same state. Modules built under `torch.device("meta")` are
    initialised one by one from `seed`, by `reset_parameters` or by `_init_weights` of the Hugging Face model that
    contains them.

    There is no communication: `seed` and the `rng_state` of the tapes must be equal on all ranks.

    Args:
        model: in place.
        device: of the allocated tensors.
        seed: of initialisers of modules that were built on the meta device.
        filled: called with each tensor on a tape and its full value.
        on_host: `id` of each DTensor to allocate in host memory instead.

    Raises:
        InitializationError: a tensor is neither on a tape nor covered by an initialiser, never received values, or
            has changed its shape since it was built; or weights that were read from a file would be lost.
    """
    rebind(model)
    recorded, unrecorded = _split(model)
    _refuse_valueless(recorded)
    _refuse_skeletons(model)
    _refuse_beside_files(model, unrecorded)
    initializers = find_initializers(model, unrecorded)
    allocate(model, torch.device(device), on_host)

    reports = [_replay_into(tape, [slot for slot in recorded if slot.tape is tape], filled) for tape in tapes_of(model)]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        for initializer in initializers:
            reset_module(initializer, copy_shard_)
    release_tapes(model)
    return ReplayReport(
        num_ops=sum(report.num_ops for report in reports), peak_bytes=max((r.peak_bytes for r in reports), default=0)
    )


def materialize_from_source(
    model: nn.Module,
    broadcast: Callable[[torch.Tensor], None],
    *,
    is_source: bool,
    device: torch.device | str = "cpu",
    on_host: Collection[int] = (),
) -> None:
    """As `materialize`, with the values of one rank, which alone may have the files that they are read from.

    The source replays its tapes and sends each tensor as soon as it is final; every rank keeps its part, and about one
    full parameter is in memory at a time. The other ranks replay nothing; their random generators end in the state of
    the source's. All ranks call this together.

    Args:
        model: with the same tensors on the meta device on all ranks.
        broadcast: sends a contiguous CPU tensor of the source to the other ranks, where it is overwritten.
        is_source: whether this rank is the source.
        device: to allocate the model on.
        on_host: as for `materialize`.

    Raises:
        InitializationError: as `materialize`; tensors of the source are not on a tape; or the source has failed.
    """
    waiting = [(module, key) for module in model.modules() for key, each in own_tensors(module).items() if each.is_meta]
    if not waiting:
        return
    header = torch.full((1,), _FAILED)
    if is_source:
        index_of = {(id(module), key): index for index, (module, key) in enumerate(waiting)}

        def send(slot: _Slot, full: torch.Tensor) -> None:
            data = _bytes_of(full.to(slot.tensor.dtype).contiguous())  # before the others expect it
            broadcast(torch.tensor([index_of[id(slot.module), slot.key]]))
            broadcast(data)

        try:
            unrecorded = _split(model)[1]
            if unrecorded:
                raise InitializationError(
                    f"{format_list(sorted(unrecorded))} have no values on the rank that sends the initial ones, and "
                    "are not on a tape. Build its model inside hyperpod_plugins.delayed_init.delayed_init()."
                )
            materialize(model, device=device, filled=send, on_host=on_host)
            header.fill_(_ENDED)
        finally:
            broadcast(header)
    else:
        allocate(model, torch.device(device), on_host)
        while True:
            broadcast(header)
            index = int(header)
            if index < 0:
                break
            module, key = waiting[index]
            target = own_tensors(module)[key]
            full = torch.empty(target.shape, dtype=target.dtype, device="cpu")
            broadcast(_bytes_of(full))
            copy_shard_(target, full)
        release_tapes(model)
        if index == _FAILED:
            raise InitializationError("the rank that sends the initial values has failed; see its log")
    state = torch.get_rng_state()
    broadcast(state)
    torch.set_rng_state(state)


_ENDED, _FAILED = -1, -2


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, which no backend refuses."""
    return tensor.detach().resolve_conj().resolve_neg().view(-1).view(torch.uint8)


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
            if binding is not None and key in binding.bound:
                bound = binding.bound[key]
                recorded.append(_Slot(name=name, module=module, key=key, tape=bound.tape, view=bound.view))
            else:
                unrecorded.add(name)
    return recorded, unrecorded


def _replay_into(tape: Tape, slots: list[_Slot], filled: Callable[[_Slot, torch.Tensor], None] | None) -> ReplayReport:
    def fill(index: int, full: torch.Tensor) -> None:
        slot = slots[index]
        if slot.tensor.shape != full.shape:
            raise InitializationError(
                f"{slot.name} was built with the shape {tuple(full.shape)}, but has {tuple(slot.tensor.shape)} now. "
                "Give a module its final shape before delayed_init ends."
            )
        copy_shard_(slot.tensor, full)
        if filled is not None:
            filled(slot, full)

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


def _refuse_skeletons(model: nn.Module) -> None:
    """Refuse tensors that the program itself has put on the meta device inside `delayed_init`."""
    bindings = ((name, module, binding_of(module)) for name, module in model.named_modules())
    left = [
        full_name(name, key)
        for name, module, binding in bindings
        if binding is not None
        for key, tensor in own_tensors(module).items()
        if key in binding.skeleton and key not in binding.bound and tensor.is_meta
    ]
    if left:
        raise InitializationError(
            f"{format_list(left)} have no values, because they were built under torch.device('meta') inside "
            "delayed_init. Leave torch.device('meta') out: inside delayed_init nothing takes memory."
        )


def _refuse_beside_files(model: nn.Module, unrecorded: set[str]) -> None:
    """Refuse tensors without values in a model with weights from files: they may have replaced some, or be copies.

    A tensor that was made after `delayed_init` had ended (an embedding that was resized, an adapter) would be
    initialised afresh, where eager code has computed it from weights.
    """
    if unrecorded and any(files_digest(tape) for tape in tapes_of(model)):
        raise InitializationError(
            f"{format_list(sorted(unrecorded))} have no values, beside weights that are read from files: the model was "
            "changed after delayed_init had ended (resize_token_embeddings, an adapter, a layer on the meta device). "
            "Change it inside delayed_init."
        )


def allocate(model: nn.Module, device: torch.device, on_host: Collection[int] = ()) -> None:
    """Replace meta tensors by uninitialised ones on the device, keeping tied parameters and their attributes.

    Args:
        model: in place.
        device: of the allocated tensors.
        on_host: `id` of each DTensor to allocate in host memory instead.
    """
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
            lambda tensor: (
                torch.empty_like(tensor, device="cpu" if id(tensor) in on_host else device)
                if tensor.is_meta
                else tensor
            )
        )


def _allocate_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    memory = torch.empty_like(tensor, device=device, requires_grad=False)
    if not isinstance(tensor, nn.Parameter):
        return memory
    twin = torch.Tensor._make_subclass(type(tensor), memory, tensor.requires_grad)  # pyright: ignore
    vars(twin).update(vars(tensor))
    return twin
