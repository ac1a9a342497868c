"""Tensor plans for blocks of transformers models that bring none: GPT-2, GPT-J, Falcon, Bloom, BERT, RoBERTa, T5, ViT.

A plan belongs to the class of an attention or a feed-forward block, not to names: it is exact because of what that
class's forward computes. So a subclass, or a layer that something has replaced, such as an adapter, is not recognised.
Every model class that is made of such blocks is served, whatever head it has; what is outside of them stays whole,
except the output embedding where the degree divides the vocabulary.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from hyperpod_plugins.delayed_init.tape import full_name
from hyperpod_plugins.errors import DegreeError, PlanError, format_list
from hyperpod_plugins.parallel.expert_parallel import layers_of_experts
from hyperpod_plugins.parallel.tensor_styles import (
    Block,
    ClonedResult,
    DividedHeads,
    HeadEmbedding,
    PackedColwise,
    TensorExperts,
    is_conv1d,
    out_features,
)

Styles = dict[str, "str | ParallelStyle"]
_NUMBER_OF_HEADS = re.compile(r"(n|num|nr|number_of)?_?(\w+_)?n?heads?(_kv|_q)?")
_NOT_COMPUTING = ("__init__", "extra_repr", "__repr__", "reset_parameters", "_init_weights", "__setstate__")
SPLIT_EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe")
"""Models of transformers whose experts are split by their inner features, as their own plans say."""


def plan_of_known_blocks(model: nn.Module, degree: int) -> Styles:
    """Return the styles for the known blocks of a transformers model, by full name; none if there are none.

    Raises:
        DegreeError: the degree does not divide a block's heads.
        PlanError: a layer of such a block has been replaced, or computes what cannot be split exactly.
    """
    plan: Styles = {}
    for name, block in model.named_modules():
        styles_of = _BLOCKS.get(_class_name(block))
        if styles_of is None:
            continue
        for path, style in styles_of(block).items():
            _check_layer(name, block, path, style, degree)
            plan[full_name(name, path) if path else name] = style
    return plan


def complete_plan(model: nn.Module, plan: Styles) -> None:
    """Add to a user's plan, in place, what known blocks of which it splits all layers need besides.

    Raises:
        PlanError: it splits a packed projection as if it were none.
    """
    for name, block in model.named_modules():
        styles_of = _BLOCKS.get(_class_name(block))
        styles = (
            {full_name(name, path) if path else name: style for path, style in styles_of(block).items()}
            if styles_of
            else {}
        )
        split = {
            each for each, style in plan.items() if each in styles and isinstance(style, str) and style != "replicate"
        }
        for each in split:
            if isinstance(styles[each], PackedColwise):
                raise PlanError(
                    f"tensor_plan splits {each} {plan[each]!r}, but {type(block).__name__} computes queries, keys and "
                    "values with it, one after the other, and a rank would get the wrong ones. Leave tensor_plan out, "
                    "or give it the style 'replicate' there, and to the layer that reads its result."
                )
        if split and split >= {each for each, style in styles.items() if isinstance(style, str)}:
            for each, style in styles.items():
                plan.setdefault(each, style)


def refuse_fixed_heads(model: nn.Module, plan: Styles) -> None:
    """Refuse a user's plan that splits layers of modules whose code uses their whole number of heads.

    Such code may compute something else with a share of the features, without an error. A module that the plan names
    itself, with `"replicate"` or a `ParallelStyle`, is taken to be right.

    Raises:
        PlanError: there is such a module.
    """
    found: dict[str, str] = {}
    for name, style in plan.items():
        owner, number = _owner_with_heads(model, name) if style == "colwise" else ("", "")
        if number and owner not in plan:
            found[owner] = number
    if found:
        owner, number = next(iter(found.items()))
        kind = type(model.get_submodule(owner))
        raise PlanError(
            f"tensor_plan splits layers of {format_list(map(repr, found), at_most=4)}, but the code of {kind.__name__} "
            f"uses {number}, the number of all heads, where a rank has only a share of their features: it may compute "
            "something else without an error. Let propose_tensor_plan compare the plan with one process; or write view("
            f"batch, sequence, -1, head_size). If the code is right for a share, give {owner!r} itself the style "
            f"'replicate' in tensor_plan; to have each rank divide the number, DividedHeads(({number!r},)) of "
            "hyperpod_plugins.parallel.tensor_styles."
        )


def owners_with_heads(model: nn.Module, plan: Mapping[str, Any]) -> set[str]:
    """Names of the modules that `refuse_fixed_heads` would refuse, unless the plan names them."""
    owners = (_owner_with_heads(model, name) for name, style in plan.items() if style == "colwise")
    return {owner for owner, number in owners if number}


def _owner_with_heads(model: nn.Module, name: str) -> tuple[str, str]:
    """The nearest module around a layer that has a number of heads, and its name if the module's code uses it."""
    layer: Any = model.get_submodule(name)
    while name:
        name = name.rpartition(".")[0]
        owner: Any = model.get_submodule(name)
        sources = (vars(owner), vars(vars(owner).get("config", owner)))
        numbers = {key: each for held in sources for key, each in held.items() if _is_number_of_heads(key, each)}
        if not numbers:
            continue
        sizes = [each for key, each in vars(owner).items() if key in ("head_dim", "head_size") and type(each) is int]
        used = sorted(
            key
            for key in numbers.keys() & _names_in_code(type(owner))
            if not sizes or numbers[key] * sizes[0] == out_features(layer)  # else it is that of a share already
        )
        return name, used[0] if used else ""
    return "", ""


