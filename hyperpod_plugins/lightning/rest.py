"""Loaders that cannot be told where to begin."""

import itertools
from collections.abc import Iterator
from typing import Any

from hyperpod_plugins.lightning.flavour import Trainer


class RestOfEpoch:
    """The rest of a loader's epoch, the first time; whole epochs after that."""

    def __init__(self, loader: Any, count: int, trainer: Trainer) -> None:
        self._loader = loader
        self._count = count
        self._trainer = trainer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        # Lazily: Lightning calls `iter`, then tells the sampler which epoch it is.
        count, self._count = self._count, 0
        if count >= self._trainer.num_training_batches:  # nothing is left, and Lightning keeps this iterator for later
            count = 0
        yield from itertools.islice(iter(self._loader), count, None)
