"""The topology of a job: parallel degrees and rank arithmetic, and the `DeviceMesh` and process groups that follow.

The ranks of a world form a grid with three axes, `replicate x shard x tensor`, in row-major order:

    global_rank = (replicate * shard_degree + shard) * tensor_degree + tensor

`tensor` is innermost because it communicates most, so its peers share a node. `shard` comes next and stays inside a
node where it fits. Ranks that hold the same shard (replicas) are a stride apart, so that they lie on different nodes
whenever there is more than one node per replica. The replicate axis always exists, even at size 1: it is the
only one whose size may change in a running job; `update_group_members` then gives the groups other members.

The ranks of `shard` may be split further: `context_degree` neighbours on it read the same samples, and each computes
its part of the sequence; `expert_degree` neighbours divide the experts of each layer among them, and exchange tokens.
Parameters of experts thus lie on a mesh of their own over the same ranks (`build_expert_mesh`), whose axis
`expert_shard` takes in that of `tensor`:

    shard * tensor_degree + tensor = (expert_shard // tensor_degree * expert_degree + expert) * tensor_degree
                                     + expert_shard % tensor_degree
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch._compile import _disable_dynamo  # pyright: ignore[reportPrivateUsage]
from torch.distributed.device_mesh import DeviceMesh

from hyperpod_plugins.comm import GroupKey, live_groups, new_axis_group
from hyperpod_plugins.comm.options import SHARD_ACROSS, SHARD_NODE
from hyperpod_plugins.comm.process_group import ResilientProcessGroup
from hyperpod_plugins.errors import CommError, ConfigError, DegreeError

Axis = Literal["replicate", "shard", "tensor"]
AXES: tuple[Axis, ...] = ("replicate", "shard", "tensor")
CONTEXT = "context"
"""Name of the group of ranks that hold the parts of the same sequences."""
EXPERT = "expert"
"""Name of the group of ranks that hold different experts, and of that axis of the mesh of experts."""
EXPERT_SHARD = "expert_shard"
"""Name of the group of ranks of a replica that share the same experts, and of that axis of the mesh of experts."""
EXPERT_AXES = ("replicate", EXPERT_SHARD, EXPERT)
_existing_groups: WeakValueDictionary[tuple[str, frozenset[tuple[str, int]]], ResilientProcessGroup] = (
    WeakValueDictionary()
)
"""Those that `_existing_group` has found; each layer asks in each forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """Position of a rank on the three axes."""

    replicate: int
    shard: int
    tensor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Sizes of the three axes, and the position of each rank on them.

    Raises:
        DegreeError: a degree is out of range, shard degree x tensor degree does not divide the world size, or the
            context degree or the expert degree does not divide the shard degree.
    """

    world_size: int
    """Number of ranks in the job."""
    shard_degree: int = 1
    """Number of ranks over which one copy of the training state is split."""
    tensor_degree: int = 1
    """Number of ranks over which each layer's matrices are split."""
    context_degree: int = 1
    """Number of ranks over which each sequence is split: neighbours on the shard axis."""
    expert_degree: int = 1
    """Number of ranks over which the experts of a layer are divided: neighbours on the shard axis."""
    ranks_per_node: int = 0
    """Number of ranks on each node; 0 if all ranks are on one node."""
    node_collectives: bool = False
    """Whether collectives over a shard axis that takes whole nodes have two stages; see `node_collectives.py`."""

    def __post_init__(self) -> None:
        """Check that the degrees divide the world size."""
        for name, value in (("shard_degree", self.shard_degree), ("tensor_degree", self.tensor_degree)):
            if not 1 <= value <= self.world_size:
                raise DegreeError(f"{name} must lie in 1 .. {self.world_size} (the world size), but is {value}")
        for name, value in (("context_degree", self.context_degree), ("expert_degree", self.expert_degree)):
            if value < 1 or self.shard_degree % value:
                raise DegreeError(f"{name} must divide shard_degree {self.shard_degree}, but is {value}.")
        if self.world_size % self.replica_size:
            raise DegreeError(
                f"a world of {self.world_size} ranks cannot be divided into replicas of shard_degree "
                f"{self.shard_degree} x tensor_degree {self.tensor_degree} = {self.replica_size} ranks. "
                f"{nearest_degrees(self.world_size, self.shard_degree, self.tensor_degree)}"
            )

    @property
    def replica_size(self) -> int:
        """Number of ranks of one replica, which hold one complete copy of the training state."""
        return self.shard_degree * self.tensor_degree

    @property
    def replicate_degree(self) -> int:
        """Number of complete copies of the training state."""
        return self.world_size // self.replica_size

    @property
    def shape(self) -> tuple[int, int, int]:
        """Sizes of the axes, in the order of `AXES`."""
        return self.replicate_degree, self.shard_degree, self.tensor_degree

    @property
    def layout(self) -> tuple[int, int, int, int]:
        """World size, and shard, tensor and expert degree: if equal, a rank has the same part of the parameters."""
        return self.world_size, self.shard_degree, self.tensor_degree, self.expert_degree

    @property
    def data_degree(self) -> int:
        """Number of ranks that read different samples: replicate x shard / context."""
        return self.replicate_degree * self.data_ranks_per_replica

    @property
    def shares_samples(self) -> bool:
        """Whether several ranks read the same samples: tensor peers, and context peers."""
        return self.data_degree < self.world_size

    @property
    def data_ranks_per_replica(self) -> int:
        """Number of ranks of one replica that read different samples: shard / context."""
        return self.shard_degree // self.context_degree

    def coordinates(self, global_rank: int) -> Coordinates:
        """Return the position of a rank on the three axes."""
        self._check_rank(global_rank)
        rest, tensor = divmod(global_rank, self.tensor_degree)
        replicate, shard = divmod(rest, self.shard_degree)
        return Coordinates(replicate=replicate, shard=shard, tensor=tensor)

    def data_rank(self, global_rank: int) -> int:
        """Return a rank's index among those that read different samples; tensor and context peers share it."""
        self._check_rank(global_rank)
        return global_rank // (self.tensor_degree * self.context_degree)

    def compute_rank(self, global_rank: int) -> int:
        """Return a rank's index among those that compute different tokens; tensor peers share it.

        Random numbers of the computation (dropout) are keyed by it; those of the data are keyed by `data_rank`.
        """
        self._check_rank(global_rank)
        return global_rank // self.tensor_degree

    def context_peers(self, global_rank: int) -> tuple[int, ...]:
        """Return the ranks that hold the parts of this rank's sequences, itself included, in order of their parts."""
        return self._neighbours(global_rank, self.context_degree)

    def expert_peers(self, global_rank: int) -> tuple[int, ...]:
        """Return the ranks that hold all experts together, itself included, in order of their experts."""
        return self._neighbours(global_rank, self.expert_degree)

    def expert_shard_peers(self, global_rank: int) -> tuple[int, ...]:
        """Return the ranks of this replica over which the same experts are sharded, itself included.

        They have any tensor coordinate, because experts are not split by their features.
        """
        coordinates = self.coordinates(global_rank)
        shards = self.peers(global_rank, "shard")[coordinates.shard % self.expert_degree :: self.expert_degree]
        return tuple(rank for shard in shards for rank in self.peers(shard, "tensor"))

    def data_peers(self, global_rank: int) -> tuple[int, ...]:
        """Return one rank for each data rank: those with the same tensor coordinate and the same part of a sequence."""
        self._check_rank(global_rank)
        stride = self.tensor_degree * self.context_degree
        return tuple(range(global_rank % stride, self.world_size, stride))

    def peers(self, global_rank: int, axis: Axis) -> tuple[int, ...]:
        """Return the ranks that differ from this one only along `axis`, including itself, in axis order."""
        self._check_rank(global_rank)
        stride = {"replicate": self.replica_size, "shard": self.tensor_degree, "tensor": 1}[axis]
        size = self.shape[AXES.index(axis)]
        first = global_rank - (global_rank // stride) % size * stride
        return tuple(range(first, first + size * stride, stride))

    def replicas_of(self, global_rank: int) -> tuple[int, ...]:
        """Return the other ranks that hold the same shard of the training state."""
        return tuple(rank for rank in self.peers(global_rank, "replicate") if rank != global_rank)

    def node_of(self, global_rank: int) -> int:
        """Return the index of the node that a rank is on."""
        return global_rank // self.ranks_per_node if self.ranks_per_node else 0

    @property
    def nodes_per_shard_axis(self) -> int:
        """Number of whole nodes of several ranks between which the shard axis has a stage of its own; 1 for none."""
        per_node, rest = divmod(self.ranks_per_node, self.tensor_degree)
        if not self.node_collectives or rest or per_node < 2 or self.shard_degree % per_node:
            return 1
        return self.shard_degree // per_node

    @property
    def is_one_node(self) -> bool:
        """Whether all ranks are on the same node."""
        return self.node_of(self.world_size - 1) == 0

    @property
    def has_shard_on_one_node(self) -> bool:
        """Whether all copies of some shard are on the same node, so that its loss takes the shard."""
        shards = (self.peers(rank, "replicate") for rank in range(self.replica_size))
        return any(len({self.node_of(rank) for rank in copies}) == 1 for copies in shards)

    def placement_notes(self) -> tuple[str, ...]:
        """Return one sentence for each axis of this layout that crosses nodes at a cost; empty if there is none."""
        notes: list[str] = []
        costs: dict[Axis, str] = {"tensor": "every layer", "shard": "every all-gather of parameters"}
        for axis, cost in costs.items():
            if self._crosses_nodes(axis):
                notes.append(f"the {axis} axis ({self.shape[AXES.index(axis)]}) crosses nodes: {cost} uses the network")
        return tuple(notes)

    def _neighbours(self, global_rank: int, degree: int) -> tuple[int, ...]:
        """Return the `degree` neighbours on the shard axis that a rank belongs to."""
        peers = self.peers(global_rank, "shard")
        first = peers.index(global_rank) // degree * degree
        return peers[first : first + degree]

    def _crosses_nodes(self, axis: Axis) -> bool:
        """Whether any peers along this axis lie on different nodes."""
        firsts = (rank for rank in range(self.world_size) if getattr(self.coordinates(rank), axis) == 0)
        rows = (self.peers(first, axis) for first in firsts)
        return any(self.node_of(row[0]) != self.node_of(row[-1]) for row in rows)

    def _check_rank(self, global_rank: int) -> None:
        if not 0 <= global_rank < self.world_size:
            raise DegreeError(f"rank {global_rank} does not exist in a world of {self.world_size}")

    def __str__(self) -> str:
        """Compact form for logs: `replicate 2 x shard 2 x tensor 1 (context 2)`; parts of the shard axis if above 1."""
        axes = " x ".join(f"{axis} {size}" for axis, size in zip(AXES, self.shape, strict=True))
        within = [(CONTEXT, self.context_degree), (EXPERT, self.expert_degree)]
        return axes + "".join(f" ({name} {degree})" for name, degree in within if degree > 1)


def nearest_degrees(world_size: int, shard_degree: int, tensor_degree: int) -> str:
    """Return a sentence that names the degrees that fit this world, and the one nearest to `shard_degree`."""
    if world_size % tensor_degree:
        fits = [d for d in range(1, world_size + 1) if world_size % d == 0]
        return f"tensor_degree must divide the world: {_list(fits)} would."
    data_degree = world_size // tensor_degree
    fits = [d for d in range(1, data_degree + 1) if data_degree % d == 0]
    nearest = min(fits, key=lambda d: (abs(d - shard_degree), d))
    return f"With tensor_degree {tensor_degree}, shard_degree can be {_list(fits)}; the nearest is {nearest}."


def _list(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:-1])) + f" or {numbers[-1]}" if len(numbers) > 1 else str(numbers[0])


