"""Which models, adapters and calls context parallelism serves exactly; everything else is refused by name.

What is allowed is listed, not what is forbidden: a module that is not known to treat each token alone is refused. The
modules of a model that uses a `SequenceContext` are the user's own, so there only torch's that mix tokens are refused.

`check_unchanged`, of what a program can change after `parallelize`, and `check_split_call` run in each forward.
"""

# Torch keeps the hooks of a module, and the base classes of convolutions and pools, in private names.
# pyright: reportPrivateUsage=false

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from hyperpod_plugins.errors import ConfigError, format_list

SERVED_MODELS = ("glm4_moe", "gpt_oss", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
"""`model_type` of the Hugging Face models that are split: all but their attention treats each token alone."""
SERVED_ATTENTION = ("sdpa", "eager")
SPLIT_INPUTS = ("input_ids", "labels", "shift_labels", "position_ids", "attention_mask")
TREATS_TOKENS_ALONE = "treats_tokens_alone"
"""Attribute by which a module in a model of the user's own says that it mixes no tokens, as it is used there."""
_WHOLE_OUTPUTS = ("output_attentions", "output_hidden_states", "output_router_logits")
_REFUSED_INPUTS = ("past_key_values", "inputs_embeds", "cache_position", *_WHOLE_OUTPUTS)
_MOVING_ROTATIONS = ("dynamic", "longrope")
_LIBRARIES = ("torch", "transformers", "peft", "accelerate", "hyperpod_plugins")
"""Libraries whose hooks and replaced forwards in such a model are known to treat each token alone."""
_TOKENWISE = frozenset(
    (
        *(nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.Identity, nn.Dropout),
        *(nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList, nn.ParameterDict),
        *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid, nn.Tanh),
        *(nn.LogSigmoid, nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish),
    )
)
"""Modules of torch that treat each token alone. Of LayerNorm and RMSNorm, only over the last dimension."""
_TOKENWISE_BY_NAME = frozenset(
    (
        "torch._dynamo.eval_frame.OptimizedModule",
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.CheckpointWrapper",
        "peft.peft_model.PeftModel",
        "peft.peft_model.PeftModelForCausalLM",
        "peft.utils.other.ModulesToSaveWrapper",
        "peft.utils.other.TrainableTokensWrapper",
        "peft.tuners._buffer_dict.BufferDict",
        "peft.tuners.lora.model.LoraModel",
        "peft.tuners.lora.layer.Linear",
        "peft.tuners.lora.layer.Embedding",
        "peft.tuners.lora.layer.ParamWrapper",
        "peft.tuners.lora.dora.DoraLinearLayer",
        "peft.tuners.lora.dora.DoraEmbeddingLayer",
        "peft.tuners.adalora.model.AdaLoraModel",
        "peft.tuners.adalora.layer.SVDLinear",
        "peft.tuners.ia3.model.IA3Model",
        "peft.tuners.ia3.layer.Linear",
        "peft.tuners.trainable_tokens.model.TrainableTokensModel",
        "peft.tuners.trainable_tokens.layer.TrainableTokensLayer",
    )
)
_LORA_VARIANTS = {"DoraLinearVariant", "DoraEmbeddingVariant"}
"""Variants of LoRA in PEFT that treat each token alone; that of activated LoRA, for example, does not."""
_MIXING: tuple[type[nn.Module], ...] = (
    *(nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm, nn.GroupNorm, nn.LocalResponseNorm),
    *(nn.modules.pooling._AvgPoolNd, nn.modules.pooling._MaxPoolNd, nn.modules.pooling._LPPoolNd),
    *(nn.modules.pooling._AdaptiveAvgPoolNd, nn.modules.pooling._AdaptiveMaxPoolNd),
    *(nn.RNNBase, nn.MultiheadAttention, nn.Transformer, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer),
)
"""Modules of torch that mix tokens, or may."""
_NORMALIZES_DIM = (nn.Softmax, nn.LogSoftmax, nn.Softmin)


