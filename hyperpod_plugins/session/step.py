"""One step of a loop written by hand, as its body sees it."""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Protocol

from torch.optim import Optimizer

from hyperpod_plugins.comm import group_health
from hyperpod_plugins.errors import LoopError, PeerLost
from hyperpod_plugins.recovery.rng import AFTER, BATCH

# What a loop must not do, noticed where it does it: collectives and optimizer steps that no repair knows of.

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
        group_health.forbid(why)

    def allow(self) -> None:
        """Let it communicate."""
        group_health.allow()

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


class RunsSteps(Protocol):
    """What a step asks of its loop."""

    guard: Guard

    @property
    def is_repaired(self) -> bool:
        """Whether the loop goes on after a fault outside of a step."""
        ...

    def run_step(self, step: "Step", compute_loss: Callable[[Any], Any]) -> Any:
        """Compute, vote and commit."""
        ...

    def seed(self, step: "Step", part: str) -> None:
        """Begin the random stream of a part of the step's body."""
        ...


class Step:
    """A step, to be used as `with step:`; what comes after `run` in that block is repeated after a fault.

    Attributes:
        index: number of the step, from 0.
        epoch: number of its epoch, from 0.
        ends_epoch: whether it is the last one of its epoch.
        batches: what this rank trains on, one batch a micro-step; empty where the step was run before.
        is_again: whether the step was committed before, and what follows `run` is repeated.
    """

    def __init__(
        self,
        loop: RunsSteps,
        *,
        index: int,
        epoch: int,
        ends_epoch: bool,
        batches: tuple[Any, ...] = (),
        weights: tuple[float, ...] = (),
        is_replay: bool = False,
        result: Any = None,
    ) -> None:
        self.index = index
        self.epoch = epoch
        self.ends_epoch = ends_epoch
        self.batches = batches
        self.weights = weights
        self.is_again = is_replay
        self.was_interrupted = False
        """Whether a fault came in its body; the loop sees to it."""
        self.error: BaseException | None = None
        """What its body raised, if the loop does not see to it."""
        self.result = result
        """What `run` returned."""
        self._loop = loop
        self._is_entered = self._is_run = False

    def __enter__(self) -> "Step":
        """Begin the body."""
        self._is_entered = True
        self._loop.guard.forbid(BEFORE_RUN)
        self._loop.seed(self, BATCH)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        """End the body; after a fault the loop comes back to it, or goes on where the others are."""
        self._loop.guard.forbid(BETWEEN)
        self.was_interrupted = isinstance(error, PeerLost) and self._loop.is_repaired
        self.error = None if self.was_interrupted else error
        if error is None and not self._is_run:
            raise LoopError(f"the body of step {self.index} ended without step.run(...): nothing was trained.")
        return self.was_interrupted

    def run(self, compute_loss: Callable[[Any], Any]) -> Any:
        """Train on the batches of this step: forward, backward, vote, and the optimizers' and schedulers' steps.

        After a fault `compute_loss` is called again, with the same batches and the same random numbers.

        Args:
            compute_loss: called with each batch of this rank; returns the mean loss over its samples, `()`, or a dict
                of such means with the key `"loss"`. It may communicate. Backward is not its business, and it must not
                change what lives on beside buffers of the model.

        Returns:
            The same as `compute_loss`, as the mean over the whole global batch; equal on all ranks.

        Raises:
            LoopError: this is not inside `with step:`, or `run` was called before.
            Exception: `compute_loss` raised the same on this rank too often.
        """
        if not self._is_entered or self._is_run:
            raise LoopError(
                f"step {self.index}: call step.run(...) once, in the body of `with step:`. It was called "
                + ("twice." if self._is_run else "outside.")
            )
        self._loop.guard.allow()
        if not self.is_again:
            self.result = self._loop.run_step(self, compute_loss)
        self._loop.seed(self, AFTER)  # what follows may be repeated by a process that has not computed the step
        self._is_run = True
        return self.result

    def check(self) -> None:
        """Make sure that the loop's body did what it must.

        Raises:
            LoopError: it has no `with step:`.
        """
        if not self._is_entered:
            raise LoopError(
                f"step {self.index} was left without `with step:`. Write: for step in session.steps(loader): with "
                "step: loss = step.run(compute_loss)."
            )
