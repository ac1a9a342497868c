"""Experts that are divided among ranks: each token goes to the ranks that hold its experts, and its results come back.

Every rank of an expert group has tokens of its own. For each layer of experts it sends a copy of a token for each
expert that the token was routed to, and gets back what these experts computed; nothing is dropped:

    order      the pairs (token, expert) by expert, so that those of a rank lie together
    counts     each rank tells every other one how many pairs it sends for each of its experts
    dispatch   all-to-all of the tokens' hidden states, of a different number of rows for each pair of ranks
    compute    this rank's experts, on the rows of all ranks
    combine    all-to-all back; the rank that has the token weighs and adds up its results

Backward runs the same exchanges in the opposite direction, in the order of the autograd graph, which is the same on all
ranks of the group: it has both exchanges also on a rank whose experts get no row.

[Note: gradients of experts] Experts get gradients from the tokens of all ranks of their group: those of the sum of the
group's losses. FSDP2 averages them over the ranks that share the experts, and these are fewer than the ranks whose
losses are averaged, by the size of the group. So the gradients of rows that come back to the experts are divided by it,
and those that leave the experts towards the tokens are multiplied by it again; for a power of two, that changes no bit.

[Note: with tensor parallelism] The ranks of a tensor group have the same tokens. Each takes an equal part of them to
the experts (`TokenParts`), and all get all results, so that no token is computed twice. Experts are not split by their
features: the ranks of a tensor group are among those over which FSDP2 shards and averages them. Their number has to be
made up for as well, since their gradients are terms of one loss.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from hyperpod_plugins.comm import group_health
from hyperpod_plugins.errors import ConfigError, format_list
from hyperpod_plugins.parallel.context_attention import all_gather


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routes:
    """Which rows of one layer's forward go to which rank of an expert group, and come back."""

    group: dist.ProcessGroup
    num_choices: int
    """Number of experts that each token is routed to."""
    order: Tensor
    """Pairs (token, choice) by expert, `(tokens x choices,)`."""
    sent: list[int]
    """Number of rows that go to each rank."""
    received: list[int]
    """Number of rows that come from each rank."""
    tensor_degree: int = 1
    """Number of ranks that divide the tokens before."""

    @property
    def gradient_divisor(self) -> float:
        """Ranks whose losses are averaged, per rank over which FSDP2 averages; see [Note: gradients of experts]."""
        return len(self.sent) / self.tensor_degree

    @property
    def num_tokens(self) -> int:
        """Number of this rank's tokens."""
        return len(self.order) // self.num_choices

    @property
    def place(self) -> Tensor:
        """Place of each pair (token, choice) in `order`."""
        place = torch.empty_like(self.order)
        place[self.order] = torch.arange(len(self.order), device=self.order.device)
        return place

    def send(self, rows: Tensor) -> Tensor:
        """Send rows in `order` to the ranks that hold their experts."""
        return exchange_rows(rows, self.sent, self.received, self.group)

    def send_back(self, rows: Tensor) -> Tensor:
        """Send rows back to the ranks that they came from, where they are in `order` again."""
        return exchange_rows(rows, self.received, self.sent, self.group)


def check_inputs(layer: str, hidden: Tensor, expert_index: Tensor, weights: Tensor) -> None:
    """Check the inputs of a layer of experts, `layer`.

    Raises:
        ConfigError: they are not `(tokens, hidden)`, `(tokens, choices)` and `(tokens, choices)`.
    """
    shapes = [tuple(each.shape) for each in (hidden, expert_index, weights)]
    if [len(shape) for shape in shapes] != [2, 2, 2] or shapes[1] != shapes[2] or len(hidden) != len(expert_index):
        raise ConfigError(
            f"{layer} must be called with hidden states (tokens, hidden), indices of experts (tokens, choices) and "
            f"weights (tokens, choices), but their shapes are {format_list(map(str, shapes))}. Flatten other "
            "dimensions before, or use expert_parallel_degree=1."
        )


