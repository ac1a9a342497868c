"""What the sharded units of a model gather and reduce in a step, compared between ranks before the optimizer writes.

FSDP2 pairs the collectives of a group by their order alone. Ranks that run different units at the same moment, as
experts, task heads or an early exit make them, glue together shards of different modules: messages of equal size give
garbage without an error. And it reduces the gradients of those parameters of a unit that have one on this rank: with
other ones on another rank, it adds up gradients of different parameters.

A watch sees to both. A unit that took part in a backward reduces a gradient of each of its trainable parameters, zero
for those that this rank did not use; `settle_gradients` then takes the gradients away again that no rank computed, as
in one process, and raises where the sequences of units differ. Within a unit ranks may thus use what they like.
"""

# The parameter groups of FSDP2 have no public spelling.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import zip_longest
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hyperpod_plugins.comm import group_health
from hyperpod_plugins.errors import UnitsDiffer

_DIGEST_BYTES = 8
_NUM_CHECKED_STEPS = 3  # of a new process, and 1 after a fault; all ranks must have the same number left


def watch_units(model: nn.Module) -> None:
    """Watch the units of a sharded model from now on; units that are watched already stay as they are."""
    units = [(name, group) for name, part in model.named_modules() for group in _groups_of(part)]
    if units and not any("_hyperpod_unit" in vars(group) for _, group in units):
        if not _watches:
            register_optimizer_step_pre_hook(_settle_before_step)
        _watches.append(ref(UnitWatch(units)))


def settle_gradients(model: nn.Module, flag: torch.Tensor | None = None) -> bool:
    """Compare what ranks ran since the last call, and leave the gradients that one process would have.

    All ranks call this together, after the last backward of a step and before the optimizer writes; an optimizer that
    steps without it calls it by a hook. It communicates once if `model` was run since, with a byte for each parameter
    and one for the flag.

    Args:
        model: whose units.
        flag: of this rank, a bool `()` on the device, which travels with the same message.

    Returns:
        Whether the flag of any rank is set; False where the groups are broken.

    Raises:
        UnitsDiffer: ranks gathered or reduced different units, so that what they computed is worthless.
    """
    return _settle([watch for watch in _watches_of(model) if watch.trace], flag)


def settle_gradients_of(optimizer: Optimizer, flag: torch.Tensor | None = None) -> bool:
    """`settle_gradients` for the models whose parameters an optimizer has, right before it steps."""
    return _settle(_watches_of_optimizer(optimizer), flag)


def _settle(watches: Sequence["UnitWatch"], flag: torch.Tensor | None) -> bool:
    told = [watch.settle(flag) for watch in watches]
    if told or flag is None:
        return any(told)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return bool(flag)
    alone = flag.to(torch.uint8).reshape(1)
    dist.all_reduce(alone, op=dist.ReduceOp.MAX)
    return bool(alone) and group_health.cause is None


def _settle_before_step(optimizer: Optimizer, *_: Any) -> None:
    """For loops that step their optimizers themselves; a transaction's commit finds nothing left to settle."""
    settle_gradients_of(optimizer)


def _watches_of_optimizer(optimizer: Optimizer) -> list["UnitWatch"]:
    """Those that were run since they were settled, and hold a parameter of an optimizer."""
    present = [watch for watch in (each() for each in _watches) if watch is not None and watch.trace]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]] if present else []
    return [watch for watch in present if watch.holds_any(parameters)]


def forget_step(model: nn.Module) -> None:
    """Forget what the units have gathered and reduced so far."""
    for watch in _watches_of(model):
        watch.forget()


def check_next_step(model: nn.Module) -> None:
    """Compare the next step as it runs: all ranks have come together anew, some of them for the first time."""
    for watch in _watches_of(model):
        watch.num_checked_steps = 1


