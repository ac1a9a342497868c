"""One process at a time, also when the one before was killed."""

import contextlib
import fcntl
import os
import time
from collections.abc import Generator
from pathlib import Path

from hyperpod_plugins.errors import DataError

_POLL_S = 0.02


@contextlib.contextmanager
def file_lock(path: Path, *, timeout_s: float, purpose: str) -> Generator[None, None, None]:
    """Hold an exclusive lock on `path`, which is created if absent and never removed.

    The kernel drops the lock with the last descriptor of its holder, so a killed process blocks nobody. Each call opens
    the file anew: threads and forked children of one process exclude each other too.

    Raises:
        DataError: another process held the lock for all of `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        while not _try_lock(descriptor):
            if time.monotonic() >= deadline:
                raise DataError(
                    f"{purpose} waited {timeout_s:g} s for {str(path)!r}, which another process still holds. If that "
                    "process is working, wait longer (timeout_s); if it hangs, end it: the lock goes with it."
                )
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
