"""What recovery costs while nothing fails: one Trainer with recovery on and off in turns, in paired rounds.

Processes of the same program differ by more than what is to be seen, so it is the same ones that train either way: for
a turn they forget that they can recover. What is left out so is a thread that sleeps, and says once a second where
its rank is. An ordinary run without recovery asks its ranks about SIGTERM once a second, and these do not.

The first steps of a process cost more, because they compare the bits of all parameters. They are the
warm-up, which is not measured: they weigh nothing in a run of thousands, and much in turns of a few hundred.
"""

# The benchmark switches off a part of the strategy that no user switches off in a run.
# pyright: reportPrivateUsage=false

import gc
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks import harness, ranks
from benchmarks.recovery_jobs import workload
from benchmarks.stats import rotated
from hyperpod_plugins.elastic.process import make_snapshot_folder
from hyperpod_plugins.env import SNAPSHOTS_VARIABLE, JobEnv
from hyperpod_plugins.lightning import CheckpointlessRecovery, HyperPodStrategy
from hyperpod_plugins.lightning.fit_recovery import FitRecovery
from hyperpod_plugins.lightning.recovery import NullRecovery

WORLD_SIZE = 2
LIMIT = 1.01
"""Goal: less than 1 % of a step of 100 ms."""


@dataclass(frozen=True, slots=True)
class Part:
    """One comparison."""

    title: str
    has_local_state: bool
    """Whether each step changes what a rank has of its own: a buffer and a logged mean."""
    samples: int
    """Of a rank and step: the cost is the same for each step, so its share depends on how long a step takes."""
    has_hook: bool = False
    """Whether the module has a hook that precedes the step, so that what it may write is copied as well."""


_CHANGES = "each step changes a buffer and a logged mean"
PARTS = (
    Part("Nothing fails", False, workload.BATCH),
    Part(f"Nothing fails, and {_CHANGES}", True, workload.BATCH),
    Part(f"Nothing fails, {_CHANGES}, and a hook precedes it", True, workload.BATCH, has_hook=True),
    Part(f"Nothing fails, {_CHANGES}, and has four times the samples", True, 4 * workload.BATCH),
)
OFF, ON, CONTROL = "recovery off", "recovery on", "recovery off again (control)"
MODES = (OFF, ON, CONTROL)


class Switch:
    """Switches a strategy's recovery off and on; no attribute of the module changes, as those are kept."""

    def attach(self, strategy: object) -> None:
        """Take over the recovery of a strategy whose fit starts."""
        assert isinstance(strategy, HyperPodStrategy)
        self.strategy, self.recovery = strategy, strategy._recovery
        assert isinstance(self.recovery.fit, FitRecovery)
        self.fit = self.recovery.fit
        self.when_fetched = strategy.precision_plugin.when_fetched

    def turn(self, *, is_on: bool) -> None:
        """Begin a turn; what one without recovery has changed would look like what a hook writes after a step."""
        local = self.fit.local
        if local._last is not None:
            local._last = local.state()
        self.strategy._recovery = self.recovery if is_on else NullRecovery()
        self.strategy.precision_plugin.when_fetched = self.when_fetched if is_on else _nothing


def _nothing() -> None:
    """Called when a batch was fetched."""


def in_turns(turns: Iterator[int], schedule: harness.Schedule) -> Callable[[pl.Trainer], None]:
    """Returns what has a trainer train a step in each turn; each batch is fetched when its turn begins.

    In a closure: attributes of the module would be those of the program, whose changes recovery looks for.
    """
    switch = Switch()

    def begin(trainer: pl.Trainer) -> None:
        switch.attach(trainer.strategy)
        loop = trainer.fit_loop.epoch_loop
        advance = loop.advance

        def take_turn(fetcher: Any) -> None:
            step = next(turns, None)
            switch.turn(is_on=step is None or is_on(step, schedule))
            if step is None:
                raise StopIteration  # ends the epoch
            advance(fetcher)

        loop.advance = take_turn
        gc.collect()
        gc.freeze()  # a collection of all that was imported takes a step's time, and falls into somebody's turn

    return begin


