"""Full-state export: files that `transformers` loads, from any sharding."""

import json
import os
import resource
import sys

import pytest
import torch
import torch.distributed as dist
from device import DEVICE
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hyperpod_plugins.errors import CheckpointError, MissingExtraError
from hyperpod_plugins.parallel.checkpoint.safetensors import export_safetensors, plan_files


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


def llama(tied, vocab_size=33):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, tie_word_embeddings=tied, **sizes))


def export_on_two_ranks(path, tied):
    dist.init_process_group("gloo")
    model = llama(tied).to(torch.bfloat16)
    mesh = init_device_mesh(DEVICE, (2,), mesh_dim_names=("shard",))
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


SPLIT_VOCABULARY = 34  # 17 rows a tensor rank, which two shards cannot share evenly


def tokens():
    """Ids for each of two data ranks, `(data rank, batch, sequence)`."""
    return torch.randint(SPLIT_VOCABULARY, (2, 3, 8), generator=torch.Generator().manual_seed(1))


def full(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train_split_and_export(path, tied):
    """The trained parameters, and the loss of the trained model on the first tokens."""
    from hyperpod_plugins.parallel import ParallelConfig, build_mesh, parallelize

    dist.init_process_group("hyperpod")
    config = ParallelConfig(hybrid_shard_degree=2, tensor_parallel_degree=2)
    topology = config.topology(dist.get_world_size())
    model = parallelize(llama(tied, SPLIT_VOCABULARY), build_mesh(topology, DEVICE), config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    mine = tokens()[topology.data_rank(dist.get_rank())]
    for _ in range(2):
        model(input_ids=mine, labels=mine).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    export_safetensors(model, path, max_file_bytes=4000)
    trained = {name: full(value) for name, value in model.state_dict().items()}
    with torch.no_grad():
        return trained, full(model(input_ids=tokens()[0], labels=tokens()[0]).loss)


@pytest.mark.spawns
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_what_was_trained_under_tensor_parallelism(run_ranks, tmp_path, tied):
    from transformers import AutoModelForCausalLM

    by_rank = run_ranks(train_split_and_export, tmp_path / "m", tied, world_size=4, timeout_s=90)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype="auto")
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) is tied
    state, start = loaded.state_dict(), llama(tied, SPLIT_VOCABULARY).state_dict()
    for trained, loss in by_rank:
        assert trained.keys() == state.keys()
        for name, value in trained.items():
            assert torch.equal(value, state[name]), name
            assert value.dtype == state[name].dtype == torch.float32
            assert not torch.equal(value, start[name]), f"{name} was not trained"
        # Rows that were put together in another order would be equal above, and compute something else.
        torch.testing.assert_close(loss, loaded(input_ids=tokens()[0], labels=tokens()[0]).loss.detach())


# -- failing ----------------------------------------------------------------------------------------------------------


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_later_export_replaces_an_earlier_one_and_leaves_other_files(tmp_path):
    from safetensors.torch import load_file

    (tmp_path / "tokenizer.json").write_text("{}")
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    export_safetensors(model, tmp_path, max_file_bytes=300)
    assert {"model-00001-of-00002.safetensors", "model.safetensors.index.json"} < contents(tmp_path).keys()
    export_safetensors(model, tmp_path)
    assert "model.safetensors.index.json" not in contents(tmp_path)  # it would be read in place of the new file
    assert load_file(tmp_path / "model.safetensors").keys() == model.state_dict().keys()
    export_safetensors(model, tmp_path, max_file_bytes=300)
    assert "model.safetensors" not in contents(tmp_path)
    assert (tmp_path / "tokenizer.json").read_text() == "{}"
    assert ".export.part" not in contents(tmp_path)


def test_missing_safetensors_is_named_with_what_to_do_and_nothing_is_written(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    words = r"exporting a model needs .*'safetensors', which is not .*pip install safetensors "
    with pytest.raises(MissingExtraError, match=words):
        export_safetensors(nn.Linear(2, 2), tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_a_path_that_cannot_be_a_folder(tmp_path):
    (tmp_path / "m").write_text("a file")
    for folder in (tmp_path / "m", tmp_path / "m" / "deeper"):
        with pytest.raises(CheckpointError, match="was not exported to"):
            export_safetensors(nn.Linear(2, 2), folder)
    assert (tmp_path / "m").read_text() == "a file"


def test_a_name_that_is_taken_by_a_folder(tmp_path):
    export_safetensors(nn.Linear(2, 2), tmp_path)
    before = contents(tmp_path)
    (tmp_path / "model.safetensors.index.json").mkdir()
    with pytest.raises(CheckpointError, match=r"index\.json is a folder"):
        export_safetensors(nn.Linear(2, 2), tmp_path, max_file_bytes=16)
    (tmp_path / "model.safetensors.index.json").rmdir()
    assert contents(tmp_path) == before


def export_onto_a_full_disk(folder):
    """Rank 0 may write files of 2000 bytes: its first file fits, and the second does not."""
    if "RANK" in os.environ and int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 100))
    if os.environ["RANK"] == "0":
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
    try:
        export_safetensors(model, folder, max_file_bytes=400)
    except CheckpointError as error:
        return str(error)


@pytest.mark.spawns
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_full_disk_is_told_to_all_ranks_and_costs_no_file(run_ranks, tmp_path, world_size):
    export_safetensors(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 100)), tmp_path, max_file_bytes=400)
    before = contents(tmp_path)
    messages = run_ranks(export_onto_a_full_disk, tmp_path, world_size=world_size, timeout_s=60)
    assert "too large" in messages[0]
    assert all("files that were there are kept" in message for message in messages)
    assert all("another rank failed" in message for message in messages[1:])
    assert contents(tmp_path) == before


def export_where_one_rank_has_a_file(folder):
    dist.init_process_group("gloo")
    os.chdir(folder / str(dist.get_rank()))
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh(DEVICE, (2,)))
    try:
        export_safetensors(model, "m")
    except CheckpointError as error:
        message = str(error)
    export_safetensors(model, "other")  # the ranks still agree on what comes next
    return message


@pytest.mark.spawns
def test_a_file_that_only_rank_0_sees_is_told_to_all_ranks(run_ranks, tmp_path):
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    (tmp_path / "0" / "m").write_text("a file")
    first, second = run_ranks(export_where_one_rank_has_a_file, tmp_path, world_size=2, timeout_s=60)
    assert "Not a directory" in first
    assert "another rank failed" in second
    assert [path.name for path in (tmp_path / "0" / "other").iterdir()] == ["model.safetensors"]
    assert not list((tmp_path / "1").iterdir())
