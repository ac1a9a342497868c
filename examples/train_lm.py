"""Train a small Llama on the Python standard library's own source, hybrid sharded and tensor parallel.

    python examples/train_lm.py                     # 4 processes on this machine, or one for each GPU
    torchrun --nproc-per-node 4 examples/train_lm.py
    hyperpodrun --nproc-per-node 4 examples/train_lm.py                                # survives the loss of any rank
    python examples/train_lm.py --tensor-parallel-degree 1 --hybrid-shard-degree 2     # 2 replicas of 2 shards

Nothing here is special to the strategy: an ordinary LightningModule around a model from transformers.
"""

import argparse
import json
import math
import sysconfig
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import lightning.pytorch as L
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from transformers import LlamaConfig, LlamaForCausalLM

from hyperpod_plugins.data import BatchSplit, TokenDataset, build_tokens
from hyperpod_plugins.env import WorkerEnv
from hyperpod_plugins.lightning import FaultInjection, HyperPodStrategy, TokenDataConfig, TokenDataModule
from hyperpod_plugins.recovery import TrainingState

VOCABULARY = 256  # bytes
PROMPT = "def "


class ByteLlama(L.LightningModule):
    """A Llama of a few million parameters that reads bytes."""

    def __init__(self, sequence_length: int, learning_rate: float, num_steps: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=256,
                intermediate_size=640,
                num_hidden_layers=3,
                num_attention_heads=8,
                num_key_value_heads=8,
                max_position_embeddings=sequence_length,
                use_cache=False,
            )
        )

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids).logits

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = self(batch["input_ids"])
        return torch.nn.functional.cross_entropy(logits.view(-1, VOCABULARY), batch["labels"].reshape(-1))

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], _: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True, sync_dist=True, batch_size=len(batch["labels"]))

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate, betas=(0.9, 0.95), fused=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, self.hparams.learning_rate, total_steps=self.hparams.num_steps, pct_start=0.1
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Progress(TQDMProgressBar):
    """Lightning's bar, with the job's throughput and the mesh beside the loss."""

    def __init__(self, tokens_per_step: int) -> None:
        super().__init__(refresh_rate=5)
        self._tokens_per_step = tokens_per_step

    def on_train_start(self, *args: L.Trainer | L.LightningModule) -> None:
        super().on_train_start(*args)
        self._began_s, self._began_at = time.perf_counter(), args[0].global_step

    def get_metrics(self, trainer: L.Trainer, module: L.LightningModule) -> dict[str, int | str | float]:
        num_tokens = (trainer.global_step - self._began_at) * self._tokens_per_step
        speed = round(num_tokens / (time.perf_counter() - self._began_s))
        mesh = "x".join(map(str, trainer.strategy.topology.shape))
        return {**super().get_metrics(trainer, module), "tokens/s": speed, "mesh": mesh}


