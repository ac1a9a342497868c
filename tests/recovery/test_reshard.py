"""All processes start again with other degrees: too few nodes are left, or somebody asks for it."""

import pytest
import torch
from recovery.elastic_nodes import Nodes, assert_each_once, assert_whole_steps, samples_of
from recovery.faults import HYPERPODRUN, TORCHRUN, left_processes, run_job

from hyperpod_plugins.cli import main

pytestmark = pytest.mark.spawns
NOISE = 1e-4
"""Largest relative difference: float32 sums of a batch that is cut into other parts. It was 2e-7 after 48 steps."""


@pytest.fixture
def make_nodes(tmp_path, tokens):
    """Agents of a job that begins when both of two nodes are there."""
    made = []

    def make(launcher=HYPERPODRUN, num_ranks=1, **environ):
        made.append(Nodes(tmp_path, tokens, launcher, num_ranks, nnodes="1:2", last_call_s=30))
        made[0].environ |= {"SHARDS": "2"} | environ
        return made[0]

    yield make
    for nodes in made:
        nodes.clear()


@pytest.fixture
def ask(tmp_path, monkeypatch):
    """`hyperpod COMMAND` without the start of another Python; returns its exit code."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return lambda *words: main(words)


def counted(steps):
    """What each step was in the end: entries of the ranks that made it last, one for those that read the same."""
    found = {}
    for step, entries in steps.items():
        last = entries[-1]
        those = [each for each in entries if (each["size"], each["shards"], each["tensors"]) == kind_of(last)]
        found[step] = [each for each in those[-last["size"] :] if each["rank"] % each["tensors"] == 0]
    return found


def kind_of(entry):
    return entry["size"], entry["shards"], entry["tensors"]


def kinds(steps):
    """Size and degrees of the job, in order."""
    found = []
    for step in sorted(steps):
        kind = kind_of(steps[step][-1])
        found += [kind] if found[-1:] != [kind] else []
    return found


def assert_like_a_fixed_job(nodes, num_steps, tokens, folder):
    """The same samples in the same steps as one rank has that is left alone, and the same losses and parameters."""
    calm = run_job("ranks_elastic.py", folder, num_ranks=1, environ={"TOKENS": str(tokens), "STEPS": str(num_steps)})
    assert calm.code == 0, calm.output[-8000:]
    fixed = {entry["step"]: entry for entry in calm.records("step", 1)[0]}
    steps = counted(nodes.steps())
    assert_whole_steps(steps, num_steps)
    assert_each_once([i for ids in samples_of(steps) for i in ids])
    for step, entries in steps.items():
        assert sorted(i for entry in entries for i in entry["ids"]) == sorted(fixed[step]["ids"]), step
        assert sum(entry["loss"] for entry in entries) == pytest.approx(fixed[step]["loss"], rel=NOISE), step
    (wanted,) = calm.results(1)
    found = [torch.load(path, weights_only=True) for path in sorted(nodes.folder.glob("result-*.pt"))]
    for name, value in wanted["state"].items():
        parts = [each["state"][name] for each in found]
        whole = parts[0] if parts[0].shape == value.shape else torch.cat(parts)
        torch.testing.assert_close(whole, value, rtol=NOISE, atol=NOISE)
    assert not left_processes("FAULTS_FOLDER=" + str(nodes.folder), patience_s=5.0)


def test_a_node_is_lost_for_good(make_nodes, ask, tokens, tmp_path_factory):
    """Its shard is in the memory of the other, which goes on alone; then a node comes, and then they share again."""
    nodes = make_nodes(SHARD_DEGREES="2 1", SNAPSHOT_EVERY="3")
    nodes.start("a")
    nodes.await_store()
    nodes.start("b")
    nodes.await_size(2, (2, 1))
    nodes.lose("b")
    nodes.await_size(1, (1, 1))
    nodes.start("c")
    nodes.await_size(2, (1, 1))
    code, text = nodes.hyperpod("scale", "--shard-degree", "2")
    assert (code, text) == (
        0,
        "all ranks save the next step, and start again with shard degree 2 and tensor degree 1\n",
    )
    nodes.await_size(2, (2, 1))
    num_steps = nodes.finish()
    steps = nodes.steps()
    assert kinds(steps) == [(2, 2, 1), (1, 1, 1), (2, 1, 1), (2, 2, 1)]
    again = [step for step, entries in steps.items() if len(entries) > entries[-1]["size"]]
    assert len(again) <= 2 * 3  # since the last snapshot, or the one before if that had not arrived
    assert all(kind_of(steps[step][-1]) == (1, 1, 1) for step in again)  # who was asked for lost none
    assert_like_a_fixed_job(nodes, num_steps, tokens, tmp_path_factory.mktemp("calm"))


@pytest.mark.variant
def test_from_the_last_checkpoint_under_torchrun(make_nodes, tokens, tmp_path_factory):
    nodes = make_nodes(TORCHRUN, SHARD_DEGREES="2 1", SNAPSHOT_EVERY="1000000", CHECKPOINT_EVERY="4")
    nodes.start("a")
    nodes.await_store()
    nodes.start("b")
    nodes.await_size(2, (2, 1))
    nodes.lose("b")
    nodes.await_size(1, (1, 1))
    num_steps = nodes.finish()
    assert kinds(nodes.steps()) == [(2, 2, 1), (1, 1, 1)]
    assert_like_a_fixed_job(nodes, num_steps, tokens, tmp_path_factory.mktemp("calm"))


def test_asked_for_other_degrees(make_nodes, ask, tokens, tmp_path_factory):
    nodes = make_nodes(num_ranks=2, SHARD_DEGREES="2 1", TENSOR_DEGREES="2")
    nodes.args = (*nodes.args, "--nnodes=1:1")
    nodes.start("a")
    nodes.await_size(2, (2, 1))
    for words in (("--shard-degree", "3"), ("--shard-degree", "2", "--replicas", "1"), ()):
        assert ask("scale", *words) == 2
    assert ask("scale", "--shard-degree", "1", "--tensor-degree", "2") == 0
    nodes.await_size(2, (1, 2))
    assert ask("scale", "--tensor-degree", "1") == 0
    nodes.await_size(2, (1, 1))
    num_steps = nodes.finish()
    steps = nodes.steps()
    assert kinds(steps) == [(2, 2, 1), (2, 1, 2), (2, 1, 1)]
    assert all(len(entries) == 2 for entries in steps.values())  # none was lost, none was made again
    assert_like_a_fixed_job(nodes, num_steps, tokens, tmp_path_factory.mktemp("calm"))
