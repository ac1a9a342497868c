"""Output of workers: torch's choice of files, one more folder for each replacement, and `--tee`.

torch's `TailLog` does not serve `--tee` here: it copies a line that is half written, so that lines of several workers
run into each other, it never flushes, and it cannot add the files of a replacement.
"""

import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self, TextIO

from torch.distributed.elastic.multiprocessing import LogsDest
from torch.distributed.elastic.utils.logging import get_logger

logger = get_logger(__name__)
_INTERVAL_S = 0.1


Stream = Literal["stdout", "stderr"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLogs:
    """Files of one process; an empty path means that the process inherits the stream from the agent."""

    stdout: str
    stderr: str
    error_file: str
    """Where the program writes its exception for the launcher; may be empty."""
    teed: frozenset[Stream]
    """Streams that are also copied to the console."""

    @classmethod
    def of(cls, destination: LogsDest, local_rank: int) -> Self:
        """The files that torch chose for the first process of a local rank."""
        stdout, stderr = destination.stdouts[local_rank], destination.stderrs[local_rank]
        teed: set[Stream] = set()
        if stdout and destination.tee_stdouts.get(local_rank) == stdout:
            teed.add("stdout")
        if stderr and destination.tee_stderrs.get(local_rank) == stderr:
            teed.add("stderr")
        error_file = destination.error_files[local_rank]
        return cls(
            stdout=stdout,
            stderr=stderr,
            error_file="" if error_file == os.devnull else error_file,
            teed=frozenset(teed),
        )

    def path(self, stream: Stream) -> str:
        """The file of a stream."""
        return self.stdout if stream == "stdout" else self.stderr

    def of_replacement(self, incarnation: int) -> Self:
        """The same files in a folder `incarnation_N` beside them, which is created.

        If that fails (for example on a full disk), the process writes to the console: it matters more than its log.
        """
        moved = {"stdout": self.stdout, "stderr": self.stderr, "error_file": self.error_file}
        for name, path in moved.items():
            if path and path != os.devnull:
                folder = Path(path).parent / f"incarnation_{incarnation}"
                try:
                    folder.mkdir(parents=True, exist_ok=True)
                except OSError as error:
                    logger.warning("the replacement has no log files: %s", error)
                    return replace(self, stdout="", stderr="", error_file="", teed=frozenset())
                moved[name] = str(folder / Path(path).name)
        return replace(self, **moved)


@dataclass(frozen=True, slots=True)
class Sink:
    """A file or console to which a stream of all workers is copied."""

    stream: Stream
    file: TextIO
    needles: tuple[str, ...] = ()
    """Copy only lines that contain one of these; empty to copy all."""

    def wants(self, line: str) -> bool:
        """Whether a line should be copied."""
        return not self.needles or any(needle in line for needle in self.needles)


def open_sinks(destination: LogsDest, stdout_filters: Sequence[str], stderr_filters: Sequence[str]) -> list[Sink]:
    """The console, and torch's files for the lines of each stream that contain one of the filters."""
    sinks = [Sink("stdout", sys.stdout), Sink("stderr", sys.stderr)]
    for sink, path, needles in (
        (sinks[0], destination.filtered_stdout, stdout_filters),
        (sinks[1], destination.filtered_stderr, stderr_filters),
    ):
        if needles:
            sinks.append(Sink(sink.stream, open(path, "w"), tuple(needles)))  # noqa: SIM115  (until the agent ends)
    return sinks


@dataclass(slots=True)
class _Tail:
    path: str
    prefix: str
    sink: Sink
    file: TextIO | None = None
    part: str = ""
    is_complete: bool = False

    def copy(self) -> None:
        """Write the lines completed since the last call."""
        if self.file is None:
            if not Path(self.path).exists():
                return
            self.file = open(self.path, errors="replace")  # noqa: SIM115  (closed by `finish`)
        *lines, self.part = (self.part + self.file.read()).split("\n")
        for line in lines:
            if self.sink.wants(line):
                self.sink.file.write(f"{self.prefix}{line}\n")
        if lines:
            self.sink.file.flush()

    def finish(self) -> None:
        """Write the rest and close the file."""
        self.copy()
        if self.part and self.sink.wants(self.part):
            self.sink.file.write(f"{self.prefix}{self.part}\n")
        self.close()

    def close(self) -> None:
        """Close the file; unread output is not copied."""
        if self.file is not None:
            self.file.close()


class Tee:
    """Copies the lines of growing files, each with a prefix, in a single thread; files can be added meanwhile."""

    def __init__(self) -> None:
        self._tails: list[_Tail] = []
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def tail(self, path: str, prefix: str, sink: Sink) -> None:
        """Copy `path`, which need not exist yet, to `sink`."""
        with self._lock:
            self._tails.append(_Tail(path, prefix, sink))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tee", daemon=True)
            self._thread.start()

    def complete(self, path: str) -> None:
        """Declare that nothing more will be written to `path`."""
        with self._lock:
            for tail in self._tails:
                tail.is_complete |= tail.path == path

    def close(self) -> None:
        """Copy the remaining output, and stop."""
        self._end.set()
        if self._thread is not None:
            self._thread.join(timeout=10)
            self._thread = None
        with self._lock:
            for tail in self._tails:
                tail.is_complete = True
            self._copy_all()
        self._end.clear()

    def _run(self) -> None:
        while not self._end.wait(_INTERVAL_S):
            with self._lock:
                self._copy_all()

    def _copy_all(self) -> None:
        """Copy new output of all files; stop copying a file that fails (a full disk, a closed console)."""
        going_on: list[_Tail] = []
        for tail in self._tails:
            try:
                (tail.finish if tail.is_complete else tail.copy)()
            except (OSError, ValueError) as error:
                logger.warning("%s is no longer copied: %s", tail.path, error)
                tail.close()
                continue
            if not tail.is_complete:
                going_on.append(tail)
        self._tails = going_on
