"""Tensor parallelism: `plan_for` decides how each module is split, `shard_tensors` applies that with DTensor.

    plan = plan_for(model, config)            # {"model.layers.0.self_attn.q_proj": "colwise", ...}
    shard_tensors(model, mesh["tensor"], plan, config)

A style is one of `STYLES` or a user's own `torch.distributed.tensor.parallel.ParallelStyle`.

[Note: shared input] Several column-parallel layers read the same tensor: query, key and value; gate and up. Each of
them alone would sum that tensor's gradient over the tensor axis in its backward. Instead, the tensor is converted
once to a replicated DTensor: the layers' gradients accumulate as partial sums, and cross the network once.

[Note: sequence parallel] Between tensor-parallel regions the residual stream is a DTensor split over the sequence
(dimension 1). It stays a DTensor, not a local tensor, so that models which read `hidden.shape[1]` (for positions
and masks) see the whole sequence. The shared input above then gathers it, and scatters its gradient. Source of the
scheme: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022.
"""

import fnmatch
import sys
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from hyperpod_plugins.delayed_init.tape import full_name
from hyperpod_plugins.errors import DegreeError, NotBuiltYetError, PlanError, format_list
from hyperpod_plugins.parallel.config import ParallelConfig
from hyperpod_plugins.parallel.expert_parallel import layers_of_experts
from hyperpod_plugins.parallel.tensor_plans import (
    SPLIT_EXPERTS,
    complete_plan,
    experts_style,
    output_embedding,
    plan_of_known_blocks,
    refuse_fixed_heads,
    uses_known_blocks,
)
from hyperpod_plugins.parallel.tensor_styles import (
    ColwiseConv1D,
    PackedColwise,
    RowwiseConv1D,
    in_features,
    is_conv1d,
    out_features,
)

STYLES: Mapping[str, str] = {
    "colwise": "split the output features; the result stays split",
    "rowwise": "split the input features; partial results are summed",
    "colwise_gather_output": "split the output features and gather the result (an output head)",
    "embedding_rowwise": "split the vocabulary of an embedding",
    "replicated_with_grad_allreduce": "a norm over split heads: its gradients are summed over the tensor axis",
    "replicate": "leave unchanged",
}

LLAMA_LIKE_PLAN: Mapping[str, str] = {
    **{f"*.{name}": "colwise" for name in ("q_proj", "k_proj", "v_proj", "wq", "wk", "wv")},
    **{f"*.{name}": "colwise" for name in ("gate_proj", "up_proj", "w1", "w3")},
    **{f"*.{name}": "rowwise" for name in ("o_proj", "wo", "down_proj", "w2")},
    **{f"*.{name}": "embedding_rowwise" for name in ("embed_tokens", "tok_embeddings")},
    **{f"*.{name}": "colwise_gather_output" for name in ("lm_head", "output")},
}
"""Default plan, for modules named as in the Llama reference code or in transformers."""

Plan = dict[str, "str | ParallelStyle"]
_SPLITS_EXPERTS = "moe_tp_experts"
"""Style of layers of experts in transformers' plans."""


