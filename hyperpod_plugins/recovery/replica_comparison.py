"""Compare replicas of a shard bit by bit, by digests of their tensors that all ranks exchange."""

import socket
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hyperpod_plugins.comm import group_health
from hyperpod_plugins.errors import RecoveryError, format_list
from hyperpod_plugins.parallel.topology import Topology

_HOST_BYTES = 64


class ReplicasDiffer(RecoveryError):
    """Replicas of a shard differ bitwise although they have run the same steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """Replicas of one shard that differ."""

    replicas: tuple[int, ...]
    """Ranks of all replicas of the shard."""
    suspects: tuple[int, ...]
    """Ranks that differ from the majority; all replicas if there is no majority."""
    hosts: tuple[str, ...]
    """Host names of the suspects."""
    names: tuple[str, ...]
    """Tensors that differ, if this rank is one of the replicas; otherwise empty."""

    def __str__(self) -> str:
        """The disagreement in one sentence."""
        suspects = ", ".join(f"{rank} ({host})" for rank, host in zip(self.suspects, self.hosts, strict=True))
        others = [rank for rank in self.replicas if rank not in self.suspects]
        if others:
            who = f"rank {suspects} does not hold the same bits as its replicas, ranks {', '.join(map(str, others))}"
        else:
            who = f"the replicas on ranks {suspects} do not hold the same bits, and none has a majority"
        return f"{who}: {format_list(self.names, 3)}" if self.names else f"{who}; see their messages for the tensors"


def suspects_of(digests: Mapping[int, int]) -> tuple[int, ...]:
    """Ranks that differ from the majority of a shard's replicas; all of them if no more than half agree.

    Args:
        digests: digest of each replica's whole shard, by rank.
    """
    counts = Counter(digests.values())
    value, count = counts.most_common(1)[0]
    if count == len(digests):
        return ()
    return tuple(rank for rank, each in sorted(digests.items()) if 2 * count <= len(digests) or each != value)


def compare_replicas(digests: Mapping[str, int], topology: Topology, device: torch.device) -> Disagreement | None:
    """Compare the replicas of each shard. A collective call: all ranks reach the same verdict.

    Gathers one digest from each rank, and the digests of single tensors only if these differ.

    Args:
        digests: digests of this rank's tensors, by name.
        topology: topology of the job.
        device: device of this rank.

    Returns:
        The first shard whose replicas differ, preferring this rank's own; None if all agree, or if a rank was lost
        meanwhile (the groups are broken then).
    """
    rank, names = dist.get_rank(), sorted(digests)
    whole = zlib.crc32(" ".join(f"{name}={digests[name]}" for name in names).encode())
    rows = _gathered(torch.tensor([whole, len(names)], dtype=torch.int64, device=device))
    if group_health.cause is not None:
        return None
    totals = [int(row[0]) for row in rows]
    shards = {tuple(sorted({each, *topology.peers(each, "replicate")})) for each in range(topology.world_size)}
    bad = [shard for shard in sorted(shards) if suspects_of({each: totals[each] for each in shard})]
    if not bad:
        return None
    shard = next((each for each in bad if rank in each), bad[0])
    mine = torch.full((max(int(row[1]) for row in rows),), -1, dtype=torch.int64, device=device)
    mine[: len(names)] = torch.tensor([digests[name] for name in names], dtype=torch.int64, device=device)
    singles = _gathered(mine)
    host = socket.gethostname().encode()[:_HOST_BYTES].ljust(_HOST_BYTES, b"\0")
    hosts = _gathered(torch.tensor(list(host), dtype=torch.uint8, device=device))
    if group_health.cause is not None:
        return None
    suspects = suspects_of({each: totals[each] for each in shard})
    differing = [
        name for index, name in enumerate(names) if len({int(singles[each][index]) for each in shard}) > 1
    ] or names  # only the names differ
    return Disagreement(
        replicas=shard,
        suspects=suspects,
        hosts=tuple(bytes(hosts[each].tolist()).rstrip(b"\0").decode(errors="replace") for each in suspects),
        names=tuple(differing) if rank in shard else (),
    )


def _gathered(value: torch.Tensor) -> Sequence[torch.Tensor]:
    """The values of all ranks, in host memory."""
    rows = [torch.zeros_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, value)
    return list(torch.stack(rows).cpu())
