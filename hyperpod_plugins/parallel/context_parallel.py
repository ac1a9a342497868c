"""Context parallelism: each rank of a context group computes its part of the same sequences.

`split_contexts(model, ...)` does this in Hugging Face models for causal language modelling, whose code does not change.
The program gives the model whole sequences with labels, equal on all ranks of a group, and gets the loss of the whole:

    before forward   compare the batch with that of the other ranks; pad it, shift the labels, cut this rank's part
    masks            from the positions of whole sequences, by the functions that transformers would use on one process
    attention        over whole sequences (`context_attention.py`)
    after forward    the loss of whole sequences, whose gradient is right under FSDP2; logits, of which any use raises

A model of another kind uses a `SequenceContext` in its own forward (`sequence_context.py`).
"""

import inspect
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # pyright: ignore[reportPrivateUsage]

from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.memory.chunked_loss import IGNORED, UnusableLogits, derived_class, is_causal_language_model
from hyperpod_plugins.parallel.config import CONTEXT_COMM_TYPES, ContextCommType, ParallelConfig
from hyperpod_plugins.parallel.context_attention import SequenceLayout, attend, mean_over_context
from hyperpod_plugins.parallel.context_checks import (
    SPLIT_INPUTS,
    check_split_call,
    check_split_model,
    check_unchanged,
    refuse_mixing_modules,
)
from hyperpod_plugins.parallel.ring_attention import attend_in_ring
from hyperpod_plugins.parallel.sequence_context import DEGREES, ContextDegrees, check_alike, refuse_dropout
from hyperpod_plugins.parallel.topology import context_group

