"""Generated programs, each trained by many ranks and by one process of plain torch: losses and parameters must agree.

A case is a function of its number: a model (experts, branches, heads, shared and tied modules, frozen and unowned
parameters, several types, sizes that nothing divides, marks on parameters and lists of them), an optimizer, a loader
with uneven last steps, a layout and an adapter. What a module does depends on each sample alone, so that any split of a
batch is the same program.

    python tests/one_process.py --cases 300 [--first 0] [--ranks 2] [--put-back every_list_is_a_chain]
"""

import argparse
import contextlib
import itertools
import random
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from device import ACCELERATOR
from harness import run_ranks
from torch import nn

TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}
SEED = 5


@dataclass(frozen=True, kw_only=True)
class Case:
    """One program."""

    number: int
    adapter: str
    layout: dict[str, Any]
    width: int
    num_layers: int
    features: frozenset[str]
    optimizer: str
    clip: float
    num_samples: int
    global_batch: int
    micro_batch: int
    epochs: int
    resumed_batch: int
    """Global batch with which a second process goes on from a checkpoint after the first step; 0 for none."""

    def __str__(self) -> str:
        return (
            f"case {self.number}: {self.adapter}, {self.layout}, {self.num_layers} layers of {self.width}, "
            f"{'+'.join(sorted(self.features)) or 'plain'}, {self.optimizer}, clip {self.clip}, {self.num_samples} "
            f"samples by {self.global_batch} in {self.micro_batch}, {self.epochs} epochs"
            + (f", resumed by {self.resumed_batch}" if self.resumed_batch else "")
        )

    def steps(self) -> Iterator[list[int]]:
        """The samples of each step."""
        for epoch in range(self.epochs):
            order, start = order_of(self, epoch), 0
            while start < self.num_samples:
                is_first = not self.resumed_batch or (epoch == 0 and start == 0)
                size = self.global_batch if is_first else self.resumed_batch
                yield order[start : start + size]
                start += size


FEATURES = (
    *("experts", "layer_experts", "branch", "heads", "repeated", "tied", "frozen", "unowned", "short", "double"),
    *("buffer", "unused"),
)
ATTACHED = ("marked", "kept")
"""Features that are drawn apart, so that a case of a number keeps its others."""
LAYOUTS = {
    1: [{}],
    2: [{}, {"hybrid_shard_degree": 1}, {"hybrid_shard_degree": 1, "tensor_parallel_degree": 2}],
    4: [
        {"hybrid_shard_degree": 2},
        {},
        {"hybrid_shard_degree": 1},
        {"hybrid_shard_degree": 2, "tensor_parallel_degree": 2},
        {"hybrid_shard_degree": 1, "tensor_parallel_degree": 2},
    ],
}
PLAN = {"*.w1": "colwise", "*.w2": "rowwise"}


def make_case(number: int, world_size: int) -> Case:
    """The case of a number; nothing else decides it."""
    draw = random.Random(f"{number} of {world_size}")
    layout = draw.choice(LAYOUTS[world_size])
    adapter = ("session", "accelerate", "session", "lightning", "session")[number % 5]
    is_tensor = "tensor_parallel_degree" in layout
    ranks = world_size // layout.get("tensor_parallel_degree", 1)
    micro, steps = draw.choice([1, 2, 3]), draw.choice([1, 1, 2, 3])
    if adapter == "session":
        global_batch = draw.randint(ranks * max(1, micro * steps - 1), ranks * micro * steps)
        while not _can_be_shared(global_batch, micro, ranks):
            global_batch -= 1
        num_samples = draw.randint(global_batch, 4 * global_batch)
        if 0 < num_samples % global_batch < ranks:
            num_samples -= num_samples % global_batch
    else:
        global_batch = ranks * micro * steps
        num_samples = global_batch * draw.randint(2, 4)
    case = Case(
        number=number,
        adapter=adapter,
        layout=layout | ({"tensor_plan": PLAN} if is_tensor else {}),
        width=draw.choice([6, 8] if is_tensor else [5, 6, 8]),
        num_layers=draw.randint(1, 3),
        features=frozenset(name for name in FEATURES if draw.random() < 0.3),
        optimizer=draw.choice(["sgd", "momentum", "adamw"]),
        clip=draw.choice([0.0, 0.0, 0.5]),
        num_samples=num_samples,
        global_batch=global_batch,
        micro_batch=micro,
        epochs=draw.randint(1, 2),
        resumed_batch=ranks * micro * draw.choice([0, 1, 2, 3]) if adapter == "lightning" else 0,
    )
    apart = random.Random(f"attached to {number} of {world_size}")
    case = replace(case, features=case.features | {name for name in ATTACHED if apart.random() < 0.3})
    is_repaired = adapter == "session" and draw.random() < 0.4
    if not is_repaired:
        return case
    clip = 0.3 if "unowned" in case.features else case.clip  # so that a gradient that was kept changes all others
    return replace(case, features=case.features | {"repaired"}, clip=clip)


