"""Handles of collectives (`dist.Work`) that notice a lost peer, and what stands in for broken ones.

`ResilientWork` wraps the library's handle of each collective; a connection error in it breaks all groups of this
process. `current_wait` reports to the hang detection which collective this process waits in. `NoOpGroup` and
`FinishedWork` replace an inner group and its handles while collectives are suppressed. `reduce_scatter` replaces gloo's
own:

[Note: reduce-scatter on gloo] torch builds it from all-reduces of copies or, if the caller passes one tensor per
member, from one reduction to each member. It copies this rank's part out of them in `wait`, ignoring the timeout, and
its handle never reports completion (torch 2.13). A rank that waits there for a lost peer could not be woken.

For a sum or a mean in a group of two members, or in the groups of `parallel/node_collectives.py`, each member sends
every other one its part, an all-to-all, and adds what it has received in the order of ranks. So the bits do not depend
on timing, and half of the bytes of an all-reduce travel. In other groups the parts of all members might cross a
network, of which a ring sends only sums. There, and for other reductions and inputs of one tensor per member, it is
made of gloo's own reductions as torch does it.
"""

# pybind11's overloads have no signature that a Python override could match, and the method of the inner group that
# torch 2.10 to 2.13 share is private.
# pyright: reportIncompatibleMethodOverride=false, reportPrivateUsage=false

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from hyperpod_plugins.comm.options import GroupKey
from hyperpod_plugins.comm.runtime import QueuedCollective, device_queue, group_health, record_event, runtime
from hyperpod_plugins.comm.transport import InnerGroup
from hyperpod_plugins.errors import PeerLost

_GROUP_TIMEOUT = timedelta(0)
_SUM, _MEAN = dist.ReduceOp(dist.ReduceOp.SUM), dist.ReduceOp(dist.ReduceOp.AVG)
OptionsT = TypeVar("OptionsT", dist.AllreduceOptions, dist.AllToAllOptions, dist.ReduceOptions)


