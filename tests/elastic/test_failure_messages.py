"""Causes that nccl, CUDA and the kernel tell: which of them is named, and that foreign text stays harmless."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from hyperpod_plugins.elastic.launcher.failure_messages import (
    cause_in_kernel_log,
    cause_in_output,
    first_cause,
    kernel_lines,
    read_kernel_log,
)
from hyperpod_plugins.elastic.launcher.local_workers import WorkerSlot, describe_exit
from hyperpod_plugins.elastic.launcher.logs import ProcessLogs

REMOTE = (
    "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, remote "
    "process exited or there was a network error, NCCL version 2.21.5\nncclRemoteError: A call failed possibly due to "
    "a network error or a remote process exiting prematurely.\nLast error:\nsocketProgress: Connection closed by peer"
)
WATCHDOG = (
    "[rank1]:[E ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, "
    "OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600012 milliseconds before timing out."
)
ILLEGAL = "CUDA error: an illegal memory access was encountered"
OF_WATCHDOG = (
    "terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  [PG ID 0 PG GUID 0 Rank 3] "
    f"Process group watchdog thread terminated with exception: {ILLEGAL}\nCUDA kernel errors might be reported later"
)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("", ""),
        ("ValueError: bad batch", ""),
        ("nothing about ncclRemoteErrors or a CUDA errors: here", ""),
        (REMOTE, "nccl: connection to another rank was lost (ncclRemoteError)"),
        ("ncclSystemError: System call (e.g. socket, malloc) failed", "nccl: system error (ncclSystemError)"),
        ("ncclInternalError: Internal check failed.", "nccl: internal error (ncclInternalError)"),
        ("ncclInvalidUsage: This usually reflects invalid usage", "nccl: invalid usage (ncclInvalidUsage)"),
        ("ncclInvalidArgument: Invalid value", "nccl: invalid argument (ncclInvalidArgument)"),
        ("ncclUnhandledCudaError: Call to CUDA function failed.", "nccl: unhandled CUDA error"),
        ("NCCL WARN Cuda failure 700 'an illegal memory access'", "CUDA error: an illegal memory access"),
        (WATCHDOG, "nccl: watchdog timeout of a collective"),
        (OF_WATCHDOG, ILLEGAL),
        (f"{WATCHDOG}\n{REMOTE}\n{OF_WATCHDOG}", ILLEGAL),  # what breaks, not what follows from it
        (f"{REMOTE}\n{WATCHDOG}", "nccl: watchdog timeout of a collective"),
        (f"{ILLEGAL}\nCUDA error: uncorrectable ECC error encountered", "uncorrectable ECC error of a GPU"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "CUDA out of memory"),
        ("CUDA error: \x1b[2Jall is well\x07", "CUDA error: \\x1b[2Jall is well\\x07"),
        ("CUDA error: " + "x" * 5000, "CUDA error: " + "x" * 120),
        (ILLEGAL + "\n" * 100_000, ""),  # only the end is read
    ],
)
def test_the_cause_in_an_output(text, cause):
    assert cause_in_output(text) == cause


XID = "<4>[ 1000.500000] NVRM: Xid (PCI:0000:3b:00): {}"
LOST_GPU = XID.format("79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.")
KILLED = "<3>[ 1001.250000] Out of memory: Killed process 4711 (python3) total-vm:1000kB, anon-rss:900kB, UID:0"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("", ""),
        ("no kernel line\n[x] neither\n[ 1000.5]", ""),
        (LOST_GPU, "Xid 79 of GPU 0000:3b:00: GPU has fallen off the bus"),
        (XID.format("48, DBE"), "Xid 48 of GPU 0000:3b:00: double bit ECC error"),
        (XID.format("999, new"), "Xid 999 of GPU 0000:3b:00: see the list of Xid errors of NVIDIA"),
        (XID.format("31, pid=4711, name=python3, Ch 8, MMU Fault"), "Xid 31 of GPU 0000:3b:00: memory page fault"),
        (XID.format("31, pid=4712, name=python3, Ch 8, MMU Fault"), ""),  # the error of another program
        (XID.format("94, pid=4712, Contained"), "Xid 94 of GPU 0000:3b:00: contained ECC error"),
        (KILLED, "by the kernel for lack of memory"),
        (KILLED.replace("4711", "47110"), ""),
        (KILLED.replace("Out of memory", "Memory cgroup out of memory"), "by the kernel for lack of memory"),
        (f"{LOST_GPU}\n{KILLED}", "by the kernel for lack of memory"),  # it names the process
        (KILLED.replace("] Out", "][ T4711] Out"), "by the kernel for lack of memory"),
        ("[ 1001.0] python3[4711]: segfault at 0 ip 00007f", ""),  # as its signal says
        (LOST_GPU.replace("1000.5", "800.5"), ""),  # before the process began
        (LOST_GPU.replace("1000.5", "1e400"), ""),
        (f"{LOST_GPU}\n" + "[ 1002.0] " + "x" * 70_000, ""),  # only the end is read
    ],
)
def test_the_cause_in_the_log_of_the_kernel(text, cause):
    assert cause_in_kernel_log(text, pid=4711, began_s=900.0, ended_s=1002.0) == cause


def test_an_old_xid_of_another_process_is_not_the_cause():
    of_another = XID.format("94, pid=4712, Contained")
    own = XID.format("94, pid=4711, Contained")
    assert cause_in_kernel_log(of_another, pid=4711, began_s=900.0, ended_s=5000.0) == ""
    assert cause_in_kernel_log(own, pid=4711, began_s=900.0, ended_s=5000.0)


def test_in_another_pid_namespace_no_line_names_a_process_of_here():
    assert cause_in_kernel_log(KILLED, pid=-1, began_s=900.0, ended_s=1002.0) == ""
    assert cause_in_kernel_log(LOST_GPU, pid=-1, began_s=900.0, ended_s=1002.0)


def test_the_log_of_this_kernel_is_read_or_refused_in_no_time():
    since_s = time.monotonic()
    text = read_kernel_log()
    assert time.monotonic() - since_s < 1.0
    assert len(text) <= 1 << 16
    assert cause_in_kernel_log(text, pid=-1, began_s=time.monotonic() + 3600, ended_s=time.monotonic() + 3600) == ""


def test_lines_of_this_kernel_have_the_time_of_the_monotonic_clock():
    began_s = time.monotonic()
    child = subprocess.Popen([sys.executable, "-c", "import ctypes; ctypes.string_at(0)"])
    assert child.wait(60) == -signal.SIGSEGV
    times_s = [at_s for at_s, line in kernel_lines(read_kernel_log()) if f"[{child.pid}]: segfault" in line]
    if not times_s:
        pytest.skip("the kernel's log cannot be read here, or has no line about faults")
    assert began_s - 1.0 <= times_s[-1] <= time.monotonic() + 1.0


def test_a_process_that_was_asked_to_end_has_no_other_cause():
    assert first_cause(-15, WATCHDOG, pid=1, began_s=time.monotonic()) == ""
    assert first_cause(-6, WATCHDOG, pid=-1, began_s=time.monotonic()) == "nccl: watchdog timeout of a collective"


@pytest.mark.parametrize(
    ("code", "output", "message", "told"),
    [
        (-6, OF_WATCHDOG, "", f"killed by SIGABRT, {ILLEGAL}"),
        (-6, "", "", "killed by SIGABRT"),
        (-9, "", "", "killed by SIGKILL"),
        (1, "", "ValueError: x\nmore", "exit code 1 (ValueError: x)"),
        (1, "", f"RuntimeError: {ILLEGAL}\nmore", f"exit code 1 (RuntimeError: {ILLEGAL})"),
        (1, "", f"DistBackendError: NCCL error\n{REMOTE}",
         "exit code 1 (DistBackendError: NCCL error; nccl: connection to another rank was lost (ncclRemoteError))"),
        (3, WATCHDOG, "", "exit code 3 (nccl: watchdog timeout of a collective)"),
        (3, "", "", "exit code 3"),
    ],
)  # fmt: skip
def test_how_a_worker_ended_says_what_broke_it(tmp_path, code, output, message, told):
    (tmp_path / "stderr").write_text(output)
    (tmp_path / "error").write_text(json.dumps({"message": {"message": message}}) if message else "")
    files = {"stdout": "", "stderr": str(tmp_path / "stderr"), "error_file": str(tmp_path / "error")}
    logs = ProcessLogs(**files, teed=frozenset())
    slot = WorkerSlot(
        local_rank=0,
        worker_id=0,
        environ={},
        logs=logs,
        first_logs=logs,
        prefix="",
        pid=2**22 + 1,
        started_s=time.monotonic(),
    )
    assert describe_exit(slot, code) == told


@pytest.mark.spawns
def test_the_ledger_of_an_agent_has_the_message_of_a_worker_that_was_aborted(tmp_path):
    program = f"import os, sys; print({OF_WATCHDOG!r}, file=sys.stderr, flush=True); os.abort()"
    (tmp_path / "program.py").write_text(program)
    command = [sys.executable, "-m", "hyperpod_plugins.elastic.launcher.main", "--nproc-per-node=1", "--redirects=3"]
    environ = os.environ | {"HYPERPOD_EVENTS": str(tmp_path / "events")}
    done = subprocess.run(
        [*command, f"--log-dir={tmp_path / 'logs'}", str(tmp_path / "program.py")],
        env=environ,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 1, done.stderr.decode()[-4000:]
    (agent,) = (tmp_path / "events").glob("agent-*.jsonl")
    lines = [json.loads(line) for line in agent.read_text().splitlines()]
    assert [line["cause"] for line in lines if line["kind"] == "exit"] == [f"killed by SIGABRT, {ILLEGAL}"]
