"""What one rank computes of a step that it shares with others, for plans of memory.

Layers that tensor parallelism splits have the sizes that they have on one rank, and the residual stream counts in part.
The exchanges of context and expert parallelism run as they do in training, in a group that sends nothing, so that they
allocate the same tensors.
"""

# Configurations of transformers have private fields and no common type.
# pyright: reportPrivateUsage=false

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hyperpod_plugins.comm.work import FinishedWork
from hyperpod_plugins.errors import NotBuiltYetError
from hyperpod_plugins.memory.chunked_loss import derived_class
from hyperpod_plugins.parallel.config import ParallelConfig
from hyperpod_plugins.parallel.context_attention import SequenceLayout
from hyperpod_plugins.parallel.context_checks import check_split_model
from hyperpod_plugins.parallel.context_parallel import (
    ContextAttention,
    attend_as,
    causal_language_models,
    is_windowed,
)
from hyperpod_plugins.parallel.expert_exchange import Routes, TokenParts, compute_with_experts
from hyperpod_plugins.parallel.expert_parallel import find_experts
from hyperpod_plugins.parallel.hsdp import outermost_blocks
from hyperpod_plugins.parallel.sequence_context import ContextDegrees
from hyperpod_plugins.parallel.tensor_parallel import plan_for
from hyperpod_plugins.parallel.tensor_styles import keep_one_rank
from hyperpod_plugins.planning.tracked_memory import TrackedMemory

_PLANNED = "hyperpod_plan_context"


class SilentGroup(dist.ProcessGroup):
    """A group whose collectives change nothing: of their results only the memory counts."""

    def __init__(self, size: int) -> None:
        """Be rank 0 of so many."""
        super().__init__(0, size)  # pyright: ignore[reportCallIssue]: torch's stub lacks this constructor

    def all_to_all_single(self, *_: Any, **__: Any) -> dist.Work:
        """Receive nothing: no other rank exists."""
        return FinishedWork()

    def all_gather_single(self, *_: Any, **__: Any) -> Any:
        """Receive nothing: no other rank exists."""

    alltoall_base = all_to_all_single  # in older versions of torch
    _allgather_base = all_gather_single


def plan_context_part(model: nn.Module, config: ParallelConfig, length: int) -> int:
    """Have the attention of a model allocate what it does on a rank of a context group.

    The rank's part of a sequence is a sequence of its own for all that treats each token alone.

    Args:
        model: contains a causal language model of transformers; it is changed.
        config: of the plan.
        length: of the sequences.

    Returns:
        The length of a rank's part.

    Raises:
        ConfigError: context parallelism does not serve the model.
        NotBuiltYetError: the model uses a `SequenceContext`.
    """
    found, degree = causal_language_models(model), config.context_parallel_degree
    if len(found) != 1:
        raise NotBuiltYetError(
            f"context_parallel_degree={degree} is not served yet by the memory plan of {type(model).__name__}, which "
            f"contains {len(found)} causal language models of transformers. Plan with context_parallel_degree=1 and a "
            "rank's part of the sequence: what attention exchanges is then missing."
        )
    language_model: Any = found[0]
    check_split_model(language_model, model, type(language_model).loss_function.__get__(language_model))
    degrees = ContextDegrees(
        shard_degree=degree,  # that of the plan does not matter to attention
        tensor_degree=config.tensor_parallel_degree,
        context_degree=degree,
        comm_type=config.context_comm_type,
    )
    attention = ContextAttention.of(language_model.config, degrees)
    layout = SequenceLayout.of(length, degree, exchanges_heads=attention.exchanges_heads)
    _register(attention, layout, SilentGroup(degree))
    for part in language_model.modules():
        if (settings := getattr(part, "config", None)) is not None:
            settings._attn_implementation = _PLANNED
    return layout.local_length


def _register(attention: ContextAttention, layout: SequenceLayout, group: dist.ProcessGroup) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    rows = layout.length if layout.exchanges_heads else layout.local_length

    def compute_attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        return attend_as(attention, module, query, key, value, mask, layout, group, **kwargs), None

    def make_mask(*_: Any, mask_function: Any = None, dtype: torch.dtype = torch.float32, **__: Any) -> Tensor | None:
        if attention.is_causal_alone and not is_windowed(mask_function):
            return None
        return torch.empty(1, 1, rows, layout.length, dtype=torch.bool if attention.kind == "sdpa" else dtype)

    AttentionInterface.register(_PLANNED, compute_attention)
    AttentionMaskInterface.register(_PLANNED, make_mask)