def build_mesh(topology: Topology, device_type: str) -> DeviceMesh:
    """Build the 3-axis mesh `("replicate", "shard", "tensor")` over the initialized default process group.

    Every axis gets its own group, even an axis of size 1 or one that spans the world. `init_device_mesh` would
    reuse the default group for the latter; then the world could not grow without changing that axis.

    With context parallelism there is a further group, `context_group(...)`, not an axis of the mesh; with expert
    parallelism there are those of `build_expert_mesh(...)`.

    Returns:
        A mesh of shape `topology.shape` whose groups know their `GroupKey`.

    Raises:
        ConfigError: the topology has `node_collectives`, and another node has another number of ranks.
    """
    world = dist.group.WORLD
    if topology.node_collectives and isinstance(world, ResilientProcessGroup):
        check_nodes_are_alike(world.root_store, topology.ranks_per_node)
    groups: list[dist.ProcessGroup] = [new_axis_group(*_group_of(topology, axis, dist.get_rank())) for axis in AXES]
    if topology.context_degree > 1:
        new_axis_group(*_group_of(topology, CONTEXT, dist.get_rank()))
    for axis in (EXPERT_SHARD, EXPERT) if topology.expert_degree > 1 else ():
        new_axis_group(*_group_of(topology, axis, dist.get_rank()))
    for axis in (SHARD_NODE, SHARD_ACROSS) if topology.nodes_per_shard_axis > 1 else ():
        new_axis_group(*_group_of(topology, axis, dist.get_rank()))
    ranks = torch.arange(topology.world_size).view(topology.shape)
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=AXES)


