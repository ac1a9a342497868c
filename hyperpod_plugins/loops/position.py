"""Where a loop stands, as a process needs it that comes in: all but the tensors of model and optimizers."""

import io
import pickle
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import torch

from hyperpod_plugins.errors import ConfigError, few


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A place in a loop: before a step, or in what its body does after the step was committed."""

    committed: int = 0
    """Steps that have been committed."""
    in_tail: bool = False
    """Whether the body of the last one has not come to its end."""
    epoch: int = 0
    """Epoch of the last one."""
    ends_epoch: bool = False
    """Whether it was the last of its epoch."""
    result: Any = None
    """What the last one returned; kept as long as its body goes on."""
    loader: dict[str, Any] = field(default_factory=dict[str, Any])
    """State of the loader after the committed steps; empty before the first."""
    schedulers: tuple[dict[str, Any], ...] = ()
    """State of each scheduler."""
    groups: tuple[list[dict[str, Any]], ...] = ()
    """Of each optimizer, the hyperparameters of its groups."""
    state: dict[str, Any] = field(default_factory=dict[str, Any])
    """What the program keeps in `Session.state`."""
    local: dict[str, Any] = field(default_factory=dict[str, Any])
    """What one rank has alone, in a snapshot of it."""

    def to_bytes(self) -> bytes:
        """For another process, or a checkpoint."""
        buffer = io.BytesIO()
        torch.save(asdict(self), buffer)
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Inverse of `to_bytes`; only tensors, plain containers, numbers and strings are read."""
        return cls(**torch.load(io.BytesIO(data), weights_only=True))


def refuse_unreadable(position: Position) -> None:
    """Refuse what a replacement could not read, before one is needed.

    Raises:
        ConfigError: naming what it is.
    """
    values = {f"session.state[{name!r}]": value for name, value in position.state.items()}
    values |= {f"the state of scheduler {index}": value for index, value in enumerate(position.schedulers)}
    bad = [name for name, value in values.items() if not _is_readable(value)]
    if bad:
        raise ConfigError(
            f"{few(bad)} holds Python objects that a process which replaces a lost one would have to unpickle, and "
            "that runs code. Keep tensors, plain containers, numbers and strings there."
        )


def _is_readable(value: Any) -> bool:
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError):  # of what has no name to find it
        return False
    return True
