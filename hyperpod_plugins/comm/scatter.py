"""Reduce-scatter over gloo, with a wait that ends.

[Note: reduce-scatter on gloo] torch makes it of all-reduces of copies, or where each member's tensor is given apart, of
reductions to each member. It copies this rank's part out of them in `wait`, whatever timeout that is given, and its
handle never says that it has ended (torch 2.13). A rank that waits there for a lost peer could not be woken. So the
same is done here, from the same reductions, and gives the same bits.
"""

# pybind11's overloads have no signature that a Python override could match, and the method of the inner group that
# torch 2.10 to 2.13 share is private.
# pyright: reportIncompatibleMethodOverride=false, reportPrivateUsage=false

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

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
            works.append(inner.allreduce([sums], _said(dist.AllreduceOptions(), options)))
        else:
            sums = [_copied(part) for part in each]
            for root, part in enumerate(sums):
                to_root = _said(dist.ReduceOptions(), options)
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


def _said(options: OptionsT, wanted: dist.ReduceScatterOptions) -> OptionsT:
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
