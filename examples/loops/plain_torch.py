"""A loop in plain torch that survives the loss of any process and changes its size.

python examples/loops/plain_torch.py                                                      # one process
hyperpodrun --nproc-per-node 4 examples/loops/plain_torch.py                              # kill any of them
hyperpodrun --nnodes=1:4 --nproc-per-node 1 --rdzv-endpoint=node0:29400 examples/loops/plain_torch.py --max-replicas 4
"""

import argparse
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from hyperpod_plugins.data import TokenDataset
from hyperpod_plugins.elastic import ElasticPolicy
from hyperpod_plugins.session import Session

sys.path.insert(0, str(Path(__file__).parent.parent))
from train_lm import VOCABULARY, prepare_data


def build_model(sequence_length: int) -> torch.nn.Module:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=sequence_length,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--sequence-length", type=int, default=64)
    parser.add_argument("--hybrid-shard-degree", type=int, default=1)
    parser.add_argument("--max-replicas", type=int, default=0, help="let the job grow and shrink up to this size")
    parser.add_argument("--folder", type=Path, default=Path("runs/loops"))
    args = parser.parse_args()

    elastic = ElasticPolicy(max_replicas=args.max_replicas, scaling_timeout_s=5.0) if args.max_replicas else False
    session = Session(
        hybrid_shard_degree=args.hybrid_shard_degree, global_batch_size=16, elastic=elastic, random_seed=1
    )
    train_path, val_path = prepare_data(args.folder)
    loader = DataLoader(TokenDataset(train_path, args.sequence_length), batch_size=4, shuffle=True, drop_last=True)
    validation = next(iter(DataLoader(TokenDataset(val_path, args.sequence_length), batch_size=64)))

    torch.manual_seed(1)
    model = session.parallelize(build_model(args.sequence_length))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=args.steps + 1)
    session.train(model, optimizer, scheduler, max_grad_norm=1.0)

    def compute_loss(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = model(input_ids=batch["input_ids"]).logits
        return torch.nn.functional.cross_entropy(logits.view(-1, VOCABULARY), batch["labels"].reshape(-1))

    for step in session.steps(loader, epochs=1000, max_steps=args.steps):
        with step:
            loss = step.run(compute_loss)  # forward, backward, vote, optimizer, scheduler
            if session.rank == 0 and step.index % 10 == 0:
                print(f"step {step.index}: loss {float(loss):.3f} on {session.world_size} ranks", flush=True)
            if step.index % 50 == 49:  # after a fault in here it is repeated, on all ranks
                with torch.no_grad():
                    val_loss = float(compute_loss(validation))
                session.state["best"] = min(val_loss, session.state.get("best", val_loss))
                session.save(args.folder / "last")
    if session.rank == 0:
        print(f"best validation loss {session.state['best']:.3f}; {len(session.repairs)} repairs", flush=True)


if __name__ == "__main__":
    main()
