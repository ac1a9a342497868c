"""Whether a checkpoint that the job's store names was written by this user: a store may be open to others."""

import os
import stat
import tempfile
from pathlib import Path

from hyperpod_plugins.errors import ConfigError


def check_checkpoint(path: str) -> str:
    """See that only this user can have written a checkpoint from which all processes are to go on.

    Whoever reaches the job's store may write a path there, but not a folder of this user. Where a file system changes
    owners (such as NFS that maps root to nobody), the folder must have the owner that a file made beside it gets.

    Returns:
        The path that was checked, without symbolic links: what they lead to may change.

    Raises:
        ConfigError: it is not there, belongs to another user, or others may write in it.
    """
    why, resolved = refusal(path), path
    if why is None:
        resolved = os.path.realpath(path)
        why = refusal(resolved)
    if why is not None:
        raise ConfigError(
            f"the job's store says that all processes go on from {path!r:.300}, but {why}. If the job wrote this "
            "itself, keep checkpoints on storage that all nodes share, in folders that only its user may write to. "
            "Otherwise somebody else writes to the store: choose an endpoint that only this job's machines reach."
        )
    return resolved


def refusal(checkpoint: str) -> str | None:
    """Why no process goes on from a checkpoint; None where nothing speaks against it."""
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
        return f"this is no path ({error})"
    return None


def _owner_beside(path: Path) -> int:
    """Owner of a file that this process makes in the same folder; -1 where it may not."""
    try:
        with tempfile.NamedTemporaryFile(dir=path.resolve().parent, prefix=".owner-") as file:
            return os.fstat(file.fileno()).st_uid
    except OSError:
        return -1
