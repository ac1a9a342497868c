"""Processes of a job: how one ends with the one that started it, names of signals, and how hosts are resolved."""

import ctypes
import os
import signal
from pathlib import Path

RESOLVER = "timeout:1 attempts:1"
"""Options of the C library's resolver, for `RES_OPTIONS`."""
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with(parent_pid: int) -> None:
    """Have the kernel end this process when its parent ends, however that ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent_pid:  # it ended before the kernel knew
        os._exit(1)


def outlive_parent() -> None:
    """Take `die_with` back."""
    _libc.prctl(_PR_SET_PDEATHSIG, 0)


def end_with(agent_pid: int) -> None:
    """Have a worker of torchrun end when its agent does; torchrun itself lets it run on.

    Raises:
        SystemExit: the agent has ended already.
    """
    if os.getppid() == agent_pid:
        die_with(agent_pid)
    elif not Path(f"/proc/{agent_pid}").exists():
        raise SystemExit(f"the agent that started this worker (pid {agent_pid}) is gone, so the worker ends.")


def signal_name(number: int) -> str:
    """Name of a signal, also of one that has none (the real-time ones)."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
