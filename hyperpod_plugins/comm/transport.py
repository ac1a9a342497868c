"""Transports: the collective libraries under a group; and inner groups, which are assembled from their backends."""

# A `ProcessGroup` can be assembled from backends only through private methods.
# pyright: reportPrivateUsage=false

import ctypes
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, cast, runtime_checkable

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, PrefixStore, Store

from hyperpod_plugins.comm.runtime import runtime
from hyperpod_plugins.comm.sockets import GroupSockets

_RELEASE_TIMEOUT_S = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerSpec:
    """Everything needed to connect one member to an inner group."""

    store: Store
    """Store that only the members of this group use, in this generation."""
    rank: int
    """Rank in the group."""
    size: int
    """Number of members."""
    timeout: timedelta
    """Longest wait of a collective for its peers."""
    global_ranks: tuple[int, ...]
    """The members' ranks in the world, in order of their rank in the group."""
    name: str
    """Name in logs and in the flight recorder."""


class Transport(Protocol):
    """A collective library that can serve a group."""

    @property
    def name(self) -> str:
        """Name by which users request it."""
        ...

    def unsupported_reason(self, device_type: str) -> str | None:
        """Return why it cannot serve tensors on this type of device here, or None if it can."""
        ...

    def unsupported_group_reason(self, group_size: int, world_size: int) -> str | None:
        """Return why it cannot serve a group of this size, or None if it can."""
        ...

    def create(self, spec: InnerSpec) -> dist.ProcessGroup:
        """Connect to the other members and return a whole group, which also serves CPU tensors."""
        ...

    def runs_on_device_queue(self, device_type: str) -> bool:
        """Whether collectives of tensors on this type of device are queued there.

        Then `wait` returns at once and raises no errors, and a collective that waits for a lost peer ends only when
        its group is aborted.
        """
        ...

    def abort(self, inner: "InnerGroup") -> None:
        """End the queued collectives of a group that `create` made. May take long; called in a separate thread."""
        ...

    def is_connection_error(self, error: BaseException) -> bool:
        """Whether a collective, or `create`, failed because a peer was lost, rather than because of a wrong call.

        The first is repaired; the second is a bug in the program, and is raised.
        """
        ...


@runtime_checkable
class TimedConnections(Protocol):
    """Connections whose longest wait for a peer can be changed while they are open."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the longest wait from now on."""
        ...


class InnerGroup:
    """What one generation of a group is connected with: the library's group, its sockets, and its unfinished handles.

    Any thread may call the methods.
    """

    def __init__(
        self, group: dist.ProcessGroup, transport: Transport, group_sockets: GroupSockets | None = None
    ) -> None:
        self.group = group
        """The group that `transport` has created, broken or not."""
        self.transport = transport
        self.sockets = group_sockets or GroupSockets()
        """Sockets that a break shuts down."""
        self.connections: dict[str, object] = {}
        """Further connections of the members, by name: those of the commit vote and of channels."""
        self._lock = threading.Lock()
        self._unfinished: list[dist.Work] = []
        self._is_released = self._is_aborted = False

    def queueing_device(self, arguments: Sequence[Any]) -> torch.device | None:
        """Return the device on which a collective with these arguments is queued: see `Transport.runs_on_device_queue`.

        A barrier, which has no tensors, is queued if the group serves such a device. None if the caller itself waits.
        """
        for argument in arguments:
            while isinstance(argument, list | tuple) and argument:
                argument = argument[0]
            if isinstance(argument, torch.Tensor):
                return argument.device if self.transport.runs_on_device_queue(argument.device.type) else None
        devices = self.group._device_types
        return next((device for device in devices if self.transport.runs_on_device_queue(device.type)), None)

    def start_abort(self) -> None:
        """Abort what is queued on a device, once and in a separate thread; see [Note: aborts]. Returns at once."""
        if not any(self.transport.runs_on_device_queue(device.type) for device in self.group._device_types):
            return
        abort = threading.Thread(target=self.transport.abort, args=(self,), name="hyperpod_abort", daemon=True)
        with runtime.aborts_lock:
            if not self._is_aborted:
                self._is_aborted = True
                abort.start()
                runtime.aborts.append(abort)

    def shutdown(self) -> None:
        """End an intact group."""
        self.sockets.close()
        self.group.shutdown()
        self.release()

    def discard(self) -> None:
        """End a group that is broken, or whose connection was given up."""
        self.start_abort()  # a group connected in a failed attempt has not been aborted by a break
        self.sockets.close()
        self.release()

    def release(self) -> None:
        """Let go of the library's group, which will not be used again.

        If one of its collectives still sleeps (see [Note: slices]), both are kept until its timeout ends it, because
        destroying them would block.
        """
        with self._lock:
            self._is_released = True
            works, self._unfinished = self._unfinished, []
        deadline_s = time.monotonic() + _RELEASE_TIMEOUT_S
        while not _have_ended(works):
            if time.monotonic() > deadline_s:
                _keep_alive_until_done(self.group, works)
                return
            time.sleep(0.002)

    def release_work(self, work: dist.Work) -> None:
        """Stop waiting for a collective that has not ended; `release` is called before or after."""
        with self._lock:
            if not self._is_released:
                self._unfinished.append(work)
                return
        _keep_alive_until_done(self.group, [work])


