"""A loop in plain torch that validates and saves; run by `hyperpodrun`, with faults at chosen points."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parent.parent / "recovery"))
sys.path.append(str(Path(__file__).parent.parent / "stand_ins"))  # of Transformer Engine
from faults import Faults
from parallel.expert_models import OwnExperts

from hyperpod_plugins.elastic.membership.elastic_spec import ElasticPolicy
from hyperpod_plugins.elastic.scaling.lr_scaling import LRScalingRule
from hyperpod_plugins.env import JobEnv
from hyperpod_plugins.memory import offload
from hyperpod_plugins.parallel import SequenceContext, clip_grad_norm_
from hyperpod_plugins.recovery import RecoveryOptions
from hyperpod_plugins.session import Session

FLOAT8 = {  # options of the session
    "": {},
    "gathered": {"float8_recipe": "tensorwise", "float8_all_gather": True, "precision": "bf16-mixed"},
    "te": {"float8_recipe": "te-fp8", "te_scaling": {"amax_history_len": 256}, "precision": "bf16-mixed"},
}[os.environ.get("FLOAT8", "")]
TILES = {}  # and tensor parallelism, with which ranks have to agree about what they compute
if "TILES" in os.environ:
    offload.MIN_BYTES = 1  # the model is tiny
    TILES = {
        "tensor_parallel_degree": 2,
        "tensor_plan": {"layers.*.mlp.0": "colwise", "layers.*.mlp.2": "rowwise"},
        "activation_offload": True,
        "mlp_tiles": 2,
    }
IS_TE = FLOAT8.get("float8_recipe") == "te-fp8"
NUM_SAMPLES, WIDTH = int(os.environ.get("SAMPLES", "120")), 32 if FLOAT8 else 8
EXPERTS, CONTEXTS = "EXPERTS" in os.environ, "CONTEXTS" in os.environ
torch.set_num_threads(1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x):
        return x + self.mlp(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block() if TILES else nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.dropout = nn.Dropout(float(os.environ.get("DROPOUT", 0.0 if "REPLICAS" in os.environ else 0.25)))
        self.register_buffer("num_calls", torch.zeros(()))
        if "OWN" in os.environ:
            self.register_buffer("mean", torch.zeros(WIDTH))
        if EXPERTS:
            self.router, self.experts = nn.Linear(WIDTH, 4), OwnExperts(num_experts=4, width=WIDTH)

    def forward(self, x):
        if self.training:
            self.num_calls += 1
            if "OWN" in os.environ:  # of the samples of this rank, and used
                self.mean.lerp_(x.detach().mean(0), 0.2)
                x = x - self.mean
        if IS_TE:  # whose layers take multiples of 8 tokens
            x = torch.stack([x * (1 + token / 8) for token in range(8)], dim=1)
        for layer in self.layers:
            x = self.dropout(torch.relu(layer(x)))
        x = x.mean(1) if IS_TE else x
        if EXPERTS:
            weights, chosen = self.router(x).softmax(dim=1).topk(2, dim=1)
            x = x + self.experts(x, chosen, weights)
        return x


class SequenceNet(nn.Module):
    """Takes each number of a sample for a token of a sequence, which two ranks share; computes the loss itself."""

    uses_sequence_context = True

    def __init__(self):
        super().__init__()
        self.embed, self.output = nn.Linear(1, WIDTH), nn.Linear(WIDTH, 1, bias=False)
        self.attention = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("query", "key", "value")})
        self.register_buffer("num_calls", torch.zeros(()))
        self.router, self.experts = nn.Linear(WIDTH, 4), OwnExperts(num_experts=4, width=WIDTH)

    def forward(self, x):
        if self.training:
            self.num_calls += 1
        context = SequenceContext.of(self, length=WIDTH, num_heads=2)
        own = context.part(x)
        hidden = torch.tanh(self.embed(own[..., None]))
        heads = [layer(hidden).unflatten(2, (2, -1)).transpose(1, 2) for layer in self.attention.values()]
        hidden = hidden + context.attention(*heads).transpose(1, 2).flatten(2)
        tokens = hidden.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(dim=1).topk(2, dim=1)
        tokens = tokens + self.experts(tokens, chosen, weights)
        return context.mean((self.output(tokens)[:, 0] - own.flatten()).square().sum(), x.numel())


def loss_of(model, x):
    return model(x) if CONTEXTS else (model(x) - x).square().mean()


class Total:
    """Of the numbers of this rank's samples."""

    def __init__(self):
        self.value = 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def local(tensor):
    whole = tensor.detach()
    return (whole.to_local() if hasattr(whole, "to_local") else whole).clone()


