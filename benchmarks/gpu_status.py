"""Runs on a machine with a GPU what is for one, and writes the table of docs/gpu-status.md: `make gpu`.

    python -m benchmarks.gpu_status [--quick] [--no-benchmarks]

The Python that runs this must have torch with CUDA, Lightning and pytest. Nothing is installed: the entry points that
an installation would have are written to `.gpu-site`, which is on the path of what is started here.
"""

import argparse
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

HERE = Path(__file__).parent
REPOSITORY = HERE.parent
PAGE = REPOSITORY / "docs" / "gpu-status.md"
SITE = REPOSITORY / ".gpu-site"
BEGIN, END = "<!-- make gpu: begin -->", "<!-- make gpu: end -->"
NEEDED = ("torch", "lightning", "pytest", "pytest_timeout", "hypothesis", "cloudpickle", "torchmetrics", "numpy")
TESTS_S = 1800
BENCHMARKS = (
    "throughput",
    "memory",
    "gpu/offload",
    "gpu/fp8",
    "gpu/chunks_and_tiles",
    "gpu/delayed_load",
    "gpu/memory_plan",
)
"""Those that compute on GPUs where there are any, also on a single one; the others start ranks on the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where the figures come from."""

    date: str
    devices: tuple[str, ...]
    torch: str
    cuda: str
    nccl: str
    commit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How one test ended."""

    name: str
    outcome: str
    """`pass`, `FAIL`, or `skipped`."""
    seconds: float
    why: str = ""
    """The first line of a failure, or why it was skipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """How one contender of a benchmark compares with the reference."""

    benchmark: str
    title: str
    contender: str
    against: str
    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Peak memory of one way to train, or to load a model, and its time, both compared with a reference."""

    benchmark: str
    way: str
    tokens: int
    """Of a step; 0 where there is none."""
    peak_mib: float
    against: str
    memory: float | None
    """Ratio to the reference; None where that did not run."""
    time: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A limit that a benchmark has checked."""

    benchmark: str
    what: str
    measured: str
    held: str
    """`met`, `missed`, or why neither can be said."""


@dataclass(slots=True, kw_only=True)
class Measured:
    """What benchmarks have found."""

    ratios: list[Ratio] = field(default_factory=list)
    peaks: list[Peak] = field(default_factory=list)
    limits: list[Limit] = field(default_factory=list)
    left: list[tuple[str, str, str]] = field(default_factory=list)
    """Benchmark and contender that did not run, or stopped, and why."""
    failures: dict[str, str] = field(default_factory=dict)
    """What became of each benchmark that failed."""

    def add(self, document: Mapping[str, Any]) -> None:
        """Read a benchmark's JSON."""
        name, found = document["benchmark"], document.get("findings", {})
        self.ratios += ratios_of(document)
        self.peaks += peaks_of(document)
        self.limits += [Limit(benchmark=name, **each) for each in found.get("limits", ())]
        self.left += [(name, contender, why) for contender, why in found.get("left", {}).items()]


def what_is_missing(modules: Mapping[str, bool], cuda: str | None, num_devices: int) -> str | None:
    """One line that says why the tests for a GPU cannot run here; None where they can.

    Args:
        modules: whether each module that is needed can be imported.
        cuda: version of CUDA that torch was built with; None without it.
        num_devices: GPUs that torch finds.
    """
    if absent := [name for name, is_there in modules.items() if not is_there]:
        return f"{sys.executable} lacks {', '.join(absent)}. Choose another one: make gpu GPU_PYTHON=/path/to/python"
    if cuda is None:
        return f"the torch of {sys.executable} was built without CUDA. Choose another one: make gpu GPU_PYTHON=..."
    if num_devices == 0:
        return f"torch (CUDA {cuda}) finds no usable GPU here: this target is for a machine that has one"
    return None


def results_of(report: str) -> list[Ended]:
    """The tests in a JUnit report of pytest."""
    found = []
    for case in ElementTree.fromstring(report).iter("testcase"):
        name = f"{case.get('classname', '').removeprefix('tests.').replace('.', '/')}::{case.get('name')}"
        outcome, why = "pass", ""
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                outcome = "skipped" if child.tag == "skipped" else "FAIL"
                why = (child.get("message") or "").strip().partition("\n")[0]
        found.append(Ended(name=name, outcome=outcome, seconds=float(case.get("time", 0.0)), why=why))
    return found


