"""Check that the ranks of a shard group gather the same FSDP2 units where no optimizer uses what they compute.

That is in an evaluation, in a forward without gradients in a step, and in a network none of whose parameters is
trained, such as that of a perceptual loss. As in a step's other gathers (see `unit_watch`), shards of different units
of equal size would be joined without an error.

[Note: where ranks compare] Replicas need not evaluate alike, so ranks compare in the group that gathers: before each
of the first gathers, then after every 256, and at the end of a step (of networks beside the trained one, only if
gradients flow through them). A gather waits for all ranks of its group, so all
have gathered equally often wherever they compare. A process that has replaced a lost one has not run the evaluations of
the others: after a fault, all ranks begin again with an empty trace. What ranks gather after the last of these
comparisons is not compared.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

import torch
import torch.distributed as dist

from hyperpod_plugins.comm import group_health

DIGEST_BYTES = 8
_NUM_CHECKED = 256


class GatherTrace:
    """The units that one group has gathered since its ranks last compared them."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Begin without any; `device` is that of this rank."""
        self._group, self._device = group, device
        self._events = array("I")
        self._num_checked = _NUM_CHECKED  # all ranks of the group must have the same number left
        self.is_of_step = False
        """Whether gradients have flowed through these units since ranks last compared."""

    def note(self, event: int) -> bool:
        """Record that a unit is about to be gathered; return False if ranks compared, and another gathers another."""
        self._events.append(event)
        if self._num_checked:
            self._num_checked -= 1
            if not is_same_on_ranks(event, self._device, self._group):
                return False
            if not self._num_checked:
                del self._events[:]
            return True
        return len(self._events) < _NUM_CHECKED or self.agrees()

    def agrees(self) -> bool:
        """Compare what the ranks of the group have gathered, and forget it if it is the same; False if it differs."""
        if self._num_checked or not self._events:
            return True  # compared already
        mine = both_ways(self._events)
        limits = torch.frombuffer(mine, dtype=torch.uint8).to(self._device)
        dist.all_reduce(limits, op=dist.ReduceOp.MAX, group=self._group)
        if group_health.cause is None and not is_one_digest(bytes(limits.tolist())):
            return False
        del self._events[:]
        self.is_of_step = False
        return True

    def of_all_ranks(self) -> tuple[list[int], list[list[int]]]:
        """Ranks of the group, and what each has gathered; a collective call."""
        ranks = dist.get_process_group_ranks(self._group)
        traces: list[list[int]] = [[] for _ in ranks]
        dist.all_gather_object(traces, self._events.tolist(), group=self._group)
        return ranks, traces


def is_same_on_ranks(event: int, device: torch.device, group: dist.ProcessGroup | None = None) -> bool:
    """Whether all ranks of a group call this with the same number; True if the groups are broken."""
    limits = torch.tensor([event, -event], device=device)
    dist.all_reduce(limits, op=dist.ReduceOp.MAX, group=group)
    largest, smallest = limits.tolist()
    return group_health.cause is not None or largest == -smallest


def digest_of(events: "array[int]", before: bytes = b"") -> bytes:
    """A digest of some events, and of the digest of those before."""
    return blake2b(before + events.tobytes(), digest_size=DIGEST_BYTES).digest()


def both_ways(events: "array[int]", before: bytes = b"") -> bytearray:
    """A digest and its complement: gloo and nccl can both compute the largest of each byte, of all ranks."""
    digest = digest_of(events, before)
    return bytearray(digest + bytes(255 - byte for byte in digest))


def is_one_digest(agreed: Sequence[int]) -> bool:
    """Whether all ranks have had the same digest, given the largest of their bytes: then it is also the smallest."""
    largest, complements = agreed[:DIGEST_BYTES], agreed[DIGEST_BYTES : 2 * DIGEST_BYTES]
    return all(high == 255 - low for high, low in zip(largest, complements, strict=True))
