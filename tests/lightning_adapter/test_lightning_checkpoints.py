"""Checkpoints through the Trainer: resuming mid-epoch equals never stopping, also in another world or other degrees."""

import numpy as np
import pytest
import torch
from device import ACCELERATOR
from torch import nn

NUM_STEPS = 6
SEQUENCE = 8
GLOBAL_BATCH = 8


@pytest.fixture
def tokens(tmp_path):
    from hyperpod_plugins.data import write_tokens

    path = tmp_path / "data.tokens"
    write_tokens(path, [np.random.default_rng(0).integers(0, 64, 40 * SEQUENCE + 1)], vocab_size=64, progress=False)
    return path


def make_trainer(folder, num_steps, strategy, accumulate, callbacks=()):
    import lightning.pytorch as L
    from lightning.pytorch.callbacks import ModelCheckpoint

    from hyperpod_plugins.lightning import HyperPodStrategy

    checkpoint = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1, save_last=True)
    return L.Trainer(
        accelerator=ACCELERATOR,
        strategy=HyperPodStrategy(**strategy),
        max_steps=num_steps,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=0.5,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[checkpoint, *callbacks],
    )


def make_module(width=16):
    import lightning.pytorch as L

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.save_hyperparameters({"width": width})
            self.tok_embeddings = nn.Embedding(64, width)
            self.mlp = nn.ModuleDict({"w1": nn.Linear(width, 32), "w2": nn.Linear(32, width)})
            self.output = nn.Linear(width, 64, bias=False)
            self.losses = []

        def forward(self, ids):
            x = self.tok_embeddings(ids)
            return self.output(x + self.mlp["w2"](torch.tanh(self.mlp["w1"](x))))

        def training_step(self, batch, _):
            loss = nn.functional.cross_entropy(self(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
            self.losses.append(float(loss.detach()))
            return loss

        def test_step(self, batch, index):
            self.log("test_loss", self(batch["input_ids"]).square().mean(), sync_dist=True)

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    torch.manual_seed(3)
    return Module()


def fit(tokens, folder, num_steps, strategy, resume=None, width=16, data_ranks=4, sizes=(GLOBAL_BATCH, 2)):
    from hyperpod_plugins.data import BatchSplit
    from hyperpod_plugins.lightning import TokenDataConfig, TokenDataModule

    sizes = dict(zip(("global_batch_size", "micro_batch_size"), sizes, strict=True))
    trainer = make_trainer(folder, num_steps, strategy, BatchSplit(**sizes, data_world_size=data_ranks).num_micro_steps)
    module = make_module(width)
    data = TokenDataModule(tokens, config=TokenDataConfig(sequence_length=SEQUENCE, **sizes))
    trainer.fit(module, datamodule=data, ckpt_path=resume)
    values = {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for n, p in module.named_parameters()}
    [optimizer] = trainer.strategy.optimizers
    moments = [
        (s["exp_avg_sq"].full_tensor() if hasattr(s["exp_avg_sq"], "full_tensor") else s["exp_avg_sq"]).clone()
        for s in (optimizer.state[p] for p in module.parameters())
    ]
    rate = optimizer.param_groups[0]["lr"]
    return {"losses": module.losses, "values": values, "moments": moments, "rate": rate, "step": trainer.global_step}


def whole_resumed_and_elsewhere(tokens, folder):
    hsdp = {"hybrid_shard_degree": 2}
    background = {**hsdp, "background_checkpoints": True}
    whole = fit(tokens, folder / "whole", NUM_STEPS, hsdp)
    fit(tokens, folder / "first", 4, background)
    # five steps are an epoch, so step 4 is in the middle of one and the resumed run crosses its end
    resumed = fit(tokens, folder / "second", NUM_STEPS, background, resume=str(folder / "first" / "step=4.ckpt"))
    last = fit(tokens, folder / "third", NUM_STEPS, hsdp, resume=str(folder / "first" / "last.ckpt"))
    split = {"tensor_parallel_degree": 2}
    elsewhere = fit(tokens, folder / "tp", NUM_STEPS, split, str(folder / "first" / "step=4.ckpt"), data_ranks=2)
    errors = {}
    for name, arguments in {
        "another model": {"resume": str(folder / "first" / "step=4.ckpt"), "width": 24},
        "no checkpoint": {"resume": str(folder / "nowhere")},
    }.items():
        try:
            fit(tokens, folder / "wrong", NUM_STEPS, hsdp, **arguments)
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"
    return whole, resumed, last, elsewhere, errors


def on_fewer_ranks(tokens, folder, resume):
    return fit(tokens, folder / "two", NUM_STEPS, {}, resume=resume, data_ranks=2)


def assert_same(found, expected, tolerance):
    assert found["step"] == expected["step"]
    assert found["rate"] == expected["rate"]
    for name, value in found["values"].items():
        torch.testing.assert_close(value, expected["values"][name], rtol=0, atol=tolerance)
    for left, right in zip(found["moments"], expected["moments"], strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=tolerance)


@pytest.mark.spawns
def test_resuming_mid_epoch_equals_never_stopping(run_ranks, tokens, tmp_path):
    results = run_ranks(whole_resumed_and_elsewhere, tokens, tmp_path, world_size=4, timeout_s=150)
    for whole, resumed, last, _, _ in results:
        assert whole["losses"][-2:] == resumed["losses"] == last["losses"]
        assert_same(resumed, whole, tolerance=0)
        assert_same(last, whole, tolerance=0)
    whole, _, _, elsewhere, errors = results[0]
    assert_same(elsewhere, whole, tolerance=2e-5)
    assert "CheckpointMismatch" in errors["another model"]
    assert "output.weight" in errors["another model"]
    assert "CheckpointDamaged" in errors["no checkpoint"]

    two = run_ranks(on_fewer_ranks, tokens, tmp_path, str(tmp_path / "first" / "step=4.ckpt"), world_size=2)
    assert_same(two[0], whole, tolerance=2e-5)


UNEVEN = [(6, 2), (10, 2), (7, 2)]  # on four ranks: 2 2 1 1 samples, 1 each and then 2 2 1 1, 2 2 2 1


def uneven(tokens, folder, data_ranks):
    strategy = {"hybrid_shard_degree": 2 if data_ranks == 4 else 1}
    sizes = UNEVEN if data_ranks == 4 else [(batch, batch) for batch, _ in UNEVEN]
    return [fit(tokens, folder / str(each), NUM_STEPS, strategy, data_ranks=data_ranks, sizes=each) for each in sizes]


@pytest.mark.spawns
def test_uneven_shares_train_as_one_process_does(run_ranks, tokens, tmp_path):
    """Averaging the ranks' means would let the samples of a small share count more: see `sample_weight`."""
    alone = run_ranks(uneven, tokens, tmp_path / "alone", 1, world_size=1, timeout_s=60)[0]
    together = run_ranks(uneven, tokens, tmp_path / "together", 4, world_size=4, timeout_s=100)[0]
    for found, expected in zip(together, alone, strict=True):
        assert_same(found, expected, tolerance=2e-5)


def test_and_weights_only(tokens, folder):
    """`test(ckpt_path=...)`, a checkpoint of weights only, and hooks that change what is saved."""
    from hyperpod_plugins.lightning import TokenDataConfig, TokenDataModule

    fit(tokens, folder / "fit", 2, {"hybrid_shard_degree": 2})
    trainer = make_trainer(folder / "other", 2, {"hybrid_shard_degree": 2}, accumulate=1)
    module = make_module()
    config = TokenDataConfig(sequence_length=SEQUENCE, global_batch_size=GLOBAL_BATCH, micro_batch_size=2)
    loader = TokenDataModule(tokens, tokens, config=config)
    loader.test_dataloader = loader.val_dataloader
    [tested] = trainer.test(module, datamodule=loader, ckpt_path=str(folder / "fit" / "step=2.ckpt"), verbose=False)

    class Doubled(type(module)):
        def on_save_checkpoint(self, checkpoint):
            state = checkpoint["state_dict"]
            checkpoint["state_dict"] = {name: 2 * value for name, value in state.items() if "output" in name}

    module.__class__ = Doubled
    trainer.save_checkpoint(folder / "half", weights_only=True)
    before = module.output.weight.full_tensor().detach().clone()
    module.strict_loading = False
    trainer.strategy.load_checkpoint(folder / "half")
    return tested["test_loss"], torch.equal(module.output.weight.full_tensor(), 2 * before)


@pytest.mark.spawns
def test_evaluation_from_a_checkpoint_and_hooks_that_change_it(run_ranks, tokens, tmp_path):
    results = run_ranks(test_and_weights_only, tokens, tmp_path, world_size=4, timeout_s=120)
    assert len({loss for loss, _ in results}) == 1
    assert all(is_doubled for _, is_doubled in results)


test_and_weights_only.__test__ = False


def load_foreign_file(tokens, path):
    return fit(tokens, path.parent / "from-file", 2, {"hybrid_shard_degree": 2}, resume=str(path))


@pytest.mark.spawns
def test_a_checkpoint_file_of_another_strategy_is_loaded(run_ranks, tokens, tmp_path):
    import lightning.pytorch as L

    module = make_module()
    options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(accelerator=ACCELERATOR, devices=1, max_steps=2, **options, enable_checkpointing=False)
    sample = {"input_ids": torch.arange(4)[None], "labels": torch.arange(4)[None]}
    trainer.fit(module, torch.utils.data.DataLoader([sample] * 2, batch_size=None))
    trainer.save_checkpoint(tmp_path / "alone.ckpt")
    [optimizer] = trainer.strategy.optimizers
    expected = {
        "values": dict(module.named_parameters()),
        "moments": [optimizer.state[parameter]["exp_avg_sq"] for parameter in module.parameters()],
        "rate": optimizer.param_groups[0]["lr"],
        "step": 2,
    }
    assert_same(run_ranks(load_foreign_file, tokens, tmp_path / "alone.ckpt", world_size=4)[0], expected, tolerance=0)


def keep_one_while_training(tokens, folder):
    """The second checkpoint cannot be completed before the fifth step; the first is to go when it is."""
    import threading

    import lightning.pytorch as L
    import torch.distributed as dist
    from lightning.pytorch.callbacks import ModelCheckpoint

    from hyperpod_plugins.lightning import HyperPodStrategy, TokenDataConfig, TokenDataModule
    from hyperpod_plugins.parallel.checkpoint import save_load as checkpoint

    may_publish, publish = threading.Event(), checkpoint.publish

    def slowly(path, document):
        assert path.name == "step=2.ckpt" or may_publish.wait(30)
        publish(path, document)

    checkpoint.publish = slowly
    seen, groups = {}, dist.distributed_c10d._world.pg_map

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 5:
                dist.barrier()
                seen["during"] = sorted(path.name for path in folder.glob("*.ckpt"))
                dist.barrier()
                may_publish.set()

        def on_train_end(self, trainer, module):
            seen["groups"] = len(groups)

    trainer = L.Trainer(
        accelerator=ACCELERATOR,
        strategy=HyperPodStrategy(background_checkpoints=True),
        max_steps=5,
        accumulate_grad_batches=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=1), Watch()],
    )
    config = TokenDataConfig(sequence_length=SEQUENCE, global_batch_size=GLOBAL_BATCH, micro_batch_size=2)
    trainer.fit(make_module(), datamodule=TokenDataModule(tokens, config=config))
    return seen, len(groups)


@pytest.mark.spawns
def test_the_older_checkpoint_goes_when_the_newer_is_complete_and_training_waits_for_neither(
    run_ranks, tokens, tmp_path
):
    folder = tmp_path / "kept"
    for seen, num_groups_after in run_ranks(keep_one_while_training, tokens, folder, world_size=2, timeout_s=90):
        assert seen["during"] == ["step=2.ckpt"]
        assert num_groups_after == seen["groups"] - 1  # the writer's own
    assert [path.name for path in folder.iterdir()] == ["step=4.ckpt"]
    assert on_one_process(folder / "step=4.ckpt")["global_step"] == 4


def on_one_process(path):
    from hyperpod_plugins.parallel import load_checkpoint

    return load_checkpoint(path, model=make_module())
