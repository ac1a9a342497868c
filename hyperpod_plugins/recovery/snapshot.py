"""Buddy snapshots: every few steps, a copy of each rank's state goes into the memory of another rank.

They protect shards without a live replica. The main thread copies this rank's state into host memory; a background
thread sends the copy to this rank's buddy, and receives the copy of its source rank (the rank whose buddy it is).
`SnapshotPace` decides how often, `SnapshotBuffer` holds the copies of one rank, and `Snapshots` runs the exchange.

[Note: every exchange ends] The parts go over a `Channel`, which is woken when the groups break. A stalled exchange
breaks the groups itself. After `MAX_STALLS` stalls in a row snapshots are turned off: the job would only stall again.

[Note: two of each] A rank holds at most two snapshots of itself and two of its source rank: the newest that is
complete on all ranks, and the one being exchanged. The exchange ends with an all-reduce, which a rank enters only
after it has received its part. A rank that sees the all-reduce complete therefore knows that all ranks have
everything, and may drop the older snapshot. A rank that is interrupted earlier keeps both, and reports both when the
next generation assembles.

[Note: no buddies] Where shards have replicas and all ranks are on one node, snapshots only serve the loss of many ranks
at once. Those in shared memory outlive them, and a buddy's copy would be lost with the node as they are, so none is
sent. Ranks record their own before they exchange sizes, so a rank that has the sizes of all knows that all have it.
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
from hyperpod_plugins.ledger import TimeCategory, ledger
from hyperpod_plugins.parallel.topology import Topology
from hyperpod_plugins.recovery.plan import NO_STATE, buddies, sources_of
from hyperpod_plugins.recovery.snapshot_memory import SharedMemory, SharedSlots, Snapshot
from hyperpod_plugins.recovery.state_transfer import TrainingState, num_bytes_of

# The snapshot interval: as short as the cost limit allows. Each rank measures its own cost; all use one interval.

MAX_COST = 0.005
"""Largest fraction of the step time that snapshots may cost."""
MAX_COST_OF_RARE = 0.002
"""The same where only the loss of all ranks at once needs them, which is rare."""
_NUM_STEPS = 20
_NUM_BEFORE = 3
_CHANGE = 2
"""The interval changes again only if the wanted one is longer or shorter by at least this factor."""


class SnapshotPace:
    """The snapshot interval of one rank, in steps.

    In each exchange every rank announces the interval that it wants, so all ranks see the same numbers and compute
    the same agreed interval. It takes effect at the next snapshot that is due, when the exchange is known to have
    ended on all ranks. A fault may interrupt an exchange after it has ended on some ranks only. All ranks then
    exchange the interval that they use, and fall back to the initial one if these differ.
    """

    def __init__(self, every_steps: int, *, is_measured: bool, max_cost: float = MAX_COST) -> None:
        """Start with an interval of `every_steps`, 0 for no snapshots; it is fixed unless `is_measured`.

        `max_cost`: largest fraction of the time that snapshots may cost.
        """
        self.every_steps, self._max_cost = every_steps, max_cost
        self._first, self._is_measured = every_steps, is_measured
        self._agreed = every_steps
        self._is_known = self._is_told = False
        self._last: tuple[int, float] | None = None
        self._in_step_s = 0.0
        """Of the time since then, what snapshots took: a step is no longer for it once they are rare."""
        self._num_before = _NUM_BEFORE
        self._steps_s: deque[float] = deque(maxlen=_NUM_STEPS)
        self._copies_s: deque[float] = deque(maxlen=_NUM_STEPS)
        self._exchanges_s: deque[float] = deque(maxlen=_NUM_STEPS)
        self._busy_s: deque[float] = deque(maxlen=_NUM_STEPS)

    def is_due(self, step: int) -> bool:
        """Whether a snapshot of this step is due."""
        return self.every_steps > 0 and step % self.every_steps == 0

    @property
    def is_every_step(self) -> bool:
        """Whether every step has a snapshot, because that is known to cost little or the user asked for it."""
        return self.every_steps == 1 and (self._is_told or not self._is_measured)

    @property
    def adopted_steps(self) -> int:
        """The agreed interval that this rank uses; 0 if it has not adopted one yet."""
        return self.every_steps if self._is_told else 0

    def begin_step(self, step: int, now_s: float) -> None:
        """Measure the step time: step `step` begins at `now_s`."""
        last, self._last = self._last, (step, now_s)
        if last is not None and last[0] == step - 1:
            if self._num_before:
                self._num_before -= 1
            else:
                self._steps_s.append(max(now_s - last[1] - self._in_step_s, 0.0))
        self._in_step_s = 0.0

    def record_copy(self, duration_s: float) -> None:
        """Record how long training waited for a copy."""
        self._copies_s.append(duration_s)
        self._in_step_s += duration_s

    def record_exchange(self, duration_s: float, busy_s: float) -> None:
        """Record how long an exchange took, and the CPU time that its thread used."""
        self._exchanges_s.append(duration_s)
        self._busy_s.append(busy_s)
        self._in_step_s += busy_s

    def wanted_steps(self) -> int:
        """The interval that this rank wants; 0 if it has not measured enough yet."""
        if not (self._is_measured and self._steps_s and self._exchanges_s):
            return 0
        cost_s = median(self._copies_s) + median(self._busy_s)
        return wanted_interval(cost_s, median(self._exchanges_s), median(self._steps_s), self._max_cost / _CHANGE)

    def agree_on(self, wanted: Sequence[int]) -> None:
        """Agree on an interval from what each rank wants, by rank; called when the exchange has ended."""
        if self._is_measured and any(wanted):
            self._is_known = True
            self._agreed = agreed_interval(self.every_steps, wanted, is_first=self.every_steps == self._first)

    def adopt(self) -> bool:
        """Use the agreed interval from now on. Returns whether it is new."""
        former, self.every_steps = self.every_steps, self._agreed
        is_news = self._is_known and (former != self.every_steps or not self._is_told)
        self._is_told |= is_news
        return is_news

    def reset(self, told: Sequence[int]) -> None:
        """Choose the interval after a fault. All ranks pass the same `told`.

        Args:
            told: `adopted_steps` of each rank. Joiners pass 0 and take over the interval of the others.
        """
        known = set(told) - {0}
        self._is_known = self._is_told = len(known) == 1
        self.every_steps = self._agreed = known.pop() if self._is_told else self._first

    def __str__(self) -> str:
        """One line for the log."""
        if not (self._steps_s and self._copies_s and self._busy_s):
            return f"buddy snapshots: every {self.every_steps} steps"
        cost_ms, step_ms = 1000 * (median(self._copies_s) + median(self._busy_s)), 1000 * median(self._steps_s)
        return (
            f"buddy snapshots: every {self.every_steps} steps, to cost at most {100 * self._max_cost:g} % of the time "
            f"(one takes {cost_ms:.1f} ms, a step {step_ms:.1f} ms); set snapshot_every_steps for another interval"
        )


def wanted_interval(cost_s: float, exchange_s: float, step_s: float, aim: float) -> int:
    """The smallest interval, in steps, at which snapshots cost at most `aim` and no exchange delays the next one.

    Args:
        cost_s: training time that one snapshot costs.
        exchange_s: duration of its exchange in the background.
        step_s: duration of a step without snapshots.
        aim: wanted fraction of the time, below the limit: an interval that does not change yet is off by some factor.
    """
    step_s = max(step_s, 1e-6)
    return max(1, math.ceil(cost_s / (aim * step_s)), math.ceil(exchange_s / step_s))


def agreed_interval(now: int, wanted: Sequence[int], *, is_first: bool) -> int:
    """The interval of all ranks: the longest that any rank wants; `now` if none does or it is within a factor of 2.

    Args:
        now: the present interval.
        wanted: what each rank wants; 0 if it does not know yet.
        is_first: whether `now` is the initial interval, which any wanted one replaces.
    """
    most = max(wanted, default=0)
    if most == 0 or (not is_first and now / _CHANGE < most < now * _CHANGE):
        return now
    return most


log = logging.getLogger(__name__)
COPIES = 4
"""Most copies of a rank's state that exist at once: two in its own memory and two in its buddy's, if it has any."""
MAX_STALLS = 3
"""Exchanges in a row that may stall until their timeout before snapshots are turned off."""
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_SLICE_S = 0.5
_PATIENCE_S = 120.0  # all ranks have entered the exchange by then, but may allocate much memory before they receive
_WAKE_S = 30.0  # an exchange over broken groups ends at once; one that does not is stuck where nothing wakes it


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotPolicy:
    """How often to take snapshots, and how much memory they may take."""

    every_steps: int = 0
    """Committed steps from one snapshot to the next; 0 for no snapshots."""
    is_measured: bool = False
    """Whether `every_steps` is only the initial interval, adjusted by measurements; see `SnapshotPace`."""
    memory_fraction: float = 0.5
    """Largest fraction of a node's memory for the snapshots of all its ranks."""
    is_required: bool = True
    """Whether exceeding the memory limit is an error; otherwise snapshots are turned off with a warning."""
    needs_buddies: bool = True
    """Whether buddies keep copies even if all snapshots are in shared memory."""
    max_cost: float = MAX_COST
    """Largest fraction of the time that they may cost, if they are measured."""

    def __post_init__(self) -> None:
        """Validate the values."""
        if self.every_steps < 0:
            raise ConfigError(f"snapshot_every_steps must be 0 (no snapshots) or more, but is {self.every_steps}")
        if not 0 < self.memory_fraction <= 1:
            raise ConfigError(f"snapshot_memory_fraction must be above 0 and at most 1, but is {self.memory_fraction}")


