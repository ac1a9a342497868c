"""Rehearsals: find the state of a program that recovery would not restore exactly, before a fault does.

Before a *rehearsed step* (`RecoveryOptions(rehearse=(2, 100))`), the state of each rank is written and read back as a
replacement would receive it, and compared between replicas. Then the step is computed, discarded as after a fault, and
computed again. Anything that differs by a bit is reported by name, and the job stops before it trains with wrong
values.

A *rehearsed job* (`hyperpod rehearse train.py`, see `rehearsal_jobs.py`) runs the program briefly without a fault and
again with a SIGKILL in each phase: its fits and loops end after a few steps. In both runs each rank records digests of
everything that it holds at each step and at the end. The digests of the two runs must agree.

What a replacement would read of a rank's state besides its tensors is read in this process instead
(`StateReadBack`). Each object is set back to what it was when training began, loads what a replacement would be sent,
and must hold the same bits again:

    rank-local state             buffers, metrics, attributes and logged values, as the buddy keeps them
    objects with a `state_dict`  the program's own callbacks, and objects that it has registered
    other values of the loop     only written and read: a replacement loads them as it enters the loop

[Note: what is set back] Of an object with a `state_dict`, these are its Python attributes that are numbers, strings,
containers or small tensors: `load_state_dict` must restore those that the state is made of. Another object that it has
made for itself stays, with all that it holds. An attribute that is not part of the state may be of no importance, such
as the time of the last step, so it is only warned of.
"""

import contextlib
import logging
import pickle
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import PosixPath, PurePosixPath
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.modules.module import register_module_forward_hook, register_module_full_backward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from hyperpod_plugins.errors import RecoveryError, format_list
from hyperpod_plugins.parallel.topology import Topology
from hyperpod_plugins.recovery.attributes import PlainAttributes
from hyperpod_plugins.recovery.buffer_states import BufferStates
from hyperpod_plugins.recovery.local_objects import ProgramState, RankLocalState
from hyperpod_plugins.recovery.packing import pack, unpack
from hyperpod_plugins.recovery.program_collectives import is_of_program
from hyperpod_plugins.recovery.protocols import TrainingLoop
from hyperpod_plugins.recovery.rehearsal_jobs import STATE_COPY, STATE_LOST, RehearsedCall
from hyperpod_plugins.recovery.snapshot import Snapshots
from hyperpod_plugins.recovery.state_digests import (
    Difference,
    Digests,
    StepGradients,
    alike_on_replicas,
    compare_replicas,
    differing,
    differing_names,
    entry_digests,
    first_kind,
    local_digests,
    object_digests,
    state_digests,
    steady_digests,
    tensor_digests,
    unowned_digests,
    value_digest,
    value_digests,
)
from hyperpod_plugins.recovery.state_transfer import TrainingState

_log = logging.getLogger(__name__)
_OF_LIGHTNING = ("log", "log_dict")
"""Attributes that Lightning gives to callbacks."""
_OF_LOADERS = "combined_loader"
"""Key of the loaders' state in the state of Lightning's loops."""


def _with_paths(data: bytes) -> Any:
    with torch.serialization.safe_globals([PosixPath, PurePosixPath]):
        return unpack(data, map_location=None)


