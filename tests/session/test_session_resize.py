"""A loop written by hand that grows and shrinks, with real agents that come and are killed."""

import pytest
import torch
from recovery.elastic_nodes import Nodes
from recovery.faults import PRELOAD, run_job
from recovery.test_reshard import counted, kinds

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


@pytest.mark.variant
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
    """With a schedule that the body steps, which new ranks get, too."""
    nodes.environ |= {"BODY_SCHEDULE": "1"}
    num_steps = nodes.go_through_sizes(kills_worker=True)
    environ = {"STEPS": str(num_steps), "SHARDS": "1", "REPLICAS": "1", "SAMPLES": str(NUM_SAMPLES)}
    environ |= {"BODY_SCHEDULE": "1"}
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


def test_a_model_that_is_gathered_in_float8_grows_and_is_repaired(tmp_path, tmp_path_factory):
    """A replica joins, and a worker is killed after that; with the same bits as without."""
    nodes = LoopNodes(tmp_path, "", num_ranks=2)
    of_float8 = {"FLOAT8": "gathered", "REPRODUCIBLE": "1", "REPLICAS": "2", "SAMPLES": "120", "SHARDS": "2"}
    nodes.environ |= of_float8
    nodes.args += PRELOAD
    try:
        nodes.start("a")
        nodes.await_size(2)
        nodes.start("b")
        nodes.await_size(4)
        nodes.kill_rank(1)
        nodes.await_size(4)
        num_steps = nodes.finish()
    finally:
        nodes.clear()
    assert "float8 (tensorwise, emulated on the CPU, gathered in float8): 3 of 3 linear layers" in nodes.output()
    folder = tmp_path_factory.mktemp("calm")
    environ = {"STEPS": str(num_steps), **of_float8}
    calm = run_job(LoopNodes.script, folder, num_ranks=2, environ=environ, args=PRELOAD)
    assert calm.code == 0, calm.output[-8000:]
    for rank, wanted in enumerate(calm.results(2)):
        found = torch.load(nodes.folder / f"result-{rank}.pt", weights_only=True)
        assert (found["replicas"], wanted["replicas"]) == (2, 1)
        del wanted["state"]["num_calls"]  # a larger world has fewer micro-steps
        for name, value in wanted["state"].items():
            assert torch.equal(found["state"][name], value), name


@pytest.mark.variant
def test_a_model_with_tiled_mlps_and_tensor_parallelism_grows_and_is_repaired(tmp_path):
    """A replica joins, and a worker is killed after that; the replicas stay equal."""
    nodes = LoopNodes(tmp_path, "", num_ranks=2)
    nodes.environ |= {"TILES": "1", "REPLICAS": "2", "SAMPLES": "120", "SHARDS": "1"}
    nodes.args += PRELOAD
    nodes.patience_s *= 2  # the first checkpoint function imports dynamo
    try:
        nodes.start("a")
        nodes.await_size(2)
        nodes.start("b")
        nodes.await_size(4)
        nodes.kill_rank(1)
        nodes.await_size(4)
        nodes.finish()
    finally:
        nodes.clear()
    results = [torch.load(nodes.folder / f"result-{rank}.pt", weights_only=True) for rank in range(4)]
    assert all(result["repairs"] and result["replicas"] == 2 for result in results)
    for one, other in ((0, 2), (1, 3)):  # the same places in tensor parallelism
        for name, value in results[one]["state"].items():
            assert torch.equal(results[other]["state"][name], value), name


