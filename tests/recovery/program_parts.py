# ruff: noqa: E402 (warnings are off before the imports that would give them)
"""What `test_parts.py` runs under `hyperpodrun`: a fit with faults in the hooks of all its parts."""

import hashlib
import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from hyperpod_plugins.comm import group_health
from hyperpod_plugins.comm.commit_vote import CommitVote
from hyperpod_plugins.lightning import CheckpointlessRecovery, HyperPodStrategy
from hyperpod_plugins.recovery.step import StepTransaction
from hyperpod_plugins.recovery.stop_reports import StopReports

sys.path.append(str(Path(__file__).parents[1]))

from device import ACCELERATOR, devices

torch.set_num_threads(1)
RANK = int(os.environ["RANK"])
FITS = {
    "early": {"max_epochs": 8},  # six batches in an epoch; the fourth epoch is the last
    "steps": {
        "max_steps": 5,
        "max_epochs": -1,
        "val_check_interval": 2,
        "check_val_every_n_epoch": None,
        "accumulate_grad_batches": 2,
    },
}


class Counts(pl.Callback):
    """Counts calls, and has the counts in its state."""

    def __init__(self):
        self.calls = {}

    def state_dict(self):
        return dict(self.calls)

    def load_state_dict(self, state):
        self.calls = dict(state)

    def count(self, name):
        self.calls[name] = self.calls.get(name, 0) + 1


class CountsSteps(Counts):
    def on_before_optimizer_step(self, *_):
        self.count("optimizer step")


class CountsHooks(Counts):
    def on_train_epoch_start(self, *_):
        self.count("epoch start")

    def on_train_batch_start(self, *_):
        self.count("batch start")

    def on_train_batch_end(self, *_):
        self.count("batch end")

    def on_validation_start(self, *_):
        self.count("validation start")

    def on_validation_batch_end(self, *_):
        self.count("validation batch")

    def on_validation_epoch_end(self, *_):
        self.count("validation epoch end")

    def on_validation_end(self, *_):
        self.count("validation end")

    def on_train_epoch_end(self, *_):
        self.count("epoch end")

    def on_train_end(self, *_):
        self.count("train end")


class Shares:
    """Communicates, and goes on while ranks that are late have not come: these wait."""

    def __init__(self, faults):
        self.late = [fault.split(":")[1:] for fault in faults if fault.startswith("late:")]

    def at(self, place, trainer):
        is_late = [str(RANK), place, str(trainer.current_epoch)] in self.late
        if is_late:
            time.sleep(1)
        self.work = dist.all_reduce(torch.zeros(1, device=trainer.strategy.root_device), async_op=True)
        if is_late:
            self.work.wait()


class Shared(MeanMetric):
    """Communicates once more when all means have been reduced."""

    def compute(self):
        self.shares()
        return super().compute()


class CountsOwn(pl.Callback):
    """Counts for its rank alone."""

    def __init__(self, shares, faults):
        self.shares, self.faults, self.calls = shares, faults, torch.zeros(2)

    def state_dict(self):
        return {"calls": self.calls.clone()}

    def load_state_dict(self, state):
        self.calls = state["calls"].clone()

    def on_train_epoch_start(self, trainer, module):
        trainer.strategy.barrier()  # fails where others still wait for each other at the end of the epoch before

    def on_train_batch_start(self, trainer, module, batch, index):
        self.faults.at(f"before_batch{index}", trainer)
        trainer.strategy.barrier()

    def on_validation_end(self, trainer, module):
        if not trainer.sanity_checking:
            self.calls[0] += 1
            self.shares.at("val_end", trainer)
            self.calls[1] += 1


KEPT = []


class Swaps(pl.Callback):
    """Has other values in the place of the parameters while validating."""

    def __init__(self, *, past_versions):
        self.past_versions = past_versions

    def write(self, module, values):
        for parameter, value in zip(module.parameters(), values, strict=True):
            if self.past_versions:
                parameter.data.copy_(value)
            else:
                with torch.no_grad():
                    parameter.copy_(value)

    def on_validation_start(self, trainer, module):
        KEPT[:] = [each.detach().clone() for each in module.parameters()]
        self.write(module, [each / 2 for each in KEPT])

    def on_validation_end(self, trainer, module):
        self.write(module, KEPT)


