"""Hybrid sharding: FSDP2 block by block over the axes `replicate x shard`."""

import logging
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, zeros

from hyperpod_plugins.errors import ConfigError, DegreeError, few
from hyperpod_plugins.parallel.chains import chains_of
from hyperpod_plugins.parallel.config import ParallelConfig
from hyperpod_plugins.parallel.unit_watch import watch_units

log = logging.getLogger(__name__)
_LARGE = 50_000_000  # parameters


def shard_hybrid(model: nn.Module, mesh: DeviceMesh, config: ParallelConfig) -> None:
    """Apply `fully_shard` to every block and then to the root, over `mesh`, in place.

    Parameters are split over its last axis. A first axis before that holds replicas whose gradients are averaged.

    Raises:
        DegreeError: a parameter would leave ranks with an empty shard, and the configuration forbids that.
        ConfigError: `block_classes` names a class the model does not contain; a parameter has no dimension to split;
            a unit has trainable parameters of several types.
    """
    shard_degree = mesh.size(mesh.ndim - 1)
    _refuse_scalars(model)
    blocks = list(find_blocks(model, config.block_classes))
    if not config.allow_empty_shards:
        _check_no_empty_shard(model, shard_degree)
    _refuse_several_types([*blocks, model])
    policy = mixed_precision_policy(config)

    def placement(parameter: nn.Parameter) -> Shard | None:
        return shard_placement(parameter, shard_degree)

    with _slices_made_once(mesh):
        for block in blocks:
            fully_shard(
                block,
                mesh=mesh,
                reshard_after_forward=config.reshard_after_forward,
                mp_policy=policy,
                shard_placement_fn=placement,
            )
        fully_shard(model, mesh=mesh, mp_policy=policy, shard_placement_fn=placement)
    watch_units(model)


class _SlicedOnce(DeviceMesh):
    """A mesh that makes each of its slices once."""

    def __getitem__(self, names: Any) -> DeviceMesh:
        kept: dict[Any, DeviceMesh] = vars(self)["_kept_slices"]
        if names not in kept:
            kept[names] = super().__getitem__(names)
        return kept[names]


@contextmanager
def _slices_made_once(mesh: DeviceMesh) -> Generator[None]:
    """FSDP2 slices the mesh once more for each parameter, 0.3 ms each (torch 2.13): half of the time that it takes."""
    kind = type(mesh)
    vars(mesh)["_kept_slices"], mesh.__class__ = {}, _SlicedOnce
    try:
        yield
    finally:
        mesh.__class__ = kind
        del vars(mesh)["_kept_slices"]


def find_blocks(model: nn.Module, class_names: tuple[str, ...] = ()) -> Iterator[nn.Module]:
    """Modules to gather and free as one unit, innermost first: by class name, else the layers of each chain.

    All ranks must run the same units. So without names the elements of an `nn.ModuleList` are units only where the
    model's source runs all of them, whatever the data (see `chains`); others, such as experts, task heads and layers
    that may be dropped, are left to the unit around them, in which ranks may run what they like.

    A module that shares a parameter with the outside is left to the unit around it: FSDP2 would make two parameters
    of one, silently.

    Raises:
        ConfigError: a class name that no module has.
    """
    found = {type(module).__name__ for module in model.modules()}
    missing = [name for name in class_names if name not in found]
    if missing:
        raise ConfigError(
            f"block_classes names {missing}, but {type(model).__name__} contains no module of such a class. "
            f"It contains: {', '.join(sorted(found))}."
        )
    elements = set[int]() if class_names else _elements_of_chains(model)
    uses = _uses_of_parameters(model)
    for module in reversed(list(model.modules())):
        is_block = type(module).__name__ in class_names if class_names else id(module) in elements
        is_done = module is model or isinstance(module, FSDPModule)
        is_container = type(module).forward is nn.Module.forward  # never called, so it cannot gather
        if is_block and not is_done and not is_container and next(module.parameters(), None) is not None:
            within = _uses_of_parameters(module)
            if all(uses[parameter] == count for parameter, count in within.items()):
                yield module


def _elements_of_chains(model: nn.Module) -> set[int]:
    chains = chains_of(model)
    elements: set[int] = set()
    others: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            (elements if name in chains else others).update(map(id, module))
            if name not in chains and len(module) > 1:
                _tell_what_stays(name, module, sum(parameter.numel() for parameter in model.parameters()))
    return elements - others


def _tell_what_stays(name: str, layers: nn.ModuleList, size_of_model: int) -> None:
    """Say where much of a model is gathered as one, for the reason may be a loop that could not be read."""
    size = sum(parameter.numel() for parameter in layers.parameters())
    if size >= _LARGE and 2 * size >= size_of_model:
        kind = type(layers[0]).__name__
        log.warning(
            "%s, %d modules of class %s with %.0f %% of the parameters, is gathered with the module around it, not one "
            "by one: no loop in the model's source runs each of them in every forward. If every rank does run them all "
            'in the same order, pass block_classes=("%s",) to save memory.',
            *(name, len(layers), kind, 100 * size / size_of_model, kind),
        )


def sharded_parts(model: nn.Module) -> Iterator[FSDPModule]:
    """The units of a sharded model, the root first."""
    return (part for part in model.modules() if isinstance(part, FSDPModule))


def reshard(model: nn.Module) -> None:
    """Make the root's parameters shards again after a step without backward, which FSDP2 leaves to backward."""
    for part in sharded_parts(model):
        part.reshard()


@contextmanager
def without_replica_sync(model: nn.Module) -> Generator[None]:
    """Leave out the all-reduce between replicas in backward.

    The reduce-scatter inside a replica stays, so that gradients never take more than a shard's memory.
    """
    for part in sharded_parts(model):
        part.set_requires_all_reduce(False, recurse=False)
    try:
        yield
    finally:
        for part in sharded_parts(model):
            part.set_requires_all_reduce(True, recurse=False)


