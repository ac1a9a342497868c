"""What the processes of a job tell the benchmark: one file for all of them, one JSON object a line. No torch here.

Times are Unix seconds of one machine, so those of different processes can be compared.
"""

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

_VARIABLE = "RECOVERY_BENCHMARK"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all programs of a run have in common."""

    folder: str
    """Events, checkpoints and results of this run."""
    steps: int
    """Steps of the whole job."""
    fault_step: int
    """Step, counted from 0, in whose middle a rank is killed; -1 for an undisturbed run."""
    checkpoint_every: int
    """Steps between checkpoints, where the program writes any."""
    fault_rank: int = 1
    world_size: int = 2

    def to_environ(self) -> dict[str, str]:
        """The variable that tells a program."""
        return {_VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environ(cls) -> Self:
        """Inverse of `to_environ`."""
        return cls(**json.loads(os.environ[_VARIABLE]))

    @property
    def checkpoint(self) -> Path:
        """The one checkpoint, written over each time."""
        return Path(self.folder) / "checkpoint.pt"


class EventLog:
    """Appends events; a line is written at once, so lines of several processes never mix."""

    def __init__(self, setting: Setting, rank: int) -> None:
        """Open the log, and say since when this process exists."""
        self.rank = rank
        self._file = os.open(f"{setting.folder}/events.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self.tell("process_started", at_s=process_start_s())
        self.tell("program_started")

    def tell(self, event: str, *, at_s: float | None = None, **details: Any) -> None:
        """Write one event."""
        line = {"at_s": time.time() if at_s is None else at_s, "event": event, "pid": os.getpid(), "rank": self.rank}
        os.write(self._file, (json.dumps(line | details) + "\n").encode())


def read_events(folder: Path) -> list[dict[str, Any]]:
    """All events of a run, by time; without the last line, if that is just being written."""
    path = folder / "events.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return sorted((json.loads(line) for line in lines if line.endswith("\n")), key=lambda each: each["at_s"])


def process_start_s() -> float:
    """Unix time at which this process was forked, to about 10 ms."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    since_boot_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot_s
