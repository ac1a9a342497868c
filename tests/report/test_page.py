import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from report.synthetic_report import BEGAN_AT_S, synthetic_report

from hyperpod_plugins.ledger import TimeCategory
from hyperpod_plugins.report.page import embedded_json, page_html, write_page
from hyperpod_plugins.report.page_data import (
    MAX_INCIDENTS,
    MAX_POINTS,
    MAX_SPANS,
    MAX_TEXT,
    NO_PROCESS,
    TICKS,
    PageSpan,
    clipped,
    joined,
    page_data,
    step_columns,
    timeline_rows,
)
from hyperpod_plugins.report.run_report import RankTimeline, StepSeries

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>{{code}} & \u2028\u2029 \ud800"


def data_of(page: str):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


def timeline(spans, rank=0):
    return RankTimeline(rank=rank, wall_s=1.0, seconds={}, processes=(), spans=spans, waited_s=0.0)


def hostile_report():
    report = synthetic_report(num_incidents=2, run_id=HOSTILE, problems=[HOSTILE], hosts=[HOSTILE])
    incidents = [replace(one, cause=HOSTILE, host=HOSTILE, kind=HOSTILE, level=HOSTILE) for one in report.incidents]
    ranks = [replace(one, spans=[*one.spans, (BEGAN_AT_S, 9.0, HOSTILE)]) for one in report.ranks]
    return replace(report, incidents=incidents, ranks=ranks)


def test_a_text_of_a_ledger_is_no_markup():
    report = hostile_report()
    page = page_html(report)
    plain = page_html(synthetic_report(num_incidents=2))
    for tag in ("<script", "</script", "<img", "alert(1)</"):
        assert page.count(tag) == plain.count(tag)
    assert data_of(page)["incidents"][0]["cause"] == HOSTILE
    assert data_of(page)["run_id"] == HOSTILE
    assert page.encode()  # a lone surrogate does not stand in the way


@pytest.mark.parametrize("character", ["<", ">", "&", "\u2028", "\u2029"])
def test_embedded_json_escapes(character):
    text = embedded_json({"cause": character})
    assert character not in text
    assert json.loads(text) == {"cause": character}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_becomes_null(value):
    report = synthetic_report(num_incidents=1, num_steps=5)
    steps = replace(report.steps, loss=[value] * 5, duration_s=[value] * 5)
    headline = replace(
        report.headline, goodput=value, wall_s=value, mtbf_s=replace(report.headline.mtbf_s, value=value)
    )
    incidents = [replace(one, at_s=value, total_s=value) for one in report.incidents]
    spans = [(value, 1.0, "step"), (BEGAN_AT_S, value, "step"), *report.ranks[0].spans]
    ranks = [replace(report.ranks[0], spans=spans, waited_s=value)]
    odd = replace(report, steps=steps, headline=headline, incidents=incidents, ranks=ranks, ended_at_s=value)
    data = data_of(page_html(odd))
    assert data["headline"]["goodput"] is None
    assert data["headline"]["mtbf_s"]["value"] is None
    assert data["steps"]["loss"] == [None] * 5
    assert data["incidents"][0]["at_ms"] is None
    assert data["ranks"][0]["waited_s"] is None
    assert data["wall_s"] > 0


def test_the_page_can_request_nothing():
    page = page_html(synthetic_report(num_incidents=3))
    markup = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    sources = re.findall(r"""(?:src|href|action|data|srcset)\s*=\s*["']?([^"'\s>]*)""", markup)
    assert sources == ["data:,"]
    style = re.search(r"<style>(.*?)</style>", page, re.DOTALL)[1]
    assert "url(" not in style
    assert "@import" not in style
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    assert policy.startswith("default-src 'none'")
    assert "unsafe-inline" not in re.search("script-src[^;]*", policy)[0]
    for call in ("fetch(", "XMLHttpRequest", "WebSocket", "importScripts", "sendBeacon", "import(", ".innerHTML"):
        assert call not in page


