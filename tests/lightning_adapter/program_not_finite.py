"""Two replicas of a fit in which a batch of rank 1 gives a loss that is not a number in step 3, its second batch."""

import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hyperpod_plugins.lightning import CheckpointlessRecovery, HyperPodStrategy

sys.path.append(str(Path(__file__).parents[1]))

from device import ACCELERATOR, devices

torch.set_num_threads(1)
BAD = 7  # the second batch of step 3


def write(module, name):
    state = {name: value.detach().to_local().clone() for name, value in module.named_parameters()}
    torch.save(state, module.folder / f"{name}-rank-{module.global_rank}.pt")


class Module(pl.LightningModule):
    def __init__(self, folder):
        super().__init__()
        self.net, self.folder = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), folder

    def training_step(self, batch, index):
        loss = self.net(batch[0]).square().mean()
        return loss * torch.nan if index == BAD and self.global_rank == 1 else loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)

    def on_train_batch_end(self, *_):
        write(self, f"step-{self.global_step}")


class WriteAtException(pl.Callback):
    def on_exception(self, trainer, pl_module, exception):
        write(pl_module, "stopped")


def main(policy, recovers, folder):
    torch.manual_seed(0)
    trainer = pl.Trainer(
        strategy=HyperPodStrategy(hybrid_shard_degree=1, non_finite=policy),
        callbacks=[CheckpointlessRecovery(enabled=recovers == "yes"), WriteAtException()],
        accelerator=ACCELERATOR,
        devices=devices(2),
        max_epochs=1,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(folder), DataLoader(TensorDataset(torch.randn(96, 4)), batch_size=4))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