class SnapshotBuffer:
    """Memory for two snapshots of one rank, reused from snapshot to snapshot.

    Snapshots in shared memory outlive this process once they are recorded.
    """

    def __init__(self, *, is_pinned: bool, slots: SharedSlots | None = None) -> None:
        """Start empty.

        Args:
            is_pinned: whether to pin memory that is not shared, for copies from a GPU.
            slots: shared memory; None to use this process's own memory.
        """
        self._is_pinned = is_pinned
        self._slots = slots
        self._snapshots: dict[int, Snapshot] = {}
        self._spare: torch.Tensor | None = None
        self.is_short = False
        """Whether shared memory ran short, so that a snapshot is lost with this process."""

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps of the complete snapshots, in ascending order."""
        return tuple(sorted(self._snapshots))

    def find(self, step: int) -> Snapshot | None:
        """The snapshot of a step, or None."""
        return self._snapshots.get(step)

    def allocate(self, num_bytes: int, *, keep: int) -> torch.Tensor:
        """Memory of `num_bytes` for the next snapshot. Drops all snapshots but that of step `keep`.

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
            shared = self._slots.allocate(num_bytes, [each.data for each in self._snapshots.values()], _refuse_broken)
            if shared is not None:
                return shared
            self.is_short |= num_bytes > 0
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._is_pinned)

    def put(self, snapshot: Snapshot) -> None:
        """Add a complete snapshot, replacing an older one of the same step."""
        former = self._snapshots.get(snapshot.step)
        if former is not None and former.data is not snapshot.data:
            self._drop(snapshot.step)
        self._snapshots[snapshot.step] = snapshot

    def record(self, step: int) -> None:
        """Make the snapshot of a step outlive this process, if it is in shared memory.

        Raises:
            PeerLost: the groups broke meanwhile.
        """
        if self._slots is not None and step in self._snapshots:
            self.is_short |= not self._slots.record(self._snapshots[step], _refuse_broken)

    def keep_only(self, step: int) -> None:
        """Drop all snapshots but that of `step`."""
        for other in [other for other in self._snapshots if other != step]:
            self._drop(other)

    def load_previous(self, *, is_good: bool) -> None:
        """Load the snapshots that the previous process left in shared memory if `is_good`, else delete them."""
        if self._slots is None:
            return
        if is_good:
            self._snapshots = {snapshot.step: snapshot for snapshot in self._slots.load()}
        else:
            self._slots.clear()

    def is_intact(self, step: int, check: Callable[[], None] = lambda: None) -> bool:
        """Whether the snapshot of a step, if there is one, has its checksum; drops it if not.

        Only one that the previous process left may have lost it. If `check`, which is called now and then, raises,
        the exception propagates.
        """
        snapshot = self._snapshots.get(step)
        if snapshot is None or self._slots is None or self._slots.is_intact(snapshot, check):
            return True
        del self._snapshots[step]
        return False

    def _drop(self, step: int) -> None:
        self._spare = self._snapshots.pop(step).data
        if self._slots is not None:
            self._slots.invalidate(self._spare)


