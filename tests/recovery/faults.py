# ruff: noqa: E402 (the path to what is imported)
"""Faults at chosen points of a program that `hyperpodrun` starts, and the jobs of this folder.

A fault is `[point, step, rank, action]`, with rank -1 for the first that comes there. It happens once in a job, whoever
is in the rank's place then: a file remembers it. Actions: `kill`, `term`, `segfault`, `stop` (signals), `exit` (with
code 3), `raise` (once), `always` (raise, every time), `break` (cut all connections), `interrupt` (the same, and a
collective, which raises outside a step), `pause N` (SIGSTOP, and SIGCONT N seconds later), `sleep N`, `deaf N` (the
same, and SIGTERM is ignored), `kill in N` (SIGKILL N seconds later), `node` (SIGKILL for the agent of this rank's
node), `freeze` (SIGSTOP for all processes of this node). `CLOCK_SHIFTS` in the environment sets the clocks of ranks.
`JITTER_S` has every tenth point take up to so many seconds longer, at random, so that ranks stand at other places when
a fault comes: `JITTER_S=0.4 pytest tests/recovery/test_kill.py`, a few times, finds what only a busy machine shows.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

HERE = Path(__file__).parent
if str(HERE.parent) not in sys.path:  # in a rank, which runs a script of this folder
    sys.path.append(str(HERE.parent))

import warm
from device import ACCELERATOR as ACCELERATOR
from device import DEVICE as DEVICE
from device import devices as devices
from device import install_transport
from device import own_device as own_device

install_transport()
HYPERPODRUN = warm.HYPERPODRUN
TORCHRUN = "torch.distributed.run"
PRELOAD = ("--preload", "torch,torch.distributed.fsdp")
"""For programs without Lightning, which takes seconds to import."""


SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "segfault": signal.SIGSEGV, "stop": signal.SIGSTOP}


class Transient(RuntimeError):
    """What a fault raises."""


class Faults:
    """The faults of this rank, from the environment of the job."""

    def __init__(self):
        self.rank = int(os.environ["RANK"])
        self.folder = Path(os.environ["FAULTS_FOLDER"])
        shift_s = json.loads(os.environ.get("CLOCK_SHIFTS", "{}")).get(str(self.rank), 0.0)
        if shift_s:  # as if this rank ran on another machine
            now, time.time = time.time, lambda: now() + shift_s
        self._jitter_s, self._random = float(os.environ.get("JITTER_S", "0")), random.Random(os.urandom(8))
        self.faults = [fault for fault in json.loads(os.environ.get("FAULTS", "[]")) if fault[2] in (self.rank, -1)]

    def at(self, point, step):
        """Something may happen here."""
        if self._jitter_s and self._random.random() < 0.1:
            time.sleep(self._jitter_s * self._random.random() ** 2)
        for fault in self.faults:
            name, when, _, action = fault
            if name != point or when != step:
                continue
            if action == "always":
                raise Transient(f"fault at {point} of step {step}")
            if not self._is_first("-".join(map(str, fault))):
                continue
            print(f"FAULT {action} at {point} of step {step} on rank {self.rank}", flush=True)
            if action == "node":
                os.kill(agent_pid(), signal.SIGKILL)
                time.sleep(60)
            if action == "freeze":
                freeze(os.environ["JOB_MARK"])
            if action.startswith("sleep"):
                time.sleep(float(action.removeprefix("sleep")))
            if action.startswith("deaf"):
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                time.sleep(float(action.removeprefix("deaf")))
            if action.startswith("kill in"):
                threading.Timer(float(action.removeprefix("kill in")), os.kill, (os.getpid(), signal.SIGKILL)).start()
            if action.startswith("pause"):
                pause(float(action.removeprefix("pause")))
            if action in SIGNALS:
                os.kill(os.getpid(), SIGNALS[action])
            if action == "exit":
                os._exit(3)
            if action == "raise":
                raise Transient(f"fault at {point} of step {step}")
            if action in ("break", "interrupt"):
                from hyperpod_plugins.comm import break_groups

                break_groups("a test cuts the connections")
            if action == "interrupt":
                import torch.distributed as dist

                dist.barrier()

    def _is_first(self, name):
        try:
            (self.folder / f"fault-{name}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def note(self, **values):
        """A line of this rank's record, which outlives the process."""
        with (self.folder / f"record-{self.rank}.jsonl").open("a") as file:
            file.write(json.dumps(values) + "\n")


