"""Process helpers: ending with the parent process, how the program ends, open-file limits, signal names, kills for lack
of memory, DNS resolver options, and the shared-memory folder where the workers of an agent's process keep their
snapshots.

That folder outlives the workers and is removed when the agent's process exits. If the agent is killed before it can
do so, the next agent that starts on the node removes the folder. It is owned by this user, with mode 0700.
"""

import atexit
import ctypes
import logging
import os
import resource
import shutil
import signal
import stat
import sys
import time
from collections import deque
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from hyperpod_plugins.env import SNAPSHOTS_VARIABLE, shared_memory_folder

log = logging.getLogger(__name__)
RESOLVER_OPTIONS = "timeout:1 attempts:1"
"""Options for the C library's DNS resolver; the value of `RES_OPTIONS`."""
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def set_parent_death_signal(parent_pid: int) -> None:
    """Have the kernel kill this process (SIGKILL) when its parent exits, for whatever reason."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent_pid:  # the parent exited before prctl took effect
        os._exit(1)


def clear_parent_death_signal() -> None:
    """Undo `set_parent_death_signal`."""
    _libc.prctl(_PR_SET_PDEATHSIG, 0)


def exit_with_agent(agent_pid: int) -> None:
    """Have a torchrun worker exit when its agent does; torchrun itself leaves the worker running.

    Raises:
        SystemExit: the agent has already exited.
    """
    if os.getppid() == agent_pid:
        set_parent_death_signal(agent_pid)
    elif not Path(f"/proc/{agent_pid}").exists():
        raise SystemExit(f"the agent that started this worker (pid {agent_pid}) is gone, so the worker ends.")


class ProgramEnd:
    """How the program of this process ends, as far as functions that are called at exit can know."""

    def __init__(self) -> None:
        self.has_failed = False
        """Whether it has ended by an exception, or, under `hyperpodrun`, by `sys.exit` with another code than 0."""
        self._is_watched = False

    def watch(self) -> None:
        """Note an uncaught exception from now on."""
        if self._is_watched:
            return
        self._is_watched, call_before = True, sys.excepthook

        def note(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
            self.has_failed = True
            call_before(kind, error, at)

        sys.excepthook = note


program_end = ProgramEnd()
"""Of this process."""


def exit_at_once(code: int) -> NoReturn:
    """End the process while threads may wait in torch's store client.

    Such a thread cannot be joined in time. If it returned while the interpreter shuts down, C++ would abort the
    process: its exit code would be that of SIGABRT.
    """
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]: nothing public runs them before `os._exit`
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def signal_name(number: int) -> str:
    """Return the name of a signal; `signal N` for those without a name (the real-time signals)."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


OPEN_FILES = 65536
"""Limit of open files: enough for 13,000 workers with up to five connections each."""


def raise_open_file_limit() -> None:
    """Raise this process's open-file limit (1,024 on most systems) as far as allowed, up to `OPEN_FILES`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


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


_OOM_COUNTS = ((Path("/sys/fs/cgroup/memory.events"), "oom_kill"), (Path("/proc/vmstat"), "oom_kill"))
"""Files with the kernel's count of processes that it killed for lack of memory: of this control group, or of all."""


_RECENT_S = 2.0


class OutOfMemoryKills:
    """Whether a process that ended by SIGKILL was probably killed by the kernel, for lack of memory.

    The kernel only counts such kills: whatever ends by SIGKILL within two seconds of one is taken for its victim.
    """

    def __init__(self, counts: Sequence[tuple[Path, str]] = _OOM_COUNTS) -> None:
        """Read the present count; `counts` are files and the names of their lines, of which the first one is used."""
        self._counts = counts
        self._looks = deque([(time.monotonic(), self._count())])
        self._victims: dict[int, bool] = {}

    def look(self) -> None:
        """Read the count; call this several times a second, so that an old kill is not taken for a recent one."""
        now_s = time.monotonic()
        self._looks.append((now_s, self._count()))
        while len(self._looks) > 1 and self._looks[1][0] <= now_s - _RECENT_S:
            self._looks.popleft()

    def is_victim(self, pid: int) -> bool:
        """Whether the count has risen in the last two seconds; the answer for a pid stays."""
        if pid not in self._victims:
            self.look()
            self._victims[pid] = self._looks[-1][1] > self._looks[0][1]
        return self._victims[pid]

    def _count(self) -> int:
        for path, name in self._counts:
            try:
                lines = dict(line.split(maxsplit=1) for line in path.read_text().splitlines() if " " in line)
                return int(lines[name])
            except (OSError, ValueError, KeyError):
                continue
        return 0
