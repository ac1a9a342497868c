"""Rank-local state of a Trainer: metrics in modules, logged means, and the registration of all such state."""

# Lightning's results and metrics have no public API.
# pyright: reportPrivateUsage=false

import copy
from collections.abc import Callable, Collection, Mapping
from functools import partial
from operator import is_
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torchmetrics import Metric

from hyperpod_plugins.errors import CheckpointMismatch
from hyperpod_plugins.lightning.compat import (
    Callback,
    LightningDataModule,
    LightningModule,
    Trainer,
    callbacks_of,
    is_overridden,
    original,
    override,
    restore,
)
from hyperpod_plugins.lightning.shown_values import ShownValues
from hyperpod_plugins.lightning.weight_averaging import AveragedBuffers, CallbackAverage
from hyperpod_plugins.recovery.attributes import ATTRIBUTES, PlainAttributes, modules_of_program
from hyperpod_plugins.recovery.buffer_states import BufferStates, TensorSpecCache, packed_tensors, unpacked_tensors
from hyperpod_plugins.recovery.local_objects import RankLocalState
from hyperpod_plugins.recovery.local_state import BUFFERS, EPOCH_SUFFIX, LocalStates
from hyperpod_plugins.recovery.module_settings import Modes, ModuleSettings
from hyperpod_plugins.recovery.program_collectives import is_of_program
from hyperpod_plugins.recovery.undo import copied_value


def metrics_of(trainer: Trainer) -> dict[str, Metric]:
    """The torchmetrics objects of a Trainer's module, and those that its callbacks have as attributes, by name."""
    module = trainer.lightning_module
    found = {name: part for name, part in module.named_modules() if isinstance(part, Metric)}
    for index, callback in enumerate(callbacks_of(trainer)):
        for key, value in vars(callback).items():
            if isinstance(value, nn.Module) and value is not module:
                parts = {f"callback {index}.{key}.{name}": part for name, part in value.named_modules()}
                found |= {name: part for name, part in parts.items() if isinstance(part, Metric)}
    return found


