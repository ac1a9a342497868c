"""Programs of Accelerate of many kinds, with a `Session` around their steps; `gallery.py` rehearses each.

python -m hyperpod_plugins.cli rehearse tests/recovery/program_gallery_accelerate.py language_model FOLDER
"""

import math
import sys
from pathlib import Path

import gallery_parts
import numpy as np
import torch
from accelerate import DataLoaderConfiguration
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import ProjectConfiguration, set_seed
from gallery_parts import Augmented, generator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchmetrics.classification import MulticlassAccuracy
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, LlamaConfig, default_data_collator, get_scheduler

from hyperpod_plugins.accelerate import HyperPodPlugin
from hyperpod_plugins.session import Session

torch.set_num_threads(1)
BATCH, GLOBAL_BATCH, MAX_STEPS = 4, 8, 100
FOLDER = Path(sys.argv[-1])
SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


class Images(Augmented):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return {"x": x, "labels": y}


class Texts(Dataset):
    def __init__(self, size):
        self.ids = torch.randint(0, SIZES["vocab_size"], (size, 12), generator=generator(size))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class Stream(IterableDataset):
    def __iter__(self):
        images = Images(20)
        yield from (images[index] for index in range(20))


class Network(gallery_parts.Network):
    """With a normalization that is not of the batch."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)

    def forward(self, x):
        return self.head(self.norm(self.body(x)).relu())


class Lines(GeneralTracker):
    """Writes what is logged to a file."""

    name, requires_logging_directory = "lines", False

    @on_main_process
    def __init__(self):
        super().__init__()
        self.file = (FOLDER / "log").open("a")

    @property
    def tracker(self):
        return self.file

    @on_main_process
    def log(self, values, step=None, **options):
        print(step, values, file=self.file, flush=True)


def make(global_batch_size=GLOBAL_BATCH, options=None, **settings):
    plugin = HyperPodPlugin(hybrid_shard_degree=1, random_seed=5, **settings)
    session = Session(plugin.config, global_batch_size=global_batch_size, checkpoint_folder=FOLDER)
    accelerator = plugin.accelerator(session=session, **(options or {}))
    set_seed(1)
    return session, accelerator


def prepared(accelerator, model=None, lr=1e-2):
    """The model, torch's own optimizer of its shards, and the one that Accelerate made of it."""
    model = model or Network()
    no_decay = [each for each in model.parameters() if each.dim() == 1]
    decayed = [each for each in model.parameters() if each.dim() > 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}]
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(groups, lr=lr))
    return model, optimizer.optimizer


def shuffled(dataset=None, **options):
    return DataLoader(dataset or Images(40), BATCH, shuffle=True, **options)


def loss_of(model, **options):
    return lambda batch: F.cross_entropy(model(batch["x"]), batch["labels"], **options)


def evaluate(accelerator, model, loader):
    """The mean loss and the accuracy over all samples, each of which counts once."""
    model.eval()
    losses, is_right = [], []
    for batch in loader:
        with torch.no_grad():
            out = model(batch["x"])
        loss = F.cross_entropy(out, batch["labels"], reduction="none")
        losses.append(accelerator.gather_for_metrics(loss))
        predictions, references = accelerator.gather_for_metrics((out.argmax(1), batch["labels"]))
        is_right.append(predictions == references)
    model.train()
    return float(torch.cat(losses).mean()), float(torch.cat(is_right).float().mean())


def held_out(accelerator, **options):
    return accelerator.prepare_data_loader(DataLoader(Images(11), 2, **options))


