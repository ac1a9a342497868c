"""Expert parallelism: the experts of each layer are divided among the ranks of an expert group.

`find_experts(model, ...)` finds the layers of experts and checks them; `shard_experts(...)` divides each of them, lets
its forward exchange tokens (`expert_exchange.py`), and shards what each rank holds by FSDP2:

    parameter of experts   expert dimension split over `expert`, each part sharded over `expert_shard`, on the mesh of
                           `build_expert_mesh`; its name and its global shape stay those of the whole model
    everything else        as without expert parallelism, over `replicate x shard` (and `tensor`)

Served are the layers of experts of transformers that its own plans for expert parallelism name, whatever computes them
(`experts_implementation`), and modules of your own that say `holds_experts = True`:

    class Experts(nn.Module):
        holds_experts = True

        def __init__(self, num_experts, hidden, inner):
            self.num_experts = num_experts
            self.up = nn.Parameter(torch.empty(num_experts, hidden, inner))  # each begins with the experts
            ...

        def forward(self, hidden, expert_index, weights):
            ...  # (tokens, hidden), (tokens, choices), (tokens, choices) -> (tokens, hidden)

Its result for a token must be the sum, over the token's experts, of the weight times what the expert computes from that
token alone. In a divided layer it is called with rows of all ranks, one choice each and weights of 1; `num_experts` is
then the number of experts of this rank, and parameters are the parts of these experts.
"""

import fnmatch
import re
import sys
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # pyright: ignore[reportPrivateUsage]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.utils import parametrize

from hyperpod_plugins.comm import group_health
from hyperpod_plugins.errors import ConfigError, DegreeError, NotBuiltYetError, format_list
from hyperpod_plugins.memory.chunked_loss import derived_class
from hyperpod_plugins.parallel.config import ParallelConfig
from hyperpod_plugins.parallel.expert_exchange import TokenParts, check_inputs, compute_with_experts, route
from hyperpod_plugins.parallel.hsdp import cached_mesh_slices, mixed_precision_policy, offload_policy
from hyperpod_plugins.parallel.topology import EXPERT, EXPERT_SHARD, build_expert_mesh, expert_group

SERVED_IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
"""`experts_implementation` of transformers that compute the experts of a rank as they compute all."""
_HOLDS_EXPERTS = "holds_experts"
_DISPATCHES = "ep_dispatch_experts"
"""Style of the modules in transformers' plans for expert parallelism that exchange tokens."""


def find_experts(model: nn.Module, config: ParallelConfig) -> dict[str, nn.Module]:
    """Return the layers of experts of a model by name; none without expert parallelism.

    Args:
        model: not sharded yet.
        config: configuration to apply.

    Raises:
        ConfigError: there are none, or one of them cannot be divided such that the result stays the same.
        DegreeError: the degree does not divide the number of experts.
        NotBuiltYetError: the experts are computed by a library that is not served yet.
    """
    degree = config.expert_parallel_degree
    if degree == 1:
        return {}
    named, found = _planned_names(model), layers_of_experts(model)
    if not found:
        raise ConfigError(
            f"expert_parallel_degree={degree}, but {type(model).__name__} has no layer of experts that is known: one "
            "of transformers that dispatches to experts_implementation, or a module of your own that says "
            "holds_experts = True (see hyperpod_plugins.parallel.expert_parallel). Use expert_parallel_degree=1."
        )
    owners = Counter(id(each) for part in model.modules() for each in part.parameters(recurse=False))
    if named_blocks := {type(part).__name__ for part in found.values()} & set(config.block_classes):
        raise ConfigError(
            f"block_classes names {', '.join(sorted(named_blocks))}, a layer of experts, which is a unit of its own "
            f"with expert_parallel_degree={degree}. Leave it out, or name the class of the block around it."
        )
    for name, part in found.items():
        problem = _problem(model, part, owners, is_named=name in named)
        if problem:
            raise ConfigError(
                f"expert_parallel_degree={degree} cannot serve {name} ({type(part).__name__}): {problem}. Use "
                "expert_parallel_degree=1."
            )
        _check_implementation(name, part, degree)
        _check_number(name, cast("Any", part).num_experts, degree)
    return found


