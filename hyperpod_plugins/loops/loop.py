"""The life of a loop: its steps one after the other, and the way back into it after a fault.

A fault inside a step is the transaction's business; the loop does not see it. A fault in the rest of a step's body, in
its data, or between two steps interrupts the body (`Step.__exit__` sees to that), and so do a return to a snapshot and
a world of another size. Then all ranks say where they stand, and go on where that one stands that has come furthest:
before a step, or in the rest of the body of the last one, which is then repeated. A newcomer comes in the same way.
"""

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from hyperpod_plugins.data import StatefulLoader
from hyperpod_plugins.errors import DeviceHung, PeerLost, RecoveryError
from hyperpod_plugins.loops.compute import Computation, Computed
from hyperpod_plugins.loops.data import steps_of
from hyperpod_plugins.loops.guard import BETWEEN, Guard
from hyperpod_plugins.loops.position import Position, refuse_unreadable
from hyperpod_plugins.loops.seat import Seat
from hyperpod_plugins.loops.step import Step
from hyperpod_plugins.loops.trained import Trained
from hyperpod_plugins.loops.transaction import Transactions, ends_alone
from hyperpod_plugins.parallel.finite import FiniteCheck


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How far a loop goes."""

    num_epochs: int
    """Whole epochs."""
    max_steps: int
    """Steps at most; 0 for no limit."""


class Loop:
    """The steps of one call of `Session.steps`."""

    def __init__(
        self,
        seat: Seat,
        trained: Trained,
        computation: Computation,
        transactions: Transactions,
        spread: Callable[[], StatefulLoader],
        extent: Extent,
        finite: FiniteCheck,
    ) -> None:
        """Make nothing yet.

        Args:
            seat: of this process.
            trained: what the loop trains.
            computation: how.
            transactions: makes each step one.
            spread: makes the loader of this rank for the present world.
            extent: how far to go.
            finite: looks at each step before it is committed.
        """
        self._finite = finite
        self.guard = Guard(trained.optimizers)
        self._seat = seat
        self._trained = trained
        self._computation = computation
        self._transactions = transactions
        self._spread = spread
        self._extent = extent
        self._loader = spread()
        self._stands = Position()
        self._step: Step | None = None
        trained.where = lambda: self._stands

    @property
    def is_repaired(self) -> bool:
        """Whether the loop goes on after a fault outside of a step."""
        return self._transactions.member is not None

    def run(self, begins_at: Position, resumed_from: str = "") -> Iterator[Step]:
        """Give the steps from a position on, or in a newcomer from where the others stand.

        Args:
            begins_at: the position.
            resumed_from: checkpoint of it from which all processes were started again; empty where they were not.
        """
        is_over, raised = True, None
        try:
            yield from self._run(begins_at, resumed_from)
        except GeneratorExit:  # the program has left the loop, or its body has raised
            error = None if self._step is None else self._step.error
            is_over = not ends_alone(error)
            raised = error if is_over and not isinstance(error, PeerLost) else None
            raise
        except (RecoveryError, DeviceHung, SystemExit) as error:
            is_over = not ends_alone(error)
            raise
        finally:
            self.guard.close()
            self._transactions.leave(is_over=is_over, error=raised)

    def _run(self, begins_at: Position, resumed_from: str) -> Iterator[Step]:
        transactions = self._transactions
        if transactions.is_newcomer:
            position = self._go_to(transactions.state_of_peers())
        else:
            transactions.begin_at(begins_at.committed, resumed_from)
            position = self._go_to(begins_at)
            refuse_unreadable(self._trained.position())
        transactions.arm()
        while True:
            try:
                if position.in_tail:
                    transactions.join()
                is_interrupted = yield from self._steps(position)
                if not is_interrupted:
                    transactions.join()
                    dist.barrier()  # nobody leaves before all have come to the end
                    return
            except PeerLost:
                if not self.is_repaired:
                    raise
            position = self._go_to(transactions.reenter())

    def _steps(self, position: Position) -> Generator[Step, None, bool]:
        """The steps from a position on; whether the body of one was interrupted."""
        for step in self._from(position):
            self.guard.forbid(BETWEEN)
            self._step = step
            yield step
            self.guard.allow()
            step.check()
            if step.was_interrupted:
                return True
            self._stands = replace(self._stands, in_tail=False, result=None)
        return False

    def _from(self, position: Position) -> Iterator[Step]:
        """First the step whose body was interrupted after it was committed, again; then those that follow."""
        if position.in_tail:
            yield Step(
                self,
                index=position.committed - 1,
                epoch=position.epoch,
                ends_epoch=position.ends_epoch,
                is_again=True,
                result=position.result,
            )
        for index, found in enumerate(steps_of(self._loader, self._extent.num_epochs), position.committed):
            if self._extent.max_steps and index >= self._extent.max_steps:
                return
            yield Step(
                self,
                index=index,
                epoch=found.epoch,
                ends_epoch=found.ends_epoch,
                batches=tree_map(self._to_device, found.batches),
                weights=found.weights,
            )

    def _to_device(self, leaf: Any) -> Any:
        return leaf.to(self._seat.device, non_blocking=True) if isinstance(leaf, Tensor) else leaf

    def _go_to(self, position: Position) -> Position:
        """Stand at a position, in the present world."""
        self._loader = self._spread()
        if position.loader:
            self._loader.load_state_dict(position.loader)
        if position.groups:
            self._trained.take(position)
        self._stands = position
        return position

    def seed(self, step: Step, part: str) -> None:
        """Begin the random stream of a part of the step's body."""
        self._computation.seed(step.index, self._seat, part)

    def run_step(self, step: Step, compute_loss: Callable[[Any], Any]) -> Any:
        """One step as a transaction."""
        num_micro_steps = self._loader.batch_sampler.split.micro_steps

        if self._transactions.rehearsal is not None:
            for index, batch in enumerate(step.batches):
                self._transactions.rehearsal.note_batch(index, batch)

        def compute() -> Computed:
            self._trained.note_batches(step.batches)
            done = self._computation.attempt(
                compute_loss,
                step.batches,
                step.weights,
                step=step.index,
                seat=self._seat,
                num_micro_steps=num_micro_steps,
            )
            self._trained.computed()
            if self._trained.steps_before_vote:
                update(done)
            return done

        def update(done: Computed) -> None:
            may_update = self._finite.allows_update(
                done.loss, done.norm, step=step.index, epoch=step.epoch, losses=done.losses
            )
            with self.guard.committing():
                if may_update:
                    self._trained.update()
                else:
                    self._trained.skip()

        def commit(done: Computed) -> Any:
            if not self._trained.steps_before_vote:
                update(done)
            self._trained.advance()
            self._stands = Position(
                committed=step.index + 1,
                in_tail=True,
                epoch=step.epoch,
                ends_epoch=step.ends_epoch,
                result=done.result,
                loader=self._loader.state_dict(),
            )
            return done.result

        result = self._transactions.run(compute, commit)
        self._finite.raise_if_stopped()
        return result
