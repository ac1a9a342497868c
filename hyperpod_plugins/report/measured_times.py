"""What a run has measured, in the forms that `hyperpod plan` reads: times of stages, and its failures as a trace."""

import json

from hyperpod_plugins.ledger import TimeCategory
from hyperpod_plugins.report.make_report import ELASTIC_CATEGORIES, FAILURE_CATEGORIES
from hyperpod_plugins.report.run_report import Incident, RankTimeline, RunReport

_SHORTEST_SNAPSHOT_S = 1e-3
"""A shorter visit found that none was due."""


def stage_times(report: RunReport) -> dict[str, list[float]]:
    """Measured seconds by the fields of `planning.StageTimes`, for `hyperpod plan --stage-times`.

    A step includes what comes between two steps each time: data, hooks and logging, but no evaluation, checkpoint or
    snapshot. `repair_s` is known where a node was lost that had an agent of `hyperpodrun`, and another one, or the same
    again, joined the running job in its place; `assemble_s` does not include the wait for it. Names of which the run
    has measured nothing are left out.
    """
    found: dict[str, list[float]] = {}
    per_step_s = step_time_s(report)
    if per_step_s is not None:
        found["step_s"] = [per_step_s]
    repairs = [each for each in report.incidents if each.kind == "failure" and each.level != "none"]
    found["detect_s"] = [each.detect_s for each in repairs]
    found["assemble_s"] = [_assembled_with_all_nodes_s(each) for each in repairs]
    found["restore_s"] = [each.restore_s for each in repairs]
    found["repair_s"] = [each.node_back_s for each in report.incidents if each.node_back_s is not None]
    found["resize_s"] = [each.total_s for each in report.incidents if each.kind == "resize"]
    found["startup_s"] = [rank.spans[0][1] for rank in report.ranks if rank.spans and _begins_with_setup(rank)]
    found["checkpoint_save_s"] = _durations(report, TimeCategory.CHECKPOINT_SAVE)
    found["checkpoint_restore_s"] = [*report.ranks[0].checkpoint_loads_s]  # all ranks load the same ones
    snapshots = _durations(report, TimeCategory.SNAPSHOT)
    found["snapshot_s"] = [each for each in snapshots if each >= _SHORTEST_SNAPSHOT_S]
    return {name: times for name, times in found.items() if times}


def step_time_s(report: RunReport) -> float | None:
    """Mean time from one step to the next without failures, evaluations, checkpoints, snapshots and set-up."""
    left_out = {str(each) for each in (*FAILURE_CATEGORIES, *ELASTIC_CATEGORIES, *_NOT_OF_A_STEP)}
    of_ranks = sum(report.steps.world_size)
    if not of_ranks:
        return None
    last_s = max(report.steps.at_s)
    inside = [
        duration_s
        for rank in report.ranks
        for begin_s, duration_s, category in rank.spans
        if begin_s < last_s and category not in left_out
    ]
    return sum(inside) / of_ranks


_NOT_OF_A_STEP = (
    TimeCategory.SETUP,
    TimeCategory.EVALUATION,
    TimeCategory.CHECKPOINT_SAVE,
    TimeCategory.CHECKPOINT_RESTORE,
    TimeCategory.SNAPSHOT,
)


def failure_trace(report: RunReport) -> dict[str, object]:
    """The failures of a run, for `hyperpod plan --trace`: seconds since its start, and the number of the node.

    With the number of nodes, because a trace has the rate of its own cluster.
    """
    hosts = {host: number for number, host in enumerate(report.hosts)}
    failures = [
        [round(each.at_s - report.began_at_s, 3), hosts.get(each.host, 0)]
        for each in report.incidents
        if each.kind == "failure"
    ]
    return {"duration_s": report.headline.wall_s, "num_nodes": len(report.hosts), "failures": failures}


def stage_times_json(report: RunReport) -> str:
    """`stage_times` as JSON."""
    return json.dumps(stage_times(report), indent=1)


def failure_trace_json(report: RunReport) -> str:
    """`failure_trace` as JSON."""
    return json.dumps(failure_trace(report), indent=1)


def _durations(report: RunReport, category: str) -> list[float]:
    """Durations of the spans of a category on the first rank; the others take part in the same ones."""
    return [duration_s for _, duration_s, name in report.ranks[0].spans if name == category]


def _assembled_with_all_nodes_s(incident: Incident) -> float:
    """How long a repair assembled the ranks once there were nodes for all of them."""
    waited_s = incident.node_back_s
    if waited_s is None or waited_s > incident.assemble_s:  # the job has gone on without the node
        return incident.assemble_s
    return incident.assemble_s - waited_s


def _begins_with_setup(rank: RankTimeline) -> bool:
    return rank.spans[0][2] == TimeCategory.SETUP
