"""`simulate`: many runs of a job at once, from failure to failure.

Between two failures a run is a sequence of work and checkpoints whose course is known, so a run is simulated in as many
steps as it has failures, and each step is a few operations on arrays with one element a run.

[Note: what is simulated]
* Failures come on the wall clock, also during checkpoints and recoveries. A failure during a recovery starts it again;
  a node that is away cannot fail.
* A checkpoint stalls training and counts once it is complete. Snapshots slow training down by their stalls, and a
  failure takes the job back to the last one. With replicas it takes the job back to the beginning of the open step.
* A state is in memory as long as one copy is left: a replica of the same shard, or the buddy's snapshot, on the next
  node. A copy is away from the failure of its node or process until the recovery ends. If no copy is left, all
  processes start again from the last checkpoint.
* `wait`: the job waits until each lost node is back. `spare` and `standby`: a lost node takes the place of its spare in
  the pool when it is back; the job waits only while the pool is empty. `shrink`: as many whole replicas train as there
  are nodes for, at the same efficiency; what is left over stands by, and its failures interrupt nothing.
* An attempt of a recovery may fail, and is then repeated; see `RetryChain`.

Which node fails matters for copies, lemon nodes and nodes that are away. Nodes of a rack do not fail together, unless a
trace has it so.
"""

import math
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.planning.closed_forms import check_numbers
from hyperpod_plugins.planning.estimate import Estimate, poisson_interval
from hyperpod_plugins.planning.expected_time import failure_cost_s, fallback_cost_s
from hyperpod_plugins.planning.failures import (
    ExponentialFailures,
    FailureModel,
    FailureStream,
    Flags,
    Floats,
    Integers,
    LemonNodes,
)
from hyperpod_plugins.planning.scenario import RecoveryPolicy, Scenario

GIVE_UP = 10.0
"""A run that takes longer than this many times its work is given up."""
SPENT = ("work", "redone", "snapshots", "saves", "detect", "waiting", "recovery", "fewer replicas")
"""On what a run spends its time. Their sum is its wall time."""
FEW_FAILURES, FEW_FALLBACKS = 20, 10
"""Where fewer have been seen over all runs, intervals come from an exact bound on their number."""
_FAILURES_PER_WINDOW = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRuns:
    """Simulated runs of a job under one policy; arrays have one element a run."""

    scenario: Scenario
    policy: RecoveryPolicy
    checkpoint_interval_s: float
    """Work between two checkpoints."""
    wall_s: Floats
    """Time from start to end; infinite if a run was given up."""
    num_failures: Integers
    """Failures that interrupted training or a recovery."""
    num_fallbacks: Integers
    """Returns to a checkpoint."""
    spent_s: dict[str, Floats]
    """Time by what it was spent on; see `SPENT`."""

    @property
    def time_ratio(self) -> Estimate:
        """Wall time divided by the time of the work alone."""
        return self._estimate(1 / self.scenario.work_s)

    @property
    def price(self) -> Estimate:
        """Price of all nodes, spares included, from start to end."""
        num_nodes = self.scenario.num_nodes + self.policy.num_spares(self.scenario)
        return self._estimate(
            self.scenario.price_per_accelerator_hour * self.scenario.accelerators_per_node * num_nodes / 3600
        )

    @property
    def is_of_few_failures(self) -> bool:
        """Whether so few failures were seen that the spread of the runs says little about the error of the mean."""
        return int(self.num_failures.sum()) < FEW_FAILURES

    @property
    def is_of_few_fallbacks(self) -> bool:
        """The same for returns to a checkpoint, where these matter: if they are no more than a tenth of that error."""
        scenario, policy, values = self.scenario, self.policy, self.wall_s
        if policy.regain == "checkpoint" or self.num_fallbacks.sum() >= FEW_FALLBACKS or np.isinf(values).any():
            return False
        number = scenario.work_s / policy.mean_time_to_fallback_s(scenario)
        found = Estimate.of(values)
        cost_s = number * fallback_cost_s(scenario, policy, self.checkpoint_interval_s)
        return cost_s > 0.1 * (found.high - found.mean) and (number * values.size > 0.01)

    def _estimate(self, per_s: float) -> Estimate:
        """Estimate of the wall time in some unit, with an interval that allows for events that are rare.

        With few failures, their number has an exact Poisson bound; above it counts with the cost of the costlier kind
        of failure, for those that have been seen may be the cheap ones.
        """
        if np.isinf(self.wall_s).any():
            return Estimate.of(self.wall_s)
        found, num_runs = Estimate.of(self.wall_s * per_s), self.wall_s.size
        if self.is_of_few_failures:
            number = int(self.num_failures.sum())
            low, high = poisson_interval(number)
            cost_s = failure_cost_s(self.scenario, self.policy, self.checkpoint_interval_s)
            lost_s = max(0.0, float(self.wall_s.mean()) - self._undisturbed_s)
            most_s = high * max(cost_s, lost_s * num_runs / max(number, 1)) / num_runs
            found = found.reaching((1 - low / max(number, 1)) * lost_s * per_s, (most_s - lost_s) * per_s)
        if self.is_of_few_fallbacks:
            number = int(self.num_fallbacks.sum())
            low, high = poisson_interval(number)
            unit = fallback_cost_s(self.scenario, self.policy, self.checkpoint_interval_s) * per_s / num_runs
            found = found.blurred((number - low) * unit, (high - number) * unit)
        return found

    @property
    def _undisturbed_s(self) -> float:
        """Time without failures."""
        scenario = self.scenario
        num_saves = max(0, math.ceil(scenario.work_s / self.checkpoint_interval_s) - 1)
        stalled_s = scenario.work_s * (1 + self.policy.stall(scenario))
        return stalled_s + num_saves * scenario.stages.checkpoint_save_s


