"""Undo a step: restore buffers, metrics, batches, parameters that the program writes, and FSDP2's iteration state."""

# Walking the child and buffer tables takes a tenth of the time of `modules()`; FSDP2 has no public API for its state.
# pyright: reportPrivateUsage=false

import copy
import logging
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import fields, is_dataclass
from operator import attrgetter, is_
from typing import Any, Self, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hyperpod_plugins.parallel.gathered_parameters import NUM_COMPARED, GatheredParameter, followed_parameters
from hyperpod_plugins.parallel.hsdp import reshard
from hyperpod_plugins.parallel.unit_watch import check_next_step, clear_trace, parameter_groups, refuse_kept_gradients
from hyperpod_plugins.recovery.attributes import PlainAttributes
from hyperpod_plugins.recovery.buffer_layout import ModuleTables, set_table
from hyperpod_plugins.recovery.optimizer_copy import OptimizerCopy, local_tensor, parameters_of
from hyperpod_plugins.recovery.packing import as_integers

log = logging.getLogger(__name__)

CAN_RESET = "reset_iter_state" in vars(FSDPModule)
"""Whether this torch (2.13 and later) can reset FSDP2's modules after an exception."""


_FIRST_PARTS = 4
"""Parts of a program outside of steps, as many as an epoch with an evaluation and the next one have."""
_FIRST_STEPS = 8
"""First steps in which batches are copied and bit sums compared; the latter also in step 16, 32, 64, and so on. In a
replacement, the steps of its replica count for the bit sums."""
_PIECE_SIZE = 2**13
"""Elements of the piece that each step copies and compares at its end."""
_TURNS = 8
"""After the first steps, each step reads only one in this many of the version counters."""
_GOLDEN = 0x9E3779B1
"""2**32 over the golden ratio: choosing the counters by its multiples has no period that a program may share."""
_version_of = attrgetter("_version")
_local_of = attrgetter("_local_tensor")
_LEAVES = bool, int, float, str, bytes, type(None)
_MAPPINGS = dict, Mapping
"""In this order: `isinstance` with `Mapping` is slow."""


class Buffers:
    """The buffers of some modules as they were when a step began, which may write, assign or delete them.

    Args:
        parts: the modules.
        above_bytes: copy only the values of larger buffers.
    """

    def __init__(self, parts: Iterable[nn.Module] = (), *, above_bytes: int = 0) -> None:
        self._parts = [(part, part._buffers) for part in parts]
        self._above_bytes = above_bytes
        self.keep()

    def keep(self) -> None:
        """Copy the present buffers."""
        self._tables = {id(part): dict(table) for part, table in self._parts if table}
        self._non_persistent = {id(part): {*part._non_persistent_buffers_set} for part, table in self._parts if table}
        present = {id(each): each for table in self._tables.values() for each in table.values() if each is not None}
        copied = [each for each in present.values() if each.nbytes > self._above_bytes or not self._above_bytes]
        self._saved = [(buffer, buffer.detach().clone()) for buffer in copied]

    def kept_now(self) -> Self:
        """Another copy, of the present buffers of the same modules."""
        now = object.__new__(type(self))
        vars(now).update(vars(self))
        now.keep()
        return now

    @property
    def copies(self) -> dict[int, torch.Tensor]:
        """The copies, by `id` of the buffer."""
        return {id(buffer): saved for buffer, saved in self._saved}

    def put_back(self) -> None:
        """Restore the buffers: the same tensor objects with the same values, also if they were resized since."""
        with torch.no_grad():
            for buffer, saved in self._saved:
                if (buffer.shape, buffer.dtype) == (saved.shape, saved.dtype):
                    buffer.copy_(saved)
                else:
                    buffer.data = saved.clone()
        for part, _ in self._parts:
            set_table(part, self._tables.get(id(part), {}), self._non_persistent.get(id(part), ()))


