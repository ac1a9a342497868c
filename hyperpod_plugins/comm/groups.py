"""Making groups: the creators that c10d calls, the groups of mesh axes, and the register of those alive."""

# The options that c10d gives to a backend's creator have no public spelling.
# pyright: reportPrivateUsage=false

import atexit
import warnings
from collections import Counter
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
from hyperpod_plugins.comm.api import WORLD, CommOptions, GroupKey, TransportName, without_key
from hyperpod_plugins.comm.health import Phase, group_health
from hyperpod_plugins.comm.process_group import BACKEND, ResilientProcessGroup, live_groups, living
from hyperpod_plugins.comm.smddp import Smddp
from hyperpod_plugins.comm.transport import Gloo, InnerSpec, Nccl, Transport, remember_transport
from hyperpod_plugins.env import WorkerEnv
from hyperpod_plugins.errors import BackendUnavailable, CommError, ConfigError

# Which library moves the bytes of a group: what the user may ask for, and what serves it.

SMDDP = Smddp()
IN_HOST_MEMORY: Transport = Gloo()
AUTOMATIC: tuple[Transport, ...] = (Nccl(), IN_HOST_MEMORY)
TRANSPORTS: tuple[Transport, ...] = (SMDDP, *AUTOMATIC)


def choose_transport(device_type: str, preferred: TransportName = "auto", *, strict: bool = False) -> Transport:
    """Return the library asked for, or the first of `AUTOMATIC` that serves the device.

    smddp does what nccl does, only faster: a job that asks for it and cannot have it goes on without, after one
    warning. A job that asks for nccl or gloo means it.

    Args:
        device_type: `cpu` or `cuda`.
        preferred: A name, or `auto`.
        strict: Raise also where smddp was asked for.

    Raises:
        BackendUnavailable: the one asked for, or every one, refuses; the message has all reasons.
    """
    candidates = [transport for transport in AUTOMATIC if transport.why_not(device_type) is None]
    if preferred == "auto" and candidates:
        return candidates[0]
    asked = [transport for transport in TRANSPORTS if transport.name == preferred]
    for transport in asked:  # smddp is imported here, so only for those who ask for it
        reason = transport.why_not(device_type)
        if reason is None:
            return transport
        if transport is SMDDP and not strict and candidates:
            substitute = candidates[0]
            _warn_once(f"smddp was asked for, but {reason}. Collectives use {substitute.name} instead.")
            return substitute
    raise BackendUnavailable(_refused(device_type, preferred))


def transport_for_group(device_type: str, options: CommOptions, group_size: int, world_size: int) -> Transport:
    """Like `choose_transport`, for a group of which the chosen library must also serve the size.

    Raises:
        BackendUnavailable: see `choose_transport`.
    """
    chosen = choose_transport(device_type, options.transport, strict=options.strict)
    if chosen.why_not_group(group_size, world_size) is None:
        return chosen
    return choose_transport(device_type)


def _refused(device_type: str, preferred: str) -> str:
    refusals = {transport.name: transport.why_not(device_type) for transport in TRANSPORTS}
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals.items() if reason is not None)
    usable = [name for name, reason in refusals.items() if reason is None]
    advice = f"Ask for {' or '.join(usable)}, or for 'auto'" if usable else "Install a torch that has gloo or nccl"
    return f"transport {preferred!r} cannot serve {device_type} tensors here ({reasons}). {advice}."


@cache
def _warn_once(message: str) -> None:
    """Once in a job: on the first rank."""
    if WorkerEnv.from_environ().global_rank == 0:
        warnings.warn(message, UserWarning, stacklevel=3)


_uses: Counter[str] = Counter()  # of each role, in this process


def register() -> None:
    """Make `hyperpod` a backend of c10d, and `smddp` one where its library is absent; more calls change nothing."""
    register_backends(distributed_c10d, {BACKEND: create_group, "smddp": create_smddp_group})


def join_world(options: CommOptions, *, rank: int, world_size: int, timeout_s: float) -> None:
    """Join the default process group of the backend `hyperpod`; a process that no launcher started is one by itself.

    Args:
        options: collective library to use, and whether a fallback is allowed.
        rank: of this process.
        world_size: number of ranks.
        timeout_s: seconds after which a collective that does not complete fails.
    """
    register()  # in case `import hyperpod_plugins` came before torch, with the entry point switched off
    is_alone = world_size == 1 and env.JobEnv.from_environ() is None
    dist.init_process_group(
        BACKEND,
        store=HashStore() if is_alone else None,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
        pg_options=options,
    )


