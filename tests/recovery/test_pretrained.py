"""A job whose model was loaded straight into shards loses ranks, rank 0 among them, and ends with the same bits."""

import pytest
import torch
from recovery.faults import run_job

pytestmark = pytest.mark.spawns
FAULTS = [["forward", 2, 1, "kill"], ["forward", 4, 0, "kill"], ["forward", 6, 3, "kill"]]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    from transformers import AutoModelForCausalLM, LlamaConfig

    folder = tmp_path_factory.mktemp("pretrained")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=32, tie_word_embeddings=False, **sizes))
    model.save_pretrained(folder / "model", max_shard_size="5KB")

    def run(name, values, faults=()):
        environ = {"PRETRAINED": str(folder / "model"), "VALUES": values}
        preload = ("--preload", "torch,torch.distributed.fsdp,transformers.models.llama.modeling_llama")
        job = run_job("program_pretrained.py", folder / name, faults=faults, environ=environ, args=preload)
        assert job.code == 0, job.output[-6000:]
        assert job.num_faults == len(faults)
        return job.results()

    return run


@pytest.fixture(scope="module")
def undisturbed(run):
    return run("undisturbed", "every_rank")


@pytest.mark.parametrize("values", ["every_rank", "rank_0"])
def test_ranks_killed_after_a_pretrained_model_was_loaded(run, undisturbed, values):
    for one, other in zip(undisturbed, run(f"killed_{values}", values, FAULTS), strict=True):
        assert one["last"] == other["last"]
        assert one["state"].keys() == other["state"].keys()
        for name, value in one["state"].items():
            assert torch.equal(other["state"][name], value), name
