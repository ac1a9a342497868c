"""`HyperPodTrainer` against transformers' own Trainer, and against itself where ranks are killed."""

import json
import math
import shutil

import pytest
import torch
from recovery.elastic_nodes import Nodes
from recovery.faults import HYPERPODRUN, PRELOAD, TORCHRUN, run_job
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

SCRIPT = "../transformers_adapter/program_trainer.py"
WITHOUT_TEMPLATE = ("env",)
"""The programs do not need Lightning, which the template of agents imports."""
OPTIONS = {
    "max_steps": -1,
    "num_train_epochs": 3,
    "gradient_accumulation_steps": 4,
    "eval_strategy": "steps",
    "eval_steps": 3,
    "save_strategy": "steps",
    "save_steps": 3,
    "save_total_limit": 2,
    "include_num_input_tokens_seen": "non_padding",
    "warmup_steps": 2,
    "lr_scheduler_type": "cosine",
    "logging_steps": 2,
}
"""Three steps an epoch of 37 samples: the last one has 2 of 4 micro-batches, and samples from the epoch's beginning."""


def run(folder, faults=(), *, launcher=HYPERPODRUN, environ=None, num_ranks=2, **options):
    environ = {"OPTIONS": json.dumps(OPTIONS | options), "SAMPLES": "37", **(environ or {})}
    args = PRELOAD if launcher == HYPERPODRUN else ()
    job = run_job(
        SCRIPT,
        folder,
        faults=faults,
        num_ranks=num_ranks,
        environ=environ,
        launcher=launcher,
        args=args,
        prefix=WITHOUT_TEMPLATE,
        timeout_s=250,
    )
    assert job.code == 0, job.output[-8000:]
    assert job.num_faults == len(faults)
    return job


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """A job without faults that uses most of what a Trainer does."""
    return run(tmp_path_factory.mktemp("calm"))


def assert_same(wanted, found, num_ranks=2):
    """All ranks of two jobs have the same bits, and the same logs."""
    for before, after in zip(wanted.results(num_ranks), found.results(num_ranks), strict=True):
        assert after["history"] == before["history"]
        assert (after["step"], after["loss"]) == (before["step"], before["loss"])
        for name, value in before["state"].items():
            assert torch.equal(after["state"][name], value), name