def _keep_alive_until_done(group: dist.ProcessGroup, works: list[dist.Work]) -> None:
    for thing in (group, *works):  # they must not be destroyed, not even at process exit
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
    threading.Thread(target=_await_ends, args=(group, works), name="hyperpod_asleep", daemon=True).start()


def _await_ends(group: dist.ProcessGroup, works: list[dist.Work]) -> None:
    while not _have_ended(works):
        time.sleep(1.0)
    for thing in (group, *works):
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(thing))


def _have_ended(works: list[dist.Work]) -> bool:
    return all(work.is_completed() for work in works)


_CPP_STACK = "\nException raised from"  # follows the message if TORCH_SHOW_CPP_STACKTRACES is set
_ANY_LIBRARY = (
    r"[Cc]onnection (closed|reset|refused|was likely closed)|[Bb]roken pipe|No route to host|Network is unreachable"
    r"|[Tt]imed out|[Ww]ait timeout"
)
_GLOO = re.compile(
    r"\[\S*gloo/transport/|\[enforce fail at \S*gloo/transport/tcp/(?!device)(?!.* CONNECTED\. 1 vs )"
    rf"|Application timeout caused pair closure|Gloo connectFullMesh failed|{_ANY_LIBRARY}"
)
"""gloo's transport names its source file in what it throws: lost connections, or a transfer from a rank to itself.

A rank's pair with itself is never connected and stays in the first of the states, 1. Its message names no peer,
`[none]`, or whatever was in that memory before, which may look like an address.
"""
_NCCL = re.compile(r"NCCL (communicator|error)|ncclRemoteError|Watchdog caught collective operation timeout")


def _is_lost_peer(error: BaseException, *messages: re.Pattern[str]) -> bool:
    if isinstance(error, dist.DistError):
        return True
    message = str(error).partition(_CPP_STACK)[0]
    return type(error) is RuntimeError and any(each.search(message) is not None for each in messages)


def transport_message(error: BaseException) -> str:
    """Return the first line of a library's message, without its source file and its advice."""
    line = str(error).partition("\n")[0].partition(" This is typically caused")[0]
    return re.sub(r"^\[\S+\]\s*", "", line)


class Gloo:
    """gloo: TCP on any machine."""

    name = "gloo"

    def unsupported_reason(self, device_type: str) -> str | None:
        """See `Transport`."""
        if not dist.is_gloo_available():
            return "this build of torch has no gloo"
        if device_type not in {"cpu", "cuda"}:
            return f"it serves cpu and cuda tensors only, not {device_type}"
        return None

    def unsupported_group_reason(self, group_size: int, world_size: int) -> str | None:
        """See `Transport`."""
        return None

    def create(self, spec: InnerSpec) -> dist.ProcessGroup:
        """See `Transport`."""
        backend = gloo_backend(spec)
        devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        return assemble_group(spec, {device: ("gloo", backend) for device in devices})

    def runs_on_device_queue(self, device_type: str) -> bool:
        """See `Transport`."""
        return False

    def abort(self, inner: InnerGroup) -> None:
        """Does nothing: shutting down the sockets is enough."""

    def is_connection_error(self, error: BaseException) -> bool:
        """See `Transport`."""
        return _is_lost_peer(error, _GLOO)