class Faults(pl.Callback):
    """`kind:rank:place:epoch`, each of which comes once in a job."""

    def __init__(self, wanted, folder):
        self.wanted = [fault.split(":") for fault in wanted if fault.count(":") == 3]
        self.folder = Path(folder)

    def at(self, place, trainer):
        if trainer.sanity_checking:
            return
        for kind, rank, where, epoch in self.wanted:
            if kind in ("late", "vote", "deaf", "told"):
                continue
            mark = self.folder / f"done-{kind}-{rank}-{where}-{epoch}"
            if (int(rank), where, int(epoch)) != (RANK, place, trainer.current_epoch) or mark.exists():
                continue
            mark.touch()
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError(f"fault at {place} of epoch {epoch}")

    def on_train_epoch_start(self, trainer, module):
        self.at("epoch_start", trainer)

    def on_train_batch_start(self, trainer, module, batch, index):
        self.at(f"batch{index}", trainer)

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        self.at(f"batch_end{index}", trainer)

    def on_validation_start(self, trainer, module):
        self.at("val_start", trainer)

    def on_validation_batch_end(self, trainer, module, outputs, batch, index, loader=0):
        self.at(f"val_batch{index}", trainer)

    def on_validation_end(self, trainer, module):
        self.at("val_end", trainer)

    def on_train_epoch_end(self, trainer, module):
        self.at("epoch_end", trainer)

    def on_train_end(self, trainer, module):
        self.at("train_end", trainer)


def die_in_votes(wanted, folder, trainer):
    """`vote:rank:place:epoch`: a rank that knows that all have ended a part dies before it tells others."""
    meet, send, is_meeting = StepTransaction.barrier, CommitVote._send, []

    def meet_or_die(transaction):
        is_meeting.append(True)
        try:
            meet(transaction)
        finally:
            is_meeting.clear()

    def send_or_die(vote, to, value):
        place = "val" if trainer.validating else "epoch"
        mark = Path(folder, f"done-vote-{RANK}-{place}-{trainer.current_epoch - (place == 'epoch')}")
        if is_meeting and to in vote._down and mark.name[5:].replace("-", ":") in wanted and not mark.exists():
            mark.touch()
            time.sleep(0.2)  # others go on
            os.kill(os.getpid(), signal.SIGKILL)
        send(vote, to, value)

    StepTransaction.barrier, CommitVote._send = meet_or_die, send_or_die


def die_as_the_only_one_that_knows(folder, trainer):
    """Rank 0 alone hears that all have ended the second validation; it dies when the others enter its part."""
    receive, wait, first, mark = (
        CommitVote._receive,
        StopReports.wait,
        Path(folder, "done-vote-1-val-1"),
        Path(folder, "done-only"),
    )

    def receive_late(vote, of):
        if of is vote._up and trainer.validating and trainer.current_epoch == 1:
            until_s = time.monotonic() + 5
            while not first.exists() and time.monotonic() < until_s:
                time.sleep(0.01)
            time.sleep(1)  # until the groups are broken
        return receive(vote, of)

    def wait_and_die(*args, **more):
        resume_point = wait(*args, **more)
        if first.exists() and not mark.exists():
            time.sleep(2)
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return resume_point

    if RANK == 2:
        CommitVote._receive = receive_late
    if RANK == 0:
        StopReports.wait = wait_and_die


def die_when_told(wanted, folder, trainer):
    """`told:rank:place:epoch`: a rank that knows that a step is committed dies; `deaf:...`: another goes on only then.

    If that is the root of the vote, it knows the result as well; any other rank does not.
    """
    all_or = CommitVote.all_or

    def all_or_or_die(vote, mine, on_child_notified):
        place, epoch = f"batch_end{trainer.fit_loop.epoch_loop.batch_idx}", str(trainer.current_epoch)
        for kind in ("deaf", "told"):
            mark = Path(folder, f"done-{kind}-{RANK}-{place}-{epoch}")
            is_barrier = on_child_notified is None
            if is_barrier or mark.exists() or f"{kind}:{RANK}:{place}:{epoch}" not in wanted:
                continue
            mark.touch()
            if kind == "told":
                all_or(vote, mine, on_child_notified)
                time.sleep(0.2)  # others go on
                os.kill(os.getpid(), signal.SIGKILL)
            result = all_or(vote, mine, on_child_notified) if vote._up is None else vote._send(vote._up, mine)
            until_s = time.monotonic() + 20
            while group_health.cause is None and time.monotonic() < until_s:
                time.sleep(0.01)
            if vote._up is not None:
                raise ConnectionResetError("a test did not let this rank hear the result")
            return result
        return all_or(vote, mine, on_child_notified)

    CommitVote.all_or = all_or_or_die


