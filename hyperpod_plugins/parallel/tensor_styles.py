"""Tensor-parallel styles beyond DTensor's own: packed projections, `Conv1D`, divided heads, experts cut by features.

[Note: packed projections] One layer may compute several things, whose features lie one after the other: query, key and
value in GPT-2, or gate and up of an expert. A rank needs its share of each of them. Its parameter is a DTensor with a
plain `Shard` placement, as that of any other layer, so that checkpoints, optimizers and FSDP2 see nothing unusual: the
first rank stores the first rows, whatever they compute. Forward exchanges rows by one all-to-all, so that each rank
computes with those that it needs, and backward sends their gradients back. Each rank sends about the part of the weight
that it stores, whatever the number of tokens.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # pyright: ignore[reportPrivateUsage]
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from hyperpod_plugins.memory.chunked_loss import derived_class
from hyperpod_plugins.parallel.expert_exchange import exchange_rows


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is transformers' `Conv1D`: a linear layer whose weight is `(in features, out features)`."""
    return (type(module).__module__, type(module).__name__) == ("transformers.pytorch_utils", "Conv1D")


def out_features(module: nn.Module) -> int:
    """Return the number of output features of a linear layer or a `Conv1D`."""
    return cast("Any", module).nf if is_conv1d(module) else cast("Any", module).out_features


def in_features(module: nn.Module) -> int:
    """Return the number of input features of a linear layer or a `Conv1D`."""
    return cast("Any", module).nx if is_conv1d(module) else cast("Any", module).in_features


def features_dim(module: nn.Module) -> int:
    """Return the dimension of a layer's weight that is that of its output features."""
    return 1 if is_conv1d(module) else 0


class ColwiseConv1D(ColwiseParallel):
    """`ColwiseParallel` of a `Conv1D`."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _distribute(module, "weight", Shard(1), device_mesh)
        _distribute(module, "bias", Shard(0), device_mesh)
        return distribute_module(
            module,
            device_mesh,
            None,
            cast("Any", partial(self._prepare_input_fn, self.input_layouts, self.desired_input_layouts)),
            cast("Any", partial(self._prepare_output_fn, self.output_layouts, self.use_local_output)),
        )


class RowwiseConv1D(RowwiseParallel):
    """`RowwiseParallel` of a `Conv1D`."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _distribute(module, "weight", Shard(0), device_mesh)
        _distribute(module, "bias", Replicate(), device_mesh)
        return distribute_module(
            module,
            device_mesh,
            None,
            cast("Any", partial(self._prepare_input_fn, self.input_layouts, (Shard(-1),))),
            cast("Any", partial(self._prepare_output_fn, self.output_layouts, self.use_local_output)),
        )


# -- packed projections -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive output features of a packed projection."""

    size: int
    is_shared: bool = False
    """Whether all ranks need all of them, as the one key of multi-query attention."""


def needed_features(blocks: Sequence[Block], rank: int, degree: int) -> list[int]:
    """Return the output features that one of `degree` tensor ranks computes, in the order of the layer."""
    needed: list[int] = []
    first = 0
    for block in blocks:
        share = block.size if block.is_shared else block.size // degree
        begin = first + (0 if block.is_shared else rank * share)
        needed += range(begin, begin + share)
        first += block.size
    return needed


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowRoutes:
    """How rows that are stored in equal consecutive parts travel to the ranks that compute with them."""

    num_rows: int
    """Rows that this rank stores."""
    sent_rows: tuple[tuple[int, ...], ...]
    """For each rank, those of the rows stored here that go there."""
    received: tuple[int, ...]
    """Number of rows that come from each rank."""
    order: tuple[int, ...]
    """For each row in order of arrival, its place among the rows that this rank needs."""


