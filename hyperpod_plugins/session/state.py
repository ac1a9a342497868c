"""What a loop trains: model, optimizers and schedulers, as transactions and checkpoints see them."""

import copy
import functools
import io
import logging
import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_map

from hyperpod_plugins.comm.groups import default_group
from hyperpod_plugins.elastic.scaling.lr_scaling import LearningRates
from hyperpod_plugins.errors import ConfigError, format_list
from hyperpod_plugins.parallel import CheckpointWriter, load_checkpoint
from hyperpod_plugins.parallel.checkpoint.files import any_rank, raise_on_all_ranks
from hyperpod_plugins.parallel.checkpoint.rank_state import complete_layout, load_rank_state, saved_ranks
from hyperpod_plugins.parallel.checkpoint.state import to_python_scalars
from hyperpod_plugins.parallel.elementwise import is_elementwise
from hyperpod_plugins.parallel.local_optimizer import check_no_required_closure, single_use_closure, step_locally
from hyperpod_plugins.parallel.unit_watch import reshard_gathered
from hyperpod_plugins.recovery import SAVING_GROUP, RecoveryPlan, Snapshot, TrainingState
from hyperpod_plugins.recovery.attributes import ATTRIBUTES, KeptAttributes, PlainAttributes, modules_of_program
from hyperpod_plugins.recovery.buffer_states import ALWAYS_KEPT_BYTES, BufferStates
from hyperpod_plugins.recovery.local_objects import ProgramState
from hyperpod_plugins.recovery.local_state import BUFFERS, LocalStates
from hyperpod_plugins.recovery.module_settings import ModuleSettings
from hyperpod_plugins.recovery.optimizer_copy import HasState, OptimizerCopy
from hyperpod_plugins.recovery.packing import MUTABLE_LEAVES, are_same, on_own_device
from hyperpod_plugins.recovery.plan import NO_STATE
from hyperpod_plugins.recovery.protocols import RESHARD
from hyperpod_plugins.recovery.state_transfer import (
    NOT_HYPERPARAMETERS,
    freeze,
    frozen_parameters,
    load_hyperparameters,
    to_python_numbers,
)
from hyperpod_plugins.recovery.undo import (
    CAN_RESET,
    Buffers,
    ParameterCopy,
    StepStart,
    drop_gradients,
    end_iteration,
    modules_of,
)

log = logging.getLogger(__name__)

# The loop's position: what a joiner needs besides the tensors of model and optimizers.


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A position in a loop: before a step, or in the rest of a step's body after the step was committed."""

    committed: int = 0
    """Number of committed steps."""
    after_commit: bool = False
    """Whether the body of the last committed step has not ended yet."""
    epoch: int = 0
    """Epoch of the last committed step."""
    ends_epoch: bool = False
    """Whether that step was the last of its epoch."""
    result: Any = None
    """What that step returned; kept until its body ends."""
    num_samples: int = 0
    """Number of samples of that step, over all ranks."""
    grad_norm: torch.Tensor | None = None
    """Norm of its gradients before they were clipped; None if they were not, or if its body has ended."""
    loader: dict[str, Any] = field(default_factory=dict[str, Any])
    """State of the loader after the committed steps; empty before the first."""
    loader_before: dict[str, Any] | None = None
    """State of the loader before the last committed step; None if it is not known."""
    schedulers: tuple[dict[str, Any], ...] = ()
    """State of each scheduler."""
    groups: tuple[list[dict[str, Any]], ...] = ()
    """Hyperparameters of each optimizer's parameter groups."""
    state: dict[str, Any] = field(default_factory=dict[str, Any])
    """Contents of `Session.state`."""
    rates: dict[str, Any] = field(default_factory=dict[str, Any])
    """State of learning rate and schedule, if the batch follows the world."""
    before: dict[str, Any] = field(default_factory=dict[str, Any])
    """After a commit: the four fields above as the body of that step began; see `SessionState.values`."""
    is_begun: bool = False
    """Before a step: whether the parameters beside this position are those after what precedes the step in its body."""
    modes: tuple[bool, ...] = ()
    """Whether each module of the trained model was in training mode as the last step began."""
    local: dict[str, Any] = field(default_factory=dict[str, Any])
    """Rank-local state, in a snapshot of that rank."""

    def to_dict(self) -> dict[str, Any]:
        """The fields by name; `asdict` would make another `Counter` of each in the program's state."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def to_bytes(self) -> bytes:
        """Serialize the position for another process or a snapshot."""
        buffer = io.BytesIO()
        torch.save(self.to_dict(), buffer)
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Inverse of `to_bytes`; reads only tensors, plain containers, numbers and strings."""
        return cls(**torch.load(io.BytesIO(data), weights_only=True, map_location=on_own_device))


