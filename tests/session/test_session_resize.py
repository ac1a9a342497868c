"""A loop written by hand that grows and shrinks, with real agents that come and are killed."""

import pytest
import torch
from recovery.elastic_nodes import Nodes
from recovery.faults import PRELOAD, run_job

NUM_SAMPLES, BATCH = 121, 12
"""The last step of an epoch has one sample, for up to four ranks."""

pytestmark = pytest.mark.spawns


class LoopNodes(Nodes):
    """Agents of a job that runs `program_loop.py`."""

    script = "../session/program_loop.py"


@pytest.fixture
def nodes(tmp_path):
    nodes = LoopNodes(tmp_path, "")
    nodes.environ |= {"REPLICAS": "4", "SAMPLES": str(NUM_SAMPLES), "SHARDS": "1"}
    nodes.args += PRELOAD
    yield nodes
    nodes.clear()


def test_scaled_from_a_shell_to_every_size(nodes):
    nodes.num_ranks = 2
    num_steps = nodes.go_through_requests()
    steps = nodes.steps()
    assert sorted(steps) == list(range(num_steps))
    for step, entries in steps.items():
        assert len({i for entry in entries for i in entry["ids"]}) == (1 if step % 11 == 10 else BATCH)
    results = [torch.load(nodes.folder / f"result-{rank}.pt", weights_only=True) for rank in range(4)]
    assert len({result["lr"] for result in results}) == 1
    for name, value in results[0]["state"].items():
        assert all(torch.equal(result["state"][name], value) for result in results), name


def test_grown_shrunk_and_grown_again(nodes, tmp_path_factory):
    num_steps = nodes.go_through_sizes(kills_worker=True)
    environ = {"STEPS": str(num_steps), "SHARDS": "1", "REPLICAS": "1", "SAMPLES": str(NUM_SAMPLES)}
    calm = run_job(LoopNodes.script, tmp_path_factory.mktemp("calm"), num_ranks=1, environ=environ, args=PRELOAD)
    assert calm.code == 0, calm.output[-8000:]
    fixed = {entry["step"]: entry for entry in calm.records("step", 1)[0]}
    steps = nodes.steps()
    assert sorted(steps) == list(range(num_steps))
    num_unwritten = 0
    for step, entries in steps.items():  # the same samples in the same steps, whatever the number of ranks
        ids = [i for entry in entries for i in entry["ids"]]
        assert set(ids) <= set(fixed[step]["ids"])
        if len(fixed[step]["ids"]) == BATCH:  # ranks that have no sample of the last step take another's, with weight 0
            assert len(set(ids)) == len(ids)
            num_unwritten += len(ids) < BATCH
        for entry in entries:
            assert float.fromhex(entry["loss"]) == pytest.approx(float.fromhex(fixed[step]["loss"]), rel=1e-3)
            assert entry["lr"] == fixed[step]["lr"]
    assert num_unwritten <= 4
    (wanted,) = calm.results(1)
    found = torch.load(nodes.folder / "result-0.pt", weights_only=True)
    assert (found["lr"], found["replicas"]) == (wanted["lr"], 3)
    assert wanted["state"].pop("num_calls") > 0  # of forward passes, which are more where there are fewer ranks
    for name, value in wanted["state"].items():
        torch.testing.assert_close(found["state"][name], value, rtol=1e-3, atol=1e-4)