def ratios_of(document: Mapping[str, Any]) -> list[Ratio]:
    """Every contender but the references of a benchmark's JSON."""
    return [
        Ratio(
            benchmark=document["benchmark"],
            title=comparison["title"],
            contender=run["name"],
            against=comparison["reference"],
            **{name: run["summary"]["step_s_ratio"][name] for name in ("median", "low", "high")},
        )
        for comparison in document.get("comparisons", [])
        for run in comparison["runs"]
        if run["name"] != comparison["reference"]
    ]


def peaks_of(document: Mapping[str, Any]) -> list[Peak]:
    """Every sample of a benchmark that measures memory, against the reference with as many tokens.

    Without a named reference the first sample is that of all, as for the benchmark `memory`, whose last sample may be a
    longer step.
    """
    found = document.get("findings", {})
    samples = [*found.get("samples", ()), *filter(None, [found.get("longest")])]
    name = found.get("reference")
    peaks = []
    for sample in samples:
        same = [each for each in samples if each["way"] == name and each["tokens"] == sample["tokens"]]
        reference = samples[0] if name is None else next(iter(same), None)
        peaks.append(
            Peak(
                benchmark=document["benchmark"],
                way=sample["way"],
                tokens=sample["tokens"],
                peak_mib=sample["peak_mib"],
                against=samples[0]["way"] if name is None else name,
                memory=_ratio(sample, reference, "peak_mib"),
                time=_ratio(sample, reference, "step_s"),
            )
        )
    return peaks


def _ratio(sample: Mapping[str, float], reference: Mapping[str, float] | None, name: str) -> float | None:
    return sample[name] / reference[name] if reference and reference[name] else None


def section(machine: Machine, tests: Sequence[Ended], measured: Measured) -> str:
    """What stands between the markers of the page.

    Args:
        machine: where it was run.
        tests: in the order in which they ran.
        measured: by the benchmarks.
    """
    count = {outcome: sum(test.outcome == outcome for test in tests) for outcome in ("pass", "FAIL", "skipped")}
    lines = [
        f"Run on {machine.date} at commit `{machine.commit}`: {len(machine.devices)} x {machine.devices[0]}, torch "
        f"{machine.torch}, CUDA {machine.cuda}, nccl {machine.nccl}. {count['pass']} tests passed, {count['FAIL']} "
        f"failed, {count['skipped']} were skipped.",
        "",
        "| test | result | seconds | |",
        "|---|---|---|---|",
        *(f"| `{test.name}` | {test.outcome} | {test.seconds:.1f} | {_cell(test.why)} |" for test in tests),
    ]
    if measured.ratios or measured.failures:
        lines += ["", "| benchmark | contender | against | time ratio | 95 % interval |", "|---|---|---|---|---|"]
        lines += [
            f"| {each.benchmark}: {_cell(each.title)} | {each.contender} | {each.against} | {each.median:.3f} | "
            f"{each.low:.3f} .. {each.high:.3f} |"
            for each in measured.ratios
        ]
        lines += [f"| {name} | | | {_cell(why)} | |" for name, why in sorted(measured.failures.items())]
    if measured.limits:
        lines += ["", "| limit, for an H200 | measured | held |", "|---|---|---|"]
        lines += [f"| {_cell(each.what)} | {each.measured} | {_cell(each.held)} |" for each in measured.limits]
    if measured.peaks:
        lines += [
            "",
            "| memory | tokens | peak, MiB | against | peak ratio | time ratio |",
            "|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {each.benchmark}: {_cell(each.way)} | {each.tokens or ''} | {each.peak_mib:.1f} | {each.against} | "
            f"{_two_digits(each.memory)} | {_two_digits(each.time)} |"
            for each in measured.peaks
        ]
    if measured.left:
        lines += ["", "| did not run, or stopped | why |", "|---|---|"]
        lines += [f"| {benchmark}: {_cell(contender)} | {_cell(why)} |" for benchmark, contender, why in measured.left]
    return "\n".join(lines)