class Module(pl.LightningModule):
    """The workload."""

    def __init__(self, begin: Callable[[pl.Trainer], None], part: Part) -> None:
        super().__init__()
        self.begin, self.samples = begin, part.samples
        self.has_local_state = part.has_local_state
        self.model = workload.make_model()
        if self.has_local_state:
            self.register_buffer("mean_token", torch.zeros(workload.SEQUENCE + 1))

    def on_train_start(self) -> None:
        self.begin(self.trainer)

    def training_step(self, rows: Tensor, batch_idx: int) -> Tensor:
        loss = workload.loss_of(self.model, rows)
        if self.has_local_state:
            self.mean_token.lerp_(rows.float().mean(0), 0.1)
            self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return workload.make_optimizer(self.model)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return workload.make_loader(self.global_rank, WORLD_SIZE, self.samples)


class ModuleWithHook(Module):
    """With a hook that precedes each step."""

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        """Write nothing; recovery copies the state all the same."""


def is_on(step: int, schedule: harness.Schedule) -> bool:
    """Whether a step belongs to a turn with recovery; so do those for warm-up."""
    turn, _ = divmod(step - schedule.warmup - 1, schedule.lead_in + schedule.steps)
    return turn < 0 or order_of(turn // len(MODES))[turn % len(MODES)] == ON


def order_of(round_index: int) -> list[str]:
    """Modes in the order of a round's turns."""
    return rotated(MODES, round_index)


def train(turns: Iterator[int], schedule: harness.Schedule, folder: str, snapshots: str, part: Part) -> None:
    """A Trainer that is told of an agent's store, which here the benchmark serves; what it keeps goes with `folder`.

    Both replicas are on one node, so snapshots are taken, in the shared memory of the folder `snapshots`.
    """
    warnings.filterwarnings("ignore")
    job = JobEnv(store_host="127.0.0.1", store_port=int(os.environ["MASTER_PORT"]), run_id="overhead")
    os.environ.update(job.to_environ() | {SNAPSHOTS_VARIABLE: snapshots})
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=WORLD_SIZE,
        strategy=HyperPodStrategy(hybrid_shard_degree=1),
        callbacks=[CheckpointlessRecovery()],
        default_root_dir=folder,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    kind = ModuleWithHook if part.has_hook else Module
    trainer.fit(kind(in_turns(turns, schedule), part))


def compare(schedule: harness.Schedule, part: Part) -> harness.Comparison:
    """Recovery off, on, and off again, which shows the error of this machine."""
    ranks.preload(["lightning.pytorch", "hyperpod_plugins.lightning"])
    contender = ranks.Contender(name="recovery", train=train, world_size=WORLD_SIZE)
    runs = {mode: harness.Run(name=mode) for mode in MODES}
    for start_index, num_rounds in enumerate(schedule.rounds_per_start):
        with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
            kwargs = {"schedule": schedule, "folder": folder, "snapshots": make_snapshot_folder(), "part": part}
            with ranks.RankGroup(replace(contender, kwargs=kwargs), Path(folder)) as group:
                group.wait_ready(schedule.setup_timeout_s)
                group.take_turn(ranks.Order(lead_in=schedule.warmup, steps=1), schedule.turn_timeout_s)
                for round_index in range(num_rounds):
                    if round_index % 20 == 0:
                        harness.progress(
                            f"{part.title}: start {start_index + 1}, round {round_index + 1} of {num_rounds}"
                        )
                    for mode in order_of(round_index):
                        harness.record_turn(group, schedule, runs[mode])
                group.finish(schedule.turn_timeout_s)
    harness.progress("")
    return harness.Comparison(title=part.title, schedule=schedule, runs=list(runs.values()))
