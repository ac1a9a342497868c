"""MLPs computed tile by tile along the sequence: their inner activations exist for one tile at a time.

The inner layer of an MLP is several times as wide as the model, and backward needs all of it. Tokens do not depend on
each other there, so each tile of the sequence goes through the MLP alone, and once more in backward (as in Arctic Long
Sequence Training, arXiv 2506.13996). Gradients of its weights are sums over tiles: equal up to rounding.

[Note: trial] Whether a module treats each token alone is not visible in its layers. So each one computes a few random
tokens both ways when it is set up, with random weights of its own. That is before it is sharded or split by rank, so
a rank that replaces a lost one decides alone, and alike. It needs neither the values of weights, which may come later,
nor a step, which may be compiled.
"""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from hyperpod_plugins.errors import ConfigError, format_list, format_modules
from hyperpod_plugins.memory.recompute import derived_class

_NAMES = ("mlp", "feed_forward", "ffn")
_NUM_TILES = "_hyperpod_num_tiles"
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}
_TOKENS_TRIED = 7


def tile_mlps(
    model: nn.Module,
    num_tiles: int,
    class_names: Sequence[str] = (),
    *,
    device: torch.device | None = None,
    is_tried: bool = True,
) -> list[str]:
    """Compute MLPs of a model tile by tile along the sequence, in place, when gradients are enabled.

    Call it before the model is split by tensor parallelism.

    Args:
        model: Model with MLPs that take one tensor `(..., tokens, hidden size)`.
        num_tiles: Number of tiles, from 2 on; shorter sequences are cut into fewer.
        class_names: Classes of the MLPs. By default, modules named `mlp`, `feed_forward` or `ffn` that consist of
            linear layers and activation functions.
        device: Where MLPs are tried; by default where their parameters are, or the CPU for those without values.
        is_tried: Whether to compute a few tokens both ways; not with fake tensors, which have no values to compare.

    Returns:
        Names of the MLPs.

    Raises:
        ConfigError: There is none; or one does not treat each token alone, has dropout, which would draw other numbers,
            or has a `forward` of its own that a library has put into the object.
    """
    if num_tiles < 2:
        raise ConfigError(f"the number of tiles of an MLP must be at least 2, but is {num_tiles}")
    found = dict(_mlps(model, class_names))
    if not found:
        raise ConfigError(
            f"{type(model).__name__} has no MLP that could be tiled: modules named {', '.join(_NAMES)}, of linear "
            "layers and activation functions. Leave mlp_tiles out, or call hyperpod_plugins.memory.tile_mlps(model, "
            f"{num_tiles}, class_names=[...]) with the classes of its MLPs before the model is sharded."
        )
    random = [
        name for name, mlp in found.items() if any(isinstance(part, nn.Dropout) and part.p for part in mlp.modules())
    ]
    if random:
        raise ConfigError(
            f"MLPs with dropout would draw other random numbers when they are tiled: {format_list(random)}. Set p to "
            "0, or leave mlp_tiles out."
        )
    replaced = [name for name, mlp in found.items() if "forward" in vars(mlp)]
    if replaced:
        raise ConfigError(
            f"the forward of MLPs was replaced in the objects, where mlp_tiles cannot cut it: {format_list(replaced)}. "
            "Replace it in their class, or leave mlp_tiles out."
        )
    if is_tried:
        for name, mlp in {_trait(mlp): (name, mlp) for name, mlp in found.items()}.values():
            _try(name, mlp, device)
    for mlp in found.values():
        _tile(mlp, num_tiles)
    return list(found)


def describe_tiles(model: nn.Module) -> str:
    """One line for the log: which MLPs of a model are computed in tiles, and which modules with such a name are not."""
    named = {name: part for name, part in model.named_modules() if name.rpartition(".")[2] in _NAMES}
    tiled = {name: part for name, part in model.named_modules() if _NUM_TILES in vars(part)}
    others = format_modules([name for name in named if name not in tiled])
    return f"tiled: {format_modules(tiled)}" + (f"; not: {others}" if others else "")


def _tile(mlp: nn.Module, num_tiles: int) -> None:
    """Give a module a class whose `forward` tiles, so that copies of the module do so with their weights."""
    mlp.__class__ = _tiling_class(type(mlp))
    vars(mlp)[_NUM_TILES] = num_tiles


