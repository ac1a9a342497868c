"""One `hyperpodrun` with real workers: tiny scripts that know the job store and nothing else of this package."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import uuid

import warm
from recovery.faults import left_processes

from hyperpod_plugins.elastic import JobStore
from hyperpod_plugins.env import JobEnv

START_S = 150.0
WORKER = """
import os, signal, sys, time
from hyperpod_plugins.elastic import JobStore
from hyperpod_plugins.elastic.launcher.round import worker_environ
from hyperpod_plugins.env import JobEnv
began_s = time.time()
job, rank = JobEnv.from_environ(), int(os.environ["RANK"])
job_store = JobStore.connect(job)
if "UNARMED" not in os.environ:
    job_store.arm()
    job_store.set("begun", b"1")
def say(*words):
    line = " ".join(map(str, ("@", rank, job.incarnation, *words)))
    os.write(1, (line + chr(10)).encode())  # at once: others write to the same place
def wait(name, timeout_s=60):
    until_s = time.time() + timeout_s
    while job_store.try_get(name) is None:
        if time.time() > until_s:
            sys.exit(3)
        time.sleep(0.01)
signal.signal(signal.SIGUSR1, lambda *_: say("noticed"))
say("here", os.getpid(), began_s, os.environ["HYPERPOD_STORE"], job.run_id)
"""


class Job:
    """One `hyperpodrun`, what it has printed, and the processes that belong to it."""

    is_warm = True
    """Whether Python and torch are there already; see `warm`."""

    def __init__(self, folder, script, *options, environ=None, python=True):
        self.mark = f"test-{uuid.uuid4().hex}"
        self.out = folder / f"{self.mark}.out"
        path = folder / f"{self.mark}.py"
        path.write_text(WORKER + textwrap.dedent(script))
        variables = {**os.environ, "JOB_MARK": self.mark, "OMP_NUM_THREADS": "1", **(environ or {})}
        args = ["--preload", "torch", *options, str(path)]
        if self.is_warm:
            self.agent = warm.start(args, variables, self.out, folder)
            return
        command = [sys.executable, "-m", "hyperpod_plugins.elastic.launcher.main", *args]
        with self.out.open("w") as out:
            self.agent = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=folder, env=variables)

    def text(self):
        return self.out.read_text()

    def said(self, word="here"):
        """(rank, incarnation) -> the rest of the line that holds `word`."""
        found = re.findall(r"@ (\d+) (\d+) (\w+)(.*)", self.text())
        return {(int(rank), int(number)): rest.split() for rank, number, said, rest in found if said == word}

    def await_(self, condition, timeout_s=START_S):
        until_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < until_s, self.text()
            assert self.agent.poll() is None or condition(), self.text()
            time.sleep(0.005)

    def await_here(self, *processes):
        self.await_(lambda: set(processes) <= set(self.said()))
        return {each: int(said[0]) for each, said in self.said().items()}

    def job_store(self):
        _, _, store, run_id = next(iter(self.said().values()))
        return JobStore.connect(JobEnv.from_environ({"HYPERPOD_STORE": store, "HYPERPOD_RUN_ID": run_id}))

    def code(self, timeout_s=START_S):
        try:
            return self.agent.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.text()) from None

    def processes(self):
        """Live processes that inherited the mark of this job."""
        return left_processes(self.mark, 0.0)

    def await_nobody(self, timeout_s=10.0):
        until_s = time.monotonic() + timeout_s
        while left := self.processes():
            assert time.monotonic() < until_s, left
            time.sleep(0.02)

    def clear(self):
        self.agent.kill()
        self.agent.wait(10)
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
