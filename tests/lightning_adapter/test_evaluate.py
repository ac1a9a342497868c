"""Validation, test, prediction, logging, stopping, precision and samplers on four ranks.

As in `test_fit.py` all cases run in one set of processes, and each is asserted on its own.
"""

import traceback

import pytest
import torch
import torch.distributed as dist
from device import ACCELERATOR
from torch import nn

WIDTH, NUM_SAMPLES, BATCH = 8, 16, 2
LAYOUTS = {
    "hsdp 2x2": {"hybrid_shard_degree": 2},
    "tp 2 x shard 2": {"hybrid_shard_degree": 2, "tensor_parallel_degree": 2},
}


class Net(nn.Module):
    """Has what inference mode poisons (a buffer that forward writes to) and what bf16-true must not round."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.mlp = nn.ModuleDict({"w1": nn.Linear(WIDTH, 16), "w2": nn.Linear(16, WIDTH)})
        self.head = nn.Linear(WIDTH, 4)
        self.register_buffer("num_calls", torch.zeros(()))
        self.register_buffer("frequencies", torch.tensor([1.0 + 2**-12]), persistent=False)

    def forward(self, x):
        self.num_calls += 1
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        self.dtype_inside = x.dtype
        return self.head(x + self.mlp["w2"](torch.tanh(self.mlp["w1"](x)))).sum(-1)


def make_net():
    torch.manual_seed(0)
    return Net()


def make_samples():
    """Inputs whose first feature is the number of the sample, small enough to be exact in bfloat16."""
    samples = torch.randn(NUM_SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))
    samples[:, 0] = torch.arange(NUM_SAMPLES) / 16
    return samples


def loss_of(net, x):
    return (net(x) - x.sum(-1)).square().mean()


def whole(value):
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()


def make_module():
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = make_net()
            self.seen = {"train": [], "val": []}
            self.losses = []

        def forward(self, x):
            return self.net(x)

        def training_step(self, x, index):
            self.seen["train"] += (16 * x[:, 0]).round().int().tolist()
            loss = loss_of(self, x)
            self.losses.append(float(loss.detach()))
            return loss

        def validation_step(self, x, index):
            self.seen["val"] += (16 * x[:, 0]).round().int().tolist()
            self.log("val_loss", loss_of(self, x), sync_dist=True)

        def test_step(self, x, index):
            self.log("test_loss", loss_of(self, x), sync_dist=True)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

        def train_dataloader(self):
            return torch.utils.data.DataLoader(make_samples(), batch_size=BATCH)

        val_dataloader = test_dataloader = predict_dataloader = train_dataloader

    return Module()


def make_trainer(options, **arguments):
    import lightning.pytorch as pl

    from hyperpod_plugins.lightning import HyperPodStrategy

    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    return pl.Trainer(
        strategy=HyperPodStrategy(**options), accelerator=ACCELERATOR, **quiet, **({"max_epochs": 1} | arguments)
    )


# -- cases: each returns what one rank saw ----------------------------------------------------------------------------


def evaluate_then_fit(options):
    module = make_module()
    trainer = make_trainer(options)
    before = [trainer.validate(module, verbose=False), trainer.test(module, verbose=False), trainer.predict(module)]
    trainer.fit(module)
    after = [trainer.validate(module, verbose=False), trainer.test(module, verbose=False), trainer.predict(module)]
    undisturbed = make_module()
    make_trainer(options).fit(undisturbed)
    return {
        "before": before,
        "after": after,
        "losses": [module.losses, undisturbed.losses],
        "undisturbed": {name: whole(value) for name, value in undisturbed.net.named_parameters()},
        "is sharded": all(hasattr(p, "device_mesh") for p in module.parameters()),
        "state": {name: whole(value) for name, value in module.net.state_dict().items()},
        "rank": dict(trainer.strategy.distributed_sampler_kwargs),
    }


def log_everything(options):
    import lightning.pytorch as pl

    class Logs(pl.Callback):
        def on_train_batch_end(self, trainer, module, *_):
            place = trainer.strategy.distributed_sampler_kwargs["rank"]
            value = torch.tensor(float(place + 1))
            for name in ("mean", "sum", "max", "min"):
                module.log(name, value, reduce_fx=name, sync_dist=True, on_step=False, on_epoch=True)
                module.log(f"step_{name}", value, reduce_fx=name, sync_dist=True, on_step=True, on_epoch=False)
            module.log("count", place + 1, reduce_fx="sum", sync_dist=True, on_step=True, on_epoch=False)
            module.log("alone", value)

    module = make_module()
    trainer = make_trainer(options, callbacks=[Logs()], limit_train_batches=1)
    trainer.fit(module)
    gathered = trainer.strategy.reduce(torch.tensor([1, 2]), reduce_op="mean")
    return {name: float(value) for name, value in trainer.callback_metrics.items()} | {"integers": gathered.tolist()}


def stop_early(options):
    """Each rank monitors its own number; only the one of the last rank stops improving."""
    from lightning.pytorch.callbacks import EarlyStopping

    module = make_module()
    direction = 1.0 if dist.get_rank() == dist.get_world_size() - 1 else -1.0
    module.on_train_epoch_end = lambda: module.log("own", direction * module.current_epoch)
    trainer = make_trainer(
        options, max_epochs=20, callbacks=[EarlyStopping("own", patience=3, check_on_train_epoch_end=True)]
    )
    trainer.fit(module)
    decisions = [
        trainer.strategy.reduce_boolean_decision(dist.get_rank() == 1, all=False),
        trainer.strategy.reduce_boolean_decision(dist.get_rank() == 1, all=True),
        trainer.strategy.reduce_boolean_decision(True, all=True),
        trainer.strategy.reduce_boolean_decision(False, all=False),
    ]
    return {"epoch": trainer.current_epoch, "decisions": decisions}


def read_by_the_default_sampler(options):
    module = make_module()
    trainer = make_trainer(options)
    trainer.fit(module)
    return module.seen | {"batches": trainer.num_training_batches, "rank": trainer.strategy.distributed_sampler_kwargs}


def fit_in(precision, by_strategy):
    def case(options):
        module = make_module()
        if by_strategy:
            trainer = make_trainer(options | {"precision": precision})
        else:
            trainer = make_trainer(options, precision=precision)
        trainer.fit(module)
        return {
            "losses": module.losses,
            "parameters": {str(p.dtype) for p in module.parameters()},
            "moments": {str(s["exp_avg"].dtype) for s in trainer.optimizers[0].state.values()},
            "inside": str(module.net.dtype_inside),
            "saved buffer": str(module.net.num_calls.dtype),
            "other buffer": float(module.net.frequencies),
            "precision": trainer.precision,
        }

    return case


def fit_true_bfloat16_sharded_by_the_module(options):
    """What the strategy finds sharded it can not convert: first a module in float32, then one in bfloat16."""
    from torch.distributed.fsdp import fully_shard

    class Own(type(make_module())):
        def __init__(self, is_converted):
            super().__init__()
            self.is_converted = is_converted

        def configure_model(self):
            if self.is_converted:
                self.bfloat16()
            fully_shard(self.net, mesh=self.device_mesh["replicate", "shard"])

    trainer = make_trainer(options, precision="bf16-true")
    try:
        trainer.fit(Own(is_converted=False))
        refusal = ("", "")
    except Exception as error:
        refusal = (type(error).__name__, str(error))
    module = Own(is_converted=True)
    make_trainer(options, precision="bf16-true").fit(module)
    return refusal, {str(p.dtype) for p in module.parameters()}, len(module.losses)


def fit_loss_parallel(options):
    """The logits stay split over the classes; the loss is logged, accumulated and clipped as any other."""
    if "tensor_parallel_degree" not in options:
        return None
    import lightning.pytorch as pl

    class Classifier(pl.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.w1, self.w2 = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
            self.output = nn.Linear(WIDTH, 4)

        def step(self, name, x):
            logits = self.output(x + self.w2(torch.tanh(self.w1(x))))
            loss = nn.functional.cross_entropy(logits, (16 * x[:, 0]).round().long() % 4)
            self.log(name, loss, sync_dist=True, on_epoch=True)
            return loss

        def training_step(self, x, index):
            return self.step("train_loss", x)

        def validation_step(self, x, index):
            return self.step("val_loss", x)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def train_dataloader(self):
            place = self.trainer.strategy.distributed_sampler_kwargs
            mine = make_samples()[place["rank"] :: place["num_replicas"]]
            return torch.utils.data.DataLoader(mine, batch_size=BATCH)

        val_dataloader = train_dataloader

    results = {}
    for loss_parallel in (False, True):
        module = Classifier()
        trainer = make_trainer(
            options | {"loss_parallel": loss_parallel},
            use_distributed_sampler=False,
            accumulate_grad_batches=2,
            gradient_clip_val=0.5,
        )
        trainer.fit(module)
        logged = {name: float(whole(value)) for name, value in trainer.callback_metrics.items()}
        results[loss_parallel] = logged, {name: whole(p) for name, p in module.named_parameters()}
    return results


def count_with_torchmetrics(options):
    """A metric object that every rank feeds with its samples, and Lightning synchronises."""
    import torchmetrics

    class Counting(type(make_module())):
        def __init__(self):
            super().__init__()
            self.total, self.mean = torchmetrics.SumMetric(), torchmetrics.MeanMetric()

        def validation_step(self, x, index):
            for metric in (self.total, self.mean):
                metric(torch.ones(len(x)))
            self.log_dict({"total": self.total, "mean": self.mean}, on_step=False, on_epoch=True)

    (logged,) = make_trainer(options).validate(Counting(), verbose=False)
    return logged


def short_runs(options):
    """Lightning's ways to run less: each must end on all ranks."""
    steps = []
    for arguments in (
        {"fast_dev_run": 2},
        {"overfit_batches": 1, "max_epochs": 3},
        {"max_steps": 1},
        {"max_epochs": 0},
    ):
        trainer = make_trainer(options, **arguments)
        trainer.fit(make_module())
        steps.append(trainer.global_step)
    return steps


