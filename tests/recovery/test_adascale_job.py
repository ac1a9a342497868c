"""Elastic jobs with AdaScale: each gain is the one that one process finds by hand, and no fault counts a step twice."""

import pytest
import torch
from recovery.elastic_nodes import NUM_SAMPLES
from recovery.faults import run_job

from hyperpod_plugins.data import sample_order
from hyperpod_plugins.data.batch_split import Cursor
from hyperpod_plugins.elastic.scaling.batch import StepBatch

pytestmark = pytest.mark.spawns
PER_REPLICA, REFERENCE, MICRO_BATCH, NUM_STEPS = 13, 8, 4, 30
CLIP = 0.3
BATCH = StepBatch(samples_per_replica=PER_REPLICA, micro_batch_size=MICRO_BATCH)
OPTIONS = {
    "PER_REPLICA": str(PER_REPLICA),
    "REFERENCE": str(REFERENCE),
    "LR_SCALING": "adascale",
    "OPTIMIZER": "sgd",
    "CLIP": str(CLIP),
}


def parts_of(epoch, position, num_replicas, shards, batch=BATCH, num_samples=NUM_SAMPLES, seed=0):
    """Ids of each part of a step that begins there: of each replica, in each micro-step."""
    split = batch.split(num_replicas, shards)
    start = Cursor(epoch=epoch, position=position, step_start=position)
    parts = []
    for micro_step in split.walk(start, num_samples, drop_last=False):
        if micro_step.before.step_start != position:
            break
        for replica in range(num_replicas):
            shares = [split.share(micro_step, rank) for rank in range(replica * shards, (replica + 1) * shards)]
            order = [sample_order(each, num_samples=num_samples, seed=seed, epoch=epoch).tolist() for each in shares]
            parts.append([i for ids in order for i in ids])
    return parts


class Replay:
    """The same training in one process, without any of our code: AdaScale written down once more."""

    reference = REFERENCE

    def __init__(self):
        torch.manual_seed(1)
        layers = torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Dropout(0.0), torch.nn.Linear(32, 16)
        self.net = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 5, 0.9)
        self.count, self.variance, self.signal, self.worth = 0, 0.0, 0.0, 0.0
        self.gains, self.norms = [], []

    def loss(self, ids):
        x = torch.sin(torch.tensor(ids)[:, None] * torch.arange(1, 17) / 7.0)
        return (self.net(x) - x.flip(1)).square().mean()

    def step(self, parts):
        """Train on a step's parts; the learning rate."""
        gradients, sizes = [], [len(ids) for ids in parts if ids]
        for ids in filter(None, parts):
            gradients.append(torch.autograd.grad(self.loss(ids), list(self.net.parameters())))
        total = sum(sizes)
        means = [sum(n * g for n, g in zip(sizes, each, strict=True)) / total for each in zip(*gradients, strict=True)]
        of_mean = sum(float(mean.square().sum()) for mean in means)
        if len(sizes) > 1:
            apart = [sum(float((g - m).square().sum()) for g, m in zip(part, means, strict=True)) for part in gradients]
            of_sample = sum(size * each for size, each in zip(sizes, apart, strict=True)) / (len(sizes) - 1)
            self.count += 1
            new = max(1 / self.count, total / self.reference / 1000)
            self.variance += new * (of_sample / self.reference - self.variance)
            self.signal += new * (max(0.0, of_mean - of_sample / total) - self.signal)
        gain = (self.variance + self.signal) / (self.variance / (total / self.reference) + self.signal)
        self.gains.append(gain)
        self.norms.append(of_mean**0.5)
        for parameter, mean in zip(self.net.parameters(), means, strict=True):
            parameter.grad = mean * min(1.0, CLIP / (self.norms[-1] + 1e-6))
        (group,) = self.optimizer.param_groups
        own, group["lr"] = group["lr"], group["lr"] * gain
        self.optimizer.step()
        used, group["lr"] = group["lr"], own
        for _ in range(int(self.worth + gain) - int(self.worth)):
            self.scheduler.step()
        self.worth += gain
        return used


def run(folder, tokens, num_steps, faults=(), **environ):
    environ = {**OPTIONS, "SHARDS": "2", "TOKENS": str(tokens), "STEPS": str(num_steps), **environ}
    job = run_job("ranks_elastic.py", folder, num_ranks=4, faults=list(faults), environ=environ)
    assert job.code == 0, job.output[-8000:]
    assert job.num_faults == len(faults)
    return job


def test_two_replicas_of_two_shards(tokens, tmp_path):
    """Undisturbed it is what a single process does; killed, and begun again from a checkpoint, it ends the same."""
    calm = run(tmp_path / "calm", tokens, NUM_STEPS)
    replay, batch = Replay(), 2 * PER_REPLICA
    wanted = [replay.step(parts_of(0, position, 2, 2)) for position in range(0, NUM_SAMPLES, batch)]
    for entries in calm.records("step"):
        assert [entry["lr"] for entry in entries[: len(wanted)]] == pytest.approx(wanted, rel=1e-4)
    assert min(replay.norms) < CLIP < max(replay.norms)
    assert min(replay.gains[:-1]) > 1.0
    assert max(replay.gains) < batch / REFERENCE
    assert replay.gains[-1] < 1.0  # the last two samples of the epoch are less than a reference batch

    path = tmp_path / "checkpoint.ckpt"
    run(tmp_path / "first", tokens, 17, [("backward", 9, 1, "kill"), ("optimizer", 14, 2, "kill")], SAVE=str(path))
    again = run(tmp_path / "second", tokens, NUM_STEPS, [("forward", 23, 3, "kill")], RESUME=str(path))
    wanted = calm.results()
    for found, undisturbed in zip(again.results(), wanted, strict=True):
        assert undisturbed["rates"] == wanted[0]["rates"]
        assert (found["step"], found["rates"], found["lr"]) == (NUM_STEPS, undisturbed["rates"], undisturbed["lr"])
        assert found["state"].keys() == undisturbed["state"].keys()
        differing = [
            name for name, value in undisturbed["state"].items() if not torch.equal(found["state"][name], value)
        ]
        assert not differing


def test_grown_and_shrunk(nodes):
    """A replica alone learns from its micro-steps; joiners go on with what the others have learnt."""
    nodes.environ |= OPTIONS
    nodes.start("a")
    nodes.await_size(1)
    nodes.start("b")
    nodes.await_size(2)
    nodes.lose("b")
    nodes.await_size(1)
    num_steps = nodes.finish()
    steps, replay, epoch, position, sizes = nodes.steps(), Replay(), 0, 0, []
    assert sorted(steps) == list(range(num_steps))
    for step in range(num_steps):
        size = steps[step][0]["size"]
        sizes += [size] if sizes[-1:] != [size] else []
        wanted = replay.step(parts_of(epoch, position, size, 1))
        assert [entry["lr"] for entry in steps[step]] == [pytest.approx(wanted, rel=1e-3)] * len(steps[step]), step
        position += size * PER_REPLICA
        if position >= NUM_SAMPLES:
            epoch, position = epoch + 1, 0
    assert sizes == [1, 2, 1]
    found = torch.load(nodes.folder / "result-0.pt", weights_only=True)
    gains = found["rates"]["course"]["gains"]
    assert gains["num_estimates"] == replay.count
    assert gains["num_steps"] == pytest.approx(replay.worth, rel=1e-3)
    assert found["lr_factor"] == pytest.approx(replay.gains[-1], rel=1e-3)
