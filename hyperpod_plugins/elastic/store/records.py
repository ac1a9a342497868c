"""What went wrong, as the one who knew it first tells it."""

import functools
import json
import time
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, Literal, Self, cast, get_args, get_origin, get_type_hints

# Frozen data as one line of JSON, the form in which agents and members leave it in a store.

_PLAIN = {str: (str,), int: (int,), bool: (bool,), float: (float, int)}


class JsonRecord:
    """Abstract base of dataclasses whose fields JSON knows."""

    __slots__ = ()

    def to_json(self) -> str:
        """One line of JSON, the same for equal values."""
        return json.dumps(asdict(cast("Any", self)))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Inverse of `to_json`, also for what a stranger wrote.

        Raises:
            ValueError: the text is not JSON, a field is missing or unknown, or a plain one has another type.
        """
        try:
            values = json.loads(text)
        except RecursionError:
            raise ValueError("the text is nested too deeply") from None
        return cls.checked(values)

    @classmethod
    def checked(cls, values: object) -> Self:
        """The same from what JSON has made of the text.

        Raises:
            ValueError: as `from_json`.
        """
        _check(cls, values)
        return cls(**cast("dict[str, Any]", values))


def printable(text: str) -> str:
    """The same text, with every character that could move a terminal's cursor or change its colours written out."""
    return "".join(each if each.isprintable() or each == "\n" else ascii(each)[1:-1] for each in text)


def _check(cls: type[JsonRecord], values: object) -> None:
    if not isinstance(values, dict):
        raise ValueError(f"{cls.__name__} needs a JSON object, not {type(values).__name__}")
    given, (known, required) = cast("dict[str, object]", values), _fields(cls)
    if not required <= given.keys() <= known.keys():
        raise ValueError(f"{cls.__name__} has the fields {sorted(known)}, but {sorted(given)} are given")
    for name, value in given.items():
        hint = known[name]
        if get_origin(hint) is Literal:
            is_right = isinstance(value, str) and value in get_args(hint)
        else:
            is_right = hint not in _PLAIN or type(value) in _PLAIN[hint]
        if not is_right:
            raise ValueError(f"{cls.__name__}.{name} must be {hint}, not {value!r:.100}")


@functools.cache
def _fields(cls: type[JsonRecord]) -> tuple[dict[str, Any], set[str]]:
    """Type of each field, and the names of those that have no default."""
    hints, found = get_type_hints(cls), fields(cast("Any", cls))
    required = {each.name for each in found if each.default is MISSING and each.default_factory is MISSING}
    return {each.name: hints[each.name] for each in found}, required


IncidentKind = Literal[
    "process",  # a worker process ended before its work was done
    "exception",  # a rank's own code raised
    "collective",  # a rank saw a collective fail, and knows no more than that
    "hang",  # a rank did not arrive where the others waited for it
    "agent",  # the agent of a node is gone, and all workers of that node with it
    "resize",  # the job goes on as another world
    "request",  # somebody asked for it: a test, a return to a snapshot
]


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRecord(JsonRecord):
    """The end of a generation: who failed, how, and who says so."""

    kind: IncidentKind
    cause: str
    """One line: an exit code, a signal's name, an exception's text."""
    worker_id: int = -1
    """Place of the process that failed (its rank, as long as the job has not been resized); -1 if that is not known."""
    incarnation: int = 0
    """Which process in that place: 0 for the founder."""
    reporter: str = ""
    """Who wrote this, such as `rank 2` or `agent of node 0`."""
    step: int = -1
    """Number of steps committed by the reporter, or -1 where it does not count them."""
    world: int = 0
    """Number of the world that takes over, where this ends a generation for that."""
    at_s: float = field(default_factory=time.time)
    """Unix time of the report, in seconds."""

    def __str__(self) -> str:
        """One sentence part: `rank 2 (process): killed by SIGKILL`."""
        who = f"rank {self.worker_id}" if self.worker_id >= 0 else self.reporter or "unknown rank"
        return f"{who} ({self.kind}): {self.cause}"
