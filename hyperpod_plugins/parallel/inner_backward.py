"""Run backward inside the forward of a sharded model's root, as manual optimization does in `training_step`.

FSDP2 expects backward to begin at the output of the root's forward. Here it has ended before that output exists. Two
things follow for the parameters of the root itself, which lie in no unit inside it:

* Nothing tells FSDP2 that a backward has begun if no unit inside the root has run. Gradients would stay with the
  gathered parameters, and an optimizer, which holds the shards, would find none and change nothing.
* A backward ends with the root resharded, so that a second forward in the same step, as in a GAN, would compute with
  shards. A part of the root that runs then gathers the root again.
"""

# FSDP2 has no public API for the end of a backward.
# pyright: reportPrivateUsage=false

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import register_module_forward_pre_hook


def reduce_root_in_backward(root: nn.Module, loss: Tensor) -> None:
    """Make the backward of `loss`, inside the forward of `root`, reduce the root's own gradients at its end."""
    if isinstance(root, FSDPModule) and loss.requires_grad:
        state: Any = root._get_fsdp_state()
        loss.register_hook(lambda _: state._register_root_post_backward_final_callback())


@contextmanager
def root_gathered_for_its_parts(root: nn.Module) -> Generator[None]:
    """Context of the root's forward, in which each part with parameters of the root gathers it before it runs."""
    if not isinstance(root, FSDPModule):
        yield
        return
    parts = set(_own_parts(root))

    def gather(part: nn.Module, *_: Any) -> None:
        if part in parts:
            root.unshard()  # does nothing if it is gathered

    hook = register_module_forward_pre_hook(gather)
    try:
        yield
    finally:
        hook.remove()


def _own_parts(part: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules with parameters that belong to the unit of `part`."""
    if any(parameter is not None for parameter in part._parameters.values()):
        yield part
    for child in part.children():
        if not isinstance(child, FSDPModule):
            yield from _own_parts(child)