class Snapshots:
    """This rank's buddy snapshots: takes them, exchanges them, and restores from them.

    One exchange runs at a time, in a background thread.
    """

    def __init__(
        self,
        policy: SnapshotPolicy,
        state: TrainingState,
        topology: Topology,
        group: dist.ProcessGroup,
        memory: SharedMemory | None = None,
    ) -> None:
        """Take no snapshot yet, but load those that the previous process left in shared memory.

        Args:
            policy: how often to take snapshots, and how much memory they may take.
            state: the training state to copy.
            topology: of the present world.
            group: process group of all ranks, strict, used for nothing else.
            memory: shared memory in which snapshots outlive this process; None if there is none.
        """
        self.policy = policy
        self._state = state
        self._group = group
        self._key = group.key if isinstance(group, ResilientProcessGroup) else WORLD
        self._channel = Channel(group, "snapshots", patience_s=_PATIENCE_S)
        # A peer may still be receiving a snapshot from a third rank; only a closed connection means that it is lost.
        self._restore_channel = Channel(group, "way back")
        self._num_stalls = 0
        self._rank = dist.get_rank()
        buddy_of = buddies(topology)
        self._source_of = sources_of(buddy_of)
        self.buddy, self.source_rank = buddy_of[self._rank], self._source_of[self._rank]
        ranks_here = topology.ranks_per_node or topology.world_size
        self._limit_bytes = int(policy.memory_fraction * host_memory_bytes() / ranks_here)
        is_pinned = any(each.is_cuda for each in state.tensors().values())
        own, of_source = (
            (None, None)
            if memory is None
            else (memory.slots("own", self._rank), memory.slots("source", self.source_rank))
        )
        self._pace = SnapshotPace(policy.every_steps, is_measured=policy.is_measured, max_cost=policy.max_cost)
        self._own = SnapshotBuffer(is_pinned=is_pinned, slots=own)
        self._of_source = SnapshotBuffer(is_pinned=is_pinned, slots=of_source)
        for buffer in (self._own, self._of_source):
            buffer.load_previous(is_good=memory is not None and memory.is_replacement)
        self._outlives = memory is not None
        self._has_buddies = policy.needs_buddies or memory is None  # see [Note: no buddies]
        self._committed = None if memory is None else memory.committed_steps(self._rank)
        left = None
        if memory is not None and self._committed is not None:
            left = self._committed.load() if memory.is_replacement else None
            if left is None:
                self._committed.clear()
        self.last_committed = NO_STATE if left is None else left
        """Steps committed by this process or, until it commits any, by the one that it replaces; else NO_STATE."""
        self._complete = NO_STATE
        self._returned: Snapshot | None = None
        self._loaded: Snapshot | None = None
        """The snapshot that was loaded, until its step begins."""
        self._thread: threading.Thread | None = None
        self._refusal: str | None = None
        self._is_off = self._has_stalled = self._has_warned = False
        self.when_exchanging: Callable[[int], object] = lambda step: None
        """Called in the middle of an exchange, in its thread, with the step of the snapshot."""
        self.when_receiving: Callable[[], object] = lambda: None
        """Called before this rank receives its own snapshot from another rank."""

    @property
    def own_steps(self) -> tuple[int, ...]:
        """Steps of this rank's snapshots of itself."""
        return self._own.steps

    @property
    def source_steps(self) -> tuple[int, ...]:
        """Steps of this rank's snapshots of its source rank."""
        return self._of_source.steps

    @property
    def newest(self) -> Snapshot | None:
        """This rank's newest snapshot of itself, or None."""
        return self._own.find(max(self._own.steps, default=NO_STATE))

    def find(self, rank: int, step: int) -> Snapshot:
        """The snapshot of this rank or of its source rank at a step; it must exist."""
        snapshot = (self._own if rank == self._rank else self._of_source).find(step)
        assert snapshot is not None
        return snapshot

    def record_committed(self, step: int) -> None:
        """Record that this rank has committed `step` steps, for the process that may replace this one."""
        self.last_committed = step
        if self._committed is not None:
            self._committed.record(step)

    # -- taking ---------------------------------------------------------------------------------------------------

    def maybe_snapshot(self, step: int, describe: Callable[[], bytes]) -> None:
        """Take a snapshot if one is due. All ranks call this when they have committed `step` steps.

        Blocks for the copy, and for the previous exchange if it is still running.

        Args:
            step: number of committed steps.
            describe: returns this rank's state beside tensors; see `TrainingLoop.capture_own_state`.

        Raises:
            ConfigError: the snapshots exceed the memory limit, and the policy requires them.
            RecoveryError: see `wait`.
        """
        self._pace.begin_step(step, time.perf_counter())
        if self._is_off or not self._pace.is_due(step):
            return
        with ledger.phase(TimeCategory.SNAPSHOT):
            self._snapshot_now(step, describe)

    def _snapshot_now(self, step: int, describe: Callable[[], bytes]) -> None:
        self.wait()
        if not group_health.is_unavailable and self._pace.adopt() and self._rank == 0:
            log.warning("%s", self._pace)
        if not self._pace.is_due(step):
            return
        if self._refusal is not None:
            self._turn_off(self._refusal)
        elif self._has_stalled:
            self._is_off = True
            log.error(
                "rank %d: buddy snapshots are turned off: %d exchanges in a row stalled until they timed out. Check "
                "that the ranks can reach each other over the network.",
                self._rank,
                MAX_STALLS,
            )
        elif not group_health.is_unavailable:
            ledger.note(snapshot=step)
            self._begin(step, describe)

    def wait_before_commit(self) -> None:
        """With a snapshot of every step, wait for the exchange of the last one before this step is committed.

        A fault then loses at most one step. This applies only if the exchange is known to end well before the step
        does, or if the user asked for a snapshot of every step; otherwise the first steps of a job with a large state
        would wait.
        """
        if self._pace.is_every_step:
            self.wait()

    @property
    def _num_copies(self) -> int:
        """Most snapshots that a rank holds at once."""
        return COPIES if self._has_buddies else COPIES // 2

    def _begin(self, step: int, describe: Callable[[], bytes]) -> None:
        began_s = time.perf_counter()
        try:
            own = self._copy(step, describe)
        except PeerLost as error:
            log.info("no snapshot of step %d: %s", step, error)
            return
        self._pace.record_copy(time.perf_counter() - began_s)
        self._thread = threading.Thread(target=self._exchange, args=(step, own), name="hyperpod_snapshot", daemon=True)
        self._thread.start()

    def _turn_off(self, refusal: str) -> None:
        if self.policy.is_required:
            raise ConfigError(refusal)
        self._is_off = True
        if self._rank == 0:
            log.warning("%s", refusal)

    def wait(self) -> None:
        """Wait until no exchange is running. An exchange over broken groups ends at once.

        Raises:
            RecoveryError: it did not end. This process must exit, as the thread may still write to the snapshots.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        broken_s: float | None = None
        with PeerWait(self._key):
            while thread.is_alive():
                thread.join(_SLICE_S)
                if group_health.is_unavailable:
                    broken_s = time.monotonic() if broken_s is None else broken_s
                    if time.monotonic() - broken_s > _WAKE_S:
                        raise RecoveryError(
                            f"the snapshot exchange did not end within {_WAKE_S:.0f} s after the groups broke "
                            f"({group_health.cause}). This process exits and will be replaced."
                        )

    def _copy(self, step: int, describe: Callable[[], bytes]) -> Snapshot | None:
        """Copy this rank's present state; None if it exceeds the memory limit, which the exchange then announces."""
        tensors = self._state.tensors()
        num_bytes = num_bytes_of(tensors)
        if self._num_copies * num_bytes > self._limit_bytes:
            return None
        data = self._own.allocate(max(1, num_bytes), keep=self._complete)  # an empty file cannot be mapped
        self._state.copy_to(data[:num_bytes], tensors)
        own = Snapshot(step=step, header=self._state.header(tensors), trainer=describe(), data=data)
        self._own.put(own)
        return own

    def _exchange(self, step: int, own: Snapshot | None) -> None:
        began_s = time.perf_counter()
        try:
            self._own.record(step)
            self._exchange_all(step, own)
            self._pace.record_exchange(time.perf_counter() - began_s, time.thread_time())
        except PeerLost as error:
            self._num_stalls += isinstance(error.__cause__, TimeoutError)
            log.info("the snapshot of step %d is incomplete; the one before it remains valid: %s", step, error)
        except (RuntimeError, MemoryError) as error:  # the peers would not learn of it and would wait
            log.exception("the snapshot of step %d failed", step)
            break_groups(f"the snapshot of step {step} failed: {type(error).__name__}: {error}")

    def _exchange_all(self, step: int, own: Snapshot | None) -> None:
        sizes = self._sizes(step, own)
        if any(size[0] != step for size in sizes):
            raise RuntimeError(f"the ranks are at different steps: {[size[0] for size in sizes]}")
        largest, self._has_buddies = max(size[3] for size in sizes), any(size[7] for size in sizes)
        if own is None or not all(size[1] for size in sizes):
            self._refusal = too_large(largest, self._num_copies, self._limit_bytes, self.policy)
            return
        if max(size[4] for size in sizes) >= MAX_STALLS:
            self._has_stalled = True
            return
        if self._has_buddies:
            header, trainer, num_bytes = sizes[self.source_rank][1:4]
            data = self._of_source.allocate(num_bytes, keep=self._complete)
            self.when_exchanging(step)
            self._send_receive(own, [header, trainer, data], step)
            self._of_source.record(step)
            dist.all_reduce(torch.zeros(1), group=self._group)
        else:  # each rank had its own recorded when it sent its sizes
            self._of_source.keep_only(step)
            self.when_exchanging(step)
        self._num_stalls = 0
        self._pace.agree_on([size[5] for size in sizes])
        num_short = sum(size[6] for size in sizes)
        if num_short and not self._has_warned and self._rank == 0:
            self._has_warned = True
            log.warning("%s", too_little_shared(num_short, len(sizes)))
        is_first_with_state = self._complete < 1 <= step
        self._complete = step
        if is_first_with_state and self._rank == 0:
            log.warning("%s", memory_cost(largest, self._num_copies))

    def _sizes(self, step: int, own: Snapshot | None) -> list[list[int]]:
        """Of each rank: its step; the bytes of header, trainer and tensors; the number of its stalled exchanges; the
        interval that it wants; whether it lacks shared memory; and whether it needs a buddy.
        """
        num_bytes = self._state.num_bytes() if own is None else own.data.numel()
        texts = (0, 0) if own is None else (len(own.header), len(own.trainer))
        is_short = self._own.is_short or self._of_source.is_short
        needs_buddy = self.policy.needs_buddies or not self._outlives or is_short
        pace = self._num_stalls, self._pace.wanted_steps()
        mine = torch.tensor([step, *texts, num_bytes, *pace, int(is_short), int(needs_buddy)])
        all_ranks = [torch.empty_like(mine) for _ in range(self._group.size())]
        dist.all_gather(all_ranks, mine, group=self._group)
        return [each.tolist() for each in all_ranks]

    def _send_receive(self, own: Snapshot, places: list[torch.Tensor | int], step: int) -> None:
        """Send this rank's snapshot to its buddy while receiving that of its source rank."""
        parts = self._channel.exchange("snapshot", sends={self.buddy: _parts(own)}, receives={self.source_rank: places})
        self._of_source.put(_snapshot(step, parts[self.source_rank]))

    def resume_at(self, step: int) -> None:
        """Continue after a repair; `step` is that of the newest snapshot to which all ranks can return.

        All ranks call this, joiners included, and continue in the same way: a rank that had turned snapshots off
        turns them on again. If the reason persists, the next exchange turns them off on all ranks.

        Raises:
            PeerLost: a rank was lost meanwhile.
        """
        self._complete = step
        mine = torch.tensor([self._pace.adopted_steps])
        all_ranks = [torch.empty_like(mine) for _ in range(self._group.size())]
        with PeerWait(self._key):
            dist.all_gather(all_ranks, mine, group=self._group)
        self._pace.reset([int(each) for each in all_ranks])
        self._is_off = self._has_stalled = False
        self._refusal = None  # `_num_stalls` stays: a stalled exchange itself leads to a repair

    def drop_damaged(self) -> None:
        """Drop the snapshots of the previous process that are damaged."""
        for buffer in (self._own, self._of_source):
            for step in buffer.steps:
                buffer.is_intact(step)

    def is_intact(self, step: int) -> bool:
        """Whether this rank's snapshots of a step are intact; drops those that are not.

        Raises:
            PeerLost: the groups broke meanwhile.
        """
        return all([buffer.is_intact(step, _refuse_broken) for buffer in (self._own, self._of_source)])

    # -- restoring -----------------------------------------------------------------------------------------------

    def redistribute(self, step: int, sources: Mapping[int, int]) -> None:
        """Give ranks that lost them their own snapshots of a step and those of their source ranks.

        All ranks call this; afterwards each has both.

        Args:
            step: of the snapshots.
            sources: for each rank that lost its own snapshot, the rank that gives it (its buddy).

        Raises:
            PeerLost: a rank was lost meanwhile. No training state has been changed.
        """
        self._loaded = None  # memory of snapshots may be written to
        to = self.source_rank if sources.get(self.source_rank) == self._rank else None
        self._hand_over(step, self._of_source, to, self._own, sources.get(self._rank))
        # Otherwise a rank whose buddy is new would have no second copy at the next fault.
        to, source = self.buddy if self.buddy in sources else None, self.source_rank if self._rank in sources else None
        self._hand_over(step, self._own, to, self._of_source, source)
        with PeerWait(self._key):  # waits in a background thread's group are not reported otherwise
            dist.all_reduce(torch.zeros(1), group=self._group)

    def _hand_over(
        self, step: int, given: SnapshotBuffer, to: int | None, taken: SnapshotBuffer, source: int | None
    ) -> None:
        """Send a snapshot of a step to the rank `to`, and receive one from the rank `source`; None skips either."""
        mine = None if to is None else given.find(step)
        assert (mine is None) == (to is None)
        parts = {} if to is None or mine is None else {to: _parts(mine)}
        sizes = {rank: [torch.tensor([len(part) for part in each])] for rank, each in parts.items()}
        room = torch.empty(3, dtype=torch.int64)
        self._restore_channel.exchange("sizes", sends=sizes, receives={} if source is None else {source: [room]})
        places: dict[int, list[torch.Tensor | int]] = {}
        if source is not None:
            if taken is self._own:
                self.when_receiving()
            header, trainer, data = room.tolist()
            places = {source: [header, trainer, taken.allocate(data, keep=NO_STATE)]}
        for received in self._restore_channel.exchange("snapshot", sends=parts, receives=places).values():
            taken.put(_snapshot(step, received))
            taken.record(step)

    def load(self, step: int) -> None:
        """Restore this rank's parameters, buffers and optimizers from its snapshot of a step.

        Drops the snapshots of other steps: the job may not reach the same states again.
        """
        snapshot = self._own.find(step)
        assert snapshot is not None
        self._state.copy_from(snapshot.header, snapshot.data, f"the snapshot of step {step}")
        self._own.keep_only(step)
        self._of_source.keep_only(step)
        self._complete = step
        self._returned = self._loaded = snapshot

    def load_again(self, step: int) -> None:
        """Restore parameters and optimizers of the snapshot that this rank has returned to, as its step begins.

        A snapshot is taken when the hooks that precede a step have been called. After a return they are called again,
        and what they write to parameters or to optimizers' state has then been written twice.
        """
        loaded, self._loaded = self._loaded, None
        if loaded is not None and loaded.step == step:
            self._state.copy_all_but_buffers_from(loaded.header, loaded.data, f"the snapshot of step {step}")

    def take_returned(self) -> Snapshot | None:
        """The snapshot that this rank has restored since the last call, or None."""
        returned, self._returned = self._returned, None
        return returned


