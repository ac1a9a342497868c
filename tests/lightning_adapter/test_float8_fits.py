"""Fits in float8 that a precision of the Trainer asks for have the losses of those that the strategy asks for."""

import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from harness import run_ranks
from torch import nn

from hyperpod_plugins import Float8Precision, HyperPodStrategy

STAND_INS = str(Path(__file__).parents[1] / "stand_ins")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(16, 32), nn.Linear(32, 16)
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.losses = Net(), []

    def training_step(self, batch, index):
        loss = (self.net(batch).float() - batch.float().flip(-1)).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(*, options=None, plugin=None, of_strategy=None):
    """Losses of four steps, the type of the weights, the class of a block's layers, and the buffers of all."""
    trainer = pl.Trainer(
        strategy="hyperpod" if of_strategy is None else HyperPodStrategy(**of_strategy),
        plugins=None if plugin is None else [Float8Precision(**plugin)],
        accelerator="cpu",
        devices=2,
        max_steps=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **(options or {}),
    )
    module = Module()
    data = torch.randn(128, 16, generator=torch.Generator().manual_seed(1))
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=16))
    assert trainer.global_step == 4
    block = module.net.layers[0]
    assert type(module.net.head) is nn.Linear  # outside of the blocks
    buffers = {name: each.float().tolist() for name, each in module.named_buffers()}
    return module.losses, block.up.weight.dtype, type(block.up).__name__, buffers


def fit_each(*programs):
    """Fit one after the other in this process."""
    sys.path.insert(0, STAND_INS)
    import lightning.fabric.plugins.precision.transformer_engine as lightnings

    lightnings._TRANSFORMER_ENGINE_AVAILABLE = True  # it asks for a version, which the stand-in has none of
    return [fit(**each) for each in programs]


def fit_in_two_ranks(*programs):
    """What `fit` returns for each program, with the losses of both ranks, which have other samples."""
    results = run_ranks(fit_each, *programs, world_size=2, timeout_s=120)
    both = []
    for first, second in zip(*results, strict=True):
        assert first[1:] == second[1:]
        both.append((first[0] + second[0], *first[1:]))
    return both


@pytest.mark.spawns
def test_lightnings_name_for_transformer_engine_trains_as_the_strategys_recipe():
    by_name, by_strategy, (plain, *_) = fit_in_two_ranks(
        {"options": {"precision": "transformer-engine"}},
        {"options": {"precision": "bf16-true"}, "of_strategy": {"float8_recipe": "te-fp8"}},
        {"options": {"precision": "bf16-true"}},
    )
    losses, dtype, layer, buffers = by_name
    assert by_name == by_strategy
    assert (dtype, layer) == (torch.bfloat16, "TransformerEngineLinear")
    assert len(buffers) == 16
    assert buffers["net.layers.0.up.fp8_scale_fwd"] != [1.0, 1.0, 1.0]
    assert losses != plain
    assert losses == pytest.approx(plain, rel=0.1)


@pytest.mark.spawns
@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"float8_recipe": "tensorwise", "precision": "bf16-true", "float8_all_gather": True}, torch.bfloat16),
        ({"float8_recipe": "rowwise", "precision": "bf16-mixed"}, torch.float32),
    ],
    ids=["tensorwise", "rowwise"],
)
def test_float8_precision_trains_as_the_strategys_recipe(options, dtype):
    pytest.importorskip("torchao")
    by_plugin, by_strategy, (plain, *_) = fit_in_two_ranks(
        {"plugin": options}, {"of_strategy": options}, {"options": {"precision": options["precision"]}}
    )
    losses, *others = by_plugin
    assert by_plugin == by_strategy
    assert others == [dtype, "Float8Linear", {}]
    assert losses != plain
    assert losses == pytest.approx(plain, rel=0.1)