def layers_of_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of experts of a model by name: those of transformers, and those that say `holds_experts`."""
    return {
        name: part
        for name, part in model.named_modules()
        if getattr(part, _HOLDS_EXPERTS, False) or _is_of_transformers(part)
    }


def shard_experts(
    experts: Mapping[str, nn.Module], mesh: DeviceMesh, config: ParallelConfig, *, averages_replicas: bool
) -> None:
    """Divide layers of experts among the ranks of an expert group, and shard each part by FSDP2, in place.

    Args:
        experts: as `find_experts` returned them. The model around them is sharded afterwards.
        mesh: `("replicate", "shard", "tensor")`, of `build_mesh` with the same degrees.
        config: configuration to apply.
        averages_replicas: see `parallelize`.

    Raises:
        ConfigError: there is no group for the degree.
        NotBuiltYetError: `averages_replicas` is False.
        DegreeError: the ranks that share the same experts cannot have equal parts of them.
    """
    if not experts:
        return
    if not averages_replicas:
        raise NotBuiltYetError(
            f"expert_parallel_degree={config.expert_parallel_degree} is not served yet with reproducible=True or "
            "AdaScale. Use expert_parallel_degree=1, or leave the other out."
        )
    degree, shard_degree, tensor_mesh = config.expert_parallel_degree, mesh["shard"].size(), mesh["tensor"]
    expert_mesh = build_expert_mesh(mesh, degree)
    num_ranks = expert_mesh[EXPERT_SHARD].size()
    for name, part in experts.items():
        for key, parameter in part.named_parameters(recurse=False):
            _shard_dim(f"{name}.{key}", parameter, degree, num_ranks)  # before anything is changed
    # Weights of experts are in the type of the router, which is more precise than the parameters' in mixed precision.
    policy = replace(mixed_precision_policy(config), cast_forward_inputs=False)
    with cached_mesh_slices(expert_mesh):
        for name, part in experts.items():
            dims: dict[nn.Parameter, int] = {}
            for key, parameter in list(part.named_parameters(recurse=False)):
                whole = distribute_tensor(parameter.detach(), expert_mesh[EXPERT], [Shard(0)], src_data_rank=None)
                divided = nn.Parameter(whole, requires_grad=parameter.requires_grad)
                part.register_parameter(key, divided)
                dims[divided] = _shard_dim(f"{name}.{key}", parameter, degree, num_ranks)
            _exchange_tokens(part, shard_degree, degree, tensor_mesh)
            fully_shard(
                part,
                mesh=expert_mesh["replicate", EXPERT_SHARD],
                reshard_after_forward=config.reshard_after_forward,
                mp_policy=policy,
                offload_policy=offload_policy(config, mesh.device_type),
                shard_placement_fn=lambda parameter, dims=dims: Shard(dims[parameter]),
            )


def expert_degree_of(model: nn.Module) -> int:
    """Return the number of ranks that the experts of a model are divided among."""
    meshes = [each.device_mesh for each in model.parameters() if isinstance(each, DTensor)]
    return max((mesh[EXPERT].size() for mesh in meshes if EXPERT in (mesh.mesh_dim_names or ())), default=1)


def _exchange_tokens(part: nn.Module, shard_degree: int, degree: int, tensor_mesh: DeviceMesh) -> None:
    """Let the forward of a layer of experts compute with the experts of all ranks of the expert group."""
    kind: Any = type(part)
    tensor_degree = tensor_mesh.size()

    @_disable_dynamo  # collectives within it, of sizes that the host reads
    def forward(self: Any, hidden: Tensor, expert_index: Tensor, weights: Tensor) -> Tensor:
        hidden, expert_index, weights = _local(hidden), _local(expert_index), _local(weights)
        check_inputs(kind.__name__, hidden, expert_index, weights)
        parts = TokenParts(group=tensor_mesh.get_group(), num_tokens=len(hidden))
        hidden, expert_index, weights = parts.own(hidden), parts.cut(expert_index), parts.own(weights)
        group = expert_group(shard_degree, tensor_degree, degree)
        num_experts: int = self.num_experts
        routes, expert_of_row = route(expert_index, num_experts, group, tensor_degree=tensor_degree)

        def compute(rows: Tensor, experts: Tensor) -> Tensor:
            with _own_experts(self, num_experts // degree):
                if len(rows) == 0:
                    with torch.no_grad():  # other ranks wait for this one unless it finds the same fault
                        one = rows.new_zeros((1, rows.shape[1]))
                        _check_result(kind, one, kind.forward(self, one, experts.new_zeros((1, 1)), one[:, :1] + 1))
                    return rows + _nothing(self)
                result = kind.forward(self, rows, experts[:, None], torch.ones_like(rows[:, :1]))
                _check_result(kind, rows, result)
                return result

        is_needed = self.training and tensor_degree > 1
        with _own_random_numbers(tensor_mesh.get_local_rank(), hidden.device, is_needed=is_needed):
            result = compute_with_experts(compute, hidden, weights, routes, expert_of_row)
        return parts.join(result)

    part.__class__ = derived_class(kind, {"forward": forward})


@contextmanager
def _own_random_numbers(tensor_rank: int, device: torch.device, *, is_needed: bool) -> Generator[None]:
    """Context in which tensor peers, which compute different rows, draw different random numbers.

    After it their common stream goes on, however many numbers each of them has drawn.
    """
    if not is_needed:
        yield
        return
    seed = int(torch.randint(2**62, (), device="cpu")) + tensor_rank
    on_device = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_device else []):
        torch.default_generator.manual_seed(seed)
        if on_device:
            torch.cuda.manual_seed(seed)
        yield


def _local(tensor: Tensor) -> Tensor:
    """A tensor that all ranks of a tensor group have, as a plain one."""
    if not isinstance(tensor, DTensor):
        return tensor
    whole = [Replicate()] * tensor.device_mesh.ndim
    return tensor.redistribute(placements=whole).to_local(grad_placements=whole)


def _check_result(kind: type[nn.Module], rows: Tensor, result: object) -> None:
    """Check that experts have computed what travels back as the rows came.

    Raises:
        ConfigError: the result has another shape or type.
    """
    if not isinstance(result, Tensor) or (result.shape, result.dtype) != (rows.shape, rows.dtype):
        found = f"{tuple(result.shape)} in {result.dtype}" if isinstance(result, Tensor) else type(result).__name__
        raise ConfigError(
            f"{kind.__name__} must compute from rows of hidden states as many rows of the same width and type, "
            f"{tuple(rows.shape)} in {rows.dtype}, but its result is {found}. Convert it in its forward, or use "
            "expert_parallel_degree=1."
        )


@contextmanager
def _own_experts(part: Any, num_experts: int) -> Generator[None]:
    """Context in which a layer of experts is one of this rank's experts, whose parameters are local tensors."""
    whole, parameters = part.num_experts, dict(_own_parameters(part))
    own = _own_parameters(part)
    own.update({name: each.to_local() for name, each in parameters.items() if isinstance(each, DTensor)})
    part.num_experts = num_experts
    try:
        yield
    finally:
        own.update(parameters)
        part.num_experts = whole


