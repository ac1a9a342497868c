"""Hybrid sharding: FSDP2 block by block over the axes `replicate x shard`."""

from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from hyperpod_plugins.errors import ConfigError, DegreeError, few
from hyperpod_plugins.parallel.config import ParallelConfig


def shard_hybrid(model: nn.Module, mesh: DeviceMesh, config: ParallelConfig) -> None:
    """Apply `fully_shard` to every block and then to the root, over `mesh`, in place.

    Parameters are split over its last axis. A first axis before that holds replicas whose gradients are averaged.

    Raises:
        DegreeError: a parameter would leave ranks with an empty shard, and the configuration forbids that.
        ConfigError: `block_classes` names a class the model does not contain; a parameter has no dimension to split.
    """
    shard_degree = mesh.size(mesh.ndim - 1)
    _refuse_scalars(model)
    blocks = list(find_blocks(model, config.block_classes))
    if not config.allow_empty_shards:
        _check_no_empty_shard(model, shard_degree)
    policy = mixed_precision_policy(config)

    def placement(parameter: nn.Parameter) -> Shard | None:
        return shard_placement(parameter, shard_degree)

    for block in blocks:
        fully_shard(
            block,
            mesh=mesh,
            reshard_after_forward=config.reshard_after_forward,
            mp_policy=policy,
            shard_placement_fn=placement,
        )
    fully_shard(model, mesh=mesh, mp_policy=policy, shard_placement_fn=placement)


def find_blocks(model: nn.Module, class_names: tuple[str, ...] = ()) -> Iterator[nn.Module]:
    """Modules to gather and free as one unit, innermost first: by class name, else the elements of each `ModuleList`.

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
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    elements = {id(element) for container in lists for element in container}
    uses = _uses_of_parameters(model)
    for module in reversed(list(model.modules())):
        is_block = type(module).__name__ in class_names if class_names else id(module) in elements
        is_done = module is model or isinstance(module, FSDPModule)
        is_container = type(module).forward is nn.Module.forward  # never called, so it cannot gather
        if is_block and not is_done and not is_container and next(module.parameters(), None) is not None:
            within = _uses_of_parameters(module)
            if all(uses[parameter] == count for parameter, count in within.items()):
                yield module


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


def _local_rows(parameter: torch.Tensor) -> int:
    """Rows of the first dimension that FSDP2 will split: on this tensor rank, where the tensor is already split."""
    return local_part(parameter).shape[0]
