"""Check that all ranks gather and reduce the same FSDP2 units in a step, before the optimizer updates parameters.

The collectives of a process group are matched only by their order. If ranks run different units at the same time, as
with experts, task heads or an early exit, FSDP2 joins shards of different modules: messages of equal size give
garbage without an error. Also, FSDP2 reduces only the gradients that a unit's parameters have on this rank: if other
parameters have one on another rank, gradients of different parameters are added up.

`UnitTrace` prevents both. A unit that took part in a backward reduces a gradient of each of its trainable parameters,
zero for those that this rank did not use; `reconcile_gradients` then removes the gradients that no rank computed, as in
a single process, and raises if the sequences of units differ. Within a unit, ranks may thus use different parameters.

[Note: parameters that a forward left gathered] FSDP2 keeps the parameters of the root gathered after a forward, until a
backward. A forward between the last backward and the optimizer's step, such as one without gradients for a metric,
leaves them gathered while the optimizer writes to their shards, and the next forward would compute with the values
before the step. So units are resharded when an optimizer is about to step on their parameters.

[Note: gradients that are kept] While parameters are gathered, the program does not see the gradients of their shards:
`model.zero_grad()` between forward and backward drops those of the other units only, and backward adds to the last
step's. The optimizer then refuses to step on such a gradient, unless it was zeroed in place, or another unit, whose
shards `zero_grad` sees, has kept its gradient as well: then the program adds up gradients over steps, as it does in one
process.

[Note: what a gradient must be] Backward computes the gradient of a gathered parameter for this rank's samples, and
FSDP2 reduces it to the shard. A hook of the shard never runs, and one of the gathered parameter sees something else
than in one process. A gradient that is sparse or has a graph cannot be reduced. A parameter is inspected when its
gradient is about to be reduced, which is replaced by a dense one without a graph, so that all ranks raise together
before the optimizer steps.

[Note: networks that no optimizer trains] A network beside the trained one, such as that of a perceptual loss, computes
gradients for what comes before it. If all of its parameters are frozen, it is compared like an evaluation (see
`gather_trace`), and once more before the next optimizer step. If not, no optimizer step ends its trace: after some
thousand events, ranks compare only every 256.
"""

# FSDP2's parameter groups have no public API.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from array import array
from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

from hyperpod_plugins.comm import all_max, group_health
from hyperpod_plugins.errors import ConfigError, GatheredParametersWritten, LoopError, UnitsDiffer, format_list
from hyperpod_plugins.parallel.expert_bias import balanced_parts, leave_to_units, move_biases
from hyperpod_plugins.parallel.gather_trace import (
    DIGEST_BYTES,
    GatherTrace,
    both_ways,
    digest_of,
    is_one_digest,
    is_same_on_ranks,
)
from hyperpod_plugins.parallel.gathered_parameters import GatheredParameter, follow_parameters, followed_parameters
from hyperpod_plugins.parallel.gathering_in_place import gather_in_place
from hyperpod_plugins.parallel.module_outputs import follow_outputs
from hyperpod_plugins.parallel.overlapped_reduction import OverlappedReduction, shard_size
from hyperpod_plugins.parallel.replica_buckets import GradientBuckets
from hyperpod_plugins.parallel.unit_messages import (
    OF_REPLACEMENTS,
    SECOND_DERIVATIVES,
    SPARSE_ADVICE,
    SUM_YOURSELF,
    evaluation_message,
    gradient_message,
    old_gradients_message,
    step_message,
    written_message,
)

_UNUSED, _USED, _USED_NOW, _WRITTEN, _HOOKED, _SPARSE, _WITH_GRAPH = range(7)
_STEPPED_ON = "_hyperpod_stepped_on"
"""Attribute of a gradient on which an optimizer has stepped."""
_NUM_CHECKED_STEPS = 3  # in a new process; 1 after a fault. All ranks must have the same number left.
_NUM_CHECKED_EVENTS = 2**12
"""Most events of a step that ranks compare one by one."""
_EVERY, _MOST_EVENTS = 2**8, 2**14
"""How many of those that follow they compare together; and how many are kept one by one where they are not compared."""


