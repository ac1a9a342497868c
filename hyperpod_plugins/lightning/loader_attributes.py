"""Attributes of a fit's datasets and samplers, noted where its parts begin; see `recovery.data_attributes`."""

# Lightning's loops have no public API.
# pyright: reportPrivateUsage=false

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.utils.data import DataLoader

from hyperpod_plugins.data.loader import StatefulLoader
from hyperpod_plugins.lightning.compat import Trainer, callbacks_of
from hyperpod_plugins.lightning.local_state import metrics_of
from hyperpod_plugins.lightning.trainer_entries import entries
from hyperpod_plugins.lightning.trainer_state import part_of
from hyperpod_plugins.recovery.data_attributes import DataAttributes, DataPlace, watch_reads
from hyperpod_plugins.recovery.member import Member
from hyperpod_plugins.recovery.rng import EPOCH_BEGIN, EPOCH_END, EVALUATION_BEGIN, FIT_END

_BEGIN, _READ, _END, _FIT_END = range(4)
"""Places in an epoch: before its first hooks, in its batches and validations, at its end, at the end of the fit."""


def place_of(checkpoint: dict[str, Any]) -> DataPlace:
    """The place of a state that all ranks enter the loops with; within an epoch, that of its first batch."""
    if not checkpoint.get("loops"):
        return 0, _BEGIN, 0
    loop = checkpoint["loops"]["fit_loop"]
    epochs, batches = loop["epoch_progress"]["total"], loop["epoch_loop.batch_progress"]
    done, part, is_last = epochs["completed"], part_of(checkpoint), batches["is_last_batch"]
    if part == FIT_END:
        return done, _FIT_END, 0
    if part == EPOCH_END:
        return done, _END, 0
    if epochs["started"] <= done or batches["current"]["processed"] == 0:
        return done, _BEGIN, 0
    if part != EVALUATION_BEGIN and is_last:
        return done + 1, _BEGIN, 0
    return done, _READ, 1 if is_last else 0


class LoaderAttributes:
    """Follows the attributes of a trainer's datasets and samplers through the parts of a fit."""

    def __init__(self, trainer: Trainer, member: Member, is_elastic: bool) -> None:
        """Begin without loaders.

        Args:
            trainer: about to fit.
            member: this process.
            is_elastic: whether the job changes its size.
        """
        self._trainer, self._member = trainer, member
        self._key = f"data attributes/{entries.number}/{member.worker_id}"
        self._attributes = DataAttributes(is_elastic=is_elastic)
        self._is_known = self._awaits_read = self._is_after_last = False

    @property
    def _epoch(self) -> int:
        epochs: Any = self._trainer.fit_loop.epoch_progress
        return epochs.total.completed

    def follow(self, loader: Any, number: int) -> None:
        """Follow what a loader reads with; `number` is its position among those of its kind."""
        trainer, trains = self._trainer, bool(self._trainer.training)
        data = getattr(trainer, "datamodule", None)
        left_out = [*callbacks_of(trainer), *metrics_of(trainer).values(), *([] if data is None else [data])]
        name = f"{'training' if trains else 'evaluation'} {number}"
        read = loader.reads_with if isinstance(loader, StatefulLoader) else loader
        self._attributes.follow(name, read, model=trainer.lightning_module, left_out=left_out)
        if isinstance(read, DataLoader):
            own: weakref.ref[LoaderAttributes] = weakref.ref(self)  # the trainer holds the loader: see `watch_reads`
            watch_reads(read, partial(_start_workers, own, trains), partial(_fetch, own, trains))

    def start_workers(self) -> None:
        """Note what workers of a loader are about to copy."""
        self._note((self._epoch, _BEGIN, 1), for_workers=True)

    def fetch(self, read: Callable[[], Any], *, trains: bool) -> Any:
        """Read a batch in this process; `trains`: of the training data."""
        if trains:
            self.note_read()
        return self._attributes.fetched(read, trains=trains)

    def note_read(self) -> None:
        """Note that a batch of the training data is about to be read, or that workers have read it."""
        if self._awaits_read:
            self._awaits_read = False
            self._note((self._epoch, _READ, 0))

    def _note(self, place: DataPlace, *, for_workers: bool = False) -> None:
        if self._attributes.note(place, for_workers=for_workers):
            self._member.job_store.set_lasting(self._key, self._attributes.noted)

    def enter(self, checkpoint: dict[str, Any]) -> None:
        """Have datasets get the attributes of a state that all ranks enter the loops with."""
        known = None if self._is_known else self._member.job_store.try_get_lasting(self._key)
        self._is_known = True
        if known is not None:
            self._attributes.load_noted(known)
        self._attributes.enter(place_of(checkpoint))

    def begin(self) -> None:
        """Enter the training, now that its loaders exist, and before the first batch is read."""
        self._is_known = True
        self._attributes.begin()

    def begin_part(self, part: str) -> None:
        """Note the attributes as a part of the fit begins; refuse what has changed within an epoch."""
        if self._trainer.sanity_checking:
            return
        batches: Any = self._trainer.fit_loop.epoch_loop.batch_progress
        if part == EPOCH_BEGIN:
            self._note((self._epoch, _BEGIN, 0))
            self._awaits_read = True
        elif part in (EVALUATION_BEGIN, EPOCH_END) and not (part == EPOCH_END and self._is_after_last):
            self._attributes.check_unchanged("while an epoch was being read")
        self._is_after_last = part == EVALUATION_BEGIN and batches.is_last_batch
        if part == EPOCH_END:
            self._note((self._epoch, _END, 0))
        elif self._is_after_last:
            self._note((self._epoch, _READ, 1))

    def end_part(self, part: str) -> None:
        """Note the attributes after the last hooks of an epoch, before other ranks may continue."""
        if part == EPOCH_END and not self._trainer.sanity_checking:
            self._note((self._epoch, _BEGIN, 0))


def _start_workers(own: "weakref.ref[LoaderAttributes]", trains: bool) -> None:
    attributes = own()
    if trains and attributes is not None:
        attributes.start_workers()


def _fetch(own: "weakref.ref[LoaderAttributes]", trains: bool, read: Callable[[], Any]) -> Any:
    attributes = own()
    return read() if attributes is None else attributes.fetch(read, trains=trains)
