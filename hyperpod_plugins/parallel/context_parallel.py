"""Context parallelism: each rank of a context group computes its part of the same sequences.

`split_contexts(model, ...)` does this in Hugging Face models for causal language modelling, whose code does not change.
The program gives the model whole sequences with labels, equal on all ranks of a group, and gets the loss of the whole:

    before forward   compare the batch with that of the other ranks; pad it, shift the labels, cut this rank's part
    masks            from the positions of whole sequences, by the functions that transformers would use on one process
    attention        over whole sequences (`context_attention.py`)
    after forward    the loss of whole sequences, whose gradient is right under FSDP2; logits refuse to be used

A model of another kind uses a `SequenceContext` in its own forward (`sequence_context.py`).
"""

import inspect
import logging
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial, wraps
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperpod_plugins.errors import ConfigError, format_list
from hyperpod_plugins.memory.chunked_loss import CAUSAL_LOSS, IGNORED, LogitsNotComputed, derived_class
from hyperpod_plugins.parallel.config import ParallelConfig
from hyperpod_plugins.parallel.context_attention import SequenceLayout, attend, mean_over_context
from hyperpod_plugins.parallel.sequence_context import DEGREES, ContextDegrees, check_alike, shares_heads
from hyperpod_plugins.parallel.topology import context_group

log = logging.getLogger(__name__)

SERVED_MODELS = ("gpt_oss", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
"""`model_type` of the Hugging Face models that are split: all but their attention treats each token alone."""
_USES_CONTEXT = "uses_sequence_context"
_ATTENTION = {"sdpa": "hyperpod_context_sdpa", "eager": "hyperpod_context_eager"}
_LIBRARIES = ("transformers", "torch", "peft", "hyperpod_plugins")
"""Libraries whose modules, in such a model, are known to treat each token alone outside of attention."""
_MIXES_TOKENS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d),
    *(nn.AvgPool1d, nn.MaxPool1d, nn.RNNBase, nn.MultiheadAttention, nn.TransformerEncoderLayer),
)
"""Modules of torch that do not."""
_MIXES_DOCUMENTS = ("gpt_oss",)
"""Models that do not pass positions on to the masks of transformers (5.23)."""
_MOVING_ROTATIONS = ("dynamic", "longrope")
_SPLIT_INPUTS = ("input_ids", "labels", "shift_labels", "position_ids", "attention_mask")
_WHOLE_OUTPUTS = ("output_attentions", "output_hidden_states", "output_router_logits")
_REFUSED_INPUTS = ("past_key_values", "inputs_embeds", "cache_position", *_WHOLE_OUTPUTS)


def split_contexts(model: nn.Module, config: ParallelConfig, shard_degree: int) -> None:
    """Let each rank compute its part of the sequences, in place. Call it before the model is sharded.

    Args:
        model: contains one causal language model of transformers, or modules that use a `SequenceContext`.
        config: configuration to apply; without context parallelism nothing is done.
        shard_degree: of the mesh.

    Raises:
        ConfigError: the model is none of those for which this is known to be exact.
    """
    degree = config.context_parallel_degree
    if degree == 1:
        return
    own = [part for part in model.modules() if getattr(part, _USES_CONTEXT, False)]
    found = [part for part in model.modules() if vars(part).get("loss_type") == CAUSAL_LOSS]
    if own and not found:
        context_group(shard_degree, degree)
        for part in own:
            vars(part)[DEGREES] = ContextDegrees(shard_degree=shard_degree, context_degree=degree, exchanges_heads=True)
        return
    if len(found) != 1 or own:
        raise ConfigError(
            f"context_parallel_degree={degree} needs one causal language model of transformers, but "
            f"{type(model).__name__} contains {len(found)}. For a model of your own, see "
            "hyperpod_plugins.parallel.SequenceContext; otherwise use context_parallel_degree=1."
        )
    _split_language_model(found[0], degree, shard_degree)


