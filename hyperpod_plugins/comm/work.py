"""Reduce-scatter over gloo, with a wait that ends.

[Note: reduce-scatter on gloo] torch makes it of all-reduces of copies, or where each member's tensor is given apart, of
reductions to each member. It copies this rank's part out of them in `wait`, whatever timeout that is given, and its
handle never says that it has ended (torch 2.13). A rank that waits there for a lost peer could not be woken. So the
same is done here, from the same reductions, and gives the same bits.
"""

# pybind11's overloads have no signature that a Python override could match, and the method of the inner group that
# torch 2.10 to 2.13 share is private.
# pyright: reportIncompatibleMethodOverride=false, reportPrivateUsage=false
# pybind11's overloads have no signature that a Python override could match.
# pyright: reportIncompatibleMethodOverride=false

import ctypes
import re
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn, TypeVar, cast
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from hyperpod_plugins.comm.api import GroupKey
from hyperpod_plugins.comm.device_queue import QueuedCollective, device_queue, record
from hyperpod_plugins.comm.health import group_health
from hyperpod_plugins.comm.transport import transport_of
from hyperpod_plugins.errors import PeerLost

_FOREVER = timedelta(0)
OptionsT = TypeVar("OptionsT", dist.AllreduceOptions, dist.ReduceOptions)


