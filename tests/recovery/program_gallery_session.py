"""Loops of many kinds over a `Session`, as people write them; `gallery.py` rehearses each.

python -m hyperpod_plugins.cli rehearse tests/recovery/program_gallery_session.py language_model FOLDER
"""

import copy
import random
import sys
from pathlib import Path

import numpy as np
import torch
from gallery_parts import Augmented, Network, generator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler
from torchmetrics.classification import MulticlassAccuracy
from tqdm.auto import tqdm

from hyperpod_plugins.parallel import clip_grad_norm_
from hyperpod_plugins.session import Session

torch.set_num_threads(1)
BATCH, GLOBAL_BATCH, VOCABULARY = 4, 8, 32
FOLDER = Path(sys.argv[-1])


class Stream(IterableDataset):
    def __iter__(self):
        yield from TensorDataset(*Augmented().x.split(1))


class LanguageModel(nn.Module):
    """A transformer of one layer, whose head has the weights of its embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)])
        self.head = nn.Linear(16, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return self.head(hidden)


def sentences(size):
    return TensorDataset(torch.randint(0, VOCABULARY, (size, 12), generator=generator(size)))


def shuffled(dataset=None, **options):
    return DataLoader(dataset or Augmented(40), BATCH, shuffle=True, **options)


def held_out():
    return DataLoader(Augmented(12), BATCH)


def make(model=None, **options):
    options = {"global_batch_size": GLOBAL_BATCH, "random_seed": 5, "checkpoint_folder": FOLDER, **options}
    session = Session(hybrid_shard_degree=1, **options)
    torch.manual_seed(0)
    model = session.parallelize(model() if model else Network())
    return session, model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def loss_of(model, **options):
    return lambda batch: F.cross_entropy(model(batch[0]), batch[1], **options)


@torch.no_grad()
def validate(session, model, loss_of_batch, loader):
    """The mean loss over the samples of all ranks, each of which reads every other batch."""
    model.eval()
    total = torch.zeros(2)
    for index, batch in enumerate(loader):
        if index % session.world_size == session.rank:
            total += torch.stack([loss_of_batch(batch) * len(batch[0]), torch.tensor(float(len(batch[0])))])
        else:  # a sharded model communicates: all ranks call it equally often
            model(batch[0])
    torch.distributed.all_reduce(total)
    model.train()
    return float(total[0] / total[1])


def language_model(**options):
    """Accumulation, tied weights, clipping, a cosine schedule; samples, a best loss and checkpoints in between."""
    session, model, optimizer = make(LanguageModel, global_batch_size=16, **options)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    session.train(model, optimizer, schedule, max_grad_norm=1.0)

    def loss_of_batch(batch):
        logits = model(batch[0][:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[0][:, 1:].flatten(), label_smoothing=0.1)

    progress = tqdm(total=100, disable=session.rank != 0)
    for step in session.steps(shuffled(sentences(64)), epochs=20):
        with step:
            loss = step.run(loss_of_batch)
            progress.update()
            progress.set_postfix(loss=float(loss))
            if step.index % 3 == 2:
                held = validate(session, model, loss_of_batch, DataLoader(sentences(12), BATCH))
                if held < session.state.get("best", float("inf")):
                    session.state["best"] = held
                    session.save(FOLDER / "best")
            if step.index % 4 == 3:
                ids = torch.zeros(1, 4, dtype=torch.long)
                with torch.no_grad():
                    for _ in range(3):
                        ids = torch.cat([ids, torch.multinomial(model(ids)[:, -1].softmax(-1), 1)], 1)
                progress.write(f"step {step.index}: {ids.tolist()}")


def parameters_on_host():
    """The same, with parameters, gradients and optimizer state in host memory."""
    language_model(param_offload=True)


def optimizer_on_host():
    """The same, with the optimizer's state in host memory, where it steps."""
    language_model(optimizer_offload=True)


