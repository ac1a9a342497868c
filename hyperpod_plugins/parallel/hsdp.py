"""Hybrid sharding: apply FSDP2 block by block over the axes `replicate x shard`.

Also helpers that read and rebuild DTensors by their local parts and layouts.

[Note: backward inside the forward] Manual optimization runs backward in `training_step`, inside the forward of the
root. FSDP2 expects backward to begin at the output of the root's forward. Here it has ended before that output exists.
Two things follow for the parameters of the root itself, which lie in no unit inside it:

* Nothing tells FSDP2 that a backward has begun if no unit inside the root has run. Gradients would stay with the
  gathered parameters, and an optimizer, which holds the shards, would find none and change nothing
  (`reduce_root_in_backward`).
* A backward ends with the root resharded, so that a second forward in the same step, as in a GAN, would compute with
  shards. A part of the root that runs then gathers the root again (`root_gathered_for_its_parts`).
"""

# FSDP2 has no public API for the end of a backward.
# pyright: reportPrivateUsage=false

import logging
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, zeros
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from hyperpod_plugins.errors import ConfigError, DegreeError, format_list
from hyperpod_plugins.parallel.config import ParallelConfig
from hyperpod_plugins.parallel.gathered_parameters import parameters_by_module
from hyperpod_plugins.parallel.module_chains import find_chains
from hyperpod_plugins.parallel.node_collectives import use_node_collectives
from hyperpod_plugins.parallel.replica_buckets import takes_buckets
from hyperpod_plugins.parallel.unit_watch import fsdp_parameters, parameter_groups, watch_units

log = logging.getLogger(__name__)
_LARGE = 50_000_000  # parameters


def shard_hybrid(model: nn.Module, mesh: DeviceMesh, config: ParallelConfig) -> None:
    """Apply `fully_shard` to every block and then to the root, over `mesh`, in place.

    Parameters are split over the last axis of `mesh`. If there is an axis before it, gradients are averaged over it.
    Modules in `model` that are sharded already, over another mesh, stay as they are.

    Raises:
        DegreeError: a parameter would leave ranks with an empty shard, and `allow_empty_shards` is False.
        ConfigError: `block_classes` names a class the model does not contain; a parameter is zero-dimensional;
            a unit has trainable parameters of several dtypes.
    """
    shard_degree = mesh.size(mesh.ndim - 1)
    _check_no_scalars(model)
    in_buckets = takes_buckets(model, mesh, config)
    blocks = [] if in_buckets else list(find_blocks(model, config.block_classes))
    if not config.allow_empty_shards:
        _check_no_empty_shard(model, shard_degree)
    _check_one_dtype_per_unit([*cast("Iterator[nn.Module]", fsdp_units(model)), *blocks, model])
    policy = mixed_precision_policy(config)
    offload = offload_policy(config, mesh.device_type)

    def placement(parameter: nn.Parameter) -> Shard | None:
        return shard_placement(parameter, shard_degree)

    with cached_mesh_slices(mesh):
        for block in blocks:
            fully_shard(
                block,
                mesh=mesh,
                reshard_after_forward=config.reshard_after_forward,
                mp_policy=policy,
                offload_policy=offload,
                shard_placement_fn=placement,
            )
        fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=offload, shard_placement_fn=placement)
    if config.node_collectives:
        use_node_collectives([*blocks, model], mesh, config.node_collectives)
    watch_units(model, in_buckets=in_buckets)


class _CachedSlicesMesh(DeviceMesh):
    """A mesh that caches its slices."""

    def __getitem__(self, names: Any) -> DeviceMesh:
        kept: dict[Any, DeviceMesh] = vars(self)["_kept_slices"]
        if names not in kept:
            kept[names] = super().__getitem__(names)
        return kept[names]


@contextmanager
def cached_mesh_slices(mesh: DeviceMesh) -> Generator[None]:
    """Cache slices of the mesh: FSDP2 slices it anew for each parameter.

    That takes 0.3 ms each (torch 2.13), half of the sharding time.
    """
    kind = type(mesh)
    vars(mesh)["_kept_slices"], mesh.__class__ = {}, _CachedSlicesMesh
    try:
        yield
    finally:
        mesh.__class__ = kind
        del vars(mesh)["_kept_slices"]


