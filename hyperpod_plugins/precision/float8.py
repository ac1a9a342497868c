"""Linear layers whose matrix products are computed in float8 (8-bit floating point).

Both factors of each product are scaled by their largest absolute value and cast to float8, in forward and backward;
results have the layer's own type. With torchao, one scale for a whole tensor is fastest; one for each row is more
exact. These scales come from the present values, so there is no state to save, and a step that is computed again has
the same bits. Transformer Engine takes scales from earlier steps (`te-fp8`) or scales blocks of values (`te-mxfp8`,
`te-nvfp4`); see `precision/transformer_engine.py`.

Parameters and optimizer state keep their type. Only layers inside a model's blocks are converted: the head and the
embedding are the most sensitive, and a small part of the time. The sides of a matrix must be multiples of 16, which is
what the float8 units multiply; with scales of blocks, of 32.
"""

import importlib.util
import logging
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hyperpod_plugins.errors import ConfigError, MissingExtraError, format_modules
from hyperpod_plugins.precision.transformer_engine import (
    BLOCK_RECIPES,
    DEFAULT_SCALING,
    FORWARD_HOOKS,
    SIDE_OF_BLOCKS,
    TE_RECIPES,
    TeScaling,
    is_split_as_served,
    to_transformer_engine,
)

log = logging.getLogger(__name__)

Float8Recipe = Literal["none", "rowwise", "tensorwise", "te-fp8", "te-mxfp8", "te-nvfp4"]
FLOAT8_RECIPES: tuple[Float8Recipe, ...] = get_args(Float8Recipe)
_SIDE = 16
_MOST_NAMES = 16
_NEEDED, _MAJOR_FOR_BLOCKS = (8, 9), 10
_CONVERSION = "float8_conversion"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertedLinears:
    """What `convert_linears` did."""

    recipe: Float8Recipe
    converted: tuple[str, ...]
    """Names of the layers that compute in float8."""
    left: Mapping[str, str]
    """Names of the other linear layers, with the reason."""
    share: float
    """Part of the linear layers' parameters on this rank that the converted ones have, 0 .. 1."""
    is_emulated: bool
    """Whether float8 is emulated, because the device is a CPU."""
    gathers_in_float8: bool = False
    """Whether FSDP2 will gather their weights in float8."""

    def __str__(self) -> str:
        """One line for the log."""
        reasons = Counter(self.left.values())
        named = {reason: [name for name, why in self.left.items() if why == reason] for reason in reasons}
        left = "; ".join(f"{format_modules(names, _MOST_NAMES)} ({reason})" for reason, names in named.items())
        return (
            f"float8 ({self.recipe}{', emulated on the CPU' if self.is_emulated else ''}"
            f"{', gathered in float8' if self.gathers_in_float8 else ''}): "
            f"{len(self.converted)} of {len(self.converted) + len(self.left)} linear layers, with "
            f"{100 * self.share:.0f} % of their parameters: {format_modules(self.converted, _MOST_NAMES)}"
            + (f"; not converted: {left}" if left else "")
        )


def check_float8(recipe: str) -> None:
    """Check the name of a recipe.

    Raises:
        ConfigError: there is no recipe of that name.
    """
    if recipe not in FLOAT8_RECIPES:
        of_te = f". Transformer Engine has it: 'te-{recipe}'" if f"te-{recipe}" in BLOCK_RECIPES else ""
        raise ConfigError(f"float8_recipe must be one of {', '.join(FLOAT8_RECIPES)}, but is {recipe!r}{of_te}")


