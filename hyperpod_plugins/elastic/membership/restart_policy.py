"""When to replace a lost worker, when to restart all workers, and when to give up: pure decisions, without I/O."""

import enum
import math
import signal
from collections import deque
from dataclasses import dataclass, field

from hyperpod_plugins.elastic.store.records import FailureRecord, JsonRecord
from hyperpod_plugins.errors import (
    BackendUnavailable,
    CheckpointDamaged,
    CheckpointMismatch,
    ConfigError,
    DataError,
    GatheredParametersWritten,
    InitializationError,
    LoopError,
    MissingExtraError,
    NonFiniteError,
    OutdatedExtraError,
    UnitsDiffer,
)

GAVE_UP = 65
"""Exit code of a worker whose own recovery gave up: it is not replaced, and the job ends."""

NOT_NEEDED = 66
"""Exit code of a worker that the job does not need: another process takes its slot and waits until the job grows."""

_OWN_FAULTS = {-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS, -signal.SIGILL, -signal.SIGFPE}


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """Limits for the replacement of workers."""

    max_restarts: int = 100
    """Replacements of one worker within `window_s`."""
    window_s: float = math.inf
    """Length of the sliding window in seconds; infinite for the whole life of the job."""
    max_early_faults: int = 3
    """Consecutive faults of one worker, each its own and within `early_s`, after which it counts as unable to
    start."""
    early_s: float = 60.0
    """Seconds after its start in which a fault counts as early."""
    max_brief_lives: int = 12
    """The same as `max_early_faults` where some of these processes have run the body of a step to its end."""
    max_attempts: int = 3
    """Attempts at one step's body of a loop that may end with an exception before it counts as a bug in the program."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.max_restarts < 0 or not self.window_s > 0:
            raise ConfigError(
                f"--max-restarts={self.max_restarts} with --restart-window={self.window_s} is not possible. "
                "Give a number of replacements that is not negative, and a window in seconds above zero."
            )


@dataclass(slots=True)
class RestartBudget:
    """How much of a `RestartPolicy` one worker has used up."""

    policy: RestartPolicy
    _restarts_s: deque[float] = field(default_factory=deque[float])
    _early_faults: int = 0
    _brief_lives: int = 0

    def why_not_replace(self, loss: "WorkerExit", uptime_s: float, now_s: float) -> str | None:
        """Return why a worker that ended is not to be replaced; None replaces it and counts the replacement.

        Args:
            loss: how it ended; a failure caused by a peer is not a fault of its own.
            uptime_s: how long it ran, in seconds.
            now_s: time on any monotonic clock, in seconds.
        """
        if loss.code == GAVE_UP:
            return f"exit code {GAVE_UP} says that its own recovery gave up"
        if loss.code == NOT_NEEDED:
            return None
        is_brief = uptime_s < self.policy.early_s and loss.is_own_fault
        self._brief_lives = self._brief_lives + 1 if is_brief else 0
        self._early_faults = self._early_faults + 1 if is_brief and not loss.made_progress else 0
        while self._restarts_s and now_s - self._restarts_s[0] > self.policy.window_s:
            self._restarts_s.popleft()
        if len(self._restarts_s) >= self.policy.max_restarts:
            window = "" if math.isinf(self.policy.window_s) else f" within {self.policy.window_s:g} s"
            return f"it was replaced {len(self._restarts_s)} times{window}, and --max-restarts allows no more"
        if loss.num_attempts >= self.policy.max_attempts:
            last = loss.error or f"exit code {loss.code}"
            return f"its loop has failed in {loss.num_attempts} attempts at the same place, the last time with {last}"
        if self._early_faults >= self.policy.max_early_faults:
            return f"it failed {self._early_faults} times in a row within {self.policy.early_s:g} s of its start"
        if self._brief_lives >= self.policy.max_brief_lives:
            last = loss.error or f"exit code {loss.code}"
            return (
                f"it failed {self._brief_lives} times in a row within {self.policy.early_s:g} s of its start, though "
                f"it has run steps, the last time with {last}"
            )
        self._restarts_s.append(now_s)
        return None


class ExitAction(enum.Enum):
    """What to do when a worker ends before its work is done."""

    REPLACE = "another process replaces it, and the others continue"
    RESTART_ALL = "all workers restart, past the calls that have ended"
    EXCLUDE = "the job continues without the workers of this node"
    END = "the job ends"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExit:
    """A worker that has ended, with the state of the job at that time."""

    code: int
    """Exit code, or the negative number of the signal that killed it."""
    error: str = ""
    """First line of the exception that ended it, with its class; empty if unknown."""
    has_left_loop: bool = False
    """Whether the process recorded that it left a loop of the program early: by an exception, or by `break`."""
    num_attempts: int = 0
    """Attempts at the place where it left the loop that have failed there, this one included; 0 if it left none."""
    made_progress: bool = False
    """Whether it had run a body of that loop to its end, so that it was able to start."""
    is_armed: bool
    """Whether the other members can take in a replacement."""
    has_begun: bool
    """Whether a first step has begun."""
    uses_recovery: bool
    """Whether the program has announced that it takes part in recovery, in this round or an earlier one."""
    is_needed: bool = True
    """Whether it is part of the present world, rather than waiting until the job grows."""
    can_all_start: bool = True
    """Whether all nodes can restart: none has finished already."""
    may_restart: bool = True
    """Whether the user allows restarts."""
    has_slots: bool = True
    """Whether the rendezvous gives each node a slot, which another node can take over."""
    is_unproven: bool = False
    """Whether its node joined a running job, and none of the workers there has run past the time for early faults."""
    given_up: FailureRecord | None = None
    """Why the job has given up, if it has."""
    are_others_finished: bool = False
    """Whether all other workers have succeeded."""

    @property
    def is_own_fault(self) -> bool:
        """Whether the program may have failed by itself, rather than because of a peer."""
        return (self.code > 0 and not is_of_peer(self.error)) or self.code in _OWN_FAULTS

    @property
    def _is_refusal(self) -> bool:
        return self.error.partition(":")[0] in _REFUSALS

    @property
    def exit_action(self) -> ExitAction:
        """What to do by the kind of failure alone; see `decide`."""
        if self.code in (GAVE_UP, NOT_NEEDED):
            return ExitAction.REPLACE  # `RestartBudget` handles both codes
        if self.has_left_loop and self._is_refusal:
            return ExitAction.END  # another process would fail the same way
        if self.is_armed and (self.has_begun or self.code < 0):
            return ExitAction.REPLACE
        if not self.uses_recovery:
            return ExitAction.END  # without recovery the program would redo everything and overwrite its output
        if self._is_refusal:
            return ExitAction.END  # a restart would fail the same way
        can_start_again = self.is_needed and self.can_all_start and self.may_restart
        return ExitAction.RESTART_ALL if can_start_again else ExitAction.END

    def decide(self, over_budget: str | None) -> tuple[ExitAction, str]:
        """Decide what to do, and why the worker is not replaced; the reason is empty for REPLACE and RESTART_ALL.

        Args:
            over_budget: why its `RestartBudget` forbids to replace it, if it does.
        """
        can_blame_node = self.given_up is None and self.is_armed and self.has_slots
        is_node_blamed = can_blame_node and (not self.is_needed or (self.is_unproven and self.code != GAVE_UP))
        if self.exit_action is ExitAction.RESTART_ALL and self.given_up is None and not is_node_blamed:
            return ExitAction.RESTART_ALL, ""
        refusal = self._why_not_replace(over_budget)
        if refusal is None:
            return ExitAction.REPLACE, ""
        return ExitAction.EXCLUDE if is_node_blamed else ExitAction.END, refusal

    def _why_not_replace(self, over_budget: str | None) -> str | None:
        if self.given_up is not None:
            return f"the job has given up: {self.given_up}"
        if self.exit_action is ExitAction.END and self.has_left_loop and self._is_refusal:
            return "another process would fail in the same way"
        if self.exit_action is ExitAction.END and self.code > 0 and self.uses_recovery:
            return "it failed on its own outside of the program's steps"
        if not self.is_armed:
            return (
                "no worker takes part in recovery: the program does not use it, has nothing to recover yet, or is "
                "past its last step"
            )
        if over_budget is None and self.are_others_finished:
            return "all others have finished, and a replacement would hang"
        return over_budget


def is_of_peer(error: str) -> bool:
    """Whether an exception (`Class: text`) was caused by the loss of another process."""
    return error.startswith(_PEER_ERRORS)


_PEER_ERRORS = ("PeerLost", "RecoveryError", "RecoveryTimeout", "StateLost", "Dist")
"""Beginnings of the names of exceptions that the loss of another process causes."""
_REFUSALS = {
    "RehearsalFailed",  # defined in `recovery`, which this package must not import
    *(
        kind.__name__
        for base in (
            ConfigError,
            MissingExtraError,
            OutdatedExtraError,
            BackendUnavailable,
            LoopError,
            UnitsDiffer,
            GatheredParametersWritten,
            NonFiniteError,
            DataError,
            InitializationError,
            CheckpointDamaged,
            CheckpointMismatch,
        )
        for kind in (base, *base.__subclasses__())
    ),
}
"""Exceptions with which this package rejects a program or its data; they recur on every run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRestart(JsonRecord):
    """A member's request that all workers restart: training state is lost, or other degrees were asked for."""

    failure: FailureRecord
    resume_from: str = ""
    """The last checkpoint; empty if there is none, and the program starts from the beginning."""
    step: int = 0
    """Optimizer steps in that checkpoint."""
    entry: int = 0
    """Entries of the program that have ended and are not run again; see `store/entry_records.py`."""
    is_own_fault: bool = False
    """Whether the program may have failed by itself, so that it would fail again."""
    shard_degree: int = 0
    """Requested shard degree; 0 without a request."""
    tensor_degree: int = 0
    """Requested tensor degree; 0 without a request."""

    def __str__(self) -> str:
        """Describe the restart in a clause, for messages."""
        where = f"from {self.resume_from} (step {self.step})" if self.resume_from else "from the beginning"
        if self.entry:
            where += f", past the {self.entry} calls of the program that have ended"
        return f"all processes start again {where}: {self.failure.cause}"


