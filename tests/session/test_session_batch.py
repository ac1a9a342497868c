"""A loop whose batch follows the world, with AdaScale, and in reproducible mode: agents that come and are killed."""

import pytest
import torch
from recovery.faults import PRELOAD, run_job
from recovery.test_adascale_job import Replay, parts_of
from session.program_loop import WIDTH, Net
from session.test_session_resize import LoopNodes

from hyperpod_plugins.data import sample_order
from hyperpod_plugins.elastic.scaling.batch import StepBatch

NUM_SAMPLES, PER_REPLICA, REFERENCE, WARMUP = 121, 7, 5, 60
SCRIPT = LoopNodes.script
FOLLOWING = {
    "PER_REPLICA": str(PER_REPLICA),
    "REFERENCE": str(REFERENCE),
    "SAMPLES": str(NUM_SAMPLES),
    "REPLICAS": "4",
}
ADASCALE = FOLLOWING | {"LR_SCALING": "adascale", "OPTIMIZER": "sgd"}
pytestmark = pytest.mark.spawns


@pytest.fixture
def nodes(tmp_path):
    nodes = LoopNodes(tmp_path, "")
    nodes.environ |= {"SHARDS": "1"}
    nodes.args += PRELOAD
    yield nodes
    nodes.clear()


def grow_and_shrink(nodes):
    """One replica, two, and one again; how many steps the job had."""
    nodes.start("a")
    nodes.await_size(1)
    nodes.start("b")
    nodes.await_size(2)
    nodes.lose("b")
    nodes.await_size(1)
    num_steps = nodes.finish()
    assert sorted(nodes.steps()) == list(range(num_steps))
    return num_steps


def walk(nodes, num_steps):
    """Epoch, position, number of replicas and entries of each step, whose samples are checked."""
    steps, epoch, position, sizes = nodes.steps(), 0, 0, []
    for step in range(num_steps):
        size = next(entry["size"] for entry in steps[step] if entry["rank"] == 0)
        sizes += [size] if sizes[-1:] != [size] else []
        num_samples = min(size * PER_REPLICA, NUM_SAMPLES - position)
        read = range(position, position + num_samples)
        wanted = sample_order(read, num_samples=NUM_SAMPLES, seed=5, epoch=epoch).tolist()
        found = [i for entry in steps[step] for i in entry["ids"]]
        assert set(found) <= set(wanted)
        if len(steps[step]) == size:  # a rank that was killed may not have written its part
            assert set(found) == set(wanted)
            assert len(found) == num_samples or num_samples < size * PER_REPLICA
        yield epoch, position, size, steps[step], num_samples
        position += num_samples
        if position == NUM_SAMPLES:
            epoch, position = epoch + 1, 0
    assert sizes == [1, 2, 1]