def _own_parameters(part: Any) -> dict[str, Tensor | None]:
    return part._parameters


def _nothing(part: nn.Module) -> Tensor:
    """Zero, `()`, that depends on the experts: a rank without rows takes part in backward like the others."""
    held = [each for each in _own_parameters(part).values() if each is not None]
    return torch.stack([0.0 * each.reshape(-1)[:1].sum() for each in held]).sum()


# -- what is served -------------------------------------------------------------------------------------------------


def _is_of_transformers(part: nn.Module) -> bool:
    """Whether a module is a layer of experts that transformers' `use_experts_implementation` has decorated."""
    return "_is_expert_parallel" in vars(part)


def _planned_names(model: nn.Module) -> set[str]:
    """Names of the modules that the expert parallel plans of the transformers models in `model` name."""
    transformers = sys.modules.get("transformers")
    found: set[str] = set()
    if transformers is None:
        return found
    for prefix, part in model.named_modules():
        if isinstance(part, transformers.PreTrainedModel):
            plan: Mapping[str, str] = cast("Any", part).ep_plan or {}
            patterns = [pattern for pattern, style in plan.items() if style == _DISPATCHES]
            begin = f"{prefix}." if prefix else ""
            found |= {
                f"{begin}{name}"
                for name, _ in part.named_modules()
                if any(re.fullmatch(fnmatch.translate(pattern), name) for pattern in patterns)
            }
    return found