def language_model():
    """As `run_clm_no_trainer.py`: accumulation, linear schedule, perplexity at each epoch's end, states, a tracker."""
    session, accelerator = make(16, {"project_dir": FOLDER}, precision="bf16-mixed")
    accelerator.log_with = [Lines()]
    accelerator.init_trackers("clm_no_trainer", {"steps": MAX_STEPS})
    model, optimizer = prepared(accelerator, AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)))
    schedule = get_scheduler("linear", optimizer, num_warmup_steps=5, num_training_steps=MAX_STEPS)
    session.train(model, optimizer, schedule, backward=accelerator.backward, max_grad_norm=1.0)
    progress = tqdm(range(MAX_STEPS), disable=not accelerator.is_local_main_process)
    train = shuffled(Texts(64), collate_fn=default_data_collator)
    for step in session.steps(train, epochs=20, max_steps=MAX_STEPS):
        with step:
            loss = step.run(lambda batch: model(**batch).loss)
            progress.update()
            total = session.state["total"] = session.state.get("total", 0.0) + float(loss)
            if step.index % 5 == 4:
                accelerator.save_state(str(FOLDER / f"step_{step.index}"))
            if step.ends_epoch:
                model.eval()
                losses = []
                for batch in accelerator.prepare(DataLoader(Texts(10), 2, collate_fn=default_data_collator)):
                    with torch.no_grad():
                        loss = model(**batch).loss
                    losses.append(accelerator.gather_for_metrics(loss.repeat(2)))
                model.train()
                session.state["perplexity"] = math.exp(float(torch.cat(losses).mean()))
                accelerator.log({"perplexity": session.state["perplexity"], "train_loss": total}, step=step.index)
                session.state["total"] = 0.0
    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(
        FOLDER / "model", is_main_process=accelerator.is_main_process, state_dict=accelerator.get_state_dict(model)
    )
    accelerator.end_training()


def images(**settings):
    """As `cv_example.py`: workers with random transforms, BatchNorm, label smoothing, one cycle, best accuracy."""
    session, accelerator = make(**settings)
    model, optimizer = prepared(accelerator)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=200)
    session.train(model, optimizer, schedule, backward=accelerator.backward)
    for step in session.steps(shuffled(num_workers=2, persistent_workers=True), epochs=20):
        with step:
            step.run(loss_of(model, label_smoothing=0.1))
            if step.ends_epoch:
                _, accuracy = evaluate(accelerator, model, held_out(accelerator, num_workers=1))
                if accuracy > session.state.get("best", 0.0):
                    session.state["best"] = accuracy
                    accelerator.save_state(str(FOLDER / "best"))
                    accelerator.save(session.state["best"], FOLDER / "best.pt")


def parameters_on_host():
    """The same, with parameters, gradients and optimizer state in host memory."""
    images(offload_params=True)


def optimizer_on_host():
    """The same, with the optimizer's state in host memory, where it steps."""
    images(optimizer_offload=True)


def plateau():
    """A rate that follows the validation, early stopping by `set_trigger`, reduced metrics."""
    session, accelerator = make()
    model, optimizer = prepared(accelerator)
    session.train(model, optimizer, backward=accelerator.backward, non_finite="skip")
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    session.register_rank_local("schedule", schedule)
    session.state.update(best=math.inf, num_bad=0)
    for step in session.steps(shuffled(), epochs=20):
        with step:
            loss = step.run(loss_of(model))
            session.state["mean"] = float(accelerator.reduce(loss.detach(), "mean"))
            if step.index % 2:
                held, _ = evaluate(accelerator, model, held_out(accelerator))
                schedule.step(held)
                is_better = held < session.state["best"]
                session.state.update(
                    best=min(held, session.state["best"]), num_bad=0 if is_better else session.state["num_bad"] + 1
                )
                if session.state["num_bad"] == 50:
                    accelerator.set_trigger()
                if accelerator.check_trigger():
                    break


class Average:
    """The average of this rank's shards."""

    def __init__(self, model):
        self.model = model
        self.values = [each.to_local().detach().clone() for each in model.parameters()]

    @torch.no_grad()
    def update(self):
        for held, each in zip(self.values, self.model.parameters(), strict=True):
            held.lerp_(each.to_local(), 0.1)

    @torch.no_grad()
    def swap(self):
        for held, each in zip(self.values, self.model.parameters(), strict=True):
            present = each.to_local().clone()
            each.to_local().copy_(held)
            held.copy_(present)

    def state_dict(self):
        return {"values": self.values}

    def load_state_dict(self, state):
        self.values = state["values"]