def images():
    """Workers with random transforms, BatchNorm, a metric, and means of several values."""
    session, model, optimizer = make()
    session.train(model, optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=200))
    accuracy = MulticlassAccuracy(4)
    accuracy.persistent(True)
    session.register_rank_local("accuracy", accuracy)

    def compute(batch):
        x, y = batch
        out = model(x)
        accuracy.update(out, y)
        return {"loss": F.cross_entropy(out, y), "accuracy": (out.argmax(1) == y).float().mean()}

    session.state["history"] = []
    for step in session.steps(shuffled(num_workers=2, persistent_workers=True), epochs=20):
        with step:
            means = step.run(compute)
            session.state["history"].append(float(means["accuracy"]))
            if step.ends_epoch:
                session.state["accuracy"] = float(accuracy.compute())
                accuracy.reset()


def plateau():
    """A rate that follows the validation; patience that does not run out within a rehearsal."""
    session, model, optimizer = make()
    session.train(model, optimizer)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    session.register_rank_local("schedule", schedule)
    session.state.update(best=float("inf"), num_bad=0)
    for step in session.steps(shuffled(), epochs=20):
        with step:
            step.run(loss_of(model))
            if step.index % 2:
                held = validate(session, model, loss_of(model), held_out())
                schedule.step(held)
                state = session.state
                state["num_bad"] = 0 if held < state["best"] else state["num_bad"] + 1
                state["best"] = min(held, state["best"])
                if state["num_bad"] == 50:
                    break


class Average:
    """The average of this rank's shards, kept beside the model."""

    def __init__(self, model, decay=0.9):
        self.model, self.decay = model, decay
        self.values = {name: local(each).clone() for name, each in model.named_parameters()}

    @torch.no_grad()
    def update(self):
        for name, each in self.model.named_parameters():
            self.values[name].lerp_(local(each), 1 - self.decay)

    @torch.no_grad()
    def swap(self):
        for name, each in self.model.named_parameters():
            present = local(each).clone()
            local(each).copy_(self.values[name])
            self.values[name] = present

    def state_dict(self):
        return self.values

    def load_state_dict(self, state):
        self.values = state


def local(parameter):
    return parameter.detach().to_local() if hasattr(parameter, "to_local") else parameter.detach()


def average():
    """An average of the weights, with which each validation is run."""
    session, model, optimizer = make()
    session.train(model, optimizer)
    averaged = Average(model)
    session.register_rank_local("average", averaged)
    for step in session.steps(shuffled(), epochs=20):
        with step:
            step.run(loss_of(model))
            averaged.update()
            if step.index % 3 == 0:
                averaged.swap()
                session.state["loss"] = validate(session, model, loss_of(model), held_out())
                averaged.swap()


class Distilled(nn.Module):
    """A network, and a teacher that follows it; a queue of what the teacher said."""

    def __init__(self):
        super().__init__()
        self.net = Network()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)
        self.register_buffer("queue", torch.randn(32, 4, generator=generator(0)))
        self.place = 0

    def forward(self, x):
        with torch.no_grad():
            keys = self.teacher(x)
        found = self.net(x)
        places = (self.place + torch.arange(len(keys))) % len(self.queue)
        loss = (found - keys).square().mean() - 0.01 * (found @ self.queue.clone().T).tanh().mean()
        self.queue[places] = keys
        self.place = (self.place + len(keys)) % len(self.queue)
        return found, loss


def teacher():
    session, model, optimizer = make(Distilled)
    frozen = Network().requires_grad_(False).eval()  # as it was loaded, on each rank
    session.train(model, optimizer)

    def compute(batch):
        found, loss = model(batch[0])
        return loss + F.kl_div(found.log_softmax(1), frozen(batch[0]).softmax(1), reduction="batchmean")

    for step in session.steps(shuffled(), epochs=20):
        with step:
            step.run(compute)
            with torch.no_grad():
                for held, new in zip(model.teacher.parameters(), model.net.parameters(), strict=True):
                    held.lerp_(new, 0.1)


