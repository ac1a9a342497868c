"""Balancing without a loss: each router has a bias per expert, which counts for the choice of experts alone.

    forward                     the router adds the biases to its scores, and notes how many tokens each expert gets
    after the last backward     the numbers of all ranks and micro-steps of the step are added up; the bias of an expert
                                with more tokens than the mean falls by the rate, that of one with fewer rises by it

This is the balancing of DeepSeek-V3 ("Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", Wang et al.,
2024, algorithm 1). `balance_experts` sets it up.

[Note: when biases move] Backward may compute a forward again, and several forwards may precede it, so a bias must stay
as it is from the first forward of a step to its last backward. It moves right after that: where ranks compare what they
have run (`reconcile_gradients`), which precedes the vote of a job with recovery, so that a step that is undone takes
the moves and the numbers of tokens with it; they are in buffers. Other parts of the program's model may be stepped in
between, such as the discriminator of one root with a language model: so its biases move only if backward has computed a
gradient of a parameter of its own since they moved, and only for an optimizer that holds one.
Between two steps the numbers are zero and the biases equal on all ranks: a checkpoint needs the biases alone. A model
without FSDP2 has its biases moved right after its optimizer has stepped.

[Note: which tokens count] Each choice of each token counts, in forwards of the whole language model in training mode
with gradients: not in an evaluation, in generation, nor in what backward computes again. Numbers are integers, so the
sum does not depend on their order. Ranks of a tensor group count the same tokens, all of them equally often; only the
signs of differences matter. The filler at the end of sequences, with which context parallelism makes the parts of its
ranks equal, does not count; nor do samples that a rank of a `Session` computes with weight 0, having none of its own.
Padding of the program counts, as on one process. A forward that raises counts nothing, nor does one of a language model
whose parameters are all frozen, such as a teacher: its biases stay as they are.
"""

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # pyright: ignore[reportPrivateUsage]
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from hyperpod_plugins.comm import group_health
from hyperpod_plugins.errors import ConfigError, NotBuiltYetError
from hyperpod_plugins.memory.recompute import derived_class, is_in_backward

BIAS = "e_score_correction_bias"
"""Name of the buffer of a router of transformers that holds the biases, `(experts,)`."""
_COUNTS = "tokens_per_expert"
"""Name of the buffer of a router for the tokens of this rank in the present step, `(experts,)`; not saved."""
_RATE = "_hyperpod_bias_rate"
"""Attribute of the class of a router whose bias moves."""
COUNTS_TOKENS = "_hyperpod_counts_tokens"
"""Attribute of the class of a language model in whose forwards routers count tokens."""
_FORWARD = "_hyperpod_counting_forward"
"""Attribute of a router while the forward of its language model runs: the `_Forward`."""

_of_units: "WeakSet[nn.Module]" = WeakSet()
"""Routers whose biases move where the units of a sharded model are compared."""
_have_run: "WeakKeyDictionary[nn.Module, None]" = WeakKeyDictionary()
"""Language models that have run since an optimizer stepped on their parameters, in this order."""
_hooks: list[Any] = []
_stand_ins: list[None] = []
"""Has an element in each context of `without_counts`."""


def check_bias(name: str, router: nn.Module) -> None:
    """Check that the bias of a router can be moved.

    Raises:
        NotBuiltYetError: the router has none that counts for the choice alone, as far as is known, or it is in another
            type than float32 and has no values yet.
    """
    bias = dict(router.named_buffers(recurse=False)).get(BIAS)
    problem = ""
    if bias is None:
        problem = f"it has no buffer {BIAS}, as routers like that of DeepSeek-V3 have. Use another method"
    elif bias.is_meta and bias.dtype is not torch.float32:
        problem = f"its {BIAS} is {bias.dtype} and has no values yet. Build the model with that buffer in float32"
    if problem:
        raise NotBuiltYetError(f"method='bias' is not served for {name} ({type(router).__name__}): {problem}.")


def move_bias_of(router: nn.Module, rate: float) -> None:
    """Let the bias of a router move by `rate` after each step, in place.

    The bias is float32 from now on, whatever the model is converted to: in bfloat16 its moves would be lost.

    Args:
        router: of transformers, checked by `check_bias`; returns logits, weights `(tokens, choices)` and indices of
            experts `(tokens, choices)`.
        rate: by how much, a positive number.
    """
    kind: Any = type(router)
    bias: Tensor = getattr(router, BIAS)
    if bias.dtype is not torch.float32:
        setattr(router, BIAS, bias.float())
    device = "cpu" if bias.is_meta else bias.device
    router.register_buffer(_COUNTS, torch.zeros(len(bias), dtype=torch.int64, device=device), persistent=False)

    @wraps(kind.forward)
    def forward(self: Any, hidden: Tensor) -> Any:
        routed = kind.forward(self, hidden)
        _count(self, routed)
        return routed

    def apply(self: Any, fn: Any, recurse: bool = True) -> Any:
        kept: Tensor = getattr(self, BIAS)
        kind._apply(self, fn, recurse)
        present: Tensor = getattr(self, BIAS)
        if present.dtype is not torch.float32:
            setattr(self, BIAS, kept.to(present.device))
        return self

    router.__class__ = derived_class(kind, {"forward": forward, "_apply": apply, _RATE: rate})


