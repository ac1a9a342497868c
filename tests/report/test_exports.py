"""A report in other forms: Markdown, JSON, a picture, a trace, and input for the planner. And the command."""

import json
import math
import urllib.request
from dataclasses import replace

import pytest
from report.synthetic_ledgers import SyntheticRun
from report.synthetic_report import synthetic_report

from hyperpod_plugins.cli import main
from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.ledger import TimeCategory, ledger
from hyperpod_plugins.planning.scenario import StageTimes
from hyperpod_plugins.report.exports import export_spans, serve_prometheus
from hyperpod_plugins.report.make_report import run_report
from hyperpod_plugins.report.measured_times import failure_trace, stage_times, step_time_s
from hyperpod_plugins.report.perfetto_trace import perfetto_trace
from hyperpod_plugins.report.picture import draw_report
from hyperpod_plugins.report.run_files import read_run
from hyperpod_plugins.report.run_report import ConfidenceInterval
from hyperpod_plugins.report.text import duration, interval, markdown


def write_ledgers(folder, num_ranks=2, num_steps=5):
    """Ledgers of a run without incidents: a set-up of 2 s, steps of 0.5 s, an evaluation of 1 s."""
    folder.mkdir()
    for rank in range(num_ranks):
        lines = [
            {"kind": "process", "format": 1, "at_s": 1000.0, "pid": 7 + rank, "host": "node", "run_id": "job",
             "worker_id": rank, "incarnation": 0, "restart": 0},
            {"kind": "entry", "at_s": 1001.0, "entry": 0},
            {"kind": "time", "at_s": 1002.0, "seconds": {"setup": 2.0}},
            {"kind": "world", "at_s": 1002.0, "rank": rank, "world_size": num_ranks, "replicas": 1, "generation": 0},
        ]  # fmt: skip
        for step in range(1, num_steps + 1):
            seconds = {"data_wait": 0.1, "step": 0.4}
            loss = 3.0 / step
            line = {"kind": "step", "at_s": 1002.0 + 0.5 * step, "seconds": seconds, "step": step, "waited_s": 0.0}
            lines.append(line | {"loss": loss, "samples": 8})
        end_s = 1002.0 + 0.5 * num_steps + 1.0
        lines.append({"kind": "time", "at_s": end_s, "seconds": {"evaluation": 1.0}})
        lines.append({"kind": "end", "at_s": end_s})
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"worker-{rank}-0.0.jsonl").write_text(text)


@pytest.mark.parametrize("num_incidents", [0, 12])
def test_markdown_has_a_row_for_each_incident_and_rank(num_incidents):
    report = synthetic_report(num_incidents=num_incidents)
    text = markdown(report)
    assert text.count("\n## ") >= 2 + bool(num_incidents)
    incidents = text.partition("## Incidents")[2].partition("##")[0]
    assert max(0, incidents.count("\n|") - 2) == len(report.incidents)


def test_markdown_of_a_hostile_ledger_stays_in_its_cell():
    report = synthetic_report(num_incidents=3)
    report = replace(report, incidents=[replace(each, cause="a|b\n# <b>*x*`y`") for each in report.incidents])
    row = next(line for line in markdown(report).splitlines() if "\\|b" in line)
    assert "\\<b\\>\\*x\\*\\`y\\`" in row
    assert row.count("|") - row.count("\\|") == 11  # ten columns


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0042, "0.004 s"), (0.42, "0.42 s"), (59.94, "59.9 s"), (200.4, "3 min 20 s"), (7500.0, "2 h 5 min"),
     (400_000.0, "4.6 days"), (None, "unknown")],
)  # fmt: skip
def test_durations_are_for_people(seconds, text):
    assert duration(seconds) == text


def test_an_interval_without_an_end_has_no_estimate():
    assert interval(ConfidenceInterval(value=26.5, low=7.2, high=200.0)) == "26.5 s (7.2 s to 3 min 20 s)"
    assert interval(ConfidenceInterval(value=26.5, low=7.2, high=None)) == "more than 7.2 s, nothing has failed"
    assert interval(None) == "unknown"