def host_memory_bytes() -> int:
    """Memory of this machine, or the limit of the container if that is lower."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _CGROUP_LIMIT.read_text().strip() if _CGROUP_LIMIT.is_file() else "max"
    return min(machine, int(limit)) if limit.isdecimal() else machine


def memory_cost(state_bytes: int, num_copies: int) -> str:
    """Message: the host memory that snapshots take if the state of a rank takes `state_bytes`."""
    return (
        f"buddy snapshots take up to {num_copies * state_bytes / 2**20:,.1f} MiB of host "
        f"memory on each rank: {num_copies} copies of {state_bytes / 2**20:,.1f} MiB of parameters, buffers and "
        "optimizer state"
    )


def too_large(state_bytes: int, num_copies: int, limit_bytes: int, policy: SnapshotPolicy) -> str:
    """Message: why snapshots are turned off or refused."""
    return (
        f"buddy snapshots need {num_copies * state_bytes:,} bytes of host memory on a rank ({num_copies} copies of "
        f"{state_bytes:,} bytes), but the limit is {limit_bytes:,} (snapshot_memory_fraction={policy.memory_fraction} "
        "of the node's memory, shared by its ranks). Allow a larger fraction, shard the model over more ranks, or "
        "turn snapshots off with snapshot_every_steps=0."
    )


def too_little_shared(num_short: int, num_ranks: int) -> str:
    """Message: what it means that the snapshots of some ranks are not in shared memory."""
    return (
        f"/dev/shm has no room for the buddy snapshots of {num_short} of {num_ranks} ranks (half of it, and at least "
        "1 GiB, stay free for others, such as DataLoader workers). They are kept in process memory instead and are "
        "lost with the process: if a rank and its buddy, or all processes of the job, end at once, the job returns to "
        "its last checkpoint. To avoid that, give the container a larger /dev/shm (docker: --shm-size)."
    )


def _refuse_broken() -> None:
    """Raise `PeerLost` if the groups are broken. For long work in which nothing else would interrupt the thread."""
    if group_health.cause is not None:
        raise_peer_lost(group_health.cause)


def _parts(snapshot: Snapshot) -> list[torch.Tensor | bytes]:
    """The parts of a snapshot as sent over a channel."""
    return [snapshot.header, snapshot.trainer, snapshot.data]


def _snapshot(step: int, parts: Sequence[torch.Tensor]) -> Snapshot:
    header, trainer, data = parts
    return Snapshot(step=step, header=header.numpy().tobytes(), trainer=trainer.numpy().tobytes(), data=data)
