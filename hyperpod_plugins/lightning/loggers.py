"""Loggers in a job with recovery: replacements continue the existing runs, and survivors log no row twice."""

# Lightning's loggers keep their version in a private attribute.
# pyright: reportPrivateUsage=false

import json
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hyperpod_plugins.elastic import JobStore
from hyperpod_plugins.lightning.compat import CSVLogger, Trainer, original, override, restore
from hyperpod_plugins.recovery.member import Member

_VERSIONS = "loggers"  # key "loggers/ENTRY": the version of each logger of the first rank, None if it has none


def record_runs(job_store: JobStore, entry: int, loggers: Sequence[Any]) -> None:
    """Record the runs that the loggers of the first rank write to in an entry of the program."""
    versions = [logger.version if "_version" in vars(logger) else None for logger in loggers]
    job_store.set(f"{_VERSIONS}/{entry}", json.dumps(versions).encode())


def restore_runs(job_store: JobStore, entry: int, loggers: Sequence[Any]) -> None:
    """Make a replacement's loggers write to the recorded runs; call it before they choose new ones."""
    versions = json.loads(job_store.try_get(f"{_VERSIONS}/{entry}") or b"[]")
    for logger, version in zip(loggers, versions, strict=False):
        if "_version" in vars(logger) and logger._version is None:
            logger._version = version


def append_to_csv(loggers: Sequence[Any]) -> None:
    """Make CSVLoggers append to the existing file, which they would overwrite; call it on the first rank."""
    for logger in loggers:
        if isinstance(logger, CSVLogger):
            _keep_rows(logger, Path(logger.log_dir, "metrics.csv"))


def continue_runs(member: Member, entry: int, loggers: Sequence[Any]) -> None:
    """Let a joiner's loggers continue the runs of the lost process in an entry of the program."""
    restore_runs(member.job_store, entry, loggers)
    if member.rank == 0:
        append_to_csv(loggers)


class LoggedRows:
    """Rows that Lightning logs on this rank in a part of a fit; they are not logged again if the part runs again."""

    def __init__(self) -> None:
        self._is_open = False
        self._written: list[tuple[int, frozenset[str]]] = []
        """Step and metric names of each row of the present part."""
        self._again: list[tuple[int, frozenset[str]]] = []
        """Rows that were logged before the part was restarted, and are expected again."""

    def watch(self, trainer: Trainer) -> None:
        """Intercept what the trainer logs, until `unwatch`."""
        connector: Any = trainer._logger_connector
        override(connector, "log_metrics", partial(self._log, trainer, original(connector, "log_metrics")))

    def unwatch(self, trainer: Trainer) -> None:
        """Undo `watch`."""
        restore(trainer._logger_connector, "log_metrics")

    def begin(self) -> None:
        """Begin a part, perhaps again."""
        self._is_open, self._again, self._written = True, self._written, []

    def restart_part(self) -> None:
        """Leave a part that is to be run again from its beginning."""
        if self._is_open:
            self._is_open, self._written, self._again = False, self._written + self._again, []

    def end(self) -> None:
        """End a part that all ranks have run."""
        self._is_open, self._written, self._again = False, [], []

    def state(self) -> list[list[Any]]:
        """Rows of the part that is to be run again, for a replacement: the lost process has logged them, too."""
        return [[step, *sorted(names)] for step, names in self._written]

    def expect(self, rows: list[list[Any]]) -> None:
        """In a replacement, take the `state` of another rank."""
        self._written = [(step, frozenset(names)) for step, *names in rows]

    def _log(
        self, trainer: Trainer, log: Callable[..., None], metrics: dict[str, Any], step: int | None = None
    ) -> None:
        if self._is_open and metrics:
            number = trainer.fit_loop.epoch_loop._batches_that_stepped if step is None else step
            row = number, frozenset(metrics)
            self._written.append(row)
            if row in self._again:
                self._again.remove(row)
                trainer._logger_connector._logged_metrics.update(metrics)
                return
        log(metrics, step)


def _keep_rows(logger: CSVLogger, path: Path) -> None:
    if not path.is_file():
        return
    text = path.read_bytes()
    text = text[: text.rfind(b"\n") + 1]  # the process may have been lost in the middle of a line
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the logger warns that it deletes the existing file
        writer: Any = logger.experiment
    if text:
        path.write_bytes(text)
        writer.metrics_keys = text.partition(b"\n")[0].decode().strip().split(",")