def built_without_memory(options):
    """`init_module(empty_init=True)` gives the values of an eager build, sharded; so does `delayed_init=True`."""
    trainer = make_trainer(options, max_epochs=0)
    with trainer.init_module(empty_init=True):
        module = make_module()
    is_empty = all(p.is_meta for p in module.parameters())
    trainer.fit(module)

    late = make_module()
    late.net = None

    def configure_model(self):
        if self.net is None:
            self.net = make_net()
            with torch._C.DisableTorchFunction():  # inside, they say that they are on the CPU
                self.is_empty = all(p.is_meta for p in self.net.parameters())

    type(late).configure_model = configure_model
    make_trainer({**options, "delayed_init": True}, max_epochs=0).fit(late)
    is_empty &= late.is_empty
    assert all(map(torch.equal, map(whole, late.net.parameters()), map(whole, module.net.parameters())))
    eager = dict(make_net().named_parameters())
    return is_empty, {name: torch.equal(whole(p), eager[name]) for name, p in module.net.named_parameters()}


def move_to_another_layout(options):
    """A module that was sharded for one layout is given to a Trainer of another."""
    module = make_module()
    make_trainer(options, max_steps=1).fit(module)
    try:
        make_trainer({"hybrid_shard_degree": 4}, max_steps=1).fit(module)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


