"""Rank-local state, such as running statistics of BatchNorm: kept on the rank's buddy, step by step.

Replicas of a shard hold the same parameters, but what a rank computes from its own samples exists nowhere else.
Before each vote a rank sends its buddy the state that the step has produced. So when a step is committed, the buddies
hold the state after it and after the step before: from whichever of the two the job continues, a replacement gets the
state of its predecessor.

[Note: what hooks write] Code that follows a commit (the hooks of a batch, the rest of a loop's body) may write
buffers and metrics too, for example an average of weights or a reset. A rank that finds such a write when its next
step begins announces this with the next state that it sends, and from then on also sends the state at the beginning
of each step. It does so in any case in its first step, before it can know, and where all ranks know that such code
runs: at the beginning and after the end of a validation or an epoch. A copy from before the hooks never overwrites
what they write: a replacement keeps the values of the replica that gives it its parameters. If what hooks write may
differ between the two ranks, a state from before the hooks counts as lost: all ranks return to a snapshot, or to a
checkpoint, as `RecoveryOptions.rank_local_state` says. Where the two agreed at the vote, they are expected to agree
again; in a step before which no state was to be sent, only on what they had agreed before when hooks had written it.

[Note: equal on all ranks] A rank that is lost together with its buddy takes its state with it, and so does one whose
state is too large to be sent. Often this state is not its own: it is equal on all ranks, such as a table of constants
or a counter of steps. So each rank compares its state with that of its source rank, and the vote tells all ranks
whether any has found a difference. The buddies form rings through all ranks of a node or of the job; if there are
several rings, the survivors compare theirs. If there is no difference, a replacement gets the state of the rank that
gives it its parameters.

[Note: in another world] A world of another size has other buddies, which keep nothing until its ranks have exchanged
their states. Until then its ranks remember which of them were in the former world: the state of such a rank is lost
with it, unless the states of all ranks were equal. Any other rank has no state yet that could be lost. It begins with
that of the rank that gives it its parameters: its buffers, its attributes and the objects that the program has
registered, such as a scheduler. Metrics begin empty, because they add up the states of all ranks.
"""

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from hyperpod_plugins.comm import Channel
from hyperpod_plugins.errors import PeerLost, format_list
from hyperpod_plugins.events import Event, record
from hyperpod_plugins.parallel.topology import Topology
from hyperpod_plugins.recovery.buffer_states import BufferStates
from hyperpod_plugins.recovery.local_objects import AgreedParts, ProgramState, RankLocalState, ReplicatedState
from hyperpod_plugins.recovery.packing import are_same, pack, unpack
from hyperpod_plugins.recovery.plan import NO_STATE, buddies, sources_of

_log = logging.getLogger(__name__)
_State = TypeVar("_State")
LIMIT_BYTES = 2**20
"""Largest state of one rank that is sent to its buddy at each step."""

_NUM_SIZE_BYTES, _LARGEST_BYTES = 8, 2**40
"""Effectively no limit, for what a rank sends to a joiner."""
_SAME, _GIVES_AGAIN, _FOLLOWS = 1, 2, 4
"""Bits of the byte before a state: it equals the previous one and is not sent; another follows when the step begins;
it is large and follows in a message of its own."""
BUFFERS = "buffers"
"""Name under which the buffers of a model are registered."""
_WHOLE, _DIGEST = b"w", b"d"
"""First byte of a state, which says whether it follows, or only a digest because it is too large to be sent."""
_NOTHING = pack({})
"""States that are not needed by a replacement, packed, if there are none."""
_BEFORE = "before"
"""Key beside the names of states: those that code has written since `LocalStates.before`, as they were there."""
EPOCH_SUFFIX = "of the epoch"
"""Suffix of the names of states that start from zero in each epoch."""


@dataclass(frozen=True, slots=True)
class ReceivedState:
    """How a joiner got the state of its predecessor."""

    before: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    """States from `LocalStates.before` or `LocalStates.before_hooks`, as far as they differ."""
    own_parts: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    """The parts that the joiner has kept, by state, as its own hooks have written them."""


