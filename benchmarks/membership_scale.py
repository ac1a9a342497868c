"""How long members need to agree on a generation, from the last arrival until all have seen the plan, by their number.

    python benchmarks/membership_scale.py --members 16 64 256

    polling           as `Member._assemble` does it: each member reads every arrival in every poll
    counting, polls   a counter tells the last to arrive, who alone reads the arrivals; the others ask for the plan, the
                      more seldom the more of them there are
    counting, waits   the same, and the others wait in the store

All members live on this machine, as threads of a few processes, each with a connection of its own to one TCPStore. So
their processor time is in the figure: on a cluster only the store's is shared.
"""

import argparse
import base64
import contextlib
import json
import multiprocessing
import os
import shlex
import sys
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist

from benchmarks import harness, report
from hyperpod_plugins.elastic import Ledger
from hyperpod_plugins.elastic.membership import Action, MembershipPolicy, View, next_action
from hyperpod_plugins.env import JobEnv
from hyperpod_plugins.recovery.assign import Arrival

POLICY = MembershipPolicy()
POLL_S = 0.004
PROCESSES = 2
SIZES = (16, 64, 256, 1024, 4096)
COLUMNS = ("members", "protocol", "agreement s", "slowest round", "plan bytes", "load")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One simulated member."""

    ledger: Ledger
    rank: int
    world_size: int
    deadline_s: float

    def check_time(self) -> None:
        if time.monotonic() > self.deadline_s:
            raise TimeoutError(f"rank {self.rank} has seen no plan")


def agree_polling(seat: Seat, generation: int) -> int:
    """What recovery does now; the number of bytes of the plan."""
    ledger, ranks = seat.ledger, range(seat.world_size)
    ledger.arrive(generation, seat.rank, Arrival(incarnation=0, committed=7).to_dict())
    while True:
        assert ledger.ended(generation) is None
        plan = ledger.plan(generation)
        if plan is None:
            expected = dict(zip(ranks, ledger.incarnations(ranks), strict=True))
            arrived = ledger.arrivals(generation, ranks)
            view = view_of(expected, arrived)
            if next_action(view, POLICY) is Action.FORM:
                plan = ledger.propose(generation, {str(rank): arrived[rank] for rank in ranks})
        if plan is not None:
            return len(json.dumps(plan))
        seat.check_time()
        time.sleep(POLL_S)


def agree_counting(seat: Seat, generation: int, *, polls: bool) -> int:
    """The proposals; the number of bytes of the plan, which is packed."""
    ledger, ranks = seat.ledger, range(seat.world_size)
    store = ledger.store(f"counted/{generation}")
    store.set(f"arrive/{seat.rank}", json.dumps(Arrival(incarnation=0, committed=7).to_dict()))
    # Whoever comes when all may be there looks; a process that came in another's place counts once more, and looks.
    if store.add("count", 1) >= seat.world_size:
        texts = store.multi_get([f"arrive/{rank}" for rank in ranks])
        arrived = {rank: json.loads(text) for rank, text in zip(ranks, texts, strict=True)}
        expected = dict(zip(ranks, ledger.incarnations(ranks), strict=True))
        if next_action(view_of(expected, arrived), POLICY) is Action.FORM:
            packed = base64.b64encode(zlib.compress(json.dumps(arrived).encode(), 1)).decode()
            store.compare_set("plan", "", packed)
    while not has_plan(store, seat.world_size, polls=polls):
        assert ledger.ended(generation) is None
        seat.check_time()
    packed = store.get("plan")
    assert len(json.loads(zlib.decompress(base64.b64decode(packed)))) == seat.world_size
    return len(packed)


def has_plan(store: dist.Store, world_size: int, *, polls: bool) -> bool:
    """Whether there is a plan, after a while at most."""
    if not polls:
        with contextlib.suppress(dist.DistStoreError):
            store.wait(["plan"], timedelta(seconds=60))  # torch warns of each wait that times out, at length
    found = store.check(["plan"])
    if not found:
        time.sleep(POLL_S * max(1, world_size / 16))
    return found


def view_of(expected: dict[int, int], arrived: dict[int, dict[str, Any]]) -> View:
    return View(expected=expected, arrived={rank: each["incarnation"] for rank, each in arrived.items()}, waited_s=0.0)


PROTOCOLS: dict[str, Callable[[Seat, int], int]] = {
    "polling": agree_polling,
    "counting, polls": partial(agree_counting, polls=True),
    "counting, waits": partial(agree_counting, polls=False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """What was seen of one protocol with one number of members."""

    members: int
    protocol: str
    agreement_s: tuple[float, ...]
    """One a round; none where the members did not agree in time."""
    plan_bytes: int
    load: float


def play(protocol: str, port: int, ranks: Sequence[int], world_size: int, limit_s: float, pipe: Connection) -> None:
    """Some of the members, a thread each; a round for each message, and the times of all as an answer."""
    job = JobEnv(store_host="127.0.0.1", store_port=port, run_id=protocol)
    ledgers = {rank: Ledger.connect(job) for rank in ranks}
    threading.stack_size(256 * 1024)
    pipe.send("ready")
    while (generation := pipe.recv()) is not None:
        began = threading.Barrier(len(ranks))
        times: list[tuple[float, float, int]] = []

        def sit(rank: int, generation: int = generation, began: Any = began, times: Any = times) -> None:
            began.wait(60)
            arrived_s = time.monotonic()
            seat = Seat(ledger=ledgers[rank], rank=rank, world_size=world_size, deadline_s=arrived_s + limit_s)
            with contextlib.suppress(TimeoutError, dist.DistError):
                size = PROTOCOLS[protocol](seat, generation)
                times.append((arrived_s, time.monotonic(), size))

        threads = [threading.Thread(target=sit, args=(rank,), daemon=True) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, limit_s + 10))
        pipe.send(times)
    os._exit(0)


def measure(protocol: str, members: int, rounds: int, limit_s: float) -> Figure:
    """Run the rounds of one protocol with one number of members."""
    # Store and clients look up a name at every connection, only to log it; a lost answer costs 5 s by default.
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.membership_scale"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    load = os.getloadavg()[0]
    processes, pipes, seconds, size = [], [], [], 0
    try:
        for index in range(PROCESSES):
            ours, theirs = context.Pipe()
            ranks = range(index, members, PROCESSES)
            process = context.Process(
                target=play, args=(protocol, store.port, ranks, members, limit_s, theirs), daemon=True
            )
            process.start()
            processes.append(process)
            pipes.append(ours)
        gather(pipes, 120)
        for generation in range(rounds):
            for pipe in pipes:
                pipe.send(generation)
            times = [each for answer in gather(pipes, limit_s + 60) for each in answer]
            if len(times) < members:
                break
            seconds.append(max(done for _, done, _ in times) - max(arrived for arrived, _, _ in times))
            size = times[0][2]
    except TimeoutError:
        pass
    finally:
        for process in processes:
            process.kill()
            process.join(10)
    return Figure(members=members, protocol=protocol, agreement_s=tuple(seconds), plan_bytes=size, load=load)


def gather(pipes: Sequence[Connection], timeout_s: float) -> list[Any]:
    """One message from each process."""
    deadline_s = time.monotonic() + timeout_s
    for pipe in pipes:
        if not wait([pipe], max(0.0, deadline_s - time.monotonic())):
            raise TimeoutError("a process of simulated members did not answer")
    return [pipe.recv() for pipe in pipes]


def line_of(figure: Figure) -> list[str]:
    agreed = figure.agreement_s
    shown = [f"{median(agreed):.3f}", f"{max(agreed):.3f}"] if agreed else ["not in time", ""]
    size = str(figure.plan_bytes) if agreed else ""
    return [str(figure.members), figure.protocol, *shown, size, f"{figure.load:.1f}"]


def main() -> int:
    harness.leave_cleanly_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, nargs="+", help=f"how many (default: {SIZES})")
    parser.add_argument("--only", nargs="+", metavar="WORD", help=f"of {'; '.join(PROTOCOLS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=20.0, help="seconds after which a round has failed")
    parser.add_argument("--quick", action="store_true", help="see that it works; the figures mean nothing")
    parser.add_argument("--json", type=Path, default=report.RESULTS / "membership_scale.json")
    asked = parser.parse_args()
    figures: list[Figure] = []
    try:
        for protocol in [name for name in PROTOCOLS if not asked.only or any(word in name for word in asked.only)]:
            for members in asked.members or ((4, 16) if asked.quick else SIZES):
                harness.progress(f"{protocol}: {members} members")
                figures.append(measure(protocol, members, 1 if asked.quick else asked.rounds, asked.limit))
                harness.progress(", ".join(line_of(figures[-1])))
                if not figures[-1].agreement_s:
                    break  # more members would take longer still
    except (KeyboardInterrupt, SystemExit):
        print("interrupted: what there is follows")
    harness.progress("")
    report.print_table(f"Agreement of members on one TCPStore ({asked.rounds} rounds)", COLUMNS, map(line_of, figures))
    document = {
        "benchmark": "membership_scale",
        "command": shlex.join(["python", *sys.argv]),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": report.machine_facts(),
        "figures": [asdict(figure) for figure in figures],
    }
    asked.json.parent.mkdir(parents=True, exist_ok=True)
    asked.json.write_text(json.dumps(document, indent=1))
    print(f"samples: {asked.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
