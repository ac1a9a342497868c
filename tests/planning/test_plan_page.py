"""The page of a plan: a bar and a row for each policy, without script and without network."""

import html
import re

import pytest

from hyperpod_plugins.cli import main
from hyperpod_plugins.planning.failures import NO_LEMONS, ExponentialFailures
from hyperpod_plugins.planning.plan import make_plan
from hyperpod_plugins.planning.plan_page import plan_page, write_plan_page
from hyperpod_plugins.planning.scenario import Scenario

DAY_S = 86400.0


def planned(failures_per_node_hour, **changes):
    scenario = Scenario(
        num_nodes=16, failures_per_node_hour=failures_per_node_hour, work_s=10 * DAY_S, num_replicas=4, **changes
    )
    return make_plan(scenario, failures=ExponentialFailures(), lemons=NO_LEMONS, num_runs=20, seed=0)


def test_each_policy_has_a_bar_as_long_as_its_time_beyond_the_work():
    plan = planned(1e-3, price_per_accelerator_hour=2.0)
    page = plan_page(plan)
    chart = page.partition("<svg")[2].partition("</svg>")[0]
    widths = dict.fromkeys((each.policy.name for each in plan.policies), 0.0)
    for row, name in zip(chart.split('<text x="0"')[1:], widths, strict=True):
        widths[name] = sum(float(width) for width in re.findall(r'<rect [^>]*width="([\d.]+)"', row))
    beyond = {each.policy.name: each.runs.time_ratio.mean - 1 for each in plan.policies}
    longest = max(beyond, key=beyond.get)
    for name, width in widths.items():
        assert width / widths[longest] == pytest.approx(beyond[name] / beyond[longest], abs=0.01), name
    for row in plan.table():
        assert all(html.escape(cell) in page for cell in row)
    assert all(html.escape(note) in page for note in plan.notes())


def test_a_page_needs_no_script_and_nothing_from_outside():
    page = plan_page(planned(1e-3))
    assert "<script" not in page
    assert not re.search(r"(src|href)\s*=|url\(|@import", page)
    assert "default-src 'none'" in page


def test_policies_that_do_not_end_are_told():
    page = plan_page(planned(2.0))
    assert "does not end" in page
    assert not re.search(r"\b(nan|inf)\b", page)


def test_remarks_are_text(tmp_path, capsys):
    arguments = ["plan", "--nodes", "8", "--days", "2", "--failures-per-node-day", "0.01", "--runs", "10"]
    assert main([*arguments, "--page", str(tmp_path / "plan.html")]) == 0
    assert "checkpoint restart" in capsys.readouterr().out
    assert "Plan of a job" in (tmp_path / "plan.html").read_text()
    assert main([*arguments, "--page", str(tmp_path / "none" / "plan.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_page_that_cannot_be_written_leaves_nothing_behind(tmp_path):
    (tmp_path / "plan.html").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_plan_page(planned(1e-3), tmp_path / "plan.html")
    assert [each.name for each in tmp_path.iterdir()] == ["plan.html"]