def test_waits_that_nobody_has_measured_are_not_those_of_equal_ranks(tmp_path):
    write_ledgers(tmp_path / "unmeasured")
    unmeasured = run_report(tmp_path / "unmeasured")
    measured = run_report(SyntheticRun(2).steps(8).finish().write(tmp_path / "measured"))
    alone = run_report(SyntheticRun(1).steps(8).finish().write(tmp_path / "alone"))
    assert [each.are_waits_measured for each in (unmeasured, measured, alone)] == [False, True, True]
    assert "were not measured" in markdown(unmeasured)
    assert "were not measured" not in markdown(measured) + markdown(alone)
    assert "2 ranks on 1 host," in markdown(unmeasured)


def test_a_trace_has_a_span_for_each_span_and_an_instant_for_each_incident():
    report = synthetic_report(num_incidents=4)
    events = json.loads(perfetto_trace(report))["traceEvents"]
    spans = [each for each in events if each["ph"] == "X"]
    assert len(spans) == sum(len(rank.spans) for rank in report.ranks)
    assert sum(each["ph"] == "i" for each in events) == len(report.incidents)
    total_s = sum(each["dur"] for each in spans) / 1e6
    assert math.isclose(total_s, sum(rank.wall_s for rank in report.ranks), rel_tol=1e-3)
    assert all(each["ts"] >= 0 for each in spans)


