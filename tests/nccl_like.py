"""A transport for CPU ranks that behaves as nccl does, over gloo: for the traps that gloo alone does not have.

    collectives are queued on a stream of their group and return at once
    a wait does not block the host; the host blocks, unseen, when it next computes (as in `loss.item()`)
    errors never surface in a wait
    a collective that waits for a lost peer hangs its queue until the group is aborted
    aborts take their time, one after another
    connecting is lazy, at the first collective, unless it is asked for, as `create` does

`install()` puts it first in the list of transports; `HYPERPOD_TEST_TRANSPORT=nccl-like` has the programs of the tests
do so. Groups for threads beside the step (snapshots, saves) stay with gloo, as on GPU machines.
"""

import functools
import queue
import threading
import time
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from hyperpod_plugins.comm import groups
from hyperpod_plugins.comm.runtime import RECORDERS
from hyperpod_plugins.comm.transport import Gloo, InnerGroup
from hyperpod_plugins.comm.work import reduce_scatter

ABORT_S = 0.03
_SLICE = timedelta(seconds=0.1)
_aborting = threading.Lock()


def take_abort_time():
    """What an abort of nccl takes before it ends anything."""
    time.sleep(ABORT_S)


class Stream:
    """What the computing stream waits for. The host computes by itself here, so it blocks where it computes next."""

    def __init__(self):
        self._waits_for = []

    def wait_for(self, work):
        self._waits_for = [each for each in self._waits_for if not each.is_completed()]
        if not work.is_completed():
            self._waits_for.append(work)

    def block(self):
        while self._waits_for:
            self._waits_for.pop(0).done.wait()

    def record(self, device):
        waits_for = list(self._waits_for)
        return lambda: all(work.is_completed() for work in waits_for)


class HostBlocks(TorchDispatchMode):
    """Blocks before each operation until the computing stream has what it waits for."""

    depth = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        stream.block()
        HostBlocks.depth += 1
        try:
            return func(*args, **(kwargs or {}))
        finally:
            HostBlocks.depth -= 1


stream = Stream()
_mode = HostBlocks()


class QueuedWork(dist.Work):
    """A collective in its group's queue."""

    def __init__(self, tensors, blocks_host):
        super().__init__()
        self.done = threading.Event()
        self._tensors, self._blocks_host = tensors, blocks_host
        self.after = []  # what the computing stream waited for when this was issued

    def wait(self, timeout=timedelta(0)):
        if threading.current_thread() is not threading.main_thread() or HostBlocks.depth or self._blocks_host:
            self.done.wait()  # inside of an operation, where nothing follows that would block
        else:
            stream.wait_for(self)
        return True

    def is_completed(self):
        return self.done.is_set()

    def is_success(self):
        return True

    def exception(self):
        return None

    def result(self):
        return self._tensors

    def synchronize(self):
        self.wait()

    def block_current_stream(self):
        self.wait()

    def get_future(self):
        self.done.wait()
        future = torch.futures.Future()
        future.set_result(self._tensors)
        return future

    def source_rank(self):
        return 0

    _source_rank = source_rank


