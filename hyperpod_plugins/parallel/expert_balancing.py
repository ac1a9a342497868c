"""Balancing of experts: what keeps the router of a mixture of experts from sending most tokens to a few experts.

    model = balance_experts(MixtralForCausalLM(config), method="sinkhorn", z_loss_coeff=1e-3)

`method` says which experts a token goes to in training, and what is added to the loss of the model for each layer:

    none        those that the router prefers; nothing
    aux_loss    those that the router prefers; `aux_loss_coeff` times the loss of "Switch Transformers" (Fedus et al.,
                2021, equation 4): experts x sum over experts of (share of the choices) x (mean probability)
    sinkhorn    those with the largest entries once the probabilities of all tokens are scaled such that all experts
                have the same sum ("Unified Scaling Laws for Routed Language Models", Clark et al., 2022); nothing
    bias        those that the router prefers with its bias for each expert, which counts for the choice alone, also in
                evaluation, and moves by `bias_rate` after each step; nothing. See `expert_bias.py`

With each of them, `z_loss_coeff` times the mean square of the logarithm of the sum of the exponentials of the router's
logits is added ("ST-MoE", Zoph et al., 2022, equation 5), which keeps these small.

A token's weights for its experts are those that the model gives to the same experts without balancing. In evaluation
mode nothing changes, so that what is saved of a balanced model is an ordinary one.

Each rank balances its own tokens, and data parallelism averages the gradients: results are those of the same batches on
each rank, not of one process with all tokens; except for `bias`, which follows the tokens of all ranks. All tokens
count, including padding. Each forward adds its losses, so those of several micro-steps add up if the program does not
divide the loss by their number.

[Note: where losses come from] A router notes its logits while the forward of the language model runs, which adds to the
loss at its end. What is recomputed in backward is not noted again. A part of the model that is called by
itself in training would not be balanced, so such a call raises `ConfigError`.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # pyright: ignore[reportPrivateUsage]
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from hyperpod_plugins.errors import ConfigError, NotBuiltYetError
from hyperpod_plugins.memory.recompute import derived_class
from hyperpod_plugins.parallel.context_parallel import causal_language_models, tokens_of_sequences
from hyperpod_plugins.parallel.expert_bias import COUNTS_TOKENS, check_bias, counting_tokens, move_bias_of, refuse_peft
from hyperpod_plugins.parallel.expert_parallel import layers_of_experts

Method = Literal["none", "aux_loss", "sinkhorn", "bias"]
_ROUTED = "_hyperpod_routed"
"""Attribute of a router with what it has decided in the forward of the language model that is under way."""
_BALANCED, _WATCHED = "_hyperpod_balancing", "_hyperpod_is_watched"
_TOLERANCE, _MAX_ROUNDS = 1e-4, 1000


class _Routed(NamedTuple):
    """What one router has decided."""

    router: nn.Module
    logits: Tensor
    expert_index: Tensor


def balance_experts(
    model: nn.Module,
    *,
    method: Method = "aux_loss",
    aux_loss_coeff: float = 1e-3,
    z_loss_coeff: float = 0.0,
    bias_rate: float = 1e-3,
) -> nn.Module:
    """Let a causal language model of transformers balance its experts while it trains, in place.

    Call it before the model is parallelized, and train on the loss that the model returns. Calling it again with the
    same arguments has no effect.

    Args:
        model: a `...ForCausalLM`, or a module with one inside.
        method: see the module's documentation.
        aux_loss_coeff: weight of the auxiliary loss of each layer; only for `aux_loss`.
        z_loss_coeff: weight of the z-loss of each layer; 0 for none.
        bias_rate: by how much the bias of an expert moves after each step, above 0; only for `bias`.

    Returns:
        The same model.

    Raises:
        ConfigError: there is no such model inside, or no router is known in it; an argument is out of its range; the
            model adds an auxiliary loss itself, is balanced in another way already, or has a `forward` of its own;
            `bias` for a model with parts of PEFT.
        NotBuiltYetError: `sinkhorn` or `aux_loss` for a router that does not compute probabilities by softmax, as far
            as is known; `bias` for one without a bias that counts for the choice alone.
    """
    _check_arguments(method, aux_loss_coeff, z_loss_coeff, bias_rate)
    language_model = _language_model(model)
    asked = (method, aux_loss_coeff, z_loss_coeff, bias_rate)
    known = vars(language_model).get(_BALANCED, asked)
    if known != asked:
        raise ConfigError(
            f"{type(language_model).__name__} is balanced already, with the arguments {known}, which cannot be changed "
            f"into {asked} (method, aux_loss_coeff, z_loss_coeff, bias_rate). Build a new model."
        )
    if _BALANCED in vars(language_model):
        return model
    if method == "aux_loss" and getattr(language_model.config, "output_router_logits", False):
        raise ConfigError(
            f"{type(language_model).__name__} adds an auxiliary loss itself (output_router_logits=True). Leave that "
            "out, or use method='none'."
        )
    if method == "bias" and any(isinstance(part, FSDPModule) for part in model.modules()):
        raise ConfigError("balance_experts(method='bias') must be called before the model is sharded.")
    if method == "bias":
        refuse_peft(model.modules())
    routers = _routers_of(language_model)
    _refuse_own_forward({"": language_model, **routers})
    weights = _all_weights(routers, method)
    coefficients = aux_loss_coeff if method == "aux_loss" else 0.0, z_loss_coeff
    for name, router in routers.items() if method == "sinkhorn" or any(coefficients) else ():
        _watch(router, weights[name] if method == "sinkhorn" else None, has_losses=any(coefficients))
    if any(coefficients):
        _add_losses(language_model, *coefficients)
    if method == "bias":
        _move_biases(language_model, routers.values(), bias_rate)
    vars(language_model)[_BALANCED] = asked
    return model


def _check_arguments(method: str, aux_loss_coeff: float, z_loss_coeff: float, bias_rate: float) -> None:
    for name, value in (("aux_loss_coeff", aux_loss_coeff), ("z_loss_coeff", z_loss_coeff)):
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{name} must be a number from 0 on, but is {value!r}.")
    if not (math.isfinite(bias_rate) and bias_rate > 0):
        raise ConfigError(f"bias_rate must be a number above 0, but is {bias_rate!r}.")
    if method not in get_args(Method):
        raise ConfigError(f"method must be one of {', '.join(get_args(Method))}, but is {method!r}.")


@_disable_dynamo  # the host decides when it ends
def sinkhorn(scores: Tensor) -> Tensor:
    """Scale rows and columns of positive scores in turn, until all columns have the same sum, and all rows.

    Args:
        scores: logarithms of the scores, `(tokens, experts)`.

    Returns:
        `(tokens, experts)`, of which each column adds up to `1 / experts`, and each row nearly to `1 / tokens`.
    """
    with torch.no_grad(), _disable_current_modes():  # nothing of it is kept where activations are recomputed
        cost = (scores.double() - scores.double().amax(dim=1, keepdim=True)).exp()
        num_rows, num_columns = cost.shape
        of_rows, of_columns = cost.new_ones(num_rows), cost.new_ones(num_columns)
        for _ in range(_MAX_ROUNDS if num_rows else 0):
            before = of_columns
            of_rows = 1 / (num_rows * (cost @ of_columns))
            of_columns = 1 / (num_columns * (of_rows @ cost).clamp(min=torch.finfo(cost.dtype).tiny))
            if float((of_columns - before).abs().mean()) <= _TOLERANCE * float(before.abs().mean()):
                break
        return of_rows[:, None] * cost * of_columns


def router_z_loss(logits: Tensor) -> Tensor:
    """Mean square of the logarithm of the sum of exponentials of each token's logits, `(tokens, experts)`; `()`."""
    return logits.float().logsumexp(dim=-1).square().sum() / max(1, len(logits))


