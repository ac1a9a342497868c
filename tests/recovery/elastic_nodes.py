"""Agents of one elastic job on this machine, which come, go and are killed; and what its program writes down."""

import contextlib
import json
import os
import signal
import socket
import time
from collections import defaultdict

import numpy as np
import pytest
import warm
from recovery.faults import HYPERPODRUN, TORCHRUN, left_processes, start

from hyperpod_plugins.data import sample_order, write_tokens

NUM_SAMPLES, BATCH = 600, 12
PATIENCE_S = 120.0


def write_ids(path):
    """A file whose samples of one token are their own ids."""
    write_tokens(path, [np.arange(NUM_SAMPLES + 1)], vocab_size=NUM_SAMPLES + 1, progress=False)
    return path


class Recorded:
    """Abstract job whose program, such as `ranks_elastic.py`, writes down each committed step in `folder`."""

    patience_s = PATIENCE_S

    def steps(self):
        """What was written down of each step: a list of entries, one a rank."""
        found = defaultdict(list)
        for path in self.folder.glob("record-*.jsonl"):
            for line in path.read_text().split("\n")[:-1]:  # the last one may be half written
                entry = json.loads(line)
                if entry["kind"] == "step":
                    found[entry["step"]].append(entry)
        for entries in found.values():
            entries.sort(key=lambda entry: entry.get("at_s", 0.0))
        return found

    def await_size(self, size, degrees=None):
        """Wait until the job has made ten steps at a size, with a shard and a tensor degree if these are given."""

        def fits(entry):
            return entry["size"] == size and (degrees is None or degrees == (entry["shards"], entry["tensors"]))

        until_s = time.monotonic() + self.patience_s
        while True:
            steps = self.steps()
            latest = sorted(steps)[-10:]
            if len(latest) == 10 and all(fits(last) for step in latest for last in steps[step][-1:]):
                return
            assert time.monotonic() < until_s, f"never {size} ranks, degrees {degrees}\n{self.output()}"
            time.sleep(0.1)

    def pid_of(self, rank):
        """The process that has written down the newest step of a rank."""
        steps = self.steps()
        return next(e["pid"] for step in sorted(steps, reverse=True) for e in steps[step] if e["rank"] == rank)

    def kill_rank(self, rank):
        """SIGKILL to a rank's process; returns when another has written down a step in its place."""
        pid = self.pid_of(rank)
        os.kill(pid, signal.SIGKILL)
        until_s = time.monotonic() + self.patience_s
        while self.pid_of(rank) == pid:
            assert time.monotonic() < until_s, f"nobody in the place of rank {rank}\n{self.output()}"
            time.sleep(0.1)

    def output(self):
        """What its processes have said."""
        raise NotImplementedError

    def stop(self, least=0):
        """Have all ranks stop after some more steps, and `least` in all; how many the job will have made by then."""
        num_steps = max(max(self.steps()) + 30, least)
        written = self.folder / "stop.part"
        written.write_text(str(num_steps))
        written.rename(self.folder / "stop")
        return num_steps


