"""Sharded checkpoints: any world reads them bitwise, and no interruption or mix-up passes unnoticed."""

import contextlib
import os
import pickle
import shutil
import signal
import threading
import zlib
from concurrent.futures import Future

import pytest
import torch
import torch.distributed as dist
from device import DEVICE
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hyperpod_plugins.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch
from hyperpod_plugins.parallel.checkpoint import dcp_storage as checkpoint_storage
from hyperpod_plugins.parallel.checkpoint import files as checkpoint_files
from hyperpod_plugins.parallel.checkpoint import save_load as checkpoint
from hyperpod_plugins.parallel.checkpoint.dcp_storage import SafeReader
from hyperpod_plugins.parallel.checkpoint.files import tensor_checksum, write_sums
from hyperpod_plugins.parallel.checkpoint.save_load import CheckpointWriter, SaveHandle, load_checkpoint
from hyperpod_plugins.parallel.local_optimizer import step_locally


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("scratch", torch.randn(2), persistent=False)

    def forward(self, x):
        self.seen += 1
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    """Uneven (7 rows), tied, frozen and scalar parameters, and buffers of both kinds."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(6)
        self.norm.bias.requires_grad_(False)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make(shape=None, *, seed=0, optimizer=torch.optim.AdamW):
    """(model, optimizer) on one process, or sharded over a mesh replicate x shard x tensor."""
    torch.manual_seed(seed)
    model = Model()
    if shape is not None:
        mesh = init_device_mesh(DEVICE, shape, mesh_dim_names=("replicate", "shard", "tensor"))
        for block in model.blocks:
            parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            fully_shard(block, mesh=mesh["replicate", "shard"])
        fully_shard(model, mesh=mesh["replicate", "shard"])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [parameter for parameter in trained if parameter.ndim > 1]
    plain = [parameter for parameter in trained if parameter.ndim <= 1]
    return model, optimizer([{"params": decayed, "weight_decay": 0.1}, {"params": plain}], lr=0.01)


def train(model, optimizer, num_steps):
    for step in range(num_steps):
        optimizer.zero_grad()
        model(torch.arange(5 + step)[None] % 7).square().mean().backward()
        optimizer.step()


def full(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def gathered(model, optimizer):
    """All values of model and optimizer, as one process would have them."""
    values = {name: full(tensor) for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            values[f"{name}:{key}"] = full(value)
    for index, group in enumerate(optimizer.param_groups):
        values |= {
            f"group{index}:{key}": torch.tensor(value) for key, value in group.items() if key in ("lr", "weight_decay")
        }
    return values


def differing(got, expected):
    assert got.keys() == expected.keys()
    return [
        name for name in got if not torch.equal(got[name], expected[name]) or got[name].dtype != expected[name].dtype
    ]


def save_alone(path, *, num_steps=2, extra=None, **options):
    model, optimizer = make(**options)
    train(model, optimizer, num_steps)
    writer = CheckpointWriter()
    writer.save(path, model=model, optimizers=[optimizer], extra=extra)
    writer.close()
    return gathered(model, optimizer)


# -- one process ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop])
def test_one_process_there_and_back(tmp_path, optimizer):
    extra = {"step": 2, "nested": {"loss": [0.5, None], "when": (1, "a")}, "state": torch.arange(3)}
    expected = save_alone(tmp_path / "c", extra=extra, optimizer=optimizer)
    model, fresh = make(seed=9, optimizer=optimizer)
    fresh.param_groups[0]["lr"] = 7.0
    loaded = load_checkpoint(tmp_path / "c", model=model, optimizers=[fresh])
    assert differing(gathered(model, fresh), expected) == []
    assert torch.equal(loaded.pop("state"), extra.pop("state"))
    assert loaded == extra
    assert model.head.weight is model.embed.weight


def test_resuming_equals_never_stopping(tmp_path):
    save_alone(tmp_path / "c", num_steps=2)
    model, optimizer = make(seed=9)
    load_checkpoint(tmp_path / "c", model=model, optimizers=[optimizer])
    resumed, straight = (model, optimizer), make()
    train(*straight, 2)
    train(*resumed, 3)
    train(*straight, 3)
    assert differing(gathered(*resumed), gathered(*straight)) == []


def test_an_optimizer_that_has_not_stepped_stays_so(tmp_path):
    model, optimizer = make()
    before = gathered(model, optimizer)
    CheckpointWriter().save(tmp_path / "c", model=model, optimizers=[optimizer])
    assert differing(gathered(model, optimizer), before) == []
    assert not optimizer.state
    other, stepped = make(seed=9)
    train(other, stepped, 1)
    load_checkpoint(tmp_path / "c", model=other, optimizers=[stepped])
    assert not stepped.state
    assert differing(gathered(other, stepped), before) == []


def test_several_optimizers_and_model_only(tmp_path):
    model = Model()
    optimizers = [
        torch.optim.SGD(model.blocks[0].parameters(), lr=0.1, momentum=0.9),
        torch.optim.AdamW(model.blocks[1].parameters(), lr=torch.tensor(0.2)),
    ]
    model(torch.arange(5)[None]).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    CheckpointWriter().save(tmp_path / "c", model=model, optimizers=optimizers)

    other = Model()
    fresh = [
        torch.optim.SGD(other.blocks[0].parameters(), lr=0.3, momentum=0.9),
        torch.optim.AdamW(other.blocks[1].parameters(), lr=torch.tensor(0.4)),
    ]
    kept_lr = fresh[1].param_groups[0]["lr"]
    load_checkpoint(tmp_path / "c", model=other, optimizers=fresh)
    assert fresh[0].param_groups[0]["lr"] == 0.1
    assert kept_lr.item() == pytest.approx(0.2)
    momentum = [state["momentum_buffer"] for state in fresh[0].state.values()]
    assert all(map(torch.equal, momentum, (state["momentum_buffer"] for state in optimizers[0].state.values())))

    load_checkpoint(tmp_path / "c", model=Model())
    with pytest.raises(CheckpointMismatch, match="holds 2 optimizers, but 1"):
        load_checkpoint(tmp_path / "c", model=other, optimizers=fresh[:1])


def test_extra_state_of_modules(tmp_path):
    class Counting(nn.Linear):
        count = 0

        def get_extra_state(self):
            return {"count": self.count}

        def set_extra_state(self, state):
            self.count = state["count"]

    model, other = Counting(2, 2), Counting(2, 2)
    model.count = 5
    CheckpointWriter().save(tmp_path / "c", model=model)
    load_checkpoint(tmp_path / "c", model=other)
    assert other.count == 5


def other_width():
    model = Model()
    model.norm = nn.LayerNorm(5)
    return model


def other_depth():
    model = Model()
    model.blocks.append(Block())
    return model


def shallower():
    model = Model()
    del model.blocks[1]
    return model


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (other_width, r"norm.weight \(checkpoint \(6,\), model \(5,\)\).* of another shape"),
        (other_depth, r"blocks.2.down.bias, blocks.2.down.weight, .* missing in the checkpoint"),
        (shallower, r"blocks.1.down.bias, .* unknown to the model"),
        (lambda: nn.Sequential(*(nn.Linear(2, 2) for _ in range(9))), "and 13 more missing in the checkpoint"),
    ],
)
def test_another_model_is_refused_before_anything_changes(tmp_path, build, message):
    save_alone(tmp_path / "c")
    model = build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointMismatch, match=message):
        load_checkpoint(tmp_path / "c", model=model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_other_parameter_groups_are_refused(tmp_path):
    save_alone(tmp_path / "c")
    model = Model()
    with pytest.raises(CheckpointMismatch, match=r"groups of \[11\].*groups of \[5, 5\]; norm.bias in only one"):
        load_checkpoint(tmp_path / "c", model=model, optimizers=[torch.optim.AdamW([*model.parameters()])])


class AdamW(torch.optim.SGD):
    """Of the same name, with other hyperparameters."""


def test_another_optimizer_is_refused(tmp_path):
    save_alone(tmp_path / "c")
    for other in (torch.optim.SGD, torch.optim.Adam, AdamW):
        model, optimizer = make(seed=9, optimizer=other)
        before = gathered(model, optimizer)
        message = (
            rf"optimizer 0 is {other.__name__} \(.*lr.*\), but the checkpoint was saved with AdamW \(amsgrad, betas"
        )
        with pytest.raises(CheckpointMismatch, match=message):
            load_checkpoint(tmp_path / "c", model=model, optimizers=[optimizer])
        assert differing(gathered(model, optimizer), before) == []
        load_checkpoint(tmp_path / "c", model=model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_types_are_refused_with_optimizers_and_said_without(tmp_path, dtype):
    save_alone(tmp_path / "c")
    model, _ = make(seed=9)
    model.to(dtype)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW([{"params": [p for p in trained if p.ndim == n]} for n in (2, 1)])
    with pytest.raises(
        CheckpointMismatch, match=rf"blocks.0.seen \(checkpoint torch.float32, model {dtype}\).*of another type"
    ):
        load_checkpoint(tmp_path / "c", model=model, optimizers=[optimizer])
    with pytest.warns(UserWarning, match="converted to the types of the model"):
        load_checkpoint(tmp_path / "c", model=model)
    loaded = make(seed=9)[0]
    load_checkpoint(tmp_path / "c", model=loaded)
    assert torch.equal(model.embed.weight, loaded.embed.weight.to(dtype))


def test_state_of_an_optimizer_has_the_type_that_was_saved(tmp_path):
    expected = save_alone(tmp_path / "c")
    model, optimizer = make(seed=9)
    train(model, optimizer, 1)
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].bfloat16()
    load_checkpoint(tmp_path / "c", model=model, optimizers=[optimizer])
    assert differing(gathered(model, optimizer), expected) == []


def test_a_parameter_outside_the_model_is_refused(tmp_path):
    model = Model()
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(3))])
    with pytest.raises(CheckpointError, match=r"shape \(3,\) that is not in the model"):
        CheckpointWriter().save(tmp_path / "c", model=model, optimizers=[optimizer])


class Evil:
    def __reduce__(self):
        return (os.mkdir, ("evil-was-here",))


def no_folder(path):
    shutil.rmtree(path)


def no_metadata(path):
    (path / ".metadata").unlink()


def no_document(path):
    (path / "meta.pt").unlink()


def cut_metadata(path):
    file = path / ".metadata"
    file.write_bytes(file.read_bytes()[:-20])


def cut_document(path):
    file = path / "meta.pt"
    file.write_bytes(file.read_bytes()[:-20])


def cut_data(path):
    file = path / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])


def no_data(path):
    (path / "__0_0.distcp").unlink()


def forge_metadata(path, content):
    """With its checksum, as somebody writes it who wants it to be read."""
    (path / ".metadata").write_bytes(content)
    write_sums(path, {name: (path / name).read_bytes() for name in (".metadata", "meta.pt")})


def evil_metadata(path):
    forge_metadata(path, pickle.dumps(Evil()))


def description_that_runs_code():
    """A description of a checkpoint by which a function of the module of descriptions compiles and runs a statement."""
    module = b"torch.distributed.checkpoint.metadata"
    statement = "x=__import__('os').mkdir('evil-was-here')):\n  #"
    names = (None, {"__annotations__": {statement: "InitVar"}, "__module__": "dataclasses"})
    pushed = pickle.dumps(names, protocol=2)[2:-1]
    return b"\x80\x02c%s\nStorageMeta\nq\x80%sbc%s\ndataclass\nh\x80\x85R." % (module, pushed, module)


def metadata_that_runs_code(path):
    forge_metadata(path, description_that_runs_code())


def metadata_of_files_elsewhere(path):
    torch.save(torch.ones(3), path.parent / "elsewhere")
    metadata = SafeReader(path).read_metadata()
    for info in metadata.storage_data.values():
        info.relative_path = "../elsewhere"
        info.offset, info.length = 0, 10
    forge_metadata(path, pickle.dumps(metadata))


def evil_document(path):
    torch.save(Evil(), path / "meta.pt")
    forge_metadata(path, (path / ".metadata").read_bytes())


def foreign_document(path):
    torch.save({"epoch": 3}, path / "meta.pt")
    forge_metadata(path, (path / ".metadata").read_bytes())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3).t(),
        torch.ones(3, dtype=torch.bfloat16, requires_grad=True),
        torch.tensor(5),
        torch.tensor([True, False]),
        torch.empty(0, 2),
    ],
)
def test_a_checksum_of_a_tensor_is_that_of_its_bytes_and_continues_another(tensor):
    content = bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist())
    assert tensor_checksum(tensor) == zlib.crc32(content)
    assert tensor_checksum(tensor, zlib.crc32(b"header")) == zlib.crc32(b"header" + content)


def no_checksums(path):
    (path / "checksums.json").unlink()


def garbled_checksums(path):
    (path / "checksums.json").write_text('{"meta.pt": "x"}')


def a_file(path):
    shutil.rmtree(path)
    path.write_bytes(b"ckpt")


@pytest.mark.parametrize(
    "damage",
    [
        no_folder,
        no_metadata,
        no_document,
        cut_metadata,
        cut_document,
        cut_data,
        no_data,
        evil_metadata,
        metadata_that_runs_code,
        metadata_of_files_elsewhere,
        evil_document,
        foreign_document,
        no_checksums,
        garbled_checksums,
        a_file,
    ],
)
def test_damaged_and_foreign_checkpoints(tmp_path, monkeypatch, damage):
    monkeypatch.chdir(tmp_path)
    save_alone(tmp_path / "c")
    damage(tmp_path / "c")
    with pytest.raises(CheckpointDamaged, match=r"checkpoint|written by|not a file of the folder|is not a tensor"):
        load_checkpoint(tmp_path / "c", model=Model())
    assert StorageMeta.__module__ == Metadata.__module__
    assert not (tmp_path / "evil-was-here").exists()


def flip(file, position):
    content = bytearray(file.read_bytes())
    content[position] ^= 1 << (position % 8)
    file.write_bytes(content)


def test_a_flipped_bit_is_found_wherever_it_is(tmp_path):
    save_alone(tmp_path / "c")
    path = tmp_path / "c"
    parts = SafeReader(path).read_metadata().storage_data
    places = [(".metadata", position, r"\.metadata is not") for position in range(0, 1000, 97)]
    places += [("meta.pt", position, r"meta\.pt is not") for position in range(0, 1000, 97)]
    for index, info in parts.items():
        message = f"{index.fqn} is not what was written.*{info.offset} of .*{info.relative_path}"
        places.append((info.relative_path, info.offset + info.length // 2, message))
    for name, position, message in places:
        flip(path / name, position)
        model, optimizer = make()
        with pytest.raises(CheckpointDamaged, match=message):
            load_checkpoint(path, model=model, optimizers=[optimizer])
        flip(path / name, position)
    model, optimizer = make()
    load_checkpoint(path, model=model, optimizers=[optimizer])


def test_a_checkpoint_of_a_version_without_checksums_loads_with_a_warning(tmp_path):
    expected = save_alone(tmp_path / "c")
    document = torch.load(tmp_path / "c" / "meta.pt")
    del document["has_checksums"]
    torch.save(document, tmp_path / "c" / "meta.pt")
    (tmp_path / "c" / "checksums.json").unlink()
    model, optimizer = make(seed=9)
    with pytest.warns(UserWarning, match="has no checksums"):
        load_checkpoint(tmp_path / "c", model=model, optimizers=[optimizer])
    assert differing(gathered(model, optimizer), expected) == []


@pytest.mark.parametrize(
    "name", ["dataclass", "field", "os", "Enum", "Any", "__builtins__", "__loader__", "__class__", "Metadata.__init__"]
)
def test_a_description_has_classes_from_an_exact_list(tmp_path, name):
    asked = f"ctorch.distributed.checkpoint.metadata\n{name}\n."
    for protocol in (0, 4):
        (tmp_path / ".metadata").write_bytes((b"\x80\x04" if protocol else b"") + asked.encode())
        with pytest.raises(CheckpointDamaged, match="which no checkpoint needs"):
            SafeReader(tmp_path).read_metadata()


def test_python_objects_in_extra_need_trust(tmp_path):
    CheckpointWriter().save(tmp_path / "c", model=Model(), extra={"where": SaveHandle})
    with pytest.raises(CheckpointDamaged, match=r"weights_only=False.*trust_checkpoints=True.*--trust"):
        load_checkpoint(tmp_path / "c", model=Model())
    assert load_checkpoint(tmp_path / "c", model=Model(), weights_only=False) == {"where": SaveHandle}


def test_a_folder_of_something_else_is_kept_until_the_new_one_is_complete(tmp_path):
    (tmp_path / "c").write_text("a file")
    with pytest.raises(CheckpointError, match="is a file"):
        save_alone(tmp_path / "c")
    assert (tmp_path / "c").read_text() == "a file"


def test_overwriting(tmp_path):
    save_alone(tmp_path / "c", extra={"step": 1})
    expected = save_alone(tmp_path / "c", num_steps=3, extra={"step": 2})
    model, optimizer = make(seed=9)
    assert load_checkpoint(tmp_path / "c", model=model, optimizers=[optimizer]) == {"step": 2}
    assert differing(gathered(model, optimizer), expected) == []
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]


def test_an_overwrite_interrupted_between_the_renames(tmp_path):
    save_alone(tmp_path / "c", extra={"step": 1})
    (tmp_path / "c").rename(tmp_path / ".c.old")
    assert load_checkpoint(tmp_path / "c", model=Model()) == {"step": 1}
    save_alone(tmp_path / "c", extra={"step": 2})
    assert load_checkpoint(tmp_path / "c", model=Model()) == {"step": 2}
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]


def test_training_goes_on_during_a_background_save(tmp_path):
    model, optimizer = make()
    train(model, optimizer, 2)
    expected = gathered(model, optimizer)
    writer = CheckpointWriter()
    extra = {"step": [2]}
    writer.save(tmp_path / "c", model=model, optimizers=[optimizer], extra=extra, background=True)
    extra["step"].append(3)
    train(model, optimizer, 3)
    writer.wait(timeout_s=60)
    assert differing(gathered(model, optimizer), expected) != []
    loaded, fresh = make(seed=9)
    assert load_checkpoint(tmp_path / "c", model=loaded, optimizers=[fresh]) == {"step": [2]}
    assert differing(gathered(loaded, fresh), expected) == []
    writer.close()


def test_errors_of_a_background_save_come_with_the_next_one(tmp_path):
    (tmp_path / "file").write_text("")
    writer = CheckpointWriter()
    writer.save(tmp_path / "file" / "c", model=Model(), background=True)
    with pytest.raises(CheckpointError, match="was not written"):
        writer.save(tmp_path / "c", model=Model())
    writer.save(tmp_path / "c", model=Model())
    handle = writer.save(tmp_path / "file" / "c", model=Model(), background=True)
    with pytest.raises(CheckpointError, match="was not written"):
        handle.wait(timeout_s=60)


def test_removal_comes_after_the_save_that_is_going_on_and_waits_for_nobody(tmp_path, monkeypatch):
    may_publish, publish = threading.Event(), checkpoint.publish

    def slowly(path, document):
        assert may_publish.wait(30)
        publish(path, document)

    save_alone(tmp_path / "old", extra={"step": 1})
    monkeypatch.setattr(checkpoint, "publish", slowly)
    writer = CheckpointWriter()
    saved = writer.save(tmp_path / "new", model=Model(), extra={"step": 2}, background=True)
    seen = []

    def remove():
        seen.append((tmp_path / "new").exists())
        shutil.rmtree(tmp_path / "old")

    writer.when_written(remove)
    assert not saved.is_done
    assert load_checkpoint(tmp_path / "old", model=Model()) == {"step": 1}
    may_publish.set()
    writer.wait(timeout_s=60)
    assert seen == [True]
    assert [entry.name for entry in tmp_path.iterdir()] == ["new"]
    writer.close()


def test_nothing_is_removed_for_a_save_that_failed(tmp_path):
    (tmp_path / "file").write_text("")
    writer = CheckpointWriter()
    writer.save(tmp_path / "file" / "c", model=Model(), background=True)
    writer.when_written(lambda: (tmp_path / "file").unlink())
    with pytest.raises(CheckpointError, match="was not written"):
        writer.close()
    assert (tmp_path / "file").exists()


def test_waiting_has_an_end(tmp_path):
    with pytest.raises(CheckpointError, match=r"still being written after 0\.01 s"):
        SaveHandle(tmp_path / "c", Future()).wait(timeout_s=0.01)


def test_a_timeout_of_the_writer_is_not_taken_for_one_of_the_wait(tmp_path):
    """Such as that of a network file system from which the older checkpoint is removed."""
    writer = CheckpointWriter()
    writer.save(tmp_path / "c", model=Model(), background=True)

    def remove():
        raise TimeoutError("a file system does not answer")

    writer.when_written(remove)
    with pytest.raises(TimeoutError, match="a file system does not answer"):
        writer.close()


# -- several processes ----------------------------------------------------------------------------------------------


def save_sharded(path, shape, num_steps=2):
    dist.init_process_group("gloo")
    model, optimizer = make(shape)
    train(model, optimizer, num_steps)
    writer = CheckpointWriter()
    writer.save(path, model=model, optimizers=[optimizer], extra={"rank": dist.get_rank()})
    writer.close()
    return gathered(model, optimizer)


def load_sharded(path, shape, flipped=None):
    dist.init_process_group("gloo")
    model, optimizer = make(shape, seed=9)
    if flipped is not None:
        with pytest.raises(CheckpointDamaged) as raised:
            load_checkpoint(flipped, model=model, optimizers=[optimizer])
        assert "optim.0.embed.weight.exp_avg is not what was written" in str(raised.value)
    extra = load_checkpoint(path, model=model, optimizers=[optimizer])
    return extra, gathered(model, optimizer)


@pytest.mark.spawns
def test_any_world_reads_what_hsdp_has_written(run_ranks, tmp_path):
    expected = run_ranks(save_sharded, world_size=4, path=tmp_path / "c", shape=(2, 2, 1))[0]
    flipped = shutil.copytree(tmp_path / "c", tmp_path / "flipped")
    parts = SafeReader(flipped).read_metadata().storage_data
    info = next(info for index, info in parts.items() if index.fqn == "optim.0.embed.weight.exp_avg")
    flip(flipped / info.relative_path, info.offset + info.length // 2)
    for shape in [(1, 2, 1), (1, 1, 2), (1, 3, 1)]:
        for extra, values in run_ranks(
            load_sharded, world_size=torch.Size(shape).numel(), path=tmp_path / "c", shape=shape, flipped=flipped
        ):
            assert extra == {"rank": 0}
            assert differing(values, expected) == []
    model, optimizer = make(seed=9)
    load_checkpoint(tmp_path / "c", model=model, optimizers=[optimizer])
    assert differing(gathered(model, optimizer), expected) == []


def adafactor(path, shape, is_first):
    """Train and save, or load and go on; whole values after each."""
    dist.init_process_group("gloo")
    model, optimizer = make(shape, seed=0 if is_first else 9, optimizer=torch.optim.Adafactor)
    writer = CheckpointWriter()
    if not is_first:
        load_checkpoint(path, model=model, optimizers=[optimizer])
    values = [gathered(model, optimizer)]
    for step in range(2):
        optimizer.zero_grad()
        model(torch.arange(5 + step)[None] % 7).square().mean().backward()
        step_locally(optimizer, lambda: None)
    if is_first:
        writer.save(path, model=model, optimizers=[optimizer])
    writer.close()
    return [*values, gathered(model, optimizer)]


@pytest.mark.spawns
def test_state_that_is_not_split_as_its_parameter(run_ranks, tmp_path):
    """Adafactor's sums of rows and columns are whole on all ranks, also where they are loaded."""
    for first, shape in ((2, (1, 2, 1)), (1, None)):
        path = tmp_path / f"of {first}"
        _, saved = run_ranks(adafactor, world_size=first, path=path, shape=shape, is_first=True)[0]
        assert saved["blocks.0.up.weight:row_var"].shape == (10, 1)
        ways = [
            run_ranks(adafactor, world_size=world_size, path=path, shape=other, is_first=False)[0]
            for world_size, other in ((2, (1, 2, 1)), (3, (1, 3, 1)), (1, None))
        ]
        for loaded, trained in ways:
            assert differing(loaded, saved) == []
            for name, value in trained.items():
                torch.testing.assert_close(value, ways[0][1][name], rtol=1e-5, atol=1e-6)