def test_no_asset_ends_its_element():
    assets = Path(__file__).parents[2] / "hyperpod_plugins" / "report" / "page_assets"
    for path in assets.iterdir():
        if path.suffix in (".js", ".css"):
            assert "</s" not in path.read_text(encoding="utf-8"), path
    assert "Leon Sorokin" in page_html(synthetic_report())  # the licence of uPlot comes with the page


def test_a_large_run_is_a_small_file():
    report = synthetic_report(num_ranks=64, num_steps=10_000, num_incidents=100)
    page = page_html(report)
    assert len(page.encode()) < 2_000_000
    data = data_of(page)
    assert len(data["incidents"]) == 100
    assert len(data["rows"]) == 64
    assert 1_500 < len(data["steps"]["step"]) <= MAX_POINTS


def test_the_most_spans_that_there_can_be_still_make_a_small_file():
    width_s = 1.001
    spans = [(BEGAN_AT_S + n * width_s, width_s, ("step", "redone")[n % 2]) for n in range(3_990)]
    report = synthetic_report(num_ranks=1, num_incidents=0, num_steps=5)
    ranks = [timeline(spans, rank) for rank in range(64)]
    page = page_html(replace(report, ranks=ranks, num_ranks=64, ended_at_s=BEGAN_AT_S + 3_990 * width_s))
    assert len(page.encode()) < 2_000_000
    assert sum(len(row) // 2 for row in data_of(page)["rows"]) <= MAX_SPANS


@pytest.mark.parametrize(
    "changes",
    [
        {"num_incidents": 0},
        {"num_incidents": 0, "num_steps": 0},
        {"num_incidents": 12, "num_restarts": 3},
        {"is_complete": False, "problems": ["one file ends in the middle of a line"]},
        {"ranks": (), "hosts": (), "categories": (), "num_incidents": 0, "steps": StepSeries()},
    ],
)
def test_any_run_makes_a_page(changes):
    report = synthetic_report(**changes)
    data = data_of(page_html(report))
    assert data["num_incidents"] == len(report.incidents)
    assert data["is_complete"] == report.is_complete
    assert data["problems"] == list(report.problems)


def test_the_costliest_of_too_many_incidents_are_kept():
    report = synthetic_report(num_incidents=1)
    [incident] = report.incidents
    many = [replace(incident, at_s=BEGAN_AT_S + n, total_s=float(n % 1500)) for n in range(1500)]
    data = page_data(replace(report, incidents=many))
    assert data["num_incidents"] == 1500
    assert [one["number"] for one in data["incidents"]] == list(range(1500 - MAX_INCIDENTS + 1, 1501))


def test_texts_are_cut():
    report = synthetic_report(num_incidents=1)
    incident = replace(report.incidents[0], cause="x" * 100_000)
    assert len(page_data(replace(report, incidents=[incident]))["incidents"][0]["cause"]) == MAX_TEXT


def test_downsampled_steps_keep_peaks_and_are_measured_ones():
    n = 10_000
    duration_s = [0.4] * n
    duration_s[4321] = 9.0
    loss = [float(k) for k in range(n)]
    loss[77] = -5.0
    loss[5555] = math.nan
    steps = StepSeries(
        step=range(n),
        at_s=[BEGAN_AT_S + k for k in range(n)],
        duration_s=duration_s,
        loss=loss,
        world_size=[8] * n,
        global_batch=[None] * n,
        samples=range(n),
        goodput=[0.9] * n,
    )
    columns = step_columns(steps, BEGAN_AT_S)
    assert len(columns["step"]) <= MAX_POINTS
    assert {len(column) for column in columns.values()} == {len(columns["step"])}
    assert columns["step"] == sorted(set(columns["step"]))
    assert max(columns["duration_s"]) == 9.0
    assert min(value for value in columns["loss"] if value is not None) == -5.0
    assert columns["step"][0] == 0
    assert columns["at_ms"][columns["step"].index(4321)] == 4_321_000


def test_few_steps_are_all_kept_in_order_of_time():
    steps = StepSeries(
        step=[2, 1],
        at_s=[BEGAN_AT_S + 2, BEGAN_AT_S + 1],
        duration_s=[0.123456, 1.0],
        loss=[None, 2.0],
        world_size=[8, 8],
        global_batch=[None, 16],
        samples=[None, 16],
        goodput=[0.5, 1.0],
    )
    assert step_columns(steps, BEGAN_AT_S) == {
        "at_ms": [1000, 2000],
        "step": [1, 2],
        "duration_s": [1, 0.1235],
        "loss": [2, None],
        "world_size": [8, 8],
        "global_batch": [16, None],
        "samples": [16, None],
        "goodput": [1, 0.5],
    }


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], []),
        ([(0.0, 4.0, "step")], [PageSpan(0.0, 4.0, "step")]),
        ([(2.0, 2.0, "step")], [PageSpan(0.0, 2.0, NO_PROCESS), PageSpan(2.0, 4.0, "step")]),
        (
            [(2.0, 9.0, "b"), (0.0, 3.0, "a")],
            [PageSpan(0.0, 3.0, "a"), PageSpan(3.0, 10.0, "b")],
        ),  # unsorted, overlap, too long
        (
            [(-5.0, 6.0, "a"), (1.0, -1.0, "b"), (50.0, 1.0, "c")],
            [PageSpan(0.0, 1.0, "a"), PageSpan(1.0, 10.0, NO_PROCESS)],
        ),
    ],
)
def test_spans_are_put_in_order_and_clipped(spans, expected):
    assert list(clipped([(100.0 + at_s, length, key) for at_s, length, key in spans], 100.0, 10.0)) == expected


