"""Layers of Transformer Engine, with a stand-in for it: state as buffers, regions, refusals, and equal scales."""

import dataclasses
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn

from hyperpod_plugins.errors import ConfigError, MissingExtraError
from hyperpod_plugins.parallel import ParallelConfig, build_mesh, parallelize
from hyperpod_plugins.precision import TeScaling, convert_linears

CPU = torch.device("cpu")
STAND_INS = str(Path(__file__).parents[1] / "stand_ins")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def made(num_blocks=2):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), *(Block() for _ in range(num_blocks)), nn.Linear(32, 16))


def converted(scaling=TeScaling(amax_history_len=4)):  # noqa: B008
    model = made()
    done = convert_linears(model, "te-fp8", CPU, blocks=[model[1], model[2]], te_scaling=scaling)
    return model, done


def test_parameters_stay_and_scales_are_buffers(library):
    plain = made()
    model, done = converted()
    assert str(done).startswith("float8 (te-fp8): 4 of 6 linear layers, with 8")
    assert isinstance(model[1].up, library.Linear)
    assert [*dict(model.named_parameters())] == [*dict(plain.named_parameters())]
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), plain.parameters(), strict=True))
    buffers = dict(model.named_buffers())
    assert len(buffers) == 4 * 4
    assert buffers["1.up.fp8_amax_history_fwd"] is model[1].up.fp8_meta["scaling_fwd"].amax_history
    state = model.state_dict()
    assert not any("_extra_state" in name for name in state)  # which the library pickles
    assert "2.down.fp8_scale_bwd" in state


def test_scales_follow_the_largest_values_and_an_evaluation_leaves_them(library):
    model, _ = converted(TeScaling(amax_history_len=4, margin=1))
    plain = made()
    x = 3 * torch.randn(32, 16, generator=torch.Generator().manual_seed(1))
    wanted, first = plain(x), model(x)
    second = model(x)
    assert 1e-3 < (second - wanted).norm() / wanted.norm() < 0.1
    assert not torch.equal(first, second)  # the first pass has scales of one
    layer = model[1].up
    largest = model[0](x).abs().max()
    assert torch.equal(layer.fp8_scale_fwd[0], 448 / largest / 2)
    second.square().mean().backward()
    assert layer.fp8_scale_bwd[0] > 57344
    kept = {name: each.clone() for name, each in model.named_buffers()}
    model.eval()
    assert torch.equal(model(x), wanted)
    model.train()
    with torch.no_grad():
        model(x)
    assert all(torch.equal(each, kept[name]) for name, each in model.named_buffers())
    model(x)
    assert not all(torch.equal(each, kept[name]) for name, each in model.named_buffers())


def test_versions_before_2_9_have_other_names(library, monkeypatch):
    x, found = torch.ones(16, 16), []
    module, newer = sys.modules["transformer_engine.pytorch.quantization"], library.autocast
    for is_older in (False, True):
        if is_older:
            import hyperpod_plugins.precision.transformer_engine as ours

            library.FP8GlobalStateManager.reset()
            ours._trained.clear()
            monkeypatch.delattr(library, "autocast")
            older = lambda enabled, fp8_recipe: newer(enabled=enabled, recipe=fp8_recipe)  # noqa: E731
            monkeypatch.setattr(library, "fp8_autocast", older, raising=False)
            monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.fp8", module)
            monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.quantization", None)
        model, _ = converted()
        for _ in range(2):
            result = model(x)
        found.append(result)
    assert not torch.equal(found[0], made()(x))
    assert torch.equal(*found)


def test_a_failed_forward_closes_its_region(library):
    model, _ = converted()

    def fail(*_):
        raise ValueError("in between")

    handle = model[2].register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="in between"):
        model(torch.ones(16, 16))
    assert (library.FP8GlobalStateManager.enabled, library.FP8GlobalStateManager.depth) == (False, 0)
    assert torch.equal(model[1].up.fp8_scale_fwd, torch.ones(3))  # nothing was reduced
    handle.remove()
    model(torch.ones(16, 16))
    assert not torch.equal(model[1].up.fp8_scale_fwd, torch.ones(3))


