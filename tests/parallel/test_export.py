"""Full-state export: files that `transformers` loads, from any sharding."""

import json

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hyperpod_plugins.parallel.export import export_safetensors, plan_files


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], []),
        ([4, 4, 4], [["t0", "t1"], ["t2"]]),
        ([9, 1], [["t0"], ["t1"]]),
        ([1, 20, 1, 1], [["t0"], ["t1"], ["t2", "t3"]]),
        ([0, 8, 0], [["t0", "t1", "t2"]]),
    ],
)
def test_plan_of_files(sizes, expected):
    assert plan_files({f"t{i}": size for i, size in enumerate(sizes)}, max_file_bytes=8) == expected


def test_tied_weights_are_stored_once_and_types_kept(tmp_path):
    from safetensors.torch import load_file

    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False), nn.LayerNorm(3).bfloat16())
    model[1].weight = model[0].weight
    export_safetensors(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {
        "0.weight": torch.float32,
        "2.weight": torch.bfloat16,
        "2.bias": torch.bfloat16,
    }
    assert torch.equal(tensors["0.weight"], model[0].weight)


def llama(tied):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=33, tie_word_embeddings=tied, **sizes))


def export_on_two_ranks(path, tied):
    dist.init_process_group("gloo")
    model = llama(tied).to(torch.bfloat16)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    export_safetensors(model, path, max_file_bytes=4000)


@pytest.mark.spawns
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_it(run_ranks, tmp_path, tied):
    run_ranks(export_on_two_ranks, world_size=2, path=tmp_path / "m", tied=tied)
    from transformers import AutoModelForCausalLM

    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    assert ("lm_head.weight" in index["weight_map"]) is not tied
    assert (tmp_path / "m" / "generation_config.json").exists()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype="auto")
    expected = llama(tied).to(torch.bfloat16)
    assert type(loaded) is type(expected)
    for (name, value), other in zip(expected.state_dict().items(), loaded.state_dict().values(), strict=True):
        assert torch.equal(value, other), name
        assert value.dtype == other.dtype