@pytest.mark.parametrize("split", [pytest.param("EXPERTS", marks=pytest.mark.variant), "EXPERTS CONTEXTS"])
def test_experts_and_sequences_that_are_divided_among_ranks_grow_and_shrink(tmp_path, tmp_path_factory, split):
    """Two ranks share the experts, and the sequences: a replica joins, is lost for good, and another one joins."""
    nodes = LoopNodes(tmp_path, "", num_ranks=2)
    divided = dict.fromkeys(split.split(), "1")
    nodes.environ |= {**divided, "REPLICAS": "2", "SAMPLES": "120", "SHARDS": "2", "OPTIMIZER": "sgd"}
    nodes.args += PRELOAD
    try:
        nodes.start("a")
        nodes.await_size(2)
        nodes.start("b")
        nodes.await_size(4)
        nodes.lose("b")
        nodes.await_size(2)
        nodes.start("c")
        nodes.await_size(4)
        num_steps = nodes.finish()
    finally:
        nodes.clear()
    environ = {"STEPS": str(num_steps), "SHARDS": "2", "REPLICAS": "1", "SAMPLES": "120", "OPTIMIZER": "sgd"}
    folder = tmp_path_factory.mktemp("calm")
    environ |= divided
    calm = run_job(LoopNodes.script, folder, num_ranks=2, environ=environ, args=PRELOAD)
    assert calm.code == 0, calm.output[-8000:]
    fixed = {entry["step"]: entry for entry in calm.records("step", 2)[0]}
    steps = nodes.steps()
    assert sorted(steps) == list(range(num_steps))
    for step, entries in steps.items():
        if len(entries) == entries[0]["size"]:  # all have written down the step
            samples = [i for entry in entries for i in entry["ids"]]
            assert {i: samples.count(i) for i in samples} == dict.fromkeys(samples, 2 if "CONTEXTS" in divided else 1)
            assert len({*samples}) == BATCH
        for entry in entries:
            assert float.fromhex(entry["loss"]) == pytest.approx(float.fromhex(fixed[step]["loss"]), rel=1e-3)
    results = [torch.load(nodes.folder / f"result-{rank}.pt", weights_only=True)["state"] for rank in range(4)]
    for rank, wanted in enumerate(calm.results(2)):
        del wanted["state"]["num_calls"]  # a larger world has fewer micro-steps
        for name, value in wanted["state"].items():
            torch.testing.assert_close(results[rank][name], value, rtol=1e-3, atol=1e-4)
            assert torch.equal(results[rank][name], results[rank + 2][name]), name


def test_a_replica_that_joins_gets_the_scales_of_transformer_engine(tmp_path):
    """They depend on more passes than it makes itself, and without them replicas would differ."""
    nodes = LoopNodes(tmp_path, "", num_ranks=2)
    nodes.environ |= {"FLOAT8": "te", "REPLICAS": "2", "SAMPLES": "120", "SHARDS": "2"}
    nodes.args += PRELOAD
    try:
        nodes.start("a")
        nodes.await_size(2)
        nodes.start("b")
        nodes.await_size(4)
        nodes.finish()
    finally:
        nodes.clear()
    results = [torch.load(nodes.folder / f"result-{rank}.pt", weights_only=True)["state"] for rank in range(4)]
    names = [name for name in results[0] if "fp8_" in name]
    assert len(names) == 4 * 3
    for name in names:
        assert results[0][name].count_nonzero(), name
        assert all(torch.equal(each[name], results[0][name]) for each in results), name
    for one, other in ((0, 2), (1, 3)):  # the same shards
        assert all(torch.equal(results[one][name], results[other][name]) for name in results[one])


