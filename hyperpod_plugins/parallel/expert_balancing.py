"""Balancing of experts: what keeps the router of a mixture of experts from sending most tokens to a few experts.

    model = balance_experts(MixtralForCausalLM(config), method="sinkhorn", z_loss_coeff=1e-3)

`method` says which experts a token goes to in training, and what is added to the loss of the model for each layer:

    none        those that the router prefers; nothing
    aux_loss    those that the router prefers; `aux_loss_coeff` times the loss of "Switch Transformers" (Fedus et al.,
                2021, equation 4): experts x sum over experts of (share of the choices) x (mean probability)
    sinkhorn    those with the largest entries once the probabilities of all tokens are scaled such that all experts
                have the same sum ("Unified Scaling Laws for Routed Language Models", Clark et al., 2022); nothing

    bias        those that the router prefers with a bias for each expert, which counts for the choice alone; nothing.
                After each forward, the bias of an expert with fewer tokens than the mean, of all ranks, rises by
                `bias_rate`, and that of one with more falls ("Auxiliary-Loss-Free Load Balancing Strategy for
                Mixture-of-Experts", Wang et al., 2024). For routers that have such a bias, as that of DeepSeek-V3

With each of them, `z_loss_coeff` times the mean square of the logarithm of the sum of the exponentials of the router's
logits is added ("ST-MoE", Zoph et al., 2022, equation 5), which keeps these small.

A token's weights for its experts are those that the model gives to the same experts without balancing. In evaluation
mode nothing changes, so that a balanced model is an ordinary one for whoever loads it.

Each rank balances its own tokens, and data parallelism averages the gradients: results of `aux_loss` and `sinkhorn` are
those of the same batches on each rank, not of one process with all tokens. Those of `bias` and of the z-loss are.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from hyperpod_plugins.comm import group_health
from hyperpod_plugins.errors import ConfigError, NotBuiltYetError
from hyperpod_plugins.memory.chunked_loss import CAUSAL_LOSS, derived_class
from hyperpod_plugins.parallel.expert_parallel import layers_of_experts

Method = Literal["none", "aux_loss", "sinkhorn", "bias"]
_ROUTED = "_hyperpod_routed"
"""Attribute of a router with the logits and the choices of the forward that is under way."""
_BALANCED = "_hyperpod_balancing"
_BIAS, _COUNTS = "e_score_correction_bias", "tokens_per_expert"
"""Buffers of a router: the bias, and the tokens of all ranks in the last forward."""
_TOLERANCE, _MAX_ROUNDS = 1e-4, 1000


def balance_experts(
    model: nn.Module,
    *,
    method: Method = "aux_loss",
    aux_loss_coeff: float = 1e-3,
    z_loss_coeff: float = 0.0,
    bias_rate: float = 1e-3,
) -> nn.Module:
    """Let a causal language model of transformers balance its experts while it trains, in place.

    Call it before the model is parallelized, and train on the loss that the model returns. To call it again with the
    same arguments has no effect.

    Args:
        model: a `...ForCausalLM`, or a module with one inside.
        method: see the module's documentation.
        aux_loss_coeff: weight of the auxiliary loss of each layer; only for `aux_loss`.
        z_loss_coeff: weight of the z-loss of each layer; 0 for none.
        bias_rate: by how much a bias changes after a forward; only for `bias`.

    Returns:
        The same model.

    Raises:
        ConfigError: there is no such model inside, or no router is known in it; an argument is out of its range; the
            model adds an auxiliary loss itself, or is balanced in another way already.
        NotBuiltYetError: `sinkhorn` for a router whose weights are computed in another way than those that are known,
            or `bias` for a router without a bias, or without values.
    """
    for name, value in (("aux_loss_coeff", aux_loss_coeff), ("z_loss_coeff", z_loss_coeff), ("bias_rate", bias_rate)):
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{name} must be a number from 0 on, but is {value!r}.")
    if method not in get_args(Method):
        raise ConfigError(f"method must be one of {', '.join(get_args(Method))}, but is {method!r}.")
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
    routers = _routers_of(language_model)
    weights = {name: _weights_of(name, router) for name, router in routers.items()} if method == "sinkhorn" else {}
    if method == "bias":
        _check_biases(routers)
    for name, router in routers.items():
        _watch(router, weights.get(name))
        if method == "bias":
            router.register_buffer(_COUNTS, torch.zeros_like(getattr(router, _BIAS)), persistent=False)
    options = _Options(
        aux_loss_coeff=aux_loss_coeff if method == "aux_loss" else 0.0,
        z_loss_coeff=z_loss_coeff,
        bias_rate=bias_rate if method == "bias" else 0.0,
    )
    _balance_forward(language_model, options)
    vars(language_model)[_BALANCED] = asked
    return model


@torch.no_grad()
def sinkhorn(scores: Tensor) -> Tensor:
    """Scale rows and columns of positive scores in turn, until all columns have the same sum, and all rows.

    Args:
        scores: logarithms of the scores, `(tokens, experts)`.

    Returns:
        `(tokens, experts)`, of which each column adds up to `1 / experts`, and each row nearly to `1 / tokens`.
    """
    cost = (scores.double() - scores.double().amax(dim=1, keepdim=True)).exp()
    num_rows, num_columns = cost.shape
    of_columns = cost.new_ones(num_columns)
    of_rows = cost.new_ones(num_rows)
    for _ in range(_MAX_ROUNDS if num_rows else 0):
        before = of_columns
        of_rows = 1 / (num_rows * (cost @ of_columns))
        of_columns = 1 / (num_columns * (of_rows @ cost).clamp(min=torch.finfo(cost.dtype).tiny))
        if float((of_columns - before).abs().mean()) <= _TOLERANCE * float(before.abs().mean()):
            break
    return of_rows[:, None] * cost * of_columns


def router_z_loss(logits: Tensor) -> Tensor:
    """Mean square of the logarithm of the sum of exponentials of each token's logits, `(tokens, experts)`; `()`."""
    return logits.float().logsumexp(dim=-1).square().mean()


