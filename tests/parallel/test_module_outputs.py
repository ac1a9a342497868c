"""Forwards that return objects of any class, or nothing: the result of one process, or refused in the first step."""

from collections import UserDict, deque
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from device import DEVICE
from torch import nn

from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.parallel.module_outputs import _registering, hidden_tensors

WIDTH, NUM_STEPS = 4, 3


class Slotted:
    __slots__ = ("extra", "value")

    def __init__(self, value):
        self.value = value


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        found = torch.tanh(self.layer(x))
        return Slotted({"all": [found]}) if self.kind == "of blocks" else found


class Net(nn.Module):
    """Returns its loss in a way that `kind` says; has blocks, which are units of their own, or none."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(1)
        self.kind = kind
        self.layers = nn.ModuleList(Block(kind) for _ in range(2 if kind == "of blocks" else 0))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            x = x.value["all"][0] if isinstance(x, Slotted) else x
        loss = self.head(x).square().mean()
        if self.kind == "kept elsewhere":
            self.result = loss
            return None
        return SimpleNamespace(parts=[Slotted(loss)])


def loss_of(model, batch):
    output = model(batch)
    return model.result if output is None else output.parts[0].value


def batches():
    return torch.randn(NUM_STEPS, 4, WIDTH, generator=torch.Generator().manual_seed(2))


def train(model, share):
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for batch in batches():
        loss = loss_of(model, batch[share])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def step_within_backward(model):
    """Have SGD step on each parameter as soon as backward has its gradient."""
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.5)

        def step(parameter, optimizer=optimizer):
            optimizer.step()
            parameter.grad = None

        parameter.register_post_accumulate_grad_hook(step)


def train_within_backward(model, share):
    step_within_backward(model)
    losses = []
    for batch in batches():
        loss = loss_of(model, batch[share])
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses)


def train_all():
    from hyperpod_plugins.parallel import ParallelConfig, build_mesh, parallelize

    dist.init_process_group("hyperpod")
    share, results = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2), {}
    for kind in ("of the root", "of blocks", "kept elsewhere"):
        for degree in (1, 2):
            config = ParallelConfig(hybrid_shard_degree=degree, block_classes=("Block",) if kind == "of blocks" else ())
            model = parallelize(Net(kind), build_mesh(config.topology(2), DEVICE), config)
            try:
                losses = train(model, share)
            except ConfigError as error:
                results[kind, degree] = str(error)
                continue
            dist.all_reduce(losses)
            results[kind, degree] = losses / 2
    config = ParallelConfig(hybrid_shard_degree=2)
    losses = train_within_backward(
        parallelize(Net("of the root"), build_mesh(config.topology(2), DEVICE), config), share
    )
    dist.all_reduce(losses)
    results["of the root", "within backward"] = losses / 2
    return results


@pytest.mark.spawns
def test_outputs_that_torch_does_not_look_into(run_ranks):
    for results in run_ranks(train_all, world_size=2, timeout_s=90):
        for (kind, degree), found in results.items():
            if kind == "kept elsewhere":
                assert "gradients for parameters of the root that FSDP2 has not reduced" in found, (kind, degree, found)
            else:
                torch.testing.assert_close(found, train(Net(kind), slice(None)), rtol=1e-6, atol=0)


def test_tensors_in_objects():
    leaf = torch.ones(1, requires_grad=True)
    tensors = [2 * leaf for _ in range(9)]
    slotted = Slotted(tensors[1])
    holder = SimpleNamespace(first=tensors[0], second=[{"key": slotted}], model=nn.Linear(1, 1), kind=Slotted)
    holder.itself, holder.leaf, holder.texts = holder, leaf, ["text"] * 10_000

    class Strange(dict):
        def __dir__(self):
            raise RuntimeError("no dir")

        def __getattr__(self, name):
            raise RuntimeError(f"no {name}")

    strange = Strange(plain=tensors[7])
    vars(strange)["loss"] = tensors[4]
    others = UserDict(loss=tensors[2]), MappingProxyType({"loss": tensors[3]}), {tensors[5]}, deque([tensors[6]])
    found = hidden_tensors((tensors[8], [holder], torch.ones(1), "text", None, *others, strange))
    assert {id(each) for each in found} == {id(each) for each in tensors[:7]}


def test_an_evaluation_registers_nothing():
    held = SimpleNamespace(weight=nn.Parameter(torch.ones(1)), loss=torch.ones(1, requires_grad=True) * 2)
    state = SimpleNamespace(_pre_backward=lambda gradient: gradient)
    register = _registering(state, lambda output: output)
    with torch.no_grad():
        register(held)
    assert held.loss._backward_hooks is None
    register(held)
    assert len(held.loss._backward_hooks) == 1
    assert held.weight._backward_hooks is None
