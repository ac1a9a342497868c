"""What a loop trains: the model with its optimizers and schedulers, as a transaction sees them."""

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hyperpod_plugins.errors import ConfigError, few
from hyperpod_plugins.parallel import CheckpointWriter, load_checkpoint
from hyperpod_plugins.parallel.checkpoint.rank_state import load_rank_state, saved_ranks
from hyperpod_plugins.parallel.checkpoint.state import plain
from hyperpod_plugins.parallel.collective_errors import agreeing, default_group
from hyperpod_plugins.parallel.local_optimizer import closure_of, refuse_closures, step_locally
from hyperpod_plugins.recovery import SAVING_GROUP, RecoveryPlan, Snapshot, TrainingState
from hyperpod_plugins.recovery.kept_state import KeptState, is_elementwise
from hyperpod_plugins.recovery.local_state import BUFFERS, BufferStates, LocalStates, ProgramState
from hyperpod_plugins.recovery.state import give_hyperparameters, hyperparameters, make_plain
from hyperpod_plugins.recovery.undo import CAN_RESET, Beginning, drop_gradients, end_iteration

# Where a loop stands, as a process needs it that comes in: all but the tensors of model and optimizers.


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A place in a loop: before a step, or in what its body does after the step was committed."""

    committed: int = 0
    """Steps that have been committed."""
    after_commit: bool = False
    """Whether the body of the last one has not come to its end."""
    epoch: int = 0
    """Epoch of the last one."""
    ends_epoch: bool = False
    """Whether it was the last of its epoch."""
    result: Any = None
    """What the last one returned; kept as long as its body goes on."""
    loader: dict[str, Any] = field(default_factory=dict[str, Any])
    """State of the loader after the committed steps; empty before the first."""
    schedulers: tuple[dict[str, Any], ...] = ()
    """State of each scheduler."""
    groups: tuple[list[dict[str, Any]], ...] = ()
    """Of each optimizer, the hyperparameters of its groups."""
    state: dict[str, Any] = field(default_factory=dict[str, Any])
    """What the program keeps in `Session.state`."""
    local: dict[str, Any] = field(default_factory=dict[str, Any])
    """What one rank has alone, in a snapshot of it."""

    def to_bytes(self) -> bytes:
        """For another process, or a checkpoint."""
        buffer = io.BytesIO()
        torch.save(asdict(self), buffer)
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Inverse of `to_bytes`; only tensors, plain containers, numbers and strings are read."""
        return cls(**torch.load(io.BytesIO(data), weights_only=True))


def refuse_unreadable(position: Position) -> None:
    """Refuse what a replacement could not read, before one is needed.

    Raises:
        ConfigError: naming what it is.
    """
    values = {f"session.state[{name!r}]": value for name, value in position.state.items()}
    values |= {f"the state of scheduler {index}": value for index, value in enumerate(position.schedulers)}
    bad = [name for name, value in values.items() if not _is_readable(value)]
    if bad:
        raise ConfigError(
            f"{few(bad)} holds Python objects that a process which replaces a lost one would have to unpickle, and "
            "that runs code. Keep tensors, plain containers, numbers and strings there."
        )


def _is_readable(value: Any) -> bool:
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError):  # of what has no name to find it
        return False
    return True