def _can_be_shared(global_batch: int, micro_batch: int, ranks: int) -> bool:
    """Whether every rank has a sample in every micro-step."""
    shares = (global_batch + ranks - 1) // ranks, global_batch // ranks
    return shares[1] > (shares[0] - 1) // micro_batch * micro_batch


# -- the model --------------------------------------------------------------------------------------------------------


def where(chosen: torch.Tensor, x: torch.Tensor, module: nn.Module) -> torch.Tensor:
    """Run a module on the chosen samples only, and not at all where there are none."""
    if not chosen.any():
        return x
    at = chosen.nonzero()[:, 0]
    return x.index_add(0, at, module(x[at]))


class Layer(nn.Module):
    def __init__(self, width: int, features: frozenset[str]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.w1, self.w2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(3 * ("layer_experts" in features)))

    def forward(self, x: torch.Tensor, route: torch.Tensor) -> torch.Tensor:
        x = x + self.w2(torch.tanh(self.w1(self.norm(x))))
        for i, expert in enumerate(self.experts):
            if (route == i).any():
                x = where(route == i, x, expert)
        return x


class Net(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        width, features = case.width, case.features
        layers = [Layer(width, features) for _ in range(case.num_layers)]
        self.layers = nn.ModuleList([*layers, layers[0]] if "repeated" in features else layers)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(4 * ("experts" in features)))
        self.extra = nn.ModuleList(nn.Linear(width, width) for _ in range(2)) if "branch" in features else None
        self.heads = nn.ModuleDict({f"task{i}": nn.Linear(width, width) for i in range(2 * ("heads" in features))})
        self.first, self.head = nn.Linear(width, width), nn.Linear(width, width)
        if "tied" in features:
            self.head.weight = self.first.weight
        if "frozen" in features:
            self.first.bias.requires_grad_(False)
            layers[-1].w1.bias.requires_grad_(False)
        self.short = nn.Parameter(torch.ones(1)) if "short" in features else None
        self.unused = nn.Linear(width, width) if "unused" in features else None
        if "double" in features:
            self.gain = nn.Parameter(torch.linspace(0.5, 1, width, dtype=torch.float64), requires_grad=False)
        self.register_buffer("scale", torch.linspace(1, 2, width) if "buffer" in features else None)
        if "marked" in features:
            for parameter in self.parameters():
                parameter.no_decay = parameter.dim() == 1
        self.kept = {"penalized": [self.first.weight, self.head.bias] if "kept" in features else []}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        route = (x[:, 0] * 3).long() % 4
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, route)
        for i, expert in enumerate(self.experts):
            if (route == i).any():
                x = where(route == i, x, expert)
        if self.extra is not None and (route == 1).any():
            for module in self.extra:
                x = where(route == 1, x, module)
        for i, head in enumerate(self.heads.values()):
            x = where(route % 2 == i, x, head)
        for factor in (self.short, self.scale, vars(self)["_parameters"].get("gain")):
            x = x if factor is None else x * factor.to(x.dtype)
        return self.head(x)


def make_net(case: Case) -> Net:
    torch.manual_seed(case.number)
    return Net(case)


def data_of(case: Case) -> torch.Tensor:
    """Features of each sample, `(samples, width)`; neighbours route alike, so that ranks do not."""
    generator = torch.Generator().manual_seed(case.number)
    x = torch.randn(case.num_samples, case.width, generator=generator)
    x[:, 0] = (torch.arange(case.num_samples) // 2 % 4) / 3 + 0.1
    return x


def loss_of(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = (net(x) - x.roll(1, 1)).square().mean()
    return loss + sum(0.1 * parameter.square().sum() for parameter in net.kept["penalized"])


def make_optimizer(case: Case, net: nn.Module) -> torch.optim.Optimizer:
    unowned: tuple[str, ...] = ("head.bias",) if "unowned" in case.features else ()
    if unowned and "repaired" in case.features:
        unowned = ("head.bias", "w2.weight")
    owned = [
        parameter
        for name, parameter in net.named_parameters()
        if parameter.requires_grad and not name.endswith(unowned)
    ]
    marked = [parameter for parameter in owned if getattr(parameter, "no_decay", False)]
    ids = {id(parameter) for parameter in marked}
    groups: list[dict[str, Any]] = [{"params": [parameter for parameter in owned if id(parameter) not in ids]}]
    groups += [{"params": marked, "weight_decay": 0.0}] if marked else []
    if case.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, eps=1e-2)
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9 * (case.optimizer == "momentum"), weight_decay=0.01)


