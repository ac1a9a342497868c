"""Loaders that cannot be told where to begin."""

# Lightning's loops have no public spelling.
# pyright: reportPrivateUsage=false

import itertools
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from hyperpod_plugins.lightning.compat import Trainer


def is_stateful(loader: Any) -> bool:
    """Whether a loader can say where it stands, as Lightning sees it."""
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))


class SkipBatches:
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
        combined = self._trainer.fit_loop._combined_loader
        if combined is not None and combined._mode == "max_size_cycle":
            with suppress(TypeError):  # a loader without a length, which has no shorter one beside it
                count %= max(1, len(self._loader))  # a shorter loader beside a longer one has begun again
        yield from itertools.islice(iter(self._loader), count, None)