def router_aux_loss(logits: Tensor, expert_index: Tensor) -> Tensor:
    """The auxiliary loss of one layer; 1 if tokens and probabilities are spread evenly.

    Args:
        logits: of the router, `(tokens, experts)`.
        expert_index: the experts that the tokens go to, `(tokens, choices)`.

    Returns:
        A scalar, `()`.
    """
    num_tokens, num_experts = logits.shape
    shares = torch.bincount(expert_index.reshape(-1), minlength=num_experts) / max(1, expert_index.numel())
    return num_experts * (shares * logits.float().softmax(dim=-1).sum(dim=0)).sum() / max(1, num_tokens)


# -- routers --------------------------------------------------------------------------------------------------------

_Weights = Callable[[Any, Tensor, Tensor], Tensor]
"""From a router, its logits and the experts of each token: the weights of these."""


def _chosen_of_softmax(router: Any, logits: Tensor, expert_index: Tensor) -> Tensor:
    """Probabilities of the experts, which add up to 1 unless the router says otherwise."""
    chosen = logits.float().softmax(dim=-1).gather(1, expert_index)
    return chosen / chosen.sum(dim=-1, keepdim=True) if getattr(router, "norm_topk_prob", True) else chosen


def _like_logits(router: Any, logits: Tensor, expert_index: Tensor) -> Tensor:
    return _chosen_of_softmax(router, logits, expert_index).to(logits.dtype)


