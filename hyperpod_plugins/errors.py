"""Everything this package raises on purpose.

    HyperPodError
    ├── ConfigError (ValueError)            the user asked for something impossible
    │   ├── UnknownKeyError                 a configuration key nobody knows
    │   ├── DegreeError                     degrees that do not fit each other or the world
    │   ├── PlanError                       a tensor plan that matches nothing, or cannot be followed
    │   └── NotBuiltYetError                valid, known, and not part of this release
    ├── MissingExtraError (ImportError)     an optional dependency is not installed
    ├── OutdatedExtraError (ImportError)    an optional dependency is installed in a version that does not fit
    ├── CommError (RuntimeError)
    │   ├── BackendUnavailable              no collective library serves this device
    │   ├── DeviceHung                      a device does not end what was queued on it; its process is replaced
    │   └── PeerLost                        a member of a process group is gone
    ├── RecoveryError (RuntimeError)        the job cannot repair itself in place
    │   ├── StateLost                       no rank that is left holds a part of the training state
    │   └── RecoveryTimeout                 a lost process was not replaced in time
    ├── LoopError (RuntimeError)            a loop written by hand does what could not be repaired
    ├── UnitsDiffer (RuntimeError)          ranks ran different sharded modules in one step
    ├── NonFiniteError (RuntimeError)       the loss or the gradients of a step are not finite
    ├── DataError (RuntimeError)
    │   ├── DatasetDamaged                  a token file that was cut short or altered
    │   └── DatasetChanged                  a sampler state that belongs to other data
    ├── InitializationError (RuntimeError)  a module that was built on the meta device cannot be filled
    └── CheckpointError (RuntimeError)
        ├── CheckpointDamaged               not a checkpoint, or an interrupted one
        └── CheckpointMismatch              a checkpoint of another model

A message says what was given, what is allowed, and what to do next, in one paragraph.
"""

from collections.abc import Iterable


def few(names: Iterable[str], at_most: int = 5) -> str:
    """The first names, and how many more there are, for a message."""
    listed = list(names)
    more = len(listed) - at_most
    return ", ".join(listed[:at_most]) + (f" and {more} more" if more > 0 else "")


class HyperPodError(Exception):
    """Root of every error this package raises on purpose."""


class ConfigError(HyperPodError, ValueError):
    """The configuration asks for something impossible."""


class UnknownKeyError(ConfigError):
    """A configuration key nobody knows."""


class DegreeError(ConfigError):
    """Parallel degrees that do not fit each other, the model or the world size."""


class PlanError(ConfigError):
    """A tensor-parallel plan that matches nothing, or that the model cannot follow."""


class NotBuiltYetError(ConfigError):
    """A valid and known request that this release does not serve yet."""


class MissingExtraError(HyperPodError, ImportError):
    """An optional dependency is needed and not installed."""

    def __init__(self, module: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the Python package {module!r}, which is not installed here. "
            f"Install it with: pip install {module.partition('.')[0]} (it is in the extra [{extra}] of this package)"
        )


class OutdatedExtraError(HyperPodError, ImportError):
    """An optional dependency is installed in a version that does not fit."""

    def __init__(self, package: str, version: str, needed: str, purpose: str, lacking: str = "") -> None:
        lacks = f", and it has no {lacking}" if lacking else ""
        super().__init__(
            f"{purpose} needs {package} {needed}, but version {version} is installed here{lacks}. "
            f"Install one that fits with: pip install --upgrade '{package}{needed}'"
        )


class CommError(HyperPodError, RuntimeError):
    """Communication between ranks cannot be set up or has broken."""


class BackendUnavailable(CommError):
    """No collective library, or not the one asked for, serves this device."""


class DeviceHung(CommError):
    """A device does not end what was queued on it, though its groups were aborted: the process cannot go on."""


class PeerLost(CommError):
    """A member of a process group is gone, and the collective was not inside a step."""


class RecoveryError(HyperPodError, RuntimeError):
    """The job cannot repair itself in place."""


class StateLost(RecoveryError):
    """No rank that is left holds a part of the training state."""


class RecoveryTimeout(RecoveryError):
    """A lost process was not replaced in time."""


class LoopError(HyperPodError, RuntimeError):
    """A loop written by hand does something that could not be repaired after a fault."""


class UnitsDiffer(HyperPodError, RuntimeError):
    """Ranks ran different sharded modules in one step, so that they gathered shards of different ones as one."""


class NonFiniteError(HyperPodError, RuntimeError):
    """The loss or the gradient norm of a step is infinite or not a number; nothing was updated."""


class DataError(HyperPodError, RuntimeError):
    """Training data that cannot be used as it is."""


class DatasetDamaged(DataError):
    """A token file that was cut short, altered, or is none of ours."""


class DatasetChanged(DataError):
    """A saved position that belongs to other data, another seed or another sample length."""


class InitializationError(HyperPodError, RuntimeError):
    """A module that was built on the meta device cannot be given its initial values."""


class CheckpointError(HyperPodError, RuntimeError):
    """A checkpoint that cannot be read or written."""


class CheckpointDamaged(CheckpointError):
    """The path holds no checkpoint, or one whose writing was interrupted."""


class CheckpointMismatch(CheckpointError):
    """A readable checkpoint of another model."""
