"""Whole fits on four ranks against plain torch loops in one process: losses, norms, parameters, callbacks.

All cases run in one set of processes, a Trainer each, which also shows that Trainers of different layouts do not
disturb each other. The tolerances are those of float32 sums taken in another order.
"""

import os
import shutil
import signal
import tempfile
import traceback
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from device import ACCELERATOR
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

VOCABULARY, WIDTH, SEQUENCE = 32, 16, 6
GLOBAL_BATCH, NUM_STEPS, MAX_NORM = 8, 6, 0.5
HSDP = {"hybrid_shard_degree": 2}
TENSOR = {"hybrid_shard_degree": 2, "tensor_parallel_degree": 2}
LAYOUTS = {"hsdp 2x2": HSDP, "tp 2 x shard 2": TENSOR}
NUMBERS_PARAMETERS = hasattr(_fsdp_param, "_get_orig_param_uid")  # torch 2.13


# -- the model, and plain torch loops ---------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.w1 = nn.Linear(WIDTH, 2 * WIDTH)
        self.w2 = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.w2(torch.tanh(self.w1(self.norm(x))))


class Net(nn.Module):
    def __init__(self, is_partly_frozen=False):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(2)])
        self.norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if is_partly_frozen:
            self.tok_embeddings.requires_grad_(False)
            self.layers[0].w1.bias.requires_grad_(False)
            self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def loss_of(net, tokens):
    logits = net(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))


def make_net(**options):
    torch.manual_seed(0)
    return Net(**options)


def global_batches(num_steps=NUM_STEPS):
    """Token ids of each step, `(step, global batch, sequence)`."""
    generator = torch.Generator().manual_seed(7)
    return torch.randint(VOCABULARY, (num_steps, GLOBAL_BATCH, SEQUENCE), generator=generator)


def make_adamw(parameters):
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def fit_alone(clip=None, **net_options):
    """The reference: AdamW, a learning rate that changes each step, a moving average of the parameters."""
    net = make_net(**net_options)
    optimizer, scheduler = make_adamw([p for p in net.parameters() if p.requires_grad])
    losses, average = [], [p.detach().clone() for p in net.parameters()]
    averaged = {"ema": AveragedModel(net, avg_fn=get_ema_avg_fn(0.7)), "swa": AveragedModel(net)}
    for batch in global_batches():
        loss = loss_of(net, batch)
        loss.backward()
        if clip is not None:
            clip(net.parameters())
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(float(loss.detach()))
        for mean, parameter in zip(average, net.parameters(), strict=True):
            mean.lerp_(parameter.detach(), 0.3)
        for each in averaged.values():
            each.update_parameters(net)
    means = {
        name: {key: value.clone() for key, value in each.module.state_dict().items()} for name, each in averaged.items()
    }
    return means | {
        "losses": losses,
        "state": {name: p.detach().clone() for name, p in net.state_dict().items()},
        "average": {name: mean for (name, _), mean in zip(net.named_parameters(), average, strict=True)},
    }


