"""Buddy snapshots: the state of each rank, every few steps, in the memory of another rank.

They are for shards without a live replica. The main thread copies this rank's state into host memory; a thread beside
the training sends the copy to the buddy, and takes that of the ward (whose buddy this rank is).

[Note: every exchange ends] The parts go over a `Channel`, which a break wakes. An exchange that stands still breaks the
groups itself; after some such exchanges in a row there are no more snapshots, for the job would only repeat them.

[Note: two of each] A rank holds at most two snapshots of itself and two of its ward: the newest that is complete on
all ranks, and the one that is being exchanged. The exchange ends with an all-reduce, and nobody enters it before its
own part has come. So whoever sees it end knows that all ranks have everything, and may drop the older one; whoever is
interrupted in it keeps both, and says so when the members of the next generation arrive.
"""

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from hyperpod_plugins.comm import WORLD, Channel, ResilientProcessGroup, break_groups, group_health
from hyperpod_plugins.comm.work import PeerWait, raise_peer_lost
from hyperpod_plugins.errors import ConfigError, PeerLost, RecoveryError
from hyperpod_plugins.parallel.topology import Topology
from hyperpod_plugins.recovery.plan import NO_STATE, buddies, sources_of
from hyperpod_plugins.recovery.snapshot_memory import SharedMemory, SharedSlots, Snapshot
from hyperpod_plugins.recovery.state import TrainingState

# How often to take snapshots: as often as they cost little; measured on each rank, and the same on all.

COST = 0.005
"""Part of the time of a step that snapshots may cost."""
_NUM_STEPS = 20
_NUM_BEFORE = 3
_CHANGE = 2
"""How many times more or less often they must be wanted before the interval changes again."""


class SnapshotPace:
    """Steps from one snapshot to the next, of one rank.

    Each rank says in an exchange what it wants, and all hear the same numbers. What follows from them holds from the
    next snapshot that is due on, when the exchange is known to have ended on all ranks. After a fault, of which some
    may have heard before it ended and some not, all tell each other where they are, and begin with the first interval
    again where that is not the same.
    """

    def __init__(self, every_steps: int, *, is_measured: bool) -> None:
        """Begin with an interval, 0 for no snapshots; keep it where nothing `is_measured`."""
        self.every_steps = every_steps
        self._first, self._is_measured = every_steps, is_measured
        self._agreed = every_steps
        self._is_known = self._is_told = False
        self._last: tuple[int, float] | None = None
        self._num_before = _NUM_BEFORE
        self._steps_s: deque[float] = deque(maxlen=_NUM_STEPS)
        self._copies_s: deque[float] = deque(maxlen=_NUM_STEPS)
        self._exchanges_s: deque[float] = deque(maxlen=_NUM_STEPS)
        self._busy_s: deque[float] = deque(maxlen=_NUM_STEPS)

    def is_due(self, step: int) -> bool:
        """Whether there is to be a snapshot of a step."""
        return self.every_steps > 0 and step % self.every_steps == 0

    @property
    def is_every_step(self) -> bool:
        """Whether it is known that a snapshot of every step costs little, or somebody asked for that."""
        return self.every_steps == 1 and (self._is_told or not self._is_measured)

    @property
    def told_steps(self) -> int:
        """The interval that all agreed upon and with which this rank goes on; 0 while it knows of none."""
        return self.every_steps if self._is_told else 0

    def tick(self, step: int, now_s: float) -> None:
        """A step begins."""
        last, self._last = self._last, (step, now_s)
        if last is not None and last[0] == step - 1:
            if self._num_before:
                self._num_before -= 1
            else:
                self._steps_s.append(now_s - last[1])

    def copied(self, duration_s: float) -> None:
        """Training has waited so long for a copy."""
        self._copies_s.append(duration_s)

    def exchanged(self, duration_s: float, busy_s: float) -> None:
        """An exchange took so long, and its thread computed for a part of it."""
        self._exchanges_s.append(duration_s)
        self._busy_s.append(busy_s)

    def wanted_steps(self) -> int:
        """What this rank wants; 0 while it does not know."""
        if not (self._is_measured and self._steps_s and self._exchanges_s):
            return 0
        cost_s = median(self._copies_s) + median(self._busy_s)
        return interval(cost_s, median(self._exchanges_s), median(self._steps_s))

    def hear(self, wanted: Sequence[int]) -> None:
        """What all ranks want, in the order of the ranks; called when the exchange has ended."""
        if self._is_measured and any(wanted):
            self._is_known = True
            self._agreed = agree(self.every_steps, wanted, is_first=self.every_steps == self._first)

    def adopt(self) -> bool:
        """Go on with what was agreed upon; whether that is news."""
        former, self.every_steps = self.every_steps, self._agreed
        is_news = self._is_known and (former != self.every_steps or not self._is_told)
        self._is_told |= is_news
        return is_news

    def reset(self, told: Sequence[int]) -> None:
        """After a fault; all ranks hear the same.

        Args:
            told: `told_steps` of each rank. Those that are new know of none, and go on with that of the others.
        """
        known = set(told) - {0}
        self._is_known = self._is_told = len(known) == 1
        self.every_steps = self._agreed = known.pop() if self._is_told else self._first

    def __str__(self) -> str:
        """One line for people."""
        if not (self._steps_s and self._copies_s and self._busy_s):
            return f"buddy snapshots: every {self.every_steps} steps"
        cost_ms, step_ms = 1000 * (median(self._copies_s) + median(self._busy_s)), 1000 * median(self._steps_s)
        return (
            f"buddy snapshots: every {self.every_steps} steps, so that they cost less than {100 * COST:g} % (one takes "
            f"{cost_ms:.1f} ms, a step {step_ms:.1f} ms); set snapshot_every_steps for another interval"
        )