@cache
def _tiling_class(kind: type[nn.Module]) -> type:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else None
        if not torch.is_grad_enabled() or not isinstance(hidden, Tensor) or hidden.dim() < 2 or hidden.shape[-2] < 2:
            return kind.forward(self, *args, **kwargs)
        if len(args) > 1 or kwargs:
            raise ConfigError(f"{kind.__name__} takes more than one tensor, so mlp_tiles cannot cut it. Leave it out.")

        def compute(tile: Tensor) -> Any:
            return kind.forward(self, tile)

        tiles = hidden.chunk(vars(self)[_NUM_TILES], dim=-2)
        return torch.cat([checkpoint(compute, tile, use_reentrant=False) for tile in tiles], dim=-2)

    return derived_class(kind, {"forward": forward})


class _Forward(nn.Module):
    """Calls a module's `forward` without the hooks of the module itself, which are not part of a tile."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, tokens: Tensor) -> Any:
        return type(self.mlp).forward(self.mlp, tokens)


def _try(name: str, mlp: nn.Module, device: torch.device | None) -> None:
    """Compute a few random tokens both ways, with random weights; see [Note: trial].

    Raises:
        ConfigError: The results differ, or the module cannot be computed alone.
    """
    place = device or next((each.device for each in mlp.parameters() if not each.is_meta), torch.device("cpu"))
    random = torch.Generator(place).manual_seed(0)

    def draw(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        values = torch.randn(*shape, generator=random, device=place, dtype=torch.float32)
        return values.to(dtype) / max(1, shape[-1] if shape else 1) ** 0.5

    tensors: dict[str, Tensor] = {f"mlp.{key}": each.clone() for key, each in mlp.named_buffers() if not each.is_meta}
    for key, each in mlp.named_parameters():
        if each.is_floating_point() and type(each.data) in (Tensor, DTensor):  # not if it is quantized
            tensors[f"mlp.{key}"] = draw(each.shape, each.dtype)
    dtype = next((each.dtype for each in tensors.values() if each.is_floating_point()), torch.get_default_dtype())
    error: Exception | None = None
    for size in _input_sizes(mlp):
        tokens = draw((2, _TOKENS_TRIED, size), dtype)
        try:
            with torch.no_grad(), torch.random.fork_rng([place] if place.type == "cuda" else []), _training(mlp):
                compute = _Forward(mlp)
                whole = functional_call(compute, tensors, tokens)
                parts = [functional_call(compute, tensors, tile) for tile in tokens.chunk(3, dim=-2)]
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as failure:
            error = failure  # perhaps it takes tokens of another size
            continue
        if not _make_up(whole, parts, tokens):
            raise ConfigError(
                f"{type(mlp).__name__} ({name}) does not treat each token alone, so its tiles (mlp_tiles) do not make "
                "up the whole. Leave mlp_tiles out for this model."
            )
        return
    raise ConfigError(
        f"{type(mlp).__name__} ({name}) could not be computed with a few tokens to see that it treats each alone: "
        f"{str(error).partition(chr(10))[0]}. Leave mlp_tiles out for this model."
    ) from error


def _input_sizes(mlp: nn.Module) -> list[int]:
    """Sizes that the tokens of a module may have, the likeliest ones first."""
    linears = [part.in_features for part in mlp.modules() if isinstance(part, nn.Linear)]
    return list(dict.fromkeys([*linears, *(size for each in mlp.parameters() for size in each.shape), 8]))


def _make_up(whole: Any, parts: Sequence[Any], tokens: Tensor) -> bool:
    if not isinstance(whole, Tensor) or whole.shape[:-1] != tokens.shape[:-1]:
        return False
    error = float((torch.cat(list(parts), dim=-2) - whole).abs().max())
    return error <= _TOLERANCE.get(whole.dtype, 3e-2) * float(whole.abs().max())


@contextmanager
def _training(mlp: nn.Module) -> Generator[None]:
    """Compute as in training; what is loaded by transformers is in evaluation until then."""
    before = [(part, part.training) for part in mlp.modules()]
    mlp.train()
    try:
        yield
    finally:
        for part, was_training in before:
            part.training = was_training


def _trait(mlp: nn.Module) -> object:
    """What tells MLPs apart that may compute differently: one of those that are alike is tried."""
    traits: list[object] = []
    for name, part in mlp.named_modules():
        hooks = (*part._forward_pre_hooks.values(), *part._forward_hooks.values())  # pyright: ignore[reportPrivateUsage]
        own = {key: each for key, each in vars(part).items() if key not in _OF_MODULES}
        of_values = [(key, each if isinstance(each, _PLAIN) else id(each)) for key, each in own.items()]
        shapes = [(key, each.shape, each.dtype) for key, each in part.named_parameters(recurse=False)]
        traits.append((name, type(part), *of_values, *shapes, *map(id, hooks)))
    return tuple(traits)


_OF_MODULES = frozenset(vars(nn.Module()))
_PLAIN = (bool, int, float, str, type(None))


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