def check_split_model(model: Any, root: nn.Module, loss_function: Callable[..., Any]) -> None:
    """Refuse a language model for which it is not known that splitting its sequences is exact.

    Args:
        model: a causal language model of transformers.
        root: the module that contains it, such as one of PEFT.
        loss_function: with which it computes its loss.

    Raises:
        ConfigError: it is not known; the message names what is not.
    """
    config = model.config
    problem = ""
    if config.model_type not in SERVED_MODELS:
        problem = (
            f"model_type={config.model_type!r} is not among those whose layers are known to treat each token alone "
            f"outside of attention: {', '.join(SERVED_MODELS)}"
        )
    elif config._attn_implementation not in SERVED_ATTENTION:
        problem = (
            f"its attention is {config._attn_implementation!r}, and only attn_implementation='sdpa' and 'eager' are "
            "served"
        )
    elif strangers := sorted({*_strangers(model), *_foreign_adapters(root)}):
        problem = f"it contains {format_list(strangers)}, which may mix tokens"
    elif hooks := sorted(set(_foreign_hooks(model))):
        problem = (
            f"the program has registered forward hooks within it ({format_list(hooks)}), which would be given a part "
            "of the sequence. Register those that change nothing after parallelize (Lightning: in "
            "configure_optimizers), and remove others"
        )
    problem = problem or _problem_that_may_come(model, loss_function)
    if problem:
        raise ConfigError(
            f"context_parallel_degree cannot serve {type(model).__name__}: {problem}. Use context_parallel_degree=1."
        )


def check_unchanged(model: Any, attention: str, asked: set[str], loss_function: Callable[..., Any]) -> None:
    """Refuse what a program has changed in a split model since `check_split_model`.

    Args:
        model: the language model.
        attention: under which the split attention is registered.
        asked: the implementations of attention that its layers ask for now.
        loss_function: with which it computes its loss now.

    Raises:
        ConfigError: something was changed that cannot be served.
    """
    problem = ""
    if others := sorted(map(repr, asked - {attention})):
        problem = (
            f"its attention was changed to {', '.join(others)} after parallelize, so that a rank would attend to its "
            "part of the sequence only. Choose attn_implementation when the model is built"
        )
    problem = problem or _problem_that_may_come(model, loss_function)
    if problem:
        raise ConfigError(
            f"context_parallel_degree cannot serve {type(model).__name__}: {problem}. Or use context_parallel_degree=1."
        )


def _problem_that_may_come(model: Any, loss_function: Callable[..., Any]) -> str:
    """What cannot be served, of that which a program can change at any time; empty if there is nothing."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    config = model.config
    rotation = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if loss_function is not ForCausalLMLoss:
        return "it has a loss function of its own"
    if rotation in _MOVING_ROTATIONS:
        return f"its rotary positions (rope_type={rotation!r}) depend on the longest position that a rank has"
    if getattr(config, "is_causal", True) is False:
        return "its attention is not causal"
    if whole := [key for key in _WHOLE_OUTPUTS if getattr(config, key, False)]:
        return (
            f"its configuration asks for {', '.join(whole)}, of which each rank has a part only; an auxiliary loss of "
            "routers is not a sum over tokens"
        )
    hooks = model.get_input_embeddings()._forward_hooks.values()
    if any(getattr(hook, "__name__", "") == "neftune_post_forward_hook" for hook in hooks):
        return "NEFTune scales the noise of embeddings by the length of the sequence, of which each rank has a part"
    return ""


def _strangers(model: Any) -> Iterator[str]:
    """Names of the modules in a language model that are not known to treat each token alone."""
    own = f"transformers.models.{model.config.model_type}."
    for part in model.modules():
        kind = type(part)
        place = f"{kind.__module__}.{kind.__qualname__}"
        is_known = (
            kind in _TOKENWISE
            or place in _TOKENWISE_BY_NAME
            or place.startswith((own, "transformers.activations.", "hyperpod_plugins."))
        )
        if isinstance(part, (nn.LayerNorm, nn.RMSNorm)) and len(part.normalized_shape) > 1:
            is_known = False
        if not is_known or _lora_variants(part) - _LORA_VARIANTS:
            yield _name(part)
        elif not _is_of_library(forward := vars(part).get("forward", kind.forward)):
            yield f"{_name(part)} with a forward of {getattr(forward, '__module__', forward)}"


def _foreign_adapters(root: nn.Module) -> Iterator[str]:
    """Names of PEFT's modules around a language model, of kinds that are not known to be exact."""
    for part in root.modules():
        kind = type(part)
        if _library(kind) == "peft" and f"{kind.__module__}.{kind.__qualname__}" not in _TOKENWISE_BY_NAME:
            yield _name(part)