class TrainedState:
    """The `Subject` of a loop's transactions, and what its checkpoints hold."""

    can_undo_exceptions = CAN_RESET

    saving_group = SAVING_GROUP

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[LRScheduler],
        *,
        state: dict[str, Any],
        verify: bool,
        folder: Path,
        tensor_degree: int = 1,
    ) -> None:
        """Take hold of them.

        Args:
            model: sharded or plain.
            optimizers: over its parameters.
            schedulers: stepped once after each step.
            state: what the program keeps beside them; plain values.
            verify: compare checksums of what a replacement receives.
            folder: where an emergency's checkpoint goes.
            tensor_degree: ranks that share each of the model's parallel layers.

        Raises:
            ConfigError: an optimizer that computes gradients itself, or hyperparameters that can not be passed on.
        """
        refuse_closures(optimizers)
        make_plain(optimizers)
        self.model = model
        self.optimizers = list(optimizers)
        self.schedulers = list(schedulers)
        self.tensors = TrainingState(model, optimizers, verify=verify)
        self.saving: dist.ProcessGroup | None = None
        """Group of all ranks for nothing but checkpoints; None to have one made when it is needed."""
        self.where: Callable[[], Position] = Position
        """Says where the loop stands: committed steps, epoch and loader."""
        self.local: LocalStates | None = None
        """Buffers that differ from rank to rank, where lost processes are replaced."""
        self.rank_local: dict[str, ProgramState] = {}
        """What the program has registered, by name."""
        self.entered_with: Position | None = None
        """With which the loop was entered, until this rank is among the others."""
        self._state = state
        self._folder = folder
        self._tensor_degree = tensor_degree
        self._loaded: dict[str, dict[str, Any]] = {}
        writes = not all(map(is_elementwise, self.optimizers))
        self._beginning = Beginning(model, self.optimizers, KeptState(self.optimizers) if writes else None)
        self._modes: list[tuple[nn.Module, bool]] = []
        self._writer: CheckpointWriter | None = None

    def position(self) -> Position:
        """Where the loop stands, with all that a process needs that comes in there."""
        return replace(
            self.where(),
            schedulers=tuple(plain(scheduler.state_dict()) for scheduler in self.schedulers),
            groups=tuple(hyperparameters(optimizer) for optimizer in self.optimizers),
            state=dict(self._state),
        )

    def take(self, position: Position) -> None:
        """Take over what schedulers, optimizers' groups and the program's own state were at a position."""
        self._beginning.close()
        for scheduler, state in zip(self.schedulers, position.schedulers, strict=True):
            scheduler.load_state_dict(state)
        give_hyperparameters(position.groups, self.optimizers)
        self._state.clear()
        self._state.update(position.state)

    @property
    def steps_before_vote(self) -> bool:
        """Whether optimizers step where a step is computed, for they may communicate; see `recovery.kept_state`."""
        return self._beginning.kept is not None

    def update(self) -> None:
        """Let optimizers step, once each."""
        for optimizer in self.optimizers:
            step_locally(optimizer, closure_of(optimizer, None))
            optimizer.zero_grad(set_to_none=True)

    def note_batches(self, batches: Sequence[Any]) -> None:
        """A step is about to compute on batches."""
        self._beginning.batches.note(batches)

    def computed(self) -> None:
        """A step has been computed, and is to be voted on."""
        self._beginning.end()

    def advance(self) -> None:
        """The step counts: let schedulers step, once each."""
        self._beginning.close()
        for scheduler in self.schedulers:
            scheduler.step()

    def skip(self) -> None:
        """Leave the optimizers' step out: forget gradients."""
        drop_gradients(self.model, self.optimizers)

    def train_again(self) -> None:
        """Let modules train that did in the last step: a validation may have been interrupted."""
        for part, is_training in self._modes:
            part.training = is_training

    # -- Subject ------------------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Remember what the step may change, and which modules train."""
        self._beginning.begin()
        self._modes = [(part, part.training) for part in self._beginning.parts]
        if self.local is not None:
            self.local.begin(step)

    @property
    def is_within_step(self) -> bool:
        """Whether a step has begun that does not count yet."""
        return self._beginning.is_open

    @property
    def can_undo(self) -> bool:
        """Whether the step has written only to what was copied when it began."""
        return self._beginning.is_within_reach

    def undo_step(self) -> None:
        """Forget gradients; put everything else back."""
        drop_gradients(self.model, self.optimizers)
        self._beginning.put_back()
        if self.local is not None:
            self.local.undo()

    def share(self, step: int) -> None:
        """Give what is of this rank alone to the buddy."""
        if self.local is not None:
            self.local.share(step)

    @property
    def local_state(self) -> dict[str, dict[str, Any]]:
        """What this rank alone has, in a job that recovers: its buffers, and what the program has registered."""
        return {} if self.local is None else self.local.present()

    def _take_own(self, values: dict[str, dict[str, Any]], *, is_of_another_job: bool) -> None:
        """Take back what `local_state` gave where a checkpoint was written."""
        buffers, saved = BufferStates(self.model), values.get(BUFFERS, {})
        buffers.load_state_dict(buffers.fitting(saved) if is_of_another_job else saved)
        self._loaded = values
        for name, state in self.rank_local.items():
            state.load_state_dict(values.get(registered(name), {}))

    def register(self, name: str, state: ProgramState) -> None:
        """Keep the state of an object of the program, which begins with what was loaded under its name."""
        self.rank_local[name] = state
        state.load_state_dict(self._loaded.get(registered(name), {}))

    def end_iteration(self) -> None:
        """Put FSDP2's modules back to where an iteration begins."""
        end_iteration(self.model)

    def capture_state(self) -> bytes:
        """The position at the beginning of this step, or where the loop was entered."""
        with self._beginning.as_it_began():
            return (self.entered_with or self.position()).to_bytes()

    @property
    def local_steps(self) -> tuple[int, ...] | None:
        """Steps of which this rank keeps the buffers of its ward."""
        return None if self.local is None else self.local.kept_steps

    def capture_own_state(self) -> bytes:
        """The same, with what is of this rank alone; between two steps."""
        if self.local is None:
            return self.capture_state()
        with self._beginning.as_it_began():
            return replace(self.entered_with or self.position(), local=self.local.present()).to_bytes()

    def restore(self, plan: RecoveryPlan, rank: int) -> None:
        """Copy tensors between ranks."""
        self.tensors.share(plan.sources)
        if self.local is not None:
            self.local.pass_on(plan.sources, bytes)
            self.local.restore(plan.step, sorted(plan.sources))
        if self.entered_with is not None:
            give_hyperparameters(self.entered_with.groups, self.optimizers)

    def save(self, path: str, *, is_alone: bool, snapshots: Mapping[int, Snapshot] | None = None) -> str:
        """Write a checkpoint; without a path one for an emergency."""
        assert snapshots is None, "a loop has the degrees that it began with, so nobody writes those of others"
        position = self.entered_with or self.position()
        path = path or str(self._folder / f"emergency-step={position.committed}")
        self.write(path, position)
        return path

    # -- checkpoints --------------------------------------------------------------------------------------------

    def write(self, path: str | Path, position: Position) -> None:
        """Write a checkpoint on all ranks together."""
        if self._writer is None:
            self._writer = CheckpointWriter(self.saving)
        own = {"local": self.local_state, "layout": self._layout}
        extra = {"loop": asdict(position), "own": own}  # that of the first rank; where others differ, theirs follow
        of_ranks = {dist.get_rank(): own}
        self._writer.save(path, model=self.model, optimizers=self.optimizers, extra=extra, rank_state=of_ranks).wait()

    def read(self, path: str | Path, *, is_of_another_job: bool = False) -> Position:
        """Load a checkpoint of any degrees on all ranks together; where its loop stood.

        Args:
            path: of the checkpoint.
            is_of_another_job: whether the program may have been another one; each rank takes of its own what fits.
        """
        extra = load_checkpoint(path, model=self.model, optimizers=self.optimizers)
        position = Position(**extra["loop"])
        self.take(position)
        with agreeing(f"what each rank had of its own in {path} was not loaded", default_group()):
            own, ranks, rank = extra.get("own", {}), saved_ranks(Path(path)), dist.get_rank()
            if ranks:
                own = load_rank_state(Path(path), rank, weights_only=True) if rank in ranks else {}
            if own.get("layout") == self._layout:  # in another one there is no such rank
                self._take_own(own.get("local", {}), is_of_another_job=is_of_another_job)
        return position

    @property
    def _layout(self) -> list[int]:
        """In which a rank reads the same samples, and has the same part of parallel layers."""
        return [dist.get_world_size(), self._tensor_degree]


def registered(name: str) -> str:
    """Under which an object's state is kept among the states of this rank alone."""
    return f"registered {name!r}"
