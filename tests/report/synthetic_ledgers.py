"""Ledgers of runs that have never taken place, so that it is known what a report of them must say.

All durations are multiples of 1/64 s, which floats and six decimals hold exactly. Ranks go in step: what happens takes
all of them equally long, and each knows by construction in which category.
"""

import json
from collections import defaultdict
from dataclasses import dataclass, field

BEGAN_S = 1_700_000_000.0
SIGKILL = "killed by SIGKILL"
COSTS_OF_FAILURES = ("detect", "assemble", "restore", "redone")


@dataclass
class Expected:
    """An incident as the report must show it."""

    kind: str
    rank: int | None
    cause: str
    step: int
    steps_lost: int | None
    level: str
    at_s: float
    total_s: float
    detect_s: float = 0.0
    assemble_s: float = 0.0
    restore_s: float = 0.0
    redone_s: float = 0.0
    """Averaged over the ranks of then."""


@dataclass
class Writer:
    """The file of a process, and how far it has come."""

    name: str
    until_s: float
    lines: list = field(default_factory=list)

    def write(self, kind, at_s, **fields):
        self.lines.append({"kind": kind, "at_s": round(at_s, 6), **fields})

    def book(self, kind="time", seconds=None, **fields):
        seconds = {name: value for name, value in seconds.items() if value}
        self.until_s += sum(seconds.values())
        if seconds or kind != "time":
            self.write(kind, self.until_s, seconds=seconds, **fields)