def plain_state(path):
    dist.init_process_group("gloo")
    model, optimizer = make((1, 2, 1))
    train(model, optimizer, 1)
    parameter = model.blocks[0].up.weight
    optimizer.state[parameter]["rows"] = parameter.to_local().norm(dim=1).detach()
    with pytest.raises(
        CheckpointError, match=r"AdamW keeps 'rows' of blocks\.0\.up\.weight, which is split over ranks"
    ):
        CheckpointWriter().save(path, model=model, optimizers=[optimizer])


@pytest.mark.spawns
def test_state_of_one_rank_alone_is_not_saved_as_that_of_all(run_ranks, tmp_path):
    run_ranks(plain_state, world_size=2, path=tmp_path / "c")
    assert not (tmp_path / "c").exists()


@pytest.mark.spawns
def test_tensor_parallel_reads_what_one_process_has_written_and_back(run_ranks, tmp_path):
    expected = save_alone(tmp_path / "alone")
    results = run_ranks(load_sharded, world_size=4, path=tmp_path / "alone", shape=(1, 2, 2))
    assert [differing(values, expected) for _, values in results] == [[]] * 4
    expected = run_ranks(save_sharded, world_size=4, path=tmp_path / "sharded", shape=(1, 2, 2))[0]
    model, optimizer = make(seed=9)
    load_checkpoint(tmp_path / "sharded", model=model, optimizers=[optimizer])
    assert differing(gathered(model, optimizer), expected) == []