class QueuedGroup:
    """Stands for a group of nccl: a queue, and a thread that works it off over gloo."""

    def __init__(self, spec):
        self._spec = spec
        self._device_types = [torch.device("cpu")]
        self._queue = queue.SimpleQueue()
        self._aborted = threading.Event()
        self._works, self._adding = weakref.WeakSet(), threading.Lock()
        self._gloo = None
        self._coalesced = None
        threading.Thread(target=self._work_off, name="nccl_like", daemon=True).start()

    def rank(self):
        return self._spec.rank

    def size(self):
        return self._spec.size

    def _enqueue(self, name, args, kwargs, blocks_host=False):
        first = args[0] if args else []
        work = QueuedWork([first] if isinstance(first, torch.Tensor) else list(first), blocks_host)
        work.after = list(stream._waits_for) if threading.current_thread() is threading.main_thread() else []
        with self._adding:
            if self._aborted.is_set():
                work.done.set()
            else:
                self._works.add(work)
                self._queue.put((work, name, args, kwargs))
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _work_off(self):
        while not self._aborted.is_set():
            item = self._queue.get()
            if item is None:
                return
            work, name, args, kwargs = item
            for before in work.after:
                while not before.done.wait(0.1) and not self._aborted.is_set():
                    pass
            work.after = []
            if (not self._aborted.is_set() and self._run(name, args, kwargs)) or self._aborted.wait():
                work.done.set()
            del item, work, args, kwargs

    def _run(self, name, args, kwargs):
        """Whether the collective has ended well. An error is a lost peer, and shows nowhere."""
        under_way = None
        try:
            if self._gloo is None:
                self.eager_connect()
            gloo = self._gloo
            if gloo is None:  # aborted just now
                return False
            call = getattr(gloo.group, name)
            if "reduce_scatter" in name:  # gloo's own has waits that do not end
                under_way = reduce_scatter(gloo.group, call, True, *args, **kwargs)
            else:
                under_way = call(*args, **kwargs)
            while not self._aborted.is_set():
                try:
                    under_way.wait(_SLICE) if name not in ("send", "recv") else under_way.wait()
                except RuntimeError:
                    if under_way.is_completed():
                        under_way.wait()
                    elif not under_way.is_success():
                        return False
                else:
                    return True
        except RuntimeError:
            pass
        finally:
            if under_way is not None and not under_way.is_completed():
                gloo.release_work(under_way)  # it sleeps on in gloo, and destroying it would wait
        return False

    def eager_connect(self):
        gloo = InnerGroup(Gloo().create(self._spec), Gloo())
        if self._aborted.is_set():
            gloo.release()
            raise RuntimeError("aborted")
        self._gloo = gloo

    def abort(self, sockets):
        with _aborting:
            take_abort_time()
            sockets.shutdown()
            self.shutdown()

    def shutdown(self):
        with self._adding:
            self._aborted.set()
            self._queue.put(None)
            works = list(self._works)
        gloo, self._gloo = self._gloo, None
        if gloo is not None:
            gloo.release()
        for work in works:
            work.done.set()

    def set_timeout(self, timeout):
        """nccl's watchdog would end the process; here a collective hangs until it is aborted."""

    def _set_sequence_number_for_group(self):
        pass

    def get_group_store(self):
        return self._spec.store

    def _get_backend(self, device):
        raise RuntimeError(f"no backend for device type {device}")

    def barrier(self, *args, **kwargs):
        return self._enqueue("barrier", (), {}, blocks_host=True)

    def _start_coalescing(self, device):
        self._coalesced = []

    def _end_coalescing(self, device):
        works, self._coalesced = self._coalesced, None
        return works[-1] if works else self._enqueue("barrier", (), {})


def _collective(name):
    def call(self, *args, **kwargs):
        return self._enqueue(name, args, kwargs)

    return call


_NAMES = """
    allreduce allreduce_coalesced allgather allgather_coalesced _allgather_base allgather_into_tensor_coalesced
    reduce_scatter _reduce_scatter_base reduce_scatter_tensor_coalesced alltoall_base alltoall broadcast reduce gather
    scatter send recv recv_anysource
"""
for _name in _NAMES.split():
    setattr(QueuedGroup, _name, _collective(_name))


class NcclLike:
    """The transport."""

    name = "nccl-like"

    def unsupported_reason(self, device_type):
        return None if device_type == "cpu" else "it serves cpu tensors only"

    def unsupported_group_reason(self, group_size, world_size):
        return None

    def create(self, spec):
        group = QueuedGroup(spec)
        try:
            group.eager_connect()  # as `Nccl.create`
        except BaseException:
            group.shutdown()  # its thread holds it
            raise
        return group

    def runs_on_device_queue(self, device_type):
        return device_type == "cpu"

    def abort(self, inner):
        if isinstance(inner.group, QueuedGroup):
            inner.group.abort(inner.sockets)

    def is_connection_error(self, error):
        return Gloo().is_connection_error(error)


def _blocking(read):
    """A method that reads the memory of a tensor past the dispatcher, which blocks as one of a device's tensor does."""

    @functools.wraps(read)
    def reading(tensor, *args, **kwargs):
        if threading.current_thread() is threading.main_thread() and not HostBlocks.depth:
            stream.block()
        return read(tensor, *args, **kwargs)

    return reading


def install():
    """Let all groups of this process that are made from now on be queued."""
    if isinstance(groups.AUTOMATIC[0], NcclLike):
        return
    groups.AUTOMATIC = (NcclLike(), *groups.AUTOMATIC)
    groups.TRANSPORTS = (NcclLike(), *groups.TRANSPORTS)
    RECORDERS["cpu"] = stream.record
    for name in ("tolist", "numpy", "__array__"):
        setattr(torch.Tensor, name, _blocking(getattr(torch.Tensor, name)))
    _mode.__enter__()