def check_nodes_are_alike(store: Store, ranks_per_node: int) -> None:
    """Refuse nodes with different numbers of ranks: their ranks would form different groups, and wait for each other.

    Raises:
        ConfigError: a rank that has called this before is on a node with another number of ranks.
    """
    first = store.compare_set("ranks_per_node", "", str(ranks_per_node)).decode(errors="replace")
    if first != str(ranks_per_node):
        raise ConfigError(
            f"node_collectives=True needs nodes with the same number of ranks, but this node has {ranks_per_node} and "
            f"another one {first[:20]!r}. Start the same number on each, or leave node_collectives out."
        )


def build_data_group(topology: Topology) -> dist.ProcessGroup:
    """Build the data-parallel group of this rank: one rank of each tensor group and of each context group.

    Losses and metrics are reduced over it, so that values shared by tensor and context peers count once. Without tensor
    and context parallelism it is the default group.
    """
    if topology.tensor_degree == topology.context_degree == 1:
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    return new_axis_group(*_group_of(topology, "data", dist.get_rank()))


@_disable_dynamo  # which does not know the members of our groups
def context_group(shard_degree: int, tensor_degree: int, context_degree: int) -> ResilientProcessGroup:
    """Return the group of the ranks that hold the parts of this rank's sequences, which `build_mesh` has created.

    Raises:
        ConfigError: there is none with these degrees.
    """
    degrees = {"of_shards": shard_degree, "of_tensors": tensor_degree, "of_contexts": context_degree}
    return _existing_group(CONTEXT, degrees)