def average():
    """An average of the weights, with which each validation is run; Accelerate saves it, too."""
    session, accelerator = make()
    model, optimizer = prepared(accelerator)
    session.train(model, optimizer, backward=accelerator.backward)
    averaged = Average(model)
    accelerator.register_for_checkpointing(averaged)
    session.register_rank_local("average", averaged)
    for step in session.steps(shuffled(), epochs=20):
        with step:
            step.run(loss_of(model))
            averaged.update()
            if step.index % 3 == 0:
                averaged.swap()
                session.state["held"], _ = evaluate(accelerator, model, held_out(accelerator))
                averaged.swap()
            if step.index % 5 == 0:
                accelerator.save_state(str(FOLDER / "last"))


def recomputed():
    """Recomputed activations, mixed precision, a rate and a decay written by hand."""
    session, accelerator = make(precision="bf16-mixed", activation_checkpointing=True)
    model, optimizer = prepared(accelerator, AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)))
    session.train(model, optimizer, backward=accelerator.backward, max_grad_norm=0.5)
    for step in session.steps(shuffled(Texts(64)), epochs=20):
        with step:
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 * min(1.0, (step.index + 1) / 10)
            step.run(lambda batch: model(**batch).loss)
            if step.ends_epoch:
                optimizer.param_groups[0]["weight_decay"] *= 0.9


def distilled():
    """A frozen teacher beside the model, mixed samples, and a metric of the training."""
    session, accelerator = make()
    teacher = Network().requires_grad_(False).eval().to(accelerator.device)
    model, optimizer = prepared(accelerator)
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=3, num_training_steps=MAX_STEPS)
    session.train(model, optimizer, schedule, backward=accelerator.backward)
    accuracy = MulticlassAccuracy(4)
    accuracy.persistent(True)
    session.register_rank_local("accuracy", accuracy)

    def compute(batch):
        share, other = np.random.beta(1, 1), torch.randperm(len(batch["x"]))
        x = (share * batch["x"] + (1 - share) * batch["x"][other]).float()
        with accelerator.autocast():
            out = model(x)
        accuracy.update(out, batch["labels"])
        loss = F.kl_div(out.log_softmax(1), teacher(x).softmax(1), reduction="batchmean")
        return {"loss": loss, "share": share}

    for step in session.steps(shuffled(), epochs=20):
        with step:
            step.run(compute)
            if step.ends_epoch:
                session.state["accuracy"] = float(accuracy.compute())
                accuracy.reset()


def dispatched():
    """Evaluations of batches that the first rank reads and splits, also of a stream, from their second batch on."""
    config = DataLoaderConfiguration(split_batches=True, dispatch_batches=True)
    session, accelerator = make(options={"dataloader_config": config})
    model, optimizer = prepared(accelerator)
    session.train(model, optimizer, backward=accelerator.backward)
    for step in session.steps(shuffled(), epochs=20):
        with step:
            step.run(loss_of(model))
            if step.index % 2:
                loader = accelerator.prepare_data_loader(DataLoader(Stream(), 4))
                found = evaluate(accelerator, model, accelerator.skip_first_batches(loader, 1))
                session.state["found"] = [*found, *evaluate(accelerator, model, held_out(accelerator))]


def generates():
    """Samples of the model in between, of which all ranks get those of all."""
    session, accelerator = make()
    model, optimizer = prepared(accelerator, AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)))
    session.train(model, optimizer, backward=accelerator.backward)
    for step in session.steps(shuffled(Texts(64)), epochs=20):
        with step:
            step.run(lambda batch: model(**batch).loss)
            if step.index % 3 == 0:
                start = torch.zeros(1, 2, dtype=torch.long)
                made = accelerator.unwrap_model(model).generate(
                    start, do_sample=True, max_new_tokens=4, min_new_tokens=4, pad_token_id=0
                )
                session.state["made"] = accelerator.gather(made).tolist()


