"""What it costs to follow the ledgers of a large job: `python tests/report/live_cost.py [RANKS] [STEPS]`."""

import json
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

from hyperpod_plugins.report.live_ledgers import LiveLedgers


def write_ledgers(folder, num_ranks, num_steps, *, began_s=1000.0, step_s=1.0, waited_s=0.0):
    """Ledgers of a run without faults: a set-up of 10 s, and steps of which the odd ranks wait a part."""
    for rank in range(num_ranks):
        head = {"kind": "process", "format": 1, "at_s": began_s, "pid": 100 + rank, "host": f"node{rank // 8}"}
        head |= {"run_id": "synthetic", "worker_id": rank, "incarnation": 0, "restart": 0}
        world = {"rank": rank, "world_size": num_ranks, "replicas": 2, "generation": 0}
        lines = [
            head,
            {"kind": "time", "at_s": began_s + 10, "seconds": {"setup": 10.0}},
            {"kind": "world", "at_s": began_s + 10, **world},
            {"kind": "entry", "at_s": began_s + 10, "entry": 0},
        ]
        for step in range(1, num_steps + 1):
            seconds = {"data_wait": 0.05 * step_s, "step": 0.9 * step_s, "other": 0.05 * step_s}
            more = {"waited_s": waited_s * (rank % 2), "step": step, "samples": 64, "loss": 1.0}
            lines.append({"kind": "step", "at_s": began_s + 10 + step * step_s, "seconds": seconds, **more})
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        (folder / f"worker-{rank}-0.0.jsonl").write_text(text)


def main(num_ranks=64, num_steps=10_000):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_ledgers(folder, num_ranks, num_steps)
        num_bytes = sum(each.stat().st_size for each in folder.iterdir())
        ledgers, looks = LiveLedgers(folder), []
        while True:
            began_s = time.process_time()
            figures = ledgers.read(0.0)
            looks.append(time.process_time() - began_s)
            if figures.part_read >= 1.0:
                break
        print(f"{num_bytes / 1e6:.0f} MB: {sum(looks):.1f} s in {len(looks)} calls, at most {max(looks):.2f} s")
        line = {"kind": "step", "at_s": 1e6, "seconds": {"step": 1.0}, "waited_s": 0.0, "step": num_steps + 1}
        for rank in range(num_ranks):
            with (folder / f"worker-{rank}-0.0.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
        for what in ("a step more of each rank", "nothing new"):
            began_s = time.process_time()
            ledgers.read(0.0)
            print(f"{what}: {1e3 * (time.process_time() - began_s):.1f} ms")
        tracemalloc.start()
        again = LiveLedgers(folder)
        for _ in range(12):
            again.read(0.0)
        print(f"memory after 12 calls: {tracemalloc.get_traced_memory()[0] / 1e6:.0f} MB")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
