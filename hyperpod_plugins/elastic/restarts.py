"""When a lost worker is replaced, when all are started again, and when that has ceased to help; pure."""

import json
import math
import signal
from collections import deque
from dataclasses import dataclass, field
from typing import Self

from hyperpod_plugins.elastic.incident import Incident
from hyperpod_plugins.elastic.line import Line
from hyperpod_plugins.errors import ConfigError

GAVE_UP = 65
"""Exit code of a worker whose own recovery found no way on: it is not replaced, and the job ends."""

NOT_NEEDED = 66
"""Exit code of a worker without which the job goes on: another one takes its place, and waits until the job grows."""

_OWN_FAULTS = {-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS, -signal.SIGILL, -signal.SIGFPE}


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """How often workers are replaced."""

    max_restarts: int = 100
    """Replacements of one worker within `window_s`."""
    window_s: float = math.inf
    """Length of the sliding window in seconds; infinite for the whole life of the job."""
    max_early_faults: int = 3
    """Faults of one worker in a row, each by its own doing and within `early_s`, that show it cannot start."""
    early_s: float = 60.0
    """Seconds after its start in which a fault counts as early."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.max_restarts < 0 or not self.window_s > 0:
            raise ConfigError(
                f"--max-restarts={self.max_restarts} with --restart-window={self.window_s} is not possible. "
                "Give a number of replacements that is not negative, and a window in seconds above zero."
            )


@dataclass(slots=True)
class RestartBudget:
    """What one worker has spent of a policy."""

    policy: RestartPolicy
    _restarts_s: deque[float] = field(default_factory=deque[float])
    _early_faults: int = 0

    def refusal(self, code: int, uptime_s: float, now_s: float) -> str | None:
        """Why a worker that ended with `code` after `uptime_s` is not to be replaced; None counts a replacement.

        Args:
            code: exit code, or the negative number of the signal that killed it.
            uptime_s: how long it ran, in seconds.
            now_s: any clock that only goes forward, in seconds.
        """
        if code == GAVE_UP:
            return f"exit code {GAVE_UP} says that its own recovery gave up"
        if code == NOT_NEEDED:
            return None
        early = uptime_s < self.policy.early_s and (code > 0 or code in _OWN_FAULTS)
        self._early_faults = self._early_faults + 1 if early else 0
        while self._restarts_s and now_s - self._restarts_s[0] > self.policy.window_s:
            self._restarts_s.popleft()
        if len(self._restarts_s) >= self.policy.max_restarts:
            window = "" if math.isinf(self.policy.window_s) else f" within {self.policy.window_s:g} s"
            return f"it was replaced {len(self._restarts_s)} times{window}, and --max-restarts allows no more"
        if self._early_faults >= self.policy.max_early_faults:
            return f"it failed {self._early_faults} times in a row within {self.policy.early_s:g} s of its start"
        self._restarts_s.append(now_s)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRestart(Line):
    """A member's word that all processes must begin again.

    A part of the training state is gone, or somebody has asked for other degrees.
    """

    incident: Incident
    resume_from: str = ""
    """The last checkpoint; empty where there is none, and the program begins as it began."""
    step: int = 0
    """Optimizer steps in that checkpoint."""
    shard_degree: int = 0
    """What somebody has asked for, with the next; 0 where nobody has."""
    tensor_degree: int = 0

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Inverse of `to_json`."""
        values = json.loads(text)
        incident = Incident(**values.pop("incident"))
        return cls(incident=incident, **values)

    def __str__(self) -> str:
        """What happens now, in one sentence part."""
        where = f"from {self.resume_from} (step {self.step})" if self.resume_from else "from the beginning"
        return f"all processes start again {where}: {self.incident.cause}"


@dataclass(slots=True)
class JobRestartBudget:
    """How often all processes were started again without getting further."""

    max_restarts: int = 3
    """Restarts from the same step."""
    _step: int = -1
    _count: int = 0

    def refusal(self, restart: JobRestart) -> str | None:
        """Why all are not to be started again; None counts one restart."""
        self._count = self._count + 1 if restart.step == self._step else 1
        self._step = restart.step
        if self._count > self.max_restarts:
            return no_further(restart.step, self.max_restarts)
        return None


def no_further(step: int, num_restarts: int) -> str:
    """Why beginning again has ceased to help."""
    return f"all processes were started again {num_restarts} times from step {step}"