def save_in_background(path):
    dist.init_process_group("gloo")
    model, optimizer = make((2, 2, 1))
    train(model, optimizer, 1)
    expected = gathered(model, optimizer)
    writer = CheckpointWriter()
    for name in ("first", "second"):
        writer.save(path / name, model=model, optimizers=[optimizer], background=True)
        train(model, optimizer, 2)
    writer.close()
    return expected


@pytest.mark.spawns
def test_background_save_on_four_ranks(run_ranks, tmp_path):
    expected = run_ranks(save_in_background, world_size=4, path=tmp_path)[0]
    model, optimizer = make(seed=9)
    load_checkpoint(tmp_path / "first", model=model, optimizers=[optimizer])
    assert differing(gathered(model, optimizer), expected) == []
    assert not (tmp_path / ".second.part").exists()
    load_checkpoint(tmp_path / "second", model=model, optimizers=[optimizer])


def fail_on_one_rank(path):
    dist.init_process_group("gloo")
    model, _ = make((1, 2, 1))
    if dist.get_rank() == 0:

        def no_space(path, document):
            raise OSError(28, "No space left on device")

        checkpoint.publish = no_space
    try:
        CheckpointWriter().save(path, model=model)
    except CheckpointError as error:
        return str(error)


@pytest.mark.spawns
def test_all_ranks_hear_of_a_failure(run_ranks, tmp_path):
    first, second = run_ranks(fail_on_one_rank, world_size=2, path=tmp_path / "c")
    assert "No space left" in first
    assert "another rank failed" in second
    assert not (tmp_path / "c").exists()


