"""How much memory a rank needs: `plan_memory`, before anything is allocated, for a model on the meta device.

Training state: ZeRO (Rajbhandari et al. 2019, arXiv:1910.02054), section 3.1: what each parameter costs. FSDP2 keeps
parameters, their gradients and the optimizer's states in the type of the parameters, split over `shard x tensor` ranks.

Activations are counted, not estimated: one training step of the model runs with fake tensors, whose operations compute
shapes only, with the recomputation, chunks and tiles of the configuration; `TrackedMemory` counts what it keeps. It is
a dispatch mode that sees the result of every operation, also in backward, and counts the bytes of each new storage
until it is freed. Temporary memory inside an operation and the rounding of an allocator are not seen. FSDP2 frees and
allocates gathered parameters by resizing their storage, which is counted, too.

Gathered is what FSDP2 would hold at the peak of that step: parameters in the type of computation, messages, and whole
gradients of a unit until all are there; see `_Units`. What belongs to no unit (embeddings, the head) is gathered from
the forward pass to the end of backward. With `float8_all_gather` weights of float8 layers are gathered in one byte a
value; their gradients keep the type of computation.

What `param_offload` and `optimizer_offload` keep in host memory counts there, and not on the device. A step on the host
also needs a copy of the shards of parameters and gradients, if these are on the device.

Left out: what the libraries need for themselves, 5 to 8 GiB of a large GPU.
"""

# Storages have no public identity, and torch's type stubs name the arguments of `resize_` differently.
# Configurations of transformers have private fields and no common type.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

import copy
import math
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.memory.host_pool import HostBlock, HostPool
from hyperpod_plugins.memory.recompute import is_in_backward
from hyperpod_plugins.memory.tiled_mlp import tile_mlps
from hyperpod_plugins.parallel import ParallelConfig, Topology
from hyperpod_plugins.parallel.expert_parallel import layers_of_experts
from hyperpod_plugins.parallel.hsdp import find_blocks, outermost_blocks
from hyperpod_plugins.parallel.parallelize import save_activation_memory
from hyperpod_plugins.parallel.tensor_parallel import plan_for
from hyperpod_plugins.parallel.tensor_styles import SPLITS_PARAMETERS, keep_one_rank
from hyperpod_plugins.planning.rank_part import plan_context_part, plan_expert_part
from hyperpod_plugins.precision.float8 import convertible_linears
from hyperpod_plugins.recovery.snapshot import COPIES

GIB = 2**30
_FLOAT32, _BFLOAT16, _FLOAT8 = 4, 2, 1
_SPLIT = ("colwise", "rowwise", "embedding_rowwise", "colwise_gather_output")
_FUSED = "hyperpod_plan"
_FRAGMENTATION = 0.05
"""Part of the device's memory that an allocator loses between blocks of different sizes."""


