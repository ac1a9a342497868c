"""What reproducible mode costs: a Trainer on two replicas with and without it.

    python benchmarks/reproducible.py --rounds 60

The same model and global batch of 8 samples. Where 1 or 2 replicas are allowed, a step is cut into as many
micro-batches as without it, and the ratio is the price of the fixed order. For up to 8 they are four times smaller.
"""

import os
import tempfile
import warnings
from collections.abc import Iterator

import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import harness, ranks, report
from benchmarks.recovery_jobs import workload
from hyperpod_plugins.data import write_tokens
from hyperpod_plugins.env import JobEnv
from hyperpod_plugins.lightning import ElasticTraining, HyperPodStrategy, TokenDataConfig, TokenDataModule

WORLD_SIZE, GLOBAL_BATCH, SAMPLES = 2, 8, 4096
WAYS = {
    "elastic": {},
    "reproducible, 1 or 2 replicas": {"reproducible": True, "max_replicas": 2},
    "reproducible, 1, 2, 4 or 8": {"reproducible": True, "max_replicas": 8, "replica_sizes": (1, 2, 4, 8)},
    "elastic again (control)": {},
}


class Module(pl.LightningModule):
    """The workload; each step begins when its turn does."""

    def __init__(self, turns: Iterator[int]) -> None:
        super().__init__()
        self.turns = turns
        self.model = workload.make_model()

    def on_train_batch_start(self, batch: dict[str, Tensor], batch_idx: int) -> int | None:
        if batch_idx % self.trainer.accumulate_grad_batches:
            return None
        return -1 if next(self.turns, None) is None else None  # -1 ends the epoch

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return workload.make_optimizer(self.model)


def train(turns: Iterator[int], tokens: str, options: dict[str, object]) -> None:
    """A Trainer that is told of an agent's store, which here the benchmark serves."""
    warnings.filterwarnings("ignore")
    job = JobEnv(store_host="127.0.0.1", store_port=int(os.environ["MASTER_PORT"]), run_id="reproducible")
    os.environ.update(job.to_environ())
    sizes = {"global_batch_size": GLOBAL_BATCH, "micro_batch_size": GLOBAL_BATCH // WORLD_SIZE}
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=HyperPodStrategy(hybrid_shard_degree=1),
        callbacks=[ElasticTraining(**sizes, **options)],  # pyright: ignore[reportArgumentType]
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    config = TokenDataConfig(sequence_length=workload.SEQUENCE)
    trainer.fit(Module(turns), datamodule=TokenDataModule(tokens, config=config))


def main() -> None:
    harness.leave_cleanly_on_sigterm()
    arguments = harness.argument_parser("Cost of ElasticTraining(reproducible=True).").parse_args()
    schedule = harness.Schedule.from_arguments(arguments, rounds=60, starts=10, steps=6)
    ranks.preload(["lightning.pytorch", "hyperpod_plugins.lightning"])
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        tokens = f"{folder}/ids"
        steps = np.random.default_rng(0).integers(3, 7, SAMPLES * workload.SEQUENCE + 1)
        ids = np.cumsum(steps) % workload.VOCABULARY
        write_tokens(tokens, [ids], vocab_size=workload.VOCABULARY, progress=False)
        contenders = [
            ranks.Contender(
                name=name, train=train, world_size=WORLD_SIZE, kwargs={"tokens": tokens, "options": options}
            )
            for name, options in WAYS.items()
        ]
        comparison = harness.compare("Two replicas", contenders, schedule)
    report.print_comparison(comparison)
    for run in comparison.runs[1:]:
        print(report.ratio_line(comparison, run, None))
    report.write_results("reproducible", [comparison], arguments.json, {})


if __name__ == "__main__":
    main()
