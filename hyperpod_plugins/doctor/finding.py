"""What a check finds, for which job, and how facts are gathered within a deadline.

Each module of this package has a subject: a frozen dataclass of its facts, pure functions that decide what they mean,
and one function that gathers them, which has a deadline for every wait.
"""

import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from hyperpod_plugins.errors import ConfigError

CheckStatus = Literal["ok", "warning", "error", "skipped"]
GIB_BYTES = 2**30
MIB_BYTES = 2**20
_MAX_OUTPUT_BYTES = 2**20
_MAX_FILE_BYTES = 2**20
_REAP_S = 1.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check."""

    name: str
    """Name of the check, as in the manual."""
    status: CheckStatus
    """`error`: a job will not run, or not recover; `skipped`: not checked, or not applicable."""
    found: str
    """What was found."""
    advice: str = ""
    """What to do; only a status `ok` may have none."""

    def __post_init__(self) -> None:
        """Check that there is advice where it is needed."""
        if self.status != "ok" and not self.advice:
            raise ValueError(f"the finding {self.name!r} has the status {self.status!r}, but no advice.")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSize:
    """Size of the job that the machine must be fit for."""

    world_size: int = 1
    """Number of ranks."""
    local_world_size: int = 1
    """Number of ranks on this machine."""
    snapshot_gib: float = 0.0
    """Size of one rank's snapshot in GiB; 0 if it is not known."""
    port: int = 29400
    """Port of the rendezvous; 0 for any free one, which needs no check."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not 1 <= self.local_world_size <= self.world_size:
            raise ConfigError(
                f"--local-world-size {self.local_world_size} must be at least 1 and at most --world-size "
                f"{self.world_size}: the number of ranks on this machine, of all ranks."
            )
        if not 0 <= self.snapshot_gib < float("inf"):
            raise ConfigError(f"--snapshot-gib {self.snapshot_gib} must be a number of GiB; 0 if it is not known.")
        if not 0 <= self.port < 2**16:
            raise ConfigError(f"--port {self.port} must be a port, 1 to 65535; 0 if the job takes any free one.")

    @property
    def has_other_nodes(self) -> bool:
        """Whether some of the ranks are on other machines."""
        return self.world_size > self.local_world_size


def within(deadline_s: float, call: Callable[[], T]) -> T | None:
    """Call a function in another thread; None if it takes longer than `deadline_s`, and then its thread is abandoned.

    The function must release the GIL while it waits, and handle its own exceptions.
    """
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(call()), name="hyperpod_doctor", daemon=True)
    thread.start()
    thread.join(deadline_s)
    return results[0] if results else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandOutput:
    """How a command of the system ended."""

    text: str = ""
    """What it printed, errors included."""
    failure: str = ""
    """Why there is no usable text; empty if the command ended with code 0."""
    is_installed: bool = True


def output_of(command: Sequence[str], deadline_s: float) -> CommandOutput:
    """Run a command and return what it prints; kill it with its children at the deadline.

    The output goes to a file: a pipe stays open as long as a child that the command has left behind. A command that
    cannot be killed, as it waits for a driver, is abandoned.
    """
    with tempfile.TemporaryFile() as file:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
        except (FileNotFoundError, NotADirectoryError):
            return CommandOutput(failure=f"{command[0]} is not installed", is_installed=False)
        except OSError as error:
            return CommandOutput(failure=f"{command[0]} cannot be started ({error.strerror})")
        failure = ""
        try:
            code = process.wait(deadline_s)
            failure = f"{command[0]} ended with code {code}" if code else ""
        except subprocess.TimeoutExpired:
            failure = f"{command[0]} did not answer within {deadline_s:g} s"
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_REAP_S)
        file.seek(0)
        return CommandOutput(text=file.read(_MAX_OUTPUT_BYTES).decode(errors="replace"), failure=failure)


def file_text(path: str | Path) -> str:
    """The text of a small file of the kernel; empty if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(_MAX_FILE_BYTES).decode(errors="replace")
    except OSError:
        return ""


def number_of(text: str) -> int | None:
    """A whole number, which the kernel or a command has printed; None if it is none."""
    text = text.strip()
    digits = text.removeprefix("-")
    return int(text) if digits.isascii() and digits.isdigit() and len(digits) <= 20 else None


def gib(num_bytes: float) -> str:
    """A size for a message."""
    return f"{num_bytes / GIB_BYTES:.1f} GiB" if num_bytes >= GIB_BYTES else f"{num_bytes / MIB_BYTES:.0f} MiB"
