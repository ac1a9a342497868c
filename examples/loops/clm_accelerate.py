"""Train a causal language model with Accelerate, in a loop as its users write it. No recovery, no growing.

    accelerate launch --config_file $(hyperpod preset cpu-smoke) examples/loops/clm_accelerate.py

`clm_session.py` is the same program with the lines changed that let it survive the loss of any process.
"""

import argparse

import torch
from accelerate.utils import set_seed
from clm_data import build_datasets
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, default_data_collator, get_scheduler

from hyperpod_plugins.accelerate import HyperPodPlugin

CONFIG = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-train-steps", type=int, default=60)
    parser.add_argument("--eval-steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=4, help="of one process")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    args = parser.parse_args()

    plugin = HyperPodPlugin(hybrid_shard_degree=1)
    accelerator = plugin.accelerator()
    set_seed(1)
    train_set, eval_set = build_datasets(args.block_size)
    train_loader = DataLoader(
        train_set, shuffle=True, batch_size=args.batch_size, collate_fn=default_data_collator, drop_last=True
    )
    eval_loader = DataLoader(eval_set, batch_size=args.batch_size, collate_fn=default_data_collator)
    model = AutoModelForCausalLM.from_config(LlamaConfig(num_attention_heads=4, use_cache=False, **CONFIG))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    scheduler = get_scheduler("cosine", optimizer, 0, args.max_train_steps * accelerator.num_processes)
    model, optimizer, train_loader, scheduler = accelerator.prepare(model, optimizer, train_loader, scheduler)

    def evaluate() -> float:
        model.eval()
        losses = []
        for batch in accelerator.prepare_data_loader(eval_loader):
            with torch.no_grad():
                loss = model(**batch).loss
            losses.append(accelerator.gather_for_metrics(loss.repeat(args.batch_size)))
        model.train()
        return float(torch.cat(losses).mean())

    completed_steps = 0
    model.train()
    while completed_steps < args.max_train_steps:
        for batch in train_loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            completed_steps += 1
            if completed_steps % 10 == 0:
                accelerator.print(f"step {completed_steps}: loss {float(loss.detach()):.3f}", flush=True)
            if completed_steps % args.eval_steps == 0:
                accelerator.print(f"validation loss {evaluate():.3f}", flush=True)
            if completed_steps == args.max_train_steps:
                break


if __name__ == "__main__":
    main()