def _lora_variants(part: Any) -> set[str]:
    """Names of the variants of LoRA that a layer of PEFT computes."""
    variants = getattr(part, "lora_variant", {}) if _library(type(part)) == "peft" else {}
    return {type(variant).__name__ for variant in variants.values()}


def _name(part: nn.Module) -> str:
    return "/".join((type(part).__name__, *sorted(_lora_variants(part))))


def _foreign_hooks(model: nn.Module) -> Iterator[str]:
    """Names of the hooks of the program that run in the forward of modules within a model, and of their modules."""
    for part in model.modules():
        hooks = (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
        for hook in hooks if part is not model else ():
            if not _is_of_library(hook):
                yield f"{getattr(hook, '__name__', type(hook).__name__)} of {type(part).__name__}"


def _is_of_library(function: Any) -> bool:
    while isinstance(function, partial):
        function = function.func
    return _library(function) in _LIBRARIES


def _library(thing: Any) -> str:
    return (thing.__module__ or "").partition(".")[0]  # None for builtin functions


def refuse_mixing_modules(model: nn.Module) -> None:
    """Refuse modules of torch that mix tokens, in a model that uses a `SequenceContext`.

    Raises:
        ConfigError: there are some that do not say `treats_tokens_alone = True`.
    """
    found = sorted({type(part).__name__ for part in model.modules() if _mixes(part)})
    if found:
        raise ConfigError(
            f"{type(model).__name__} uses a SequenceContext, but contains {format_list(found)}, which would mix the "
            "tokens of a part of the sequence only. Where such a module does not mix tokens as it is used, set its "
            f"attribute {TREATS_TOKENS_ALONE} = True; otherwise use context_parallel_degree=1."
        )


def _mixes(part: nn.Module) -> bool:
    if getattr(part, TREATS_TOKENS_ALONE, False):
        return False
    if isinstance(part, nn.modules.conv._ConvNd):
        return any(size > 1 for size in part.kernel_size)
    if isinstance(part, _NORMALIZES_DIM):
        return part.dim != -1
    return isinstance(part, _MIXING)


def check_split_call(given: Mapping[str, Any]) -> None:
    """Refuse the arguments of a call that cannot be split.

    Args:
        given: the arguments by name, without those that are None.

    Raises:
        ConfigError: an argument cannot be split, or one is missing; the message names it.
    """
    refused = [name for name in _REFUSED_INPUTS if name in given and given[name] is not False]
    keeps = given.get("logits_to_keep", 0)
    problem = ""
    if refused:
        problem = f"cannot be given {', '.join(refused)}"
    elif "input_ids" not in given:
        problem = f"takes input_ids, but was given {', '.join(sorted(given)) or 'nothing'}"
    elif "labels" not in given and "shift_labels" not in given:
        problem = (
            "computes the loss itself, so it needs labels: logits are those of a part of the sequence on each rank"
        )
    elif given.get("use_cache") or isinstance(keeps, Tensor) or keeps:
        problem = "cannot use a cache or keep some logits only (use_cache, logits_to_keep)"
    elif given.get("is_causal", True) is not True:
        problem = "has causal attention (is_causal)"
    else:
        for name in SPLIT_INPUTS:
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
