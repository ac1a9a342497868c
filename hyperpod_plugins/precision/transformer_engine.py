"""Linear layers of Transformer Engine: in float8 with delayed scaling (`float8_recipe="te-fp8"`), or in blocks.

With delayed scaling, activations and weights are cast to E4M3, gradients to E5M2 (or as `TeScaling` says), with scales
from the largest absolute values of earlier passes, which Transformer Engine reduces over all ranks as a forward or
backward ends. So scales are the same on all ranks, but they are state, and what a step computes depends on them.

MXFP8 (`te-mxfp8`) has a scale for each 32 values, NVFP4 (`te-nvfp4`) one for each 16 values of 4 bits. These scales
come from the present values, so there is no state. Only GPUs of compute capability 10.x train with such values. NVFP4
rounds gradients at random: each backward draws from torch's generator of the device.

[Note: scales are buffers] Transformer Engine keeps scales and histories outside of what torch calls the state of a
module, and registers them in a list of the process when a layer first runs. Here all layers are set up when they are
converted, so that all ranks and joiners reduce the same list, and the same tensors become persistent buffers of the
layers. What a step has done to buffers is undone, replacements and joiners get them, and checkpoints hold them.

[Note: one region] Transformer Engine reduces when `autocast` is left, and a layer that has run twice by then has lost
the values of its first call. So the model's forward, or Lightning's step, is one region; layers that run outside of it
are refused, with delayed scaling also those that run twice in it.

[Note: recomputation] A block that backward computes again runs outside of the region, and after the scales have moved
on. `Float8Recomputation` gives each call of a block a context for its recomputations. There the layers have the scales
of that call, and what they note of the largest values is dropped; nothing is reduced at the end. Transformer Engine's
own `activation_recompute_forward` does this with queues of the process, one for each layer, from which each
recomputation takes the oldest entry. After a forward without a backward, such as that of a step that is undone, or
before a second backward of one graph, it would take another call's scales without a word, so it is not used.

[Note: parts of matrices] With tensor parallelism, a layer multiplies its rank's parts: DTensors end and begin around
Transformer Engine's forward, in which the layer has the local parts of its parameters. Results of a layer that is split
along its input features are partial sums, to which the first rank alone adds the bias. Scales come from the largest
values of all ranks, and so are those of whole tensors. Under FSDP2, a backward casts weights again, and notes the
largest values of this rank's parts for the next reduction. As a checkpoint holds the notes of one rank, and the forward
has noted the same, a region of split layers begins without notes.

[Note: evaluations] A forward without gradients, or of a model in eval mode, is in bfloat16 and changes no scales. If a
backward follows the latter, the model would train in bfloat16, so that backward is refused. A model without dropout is
trained in float8 in training mode, with its dropout layers in eval mode.

[Note: regions of the program] A program may open a region of its own, with `autocast` or `fp8_autocast`. It has no
effect on a model without layers of Transformer Engine, which would train in bfloat16 without a word, so such a model
refuses to run in it with gradients. Around a model that was converted here the region changes nothing: the model opens
its own inside, and turns the program's off for evaluations. Inside of a region from here, another recipe is refused.
"""

import gc
import importlib.util
import sys
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # pyright: ignore[reportPrivateUsage]
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from hyperpod_plugins.errors import ConfigError

# Transformer Engine is optional, and not typed.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false

