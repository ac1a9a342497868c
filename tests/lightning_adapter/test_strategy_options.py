"""What a Trainer accepts for this strategy before any process is started, and what it refuses and how."""

import json
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from device import ACCELERATOR
from lightning.pytorch import callbacks

from hyperpod_plugins.comm import CommOptions
from hyperpod_plugins.errors import ConfigError, NotBuiltYetError, UnknownKeyError
from hyperpod_plugins.lightning import Float8Precision, HyperPodStrategy
from hyperpod_plugins.lightning.module_checks import (
    ends_steps,
    refuse_copying_callbacks,
    refuse_nested_fits,
    refuse_validation_by_clock,
    warn_of_placement,
)
from hyperpod_plugins.parallel import ParallelConfig, Topology


def make_trainer(strategy, **arguments):
    return pl.Trainer(strategy=strategy, accelerator=ACCELERATOR, devices=2, logger=False, **arguments)


# -- configuration ----------------------------------------------------------------------------------------------------


def test_the_name_alone_is_enough():
    strategy = make_trainer("hyperpod").strategy
    assert isinstance(strategy, HyperPodStrategy)
    assert strategy.config == ParallelConfig()


def test_a_configuration_comes_from_a_file_a_dict_an_object_or_arguments(tmp_path):
    path = tmp_path / "smp.json"
    path.write_text(json.dumps({"hybrid_shard_degree": 2, "tensor_parallel_seed": 9}))
    wanted = ParallelConfig(hybrid_shard_degree=2, random_seed=9)
    for source in (path, str(path), {"hybrid_shard_degree": 2, "tensor_parallel_seed": 9}, wanted):
        assert HyperPodStrategy(source).config == wanted
    assert HyperPodStrategy(hybrid_shard_degree=2, tensor_parallel_seed=9).config == wanted
    assert HyperPodStrategy(path, hybrid_shard_degree=1).config == ParallelConfig(hybrid_shard_degree=1, random_seed=9)


def test_the_environment_names_a_file_and_explicit_arguments_win(tmp_path, monkeypatch):
    path = tmp_path / "smp.json"
    path.write_text(json.dumps({"hybrid_shard_degree": 2, "random_seed": 9}))
    monkeypatch.setenv("HYPERPOD_CONFIG", str(path))
    assert make_trainer("hyperpod").strategy.config == ParallelConfig(hybrid_shard_degree=2, random_seed=9)
    assert HyperPodStrategy(random_seed=1).config == ParallelConfig(hybrid_shard_degree=2, random_seed=1)
    assert HyperPodStrategy({"random_seed": 3}).config == ParallelConfig(random_seed=3)
    assert HyperPodStrategy({}).config == ParallelConfig()
    monkeypatch.setenv("HYPERPOD_CONFIG", "")
    assert HyperPodStrategy().config == ParallelConfig()
    monkeypatch.setenv("HYPERPOD_CONFIG", str(tmp_path / "absent.json"))
    with pytest.raises(ConfigError, match=r"absent\.json.*HYPERPOD_CONFIG"):
        make_trainer("hyperpod")


def test_wrong_options_are_refused_when_the_strategy_is_made():
    with pytest.raises(UnknownKeyError, match="Did you mean 'hybrid_shard_degree'"):
        HyperPodStrategy(hybrid_shard_degre=2)
    with pytest.raises(NotBuiltYetError, match="expert_parallel_degree=2 with mlp_tiles=2"):
        HyperPodStrategy(expert_parallel_degree=2, mlp_tiles=2)
    with pytest.raises(ConfigError, match="mlp_tiles=4 cannot be combined with activation_checkpointing='selective'"):
        HyperPodStrategy(mlp_tiles=4, activation_checkpointing="selective")
    with pytest.raises(TypeError):
        HyperPodStrategy(ParallelConfig(), CommOptions())


def test_what_only_running_processes_know_is_refused_before():
    with pytest.raises(ConfigError, match="only once the Trainer has set up"):
        _ = HyperPodStrategy().topology


