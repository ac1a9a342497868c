"""What `prepare` does to a model and its optimizers, and the optimizers and schedulers that it returns.

These are Accelerate's, for sharded parameters and for ranks that share samples.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from hyperpod_plugins.accelerate.compat import AcceleratedOptimizer, AcceleratedScheduler, convert_outputs_to_fp32
from hyperpod_plugins.comm.runtime import runtime
from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.ledger import TimeCategory, ledger
from hyperpod_plugins.parallel.adopted_model import is_sharded_by_program
from hyperpod_plugins.parallel.finite import FiniteCheck, RankFiniteCheck
from hyperpod_plugins.parallel.former_parameters import succeed_parameters
from hyperpod_plugins.parallel.hsdp import reshard_after_evaluations
from hyperpod_plugins.parallel.local_optimizer import step_locally
from hyperpod_plugins.parallel.parallelize import match_rank_0
from hyperpod_plugins.parallel.unit_watch import watch_units


def shard_with_optimizers(
    model: nn.Module, optimizers: Sequence[Optimizer], shard: Callable[[nn.Module], None], *, is_delayed_alike: bool
) -> None:
    """Shard a model in place, and replace the old parameters in its optimizers by the new ones.

    Accelerate maps parameters by their memory address, which parameters on the meta device and empty shards do not
    have. Here they are mapped by name. Meanwhile the optimizers hold no parameters, so that each can be freed.
    `is_delayed_alike`: see `match_rank_0`.

    Raises:
        ConfigError: an optimizer already has state, or holds a parameter that is not the model's; or tensors have
            values on some ranks only; or see `watch_units` and `succeed_parameters`.
    """
    if is_sharded_by_program(model):
        watch_units(model)
        succeed_parameters(model, is_by_program=True)
        return  # by an earlier `prepare`, or by the user: its optimizers hold the shards
    refuse_half_loaded(model, is_delayed_alike=is_delayed_alike)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    held: list[tuple[dict[str, Any], list[str]]] = []
    for optimizer in optimizers:
        if optimizer.state:
            raise ConfigError(
                f"this {type(optimizer).__name__} has state already, of parameters that are not sharded. Prepare it "
                "before its first step, and load saved state with accelerator.load_state afterwards."
            )
        for group in optimizer.param_groups:
            foreign = [tuple(parameter.shape) for parameter in group["params"] if id(parameter) not in names]
            if foreign:
                raise ConfigError(
                    f"this {type(optimizer).__name__} holds {len(foreign)} parameters, the first of shape "
                    f"{foreign[0]}, that are not in the {type(model).__name__} it is prepared with. Make it from "
                    "model.parameters()."
                )
            held.append((group, [names[id(parameter)] for parameter in group["params"]]))
    for group, _ in held:
        group["params"] = []
    shard(model)
    reshard_after_evaluations(model)
    parameters = dict(model.named_parameters())
    for group, in_group in held:
        group["params"] = [parameters[name] for name in in_group]


def refuse_half_loaded(model: nn.Module, *, is_delayed_alike: bool) -> None:
    """Raise `ConfigError` if tensors have values on some ranks only.

    With `cpu_ram_efficient_loading`, which `accelerate launch` enables by default, transformers loads a model only on
    the first rank of each node.
    """
    advice = (
        "With cpu_ram_efficient_loading, only one rank of a node loads values. Make the plugin's Accelerator before "
        "loading the model, or set fsdp_cpu_ram_efficient_loading: false. Large models are built inside "
        "hyperpod_plugins.delayed_init.delayed_init."
    )
    match_rank_0(model, compares_types=False, is_delayed_alike=is_delayed_alike, advice=advice)


def wrap_forward(
    model: nn.Module, context: Callable[[], AbstractContextManager[None]], *, returns_float32: bool
) -> None:
    """Run a model's `forward` in a context; with `returns_float32`, convert floating-point outputs to float32.

    The wrapper is attached like Accelerate's own, so that `Accelerator.unwrap_model` can remove it.
    """
    if "_original_forward" in vars(model):
        return
    original = model.forward
    function = (
        original.__func__ if isinstance(original, MethodType) else lambda _, *args, **kwargs: original(*args, **kwargs)
    )

    @wraps(function)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with context():
            return function(self, *args, **kwargs)

    vars(model)["_original_forward"] = original
    vars(model)["forward"] = MethodType(convert_outputs_to_fp32(forward) if returns_float32 else forward, model)


class FiniteStepCheck:
    """Checks losses in `accelerator.backward`, the norm in `clip_grad_norm_` and the gradients of a step."""

    def __init__(self, finite: FiniteCheck, parameters: Callable[[], Iterable[Tensor]]) -> None:
        """Start without losses.

        Args:
            finite: has the policy for steps that are not finite.
            parameters: returns the parameters of all optimizers, whose gradients are checked.
        """
        self._finite = finite
        self._parameters = parameters
        self._rank_check = RankFiniteCheck(finite)
        self._norm: Tensor | None = None
        self._num_batches = self._num_steps = 0
        self._is_new, self._may_update = False, True

    def note_loss(self, loss: Tensor) -> None:
        """Record the loss of this rank's next batch, a tensor with one element."""
        if self._finite.is_enabled:
            self._begin()
            self._rank_check.record(self._num_batches, loss)
        self._num_batches += 1

    def note_norm(self, norm: Tensor) -> None:
        """Record the norm of all gradients, `()`, the same on all ranks."""
        if self._finite.is_enabled:
            self._begin()
            self._norm = norm

    def _begin(self) -> None:
        if not self._is_new:
            self._norm, self._is_new = None, True

    def allows_update(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer may step; of several optimizers that step on the same losses, all do or none.

        Raises:
            NonFiniteError: a loss of any rank, the norm or a gradient is not finite, and the policy is to stop.
        """
        if self._is_new:
            self._rank_check.reconcile_for(optimizer, self._parameters())
            self._may_update = self._rank_check.allows_update(self._norm, step=self._num_steps)
            self._is_new = False
            self._num_steps += 1
        self._finite.raise_if_stopped()
        return self._may_update


class LoopTime:
    """Books the time of a loop without a `Session` for `goodput_metrics`; inactive until `begin`.

    A step lasts from a forward pass in training until the optimizer's step. What this does not see, such as waiting
    for data, is `OTHER`. Nothing is written: the number of the step is not known where a run is resumed.
    """

    def __init__(self) -> None:
        self.is_active = False
        self._has_gradients, self._num_steps = False, 0

    def begin(self, *, rank: int, world_size: int, replicas: int) -> None:
        """Begin to book, unless something else in this process does."""
        if ledger.is_active:
            return
        ledger.open(None, {"run_id": "", "worker_id": rank}, waited_s=lambda: runtime.waiting.total_s)
        ledger.note_world(rank=rank, world_size=world_size, replicas=replicas, generation=0)
        self.is_active = True

    def note_forward(self, model: nn.Module) -> None:
        """The model computes a batch of the training, or an evaluation."""
        if self.is_active:
            is_training = model.training and torch.is_grad_enabled()
            ledger.enter(TimeCategory.STEP if is_training else TimeCategory.EVALUATION)

    def note_backward(self) -> None:
        """There are gradients for an optimizer."""
        self._has_gradients = True

    def end_batch(self, *, is_step: bool) -> None:
        """An optimizer was asked to step; `is_step`: at the end of an accumulation window."""
        has_gradients, self._has_gradients = self._has_gradients, False
        if not (self.is_active and has_gradients):
            return
        if is_step:
            self._num_steps += 1
            ledger.commit(self._num_steps)
        else:
            ledger.enter(TimeCategory.OTHER)

    def end(self) -> None:
        """End booking."""
        if self.is_active:
            self.is_active = False
            ledger.close()


class HyperPodOptimizer(AcceleratedOptimizer):
    """An optimizer whose arithmetic runs on local shards, bypassing DTensor dispatch.

    Args:
        optimizer: the torch optimizer, also the attribute `optimizer`.
        check: checks each step before it is made.
        time: is told of each step.
        **options: arguments of `AcceleratedOptimizer`.
    """

    def __init__(self, optimizer: Optimizer, *, check: FiniteStepCheck, time: LoopTime, **options: Any) -> None:
        super().__init__(optimizer, **options)
        self._check, self._time = check, time

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Update parameters at the end of an accumulation window; otherwise do nothing.

        A step that is left out because it is not finite is skipped in Accelerate's sense: schedulers do not advance.

        Raises:
            NonFiniteError: see `HyperPodPlugin`; nothing was updated.
        """
        if not self.gradient_state.sync_gradients:
            self._time.end_batch(is_step=False)
            return
        self._is_overflow = closure is None and not self._check.allows_update(self.optimizer)
        if not self._is_overflow:
            step_locally(self.optimizer, closure or _nothing)
        self._time.end_batch(is_step=True)


class HyperPodScheduler(AcceleratedScheduler):
    """A scheduler that advances by one for each rank that reads its own samples.

    Accelerate's scheduler advances by the number of processes, which tensor parallelism makes a multiple of that.
    """

    def __init__(self, *args: Any, data_group: dist.ProcessGroup, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._data_group = data_group  # its size is read at each step, because replicas come and go

    @override
    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance if the optimizer has made a step."""
        is_shared_out = self.step_with_optimizer and not self.split_batches and self.gradient_state.sync_gradients
        if not is_shared_out:
            super().step(*args, **kwargs)
            return
        if any(optimizer.step_was_skipped for optimizer in self.optimizers):
            return
        end = vars(self.scheduler).get("total_steps")  # set if it refuses to go further (OneCycleLR)
        for _ in range(self._data_group.size()):
            if end is None or self.scheduler._step_count <= end:
                self.scheduler.step(*args, **kwargs)


def _nothing() -> None:
    return None
