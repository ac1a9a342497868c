"""What optimizers hold beside parameters and their state: learning rates, and all else in their groups.

A scheduler's state does not hold them, and a scheduler goes on from what it finds. A rank that was interrupted before
(or after) a scheduler's step has others than the rank from which all go on.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.parallel.checkpoint_state import plain


def make_plain(optimizers: Iterable[Optimizer]) -> None:
    """Let hyperparameters be Python's numbers where they are NumPy's, which replacements and checkpoints can not read.

    Raises:
        ConfigError: one has fewer bits than Python's, so that a schedule would go on from it with other roundings.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for key, value in group.items():
                if isinstance(value, np.floating) and not isinstance(value, float):
                    raise ConfigError(
                        f"{key} of {type(optimizer).__name__} is a {type(value).__name__} of NumPy. Give it as "
                        f"float(...), also to the schedule: a process that replaces a lost one goes on from a float."
                    )
                if isinstance(value, np.generic):
                    group[key] = value.item()


def hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """What the groups of an optimizer hold beside parameters."""
    return [
        {key: plain(value) for key, value in group.items() if key not in ("params", "param_names")}
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