class BatchTensors:
    """The tensors of the batches of a step, restored if the program writes to them.

    Writes are detected by version counters. Batches are copied before use in the first steps of a process, and from
    the first write on. If the first write happens later, a fault in that same step cannot be undone.
    """

    def __init__(self) -> None:
        self._are_written = False
        self._num_ended = 0
        self._tensors: list[tuple[torch.Tensor, int, torch.Tensor | None]] = []
        self._known: set[int] = set()

    def begin(self) -> None:
        """Forget the previous step, when a step begins or is committed."""
        self._tensors, self._known = [], set()

    def remember(self, batch: Any) -> None:
        """Remember a batch before it is computed on, for the first time or again."""
        is_copied = self._are_written or self._num_ended < _FIRST_STEPS
        for each in _tensors_in(batch):
            if id(each) not in self._known and not each.is_inference():
                self._known.add(id(each))
                self._tensors.append((each, each._version, each.detach().clone() if is_copied else None))

    def end(self) -> None:
        """Detect writes, when the step has been computed."""
        self._num_ended += 1
        self._are_written |= any(each._version != version for each, version, _ in self._tensors)

    @property
    def is_within_reach(self) -> bool:
        """Whether `put_back` can restore everything."""
        return all(saved is not None or each._version == version for each, version, saved in self._tensors)

    def put_back(self) -> None:
        """Restore the values and shapes of the tensors."""
        with torch.no_grad():
            for each, _, saved in self._tensors:
                if saved is not None and saved.shape == each.shape:
                    each.copy_(saved)
                elif saved is not None:
                    each.data = saved.clone()


