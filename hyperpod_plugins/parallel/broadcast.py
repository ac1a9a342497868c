"""Copy the values of global rank 0 to all ranks, after a check that they have built the same model.

The broadcasts of a model's tensors are matched only by their order. If another rank holds values of other tensors, it
waits for a broadcast that never comes, or takes the bytes of one tensor for those of another without an error.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hyperpod_plugins.comm import group_health
from hyperpod_plugins.delayed_init.materialize import allocate
from hyperpod_plugins.delayed_init.tape import binding_of, full_name, own_tensors, release_tapes, tapes_of
from hyperpod_plugins.errors import ConfigError, format_list

_HAS_VALUES = "has values"
_Aspects = tuple[str, ...]


def broadcast_from_rank_0(model: nn.Module, device: torch.device) -> None:
    """Broadcast parameters and buffers from global rank 0, and the RNG state that delayed parameters start from.

    Otherwise, ranks that built their model from different RNG states would train shards of different models.

    Args:
        model: a module that is not sharded yet.
        device: device that the process group communicates on; values on other devices are copied through it.

    Raises:
        ConfigError: see `match_rank_0`.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    match_rank_0(model)
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta and not isinstance(tensor, DTensor):
            there = tensor.detach().to(device).contiguous()
            dist.broadcast(there, src=0)
            if there.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(there)
    for tape in tapes_of(model):
        state = tape.rng_state.to(device)
        dist.broadcast(state, src=0)
        tape.rng_state = state.cpu()


def match_rank_0(
    model: nn.Module,
    *,
    allocates: bool = False,
    compares_types: bool = True,
    advice: str = "Build it in the same way on all ranks.",
) -> None:
    """Check that the same tensors have values on all ranks, as those of rank 0 will be copied to the others.

    It sends the names of all tensors from rank 0 and a line from each rank.

    Args:
        model: the whole model, not sharded yet.
        allocates: if all tensors have values on rank 0, first allocate memory for those on the meta device of others.
        compares_types: also compare the element types; False if they will be converted first.
        advice: last sentence of the message.

    Raises:
        ConfigError: they have not, or tensors differ in shape or type, or in what is tied; all ranks raise.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1 or group_health.suppresses_collectives:
        return  # suppressed: a replacement sets itself up alone, and gets its values later
    received = [_describe(model, compares_types)]
    dist.broadcast_object_list(received, src=0)
    expected = received[0]
    waiting = [name for name, aspects in expected.items() if _HAS_VALUES not in aspects]
    if allocates and not waiting:
        allocate(model, torch.device("cpu"))
        release_tapes(model)
    differences: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(differences, _difference(expected, _describe(model, compares_types)))
    for rank, difference in enumerate(differences):
        if difference:
            raise ConfigError(
                f"{type(model).__name__} takes the values of rank 0, but is built differently on rank {rank}: "
                f"{difference} on rank {rank}. "
                + (f"Rank 0 has no values for {format_list(waiting)}. " if waiting else "")
                + advice
            )


def _describe(model: nn.Module, with_types: bool) -> dict[str, _Aspects]:
    """What must be equal on all ranks: of each tensor, whether it has values, its shape, and what it is tied to."""
    found: dict[str, _Aspects] = {}
    names: dict[int, str] = {}
    for module_name, module in model.named_modules():
        binding = binding_of(module)
        for key, tensor in own_tensors(module).items():
            name = full_name(module_name, key)
            first = names.setdefault(id(tensor), name)
            state = _HAS_VALUES
            if tensor.is_meta:
                is_recorded = binding is not None and key in binding.views
                state = "was built under delayed_init" if is_recorded else "is on the meta device"
            found[name] = (
                state,
                f"has the shape {tuple(tensor.shape)}",
                "is a tensor of its own" if first == name else f"is {first}",
                *([f"is {tensor.dtype}"] if with_types else []),
            )
    return found


def _difference(expected: dict[str, _Aspects], found: dict[str, _Aspects]) -> str:
    """The first tensor that is not as on rank 0, and how it is on both; empty if there is none."""
    missing = ("does not exist",)
    for name in expected | found:
        for ours, theirs in zip(expected.get(name, missing), found.get(name, missing), strict=False):
            if ours != theirs:
                return f"{name} {ours} on rank 0 and {theirs}"
    return ""
