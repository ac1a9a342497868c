"""Random schedules of agents that come, go and die around the end of a job; each is to end within seconds of it.

    python tests/elastic/endings.py [--count 200] [--seed 0] [--parallel 4]

A schedule is a function of its seed. `test_endings.py` runs a few of them; a failure prints the seed and every log.
The workers import nothing: they wait for a file. This process writes into the job store what a program would.
"""

import argparse
import contextlib
import faulthandler
import multiprocessing
import os
import random
import signal
import socket
import sys
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

_context = multiprocessing.get_context("forkserver")

END_S = 5.0
"""From the end of the job, or a signal, to the end of an agent."""
BEAT_S, MISSED = 0.2, 5
LOST_S = (MISSED + 3) * BEAT_S
"""Until the others know that an agent was killed; the job does not end before."""
START_S = 60.0
WORKER = """
import os, sys, time
folder, num_initial = sys.argv[1], int(sys.argv[2])
rank = int(os.environ["RANK"])
open(os.path.join(folder, f"rank{rank}"), "w").close()
while rank >= num_initial or not os.path.exists(os.path.join(folder, "finish")):
    time.sleep(0.02)  # whoever comes to a program that grows waits to be taken in
open(os.path.join(folder, f"done{os.getpid()}"), "w").close()
"""


@dataclass(frozen=True, slots=True)
class Event:
    """What happens at a time relative to the end of the workers."""

    at_s: float
    kind: str
    """`come`, or the name of a signal."""
    agent: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """One case."""

    seed: int
    num_initial: int
    grows: bool
    """Whether the program takes more nodes in than it began with."""
    events: tuple[Event, ...]

    @classmethod
    def draw(cls, seed: int) -> "Schedule":
        """The schedule of a seed."""
        draw = random.Random(seed)
        num_initial, num_joining = draw.choice((1, 2, 2)), draw.choice((1, 1, 2))
        events = [
            Event(draw.uniform(-1.5, 1.0), "come", number) for number in range(num_initial, num_initial + num_joining)
        ]
        for _ in range(draw.choice((0, 1, 1))):
            agent = draw.randrange(num_initial + num_joining)
            kind = draw.choice(("SIGKILL", "SIGTERM", "SIGTERM SIGTERM"))
            events.append(Event(draw.uniform(-0.7, 1.5), kind, agent))
        return cls(seed, num_initial, draw.random() < 0.5, tuple(sorted(events, key=lambda event: event.at_s)))


def _agent(argv: list[str], log: str, mark: str) -> None:
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ["JOB_MARK"] = mark
    faulthandler.dump_traceback_later(15.0)  # where each thread is, of an agent that does not end
    from hyperpod_plugins.elastic.launcher.main import main

    code = main(argv)
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)


