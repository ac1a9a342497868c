"""A job to be planned: its cluster, its work, how long each stage of a failure takes, and policies of recovery.

[Note: default times]
The published pair of a restart from a checkpoint and of checkpointless recovery is 292 s and 47 s; the defaults of
`StageTimes` add up to these: `detect_s + startup_s + checkpoint_restore_s`, and `detect_s + assemble_s + restore_s`.
How they are divided among the stages, and all other defaults, are assumptions. Measure them, or take them from the
ledger of a run: the names are those of its categories.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Literal, Self

from hyperpod_plugins.errors import ConfigError, UnknownKeyError, format_list
from hyperpod_plugins.planning.closed_forms import (
    DAY_S,
    HOUR_S,
    check_numbers,
    daly_interval_s,
    mean_time_between_failures_s,
    mean_time_to_loss_s,
    young_interval_s,
)

NODE_LOSS_FRACTION = (148 + 72 + 35 + 32) / 419
"""Part of the failures that take a node away: GPU, its memory, network and maintenance, of those that Llama 3 met."""

MOST_FAILURES = 50_000
"""Failures of a run that are simulated."""
LONGEST_S = 1e10
"""Times of stages are at most so long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds that the stages of a failure take, and what prepares for one; see [Note: default times]."""

    step_s: float = 10.0
    """A step of training."""
    detect_s: float = 10.0
    """From a failure until all ranks know of it."""
    assemble_s: float = 25.0
    """Until a replacement process runs, on a node that is there, and all groups are connected again."""
    restore_s: float = 12.0
    """Until it has the state from a replica, or all have theirs from snapshots."""
    startup_s: float = 222.0
    """Until all processes have been started again and connected, for a restart from a checkpoint."""
    checkpoint_restore_s: float = 60.0
    """Until the state is read from a checkpoint."""
    checkpoint_save_s: float = 30.0
    """How long a checkpoint stalls training."""
    snapshot_s: float = 0.1
    """How long a snapshot to the memory of another node stalls training."""
    resize_s: float = 30.0
    """How long a job pauses to continue with another number of replicas."""
    repair_s: float = 2400.0
    """Until a node that was lost is back, or another in its place."""
    spare_start_s: float = 180.0
    """Until a spare node is ready to run a process: image, imports, devices. A standby node is ready."""

    def __post_init__(self) -> None:
        """Check that all are times."""
        check_numbers(positive={"step_s": self.step_s})
        for name, time_s in asdict(self).items():
            _check_time(name, time_s)

    @classmethod
    def means_of(cls, measured: Mapping[str, Sequence[float]]) -> Self:
        """Means of times that a run has measured, by the names of the fields; defaults where it has none.

        Raises:
            ConfigError: A name is not one of the fields, or has no times.
        """
        check_measured(measured)
        return cls(**{name: math.fsum(times_s) / len(times_s) for name, times_s in measured.items()})


def check_measured(measured: Mapping[str, Sequence[float]]) -> None:
    """Check measured times by fields of `StageTimes`.

    Raises:
        ConfigError: A name is not one of the fields, or has no times, or a value is not a time.
    """
    names = [each.name for each in fields(StageTimes)]
    if unknown := sorted(set(measured) - set(names)):
        raise UnknownKeyError(f"measured times of {format_list(unknown)}; allowed are {', '.join(names)}.")
    if empty := sorted(name for name, times_s in measured.items() if not len(times_s)):
        raise ConfigError(f"measured times of {format_list(empty)} are empty; give at least one, or leave them out.")
    for name, times_s in measured.items():
        for time_s in times_s:
            _check_time(name, time_s)


def _check_time(name: str, time_s: float) -> None:
    check_numbers(at_least_zero={name: time_s})
    if time_s > LONGEST_S:
        raise ConfigError(f"{name}={time_s:g} must be at most {LONGEST_S:g} s, which is three centuries.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryChain:
    """Recoveries that fail, and are tried again at intervals, at last by hand."""

    first_fails: float = 0.0
    """Probability that the first attempt of a recovery fails."""
    retry_succeeds: float = 1.0
    """Probability that a later attempt succeeds."""
    max_retries: int = 6
    """Automatic attempts after the first one."""
    interval_s: float = 660.0
    """Wait before each of them."""
    manual_s: float = HOUR_S
    """Until a person has made it run, if none succeeded."""

    def __post_init__(self) -> None:
        """Check probabilities and times."""
        for name, value in {"first_fails": self.first_fails, "retry_succeeds": self.retry_succeeds}.items():
            if not 0 <= value <= 1:
                raise ConfigError(f"{name}={value:g} must be a probability, between 0 and 1.")
        times = {"interval_s": self.interval_s, "manual_s": self.manual_s, "max_retries": self.max_retries}
        check_numbers(at_least_zero=times)
        if self.max_retries != int(self.max_retries):
            raise ConfigError(f"max_retries={self.max_retries:g} must be a whole number.")

    def mean_s(self, attempt_s: float) -> float:
        """Mean time that retries add to a recovery whose attempts take `attempt_s` each."""
        fails = 1 - self.retry_succeeds
        all_fail = fails**self.max_retries
        mean = sum(fails**number for number in range(self.max_retries))  # retries that are begun
        extra_s = mean * (self.interval_s + attempt_s) + all_fail * (self.manual_s + attempt_s)
        return self.first_fails * extra_s


FIELD_RETRIES = RetryChain(first_fails=12 / 224, retry_succeeds=4 / 73)
"""What a report from 504 B200 shows (arXiv:2605.09370): in 224 sessions 12 chains with 73 attempts, of which 4
succeeded, with a median interval of 11 minutes. Six attempts a chain; the hour by hand is an assumption."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A job and its cluster."""

    num_nodes: int
    """Nodes that train, spares not included."""
    failures_per_node_hour: float
    """Failures of any kind, on average over the nodes."""
    work_s: float
    """Time of the work on all nodes without failures, checkpoints and snapshots."""
    accelerators_per_node: int = 8
    num_replicas: int = 2
    """Copies of the training state, each on `num_nodes / num_replicas` nodes."""
    num_spares: int = 0
    """Idle nodes that are paid for as well, with the policies that use them."""
    price_per_accelerator_hour: float = 0.0
    node_loss_fraction: float = NODE_LOSS_FRACTION
    """Part of the failures after which the node has to be replaced; after the others a new process starts on it."""
    stages: StageTimes = field(default_factory=StageTimes)
    measured: Mapping[str, tuple[float, ...]] = field(default_factory=dict[str, tuple[float, ...]])
    """Times of a run, by fields of `StageTimes`: the simulation draws one of them for each failure, where there are
    any, instead of the mean. Times of steps, snapshots and saves are always means."""
    retries: RetryChain = field(default_factory=RetryChain)

    def __post_init__(self) -> None:
        """Check sizes and rates."""
        check_measured(self.measured)
        rate = {"failures_per_node_hour": self.failures_per_node_hour, "work_s": self.work_s}
        rest = {"price_per_accelerator_hour": self.price_per_accelerator_hour, "num_spares": self.num_spares}
        sizes = {"num_nodes": self.num_nodes, "accelerators_per_node": self.accelerators_per_node}
        check_numbers(positive={**rate, **sizes, "num_replicas": self.num_replicas}, at_least_zero=rest)
        if self.num_nodes % self.num_replicas:
            raise ConfigError(
                f"num_replicas={self.num_replicas} must divide the number of nodes, {self.num_nodes}: a replica takes "
                "whole nodes, for replicas on one node are lost together."
            )
        if not 0 <= self.node_loss_fraction <= 1:
            raise ConfigError(f"node_loss_fraction={self.node_loss_fraction:g} must be between 0 and 1.")

    def check_number_of_failures(self) -> None:
        """Check that a run can be simulated, and that its failures are rare enough for closed forms.

        Raises:
            ConfigError: There would be too many failures.
        """
        if not self.work_s <= MOST_FAILURES * self.mtbf_s:
            raise ConfigError(
                f"{self.work_s:g} s of work with a failure every {self.mtbf_s:g} s are more than the "
                f"{MOST_FAILURES:,} failures that are simulated in a run. Give less work, or a lower rate of failures."
            )

    @property
    def mtbf_s(self) -> float:
        """Mean time between failures of the job."""
        return mean_time_between_failures_s(self.num_nodes, self.failures_per_node_hour)

    @property
    def nodes_per_replica(self) -> int:
        """Nodes that hold one copy of the training state."""
        return self.num_nodes // self.num_replicas

    @property
    def snapshot_every_s(self) -> float:
        """Work between two snapshots: Young's interval, and at least a step."""
        if self.stages.snapshot_s == 0:
            return self.stages.step_s
        return max(self.stages.step_s, young_interval_s(self.stages.snapshot_s, self.mtbf_s))