TeRecipe = Literal["te-fp8", "te-mxfp8", "te-nvfp4"]
TE_RECIPES: tuple[TeRecipe, ...] = get_args(TeRecipe)
BLOCK_RECIPES: dict[TeRecipe, str] = {"te-mxfp8": "MXFP8BlockScaling", "te-nvfp4": "NVFP4BlockScaling"}
"""Transformer Engine's class for each recipe that scales blocks."""
SIDE_OF_BLOCKS = 32
"""What the sides of matrices and the numbers of tokens must be multiples of, with such a recipe."""
_TOKENS_OF_DELAYED = 8
"""What the numbers of tokens must be multiples of with delayed scaling."""
TeFormat = Literal["HYBRID", "E4M3"]
AmaxAlgorithm = Literal["max", "most_recent"]
_PACKAGE = "transformer_engine"
_KEYS = {"scaling_fwd": "fwd", "scaling_bwd": "bwd"}
"""Names of a layer's two sets of scales in Transformer Engine, and in the names of the buffers here."""
FORWARD_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
"""Tables of a module's hooks that a layer of Transformer Engine takes over, where tensor parallelism has added some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeScaling:
    """Delayed scaling of Transformer Engine; the defaults are its own.

    Raises:
        ConfigError: a value is out of range.
    """

    fp8_format: TeFormat = "HYBRID"
    """`HYBRID`: E4M3 in forward and E5M2 in backward. `E4M3`: in both."""
    margin: int = 0
    """Scales are divided by 2 to the power of this."""
    amax_history_len: int = 1024
    """Number of passes whose largest absolute values are kept."""
    amax_compute_algo: AmaxAlgorithm = "max"
    """Whether the scale follows the largest value of the history or the most recent one."""

    def __post_init__(self) -> None:
        """Check the values."""
        for name, allowed in (("fp8_format", get_args(TeFormat)), ("amax_compute_algo", get_args(AmaxAlgorithm))):
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"te_scaling: {name} must be one of {', '.join(allowed)}, but is {getattr(self, name)!r}"
                )
        for name, least in (("margin", 0), ("amax_history_len", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ConfigError(f"te_scaling: {name} must be a whole number of at least {least}, but is {value!r}")

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "TeScaling":
        """Create it from a mapping, as in a configuration file.

        Raises:
            ConfigError: a key is unknown, or a value is out of range.
        """
        unknown = sorted(values.keys() - set(cls.__slots__))
        if unknown:
            raise ConfigError(f"te_scaling has unknown keys {unknown}; known are {', '.join(sorted(cls.__slots__))}")
        return cls(**values)


DEFAULT_SCALING = TeScaling()


def to_transformer_engine(
    model: nn.Module, linears: Mapping[str, nn.Linear], recipe: TeRecipe, scaling: TeScaling, device: torch.device
) -> None:
    """Replace linear layers by those of Transformer Engine, in place; parameters stay the same objects.

    Args:
        model: whose forward becomes the region in which the layers compute in float8; see [Note: one region].
        linears: name and layer of those to replace, with values.
        recipe: how to scale.
        scaling: options of delayed scaling.
        device: that will compute; scales are there from now on.

    Raises:
        ConfigError: a layer has no values yet, another model of this process is trained with delayed scaling, or the
            device or the version of Transformer Engine does not have the recipe.
    """
    without = [name for name, each in linears.items() if each.weight.is_meta]
    if without:
        raise ConfigError(
            f"float8_recipe={recipe!r}: {without[0]} has no values yet (delayed_init, or the meta device), which "
            "layers of Transformer Engine cannot get later. Build the model with values, or use "
            "float8_recipe='tensorwise'."
        )
    is_delayed = recipe not in BLOCK_RECIPES
    _check_alone(recipe)
    manager = _manager()
    _check_available(manager, recipe)
    region = _Region(model, _library(), _recipe(recipe, scaling), name=recipe)
    made = {id(each): _converted(each, region, device) for each in linears.values()}
    for name, part in [*model.named_modules(remove_duplicate=False)]:
        if id(part) in made:
            owner, _, key = name.rpartition(".")
            setattr(model.get_submodule(owner), key, made[id(part)])
    with torch.no_grad(), region.autocast():  # without gradients, leaving it reduces nothing
        for layer in made.values() if is_delayed else ():
            layer.init_fp8_metadata()
            manager.add_fp8_tensors_to_global_buffer(layer.fp8_meta)
            for name, tensor in _scales_of(layer).items():
                layer.register_buffer(name, tensor)
            region.split += [weakref.ref(layer)] if isinstance(layer.weight, DTensor) else []
    model.register_forward_pre_hook(lambda module, _: region.enter(module, num_calls=1))
    model.register_forward_hook(lambda *_: region.leave(), always_call=True)
    _regions[model] = region
    _trained.append((weakref.ref(model), is_delayed))


def _check_available(manager: Any, recipe: TeRecipe) -> None:
    """Refuse a recipe that this device, or this version of Transformer Engine, does not have.

    Raises:
        ConfigError: see above.
    """
    available = getattr(manager, f"is_{recipe.removeprefix('te-')}_available", None)
    is_available, reason = (False, "this version does not know it") if available is None else available()
    if not is_available:
        instead = "Use 'te-fp8', or leave float8_recipe out" if recipe in BLOCK_RECIPES else "Leave float8_recipe out"
        raise ConfigError(f"float8_recipe={recipe!r}: Transformer Engine says {reason!r}. {instead}.")


def refuse_regions_of_program(model: nn.Module, parts: Iterable[nn.Module]) -> None:
    """Have a model without layers of Transformer Engine refuse to train in a region.

    See [Note: regions of the program]. In a graph of torch.compile the region is not noticed.

    Args:
        model: after its layers were converted, if they are.
        parts: those of its modules that a program may call inside of a region.
    """
    if importlib.util.find_spec(_PACKAGE) is None:
        return
    kinds = {type(part) for part in model.modules()}
    if any(base.__module__.partition(".")[0] == _PACKAGE for kind in kinds for base in kind.__mro__):
        return
    for part in parts:
        if _refuse_region not in part._forward_pre_hooks.values():  # pyright: ignore[reportPrivateUsage]
            part.register_forward_pre_hook(_refuse_region, prepend=True)


def _refuse_region(module: nn.Module, _: object) -> None:
    if torch.compiler.is_compiling() or f"{_PACKAGE}.pytorch" not in sys.modules or not torch.is_grad_enabled():
        return
    if _manager().is_fp8_enabled() and not any(region.is_open for region in _regions.values()):
        raise ConfigError(
            f"{type(module).__name__} runs inside of an autocast (fp8_autocast) of Transformer Engine, but has none of "
            "its layers, so it would train in bfloat16. Set float8_recipe='te-fp8' (in a configuration of SMP fp8: "
            "true, for Accelerate fp8='te'), which converts its layers and needs no autocast, or leave the autocast "
            "out (enabled=False)."
        )


@contextmanager
def float8_region(model: nn.Module) -> Generator[None]:
    """Make what runs inside one region of Transformer Engine, where `model` was converted; else do nothing."""
    region = _regions.get(model)
    if region is None:
        yield
        return
    with region.step(model):
        yield


class Float8Recomputation:
    """Has backward compute blocks again in float8 as in their forwards; see [Note: recomputation]."""

    buffers = frozenset({"fp8_scale_fwd", "fp8_amax_history_fwd", "fp8_scale_bwd", "fp8_amax_history_bwd"})
    """Names of buffers of layers that need no other care in a recomputation."""

    def __init__(self, region: "_Region") -> None:
        self._region = region
        self._layers: weakref.WeakKeyDictionary[nn.Module, list[nn.Module]] = weakref.WeakKeyDictionary()

    @classmethod
    def of(cls, model: nn.Module) -> "Float8Recomputation | None":
        """Return that of a model; None if it was not converted here."""
        region = _regions.get(model)
        return None if region is None else cls(region)

    def __deepcopy__(self, _: object) -> "Float8Recomputation":
        """Copies of a model share its region, as their hooks do."""
        return self

    def of_call(self, block: nn.Module) -> AbstractContextManager[Any]:
        """Return the context of all recomputations of one call of a block, which begins now."""
        if not (self._region.is_open and torch.is_grad_enabled()):
            return nullcontext()
        if block not in self._layers:
            found = [part for part in block.modules() if isinstance(part, _layer_class())]
            self._layers[block] = [part for part in found if "fp8_scale_fwd" in part._buffers]  # pyright: ignore[reportPrivateUsage]
        return _Recomputation(self._region, self._layers[block])


class _Recomputation(AbstractContextManager[None]):
    """Around each recomputation of one call of a block."""

    def __init__(self, region: "_Region", layers: list[nn.Module]) -> None:
        self._region, self._layers = region, layers
        self._scales = self._copied("fp8_scale_fwd")
        self._present: list[tuple[AbstractContextManager[None], list[Tensor], list[Tensor]]] = []

    def __enter__(self) -> None:
        scales, largest = self._copied("fp8_scale_fwd"), self._copied("fp8_amax_history_fwd", 0)
        region = self._region.recomputation()
        region.__enter__()
        self._present.append((region, scales, largest))
        self._copy(self._scales, "fp8_scale_fwd")

    def __exit__(self, *_: object) -> None:
        region, scales, largest = self._present.pop()
        self._copy(scales, "fp8_scale_fwd")
        self._copy(largest, "fp8_amax_history_fwd", 0)
        region.__exit__(None, None, None)

    def _tensors(self, name: str, *row: int) -> list[Tensor]:
        """The tensors of that name of all layers, or a row of each."""
        return [layer.get_buffer(name)[row] if row else layer.get_buffer(name) for layer in self._layers]

    def _copied(self, name: str, *row: int) -> list[Tensor]:
        with torch.no_grad():
            return list(torch.stack(self._tensors(name, *row)).unbind()) if self._layers else []

    def _copy(self, values: list[Tensor], name: str, *row: int) -> None:
        if values:
            with torch.no_grad():
                torch._foreach_copy_(self._tensors(name, *row), values)  # pyright: ignore


class _Region:
    """Where layers compute in float8: from the outermost `enter` to its `leave`. For one thread."""

    def __init__(self, model: nn.Module, library: Any, recipe: Any, *, name: TeRecipe) -> None:
        self._model = weakref.ref(model)
        self._library, self._recipe, self._name = library, recipe, name
        self._is_delayed = name not in BLOCK_RECIPES
        self._depth = 0
        self._is_step = self._is_recomputing = False
        self._context: Any = None
        """Of Transformer Engine; None in an evaluation."""
        self._without: Any = None
        """Context of an evaluation that turns off a region of the program."""
        self._ran: set[int] = set()
        self.split: list[weakref.ref[nn.Module]] = []
        """Layers with delayed scaling whose weights are split over ranks; see [Note: parts of matrices]."""
        self._handled: BaseException | None = None

    @property
    def is_open(self) -> bool:
        """Whether the layers that run now compute in float8."""
        return self._context is not None or self._is_recomputing

    @contextmanager
    def recomputation(self) -> Generator[None]:
        """Context in which backward computes layers again; leaving it reduces nothing."""
        context, was_recomputing = self.autocast(), self._is_recomputing
        context.__enter__()
        self._is_recomputing = True
        try:
            yield
        finally:
            self._is_recomputing = was_recomputing
            with torch.no_grad():
                context.__exit__(None, None, None)

    def autocast(self, *, enabled: bool = True) -> Any:
        """Transformer Engine's context, which reduces scales over all ranks, torch's default group."""
        newer = getattr(self._library, "autocast", None)  # since 2.9, which deprecates the other one
        if newer is not None:
            return newer(enabled=enabled, recipe=self._recipe)
        return self._library.fp8_autocast(enabled=enabled, fp8_recipe=self._recipe)

    @contextmanager
    def step(self, model: nn.Module) -> Generator[None]:
        """Context of a step, in which forwards of the model are parts of one region."""
        self.enter(model, num_calls=0)
        depth, was_step, self._is_step = self._depth, self._is_step, True
        try:
            yield
        finally:
            self._depth, self._is_step = depth, was_step  # an interrupted forward inside has not left
            self.leave()

    def enter(self, model: nn.Module, *, num_calls: int) -> None:
        """Begin a region, or a part of the one that is open.

        torch runs no hooks after an exception that is no `Exception`, such as KeyboardInterrupt, so the forward that it
        ends leaves its region open. What such a forward has left is discarded here.

        Args:
            model: that was converted.
            num_calls: number of calls of the model that are running, if this is the outermost `enter`.
        """
        if self._depth and not self._is_step and _num_calls(model) <= num_calls:
            self._depth = 0
            self._close(reduces=False)
        self._depth += 1
        if self._depth > 1:
            return
        if not (model.training and torch.is_grad_enabled()):
            if _manager().is_fp8_enabled():
                self._without = self.autocast(enabled=False)
                self._without.__enter__()
            return
        if self.split:
            with torch.no_grad():
                layers = [layer for each in self.split if (layer := each()) is not None]
                torch._foreach_zero_([layer.get_buffer("fp8_amax_history_fwd")[0] for layer in layers])  # pyright: ignore
        self._ran.clear()
        self._handled = sys.exc_info()[1]
        context = self.autocast()
        context.__enter__()
        self._context = context

    def leave(self) -> None:
        """End what the last `enter` began.

        After an exception, nothing is reduced: other ranks, which had none, are elsewhere.
        """
        self._depth = max(self._depth - 1, 0)
        if not self._depth:
            self._close(reduces=sys.exc_info()[1] is self._handled)

    def _close(self, *, reduces: bool) -> None:
        without, self._without = self._without, None
        if without is not None:
            without.__exit__(None, None, None)
        context, self._context, self._handled = self._context, None, None
        if context is not None:
            with nullcontext() if reduces else torch.no_grad():
                context.__exit__(None, None, None)

    def guard(self, result: Tensor) -> None:
        """Refuse a backward through a layer's result of an evaluation; see [Note: evaluations].

        Without trainable parameters there is nothing to train, and a program may ask for gradients of inputs.
        """
        model = self._model()
        if self.is_open or model is None or not (torch.is_grad_enabled() and result.requires_grad):
            return
        if any(each.requires_grad for each in model.parameters()):
            result.register_hook(self._refuse_backward)

    def _refuse_backward(self, _: Tensor) -> None:
        raise ConfigError(
            f"float8_recipe={self._name!r}: a backward follows a forward in eval mode, which was in bfloat16. Call "
            "model.train(), and eval() only on its dropout layers to train without dropout. For gradients of inputs "
            "alone, let no parameter require gradients (requires_grad_(False))."
        )

    def check(self, layer: Any, given: Tensor) -> None:
        """Raise if a layer runs outside of a region, with delayed scaling also twice in it, or on too few tokens.

        Args:
            layer: about to run.
            given: its input, `(..., features)`.

        Raises:
            ConfigError: see [Note: one region]; or the number of tokens is no multiple of what the units multiply.
        """
        if not self.is_open:
            if layer.training and torch.is_grad_enabled():
                raise ConfigError(
                    f"float8_recipe={self._name!r}: a layer runs outside of the forward of the model that was given to "
                    "parallelize, or while that one is in eval mode, or again in backward by a checkpoint function of "
                    "the program. Call the model as a whole, in training mode, and leave recomputation to "
                    "activation_checkpointing='full', or use float8_recipe='tensorwise'."
                )
            return
        if (recipe := _manager().get_fp8_recipe()) != self._recipe:
            raise ConfigError(
                f"float8_recipe={self._name!r}: a layer runs inside of an autocast (fp8_autocast) of the program with "
                f"another recipe, {recipe}, than {self._recipe}. Leave the autocast out, and give its options by "
                "float8_recipe and te_scaling."
            )
        tokens, unit = given.shape[:-1].numel(), _TOKENS_OF_DELAYED if self._is_delayed else SIDE_OF_BLOCKS
        if tokens % unit:
            raise ConfigError(
                f"float8_recipe={self._name!r}: a layer of {layer.in_features} x {layer.out_features} was given "
                f"{tokens} tokens, which is no multiple of {unit}. Pad the batch, or leave out one that is not full "
                "(DataLoader(drop_last=True))."
            )
        if not self._is_delayed or self._is_recomputing:
            return
        if id(layer) in self._ran:
            raise ConfigError(
                "float8_recipe='te-fp8': a layer runs twice in one forward of the model (or one training_step), and "
                "Transformer Engine would forget the largest values of its first call. Use float8_recipe='tensorwise'."
            )
        self._ran.add(id(layer))
        if any(tensor is not layer.get_buffer(name) for name, tensor in _scales_of(layer).items()):
            raise ConfigError(
                "float8_recipe='te-fp8': the scales of a layer are no longer its buffers, so recovery and checkpoints "
                "would miss them. Do not convert or move the model after parallelize."
            )


def _num_calls(model: nn.Module) -> int:
    """Number of calls of a module that are running in this thread."""
    code, number, frame = nn.Module._call_impl.__code__, 0, sys._getframe()  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        number += frame.f_code is code and frame.f_locals["self"] is model
        frame = frame.f_back
    return number


_regions: "weakref.WeakKeyDictionary[nn.Module, _Region]" = weakref.WeakKeyDictionary()
_trained: "list[tuple[weakref.ref[nn.Module], bool]]" = []
"""The models of this process that were converted, and whether their scales are delayed."""


def _check_alone(recipe: TeRecipe) -> None:
    """Refuse a second model beside one with delayed scaling, and forget the layers of models that do not exist.

    Whatever region is left, Transformer Engine reduces the delayed scales of all layers of the process.
    """
    if _trained:
        gc.collect()
    present = [(model, is_delayed) for model, is_delayed in _trained if model() is not None]
    if any(is_delayed or recipe not in BLOCK_RECIPES for _, is_delayed in present):
        raise ConfigError(
            f"float8_recipe={recipe!r} for a second model in one process, and delayed scaling ('te-fp8') for one of "
            "both: Transformer Engine reduces the scales of all models together, and a process that joins has only "
            "those of one. Use float8_recipe='tensorwise'."
        )
    if len(present) < len(_trained):
        _trained[:] = present
        _manager().reset()


def _library() -> Any:
    import transformer_engine.pytorch as library

    return library


def _manager() -> Any:
    try:
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager
    except ImportError:  # before 2.9
        from transformer_engine.pytorch.fp8 import FP8GlobalStateManager
    return FP8GlobalStateManager


def _recipe(name: TeRecipe, scaling: TeScaling) -> Any:
    from transformer_engine.common import recipe

    if name in BLOCK_RECIPES:
        return getattr(recipe, BLOCK_RECIPES[name])()
    return recipe.DelayedScaling(
        margin=scaling.margin,
        fp8_format=getattr(recipe.Format, scaling.fp8_format),
        amax_history_len=scaling.amax_history_len,
        amax_compute_algo=scaling.amax_compute_algo,
    )


@cache
def _layer_class() -> Any:
    """Transformer Engine's linear layer, without its own pickled state: buffers hold the scales.

    It takes DTensors where its weight is one; see [Note: parts of matrices].
    """
    kind = _library().Linear

    def forward(self: Any, given: Tensor) -> Tensor:
        return (
            _multiply_parts(kind.forward, self, given)
            if isinstance(self.weight, DTensor)
            else kind.forward(self, given)
        )

    members = {"get_extra_state": nn.Module.get_extra_state, "set_extra_state": nn.Module.set_extra_state}
    return type("TransformerEngineLinear", (kind,), {"__module__": __name__, "forward": forward, **members})


@_disable_dynamo
def _multiply_parts(forward: Callable[[Any, Tensor], Tensor], layer: Any, given: Tensor) -> Tensor:
    """Compute this rank's part of a layer.

    Args:
        forward: that of Transformer Engine.
        layer: whose weight is split over the ranks of one axis.
        given: `(..., input features)`: the whole, or split along the features if the weight is.

    Returns:
        A DTensor `(..., output features)`: split along the features, or partial sums.
    """
    weight, bias = layer.weight, layer.bias if layer.use_bias else None
    split = given if isinstance(given, DTensor) else None
    mesh, is_summed = weight.device_mesh, weight.placements == (Shard(1),)
    wanted = f"split along dimension {given.dim() - 1}" if is_summed else "whole"
    if split is None or split.placements != ((Shard(given.dim() - 1),) if is_summed else (Replicate(),)):
        raise ConfigError(
            f"a layer of Transformer Engine whose weight is split {weight.placements} takes a DTensor that is "
            f"{wanted}, but was given {'a tensor that is none' if split is None else split.placements}. Use styles by "
            "name in tensor_plan, or float8_recipe='tensorwise'."
        )
    parts: dict[str, Tensor] = {"weight": weight.to_local()}
    if bias is not None:
        parts["bias"] = bias.to_local(grad_placements=[Partial()] if is_summed else None)
        if is_summed and mesh.get_local_rank():
            parts["bias"] = parts["bias"] * 0
    whole = {name: layer._parameters[name] for name in parts}
    layer._parameters.update(parts)
    try:
        part = forward(layer, split.to_local(grad_placements=None if is_summed else [Partial()]))
    finally:
        layer._parameters.update(whole)
    return DTensor.from_local(part, mesh, [Partial() if is_summed else Shard(part.dim() - 1)], run_check=False)


def is_split_as_served(linear: nn.Linear) -> bool:
    """Whether a layer of Transformer Engine can multiply the parts of a linear layer that is split over ranks."""
    weight, bias = linear.weight, linear.bias
    if not isinstance(weight, DTensor):
        return True
    of_bias: dict[tuple[Placement, ...], tuple[Placement, ...]] = {
        (Shard(0),): (Shard(0),),
        (Shard(1),): (Replicate(),),
    }
    wanted = of_bias.get(tuple(weight.placements))
    has_bias = bias is not None  # pyright: ignore[reportUnnecessaryComparison]
    return wanted is not None and (not has_bias or (isinstance(bias, DTensor) and bias.placements == wanted))


def _converted(linear: nn.Linear, region: _Region, device: torch.device) -> Any:
    has_bias, weight = linear.bias is not None, linear.weight  # pyright: ignore[reportUnnecessaryComparison]
    sizes = linear.in_features, linear.out_features
    layer = _layer_class()(*sizes, bias=has_bias, params_dtype=weight.dtype, device="meta")
    layer.weight = weight
    layer.bias = linear.bias if has_bias else torch.empty(0, dtype=weight.dtype, device=device)
    layer.train(linear.training)
    for name in FORWARD_HOOKS if isinstance(weight, DTensor) else ():  # of its style; their handles are for this object
        vars(layer)[name] = vars(linear)[name]
    layer.register_forward_pre_hook(lambda module, given: region.check(module, given[0]))
    layer.register_forward_hook(lambda _module, _inputs, result: region.guard(result))
    return layer


def _scales_of(layer: Any) -> dict[str, Tensor]:
    """Scales and histories of a layer, by the names of their buffers."""
    found: dict[str, Tensor] = {}
    for key, suffix in _KEYS.items():
        state = layer.fp8_meta[key]
        found |= {f"fp8_scale_{suffix}": state.scale, f"fp8_amax_history_{suffix}": state.amax_history}
    return found
