"""Reports of runs that never were, for the tests of the page; the same arguments give the same report."""

import random
from dataclasses import dataclass, field, replace

from hyperpod_plugins.ledger import TimeCategory
from hyperpod_plugins.report.run_report import (
    CategoryTime,
    ConfidenceInterval,
    FailingNode,
    Headline,
    Incident,
    RankProcess,
    RankTimeline,
    RunReport,
    StepSeries,
    Straggler,
    Verdict,
)

BEGAN_AT_S = 1_760_000_000.0
CAUSES = (
    "rank 3 was lost: killed by SIGKILL",
    "NCCL watchdog: collective timed out after 30 s on communicator 0x7f3a (allreduce, 4.2 MiB)",
    "CUDA error: uncorrectable ECC error encountered",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.31 GiB",
    "heartbeat of node ip-10-1-7-23 stopped for 5.0 s",
)


@dataclass
class _Run:
    """What comes together while the run is made up."""

    num_ranks: int
    now_s: float = BEGAN_AT_S
    spans: list[list[tuple[float, float, str]]] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)
    processes: list[list[RankProcess]] = field(default_factory=list)
    columns: dict[str, list] = field(default_factory=dict)
    restarts: int = 0

    def all_do(self, category, seconds, without=()):
        for rank in range(self.num_ranks):
            if rank not in without:
                self.spans[rank].append((self.now_s, seconds, str(category)))
        self.now_s += seconds


def _start(run, rank, incarnation):
    host = f"ip-10-1-{rank // 8}-{20 + rank // 8}"
    run.processes[rank].append(
        RankProcess(
            pid=4000 + 100 * incarnation + rank,
            host=host,
            incarnation=incarnation,
            restart=run.restarts,
            began_at_s=run.now_s,
            ended_at_s=run.now_s,
            ending="",
        )
    )
    return host


def _incident(run, random_, kind, step):
    rank = random_.randrange(run.num_ranks)
    slow = 12.0 if kind == "restart" else 1.0
    stages = {
        "detect": random_.uniform(0.2, 1.5) * slow,
        "assemble": random_.uniform(0.5, 4.0) * slow,
        "restore": random_.uniform(0.3, 6.0) * slow,
        "redone": random_.choice((0.0, random_.uniform(0.5, 5.0))) * slow,
    }
    at_s = run.now_s
    for category, seconds in stages.items():
        run.all_do(category, seconds, without=(rank,) if kind == "failure" and category == "detect" else ())
    if kind == "restart":
        run.restarts += 1
    if kind == "failure":
        _start(run, rank, len(run.processes[rank]))
    run.incidents.append(
        Incident(
            at_s=at_s,
            kind=kind,
            cause=random_.choice(CAUSES) if kind != "resize" else "two nodes joined: 6 replicas become 8",
            rank=rank if kind == "failure" else None,
            host=f"ip-10-1-{rank // 8}-{20 + rank // 8}",
            step=step,
            steps_lost=random_.randrange(3),
            generation=len(run.incidents) + 2,
            level={"failure": "replace", "resize": "resize", "restart": "checkpoint"}[kind],
            detect_s=stages["detect"],
            assemble_s=stages["assemble"],
            restore_s=stages["restore"],
            redone_s=stages["redone"],
            total_s=sum(stages.values()),
        )
    )


def _kinds(num_incidents, num_restarts):
    for n in range(num_incidents):
        if n * num_restarts // max(1, num_incidents) != (n + 1) * num_restarts // max(1, num_incidents):
            yield "restart"
        else:
            yield "resize" if n % 9 == 4 else "failure"