def test_a_batch_that_follows_the_world(nodes):
    """Each sample once an epoch, the learning rate by the rule over its warm-up, and the schedule by samples."""
    nodes.environ |= FOLLOWING | {"WARMUP": str(WARMUP)}
    num_steps = grow_and_shrink(nodes)
    samples, batch, start, end, since = 0, REFERENCE, 1.0, 1.0, 0

    def factor():
        return end if samples - since >= WARMUP else start + (end - start) * (samples - since) / WARMUP

    for *_, size, entries, num_samples in walk(nodes, num_steps):
        if size * PER_REPLICA != batch:
            batch = size * PER_REPLICA
            start, end, since = factor(), batch / REFERENCE, samples
        base = 1e-2 * 0.9 ** (samples // REFERENCE // 4)
        assert [entry["used"] for entry in entries] == [pytest.approx(base * factor())] * len(entries)
        samples += num_samples
        base = 1e-2 * 0.9 ** (samples // REFERENCE // 4)
        assert [entry["lr"] for entry in entries] == [pytest.approx(base)] * len(entries)
    found = torch.load(nodes.folder / "result-0.pt", weights_only=True)
    assert (found["schedule_step"], found["lr_factor"]) == (samples // REFERENCE, pytest.approx(factor()))


class LoopReplay(Replay):
    """AdaScale in one process, for the model and data of `program_loop.py`."""

    reference = REFERENCE

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.data = torch.randn(NUM_SAMPLES, WIDTH)
        self.net = Net()
        self.net.dropout.p = 0.0
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 4, 0.9)

    def loss(self, ids):
        x = self.data[ids]
        return (self.net(x) - x).square().mean()


def test_adascale_grown_and_shrunk(nodes):
    """The learning rate is the one that a single process finds by hand; joiners continue with the averages."""
    nodes.environ |= ADASCALE | {"CLIP": "0.3"}
    num_steps, replay = grow_and_shrink(nodes), LoopReplay()
    batch = StepBatch(samples_per_replica=PER_REPLICA, micro_batch_size=3)
    for epoch, position, size, entries, _ in walk(nodes, num_steps):
        parts = parts_of(epoch, position, size, 1, batch, NUM_SAMPLES, seed=5)
        wanted = replay.step(parts)
        assert [entry["used"] for entry in entries] == [pytest.approx(wanted, rel=1e-3)] * len(entries)
    found = torch.load(nodes.folder / "result-0.pt", weights_only=True)
    assert found["lr_factor"] == pytest.approx(replay.gains[-1], rel=1e-3)
    assert found["schedule_step"] == int(replay.worth)


def state_of(result):
    """State without the count of forward passes, of which there are more where there are fewer ranks."""
    return {name: value for name, value in result["state"].items() if name != "num_calls"}


def assert_same_bits(found, wanted):
    assert (found["lr"], found["lr_factor"]) == (wanted["lr"], wanted["lr_factor"])
    assert found["state"].keys() == wanted["state"].keys()
    assert not [name for name, value in state_of(wanted).items() if not torch.equal(found["state"][name], value)]


@pytest.mark.parametrize(
    "options",
    [pytest.param(FOLLOWING | {"WARMUP": str(WARMUP)}, marks=pytest.mark.variant), ADASCALE],
    ids=["linear", "adascale"],
)
def test_a_killed_rank_changes_nothing(tmp_path, options):
    def run(name, *faults):
        environ = {"SHARDS": "2", "STEPS": "20", **options}
        job = run_job(SCRIPT, tmp_path / name, num_ranks=4, faults=list(faults), environ=environ, args=PRELOAD)
        assert job.code == 0, job.output[-8000:]
        assert job.num_faults == len(faults)
        return job.results()

    killed = run("killed", ("backward", 7, 1, "kill"), ("committed", 12, 2, "kill"))
    for found, wanted in zip(killed, run("calm"), strict=True):
        assert wanted["lr_factor"] > 1.0
        assert_same_bits(found, wanted)


REPRODUCIBLE = {"REPRODUCIBLE": "1", "DROPOUT": "0.2", "SHARDS": "1", "REPLICAS": "4", "SAMPLES": str(NUM_SAMPLES)}


def losses_of(steps):
    losses = {step: {entry["loss"] for entry in entries} for step, entries in steps.items()}
    assert all(len(each) == 1 for each in losses.values())
    return losses


@pytest.mark.variant
def test_the_same_bits_for_any_number_of_replicas(nodes, tmp_path_factory):
    """Grown, shrunk and killed: losses and state are bitwise those of one replica, and of two."""
    nodes.environ |= REPRODUCIBLE
    num_steps = grow_and_shrink(nodes)
    found = torch.load(nodes.folder / "result-0.pt", weights_only=True)
    losses = losses_of(nodes.steps())
    for num_ranks in (1, 2):
        environ = REPRODUCIBLE | {"STEPS": str(num_steps)}
        folder = tmp_path_factory.mktemp(f"fixed{num_ranks}")
        fixed = run_job(SCRIPT, folder, num_ranks=num_ranks, environ=environ, args=PRELOAD)
        assert fixed.code == 0, fixed.output[-8000:]
        for entries in fixed.records("step", num_ranks):
            assert {entry["step"]: {entry["loss"]} for entry in entries} == losses
        for wanted in fixed.results(num_ranks):
            assert_same_bits(found, wanted)