_USES_CONTEXT = "uses_sequence_context"
_CHOOSE_ATTENTION = "_hyperpod_choose_attention"
"""Attribute of a language model: its modules whose configuration chooses the attention."""
_NUM_COLUMNS = "hyperpod_num_columns"
"""Argument that the layers of a model pass on to attention."""
_MIXES_DOCUMENTS = ("gpt_oss",)
"""Models that do not pass positions on to the masks of transformers (5.23)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextAttention:
    """How attention of whole sequences is computed in a model of transformers."""

    kind: str
    """Of the heads of one rank: `sdpa` or `eager`."""
    comm_type: ContextCommType
    """How ranks communicate; not `auto`."""

    @property
    def exchanges_heads(self) -> bool:
        """Whether each rank has whole sequences of some heads."""
        return self.comm_type == "a2a"

    @property
    def is_causal_alone(self) -> bool:
        """Whether plain causal attention takes no mask."""
        return self.comm_type != "all_gather"

    @property
    def name(self) -> str:
        """Name under which transformers knows it."""
        return f"hyperpod_context_{self.kind}_{self.comm_type}"

    @classmethod
    def of(cls, config: Any, degrees: ContextDegrees) -> "ContextAttention":
        """Return the attention of a model with this configuration, whose heads tensor peers divide among them.

        Raises:
            ConfigError: `context_comm_type` is not possible for it.
        """
        kind, asked = config._attn_implementation, degrees.comm_type
        if kind == "eager":
            # Such functions of the models may read parameters of each head, such as sinks, from their module.
            if asked in ("a2a", "p2p"):
                raise ConfigError(
                    f"context_comm_type={asked!r} is for attn_implementation='sdpa', but the attention of this model "
                    "is 'eager'. Use 'all_gather' or 'auto'."
                )
            return cls(kind=kind, comm_type="all_gather")
        if asked == "p2p":
            refuse_dropout(getattr(config, "attention_dropout", 0.0))
        return cls(kind=kind, comm_type=degrees.comm_type_for(config.num_attention_heads, config.num_key_value_heads))


_ATTENTIONS = [
    *(ContextAttention(kind="sdpa", comm_type=comm_type) for comm_type in CONTEXT_COMM_TYPES if comm_type != "auto"),
    ContextAttention(kind="eager", comm_type="all_gather"),
]


def split_contexts(model: nn.Module, config: ParallelConfig, shard_degree: int) -> None:
    """Let each rank compute its part of the sequences, in place. Call it before the model is sharded.

    Args:
        model: contains one causal language model of transformers, or modules that use a `SequenceContext`.
        config: configuration to apply; without context parallelism nothing is done.
        shard_degree: of the mesh.

    Raises:
        ConfigError: this is not known to be exact for the model.
    """
    degree = config.context_parallel_degree
    if degree == 1:
        return
    is_own = any(getattr(part, _USES_CONTEXT, False) for part in model.modules())
    found = causal_language_models(model)
    if is_own == bool(found) or len(found) > 1:
        raise ConfigError(
            f"context_parallel_degree={degree} needs one causal language model of transformers, but "
            f"{type(model).__name__} contains {len(found)}{' and modules that use a SequenceContext' * is_own}. For a "
            "model of your own, see hyperpod_plugins.parallel.SequenceContext; otherwise use "
            "context_parallel_degree=1."
        )
    tensor_degree = config.tensor_parallel_degree
    degrees = ContextDegrees(
        shard_degree=shard_degree,
        tensor_degree=tensor_degree,
        context_degree=degree,
        comm_type=config.context_comm_type,
    )
    if is_own:
        refuse_mixing_modules(model)
    else:
        _split_language_model(found[0], model, degrees)
    context_group(shard_degree, tensor_degree, degree)  # there must be one
    for part in model.modules():
        vars(part)[DEGREES] = degrees


def causal_language_models(model: nn.Module) -> list[Any]:
    """Return the modules of a model that are causal language models of transformers."""
    return [part for part in model.modules() if is_causal_language_model(part)]


def tokens_of_sequences() -> Tensor | None:
    """Return which tokens of the forward that this thread runs are of its sequences, `(batch x local length,)`.

    The others were added so that all ranks have equal parts. None if there are no others.
    """
    sequences = _running.sequences
    if sequences is None or sequences.num_tokens == sequences.layout.length:
        return None
    positions = sequences.layout.positions(sequences.rank, sequences.positions.device)
    return (positions < sequences.num_tokens).repeat(len(sequences.positions))


def context_degree_of(model: nn.Module) -> int:
    """Return the number of ranks that the sequences of a model are split over."""
    held: list[ContextDegrees] = [vars(part)[DEGREES] for part in model.modules() if DEGREES in vars(part)]
    return max((degrees.context_degree for degrees in held), default=1)


def _split_language_model(model: Any, root: nn.Module, degrees: ContextDegrees) -> None:
    from transformers import PreTrainedModel

    kind: Any = type(model)
    check_split_model(model, root, kind.loss_function.__get__(model))
    attention = ContextAttention.of(model.config, degrees)
    _register()
    choosing: list[Any] = [
        part for part in model.modules() if isinstance(part, PreTrainedModel) or "is_causal" in vars(part)
    ]
    vars(model)[_CHOOSE_ATTENTION] = choosing
    for part in choosing:
        part.config._attn_implementation = attention.name
    split = _SplitForward(degrees, attention, kind)

    @wraps(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        own, sequences = split.part(self, args, kwargs)
        _running.sequences, _running.has_mask = sequences, False
        try:
            output = kind.forward(self, **own)
        finally:
            _running.sequences = None
        return split.whole(output, sequences)

    # Not hooks: wrappers such as PEFT's call `model.forward(...)`.
    model.__class__ = derived_class(kind, {"forward": forward})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sequences:
    """The whole sequences of the forward that is running."""

    layout: SequenceLayout
    rank: int
    positions: Tensor
    """`(batch, length)`."""
    documents: Tensor | None
    """Number of the document of each token, `(batch, length)`; None if a sequence is one document."""
    num_tokens: int
    """Length without what was added so that all ranks have equal parts."""
    padding: Tensor | None
    """True where a token may be attended to, `(batch, length)`; None if all may."""


class _Running(threading.local):
    """What is known of the forward that this thread is running, for the masks that transformers asks for."""

    sequences: _Sequences | None = None
    has_mask: bool = False
    """Whether it has asked for one."""


_running = _Running()


class LogitsOfPart(UnusableLogits):
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

    def __init__(self, degrees: ContextDegrees, attention: ContextAttention, kind: Any) -> None:
        self._degrees, self._attention, self._kind = degrees, attention, kind
        self._signature = inspect.signature(kind.forward)

    def part(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], _Sequences]:
        """Return the arguments for this rank's part, and the whole sequences.

        Raises:
            ConfigError: an argument cannot be split, the ranks of the group have different sequences, or the program
                has changed the model to one that cannot be split.
        """
        asked = {part.config._attn_implementation for part in vars(model)[_CHOOSE_ATTENTION]}
        check_unchanged(model, self._attention.name, asked, self._kind.loss_function.__get__(model))
        given = self._arguments(args, kwargs)
        check_split_call(given)
        group = self._degrees.group
        ids: Tensor = given["input_ids"]
        batch, length = ids.shape
        layout = SequenceLayout.of(length, group.size(), exchanges_heads=self._attention.exchanges_heads)
        rank, added = group.rank(), layout.length - length
        kept, positions = given.get("attention_mask"), given.get("position_ids")
        lacks_some = begins_again = torch.zeros((), dtype=torch.bool)
        if kept is not None:
            kept = kept.to(ids.device, torch.bool)
            lacks_some = ~kept.all()
        elif positions is not None:
            begins_again = _begins_again(positions).any()
        has_padding, has_documents = check_alike(_compared(given), group, lacks_some, begins_again)
        padding = F.pad(kept, (0, added)) if kept is not None and has_padding else None
        if positions is None:
            positions = torch.arange(length, device=ids.device)[None]
        more = positions[:, -1:] + torch.arange(1, added + 1, device=ids.device)
        positions = torch.cat([positions, more], dim=1).expand(batch, -1)
        documents = None
        if has_documents:
            _check_documents(model, given)
            documents = F.pad(_begins_again(positions), (1, 0)).cumsum(dim=1)
        ignored = given.get("ignore_index", IGNORED)
        targets = given.get("shift_labels")
        if targets is None:
            targets = F.pad(given["labels"], (0, 1), value=ignored)[:, 1:]
        count = given.get("num_items_in_batch")
        count = (targets != ignored).sum() if count is None else count
        own_targets = layout.part(F.pad(targets, (0, added), value=ignored), rank)
        own_ids = layout.part(F.pad(ids, (0, added)), rank)
        sequences = _Sequences(
            layout=layout, rank=rank, positions=positions, documents=documents, num_tokens=length, padding=padding
        )
        own = {
            "input_ids": own_ids,
            "position_ids": layout.part(positions, rank),
            "attention_mask": torch.ones_like(own_ids),  # so that transformers looks for no documents in a part
            "labels": own_targets,
            "shift_labels": own_targets,
            "num_items_in_batch": count / group.size(),
            "use_cache": False,
        }
        if has_padding and self._attention.kind == "eager":
            # Eager attention of a token that may attend to none has equal weights for all of its sequence.
            own[_NUM_COLUMNS] = length
        return given | own, sequences

    def whole(self, output: Any, sequences: _Sequences) -> Any:
        """Replace this rank's share of the loss by the loss of whole sequences, and its logits by what refuses use.

        Raises:
            ConfigError: the forward did not ask for the mask of whole sequences.
        """
        if not _running.has_mask:
            raise ConfigError(
                f"the forward of {self._kind.__name__} did not ask for a mask of whole sequences, so a rank may have "
                "attended to its part only. Leave the forward of the model as transformers has it, or use "
                "context_parallel_degree=1."
            )
        loss, logits, *rest = output if isinstance(output, tuple) else (output["loss"], output["logits"])
        loss = mean_over_context(loss, self._degrees.group)
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


def _compared(given: Mapping[str, Any]) -> dict[str, Tensor | None]:
    """What must be the same on all ranks of a context group, by name."""
    compared: dict[str, Tensor | None] = {name: given.get(name) for name in SPLIT_INPUTS}
    for name in ("num_items_in_batch", "ignore_index"):
        compared[name] = None if name not in given else torch.as_tensor(given[name])
    return compared


def _begins_again(positions: Tensor) -> Tensor:
    """Whether a document ends before each position but the first, as transformers sees it: `(batch, length - 1)`."""
    return positions.diff(dim=1) != 1


def _check_documents(model: Any, given: Mapping[str, Any]) -> None:
    """Refuse sequences of several documents where, on one process, tokens would attend to earlier documents."""
    recomputes = model.training and any(getattr(part, "gradient_checkpointing", False) for part in model.modules())
    problem = ""
    if model.config.model_type in _MIXES_DOCUMENTS:
        problem = (
            f"{type(model).__name__} of transformers lets tokens attend to earlier documents. Give it samples of one "
            "document, or use another model."
        )
    elif given.get("use_cache", model.config.use_cache) and not recomputes:
        problem = (
            "use_cache is true in the model's configuration: transformers then lets tokens attend to earlier "
            "documents. Set model.config.use_cache = False, or pass use_cache=False."
        )
    if problem:
        raise ConfigError(f"position_ids begin again within a sequence, so it has several documents, but {problem}")


# -- what transformers calls ----------------------------------------------------------------------------------------


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    for attention in _ATTENTIONS:
        AttentionInterface.register(attention.name, partial(_attention, attention))
        AttentionMaskInterface.register(attention.name, partial(_mask, attention))


@_disable_dynamo
def _mask(
    attention: ContextAttention,
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
            "a part of a model with context_parallel_degree above 1 was called by itself, or another model that "
            "shares its configuration object. Call the whole causal language model, which splits its sequences; give "
            "another model a copy of the configuration (copy.deepcopy(config))."
        )
    _running.has_mask = True
    layout, device = sequences.layout, sequences.positions.device
    if use_vmap or not _is_plain_or_windowed(mask_function) or q_length != kv_length:
        raise ConfigError(
            "context_parallel_degree above 1 serves causal attention, also within a window of a fixed size. This model "
            f"asks for another mask ({getattr(mask_function, '__qualname__', mask_function)})."
        )
    is_whole = sequences.documents is None and sequences.padding is None
    if attention.is_causal_alone and is_whole and not is_windowed(mask_function):
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
    if attention.kind == "sdpa":
        return mask
    return torch.where(mask, torch.zeros((), dtype=dtype, device=device), torch.finfo(dtype).min)


def _is_plain_or_windowed(mask_function: Callable[..., Any]) -> bool:
    from transformers.masking_utils import causal_mask_function

    return mask_function is causal_mask_function or is_windowed(mask_function)


def is_windowed(mask_function: Any) -> bool:
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
    attention: ContextAttention,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of transformers over whole sequences.

    Args:
        attention: how it is computed.
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
            f"a {type(module).__name__} that was not in the model when it was parallelized has the configuration of "
            "one that is split over a context group. Build the whole model first; give another model a copy of the "
            "configuration (copy.deepcopy(config))."
        )
    group = degrees.group
    layout = SequenceLayout(
        length=query.shape[2] * degrees.context_degree,
        degree=degrees.context_degree,
        exchanges_heads=attention.exchanges_heads,
    )
    num_columns: int = kwargs.pop(_NUM_COLUMNS, 0)
    window = kwargs.get("sliding_window")
    rows = layout.length if layout.exchanges_heads else layout.local_length
    if mask is None:
        is_exact = attention.is_causal_alone and (window is None or window >= layout.length)
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
    if kwargs.get("s_aux") is not None:
        num_columns = 0  # a token that may attend to none attends to the sink
    return attend_as(attention, module, query, key, value, mask, layout, group, num_columns, **kwargs), None


def attend_as(
    attention: ContextAttention,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    layout: SequenceLayout,
    group: dist.ProcessGroup,
    num_columns: int = 0,
    **kwargs: Any,
) -> Tensor:
    """Compute attention of whole sequences for a layer of transformers; see `attend` and `attend_in_ring`.

    Args:
        attention: how it is computed.
        module: attention layer of the model, whose arguments `kwargs` are.
        query: see `attend`, and so for all that follow.
        key: see there.
        value: see there.
        mask: see there.
        layout: see there.
        group: see there.
        num_columns: see there.
        **kwargs: passed on to the attention of one process.

    Raises:
        ConfigError: it has dropout, and keys are passed round a ring.
    """
    if attention.comm_type == "p2p":
        refuse_dropout(kwargs.get("dropout", 0.0))
        return attend_in_ring(query, key, value, mask, layout, group, scale=kwargs.get("scaling"))
    inner = _inner_attention(attention.kind, module)

    def compute(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return inner(module, query, key, value, mask, **kwargs)[0]

    return attend(compute, query, key, value, mask, layout, group, num_columns=num_columns)


def _inner_attention(kind: str, module: Any) -> Callable[..., tuple[Tensor, Any]]:
    """Return the attention of one process, `sdpa` or `eager`, for a layer of transformers."""
    if kind == "sdpa":
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward
    # Where transformers looks it up, too: beside the layer, whose class FSDP2 may change.
    name = "eager_attention_forward"
    return next(vars(beside)[name] for beside in _modules_of(module) if name in vars(beside))


def _modules_of(module: nn.Module) -> list[ModuleType]:
    """The Python modules that define the classes of a module, the most derived first."""
    return [sys.modules[kind.__module__] for kind in type(module).__mro__ if kind.__module__ in sys.modules]
