"""Activation checkpointing by block: what a block computes is dropped, and computed again in its backward.

`full` keeps the inputs of a block only. `selective` also keeps the results of attention and of every second matrix
product, which cost the most to compute again; it drops the rest, which takes most of the memory. This is the policy of
torchtitan's selective checkpointing by operators.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, get_args

from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint  # pyright: ignore
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

Recompute = Literal["none", "selective", "full"]
RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)
_PRODUCTS = ("mm", "addmm", "bmm", "linear", "_scaled_mm")
_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_attention_math",
)


def recompute_blocks(blocks: Sequence[nn.Module], kind: Recompute = "full") -> None:
    """Set blocks up for recomputation, in place. Names of parameters do not change.

    Recomputation draws the same random numbers, so that dropout drops the same elements.

    Args:
        blocks: Modules that backward computes again one by one, such as the layers of a transformer.
        kind: What is kept; "none" does nothing.
    """
    if kind == "none":
        return
    options: dict[str, Any] = {"context_fn": _selective_contexts} if kind == "selective" else {}
    for block in blocks:
        checkpoint(block, preserve_rng_state=True, **options)


def recomputes_itself(model: nn.Module) -> bool:
    """Whether a model checkpoints activations by its own means, such as `gradient_checkpointing_enable()`."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def _selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    return create_selective_checkpoint_contexts(_SelectivePolicy())


class _SelectivePolicy:
    """Which results are kept, for one call of a block; forward and recomputation count separately."""

    def __init__(self) -> None:
        self._num_products = {False: 0, True: 0}

    def __call__(self, context: Any, function: Callable[..., Any], *_: Any, **__: Any) -> CheckpointPolicy:
        name = getattr(getattr(function, "overloadpacket", None), "__name__", "")
        if name in _ATTENTION:
            return CheckpointPolicy.MUST_SAVE
        if name in _PRODUCTS:
            self._num_products[context.is_recompute] += 1
            if self._num_products[context.is_recompute] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE
