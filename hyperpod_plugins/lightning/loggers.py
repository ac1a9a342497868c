"""Loggers of a process that takes a lost one's place: they go on with the run that is there."""

# Lightning's loggers keep their version in a private place.
# pyright: reportPrivateUsage=false

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hyperpod_plugins.elastic import Ledger
from hyperpod_plugins.lightning.flavour import CSVLogger

_VERSIONS = "loggers"  # value: the version of each logger of the first rank, None for one without


def name_runs(ledger: Ledger, loggers: Sequence[Any]) -> None:
    """Write down which runs the loggers of the first rank write to."""
    versions = [logger.version if "_version" in vars(logger) else None for logger in loggers]
    ledger.put(_VERSIONS, json.dumps(versions).encode())


def continue_runs(ledger: Ledger, loggers: Sequence[Any]) -> None:
    """Let the loggers of a replacement write to the same runs, before they look for new ones."""
    versions = json.loads(ledger.find(_VERSIONS) or b"[]")
    for logger, version in zip(loggers, versions, strict=False):
        if "_version" in vars(logger) and vars(logger)["_version"] is None:
            vars(logger)["_version"] = version


def keep_rows(loggers: Sequence[Any]) -> None:
    """Let CSVLoggers add to the file that is there: they would begin it again. To be called on the first rank."""
    for logger in loggers:
        if isinstance(logger, CSVLogger):
            _keep_rows(logger, Path(logger.log_dir, "metrics.csv"))


def _keep_rows(logger: CSVLogger, path: Path) -> None:
    if not path.is_file():
        return
    text = path.read_bytes()
    text = text[: text.rfind(b"\n") + 1]  # the process may have been lost while it wrote
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what it deletes
        writer: Any = logger.experiment
    if text:
        path.write_bytes(text)
        writer.metrics_keys = text.partition(b"\n")[0].decode().strip().split(",")
