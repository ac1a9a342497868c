"""What optimizers hold beside parameters and their state: learning rates, and all else in their groups.

A scheduler's state does not hold them, and a scheduler goes on from what it finds. A rank that was interrupted before
(or after) a scheduler's step has others than the rank from which all go on.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer


def hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """What the groups of an optimizer hold beside parameters."""
    return [
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]


def give_hyperparameters(groups: Sequence[list[dict[str, Any]]], optimizers: Sequence[Optimizer]) -> None:
    """Inverse of `hyperparameters`, for several optimizers. Tensors are filled: compiled code holds on to them."""
    for optimizer, saved in zip(optimizers, groups, strict=False):
        for group, values in zip(optimizer.param_groups, saved, strict=True):
            for key, value in values.items():
                present = group.get(key)
                if isinstance(present, torch.Tensor):
                    present.copy_(torch.as_tensor(value))
                else:
                    group[key] = value
