"""Members that come and go: who belongs to a job, and how they agree on it."""

from hyperpod_plugins.elastic.incident import Incident
from hyperpod_plugins.elastic.ledger import Ledger

__all__ = ["Incident", "Ledger"]
