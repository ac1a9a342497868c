"""What `test_loops_with_faults.py` runs: loops as people write them, over one optimizer, with state of many kinds."""

import json
import os
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "recovery"))

import numpy as np
import torch
import torch.distributed as dist
from faults import Faults, Transient
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hyperpod_plugins import RecoveryOptions
from hyperpod_plugins.elastic import JobStore
from hyperpod_plugins.env import JobEnv
from hyperpod_plugins.memory import offload
from hyperpod_plugins.memory.activation_plan import AutomaticPlan, DeviceSpeed
from hyperpod_plugins.parallel.checkpoint.dcp_storage import CheckedWriter
from hyperpod_plugins.recovery.entries import Entries
from hyperpod_plugins.recovery.local_state import LocalStates
from hyperpod_plugins.session import Session
from hyperpod_plugins.session import session as of_session

torch.set_num_threads(1)
faults = Faults()
OPTIMIZERS = []
OPTIONS = json.loads(os.environ.get("OPTIONS", "{}"))
OPTIONS_OF_SESSION = OPTIONS.pop("session", {})


class Total:
    """A sum over the samples of one rank."""

    def __init__(self):
        self.value = 0.0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


class History:
    """It keeps the list and the tensor that it is given, and changes both in place."""

    def __init__(self):
        self.values, self.sum = [], torch.zeros(1)

    def state_dict(self):
        return {"values": self.values, "sum": self.sum}

    def load_state_dict(self, state):
        self.values, self.sum = state["values"], state["sum"]


class Taught(nn.Module):
    """A net and its teacher, whose parameters no optimizer has, with buffers of two sizes and an attribute."""

    def __init__(self):
        super().__init__()
        self.net, self.teacher = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)
        self.register_buffer("small", torch.zeros(4))
        self.register_buffer("large", torch.zeros(100, 100))
        self.count = 0

    def forward(self, x):
        return self.net(x) + 0.1 * self.teacher(x)


def make(net=None, **options):
    session = Session(global_batch_size=8, **options)
    torch.manual_seed(0)
    if net is None:
        net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 8))
    else:
        net = net()
    net = session.parallelize(net)
    OPTIMIZERS[:] = [torch.optim.AdamW(net.parameters(), lr=1e-2)]
    session.train(net, *OPTIMIZERS)
    x = torch.randn(80, 8, generator=torch.Generator().manual_seed(1))
    return session, net, DataLoader(TensorDataset(x), batch_size=2)


def finish(session, net, **more):
    state = {name: each.detach().cpu() for name, each in net.named_buffers()}
    for name, each in net.named_parameters():
        state[name] = (each.to_local() if hasattr(each, "to_local") else each).detach().cpu()
    torch.save({"state": state, **more}, faults.folder / f"result-{session.rank}.pt")


def two_loops():
    """The second one goes on with the optimizer of the first, and without dropout from its fourth step on."""
    exchange = LocalStates.exchange

    def exchange_with_fault(self, step, **more):
        if step == 0:
            faults.at(f"entry {loop}", step)
        return exchange(self, step, **more)

    LocalStates.exchange = exchange_with_fault
    session, net, loader = make(hybrid_shard_degree=2, recovery=RecoveryOptions(**OPTIONS))
    total = Total()
    session.register_rank_local("total", total)
    for loop in range(2):
        for step in session.steps(loader, max_steps=5 * (loop + 1)):

            def loss_of(batch, loop=loop, at=step):
                faults.at(f"loop {loop}", at.index)
                total.value += float(batch[0].sum())
                return (net(batch[0]) - batch[0]).square().mean()

            with step:
                loss = step.run(loss_of)
                session.state["best"] = np.minimum(session.state.get("best", np.float64(9.0)), float(loss))
                if (loop, step.index) == (1, 3):
                    net[2].eval()
    finish(session, net, best=float(session.state["best"]), total=total.value)


