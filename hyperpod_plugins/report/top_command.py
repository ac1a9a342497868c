"""`hyperpod top`: a running job, live in the terminal.

The terminal reads keys one by one while it runs (cbreak mode), and is as before when it ends: by q, Ctrl-C, SIGTERM or
an exception. If standard input is not a terminal, no keys are read; if standard output is not one, or the
package `rich` is missing, each view is plain lines.
"""

import argparse
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from types import FrameType
from typing import NoReturn

from hyperpod_plugins.elastic.store.records import printable
from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.report.live import JobView, RankView
from hyperpod_plugins.report.live_text import plain_lines, screen
from hyperpod_plugins.report.watch import JobWatch, WatchOptions, look_twice

_REDRAW_S = 0.25
_TOLD_S = 5.0
"""How long a line about a kill is shown."""
_END_S = 2.0
"""How long the last view stays on the screen."""
_ESCAPE, _BACKSPACES, _ENDS = "\x1b", ("\x7f", "\b"), ("q", "\x04")


def add_watch_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say which job is meant."""
    default = argparse.SUPPRESS  # so that --help shows no "(default: None)"
    parser.set_defaults(run_id=None, events=None)
    of_run = "the job's --rdzv-id (default: the only job whose store this machine serves)"
    parser.add_argument("--run-id", help=of_run, default=default)
    of_events = "folder of the job's ledgers (default: the agent's HYPERPOD_EVENTS)"
    parser.add_argument("--events", help=of_events, default=default)


def add_top_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `hyperpod top`."""
    add_watch_arguments(parser)
    parser.add_argument("--once", action="store_true", help="print the state once, and exit")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two updates")


def run_top(arguments: argparse.Namespace) -> int:
    """Show the job until it ends or the user does; returns 1 if there is none, or its store does not answer."""
    options = WatchOptions(run_id=arguments.run_id, events=arguments.events, interval_s=arguments.interval)
    try:
        watch = options.watch()
        if arguments.once:
            return _print(plain_lines(look_twice(watch)))
    except ConfigError as error:
        sys.stderr.write(f"hyperpod top: {printable(str(error))}\n")
        return 1
    is_screen = sys.stdout.isatty() and find_spec("rich") is not None
    watch.start()
    try:
        with own_messages_only():
            view = _show_screen(watch) if is_screen else _show_lines(watch, options.interval_s)
    finally:
        watch.stop()
    return 0 if view is None or view.state == "ended" or not watch.is_given_up else 1


def _show_lines(watch: JobWatch, interval_s: float) -> JobView | None:
    """Print a view at each interval; returns the last one, or None if the reader is gone."""
    time.sleep(min(interval_s, 1.0))
    while True:
        view = watch.view
        if view.state in ("ended", "unreachable"):
            lines = [f"job {view.run_id}: {view.state}: {view.message}"]
        else:
            lines = plain_lines(view)
        if _print([*lines, ""]) or view.state == "ended" or watch.is_given_up:
            return view
        time.sleep(interval_s)


@contextmanager
def own_messages_only() -> Generator[None]:
    """Context in which standard error shows what is written to `sys.stderr`, and no log.

    torch's client of a store logs each lost connection with a stack of C++, also at the usual end of a job.
    """
    former = sys.stderr
    former.flush()
    with os.fdopen(os.dup(2), "w", buffering=1) as own:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        sys.stderr = own
        try:
            yield
        finally:
            sys.stderr = former
            own.flush()
            os.dup2(own.fileno(), 2)


def _print(lines: list[str]) -> int:
    """Write lines to standard output; returns 1 if its reader is gone, as with `| head`."""
    try:
        sys.stdout.write("\n".join(map(printable, lines)) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return 1
    return 0


def _show_screen(watch: JobWatch) -> JobView | None:
    """Draw each view until a key ends it, or the job does; returns None if the user has ended it."""
    from rich.console import Console  # the extra `cli`
    from rich.live import Live

    console = Console(highlight=False, markup=False, emoji=False)
    prompt, view, ended_s = Prompt(), watch.view, None
    has_keys = sys.stdin.isatty()
    with (
        read_by_key() if has_keys else _no_keys() as wait_keys,
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while ended_s is None or time.monotonic() < ended_s + _END_S:
            view = watch.view
            if ended_s is None and (view.state == "ended" or watch.is_given_up):
                ended_s = time.monotonic()
            text = prompt.text(time.monotonic()) if has_keys else ""
            live.update(screen(view, text, console.width, console.height), refresh=True)
            for key in wait_keys(_REDRAW_S):
                action = prompt.press(key, view, time.monotonic())
                if action is not None and action.kill is None:
                    return None
                if action is not None and action.kill is not None:
                    watch.ask_to_kill(action.kill)
    _print([f"job {view.run_id}: {view.state}: {view.message}"])
    return view


# -- keys ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What a key asks for."""

    kill: RankView | None = None
    """Rank whose process is to be killed; None to end."""


class Prompt:
    """The keys so far: q ends; k, the number of a rank and y kill its process, for practice."""

    def __init__(self) -> None:
        self._digits: str | None = None
        """Of the rank; None outside of the question."""
        self._told, self._until_s = "", 0.0

    def text(self, now_s: float) -> str:
        """The line below the view."""
        if self._digits is not None:
            return f"kill which rank? {self._digits}_   (y: send SIGKILL, Esc: do not)"
        return self._told if now_s < self._until_s else "q: quit   k: kill a rank, for practice"

    def press(self, key: str, view: JobView, now_s: float) -> Action | None:
        """Take a key; returns what is to be done."""
        if self._digits is None:
            if key == "k":
                self._digits = ""
            return Action() if key in _ENDS else None
        if key.isdecimal() and key.isascii():
            self._digits = (self._digits + key)[:6]
        elif key in _BACKSPACES:
            self._digits = self._digits[:-1]
        elif key == "y" and self._digits:
            number, self._digits = int(self._digits), None
            rank = view.rank_of(number)
            self._tell(_kill_text(rank, number, view), now_s)
            return None if rank is None else Action(kill=rank)
        elif key == _ESCAPE or key in _ENDS or key == "n":
            self._digits = None
        return None

    def _tell(self, text: str, now_s: float) -> None:
        self._told, self._until_s = text, now_s + _TOLD_S


def _kill_text(rank: RankView | None, number: int, view: JobView) -> str:
    if rank is None:
        return f"there is no rank {number} among the {view.num_ranks} ranks of the job"
    return f"the agent of rank {number} was asked to kill its process (worker {rank.worker_id})"


def split_keys(data: bytes) -> list[str]:
    """The keys in what a terminal has sent; a sequence of an arrow or function key is none of ours."""
    if data.startswith(b"\x1b") and len(data) > 1:
        return []
    return list(data.decode(errors="replace"))


WaitKeys = Callable[[float], list[str]]


@contextmanager
def read_by_key() -> Generator[WaitKeys]:
    """Context in which standard input gives each key at once; afterwards the terminal is as before."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    former = signal.signal(signal.SIGTERM, _end)  # which would leave the terminal as it is

    def wait_keys(timeout_s: float) -> list[str]:
        ready, _, _ = select.select([fd], [], [], timeout_s)
        if not ready:
            return []
        data = os.read(fd, 256)
        return split_keys(data) if data else ["q"]  # the terminal is gone

    try:
        tty.setcbreak(fd)
        yield wait_keys
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
        signal.signal(signal.SIGTERM, former)


@contextmanager
def _no_keys() -> Generator[WaitKeys]:
    def wait_keys(timeout_s: float) -> list[str]:
        time.sleep(timeout_s)
        return []

    yield wait_keys


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
