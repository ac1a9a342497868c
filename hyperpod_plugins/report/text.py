"""The report of a run as Markdown, and how its figures are written."""

from collections.abc import Iterator, Sequence

from hyperpod_plugins.report.make_report import labelled
from hyperpod_plugins.report.run_report import ConfidenceInterval, Headline, Incident, RunReport, Verdict


def duration(seconds: float | None) -> str:
    """A duration for people, such as `0.42 s`, `3 min 20 s` or `2 h 5 min`."""
    if seconds is None:
        return "unknown"
    if seconds < 0.9995:
        return f"{seconds:.3f} s" if seconds < 0.0995 else f"{seconds:.2f} s"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours / 24:.1f} days"


def counted(number: int, what: str, several: str = "") -> str:
    """A number with its noun."""
    return f"{number} {what if number == 1 else several or what + 's'}"


def interval(found: ConfidenceInterval | None) -> str:
    """An estimate with its interval."""
    if found is None:
        return "unknown"
    if found.high is None:
        return f"more than {duration(found.low)}, nothing has failed"
    return f"{duration(found.value)} ({duration(found.low)} to {duration(found.high)})"


def verdict_line(verdict: Verdict) -> str:
    """Whether to start a run again, and why."""
    return f"{_VERDICTS[verdict.action]}: {verdict.why}" if verdict.why else _VERDICTS[verdict.action]


_VERDICTS = {
    "continue": "nothing to do",
    "restart": "start it again",
    "stop": "do not start it again as it is",
}


def markdown(report: RunReport) -> str:
    """The report as Markdown: figures, categories, incidents, ranks."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: RunReport) -> Iterator[str]:
    yield f"# Run {_cell(report.run_id)}"
    yield ""
    state = "complete" if report.is_complete else "not complete"
    yield f"{counted(report.num_ranks, 'rank')} on {counted(len(report.hosts), 'host')}, {state}."
    if report.verdict.action != "continue":
        yield f"**{report.verdict.action.capitalize()}**: {_cell(report.verdict.why)}."
    yield ""
    yield from _table(("", ""), [list(each) for each in headline_rows(report.headline)])
    yield ""
    yield "## Where the time went"
    yield ""
    shown = [
        [each.label, duration(each.seconds), f"{each.share:.1%}"] for each in report.categories if each.seconds > 0
    ]
    yield from _table(("category", "seconds of all ranks", "share"), shown)
    if report.incidents:
        yield ""
        yield "## Incidents"
        yield ""
        yield from _table(_INCIDENT_COLUMNS, [incident_row(each, report.began_at_s) for each in report.incidents])
    if report.stragglers:
        yield ""
        yield "## Stragglers"
        yield ""
        rows = [
            [str(each.rank), _cell(each.host), each.phase, str(each.num_steps), duration(each.held_back_s)]
            for each in report.stragglers
        ]
        yield from _table(("rank", "host", "phase", "late in steps", "the run would have been shorter by"), rows)
    elif not report.are_waits_measured:
        yield ""
        yield "The ranks' waits for each other were not measured, so this report cannot identify stragglers."
    for node in report.failing_nodes:
        yield ""
        chance = f"which has a probability of {node.probability:.1g} if all nodes are alike"
        yield f"{_cell(node.host)} has failed {node.num_failures} times, {chance}."
    yield ""
    yield "## Ranks"
    yield ""
    yield from _table(
        ("rank", "wall time", "processes", "most of its time"),
        [
            [str(each.rank), duration(each.wall_s), str(len(each.processes)), _largest(each.seconds)]
            for each in report.ranks
        ],
    )
    for problem in report.problems:
        yield ""
        yield f"* {_cell(problem)}"


def headline_rows(headline: Headline) -> list[tuple[str, str]]:
    """The figures of a run with their names."""
    rows = [
        ("wall time", duration(headline.wall_s)),
        ("goodput", f"{headline.goodput:.1%}"),
        ("effective training time (ETTR)", f"{headline.ettr:.1%}"),
        ("steps", f"{headline.steps_committed}, and {headline.steps_lost} run again"),
        ("an ideal step", duration(headline.ideal_step_s)),
        ("failures", f"{headline.num_failures}, {headline.num_repairs} repairs, {headline.num_restarts} restarts"),
        ("changes of size", str(headline.num_resizes)),
        ("failures cost", duration(headline.failures_cost_s)),
        ("time between failures", interval(headline.mtbf_s)),
        ("time to repair", interval(headline.mttr_s)),
    ]
    if headline.checkpoint_restart_cost_s is not None:
        rows.append(("restarts from checkpoints would have cost", duration(headline.checkpoint_restart_cost_s)))
        rows.append(("which assumes", headline.checkpoint_restart_assumes))
    return rows


_INCIDENT_COLUMNS = ("after", "kind", "rank", "cause", "step", "lost", "detect", "assemble", "restore", "total")


def incident_row(incident: Incident, began_at_s: float) -> list[str]:
    """An incident as cells of a table."""
    stages = (incident.detect_s, incident.assemble_s, incident.restore_s, incident.total_s)
    lost = "unknown" if incident.steps_lost is None else str(incident.steps_lost)
    rank = "" if incident.rank is None else str(incident.rank)
    first = [duration(incident.at_s - began_at_s), incident.kind, rank, _cell(incident.cause), str(incident.step), lost]
    return first + [duration(each) for each in stages]


def _largest(seconds: object) -> str:
    assert isinstance(seconds, dict)
    found = sorted(labelled(seconds), key=lambda each: -each[1])[:3]
    return ", ".join(f"{label} {duration(value)}" for label, value in found)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(columns) + " |"
    yield "|" + " --- |" * len(columns)
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def _cell(text: str) -> str:
    """Text of a ledger within Markdown: on one line, and without marks of its own."""
    plain = "".join(each if each.isprintable() else " " for each in text)
    return "".join(f"\\{each}" if each in "|\\`*_<>[]" else each for each in plain)