class TrackedMemory(TorchDispatchMode):
    """Counts the bytes of storages that operations return, as long as they live; one at a time in a process."""

    def __init__(self) -> None:
        """Count nothing yet."""
        super().__init__()
        self.current = 0
        """Bytes now."""
        self.peak = 0
        """Most bytes so far."""
        self.added = self.peak_added = 0
        """Bytes that `add` has added, now and at the peak."""
        self.divisor = 1
        """Of the bytes of a new storage, one part in so many counts."""
        self._sizes: dict[int, int] = {}  # by storage; -1 for one that is left out
        self._divisors: dict[int, int] = {}  # by storage, above 1

    def leave_out(self, tensor: Tensor) -> None:
        """Do not count the storage of a tensor, now or later."""
        for storage in _storages_of(tensor):
            key = storage._cdata
            if key not in self._sizes:  # another storage may have its place later
                weakref.finalize(storage, self._forget, key)
            self.current -= max(0, self._sizes.get(key, 0)) // self._divisors.pop(key, 1)
            self._sizes[key] = -1

    def __enter__(self) -> Self:
        """Start to count."""
        self._resize = torch.UntypedStorage.resize_
        tracker, resize = self, self._resize

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            tracker.count(storage)
            return result

        torch.UntypedStorage.resize_ = resize_
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        """Stop to count."""
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*args)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count what it returns."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                for storage in _storages_of(leaf):
                    self.count(storage)
        return result

    def count(self, storage: torch.UntypedStorage) -> None:
        """Count a storage that is new, or has another size than before."""
        key, size = storage._cdata, storage.nbytes()
        known = self._sizes.get(key)
        if known == -1 or known == size:
            return
        if known is None:
            weakref.finalize(storage, self._forget, key)
            if self.divisor > 1:
                self._divisors[key] = self.divisor
        self._sizes[key] = size
        self._change((size - (known or 0)) // self._divisors.get(key, 1))

    def add(self, num_bytes: float) -> None:
        """Count memory that no tensor stands for; a negative number takes it away again."""
        self.added += int(num_bytes)
        self._change(int(num_bytes))

    def _change(self, num_bytes: int) -> None:
        self.current += num_bytes
        if self.current > self.peak:
            self.peak, self.peak_added = self.current, self.added

    def _forget(self, key: int) -> None:
        self.current -= max(0, self._sizes.pop(key, 0)) // self._divisors.pop(key, 1)


class UncountedPool(HostPool):
    """Host memory of an offload where the host is the device, or nothing is: it does not count."""

    def __init__(self, device: torch.device, tracker: TrackedMemory, budget_bytes: int = 0) -> None:
        """Let `tracker` leave out all blocks; without `budget_bytes` there is no limit."""
        super().__init__(device, budget_bytes=budget_bytes or 1 << 62)
        self._tracker = tracker

    def acquire(self, num_bytes: int) -> HostBlock | None:
        """Return a block, as `HostPool` does."""
        tracker = self._tracker
        peak = tracker.peak, tracker.peak_added
        block = super().acquire(num_bytes)
        if block is not None:
            tracker.leave_out(block.memory)
            tracker.peak, tracker.peak_added = peak
        return block


def _storages_of(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """Of what a tensor consists of; a tensor around others (of DTensor, of float8) has a storage without memory."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            if isinstance(part := getattr(tensor, name), Tensor):  # a DTensor also names its mesh
                yield from _storages_of(part)
    else:
        yield tensor.untyped_storage()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingShape:
    """What one rank computes at a time, and what it keeps for each parameter."""

    micro_batch_size: int
    """Samples of one forward and backward pass of a rank."""
    sequence_length: int
    """Tokens of a sample."""
    optimizer_states: int = 2
    """Tensors of the size of a parameter that the optimizer keeps: 2 for Adam, 1 for SGD with momentum."""
    keeps_gradients: bool = False
    """Whether gradients exist when a backward begins: with accumulation, or `zero_grad(set_to_none=False)`."""
    has_snapshots: bool = False
    """Whether ranks keep buddy snapshots: two of their own state, and two of another rank's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes of one rank."""

    topology: Topology
    """Degrees of the plan."""
    num_parameters: int
    """Of the whole model."""
    num_trained: int
    """Of them, those that are trained."""
    parameters: float
    """Shards of the parameters, on the device."""
    gradients: float
    """Shards of the gradients, on the device."""
    optimizer: float
    """Shards of the optimizer's states, on the device."""
    gathered: float
    """Whole parameters and gradients of the units that are being computed."""
    activations: float
    """Peak of what a step keeps besides, logits included."""
    host_state: float
    """In host memory: parameters, gradients and optimizer states, or copies of them while the optimizer steps."""
    host_activations: float
    """In host memory: offloaded activations."""
    host_snapshots: float
    """In host memory: snapshots of this rank's state, and of another's."""

    @property
    def device(self) -> float:
        """Bytes on the device, with a margin for fragmentation."""
        used = self.parameters + self.gradients + self.optimizer + self.gathered + self.activations
        return used * (1 + _FRAGMENTATION)

    @property
    def host(self) -> float:
        """Bytes in host memory."""
        return self.host_state + self.host_activations + self.host_snapshots

    def __str__(self) -> str:
        """Return the parts in GiB."""
        parts = ("parameters", "gradients", "optimizer", "gathered", "activations", "device", "host")
        snapshots = f" (snapshots {self.host_snapshots / GIB:.2f})" if self.host_snapshots else ""
        return "  ".join(f"{name} {getattr(self, name) / GIB:.2f}" for name in parts) + snapshots


def plan_memory(
    model: Any,
    config: ParallelConfig,
    training: TrainingShape,
    *,
    world_size: int,
    ranks_per_node: int = 0,
    step: Callable[[nn.Module, TrainingShape], Tensor] | None = None,
) -> MemoryPlan:
    """Plan the memory of a rank.

    Args:
        model: A module, best on the meta device, or a configuration of transformers. It is not changed.
        config: Degrees, precision and what is done about activations.
        training: Batch, sequence and optimizer.
        world_size: Number of ranks.
        ranks_per_node: Ranks on a node; 0 for all.
        step: Computes the loss of a micro-batch of fake tensors; by default `model(input_ids=..., labels=...).loss`.
            With context parallelism it is given the length of a rank's part of the sequences.

    Raises:
        ConfigError: The step depends on values or uses an operation that fake tensors do not have, or context or
            expert parallelism does not serve the model.
        DegreeError: The degrees do not fit the world.
        NotBuiltYetError: `context_parallel_degree` is above 1, and the model is not one of transformers.
    """
    module = model if isinstance(model, nn.Module) else _built(model)
    topology = config.topology(world_size, ranks_per_node=ranks_per_node)
    tracked = _track_step(module, config, topology, training, step or _language_model_step)
    return _plan(module, config, topology, training, tracked)


def smallest_degrees(
    model: Any,
    config: ParallelConfig,
    training: TrainingShape,
    *,
    world_size: int,
    device_memory_gib: float,
    ranks_per_node: int = 0,
    step: Callable[[nn.Module, TrainingShape], Tensor] | None = None,
) -> MemoryPlan:
    """The plan with the smallest tensor degree, and with it the smallest shard degree, that fits a device.

    Args:
        model: See `plan_memory`.
        config: Of its degrees, only those of context and expert parallelism count, which are kept.
        training: See `plan_memory`.
        world_size: Number of ranks.
        device_memory_gib: Memory of a device that a plan may take, in GiB.
        ranks_per_node: Tensor parallelism stays on a node; 0 for one node.
        step: See `plan_memory`.

    Raises:
        ConfigError: Nothing fits; the message has the plan with the largest degrees.
        NotBuiltYetError: `context_parallel_degree` is above 1, and the model is not one of transformers.
    """
    module = model if isinstance(model, nn.Module) else _built(model)
    plan = None
    inner = math.lcm(config.context_parallel_degree, config.expert_parallel_degree)  # inside the shard axis
    for tensor_degree in _divisors(ranks_per_node or world_size, world_size):
        split = replace(config, tensor_parallel_degree=tensor_degree, hybrid_shard_degree=0)
        most = world_size // tensor_degree
        for shard_degree in (each for each in _divisors(most, most) if each % inner == 0):
            tried = replace(split, hybrid_shard_degree=shard_degree)
            topology = tried.topology(world_size, ranks_per_node=ranks_per_node)
            try:
                shards = _plan(module, tried, topology, training, _TrackedStep())
                if shards.device > device_memory_gib * GIB and shard_degree < most:
                    continue  # whatever a step needs besides
                tracked = _track_step(module, tried, topology, training, step or _language_model_step)
            except ConfigError:
                if tensor_degree == 1:
                    raise
                break  # the model cannot be split so
            plan = _plan(module, tried, topology, training, tracked)
            if plan.device <= device_memory_gib * GIB:
                return plan
    assert plan is not None
    raise ConfigError(
        f"{plan.num_parameters:,} parameters with {training.sequence_length} tokens do not fit {world_size} devices of "
        f"{device_memory_gib:g} GiB; with {plan.topology} a rank needs, in GiB: {plan}. Use more ranks, or what "
        "docs/guides/memory.md lists against activations."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _TrackedStep:
    """Bytes of one rank in a step, besides its shards."""

    gathered: float = 0.0
    activations: float = 0.0
    host_activations: float = 0.0


def _plan(
    model: nn.Module, config: ParallelConfig, topology: Topology, training: TrainingShape, tracked: _TrackedStep
) -> MemoryPlan:
    stored = _BFLOAT16 if config.precision == "bf16-true" else _FLOAT32
    split = {
        name
        for name, style in plan_for(model, config).items()
        if isinstance(style, SPLITS_PARAMETERS) or style in _SPLIT
    }
    if config.expert_parallel_degree > 1:
        split |= layers_of_experts(model).keys()  # sharded over tensor peers, too

    def count(names: Iterable[tuple[str, nn.Parameter]], *, trained_only: bool = False) -> float:
        """Parameters of one rank of a tensor group."""
        return sum(
            parameter.numel() / (topology.tensor_degree if name.rpartition(".")[0] in split else 1)
            for name, parameter in names
            if parameter.requires_grad or not trained_only
        )

    everything = list(model.named_parameters())
    sharded = count(everything) / topology.shard_degree
    trained = count(everything, trained_only=True) / topology.shard_degree
    optimizer = training.optimizer_states * stored * trained
    shards = {"parameters": stored * sharded, "gradients": stored * trained, "optimizer": optimizer}
    on_host = tuple(shards) if config.param_offload else ("optimizer",) * config.optimizer_offload
    copies = 2 * stored * trained if config.optimizer_offload and not config.param_offload else 0.0
    return MemoryPlan(
        topology=topology,
        num_parameters=sum(parameter.numel() for _, parameter in everything),
        num_trained=sum(parameter.numel() for _, parameter in everything if parameter.requires_grad),
        **{name: 0.0 if name in on_host else size for name, size in shards.items()},
        gathered=tracked.gathered,
        activations=tracked.activations,
        host_state=sum(shards[name] for name in on_host) + copies,
        host_activations=tracked.host_activations,
        host_snapshots=COPIES * (stored * sharded + optimizer) if training.has_snapshots else 0.0,
    )


def _track_step(
    model: nn.Module,
    config: ParallelConfig,
    topology: Topology,
    training: TrainingShape,
    step: Callable[[nn.Module, TrainingShape], Tensor],
) -> _TrackedStep:
    """Run a step with fake tensors, and count."""
    tracker, cpu = TrackedMemory(), torch.device("cpu")
    of_stream = config.tensor_parallel_degree if config.sequence_parallel else 1  # inputs of blocks are parts of it
    options = replace(config, sequence_parallel=False, loss_parallel=False)
    if options.sm_activation_offloading == "auto":  # as a job on GPUs begins
        options = replace(options, sm_activation_offloading=True)
    with FakeTensorMode():
        twin = _fake_twin(model, None if config.precision == "32-true" else torch.bfloat16)
        split = _split_as_one_rank(twin, config)
        if config.tensor_parallel_degree > 1 and config.sequence_parallel:
            _split_stream(twin, config, tracker)
        if config.context_parallel_degree > 1:
            length = plan_context_part(twin, config, training.sequence_length)
            training = replace(training, sequence_length=length)
        else:
            _leave_masks_out(twin)
        experts = plan_expert_part(twin, config)
        if options.mlp_tiles > 1:
            tile_mlps(twin, options.mlp_tiles, is_tried=False)
        pool = UncountedPool(cpu, tracker, options.activation_host_bytes * of_stream)
        save_activation_memory(twin, options, cpu, pool)
        for parameter in twin.parameters():
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        kept = [*twin.parameters(), *twin.buffers()]
        for tensor in (*kept, *(each.grad for each in kept if each.grad is not None)):
            tracker.leave_out(tensor)
        keeps_results = training.keeps_gradients or config.param_offload
        units = _Units(twin, experts, config, topology, tracker, split, keeps_results=keeps_results)
        if topology.world_size > 1:
            units.watch()
        try:
            with tracker:
                loss = step(twin.train(), training)
                if topology.world_size > 1:
                    units.begin_backward()
                loss.backward()
        except (NotImplementedError, RuntimeError) as error:
            raise ConfigError(
                f"a step of {type(model).__name__} cannot be planned with fake tensors, which have no values and not "
                f"all of torch's operations: {str(error).partition(chr(10))[0]}. Give plan_memory a step without that "
                "(step=...), or another implementation of the layer."
            ) from error
    return _TrackedStep(
        gathered=float(tracker.peak_added),
        activations=float(tracker.peak - tracker.peak_added),
        host_activations=pool.allocated_bytes / of_stream,
    )


def _built(config: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _fake_twin(model: nn.Module, computed: torch.dtype | None) -> nn.Module:
    """A copy of a model with fake tensors, which have no memory, and parameters as FSDP2 gathers them."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        values = torch.empty(parameter.shape, dtype=computed or parameter.dtype)
        memo[id(parameter)] = nn.Parameter(values, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype)
    return copy.deepcopy(model, memo)


class _Units:
    """Counts what FSDP2 holds besides shards, as the units of a model run.

    In forward, a unit is gathered into a message, and copied from it into its parameters. The message is freed when
    that of the next unit has arrived; the parameters, when the unit has run.

    In backward, the message is freed at once. It arrives while the unit after this one is computed. When all gradients
    of a unit are there, its parameters are freed, and the gradients are copied into a message, which is freed when the
    next unit reduces. The results stay until the end. They become the gradients of the shards, or are added to those
    that exist.
    """

    def __init__(
        self,
        model: nn.Module,
        experts: Collection[nn.Module],
        config: ParallelConfig,
        topology: Topology,
        tracker: TrackedMemory,
        split: Collection[int],
        *,
        keeps_results: bool,
    ) -> None:
        """Count nothing yet.

        Args:
            model: As one rank computes it.
            experts: Layers of experts in it that are divided among ranks.
            config: Configuration of the plan.
            topology: Topology of the plan.
            tracker: To add to.
            split: The `id` of each parameter that is whole in `model`, but split by tensor parallelism.
            keeps_results: Whether the results of reductions are none of the gradients that count elsewhere.
        """
        self._model, self._tracker, self._topology = model, tracker, topology
        self._split, self._keeps_results = split, keeps_results
        self._size = _FLOAT32 if config.precision == "32-true" else _BFLOAT16
        self._size_of_reduction = _BFLOAT16 if config.precision == "bf16-true" else _FLOAT32
        self._in_float8 = _gathered_in_float8(model, config)
        self._keeps = not config.reshard_after_forward
        of_experts = {id(each) for part in experts for each in part.parameters()}
        blocks = {id(block) for block in find_blocks(model, config.block_classes)}
        self._experts = {id(part) for part in experts}
        self._units = [part for part in _in_order_of_ends(model) if id(part) in blocks | self._experts]
        inside = {id(each) for unit in self._units for each in unit.parameters()}
        self._parameters = {
            id(unit): [each for each in unit.parameters() if id(unit) in self._experts or id(each) not in of_experts]
            for unit in self._units
        }
        self._parameters[id(model)] = [each for each in model.parameters() if id(each) not in inside]
        self._gathered, self._arrived = set[int](), set[int]()
        self._waiting: dict[int, set[int]] = {}
        self._copied_message = self._reduced_message = 0

    def watch(self) -> None:
        """Count from now on."""
        self._gather(self._model)  # from the beginning of the forward pass to the end of backward
        for index, unit in enumerate(self._units):
            unit.register_forward_pre_hook(lambda unit, _: self._gather(unit), prepend=True)
            unit.register_forward_hook(lambda unit, *_: self._end_forward(unit))
            unit.register_full_backward_pre_hook(partial(self._begin_backward, index))
        for unit in (self._model, *self._units):
            trained = [each for each in self._parameters[id(unit)] if each.requires_grad]
            self._waiting[id(unit)] = {id(each) for each in trained}
            for each in trained:
                each.register_post_accumulate_grad_hook(partial(self._accumulate, unit))

    def begin_backward(self) -> None:
        """The forward pass has ended."""
        self._free_copied_message()
        self._prefetch(len(self._units) - 1)

    def _num_bytes(self, unit: nn.Module) -> int:
        """What the parameters of a unit take while they are gathered."""
        return sum(
            self._numel(each) * (_FLOAT8 if id(each) in self._in_float8 else self._size)
            for each in self._parameters[id(unit)]
        )

    def _numel(self, parameter: Tensor) -> int:
        return parameter.numel() // (self._topology.tensor_degree if id(parameter) in self._split else 1)

    def _message_bytes(self, unit: nn.Module) -> int:
        return self._num_bytes(unit) if self._num_shards(unit) > 1 else 0

    def _num_shards(self, unit: nn.Module) -> int:
        """Number of ranks that the parameters of a unit on one rank are sharded over."""
        if id(unit) in self._experts:
            return self._topology.replica_size // self._topology.expert_degree
        return self._topology.shard_degree

    def _receive(self, unit: nn.Module) -> None:
        if id(unit) not in self._gathered | self._arrived:
            self._arrived.add(id(unit))
            self._tracker.add(self._message_bytes(unit))

    def _prefetch(self, index: int) -> None:
        if index >= 0 and not self._keeps:
            self._receive(self._units[index])

    def _gather(self, unit: nn.Module) -> None:
        if id(unit) in self._gathered:
            return
        self._receive(unit)
        self._free_copied_message()
        self._gathered.add(id(unit))
        self._arrived.discard(id(unit))
        self._tracker.add(self._num_bytes(unit))
        self._copied_message = self._message_bytes(unit)
        if is_in_backward():
            self._free_copied_message()

    def _free_copied_message(self) -> None:
        self._tracker.add(-self._copied_message)
        self._copied_message = 0

    def _free(self, unit: nn.Module) -> None:
        if id(unit) in self._gathered:
            self._gathered.discard(id(unit))
            self._tracker.add(-self._num_bytes(unit))

    def _end_forward(self, unit: nn.Module) -> None:
        if not (is_in_backward() or self._keeps):  # in backward, a recomputation
            self._free(unit)

    def _begin_backward(self, index: int, unit: nn.Module, *_: Any) -> None:
        self._gather(unit)
        self._prefetch(index - 1)

    def _accumulate(self, unit: nn.Module, parameter: Tensor) -> None:
        """Whole gradients wait until all of the unit are there."""
        self._tracker.add(self._size * self._numel(parameter))
        waiting = self._waiting[id(unit)]
        waiting.discard(id(parameter))
        if not waiting:
            self._reduce(unit)

    def _reduce(self, unit: nn.Module) -> None:
        num_trained = sum(self._numel(each) for each in self._parameters[id(unit)] if each.requires_grad)
        self._free(unit)
        self._tracker.add(-self._reduced_message)
        self._reduced_message = num_trained * self._size_of_reduction
        self._tracker.add(self._reduced_message)
        self._tracker.add(-num_trained * self._size)  # copied
        result = self._reduced_message // self._num_shards(unit)
        self._tracker.add(result)
        if not self._keeps_results:
            self._tracker.add(-result)


def _in_order_of_ends(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of a model in the order in which their forwards end, if their children run in order."""
    for child in model.children():
        yield from _in_order_of_ends(child)
    yield model


def _gathered_in_float8(model: nn.Module, config: ParallelConfig) -> set[int]:
    """Return the `id` of each weight that FSDP2 would gather in float8; tensor parallelism has split the model."""
    if not config.float8_all_gather:
        return set()
    linears = convertible_linears(model, outermost_blocks(model, config.block_classes))
    return {id(each.weight) for each in linears.values()}


def _split_as_one_rank(model: nn.Module, config: ParallelConfig) -> set[int]:
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


def _split_stream(model: nn.Module, config: ParallelConfig, tracker: TrackedMemory) -> None:
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
    """Copies a tensor where the residual stream begins or ends, and its gradient; see `_split_stream`."""

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


def _leave_masks_out(model: nn.Module) -> None:
    """Have models of transformers with fused attention build no masks, as they do where they see that none is needed.

    With fake tensors they cannot see that.
    """
    if not any(type(part).__module__.startswith("transformers.") for part in model.modules()):
        return
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(_FUSED, sdpa_attention_forward)
    AttentionMaskInterface.register(_FUSED, _no_mask)
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and part.config._attn_implementation != "eager":
            part.config._attn_implementation = _FUSED


def _no_mask(*_: Any, **__: Any) -> None:
    return None


def _language_model_step(model: nn.Module, training: TrainingShape) -> Tensor:
    shape = training.micro_batch_size, training.sequence_length
    tokens = torch.empty(shape, dtype=torch.int64)
    return model(input_ids=tokens, labels=tokens).loss


def _divisors(number: int, of: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0 and of % each == 0]
