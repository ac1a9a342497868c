"""This rank's part of the sequences that the ranks of a context group compute together.

`SequenceContext` is for models of your own; `context_parallel.py` does the same in models of transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # pyright: ignore[reportPrivateUsage]

from hyperpod_plugins.comm import group_health
from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.parallel.config import ContextCommType
from hyperpod_plugins.parallel.context_attention import SequenceLayout, all_gather, attend, mean_over_context, sdpa
from hyperpod_plugins.parallel.ring_attention import attend_in_ring
from hyperpod_plugins.parallel.topology import context_group

DEGREES = "_hyperpod_context"
"""Attribute of modules that holds their `ContextDegrees`."""
_FACTORS = (1_000_003, 998_244_353)
_MODULUS = 2_147_483_647
_DIGESTED = 1 << 20
"""Number of elements that are digested at a time, which limits the memory that it takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextDegrees:
    """What identifies the context group of a model, and how it communicates."""

    shard_degree: int
    tensor_degree: int
    context_degree: int
    comm_type: ContextCommType = "auto"

    @property
    def group(self) -> dist.ProcessGroup:
        """Group of the ranks that have parts of the same sequences."""
        return context_group(self.shard_degree, self.tensor_degree, self.context_degree)

    def comm_type_for(self, num_heads: int, num_key_value_heads: int) -> Literal["a2a", "all_gather", "p2p"]:
        """Return how attention with so many heads communicates.

        Tensor peers may divide the heads among them, or each have all.

        Raises:
            ConfigError: ranks are to exchange heads, and cannot share them equally.
        """
        degree, peers, heads = self.context_degree, self.tensor_degree, (num_heads, num_key_value_heads)
        shares = all(each % (peers * degree) == 0 for each in heads)
        if self.comm_type == "a2a" and not shares:
            raise ConfigError(
                f"context_comm_type='a2a', but {degree} ranks of a context group"
                f"{f' with {peers} tensor peers each' * (peers > 1)} cannot share {num_heads} heads and "
                f"{num_key_value_heads} heads of keys and values equally. Use 'all_gather', 'p2p' or 'auto', or "
                "another context_parallel_degree."
            )
        if self.comm_type == "auto":
            return "a2a" if shares else "all_gather"
        return self.comm_type