class LocalStates:
    """Rank-local state of this process and of its source rank (the rank whose buddy it is)."""

    before_hooks: Callable[[], dict[str, dict[str, Any]]] = dict
    """Returns the states from before the hooks that precede the present step; empty if none have been called."""
    has_taken: Callable[[bool], object] = staticmethod(lambda begins_epoch: None)
    """Called in a joiner that has got its predecessor's state; with whether the step is the first of an epoch."""
    is_exact = True
    """Whether a step is refused that changes what cannot be sent; if not, a warning names it."""
    begun: Mapping[str, dict[str, Any]] = MappingProxyType({})
    """States as the body of the last committed step began, whose rest may run again; empty if they are not known."""
    taken = ReceivedState()
    """How this rank, if it is a joiner, got its predecessor's state."""

    def __init__(
        self,
        topology: Topology,
        rank: int,
        *,
        former: "LocalStates | None" = None,
        former_ranks: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """Start without states.

        Args:
            topology: of the present world.
            rank: of this process.
            former: of this process in the former world, with states of the same names; None if there is none.
            former_ranks: for each rank that was in that world, its rank there.
        """
        self._rank = rank
        self._buddy_of = buddies(topology)
        self._buddy, self._source = self._buddy_of[rank], sources_of(self._buddy_of)[rank]
        self._channel = Channel(None, "local")
        self._states: dict[str, RankLocalState] = {}
        self._of_program: dict[str, ProgramState] = {}
        self._repeated: set[str] = set()
        self._entered_with: set[str] = set()
        self._of_replica: dict[str, ReplicatedState] = {}
        self._at_begin: dict[str, dict[str, Any]] = {}
        self._at_commits: dict[int, dict[str, dict[str, Any]]] = {} if former is None else dict(former._at_commits)
        self._own, self._kept = dict[int, bytes](), dict[int, bytes]()
        self._kept_at_commits: dict[int, bytes] = {}
        """Of the source rank, as they were at the votes: a body that follows a commit may have to run again."""
        self._given: dict[str, dict[str, Any]] = {}
        """In a joiner, what it was given of the objects of the program, in case no rank has its predecessor's."""
        self._given_before: dict[str, dict[str, Any]] = {}
        """What the giver's states were in `before`, as far as they differ."""
        self._has_warned = self._grows = False
        self._unshared = None if former is None else former._unshared_after(former_ranks)
        """See `unshared_ranks`; None once a state was sent before a vote, or if there is no former world."""
        self._changes = False
        """Whether the last step changed the state."""
        self._begun_with: dict[str, dict[str, Any]] = {}
        """States as the present step began, if code after the commit may have written some."""
        self._written_after: dict[str, int] = {}
        """States that code after a commit was ever found to write: the step at whose beginning it was found first since
        the last repair, or -1: a process that has joined there has not found it yet."""
        self._agreed = AgreedParts()
        self._is_new = True
        """Whether this process has begun no step after a commit, and cannot know yet what code after it writes."""
        self._begins_in = -1
        """Step whose beginning follows no commit, but the set-up, a checkpoint, or a repair before a part."""
        self._source_gives: bool | None = None
        """Whether the source rank's state is written after commits, as it has last said; None if it has not yet."""
        self._source_writes_alone = False
        """Whether code after a commit was ever found to write on the source rank what it did not write here."""
        self._equal_step = NO_STATE if former is None else former._equal_step
        """Number of steps after which the states of all ranks were equal, but for those registered as repeated."""
        self._is_equal = False
        """Whether the source rank's state, as last sent, was equal to this rank's."""
        self.before: dict[str, dict[str, Any]] = {}
        """States as the body of a loop's step began, before the step; empty if the program has no such body."""
        self.is_at_commit = False
        """Whether this rank's state is that right after the last commit, from which the job continues."""
        self.begins_at = -1
        """Step at which this process, a joiner, begins with the state that its predecessor began with, too."""
        self._first: dict[str, dict[str, Any]] | None = None
        """The state of such a joiner before it gets that of its replica."""
        self.reset()

    def register(
        self, name: str, state: RankLocalState, *, is_repeated: bool = False, is_entered_with: bool = False
    ) -> None:
        """Keep the state of an object. All ranks register the same names.

        Args:
            name: name of the state.
            state: the object.
            is_repeated: whether hooks that write the state after a commit do not cause it to be sent again:
                `load_state_dict` repeats their effect, or keeps the values of the rank that gives the parameters.
            is_entered_with: whether the loop loads the state of its rank itself where it is entered.
        """
        self._states[name] = state
        if is_entered_with:
            self._entered_with.add(name)
        self._of_program.pop(name, None)
        if isinstance(state, ProgramState):
            self._of_program[name] = state
        if is_repeated:
            self._repeated.add(name)
        if isinstance(state, ReplicatedState):
            self._of_replica[name] = state
        for each in self._of_replica.values():
            for of_program in self._of_program.values():
                each.leave_out(of_program.stateful)

    @property
    def objects(self) -> Mapping[str, RankLocalState]:
        """The objects whose state is kept, by name."""
        return self._states

    @property
    def of_program(self) -> Mapping[str, ProgramState]:
        """Those of them that the program has registered."""
        return self._of_program

    def _unshared_after(self, former_ranks: Mapping[int, int]) -> frozenset[int]:
        """The ranks of a world that follows this one whose states come from this one or an earlier one."""
        known = self._unshared
        return frozenset(rank for rank, former in former_ranks.items() if known is None or former in known)

    @property
    def unshared_ranks(self) -> tuple[int, ...]:
        """Ranks whose states come from a former world, until those of a step in this world have been exchanged."""
        return tuple(sorted(self._unshared or ())) if self._states else ()

    @property
    def kept_steps(self) -> tuple[int, ...] | None:
        """Steps from which the source rank can continue with the state kept here; None if it has sent none yet."""
        if not self._kept:
            return None
        kept = [step for step, data in sorted(self._kept.items()) if _is_whole(data)]
        return tuple(step for step in kept if not self._is_superseded(step))

    @property
    def equal_step(self) -> int:
        """Number of steps after which all ranks had equal states, and no code has written to them here; or -1."""
        step = self._equal_step
        if step not in self._at_commits:
            return NO_STATE
        if self._begun_at == step:  # what the step has computed since is not undone yet
            is_written = step in self._written_after.values()
        else:
            sent = self._at_commits[step]
            is_written = any(
                self._may_note(name, begins_epoch=True) and not are_same(state.state_dict(), sent.get(name, {}))
                for name, state in self._states.items()
            )
        return NO_STATE if is_written else step

    def note_equal(self, step: int, *, is_equal: bool) -> None:
        """Note whether no rank has found its state and its source rank's to differ, as they are after `step` steps."""
        self._equal_step = step if is_equal else NO_STATE

    def _is_superseded(self, step: int) -> bool:
        """Whether code that followed the commit of `step` may have written what is the source rank's alone.

        It has if it wrote here, unless both ranks had the same values before, or only this rank was found to write them
        since the last repair. Where only the source rank was ever found to, it may have.
        """
        if step in (self._late_at, self._restored_at) or self.is_at_commit:
            return False
        if self._source_writes_alone:
            return True
        own, kept = (_unpacked(states.get(step, b"")) for states in (self._own, self._kept))
        return any(
            self._may_differ(step, name, own.get(name, {}), kept.get(name, {}))
            for name in self._written_here(step, own, self._source_gives is not False)
        )

    def _may_differ(self, step: int, name: str, own: dict[str, Any], kept: dict[str, Any]) -> bool:
        """Whether the parts of a state that code after a commit has written may have got other values elsewhere.

        They may if they had, as of the vote; if they were written for the first time, as far as is known here, and a
        step has begun since; and what was counted, since the source rank's part of it is lost.
        """
        is_same, written, begun = are_same(own, kept), self._states[name].written, self._begun_with.get(name, {})
        if is_same and name.endswith(EPOCH_SUFFIX):
            return True
        parts = written(own, begun if self._begun_at == step else None)
        if not is_same and not (parts and parts.isdisjoint(written(own, kept))):
            return True
        is_unannounced = self._begun_at == step != self._awaited_at
        return is_unannounced and not self._agreed.holds(name, parts)

    def _written_here(self, step: int, own: Mapping[str, Any], has_told: bool) -> list[str]:
        """States that code after the commit of `step` wrote here, but for those that only this rank ever writes."""
        if self._begun_at == step:  # what the step has computed since is not undone yet
            return [name for name, found_at in self._written_after.items() if has_told or found_at == step]
        return [
            name
            for name, state in self._states.items()
            if (has_told if self._written_after.get(name, -1) >= 0 else self._may_note(name, begins_epoch=True))
            and not are_same(state.state_dict(), own.get(name, {}))
        ]

    def state(self) -> dict[str, dict[str, Any]]:
        """The present state of this rank by registered name, without what the loop loads itself as it is entered."""
        return {name: state.state_dict() for name, state in self._states.items() if name not in self._entered_with}

    def load(
        self, states: Mapping[str, dict[str, Any]], *, begins_epoch: bool, is_of_another_job: bool = False
    ) -> None:
        """Load states that `present` returned, in this process or its predecessor, into the registered objects.

        Args:
            states: states by name; an object without one is given an empty state.
            begins_epoch: whether an epoch begins; states that start from zero in each epoch are not loaded then.
            is_of_another_job: whether the states may be of another program; only parts that fit are loaded then.
        """
        for name, state in self._states.items():
            if name in self._entered_with or (is_of_another_job and name in self._of_replica):
                continue  # a program that resumes from a checkpoint of another job begins with its own attributes
            if not (begins_epoch and name.endswith(EPOCH_SUFFIX)):
                values = states.get(name, {})
                state.load_state_dict(state.fitting(values) if is_of_another_job else values)

    def load_again(
        self, states: Mapping[str, dict[str, Any]], leave: Mapping[str, Collection[str]] | None = None
    ) -> None:
        """Load buffers and attributes once more, but for parts in `leave`; hooks may have reset them since."""
        for name in (BUFFERS, *self._of_replica):
            if name in self._states and name in states:
                self._states[name].load_state_dict(states[name], (leave or {}).get(name, ()))

    def return_to(self, step: int) -> None:
        """Restore this rank's state as it was right after `step` commits, if it has been there."""
        if step in self._at_commits:
            states = self._at_commits[step]
            self._restored_at = -1  # what follows the commit runs again
            for name, state in self._states.items():
                state.load_state_dict(states.get(name, {}))

    def complete_before(self, copies: Mapping[int, torch.Tensor]) -> None:
        """Add large buffers that were written for the first time since to `before`.

        Args:
            copies: values of that time, by `id` of the buffer.
        """
        buffers = self._states.get(BUFFERS)
        if isinstance(buffers, BufferStates) and BUFFERS in self.before:
            self.before[BUFFERS] = buffers.extended(self.before[BUFFERS], copies)

    def return_to_before(self) -> None:
        """Restore this rank's state as of `before`."""
        self._load_all(self.before)

    def return_to_begun(self) -> None:
        """Restore this rank's state as of `begun`."""
        self._load_all(self.begun)

    def _load_all(self, states: Mapping[str, dict[str, Any]]) -> None:
        for name, state in self._states.items():
            if name in states:
                state.load_state_dict(states[name])

    def reset(self) -> None:
        """Discard what was exchanged so far, as the ranks have assembled anew."""
        self._last: dict[str, dict[str, Any]] | None = None
        """State last sent to the buddy."""
        self._last_own = self._last_kept = b""
        self._agreed.forget_written()
        self._source_gives = None
        self._is_after_part = False
        """Whether a part outside steps has begun, or a save has ended, since the last exchange of a vote."""
        self._gives_at = self._gets_at = self._late_at = self._awaited_at = self._restored_at = self._begun_at = -1
        """Steps at whose beginning this rank sends its state again, its source rank will, its source rank did, and it
        was to do so; step of the last repair, whose state the source rank has sent; and step that has begun last."""

    def exchange(self, step: int, *, is_beginning: bool = False) -> bool:
        """Send the buddy this rank's state as it will be after `step` commits, and receive the source rank's.

        Args:
            step: number of committed steps.
            is_beginning: whether the state is that of the set-up or of a checkpoint, and no vote follows.

        Returns:
            Whether the two may differ, so that a replacement needs its predecessor's.

        Raises:
            PeerLost: one of them is lost; the groups are broken then.
            ConfigError: the step has changed what cannot be sent.
        """
        self.begins_at, self._first, self._begins_in = -1, None, step if is_beginning else -1
        self._unshared = None
        if not self._is_active:
            return False
        present, is_first = self._present(), self._last is None
        if self.is_exact and not is_beginning:
            for each in self._of_replica.values():
                each.check()
        if not (is_first or self._changes) and are_same(present, self._last):
            data, is_same = self._last_own, True
        else:  # comparing bytes is faster, but they may differ where the values do not
            data = self._packed(present)
            is_same = not is_first and data == self._last_own
        self._changes = not is_same
        gives = self._is_new or bool(self._written_after)
        label = f"the state of one rank after {step} steps"
        told, kept = self._passed_round(label, is_same * _SAME + gives * _GIVES_AGAIN, b"" if is_same else data)
        if told & _SAME:
            kept = self._last_kept
        if not (is_same and told & _SAME):
            self._is_equal = _essential(data) == _essential(kept)
        self._agreed.note_vote(self._states, present, partial(_unpacked, kept))
        self._last, self._last_own, self._last_kept = present, data, kept
        self._at_commits = _last_two(self._at_commits, step, present)
        self._own = _last_two(self._own, step, data)
        self._kept = _last_two(self._kept, step, kept)
        self._kept_at_commits = _last_two(self._kept_at_commits, step, kept)
        self._source_gives = bool(told & _GIVES_AGAIN)
        self._gives_at, self._gets_at = step if gives else -1, step if self._source_gives else -1
        return gives or self._source_gives or not self._is_equal

    def _passed_round(self, label: str, flags: int, data: bytes) -> tuple[int, bytes]:
        """Send flags and data to the buddy, and receive those of the source rank."""
        if is_large := len(data) >= Channel.SMALL_BYTES:
            flags |= _FOLLOWS
        given = bytes([flags]) + (b"" if is_large else data)
        taken = self._channel.send_receive(label, given, to=self._buddy, of=self._source)
        told, taken = taken[0], taken[1:]
        sends = {self._buddy: [data]} if is_large else {}
        receives = {self._source: [LIMIT_BYTES]} if told & _FOLLOWS else {}
        if sends or receives:
            received = self._channel.exchange(label, sends=sends, receives=receives)
            if receives:
                taken = _raw(received[self._source][0])
        return told, taken

    def begin(self, step: int, *, begins_epoch: bool = False) -> None:
        """Begin a step: detect writes since the commit, and send the state to the buddy again if that was announced.

        If a rank was lost meanwhile, the groups are broken and the step fails like any other; nothing is raised here.

        Args:
            step: number of committed steps.
            begins_epoch: whether the step is the first of an epoch; states of the epoch start from zero then.
        """
        self._at_begin = {name: state.state_dict() for name, state in self._of_program.items()}
        self.is_at_commit = False
        if not self._is_active:
            return
        if self._last is not None and step in self._own:
            self._note_written(step, self._last, begins_epoch=begins_epoch, is_begun=True)
            self._is_new = self._is_new and step == self._begins_in
        self._begun_at = step
        gives, gets = self._gives_at == step or self._is_after_part, self._gets_at == step or self._is_after_part
        self._is_after_part = False
        is_written = gives or step in self._written_after.values()
        self._begun_with = present = self._present_with_before() if is_written else {}
        if is_written and self._last is not None and step in self._own:
            self._agreed.note_written({name: self._states[name] for name in self._written_after}, present, self._last)
        sends = {self._buddy: [self._packed(present)]} if gives else {}
        receives = {self._source: [LIMIT_BYTES]} if gets else {}
        if not (sends or receives):
            return
        self._awaited_at = step if gets else -1
        label = f"the state of one rank as step {step} begins"
        with contextlib.suppress(PeerLost):
            received = self._channel.exchange(label, sends=sends, receives=receives)
            if receives:
                late, kept = _raw(received[self._source][0]), self._kept.get(step, b"")
                is_same_here = are_same(present, self._last) if gives else step not in self._written_after.values()
                is_known = _is_whole(late) and _is_whole(kept) and is_same_here
                if is_known and late != kept and not are_same(_unpacked(late), _unpacked(kept)):
                    self._source_writes_alone = True
                self._kept[step], self._late_at = late, step

    def begin_part(self, step: int) -> None:
        """Begin a part outside steps, such as a validation: send the state to the buddy as it is now.

        What the part writes counts as written after this state, as the job may also continue behind the part.

        Args:
            step: number of committed steps.
        """
        if not self._is_active or (self._last is None and self._restored_at != step):
            return
        if self._last is None:
            self._begins_in = step
        else:
            self._note_written(step, self._last, begins_epoch=False)
        self._is_after_part, self._restored_at = True, -1
        present = self._present()
        data = self._packed(present)
        label = f"the state of one rank as a part after step {step} begins"
        with contextlib.suppress(PeerLost):
            received = self._channel.exchange(
                label, sends={self._buddy: [data]}, receives={self._source: [LIMIT_BYTES]}
            )
            self._last, self._last_own, self._last_kept = present, data, _raw(received[self._source][0])
            self._own[step], self._kept[step] = self._last_own, self._last_kept

    def note_hooks(self) -> None:
        """Note that all ranks have run code that may write states which are not sent again by themselves."""
        self._is_after_part = self._is_active

    def undo(self) -> None:
        """Restore the objects that the program registered to their state when the step began."""
        for name, state in self._at_begin.items():
            self._states[name].load_state_dict(state)

    def keep_first(self, step: int, targets: Collection[int]) -> None:
        """Keep this rank's own state if it is a joiner that begins as its predecessor did, before it gets a replica's.

        Nobody has the state of a rank that is lost before the first exchange.

        Args:
            step: number of committed steps from which the job continues.
            targets: ranks of the joiners.
        """
        if self._first is None and step == self.begins_at and self._rank in targets:
            self._first = self._present()

    def restore(
        self, step: int, sources: Mapping[int, int], *, are_equal: bool = False, begins_epoch: bool = False
    ) -> None:
        """Give joiners the states of their predecessors after `step` steps. All ranks call this.

        Args:
            step: number of committed steps from which the job continues; this rank's state is that of its beginning.
            sources: for each joiner, the rank that gives it its parameters.
            are_equal: whether the states of all ranks are equal, so that these ranks give theirs, too.
            begins_epoch: whether that step is the first of an epoch; states of the epoch start from zero then.

        Raises:
            PeerLost: a rank was lost meanwhile.
        """
        if not self._states:
            return
        targets = sorted(sources)
        givers = {target: self._buddy_of[target] for target in targets if self._buddy_of[target] not in targets}
        data, leave, begun = self._send_states(step, dict(sources) if are_equal else givers, are_equal=are_equal)
        late_at = self._late_at
        self.reset()
        self._written_after = dict.fromkeys(self._written_after, -1)
        if self._rank in targets:
            self._is_new = True
            found = _unpacked(begun)
            self.begun = {**found, **found.pop(_BEFORE, {})}
            self._take(step, data, leave, targets, begins_epoch)
            self.has_taken(begins_epoch)
        self._at_commits = {step: self._present()}
        if not self._is_active:
            return
        # All ranks hold this step's state, even after a return to an earlier step; from here on their buddies do too.
        # Program code that runs again before the next step may still write to it.
        if not data or leave or are_equal:
            data = self._packed(self._present_with_before())
        label = f"the state of one rank from which step {step} begins"
        try:
            received = self._channel.exchange(
                label, sends={self._buddy: [data]}, receives={self._source: [LIMIT_BYTES]}
            )
        except PeerLost:
            self._late_at = late_at  # what is kept is still that of the beginning of the step
            raise
        self._own, self._kept, self._restored_at = {step: data}, {step: _raw(received[self._source][0])}, step
        self._kept_at_commits = dict(self._kept)

    def send_to_joiners(self, sources: Mapping[int, int], give: Callable[[], bytes]) -> bytes:
        """Pass data from the ranks that give joiners their parameters to the joiners. All ranks call this.

        Args:
            sources: for each joiner, the rank that gives it its parameters.
            give: returns the data that a giver sends.

        Returns:
            The data that this rank received; empty if it is not a joiner.

        Raises:
            PeerLost: a rank was lost meanwhile.
        """
        targets = [target for target, source in sources.items() if source == self._rank]
        receives = {sources[self._rank]: [_LARGEST_BYTES, _LARGEST_BYTES]} if self._rank in sources else {}
        if not (targets or receives):
            return b""
        given, first = (give(), self._given_first()) if targets else (b"", b"")
        sends = {target: [bytes([self._is_new_rank(target)]) + given, first] for target in targets}
        received = self._channel.exchange("the state of hooks", sends=sends, receives=receives)
        if not receives:
            return b""
        data, first = map(_raw, received[sources[self._rank]])
        given = unpack(first) if first else {}
        for name in self._of_replica.keys() & given.keys():
            self._of_replica[name].take_from_replica(given[name])
        self._given_before = given.get(_BEFORE, {})
        self._given = {name: given[name] for name in self._of_program.keys() & given.keys()}
        self._grows = data[:1] == b"\1"
        return data[1:]

    def _is_new_rank(self, rank: int) -> bool:
        """Whether a joiner has no predecessor, because the job grows."""
        return not self._kept if self._unshared is None else rank not in self._unshared

    def _given_first(self) -> bytes:
        """What joiners get of each `ReplicatedState` and of the program's objects, packed; empty if there is none."""
        of_program = {name: each.state_dict() for name, each in self._of_program.items() if not each.begins_empty}
        of_replica = {name: each.for_joiner() for name, each in self._of_replica.items()}
        if not (of_program or of_replica):
            return b""
        before = self._present_with_before().get(_BEFORE, {})
        return pack({**of_replica, **of_program, **({_BEFORE: before} if before else {})})

    def _load_given(self, names: Collection[str], *, is_in_body: bool) -> None:
        """Continue with what this joiner was given of the program's objects with these names."""
        loaded = self._given.keys() & names
        for name in loaded:
            self._states[name].load_state_dict(self._given[name])
        self.taken = ReceivedState(
            before=self.taken.before | {name: self._given_before[name] for name in loaded & self._given_before.keys()},
            own_parts={name: parts for name, parts in self.taken.own_parts.items() if name not in loaded},
        )
        if is_in_body:
            self.before = {**self._present(), **self._given_before}

    def _send_states(
        self, step: int, givers: Mapping[int, int], *, are_equal: bool
    ) -> tuple[bytes, dict[str, dict[str, bool]], bytes]:
        """Pass states to joiners.

        A joiner gets its state; by name, the parts that it must not load, each with whether it was equal on both ranks
        before it was written: then this rank's has the value of the lost one's; and its state as the body of the last
        step began, if its rest is to run again.
        """
        give = self._given_as_equal if are_equal else partial(self._given_to_joiner, step)
        targets = [target for target, giver in givers.items() if giver == self._rank]
        sends = {target: [*give(), self._begun_of_source(step)] for target in targets}
        giver = givers.get(self._rank)
        receives = {} if giver is None else {giver: [_LARGEST_BYTES, LIMIT_BYTES, LIMIT_BYTES]}
        if not (sends or receives):
            return b"", {}, b""
        received = self._channel.exchange("the state of lost ranks", sends=sends, receives=receives)
        data, leave, begun = map(_raw, received[giver]) if giver is not None else (b"", b"", b"")
        return data, unpack(leave) if leave else {}, begun

    def _begun_of_source(self, step: int) -> bytes:
        """What the source rank last sent before its step, with what it was as the body began; empty if not needed."""
        earlier = [each for each in self._kept if each < step] if self.is_at_commit else []
        return self._kept[max(earlier)] if earlier else b""

    def _given_as_equal(self) -> list[bytes]:
        """This rank's state, of whatever size, for a joiner whose predecessor had the same."""
        return [self._packed(self._present_with_before(), _LARGEST_BYTES), b""]

    def _take(
        self, step: int, data: bytes, leave: dict[str, dict[str, bool]], targets: Sequence[int], begins_epoch: bool
    ) -> None:
        """Load the state of this rank's predecessor."""
        is_in_body, self.before = bool(self.before), {}  # of a new process, that says nothing of this rank
        self.taken = ReceivedState(own_parts={name: {*parts} for name, parts in leave.items()})
        if not _is_whole(data):
            data = b""
        if not data and self._first is not None and step == self.begins_at:
            for name, state in self._states.items():
                state.load_state_dict(self._first.get(name, {}))
            return
        if not data and step:
            self._load_given(self._given.keys(), is_in_body=is_in_body)
            self.taken = ReceivedState(before=self._given_before)
            if self._grows:
                return  # this rank had no process before
            lost = "was lost too" if self._buddy in targets else "does not have it"
            self._tell_lost(step, [(name, name) for name in self._states], f"rank {self._buddy}, its buddy, {lost}")
            return
        self._load_kept(_unpacked(data), leave, begins_epoch=begins_epoch, is_in_body=is_in_body)
        lost = [
            (name, f"{name} {part}")
            for name, parts in leave.items()
            if name not in self._repeated
            for part, was_equal in parts.items()
            if not was_equal
        ]
        if lost:
            self._tell_lost(step, lost, "its predecessor was lost before it sent what was written after the step")

    def _load_kept(
        self, found: dict[str, Any], leave: dict[str, dict[str, bool]], *, begins_epoch: bool, is_in_body: bool
    ) -> None:
        """Load states that were kept for this rank, but for the parts in `leave`."""
        before = found.pop(_BEFORE, {})
        self.taken = replace(self.taken, before=before)
        empty = {name for name, each in self._of_program.items() if each.begins_empty} if self._grows else ()
        for name, state in self._states.items():
            if begins_epoch and name.endswith(EPOCH_SUFFIX):
                leave.pop(name, None)
            elif name not in empty:
                state.load_state_dict(found.get(name, {}), leave.get(name, ()))
        self._load_given(leave.keys(), is_in_body=False)
        if is_in_body:
            self.before = {**self._present(), **before}

    def _given_to_joiner(self, step: int) -> list[bytes]:
        """The source rank's state, and what of it a joiner must not load because code has written it since.

        An object of the program that was equal on both ranks is sent as it is here now: nobody else gives it.
        """
        states = self._kept_at_commits if self.is_at_commit else self._kept
        data, written = states.get(step, b""), self._written_since(step)
        if not (_is_whole(data) and written):
            return [data, pack({name: dict.fromkeys(parts, False) for name, parts in written.items()})]
        own, kept = _unpacked(self._own[step]), _unpacked(data)
        equal = [name for name in written if name in self._of_program and are_same(own.get(name), kept.get(name))]
        leave = {name: self._were_equal(name, parts, own, kept) for name, parts in written.items() if name not in equal}
        if equal:
            present = self._present_with_before()
            before = {name: state for name, state in present.get(_BEFORE, {}).items() if name in equal}
            kept |= {name: present[name] for name in equal} | ({_BEFORE: before} if before else {})
            data = self._packed(kept)
        return [data, pack(leave)]

    def _were_equal(
        self, name: str, parts: Sequence[str], own: Mapping[str, Any], kept: Mapping[str, Any]
    ) -> dict[str, bool]:
        differing = self._states[name].written(own.get(name, {}), kept.get(name, {}))
        return {part: part not in differing for part in parts}

    def _written_since(self, step: int) -> dict[str, list[str]]:
        """Parts, by state, that hooks wrote here, and hence on the source rank, since that sent its state.

        Without the states that only this rank was ever found to write.
        """
        if self._late_at == step or not _is_whole(self._own.get(step, b"")):
            return {}
        before = _unpacked(self._own[step])
        alone = {
            name for name, at in self._written_after.items() if self._source_gives is False and at not in (step, -1)
        }
        found = {name: sorted(state.written(before.get(name, {}))) for name, state in self._states.items()}
        return {name: parts for name, parts in found.items() if parts and name not in alone}

    @property
    def _is_active(self) -> bool:
        return bool(self._states) and self._buddy != self._rank

    def _present(self) -> dict[str, dict[str, Any]]:
        return {name: state.state_dict() for name, state in self._states.items()}

    def _present_with_before(self) -> dict[str, dict[str, Any]]:
        present = self._present()
        begun = {**self.before, **self.before_hooks()}
        before = {name: state for name, state in begun.items() if not are_same(state, present.get(name))}
        return {**present, _BEFORE: before} if before else present

    def _note_written(
        self, step: int, since: Mapping[str, dict[str, Any]], *, begins_epoch: bool, is_begun: bool = False
    ) -> None:
        """Note which states, except those registered with `is_repeated`, differ from what was sent last.

        Args:
            step: number of committed steps.
            since: what was sent last.
            begins_epoch: see `begin`.
            is_begun: whether the states of the program's objects were just copied, as a step begins.
        """
        for name, state in self._states.items():
            if self._written_after.get(name, -1) >= 0 or not self._may_note(name, begins_epoch=begins_epoch):
                continue
            present = self._at_begin[name] if is_begun and name in self._at_begin else state.state_dict()
            if not are_same(present, since.get(name, {})):
                self._written_after[name] = step

    def _may_note(self, name: str, *, begins_epoch: bool) -> bool:
        return name not in self._repeated and not (begins_epoch and name.endswith(EPOCH_SUFFIX))

    def _packed(self, present: Mapping[str, dict[str, Any]], limit_bytes: int = LIMIT_BYTES) -> bytes:
        """The state as it is sent; only its digest if it is too large.

        What a replacement needs comes first, so that it can be compared without the rest.
        """
        parts = {name: state for name, state in present.items() if state}
        repeated = {name: state for name, state in parts.items() if name in self._repeated}
        needed = pack({name: state for name, state in parts.items() if name not in repeated})
        others = pack(repeated) if repeated else _NOTHING
        data = b"".join([_WHOLE, len(needed).to_bytes(_NUM_SIZE_BYTES), needed, others])
        if len(data) <= limit_bytes:
            return data
        self._warn(f"its size is {len(data):,} bytes, more than {limit_bytes:,}")
        return _DIGEST + hashlib.sha256(needed).digest()

    def _tell_lost(self, step: int, what: Sequence[tuple[str, str]], why: str) -> None:
        """Report the parts of its predecessor's state that this rank does not have: name of the state, and description.

        Objects of the program that begin empty do not come with the parameters, as the other states do.
        """
        new = [part for name, part in what if name in self._of_program and name not in self._given]
        of_replica = [part for _, part in what if part not in new]
        parts = [f"with another rank's {format_list(of_replica, 3)}"] if of_replica else []
        parts += [f"with {format_list(new, 3)} as this process has created it"] if new else []
        cause = f"rank {self._rank} goes on after step {step} {', and '.join(parts)}: {why}"
        _log.warning("%s", cause)
        record(Event(name="recovery.local_state_lost", at_s=time.time(), details={"step": step, "cause": cause}))

    def _warn(self, why: str) -> None:
        if not self._has_warned and self._rank == 0:
            _log.warning(
                "rank-local state (%s) is not kept on the buddy: %s. If a rank is lost whose state differs from that "
                "of the others, all return to a snapshot if there is one (snapshot_every_steps), and otherwise to the "
                "last checkpoint (rank_local_state)",
                ", ".join(self._states),
                why,
            )
        self._has_warned = True


def _is_whole(data: bytes) -> bool:
    return data[:1] == _WHOLE


def _essential(data: bytes) -> bytes:
    """The part of a packed state that a replacement needs, or its digest."""
    if not _is_whole(data):
        return data
    begin = 1 + _NUM_SIZE_BYTES
    return data[begin : begin + int.from_bytes(data[1:begin])]


def _unpacked(data: bytes) -> dict[str, Any]:
    """Inverse of `LocalStates._packed`; empty if the state was not sent."""
    if not _is_whole(data):
        return {}
    begin = 1 + _NUM_SIZE_BYTES
    end = begin + int.from_bytes(data[1:begin])
    return {**unpack(data[begin:end]), **unpack(data[end:])}


def _last_two(states: Mapping[int, _State], step: int, data: _State) -> dict[int, _State]:
    """The last state before a step, and the state of that step; later ones are dropped."""
    before = step - 1 if step - 1 in states else max(filter(step.__gt__, states), default=step)
    return {before: states.get(before, data), step: data}


def _raw(data: torch.Tensor) -> bytes:
    return data.numpy().tobytes()