def _problem(model: nn.Module, part: Any, owners: Mapping[int, int], *, is_named: bool) -> str:
    """Why dividing a layer of experts is not known to be exact; empty if it is.

    Args:
        model: the model around it.
        part: the layer.
        owners: number of modules that hold each parameter, by its `id`.
        is_named: whether a plan of transformers names it.
    """
    own = dict(part.named_parameters(recurse=False))
    within = [name for name, _ in part.named_parameters() if name not in own]
    within += [name for name, _ in part.named_buffers()]
    number = getattr(part, "num_experts", None)
    problem = ""
    if parametrize.is_parametrized(part) or within:
        problem = f"it has tensors that are not parameters of its own ({format_list(within) or 'parametrizations'})"
    elif any(child is part for each in model.modules() if _is_of_peft(each) for child in each.modules()):
        problem = "adapters of PEFT lie around it, whose parameters would have to be divided, too"
    elif any(isinstance(each, DTensor) for each in model.parameters()) or getattr(part, "_is_expert_parallel", False):
        problem = "transformers or the program has distributed the model already, as with from_pretrained(tp_plan=...)"
    elif not isinstance(number, int) or number < 1 or not own:
        problem = f"num_experts must be the number of its experts, but is {number!r}"
    elif others := [name for name, each in own.items() if not each.shape or each.shape[0] != number]:
        problem = f"the first dimension of {format_list(others)} is not that of its {number} experts"
    elif quantized := [name for name, each in own.items() if not each.is_floating_point() or each.element_size() < 2]:
        problem = f"{format_list(quantized)} is quantized ({own[quantized[0]].dtype})"
    elif shared := [name for name, each in own.items() if owners[id(each)] > 1]:
        problem = f"{format_list(shared)} belongs to other modules, too"
    elif _is_of_transformers(part) and not is_named:
        problem = "the model's plan for expert parallelism in transformers (ep_plan) does not name it"
    else:
        problem = _problem_of_forward(model, part)
    return problem


def _problem_of_forward(model: nn.Module, part: nn.Module) -> str:
    """Why tokens might not be exchanged when a layer of experts is called; empty if they are."""
    if "forward" in vars(part):
        return "its attribute forward replaces the method of its class, and would not exchange tokens"
    if any(getattr(each, "_use_kernels", False) for each in model.modules()):
        return "the model uses kernels from the hub (use_kernels), which may compute experts themselves"
    return ""


def _is_of_peft(part: nn.Module) -> bool:
    """Whether a module is PEFT's wrapper around one layer, not around a model."""
    return type(part).__module__.startswith("peft.tuners.") and "base_layer" in dict(part.named_children())


def _check_implementation(name: str, part: Any, degree: int) -> None:
    if not _is_of_transformers(part):
        return
    implementation = part.config._experts_implementation
    if implementation is not None and implementation not in SERVED_IMPLEMENTATIONS:
        raise NotBuiltYetError(
            f"expert_parallel_degree={degree} with experts_implementation={implementation!r} ({name}) is not served "
            f"yet. Use one of {', '.join(SERVED_IMPLEMENTATIONS)}, or expert_parallel_degree=1."
        )


def _check_number(name: str, num_experts: int, degree: int) -> None:
    if num_experts % degree:
        fits = [each for each in range(1, num_experts + 1) if num_experts % each == 0]
        raise DegreeError(
            f"expert_parallel_degree={degree} must divide the number of experts, but {name} has {num_experts}. It can "
            f"be one of {fits}; the nearest is {min(fits, key=lambda fit: (abs(fit - degree), fit))}."
        )


