"""First causes in what others have written: messages of nccl and CUDA in a worker's output, and the kernel's log.

All of it is untrusted text, of which little is read, and little is repeated. A cause is the same text each time that
the same happens, without addresses and process ids: two failures in a row with one cause are a reason to stop.
"""

import ctypes
import os
import re
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from hyperpod_plugins.elastic.store.records import printable

_MOST_CHARACTERS = 1 << 16
"""Of a text that is searched, from its end; so are the bytes of the kernel's log."""
_MOST_SHOWN = 120
_CLOCK_S = 5.0
"""The kernel's log may be so far from the monotonic clock."""
_RECENT_S = 120.0
"""An Xid that names no process, or another one, may be the cause of what ends so long after it."""
_READ_ALL = 3
"""`klogctl`'s request to read the last bytes of the log, which stay there."""
_FIRST_PID_NAMESPACE = "pid:[4026531836]"
"""In any other one, process ids are not those of the kernel's log."""

_MESSAGES: tuple[tuple[str, str], ...] = (
    # What breaks comes before what follows from it: a watchdog also reports errors of CUDA, and peers see both.
    (r"uncorrectable ECC error encountered", "uncorrectable ECC error of a GPU"),
    (r"CUDA error: ([^\n]*)", "CUDA error: {0}"),
    (r"Cuda failure(?: \d+)? '([^'\n]*)'", "CUDA error: {0}"),
    (r"ncclUnhandledCudaError\b", "nccl: unhandled CUDA error"),
    (r"CUDA out of memory", "CUDA out of memory"),
    (r"ncclSystemError\b", "nccl: system error (ncclSystemError)"),
    (r"ncclInternalError\b", "nccl: internal error (ncclInternalError)"),
    (r"ncclInvalidArgument\b", "nccl: invalid argument (ncclInvalidArgument)"),
    (r"ncclInvalidUsage\b", "nccl: invalid usage (ncclInvalidUsage)"),
    (r"Watchdog caught collective operation timeout", "nccl: watchdog timeout of a collective"),
    (r"watchdog (?:thread )?(?:got stuck|hang)[^\n]*|HeartbeatMonitor[^\n]*heartbeat[^\n]*", "nccl: watchdog hangs"),
    (r"ncclRemoteError\b", "nccl: connection to another rank was lost (ncclRemoteError)"),
)
"""Patterns of messages, the first that is found counts; and what to call it."""
_XIDS = {
    13: "graphics engine exception",
    31: "memory page fault",
    43: "GPU stopped processing",
    45: "preemptive clean-up",
    48: "double bit ECC error",
    63: "row remapping event",
    64: "row remapping failure",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    92: "high rate of single bit ECC errors",
    94: "contained ECC error",
    95: "uncontained ECC error",
    119: "GSP timeout",
    120: "GSP error",
}
_OF_PROGRAM = frozenset({13, 31, 43, 45})
"""Xids of one process, mostly for errors of its program: told only for the process that the line names."""
_KERNEL_LINE = re.compile(r"(?:<\d+>)?\[ {0,12}(\d{1,12}\.\d{1,9})\](?:\[[^\]]{0,20}\])? (.*)")
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9A-Fa-f:.]{4,20})\): (\d{1,4})\b(?:, pid='?(\d{1,10}))?")
_KILLED = re.compile(r"[Oo]ut of memory[^:]*: Kill(?:ed)? process (\d{1,10})\b")


def cause_in_output(text: str) -> str:
    """What broke a process, as messages of nccl or CUDA in its output or exception say; empty if none does."""
    text = text[-_MOST_CHARACTERS:]
    for pattern, called in _MESSAGES:
        found = re.search(pattern, text)
        if found is not None:
            return called.format(*(_shown(each or "") for each in found.groups()))
    return ""


def cause_in_kernel_log(text: str, *, pid: int, began_s: float, ended_s: float) -> str:
    """What the kernel says of the end of a process; empty if it says nothing.

    Args:
        text: Lines of the kernel's log, each with its time in brackets.
        pid: The process, or -1 if lines that name a process are not meant for one of here.
        began_s: When it began, by the monotonic clock; older lines are left out.
        ended_s: When it ended.
    """
    of_gpu = ""
    for at_s, line in kernel_lines(text[-_MOST_CHARACTERS:]):
        if at_s < began_s - _CLOCK_S:
            continue
        if (killed := _KILLED.search(line)) is not None:
            if int(killed[1]) == pid:
                return "by the kernel for lack of memory"
        elif (xid := _XID.search(line)) is not None:
            number, is_own = int(xid[2]), xid[3] is not None and int(xid[3]) == pid
            what = f"Xid {number} of GPU {_shown(xid[1])}: {_XIDS.get(number, 'see the list of Xid errors of NVIDIA')}"
            if is_own:
                return what
            if number not in _OF_PROGRAM and at_s >= ended_s - _RECENT_S:
                of_gpu = of_gpu or what
    return of_gpu


def kernel_lines(text: str) -> Iterable[tuple[float, str]]:
    """Time and message of each line."""
    for line in text.splitlines():
        found = _KERNEL_LINE.match(line)
        if found is not None:
            yield float(found[1]), found[2]


def _shown(text: str) -> str:
    """Foreign text as a part of a line: short, and with nothing that moves a terminal's cursor."""
    return printable(text.strip().replace("\n", " ")[:_MOST_SHOWN])


def read_kernel_log() -> str:
    """The end of the kernel's log; empty where this process may not read it, or there is none."""
    buffer = ctypes.create_string_buffer(_MOST_CHARACTERS)
    try:
        length = ctypes.CDLL(None).klogctl(_READ_ALL, buffer, len(buffer))
    except (OSError, AttributeError):  # not Linux with glibc or musl
        return ""
    return buffer.raw[: max(0, length)].decode(errors="replace")


def first_cause(code: int, output: str, *, pid: int, began_s: float) -> str:
    """What broke a process that failed: the kernel's word, else that of nccl or CUDA; empty if neither says anything.

    Args:
        code: Its exit code, or minus the number of a signal.
        output: The end of its output, or its exception.
        pid: Of the process.
        began_s: When it began, by the monotonic clock.
    """
    found = cause_in_output(output)
    if code >= 0 and not found:  # the program's own exception, which has nothing to do with devices
        return ""
    if -code in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # somebody has asked it to end
        return ""
    named_pid = pid if _pid_namespace() == _FIRST_PID_NAMESPACE else -1
    return cause_in_kernel_log(read_kernel_log(), pid=named_pid, began_s=began_s, ended_s=time.monotonic()) or found


def _pid_namespace() -> str:
    try:
        return os.readlink(Path("/proc/self/ns/pid"))
    except OSError:
        return ""
