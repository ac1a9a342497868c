"""Watch a job lose a process, heal, grow, shrink, and end with the same bits. Takes about two minutes on two cores.

    python examples/show_recovery.py

The small Llama of `train_elastic.py` is trained twice by the same program, on replicas of one process each: once
undisturbed on two replicas; then a process is killed (SIGKILL), a third replica joins, and leaves again. At the end,
`report.html` in the folder shows where the time went. What the processes print is in the log files beside it.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.report.make_report import report_of
from hyperpod_plugins.report.page import write_page
from hyperpod_plugins.report.run_files import read_run
from hyperpod_plugins.report.run_report import RunReport
from hyperpod_plugins.report.text import duration, headline_rows

TRAIN = Path(__file__).with_name("train_elastic.py")
LIMIT_S = 300.0
"""A run that takes longer has failed."""


@dataclass
class Job:
    """A run of the training program: one agent a node, here all on this machine."""

    name: str
    folder: Path
    steps: int
    nodes: str
    agents: list[subprocess.Popen] = field(default_factory=list)
    began_s: float = field(default_factory=time.monotonic)
    address: str = ""

    @property
    def events(self) -> Path:
        return self.folder / "events"

    def start_node(self) -> subprocess.Popen:
        """Start an agent; the first one serves the store on a port that the system chooses."""
        number = len(self.agents)
        launcher = [sys.executable, "-m", "hyperpod_plugins.elastic.launcher.main", "--nproc-per-node", "1"]
        place = ["--nnodes", self.nodes, "--rdzv-endpoint", self.address, "--rdzv-id", f"show-{self.name}"]
        preload = [
            "--preload",
            "default,transformers.models.llama.modeling_llama",
        ]  # what a replacement need not import
        training = [str(TRAIN), "--steps", str(self.steps), "--folder", str(self.folder), "--reproducible"]
        sizes = ["--global-batch-size", "12", "--micro-batch-size", "2", "--sequence-length", "48"]
        environ = os.environ | {"HYPERPOD_EVENTS": str(self.events), "OMP_NUM_THREADS": "1"}
        with (self.folder / f"node-{number}.log").open("wb") as log:
            command = [*launcher, *place, *preload, *training, *sizes, "--digest", str(self.folder / "digest.json")]
            agent = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environ, start_new_session=True)
        self.agents.append(agent)
        return agent

    def report(self) -> RunReport | None:
        """What the ledgers say so far; None before the first one exists."""
        try:
            return report_of(read_run(self.events))
        except (ConfigError, ValueError):
            return None

    def check(self) -> None:
        """Raise if an agent has failed, or if the run takes too long."""
        for number, agent in enumerate(self.agents):
            if agent.poll() not in (None, 0, 128 + signal.SIGTERM):  # the show ends one by SIGTERM
                log = self.folder / f"node-{number}.log"
                raise SystemExit(f"{self.name}: the agent of node {number} ended with {agent.returncode}; see {log}")
        if time.monotonic() - self.began_s > LIMIT_S:
            raise SystemExit(f"{self.name}: not done after {LIMIT_S:.0f} s; see {self.folder}")

    def stop(self) -> None:
        """End all agents, and with them their workers."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for agent in self.agents:
                if agent.poll() is None:
                    os.killpg(agent.pid, number)
            deadline_s = time.monotonic() + 10
            while time.monotonic() < deadline_s and any(agent.poll() is None for agent in self.agents):
                time.sleep(0.05)


@dataclass
class Screen:
    """One live panel on a terminal, or a line for each thing that happens elsewhere."""

    console: Console
    steps: int
    title: str
    rows: dict[str, RunReport | None] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def tell(self, line: str) -> None:
        self.lines.append(line)
        if not self.console.is_terminal:
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def __rich__(self) -> Panel:
        table = Table.grid(padding=(0, 2))
        for name, report in self.rows.items():
            done = len(report.steps.step) if report else 0
            world = report.steps.world_size[-1] if report and done else 0
            loss = report.steps.loss[-1] if report and done else None
            table.add_row(
                name,
                ProgressBar(total=self.steps, completed=done, width=36),
                f"step {done} of {self.steps}",
                f"{world} replicas" if world else "starting",
                "" if loss is None else f"loss {loss:.3f}",
            )
        said = [Text(line) for line in self.lines[-9:]]
        return Panel(Group(table, Text(""), *said), title=self.title, padding=(1, 2))


