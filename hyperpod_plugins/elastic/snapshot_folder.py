"""The shared-memory folder where a node's workers keep their snapshots: the agent creates it, and it outlives them.

The folder belongs to the agent's process and is removed when that process exits. If the agent is killed before it can
do so, the next agent that starts on the node removes the folder. It is owned by this user, with mode 0700.
"""

import atexit
import logging
import os
import shutil
import stat
from functools import cache
from pathlib import Path

from hyperpod_plugins.env import SNAPSHOTS_VARIABLE, shared_memory_folder

log = logging.getLogger(__name__)


@cache
def make_snapshot_folder() -> str:
    """Create this process's folder, to be removed at exit, and remove the folders of agents that are gone.

    Returns:
        The path of the folder; empty if the machine has no shared memory or another user owns the parent folder.
    """
    root = shared_memory_folder()
    if root is None:
        return ""
    try:
        root.mkdir(mode=0o700, exist_ok=True)
        if not is_private(root):
            log.warning("%s belongs to another user or is open to others: snapshots end with their process", root)
            return ""
        remove_stale(root)
        folder = root / f"{os.getpid()}-{_start_of(os.getpid())}-{_namespace()}"
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        log.warning(
            "cannot create the snapshot folder in shared memory (%s): snapshots are lost with their process", error
        )
        return ""
    atexit.register(_remove, folder, os.getpid())
    return str(folder)


def set_snapshot_folder() -> None:
    """Put the folder's path into the environment, for workers started later; creates the folder on the first call."""
    os.environ[SNAPSHOTS_VARIABLE] = make_snapshot_folder()  # noqa: TID251  (written: workers inherit the environment)


def is_private(folder: Path) -> bool:
    """Whether this is a folder (not a link) that this user owns and no other user can access."""
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def remove_stale(root: Path) -> None:
    """Remove the folders of processes that are gone, except those of other containers that share this memory."""
    for folder in root.iterdir():
        pid, start, namespace = [*folder.name.split("-"), "", ""][:3]
        if pid.isdecimal() and namespace == _namespace() and _start_of(int(pid)) != start:
            shutil.rmtree(folder, ignore_errors=True)


def _remove(folder: Path, pid: int) -> None:
    if os.getpid() == pid:  # not in a fork
        shutil.rmtree(folder, ignore_errors=True)


def _start_of(pid: int) -> str:
    """Start time of a process in clock ticks since boot; empty if it is gone. Unique, with the pid, until reboot."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _namespace() -> str:
    """Inode of this process's PID namespace: pids are comparable only within one."""
    return str(os.stat("/proc/self/ns/pid").st_ino)
