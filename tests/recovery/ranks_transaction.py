"""Steps as transactions without Lightning: plain torch, FSDP2 through `parallelize`; run by `hyperpodrun`."""

import io
import os
import sys

import torch
import torch.distributed as dist
from faults import DEVICE, Faults, own_device
from torch import nn

from hyperpod_plugins.comm import group_health
from hyperpod_plugins.elastic.membership.quorum_policy import QuorumPolicy
from hyperpod_plugins.elastic.store.world import WorldPlan
from hyperpod_plugins.env import JobEnv, WorkerEnv
from hyperpod_plugins.parallel import ParallelConfig, build_mesh, clip_grad_norm_, parallelize
from hyperpod_plugins.parallel.hsdp import local_part
from hyperpod_plugins.parallel.unit_watch import reconcile_gradients
from hyperpod_plugins.recovery import (
    HangPolicy,
    Member,
    RetryPolicy,
    StepTransaction,
    TrainingState,
    seed_micro_step,
)
from hyperpod_plugins.recovery.undo import end_iteration

NUM_STEPS, WIDTH, BATCH = 24, 8, 3
torch.set_num_threads(1)
faults = Faults()


class SmallLoop:
    """A model, an optimizer and a scheduler."""

    can_undo_exceptions = can_undo = True

    def __init__(self, state, scheduler):
        self.state, self.scheduler = state, scheduler

    def begin(self, step):
        self.buffers = [(b, b.detach().clone()) for b in self.state.model.buffers()]

    def undo_step(self):
        for optimizer in self.state.optimizers:
            optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for buffer, saved in self.buffers:
                buffer.copy_(saved)

    def share_rank_local_state(self, step):
        return False

    def note_equal_local_state(self, step, *, is_equal):
        pass

    def end_iteration(self):
        end_iteration(self.state.model)

    def capture_state(self):
        buffer = io.BytesIO()
        (optimizer,) = self.state.optimizers
        torch.save({"scheduler": self.scheduler.state_dict(), "lr": optimizer.param_groups[0]["lr"]}, buffer)
        return buffer.getvalue()

    capture_own_state = capture_state
    local_steps, rank_local_states, equal_local_step = None, None, -1
    pending_saves = ()

    def load(self, description):
        """As a joiner; the learning rate of the rank that sends tensors may be one step behind the scheduler."""
        self.described = torch.load(io.BytesIO(description), weights_only=True)
        self.scheduler.load_state_dict(self.described["scheduler"])

    def restore(self, plan, rank):
        for target, source in sorted(plan.senders.items()):
            if rank == source:
                faults.at("send", plan.step)
                self.state.send(target)
            elif rank == target:
                faults.at("receive", plan.step)
                self.state.receive(source)
                self.state.optimizers[0].param_groups[0]["lr"] = self.described["lr"]
        faults.at("restored", plan.step)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.dropout = nn.Dropout(0.25)
        self.register_buffer("num_calls", torch.zeros(()))
        self.teacher = nn.Parameter(torch.zeros(WIDTH, WIDTH), requires_grad=False)

    def forward(self, x):
        self.num_calls += 1
        for layer in self.layers:
            x = self.dropout(torch.relu(layer(x)))
        return x


def local(tensor):
    whole = tensor.detach()
    return (whole.to_local() if hasattr(whole, "to_local") else whole).clone().cpu()


def main():
    env, job = WorkerEnv.from_environ(), JobEnv.from_environ()
    faults.note(kind="process", pid=os.getpid(), incarnation=job.incarnation)
    member = Member(
        job,
        worker_id=env.global_rank,
        world=WorldPlan.initial(env.world_size),
        policy=QuorumPolicy(replacement_timeout_s=30.0),
        hangs=HangPolicy(floor_s=3.0),
    )
    member.start()
    device = own_device(env.local_rank)
    dist.init_process_group("hyperpod")
    config = ParallelConfig(hybrid_shard_degree=2)
    topology = config.topology(env.world_size)
    torch.manual_seed(0)
    model = Net()
    parallelize(model, build_mesh(topology, DEVICE), config)
    faults.at("setup", job.incarnation)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    repairs = []
    loop = SmallLoop(TrainingState(model, [optimizer], verify=True), scheduler)
    transaction = StepTransaction(
        member,
        loop,
        topology,
        policy=RetryPolicy(),
        device=device,
        on_repair=repairs.append,
    )
    if job.is_joining:
        loop.load(member.wait_for_stops().trainer)
    member.job_store.arm()
    attempts = 0
    while True:
        transaction.begin()
        step = transaction.step
        if step == NUM_STEPS:
            break

        def compute(step=step):
            nonlocal attempts
            attempts += 1
            seed_micro_step(5, step, 0, topology.data_rank(env.global_rank))
            faults.at("forward", step)
            data = torch.randn(BATCH, WIDTH, device=device)
            loss = (model(data) - data).square().mean()
            loss.backward()
            faults.at("backward", step)
            reconcile_gradients(model)  # a commit must not communicate
            clip_grad_norm_(model.parameters(), 0.5)
            faults.at("clip", step)
            return loss.detach()

        def commit(loss, step=step):
            faults.at("optimizer", step)
            optimizer.step()
            optimizer.zero_grad()
            return float(loss)

        loss = transaction.run(compute, commit)
        faults.at("committed", step)
        with torch.no_grad():  # what a callback does at the end of a batch
            local_part(model.teacher).lerp_(local_part(model.layers[0].weight), 0.5)
        faults.note(kind="loss", step=step, loss=loss.hex(), lr=optimizer.param_groups[0]["lr"])
        scheduler.step()
    assert group_health.cause is None
    state = {name: local(value) for name, value in [*model.named_parameters(), *model.named_buffers()]}
    for number, values in enumerate(optimizer.state.values()):
        state |= {f"{number}.{key}": local(value) for key, value in values.items()}
    result = {
        "state": state,
        "lr": optimizer.param_groups[0]["lr"],
        "repairs": [str(repair) for repair in repairs],
        "attempts": attempts,
    }
    torch.save(result, faults.folder / f"result-{env.global_rank}.pt")
    dist.barrier()
    member.leave()
    dist.destroy_process_group()


def instrument():
    """Points inside the transaction."""
    vote = StepTransaction._vote

    def voting(self):
        faults.at("vote", self.step)
        vote(self)
        faults.at("voted", self.step)
        return group_health.cause is None and not group_health.is_unavailable

    StepTransaction._vote = voting


if __name__ == "__main__":
    instrument()
    sys.exit(main())