def find_blocks(model: nn.Module, class_names: tuple[str, ...] = ()) -> Iterator[nn.Module]:
    """Yield the modules to shard as FSDP2 units, innermost first: by class name, or else the layers of each chain.

    All ranks must run the same units. Without class names, the elements of an `nn.ModuleList` are therefore units
    only if the model's source runs all of them regardless of the data (`module_chains.py`). Others, such as experts,
    task heads and layers that may be dropped, belong to the enclosing unit, within which ranks may run different
    modules.

    A module that shares a parameter with a module outside it also belongs to the enclosing unit: FSDP2 would silently
    split the shared parameter into two.

    Raises:
        ConfigError: no module has one of the class names.
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


def outermost_blocks(model: nn.Module, class_names: tuple[str, ...] = ()) -> list[nn.Module]:
    """Blocks of `find_blocks` that lie in no other block, in the order of the model's modules."""
    found = {id(block) for block in find_blocks(model, class_names)}
    return outermost([part for part in model.modules() if id(part) in found])


def outermost(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Those of some modules that lie in no other of them."""
    inner = {id(part) for module in modules for part in module.modules() if part is not module}
    return [module for module in modules if id(module) not in inner]


def _elements_of_chains(model: nn.Module) -> set[int]:
    chains = find_chains(model)
    elements: set[int] = set()
    others: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            (elements if name in chains else others).update(map(id, module))
            if name not in chains and len(module) > 1:
                _warn_if_mostly_one_unit(name, module, sum(parameter.numel() for parameter in model.parameters()))
    return elements - others


def _warn_if_mostly_one_unit(name: str, layers: nn.ModuleList, size_of_model: int) -> None:
    """Warn if most of a model is gathered as one unit: the cause may be a loop whose source could not be analyzed."""
    size = sum(parameter.numel() for parameter in layers.parameters())
    if size >= _LARGE and 2 * size >= size_of_model:
        kind = type(layers[0]).__name__
        log.warning(
            "%s, %d modules of class %s with %.0f %% of the parameters, is gathered with the enclosing module, not one "
            "by one: no loop in the model's source runs each of them in every forward. If every rank does run them all "
            'in the same order, pass block_classes=("%s",) to save memory.',
            *(name, len(layers), kind, 100 * size / size_of_model, kind),
        )


def fsdp_units(model: nn.Module) -> Iterator[FSDPModule]:
    """Return the FSDP2 units of a sharded model, the root first."""
    return (part for part in model.modules() if isinstance(part, FSDPModule))


def reshard(model: nn.Module) -> None:
    """Reshard all units after a forward without backward: FSDP2 reshards the root only in backward."""
    for part in fsdp_units(model):
        part.reshard()


def reshard_after_evaluations(model: nn.Module) -> None:
    """Reshard a model, or the sharded modules in it, after each forward without gradients.

    FSDP2 keeps the parameters of its root gathered until a backward. Code that averages, swaps or writes weights after
    an evaluation would find these instead of the ones that the optimizer holds, and what it writes would be dropped.
    """
    for part in outermost([part for part in model.modules() if isinstance(part, FSDPModule)]):
        if _reshard_after_evaluation not in part._forward_hooks.values():
            part.register_forward_hook(_reshard_after_evaluation)


def _reshard_after_evaluation(model: nn.Module, *_: Any) -> None:
    if not torch.is_grad_enabled():
        reshard(model)


@contextmanager
def without_replica_sync(model: nn.Module) -> Generator[None]:
    """Skip the all-reduce between replicas in backward.

    The reduce-scatter within a replica still runs, so that gradients never take more than a shard's memory.
    """
    for part in fsdp_units(model):
        part.set_requires_all_reduce(False, recurse=False)
    try:
        yield
    finally:
        for part in fsdp_units(model):
            part.set_requires_all_reduce(True, recurse=False)


def _uses_of_parameters(model: nn.Module) -> Counter[int]:
    """Number of modules that hold each parameter, by the parameter's `id`."""
    return Counter(id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False))


def mixed_precision_policy(config: ParallelConfig) -> MixedPrecisionPolicy:
    """Return FSDP2's policy for a precision; `bf16-mixed` gathers in bfloat16 and reduces in float32."""
    if config.precision == "bf16-mixed":
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return MixedPrecisionPolicy()


