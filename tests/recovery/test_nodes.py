"""Nodes that are lost and come back, with real agents: ours, and torchrun's own."""

import contextlib
import os
import signal
import socket
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from recovery.faults import HYPERPODRUN, PRELOAD, TORCHRUN, Job, left_processes, start

from hyperpod_plugins.elastic.rendezvous.store import RendezvousStore

PATIENCE_S = 100.0

pytestmark = pytest.mark.spawns


class Nodes:
    """Two nodes of two ranks on this machine; the first, which serves the store, has the ranks 0 and 1."""

    def __init__(self, folder, launcher, faults, args, script="ranks_transaction.py", environ=None):
        self.script, self.environ = script, environ or {}
        with socket.socket() as free:
            free.bind(("localhost", 0))
            self.port = free.getsockname()[1]
        self.folder, self.launcher, self.faults = folder, launcher, faults
        endpoint = (f"--rdzv-endpoint=localhost:{self.port}", "--rdzv-conf=keep_alive_interval=0.5")
        self.args = ("--nnodes=2", *endpoint, *args)
        self.agents = []
        self.outputs = []
        self.start("first")
        self.await_(
            self.has_arrived
        )  # otherwise, the second may be quicker, and the first would have the ranks 2 and 3
        self.start("second")

    def start(self, name):
        where = {"FAULTS_FOLDER": str(self.folder), **self.environ}
        self.outputs.append(self.folder / name)
        agent = start(
            self.script,
            self.folder / name,
            faults=self.faults,
            num_ranks=2,
            environ=where,
            args=self.args,
            launcher=self.launcher,
        )
        self.agents.append(agent)
        return agent

    def has_arrived(self):
        """Whether a node serves the store and is the first in line for a slot."""
        with contextlib.suppress(dist.DistError):
            store = dist.TCPStore("localhost", self.port, timeout=timedelta(seconds=1), wait_for_workers=False)
            return bool(RendezvousStore(store).candidates(0))
        return False

    def await_(self, condition):
        until_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < until_s, self.output()
            time.sleep(0.05)

    def replace(self, lost, name):
        """Once an agent has been killed, see that nothing of its node is left, and start it again."""
        self.await_(lambda: lost.poll() is not None)
        assert lost.returncode == -signal.SIGKILL, self.output()
        assert not left_processes(lost.mark, patience_s=10.0)
        return self.start(name)

    def output(self):
        return "\n".join(f"--- {path.name} ---\n{(path / 'output').read_text()[-6000:]}" for path in self.outputs)

    def end(self, *agents):
        for agent in agents:
            self.await_(lambda agent=agent: agent.poll() is not None)
        assert [agent.returncode for agent in agents] == [0] * len(agents), self.output()
        return Job(self.folder, 0, self.output())

    def clear(self):
        for agent in self.agents:
            agent.kill()
            agent.wait(10)
            for pid in left_processes(agent.mark, patience_s=0.0):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.fixture
def nodes(tmp_path):
    started = []

    def begin(launcher, faults, *args, name="nodes", **options):
        started.append(Nodes(tmp_path / name, launcher, faults, args, **options))
        return started[-1]

    yield begin
    for each in started:
        each.clear()


def processes(job):
    """Per rank, the incarnation of each process that there was."""
    return [[line["incarnation"] for line in lines] for lines in job.records("process")]


def check_equal(undisturbed, found):
    for rank, (wanted, result) in enumerate(zip(undisturbed.results(), found.results(), strict=True)):
        assert result["lr"] == wanted["lr"]
        assert result["state"].keys() == wanted["state"].keys()
        for name, value in result["state"].items():
            assert torch.equal(value, wanted["state"][name]), (rank, name, result["repairs"])
    for wanted, lines in zip(undisturbed.records("loss"), found.records("loss"), strict=True):
        by_step = {line["step"]: line for line in wanted}
        assert [line["step"] for line in lines] == sorted({line["step"] for line in lines})
        assert all(line == by_step[line["step"]] for line in lines)


def test_a_killed_node_comes_back_and_the_others_keep_their_processes(nodes, undisturbed):
    job = nodes(HYPERPODRUN, [["backward", 9, 3, "node"]], *PRELOAD)
    first, second = job.agents
    found = job.end(first, job.replace(second, "second-again"))
    assert processes(found) == [[0], [0], [0, 1], [0, 1]]
    check_equal(undisturbed, found)


def test_a_spare_replaces_a_node_that_fell_silent_and_that_ends_when_it_comes_back(nodes, undisturbed):
    job = nodes(HYPERPODRUN, [["backward", 9, 3, "freeze"]], *PRELOAD)
    job.start("spare")
    record = job.folder / "record-3.jsonl"
    job.await_(lambda: record.exists() and record.read_text().count('"process"') == 2)
    was_frozen = ["FAULT freeze" in (path / "output").read_text() for path in job.outputs]
    silent = job.agents[was_frozen.index(True)]
    for pid in left_processes(silent.mark, patience_s=0.0):
        os.kill(pid, signal.SIGCONT)
    found = job.end(*(agent for agent in job.agents if agent is not silent))
    job.await_(lambda: silent.poll() is not None)
    assert not left_processes(silent.mark, patience_s=10.0)
    assert processes(found) == [[0], [0], [0, 1], [0, 1]]
    check_equal(undisturbed, found)


def test_torchrun_ends_the_other_workers_of_a_node_and_none_of_other_nodes(nodes, undisturbed):
    job = nodes(TORCHRUN, [["backward", 7, 3, "kill"]], "--rdzv-backend=hyperpod", "--max-restarts=1")
    found = job.end(*job.agents)
    assert processes(found) == [[0], [0], [0, 1], [0, 1]]
    check_equal(undisturbed, found)
    assert "torchrun ended all workers of node 1" in found.results()[0]["repairs"][0]


def test_a_process_is_lost_whose_shards_are_gathered_in_two_stages(nodes):
    """The groups of both stages are formed again. Each shard exists once, so the job returns to a snapshot."""
    options = {"script": "ranks_lightning.py", "environ": {"LAYOUT": "nodes", "PATIENCE": "100"}}
    preload = ("--preload", "torch,torch.distributed.fsdp,lightning.pytorch,torchmetrics")
    jobs = []
    for name, faults in (("calm", []), ("disturbed", [["forward", 9, 3, "kill"], ["backward", 15, 0, "kill"]])):
        job = nodes(HYPERPODRUN, faults, *preload, name=name, **options)
        jobs.append(job.end(*job.agents))
    assert jobs[1].num_faults == 2
    for rank, (wanted, found) in enumerate(zip(*(job.results() for job in jobs), strict=True)):
        different = [name for name, value in wanted["state"].items() if not torch.equal(value, found["state"][name])]
        assert not different, (rank, different)