def noticed(optimizer_class, notice):
    """A class of torch's optimizers that calls `notice` where its step begins to write, for its one group.

    A hook of the optimizer would not do: with one, the step comes before the vote, and this is about steps after it.
    """

    def _init_group(self, *args, **kwargs):
        notice()
        return optimizer_class._init_group(self, *args, **kwargs)

    return type(optimizer_class.__name__, (optimizer_class,), {"_init_group": _init_group})


def agent_pid():
    """The agent of this process: its parent under torchrun, the parent of its fork server under hyperpodrun."""
    parent = os.getppid()
    if "HYPERPOD_AGENT_PID" in os.environ:
        return parent
    return int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])


def freeze(mark):
    """Stop all processes with a mark: no connection breaks, and no more is heard of them, as of a machine unplugged."""
    for pid in sorted(left_processes(mark, patience_s=0.0), key=lambda pid: pid == os.getpid()):
        os.kill(pid, signal.SIGSTOP)


def pause(seconds):
    """Stop this process for a while: it says nothing meanwhile, and its connections stay."""
    wake = ["/bin/sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"]
    quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    subprocess.Popen(wake, env={}, start_new_session=True, **quiet)  # it may outlive the job, so it has no mark of it
    os.kill(os.getpid(), signal.SIGSTOP)


class Job:
    """What a job left behind."""

    def __init__(self, folder, code, output, agent_pid=None):
        self.folder, self.code, self.output, self.agent_pid = folder, code, output, agent_pid

    @property
    def num_faults(self):
        return len(list(self.folder.glob("fault-*")))

    def records(self, kind, num_ranks=4):
        """Lines of one kind that each rank wrote, in order."""
        found = []
        for rank in range(num_ranks):
            path = self.folder / f"record-{rank}.jsonl"
            lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
            found.append([line for line in lines if line["kind"] == kind])
        return found

    def results(self, num_ranks=4):
        import torch

        paths = [self.folder / f"result-{rank}.pt" for rank in range(num_ranks)]
        missing = [path.name for path in paths if not path.exists()]
        assert not missing, f"{missing}\n{self.output[-12000:]}"
        return [torch.load(path, weights_only=True) for path in paths]


def start(script, folder, *, faults=(), num_ranks=4, environ=None, args=(), launcher=HYPERPODRUN, prefix=(), cwd=None):
    """Start a job, with the words of `prefix` before its command; its output goes to `folder/output`."""
    folder.mkdir(parents=True, exist_ok=True)
    mark = f"job-{uuid.uuid4().hex}"
    options = ["--nproc-per-node", str(num_ranks), *args, str(HERE / script)]
    variables = {
        **os.environ,
        "JOB_MARK": mark,
        "OMP_NUM_THREADS": "1",
        "FAULTS": json.dumps(list(faults)),
        "FAULTS_FOLDER": str(folder),
        **(environ or {}),
    }
    if launcher == HYPERPODRUN and not prefix:
        agent = warm.start(options, variables, folder / "output", cwd)
    else:
        command = [*prefix, sys.executable, "-m", launcher, *options]
        with (folder / "output").open("w") as output:
            agent = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=variables, cwd=cwd)
    agent.mark = mark
    return agent


def run_job(script, folder, *, timeout_s=100.0, **options):
    """Run a job to its end, and make sure that it leaves no process."""
    agent = start(script, folder, **options)
    output = folder / "output"
    try:
        code = agent.wait(timeout_s)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"no end after {timeout_s} s\n{output.read_text()[-12000:]}") from None
    finally:
        agent.kill()
        agent.wait(10)
        left = left_processes(agent.mark, patience_s=5.0)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert not left, f"the job left processes: {left}"
    return Job(folder, code, output.read_text(), agent.pid)


def left_processes(mark, patience_s):
    """Live processes that inherited the mark of a job, once they had some time to go."""
    deadline_s = time.monotonic() + patience_s
    while True:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and warm.has_mark(entry, mark):
                found.append(int(entry.name))
        if not found or time.monotonic() > deadline_s:
            return found
        time.sleep(0.05)
