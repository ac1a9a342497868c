"""Elastic jobs in reproducible mode: the same bits whatever the number of replicas, and however often it changes."""

import json

import pytest
import torch
from recovery.elastic_nodes import assert_each_once, fill_unwritten, samples_of
from recovery.faults import left_processes, run_job

pytestmark = pytest.mark.spawns
REPRODUCIBLE = {"REPRODUCIBLE": "1", "DROPOUT": "0.2"}


def curve_of(folder, num_ranks):
    """Loss of each step, as all ranks have written it down."""
    found = {}
    for rank in range(num_ranks):
        path = folder / f"record-{rank}.jsonl"
        for entry in map(json.loads, path.read_text().splitlines() if path.exists() else ()):
            if entry["kind"] == "curve":
                assert found.setdefault(entry["step"], entry["loss"]) == entry["loss"]
    return found


def run_fixed(folder, tokens, num_ranks, num_steps, **environ):
    environ = {**REPRODUCIBLE, "TOKENS": str(tokens), "STEPS": str(num_steps), **environ}
    job = run_job("ranks_elastic.py", folder, num_ranks=num_ranks, environ=environ)
    assert job.code == 0, job.output[-8000:]
    return job


def assert_same_bits(found, wanted):
    assert found["step"] == wanted["step"]
    assert found["state"].keys() == wanted["state"].keys()
    differing = [name for name, value in wanted["state"].items() if not torch.equal(found["state"][name], value)]
    assert not differing


def test_grown_shrunk_and_killed(nodes, tokens, tmp_path_factory):
    nodes.environ |= REPRODUCIBLE | {"STEP_S": "0.01"}
    num_steps = nodes.go_through_sizes(kills_worker=True)
    assert not left_processes("FAULTS_FOLDER=" + str(nodes.folder), patience_s=5.0)
    found = torch.load(nodes.folder / "result-0.pt", weights_only=True)
    assert [size for size in found["replicas"] if size in (2, 4, 1)][:3] == [2, 4, 1]
    assert found["replicas"][-1] == 3
    steps = nodes.steps()
    fill_unwritten(steps, at_most=4)  # one for each rank that was killed
    assert_each_once([i for ids in samples_of(steps) for i in ids])
    curve = curve_of(nodes.folder, 4)
    for num_ranks in (1, 4):
        fixed = run_fixed(tmp_path_factory.mktemp("fixed"), tokens, num_ranks, num_steps)
        assert curve_of(fixed.folder, num_ranks) == curve
        for wanted in fixed.results(num_ranks):
            assert_same_bits(found, wanted)


@pytest.mark.parametrize("option", [pytest.param("param_offload", marks=pytest.mark.variant), "optimizer_offload"])
def test_a_replica_joins_a_job_with_training_state_in_host_memory(nodes, tokens, tmp_path_factory, option):
    """Replicas of two shards; then a worker is killed. The bits are those of a job of one size, on the device."""
    nodes.environ |= REPRODUCIBLE | {"STEP_S": "0.01", "ON_HOST": option, "SHARDS": "2", "MAX_REPLICAS": "2"}
    nodes.num_ranks = 2
    nodes.start("a")
    nodes.await_size(2)
    nodes.start("b")
    nodes.await_size(4)
    nodes.kill_rank(3)
    num_steps = nodes.finish()
    found = [torch.load(nodes.folder / f"result-{rank}.pt", weights_only=True) for rank in range(4)]
    assert {result["size"] for result in found} == {4}
    fixed = run_fixed(tmp_path_factory.mktemp("fixed"), tokens, 2, num_steps, SHARDS="2", MAX_REPLICAS="2")
    assert curve_of(nodes.folder, 4) == curve_of(fixed.folder, 2)
    for rank, result in enumerate(found):
        assert_same_bits(result, fixed.results(2)[rank % 2])


def test_replicas_of_two_shards(tokens, tmp_path):
    alone = run_fixed(tmp_path / "one", tokens, 2, 15, SHARDS="2")
    twice = run_fixed(tmp_path / "two", tokens, 4, 15, SHARDS="2")
    assert curve_of(twice.folder, 4) == curve_of(alone.folder, 2)
    for rank, found in enumerate(twice.results(4)):
        assert_same_bits(found, alone.results(2)[rank % 2])
