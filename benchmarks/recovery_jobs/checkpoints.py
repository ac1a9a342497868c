"""Checkpoints as a careful user writes them: to a temporary name, then renamed, by one rank."""

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.recovery_jobs.events import Setting


def save_checkpoint(
    setting: Setting, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, *, is_writer: bool
) -> None:
    """Write a checkpoint where one is due after `step` steps; the others wait."""
    if step % setting.checkpoint_every or step >= setting.steps:
        return
    if is_writer:
        unfinished = setting.checkpoint.with_suffix(".part")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, unfinished)
        unfinished.replace(setting.checkpoint)
    dist.barrier()


def load_checkpoint(setting: Setting, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the last checkpoint, if there is one; the number of steps it has seen."""
    if not setting.checkpoint.exists():
        return 0
    saved = torch.load(setting.checkpoint, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return saved["step"]