class ScatteredSum(dist.Work):
    """Reductions under way, of some of which this rank keeps a part."""

    def __init__(self, works: Sequence[dist.Work], outputs: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
        super().__init__()
        self._works, self._outputs, self._parts = list(works), list(outputs), list(parts)
        self._has_copied = False

    def wait(self, timeout: timedelta = _FOREVER) -> bool:
        """Wait for each reduction at most `timeout`, where zero means the group's, and write the outputs."""
        for work in self._works:
            _ = work.wait() if timeout == _FOREVER else work.wait(timeout)
        if not self._has_copied:
            for output, part in zip(self._outputs, self._parts, strict=True):
                output.copy_(part.view_as(output))
            self._parts, self._has_copied = [], True
        return True

    def is_completed(self) -> bool:
        """Whether all have ended, well or not. The outputs are written by `wait` alone."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Whether all ended well."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> Any:
        """The first error."""
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def result(self) -> list[Tensor]:
        """The outputs."""
        return self._outputs

    def synchronize(self) -> None:
        """Wait."""
        self.wait()


def reduce_scatter(
    inner: Any,
    library: Callable[..., dist.Work],
    outputs: Any,
    inputs: Any,
    *args: Any,
    **kwargs: Any,
) -> dist.Work:
    """`library(outputs, inputs, ...)`, a method of `inner`, in a way that can be left; on the GPU that method itself.

    Args:
        inner: The group, or one that does nothing.
        library: Its reduce-scatter of one tensor, of several, or of one tensor per member.
        outputs: This rank's part, a tensor, or a list of parts.
        inputs: For each part, the whole (size of the group x the part), or a list of what each member is to get.
        args: As `library` takes them.
        kwargs: Likewise.
    """
    options = _options(*args, **kwargs)
    mine: list[Tensor] = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    given: list[Tensor | Sequence[Tensor]] = [inputs] if isinstance(outputs, Tensor) else list(inputs)
    if options is None or not _is_gloo(inner, mine) or not all(map(partial(_fits, inner), given, mine)):
        return library(outputs, inputs, *args, **kwargs)  # which says what is wrong, where something is
    works: list[dist.Work] = []
    parts: list[Tensor] = []
    for each in given:
        if isinstance(each, Tensor):
            sums = _copied(each).view(inner.size(), -1)
            works.append(inner.allreduce([sums], _options_said(dist.AllreduceOptions(), options)))
        else:
            sums = [_copied(part) for part in each]
            for root, part in enumerate(sums):
                to_root = _options_said(dist.ReduceOptions(), options)
                to_root.rootRank = root
                works.append(inner.reduce([part], to_root))
        parts.append(sums[inner.rank()])
    return ScatteredSum(works, mine, parts)


def _options(*args: Any, **kwargs: Any) -> dist.ReduceScatterOptions | None:
    """What the caller wants; None for a spelling that only the library knows."""
    values = [*args, *kwargs.values()] or [dist.ReduceScatterOptions()]
    if len(values) == 1 and isinstance(values[0], dist.ReduceOp | dist.ReduceOp.RedOpType):
        options = dist.ReduceScatterOptions()
        options.reduceOp = dist.ReduceOp(values[0]) if isinstance(values[0], dist.ReduceOp.RedOpType) else values[0]
        return options
    return values[0] if len(values) == 1 and isinstance(values[0], dist.ReduceScatterOptions) else None


def _options_said(options: OptionsT, wanted: dist.ReduceScatterOptions) -> OptionsT:
    options.reduceOp, options.timeout, options.asyncOp = wanted.reduceOp, wanted.timeout, wanted.asyncOp
    return options


def _is_gloo(inner: object, outputs: Sequence[Tensor]) -> bool:
    if not isinstance(inner, dist.ProcessGroup) or any(output.device.type != "cpu" for output in outputs):
        return False
    return inner._get_backend(torch.device("cpu")).name() == "gloo"


def _fits(inner: dist.ProcessGroup, given: Tensor | Sequence[Tensor], part: Tensor) -> bool:
    wholes = [given] if isinstance(given, Tensor) else list(given)
    if any(each.dtype != part.dtype or each.layout != torch.strided for each in wholes):
        return False
    if isinstance(given, Tensor):
        return given.numel() == inner.size() * part.numel()
    return len(wholes) == inner.size() and wholes[inner.rank()].numel() == part.numel()


def _copied(given: Tensor) -> Tensor:
    return given.detach().clone(memory_format=torch.contiguous_format)


# Handles of collectives: one that notices a lost peer, one for a collective that did nothing, and a group of those.


_TRANSPORT_WORDS = re.compile(
    r"onnection (closed|reset|refused|was likely closed)|roken pipe|imed? ?out|[Ss]ocket|NCCL|ncclRemote|[Aa]bort"
    r"|peer|[Nn]etwork|onnect\b|onnectFullMesh|Read error|Write error|recv|Resource temporarily|EOF"
)
"""What libraries say when a peer or the way to it is gone; anything else is a mistake in a program, and is raised."""

_SLICE = timedelta(seconds=0.2)
_PATIENCE_S = 0.3
_unfinished: dict[dist.ProcessGroup, list[dist.Work]] = {}
_gone: "WeakSet[dist.ProcessGroup]" = WeakSet()
_releasing = threading.Lock()

pending: "WeakSet[ResilientWork]" = WeakSet()


def is_transport_error(error: BaseException) -> bool:
    """Whether a collective failed for want of a peer, not because it was called wrongly."""
    if isinstance(error, dist.DistError):
        return True
    return type(error) is RuntimeError and _TRANSPORT_WORDS.search(str(error)) is not None


def transport_message(error: BaseException) -> str:
    """The part of a library's message that says something: without its source file, and without its advice."""
    line = str(error).partition("\n")[0].partition(" This is typically caused")[0]
    return re.sub(r"^\[\S+\]\s*", "", line)


def raise_peer_lost(cause: str, error: BaseException | None = None) -> NoReturn:
    """Raise the error of a broken group outside a step, with the first cause."""
    raise PeerLost(
        f"the process groups of this rank are broken: {cause}. Nothing was sent or received. Where the job recovers "
        "in place (hyperpodrun with CheckpointlessRecovery) this is handled; otherwise restart from a checkpoint."
    ) from error


def discard_pending() -> None:
    """Let go of the library's handles of all collectives under way."""
    for _ in range(100):
        try:
            works = list(pending)
        except RuntimeError:  # another thread has just begun a collective
            continue
        for work in works:
            work.discard()
        return


class Waiting:
    """In which group's collective the step's thread waits now, for whoever looks after hangs."""

    def __init__(self) -> None:
        self.role: GroupKey | None = None
        """What the group is for, or None while nothing waits."""
        self.since_s = 0.0
        """Monotonic time at which the wait began."""
        self.number = 0
        """Number of the collective among those of its group, in this generation; 0 where that is not known."""


waiting = Waiting()


class PeerWait:
    """A block in which the step's thread waits for the peers of a group otherwise than in a collective.

    In other threads it does nothing. A class, for a generator costs more, and each step enters two such blocks.
    """

    def __init__(self, role: GroupKey) -> None:
        self._role = role
        self._is_said = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> None:
        if self._is_said:
            waiting.since_s, waiting.number, waiting.role = time.monotonic(), 0, self._role

    def __exit__(self, *_: object) -> None:
        if self._is_said:
            waiting.role = None


def current_wait() -> tuple[GroupKey, int, float] | None:
    """The oldest collective for whose peers this process waits: role, number in its group, and how long, in seconds.

    The device waits in it while the step's thread is blocked in the driver, runs ahead, or waits in a later collective
    itself; where the device has nothing to complete, the step's thread does. None where neither waits, and where the
    device has not come to its oldest collective, though that thread may wait in a later one. Any one thread may call
    this, always the same.
    """
    role, number, since_s = waiting.role, waiting.number, waiting.since_s
    if role is not None and device_queue.is_empty:  # what it was given came before this wait
        return role, number, time.monotonic() - since_s
    return device_queue.oldest_wait()


class ResilientWork(dist.Work):
    """A collective under way. A transport error in it breaks the groups; what that means is the breaker's phase."""

    def __init__(
        self,
        inner: dist.Work,
        group: dist.ProcessGroup,
        on_error: Callable[[BaseException], None],
        role: GroupKey,
        *,
        number: int,
        in_slices: bool,
        queued_on: torch.device | None,
    ) -> None:
        """Take hold of a collective that has been issued.

        Args:
            inner: The library's handle.
            group: The inner group.
            on_error: Called with a transport error.
            role: What the group is for.
            number: How many collectives of the group were issued in this generation, this one included; 0 for what not
                all members issue alike.
            in_slices: Whether its wait is made of short ones; see the note on slices.
            queued_on: The device on which it is queued; None where the caller itself waits.
        """
        super().__init__()
        self._inner: dist.Work | None = inner
        self._group: dist.ProcessGroup | None = group
        self._on_error = on_error
        self._role = role
        self._number = number
        self._in_slices = in_slices
        self._queued_on = queued_on
        self._is_reached = None if queued_on is None else record(queued_on)
        pending.add(self)

    def discard(self) -> None:
        """Let go of the library's handle; of one that has not ended `let_go` will hear."""
        (inner, self._inner), (group, self._group) = (self._inner, None), (self._group, None)
        if inner is not None and group is not None and not inner.is_completed():
            release_work(group, inner)

    def wait(self, timeout: timedelta = _FOREVER) -> bool:
        """Wait for the collective. Zero means no timeout but the group's."""
        inner, group = self._inner, self._group
        if inner is None or group is None:
            return self._after_break(None)
        # Threads beside the step have a wait of their own, which is nobody's business, and leave the step's alone.
        is_of_step = threading.current_thread() is threading.main_thread()
        is_said = self._queued_on is None and not self._role.is_strict and is_of_step
        if is_said:
            waiting.since_s, waiting.number, waiting.role = time.monotonic(), self._number, self._role
        try:
            if self._queued_on is not None:
                return self._queue(inner, timeout)
            if timeout != _FOREVER:
                return inner.wait(timeout)
            return _wait_in_slices(inner, group) if self._in_slices else inner.wait()
        except RuntimeError as error:
            if not is_transport_error(error):
                raise
            self._on_error(error)
            return self._after_break(error)
        finally:
            if is_said:
                waiting.role = None

    def _queue(self, inner: dist.Work, timeout: timedelta) -> bool:
        """Let the device wait; the host goes on, and `device_queue` knows."""
        is_queued = inner.wait() if timeout == _FOREVER else inner.wait(timeout)
        assert self._queued_on is not None
        is_reached, is_done = self._is_reached, record(self._queued_on)
        if is_reached is not None and is_done is not None and not self._role.is_strict:
            device_queue.add(QueuedCollective(self._role, self._number, is_reached, is_done))
        return is_queued

    def _after_break(self, error: BaseException | None) -> bool:
        if self._role.is_strict or (group_health.cause is not None and not group_health.suppresses_collectives):
            raise_peer_lost(group_health.cause or str(error), error)
        return True

    def is_completed(self) -> bool:
        """Whether the collective has ended, well or not, and has written its outputs."""
        inner = self._inner
        if inner is None or not inner.is_completed():
            return inner is None
        if isinstance(inner, ScatteredSum) and inner.is_success():
            inner.wait()
        return True

    def is_success(self) -> bool:
        """Whether it ended well."""
        return self._inner is not None and self._inner.is_success()

    def exception(self) -> Any:
        """The library's error."""
        return None if self._inner is None else self._inner.exception()

    def source_rank(self) -> int:
        """Who sent, for a receive from anybody."""
        return -1 if self._inner is None else self._inner.source_rank()

    def _source_rank(self) -> int:
        return self.source_rank()

    def result(self) -> list[torch.Tensor]:
        """Output tensors, where the library keeps them."""
        return [] if self._inner is None else self._inner.result()

    def synchronize(self) -> None:
        """Make the current stream wait."""
        self.wait()

    def block_current_stream(self) -> None:
        """Make the current stream wait, not the caller."""
        if self._inner is not None:
            self._inner.block_current_stream()

    def get_future(self) -> torch.futures.Future[Any]:
        """The result, when it is there."""
        return _done() if self._inner is None else self._inner.get_future()


def queueing_device(group: dist.ProcessGroup, arguments: Sequence[Any]) -> torch.device | None:
    """The device on which a collective with these arguments is queued (see `Transport.is_queued`).

    One without tensors, a barrier, is queued where the group serves such a device. None where the caller itself waits.
    """
    transport = transport_of(group)
    if transport is None:
        return None
    for argument in arguments:
        while isinstance(argument, list | tuple) and argument:
            argument = argument[0]
        if isinstance(argument, torch.Tensor):
            return argument.device if transport.is_queued(argument.device.type) else None
    return next((device for device in group._device_types if transport.is_queued(device.type)), None)


def release_group(group: dist.ProcessGroup) -> None:
    """Say that an inner group, whose connections are cut, will not be used any more.

    If a collective in it sleeps on (see the note on slices), both are kept until it ends, which its timeout sees to:
    destroying them would wait.
    """
    with _releasing:
        _gone.add(group)
        works = _unfinished.pop(group, [])
    deadline_s = time.monotonic() + _PATIENCE_S
    while not _have_ended(works):
        if time.monotonic() > deadline_s:
            _keep(group, works)
            return
        time.sleep(0.002)


def release_work(group: dist.ProcessGroup, work: dist.Work) -> None:
    """Wait no more for a collective that has not ended; of its group `let_go` will be called, or has been."""
    with _releasing:
        if group not in _gone:
            _unfinished.setdefault(group, []).append(work)
            return
    _keep(group, [work])


def _keep(group: dist.ProcessGroup, works: list[dist.Work]) -> None:
    for thing in (group, *works):  # not even the end of the process may destroy them
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
    threading.Thread(target=_await_ends, args=(group, works), name="hyperpod_asleep", daemon=True).start()


def _await_ends(group: dist.ProcessGroup, works: list[dist.Work]) -> None:
    while not _have_ended(works):
        time.sleep(1.0)
    for thing in (group, *works):
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(thing))