class ReduceScatterWork(dist.Work):
    """A reduce-scatter under way, made of collectives whose results this rank adds."""

    def __init__(
        self,
        works: Sequence[dist.Work],
        outputs: Sequence[Tensor],
        parts: Sequence[Sequence[Tensor]],
        is_mean: bool = False,
    ) -> None:
        """Keep the outputs, and for each of them the summands that the works write; `is_mean`: they are averaged."""
        super().__init__()
        self._is_mean = is_mean
        self._works, self._outputs, self._parts = list(works), list(outputs), list(parts)
        self._has_copied = False

    def wait(self, timeout: timedelta = _GROUP_TIMEOUT) -> bool:
        """Wait for each reduction for at most `timeout` (zero: that of the group), then write the outputs."""
        for work in self._works:
            _ = work.wait() if timeout == _GROUP_TIMEOUT else work.wait(timeout)
        if not self._has_copied:
            for output, summands in zip(self._outputs, self._parts, strict=True):
                total = _sum(summands)
                output.copy_((total.div_(len(summands)) if self._is_mean else total).view_as(output))
            self._parts, self._has_copied = [], True
        return True

    def is_completed(self) -> bool:
        """Whether all reductions have ended, with or without an error. Only `wait` writes the outputs."""
        return all(work.is_completed() for work in self._works)

    def raise_failure(self) -> None:
        """Raise the error of a reduction that has failed, while others may still run.

        torch prints a warning for each process that calls `is_success` of a work.
        """
        for work in self._works:
            if work.is_completed():
                _ = work.wait()

    def is_success(self) -> bool:
        """Whether no reduction has failed."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> Any:
        """The first error, or None."""
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def result(self) -> list[Tensor]:
        """The outputs."""
        return self._outputs

    def synchronize(self) -> None:
        """Same as `wait`."""
        self.wait()


def reduce_scatter(
    inner: Any,
    library: Callable[..., dist.Work],
    exchanges_parts: bool,
    outputs: Any,
    inputs: Any,
    *args: Any,
    **kwargs: Any,
) -> dist.Work:
    """Run a reduce-scatter whose wait can be ended: on gloo with CPU tensors as told above, otherwise by `library`.

    Args:
        inner: The inner group, or a no-op group.
        library: Method of `inner`: reduce-scatter of one tensor, of several, or of one tensor per member.
        exchanges_parts: Whether sums are made of exchanged parts; the same for all members.
        outputs: This rank's part, a tensor, or a list of parts.
        inputs: For each part, the whole tensor (group size x the part), or a list of one tensor per member.
        args: Passed to `library`.
        kwargs: Passed to `library`.
    """
    options = _options(*args, **kwargs)
    mine: list[Tensor] = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    given: list[Tensor | Sequence[Tensor]] = [inputs] if isinstance(outputs, Tensor) else list(inputs)
    if options is None or not _is_gloo(inner, mine) or not all(map(partial(_fits, inner), given, mine)):
        return library(outputs, inputs, *args, **kwargs)  # which also raises if the arguments are invalid
    works: list[dist.Work] = []
    parts: list[Sequence[Tensor]] = []
    is_mean = options.reduceOp == _MEAN and all(each.is_floating_point() for each in mine)
    exchanges_parts &= is_mean or options.reduceOp == _SUM
    exchanges_parts &= all(isinstance(each, Tensor) for each in given)
    for each in given:
        if isinstance(each, Tensor) and exchanges_parts:
            received = torch.empty_like(each, memory_format=torch.contiguous_format)
            to_all = _copy_options(dist.AllToAllOptions(), options)
            works.append(inner.alltoall_base(received, each.detach().contiguous(), [], [], to_all))
            parts.append(received.view(inner.size(), -1).unbind())
            continue
        if isinstance(each, Tensor):
            sums = _copied(each).view(inner.size(), -1)
            works.append(inner.allreduce([sums], _copy_options(dist.AllreduceOptions(), options)))
        else:
            sums = [_copied(part) for part in each]
            for root, part in enumerate(sums):
                to_root = _copy_options(dist.ReduceOptions(), options)
                to_root.rootRank = root
                works.append(inner.reduce([part], to_root))
        parts.append([sums[inner.rank()]])
    return ReduceScatterWork(works, mine, parts, is_mean=exchanges_parts and is_mean)


def _options(*args: Any, **kwargs: Any) -> dist.ReduceScatterOptions | None:
    """Return the options in a call's arguments; None for arguments that only the library understands."""
    values = [*args, *kwargs.values()] or [dist.ReduceScatterOptions()]
    if len(values) == 1 and isinstance(values[0], dist.ReduceOp | dist.ReduceOp.RedOpType):
        options = dist.ReduceScatterOptions()
        options.reduceOp = dist.ReduceOp(values[0]) if isinstance(values[0], dist.ReduceOp.RedOpType) else values[0]
        return options
    return values[0] if len(values) == 1 and isinstance(values[0], dist.ReduceScatterOptions) else None


def _copy_options(options: OptionsT, wanted: dist.ReduceScatterOptions) -> OptionsT:
    options.timeout, options.asyncOp = wanted.timeout, wanted.asyncOp
    if not isinstance(options, dist.AllToAllOptions):
        options.reduceOp = wanted.reduceOp
    return options


def _sum(summands: Sequence[Tensor]) -> Tensor:
    """Add tensors in their order, in place of the first."""
    first, *others = summands
    for each in others:
        first.add_(each)
    return first


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


_SLICE = timedelta(seconds=0.2)


def raise_peer_lost(cause: str | None, error: BaseException | None = None) -> NoReturn:
    """Raise `PeerLost` for a broken group, with the first cause; None if the group was never connected."""
    cause = cause or "this process has not joined the other ranks yet"
    raise PeerLost(
        f"the process groups of this rank are broken: {cause}. Nothing was sent or received. A job that "
        "recovers in place (hyperpodrun with CheckpointlessRecovery) handles this; otherwise restart from a "
        "checkpoint."
    ) from error


class PeerWait:
    """Context manager in which the step's thread waits for the peers of a group outside a collective.

    It does nothing in other threads. A class because `@contextmanager` costs more, and each step enters two such
    blocks.
    """

    def __init__(self, key: GroupKey, number: int = 0) -> None:
        """Prepare a wait; `number` is that of `ResilientProcessGroup.num_issued`, if it counts as a collective."""
        self._key, self._number = key, number
        self._is_said = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> None:
        if self._is_said:
            waiting = runtime.waiting
            waiting.since_s, waiting.number, waiting.key = time.monotonic(), self._number, self._key

    def __exit__(self, *_: object) -> None:
        if self._is_said:
            runtime.waiting.end()