Regain = Literal["checkpoint", "snapshot", "replica"]
Capacity = Literal["wait", "shrink", "spare", "standby"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPolicy:
    """From where a job takes its state after a failure, and what it does about a node that is missing."""

    name: str
    regain: Regain
    """Source of the state. With copies in memory, a checkpoint is the last resort, if none of a shard is left."""
    capacity: Capacity
    """For a lost node: wait until it is back, shrink by a replica until then, or use a spare or a standby node."""

    @property
    def compared_with(self) -> str:
        """Name of the restart from a checkpoint with equal capacity: as many nodes, and the same ones idle."""
        return {"spare": "restart + spares", "standby": "restart + standby"}.get(self.capacity, "checkpoint restart")

    def why_not(self, scenario: Scenario) -> str | None:
        """Why the job cannot use this policy, or None."""
        if self.regain == "replica" and scenario.num_replicas < 2:
            return "needs at least 2 replicas"
        if self.regain == "snapshot" and scenario.num_nodes < 2:
            return "needs at least 2 nodes"
        if self.capacity in ("spare", "standby") and scenario.num_spares < 1:
            return "needs at least 1 spare node"
        return None

    def num_spares(self, scenario: Scenario) -> int:
        """Idle nodes that this policy uses."""
        return scenario.num_spares if self.capacity in ("spare", "standby") else 0

    def pause_s(self, stages: StageTimes) -> float:
        """Time from detection with all nodes there until training goes on, in the usual case."""
        if self.regain == "checkpoint":
            return stages.startup_s + stages.checkpoint_restore_s
        return stages.assemble_s + stages.restore_s

    def regain_every_s(self, scenario: Scenario) -> float:
        """Work between two states in memory to which the job can go back; infinite if there are none."""
        if self.regain == "checkpoint":
            return math.inf
        return scenario.stages.step_s if self.regain == "replica" else scenario.snapshot_every_s

    def stall(self, scenario: Scenario) -> float:
        """Time that snapshots take, as a part of the work."""
        return scenario.stages.snapshot_s / scenario.snapshot_every_s if self.regain == "snapshot" else 0.0

    def mean_time_to_fallback_s(self, scenario: Scenario) -> float:
        """Mean time until a job has to go back to a checkpoint."""
        if self.regain == "checkpoint":
            return scenario.mtbf_s
        window_s = scenario.stages.detect_s + self.pause_s(scenario.stages)
        if self.capacity in ("wait", "shrink"):
            window_s += scenario.node_loss_fraction * scenario.stages.repair_s
        shards, copies = scenario.num_nodes if scenario.num_nodes > 2 else 1, 2  # two nodes are one pair of buddies
        if self.regain == "replica":
            shards, copies = scenario.nodes_per_replica, scenario.num_replicas
        rate = scenario.failures_per_node_hour
        if rate * window_s / HOUR_S >= 1:
            return scenario.mtbf_s
        return mean_time_to_loss_s(shards, copies, rate, window_s)

    def checkpoint_interval_s(self, scenario: Scenario) -> float:
        """Best work between two checkpoints (Daly) for the failures that need one; at most a day."""
        save_s = scenario.stages.checkpoint_save_s
        if save_s == 0:
            return scenario.stages.step_s
        fallback_s = self.mean_time_to_fallback_s(scenario)
        best_s = min(DAY_S, daly_interval_s(save_s, fallback_s)) if math.isfinite(fallback_s) else DAY_S
        return max(scenario.stages.step_s, best_s)


RECOVERY_POLICIES = (
    RecoveryPolicy(name="checkpoint restart", regain="checkpoint", capacity="wait"),
    RecoveryPolicy(name="restart + spares", regain="checkpoint", capacity="spare"),
    RecoveryPolicy(name="restart + standby", regain="checkpoint", capacity="standby"),
    RecoveryPolicy(name="snapshots", regain="snapshot", capacity="wait"),
    RecoveryPolicy(name="checkpointless", regain="replica", capacity="wait"),
    RecoveryPolicy(name="elastic", regain="replica", capacity="shrink"),
    RecoveryPolicy(name="spares", regain="replica", capacity="spare"),
    RecoveryPolicy(name="standby", regain="replica", capacity="standby"),
)