CASES = {
    "evaluate": evaluate_then_fit,
    "logs": log_everything,
    "stop": stop_early,
    "samplers": read_by_the_default_sampler,
    "32-true": fit_in("32-true", by_strategy=False),
    "bf16-mixed": fit_in("bf16-mixed", by_strategy=False),
    "bf16-mixed by the strategy": fit_in("bf16-mixed", by_strategy=True),
    "bf16-true": fit_in("bf16-true", by_strategy=False),
    "bf16-true by the module": fit_true_bfloat16_sharded_by_the_module,
    "loss parallel": fit_loss_parallel,
    "metrics": count_with_torchmetrics,
    "short": short_runs,
    "empty": built_without_memory,
    "another layout": move_to_another_layout,
}


def run_cases(cases, layouts):
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


@pytest.fixture(params=LAYOUTS)
def of_every_rank(results, request):
    """Results of a case on every rank, in one layout after the other."""

    def found(case):
        by_rank = [by_rank[request.param, case] for by_rank in results]
        assert not isinstance(by_rank[0], str), by_rank[0]
        return by_rank

    found.layout = request.param
    found.data_degree = 4 if request.param == "hsdp 2x2" else 2
    return found


# -- what must hold ---------------------------------------------------------------------------------------------------


@pytest.mark.spawns
def test_evaluation_before_and_after_a_fit_equals_one_process(of_every_rank):
    """Evaluating first would poison the buffers, were it done under inference mode."""
    samples = make_samples()
    for found in of_every_rank("evaluate"):
        alone = make_net()
        for moment in ("before", "after"):
            wanted = float(loss_of(alone, samples).detach())
            (validated,), (tested,), predicted = found[moment]
            assert validated["val_loss"] == pytest.approx(wanted, rel=1e-5)
            assert tested["test_loss"] == pytest.approx(wanted, rel=1e-5)
            mine = alone(samples[found["rank"]["rank"] :: found["rank"]["num_replicas"]]).detach()
            torch.testing.assert_close(torch.cat(predicted), mine, rtol=1e-5, atol=1e-5)
            alone.load_state_dict(found["state"])
        # FSDP2 leaves the root gathered after an evaluation; an optimizer made then would hold dead parameters.
        assert found["losses"][0] == found["losses"][1]
        for name, value in found["undisturbed"].items():
            assert torch.equal(found["state"][name], value), name
        assert found["is sharded"]


