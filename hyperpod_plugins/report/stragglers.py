"""Ranks for which the others waited, and nodes that fail more often than chance explains.

No profiler is needed: each rank says how long it has waited for its peers in the collectives of a step. The rank that
waited least came last, and the job would have been faster by the difference to the next one. The counterfactual is
that of "Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI 2025): the same steps, in which
that rank takes as long as the next slowest.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from hyperpod_plugins.ledger import TimeCategory
from hyperpod_plugins.report.run_files import LedgerSpan
from hyperpod_plugins.report.run_report import FailingNode, Incident, Straggler
from hyperpod_plugins.report.timelines import Timeline, counted_steps

_NOISE_S, _NOISE_SHARE = 0.002, 0.05
"""A rank is late in a step if the others waited longer for it than this, and than this share of the step."""
_SHOWN_SHARE = 0.002
"""A straggler is one that costs at least this share of the run."""
_CHANCE = 0.01
_NUM_FAILURES = 3


@dataclass(slots=True)
class _Lateness:
    held_back_s: float = 0.0
    num_steps: int = 0
    phases: Counter[str] = field(default_factory=Counter[str])


def stragglers_of(timelines: Sequence[Timeline], wall_s: float) -> list[Straggler]:
    """The ranks that held the job back, the one that cost most first.

    Some rank is the last one in each step. A straggler is so more often than if it were a random one each time.
    """
    late: defaultdict[int, _Lateness] = defaultdict(_Lateness)
    for spans in counted_steps(timelines).values():
        waits = sorted((span.step.waited_s, index) for index, (_, span) in enumerate(spans) if span.step is not None)
        if len(waits) < 2:
            continue
        margin_s = waits[1][0] - waits[0][0]
        slowest = waits[0][1]
        if margin_s > max(_NOISE_S, _NOISE_SHARE * spans[slowest][1].duration_s):
            own = late[spans[slowest][0].worker_id]
            own.held_back_s += margin_s
            own.num_steps += 1
            own.phases[_phase(spans[slowest][1], [span for _, span in spans])] += 1
    by_worker = {each.worker_id: each for each in timelines}
    num_late = sum(each.num_steps for each in late.values())
    found = [
        Straggler(
            rank=by_worker[worker_id].rank,
            host=by_worker[worker_id].processes[-1].host,
            phase=each.phases.most_common(1)[0][0],
            held_back_s=each.held_back_s,
            num_steps=each.num_steps,
            without_it_s=max(0.0, wall_s - each.held_back_s),
        )
        for worker_id, each in late.items()
        if each.held_back_s > _SHOWN_SHARE * wall_s
        and _binomial_tail(each.num_steps, num_late, 1 / len(timelines)) * len(timelines) < _CHANCE
    ]
    return sorted(found, key=lambda each: -each.held_back_s)


def _phase(span: LedgerSpan, spans: Sequence[LedgerSpan]) -> str:
    """The category in which a rank was slower than the others by most; in the step itself, without its waits."""

    def taken_s(each: LedgerSpan, category: str) -> float:
        return each.seconds.get(category, 0.0)

    excess = {
        str(category): taken_s(span, category) - median(taken_s(each, category) for each in spans)
        for category in span.seconds
        if category != TimeCategory.STRAGGLER_WAIT
    }
    slowest = max(excess, key=lambda category: excess[category], default=str(TimeCategory.STEP))
    return "compute" if slowest == TimeCategory.STEP else slowest


def failing_nodes_of(incidents: Sequence[Incident], timelines: Sequence[Timeline]) -> list[FailingNode]:
    """Nodes with at least three failures, and more than nodes that are all alike would have by chance.

    The probability is that of at least as many failures on this node, if each failure hits a rank at random (binomial),
    times the number of nodes, because the worst of them is looked for.
    """
    ranks = Counter(host for each in timelines for host in {process.host for process in each.processes})
    failures = Counter(each.host for each in incidents if each.kind != "resize" and each.host)
    total = sum(failures.values())
    found: list[FailingNode] = []
    for host, count in failures.most_common():
        share = ranks.get(host, 1) / max(1, sum(ranks.values()))
        probability = min(1.0, _binomial_tail(count, total, share) * len(ranks))
        if count >= _NUM_FAILURES and len(ranks) > 1 and probability < _CHANCE:
            found.append(FailingNode(host=host, num_failures=count, probability=probability))
    return found


def _binomial_tail(count: int, total: int, share: float) -> float:
    """Probability of at least `count` of `total` hits, each with probability `share`."""
    if not 0 < share < 1:
        return 1.0 if share >= 1 or count <= 0 else 0.0
    hit, miss, of_all = math.log(share), math.log1p(-share), math.lgamma(total + 1)
    logs = (
        of_all - math.lgamma(hits + 1) - math.lgamma(total - hits + 1) + hits * hit + (total - hits) * miss
        for hits in range(count, total + 1)
    )
    return min(1.0, math.fsum(map(math.exp, logs)))
