"""Writes to parameters while FSDP2 has gathered them: refused by name, before the optimizer steps."""

import pytest
import torch
import torch.distributed as dist
from device import DEVICE
from torch import nn

from hyperpod_plugins.errors import GatheredParametersWritten

WIDTH = 4


class Writing(nn.Module):
    """A model whose forward calls `write(model)` after its first layer, on some ranks and in some steps."""

    def __init__(self, write, *, from_step=0, ranks=(0, 1)):
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(8, WIDTH, max_norm=0.1 if write == "max_norm" else None)
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(()))
        self.write, self.step, self.from_step, self.ranks = write, 0, from_step, ranks

    def forward(self, tokens):
        self.count.add_(1)  # buffers may be written
        x = self.block(self.table(tokens))
        if self.step >= self.from_step and dist.get_rank() in self.ranks and self.write in WRITES:
            WRITES[self.write](self)
        return self.head(x)


def clamp(model):
    with torch.no_grad():
        model.head.weight.clamp_(-0.1, 0.1)


def clamp_data(model):
    model.head.weight.data.clamp_(-0.1, 0.1)


def assign_data(model):
    model.head.weight.data = model.head.weight.data * 0.9


def replace(model):
    model.head.weight = nn.Parameter(model.head.weight.detach() * 0.9)


WRITES = {"clamp": clamp, "clamp_data": clamp_data, "assign_data": assign_data, "replace": replace}
REFUSED = {
    "max_norm": ({"write": "max_norm"}, "table.weight"),
    **{kind: ({"write": kind}, "head.weight") for kind in WRITES},
    "one rank, later": ({"write": "clamp", "from_step": 20, "ranks": (1,)}, "head.weight"),
    "an assignment, later": ({"write": "assign_data", "from_step": 20}, "head.weight"),
}


def refusals(precision):
    from hyperpod_plugins.parallel import ParallelConfig, build_mesh, parallelize

    if not dist.is_initialized():
        dist.init_process_group("hyperpod")
    config = ParallelConfig(block_classes=("Sequential",), precision=precision)
    told = {}
    for kind, (options, _) in {**REFUSED, "none": ({"write": "none"}, "")}.items():
        model = parallelize(Writing(**options), build_mesh(config.topology(2), DEVICE), config)
        optimizer, before = torch.optim.SGD(model.parameters(), lr=0.1), {}
        try:
            for model.step in range(24):
                before = {name: value.detach().clone() for name, value in model.named_parameters()}
                model(torch.arange(8, device=DEVICE)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():  # between the steps of a loop, writes are kept
                    model.head.bias.clamp_(-0.1, 0.1)
        except GatheredParametersWritten as error:
            is_kept = all(
                torch.equal(value.to_local(), before[name].to_local()) for name, value in model.named_parameters()
            )
            told[kind] = model.step, is_kept, str(error)
    return told


@pytest.mark.spawns
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_write_in_a_forward_is_refused_by_name_before_the_optimizer_steps(run_ranks, precision):
    for told in run_ranks(refusals, precision, world_size=2):
        assert told.keys() == REFUSED.keys()
        for kind, (options, name) in REFUSED.items():
            step, is_kept, text = told[kind]
            assert (step, is_kept) == (options.get("from_step", 0), True), kind
            assert f"in forward or training_step: {name}." in text, (kind, text)
