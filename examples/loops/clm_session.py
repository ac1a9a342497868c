"""Train a causal language model with Accelerate, in a loop that survives the loss of any process and changes its size.

    hyperpodrun --nproc-per-node 2 examples/loops/clm_session.py                                           # kill any
    hyperpodrun --nnodes=1:4 --nproc-per-node 1 --rdzv-endpoint=node0:29400 examples/loops/clm_session.py  # add nodes

`clm_accelerate.py` is the program that this one was: ten lines are new.
"""

import argparse

import torch
from accelerate.utils import set_seed
from clm_data import build_datasets
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, default_data_collator, get_scheduler

from hyperpod_plugins.accelerate import HyperPodPlugin
from hyperpod_plugins.session import Session

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
    session = Session(plugin.config, global_batch_size=16, elastic=True)
    accelerator = plugin.accelerator(session=session)
    set_seed(1)
    train_set, eval_set = build_datasets(args.block_size)
    train_loader = DataLoader(
        train_set, shuffle=True, batch_size=args.batch_size, collate_fn=default_data_collator, drop_last=True
    )
    eval_loader = DataLoader(eval_set, batch_size=args.batch_size, collate_fn=default_data_collator)
    model = AutoModelForCausalLM.from_config(LlamaConfig(num_attention_heads=4, use_cache=False, **CONFIG))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    scheduler = get_scheduler("cosine", optimizer, 0, args.max_train_steps)
    model, optimizer = accelerator.prepare(model, optimizer)
    session.train(model, optimizer.optimizer, scheduler, backward=accelerator.backward, max_grad_norm=1.0)

    def evaluate() -> float:
        model.eval()
        losses = []
        for batch in accelerator.prepare_data_loader(eval_loader):
            with torch.no_grad():
                loss = model(**batch).loss
            losses.append(accelerator.gather_for_metrics(loss.repeat(args.batch_size)))
        model.train()
        return float(torch.cat(losses).mean())

    model.train()
    for step in session.steps(train_loader, epochs=1000, max_steps=args.max_train_steps):
        with step:
            loss = step.run(lambda batch: model(**batch).loss)
            completed_steps = step.index + 1
            if completed_steps % 10 == 0:
                accelerator.print(f"step {completed_steps}: loss {float(loss.detach()):.3f}", flush=True)
            if completed_steps % args.eval_steps == 0:
                accelerator.print(f"validation loss {evaluate():.3f}", flush=True)


if __name__ == "__main__":
    main()
