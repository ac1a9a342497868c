"""A job that grows and shrinks while it runs, with real agents of one rank each that come, go and are killed."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict

import numpy as np
import pytest
import torch
from recovery.faults import HYPERPODRUN, TORCHRUN, left_processes, run_job, start

from hyperpod_plugins.data import write_tokens

NUM_SAMPLES, BATCH = 600, 12
PATIENCE_S = 60.0

pytestmark = pytest.mark.spawns


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """A file whose samples of one token are their own ids."""
    path = tmp_path_factory.mktemp("tokens") / "ids"
    write_tokens(path, [np.arange(NUM_SAMPLES + 1)], vocab_size=NUM_SAMPLES + 1, progress=False)
    return path


class Nodes:
    """Agents of one job on this machine."""

    def __init__(self, folder, tokens, launcher=HYPERPODRUN, num_ranks=1):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            self.port = port = free.getsockname()[1]
        # Whoever comes before the program takes newcomers in makes all begin again, and waits for others like it.
        conf = f"--rdzv-conf=keep_alive_interval=0.2,last_call_timeout={2 if launcher == TORCHRUN else 0}"
        self.folder, self.launcher, self.num_ranks = folder, launcher, num_ranks
        self.args = ("--rdzv-backend=hyperpod", "--nnodes=1:4", f"--rdzv-endpoint=localhost:{port}", conf)
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

    def start(self, name):
        folder = self.folder / name
        options = {"num_ranks": self.num_ranks, "environ": self.environ, "args": self.args, "launcher": self.launcher}
        self.agents[name] = start("ranks_elastic.py", folder, **options)
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

    def steps(self):
        """What was written down of each step: a list of entries, one a rank."""
        found = defaultdict(list)
        for path in self.folder.glob("record-*.jsonl"):
            for line in path.read_text().splitlines():
                entry = json.loads(line)
                found[entry["step"]].append(entry)
        return found

    def hyperpod(self, *command):
        """What `hyperpod COMMAND` says, and its exit code."""
        environ = {**os.environ, "XDG_RUNTIME_DIR": str(self.folder)}
        argv = [sys.executable, "-m", "hyperpod_plugins.cli", *command]
        done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout + done.stderr

    def await_size(self, size):
        """Wait until the job has made ten steps at a size."""
        until_s = time.monotonic() + PATIENCE_S
        while True:
            steps = self.steps()
            latest = sorted(steps)[-10:]
            if len(latest) == 10 and all(entry["size"] == size for step in latest for entry in steps[step]):
                return
            assert time.monotonic() < until_s, f"never {size} ranks\n{self.output()}"
            time.sleep(0.1)

    def output(self):
        return "\n".join(path.read_text()[-6000:] for path in self.outputs)

    def finish(self):
        """End the job; how many steps it had."""
        num_steps = max(self.steps()) + 30
        written = self.folder / "stop.part"
        written.write_text(str(num_steps))
        written.rename(self.folder / "stop")
        for agent in self.agents.values():
            assert agent.wait(PATIENCE_S) == 0, self.output()
        return num_steps

    def clear(self):
        for name in list(self.agents):
            self.lose(name)


@pytest.fixture
def nodes(tmp_path, tokens):
    nodes = Nodes(tmp_path, tokens)
    yield nodes
    nodes.clear()


def samples_of(steps):
    """Ids in the order in which the job had them; the ranks of a step read one after the other."""
    return [
        [i for entry in sorted(steps[step], key=lambda e: e["rank"]) for i in entry["ids"]]
        for step in range(len(steps))
    ]


def test_grown_shrunk_and_grown_again(nodes, tokens, tmp_path_factory):
    nodes.start("a")
    nodes.await_store()  # it ends with its agent
    nodes.start("b")
    nodes.await_size(2)
    nodes.start("c")
    nodes.start("d")
    nodes.await_size(4)
    nodes.lose("b", "c", "d")
    nodes.await_size(1)
    nodes.start("e")
    nodes.start("f")
    nodes.await_size(3)
    num_steps = nodes.finish()

    environ = {"TOKENS": str(tokens), "STEPS": str(num_steps)}
    calm = run_job("ranks_elastic.py", tmp_path_factory.mktemp("calm"), num_ranks=1, environ=environ)
    assert calm.code == 0, calm.output[-8000:]
    fixed = {entry["step"]: entry for entry in calm.records("step", 1)[0]}
    steps = nodes.steps()
    assert sorted(steps) == list(range(num_steps))
    epochs = samples_of(steps)
    for step, ids in enumerate(epochs):  # the same samples in the same steps, whatever the number of ranks
        assert sorted(ids) == sorted(fixed[step]["ids"]), step
    flat = [i for ids in epochs for i in ids]
    for begin in range(0, len(flat) - NUM_SAMPLES + 1, NUM_SAMPLES):
        assert sorted(flat[begin : begin + NUM_SAMPLES]) == list(range(NUM_SAMPLES))
    for step, entries in steps.items():
        loss = sum(entry["loss"] for entry in entries)
        assert loss == pytest.approx(fixed[step]["loss"], rel=1e-3), step
    (wanted,) = calm.results(1)
    found = torch.load(nodes.folder / "result-0.pt", weights_only=True)
    assert found["lr"] == wanted["lr"]
    replicas = found["replicas"]
    assert [size for size in replicas if size in (2, 4, 1)][:3] == [2, 4, 1]
    assert replicas[-1] == 3
    for name, value in wanted["state"].items():
        torch.testing.assert_close(found["state"][name], value, rtol=1e-3, atol=1e-4)
    assert not left_processes("FAULTS_FOLDER=" + str(nodes.folder), patience_s=5.0)


def test_asked_for_from_a_shell(nodes):
    nodes.start("a")
    nodes.await_store()
    nodes.start("b")
    nodes.await_size(2)
    (ticket,) = (nodes.folder / "hyperpod").glob("*.ticket")
    assert ticket.stat().st_mode & 0o077 == 0
    assert nodes.hyperpod("scale", "--replicas", "1") == (
        0,
        "the job goes to 1 replicas, as soon as there are enough\n",
    )
    nodes.await_size(1)
    code, text = nodes.hyperpod("scale", "--replicas", "5")
    assert code == 2
    assert "5 replicas are not possible in this job; [1, 2, 3, 4] are" in text
    written = ticket.read_text()
    ticket.write_text(json.dumps(json.loads(written) | {"token": "guessed"}))
    code, text = nodes.hyperpod("scale", "--replicas", "2")
    assert code == 2
    assert "the request was not made with this job's ticket" in text
    ticket.write_text(written)
    assert nodes.hyperpod("scale", "--replicas", "2")[0] == 0
    nodes.await_size(2)  # by the process that took the evicted one's place, and waited
    assert "ranks 2, replicas 2, waiting 0, asked 2" in nodes.hyperpod("status")[1]
    num_steps = nodes.finish()
    assert not ticket.exists()
    steps = nodes.steps()
    assert sorted(steps) == list(range(num_steps))
    assert all(len(ids) == BATCH for ids in samples_of(steps))


def test_a_node_that_gets_notice_leaves_between_two_steps(nodes):
    nodes.start("a")
    nodes.await_store()
    nodes.start("b")
    nodes.await_size(2)
    leaving = nodes.agents.pop("b")
    leaving.send_signal(signal.SIGUSR1)
    assert leaving.wait(PATIENCE_S) == 0, nodes.output()
    nodes.await_size(1)
    nodes.agents["a"].send_signal(signal.SIGUSR2)  # which serves the store
    nodes.start("c")
    nodes.await_size(2)
    second = nodes.agents.pop("c")
    second.terminate()
    assert second.wait(PATIENCE_S) == 128 + signal.SIGTERM, nodes.output()
    nodes.await_size(1)
    num_steps = nodes.finish()
    steps = nodes.steps()
    assert sorted(steps) == list(range(num_steps))
    assert all(len(ids) == BATCH for ids in samples_of(steps))
    output = nodes.output()
    assert "repaired in" not in output  # nothing was lost
    assert "SIGUSR1: this node leaves the job, between two steps" in output
    assert "SIGUSR2: this node serves the store of the job, and cannot leave it" in output
    assert "1 processes have got notice: the job shrinks from 2 to 1" in output
    assert not left_processes(leaving.mark, patience_s=5.0) + left_processes(second.mark, patience_s=5.0)


def test_replicas_of_two_shards_under_torchrun(tmp_path, tokens):
    nodes = Nodes(tmp_path, tokens, TORCHRUN, num_ranks=2)
    try:
        nodes.start("a")
        nodes.await_store()
        nodes.start("b")
        nodes.await_size(4)
        nodes.lose("b")
        nodes.await_size(2)
        nodes.start("c")
        nodes.await_size(4)
        num_steps = nodes.finish()
    finally:
        nodes.clear()
    steps = nodes.steps()
    assert sorted(steps) == list(range(num_steps))
    assert all(len(ids) == BATCH for ids in samples_of(steps))
    epoch = [i for ids in samples_of(steps) for i in ids][:NUM_SAMPLES]
    assert sorted(epoch) == list(range(NUM_SAMPLES))


class Replay:
    """One process that trains on what the job was seen to train on, with learning rate and schedule by hand."""

    def __init__(self, reference, warmup):
        torch.manual_seed(1)
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 5, 0.9)
        self.reference, self.warmup, self.num_samples = reference, warmup, 0
        self.factor, self.way = 1.0, (0, 1.0, 1.0)

    def step(self, ids, num_replicas):
        """The loss, and the learning rate."""
        if num_replicas != self.way[2]:
            self.way = (self.num_samples, self.factor, float(num_replicas))
        begin, start, end = self.way
        self.factor = start + (end - start) * min(1.0, (self.num_samples - begin) / self.warmup)
        (group,) = self.optimizer.param_groups
        own, group["lr"] = group["lr"], group["lr"] * self.factor
        x = torch.sin(torch.tensor(ids)[:, None] * torch.arange(1, 17) / 7.0)
        loss = (self.net(x) - x.flip(1)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        used, group["lr"] = group["lr"], own
        before = self.num_samples // self.reference
        self.num_samples += len(ids)
        self.factor = start + (end - start) * min(1.0, (self.num_samples - begin) / self.warmup)
        for _ in range(self.num_samples // self.reference - before):
            self.scheduler.step()
        return float(loss.detach()), used


def test_a_batch_that_follows_the_world(nodes):
    per_replica, warmup = 7, 100
    nodes.environ |= {"PER_REPLICA": str(per_replica), "WARMUP": str(warmup), "STEP_S": "0.02"}
    nodes.start("a")
    nodes.await_store()
    nodes.start("b")
    nodes.await_size(2)
    second = next(entry["pid"] for entry in nodes.steps()[max(nodes.steps())] if entry["rank"] == 1)
    os.kill(second, signal.SIGKILL)
    until_s = time.monotonic() + PATIENCE_S
    while {e["pid"] for entries in nodes.steps().values() for e in entries if e["rank"] == 1} == {second}:
        assert time.monotonic() < until_s, nodes.output()
        time.sleep(0.1)
    nodes.lose("b")
    nodes.await_size(1)
    num_steps = nodes.finish()

    steps = nodes.steps()
    assert sorted(steps) == list(range(num_steps))
    replay, epoch, sizes = Replay(per_replica, warmup), [], []
    for step, entries in sorted(steps.items()):
        sizes += [len(entries)] if sizes[-1:] != [len(entries)] else []
        ids = [i for entry in sorted(entries, key=lambda e: e["rank"]) for i in entry["ids"]]
        left = NUM_SAMPLES - len(epoch)
        counted = sorted(set(ids))  # ranks that the end of an epoch leaves without a sample repeat another's
        assert len(counted) == min(per_replica * len(entries), left), step
        loss, lr = replay.step(counted, len(entries))
        assert [entry["lr"] for entry in entries] == [pytest.approx(lr, rel=1e-6)] * len(entries), step
        if len(ids) == len(counted):
            assert sum(entry["loss"] for entry in entries) / len(ids) == pytest.approx(loss, rel=1e-3), step
        epoch += counted
        if len(epoch) == NUM_SAMPLES:
            assert sorted(epoch) == list(range(NUM_SAMPLES))
            epoch = []
    assert sizes == [1, 2, 1]
    assert replay.num_samples > NUM_SAMPLES
    found = torch.load(nodes.folder / "result-0.pt", weights_only=True)
    assert found["lr"] == pytest.approx(replay.scheduler.get_last_lr()[0])
    assert found["lr_factor"] == pytest.approx(replay.factor)
    for name, value in replay.net.state_dict().items():
        torch.testing.assert_close(found["state"][f"net.{name}"], value, rtol=1e-3, atol=1e-4)
    assert "the global batch is 14 samples now, and was 7" in nodes.output()
