"""`RunReport`: what a run's ledgers say, ready to be shown as a page, a table or JSON. Plain data.

Times `*_at_s` are Unix seconds, others are durations in seconds. Figures that are not known are None.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfidenceInterval:
    """An estimate with its 95 % confidence interval."""

    value: float
    low: float
    high: float | None
    """None if there is no upper bound: nothing has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """The figures of a whole run. Seconds are averages over the ranks unless they say otherwise."""

    wall_s: float
    """From the start of the first process until the last line of a ledger."""
    goodput: float
    """Part of the ranks' wall time in steps that counted, in `0..1`."""
    ettr: float
    """Effective training time ratio: the same, without what a run without failures costs, too (set-up, data,
    checkpoints, evaluation): part of the time after the set-up that failures and changes of size did not cost."""
    num_failures: int
    num_repairs: int
    """Repairs within the processes that lived."""
    num_restarts: int
    """Restarts of all processes."""
    num_resizes: int
    steps_committed: int
    steps_lost: int
    """Committed steps that were run again."""
    failures_cost_s: float
    """Wall seconds that failures have cost: noticing, assembling, restoring, and steps run again. They are averaged
    over the ranks that were there at the time, whose number may change."""
    ideal_step_s: float | None
    """Mean duration of a step without outliers: those beyond the median by 3 median absolute deviations."""
    mtbf_s: ConfidenceInterval | None
    """Mean time between failures of the whole job; None without a run to measure."""
    mttr_s: ConfidenceInterval | None
    """Mean time to repair; None without repairs."""
    checkpoint_restart_cost_s: float | None
    """What the same failures would have cost with restarts from checkpoints; None if no such estimate can be made."""
    checkpoint_restart_assumes: str = ""
    """What that estimate assumes, in one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CategoryTime:
    """Seconds of one category, over all ranks."""

    category: str
    label: str
    seconds: float
    share: float
    """Of the wall time of all ranks, in `0..1`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProcess:
    """One process of a rank; a replacement is another one."""

    pid: int
    host: str
    incarnation: int
    restart: int
    """How often all processes had been restarted before it."""
    began_at_s: float
    ended_at_s: float
    ending: str
    """How it ended, such as `SIGKILL`, `exit code 1`, `finished`, or empty if that is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimeline:
    """Where the time of one rank went."""

    rank: int
    """In the first world; the number of its worker."""
    wall_s: float
    seconds: Mapping[str, float]
    """By category; they add up to `wall_s`."""
    processes: Sequence[RankProcess]
    spans: Sequence[tuple[float, float, str]]
    """Start (Unix time), duration and category; neighbours of one category are joined."""
    waited_s: float
    """In collectives for slower ranks, while steps were computed."""
    checkpoint_loads_s: Sequence[float] = ()
    """How long each of its checkpoints took to load; after a restart, that is booked as restoring."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """A failure, a change of size or a restart, and what followed."""

    at_s: float
    kind: str
    """`failure`, `resize` or `restart`."""
    cause: str
    """First cause in one line."""
    rank: int | None
    """Rank that failed."""
    host: str
    step: int
    """Committed steps when the job went on."""
    steps_lost: int | None
    generation: int | None
    level: str
    """How it was repaired, such as `replace` or `snapshot`."""
    detect_s: float
    assemble_s: float
    restore_s: float
    redone_s: float
    """Work that had to be done again, averaged over the ranks that were there at the time."""
    total_s: float
    node_back_s: float | None = None
    """From when the loss of a node was noticed until it, or another one, was there for the rank that failed; None if
    its process was replaced on a node that was there, or never. If the others waited for it, a part of `assemble_s`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeries:
    """One entry for each committed step that counts, or for each group of neighbours; all have the same length."""

    step: Sequence[int] = ()
    at_s: Sequence[float] = ()
    """When it was committed."""
    duration_s: Sequence[float] = ()
    loss: Sequence[float | None] = ()
    """Mean over the ranks."""
    world_size: Sequence[int] = ()
    global_batch: Sequence[int | None] = ()
    samples: Sequence[int | None] = ()
    """Samples of the whole job so far: the position in the data."""
    goodput: Sequence[float] = ()
    """In a window that ends with the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank for which others waited."""

    rank: int
    host: str
    phase: str
    """Where it lost most of the time, a category or `compute`."""
    held_back_s: float
    """Wall seconds that the job would have saved had this rank been as fast as the next slowest one."""
    num_steps: int
    """Steps in which it was the slowest by more than the noise."""
    without_it_s: float
    """The run's wall seconds had it been as fast as the next slowest one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailingNode:
    """A node that fails more often than chance explains ("lemon node")."""

    host: str
    num_failures: int
    probability: float
    """Of at least as many failures here if all nodes were alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether to start the run again."""

    action: str
    """`continue`, `restart` or `stop`."""
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """All that is known of a run."""

    run_id: str
    began_at_s: float
    ended_at_s: float
    is_complete: bool
    """Whether all ranks have ended as their program wanted."""
    num_ranks: int
    hosts: Sequence[str]
    headline: Headline
    categories: Sequence[CategoryTime]
    ranks: Sequence[RankTimeline]
    incidents: Sequence[Incident]
    steps: StepSeries
    stragglers: Sequence[Straggler]
    failing_nodes: Sequence[FailingNode]
    verdict: Verdict
    are_waits_measured: bool = True
    """Whether any rank has measured what it waited for the others; if not, stragglers cannot be told."""
    problems: Sequence[str] = field(default=())
    """What is missing or damaged, for instance lines that could not be read."""
