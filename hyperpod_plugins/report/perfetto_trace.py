"""The timelines of a run in Chrome's trace event format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

The format is described in "Trace Event Format" (Google, 2016). Times in it are microseconds since the run began.
"""

import json
from typing import Any

from hyperpod_plugins.report.make_report import LABELS
from hyperpod_plugins.report.run_report import RunReport

_US = 1_000_000


def perfetto_trace(report: RunReport) -> str:
    """JSON of the trace: a process for each rank with its categories, incidents as instants, and counters."""
    events: list[dict[str, Any]] = []
    for rank in report.ranks:
        host = rank.processes[-1].host if rank.processes else ""
        name = {"name": f"rank {rank.rank} on {host}"}
        events.append({"ph": "M", "name": "process_name", "pid": rank.rank, "tid": 0, "args": name})
        for begin_s, duration_s, category in rank.spans:
            events.append(
                {
                    "ph": "X",
                    "name": LABELS.get(category, category),
                    "cat": category,
                    "pid": rank.rank,
                    "tid": 0,
                    "ts": _us(begin_s - report.began_at_s),
                    "dur": _us(duration_s),
                }
            )
    for incident in report.incidents:
        events.append(
            {
                "ph": "i",
                "s": "g",
                "name": f"{incident.kind}: {incident.cause}",
                "cat": "incident",
                "pid": incident.rank or 0,
                "tid": 0,
                "ts": _us(incident.at_s - report.began_at_s),
                "args": {"step": incident.step, "level": incident.level, "total_s": incident.total_s},
            }
        )
    steps = report.steps
    for at_s, loss, world_size in zip(steps.at_s, steps.loss, steps.world_size, strict=True):
        counters: dict[str, float] = {"world size": world_size} | ({} if loss is None else {"loss": loss})
        for name, value in counters.items():
            time_us = _us(at_s - report.began_at_s)
            events.append({"ph": "C", "name": name, "pid": 0, "ts": time_us, "args": {name: value}})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _us(seconds: float) -> int:
    return round(seconds * _US)
