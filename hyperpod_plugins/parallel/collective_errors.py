"""Failures that all ranks hear of, so that none waits for the one that failed in the next collective."""

from collections.abc import Generator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from hyperpod_plugins.errors import CheckpointError, CommError


@contextmanager
def agreeing(
    failure: str, group: dist.ProcessGroup | None, *, expected: tuple[type[BaseException], ...] = ()
) -> Generator[None]:
    """Where one rank fails inside, let all ranks of the group raise. All of them must come here.

    Args:
        failure: what has failed then, and what it means; the reason is put behind it.
        group: who must agree, or None for this process alone.
        expected: errors to tell the others of, besides `CheckpointError` and `OSError`. Anything else is a defect of
            a program, which all ranks have alike, or a lost peer, which is the business of whoever recovers from it.

    Raises:
        CheckpointError: some rank failed, or was lost.
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
    """Whether something is so on any rank of the group. Nobody returns before all have asked."""
    if group is None:
        return is_so
    flag = torch.tensor(int(is_so), device=device_of(group))
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
    return bool(flag)


def default_group() -> dist.ProcessGroup | None:
    """The group of all ranks, or None where there is only this process."""
    return dist.group.WORLD if dist.is_initialized() else None


def device_of(group: dist.ProcessGroup) -> torch.device:
    """A device that the group can communicate from: nccl alone cannot from the CPU."""
    devices = group._device_types  # pyright: ignore[reportPrivateUsage]
    return devices[0] if torch.device("cpu") not in devices else torch.device("cpu")