def _softmax_of_chosen(router: Any, logits: Tensor, expert_index: Tensor) -> Tensor:
    return F.softmax(logits.gather(1, expert_index), dim=1, dtype=logits.dtype)


_WEIGHTS: Mapping[str, _Weights] = {
    "MixtralTopKRouter": _chosen_of_softmax,
    "Qwen2MoeTopKRouter": _like_logits,
    "Qwen3MoeTopKRouter": _like_logits,
    "GptOssTopKRouter": _softmax_of_chosen,
}
"""How the routers of transformers compute weights, by the name of their class."""


def _all_weights(routers: Mapping[str, nn.Module], method: Method) -> dict[str, _Weights]:
    """How each router computes weights, where the method needs to know.

    Raises:
        NotBuiltYetError: the method is not served for a router.
    """
    if method == "bias":
        for name, router in routers.items():
            check_bias(name, router)
    if method in ("none", "bias"):
        return {}
    return {name: _weights_of(name, each, method) for name, each in routers.items()}


def _weights_of(name: str, router: nn.Module, method: str) -> _Weights:
    found = _WEIGHTS.get(type(router).__name__)
    if found is None:
        raise NotBuiltYetError(
            f"method={method!r} is not served yet for {name} ({type(router).__name__}). It serves "
            f"{', '.join(_WEIGHTS)}. Use method='none', with a z_loss_coeff if you like."
        )
    return found


def _routers_of(model: nn.Module) -> dict[str, nn.Module]:
    """The router beside each layer of experts, by name, each once.

    Raises:
        ConfigError: there is no layer of experts, or no router of transformers beside one that takes a tensor alone.
    """
    found: dict[str, nn.Module] = {}
    layers = layers_of_experts(model)
    for name in layers:
        owner = name.rpartition(".")[0]
        beside = {
            f"{owner}.{key}": child
            for key, child in model.get_submodule(owner).named_children()
            if type(child).__name__.lower().endswith("topkrouter")
            and len(inspect.signature(type(child).forward).parameters) == 2
        }
        if len(beside) != 1:
            raise ConfigError(
                "balance_experts knows routers of transformers whose classes end in TopKRouter and that take hidden "
                f"states alone, and found {len(beside)} beside {name}. Balance this model in its own code."
            )
        found |= {key: each for key, each in beside.items() if all(each is not other for other in found.values())}
    if not layers:
        raise ConfigError(
            f"{type(model).__name__} has no layer of experts that is known, so nothing can be balanced. Leave "
            "balance_experts out, or balance the model in its own code."
        )
    return found


def _refuse_own_forward(parts: Mapping[str, nn.Module]) -> None:
    """Refuse modules whose attribute `forward` replaces the method of their class: it would not be balanced."""
    for name, part in parts.items():
        if "forward" in vars(part):
            raise ConfigError(
                f"{name or type(part).__name__} has an attribute forward, as accelerator.prepare and device_map give "
                "it, which replaces the method of its class. Call balance_experts before."
            )


