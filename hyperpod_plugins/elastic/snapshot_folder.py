"""The folder in shared memory where a node's workers keep their snapshots: an agent makes it, and it outlives them.

It belongs to the agent's process: removed when that ends, and, where nothing in that process could do it any more, by
the next agent that starts on the node. It is a folder of its own user, with mode 0700.
"""

import atexit
import logging
import os
import shutil
import stat
from functools import cache
from pathlib import Path

from hyperpod_plugins.env import SNAPSHOTS, shared_memory_folder

log = logging.getLogger(__name__)


@cache
def make_snapshot_folder() -> str:
    """Make the folder of this process, have it removed at its end, and remove those of agents that are gone.

    Returns:
        Its path; empty where the machine has no shared memory, or another user holds the name.
    """
    root = shared_memory_folder()
    if root is None:
        return ""
    try:
        root.mkdir(mode=0o700, exist_ok=True)
        if not is_ours(root):
            log.warning("%s belongs to another user or is open to others: snapshots end with their processes", root)
            return ""
        remove_stale(root)
        folder = root / f"{os.getpid()}-{_start_of(os.getpid())}-{_namespace()}"
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        log.warning("no folder for snapshots in shared memory (%s): they end with their processes", error)
        return ""
    atexit.register(_remove, folder, os.getpid())
    return str(folder)


def set_snapshot_folder() -> None:
    """Tell the workers that this process starts later where the folder is, and make it the first time."""
    os.environ[SNAPSHOTS] = make_snapshot_folder()  # noqa: TID251  (written, for workers inherit it)


def is_ours(folder: Path) -> bool:
    """Whether this is a folder, no link, of this user, that nobody else can enter."""
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def remove_stale(root: Path) -> None:
    """Remove the folders of processes that are gone; not those of containers that only share the memory with us."""
    for folder in root.iterdir():
        pid, start, namespace = [*folder.name.split("-"), "", ""][:3]
        if pid.isdecimal() and namespace == _namespace() and _start_of(int(pid)) != start:
            shutil.rmtree(folder, ignore_errors=True)


def _remove(folder: Path, pid: int) -> None:
    if os.getpid() == pid:  # not in a fork
        shutil.rmtree(folder, ignore_errors=True)


def _start_of(pid: int) -> str:
    """When a process began, as the kernel counts; empty if there is none. With the number, unique while it is up."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _namespace() -> str:
    """In which the numbers of processes have a meaning."""
    return str(os.stat("/proc/self/ns/pid").st_ino)