@dataclass(slots=True)
class JobRestartBudget:
    """Counts restarts of all workers that make no progress."""

    max_restarts: int = 3
    """Allowed restarts from the same position: an entry of the program and a step in it."""
    max_own_faults: int = 1
    """Allowed restarts from the same position after the program has failed by itself."""
    _position: tuple[int, int] = (-1, -1)
    _count: int = 0
    _num_own_faults: int = 0

    def why_not_restart(self, restart: JobRestart) -> str | None:
        """Return why all workers should not be restarted; None allows and counts one restart."""
        place = restart.entry, restart.step
        if place != self._position:
            self._position, self._count, self._num_own_faults = place, 0, 0
        self._count += 1
        self._num_own_faults += restart.is_own_fault
        if self._count > self.max_restarts:
            return no_progress_message(restart.step, self.max_restarts)
        if self._num_own_faults > self.max_own_faults:
            return f"it failed by itself {self._num_own_faults} times at the same place, {_describe_position(*place)}"
        return None


def _describe_position(entry: int, step: int) -> str:
    after = f"after {entry} calls that have ended" if entry else "before any of its calls had ended"
    return f"{after}, at step {step}" if step else f"{after} or made a checkpoint"


def no_progress_message(step: int, num_restarts: int) -> str:
    """The message that restarts have not helped."""
    return f"all processes were started again {num_restarts} times from step {step}"
