"""Shard degree 1: units compute with the memory of their shards, also after these have moved."""

import pytest
import torch
import torch.distributed as dist
from device import DEVICE
from torch import nn

WIDTH, NUM_STEPS = 4, 12


class Model(nn.Module):
    """Notes whether its parameters lie where their shards are, in each forward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.shards, self.is_in_place = {}, []

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        self.is_in_place += [self.scale.data_ptr() == self.shards["scale"]]
        return x * self.scale

    def find_shards(self):
        self.shards = {name: value.to_local().data_ptr() for name, value in self.named_parameters()}

    def watch(self):
        for name, layer in self.layers.named_children():

            def note(layer, _, name=name):
                self.is_in_place += [layer.weight.data_ptr() == self.shards[f"layers.{name}.weight"]]

            layer.register_forward_pre_hook(note)


def batch_of(step, like):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)).to(like)


def train(model, share, steps, kind="plain"):
    """Losses and parameters of some steps."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.05), []
    for step in steps:
        batch = batch_of(step, next(model.parameters()))[share]
        loss = model(batch).square().mean()
        if kind == "second forward":  # the root stays gathered in a forward after which no backward follows
            model(batch)
        loss.backward()
        if kind == "step while gathered":
            model(batch)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def whole(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def trained(precision):
    from torch.distributed.tensor import DTensor

    from hyperpod_plugins.parallel import ParallelConfig, build_mesh, parallelize

    if not dist.is_initialized():
        dist.init_process_group("hyperpod")
    rank, told = dist.get_rank(), {}
    share = slice(2 * rank, 2 * rank + 2)
    config = ParallelConfig(hybrid_shard_degree=1, precision=precision)
    for kind in ("plain", "second forward", "step while gathered", "assigned", "moved"):
        model, one = (Model().to(DEVICE) for _ in range(2))
        model = parallelize(model, build_mesh(config.topology(2), DEVICE), config)
        model.watch()
        model.find_shards()
        for part in (range(3), range(3, NUM_STEPS)):
            train(model, share, part, kind)
            one.shards = {"scale": 0}
            train(one, slice(0, 4), part)
            if part.start == 0 and kind == "assigned":
                model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
            if part.start == 0 and kind == "moved":
                model._apply(torch.clone)
            model.find_shards()
        found = {k: v.to_local() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()}
        far = max(float((found[name] - value).abs().max()) for name, value in one.state_dict().items())
        told[kind] = set(model.is_in_place), len(model.is_in_place), far
    return told


@pytest.mark.spawns
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_parameters_are_gathered_in_place_and_train_as_in_one_process(run_ranks, precision):
    for told in run_ranks(trained, precision, world_size=2):
        for kind, (is_in_place, number, far) in told.items():
            assert is_in_place == {precision == "32-true"}, kind
            assert number >= 3 * NUM_STEPS, kind
            assert far < (1e-6 if precision == "32-true" else 0.1), kind


def test_one_tensor_is_returned_twice_and_never_to_another_pair():
    from hyperpod_plugins.parallel.whole_shards import _OneBuffer

    comm, of = _OneBuffer(), {"dtype": torch.float32, "device": torch.device("cpu")}
    given = comm.allocate((8,), **of)
    assert comm.allocate((8,), **of) is given
    other = comm.allocate((8,), **of)
    assert other is not given
    del other  # that pair was interrupted
    third = comm.allocate((8,), **of)
    assert third is not given
    assert comm.allocate((4,), **of).numel() == 4
