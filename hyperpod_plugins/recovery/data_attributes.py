"""Attributes of datasets, samplers and transforms that a program changes between the epochs of its training.

A curriculum is an ordinary example: `dataset.level += 1` in `on_train_epoch_end`. A replacement reads its first batch
before it has joined the others, so these attributes cannot come with the rest of a rank's state. They are noted where
the training reaches certain positions, such as the first batch of an epoch, and a process that enters the training at a
position begins with what was noted last before it.

[Note: changes within an epoch] Reading may change a dataset, too: a cache fills, a file is opened, a counter grows. A
process that enters an epoch reads it from its beginning, so this happens there again. What the program itself changes
while an epoch is being read cannot be repeated in this way, and is refused. To tell the two apart, attributes are
compared before and after a batch is read: at the first batches, and at fewer and fewer batches after that.
"""

# The iterators of a DataLoader have no public names.
# pyright: reportPrivateUsage=false

import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from hyperpod_plugins.errors import ConfigError, StateLost, format_list
from hyperpod_plugins.recovery.attribute_values import CONTAINERS, MAX_ENTRIES, num_entries
from hyperpod_plugins.recovery.attributes import PlainAttributes
from hyperpod_plugins.recovery.packing import pack, unpack
from hyperpod_plugins.recovery.program_collectives import is_of_program

DataPlace = tuple[int, int, int]
"""Number of completed epochs, place in the epoch, and batch; later places are larger."""
_LIMIT_BYTES = 2**20
"""Largest attributes of one kind of loader that are noted."""
_NUM_NOTED = 64
"""So many changes are remembered."""
_NUM_LOOKS = 32
_NUM_COPIED = 2**14
"""Most entries of a container of a dataset that is copied and sent."""
_OF_LOADER = ("dataset", "sampler", "batch_sampler", "collate_fn")
_HELD = (*_OF_LOADER, "datasets", "data_source", "_sampler")
_ADVICE = "Change them between two epochs, in on_train_epoch_start or on_train_epoch_end."
_OF_SAMPLERS = ("epoch",)
"""Attributes that `set_epoch` gives to a sampler: loops call it anyway."""


def objects_of_loader(loader: object) -> Iterator[tuple[str, object]]:
    """Path and object of each dataset, sampler and function of the program's classes that a loader reads with."""
    queue: list[tuple[str, Any]] = [("loader", loader)]
    known = {id(loader)}
    for path, owner in queue:
        is_own = is_of_program(type(owner)) and not isinstance(owner, nn.Module)
        if is_own and isinstance(getattr(owner, "__dict__", None), dict) and not _has_state(owner):
            yield path, owner
        values = vars(owner) if isinstance(getattr(owner, "__dict__", None), dict) else {}
        names = [*values] if isinstance(owner, Dataset | Sampler) and is_own else [n for n in _HELD if n in values]
        for name in names:
            value = values[name]
            each = [*value] if type(value) in (list, tuple) and len(value) <= MAX_ENTRIES else [value]
            for index, part in enumerate(each):
                is_followed = isinstance(part, Dataset | Sampler | DataLoader) or name in _HELD
                if is_followed and id(part) not in known and not isinstance(part, type) and not is_function(part):
                    known.add(id(part))
                    queue.append((f"{path}.{name}" if len(each) == 1 else f"{path}.{name}[{index}]", part))


def is_function(value: object) -> bool:
    """Whether a value is a function, which has no attributes that a program would change."""
    return isinstance(value, types.FunctionType | types.MethodType | types.BuiltinFunctionType)


def _has_state(value: object) -> bool:
    """Whether a loader is continued by its own `state_dict`."""
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