class SyntheticRun:
    """A run of so many ranks, which are on hosts of `ranks_per_host`; each method lets something happen to it."""

    def __init__(self, num_ranks=4, *, ranks_per_host=2, setup_s=2.0, run_id="run"):
        self.num_ranks, self.ranks_per_host, self.run_id = num_ranks, ranks_per_host, run_id
        self.now_s, self.step_number, self.generation, self.num_restarts = BEGAN_S, 0, 0, 0
        self.hosts = [f"node-{rank // ranks_per_host}" for rank in range(num_ranks)]
        self.incarnations, self.pid = [0] * num_ranks, 1000
        self.workers: list[Writer] = []
        self.agents: dict[str, Writer] = {}
        self.files: list[Writer] = []
        self.seconds = [defaultdict(float) for _ in range(num_ranks)]
        self.incidents: list[Expected] = []
        self.num_failures = self.steps_lost = 0
        self.failures_cost_s = 0.0
        self.held: dict[int, list] = {}
        """Committed steps that are not lost: number, seconds and waits of each rank."""
        self.began_s, self.is_complete = BEGAN_S, False
        self._start_agents()
        self.workers = [self._process(rank, self.now_s) for rank in range(num_ranks)]
        self._all({"setup": setup_s})
        self._world()

    # -- what happens ---------------------------------------------------------------------------------------------

    def step(
        self, compute_s=1.0, *, data_s=0.125, other_s=0.0625, base_wait_s=0.25, late=None, phase="step", loss=True
    ):
        """Commit a step for which some ranks are late, by so many seconds, in their computation or their data."""
        late = late or {}
        most_s = max(late.values(), default=0.0)
        self.step_number += 1
        parts = []
        for rank, worker in enumerate(self.workers):
            own_s = late.get(rank, 0.0)
            seconds = {"other": other_s, "data_wait": data_s, "step": compute_s + most_s}
            if phase != "step":
                seconds[phase] += own_s
                seconds["step"] -= own_s
            fields = {"step": self.step_number, "waited_s": base_wait_s + most_s - own_s, "samples": 8}
            if loss:
                fields["loss"] = loss_of(rank, self.step_number)
            worker.book("step", seconds, **fields)
            parts.append((seconds, most_s - own_s))
        self.held[self.step_number] = parts
        self.now_s += other_s + data_s + compute_s + most_s
        return self

    def steps(self, count, **options):
        """Commit several alike."""
        for _ in range(count):
            self.step(**options)
        return self

    def phase(self, category, seconds):
        """All ranks spend some time in a category outside of a step."""
        self._all({category: seconds})
        return self

    def kill(self, *ranks, computing_s=0.5, detect_s=0.25, assemble_s=4.0, restore_s=1.0, capacity_s=0.0, back_to=None,
             noticed_by=None, code=-9, cause=SIGKILL, node_back_s=None):  # fmt: skip
        """Processes die in a step and are replaced, after a wait for nodes if so said.

        All go on after their last step, or after `back_to`, of which there is a snapshot. `noticed_by` is a rank that
        reports a broken connection before an agent knows more. With `node_back_s`, their node is lost as well, and
        another one joins so long after that was noticed.
        """
        at_s = self.now_s + computing_s
        start_s = at_s + 0.25 + capacity_s + (0.0 if node_back_s is None else detect_s + node_back_s)
        until_s = at_s + detect_s + assemble_s
        assert start_s < until_s
        assert len(ranks) < self.num_ranks
        survivors = [rank for rank in range(self.num_ranks) if rank not in ranks]
        for number, rank in enumerate(ranks):
            self._exit(rank, at_s + number / 64, code, cause)
        if node_back_s is not None:
            self._start_agent(f"node-{len(self.agents)}", at_s + detect_s + node_back_s)
            for rank in ranks:
                self.hosts[rank] = list(self.agents)[-1]
        if capacity_s:
            agent = self.agents[self.hosts[ranks[0]]]
            agent.book(seconds={"setup": at_s - agent.until_s})
            agent.book(seconds={"capacity_wait": capacity_s})
        for rank in survivors:
            self.workers[rank].book(seconds={"redone": computing_s, "detect": detect_s})
            self._count(rank, redone=computing_s, detect=detect_s)
        for number, rank in enumerate(ranks):
            lost_s = computing_s + number / 64
            waits_s = min(capacity_s, max(0.0, capacity_s - number / 64))
            self._count(rank, redone=lost_s, capacity_wait=waits_s)
            self._count(rank, assemble=until_s - at_s - number / 64 - waits_s)
            self.incarnations[rank] += 1
            self.workers[rank] = self._process(rank, start_s)
            self.workers[rank].book(seconds={"setup": until_s - start_s})
        for rank in survivors:
            self.workers[rank].book(seconds={"assemble": assemble_s})
            self._count(rank, assemble=assemble_s)
        self.now_s = until_s
        who = {"worker_id": ranks[0], "incarnation": self.incarnations[ranks[0]] - 1, "kind": "process"}
        text = f"worker {ranks[0]} (process): {cause}"
        if noticed_by is not None:
            who = {"worker_id": -1, "incarnation": 0, "kind": "collective"}
            text = f"rank {noticed_by} (collective): shard[of=2]: Read error: Connection reset by peer."
        level = "replace" if back_to is None else "snapshot"
        lost_s = self._go_back(back_to)
        self._repaired(level, at_s, (detect_s, assemble_s, restore_s), who, text, " ".join(map(str, ranks)))
        extra = "".join(f"; rank {rank}: {cause}" for rank in ranks[1:])
        redone_s = computing_s + sum(range(len(ranks))) / 64 / self.num_ranks + lost_s
        self._expect("failure", ranks[0], cause + extra, level, at_s, (detect_s, assemble_s, restore_s), redone_s)
        self.num_failures += len(ranks)
        return self

    def raise_in(
        self, rank, *, computing_s=0.5, detect_s=0.125, assemble_s=0.25, restore_s=0.125, cause="ValueError: x"
    ):
        """A rank raises an exception in a step, which all run again."""
        at_s = self.now_s + computing_s
        self._all({"redone": computing_s, "detect": detect_s})
        self._all({"assemble": assemble_s})
        who = {"worker_id": rank, "incarnation": self.incarnations[rank], "kind": "exception"}
        stages = detect_s, assemble_s, restore_s
        self._go_back(None)
        self._repaired("retry", at_s, stages, who, f"worker {rank} (exception): {cause}", "")
        self._expect("failure", rank, cause, "retry", at_s, stages, computing_s)
        self.num_failures += 1
        return self

    def restart(self, rank, *, back_to, computing_s=0.5, notice_s=1.0, gap_s=0.5, setup_s=3.0, load_s=1.0, code=-9,
                cause=SIGKILL):  # fmt: skip
        """A rank is lost for good: the agents restart all processes, which load the checkpoint of step `back_to`."""
        at_s = self.now_s + computing_s
        self._exit(rank, at_s, code, cause)
        self._count(rank, redone=computing_s, assemble=notice_s)
        for other in range(self.num_ranks):
            if other != rank:
                self.workers[other].book(seconds={"redone": computing_s})
                self.workers[other].book(seconds={"assemble": notice_s})
                self._count(other, redone=computing_s, assemble=notice_s)
                self._exit(other, at_s + notice_s, -15, "killed by SIGTERM", is_requested=True)
        self.now_s = at_s + notice_s + gap_s
        lost_s = self._restarted(back_to, self.num_restarts + 1, gap_s, setup_s, load_s)
        stages = 0.0, notice_s + gap_s, setup_s + load_s
        self._expect("restart", rank, cause, "checkpoint", at_s, stages, computing_s + lost_s)
        self.num_failures += 1
        return self

    def launch_again(self, *, back_to, gap_s=8.0, setup_s=3.0, load_s=1.0):
        """All machines are lost at once between two steps, and somebody launches the job again."""
        at_s = self.now_s
        self.now_s += gap_s
        self.incarnations = [0] * self.num_ranks
        self._start_agents()
        lost_s = self._restarted(back_to, 0, gap_s, setup_s, load_s)
        cause = "all processes ended, and no ledger says why; the job was launched again"
        self._expect("restart", None, cause, "checkpoint", at_s, (0.0, gap_s, setup_s + load_s), lost_s)
        self.num_failures += 1
        return self

    def grow(self, *, setup_s=2.0, wait_s=3.0, restore_s=1.0):
        """Another rank joins: it has started while the others trained, and waits until they have stopped."""
        rank, at_s = self.num_ranks, self.now_s
        self.num_ranks += 1
        self.hosts.append(f"node-{rank // self.ranks_per_host}")
        self.incarnations.append(1)
        self.seconds.append(defaultdict(float))
        if self.hosts[rank] not in self.agents:
            self._start_agent(self.hosts[rank])
        joiner = self._process(rank, at_s - setup_s)
        joiner.book(seconds={"setup": setup_s})
        joiner.book(seconds={"assemble": wait_s})
        joiner.book(seconds={"restore": restore_s})
        self.seconds[rank]["resize"] += setup_s + wait_s + restore_s
        for other, worker in enumerate(self.workers):
            worker.book(seconds={"resize": wait_s + restore_s})
            self._count(other, resize=wait_s + restore_s)
        self.workers.append(joiner)
        self.now_s += wait_s + restore_s
        who = {"worker_id": -1, "incarnation": 0, "kind": "resize"}
        stages = 0.0, wait_s, restore_s
        self.generation += 1
        text = f"the job (resize): grows to {self.num_ranks}"
        self._events("replace", at_s, stages, who, text, str(rank), 0)
        self._world()
        self._expect("resize", None, f"grows to {self.num_ranks}", "replace", at_s, stages, 0.0)
        return self

    def finish(self, *, other_s=0.5, exit_s=0.25):
        """All processes end as their program wants."""
        self._all({"other": other_s})
        self.now_s += exit_s
        for rank, worker in enumerate(self.workers):
            worker.write("end", worker.until_s)
            self._exit(rank, self.now_s, 0, "finished")
            self._count(rank, other=exit_s)
        for agent in self.agents.values():
            agent.write("end", self.now_s)
        self.is_complete = True
        return self

    def fail(self, rank, *, computing_s=0.5, code=1, cause="exit code 1 (ValueError: x)"):
        """A rank fails, nothing repairs it, and no more is written."""
        self.now_s += computing_s
        self._exit(rank, self.now_s, code, cause)
        self._count(rank, redone=computing_s)
        for other, worker in enumerate(self.workers):
            if other != rank:
                worker.book(seconds={"redone": computing_s})
                self._count(other, redone=computing_s)
        self._expect("failure", rank, cause, "none", self.now_s, (0.0, 0.0, 0.0), computing_s, steps_lost=None)
        self.num_failures += 1
        return self

    def cut_off(self, *, computing_s=0.5):
        """Nothing more is written, in the middle of a step."""
        for rank, worker in enumerate(self.workers):
            worker.write("open", self.now_s + computing_s, category="step", since_s=self.now_s)
            self._count(rank, redone=computing_s)
        self.now_s += computing_s
        return self

    # -- what must be found, and the files ------------------------------------------------------------------------

    @property
    def truth(self):
        """Seconds of each rank by category."""
        found = [defaultdict(float, each) for each in self.seconds]
        for parts in self.held.values():
            for own, (seconds, waited_s) in zip(found, parts, strict=False):
                for name, value in seconds.items():
                    own[name] += value
                own["step"] -= waited_s
                own["straggler_wait"] += waited_s
        return [{name: value for name, value in each.items() if value} for each in found]

    @property
    def wall_s(self):
        return self.now_s - self.began_s

    def write(self, folder):
        """Write all files, and return the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        for writer in self.files:
            with (folder / writer.name).open("a") as file:
                file.write("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in writer.lines))
        return folder

    # -- parts ----------------------------------------------------------------------------------------------------

    def _start_agents(self):
        for host in dict.fromkeys(self.hosts):
            self._start_agent(host)

    def _start_agent(self, host, at_s=None):
        self.pid += 1
        at_s = self.now_s if at_s is None else at_s
        agent = Writer(f"agent-{host}-{self.pid}.jsonl", at_s)
        agent.write("process", at_s, format=1, pid=self.pid, host=host, run_id=self.run_id)
        self.agents[host] = agent
        self.files.append(agent)

    def _process(self, rank, began_s):
        self.pid += 1
        incarnation = self.incarnations[rank]
        worker = Writer(f"worker-{rank}-{self.num_restarts}.{incarnation}.jsonl", began_s)
        identity = {"worker_id": rank, "incarnation": incarnation, "restart": self.num_restarts, "run_id": self.run_id}
        worker.write("process", began_s, format=1, pid=self.pid, host=self.hosts[rank], **identity)
        worker.write("entry", began_s, entry=0)
        self.files.append(worker)
        worker.pid = self.pid
        return worker

    def _exit(self, rank, at_s, code, cause, *, is_requested=False):
        fields = {"worker_id": rank, "incarnation": self.incarnations[rank], "pid": self.workers[rank].pid}
        agent = self.agents[self.hosts[rank]]
        agent.write("exit", at_s, **fields, code=code, cause=cause, is_requested=is_requested)

    def _all(self, seconds):
        for rank, worker in enumerate(self.workers):
            worker.book(seconds=seconds)
            self._count(rank, **seconds)
        self.now_s += sum(seconds.values())

    def _count(self, rank, **seconds):
        for name, value in seconds.items():
            self.seconds[rank][name] += value
            self.failures_cost_s += value / self.num_ranks if name in COSTS_OF_FAILURES else 0.0

    def _world(self):
        for rank, worker in enumerate(self.workers):
            world = {"rank": rank, "world_size": self.num_ranks, "replicas": 2, "generation": self.generation}
            worker.write("world", worker.until_s, **world)

    def _go_back(self, back_to):
        """Lose the steps after `back_to`; the mean seconds of a rank in them."""
        self.lost_now, total_s = 0, 0.0
        if back_to is not None:
            for number in range(back_to + 1, self.step_number + 1):
                for own, (seconds, _) in zip(self.seconds, self.held.pop(number), strict=False):
                    for name, value in seconds.items():
                        is_lost = name in ("step", "data_wait", "snapshot")
                        own["redone" if is_lost else name] += value
                        total_s += value * is_lost / self.num_ranks
                        self.failures_cost_s += value * is_lost / self.num_ranks
            self.lost_now = self.step_number - back_to
            self.steps_lost += self.lost_now
            self.step_number = back_to
        return total_s

    def _repaired(self, level, at_s, stages, who, text, receivers):
        self.generation += 1
        for rank, worker in enumerate(self.workers):
            worker.book(seconds={"restore": stages[2]})
            self._count(rank, restore=stages[2])
        self.now_s += stages[2]
        self._events(level, at_s, stages, who, text, receivers, self.lost_now)
        self._world()

    def _events(self, level, at_s, stages, who, text, receivers, steps_lost):
        details = dict(zip(("noticed_s", "assembled_s", "restored_s"), stages, strict=True))
        details |= {
            "cause": text,
            "reporter": "agent of node 0",
            **who,
            "receivers": receivers,
            "step": self.step_number,
        }
        details |= {"steps_lost": steps_lost, "generation": self.generation}
        for worker in self.workers:
            name = f"recovery.{level}"
            worker.write("event", at_s, name=name, duration_s=sum(stages), details=details)

    def _restarted(self, back_to, restart, gap_s, setup_s, load_s):
        self.num_restarts, self.generation, began_s = restart, 0, self.now_s
        self.incarnations = [0] * self.num_ranks
        lost_s = self._go_back(back_to)
        for rank in range(self.num_ranks):
            self.workers[rank] = self._process(rank, began_s)
            self._count(rank, assemble=gap_s + setup_s, restore=load_s)
            self.workers[rank].book(seconds={"setup": setup_s})
            self.workers[rank].book(seconds={"checkpoint_restore": load_s})
        self.now_s += setup_s + load_s
        self._world()
        return lost_s

    def _expect(self, kind, rank, cause, level, at_s, stages, redone_s, steps_lost=0):
        if steps_lost == 0 and kind != "resize":
            steps_lost = self.lost_now
        detect_s, assemble_s, restore_s = stages
        self.incidents.append(
            Expected(
                kind=kind,
                rank=rank,
                cause=cause,
                step=self.step_number,
                steps_lost=steps_lost,
                level=level,
                at_s=at_s,
                total_s=sum(stages),
                detect_s=detect_s,
                assemble_s=assemble_s,
                restore_s=restore_s,
                redone_s=redone_s,
            )
        )


def loss_of(rank, step):
    """What a rank has as loss of a step."""
    return rank + 1 / step
