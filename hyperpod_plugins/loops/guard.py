"""What a loop must not do, noticed where it does it: collectives and optimizer steps that no repair knows of."""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from hyperpod_plugins.comm import breaker
from hyperpod_plugins.errors import LoopError

BETWEEN = (
    "a collective was called between the steps of a loop, where a fault could not be repaired: every rank would be at "
    "another place. Put it after `step.run(...)` in the body of `with step:`, and what comes before the first step "
    "before `session.steps(...)`; a sharded model communicates in its forward, too."
)
BEFORE_RUN = (
    "a collective was called in the body of `with step:` before `step.run(...)`. Communicate in the function that "
    "is given to `run`, which is called again after a fault, or after `run`."
)
BY_HAND = (
    "optimizer.step() was called by hand. A step counts only when all ranks have agreed that it went well: let the "
    "function that is given to `step.run(...)` return the loss, and leave backward, optimizer and schedulers to it."
)


class Guard:
    """Of one loop."""

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._is_open = False
        self._hooks = [optimizer.register_step_pre_hook(self._before_step) for optimizer in optimizers]

    def forbid(self, why: str) -> None:
        """Let the main thread's collectives raise from now on."""
        breaker.forbid(why)

    def allow(self) -> None:
        """Let it communicate."""
        breaker.allow()

    @contextmanager
    def committing(self) -> Generator[None]:
        """Let optimizers step inside."""
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    def close(self) -> None:
        """The loop has ended."""
        self.allow()
        for hook in self._hooks:
            hook.remove()

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._is_open:
            raise LoopError(BY_HAND)