def interval(cost_s: float, exchange_s: float, step_s: float) -> int:
    """Steps from one snapshot to the next at which they cost less than `COST` of a step, and no exchange is waited for.

    Args:
        cost_s: what one snapshot takes from training.
        exchange_s: how long its exchange lasts beside the training.
        step_s: how long a step takes.
    """
    return max(1, math.ceil(cost_s / (COST * step_s)), math.ceil(exchange_s / step_s))


def agree(now: int, wanted: Sequence[int], *, is_first: bool) -> int:
    """The interval of all ranks: what the slowest wants; as it is now where that is about the same.

    Args:
        now: the present interval.
        wanted: by each rank, 0 if it does not know.
        is_first: whether `now` was not agreed upon, so that any other one takes its place.
    """
    most = max(wanted, default=0)
    if most == 0 or (not is_first and now / _CHANGE < most < now * _CHANGE):
        return now
    return most


log = logging.getLogger(__name__)
COPIES = 4
"""Copies of a rank's state that all ranks together hold at most: two of itself, and two with its buddy."""
MAX_STALLS = 3
"""Exchanges in a row that may stand still until their limit, before there are no more."""
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_SLICE_S = 0.5
_PATIENCE_S = 120.0  # all have come to the exchange by then, but they may reserve a lot of memory before they receive
_WAKE_S = 30.0  # an exchange over broken groups ends at once; what does not is stuck where nothing wakes it


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotPolicy:
    """How often, and how much memory for it."""

    every_steps: int = 0
    """Committed steps from one snapshot to the next; 0 for none."""
    is_measured: bool = False
    """Whether that is where the job begins, and it goes on with what the ranks measure; see `SnapshotPace`."""
    memory_fraction: float = 0.5
    """Largest part of a node's memory for the snapshots of all its ranks."""
    is_required: bool = True
    """Whether it is an error if they take more; they are left out, with a warning, otherwise."""

    def __post_init__(self) -> None:
        """Check the values."""
        if self.every_steps < 0:
            raise ConfigError(f"snapshot_every_steps must be 0 (none) or more, but is {self.every_steps}")
        if not 0 < self.memory_fraction <= 1:
            raise ConfigError(f"snapshot_memory_fraction must lie in 0 .. 1, but is {self.memory_fraction}")


