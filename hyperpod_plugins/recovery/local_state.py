"""State that each rank has of its own, such as running statistics of BatchNorm: kept on the rank's buddy, step by step.

Replicas of a shard hold the same parameters, but what a rank computes from its own samples lives nowhere else. Before
each vote a rank gives its buddy what the step has made of it. So when a step is committed, the buddies hold the state
after it, and after the step before: whichever of the two the job goes on from, a replacement gets its predecessor's.

[Note: what hooks write] What follows a commit (the hooks of a batch, the rest of a loop's body) may write buffers and
metrics, too: an average of weights, a reset. A rank that finds such a write when its next step begins says so with the
state that it gives next, and from then on also gives the state with which a step begins. A copy from before the hooks
never overwrites what they write: a replacement keeps the values of the replica that gives it its parameters.
"""

# Tables of buffers and versions of tensors have no public spelling.
# pyright: reportPrivateUsage=false

import contextlib
import json
import logging
import math
import pickle
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils._pytree import tree_map_only

from hyperpod_plugins.comm import Channel
from hyperpod_plugins.errors import CheckpointMismatch, ConfigError, PeerLost, few
from hyperpod_plugins.events import Event, record
from hyperpod_plugins.parallel.topology import Topology
from hyperpod_plugins.recovery.packing import is_size, packed, unpacked
from hyperpod_plugins.recovery.plan import buddies, sources_of
from hyperpod_plugins.recovery.undo import as_integers

_log = logging.getLogger(__name__)
_is_cpu = attrgetter("is_cpu")
_Name = TypeVar("_Name", str, tuple[str, str])
LIMIT_BYTES = 2**20
"""Largest state of one rank that is given to its buddy at each step."""

_PLAIN_TYPE = re.compile(r"torch\.(bool|u?int(8|16|32|64)|b?float16|float(32|64)|float8_\w+|complex(32|64|128))")
_DTYPES = {
    str(each): each
    for each in vars(torch).values()
    if isinstance(each, torch.dtype) and _PLAIN_TYPE.fullmatch(str(each))  # torch makes no tensor of bytes of others
}
_ALWAYS_KEPT_BYTES = 2**14
"""Of one buffer, that is kept whether it was written to or not."""
_LARGEST_BYTES = 2**40
"""Of what a rank gives to one that is new: no limit."""
_SAME, _GIVES_AGAIN, _FOLLOWS = 1, 2, 4
"""Bits of the byte before a state: it is the one before, and is not sent; the step's beginning will bring another; it
is large, and follows by itself."""
BUFFERS = "buffers"
"""Name under which those of a model are registered."""
OF_EPOCH = "of the epoch"
"""End of the names of states that count from zero in each epoch."""


class RankLocalState(Protocol):
    """An object whose state is of one rank alone."""

    def state_dict(self) -> dict[str, Any]:
        """Copies of tensors, plain containers, numbers and strings, without communication; empty for nothing."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], leave: Collection[str] = ()) -> None:
        """Inverse of `state_dict`; parts whose names are in `leave` stay as they are."""
        ...

    def written(self, before: dict[str, Any]) -> set[str]:
        """Names of the parts that are no longer as `before`, an earlier `state_dict`, has them."""
        ...

    def fitting(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The part of a `state_dict` that another job has saved, whose program may have been another one."""
        ...


