"""Attention over a sequence whose parts are on the ranks of a context group, which pass keys and values round a ring.

Each rank computes its queries against one part of the keys after the other, while the next part is under way, and keeps
the largest product and the sum of each query so far. So a rank holds its own part, the one that it computes with, in
float32, and the one that is under way, however many there are. In backward, keys and values are passed round once
more, together with their gradients, in float32. The order of sums is that of the ring, so results have
the same bits each time. The parts are those of `SequenceLayout` where keys are gathered, which balances causal
attention. (Liu et al., Ring Attention with Blockwise Transformers, arXiv 2310.01889)
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo  # pyright: ignore[reportPrivateUsage]
from torch.autograd.function import once_differentiable

from hyperpod_plugins.parallel.context_attention import SequenceLayout

_TILE = 256
"""Queries whose products with the keys of a part exist at once."""


@_disable_dynamo
def attend_in_ring(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    layout: SequenceLayout,
    group: dist.ProcessGroup,
    *,
    scale: float | None = None,
) -> Tensor:
    """Compute causal attention of this rank's queries over whole sequences.

    Args:
        query: `(batch, heads, local length, size)`; key and value likewise, perhaps with fewer heads.
        key: see `query`.
        value: see `query`.
        mask: boolean, `(1 or batch, 1, local length, length)`, or None for plain causal attention.
        layout: of the sequence, of the kind in which keys are gathered.
        group: of the ranks that have its parts.
        scale: of the products; None for 1 / sqrt(size).

    Returns:
        `(batch, local length, heads, value size)`. A query that may attend to no key gets zeros.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    found: Any = _RingAttention.apply(query, key, value, mask, layout, group, scale)
    return found.transpose(1, 2)


@dataclass(frozen=True, slots=True)
class _Tile:
    """Some of this rank's queries, and the keys of one chunk of a part, some of which they may attend to."""

    rows: slice
    """Of the queries that this rank has."""
    columns: slice
    """Of the keys of the part."""
    allowed: Tensor | None
    """Which of these keys each of these queries may attend to; None for all."""


@dataclass(frozen=True, slots=True)
class _Ring:
    """What the ranks of a context group pass on to the next one."""

    layout: SequenceLayout
    group: dist.ProcessGroup
    mask: Tensor | None

    def source(self, turn: int) -> int:
        """The rank whose part this rank has in a turn."""
        return (self.group.rank() - turn) % self.layout.degree

    def pass_on(self, *tensors: Tensor) -> Callable[[], list[Tensor]]:
        """Begin to send tensors to the next rank; returns what waits for those of the rank before, of equal shapes."""
        degree, rank = self.layout.degree, self.group.rank()
        after, before = (rank + 1) % degree, (rank - 1) % degree
        given = torch.cat([each.contiguous().view(-1).view(torch.uint8) for each in tensors])
        taken = torch.empty_like(given)
        sent, received = ([len(given) * (each == other) for each in range(degree)] for other in (after, before))
        work: Any = dist.all_to_all_single(taken, given, received, sent, group=self.group, async_op=True)

        def wait() -> list[Tensor]:
            work.wait()
            parts = taken.split([each.nbytes for each in tensors])
            return [part.view(each.dtype).view(each.shape) for part, each in zip(parts, tensors, strict=True)]

        return wait

    def tiles(self, turn: int, device: torch.device) -> Iterator[_Tile]:
        """The tiles of a turn, without those whose keys all come after their queries."""
        first_row = 0
        for begin, end in self.layout.chunks(self.group.rank()):
            for place in range(begin, end, _TILE):
                last = min(place + _TILE, end)
                rows = slice(first_row + place - begin, first_row + last - begin)
                first_column = 0
                for key_begin, key_end in self.layout.chunks(self.source(turn)):
                    columns = slice(first_column, first_column + key_end - key_begin)
                    first_column = columns.stop
                    if key_begin < last:
                        yield _Tile(rows, columns, self._allowed(rows, (place, last), (key_begin, key_end), device))
            first_row += end - begin

    def _allowed(
        self, rows: slice, queries: tuple[int, int], keys: tuple[int, int], device: torch.device
    ) -> Tensor | None:
        if self.mask is not None:
            return self.mask[:, :, None, rows, slice(*keys)]
        if keys[1] <= queries[0] + 1:
            return None
        return torch.arange(*keys, device=device) <= torch.arange(*queries, device=device)[:, None]