@pytest.mark.spawns
def test_the_losses_are_those_of_the_trainer_under_ddp(calm, tmp_path):
    """Order of the samples, weights of the last step of an epoch, norms, rates, evaluations and counts, too."""
    plain = run(tmp_path, launcher=TORCHRUN, environ={"PLAIN": "1"}).results(2)
    ours = calm.results(2)
    assert len(ours[0]["history"]) == len(plain[0]["history"]) == 8
    for wanted, found in zip(plain[0]["history"], ours[0]["history"], strict=True):
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            if name != "train_loss":  # of rank 0 alone, in a part
                assert math.isclose(found[name], value, rel_tol=2e-6), (name, wanted, found)
    mean = sum(each["loss"] for each in plain) / 2
    assert all(math.isclose(each["loss"], mean, rel_tol=2e-6) for each in ours)
    for name, value in plain[0]["state"].items():
        torch.testing.assert_close(ours[1]["state"][name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.spawns
def test_killed_ranks_are_replaced_and_nothing_shows_it(calm, tmp_path):
    """In a forward pass, and in all that follows a step: an evaluation, a checkpoint, the end of an epoch."""
    faults = [
        ["forward", 1, 1, "kill"],
        ["evaluated", 3, 0, "kill"],
        ["saved", 6, 1, "kill"],
        ["evaluation", 6, 0, "kill"],
        ["after forward", 7, 0, "raise"],
        ["step_end", 9, 0, "kill"],
    ]
    assert_same(calm, run(tmp_path, faults))


@pytest.mark.spawns
def test_random_numbers_of_a_step_are_drawn_again(tmp_path):
    environ = {"DROPOUT": "0.3"}
    wanted = run(tmp_path / "calm", environ=environ)
    assert_same(wanted, run(tmp_path / "kill", [["after forward", 4, 1, "kill"]], environ=environ))


@pytest.mark.spawns
def test_a_training_resumes_from_a_checkpoint_that_is_deleted_meanwhile(calm, tmp_path):
    """A replacement does not read it, and does not take a newer one for it."""
    shutil.copytree(calm.folder / "out" / "checkpoint-6", tmp_path / "out" / "checkpoint-6")
    faults = [["forward", 7, 1, "kill"], ["step_end", 9, 0, "kill"]]
    environ = {"TRAIN": json.dumps({"resume_from_checkpoint": True})}
    found = run(tmp_path, faults, environ=environ, save_steps=1, save_total_limit=1)
    for wanted, result in zip(calm.results(2), found.results(2), strict=True):
        assert result["history"][:-1] == wanted["history"][:-1]
        assert result["loss"] < wanted["loss"]  # of the steps of this call, as the Trainer's
        assert all(torch.equal(result["state"][name], value) for name, value in wanted["state"].items())
    assert not (tmp_path / "out" / "checkpoint-6").exists()
    assert [each.name for each in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-9"]


@pytest.mark.spawns
def test_what_a_training_leaves_opens_in_transformers(calm):
    """The final model and each checkpoint have whole weights; the oldest checkpoint was rotated away."""
    out = calm.folder / "out"
    assert {each.name for each in out.glob("checkpoint-*")} == {"checkpoint-6", "checkpoint-9"}
    for folder in (out, out / "checkpoint-9"):
        model, info = LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(info.values()), info
        assert model.config.architectures == ["LlamaForCausalLM"]
        assert all(torch.equal(value, calm.results(2)[0]["state"][name]) for name, value in model.state_dict().items())


@pytest.mark.spawns
def test_early_stopping_and_the_best_model_with_a_kill_before_the_end(tmp_path):
    """Training ends one evaluation after the best one, and has the weights that it had then."""
    options = {"load_best_model_at_end": True, "num_train_epochs": 8, "save_total_limit": 1}
    found = run(tmp_path, [["evaluated", 6, 1, "kill"]], environ={"PATIENCE": "1"}, **options)
    for result in found.results(2):
        losses = {each["step"]: each["eval_loss"] for each in result["history"] if "eval_loss" in each}
        best = min(losses, key=losses.get)
        assert result["step"] == max(losses) == best + 3 < 24
        wanted = LlamaForCausalLM.from_pretrained(tmp_path / "out" / f"checkpoint-{best}").state_dict()
        assert all(torch.equal(result["state"][name], value) for name, value in wanted.items())
    assert len(list((tmp_path / "out").glob("checkpoint-*"))) == 1


@pytest.mark.spawns
def test_an_adapter_of_peft_is_trained_and_saved(tmp_path):
    environ = {"LORA": "1"}
    wanted = run(tmp_path / "calm", environ=environ)
    assert_same(wanted, run(tmp_path / "kill", [["after forward", 5, 0, "kill"]], environ=environ))
    saved = load_file(tmp_path / "calm" / "out" / "adapter_model.safetensors")
    state = wanted.results(2)[0]["state"]
    trained = {name.replace(".default", ""): value for name, value in state.items() if "lora_" in name}
    assert saved.keys() == trained.keys()
    assert all(torch.equal(saved[name], value) for name, value in trained.items())
    assert any(value.count_nonzero() for name, value in saved.items() if "lora_B" in name)


class TrainerNodes(Nodes):
    """Agents of a job that runs `program_trainer.py`."""

    script = SCRIPT
    patience_s = 200.0  # transformers takes long to import


@pytest.mark.spawns
def test_the_job_grows_and_shrinks_with_the_same_losses(tmp_path):
    """The micro-batches of a step stay those of the first world, and are shared by all ranks."""
    options = {"max_steps": 100_000, "lr_scheduler_type": "constant", "learning_rate": 1e-3, "logging_steps": 1}
    environ = {"OPTIONS": json.dumps(OPTIONS | options | {"eval_strategy": "no", "save_strategy": "no"})}
    nodes = TrainerNodes(tmp_path / "elastic", "")
    nodes.environ |= environ | {"REPLICAS": "2", "SAMPLES": "37"}
    nodes.args += PRELOAD
    try:
        nodes.start("a", prefix=WITHOUT_TEMPLATE)
        nodes.await_size(1)
        nodes.start("b", prefix=WITHOUT_TEMPLATE)
        nodes.await_size(2)
        nodes.lose("b")
        nodes.await_size(1)
        num_steps = nodes.finish()
    finally:
        nodes.clear()
    fixed = tmp_path / "fixed"
    fixed.mkdir()
    (fixed / "stop").write_text(str(num_steps))
    job = run(fixed, num_ranks=1, environ=environ)
    wanted = {each["step"]: each["loss"] for each in job.records("loss", 1)[0]}
    lines = [line for path in nodes.folder.glob("record-*.jsonl") for line in path.read_text().split("\n")[:-1]]
    losses = [each for each in map(json.loads, lines) if each["kind"] == "loss"]
    assert {each["size"] for each in losses} == {1, 2}
    for each in losses:
        assert math.isclose(each["loss"], wanted[each["step"]], rel_tol=1e-3), each


@pytest.mark.spawns
def test_a_sharded_model_has_the_same_losses_and_is_saved_whole(calm, tmp_path):
    found = run(tmp_path, environ={"SHARDS": "2"})
    for wanted, each in zip(calm.results(2)[0]["history"], found.results(2)[1]["history"], strict=True):
        assert each.keys() == wanted.keys()
        assert all(math.isclose(each[name], value, rel_tol=1e-5) for name, value in wanted.items())
    model = LlamaForCausalLM.from_pretrained(tmp_path / "out" / "checkpoint-9")
    assert all(torch.equal(value, found.results(2)[0]["state"][name]) for name, value in model.state_dict().items())
