"""Transports: the collective libraries under a group, and how an inner group is assembled from their backends."""

# A `ProcessGroup` can be assembled from backends only through private methods.
# pyright: reportPrivateUsage=false

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, PrefixStore, Store

_latest_devices: list[Any] = []
_transports: "WeakKeyDictionary[dist.ProcessGroup, Transport]" = WeakKeyDictionary()


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

    def abort(self, group: dist.ProcessGroup) -> None:
        """End the queued collectives of a group that `create` made. May take long; called in a separate thread."""
        ...


def remember_transport(group: dist.ProcessGroup, transport: Transport) -> None:
    """Record which transport made an inner group."""
    _transports[group] = transport


def transport_of(group: dist.ProcessGroup) -> Transport | None:
    """Return the transport that made an inner group; None for a no-op group."""
    return _transports.get(group)


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

    def abort(self, group: dist.ProcessGroup) -> None:
        """Does nothing: shutting down the sockets is enough."""


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

    def abort(self, group: dist.ProcessGroup) -> None:
        """See `Transport`."""
        abort_cuda_backend(group)


def gloo_backend(spec: InnerSpec) -> Backend:
    """Connect a bare gloo backend, which is not a whole group yet.

    [Note: devices] Each gloo device has a thread that wakes up a hundred times a second. A group of one member, such
    as that of the tensor axis without tensor parallelism, sends nothing, so it shares the device of another group.
    Larger groups have their own, because `sockets.recording` assigns sockets to groups by the time at which they
    appear.
    """
    store, gloo = PrefixStore("cpu", spec.store), cast("Any", dist.ProcessGroupGloo)
    if spec.size == 1 and _latest_devices:
        options = gloo._Options()
        options._devices, options._timeout = _latest_devices, spec.timeout
        backend = gloo(store, spec.rank, spec.size, options)
    else:
        backend = gloo(store, spec.rank, spec.size, timeout=spec.timeout)
        _latest_devices[:] = backend.options._devices
    backend.options.global_ranks_in_group = list(spec.global_ranks)
    backend.options.group_name = spec.name  # pyright: ignore[reportAttributeAccessIssue]
    backend._set_sequence_number_for_group()
    return backend


def abort_cuda_backend(group: dist.ProcessGroup) -> None:
    """End the kernels of a group that wait on the GPU, and its watchdog.

    [Note: aborts] `ProcessGroupNCCL.abort` runs in a thread of its own and waits for it, so nccl's group calls, which
    are per thread, do not apply to it. An abort can also wait for kernels of another communicator that are
    queued before its own. So each group is aborted in a separate thread, all at the same time
    (`process_group.start_aborts`).
    """
    backend: Any = group._get_backend(torch.device("cuda"))
    backend.abort()


def release_gloo_device() -> None:
    """Release the gloo device kept for groups of one member; called when no group is left."""
    _latest_devices.clear()


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