def simulate(
    scenario: Scenario,
    policy: RecoveryPolicy,
    *,
    failures: FailureModel | None = None,
    lemons: LemonNodes | None = None,
    num_runs: int = 200,
    seed: int = 0,
    checkpoint_interval_s: float = 0.0,
) -> SimulatedRuns:
    """Simulate runs of a job until its work is done.

    Args:
        scenario: The job.
        policy: How it recovers.
        failures: When nodes fail; exponential by default.
        lemons: How failures are spread over nodes; by default as in a report from the field.
        num_runs: Number of runs, at least 2.
        seed: The same seed gives the same runs.
        checkpoint_interval_s: Work between two checkpoints; 0 for the best by closed forms.

    Raises:
        ConfigError: The policy does not suit the job, a trace of failures does not suit the cluster, or there would be
            too many failures.
    """
    if reason := policy.why_not(scenario):
        raise ConfigError(f"the policy {policy.name!r} {reason}; change the scenario, or choose another policy.")
    if num_runs < 2:
        raise ConfigError(f"num_runs={num_runs} must be at least 2: intervals come from the spread of the runs.")
    if seed < 0:
        raise ConfigError(f"seed={seed} must be at least 0.")
    check_numbers(at_least_zero={"checkpoint_interval_s": checkpoint_interval_s})
    scenario.check_number_of_failures()
    of_failures, of_repairs = np.random.default_rng(seed).spawn(2)  # so that all policies meet the same failures
    stream = (failures or ExponentialFailures()).start(
        of_failures, num_runs, scenario.num_nodes, scenario.failures_per_node_hour, lemons or LemonNodes()
    )
    interval_s = checkpoint_interval_s or policy.checkpoint_interval_s(scenario)
    jobs = _Jobs(scenario, policy, stream, interval_s, of_repairs)
    while not jobs.is_done.all() and stream.now_s < GIVE_UP * scenario.work_s:
        window = stream.until(stream.now_s + _FAILURES_PER_WINDOW * scenario.mtbf_s)
        for column in range(window.times_s.shape[1]):
            times_s = window.times_s[:, column]
            is_hit = np.isfinite(times_s) & ~jobs.is_done
            if not is_hit.any():
                break
            jobs.advance(np.where(is_hit, times_s, jobs.now_s))
            (runs,) = np.nonzero(is_hit & ~jobs.is_done)
            jobs.fail(runs, times_s[runs], window.nodes[runs, column])
        jobs.advance(np.where(jobs.finish_s() <= stream.now_s, stream.now_s, jobs.now_s))
    return SimulatedRuns(
        scenario=scenario,
        policy=policy,
        checkpoint_interval_s=interval_s,
        wall_s=np.where(jobs.is_done & (jobs.now_s <= GIVE_UP * scenario.work_s), jobs.now_s, np.inf),
        num_failures=jobs.num_failures,
        num_fallbacks=jobs.num_fallbacks,
        spent_s={"work": jobs.kept_s + jobs.since_s, **jobs.spent_s},
    )


