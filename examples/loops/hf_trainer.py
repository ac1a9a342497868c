"""The Trainer of transformers, on a loop that survives the loss of any process.

    hyperpodrun --nproc-per-node 2 examples/loops/hf_trainer.py

A callback cannot do it: callbacks hear of a step when it has begun and when it has ended, and nothing that they are
called by can run it again. So `SessionTrainer` puts the loop of a session in the place of the Trainer's own. Arguments,
collator, loss, optimizer, scheduler, evaluation, logs and callbacks are the Trainer's.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from plain_torch import build_model
from torch.utils.data import DataLoader
from train_lm import prepare_data
from transformers import Trainer, TrainerCallback, TrainingArguments

from hyperpod_plugins.data import TokenDataset
from hyperpod_plugins.session import Session


class SessionTrainer(Trainer):
    """Trains by the steps of a session."""

    def __init__(self, session: Session, **options: Any) -> None:
        super().__init__(**options)
        self.session = session

    def train(self) -> None:
        args, session = self.args, self.session
        model = session.parallelize(self.model)
        self.create_optimizer_and_scheduler(num_training_steps=args.max_steps)
        session.train(model, self.optimizer, self.lr_scheduler, max_grad_norm=args.max_grad_norm)
        loader = DataLoader(
            self.train_dataset,
            batch_size=args.per_device_train_batch_size,
            shuffle=True,
            drop_last=True,
            collate_fn=self.data_collator,
        )
        self.state.compute_steps(args, args.max_steps)
        self.control = self.callback_handler.on_train_begin(args, self.state, self.control)
        for step in session.steps(loader, epochs=1_000_000, max_steps=args.max_steps):
            with step:
                model.train()
                self.control = self.callback_handler.on_step_begin(args, self.state, self.control)
                loss = step.run(lambda inputs: self.compute_loss(model, inputs))
                self.state.global_step, self.state.epoch = step.index + 1, float(step.epoch)
                self.control = self.callback_handler.on_step_end(args, self.state, self.control)
                if self.control.should_log:
                    self.log({"loss": float(loss), "learning_rate": self.lr_scheduler.get_last_lr()[0]})
                if self.control.should_evaluate:
                    self.evaluate()
                if self.control.should_save:
                    session.save(Path(args.output_dir, f"checkpoint-{self.state.global_step}"))
        self.control = self.callback_handler.on_train_end(args, self.state, self.control)


class Tell(TrainerCallback):
    """An ordinary callback."""

    def on_log(self, args: TrainingArguments, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if state.is_world_process_zero:
            print(f"step {state.global_step}: {logs}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--sequence-length", type=int, default=64)
    parser.add_argument("--folder", type=Path, default=Path("runs/loops"))
    options = parser.parse_args()
    session = Session(hybrid_shard_degree=1, global_batch_size=16, random_seed=1)  # first: it joins the job
    train_path, val_path = prepare_data(options.folder)
    torch.manual_seed(1)
    trainer = SessionTrainer(
        session,
        model=build_model(options.sequence_length),
        args=TrainingArguments(
            output_dir=str(options.folder / "hf"),
            max_steps=options.steps,
            per_device_train_batch_size=4,
            learning_rate=2e-3,
            logging_steps=10,
            eval_strategy="steps",
            eval_steps=20,
            save_steps=20,
            report_to=[],
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=TokenDataset(train_path, options.sequence_length),
        eval_dataset=torch.utils.data.Subset(TokenDataset(val_path, options.sequence_length), range(16)),
        callbacks=[Tell()],
    )
    trainer.train()


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