def _steps(run, random_, num_steps, kinds, has_loss):
    every = max(1, num_steps // (len(kinds) + 1))
    samples = 0
    for step in range(num_steps):
        if kinds and step and step % every == 0:
            _incident(run, random_, kinds.pop(0), step)
        if step % 10 == 0:
            run.all_do(TimeCategory.DATA_WAIT, random_.uniform(0.02, 0.3))
        if step % 500 == 499:
            run.all_do(TimeCategory.CHECKPOINT_SAVE, 8.0)
            run.all_do(TimeCategory.EVALUATION, 15.0)
        duration_s = random_.gauss(0.42, 0.01) * (4 if random_.random() < 0.004 else 1)
        run.all_do(TimeCategory.STEP, duration_s)
        batch = 512 if len(run.incidents) % 6 < 4 else 384
        samples += batch
        entry = {
            "step": step + 1,
            "at_s": run.now_s,
            "duration_s": duration_s,
            "loss": 2.1 + 8 / (1 + step / 150) ** 0.7 + random_.gauss(0, 0.08) if has_loss else None,
            "world_size": run.num_ranks if batch == 512 else max(1, run.num_ranks * 3 // 4),
            "global_batch": batch,
            "samples": samples,
            "goodput": min(1.0, max(0.0, 0.93 + random_.gauss(0, 0.01) - 0.3 * (step % every < 20 and step > every))),
        }
        for name, value in entry.items():
            run.columns.setdefault(name, []).append(value)


def _joined(spans):
    result = []
    for start_s, seconds, category in spans:
        if result and result[-1][2] == category:
            result[-1] = (result[-1][0], result[-1][1] + seconds, category)
        else:
            result.append((start_s, seconds, category))
    return result


def _ended(run, rank):
    processes = run.processes[rank]
    ends = [*(following.began_at_s for following in processes[1:]), run.now_s]
    return [
        replace(process, ended_at_s=end_s, ending="finished" if process is processes[-1] else "SIGKILL")
        for process, end_s in zip(processes, ends, strict=True)
    ]


def _timeline(run, rank, wall_s):
    spans = _joined(run.spans[rank])
    seconds = {}
    for _, length, category in spans:
        seconds[category] = seconds.get(category, 0.0) + length
    return RankTimeline(
        rank=rank, wall_s=wall_s, seconds=seconds, processes=_ended(run, rank), spans=spans, waited_s=3.0 * rank % 17
    )


def synthetic_report(
    *, num_ranks=8, num_steps=600, num_incidents=5, num_restarts=0, is_complete=True, has_loss=True, seed=0, **changes
):
    """Return a report; `changes` replace fields of it."""
    random_ = random.Random(seed)
    run = _Run(num_ranks, spans=[[] for _ in range(num_ranks)], processes=[[] for _ in range(num_ranks)])
    for rank in range(num_ranks):
        _start(run, rank, 0)
    run.all_do(TimeCategory.SETUP, 20.0)
    _steps(run, random_, num_steps, list(_kinds(num_incidents, num_restarts)), has_loss)
    wall_s = run.now_s - BEGAN_AT_S
    ranks = [_timeline(run, rank, wall_s) for rank in range(num_ranks)]
    totals = {}
    for timeline in ranks:
        for category, seconds in timeline.seconds.items():
            totals[category] = totals.get(category, 0.0) + seconds
    categories = [
        CategoryTime(
            category=category, label=category.replace("_", " ").capitalize(), seconds=s, share=s / wall_s / num_ranks
        )
        for category, s in totals.items()
    ]
    failures = [one for one in run.incidents if one.kind == "failure"]
    cost_s = sum(one.total_s for one in run.incidents)
    fields = {
        "run_id": f"llama-3-8b-{seed}",
        "began_at_s": BEGAN_AT_S,
        "ended_at_s": run.now_s,
        "is_complete": is_complete,
        "num_ranks": num_ranks,
        "hosts": sorted({one.host for processes in run.processes for one in processes}),
        "headline": Headline(
            wall_s=wall_s,
            goodput=totals.get("step", 0.0) / wall_s / num_ranks,
            ettr=1 - cost_s / wall_s,
            num_failures=len(failures),
            num_repairs=len(failures),
            num_restarts=num_restarts,
            num_resizes=sum(one.kind == "resize" for one in run.incidents),
            steps_committed=num_steps,
            steps_lost=sum(one.steps_lost for one in run.incidents),
            failures_cost_s=cost_s,
            ideal_step_s=0.42 if num_steps else None,
            mtbf_s=ConfidenceInterval(
                value=wall_s / max(1, len(failures)),
                low=wall_s / (len(failures) + 3),
                high=wall_s / len(failures) * 2 if failures else None,
            ),
            mttr_s=ConfidenceInterval(value=7.4, low=5.1, high=9.9) if failures else None,
            checkpoint_restart_cost_s=180.0 * len(failures) if failures else None,
            checkpoint_restart_assumes="Assumes a checkpoint each 500 steps and 2 min for a restart.",
        ),
        "categories": categories,
        "ranks": ranks,
        "incidents": run.incidents,
        "steps": StepSeries(**run.columns),
        "stragglers": [
            Straggler(
                rank=5,
                host="ip-10-1-0-20",
                phase="compute",
                held_back_s=41.5,
                num_steps=312,
                without_it_s=wall_s - 41.5,
            )
        ]
        if num_incidents
        else [],
        "failing_nodes": [FailingNode(host="ip-10-1-0-20", num_failures=4, probability=0.0031)]
        if num_incidents > 3
        else [],
        "verdict": Verdict(action="continue", why=""),
    }
    return RunReport(**{**fields, **changes})
