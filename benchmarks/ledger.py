"""What the ledger costs: the calls that a step makes, with a ledger and without, in turns; and what it writes.

    python benchmarks/ledger.py

Goal: at most 0.1 % of a step of 100 ms, which is 100 us, and 4 KB a rank and step. A whole job varies by much more than
that, so here only the calls are timed: the ones of a Trainer's step with a loss and samples, between products of
matrices which take the caches from them. What its writing thread uses is counted as processor time. The share of a step
has a 95 % interval, of blocks with and without a ledger in turns, in several processes: see `stats.paired_ratio`.
"""

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.stats import paired_ratio
from hyperpod_plugins.ledger import Ledger, TimeCategory

STEP_S, GOAL_SHARE, GOAL_BYTES = 0.1, 0.001, 4096
COLUMNS = ("ledger", "calls of a step", "median of blocks", "5 - 95 %", "of a step of 100 ms")


def book_step(ledger: Ledger, number: int, loss: torch.Tensor) -> None:
    """The calls of one step."""
    ledger.enter(TimeCategory.DATA_WAIT)
    ledger.enter(TimeCategory.OTHER)
    with ledger.phase(TimeCategory.SNAPSHOT):
        pass
    ledger.enter(TimeCategory.STEP)
    ledger.note_loss(loss)
    ledger.note(samples=64)
    ledger.commit(number)


def block_s(ledger: Ledger, first: int, num_steps: int, matrix: torch.Tensor) -> float:
    """Seconds of the calls of one step, averaged over a block."""
    total_s, loss = 0.0, torch.tensor(2.5)
    for number in range(first, first + num_steps):
        matrix @ matrix
        begun_s = time.perf_counter()
        book_step(ledger, number, loss)
        total_s += time.perf_counter() - begun_s
    return total_s / num_steps


def turns(num_blocks: int, num_steps: int) -> dict[str, Any]:
    """Time blocks of steps with a ledger and without, in turns; runs in a process of its own.

    Returns:
        Seconds of the calls of a step, one number a block, as `on` and `off`; `thread_s`, the processor time of the
        writing thread, and `num_bytes`, what it has written, both for each step.
    """
    torch.set_num_threads(1)
    matrix = torch.randn(384, 384)
    samples: dict[str, list[float]] = {"off": [], "on": []}
    with tempfile.TemporaryDirectory() as folder:
        path, ledgers = Path(folder, "worker-0-0.0.jsonl"), {"off": Ledger(), "on": Ledger()}
        ledgers["on"].open(path, {"run_id": "benchmark", "worker_id": 0})
        block_s(ledgers["on"], 0, num_steps, matrix)
        cpu_s, own_s = time.process_time(), time.thread_time()
        for block in range(num_blocks):
            for name in ("off", "on") if block % 2 else ("on", "off"):
                samples[name].append(block_s(ledgers[name], (block + 1) * num_steps, num_steps, matrix))
        thread_s = (time.process_time() - cpu_s) - (time.thread_time() - own_s)
        ledgers["on"].close()
        num_bytes = path.stat().st_size / ((num_blocks + 1) * num_steps)
    return samples | {"thread_s": max(0.0, thread_s) / (num_blocks * num_steps), "num_bytes": num_bytes}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--starts", type=int, default=4, help="processes, one after another")
    parser.add_argument("--blocks", type=int, default=40, help="of each kind, of a process")
    parser.add_argument("--steps", type=int, default=50, help="of a block")
    parser.add_argument("--quick", action="store_true", help="see that it works; the figures mean nothing")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args(arguments)
    num_starts, num_blocks, num_steps = (2, 3, 5) if args.quick else (args.starts, args.blocks, args.steps)
    found: list[dict[str, Any]] = []
    for _ in range(num_starts):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
            found.append(process.submit(turns, num_blocks, num_steps).result())
    samples = {name: [each for start in found for each in start[name]] for name in ("off", "on")}
    lines = []
    for name, seconds in samples.items():
        low, high = statistics.quantiles(seconds, n=20)[0], statistics.quantiles(seconds, n=20)[-1]
        middle = statistics.median(seconds)
        shown = f"{low * 1e6:.1f} - {high * 1e6:.1f} us"
        lines.append([name, "10", f"{middle * 1e6:.1f} us", shown, f"{middle / STEP_S:.4%}"])
    title = f"The ledger's calls in a step, {num_starts} starts of {num_blocks} blocks of {num_steps} steps"
    report.print_table(title, COLUMNS, lines)
    num_bytes = max(start["num_bytes"] for start in found)
    thread_us = statistics.mean(start["thread_s"] for start in found) * 1e6
    print(f"the writing thread: {thread_us:.1f} us of processor time a step; the file: {num_bytes:.0f} bytes a step")
    steps = [STEP_S + seconds + start["thread_s"] for start in found for seconds in start["on"]]
    ratio = paired_ratio(steps, [STEP_S + each for each in samples["off"]], [num_blocks] * num_starts)
    share, low, high = ratio.median - 1, ratio.low - 1, ratio.high - 1
    is_met = high <= GOAL_SHARE and num_bytes <= GOAL_BYTES
    print(
        f"together {share:.4%} ({low:.4%} .. {high:.4%}) of a step of 100 ms, goal {GOAL_SHARE:.1%}: "
        f"{'met' if is_met else 'missed'}"
    )
    findings = {
        "share": share,
        "share_95": [low, high],
        "thread_us": thread_us,
        "bytes_per_step": num_bytes,
        "samples_s": samples,
    }
    report.write_results("ledger", [], args.json, findings)
    return 0 if is_met or args.quick else 1


if __name__ == "__main__":
    sys.exit(main())
