"""Cross entropy of a language model without its whole logits: head and loss are computed chunk by chunk.

Logits take `tokens x vocabulary x 4` bytes, and backward needs them again: with 128 k entries in the vocabulary that is
more than all else together from a few thousand tokens on. Here each chunk of tokens goes through head and loss alone,
and once more in backward, so that the logits of one chunk exist at a time. The result is that of the whole, up to the
rounding of sums. The head is called as the module that it is: its parameters may be sharded, and its logits split over
the vocabulary (`loss_parallel`).

`chunk_loss(model)` does this in a Hugging Face model for causal language modelling, whose code does not change. Where
it scales or caps its logits before the loss (Cohere, Gemma 2), the same operations are applied to those of a chunk.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any, NoReturn, Self, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.memory.recompute import derived_class

CAUSAL_LOSS = "ForCausalLM"
"""Name by which transformers knows the loss of causal language models."""
_OLDER_NAME = "LMHeadModel"
"""How the names of other causal language models end, for which transformers falls back to that loss."""
_DEFERS = "_hyperpod_defers"
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
        num_chunks: Number of chunks, from 1 on; some are empty if there are fewer tokens. The head is called as often
            on each rank, however many tokens each has.
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
        for chunk in zip(hidden.tensor_split(num_chunks), labels.tensor_split(num_chunks), strict=True)
    ]
    total = torch.stack(parts).sum()
    return total if reduction == "sum" else total / (labels != ignore_index).sum()


def _chunk_loss(head: Callable[[Tensor], Tensor], ignore_index: int, hidden: Tensor, labels: Tensor) -> Tensor:
    loss = F.cross_entropy(head(hidden).float(), labels, ignore_index=ignore_index, reduction="sum")
    return getattr(loss, "full_tensor", lambda: loss)()


class UnusableLogits(ABC):
    """Stands for the logits of a model that are not there as a whole; each use of it says so."""

    @classmethod
    @abstractmethod
    def refusal(cls, use: str) -> str:
        """Return the message for a use, such as `logits.mean`."""

    def __getattr__(self, name: str) -> NoReturn:
        """Raise `AttributeError`: there are no whole logits."""
        raise AttributeError(self.refusal(f"logits.{name}"))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Raise `ConfigError`: there are no whole logits."""
        raise ConfigError(cls.refusal(f"{getattr(function, '__name__', function)}(logits)"))


Change = Callable[[Tensor], Tensor]
"""What a model does to its logits before the loss, element by element."""


