"""Lightning's `WeightAveraging` and `EMAWeightAveraging` over sharded parameters.

Lightning's callback copies the unsharded module on every rank. Here the average is made of the sharded tensors, after
the strategy has set up the module: each rank averages its own shards. Replicas of a shard hold the same average, so
it is handled like the parameters: it is sent to replacements, and saved in snapshots and, sharded, in checkpoints.
"""

# Lightning's callback, and a module's tables of tensors, have no public API.
# pyright: reportPrivateUsage=false

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_swa_avg_fn
from typing_extensions import override

from hyperpod_plugins.comm import group_health
from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.lightning.compat import LightningModule, Trainer, WeightAveraging, callbacks_of
from hyperpod_plugins.lightning.compat import override as override_method
from hyperpod_plugins.parallel.checkpoint.state import CURRENT, NUM_AVERAGED, model_tensors
from hyperpod_plugins.parallel.hsdp import reshard
from hyperpod_plugins.parallel.local_optimizer import LocalDispatchMode
from hyperpod_plugins.recovery.buffer_states import BufferStates
from hyperpod_plugins.recovery.undo import forget_iteration

_COUNTS = "hyperpod:latest_updates"
_FIXED = ("setup", "on_save_checkpoint", "on_load_checkpoint")
_COMMUNICATES = (
    "a function that averages weights communicates, which is not possible after a step: others may be gone. Let avg_fn "
    "and multi_avg_fn work element by element."
)
_Pair = tuple[Tensor, Tensor]


class ShardedAverage(AveragedModel):
    """An `AveragedModel` whose `module` has copies of a sharded module's tensors, but no forward."""

    def __init__(self, module: nn.Module, *, use_buffers: bool, **options: Any) -> None:
        """Start from the present values of `module`; `options` are those of `AveragedModel`."""
        super().__init__(nn.Module(), device=_device_of(module), use_buffers=use_buffers, **options)
        self.module = _tensors_of(module, {})

    @override
    def update_parameters(self, model: nn.Module) -> None:
        """Update this rank's shards of the average.

        Raises:
            LoopError: the averaging function communicates.
        """
        self.average(self._pairs(model), self._buffer_pairs(model))
        self.n_averaged += 1

    def average(self, parameters: Iterable[_Pair], buffers: Iterable[_Pair]) -> None:
        """Update averages from pairs of an averaged and a present tensor.

        The first update, and one of buffers without `use_buffers`, copies the present tensors.

        Raises:
            LoopError: the averaging function communicates.
        """
        averaged, copied = [*parameters], [*buffers]
        if self.use_buffers:
            averaged, copied = [*averaged, *copied], []
        if not self.n_averaged:
            averaged, copied = [], [*averaged, *copied]
        reason = group_health.refusal_reason or _COMMUNICATES
        with torch.no_grad(), group_health.forbid(reason), LocalDispatchMode():
            for mean, present in copied:
                mean.copy_(present)
            if self.multi_avg_fn is not None:
                for pairs in _alike(averaged):
                    means, presents = map(list, zip(*pairs, strict=True))
                    self.multi_avg_fn(means, presents, self.n_averaged)
                return
            average = self.avg_fn or get_swa_avg_fn()
            for mean, present in averaged:
                mean.copy_(average(mean, present, self.n_averaged))

    def begin_from(self, model: nn.Module) -> None:
        """Restart the average from the present values of a module, with no updates counted."""
        with torch.no_grad(), LocalDispatchMode():
            for mean, present in [*self._pairs(model), *self._buffer_pairs(model)]:
                mean.copy_(present)
        self.n_averaged.zero_()

    def _pairs(self, model: nn.Module) -> list[_Pair]:
        return [(a.detach(), b.detach()) for a, b in zip(self.module.parameters(), model.parameters(), strict=True)]

    def _buffer_pairs(self, model: nn.Module) -> list[_Pair]:
        return [(a.detach(), b.detach()) for a, b in zip(self.module.buffers(), model.buffers(), strict=True)]