class SnapshotBuffer:
    """Room for two snapshots of one rank, whose memory is used again and again.

    In shared memory, they outlive this process once they are recorded.
    """

    def __init__(self, *, is_pinned: bool, slots: SharedSlots | None = None) -> None:
        """Begin without any; memory that is not shared is pinned for a GPU if `is_pinned`."""
        self._is_pinned = is_pinned
        self._slots = slots
        self._snapshots: dict[int, Snapshot] = {}
        self._spare: torch.Tensor | None = None
        self.is_short = False
        """Whether there was not enough shared memory, so that a snapshot ends with this process."""

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps of the complete snapshots, in order."""
        return tuple(sorted(self._snapshots))

    def find(self, step: int) -> Snapshot | None:
        """The snapshot of a step."""
        return self._snapshots.get(step)

    def room(self, num_bytes: int, *, keep: int) -> torch.Tensor:
        """Memory for the next snapshot, `num_bytes` long; all others but that of the step `keep` are dropped.

        Raises:
            PeerLost: the groups broke meanwhile.
        """
        for step in [step for step in self._snapshots if step != keep]:
            self._drop(step)
        spare, self._spare = self._spare, None
        if spare is not None and spare.numel() == num_bytes:
            return spare
        del spare
        if self._slots is not None:
            shared = self._slots.room(num_bytes, [each.data for each in self._snapshots.values()], _refuse_broken)
            if shared is not None:
                return shared
            self.is_short |= num_bytes > 0
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._is_pinned)

    def put(self, snapshot: Snapshot) -> None:
        """Take a complete snapshot, in place of an older one of the same step."""
        former = self._snapshots.get(snapshot.step)
        if former is not None and former.data is not snapshot.data:
            self._drop(snapshot.step)
        self._snapshots[snapshot.step] = snapshot

    def record(self, step: int) -> None:
        """Let the snapshot of a step outlive this process.

        Raises:
            PeerLost: the groups broke meanwhile.
        """
        if self._slots is not None and step in self._snapshots:
            self._slots.record(self._snapshots[step], _refuse_broken)

    def keep_only(self, step: int) -> None:
        """Drop all snapshots but that of one step."""
        for other in [other for other in self._snapshots if other != step]:
            self._drop(other)

    def take_over(self, *, is_good: bool) -> None:
        """Take the snapshots that a process before this one left in shared memory, or see to it that nobody does."""
        if self._slots is None:
            return
        if is_good:
            self._snapshots = {snapshot.step: snapshot for snapshot in self._slots.load()}
        else:
            self._slots.clear()

    def _drop(self, step: int) -> None:
        self._spare = self._snapshots.pop(step).data
        if self._slots is not None:
            self._slots.forget(self._spare)


class Snapshots:
    """This rank's part in the exchange. One exchange runs at a time, in a thread of its own."""

    def __init__(
        self,
        policy: SnapshotPolicy,
        state: TrainingState,
        topology: Topology,
        group: dist.ProcessGroup,
        memory: SharedMemory | None = None,
    ) -> None:
        """Take nothing yet, but find what a process before this one left in shared memory.

        Args:
            policy: how often.
            state: what to copy.
            topology: who is there.
            group: of all ranks, strict, and for nothing else.
            memory: where snapshots outlive this process; None where nothing does.
        """
        self.policy = policy
        self._state = state
        self._group = group
        self._role = group.role if isinstance(group, ResilientProcessGroup) else WORLD
        self._channel = Channel(group, "snapshots", patience_s=_PATIENCE_S)
        # Whoever is waited for there may still take a snapshot from a third rank, so only its end says that it is gone.
        self._way_back = Channel(group, "way back")
        self._num_stalls = 0
        self._rank = dist.get_rank()
        buddy_of = buddies(topology)
        self._ward_of = sources_of(buddy_of)
        self.buddy, self.source_rank = buddy_of[self._rank], self._ward_of[self._rank]
        ranks_here = topology.ranks_per_node or topology.world_size
        self._limit_bytes = int(policy.memory_fraction * host_memory_bytes() / ranks_here)
        is_pinned = torch.cuda.is_available()
        own, of_ward = (
            (None, None)
            if memory is None
            else (memory.slots("own", self._rank), memory.slots("ward", self.source_rank))
        )
        self._pace = SnapshotPace(policy.every_steps, is_measured=policy.is_measured)
        self._own = SnapshotBuffer(is_pinned=is_pinned, slots=own)
        self._wards = SnapshotBuffer(is_pinned=is_pinned, slots=of_ward)
        for shelf in (self._own, self._wards):
            shelf.take_over(is_good=memory is not None and memory.is_replacement)
        self._complete = NO_STATE
        self._returned: Snapshot | None = None
        self._thread: threading.Thread | None = None
        self._refusal: str | None = None
        self._is_off = self._has_stalled = self._has_warned = False

    @property
    def own_steps(self) -> tuple[int, ...]:
        """Steps of which this rank has a snapshot of itself."""
        return self._own.steps

    @property
    def source_steps(self) -> tuple[int, ...]:
        """Steps of which this rank has a snapshot of its ward."""
        return self._wards.steps

    @property
    def newest(self) -> Snapshot | None:
        """The newest snapshot that this rank has of itself."""
        return self._own.find(max(self._own.steps, default=NO_STATE))

    def of(self, rank: int, step: int) -> Snapshot:
        """That of this rank or of its ward, which there must be."""
        snapshot = (self._own if rank == self._rank else self._wards).find(step)
        assert snapshot is not None
        return snapshot

    # -- taking ---------------------------------------------------------------------------------------------------

    def maybe_snapshot(self, step: int, describe: Callable[[], bytes]) -> None:
        """Take a snapshot if one is due; all ranks call this when they have committed `step` steps.

        Training waits for the copy, and for the exchange before if that has not ended.

        Raises:
            ConfigError: the snapshots take more memory than they may.
        """
        self._pace.tick(step, time.perf_counter())
        if self._is_off or not self._pace.is_due(step):
            return
        self.settle()
        if not group_health.is_open and self._pace.adopt() and self._rank == 0:
            log.warning("%s", self._pace)
        if not self._pace.is_due(step):
            return
        if self._refusal is not None:
            self._turn_off(self._refusal)
        elif self._has_stalled:
            self._is_off = True
            log.error(
                "rank %d: there are no more buddy snapshots, for %d exchanges in a row stood still for as long as they "
                "may. See whether the ranks reach each other over the network.",
                self._rank,
                MAX_STALLS,
            )
        elif not group_health.is_open:
            self._begin(step, describe)

    def settle_before_commit(self) -> None:
        """Let no step be committed before all have the snapshot of the one before, where there is one of each.

        So that one step at most is lost. Only where the exchange is known to end long before the step does, or somebody
        asked for a snapshot of every step: that of a large state would be waited for in the first steps.
        """
        if self._pace.is_every_step:
            self.settle()

    def _begin(self, step: int, describe: Callable[[], bytes]) -> None:
        began_s = time.perf_counter()
        try:
            own = self._copy(step, describe)
        except PeerLost as error:
            log.info("there is no snapshot of step %d: %s", step, error)
            return
        self._pace.copied(time.perf_counter() - began_s)
        self._thread = threading.Thread(target=self._exchange, args=(step, own), name="hyperpod_snapshot", daemon=True)
        self._thread.start()

    def _turn_off(self, refusal: str) -> None:
        if self.policy.is_required:
            raise ConfigError(refusal)
        self._is_off = True
        if self._rank == 0:
            log.warning("%s", refusal)

    def settle(self) -> None:
        """Wait until no exchange is under way; one over broken groups ends at once.

        Raises:
            RecoveryError: it does not. This process must end, for the thread may still write to the snapshots.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        broken_s: float | None = None
        with PeerWait(self._role):
            while thread.is_alive():
                thread.join(_SLICE_S)
                if group_health.is_open:
                    broken_s = time.monotonic() if broken_s is None else broken_s
                    if time.monotonic() - broken_s > _WAKE_S:
                        raise RecoveryError(
                            f"the exchange of snapshots did not end within {_WAKE_S:.0f} s after the groups broke "
                            f"({group_health.cause}). This process ends, and another takes its place."
                        )

    def _copy(self, step: int, describe: Callable[[], bytes]) -> Snapshot | None:
        """This rank's state now; None where it takes too much memory, of which all hear in the exchange."""
        num_bytes = self._state.num_bytes()
        if COPIES * num_bytes > self._limit_bytes:
            return None
        data = self._own.room(num_bytes, keep=self._complete)
        self._state.copy_to(data)
        own = Snapshot(step=step, header=self._state.header(), trainer=describe(), data=data)
        self._own.put(own)
        return own

    def _exchange(self, step: int, own: Snapshot | None) -> None:
        began_s = time.perf_counter()
        try:
            self._own.record(step)
            self._swap(step, own)
            self._pace.exchanged(time.perf_counter() - began_s, time.thread_time())
        except PeerLost as error:
            self._num_stalls += isinstance(error.__cause__, TimeoutError)
            log.info("the snapshot of step %d is void, and the one before it counts: %s", step, error)
        except (RuntimeError, MemoryError) as error:  # nobody else would hear of it, and the peers would wait
            log.exception("the snapshot of step %d failed", step)
            break_groups(f"the snapshot of step {step} failed: {type(error).__name__}: {error}")

    def _swap(self, step: int, own: Snapshot | None) -> None:
        sizes = self._sizes(step, own)
        if any(size[0] != step for size in sizes):
            raise RuntimeError(f"the ranks are at different steps: {[size[0] for size in sizes]}")
        largest = max(size[3] for size in sizes)
        if own is None or not all(size[1] for size in sizes):
            self._refusal = too_large(largest, self._limit_bytes, self.policy)
            return
        if max(size[4] for size in sizes) >= MAX_STALLS:
            self._has_stalled = True
            return
        theirs = sizes[self.source_rank][1:4]
        data = self._wards.room(theirs[2], keep=self._complete)
        self._pass_on(own, [theirs[0], theirs[1], data], step)
        self._wards.record(step)
        dist.all_reduce(torch.zeros(1), group=self._group)
        self._num_stalls = 0
        self._pace.hear([size[5] for size in sizes])
        num_short = sum(size[6] for size in sizes)
        if num_short and not self._has_warned and self._rank == 0:
            self._has_warned = True
            log.warning("%s", too_little_shared(num_short, len(sizes)))
        is_first_with_state = self._complete < 1 <= step
        self._complete = step
        if is_first_with_state and self._rank == 0:
            log.warning("%s", memory_cost(largest, self.policy))

    def _sizes(self, step: int, own: Snapshot | None) -> list[list[int]]:
        """Of each rank: its step; the bytes of header, trainer and tensors; how many of its exchanges stalled; how many
        steps it wants from one snapshot to the next; and whether it lacks shared memory.
        """
        num_bytes = self._state.num_bytes() if own is None else own.data.numel()
        texts = (0, 0) if own is None else (len(own.header), len(own.trainer))
        is_short = self._own.is_short or self._wards.is_short
        mine = torch.tensor([step, *texts, num_bytes, self._num_stalls, self._pace.wanted_steps(), int(is_short)])
        all_ranks = [torch.empty_like(mine) for _ in range(self._group.size())]
        dist.all_gather(all_ranks, mine, group=self._group)
        return [each.tolist() for each in all_ranks]

    def _pass_on(self, own: Snapshot, places: list[torch.Tensor | int], step: int) -> None:
        """Send this rank's snapshot to the buddy while receiving that of the ward."""
        parts = self._channel.exchange("snapshot", sends={self.buddy: _parts(own)}, receives={self.source_rank: places})
        self._wards.put(_snapshot(step, parts[self.source_rank]))

    def keep(self, step: int) -> None:
        """Hear which snapshot is the newest that all ranks can return to, as far as the members now know.

        All ranks call this after a repair, those that are new with them, and go on alike: those that had heard that
        there are no more snapshots forget it. What was the reason is found again in the next exchange, by all of them.

        Raises:
            PeerLost: somebody was lost meanwhile.
        """
        self._complete = step
        mine = torch.tensor([self._pace.told_steps])
        all_ranks = [torch.empty_like(mine) for _ in range(self._group.size())]
        with PeerWait(self._role):
            dist.all_gather(all_ranks, mine, group=self._group)
        self._pace.reset([int(each) for each in all_ranks])
        self._is_off = self._has_stalled = False
        self._refusal = None  # `_num_stalls` stays: an exchange that stands still leads to a repair

    # -- going back -----------------------------------------------------------------------------------------------

    def redistribute(self, step: int, sources: Mapping[int, int]) -> None:
        """Give those who lost theirs their snapshots of a step, and those of their wards; all have them afterwards.

        Raises:
            PeerLost: somebody was lost meanwhile. No training state has been changed.
        """
        to = self.source_rank if sources.get(self.source_rank) == self._rank else None
        self._hand_over(step, self._wards, to, self._own, sources.get(self._rank))
        # Else the next fault could find nothing of a rank whose buddy is new.
        to, source = self.buddy if self.buddy in sources else None, self.source_rank if self._rank in sources else None
        self._hand_over(step, self._own, to, self._wards, source)
        with PeerWait(self._role):  # waits in the group of a thread beside the step are not told by themselves
            dist.all_reduce(torch.zeros(1), group=self._group)

    def _hand_over(
        self, step: int, given: SnapshotBuffer, to: int | None, taken: SnapshotBuffer, source: int | None
    ) -> None:
        """Give a snapshot of a step to one rank, and take one from another; None for nobody."""
        mine = None if to is None else given.find(step)
        assert (mine is None) == (to is None)
        parts = {} if to is None or mine is None else {to: _parts(mine)}
        sizes = {rank: [torch.tensor([len(part) for part in each])] for rank, each in parts.items()}
        room = torch.empty(3, dtype=torch.int64)
        self._way_back.exchange("sizes", sends=sizes, receives={} if source is None else {source: [room]})
        places: dict[int, list[torch.Tensor | int]] = {}
        if source is not None:
            header, trainer, data = room.tolist()
            places = {source: [header, trainer, taken.room(data, keep=NO_STATE)]}
        for received in self._way_back.exchange("snapshot", sends=parts, receives=places).values():
            taken.put(_snapshot(step, received))
            taken.record(step)

    def load(self, step: int) -> None:
        """Put this rank's parameters, buffers and optimizers back to where they were at a step.

        Snapshots of other steps are dropped: they may be of a past that does not come again.
        """
        snapshot = self._own.find(step)
        assert snapshot is not None
        self._state.copy_from(snapshot.header, snapshot.data, f"the snapshot of step {step}")
        self._own.keep_only(step)
        self._wards.keep_only(step)
        self._complete = step
        self._returned = snapshot

    def take_returned(self) -> Snapshot | None:
        """The snapshot that this rank has gone back to, if it has since the last call."""
        returned, self._returned = self._returned, None
        return returned