@pytest.mark.parametrize("is_step", [False, True])
def test_an_interrupted_forward_leaves_no_region(library, is_step):
    """torch runs no hooks after a KeyboardInterrupt, which notebooks and Lightning survive."""
    from hyperpod_plugins.precision.transformer_engine import float8_region

    model, _ = converted()

    def interrupt(*_):
        raise KeyboardInterrupt

    def forward():
        with float8_region(model) if is_step else nullcontext():
            model(torch.ones(16, 16))

    handle = model[2].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        forward()
    handle.remove()
    assert torch.equal(model[1].up.fp8_scale_fwd, torch.ones(3))  # nothing was reduced
    forward()
    assert not torch.equal(model[1].up.fp8_scale_fwd, torch.ones(3))
    assert (library.FP8GlobalStateManager.enabled, library.FP8GlobalStateManager.depth) == (False, 0)
    handle = model[2].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(16, 16))
    handle.remove()
    with float8_region(model):  # after a forward outside of a step
        model(torch.ones(16, 16))
    assert (library.FP8GlobalStateManager.enabled, library.FP8GlobalStateManager.depth) == (False, 0)


def test_a_forward_within_a_forward_is_not_taken_for_an_interrupted_one(library):
    model, _ = converted()
    is_inside = []

    def again(*_):
        if not is_inside:
            is_inside.append(True)
            model(torch.ones(16, 16))

    model[2].register_forward_pre_hook(again)
    with pytest.raises(ConfigError, match="a layer runs twice in one forward"):
        model(torch.ones(16, 16))


def test_a_backward_in_eval_mode_is_refused(library):
    """It would train in bfloat16 without a word."""
    model, _ = converted()
    x = torch.ones(16, 16)
    model.eval()
    kept = {name: each.clone() for name, each in model.named_buffers()}
    result = model(x)
    assert torch.equal(result, made()(x))
    with pytest.raises(ConfigError, match="a backward follows a forward in eval mode"):
        result.square().mean().backward()
    assert all(torch.equal(each, kept[name]) for name, each in model.named_buffers())
    model.train()
    model[1].eval()  # layers without dropout
    model(x).square().mean().backward()
    assert not torch.equal(model[1].up.fp8_scale_fwd, torch.ones(3))
    model.requires_grad_(False).eval()
    of_inputs = torch.ones(16, 16, requires_grad=True)
    model(of_inputs).square().mean().backward()
    assert of_inputs.grad.abs().sum() > 0
    model[0].weight.requires_grad_()  # of a layer that is not converted, as an adapter is
    with pytest.raises(ConfigError, match="a backward follows a forward in eval mode"):
        model(x).square().mean().backward()


def test_a_sharded_model_with_another_scaling_is_refused(library):
    from hyperpod_plugins.parallel.parallelize import match_float8

    model, _ = converted(TeScaling(margin=1))
    config = ParallelConfig(float8_recipe="te-fp8", precision="bf16-mixed", te_scaling=TeScaling(margin=1))
    match_float8(nn.Sequential(model), config)
    with pytest.raises(
        ConfigError, match=r"te_scaling=TeScaling\(.*margin=0.* was converted with te_scaling=.*margin=1"
    ):
        match_float8(model, dataclasses.replace(config, te_scaling=TeScaling()))
    with pytest.raises(ConfigError, match=r"float8_recipe='rowwise', but 1\.up of this Sequential"):
        match_float8(model, ParallelConfig(float8_recipe="rowwise", precision="bf16-mixed"))


def test_layers_outside_of_a_region_or_twice_in_it_are_refused(library):
    model, _ = converted()
    with pytest.raises(ConfigError, match="a layer runs outside of the forward of the model"):
        model[1](torch.ones(16, 32))
    model[1].forward = lambda x, forward=model[1].forward: forward(forward(x))
    with pytest.raises(ConfigError, match="a layer runs twice in one forward"):
        model(torch.ones(16, 16))