class _Jobs:
    """State of all runs; each array has one element a run, unless its comment says more."""

    def __init__(
        self,
        scenario: Scenario,
        policy: RecoveryPolicy,
        stream: FailureStream,
        interval_s: float,
        rng: np.random.Generator,
    ) -> None:
        self._scenario, self._stream, self._stages, self._rng = scenario, stream, scenario.stages, rng
        self._draw = _StageDraws(scenario, rng).draw
        self._interval_s = interval_s
        self._regain_every_s = policy.regain_every_s(scenario)
        self._stall = policy.stall(scenario)
        num_runs = stream.num_runs
        self.is_done: Flags = np.zeros(num_runs, np.bool_)
        self.now_s, self.kept_s, self.since_s = (np.zeros(num_runs) for _ in range(3))
        """Wall time; work in the last checkpoint; work since then."""
        self.spent_s = {name: np.zeros(num_runs) for name in SPENT if name != "work"}
        self.num_failures, self.num_fallbacks = (np.zeros(num_runs, np.int64) for _ in range(2))
        self._detected_s, self._equipped_s, self._resumes_s = (np.zeros(num_runs) for _ in range(3))
        """Ends of detection, wait for nodes, and recovery of the last pause; in the past while a run trains."""
        self._open_until_s = np.zeros(num_runs)
        """End of the present recovery, of which a failure is part if it comes before."""
        self._is_restart: Flags = np.zeros(num_runs, np.bool_)
        """Whether that is a restart from a checkpoint."""
        self._copies = _Copies(scenario, policy, num_runs)
        self._nodes = _Nodes(scenario, policy, num_runs, rng)
        self._num_failed: NDArray[np.int32] = np.zeros((num_runs, scenario.num_nodes), np.int32)
        """How often each node has failed (run, node)."""
        of_lemon, of_others = stream.lemons.rates(scenario.num_nodes, 1.0)
        self._cured = of_others / of_lemon if of_lemon else 1.0

    # -- between failures ---------------------------------------------------------------------------------------------

    def finish_s(self) -> Floats:
        """When each run is done if nothing happens any more."""
        speed = self._nodes.capacity / (1 + self._stall)
        need_s = self._scenario.work_s - self.kept_s - self.since_s
        saves = np.maximum(np.ceil((self.since_s + need_s) / self._interval_s) - 1, 0)
        return np.maximum(self.now_s, self._resumes_s) + need_s / speed + saves * self._stages.checkpoint_save_s

    def advance(self, to_s: Floats) -> None:
        """Let each run go on to a time, or to its end."""
        while True:
            return_s = self._nodes.next_return_s()
            self._advance_at_constant_size(np.minimum(to_s, return_s))
            (runs,) = np.nonzero((return_s <= to_s) & ~self.is_done)
            if not runs.size:
                return
            grows = self._nodes.come_back(runs, return_s[runs]) & (self._resumes_s[runs] <= return_s[runs])
            runs = runs[grows]
            self._detected_s[runs] = self._equipped_s[runs] = return_s[runs]
            self._resumes_s[runs] = return_s[runs] + self._draw("resize_s", runs.size)

    def _advance_at_constant_size(self, to_s: Floats) -> None:
        finish_s = self.finish_s()
        ends = ~self.is_done & (finish_s <= to_s)
        to_s = np.where(ends, finish_s, np.where(self.is_done, self.now_s, to_s))
        stop_s = np.minimum(to_s, self._resumes_s)
        spent, now_s = self.spent_s, self.now_s
        spent["detect"] += np.maximum(np.minimum(stop_s, self._detected_s) - now_s, 0)
        spent["waiting"] += np.maximum(np.minimum(stop_s, self._equipped_s) - np.maximum(now_s, self._detected_s), 0)
        spent["recovery"] += np.maximum(stop_s - np.maximum(now_s, self._equipped_s), 0)
        ran_s = np.maximum(to_s - np.maximum(now_s, self._resumes_s), 0)
        capacity, save_s = self._nodes.capacity, self._stages.checkpoint_save_s
        speed = capacity / (1 + self._stall)
        period_s = self._interval_s / speed  # of the work between two checkpoints, on the wall clock
        at_s = self.since_s / speed + ran_s
        cycles = np.floor(at_s / (period_s + save_s))
        rest_s = at_s - cycles * (period_s + save_s)
        saving_s = cycles * save_s + np.maximum(rest_s - period_s, 0)
        self.kept_s += cycles * self._interval_s
        self.since_s = np.minimum(rest_s * speed, self._interval_s)
        spent["saves"] += saving_s
        spent["fewer replicas"] += (ran_s - saving_s) * (1 - capacity)
        spent["snapshots"] += (ran_s - saving_s) * capacity * (self._stall / (1 + self._stall))
        self.now_s = to_s
        self.is_done |= ends

    # -- failures -----------------------------------------------------------------------------------------------------

    def fail(self, runs: Integers, times_s: Floats, nodes: Integers) -> None:
        """Let a node of each of these runs fail, at the time that they have advanced to."""
        is_there = self._is_there(runs, times_s, nodes)
        runs, times_s, nodes = runs[is_there], times_s[is_there], nodes[is_there]
        is_open = times_s < self._open_until_s[runs]
        num_copies = self._nodes.num_copies[runs]
        detected_s = times_s + self._draw("detect_s", runs.size)
        is_node_lost = self._rng.random(runs.size) < self._scenario.node_loss_fraction
        equipped_s, shrinks, interrupts = self._nodes.lose(runs, nodes, detected_s, is_node_lost)
        if not interrupts.all():
            runs, nodes, num_copies = (each[interrupts] for each in (runs, nodes, num_copies))
            detected_s, equipped_s = detected_s[interrupts], equipped_s[interrupts]
            is_open, shrinks = is_open[interrupts], shrinks[interrupts]
        self.num_failures[runs] += 1
        was_restart = is_open & self._is_restart[runs]
        is_restart = self._copies.lose(runs, nodes, num_copies, is_open) | was_restart
        self.num_fallbacks[runs] += is_restart & ~was_restart
        self._is_restart[runs] = is_restart
        self._go_back(runs, is_open, is_restart)
        pause_s = self._pause_s(is_restart, shrinks)
        waits_for_s = np.where(is_open, np.maximum(equipped_s, self._equipped_s[runs]), equipped_s)
        self._detected_s[runs] = detected_s
        self._equipped_s[runs] = np.maximum(detected_s, waits_for_s)
        self._resumes_s[runs] = self._equipped_s[runs] + pause_s + self._retries_s(pause_s)
        self._open_until_s[runs] = self._resumes_s[runs]

    def _pause_s(self, is_restart: Flags, shrinks: Flags) -> Floats:
        """How long recoveries take with all nodes there."""
        size = is_restart.size
        restart_s, resize_s, in_place_s = (
            sum(self._draw(name, size) for name in names)
            for names in (("startup_s", "checkpoint_restore_s"), ("resize_s",), ("assemble_s", "restore_s"))
        )
        return np.where(is_restart, restart_s, np.where(shrinks, resize_s, in_place_s))

    def _is_there(self, runs: Integers, times_s: Floats, nodes: Integers) -> Flags:
        """Whether the failure happens: the node is there, and has not been exchanged for a better one."""
        is_there = self._nodes.away_until_s[runs, nodes] <= times_s
        exclude_after = self._stream.lemons.exclude_after
        if exclude_after:
            is_exchanged = self._stream.is_lemon[runs, nodes] & (self._num_failed[runs, nodes] >= exclude_after)
            is_there &= ~is_exchanged | (self._rng.random(runs.size) < self._cured)
            self._num_failed[runs[is_there], nodes[is_there]] += 1
        return is_there

    def _go_back(self, runs: Integers, is_open: Flags, is_restart: Flags) -> None:
        """Lose the work since the state from which training goes on."""
        since_s = self.since_s[runs]
        if math.isinf(self._regain_every_s):
            regained_s = np.zeros(runs.size)
        else:
            in_memory_s = np.floor(since_s / self._regain_every_s + 1e-9) * self._regain_every_s
            regained_s = np.where(is_restart, 0, np.where(is_open, since_s, np.minimum(in_memory_s, since_s)))
        self.spent_s["redone"][runs] += since_s - regained_s
        self.since_s[runs] = regained_s

    def _retries_s(self, attempt_s: Floats) -> Floats | float:
        """How much longer recoveries take because attempts fail."""
        retries = self._scenario.retries
        if retries.first_fails == 0:
            return 0.0
        needed = np.full(attempt_s.size, retries.max_retries + 1)
        if retries.retry_succeeds:
            needed = np.minimum(needed, self._rng.geometric(retries.retry_succeeds, attempt_s.size))
        by_hand = needed > retries.max_retries
        extra_s = np.minimum(needed, retries.max_retries) * (retries.interval_s + attempt_s)
        extra_s += by_hand * (retries.manual_s + attempt_s)
        return np.where(self._rng.random(attempt_s.size) < retries.first_fails, extra_s, 0)