def _is_number_of_heads(key: str, value: object) -> bool:
    return type(value) is int and value > 1 and _NUMBER_OF_HEADS.fullmatch(key) is not None


def _names_in_code(kind: type) -> set[str]:
    """Names of attributes in the code of a module's class, but for what sets it up or describes it."""
    found: set[str] = set()
    for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        for key, each in vars(base).items():
            code: Any = getattr(inspect.unwrap(each), "__code__", None) if callable(each) else None
            codes = [] if code is None or key in _NOT_COMPUTING else [code]
            for one in codes:
                found |= {*one.co_names}
                codes += [inner for inner in one.co_consts if isinstance(inner, type(one))]
    return found


def output_embedding(model: Any, degree: int) -> str:
    """Return the name of a transformers model's output embedding if it can be split; empty if it cannot.

    It cannot if the degree does not divide the vocabulary, or if its bias is tied, as in BERT.
    """
    head: Any = model.get_output_embeddings()
    if type(head) is not nn.Linear or head.out_features % degree:
        return ""
    names = [name for name, part in model.named_modules() if part is head]
    bias: Any = head.bias
    holders = [name for name, each in model.named_parameters(remove_duplicate=False) if each is bias]
    return names[0] if names and (bias is None or holders == [f"{names[0]}.bias"]) else ""


def experts_style(model: Any, name: str) -> ParallelStyle | None:
    """Return the style that splits a layer of experts by its inner features; None if that is not known to be exact."""
    part: Any = model.get_submodule(name)
    if model.config.model_type not in SPLIT_EXPERTS or name not in layers_of_experts(model):
        return None
    shapes = {key: tuple(each.shape) for key, each in part.named_parameters()}
    is_plain = part.is_concatenated and not part.is_transposed and not part.has_bias
    return TensorExperts() if is_plain and set(shapes) == {"gate_up_proj", "down_proj"} else None


def _class_name(module: nn.Module) -> str:
    kind = type(module)
    package, _, file = kind.__module__.rpartition(".")
    return f"{file.removeprefix('modeling_')}.{kind.__name__}" if package.startswith("transformers.models.") else ""


def _check_layer(name: str, block: nn.Module, path: str, style: "str | ParallelStyle", degree: int) -> None:
    kind = type(block).__name__
    if isinstance(style, DividedHeads):
        for attribute in style.attributes:
            number = getattr(block.get_submodule(path), attribute)
            if number % degree:
                fits = [each for each in range(1, number + 1) if number % each == 0]
                raise DegreeError(
                    f"{name} ({kind}) has {attribute}={number}, which tensor_parallel_degree={degree} does not divide. "
                    f"It can be one of {fits}."
                )
        return
    if isinstance(style, ClonedResult):
        return
    if isinstance(style, PackedColwise):
        for block_of_features in style.blocks:
            if not block_of_features.is_shared and block_of_features.size % degree:
                raise DegreeError(
                    f"{name}.{path} computes {block_of_features.size} features of one kind, which "
                    f"tensor_parallel_degree={degree} does not divide."
                )
    parts = path.split(".")
    owners = [block.get_submodule(".".join(parts[:depth])) for depth in range(1, len(parts))]
    layer = block.get_submodule(path)
    own_file = type(block).__module__
    is_known = (
        type(layer) in (nn.Linear, nn.Embedding)
        or is_conv1d(layer)
        or (type(layer).__module__, type(layer).__name__) == (own_file, "FalconLinear")
    )
    if not is_known or any(type(owner).__module__ != own_file for owner in owners):
        raise PlanError(
            f"the tensor plan of {kind} splits {name}.{path}, but that is a {type(layer).__module__}."
            f"{type(layer).__name__}, which replaces the layer of transformers (as adapters and quantization do). Set "
            "tensor_parallel_degree=1, or pass a tensor_plan for the modules to split."
        )


# -- blocks ---------------------------------------------------------------------------------------------------------