class Run:
    """A job that follows a schedule."""

    def __init__(self, schedule: Schedule, folder: Path, end_s: float) -> None:
        self.schedule, self.folder, self.end_s = schedule, folder, end_s
        self.mark = f"endings-{uuid.uuid4().hex}"
        self.agents = {}
        self.came_s, self.ended_s, self.signalled_s = {}, {}, {}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        (folder / "worker.py").write_text(WORKER)

    def come(self, number: int) -> None:
        """Start an agent; number 0 serves the store."""
        num_initial = self.schedule.num_initial
        conf = f"is_host={int(number == 0)},keep_alive_interval={BEAT_S},keep_alive_max_attempt={MISSED}"
        argv = [
            *("--rdzv-backend=hyperpod", f"--rdzv-endpoint=127.0.0.1:{self.port}", "--rdzv-id=endings"),
            *(f"--nnodes={num_initial}:{4 if self.schedule.grows else num_initial}", "--nproc-per-node=1"),
            *(f"--rdzv-conf={conf},last_call_timeout=0", "--preload=json", "--shutdown-timeout=3"),
            *(str(self.folder / "worker.py"), str(self.folder), str(num_initial)),
        ]
        self.came_s[number] = time.monotonic()
        self.agents[number] = _context.Process(
            target=_agent, args=(argv, str(self.folder / f"agent{number}.log"), self.mark)
        )
        self.agents[number].start()

    def log(self, number: int) -> str:
        """What an agent has printed."""
        path = self.folder / f"agent{number}.log"
        return path.read_text() if path.exists() else ""

    def begin(self) -> None:
        """Wait for the first workers, and write down what a program that recovers would."""
        from hyperpod_plugins.elastic import JobStore
        from hyperpod_plugins.elastic.membership.admission import publish_initial_world
        from hyperpod_plugins.elastic.membership.elastic_spec import ElasticPolicy, ElasticSpec, publish_elastic_spec
        from hyperpod_plugins.elastic.store.world import WorldPlan
        from hyperpod_plugins.env import JobEnv

        num_initial = self.schedule.num_initial
        for number in range(num_initial):
            self.come(number)
        until_s = time.monotonic() + START_S
        while not all((self.folder / f"rank{rank}").exists() for rank in range(num_initial)):
            assert time.monotonic() < until_s, "the first workers do not begin"
            time.sleep(0.02)
        job_store = JobStore.connect(JobEnv(store_host="127.0.0.1", store_port=self.port, run_id="endings"))
        publish_initial_world(job_store, WorldPlan.initial(num_initial))
        if self.schedule.grows:
            publish_elastic_spec(job_store, ElasticSpec(policy=ElasticPolicy(), replica_size=1, sizes=(1, 2, 3, 4)))
        job_store.arm()
        job_store.set("begun", b"1")

    def follow(self) -> None:
        """Let everything happen, and check that all end in time."""
        self.begin()
        end_s = time.monotonic() + 1.6
        things = sorted([(end_s + event.at_s, event) for event in self.schedule.events] + [(end_s, None)], key=first)
        for at_s, event in things:
            while time.monotonic() < at_s:
                self.look()
                time.sleep(0.01)
            if event is None:
                (self.folder / "finish").touch()
            elif event.kind == "come":
                self.come(event.agent)
            elif event.agent in self.agents and event.agent not in self.ended_s:
                for name in event.kind.split():
                    self.signalled_s[event.agent] = time.monotonic()
                    self.agents[event.agent].kill() if name == "SIGKILL" else self.send(event.agent, name)
        over_s = max(time.monotonic(), *self.signalled_s.values()) if self.signalled_s else time.monotonic()
        if any(event.kind == "SIGKILL" for event in self.schedule.events):
            over_s += LOST_S
        num_done = 0
        while time.monotonic() < over_s + self.end_s:
            self.look()
            if num_done < (num_done := len(list(self.folder.glob("done*")))):  # the job is over when the last is
                over_s = max(over_s, time.monotonic())
            for number in set(self.agents) - set(self.ended_s):
                if self.is_waiting(number) and number not in self.signalled_s:  # it came when the job was over
                    self.signalled_s[number] = time.monotonic()
                    over_s = max(over_s, time.monotonic())
                    self.send(number, "SIGTERM")
            if len(self.ended_s) == len(self.agents):
                break
            time.sleep(0.01)
        if set(self.agents) - set(self.ended_s):
            time.sleep(max(0.0, max(self.came_s.values()) + 16.0 - time.monotonic()))
        late = sorted(set(self.agents) - set(self.ended_s))
        assert not late, f"agents {late} have not ended"
        for number, agent in self.agents.items():
            code = agent.exitcode
            assert "Traceback" not in self.log(number), f"agent {number} ended with a traceback"
            if not self.signalled_s:
                assert code == 0, f"agent {number} ended with {code}"
        for _ in range(500):
            if not (left := self.processes()):
                break
            time.sleep(0.02)
        assert not left, f"processes {left} are left"

    def is_waiting(self, number: int) -> bool:
        """Whether an agent has nobody to talk to, and says so."""
        return "waiting for the store" in self.log(number)

    def send(self, number: int, name: str) -> None:
        """Send a signal, unless the process is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.agents[number].pid, signal.Signals[name])

    def look(self) -> None:
        """Note who has ended."""
        for number, agent in self.agents.items():
            if number not in self.ended_s and agent.exitcode is not None:
                self.ended_s[number] = time.monotonic()

    def processes(self) -> list[int]:
        """Live processes of this job."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdecimal() and self.mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
        return found

    def clear(self) -> None:
        """Leave no process behind."""
        for agent in self.agents.values():
            agent.kill()
            agent.join(10)
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def first(pair):
    """Sort key."""
    return pair[0]


def run(seed: int, end_s: float = END_S) -> str | None:
    """Follow the schedule of a seed; what was wrong, or None."""
    schedule = Schedule.draw(seed)
    with tempfile.TemporaryDirectory(prefix="endings-") as folder:
        job = Run(schedule, Path(folder), end_s)
        try:
            job.follow()
        except Exception as error:
            logs = "".join(
                f"--- agent {each} (code {job.agents[each].exitcode})\n{job.log(each)}" for each in job.agents
            )
            return f"{schedule}\n{type(error).__name__}: {error}\n{logs}"
        finally:
            job.clear()
    return None


def main() -> int:
    """Run many; returns 1 where one went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parallel", type=int, default=4)
    args = parser.parse_args()
    _context.set_forkserver_preload(["hyperpod_plugins.elastic.launcher.main"])
    wrong = 0
    with ThreadPoolExecutor(args.parallel) as pool:
        for error in pool.map(run, range(args.seed, args.seed + args.count)):
            wrong += error is not None
            if error is not None:
                print(error, flush=True)
    print(f"{args.count - wrong} of {args.count} schedules ended in time")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
