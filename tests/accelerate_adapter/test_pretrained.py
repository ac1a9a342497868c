"""A script's own `from_pretrained` with `delayed_init=True`: nothing is loaded before `prepare`, then shards are."""

import pytest
import torch
from harness import run_ranks

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32}


def train(accelerator, folder):
    """The script."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").train()
    has_values = not any(each.is_meta for each in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
    losses, tokens = [], torch.arange(2 * 8).view(2, 8)
    for _ in range(3):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward() if accelerator is None else accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, has_values, model.lm_head.weight is model.model.embed_tokens.weight


def with_plugin(folder):
    from hyperpod_plugins.accelerate import HyperPodPlugin

    return train(HyperPodPlugin(hybrid_shard_degree=2, delayed_init=True).accelerator(), folder)


def save(folder):
    """The ends of scripts: without gathered weights, and by the lines that the error names."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from hyperpod_plugins.accelerate import HyperPodPlugin
    from hyperpod_plugins.errors import ConfigError
    from hyperpod_plugins.parallel import export_safetensors

    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    accelerator = HyperPodPlugin(hybrid_shard_degree=2).accelerator()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    for part in (accelerator.unwrap_model(model), model.model):
        with pytest.raises(ConfigError, match=r"get_state_dict\(model\).*export_safetensors"):
            part.save_pretrained(folder / "refused", is_main_process=accelerator.is_main_process)
    assert not (folder / "refused").exists()
    state = accelerator.get_state_dict(model)
    model.save_pretrained(folder / "gathered", is_main_process=accelerator.is_main_process, state_dict=state)
    export_safetensors(model, folder / "exported")
    accelerator.wait_for_everyone()
    for saved in ("gathered", "exported"):
        found = LlamaForCausalLM.from_pretrained(folder / saved).state_dict()
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], value) for name, value in wanted.items())


def save_adapters(folder):
    peft = pytest.importorskip("peft")
    from transformers import LlamaConfig, LlamaForCausalLM

    from hyperpod_plugins.accelerate import HyperPodPlugin
    from hyperpod_plugins.errors import ConfigError

    def make():
        torch.manual_seed(1)
        return LlamaForCausalLM(LlamaConfig(**SIZES))

    adapters = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(make(), adapters)
    wanted = {name: value.clone() for name, value in peft.get_peft_model_state_dict(model).items()}
    accelerator = HyperPodPlugin(hybrid_shard_degree=2).accelerator()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    with pytest.raises(ConfigError, match=r"get_state_dict\(model\)"):
        model.save_pretrained(folder / "refused")
    state = accelerator.get_state_dict(model)
    model.save_pretrained(folder / "adapters", is_main_process=accelerator.is_main_process, state_dict=state)
    accelerator.wait_for_everyone()
    found = peft.get_peft_model_state_dict(peft.PeftModel.from_pretrained(make(), folder / "adapters"))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def save_what_the_program_sharded(folder):
    from torch.distributed.fsdp import fully_shard
    from transformers import LlamaConfig, LlamaForCausalLM

    from hyperpod_plugins.errors import ConfigError
    from hyperpod_plugins.parallel import ParallelConfig, build_mesh, parallelize

    torch.distributed.init_process_group("hyperpod")
    config = ParallelConfig(hybrid_shard_degree=2)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    mesh = build_mesh(config.topology(2), "cpu")
    fully_shard(model, mesh=mesh["replicate", "shard"])
    saved = []
    model.model.save_pretrained = saved.append  # the program's own
    parallelize(model, mesh, config)
    with pytest.raises(ConfigError, match="export_safetensors"):
        model.save_pretrained(folder / "refused")
    model.model.save_pretrained("own")
    assert saved == ["own"]
    torch.distributed.destroy_process_group()


@pytest.mark.spawns
def test_a_model_that_the_program_has_sharded_says_it_too_and_a_method_of_its_own_stays(tmp_path):
    run_ranks(save_what_the_program_sharded, tmp_path, world_size=2, timeout_s=240)
    assert not (tmp_path / "refused").exists()


@pytest.mark.spawns
def test_so_do_adapters(tmp_path):
    run_ranks(save_adapters, tmp_path, world_size=2, timeout_s=240)


@pytest.mark.spawns
def test_a_sharded_model_says_how_it_is_saved_and_what_it_says_works(tmp_path):
    run_ranks(save, tmp_path, world_size=2, timeout_s=240)


@pytest.mark.spawns
def test_a_script_that_loads_a_pretrained_model_trains_what_it_would_alone(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)).save_pretrained(tmp_path, max_shard_size="5KB")
    alone, has_values, is_tied = train(None, tmp_path)
    assert (has_values, is_tied) == (True, True)
    assert alone[-1] < alone[0]
    for losses, has_values, is_tied in run_ranks(with_plugin, tmp_path, world_size=2, timeout_s=240):
        assert (has_values, is_tied) == (False, True)
        assert losses == pytest.approx(alone, rel=2e-6)