def router_aux_loss(logits: Tensor, expert_index: Tensor) -> Tensor:
    """The auxiliary loss of one layer; 1 if tokens and probabilities are spread evenly.

    Args:
        logits: of the router, `(tokens, experts)`.
        expert_index: the experts that the tokens go to, `(tokens, choices)`.

    Returns:
        A scalar, `()`.
    """
    num_experts = logits.shape[-1]
    shares = torch.bincount(expert_index.reshape(-1), minlength=num_experts) / expert_index.numel()
    return num_experts * (shares * logits.float().softmax(dim=-1).mean(dim=0)).sum()


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


def _weights_of(name: str, router: nn.Module) -> _Weights:
    found = _WEIGHTS.get(type(router).__name__)
    if found is None:
        raise NotBuiltYetError(
            f"method='sinkhorn' is not served yet for {name} ({type(router).__name__}). It serves "
            f"{', '.join(_WEIGHTS)}. Use method='aux_loss' or 'none'."
        )
    return found


def _routers_of(model: nn.Module) -> dict[str, nn.Module]:
    """The router beside each layer of experts, by name.

    Raises:
        ConfigError: there is no layer of experts, or no router of transformers beside one.
    """
    found: dict[str, nn.Module] = {}
    layers = layers_of_experts(model)
    for name in layers:
        owner = name.rpartition(".")[0]
        beside = {
            f"{owner}.{key}": child
            for key, child in model.get_submodule(owner).named_children()
            if type(child).__name__.lower().endswith("topkrouter")
        }
        if len(beside) != 1:
            raise ConfigError(
                f"balance_experts knows routers of transformers that end in TopKRouter, and found {len(beside)} beside "
                f"{name}. Balance the experts of this model in its own code."
            )
        found |= beside
    if not layers:
        raise ConfigError(f"{type(model).__name__} has no layer of experts that is known, so nothing can be balanced.")
    return found


