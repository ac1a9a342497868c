"""Compare the replicas of each shard while a job trains.

They hold the same bits unless memory or a device is at fault, or the program has written other values on each rank.
Either trains wrongly without an error.

[Note: what is compared by default] With `"auto"`, ranks compare at the beginning of steps 0, 1, 2, 4, ..., 1024, 2048,
3072 and so on: parameters that an optimizer has, and its state, of each tensor up to 16,384 elements that are spread
over it evenly, and others each time. So tensors that differ in most of their elements are found at once, and in the end
also those that differ in one. A program may keep parameters of one rank alone, which no optimizer has.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Literal, Self

import torch
from torch import nn
from typing_extensions import override

from hyperpod_plugins.comm import group_health
from hyperpod_plugins.parallel.topology import Topology
from hyperpod_plugins.recovery.optimizer_copy import parameters_of
from hyperpod_plugins.recovery.state_digests import (
    ReplicasDiffer,
    alike_on_replicas,
    compare_replicas,
    tensor_digests,
)
from hyperpod_plugins.recovery.state_transfer import TrainingState

Interval = int | Literal["auto"]
_LONGEST = 1024
_MAX_ELEMENTS, _MAX_ELEMENTS_IN_ALL, _MIN_ELEMENTS = 2**14, 2**20, 2**8
_PRIME = 2654435761


def is_due(step: int, every: Interval) -> bool:
    """Whether replicas are compared in a step."""
    if every != "auto":
        return every > 0 and step % every == 0
    return step % _LONGEST == 0 or (step < _LONGEST and step.bit_count() == 1)


def previous_comparison(step: int, every: Interval) -> int | None:
    """The last step before `step` in which replicas were compared; None if there is none."""
    if step == 0:
        return None
    if every != "auto":
        return (step - 1) // every * every
    return (step - 1) // _LONGEST * _LONGEST if step > _LONGEST else step // 2


def sampled(tensors: Mapping[str, torch.Tensor], step: int) -> dict[str, torch.Tensor]:
    """Elements of each plain tensor; others in each step in which replicas are compared by default."""
    limit = max(_MIN_ELEMENTS, min(_MAX_ELEMENTS, _MAX_ELEMENTS_IN_ALL // max(len(tensors), 1)))
    number = step.bit_length() if step < _LONGEST else _LONGEST.bit_length() - 1 + step // _LONGEST
    found: dict[str, torch.Tensor] = {}
    for name, each in tensors.items():
        if type(each) in (torch.Tensor, nn.Parameter):
            stride = -(-each.numel() // limit)
            found[name] = each if stride <= 1 else each.detach().flatten()[number * _PRIME % stride :: stride].clone()
    return found


class _DigestsBeside(threading.Thread):
    """Computes digests in a daemon thread beside the step; `found` is empty until it has finished."""

    def __init__(self, compute: Callable[[], dict[str, int]]) -> None:
        super().__init__(name="hyperpod-digests", daemon=True)
        self._compute = compute
        self.found: dict[str, int] = {}

    @override
    def run(self) -> None:
        self.found = self._compute()


class ReplicaComparison:
    """Comparisons of this rank with the replicas of its shard; `StepTransaction` calls it in each step."""

    def __init__(
        self,
        state: TrainingState,
        topology: Topology,
        device: torch.device,
        every: Interval,
        give_up: Callable[[str], None],
    ) -> None:
        """Compare in the steps to come.

        Args:
            state: tensors of this rank.
            topology: topology of the job.
            device: device of this rank.
            every: number of steps from one comparison to the next.
            give_up: tells the agents to end the job, with the reason.
        """
        self._state, self._topology, self._device = state, topology, device
        self._every: Interval = every
        self._give_up = give_up
        self._hashed: tuple[int, _DigestsBeside] | None = None

    @classmethod
    def create(
        cls,
        state: TrainingState,
        topology: Topology,
        device: torch.device,
        every: Interval,
        give_up: Callable[[str], None],
    ) -> Self | None:
        """The comparison; None if it is off, or if each shard exists once."""
        return None if every == 0 or topology.replicate_degree == 1 else cls(state, topology, device, every, give_up)

    def begin(self, step: int) -> None:
        """Begin to compute digests at the beginning of a step, if they are compared in it."""
        if is_due(step, self._every):
            tensors = self._compared()  # of now: modules replace them in a step
            self._hashed = step, _DigestsBeside(lambda: self._digests(step, tensors))
            self._hashed[1].start()

    def compare(self, step: int) -> None:
        """Compare with the replicas when a step has been computed and no rank has voted, if this is due in it.

        All ranks do this whatever was repaired before. As a program may write to parameters in the middle of a step,
        a difference counts only if digests that are computed here, in the thread of the step, differ too.

        Raises:
            ReplicasDiffer: replicas differ.
        """
        if not is_due(step, self._every):
            return
        hashed, self._hashed = self._hashed, None
        held: dict[str, int] = {}
        if hashed is not None and hashed[0] == step:
            hashed[1].join()
            held = hashed[1].found
        held = held or self._digests(step, self._compared())
        with group_health.tolerate_breaks():
            found = compare_replicas(held, self._topology, self._device)
            if found is not None:
                found = compare_replicas(self._digests(step, self._compared()), self._topology, self._device)
        if found is None:
            return
        before = previous_comparison(step, self._every)
        since = "its beginning" if before is None else f"the last comparison, in step {before},"
        reason = (
            f"step {step}: {found}. This step has updated nothing, but training since {since} may be wrong. If the "
            "program writes to parameters or optimizer state outside of a step, it must write the same on all ranks: "
            "draw random numbers from a generator that all ranks seed alike, or broadcast them. Otherwise, check the "
            "memory and the devices of that host. Return to a checkpoint from before that; compare_replicas_every=0 "
            "compares nothing."
        )
        if found.names:
            self._give_up(reason)
        raise ReplicasDiffer(reason)

    def _compared(self) -> dict[str, torch.Tensor]:
        """The tensors that are compared."""
        alike = alike_on_replicas(self._state)
        if self._every != "auto":
            return alike
        owned = parameters_of(self._state.optimizers)
        names = {f"parameter {name}" for name, each in self._state.model.named_parameters() if id(each) in owned}
        return {name: each for name, each in alike.items() if name in names or name.startswith("optimizer ")}

    def _digests(self, step: int, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
        return tensor_digests(sampled(tensors, step) if self._every == "auto" else tensors)
