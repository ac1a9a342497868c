"""The values that `callback_metrics` and similar tables show on a rank, kept across steps and replacements.

[Note: two places] For each result, Lightning caches the value last logged with `on_step=True`. It copies cached
values into the tables that users see (`TABLES`) whenever these are read, and at the end of each batch. It does so at
each read until the results are reset at the end of the epoch, while a table keeps a name forever. So a replacement
needs both. Lightning creates a result only when its name is logged. Until the replacement has logged a name itself,
the lost process's cached value is shown along with the replacement's own results.
"""

# Lightning's results and connectors have no public API.
# pyright: reportPrivateUsage=false

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch

from hyperpod_plugins.errors import CheckpointMismatch
from hyperpod_plugins.lightning.compat import Trainer, override, restore
from hyperpod_plugins.recovery.buffer_states import bytes_of, tensors_in
from hyperpod_plugins.recovery.packing import are_same

TABLES = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
"""Attributes of Lightning behind `callback_metrics`, `logged_metrics` and `progress_bar_metrics`."""
CACHED = "cached"
"""Key of cached values, next to `TABLES`, in the description of a trainer."""
_KINDS = ("callback", "log", "pbar")
"""Names of these tables in the results."""
_LIMIT_BYTES = 2**10
"""Maximum size of one value that is sent to the buddy; larger values are not scalars."""

Tables = dict[str, dict[str, Any]]


class CachedValue(NamedTuple):
    """A value that was logged in a step, and where it is shown."""

    value: torch.Tensor
    name: str
    forked_name: str
    """The name, with the suffix `_step` if the mean over the epoch is also shown."""
    is_logged: bool
    in_progress_bar: bool

    def places(self) -> Iterator[tuple[int, str, Any]]:
        """Index of the table, name and value for each entry that `_ResultCollection.metrics` writes in training."""
        if self.is_logged:
            yield 1, self.forked_name, self.value
        yield 0, self.name, self.value
        yield 0, self.forked_name, self.value
        if self.in_progress_bar:
            yield 2, self.forked_name, self.value.item()


def tables_of(trainer: Trainer) -> Tables:
    """Copies of the tables, without values logged since the tables were last read."""
    return {name: dict(vars(trainer._logger_connector)[name]) for name in TABLES}


def put_tables(trainer: Trainer, tables: Tables) -> None:
    """Set the contents of the trainer's tables, which stay the same objects."""
    for name in TABLES:
        table: dict[str, Any] = vars(trainer._logger_connector)[name]
        table.clear()
        table.update(tables[name])


def cached_in(results: Mapping[str, Mapping[str, Any]]) -> dict[str, CachedValue]:
    """Cached values of results, by key.

    Args:
        results: attributes of each result.
    """
    found = ((key, each["meta"], each["_forward_cache"]) for key, each in results.items() if not each["has_reset"])
    return {
        key: CachedValue(value.detach(), meta.name, meta.forked_name(on_step=True), meta.logger, meta.prog_bar)
        for key, meta, value in found
        if meta.on_step and isinstance(value, torch.Tensor)
    }


def shown(tables: Tables, cached: Mapping[str, CachedValue]) -> Tables:
    """The tables with cached values copied into them, as Lightning does when they are read."""
    found = {name: dict(table) for name, table in tables.items()}
    for each in cached.values():
        for index, name, value in each.places():
            found[TABLES[index]][name] = value
    return found


