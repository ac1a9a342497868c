"""The Trainer of transformers, in a job that survives the loss of any process.

    hyperpodrun --nproc-per-node 2 examples/loops/hf_trainer.py

Two lines differ from a program without recovery: the import of `HyperPodTrainer`, and the name of the class.
`--resume` continues from the newest checkpoint of an earlier run.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from plain_torch import build_model
from torch.utils.data import Subset
from train_lm import prepare_data
from transformers import TrainerCallback, TrainingArguments

from hyperpod_plugins.data import TokenDataset
from hyperpod_plugins.transformers import HyperPodTrainer


class Tell(TrainerCallback):
    """An ordinary callback."""

    def on_log(self, args: TrainingArguments, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if state.is_world_process_zero:
            print(f"step {state.global_step}: {logs}", flush=True)


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The model shifts labels itself."""
    ids = torch.stack([sample["input_ids"] for sample in samples])
    return {"input_ids": ids, "labels": ids}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--sequence-length", type=int, default=64)
    parser.add_argument("--folder", type=Path, default=Path("runs/loops"))
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    train_path, val_path = prepare_data(options.folder)
    args = TrainingArguments(
        output_dir=str(options.folder / "hf"),
        max_steps=options.steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=2e-3,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=20,
        save_steps=20,
        save_total_limit=2,
        load_best_model_at_end=True,
        report_to=[],
        disable_tqdm=True,
        seed=1,
    )
    trainer = HyperPodTrainer(
        model=build_model(options.sequence_length),
        args=args,
        data_collator=collate,
        train_dataset=TokenDataset(train_path, options.sequence_length),
        eval_dataset=Subset(TokenDataset(val_path, options.sequence_length), range(16)),
        callbacks=[Tell()],
    )
    trainer.train(resume_from_checkpoint=options.resume)
    trainer.save_model(str(options.folder / "hf-model"))  # for `from_pretrained`


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
