"""Linear layers in float8: which ones, what they compute, and what is refused."""

import contextlib
import copy

import pytest
import torch
from harness import run_ranks
from parallel.equal_training import offloading
from torch import nn

from hyperpod_plugins.errors import ConfigError, MissingExtraError
from hyperpod_plugins.memory import tile_mlps
from hyperpod_plugins.parallel import ParallelConfig
from hyperpod_plugins.precision import convert_linears

pytest.importorskip("torchao")
CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self, size=64, inner=128):
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(size, inner), nn.Linear(inner, size, bias=False)
        self.gate = nn.Linear(size, 10)

    def forward(self, x):
        return x + self.down_proj(torch.relu(self.up_proj(x))) + self.gate(x).mean()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(32, 64)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(64, 16)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        return self.down_proj(torch.relu(self.up_proj(x)))


class OfMlps(nn.Sequential):
    """One block, whose MLP has the name by which those that can be tiled are found."""

    def __init__(self):
        super().__init__()
        self.mlp = Mlp()


def made_of_mlps():
    torch.manual_seed(0)
    return nn.Sequential(OfMlps(), nn.Linear(64, 16)).bfloat16()


def made(dtype=torch.float32):
    torch.manual_seed(0)
    return Model().to(dtype)


def test_layers_of_blocks_are_converted_in_place_and_named():
    model = made()
    modules, parameters = list(model.modules()), list(model.parameters())
    done = convert_linears(model, "rowwise", CPU, blocks=list(model.layers))
    assert done.converted == tuple(f"layers.{i}.{name}" for i in range(2) for name in ("up_proj", "down_proj"))
    assert str(done) == (
        "float8 (rowwise, emulated on the CPU): 4 of 8 linear layers, with 88 % of their parameters: "
        "2 layers.*.up_proj, 2 layers.*.down_proj; not converted: first, head (outside of the blocks); "
        "2 layers.*.gate (a side of its matrix on a rank is no multiple of 16)"
    )
    assert all(one is other for one, other in zip(modules, model.modules(), strict=True))
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    assert type(copy.deepcopy(model).layers[0].up_proj).__name__ == "Float8Linear"


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
@pytest.mark.parametrize("is_autocast", [False, True])
def test_results_are_those_of_float8(recipe, is_autocast):
    dtype = torch.float32 if is_autocast else torch.bfloat16
    plain, model = made(dtype), made(dtype)
    convert_linears(model, recipe, CPU, blocks=list(model.layers))
    x = torch.randn(48, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        results = [each(x) for each in (plain, model)]
    for each in results:
        each.float().square().mean().backward()
    wanted, found = (each.float() for each in results)
    error = (found - wanted).norm() / wanted.norm()
    assert 1e-4 < error < 0.05  # three bits of mantissa
    for name, each in model.named_parameters():
        of_plain = plain.get_parameter(name).grad.float()
        assert (each.grad.float() - of_plain).norm() < 0.2 * of_plain.norm(), name


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_padded_products_are_the_same(recipe):
    """For a number of tokens that is no multiple of 16."""
    found = []
    for pads_inner_dim in (False, True):
        model = made(torch.bfloat16)
        convert_linears(model, recipe, CPU, blocks=list(model.layers), pads_inner_dim=pads_inner_dim)
        assert model.layers[0].up_proj.config.pad_inner_dim == pads_inner_dim
        x = torch.randn(37, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
        result = model(x)
        result.float().square().mean().backward()
        found.append([result, *(each.grad for each in model.parameters())])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_tiles_of_the_sequence_are_in_float8(recipe):
    """Scales by row are those of each token, so a tile has the results of the whole; scales by tensor are finer."""
    whole, tiled = (made_of_mlps() for _ in range(2))
    tile_mlps(tiled, 3)
    x = torch.randn(2, 48, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    results: list[torch.Tensor] = []
    for model in (whole, tiled):
        assert len(convert_linears(model, recipe, CPU, blocks=[model[0]]).converted) == 2
        results.append(model(x).float())
        results[-1].square().mean().backward()
    error = (results[0] - results[1]).norm() / results[0].norm()
    assert error == 0 if recipe == "rowwise" else 0 < error < 0.05
    for one, other in zip(whole.parameters(), tiled.parameters(), strict=True):
        assert (one.grad - other.grad).float().norm() < 0.2 * one.grad.float().norm()


def test_layers_that_cannot_be_converted_are_left_and_a_model_without_others_is_refused():
    class Own(nn.Linear):
        pass

    tied = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), Own(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    tied[3].weight = tied[4].weight
    done = convert_linears(tied, "tensorwise", CPU)
    assert done.converted == ("1",)
    first = "the first or the last layer"
    assert done.left == {"0": first, "2": "a Own", "3": "its weight is shared", "4": first}
    with pytest.raises(ConfigError, match=r"Sequential has no linear layer that can .*; 0: the first or the last"):
        convert_linears(nn.Sequential(nn.Linear(16, 16), nn.ReLU()), "rowwise", CPU)


def test_what_is_not_served_is_refused_by_name(monkeypatch):
    known = "none, rowwise, tensorwise, te-fp8, te-mxfp8, te-nvfp4"
    with pytest.raises(ConfigError, match=rf"one of {known}, but is 'blockwise'$"):
        ParallelConfig(float8_recipe="blockwise")
    for recipe in ("mxfp8", "nvfp4"):
        with pytest.raises(ConfigError, match=rf"but is '{recipe}'. Transformer Engine has it: 'te-{recipe}'"):
            ParallelConfig(float8_recipe=recipe)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(ConfigError, match=r"capability 8.9 or higher, but A100 has 8.0"):
        convert_linears(made(), "rowwise", torch.device("cuda", 0))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"'te-mxfp8' needs GPUs of compute capability 10.x.*but A100 has 8.0"):
        convert_linears(made(), "te-mxfp8", torch.device("cuda", 0))  # its library would not help
    with pytest.raises(MissingExtraError, match=r"'rowwise' needs the Python package 'torchao'.*pip install torchao"):
        convert_linears(made(), "rowwise", CPU)


@pytest.fixture
def alone():
    """A process group of one rank."""
    import torch.distributed as dist

    dist.init_process_group("hyperpod", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_model_that_the_program_has_sharded_is_refused(alone):
    """Its layers cannot be converted any more, and it would train in bfloat16."""
    from torch.distributed.fsdp import fully_shard

    from hyperpod_plugins.parallel.parallelize import match_float8, parallelize

    config = ParallelConfig(float8_recipe="rowwise", precision="bf16-mixed")
    with pytest.raises(ConfigError, match="FSDPModel was sharded by the program"):
        parallelize(fully_shard(Model()), None, config)
    model = made()
    convert_linears(model, "rowwise", CPU, blocks=list(model.layers))
    match_float8(model, config)


def parallelized(model, **options):
    from hyperpod_plugins.parallel import build_mesh, parallelize

    config = ParallelConfig(precision="bf16-mixed", **options)
    return parallelize(model, build_mesh(config.topology(1), "cpu"), config)


def test_a_sharded_model_that_was_converted_otherwise_is_refused_by_name(alone):
    """It would train in another way than it is asked to."""
    rowwise = {"float8_recipe": "rowwise"}
    tensorwise = {"float8_recipe": "tensorwise"}
    gathered = tensorwise | {"float8_all_gather": True}
    padded = rowwise | {"float8_pad_inner_dim": True}
    of = "of this FSDPModel, which is sharded already, was converted with"
    for made_with, asked, told in (
        (rowwise, tensorwise, f"float8_recipe='tensorwise', but layers.0.up_proj {of} float8_recipe='rowwise'"),
        (rowwise, gathered, f"float8_recipe='tensorwise', but layers.0.up_proj {of} float8_recipe='rowwise'"),
        (rowwise, {}, f"float8_recipe='none', but layers.0.up_proj {of} float8_recipe='rowwise'"),
        (rowwise, padded, f"float8_pad_inner_dim=True, but layers.0.up_proj {of} float8_pad_inner_dim=False"),
        (
            gathered,
            tensorwise,
            "float8_all_gather=False, but the weight of layers.0.up_proj of this FSDPModel, which is",
        ),
    ):
        model = parallelized(made(), **made_with)
        assert parallelized(model, **made_with) is model
        with pytest.raises(ConfigError, match=told):
            parallelized(model, **asked)
        module = nn.Sequential(model)  # as a LightningModule around it
        with pytest.raises(
            ConfigError, match=told.replace("layers.0", "0.layers.0").replace("FSDPModel", "Sequential")
        ):
            parallelized(module, **asked)


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_weights_that_the_program_has_sharded_are_gathered_in_float8_where_they_can_be(alone, dtype):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    def sharded():
        model, mesh = made(), init_device_mesh("cpu", (1,))
        convert_linears(model, "tensorwise", CPU, blocks=list(model.layers))
        for each in [*model.layers, model]:
            fully_shard(each, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
        return model

    x = torch.randn(48, 32, generator=torch.Generator().manual_seed(1))
    found = []
    for gathers in (False, True):
        model = parallelized(sharded(), float8_recipe="tensorwise", float8_all_gather=gathers)
        assert model.layers[1].up_proj.is_gathered_in_float8 == gathers
        losses = []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found.append(losses)
        if not gathers:
            with pytest.raises(ConfigError, match="float8_all_gather=True, but this model has run already"):
                parallelized(model, float8_recipe="tensorwise", float8_all_gather=True)
    assert found[0] == found[1]
    ignored = made()
    convert_linears(ignored, "tensorwise", CPU, blocks=list(ignored.layers))
    fully_shard(ignored.head, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(
        ConfigError, match=r"float8_all_gather=True, but the weight of layers.0.up_proj .* not gathered"
    ):
        parallelized(ignored, float8_recipe="tensorwise", float8_all_gather=True)


def train(recipe, shard, tensor, precision="bf16-mixed", *, is_delayed=False, **options):
    import torch.distributed as dist

    from hyperpod_plugins.delayed_init import delayed_init
    from hyperpod_plugins.parallel import build_mesh, parallelize

    config = ParallelConfig(
        float8_recipe=recipe,
        hybrid_shard_degree=shard,
        tensor_parallel_degree=tensor,
        precision=precision,
        **options,
        tensor_plan="auto" if tensor == 1 else {"layers.*.up_proj": "colwise", "layers.*.down_proj": "rowwise"},
    )
    if not dist.is_initialized():
        dist.init_process_group("hyperpod")
    mesh = build_mesh(config.topology(dist.get_world_size()), "cpu")
    with delayed_init() if is_delayed else contextlib.nullcontext():
        model = made()
    losses = []
    with offloading(options):
        model = parallelize(model, mesh, config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(4):
            x = torch.randn(32, 32, generator=torch.Generator().manual_seed(step))
            loss = model(x.bfloat16()).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
    return losses


def train_all():
    with pytest.raises(ConfigError, match=r"float8_recipe='rowwise' with precision='32-true'"):
        train("rowwise", 4, 1, "32-true")
    losses = {
        (recipe, shard, tensor): train(recipe, shard, tensor)
        for recipe in ("none", "rowwise", "tensorwise")
        for shard, tensor in ((4, 1), (2, 1), (2, 2), (1, 4))
    }
    return losses, [train("rowwise", 4, 1, **each) for each in SAME]


SAME = [
    {"is_delayed": True},
    {"activation_checkpointing": "full"},
    {"activation_checkpointing": "selective"},
    {"sm_activation_offloading": True},
    {"param_offload": True},
    {"optimizer_offload": True},
]


@pytest.mark.spawns
def test_sharded_and_tensor_parallel_models_compute_the_same():
    """Scales are those of the whole tensor, not of a rank's part of it: else tensor parallelism would differ."""
    losses, same = run_ranks(train_all, world_size=4, timeout_s=120)[0]
    for options, found in zip(SAME, same, strict=True):
        assert found == losses["rowwise", 4, 1], options
    for recipe in ("rowwise", "tensorwise"):
        whole, plain = losses[recipe, 4, 1], losses["none", 4, 1]
        assert losses[recipe, 2, 1] == whole
        assert max(abs(one / other - 1) for one, other in zip(whole, plain, strict=True)) < 0.05
        assert whole != plain
        for tensor in ((2, 2), (1, 4)):
            apart = max(abs(one / other - 1) for one, other in zip(losses[recipe, *tensor], whole, strict=True))
            assert apart < 0.01