class StepStart:
    """What the computation of a step may change beside gradients, as it was when the step began.

    This covers buffers, Python attributes of the program's own modules, metrics that are modules, tensors of batches,
    and parameters that the program itself writes (clipped weights, a teacher's average). Such parameters are detected
    while steps succeed, and copied from then on when a step begins. A fault in the very step that writes one for the
    first time cannot be undone.

    [Note: how writes are found] A write to a parameter advances its version counter, or that of a DTensor's local
    part. A write through `.data`, or to a DTensor by a `torch._foreach` function, advances neither, so bits are
    compared too. The bit sums of all parameters are compared in the first steps of a process and then ever more
    rarely, as that reads all parameters; a replacement goes on with what a replica of its shard has found out. In all
    other steps a copy of one small piece is compared, a different piece each time; if it has changed, the next steps
    compare bit sums again like the first ones.

    Args:
        model: a sharded or plain model.
        optimizers: optimizers of its parameters.
        kept: if the optimizers step before the vote, the copy of what they write.
        attributes: Python attributes that the program may change.
        above_bytes: see `Buffers`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        kept: OptimizerCopy | None = None,
        *,
        attributes: Sequence[PlainAttributes] = (),
        above_bytes: int = 0,
    ) -> None:
        self._model = model
        refuse_kept_gradients(model)
        self._optimizers = optimizers
        self._attributes = [(each, each.keep()) for each in attributes]
        self.kept = kept
        self.parts: list[nn.Module] = []
        """All modules of the model."""
        self.batches = BatchTensors()
        self.outside = OutsideWrites(model)
        self.written: dict[int, torch.Tensor] = {}
        """Parameters that the program itself was found to write, by `id`."""
        self._above_bytes = above_bytes
        self._buffers = Buffers()
        self._children = self._held = ModuleTables(())
        """The child tables of all modules, and their child and parameter tables, when they were last collected."""
        self._num_owned = -1
        self._unowned: list[torch.Tensor] = []
        self._watched: list[torch.Tensor] = []
        self._split: list[DTensor] = []
        """Those of them that are DTensors."""
        self._counters: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._sums: list[int] = []
        self._piece: SampledPiece | None = None
        self._num_begun = 0
        self._sums_until = _FIRST_STEPS
        """Step, counted as `_num_begun`, up to which bit sums of all parameters are compared."""
        self._counting: list[nn.Module] = []
        self._counts: list[dict[str, Any]] = []
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._comparing: list[GatheredParameter] = []
        """Those whose bits are still compared while they are gathered."""
        self._compared: list[tuple[GatheredParameter, int]] = []
        """Each with its count of comparisons when the step began."""
        self.is_open = False
        """Whether a step has begun and is not committed yet."""

    def adopt(self, former: "StepStart") -> None:
        """Know what another object for the same model has found, whose place this one takes."""
        self.written, self.batches, self.outside = former.written, former.batches, former.outside

    def known_writes(self) -> dict[str, Any] | None:
        """What has been found out about the program's writes, for `load_known_writes`.

        None if a parameter that was found to be written is no longer in the model.
        """
        names = {id(each): name for name, each in self._model.named_parameters()}
        if not names.keys() >= self.written.keys():
            return None
        compared = [(each, begun if self.is_open else each.num_compared) for each, begun in self._compared]
        steps = self._num_begun - self.is_open
        return {
            "written": [names[key] for key in self.written],
            "steps": steps,
            "more_sums": max(0, self._sums_until - steps),
            "compared": {names.get(id(each.shard), ""): count for each, count in compared if count < NUM_COMPARED},
        }

    def load_known_writes(self, known: object) -> None:
        """In a replacement, continue with what a replica of its shard knows of the program, which runs here too.

        Otherwise its first steps would compare the bits of all parameters again, while the others wait for it. It is
        not used if it is not what `known_writes` returns for this model.
        """
        parameters = dict(self._model.named_parameters())
        match known:
            case {
                "written": [*written],
                "steps": int(steps),
                "more_sums": int(more),
                "compared": dict(compared),
            } if all(isinstance(name, str) and name in parameters for name in written) and 0 <= more <= _FIRST_STEPS:
                self.written |= {id(each): each for each in map(parameters.__getitem__, written)}
                self._num_begun = max(self._num_begun, steps)
                self._sums_until = self._num_begun + more
                counts = {id(each): compared.get(name, NUM_COMPARED) for name, each in parameters.items()}
                for each in self._followed():
                    count = counts.get(id(each.shard), 0)
                    each.num_compared = max(each.num_compared, count if isinstance(count, int) else 0)
            case _:
                log.warning("what a replica knows of the program's writes does not fit the model here, and is not used")

    def _followed(self) -> list[GatheredParameter]:
        groups = (group for part in modules_of(self._model) for group in parameter_groups(part))
        return [each for group in groups for each in followed_parameters(group)]

    def begin(self) -> None:
        """Remember the present state, and drop the gradients of parameters that no optimizer owns.

        A surviving process would accumulate these over the steps, and a replacement would not.
        """
        self.is_open = True
        self.batches.begin()
        self._collect()
        self._buffers.keep()
        self._attributes = [(each, each.keep()) for each, _ in self._attributes]
        self._counts = [_counts(part) for part in self._counting]
        self._drop_unowned()
        if self.kept is not None:
            self.kept.save()
        self._copies = {key: (each, local_tensor(each).clone()) for key, each in self.written.items()}
        self._comparing = [each for each in self._comparing if each.is_compared]
        self._compared = [(each, each.num_compared) for each in self._comparing]
        # FSDP2 may have replaced the local parts in its first forward.
        self._counters = [*self._watched, *map(_local_of, self._split)]
        self._versions = [*map(_version_of, self._counters)]
        self._num_begun += 1
        is_summed = self._num_begun <= self._sums_until or self._num_begun & (self._num_begun - 1) == 0
        self._sums = _sums_of_bits(self._watched) if is_summed else []
        self._piece = None if is_summed or not self._watched else SampledPiece(self._watched, self._num_begun)

    @contextmanager
    def just_begun(self) -> Generator[None]:
        """Context right after `begin`, in which attributes need not be read again.

        Of the program, only `state_dict` of registered objects may run in it. What that writes is found at the vote.
        """
        with ExitStack() as stack:
            for each, kept in self._attributes:
                stack.enter_context(each.as_kept(kept))
            yield

    def _collect(self) -> None:
        """Collect modules and parameters again if they have changed, and all that depends on them."""
        num_owned = sum(len(group["params"]) for optimizer in self._optimizers for group in optimizer.param_groups)
        if num_owned == self._num_owned and self._held.are_same:
            return
        reshard(self._model)  # parameters that an evaluation left gathered are not those of the optimizers
        self.parts, self._num_owned = modules_of(self._model), num_owned
        self._buffers = Buffers(self.parts, above_bytes=self._above_bytes)
        self._children = ModuleTables(part._modules for part in self.parts)
        self._held = ModuleTables(table for part in self.parts for table in (part._modules, part._parameters))
        parameters = {id(each): each for part in self.parts for each in part._parameters.values() if each is not None}
        owned = parameters_of(self._optimizers)
        self._unowned = [each for key, each in parameters.items() if key not in owned]
        self._watched = [*([] if self.kept is not None else owned.values()), *self._unowned]
        self._split = [each for each in self._watched if isinstance(each, DTensor)]
        self._counting = [part for part in self.parts if _counts(part)]
        self._comparing = self._followed()

    def present_buffers(self) -> Buffers:
        """A copy of the buffers of all modules, as they are now."""
        are_known = bool(self.parts) and self._children.are_same
        return (
            self._buffers.kept_now() if are_known else Buffers(modules_of(self._model), above_bytes=self._above_bytes)
        )

    def end(self) -> None:
        """Detect writes when the step has been computed; from the next step on, parameters that it wrote are copied.

        Reading the counters of 76 parameters takes 0.1 ms between two steps of a model that fills the caches. So
        after the first steps only a part is read, in turn, unless a piece's bits have changed. After a fault all are
        read.
        """
        turn = slice((self._num_begun * _GOLDEN >> 16) % _TURNS, None, _TURNS)
        is_quick = self._piece is not None and not self._piece.is_changed
        if not is_quick or [*map(_version_of, self._counters[turn])] != self._versions[turn]:
            self.written |= self._changed()
        self.batches.end()

    def note_changes(self, later: Self) -> bool:
        """Like `is_within_reach`, as of the later beginning of another object; what was written is copied from now on.

        Args:
            later: has just begun, for the same model and optimizers, and has read the version counters.
        """
        is_quick = later.kept is None and self._piece is not None and not self._piece.is_changed
        are_same = later._versions == self._versions and all(map(is_, later._counters, self._counters))
        changed = {} if is_quick and are_same else self._changed()
        self.written |= changed
        return not changed and self._can_put_back_attributes

    def close(self) -> None:
        """The step is committed."""
        self.is_open = False
        self.batches.begin()

    def at_step_start(self) -> AbstractContextManager[None]:
        """Context in which all state but tensors is as when the step began, so it can be captured after an update."""
        return self.kept.as_it_began() if self.kept is not None and self.is_open else nullcontext()

    @property
    def is_within_reach(self) -> bool:
        """Whether `put_back` can restore everything."""
        return not self._changed() and self.batches.is_within_reach and self._can_put_back_attributes

    @property
    def _can_put_back_attributes(self) -> bool:
        return all(each.can_put_back(kept) for each, kept in self._attributes)

    def put_back(self) -> None:
        """Restore everything as of `begin`, except gradients of the optimizers' parameters."""
        self._drop_unowned()
        if self.kept is not None:
            self.kept.restore()
        self._buffers.put_back()
        for each, values in self._attributes:
            each.put_back(values)
        self.batches.put_back()
        with torch.no_grad():
            for each, saved in self._copies.values():
                local_tensor(each).copy_(saved)
        for each, count in self._compared:
            each.num_compared = count
        for metric, counts in zip(self._counting, self._counts, strict=True):
            vars(metric).update({key: copied_value(value) for key, value in counts.items()})

    def _drop_unowned(self) -> None:
        for parameter in self._unowned:
            parameter.grad = None

    def _changed(self) -> dict[int, torch.Tensor]:
        """Parameters that were written since the step began and for which there is no copy."""
        now = [*map(_version_of, self._counters)]
        sums = _sums_of_bits(self._watched) if self._sums else []
        is_hidden = self._piece is not None and self._piece.is_changed
        counted = self._counters[len(self._watched) :]
        # FSDP2's first forward may have replaced local parts since: nothing tells then whether these were written.
        replaced = (
            [] if self._sums else [a for a, b in zip(self._split, counted, strict=False) if _local_of(a) is not b]
        )
        if now == self._versions and sums == self._sums and not (is_hidden or replaced):
            return {}
        owners = [*self._watched, *self._split, *self._watched]
        pairs = zip(owners, (*self._versions, *self._sums), (*now, *sums), strict=False)
        found = {id(each): each for each, a, b in pairs if a != b} | {id(each): each for each in replaced}
        if self._piece is not None and is_hidden:
            found[id(self._piece.owner)] = self._piece.owner
        found = {key: each for key, each in found.items() if key not in self._copies}
        if is_hidden and found:
            self._sums_until = self._num_begun + _FIRST_STEPS
        return found