def host_memory_bytes() -> int:
    """Memory of this machine, or of the container that it is for us."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _CGROUP_LIMIT.read_text().strip() if _CGROUP_LIMIT.is_file() else "max"
    return min(machine, int(limit)) if limit.isdecimal() else machine


def memory_cost(state_bytes: int, policy: SnapshotPolicy) -> str:
    """What snapshots cost a rank whose state, and whose ward's, takes `state_bytes`."""
    return (
        f"buddy snapshots take up to {COPIES * state_bytes / 2**20:,.1f} MiB of host "
        f"memory on each rank: {COPIES} copies of {state_bytes / 2**20:,.1f} MiB of parameters, buffers and "
        "optimizer state"
    )


def too_large(state_bytes: int, limit_bytes: int, policy: SnapshotPolicy) -> str:
    """Why there are no snapshots."""
    return (
        f"buddy snapshots need {COPIES * state_bytes:,} bytes of host memory on a rank ({COPIES} copies of "
        f"{state_bytes:,} bytes), but may take {limit_bytes:,} (snapshot_memory_fraction={policy.memory_fraction} of "
        "the node's memory, shared by its ranks). Allow a larger fraction, shard the model over more ranks, or turn "
        "snapshots off with snapshot_every_steps=0."
    )


def too_little_shared(num_short: int, num_ranks: int) -> str:
    """What it means that the snapshots of some ranks do not lie in shared memory."""
    return (
        f"/dev/shm has no room for the buddy snapshots of {num_short} of {num_ranks} ranks (half of it, and 1 GiB, are "
        "left to others, such as the workers of a DataLoader). They lie in the memory of their processes and end with "
        "them: if a rank and its buddy, or all processes of the job, end at once, the job goes back to its last "
        "checkpoint. Where that matters, give the container a larger /dev/shm (docker: --shm-size)."
    )


def _refuse_broken() -> None:
    """Raise `PeerLost` if the groups are broken: in work that takes long, in which nothing else wakes a thread."""
    if group_health.cause is not None:
        raise_peer_lost(group_health.cause)


def _parts(snapshot: Snapshot) -> list[torch.Tensor | bytes]:
    """What goes over a channel."""
    return [snapshot.header, snapshot.trainer, snapshot.data]


def _snapshot(step: int, parts: Sequence[torch.Tensor]) -> Snapshot:
    header, trainer, data = parts
    return Snapshot(step=step, header=header.numpy().tobytes(), trainer=trainer.numpy().tobytes(), data=data)
