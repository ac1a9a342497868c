# ruff: noqa: E402 (warnings are off before the imports that would give them)
"""A Lightning program that grows and shrinks while it runs; it writes down which samples each committed step had."""

import os
import time
import warnings

warnings.filterwarnings("ignore")

import lightning.pytorch as pl
import torch
from faults import ACCELERATOR, Faults, devices, noticed
from lightning.pytorch.utilities import CombinedLoader
from torch import nn

from hyperpod_plugins.data import TokenDataset
from hyperpod_plugins.lightning import (
    CheckpointlessRecovery,
    ElasticTraining,
    HyperPodStrategy,
    TokenDataConfig,
    TokenDataModule,
)
from hyperpod_plugins.memory import offload
from hyperpod_plugins.parallel import SequenceContext

torch.set_num_threads(1)
WIDTH, BATCH, MICRO_BATCH = 16, 12, 4
faults = Faults()


def option(name, default):
    return type(default)(os.environ.get(name, default))


CONTEXTS = option("CONTEXTS", 1)


class SequenceNet(nn.Module):
    """Takes each number of a sample for a token of a sequence, which two ranks share; returns the loss."""

    uses_sequence_context = True

    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.output = nn.Linear(1, 8), nn.Linear(8, 24), nn.Linear(8, 1, bias=False)
        self.drop = nn.Dropout(option("DROPOUT", 0.0))

    def forward(self, x):
        context = SequenceContext.of(self, length=WIDTH, num_heads=2)
        hidden = torch.tanh(self.embed(context.part(x)[..., None]))
        heads = self.mix(hidden).unflatten(2, (6, 4)).transpose(1, 2).chunk(3, dim=1)
        hidden = self.drop(hidden + context.attention(*heads).transpose(1, 2).flatten(2))
        error = self.output(hidden)[..., 0] - context.part(x.flip(1))
        return context.mean(error.square().sum(), x.numel())


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        drop = nn.Dropout(option("DROPOUT", 0.0))
        self.net = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), drop, nn.Linear(2 * WIDTH, WIDTH))
        if CONTEXTS > 1:
            self.net = SequenceNet()
        self.ids, self.loss = [], 0.0

    def setup(self, stage):
        faults.at("setup", 0)

    def training_step(self, batch, index):
        faults.at("forward", self.global_step)
        time.sleep(option("STEP_S", 0.0))
        if index % self.trainer.accumulate_grad_batches == 0:
            self.ids, self.loss = [], 0.0
        ids = (batch[0] if isinstance(batch, list) else batch)["input_ids"]
        x = torch.sin(ids * torch.arange(1, WIDTH + 1) / 7.0)
        loss = self.net(x) if CONTEXTS > 1 else (self.net(x) - x.flip(1)).square().mean()
        self.ids += ids.flatten().tolist()
        self.loss += float(loss.detach()) * len(ids)
        self.log("id", ids.float().mean(), on_step=False, on_epoch=True, batch_size=len(ids))
        return loss

    def on_after_backward(self):
        faults.at("backward", self.global_step)

    def test_step(self, batch, index):
        faults.at("test", index)
        self.log("test", self.net(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self):
        if option("OPTIMIZER", "adamw") == "sgd":
            optimizer = noticed(torch.optim.SGD, self.committing)(self.parameters(), lr=0.05, momentum=0.9)
        else:
            optimizer = noticed(torch.optim.AdamW, self.committing)(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def committing(self):
        faults.at("optimizer", self.global_step)
        faults.note(
            kind="step",
            step=self.global_step,
            rank=self.global_rank,
            size=self.trainer.world_size,
            shards=self.trainer.strategy.topology.shard_degree,
            tensors=self.trainer.strategy.topology.tensor_degree,
            ids=self.ids,
            loss=self.loss,
            num_in_mean=int(self.trainer.fit_loop.epoch_loop._results["training_step.id"].cumulated_batch_size),
            lr=self.trainer.optimizers[0].param_groups[0]["lr"],
            pid=os.getpid(),
            at_s=time.time(),
        )


class LogsBefore(Module):
    def on_train_batch_start(self, batch, index):
        self.log("before", float(index), on_step=False, on_epoch=True)  # before a new rank, without predecessor, joins


class Curriculum(TokenDataset):
    """Counts its reads; its samples depend on a level that the program raises."""

    num_reads = level = 0

    def __getitem__(self, index):
        self.num_reads += 1
        return super().__getitem__(index)


class RaiseLevel(pl.Callback):
    def on_train_epoch_end(self, trainer, *_):
        if trainer.current_epoch == option("RAISE_LEVEL", -1):
            trainer.train_dataloader.dataset.level += 1


class LossCurve(pl.Callback):
    """Writes down the loss over the whole global batch of each committed step."""

    def __init__(self, elastic):
        self.elastic = elastic

    def on_train_batch_end(self, trainer, *_):
        if self.elastic.step_loss is not None:
            faults.note(kind="curve", step=trainer.global_step, loss=self.elastic.step_loss.item().hex())


class StopWhenTold(pl.Callback):
    """All ranks stop after the same step, which somebody has written down in good time."""

    def on_train_batch_end(self, trainer, *_):
        path = faults.folder / "stop"
        if path.exists() and trainer.global_step >= int(path.read_text()):
            trainer.should_stop = True


def local(tensor):
    whole = tensor.detach()
    return (whole.to_local() if hasattr(whole, "to_local") else whole).clone()


def main():
    pl.seed_everything(1, verbose=False)
    offload.MIN_BYTES = 1
    module = LogsBefore() if option("LOGS_BEFORE", 0) else Module()
    recovery = CheckpointlessRecovery(
        verify=True,
        replacement_timeout_s=30.0,
        hang_timeout_s=10.0,
        snapshot_every_steps=option("SNAPSHOT_EVERY", 0) or "auto",
    )
    per_replica = option("PER_REPLICA", 0)
    batch = {"global_batch_size": BATCH}
    if per_replica:  # the batch follows the world
        batch = {
            "samples_per_replica": per_replica,
            "lr_scaling": option("LR_SCALING", "linear"),
            "reference_batch_size": option("REFERENCE", 0),
            "warmup_samples": option("WARMUP", 0),
        }
    elastic = ElasticTraining(
        **batch,
        reproducible=bool(option("REPRODUCIBLE", 0)),
        micro_batch_size=MICRO_BATCH,
        max_replicas=option("MAX_REPLICAS", 4),
        replica_increment=option("INCREMENT", 1),
        min_replicas=option("MIN_REPLICAS", 1),
        shard_degrees=[int(each) for each in option("SHARD_DEGREES", "").split()],
        tensor_degrees=[int(each) for each in option("TENSOR_DEGREES", "").split()],
        scaling_timeout_s=option("SCALING_S", 0.0),
        faulty_scale_down_timeout_s=option("SHRINK_S", 30.0),
    )
    data = TokenDataModule(os.environ["TOKENS"], config=TokenDataConfig(sequence_length=1))
    if option("ORDINARY", 0):
        loaders = [
            torch.utils.data.DataLoader(Curriculum(os.environ["TOKENS"], 1), batch_size=MICRO_BATCH, drop_last=True)
            for _ in range(option("ORDINARY", 0))
        ]
        data = loaders[0] if len(loaders) == 1 else CombinedLoader(loaders, "min_size")
    callbacks = [recovery, elastic, LossCurve(elastic), StopWhenTold(), RaiseLevel()]
    every = option("CHECKPOINT_EVERY", 0)
    if every:
        path = faults.folder / "checkpoints"
        callbacks.append(pl.callbacks.ModelCheckpoint(path, every_n_train_steps=every, save_top_k=-1))
    trainer = pl.Trainer(
        default_root_dir=faults.folder,
        strategy=HyperPodStrategy(
            hybrid_shard_degree=option("SHARDS", 1),
            context_parallel_degree=CONTEXTS,
            tensor_plan={"net.0": "colwise", "net.3": "rowwise"},
            activation_offload=bool(option("OFFLOAD", 0)),
            **dict.fromkeys(option("ON_HOST", "").split(), True),
            block_classes=("Linear",) if option("OFFLOAD", 0) else (),
        ),
        accelerator=ACCELERATOR,
        devices=devices(int(os.environ["LOCAL_WORLD_SIZE"])),
        max_steps=option("STEPS", 100_000),
        limit_train_batches=option("LIMIT", 1.0),
        logger=False,
        callbacks=callbacks,
        enable_checkpointing=bool(every),
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=option("CLIP", 0.0) or None,
    )
    trainer.fit(module, data, ckpt_path=os.environ.get("RESUME"))
    if "SAVE" in os.environ:
        trainer.save_checkpoint(os.environ["SAVE"])
    (optimizer,) = trainer.optimizers
    state = {name: local(value) for name, value in module.named_parameters()}
    for name, parameter in module.named_parameters():  # a checkpoint brings their states in another order
        state |= {f"{name}.{key}": local(value) for key, value in optimizer.state[parameter].items()}
    result = {
        "state": state,
        "step": trainer.global_step,
        "size": trainer.world_size,
        "rank": trainer.global_rank,
        "lr_factor": elastic.lr_factor,
        "rates": elastic.state_dict(),
        "lr": optimizer.param_groups[0]["lr"],
        "repairs": [str(repair) for repair in recovery.repairs],
        "lasted_s": [repair.total_s for repair in recovery.repairs],
        "replicas": [resize.num_replicas for resize in elastic.resizes],
    }
    path = faults.folder / f"result-{faults.rank}.pt"
    if not path.exists():  # else all have begun again after the fit
        torch.save(result, path)
    if option("TEST", 0):
        (measured,) = trainer.test(module, torch.utils.data.DataLoader(torch.ones(8, WIDTH)), verbose=False)
        faults.note(kind="test", value=measured["test"], step=trainer.global_step)


if __name__ == "__main__":
    main()
