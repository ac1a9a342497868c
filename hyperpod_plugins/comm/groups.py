"""Creating groups: the choice of transport, the backend creators that c10d calls, and the groups of mesh axes."""

# The options that c10d passes to a backend's creator have no public name.
# pyright: reportPrivateUsage=false

import atexit
import warnings
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, HashStore, PrefixStore, _DistributedBackendOptions
from torch.distributed import distributed_c10d

from hyperpod_plugins import env
from hyperpod_plugins._registration import register_backends
from hyperpod_plugins.comm import smddp, sockets
from hyperpod_plugins.comm.health import Phase
from hyperpod_plugins.comm.options import WORLD, CommOptions, GroupKey, TransportName, key_of_unnamed_group
from hyperpod_plugins.comm.process_group import BACKEND, ResilientProcessGroup, live_groups
from hyperpod_plugins.comm.runtime import runtime
from hyperpod_plugins.comm.smddp import Smddp
from hyperpod_plugins.comm.transport import Gloo, InnerGroup, InnerSpec, Nccl, Transport
from hyperpod_plugins.env import WorkerEnv
from hyperpod_plugins.errors import BackendUnavailable, CommError, ConfigError

SMDDP = Smddp()
IN_HOST_MEMORY: Transport = Gloo()
AUTOMATIC: tuple[Transport, ...] = (Nccl(), IN_HOST_MEMORY)
TRANSPORTS: tuple[Transport, ...] = (SMDDP, *AUTOMATIC)


def choose_transport(device_type: str, preferred: TransportName = "auto", *, strict: bool = False) -> Transport:
    """Return the requested transport, or for `auto` the first of `AUTOMATIC` that serves the device.

    smddp does what nccl does, only faster, so a job that requests it where it is not available falls back to another
    transport after one warning. Requests for nccl and gloo have no fallback.

    Args:
        device_type: `cpu` or `cuda`.
        preferred: Name of a transport, or `auto`.
        strict: Raise instead of falling back from smddp.

    Raises:
        BackendUnavailable: the requested transport, or for `auto` every one, is unavailable; the message lists all
            reasons.
    """
    candidates = [transport for transport in AUTOMATIC if transport.unsupported_reason(device_type) is None]
    if preferred == "auto" and candidates:
        return candidates[0]
    asked = [transport for transport in TRANSPORTS if transport.name == preferred]
    for transport in asked:  # imports smddp, so only if it was requested
        reason = transport.unsupported_reason(device_type)
        if reason is None:
            return transport
        if transport is SMDDP and not strict and candidates:
            substitute = candidates[0]
            _warn_once(f"smddp was asked for, but {reason}. Collectives use {substitute.name} instead.")
            return substitute
    raise BackendUnavailable(_unavailable_message(device_type, preferred))


def transport_for_group(device_type: str, options: CommOptions, group_size: int, world_size: int) -> Transport:
    """Like `choose_transport`, but fall back to `auto` if the chosen transport cannot serve a group of this size.

    Raises:
        BackendUnavailable: see `choose_transport`.
    """
    chosen = choose_transport(device_type, options.transport, strict=options.strict)
    if chosen.unsupported_group_reason(group_size, world_size) is None:
        return chosen
    return choose_transport(device_type)


def _unavailable_message(device_type: str, preferred: str) -> str:
    refusals = {transport.name: transport.unsupported_reason(device_type) for transport in TRANSPORTS}
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals.items() if reason is not None)
    usable = [name for name, reason in refusals.items() if reason is None]
    advice = f"Ask for {' or '.join(usable)}, or for 'auto'" if usable else "Install a torch build with gloo or nccl"
    return f"transport {preferred!r} cannot serve {device_type} tensors here ({reasons}). {advice}."


@cache
def _warn_once(message: str) -> None:
    """Warn once per job, on rank 0."""
    if WorkerEnv.from_environ().global_rank == 0:
        warnings.warn(message, UserWarning, stacklevel=3)


def register() -> None:
    """Register the c10d backend `hyperpod`, and `smddp` if its library is absent; further calls have no effect."""
    register_backends(distributed_c10d, {BACKEND: create_group, "smddp": create_smddp_group})


def has_joined() -> bool:
    """Whether this process has joined a default group, of the `hyperpod` backend.

    Raises:
        ConfigError: the default group has another backend.
    """
    if dist.is_initialized() and not isinstance(dist.group.WORLD, ResilientProcessGroup):
        raise ConfigError(
            f"the process group was initialised with the backend {dist.get_backend()!r}, which cannot lose members. "
            "Create the Session, or the plugin's Accelerator, before anything else joins a group, as Accelerate's "
            f'`PartialState()` and its trackers do; or use torch.distributed.init_process_group("{BACKEND}").'
        )
    return dist.is_initialized()


def join_world(options: CommOptions, *, rank: int, world_size: int, timeout_s: float) -> None:
    """Initialize the default group of the `hyperpod` backend; without a launcher, form a single-process world.

    Args:
        options: transport to use, and whether a fallback is allowed.
        rank: rank of this process.
        world_size: number of ranks.
        timeout_s: seconds after which an incomplete collective fails.
    """
    register()  # if `import hyperpod_plugins` came before torch and the entry point is disabled
    is_alone = world_size == 1 and env.JobEnv.from_environ() is None
    dist.init_process_group(
        BACKEND,
        store=HashStore() if is_alone else None,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
        pg_options=options,
    )