def _watch(router: nn.Module, weights: _Weights | None) -> None:
    """Let a router note what it decides in training, and choose experts by `sinkhorn` if `weights` is given."""
    kind: Any = type(router)

    def forward(self: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, scores, expert_index = kind.forward(self, hidden)
        if self.training and weights is not None:
            expert_index = sinkhorn(logits).topk(self.top_k, dim=-1).indices
            scores = weights(self, logits, expert_index)
        # Blocks whose activations are recomputed run again in backward.
        if self.training and torch._C._current_graph_task_id() == -1:  # pyright: ignore[reportPrivateUsage]
            vars(self).setdefault(_ROUTED, []).append((logits, expert_index))
        return logits, scores, expert_index

    router.__class__ = derived_class(kind, {"forward": forward})


# -- forward --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    aux_loss_coeff: float
    z_loss_coeff: float
    bias_rate: float


def _balance_forward(model: nn.Module, options: _Options) -> None:
    """Let the forward of a model add losses, and move biases."""
    kind: Any = type(model)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_training = self.training and torch.is_grad_enabled()
        if is_training and options.bias_rate:
            _move_biases(self, options.bias_rate)
        for part in self.modules():
            vars(part).pop(_ROUTED, None)  # of a forward that was interrupted
        try:
            output = kind.forward(self, *args, **kwargs)
            routed = [each for part in self.modules() for each in vars(part).get(_ROUTED, ())]
            if is_training and options.bias_rate:
                _count_tokens(self)
        finally:
            for part in self.modules():
                vars(part).pop(_ROUTED, None)
        if not (is_training and (options.aux_loss_coeff or options.z_loss_coeff)):
            return output
        return _with_added(output, _losses_of(routed, options.aux_loss_coeff, options.z_loss_coeff))

    model.__class__ = derived_class(kind, {"forward": forward})


@torch.no_grad()
def _move_biases(model: nn.Module, rate: float) -> None:
    """Move the biases by what was counted in the last forward: later, backward may compute that one again."""
    for router in _routers_with_counts(model):
        counts: Tensor = getattr(router, _COUNTS)
        whole = counts.double()
        getattr(router, _BIAS).add_(torch.sign(whole.mean() - whole).to(counts.dtype), alpha=rate)
        counts.zero_()


@torch.no_grad()
def _count_tokens(model: nn.Module) -> None:
    """Note how many tokens of all ranks went to each expert; a collective."""
    routers = _routers_with_counts(model)
    found = [_num_tokens(vars(router).get(_ROUTED, ()), getattr(router, _COUNTS)) for router in routers]
    joined = torch.cat(found)
    if dist.is_initialized() and dist.get_world_size() > 1 and not group_health.is_unavailable:
        dist.all_reduce(joined)  # tensor peers count the same tokens: of this only the sign of differences matters
    for router, counts in zip(routers, joined.split([len(each) for each in found]), strict=True):
        getattr(router, _COUNTS).copy_(counts)


def _num_tokens(routed: Sequence[tuple[Tensor, Tensor]], like: Tensor) -> Tensor:
    total = torch.zeros(len(like), dtype=torch.int64, device=like.device)
    for _, expert_index in routed:
        total += torch.bincount(expert_index.reshape(-1), minlength=len(like))
    return total


def _routers_with_counts(model: nn.Module) -> list[nn.Module]:
    return [part for part in model.modules() if _COUNTS in part._buffers]  # pyright: ignore[reportPrivateUsage]


def _check_biases(routers: Mapping[str, nn.Module]) -> None:
    for name, router in routers.items():
        bias = dict(router.named_buffers()).get(_BIAS)
        if bias is None or bias.is_meta or bias.dtype is not torch.float32:
            problem = "has no bias for the choice alone" if bias is None else "has no values of it in float32"
            raise NotBuiltYetError(
                f"method='bias' is not served yet for {name} ({type(router).__name__}), which {problem} ({_BIAS}). Use "
                "another method, or build the model with its values in float32."
            )


def _losses_of(routed: list[tuple[Tensor, Tensor]], aux_loss_coeff: float, z_loss_coeff: float) -> Tensor:
    if all(logits.grad_fn is None for logits, _ in routed):
        raise ConfigError(
            "the routers of a balanced model compute without gradients, so that nothing would be balanced. If its "
            "blocks are recomputed, use gradient_checkpointing_kwargs={'use_reentrant': False}; if the routers are "
            "frozen, leave the coefficients at 0."
        )
    total = torch.zeros((), device=routed[0][0].device)
    for logits, expert_index in routed:
        if z_loss_coeff:
            total = total + z_loss_coeff * router_z_loss(logits)
        if aux_loss_coeff:
            total = total + aux_loss_coeff * router_aux_loss(logits, expert_index)
    return total


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
    found = [part for part in model.modules() if vars(part).get("loss_type") == CAUSAL_LOSS]
    if len(found) != 1:
        raise ConfigError(
            f"balance_experts is for one causal language model of transformers, and {type(model).__name__} contains "
            f"{len(found)}."
        )
    return found[0]