class AveragedBuffers:
    """Averages of rank-local buffers, such as running statistics of BatchNorm; a `RankLocalState`.

    They are updated after a step. A rank sends them to its buddy before that, with the number of updates. A
    replacement, which gets the present number of updates from a replica, makes the missing update itself.
    """

    def __init__(self, average: ShardedAverage, module: nn.Module, buffers: BufferStates) -> None:
        """Use the average of a module, and `buffers` for the names of its rank-local buffers."""
        self._average, self._module, self._buffers = average, module, buffers

    def state_dict(self) -> dict[str, Any]:
        """Averages by name, and the number of updates."""
        means = dict(self._average.module.named_buffers(remove_duplicate=False))
        names = [name for name in self._buffers.own_names() if name in means]  # others were registered since
        values = {name: means[name].detach().cpu().clone() for name in names}
        return {"num_averaged": int(self._average.n_averaged), "values": values} if values else {}

    def load_state_dict(self, state_dict: dict[str, Any], leave: Collection[str] = ()) -> None:
        """Load the averages, and make the missing update."""
        values: dict[str, Tensor] = state_dict.get("values", {})
        means = dict(self._average.module.named_buffers(remove_duplicate=False))
        present = dict(self._module.named_buffers(remove_duplicate=False))
        with torch.no_grad():
            for name, value in values.items():
                means[name].copy_(value)
        number = self._average.n_averaged.clone()
        if values and int(number) == state_dict["num_averaged"] + 1:
            self._average.n_averaged.fill_(state_dict["num_averaged"])
            self._average.average([], [(means[name].detach(), present[name].detach()) for name in values])
            self._average.n_averaged.copy_(number)

    def written(self, before: dict[str, Any], now: dict[str, Any] | None = None) -> set[str]:
        """Nothing: the update after a step can be made again."""
        return set()

    def fitting(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The averages of buffers that are persistent in this module."""
        names = self._buffers.saved_names()
        values = {name: value for name, value in state_dict.get("values", {}).items() if name in names}
        return {**state_dict, "values": values} if values else {}


class CallbackAverage:
    """The average of one of Lightning's `WeightAveraging` callbacks, on a sharded module."""

    def __init__(self, callback: WeightAveraging) -> None:
        """Replace the methods of the callback that work on the unsharded module.

        Raises:
            ConfigError: the callback's class overrides some of these methods.
        """
        kind = type(callback)
        changed = [name for name in _FIXED if getattr(kind, name) is not getattr(WeightAveraging, name)]
        if changed:
            raise ConfigError(
                f"{kind.__name__} overrides {', '.join(changed)} of {WeightAveraging.__name__}, which HyperPodStrategy "
                "replaces: the average is made of sharded tensors, and checkpoints hold it sharded. Override only "
                "should_update and other hooks."
            )
        self.callback = callback
        self._is_swapped = False
        replaced: dict[str, Callable[..., Any]] = {
            **dict.fromkeys(_FIXED, _nothing),
            "state_dict": self._state_dict,
            "load_state_dict": self._load_state_dict,
            "_swap_models": self._swap,
            "_copy_average_to_current": self._copy,
        }
        for name, function in replaced.items():
            override_method(callback, name, function)

    @property
    def average(self) -> ShardedAverage:
        """The average; available after `begin`."""
        assert isinstance(self.callback._average_model, ShardedAverage)
        return self.callback._average_model

    def begin(self, module: nn.Module) -> None:
        """Create the average of a sharded module, at the beginning of a fit.

        Raises:
            ConfigError: the callback asks for the average on another type of device.
        """
        callback, device = self.callback, _device_of(module)
        wanted = device if callback._device is None else torch.device(callback._device)
        if wanted.type != device.type:
            raise ConfigError(
                f"{type(callback).__name__}(device={str(wanted)!r}) is not possible with HyperPodStrategy: each rank "
                f"averages its own shards where they are, on {device.type}. Leave device out."
            )
        callback._average_model = ShardedAverage(module, use_buffers=callback._use_buffers, **callback._kwargs)
        self._is_swapped = False

    def put_back(self, module: LightningModule) -> None:
        """Restore the module's own weights if a validation with the averaged ones was interrupted."""
        if self._is_swapped:
            forget_iteration(module)  # an interrupted forward leaves parameters unsharded
            self._swap(module)

    def catch_up(self, trainer: Trainer, committed: int) -> None:
        """Make the update after a committed step if the callback has not, because a hook was interrupted.

        Args:
            trainer: about to leave its loops.
            committed: steps that this rank has committed; the trainer may not have counted the last one.
        """
        callback, is_automatic = self.callback, trainer.lightning_module.automatic_optimization
        step = max(trainer.global_step, committed) if is_automatic else trainer.global_step
        if step > callback._latest_update_step and callback.should_update(step_idx=step - 1):
            self.average.update_parameters(trainer.lightning_module)
            callback._latest_update_step = step

    # -- checkpoints --------------------------------------------------------------------------------------------

    def saved_as(self, state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The model tensors of a checkpoint (the average), and its additional tensors, each by full name.

        Args:
            state: tensors of the present module; they become the additional tensors.
        """
        means = model_tensors(self.average.module)
        beside = {f"{CURRENT}{name}": tensor for name, tensor in state.items()}
        return {name: means.get(name, tensor) for name, tensor in state.items()}, beside | self._count

    def load_targets(self) -> dict[str, Tensor]:
        """Tensors to load a checkpoint's additional tensors into, before calling `loaded`."""
        means = model_tensors(self.average.module)
        return {f"{CURRENT}{name}": tensor for name, tensor in means.items()} | self._count

    def swap_loaded(self, module: nn.Module, *, is_averaged: bool) -> None:
        """Swap weights and average after loading: the module holds the average, and the average the weights.

        Args:
            module: loaded with the checkpoint's model tensors.
            is_averaged: whether the checkpoint has an average; if not, the average starts from the module's weights.
        """
        if not is_averaged:
            self.average.begin_from(module)
            return
        means = model_tensors(self.average.module)
        with torch.no_grad(), LocalDispatchMode():
            for name, present in model_tensors(module).items():
                mean = present.clone()
                present.copy_(means[name])
                means[name].copy_(mean)

    @property
    def _count(self) -> dict[str, Tensor]:
        return {NUM_AVERAGED: self.average.n_averaged}

    # -- replacements of the callback's methods -----------------------------------------------------------------

    def _state_dict(self) -> dict[str, Any]:
        """Add step and epoch of the last update, as a tensor of two elements.

        The tensor makes the state count as rank-local: survivors keep theirs, and a replacement takes a replica's.
        """
        latest = [self.callback._latest_update_step, self.callback._latest_update_epoch]
        return {**type(self.callback).state_dict(self.callback), _COUNTS: torch.tensor(latest)}

    def _load_state_dict(self, state_dict: dict[str, Any]) -> None:
        rest = dict(state_dict)
        latest = rest.pop(_COUNTS, None)
        type(self.callback).load_state_dict(self.callback, rest)
        if latest is not None:
            self.callback._latest_update_step, self.callback._latest_update_epoch = latest.tolist()

    def _swap(self, pl_module: LightningModule) -> None:
        reshard(pl_module)
        with torch.no_grad(), LocalDispatchMode():
            type(self.callback)._swap_models(self.callback, pl_module)
        self._is_swapped = not self._is_swapped

    def _copy(self, pl_module: LightningModule) -> None:
        reshard(pl_module)
        with torch.no_grad(), LocalDispatchMode():
            type(self.callback)._copy_average_to_current(self.callback, pl_module)


def averaging_callback(trainer: Trainer, former: CallbackAverage | None) -> CallbackAverage | None:
    """Adapt a Trainer's `WeightAveraging` callback to a sharded module; None if there is no such callback.

    Args:
        trainer: whose callbacks have not been set up yet.
        former: result for an earlier entry of the same Trainer.

    Raises:
        ConfigError: there are several such callbacks, or one overrides methods that must be replaced.
    """
    every = callbacks_of(trainer)
    callbacks = [callback for callback in every if isinstance(callback, WeightAveraging)]
    if len(callbacks) > 1:
        raise ConfigError(
            f"the Trainer has {len(callbacks)} callbacks that average weights, but a checkpoint holds only one "
            "average. Keep only one of them."
        )
    if former is not None and [former.callback] == callbacks:
        return former
    return CallbackAverage(callbacks[0]) if callbacks else None


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _alike(pairs: Iterable[_Pair]) -> Iterable[list[_Pair]]:
    """Group pairs that one foreach operation can process together: same device, dtype and DTensor layout."""
    found = defaultdict[Any, list[_Pair]](list)
    for mean, present in pairs:
        layout = (mean.device_mesh, mean.placements) if isinstance(mean, DTensor) else None
        found[mean.device, mean.dtype, layout].append((mean, present))
    return found.values()


def _device_of(module: nn.Module) -> torch.device:
    return next((parameter.device for parameter in module.parameters()), torch.device("cpu"))


def _tensors_of(module: nn.Module, copies: dict[int, Any]) -> nn.Module:
    """Copy a module's tensors into modules without a forward, under the same names and with the same ties."""
    part = copies.setdefault(id(module), nn.Module())
    for name, parameter in module._parameters.items():
        if parameter is not None and id(parameter) not in copies:
            copies[id(parameter)] = nn.Parameter(parameter.detach().clone(), requires_grad=False)
        part.register_parameter(name, None if parameter is None else copies[id(parameter)])
    for name, buffer in module._buffers.items():
        if buffer is not None and id(buffer) not in copies:
            copies[id(buffer)] = buffer.detach().clone()
        is_saved = name not in module._non_persistent_buffers_set
        part.register_buffer(name, None if buffer is None else copies[id(buffer)], persistent=is_saved)
    for name, child in module._modules.items():
        if child is not None and id(child) not in copies:
            _tensors_of(child, copies)
        part.add_module(name, None if child is None else copies[id(child)])
    return part
