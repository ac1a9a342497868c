"""What hooks that change a batch have read."""

import random
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import nn

from hyperpod_plugins.errors import ConfigError, StateLost
from hyperpod_plugins.lightning.batch_hooks import BatchHooks
from hyperpod_plugins.lightning.local_state import attributes_of


class Module(pl.LightningModule):
    def __init__(self, change):
        super().__init__()
        self.net, self.teacher = nn.Linear(3, 3), nn.Linear(3, 3)
        self.teacher.requires_grad_(False)
        self.register_buffer("mean", torch.zeros(3))
        self.scale, self.losses, self.change = 1.0, [], change


class OfModule(Module):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return self.change(self, batch)


class OfData(pl.LightningDataModule):
    def __init__(self, module):
        super().__init__()
        self.module, self.factor = module, 1.0

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return self.module.change(self.module, batch)


class OfCallback(pl.Callback):
    def __init__(self):
        self.weight = 2.0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        pl_module.change(pl_module, batch)


class Kept:
    """The attributes of a module at one moment."""

    def __init__(self, module):
        self.module, self.kept = module, {**vars(module)}

    def put_back(self):
        vars(self.module).clear()
        vars(self.module).update(self.kept)


KINDS = {
    "module": lambda trainer, batch: trainer.lightning_module.on_after_batch_transfer(batch, dataloader_idx=0),
    "data": lambda trainer, batch: trainer.datamodule.on_before_batch_transfer(batch, 0),
    "callback": lambda trainer, batch: trainer.callbacks[0].on_train_batch_start(
        trainer, trainer.lightning_module, batch, 0
    ),
}


def watched(change, kind="module"):
    """A trainer whose hook `change` is, its `BatchHooks`, and a call of the hook."""
    module = (OfModule if kind == "module" else Module)(change)
    trainer = SimpleNamespace(
        lightning_module=module,
        optimizers=[],
        datamodule=OfData(module) if kind == "data" else None,
        callbacks=[OfCallback()] if kind == "callback" else [],
    )
    hooks = BatchHooks(trainer, module, [*attributes_of(trainer).values()])
    return trainer, hooks, lambda: KINDS[kind](trainer, {"x": torch.ones(2, 3)})


def in_place(value):
    def change(module, batch):
        batch["x"].add_(value(module))
        return batch

    return change


