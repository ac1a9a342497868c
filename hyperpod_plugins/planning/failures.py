"""When which node fails: models of failures, drawn for many runs at once.

Failures come on the wall clock, whatever the job does then. A model is started for a number of runs, and then draws
their failures window by window, each in the order of time.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.planning.closed_forms import HOUR_S, check_numbers

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class LemonNodes:
    """Few nodes with a large part of the failures. Which ones they are is drawn for each run.

    The defaults are those of a report from 63 nodes, of which 3 were the cause of half of the exclusions
    (arXiv:2605.09370).
    """

    fraction: float = 3 / 63
    """Part of the nodes; 0 for none."""
    share: float = 0.5
    """Part of the failures that happen on them."""
    exclude_after: int = 0
    """Failures of a node after which another takes its place for good, which is as good as most; 0 for never."""

    def __post_init__(self) -> None:
        """Check the parts."""
        if not (0 <= self.fraction < 1 and 0 <= self.share < 1):
            raise ConfigError(f"fraction={self.fraction:g} and share={self.share:g} of lemon nodes must be below 1.")
        if self.fraction and not self.share:
            raise ConfigError(
                f"share=0 of lemon nodes, with fraction={self.fraction:g} of the nodes: these would never fail. Give "
                "them a share, or fraction=0 for nodes that are all alike."
            )
        if self.exclude_after < 0:
            raise ConfigError(f"exclude_after={self.exclude_after} must be at least 0; 0 excludes no node.")

    def number(self, num_nodes: int) -> int:
        """How many of the nodes are lemons: at least one, and not all, unless there are none."""
        if self.fraction == 0 or num_nodes < 2:
            return 0
        return min(num_nodes - 1, max(1, round(self.fraction * num_nodes)))

    def rates(self, num_nodes: int, mean_rate: float) -> tuple[float, float]:
        """Rate of a lemon and of any other node, with `mean_rate` over all nodes."""
        number = self.number(num_nodes)
        if number == 0:
            return mean_rate, mean_rate
        total = num_nodes * mean_rate
        return self.share * total / number, (1 - self.share) * total / (num_nodes - number)


NO_LEMONS = LemonNodes(fraction=0.0, share=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """Failures of a window, in the order of time."""

    times_s: Floats
    """Times since the start, infinite behind the last one of a run (run, failure)."""
    nodes: Integers
    """Index of the node (run, failure)."""


class FailureStream(ABC):
    """Failures of several runs, window by window."""

    def __init__(self, rng: np.random.Generator, num_runs: int, num_nodes: int, lemons: LemonNodes) -> None:
        """Draw which nodes are lemons."""
        self.rng, self.num_runs, self.num_nodes, self.lemons = rng, num_runs, num_nodes, lemons
        self.now_s = 0.0
        self.num_lemons = lemons.number(num_nodes)
        self.is_lemon: Flags = np.zeros((num_runs, num_nodes), np.bool_)
        """Whether a node is a lemon (run, node)."""
        self.order: NDArray[np.int32] = np.zeros((num_runs, 0), np.int32)
        """All nodes of a run, the lemons first (run, node); empty if there are none."""
        if self.num_lemons:
            nodes = np.broadcast_to(np.arange(num_nodes, dtype=np.int32), (num_runs, num_nodes))
            self.order = rng.permuted(nodes, axis=1)
            np.put_along_axis(self.is_lemon, self.order[:, : self.num_lemons], True, axis=1)

    def until(self, end_s: float) -> Failures:
        """Draw the failures from the end of the last window to `end_s`."""
        found = self._draw(end_s)
        self.now_s = end_s
        return found

    @abstractmethod
    def _draw(self, end_s: float) -> Failures: ...


class FailureModel(ABC):
    """When nodes fail."""

    @property
    @abstractmethod
    def is_exponential(self) -> bool:
        """Whether the failures of the job are a Poisson process, as closed forms assume."""

    @abstractmethod
    def start(
        self, rng: np.random.Generator, num_runs: int, num_nodes: int, rate_per_hour: float, lemons: LemonNodes
    ) -> FailureStream:
        """Begin to draw failures.

        Args:
            rng: Source of all random numbers.
            num_runs: Number of runs.
            num_nodes: Nodes of each.
            rate_per_hour: Failures of a node in an hour, on average over the nodes.
            lemons: How failures are spread over the nodes.
        """


class _ExponentialStream(FailureStream):
    """All nodes together are one Poisson process; the node of each failure is drawn after its time."""

    def __init__(
        self, rng: np.random.Generator, num_runs: int, num_nodes: int, lemons: LemonNodes, rate_s: float
    ) -> None:
        super().__init__(rng, num_runs, num_nodes, lemons)
        self._rate_s = rate_s * num_nodes

    def _draw(self, end_s: float) -> Failures:
        counts = self.rng.poisson(self._rate_s * (end_s - self.now_s), self.num_runs)
        size = self.num_runs, int(counts.max(initial=0))
        times_s = self.rng.uniform(self.now_s, end_s, size)
        times_s[np.arange(size[1]) >= counts[:, None]] = np.inf
        times_s.sort(axis=1)
        if not self.num_lemons:
            return Failures(times_s=times_s, nodes=self.rng.integers(0, self.num_nodes, size))
        places = self.rng.integers(self.num_lemons, self.num_nodes, size)
        is_of_lemon = self.rng.random(size) < self.lemons.share
        places[is_of_lemon] = self.rng.integers(0, self.num_lemons, int(is_of_lemon.sum()))
        return Failures(times_s=times_s, nodes=np.take_along_axis(self.order, places, axis=1).astype(np.int64))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExponentialFailures(FailureModel):
    """Failures at a constant rate."""

    @property
    def is_exponential(self) -> bool:
        """Yes."""
        return True

    def start(
        self, rng: np.random.Generator, num_runs: int, num_nodes: int, rate_per_hour: float, lemons: LemonNodes
    ) -> FailureStream:
        """Begin to draw failures."""
        return _ExponentialStream(rng, num_runs, num_nodes, lemons, rate_per_hour / HOUR_S)


class _WeibullStream(FailureStream):
    """A renewal process for each node: after a failure it is as good as new."""

    def __init__(
        self,
        rng: np.random.Generator,
        num_runs: int,
        num_nodes: int,
        lemons: LemonNodes,
        *,
        shape: float,
        rate_s: float,
        starts_new: bool,
    ) -> None:
        super().__init__(rng, num_runs, num_nodes, lemons)
        of_lemon, of_others = (1 / (rate * math.gamma(1 + 1 / shape)) for rate in lemons.rates(num_nodes, rate_s))
        self._shape = shape
        self._scale_s = np.where(self.is_lemon, of_lemon, of_others)
        if starts_new:
            self._next_s = self._scale_s * rng.weibull(shape, self._scale_s.shape)
        else:  # the rest of an interval that is under way: longer ones are met more often
            interval = rng.gamma(1 + 1 / shape, size=self._scale_s.shape) ** (1 / shape)
            self._next_s = self._scale_s * interval * rng.random(self._scale_s.shape)

    def _draw(self, end_s: float) -> Failures:
        runs, nodes, times_s = list[Integers](), list[Integers](), list[Floats]()
        run, node = np.nonzero(self._next_s < end_s)
        while run.size:
            at_s = self._next_s[run, node]
            runs.append(run)
            nodes.append(node)
            times_s.append(at_s)
            at_s = at_s + self._scale_s[run, node] * self.rng.weibull(self._shape, run.size)
            self._next_s[run, node] = at_s
            again = at_s < end_s
            run, node = run[again], node[again]
        if not runs:
            return Failures(times_s=np.empty((self.num_runs, 0)), nodes=np.empty((self.num_runs, 0), np.int64))
        return _by_run(self.num_runs, np.concatenate(runs), np.concatenate(nodes), np.concatenate(times_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class WeibullFailures(FailureModel):
    """Failures whose rate depends on a node's age, which is 0 again after each of them."""

    shape: float = 0.7
    """Below 1, new nodes fail most; 1 is exponential."""
    starts_new: bool = False
    """Whether all nodes are new at the start, so that with a shape below 1 most failures come early."""

    def __post_init__(self) -> None:
        """Check the shape."""
        if not 0.1 <= self.shape <= 10:
            raise ConfigError(f"shape={self.shape:g} of a Weibull distribution must be between 0.1 and 10.")

    @property
    def is_exponential(self) -> bool:
        """Only with shape 1."""
        return self.shape == 1

    def start(
        self, rng: np.random.Generator, num_runs: int, num_nodes: int, rate_per_hour: float, lemons: LemonNodes
    ) -> FailureStream:
        """Begin to draw failures."""
        rate_s = rate_per_hour / HOUR_S
        return _WeibullStream(
            rng, num_runs, num_nodes, lemons, shape=self.shape, rate_s=rate_s, starts_new=self.starts_new
        )