class ProgramState:
    """An object of the program, whose state is of one rank alone."""

    def __init__(self, name: str, stateful: Stateful) -> None:
        """Take hold of it.

        Raises:
            ConfigError: its state holds Python objects that another process would have to unpickle.
        """
        self._stateful = stateful
        try:
            unpacked(packed(stateful.state_dict()))
        except pickle.UnpicklingError:
            raise ConfigError(
                f"the state of {name!r} ({type(stateful).__name__}) holds Python objects that a process which replaces "
                "a lost one would have to unpickle, and that runs code. Let state_dict return tensors, plain "
                "containers, numbers and strings."
            ) from None

    def state_dict(self) -> dict[str, Any]:
        """Copies of what it says."""
        copies = tree_map_only(torch.Tensor, lambda each: each.detach().cpu().clone(), self._stateful.state_dict())
        return {"state": copies}

    def load_state_dict(self, state_dict: dict[str, Any], leave: Collection[str] = ()) -> None:
        """Inverse of `state_dict`; nothing where there is none."""
        if state_dict and "state" not in leave:
            self._stateful.load_state_dict(state_dict["state"])

    def written(self, before: dict[str, Any]) -> set[str]:
        """The state as a whole, if it is another one."""
        return set() if are_same(self.state_dict(), before) else {"state"}

    def fitting(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """All: the program's own `load_state_dict` decides."""
        return state_dict


class BufferStates:
    """The buffers of a model: all small ones, and those large ones that were written to; the others never differ.

    BatchNorm updates its statistics without counting a new version of the tensor, so versions tell of large ones only.
    """

    def __init__(self, model: nn.Module) -> None:
        """Take the present values of large ones for those that all ranks have."""
        self._places = [
            (f"{name}.{key}" if name else key, part, key)
            for name, part in model.named_modules()
            for key in part._buffers
        ]
        self._saved = {name for name, part, key in self._places if key not in part._non_persistent_buffers_set}
        self._first = {name: (tensor, tensor._version) for name, tensor in self._present().items()}
        self._forms = Forms()

    @property
    def is_empty(self) -> bool:
        """Whether the model has no buffers."""
        return not self._places

    def state_dict(self) -> dict[str, Any]:
        """Names, types and shapes, and the bytes of all: many small tensors take long to be copied and written."""
        own = {name: each for name, each in self._present().items() if self._is_own(name, each)}
        return packed_tensors(own, self._forms)

    def load_state_dict(self, state_dict: dict[str, Any], leave: Collection[str] = ()) -> None:
        """Put them into the buffers, which keep their tensors; the others have the values that all ranks have."""
        with torch.no_grad():
            for name, tensor, values in self._pairs(state_dict):
                if name not in leave:
                    tensor.copy_(values)
        present = self._present()
        for name in present.keys() - _names(state_dict):
            self._first[name] = (present[name], present[name]._version)

    def written(self, before: dict[str, Any]) -> set[str]:
        """Names of buffers that were written to, or that `before` does not have."""
        present, names = self._present(), _names(before)
        found = {name for name, tensor in present.items() if name not in names and self._is_own(name, tensor)}
        return found | {name for name, tensor, values in self._pairs(before) if not are_same(tensor.cpu(), values)}

    def fitting(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Buffers that a checkpoint of the model has, too: all others are what the program makes them (as in torch)."""
        names = self.saved_names()
        return packed_tensors({name: values for name, values in unpacked_tensors(state_dict) if name in names})

    def saved_names(self) -> set[str]:
        """Of persistent buffers, which a checkpoint of the model has."""
        return self._saved & self._present().keys()

    def own_names(self) -> list[str]:
        """Of those buffers that `state_dict` holds."""
        return [name for name, tensor in self._present().items() if self._is_own(name, tensor)]

    def _pairs(self, state_dict: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Of each buffer in a `state_dict` its name, its tensor and those values.

        Raises:
            CheckpointMismatch: the model has no such buffer.
        """
        present = self._present()
        for name, values in unpacked_tensors(state_dict):
            tensor = present.get(name) if isinstance(name, str) else None
            if tensor is None or tensor.numel() != values.numel():
                raise CheckpointMismatch(f"the state of one rank has a buffer {name!r} of shape {(*values.shape,)}")
            yield name, tensor, values.view(tensor.shape)

    def _is_own(self, name: str, tensor: torch.Tensor) -> bool:
        first, version = self._first.get(name, (None, 0))
        return tensor.nbytes <= _ALWAYS_KEPT_BYTES or first is not tensor or version != tensor._version

    def _present(self) -> dict[str, torch.Tensor]:
        return {
            name: tensor
            for name, part, key in self._places
            if type(tensor := part._buffers.get(key)) is torch.Tensor  # not one that is sharded
        }


def packed_tensors(tensors: Mapping[_Name, torch.Tensor], known: "Forms | None" = None) -> dict[str, Any]:
    """Names, types and shapes as JSON, which is compared and written in one piece, and values; nothing for none.

    Args:
        tensors: by name.
        known: of the last time; each step asks for them, and they rarely change.
    """
    forms = [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
    known = Forms() if known is None else known
    return {"forms": known.text_of(forms), "data": bytes_of([*tensors.values()])} if forms else {}


class Forms:
    """Names, types and shapes of tensors as JSON, written again when they have changed."""

    def __init__(self) -> None:
        self._forms: list[Any] = []
        self._text = "[]"

    def text_of(self, forms: Sequence[tuple[Any, torch.dtype, torch.Size]]) -> str:
        """A JSON list of name, type and shape of each."""
        if forms != self._forms:
            self._forms = list(forms)
            self._text = json.dumps([(name, str(dtype), shape) for name, dtype, shape in forms])
        return self._text


def bytes_of(tensors: Sequence[torch.Tensor]) -> bytes:
    """Of all, one after another; from a device in one copy."""
    if all(map(_is_cpu, tensors)):
        return b"".join([_host_values(each).numpy().tobytes() for each in tensors])
    flat = [as_integers(each).reshape(-1).view(torch.uint8).to(tensors[0].device) for each in tensors]
    return torch.cat(flat).cpu().numpy().tobytes()


def _host_values(tensor: torch.Tensor) -> torch.Tensor:
    """As numpy takes them: it has not all types."""
    is_plain = tensor.dtype is torch.float32 and not (tensor.requires_grad or tensor.is_neg())
    return tensor if is_plain else as_integers(tensor)


def unpacked_tensors(packed: Mapping[str, Any]) -> list[tuple[Any, torch.Tensor]]:
    """Inverse of `packed_tensors`; names that are tuples come back as lists.

    Raises:
        CheckpointMismatch: these are not the values of the tensors that are named.
    """
    if not packed:
        return []
    try:
        forms: list[Any] = json.loads(packed["forms"])
        return [*tensors_in(packed["data"], [(name, kind, shape) for name, kind, shape in forms])]
    except (KeyError, TypeError, ValueError, RuntimeError) as error:  # a deep nesting, or sizes beyond all bounds
        raise CheckpointMismatch(f"the state of one rank does not say what it holds: {error!r}") from error


def tensors_in(data: object, forms: Iterable[tuple[Any, Any, Any]]) -> Iterator[tuple[Any, torch.Tensor]]:
    """Tensors whose values follow one another in some bytes, with their names.

    Args:
        data: from this process or another one.
        forms: name, type and shape of each.

    Raises:
        CheckpointMismatch: there are no such values.
    """
    begin = 0
    for name, kind, shape in forms:
        dtype = _DTYPES.get(kind)
        is_shape = isinstance(shape, list | tuple) and all(map(is_size, cast("Sequence[object]", shape)))
        end = begin + math.prod(shape) * dtype.itemsize if dtype is not None and is_shape else -1
        if dtype is None or not isinstance(data, bytes) or not begin <= end <= len(data):
            raise CheckpointMismatch(f"the state of one rank has no values for {name!r} ({kind}, {shape})")
        part = bytearray(data[begin:end])
        values = torch.frombuffer(part, dtype=dtype) if part else torch.empty(0, dtype=dtype)
        yield name, values.view(shape)
        begin = end


def _names(packed: Mapping[str, Any]) -> set[str]:
    return {name for name, _, _ in json.loads(packed["forms"])} if packed else set()


class LocalStates:
    """Rank-local state of this process, and that of its ward, whose buddy it is."""

    def __init__(self, topology: Topology, rank: int) -> None:
        """Keep nothing yet."""
        self._rank = rank
        self._buddy_of = buddies(topology)
        self._buddy, self._ward = self._buddy_of[rank], sources_of(self._buddy_of)[rank]
        self._channel = Channel(None, "local")
        self._states: dict[str, RankLocalState] = {}
        self._of_program: dict[str, RankLocalState] = {}
        self._repeated: set[str] = set()
        self._at_begin: dict[str, dict[str, Any]] = {}
        self._own: dict[int, bytes] = {}
        self._kept: dict[int, bytes] = {}
        self._has_warned = self._grows = False
        self._changes = False
        """Whether the last step has changed the state."""
        self._is_written_after = False
        """Whether what follows a commit was ever found to write here."""
        self.forget()

    def register(self, name: str, state: RankLocalState, *, is_repeated: bool = False) -> None:
        """Keep the state of an object; all ranks register the same names.

        Args:
            name: of the state.
            state: the object.
            is_repeated: whether it is not given again for the sake of what hooks do with it after the commit:
                `load_state_dict` does that again, or leaves it to what the source of the parameters has.
        """
        self._states[name] = state
        self._of_program.pop(name, None)
        if isinstance(state, ProgramState):
            self._of_program[name] = state
        if is_repeated:
            self._repeated.add(name)

    @property
    def kept_steps(self) -> tuple[int, ...] | None:
        """Steps of which the ward's state is here; None where none was given yet."""
        if not self._kept:
            return None
        return tuple(step for step, data in sorted(self._kept.items()) if data)

    def present(self) -> dict[str, dict[str, Any]]:
        """The state of this rank, by the names of its parts."""
        return self._present()

    def take(
        self, states: Mapping[str, dict[str, Any]], *, begins_epoch: bool, is_of_another_job: bool = False
    ) -> None:
        """Load what `present` said, here or in the process before, of those parts that are registered.

        Args:
            states: by name; parts that had none begin anew.
            begins_epoch: whether what counts in an epoch begins anew.
            is_of_another_job: whether the program may have been another one; only what fits is taken then.
        """
        for name, state in self._states.items():
            if not (begins_epoch and name.endswith(OF_EPOCH)):
                values = states.get(name, {})
                state.load_state_dict(state.fitting(values) if is_of_another_job else values)

    def forget(self) -> None:
        """Take nothing that was exchanged so far for granted: ranks have come together anew."""
        self._last: dict[str, dict[str, Any]] | None = None
        """What was given to the buddy last."""
        self._last_own = self._last_kept = b""
        self._gives_at = self._gets_at = self._late_at = -1
        """Steps at whose beginning this rank gives its state again, its ward does, and its ward did."""

    def share(self, step: int) -> None:
        """Give the buddy this rank's state as it will be when `step` steps are committed, and take the ward's.

        Raises:
            PeerLost: one of them is gone; the groups are broken then.
        """
        if not self._is_active:
            return
        present, is_first = self._present(), self._last is None
        if not (is_first or self._changes) and are_same(present, self._last):
            data, is_same = self._last_own, True
        else:  # bytes are compared in less time, and may differ where the values do not
            data = self._packed(present)
            is_same = not is_first and data == self._last_own
        self._changes = not is_same
        gives = self._is_written_after
        label = f"the state of one rank after {step} steps"
        told, kept = self._passed_round(label, is_same * _SAME + gives * _GIVES_AGAIN, b"" if is_same else data)
        if told & _SAME:
            kept = self._last_kept
        self._last, self._last_own, self._last_kept = present, data, kept
        self._own = _last_two(self._own, step, data)
        self._kept = _last_two(self._kept, step, kept)
        self._gives_at, self._gets_at = step if gives else -1, step if told & _GIVES_AGAIN else -1

    def _passed_round(self, label: str, flags: int, data: bytes) -> tuple[int, bytes]:
        """Give some bits and bytes to the buddy, and take the ward's."""
        if is_large := len(data) >= Channel.SMALL_BYTES:
            flags |= _FOLLOWS
        given = bytes([flags]) + (b"" if is_large else data)
        taken = self._channel.send_receive(label, given, to=self._buddy, of=self._ward)
        told, taken = taken[0], taken[1:]
        sends = {self._buddy: [data]} if is_large else {}
        receives = {self._ward: [LIMIT_BYTES]} if told & _FOLLOWS else {}
        if sends or receives:
            received = self._channel.exchange(label, sends=sends, receives=receives)
            if receives:
                taken = _raw(received[self._ward][0])
        return told, taken

    def begin(self, step: int, *, begins_epoch: bool = False) -> None:
        """A step begins: see whether what followed the commit has written here, and give it to the buddy if announced.

        Somebody who was lost meanwhile leaves the groups broken, and the step fails like any other.

        Args:
            step: how many are committed.
            begins_epoch: whether it is the first of an epoch: what counts in an epoch has begun anew then.
        """
        self._at_begin = {name: state.state_dict() for name, state in self._of_program.items()}
        if not self._is_active:
            return
        if self._last is not None and step in self._own and not self._is_written_after:
            self._is_written_after = self._hooks_have_written(self._last, begins_epoch=begins_epoch)
        sends = {self._buddy: [self._packed(self._present())]} if self._gives_at == step else {}
        receives = {self._ward: [LIMIT_BYTES]} if self._gets_at == step else {}
        if not (sends or receives):
            return
        label = f"the state of one rank as step {step} begins"
        with contextlib.suppress(PeerLost):
            received = self._channel.exchange(label, sends=sends, receives=receives)
            if receives:
                self._kept[step], self._late_at = _raw(received[self._ward][0]), step

    def undo(self) -> None:
        """Put back what the program has registered, as it was when the step began."""
        for name, state in self._at_begin.items():
            self._states[name].load_state_dict(state)

    def restore(self, step: int, targets: Sequence[int], *, begins_epoch: bool = False) -> None:
        """Give the ranks that are new what their predecessors had after `step` steps; called on all ranks.

        Args:
            step: from which the job goes on; what this rank has is of its beginning.
            targets: those ranks.
            begins_epoch: whether that is the first of an epoch: what counts in an epoch begins anew then.

        Raises:
            PeerLost: somebody was lost meanwhile.
        """
        if not self._states:
            return
        data, leave = self._hand_over(step, targets)
        self.forget()
        if self._rank in targets:
            self._take(step, data, leave, targets, begins_epoch)
        if not self._is_active:
            return
        # All hold this step's state, also after a return to an earlier one: from here on their buddies do, too. A part
        # of the program that is run again before the next step may still write to it.
        if not data or leave:
            data = self._packed(self._present())
        label = f"the state of one rank from which step {step} begins"
        received = self._channel.exchange(label, sends={self._buddy: [data]}, receives={self._ward: [LIMIT_BYTES]})
        self._own, self._kept = {step: data}, {step: _raw(received[self._ward][0])}

    def pass_on(self, sources: Mapping[int, int], give: Callable[[], bytes]) -> bytes:
        """What this rank, if it is new, is given by the rank that gives it its parameters; called on all ranks.

        Args:
            sources: the giver of each rank that is new.
            give: makes what a giver gives.

        Raises:
            PeerLost: somebody was lost meanwhile.
        """
        targets = [target for target, source in sources.items() if source == self._rank]
        data = bytes([not self._kept]) + give() if targets else b""
        receives = {sources[self._rank]: [_LARGEST_BYTES]} if self._rank in sources else {}
        if not (targets or receives):
            return b""
        sends = {target: [data] for target in targets}
        received = self._channel.exchange("the state of hooks", sends=sends, receives=receives)
        data = next((_raw(parts[0]) for parts in received.values()), b"")
        self._grows = data[:1] == b"\1"
        return data[1:]

    def _hand_over(self, step: int, targets: Sequence[int]) -> tuple[bytes, dict[str, list[str]]]:
        """What this rank, if it is new, gets from its buddy: its state, and which parts of that it must not load."""
        givers = {target: self._buddy_of[target] for target in targets if self._buddy_of[target] not in targets}
        sends = {
            target: [self._kept.get(step, b""), packed(self._written_after(step))]
            for target, giver in givers.items()
            if giver == self._rank
        }
        receives = {givers[self._rank]: [LIMIT_BYTES, LIMIT_BYTES]} if self._rank in givers else {}
        if not (sends or receives):
            return b"", {}
        received = self._channel.exchange("the state of lost ranks", sends=sends, receives=receives)
        data, leave = map(_raw, received[self._buddy]) if receives else (b"", b"")
        return data, unpacked(leave) if leave else {}

    def _take(
        self, step: int, data: bytes, leave: dict[str, list[str]], targets: Sequence[int], begins_epoch: bool
    ) -> None:
        """Load what the predecessor of this rank had."""
        if not data and step and self._grows:
            return  # this place had no process before
        if not data and step:
            lost = "was lost too" if self._buddy in targets else "does not have it"
            self._tell_lost(step, ", ".join(self._states), f"rank {self._buddy}, its buddy, {lost}")
            return
        found = unpacked(data) if data else {}
        for name, state in self._states.items():
            if begins_epoch and name.endswith(OF_EPOCH):
                leave.pop(name, None)
            else:
                state.load_state_dict(found.get(name, {}), leave.get(name, ()))
        lost = [f"{name} {part}" for name, parts in leave.items() if name not in self._repeated for part in parts]
        if lost:
            self._tell_lost(
                step, few(lost, 3), "its predecessor was lost before it could give what was written after the step"
            )

    def _written_after(self, step: int) -> dict[str, list[str]]:
        """What hooks have written here since the ward gave its state, and so will have there, by the state's name."""
        if self._late_at == step or not self._own.get(step):
            return {}
        before = unpacked(self._own[step])
        found = {name: sorted(state.written(before.get(name, {}))) for name, state in self._states.items()}
        return {name: parts for name, parts in found.items() if parts}

    @property
    def _is_active(self) -> bool:
        return bool(self._states) and self._buddy != self._rank

    def _present(self) -> dict[str, dict[str, Any]]:
        return {name: state.state_dict() for name, state in self._states.items()}

    def _hooks_have_written(self, since: Mapping[str, dict[str, Any]], *, begins_epoch: bool) -> bool:
        """Whether a state that is given again for the sake of hooks is no longer what was given last."""
        for name, state in self._states.items():
            if name in self._repeated or (begins_epoch and name.endswith(OF_EPOCH)):
                continue
            if not are_same(state.state_dict(), since.get(name, {})):
                return True
        return False

    def _packed(self, present: Mapping[str, dict[str, Any]]) -> bytes:
        """What is there, as it is sent; nothing if that is too much."""
        data = packed({name: state for name, state in present.items() if state})
        if len(data) <= LIMIT_BYTES:
            return data
        self._warn(f"it takes {len(data):,} bytes, more than {LIMIT_BYTES:,}")
        return b""

    def _tell_lost(self, step: int, what: str, why: str) -> None:
        cause = f"rank {self._rank} goes on with another rank's {what} after step {step}: {why}"
        _log.warning("%s", cause)
        record(Event(name="recovery.local_state_lost", at_s=time.time(), details={"step": step, "cause": cause}))

    def _warn(self, why: str) -> None:
        if not self._has_warned and self._rank == 0:
            _log.warning(
                "the state of each rank (%s) is not kept on its buddy, for %s: where a rank is lost, all return to a "
                "snapshot, if there are any, and a replacement gets another rank's state otherwise (rank_local_state)",
                ", ".join(self._states),
                why,
            )
        self._has_warned = True


def _last_two(states: Mapping[int, bytes], step: int, data: bytes) -> dict[int, bytes]:
    """The last of those before a step, and the state of that step; later ones are void."""
    before = max(filter(step.__gt__, states), default=step)
    return {before: states.get(before, data), step: data}


def are_same(one: Any, other: Any) -> bool:
    """Whether plain containers and tensors are equal to the last bit."""
    if one is other:
        return True
    if type(one) is bytes:
        return type(other) is bytes and one == other
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if (one.dtype, one.shape, one.device) != (other.dtype, other.shape, other.device):
            return False
        return torch.equal(as_integers(one), as_integers(other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(are_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(are_same, one, other))
    return type(one) is type(other) and one == other


def _raw(data: torch.Tensor) -> bytes:
    return data.numpy().tobytes()
