"""Resuming in the middle of an epoch with loaders that have no state: `SkipBatches`."""

# Lightning's loops have no public API.
# pyright: reportPrivateUsage=false

import itertools
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from hyperpod_plugins.lightning.compat import Trainer


def is_stateful(loader: Any) -> bool:
    """Whether Lightning considers a loader stateful: it has `state_dict` and `load_state_dict`."""
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))


class SkipBatches:
    """A loader that skips its first `count` batches in its first epoch, and yields full epochs after that."""

    def __init__(self, loader: Any, count: int, trainer: Trainer) -> None:
        self._loader = loader
        self._count = count
        self._trainer = trainer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        # Lazy: Lightning calls `iter` before it sets the sampler's epoch.
        count, self._count = self._count, 0
        if count >= self._trainer.num_training_batches:  # nothing left; Lightning keeps this iterator for later
            count = 0
        combined = self._trainer.fit_loop._combined_loader
        if combined is not None and combined._mode == "max_size_cycle":
            with suppress(TypeError):  # a loader without a length is never the shorter one
                count %= max(1, len(self._loader))  # a shorter loader next to a longer one has started over
        yield from itertools.islice(iter(self._loader), count, None)