def refuse_unreadable(position: Position) -> None:
    """Refuse state that a replacement could not read, before a replacement is needed.

    Raises:
        ConfigError: some state cannot be read; the message names it.
    """
    values = {f"session.state[{name!r}]": value for name, value in position.state.items()}
    values |= {f"the state of scheduler {index}": value for index, value in enumerate(position.schedulers)}
    bad = [name for name, value in values.items() if not _is_readable(value)]
    if bad:
        raise ConfigError(
            f"{format_list(bad)} holds Python objects that a replacement process would have to unpickle, which can run "
            "arbitrary code. Keep only tensors, plain containers, numbers and strings there."
        )


def _is_readable(value: Any) -> bool:
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError):  # no importable name
        return False
    return True


_VALUES = ("schedulers", "groups", "state", "rates")
_PLAIN = (bool, int, float, str, bytes, type(None))


def copied(value: Any) -> Any:
    """A copy of nested containers and their tensors, with NumPy scalars as Python numbers; other objects are shared.

    Used twice per step, so it is written for few calls.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is dict:
        return {key: copied(each) for key, each in value.items()}
    if kind is list or kind is tuple:
        return kind([copied(each) for each in value])
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, (np.ndarray, *MUTABLE_LEAVES)):
        return copy.copy(value)
    return to_python_scalars(tree_map(lambda leaf: leaf if leaf is value else copied(leaf), value))


class SessionState:
    """The `TrainingLoop` of a custom loop's transactions, and what its checkpoints hold."""

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
        degrees: tuple[int, int, int] = (1, 1, 1),
        rates: LearningRates | None = None,
        is_manual: bool = False,
    ) -> None:
        """Wrap what a loop trains.

        Args:
            model: a sharded or plain model.
            optimizers: optimizers of its parameters.
            schedulers: stepped once after each step.
            state: the program's own state: plain values.
            verify: compare checksums of what a replacement receives.
            folder: folder for emergency checkpoints.
            degrees: shard, tensor and expert degree of the model.
            rates: learning rate and schedule, if the batch follows the world.
            is_manual: whether the program steps optimizers and schedulers itself.

        Raises:
            ConfigError: an optimizer computes gradients itself, or has hyperparameters that cannot be passed on.
        """
        check_no_required_closure(optimizers)
        to_python_numbers(optimizers)
        self.model = model
        self.optimizers = list(optimizers)
        self.schedulers = list(schedulers)
        self.rates = rates
        self.is_manual = is_manual
        self.tensors = TrainingState(model, optimizers, verify=verify)
        self.saving: dist.ProcessGroup | None = None
        """Group of all ranks, used only for checkpoints; if None, one is created when it is needed."""
        self.get_position: Callable[[], Position] = Position
        """Returns the loop's position: committed steps, epoch and loader."""
        self.local: LocalStates | None = None
        """Rank-local state of buffers and registered objects; None without recovery."""
        self.rank_local: dict[str, ProgramState] = {}
        """Objects that the program has registered, by name."""
        self.entry_position: Position | None = None
        """Position at which the loop was entered; None once this rank has joined the other ranks."""
        self._state = state
        self._folder = folder
        self._degrees = degrees
        self._loaded: dict[str, dict[str, Any]] = {}
        self._body_start: dict[str, Any] = {}
        self._committed: dict[str, Any] = {}
        writes = is_manual or not all(map(is_elementwise, self.optimizers))
        settings = ModuleSettings(model, has_modes=False)  # a position has the modes
        self.attributes = PlainAttributes(modules_of_program(model), model=model, settings=settings)
        self.scalers = ScalerWatch(self.restores)
        others: list[HasState] = [*([] if rates is None else [rates]), *(self.schedulers if is_manual else [])]
        kept = OptimizerCopy(self.optimizers, others) if writes else None
        self._beginning = StepStart(model, self.optimizers, kept, attributes=[self.attributes])
        self._module_start: tuple[Buffers, KeptAttributes] | None = None
        """What `LocalStates.before` does not hold, as the body of a step began."""
        self._rest = StepStart(
            model, self.optimizers, attributes=[self.attributes], above_bytes=ALWAYS_KEPT_BYTES
        )  # of what `LocalStates` does not hold, parameters above all
        self.tensors.watched = [self._beginning, self._rest]
        self._rest_follows = NO_STATE
        """Number of committed steps that the rest of the body follows, while it can be undone."""
        self._can_undo_rest: bool | None = None
        """Whether the rest can be undone, and what follows it up to the next step; None until that step begins."""
        self._runs = self._is_begun = False
        """Whether a step runs; and whether the next one did, so that what precedes it in the body runs once more."""
        self._parameters: ParameterCopy | None = None
        """Parameters to return to at the step, while what precedes it in the body runs again."""
        self._modes: list[tuple[nn.Module, bool]] = []
        self._writer: CheckpointWriter | None = None

    # -- the loop's position, and what the body of a step may change ---------------------------------------------

    def position(self) -> Position:
        """The loop's position, with everything that a loop that resumes there needs."""
        return replace(self.get_position(), modes=self._present_modes, **self.values())

    def resume_position(self) -> Position:
        """The position from which the loop continues after a fault.

        A body that is interrupted runs again from its beginning. So within a body this has the values of its
        beginning, or those right after the commit, whatever the body has changed since.
        """
        position = self.get_position()
        kept = self._committed if position.after_commit else self._body_start
        before = self._body_start if position.after_commit else {}
        is_begun = self.was_begun and not position.after_commit
        return replace(position, modes=self._present_modes, is_begun=is_begun, before=before, **(kept or self.values()))

    @property
    def was_begun(self) -> bool:
        """Whether this rank's parameters are those after what precedes the present step in its body."""
        return self._runs or self._parameters is not None

    @property
    def _present_modes(self) -> tuple[bool, ...]:
        return tuple(mode for _, mode in self._modes) or tuple(each.training for each in modules_of(self.model))

    def values(self) -> dict[str, Any]:
        """Copies of what the body of a step may change and every rank has alike, by their names in a `Position`."""
        return {
            "schedulers": tuple(copied(scheduler.state_dict()) for scheduler in self.schedulers),
            "groups": tuple(
                [
                    {key: copied(each) for key, each in group.items() if key not in NOT_HYPERPARAMETERS}
                    for group in groups
                ]
                for groups in (optimizer.param_groups for optimizer in self.optimizers)
            ),
            "state": copied(self._state),
            "rates": {} if self.rates is None else copied(self.rates.state_dict()),
        }

    def load_values(self, values: Mapping[str, Any]) -> None:
        """Load what `values` returned in this process or another one."""
        for scheduler, state in zip(self.schedulers, values["schedulers"], strict=True):
            scheduler.load_state_dict(copied(state))
        load_hyperparameters(values["groups"], self.optimizers)
        if self.rates is not None and values["rates"]:
            self.rates.load_state_dict(copied(values["rates"]))
        self._state.clear()
        self._state.update(copied(values["state"]))

    def load_position(self, position: Position) -> None:
        """Load the state of schedulers, learning rate, hyperparameters and the program's own state."""
        self._beginning.close()
        values = {name: getattr(position, name) for name in _VALUES}
        self.load_values(values)
        self._body_start, self._committed = (position.before, values) if position.after_commit else ({}, {})
        self._is_begun = position.is_begun
        parts = modules_of(self.model)
        for part, mode in zip(parts, position.modes or (each.training for each in parts), strict=True):
            part.training = mode

    def join_in_body(self, join: Callable[[], None]) -> None:
        """Join the other ranks, which have run what precedes the step in its body, and return to the body's beginning.

        Parameters stay as they are there: what the body reads before the step has been written by what precedes it.

        Args:
            join: joins them, with the state that they have there.
        """
        values = self.values()
        if self.local is not None:
            self.local.before = self.local.state()  # also asks for that of the beginning
        join()
        self.load_values(values)
        if self.local is not None:
            self.local.return_to_before()
        self._is_begun = True

    def begin_body(self) -> None:
        """Keep what the body of a step may change, as it begins."""
        self._body_start, self._committed = self.values(), {}
        if self._is_begun:
            self._parameters, self._is_begun = ParameterCopy(self.model), False
        if self.local is not None:
            self.local.before, self.local.begun = self.local.state(), {}
        parts = self._beginning.parts or modules_of(self.model)
        self._module_start = Buffers(parts, above_bytes=ALWAYS_KEPT_BYTES), self.attributes.keep()

    def begin_body_again(self) -> None:
        """Load what the body of the last committed step began with, as it runs again."""
        self._parameters = ParameterCopy(self.model)
        if self._body_start:
            self.load_values(self._body_start)
        if self.local is not None:
            self.local.return_to_begun()

    def return_to_commit(self) -> None:
        """Load what was kept right after the commit, as a body that runs again has come to that point."""
        committed = self.get_position().committed
        self._put_back_parameters()
        self.load_values(self._committed)
        if self.local is not None:
            self.local.return_to(committed)
            self.local.is_at_commit = False  # what follows may write
            self.begin_rest(committed)

    def begin_run(self) -> None:
        """Note that what precedes the step in its body has run."""
        reshard_gathered(self.model)  # by a forward of the last body, or before the loop; snapshots hold shards
        self._put_back_parameters()
        self._runs = True
        if self.local is not None and self._module_start is not None:
            self.local.complete_before(self._module_start[0].copies)

    def _put_back_parameters(self) -> None:
        if self._parameters is not None:
            self._parameters.put_back()
            self._parameters = None

    def begin_rest(self, committed: int) -> None:
        """Keep what the rest of the body may change, after `committed` steps."""
        if self.local is None:
            return
        if self.local.before:
            self.local.begun = self.local.before
        self.local.before, self._module_start = {}, None
        self._rest.begin()
        self._rest_follows, self._can_undo_rest = committed, None

    def end_body(self) -> None:
        """Drop the values that were kept for the body of a step, since it has ended."""
        self._body_start, self._committed = {}, {}

    def forget_body(self) -> None:
        """Drop what was kept for the body of a step, since the loop moves to another position."""
        self._body_start, self._committed = {}, {}
        self._module_start, self._parameters, self._rest_follows = None, None, NO_STATE
        self._runs = False
        if self.local is not None:
            self.local.before = {}

    def undo_body(self, position: Position, local: LocalStates | None) -> bool:
        """Undo what the interrupted body has written to the model and to registered objects, as it runs again.

        Args:
            position: the position from which all ranks continue.
            local: the rank-local states of the world in which the body began.

        Returns:
            Whether everything was undone; if not, this rank's state is lost.
        """
        is_undone = True
        self._put_back_parameters()
        if self.local is not None:
            self.local.is_at_commit = position.after_commit
        if not position.after_commit:
            if self._module_start is not None:
                buffers, attributes = self._module_start
                is_undone = self.attributes.can_put_back(attributes)
                buffers.put_back()
                self.attributes.put_back(attributes)
            if local is not None:
                local.return_to_before()
            return is_undone
        if self._rest_follows == position.committed:
            can_undo = self._can_undo_rest
            is_undone = self._rest.is_within_reach if can_undo is None else can_undo
            self._rest.put_back()
        if local is not None:
            local.return_to(position.committed)
        return is_undone

    @property
    def steps_before_vote(self) -> bool:
        """Whether optimizers step before the vote: they may communicate, or the program steps them itself."""
        return self._beginning.kept is not None

    def update(self) -> None:
        """Step each optimizer once, and drop the gradients."""
        for optimizer in self.optimizers:
            step_locally(optimizer, single_use_closure(optimizer, None))
            optimizer.zero_grad(set_to_none=True)

    def note_batches(self, batches: Sequence[Any]) -> None:
        """Remember the batches that a step is about to compute on."""
        self._beginning.batches.remember(batches)

    def computed(self) -> None:
        """Detect what a step has written, after it was computed and before the vote."""
        self._beginning.end()

    def advance(self) -> None:
        """Step the schedulers when the step is committed: once, or once for each reference batch completed.

        With manual optimization the program has stepped them.
        """
        self._beginning.close()
        self._runs = False
        for _ in range(int(not self.is_manual)) if self.rates is None else self.rates.due_schedule_steps():
            for scheduler in self.schedulers:
                scheduler.step()
        if self._body_start:
            self._committed = self.values()

    def skip(self) -> None:
        """Skip the optimizers' step: drop the gradients."""
        drop_gradients(self.model, self.optimizers)

    def restore_training_modes(self) -> None:
        """Restore the modules' training mode of the last step: a validation may have been interrupted."""
        for part, is_training in self._modes:
            part.training = is_training

    # -- TrainingLoop -------------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Remember what the step may change, and which modules are in training mode."""
        self._beginning.begin()
        if self._rest_follows != NO_STATE and self._can_undo_rest is None:
            self._can_undo_rest = self._rest.note_changes(self._beginning)
        self._modes = [(part, part.training) for part in self._beginning.parts]
        if self.local is not None:
            with self._beginning.just_begun():
                self.local.begin(step)

    @property
    def is_within_step(self) -> bool:
        """Whether a step has begun that is not committed yet."""
        return self._beginning.is_open

    @property
    def can_undo(self) -> bool:
        """Whether the step has written only to what was copied when it began."""
        return self._beginning.is_within_reach

    def undo_step(self) -> None:
        """Drop gradients, and restore everything else."""
        drop_gradients(self.model, self.optimizers)
        self._beginning.put_back()
        if self.local is not None:
            self.local.undo()

    def restores(self, value: object) -> bool:
        """Whether an object is restored, and sent to a replacement: the model holds it, or it is registered."""
        held = (each.value for each in self.attributes.held.values())
        return any(each is value for each in held) or any(each.stateful is value for each in self.rank_local.values())

    def share_rank_local_state(self, step: int) -> bool:
        """Send this rank's rank-local state to its buddy; return whether the source rank's may differ from it."""
        self.scalers.check()
        return self.local is not None and self.local.exchange(step)

    def share_first_state(self, step: int) -> None:
        """Send this rank's rank-local state to its buddy, as a loop begins after `step` steps."""
        if self.local is not None:
            self.local.exchange(step, is_beginning=True)

    def note_equal_local_state(self, step: int, *, is_equal: bool) -> None:
        """Note whether the rank-local states of all ranks are equal after `step` steps."""
        if self.local is not None:
            self.local.note_equal(step, is_equal=is_equal)

    @property
    def equal_local_step(self) -> int:
        """Number of steps after which they were, if no code has written to this rank's since; else -1."""
        return NO_STATE if self.local is None else self.local.equal_step

    @property
    def local_state(self) -> dict[str, dict[str, Any]]:
        """Rank-local state: buffers, attributes and what the program has registered; only the last without recovery."""
        if self.local is not None:
            return self.local.state()
        return {rank_local_name(name): state.state_dict() for name, state in self.rank_local.items()}

    def load_rank_local(self, values: dict[str, dict[str, Any]], *, is_of_another_job: bool) -> None:
        """Load what `local_state` returned when a checkpoint was written."""
        buffers, saved = BufferStates(self.model), values.get(BUFFERS, {})
        buffers.load_state_dict(buffers.fitting(saved) if is_of_another_job else saved)
        if not is_of_another_job:
            self.attributes.load_state_dict(values.get(ATTRIBUTES, {}))
        self._loaded = values
        for name, state in self.rank_local.items():
            state.load_state_dict(values.get(rank_local_name(name), {}))

    def register(self, name: str, state: ProgramState) -> None:
        """Register an object of the program, and load the state that a checkpoint held under its name."""
        self.rank_local[name] = state
        state.load_state_dict(self._loaded.get(rank_local_name(name), {}))

    def end_iteration(self) -> None:
        """Reset FSDP2's modules to the beginning of an iteration."""
        end_iteration(self.model)

    def capture_state(self) -> bytes:
        """Capture the position at the beginning of this step, or that at which the loop was entered."""
        with self._beginning.at_step_start():
            return (self.entry_position or self.resume_position()).to_bytes()

    @property
    def local_steps(self) -> tuple[int, ...] | None:
        """Steps of which this rank keeps its source rank's rank-local state; None if it keeps none."""
        return None if self.local is None else self.local.kept_steps

    @property
    def rank_local_states(self) -> LocalStates | None:
        """Rank-local state of buffers, attributes and registered objects; None without recovery."""
        return self.local

    def captured_values(self) -> dict[str, Any]:
        """The position that `capture_state` captures."""
        return {f"trainer {name}": value for name, value in Position.from_bytes(self.capture_state()).to_dict().items()}

    def present_values(self) -> dict[str, Any]:
        """State of the schedulers, hyperparameters, the program's own state, and learning rate."""
        return {f"trainer {name}": value for name, value in self.values().items()}

    def own_objects(self) -> Mapping[str, Stateful]:
        """None: a loop has no callbacks."""
        return {}

    def capture_own_state(self) -> bytes:
        """Like `capture_state`, with this rank's rank-local state; call it between two steps."""
        if self.local is None:
            return self.capture_state()
        with self._beginning.at_step_start():
            position = self.entry_position or self.resume_position()
            return replace(position, local={**self.local.state(), **self.local.before}).to_bytes()

    def restore(self, plan: RecoveryPlan, rank: int) -> None:
        """Copy tensors and rank-local state between ranks."""
        if self.local is not None:
            self.local.keep_first(plan.step, plan.senders)
        self.tensors.share(plan.senders)
        if self.local is not None:
            self.local.send_to_joiners(plan.senders, bytes)
            self.local.restore(plan.step, plan.senders, are_equal=plan.are_local_equal)

    pending_saves = ()
    """None: a body that was interrupted after its commit runs again, and its saves with it."""

    def finish_saves(self, pending: tuple[str, ...]) -> None:
        """Nothing is left to do."""

    def save(self, path: str, *, is_alone: bool, snapshots: Mapping[int, Snapshot] | None = None) -> str:
        """Write a checkpoint before the job ends or all processes restart, and return its path."""
        described = {rank: Position.from_bytes(each.trainer) for rank, each in (snapshots or {}).items()}
        position = next(iter(described.values()), None) or self.entry_position or self.resume_position()
        if path in ("", RESHARD):
            label = "reshard" if path else "emergency"
            path = str((self._folder / f"{label}-step={position.committed}").absolute())
        if snapshots is None:
            self.write(path, position)
        else:
            self._write_snapshots(path, snapshots, described)
        return path

    def _write_snapshots(self, path: str, snapshots: Mapping[int, Snapshot], described: Mapping[int, Position]) -> None:
        """Write a checkpoint from snapshots of several ranks, with the positions in them."""
        parts = self.tensors.checkpoint_parts([(each.header, each.data) for each in snapshots.values()], "a snapshot")
        own = {rank: {"local": each.local, "layout": list(self._layout)} for rank, each in described.items()}
        first, position = next(iter(described.items()))
        extra = {
            "loop": replace(position, local={}).to_dict(),
            "own": own[first],
            "frozen": frozen_parameters(self.model),
        }
        self._prepared_writer.save_parts(path, parts, model=self.model, extra=extra, rank_state=own)

    @property
    def _prepared_writer(self) -> CheckpointWriter:
        if self._writer is None:
            self._writer = CheckpointWriter(self.saving)
        return self._writer

    # -- checkpoints --------------------------------------------------------------------------------------------

    def write(self, path: str | Path, position: Position) -> None:
        """Write a checkpoint. All ranks must call this."""
        own = {"local": self.local_state, "layout": list(self._layout)}
        # "own" is that of rank 0; if they differ, each rank adds its own
        extra = {"loop": position.to_dict(), "own": own, "frozen": frozen_parameters(self.model)}
        of_ranks = {dist.get_rank(): own}
        self._prepared_writer.save(
            path, model=self.model, optimizers=self.optimizers, extra=extra, rank_state=of_ranks
        ).wait()

    def read(self, path: str | Path, *, is_of_another_job: bool = False) -> Position:
        """Load a checkpoint of any degrees, and return its loop's position. All ranks must call this.

        Args:
            path: path of the checkpoint.
            is_of_another_job: whether another program may have written it; then each rank loads only the rank-local
                state that fits.
        """
        extra = load_checkpoint(path, model=self.model, optimizers=self.optimizers)
        position = Position(**extra["loop"])
        if is_of_another_job:  # of perhaps other modules; this program sets their modes, and what is trained, itself
            position = replace(position, modes=())
        else:
            freeze(self.model, extra["frozen"])
        self.load_position(position)
        self._read_rank_local(Path(path), extra.get("own", {}), is_of_another_job=is_of_another_job)
        return position

    def _read_rank_local(self, path: Path, of_first: dict[str, Any], *, is_of_another_job: bool) -> None:
        """Load this rank's own rank-local state; without one, that of the first rank, as far as it is of any use.

        There is none if the checkpoint was written by another number of ranks or with other degrees, or if this rank
        was lost then.

        Args:
            path: path of the checkpoint.
            of_first: of the first rank that wrote it; that of all ranks if they were equal.
            is_of_another_job: see `read`.
        """
        rank, size, group = dist.get_rank(), dist.get_world_size(), default_group()
        values, is_same_layout = of_first.get("local", {}), complete_layout(of_first.get("layout")) == self._layout
        differing: set[str] = set()
        with raise_on_all_ranks(f"the rank-local state in {path} was not read", group):
            ranks = saved_ranks(path)
            are_missing = not is_same_layout or (ranks and not set(range(size)) <= set(ranks))
            own = load_rank_state(path, rank, weights_only=True) if is_same_layout and rank in ranks else {}
            if are_missing:
                for each in ranks[rank::size]:
                    others = load_rank_state(path, each, weights_only=True).get("local", {})
                    differing |= {name for name in values if not are_same(values[name], others.get(name))}
        if are_missing:  # the same on all ranks, and so are the names
            differing = {name for name in sorted(values) if any_rank(name in differing, group)}
        with raise_on_all_ranks(f"the rank-local state in {path} was not loaded", group):
            if own or (is_same_layout and not ranks):
                self.load_rank_local((own or of_first).get("local", {}), is_of_another_job=is_of_another_job)
            else:
                self._load_of_first(values, differing, is_of_another_job=is_of_another_job)
        dropped = sorted(differing - {BUFFERS, ATTRIBUTES})
        if dropped and rank == 0:
            log.warning(
                "%s was written by another number of ranks or with other degrees, or not by all ranks. What the "
                "program has registered and what differed between ranks begins anew on each rank that has none of its "
                "own there: %s",
                path,
                format_list(dropped),
            )

    def _load_of_first(
        self, values: dict[str, dict[str, Any]], differing: Collection[str], *, is_of_another_job: bool
    ) -> None:
        """Continue with the rank-local state of the first rank, on a rank that has none of its own in a checkpoint.

        What the program has registered is its own on each rank: it begins anew if it was `differing` between ranks.
        """
        of_model = () if is_of_another_job else (BUFFERS, ATTRIBUTES)
        registered = values.keys() - {BUFFERS, ATTRIBUTES} - set(differing)
        usable = {name: each for name, each in values.items() if name in of_model or name in registered}
        self.load_rank_local(usable, is_of_another_job=is_of_another_job)

    @property
    def _layout(self) -> tuple[int, ...]:
        """World size and degrees: if equal, a rank reads the same samples and has the same part of the parameters."""
        return (dist.get_world_size(), *self._degrees)


