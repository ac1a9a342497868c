"""`Step`: one step of a custom loop, as its body sees it; `LoopGuard` forbids what the loop must not do."""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from hyperpod_plugins.comm import group_health
from hyperpod_plugins.errors import LoopError, PeerLost
from hyperpod_plugins.recovery.optimizer_copy import FreshGradients
from hyperpod_plugins.recovery.rng import BATCH

# Messages for what a loop must not do: collectives and optimizer steps that recovery could not repair.

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
    "function that is given to `step.run(...)` return the loss, and leave backward, optimizer and schedulers to it. Or "
    "step the optimizers in that function, with session.train(..., manual_optimization=True)."
)
OUTSIDE_RUN = (
    "optimizer.step() was called outside of the function that is given to `step.run(...)`, where a fault would not "
    "undo it. Step the optimizers in that function."
)


class LoopGuard:
    """Makes one loop's collectives and optimizer steps raise where recovery could not repair them."""

    def __init__(self, optimizers: Iterable[Optimizer], *, is_manual: bool = False) -> None:
        """Watch nothing yet.

        Args:
            optimizers: those that the loop trains with.
            is_manual: whether the program steps them itself, in the function given to `Step.run`.
        """
        self._is_open = False
        self._optimizers, self._hooks = list(optimizers), list[RemovableHandle]()
        self._is_manual = is_manual
        self._fresh: FreshGradients | None = None
        self._is_again = False

    def open(self) -> None:
        """Watch the optimizers, as the loop begins; one that is never entered must not forbid the steps of another."""
        self._hooks = [optimizer.register_step_pre_hook(self._before_step) for optimizer in self._optimizers]
        if self._is_manual:
            self._fresh = FreshGradients(self._optimizers, unit="step", otherwise="")

    def forbid(self, why: str) -> None:
        """Make the main thread's collectives raise `LoopError(why)` from now on."""
        group_health.forbid_collectives(why)

    def allow(self) -> None:
        """Let the main thread communicate again."""
        group_health.allow_collectives()

    @contextmanager
    def allow_optimizer_steps(self) -> Generator[None]:
        """Context in which optimizers may step."""
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    def begin_step(self) -> None:
        """Begin a step. With manual optimization, it must not use the present gradients."""
        self._is_again = False
        if self._fresh is not None:
            self._fresh.begin()

    @contextmanager
    def manual_optimization(self) -> Generator[None]:
        """Context of each attempt at a step, in which the program steps the loop's optimizers, and no others."""
        if self._is_again and self._fresh is not None:
            self._fresh.put_back()
        self._is_again = True
        hook = register_optimizer_step_pre_hook(self._refuse_unknown)
        try:
            with self.allow_optimizer_steps():
                yield
        finally:
            hook.remove()

    def close(self) -> None:
        """Allow everything again, at the end of the loop."""
        self.allow()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._fresh is not None:
            self._fresh.close()

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._is_open:
            raise LoopError(OUTSIDE_RUN if self._is_manual else BY_HAND)

    def _refuse_unknown(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not any(each.state is optimizer.state for each in self._optimizers):  # a wrapper may share its state
            raise LoopError(
                f"the function given to step.run(...) steps a {type(optimizer).__name__} that session.train was not "
                "given, so a fault would not undo its step, and a replacement would not get its state. Give all "
                "optimizers to session.train(model, [optimizer, ...], manual_optimization=True)."
            )


class StepRunner(Protocol):
    """What a step needs from its loop."""

    guard: LoopGuard

    @property
    def has_recovery(self) -> bool:
        """Whether the loop continues after a fault outside a step."""
        ...

    def run_step(self, step: "Step", compute_loss: Callable[[Any], Any]) -> Any:
        """Compute, vote on and commit a step; return its result."""
        ...

    def return_to_commit(self) -> None:
        """Bring what the body may change to the state right after the commit, as the body runs again."""
        ...

    def begin_block(self, step: "Step") -> None:
        """Begin the step's block."""
        ...

    def end_block(self) -> None:
        """End the part of the block that precedes `run`, if it has not ended."""
        ...

    def check_reads(self, step: "Step") -> None:
        """End that part, and look at the parameters with which it has computed."""
        ...

    def seed(self, step: "Step", part: str) -> None:
        """Start the random stream of a part of the step's body."""
        ...

    def begin_rest(self, step: "Step") -> None:
        """Begin the rest of the step's body, after its commit."""
        ...

    def end_rest(self, step: "Step") -> None:
        """End the step's body, which may have been interrupted."""
        ...


class Step:
    """A training step, used as `with step:`; code after `run` in that block is repeated after a fault.

    Attributes:
        index: number of the step, from 0.
        epoch: number of its epoch, from 0.
        ends_epoch: whether it is the last step of its epoch.
        num_samples: number of samples of the step, over all ranks.
        grad_norm: norm of all gradients before they were clipped, `()`, the same on all ranks; None before `run`, and
            without `max_grad_norm`.
        is_replay: whether the step was committed before, so that only the code after `run` is repeated.
    """

    def __init__(
        self,
        loop: StepRunner,
        *,
        index: int,
        epoch: int,
        ends_epoch: bool,
        batches: tuple[Any, ...] = (),
        weights: tuple[float, ...] = (),
        num_samples: int = 0,
        grad_norm: Tensor | None = None,
        is_replay: bool = False,
        result: Any = None,
        read_again: Callable[[], tuple[Any, ...]] | None = None,
    ) -> None:
        self.index = index
        self.epoch = epoch
        self.ends_epoch = ends_epoch
        self._batches = batches
        self._read_again = read_again
        self.weights = weights
        self.num_samples = num_samples
        self.grad_norm = grad_norm
        self.is_replay = is_replay
        self.was_interrupted = False
        """Whether a fault interrupted the body; the loop handles it."""
        self.error: BaseException | None = None
        """Exception raised by the body, unless the loop handles it."""
        self.result = result
        """Return value of `run`."""
        self._loop = loop
        self._is_entered = self._is_run = False

    @property
    def batches(self) -> tuple[Any, ...]:
        """This rank's batches, one per micro-step. If the body runs again, they are read again when this is called.

        If the job has changed its size since the step was committed, they are this rank's part in the present world.

        Raises:
            LoopError: `Session(samples_per_replica=...)` has given the step another number of samples there.
        """
        if self._read_again is not None:
            self._batches, self._read_again = self._read_again(), None
        return self._batches

    def __enter__(self) -> "Step":
        """Begin the body."""
        self._is_entered = True
        self._loop.guard.forbid(BEFORE_RUN)
        self._loop.seed(self, BATCH)
        self._loop.begin_block(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        """End the body; after a fault, the loop repeats the body or resumes where the other ranks are."""
        self._loop.end_block()
        self._loop.guard.forbid(BETWEEN)
        self.was_interrupted = isinstance(error, PeerLost) and self._loop.has_recovery
        self.error = None if self.was_interrupted else error
        if error is None and not self._is_run:
            raise LoopError(f"the body of step {self.index} ended without step.run(...): nothing was trained.")
        self._loop.end_rest(self)
        return self.was_interrupted

    def run(self, compute_loss: Callable[[Any], Any]) -> Any:
        """Train on the batches of this step: forward, backward, vote, and the optimizers' and schedulers' steps.

        After a fault, `compute_loss` is called again, with the same batches and the same random numbers.

        Args:
            compute_loss: called with each batch of this rank; returns the mean loss over its samples, `()`, or a dict
                of such means with the key `"loss"`. It may communicate, but must not call backward, and must not
                change anything that outlives the call other than buffers of the model. With
                `Session.train(manual_optimization=True)` it is called once, also computes gradients and steps
                optimizers and schedulers, and returns one mean or a dict of means with any keys.

        Returns:
            What `compute_loss` returns, averaged over the whole global batch; equal on all ranks.

        Raises:
            LoopError: `run` is called outside `with step:`, or a second time.
            Exception: `compute_loss` raised too often on this rank.
        """
        if not self._is_entered or self._is_run:
            raise LoopError(
                f"step {self.index}: call step.run(...) once, in the body of `with step:`. It was called "
                + ("twice." if self._is_run else "outside.")
            )
        self._loop.check_reads(self)
        self._loop.guard.allow()
        if self.is_replay:
            self._loop.return_to_commit()
        else:
            self.result = self._loop.run_step(self, compute_loss)
        self._loop.begin_rest(self)
        self._is_run = True
        return self.result

    def check(self) -> None:
        """Check that the loop's body used the step.

        Raises:
            LoopError: the body has no `with step:`.
        """
        if not self._is_entered:
            raise LoopError(
                f"step {self.index} was left without `with step:`. Write: for step in session.steps(loader): with "
                "step: loss = step.run(compute_loss)."
            )
