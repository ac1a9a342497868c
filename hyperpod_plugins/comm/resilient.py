"""The group that everybody holds, over an inner group that can be replaced."""

# c10d keeps the ranks of every group in a private table and offers no way to change them. Not every torch that we
# support has its type for the names of groups.
# pyright: reportPrivateUsage=false, reportIncompatibleMethodOverride=false

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from hyperpod_plugins.comm.backend import CommOptions
from hyperpod_plugins.comm.delegating import DelegatingGroup
from hyperpod_plugins.comm.roles import GroupRole
from hyperpod_plugins.comm.traffic import Collective, counters
from hyperpod_plugins.errors import CommError

BACKEND = "hyperpod"


class ResilientProcessGroup(DelegatingGroup):
    """A process group that keeps its identity while the group that does the work under it is replaced.

    DeviceMesh, FSDP2 and DTensor take hold of a group when a model is set up, and ask it for its rank and size
    whenever they need them. What they hold is this object; its members, connections and size are those
    of `inner`. `replace_inner` is the seam at which a later generation of the job takes over.
    """

    def __init__(
        self,
        inner: dist.ProcessGroup,
        *,
        role: GroupRole,
        options: CommOptions,
        root_store: Store,
        timeout: timedelta,
    ) -> None:
        super().__init__(inner)
        self._inner: dist.ProcessGroup | None = inner
        self._traffic = counters(role.axis)
        self.role = role
        self.options = options
        self.root_store = root_store
        """Store from which every generation of this group takes its prefix."""
        self.timeout = timeout
        self.generation = 0
        """Number of the generation of the job to which `inner` belongs."""
        self._name, self._description = "", ""

    @property
    def is_closed(self) -> bool:
        """Whether the group was destroyed."""
        return self._inner is None

    @property
    def inner(self) -> dist.ProcessGroup:
        """The group that does the work in this generation.

        Raises:
            CommError: the group was destroyed.
        """
        if self._inner is None:
            raise CommError(
                f"The process group {self.role.name!r} was used after it was destroyed. Models, meshes and optimizers "
                "end with the groups they were built on: build them again after init_process_group."
            )
        return self._inner

    def replace_inner(
        self, inner: dist.ProcessGroup, *, generation: int, global_ranks: Sequence[int]
    ) -> dist.ProcessGroup:
        """Go on over another inner group, possibly of another size, and return the former one.

        All members must have finished their collectives on the former group. The caller ends it: peers may not have
        come this far yet.

        Args:
            inner: A whole group, as `connect` makes it, connected to the other members.
            generation: Its number, higher than that of the present one.
            global_ranks: The members' ranks in the world, in order of their rank in `inner`.

        Raises:
            CommError: the generation is not newer, or the ranks do not fit the group.
        """
        former = self.inner
        if generation <= self.generation:
            raise CommError(
                f"The group {self.role.name!r} is in generation {self.generation} and cannot go to generation "
                f"{generation}: numbers only grow. A process that was left behind must join the job again."
            )
        if len(global_ranks) != inner.size():
            raise CommError(
                f"The new group {self.role.name!r} has {inner.size()} members, but {len(global_ranks)} global ranks "
                "were given. Give one for each member, in order of their rank in the group."
            )
        self._inner, self.generation = inner, generation
        self._rank, self._size = inner.rank(), inner.size()
        dist.distributed_c10d._world.pg_group_ranks[self] = {rank: index for index, rank in enumerate(global_ranks)}
        return former

    def set_timeout(self, timeout: timedelta) -> None:
        """Let collectives wait this long for their peers, in this generation and in later ones."""
        super().set_timeout(timeout)
        self.timeout = timeout

    def _issue(
        self, kind: Collective, payload_bytes: int, call: Callable[..., dist.Work], *args: Any, **kwargs: Any
    ) -> dist.Work:
        # Every collective of every group passes here, and so does its Work: the place to notice a fault.
        self._traffic.add(kind, payload_bytes)
        return call(*args, **kwargs)

    # c10d keeps name and description in the backends of a group, and this group has none of its own.

    @property
    def group_name(self) -> str:
        """The id under which c10d and compiled code find this group."""
        return self._name

    @property
    def group_desc(self) -> str:
        """What the group is for, in words."""
        return self._description

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._description = desc
        if self.role.group_id and desc.startswith("mesh_"):  # set by DeviceMesh; nothing else tells its axes apart
            self._traffic = counters(desc.removeprefix("mesh_"))

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
        """End the group and let go of its connections, whoever may still hold this object."""
        if self._inner is not None:
            self._inner.shutdown()
            self._inner = None

    def abort(self) -> None:
        """End the group without waiting for its collectives, where the library can."""
        if self._inner is not None:
            self._inner.abort()
            self._inner = None