def two_stages():
    """Two loops over one model, the second one with another optimizer, and an evaluation after each."""
    session, accelerator = make()
    model, optimizer = prepared(accelerator)
    for stage in range(2):
        session.train(
            model,
            optimizer,
            torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5),
            backward=accelerator.backward,
        )
        for step in session.steps(shuffled(), epochs=8):
            with step:
                step.run(loss_of(model))
        session.state[f"held {stage}"], _ = evaluate(accelerator, model, held_out(accelerator))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def without_session():
    """The loop of Accelerate alone."""
    accelerator = HyperPodPlugin(hybrid_shard_degree=1).accelerator(gradient_accumulation_steps=2)
    model, optimizer, loader = accelerator.prepare(
        model := Network(), torch.optim.AdamW(model.parameters(), lr=1e-2), shuffled()
    )
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model)(batch))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def accumulates():
    session, accelerator = make(options={"gradient_accumulation_steps": 2})
    raise AssertionError(session, accelerator)


def names_states():
    config = ProjectConfiguration(str(FOLDER), automatic_checkpoint_naming=True)
    session, accelerator = make(options={"project_config": config})
    raise AssertionError(session, accelerator)


def wrapped_loader():
    """It prepares the loader, too."""
    session, accelerator = make()
    model, optimizer = prepared(accelerator)
    session.train(model, optimizer, backward=accelerator.backward)
    for step in session.steps(accelerator.prepare(shuffled())):
        with step:
            step.run(loss_of(model))


def wrapped_schedule():
    """It prepares the schedule, too."""
    session, accelerator = make()
    model, optimizer = prepared(accelerator)
    schedule = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 4))
    session.train(model, optimizer, schedule, backward=accelerator.backward)
    for step in session.steps(shuffled(), epochs=20):
        with step:
            step.run(loss_of(model))


def own_backward():
    """The inside of a loop of Accelerate, in the function of the step."""
    session, accelerator = make()
    model, optimizer = prepared(accelerator)
    session.train(model, optimizer, backward=accelerator.backward)

    def compute(batch):
        with accelerator.accumulate(model):
            loss = loss_of(model)(batch)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return loss

    for step in session.steps(shuffled(), epochs=20):
        with step:
            step.run(compute)


def prepared_teacher():
    """A second model that Accelerate has prepared."""
    session, accelerator = make()
    teacher = accelerator.prepare(Network().requires_grad_(False).eval())
    model, optimizer = prepared(accelerator)
    session.train(model, optimizer, backward=accelerator.backward)
    for step in session.steps(shuffled(), epochs=20):
        with step:
            step.run(lambda batch: (model(batch["x"]) - teacher(batch["x"])).square().mean())


class Count:
    """A count that Accelerate saves, and no one sends to a replacement."""

    value = 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def saved_by_accelerate_alone():
    """The loss depends on an object that was registered for checkpoints only."""
    session, accelerator = make()
    model, optimizer = prepared(accelerator)
    count = Count()
    accelerator.register_for_checkpointing(count)
    session.train(model, optimizer, backward=accelerator.backward)
    for step in session.steps(shuffled(), epochs=20):
        with step:
            step.run(lambda batch: loss_of(model)(batch) * (1 + count.value))
            count.value += 1


PROGRAMS = {
    each.__name__: each
    for each in (
        language_model,
        images,
        parameters_on_host,
        optimizer_on_host,
        plateau,
        average,
        recomputed,
        distilled,
        dispatched,
        generates,
        two_stages,
        without_session,
        accumulates,
        names_states,
        wrapped_loader,
        wrapped_schedule,
        own_backward,
        prepared_teacher,
        saved_by_accelerate_alone,
    )
}
TOLD = {
    "without_session": "the program ran no step that can be recovered",
    "accumulates": "gradient_accumulation_steps=2 would divide each loss once more",
    "names_states": "automatic_checkpoint_naming counts checkpoints in each process",
    "wrapped_loader": "but was given DataLoaderShard. Give it the loader before accelerator.prepare",
    "wrapped_schedule": "HyperPodScheduler wraps a scheduler, and advances it by the number of ranks",
    "own_backward": "optimizer.step() was called by hand",
    "prepared_teacher": "a model and optimizer must be passed together to `Accelerator.prepare()`",
    "saved_by_accelerate_alone": "Count was given to accelerator.register_for_checkpointing, but not to the session",
}
"""Words with which programs are refused, and with which those that are wrong are named."""


if __name__ == "__main__":
    PROGRAMS[sys.argv[1]]()