def rank_local_name(name: str) -> str:
    """Name of a registered object's state among the rank-local states."""
    return f"registered {name!r}"


class ScalerWatch:
    """Notes which `GradScaler` scales a loss while a loop runs. The scale follows from all steps so far."""

    def __init__(self, is_known: Callable[[object], bool]) -> None:
        """Watch nothing yet; `is_known`: whether an object is restored, and sent to a replacement."""
        self._is_known = is_known
        self._used: dict[int, GradScaler] = {}
        self._undo: Callable[[], None] | None = None

    def open(self) -> None:
        """Watch all scalers, until `close`."""
        scaler, used = cast("Any", GradScaler), self._used
        former = scaler.scale

        @functools.wraps(former)
        def scale(this: GradScaler, outputs: Any) -> Any:
            used[id(this)] = this
            return former(this, outputs)

        def undo() -> None:
            scaler.scale = former

        scaler.scale, self._undo = scale, undo

    def close(self) -> None:
        """Watch no more."""
        undo, self._undo = self._undo, None
        self._used.clear()
        if undo is not None:
            undo()

    def check(self) -> None:
        """Refuse scalers that the steps so far have used.

        Raises:
            ConfigError: one is enabled, and a replacement would not get it.
        """
        used = [each for each in self._used.values() if each.is_enabled() and not self._is_known(each)]
        if used:
            raise ConfigError(
                "a GradScaler is used in the steps, but was not given to the session. With recovery, a step that is "
                "run again would find another scale, and a replacement would begin with a new one. Call, after "
                'session.train: session.register_rank_local("scaler", scaler).'
            )