def groups():
    """Two optimizers, groups with rates of their own, one of them written by hand, and mixed samples."""
    session, model, _ = make()
    decayed = [each for each in model.body.parameters() if each.dim() > 1]
    others = [each for each in model.body.parameters() if each.dim() == 1]
    body = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 3e-3}], lr=1e-2)
    head = torch.optim.SGD(model.head.parameters(), lr=1e-2, momentum=0.9)
    session.train(model, [body, head], torch.optim.lr_scheduler.StepLR(body, 3))

    def compute(batch):
        x, y = batch
        share = np.random.beta(1, 1)
        x = (share * x + (1 - share) * x[torch.randperm(len(x))]).float()
        return F.cross_entropy(model(x), y) * random.uniform(0.9, 1.1)

    for step in session.steps(shuffled(num_workers=1), epochs=20):
        with step:
            head.param_groups[0]["lr"] = 1e-2 * min(1, (step.index + 1) / 10)
            step.run(compute)
            if step.ends_epoch:
                head.param_groups[0]["momentum"] *= 0.99


def unfrozen():
    """The body is trained from the second epoch on."""
    session, model, optimizer = make()
    model.body.requires_grad_(False)
    session.train(model, optimizer)
    for step in session.steps(shuffled(), epochs=20):
        with step:
            if step.epoch == 1:
                model.body.requires_grad_(True)
            step.run(loss_of(model))


def adversarial():
    """Two networks, stepped by hand."""
    session = Session(hybrid_shard_degree=1, global_batch_size=GLOBAL_BATCH, checkpoint_folder=FOLDER)
    torch.manual_seed(0)
    nets = nn.ModuleDict({"maker": session.parallelize(Network()), "judge": session.parallelize(nn.Linear(4, 1))})
    maker, judge = optimizers = [torch.optim.Adam(net.parameters(), lr=1e-2) for net in nets.values()]
    schedule = torch.optim.lr_scheduler.ExponentialLR(maker, 0.9)
    session.train(nets, optimizers, schedule, manual_optimization=True)

    def compute(batch):
        x, y = batch
        out = nets["maker"](x + 0.1 * torch.randn_like(x))
        loss = F.cross_entropy(out, y) - 0.1 * nets["judge"](out).mean()
        maker.zero_grad()
        loss.backward()
        clip_grad_norm_(nets["maker"].parameters(), 1.0)
        maker.step()
        judged = nets["judge"](out.detach()).square().mean()
        judge.zero_grad()
        judged.backward()
        judge.step()
        schedule.step()
        return {"loss": loss, "judged": judged}

    for step in session.steps(shuffled(), epochs=20):
        with step:
            step.run(compute)


def bf16():
    """Mixed precision and recomputed activations."""
    session, model, optimizer = make(LanguageModel, precision="bf16-mixed", activation_checkpointing=True)
    session.train(model, optimizer, max_grad_norm=0.5)
    for step in session.steps(shuffled(sentences(64)), epochs=20):
        with step:
            step.run(lambda batch: F.cross_entropy(model(batch[0]).float().flatten(0, 1), batch[0].flatten()))


class Scaled(Network):
    """Keeps what its rank has seen, in an attribute and in a buffer."""

    def __init__(self):
        super().__init__()
        self.last, self.num_steps = 0.0, 0
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        self.last = float(x.mean())
        self.mean.mul_(0.9).add_(0.1 * self.last)
        return super().forward(x)


def reads_before():
    """What precedes the step in its body reads parameters and what ranks have of their own, and writes some of it."""
    session, model, optimizer = make(Scaled)
    session.train(model, optimizer)
    counted = MulticlassAccuracy(4, sync_on_compute=False)
    counted.persistent(True)
    session.register_rank_local("counted", counted)
    for step in session.steps(shuffled(), epochs=20):
        with step:
            bias = model.head.bias
            norm = float((bias.to_local() if hasattr(bias, "to_local") else bias).detach().norm())
            model.num_steps += 1
            model.mean.add_(0.01)
            with torch.no_grad():
                model.body[0].weight.mul_(0.999)
            if step.index:
                counted.update(torch.tensor([step.index % 3]), torch.tensor([model.num_steps % 2]))
                norm += float(counted.compute())
            scale = 1 + norm + 0.1 * model.last + 0.1 * float(model.mean) + 0.01 * model.num_steps
            step.run(lambda batch, scale=scale: scale * F.cross_entropy(model(batch[0]), batch[1]))


