"""A job that grows and shrinks while it runs, with real agents of one rank each that come, go and are killed."""

import json
import signal
import time

import pytest
import torch
from recovery.elastic_nodes import (
    BATCH,
    NUM_SAMPLES,
    PATIENCE_S,
    Nodes,
    assert_each_once,
    assert_whole_but_for_losses,
    assert_whole_steps,
    fill_unwritten,
    samples_of,
)
from recovery.faults import TORCHRUN, left_processes, run_job

from hyperpod_plugins.data import sample_order

pytestmark = pytest.mark.spawns


@pytest.mark.gpu
def test_grown_shrunk_and_grown_again(nodes, tokens, tmp_path_factory):
    """With activations offloaded. Then a worker is lost while all test: they begin again, past the training."""
    nodes.args = (*nodes.args, "--rdzv-conf=keep_alive_interval=0.2,last_call_timeout=5")  # they meet once more
    nodes.environ |= {"TEST": "1", "OFFLOAD": "1", "LOGS_BEFORE": "1", "FAULTS": json.dumps([["test", 1, 1, "kill"]])}
    num_steps = nodes.go_through_sizes()

    environ = {"TOKENS": str(tokens), "STEPS": str(num_steps)}
    calm = run_job("ranks_elastic.py", tmp_path_factory.mktemp("calm"), num_ranks=1, environ=environ)
    assert calm.code == 0, calm.output[-8000:]
    fixed = {entry["step"]: entry for entry in calm.records("step", 1)[0]}
    steps = nodes.steps()
    assert sorted(steps) == list(range(num_steps))
    unwritten = fill_unwritten(steps, at_most=3)  # one for each rank that was killed
    epochs = samples_of(steps)
    for step, ids in enumerate(epochs):  # the same samples in the same steps, whatever the number of ranks
        assert sorted(ids) == sorted(fixed[step]["ids"]), step
    assert_each_once([i for ids in epochs for i in ids])
    for step, entries in steps.items():
        if step in unwritten:
            continue
        loss = sum(entry["loss"] for entry in entries)
        assert loss == pytest.approx(fixed[step]["loss"], rel=1e-3), step
    assert_means_are_kept_in_growth(steps, unwritten)
    (wanted,) = calm.results(1)
    found = torch.load(nodes.folder / "result-0.pt", weights_only=True)
    assert found["lr"] == wanted["lr"]
    assert (nodes.folder / "fault-test-1-1-kill").exists()
    tested = [nodes.folder / f"record-{rank}.jsonl" for rank in range(3)]
    ends = [json.loads(path.read_text().splitlines()[-1]) for path in tested]
    assert {(end["kind"], end["step"], end["value"]) for end in ends} == {("test", num_steps, ends[0]["value"])}
    replicas = found["replicas"]
    assert [size for size in replicas if size in (2, 4, 1)][:3] == [2, 4, 1]
    assert replicas[-1] == 3
    for name, value in wanted["state"].items():
        torch.testing.assert_close(found["state"][name], value, rtol=1e-3, atol=1e-4)
    assert not left_processes("FAULTS_FOLDER=" + str(nodes.folder), patience_s=5.0)