def counts():
    """Its body changes everything that a body may change, before the step, after it and between collectives."""
    session, net, loader = make(hybrid_shard_degree=2, recovery=RecoveryOptions(**OPTIONS))
    total, average = Total(), Total()
    session.register_rank_local("total", total)
    session.register_rank_local("average", average)
    (optimizer,) = OPTIMIZERS
    state = session.state
    state.update(begun=0, ended=0, losses=[], mean=torch.zeros(8))
    for step in session.steps(loader, epochs=2):
        state["outside"] = state.get("outside", 0) + 1
        with step:

            def loss_of(batch, at=step):
                faults.at("compute", at.index)
                total.value += float(batch[0].sum())
                return (net(batch[0]) - batch[0]).square().mean()

            state["begun"] += 1
            total.value += step.index
            optimizer.param_groups[0]["lr"] *= 0.9 if state["begun"] % 3 else 1.2
            faults.at("begun", step.index)
            loss = step.run(loss_of)
            faults.at("committed", step.index)
            state["losses"].append(float(loss))
            state["mean"] += loss
            average.value = average.value * 0.9 + float(loss) * (session.rank + 1)
            net[1].running_mean.mul_(0.99)
            optimizer.param_groups[0]["weight_decay"] *= 1.01
            everyone = torch.ones(1)
            dist.all_reduce(everyone)
            faults.at("between", step.index)
            state["ended"] += int(everyone)
            average.value += 1
            dist.all_reduce(everyone)
    groups = [{key: each for key, each in group.items() if key != "params"} for group in optimizer.param_groups]
    finish(session, net, total=total.value, average=average.value, groups=groups, program=dict(state))


def one_sided():
    """A rank is interrupted in a body that the others have ended: they do not wait for what they communicate."""
    session, net, loader = make(hybrid_shard_degree=2, recovery=RecoveryOptions(**OPTIONS))
    total = Total()
    session.register_rank_local("total", total)
    session.state["values"] = []
    for step in session.steps(loader, max_steps=6):
        with step:

            def loss_of(batch, at=step):
                faults.at("compute", at.index)
                return (net(batch[0]) - batch[0]).square().mean()

            loss = step.run(loss_of)
            total.value += 1 + float(loss)
            faults.at("late", step.index)
            session.work = dist.all_reduce(torch.ones(1), async_op=True)
            if session.rank == 2:
                session.work.wait()
            total.value += float(loss) * (session.rank + 1)
            session.state["values"].append(float(loss))
    faults.at("ended", 0)
    finish(session, net, total=total.value, program=dict(session.state))


def writes():
    """Its body writes to parameters, buffers and attributes of the model, before the step and after it."""
    session, net, loader = make(Taught, hybrid_shard_degree=2, recovery=RecoveryOptions(**OPTIONS))
    before, after = History(), Total()
    session.register_rank_local("before", before)
    session.register_rank_local("after", after)
    session.state["counts"] = Counter()
    for step in session.steps(loader, epochs=2):
        with step:

            def loss_of(batch, at=step):
                before.values.append(float(batch[0].sum()))
                before.sum += batch[0].sum()
                faults.at("compute", at.index)
                faults.at("compute again", at.index)
                return (net(batch[0]) - batch[0]).square().mean()

            before.values.append(-1.0)
            before.sum.mul_(0.9)
            net.small += step.index
            net.large[0] += 1
            net.count += 1
            session.state["counts"]["begun"] += 1
            faults.at("begun", step.index)
            loss = step.run(loss_of)
            with torch.no_grad():
                for mine, other in zip(net.teacher.parameters(), net.net.parameters(), strict=True):
                    mine.lerp_(other, 0.1)
            net.large[1] += 1
            net.count += 1
            session.state["counts"]["ended"] += 1
            everyone = torch.ones(1)
            dist.all_reduce(everyone)
            faults.at("between", step.index)
            dist.all_reduce(everyone)
            after.value = after.value * 0.9 + float(loss) * (session.rank + 1)
            net.small.mul_(0.99)
    program = dict(session.state["counts"])
    finish(
        session, net, values=before.values, sum=float(before.sum), after=after.value, count=net.count, program=program
    )


def reads():
    """Its body computes with rank-local state that it writes before the step, in the step and after it."""
    session, net, loader = make(Taught, recovery=RecoveryOptions(**OPTIONS), **OPTIONS_OF_SESSION)
    total = Total()
    session.register_rank_local("total", total)
    for step in session.steps(loader, epochs=2):
        with step:
            net.count += 1
            net.small += net.small.sum() * 0.01 + step.index
            net.large[0] = net.large[0] * 0.9 + 1
            total.value = total.value * 0.9 + step.index
            factor = 1 + (net.count % 7 + float(net.small.mean()) + float(net.large.mean()) + total.value) / 1000

            def loss_of(batch, at=step, by=factor):
                total.value += float(batch[0].sum())
                net.count += 1
                faults.at("compute", at.index)
                return (net(batch[0]) * by - batch[0]).square().mean()

            faults.at("begun", step.index)
            loss = step.run(loss_of)
            total.value += float(loss) * (session.rank + 1) + factor
            net.count += 1
            net.small.mul_(0.9)
            net.large[1] += 1
            everyone = torch.ones(1)
            dist.all_reduce(everyone)
            faults.at("between", step.index)
            dist.all_reduce(everyone)
            net.small.add_(1.0)
    finish(session, net, total=total.value, count=net.count)