# -- one process ------------------------------------------------------------------------------------------------------


def order_of(case: Case, epoch: int) -> list[int]:
    from hyperpod_plugins.data.sampler import sample_order

    if case.adapter == "accelerate":
        return list(range(case.num_samples))
    return list(sample_order(range(case.num_samples), num_samples=case.num_samples, seed=SEED, epoch=epoch))


def train_alone(case: Case) -> tuple[list[float], dict[str, torch.Tensor]]:
    net, data = make_net(case), data_of(case)
    optimizer, losses = make_optimizer(case, net), []
    for samples in case.steps():
        loss = loss_of(net, data[samples])
        loss.backward()
        if case.clip:
            clipped = net.parameters() if case.adapter != "lightning" else owned_by(optimizer)
            nn.utils.clip_grad_norm_(clipped, case.clip)
        optimizer.step()
        for parameter in net.parameters():
            parameter.grad = None
        losses.append(float(loss.detach()))
    return losses, {name: parameter.detach() for name, parameter in net.named_parameters()}


def owned_by(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


# -- many ranks -------------------------------------------------------------------------------------------------------


def train_with_session(case: Case) -> tuple[list[float], nn.Module]:
    from torch.utils.data import DataLoader, TensorDataset

    from hyperpod_plugins.session import Session

    session = Session(
        case.layout, global_batch_size=case.global_batch, random_seed=SEED, allow_empty_shards=True, timeout_s=60
    )
    net = session.parallelize(make_net(case))
    session.train(net, make_optimizer(case, net), max_grad_norm=case.clip)
    if "repaired" in case.features:
        repair_each_step(session)
    loader, losses = DataLoader(TensorDataset(data_of(case)), batch_size=case.micro_batch, shuffle=True), []
    for step in session.steps(loader, epochs=case.epochs):
        with step:
            losses.append(float(step.run(lambda batch: loss_of(net, batch[0]))))
            for parameter in net.parameters() if "repaired" not in case.features else ():
                parameter.grad = None
    return losses, net


def repair_each_step(session: Any) -> None:
    """Do to each step what recovery does: it is computed, undone and computed again.

    Before the third one the last rank is as if it had replaced a lost one: it has no gradients of an earlier step.
    """
    transactions, trained, steps = session._transactions, session._trained, itertools.count()

    def run(compute: Any, commit: Any) -> Any:
        step = next(steps)
        if step == 2 and session.rank == session.world_size - 1:
            for parameter in trained.model.parameters():
                parameter.grad = None
        trained.begin(step)
        compute()
        trained.undo_step()
        trained.end_iteration()
        return commit(compute())

    transactions.run = run


def train_with_lightning(case: Case) -> tuple[list[float], nn.Module]:
    import lightning as L
    import numpy as np
    import torch.distributed as dist

    from hyperpod_plugins.data import write_tokens
    from hyperpod_plugins.lightning import HyperPodStrategy, TokenDataConfig, TokenDataModule

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.data, self.sums = make_net(case), data_of(case), [0.0]

        def training_step(self, batch, index):
            x = self.data[batch["input_ids"].flatten()]
            loss = loss_of(self.net, x)
            self.sums[-1] += float(loss.detach()) * len(x)
            return loss

        def on_before_zero_grad(self, optimizer):
            for parameter in self.parameters():
                parameter.grad = None

        def on_before_optimizer_step(self, optimizer):
            self.sums.append(0.0)

        def configure_optimizers(self):
            return make_optimizer(case, self.net)

    class Save(L.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 1:
                trainer.save_checkpoint(Path(shared, "checkpoint"))

    sums = torch.zeros(0)
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders, src=0)
    shared = folders[0]
    ranks = num_readers(case)
    with tempfile.TemporaryDirectory() as folder:
        write_tokens(
            Path(folder, "t"), [np.arange(case.num_samples + 1)], vocab_size=case.num_samples + 1, progress=False
        )
        for is_second in (False, True) if case.resumed_batch else (False,):
            global_batch = case.resumed_batch if is_second else case.global_batch
            is_cut = bool(case.resumed_batch) and not is_second
            module = Module()
            trainer = L.Trainer(
                max_epochs=case.epochs,
                max_steps=1 if is_cut else -1,
                callbacks=[Save()] if is_cut else [],
                accelerator=ACCELERATOR,
                devices=dist.get_world_size(),
                strategy=HyperPodStrategy(case.layout, allow_empty_shards=True, timeout_s=60),
                accumulate_grad_batches=global_batch // (case.micro_batch * ranks),
                gradient_clip_val=case.clip or None,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                default_root_dir=folder,
            )
            config = TokenDataConfig(
                sequence_length=1,
                global_batch_size=global_batch,
                micro_batch_size=case.micro_batch,
                drop_last=False,
                seed=SEED,
            )
            data = TokenDataModule(Path(folder, "t"), config=config)
            trainer.fit(module, datamodule=data, ckpt_path=Path(shared, "checkpoint") if is_second else None)
            own = torch.tensor(module.sums[:-1])
            dist.all_reduce(own)
            sums = torch.cat([sums, own])
    dist.barrier()
    shutil.rmtree(shared, ignore_errors=True)
    sizes = torch.tensor([len(step) for step in case.steps()])
    copies = dist.get_world_size() / ranks
    losses = [float(each) for each in sums / copies / sizes] if len(sums) == len(sizes) else sums.tolist()
    return losses, module.net


def train_with_accelerate(case: Case) -> tuple[list[float], nn.Module]:
    from accelerate.state import AcceleratorState, GradientState
    from torch.utils.data import DataLoader, TensorDataset

    from hyperpod_plugins.accelerate import HyperPodPlugin

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    ranks = num_readers(case)
    steps = case.global_batch // (case.micro_batch * ranks)
    accelerator = HyperPodPlugin(case.layout, allow_empty_shards=True, timeout_s=60).accelerator(
        gradient_accumulation_steps=steps
    )
    net = make_net(case)
    net, optimizer, loader = accelerator.prepare(
        net, make_optimizer(case, net), DataLoader(TensorDataset(data_of(case)), batch_size=case.micro_batch)
    )
    losses, window = [], []
    for _ in range(case.epochs):
        for (x,) in loader:
            with accelerator.accumulate(net):
                loss = loss_of(net, x)
                accelerator.backward(loss)
                if accelerator.sync_gradients and case.clip:
                    accelerator.clip_grad_norm_(net.parameters(), case.clip)
                optimizer.step()
                optimizer.zero_grad()
                if accelerator.sync_gradients:
                    for parameter in net.parameters():
                        parameter.grad = None
            window.append(accelerator.reduce(loss.detach(), "mean"))
            if len(window) == steps:
                losses.append(float(torch.stack(window).mean()))
                window = []
    return losses, net


def num_readers(case: Case) -> int:
    import torch.distributed as dist

    return dist.get_world_size() // case.layout.get("tensor_parallel_degree", 1)


ADAPTERS = {"session": train_with_session, "lightning": train_with_lightning, "accelerate": train_with_accelerate}


def difference(case: Case) -> str:
    """What differs between the ranks' result and that of one process, in words; nothing if they agree."""
    torch.set_num_threads(1)
    try:
        losses, net = ADAPTERS[case.adapter](case)
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    wanted_losses, wanted = train_alone(case)
    got = {
        name: (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach()
        for name, parameter in net.named_parameters()
    }
    if len(losses) != len(wanted_losses):
        return f"{len(losses)} steps in place of {len(wanted_losses)}"
    for index, (loss, alone) in enumerate(zip(losses, wanted_losses, strict=True)):
        if abs(loss - alone) > TOLERANCE["rtol"] * abs(alone) + TOLERANCE["atol"]:
            return f"the loss of step {index} is {loss}, and {alone} in one process"
    if got.keys() != wanted.keys():
        return f"parameters {sorted(got.keys() ^ wanted.keys())} are not the same"
    for name, parameter in wanted.items():
        if not torch.allclose(got[name], parameter, **TOLERANCE):
            return f"{name} differs by {float((got[name] - parameter).abs().max())}"
    return ""


def run_cases(numbers: list[int], fault: str = "") -> list[tuple[str, str]]:
    """On each rank: the cases that differ and how. Ranks leave the list together at the first that may have hung.

    Args:
        numbers: of the cases.
        fault: that is put back meanwhile; see `FAULTS`.
    """
    import torch.distributed as dist

    warnings.filterwarnings("ignore")
    if not dist.is_initialized():
        dist.init_process_group("hyperpod")
    faults: list[tuple[str, str]] = []
    for number in numbers:
        case, began_s = make_case(number, dist.get_world_size()), time.monotonic()
        with put_back(fault):
            told = difference(case)
        print(case, "->", told or "equal", f"{time.monotonic() - began_s:.2f} s", flush=True)
        if told:
            faults.append((str(case), told))
        heard = [False] * dist.get_world_size()
        dist.all_gather_object(heard, bool(told))
        if any(heard) and not all(heard):
            return [*faults, (str(case), "on some ranks only")]
    return faults


# -- faults that were there once ---------------------------------------------------------------------------------------


def put_back(fault: str) -> contextlib.AbstractContextManager[Any]:
    """Inside, the package has an old fault again: a name of `FAULTS`, or an empty one for none."""
    return FAULTS[fault]() if fault else contextlib.nullcontext()


@contextlib.contextmanager
def units_are_not_watched() -> Iterator[None]:
    """Gradients of a unit that the last micro-step does not use come a step later."""
    import hyperpod_plugins.session.session as session
    from hyperpod_plugins.parallel import hsdp

    with (
        patch.object(hsdp, "watch_units", lambda model: None),
        patch.object(session, "watch_units", lambda model: None),
    ):
        yield


def every_list_is_a_chain() -> contextlib.AbstractContextManager[Any]:
    """Each element of each list of modules is a unit, also an expert that some ranks do not run."""
    from hyperpod_plugins.parallel import hsdp

    def elements(model: nn.Module) -> set[int]:
        lists = (each for each in model.modules() if isinstance(each, nn.ModuleList | nn.ModuleDict))
        return {id(element) for each in lists for element in each.children()}

    return patch.object(hsdp, "_elements_of_chains", elements)


def gradients_without_optimizer_stay() -> contextlib.AbstractContextManager[Any]:
    """The gradients of parameters in no optimizer add up over steps and attempts, on ranks that live."""
    from hyperpod_plugins.recovery.undo import StepStart

    return patch.object(StepStart, "_drop_unowned", lambda self: None)


def epochs_keep_their_length() -> contextlib.AbstractContextManager[Any]:
    """An epoch that is resumed with another global batch has as many batches as a whole one."""
    from hyperpod_plugins.lightning.datamodule import TrainerLoader

    load = TrainerLoader.load_state_dict

    def load_state_dict(self: Any, state_dict: Any) -> None:
        load(self, state_dict)
        self._shorter = None

    return patch.object(TrainerLoader, "load_state_dict", load_state_dict)


def attributes_stay_behind() -> contextlib.AbstractContextManager[Any]:
    """Sharding forgets the attributes of parameters."""
    from hyperpod_plugins.parallel import former_parameters

    return patch.object(former_parameters, "remember_attributes", lambda model: None)


def references_stay_behind() -> contextlib.AbstractContextManager[Any]:
    """Lists of parameters keep those from before sharding."""
    from hyperpod_plugins.parallel import former_parameters

    return patch.object(former_parameters, "follow_references", lambda *_: None)


FAULTS = {
    each.__name__: each
    for each in (
        attributes_stay_behind,
        references_stay_behind,
        every_list_is_a_chain,
        units_are_not_watched,
        gradients_without_optimizer_stay,
        epochs_keep_their_length,
    )
}


def run_with_faults(faults: list[tuple[str, int]]) -> list[str]:
    """On each rank: of cases with a fault put back, those that give the result of one process nevertheless."""
    return [f"{fault} in case {number}" for fault, number in faults if not run_cases([number], fault)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2, choices=sorted(LAYOUTS))
    parser.add_argument("--put-back", default="", choices=["", *sorted(FAULTS)])
    parser.add_argument("--limit-s", type=float, default=550)
    arguments = parser.parse_args()
    numbers = list(range(arguments.first, arguments.first + arguments.cases))
    began_s = time.monotonic()
    by_rank = run_ranks(run_cases, numbers, arguments.put_back, world_size=arguments.ranks, timeout_s=arguments.limit_s)
    for case, told in by_rank[0]:
        print(case, "->", told)
    print(f"{len(numbers)} cases, {len(by_rank[0])} differ, {time.monotonic() - began_s:.0f} s")
    sys.exit(bool(by_rank[0]))


if __name__ == "__main__":
    main()