def watch_reads(
    loader: DataLoader[Any], start_workers: Callable[[], object], fetch: Callable[[Callable[[], Any]], Any]
) -> None:
    """Have the iterators of a loader call functions of the caller.

    Args:
        loader: that is about to be used.
        start_workers: called before workers of the loader are started.
        fetch: given a function that reads a batch in this process; returns what it has read.
    """
    own = weakref.ref(loader)  # in a reference cycle, the loader's workers would take seconds to exit
    make = vars(loader).get("_get_iterator") or partial(_made_by_class, own)
    if isinstance(make, partial) and make.func is _watched_iterator:  # the loader is used once more
        make = make.args[0]
    vars(loader)["_get_iterator"] = partial(_watched_iterator, make, own, start_workers, fetch)


def _made_by_class(own: Any) -> Any:
    loader = own()
    return type(loader)._get_iterator(loader)


def _watched_iterator(
    make: Callable[[], Any], own: Any, start_workers: Callable[[], object], fetch: Callable[[Callable[[], Any]], Any]
) -> Any:
    if own().num_workers:
        start_workers()
    iterator = make()
    if isinstance(iterator, _SingleProcessDataLoaderIter):
        vars(iterator)["_next_data"] = partial(fetch, iterator._next_data)
    return iterator


class DataAttributes:
    """The attributes of what loaders read with, at the positions of a training; for the main thread only."""

    def __init__(self, *, is_elastic: bool = False) -> None:
        """Begin without loaders.

        Args:
            is_elastic: whether the job changes its size, so that a replacement may have no predecessor.
        """
        self._is_elastic = is_elastic
        self._owners: dict[str, object] = {}
        self._ignored: set[str] = set()
        self._by_reading: set[str] = set()
        """Attributes that reading has changed, by owner and name."""
        self._long: dict[str, tuple[Any, ...]] = {}
        """Long containers, which are neither copied nor sent, with what tells whether they are the same."""
        self._attributes = PlainAttributes(())
        self._model: nn.Module | None = None
        self._left_out: Sequence[object] = ()
        self._noted: list[tuple[DataPlace, bytes]] = []
        """Each change, and where it was found."""
        self._forked: list[tuple[DataPlace, bytes]] = []
        """The same of the copies that loader workers have."""
        self._entered: dict[str, Any] = {}
        """State with which the training was entered, of loaders that do not exist yet."""
        self._place: DataPlace | None = None
        """Where the training is being entered; None once it has been."""
        self._num_fetched = 0

    @property
    def is_empty(self) -> bool:
        """Whether loaders read with no object of the program's classes."""
        return not self._owners

    @property
    def noted(self) -> bytes:
        """What has been noted, packed, to be given to `load_noted` in another process."""
        return pack([self._noted, self._forked])

    def load_noted(self, noted: bytes) -> None:
        """Take over what this process's predecessor has noted."""
        self._noted, self._forked = ([(tuple(place), data) for place, data in each] for each in unpack(noted))

    def follow(self, name: str, loader: object, *, model: nn.Module, left_out: Sequence[object]) -> None:
        """Follow what a loader reads with.

        Args:
            name: of the loader, without a dot, the same on all ranks.
            loader: that is about to be used.
            model: whose modules are restored in other ways.
            left_out: objects that are.
        """
        found = {f"{name}.{path}": each for path, each in objects_of_loader(loader)}
        others = {key: each for key, each in self._owners.items() if key.partition(".")[0] != name}
        ids = {id(each) for each in others.values()} | {id(each) for each in left_out}
        former, self._model, self._left_out = self._owners, model, left_out
        self._owners = others | {key: each for key, each in found.items() if id(each) not in ids}
        if not self._attributes.is_of(self._owners.items()):
            self._build()
        if self._place is None:
            entered = {key: self._entered.pop(key) for key in [*self._entered] if key.partition(".")[0] == name}
            if entered:
                self._attributes.load_state_dict(self._attributes.state_dict() | entered)
        elif any(former.get(key) is not each for key, each in self._owners.items()):
            self._attributes.load_state_dict(self._copied_at(self._place))

    def _build(self) -> None:
        present = self._long_containers()
        self._long = present | {name: mark for name, mark in self._long.items() if name in present}
        former = self._attributes
        self._attributes = attributes = PlainAttributes(
            self._owners.items(),
            ignored=[*self._ignored, *_OF_SAMPLERS, *(name.rpartition(".")[2] for name in self._long)],
            model=self._model,
            left_out=self._left_out,
            former=former,
        )
        held = former._first_held
        for name, key in [*attributes._first]:  # an attribute that an object has got since had no first value
            is_same = name in held and held[name].value is attributes._first_held[name].value
            if is_same and (name, key) not in former._first:
                del attributes._first[name, key]
                attributes._first_contents.pop((name, key), None)
        attributes._find()

    def present(self) -> dict[str, Any]:
        """What differs from the first values.

        Raises:
            ConfigError: it cannot be sent to another process.
        """
        state = self._attributes.state_dict()
        bad = [name for name, each in state.items() if each is None]
        present = self._long_containers() if self._long else {}
        bad += [name for name, mark in self._long.items() if present.get(name) != mark]
        if bad and self._ignore_read():
            return self.present()
        if bad:
            raise ConfigError(_refusal(bad, "cannot be sent to the process that replaces a lost one"))
        return self._entered | state

    def _ignore_read(self) -> bool:
        """Follow no more what reading has changed, such as a cache that has grown; whether there is anything."""
        names = {name.rpartition(".")[2] for name in self._by_reading if name.rpartition(".")[0] in self._owners}
        is_new = bool(names - self._ignored)
        if is_new:
            self._ignored |= names
            self._build()
        return is_new

    def _long_containers(self) -> dict[str, tuple[Any, ...]]:
        return {
            f"{name}.{key}": (id(value), len(value), *map(id, value[:1] + value[-1:] if type(value) is list else ()))
            for name, owner in self._owners.items()
            for key, value in [*vars(owner).items()]
            if type(value) in CONTAINERS and len(value) > _NUM_COPIED and key not in self._ignored
        }

    def note(self, place: DataPlace, *, for_workers: bool = False) -> bool:
        """Note the present attributes; returns whether they have changed since the last time.

        Args:
            place: that the training has reached.
            for_workers: whether workers of a loader are about to copy them.

        Raises:
            ConfigError: they are too large, or cannot be sent to another process.
        """
        if self.is_empty:
            return False
        state, noted = self.present(), self._forked if for_workers else self._noted
        if self._is_elastic:
            self._refuse_changes(state)
            return False
        data = pack(state)
        if data == (noted[-1][1] if noted else b"" if for_workers else pack({})):
            return False
        if len(data) > _LIMIT_BYTES and self._ignore_read():
            return self.note(place, for_workers=for_workers)
        if len(data) > _LIMIT_BYTES:
            raise ConfigError(_refusal([*state], f"are larger than {_LIMIT_BYTES >> 10} KiB"))
        noted.append((place, data))
        del noted[:-_NUM_NOTED]
        return True

    def _refuse_changes(self, state: dict[str, Any]) -> None:
        """Refuse what the program has changed, as nothing is sent."""
        changed = self._changed({}, state) - self._by_reading
        if changed:
            raise ConfigError(_refusal(sorted(changed), "are not sent in a job that changes its size"))

    @staticmethod
    def _at(noted: list[tuple[DataPlace, bytes]], place: DataPlace) -> dict[str, Any]:
        if len(noted) == _NUM_NOTED and noted[0][0] > place:
            raise StateLost(f"the attributes of datasets at {place} are not remembered")
        found = [data for at, data in noted if at <= place]
        return unpack(found[-1]) if found else {}

    def _copied_at(self, place: DataPlace) -> dict[str, Any]:
        return self._at(self._forked or self._noted, place)

    def enter(self, place: DataPlace) -> None:
        """Give all objects the attributes that workers copied last before a place; `begin` gives those of the place.

        What was noted later is forgotten, as it will happen again. Objects of loaders that do not exist yet get theirs
        when these are made.

        Raises:
            StateLost: they are not remembered any more.
        """
        self._entered = self._at(self._noted, place)
        copied, self._place = self._copied_at(place), place
        for noted in (self._noted, self._forked):
            noted[:] = [(at, data) for at, data in noted if at <= place]
        if not self.is_empty:
            self._attributes.load_state_dict(copied)

    def begin(self) -> None:
        """Give all objects the attributes of the place where the training was entered, now that loaders exist."""
        place, self._place = self._place, None
        if place is None:
            return
        state = self._at(self._noted, place)
        names = {key.partition(".")[0] for key in self._owners}
        self._entered = {key: each for key, each in state.items() if key.partition(".")[0] not in names}
        if not self.is_empty:
            self._attributes.load_state_dict(state)

    # -- changes within an epoch --------------------------------------------------------------------------------

    def check_unchanged(self, where: str, advice: str = _ADVICE) -> None:
        """Refuse what the program has changed since the last note, but for what reading has changed.

        Args:
            where: when it was changed, for the message.
            advice: what to do instead.

        Raises:
            ConfigError: there is such a change.
        """
        if self.is_empty:
            return
        noted = unpack(self._noted[-1][1]) if self._noted else {}
        changed = self._changed(noted, self.present()) - self._by_reading
        if changed:
            raise ConfigError(
                f"{format_list(sorted(changed), 8)}: attributes of datasets or samplers were changed {where}. "
                f"A process that replaces a lost one would read samples with other attributes. {advice}"
            )

    @staticmethod
    def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> set[str]:
        found: set[str] = set()
        for owner in before.keys() | now.keys():
            old, new = before.get(owner) or {}, now.get(owner) or {}
            found |= {
                f"{owner}.{key}"
                for key in old.keys() | new.keys()
                if (key in old) != (key in new) or pack(old[key]) != pack(new[key])
            }
        return found

    def fetched(self, read: Callable[[], Any], *, trains: bool, advice: str = _ADVICE) -> Any:
        """Read one batch in this process; see [Note: changes within an epoch].

        Args:
            read: reads it.
            trains: whether it is a batch for training, between which nothing else may have changed.
            advice: see `check_unchanged`.
        """
        self._num_fetched += 1
        number = self._num_fetched
        if self.is_empty or (number > _NUM_LOOKS and number & (number - 1)):
            return read()
        if trains and self._place is None:
            self.check_unchanged("while an epoch was being read", advice)
        before, marks = self.present(), self._unsendable()
        try:
            return read()
        finally:
            opened = {
                key.rpartition(".")[2] for key, mark in self._unsendable().items() if marks.get(key) != mark
            } - self._ignored
            if opened:  # files and caches, which another process makes for itself
                self._ignored |= opened
                self._long = {name: each for name, each in self._long.items() if name.rpartition(".")[2] not in opened}
                self._build()
            self._by_reading |= self._changed(before, self._attributes.state_dict())

    def _unsendable(self) -> dict[str, tuple[int, int]]:
        """Attributes that cannot be sent, with what tells whether they have changed."""
        return {
            f"{name}.{key}": (id(value), len(value) if type(value) in CONTAINERS else 0)
            for name, owner in self._owners.items()
            for key, value in [*vars(owner).items()]
            if key not in self._ignored and _is_large(value)
        }


def _is_large(value: Any) -> bool:
    """Whether a value cannot be sent, or is a long container, which is not looked through at each look."""
    return (type(value) in CONTAINERS and len(value) > MAX_ENTRIES) or num_entries(value) > MAX_ENTRIES


def _refusal(names: list[str], why: str) -> str:
    return (
        f"attributes of datasets or samplers have changed while the program trains, and {why}: "
        f"{format_list(names, 8)}. A process that replaces a lost one would read other samples. Keep what changes in a "
        "few numbers, strings or small containers of the dataset, and derive the rest from them where a sample is read."
    )