def _split_language_model(model: Any, degree: int, shard_degree: int) -> None:
    from transformers import PreTrainedModel

    _check_model(model)
    config = model.config
    attention = config._attn_implementation
    # Attention functions of the models ("eager") may read parameters of each head, such as sinks, from their module.
    shares = attention == "sdpa" and shares_heads(degree, config.num_attention_heads, config.num_key_value_heads)
    degrees = ContextDegrees(shard_degree=shard_degree, context_degree=degree, exchanges_heads=shares)
    context_group(shard_degree, degree)  # there must be one
    _register()
    for part in model.modules():
        vars(part)[DEGREES] = degrees
        if isinstance(part, PreTrainedModel):
            own: Any = part.config
            own._attn_implementation = _ATTENTION[attention]
    kind: Any = type(model)
    split = _SplitForward(degrees, inspect.signature(kind.forward))

    @wraps(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        own, sequences = split.part(self, args, kwargs)
        _running.sequences = sequences
        try:
            output = kind.forward(self, **own)
        finally:
            _running.sequences = None
        return split.whole(output, sequences)

    # Not hooks: wrappers such as PEFT's call `model.forward(...)`.
    model.__class__ = derived_class(kind, {"forward": forward})


def _check_model(model: Any) -> None:
    """Refuse models for which it is not known that splitting is exact."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    config, name = model.config, type(model).__name__
    kinds = {type(part) for part in model.modules()}
    strangers = sorted(
        kind.__name__
        for kind in kinds
        if kind.__module__.partition(".")[0] not in _LIBRARIES or issubclass(kind, _MIXES_TOKENS)
    )
    rotation = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    problem = ""
    if config.model_type not in SERVED_MODELS:
        problem = (
            f"model_type={config.model_type!r} is not among those whose layers are known to treat each token alone "
            f"outside of attention: {', '.join(SERVED_MODELS)}"
        )
    elif config._attn_implementation not in _ATTENTION:
        problem = (
            f"its attention is {config._attn_implementation!r}, and only attn_implementation='sdpa' and 'eager' are "
            "served"
        )
    elif strangers:
        problem = f"it contains {format_list(strangers)}, which may mix tokens"
    elif model.loss_function is not ForCausalLMLoss:
        problem = "it has a loss function of its own"
    elif rotation in _MOVING_ROTATIONS:
        problem = f"its rotary positions (rope_type={rotation!r}) depend on the longest position that a rank has"
    elif getattr(config, "is_causal", True) is False:
        problem = "its attention is not causal"
    elif whole := [key for key in _WHOLE_OUTPUTS if getattr(config, key, False)]:
        problem = (
            f"its configuration asks for {', '.join(whole)}, of which each rank has a part only; an auxiliary loss of "
            "routers is no sum over tokens"
        )
    if problem:
        raise ConfigError(f"context_parallel_degree cannot serve {name}: {problem}. Use context_parallel_degree=1.")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sequences:
    """The whole sequences of the forward that is running."""

    layout: SequenceLayout
    rank: int
    positions: Tensor
    """`(batch, length)`."""
    documents: Tensor | None
    """Number of the document of each token, `(batch, length)`; None if a sequence is one document."""
    padding: Tensor | None
    """True where a token may be attended to, `(batch, length)`; None if all may."""


class _Running(threading.local):
    """What is known of the forward that this thread is running, for the masks that transformers asks for."""

    sequences: _Sequences | None = None


_running = _Running()


class LogitsOfPart(LogitsNotComputed):
    """Stands for the logits of whole sequences, of which this rank has a part; each use of it says so."""

    def __init__(self, part: Tensor, positions: Tensor) -> None:
        """Keep this rank's part."""
        self.part = part
        """`(batch, local length, vocabulary)`; sequences may have been padded at their end."""
        self.positions = positions
        """Positions of the part in its sequences, `(local length,)`."""

    @classmethod
    def refusal(cls, use: str) -> str:
        """Return the message for a use, such as `logits.mean`."""
        return (
            f"{use}: with context_parallel_degree above 1, a rank has the logits of its part of the sequences only. "
            "Use the loss that the model computes from labels, or logits.part, whose places are logits.positions."
        )


class _SplitForward:
    """What happens before and after the forward of a language model."""

    def __init__(self, degrees: ContextDegrees, signature: inspect.Signature) -> None:
        self._degrees, self._signature = degrees, signature

    def part(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], _Sequences]:
        """Return the arguments for this rank's part, and the whole sequences.

        Raises:
            ConfigError: an argument cannot be split, or the ranks of the group have different sequences.
        """
        given = self._arguments(args, kwargs)
        _check_arguments(given)
        group = self._degrees.group
        check_alike({name: given.get(name) for name in _SPLIT_INPUTS}, group)
        ids: Tensor = given["input_ids"]
        batch, length = ids.shape
        layout, rank = self._degrees.layout(length), group.rank()
        added = layout.length - length
        positions = given.get("position_ids")
        documents = padding = None
        if given.get("attention_mask") is not None:
            kept = given["attention_mask"].to(ids.device, torch.bool)
            padding = None if bool(kept.all()) else F.pad(kept, (0, added))
        elif positions is not None:
            documents = _documents(model, positions, given)
        if positions is None:
            positions = torch.arange(length, device=ids.device)[None]
        more = positions[:, -1:] + torch.arange(1, added + 1, device=ids.device)
        positions = torch.cat([positions, more], dim=1).expand(batch, -1)
        if documents is not None:
            documents = torch.cat([documents, documents[:, -1:].expand(-1, added)], dim=1).expand(batch, -1)
        ignored = given.get("ignore_index", IGNORED)
        targets = given.get("shift_labels")
        if targets is None:
            targets = F.pad(given["labels"], (0, 1), value=ignored)[:, 1:]
        count = given.get("num_items_in_batch")
        count = (targets != ignored).sum() if count is None else count
        own_targets = layout.part(F.pad(targets, (0, added), value=ignored), rank)
        own_ids = layout.part(F.pad(ids, (0, added)), rank)
        sequences = _Sequences(layout=layout, rank=rank, positions=positions, documents=documents, padding=padding)
        own = {
            "input_ids": own_ids,
            "position_ids": layout.part(positions, rank),
            "attention_mask": torch.ones_like(own_ids),  # so that transformers looks for no documents in a part
            "labels": own_targets,
            "shift_labels": own_targets,
            "num_items_in_batch": count / self._degrees.context_degree,
            "use_cache": False,
        }
        return given | own, sequences

    def whole(self, output: Any, sequences: _Sequences) -> Any:
        """Replace this rank's share of the loss by the loss of whole sequences, and its logits by what refuses use."""
        group = self._degrees.group
        loss, logits, *rest = output if isinstance(output, tuple) else (output["loss"], output["logits"])
        loss = mean_over_context(loss, group)
        if isinstance(logits, Tensor):
            logits = LogitsOfPart(logits, sequences.layout.positions(sequences.rank, logits.device))
        if isinstance(output, tuple):
            return loss, logits, *rest
        output["loss"], output["logits"] = loss, logits
        return output

    def _arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name, without those that are None."""
        found: dict[str, Any] = {}
        bound = self._signature.bind(None, *args, **kwargs).arguments
        for index, (name, value) in enumerate(bound.items()):
            if self._signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
                found |= value
            elif index > 0:  # not `self`
                found[name] = value
        return {name: value for name, value in found.items() if value is not None}


def _check_arguments(given: Mapping[str, Any]) -> None:
    """Refuse what cannot be split."""
    problem = ""
    refused = [name for name in _REFUSED_INPUTS if name in given and given[name] is not False]
    keeps = given.get("logits_to_keep", 0)
    if "input_ids" not in given or refused:
        problem = f"takes input_ids, and no {', '.join(_REFUSED_INPUTS)}, but was given {', '.join(sorted(given))}"
    elif "labels" not in given and "shift_labels" not in given:
        problem = (
            "computes the loss itself, so it needs labels: logits are those of a part of the sequence on each rank"
        )
    elif given.get("use_cache") or isinstance(keeps, Tensor) or keeps:
        problem = "cannot use a cache or keep some logits only (use_cache, logits_to_keep)"
    elif given.get("is_causal", True) is not True:
        problem = "has causal attention (is_causal)"
    else:
        for name in _SPLIT_INPUTS:
            value, length = given.get(name), given["input_ids"].shape[-1]
            if value is not None and (not isinstance(value, Tensor) or value.dim() != 2 or value.shape[1] != length):
                shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                problem = f"takes {name} of the shape (batch, {length}), but was given {shape}"
                break
    if problem:
        raise ConfigError(
            f"with context_parallel_degree above 1, a model {problem}. Change the call, or use "
            "context_parallel_degree=1."
        )


def _documents(model: Any, positions: Tensor, given: Mapping[str, Any]) -> Tensor | None:
    """Return the document of each token, if positions begin again within a sequence."""
    from transformers.masking_utils import find_packed_sequence_indices

    found = find_packed_sequence_indices(positions)
    if found is None:
        return None
    recomputes = model.training and any(getattr(part, "gradient_checkpointing", False) for part in model.modules())
    if given.get("use_cache", model.config.use_cache) and not recomputes:
        raise ConfigError(
            "position_ids begin again within a sequence, so it has several documents, but use_cache is true in the "
            "model's configuration: transformers then lets tokens attend to earlier documents. Set "
            "model.config.use_cache = False, or pass use_cache=False."
        )
    if model.config.model_type in _MIXES_DOCUMENTS:
        _warn_of_documents(type(model).__name__)
    return found


@cache
def _warn_of_documents(name: str) -> None:
    log.warning(
        "position_ids begin again within a sequence, so tokens attend to their own document only. On one process, "
        "attn_implementation='eager' of %s in transformers lets them attend to earlier documents, too.",
        name,
    )


# -- what transformers calls ----------------------------------------------------------------------------------------


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    for attention, name in _ATTENTION.items():
        AttentionInterface.register(name, partial(_attention, attention))
        AttentionMaskInterface.register(name, partial(_mask, attention))


def _mask(
    attention: str,
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    dtype: torch.dtype = torch.float32,
    use_vmap: bool = False,
    **_: Any,
) -> Tensor | None:
    """Return the mask of this rank's attention, in place of one for its part of the sequences alone.

    Returns:
        See `attend`; boolean for torch's attention, otherwise numbers to add.

    Raises:
        ConfigError: the model does not ask for plain or windowed causal attention.
    """
    from transformers.masking_utils import packed_sequence_compatibility_function, padding_mask_function

    sequences = _running.sequences
    if sequences is None:
        raise ConfigError(
            "a part of a model with context_parallel_degree above 1 was called by itself. Call the whole causal "
            "language model, which splits its sequences."
        )
    layout, device = sequences.layout, sequences.positions.device
    if use_vmap or not _is_plain_or_windowed(mask_function) or q_length != kv_length:
        raise ConfigError(
            "context_parallel_degree above 1 serves causal attention, also within a window of a fixed size. This model "
            f"asks for another mask ({getattr(mask_function, '__qualname__', mask_function)})."
        )
    is_whole = sequences.documents is None and sequences.padding is None
    if attention == "sdpa" and layout.exchanges_heads and is_whole and not _is_windowed(mask_function):
        return None
    if sequences.documents is not None:
        mask_function = packed_sequence_compatibility_function(mask_function, sequences.positions, sequences.documents)
    columns = torch.arange(layout.length, device=device)
    rows = columns if layout.exchanges_heads else layout.positions(sequences.rank, device)
    places = torch.arange(1 if is_whole else batch_size, device=device)
    index = places[:, None, None, None], columns.new_zeros(1, 1, 1, 1), rows[:, None], columns
    mask = mask_function(*index)
    if sequences.padding is not None:
        mask = mask & padding_mask_function(sequences.padding)(*index)
    mask = mask.expand(len(places), 1, len(rows), len(columns))
    if attention == "sdpa":
        return mask
    return torch.where(mask, torch.zeros((), dtype=dtype, device=device), torch.finfo(dtype).min)


def _is_plain_or_windowed(mask_function: Callable[..., Any]) -> bool:
    from transformers.masking_utils import causal_mask_function

    return mask_function is causal_mask_function or _is_windowed(mask_function)


def _is_windowed(mask_function: Any) -> bool:
    """Whether a mask is the one of transformers for causal attention within a window, recognized by its parts."""
    from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

    example: Any = sliding_window_causal_mask_function(1)
    if getattr(mask_function, "__code__", None) is not example.__code__:
        return False
    parts = inspect.getclosurevars(mask_function).nonlocals["mask_functions"]
    window = next(part for part in inspect.getclosurevars(example).nonlocals["mask_functions"] if part.__closure__)
    kinds = {part.__code__ for part in parts}
    return len(parts) == 2 and kinds == {causal_mask_function.__code__, window.__code__}


def _attention(
    attention: str, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention of transformers over whole sequences.

    Args:
        attention: how the heads of one rank are computed, `sdpa` or `eager`.
        module: attention layer of the model.
        query: `(batch, heads, local length, size)`; key and value likewise, perhaps with fewer heads.
        key: see `query`.
        value: see `query`.
        mask: what `_mask` returned.
        **kwargs: passed on.

    Returns:
        `(batch, local length, heads, size)`, and None for weights.

    Raises:
        ConfigError: the layer asks for something other than causal attention with that mask.
    """
    degrees: ContextDegrees | None = vars(module).get(DEGREES)
    if degrees is None:
        raise ConfigError(
            f"a layer of {type(module).__name__} was added after parallelize, with the configuration of a model that "
            "is split over a context group. Build the whole model first."
        )
    layout = degrees.layout(query.shape[2] * degrees.context_degree)
    window = kwargs.get("sliding_window")
    rows = layout.length if layout.exchanges_heads else layout.local_length
    if mask is None:
        is_exact = layout.exchanges_heads and (window is None or window >= layout.length)
    else:
        is_exact = tuple(mask.shape[2:]) == (rows, layout.length)
    is_causal = kwargs.get("is_causal", True) is not False and getattr(module, "is_causal", True)
    others = [name for name in ("position_bias", "cache") if kwargs.get(name) is not None]
    if not is_exact or not is_causal or others or key.shape[2] != query.shape[2]:
        raise ConfigError(
            f"{type(module).__name__} asks for attention that context_parallel_degree above 1 does not serve: it has a "
            f"mask of its own, a cache, a bias ({', '.join(others) or 'none'}), or is not causal. Use "
            "context_parallel_degree=1."
        )
    inner = _inner_attention(attention, module)

    def compute(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return inner(module, query, key, value, mask, **kwargs)[0]

    return attend(compute, query, key, value, mask, layout, degrees.group), None


def _inner_attention(attention: str, module: Any) -> Callable[..., tuple[Tensor, Any]]:
    if attention == "sdpa":
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward
    # Where transformers looks it up, too: beside the layer, whose class FSDP2 may change.
    name = "eager_attention_forward"
    return next(vars(beside)[name] for beside in _modules_of(module) if name in vars(beside))


def _modules_of(module: nn.Module) -> list[ModuleType]:
    """The Python modules that define the classes of a module, the most derived first."""
    return [sys.modules[kind.__module__] for kind in type(module).__mro__ if kind.__module__ in sys.modules]