def save_where_one_rank_sees_a_file(folder):
    """Relative paths in folders of their own: what rank 0 sees is not what rank 1 sees."""
    dist.init_process_group("gloo")
    os.chdir(folder / str(dist.get_rank()))
    model, _ = make((1, 2, 1))
    writer = CheckpointWriter(timeout_s=30)
    messages = []
    for background in (False, True):
        try:
            writer.save("c", model=model, background=background).wait(timeout_s=30)
        except CheckpointError as error:
            messages.append(str(error))
    with contextlib.suppress(CheckpointError):
        writer.wait()  # the writer tells of the save in the background too
    checkpoint_storage.FILE_VISIBILITY_TIMEOUT_S = 0.3
    for background in (False, True):  # two disks
        with pytest.raises(CheckpointError, match=r"does not see __1_0\.distcp, which rank 1 wrote .* not shared"):
            writer.save("apart/c", model=model, background=background).wait(timeout_s=30)
        with contextlib.suppress(CheckpointError):
            writer.wait()
        assert os.listdir("apart") == []
    writer.save(folder / "both", model=model, extra={"step": 3})
    try:
        load_checkpoint("../both" if dist.get_rank() == 0 else "both", model=model)
    except CheckpointError as error:
        messages.append(str(error))
    writer.close()
    return messages, load_checkpoint(folder / "both", model=model)


