"""`propose_tensor_plan`: a tensor plan for a model that brings none, from its structure, checked by a comparison.

The structure is what one forward shows: layers that read the input of a block, and the first layer after them whose
input depends on their results and is not wider, with attention or an activation between. Whether such a pair is exact,
the structure cannot tell: queries, keys and values may be packed in one layer, the code may assume the number of heads,
and a norm between may need all features. So each kind of pair is tried: threads compute as the ranks of a tensor group
would, in float64 and with random parameters, and all results and gradients are compared with those of the whole model.
A kind of pair that differs, or fails, stays whole.
"""

import copy
import inspect
import logging
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from hyperpod_plugins.delayed_init.tape import full_name
from hyperpod_plugins.errors import PlanError, format_list, name_pattern
from hyperpod_plugins.parallel.tensor_parallel import match_modules
from hyperpod_plugins.parallel.tensor_plans import owners_with_heads
from hyperpod_plugins.parallel.tensor_styles import features_dim, in_features, is_conv1d, keep_one_rank, out_features

log = logging.getLogger(__name__)

TOLERANCE = 1e-5
"""Relative difference above which a result or a gradient is not that of the whole model; models that compute parts in
float32 differ by some 1e-7."""
_Inputs = tuple[tuple[Any, ...], dict[str, Any]]
_NEGLIGIBLE = 1e-4
"""A gradient below this part of all gradients is compared with that part: it may be zero but for rounding."""
_PATIENCE_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlanProposal:
    """A tensor plan that was compared with the whole model, and the layers that it leaves whole."""

    plan: Mapping[str, str]
    """For `ParallelConfig(tensor_plan=...)`: the style of each pattern of module names."""
    left_whole: Mapping[str, str]
    """Why other linear layers are not split, by pattern."""
    degree: int
    """Number of ranks that it was compared for."""
    largest_difference: float
    """Largest relative difference of a result or gradient from the whole model's, in float64."""

    def __str__(self) -> str:
        """Return the plan as it can be pasted into a program, and what stays whole."""
        lines = [
            f"tensor_plan={{  # for {self.degree} ranks; differs by {self.largest_difference:.0e} from one process"
        ]
        lines += [f"    {pattern!r}: {style!r}," for pattern, style in self.plan.items()]
        return "\n".join([*lines, "}", *(f"whole: {name}: {why}" for name, why in self.left_whole.items())])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Call:
    """A linear layer that a forward ran once."""

    name: str
    layer: nn.Module
    given: Tensor
    result: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """Layers to split by their output features, and the one that reads their product."""

    columns: tuple[str, ...]
    row: str

    @property
    def plan(self) -> dict[str, str]:
        return {**dict.fromkeys(self.columns, "colwise"), self.row: "rowwise"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Values:
    """What a model, or one rank of it, computed: results, and gradients by name."""

    results: list[Tensor]
    gradients: dict[str, Tensor]


def propose_tensor_plan(
    model: nn.Module, inputs: Mapping[str, Any] | Sequence[Any] | None = None, *, degree: int = 2
) -> TensorPlanProposal:
    """Propose a tensor plan for a model from its structure, check it by a comparison on random parameters, and log it.

    Embeddings and the output head stay whole. The model is not changed; `degree + 1` copies of it in float64 run on the
    CPU, so give a small configuration of a large model.

    Args:
        model: not sharded, with real parameters.
        inputs: positional or keyword arguments of its forward; by default random ones that fit its configuration, if
            it is a model of transformers for tokens or images.
        degree: number of tensor ranks to check for.

    Raises:
        PlanError: nothing can be split exactly, the model has no values or is sharded, or `inputs` are missing.
    """
    _check_plain(model)
    whole = _random_copy(model)
    arguments = _in_float64(_random_inputs(model) if inputs is None else inputs)
    calls = _linear_calls(whole, arguments)
    pairs, left = _find_pairs(whole, calls, degree)
    wanted = _run(whole, arguments)
    exact: dict[str, str] = {}
    for kind in _kinds(whole, pairs):
        plan = {name: style for pair in kind for name, style in pair.plan.items()}
        problem, _ = _compare(whole, plan, arguments, wanted, degree)
        if problem:
            left |= dict.fromkeys(plan, problem)
        else:
            exact |= plan
    problem, difference = _compare(whole, exact, arguments, wanted, degree) if exact else ("", 0.0)
    if not exact or problem:
        reasons = "; ".join(f"{name}: {why}" for name, why in _by_pattern(left).items()) or "it has no linear layers"
        raise PlanError(
            f"no tensor plan of {type(model).__name__} is known to be exact for {degree} ranks: "
            f"{problem or reasons}. Set tensor_parallel_degree=1, or pass a tensor_plan of your own."
        )
    checked = dict.fromkeys(sorted(owners_with_heads(model, exact)), "replicate")
    proposal = TensorPlanProposal(
        plan=_patterns(model, exact | checked),
        left_whole=_by_pattern(left),
        degree=degree,
        largest_difference=difference,
    )
    log.warning("%s: %s", type(model).__name__, proposal)
    return proposal


def _check_plain(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) or parameter.is_meta or not parameter.is_floating_point():
            raise PlanError(
                f"a tensor plan is proposed from a run of the model, but {name} is sharded, quantized or has no value. "
                "Give a model that was just built, such as one of the same class with a small configuration."
            )


def _random_copy(model: nn.Module) -> nn.Module:
    """A copy in float64 on the CPU whose parameters are random: zeros and ones would hide faults. Without dropout."""
    twin = copy.deepcopy(model).to("cpu").double().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.requires_grad_(True)
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.dim() > 1:
                parameter.copy_(values / parameter.shape[-1] ** 0.5)
            else:
                parameter.copy_(1 + 0.3 * values)
    return twin


def _random_inputs(model: nn.Module) -> dict[str, Any]:
    config: Any = getattr(model, "config", None)
    generator = torch.Generator().manual_seed(0)
    accepted = inspect.signature(model.forward).parameters
    vocabulary, size = getattr(config, "vocab_size", None), getattr(config, "image_size", None)
    if isinstance(vocabulary, int) and "input_ids" in accepted:
        tokens = torch.randint(vocabulary, (2, 12), generator=generator)
        made: dict[str, Any] = {"input_ids": tokens} | ({"use_cache": False} if "use_cache" in accepted else {})
        return made | ({"decoder_input_ids": tokens.flip(1)} if getattr(config, "is_encoder_decoder", False) else {})
    if isinstance(size, int) and "pixel_values" in accepted:
        return {"pixel_values": torch.randn(2, config.num_channels, size, size, generator=generator)}
    raise PlanError(
        f"cannot make random inputs for {type(model).__name__}. Pass inputs to propose_tensor_plan: a mapping of "
        "keyword arguments of its forward, or a sequence of positional ones."
    )


def _in_float64(inputs: Mapping[str, Any] | Sequence[Any]) -> _Inputs:
    def convert(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.detach().cpu().to(torch.float64 if value.is_floating_point() else value.dtype)

    args, kwargs = ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})
    return cast("_Inputs", pytree.tree_map(convert, (args, kwargs)))


