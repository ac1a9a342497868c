"""How often the same step has failed. Where that goes on it is the program, not the machine, and the job is to end."""

from collections import Counter

from hyperpod_plugins.elastic import Incident
from hyperpod_plugins.recovery.repair import RetryPolicy


class Attempts:
    """What one process has seen fail since the last commit."""

    def __init__(self, policy: RetryPolicy, place: int) -> None:
        self._policy = policy
        self._own = ("exception", place)
        self._failures: Counter[tuple[str, int]] = Counter()

    def failed(self) -> None:
        """This process's own `compute` raised."""
        self._failures[self._own] += 1

    def succeeded(self) -> None:
        """A step was committed."""
        self._failures.clear()

    def why_end(self, incident: Incident, error: Exception | None, step: int) -> str:
        """Count what ended a generation; why the job is to end, or nothing.

        Args:
            incident: what ended it.
            error: what this process's own `compute` raised.
            step: number of the step.
        """
        if (incident.kind, incident.rank) != self._own:  # that one has been counted, whoever was first to report
            self._failures[incident.kind, incident.rank] += 1
        if error is not None and self._failures[self._own] >= self._policy.max_attempts:
            return f"{type(error).__name__} in step {step}, {self._policy.max_attempts} times"
        if incident.kind == "process" and self._failures["process", incident.rank] >= self._policy.max_losses:
            return (
                f"rank {incident.rank} was lost {self._policy.max_losses} times in step {step}, the last time because: "
                f"{incident.cause}"
            )
        return ""