def _watch(router: nn.Module, weights: _Weights | None, *, has_losses: bool) -> None:
    """Let a router note what it decides in training, and choose experts by `sinkhorn` if `weights` is given."""
    kind: Any = type(router)

    @wraps(kind.forward)
    def forward(self: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, scores, expert_index = kind.forward(self, hidden)
        if not self.training:
            return logits, scores, expert_index
        if weights is not None:
            expert_index = sinkhorn(logits).topk(self.top_k, dim=-1).indices
            scores = weights(self, logits, expert_index)
        # Blocks whose activations are recomputed run again in backward.
        if has_losses and torch._C._current_graph_task_id() == -1:  # pyright: ignore[reportPrivateUsage]
            routed: list[_Routed] | None = vars(self).get(_ROUTED)
            if routed is not None:
                routed.append(_Routed(self, logits, expert_index))
            elif torch.is_grad_enabled():
                raise ConfigError(
                    "a part of a balanced model was called in training. Losses are added by the forward of the whole "
                    "language model: call that, or use balance_experts(method='sinkhorn') or 'none' without a z-loss, "
                    "and add router_z_loss or router_aux_loss to your own loss."
                )
        return logits, scores, expert_index

    router.__class__ = derived_class(kind, {"forward": forward, _WATCHED: True})


def _move_biases(model: nn.Module, routers: Iterable[nn.Module], rate: float) -> None:
    """Let the biases of routers move after each step, by the tokens of forwards of their language model."""
    for router in routers:
        move_bias_of(router, rate)
    kind: Any = type(model)

    @wraps(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not (self.training and torch.is_grad_enabled()):
            return kind.forward(self, *args, **kwargs)
        with counting_tokens(self, tokens_of_sequences()):
            return kind.forward(self, *args, **kwargs)

    model.__class__ = derived_class(kind, {"forward": forward, COUNTS_TOKENS: True})


# -- losses ---------------------------------------------------------------------------------------------------------


def _add_losses(model: nn.Module, aux_loss_coeff: float, z_loss_coeff: float) -> None:
    """Let the forward of a model add losses of its routers to its own."""
    kind: Any = type(model)

    @wraps(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not (self.training and torch.is_grad_enabled()):
            return kind.forward(self, *args, **kwargs)
        routed: list[_Routed] = []
        routers = [vars(part) for part in self.modules() if getattr(part, _WATCHED, False)]
        for router in routers:
            router[_ROUTED] = routed
        try:
            output = kind.forward(self, *args, **kwargs)
        finally:
            for router in routers:
                del router[_ROUTED]
        if aux_loss_coeff and getattr(output, "aux_loss", None) is not None:
            raise ConfigError(
                "the model adds an auxiliary loss itself (output_router_logits=True in this call). Leave that out, or "
                "use method='none'."
            )
        return _with_added(output, _losses_of(routed, aux_loss_coeff, z_loss_coeff))

    model.__class__ = derived_class(kind, {"forward": forward})


def _losses_of(routed: Sequence[_Routed], aux_loss_coeff: float, z_loss_coeff: float) -> Tensor:
    if not routed:
        raise ConfigError(
            "no router of a balanced model has run in training mode. Call model.train(), or leave it out."
        )
    without = [each for each in routed if each.logits.grad_fn is None]
    if len(without) == len(routed) or any(_is_trained(each.router) for each in without):
        raise ConfigError(
            "a router of a balanced model computes without gradients, so that it would not be balanced. If blocks are "
            "recomputed, use gradient_checkpointing_kwargs={'use_reentrant': False}; if all routers are frozen, and "
            "what they read, leave the coefficients at 0."
        )
    total = torch.zeros((), device=routed[0].logits.device)
    for _, logits, expert_index in routed:
        if z_loss_coeff:
            total = total + z_loss_coeff * router_z_loss(logits)
        if aux_loss_coeff:
            total = total + aux_loss_coeff * router_aux_loss(logits, expert_index)
    return total


def _is_trained(router: nn.Module) -> bool:
    return any(each.requires_grad for each in router.parameters())


def _with_added(output: Any, added: Tensor) -> Any:
    """What a model returns, with `added` to its loss."""
    if isinstance(output, tuple):  # return_dict=False
        first, *others = cast("tuple[Any, ...]", output)
        if isinstance(first, Tensor) and first.dim() == 0:
            return (first + added.to(first.device), *others)
    loss = getattr(cast("Any", output), "loss", None)
    if loss is None:
        raise ConfigError(
            "a balanced model adds to the loss that it returns, but returned none. Give it labels, or set both "
            "coefficients to 0 and add router_z_loss or router_aux_loss to your own loss."
        )
    cast("Any", output).loss = loss + added.to(loss.device)
    return output


def _language_model(model: nn.Module) -> Any:
    found = causal_language_models(model)
    if len(found) != 1:
        raise ConfigError(
            f"balance_experts is for one causal language model of transformers, and {type(model).__name__} contains "
            f"{len(found)}. Call it with one such model, or with a module that contains one."
        )
    return found[0]