def fit_two_optimizers_alone():
    net = make_net()
    body, head = torch.optim.AdamW(net.layers.parameters(), 1e-2), torch.optim.SGD(net.output.parameters(), 0.1)
    losses = []
    for batch in global_batches():
        loss = loss_of(net, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(net.layers.parameters(), MAX_NORM)
        for optimizer in (body, head):
            optimizer.step()
        net.zero_grad()
        losses.append(float(loss.detach()))
    return {"losses": losses, "state": {name: p.detach().clone() for name, p in net.state_dict().items()}}


# -- the same under Lightning, on every rank --------------------------------------------------------------------------


def whole(value):
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()


def whole_state(net):
    return {name: whole(value) for name, value in net.state_dict().items()}


def make_module_class():
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        """An ordinary module that reads its share of each global batch, in order."""

        def __init__(self, micro_batches=1, **net_options):
            super().__init__()
            self.net = make_net(**net_options)
            self.micro_batches = micro_batches
            self.losses = []

        def forward(self, tokens):
            return self.net(tokens)

        def training_step(self, batch, index):
            loss = loss_of(self.net, batch)
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            self.losses.append(float(mean) / dist.get_world_size())
            return loss

        def configure_optimizers(self):
            optimizer, scheduler = make_adamw([p for p in self.parameters() if p.requires_grad])
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

        def train_dataloader(self):
            place = self.trainer.strategy.distributed_sampler_kwargs
            size = GLOBAL_BATCH // place["num_replicas"] // self.micro_batches
            mine = [
                batch.view(self.micro_batches, place["num_replicas"], size, SEQUENCE)[:, place["rank"]]
                for batch in global_batches()
            ]
            return torch.utils.data.DataLoader(torch.cat(mine).flatten(0, 1), batch_size=size)

    return Module


def make_trainer(options, **arguments):
    import lightning.pytorch as pl

    from hyperpod_plugins.lightning import HyperPodStrategy

    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    defaults = dict(accelerator=ACCELERATOR, max_epochs=1, use_distributed_sampler=False)
    return pl.Trainer(strategy=HyperPodStrategy(**options), **(quiet | defaults | arguments))


def fit(options, *, callbacks=(), micro_batches=1, net_options=None, **arguments):
    from hyperpod_plugins.comm import reset_traffic, traffic

    module = make_module_class()(micro_batches, **(net_options or {}))
    trainer = make_trainer(options, callbacks=list(callbacks), accumulate_grad_batches=micro_batches, **arguments)
    reset_traffic()
    trainer.fit(module)
    assert trainer.global_step == NUM_STEPS
    counted = traffic()
    return {
        "losses": module.losses,
        "state": whole_state(module.net),
        "between replicas": counted["replicate"].calls.get("all_reduce", 0),
        "inside a replica": counted["shard"].calls.get("reduce_scatter", 0),
    }


def fit_with_average(options):
    import lightning.pytorch as pl

    class Average(pl.Callback):
        """A moving average of the parameters, kept shard by shard."""

        def on_train_start(self, trainer, module):
            self.means = [p.detach().clone() for p in module.parameters()]

        def on_train_batch_end(self, trainer, module, *_):
            for mean, parameter in zip(self.means, module.parameters(), strict=True):
                mean.lerp_(parameter.detach(), 0.3)

        def on_train_end(self, trainer, module):
            names = [name.removeprefix("net.") for name, _ in module.named_parameters()]
            self.result = {name: whole(mean) for name, mean in zip(names, self.means, strict=True)}

    average = Average()
    return fit(options, callbacks=[average]) | {"average": average.result}


def fit_with_weight_averaging(options, kind):
    """Lightning's own callbacks, which validate and end with the average; a second Trainer goes on from the middle."""
    from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, WeightAveraging

    class Validated(make_module_class()):
        def validation_step(self, batch, index):
            self.seen = whole(self.net.output.weight)

        def train_dataloader(self):
            loader = super().train_dataloader()
            done = self.num_done * loader.batch_size  # a loader of torch's begins at its first batch again
            return torch.utils.data.DataLoader(loader.dataset.roll(-done, 0), batch_size=loader.batch_size)

        def val_dataloader(self):
            return super().train_dataloader()

    make = {"ema": partial(EMAWeightAveraging, decay=0.7), "swa": WeightAveraging}[kind]
    arguments = dict(val_check_interval=2, limit_val_batches=1, enable_checkpointing=True)
    folder, found = Path(tempfile.gettempdir()) / f"averages-{os.getppid()}-{kind}-{len(options)}", []
    for path in (None, folder / "step=4.ckpt"):
        module, callback = Validated(), make()
        module.num_done = 0 if path is None else 4
        saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=4, save_top_k=-1)
        make_trainer(options, callbacks=[callback, saving], **arguments).fit(module, ckpt_path=path)
        average = whole_state(callback._average_model.module)
        assert torch.equal(module.seen, average["net.output.weight"])  # the last one comes after the last step
        found.append({"losses": module.losses, kind: whole_state(module.net)})
        dist.barrier()
    shutil.rmtree(folder, ignore_errors=True)
    whole_run, rest = found
    assert whole_run["losses"][4:] == rest["losses"]
    assert all(torch.equal(value, rest[kind][name]) for name, value in whole_run[kind].items())
    return whole_run