class MetricStates:
    """State of torchmetrics objects; a `RankLocalState`."""

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self._metrics = dict(metrics)

    def state_dict(self) -> dict[str, Any]:
        """States of the metrics that were updated; cached results are left out, and computed again."""
        return {
            name: {
                "count": metric._update_count,
                "values": {key: copied_value(vars(metric)[key]) for key in metric._defaults},
            }
            for name, metric in self._metrics.items()
            if metric._update_count
        }

    @property
    def is_empty(self) -> bool:
        """Whether there are no metrics."""
        return not self._metrics

    def load_state_dict(self, state_dict: dict[str, Any], leave: Collection[str] = ()) -> None:
        """Continue from these states, except for the metrics in `leave`; reset metrics that have no saved state."""
        for name, metric in self._metrics.items():
            if name in leave:
                continue
            if (metric._update_count or metric._is_synced) and name not in state_dict:
                metric.reset()
            # a fault may have interrupted its computation, and one without updates may have been computed, too
            metric._computed, metric._is_synced, metric._cache = None, False, None
            metric._to_sync, metric._should_unsync, metric._enable_grad = metric.sync_on_compute, True, False
        for name in state_dict.keys() - set(leave):
            saved = state_dict[name]
            metric = self._metrics[name]
            _fill(metric, saved["values"])
            metric._update_count = saved["count"]

    def forget_computed(self) -> None:
        """Forget cached results: a replacement has none, and would be alone in the collective that computes them."""
        for metric in self._metrics.values():
            metric._computed = None

    def written(self, before: dict[str, Any], now: dict[str, Any] | None = None) -> set[str]:
        """Nothing: an earlier state is closer to that of the lost process than a metric that starts from zero."""
        return set()

    def fitting(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """States of the metrics that are here, too, with the same names and shapes."""
        return {
            name: saved
            for name, saved in state_dict.items()
            if name in self._metrics and _shapes(saved["values"]) == _shapes(self._metrics[name]._defaults)
        }


class _Sums(NamedTuple):
    """Logged sums when they were last packed, which serves again while no counter of writes has changed."""

    names: list[tuple[str, str]]
    tensors: list[torch.Tensor]
    versions: list[int]
    packed: dict[str, Any]


class LoggedMeans:
    """Sums of what was logged in the present epoch with `on_epoch=True`; a `RankLocalState`.

    A replacement does not know in advance what it will log, so each sum is restored when its name is first logged.
    Sums that are not logged again before the epoch ends are restored at that point, in the order of the other ranks,
    because synchronized sums are reduced in that order.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._results: Any = trainer.fit_loop.epoch_loop._results
        self._progress: Any = trainer.fit_loop.epoch_progress
        self._awaited: dict[str, Any] = {}
        self._begun: list[Any] = []
        self._begun_before: list[Any] = []
        self._forms: dict[str, dict[str, Any]] = {}
        self._written_forms = TensorSpecCache()
        self._known = _Sums([], [], [], {})

    def forms(self, begun: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, dict[str, Any]]:
        """Arguments of `log` for each value that is reduced at the end of the epoch, in the order of logging.

        Args:
            begun: attributes of the results when the present step began; None for the present ones.
        """
        present = {key: vars(result) for key, result in self._results.items()} if begun is None else begun
        return self._forms | {
            key: _form(each["meta"])
            for key, each in present.items()
            if each["meta"].on_epoch
            and not each["has_reset"]
            and each["meta"].sync.group is None  # other ranks do not have that group object
        }

    def forget_computed(self) -> None:
        """Forget cached results, as `MetricStates` does."""
        for result in self._results.values():
            _forget_computed(result)

    def expect(self, forms: dict[str, dict[str, Any]]) -> None:
        """Take the `forms` of a rank that has logged in the present epoch."""
        self._forms = forms

    def restore_missing(self, module: nn.Module, reduce: Callable[..., Any]) -> None:
        """Restore, at the end of the epoch, the sums that have not been logged since `expect`.

        All are computed again then, for a rank that takes part anew has to: a rank that had its result would leave the
        others alone in the collective.

        Args:
            module: whose metrics may have been logged.
            reduce: the strategy's `reduce`.
        """
        results, forms, self._forms = self._results, self._forms, {}
        if not forms:
            return
        override(results, "update_metrics", _nothing)
        self.forget_computed()
        for key, form in forms.items():
            if key in results and not results[key].has_reset:
                continue
            attribute = form["metric_attribute"]
            value = torch.zeros(()) if attribute is None else module.get_submodule(attribute)
            results.log(**form, value=value, sync_dist_fn=reduce)
            result = results[key]
            if attribute is None:
                _fill(result, self._awaited.get(key, result._defaults))  # missing if the buddy was lost, too
            else:
                result.value = value
            result._update_count, result.has_reset = 1, False
        ordered = {key: results[key] for key in (*forms, *results)}
        results.clear()
        results.update(ordered)
        self.drop_saved()

    def state_dict(self) -> dict[str, Any]:
        """The sums, by Lightning's names; the states of metrics in modules are in `MetricStates`."""
        awaited = [(key, each) for key, each in self._awaited.items() if not self._has_begun(key)]
        sums: dict[tuple[str, str], torch.Tensor] = {
            (key, name): value for key, each in awaited for name, value in each.items()
        }
        for key, result in self._results.items():
            if result.is_tensor and result.meta.on_epoch and not result.has_reset:
                values = vars(result)
                for name in result._defaults:
                    sums[key, name] = values[name]
        versions = [-1 if each.is_inference() else each._version for each in sums.values()]  # -1: not counted
        tensors, known = [*sums.values()], self._known
        if (
            -1 in versions
            or versions != known.versions
            or [*sums] != known.names
            or not all(map(is_, tensors, known.tensors))
        ):
            self._known = _Sums([*sums], tensors, versions, packed_tensors(sums, self._written_forms))
        return self._known.packed

    def written(self, before: dict[str, Any], now: dict[str, Any] | None = None) -> set[str]:
        """Nothing: values logged after a step add to sums that a replacement can get from no other rank."""
        return set()

    def fitting(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Everything: a sum is only used once its name is logged."""
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any], leave: Collection[str] = ()) -> None:
        """Start each sum that is first logged from now on, in the present epoch, from its saved value."""
        self.drop_saved()
        results, self._awaited, epoch = self._results, _sums_in(state_dict), None
        updated = original(results, "update_metrics")

        def update(key: str, value: Any, batch_size: int) -> None:
            nonlocal epoch
            now = self._progress.current.ready
            epoch = now if epoch is None else epoch
            if epoch == now and not self._has_begun(key):  # a step that is run again has a new result object
                self._begun.append(results[key])
                _fill(results[key], self._awaited.get(key, {}))
            updated(key, value, batch_size)

        override(results, "update_metrics", update)

    def take_awaited(self) -> None:
        """Give what this process has logged before its step the saved sums, once it has them: they contain it."""
        for key, result in self._results.items():
            if key in self._awaited and not result.has_reset and not self._has_begun(key):
                self._begun.append(result)
                _fill(result, self._awaited[key])

    @property
    def results(self) -> Any:
        """Lightning's collection of results."""
        return self._results

    @property
    def begun(self) -> list[Any]:
        """Copy of the list of results that have begun with their saved sums."""
        return [*self._begun]

    @begun.setter
    def begun(self, begun: list[Any]) -> None:
        self._begun = [*begun]

    def begin(self) -> None:
        """Remember, at the beginning of a step, which sums have begun."""
        self._begun_before = [*self._begun]

    def undo(self) -> None:
        """Forget the sums that began in the step, which is run again with its values restored."""
        self._begun = [*self._begun_before]

    def drop_saved(self) -> None:
        """Drop the saved sums: an epoch begins, and later sums start from zero."""
        restore(self._results, "update_metrics")
        self._awaited, self._begun = {}, []

    def _has_begun(self, key: str) -> bool:
        result = self._results.get(key)
        return any(result is each for each in self._begun)


class CountedStart:
    """The states of metrics, and of objects that the program has registered, at one moment."""

    def __init__(
        self,
        metrics: MetricStates,
        registered: Mapping[str, RankLocalState],
        given: Mapping[str, dict[str, Any]] | None = None,
    ) -> None:
        """Copy them, but for those that are given."""
        given = given or {}
        self._metrics, self._registered = metrics, registered
        self._counted = given.get(METRICS_OF_EPOCH, metrics.state_dict())
        self._states = {name: given.get(name, each.state_dict()) for name, each in registered.items()}

    @property
    def states(self) -> dict[str, dict[str, Any]]:
        """The copies, by the names under which the objects are registered."""
        return ({} if self._metrics.is_empty else {METRICS_OF_EPOCH: self._counted}) | self._states

    def put_back(self) -> None:
        """Restore them; they are copied once more, since what is put back may change in place."""
        self._metrics.load_state_dict(copy.deepcopy(self._counted))
        for name, state in self._states.items():
            self._registered[name].load_state_dict(state)


class LoggedStart:
    """What has been logged for the epoch at one moment."""

    def __init__(self, means: LoggedMeans, sums: dict[str, Any] | None = None) -> None:
        """Copy it, but for the sums if they are given; results of former epochs, all of which are reset, are left out.

        Args:
            means: of the trainer.
            sums: see `LoggedMeans.state_dict`.
        """
        self._means = means
        results: dict[str, Any] = means.results
        if all(each.has_reset or not each._update_count for each in results.values()):
            results = {}
        self._results = [(key, result, dict(vars(result))) for key, result in results.items()]
        self._begun = means.begun
        found = {} if sums is None else _sums_in(sums)
        for key, result, values in self._results if sums is not None else ():
            if result.is_tensor and result.meta.on_epoch:
                values.update({name: found.get(key, {}).get(name, zero) for name, zero in result._defaults.items()})

    def put_back(self) -> None:
        """Restore it."""
        results = self._means.results
        results.clear()
        for key, result, values in self._results:
            vars(result).update(values)
            results[key] = result
        self._means.begun = self._begun


def _sums_in(packed: dict[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
    """Inverse of `packed_tensors` for sums: the tensors of each, by name.

    Raises:
        CheckpointMismatch: the names are not those of sums.
    """
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, value in unpacked_tensors(packed):
        match name:
            case [str(key), str(part)]:
                found.setdefault(key, {})[part] = value
            case _:
                raise CheckpointMismatch(f"{name!r} is not the name of a logged sum")
    return found


def _form(meta: Any) -> dict[str, Any]:
    """The arguments of `log` that produce this metadata, all of plain types."""
    names = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx")
    form = {name: vars(meta)[name] for name in (*names, "metric_attribute")}
    sync = meta.sync
    return {
        **form,
        "reduce_fx": meta.reduce_fx.__name__,
        "sync_dist": sync.should,
        "rank_zero_only": sync.rank_zero_only,
    }


def _shapes(values: dict[str, Any]) -> dict[str, torch.Size | None]:
    """Shapes of a metric's states; None for lists."""
    return {name: value.shape if isinstance(value, torch.Tensor) else None for name, value in values.items()}


def _forget_computed(result: Any) -> None:
    """Forget the cached value of a result, and of the metric that it shows."""
    result._computed = None
    if not result.is_tensor:
        result.value._computed = None


def _nothing(*_: Any) -> None:
    return None


def _fill(metric: Any, values: dict[str, Any]) -> None:
    """Set a metric's states to values from elsewhere, on the metric's device."""
    for name, value in values.items():
        present = vars(metric)[name]
        is_tensor = isinstance(present, torch.Tensor) and isinstance(value, torch.Tensor)
        vars(metric)[name] = value.to(present.device) if is_tensor else value


_HYPERPARAMETERS = "_hparams", "_hparams_name", "_hparams_initial"
"""Attributes that modules and data modules have from the first look at `hparams` on."""
_DATA_MODULE = LightningDataModule.__mro__
_OF_OPTIMIZERS = frozenset({*vars(torch.optim.SGD([torch.zeros(1)])), "step", "_opt_called"})
"""Attributes that torch, and its schedulers, give to each optimizer."""
_NOT_FOLLOWED = frozenset({"torch", "hyperpod_plugins"})
"""Packages whose optimizers keep all their state where the state of a fit has it."""
METRICS_OF_EPOCH, MEANS_OF_EPOCH = f"metrics {EPOCH_SUFFIX}", f"logged means {EPOCH_SUFFIX}"
"""Names under which they are registered."""


def attributes_of(trainer: Trainer) -> dict[str, PlainAttributes]:
    """Python attributes of the program's modules, data module, callbacks and optimizers, by the name of their state.

    Callbacks of Lightning, and callbacks with a `state_dict`, keep their state in other ways. The Trainer keeps them,
    from its first fit on: what changes is compared with that.
    """
    callbacks = callbacks_of(trainer)
    of_callbacks = [
        (f"callback {index} ({type(each).__name__})", each)
        for index, each in enumerate(callbacks)
        if not (is_of_lightning(type(each)) or is_overridden("state_dict", each, parent=Callback))
    ]
    of_module, data = modules_of_program(trainer.lightning_module), getattr(trainer, "datamodule", None)
    if data is not None and all(base in _DATA_MODULE or is_of_program(base) for base in type(data).__mro__):
        of_module.append(("the data module", data))
    of_library = {*vars(LightningModule()), *vars(LightningDataModule()), *_HYPERPARAMETERS}
    module, metrics = trainer.lightning_module, metrics_of(trainer)
    known: dict[str, PlainAttributes] = vars(trainer).setdefault("_hyperpod_attributes", {})
    for name, owners, ignored in (
        (ATTRIBUTES, of_module, of_library),
        (f"{ATTRIBUTES} of callbacks", of_callbacks, ("log", "log_dict")),  # methods that Lightning adds
        (f"{ATTRIBUTES} of optimizers", optimizers_followed(trainer), _OF_OPTIMIZERS),
    ):
        former = known.get(name)
        if former is None or not former.is_of(owners):
            left_out, settings = [*callbacks, *metrics.values()], None
            if owners is of_module:
                settings = former and former.settings
                if settings is None or settings.model is not module:
                    settings = ModuleSettings(module, partial(_modes_to_restore, trainer, module))
            known[name] = PlainAttributes(
                owners, ignored=ignored, model=module, left_out=left_out, former=former, settings=settings
            )
    return known


def _modes_to_restore(trainer: Trainer, module: LightningModule) -> Modes | None:
    """While an evaluation has the model in evaluation mode: the modes that Lightning restores at its end."""
    if module.training or trainer.training:
        return None
    loop = cast("Any", trainer._active_loop)  # of an evaluation
    return None if loop is None else loop._module_mode.mode


def optimizers_followed(trainer: Trainer) -> list[tuple[str, Optimizer]]:
    """Name and object of each optimizer of a class that is not torch's, and of those that they wrap.

    Such a class may keep a state in attributes, beside what all optimizers have.
    """
    found = [(f"optimizer {index} ({type(each).__name__})", each) for index, each in enumerate(trainer.optimizers)]
    for name, optimizer in found:
        for key, value in vars(optimizer).items():
            if isinstance(value, Optimizer) and all(each is not value for _, each in found):
                found.append((f"{name}.{key}", value))
    return [(name, each) for name, each in found if type(each).__module__.partition(".")[0] not in _NOT_FOLLOWED]


def is_of_lightning(cls: type[Callback]) -> bool:
    """Whether Lightning or this package defines the callback, or a class other than `Callback` that it derives from."""
    return not all(base in (Callback, object) or is_of_program(base) for base in cls.__mro__)


def load_local_state(trainer: Trainer, values: dict[str, dict[str, Any]]) -> None:
    """Restore buffers and metrics from what `LocalStates.state` returned after a fit."""
    buffers, metrics = BufferStates(trainer.lightning_module), MetricStates(metrics_of(trainer))
    for name, state in ((BUFFERS, buffers), (METRICS_OF_EPOCH, metrics)):
        state.load_state_dict(values.get(name, {}))


def load_attributes(trainer: Trainer, values: dict[str, dict[str, Any]]) -> None:
    """Restore attributes from what `LocalStates.state` returned after a fit."""
    for name, attributes in attributes_of(trainer).items():
        attributes.load_state_dict(values.get(name, {}))


def register_all(
    states: LocalStates, module: nn.Module, trainer: Trainer, average: CallbackAverage | None
) -> tuple[LoggedMeans, ShownValues, MetricStates]:
    """Register a Trainer's rank-local state, and return the objects that must be told about steps and repairs."""
    means, values, buffers = LoggedMeans(trainer), ShownValues(trainer), BufferStates(module)
    metrics = MetricStates(metrics_of(trainer))
    states.register(BUFFERS, buffers)  # a step may register the first one
    if not metrics.is_empty:  # the same on all ranks
        states.register(METRICS_OF_EPOCH, metrics)
    if average is not None:
        states.register("averaged buffers", AveragedBuffers(average.average, module, buffers), is_repeated=True)
    states.register(MEANS_OF_EPOCH, means)
    states.register("logged values", values, is_repeated=True)
    for name, attributes in attributes_of(trainer).items():
        if not attributes.is_empty:
            states.register(name, attributes)
    return means, values, metrics