def _shard_dim(name: str, parameter: Tensor, degree: int, num_ranks: int) -> int:
    """Return the dimension along which `num_ranks` ranks have equal parts of the experts of one part."""
    shape: Sequence[int] = (parameter.shape[0] // degree, *parameter.shape[1:])
    for dim, size in enumerate(shape):
        if size % num_ranks == 0:
            return dim
    raise DegreeError(
        f"{name} cannot be sharded equally over {num_ranks} ranks that hold the same experts: of each of its parts "
        f"{tuple(shape)}, no dimension is a multiple of {num_ranks}. Use another hybrid_shard_degree."
    )


class ExpertLoad:
    """Counts the tokens of each expert in the training forwards of a model, with or without expert parallelism.

        load = ExpertLoad(model)  # before or after the model is parallelized
        ...
        self.log_dict(load.values())  # of the tokens of all ranks since the last call

    Each choice of a token counts; nothing is ever dropped. Counted are forwards in training mode or with gradients, and
    what is recomputed in backward counts once. A process that replaces a lost one begins at zero.
    """

    def __init__(self, model: nn.Module) -> None:
        """Count from now on.

        Raises:
            ConfigError: the model has no layer of experts that is known.
        """
        layers = layers_of_experts(model)
        if not layers:
            raise ConfigError(
                f"{type(model).__name__} has no layer of experts that is known, so there is no load. Give a model with "
                "such layers, or leave ExpertLoad out; a layer of your own sets holds_experts = True."
            )
        self._model, self._layers = model, layers
        self._counts: dict[str, Tensor] = {}
        for name, part in layers.items():
            part.register_forward_pre_hook(self._counter(name, part), with_kwargs=True)

    def counts(self) -> dict[str, Tensor]:
        """Return how many tokens of all ranks went to each expert since the last call, by layer; a collective.

        Returns:
            For each layer that has run on any rank, `(num_experts,)`.
        """
        found, self._counts = self._counts, {}
        joined = torch.cat([self._of_layer(name, found.get(name)) for name in self._layers])
        if dist.is_initialized() and dist.get_world_size() > 1 and not group_health.is_unavailable:
            dist.all_reduce(joined)  # of all layers: ranks may have run different ones
            joined //= self._tensor_degree
        parts = joined.split([cast("Any", part).num_experts for part in self._layers.values()])
        has_run = torch.stack([part.sum() for part in parts]).tolist()
        return {name: part for name, part, number in zip(self._layers, parts, has_run, strict=True) if number}

    def _of_layer(self, name: str, counts: Tensor | None) -> Tensor:
        part: Any = self._layers[name]
        device = next(part.parameters()).device
        return torch.zeros(part.num_experts, dtype=torch.int64, device=device) if counts is None else counts

    @property
    def _tensor_degree(self) -> int:
        """Number of ranks that count the same tokens."""
        meshes = [each.device_mesh for each in self._model.parameters() if isinstance(each, DTensor)]
        return max((mesh["tensor"].size() for mesh in meshes if "tensor" in (mesh.mesh_dim_names or ())), default=1)

    def values(self) -> dict[str, float]:
        """Return how evenly tokens were spread since the last call; a collective.

        Returns:
            `router/entropy`: of the distribution of tokens over experts, from 0 (all to one) to 1 (evenly), the mean
            over layers; `router/max_load` and `router/min_load`: tokens of the expert with the most and with the fewest
            of all layers, 1 being its even share. Empty if no layer has run.
        """
        shares = [counts.double() / counts.sum().clamp(min=1) for counts in self.counts().values()]
        if not shares:
            return {}
        loads = torch.cat([share * len(share) for share in shares])
        entropies = torch.stack([torch.special.entr(share).sum() for share in shares])
        limits = torch.tensor([len(share) for share in shares], device=loads.device, dtype=loads.dtype).log()
        entropy = (entropies / limits.clamp(min=1e-12)).mean()
        found = torch.stack([entropy, loads.max(), loads.min()]).tolist()
        return dict(zip(("router/entropy", "router/max_load", "router/min_load"), found, strict=True))

    def _counter(self, name: str, part: Any) -> Callable[..., None]:
        def count(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # Blocks whose activations are recomputed run again in backward, some of them after a forward in no_grad.
            is_counted = part.training or torch.is_grad_enabled()
            if is_counted and torch._C._current_graph_task_id() == -1:  # pyright: ignore[reportPrivateUsage]
                experts: Tensor = [*args, *kwargs.values()][1]
                found = torch.bincount(experts.detach().reshape(-1), minlength=part.num_experts)
                before = self._counts.get(name)
                self._counts[name] = found if before is None else before + found

        return count
