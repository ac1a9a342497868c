"""Runs every benchmark, one after the other, and ends with one table of all ratios: `make bench`.

Those in `benchmarks/gpu` run if they are named; `make gpu` does that.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from benchmarks import harness, report

HERE = Path(__file__).parent
DEADLINE_S = {
    "comm_overhead": 900,
    "throughput": 1800,
    "context": 1800,
    "hsdp_traffic": 900,
    "data_restart": 900,
    "recovery": 2700,
    "ettr": 1800,
    "membership_scale": 900,
    "resize": 900,
    "reproducible": 900,
    "memory": 1800,
    "load_pretrained": 1800,
    "planner": 900,
    "ledger": 300,
    "forecast": 1500,
    "checkpoint": 900,
    "gpu/offload": 10_800,
    "gpu/fp8": 1800,
    "gpu/chunks_and_tiles": 1800,
    "gpu/delayed_load": 1800,
    "gpu/memory_plan": 1800,
}
COLUMNS = ("benchmark", "comparison", "contender", "against", "time ratio", "95 % interval")


def run(name: str, arguments: list[str]) -> str:
    """Run one benchmark in its own process, its output shown as it comes; 'ok', or what went wrong."""
    process = subprocess.Popen([sys.executable, str(HERE / f"{name}.py"), *arguments])
    try:
        code = process.wait(DEADLINE_S[name])
    except subprocess.TimeoutExpired:
        return f"did not end within {DEADLINE_S[name]} s"
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
    return "ok" if code == 0 else f"failed with exit code {code}"


def summary_lines(document: dict[str, object]) -> list[list[str]]:
    """One line for every contender but the references, from a benchmark's JSON."""
    lines = []
    for comparison in document.get("comparisons", []):
        for run_of_contender in comparison["runs"]:
            if run_of_contender["name"] == comparison["reference"]:
                continue
            ratio = run_of_contender["summary"]["step_s_ratio"]
            interval = f"{ratio['low']:.3f} .. {ratio['high']:.3f}"
            names = [document["benchmark"], comparison["title"], run_of_contender["name"], comparison["reference"]]
            lines.append([*names, f"{ratio['median']:.3f}", interval])
    return lines


def main() -> int:
    harness.leave_cleanly_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="see that all work; the figures mean nothing")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"some of: {', '.join(DEADLINE_S)} (default: all but those in gpu/)"
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(DEADLINE_S):
        parser.error(f"unknown benchmark {', '.join(sorted(unknown))}; there are {', '.join(DEADLINE_S)}")
    there = [name for name in DEADLINE_S if (HERE / f"{name}.py").exists()]
    names = arguments.names or [name for name in there if not name.startswith("gpu/")]
    lines, outcomes = [], {}
    for index, name in enumerate(names):
        print(f"\n== {name} ({index + 1} of {len(names)})", flush=True)
        result = report.RESULTS / f"{name}.json"
        result.unlink(missing_ok=True)
        outcomes[name] = run(name, ["--quick"] if arguments.quick else [])
        if result.exists():
            lines += summary_lines(json.loads(result.read_text()))
    report.print_table("All ratios" + (" (quick: not to be quoted)" if arguments.quick else ""), COLUMNS, lines)
    for name, outcome in outcomes.items():
        print(f"{name}: {outcome}")
    return 0 if set(outcomes.values()) == {"ok"} else 1


if __name__ == "__main__":
    sys.exit(main())
