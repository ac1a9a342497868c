"""Records that agents and members write to a store: frozen dataclasses as one line of JSON, and `FailureRecord`."""

import enum
import functools
import json
import time
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from types import UnionType
from typing import Any, Literal, Self, cast, get_args, get_origin, get_type_hints

_PLAIN: dict[Any, tuple[type, ...]] = {
    str: (str,),
    int: (int,),
    bool: (bool,),
    float: (float, int),
    type(None): (type(None),),
}


class JsonRecord:
    """Abstract base of dataclasses whose fields are plain values, enum members, tuples and other dataclasses."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values; dataclasses become dicts."""
        return asdict(cast("Any", self))

    def to_json(self) -> str:
        """Return one line of JSON, identical for equal values; enum members by their names."""
        return json.dumps(self.to_dict(), default=_name_of)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Inverse of `to_json`; safe for untrusted text.

        Raises:
            ValueError: the text is not JSON, a field is missing or unknown, or a value has a wrong type.
        """
        try:
            return cls.from_dict(json.loads(text))
        except RecursionError:
            raise ValueError("the text is nested too deeply") from None

    @classmethod
    def from_dict(cls, values: object) -> Self:
        """Like `from_json`, from the parsed JSON.

        Raises:
            ValueError: as in `from_json`.
        """
        return _decode(cls, values, cls.__name__)


def _name_of(value: object) -> str:
    if isinstance(value, enum.Enum):
        return value.name
    raise TypeError(f"{type(value).__name__} is not a plain value")


def printable(text: str) -> str:
    """Escape every character that could move a terminal's cursor or change its colors."""
    return "".join(each if each.isprintable() or each == "\n" else ascii(each)[1:-1] for each in text)


def _decode(hint: Any, value: Any, name: str) -> Any:
    """Convert parsed JSON to the type `hint`; `name` is for the message."""
    origin, parts = get_origin(hint), get_args(hint)
    if is_dataclass(hint):
        return _decode_fields(cast("type", hint), value)
    if origin is tuple and isinstance(value, list):  # of any length
        return tuple(_decode(parts[0], each, name) for each in cast("list[Any]", value))
    if origin is UnionType:  # a type or None
        return None if value is None else _decode(parts[0], value, name)
    if isinstance(hint, enum.EnumType) and isinstance(value, str) and value in hint.__members__:
        return hint[value]
    if hint is Any or (origin is Literal and isinstance(value, str) and value in parts):
        return value
    if type(value) in _PLAIN.get(hint, ()):
        return value
    raise ValueError(f"{name} must be {hint}, not {value!r:.100}")


def _decode_fields(cls: type, values: object) -> Any:
    if not isinstance(values, dict):
        raise ValueError(f"{cls.__name__} needs a JSON object, not {type(values).__name__}")
    given, (known, required) = cast("dict[str, object]", values), _fields(cls)
    if not required <= given.keys() <= known.keys():
        raise ValueError(f"{cls.__name__} has the fields {sorted(known)}, but {sorted(given)} are given")
    return cls(**{name: _decode(known[name], value, f"{cls.__name__}.{name}") for name, value in given.items()})


@functools.cache
def _fields(cls: type) -> tuple[dict[str, Any], set[str]]:
    """Return the type of each field, and the names of the fields without a default."""
    hints, found = get_type_hints(cls), fields(cast("Any", cls))
    required = {each.name for each in found if each.default is MISSING and each.default_factory is MISSING}
    return {each.name: hints[each.name] for each in found}, required


FailureKind = Literal[
    "process",  # a worker process ended before its work was done
    "exception",  # a rank's own code raised
    "collective",  # a rank saw a collective fail, for an unknown reason
    "hang",  # a rank did not arrive where the others waited for it
    "agent",  # the agent of a node is gone, and all workers of that node with it
    "resize",  # the job continues with another world
    "request",  # the generation was ended on request: by a test, or for a rollback to a snapshot
]


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRecord(JsonRecord):
    """Why a generation or a process ended: which process failed, how, and who reports it."""

    kind: FailureKind
    cause: str
    """One line: an exit code, a signal's name, an exception's text."""
    worker_id: int = -1
    """worker_id of the process that failed; -1 if unknown. Its rank may differ once the job has been resized."""
    incarnation: int = 0
    """Incarnation of that process: 0 for the first in its worker slot."""
    reporter: str = ""
    """The writer of this record, such as `rank 2` or `agent of node 0`."""
    step: int = -1
    """Number of steps committed by the reporter; -1 if it does not count them."""
    world: int = 0
    """Number of the planned world that takes over, if the generation ends for that; else 0."""
    at_s: float = field(default_factory=time.time)
    """Unix time of the report, in seconds."""

    def __str__(self) -> str:
        """Describe the failure in a clause, such as `worker 2 (process): killed by SIGKILL`."""
        who = f"worker {self.worker_id}" if self.worker_id >= 0 else self.reporter or "unknown worker"
        return f"{who} ({self.kind}): {self.cause}"
