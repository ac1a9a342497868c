"""What happened in a job, as data: whoever acts says so here, whoever wants to know listens."""

from hyperpod_plugins.observability.events import Event, EventFile, listen, record

__all__ = ["Event", "EventFile", "listen", "record"]