def test_narrow_spans_are_joined_by_majority():
    spans = [PageSpan(n / 10, n / 10 + 0.09, "step") for n in range(40)]
    spans = [two for one in spans for two in (one, PageSpan(one.end_s, one.start_s + 0.1, "data_wait"))]
    assert joined(spans, 1.0, frozenset()) == [PageSpan(0.0, 4.0, "step")]


def test_short_recoveries_stay():
    spans = [
        PageSpan(0.0, 5.0, "step"),
        PageSpan(5.0, 5.01, "restore"),
        PageSpan(5.01, 5.02, "step"),
        PageSpan(5.02, 9.0, "other"),
    ]
    assert joined(spans, 1.0, frozenset({TimeCategory.RESTORE})) == spans
    assert [span.category for span in joined(spans, 1.0, frozenset())] == ["step", "other"]


def test_rows_add_up_to_the_run():
    report = synthetic_report(num_ranks=8, num_steps=3_000, num_incidents=20)
    keys = ["", *TimeCategory]
    wall_s = report.ended_at_s - report.began_at_s
    rows = timeline_rows(report.ranks, keys, BEGAN_AT_S, wall_s)
    for row, rank in zip(rows, report.ranks, strict=True):
        assert sum(row[1::2]) == TICKS
        shown = sum(row[n + 1] for n in range(0, len(row), 2) if keys[row[n]] == TimeCategory.RESTORE)
        assert shown / TICKS * wall_s == pytest.approx(rank.seconds["restore"], abs=wall_s / TICKS * 20)


def test_a_page_replaces_the_file_as_a_whole(tmp_path):
    path = tmp_path / "report.html"
    path.write_text("old")
    write_page(synthetic_report(), path)
    assert path.read_text(encoding="utf-8") == page_html(synthetic_report())
    assert [one.name for one in tmp_path.iterdir()] == ["report.html"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_page_that_cannot_be_written_leaves_nothing_behind(tmp_path):
    (tmp_path / "report.html").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_page(synthetic_report(), tmp_path / "report.html")
    assert [one.name for one in tmp_path.iterdir()] == ["report.html"]
