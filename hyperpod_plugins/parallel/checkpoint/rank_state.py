"""Rank-specific state in a checkpoint: one copy per rank if the ranks' states differ, one for all if they are equal.

    rank.<global rank>         bytes of this rank's state other than tensors of the model and the optimizers

A rank that loads with the same degrees gets its own state back. Only ranks that hold the same shard can use each
other's.
"""

import hashlib
import io
import pickle
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load

from hyperpod_plugins.errors import CheckpointDamaged, CheckpointMismatch, format_list
from hyperpod_plugins.parallel.checkpoint.dcp_storage import SafePlanner, SafeReader, tensor_entries
from hyperpod_plugins.parallel.checkpoint.files import device_of, find, load_pickled
from hyperpod_plugins.parallel.hsdp import local_part
from hyperpod_plugins.parallel.topology import Topology

_RANK = "rank."
_ENTRY = re.compile(r"rank\.(0|[1-9][0-9]{0,8})")
_DIGEST_BYTES = 16


class RankStates:
    """Serialized state of this rank, or of several ranks whose state it keeps."""

    def __init__(self, states: Mapping[int, Any]) -> None:
        """Copy the states, by global rank: plain containers, numbers, strings and tensors."""
        self._packed = {rank: _serialize(state) for rank, state in states.items()}
        self._digests = [_digest(state) for state in states.values()]

    def entries(self, group: dist.ProcessGroup | None) -> dict[str, torch.Tensor]:
        """Return the entries that this rank must write; none if the states of all ranks of the group are equal.

        All ranks of the group call this.
        """
        if group is None or _are_equal(self._digests, group):
            return {}
        return {
            f"{_RANK}{rank}": torch.frombuffer(bytearray(data), dtype=torch.uint8)
            for rank, data in self._packed.items()
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStateSelector:
    """Decides whose state in a checkpoint a rank loads."""

    rank: int
    """Global rank that loads the state."""
    topology: Topology
    """Topology of the loading job."""
    saved_layout: tuple[int, ...]
    """`Topology.layout` of the job that wrote the checkpoint."""
    is_training: bool
    """Whether the rank continues training from the checkpoint."""

    def __post_init__(self) -> None:
        """Check `saved_layout`.

        Raises:
            CheckpointDamaged: it is not three or four positive integers.
        """
        layout = self.saved_layout
        if len(layout) not in (3, 4) or any(type(each) is not int or each < 1 for each in layout):
            raise CheckpointDamaged(
                f"world size, shard degree, tensor degree and expert degree of a checkpoint cannot be {layout}"
            )

    @property
    def degrees_differ(self) -> bool:
        """Whether the checkpoint was written with other degrees, so that none of its ranks held the same shard."""
        return complete_layout(self.saved_layout)[1:] != self.topology.layout[1:]

    def choose(self, ranks: Sequence[int], sharded: Sequence[str]) -> int | None:
        """Return the rank in `ranks` whose state to load: this rank, or one that held the same shard.

        Args:
            ranks: ranks that have a state of their own in the checkpoint.
            sharded: names of the values in it that may belong to a shard.

        Returns:
            The rank; None for the state that all ranks share.

        Raises:
            CheckpointMismatch: training continues, `sharded` is not empty, and no rank held the same shard.
        """
        world_size, *degrees = complete_layout(self.saved_layout)
        here = self.topology
        if not self.degrees_differ:
            alike = [rank for rank in ranks if rank % here.replica_size == self.rank % here.replica_size]
            if alike:
                return self.rank if self.rank in alike else alike[0]
        if not (sharded and self.is_training):
            return None
        was, wanted = (
            "shard degree {}, tensor degree {} and expert degree {}".format(*each)
            for each in (degrees, here.layout[1:])
        )
        raise CheckpointMismatch(
            f"{format_list(list(sharded))} of the checkpoint has tensors that differ from rank to rank, such as "
            f"averages of local shards. It was written by {world_size} ranks with {was}, and cannot be used by "
            f"{here.world_size} ranks with {wanted}. Use the degrees of the checkpoint, or leave "
            "that state out of state_dict and on_save_checkpoint (keep it in buffers or parameters of the "
            "module, which are resharded)."
        )


def complete_layout(saved: object) -> tuple[Any, ...]:
    """Return a saved `Topology.layout`, or `()` if it is none.

    One of three numbers was written when there were no expert degrees.
    """
    match saved:
        case [world_size, shard_degree, tensor_degree]:
            return world_size, shard_degree, tensor_degree, 1
        case [*numbers]:
            return tuple(numbers)
        case _:
            return ()


def saved_ranks(path: Path) -> tuple[int, ...]:
    """Return the global ranks with a state of their own in a checkpoint; empty if all ranks' states were equal."""
    folder = find(path)
    entries = tensor_entries(SafeReader(folder), folder)
    return tuple(sorted(int(found[1]) for found in map(_ENTRY.fullmatch, entries) if found is not None))


def load_rank_state(path: Path, rank: int, *, weights_only: bool) -> dict[str, Any]:
    """Load the state of one of `saved_ranks`. Not a collective: each process reads by itself.

    Raises:
        CheckpointDamaged: the state was altered, is not a dict, or holds objects that need `weights_only=False`.
    """
    folder, name = find(path), f"{_RANK}{rank}"
    reader = SafeReader(folder)
    wanted = {name: torch.empty(tensor_entries(reader, folder)[name].size, dtype=torch.uint8)}
    with warnings.catch_warnings():  # torch warns about a load by a single process, which is intended here
        warnings.filterwarnings("ignore", message=".*assuming the intent is to load in a single process.*")
        load(wanted, storage_reader=reader, planner=SafePlanner(), no_dist=True)
    state = load_pickled(wanted[name].numpy().tobytes(), f"{folder}, {name}", weights_only=weights_only)
    if not isinstance(state, dict):
        raise CheckpointDamaged(
            f"{folder}, {name} is not the state of a rank: it holds a {type(state).__name__}, not a dict."
        )
    return state


def _are_equal(digests: Sequence[bytes], group: dist.ProcessGroup) -> bool:
    """Whether the digests of all ranks of the group are equal; each rank may pass several."""
    own = torch.tensor(list(digests[0]) if digests else [0] * _DIGEST_BYTES, device=device_of(group))
    # Maximum over ranks of each byte and of its negative: these are negatives of each other only if all ranks agree.
    extremes = torch.cat([own, -own, torch.tensor([int(len(set(digests)) != 1)], device=own.device)])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    largest, smallest = extremes[:_DIGEST_BYTES], -extremes[_DIGEST_BYTES:-1]
    return torch.equal(largest, smallest) and not int(extremes[-1])


def _serialize(state: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


class _Digest:
    """Digest of values, regardless of shared objects: a pickle distinguishes equal strings from the same string."""

    def __init__(self) -> None:
        self._sum = hashlib.blake2b(digest_size=_DIGEST_BYTES)

    def add(self, value: Any) -> Self:
        """Add a value to the digest."""
        if isinstance(value, torch.Tensor):
            own = local_part(value.detach()).cpu().contiguous()
            self._sum.update(f"tensor {own.dtype} {tuple(own.shape)}".encode())
            self._sum.update(own.reshape(-1).view(torch.uint8).numpy().data)
        elif isinstance(value, Mapping):
            self._sum.update(f"mapping {len(value)}".encode())
            for key, each in value.items():
                self.add(key).add(each)
        elif isinstance(value, list | tuple | set | frozenset):
            self._sum.update(f"{type(value).__name__} {len(value)}".encode())
            for each in sorted(value, key=repr) if isinstance(value, set | frozenset) else value:
                self.add(each)
        elif isinstance(value, str | bytes | int | float | complex | None):
            self._sum.update(f"{type(value).__name__} {value!r};".encode())
        else:
            self._sum.update(pickle.dumps(value))
        return self

    @property
    def value(self) -> bytes:
        """Digest of all values added so far."""
        return self._sum.digest()


def _digest(state: Any) -> bytes:
    return _Digest().add(state).value