# -- precision --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("by_strategy", "by_trainer", "wanted"),
    [
        ({}, None, "32-true"),
        ({}, "32-true", "32-true"),
        ({}, 32, "32-true"),
        ({}, "bf16-mixed", "bf16-mixed"),
        ({}, "bf16", "bf16-mixed"),
        ({}, "bf16-true", "bf16-true"),
        ({"precision": "bf16-mixed"}, None, "bf16-mixed"),
        ({"precision": "bf16-true"}, "bf16-true", "bf16-true"),
        ({"precision": "32-true"}, None, "32-true"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*is supported for historical reasons.*")
def test_one_precision_holds_for_trainer_and_strategy(by_strategy, by_trainer, wanted):
    trainer = make_trainer(HyperPodStrategy(**by_strategy), precision=by_trainer)
    assert trainer.precision == trainer.strategy.config.precision == wanted


@pytest.mark.parametrize(
    ("by_strategy", "by_trainer"),
    [("bf16-mixed", "bf16-true"), ("bf16-true", "bf16-mixed"), ("32-true", "bf16-mixed"), ("32-true", "bf16-true")],
)
def test_two_precisions_contradict_each_other(by_strategy, by_trainer):
    with pytest.raises(ConfigError) as caught:
        make_trainer(HyperPodStrategy(precision=by_strategy), precision=by_trainer)
    message = str(caught.value)
    for word in (repr(by_strategy), repr(by_trainer), "contradicts", "give one of them"):
        assert word in message


@pytest.mark.parametrize("precision", ["64-true", "16-true"])
def test_a_precision_that_is_not_served_is_told_those_that_are(precision):
    with pytest.raises(ConfigError, match=rf"'{precision}'.*32-true, bf16-mixed, bf16-true"):
        make_trainer("hyperpod", precision=precision)


def test_float16_with_a_loss_scaler_is_refused():
    """On a CPU Lightning itself turns 16-mixed into bf16-mixed with a warning, so the plugin is given by hand."""
    from lightning.pytorch.plugins.precision import MixedPrecision

    plugin = MixedPrecision("16-mixed", "cuda", scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(ConfigError, match=r"'16-mixed' \(MixedPrecision\).*32-true, bf16-mixed, bf16-true"):
        make_trainer("hyperpod", plugins=[plugin])


def test_a_precision_plugin_of_another_kind_is_refused():
    from lightning.pytorch.plugins.precision import FSDPPrecision

    with pytest.raises(ConfigError, match=r"\(FSDPPrecision\).*no precision plugin"):
        make_trainer("hyperpod", plugins=[FSDPPrecision("bf16-mixed")])


@pytest.fixture
def with_transformer_engine(monkeypatch):
    """Lightning asks for the library's version, which the stand-in has none of."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "stand_ins"))
    monkeypatch.setattr("lightning.fabric.plugins.precision.transformer_engine._TRANSFORMER_ENGINE_AVAILABLE", True)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
        del sys.modules[name]


@pytest.mark.usefixtures("with_transformer_engine")
def test_lightnings_name_for_transformer_engine_is_its_recipe_with_weights_in_bfloat16():
    trainer = make_trainer("hyperpod", precision="transformer-engine")
    assert trainer.precision == trainer.strategy.config.precision == "bf16-true"
    assert trainer.strategy.config.float8_recipe == "te-fp8"
    with pytest.raises(ConfigError, match=r"weights in torch.float16.*float8_recipe='te-fp8'"):
        make_trainer("hyperpod", precision="transformer-engine-float16")


@pytest.mark.usefixtures("with_transformer_engine")
@pytest.mark.parametrize(
    ("by_strategy", "options", "message"),
    [
        ({}, {"recipe": {"margin": 1}}, "takes no options of TransformerEnginePrecision"),
        ({}, {"replace_layers": False}, "takes no options of TransformerEnginePrecision"),
        ({}, {"fallback_compute_dtype": torch.float32}, "other layers in torch.float32"),
        ({"precision": "bf16-mixed"}, {}, "the strategy has precision='bf16-mixed'"),
        ({"float8_recipe": "rowwise"}, {}, "float8_recipe='rowwise'"),
    ],
)
def test_what_it_cannot_mean_is_refused(by_strategy, options, message):
    from lightning.pytorch.plugins.precision import TransformerEnginePrecision

    plugin = TransformerEnginePrecision(weights_dtype=torch.bfloat16, **options)
    with pytest.raises(ConfigError, match=message):
        make_trainer(HyperPodStrategy(**by_strategy), plugins=[plugin])


@pytest.mark.usefixtures("with_transformer_engine")
@pytest.mark.parametrize(("kind", "name"), [("MXFP8BlockScaling", "te-mxfp8"), ("NVFP4BlockScaling", "te-nvfp4")])
def test_lightnings_plugin_with_a_recipe_of_blocks(kind, name):
    from lightning.pytorch.plugins.precision import TransformerEnginePrecision
    from transformer_engine.common import recipe

    plugin = TransformerEnginePrecision(weights_dtype=torch.bfloat16, recipe=getattr(recipe, kind)())
    config = make_trainer("hyperpod", plugins=[plugin]).strategy.config
    assert (config.precision, config.float8_recipe) == ("bf16-true", name)


@pytest.mark.parametrize("strategy", ["hyperpod", None], ids=["name", "object"])
def test_float8_as_a_precision_plugin(strategy):
    plugin = Float8Precision("tensorwise", precision="bf16-true", float8_all_gather=True)
    trainer = make_trainer(strategy or HyperPodStrategy(), plugins=[plugin])
    config = trainer.strategy.config
    assert trainer.precision == config.precision == "bf16-true"
    assert (config.float8_recipe, config.float8_all_gather) == ("tensorwise", True)


def test_float8_as_a_plugin_and_as_options_of_the_strategy():
    same = HyperPodStrategy(float8_recipe="rowwise", precision="bf16-mixed")
    assert make_trainer(same, plugins=[Float8Precision("rowwise")]).strategy.config.float8_recipe == "rowwise"
    for own, told in (
        ({"float8_recipe": "rowwise"}, "float8_recipe='tensorwise', but the strategy has 'rowwise'"),
        ({"precision": "32-true"}, "precision='bf16-mixed', but the strategy has '32-true'"),
        (
            {"float8_recipe": "tensorwise", "precision": "bf16-mixed", "float8_pad_inner_dim": True},
            "float8_pad_inner_dim=False, but the strategy",
        ),
    ):
        with pytest.raises(ConfigError, match=told):
            make_trainer(HyperPodStrategy(**own), plugins=[Float8Precision()])


class Trained(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_what_float8_precision_cannot_mean_is_refused():
    for wrong, told in (
        ({"float8_recipe": "none"}, "needs a float8_recipe"),
        ({"float8_recipe": "blockwise"}, "float8_recipe must be one of"),
        ({"precision": "32-true"}, "use 'bf16-mixed' or 'bf16-true'"),
        ({"float8_recipe": "rowwise", "float8_all_gather": True}, "float8_all_gather=True needs"),
    ):
        with pytest.raises(ConfigError, match=told):
            Float8Precision(**wrong)
    with pytest.raises(ConfigError, match="no precision plugin but Float8Precision"):
        make_trainer("hyperpod", plugins=[type("Own", (Float8Precision,), {})()])
    options = {"logger": False, "enable_checkpointing": False, "max_epochs": 1}
    trainer = pl.Trainer(accelerator="cpu", devices=1, plugins=[Float8Precision()], **options)
    with pytest.raises(ConfigError, match="works with strategy='hyperpod' only"):
        trainer.fit(Trained(), torch.ones(4, 1, 2))


def test_lightning_refuses_the_name_where_the_strategy_is_an_object():
    """Before the strategy sees it; docs/guides/float8.md says what to write."""
    with pytest.raises(ValueError, match="`ModelParallelStrategy` does not support"):
        make_trainer(HyperPodStrategy(), precision="transformer-engine")
    trainer = make_trainer(HyperPodStrategy(float8_recipe="te-fp8"), precision="bf16-true")
    assert (trainer.strategy.config.precision, trainer.strategy.config.float8_recipe) == ("bf16-true", "te-fp8")


# -- other arguments of the Trainer -----------------------------------------------------------------------------------


def test_nodes_and_devices_are_the_trainers_where_lightning_starts_the_processes():
    trainer = pl.Trainer(strategy="hyperpod", accelerator=ACCELERATOR, devices=2, num_nodes=3, logger=False)
    assert (trainer.num_nodes, trainer.num_devices, trainer.world_size) == (3, 2, 6)


def test_nodes_and_devices_are_the_launchers_under_torchrun(monkeypatch):
    variables = {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "1",
        "TORCHELASTIC_RUN_ID": "test",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    trainer = pl.Trainer(strategy="hyperpod", accelerator=ACCELERATOR, logger=False)
    assert (trainer.strategy.num_nodes, trainer.strategy.num_processes) == (2, 4)
    assert (trainer.world_size, trainer.global_rank, trainer.local_rank, trainer.node_rank) == (8, 5, 1, 1)


@pytest.mark.parametrize("is_childs", [False, True])
def test_a_child_of_lightnings_launcher_counts_as_its_parent_does(monkeypatch, is_childs):
    """Lightning gives a child LOCAL_RANK and WORLD_SIZE, from which alone nothing can be said about nodes."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("NODE_RANK", "1")
    if is_childs:
        monkeypatch.setenv("LOCAL_RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "4")
    trainer = pl.Trainer(strategy="hyperpod", accelerator=ACCELERATOR, devices=2, num_nodes=2, logger=False)
    trainer.strategy.set_world_ranks()
    assert (trainer.strategy.num_nodes, trainer.strategy.num_processes, trainer.world_size) == (2, 2, 4)
    assert trainer.global_rank == (3 if is_childs else 2)


# -- placement ---------------------------------------------------------------------------------------------------------


def placement_warnings_of_two_trainers(shard_degree):
    import warnings

    from lightning.pytorch.demos.boring_classes import BoringModel

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            trainer = pl.Trainer(
                strategy=HyperPodStrategy(hybrid_shard_degree=shard_degree),
                accelerator=ACCELERATOR,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            trainer.predict(BoringModel(), [torch.ones(1, 32)])
    return trainer.num_nodes, [str(each.message) for each in caught if "crosses nodes" in str(each.message)]


@pytest.mark.spawns
@pytest.mark.parametrize(("nodes", "shard_degree", "num_warnings"), [(1, 2, 0), (2, 1, 0), (2, 2, 1)])
def test_rank_0_is_told_once_of_a_layout_that_crosses_nodes(run_ranks, nodes, shard_degree, num_warnings):
    results = run_ranks(placement_warnings_of_two_trainers, shard_degree, world_size=2, nodes=nodes)
    assert [(seen, len(warned)) for seen, warned in results] == [(nodes, num_warnings), (nodes, 0)]
    for text in results[0][1]:
        assert "replicate 1 x shard 2 x tensor 1" in text
        assert "the shard axis (2) crosses nodes" in text
        assert "hybrid_shard_degree" in text


def test_one_node_is_never_warned_of():
    for degrees in ({}, {"shard_degree": 2}, {"tensor_degree": 4}):
        warn_of_placement(Topology(world_size=4, ranks_per_node=4, **degrees))  # a warning would be an error
    with pytest.warns(UserWarning, match="the tensor axis .* crosses nodes"):
        warn_of_placement(Topology(world_size=4, ranks_per_node=2, tensor_degree=4))


@pytest.mark.parametrize(
    ("callback", "told"),
    [
        (callbacks.StochasticWeightAveraging(1e-3), r"copies the module before it is sharded.* Use WeightAveraging"),
        (callbacks.ModelPruning("l1_unstructured", amount=0.1), r"ModelPruning replaces parameters by masked copies"),
    ],
    ids=["averaging", "pruning"],
)
def test_callbacks_that_keep_parameters_of_their_own_are_refused(callback, told):
    refuse_copying_callbacks(make_trainer("hyperpod", callbacks=[callbacks.WeightAveraging()]))
    with pytest.raises(ConfigError, match=told):
        refuse_copying_callbacks(make_trainer("hyperpod", callbacks=[callback]))


def test_a_callback_that_trains_inside_the_fit_is_refused():
    refuse_nested_fits(make_trainer("hyperpod"))
    with pytest.raises(ConfigError, match=r"LearningRateFinder trains, .*CheckpointlessRecovery\(enabled=False\)"):
        refuse_nested_fits(make_trainer("hyperpod", callbacks=[callbacks.LearningRateFinder()]))


def test_validation_after_a_time_is_refused():
    refuse_validation_by_clock(make_trainer("hyperpod", val_check_interval=0.5))
    with pytest.raises(ConfigError, match=r"val_check_interval=\.\.\.\) is a time \(900 s\).* its own clock"):
        refuse_validation_by_clock(make_trainer("hyperpod", val_check_interval="00:00:15:00"))


@pytest.mark.parametrize(
    ("every", "micro_steps", "num_batches", "counts_on", "wanted"),
    [
        (3, 1, 10, False, True),
        (4, 2, 10, False, True),
        (5, 2, 10, False, False),
        (10, 4, 10, False, True),  # at the end of the epoch, with a shorter step
        (float("inf"), 4, 10, False, True),
        (8, 4, 10, True, False),  # the second time is not the end of a step
        (8, 4, 12, True, True),
        (8, 4, float("inf"), True, True),
        (6, 4, float("inf"), True, False),
    ],
)
def test_where_validation_ends_steps(every, micro_steps, num_batches, counts_on, wanted):
    assert ends_steps(every, micro_steps, num_batches, counts_on=counts_on) == wanted
