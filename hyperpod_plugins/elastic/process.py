"""Process helpers: ending with the parent process, open-file limits, signal names and DNS resolver options."""

import ctypes
import os
import resource
import signal
from pathlib import Path

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
