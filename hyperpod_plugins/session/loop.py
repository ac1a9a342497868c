"""The loop behind `Session.steps`: yields the steps, and re-enters the loop after a fault.

A fault inside a step is handled by its transaction, and the loop does not notice it. A fault in the rest of a step's
body, in the data loading or between two steps interrupts the body (see `Step.__exit__`), as do a return to a snapshot
and a change of the world size. Then all ranks report where they stopped, and resume where the rank furthest ahead
stopped: before a step, or in the rest of the last step's body, which is then repeated. A joiner enters the same way.
"""

import logging
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from hyperpod_plugins.data import BatchSplit, StatefulLoader
from hyperpod_plugins.elastic.scaling.adascale import GradientNoise
from hyperpod_plugins.errors import LoopError, PeerLost, format_list
from hyperpod_plugins.ledger import ledger
from hyperpod_plugins.parallel import ParallelConfig, clip_grad_norm_, loss_parallel_context
from hyperpod_plugins.parallel.expert_bias import without_counts
from hyperpod_plugins.parallel.finite import FiniteCheck, gradient_flag
from hyperpod_plugins.parallel.hsdp import without_replica_sync
from hyperpod_plugins.parallel.local_optimizer import local_steps
from hyperpod_plugins.parallel.replica_mean import (
    FixedOrderAveraging,
    GradAveraging,
    NoiseMeasuringAveraging,
    RankMicroStep,
)
from hyperpod_plugins.parallel.unit_watch import reconcile_gradients
from hyperpod_plugins.recovery import seed_micro_step
from hyperpod_plugins.recovery.data_attributes import DataAttributes, watch_reads
from hyperpod_plugins.recovery.rng import AFTER_COMMIT
from hyperpod_plugins.recovery.undo import forget_iteration
from hyperpod_plugins.session.loop_context import LoopContext
from hyperpod_plugins.session.manual_optimization import EqualShares, check_means
from hyperpod_plugins.session.parameter_reads import NUM_WATCHED, ParameterReads
from hyperpod_plugins.session.state import Position, SessionState, refuse_unreadable
from hyperpod_plugins.session.step import BETWEEN, LoopGuard, Step
from hyperpod_plugins.session.transaction import PlainSteps, end_process

log = logging.getLogger(__name__)

# The batches of this rank, grouped by step, in a world of any size.


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """This rank's part of one step."""

    batches: tuple[Any, ...]
    """One batch per micro-step."""
    weights: tuple[float, ...]
    """Factor for the mean loss of each batch, so that all samples of the step count equally."""
    num_samples: int
    """Number of samples of the step, over all ranks."""
    epoch: int
    ends_epoch: bool


def iterate_steps(loader: StatefulLoader, num_epochs: int) -> Iterator[StepInputs]:
    """Yield the steps from the loader's position to the end of the last epoch."""
    sampler = loader.batch_sampler
    while sampler.cursor.epoch < num_epochs:
        epoch = sampler.cursor.epoch
        batches: list[Any] = []
        weights: list[float] = []
        number = sampler.micro_steps_done
        for index, batch in enumerate(loader):
            batches.append(batch)
            weights.append(sampler.weight(number + index))
            ends_epoch = sampler.cursor.epoch != epoch
            if ends_epoch or (number + index + 1) % sampler.split.num_micro_steps == 0:
                yield StepInputs(
                    batches=tuple(batches),
                    weights=tuple(weights),
                    num_samples=sampler.step_size(number + index),
                    epoch=epoch,
                    ends_epoch=ends_epoch,
                )
                batches, weights = [], []


# One attempt at a step: forward and backward of each micro-batch, clipping, and the mean loss.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttemptResult:
    """Results of one attempt at a step."""

    result: Any
    """Mean over the global batch of what `compute_loss` returned."""
    norm: Tensor | None
    """Norm of all gradients before clipping; None if they are not clipped."""
    are_gradients_finite: bool
    """Whether no rank has found an infinite or NaN gradient; True if there was no check."""
    losses: list[Tensor]
    """Losses of this rank's micro-steps."""

    @property
    def loss(self) -> Tensor:
        """Mean loss over the global batch, the same on all ranks."""
        return self.result["loss"] if isinstance(self.result, Mapping) else self.result