class StateReadBack:
    """Reads back the state of one rank besides its tensors."""

    def __init__(self, loop: TrainingLoop) -> None:
        """Note what the program's objects hold now: it is what they are set back to."""
        self._loop = loop
        registered = {name: each.stateful for name, each in self._local.items() if isinstance(each, ProgramState)}
        self._objects = {**loop.own_objects(), **registered}
        self._attributes = {
            name: PlainAttributes([(name, each)], ignored=_OF_LIGHTNING, follows=False)
            for name, each in self._objects.items()
            if is_of_program(type(each)) and isinstance(getattr(each, "__dict__", None), dict)
        }
        self._first = {name: each.keep() for name, each in self._attributes.items()}
        self._warned: set[str] = set()

    def differing(self) -> set[str]:
        """Names of what a replacement would not hold with the same bits, each beginning with its kind."""
        found: set[str] = set()
        for name, value in self._loop.present_values().items():
            data = _written(value, _with_paths)
            again = {"": ""} if data is None else _with_paths(data)
            found |= differing_names(entry_digests(name, value), entry_digests(name, again))
        states = {name: each for name, each in self._local.items() if name not in self._objects}
        present = {name: each.state_dict() for name, each in states.items()}
        again = {name: _reloaded(each, present[name]) for name, each in states.items()}
        found |= differing_names(local_digests(present), local_digests(again))
        not_restored: list[str] = []
        for name, each in self._objects.items():
            names, attributes = self._reload(name, each)
            found |= names
            not_restored += attributes
        self._warn_of(not_restored)
        return found

    @property
    def _local(self) -> Mapping[str, RankLocalState]:
        states = self._loop.rank_local_states
        return {} if states is None else states.objects

    def _reload(self, name: str, each: Stateful) -> tuple[set[str], list[str]]:
        """Let an object load its own state. Names of what differs, and of attributes that it has not restored."""
        values = each.state_dict()
        copy = _StateCopy(values, unpack if name in self._local else _with_paths)
        if copy.unreadable or not values:  # `load_state_dict` need not accept what is left
            return {each for key in copy.unreadable for each in entry_digests(f"{name}.{key}", values[key])}, []
        before = steady_digests(lambda: entry_digests(name, each.state_dict()))
        attributes = self._attributes.get(name, PlainAttributes(()))
        kept, held = attributes.keep(), attributes.packed()
        attributes.put_back(self._first.get(name, kept))
        try:
            copy.load_into(each)
            after = steady_digests(lambda: entry_digests(name, each.state_dict()))
            restored = attributes.packed()
        finally:
            attributes.put_back(kept)
        return differing_names(before, after), [key for key in held if restored.get(key) != held[key]]

    def _warn_of(self, names: list[str]) -> None:
        new = [name for name in names if name not in self._warned]
        self._warned |= {*new}
        if new and not (dist.is_initialized() and dist.get_rank()):
            _log.warning(
                "rehearsal: %s changed since training began, and load_state_dict() does not restore it. A replacement "
                "has it as its constructor makes it. If results depend on it, add it to state_dict()",
                format_list(new, 8),
            )


class _StateCopy:
    """The entries of a state that another process can read, as it would read them."""

    def __init__(self, values: dict[str, Any], read: Callable[[bytes], Any]) -> None:
        self._read = read
        written = {key: _written(value, read) for key, value in values.items()}
        self._data = {key: data for key, data in written.items() if data is not None}
        self.unreadable = values.keys() - self._data.keys()
        """Names of the other entries."""

    def load_into(self, state: RankLocalState | Stateful) -> None:
        """Let an object load them."""
        state.load_state_dict({key: self._read(data) for key, data in self._data.items()})


def _written(value: Any, read: Callable[[bytes], Any]) -> bytes | None:
    """The bytes of a value; None if it cannot be written, or not be read."""
    try:
        data = pack(value)
        read(data)
    except (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError):  # no importable name
        return None
    return data


def _reloaded(state: RankLocalState, values: dict[str, Any]) -> dict[str, Any]:
    """The state of an object that was set back, and has loaded `values` as another process would read them."""
    kept, copy = state.keep() if isinstance(state, PlainAttributes) else None, _StateCopy(values, unpack)
    if isinstance(state, BufferStates):
        state.overwrite(values)
    state.load_state_dict({})
    copy.load_into(state)
    found = {key: value for key, value in state.state_dict().items() if key not in copy.unreadable}
    if isinstance(state, PlainAttributes) and kept is not None:
        state.put_back(kept)  # the same objects as before, to which others may refer
    return found


class RehearsalFailed(RecoveryError):
    """A rehearsed step found state that would not be restored after a fault."""