def run_undisturbed(job: Job, screen: Screen) -> Iterator[None]:
    """Two replicas, from the first step to the last."""
    while any(agent.poll() is None for agent in job.agents):
        screen.rows[job.name] = job.report()
        yield


def run_disturbed(job: Job, screen: Screen) -> Iterator[None]:
    """Kill a process, add a replica, take it away, and tell what the job does about it."""
    told: set[float] = set()
    killed = joined = leaves = False
    grew_at = 0
    while any(agent.poll() is None for agent in job.agents):
        report = screen.rows[job.name] = job.report()
        yield
        if report is None or not report.steps.step:
            continue
        step, world = report.steps.step[-1], report.steps.world_size[-1]
        for incident in report.incidents:
            if incident.at_s not in told and incident.level != "none":  # it is being repaired
                told.add(incident.at_s)
                what = "repaired" if incident.kind == "failure" else "changed its size"
                lost = f"{incident.steps_lost} steps lost"
                screen.tell(f"   the job has {what} in {duration(incident.total_s)}, {lost}: {incident.cause}")
        if not joined and step >= job.steps // 10:
            joined = True
            job.start_node()
            screen.tell(f"step {step}: a third node starts, and will join when it is ready")
        if not killed and step >= job.steps // 5:
            killed = True
            process = report.ranks[1].processes[-1]
            os.kill(process.pid, signal.SIGKILL)
            screen.tell(f"step {step}: kill -9 {process.pid}, which is rank 1")
        grew_at = grew_at or (step if world == 3 else 0)
        if grew_at and not leaves and step >= min(grew_at + job.steps // 8, job.steps - 10):
            leaves = True
            os.kill(job.agents[2].pid, signal.SIGTERM)
            screen.tell(f"step {step}: SIGTERM to the third node, as before a preemption")


@contextmanager
def running(name: str, folder: Path, steps: int, nodes: str) -> Iterator[Job]:
    job = Job(name, folder, steps, nodes)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    job.address = f"127.0.0.1:{free_port()}"
    try:
        for _ in range(2):
            job.start_node()
        yield job
    finally:
        job.stop()


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--folder", type=Path, default=Path("runs/show_recovery"))
    args = parser.parse_args()
    console = Console()
    sys.stdout.reconfigure(line_buffering=True)  # also where a file or a pipe follows
    console.print(f"Two runs of the same training, about two minutes. Their output is in {args.folder}/*/*.log")
    screen = Screen(console, args.steps, "hyperpod: kill, heal, grow, shrink")
    stories = {"undisturbed": ("2:2", run_undisturbed), "disturbed": ("2:3", run_disturbed)}
    digests, report = {}, None
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the agents, too
    live = Live(screen, console=console, refresh_per_second=5, transient=False)
    with live if console.is_terminal else nullcontext():
        for name, (nodes, story) in stories.items():
            screen.tell(f"{name}: two replicas start")
            with running(name, args.folder / name, args.steps, nodes) as job:
                for _ in story(job, screen):
                    job.check()
                    time.sleep(0.25)
                job.check()
            report = screen.rows[name] = job.report()
            digests[name] = json.loads((job.folder / "digest.json").read_text())
    assert report is not None
    page = args.folder / "report.html"
    write_page(report, page)
    for label, value in headline_rows(report.headline):
        console.print(f"  {label}: {value}", highlight=False, soft_wrap=True)
    console.print("\nwhere the time of its ranks went", highlight=False)
    for each in report.categories:
        if each.seconds:
            console.print(f"  {each.label}: {duration(each.seconds)} ({each.share:.1%})", highlight=False)
    is_equal = digests["undisturbed"] == digests["disturbed"]
    console.print(
        f"\nparameters and optimizer state of the two runs: {'equal, bit for bit' if is_equal else 'DIFFERENT'}",
        f"\nthe disturbed run as a page: {page.absolute()}",
        highlight=False,
    )
    kinds = [each.kind for each in report.incidents]
    is_whole = "failure" in kinds and kinds.count("resize") >= 2
    if not is_whole:
        console.print("and not all was shown: the job has not lost a process, grown and shrunk", highlight=False)
    return 0 if is_equal and is_whole else 1


if __name__ == "__main__":
    sys.exit(main())
