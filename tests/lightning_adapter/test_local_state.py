"""What a module has of one rank alone, put back after a restart past the fit in which it came about."""

import torch
from torch import nn
from torchmetrics import MeanMetric

from hyperpod_plugins.lightning.local_state import load_local_state
from hyperpod_plugins.recovery.local_state import BUFFERS, BufferStates


def test_buffers_and_metrics_are_put_back_where_there_are_any():
    module, other = (nn.ModuleDict({"norm": nn.BatchNorm1d(2), "mean": MeanMetric()}) for _ in range(2))
    module["norm"](torch.randn(3, 2, generator=torch.Generator().manual_seed(0)))
    load_local_state(other, {BUFFERS: BufferStates(module).state_dict()})
    assert torch.equal(other["norm"].running_mean, module["norm"].running_mean)
    before = {name: value.clone() for name, value in other.named_buffers()}
    load_local_state(other, {})
    assert all(torch.equal(value, before[name]) for name, value in other.named_buffers())