def offload_policy(config: ParallelConfig, device_type: str) -> OffloadPolicy:
    """Return FSDP2's policy for where shards lie between uses; they are pinned if a GPU copies from them."""
    return CPUOffloadPolicy(pin_memory=device_type == "cuda") if config.param_offload else OffloadPolicy()


def ids_on_host(model: nn.Module) -> set[int]:
    """`id` of each sharded parameter that FSDP2 keeps in host memory, also while it is on the meta device."""
    return {id(each.sharded_param) for each in fsdp_parameters(model) if each.offload_to_cpu}


@contextmanager
def shards_stay_on_host(model: nn.Module) -> Generator[None]:
    """Context in which `model.to(device)` moves all but what FSDP2 keeps in host memory: shards and gradients."""
    shards = [each.sharded_param for each in fsdp_parameters(model) if each.offload_to_cpu]
    ids = {id(each) for shard in shards for each in (shard, shard.grad) if each is not None}
    with _StaysOnHost(ids) if ids else nullcontext():
        yield


class _StaysOnHost(TorchFunctionMode):
    """Function mode in which `tensor.to` returns some tensors as they are."""

    def __init__(self, ids: set[int]) -> None:
        super().__init__()
        self._ids = ids

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.to and id(args[0]) in self._ids:
            return args[0]
        return func(*args, **(kwargs or {}))


def compute_device(tensor: torch.Tensor) -> torch.device:
    """Return the device that computes with a parameter or gradient, and on which its mesh communicates.

    The tensor itself may lie in host memory.
    """
    return torch.device(tensor.device_mesh.device_type) if isinstance(tensor, DTensor) else tensor.device


def shard_placement(parameter: torch.Tensor, shard_degree: int) -> Shard | None:
    """Return the first evenly divisible dimension if dimension 0 is too short to split; otherwise None (split 0)."""
    shape = parameter.shape
    is_whole = not isinstance(parameter, DTensor)
    if shape and leaves_a_rank_empty(shape[0], shard_degree) and is_whole:
        for dim, size in enumerate(shape):
            if size % shard_degree == 0 and size > 0:
                return Shard(dim)
    return None