class Nccl:
    """NVIDIA's library for CUDA tensors, with gloo beside it for CPU tensors, as in `cpu:gloo,cuda:nccl`.

    [Note: eager connections] By default nccl connects in the first collective. If a peer is lost before that, the
    step's thread waits for it in the store, and nothing wakes it. So a group is connected when it is created, in the
    thread of `Reconfiguration`, which can be abandoned.
    """

    name = "nccl"

    def unsupported_reason(self, device_type: str) -> str | None:
        """See `Transport`."""
        if device_type != "cuda":
            return f"it serves cuda tensors only, not {device_type}"
        if not dist.is_nccl_available():
            return "this build of torch has no nccl"
        if not torch.cuda.is_available():
            return "torch finds no usable GPU"
        return None

    def unsupported_group_reason(self, group_size: int, world_size: int) -> str | None:
        """See `Transport`."""
        return None

    def create(self, spec: InnerSpec) -> dist.ProcessGroup:
        """See `Transport`."""
        from torch.distributed.distributed_c10d import ProcessGroupNCCL  # missing in builds without CUDA

        options = ProcessGroupNCCL.Options()
        options._timeout = spec.timeout
        options.global_ranks_in_group = list(spec.global_ranks)
        options.group_name = spec.name  # pyright: ignore[reportAttributeAccessIssue]
        backend = ProcessGroupNCCL(PrefixStore("cuda", spec.store), spec.rank, spec.size, options)
        backend._set_sequence_number_for_group()
        backend.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))
        return assemble_group(spec, {"cuda": ("nccl", backend), "cpu": ("gloo", gloo_backend(spec))})

    def runs_on_device_queue(self, device_type: str) -> bool:
        """See `Transport`."""
        return device_type == "cuda"

    def abort(self, inner: InnerGroup) -> None:
        """See `Transport`."""
        abort_cuda_backend(inner.group)

    def is_connection_error(self, error: BaseException) -> bool:
        """See `Transport`."""
        return _is_lost_peer(error, _NCCL, _GLOO)


def gloo_backend(spec: InnerSpec) -> Backend:
    """Connect a bare gloo backend, which is not a whole group yet.

    [Note: devices] Each gloo device has a thread that wakes up a hundred times a second. A group of one member, such
    as that of the tensor axis without tensor parallelism, sends nothing, so it shares the device of another group.
    Larger groups have their own, because `sockets.recording` assigns sockets to groups by the time at which they
    appear.
    """
    store, gloo = PrefixStore("cpu", spec.store), cast("Any", dist.ProcessGroupGloo)
    if spec.size == 1 and runtime.gloo_devices:
        options = gloo._Options()
        options._devices, options._timeout = runtime.gloo_devices, spec.timeout
        backend = gloo(store, spec.rank, spec.size, options)
    else:
        backend = gloo(store, spec.rank, spec.size, timeout=spec.timeout)
        runtime.gloo_devices[:] = backend.options._devices
    backend.options.global_ranks_in_group = list(spec.global_ranks)
    backend.options.group_name = spec.name  # pyright: ignore[reportAttributeAccessIssue]
    backend._set_sequence_number_for_group()
    return backend


def abort_cuda_backend(group: dist.ProcessGroup) -> None:
    """End the kernels of a group that wait on the GPU, and its watchdog.

    [Note: aborts] `ProcessGroupNCCL.abort` runs in a thread of its own and waits for it, so nccl's group calls, which
    are per thread, do not apply to it. An abort can also wait for kernels of another communicator that are
    queued before its own. So each group is aborted in a separate thread, all at the same time.
    """
    backend: Any = group._get_backend(torch.device("cuda"))
    backend.abort()


def assemble_group(spec: InnerSpec, backends: Mapping[str, tuple[str, Backend]]) -> dist.ProcessGroup:
    """Assemble a `ProcessGroup` from one `(name, backend)` per device type; the first is the default.

    A bare backend lacks the coalesced collectives, which functional collectives and DTensor use.
    """
    group = dist.ProcessGroup(spec.store, spec.rank, spec.size)
    types = {device: dist.Backend.backend_type_map[name] for device, (name, _) in backends.items()}
    group._set_default_backend(next(iter(types.values())))
    for device, (_, backend) in backends.items():
        group._register_backend(torch.device(device), types[device], backend)
    group._set_group_name(spec.name)  # pyright: ignore[reportArgumentType]: torch 2.10 has no GroupName
    return group
