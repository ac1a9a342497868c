"""Propagate one rank's failure to all ranks, so that none waits in the next collective for the rank that failed."""

from collections.abc import Generator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from hyperpod_plugins.comm import group_health
from hyperpod_plugins.errors import CheckpointError, CommError


@contextmanager
def raise_on_all_ranks(
    failure: str, group: dist.ProcessGroup | None, *, expected: tuple[type[BaseException], ...] = ()
) -> Generator[None]:
    """Raise on all ranks of the group if the body fails on any of them. All of them must enter this context.

    Args:
        failure: what failed and what that means; the reason is appended to it.
        group: ranks that must agree, or None for this process alone.
        expected: errors to report to the other ranks, besides `CheckpointError` and `OSError`. Anything else is a
            bug, which all ranks hit alike, or a lost peer, which the caller's recovery handles.

    Raises:
        CheckpointError: a rank failed or was lost.
    """
    problem: BaseException | None = None
    try:
        yield
    except CommError:
        raise
    except (CheckpointError, OSError, *expected) as error:
        problem = error
    try:
        is_failed = any_rank(problem is not None, group)
    except CommError:
        raise
    except RuntimeError as error:
        raise CheckpointError(f"{failure}: a rank was lost ({problem or error})") from (problem or error)
    if is_failed:
        if isinstance(problem, CheckpointError):
            raise problem
        raise CheckpointError(f"{failure}: {problem or 'another rank failed (see its log)'}") from problem


def any_rank(is_so: bool, group: dist.ProcessGroup | None) -> bool:
    """Whether `is_so` is True on any rank of the group. A collective: no rank returns before all have called it."""
    if group is None:
        return is_so
    flag = torch.tensor(int(is_so), device=device_of(group))
    with group_health.checks_host_read():
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
        return bool(flag)


def default_group() -> dist.ProcessGroup | None:
    """Return the default process group, or None if `torch.distributed` is not initialized."""
    return dist.group.WORLD if dist.is_initialized() else None


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Return a device that the group can communicate from: the CPU if one of its backends supports it."""
    devices = group._device_types  # pyright: ignore[reportPrivateUsage]
    return devices[0] if torch.device("cpu") not in devices else torch.device("cpu")
