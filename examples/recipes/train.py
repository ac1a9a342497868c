"""Train what a recipe says, with Lightning.

    hyperpodrun --nnodes=2:8 --nproc-per-node=8 --rdzv-endpoint=node0:29400 examples/recipes/train.py examples/recipes/llama3_8b.yaml
    python examples/recipes/train.py examples/recipes/mixtral_8x7b.yaml --smoke     # a small one, on 4 CPU ranks here
    python examples/recipes/train.py examples/recipes/llama3_70b.yaml --plan        # what a rank needs, and no training

Under `hyperpodrun` the job recovers in place and, where the recipe has an `elastic_policy`, grows and shrinks.
"""  # noqa: E501  commands stay on one line

import argparse
import warnings
from collections.abc import Iterator
from pathlib import Path

import lightning.pytorch as L
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from recipe import Recipe

from hyperpod_plugins.data import BatchSplit, build_tokens
from hyperpod_plugins.delayed_init import delayed_init
from hyperpod_plugins.env import JobEnv, WorkerEnv
from hyperpod_plugins.lightning import (
    CheckpointlessRecovery,
    ElasticTraining,
    HyperPodStrategy,
    TokenDataConfig,
    TokenDataModule,
)
from hyperpod_plugins.planning import GIB


class CausalLM(L.LightningModule):
    """A language model of transformers."""

    def __init__(self, recipe: Recipe, *, with_weights: bool) -> None:
        super().__init__()
        self.recipe = recipe
        with delayed_init():  # weights are read when the strategy shards the model: each rank reads its own part
            self.model = recipe.build(with_weights=with_weights)

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        options = {"output_router_logits": True} if self.recipe.training.balance_experts else {}
        labels = batch["labels"].contiguous()  # shifted already
        # With labels the model computes the loss itself, in chunks where the recipe has loss_chunks.
        output = self.model(input_ids=batch["input_ids"], labels=labels, shift_labels=labels, **options)
        loss = output.loss
        if self.recipe.training.balance_experts:
            loss = loss - self.model.config.router_aux_loss_coef * output.aux_loss
        self.log("loss", loss.detach(), prog_bar=True)
        return output.loss

    def configure_optimizers(self) -> dict:
        training = self.recipe.training
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(
            trained, lr=training.learning_rate, betas=(0.9, 0.95), weight_decay=training.weight_decay
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / max(1, training.warmup_steps))
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Losses(L.Callback):
    """Keeps the loss of every step."""

    def __init__(self) -> None:
        self.by_step: dict[int, float] = {}

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        if trainer.global_step:  # 0 within the first step, where it has several micro-batches
            self.by_step[trainer.global_step] = float(trainer.callback_metrics["loss"])


def counting_tokens(path: Path, *, vocab_size: int, sequence_length: int) -> Path:
    """A token file for the smoke run, in which each token is the one before plus one; made by the first rank."""

    def rows() -> Iterator[np.ndarray]:
        starts = np.random.default_rng(0).integers(vocab_size, size=2000)
        return (((start + np.arange(sequence_length + 1)) % vocab_size).astype(np.uint8) for start in starts)

    path.parent.mkdir(parents=True, exist_ok=True)
    build_tokens(path, rows, vocab_size=vocab_size)
    return path


def bytes_held(module: L.LightningModule) -> dict[str, int]:
    """What this rank holds of the training state, to compare with the plan."""
    [optimizer] = module.trainer.optimizers
    states = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    local = [part.to_local() if hasattr(part, "to_local") else part for part in (*module.parameters(), *states)]
    sizes = [part.numel() * part.element_size() for part in local]
    num_parameters = len(list(module.parameters()))
    return {"parameters": sum(sizes[:num_parameters]), "optimizer": sum(sizes[num_parameters:])}


def fit(
    recipe: Recipe, train_path: Path, checkpoints: Path, *, num_steps: int, is_smoke: bool, resume: str | None = None
) -> tuple[CausalLM, list[float]]:
    """Train, on what this process was started for; the module and the losses that this rank has seen."""
    env, training = WorkerEnv.from_environ(), recipe.training
    has_agent = JobEnv.from_environ() is not None  # `hyperpodrun` has started us
    is_elastic = has_agent and bool(recipe.elastic_policy)
    num_devices = env.local_world_size if env.is_distributed else recipe.trainer.devices
    sizes = {"global_batch_size": training.train_batch_size, "micro_batch_size": training.micro_train_batch_size}
    topology = recipe.config.topology(num_devices * env.num_nodes)
    split = BatchSplit(**sizes, data_world_size=topology.data_degree)
    losses = Losses()
    trainer = L.Trainer(
        accelerator="cpu" if is_smoke else "auto",
        devices=num_devices,
        num_nodes=env.num_nodes,
        strategy=HyperPodStrategy(recipe.config),
        precision=recipe.trainer.precision,
        max_steps=num_steps,
        accumulate_grad_batches=split.num_micro_steps,
        gradient_clip_val=training.gradient_clip_val,
        logger=False,
        enable_progress_bar=not is_smoke,
        enable_model_summary=False,
        callbacks=[
            losses,
            ModelCheckpoint(checkpoints, every_n_train_steps=max(1, num_steps // 2), save_last=True),
            *([CheckpointlessRecovery(**recipe.recovery)] if has_agent else []),
            *([ElasticTraining(policy=recipe.elastic_document)] if is_elastic else []),
        ],
    )
    module = CausalLM(recipe, with_weights=bool(recipe.pretrained))
    data_config = TokenDataConfig(sequence_length=training.sequence_length, **({} if is_elastic else sizes))
    trainer.fit(module, datamodule=TokenDataModule(train_path, config=data_config), ckpt_path=resume)
    by_step = list(losses.by_step.values())
    trainer.print(f"loss {by_step[0]:.3f} -> {by_step[-1]:.3f} on {trainer.strategy.topology}")
    return module, by_step


def show_plan(recipe: Recipe) -> None:
    plan, room = recipe.plan(), recipe.trainer.device_memory_gib
    print(
        f"{plan.num_parameters:,} parameters, {plan.num_trained:,} of them trained, on {recipe.topology}\n"
        f"GiB of each rank: {plan}; the device has {room:g}, of which {plan.device / GIB / room:.0%} are used",
        flush=True,
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, help="a YAML file")
    parser.add_argument("--smoke", action="store_true", help="shrink the model, and train it on 4 CPU ranks")
    parser.add_argument("--plan", action="store_true", help="print the memory plan only")
    parser.add_argument("--steps", type=int, help="default: what the recipe says")
    parser.add_argument("--folder", type=Path, default=Path("runs/recipes"), help="for checkpoints and the smoke run")
    parser.add_argument("--resume", help="path of a checkpoint to go on from")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # Lightning 2.6 calls a deprecated function of torch 2.13
    recipe = Recipe.read(args.recipe)
    env = WorkerEnv.from_environ()
    if args.smoke:
        recipe = recipe.smoke(env.world_size) if env.is_distributed else recipe.smoke()
    if env.global_rank == 0:
        show_plan(recipe)
    if args.plan:
        return
    L.seed_everything(1, verbose=False)
    train_path = Path(recipe.data["train"])
    if args.smoke:
        length = recipe.training.sequence_length
        train_path = counting_tokens(args.folder / "smoke.tokens", vocab_size=256, sequence_length=length)
    num_steps = args.steps or recipe.training.max_steps
    checkpoints = args.folder / args.recipe.stem
    fit(recipe, train_path, checkpoints, num_steps=num_steps, is_smoke=args.smoke, resume=args.resume)


if __name__ == "__main__":
    main()