def plan_for(model: nn.Module, config: ParallelConfig) -> Plan:
    """Return the style of every module to split, by full name.

    Uses the user's plan if there is one, else those of the transformers models inside `model`: their own, or ours for
    their blocks (`tensor_plans.py`); else `LLAMA_LIKE_PLAN`.

    Raises:
        PlanError: one of the user's patterns, or the whole plan, matches no module; `LLAMA_LIKE_PLAN` matches modules
            of a model that is not Llama-like; a style is unknown; the user's plan splits layers of a module whose code
            uses its whole number of heads.
        DegreeError: a matched module, or the model's attention heads, cannot be split that many ways.
        NotBuiltYetError: the model's own plan uses unsupported styles (experts), or the plan does not support
            `sequence_parallel`.
    """
    if config.tensor_parallel_degree == 1:
        return {}
    if config.tensor_plan != "auto":
        patterns = config.tensor_plan
        plan = match_modules(model, patterns)
        missed = [p for p in patterns if not any(_matches(name, p) for name in plan)]
        if missed or not plan:
            raise PlanError(_nothing_matched(model, missed))
        if config.expert_parallel_degree > 1:
            _check_beside_experts(model, plan, config.expert_parallel_degree)
        complete_plan(model, plan)
        refuse_fixed_heads(model, plan)
    else:
        own = _hugging_face_patterns(model, config.tensor_parallel_degree)
        plan = match_modules(model, own or LLAMA_LIKE_PLAN)
        if config.expert_parallel_degree > 1:
            experts = layers_of_experts(model)
            plan = {name: style for name, style in plan.items() if name not in experts}
        _plan_experts(model, plan)
        if not plan or not (own or _is_llama_like(plan)):
            raise PlanError(_nothing_matched(model, list(own or LLAMA_LIKE_PLAN), plan))
    unbuilt = sorted({style for style in plan.values() if isinstance(style, str) and style not in STYLES})
    if unbuilt and config.tensor_plan == "auto":
        raise NotBuiltYetError(
            f"the model's own tensor plan uses the styles {unbuilt}, which this release does not support (of mixtures "
            f"of experts: only {', '.join(SPLIT_EXPERTS)}). Set tensor_parallel_degree=1, or pass a tensor_plan for "
            "the modules to split."
        )
    if config.sequence_parallel and uses_known_blocks(plan):
        raise NotBuiltYetError(
            f"sequence_parallel=True is not supported with the tensor plan of {type(model).__name__}, which splits "
            f"{format_list(map(repr, plan), at_most=4)}. Set sequence_parallel=False."
        )
    if unbuilt:
        raise PlanError(
            f"unknown styles {unbuilt} in tensor_plan; allowed are {list(STYLES)}, or a ParallelStyle object"
        )
    _split_tied_embeddings(model, plan, config)
    _check_sizes(model, plan, config.tensor_parallel_degree)
    return plan


def _check_beside_experts(model: nn.Module, plan: Plan, degree: int) -> None:
    """Refuse what a user's plan asks for that experts which are divided among ranks do not go with."""
    if experts := sorted(plan.keys() & layers_of_experts(model).keys()):
        raise PlanError(
            f"tensor_plan splits {format_list(experts)}, whose experts expert_parallel_degree={degree} divides among "
            "ranks. Leave them out of tensor_plan, or use expert_parallel_degree=1."
        )
    if objects := sorted(name for name, style in plan.items() if not isinstance(style, str)):
        raise NotBuiltYetError(
            f"expert_parallel_degree={degree} is not served yet with a tensor_plan that has ParallelStyle objects "
            f"({format_list(objects)}): they may leave tokens split that tensor peers have to share. Use styles by "
            "name, or expert_parallel_degree=1."
        )