def _two_digits(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")[:160]


def with_section(page: str, written: str) -> str:
    """The page with another text between its markers.

    Raises:
        ValueError: the page has not both markers, once each and in order.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in after or END in after:
        raise ValueError(f"the page must have {BEGIN} and {END} once each, in this order")
    return f"{before}{BEGIN}\n{written}\n{END}{after}"


def entry_points(project: Mapping[str, Any]) -> str:
    """The file `entry_points.txt` of an installation, from the table `project` of pyproject.toml."""
    groups = {"console_scripts": project.get("scripts", {}), **project.get("entry-points", {})}
    return "\n".join(
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in groups.items()
    )


def make_site(site: Path) -> None:
    """Write what an installation would tell of this package: its name and its entry points."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    info = site / "hyperpod_plugins-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hyperpod_plugins\nVersion: 0\n")
    (info / "entry_points.txt").write_text(entry_points(project))


def environ(site: Path) -> dict[str, str]:
    """Of what is started here."""
    path = [str(site), str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "HYPERPOD_TEST_DEVICE": "cuda",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # matrix products give the same bits in each run
    }


def run_tests(site: Path) -> list[Ended]:
    """All tests that are marked for a GPU, their output shown as it comes."""
    report = site / "tests.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-W", "default", "-p", "no:cacheprovider"]
    command.append(f"--junitxml={report}")
    try:
        code = subprocess.run(command, cwd=REPOSITORY, env=environ(site), timeout=TESTS_S, check=False).returncode
    except subprocess.TimeoutExpired:
        return [Ended(name="all tests", outcome="FAIL", seconds=TESTS_S, why="they did not end in time")]
    if not report.exists():
        return [Ended(name="all tests", outcome="FAIL", seconds=0.0, why=f"pytest ended with exit code {code}")]
    return results_of(report.read_text())


def run_benchmarks(site: Path, options: Sequence[str]) -> Measured:
    """Every benchmark in turn."""
    measured = Measured()
    for name in BENCHMARKS:
        result = HERE / "results" / f"{name}.json"
        before_ns = result.stat().st_mtime_ns if result.exists() else None
        command = [sys.executable, "-m", "benchmarks.run_all", *options, name]
        code = subprocess.run(command, cwd=REPOSITORY, env=environ(site), check=False).returncode
        if code == 0 and result.exists() and result.stat().st_mtime_ns != before_ns:  # not that of an earlier run
            measured.add(json.loads(result.read_text()))
        else:
            measured.failures[name] = f"failed with exit code {code}"
    return measured


def this_machine() -> Machine:
    """Read once, where CUDA is there."""
    import torch

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    return Machine(
        date=datetime.now(UTC).date().isoformat(),
        devices=tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())),
        torch=torch.__version__,
        cuda=str(torch.version.cuda),
        nccl=".".join(map(str, torch.cuda.nccl.version())),
        commit=commit.stdout.strip() or "unknown",
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="short benchmarks, to see that all work")
    parser.add_argument("--no-benchmarks", action="store_true", help="the tests alone")
    arguments = parser.parse_args()
    modules = {name: find_spec(name) is not None for name in NEEDED}
    cuda, num_devices = None, 0
    if modules["torch"]:
        import torch

        cuda, num_devices = torch.version.cuda, torch.cuda.device_count()
    if why := what_is_missing(modules, cuda, num_devices):
        print(f"make gpu: {why}", file=sys.stderr)
        return 2
    make_site(SITE)
    tests = run_tests(SITE)
    options = ["--quick"] if arguments.quick else []
    measured = Measured() if arguments.no_benchmarks else run_benchmarks(SITE, options)
    written = section(this_machine(), tests, measured)
    PAGE.write_text(with_section(PAGE.read_text(), written))
    print(f"{written}\n\nwritten to {PAGE}")
    return int(bool(measured.failures) or not tests or any(test.outcome == "FAIL" for test in tests))


if __name__ == "__main__":
    sys.exit(main())
