"""Events: what happened, when, and how long it took. They are few: a step is none, a repair is one."""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that began, and has ended."""

    name: str
    """Package and kind, such as `recovery.replace`."""
    at_s: float
    """Unix time of its beginning, in seconds."""
    duration_s: float = 0.0
    details: Mapping[str, str | int | float] = field(default_factory=dict[str, str | int | float])


Listener = Callable[[Event], None]
_listeners: list[Listener] = []


def listen(listener: Listener) -> Callable[[], None]:
    """Have `listener` called with each event of this process, in the thread that records it; returns what ends that."""
    _listeners.append(listener)
    return lambda: _listeners.remove(listener)


def record(event: Event) -> None:
    """Tell all listeners; an error of one is only logged."""
    for listener in list(_listeners):
        try:
            listener(event)
        except Exception:
            log.exception("a listener failed at the event %s", event.name)


class EventFile:
    """A listener that appends each event to a file, as a line of JSON."""

    def __init__(self, path: Path) -> None:
        """The file and its folders are made with the first event."""
        self.path = path

    def __call__(self, event: Event) -> None:
        """Append one line."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(asdict(event)) + "\n")
