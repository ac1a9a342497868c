"""Attention over a sequence whose parts are on the ranks of a context group, equal to attention over the whole.

Everything else in a transformer treats each token alone, so only attention communicates. There are two ways:

    heads exchanged        An all-to-all gives each rank the whole sequence of some heads, and one back. Any attention
                           works, if the ranks can share the heads, and those of keys and values, equally. The parts of
                           the sequence are contiguous. (DeepSpeed-Ulysses, arXiv 2309.14509)
    keys, values gathered  Each rank computes its own queries against all keys before them. With causal attention, later
                           queries cost more, so each rank has one chunk from the head of the sequence and one from its
                           tail. (Llama 3, arXiv 2407.21783, section 3.3.2)

Both use two autograd functions, `gather_sequence` and `exchange`; their backward is again a collective, issued in the
order of the autograd graph, which is the same on all ranks of the group. Tensors are sent as bytes, so any dtype works.
Under torch.compile, what communicates runs between the graphs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._compile import _disable_dynamo  # pyright: ignore[reportPrivateUsage]
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from hyperpod_plugins.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceLayout:
    """Which positions of a sequence each rank of a context group has."""

    length: int
    """Number of positions of the whole sequence, the padding included."""
    degree: int
    """Number of ranks."""
    exchanges_heads: bool
    """Whether attention exchanges heads; otherwise it gathers keys and values."""

    @classmethod
    def of(cls, length: int, degree: int, *, exchanges_heads: bool) -> "SequenceLayout":
        """Return the layout of a sequence of any length, which is padded at its end so that all parts are equal."""
        num_chunks = degree if exchanges_heads else 2 * degree
        return cls(length=-(-length // num_chunks) * num_chunks, degree=degree, exchanges_heads=exchanges_heads)

    @property
    def local_length(self) -> int:
        """Number of positions of each rank."""
        return self.length // self.degree

    def chunks(self, rank: int) -> list[tuple[int, int]]:
        """Return the ranges `[begin, end)` of positions of a rank of the group, in the order in which it holds them."""
        if self.exchanges_heads:
            return [(rank * self.local_length, (rank + 1) * self.local_length)]
        size = self.local_length // 2
        return [(index * size, (index + 1) * size) for index in (rank, 2 * self.degree - 1 - rank)]

    def positions(self, rank: int, device: torch.device | str = "cpu") -> Tensor:
        """Return the positions of a rank of the group, `(local_length,)`."""
        return torch.cat([torch.arange(*chunk, device=device) for chunk in self.chunks(rank)])

    def part(self, whole: Tensor, rank: int, dim: int = 1) -> Tensor:
        """Return a rank's part of a tensor whose dimension `dim` is the padded sequence."""
        return torch.cat([whole.narrow(dim, begin, end - begin) for begin, end in self.chunks(rank)], dim)

    def whole(self, parts: Tensor, dim: int) -> Tensor:
        """Bring the parts of all ranks into the order of the sequence.

        Args:
            parts: of all ranks, stacked along a first dimension.
            dim: dimension of a part that is the sequence.
        """
        if self.exchanges_heads:
            return torch.cat(parts.unbind(), dim)
        head, tail = parts.unflatten(dim + 1, (2, self.local_length // 2)).unbind(dim + 1)
        return torch.cat([*head.unbind(), *reversed(tail.unbind())], dim)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _all_to_all(blocks: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send block `i` of the first dimension to rank `i`; return the blocks received, in order of ranks."""
    blocks = blocks.contiguous()
    received = torch.empty_like(blocks)
    dist.all_to_all_single(_bytes_of(received), _bytes_of(blocks), group=group)
    return received


def all_gather(gathered: Tensor, local: Tensor, group: dist.ProcessGroup) -> None:
    """Gather flat tensors of all ranks into one."""
    gather = getattr(dist, "all_gather_single", None)  # from torch 2.13 on
    (gather or dist.all_gather_into_tensor)(gathered, local, group=group)  # pyright: ignore[reportDeprecated]


class _Exchange(torch.autograd.Function):
    """`_all_to_all`, whose backward sends the gradients back."""

    @staticmethod
    def forward(ctx: Any, blocks: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(blocks, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _all_to_all(gradient, ctx.group), None


class _Gather(torch.autograd.Function):
    """All ranks' tensors; backward sums the gradients that the ranks have of this rank's tensor, in order of ranks."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        local = local.contiguous()
        gathered = local.new_empty((group.size(), *local.shape))
        all_gather(_bytes_of(gathered), _bytes_of(local), group)
        return gathered

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        received = _all_to_all(gradient, ctx.group)
        accumulates_in = torch.float64 if received.dtype == torch.float64 else torch.float32
        return received.sum(dim=0, dtype=accumulates_in).to(received.dtype), None


class _SharedMean(torch.autograd.Function):
    """The mean of a value over the group; the gradient of each rank's own value is that of the mean, undivided."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = value.detach().clone()
        dist.all_reduce(total, group=group)
        return total / group.size()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient, None


def exchange(blocks: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send block `i` of the first dimension to rank `i` of the group; differentiable.

    Args:
        blocks: `(ranks, ...)`, of the same shape on all ranks.
        group: of the ranks.

    Returns:
        The blocks received, `(ranks, ...)`, in order of ranks.
    """
    return _Exchange.apply(blocks, group)  # pyright: ignore[reportReturnType]


def gather_sequence(local: Tensor, layout: SequenceLayout, group: dist.ProcessGroup) -> Tensor:
    """Gather a tensor whose third dimension is this rank's part of the sequence; differentiable.

    Args:
        local: `(batch, heads, local length, size)`.
        layout: of the sequence.
        group: of the ranks that have its parts.

    Returns:
        `(batch, heads, length, size)`, in the order of the sequence. Its gradients are summed over the group.
    """
    gathered: Any = _Gather.apply(local, group)
    return layout.whole(gathered, dim=2)


@_disable_dynamo
def mean_over_context(share: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The loss of whole sequences from each rank's share of it.

    FSDP2 averages gradients over all ranks, of which `group.size()` have parts of the same samples. So each rank's
    share must be that many times its part of the loss, and the loss is the mean of the shares. It is the same on all
    ranks of the group, bit by bit, and whatever is computed of it has the right gradient.

    Args:
        share: `()`, ranks times this rank's part of the sum that is the loss; with `loss_parallel` it is a DTensor.
        group: of the ranks that have parts of the same sequences.
    """
    if isinstance(share, DTensor):
        share = share.full_tensor()  # tensor peers have the same
    return _SharedMean.apply(share, group)  # pyright: ignore[reportReturnType]


@_disable_dynamo
def attend(
    compute: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    layout: SequenceLayout,
    group: dist.ProcessGroup,
    *,
    num_columns: int = 0,
) -> Tensor:
    """Compute causal attention of this rank's queries over whole sequences.

    Args:
        compute: attention of one process: from query, key, value and mask, as below but with other heads or rows, to
            `(batch, rows, heads, value size)`. Without a mask it must be causal.
        query: `(batch, heads, local length, size)`; key and value likewise, perhaps with fewer heads.
        key: see `query`.
        value: see `query`.
        mask: `(1 or batch, 1, length, length)`, or None for plain causal attention, where heads are exchanged;
            `(1 or batch, 1, local length, length)` where keys and values are gathered.
        layout: of the sequence.
        group: of the ranks that have its parts.
        num_columns: where keys and values are gathered, the number of keys that `compute` is given for all queries; by
            default those up to the last query. It matters where a query may attend to no key, and `compute` spreads its
            weights over all that it is given.

    Returns:
        `(batch, local length, heads, value size)`.

    Raises:
        ConfigError: heads are to be exchanged and cannot be shared equally.
    """
    if not layout.exchanges_heads:
        assert mask is not None
        key, value = _together(key, value, lambda joined: gather_sequence(joined, layout, group))
        rows: list[Tensor] = []
        done = 0
        for begin, end in layout.chunks(group.rank()):
            size, columns = end - begin, num_columns or end
            own_mask = mask[:, :, done : done + size, :columns]
            own_query = query[:, :, done : done + size]
            rows.append(compute(own_query, key[:, :, :columns], value[:, :, :columns], own_mask))
            done += size
        return torch.cat(rows, dim=1)
    degree = layout.degree
    for name, tensor in (("query", query), ("key", key)):
        if tensor.shape[1] % degree:
            raise ConfigError(
                f"attention has {tensor.shape[1]} {name} heads, which {degree} ranks of a context group cannot share "
                "equally. Use a context_parallel_degree that divides them."
            )
    counts = [query.shape[1] // degree, key.shape[1] // degree, value.shape[1] // degree]
    if query.shape[-1] == value.shape[-1]:
        blocks = exchange(torch.cat([_by_heads(each, degree) for each in (query, key, value)], dim=2), group)
        query, key, value = (_by_sequence(each) for each in blocks.split(counts, dim=2))
    else:
        query, key, value = (_by_sequence(exchange(_by_heads(each, degree), group)) for each in (query, key, value))
    found = compute(query, key, value, mask)
    batch, _, heads, size = found.shape
    blocks = found.view(batch, degree, layout.local_length, heads, size).transpose(0, 1)
    return exchange(blocks, group).permute(1, 2, 0, 3, 4).flatten(2, 3)


def _together(key: Tensor, value: Tensor, gather: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Gather keys and values in one collective if their sizes agree, otherwise in two."""
    if key.shape[-1] != value.shape[-1]:
        return gather(key), gather(value)
    found_key, found_value = gather(torch.cat([key, value], dim=1)).split([key.shape[1], value.shape[1]], dim=1)
    return found_key, found_value


def _by_heads(tensor: Tensor, degree: int) -> Tensor:
    """`(batch, heads, local length, size)` as `(ranks, batch, heads / ranks, local length, size)`."""
    return tensor.unflatten(1, (degree, tensor.shape[1] // degree)).transpose(0, 1)


def _by_sequence(blocks: Tensor) -> Tensor:
    """`(ranks, batch, heads, local length, size)` as `(batch, heads, length, size)`."""
    return blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Torch's attention as `attend` calls it; fewer heads of keys and values are repeated.

    With a mask, they are repeated here: torch has no fast kernel on CUDA that takes both a mask and fewer heads.

    Args:
        query: `(batch, heads, rows, size)`.
        key: `(batch, heads or fewer, columns, size)`.
        value: like `key`.
        mask: boolean, or None for causal attention.
        dropout_p: probability of dropping a weight.
        scale: of the products; None for torch's default.

    Returns:
        `(batch, rows, heads, size)`.
    """
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1 and mask is not None:
        key, value = (each.repeat_interleave(repeats, dim=1) for each in (key, value))
    found = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout_p,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return found.transpose(1, 2)