def compares():
    """Its body compares a parameter before and after the step."""
    session, net, loader = make(hybrid_shard_degree=2)
    session.state["moved"] = []
    for step in session.steps(loader, epochs=2):
        with step:
            before = net[0].bias.detach().to_local().clone()
            step.run(lambda batch: (net(batch[0]) - batch[0]).square().mean())
            moved = (net[0].bias.detach().to_local() - before).abs().sum()
            dist.all_reduce(moved)
            faults.at("between", step.index)
            dist.all_reduce(moved)
            session.state["moved"].append(float(moved))
    finish(session, net, program=dict(session.state))


def normalizes():
    """Its body computes with a parameter to which it also writes, before the step."""
    session, net, loader = make()
    for step in session.steps(loader):
        with step:
            with torch.no_grad():
                net[0].bias.mul_(0.99)
            by = float(net[0].bias.detach().to_local().norm())
            step.run(lambda batch, by=by: by * (net(batch[0]) - batch[0]).square().mean())
            print("has run a step")


def decays():
    """Its body writes to the parameters before the step, and to one of them after it, if that is asked for."""
    session, net, loader = make(hybrid_shard_degree=2, recovery=RecoveryOptions(snapshot_every_steps=2))
    for step in session.steps(loader, epochs=2):
        with step:

            def loss_of(batch, at=step):
                faults.at("compute", at.index)
                return (net(batch[0]) - batch[0]).square().mean()

            with torch.no_grad():
                for each in net.parameters():
                    each.mul_(0.99)
            faults.at("begun", step.index)
            step.run(loss_of)
            if OPTIONS.get("after"):
                with torch.no_grad():
                    net[0].weight.mul_(1.01)
            faults.at("late", step.index)
            session.work = dist.all_reduce(torch.ones(1), async_op=True)
            if session.rank == 2:
                session.work.wait()
    finish(session, net)


def evaluates():
    """Its body computes with the model, at first without gradients, and leaves the last forward without a backward."""
    session, net, loader = make(recovery=RecoveryOptions(snapshot_every_steps=2))
    session.state["found"] = []
    for step in session.steps(loader, epochs=2):
        with step:

            def loss_of(batch, at=step):
                faults.at("compute", at.index)
                return (net(batch[0]) - batch[0]).square().mean()

            step.run(loss_of)
            net.eval()
            with torch.no_grad():
                net(torch.ones(1, 8))
                net[0].weight.mul_(0.9)
            faults.at("between", step.index)
            session.state["found"].append(float(net(torch.ones(1, 8)).sum()))
            net.train()
    finish(session, net, program=dict(session.state))


def alone():
    """The first rank alone keeps a record, after the step."""
    session, net, loader = make(hybrid_shard_degree=2, recovery=RecoveryOptions(snapshot_every_steps=2))
    record = History()
    session.register_rank_local("record", record)
    for step in session.steps(loader, epochs=2):
        with step:

            def loss_of(batch, at=step):
                faults.at("compute", at.index)
                return (net(batch[0]) - batch[0]).square().mean()

            faults.at("begun", step.index)
            loss = step.run(loss_of)
            if session.rank == 0:
                record.values.append(float(loss))
    finish(session, net, values=record.values)


def made_ahead():
    """Both loops are made before the first one runs."""
    session, net, loader = make(hybrid_shard_degree=2)
    loops = [session.steps(loader, max_steps=5), session.steps(loader, max_steps=10)]
    for number, steps in enumerate(loops):
        for step in steps:

            def loss_of(batch, number=number, at=step):
                faults.at(f"loop {number}", at.index)
                return (net(batch[0]) - batch[0]).square().mean()

            with step:
                step.run(loss_of)
                dist.all_reduce(torch.ones(1))
                faults.at("between", step.index)
                dist.all_reduce(torch.ones(1))
    finish(session, net)


def leaves_late():
    """It leaves the loop in code after the step's block, which a fault in the step does not skip."""
    session, net, loader = make()
    for step in session.steps(loader, epochs=100):
        with step:

            def loss_of(batch, at=step):
                faults.at("leaves", at.index)
                return (net(batch[0]) - batch[0]).square().mean()

            step.run(loss_of)
        if step.index == 9:
            break
    finish(session, net)


def breaks():
    """It leaves the loop by `break`. If rank 1 is killed there, rank 0 leaves the loop once the replacement waits."""
    session, net, loader = make(checkpoint_folder=faults.folder)
    for step in session.steps(loader, epochs=100):
        with step:
            step.run(lambda batch: (net(batch[0]) - batch[0]).square().mean())
            if step.index == 2:
                session.save(faults.folder / "last")
            if step.index == 4:
                faults.at("break", step.index)
                if session.rank == 0:
                    await_replacement()
                break
    finish(session, net)


