"""A process group whose collectives run in another group: every spelling that c10d and its callers use."""

# C++ overloads have no single signature that a Python override could match, and several names that c10d calls on a
# group begin with an underscore.
# pyright: reportIncompatibleMethodOverride=false, reportAssignmentType=false, reportPrivateUsage=false

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Backend, Store

from hyperpod_plugins.comm.scatter import reduce_scatter
from hyperpod_plugins.comm.traffic import Collective


def num_bytes(tensors: Tensor | Sequence[Any]) -> int:
    """Size of a tensor, or of all tensors in nested lists."""
    if isinstance(tensors, Tensor):
        return tensors.nbytes
    if len(tensors) == 1:
        return num_bytes(tensors[0])
    return sum(num_bytes(part) for part in tensors)


class DelegatingGroup(dist.ProcessGroup):
    """Abstract group that hands every collective to `inner`, through the one gate `_issue`.

    Callers reach a group in three ways, and all of them end here: `torch.distributed` functions and FSDP2 call the
    Python methods; functional collectives, DDP and compiled code call the C++ methods, which look for a Python
    override; and either of them uses the spelling of its torch version. The inner group is called by the spelling that
    torch 2.10 to 2.13 share. Rank and size are asked for often, so they are kept, not delegated.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue]
        self._rank, self._size = rank, size

    @property
    def inner(self) -> dist.ProcessGroup:
        """The group that does the work now."""
        raise NotImplementedError

    def _issue(
        self, kind: Collective, payload_bytes: int, call: Callable[..., dist.Work], *args: Any, **kwargs: Any
    ) -> dist.Work:
        """Run `call(*args, **kwargs)`, a method of the inner group; `payload_bytes` as `traffic` defines it."""
        raise NotImplementedError

    def rank(self) -> int:
        """This process's rank in the group as it is now."""
        return self._rank

    def size(self) -> int:
        """Number of members of the group as it is now."""
        return self._size

    def allreduce(self, tensors: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Reduce in place, on all members."""
        return self._issue("all_reduce", num_bytes(tensors), self.inner.allreduce, tensors, *args, **kwargs)

    def allreduce_coalesced(self, tensors: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Reduce several tensors in place, on all members."""
        return self._issue("all_reduce", num_bytes(tensors), self.inner.allreduce_coalesced, tensors, *args, **kwargs)

    def allgather(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Gather into one tensor per member."""
        return self._issue("all_gather", num_bytes(outputs), self.inner.allgather, outputs, inputs, *args, **kwargs)

    def allgather_coalesced(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Gather several tensors, each into one tensor per member."""
        call = self.inner.allgather_coalesced
        return self._issue("all_gather", num_bytes(outputs), call, outputs, inputs, *args, **kwargs)

    def all_gather_single(self, output: Any, input: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Gather into one tensor."""
        return self._issue("all_gather", output.nbytes, self.inner._allgather_base, output, input, *args, **kwargs)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Gather several tensors, each into one."""
        call = self.inner.allgather_into_tensor_coalesced
        return self._issue("all_gather", num_bytes(outputs), call, outputs, inputs, *args, **kwargs)

    def reduce_scatter(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Reduce one tensor per member, and keep one's own."""
        inner = self.inner
        call = partial(reduce_scatter, inner, inner.reduce_scatter)
        return self._issue("reduce_scatter", num_bytes(inputs), call, outputs, inputs, *args, **kwargs)

    def reduce_scatter_single(self, output: Any, input: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Reduce one tensor, and keep one's own part."""
        inner = self.inner
        call = partial(reduce_scatter, inner, inner._reduce_scatter_base)
        return self._issue("reduce_scatter", input.nbytes, call, output, input, *args, **kwargs)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Reduce several tensors, and keep one's own part of each."""
        inner = self.inner
        call = partial(reduce_scatter, inner, inner.reduce_scatter_tensor_coalesced)
        return self._issue("reduce_scatter", num_bytes(inputs), call, outputs, inputs, *args, **kwargs)

    def all_to_all_single(self, output: Any, input: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Exchange parts of one tensor."""
        return self._issue("all_to_all", input.nbytes, self.inner.alltoall_base, output, input, *args, **kwargs)

    def alltoall(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Exchange one tensor with each member."""
        return self._issue("all_to_all", num_bytes(inputs), self.inner.alltoall, outputs, inputs, *args, **kwargs)

    def broadcast(self, tensors: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Copy the root's tensor to all members."""
        return self._issue("broadcast", num_bytes(tensors), self.inner.broadcast, tensors, *args, **kwargs)

    def reduce(self, tensors: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Reduce onto the root."""
        return self._issue("reduce", num_bytes(tensors), self.inner.reduce, tensors, *args, **kwargs)

    def gather(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Gather onto the root, into one tensor per member."""
        size_bytes = num_bytes(inputs) * self._size
        return self._issue("gather", size_bytes, self.inner.gather, outputs, inputs, *args, **kwargs)

    def scatter(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Give every member one tensor of the root."""
        size_bytes = num_bytes(outputs) * self._size
        return self._issue("scatter", size_bytes, self.inner.scatter, outputs, inputs, *args, **kwargs)

    def send(self, tensors: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Send to one member."""
        return self._issue("send", num_bytes(tensors), self.inner.send, tensors, *args, **kwargs)

    def recv(self, tensors: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Receive from one member."""
        return self._issue("recv", num_bytes(tensors), self.inner.recv, tensors, *args, **kwargs)

    def recv_anysource(self, tensors: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Receive from whoever sends first."""
        return self._issue("recv", num_bytes(tensors), self.inner.recv_anysource, tensors, *args, **kwargs)

    def barrier(self, *args: Any, **kwargs: Any) -> dist.Work:
        """Wait for all members."""
        return self._issue("barrier", 0, self.inner.barrier, *args, **kwargs)

    # Other spellings: C++ names, and names from before (or after) a renaming in torch.
    getRank = rank
    getSize = size
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # What callers ask of a group besides collectives. The C++ base would answer from its own, empty table of backends.

    @property
    def _device_types(self) -> list[torch.device]:
        return self.inner._device_types

    def _get_backend(self, device: torch.device) -> Backend:
        return self.inner._get_backend(device)

    def _start_coalescing(self, device: torch.device) -> None:
        self.inner._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        return self._issue("coalesced", 0, self.inner._end_coalescing, device)

    def _set_sequence_number_for_group(self) -> None:
        self.inner._set_sequence_number_for_group()

    def get_group_store(self) -> Store:
        """The store in which the members of the present inner group found each other."""
        return self.inner.get_group_store()

    def set_timeout(self, timeout: timedelta) -> None:
        """Let collectives that are issued from now on wait this long for their peers."""
        self.inner.set_timeout(timeout)