def fit_with_other_weights_in_validation(options):
    """Swaps the parameters for others while validating, as averages of weights do; training must not notice.

    FSDP2 leaves the root gathered after a step under no_grad: what is then written to a parameter is lost.
    """
    import lightning.pytorch as pl

    class Swap(pl.Callback):
        def on_validation_start(self, trainer, module):
            self.kept = [p.detach().clone() for p in module.parameters()]
            for parameter in module.parameters():
                parameter.detach().zero_()

        def on_validation_end(self, trainer, module):
            for parameter, kept in zip(module.parameters(), self.kept, strict=True):
                parameter.detach().copy_(kept)

    class Validated(make_module_class()):
        def validation_step(self, batch, index):
            self.log("zero", self.net(batch).abs().sum(), sync_dist=True)

        def val_dataloader(self):
            return self.train_dataloader()

    module = Validated()
    trainer = make_trainer(options, callbacks=[Swap()], val_check_interval=2, limit_val_batches=1)
    trainer.fit(module)
    assert float(trainer.callback_metrics["zero"]) == 0.0
    return {"losses": module.losses, "state": whole_state(module.net)}


def fit_by_hand(options):
    """Manual optimisation with two optimizers, one of them clipped."""

    class ByHand(make_module_class()):
        automatic_optimization = False

        def training_step(self, batch, index):
            loss = super().training_step(batch, index)
            self.manual_backward(loss)
            body, head = self.optimizers()
            self.clip_gradients(body, gradient_clip_val=MAX_NORM, gradient_clip_algorithm="norm")
            for optimizer in (body, head):
                optimizer.step()
            self.zero_grad()

        def configure_optimizers(self):
            return (
                torch.optim.AdamW(self.net.layers.parameters(), 1e-2),
                torch.optim.SGD(self.net.output.parameters(), 0.1),
            )

    module = ByHand()
    make_trainer(options).fit(module)
    return {"losses": module.losses, "state": whole_state(module.net)}


def fit_built_late(options):
    """The model is built in `configure_model` and left to the strategy."""

    class Late(make_module_class()):
        def __init__(self):
            super().__init__()
            self.net = None

        def configure_model(self):
            if self.net is None:
                self.net = make_net()

    module = Late()
    make_trainer(options).fit(module)
    return {"losses": module.losses, "state": whole_state(module.net)}


def fit_sharded_by_the_module(options):
    """The module splits and shards itself: the strategy must leave it as it is.

    Attributes of parameters follow the sharded ones, and so does what a callback keeps.
    """
    import lightning.pytorch as pl
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    class Own(make_module_class()):
        def configure_model(self):
            data = self.device_mesh["replicate", "shard"]
            for layer in self.net.layers:
                parallelize_module(
                    layer, self.device_mesh["tensor"], {"w1": ColwiseParallel(), "w2": RowwiseParallel()}
                )
                fully_shard(layer, mesh=data)
            fully_shard(self.net, mesh=data)

        def configure_optimizers(self):
            self.marks = [name for name, each in self.net.named_parameters() if hasattr(each, "mark")]
            return super().configure_optimizers()

    class Keeps(pl.Callback):
        def on_train_batch_start(self, trainer, module, *_):
            self.is_new = self.kept[0] is module.net.output.weight

    module, keeps = Own(), Keeps()
    keeps.kept = [module.net.output.weight]
    for each in (module.net.output.weight, module.net.layers[0].w1.weight):
        each.mark = True
    make_trainer(options, callbacks=[keeps]).fit(module)
    assert module.marks == ["layers.0.w1.weight", "output.weight"]
    if NUMBERS_PARAMETERS:
        assert keeps.is_new
    assert module.net.output.weight.device_mesh.mesh_dim_names == ("replicate", "shard")  # no tensor axis: untouched
    return {"losses": module.losses, "state": whole_state(module.net)}