class Read(TensorDataset):
    """It may raise where a sample is read."""

    def __getitem__(self, index):
        faults.at("sample", index)
        return super().__getitem__(index)


def raises():
    """Exceptions anywhere but in `step.run`."""
    session, net, loader = make(hybrid_shard_degree=2, recovery=RecoveryOptions(**OPTIONS))
    total = Total()
    session.register_rank_local("total", total)
    session.state["losses"] = []
    for step in session.steps(DataLoader(Read(*loader.dataset.tensors), batch_size=2), epochs=2):
        faults.at("before", step.index)
        with step:

            def loss_of(batch):
                total.value += float(batch[0].sum())
                return (net(batch[0]) - batch[0]).square().mean()

            faults.at("begun", step.index)
            loss = step.run(loss_of)
            faults.at("committed", step.index)
            dist.all_reduce(loss)
            session.state["losses"].append(float(loss))
            faults.at("between", step.index)
        faults.at("after", step.index)
    finish(session, net, total=total.value, program=dict(session.state))


class TrainedEnough(Exception):
    pass


def catches():
    """It leaves the loop by exceptions that it catches: on all ranks at step 7, and where there is a fault."""
    session, net, loader = make(hybrid_shard_degree=1, recovery=RecoveryOptions(hang_timeout_s=2.0))
    try:
        for step in session.steps(loader, epochs=2):
            faults.at("before", step.index)
            with step:
                step.run(lambda batch: (net(batch[0]) - batch[0]).square().mean())
                faults.at("committed", step.index)
                if step.index == 7:
                    time.sleep(session.rank)
                    raise TrainedEnough
    except (TrainedEnough, Transient):
        print(f"rank {session.rank} catches it", flush=True)
    sums = torch.ones(1)
    dist.all_reduce(sums)  # it must not meet a collective of a rank that is still in the loop
    finish(session, net, sums=float(sums))


def ends():
    """Ranks may be killed while the state after the loop is written, when it is written, and when that is recorded."""

    def with_fault(point, call):
        def wrapped(*args, **kwargs):
            faults.at(point, 0)
            return call(*args, **kwargs)

        return wrapped

    CheckedWriter.write_data = with_fault("write", CheckedWriter.write_data)
    of_session.save_entry_values = with_fault("written", of_session.save_entry_values)
    Entries.record = with_fault("record", Entries.record)
    session, net, loader = make(hybrid_shard_degree=1, checkpoint_folder=faults.folder)
    for step in session.steps(loader, max_steps=4):
        with step:
            step.run(lambda batch: (net(batch[0]) - batch[0]).square().mean())
            faults.note(kind="step", index=step.index)
    finish(session, net, drawn=float(torch.rand(())))


def await_replacement():
    """Wait until a replacement of rank 1 sends heartbeats; returns at once without a fault, or after a restart."""
    job, deadline_s = JobEnv.from_environ(), time.monotonic() + 60.0
    if job.restart_count or os.environ["FAULTS"] == "[]":
        return
    store = JobStore.connect(job)
    while not any(each["incarnation"] for each in store.heartbeats([1]).values()):
        assert time.monotonic() < deadline_s, "no replacement came"
        time.sleep(0.01)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(32, 64), nn.Dropout(0.1), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(self.drop(torch.relu(self.up(x))))