def current_wait() -> tuple[GroupKey, int, float] | None:
    """Return the oldest collective in which this process waits for peers: key, number in its group, time in seconds.

    If the device has queued collectives, this is the one in which the device waits, while the step's thread is
    blocked in the driver, runs ahead, or itself waits in a later collective. Otherwise it is the one in which the
    step's thread waits. None if neither waits, and if the device has not reached its oldest collective, even though
    the step's thread may wait in a later one. Any thread may call this, but always the same one.
    """
    waiting = runtime.waiting
    key, number, since_s = waiting.key, waiting.number, waiting.since_s
    if key is not None and device_queue.is_empty:  # queued collectives are older than this wait
        return key, number, time.monotonic() - since_s
    return device_queue.oldest_wait()


class ResilientWork(dist.Work):
    """A collective under way. A connection error in it breaks all groups; see `health.py` for what happens then."""

    def __init__(
        self,
        inner: dist.Work,
        group: InnerGroup,
        on_error: Callable[[BaseException], None],
        key: GroupKey,
        *,
        number: int,
        in_slices: bool,
        queued_on: torch.device | None,
    ) -> None:
        """Wrap the handle of a collective that has been issued.

        Args:
            inner: The library's handle.
            group: The inner group.
            on_error: Called with a connection error.
            key: of the group.
            number: Number of the collective in its group and generation, counted from 1; 0 for operations that not
                all members issue, such as sends.
            in_slices: Whether to wait in slices; see [Note: slices].
            queued_on: The device on which the collective is queued; None if the caller itself waits.
        """
        super().__init__()
        self._inner: dist.Work | None = inner
        self._group: InnerGroup | None = group
        self._on_error = on_error
        self._key = key
        self._number = number
        self._in_slices = in_slices
        self._queued_on = queued_on
        self._is_reached = None if queued_on is None else record_event(queued_on)
        runtime.pending.add(self)

    def discard(self) -> None:
        """Release the library's handle; if it has not ended, the inner group keeps it."""
        (inner, self._inner), (group, self._group) = (self._inner, None), (self._group, None)
        if inner is not None and group is not None and not inner.is_completed():
            group.release_work(inner)

    def wait(self, timeout: timedelta = _GROUP_TIMEOUT) -> bool:
        """Wait for the collective; a zero timeout means that of the group."""
        inner, group = self._inner, self._group
        if inner is None or group is None:
            return self._after_break(None)
        # Waits of background threads are not reported, and must not overwrite that of the step's thread.
        is_of_step = threading.current_thread() is threading.main_thread()
        is_said = self._queued_on is None and not self._key.is_strict and is_of_step
        waiting = runtime.waiting
        if is_said:
            waiting.since_s, waiting.number, waiting.key = time.monotonic(), self._number, self._key
        try:
            if self._queued_on is not None:
                return self._queue(inner, timeout)
            if timeout != _GROUP_TIMEOUT:
                return inner.wait(timeout)
            return _wait_in_slices(inner, group) if self._in_slices else inner.wait()
        except RuntimeError as error:
            if not group.transport.is_connection_error(error):
                raise
            self._on_error(error)
            return self._after_break(error)
        finally:
            if is_said:
                waiting.end()

    def _queue(self, inner: dist.Work, timeout: timedelta) -> bool:
        """Make the device wait while the host goes on, and record the collective in `device_queue`."""
        is_queued = inner.wait() if timeout == _GROUP_TIMEOUT else inner.wait(timeout)
        assert self._queued_on is not None
        is_reached, is_done = self._is_reached, record_event(self._queued_on)
        if is_reached is not None and is_done is not None and not self._key.is_strict:
            device_queue.add(QueuedCollective(self._key, self._number, is_reached, is_done))
        return is_queued

    def _after_break(self, error: BaseException | None) -> bool:
        if self._key.is_strict or (group_health.cause is not None and not group_health.suppresses_collectives):
            raise_peer_lost(group_health.cause or str(error), error)
        return True

    def is_completed(self) -> bool:
        """Whether the collective has ended, with or without an error, and has written its outputs."""
        inner = self._inner
        if inner is None or not inner.is_completed():
            return inner is None
        if isinstance(inner, ReduceScatterWork):
            with suppress(RuntimeError):  # the collective's own error, which `wait` raises
                inner.wait()
        return True

    def is_success(self) -> bool:
        """Whether the collective has not failed; False after `discard`."""
        return self._inner is not None and self._inner.is_success()

    def exception(self) -> Any:
        """The library's error, or None."""
        return None if self._inner is None else self._inner.exception()

    def source_rank(self) -> int:
        """Rank of the sender, for a receive from any source."""
        return -1 if self._inner is None else self._inner.source_rank()

    def _source_rank(self) -> int:
        return self.source_rank()

    def result(self) -> list[torch.Tensor]:
        """Output tensors, if the library keeps them."""
        return [] if self._inner is None else self._inner.result()

    def synchronize(self) -> None:
        """Same as `wait`."""
        self.wait()

    def block_current_stream(self) -> None:
        """Make the current stream wait, without blocking the caller."""
        if self._inner is not None:
            self._inner.block_current_stream()

    def get_future(self) -> torch.futures.Future[Any]:
        """Return the library's future of the result; its errors do not break the groups."""
        return _done() if self._inner is None else self._inner.get_future()