def routers_with_moving_bias(model: nn.Module) -> list[nn.Module]:
    """Return the routers of a model whose biases move."""
    return _with_moving_bias(model.modules())


def _with_moving_bias(parts: Iterable[nn.Module]) -> list[nn.Module]:
    return [part for part in parts if getattr(part, _RATE, 0.0)]


def balanced_parts(model: nn.Module) -> list[tuple[nn.Module, list[nn.Module]]]:
    """Return the language models within a model, each with its routers whose biases move.

    Routers that are in none of them, as where `model` is a part of one, come with `model`.
    """
    found = [(part, routers_with_moving_bias(part)) for part in model.modules() if getattr(part, COUNTS_TOKENS, False)]
    known = {id(router) for _, routers in found for router in routers}
    others = [router for router in routers_with_moving_bias(model) if id(router) not in known]
    return [*found, (model, others)] if others else found


def biases_in_float32(model: nn.Module) -> set[int]:
    """Return the biases that must stay in float32, by `id`."""
    return {id(getattr(router, BIAS)) for router in routers_with_moving_bias(model)}


@contextmanager
def counting_tokens(language_model: nn.Module, counted: Tensor | None) -> Generator[None]:
    """Context of a forward in training, in which the routers of a language model count tokens.

    Args:
        language_model: with routers whose biases move.
        counted: which tokens count, `(batch x length,)`; None for all.
    """
    parts = list(language_model.modules())
    routers = _with_moving_bias(parts)
    forward = _begin(parts, routers, counted)
    for router in routers:
        vars(router)[_FORWARD] = forward
    try:
        yield
    finally:
        for router in routers:
            vars(router).pop(_FORWARD, None)
    _end(language_model, forward)


class _Forward:
    """What routers count in a forward of their language model that has not ended."""

    def __init__(self, counted: Tensor | None, *, is_trained: bool) -> None:
        self.counted, self.is_trained = counted, is_trained
        self.found: list[tuple[nn.Module, Tensor]] = []
        """Routers, each with how many tokens its experts get, in the order of their calls."""


@_disable_dynamo
def _begin(parts: Sequence[nn.Module], routers: Sequence[nn.Module], counted: Tensor | None) -> _Forward:
    if not _hooks:
        _hooks.append(register_optimizer_step_post_hook(_after_step))
    is_trained = any(each.requires_grad for part in parts for each in part.parameters(recurse=False))
    if is_trained:
        refuse_peft(parts)
        _refuse_replicas(routers)
        _refuse_other_types(routers)
    return _Forward(counted, is_trained=is_trained)


def refuse_peft(parts: Iterable[nn.Module]) -> None:
    """Refuse models with parts of PEFT: what it saves holds no biases, which would be lost.

    Args:
        parts: all modules of the model.

    Raises:
        ConfigError: the model has one.
    """
    part = next((part for part in parts if type(part).__module__.startswith("peft.")), None)
    if part is not None:
        raise ConfigError(
            f"balance_experts(method='bias') is not served for a model with parts of PEFT ({type(part).__name__}): "
            "its save_pretrained saves adapters alone, without the biases that have moved. Use another method, or "
            "merge the adapters first (merge_and_unload)."
        )


def _refuse_other_types(routers: Sequence[nn.Module]) -> None:
    """Refuse biases in another type than float32, in which moves would be lost.

    Raises:
        ConfigError: there is one.
    """
    other = next(
        (each for each in (getattr(router, BIAS) for router in routers) if each.dtype is not torch.float32), None
    )
    if other is not None:
        raise ConfigError(
            f"the {BIAS} of a router is {other.dtype}, as after load_state_dict(assign=True) with such values. Biases "
            "that move must be torch.float32: convert the values before, or load without assign=True."
        )


