"""`ScalerWatch`: finds gradient scalers that steps use, and that a replacement would not get."""

import functools
from collections.abc import Callable
from typing import Any, cast

from torch.amp.grad_scaler import GradScaler

from hyperpod_plugins.errors import ConfigError


class ScalerWatch:
    """Notes which `GradScaler` scales a loss while a loop runs. The scale follows from all steps so far."""

    def __init__(self, is_known: Callable[[object], bool]) -> None:
        """Watch nothing yet; `is_known`: whether an object is restored, and sent to a replacement."""
        self._is_known = is_known
        self._used: dict[int, GradScaler] = {}
        self._undo: Callable[[], None] | None = None

    def open(self) -> None:
        """Watch all scalers, until `close`."""
        scaler, used = cast("Any", GradScaler), self._used
        former = scaler.scale

        @functools.wraps(former)
        def scale(this: GradScaler, outputs: Any) -> Any:
            used[id(this)] = this
            return former(this, outputs)

        def undo() -> None:
            scaler.scale = former

        scaler.scale, self._undo = scale, undo

    def close(self) -> None:
        """Watch no more."""
        undo, self._undo = self._undo, None
        self._used.clear()
        if undo is not None:
            undo()

    def check(self) -> None:
        """Refuse scalers that the steps so far have used.

        Raises:
            ConfigError: one is enabled, and a replacement would not get it.
        """
        used = [each for each in self._used.values() if each.is_enabled() and not self._is_known(each)]
        if used:
            raise ConfigError(
                "a GradScaler is used in the steps, but was not given to the session. With recovery, a step that is "
                "run again would find another scale, and a replacement would begin with a new one. Call, after "
                'session.train: session.register_rank_local("scaler", scaler).'
            )