def source_files() -> list[Path]:
    """The standard library's modules and packages, in an order that is the same everywhere."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
    return sorted(path for path in root.rglob("*.py") if not skipped & set(path.relative_to(root).parts))


def read_whole(files: list[Path]) -> Iterator[np.ndarray]:
    for path in files:
        yield np.frombuffer(path.read_bytes(), dtype=np.uint8)


def read_middles(files: list[Path], num_bytes: int = 256) -> Iterator[np.ndarray]:
    """A little of every file, so that a short validation sees many."""
    for path in files:
        text = path.read_bytes()
        yield np.frombuffer(text[len(text) // 2 :][:num_bytes], dtype=np.uint8)


def prepare_data(folder: Path) -> tuple[Path, Path]:
    """Write the two token files, once; processes that come later wait for the first."""
    files = source_files()
    val_files, train_files = files[::20], [path for index, path in enumerate(files) if index % 20]
    folder.mkdir(parents=True, exist_ok=True)
    train, val = folder / "train.tokens", folder / "val.tokens"
    build_tokens(train, lambda: read_whole(train_files), vocab_size=VOCABULARY)
    build_tokens(val, lambda: read_middles(val_files), vocab_size=VOCABULARY)
    return train, val


def unigram_entropy(dataset: TokenDataset) -> float:
    """Loss in nats of the best model that ignores context: what training has to beat."""
    counts = torch.zeros(VOCABULARY)
    for index in range(0, len(dataset), max(1, len(dataset) // 2000)):
        counts += torch.bincount(dataset[index]["input_ids"], minlength=VOCABULARY)
    share = counts[counts > 0] / counts.sum()
    return float(-(share * share.log()).sum())


@torch.no_grad()
def generate(module: ByteLlama, num_bytes: int = 100, temperature: float = 0.7) -> str:
    """Continue the prompt. Every rank runs the model and draws the same bytes."""
    generator = torch.Generator().manual_seed(0)
    text = torch.tensor([list(PROMPT.encode())], device=module.device)
    for _ in range(num_bytes):
        logits = module(text[:, -module.hparams.sequence_length :])[0, -1].float().cpu()
        drawn = torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator)
        text = torch.cat([text, drawn.view(1, 1).to(text.device)], dim=1)
    return bytes(text[0].tolist()).decode(errors="replace")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--global-batch-size", type=int, default=8, help="samples of one step, over all ranks")
    parser.add_argument("--micro-batch-size", type=int, default=4, help="samples of one rank in one forward pass")
    parser.add_argument("--sequence-length", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--hybrid-shard-degree", type=int, help="default: 2 where the ranks allow it")
    parser.add_argument("--tensor-parallel-degree", type=int, help="default: 2 where 4 divides the ranks")
    parser.add_argument("--precision", default="32-true", choices=["32-true", "bf16-mixed", "bf16-true"])
    parser.add_argument("--folder", type=Path, default=Path("runs/train_lm"), help="for token files and checkpoints")
    parser.add_argument("--resume", help="path of a checkpoint to go on from")
    parser.add_argument("--fault", help="under hyperpodrun: lose a rank, such as kill:rank=3,step=50,phase=backward")
    parser.add_argument(
        "--report", type=Path, help="write the final loss, what it has to beat, and each rank's checksum here"
    )
    return parser.parse_args()


def main() -> None:
    args = arguments()
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # Lightning 2.6 calls a deprecated function of torch 2.13
    L.seed_everything(1, verbose=False)
    train_path, val_path = prepare_data(args.folder)
    env = WorkerEnv.from_environ()
    num_devices = env.local_world_size if env.is_distributed else torch.cuda.device_count() or 4
    num_ranks = num_devices * env.num_nodes
    tensor_degree = args.tensor_parallel_degree or (2 if num_ranks % 4 == 0 else 1)
    data_ranks = num_ranks // tensor_degree
    global_batch_size = max(args.global_batch_size, data_ranks)
    micro_batch_size = min(args.micro_batch_size, global_batch_size // data_ranks)
    split = BatchSplit(
        global_batch_size=global_batch_size, micro_batch_size=micro_batch_size, data_world_size=data_ranks
    )
    half = max(1, args.steps // 2)
    trainer = L.Trainer(
        accelerator="cuda" if torch.cuda.device_count() >= num_devices else "cpu",
        devices=num_devices,
        strategy=HyperPodStrategy(
            hybrid_shard_degree=args.hybrid_shard_degree or (2 if data_ranks % 2 == 0 else 1),
            tensor_parallel_degree=tensor_degree,
        ),
        precision=args.precision,
        max_steps=args.steps,
        accumulate_grad_batches=split.num_micro_steps,
        gradient_clip_val=1.0,
        val_check_interval=half * split.num_micro_steps,  # counted in micro-batches
        check_val_every_n_epoch=None,
        limit_val_batches=8,
        num_sanity_val_steps=0,
        logger=False,
        callbacks=[
            Progress(global_batch_size * args.sequence_length),
            ModelCheckpoint(args.folder / "checkpoints", filename="{step}", every_n_train_steps=half),
            *([FaultInjection(args.fault)] if args.fault else []),
        ],
    )
    module = ByteLlama(args.sequence_length, args.learning_rate, args.steps)
    data = TokenDataModule(
        train_path,
        val_path,
        config=TokenDataConfig(
            sequence_length=args.sequence_length,
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
        ),
    )
    trainer.print(f"{sum(p.numel() for p in module.parameters()) / 1e6:.1f} million parameters on {num_ranks} ranks")
    trainer.fit(module, datamodule=data, ckpt_path=args.resume)

    val_loss = float(trainer.callback_metrics["val_loss"])
    unigram = unigram_entropy(TokenDataset(val_path, args.sequence_length))
    if args.report:
        checksums: list = [0] * num_ranks
        dist.all_gather_object(checksums, TrainingState(module, trainer.optimizers).checksum())
        if trainer.is_global_zero:
            report = {"val_loss": val_loss, "unigram_entropy": unigram, "checksums": checksums}
            args.report.write_text(json.dumps(report))
    text = generate(module)
    trainer.print(
        f"\nmesh: {trainer.strategy.topology}\n"
        f"validation loss {val_loss:.2f} nats a byte ({val_loss / math.log(2):.2f} bits); "
        f"a model that ignores context can reach {unigram:.2f}\n\n--- a sample ---\n{text}\n"
    )


if __name__ == "__main__":
    main()
