"""Runs contenders in turn and says how they compare: the noise of a shared machine hits all of them alike.

    comparison = compare("Overhead", [Contender(name="gloo", ...), Contender(name="hyperpod", ...)], schedule)
    print_comparison(comparison)
    write_results("comm_overhead", [comparison])

Each contender has a set of rank processes, renewed a few times. In every round each of them runs one short turn of
steps, in an order that rotates, while the others sleep. A ratio is taken within a round, between turns that lie a
second or two apart, and the first contender is the reference. docs/benchmarks.md tells how to read the result.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.ranks import Contender, Order, RankGroup
from benchmarks.stats import rotated

OVERRULED = ("rounds", "starts", "steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How much is run, and how long anybody may take."""

    rounds: int = 30
    """Turns of each contender: the number of samples."""
    starts: int = 4
    """Fresh sets of processes the rounds are spread over: two sets of the same program differ by a few percent."""
    steps: int = 10
    """Timed steps of one turn."""
    lead_in: int = 1
    """Untimed steps before them."""
    warmup: int = 5
    """Steps of each contender before the first round."""
    setup_timeout_s: float = 180.0
    turn_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        if min(self.rounds, self.steps, self.starts) < 1 or min(self.lead_in, self.warmup) < 0:
            raise ValueError(
                f"a schedule needs at least one round, start and step, and no negative number, but got {self}"
            )

    @property
    def rounds_per_start(self) -> list[int]:
        """The rounds, spread over the starts as evenly as they go; no start without a round."""
        starts = min(self.starts, self.rounds)
        return [self.rounds // starts + (index < self.rounds % starts) for index in range(starts)]

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace, **defaults: Any) -> "Schedule":
        """A benchmark's own defaults, cut down by `--quick`, overruled by `--rounds`, `--starts` and `--steps`."""
        quick = {"rounds": 3, "steps": 2, "warmup": 2, "starts": 1} if arguments.quick else {}
        asked = {name: value for name in OVERRULED if (value := getattr(arguments, name)) is not None}
        return cls(**{**defaults, **quick, **asked})


@dataclass(slots=True, kw_only=True)
class Run:
    """All that was seen of one contender."""

    name: str
    step_s: list[float] = field(default_factory=list)
    """Seconds per step, one sample a round."""
    measures: dict[str, list[float]] = field(default_factory=dict)
    """Counters per step, summed over the ranks, one sample a round."""
    results: list[Any] = field(default_factory=list)
    """What `train` returned, by rank, one start after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What was seen of all contenders of one comparison; the first is the reference."""

    title: str
    schedule: Schedule
    runs: list[Run]


def compare(title: str, contenders: Sequence[Contender], schedule: Schedule) -> Comparison:
    """Run all contenders in turn.

    Raises:
        ContenderFailed: a rank raised, died, or missed its deadline; no process is left behind.
    """
    runs = {contender.name: Run(name=contender.name) for contender in contenders}
    for start_index, num_rounds in enumerate(schedule.rounds_per_start):
        with tempfile.TemporaryDirectory(prefix="benchmark-") as folder, ExitStack() as stack:
            groups = []
            for contender in rotated(contenders, start_index):
                progress(f"{title}: start {start_index + 1}, {contender.world_size} ranks of {contender.name}")
                group = stack.enter_context(RankGroup(contender, Path(folder)))
                group.wait_ready(schedule.setup_timeout_s)
                group.take_turn(Order(lead_in=schedule.warmup, steps=1), schedule.turn_timeout_s)
                groups.append(group)
            for round_index in range(num_rounds):
                progress(f"{title}: start {start_index + 1}, round {round_index + 1} of {num_rounds}")
                for group in rotated(groups, round_index):
                    record_turn(group, schedule, runs[group.contender.name])
            for group in groups:
                runs[group.contender.name].results += group.finish(schedule.turn_timeout_s)
    progress("")
    return Comparison(title=title, schedule=schedule, runs=list(runs.values()))


def record_turn(group: RankGroup, schedule: Schedule, run: Run) -> None:
    """Let one contender have its turn and add what it took, per step, to its samples."""
    turns = group.take_turn(Order(lead_in=schedule.lead_in, steps=schedule.steps), schedule.turn_timeout_s)
    # From the last rank's start to the last rank's end: a step ends when its slowest rank does.
    seconds = max(turn.end_s for turn in turns) - max(turn.start_s for turn in turns)
    run.step_s.append(seconds / schedule.steps)
    for name in turns[0].measures:
        total = sum(turn.measures[name] for turn in turns)
        run.measures.setdefault(name, []).append(total / schedule.steps)


def leave_cleanly_on_sigterm() -> None:
    """Let a termination request leave through every `finally`, as Ctrl-C does: ranks end, namespaces are removed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def argument_parser(description: str) -> argparse.ArgumentParser:
    """The arguments every benchmark takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--rounds", type=int, help="turns of each contender (default: the benchmark's own)")
    parser.add_argument("--starts", type=int, help="fresh processes to spread them over (default: the benchmark's own)")
    parser.add_argument("--steps", type=int, help="timed steps of one turn (default: the benchmark's own)")
    parser.add_argument("--quick", action="store_true", help="see that it works; the figures mean nothing")
    parser.add_argument("--json", type=Path, help="where to write the samples (default: benchmarks/results/NAME.json)")
    return parser


_progress_started_s = time.monotonic()


def progress(message: str) -> None:
    """One line that is written over on a terminal, a line a message elsewhere; on stderr, so that tables stay clean."""
    seconds = time.monotonic() - _progress_started_s
    if sys.stderr.isatty():
        width = os.get_terminal_size(sys.stderr.fileno()).columns - 1
        line = f"[{seconds:5.0f} s] {message}" if message else ""
        print(f"\r{line[:width]:<{width}}\r", end="", file=sys.stderr, flush=True)
    elif message:
        print(f"[{seconds:5.0f} s] {message}", file=sys.stderr, flush=True)
