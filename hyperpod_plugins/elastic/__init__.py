"""Members that come and go: who belongs to a job, and how they agree on it."""

from hyperpod_plugins.elastic.incident import Incident
from hyperpod_plugins.elastic.ledger import Ledger
from hyperpod_plugins.elastic.notices import elastic_event_detected, watch_elastic_events

__all__ = ["Incident", "Ledger", "elastic_event_detected", "watch_elastic_events"]