def leaves_a_rank_empty(num_rows: int, shard_degree: int) -> bool:
    """Whether splitting rows like `torch.chunk` (equal chunks, the last ones shorter) leaves the last rank empty."""
    rows_per_rank = -(-num_rows // shard_degree)
    return rows_per_rank * (shard_degree - 1) >= num_rows and shard_degree > 1


def _check_no_scalars(model: nn.Module) -> None:
    scalars = [name for name, parameter in model.named_parameters() if parameter.dim() == 0]
    if scalars:
        raise ConfigError(
            f"zero-dimensional parameters cannot be sharded, at any degree: {format_list(scalars)}. "
            "Make each a vector of one element: nn.Parameter(torch.ones(1)) instead of nn.Parameter(torch.tensor(1.0))."
        )


def _check_one_dtype_per_unit(units: list[nn.Module]) -> None:
    """Raise if a unit has trainable parameters of several dtypes; FSDP2, which reduces a unit's gradients in one
    message, would raise in the first step.

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
    units = cast("Iterator[nn.Module]", fsdp_units(model))
    sharded = {id(parameter) for unit in units for parameter in unit.parameters()}
    short = [
        f"{name} {tuple(parameter.shape)}"
        for name, parameter in model.named_parameters()
        if id(parameter) not in sharded
        and leaves_a_rank_empty(_local_rows(parameter), shard_degree)
        and shard_placement(parameter, shard_degree) is None
    ]
    if short:
        raise DegreeError(
            f"sharding over {shard_degree} ranks would leave some of them with an empty shard of {format_list(short)}. "
            "Pass allow_empty_shards=True to permit it (it costs nothing but a little imbalance), or lower "
            "hybrid_shard_degree."
        )


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's local part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def from_local_like(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Build a tensor from its local part, with the layout of a parameter whose local part has the same shape."""
    if not isinstance(parameter, DTensor):
        return local
    return _from_local(local, parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride())


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the global tensor, gathered on the device of the mesh, also if shards lie in host memory.

    All ranks of a DTensor's mesh call this together.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    local, device = local_part(tensor), compute_device(tensor)
    if local.device.type != device.type:
        tensor = _from_local(local.to(device), tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())
    return tensor.full_tensor()


PlainLayout = tuple[list[int], list[int], list[int | None]]
"""Global shape and strides of a tensor, and for each mesh axis the dimension that it splits (None: replicated)."""


def layout_of(name: str, tensor: DTensor) -> PlainLayout:
    """Return the layout of a DTensor as plain values.

    Raises:
        ConfigError: on some mesh axis, the tensor is neither replicated nor split along a dimension; `name` names it.
    """
    unknown = [each for each in tensor.placements if not (isinstance(each, Replicate) or type(each) is Shard)]
    if unknown:
        raise ConfigError(
            f"{name} has the placement {unknown[0]}, which can be neither copied to another rank nor saved. Keep "
            "optimizer state replicated, or split along a dimension."
        )
    splits = [each.dim if isinstance(each, Shard) else None for each in tensor.placements]
    return list(tensor.shape), list(tensor.stride()), splits


def from_local_with_layout(layout: PlainLayout, parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Build a tensor from its local part and layout, on the mesh of its parameter; the inverse of `layout_of`."""
    if not isinstance(parameter, DTensor):
        return local
    shape, stride, splits = layout
    placements = _placements_of(splits)
    return _from_local(local, parameter.device_mesh, placements, torch.Size(shape), tuple(stride))


def _from_local(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, stride: tuple[int, ...]
) -> DTensor:
    """Like `DTensor.from_local`, which would move a local part in host memory to the device of the mesh."""
    if local.device.type == mesh.device_type:
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(shape, stride, local.dtype))
    return DTensor(local, spec, requires_grad=False)


def zeros_on_mesh_of(
    parameter: torch.Tensor, size: Sequence[int], dtype: torch.dtype, layout: PlainLayout | None = None
) -> torch.Tensor:
    """Return a zero tensor on the device or mesh of a parameter.

    Args:
        parameter: parameter that the tensor belongs to; may be a DTensor.
        size: global size.
        dtype: dtype of its elements.
        layout: layout that it had elsewhere. The tensor is replicated if this is None or the mesh has a different
            number of axes.
    """
    if not isinstance(parameter, DTensor):
        return torch.zeros(size, dtype=dtype, device=parameter.device)
    mesh = parameter.device_mesh
    splits = layout[2] if layout is not None and len(layout[2]) == mesh.ndim else [None] * mesh.ndim
    return zeros(size, dtype=dtype, device_mesh=mesh, placements=_placements_of(splits))


def _placements_of(splits: Sequence[int | None]) -> list[Placement]:
    return [Replicate() if split is None else Shard(split) for split in splits]


def _local_rows(parameter: torch.Tensor) -> int:
    """Number of rows that FSDP2 will split: those of the local part if tensor parallelism has split the parameter."""
    return local_part(parameter).shape[0]


def reduce_root_in_backward(root: nn.Module, loss: Tensor) -> None:
    """Make the backward of `loss`, inside the forward of `root`, reduce the root's own gradients at its end."""
    if isinstance(root, FSDPModule) and loss.requires_grad:
        state: Any = root._get_fsdp_state()
        loss.register_hook(lambda _: state._register_root_post_backward_final_callback())


@contextmanager
def root_gathered_for_its_parts(root: nn.Module) -> Generator[None]:
    """Context of the root's forward, in which each part with parameters of the root gathers it before it runs."""
    if not isinstance(root, FSDPModule):
        yield
        return
    parts, followed = set(_own_parts(root)), parameters_by_module(parameter_groups(root))

    def gather(part: nn.Module, *_: Any) -> None:
        if part in parts:
            for parameter in followed.get(part, ()):
                parameter.make_flags_equal()
            root.unshard()  # does nothing if it is gathered

    hook = register_module_forward_pre_hook(gather)
    try:
        yield
    finally:
        hook.remove()


def _own_parts(part: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules with parameters that belong to the unit of `part`."""
    if any(parameter is not None for parameter in part._parameters.values()):
        yield part
    for child in part.children():
        if not isinstance(child, FSDPModule):
            yield from _own_parts(child)
