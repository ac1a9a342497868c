"""What `make gpu` writes of a run, and what it says where it cannot run: no GPU is needed for either."""

import importlib.metadata
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from benchmarks import gpu_status
from benchmarks.gpu_status import (
    BEGIN,
    BENCHMARKS,
    END,
    HERE,
    PAGE,
    REPOSITORY,
    Ended,
    Limit,
    Machine,
    Measured,
    Peak,
    Ratio,
    make_site,
    peaks_of,
    ratios_of,
    results_of,
    section,
    what_is_missing,
    with_section,
)
from benchmarks.run_all import DEADLINE_S

MACHINE = Machine(
    date="2026-11-23", devices=("NVIDIA H200",), torch="2.11.0+cu130", cuda="13.0", nccl="2.28.9", commit="abc1234"
)
REPORT = """<testsuites><testsuite>
<testcase classname="tests.gpu.test_one_device" name="test_groups" time="3.21" />
<testcase classname="tests.recovery.test_resize" name="test_grown" time="40.0"><failure message="AssertionError: 1|2
more">trace</failure></testcase>
<testcase classname="tests.gpu.test_one_device" name="test_fork" time="0.0"><skipped message="no | GPU" /></testcase>
</testsuite></testsuites>"""
TESTS = [
    Ended(name="gpu/test_one_device::test_groups", outcome="pass", seconds=3.21),
    Ended(name="recovery/test_resize::test_grown", outcome="FAIL", seconds=40.0, why="AssertionError: 1|2"),
    Ended(name="gpu/test_one_device::test_fork", outcome="skipped", seconds=0.0, why="no | GPU"),
]
RATIO = Ratio(
    benchmark="throughput", title="Llama", contender="hyperpod", against="FSDP2", median=1.0042, low=0.99, high=1.02
)


def test_a_report_of_pytest_is_read():
    found = results_of(REPORT)
    assert [each.why.partition(" more")[0] for each in found] == [each.why for each in TESTS]
    assert [(each.name, each.outcome, each.seconds) for each in found] == [
        (each.name, each.outcome, each.seconds) for each in TESTS
    ]


def test_ratios_of_a_benchmark_are_read():
    summary = {"step_s_ratio": {"median": 1.0042, "low": 0.99, "high": 1.02}}
    runs = [{"name": "FSDP2", "summary": {}}, {"name": "hyperpod", "summary": summary}]
    comparison = {"title": "Llama", "reference": "FSDP2", "runs": runs}
    assert ratios_of({"benchmark": "throughput", "comparisons": [comparison]}) == [RATIO]
    assert ratios_of({"benchmark": "other"}) == []


def test_peaks_of_the_benchmark_of_memory_are_read():
    plain = {"way": "plain", "tokens": 256, "peak_mib": 40.0, "step_s": 0.5}
    ours = {"way": "recompute", "tokens": 256, "peak_mib": 20.0, "step_s": 0.75}
    document = {"benchmark": "memory", "findings": {"samples": [plain, ours], "longest": None}, "comparisons": []}
    of_memory = {"benchmark": "memory", "against": "plain"}
    assert peaks_of(document) == [
        Peak(**of_memory, way="plain", tokens=256, peak_mib=40.0, memory=1.0, time=1.0),
        Peak(**of_memory, way="recompute", tokens=256, peak_mib=20.0, memory=0.5, time=1.5),
    ]
    document["findings"]["longest"] = longest = {**ours, "tokens": 2048}
    assert peaks_of(document)[-1] == Peak(
        **of_memory, way="recompute", tokens=2048, peak_mib=20.0, memory=0.5, time=1.5
    )
    assert ratios_of(document) == []
    findings = {"samples": [plain, ours, longest], "reference": "plain"}  # of each length; it may have stopped
    found = peaks_of({"benchmark": "gpu/offload", "findings": findings})
    assert [(each.memory, each.time) for each in found] == [(1.0, 1.0), (0.5, 1.5), (None, None)]
    assert peaks_of({"benchmark": "throughput", "findings": {"loss_difference": {}}}) == []