class _StageDraws:
    """Times of stages: one of those that a run has measured, or else the mean."""

    def __init__(self, scenario: Scenario, rng: np.random.Generator) -> None:
        self._means, self._rng = asdict(scenario.stages), rng
        self._measured = {name: np.array(times_s, np.float64) for name, times_s in scenario.measured.items()}

    def draw(self, name: str, size: int) -> Floats | float:
        """Times of a stage for `size` failures."""
        if name not in self._measured:
            return self._means[name]
        return self._rng.choice(self._measured[name], size)


class _Copies:
    """Which copies of shards are away in the present recovery of each run."""

    def __init__(self, scenario: Scenario, policy: RecoveryPolicy, num_runs: int) -> None:
        self._regain, self._num_nodes = policy.regain, scenario.num_nodes
        self._num_shards = scenario.nodes_per_replica
        self._recovery: NDArray[np.int32] = np.zeros(num_runs, np.int32)
        self._away_in: NDArray[np.int32] = np.zeros((num_runs, self._num_nodes), np.int32)
        """Recovery in which the copy of a node was lost last (run, node)."""
        self._counted_in, self._num_away = (np.zeros((num_runs, self._num_shards), np.int32) for _ in range(2))
        """Number of copies of a shard that are away, and in which recovery (run, shard)."""

    def lose(self, runs: Integers, nodes: Integers, num_copies: Integers, is_open: Flags) -> Flags:
        """Note the loss of a node, and return whether no copy of its shard is left."""
        if self._regain == "checkpoint":
            return np.ones(runs.size, np.bool_)
        self._recovery[runs] += ~is_open
        recovery = self._recovery[runs]
        is_new = self._away_in[runs, nodes] != recovery
        self._away_in[runs, nodes] = recovery
        if self._regain == "snapshot":
            after, before = ((nodes + step) % self._num_nodes for step in (1, -1))
            return (self._away_in[runs, after] == recovery) | (self._away_in[runs, before] == recovery)
        shards = nodes % self._num_shards
        counted = np.where(self._counted_in[runs, shards] == recovery, self._num_away[runs, shards], 0) + is_new
        self._counted_in[runs, shards], self._num_away[runs, shards] = recovery, counted
        return counted >= num_copies