@dataclass(frozen=True, slots=True, kw_only=True)
class StepComputation:
    """Computes the steps of a loop."""

    model: nn.Module
    optimizers: Sequence[Optimizer]
    """Theirs are the biases that move with the load of experts."""
    config: ParallelConfig
    backward: Callable[[Tensor], object]
    """Computes the gradients of a loss."""
    max_grad_norm: float
    """Maximum norm of all gradients as one vector; 0 for no limit."""
    is_step_keyed: bool
    """Whether random numbers are a function of the step."""
    checks_gradients: bool
    """Whether to look for infinite and NaN gradients; the norm shows them if there is one."""
    averaging: GradAveraging | None = None
    """Averages gradients over replicas; None if FSDP2 does."""
    equal_shares: EqualShares | None = None
    """With manual optimization, the worlds that share each step equally; None with automatic optimization."""

    def seed(self, step: int, context: LoopContext, part: str) -> None:
        """Start the random stream of a step's body before the step is computed, or after it was committed."""
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
        split: BatchSplit,
    ) -> AttemptResult:
        """Compute the gradients of a step, and average what `compute_loss` returned over the global batch.

        Args:
            compute_loss: the function that the program gave to `Step.run`.
            batches: this rank's batches, one per micro-step.
            weights: weight of each batch's mean loss.
            step: number of the step.
            context: rank and groups of this process.
            split: split of a step; accumulated losses are divided by its micro-steps also in a smaller last step.
        """
        averaging, compute_rank = self.averaging, context.topology.compute_rank(context.rank)
        divides_loss = split.num_micro_steps > 1 and (averaging is None or averaging.divides_loss)
        total: Any = None
        losses: list[Tensor] = []
        for index, (batch, weight) in enumerate(zip(batches, weights, strict=True)):
            if self.is_step_keyed:
                seed_micro_step(self.config.random_seed, step, *split.random_stream(index, compute_rank))
            is_last = index == len(batches) - 1
            micro_step = RankMicroStep(index=index, count=split.num_micro_steps, is_last=is_last, weight=weight)
            with (
                nullcontext() if is_last else without_replica_sync(self.model),
                loss_parallel_context(self.config),
                nullcontext() if weight else without_counts(),
            ):
                returned = compute_loss(tree_map(lambda leaf: leaf, batch))  # copies containers: it may empty them
                loss = _loss_of(returned)
                losses.append(loss.detach())
                if divides_loss:
                    loss = loss / split.num_micro_steps
                self.backward(loss if weight == 1.0 else loss * weight)
            values = tree_map(_detached, returned)
            if averaging is not None:
                averaging.add(micro_step, _stacked(values))
            part = tree_map(lambda value, weight=weight: value * (weight / split.num_micro_steps), values)
            total = part if total is None else tree_map(torch.add, total, part)
        checks = self.checks_gradients and not self.max_grad_norm
        flag = gradient_flag(self.model.parameters()) if checks else None
        are_gradients_finite = not reconcile_gradients(self.model, flag, optimizers=self.optimizers)
        norm = clip_grad_norm_(self.model.parameters(), self.max_grad_norm) if self.max_grad_norm else None
        if isinstance(averaging, FixedOrderAveraging):
            assert averaging.mean_loss is not None
            mean = averaging.mean_loss
        else:
            mean = _mean(_stacked(total), context.data_group)
        return AttemptResult(
            result=_named(mean, total), norm=norm, are_gradients_finite=are_gradients_finite, losses=losses
        )

    def attempt_manually(
        self, run: Callable[[Any], Any], batch: Any, *, step: int, context: LoopContext, split: BatchSplit
    ) -> AttemptResult:
        """Call the function that computes and updates a step, and average what it returned over the global batch.

        Args:
            run: the function that the program gave to `Step.run`; steps the optimizers itself.
            batch: this rank's part of the step.
            step: number of the step.
            context: rank and groups of this process.
            split: split of a step.
        """
        if self.is_step_keyed:
            compute_rank = context.topology.compute_rank(context.rank)
            seed_micro_step(self.config.random_seed, step, *split.random_stream(0, compute_rank))
        with loss_parallel_context(self.config):
            returned = run(tree_map(lambda leaf: leaf, batch))  # copies containers: it may empty them
        check_means(returned)
        values = tree_map(_detached, returned)
        reconcile_gradients(self.model, ends_step=False)  # of the last backward, if no optimizer has used its gradients
        forget_iteration(self.model)  # a forward after the last backward leaves parameters unsharded
        mean = _mean(_stacked(values), context.data_group)
        return AttemptResult(result=_named(mean, values), norm=None, are_gradients_finite=True, losses=[])

    def gradient_noise(self) -> GradientNoise | None:
        """The gradient noise of the step that was computed last; None if it was not measured."""
        averaging = self.averaging
        if not isinstance(averaging, NoiseMeasuringAveraging) or averaging.compared is None:
            return None
        compared = averaging.compared
        return GradientNoise.of_table(
            compared.table.tolist(), compared.num_micro_steps, averaging.data_ranks_per_replica
        )


