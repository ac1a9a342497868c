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
from hyperpod_plugins.errors import PeerLost
from hyperpod_plugins.loops.compute import Computation
from hyperpod_plugins.loops.data import steps_of
from hyperpod_plugins.loops.guard import BETWEEN, Guard
from hyperpod_plugins.loops.position import Position, refuse_unreadable
from hyperpod_plugins.loops.seat import Seat
from hyperpod_plugins.loops.step import Step
from hyperpod_plugins.loops.trained import Trained
from hyperpod_plugins.loops.transaction import Transactions


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
    ) -> None:
        """Make nothing yet.

        Args:
            seat: of this process.
            trained: what the loop trains.
            computation: how.
            transactions: makes each step one.
            spread: makes the loader of this rank for the present world.
            extent: how far to go.
        """
        self.guard = Guard(trained.optimizers)
        self._seat = seat
        self._trained = trained
        self._computation = computation
        self._transactions = transactions
        self._spread = spread
        self._extent = extent
        self._loader = spread()
        self._stands = Position()
        trained.where = lambda: self._stands

    @property
    def is_repaired(self) -> bool:
        """Whether the loop goes on after a fault outside of a step."""
        return self._transactions.member is not None

    def run(self, begins_at: Position) -> Iterator[Step]:
        """Give the steps from a position on, or in a newcomer from where the others stand."""
        try:
            yield from self._run(begins_at)
        finally:
            self.guard.close()
            self._transactions.leave()

    def _run(self, begins_at: Position) -> Iterator[Step]:
        transactions = self._transactions
        if transactions.is_newcomer:
            position = self._go_to(transactions.state_of_peers())
        else:
            transactions.begin_at(begins_at.committed)
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

    def run_step(self, step: Step, compute_loss: Callable[[Any], Any]) -> Any:
        """One step as a transaction."""
        num_micro_steps = self._loader.batch_sampler.split.micro_steps

        def compute() -> Any:
            return self._computation.attempt(
                compute_loss,
                step.batches,
                step.weights,
                step=step.index,
                seat=self._seat,
                num_micro_steps=num_micro_steps,
            )

        def commit(result: Any) -> Any:
            with self.guard.committing():
                self._trained.update()
            self._stands = Position(
                committed=step.index + 1,
                in_tail=True,
                epoch=step.epoch,
                ends_epoch=step.ends_epoch,
                result=result,
                loader=self._loader.state_dict(),
            )
            return result

        return self._transactions.run(compute, commit)
