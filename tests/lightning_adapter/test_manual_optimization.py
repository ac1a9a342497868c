"""Manual optimization of modules whose parameters all lie in the root's unit: the same as a plain loop in one process.

`training_step` is the root's forward, and backward and optimizers run inside it.
"""

import pytest
import torch
from device import ACCELERATOR, devices
from torch import nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

pytestmark = pytest.mark.spawns

NUM_STEPS, WIDTH = 3, 4


def nets():
    torch.manual_seed(0)
    return nn.ModuleDict({"maker": nn.Linear(WIDTH, WIDTH), "judge": nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())})


def optimizers_of(nets):
    judge = torch.optim.SGD(nets["judge"].parameters(), lr=0.1, momentum=0.9)
    return judge, torch.optim.AdamW(nets["maker"].parameters(), lr=0.01)


def train_once(nets, optimizers, batch, backward):
    """One backward, and two optimizers that step on it."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    backward(nets["judge"](nets["maker"](batch)).square().mean())
    for optimizer in optimizers:
        optimizer.step()


def train_gan(nets, optimizers, batch, backward):
    """Each optimizer steps on a backward of its own; what is computed in between must not be used after a step."""
    maker, judge = nets["maker"], nets["judge"]
    made = maker(batch)
    losses = lambda: (judge(made.detach()) + judge(batch) - 1).square().mean(), lambda: (judge(made) - 1).abs().mean()
    for optimizer, loss in zip(optimizers, losses, strict=True):
        optimizer.zero_grad()
        backward(loss())
        with torch.no_grad():
            judge(batch)
        optimizer.step()
    with torch.no_grad():
        judge(maker(batch))


def train_twice(nets, optimizers, batch, backward):
    """Two backwards whose gradients are added."""
    train_gan(nets, optimizers, batch, backward)
    for optimizer in optimizers:
        optimizer.zero_grad()
    for part in (batch, batch.flip(1)):
        backward(nets["judge"](nets["maker"](part)).square().mean() / 2)
    for optimizer in optimizers:
        optimizer.step()


def train_frozen(nets, optimizers, batch, backward):
    """In the first two steps, a part is frozen as a program sees it: where its parameters are gathered."""
    step = nets.num_steps = getattr(nets, "num_steps", 0) + 1
    if step != 2:
        nets["maker"].requires_grad_(step == 3)
    train_once(nets, optimizers, batch, backward)


def train_toggled(nets, optimizers, batch, backward):
    """A part is frozen for one backward in each step, as Lightning's `toggle_optimizer` does it."""
    parameters = [each for group in optimizers[1].param_groups for each in group["params"]]
    for each in parameters:
        each.requires_grad_(False)
    train_once(nets, optimizers, batch, backward)
    for each in parameters:
        each.requires_grad_(True)
    train_twice(nets, optimizers, batch, backward)


PROGRAMS = {each.__name__: each for each in (train_once, train_gan, train_twice, train_frozen, train_toggled)}


def batches(num_ranks):
    """The batches of each step, `(ranks, samples, width)`."""
    return torch.randn(NUM_STEPS, num_ranks, 2, WIDTH, generator=torch.Generator().manual_seed(1))


def fit(program, shard_degree, shards_itself):
    import lightning.pytorch as pl

    from hyperpod_plugins.lightning import HyperPodStrategy

    class Module(pl.LightningModule):
        automatic_optimization = False

        def __init__(self):
            super().__init__()
            self.nets = nets()

        def configure_model(self):
            if shards_itself:
                fully_shard(self, mesh=self.device_mesh["replicate", "shard"])
                register_fsdp_forward_method(self, "training_step")

        def training_step(self, batch, index):
            mine = batch[0, self.global_rank]
            PROGRAMS[program](self.nets, self.optimizers(), mine, self.manual_backward)

        def configure_optimizers(self):
            return optimizers_of(self.nets)

        def train_dataloader(self):
            return torch.utils.data.DataLoader(batches(2))

    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    quiet["use_distributed_sampler"] = False
    strategy = HyperPodStrategy(hybrid_shard_degree=shard_degree)
    trainer = pl.Trainer(strategy=strategy, accelerator=ACCELERATOR, devices=devices(2), max_epochs=1, **quiet)
    module = Module()
    trainer.fit(module)
    return {name: value.full_tensor().detach().cpu() for name, value in module.nets.named_parameters()}


LAYOUTS = {"shards": (2, False), "replicas": (1, False), "shards itself": (2, True)}
"""Shard degree, and whether the module applies `fully_shard` to itself."""


def fit_all():
    import warnings

    warnings.filterwarnings("ignore")
    return {(program, name): fit(program, *layout) for program in PROGRAMS for name, layout in LAYOUTS.items()}


@pytest.fixture(scope="module")
def fitted(run_ranks):
    return run_ranks(fit_all, world_size=2)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_weights_are_those_of_one_process(fitted, program, layout):
    plain = nets()
    optimizers = optimizers_of(plain)
    for batch in batches(2):
        PROGRAMS[program](plain, optimizers, batch.flatten(0, 1), lambda loss: loss.backward())
    for rank in (0, 1):
        for name, value in plain.named_parameters():
            torch.testing.assert_close(fitted[rank][program, layout][name], value.detach())