def _loss_of(returned: Any) -> Tensor:
    loss = returned.get("loss") if isinstance(returned, Mapping) else returned
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise LoopError(
            "the function given to step.run(...) must return the loss as a tensor of one element whose backward has "
            f"not been run, or a dict with it as 'loss', but returned {type(returned).__name__}. Leave backward to it, "
            "or call it in that function and step the optimizers there, with session.train(..., "
            "manual_optimization=True)."
        )
    return loss


def _detached(value: Any) -> Tensor:
    return torch.as_tensor(value).detach().float().reshape(())


def _stacked(returned: Any) -> Tensor:
    """The values of a result as one tensor, `(num_values,)`."""
    return torch.stack([*returned.values()] if isinstance(returned, Mapping) else [returned])


def _named(values: Tensor, returned: Any) -> Any:
    """Inverse of `_stacked`, for a result like `returned`."""
    return dict(zip(returned, values.unbind(), strict=True)) if isinstance(returned, Mapping) else values[0]


def _mean(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Average over the ranks of a group, in one all-reduce."""
    dist.all_reduce(values, group=group)
    return values.div_(dist.get_world_size(group))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopLimits:
    """How long a loop runs."""

    num_epochs: int
    """Number of whole epochs."""
    max_steps: int
    """Maximum number of steps; 0 for no limit."""


_LEFT_EARLY = (
    "a fault interrupted the body of a step, and the program has left the loop in code after `with step:` (`break`, or "
    "an error there). That code also runs where the step is repeated, so this process ends, to be replaced. Put all "
    "that belongs to the step inside the block, `break` included."
)


_OF_DATA = (
    "Give the loop a dataset whose attributes stay as they are, and apply what changes (the level of a curriculum) to "
    "the batch in the function that is given to step.run(...), from session.state; or end the loop, change the "
    "dataset, and call session.steps again."
)
_OF_LOST_WORKERS = (RuntimeError, OSError, EOFError)
_DATALOADER = "torch.utils.data.dataloader"


def has_lost_loader_worker(error: BaseException | None) -> bool:
    """Whether torch has raised this because a worker process of a DataLoader has ended.

    Its handler of signals raises anywhere. Before that, the connection over which a batch comes may break: torch passes
    that error on if the worker's end has not been noted yet.
    """
    if not isinstance(error, _OF_LOST_WORKERS):
        return False
    message = str(error)
    is_pinning = " in pin memory thread" in message.partition("\n")[0] and isinstance(error, ConnectionError | EOFError)
    return message.startswith("DataLoader worker (pid") or is_pinning or _was_receiving(error)


def _was_receiving(error: BaseException) -> bool:
    """Whether an error was raised while a batch was received from a worker; errors of datasets are raised later."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(
        frame.f_code.co_name == "_try_get_data" and frame.f_globals.get("__name__") == _DATALOADER for frame in frames
    )


