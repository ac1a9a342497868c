"""Training of which `SPLIT` says what is split over two ranks each, with dropout: a loop, or a fit (`FIT`).

Sequences (`context`), experts, or both; with `tensor`, matrices as well, over two ranks of four: there is one replica,
and snapshots. `ON_HOST` is an option that has the optimizer step in host memory, and `COMM` how attention
communicates.

`hyperpodrun` runs it, with faults at chosen points.
"""

import os
from pathlib import Path

import torch
from faults import ACCELERATOR, Faults, devices
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from hyperpod_plugins.recovery import RecoveryOptions
from hyperpod_plugins.session import Session

VOCABULARY, SEQUENCE = 62, 20
torch.set_num_threads(1)


def make_model():
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": int(os.environ.get("KEY_HEADS", "4")),
        "attention_dropout": 0.0 if "COMM" in os.environ else 0.2,
        "use_cache": False,
    }
    if EXPERTS:
        return MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=4))
    return LlamaForCausalLM(LlamaConfig(**sizes))


SPLIT = os.environ.get("SPLIT", "context").split()
EXPERTS = "expert" in SPLIT
OPTIONS = {"hybrid_shard_degree": 2} | {f"{each}_parallel_degree": 2 for each in SPLIT}
OPTIONS |= {"context_comm_type": os.environ["COMM"]} if "COMM" in os.environ else {}
OPTIONS |= {os.environ["ON_HOST"]: True} if "ON_HOST" in os.environ else {}
RECOVERY = {"replacement_timeout_s": 30.0, "hang_timeout_s": 5.0, "verify": True}
RECOVERY |= {"snapshot_every_steps": 1} if "tensor" in SPLIT else {}


def data():
    return list(torch.randint(VOCABULARY, (48, SEQUENCE), generator=torch.Generator().manual_seed(1)))


def compute_loss(model, batch, faults, step):
    faults.at("forward", step)
    loss = model(input_ids=batch, labels=batch).loss
    faults.at("backward", step)
    return loss


def watch_layer(model, faults, step_of):
    layer = model.model.layers[1]
    watched = layer.mlp.gate if EXPERTS else layer  # the others wait for tokens
    watched.register_forward_hook(lambda *_: faults.at("layer", step_of()))


def train(faults):
    session = Session(
        **OPTIONS,
        global_batch_size=4,
        recovery=RecoveryOptions(**RECOVERY),
        checkpoint_folder=faults.folder,
    )
    model = session.parallelize(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session.train(model, optimizer, max_grad_norm=0.5)
    present = [0]
    watch_layer(model, faults, lambda: present[0])
    for step in session.steps(DataLoader(data(), batch_size=2, shuffle=True)):
        with step:
            present[0] = step.index
            loss = step.run(lambda batch, step=step: compute_loss(model, batch, faults, step.index))
            faults.note(kind="step", step=step.index, loss=float(loss).hex())
    return model, session.rank


def fit(faults):
    import lightning.pytorch as pl

    from hyperpod_plugins.lightning import CheckpointlessRecovery, HyperPodStrategy

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = make_model()

        def training_step(self, batch, _):
            loss = compute_loss(self.model, batch, faults, self.global_step)
            faults.note(kind="step", step=self.global_step, loss=float(loss.detach()).hex())
            return loss

        def validation_step(self, batch, _):
            faults.at("validation", self.global_step)
            self.log("val", self.model(input_ids=batch, labels=batch).loss, sync_dist=True)

        def configure_optimizers(self):  # the model is split by now
            watch_layer(self.model, faults, lambda: self.global_step if self.trainer.training else -1)
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    trainer = pl.Trainer(
        strategy=HyperPodStrategy(**OPTIONS),
        accelerator=ACCELERATOR,
        devices=devices(4),
        max_epochs=1,
        gradient_clip_val=0.5,
        val_check_interval=4,
        default_root_dir=faults.folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[CheckpointlessRecovery(replacement_timeout_s=30.0, hang_timeout_s=5.0, verify=True)],
    )
    module = Module()
    trainer.fit(module, DataLoader(data(), batch_size=2, shuffle=True), DataLoader(data()[:8], batch_size=2))
    return module.model, trainer.global_rank


def main():
    faults = Faults()
    model, rank = (fit if "FIT" in os.environ else train)(faults)
    values = {name: each.to_local().detach().clone() for name, each in model.named_parameters()}
    torch.save({"state": values}, Path(faults.folder, f"result-{rank}.pt"))


if __name__ == "__main__":
    main()