@pytest.mark.spawns
def test_what_stops_one_rank_is_told_to_all(run_ranks, tmp_path):
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    (tmp_path / "0" / "c").write_text("a file")
    first, second = run_ranks(save_where_one_rank_sees_a_file, tmp_path, world_size=2, timeout_s=60)
    assert first[1] == second[1] == {"step": 3}
    for told, told_other in zip(first[0][:2], second[0][:2], strict=True):
        assert "but c is a file" in told
        assert "another rank failed" in told_other
    assert "another rank failed" in first[0][2]
    assert "no sharded checkpoint at both" in second[0][2]
    assert (tmp_path / "0" / "c").read_text() == "a file"


def count_groups(folder):
    dist.init_process_group("gloo")
    groups = dist.distributed_c10d._world.pg_map
    before = set(groups)
    writer = CheckpointWriter()
    while_open = len(set(groups) - before)
    writer.save(folder / "c", model=Model(), background=True).wait(timeout_s=30)
    writer.close()
    return while_open, set(groups) - before


@pytest.mark.spawns
def test_closing_ends_the_writers_own_group(run_ranks, tmp_path):
    for while_open, left in run_ranks(count_groups, tmp_path, world_size=2, timeout_s=60):
        assert while_open == 1
        assert left == set()


def die_while_saving(path, moment):
    """Rank 0 is killed when its data is written, or between the two renames of an overwrite."""
    dist.init_process_group("gloo")
    model, optimizer = make((2, 2, 1))
    train(model, optimizer, 1)
    writer = CheckpointWriter()
    writer.save(path, model=model, optimizers=[optimizer], extra={"step": 1})
    train(model, optimizer, 1)

    def die(*args):
        os.kill(os.getpid(), signal.SIGKILL)

    if dist.get_rank() == 0 and moment == "data":
        checkpoint.publish = die
    elif dist.get_rank() == 0:
        part = checkpoint_files.incomplete_path(path)
        rename = type(path).rename
        type(path).rename = lambda self, target: die() if self == part else rename(self, target)
    elif dist.get_rank() == 1 and moment == "write":
        torch.distributed.checkpoint.filesystem.FileSystemWriter.write_data = die
    writer.save(path, model=model, optimizers=[optimizer], extra={"step": 2})


@pytest.mark.spawns
@pytest.mark.parametrize("moment", ["write", "data", "renames"])
def test_a_killed_save_leaves_the_older_checkpoint(run_ranks, tmp_path, moment):
    with pytest.raises(AssertionError, match=r"exit code -9|lost|closed|reset"):
        run_ranks(die_while_saving, world_size=4, timeout_s=60, path=tmp_path / "c", moment=moment)
    assert (tmp_path / ".c.part").exists()
    model, optimizer = make(seed=9)
    assert load_checkpoint(tmp_path / "c", model=model, optimizers=[optimizer]) == {"step": 1}
    straight = make()
    train(*straight, 1)
    expected = gathered(*straight)
    for name, value in gathered(model, optimizer).items():
        torch.testing.assert_close(value, expected[name])
    save_alone(tmp_path / "c", extra={"step": 3})
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]
