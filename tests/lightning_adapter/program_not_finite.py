"""Two replicas of a fit in which a batch of rank 1 is not finite in step 3: its loss, or the gradient of a finite one.

With `manual`, the module steps two optimizers by hand on one loss; with `averaged`, ElasticTraining averages gradients.
"""

import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hyperpod_plugins.lightning import CheckpointlessRecovery, ElasticTraining, HyperPodStrategy

sys.path.append(str(Path(__file__).parents[1]))

from device import ACCELERATOR, devices

torch.set_num_threads(1)
BAD = 7  # the second batch of step 3
BAD_BY_HAND = 3  # each batch is a step


def write(module, name):
    state = {name: value.detach().to_local().clone() for name, value in module.named_parameters()}
    torch.save(state, module.folder / f"{name}-rank-{module.global_rank}.pt")


class Module(pl.LightningModule):
    def __init__(self, kind, folder):
        super().__init__()
        self.net, self.kind, self.folder = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), kind, folder
        self.automatic_optimization = kind != "manual"

    def training_step(self, batch, index):
        out = self.net(batch[0])
        is_bad = index == (BAD if self.automatic_optimization else BAD_BY_HAND) and self.global_rank == 1
        if is_bad and self.kind != "loss":
            out.register_hook(lambda gradient: gradient * torch.inf)
        loss = out.square().mean()
        if is_bad and self.kind == "loss":
            loss = loss * torch.nan
        if self.automatic_optimization:
            return loss
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        return None

    def configure_optimizers(self):
        if self.automatic_optimization:
            return torch.optim.AdamW(self.parameters(), lr=0.1)
        return [torch.optim.AdamW(part.parameters(), lr=0.1) for part in self.net]

    def on_train_batch_end(self, outputs, batch, index):
        write(self, f"step-{self.global_step if self.automatic_optimization else index + 1}")


class WriteAtException(pl.Callback):
    def on_exception(self, trainer, pl_module, exception):
        write(pl_module, "stopped")


def main(policy, recovers, kind, folder):
    torch.manual_seed(0)
    callbacks = [CheckpointlessRecovery(enabled=recovers == "yes"), WriteAtException()]
    if kind == "averaged":
        sizes = {"global_batch_size": 16, "micro_batch_size": 4, "max_replicas": 2}
        callbacks.append(ElasticTraining(**sizes, replica_sizes=(1, 2), reproducible=True))
    trainer = pl.Trainer(
        strategy=HyperPodStrategy(hybrid_shard_degree=1, non_finite=policy),
        callbacks=callbacks,
        accelerator=ACCELERATOR,
        devices=devices(2),
        max_epochs=1,
        accumulate_grad_batches=2 if kind in ("loss", "gradient") else 1,
        gradient_clip_val=1.0 if kind == "loss" else None,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(kind, folder), DataLoader(TensorDataset(torch.randn(96, 4)), batch_size=4))


if __name__ == "__main__":
    main(*sys.argv[1:4], Path(sys.argv[4]))
