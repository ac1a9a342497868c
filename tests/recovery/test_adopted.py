"""Jobs whose model transformers has sharded while loading it: ranks are killed, and a replica comes and is lost."""

import pytest
import torch
from recovery.elastic_nodes import Nodes
from recovery.faults import run_job

pytestmark = pytest.mark.spawns
FAULTS = [["forward", 2, 1, "kill"], ["forward", 4, 0, "kill"]]
PRELOAD = ("--preload", "torch,torch.distributed.fsdp,transformers.models.llama.modeling_llama")


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    from transformers import AutoModelForCausalLM, LlamaConfig

    folder = tmp_path_factory.mktemp("pretrained")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=32, tie_word_embeddings=True, **sizes))
    model.save_pretrained(folder)
    return str(folder)


def run(folder, pretrained, faults=(), num_ranks=4, **environ):
    environ = {"PRETRAINED": pretrained, **environ}
    job = run_job("program_adopted.py", folder, faults=faults, num_ranks=num_ranks, environ=environ, args=PRELOAD)
    assert job.code == 0, job.output[-6000:]
    assert job.num_faults == len(faults)
    return job


def assert_same(one, other):
    assert one["state"].keys() == other["state"].keys()
    for name, value in one["state"].items():
        assert torch.equal(other["state"][name], value), name


def test_ranks_killed_after_transformers_has_sharded_their_model(pretrained, tmp_path):
    """Against a job that loads the model whole, and loses nothing."""
    wanted = run(tmp_path / "plain", pretrained, LOADING="plain").results()
    found = run(tmp_path / "killed", pretrained, FAULTS).results()
    assert max(result["repairs"] for result in found) == 2
    for one, other in zip(wanted, found, strict=True):
        assert (one["last"], one["repairs"]) == (other["last"], 0)
        assert_same(one, other)


class AdoptedNodes(Nodes):
    """Agents of a job that runs `program_adopted.py`."""

    script = "program_adopted.py"


def test_a_replica_joins_and_is_lost(pretrained, tmp_path, tmp_path_factory):
    """And a rank is killed between; against a job that stays as it is."""
    nodes = AdoptedNodes(tmp_path, "", num_ranks=2)
    nodes.environ |= {"PRETRAINED": pretrained, "ELASTIC": "1"}
    nodes.args += PRELOAD
    try:
        nodes.start("a")
        nodes.await_size(2)
        nodes.start("b")
        nodes.await_size(4)
        nodes.kill_rank(2)
        nodes.lose("b")
        nodes.await_size(2)
        num_steps = nodes.finish()
    finally:
        nodes.clear()
    calm = run(tmp_path_factory.mktemp("calm"), pretrained, num_ranks=2, STEPS=str(num_steps), LOADING="plain")
    fixed = {entry["step"]: entry for entry in calm.records("step", 1)[0]}
    steps = nodes.steps()
    assert sorted(steps) == list(range(num_steps))
    assert {entry["size"] for entries in steps.values() for entry in entries} == {2, 4}
    for step, entries in steps.items():
        assert {i for entry in entries for i in entry["ids"]} <= set(fixed[step]["ids"])
        for entry in entries:
            assert float.fromhex(entry["loss"]) == pytest.approx(float.fromhex(fixed[step]["loss"]), rel=1e-4)
    for rank, wanted in enumerate(calm.results(2)):
        found = torch.load(nodes.folder / f"result-{rank}.pt", weights_only=True)
        for name, value in wanted["state"].items():
            torch.testing.assert_close(found["state"][name], value, rtol=1e-3, atol=1e-4)