def _refuse_replicas(routers: Sequence[nn.Module]) -> None:
    """Refuse models on several ranks that are not sharded by FSDP2.

    `DistributedDataParallel` replaces buffers by those of rank 0 in forwards, and may not be told from other ways.

    Raises:
        ConfigError: the model is one.
    """
    if dist.is_initialized() and dist.get_world_size() > 1 and any(router not in _of_units for router in routers):
        raise ConfigError(
            "a model that balance_experts(method='bias') has changed trains on several ranks, but is not sharded by "
            "this package, so numbers of tokens may be lost, as with DistributedDataParallel. Parallelize it by a "
            "strategy of this package, with hybrid_shard_degree=1 for replicas, or use another method."
        )


@_disable_dynamo
def _end(language_model: nn.Module, forward: _Forward) -> None:
    """Add what was counted to the numbers of the step."""
    if not forward.is_trained:
        return
    _have_run[language_model] = None
    with torch.no_grad():
        for router, found in forward.found:
            counts: Tensor = getattr(router, _COUNTS)
            counts += found


@contextmanager
def without_counts() -> Generator[None]:
    """Context of a forward whose samples do not count, since another rank has them, too."""
    _stand_ins.append(None)
    try:
        yield
    finally:
        _stand_ins.pop()


@_disable_dynamo
def _count(router: Any, routed: Any) -> None:
    """Note the tokens of a router in a forward; see [Note: which tokens count].

    Raises:
        ConfigError: a part of the model is called in training, or the router does not route tokens one by one.
    """
    if not router.training or is_in_backward() or _stand_ins:
        return
    running: _Forward | None = vars(router).get(_FORWARD)
    if running is None:
        if not torch.is_grad_enabled():
            return
        raise ConfigError(
            "a part of a model whose routers are balanced by a bias was called in training. Tokens are counted in "
            "forwards of the whole language model: call that, or balance the model in another way."
        )
    if not running.is_trained:
        return
    if not isinstance(routed, tuple) or len(routed) != 3:
        raise ConfigError(
            f"{type(router).__name__} does not return logits, weights and indices of experts, so its tokens cannot be "
            "counted for method='bias'. Use another method."
        )
    with torch.no_grad(), _disable_current_modes():  # nothing of it is kept where activations are recomputed
        chosen: Tensor = routed[2].detach()
        chosen = chosen.full_tensor() if isinstance(chosen, DTensor) else chosen
        counted = running.counted
        if counted is not None and len(counted) != len(chosen):
            raise ConfigError(
                f"{type(router).__name__} was given {len(chosen)} tokens, of sequences with {len(counted)}, so it is "
                "not known which of them are filler for context parallelism. Pad sequences to a multiple of twice "
                "context_parallel_degree."
            )
        chosen = chosen if counted is None else chosen[counted.to(chosen.device)]
        running.found.append((router, torch.bincount(chosen.reshape(-1), minlength=len(getattr(router, BIAS)))))


def leave_to_units(routers: Iterable[nn.Module]) -> None:
    """Note that `move_biases` is called for these routers where the units of their model are compared."""
    _of_units.update(routers)


@torch.no_grad()
def move_biases(routers: Sequence[nn.Module]) -> None:
    """Move biases against the tokens of all ranks since the last call. A collective; see [Note: when biases move].

    Raises:
        ConfigError: a backward is running, which may compute with the present biases again; a bias is not float32.
    """
    if not routers:
        return
    if is_in_backward():
        raise ConfigError(
            "an optimizer steps within backward, which may compute routers again, so their biases cannot move there. "
            "Step it after backward, or use another method of balance_experts."
        )
    _refuse_other_types(routers)
    own: list[Tensor] = [getattr(router, _COUNTS) for router in routers]
    joined = torch.cat(own)
    if dist.is_initialized() and dist.get_world_size() > 1:
        if group_health.is_unavailable:
            return  # the step will be undone
        dist.all_reduce(joined)
        if group_health.cause is not None:
            return  # what has arrived may be garbage
    for router, mine, counts in zip(routers, own, joined.split([len(each) for each in own]), strict=True):
        bias: Tensor = getattr(router, BIAS)
        sign = torch.sign(counts.sum() - counts * len(counts))  # of the mean minus each number, in integers
        bias.add_(sign.to(bias), alpha=getattr(router, _RATE))
        mine.zero_()


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    """Step post-hook: move the biases of models that are not sharded and whose parameters have been updated."""
    if not _have_run:
        return
    stepped = {id(each) for group in optimizer.param_groups for each in group["params"]}
    for model in list(_have_run):
        if any(id(each) in stepped for each in model.parameters()):
            del _have_run[model]
            routers = [router for router in routers_with_moving_bias(model) if router not in _of_units]
            _refuse_replicas(routers)
            move_biases(routers)
