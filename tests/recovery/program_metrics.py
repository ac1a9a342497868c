"""Metrics in the ways programs use them, in the job of `ranks_lightning.py`."""

import lightning.pytorch as pl
import ranks_lightning as program
import torch
from torchmetrics import MaxMetric, MeanMetric

faults = program.faults


class Module(program.Module):
    def __init__(self):
        super().__init__()
        self.best = MaxMetric()
        self.rare, self.rarer = MeanMetric(), MeanMetric()

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        if self.global_rank == 0:  # the other ranks compute them without ever having updated them
            self.rare.update(loss.detach())
            self.rarer.update(loss.detach())
        return loss

    def validation_step(self, batch, index):
        if not self.trainer.sanity_checking:  # first of all here, and last where a sanity check came before
            self.log("extra", torch.tensor(100.0 + self.global_rank), sync_dist=True)
        super().validation_step(batch, index)

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            self.best.update(float(self.global_rank))
            self.log("best", self.best.compute())

    def on_train_epoch_end(self):
        super().on_train_epoch_end()
        self.log("best_of_epoch", self.best.compute())  # cached since the validation, but not in a replacement
        rare = self.rare.compute()
        faults.at("rare", self.global_step)
        self.log_dict({"rare": rare, "rarer": self.rarer.compute()})
        self.rare.reset()
        self.rarer.reset()


class Own(pl.Callback):
    def __init__(self):
        self.first, self.second = MeanMetric(), MeanMetric()

    def on_train_batch_start(self, trainer, *_):
        self.first.update(float(trainer.global_rank))
        self.second.update(1.0)

    def on_train_epoch_end(self, trainer, module):
        first = self.first.compute()
        faults.at("own", trainer.global_step)
        module.log_dict({"first": first, "second": self.second.compute()})
        self.first.reset()
        self.second.reset()


if __name__ == "__main__":
    make = pl.Trainer
    pl.Trainer = lambda *args, callbacks=(), **options: make(*args, callbacks=[*callbacks, Own()], **options)
    program.Module = Module
    program.main()