def two_stages():
    """Head first, then all with another optimizer and schedule; a checkpoint after each."""
    session, model, _ = make()
    for stage, part in enumerate([model.head, model]):
        optimizer = torch.optim.AdamW(part.parameters(), lr=1e-2 / (stage + 1))
        session.train(model, optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5))
        for step in session.steps(shuffled(), epochs=8):
            with step:
                session.state[f"loss {stage}"] = float(step.run(loss_of(model)))
                if step.index % 4 == 3:
                    session.save(FOLDER / f"stage-{stage}")
        session.state[f"held {stage}"] = validate(session, model, loss_of(model), held_out())


def stopped_early():
    """It leaves the loop by `break`, and writes what it has reached."""
    session, model, optimizer = make()
    session.train(model, optimizer)
    for step in session.steps(shuffled(), epochs=20):
        with step:
            step.run(loss_of(model))
            held = validate(session, model, loss_of(model), held_out())
            session.state["best"] = min(held, session.state.get("best", held))
            session.save(FOLDER / "last")
            if step.index == 14:
                break
    torch.save(session.state, FOLDER / f"reached-{session.rank}.pt")


def resumed():
    """It continues from its last checkpoint, if there is one."""
    session, model, optimizer = make()
    session.train(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3))
    last = FOLDER / f"run-{session.agree(len(list(FOLDER.glob('run-*'))))}"
    if (FOLDER / "start").exists():
        session.load(FOLDER / "start")
    for step in session.steps(shuffled(), epochs=20):
        with step:
            step.run(loss_of(model))
            if step.index % 4 == 3:
                session.save(last)


def stream():
    session, model, optimizer = make()
    session.train(model, optimizer)
    for step in session.steps(DataLoader(Stream(), BATCH)):
        with step:
            step.run(loss_of(model))


def weighted():
    session, model, optimizer = make()
    session.train(model, optimizer)
    sampler = WeightedRandomSampler(torch.rand(80, generator=generator(3)), 80)
    for step in session.steps(DataLoader(Augmented(), BATCH, sampler=sampler)):
        with step:
            step.run(loss_of(model))


def kept_in_a_variable():
    """The rate follows a running mean that only a variable of the program holds."""
    session, model, optimizer = make()
    session.train(model, optimizer)
    mean = 1.0
    for step in session.steps(shuffled(), epochs=20):
        with step:
            optimizer.param_groups[0]["lr"] = 1e-2 * mean
            mean = 0.9 * mean + 0.1 * float(step.run(loss_of(model)))


def average_in_a_variable():
    """An average that was not registered, on which the loss depends."""
    session, model, optimizer = make()
    session.train(model, optimizer)
    averaged = Average(model)

    def compute(batch):
        distance = sum(
            (local(each) - held).square().sum()
            for each, held in zip(model.parameters(), averaged.values.values(), strict=True)
        )
        return loss_of(model)(batch) * (1 + distance)

    for step in session.steps(shuffled(), epochs=20):
        with step:
            step.run(compute)
            averaged.update()


PROGRAMS = {
    each.__name__: each
    for each in (
        language_model,
        parameters_on_host,
        optimizer_on_host,
        images,
        plateau,
        average,
        teacher,
        groups,
        unfrozen,
        adversarial,
        bf16,
        reads_before,
        two_stages,
        stopped_early,
        resumed,
        stream,
        weighted,
        kept_in_a_variable,
        average_in_a_variable,
    )
}
TOLD = {
    "stream": "takes a torch.utils.data.DataLoader over a map-style dataset with a batch_size, but was given one over",
    "weighted": "the DataLoader has the sampler WeightedRandomSampler, but only shuffle=True or shuffle=False",
    "kept_in_a_variable": "differs. Likely",
    "average_in_a_variable": "it depends on something that is not restored",
}
"""Words with which programs are refused, and with which those that are wrong are named."""


if __name__ == "__main__":
    PROGRAMS[sys.argv[1]]()
