"""A plan as one page of HTML without network access or script: what each policy costs in time, and the table."""

import html
import math
import os
from collections.abc import Iterator, Sequence

from hyperpod_plugins.planning.closed_forms import HOUR_S
from hyperpod_plugins.planning.plan import JobPlan, PlannedPolicy
from hyperpod_plugins.whole_file import write_whole_file

_PARTS = {
    "saves": ("saving checkpoints", "#6b4a93"),
    "snapshots": ("snapshots", "#a78bc9"),
    "redone": ("work that is done again", "#7a1230"),
    "detect": ("noticing failures", "#f2cf3a"),
    "recovery": ("recovery", "#e8861d"),
    "waiting": ("waiting for nodes", "#a04b2f"),
    "fewer replicas": ("fewer replicas", "#d95fae"),
}
"""Label and colour of each kind of time that is not work, in the order in which they are drawn."""
_WIDTH, _ROW, _LABEL, _VALUE = 880, 34, 160, 110

_STYLE = """
:root { color-scheme: light dark; --ink: #1c222b; --soft: #5b6675; --page: #f5f6f8; --card: #fff; --line: #d9dee5; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6eaf0; --soft: #9aa6b5; --page: #14171c; --card: #1c2128; --line: #333b46; }
}
body { margin: 0 auto; max-width: 1120px; padding: 1.5rem 1rem; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 1rem 1.25rem;
  margin: 1rem 0; overflow-x: auto; }
h1 { font-size: 1.4rem; margin: 0; } h2 { font-size: 1.05rem; margin: 0 0 .5rem; }
p, li { color: var(--soft); margin: .25rem 0; }
svg { display: block; width: 100%; min-width: 560px; height: auto; } text { fill: var(--ink); font-size: 13px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .5rem; font-size: 14px; border-bottom: 1px solid var(--line); text-align: right; }
th, td { white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.key { display: inline-block; width: .8rem; height: .8rem; border-radius: 2px; margin: 0 .35rem 0 .9rem; }
@media print { body { background: #fff; } section { break-inside: avoid; } }
"""


def plan_page(plan: JobPlan) -> str:
    """Return the page of a plan."""
    return "\n".join(_lines(plan)) + "\n"


def write_plan_page(plan: JobPlan, path: str | os.PathLike[str]) -> None:
    """Write the page of a plan to a file.

    Raises:
        OSError: the file cannot be written.
    """
    write_whole_file(path, plan_page(plan))


def _lines(plan: JobPlan) -> Iterator[str]:
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    yield '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>Plan of a job</title><style>{_STYLE}</style></head><body>"
    yield f"<h1>Plan of a job</h1><p>{html.escape(plan.heading())}</p>"
    for remark in plan.remarks:
        yield f"<p>{html.escape(remark)}</p>"
    yield "<section><h2>Time beyond the work, by policy of recovery</h2>"
    yield from _chart(plan.policies)
    keys = [f'<span class="key" style="background:{color}"></span>{label}' for label, color in _PARTS.values()]
    yield f"<p>{''.join(keys)}</p></section>"
    yield "<section><h2>Expected time and price</h2>"
    yield from _table(plan.table()[0], plan.table()[1:])
    yield "</section><section><h2>Sizes</h2>"
    yield from _table((), plan.sizes())
    yield "</section><section><h2>Notes</h2><ul>"
    yield from (f"<li>{html.escape(note)}</li>" for note in plan.notes())
    yield "</ul></section></body></html>"


def _chart(policies: Sequence[PlannedPolicy]) -> Iterator[str]:
    """Bars of the mean time beyond the work; a line from the 5th to the 95th percentile of the runs."""
    shown = [each for each in policies if math.isfinite(each.runs.time_ratio.mean)]
    height = _ROW * len(policies) + 4
    longest_s = max((_beyond_s(each, each.runs.time_ratio.p95) for each in shown), default=0.0)
    per_s = (_WIDTH - _LABEL - _VALUE) / longest_s if longest_s > 0 else 0.0
    yield f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="time beyond the work by policy">'
    for index, each in enumerate(policies):
        top, name = _ROW * index, html.escape(each.policy.name)
        yield f'<text x="0" y="{top + 21}">{name}</text>'
        if each not in shown:
            yield f'<text x="{_LABEL}" y="{top + 21}">does not end</text>'
            continue
        left = float(_LABEL)
        for part, (label, color) in _PARTS.items():
            spent_s = float(each.runs.spent_s[part].mean()) if part in each.runs.spent_s else 0.0
            width = spent_s * per_s
            if width > 0:
                box = f'x="{left:.2f}" y="{top + 6}" width="{width:.2f}" height="{_ROW - 14}" fill="{color}"'
                yield f"<rect {box}><title>{label}: {_hours(spent_s)}</title></rect>"
            left += width
        ratio = each.runs.time_ratio
        low, high = (_LABEL + max(0.0, _beyond_s(each, end)) * per_s for end in (ratio.p05, ratio.p95))
        middle = top + 6 + (_ROW - 14) / 2
        yield f'<path d="M{low:.2f} {middle}H{high:.2f}" stroke="currentColor" stroke-width="1.5" opacity=".6"/>'
        beyond_s = _beyond_s(each, ratio.mean)
        yield f'<text x="{_WIDTH}" y="{top + 21}" text-anchor="end">{_hours(beyond_s)}</text>'
    yield "</svg>"


def _beyond_s(each: PlannedPolicy, time_ratio: float) -> float:
    return (time_ratio - 1) * each.runs.scenario.work_s if math.isfinite(time_ratio) else 0.0


def _hours(seconds: float) -> str:
    return f"{seconds / HOUR_S:,.2f} h"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "<table>"
    if header:
        yield "<thead><tr>" + "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in header) + "</tr></thead>"
    for row in rows:
        yield "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
    yield "</table>"
