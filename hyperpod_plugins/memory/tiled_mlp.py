"""MLPs computed tile by tile along the sequence: their inner activations exist for one tile at a time.

The inner layer of an MLP is several times as wide as the model, and backward needs all of it. Tokens do not depend on
each other there, so each tile of the sequence goes through the MLP alone, and once more in backward (as in Arctic Long
Sequence Training, arXiv 2506.13996). Gradients of its weights are sums over tiles: equal up to rounding.

Whether a module treats each token alone is not visible in its layers. So each one computes its first batch both ways,
and a module whose results differ twice is refused by name; until then it computes the whole.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hyperpod_plugins.errors import ConfigError, format_list
from hyperpod_plugins.memory.chunked_loss import derived_class
from hyperpod_plugins.memory.recompute import is_in_backward

_NAMES = ("mlp", "feed_forward", "ffn")
_NUM_TILES = "_hyperpod_num_tiles"
_TRIAL = "_hyperpod_tiles_are_equal"
"""Whether the tiles have made up the whole; None before the first trial."""
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}


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
        ConfigError: There is none, or one has dropout, which would draw other numbers. A forward raises it for a
            module that does not treat each token alone, before a step has been computed by tiles.
    """
    if num_tiles < 2:
        raise ConfigError(f"the number of tiles of an MLP must be at least 2, but is {num_tiles}")
    found = dict(_mlps(model, class_names))
    if not found:
        raise ConfigError(
            f"{type(model).__name__} has no MLP that could be tiled: modules named {', '.join(_NAMES)}, of linear "
            "layers and activation functions. Name their classes, or leave mlp_tiles out."
        )
    random = [
        name for name, mlp in found.items() if any(isinstance(part, nn.Dropout) and part.p for part in mlp.modules())
    ]
    if random:
        raise ConfigError(
            f"MLPs with dropout would draw other random numbers when they are tiled: {format_list(random)}. Set p to "
            "0, or leave mlp_tiles out."
        )
    for mlp in found.values():
        _tile(mlp, num_tiles)
    return list(found)


def skip_trials(model: nn.Module) -> None:
    """Take tiles for equal, in a model with fake tensors, which have no values to compare."""
    for part in model.modules():
        if _TRIAL in vars(part):
            vars(part)[_TRIAL] = True


def _tile(mlp: nn.Module, num_tiles: int) -> None:
    """Give a module a class of its own whose `forward` tiles, so that copies of the module do so with their weights."""
    kind = type(mlp)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else None
        if not torch.is_grad_enabled() or not isinstance(hidden, Tensor) or hidden.dim() < 2 or hidden.shape[-2] < 2:
            return kind.forward(self, *args, **kwargs)
        if len(args) > 1 or kwargs:
            raise ConfigError(f"{kind.__name__} takes more than one tensor, so mlp_tiles cannot cut it. Leave it out.")
        own, tiles = vars(self), hidden.chunk(vars(self)[_NUM_TILES], dim=-2)
        if own[_TRIAL] is not True:
            if own[_TRIAL] is False and is_in_backward():
                return kind.forward(self, hidden)  # as in the forward that is recomputed
            if not _are_equal(self, kind, hidden, tiles):
                if own[_TRIAL] is False:
                    raise ConfigError(
                        f"{kind.__name__} does not treat each token alone, so its tiles (mlp_tiles) do not make up the "
                        "whole. Leave mlp_tiles out for this model."
                    )
                own[_TRIAL] = False  # once may be due to a lost peer
                return kind.forward(self, hidden)
            own[_TRIAL] = True

        def compute(tile: Tensor) -> Any:
            return kind.forward(self, tile)

        return torch.cat([checkpoint(compute, tile, use_reentrant=False) for tile in tiles], dim=-2)

    mlp.__class__ = derived_class(kind, {"forward": forward})
    vars(mlp)[_NUM_TILES], vars(mlp)[_TRIAL] = num_tiles, None


def _are_equal(mlp: nn.Module, kind: type[nn.Module], hidden: Tensor, tiles: Sequence[Tensor]) -> bool:
    """Compute both ways, without gradients."""
    devices = [hidden.device] if hidden.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices):
        whole = kind.forward(mlp, hidden)
        parts = [kind.forward(mlp, tile) for tile in tiles]
        if not isinstance(whole, Tensor) or whole.shape[:-1] != hidden.shape[:-1]:
            return False
        error = float((torch.cat(parts, dim=-2) - whole).abs().max())
        return error <= _TOLERANCE.get(whole.dtype, 3e-2) * float(whole.abs().max())


def _mlps(model: nn.Module, class_names: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if class_names:
            if type(module).__name__ in class_names:
                yield name, module
        elif name.rpartition(".")[2] in _NAMES and _is_token_wise(module):
            yield name, module


def _is_token_wise(module: nn.Module) -> bool:
    """Whether a module seems to consist of linear layers, dropout and activation functions only; see `_try`."""
    parts = [part for part in module.modules() if part is not module]
    leaves = [part for part in parts if next(part.children(), None) is None]
    inner = [part for part in (module, *parts) if next(part.children(), None) is not None]
    return (
        bool(leaves)
        and not any(next(part.parameters(recurse=False), None) is not None for part in inner)
        and all(
            isinstance(part, nn.Linear | nn.Dropout)
            or type(part).__module__.startswith(("torch.nn.modules.activation", "transformers.activations"))
            for part in leaves
        )
    )