def new_axis_group(role: GroupKey, global_ranks: Sequence[int]) -> ResilientProcessGroup:
    """Return the group of a role, made now or living already; only its members call this.

    Every axis needs its own group, also one of a single member and one that spans the world: axes change their
    sizes independently, and so cannot share one. Its collectives have the timeout of the default group.

    Args:
        role: What the group is for; two roles with the same ranks are two groups.
        global_ranks: The members' ranks in the world.

    Raises:
        CommError: the default group is not ours, this rank is not a member, or the role is taken by other ranks.
    """
    members, world = sorted(global_ranks), _default_group()
    if not isinstance(world, ResilientProcessGroup):
        raise CommError(
            f"the axis group {role.name!r} needs a default group of the backend {BACKEND!r}. "
            f'Call torch.distributed.init_process_group("{BACKEND}") first.'
        )
    if dist.get_rank() not in members:
        raise CommError(
            f"rank {dist.get_rank()} asked for the group {role.name!r} of ranks {members}: it is no member."
        )
    living = live_groups().get(role.name)
    if living is not None:
        present = dist.get_process_group_ranks(living)
        if present != members:
            raise CommError(
                f"the group {role.name!r} already exists with ranks {present}, so it cannot be made with ranks "
                f"{members}. Destroy it first, or give the new one another role."
            )
        return living
    group = dist.new_group(
        members,
        timeout=world.timeout,
        backend=BACKEND,
        pg_options=role,
        use_local_synchronization=True,
        group_desc=role.name,
    )
    assert isinstance(group, ResilientProcessGroup)
    return group


def inner_spec(
    group: ResilientProcessGroup,
    *,
    generation: int,
    rank: int,
    global_ranks: Sequence[int],
    timeout: timedelta | None = None,
) -> InnerSpec:
    """How one member connects to a later generation of a group: by role and generation alone, so newcomers agree."""
    return InnerSpec(
        store=PrefixStore(group.role.store_prefix(generation), group.root_store),
        rank=rank,
        size=len(global_ranks),
        timeout=timeout or group.timeout,
        global_ranks=tuple(global_ranks),
        name=group.role.short_name(generation),
    )


def connect(spec: InnerSpec, options: CommOptions, world_size: int, role: GroupKey) -> dist.ProcessGroup:
    """Connect to the other members by the library that serves this machine and this group.

    Groups for threads beside the step work in host memory, and so need no connections between devices.

    Raises:
        BackendUnavailable: see `choose_transport`.
    """
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    transport = IN_HOST_MEMORY if role.is_strict else transport_for_group(device_type, options, spec.size, world_size)
    with sockets.recording(spec.store) as found:
        inner = transport.create(spec)
    sockets.keep(inner, found)
    remember_transport(inner, transport)
    return inner


def create_group(c10d: _DistributedBackendOptions, given: object) -> ResilientProcessGroup:
    """What c10d calls for `backend="hyperpod"`; `given` is the caller's `pg_options`."""
    if given is not None and not isinstance(given, CommOptions | GroupKey):
        raise ConfigError(
            f"the backend {BACKEND!r} takes pg_options=CommOptions(...), but was given {type(given).__name__}. "
            "Leave pg_options out to let it choose; options of nccl or gloo are not passed on."
        )
    world = _default_group()
    role = WORLD if world is None else given if isinstance(given, GroupKey) else without_key(c10d.group_id)
    options, root_store = CommOptions(), c10d.store
    if isinstance(world, ResilientProcessGroup):
        options = world.options
        root_store = world.root_store if isinstance(given, GroupKey) else root_store
    if isinstance(given, CommOptions):
        options = given
    _uses[role.name] += 1
    first_prefix = _first_prefix(role, _uses[role.name])
    spec = InnerSpec(
        store=PrefixStore(first_prefix, root_store),
        rank=c10d.group_rank,
        size=c10d.group_size,
        timeout=c10d.timeout,
        global_ranks=tuple(c10d.global_ranks_in_group or range(c10d.group_size)),
        name=role.short_name(generation=0),
    )
    is_detached = group_health.phase is Phase.DETACHED  # the others are connected already, and will be again
    world_size = c10d.group_size if world is None else world.size()
    group = ResilientProcessGroup(
        None if is_detached else connect(spec, options, world_size, role),
        rank=c10d.group_rank,
        size=c10d.group_size,
        role=role,
        options=options,
        root_store=root_store,
        timeout=c10d.timeout,
    )
    group.first_prefix = first_prefix
    living[role.name] = group
    _destroy_at_exit()
    return group


def _first_prefix(role: GroupKey, use: int) -> str:
    """Where the founding members meet; apart from the keys that an earlier group of the same role left in the store."""
    return role.store_prefix(0) if use == 1 else f"{role.store_prefix(0)}+{use}"


def create_smddp_group(c10d: _DistributedBackendOptions, given: object) -> Backend | dist.ProcessGroup:
    """What c10d calls for `backend="smddp"` until the real library is imported: its group where that can run here.

    Raises:
        BackendUnavailable: it cannot, and `given` is `CommOptions(strict=True)`.
    """
    if smddp.import_refusal() is None and smddp.instance_refusal(env.instance_type()) is None:
        return smddp.library_group(c10d)
    options = given if isinstance(given, CommOptions) else CommOptions()
    return create_group(c10d, replace(options, transport="smddp"))


def _default_group() -> dist.ProcessGroup | None:
    return dist.group.WORLD if dist.is_initialized() else None


@cache
def _destroy_at_exit() -> None:
    """Arrange, once, that a process does not end with living groups: their threads would abort it."""
    atexit.register(lambda: dist.destroy_process_group() if dist.is_initialized() else None)