class _TraceStream(FailureStream):
    """The trace, again and again, from another point in each run."""

    def __init__(self, rng: np.random.Generator, num_runs: int, num_nodes: int, trace: "TraceFailures") -> None:
        super().__init__(rng, num_runs, num_nodes, NO_LEMONS)
        self._period_s = trace.duration_s
        starts_s = rng.uniform(0, self._period_s, num_runs) if trace.starts_anywhere else np.zeros(num_runs)
        times_s = (np.asarray(trace.times_s) - starts_s[:, None]) % self._period_s
        order = times_s.argsort(axis=1, kind="stable")
        self._times_s = np.take_along_axis(times_s, order, axis=1)
        self._nodes = np.asarray(trace.nodes, np.int64)[order]

    def _draw(self, end_s: float) -> Failures:
        runs, nodes, times_s = list[Integers](), list[Integers](), list[Floats]()
        for cycle in range(int(self.now_s // self._period_s), int(end_s // self._period_s) + 1):
            shifted_s = self._times_s + cycle * self._period_s
            run, index = np.nonzero((shifted_s >= self.now_s) & (shifted_s < end_s))
            runs.append(run)
            nodes.append(self._nodes[run, index])
            times_s.append(shifted_s[run, index])
        return _by_run(self.num_runs, np.concatenate(runs), np.concatenate(nodes), np.concatenate(times_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFailures(FailureModel):
    """Failures as a real run met them, with their bursts; repeated where a run takes longer."""

    times_s: tuple[float, ...]
    """When they happened, since the start of the trace, in any order."""
    nodes: tuple[int, ...]
    """The node of each, from 0."""
    duration_s: float
    """Length of the trace."""
    starts_anywhere: bool = True
    """Whether each run starts at another point of the trace, drawn at random; otherwise all start at its beginning."""

    def __post_init__(self) -> None:
        """Check the trace."""
        check_numbers(positive={"duration_s": self.duration_s})
        if len(self.times_s) != len(self.nodes) or not self.times_s:
            raise ConfigError(
                f"a trace with {len(self.times_s)} times and {len(self.nodes)} nodes; give one node for each failure, "
                "and at least one failure."
            )
        if not all(map(math.isfinite, self.times_s)):
            raise ConfigError("times of a trace must be finite numbers; one is not.")
        if min(self.times_s) < 0 or max(self.times_s) >= self.duration_s or min(self.nodes) < 0:
            raise ConfigError(
                f"times of a trace must be from 0 to less than duration_s={self.duration_s:g}, and nodes at least 0; "
                f"times are from {min(self.times_s):g} to {max(self.times_s):g}, the lowest node is {min(self.nodes)}."
            )

    @property
    def is_exponential(self) -> bool:
        """No."""
        return False

    def start(
        self, rng: np.random.Generator, num_runs: int, num_nodes: int, rate_per_hour: float, lemons: LemonNodes
    ) -> FailureStream:
        """Begin to draw failures; rate and lemons are those of the trace, whatever is given here.

        Raises:
            ConfigError: The trace has more nodes than the cluster.
        """
        if max(self.nodes) >= num_nodes:
            raise ConfigError(
                f"the trace has a failure of node {max(self.nodes)}, but the cluster has {num_nodes} nodes, counted "
                "from 0. Give the number of nodes of the run that the trace is from."
            )
        return _TraceStream(rng, num_runs, num_nodes, self)

    @property
    def failures_per_hour(self) -> float:
        """Failures of the whole cluster in an hour, on average."""
        return len(self.times_s) / self.duration_s * HOUR_S


def _by_run(num_runs: int, runs: Integers, nodes: Integers, times_s: Floats) -> Failures:
    """Arrange failures by run and time."""
    order = np.lexsort((times_s, runs))
    runs, nodes, times_s = runs[order], nodes[order], times_s[order]
    counts = np.bincount(runs, minlength=num_runs)
    columns = np.arange(runs.size) - np.repeat(np.cumsum(counts) - counts, counts)
    size = num_runs, int(counts.max(initial=0))
    table_s, table = np.full(size, np.inf), np.zeros(size, np.int64)
    table_s[runs, columns], table[runs, columns] = times_s, nodes
    return Failures(times_s=table_s, nodes=table)
