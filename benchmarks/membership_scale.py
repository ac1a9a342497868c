"""How long members need to agree on a generation, from the last arrival until all have seen the plan, by their number.

    python benchmarks/membership_scale.py --members 16 64 256

    agreement         as recovery does it: the last to arrive reads what all have said, the others wait for the plan
    the last is gone  the last to arrive does nothing more, as if it had died; another one must find out

All members live on this machine, as threads of some processes, each with two connections of its own to one TCPStore.
So their processor time is in the figure. On a cluster only the store's is shared, which is shown apart.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import shlex
import sys
import threading
import time
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
from hyperpod_plugins.elastic import JobStore
from hyperpod_plugins.elastic.membership.quorum_policy import QuorumPolicy
from hyperpod_plugins.elastic.store.world import WorldPlan
from hyperpod_plugins.env import JobEnv
from hyperpod_plugins.errors import RecoveryTimeout
from hyperpod_plugins.recovery.plan import Arrival
from hyperpod_plugins.recovery.quorum import PlanWatcher, QuorumJoiner, to_text
from hyperpod_plugins.recovery.stop_reports import Survivors
from hyperpod_plugins.recovery.world_view import WorldView

THREADS = 128
SIZES = (16, 64, 256, 1024, 4096)
COLUMNS = ("members", "case", "agreement s", "slowest round", "store's s", "members' s", "plan bytes", "load")
ARRIVAL = Arrival(incarnation=0, committed=7)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedMember:
    """One simulated member."""

    job_store: JobStore
    joiner: QuorumJoiner
    rank: int
    world_size: int

    @classmethod
    def of(cls, job: JobEnv, rank: int, world_size: int, limit_s: float) -> "SimulatedMember":
        job_store = JobStore.connect(job)
        joiner = QuorumJoiner(
            job_store,
            WorldView(job_store, WorldPlan.initial(world_size)),
            PlanWatcher(partial(JobStore.connect, job)),
            worker_id=rank,
            policy=QuorumPolicy(replacement_timeout_s=limit_s),
            survivors=Survivors(job_store, patience_s=lambda: limit_s, outside_s=limit_s),
        )
        return cls(job_store=job_store, joiner=joiner, rank=rank, world_size=world_size)


def agree(member: SimulatedMember, generation: int) -> None:
    """Meet the others, as `Member.join_next` does."""
    formed = member.joiner.join(generation, ARRIVAL, time.monotonic())
    assert formed is not None
    assert len(formed.arrivals) == member.world_size


def agree_without_last(member: SimulatedMember, generation: int) -> None:
    """The same, where the last rank comes last, and never looks."""
    if member.rank < member.world_size - 1:
        agree(member, generation)
        return
    while member.job_store.num_arrived(generation) < member.world_size - 1:
        time.sleep(0.01)
    member.job_store.arrive(generation, member.rank, to_text(ARRIVAL))


CASES: dict[str, Callable[[SimulatedMember, int], None]] = {"agreement": agree, "the last is gone": agree_without_last}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """What was seen of one case with one number of members."""

    members: int
    case: str
    agreement_s: tuple[float, ...]
    """One a round; none where the members did not agree in time."""
    store_s: float
    """Processor time of the store in one round, in seconds."""
    members_s: float
    """The same of all members together."""
    plan_bytes: int
    load: float


def play(case: str, port: int, ranks: Sequence[int], world_size: int, limit_s: float, pipe: Connection) -> None:
    """Some of the members, a thread each; a round for each message, and the times of all as an answer."""
    job = JobEnv(store_host="127.0.0.1", store_port=port, run_id="job")
    members = {rank: SimulatedMember.of(job, rank, world_size, limit_s) for rank in ranks}
    threading.stack_size(256 * 1024)
    sys.setswitchinterval(1.0)  # threads that wait for the interpreter ask for it so often; every 5 ms is too much
    pipe.send("ready")
    while (generation := pipe.recv()) is not None:
        began = threading.Barrier(len(ranks))
        times: list[tuple[float, float]] = []
        began_s = time.process_time()

        def play_rank(rank: int, generation: int = generation, began: Any = began, times: Any = times) -> None:
            began.wait(60)
            arrived_s = time.monotonic()
            with contextlib.suppress(RecoveryTimeout, dist.DistError):
                CASES[case](members[rank], generation)
                times.append((arrived_s, time.monotonic()))

        threads = [threading.Thread(target=play_rank, args=(rank,), daemon=True) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, limit_s + 10))
        pipe.send((times, time.process_time() - began_s))
    os._exit(0)


def measure(case: str, members: int, rounds: int, limit_s: float) -> Figure:
    """Run the rounds of one case with one number of members."""
    # Store and clients look up a name at every connection, only to log it; a lost answer costs 5 s by default.
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.membership_scale"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    load, began_s = os.getloadavg()[0], time.process_time()
    processes, pipes, seconds, members_s, size = [], [], [], [], 0
    try:
        num_processes = max(2, members // THREADS)
        for index in range(num_processes):
            ours, theirs = context.Pipe()
            ranks = range(index, members, num_processes)
            process = context.Process(
                target=play, args=(case, store.port, ranks, members, limit_s, theirs), daemon=True
            )
            process.start()
            processes.append(process)
            pipes.append(ours)
        gather(pipes, 120)
        began_s = time.process_time()
        for generation in range(1, rounds + 1):
            for pipe in pipes:
                pipe.send(generation)
            answers = gather(pipes, limit_s + 60)
            times = [each for some, _ in answers for each in some]
            members_s.append(sum(spent_s for _, spent_s in answers))
            if len(times) < members:
                break
            seconds.append(max(done for _, done in times) - max(arrived for arrived, _ in times))
            size = len(dist.PrefixStore("hyperpod/job", store).get(f"plan/{generation}"))
    except TimeoutError:
        pass
    finally:
        for process in processes:
            process.kill()
            process.join(10)
    return Figure(
        members=members,
        case=case,
        agreement_s=tuple(seconds),
        store_s=(time.process_time() - began_s) / max(1, len(members_s)),
        members_s=sum(members_s) / max(1, len(members_s)),
        plan_bytes=size,
        load=load,
    )


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
    spent = [f"{figure.store_s:.3f}", f"{figure.members_s:.3f}", str(figure.plan_bytes)]
    return [str(figure.members), figure.case, *shown, *spent, f"{figure.load:.1f}"]


def main() -> int:
    harness.leave_cleanly_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, nargs="+", help=f"how many (default: {SIZES})")
    parser.add_argument("--only", nargs="+", metavar="WORD", help=f"of {'; '.join(CASES)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds after which a round has failed")
    parser.add_argument("--quick", action="store_true", help="see that it works; the figures mean nothing")
    parser.add_argument("--json", type=Path, default=report.RESULTS / "membership_scale.json")
    asked = parser.parse_args()
    figures: list[Figure] = []
    try:
        for case in [name for name in CASES if not asked.only or any(word in name for word in asked.only)]:
            for members in asked.members or ((4, 16) if asked.quick else SIZES):
                harness.progress(f"{case}: {members} members")
                figures.append(measure(case, members, 1 if asked.quick else asked.rounds, asked.limit))
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