def watch_units(model: nn.Module, *, in_buckets: bool = False) -> None:
    """Start watching the units of a sharded model and following their parameters; does nothing if they are watched.

    Args:
        model: a sharded model.
        in_buckets: whether its gradients are averaged in buckets, as `takes_buckets` says.

    Raises:
        ConfigError: an embedding of the model computes sparse gradients.
    """
    _refuse_sparse_gradients(model)
    units = [(name, group) for name, part in model.named_modules() for group in parameter_groups(part)]
    if units and not any("_hyperpod_unit" in vars(group) for _, group in units):
        if not _watches:
            handle = register_optimizer_step_pre_hook(_settle_before_step)
            _global_optimizer_pre_hooks.move_to_end(handle.id, last=False)  # sees the program's closure itself
        follow_parameters(group for _, group in units)
        follow_outputs(model)
        _watches.append(ref(UnitTrace(units, balanced_parts(model), in_buckets=in_buckets)))


def _refuse_sparse_gradients(model: nn.Module) -> None:
    sparse = [
        f"{name} ({type(part).__name__})"
        for name, part in model.named_modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse and part.weight.requires_grad
    ]
    if sparse:
        raise ConfigError(f"{format_list(sparse)} would compute sparse gradients. {SPARSE_ADVICE}")


def reconcile_gradients(
    model: nn.Module,
    flag: torch.Tensor | None = None,
    *,
    ends_step: bool = True,
    optimizers: Sequence[Optimizer] | None = None,
) -> int:
    """Compare the units that ranks ran since the last call, and keep only the gradients that one process would have.

    All ranks call this together, after the last backward of a step and before the optimizer steps. If it was not
    called, a pre-hook of the optimizer's step calls it. It communicates only if `model` was run since the last call
    or `flag` is given: one message, with a byte for each parameter and one for the flag.

    Args:
        model: model whose units are compared.
        flag: flag of this rank, a uint8 `()`, sent in the same message.
        ends_step: whether no backward of the same step follows, so that the biases of routers move.
        optimizers: those that are about to step, so that only biases of language models move whose parameters they
            hold; None for all of `model`.

    Returns:
        The largest flag of all ranks; 0 if the groups are broken.

    Raises:
        UnitsDiffer: ranks gathered or reduced different units, so that the computed gradients are invalid.
        GatheredParametersWritten: on some rank the program wrote to parameters while they were gathered.
        ConfigError: on some rank a parameter has a gradient hook, or its gradient is sparse or has a graph; or a
            backward has gone past a unit, so that its gradients were not reduced.
    """
    watches = _watches_of(model)
    for watch in watches:
        watch.refuse_lost_gradients()
    largest = _reconcile([watch for watch in watches if watch.trace], flag)
    if ends_step:
        _end_step(watches, optimizers)
    return largest


def reconcile_gradients_of(optimizer: Optimizer, flag: torch.Tensor | None = None) -> int:
    """Like `reconcile_gradients`, for the models whose parameters an optimizer holds, right before it steps."""
    largest = _reconcile(_watches_of_optimizer(optimizer), flag)
    _end_step(_present_watches(), [optimizer])
    return largest


def _end_step(watches: Sequence["UnitTrace"], optimizers: Sequence[Optimizer] | None) -> None:
    """Move the biases that are due, of all language models or of those whose parameters these optimizers hold."""
    moving = [watch for watch in watches if watch.has_due_biases]
    if not moving:
        return
    shards = (
        None if optimizers is None else {id(each) for optimizer in optimizers for each in _parameters_of(optimizer)}
    )
    for watch in moving:
        watch.end_step(shards)


def _parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _reconcile(watches: Sequence["UnitTrace"], flag: torch.Tensor | None) -> int:
    told = [watch.reconcile(flag) for watch in watches]
    if told or flag is None:
        return max(told, default=0)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return int(flag)
    (largest,) = all_max(flag.reshape(1).clone())
    return largest if group_health.cause is None else 0