def plan_expert_part(model: nn.Module, config: ParallelConfig) -> list[nn.Module]:
    """Leave each layer of experts one rank's experts, which compute as many rows as the rank sends.

    That is the mean over the ranks; where a router prefers some experts, the ranks that hold them compute more.

    Args:
        model: without values; it is changed.
        config: of the plan.

    Returns:
        The layers of experts, which FSDP2 shards as units of their own.

    Raises:
        ConfigError: expert parallelism does not serve the model.
        DegreeError: the degree does not divide the number of experts.
        NotBuiltYetError: the experts are computed by a library that is not served yet.
    """
    found, degree = find_experts(model, config), config.expert_parallel_degree
    for part in found.values():
        for name, parameter in list(part.named_parameters(recurse=False)):
            own = parameter.detach().new_empty((len(parameter) // degree, *parameter.shape[1:]))
            part.register_parameter(name, nn.Parameter(own, requires_grad=parameter.requires_grad))
        layer: Any = part
        layer.num_experts //= degree
        _exchange_rows(part, SilentGroup(degree), SilentGroup(config.tensor_parallel_degree))
    return list(found.values())


def _exchange_rows(part: nn.Module, group: dist.ProcessGroup, tensor_group: dist.ProcessGroup) -> None:
    kind: Any = type(part)

    def forward(self: Any, hidden: Tensor, expert_index: Tensor, weights: Tensor) -> Tensor:
        parts = TokenParts(group=tensor_group, num_tokens=len(hidden))
        hidden, expert_index, weights = parts.own(hidden), parts.cut(expert_index), parts.own(weights)
        each, more = divmod(expert_index.numel(), group.size())
        sizes = [each + (rank < more) for rank in range(group.size())]
        order = torch.argsort(expert_index.reshape(-1), stable=True)
        routes = Routes(group=group, num_choices=expert_index.shape[-1], order=order, sent=sizes, received=sizes)

        def compute(rows: Tensor, experts: Tensor) -> Tensor:
            return kind.forward(self, rows, experts[:, None], torch.ones_like(rows[:, :1]))

        return parts.join(compute_with_experts(compute, hidden, weights, routes, torch.zeros_like(order)))

    part.__class__ = derived_class(kind, {"forward": forward})


def plan_tensor_part(model: nn.Module, config: ParallelConfig) -> set[int]:
    """Give layers that tensor parallelism splits the sizes that they have on one rank, so that activations do.

    Embeddings, and a head whose logits are gathered, stay whole.

    Returns:
        The `id` of each parameter that stays whole here, but is split on a rank.
    """
    degree = config.tensor_parallel_degree
    if degree == 1:
        return set()
    whole = set[int]()
    for name, style in plan_for(model, config).items():
        if style == "embedding_rowwise" or (style == "colwise_gather_output" and not config.loss_parallel):
            whole |= {id(each) for each in model.get_submodule(name).parameters(recurse=False)}
            continue
        part: Any = model.get_submodule(name)
        keep_one_rank(part, style, degree)
        if style == "colwise_gather_output":  # the loss of transformers takes the number of logits from here
            config_of_model: Any = getattr(model, "config", None)
            config_of_model.vocab_size = part.weight.shape[0]
    return whole


def plan_stream_part(model: nn.Module, config: ParallelConfig, tracker: TrackedMemory) -> None:
    """Count one rank's part of the residual stream, which `sequence_parallel` splits along the sequence.

    The model computes the whole. Of what arises between the layers that tensor parallelism splits, `tracker` counts the
    part of one rank; from where the stream is gathered to where results are reduced to parts, it counts all.
    """
    degree, gathered = config.tensor_parallel_degree, dict[str, tuple[Tensor, Tensor]]()
    for name, style in plan_for(model, config).items():
        owner = name.rpartition(".")[0] if style == "colwise" else name

        def gather(_: nn.Module, args: tuple[Any, ...], owner: str = owner) -> tuple[Any, ...]:
            read, *rest = args
            if owner not in gathered or gathered[owner][0] is not read:  # several layers read one tensor
                gathered[owner] = read, _Boundary.apply(read, tracker, degree, 1)
            return gathered[owner][1], *rest

        def forget(*_: object, owner: str = owner) -> None:
            gathered.pop(owner, None)

        def reduce(_: nn.Module, args: tuple[Any, ...], result: Tensor) -> Any:
            return _Boundary.apply(result, tracker, 1, degree)

        part = model.get_submodule(name)
        if style in ("colwise", "colwise_gather_output"):
            part.register_forward_pre_hook(gather)
            model.get_submodule(owner).register_forward_hook(forget, always_call=True)  # recomputations end early
        elif style in ("rowwise", "embedding_rowwise"):
            part.register_forward_hook(reduce)
    for block in outermost_blocks(model, config.block_classes):  # also where it is computed again
        block.register_forward_pre_hook(lambda *_: setattr(tracker, "divisor", degree))


class _Boundary(torch.autograd.Function):
    """Copies a tensor where the residual stream begins or ends, and its gradient; see `plan_stream_part`."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, tracker: TrackedMemory, before: int, after: int) -> Tensor:
        """Count, from the copy on, one part in `after`."""
        ctx.tracker, ctx.before = tracker, before
        tracker.divisor = after
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Count, from the copy on, one part in `before`."""
        ctx.tracker.divisor = ctx.before
        return gradients[0].clone(), None, None, None
