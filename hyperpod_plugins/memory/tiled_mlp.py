"""MLPs computed tile by tile along the sequence: their inner activations exist for one tile at a time.

The inner layer of an MLP is several times as wide as the model, and backward needs all of it. Tokens do not depend on
each other there, so each tile of the sequence goes through the MLP alone, and once more in backward (as in Arctic Long
Sequence Training, arXiv 2506.13996). Gradients of its weights are sums over tiles: equal up to rounding.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import MethodType

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hyperpod_plugins.errors import ConfigError, format_list

_NAMES = ("mlp", "feed_forward", "ffn")


def tile_mlps(model: nn.Module, num_tiles: int, class_names: Sequence[str] = ()) -> list[str]:
    """Compute MLPs of a model tile by tile along the sequence, in place, when gradients are enabled.

    Args:
        model: Model with MLPs that take one tensor `(..., tokens, hidden size)`.
        num_tiles: Number of tiles, from 2 on; shorter sequences are cut into fewer.
        class_names: Classes of the MLPs. By default, modules named `mlp`, `feed_forward` or `ffn` that consist of
            linear layers and activation functions.

    Returns:
        Names of the MLPs.

    Raises:
        ConfigError: There is none, or one has dropout, which would draw other numbers.
    """
    if num_tiles < 2:
        raise ConfigError(f"the number of tiles of an MLP must be at least 2, but is {num_tiles}")
    found = dict(_mlps(model, class_names))
    if not found:
        raise ConfigError(
            f"{type(model).__name__} has no MLP that could be tiled: modules named {', '.join(_NAMES)}, of linear "
            "layers and activation functions. Name their classes, or leave tiling out."
        )
    random = [
        name for name, mlp in found.items() if any(isinstance(part, nn.Dropout) and part.p for part in mlp.modules())
    ]
    if random:
        raise ConfigError(
            f"MLPs with dropout would draw other random numbers when they are tiled: {format_list(random)}. Set p to "
            "0, or leave tiling out."
        )
    for mlp in found.values():
        vars(mlp)["forward"] = MethodType(partial(_forward, mlp.forward, num_tiles), mlp)
    return list(found)


def _forward(forward: Callable[[Tensor], Tensor], num_tiles: int, mlp: nn.Module, hidden: Tensor) -> Tensor:
    if not torch.is_grad_enabled() or hidden.dim() < 2 or hidden.shape[-2] < 2:
        return forward(hidden)
    tiles = hidden.chunk(num_tiles, dim=-2)
    return torch.cat([checkpoint(forward, tile, use_reentrant=False) for tile in tiles], dim=-2)


def _mlps(model: nn.Module, class_names: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if class_names:
            if type(module).__name__ in class_names:
                yield name, module
        elif name.rpartition(".")[2] in _NAMES and _is_token_wise(module):
            yield name, module


def _is_token_wise(module: nn.Module) -> bool:
    """Whether a module consists of linear layers, dropout and activation functions only."""
    leaves = [part for part in module.modules() if next(part.children(), None) is None and part is not module]
    return bool(leaves) and all(
        isinstance(part, nn.Linear | nn.Dropout)
        or type(part).__module__.startswith(("torch.nn.modules.activation", "transformers.activations"))
        for part in leaves
    )