TRAINED = {
    "in a forward": in_place(lambda it: it.net(torch.ones(3)).detach()),
    "a view": in_place(lambda it: it.net.weight.detach()[0]),
    "a number": in_place(lambda it: it.net.bias.sum().item()),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", TRAINED.values(), ids=TRAINED)
def test_a_batch_that_is_changed_by_trained_parameters_is_refused(change, kind):
    _, hooks, call = watched(change, kind)
    hooks.watch()
    with pytest.raises(ConfigError, match=r"changes the batch by net\.\w+.*training_step"):
        call()
    hooks.end()
    call()  # is not watched any more


def replaced(module, batch):
    batch["x"] = batch["x"] + module.net.bias.detach()
    return batch


@dataclass(slots=True)
class Slots:
    x: torch.Tensor


def test_a_batch_of_slots_has_changed():
    def change(module, batch):
        batch.x = batch.x + module.net.bias.detach()

    trainer, hooks, _ = watched(change, "callback")
    hooks.watch()
    with pytest.raises(ConfigError):
        KINDS["callback"](trainer, Slots(torch.ones(2, 3)))
    hooks.end()


def test_a_static_hook_is_left_alone():
    class Static(Module):
        @staticmethod
        def on_after_batch_transfer(batch, dataloader_idx):
            return batch

    trainer = SimpleNamespace(lightning_module=Static(None), optimizers=[], datamodule=None, callbacks=[])
    hooks = BatchHooks(trainer, trainer.lightning_module, [])
    hooks.watch()
    assert trainer.lightning_module.on_after_batch_transfer(3, 0) == 3
    hooks.end()


def test_a_batch_whose_entries_are_replaced_has_changed():
    _, hooks, call = watched(replaced, "callback")
    hooks.watch()
    with pytest.raises(ConfigError):
        call()
    hooks.end()


def reading(module, batch):
    module.norm = module.net.weight.detach().norm().item()
    return batch


def writing(module, batch):
    with torch.no_grad():
        module.net.weight.clamp_(-1, 1)
    return batch


ALLOWED = {
    "unchanged batch": reading,
    "written parameters": writing,
    "moved by": lambda module, batch: {name: each.to(module.net.weight) for name, each in batch.items()},
    "frozen": in_place(lambda it: it.teacher(torch.ones(3))),
    "attribute": in_place(lambda it: it.scale),
    "nothing": in_place(lambda it: 1.0),
    "form": in_place(lambda it: it.net.bias.new_ones(3) + torch.zeros_like(it.net.bias)),
    "view": in_place(lambda it: len(it.net.weight.detach().data.t())),
    "compiled": in_place(lambda it: torch.compile(torch.sin, fullgraph=True, backend="eager")(torch.ones(3))),
    "sparse": in_place(lambda it: torch.sparse.mm(torch.eye(3).to_sparse(), torch.ones(3, 3))[0]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", ALLOWED.values(), ids=ALLOWED)
def test_others_are_accepted(change, kind):
    _, hooks, call = watched(change, kind)
    classes = [OfModule, OfData, OfCallback, Module]
    before = [dict(vars(each)) for each in classes]
    hooks.watch()
    call()
    assert hooks.check() is None  # a rank that gives its state compares nothing
    hooks.end()
    assert [dict(vars(each)) for each in classes] == before


def written(name, value):
    return lambda module: setattr(module, name, value)


COMPARED = {
    "attribute": (in_place(lambda it: it.scale), written("scale", 2.0), "module.scale"),
    "buffer": (in_place(lambda it: it.mean), lambda it: it.mean.add_(1), "mean"),
    "frozen parameter": (in_place(lambda it: it.teacher.bias), lambda it: it.teacher.bias.add_(1), "teacher.bias"),
    "list": (in_place(lambda it: sum(it.losses)), lambda it: it.losses.append(1.0), "module.losses"),
    "trained": (in_place(lambda it: it.net.bias.detach()), lambda it: None, "net.bias"),
}


@pytest.mark.parametrize(("change", "restore", "name"), COMPARED.values(), ids=COMPARED)
def test_what_a_replacement_reads_is_compared_with_what_it_gets(change, restore, name):
    trainer, hooks, call = watched(change)
    hooks.watch(partial(Kept, trainer.lightning_module))
    call()
    hooks.note()
    with torch.no_grad():
        restore(trainer.lightning_module)
    with pytest.raises(StateLost, match=rf"on_after_batch_transfer has changed .* by {name}, which"):
        hooks.check()
    hooks.check()  # once


def test_a_restore_that_is_repeated_is_compared_with_what_was_there_first():
    trainer, hooks, call = watched(in_place(lambda it: it.teacher.bias))
    hooks.watch(partial(Kept, trainer.lightning_module))
    call()
    for _ in range(2):
        hooks.note()
        with torch.no_grad():
            trainer.lightning_module.teacher.bias.add_(1)
    with pytest.raises(StateLost):
        hooks.check()


def test_a_replacement_keeps_its_batch_and_its_random_numbers():
    def change(module, batch):
        return {"x": batch["x"].add_(torch.rand(3) + np.random.rand() + random.random() + module.scale)}

    found = []
    for watches in (False, True):
        trainer, hooks, call = watched(change)
        if watches:
            hooks.watch(partial(Kept, trainer.lightning_module))
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        found.append([call()["x"], call()["x"], torch.rand(3)])
        hooks.end()
    assert all(map(torch.equal, *found))


def test_a_hook_counts_once():
    def change(module, batch):
        module.scale += 1
        return {"x": batch["x"] + module.scale}

    trainer, hooks, call = watched(change)
    hooks.watch(partial(Kept, trainer.lightning_module))
    assert float(call()["x"].max()) == 3.0
    hooks.note()
    assert trainer.lightning_module.scale == 2.0
    hooks.check()


def test_a_hook_of_a_callback_with_a_state_counts_once():
    class Counts(OfCallback):
        count = 0

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            self.count += 1

        def state_dict(self):
            return {"count": self.count}

        def load_state_dict(self, state):
            self.count = state["count"]

    trainer = SimpleNamespace(lightning_module=Module(None), optimizers=[], datamodule=None, callbacks=[Counts()])
    hooks = BatchHooks(trainer, trainer.lightning_module, [*attributes_of(trainer).values()])
    hooks.watch(partial(Kept, trainer.lightning_module))
    KINDS["callback"](trainer, {"x": torch.ones(1)})
    hooks.end()
    assert trainer.callbacks[0].count == 1


def test_a_second_call_that_fails_is_told(caplog):
    calls = []

    def change(module, batch):
        calls.append(batch)
        if len(calls) == 2:
            raise KeyError("once")
        return {"x": batch["x"] + module.scale}

    trainer, hooks, call = watched(change)
    hooks.watch(partial(Kept, trainer.lightning_module))
    assert float(call()["x"].max()) == 2.0
    hooks.end()
    assert "whether on_after_batch_transfer has changed the first batch" in caplog.text


def test_what_was_not_read_or_has_not_changed_is_the_same():
    trainer, hooks, call = watched(in_place(lambda it: it.scale + it.mean))
    hooks.watch(partial(Kept, trainer.lightning_module))
    call()
    hooks.note()
    trainer.lightning_module.losses.append(2.0)
    trainer.lightning_module.scale = 1.0
    hooks.check()


def test_no_hooks():
    trainer = SimpleNamespace(lightning_module=Module(None), optimizers=[], datamodule=None, callbacks=[OfCallback()])
    assert BatchHooks(trainer, trainer.lightning_module, []).are_any
    trainer.callbacks.clear()
    assert not BatchHooks(trainer, trainer.lightning_module, []).are_any
