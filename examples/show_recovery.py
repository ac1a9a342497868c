"""Train the small Llama twice: once in peace, once losing a rank to SIGKILL in the middle. Compare the results.

    python examples/show_recovery.py                # 4 processes on this machine: 2 replicas of 2 shards

What to watch for in the second run: one line that says who died, where, and how long the repair took. The other three
processes keep theirs, no checkpoint is read, and both runs end with the same bits.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

TRAIN = Path(__file__).with_name("train_lm.py")
NUM_RANKS = 4


def train(name: str, folder: Path, *options: str, events: Path | None = None) -> dict:
    """Run the training under the launcher, its output in view, and return what it reports.

    Args:
        name: shown above the output.
        folder: for token files and the report.
        *options: of the program.
        events: folder into which each process writes what happens, such as repairs.
    """
    print(f"\n=== {name}\n", flush=True)
    report = folder / "report.json"
    report.unlink(missing_ok=True)
    launcher = [sys.executable, "-m", "hyperpod_plugins.elastic.launcher.main", "--nproc-per-node", str(NUM_RANKS)]
    preload = ["--preload", "default,transformers.models.llama.modeling_llama"]  # what a replacement need not import
    layout = ["--hybrid-shard-degree", "2", "--tensor-parallel-degree", "1"]
    command = [*launcher, *preload, str(TRAIN), *layout, "--folder", str(folder), "--report", str(report), *options]
    environ = os.environ | ({"HYPERPOD_EVENTS": str(events)} if events else {})
    subprocess.run(command, check=True, env=environ)
    return json.loads(report.read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--fault", help="default: SIGKILL of rank 3 in the backward pass of the step in the middle")
    parser.add_argument("--folder", type=Path, default=Path("runs/show_recovery"))
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    steps = ["--steps", str(args.steps)]
    fault = args.fault or f"kill:rank=3,step={args.steps // 2},phase=backward"
    peaceful = train("undisturbed", args.folder, *steps)
    events = args.folder / "events"
    shutil.rmtree(events, ignore_errors=True)
    disturbed = train(f"with a fault: {fault}", args.folder, *steps, "--fault", fault, events=events)
    is_equal = peaceful == disturbed
    num_repairs = sum("recovery." in line for path in events.glob("rank-0.jsonl") for line in path.open())
    print(f"\nvalidation loss: {peaceful['val_loss']:.9f} undisturbed, {disturbed['val_loss']:.9f} with the fault")
    print(
        f"parameters and optimizer state of all {NUM_RANKS} ranks: {'equal, bit for bit' if is_equal else 'DIFFERENT'}"
    )
    if not num_repairs:
        print("and no fault was repaired: the show has failed")
    return 0 if is_equal and num_repairs else 1


if __name__ == "__main__":
    sys.exit(main())