class ParameterCopy:
    """A copy in host memory of this rank's part of all parameters of a model."""

    def __init__(self, model: nn.Module) -> None:
        reshard(model)
        self._copies = [(each, local_tensor(each).to("cpu", copy=True)) for each in model.parameters()]

    def put_back(self) -> None:
        """Restore the parameters that have changed since."""
        with torch.no_grad():
            for each, saved in self._copies:
                memory = local_tensor(each)
                before = saved.to(memory.device)
                if not torch.equal(as_integers(memory), as_integers(before)):
                    memory.copy_(before)


class SampledPiece:
    """A small piece of this rank's part of one of several tensors, and a copy of the piece."""

    def __init__(self, tensors: Sequence[torch.Tensor], index: int) -> None:
        """Choose a tensor by `index` in round-robin order, and in each round another piece of it."""
        turn, place = divmod(index, len(tensors))
        self.owner = tensors[place]
        memory = local_tensor(self.owner)
        flat = memory.view(-1) if memory.is_contiguous() else memory.new_empty(0)
        num_pieces = max(1, -(-flat.numel() // _PIECE_SIZE))
        begin = turn % num_pieces * _PIECE_SIZE
        self._values = as_integers(flat[begin : begin + _PIECE_SIZE])
        self._saved = self._values.clone()

    @property
    def is_changed(self) -> bool:
        """Whether any bit has changed; synchronizes with the device."""
        return not torch.equal(self._values, self._saved)


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Tensors in nested mappings (including those of Hugging Face tokenizers), sequences and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    if type(value) in _LEAVES:
        return
    inner: Iterable[Any] = ()
    if isinstance(value, list | tuple):
        inner = cast("Sequence[Any]", value)
    elif isinstance(value, _MAPPINGS):
        inner = cast("Mapping[Any, Any]", value).values()
    elif is_dataclass(value) and not isinstance(value, type):
        inner = [attrgetter(field.name)(value) for field in fields(value)]
    for each in inner:
        yield from _tensors_in(each)


class OutsideWrites:
    """The parameters when a part of a program outside of steps began, which may have to be run again.

    Hooks of an evaluation may write an average to them and put their values back at its end. Parameters are copied in
    the first parts of a process, and in all later ones once a write was noticed. If the first write comes later, a
    fault in that same part cannot be undone.
    """

    WHY_LOST = (
        "a peer was lost when hooks of an evaluation, or of the end of an epoch or fit, had written parameters, which "
        "the first ones did not do, so that there is no copy of what they were"
    )

    def __init__(self, model: nn.Module) -> None:
        """Watch the parameters of a model; nothing has begun yet."""
        self._model = model
        self._are_written = False
        self._is_noticed = False
        self._num_begun = 0
        self._parameters: list[torch.Tensor] = []
        self._sums: list[int] = []
        self._copies: list[torch.Tensor] = []

    def begin(self) -> None:
        """A part begins."""
        self._is_noticed = False
        reshard(self._model)  # an evaluation leaves parameters gathered
        self._parameters = list(self._model.parameters())
        self._sums = _sums_of_bits(self._parameters)
        is_copied = self._are_written or self._num_begun < _FIRST_PARTS
        self._copies = [local_tensor(each).clone() for each in self._parameters] if is_copied else []
        self._num_begun += 1

    def notice(self) -> None:
        """Look for writes, once in a part, in the middle of it: at its end, the values may be back."""
        if self._copies and not (self._are_written or self._is_noticed):
            self._is_noticed, self._are_written = True, self._have_changed()

    def end(self) -> None:
        """The part has ended, and need not be run again."""
        self._parameters, self._copies = [], []

    def put_back(self) -> bool:
        """Restore the parameters, and return whether they are those of the beginning."""
        if not self._parameters:
            return True
        forget_iteration(self._model)  # an interrupted forward leaves parameters gathered
        if not self._have_changed():
            return True
        self._are_written = True
        with torch.no_grad():
            for each, saved in zip(self._parameters, self._copies, strict=False):
                local_tensor(each).copy_(saved)
        return bool(self._copies)

    def _have_changed(self) -> bool:
        return _sums_of_bits(self._parameters) != self._sums


def _sums_of_bits(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Sum of the bits, read as integers, of this rank's part of each tensor."""
    if not tensors:
        return []
    sums = [as_integers(each).sum(dtype=torch.int64) for each in map(local_tensor, tensors)]
    return torch.stack([each.to(sums[0].device) for each in sums]).tolist()


def _counts(part: nn.Module) -> dict[str, Any]:
    """Copy of a torchmetrics metric's state, as updates write its tensors and extend its lists; empty for others."""
    attributes = vars(part)
    if "_update_count" not in attributes or "_defaults" not in attributes:
        return {}
    return {key: copied_value(attributes[key]) for key in (*attributes["_defaults"], "_computed", "_update_count")}


def copied_value(value: Any) -> Any:
    """A copy of a metric's value that its updates do not change."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.copy(value)


def drop_gradients(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Drop the gradients and FSDP2 state of an interrupted step, wherever it stopped."""
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    for part in modules_of(model):
        _drop_gathered_gradients(part)
    forget_iteration(model)


def end_iteration(model: nn.Module) -> None:
    """Reset a model to its state in a new process, after the ranks have assembled anew."""
    forget_iteration(model)
    check_next_step(model)


def forget_iteration(model: nn.Module) -> None:
    """Reset FSDP2's modules to the state of a new process, whatever they have run.

    A forward that is interrupted outside of a step leaves parameters gathered: the module then does not hold the
    shards that are sent, received and saved.

    [Note: what an evaluation leaves] A forward without a backward, as in a validation, stays in FSDP2's list of what
    backward prefetches, and may leave parameters gathered. The next step then runs one all-gather more or less than a
    process that has replaced a lost one since, and both would wait for each other forever.
    """
    clear_trace(model)
    for part in model.modules():
        if not isinstance(part, FSDPModule):
            continue
        state: Any = part._get_fsdp_state()
        if not CAN_RESET:
            _forget_forward(part, state)
        elif state._is_root:  # set in the first forward
            part.reset_iter_state()


def _drop_gathered_gradients(part: nn.Module) -> None:
    """Drop what backward has added up for gathered parameters, if an exception has interrupted it within their unit.

    FSDP2's own reset keeps it, and the next backward would add to it.
    """
    for group in parameter_groups(part):
        for each in group.fsdp_params:
            each.unsharded_accumulated_grad = None
            if "_unsharded_param" in vars(each):  # since the first forward
                each._unsharded_param.grad = None


def _forget_forward(part: FSDPModule, state: Any) -> None:
    """Equivalent of `reset_iter_state` between two iterations, for torch before 2.13."""
    part.reshard()
    if "post_forward_order" in vars(state._comm_ctx):  # set in the first forward
        state._comm_ctx.post_forward_order.clear()
    if state._fsdp_param_group is not None:
        state._fsdp_param_group._post_forward_indices.clear()
        state._fsdp_param_group._partial_reduce_output = None  # from micro-steps that will run again


def modules_of(model: nn.Module) -> list[nn.Module]:
    """`model.modules()` in another order, and ten times faster, as each step needs them."""
    parts, known = [model], {model}
    for part in parts:
        for child in part._modules.values():
            if child is not None and child not in known:
                known.add(child)
                parts.append(child)
    return parts