@pytest.mark.parametrize("num_steps", [0, 40])
def test_a_picture_is_drawn(tmp_path, num_steps):
    pytest.importorskip("matplotlib")
    draw_report(synthetic_report(num_incidents=3 if num_steps else 0, num_steps=num_steps), tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_times_for_the_planner_are_those_of_the_run(tmp_path):
    from hyperpod_plugins.report.make_report import report_of

    write_ledgers(tmp_path / "run")
    found = stage_times(report_of(read_run(tmp_path / "run")))
    assert found == {"step_s": [pytest.approx(0.5)], "startup_s": [pytest.approx(2.0)] * 2}
    StageTimes.means_of(found)
    report = synthetic_report(num_incidents=9)
    found, trace = stage_times(report), failure_trace(report)
    failures = [each for each in report.incidents if each.kind == "failure"]
    assert len(trace["failures"]) == len(failures)
    assert trace["num_nodes"] == len(report.hosts)
    assert len(found["restore_s"]) == sum(each.level != "none" for each in failures)
    StageTimes.means_of(found)


def test_the_time_until_a_lost_node_is_back_is_a_time_of_repair(tmp_path):
    run = SyntheticRun(4).steps(3).kill(1, assemble_s=4.0).steps(3)
    run.kill(2, 3, detect_s=0.5, node_back_s=9.0, assemble_s=12.0, restore_s=2.0).steps(3).kill(2).steps(2)
    found = stage_times(run_report(run.finish().write(tmp_path / "lost")))
    assert found["repair_s"] == [9.0]
    assert found["assemble_s"] == [4.0, 3.0, 4.0]  # the wait for the node is not counted twice
    assert found["restore_s"] == [1.0, 2.0, 1.0]
    assert StageTimes.means_of(found).repair_s == 9.0


def test_only_nodes_that_join_a_running_job_have_been_repaired(tmp_path):
    """A process that is replaced on its node is no repair of one, and a job launched again none of all nodes."""
    killed = SyntheticRun(2).steps(3).kill(1).steps(3).restart(0, back_to=2).steps(2).finish()
    launched = SyntheticRun(2).steps(5).launch_again(back_to=3).steps(4).finish()
    for name, run in {"killed": killed, "launched": launched}.items():
        assert "repair_s" not in stage_times(run_report(run.write(tmp_path / name)))


def test_a_step_takes_as_long_as_on_the_ranks_that_were_there(tmp_path):
    fixed = run_report(SyntheticRun(2).steps(8).finish().write(tmp_path / "fixed"))
    grown = run_report(SyntheticRun(2).steps(4).grow().steps(4).finish().write(tmp_path / "grown"))
    assert step_time_s(grown) == pytest.approx(step_time_s(fixed), rel=0.02)


def test_the_command_writes_each_form(tmp_path, capsys):
    run = tmp_path / "run"
    write_ledgers(run)
    assert main(["report", str(run)]) == 0
    assert "<html" in (run / "report.html").read_text()
    assert "written to" in capsys.readouterr().out
    assert main(["report", str(run), "--format", "json", "-o", str(tmp_path / "report.json")]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["headline"]["steps_committed"] == 5
    shares = {each["category"]: each["seconds"] for each in report["categories"]}
    assert shares[TimeCategory.STEP] == pytest.approx(2 * 5 * 0.4)
    capsys.readouterr()
    for form in ("md", "perfetto", "stage-times", "trace"):
        assert main(["report", str(run), "--format", form]) == 0
        assert len(capsys.readouterr().out) > 20


def test_the_command_says_what_is_missing(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for folder, words in ((tmp_path / "none", "there is no folder"), (tmp_path / "empty", "no ledger of a worker")):
        assert main(["report", str(folder)]) == 2
        assert words in capsys.readouterr().err
    write_ledgers(tmp_path / "run")
    assert main(["report", str(tmp_path / "run"), "--output", "-"]) == 2
    assert "html is not printed" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "run"), "-o", str(tmp_path / "none" / "report.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="HYPERPOD_EVENTS"):
        read_run(tmp_path / "none")


def test_the_command_tells_the_verdict_and_can_end_with_it(tmp_path, capsys):
    failure = {"code": 1, "cause": "exit code 1 (ValueError: bad)"}
    runs = {
        "stop": SyntheticRun(2).steps(7).restart(1, back_to=4, **failure).steps(3).fail(1, **failure),
        "restart": SyntheticRun(2).steps(7).cut_off(),
        "continue": SyntheticRun(2).steps(7).finish(),
    }
    told = {"stop": "do not start it again", "restart": "start it again", "continue": "nothing to do"}
    for action, run in runs.items():
        folder = run.write(tmp_path / action)
        assert main(["report", str(folder)]) == 0
        assert f"\nverdict: {told[action]}" in capsys.readouterr().out
        for form in ("html", "md", "json"):
            assert main(["report", str(folder), "--check", "--format", form]) == (1 if action == "stop" else 0)
            assert capsys.readouterr().out
    assert (tmp_path / "stop" / "report.html").exists()


def test_spans_for_opentelemetry_form_one_trace():
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    report, exporter = synthetic_report(num_ranks=2, num_steps=20, num_incidents=2), InMemorySpanExporter()
    number = export_spans(report, exporter)
    spans = exporter.get_finished_spans()
    assert len(spans) == number == 1 + 2 + len(report.incidents) + sum(len(rank.spans) for rank in report.ranks)
    assert len({span.context.trace_id for span in spans}) == 1
    run = next(span for span in spans if span.name == "run")
    assert run.attributes["hyperpod.goodput"] == report.headline.goodput
    assert sum(span.parent is not None and span.parent.span_id == run.context.span_id for span in spans) == 2 + len(
        report.incidents
    )
    assert all(span.end_time >= span.start_time for span in spans)


def test_prometheus_scrapes_the_figures_of_this_process():
    pytest.importorskip("prometheus_client")
    ledger.open(None, {})
    try:
        ledger.enter(TimeCategory.STEP)
        ledger.enter(TimeCategory.OTHER)
        port, end = serve_prometheus(0, rank=3)
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                text = answer.read().decode()
        finally:
            end()
    finally:
        ledger.close()
    assert 'hyperpod_goodput{rank="3"}' in text
    assert 'hyperpod_seconds{category="step",rank="3"}' in text