def _have_ended(works: list[dist.Work]) -> bool:
    return all(work.is_completed() for work in works)


def _wait_in_slices(inner: dist.Work, group: dist.ProcessGroup) -> bool:
    """Wait as long as the groups are whole; for collectives on the CPU.

    [Note: slices] gloo tells the transfers that wait for their turn that a connection is gone, but not the one whose
    payload is on its way (`Pair::signalException` passes over `rx_`, and over what `tx_` holds of unbound buffers;
    torch 2.13). A collective that was cut there sleeps on until its timeout. So a wait on the CPU is made of short
    ones, and one that goes on after a break is left to itself (see `let_go`). gloo's own reduce-scatter has no such
    waits; `scatter.py` mends that.
    Not so the wait of a send or a receive: where one of those times out, gloo closes all connections of the group.

    Raises:
        RuntimeError: the collective failed, or the groups broke and it did not end.
    """
    while True:
        try:
            return inner.wait(_SLICE)
        except RuntimeError:
            if inner.is_completed():
                return inner.wait()  # its own error, or none if it ended just now
            if not inner.is_success():
                raise  # one of several has failed
        if group_health.cause is not None:
            release_work(group, inner)
            raise dist.DistNetworkError(f"the groups are broken: {group_health.cause}")


class FinishedWork(dist.Work):
    """A collective that did nothing."""

    def wait(self, timeout: timedelta = _FOREVER) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Always."""
        return True

    def is_success(self) -> bool:
        """Always, for nothing was tried."""
        return True

    def exception(self) -> None:
        """Nothing."""

    def source_rank(self) -> int:
        """Nobody sent."""
        return 0

    def _source_rank(self) -> int:
        return 0

    def result(self) -> list[torch.Tensor]:
        """Nothing."""
        return []

    def synchronize(self) -> None:
        """Return at once."""

    def block_current_stream(self) -> None:
        """Return at once."""

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that is done."""
        return _done()


def _done() -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result([])
    return future


class NoOpGroup:
    """Stands where an inner group would, and does nothing: outputs stay as they are."""

    def __init__(self, device_types: list[torch.device]) -> None:
        self._device_types = device_types

    def _nothing(self, *args: Any, **kwargs: Any) -> dist.Work:
        return FinishedWork()

    allreduce = allreduce_coalesced = allgather = allgather_coalesced = _allgather_base = _nothing
    allgather_into_tensor_coalesced = reduce_scatter = _reduce_scatter_base = reduce_scatter_tensor_coalesced = _nothing
    alltoall_base = alltoall = broadcast = reduce = gather = scatter = send = recv = recv_anysource = _nothing
    barrier = _end_coalescing = _nothing

    def _start_coalescing(self, device: torch.device) -> None:
        """Nothing will be issued."""

    def _set_sequence_number_for_group(self) -> None:
        """There is nobody to agree with."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Nothing waits."""


def no_op_group() -> dist.ProcessGroup:
    """A `QuietGroup`, under the type that callers expect."""
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    return cast("dist.ProcessGroup", NoOpGroup([torch.device(device) for device in devices]))