class UnitWatch:
    """Of one sharded model, on one rank."""

    def __init__(self, units: Sequence[tuple[str, Any]]) -> None:
        """Watch units.

        Args:
            units: name of the module and parameter group of FSDP2, in the same order on all ranks.
        """
        self.trace = array("I")
        """Twice the index of each unit that was gathered; that and one where it was reduced."""
        self.num_checked_steps = _NUM_CHECKED_STEPS
        """How many of the next steps are compared as they run."""
        self._names = [name or "the root" for name, _ in units]
        self._units = [_Unit(self, index, group) for index, (_, group) in enumerate(units)]
        self._parameters = [parameter for unit in self._units for parameter in unit.parameters]
        self._device: torch.device = units[0][1].device

    def settle(self, flag: torch.Tensor | None = None) -> bool:
        """See `settle_gradients`."""
        if not self.trace:
            return False
        if self.num_checked_steps:
            self.note(2 * len(self._units))
            self.num_checked_steps -= 1
        used = bytes([parameter.is_used for parameter in self._parameters])
        if dist.is_initialized() and dist.get_world_size() > 1:
            digest = blake2b(self.trace.tobytes(), digest_size=_DIGEST_BYTES).digest()
            mine = bytearray(digest + bytes(255 - byte for byte in digest) + used + b"\0")
            # uint8 and MAX are served by gloo and by nccl; the largest complement is that of the smallest byte
            all_of_them = torch.frombuffer(mine, dtype=torch.uint8).to(self._device)
            if flag is not None:
                all_of_them[-1:].copy_(flag.reshape(1))  # on the device: the host does not wait for it
            dist.all_reduce(all_of_them, op=dist.ReduceOp.MAX)
            agreed = bytes(all_of_them.tolist())
            if group_health.cause is not None:
                return False  # garbage, and the vote will say so
            if not _are_equal(agreed):
                self._refuse()
            used, is_set = agreed[2 * _DIGEST_BYTES : -1], bool(agreed[-1])
        else:
            is_set = flag is not None and bool(flag)
        if 0 in used:
            for parameter, is_used in zip(self._parameters, used, strict=True):
                if not is_used:
                    parameter.take_away_zeros()
        self.forget()
        return is_set

    def note(self, event: int) -> None:
        """The unit of this number is about to be gathered or reduced; see `trace`.

        Raises:
            UnitsDiffer: this step is compared as it runs, and another rank is about to do something else.
        """
        self.trace.append(event)
        if not self.num_checked_steps or not dist.is_initialized() or dist.get_world_size() == 1:
            return
        limits = torch.tensor([event, -event], device=self._device)
        dist.all_reduce(limits, op=dist.ReduceOp.MAX)
        largest, smallest = limits.tolist()
        if group_health.cause is None and largest != -smallest:
            self._refuse()

    def holds_any(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether any of these is a shard that the units hold."""
        held = {id(each.shard) for each in self._parameters}
        return any(id(parameter) in held for parameter in parameters)

    def forget(self) -> None:
        """See `forget_step`."""
        del self.trace[:]
        for unit in self._units:
            unit.is_active = False

    def _refuse(self) -> None:
        traces: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(traces, self.trace.tolist())
        self.forget()
        raise UnitsDiffer(_difference(traces, self._names))


class _Parameter:
    """A trainable parameter, and whether this rank has computed a gradient of it since it last had none."""

    __slots__ = ("_of_fsdp", "_was_filled", "is_used")

    def __init__(self, of_fsdp: Any) -> None:
        self._of_fsdp = of_fsdp
        self.is_used = self._was_filled = False

    @property
    def shard(self) -> torch.Tensor:
        """What the optimizer holds."""
        return self._of_fsdp.sharded_param

    @property
    def is_trained(self) -> bool:
        """Whether it has been gathered, and is not frozen."""
        whole = vars(self._of_fsdp).get("_unsharded_param")
        return whole is not None and whole.requires_grad

    @property
    def has_gradient(self) -> bool:
        """Whether backward has computed one that is not reduced yet."""
        of_fsdp = self._of_fsdp
        return of_fsdp.unsharded_accumulated_grad is not None or of_fsdp.unsharded_param.grad is not None

    def note(self, *, begins: bool) -> None:
        """A reduction comes; `begins`: no partial result of the same step has been reduced before it."""
        if begins and self._of_fsdp.sharded_param.grad is None:
            self.is_used = self._was_filled = False
        if self.has_gradient:
            self.is_used = True
        else:
            self._was_filled = True
            whole = self._of_fsdp.unsharded_param
            whole.grad = torch.zeros_like(whole, requires_grad=False)

    def take_away_zeros(self) -> None:
        """Have no gradient where there is nothing but zeros that were put there."""
        if self._was_filled and not self.is_used:
            self._of_fsdp.sharded_param.grad = None
            self._was_filled = False


class _Unit:
    """One parameter group, four of whose methods go through here."""

    def __init__(self, watch: UnitWatch, index: int, group: Any) -> None:
        self.watch, self._index, self._group = watch, index, group
        self.parameters = [_Parameter(each) for each in group.fsdp_params]
        self.is_active = False
        """Whether it ran in a forward whose backward has not ended."""
        self._pre_forward, self._unshard = group.pre_forward, group.unshard
        self._post_backward, self._finalize_backward = group.post_backward, group.finalize_backward
        vars(group).update(
            _hyperpod_unit=self,
            pre_forward=self._run,
            unshard=self._gather,
            post_backward=self._reduce,
            finalize_backward=self._end,
        )

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            self.is_active = True
        return self._pre_forward(*args, **kwargs)

    def _gather(self, *args: Any, **kwargs: Any) -> Any:
        group = self._group
        is_in_backward = group._training_state.name == "PRE_BACKWARD"
        is_left_out = is_in_backward and not group.unshard_in_backward
        has_no_shards = group.is_unsharded or group._all_gather_result is not None or _shard_size(group) == 1
        # An evaluation between two steps counts for nothing: a process that has come since has not seen it.
        is_in_step = is_in_backward or torch.is_grad_enabled()
        if is_in_step and not (is_left_out or has_no_shards):
            self.watch.note(2 * self._index)
        return self._unshard(*args, **kwargs)

    def _reduce(self, *args: Any) -> Any:
        group = self._group
        if group.reduce_grads:
            trained = [parameter for parameter in self.parameters if parameter.is_trained]
            is_partial = group._partial_reduce_output is not None
            # Replicas have not added up what an earlier micro-step left, and this is the last one that can tell them.
            is_due = is_partial and group.all_reduce_grads
            if trained and (self.is_active or is_due or any(parameter.has_gradient for parameter in trained)):
                for parameter in trained:
                    parameter.note(begins=not is_partial)
                self.watch.note(2 * self._index + 1)
        return self._post_backward(*args)

    def _end(self) -> Any:
        self.is_active = False
        return self._finalize_backward()


_watches: list[ref[UnitWatch]] = []  # grows with each model, so that its length tells whether there are new ones
_found: "WeakKeyDictionary[nn.Module, tuple[int, list[ref[UnitWatch]]]]" = WeakKeyDictionary()


def _watches_of(model: nn.Module) -> list["UnitWatch"]:
    known = _found.get(model)
    if known is not None:
        found = [watch() for watch in known[1]]
        if known[0] == len(_watches) and None not in found:
            return [watch for watch in found if watch is not None]
    watches: dict[int, UnitWatch] = {}
    for part in model.modules():
        for group in _groups_of(part):
            unit: _Unit | None = vars(group).get("_hyperpod_unit")
            if unit is not None:
                watches[id(unit.watch)] = unit.watch
    _found[model] = len(_watches), [ref(watch) for watch in watches.values()]
    return list(watches.values())


def _groups_of(part: nn.Module) -> list[Any]:
    """Parameter groups of FSDP2 that a module has; before torch 2.12 it has one at most."""
    if not isinstance(part, FSDPModule):
        return []
    state: Any = part._get_fsdp_state()
    several: list[Any] | None = vars(state).get("_fsdp_param_groups")
    if several is not None:
        return several
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _shard_size(group: Any) -> int:
    return group._all_gather_process_group.size()


def _are_equal(agreed: bytes) -> bool:
    """Whether the largest byte of all ranks' digests is the smallest, at each place."""
    largest, complements = agreed[:_DIGEST_BYTES], agreed[_DIGEST_BYTES : 2 * _DIGEST_BYTES]
    return all(high == 255 - low for high, low in zip(largest, complements, strict=True))


def _difference(traces: Sequence[Sequence[int]], names: Sequence[str]) -> str:
    """Where the sequences of two ranks part, and what to do about it."""

    def told(event: int | None) -> str:
        if event is None:
            return "does nothing more"
        if event // 2 == len(names):
            return "ends its step"
        return f"{'reduces' if event % 2 else 'gathers'} {names[event // 2]}"

    other = next(rank for rank, trace in enumerate(traces) if list(trace) != list(traces[0]))
    pairs = list(zip_longest(traces[0], traces[other]))
    at = next(index for index, (here, there) in enumerate(pairs) if here != there)
    here, there = pairs[at]
    return (
        f"ranks ran different modules in this step: as its collective number {at + 1} rank 0 {told(here)}, where rank "
        f"{other} {told(there)}. Each of them is a unit that all ranks must run together, in the same order, so this "
        "step's gradients are worthless; nothing has been written. Name in block_classes only classes whose modules "
        "every rank runs in every step, such as the layer around a set of experts: what is in no such module is "
        "gathered with the model as a whole, and ranks may then run what they like of it."
    )