@pytest.mark.filterwarnings("ignore:fp8_autocast is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", ["autocast", "fp8_autocast"])
def test_a_region_of_the_program_around_the_model_changes_nothing(library, name):
    import hyperpod_plugins.precision.transformer_engine as ours

    region, x = getattr(library, name), torch.randn(16, 16, generator=torch.Generator().manual_seed(1))
    found = []
    for own in (nullcontext, region):
        library.FP8GlobalStateManager.reset()
        ours._trained.clear()
        model, _ = converted()
        for _ in range(3):
            with own():
                result = model(x)
            result.square().mean().backward()
        with torch.no_grad(), own():  # left with gradients, it would reduce
            assert torch.equal(model(x), made()(x))  # nothing is cast in an evaluation
        found.append([result, *(each.grad for each in model.parameters()), *model.buffers()])
    assert not torch.equal(found[0][0], made()(x))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert (library.FP8GlobalStateManager.enabled, library.FP8GlobalStateManager.depth) == (False, 0)


def test_a_region_of_the_program_with_another_recipe_inside_of_ours_is_refused(library):
    from transformer_engine.common.recipe import DelayedScaling

    from hyperpod_plugins.precision.transformer_engine import float8_region

    model, _ = converted()
    with float8_region(model), library.autocast(recipe=DelayedScaling(amax_history_len=4)):
        model(torch.ones(16, 16))
    with (
        pytest.raises(ConfigError, match=r"inside of an autocast .* with another recipe, .*len=16.* than .*len=4"),
        float8_region(model),
        library.autocast(recipe=DelayedScaling(amax_history_len=16)),
    ):
        model(torch.ones(16, 16))


def test_scales_that_the_library_replaces_are_refused(library):
    model, _ = converted()
    state = model[1].down.fp8_meta["scaling_bwd"]
    state.scale = state.scale.clone()
    with pytest.raises(ConfigError, match="no longer its buffers"):
        model(torch.ones(16, 16))


def test_what_cannot_be_served_is_refused_by_name(library, monkeypatch):
    model, _ = converted()
    with pytest.raises(ConfigError, match="for a second model in one process"):
        converted()
    del model
    converted()
    with torch.device("meta"):
        empty = made()
    import hyperpod_plugins.precision.transformer_engine as ours

    ours._trained.clear()
    with pytest.raises(ConfigError, match=r"1\.up has no values yet \(delayed_init, or the meta device\)"):
        convert_linears(empty, "te-fp8", CPU, blocks=[empty[1]])
    hooked = made()
    hooked[1].up.register_forward_hook(lambda *_: None)
    assert convert_linears(hooked, "te-fp8", CPU, blocks=[hooked[1]]).left["1.up"] == "it has hooks"
    ours._trained.clear()
    monkeypatch.setattr(library.FP8GlobalStateManager, "is_available", (False, "Device compute capability 8.9"))
    with pytest.raises(ConfigError, match=r"Transformer Engine says 'Device compute capability 8.9'"):
        converted()


@pytest.mark.parametrize(("recipe", "error"), [("te-mxfp8", 0.05), ("te-nvfp4", 0.2)])
def test_scales_of_blocks_are_no_state(library, recipe, error):
    plain, model = made(), made()
    done = convert_linears(model, recipe, CPU, blocks=[model[1], model[2]])
    assert str(done).startswith(f"float8 ({recipe}): 4 of 6 linear layers")
    assert not dict(model.named_buffers())
    assert [*model.state_dict()] == [*plain.state_dict()]
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(1))
    wanted, first, second = plain(x), model(x), model(x)
    assert 1e-3 < (first - wanted).norm() / wanted.norm() < error
    assert torch.equal(first, second)  # no pass depends on earlier ones
    first.square().mean().backward()
    wanted.square().mean().backward()
    one, other = model[1].up.weight.grad, plain[1].up.weight.grad
    assert 1e-3 < (one - other).norm() / other.norm() < 4 * error
    assert torch.equal(model.eval()(x), plain(x))  # in an evaluation nothing is cast
    with pytest.raises(ConfigError, match=f"{recipe}.*a backward follows a forward in eval mode"):
        model(x).sum().backward()
    again = made()
    convert_linears(again, recipe, CPU, blocks=[again[1], again[2]])  # a second model takes no state of the first


def test_layers_may_run_twice_where_scales_are_no_state(library):
    model = made(1)
    convert_linears(model, "te-mxfp8", CPU, blocks=[model[1]])
    model.forward = lambda x: model[1](model[1](x))
    assert model(torch.ones(32, 32)).isfinite().all()
    with pytest.raises(ConfigError, match="a layer runs outside of the forward"):
        model[1](torch.ones(2, 32))