def float8():
    """Matrix products in float8."""
    sys.path.append(str(Path(__file__).parents[1] / "stand_ins"))  # of Transformer Engine
    offload.MIN_BYTES = 1  # the model is tiny
    session = Session(global_batch_size=8, precision="bf16-mixed", **({"hybrid_shard_degree": 2} | OPTIONS))
    torch.manual_seed(0)
    net = session.parallelize(nn.Sequential(nn.Linear(16, 32), *(Block() for _ in range(3)), nn.Linear(32, 16)))
    session.train(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    x = torch.randn(80, 8, 16, generator=torch.Generator().manual_seed(1))  # 8 tokens each
    for step in session.steps(DataLoader(TensorDataset(x), batch_size=2)):
        with step:

            def loss_of(batch, at=step):
                faults.at("compute", at.index)
                return (net(batch[0]).float() - batch[0]).square().mean()

            loss = step.run(loss_of)
            faults.at("committed", step.index)
    finish(session, net, loss=float(loss))


class DeviceOfRank:
    """A device with room for one block on every second rank, and for all on the others."""

    def __init__(self):
        self.num_asked = 0

    def total(self):
        return 2000 if dist.get_rank() % 2 else 1 << 40

    def allocated(self):
        self.num_asked += 1
        return 1000 * self.num_asked  # asked before a block is computed again, and then

    def peak(self):
        return 0


def saving():
    """Offload, loss in chunks and MLPs in tiles."""
    import transformers  # takes seconds, which the other loops need not wait for

    offload.MIN_BYTES = 1
    if OPTIONS.get("activation_offload") == "auto":
        module = sys.modules["hyperpod_plugins.parallel.parallelize"]
        speed = DeviceSpeed(flops=1.0, bytes_per_s=1e-9)
        module.AutomaticPlan = partial(AutomaticPlan, measure=lambda: speed, memory=DeviceOfRank())
    session = Session(global_batch_size=8, loss_chunks=3, mlp_tiles=3, **({"activation_offload": True} | OPTIONS))
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, use_cache=False
    )
    net = session.parallelize(transformers.LlamaForCausalLM(config))
    session.train(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    x = torch.randint(64, (80, 16), generator=torch.Generator().manual_seed(1))
    for step in session.steps(DataLoader(TensorDataset(x), batch_size=2)):
        with step:

            def loss_of(batch, at=step):
                faults.at("compute", at.index)
                loss = net(input_ids=batch[0], labels=batch[0]).loss
                faults.at("computed", at.index)
                return loss

            loss = step.run(loss_of)
            faults.at("committed", step.index)
    finish(session, net, loss=float(loss))


def gan():
    """Two networks, whose optimizers and schedulers its function steps by hand, and random numbers in between."""
    exchange = LocalStates.exchange

    def exchange_with_fault(self, step, **more):
        faults.at("vote", step - 1)
        return exchange(self, step, **more)

    LocalStates.exchange = exchange_with_fault
    session = Session(global_batch_size=8, hybrid_shard_degree=2, recovery=RecoveryOptions(**OPTIONS))
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 8))
    nets = nn.ModuleDict({"maker": session.parallelize(maker), "judge": session.parallelize(Taught())})
    optimizers = [
        torch.optim.AdamW(nets["judge"].net.parameters(), lr=1e-2),
        torch.optim.SGD(nets["maker"].parameters(), lr=1e-2, momentum=0.9),
    ]
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 3, 0.9) for each in optimizers]
    session.train(nets, optimizers, schedulers, manual_optimization=True)
    x = torch.randn(80, 8, generator=torch.Generator().manual_seed(1))
    session.state["losses"] = []
    for step in session.steps(DataLoader(TensorDataset(x), batch_size=2), epochs=2):
        with step:

            def train(batch, at=step):
                (real,) = batch
                made = nets["maker"](torch.randn_like(real))
                of_judge, of_maker = optimizers
                of_judge.zero_grad()
                judged = (nets["judge"](real) - 1).square().mean() + nets["judge"](made.detach()).square().mean()
                judged.backward()
                faults.at("judge", at.index)
                of_judge.step()
                with torch.no_grad():
                    for each in nets["judge"].net.parameters():
                        each.clamp_(-0.3, 0.3)
                nets["judge"].small += 1
                nets["judge"].count += 1
                faults.at("maker", at.index)
                of_maker.zero_grad()
                fooled = (nets["judge"](made) - 1).square().mean()
                fooled.backward()
                of_maker.step()
                for scheduler in schedulers:
                    scheduler.step()
                faults.at("stepped", at.index)
                return {"judge": judged, "maker": fooled}

            faults.at("begun", step.index)
            means = step.run(train)
            faults.at("committed", step.index)
            session.state["losses"].append(float(means["judge"] + means["maker"]))
            with torch.no_grad():
                for mine, other in zip(nets["judge"].teacher.parameters(), nets["judge"].net.parameters(), strict=True):
                    mine.lerp_(other, 0.1)
            dist.all_reduce(torch.ones(1))
            faults.at("between", step.index)
    owned = [(optimizer.state, each) for optimizer in optimizers for each in optimizer.param_groups[0]["params"]]
    for number, (state, parameter) in enumerate(owned):
        for name, value in state[parameter].items():
            nets.register_buffer(f"state_{number}_{name}", (value.to_local() if hasattr(value, "to_local") else value))
    rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    finish(session, nets, count=nets["judge"].count, rates=rates, program=dict(session.state))


def beside():
    """Another sharded model, which no repair would reset."""
    session, _, loader = make()
    teacher = session.parallelize(nn.Linear(8, 8))
    for _ in session.steps(loader):
        raise AssertionError(teacher)


if __name__ == "__main__":
    globals()[os.environ["LOOP"]]()
