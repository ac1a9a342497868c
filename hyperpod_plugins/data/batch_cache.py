"""Finished batches in shared memory: they outlive the process that made them, and the whole node can read them.

For pipelines that cost more than copying their result: decoding, augmentation, tokenising on the fly. A process that
takes the place of a dead one starts with the batches that were made ahead, while its own pipeline warms up.
"""

import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hyperpod_plugins.data.batch_codec import decode_batch, encode_batch
from hyperpod_plugins.data.batch_ring import KEY_BYTES, BatchRing, create_ring, open_ring
from hyperpod_plugins.data.locks import file_lock
from hyperpod_plugins.data.prefetch import prefetched
from hyperpod_plugins.errors import ConfigError, DataError

_log = logging.getLogger(__name__)
_LOCK_TIMEOUT_S = 60.0
_MOST_SKIPPED = 8
"""So many batches are read and dropped to catch up with the cache before a pipeline is opened anew."""


class Missing:
    """The type of `MISSING`."""


MISSING: Final = Missing()
"""What `BatchCache.get` returns for a batch that is not there; None is a batch like any other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCacheConfig:
    """How large a batch cache is and where it lies."""

    size_bytes: int = 1 << 30
    """Room for all batches together, reserved at once."""
    max_batch_bytes: int = 16 << 20
    """Size of one slot; a larger batch is passed on without being kept."""
    folder: Path = Path("/dev/shm")
    """A file system in memory; the cache makes a folder there that only its user can enter."""

    def __post_init__(self) -> None:
        """Check that at least one batch fits."""
        if not 0 < self.max_batch_bytes <= self.size_bytes:
            raise ConfigError(
                f"max_batch_bytes={self.max_batch_bytes} must be positive and not larger than "
                f"size_bytes={self.size_bytes}: the cache holds size_bytes // max_batch_bytes batches."
            )

    @property
    def num_slots(self) -> int:
        """Number of batches that are kept; after that the oldest goes."""
        return self.size_bytes // self.max_batch_bytes


class BatchCache:
    """A ring of batches in a file that all processes of a node map; the oldest batch makes room for the newest.

    A torn, damaged or foreign entry is never returned: it counts as missing. A file that is damaged, or has another
    size, is replaced. Keep data and code that make the batches apart by `fingerprint`: entries of another fingerprint
    are not seen.

    Args:
        name: names the file; processes that use the same name share it.
        fingerprint: identifies the data and the configuration of the pipeline.
        config: size and place.

    Raises:
        DataError: there is no room, or the folder is missing, cannot be written to or belongs to somebody else.
    """

    def __init__(self, name: str, *, fingerprint: str, config: BatchCacheConfig | None = None) -> None:
        if not name or "/" in name or name.startswith("."):
            raise ConfigError(
                f"a batch cache was given the name {name!r}. Use a plain file name, without '/' and no dot in front."
            )
        self.config = config or BatchCacheConfig()
        folder = _private_folder(self.config.folder)
        self.path = folder / f"{name}.batches"
        self.num_damaged = 0
        self._lock = folder / f"{name}.lock"
        self._fingerprint = fingerprint
        self._has_warned = False
        self._ring = self._open()

    def get(self, key: str, index: int) -> Any:
        """Return batch `index` of `key` in memory of its own, or `MISSING`."""
        payload, damaged_slot = self._ring.read(self._digest(key), index)
        if payload is not None:
            return decode_batch(payload)
        if damaged_slot is not None:
            self._discard(key, index)
        return MISSING

    def put(self, key: str, index: int, batch: Any) -> bool:
        """Keep batch `index` of `key`; tells whether it fitted.

        Raises:
            DataError: the batch holds something that cannot be kept.
        """
        payload = encode_batch(batch)
        if len(payload) > self.config.max_batch_bytes:
            if not self._has_warned:
                _log.warning(
                    "A batch of %d bytes does not fit the batch cache %s, whose slots have %d bytes: such batches are "
                    "made anew after each restart. Raise max_batch_bytes.",
                    len(payload),
                    self.path.name,
                    self.config.max_batch_bytes,
                )
            self._has_warned = True
            return False
        with self._locked():
            self._ring.write(self._digest(key), index, payload)
        return True

    def remove(self) -> None:
        """Delete the file; processes that still have it mapped keep what they see.

        The empty lock file stays: whoever holds it and whoever comes next must hold the same one.
        """
        with self._locked():
            self.path.unlink(missing_ok=True)

    def _open(self) -> BatchRing:
        num_slots, slot_bytes = self.config.num_slots, self.config.max_batch_bytes
        with self._locked():
            if self.path.exists():
                ring, why_not = open_ring(self.path, num_slots, slot_bytes)
                if ring is not None:
                    return ring
                _log.warning("Starting with an empty batch cache: %s cannot be used, %s.", self.path, why_not)
            return create_ring(self.path, num_slots, slot_bytes)

    def _discard(self, key: str, index: int) -> None:
        with self._locked():
            payload, slot = self._ring.read(self._digest(key), index)
            if payload is None and slot is not None:  # still so, now that no writer is at work
                self.num_damaged += 1
                _log.warning("Batch %d in %s is damaged and is made anew.", index, self.path)
                self._ring.discard(slot)

    def _locked(self) -> Any:
        return file_lock(self._lock, timeout_s=_LOCK_TIMEOUT_S, purpose=f"the batch cache {self.path.stem}")

    def _digest(self, key: str) -> bytes:
        return hashlib.blake2b(f"{self._fingerprint}\0{key}".encode(), digest_size=KEY_BYTES).digest()


def cached(
    read_from: Callable[[int], Iterator[Any]],
    cache: BatchCache,
    *,
    key: str,
    indices: Iterable[int],
    read_ahead: int = 0,
) -> Iterator[Any]:
    """Yield the batches with the given numbers, from the cache where they are there and from the pipeline where not.

    The pipeline is opened at the first batch that is missing. What it raises reaches the caller unchanged.

    Args:
        read_from: opens the pipeline at a batch number and yields from there on.
        cache: where batches are looked up and kept.
        key: tells this sequence of batches from others in the same cache.
        indices: numbers of the batches in the order of the pipeline; it may end earlier.
        read_ahead: batches that a thread makes ahead of the caller, so that they are kept when this process dies.
    """
    batches = _through_cache(read_from, cache, key, indices)
    return prefetched(batches, read_ahead) if read_ahead else batches


def _through_cache(
    read_from: Callable[[int], Iterator[Any]], cache: BatchCache, key: str, indices: Iterable[int]
) -> Iterator[Any]:
    pipeline: Iterator[Any] | None = None
    num_behind = 0  # batches that came from the cache while the pipeline stood still
    for index in indices:
        batch = cache.get(key, index)
        if batch is not MISSING:
            num_behind += 1
            yield batch
            continue
        if pipeline is None or num_behind > _MOST_SKIPPED:
            pipeline, num_behind = read_from(index), 0
        try:
            for _ in range(num_behind):
                next(pipeline)
            batch = next(pipeline)
        except StopIteration:
            return
        num_behind = 0
        cache.put(key, index, batch)
        yield batch


def _private_folder(parent: Path) -> Path:
    folder = parent / f"hyperpod-{os.geteuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"the folder {str(parent)!r} cannot take a folder for batch caches ({error.strerror}). Create it, or give "
            "BatchCacheConfig(folder=...) one that exists and that you may write to, on a file system in memory."
        ) from None
    status = folder.lstat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o077 or folder.is_symlink():
        raise DataError(
            f"the folder {str(folder)!r} for batch caches belongs to another user or is open to others, so its "
            "content cannot be trusted. Remove it, or give another folder."
        )
    return folder