@pytest.mark.parametrize("recipe", ["te-mxfp8", "te-nvfp4"])
def test_devices_without_the_units_are_refused_with_the_reason(library, monkeypatch, recipe):
    manager, model = library.FP8GlobalStateManager, made()
    reason = "Device compute capability 10.0 or higher required"
    monkeypatch.setattr(manager, "is_available_in_blocks", (False, reason))
    with pytest.raises(ConfigError, match=rf"{recipe}.*{reason}.*Use 'te-fp8'"):
        convert_linears(model, recipe, CPU, blocks=[model[1]])
    monkeypatch.delattr(manager, f"is_{recipe[3:]}_available")
    with pytest.raises(ConfigError, match=f"{recipe}.*this version does not know it"):
        convert_linears(model, recipe, CPU, blocks=[model[1]])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    with pytest.raises(ConfigError, match=r"capability 10.x, which train.*NVIDIA H200 has 9.0. Use 'te-fp8'"):
        convert_linears(model, recipe, torch.device("cuda"), blocks=[model[1]])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (12, 0))  # gradients would be zero
    with pytest.raises(ConfigError, match=r"capability 10.x"):
        convert_linears(model, recipe, torch.device("cuda"), blocks=[model[1]])


def test_blocks_of_32_values_need_sides_of_that_many(library):
    for recipe in ("te-mxfp8", "te-nvfp4"):
        model = nn.Sequential(nn.Linear(16, 48), nn.Linear(48, 64), nn.Linear(64, 64), nn.Linear(64, 16))
        done = convert_linears(model, recipe, CPU)
        assert done.converted == ("2",)
        assert done.left["1"] == "a side of its matrix on a rank is no multiple of 32"


