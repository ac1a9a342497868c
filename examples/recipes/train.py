"""Train what a recipe says, with Lightning.

    hyperpodrun --nnodes=2:8 --nproc-per-node=8 --rdzv-endpoint=node0:29400 examples/recipes/train.py examples/recipes/llama3_8b.yaml
    python examples/recipes/train.py examples/recipes/mixtral_8x7b.yaml --smoke     # a small one, on 4 CPU ranks here
    python examples/recipes/train.py examples/recipes/llama3_70b.yaml --plan        # what a rank needs, and no training

Under `hyperpodrun` the job recovers in place and, where the recipe has an `elastic_policy`, grows and shrinks.
"""  # noqa: E501  commands stay on one line

import argparse
import json
import warnings
from pathlib import Path

import lightning.pytorch as L
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from memory_plan import GIB, plan_memory
from recipe import Recipe

from hyperpod_plugins.data import BatchSplit, write_tokens
from hyperpod_plugins.env import JobEnv, WorkerEnv
from hyperpod_plugins.lightning import (
    CheckpointlessRecovery,
    ElasticTraining,
    HyperPodStrategy,
    TokenDataConfig,
    TokenDataModule,
)
from hyperpod_plugins.memory import delayed_init


class CausalLM(L.LightningModule):
    """A language model of transformers."""

    def __init__(self, recipe: Recipe, *, with_weights: bool) -> None:
        super().__init__()
        self.recipe = recipe
        if with_weights:  # every rank reads them into its host memory; the strategy leaves each rank its shard
            self.model = recipe.build(with_weights=True)
        else:
            with delayed_init():
                self.model = recipe.build()
        self.first_loss: float | None = None

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        balances = self.recipe.training.balance_experts
        told = {"output_router_logits": True} if balances else {}
        output = self.model(input_ids=batch["input_ids"], **told)
        logits = output.logits.float().flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, batch["labels"].flatten())
        self.log("loss", loss.detach(), prog_bar=True, sync_dist=True)
        return loss + self.model.config.router_aux_loss_coef * output.aux_loss if balances else loss

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
    """Keeps the loss of every step, for the report."""

    def __init__(self) -> None:
        self.by_step: dict[int, float] = {}

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        self.by_step[trainer.global_step] = float(trainer.callback_metrics["loss"])


def counting_tokens(path: Path, *, vocab_size: int, sequence_length: int) -> Path:
    """A token file for the smoke run, in which each token is the one before plus one."""
    if not path.exists():
        starts = np.random.default_rng(0).integers(vocab_size, size=2000)
        rows = ((start + np.arange(sequence_length + 1)) % vocab_size for start in starts)
        write_tokens(path, (row.astype(np.uint8) for row in rows), vocab_size=vocab_size)
    return path


def bytes_held(module: L.LightningModule) -> dict[str, int]:
    """What this rank holds of the training state, to compare with the plan."""
    [optimizer] = module.trainer.optimizers
    states = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    local = [part.to_local() if hasattr(part, "to_local") else part for part in (*module.parameters(), *states)]
    sizes = [part.numel() * part.element_size() for part in local]
    num_parameters = len(list(module.parameters()))
    return {"parameters": sum(sizes[:num_parameters]), "optimizer": sum(sizes[num_parameters:])}


def show_plan(recipe: Recipe) -> None:
    with torch.device("meta"):
        model = recipe.build()
    plan = plan_memory(model, recipe)
    room = recipe.trainer.device_memory_gib
    print(
        f"{plan.num_parameters:,} parameters, {plan.num_trained:,} of them trained, on {recipe.topology}\n"
        f"GiB of each rank: {plan}, of {room:g} ({plan.total / GIB / room:.0%})"
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, help="a YAML file")
    parser.add_argument("--smoke", action="store_true", help="shrink the model, and train it on 4 CPU ranks")
    parser.add_argument("--plan", action="store_true", help="print the memory plan only")
    parser.add_argument("--steps", type=int, help="default: what the recipe says")
    parser.add_argument("--folder", type=Path, default=Path("runs/recipes"), help="for checkpoints and the smoke run")
    parser.add_argument("--resume", help="path of a checkpoint to go on from")
    parser.add_argument("--report", type=Path, help="write losses and bytes held here, as JSON")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # Lightning 2.6 calls a deprecated function of torch 2.13
    recipe = Recipe.read(args.recipe)
    env = WorkerEnv.from_environ()
    if args.smoke:
        recipe = recipe.smoke(env.world_size) if env.is_launched else recipe.smoke()
    if env.global_rank == 0:
        show_plan(recipe)
    if args.plan:
        return
    L.seed_everything(1, verbose=False)
    training, num_steps = recipe.training, args.steps or recipe.training.max_steps
    num_devices = env.local_world_size if env.is_launched else recipe.trainer.devices
    num_ranks = num_devices * env.num_nodes
    sizes = {
        "global_batch_size": training.train_batch_size,
        "micro_batch_size": training.micro_train_batch_size,
    }
    data_degree = recipe.config.topology(num_ranks).data_degree
    split = BatchSplit(**sizes, data_world_size=data_degree)
    is_elastic, losses = bool(recipe.elastic_policy) and JobEnv.from_environ() is not None, Losses()
    args.folder.mkdir(parents=True, exist_ok=True)
    trainer = L.Trainer(
        accelerator="cpu" if args.smoke else "auto",
        devices=num_devices,
        strategy=HyperPodStrategy(recipe.config),
        precision=recipe.trainer.precision,
        max_steps=num_steps,
        accumulate_grad_batches=split.micro_steps,
        gradient_clip_val=training.gradient_clip_val,
        logger=False,
        enable_progress_bar=not args.smoke,
        enable_model_summary=False,
        callbacks=[
            losses,
            ModelCheckpoint(args.folder / args.recipe.stem, every_n_train_steps=max(1, num_steps // 2), save_last=True),
            *([CheckpointlessRecovery(**recipe.recovery)] if recipe.recovery and JobEnv.from_environ() else []),
            *([ElasticTraining(policy=recipe.elastic_document)] if is_elastic else []),
        ],
    )
    train_path = Path(recipe.data["train"])
    if args.smoke:
        train_path = args.folder / f"smoke{env.global_rank}.tokens"
        counting_tokens(train_path, vocab_size=256, sequence_length=training.sequence_length)
    data = TokenDataModule(
        train_path,
        config=TokenDataConfig(sequence_length=training.sequence_length, **({} if is_elastic else sizes)),
    )
    module = CausalLM(recipe, with_weights=bool(recipe.pretrained) and not args.smoke)
    trainer.fit(module, datamodule=data, ckpt_path=args.resume)
    by_step = list(losses.by_step.values())
    if trainer.is_global_zero and args.report:
        plan = plan_memory(module.model, recipe) if False else None
        args.report.write_text(json.dumps({"losses": by_step, "held": bytes_held(module), "plan": plan}))
    trainer.print(f"loss {by_step[0]:.3f} -> {by_step[-1]:.3f} on {trainer.strategy.topology}")


if __name__ == "__main__":
    main()
