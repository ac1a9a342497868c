"""`LoopContext`: rank, device and process groups of this process, updated when the world changes."""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hyperpod_plugins.comm import CommOptions, GroupKey, join_world, new_axis_group
from hyperpod_plugins.comm.groups import has_joined
from hyperpod_plugins.elastic.membership.elastic_spec import elastic_spec_of
from hyperpod_plugins.env import WorkerEnv
from hyperpod_plugins.parallel import ParallelConfig, Topology, build_data_group, build_mesh
from hyperpod_plugins.parallel.topology import update_group_members
from hyperpod_plugins.recovery import SAVING_GROUP, Member, NullMember, RecoveryOptions


class LoopContext:
    """Rank, device and groups in the present world."""

    def __init__(
        self,
        config: ParallelConfig,
        env: WorkerEnv,
        member: Member | NullMember,
        options: RecoveryOptions,
        *,
        comm: CommOptions,
        timeout_s: float,
    ) -> None:
        """Join the process group, and create the groups of all axes.

        Args:
            config: parallel degrees.
            env: this worker's ranks and sizes, as set by the launcher.
            member: this process as a member of the job.
            options: recovery options, which determine whether there are snapshots.
            comm: collective library to use.
            timeout_s: seconds after which a collective that does not complete fails.
        """
        self._config = config
        self._env = env
        self.ranks_per_node = env.local_world_size
        self._member = member
        self._options = options
        known = elastic_spec_of(member.job_store)
        self.replica_size = 0 if known is None else known.replica_size
        """Number of ranks per replica, which never changes; 0 until it is known."""
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            self.device = torch.device("cuda", env.local_rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        self.rank, self.world_size = self._rank_and_world_size()
        if not has_joined():
            join_world(comm, rank=self.rank, world_size=self.world_size, timeout_s=timeout_s)
        self.topology: Topology
        self.mesh: DeviceMesh
        self.data_group: dist.ProcessGroup
        self.saving_group: dist.ProcessGroup | None = None
        self.snapshot_group: dist.ProcessGroup | None = None
        self.when_moved: list[Callable[[], object]] = []
        """Called after the groups have been given the members of another world."""
        self.when_body_begins: list[Callable[[], object]] = []
        """Called as the body of a step begins, or begins again."""
        self.build_groups(has_moved=False)

    def build_groups(self, *, has_moved: bool) -> None:
        """Create the groups; with `has_moved`, give the existing groups the members of another world instead.

        Raises:
            DegreeError: the world does not consist of whole replicas.
        """
        self.rank, self.world_size = self._rank_and_world_size()
        first = self._config.topology(self.replica_size or self.world_size, ranks_per_node=self._env.local_world_size)
        self.topology = replace(first, world_size=self.world_size)
        self.replica_size = self.topology.replica_size
        if has_moved:
            update_group_members(self.topology, self.rank)
        self.mesh = build_mesh(self.topology, self.device.type)
        self.data_group = build_data_group(self.topology)
        if self._member.recovers:  # a group that is created later would be missing in a joiner
            ranks = range(self.world_size)
            self.saving_group = new_axis_group(GroupKey(SAVING_GROUP, is_strict=True), ranks)
            if self._member.is_elastic or self._options.snapshots(self.topology).every_steps:
                self.snapshot_group = new_axis_group(GroupKey("snapshot", is_strict=True), ranks)
        if has_moved:
            for listener in self.when_moved:
                listener()

    def _rank_and_world_size(self) -> tuple[int, int]:
        return self._member.rank, self._member.world.size