def expert_group(shard_degree: int, tensor_degree: int, expert_degree: int) -> ResilientProcessGroup:
    """Return the group of the ranks among which the experts of a layer are divided, which `build_mesh` has created.

    Raises:
        ConfigError: there is none with these degrees.
    """
    return _existing_group(EXPERT, _degrees_of_experts(shard_degree, tensor_degree, expert_degree))


def _degrees_of_experts(shard_degree: int, tensor_degree: int, expert_degree: int) -> dict[str, int]:
    return {"of_shards": shard_degree, "of_tensors": tensor_degree, "of_experts": expert_degree}


def build_expert_mesh(mesh: DeviceMesh, expert_degree: int) -> DeviceMesh:
    """Build the mesh of the parameters of experts, `EXPERT_AXES`, over the ranks of a mesh of `build_mesh`.

    Args:
        mesh: `("replicate", "shard", "tensor")`.
        expert_degree: number of ranks among which the experts of a layer are divided.

    Raises:
        ConfigError: `build_mesh` has made no groups for these degrees.
    """
    degrees = _degrees_of_experts(mesh["shard"].size(), mesh["tensor"].size(), expert_degree)
    groups: list[dist.ProcessGroup] = [mesh.get_group("replicate")]
    groups += [_existing_group(axis, degrees) for axis in (EXPERT_SHARD, EXPERT)]
    ranks = mesh.mesh.unflatten(1, (-1, expert_degree)).transpose(2, 3).flatten(1, 2)
    return DeviceMesh.from_group(groups, mesh.device_type, mesh=ranks, mesh_dim_names=EXPERT_AXES)


def node_groups(mesh: DeviceMesh) -> tuple[ResilientProcessGroup, ResilientProcessGroup] | None:
    """Return the groups of the last axis of a mesh within this node, and across nodes.

    Returns:
        The two groups; None if `build_mesh` has not created them for this axis.
    """
    group = mesh.get_group(mesh.ndim - 1)
    if not isinstance(group, ResilientProcessGroup) or group.key.axis != "shard":
        return None
    degrees = {name: degree for name, degree in group.key.coordinates if name.startswith("of_")}
    names = {each.key.axis for each in live_groups().values() if degrees.items() <= set(each.key.coordinates)}
    if not {SHARD_NODE, SHARD_ACROSS} <= names:
        return None
    return _existing_group(SHARD_NODE, degrees), _existing_group(SHARD_ACROSS, degrees)


