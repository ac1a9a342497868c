"""Check that a checkpoint named by the job's store was written by this user; other users may reach the store."""

import os
import stat
import tempfile
from pathlib import Path

from hyperpod_plugins.errors import ConfigError


def check_checkpoint(path: str) -> str:
    """Check that only this user can have written the checkpoint from which all processes resume.

    Anyone who can reach the job's store can write a path there, but cannot write a folder of this user. Where a file
    system changes owners (such as NFS, which maps root to nobody), the checkpoint must have the owner that a new file
    beside it gets.

    Returns:
        The checked path with symbolic links resolved, since their targets may change later.

    Raises:
        ConfigError: the checkpoint does not exist, belongs to another user, or is writable by others.
    """
    why, resolved = why_untrusted(path), path
    if why is None:
        resolved = os.path.realpath(path)
        why = why_untrusted(resolved)
    if why is not None:
        raise ConfigError(
            f"the job's store says that all processes go on from {path!r:.300}, but {why}. If the job wrote this "
            "itself, keep checkpoints on storage that all nodes share, in folders that only its user may write to. "
            "Otherwise another user writes to the store: choose an endpoint that only this job's machines can reach."
        )
    return resolved


def why_untrusted(checkpoint: str) -> str | None:
    """Return why a checkpoint cannot be trusted; None if it can."""
    path = Path(checkpoint)
    try:
        status = path.stat()
        if not stat.S_ISDIR(status.st_mode) and not stat.S_ISREG(status.st_mode):
            return "this is neither a folder nor a file"
        if status.st_mode & stat.S_IWOTH:
            return "all users of this machine may write to it"
        if status.st_uid != os.geteuid() and status.st_uid != _owner_beside(path):
            return f"it belongs to another user (uid {status.st_uid})"
    except OSError as error:
        return f"it cannot be read here ({error.strerror})"
    except ValueError as error:  # a path with a NUL
        return f"this is not a path ({error})"
    return None


def _owner_beside(path: Path) -> int:
    """Owner (uid) of a file that this process creates in the same folder; -1 if it may not."""
    try:
        with tempfile.NamedTemporaryFile(dir=path.resolve().parent, prefix=".owner-") as file:
            return os.fstat(file.fileno()).st_uid
    except OSError:
        return -1