def check_float8_library(recipe: Float8Recipe) -> None:
    """Check that the library of a recipe is installed.

    Raises:
        MissingExtraError: it is not.
    """
    library, extra = ("transformer_engine", "te") if recipe in TE_RECIPES else ("torchao", "fp8")
    if recipe != "none" and importlib.util.find_spec(library) is None:
        raise MissingExtraError(library, extra, f"float8_recipe={recipe!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """How a layer was converted, by the names of `ParallelConfig`; each converted layer has it in `_CONVERSION`."""

    float8_recipe: Float8Recipe
    float8_pad_inner_dim: bool = False
    te_scaling: TeScaling = DEFAULT_SCALING


def conversions_of(model: nn.Module) -> dict[str, Conversion]:
    """How the layers of a model were converted by `convert_linears`, by their names; without the other layers."""
    return {name: vars(part)[_CONVERSION] for name, part in model.named_modules() if _CONVERSION in vars(part)}


def convert_linears(
    model: nn.Module,
    recipe: Float8Recipe,
    device: torch.device,
    *,
    blocks: Collection[nn.Module] = (),
    gathers_in_float8: bool = False,
    pads_inner_dim: bool = False,
    te_scaling: TeScaling = DEFAULT_SCALING,
) -> ConvertedLinears:
    """Make the linear layers of a model's blocks compute in float8, in place.

    Call it before `fully_shard`, and after tensor parallelism: the sides of a rank's part of a matrix count.

    Args:
        model: with parameters of any type and device, also on the meta device. Modules and parameters stay the same
            objects; only the class of the modules changes. Recipes of Transformer Engine need values, and make other
            modules.
        recipe: any but `"none"`.
        device: that will compute; on a CPU, torchao's float8 is emulated.
        blocks: modules in which layers are converted; empty for all but the first and the last layer of the model.
        gathers_in_float8: whether `gather_in_float8` will be called after `fully_shard`; for the log only.
        pads_inner_dim: whether torchao pads the inner sides of products to multiples of 16.
        te_scaling: options of `te-fp8`.

    Returns:
        What was converted.

    Raises:
        ConfigError: the device has no units for the recipe, or no layer can be converted.
        MissingExtraError: torchao or Transformer Engine, whichever the recipe needs, is not installed.
    """
    check_float8(recipe)
    _check_device(recipe, device)  # a library would not help a device without the units
    check_float8_library(recipe)
    linears = {name: part for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    side = SIDE_OF_BLOCKS if recipe in BLOCK_RECIPES else _SIDE
    left = _left_out(model, linears, blocks, replaces_modules=recipe in TE_RECIPES, side=side)
    converted = [name for name in linears if name not in left]
    if not converted:
        raise ConfigError(
            f"float8_recipe={recipe!r}: {type(model).__name__} has no linear layer that can compute in float8"
            + "".join(f"; {name}: {why}" for name, why in [*left.items()][:3])
            + ". Leave float8_recipe out, or name the classes of its blocks with block_classes."
        )
    is_emulated = device.type != "cuda" and recipe not in TE_RECIPES
    if recipe in TE_RECIPES:
        to_transformer_engine(model, {name: linears[name] for name in converted}, recipe, te_scaling, device)
    else:
        from hyperpod_plugins.precision.float8_linear import to_float8  # needs torchao

        for name in converted:
            to_float8(linears[name], recipe, is_emulated=is_emulated, pads_inner_dim=pads_inner_dim)
    conversion = Conversion(float8_recipe=recipe, float8_pad_inner_dim=pads_inner_dim, te_scaling=te_scaling)
    for name in converted:
        vars(model.get_submodule(name))[_CONVERSION] = conversion
    sizes = {name: _local_shape(part).numel() for name, part in linears.items()}
    return ConvertedLinears(
        recipe=recipe,
        converted=tuple(converted),
        left=left,
        share=sum(map(sizes.__getitem__, converted)) / sum(sizes.values()),
        is_emulated=is_emulated,
        gathers_in_float8=gathers_in_float8,
    )


def _check_device(recipe: Float8Recipe, device: torch.device) -> None:
    """Refuse a GPU that has no units for a recipe.

    Raises:
        ConfigError: see above.
    """
    if device.type != "cuda":
        return
    is_in_blocks, found = recipe in BLOCK_RECIPES, torch.cuda.get_device_capability(device)
    if found[0] == _MAJOR_FOR_BLOCKS if is_in_blocks else found >= _NEEDED:
        return
    # On GPUs of 12.x, Transformer Engine refuses MXFP8, and rounds gradients in NVFP4 to zero (its pull request 3281).
    needed = f"{_MAJOR_FOR_BLOCKS}.x" if is_in_blocks else f"{_NEEDED[0]}.{_NEEDED[1]} or higher"
    instead = "Use 'te-fp8' or one of torchao's recipes" if found >= _NEEDED else "Leave float8_recipe out"
    raise ConfigError(
        f"float8_recipe={recipe!r} needs GPUs of compute capability {needed}"
        f"{', which train with values that are scaled in blocks' if is_in_blocks else ''}, but "
        f"{torch.cuda.get_device_name(device)} has {found[0]}.{found[1]}. {instead}."
    )


def convertible_linears(model: nn.Module, blocks: Collection[nn.Module] = ()) -> dict[str, nn.Linear]:
    """Return the layers that `convert_linears` would convert with a recipe of torchao, by name.

    Args:
        model: as for `convert_linears`.
        blocks: as for `convert_linears`.
    """
    linears = {name: part for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    left = _left_out(model, linears, blocks, replaces_modules=False, side=_SIDE)
    return {name: part for name, part in linears.items() if name not in left}


def _left_out(
    model: nn.Module,
    linears: Mapping[str, nn.Linear],
    blocks: Collection[nn.Module],
    *,
    replaces_modules: bool,
    side: int,
) -> dict[str, str]:
    """The layers that are not converted, with the reason."""
    inside = {id(part) for block in blocks for part in block.modules()}
    if not blocks:
        inside = {id(part) for part in [*linears.values()][1:-1]}
    users = Counter(id(each) for part in model.modules() for each in part.parameters(recurse=False))
    left: dict[str, str] = {}
    for name, part in linears.items():
        shape = _local_shape(part)
        if type(part) is not nn.Linear:
            left[name] = f"a {type(part).__name__}"
        elif id(part) not in inside:
            left[name] = "outside of the blocks" if blocks else "the first or the last layer"
        elif users[id(part.weight)] > 1:
            left[name] = "its weight is shared"
        elif any(size % side for size in shape):
            left[name] = f"a side of its matrix on a rank is no multiple of {side}"
        elif replaces_modules and not is_split_as_served(part):
            left[name] = "its weight or bias is split in a way of the program's own"
        elif replaces_modules and _has_hooks(part, but=FORWARD_HOOKS if isinstance(part.weight, DTensor) else ()):
            left[name] = "it has hooks"
    return left


def _has_hooks(part: nn.Module, but: Collection[str] = ()) -> bool:
    return any(table for name, table in vars(part).items() if name.endswith("_hooks") and name not in but)


def _local_shape(linear: nn.Linear) -> torch.Size:
    weight = linear.weight
    return weight._local_tensor.shape if isinstance(weight, DTensor) else weight.shape  # pyright: ignore[reportPrivateUsage]
