"""What is known of a worker that failed: one line for the ledger, and the whole story for the console."""

import json
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from hyperpod_plugins.elastic.crew import Post
from hyperpod_plugins.elastic.leash import signal_name
from hyperpod_plugins.elastic.restarts import is_of_peer

_NUM_LINES = 20


def cause(post: Post, code: int) -> str:
    """How the process of a post ended, in one line; a negative code is that of a signal."""
    if code < 0:
        return f"killed by {signal_name(-code)}"
    match _error(post.logs.error_file):
        case {"message": {"message": str(text)}}:
            return f"exit code {code} ({text.strip().splitlines()[0] if text.strip() else text})"
        case _:
            return f"exit code {code}"


def error_of(post: Post) -> str:
    """First line of the exception that ended the process of a post, with its class; empty where none is known."""
    match _error(post.logs.error_file):
        case {"message": message}:
            return _first_line(message)
        case _:
            return ""


def failure(post: Post, code: int) -> ProcessFailure:
    """The record of a failure as torch knows it: the program's own traceback, or the end of its error output."""
    whole = post.logs.error_file if _error(post.logs.error_file) is not None else ""
    record = ProcessFailure(local_rank=post.local_rank, pid=post.pid, exitcode=code, error_file=whole)
    if not whole and post.logs.stderr:
        record.message = f"{record.message}\nLast lines of {post.logs.stderr}:\n{_tail(post.logs.stderr)}"
    return record


def causes(failures: dict[int, ProcessFailure]) -> dict[int, ProcessFailure]:
    """Failures that the end of another process has not caused; all where there is none of these."""
    own = {rank: each for rank, each in failures.items() if not is_of_peer(_first_line(each.message))}
    return own or failures


def story(error: ChildFailedError) -> str:
    """The traceback of the worker that failed first, then torch's summary of all that did by themselves."""
    error = ChildFailedError(error.name, causes(error.failures))
    rank, first = error.get_first_failure()
    told: Any = first.message
    if isinstance(told, dict):
        told = told.get("extraInfo", {}).get("py_callstack", told.get("message", ""))
    return f"Rank {rank} failed first:\n\n{told}\n{error.format_msg()}"


def _first_line(message: Any) -> str:
    match message:
        case {"message": str(text)} | str(text):
            return text.strip().partition("\n")[0]
        case _:
            return ""


def _error(path: str) -> dict[str, Any] | None:
    try:
        return json.loads(Path(path).read_text()) if path else None
    except (OSError, ValueError):  # none, or a program that was killed while it wrote
        return None


def _tail(path: str) -> str:
    try:
        lines = Path(path).read_bytes()[-(1 << 14) :].decode(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-_NUM_LINES:])