def test_a_loop_that_is_stepped_by_hand_grows_and_shrinks(nodes, tmp_path_factory):
    """Its losses are those of the loop that the session steps, on one rank."""
    of_data = {"SAMPLES": "120", "OPTIMIZER": "sgd"}
    nodes.environ |= {"MANUAL": "1", **of_data}
    nodes.start("a")
    nodes.await_size(1)
    nodes.start("b")
    nodes.await_size(2)
    nodes.lose("b")
    nodes.await_size(1)
    num_steps = nodes.finish()
    environ = {"STEPS": str(num_steps), "SHARDS": "1", "REPLICAS": "1", **of_data}
    calm = run_job(LoopNodes.script, tmp_path_factory.mktemp("calm"), num_ranks=1, environ=environ, args=PRELOAD)
    assert calm.code == 0, calm.output[-8000:]
    fixed = {entry["step"]: entry for entry in calm.records("step", 1)[0]}
    steps = nodes.steps()
    assert sorted(steps) == list(range(num_steps))
    for step, entries in steps.items():
        assert {i for entry in entries for i in entry["ids"]} <= set(fixed[step]["ids"])
        for entry in entries:
            assert float.fromhex(entry["loss"]) == pytest.approx(float.fromhex(fixed[step]["loss"]), rel=1e-3)
            assert entry["lr"] == fixed[step]["lr"]
    (wanted,) = calm.results(1)
    found = torch.load(nodes.folder / "result-0.pt", weights_only=True)
    del wanted["state"]["num_calls"]  # the session calls the model once for each micro-batch
    for name, value in wanted["state"].items():
        torch.testing.assert_close(found["state"][name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.variant
def test_a_node_is_lost_for_good_and_other_degrees_are_asked_for(tmp_path, tmp_path_factory):
    """The other node goes on alone, with what it keeps of the lost shard; with another one they share again."""
    nodes = LoopNodes(tmp_path, "", nnodes="1:2", last_call_s=30)
    nodes.environ |= {"REPLICAS": "4", "SAMPLES": "120", "SHARDS": "2", "SNAPSHOTS": "3"}
    nodes.environ |= {"SHARD_DEGREES": "1", "TENSOR_DEGREES": "2", "OPTIMIZER": "sgd"}  # AdamW enlarges what is rounded
    nodes.args += PRELOAD
    try:
        nodes.start("a")
        nodes.await_store()
        nodes.start("b")
        nodes.await_size(2, (2, 1))
        nodes.lose("b")
        nodes.await_size(1, (1, 1))
        nodes.start("c")
        nodes.await_size(2, (1, 1))
        code, text = nodes.hyperpod("scale", "--shard-degree", "4")
        assert code == 2, text
        assert "allowed shard degrees (each with a tensor degree): 2 with 1, 2 with 2, 1 with 2, 1 with 1" in text
        for shard, tensor in ((1, 2), (2, 1)):
            code, text = nodes.hyperpod("scale", "--shard-degree", str(shard), "--tensor-degree", str(tensor))
            assert code == 0, text
            nodes.await_size(2, (shard, tensor))
        num_steps = nodes.finish()
    finally:
        nodes.clear()
    environ = {"STEPS": str(num_steps), "SHARDS": "1", "REPLICAS": "1", "SAMPLES": "120", "OPTIMIZER": "sgd"}
    calm = run_job(LoopNodes.script, tmp_path_factory.mktemp("calm"), num_ranks=1, environ=environ, args=PRELOAD)
    assert calm.code == 0, calm.output[-8000:]
    fixed = {entry["step"]: entry for entry in calm.records("step", 1)[0]}
    steps = nodes.steps()
    assert kinds(steps) == [(2, 2, 1), (1, 1, 1), (2, 1, 1), (2, 1, 2), (2, 2, 1)]
    found = counted(steps)
    assert sorted(found) == list(range(num_steps))
    for step, entries in found.items():
        assert sorted(i for entry in entries for i in entry["ids"]) == sorted(fixed[step]["ids"]), step
        for entry in entries:
            assert float.fromhex(entry["loss"]) == pytest.approx(float.fromhex(fixed[step]["loss"]), rel=1e-3)
            assert entry["lr"] == fixed[step]["lr"]
    (wanted,) = calm.results(1)
    parts = [torch.load(path, weights_only=True) for path in sorted(nodes.folder.glob("result-*.pt"))]
    assert parts[0]["best"] == pytest.approx(wanted["best"], rel=1e-3)
    del wanted["state"]["num_calls"]  # a larger world has fewer micro-steps
    for name, value in wanted["state"].items():
        mine = [each["state"][name] for each in parts]
        whole = mine[0] if mine[0].shape == value.shape else torch.cat(mine)
        torch.testing.assert_close(whole, value, rtol=1e-3, atol=1e-4)


def test_a_process_that_is_left_over_serves_after_a_restart_with_other_degrees(tmp_path):
    nodes = LoopNodes(tmp_path, "", num_ranks=3, nnodes="1:1")
    nodes.environ |= {"REPLICAS": "3", "SAMPLES": "120", "SHARDS": "2", "SHARD_DEGREES": "1"}
    nodes.args += PRELOAD
    try:
        nodes.start("a")
        nodes.await_size(2, (2, 1))
        code, text = nodes.hyperpod("scale", "--shard-degree", "1")
        assert code == 0, text
        nodes.await_size(3, (1, 1))
        num_steps = nodes.finish()
    finally:
        nodes.clear()
    steps = nodes.steps()
    assert kinds(steps) == [(2, 2, 1), (3, 1, 1)]
    assert all(len({i for entry in entries for i in entry["ids"]}) == BATCH for entries in steps.values())
    assert sorted(steps) == list(range(num_steps))