def test_the_table_says_where_and_how_each_test_ended():
    failed = {"resize": "failed with exit code 1"}
    assert section(MACHINE, TESTS, Measured(ratios=[RATIO], failures=failed)).splitlines() == [
        "Run on 2026-11-23 at commit `abc1234`: 1 x NVIDIA H200, torch 2.11.0+cu130, CUDA 13.0, nccl 2.28.9. 1 tests "
        "passed, 1 failed, 1 were skipped.",
        "",
        "| test | result | seconds | |",
        "|---|---|---|---|",
        "| `gpu/test_one_device::test_groups` | pass | 3.2 |  |",
        "| `recovery/test_resize::test_grown` | FAIL | 40.0 | AssertionError: 1\\|2 |",
        "| `gpu/test_one_device::test_fork` | skipped | 0.0 | no \\| GPU |",
        "",
        "| benchmark | contender | against | time ratio | 95 % interval |",
        "|---|---|---|---|---|",
        "| throughput: Llama | hyperpod | FSDP2 | 1.004 | 0.990 .. 1.020 |",
        "| resize | | | failed with exit code 1 | |",
    ]
    assert "benchmark" not in section(MACHINE, TESTS, Measured())
    measured = Measured()
    samples = [{"way": way, "tokens": 256, "peak_mib": 20.04, "step_s": 0.5} for way in ("recompute", "ours")]
    findings = {"samples": samples, "reference": "recompute", "left": {"none": "out of memory at 512 tokens"}}
    limit = {"what": "ours at 512 tokens", "measured": "1.0020 (1.0010 .. 1.0030)", "held": "met"}
    measured.add({"benchmark": "gpu/offload", "findings": {**findings, "limits": [limit]}})
    assert measured.limits == [Limit(benchmark="gpu/offload", **limit)]
    assert section(MACHINE, [], measured).splitlines()[5:] == [
        "| limit, for an H200 | measured | held |",
        "|---|---|---|",
        "| ours at 512 tokens | 1.0020 (1.0010 .. 1.0030) | met |",
        "",
        "| memory | tokens | peak, MiB | against | peak ratio | time ratio |",
        "|---|---|---|---|---|---|",
        "| gpu/offload: recompute | 256 | 20.0 | recompute | 1.00 | 1.00 |",
        "| gpu/offload: ours | 256 | 20.0 | recompute | 1.00 | 1.00 |",
        "",
        "| did not run, or stopped | why |",
        "|---|---|",
        "| gpu/offload: none | out of memory at 512 tokens |",
    ]


def test_only_what_stands_between_the_markers_is_replaced():
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    written = with_section(page, "new")
    assert written == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    assert with_section(written, "new") == written
    with_section(PAGE.read_text(), "new")  # it has them


@pytest.mark.parametrize("page", ["", BEGIN, f"{END} {BEGIN}", f"{BEGIN} {END} {BEGIN} {END}"])
def test_a_page_without_its_markers_is_refused(page):
    with pytest.raises(ValueError, match="once each"):
        with_section(page, "new")


@pytest.mark.parametrize(
    ("modules", "cuda", "num_devices", "why"),
    [
        ({"torch": True, "pytest": False, "lightning": False}, "13.0", 1, "lacks pytest, lightning"),
        ({"torch": True}, None, 0, "built without CUDA"),
        ({"torch": True}, "13.0", 0, "finds no usable GPU"),
        ({"torch": True}, "13.0", 1, None),
    ],
)
def test_what_is_missing_is_said_in_one_line(modules, cuda, num_devices, why):
    said = what_is_missing(modules, cuda, num_devices)
    assert (said is None) if why is None else (why in said and "\n" not in said)


def test_all_benchmarks_exist():
    assert set(BENCHMARKS) <= set(DEADLINE_S)


def test_the_benchmarks_are_those_that_compute_on_a_gpu():
    """A benchmark that asks torch whether there is CUDA computes there, and so do those of the folder."""
    asks = {path.stem for path in HERE.glob("*.py") if "torch.cuda.is_available()" in path.read_text()}
    of_folder = {f"gpu/{path.stem}" for path in HERE.glob("gpu/*.py") if "def main(" in path.read_text()}
    assert asks | of_folder == set(BENCHMARKS)


def test_what_benchmarks_have_measured_is_collected(monkeypatch, tmp_path):
    """Each is run in turn, and one that fails takes nothing from the others."""
    results = {"throughput": {"benchmark": "throughput", "comparisons": []}}
    plain = {"way": "plain", "tokens": 256, "peak_mib": 40.0, "step_s": 0.5}
    results["memory"] = {"benchmark": "memory", "findings": {"samples": [plain], "longest": None}}
    (tmp_path / "results" / "gpu").mkdir(parents=True)

    def run(command, **_):
        name = command[-1]
        assert command[1:] == ["-m", "benchmarks.run_all", "--quick", name]
        if name == "memory":
            (tmp_path / "results" / f"{name}.json").write_text(json.dumps(results[name]))
        return SimpleNamespace(returncode=0 if name == "memory" else 3)

    monkeypatch.setattr(gpu_status, "HERE", tmp_path)
    monkeypatch.setattr(gpu_status.subprocess, "run", run)
    measured = gpu_status.run_benchmarks(tmp_path, ["--quick"])
    others = [name for name in BENCHMARKS if name != "memory"]
    assert measured.failures == dict.fromkeys(others, "failed with exit code 3")
    assert (measured.ratios, [each.way for each in measured.peaks]) == ([], ["plain"])


def test_entry_points_are_found_without_an_installation(tmp_path):
    make_site(tmp_path)
    [found] = importlib.metadata.distributions(name="hyperpod_plugins", path=[str(tmp_path)])
    names = {(each.group, each.name): each.value for each in found.entry_points}
    assert names["torch.backends", "hyperpod"] == "hyperpod_plugins._autoload:autoload"
    assert names["console_scripts", "hyperpodrun"] == "hyperpod_plugins.elastic.launcher.main:main"


@pytest.mark.slow_single
def test_without_a_gpu_the_command_ends_with_one_line():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_status"],
        cwd=REPOSITORY,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith("make gpu: ")