def route(
    expert_index: Tensor, num_experts: int, group: dist.ProcessGroup, *, tensor_degree: int = 1
) -> tuple[Routes, Tensor]:
    """Decide which rows go to which rank. A collective, after which the host waits for the device.

    Args:
        expert_index: experts of each token, `(tokens, choices)`.
        num_experts: of the whole layer; each rank of the group has an equal part of them, in order.
        group: of the ranks that the experts are divided among.
        tensor_degree: number of ranks that divide the tokens before.

    Returns:
        The routes, and for each row that comes here the index of its expert among those of this rank, `(rows,)`.

    Raises:
        ConfigError: a token was routed to an expert that does not exist.
    """
    experts, degree = expert_index.reshape(-1), group.size()
    order = torch.argsort(experts, stable=True)
    counts = torch.bincount(experts, minlength=num_experts)
    if len(counts) != num_experts:
        raise ConfigError(
            f"a token was routed to expert {len(counts) - 1}, but the layer has {num_experts} experts, counted from 0. "
            "Use expert_parallel_degree=1 for a router that chooses others."
        )
    sent = counts.view(degree, -1)
    received = torch.zeros_like(sent)
    with group_health.checks_host_read():
        dist.all_to_all_single(received, sent, group=group)
        sizes = torch.stack([sent.sum(dim=1), received.sum(dim=1)]).tolist()
    if group_health.is_unavailable:  # what has arrived may be garbage, such as a size of terabytes
        received.zero_()
        sizes[1] = [0] * degree
    own = torch.arange(num_experts // degree, device=experts.device).repeat(degree)
    routes = Routes(
        group=group,
        num_choices=expert_index.shape[-1],
        order=order,
        sent=sizes[0],
        received=sizes[1],
        tensor_degree=tensor_degree,
    )
    return routes, own.repeat_interleave(received.reshape(-1), output_size=sum(sizes[1]))


def compute_with_experts(
    compute: Callable[[Tensor, Tensor], Tensor],
    hidden: Tensor,
    weights: Tensor,
    routes: Routes,
    expert_of_row: Tensor,
) -> Tensor:
    """Compute a layer of experts whose experts are on several ranks. Differentiable.

    Args:
        compute: this rank's experts: from rows `(rows, hidden)` and their experts `(rows,)` to `(rows, hidden)`; also
            for no rows, with a result from which backward reaches them.
        hidden: this rank's tokens, `(tokens, hidden)`.
        weights: of the experts of each token, `(tokens, choices)`.
        routes: see `route`.
        expert_of_row: see `route`.

    Returns:
        The weighted sum of the results of each token's experts, `(tokens, hidden)`, in the type of `hidden`.
    """
    rows: Any = _Dispatch.apply(hidden, routes)
    results: Any = _Combine.apply(compute(rows, expert_of_row), routes)
    return (results * weights.unsqueeze(-1)).sum(dim=1).to(hidden.dtype)


class _Dispatch(torch.autograd.Function):
    """The rows that experts of this rank compute, `(rows, hidden)`, from tokens `(tokens, hidden)`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, routes: Routes) -> Tensor:
        ctx.routes = routes
        return routes.send(hidden[routes.order // routes.num_choices])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        routes: Routes = ctx.routes
        rows = routes.send_back(gradient * routes.gradient_divisor)  # [Note: gradients of experts]
        return rows[routes.place].unflatten(0, (routes.num_tokens, routes.num_choices)).sum(dim=1), None


class _Combine(torch.autograd.Function):
    """The results of each token's experts, `(tokens, choices, hidden)`, from the rows that experts here computed."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, routes: Routes) -> Tensor:
        ctx.routes = routes
        return routes.send_back(rows)[routes.place].unflatten(0, (routes.num_tokens, routes.num_choices))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        routes: Routes = ctx.routes
        return routes.send(gradient.flatten(0, 1)[routes.order]).div_(routes.gradient_divisor), None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenParts:
    """The parts of the tokens of one layer's forward that the ranks of a tensor group take to the experts."""

    group: dist.ProcessGroup
    num_tokens: int

    @property
    def size(self) -> int:
        """Number of tokens of each part; the last ones may have fewer, or none."""
        return -(-self.num_tokens // self.group.size())

    def own(self, tokens: Tensor) -> Tensor:
        """This rank's part of what all ranks have, `(num_tokens, ...)`. Differentiable."""
        return tokens if self.group.size() == 1 else cast("Any", _Divide.apply(tokens, self))

    def join(self, part: Tensor) -> Tensor:
        """The parts of all ranks, `(num_tokens, ...)`. Differentiable."""
        return part if self.group.size() == 1 else cast("Any", _Join.apply(part, self))

    def cut(self, tokens: Tensor) -> Tensor:
        """This rank's part."""
        begin = self.group.rank() * self.size
        return tokens[begin : begin + self.size]

    def gather(self, part: Tensor) -> Tensor:
        """All parts; in bytes, so that they may be of any type."""
        padded = part.new_zeros((self.size, *part.shape[1:]))
        padded[: len(part)] = part
        whole = part.new_empty((self.size * self.group.size(), *part.shape[1:]))
        all_gather(whole.view(-1).view(torch.uint8), padded.view(-1).view(torch.uint8), self.group)
        return whole[: self.num_tokens]


class _Divide(torch.autograd.Function):
    """See `TokenParts.own`: what comes before it needs the gradient of all tokens on each rank."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, parts: TokenParts) -> Tensor:
        ctx.parts = parts
        return parts.cut(tokens).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.parts.gather(gradient), None


class _Join(torch.autograd.Function):
    """See `TokenParts.join`: all ranks have the same gradient."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, parts: TokenParts) -> Tensor:
        ctx.parts = parts
        return parts.gather(part)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.parts.cut(gradient).clone(), None


def exchange_rows(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send the first `sent[0]` rows to rank 0 and so on; return the rows received, in order of ranks.

    Rows are sent as bytes, so any dtype works.
    """
    arrived = rows.new_empty((sum(received), *rows.shape[1:]))
    given = rows.contiguous().view(torch.uint8)
    dist.all_to_all_single(arrived.view(torch.uint8), given, received, sent, group=group)
    return arrived
