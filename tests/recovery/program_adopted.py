# ruff: noqa: E402 (warnings are off before the imports that would give them)
"""What `test_adopted.py` runs: a model that transformers has sharded while loading it, on any number of replicas."""

import os
import time
import warnings

warnings.filterwarnings("ignore")

import torch
from faults import Faults
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from hyperpod_plugins.elastic.membership.elastic_spec import ElasticPolicy
from hyperpod_plugins.recovery import RecoveryOptions
from hyperpod_plugins.session import Session

torch.set_num_threads(1)
faults = Faults()
TENSORS = 2


def load(session):
    """From files; sharded by transformers, but for `LOADING=plain`."""
    degrees = {"tp_size": TENSORS, "dp_replicate_size": session.world_size // TENSORS}
    options = {} if os.environ.get("LOADING") == "plain" else {"distributed_config": DistributedConfig(**degrees)}
    return AutoModelForCausalLM.from_pretrained(os.environ["PRETRAINED"], dtype="float32", **options)


def main():
    is_elastic = "ELASTIC" in os.environ
    policy = ElasticPolicy(max_replicas=2, scaling_timeout_s=0.0, faulty_scale_down_timeout_s=2.0)
    session = Session(
        {"hybrid_shard_degree": 1, "tensor_parallel_degree": TENSORS},
        global_batch_size=8,
        elastic=policy if is_elastic else False,
        recovery=RecoveryOptions(replacement_timeout_s=30.0, verify=True),
    )
    model = session.parallelize(load(session))
    session.train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), max_grad_norm=1.0)
    tokens = torch.randint(32, (64, 8), generator=torch.Generator().manual_seed(0)).to(session.device)
    dataset = torch.utils.data.TensorDataset(tokens, torch.arange(len(tokens)))
    loader = torch.utils.data.DataLoader(dataset, batch_size=2)

    def loss_of(batch):
        loss = model(input_ids=batch[0], labels=batch[0]).loss
        faults.at("forward", step.index)
        return loss

    stop, num_steps = faults.folder / "stop", int(os.environ.get("STEPS", "0"))
    for step in session.steps(loader, epochs=1000 if is_elastic or num_steps else 1, max_steps=num_steps):
        with step:
            loss = float(step.run(loss_of))
            faults.note(
                kind="again" if step.is_replay else "step",
                pid=os.getpid(),
                step=step.index,
                rank=session.rank,
                size=session.world_size,
                at_s=time.time(),
                ids=[i for _, ids in step.batches for i in ids.tolist()],
                loss=loss.hex(),
            )
            if is_elastic:
                time.sleep(0.03)
        if stop.exists() and step.index + 1 == int(stop.read_text()):
            break
    state = {name: each.detach().to_local().cpu() for name, each in model.named_parameters()}
    state |= {name: each.cpu() for name, each in model.named_buffers()}
    torch.save(
        {"state": state, "last": loss, "repairs": len(session.repairs)}, faults.folder / f"result-{faults.rank}.pt"
    )


if __name__ == "__main__":
    main()
