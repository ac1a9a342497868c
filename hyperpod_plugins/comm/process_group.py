"""The process group that models and meshes hold, over an inner group that can be replaced.

`DelegatingGroup` forwards every collective to an inner group. `ResilientProcessGroup`, the group of the `hyperpod`
backend, replaces its inner group in each generation of the job. `live_groups` lists those of this process, and
`shutdown_all` ends their collectives after a break.
"""

# C++ overloads have no single signature that a Python override could match, and several names that c10d calls on a
# group begin with an underscore. c10d keeps the ranks of every group in a private table and offers no way to change
# them. Not every supported torch has c10d's type for group names.
# pyright: reportIncompatibleMethodOverride=false, reportAssignmentType=false, reportPrivateUsage=false

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Backend, Store
from typing_extensions import override

from hyperpod_plugins.comm.health import Phase
from hyperpod_plugins.comm.options import SHARD_ACROSS, SHARD_NODE, CommOptions, GroupKey
from hyperpod_plugins.comm.runtime import group_health, runtime
from hyperpod_plugins.comm.traffic import Collective
from hyperpod_plugins.comm.transport import InnerGroup, TimedConnections, transport_message
from hyperpod_plugins.comm.work import FinishedWork, ResilientWork, no_op_group, raise_peer_lost, reduce_scatter
from hyperpod_plugins.errors import CommError, LoopError, PeerLost


def num_bytes(tensors: Tensor | Sequence[Any]) -> int:
    """Size in bytes of a tensor, or of all tensors in nested lists."""
    if isinstance(tensors, Tensor):
        return tensors.nbytes
    if len(tensors) == 1:
        return num_bytes(tensors[0])
    return sum(num_bytes(part) for part in tensors)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


