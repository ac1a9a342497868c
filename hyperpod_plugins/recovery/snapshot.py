"""Buddy snapshots: the state of each rank, every few steps, in the memory of another rank.

They are for shards without a live replica. The main thread copies this rank's state into host memory; a thread beside
the training sends the copy to the buddy, and takes that of the ward (whose buddy this rank is).

[Note: two of each] A rank holds at most two snapshots of itself and two of its ward: the newest that is complete on
all ranks, and the one that is being exchanged. The exchange ends with an all-reduce, and nobody enters it before its
own part has come. So whoever sees it end knows that all ranks have everything, and may drop the older one; whoever is
interrupted in it keeps both, and says so when the members of the next generation arrive.
"""

import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from hyperpod_plugins.comm import break_groups, breaker
from hyperpod_plugins.errors import ConfigError, PeerLost
from hyperpod_plugins.parallel.topology import Topology
from hyperpod_plugins.recovery.assign import NO_STATE
from hyperpod_plugins.recovery.buddies import buddies, wards
from hyperpod_plugins.recovery.restore import MESSAGE_BYTES, TrainingState

log = logging.getLogger(__name__)
COPIES = 4
"""Copies of a rank's state that all ranks together hold at most: two of itself, and two with its buddy."""
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotPolicy:
    """How often, and how much memory for it."""

    every_steps: int = 0
    """Committed steps from one snapshot to the next; 0 for none."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state of one rank when it had committed `step` steps."""

    step: int
    header: bytes
    """See `TrainingState.header`."""
    trainer: bytes
    """See `Subject.describe`."""
    data: torch.Tensor
    """Bytes of all tensors, in host memory."""


