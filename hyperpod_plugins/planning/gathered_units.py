"""What FSDP2 holds besides shards while a step runs: gathered parameters, messages, and results of reductions."""

from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hyperpod_plugins.memory.recompute import is_in_backward
from hyperpod_plugins.parallel import ParallelConfig, Topology
from hyperpod_plugins.parallel.hsdp import find_blocks, mixed_precision_policy, outermost_blocks
from hyperpod_plugins.planning.tracked_memory import TrackedMemory
from hyperpod_plugins.precision.float8 import convertible_linears

GATHERED, GRADIENTS = "gathered", "gradients"
"""Kinds under which the tracker counts."""
_FLOAT8 = 1


class GatheredUnits:
    """Counts what FSDP2 holds besides shards, as the units of a model run.

    In forward, a unit is gathered into a message, and copied from it into its parameters. The message is freed when
    that of the next unit has arrived; the parameters, when the unit has run.

    In backward, the message is freed at once. It arrives while the unit after this one is computed. When all gradients
    of a unit are there, its parameters are freed, and the gradients are copied into a message, which is freed when the
    next unit reduces. The results stay until the end. They become the gradients of the shards, as themselves or in the
    type in which these are stored, or are added to those that exist.
    """

    def __init__(
        self,
        model: nn.Module,
        experts: Collection[nn.Module],
        config: ParallelConfig,
        topology: Topology,
        tracker: TrackedMemory,
        split: Collection[int],
        stored: Mapping[str, torch.dtype],
        *,
        makes_gradients: bool,
    ) -> None:
        """Count nothing yet.

        Args:
            model: As one rank computes it.
            experts: Layers of experts in it that are divided among ranks.
            config: Configuration of the plan.
            topology: Topology of the plan.
            tracker: To add to.
            split: The `id` of each parameter that is whole in `model`, but split by tensor parallelism.
            stored: The type in which each parameter is stored, by its name in `model`.
            makes_gradients: Whether results of reductions become gradients on the device; otherwise they are added to
                gradients that count elsewhere, or copied to the host.
        """
        self._model, self._tracker, self._topology = model, tracker, topology
        self._split, self._makes_gradients = split, makes_gradients
        self._stored = {id(each): stored[name] for name, each in model.named_parameters()}
        self._reduced_dtype = mixed_precision_policy(config).reduce_dtype
        self._in_float8 = _gathered_in_float8(model, config)
        self._keeps, self._is_offloaded = not config.reshard_after_forward, config.param_offload
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
        """What the parameters of a unit take while they are gathered; see `parallel/gathering_in_place.py`."""
        is_in_place = self._num_shards(unit) == 1 and not self._is_offloaded
        return sum(
            self._numel(each) * (_FLOAT8 if id(each) in self._in_float8 else each.element_size())
            for each in self._parameters[id(unit)]
            if not is_in_place or id(each) in self._in_float8 or self._stored[id(each)] != each.dtype
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
            self._add(self._message_bytes(unit))

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
        self._add(self._num_bytes(unit))
        self._copied_message = self._message_bytes(unit)
        if is_in_backward():
            self._free_copied_message()

    def _free_copied_message(self) -> None:
        self._add(-self._copied_message)
        self._copied_message = 0

    def _free(self, unit: nn.Module) -> None:
        if id(unit) in self._gathered:
            self._gathered.discard(id(unit))
            self._add(-self._num_bytes(unit))

    def _end_forward(self, unit: nn.Module) -> None:
        if not (is_in_backward() or self._keeps):  # in backward, a recomputation
            self._free(unit)

    def _begin_backward(self, index: int, unit: nn.Module, *_: Any) -> None:
        self._gather(unit)
        self._prefetch(index - 1)

    def _accumulate(self, unit: nn.Module, parameter: Tensor) -> None:
        """Whole gradients wait until all of the unit are there."""
        self._add(self._numel(parameter) * parameter.element_size())
        waiting = self._waiting[id(unit)]
        waiting.discard(id(parameter))
        if not waiting:
            self._reduce(unit)

    def _reduce(self, unit: nn.Module) -> None:
        trained = [(each, self._numel(each)) for each in self._parameters[id(unit)] if each.requires_grad]
        message = sum(numel * (self._reduced_dtype or each.dtype).itemsize for each, numel in trained)
        self._free(unit)
        self._add(-self._reduced_message)
        self._reduced_message = message
        self._add(message)
        self._add(-sum(numel * each.element_size() for each, numel in trained))  # copied
        result = message // self._num_shards(unit)
        stored = sum(numel * self._stored[id(each)].itemsize for each, numel in trained) // self._num_shards(unit)
        if self._makes_gradients and stored == result:
            self._add(result, GRADIENTS)
            return
        self._add(result)
        if stored != result:
            self._add(stored, GRADIENTS if self._makes_gradients else GATHERED)
            if not self._makes_gradients:
                self._add(-stored)

    def _add(self, num_bytes: int, kind: str = GATHERED) -> None:
        self._tracker.add(num_bytes, kind)


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
