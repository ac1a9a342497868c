"""Train the small Llama of `train_lm.py` in a job that grows and shrinks while it runs.

    hyperpodrun --nnodes=1:4 --nproc-per-node=1 --rdzv-endpoint=node0:29400 examples/train_elastic.py    # on each node
    sbatch examples/slurm/elastic.sbatch

Each rank is a replica. The samples of a step are the same whatever the number of nodes.
"""

import argparse
import json
import warnings
from pathlib import Path

import lightning.pytorch as L
from lightning.pytorch.callbacks import ModelCheckpoint
from train_lm import ByteLlama, prepare_data

from hyperpod_plugins.lightning import ElasticTraining, HyperPodStrategy, TokenDataConfig, TokenDataModule
from hyperpod_plugins.recovery import TrainingState


class Report(L.Callback):
    """A line every few steps: the loss, and how many replicas there are."""

    def __init__(self, every_n_steps: int) -> None:
        self._every_n_steps, self._told = every_n_steps, 0

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        step = trainer.global_step
        if trainer.is_global_zero and step != self._told and step % self._every_n_steps == 0:
            self._told = step
            loss = float(trainer.callback_metrics["loss"])
            print(f"step {step}: loss {loss:.3f} on {trainer.world_size} replicas", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--global-batch-size", type=int, default=16, help="samples of one step, over all ranks")
    parser.add_argument("--micro-batch-size", type=int, default=4, help="samples of one rank in one forward pass")
    parser.add_argument("--sequence-length", type=int, default=128)
    parser.add_argument("--report-every", type=int, default=10, help="steps from one line of output to the next")
    parser.add_argument("--reproducible", action="store_true", help="the same bits whatever the number of replicas")
    parser.add_argument("--digest", type=Path, help="write a checksum of parameters and optimizer state here")
    parser.add_argument("--folder", type=Path, default=Path("runs/train_elastic"), help="shared by all nodes")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # Lightning 2.6 calls a deprecated function of torch 2.13
    L.seed_everything(1, verbose=False)
    train_path, _ = prepare_data(args.folder)
    batches = {"global_batch_size": args.global_batch_size, "micro_batch_size": args.micro_batch_size}
    trainer = L.Trainer(
        strategy=HyperPodStrategy(hybrid_shard_degree=1),
        max_steps=args.steps,
        gradient_clip_val=1.0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            ElasticTraining(
                **batches, reproducible=args.reproducible, scaling_timeout_s=5.0, faulty_scale_down_timeout_s=10.0
            ),
            ModelCheckpoint(args.folder / "checkpoints", every_n_train_steps=100, save_last=True),
            Report(args.report_every),
        ],
    )
    data = TokenDataModule(train_path, config=TokenDataConfig(sequence_length=args.sequence_length, **batches))
    last = args.folder / "checkpoints" / "last.ckpt"
    module = ByteLlama(args.sequence_length, learning_rate=2e-3, num_steps=args.steps)
    trainer.fit(module, datamodule=data, ckpt_path=last if last.exists() else None)
    if args.digest and trainer.is_global_zero:
        args.digest.write_text(json.dumps(TrainingState(module, trainer.optimizers).checksum()))


if __name__ == "__main__":
    main()
