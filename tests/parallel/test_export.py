"""A sharded checkpoint in other forms, by one process without the program: `hyperpod export`."""

import json
import tempfile

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from hyperpod_plugins.cli import main
from hyperpod_plugins.errors import CheckpointDamaged, CheckpointMismatch, ConfigError
from hyperpod_plugins.parallel import CheckpointWriter
from hyperpod_plugins.parallel.checkpoint.export import FORMS, export_checkpoint


class Net(nn.Module):
    """With tied weights, a buffer, a state of its own, and two groups of parameters."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(7, 4), nn.BatchNorm1d(4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.calls = 0

    def forward(self, tokens):
        self.calls += 1
        return self.head(self.norm(self.embedding(tokens)))

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]

    def optimizer(self):
        groups = [{"params": self.norm.parameters(), "weight_decay": 0.0}, {"params": self.embedding.parameters()}]
        return torch.optim.AdamW(groups, lr=0.1)


@pytest.fixture
def saved(tmp_path):
    """A model and its optimizer after two steps, and the folder of their checkpoint."""
    torch.manual_seed(1)
    model = Net()
    optimizer = model.optimizer()
    for _ in range(2):
        model(torch.arange(6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    writer = CheckpointWriter()
    extra = {"epoch": 1, "global_step": 2, "lr_schedulers": [], "hyper_parameters": {"width": 4}}
    extra["pytorch-lightning_version"] = "2.6.0"
    writer.save(tmp_path / "last.ckpt", model=model, optimizers=[optimizer], extra=extra)
    writer.close()
    return model, optimizer, tmp_path / "last.ckpt"


def assert_equal(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        same = torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value
        assert same, name


def test_a_file_for_lightning_holds_all_that_lightning_saves(saved, tmp_path):
    model, optimizer, folder = saved
    export_checkpoint(folder, tmp_path / "one.ckpt", "lightning")
    found = torch.load(tmp_path / "one.ckpt", weights_only=True)
    assert (found["epoch"], found["global_step"], found["hyper_parameters"]) == (1, 2, {"width": 4})
    assert_equal(found["state_dict"], model.state_dict())
    other = Net()
    other.load_state_dict(found["state_dict"])  # strict: tied names are there, too
    assert other.calls == 2
    (state,) = found["optimizer_states"]
    of_other = other.optimizer()
    of_other.load_state_dict(state)
    wanted, loaded = optimizer.state_dict(), of_other.state_dict()
    assert loaded["param_groups"] == wanted["param_groups"]
    assert loaded["state"].keys() == wanted["state"].keys()
    for number, values in wanted["state"].items():
        assert_equal(loaded["state"][number], values)


def test_weights_of_a_part_have_the_names_of_that_part(saved, tmp_path):
    from safetensors.torch import load_file

    model, _, folder = saved
    export_checkpoint(folder, tmp_path / "part", "safetensors", prefix="norm.")
    assert_equal(load_file(tmp_path / "part" / "model.safetensors"), dict(model.norm.state_dict()))
    with pytest.raises(CheckpointMismatch, match=r"begins with 'encoder\.'; there are embedding\.weight, norm"):
        export_checkpoint(folder, tmp_path / "none", "safetensors", prefix="encoder.")
    assert not (tmp_path / "none").exists()


@pytest.mark.filterwarnings("ignore:.*in a single process")
def test_torch_reads_a_folder_of_weights_and_a_file_of_everything(saved, tmp_path):
    model, optimizer, folder = saved
    export_checkpoint(folder, tmp_path / "dcp", "dcp")
    weights = {name: torch.zeros_like(value) for name, value in model.state_dict().items() if name != "_extra_state"}
    dcp.load(weights, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert_equal(weights, {name: value for name, value in model.state_dict().items() if name != "_extra_state"})
    export_checkpoint(folder, tmp_path / "all.pt", "consolidated")
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    assert_equal(found["model"], model.state_dict())
    assert found["extra"]["epoch"] == 1
    state = optimizer.state[model.embedding.weight]
    assert torch.equal(found["optimizers"][0]["state"]["embedding.weight.exp_avg"], state["exp_avg"])


def test_several_files_have_an_index_and_a_configuration(saved, tmp_path, monkeypatch):
    from safetensors.torch import load_file

    model, _, folder = saved
    monkeypatch.setattr("hyperpod_plugins.parallel.checkpoint.export._MAX_FILE_BYTES", 64)
    config = tmp_path / "config"
    config.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors.index.json"):
        (config / name).write_text("{}")
    export_checkpoint(folder, tmp_path / "hf", "hf", config=config)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    found = {name: load_file(tmp_path / "hf" / file)[name] for name, file in index["weight_map"].items()}
    stored = {name: value for name, value in model.state_dict().items() if name not in ("head.weight", "_extra_state")}
    assert_equal(found, stored)  # tied weights once, as transformers stores them
    assert len({*index["weight_map"].values()}) > 1
    assert {"config.json", "tokenizer.json"} <= {file.name for file in (tmp_path / "hf").iterdir()}


@pytest.mark.parametrize(
    ("form", "options", "says"),
    [
        ("onnx", {}, "'onnx' is not a form of checkpoint; allowed are lightning, safetensors, hf, dcp, consolidated"),
        ("hf", {}, "needs a folder with the model's config.json"),
        ("dcp", {"config": "."}, "only the form hf takes a configuration"),
        ("lightning", {"prefix": "model."}, "leave 'model.' out"),
    ],
)
def test_what_does_not_go_together_is_refused(saved, tmp_path, form, options, says):
    with pytest.raises(ConfigError, match=says):
        export_checkpoint(saved[2], tmp_path / "target", form, **options)
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("form", [each for each in FORMS if each != "hf"])
def test_what_exists_is_kept_and_so_is_it_when_an_export_fails(saved, tmp_path, form):
    model, _, folder = saved
    target = tmp_path / "target"
    target.write_text("precious")
    with pytest.raises(ConfigError, match="target exists"):
        export_checkpoint(folder, target, form)
    part = next(folder.glob("*.distcp"))
    content = bytearray(part.read_bytes())
    content[content.index(model.embedding.weight.detach().numpy().tobytes())] ^= 1
    part.write_bytes(content)
    with pytest.raises(CheckpointDamaged):
        export_checkpoint(folder, target, form, overwrite=True)
    assert target.read_text() == "precious"
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".")] == []


def test_weights_that_are_tied_to_others_outside_of_a_part_are_there(saved, tmp_path):
    model, _, folder = saved
    export_checkpoint(folder, tmp_path / "head.pt", "consolidated", prefix="head.")
    found = torch.load(tmp_path / "head.pt", weights_only=True)["model"]
    assert_equal(found, {"weight": model.embedding.weight})  # and not the state of other modules


def test_what_no_trainer_wrote_is_no_lightning_checkpoint(saved, tmp_path):
    writer = CheckpointWriter()
    writer.save(tmp_path / "loop", model=saved[0])
    writer.close()
    with pytest.raises(CheckpointMismatch, match="was not written by a Trainer"):
        export_checkpoint(tmp_path / "loop", tmp_path / "one.ckpt", "lightning")


def test_an_export_replaces_an_earlier_one_and_nothing_else(saved, tmp_path):
    folder = saved[2]
    for _ in range(2):
        export_checkpoint(folder, tmp_path / "dcp", "dcp", overwrite=True)
    for target, words in ((folder, "is or holds the checkpoint"), (tmp_path, "is or holds the checkpoint")):
        with pytest.raises(ConfigError, match=words):
            export_checkpoint(folder, target, "dcp", overwrite=True)
    (tmp_path / "home" / "work").mkdir(parents=True)
    with pytest.raises(ConfigError, match="has folders in it"):
        export_checkpoint(folder, tmp_path / "home", "safetensors", overwrite=True)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["dcp", "home", "last.ckpt"]


def test_the_command_names_its_file_after_the_checkpoint(saved, tmp_path, capsys):
    _, _, folder = saved
    assert main(["export", str(folder), "--to", "lightning"]) == 0
    assert "last-lightning.ckpt: 0.0 MB in 1 file, read back and equal" in capsys.readouterr().out
    assert (tmp_path / "last-lightning.ckpt").is_file()
    assert main(["export", str(folder), "--to", "lightning"]) == 2
    assert "exists. Choose another name" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "nowhere"), "--to", "dcp"]) == 2
    assert "there is no sharded checkpoint at" in capsys.readouterr().err


def test_progress_ends_with_all_bytes(saved, tmp_path):
    told = []
    export_checkpoint(
        saved[2], tmp_path / "one.ckpt", "lightning", progress=lambda done, total: told.append((done, total))
    )
    assert told[-1][0] == told[-1][1] > 0
    assert sorted(told) == told


def test_a_url_is_opened_as_the_file_for_lightning(saved, tmp_path, monkeypatch):
    """By fsspec, as Lightning does. A relative path begins after two slashes, an absolute one with the third."""
    model, _, folder = saved
    export_checkpoint(folder, tmp_path / "one.ckpt", "lightning")
    wanted = torch.load(tmp_path / "one.ckpt")
    room = tmp_path / "room"
    room.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(room))
    monkeypatch.chdir(tmp_path)
    for url in (f"hyperpod://{folder}", f"hyperpod://{folder.name}"):
        files, path = fsspec.core.url_to_fs(url)
        assert files.exists(path)
        assert files.isfile(path)
        with fsspec.open(url) as file:
            found = torch.load(file)
        assert_equal(found["state_dict"], model.state_dict())
        assert found.keys() == wanted.keys()
        assert found["optimizer_states"][0]["param_groups"] == wanted["optimizer_states"][0]["param_groups"]
    assert not [*room.iterdir()]


def test_a_url_without_a_complete_checkpoint_is_no_file_and_none_is_written(saved, tmp_path):
    files, path = fsspec.core.url_to_fs(f"hyperpod://{tmp_path / 'nothing'}")
    assert not files.exists(path)
    with pytest.raises(CheckpointDamaged, match="nothing"):
        files.open(path)
    with pytest.raises(ConfigError, match="for reading"):
        files.open(str(saved[2]), "wb")
    assert saved[2].is_dir()
