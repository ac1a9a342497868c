"""Runs a job of several processes in a folder of its own, within a deadline, and leaves nothing behind."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.recovery_jobs.events import Setting, read_events

ROOT = Path(__file__).parent.parent.parent
GRACE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One process to start."""

    argv: Sequence[str]
    environ: Mapping[str, str] = field(default_factory=dict)
    is_service: bool = False
    """It serves the others, and is ended after them."""


class JobFailed(RuntimeError):
    """A job did not come to its end."""


def run_job(commands: Sequence[Command], setting: Setting, timeout_s: float, *, expected_done: int) -> None:
    """Start the commands, and return when all that are not services have ended.

    Args:
        commands: started in this order.
        setting: what their programs have in common.
        timeout_s: until when they must have ended.
        expected_done: processes that must have told that they are done.

    Raises:
        JobFailed: the deadline passed, or too few processes were done; with the tails of the logs.
    """
    folder = Path(setting.folder)
    environ = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "RES_OPTIONS": "timeout:1 attempts:1",  # torch's store asks for names; a lost answer must not cost one job 5 s
        **setting.to_environ(),
    }
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for index, command in enumerate(commands):
            with (folder / f"output-{index}.log").open("wb") as log:
                process = subprocess.Popen(
                    command.argv,
                    cwd=ROOT,
                    env={**environ, **command.environ},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            processes.append(process)
            if command.is_service:
                time.sleep(0.5)
        workers = [p for p, command in zip(processes, commands, strict=True) if not command.is_service]
        deadline_s = time.monotonic() + timeout_s
        while any(p.poll() is None for p in workers) and time.monotonic() < deadline_s:
            time.sleep(0.1)
            if num_done(folder) >= expected_done:  # what a launcher does after that is not our concern
                deadline_s = min(deadline_s, time.monotonic() + GRACE_S)
    finally:
        end_all(processes, folder)
    if num_done(folder) < expected_done:
        tails = [
            f"--- {log.name} ---\n{log.read_text(errors='replace')[-2500:]}" for log in folder.glob("output-*.log")
        ]
        raise JobFailed("\n".join([f"{num_done(folder)} of {expected_done} processes came to the end", *tails]))


def num_done(folder: Path) -> int:
    return sum(each["event"] == "done" for each in read_events(folder))


def end_all(processes: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    """End launchers as a user would, then, by force, them and any process that works in this run's folder."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline_s = time.monotonic() + GRACE_S
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline_s - time.monotonic()))
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    for pid in processes_of(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def processes_of(folder: Path) -> list[int]:
    """Processes whose environment names the folder: this run's, and nobody else's."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if str(folder).encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return [pid for pid in found if pid != os.getpid()]


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