def assert_means_are_kept_in_growth(steps, unwritten):
    """The ranks' parts of an epoch's mean hold all samples of the epoch so far, as long as no rank has left in it."""
    num_checked = size = num_samples = 0
    for step in sorted(steps):
        former, size = size, steps[step][-1]["size"]
        if step % (NUM_SAMPLES // BATCH) == 0:
            num_samples, has_grown, has_shrunk = 0, False, False
        elif size != former:
            has_grown, has_shrunk = has_grown or size > former, has_shrunk or size < former
        num_samples += BATCH
        if not has_shrunk and step not in unwritten:
            assert sum(entry["num_in_mean"] for entry in steps[step]) == num_samples, step
            num_checked += has_grown
    assert num_checked


def test_asked_for_from_a_shell_to_every_size(nodes):
    """With an ordinary DataLoader."""
    nodes.environ |= {"ORDINARY": "1"}
    nodes.num_ranks = 2
    nodes.start("a")
    nodes.await_store()
    nodes.start("b")
    nodes.await_size(4)
    (ticket,) = (nodes.folder / "hyperpod").glob("*.ticket")
    assert ticket.stat().st_mode & 0o077 == 0
    assert nodes.hyperpod("scale", "--replicas", "1") == (
        0,
        "the job goes to 1 replicas, as soon as there are enough\n",
    )
    nodes.await_size(1)
    nodes.scale(3)
    code, text = nodes.hyperpod("scale", "--replicas", "5")
    assert code == 2
    assert "5 replicas are not possible in this job; [1, 2, 3, 4] are" in text
    written = ticket.read_text()
    ticket.write_text(json.dumps(json.loads(written) | {"token": "guessed"}))
    code, text = nodes.hyperpod("scale", "--replicas", "2")
    assert code == 2
    assert "the request was not made with this job's ticket" in text
    ticket.write_text(written)
    nodes.scale(2)
    nodes.scale(4)  # with the processes that took the evicted ones' places, and waited
    said = nodes.hyperpod("status")[1].splitlines()[0]  # others follow, one for each rank
    assert "4 ranks in 4 replicas (shard degree 1, tensor degree 1), generation " in said
    assert said.endswith("; 4 replicas requested")
    assert "waiting" not in said
    num_steps = nodes.finish()
    assert not ticket.exists()
    steps = nodes.steps()
    assert_whole_steps(steps, num_steps)
    assert_each_once([i for ids in samples_of(steps) for i in ids])


def test_a_node_that_gets_notice_leaves_between_two_steps(nodes):
    """With two ordinary DataLoaders in a `CombinedLoader`, in which Lightning keeps those of the present world."""
    nodes.environ |= {"ORDINARY": "2"}
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
    assert_whole_steps(steps, num_steps)
    output = nodes.output()
    assert "repaired in" not in output  # nothing was lost
    assert "SIGUSR1: this node leaves the job, between two steps" in output
    assert "SIGUSR2: this node serves the store of the job, and cannot leave it" in output
    assert "1 process has got notice: the job shrinks from 2 to 1" in output
    assert not left_processes(leaving.mark, patience_s=5.0) + left_processes(second.mark, patience_s=5.0)


def test_a_node_that_comes_just_before_the_first_step(nodes):
    """All begin again, and a process that hears of it too late has not made a step meanwhile."""
    nodes.start("a", faults=[["setup", 0, 0, "deaf 5"]], args=("--shutdown-timeout=8",))
    until_s = time.monotonic() + PATIENCE_S
    while not (nodes.folder / "fault-setup-0-0-deaf 5").exists():
        assert time.monotonic() < until_s, nodes.output()
        time.sleep(0.05)
    nodes.start("b")
    nodes.await_size(2)
    num_steps = nodes.finish()
    assert_whole_steps(nodes.steps(), num_steps)


def test_a_rank_that_is_lost_as_an_epoch_begins_after_one_that_a_limit_has_ended(tmp_path, tokens):
    num_steps, per_epoch = 30, NUM_SAMPLES // BATCH // 2
    environ = {"TOKENS": str(tokens), "STEPS": str(num_steps), "LIMIT": "0.5"}
    job = run_job(
        "ranks_elastic.py", tmp_path, faults=[["forward", per_epoch, 1, "kill"]], num_ranks=2, environ=environ
    )
    assert job.code == 0, job.output[-8000:]
    records = job.records("step", 2)
    for step in range(num_steps):
        epoch, begin = step // per_epoch, step % per_epoch * BATCH
        wanted = sample_order(range(begin, begin + BATCH), num_samples=NUM_SAMPLES, seed=0, epoch=epoch).tolist()
        found = [i for rank in records for each in rank if each["step"] == step for i in each["ids"]]
        assert sorted(found) == sorted(wanted), step


def test_a_dataset_that_the_program_changes_is_refused(tmp_path, tokens):
    """What reading changes is not; a process that joins has no predecessor, and would read other samples."""
    environ = {"TOKENS": str(tokens), "STEPS": "60", "LIMIT": "0.5", "ORDINARY": "1", "RAISE_LEVEL": "1"}
    job = run_job("ranks_elastic.py", tmp_path, num_ranks=2, environ=environ)
    assert job.code != 0
    assert "dataset.level" in job.output, job.output[-8000:]
    assert "num_reads" not in job.output
    assert "are not sent in a job that changes its size" in job.output
    assert len({each["step"] for each in job.records("step", 2)[0]}) == 2 * (NUM_SAMPLES // BATCH // 2)


def test_increments(nodes):
    """One replica or three: a second node waits for a third, and is left out with it."""
    nodes.environ |= {"MAX_REPLICAS": "3", "INCREMENT": "2"}
    nodes.start("a")
    nodes.await_size(1)  # two that begin together are refused
    nodes.start("b")
    nodes.start("c")
    nodes.await_size(3)
    nodes.lose("c")
    nodes.await_size(1)
    num_steps = nodes.finish()
    steps = nodes.steps()
    assert sorted(steps) == list(range(num_steps))
    fill_unwritten(steps, at_most=1)
    assert {entries[0]["size"] for entries in steps.values()} == {1, 3}
    assert_each_once([i for ids in samples_of(steps) for i in ids])


@pytest.mark.variant
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
    assert_whole_but_for_losses(steps, num_steps, num_losses=1)
    epoch = [i for ids in samples_of(steps) for i in ids][:NUM_SAMPLES]
    assert sorted(epoch) == list(range(NUM_SAMPLES))


@pytest.mark.variant
def test_replicas_whose_ranks_share_sequences(tmp_path, tokens, tmp_path_factory):
    """A replica joins, a worker is killed, the replica is lost for good, and another one joins."""
    options = {"SHARDS": "2", "CONTEXTS": "2", "OPTIMIZER": "sgd"}
    nodes = Nodes(tmp_path, tokens, num_ranks=2)
    nodes.environ |= options
    try:
        nodes.start("a")
        nodes.await_size(2)
        nodes.start("b")
        nodes.await_size(4)
        nodes.kill_rank(1)
        nodes.lose("b")
        nodes.await_size(2)
        nodes.start("c")
        nodes.await_size(4)
        num_steps = nodes.finish()
    finally:
        nodes.clear()
    environ = {"TOKENS": str(tokens), "STEPS": str(num_steps), **options}
    calm = run_job("ranks_elastic.py", tmp_path_factory.mktemp("calm"), num_ranks=2, environ=environ)
    assert calm.code == 0, calm.output[-8000:]
    fixed = {entry["step"]: entry for entry in calm.records("step", 2)[0]}
    steps = nodes.steps()
    assert sorted(steps) == list(range(num_steps))
    for step, entries in steps.items():
        if len(entries) < entries[0]["size"]:
            continue  # a rank was lost before it had written it down
        assert sorted(i for entry in entries for i in entry["ids"]) == sorted(2 * fixed[step]["ids"]), step
        loss = sum(entry["loss"] for entry in entries) / 2
        assert loss == pytest.approx(fixed[step]["loss"], rel=1e-3), step


class Replay:
    """One process that trains on what the job was seen to train on, with learning rate and schedule by hand."""

    def __init__(self, reference, warmup):
        torch.manual_seed(1)
        layers = torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Dropout(0.0), torch.nn.Linear(32, 16)
        self.net = torch.nn.Sequential(*layers)
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
    nodes.await_size(1)
    nodes.start("b")
    nodes.await_size(2)
    nodes.kill_rank(1)
    nodes.lose("b")
    nodes.await_size(1)
    num_steps = nodes.finish(least=NUM_SAMPLES // per_replica + 10)  # more than one epoch, however fast it has grown

    steps = nodes.steps()
    assert sorted(steps) == list(range(num_steps))
    replay, epoch, position, sizes, num_unwritten = Replay(per_replica, warmup), 0, 0, [], 0
    for step, entries in sorted(steps.items()):
        size = entries[0]["size"]
        sizes += [size] if sizes[-1:] != [size] else []
        end = min(position + per_replica * size, NUM_SAMPLES)
        wanted = sample_order(range(position, end), num_samples=NUM_SAMPLES, seed=0, epoch=epoch).tolist()
        ids = [i for entry in entries for i in entry["ids"]]
        if len(entries) == size:  # ranks that the end of an epoch leaves without a sample repeat another's
            assert set(ids) == set(wanted), step
        else:  # one was killed when it had committed the step, and had not yet written that down
            assert set(ids) < set(wanted), step
            num_unwritten += 1
        loss, lr = replay.step(wanted, size)
        assert [entry["lr"] for entry in entries] == [pytest.approx(lr, rel=1e-6)] * len(entries), step
        if len(ids) == len(wanted):
            assert sum(entry["loss"] for entry in entries) / len(ids) == pytest.approx(loss, rel=1e-3), step
        epoch, position = (epoch + 1, 0) if end == NUM_SAMPLES else (epoch, end)
    assert sizes == [1, 2, 1]
    assert num_unwritten <= 2
    assert epoch > 0
    found = torch.load(nodes.folder / "result-0.pt", weights_only=True)
    assert found["lr"] == pytest.approx(replay.scheduler.get_last_lr()[0])
    assert found["lr_factor"] == pytest.approx(replay.factor)
    for name, value in replay.net.state_dict().items():
        torch.testing.assert_close(found["state"][f"net.{name}"], value, rtol=1e-3, atol=1e-4)
    assert "the global batch is 14 samples now, and was 7" in nodes.output()
