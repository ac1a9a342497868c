"""The life of a loop: its steps one after the other, and the way back into it after a fault.

A fault inside a step is the transaction's business; the loop does not see it. A fault in the rest of a step's body, in
its data, or between two steps interrupts the body (`Step.__exit__` sees to that), and so do a return to a snapshot and
a world of another size. Then all ranks say where they stand, and go on where that one stands that has come furthest:
before a step, or in the rest of the body of the last one, which is then repeated. A newcomer comes in the same way.
"""

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from hyperpod_plugins.data import StatefulLoader
from hyperpod_plugins.errors import DeviceHung, LoopError, PeerLost, RecoveryError
from hyperpod_plugins.parallel import ParallelConfig, clip_grad_norm_, loss_parallel_context
from hyperpod_plugins.parallel.finite import FiniteCheck
from hyperpod_plugins.parallel.hsdp import without_replica_sync
from hyperpod_plugins.parallel.unit_watch import settle_gradients
from hyperpod_plugins.recovery import seed_micro_step
from hyperpod_plugins.session.context import LoopContext
from hyperpod_plugins.session.loader import steps_of
from hyperpod_plugins.session.state import Position, TrainedState, refuse_unreadable
from hyperpod_plugins.session.step import BETWEEN, Guard, Step
from hyperpod_plugins.session.transaction import Transactions, ends_alone

# What one attempt at a step computes: forward and backward of each micro-batch, clipping, and the mean loss.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Computed:
    """What one attempt at a step has computed."""

    result: Any
    """The mean over the global batch of what the program's function returned."""
    norm: Tensor | None
    """Of all gradients before clipping; None where they are not clipped."""
    losses: list[Tensor]
    """Of this rank's micro-steps."""

    @property
    def loss(self) -> Tensor:
        """Mean over the global batch, the same on all ranks."""
        return self.result["loss"] if isinstance(self.result, Mapping) else self.result


@dataclass(frozen=True, slots=True, kw_only=True)
class Computation:
    """How a loop's steps are computed."""

    model: nn.Module
    config: ParallelConfig
    backward: Callable[[Tensor], object]
    """Computes gradients of a loss."""
    max_grad_norm: float
    """Largest norm of all gradients as one vector; 0 for no limit."""
    is_step_keyed: bool
    """Whether random numbers are a function of the step."""

    def seed(self, step: int, context: LoopContext, part: str) -> None:
        """Begin the stream of what a step's body does before it is computed, or after it was committed."""
        if self.is_step_keyed:
            seed_micro_step(self.config.random_seed, step, 0, context.topology.data_rank(context.rank), part)

    def attempt(
        self,
        compute_loss: Callable[[Any], Any],
        batches: tuple[Any, ...],
        weights: tuple[float, ...],
        *,
        step: int,
        context: LoopContext,
        num_micro_steps: int,
    ) -> Computed:
        """Compute the gradients of a step; the mean over the global batch of what `compute_loss` returned.

        Args:
            compute_loss: the program's.
            batches: of this rank, one a micro-step.
            weights: of their mean losses.
            step: number of the step.
            context: of this rank.
            num_micro_steps: by which accumulated losses are divided; a last, smaller step has fewer batches.
        """
        total: Any = None
        losses: list[Tensor] = []
        for index, (batch, weight) in enumerate(zip(batches, weights, strict=True)):
            if self.is_step_keyed:
                seed_micro_step(self.config.random_seed, step, index, context.topology.data_rank(context.rank))
            is_last = index == len(batches) - 1
            with nullcontext() if is_last else without_replica_sync(self.model), loss_parallel_context(self.config):
                returned = compute_loss(tree_map(lambda leaf: leaf, batch))  # containers that the function may empty
                loss = _loss_of(returned)
                losses.append(loss.detach())
                if num_micro_steps > 1:
                    loss = loss / num_micro_steps
                self.backward(loss if weight == 1.0 else loss * weight)
            part = tree_map(lambda value, weight=weight: _detached(value) * (weight / num_micro_steps), returned)
            total = part if total is None else tree_map(torch.add, total, part)
        settle_gradients(self.model)
        norm = clip_grad_norm_(self.model.parameters(), self.max_grad_norm) if self.max_grad_norm else None
        return Computed(result=_mean(total, context.data_group), norm=norm, losses=losses)


def _loss_of(returned: Any) -> Tensor:
    loss = returned.get("loss") if isinstance(returned, Mapping) else returned
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise LoopError(
            "the function given to step.run(...) must return the loss as a tensor of one element whose backward has "
            f"not been run, or a dict with it as 'loss', but returned {type(returned).__name__}. Leave backward to it."
        )
    return loss


def _detached(value: Any) -> Tensor:
    return torch.as_tensor(value).detach().float().reshape(())


def _mean(total: Any, group: dist.ProcessGroup) -> Any:
    """The mean over the ranks of a group, in one message."""
    names = list(total) if isinstance(total, Mapping) else [""]
    values = torch.stack([total[name] for name in names] if isinstance(total, Mapping) else [total])
    dist.all_reduce(values, group=group)
    values /= dist.get_world_size(group)
    return dict(zip(names, values.unbind(), strict=True)) if isinstance(total, Mapping) else values[0]


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
        context: LoopContext,
        trained: TrainedState,
        computation: Computation,
        transactions: Transactions,
        spread: Callable[[], StatefulLoader],
        extent: Extent,
        finite: FiniteCheck,
    ) -> None:
        """Make nothing yet.

        Args:
            context: of this process.
            trained: what the loop trains.
            computation: how.
            transactions: makes each step one.
            spread: makes the loader of this rank for the present world.
            extent: how far to go.
            finite: looks at each step before it is committed.
        """
        self._finite = finite
        self.guard = Guard(trained.optimizers)
        self._context = context
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
        if transactions.is_joining:
            position = self._go_to(transactions.state_of_peers())
        else:
            transactions.begin_at(begins_at.committed, resumed_from)
            position = self._go_to(begins_at)
            refuse_unreadable(self._trained.position())
        transactions.arm()
        while True:
            try:
                if position.after_commit:
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
        if position.after_commit:
            yield Step(
                self,
                index=position.committed - 1,
                epoch=position.epoch,
                ends_epoch=position.ends_epoch,
                is_replay=True,
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
        return leaf.to(self._context.device, non_blocking=True) if isinstance(leaf, Tensor) else leaf

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
        self._computation.seed(step.index, self._context, part)

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
                context=self._context,
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
                after_commit=True,
                epoch=step.epoch,
                ends_epoch=step.ends_epoch,
                result=done.result,
                loader=self._loader.state_dict(),
            )
            return done.result

        result = self._transactions.run(compute, commit)
        self._finite.raise_if_stopped()
        return result