class Loop:
    """The steps of one call of `Session.steps`."""

    def __init__(
        self,
        context: LoopContext,
        trained: SessionState,
        computation: StepComputation,
        transactions: PlainSteps,
        build_loader: Callable[[], StatefulLoader],
        limits: LoopLimits,
        finite: FiniteCheck,
    ) -> None:
        """Set up the loop without running a step.

        Args:
            context: rank and groups of this process.
            trained: what the loop trains.
            computation: computes the steps.
            transactions: runs each step, as a transaction in a job with recovery.
            build_loader: builds this rank's loader for the present world.
            limits: how long to run.
            finite: checks each step before it is committed.

        Raises:
            ConfigError: with manual optimization, ranks would share the last step of an epoch unevenly.
        """
        self._finite = finite
        self.guard = LoopGuard(trained.optimizers, is_manual=trained.is_manual)
        self._context = context
        self._trained = trained
        self._computation = computation
        self.transactions = transactions
        self._data, self._build_loader = DataAttributes(), partial(self._watched, build_loader)
        self._limits = limits
        self._loader = self._build_loader()
        self._refuse_uneven_end()
        self._position = Position()
        self._step: Step | None = None
        self._num_bodies = 0
        """Number of steps whose body this process has run to its end."""
        self._reads: ParameterReads | None = None
        """What the present block has read before its step, while that is watched."""

    def _watched(self, build_loader: Callable[[], StatefulLoader]) -> StatefulLoader:
        """A loader whose dataset is watched: a replacement would read it with its first attributes."""
        loader = build_loader()
        read = loader.reads_with
        if self.has_recovery and read is not None:
            self._data.follow("training 0", read, model=self._trained.model, left_out=())
            check = partial(self._data.check_unchanged, "while the loop ran", _OF_DATA)
            watch_reads(read, check, partial(self._data.fetched, trains=True, advice=_OF_DATA))
        return loader

    @property
    def has_recovery(self) -> bool:
        """Whether the loop continues after a fault outside a step."""
        return self.transactions.recovers

    def run(
        self, begins_at: Position, resumed_from: str = "", at_end: Callable[[], object] = lambda: None
    ) -> Iterator[Step]:
        """Yield the steps from a position on, or in a joiner from where the other ranks stopped.

        Args:
            begins_at: the position; in a joiner, that from which its predecessor began, or any if not known.
            resumed_from: checkpoint of that position, if all processes were restarted from it; otherwise empty.
            at_end: called on all ranks after the last step; a rank that is lost meanwhile is replaced.
        """
        self._trained.get_position = lambda: self._position  # not before: perhaps an earlier loop has not ended yet
        self.guard.open()
        self._trained.scalers.open()
        with ExitStack() as stack:
            stack.push(self._leave)
            yield from self._run(begins_at, resumed_from, at_end)

    def _leave(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End the loop, which has run to its end, or was left: by its data loading, or by the program.

        If the program has left it, only an exception of the block `with step:` is known here. One that was raised
        outside of the block looks like `break`, and whether the program catches it is not known in either case.
        """
        if isinstance(error, GeneratorExit):
            if self._step is not None and self._step.was_interrupted:
                end_process(_LEFT_EARLY)
            error = None if self._step is None else self._step.error
        self._end_if_worker_was_lost(error)
        self._trained.scalers.close()
        self.guard.close()
        if kind is None:
            self.transactions.leave()
        else:
            self.transactions.leave_early(error, self._num_bodies)

    def _end_if_worker_was_lost(self, error: BaseException | None) -> None:
        if self.has_recovery and has_lost_loader_worker(error):
            cause = f"a worker process of a DataLoader was lost ({type(error).__name__}: {str(error).strip()})"
            end_process(f"{cause}. This process ends, to be replaced, and the other ranks continue.")

    def _run(self, begins_at: Position, resumed_from: str, at_end: Callable[[], object]) -> Iterator[Step]:
        transactions = self.transactions
        if transactions.is_joining:
            if self._trained.local is not None:
                self._trained.local.begins_at = begins_at.committed
            position = self._move_to(transactions.await_peers_position())
        else:
            transactions.begin_at(begins_at.committed, resumed_from)
            position = self._move_to(begins_at)
            refuse_unreadable(self._trained.position())
        transactions.arm()
        is_first = self.has_recovery and not transactions.is_joining
        while True:
            try:
                if is_first:
                    is_first = False
                    transactions.share_first_state(position.committed)
                if position.after_commit:
                    transactions.join()
                is_interrupted = yield from self._steps(position)
                if not is_interrupted:
                    transactions.join()
                    dist.barrier()  # no rank leaves before all have reached the end
                    at_end()
                    return
            except PeerLost:
                if not self.has_recovery:
                    raise
            position = self._move_to(transactions.reenter())

    def _steps(self, position: Position) -> Generator[Step, None, bool]:
        """Yield the steps from a position on; return whether the body of one was interrupted."""
        for step in self._steps_from(position):
            if not step.is_replay:
                self.transactions.join_in_body()
            self.guard.forbid(BETWEEN)
            self._step = step
            for listener in self._context.when_body_begins:
                listener()
            if step.is_replay:
                self._trained.begin_body_again()
            elif self.has_recovery:
                self._trained.begin_body()
            yield step
            self.guard.allow()
            step.check()
            if step.was_interrupted:
                return True
            self._trained.end_body()
            self._num_bodies += 1
            self._position = replace(self._position, after_commit=False, result=None, grad_norm=None)
        return False

    def _steps_from(self, position: Position) -> Iterator[Step]:
        """Yield the step whose body was interrupted after its commit, if there is one, and then those that follow."""
        if position.after_commit:
            yield Step(
                self,
                index=position.committed - 1,
                epoch=position.epoch,
                ends_epoch=position.ends_epoch,
                num_samples=position.num_samples,
                grad_norm=position.grad_norm,
                is_replay=True,
                result=position.result,
                read_again=partial(self._read_again, position),
            )
        inputs = ledger.waits_for_data(iterate_steps(self._loader, self._limits.num_epochs))
        for index, found in enumerate(inputs, position.committed):
            if self._limits.max_steps and index >= self._limits.max_steps:
                return
            if self.transactions.rehearsal is not None and self.transactions.rehearsal.is_last(index):
                return
            if self.transactions.rehearsal is not None:
                self.transactions.rehearsal.at("dataloader", index)
            yield Step(
                self,
                index=index,
                epoch=found.epoch,
                ends_epoch=found.ends_epoch,
                batches=tree_map(self._to_device, found.batches),
                weights=found.weights,
                num_samples=found.num_samples,
            )
            if found.ends_epoch:
                self._data.check_unchanged("while the loop ran", _OF_DATA)

    def _read_again(self, position: Position) -> tuple[Any, ...]:
        """Read this rank's batches of the last committed step, whose body runs again in the present world.

        Raises:
            LoopError: the step had another number of samples in the world that committed it.
        """
        loader = self._build_loader()
        if position.loader_before:
            loader.load_state_dict(position.loader_before)
        found = None if position.loader_before is None else next(iterate_steps(loader, self._limits.num_epochs), None)
        if found is None or found.num_samples != position.num_samples:
            raise LoopError(
                f"the batches of step {position.committed - 1}, whose body runs again after a fault, cannot be read "
                "again: the batch follows the world, and the job has changed its size since the step was committed. "
                "Use them in the function that is given to step.run(...), and keep what the rest of the body needs in "
                "session.state or in an object that is given to session.register_rank_local."
            )
        return tree_map(self._to_device, found.batches)

    def _to_device(self, leaf: Any) -> Any:
        return leaf.to(self._context.device, non_blocking=True) if isinstance(leaf, Tensor) else leaf

    def _move_to(self, position: Position) -> Position:
        """Move the loop to a position, in the present world."""
        self._loader = self._build_loader()
        self._trained.forget_body()
        if position.loader:
            self._loader.load_state_dict(position.loader)
            self._refuse_uneven_end()
        if position.groups:
            self._trained.load_position(position)
        self._position = position
        return position

    def _refuse_uneven_end(self) -> None:
        if self._computation.equal_shares is not None:
            self._computation.equal_shares.refuse_uneven_end(self._loader.batch_sampler)

    def seed(self, step: Step, part: str) -> None:
        """Start the random stream of a part of the step's body."""
        self._computation.seed(step.index, self._context, part)

    def begin_block(self, step: Step) -> None:
        """Begin a step's block: watch what it reads at first, and where it runs again after a fault."""
        is_repeated = step.is_replay or self._trained.was_begun
        if self.has_recovery and (is_repeated or self._num_bodies < NUM_WATCHED):
            self._reads = ParameterReads(self._trained.model)
            self._reads.open()

    def end_block(self) -> None:
        """End the part of a block that precedes the step, if it has not ended."""
        if self._reads is not None:
            self._reads.close()
        self._reads = None

    def check_reads(self, step: Step) -> None:
        """End that part, and look at the parameters with which it has computed; see `parameter_reads`.

        Raises:
            LoopError: it has written to them, too.
            PeerLost: only the rest of the body is to be repeated, and they are later ones: another try begins earlier.
        """
        reads = self._reads
        self.end_block()
        if reads is None:
            return
        if step.is_replay and reads.of_trained:
            raise self.transactions.lose_state(
                f"its body computes with {format_list(reads.of_trained)} before the step, and runs again after it"
            )
        reads.check()

    def begin_rest(self, step: Step) -> None:
        """Begin the rest of a step's body, which a process may repeat that has not computed the step."""
        self.seed(step, AFTER_COMMIT)
        if self.transactions.rehearsal is not None:
            self.transactions.rehearsal.begin_rest(step.index)

    def end_rest(self, step: Step) -> None:
        """End the body of a step; in a rehearsed job, a fault may happen here if it was not interrupted."""
        if self.transactions.rehearsal is not None:
            self.transactions.rehearsal.end_rest(
                step.index, is_complete=not step.was_interrupted and step.error is None
            )

    def return_to_commit(self) -> None:
        """Bring what the body may change to the state right after the commit, as the body runs again."""
        self._trained.return_to_commit()

    def run_step(self, step: Step, compute_loss: Callable[[Any], Any]) -> Any:
        """Run one step as a transaction."""
        split = self._loader.batch_sampler.split
        self._trained.begin_run()
        self.guard.begin_step()
        if self.transactions.rehearsal is not None:
            for index, batch in enumerate(step.batches):
                self.transactions.rehearsal.note_batch(index, batch)

        def compute() -> AttemptResult:
            self._trained.note_batches(step.batches)
            done = self._attempt(compute_loss, step, split)
            self._trained.computed()
            if self._trained.steps_before_vote:
                self._update(done, step, split)
            return done

        def commit(done: AttemptResult) -> Any:
            if not self._trained.steps_before_vote:
                self._update(done, step, split)
            self._trained.advance()
            ledger.note_loss(done.result)
            ledger.note(samples=step.num_samples)
            self._position = Position(
                committed=step.index + 1,
                after_commit=True,
                epoch=step.epoch,
                ends_epoch=step.ends_epoch,
                result=done.result,
                num_samples=step.num_samples,
                grad_norm=done.norm,
                loader=self._loader.state_dict(),
                loader_before=self._position.loader,
            )
            self._trained.begin_rest(step.index + 1)
            step.grad_norm = done.norm
            return done.result

        result = self.transactions.run(compute, commit)
        self._finite.raise_if_stopped()
        return result

    def _attempt(self, compute_loss: Callable[[Any], Any], step: Step, split: BatchSplit) -> AttemptResult:
        """Compute the gradients of a step; with manual optimization, the program also steps its optimizers."""
        computation, context = self._computation, self._context
        if not self._trained.is_manual:
            return computation.attempt(
                compute_loss, step.batches, step.weights, step=step.index, context=context, split=split
            )
        [batch] = step.batches
        with self.guard.manual_optimization(), local_steps(self._trained.optimizers):
            return computation.attempt_manually(compute_loss, batch, step=step.index, context=context, split=split)

    def _update(self, done: AttemptResult, step: Step, split: BatchSplit) -> None:
        """Step the optimizers, unless the step is not finite, or the program has stepped them."""
        if self._trained.is_manual:
            return
        may_update = self._finite.allows_update(
            done.loss,
            done.norm,
            step=step.index,
            epoch=step.epoch,
            losses=done.losses,
            are_gradients_finite=done.are_gradients_finite,
        )
        rates = self._trained.rates
        scaling = nullcontext()
        if rates is not None:
            rates.noise = self._computation.gradient_noise()
            scaling = rates.step(
                *self._trained.optimizers,
                batch_size=split.global_batch_size,
                num_samples=step.num_samples,
                is_first_rank=self._context.rank == 0,
            )
        with self.guard.allow_optimizer_steps(), scaling:
            if may_update:
                self._trained.update()
            else:
                self._trained.skip()
