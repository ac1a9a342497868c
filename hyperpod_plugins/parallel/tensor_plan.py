"""Tensor plans: which module is split in which way. This file decides; `tensor.py` acts.

    plan = plan_for(model, config)            # {"model.layers.0.self_attn.q_proj": "colwise", ...}

A style is one of `STYLES` or a `torch.distributed.tensor.parallel.ParallelStyle` of the user's own.
"""

import fnmatch
import sys
from collections.abc import Iterable, Mapping
from typing import Any, cast

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from hyperpod_plugins.errors import DegreeError, NotBuiltYetError, PlanError, few
from hyperpod_plugins.memory.tape import full_name
from hyperpod_plugins.parallel.config import ParallelConfig

STYLES: Mapping[str, str] = {
    "colwise": "split the output features; the result stays split",
    "rowwise": "split the input features; partial results are summed",
    "colwise_gather_output": "split the output features and gather the result (an output head)",
    "embedding_rowwise": "split the vocabulary of an embedding",
    "replicated_with_grad_allreduce": "a norm over split heads: its gradients are summed over the tensor axis",
    "replicate": "leave alone",
}

LLAMA_LIKE_PLAN: Mapping[str, str] = {
    **{f"*.{name}": "colwise" for name in ("q_proj", "k_proj", "v_proj", "wq", "wk", "wv")},
    **{f"*.{name}": "colwise" for name in ("gate_proj", "up_proj", "w1", "w3")},
    **{f"*.{name}": "rowwise" for name in ("o_proj", "wo", "down_proj", "w2")},
    **{f"*.{name}": "embedding_rowwise" for name in ("embed_tokens", "tok_embeddings")},
    **{f"*.{name}": "colwise_gather_output" for name in ("lm_head", "output")},
}
"""Our plan for modules named as in the Llama reference code or in transformers."""

Plan = dict[str, "str | ParallelStyle"]


def plan_for(model: nn.Module, config: ParallelConfig) -> Plan:
    """Decide the style of every module, by full name.

    The user's plan wins; else each Hugging Face model inside brings its own; else `LLAMA_LIKE_PLAN`.

    Raises:
        PlanError: a pattern of the user's, or the whole plan, matches no module; ours matches some modules of a model
            that is not Llama-like; an unknown style.
        DegreeError: a matched module, or the model's attention heads, cannot be split that many ways.
        NotBuiltYetError: the model's own plan asks for styles that are not built (experts).
    """
    if config.tensor_parallel_degree == 1:
        return {}
    if config.tensor_plan != "auto":
        patterns = config.tensor_plan
        plan = _match(model, patterns)
        missed = [p for p in patterns if not any(_matches(name, p) for name in plan)]
        if missed or not plan:
            raise PlanError(_nothing_matched(model, missed))
    else:
        own = _hugging_face_patterns(model)
        plan = _match(model, own or LLAMA_LIKE_PLAN)
        if not plan or not (own or _is_llama_like(plan)):
            raise PlanError(_nothing_matched(model, list(own or LLAMA_LIKE_PLAN), plan))
    unbuilt = sorted({style for style in plan.values() if isinstance(style, str) and style not in STYLES})
    if unbuilt and config.tensor_plan == "auto":
        raise NotBuiltYetError(
            f"the model's own tensor plan uses the styles {unbuilt}, which this release does not serve (mixtures of "
            "experts come later). Set tensor_parallel_degree=1, or pass a tensor_plan for the modules to split."
        )
    if unbuilt:
        raise PlanError(
            f"unknown styles {unbuilt} in tensor_plan; allowed are {list(STYLES)}, or a ParallelStyle object"
        )
    _split_tied_embeddings(model, plan, config)
    _check_sizes(model, plan, config.tensor_parallel_degree)
    return plan


def tied_parameters(model: nn.Module) -> list[list[str]]:
    """Names of parameters that are one and the same, a list for each that has several names."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _hugging_face_patterns(model: nn.Module) -> dict[str, str]:
    """Plans of the transformers models inside, their patterns prefixed with where each model sits."""
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return {}
    patterns: dict[str, str] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, transformers.PreTrainedModel) and not any(p.startswith(f"{prefix}.") for p in patterns):
            patterns |= {
                full_name(prefix, pattern): style for pattern, style in (cast("Any", module).tp_plan or {}).items()
            }
    return patterns


def _match(model: nn.Module, patterns: Mapping[str, Any]) -> Plan:
    """First pattern that matches decides; `*` stands for anything, also across dots."""
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

    A head alone (GPT-2) is not worth the name, and attention whose output layer has another name would break.
    """
    owners = {
        wanted: {name.rpartition(".")[0] for name, style in plan.items() if style == wanted}
        for wanted in ("colwise", "rowwise")
    }
    return bool(owners["colwise"]) and owners["colwise"] == owners["rowwise"]


def _nothing_matched(model: nn.Module, patterns: list[str], matched: Iterable[str] = ()) -> str:
    some = few(map(repr, matched), at_most=8)
    owners = [name for name, module in model.named_modules() if next(module.parameters(False), None) is not None]
    return (
        f"the tensor plan's patterns {patterns} match {f'only some modules ({some})' if some else 'no module'} of "
        f"{type(model).__name__}. Modules with parameters are named "
        f"{few(map(repr, owners), at_most=8)}. Pass tensor_plan={{pattern: style}} with names "
        f"of this model (`*` matches anything; styles: {list(STYLES)}), or set tensor_parallel_degree=1."
    )


def _split_tied_embeddings(model: nn.Module, plan: Plan, config: ParallelConfig) -> None:
    """Plan the embeddings that must be split over the vocabulary: tied to a split head, or opening a split stream."""
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
            "colwise": lambda m: m.out_features,
            "colwise_gather_output": lambda m: m.out_features,
            "rowwise": lambda m: m.in_features,
            "embedding_rowwise": lambda m: m.num_embeddings,
        }
        if isinstance(style, str) and style in size:
            wanted = nn.Embedding if style == "embedding_rowwise" else nn.Linear
            if not isinstance(module, wanted):
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