def _wait_in_slices(inner: dist.Work, group: InnerGroup) -> bool:
    """Wait while the groups are intact; for collectives on the CPU.

    [Note: slices] When a connection is lost, gloo informs the queued transfers, but not the one whose payload is in
    flight (`Pair::signalException` skips `rx_`, and the unbound buffers in `tx_`; torch 2.13). A collective
    interrupted there sleeps until its timeout. So a wait on the CPU is a series of short waits, and a collective that
    has not ended after a break is abandoned (see `InnerGroup.release`). gloo's own reduce-scatter has no such waits, so
    `reduce_scatter` replaces it. Sends and receives are not waited for in slices: if the wait for one times out, gloo
    closes all connections of the group.

    Raises:
        RuntimeError: the collective failed, or the groups broke before it ended.
    """
    while True:
        try:
            return inner.wait(_SLICE)
        except RuntimeError:
            if inner.is_completed():
                return inner.wait()  # raises the collective's own error, or none if it has just ended
            if isinstance(inner, ReduceScatterWork):
                inner.raise_failure()
        if group_health.cause is not None:
            group.release_work(inner)
            raise dist.DistNetworkError(f"the groups are broken: {group_health.cause}")


class FinishedWork(dist.Work):
    """Handle of a collective that did nothing."""

    def wait(self, timeout: timedelta = _GROUP_TIMEOUT) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Always true."""
        return True

    def is_success(self) -> bool:
        """Always true, because nothing was attempted."""
        return True

    def exception(self) -> None:
        """Always None."""

    def source_rank(self) -> int:
        """0; there was no sender."""
        return 0

    def _source_rank(self) -> int:
        return 0

    def result(self) -> list[torch.Tensor]:
        """An empty list."""
        return []

    def synchronize(self) -> None:
        """Return at once."""

    def block_current_stream(self) -> None:
        """Return at once."""

    def get_future(self) -> torch.futures.Future[Any]:
        """A completed future."""
        return _done()


def _done() -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result([])
    return future


class NoOpGroup:
    """Stands in for an inner group and does nothing: outputs keep their values."""

    def __init__(self, device_types: list[torch.device]) -> None:
        self._device_types = device_types

    def _nothing(self, *args: Any, **kwargs: Any) -> dist.Work:
        return FinishedWork()

    allreduce = allreduce_coalesced = allgather = allgather_coalesced = _allgather_base = _nothing
    allgather_into_tensor_coalesced = reduce_scatter = _reduce_scatter_base = reduce_scatter_tensor_coalesced = _nothing
    alltoall_base = alltoall = broadcast = reduce = gather = scatter = send = recv = recv_anysource = _nothing
    barrier = _end_coalescing = _nothing

    def _start_coalescing(self, device: torch.device) -> None:
        """Does nothing."""

    def _set_sequence_number_for_group(self) -> None:
        """Does nothing."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Does nothing."""


def no_op_group() -> dist.ProcessGroup:
    """Return a `NoOpGroup`, cast to the type that callers expect."""
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    return cast("dist.ProcessGroup", NoOpGroup([torch.device(device) for device in devices]))