@pytest.mark.parametrize(("recipe", "unit"), [("te-fp8", 8), ("te-mxfp8", 32), ("te-nvfp4", 32)])
def test_a_number_of_tokens_that_the_units_do_not_take_is_refused(library, recipe, unit):
    model = made()
    convert_linears(model, recipe, CPU, blocks=[model[1], model[2]])
    x = torch.ones(2, unit // 2, 16)
    model(x)
    with pytest.raises(ConfigError, match=rf"{recipe}.*32 x 64 was given {unit + 2} tokens.*multiple of {unit}"):
        model(torch.ones(2, unit // 2 + 1, 16))
    model(x)
    with torch.no_grad():
        model(x[0, :3])  # an evaluation is in bfloat16


def test_without_the_library_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"'te-fp8' needs the Python package 'transformer_engine'"):
        convert_linears(made(), "te-fp8", CPU)


@pytest.mark.parametrize(
    ("option", "match"),
    [
        ({"mlp_tiles": 2}, r"combined with mlp_tiles \(its layers would run twice"),
        ({"delayed_init": True}, r"combined with delayed_init \(its layers are made from the values"),
        ({"float8_all_gather": True}, "needs float8_recipe='tensorwise', but it is 'te-fp8'"),
        ({"te_scaling": {"margin": -1}}, "margin must be a whole number of at least 0"),
        ({"te_scaling": {"fp8_format": "E5M2"}}, "fp8_format must be one of HYBRID, E4M3"),
        ({"te_scaling": {"interval": 2}}, "unknown keys"),
    ],
)
def test_options_that_exclude_each_other(option, match):
    with pytest.raises(ConfigError, match=match):
        ParallelConfig.of({"float8_recipe": "te-fp8"} | option)


def test_scales_of_whole_tensors_in_blocks_exclude_tensor_parallelism():
    with pytest.raises(ConfigError, match=r"te-nvfp4.*tensor_parallel_degree \(the second scale.*Leave.*'te-mxfp8'"):
        ParallelConfig(float8_recipe="te-nvfp4", precision="bf16-mixed", tensor_parallel_degree=2)


def test_scaling_is_for_this_recipe_only():
    assert ParallelConfig.of({"float8_recipe": "te-fp8", "te_scaling": {"margin": 1}}).te_scaling.margin == 1
    with pytest.raises(ConfigError, match=r"te_scaling is for float8_recipe='te-fp8', .*Use 'te-fp8', or leave"):
        ParallelConfig(te_scaling=TeScaling(margin=1))


def test_the_keys_of_hyperpods_recipes():
    """`fp8` and its options are those of SMP's models, which means Transformer Engine."""
    asked = {"fp8": True, "fp8_amax_history_len": 32, "fp8_amax_compute_algo": "most_recent"}
    config = ParallelConfig.of(asked)
    assert config.float8_recipe == "te-fp8"
    assert config.te_scaling == TeScaling(amax_history_len=32, amax_compute_algo="most_recent")
    assert ParallelConfig.of(asked | {"fp8": False}) == ParallelConfig()
    for wrong, match in (
        (asked | {"fp8": "hybrid"}, "fp8 must be true or false"),
        ({"fp8_amax_history_len": 32}, "fp8 must be true or false"),
        (asked | {"float8_recipe": "rowwise"}, "fp8 means float8_recipe='te-fp8'"),
        (asked | {"mlp_tiles": 2}, "cannot be combined with mlp_tiles"),
    ):
        with pytest.raises(ConfigError, match=match):
            ParallelConfig.of(wrong)


class Nets(nn.Module):
    def __init__(self):
        super().__init__()
        self.nets = nn.ModuleDict({"net": made()})

    def forward(self, x, region=nullcontext, blocks_only=False):
        net = self.nets["net"]
        if blocks_only:
            x = net[0](x)
            with region():
                return net[1](x)
        with region():
            return net(x)


def refuse_in_regions():
    """Check each way to train in a program's region without layers of the library, and what is allowed."""
    sys.path.insert(0, STAND_INS)
    import transformer_engine.pytorch as library

    from hyperpod_plugins.precision.transformer_engine import refuse_regions_of_program

    dist.init_process_group("hyperpod")
    config = ParallelConfig(precision="bf16-mixed", block_classes=("Block",))
    mesh = build_mesh(config.topology(dist.get_world_size()), "cpu")
    x, model = torch.ones(16, 16), parallelize(Nets(), mesh, config)
    wanted, match = model(x), r"has none of its layers.*Set float8_recipe='te-fp8'"
    with library.autocast(), pytest.raises(ConfigError, match=f"^FSDPNets runs inside.*{match}"):
        model(x)
    with pytest.raises(ConfigError, match=f"^FSDPBlock runs inside.*{match}"):
        model(x, library.autocast, blocks_only=True)
    with pytest.raises(ConfigError, match=f"^Sequential runs inside.*{match}"):
        model(x, library.autocast)
    with library.autocast(enabled=False):
        assert torch.equal(model(x), wanted)
    with library.autocast(), torch.no_grad():
        assert torch.equal(model(x), wanted)
    own = library.Linear(16, 16, device="cpu")
    refuse_regions_of_program(own, [own])  # a layer of the program's own computes in float8
    with library.autocast():
        assert own(x).isfinite().any()
    library.FP8GlobalStateManager.reset()
    num_hooks = len(model._forward_pre_hooks)
    parallelize(model, mesh, config)
    assert len(model._forward_pre_hooks) == num_hooks
    other = made()
    convert_linears(other, "te-mxfp8", CPU, blocks=[other[1]])
    with pytest.raises(ConfigError, match="has none of its layers"), library.autocast():
        model(x)
    beside = []
    other[0].register_forward_pre_hook(lambda *_: beside.append(model(x)))  # in the region of another network
    other(torch.ones(32, 16))
    return torch.equal(beside[0], wanted)


@pytest.mark.spawns
def test_a_region_around_a_model_without_layers_of_the_library_is_refused():
    """It would train in bfloat16 without a word."""
    assert run_ranks(refuse_in_regions, world_size=2) == [True, True]


def fit(is_region_of_program=False, recipe="te-fp8"):
    import lightning.pytorch as pl

    from hyperpod_plugins import HyperPodStrategy

    sys.path.insert(0, STAND_INS)
    from transformer_engine.pytorch import autocast

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = made()

        def training_step(self, batch, index):
            with autocast() if is_region_of_program else nullcontext():
                return self.net(batch).float().square().mean()  # not self(...)

        def validation_step(self, batch, index):
            self.net(batch)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    scaling = {"te_scaling": {"amax_history_len": 4}} if recipe == "te-fp8" else {}
    strategy = HyperPodStrategy(float8_recipe=recipe, block_classes=("Block",), hybrid_shard_degree=1, **scaling)
    trainer = pl.Trainer(
        strategy=strategy,
        precision="bf16-mixed",
        accelerator="cpu",
        devices=2,
        max_steps=3,
        limit_val_batches=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    data = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(data, batch_size=16)
    if is_region_of_program:
        with pytest.raises(ConfigError) as refusal:
            trainer.fit(module, loader, loader)
        return str(refusal.value)
    trainer.fit(module, loader, loader)
    assert trainer.global_step == 3
    buffers = {name: each.clone() for name, each in module.named_buffers()}
    trainer.validate(module, loader, verbose=False)
    assert all(torch.equal(each, buffers[name]) for name, each in module.named_buffers())
    return buffers


@pytest.mark.spawns
def test_a_step_of_lightning_is_a_region():
    first, second = run_ranks(fit, world_size=2, timeout_s=120)
    assert len(first) == 16
    assert all(torch.equal(each, second[name]) for name, each in first.items())
    assert not torch.equal(first["net.1.up.fp8_scale_fwd"], torch.ones(3))


@pytest.mark.spawns
@pytest.mark.parametrize(
    ("recipe", "match"), [("none", "Sequential runs inside of an autocast"), ("te-fp8", "with another recipe")]
)
def test_a_region_of_the_program_inside_a_step_of_lightning_is_refused(recipe, match):
    for refusal in run_ranks(fit, True, recipe, world_size=2, timeout_s=120):
        assert match in refusal


def train():
    sys.path.insert(0, STAND_INS)
    config = ParallelConfig(
        float8_recipe="te-fp8",
        hybrid_shard_degree=2,
        precision="bf16-mixed",
        block_classes=("Block",),
        te_scaling=TeScaling(amax_history_len=4),
    )
    dist.init_process_group("hyperpod")
    mesh = build_mesh(config.topology(dist.get_world_size()), "cpu")
    with pytest.raises(ConfigError, match="combined with reproducible=True"):
        parallelize(made(), mesh, config, averages_replicas=False)
    model = parallelize(made(), mesh, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        for micro_step in range(2):
            seed = 100 * dist.get_rank() + 10 * step + micro_step
            x = torch.randn(16, 16, generator=torch.Generator().manual_seed(seed)) * (1 + dist.get_rank())
            model(x.bfloat16()).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    scales = {name: each.clone() for name, each in model.named_buffers()}
    with pytest.raises(ConfigError, match=r"'te-mxfp8' for a second model in one process, and delayed scaling"):
        convert_linears(made(), "te-mxfp8", CPU)
    del model, optimizer
    return scales, [losses_in_blocks(mesh, recipe) for recipe in ("te-mxfp8", "te-nvfp4")]


def losses_in_blocks(mesh, recipe):
    """Losses and buffers of a model that is sharded over this mesh, or over none."""
    model = made()
    if mesh is None:
        convert_linears(model.bfloat16(), recipe, CPU, blocks=[model[1], model[2]])
    else:
        config = ParallelConfig(
            float8_recipe=recipe, hybrid_shard_degree=2, precision="bf16-true", block_classes=("Block",)
        )
        parallelize(model, mesh, config, averages_replicas=False)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=1e-2), []
    for _ in range(3):
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [name for name, _ in model.named_buffers()]


@pytest.mark.spawns
def test_scales_are_the_same_on_all_ranks(library):
    """Each rank has other samples, so without a reduction over all of them they would differ."""
    (first, in_blocks), *others = run_ranks(train, world_size=4, timeout_s=120)
    for recipe, (losses, buffers) in zip(("te-mxfp8", "te-nvfp4"), in_blocks, strict=True):
        wanted, _ = losses_in_blocks(None, recipe)
        assert losses == pytest.approx(wanted, rel=2e-2)  # bfloat16
        assert losses[-1] < losses[0]
        assert not buffers
    assert len(first) == 16
    for other, other_in_blocks in others:
        assert other_in_blocks == in_blocks
        for name, each in first.items():
            assert torch.equal(each, other[name]), name
    assert not torch.equal(first["1.up.fp8_scale_fwd"], torch.ones(3))
    assert not torch.equal(first["1.up.fp8_scale_bwd"], torch.ones(2))