class _Nodes:
    """Nodes that are away, and what stands in for them."""

    def __init__(self, scenario: Scenario, policy: RecoveryPolicy, num_runs: int, rng: np.random.Generator) -> None:
        self._scenario, self._shrinks, self._rng = scenario, policy.capacity == "shrink", rng
        self._draw, self._spares_start = _StageDraws(scenario, rng).draw, policy.capacity == "spare"
        self.away_until_s: Floats = np.zeros((num_runs, scenario.num_nodes))
        """When a node, or another in its place, is back (run, node)."""
        self._spares_s: Floats = np.zeros((num_runs, policy.num_spares(scenario)))
        """When each spare is there (run, spare)."""
        self._returns_s: Floats = np.full((num_runs, 4 if self._shrinks else 0), np.inf)
        """When nodes come back for which the job does not wait, in any order; infinite if there is none (run, any)."""
        self.num_copies: Integers = np.full(num_runs, scenario.num_replicas)
        """Replicas that train."""
        self.capacity: Floats = np.ones(num_runs)
        """The same as a part of all replicas; of one if the job waits for nodes because there is none."""
        self._never: Floats = np.full(num_runs, np.inf)

    def next_return_s(self) -> Floats:
        """When the next node comes back for which the job does not wait."""
        return self._returns_s.min(axis=1) if self._shrinks else self._never

    def come_back(self, runs: Integers, times_s: Floats) -> Flags:
        """Take the nodes that come back; return whether the job grows by that."""
        waiting_s = self._returns_s[runs]
        waiting_s[waiting_s <= times_s[:, None]] = np.inf
        self._returns_s[runs] = waiting_s
        before = self.num_copies[runs]
        self._count(runs)
        return self.num_copies[runs] > before

    def lose(
        self, runs: Integers, nodes: Integers, detected_s: Floats, is_node_lost: Flags
    ) -> tuple[Floats, Flags, Flags]:
        """Note failures; return when all nodes are there again, whether the job shrinks, and whether it is interrupted.

        Where a node is not lost, a new process starts on it.
        """
        back_s = detected_s + self._draw("repair_s", runs.size)
        always = np.ones(runs.size, np.bool_)
        if self._shrinks:
            return self._leave(runs, nodes, back_s, is_node_lost)
        equipped_s = back_s
        if self._spares_s.shape[1]:
            spares = self._spares_s[runs].argmin(axis=1)
            equipped_s = np.maximum(detected_s, self._spares_s[runs, spares])
            if self._spares_start:
                equipped_s = equipped_s + self._draw("spare_start_s", runs.size)
            self._spares_s[runs[is_node_lost], spares[is_node_lost]] = back_s[is_node_lost]
        self.away_until_s[runs[is_node_lost], nodes[is_node_lost]] = equipped_s[is_node_lost]
        return np.where(is_node_lost, equipped_s, detected_s), ~always, always

    def _leave(
        self, runs: Integers, nodes: Integers, back_s: Floats, is_node_lost: Flags
    ) -> tuple[Floats, Flags, Flags]:
        """Lose nodes of a job that goes on without them."""
        per_replica, before = self._scenario.nodes_per_replica, self.num_copies[runs]
        num_there = self._scenario.num_nodes - np.isfinite(self._returns_s[runs]).sum(axis=1)
        is_idle = self._rng.random(runs.size) * num_there >= before * per_replica
        lost = runs[is_node_lost]
        if lost.size:
            if not np.isinf(self._returns_s[lost]).any(axis=1).all():
                self._returns_s = np.concatenate([self._returns_s, np.full_like(self._returns_s, np.inf)], axis=1)
            self._returns_s[lost, np.isinf(self._returns_s[lost]).argmax(axis=1)] = back_s[is_node_lost]
            self.away_until_s[lost, nodes[is_node_lost]] = back_s[is_node_lost]
            self._count(lost)
        shrinks = self.num_copies[runs] < before
        equipped_s = np.zeros(runs.size)
        (stopped,) = np.nonzero(self.num_copies[runs] == 0)
        if stopped.size:
            order_s = np.sort(self._returns_s[runs[stopped]], axis=1)
            missing = np.isfinite(order_s).sum(axis=1) - (self._scenario.num_nodes - per_replica)
            equipped_s[stopped] = order_s[np.arange(stopped.size), np.maximum(missing, 1) - 1]
        return equipped_s, shrinks, ~is_idle

    def _count(self, runs: Integers) -> None:
        num_there = self._scenario.num_nodes - np.isfinite(self._returns_s[runs]).sum(axis=1)
        self.num_copies[runs] = num_there // self._scenario.nodes_per_replica
        self.capacity[runs] = np.maximum(self.num_copies[runs], 1) / self._scenario.num_replicas
