"""Lightning's averages of weights over sharded parameters: what can be seen in one process, and how they begin."""

import lightning.pytorch as pl
import pytest
import torch
from device import ACCELERATOR, DEVICE, devices
from lightning.pytorch.callbacks import EMAWeightAveraging, WeightAveraging
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.lightning.weight_averaging import (
    AveragedBuffers,
    CallbackAverage,
    ShardedAverage,
    averaging_callback,
)
from hyperpod_plugins.recovery import TrainingState
from hyperpod_plugins.recovery.buffer_states import BufferStates


class Tied(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        self[2].weight = self[0].weight


def steps(model, *, num_steps=4):
    """Train, a step for each item that is asked for."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(num_steps):
        model(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()
        yield optimizer


@pytest.mark.parametrize("use_buffers", [True, False])
@pytest.mark.parametrize("options", [{}, {"avg_fn": get_ema_avg_fn(0.7)}, {"multi_avg_fn": get_ema_multi_avg_fn(0.7)}])
def test_it_averages_as_torch_does(options, use_buffers):
    model = Tied()
    wanted, average = (kind(model, use_buffers=use_buffers, **options) for kind in (AveragedModel, ShardedAverage))
    for _ in steps(model):
        wanted.update_parameters(model)
        average.update_parameters(model)
    torch.testing.assert_close(average.state_dict(), wanted.state_dict())
    assert len(list(average.parameters())) == len(list(model.parameters()))  # tied parameters are averaged once


def test_a_replacement_makes_the_update_of_buffers_that_its_predecessor_could_not_tell_of():
    model = Tied()
    average = ShardedAverage(model, use_buffers=True, avg_fn=get_ema_avg_fn(0.7))
    buffers = BufferStates(model)
    states = AveragedBuffers(average, model, buffers)
    for _ in steps(model):
        told = states.state_dict(), buffers.state_dict()  # before the vote, and so before the update
        average.update_parameters(model)
    other = Tied()
    taken = ShardedAverage(other, use_buffers=True, avg_fn=get_ema_avg_fn(0.7))
    taken.n_averaged.copy_(average.n_averaged)  # from a replica
    of_other = BufferStates(other)
    of_other.load_state_dict(told[1])
    AveragedBuffers(taken, other, of_other).load_state_dict(told[0])
    for (name, mean), found in zip(average.module.named_buffers(), taken.module.buffers(), strict=True):
        assert torch.equal(mean, found), name
    assert int(taken.n_averaged) == 4


def test_a_checkpoint_of_snapshots_has_the_average_as_the_model():
    model = Tied()
    average = ShardedAverage(model, use_buffers=True)
    optimizer = None
    for optimizer in steps(model):  # noqa: B007 (the last one)
        average.update_parameters(model)
    state = TrainingState(model, [optimizer], average=average)
    data = torch.empty(state.num_bytes(), dtype=torch.uint8)
    state.copy_to(data)
    parts = state.checkpoint_parts([(state.header(), data)], "a snapshot")
    means, beside = (
        {each.name: each.values for each in parts.model},
        {each.name: each.values for each in parts.extra_parts},
    )
    assert torch.equal(means["0.weight"], average.module.get_parameter("0.weight"))
    assert torch.equal(beside["current.0.weight"], model[0].weight)
    assert int(beside["num_averaged"]) == 4
    assert means.keys() == {name.removeprefix("current.") for name in beside} - {"num_averaged"}


class Own(EMAWeightAveraging):
    def on_save_checkpoint(self, *args):
        """In its own way."""


@pytest.mark.parametrize(
    ("callbacks", "words"),
    [
        ([EMAWeightAveraging(), WeightAveraging()], "2 callbacks that average weights"),
        ([Own()], "Own overrides on_save_checkpoint"),
    ],
)
def test_what_cannot_be_sharded_is_refused(callbacks, words):
    trainer = pl.Trainer(accelerator=ACCELERATOR, callbacks=callbacks, logger=False, enable_checkpointing=False)
    with pytest.raises(ConfigError, match=words):
        averaging_callback(trainer, None)


def test_an_average_on_a_device_of_another_kind_is_refused():
    other, module = {"cpu": "cuda", "cuda": "cpu"}[DEVICE], nn.Linear(4, 4, device=DEVICE)
    with pytest.raises(ConfigError, match=f"device='{other}'. is not possible .* on {DEVICE}. Leave device out"):
        CallbackAverage(EMAWeightAveraging(device=other)).begin(module)
    for same in (None, DEVICE):
        CallbackAverage(EMAWeightAveraging(device=same)).begin(module)


def fit_on(folder):
    """Train two steps without an average, then two from their checkpoint with one; that, and what it is made of."""
    from hyperpod_plugins.lightning import HyperPodStrategy

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer, self.seen = nn.Linear(4, 4), []

        def training_step(self, batch, index):
            return self.layer(batch).square().mean()

        def on_train_batch_end(self, *_):
            self.seen.append(self.layer.weight.full_tensor().detach().clone())

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    saving = pl.callbacks.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    callback = EMAWeightAveraging(decay=0.7)
    for max_steps, path, callbacks in ((2, None, [saving]), (4, folder / "step=2.ckpt", [callback])):
        torch.manual_seed(0)
        module, trained = Module(), dict(strategy=HyperPodStrategy(), accelerator=ACCELERATOR, devices=devices(2))
        saves = {"enable_checkpointing": path is None}
        trainer = pl.Trainer(**trained, max_steps=max_steps, callbacks=callbacks, **quiet, **saves)
        trainer.fit(module, torch.utils.data.DataLoader(torch.eye(4).repeat(4, 1), batch_size=1), ckpt_path=path)
    average = callback._average_model
    return average.module.layer.weight.full_tensor(), int(average.n_averaged), module.seen


@pytest.mark.spawns
def test_a_checkpoint_without_an_average_begins_one(run_ranks, tmp_path):
    for average, num_averaged, (third, fourth) in run_ranks(fit_on, tmp_path, world_size=2):
        assert num_averaged == 2
        torch.testing.assert_close(average, 0.7 * third + 0.3 * fourth)