class Shelf:
    """Room for two snapshots of one rank, whose memory is used again and again."""

    def __init__(self, *, is_pinned: bool) -> None:
        self._is_pinned = is_pinned
        self._snapshots: dict[int, Snapshot] = {}
        self._spare: torch.Tensor | None = None

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps of the complete snapshots, in order."""
        return tuple(sorted(self._snapshots))

    def find(self, step: int) -> Snapshot | None:
        """The snapshot of a step."""
        return self._snapshots.get(step)

    def room(self, num_bytes: int, *, keep: int) -> torch.Tensor:
        """Memory for the next snapshot, `num_bytes` long; all others but that of the step `keep` are dropped."""
        for step in [step for step in self._snapshots if step != keep]:
            self._spare = self._snapshots.pop(step).data
        spare, self._spare = self._spare, None
        if spare is not None and spare.numel() == num_bytes:
            return spare
        del spare
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._is_pinned)

    def put(self, snapshot: Snapshot) -> None:
        """Take a complete snapshot, in place of an older one of the same step."""
        former = self._snapshots.get(snapshot.step)
        if former is not None and former.data is not snapshot.data:
            self._spare = former.data
        self._snapshots[snapshot.step] = snapshot

    def keep_only(self, step: int) -> None:
        """Drop all snapshots but that of one step."""
        self._snapshots = {at: each for at, each in self._snapshots.items() if at == step}


class Snapshots:
    """This rank's part in the exchange. One exchange runs at a time, in a thread of its own."""

    def __init__(
        self,
        policy: SnapshotPolicy,
        state: TrainingState,
        topology: Topology,
        group: dist.ProcessGroup,
    ) -> None:
        """Take nothing yet.

        Args:
            policy: how often.
            state: what to copy.
            topology: who is there.
            group: of all ranks, strict, and for nothing else.
        """
        self.policy = policy
        self._state = state
        self._group = group
        self._rank = dist.get_rank()
        buddy_of = buddies(topology)
        self._ward_of = wards(buddy_of)
        self.buddy, self.ward = buddy_of[self._rank], self._ward_of[self._rank]
        ranks_here = topology.ranks_per_node or topology.world_size
        self._limit_bytes = int(policy.memory_fraction * host_memory_bytes() / ranks_here)
        is_pinned = torch.cuda.is_available()
        self._own, self._wards = Shelf(is_pinned=is_pinned), Shelf(is_pinned=is_pinned)
        self._complete = NO_STATE
        self._returned: Snapshot | None = None
        self._returns_from: dict[int, int] = {}
        self._thread: threading.Thread | None = None
        self._refusal: str | None = None
        self._is_off = False

    @property
    def own_steps(self) -> tuple[int, ...]:
        """Steps of which this rank has a snapshot of itself."""
        return self._own.steps

    @property
    def ward_steps(self) -> tuple[int, ...]:
        """Steps of which this rank has a snapshot of its ward."""
        return self._wards.steps

    def of(self, rank: int, step: int) -> Snapshot:
        """That of this rank or of its ward, which there must be."""
        snapshot = (self._own if rank == self._rank else self._wards).find(step)
        assert snapshot is not None
        return snapshot

    # -- taking ---------------------------------------------------------------------------------------------------

    def offer(self, step: int, describe: Callable[[], bytes]) -> None:
        """Take a snapshot if one is due; all ranks call this when they have committed `step` steps.

        Training waits for the copy, and for the exchange before if that has not ended.

        Raises:
            ConfigError: the snapshots take more memory than they may.
        """
        every = self.policy.every_steps
        if not every or step % every or self._is_off:
            return
        self.settle()
        if self._refusal is not None:
            self._turn_off(self._refusal)
        elif not breaker.is_open:
            self._begin(step, describe)

    def _begin(self, step: int, describe: Callable[[], bytes]) -> None:
        own = self._copy(step, describe)
        self._thread = threading.Thread(target=self._exchange, args=(step, own), name="hyperpod_snapshot", daemon=True)
        self._thread.start()

    def _turn_off(self, refusal: str) -> None:
        if self.policy.is_required:
            raise ConfigError(refusal)
        self._is_off = True
        if self._rank == 0:
            log.warning("%s", refusal)

    def settle(self) -> None:
        """Wait until no exchange is under way; one over broken groups ends at once."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

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
        try:
            self._swap(step, own)
        except PeerLost as error:
            log.info("the snapshot of step %d is void, and the one before it counts: %s", step, error)
        except (RuntimeError, MemoryError) as error:  # nobody else would hear of it, and the peers would wait
            log.exception("the snapshot of step %d failed", step)
            break_groups(f"the snapshot of step {step} failed: {type(error).__name__}: {error}")

    def _swap(self, step: int, own: Snapshot | None) -> None:
        sizes = self._sizes(step, own)
        if any(size[0] != step for size in sizes):
            raise RuntimeError(f"the ranks are at different steps: {[size[0] for size in sizes]}")
        largest = max(size[-1] for size in sizes)
        if own is None or not all(size[1] for size in sizes):
            self._refusal = too_large(largest, self._limit_bytes, self.policy)
            return
        theirs = sizes[self.ward]
        header, trainer = (torch.empty(size, dtype=torch.uint8) for size in theirs[1:3])
        data = self._wards.room(theirs[3], keep=self._complete)
        for mine, place in ((_bytes(own.header), header), (_bytes(own.trainer), trainer), (own.data, data)):
            self._pass_on(mine, place)
        self._wards.put(Snapshot(step=step, header=_raw(header), trainer=_raw(trainer), data=data))
        dist.all_reduce(torch.zeros(1), group=self._group)
        is_first_with_state = self._complete < 1 <= step
        self._complete = step
        if is_first_with_state and self._rank == 0:
            log.warning("%s", memory_cost(largest, self.policy))

    def _sizes(self, step: int, own: Snapshot | None) -> list[list[int]]:
        """Of each rank: its step, and the bytes of header, trainer and tensors."""
        num_bytes = self._state.num_bytes() if own is None else own.data.numel()
        texts = (0, 0) if own is None else (len(own.header), len(own.trainer))
        mine = torch.tensor([step, *texts, num_bytes])
        all_ranks = [torch.empty_like(mine) for _ in range(self._group.size())]
        dist.all_gather(all_ranks, mine, group=self._group)
        return [each.tolist() for each in all_ranks]

    def _pass_on(self, mine: torch.Tensor, place: torch.Tensor) -> None:
        """Send to the buddy while receiving from the ward, in messages of bounded size."""
        for begin in range(0, max(mine.numel(), place.numel()), MESSAGE_BYTES):
            works: list[dist.Work | None] = []
            if begin < place.numel():
                works.append(dist.irecv(place[begin : begin + MESSAGE_BYTES], self.ward, group=self._group))
            if begin < mine.numel():
                works.append(dist.isend(mine[begin : begin + MESSAGE_BYTES], self.buddy, group=self._group))
            for work in works:
                assert work is not None
                work.wait()

    def keep(self, step: int) -> None:
        """Hear which snapshot is the newest that all ranks can return to, as far as the members now know."""
        self._complete = step

    # -- going back -----------------------------------------------------------------------------------------------

    def deliver(self, step: int, sources: Mapping[int, int]) -> None:
        """Give those who lost theirs their snapshots of a step, and those of their wards; all have them afterwards.

        Raises:
            PeerLost: somebody was lost meanwhile. No training state has been changed.
        """
        for rank, source in sorted(sources.items()):
            if self._rank == source:
                self._send(self._wards, step, rank)
            elif self._rank == rank:
                self._receive(self._own, step, source)
        for rank in sorted(sources):  # else the next fault could find nothing of a rank whose buddy is new
            ward = self._ward_of[rank]
            if self._rank == ward:
                self._send(self._own, step, rank)
            elif self._rank == rank:
                self._receive(self._wards, step, ward)
        dist.all_reduce(torch.zeros(1), group=self._group)

    def _send(self, shelf: Shelf, step: int, rank: int) -> None:
        snapshot = shelf.find(step)
        assert snapshot is not None
        sizes = [len(snapshot.header), len(snapshot.trainer), snapshot.data.numel()]
        dist.send(torch.tensor(sizes), rank, group=self._group)
        for part in (_bytes(snapshot.header), _bytes(snapshot.trainer), *snapshot.data.split(MESSAGE_BYTES)):
            dist.send(part, rank, group=self._group)

    def _receive(self, shelf: Shelf, step: int, rank: int) -> None:
        sizes = torch.empty(3, dtype=torch.int64)
        dist.recv(sizes, rank, group=self._group)
        header, trainer = (torch.empty(int(size), dtype=torch.uint8) for size in sizes[:2])
        data = shelf.room(int(sizes[2]), keep=NO_STATE)
        for part in (header, trainer, *data.split(MESSAGE_BYTES)):
            dist.recv(part, rank, group=self._group)
        shelf.put(Snapshot(step=step, header=_raw(header), trainer=_raw(trainer), data=data))

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

    def count_return(self, from_step: int) -> int:
        """How often, this time included, the state after a step was lost: the step that follows may be why."""
        self._returns_from[from_step] = self._returns_from.get(from_step, 0) + 1
        return self._returns_from[from_step]

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
        f"buddy snapshots every {policy.every_steps} steps take up to {COPIES * state_bytes / 2**20:,.1f} MiB of host "
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


def _bytes(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _raw(data: torch.Tensor) -> bytes:
    return data.numpy().tobytes()