def main():
    faults = Faults()
    job = JobEnv.from_environ()
    shards = int(os.environ.get("SHARDS", "2"))
    sizes = os.environ.get("REPLICAS")
    elastic = False
    if sizes:
        elastic = ElasticPolicy(max_replicas=int(sizes), scaling_timeout_s=0.0, faulty_scale_down_timeout_s=2.0)
    batch = {"global_batch_size": 12, "reproducible": "REPRODUCIBLE" in os.environ}
    if "PER_REPLICA" in os.environ:
        rule = LRScalingRule(
            scaling=os.environ.get("LR_SCALING", "linear"),
            reference_batch_size=int(os.environ.get("REFERENCE", "0")),
            warmup_samples=int(os.environ.get("WARMUP", "0")),
        )
        batch = {"samples_per_replica": int(os.environ["PER_REPLICA"]), "lr_scaling": rule}
    plan = {"tensor_plan": {"layers.0": "colwise", "layers.1": "rowwise"}} if "TENSOR_DEGREES" in os.environ else {}
    session = Session(
        hybrid_shard_degree=shards,
        **batch,
        **FLOAT8,
        **(plan | TILES),
        expert_parallel_degree=2 if EXPERTS else 1,
        context_parallel_degree=2 if CONTEXTS else 1,
        random_seed=5,
        elastic=elastic,
        shard_degrees=[int(each) for each in os.environ.get("SHARD_DEGREES", "").split()],
        tensor_degrees=[int(each) for each in os.environ.get("TENSOR_DEGREES", "").split()],
        recovery=RecoveryOptions(
            replacement_timeout_s=30.0,
            hang_timeout_s=3.0,
            verify=True,
            snapshot_every_steps=int(os.environ.get("SNAPSHOTS", "0")),
        ),
        checkpoint_folder=faults.folder,
    )
    faults.note(kind="process", pid=os.getpid(), incarnation=0 if job is None else job.incarnation)
    torch.manual_seed(0)
    data = torch.randn(NUM_SAMPLES, WIDTH)
    model = session.parallelize(SequenceNet() if CONTEXTS else Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if os.environ.get("OPTIMIZER") == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    used = []  # learning rates of this process's steps
    optimizer.register_step_pre_hook(lambda optimizer, *_: used.append(optimizer.param_groups[0]["lr"]))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.9)
    max_norm, is_manual = float(os.environ.get("CLIP", "0.5")), "MANUAL" in os.environ
    session.train(
        model, optimizer, scheduler, max_grad_norm=0.0 if is_manual else max_norm, manual_optimization=is_manual
    )
    total = Total()
    if "OWN" in os.environ:
        session.register_rank_local("total", total)
    in_body = None
    if "BODY_SCHEDULE" in os.environ:  # its factors depend on how many steps it has made
        in_body = torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda step: 1.0 - 0.1 / (step + 9))
        session.register_rank_local("in body", in_body)
    faults.at("setup", 0 if job is None else job.incarnation)
    name = session.agree(f"run-{os.getpid()}")
    session.state["best"] = 1e9

    def validate():
        model.eval()
        with torch.no_grad():
            loss = loss_of(model, data[:16])
        dist.all_reduce(loss)
        model.train()
        return float(loss) / session.world_size

    dataset = TensorDataset(data, torch.arange(NUM_SAMPLES))
    drop_last = not sizes or "REPRODUCIBLE" in os.environ
    loader = DataLoader(dataset, batch_size=12 if is_manual else 3, shuffle=True, drop_last=drop_last)
    num_steps = int(os.environ.get("STEPS", "0"))
    for step in session.steps(loader, epochs=1000 if sizes or num_steps else 3, max_steps=num_steps):
        with step:
            seen = []

            def compute_loss(batch, seen=seen, step=step):
                x, ids = batch
                faults.at("forward", step.index)
                seen.extend(ids.tolist())
                total.value += int(ids.sum())
                loss = loss_of(model, x)
                faults.at("backward", step.index)
                return {"loss": loss, "size": float(x.abs().mean())}

            def train_manually(batch, compute_loss=compute_loss):
                means = compute_loss(batch)
                optimizer.zero_grad()
                means["loss"].backward()
                clip_grad_norm_(model.parameters(), max_norm)
                optimizer.step()
                scheduler.step()
                return means

            means = step.run(train_manually if is_manual else compute_loss)
            faults.at("committed", step.index)
            if in_body is not None:
                in_body.step()
            is_gone = step.is_replay and "PER_REPLICA" in os.environ  # if the batch has become another one
            faults.note(
                kind="again" if step.is_replay else "step",
                pid=os.getpid(),
                step=step.index,
                rank=session.rank,
                size=session.world_size,
                shards=session.topology.shard_degree,
                tensors=session.topology.tensor_degree,
                at_s=time.time(),
                ids=[] if is_gone else [i for _, ids in step.batches for i in ids.tolist()],
                num_samples=step.num_samples,
                loss=float(means["loss"]).hex(),
                lr=optimizer.param_groups[0]["lr"],
                used=used[-1] if used else None,
            )
            if step.index % 5 == 4:
                faults.at("validate", step.index)
                loss = validate()
                faults.at("validated", step.index)
                session.state["best"] = min(session.state["best"], loss)
                faults.note(kind="validation", step=step.index, loss=loss.hex())
            if step.ends_epoch and os.environ.get("SAVE"):
                session.save(faults.folder / f"saved-{step.index}")
                faults.at("saved", step.index)
            if sizes and not num_steps:
                time.sleep(0.03)
        if (faults.folder / "stop").exists() and step.index + 1 == int((faults.folder / "stop").read_text()):
            break
    state = {name: local(value) for name, value in [*model.named_parameters(), *model.named_buffers()]}
    for number, values in enumerate(optimizer.state.values()):
        state |= {f"{number}.{key}": local(value) for key, value in values.items()}
    result = {
        "state": state,
        "lr": optimizer.param_groups[0]["lr"],
        "lr_factor": session.lr_factor,
        "schedule_step": session.schedule_step,
        "best": session.state["best"],
        "total": total.value,
        "name": name,
        "repairs": [str(repair) for repair in session.repairs],
        "replicas": session.topology.replicate_degree,
    }
    torch.save(result, faults.folder / f"result-{session.rank}.pt")


if __name__ == "__main__":
    main()