def _pair(columns: str, row: str) -> Callable[[Any], Styles]:
    """A feed-forward block: layers that read its input, and one that reads their product."""
    return lambda _: {**dict.fromkeys(columns.split(), "colwise"), row: "rowwise"}


def _gpt2_attention(block: Any) -> Styles:
    width, heads = block.embed_dim, DividedHeads(("num_heads", "split_size"))
    if block.is_cross_attention:
        packed = PackedColwise([Block(width)] * 2)
        return {"": heads, "q_attn": "colwise", "c_attn": packed, "c_proj": "rowwise"}
    return {"": heads, "c_attn": PackedColwise([Block(width)] * 3), "c_proj": "rowwise"}


def _gptj_attention(_: Any) -> Styles:
    columns: Styles = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "colwise")
    return {"": DividedHeads(("num_attention_heads",)), **columns, "out_proj": "rowwise"}


def _bloom_attention(block: Any) -> Styles:
    """Query, key and value of a head lie together: `(heads, 3, head size)`."""
    _check_not_sliced(block)
    heads = DividedHeads(("num_heads",), per_head=("alibi",))
    return {"": heads, "query_key_value": "colwise", "dense": "rowwise"}


def _bloom_mlp(block: Any) -> Styles:
    _check_not_sliced(block)
    return {"dense_h_to_4h": "colwise", "dense_4h_to_h": "rowwise"}


def _check_not_sliced(block: Any) -> None:
    if block.pretraining_tp > 1 and block.slow_but_exact:
        raise PlanError(
            f"{type(block).__name__} slices its weights itself (pretraining_tp={block.pretraining_tp}, "
            "slow_but_exact=True), and cannot be split. Set slow_but_exact=False, or tensor_parallel_degree=1."
        )


def _falcon_attention(block: Any) -> Styles:
    """Of three layouts: groups of heads with their key and value, heads with their own, or all queries and one key."""
    per_head = ("alibi", "attention_mask")
    if block.new_decoder_architecture or not block.multi_query:
        heads = DividedHeads(("num_heads", "num_kv_heads"), per_head)
        return {"": heads, "query_key_value": "colwise", "dense": "rowwise"}
    key_value = Block(2 * block.head_dim, is_shared=True)
    packed = PackedColwise((Block(block.num_heads * block.head_dim), key_value))
    return {"": DividedHeads(("num_heads",), per_head), "query_key_value": packed, "dense": "rowwise"}


def _bert_attention(block: Any) -> Styles:
    heads = DividedHeads(("num_attention_heads", "all_head_size"))
    columns: Styles = dict.fromkeys(("self.query", "self.key", "self.value"), "colwise")
    return {"self": heads, **columns, "output.dense": "rowwise"}


def _t5_attention(block: Any) -> Styles:
    """The bias of positions is an embedding whose features are the heads; later layers get it from the first one."""
    columns: Styles = dict.fromkeys("qkv", "colwise")
    bias: Styles = {"relative_attention_bias": HeadEmbedding()} if block.has_relative_attention_bias else {}
    return {"": DividedHeads(("n_heads", "inner_dim")), **columns, **bias, "o": "rowwise"}


def _vit_attention(_: Any) -> Styles:
    columns: Styles = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "colwise")
    return {"": DividedHeads(("num_attention_heads",)), **columns, "o_proj": "rowwise"}


_BLOCKS: Mapping[str, Callable[[Any], Styles]] = {
    "gpt2.GPT2Attention": _gpt2_attention,
    "gpt2.GPT2MLP": _pair("c_fc", "c_proj"),
    "gptj.GPTJAttention": _gptj_attention,
    "gptj.GPTJMLP": _pair("fc_in", "fc_out"),
    "bloom.BloomAttention": _bloom_attention,
    "bloom.BloomMLP": _bloom_mlp,
    "falcon.FalconAttention": _falcon_attention,
    "falcon.FalconMLP": lambda _: {"": ClonedResult(), "dense_h_to_4h": "colwise", "dense_4h_to_h": "rowwise"},
    "bert.BertAttention": _bert_attention,
    "bert.BertLayer": _pair("intermediate.dense", "output.dense"),
    "roberta.RobertaAttention": _bert_attention,
    "roberta.RobertaLayer": _pair("intermediate.dense", "output.dense"),
    "t5.T5Attention": _t5_attention,
    "t5.T5DenseActDense": _pair("wi", "wo"),
    "t5.T5DenseGatedActDense": _pair("wi_0 wi_1", "wo"),
    "vit.ViTAttention": _vit_attention,
    "vit.ViTMLP": _pair("fc1", "fc2"),
}


def uses_known_blocks(plan: Mapping[str, Any]) -> bool:
    """Whether a plan is one of this file, whose residual stream must be whole."""
    return any(isinstance(style, (DividedHeads, PackedColwise, TensorExperts)) for style in cast("Any", plan).values())