def fit_that_looks_at_gradients(options, *, in_a_hook):
    """Whether gradients of the step before are still there in the forward pass; a hook may want to see them."""

    import lightning.pytorch as pl

    class Looks(make_module_class()):
        def training_step(self, batch, index):
            self.seen.append(any(parameter.grad is not None for parameter in self.parameters()))
            return super().training_step(batch, index)

    class InAHook(pl.Callback):
        def on_before_zero_grad(self, trainer, module, optimizer):
            pass

    module = Looks()
    module.seen = []
    make_trainer(options, callbacks=[InAHook()] if in_a_hook else []).fit(module)
    return {"losses": module.losses, "state": whole_state(module.net), "seen": module.seen}


def fit_told_to_end(options, every):
    """One rank gets SIGTERM in batch 1; the ranks ask each other in each batch whose number `every` divides."""
    from lightning.pytorch.utilities.exceptions import SIGTERMException

    from hyperpod_plugins.lightning import preemption

    class Told(make_module_class()):
        def on_train_batch_start(self, batch, index):
            if index == 1 and self.global_rank == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    module = Told()
    rule, preemption.batches_until_next = preemption.batches_until_next, lambda batch_s: every
    try:
        with pytest.raises(SIGTERMException):
            make_trainer(options).fit(module)
    finally:
        preemption.batches_until_next = rule
    return len(module.losses)


def fit_twice(options):
    """Two fits of one module and one strategy each: the second goes on with the parameters of the first."""
    module = make_module_class()()
    make_trainer(options).fit(module)
    first = whole_state(module.net)
    make_trainer(options).fit(module)
    return {"losses": module.losses, "first": first, "state": whole_state(module.net)}


CASES = {
    "plain": fit,
    "accumulation": partial(fit, micro_batches=2),
    "clip by norm": partial(fit, gradient_clip_val=MAX_NORM),
    "clip by value": partial(fit, gradient_clip_val=0.01, gradient_clip_algorithm="value"),
    "clip and accumulate": partial(fit, micro_batches=2, gradient_clip_val=MAX_NORM),
    "frozen and unused": partial(fit, net_options={"is_partly_frozen": True}, gradient_clip_val=MAX_NORM),
    "moving average": fit_with_average,
    "other weights in validation": fit_with_other_weights_in_validation,
    "Lightning's EMA": partial(fit_with_weight_averaging, kind="ema"),
    "Lightning's SWA": partial(fit_with_weight_averaging, kind="swa"),
    "by hand": fit_by_hand,
    "built late": fit_built_late,
    "sharded by the module": fit_sharded_by_the_module,
    "gradients seen": partial(fit_that_looks_at_gradients, in_a_hook=True),
    "gradients not seen": partial(fit_that_looks_at_gradients, in_a_hook=False),
    "told to end": partial(fit_told_to_end, every=1),
    "told to end, later": partial(fit_told_to_end, every=3),
    "twice": fit_twice,
}


def run_cases(cases, layouts):
    """Results of all cases; a case that fails on every rank does not stop the others."""
    results = {}
    for layout, options in layouts.items():
        for name, case in cases.items():
            try:
                results[layout, name] = case(options)
            except Exception:
                results[layout, name] = traceback.format_exc()
    return results


@pytest.fixture(scope="module")
def results(run_ranks):
    return run_ranks(run_cases, CASES, LAYOUTS, world_size=4, timeout_s=150)