def tied_parameters(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several, one list per parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _hugging_face_patterns(model: nn.Module, degree: int) -> Plan:
    """Return the plans of the transformers models inside, each pattern prefixed with its model's path."""
    patterns: Plan = {}
    for prefix, module in _hugging_face_models(model):
        if any(p.startswith(full_name(prefix, "")) for p in patterns):
            continue
        own: Plan = dict(module.tp_plan or {})
        if known := plan_of_known_blocks(module, degree):
            head = output_embedding(module, degree)
            own = known | {name: style for name, style in own.items() if style != "colwise_gather_output"}
            own |= {head: "colwise_gather_output"} if head else {}
        patterns |= {full_name(prefix, pattern): style for pattern, style in own.items()}
    return patterns


def _hugging_face_models(model: nn.Module) -> list[tuple[str, Any]]:
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return []
    return [(name, part) for name, part in model.named_modules() if isinstance(part, transformers.PreTrainedModel)]


def _plan_experts(model: nn.Module, plan: Plan) -> None:
    """Replace the style of transformers' plans for layers of experts by ours, where it is known to be exact."""
    for prefix, module in _hugging_face_models(model):
        for name, _ in module.named_modules():
            if plan.get(full_name(prefix, name)) == _SPLITS_EXPERTS:
                plan[full_name(prefix, name)] = experts_style(module, name) or _SPLITS_EXPERTS


def match_modules(model: nn.Module, patterns: Mapping[str, Any]) -> Plan:
    """Return the style of each matched module; the first matching pattern wins, and `*` also matches across dots."""
    plan: Plan = {}
    for name, _ in model.named_modules():
        for pattern, style in patterns.items():
            if name and _matches(name, pattern):
                plan[name] = style
                break
    return plan


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(f".{name}", pattern)


def _is_llama_like(plan: Plan) -> bool:
    """Whether each module that owns column-parallel layers also owns the row-parallel one that ends the region.

    A plan that matches only the head (GPT-2) does not count, and attention whose output layer has another name would
    break.
    """
    owners = {
        wanted: {name.rpartition(".")[0] for name, style in plan.items() if style == wanted}
        for wanted in ("colwise", "rowwise")
    }
    return bool(owners["colwise"]) and owners["colwise"] == owners["rowwise"]


def _nothing_matched(model: nn.Module, patterns: list[str], matched: Iterable[str] = ()) -> str:
    some = format_list(map(repr, matched), at_most=8)
    owners = [name for name, module in model.named_modules() if next(module.parameters(False), None) is not None]
    return (
        f"the tensor plan's patterns {patterns} match {f'only some modules ({some})' if some else 'no module'} of "
        f"{type(model).__name__}. Modules with parameters are named "
        f"{format_list(map(repr, owners), at_most=8)}. Pass tensor_plan={{pattern: style}} with names "
        f"of this model (`*` matches anything; styles: {list(STYLES)}), or set tensor_parallel_degree=1."
    )


def _split_tied_embeddings(model: nn.Module, plan: Plan, config: ParallelConfig) -> None:
    """Add embeddings to the plan that must be split: tied to a split head, or at the start of a split stream."""
    tied = {owner for group in tied_parameters(model) for owner in (n.rpartition(".")[0] for n in group) if owner}
    has_split_head = any(style == "colwise_gather_output" and name in tied for name, style in plan.items())
    if config.tensor_plan != "auto" and not has_split_head:
        return
    for name, module in model.named_modules():
        needs_split = config.sequence_parallel or (has_split_head and name in tied)
        if isinstance(module, nn.Embedding) and name not in plan and needs_split:
            plan[name] = "embedding_rowwise"


def _check_sizes(model: nn.Module, plan: Plan, degree: int) -> None:
    for name, style in plan.items():
        module = model.get_submodule(name)
        size = {
            "colwise": out_features,
            "colwise_gather_output": out_features,
            "rowwise": in_features,
            "embedding_rowwise": lambda m: m.num_embeddings,
        }
        if isinstance(style, str) and style in size:
            wanted = nn.Embedding if style == "embedding_rowwise" else nn.Linear
            if not isinstance(module, wanted) and not (wanted is nn.Linear and is_conv1d(module)):
                raise PlanError(
                    f"the style {style!r} needs an nn.{wanted.__name__}, but {name!r} is a {type(module).__name__}. "
                    "Correct the pattern in tensor_plan, or pass a ParallelStyle object for this module."
                )
            if size[style](module) % degree:
                raise DegreeError(
                    f"{name!r} ({style}) has {size[style](module)} features, which tensor_parallel_degree={degree} "
                    f"does not divide. {_fitting(size[style](module))}"
                )
    transformers = sys.modules.get("transformers")
    for module in model.modules():
        if transformers is not None and isinstance(module, transformers.PreTrainedModel):
            _check_heads(cast("Any", module.config).to_dict(), degree)


def _check_heads(hf_config: Mapping[str, Any], degree: int) -> None:
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = hf_config.get(key)
        if isinstance(heads, int) and heads % degree:
            raise DegreeError(
                f"the model has {key}={heads}, which tensor_parallel_degree={degree} does not divide. {_fitting(heads)}"
            )


def _fitting(size: int) -> str:
    return f"It can be one of {[d for d in range(1, min(size, 64) + 1) if size % d == 0]}."


# Applying a plan.

_SEQUENCE_DIM = 1


def shard_tensors(model: nn.Module, mesh: DeviceMesh, plan: Plan, config: ParallelConfig) -> None:
    """Convert the planned modules' parameters to DTensors over the 1-axis `mesh`, in place, without communication.

    Tied parameters stay tied.

    Raises:
        PlanError: the plan splits two tied parameters differently.
    """
    if not plan:
        return
    ties = tied_parameters(model)
    frozen = [name for name, each in model.named_parameters(remove_duplicate=False) if not each.requires_grad]
    styles = {
        name: _style(style, config, model.get_submodule(name)) for name, style in plan.items() if style != "replicate"
    }
    if config.sequence_parallel:
        styles |= {name: SequenceParallel(use_local_output=False) for name in _norms_on_stream(model, plan)}
    for name in styles:  # hooks run in registration order, and this one must precede those that read the input
        if not isinstance(plan.get(name), ParallelStyle):  # a user's own style may read keyword arguments itself
            model.get_submodule(name).register_forward_pre_hook(_give_by_position, with_kwargs=True)
    for owner, names in _readers_of_one_tensor(plan).items():
        _SharedInput(model.get_submodule(owner), map(model.get_submodule, names), mesh)
    parallelize_module(model, mesh, styles, src_data_rank=None)
    for name in frozen:  # torch's `SequenceParallel` makes parameters that are trained
        model.get_parameter(name).requires_grad_(False)
    _retie(model, ties)


class _SharedInput:
    """Converts the input of a module's column-parallel layers to a replicated DTensor, once per forward.

    See [Note: shared input].
    """

    def __init__(self, owner: nn.Module, layers: Iterable[nn.Module], mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._read: torch.Tensor | None = None
        self._replicated: torch.Tensor | None = None
        for layer in layers:
            layer.register_forward_pre_hook(self._replicate)
        owner.register_forward_hook(self._forget, always_call=True)

    def _replicate(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        tensor, *rest = args
        if tensor is not self._read:
            whole = [Replicate()]
            self._read = tensor
            self._replicated = (
                tensor.redistribute(placements=whole)
                if isinstance(tensor, DTensor)
                else DTensor.from_local(tensor, self._mesh, whole, run_check=False)
            )
        return (self._replicated, *rest)

    def _forget(self, *_: object) -> None:
        self._read = self._replicated = None


def _give_by_position(
    _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Rewrite `q_proj(input=x)` as `q_proj(x)`: the hooks of DTensor's styles, and ours, read only position 0."""
    if args or not kwargs:
        return None
    first, *others = kwargs
    return (kwargs[first],), {name: kwargs[name] for name in others}


def _style(style: "str | ParallelStyle", config: ParallelConfig, module: nn.Module) -> ParallelStyle:
    if isinstance(style, ParallelStyle):
        return style
    split = config.sequence_parallel
    stream = Shard(_SEQUENCE_DIM) if split else Replicate()
    colwise, rowwise = (ColwiseConv1D, RowwiseConv1D) if is_conv1d(module) else (ColwiseParallel, RowwiseParallel)
    match style:
        case "colwise":  # its input is already replicated: see [Note: shared input]
            return colwise()
        case "rowwise":
            return rowwise(output_layouts=stream, use_local_output=not split)
        case "embedding_rowwise":
            return RowwiseParallel(input_layouts=Replicate(), output_layouts=stream, use_local_output=not split)
        case "colwise_gather_output" if config.loss_parallel:
            return colwise(input_layouts=stream, output_layouts=Shard(-1), use_local_output=False)
        case "colwise_gather_output":
            return colwise(input_layouts=stream, output_layouts=Replicate())
        case _:  # replicated_with_grad_allreduce: (batch, sequence, heads, head size), heads split
            return SequenceParallel(sequence_dim=2, use_local_output=True)


def _readers_of_one_tensor(plan: Plan) -> dict[str, list[str]]:
    """Group the column-parallel layers by the module that owns them and passes them its input."""
    readers: dict[str, list[str]] = {}
    for name, style in plan.items():
        if style == "colwise" or isinstance(style, PackedColwise):
            readers.setdefault(name.rpartition(".")[0], []).append(name)
    return readers


def _norms_on_stream(model: nn.Module, plan: Plan) -> list[str]:
    """Return the normalization layers on the residual stream: those that are not in the plan."""
    return [
        name for name, module in model.named_modules() if "norm" in type(module).__name__.lower() and name not in plan
    ]


def _retie(model: nn.Module, ties: list[list[str]]) -> None:
    for first, *others in ties:
        kept = model.get_parameter(first)
        for other in others:
            owner, _, attribute = other.rpartition(".")
            if _placements(model.get_parameter(other)) != _placements(kept):
                raise PlanError(
                    f"{first!r} and {other!r} are one tied parameter, but the tensor plan splits them differently "
                    f"({_placements(kept)} and {_placements(model.get_parameter(other))}). "
                    "Give both modules styles that split the same dimension, such as embedding_rowwise with colwise."
                )
            model.get_submodule(owner).register_parameter(attribute, kept)


def _placements(tensor: torch.Tensor) -> object:
    return tensor.placements if isinstance(tensor, DTensor) else "whole"
