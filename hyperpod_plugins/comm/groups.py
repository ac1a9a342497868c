"""Making groups: the creators that c10d calls, the groups of mesh axes, and the register of those alive."""

# The options that c10d gives to a backend's creator have no public spelling.
# pyright: reportPrivateUsage=false

import atexit
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
from hyperpod_plugins.comm import smddp, wires
from hyperpod_plugins.comm.backend import IN_HOST_MEMORY, transport_for_group
from hyperpod_plugins.comm.breaker import Phase, breaker
from hyperpod_plugins.comm.resilient import BACKEND, ResilientProcessGroup, live_groups, living
from hyperpod_plugins.comm.roles import WORLD, CommOptions, GroupRole, without_role
from hyperpod_plugins.comm.transports import InnerSpec, remember_transport
from hyperpod_plugins.errors import CommError, ConfigError

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


def new_axis_group(role: GroupRole, global_ranks: Sequence[int]) -> ResilientProcessGroup:
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


def connect(spec: InnerSpec, options: CommOptions, world_size: int, role: GroupRole) -> dist.ProcessGroup:
    """Connect to the other members by the library that serves this machine and this group.

    Groups for threads beside the step work in host memory, and so need no connections between devices.

    Raises:
        BackendUnavailable: see `choose_transport`.
    """
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    transport = IN_HOST_MEMORY if role.is_strict else transport_for_group(device_type, options, spec.size, world_size)
    with wires.recording(spec.store) as found:
        inner = transport.create(spec)
    wires.keep(inner, found)
    remember_transport(inner, transport)
    return inner


def create_group(c10d: _DistributedBackendOptions, given: object) -> ResilientProcessGroup:
    """What c10d calls for `backend="hyperpod"`; `given` is the caller's `pg_options`."""
    if given is not None and not isinstance(given, CommOptions | GroupRole):
        raise ConfigError(
            f"the backend {BACKEND!r} takes pg_options=CommOptions(...), but was given {type(given).__name__}. "
            "Leave pg_options out to let it choose; options of nccl or gloo are not passed on."
        )
    world = _default_group()
    role = WORLD if world is None else given if isinstance(given, GroupRole) else without_role(c10d.group_id)
    options, root_store = CommOptions(), c10d.store
    if isinstance(world, ResilientProcessGroup):
        options = world.options
        root_store = world.root_store if isinstance(given, GroupRole) else root_store
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
    is_detached = breaker.phase is Phase.DETACHED  # the others are connected already, and will be again
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


def _first_prefix(role: GroupRole, use: int) -> str:
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