@pytest.fixture(scope="module")
def alone():
    by_norm = partial(nn.utils.clip_grad_norm_, max_norm=MAX_NORM)
    clipped = fit_alone(by_norm)
    return dict.fromkeys(CASES, fit_alone()) | {
        "clip by norm": clipped,
        "clip by value": fit_alone(partial(nn.utils.clip_grad_value_, clip_value=0.01)),
        "clip and accumulate": clipped,
        "frozen and unused": fit_alone(by_norm, is_partly_frozen=True),
        "by hand": fit_two_optimizers_alone(),
    }


def of_every_rank(results, layout, case):
    found = [by_rank[layout, case] for by_rank in results]
    assert not isinstance(found[0], str), found[0]
    return found


@pytest.mark.spawns
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", [name for name in CASES if name not in ("told to end", "told to end, later", "twice")])
def test_a_fit_equals_plain_torch_on_one_process(results, alone, layout, case):
    wanted = alone[case]
    for found in of_every_rank(results, layout, case):
        losses = torch.tensor(found["losses"])
        if len(losses) != len(wanted["losses"]):  # micro-batches: their means make the batch's
            losses = losses.view(len(wanted["losses"]), -1).mean(1)
        torch.testing.assert_close(losses, torch.tensor(wanted["losses"]), rtol=2e-6, atol=0)
        for kind in found.keys() & {"state", "average", "ema", "swa"}:
            assert found[kind].keys() == wanted[kind].keys()
            for name, value in found[kind].items():
                torch.testing.assert_close(
                    value, wanted[kind][name], rtol=0, atol=5e-5, msg=lambda m, w=(kind, name): f"{w}: {m}"
                )


@pytest.mark.spawns
def test_replicas_talk_once_a_step_however_many_micro_batches_it_has(results):
    plain = of_every_rank(results, "hsdp 2x2", "plain")[0]
    accumulated = of_every_rank(results, "hsdp 2x2", "accumulation")[0]
    assert accumulated["between replicas"] == plain["between replicas"] > 0
    assert accumulated["inside a replica"] == 2 * plain["inside a replica"] > 0


@pytest.mark.spawns
@pytest.mark.parametrize("layout", LAYOUTS)
def test_frozen_and_unused_parameters_keep_their_values(results, layout):
    start = make_net(is_partly_frozen=True).state_dict()
    state = of_every_rank(results, layout, "frozen and unused")[0]["state"]
    for name in ("tok_embeddings.weight", "layers.0.w1.bias", "unused.weight"):
        assert torch.equal(state[name], start[name])
    assert not torch.equal(state["layers.0.w1.weight"], start["layers.0.w1.weight"])


@pytest.mark.spawns
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_end_after_the_same_batch_when_one_is_told_to(results, layout):
    assert of_every_rank(results, layout, "told to end") == [3] * 4
    assert of_every_rank(results, layout, "told to end, later") == [4] * 4


@pytest.mark.parametrize(("batch_s", "num_batches"), [(30.0, 1), (3.0, 1), (1.2, 2), (0.01, 300), (0.0, 1000)])
def test_they_are_told_about_every_three_seconds(batch_s, num_batches):
    from hyperpod_plugins.lightning.preemption import batches_until_next

    assert batches_until_next(batch_s) == num_batches


@pytest.mark.spawns
def test_gradients_are_dropped_before_the_forward_pass_unless_a_hook_may_look_at_them(results):
    for found in of_every_rank(results, "hsdp 2x2", "gradients not seen"):
        assert found["seen"] == [False] * NUM_STEPS
    for found in of_every_rank(results, "hsdp 2x2", "gradients seen"):
        assert found["seen"] == [False] + [True] * (NUM_STEPS - 1)


@pytest.mark.spawns
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_second_fit_goes_on_where_the_first_ended(results, layout):
    plain = of_every_rank(results, layout, "plain")[0]
    for found in of_every_rank(results, layout, "twice"):
        assert found["losses"][:NUM_STEPS] == plain["losses"]
        assert found["losses"][NUM_STEPS] < found["losses"][0]
        for name, value in found["first"].items():
            assert torch.equal(value, plain["state"][name])
            assert not torch.equal(value, found["state"][name])