class Module(pl.LightningModule):
    def __init__(self, shares):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 8))
        self.mean, self.shared = MeanMetric(), Shared()
        self.shared.shares = lambda: shares.at("epoch_end", self.trainer)
        self.register_buffer("seen", torch.zeros(100, 100))  # too large for what is given to a buddy unless it changes

    def loss(self, batch):
        return (self.net(batch) - batch.flip(-1)).square().mean()

    def training_step(self, batch, index):
        batch.mul_(0.9)  # in place: who computes the step again has to have what it had
        loss = self.loss(batch)
        once = {"on_step": False, "on_epoch": True, "sync_dist": True}
        if index == 0:
            self.log("first", loss.detach() * 3, **once)
        self.mean(loss.detach())
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.shared(loss.detach())
        if index == 3:
            self.log("shared", self.shared, on_step=False, on_epoch=True)
        if index == 4:
            self.log("late", loss.detach() * 7, reduce_fx="sum", **once)
        self.log("train", loss, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, index):
        loss = self.loss(batch)
        if not self.trainer.sanity_checking:
            self.seen += 1
        self.log("val", loss if self.current_epoch < 2 else loss * 10, sync_dist=True)  # worse from then on

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def checksum(module):
    digest = hashlib.sha256()
    for parameter in module.parameters():
        digest.update(parameter.detach().to_local().cpu().numpy().tobytes())
    return digest.hexdigest()


class Place:
    """A trainer to `Faults` in a hand-written loop: each step is of epoch 0."""

    sanity_checking, current_epoch = False, 0


def run_kind(kinds, folder, text):
    """Run one of the functions of `kinds` with faults: its name and they are the words of `text`; write its result."""
    pl.seed_everything(0)
    kind, _, faults = text.partition(" ")
    result = kinds[kind](folder, faults)
    Path(folder, f"rank{RANK}.json").write_text(json.dumps(result))


def main(folder, text):
    """Run a fit of `FITS` with faults: its name and theirs are the words of `text`."""
    fit, *faults = text.split()
    pl.seed_everything(0)
    shares = Shares(faults)
    scripted = Faults(faults, folder)
    own = CountsOwn(shares, scripted)
    counts, stop = [CountsHooks(), CountsSteps()], EarlyStopping("val", patience=2)
    trainer = pl.Trainer(
        strategy=HyperPodStrategy(hybrid_shard_degree=2),
        accelerator=ACCELERATOR,
        devices=devices(4),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=1,
        callbacks=[
            *counts,
            own,
            Swaps(past_versions=fit == "early"),
            *([stop, GradientAccumulationScheduler({0: 1, 2: 2})] if fit == "early" else []),
            scripted,
            CheckpointlessRecovery(),
        ],
        **FITS[fit],
    )
    die_in_votes(faults, folder, trainer)
    die_when_told(faults, folder, trainer)
    if "only" in faults:
        die_as_the_only_one_that_knows(folder, trainer)
    module = Module(shares)
    train, val = (DataLoader(torch.randn(size, 8), batch_size=4) for size in (96, 32))
    trainer.fit(module, train, val)
    result = {
        "epoch": trainer.current_epoch,
        "step": trainer.global_step,
        "should_stop": trainer.should_stop,
        "calls": [each.calls for each in counts],
        "own": own.calls.tolist(),
        "seen": float(module.seen.sum()),
        "waited": stop.wait_count,
        "stopped": stop.stopped_epoch,
        "best": float(stop.best_score),
        "rate": trainer.optimizers[0].param_groups[0]["lr"],
        "scheduler": trainer.lr_scheduler_configs[0].scheduler.last_epoch,
        "parameters": checksum(module),
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
    }
    Path(folder, f"rank{RANK}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