# -- structure ------------------------------------------------------------------------------------------------------


def _linear_calls(model: nn.Module, inputs: _Inputs) -> list[_Call]:
    """Run a model; return its linear layers that ran once, and whose parameters no other module has, in order."""
    calls: list[_Call] = []
    names = {
        part: name for name, part in model.named_modules() if name and (type(part) is nn.Linear or is_conv1d(part))
    }
    owners: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), set()).add(name)

    def record(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        given = next(iter((*args, *kwargs.values())), None)
        if isinstance(given, Tensor) and isinstance(result, Tensor):
            calls.append(_Call(name=names[layer], layer=layer, given=given, result=result))

    handles = [part.register_forward_hook(record, with_kwargs=True) for part in names]
    args, kwargs = inputs
    model(*args, **kwargs)
    for handle in handles:
        handle.remove()
    ran = [call.name for call in calls]
    return [
        call
        for call in calls
        if ran.count(call.name) == 1 and all(len(owners[id(each)]) == 1 for each in call.layer.parameters())
    ]


def _find_pairs(model: nn.Module, calls: list[_Call], degree: int) -> tuple[list[_Pair], dict[str, str]]:
    """Return the pairs of a model, from its innermost modules outwards, and why other linear layers have none."""
    pairs: list[_Pair] = []
    free = list(calls)
    modules = [name for name, part in model.named_modules() if any(True for _ in part.children())]
    for owner in sorted(modules, key=lambda name: -name.count(".") if name else 1):
        begin = f"{owner}." if owner else ""
        found = _pairs_among([call for call in free if call.name.startswith(begin)])
        taken = {name for pair in found for name in pair.plan}
        pairs += found
        free = [call for call in free if call.name not in taken]
    linears = [name for name, part in model.named_modules() if isinstance(part, nn.Linear) or is_conv1d(part)]
    paired = {name for pair in pairs for name in pair.plan}
    left = {name: "it is not part of a pair of linear layers that run once" for name in linears if name not in paired}
    dividing: list[_Pair] = []
    for pair in pairs:
        sizes = {name: out_features(model.get_submodule(name)) for name in pair.columns}
        odd = [f"{name} ({size})" for name, size in sizes.items() if size % degree]
        if odd:
            left |= dict.fromkeys(pair.plan, f"{degree} does not divide the features of {format_list(odd)}")
        else:
            dividing.append(pair)
    return dividing, left


def _pairs_among(calls: list[_Call]) -> list[_Pair]:
    pairs: list[_Pair] = []
    waiting: list[_Call] = []
    for call in calls:
        before = _nodes_before(call.given) if waiting else set()
        columns = [each for each in waiting if each.result.grad_fn in before]
        if columns and in_features(call.layer) <= max(out_features(each.layer) for each in columns):
            pairs.append(_Pair(columns=tuple(each.name for each in columns), row=call.name))
            waiting = [each for each in waiting if each not in columns]
        else:
            waiting.append(call)
    return pairs


def _nodes_before(tensor: Tensor) -> set[Any]:
    """The nodes of the autograd graph that a tensor depends on."""
    found: set[Any] = set()
    ahead: list[Any] = [tensor.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in found:
            found.add(node)
            ahead += [before for before, _ in node.next_functions]
    return found


def _kinds(model: nn.Module, pairs: list[_Pair]) -> list[list[_Pair]]:
    """Group pairs that are the same in modules of the same class."""
    kinds: dict[tuple[str, ...], list[_Pair]] = {}
    for pair in pairs:
        names = (*pair.columns, pair.row)
        kinds.setdefault(tuple(name_pattern(name) for name in names), []).append(pair)
    return list(kinds.values())


def _patterns(model: nn.Module, plan: dict[str, str]) -> dict[str, str]:
    """A plan by patterns without the numbers of layers, where these match the same modules."""
    short = {name_pattern(name): style for name, style in plan.items()}
    return short if match_modules(model, short) == plan else plan


def _by_pattern(reasons: dict[str, str]) -> dict[str, str]:
    number = Counter(map(name_pattern, reasons))
    return {name_pattern(name) if number[name_pattern(name)] > 1 else name: why for name, why in reasons.items()}


# -- comparison -----------------------------------------------------------------------------------------------------


class _Meeting:
    """Where the threads that compute as ranks add up tensors."""

    def __init__(self, degree: int) -> None:
        self.barrier = threading.Barrier(degree, timeout=_PATIENCE_S)
        self._given: list[tuple[str, Tensor] | None] = [None] * degree

    def total(self, rank: int, what: str, tensor: Tensor) -> Tensor:
        self._given[rank] = (what, tensor)
        self.barrier.wait()
        given = [each for each in self._given if each is not None]
        self.barrier.wait()
        if {name for name, _ in given} != {what}:
            raise PlanError(f"the ranks would add up different tensors: {sorted({name for name, _ in given})}")
        return torch.stack([each for _, each in given]).sum(dim=0)


class _Shared(torch.autograd.Function):
    """What column-parallel layers read: its gradient is the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, meeting: _Meeting, rank: int, name: str) -> Tensor:
        ctx.place = (meeting, rank, name)
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        meeting, rank, name = ctx.place
        return meeting.total(rank, name, gradient), None, None, None


class _Total(torch.autograd.Function):
    """What row-parallel layers return: the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, meeting: _Meeting, rank: int, name: str) -> Tensor:
        return meeting.total(rank, name, tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient, None, None, None


def _compare(
    whole: nn.Module, plan: Mapping[str, str], inputs: _Inputs, wanted: _Values, degree: int
) -> tuple[str, float]:
    """Run a plan in threads; return why it is not exact, empty if it is, and the largest relative difference."""
    ranks = _run_ranks(whole, plan, inputs, degree)
    if isinstance(ranks, str):
        return ranks, float("inf")
    everything = torch.stack([each.norm() for each in wanted.gradients.values()]).norm()
    largest = 0.0
    for rank, values in enumerate(ranks):
        if [each.shape for each in values.results] != [each.shape for each in wanted.results]:
            return "a rank would return a part of the result", float("inf")
        for found, expected in zip(values.results, wanted.results, strict=True):
            largest = max(largest, _relative(found - expected, expected.norm()))
        for name, expected in wanted.gradients.items():
            part = _part_of(whole, name, expected, plan, rank, degree)
            found = values.gradients.get(name)
            if part is not None and found is None:
                return f"{name} would have no gradient", float("inf")
            if part is not None and found is not None:
                largest = max(largest, _relative(found - part, torch.maximum(part.norm(), _NEGLIGIBLE * everything)))
    return (f"results or gradients would differ by {largest:.1e}" if not largest <= TOLERANCE else ""), largest


def _relative(error: Tensor, size: Tensor) -> float:
    return float(error.norm() / size) if float(error.norm()) else 0.0


def _part_of(
    whole: nn.Module, name: str, value: Tensor, plan: Mapping[str, str], rank: int, degree: int
) -> Tensor | None:
    """The part of a parameter, or its gradient, that a rank has; None for what only rank 0 adds."""
    owner, _, key = name.rpartition(".")
    style = plan.get(owner)
    if style is None:
        return value
    dim = features_dim(whole.get_submodule(owner))
    if style == "rowwise":
        if key != "weight":
            return value if rank == 0 else None
        dim = 1 - dim
    return value.chunk(degree, dim if key == "weight" else 0)[rank]


def _run_ranks(whole: nn.Module, plan: Mapping[str, str], inputs: _Inputs, degree: int) -> list[_Values] | str:
    """Run each rank in a thread; return what they computed, or why they could not."""
    meeting = _Meeting(degree)

    def run(model: nn.Module) -> _Values:
        is_done = False
        try:
            values = _run(model, inputs)
            is_done = True
            return values
        finally:
            if not is_done:
                meeting.barrier.abort()

    models = [_rank_of(whole, plan, meeting, rank, degree) for rank in range(degree)]
    with ThreadPoolExecutor(degree) as threads:
        running = [threads.submit(run, model) for model in models]
    errors = [each.exception() for each in running if each.exception() is not None]
    if not errors:
        return [each.result() for each in running]
    causes = [each for each in errors if not isinstance(each, threading.BrokenBarrierError)]
    if not causes:
        return "the ranks would wait for each other"
    return f"its code fails with a part of the features ({str(causes[0]).partition(chr(10))[0]})"


def _rank_of(whole: nn.Module, plan: Mapping[str, str], meeting: _Meeting, rank: int, degree: int) -> nn.Module:
    """A copy of a model as one rank of a tensor group has it."""
    model = copy.deepcopy(whole)
    for name, style in plan.items():
        layer = model.get_submodule(name)
        before = {key: each.detach().clone() for key, each in layer.named_parameters()}
        keep_one_rank(layer, style, degree)
        with torch.no_grad():
            for key, parameter in layer.named_parameters():
                part = _part_of(whole, full_name(name, key), before[key], plan, rank, degree)
                parameter.copy_(torch.zeros_like(parameter) if part is None else part)
        if style == "colwise":
            layer.register_forward_pre_hook(
                lambda _, args, name=name: (_Shared.apply(args[0], meeting, rank, name), *args[1:])
            )
        else:
            layer.register_forward_hook(lambda _, _args, result, name=name: _Total.apply(result, meeting, rank, name))
    return model


def _run(model: nn.Module, inputs: _Inputs) -> _Values:
    """Run a model forward and backward from a random function of all its results."""
    model.zero_grad()
    args, kwargs = inputs
    found: list[Any] = pytree.tree_leaves(model(*args, **kwargs))
    results = [each for each in found if isinstance(each, Tensor) and each.is_floating_point()]
    generator = torch.Generator().manual_seed(1)
    weighted = [
        (each * torch.randn(each.shape, generator=generator, dtype=each.dtype)).sum()
        for each in results
        if each.requires_grad
    ]
    if not weighted:
        raise PlanError(f"{type(model).__name__} returns no tensors from which gradients could be computed")
    torch.stack(weighted).sum().backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return _Values(results=[each.detach() for each in results], gradients=gradients)