class Rehearsal:
    """Rehearsals in one process. `StepTransaction` calls it at each point of a step, in the thread of the step.

    In rehearsed steps, and in all steps of a rehearsed job, it also checks how optimizers call their closures.

    Args:
        loop: training loop of this rank.
        state: its tensors.
        topology: topology of the job.
        device: device of this rank.
        steps: numbers of the steps to rehearse.
        job: present call of the program in a rehearsed job; None outside of one.
        give_up: tells the agents to end the job, with the reason.
    """

    def __init__(
        self,
        loop: TrainingLoop,
        state: TrainingState,
        topology: Topology,
        device: torch.device,
        *,
        steps: Sequence[int],
        job: RehearsedCall | None,
        give_up: Callable[[str], None],
    ) -> None:
        self._give_up = give_up
        self._loop = loop
        self._state = state
        self._topology = topology
        self._device = device
        self._steps = frozenset(steps)
        self._rank = dist.get_rank()
        self._job = job
        self.faults = None if job is None else job.faults
        """Faults of this rank; None outside of a rehearsed job."""
        self._batches: dict[str, int] = {}
        self._step = -1
        self._begun: Digests = {}
        self._gradients: StepGradients | None = None
        self._besides: StateReadBack | None = None
        self._in_rest: RemovableHandle | None = None
        self._refused = ""
        if Rehearsal._hook is not None:
            Rehearsal._hook.remove()
            Rehearsal._hook = None
        if steps or job is not None:
            Rehearsal._hook = register_optimizer_step_pre_hook(self._before_update)

    _hook: ClassVar[RemovableHandle | None] = None  # of the rehearsal in use

    @classmethod
    def create(
        cls,
        loop: TrainingLoop,
        state: TrainingState,
        topology: Topology,
        device: torch.device,
        *,
        steps: Sequence[int],
        job: RehearsedCall | None,
        give_up: Callable[[str], None],
    ) -> Self | None:
        """The rehearsal that the options or `hyperpod rehearse` request; None if neither does."""
        if not steps and job is None:
            return None
        return cls(loop, state, topology, device, steps=steps, job=job, give_up=give_up)

    # -- the beginning and the end of a fit or loop in a rehearsed job ------------------------------------------

    def watch_transfers(self, snapshots: Snapshots | None) -> None:
        """Let faults happen in the middle of a snapshot's exchange, and while this rank receives its state."""
        if self.faults is None:
            return
        self._state.when_receiving = self._receiving
        if snapshots is not None:
            snapshots.when_exchanging = lambda step: self.at("snapshot", step)
            snapshots.when_receiving = self._receiving

    def _receiving(self) -> None:
        self.at(STATE_COPY, max(self._step, 0))

    def at_set_up(self) -> None:
        """Announce that a fit or loop is being set up, while lost processes are not yet replaced."""
        if self._job is not None and self._job.is_later_training:
            self.at("between_fits", self._job.begins_at or 0)

    def begin_at(self, step: int) -> None:
        """Set the number of steps before this fit or loop."""
        if self._job is not None:
            self._job.begin_at(step)

    def is_last(self, step: int) -> bool:
        """Whether the fit or loop of a rehearsed job ends after `step` steps."""
        return self._job is not None and self._job.is_last(step)

    def end_call(self, step: int) -> None:
        """Record the state with which a fit or loop of a rehearsed job has ended after `step` steps."""
        if self._job is not None:
            self._job.write(step, "end", state_digests(self._state) | self._values())

    # -- a step -------------------------------------------------------------------------------------------------

    def begin(self, step: int, *, is_compared: bool = True) -> None:
        """Handle the beginning of a step, when all changes of the previous one are complete.

        Args:
            step: number of the step.
            is_compared: whether all ranks begin this step together, so that they can compare their states.

        Raises:
            PeerLost: a rank was lost meanwhile.
            RehearsalFailed: state would not be restored after a fault.
        """
        self._step = step
        self._raise_refused()
        if self._steps and self._besides is None:
            self._besides = StateReadBack(self._loop)
        if self._job is not None:
            self._job.write(step, "state", self._held())
        if is_compared and step in self._steps:
            self._raise_differences(step, "reading its state back", self._read_back())
            self._raise_differences(step, "compared with its replicas", self._compare_replicas())
        self.at("between", step)

    def before_compute(self, step: int) -> None:
        """Record the state before the step is computed, when everything that it may change has been saved."""
        looks = self._looks_at(step)
        held = state_digests(self._state) | unowned_digests(self._state) if looks else {}
        self._gradients = StepGradients(self._state.model) if looks else None
        if self._job is not None:
            self._job.write(step, "begun", held)
        self._begun = held | self._values() if step in self._steps else {}

    def after_undo(self, step: int, *, is_compared: bool = False) -> None:
        """Record the state after the step was undone, before it is computed again.

        Args:
            step: number of the step.
            is_compared: whether all ranks compare their state with that at the beginning of the step.

        Raises:
            PeerLost: a rank was lost meanwhile.
            RehearsalFailed: something was not restored.
        """
        held = state_digests(self._state) | unowned_digests(self._state) if self._looks_at(step) else {}
        if self._job is not None:
            self._job.write(step, "begun", held)
        if is_compared:
            self._raise_differences(step, "putting the step back", differing(self._begun, held | self._values()))

    def _looks_at(self, step: int) -> bool:
        return self._job is not None or step in self._steps

    def note_batch(self, index: int, batch: Any) -> None:
        """Record the digest of a batch before training on it; the first one of a step has the index 0."""
        if self._job is not None:
            if index == 0:
                self._batches = {}  # of an earlier step, which may have had more
            self._batches[f"batch {index}"] = value_digest(batch)

    def at(self, phase: str, step: int) -> None:
        """Announce that this process is in a phase of a step; a scheduled fault may kill it here."""
        if self.faults is not None:
            self.faults.reach(phase, step)

    @contextlib.contextmanager
    def computing(self, step: int) -> Generator[None]:
        """Context of a step's computation, in which due faults happen in a module's forward or backward."""
        hooks: list[RemovableHandle] = []
        for phase in ("forward", "second_fit", STATE_LOST):
            is_here = phase != "second_fit" or (self._job is not None and self._job.is_later_training)
            if is_here and self.faults is not None and self.faults.is_due(phase, step):
                hooks.append(register_module_forward_hook(lambda *_, phase=phase: self.at(phase, step)))
        if self.faults is not None and self.faults.is_due("backward", step):
            hooks.append(register_module_full_backward_pre_hook(lambda *_: self.at("backward", step)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def begin_rest(self, step: int) -> None:
        """Begin what follows a step in a loop's body; a due fault happens there in a forward without gradients."""
        if self.faults is not None and self.faults.is_due("validation", step):
            self._in_rest = register_module_forward_hook(lambda *_: self._evaluated(step))

    def _evaluated(self, step: int) -> None:
        if not torch.is_grad_enabled():
            self.at("validation", step)

    def end_rest(self, step: int, *, is_complete: bool) -> None:
        """End the body of a loop, unless a fault or an error has interrupted it."""
        if self._in_rest is not None:
            self._in_rest.remove()
            self._in_rest = None
        if is_complete:
            self.at("batch_end", step)

    def after_compute(self, step: int, again: Callable[[], bool]) -> None:
        """Check a step when its gradients are computed and no rank has voted.

        Args:
            step: number of the step.
            again: discards the step and computes it once more; returns False if a fault interrupted that.

        Raises:
            PeerLost: a rank was lost while ranks compared their results.
            RehearsalFailed: the second computation differed.
        """
        self._raise_refused()
        if self._job is not None:
            self._job.write(step, "gradients", self._batches | self._computed())
        if step not in self._steps:
            return
        before = self._computed(with_state=True)
        if again():
            self._raise_differences(
                step, "computing the step again", differing(before, self._computed(with_state=True))
            )

    def _held(self) -> dict[str, int]:
        """Digests of everything that this rank holds when a step begins."""
        return state_digests(self._state) | value_digests(self._loop.captured_values())

    def _values(self) -> dict[str, int]:
        """Digests of all but tensors, as this rank holds it now."""
        local = self._loop.rank_local_states

        def read() -> dict[str, int]:
            present = value_digests(self._loop.present_values()) | object_digests(self._state.model)
            return present if local is None else present | local_digests(local.state())

        return steady_digests(read)

    def _before_update(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Step hook of all optimizers: count how often each evaluates its closure."""
        self.at("optimizer", self._step)
        closure, num_calls = kwargs.get("closure"), 0
        if closure is None or not self._looks_at(self._step):
            return None

        def counted() -> Any:
            nonlocal num_calls
            num_calls += 1
            if num_calls > 1:
                self._refused = (
                    f"rank {self._rank}, step {self._step}: optimizer {type(optimizer).__name__} evaluated its closure "
                    f"{num_calls} times, but recovery computes the gradients of a step once, for the parameters at "
                    "its beginning. Use an optimizer that evaluates its closure once."
                )
            return closure()

        return args, {**kwargs, "closure": counted}

    def _raise_refused(self) -> None:
        """Stop if an optimizer did what recovery does not support; it does so on all ranks alike."""
        if self._refused:
            self._give_up(self._refused)
            raise RehearsalFailed(self._refused)

    def _computed(self, *, with_state: bool = False) -> dict[str, int]:
        gradients = {} if self._gradients is None else self._gradients.digests()
        return gradients | state_digests(self._state) if with_state else gradients

    def _read_back(self) -> tuple[str, ...]:
        """Write the state as a replacement would receive it, overwrite it, and read it back."""
        before, data = state_digests(self._state), torch.empty(self._state.num_bytes(), dtype=torch.uint8)
        header = self._state.header()
        self._state.copy_to(data)
        with torch.no_grad():
            for tensor in self._state.tensors().values():
                tensor.fill_(1)
        self._state.copy_from(header, data, "the rehearsal")
        found = differing_names(before, state_digests(self._state))
        return first_kind(found if self._besides is None else found | self._besides.differing())

    def _compare_replicas(self) -> tuple[str, ...]:
        """Names of what differs on another replica of this shard: tensors, and the state of the loop.

        Callbacks are left out, and loaders: each rank has its own.
        """
        values = {name: each for name, each in self._values().items() if name.startswith("trainer ")}
        common = {name: each for name, each in values.items() if _OF_LOADERS not in name}
        found = compare_replicas(tensor_digests(alike_on_replicas(self._state)) | common, self._topology, self._device)
        return () if found is None else first_kind(found.names)

    def _raise_differences(self, step: int, what: str, names: tuple[str, ...]) -> None:
        """Stop all ranks if one of them found a difference."""
        flag = torch.tensor([int(bool(names))], device=self._device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if names:
            found = Difference(rank=self._rank, step=step, what=what, names=names)
            self._give_up(str(found))
            raise RehearsalFailed(str(found))
        if int(flag):
            raise RehearsalFailed(f"step {step}, {what}: another rank found a difference; see its message.")