class Nodes(Recorded):
    """Agents of one job on this machine."""

    script = "ranks_elastic.py"

    def __init__(self, folder, tokens, launcher=HYPERPODRUN, num_ranks=1, endpoint="", nnodes="1:4", last_call_s=2):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            self.port = port = free.getsockname()[1]
        # Whoever comes before the program takes joiners in makes all begin again, and waits for others like it.
        conf = f"--rdzv-conf=keep_alive_interval=0.2,last_call_timeout={last_call_s}"
        self.folder, self.launcher, self.num_ranks = folder, launcher, num_ranks
        self.args = (
            "--rdzv-backend=hyperpod",
            f"--nnodes={nnodes}",
            f"--rdzv-endpoint={endpoint or f'localhost:{port}'}",
            conf,
        )
        if launcher == TORCHRUN:
            self.args += ("--max-restarts=5",)
        self.environ = {
            "FAULTS_FOLDER": str(folder),
            "TOKENS": str(tokens),
            "STEP_S": "0.05",
            "SHRINK_S": "2",
            "SHARDS": str(num_ranks),
            "XDG_RUNTIME_DIR": str(folder),
        }
        self.agents, self.outputs = {}, []

    def start(self, name, faults=(), args=(), prefix=()):
        folder = self.folder / name
        options = {
            "faults": faults,
            "num_ranks": self.num_ranks,
            "environ": self.environ,
            "args": (*self.args, *args),
            "prefix": prefix,
            "launcher": self.launcher,
        }
        self.agents[name] = start(self.script, folder, **options)
        self.outputs.append(folder / "output")

    def await_store(self):
        until_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < until_s:
            with contextlib.suppress(OSError), socket.create_connection(("localhost", self.port), timeout=1):
                return
            time.sleep(0.05)
        pytest.fail(f"nobody serves the store\n{self.output()}")

    def lose(self, *names):
        for name in names:
            agent = self.agents.pop(name)
            for pid in left_processes(agent.mark, patience_s=0.0):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            agent.wait(10)

    def hyperpod(self, *command):
        """What `hyperpod COMMAND` says, and its exit code."""
        code, output, errors = warm.hyperpod(command, 60, {"XDG_RUNTIME_DIR": str(self.folder)})
        return code, output + errors

    def output(self):
        return "\n".join(path.read_text()[-6000:] for path in self.outputs)

    def finish(self, least=0):
        """End the job after at least so many steps; how many it had."""
        num_steps = self.stop(least)
        for agent in self.agents.values():
            assert agent.wait(PATIENCE_S) == 0, self.output()
        return num_steps

    def go_through_sizes(self, *, kills_worker=False):
        """1, 2, 4, 1 and 3 ranks, with nodes killed on the way, and a worker if so said. How many steps it had."""
        self.start("a")
        self.await_size(1)  # it serves the store, so it comes first and is not lost
        self.start("b")
        self.await_size(2)
        if kills_worker:
            self.kill_rank(1)
        self.start("c")
        self.start("d")
        self.await_size(4)
        self.lose("b", "c", "d")
        self.await_size(1)
        self.start("e")
        self.start("f")
        self.await_size(3)
        return self.finish()

    def go_through_requests(self):
        """`hyperpod scale` to each of 1 to 4 replicas, on two agents of two ranks; how many steps it had."""
        self.start("a")
        self.await_store()
        self.start("b")
        self.await_size(4)
        for size in (1, 3, 2, 4):
            self.scale(size)
        return self.finish()

    def scale(self, size):
        code, text = self.hyperpod("scale", "--replicas", str(size))
        assert code == 0, text
        self.await_size(size)

    def clear(self):
        for name in list(self.agents):
            self.lose(name)


def samples_of(steps):
    """Ids in the order in which the job had them; the ranks of a step read one after the other."""
    return [
        [i for entry in sorted(steps[step], key=lambda e: e["rank"]) for i in entry["ids"]]
        for step in range(len(steps))
    ]


def assert_whole_steps(steps, num_steps):
    """Each step was made, and had its global batch."""
    assert sorted(steps) == list(range(num_steps))
    other = [step for step, ids in enumerate(samples_of(steps)) if len(ids) != BATCH]
    assert not other, "\n".join(json.dumps(entry) for step in other for entry in steps[step])


def assert_each_once(ids):
    """Each whole epoch has each sample once."""
    for begin in range(0, len(ids) - NUM_SAMPLES + 1, NUM_SAMPLES):
        assert sorted(ids[begin : begin + NUM_SAMPLES]) == list(range(NUM_SAMPLES))


def fill_unwritten(steps, at_most):
    """Put in what ranks killed after they had committed a step did not write down; the steps with such gaps."""
    found = [step for step, entries in steps.items() if len(entries) < entries[0]["size"]]
    for step in found:
        epoch, begin = divmod(step * BATCH, NUM_SAMPLES)
        wanted = sample_order(range(begin, begin + BATCH), num_samples=NUM_SAMPLES, seed=0, epoch=epoch).tolist()
        written = [i for entry in steps[step] for i in entry["ids"]]
        assert set(written) < set(wanted), step
        steps[step].append({"rank": 99, "ids": [i for i in wanted if i not in written]})
    assert len(found) <= at_most
    return found


def assert_whole_but_for_losses(steps, num_steps, num_losses):
    """Each step was made, and had its global batch, but for what who was lost had not written down, or not told.

    A rank may be lost when it has committed a step and not yet written that down, or when it has written it down and
    nobody else knows of it: then the others have done it again.
    """
    undone = 0
    for step, entries in steps.items():
        steps[step] = [entry for entry in entries if entry["size"] == entries[-1]["size"]]
        undone += len(steps[step]) < len(entries)
    fill_unwritten(steps, at_most=num_losses - undone)
    assert_whole_steps(steps, num_steps)