def _settle_before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Step pre-hook for loops that step their optimizers themselves; has nothing to do in a `StepTransaction`."""
    reconcile_gradients_of(optimizer)
    stepped = {id(parameter) for parameter in _parameters_of(optimizer)}
    present = _present_watches()
    for watch in present:
        watch.begin_update(stepped)
        watch.reshard(stepped)
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None or not any(watch.moves_biases_for(stepped) for watch in present):
        return None
    checked = _without_moves(closure, stepped)
    return ((args[0], checked, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": checked})


def _present_watches() -> list["UnitTrace"]:
    return [watch for watch in (each() for each in _watches) if watch is not None]


def _without_moves(closure: Callable[[], Any], shards: Container[int]) -> Callable[[], Any]:
    """Return a closure that raises after a backward through a balanced model that was not compared afterwards.

    Biases have moved before the closure, or, in those of adapters, within it.
    """

    def checked() -> Any:
        result = closure()
        if any(watch.has_reduced and watch.moves_biases_for(shards) for watch in _present_watches()):
            raise ConfigError(
                "optimizer.step was given a closure that computes gradients of a model which "
                "balance_experts(method='bias') has changed, so its biases would move one step late. Compute the "
                "gradients before the step, and call optimizer.step() without a closure. Nothing has been updated."
            )
        return result

    return checked


def _watches_of_optimizer(optimizer: Optimizer) -> list["UnitTrace"]:
    """Return the watches of models that ran since they were settled and hold a parameter of `optimizer`."""
    present = [watch for watch in _present_watches() if watch.has_run]
    parameters = _parameters_of(optimizer) if present else []
    found = [watch for watch in present if watch.holds_any(parameters)]
    for watch in found:
        watch.refuse_lost_gradients()
    return [watch for watch in found if watch.trace]


def clear_trace(model: nn.Module) -> None:
    """Forget what the units of a model have gathered and reduced since the last `reconcile_gradients`."""
    for watch in _watches_of(model):
        watch.forget()


def check_next_step(model: nn.Module) -> None:
    """Compare the next step and the next evaluation while they run: after a reconfiguration, some ranks may be new.

    What ranks have gathered of other models, such as a teacher beside `model`, is forgotten, too: a new rank has not.
    """
    own = _watches_of(model)
    for watch in own:
        watch.num_checked_steps = 1
    for watch in _present_watches():
        watch.without_gradients.clear()
        if not any(each is watch for each in own):
            watch.num_checked_steps = 1
            watch.forget()


def refuse_kept_gradients(model: nn.Module) -> None:
    """Refuse steps on gradients that are added up over optimizer steps: no replacement would have them."""
    for watch in _watches_of(model):
        watch.keeps_no_gradients = True


def reshard_gathered(model: nn.Module) -> None:
    """Reshard the units of a model that a forward without a backward has left gathered; cheap if there are none."""
    for watch in _watches_of(model):
        watch.reshard()


class UnitTrace:
    """Records the collectives of a sharded model's units on one rank, and compares them between ranks."""

    def __init__(
        self,
        units: Sequence[tuple[str, Any]],
        balanced: Sequence[tuple[nn.Module, Sequence[nn.Module]]],
        *,
        in_buckets: bool = False,
    ) -> None:
        """Start watching units.

        Args:
            units: module name and FSDP2 parameter group of each, in the same order on all ranks.
            balanced: each language model with its routers whose biases move, likewise.
            in_buckets: see `watch_units`.
        """
        self.trace = array("I")
        """Events of the step in order: 2 * index of the unit for a gather, 2 * index + 1 for a reduce."""
        self.num_checked_steps = _NUM_CHECKED_STEPS
        """Number of upcoming steps that are compared while they run."""
        self.without_gradients: dict[dist.ProcessGroup, GatherTrace] = {}
        """What each group has gathered outside of `trace`."""
        self.keeps_no_gradients = False
        """Whether gradients that are added up over optimizer steps are refused."""
        self._shortened = b""
        """Digest of the events before `trace`, which were too many."""
        self._names = [name or "the root" for name, _ in units]
        self._units = [_Unit(self, index, group, in_buckets=in_buckets) for index, (_, group) in enumerate(units)]
        self._parameters = [parameter for unit in self._units for parameter in unit.parameters]
        self._trained = self._parameters[0]
        """A parameter that was not frozen when this was last looked at."""
        self._device: torch.device = units[0][1].device
        self._balanced = [_Balanced(*each, self._parameters) for each in balanced]

    @property
    def is_trained(self) -> bool:
        """Whether any parameter of the model is not frozen."""
        if not self._trained.shard.requires_grad:
            self._trained = next((each for each in self._parameters if each.shard.requires_grad), self._trained)
        return self._trained.shard.requires_grad

    @property
    def has_run(self) -> bool:
        """Whether any unit has communicated, or run in a forward with gradients, since the trace was last settled."""
        return bool(self.trace) or any(unit.is_active for unit in self._units)

    def refuse_lost_gradients(self) -> None:
        """Refuse gradients that a backward has left in gathered parameters, as it did not find the unit's outputs.

        An optimizer that steps within backward finds gradients that are yet to be reduced.

        Raises:
            ConfigError: there are some.
        """
        if torch._C._current_graph_task_id() != -1:
            return
        lost = [name for name, unit in zip(self._names, self._units, strict=True) if unit.has_lost_gradients]
        if lost:
            self.forget()
            raise ConfigError(
                f"backward has computed gradients for parameters of {format_list(lost)} that FSDP2 has not reduced: no "
                "tensor that the module's forward returned leads to the loss. Return such tensors from forward, alone "
                "or in a list, a dictionary or an object, instead of keeping them elsewhere. Nothing has been updated."
            )

    def reconcile(self, flag: torch.Tensor | None = None) -> int:
        """See `reconcile_gradients`."""
        if not self.trace:
            return 0
        for unit in self._units:  # an optimizer may step within backward
            unit.wait()
        if self.num_checked_steps:
            self.note(2 * len(self._units))
            self.num_checked_steps -= 1
        for unit in self._units:
            unit.note_writes()
        used = bytes([parameter.use for parameter in self._parameters])
        if dist.is_initialized() and dist.get_world_size() > 1:
            earlier = self._differing_evaluation()
            digest = (
                both_ways(self.trace, self._shortened) if not earlier else b"\xff" * 2 * DIGEST_BYTES
            )  # equal to none
            all_of_them = torch.frombuffer(bytearray(digest + used + b"\0"), dtype=torch.uint8).to(self._device)
            if flag is not None:
                all_of_them[-1:].copy_(flag.reshape(1))  # on the device, without waiting on the host
            agreed = all_max(all_of_them)
            if group_health.cause is not None:
                return 0  # the values are garbage; the commit vote will fail
            if not is_one_digest(agreed):
                self._refuse(earlier)
            used, largest = agreed[2 * DIGEST_BYTES : -1], agreed[-1]
        else:
            largest = 0 if flag is None else int(flag)
        self._keep_agreed(used)
        self._settle()
        for each in self._balanced:
            each.is_due |= any(used[number] == _USED_NOW for number in each.numbers)
        return largest

    @property
    def has_reduced(self) -> bool:
        """Whether any unit has reduced gradients since ranks were compared last."""
        return bool(self._shortened) or any(event % 2 for event in self.trace)

    def moves_biases_for(self, shards: Container[int]) -> bool:
        """Whether a language model whose biases move has a shard among `shards`, by `id`."""
        return any(each.holds_any(shards) for each in self._balanced)

    @property
    def has_due_biases(self) -> bool:
        """Whether the biases of any language model are to move at the next step on its parameters."""
        return any(each.is_due for each in self._balanced)

    def end_step(self, shards: Container[int] | None = None) -> None:
        """Move the biases of the language models that backward has gone through since; a collective of all ranks.

        Args:
            shards: those on which an optimizer is about to step, by `id`: only language models with any of them.
        """
        moving = [each for each in self._balanced if each.is_due and (shards is None or each.holds_any(shards))]
        for each in moving:
            each.is_due = False
        move_biases([router for each in moving for router in each.routers])

    def _keep_agreed(self, uses: Sequence[int]) -> None:
        """Keep the gradients of the parameters that some rank used, given the largest `use` of each."""
        worst = max(uses, default=_UNUSED)
        if worst > _USED_NOW:
            names = [parameter.name for parameter, use in zip(self._parameters, uses, strict=True) if use == worst]
            self.forget()
            if worst == _WRITTEN:
                raise GatheredParametersWritten(written_message(names))
            raise ConfigError(gradient_message(names, is_hooked=worst == _HOOKED, is_sparse=worst == _SPARSE))
        if _UNUSED in uses:
            for parameter, use in zip(self._parameters, uses, strict=True):
                if use == _UNUSED:
                    parameter.remove_filled_zeros()

    def note(self, event: int) -> None:
        """Record that a unit is about to be gathered or reduced; `event` is an element of `trace`.

        Raises:
            UnitsDiffer: this step is compared while it runs, and another rank is about to do something else.
        """
        self.trace.append(event)
        if not self.num_checked_steps or not dist.is_initialized() or dist.get_world_size() == 1:
            if len(self.trace) > _MOST_EVENTS:
                self._shorten(1)
        elif len(self.trace) <= _NUM_CHECKED_EVENTS:
            if not is_same_on_ranks(event, self._device):
                self._refuse()
        elif len(self.trace) == _NUM_CHECKED_EVENTS + _EVERY:
            limits = torch.frombuffer(both_ways(self.trace), dtype=torch.uint8).to(self._device)
            dist.all_reduce(limits, op=dist.ReduceOp.MAX)
            if group_health.cause is None and not is_one_digest(bytes(limits.tolist())):
                self._refuse()
            self._shorten(_NUM_CHECKED_EVENTS)

    def _shorten(self, num_left: int) -> None:
        """Replace events by a digest of all, but for the first ones: a step without events is not settled."""
        self._shortened = digest_of(self.trace, self._shortened)
        del self.trace[num_left:]

    def note_gather(self, index: int, group: dist.ProcessGroup) -> None:
        """Record that a unit is about to be gathered by `group`, and that gradients flow through it.

        Raises:
            UnitsDiffer: as in `note` and `note_without_gradients`.
        """
        if self.is_trained or self.trace:
            self.note(2 * index)
        else:  # see [Note: networks that no optimizer trains]
            self.note_without_gradients(index, group, is_of_step=True)

    def note_without_gradients(self, index: int, group: dist.ProcessGroup, *, is_of_step: bool = False) -> None:
        """Record that a unit is about to be gathered by `group`, where no gradients are computed for its parameters.

        Raises:
            UnitsDiffer: another rank of the group gathers, or has gathered, another unit.
        """
        if group_health.is_unavailable:
            return  # nothing is gathered, or this raises
        trace = self.without_gradients.get(group)
        if trace is None:
            trace = self.without_gradients[group] = GatherTrace(group, self._device)
        trace.is_of_step |= is_of_step
        if not trace.note(2 * index):
            raise UnitsDiffer(self._evaluation_message(trace))

    def _differing_evaluation(self) -> str:
        """Tell how this rank's groups have differed without gradients, or return nothing if they have not.

        Also looks at networks beside this one that the step's gradients have flowed through.
        """
        told: list[str] = []
        for watch in _present_watches():
            compared = [each for each in watch.without_gradients.values() if watch is self or each.is_of_step]
            told += [watch._evaluation_message(each) for each in compared if not each.agrees()]
        return " ".join(told)

    def _evaluation_message(self, trace: GatherTrace) -> str:
        ranks, traces = trace.of_all_ranks()
        self.without_gradients.clear()
        return evaluation_message(ranks, traces, self._names)

    def holds_any(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether any of `parameters` is a shard of a watched unit."""
        held = {id(each.shard) for each in self._parameters}
        return any(id(parameter) in held for parameter in parameters)

    def begin_update(self, shards: Container[int]) -> None:
        """Check gradients before an optimizer steps on `shards`, by `id`; see [Note: gradients that are kept]."""
        kept = [each for unit in self._units if unit.stays_gathered for each in unit.parameters]
        of_optimizer = [each for each in kept if id(each.shard) in shards]
        others = (each for unit in self._units if not unit.stays_gathered for each in unit.parameters)
        other = next((each for each in others if id(each.shard) in shards and each.shard.grad is not None), None)
        old_others = [other.name] if other is not None and other.begin_update() else []
        old = [each.name for each in of_optimizer if each.begin_update()]
        if self.keeps_no_gradients and (old or old_others):
            raise LoopError(f"{old_gradients_message(old + old_others)} {OF_REPLACEMENTS}")
        if old and not old_others:
            raise LoopError(f"{old_gradients_message(old)} {SUM_YOURSELF}")

    def reshard(self, shards: Container[int] | None = None) -> None:
        """Reshard the units that are gathered: all, or those whose shards are among `shards`, by `id`."""
        for unit in self._units:
            if unit.is_gathered and (shards is None or any(id(each.shard) in shards for each in unit.parameters)):
                unit.reshard()

    def forget(self) -> None:
        """See `clear_trace`."""
        self._settle()
        for each in self._balanced:
            each.is_due = False

    def _settle(self) -> None:
        del self.trace[:]
        self._shortened = b""
        for unit in self._units:
            unit.forget()
        for parameter in self._parameters:
            parameter.whole.is_written, parameter.problem, parameter.is_used_now = False, _UNUSED, False

    def _refuse(self, earlier: str = "") -> None:
        """Raise what all ranks find: first what was gathered without gradients, if it differed on this rank."""
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, (earlier, self.trace.tolist()))
        self.forget()
        earlier = next((each for each, _ in found if each), "")
        raise UnitsDiffer(earlier or step_message([trace for _, trace in found], self._names))


class _Balanced:
    """A language model with routers whose biases move, which share units with other parts of the program's model."""

    def __init__(self, module: nn.Module, routers: Sequence[nn.Module], parameters: Sequence["_Parameter"]) -> None:
        self.routers, self._parameters = routers, parameters
        parts = {id(part) for part in module.modules()}
        self.numbers = [number for number, each in enumerate(parameters) if each.is_of(parts)]
        """Numbers of its parameters among all that are watched."""
        self.is_due = False
        """Whether backward has computed a gradient of any of them since the biases have moved, on any rank."""
        leave_to_units(routers)

    def holds_any(self, shards: Container[int]) -> bool:
        """Whether the shard of any of its parameters is among `shards`, by `id`."""
        return any(id(self._parameters[number].shard) in shards for number in self.numbers)


class _Parameter:
    """A parameter of a unit, and whether this rank has computed a gradient for it in this step."""

    __slots__ = ("_of_fsdp", "_was_filled", "_was_zero", "is_given", "is_used", "is_used_now", "problem", "whole")

    def __init__(self, of_fsdp: Any, whole: GatheredParameter) -> None:
        self._of_fsdp, self.whole = of_fsdp, whole
        self.is_used = self._was_filled = False
        self.is_used_now = False
        """Whether a backward since ranks were compared last has computed a gradient; `is_used` may be older."""
        self.is_given = False
        """Whether the gradient that backward has computed is in a bucket; see `replica_buckets.py`."""
        self.problem = _UNUSED
        """What is wrong with its gradient in this step, as a value of `use`: see [Note: what a gradient must be]."""
        self._was_zero: torch.Tensor | None = None
        """If the last reduction added to the gradient on which the optimizer had stepped: whether that was zero."""

    @property
    def name(self) -> str:
        """Its qualified name in the model."""
        return self._of_fsdp._param_fqn or self._of_fsdp._module_info.param_name

    @property
    def use(self) -> int:
        """What the program has done with it on this rank; of all ranks, the largest value counts."""
        if self.whole.is_written:
            return max(self.problem, _WRITTEN)
        return self.problem or (_USED_NOW if self.is_used_now else int(self.is_used))

    def is_of(self, parts: Container[int]) -> bool:
        """Whether any of these modules holds it, by `id`."""
        info = self._of_fsdp._module_info
        return any(id(part) in parts for part in (info.module, *info.shared_modules))

    @property
    def shard(self) -> torch.Tensor:
        """The sharded parameter, which the optimizer holds."""
        return self._of_fsdp.sharded_param

    @property
    def is_trained(self) -> bool:
        """Whether it has been gathered and is not frozen."""
        whole = vars(self._of_fsdp).get("_unsharded_param")
        return whole is not None and whole.requires_grad

    @property
    def has_gradient(self) -> bool:
        """Whether backward has computed a gradient that is not reduced yet."""
        of_fsdp = self._of_fsdp
        return of_fsdp.unsharded_accumulated_grad is not None or of_fsdp.unsharded_param.grad is not None

    @property
    def is_accumulated(self) -> bool:
        """Whether micro-steps that were not reduced have left a gradient, in the type in which it is reduced."""
        return self._of_fsdp.unsharded_accumulated_grad is not None

    def accumulate(self) -> None:
        """Add this micro-step's gradient to those of micro-steps that were not reduced."""
        if not self.is_accumulated:
            self._of_fsdp.to_accumulated_grad_if_needed()

    def note(self, *, begins: bool) -> None:
        """Prepare for a reduction; `begins`: nothing of the same step has been partially reduced before."""
        present = self._of_fsdp.sharded_param.grad
        if begins and present is None:
            self.is_used = self.is_used_now = self._was_filled = False
        self._was_zero = None
        if present is not None and _STEPPED_ON in vars(present):
            self._was_zero = _local(present).count_nonzero() == 0
        self._inspect()
        if self.has_gradient:
            self.is_used = self.is_used_now = True
        else:
            self._was_filled = True
            whole = self._of_fsdp.unsharded_param
            whole.grad = _zero_gradient(whole)

    def _inspect(self) -> None:
        """Note what is wrong with the gradient, and make it one that can be reduced."""
        shard, whole = self._of_fsdp.sharded_param, self._of_fsdp.unsharded_param
        gradient = whole.grad
        if shard._backward_hooks or whole._backward_hooks or whole._post_accumulate_grad_hooks:
            self.problem = _HOOKED
        if gradient is not None and (gradient.is_sparse or gradient.requires_grad):
            self.problem = _SPARSE if gradient.is_sparse else _WITH_GRAPH
            gradient = gradient.detach()
            whole.grad = gradient.to_dense() if gradient.is_sparse else gradient

    def begin_update(self) -> bool:
        """Note that the optimizer steps; return whether its gradient includes one on which it has stepped before."""
        gradient = self.shard.grad
        is_old = self._was_zero is not None and gradient is not None and _STEPPED_ON in vars(gradient)
        includes_old = is_old and not self._was_zero
        self._was_zero = None
        if gradient is not None:
            vars(gradient)[_STEPPED_ON] = True  # a weak reference would keep `Module.to` from moving it
        return includes_old

    def remove_filled_zeros(self) -> None:
        """Remove the gradient if it consists only of zeros that were filled in here."""
        if self._was_filled and not self.is_used:
            self._of_fsdp.sharded_param.grad = None
            self._was_filled = False


def _zero_gradient(whole: torch.Tensor) -> torch.Tensor:
    """Return a zero gradient of a gathered parameter, in its type, also where the parameter is gathered in float8."""
    local = _local(whole)
    zeros = torch.zeros(local.shape, dtype=whole.dtype, device=whole.device)
    if not isinstance(whole, DTensor):
        return zeros
    return DTensor.from_local(
        zeros, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class _Unit:
    """Wraps methods of one FSDP2 parameter group."""

    def __init__(self, watch: UnitTrace, index: int, group: Any, *, in_buckets: bool) -> None:
        self.watch, self._index, self._group = watch, index, group
        followed = followed_parameters(group)
        self.parameters = [_Parameter(each, whole) for each, whole in zip(group.fsdp_params, followed, strict=True)]
        self.is_active = False
        """Whether the unit ran in a forward whose backward has not ended."""
        self._overlapped = OverlappedReduction(group)
        self._buckets = GradientBuckets(group, self.parameters) if in_buckets else None
        if shard_size(group) == 1:
            gather_in_place(group)
        self._pre_forward, self._unshard = group.pre_forward, group.unshard
        self._post_backward, self._finalize_backward = group.post_backward, group.finalize_backward
        vars(group).update(
            _hyperpod_unit=self,
            pre_forward=self._run,
            unshard=self._gather,
            post_backward=self._reduce,
            finalize_backward=self._end,
        )
        if self._buckets is not None:
            vars(group).update(
                pre_backward=partial(self._begin_backward, self._buckets, group.pre_backward),
                post_backward=partial(self._reduce_in_buckets, self._buckets),
            )

    @property
    def is_gathered(self) -> bool:
        """Whether its parameters are gathered."""
        return self._group.is_unsharded

    @property
    def has_lost_gradients(self) -> bool:
        """Whether it has run in a forward, and holds gradients of gathered parameters that were to be reduced."""
        group = self._group
        return (
            self.is_active
            and group.reduce_grads
            and group.is_unsharded
            and (self._has_given or any(each.is_trained and each.has_gradient for each in self.parameters))
        )

    @property
    def _has_given(self) -> bool:
        """Whether gradients of gathered parameters have gone into buckets that are yet to arrive."""
        return self._buckets is not None and self._buckets.has_any

    @property
    def stays_gathered(self) -> bool:
        """Whether its parameters stay gathered after a forward, until backward."""
        return not self._group._reshard_after_forward

    def reshard(self) -> None:
        """Free its gathered parameters; the next forward or backward gathers them again."""
        self._group.reshard()

    def note_writes(self) -> None:
        """Detect what the program has written to its parameters if they are still gathered."""
        if self._group.is_unsharded:
            for parameter in self.parameters:
                parameter.whole.note_writes()

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            self.is_active = True
        result = self._pre_forward(*args, **kwargs)
        if self._buckets is not None and torch.is_grad_enabled():
            self._buckets.follow()
        return result

    def _gather(self, *args: Any, **kwargs: Any) -> Any:
        group = self._group
        is_in_backward = group._training_state.name == "PRE_BACKWARD"
        if is_in_backward and torch.is_grad_enabled():  # as only in a backward with create_graph=True
            raise ConfigError(SECOND_DERIVATIVES)
        is_left_out = is_in_backward and not group.unshard_in_backward
        has_no_shards = group.is_unsharded or group._all_gather_result is not None or shard_size(group) == 1
        if is_left_out or has_no_shards:
            pass
        elif is_in_backward or torch.is_grad_enabled():
            self.watch.note_gather(self._index, group._all_gather_process_group)
        else:  # not in the step's trace: a process that joined after an evaluation has not run it
            self.watch.note_without_gradients(self._index, group._all_gather_process_group)
        return self._unshard(*args, **kwargs)

    def _reduce(self, *args: Any) -> Any:
        self._note_reduction()
        with self._overlapped.reduction():
            return self._post_backward(*args)

    @staticmethod
    def _begin_backward(buckets: GradientBuckets, of_torch: Callable[..., Any], *args: Any) -> Any:
        buckets.begin_backward()
        return of_torch(*args)

    def _reduce_in_buckets(self, buckets: GradientBuckets, *args: Any) -> Any:
        if self._note_reduction() or buckets.has_any:
            buckets.end_backward()
        result = self._post_backward(*args)  # of what is left; see `replica_buckets.py`
        buckets.set_gradients()
        return result

    def _note_reduction(self) -> bool:
        """Prepare for the reduction of the gradients that backward has computed; return whether there is one."""
        group, has_given = self._group, self._has_given
        if not group.reduce_grads:
            return False
        trained = [parameter for parameter in self.parameters if parameter.is_trained]
        is_partial = group._partial_reduce_output is not None
        # A partial result of an earlier micro-step is not yet all-reduced over replicas; this is the last chance.
        is_due = is_partial and group.all_reduce_grads
        is_used = self.is_active or is_due or has_given
        if not trained or not (is_used or any(parameter.has_gradient for parameter in trained)):
            return False
        for parameter in trained:
            if not parameter.is_given:
                parameter.note(begins=not is_partial)
        if any(parameter.is_accumulated for parameter in trained):
            for parameter in trained:
                parameter.accumulate()  # FSDP2 reduces gradients of one type together
        self.watch.note(2 * self._index + 1)
        return True

    def wait(self) -> None:
        """Wait for all-reduces that backward has not waited for."""
        self._overlapped.wait()

    def forget(self) -> None:
        """Forget a forward, or a backward, that has not ended."""
        self.is_active = False
        self._overlapped.forget()
        if self._buckets is not None:
            self._buckets.forget()

    def _end(self) -> Any:
        self.is_active = False
        self._overlapped.wait()
        return self._finalize_backward()


_watches: list[ref[UnitTrace]] = []  # grows with each model: its length shows whether `_found` is up to date
_found: "WeakKeyDictionary[nn.Module, tuple[int, list[ref[UnitTrace]]]]" = WeakKeyDictionary()


def _watches_of(model: nn.Module) -> list["UnitTrace"]:
    known = _found.get(model)
    if known is not None:
        found = [watch() for watch in known[1]]
        if known[0] == len(_watches) and None not in found:
            return [watch for watch in found if watch is not None]
    watches: dict[int, UnitTrace] = {}
    for part in model.modules():
        for group in parameter_groups(part):
            unit: _Unit | None = vars(group).get("_hyperpod_unit")
            if unit is not None:
                watches[id(unit.watch)] = unit.watch
    _found[model] = len(_watches), [ref(watch) for watch in watches.values()]
    return list(watches.values())


def parameter_groups(part: nn.Module) -> list[Any]:
    """Return the FSDP2 parameter groups of a module; before torch 2.12 there is at most one."""
    if not isinstance(part, FSDPModule):
        return []
    state: Any = part._get_fsdp_state()
    several: list[Any] | None = vars(state).get("_fsdp_param_groups")
    if several is not None:
        return several
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def fsdp_parameters(model: nn.Module) -> list[Any]:
    """Return FSDP2's records of the parameters of a sharded model; each has the `sharded_param` of the optimizers."""
    return [each for part in model.modules() for group in parameter_groups(part) for each in group.fsdp_params]


def parameters_by_id(model: nn.Module) -> dict[int, tuple[nn.Parameter, str]]:
    """Each parameter of a model with its name, by `id`; of a sharded one, the shard and the gathered parameter."""
    found = {id(each): (each, name) for name, each in model.named_parameters()}
    for record in fsdp_parameters(model):
        both = [each for key in ("_unsharded_param", "sharded_param") if (each := vars(record).get(key)) is not None]
        name = next((found[id(each)][1] for each in both if id(each) in found), None)
        if name is not None:
            found |= {id(each): (each, name) for each in both}
    return found
