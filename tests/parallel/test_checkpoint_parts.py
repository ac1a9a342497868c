"""A checkpoint from parts that one process keeps of several ranks."""

import pytest
import torch
from torch import nn

from hyperpod_plugins.errors import CheckpointError
from hyperpod_plugins.parallel import CheckpointWriter, load_checkpoint
from hyperpod_plugins.parallel.checkpoint.state import (
    StateParts,
    TensorPart,
    describe_optimizer,
    model_tensors,
    optimizer_tensors,
)


def trained():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def halves(tensors):
    """The parts that two ranks have: halves, and of what cannot be cut the whole on both."""
    found = []
    for name, tensor in tensors.items():
        size, middle = tuple(tensor.shape), len(tensor) // 2 if tensor.dim() else 0
        cuts = [(0, tensor[:middle]), (middle, tensor[middle:])] if middle else [(0, tensor), (0, tensor)]
        rest = (0,) * max(0, tensor.dim() - 1)
        found += [
            TensorPart(name=name, size=size, offset=(begin, *rest) if size else (), values=values.clone())
            for begin, values in cuts
        ]
    return found


def test_parts_make_up_a_checkpoint_like_any_other(tmp_path):
    model, optimizer = trained()
    parts = StateParts(
        model=halves(model_tensors(model)),
        optimizers=[halves(optimizer_tensors(model, optimizer))],
        descriptions=[describe_optimizer(model, optimizer)],
    )
    writer = CheckpointWriter()
    writer.save_parts(tmp_path / "rescued", parts, model=model, extra={"step": 2})
    writer.close()
    wanted = {name: tensor.clone() for name, tensor in model_tensors(model).items()}
    moments = {name: tensor.clone() for name, tensor in optimizer_tensors(model, optimizer).items()}
    torch.manual_seed(1)
    other = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    fresh = torch.optim.AdamW(other.parameters(), lr=0.5)
    assert load_checkpoint(tmp_path / "rescued", model=other, optimizers=[fresh]) == {"step": 2}
    for name, tensor in model_tensors(other).items():
        torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=0)
    for name, tensor in optimizer_tensors(other, fresh).items():
        torch.testing.assert_close(tensor, moments[name], rtol=0, atol=0)
    assert fresh.param_groups[0]["lr"] == 0.1


def test_a_part_that_nobody_has(tmp_path):
    model, _ = trained()
    parts = halves(model_tensors(model))
    writer = CheckpointWriter()
    with pytest.raises(CheckpointError, match="was not written"):
        writer.save_parts(tmp_path / "torn", StateParts(model=parts[:-1]), model=model, extra={})
    writer.close()
    assert not (tmp_path / "torn").exists()