class LogitsNotComputed(UnusableLogits):
    """Stands for the logits of a model whose loss is computed in chunks.

    Between head and loss a model may multiply and divide them by numbers and take their tanh: these changes are kept,
    in their order, and applied to the logits of each chunk.
    """

    def __init__(self, hidden: Tensor, head: nn.Module, changes: tuple[Change, ...] = ()) -> None:
        """Keep what the head would have been given, and what comes after it."""
        self.hidden = hidden
        """`(batch, tokens, hidden size)`."""
        self._head = head
        self._changes = changes

    def of_chunk(self, hidden: Tensor) -> Tensor:
        """Return the logits `(tokens, vocabulary)` of a chunk `(tokens, hidden size)`, as the loss takes them."""
        logits = self._head(hidden)
        for change in self._changes:
            logits = change(logits)
        return logits

    def contiguous(self) -> Self:
        """Return this object: chunks are contiguous."""
        return self

    def float(self) -> Self:
        """Return what stands for the logits in float32."""
        return self._followed_by(Tensor.float)

    def tanh(self) -> Self:
        """Return what stands for the hyperbolic tangent of the logits."""
        if not self._is_changeable():
            raise ConfigError(self.refusal("tanh(logits)"))
        return self._followed_by(torch.tanh)

    def __mul__(self, factor: object) -> Self:
        """Return what stands for the logits times a number."""
        if not _is_number(factor) or not self._is_changeable():
            raise ConfigError(self.refusal("mul(logits)"))
        return self._followed_by(lambda logits: logits * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: object) -> Self:
        """Return what stands for the logits divided by a number."""
        if not _is_number(divisor) or not self._is_changeable():
            raise ConfigError(self.refusal("truediv(logits)"))
        return self._followed_by(lambda logits: logits / divisor)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Return what stands for `torch.tanh(logits)`; other functions need whole logits."""
        if function is torch.tanh and not kwargs:
            return args[0].tanh()
        return super().__torch_function__(function, types, args, kwargs)

    def _is_changeable(self) -> bool:
        """Whether the model has no loss yet: what is done to logits afterwards would need their values."""
        return vars(self._head)[_DEFERS]

    def _followed_by(self, change: Change) -> Self:
        return type(self)(self.hidden, self._head, (*self._changes, change))

    @classmethod
    def refusal(cls, use: str) -> str:
        """Return the message for a use, such as `logits.mean`."""
        return (
            f"{use}: the loss is computed in chunks (loss_chunks), so there are no whole logits in training. Before "
            "its loss a model may multiply and divide them by numbers and take their tanh. For anything else, leave "
            "loss_chunks out, or compute what you need of them from hidden states."
        )


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _refuse_use(name: str) -> Callable[..., NoReturn]:
    def use(self: UnusableLogits, *_: Any) -> NoReturn:
        raise ConfigError(self.refusal(f"{name}(logits)"))

    return use


_OPERATORS = (
    "add radd iadd sub rsub isub mul rmul imul truediv rtruediv itruediv pow matmul rmatmul neg abs getitem setitem "
    "len iter float bool eq ne lt le gt ge"
)
for _name in _OPERATORS.split():
    setattr(UnusableLogits, f"__{_name}__", _refuse_use(_name))


def is_causal_language_model(part: nn.Module) -> bool:
    """Whether a module is a causal language model of transformers, whose loss its attribute `loss_type` names."""
    loss_type = vars(part).get("loss_type", "")
    return loss_type == CAUSAL_LOSS or (loss_type is None and type(part).__name__.endswith(_OLDER_NAME))


def chunk_loss(model: nn.Module, num_chunks: int) -> None:
    """Compute the loss of a Hugging Face causal language model in chunks, in place, when it trains with labels.

    Its head then returns `LogitsNotComputed`. Without labels or gradients the model works as before. The model and its
    head get classes of their own, so that copies of the model compute with their weights.

    Args:
        model: A `...ForCausalLM` or `...LMHeadModel` of transformers, before or after it is sharded.
        num_chunks: See `chunked_cross_entropy`.

    Raises:
        ConfigError: The model has another loss, or its `forward` was replaced in the object. A step raises it if the
            model has computed its loss in another way, or changes its logits before the loss by other operations than
            products with numbers, quotients and tanh.
    """
    _check(model)
    kind: Any = type(model)
    head = _head_of(model)
    arguments = inspect.signature(kind.forward)

    @wraps(kind.forward)  # transformers reads the signature
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = vars(_head_of(self))
        given = arguments.bind(self, *args, **kwargs).arguments
        labels = given.get("labels", given.get("kwargs", {}).get("labels"))
        own[_DEFERS] = torch.is_grad_enabled() and labels is not None
        try:
            found = kind.forward(self, *args, **kwargs)
            is_whole = own[_DEFERS]
        finally:
            own[_DEFERS] = False
        if is_whole:
            raise ConfigError(
                f"{kind.__name__} has computed its loss without its loss_function, so that there were whole logits in "
                "spite of loss_chunks. Leave loss_chunks out, or a loss of the program or a library that computes it."
            )
        return found

    def loss_function(self: Any) -> Callable[..., Tensor]:
        return partial(_loss_of, kind.loss_function.__get__(self), _head_of(self), num_chunks)

    chunked = property(loss_function, _refuse_other_loss)
    model.__class__ = derived_class(kind, {"forward": forward, "loss_function": chunked})
    vars(head)[_DEFERS] = False
    of_head = type(head)

    def call(self: Any, hidden: Tensor) -> Any:
        return LogitsNotComputed(hidden, self) if vars(self)[_DEFERS] else of_head.__call__(self, hidden)

    head.__class__ = derived_class(of_head, {"__call__": call})


def _refuse_other_loss(model: nn.Module, _: object) -> NoReturn:
    raise ConfigError(
        f"loss_chunks has replaced the loss function of {type(model).__name__}, so it cannot be set any more. Leave "
        "loss_chunks out for a model with a loss function of its own."
    )


def _loss_of(
    whole: Callable[..., Tensor],
    head: nn.Module,
    num_chunks: int,
    logits: Any,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = IGNORED,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """What `ForCausalLMLoss` of transformers returns, whose arguments it takes."""
    if not isinstance(logits, LogitsNotComputed):
        return whole(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs)
    vars(head)[_DEFERS] = False
    targets = F.pad(labels, (0, 1), value=ignore_index)[..., 1:] if shift_labels is None else shift_labels
    reduction = "mean" if num_items_in_batch is None else "sum"
    total = chunked_cross_entropy(
        logits.of_chunk, logits.hidden, targets, num_chunks=num_chunks, ignore_index=ignore_index, reduction=reduction
    )
    return total if num_items_in_batch is None else total / num_items_in_batch


def _head_of(model: Any) -> nn.Module:
    return model.get_output_embeddings()


def _check(model: nn.Module) -> None:
    """Refuse models that are no causal language models of transformers, or whose loss is not that of their logits."""
    name = type(model).__name__
    if getattr(model, "get_output_embeddings", lambda: None)() is None or not is_causal_language_model(model):
        raise ConfigError(
            f"loss_chunks is for Hugging Face models with a causal language model's loss; {name} has the loss "
            f"{vars(model).get('loss_type')!r}. Call hyperpod_plugins.memory.chunked_cross_entropy in the model "
            "instead, or leave it out."
        )
    if "forward" in vars(model):
        raise ConfigError(
            f"the forward of {name} was replaced in the object, by the program or a library, where loss_chunks cannot "
            "change its loss. Leave one of them out."
        )
    from transformers.loss.loss_utils import ForCausalLMLoss

    if getattr(model, "loss_function") is not ForCausalLMLoss:  # noqa: B009 (a property of transformers)
        raise ConfigError(
            f"{name} has a loss function of its own, which loss_chunks would replace by cross entropy. Leave "
            "loss_chunks out for this model."
        )
    if "loss_function" not in inspect.getsource(type(model).forward):
        raise ConfigError(f"{name} computes its loss itself, which loss_chunks cannot do in chunks. Leave it out.")
