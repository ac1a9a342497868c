"""A transport for ranks that share a GPU: gloo, with each tensor staged through host memory.

nccl refuses two ranks on one GPU, and gloo has no form of some collectives for CUDA tensors. Here all of them run on
copies in host memory, and outputs are copied back when they are waited for. `install()` puts it first in the list of
transports; `HYPERPOD_TEST_TRANSPORT=staged` has the programs of the tests do so. It does the same on the CPU.
"""

from datetime import timedelta

import torch
import torch.distributed as dist

from hyperpod_plugins.comm import groups
from hyperpod_plugins.comm.transport import Gloo
from hyperpod_plugins.comm.work import reduce_scatter

_FOREVER = timedelta(0)
_NAMES = """
    allreduce allreduce_coalesced allgather allgather_coalesced _allgather_base allgather_into_tensor_coalesced
    reduce_scatter _reduce_scatter_base reduce_scatter_tensor_coalesced alltoall_base alltoall broadcast reduce gather
    scatter send recv recv_anysource
"""


def staged(given):
    """Copies in host memory of all tensors in nested lists; anything else as it is."""
    if isinstance(given, torch.Tensor):
        return torch.empty(given.shape, dtype=given.dtype).copy_(given)
    return [staged(each) for each in given] if isinstance(given, list | tuple) else given


def bring_back(given, copies):
    """Copy back what `staged` made of the same nested lists."""
    if isinstance(given, torch.Tensor):
        given.copy_(copies)
    elif isinstance(given, list | tuple):
        for each, copied in zip(given, copies, strict=False):
            bring_back(each, copied)


class StagedWork(dist.Work):
    """A collective of copies."""

    def __init__(self, works, outputs, copies):
        super().__init__()
        self._works, self._outputs, self._copies = works, outputs, copies

    def wait(self, timeout=_FOREVER):
        for work in self._works:
            _ = work.wait() if timeout == _FOREVER else work.wait(timeout)
        outputs, copies, self._outputs, self._copies = self._outputs, self._copies, (), ()
        with torch.no_grad():
            bring_back(outputs, copies)
        return True

    def is_completed(self):
        return all(work.is_completed() for work in self._works)

    def is_success(self):
        return all(work.is_success() for work in self._works)

    def exception(self):
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def result(self):
        return []

    def source_rank(self):
        return self._works[0].source_rank()

    _source_rank = source_rank

    def synchronize(self):
        self.wait()

    def block_current_stream(self):
        self.wait()

    def get_future(self):
        outputs = self._outputs
        self.wait()
        future = torch.futures.Future()
        future.set_result([outputs] if isinstance(outputs, torch.Tensor) else list(outputs))
        return future


class StagedGroup:
    """Stands for a group of CUDA tensors; what is no collective is gloo's own."""

    def __init__(self, gloo):
        self._gloo, self._coalesced = gloo, None

    def __getattr__(self, name):
        return getattr(self._gloo, name)

    def barrier(self, *args, **kwargs):
        return self._gloo.barrier()

    def _start_coalescing(self, device):
        self._coalesced = []

    def _end_coalescing(self, device):
        works, self._coalesced = self._coalesced, None
        return StagedWork(works, (), ())


def _collective(name):
    def call(self, tensors, *args, **kwargs):
        copies, rest = staged(tensors), [staged(each) for each in args]
        method = getattr(self._gloo, name)
        if "reduce_scatter" in name:  # gloo's own has waits that do not end
            under_way = reduce_scatter(self._gloo, method, True, copies, *rest, **kwargs)
        else:
            under_way = method(copies, *rest, **kwargs)
        outputs = () if name == "send" else tensors
        work = StagedWork([under_way], outputs, copies)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    return call


for _name in _NAMES.split():
    setattr(StagedGroup, _name, _collective(_name))


class Staged:
    """The transport."""

    name = "staged"

    def unsupported_reason(self, device_type):
        return None if device_type in ("cpu", "cuda") else "it serves cpu and cuda tensors only"

    def unsupported_group_reason(self, group_size, world_size):
        return None

    def create(self, spec):
        return StagedGroup(Gloo().create(spec))

    def runs_on_device_queue(self, device_type):
        return False

    def abort(self, inner):
        """Cutting the sockets is enough."""

    def is_connection_error(self, error):
        return Gloo().is_connection_error(error)


def install():
    """Let all groups of this process that are made from now on be staged."""
    if not isinstance(groups.AUTOMATIC[0], Staged):
        groups.AUTOMATIC = (Staged(), *groups.AUTOMATIC)
        groups.TRANSPORTS = (Staged(), *groups.TRANSPORTS)
