"""Processes of a job: how one ends with the one that started it, its limits, names of signals, how hosts resolve."""

import ctypes
import os
import resource
import signal
from pathlib import Path

# How a process ends with the one that started it, however that ends.

RESOLVER = "timeout:1 attempts:1"
"""Options of the C library's resolver, for `RES_OPTIONS`."""
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def set_parent_death_signal(parent_pid: int) -> None:
    """Have the kernel end this process when its parent ends, however that ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent_pid:  # it ended before the kernel knew
        os._exit(1)


def clear_parent_death_signal() -> None:
    """Take `die_with` back."""
    _libc.prctl(_PR_SET_PDEATHSIG, 0)


def exit_with_agent(agent_pid: int) -> None:
    """Have a worker of torchrun end when its agent does; torchrun itself lets it run on.

    Raises:
        SystemExit: the agent has ended already.
    """
    if os.getppid() == agent_pid:
        set_parent_death_signal(agent_pid)
    elif not Path(f"/proc/{agent_pid}").exists():
        raise SystemExit(f"the agent that started this worker (pid {agent_pid}) is gone, so the worker ends.")


def signal_name(number: int) -> str:
    """Name of a signal, also of one that has none (the real-time ones)."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


OPEN_FILES = 65536
"""Enough for 13,000 workers, each of which keeps up to five connections."""


def allow_connections() -> None:
    """Raise this process's limit of open files, 1,024 on most systems, as far as it may, up to `OPEN_FILES`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