def _existing_group(axis: str, degrees: Mapping[str, int]) -> ResilientProcessGroup:
    asked = frozenset(degrees.items())
    found = _existing_groups.get((axis, asked))
    if found is not None and not found.is_closed:
        return found
    for group in live_groups().values():
        if group.key.axis == axis and asked <= set(group.key.coordinates):
            _existing_groups[axis, asked] = group
            return group
    name = "context" if axis == CONTEXT else "expert"
    raise ConfigError(
        f"there is no process group for {name}_parallel_degree={degrees[f'of_{name}s']}. Build the mesh with "
        "build_mesh(config.topology(world_size), ...) of the same configuration, over a default group of the backend "
        "'hyperpod'."
    )


def update_group_members(topology: Topology, global_rank: int) -> None:
    """Set the members of this process's groups for a new topology. The groups must be disconnected.

    The mesh, and what FSDP2 and DTensor hold of it, stay the same objects; they ask the groups for their sizes.

    Args:
        topology: the new topology: same degrees, different number of replicas.
        global_rank: rank of this process in it, with the same `shard` and `tensor` coordinates.

    Raises:
        CommError: a group was not made by this package, so its members in the new world are unknown.
    """
    for name, group in live_groups().items():
        axis = group.key.axis
        if axis in (*AXES, CONTEXT, EXPERT, EXPERT_SHARD, SHARD_NODE, SHARD_ACROSS, "data"):
            key, members = _group_of(topology, axis, global_rank)
        elif not group.key.coordinates and not group.key.group_id:  # all ranks
            key, members = group.key, tuple(range(topology.world_size))
        else:
            raise CommError(
                f"the process group {name!r} was made by torch.distributed.new_group, so its members in a world of "
                "another size are unknown. In an elastic job, make groups with hyperpod_plugins.comm.new_axis_group, "
                "or make none of your own."
            )
        group.reassign(key, members, members.index(global_rank))


def _group_of(topology: Topology, axis: str, global_rank: int) -> tuple[GroupKey, Sequence[int]]:
    """Return key and members of a rank's group along an axis of a mesh, along `context` or along `data`.

    The key contains the degrees, so that groups of different layouts have different names, but not the number of
    replicas, which may change during the group's lifetime.
    """
    here = topology.coordinates(global_rank)
    place = {"replicate": here.replicate, "shard": here.shard, "tensor": here.tensor}
    if axis in AXES:
        members: Sequence[int] = topology.peers(global_rank, axis)
        del place[axis]
    elif axis == CONTEXT:
        members = topology.context_peers(global_rank)
        place["shard"] //= topology.context_degree
    elif axis == EXPERT:
        members = topology.expert_peers(global_rank)
        place["shard"] //= topology.expert_degree
    elif axis == EXPERT_SHARD:
        members = topology.expert_shard_peers(global_rank)
        place = {"replicate": here.replicate, EXPERT: here.shard % topology.expert_degree}
    elif axis in (SHARD_NODE, SHARD_ACROSS):
        peers, per_node = topology.peers(global_rank, "shard"), topology.shard_degree // topology.nodes_per_shard_axis
        node, index = divmod(here.shard, per_node)
        within = axis == SHARD_NODE
        members = peers[node * per_node : (node + 1) * per_node] if within else peers[index::per_node]
        place["shard"] = node if within else index
    else:
        members = topology.data_peers(global_rank)
        place = {"tensor": here.tensor}
    degrees = [("of_shards", topology.shard_degree), ("of_tensors", topology.tensor_degree)]
    if axis in (EXPERT, EXPERT_SHARD):
        degrees.append(("of_experts", topology.expert_degree))
    elif axis in (SHARD_NODE, SHARD_ACROSS):
        degrees.append(("of_nodes", topology.nodes_per_shard_axis))
    elif topology.context_degree > 1 and axis not in AXES:
        degrees.append(("of_contexts", topology.context_degree))
        if axis != CONTEXT:
            place[CONTEXT] = here.shard % topology.context_degree
    return GroupKey(axis=axis, coordinates=(*place.items(), *degrees)), members
