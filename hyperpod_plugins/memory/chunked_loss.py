"""Cross entropy of a language model without its whole logits: head and loss are computed chunk by chunk.

Logits take `tokens x vocabulary x 4` bytes, and backward needs them again: with 128 k entries in the vocabulary that is
more than all else together from a few thousand tokens on. Here each chunk of tokens goes through head and loss alone,
and once more in backward, so that the logits of one chunk exist at a time. The result is that of the whole, up to the
rounding of sums. The head is called as the module that it is: its parameters may be sharded, and its logits split over
the vocabulary (`loss_parallel`).

`chunk_loss(model)` does this in a Hugging Face model for causal language modelling, whose code does not change.
"""

from collections.abc import Callable
from functools import partial, wraps
from types import MethodType
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hyperpod_plugins.errors import ConfigError

CAUSAL_LOSS = "ForCausalLM"
"""Name by which transformers knows the loss of causal language models."""
IGNORED = -100
"""Label of positions without a loss, as in torch and transformers."""


def chunked_cross_entropy(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    labels: Tensor,
    *,
    num_chunks: int,
    ignore_index: int = IGNORED,
    reduction: str = "mean",
) -> Tensor:
    """Cross entropy of `head(hidden)` against labels, without the whole logits.

    Args:
        head: Maps `(tokens, hidden size)` to logits `(tokens, vocabulary)`; called twice for each chunk.
        hidden: `(..., hidden size)`.
        labels: `(...)`, int64; positions with `ignore_index` count for nothing.
        num_chunks: Number of chunks, from 1 on; more chunks than tokens are as many as there are tokens.
        ignore_index: Label of positions without a loss.
        reduction: "mean" over the positions with a loss, or their "sum".

    Returns:
        `()`, float32.

    Raises:
        ConfigError: `num_chunks` is below 1, or another reduction is asked for.
    """
    if num_chunks < 1 or reduction not in ("mean", "sum"):
        raise ConfigError(
            f"chunked_cross_entropy takes num_chunks from 1 on and the reduction 'mean' or 'sum', but was given "
            f"{num_chunks} and {reduction!r}."
        )
    hidden, labels = hidden.flatten(0, -2), labels.flatten().to(hidden.device)
    loss_of = partial(_chunk_loss, head, ignore_index)
    parts = [
        checkpoint(loss_of, *chunk, use_reentrant=False)
        for chunk in zip(hidden.chunk(num_chunks), labels.chunk(num_chunks), strict=True)
    ]
    total = torch.stack(parts).sum()
    return total if reduction == "sum" else total / (labels != ignore_index).sum()


def _chunk_loss(head: Callable[[Tensor], Tensor], ignore_index: int, hidden: Tensor, labels: Tensor) -> Tensor:
    loss = F.cross_entropy(head(hidden).float(), labels, ignore_index=ignore_index, reduction="sum")
    return getattr(loss, "full_tensor", lambda: loss)()


class LogitsNotComputed:
    """Stands for the logits of a model whose loss is computed in chunks; each use of it says so."""

    def __init__(self, hidden: Tensor) -> None:
        """Keep what the head would have been given."""
        self.hidden = hidden
        """`(batch, tokens, hidden size)`."""

    def __getattr__(self, name: str) -> NoReturn:
        """Raise `AttributeError`: there are no logits."""
        raise AttributeError(
            f"logits.{name}: the loss is computed in chunks (chunked_loss), so there are no whole logits in training. "
            "Leave chunked_loss out, or compute what you need of them from hidden states."
        )


def chunk_loss(model: nn.Module, num_chunks: int) -> None:
    """Compute the loss of a Hugging Face causal language model in chunks, in place, when it trains with labels.

    Its head then returns `LogitsNotComputed`. Without labels or gradients the model works as before.

    Args:
        model: A `...ForCausalLM` of transformers, before or after it is sharded.
        num_chunks: See `chunked_cross_entropy`.

    Raises:
        ConfigError: The model has another loss or changes its logits before the loss.
    """
    head, forward = _head_of(model), model.forward
    original: Callable[..., Tensor] = getattr(model, "loss_function")  # noqa: B009 (a property of transformers)
    defers = [False]

    @wraps(forward)
    def model_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        defers[0] = torch.is_grad_enabled() and kwargs.get("labels") is not None
        try:
            return forward(*args, **kwargs)
        finally:
            defers[0] = False

    def loss_function(
        logits: Any,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = IGNORED,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if not isinstance(logits, LogitsNotComputed):
            return original(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs)
        defers[0] = False
        targets = F.pad(labels, (0, 1), value=ignore_index)[..., 1:] if shift_labels is None else shift_labels
        reduction = "mean" if num_items_in_batch is None else "sum"
        total = chunked_cross_entropy(
            head, logits.hidden, targets, num_chunks=num_chunks, ignore_index=ignore_index, reduction=reduction
        )
        return total if num_items_in_batch is None else total / num_items_in_batch

    _defer_calls(head, lambda: defers[0])
    vars(model)["forward"] = MethodType(model_forward, model)
    vars(model)["_loss_function"] = loss_function  # as the setter of transformers does


def _defer_calls(head: nn.Module, is_deferred: Callable[[], bool]) -> None:
    """Make calls of a module return `LogitsNotComputed` while `is_deferred()`.

    Hooks of the module, such as those of tensor parallelism, run when it is called for a chunk. Python looks `__call__`
    up in the class, so the object gets a class of its own.
    """
    kind = type(head)

    def call(self: nn.Module, hidden: Tensor) -> Any:
        return LogitsNotComputed(hidden) if is_deferred() else kind.__call__(self, hidden)

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__call__": call}
    head.__class__ = type(kind.__name__, (kind,), names)


def _head_of(model: nn.Module) -> nn.Module:
    name, config = type(model).__name__, getattr(model, "config", None)
    loss_type = getattr(model, "loss_type", None)
    find_head = getattr(model, "get_output_embeddings", None)
    head = None if find_head is None else find_head()
    if head is None or loss_type != CAUSAL_LOSS:
        raise ConfigError(
            f"chunked_loss is for Hugging Face models with a causal language model's loss; {name} has the loss "
            f"{loss_type!r}. Call hyperpod_plugins.memory.chunked_cross_entropy in the model instead, or leave it out."
        )
    changes = [
        f"{key}={value}"
        for key in ("final_logit_softcapping", "logit_scale", "logits_scaling", "output_multiplier_scale")
        if (value := getattr(config, key, None)) not in (None, 1, 1.0)
    ]
    if changes:
        raise ConfigError(
            f"{name} changes its logits before the loss ({', '.join(changes)}), which chunked_loss would leave out. "
            "Leave chunked_loss out for this model."
        )
    return head