def _uses_of_parameters(model: nn.Module) -> Counter[int]:
    """How many modules hold each parameter, by its identity."""
    return Counter(id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False))


def mixed_precision_policy(config: ParallelConfig) -> MixedPrecisionPolicy:
    """Policy of FSDP2 for a precision: gathers in bfloat16 and reduces in float32 for `bf16-mixed`."""
    if config.precision == "bf16-mixed":
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return MixedPrecisionPolicy()


def shard_placement(parameter: torch.Tensor, shard_degree: int) -> Shard | None:
    """Dimension to split where the first is too short: the first that divides evenly. None: the first dimension."""
    shape = parameter.shape
    is_whole = not isinstance(parameter, DTensor)
    if shape and leaves_a_rank_empty(shape[0], shard_degree) and is_whole:
        for dim, size in enumerate(shape):
            if size % shard_degree == 0 and size > 0:
                return Shard(dim)
    return None


def leaves_a_rank_empty(num_rows: int, shard_degree: int) -> bool:
    """Whether splitting rows as `torch.chunk` does (equal chunks, the last ones shorter) leaves the last rank none."""
    rows_per_rank = -(-num_rows // shard_degree)
    return rows_per_rank * (shard_degree - 1) >= num_rows and shard_degree > 1


def _refuse_scalars(model: nn.Module) -> None:
    scalars = [name for name, parameter in model.named_parameters() if parameter.dim() == 0]
    if scalars:
        raise ConfigError(
            f"parameters without a dimension cannot be sharded, at any degree: {few(scalars)}. "
            "Make each a vector of one element: nn.Parameter(torch.ones(1)) instead of nn.Parameter(torch.tensor(1.0))."
        )


def _refuse_several_types(units: list[nn.Module]) -> None:
    """Raise where FSDP2 would, in the first step: it reduces the gradients of a unit in one message.

    Args:
        units: innermost first.
    """
    seen: set[int] = set()
    for unit in units:
        names: dict[torch.dtype, str] = {}
        for name, parameter in unit.named_parameters():
            if id(parameter) not in seen and parameter.requires_grad:
                names.setdefault(parameter.dtype, name)
            seen.add(id(parameter))
        if len(names) > 1:
            found = ", ".join(f"{name} ({str(kind).removeprefix('torch.')})" for kind, name in names.items())
            raise ConfigError(
                f"the trainable parameters of {type(unit).__name__} that are sharded together have several types: "
                f"{found}. Give them one type, freeze those of other types, or name classes in block_classes whose "
                "modules have one type each."
            )


def _check_no_empty_shard(model: nn.Module, shard_degree: int) -> None:
    short = [
        f"{name} {tuple(parameter.shape)}"
        for name, parameter in model.named_parameters()
        if leaves_a_rank_empty(_local_rows(parameter), shard_degree)
        and shard_placement(parameter, shard_degree) is None
    ]
    if short:
        raise DegreeError(
            f"sharding over {shard_degree} ranks would leave some of them with an empty shard of {few(short)}. "
            "Pass allow_empty_shards=True to permit it (it costs nothing but a little imbalance), or lower "
            "hybrid_shard_degree."
        )


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def laid_out_like(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A tensor of which this rank holds `local`, laid out as a parameter whose local part has that shape."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


Layout = tuple[list[int], list[int], list[int | None]]
"""Whole shape and strides of a tensor, and for each axis of its mesh the dimension that is split, None for none."""


def layout_of(name: str, tensor: DTensor) -> Layout:
    """How a tensor lies, in plain values.

    Raises:
        ConfigError: `name` is neither replicated nor split along a dimension.
    """
    unknown = [each for each in tensor.placements if not (isinstance(each, Replicate) or type(each) is Shard)]
    if unknown:
        raise ConfigError(
            f"{name} has the placement {unknown[0]}, which can be neither copied to another rank nor saved. Keep "
            "optimizer state replicated, or split along a dimension."
        )
    splits = [each.dim if isinstance(each, Shard) else None for each in tensor.placements]
    return list(tensor.shape), list(tensor.stride()), splits


def laid_out_as(layout: Layout, parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A tensor of which this rank holds `local`, on the mesh of its parameter; the inverse of `layout_of`."""
    if not isinstance(parameter, DTensor):
        return local
    shape, stride, splits = layout
    placements = _placements_of(splits)
    return DTensor.from_local(
        local, parameter.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride)
    )


def zeros_beside(
    parameter: torch.Tensor, size: Sequence[int], dtype: torch.dtype, layout: Layout | None = None
) -> torch.Tensor:
    """A tensor of some whole size that works together with a parameter.

    Args:
        parameter: which may be split over ranks.
        size: of the whole.
        dtype: of its elements.
        layout: how it was laid out elsewhere; replicated, where that is not known or the mesh has other axes.
    """
    if not isinstance(parameter, DTensor):
        return torch.zeros(size, dtype=dtype, device=parameter.device)
    mesh = parameter.device_mesh
    splits = layout[2] if layout is not None and len(layout[2]) == mesh.ndim else [None] * mesh.ndim
    return zeros(size, dtype=dtype, device_mesh=mesh, placements=_placements_of(splits))


def _placements_of(splits: Sequence[int | None]) -> list[Placement]:
    return [Replicate() if split is None else Shard(split) for split in splits]


def _local_rows(parameter: torch.Tensor) -> int:
    """Rows of the first dimension that FSDP2 will split: on this tensor rank, where the tensor is already split."""
    return local_part(parameter).shape[0]