def new_axis_group(key: GroupKey, global_ranks: Sequence[int]) -> ResilientProcessGroup:
    """Return the group with a given key, creating it if there is none; only its members call this.

    Every axis needs its own group, even if the group has a single member or spans the world: axes change size
    independently, so they cannot share a group. Its collectives have the timeout of the default group.

    Args:
        key: of the group; two keys with the same ranks are two groups.
        global_ranks: The members' ranks in the world.

    Raises:
        CommError: the default group is not of the `hyperpod` backend, this rank is not a member, or a group of other
            ranks has this key.
    """
    members, world = sorted(global_ranks), default_group()
    if not isinstance(world, ResilientProcessGroup):
        raise CommError(
            f"the axis group {key.name!r} needs a default group of the backend {BACKEND!r}. "
            f'Call torch.distributed.init_process_group("{BACKEND}") first.'
        )
    if dist.get_rank() not in members:
        raise CommError(
            f"rank {dist.get_rank()} requested the group {key.name!r} of ranks {members}, but is not a member of it."
        )
    living = live_groups().get(key.name)
    if living is not None:
        present = dist.get_process_group_ranks(living)
        if present != members:
            raise CommError(
                f"the group {key.name!r} already exists with ranks {present}, so it cannot be made with ranks "
                f"{members}. Destroy it first, or give the new one another key."
            )
        return living
    group = dist.new_group(
        members,
        timeout=world.timeout,
        backend=BACKEND,
        pg_options=key,
        use_local_synchronization=True,
        group_desc=key.name,
    )
    assert isinstance(group, ResilientProcessGroup)
    return group


def spec_for_generation(
    group: ResilientProcessGroup,
    *,
    generation: int,
    rank: int,
    global_ranks: Sequence[int],
    timeout: timedelta | None = None,
) -> InnerSpec:
    """Return how to connect to a later generation: it depends on key and generation alone, so joiners agree."""
    return InnerSpec(
        store=PrefixStore(group.key.store_prefix(generation), group.root_store),
        rank=rank,
        size=len(global_ranks),
        timeout=timeout or group.timeout,
        global_ranks=tuple(global_ranks),
        name=group.key.short_name(generation),
    )


def connect(spec: InnerSpec, options: CommOptions, world_size: int, key: GroupKey) -> InnerGroup:
    """Connect to the other members over the transport that serves this machine and this group.

    Strict groups, which background threads use, work in host memory and always use gloo.

    Raises:
        BackendUnavailable: see `choose_transport`.
    """
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    transport = IN_HOST_MEMORY if key.is_strict else transport_for_group(device_type, options, spec.size, world_size)
    with sockets.recording(spec.store) as found:
        group = transport.create(spec)
    return InnerGroup(group, transport, found)


def is_connection_error(error: BaseException) -> bool:
    """Whether `connect` failed because a peer was lost, with any transport."""
    return any(transport.is_connection_error(error) for transport in TRANSPORTS)


def create_group(c10d: _DistributedBackendOptions, given: object) -> ResilientProcessGroup:
    """Backend creator that c10d calls for `backend="hyperpod"`; `given` is the caller's `pg_options`."""
    if given is not None and not isinstance(given, CommOptions | GroupKey):
        raise ConfigError(
            f"the backend {BACKEND!r} takes pg_options=CommOptions(...), but was given {type(given).__name__}. "
            "Omit pg_options for the defaults; options of nccl or gloo are not passed on."
        )
    world = default_group()
    key = WORLD if world is None else given if isinstance(given, GroupKey) else key_of_unnamed_group(c10d.group_id)
    options, root_store = CommOptions(), c10d.store
    if isinstance(world, ResilientProcessGroup):
        options = world.options
        root_store = world.root_store if isinstance(given, GroupKey) else root_store
    if isinstance(given, CommOptions):
        options = given
    runtime.num_created[key.name] += 1
    first_prefix = _first_prefix(key, runtime.num_created[key.name])
    spec = InnerSpec(
        store=PrefixStore(first_prefix, root_store),
        rank=c10d.group_rank,
        size=c10d.group_size,
        timeout=c10d.timeout,
        global_ranks=tuple(c10d.global_ranks_in_group or range(c10d.group_size)),
        name=key.short_name(generation=0),
    )
    is_detached = runtime.health.phase is Phase.DETACHED  # `Reconfiguration` connects it together with the others
    world_size = c10d.group_size if world is None else world.size()
    group = ResilientProcessGroup(
        None if is_detached else connect(spec, options, world_size, key),
        rank=c10d.group_rank,
        size=c10d.group_size,
        key=key,
        options=options,
        root_store=root_store,
        timeout=c10d.timeout,
    )
    group.first_prefix = first_prefix
    runtime.groups[key.name] = group
    _destroy_at_exit()
    return group


def _first_prefix(key: GroupKey, use: int) -> str:
    """Store prefix of generation 0; distinct from that of an earlier group with the same key."""
    return key.store_prefix(0) if use == 1 else f"{key.store_prefix(0)}+{use}"


def create_smddp_group(c10d: _DistributedBackendOptions, given: object) -> Backend | dist.ProcessGroup:
    """Backend creator that c10d calls for `backend="smddp"` until the smddp library is imported.

    Returns smddp's own group if the library runs here, and otherwise a `hyperpod` group that falls back from smddp.

    Raises:
        BackendUnavailable: the library does not run here, and `given` is `CommOptions(strict=True)`.
    """
    if smddp.import_error() is None and smddp.unsupported_instance_reason(env.instance_type()) is None:
        return smddp.library_group(c10d)
    options = given if isinstance(given, CommOptions) else CommOptions()
    return create_group(c10d, replace(options, transport="smddp"))


def default_group() -> dist.ProcessGroup | None:
    """Return the default process group, or None if `torch.distributed` is not initialized."""
    return dist.group.WORLD if dist.is_initialized() else None


@cache
def _destroy_at_exit() -> None:
    """Destroy all groups when the process exits; otherwise their threads would abort it."""
    atexit.register(lambda: dist.destroy_process_group() if dist.is_initialized() else None)