class SequenceContext:
    """This rank's part of the sequences of one forward, for models that are not of transformers.

        class Model(nn.Module):
            uses_sequence_context = True

            def forward(self, tokens, targets):
                context = SequenceContext.of(self, length=tokens.shape[1], num_heads=8)
                hidden = self.embed(context.part(tokens)) + self.position(context.positions)
                ...  # attention: context.attention(query, key, value)
                loss = F.cross_entropy(logits.flatten(0, 1), context.part(targets).flatten(), reduction="sum")
                return context.mean(loss, targets.numel())

    `parallelize` accepts a model with `context_parallel_degree` above 1 if one of its modules says
    `uses_sequence_context = True`; every module of it may then ask for its `SequenceContext`. All else in the model
    must treat each token alone. Modules of torch that do not, such as convolutions and batch norms, are refused, unless
    their attribute `treats_tokens_alone` is True. In a model that was not parallelized, the part is the whole.
    """

    def __init__(
        self,
        layout: SequenceLayout,
        group: dist.ProcessGroup | None,
        device: torch.device,
        *,
        is_ring: bool = False,
        heads: tuple[int, int] | None = None,
    ) -> None:
        """Use `SequenceContext.of`."""
        self._layout, self._group, self._is_ring, self._heads = layout, group, is_ring, heads
        self._rank = 0 if group is None else group.rank()
        self.positions = layout.positions(self._rank, device)
        """Positions of this rank's tokens in their sequences, `(local length,)`."""

    @classmethod
    def of(cls, module: nn.Module, *, length: int, num_heads: int, num_key_value_heads: int = 0) -> "SequenceContext":
        """Return this rank's part of sequences, which must be the same on all ranks of the context group.

        Args:
            module: one of the model that was parallelized.
            length: of the sequences.
            num_heads: number of heads of the attention, which tensor peers may divide among them.
            num_key_value_heads: number of heads of keys and values; 0 for as many as `num_heads`.

        Raises:
            ConfigError: the ranks cannot have parts of equal length, or cannot exchange heads as they are asked to.
        """
        device = next(module.parameters()).device
        degrees: ContextDegrees | None = vars(module).get(DEGREES)
        if degrees is None:
            return cls(SequenceLayout(length=length, degree=1, exchanges_heads=True), None, device)
        heads = num_heads, num_key_value_heads or num_heads
        way = degrees.comm_type_for(*heads)
        layout = SequenceLayout.of(length, degrees.context_degree, exchanges_heads=way == "a2a")
        if layout.length != length:
            raise ConfigError(
                f"sequences of {length} tokens cannot be divided over {degrees.context_degree} ranks of a context "
                f"group. Pad them to {layout.length}."
            )
        return cls(layout, degrees.group, device, is_ring=way == "p2p", heads=heads)

    def part(self, whole: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's part of a tensor whose dimension `dim` is the sequence.

        Inputs, which need no gradient, are compared with those of the other ranks first.

        Raises:
            ConfigError: the ranks of the context group were given different inputs.
        """
        if self._group is None:
            return whole
        if not whole.requires_grad:
            check_alike({"sequences": whole}, self._group)
        return self._layout.part(whole, self._rank, dim)

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        dropout_p: float = 0.0,
        scale: float | None = None,
        window: int = 0,
    ) -> Tensor:
        """Causal attention over whole sequences, in place of `scaled_dot_product_attention(..., is_causal=True)`.

        Args:
            query: `(batch, heads, local length, size)`.
            key: the same, perhaps with fewer heads.
            value: as `key`.
            dropout_p: probability of dropping a weight.
            scale: of the products; by default 1 / sqrt(size).
            window: number of tokens that a token attends to, itself included; 0 for all before it.

        Returns:
            `(batch, heads, local length, size)`.

        Raises:
            ConfigError: tensor peers divide the heads, but not those of keys and values, or the other way round.
        """
        if self._heads is not None:
            _check_heads(query, key, *self._heads)

        def compute(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
            return sdpa(query, key, value, mask, dropout_p=dropout_p, scale=scale)

        layout, device = self._layout, query.device
        mask = None
        if window or not (layout.exchanges_heads or self._is_ring):
            columns = torch.arange(layout.length, device=device)
            rows = (columns if layout.exchanges_heads else layout.positions(self._rank, device))[:, None]
            mask = columns <= rows
            if window:
                mask &= columns > rows - window
            mask = mask[None, None]
        if self._group is None:
            return compute(query, key, value, mask).transpose(1, 2)
        if self._is_ring:
            refuse_dropout(dropout_p)
            return attend_in_ring(query, key, value, mask, layout, self._group, scale=scale).transpose(1, 2)
        return attend(compute, query, key, value, mask, layout, self._group).transpose(1, 2)

    def mean(self, total: Tensor, count: Tensor | float) -> Tensor:
        """Return the mean of a sum over the tokens of whole sequences, such as the loss; the same on all ranks.

        Args:
            total: `()`, the sum over this rank's tokens.
            count: number of tokens of the whole sequences over which the mean is taken.
        """
        if self._group is None:
            return total / count
        return mean_over_context(total * self._layout.degree / count, self._group)


def _check_heads(query: Tensor, key: Tensor, num_heads: int, num_key_value_heads: int) -> None:
    found = query.shape[1], key.shape[1]
    if found[0] * num_key_value_heads != found[1] * num_heads:
        raise ConfigError(
            f"attention of {num_heads} heads and {num_key_value_heads} heads of keys and values has {found[0]} and "
            f"{found[1]} of them on this rank. Give SequenceContext.of the numbers of the whole model, and have a "
            "tensor_plan split queries, keys and values alike: otherwise gradients would be wrong."
        )


def refuse_dropout(dropout_p: float) -> None:
    """Refuse dropout of attention weights that are computed part by part.

    Raises:
        ConfigError: there is some.
    """
    if dropout_p:
        raise ConfigError(
            f"attention has dropout ({dropout_p}), which context_comm_type='p2p' does not serve. Use 'auto', or leave "
            "the dropout out."
        )


@_disable_dynamo
def check_alike(sequences: Mapping[str, Tensor | None], group: dist.ProcessGroup, *facts: Tensor) -> list[bool]:
    """Compare sequences with those of the other ranks, by digests. A collective, after which the host waits once.

    Args:
        sequences: by the names for the message.
        group: of the ranks that must have the same.
        *facts: booleans `()` of this rank to be read in the same wait.

    Returns:
        The facts.

    Raises:
        ConfigError: sequences differ; all ranks of the group raise.
    """
    device = next(value.device for value in sequences.values() if value is not None)
    own = torch.cat([_digest(value).to(device) for value in sequences.values()])
    found = own.new_zeros((dist.get_world_size(group), own.numel()))
    all_gather(found.flatten(), own, group)
    differ = (found != own).view(len(found), len(sequences), -1).any(dim=2).any(dim=0)
    read: list[bool] = torch.cat([differ, *(fact.reshape(1).to(device) for fact in facts)]).tolist()
    names = [name for name, is_other in zip(sequences, read, strict=False) if is_other]
    if names and not group_health.suppresses_collectives:  # after a break, nothing was received
        raise ConfigError(
            f"the ranks of a context group must be given the same samples, but {', '.join(names)} differ between them. "
            "Use the sampler of the framework, or one with data_rank and data_degree of the topology, and draw no "
            "random numbers in the data that differ between ranks."
        )
    return read[len(sequences) :]


def _digest(value: Tensor | None) -> Tensor:
    """Return `(4,)`: whether there is a tensor, its shape, and two sums that depend on each element and its place."""
    if value is None:
        return torch.zeros(4, dtype=torch.int64)
    shape = 0
    for size in value.shape:
        shape = (shape * _FACTORS[0] + size + 1) % _MODULUS
    sums = torch.zeros(2, dtype=torch.int64, device=value.device)
    factors = sums.new_tensor(_FACTORS)[:, None]
    first = 1
    for bits in _bits(value.detach()).split(_DIGESTED):
        places = torch.arange(first, first + bits.numel(), device=bits.device)
        sums += ((bits.to(torch.int64) + 1) * (places * factors % _MODULUS)).sum(dim=1)
        first += bits.numel()
    return torch.cat([sums.new_tensor([1, shape]), sums])


def _bits(value: Tensor) -> Tensor:
    """The elements of a tensor as integers, flat, so that equal bits give equal integers."""
    flat = (torch.view_as_real(value) if value.is_complex() else value).reshape(-1)
    if not flat.is_floating_point():
        return flat
    return flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