class DelegatingGroup(dist.ProcessGroup):
    """Abstract group that forwards every collective to `inner` through a single method, `_issue`.

    `torch.distributed` functions and FSDP2 call the Python methods of a group. Functional collectives, DDP and
    compiled code call the C++ methods, which look for a Python override. Both use the method names of their torch
    version. All of these calls arrive here; the inner group is called by the names that torch 2.10 to 2.13 share.
    Rank and size are read often, so they are stored here rather than delegated.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue]
        self._rank, self._size = rank, size

    @property
    def inner(self) -> dist.ProcessGroup:
        """The group that runs the collectives now."""
        raise NotImplementedError

    @property
    def exchanges_parts(self) -> bool:
        """Whether members exchange parts in a reduce-scatter over gloo; the same for all of them."""
        return False

    def _issue(
        self, kind: Collective, payload_bytes: int, call: Callable[..., dist.Work], *args: Any, **kwargs: Any
    ) -> dist.Work:
        """Run `call(*args, **kwargs)`, a method of the inner group. `payload_bytes`: see [Note: what a byte is]."""
        raise NotImplementedError

    def rank(self) -> int:
        """This process's rank in the group at present."""
        return self._rank

    def size(self) -> int:
        """Present number of members."""
        return self._size

    def allreduce(self, tensors: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Reduce in place, on all members."""
        return self._issue("all_reduce", num_bytes(tensors), self.inner.allreduce, tensors, *args, **kwargs)

    def allreduce_coalesced(self, tensors: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Reduce several tensors in place, on all members."""
        return self._issue("all_reduce", num_bytes(tensors), self.inner.allreduce_coalesced, tensors, *args, **kwargs)

    def allgather(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Gather into one tensor per member."""
        return self._issue("all_gather", num_bytes(outputs), self.inner.allgather, outputs, inputs, *args, **kwargs)

    def allgather_coalesced(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Gather several tensors, each into one tensor per member."""
        call = self.inner.allgather_coalesced
        return self._issue("all_gather", num_bytes(outputs), call, outputs, inputs, *args, **kwargs)

    def all_gather_single(self, output: Any, input: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Gather into one tensor."""
        return self._issue("all_gather", output.nbytes, self.inner._allgather_base, output, input, *args, **kwargs)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Gather several tensors, each into one."""
        call = self.inner.allgather_into_tensor_coalesced
        return self._issue("all_gather", num_bytes(outputs), call, outputs, inputs, *args, **kwargs)

    def reduce_scatter(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Reduce one tensor per member and keep this rank's own."""
        inner = self.inner
        call = partial(reduce_scatter, inner, inner.reduce_scatter, self.exchanges_parts)
        return self._issue("reduce_scatter", num_bytes(inputs), call, outputs, inputs, *args, **kwargs)

    def reduce_scatter_single(self, output: Any, input: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Reduce one tensor and keep this rank's part."""
        inner = self.inner
        call = partial(reduce_scatter, inner, inner._reduce_scatter_base, self.exchanges_parts)
        return self._issue("reduce_scatter", input.nbytes, call, output, input, *args, **kwargs)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Reduce several tensors and keep this rank's part of each."""
        inner = self.inner
        call = partial(reduce_scatter, inner, inner.reduce_scatter_tensor_coalesced, self.exchanges_parts)
        return self._issue("reduce_scatter", num_bytes(inputs), call, outputs, inputs, *args, **kwargs)

    def all_to_all_single(self, output: Any, input: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Exchange parts of one tensor."""
        return self._issue("all_to_all", input.nbytes, self.inner.alltoall_base, output, input, *args, **kwargs)

    def alltoall(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Exchange one tensor with each member."""
        return self._issue("all_to_all", num_bytes(inputs), self.inner.alltoall, outputs, inputs, *args, **kwargs)

    def broadcast(self, tensors: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Copy the root's tensor to all members."""
        return self._issue("broadcast", num_bytes(tensors), self.inner.broadcast, tensors, *args, **kwargs)

    def reduce(self, tensors: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Reduce to the root."""
        return self._issue("reduce", num_bytes(tensors), self.inner.reduce, tensors, *args, **kwargs)

    def gather(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Gather to the root, into one tensor per member."""
        size_bytes = num_bytes(inputs) * self._size
        return self._issue("gather", size_bytes, self.inner.gather, outputs, inputs, *args, **kwargs)

    def scatter(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Send each member one tensor of the root."""
        size_bytes = num_bytes(outputs) * self._size
        return self._issue("scatter", size_bytes, self.inner.scatter, outputs, inputs, *args, **kwargs)

    def send(self, tensors: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Send to one member."""
        return self._issue("send", num_bytes(tensors), self.inner.send, tensors, *args, **kwargs)

    def recv(self, tensors: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Receive from one member."""
        return self._issue("recv", num_bytes(tensors), self.inner.recv, tensors, *args, **kwargs)

    def recv_anysource(self, tensors: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Receive from the member that sends first."""
        return self._issue("recv", num_bytes(tensors), self.inner.recv_anysource, tensors, *args, **kwargs)

    def barrier(self, *args: Any, **kwargs: Any) -> dist.Work:
        """Wait for all members."""
        return self._issue("barrier", 0, self.inner.barrier, *args, **kwargs)

    # Aliases: C++ names, and names from before or after a renaming in torch.
    getRank = rank
    getSize = size
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # What callers use of a group besides collectives. The C++ base class would look in its own, empty backend table.

    @property
    def _device_types(self) -> list[torch.device]:
        return self.inner._device_types

    def _get_backend(self, device: torch.device) -> Backend:
        return self.inner._get_backend(device)

    def _start_coalescing(self, device: torch.device) -> None:
        self.inner._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        return self._issue("coalesced", 0, self.inner._end_coalescing, device)

    def _set_sequence_number_for_group(self) -> None:
        self.inner._set_sequence_number_for_group()

    def get_group_store(self) -> Store:
        """Store through which the members of the present inner group found each other."""
        return self.inner.get_group_store()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long collectives issued from now on wait for their peers."""
        self.inner.set_timeout(timeout)


BACKEND = "hyperpod"
_NO_OP_GROUP = no_op_group()


@contextmanager
def pin_generation(group: dist.ProcessGroup | None, generation: int) -> Generator[None, None, None]:
    """Restrict this thread's use of a group to one generation, for work that a joiner would not take part in.

    Such blocks can be nested. The outermost one of a group counts.

    Raises:
        PeerLost: a collective is issued after the group was reconfigured.
    """
    before = runtime.pinned.generations
    if isinstance(group, ResilientProcessGroup):
        runtime.pinned.generations = {group: generation, **before}
    try:
        yield
    finally:
        runtime.pinned.generations = before


def generation_of(group: dist.ProcessGroup | None) -> int:
    """Return the generation of a group; 0 for a group of another backend."""
    return group.generation if isinstance(group, ResilientProcessGroup) else 0


class ResilientProcessGroup(DelegatingGroup):
    """A process group that keeps its identity while its inner group is replaced.

    DeviceMesh, FSDP2 and DTensor store a group when a model is set up, and ask it for its rank and size whenever they
    need them. They hold this object; its members, connections and size are those of `inner`. `replace_inner` switches
    it to a later generation of the job.

    A collective that fails because a peer is lost breaks all groups of this process, because a step needs all of
    them; `health.py` describes what happens then.
    """

    def __init__(
        self,
        inner: InnerGroup | None,
        *,
        rank: int,
        size: int,
        key: GroupKey,
        options: CommOptions,
        root_store: Store,
        timeout: timedelta,
    ) -> None:
        super().__init__(rank, size)
        self._inner = inner
        self._is_closed = False
        self._traffic = runtime.traffic.of_axis(key.axis)
        self.key = key
        self.options = options
        self.root_store = root_store
        """Store in which every generation of this group has its own prefix."""
        self.first_prefix = key.store_prefix(0)
        """Prefix of the first generation's keys in `root_store`."""
        self.timeout = timeout
        self.generation = 0
        """Generation of the job to which `inner` belongs."""
        self.num_issued = 0
        """Number of collectives issued in this generation: equal on all members at the same collective.

        Sends, receives and coalesced batches are not counted, because members issue different numbers of them.
        """
        self._name, self._description = "", ""
        self._deferred: tuple[int, list[dist.Work]] | None = None
        """The thread that does not wait for its collectives, and where they are kept; None outside of `defer_waits`."""

    @property
    def is_closed(self) -> bool:
        """Whether the group was destroyed."""
        return self._is_closed

    @property
    @override
    def exchanges_parts(self) -> bool:
        return self._size == 2 or self.key.axis in (SHARD_NODE, SHARD_ACROSS)

    @property
    def store_prefix(self) -> str:
        """Prefix in `root_store` under which the members of this generation find each other."""
        return self.key.store_prefix(self.generation) if self.generation else self.first_prefix

    @property
    def inner(self) -> dist.ProcessGroup:
        """The library's group of this generation, or a no-op group while collectives are suppressed.

        Raises:
            CommError: the group was destroyed.
            PeerLost: the groups are broken, and this is outside a step or the group is strict; or the thread is
                pinned to another generation.
        """
        if self._is_closed:
            raise CommError(
                f"the process group {self.key.name!r} was used after it was destroyed. Models, meshes and "
                "optimizers cannot outlive their groups: build them again after init_process_group."
            )
        if runtime.pinned.generations.get(self, self.generation) != self.generation:
            raise_peer_lost(f"the group was formed again, in generation {self.generation}")
        if group_health.suppresses_collectives and (group_health.cause is None or not self.key.is_strict):
            return _NO_OP_GROUP
        if self._inner is None or group_health.is_unavailable:
            raise_peer_lost(group_health.cause)
        return self._inner.group

    @property
    def connected(self) -> InnerGroup | None:
        """The inner group, broken or not; None if there is none."""
        return self._inner

    def replace_inner(self, inner: InnerGroup, *, generation: int, global_ranks: Sequence[int]) -> InnerGroup | None:
        """Switch to another inner group, possibly of another size, and return the previous one, or None.

        All members must have finished their collectives on the previous group. The caller ends it, because peers may
        not have come this far yet.

        Args:
            inner: From `connect`, connected to the other members.
            generation: Its generation, higher than the present one.
            global_ranks: The members' ranks in the world, in order of their rank in `inner`.

        Raises:
            CommError: the generation is not higher, or the number of ranks is not the size of `inner`.
        """
        former = self._inner
        self.check_generation_increases(generation)
        if len(global_ranks) != inner.group.size():
            raise CommError(
                f"the new group {self.key.name!r} has {inner.group.size()} members, but {len(global_ranks)} global "
                "ranks were given. Pass one per member, in order of their rank in the group."
            )
        self._inner, self.generation, self.num_issued = inner, generation, 0
        self._set_members(inner.group.rank(), global_ranks)
        return former

    def check_generation_increases(self, generation: int) -> None:
        """Raise `CommError` unless `generation` is higher than the present one."""
        if generation <= self.generation:
            raise CommError(
                f"the group {self.key.name!r} is in generation {self.generation} and cannot go to generation "
                f"{generation}: numbers only grow. A process that fell behind must join the job again."
            )

    def _set_members(self, rank: int, global_ranks: Sequence[int]) -> None:
        self._rank, self._size = rank, len(global_ranks)
        dist.distributed_c10d._world.pg_group_ranks[self] = {each: index for index, each in enumerate(global_ranks)}

    def reassign(self, key: GroupKey, global_ranks: Sequence[int], rank: int) -> None:
        """Change the members and the key of the group while it has no inner group.

        Args:
            key: the new key, on the same axis.
            global_ranks: The members' ranks in the world, in order of their rank in the group.
            rank: This process's rank in the group.

        Raises:
            CommError: the group is still connected to its present members.
        """
        if self._inner is not None:
            raise CommError(f"the group {self.key.name!r} cannot change its members while it is connected to them")
        if runtime.groups.get(self.key.name) is self:
            del runtime.groups[self.key.name]
        self.key, runtime.groups[key.name] = key, self
        self._set_members(rank, global_ranks)

    def take_inner(self) -> InnerGroup | None:
        """Remove and return the inner group, which the caller must end; None if there is none."""
        inner, self._inner = self._inner, None
        return inner

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long collectives wait for their peers, in this generation and in later ones."""
        self.timeout = timeout  # set first, for the next generation: a broken group raises below
        for each in () if self._inner is None else self._inner.connections.values():
            if isinstance(each, TimedConnections):
                each.set_timeout(timeout)
        super().set_timeout(timeout)

    def shutdown_sockets(self) -> None:
        """Wake all threads that wait in a gloo collective of this group, here and at the other members."""
        if self._inner is not None:
            self._inner.sockets.shutdown()

    def _issue(
        self, kind: Collective, payload_bytes: int, call: Callable[..., dist.Work], *args: Any, **kwargs: Any
    ) -> dist.Work:
        # Every collective of every group and its Work pass through here, so this is where faults are detected.
        self.announce(kind, payload_bytes)
        inner = self._inner
        try:
            work = call(*args, **kwargs)
        except RuntimeError as error:
            if inner is not None and not inner.transport.is_connection_error(error):
                raise
            self.mark_broken(error)
            return self._issue_broken(error)
        if isinstance(work, FinishedWork):
            if group_health.on_dropped is not None and group_health.phase is Phase.DETACHED and _is_main_thread():
                is_source = kind == "broadcast" and len(args) > 1 and args[1].rootRank == self._rank
                group_health.on_dropped(kind, self.key, args[0] if args else (), is_source)
            return work
        if inner is None:  # the main thread has just released it
            return self._issue_broken(PeerLost(group_health.cause or "the groups were broken"))
        is_numbered = kind not in ("send", "recv", "coalesced")
        self.num_issued += is_numbered
        device = inner.queueing_device(args)
        handle = ResilientWork(
            work,
            inner,
            self.mark_broken,
            self.key,
            number=self.num_issued if is_numbered else 0,
            in_slices=device is None and kind not in ("send", "recv"),
            queued_on=device,
        )
        if group_health.on_set_up is not None and _is_main_thread():
            group_health.on_set_up(kind, self.key, args[0] if args else (), handle)
        if self._deferred is not None and device is None and self._deferred[0] == threading.get_ident():
            self._deferred[1].append(handle)
            return FinishedWork()
        return handle

    @contextmanager
    def defer_waits(self, works: list[dist.Work]) -> Generator[None]:
        """Context in which this thread's waits for this group's collectives in host memory return at once.

        Args:
            works: the collectives are appended; the caller waits for them later.
        """
        former, self._deferred = self._deferred, (threading.get_ident(), works)
        try:
            yield
        finally:
            self._deferred = former

    def announce(self, kind: Collective, payload_bytes: int) -> None:
        """Count a collective that is about to run, if the main thread may communicate now.

        Raises:
            LoopError: it must not.
        """
        if group_health.refusal_reason and _is_main_thread():
            group_health.before_refusal()
            if group_health.refusal_reason:
                raise LoopError(group_health.refusal_reason)
        self._traffic.add(kind, payload_bytes)

    def mark_broken(self, error: BaseException) -> None:
        """Break all groups of this process, because this one has lost a peer."""
        group_health.mark_broken(f"{self.key.name}: {transport_message(error)}", shutdown_all)

    def _issue_broken(self, error: BaseException) -> dist.Work:
        if self.key.is_strict or not group_health.suppresses_collectives:
            raise_peer_lost(group_health.cause or str(error), error)
        return _NO_OP_GROUP.barrier()

    # c10d keeps a group's name and description in its backends, and this group has none of its own.

    @property
    def group_name(self) -> str:
        """The id under which c10d and compiled code find this group."""
        return self._name

    @property
    def group_desc(self) -> str:
        """Description of the group's purpose."""
        return self._description

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._description = desc
        if self.key.group_id and desc.startswith("mesh_"):  # set by DeviceMesh; only this tells its axes apart
            self._traffic = runtime.traffic.of_axis(desc.removeprefix("mesh_"))

    def name(self) -> str:
        """The name of the c10d backend."""
        return BACKEND

    def getGroupName(self) -> str:
        """`group_name`, for C++."""
        return self._name

    def getGroupDesc(self) -> str:
        """`group_desc`, for C++."""
        return self._description

    getBackendName = name
    setGroupName = _set_group_name
    setGroupDesc = _set_group_desc

    def shutdown(self) -> None:
        """End the group and release its connections, even if other code still holds this object."""
        self._is_closed = True
        inner = self.take_inner()
        if inner is not None:
            inner.shutdown()
        if not live_groups():
            runtime.gloo_devices.clear()

    def abort(self) -> None:
        """End the group without waiting for its collectives; peers that wait in them get an error."""
        self.shutdown_sockets()
        if self._inner is not None:
            self._inner.start_abort()
            runtime.finish_aborts()
        self.shutdown()


def live_groups() -> dict[str, ResilientProcessGroup]:
    """Return all groups of this process that were not destroyed, by the names of their keys."""
    groups = sorted(runtime.groups.items())
    return {name: each for name, each in groups if isinstance(each, ResilientProcessGroup) and not each.is_closed}


def shutdown_all() -> None:
    """Shut down the sockets of every group, abort what is queued on a device, and discard the handles under way."""
    groups = list(live_groups().values())
    for group in groups:
        group.shutdown_sockets()
    for group in groups:
        inner = group.connected
        if inner is not None:
            inner.start_abort()
    runtime.discard_pending()
