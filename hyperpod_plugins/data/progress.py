"""A progress bar where tqdm is installed, a quiet line now and then where it is not."""

import importlib
import importlib.util
import logging
import time
from types import TracebackType
from typing import Any, Self

_LINE_EVERY_S = 10.0
_log = logging.getLogger(__name__)


class ProgressBar:
    """Counts towards an unknown total while used as a context.

    Args:
        title: what is going on.
        unit: what is counted.
        is_shown: False makes it silent.
    """

    def __init__(self, title: str, unit: str, *, is_shown: bool) -> None:
        self._title = title
        self._unit = unit
        self._is_shown = is_shown
        self._count = 0
        self._next_line_s = time.monotonic() + _LINE_EVERY_S
        self._tqdm: Any = None
        if is_shown and importlib.util.find_spec("tqdm") is not None:
            self._tqdm = importlib.import_module("tqdm").tqdm(desc=title, unit=f" {unit}", unit_scale=True)

    def advance(self, count: int) -> None:
        """Count `count` more."""
        self._count += count
        if self._tqdm is not None:
            self._tqdm.update(count)
        elif self._is_shown and time.monotonic() >= self._next_line_s:
            _log.info("%s: %d %s so far", self._title, self._count, self._unit)
            self._next_line_s = time.monotonic() + _LINE_EVERY_S

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the bar as it is when the work ended or failed."""
        if self._tqdm is not None:
            self._tqdm.close()