def row_routes(blocks: Sequence[Block], rank: int, degree: int) -> RowRoutes:
    """Decide which rows travel where. No communication."""
    num_rows = sum(block.size for block in blocks) // degree
    needed = [needed_features(blocks, each, degree) for each in range(degree)]
    sent = tuple(tuple(row - rank * num_rows for row in rows if row // num_rows == rank) for rows in needed)
    order = tuple(sorted(range(len(needed[rank])), key=lambda place: needed[rank][place] // num_rows))
    received = tuple(sum(row // num_rows == each for row in needed[rank]) for each in range(degree))
    return RowRoutes(num_rows=num_rows, sent_rows=sent, received=received, order=order)


class _ExchangeRows(torch.autograd.Function):
    """The rows that this rank needs, from the rows that it stores."""

    @staticmethod
    def forward(ctx: Any, stored: Tensor, routes: RowRoutes, mesh: DeviceMesh) -> Tensor:
        ctx.routes, ctx.mesh = routes, mesh
        sent = [row for rows in routes.sent_rows for row in rows]
        arrived = exchange_rows(
            stored[torch.tensor(sent, device=stored.device)],
            list(map(len, routes.sent_rows)),
            list(routes.received),
            mesh.get_group(),
        )
        needed = torch.empty_like(arrived)
        needed[torch.tensor(routes.order, device=stored.device)] = arrived
        return needed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        routes: RowRoutes = ctx.routes
        sizes = list(map(len, routes.sent_rows))
        rows = gradient[torch.tensor(routes.order, device=gradient.device)]
        back = exchange_rows(rows, list(routes.received), sizes, ctx.mesh.get_group())
        total = gradient.new_zeros((routes.num_rows, *gradient.shape[1:]))
        for sent, part in zip(routes.sent_rows, back.split(sizes), strict=True):  # one by one: the same sum every time
            total[torch.tensor(sent, device=gradient.device, dtype=torch.long)] += part
        return total, None, None


def _needed(stored: Tensor, dim: int, routes: RowRoutes, mesh: DeviceMesh) -> Tensor:
    """The part of a parameter, a DTensor that is split along `dim`, that this rank computes with; a local tensor."""
    local = cast("DTensor", stored).to_local().movedim(dim, 0)
    rows = local.reshape(len(local), -1)
    exchanged: Any = _ExchangeRows.apply(rows, routes, mesh)
    return exchanged.view(-1, *local.shape[1:]).movedim(0, dim)


class PackedColwise(ParallelStyle):
    """Give each rank its share of each block of a linear layer's output features; see [Note: packed projections].

    Args:
        blocks: sizes of the blocks, in order.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        """Keep the blocks."""
        super().__init__()
        self.blocks = tuple(blocks)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        routes = row_routes(self.blocks, device_mesh.get_local_rank(), device_mesh.size())
        dim = features_dim(module)
        _distribute(module, "weight", Shard(dim), device_mesh)
        _distribute(module, "bias", Shard(0), device_mesh)

        @_disable_dynamo
        def forward(self: Any, features: Tensor) -> Tensor:
            weight = _needed(self.weight, dim, routes, device_mesh)
            bias = None if self.bias is None else _needed(self.bias, 0, routes, device_mesh)
            return F.linear(_read(features, device_mesh), weight.T if dim else weight, bias)

        module.__class__ = derived_class(type(module), {"forward": forward})
        return module


class HeadEmbedding(ColwiseParallel):
    """`ColwiseParallel` of an embedding whose features are the heads of an attention."""


class TensorExperts(ParallelStyle):
    """Split the inner features of all experts of a layer of transformers, whose `gate_up_proj` is packed."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        kind: Any = type(module)
        parts: Any = module
        inner = parts.gate_up_proj.shape[1] // 2
        routes = row_routes((Block(inner), Block(inner)), device_mesh.get_local_rank(), device_mesh.size())
        _distribute(module, "gate_up_proj", Shard(1), device_mesh)
        _distribute(module, "down_proj", Shard(2), device_mesh)

        @_disable_dynamo
        def forward(self: Any, hidden: Tensor, expert_index: Tensor, weights: Tensor) -> Tensor:
            hidden, weights = _read(hidden, device_mesh), _read(weights, device_mesh)
            own: dict[str, Any] = self._parameters
            stored = dict(own)
            own["gate_up_proj"] = _needed(self.gate_up_proj, 1, routes, device_mesh).contiguous()
            own["down_proj"] = self.down_proj.to_local()
            try:
                result = kind.forward(self, hidden, expert_index, weights)
            finally:
                own.update(stored)
            partial_sums = DTensor.from_local(result, device_mesh, [Partial()], run_check=False)
            return partial_sums.redistribute(placements=[Replicate()]).to_local()

        module.__class__ = derived_class(kind, {"forward": forward})
        return module


def _read(features: Tensor, mesh: DeviceMesh) -> Tensor:
    """A replicated tensor as a local one, whose gradient is summed over the ranks."""
    if not isinstance(features, DTensor):
        features = DTensor.from_local(features, mesh, [Replicate()], run_check=False)
    return features.to_local(grad_placements=[Partial()])


# -- divided heads ----------------------------------------------------------------------------------------------------


class DividedHeads(ParallelStyle):
    """Tell a module that views its features by a number of heads how many of them a rank has.

    Args:
        attributes: of the module: numbers of heads, or of features, to divide by the degree.
        per_head: arguments of its forward that have values for all heads: `(batch * heads, ...)` or `(batch, heads,
            ...)`; where they have one head, it is for all.
    """

    def __init__(self, attributes: Sequence[str], per_head: Sequence[str] = ()) -> None:
        """Keep the names."""
        super().__init__()
        self.attributes, self.per_head = tuple(attributes), tuple(per_head)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.divide(module, device_mesh.get_local_rank(), device_mesh.size())
        return module

    def divide(self, module: nn.Module, rank: int, degree: int) -> None:
        """Change a module into that of one rank of a tensor group."""
        num_heads: int = getattr(module, self.attributes[0])
        for name in self.attributes:
            setattr(module, name, getattr(module, name) // degree)
        if self.per_head:
            hook = partial(_take_heads, inspect.signature(type(module).forward), self.per_head, num_heads, rank, degree)
            module.register_forward_pre_hook(hook, with_kwargs=True)


class ClonedResult(ParallelStyle):
    """Clone what a module returns: autograd forbids the caller to add in place to what comes from a DTensor."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_hook(lambda _module, _args, result: result.clone())
        return module


def _take_heads(
    signature: inspect.Signature,
    names: Sequence[str],
    num_heads: int,
    rank: int,
    degree: int,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    bound = signature.bind(module, *args, **kwargs)
    batch = len(next(each for each in bound.arguments.values() if isinstance(each, Tensor)))
    for name in names:
        given = bound.arguments.get(name)
        if isinstance(given, Tensor):
            bound.arguments[name] = _heads_of(given, batch, num_heads, rank, degree)
    _, *others = bound.args
    return tuple(others), bound.kwargs


def _heads_of(given: Tensor, batch: int, num_heads: int, rank: int, degree: int) -> Tensor:
    share = num_heads // degree
    if given.dim() == 3 and len(given) == batch * num_heads:
        return given.unflatten(0, (batch, num_heads)).narrow(1, rank * share, share).flatten(0, 1)
    if given.dim() == 4 and given.shape[1] == num_heads:
        return given.narrow(1, rank * share, share)
    return given


SPLITS_PARAMETERS = (PackedColwise, HeadEmbedding, TensorExperts)
"""Styles of this file that split all parameters of a module."""


def keep_one_rank(module: nn.Module, style: "str | ParallelStyle", degree: int) -> None:
    """Change a module into that of one rank without a process group, to compute the size of its activations.

    Parameters become plain ones with undefined values; `embedding_rowwise` and other objects change nothing.
    """
    features, part = features_dim(module), cast("Any", module)
    match style:
        case "colwise" | "colwise_gather_output":
            _shrink(module, {"weight": features, "bias": 0}, degree)
        case "rowwise":
            _shrink(module, {"weight": 1 - features}, degree)
        case HeadEmbedding():
            _shrink(module, {"weight": 1}, degree)
        case TensorExperts():
            _shrink(module, {"gate_up_proj": 1, "down_proj": 2}, degree)
        case DividedHeads():
            style.divide(module, 0, degree)
        case PackedColwise():
            share = len(needed_features(style.blocks, 0, degree))
            for name, dim in (("weight", features), ("bias", 0)):
                _resize(module, name, dim, share)
        case _:
            return
    if is_conv1d(module):
        part.nx, part.nf = part.weight.shape


def _shrink(module: nn.Module, dims: dict[str, int], degree: int) -> None:
    for name, dim in dims.items():
        parameter: Any = getattr(module, name)
        if parameter is not None:
            _resize(module, name, dim, parameter.shape[dim] // degree)


def _resize(module: nn.Module, name: str, dim: int, size: int) -> None:
    parameter: Any = getattr(module, name)
    if parameter is not None:
        shape = list(parameter.shape)
        shape[dim] = size
        values = torch.empty(shape, dtype=parameter.dtype)
        module.register_parameter(name, nn.Parameter(values, requires_grad=parameter.requires_grad))


def _distribute(module: nn.Module, name: str, placement: Shard | Replicate, mesh: DeviceMesh) -> None:
    """Replace a parameter of a module by a DTensor, without communication."""
    parameter: Any = getattr(module, name)
    if parameter is None:
        return
    split = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
    module.register_parameter(name, nn.Parameter(split, requires_grad=parameter.requires_grad))