class ShownValues:
    """The logged values that this rank shows; a `RankLocalState`.

    Its state is what the tables will show at the end of the present batch, and the cached values. It is written once
    per step, so names, types and shapes that do not change between steps are written once, as JSON, and values as
    bytes.
    """

    def __init__(self, trainer: Trainer) -> None:
        """Use the results of `trainer`'s training loop."""
        self._trainer = trainer
        self._results: Any = trainer.fit_loop.epoch_loop._results
        self._batches: Any = trainer.fit_loop.epoch_loop.batch_progress
        self._given: dict[str, CachedValue] = {}
        """Values cached by the lost process, or by this process before it re-entered the loops."""
        self._tensors: list[torch.Tensor] = []
        """Cached values when the state was last written."""
        self._types: list[tuple[Any, ...]] = []
        self._covered: list[set[str]] = [set(), set(), set()]
        """Names in each table that show cached values."""
        self._cached: dict[str, Any] = {}
        self._others: list[dict[str, Any]] = []
        """The other values of the tables at that time."""
        self._other_versions: list[int] = []
        self._packed_others: dict[str, Any] = {}

    # -- part of the trainer's description --------------------------------------------------------------------------

    def described(self, begun: tuple[Tables, Mapping[str, Mapping[str, Any]]] | None = None) -> Tables:
        """Shown and cached values, in the form that `give` takes.

        Args:
            begun: tables and attributes of results when the present step began; None outside steps.
        """
        tables, attributes = begun or (tables_of(self._trainer), self._attributes())
        cached = self._without_logged(attributes) | cached_in(attributes)
        found = shown(tables, cached) if self._is_in_batch else tables
        return {**found, CACHED: {key: list(each) for key, each in cached.items()}}

    def load_described(self, described: Mapping[str, Any]) -> None:
        """Show the values that `described` returned on this or another rank.

        Raises:
            CheckpointMismatch: `described` has another form.
        """
        found: dict[str, dict[Any, Any]] = {}
        for name in (*TABLES, CACHED):
            table = described.get(name, {}) if isinstance(described, dict) else None
            if not isinstance(table, dict):
                raise CheckpointMismatch("the logged values that a rank has shown are not a table")
            found[name] = table
        cached = {key: _checked(key, each) for key, each in found.pop(CACHED).items()}
        tables = {name: {key: self._placed(each) for key, each in table.items()} for name, table in found.items()}
        put_tables(self._trainer, tables)
        self._show_given({key: each._replace(value=self._placed(each.value)) for key, each in cached.items()})

    def starts(self) -> None:
        """At the beginning of a batch, show given cached values in the tables, as if the results had cached them."""
        if self._given:
            put_tables(self._trainer, shown(tables_of(self._trainer), self._without_logged(self._attributes())))

    # -- RankLocalState ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Cached values, and the other values of the tables; the same objects as before if nothing was logged."""
        found = self._present()
        if not (found or any(self._tables())):
            return {"cached": {}, "others": {}}
        tensors = [value for _, _, value in found]
        if not (len(tensors) == len(self._tensors) and all(map(is_, tensors, self._tensors))):
            types = [(key, value.dtype, value.shape, value.is_cpu) for key, _, value in found]
            if types != self._types:
                self._cached = {"forms": self._write_forms(found)}
                self._types = types
            self._cached = {**self._cached, "data": bytes_of(tensors)}
            self._tensors = tensors
        return {"cached": self._cached if tensors else {}, "others": self._pack_others()}

    def load_state_dict(self, state_dict: dict[str, Any], leave: Collection[str] = ()) -> None:
        """Show these values, except for parts in `leave`, which keep the present values given by another rank."""
        if not state_dict:
            return
        tables, cached = self._unpacked(state_dict)
        for name, table in tables_of(self._trainer).items():
            stays = {key: value for key, value in table.items() if _part(name, key) in leave or not _is_plain(value)}
            theirs = {key: value for key, value in tables[name].items() if _part(name, key) not in leave}
            merged = stays | theirs
            tables[name] = {key: merged[key] for key in (*table, *merged) if key in merged}  # the other ranks' order
        stays = {key: each for key, each in self._given.items() if _part(CACHED, key) in leave}
        theirs = {key: each for key, each in cached.items() if _part(CACHED, key) not in leave}
        put_tables(self._trainer, tables)
        self._show_given(stays | theirs)

    def written(self, before: dict[str, Any], now: dict[str, Any] | None = None) -> set[str]:
        """Parts that hooks have written since `before`: in a validation, at the end of an epoch, or by logging."""
        if not before:
            return set()
        tables, cached = self._unpacked(before)
        present, present_cached = self._unpacked(self.state_dict() if now is None else now)
        pairs = [(name, tables[name], present[name]) for name in TABLES]
        values = [{key: each.value for key, each in every.items()} for every in (cached, present_cached)]
        return {
            _part(name, key)
            for name, old, new in [*pairs, (CACHED, *values)]
            for key in old.keys() | new.keys()
            if key not in old or key not in new or not _are_equal(old[key], new[key])
        }

    def fitting(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Nothing: a job that resumes from another job's checkpoint shows nothing at first, as without recovery."""
        return {}

    def drop_given(self) -> None:
        """Stop showing the given cached values, as at the end of an epoch."""
        self._given = {}
        restore(self._results, "metrics", "reset")

    # -- internals --------------------------------------------------------------------------------------------------

    @property
    def _is_in_batch(self) -> bool:
        """Whether a batch is in progress: cached values will be copied into the tables before the next one."""
        return self._batches.current.ready != self._batches.current.completed

    def _attributes(self) -> dict[str, dict[str, Any]]:
        return {key: vars(each) for key, each in self._results.items()}

    def _without_logged(self, results: Mapping[str, Mapping[str, Any]]) -> dict[str, CachedValue]:
        """The given values, except for those that have been logged again."""
        if not self._given:
            return {}
        return {key: each for key, each in self._given.items() if not _is_cached(results.get(key))}

    def _show_given(self, cached: dict[str, CachedValue]) -> None:
        """Make the results also show these values, until they are logged again or the results are reset."""
        self.drop_given()
        if not cached:
            return
        results, self._given = self._results, cached

        def metrics(on_step: bool) -> dict[str, dict[str, Any]]:
            found = type(results).metrics(results, on_step)
            if on_step:
                for each in self._without_logged(self._attributes()).values():
                    for index, name, value in each.places():
                        found[_KINDS[index]].setdefault(name, value)
            return found

        def reset(metrics: bool | None = None, fx: str | None = None) -> None:
            type(results).reset(results, metrics, fx)
            # With arguments, `log` resets only one hook's values, in the first batch that this process runs.
            if metrics is None and fx is None:
                self.drop_given()

        override(results, "metrics", metrics)
        override(results, "reset", reset)

    def _present(self) -> list[tuple[str, Any, torch.Tensor]]:
        """Cached values, each with its key and its Lightning metadata, or a `CachedValue` if it was given."""
        found: list[tuple[str, Any, torch.Tensor]] = []
        for key, result in self._results.items():
            attributes = vars(result)
            value, meta = attributes["_forward_cache"], attributes["meta"]
            if type(value) is torch.Tensor and meta.on_step and not attributes["has_reset"] and _is_plain(value):
                found.append((key, meta, value))
        if self._given:
            given = self._without_logged(self._attributes())
            found += [(key, each, each.value) for key, each in given.items() if _is_plain(each.value)]
        return found

    def _write_forms(self, found: Sequence[tuple[str, Any, torch.Tensor]]) -> str:
        """Names, types and shapes of the cached values, and where they are shown, as JSON."""
        self._covered = [set(), set(), set()]
        forms: list[list[Any]] = []
        for key, known, value in found:
            is_given = isinstance(known, CachedValue)
            forked = known.forked_name if is_given else known.forked_name(on_step=True)
            flags = known[3:] if is_given else (known.logger, known.prog_bar)
            for index, name, _ in CachedValue(torch.zeros(()), known.name, forked, *flags).places():
                self._covered[index].add(name)
            forms.append([key, *_form(value), known.name, forked, *flags])
        return json.dumps(forms)

    def _pack_others(self) -> dict[str, Any]:
        """Pack the table values that cached values do not replace at the end of this batch."""
        is_in_batch, covered = bool(self._tensors) and self._is_in_batch, self._covered
        others = [
            {key: value for key, value in table.items() if type(key) is str and not (is_in_batch and key in names)}
            for table, names in zip(self._tables(), covered, strict=True)
        ]
        versions = [each._version for table in others for each in table.values() if _counts_writes(each)]
        is_known = len(others) == len(self._others) and all(map(_are_identical, others, self._others))
        if is_known and versions == self._other_versions:
            return self._packed_others
        self._others, self._other_versions = others, versions
        found = [(index, key, value) for index, table in enumerate(others) for key, value in table.items()]
        tensors = [each for each in found if isinstance(each[2], torch.Tensor) and _is_plain(each[2])]
        numbers = [each for each in found if not isinstance(each[2], torch.Tensor) and _is_plain(each[2])]
        self._packed_others = {"numbers": json.dumps(numbers)} if numbers else {}
        if tensors:
            self._packed_others["forms"] = json.dumps([[index, key, *_form(value)] for index, key, value in tensors])
            self._packed_others["data"] = bytes_of([value for _, _, value in tensors])
        return self._packed_others

    def _tables(self) -> list[dict[str, Any]]:
        present = vars(self._trainer._logger_connector)
        return [present[name] for name in TABLES]

    def _unpacked(self, state: Mapping[str, Any]) -> tuple[Tables, dict[str, CachedValue]]:
        """Unpack a state: what the tables show when the batch has ended, and the cached values.

        Raises:
            CheckpointMismatch: the state is malformed.
        """
        try:
            cached, others = state["cached"], state["others"]
            forms = json.loads(cached.get("forms", "[]"))
            values = self._tensors_of([form[:4] for form in forms], cached)
            own = {form[0]: _checked(form[0], [value, *form[4:]]) for form, value in zip(forms, values, strict=True)}
            tables = shown({name: {} for name in TABLES}, own)
            forms = json.loads(others.get("forms", "[]"))
            values = self._tensors_of([form[1:] for form in forms], others)
            named = [(form[0], form[1], value) for form, value in zip(forms, values, strict=True)]
            for index, name, value in (*named, *json.loads(others.get("numbers", "[]"))):
                if not (type(name) is str and _is_plain(value)):
                    raise TypeError(f"{name!r} is shown as a {type(value).__name__}")
                tables[TABLES[index]][name] = value
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise CheckpointMismatch(f"the logged values that a rank has shown cannot be read: {error!r}") from error
        return tables, own

    def _placed(self, value: Any) -> Any:
        """Move a value that another rank had on its device to this rank's device."""
        is_there = isinstance(value, torch.Tensor) and not value.is_cpu
        return value.to(self._trainer.strategy.root_device) if is_there else value

    def _tensors_of(self, forms: Sequence[Sequence[Any]], state: Mapping[str, Any]) -> list[torch.Tensor]:
        """Read values, given name, type, shape and whether it was on the host, and put each on the host or device."""
        found = tensors_in(state.get("data", b""), [(name, kind, shape) for name, kind, shape, _ in forms])
        device: torch.device = self._trainer.strategy.root_device
        return [value if form[3] else value.to(device) for (_, value), form in zip(found, forms, strict=True)]


def _is_cached(attributes: Mapping[str, Any] | None) -> bool:
    """Whether a result, given its attributes, has a cached value."""
    if attributes is None or attributes["has_reset"]:
        return False
    return isinstance(attributes["_forward_cache"], torch.Tensor) and attributes["meta"].on_step


def _is_plain(value: Any) -> bool:
    """Whether a value is sent to the buddy: a small plain tensor, number or string, or None."""
    if isinstance(value, torch.Tensor):
        return type(value) is torch.Tensor and value.nbytes <= _LIMIT_BYTES and value.layout is torch.strided
    return value is None or type(value) in (bool, int, float, str)


def _counts_writes(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_inference()


def _are_identical(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(map(is_, one.values(), other.values()))


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two values are bitwise equal; a float of the progress bar may be NaN."""
    if isinstance(one, float) and isinstance(other, float):
        return repr(one) == repr(other)
    return are_same(one, other)


def _form(value: torch.Tensor) -> tuple[str, list[int], bool]:
    """Type, shape, and whether the tensor is in host memory."""
    return str(value.dtype), list(value.shape), value.is_cpu


def _part(table: str, key: str) -> str:
    """Name of one value, for `leave`."""
    return f"{table} {key}"


def _checked(key: Any, values: Any) -> CachedValue:
    """Validate a cached value written by another process.

    Raises:
        CheckpointMismatch: the value has another form.
    """
    match values:
        case [torch.Tensor() as value, str(name), str(forked), bool(is_logged), bool(in_bar)] if isinstance(key, str):
            if not in_bar or value.numel() == 1:
                return CachedValue(value, name, forked, is_logged, in_bar)
        case _:
            pass
    raise CheckpointMismatch(f"what a rank has cached of {key!r} is not a logged value")
