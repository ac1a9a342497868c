"""What a step changes beside gradients, and how to put it back: buffers, and FSDP2's place in an iteration."""

# A module's tables of children and buffers are walked in a tenth of the time that `modules()` takes.
# pyright: reportPrivateUsage=false

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

CAN_RESET = "reset_iter_state" in vars(FSDPModule)
"""Whether this torch (2.13 does) can put FSDP2's modules back after an exception."""


class Buffers:
    """The buffers of some modules, as they were when a step began."""

    def __init__(self, parts: Iterable[nn.Module] = ()) -> None:
        present = [buffer for part in parts for buffer in part._buffers.values() if buffer is not None]
        self._saved = [(buffer, buffer.detach().clone()) for buffer in present]

    def put_back(self) -> None:
        """Let them have their values again."""
        with torch.no_grad():
            for buffer, saved in self._saved:
                buffer.copy_(saved)


def drop_gradients(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Forget what a step has computed so far, wherever it was interrupted."""
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    if not CAN_RESET:
        return
    roots: list[str] = []
    for name, part in model.named_modules():
        if isinstance(part, FSDPModule) and not any(name.startswith(f"{root}." if root else "") for root in roots):
            roots.append(name)
            part.reset_iter_state()


def parts_of(model: nn.Module) -> list[nn.Module]:
    """`model.modules()`, in a tenth of the time and in another order; each step asks for them."""
    parts, known = [model], {model}
    for part in parts:
        for child in part._modules.values():
            if child is not None and child not in known:
                known.add(child)
                parts.append(child)
    return parts