def _products(query: Tensor, key: Tensor, tile: _Tile, scale: float) -> Tensor:
    """`(batch, heads of keys, queries per key, rows, columns)`, minus infinity where a query may not attend."""
    found = scale * (query[..., tile.rows, :] @ key[:, :, None, tile.columns].transpose(-1, -2))
    return found if tile.allowed is None else found.masked_fill(~tile.allowed, -torch.inf)


class _RingAttention(torch.autograd.Function):
    """See `attend_in_ring`; the result is `(batch, heads, local length, value size)`."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        layout: SequenceLayout,
        group: dist.ProcessGroup,
        scale: float,
    ) -> Tensor:
        with torch.autocast(query.device.type, enabled=False):  # backward computes the same products, outside of it
            return _RingAttention._forward(ctx, query, key, value, _Ring(layout, group, mask), scale)

    @staticmethod
    def _forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, ring: _Ring, scale: float) -> Tensor:
        layout, exact = ring.layout, _sum_type(query)
        wide = query.to(exact).unflatten(1, (key.shape[1], -1))
        total = wide.new_zeros((*wide.shape[:-1], value.shape[-1]))
        weights = wide.new_zeros(wide.shape[:-1])
        largest = torch.full_like(weights, -torch.inf)
        keys, values = key, value
        for turn in range(layout.degree):
            wait = ring.pass_on(keys, values) if turn + 1 < layout.degree else None
            wide_keys, wide_values = keys.to(exact), values.to(exact)
            for tile in ring.tiles(turn, query.device):
                products = _products(wide, wide_keys, tile, scale)
                before = largest[..., tile.rows]
                now = torch.maximum(before, products.amax(dim=-1))
                shift = now.masked_fill(now == -torch.inf, 0.0)
                products = (products - shift[..., None]).exp_()
                fades = (before - shift).exp()
                weights[..., tile.rows] = weights[..., tile.rows] * fades + products.sum(dim=-1)
                added = products @ wide_values[:, :, None, tile.columns]
                total[..., tile.rows, :] = total[..., tile.rows, :] * fades[..., None] + added
                largest[..., tile.rows] = now
            if wait is not None:
                keys, values = wait()
        is_none = weights == 0.0
        total /= weights.masked_fill(is_none, 1.0)[..., None]
        result = total.flatten(1, 2).to(query.dtype)
        # Of a query that attends to none, each weight is exp(-inf).
        logarithm = (largest + weights.log()).masked_fill(is_none, torch.inf)
        ctx.save_for_backward(query, key, value, result, logarithm)
        ctx.ring, ctx.scale = ring, scale
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        with torch.autocast(gradient.device.type, enabled=False):
            return _RingAttention._backward(ctx, gradient)

    @staticmethod
    def _backward(ctx: Any, gradient: Tensor) -> Any:
        query, key, value, result, logarithm = ctx.saved_tensors
        ring: _Ring = ctx.ring
        exact, num_groups = _sum_type(query), key.shape[1]
        wide, wide_gradient, wide_result = (
            each.to(exact).unflatten(1, (num_groups, -1)) for each in (query, gradient, result)
        )
        inner = (wide_gradient * wide_result).sum(dim=-1)
        of_query = torch.zeros_like(wide)
        keys, values = key, value
        of_keys, of_values = (each.new_zeros(each.shape, dtype=exact) for each in (key, value))
        for turn in range(ring.layout.degree):
            wait = ring.pass_on(keys, values) if turn + 1 < ring.layout.degree else None
            wide_keys, wide_values = keys.to(exact), values.to(exact)
            for tile in ring.tiles(turn, query.device):
                weights = (_products(wide, wide_keys, tile, ctx.scale) - logarithm[..., tile.rows, None]).exp_()
                own = wide_gradient[..., tile.rows, :]
                of_values[:, :, tile.columns] += (weights.transpose(-1, -2) @ own).sum(dim=2)
                of_weights = own @ wide_values[:, :, None, tile.columns].transpose(-1, -2)
                of_products = weights * (of_weights - inner[..., tile.rows, None]) * ctx.scale
                of_query[..., tile.rows, :] += of_products @ wide_keys[:, :, None, tile.columns]
                of_keys[:, :, tile.columns] += (of_products.transpose(-1, -2) @ wide[..., tile.rows, :]).sum(dim=2)
            of_keys, of_values = ring.pass_on(of_keys, of_values)()
            if wait is not None:
                keys, values = wait()
        return of_query.flatten(1, 2).to(query.dtype), of_keys.to(key.dtype), of_values.to(value.dtype), *[None] * 4


def _sum_type(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
