"""File lock that excludes other processes and threads; the lock of a killed holder is released."""

import contextlib
from collections.abc import Generator
from pathlib import Path

from filelock import FileLock, Timeout

from hyperpod_plugins.errors import DataError


@contextlib.contextmanager
def file_lock(path: Path, *, timeout_s: float, purpose: str) -> Generator[None]:
    """Hold an exclusive lock on `path`, which is created if absent and never removed.

    Each call has a lock of its own, so threads of one process exclude each other too.

    Raises:
        DataError: another process held the lock for all of `timeout_s` seconds.
    """
    try:
        with FileLock(path, timeout=timeout_s, mode=0o600, thread_local=False):
            yield
    except Timeout:
        raise DataError(
            f"{purpose} waited {timeout_s:g} s for {str(path)!r}, which another process still holds. If that process "
            "is working, wait longer (timeout_s); if it hangs, end it: the lock goes with it."
        ) from None