@pytest.mark.spawns
def test_logged_values_are_reduced_over_ranks_that_read_different_data(of_every_rank):
    """Tensor peers hold the same value: counting them would double every sum."""
    values = list(range(1, of_every_rank.data_degree + 1))
    wanted = {"mean": sum(values) / len(values), "sum": sum(values), "max": max(values), "min": 1}
    for rank, found in enumerate(of_every_rank("logs")):
        for name, value in wanted.items():
            assert found[name] == found[f"step_{name}"] == value, name
        assert found["count"] == sum(values)
        assert found["integers"] == [1.0, 2.0]
        assert found["alone"] == values[rank * len(values) // 4]


@pytest.mark.spawns
def test_all_ranks_stop_when_one_has_reason_to(of_every_rank):
    for found in of_every_rank("stop"):
        assert found == {"epoch": 4, "decisions": [True, False, True, False]}


@pytest.mark.spawns
def test_lightnings_sampler_gives_each_sample_to_one_data_rank(of_every_rank):
    found = of_every_rank("samplers")
    share = 4 // of_every_rank.data_degree
    for rank, seen in enumerate(found):
        peer = found[rank // share * share]
        assert (seen["train"], seen["val"][-len(peer["val"]) :]) == (peer["train"], peer["val"])
        assert seen["batches"] * of_every_rank.data_degree * BATCH == NUM_SAMPLES
        assert seen["rank"] == {"num_replicas": of_every_rank.data_degree, "rank": rank // share}
    read = sorted(number for seen in found[::share] for number in seen["train"])
    assert read == list(range(NUM_SAMPLES))
    assert {number for seen in found for number in seen["val"]} == set(range(NUM_SAMPLES))


@pytest.mark.spawns
@pytest.mark.parametrize("case", ["bf16-mixed", "bf16-mixed by the strategy"])
def test_mixed_precision_computes_in_bfloat16_and_keeps_float32(of_every_rank, case):
    for found, exact in zip(of_every_rank(case), of_every_rank("32-true"), strict=True):
        assert found["parameters"] == found["moments"] == {"torch.float32"}
        assert (found["inside"], found["precision"]) == ("torch.bfloat16", "bf16-mixed")
        assert found["losses"] == pytest.approx(exact["losses"], rel=0.05)
        assert found["losses"] != exact["losses"]


@pytest.mark.spawns
def test_true_bfloat16_stores_it_and_spares_buffers_that_are_not_saved(of_every_rank):
    for found, exact in zip(of_every_rank("bf16-true"), of_every_rank("32-true"), strict=True):
        assert found["parameters"] == found["moments"] == {"torch.bfloat16"}
        assert (found["inside"], found["precision"], found["saved buffer"]) == (
            "torch.bfloat16",
            "bf16-true",
            "torch.bfloat16",
        )
        assert found["other buffer"] == 1.0 + 2**-12
        assert found["losses"] == pytest.approx(exact["losses"], rel=0.1)


@pytest.mark.spawns
def test_true_bfloat16_is_refused_for_a_module_that_sharded_itself_in_float32(of_every_rank):
    """It would train in float32 without a word: the plugin converts the batch, and nothing the parameters."""
    for (kind, text), dtypes, num_losses in of_every_rank("bf16-true by the module"):
        assert kind == "ConfigError", text
        for word in ("bf16-true", "net.layers.0.weight (float32)", "and 5 more", "configure_model", "bf16-mixed"):
            assert word in text
        assert dtypes == {"torch.bfloat16"}
        assert num_losses > 0


@pytest.mark.spawns
def test_full_precision_is_the_default(of_every_rank):
    for found in of_every_rank("32-true"):
        assert found["parameters"] == {"torch.float32"}
        assert (found["inside"], found["precision"]) == ("torch.float32", "32-true")


@pytest.mark.spawns
def test_a_split_loss_is_logged_and_trained_like_a_whole_one(of_every_rank):
    for found in of_every_rank("loss parallel"):
        if found is None:
            assert of_every_rank.layout == "hsdp 2x2"
            continue
        (logged, state), (logged_split, state_split) = found[False], found[True]
        assert logged_split.keys() == logged.keys() >= {"train_loss", "val_loss", "train_loss_epoch"}
        for name, value in logged.items():
            assert logged_split[name] == pytest.approx(value, rel=1e-5), name
        for name, value in state.items():
            torch.testing.assert_close(state_split[name], value, rtol=0, atol=1e-6)


@pytest.mark.spawns
def test_metric_objects_count_each_sample_once(of_every_rank):
    for found in of_every_rank("metrics"):
        assert found == {"total": NUM_SAMPLES, "mean": 1.0}


@pytest.mark.spawns
def test_short_runs_end(of_every_rank):
    for found in of_every_rank("short"):
        assert found == [2, 3, 1, 0]


@pytest.mark.spawns
def test_a_model_built_without_memory_gets_its_eager_values(of_every_rank):
    for is_empty, is_equal in of_every_rank("empty"):
        assert is_empty
        assert all(is_equal.values()), is_equal


@pytest.mark.spawns
def test_a_module_sharded_for_another_layout_is_refused(of_every_rank):
    """Its gradients would be averaged over the old mesh, and its data read by the new."""
    for kind, text in of_every_rank("another layout"):
        assert kind == "ConfigError", text
        for word in ("replicate 1 x shard 4 x tensor 1", "new module"):
            assert word in text
