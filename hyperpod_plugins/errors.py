"""Exceptions that this package raises.

    HyperPodError
    ├── ConfigError (ValueError)            the configuration is invalid
    │   ├── UnknownKeyError                 unknown configuration key
    │   ├── DegreeError                     degrees that do not fit each other or the world
    │   ├── PlanError                       a tensor-parallel plan that matches nothing or cannot be applied
    │   └── NotBuiltYetError                valid, but not supported by this release
    ├── MissingExtraError (ImportError)     an optional dependency is not installed
    ├── OutdatedExtraError (ImportError)    an optional dependency is installed in an unsuitable version
    ├── CommError (RuntimeError)
    │   ├── BackendUnavailable              no collective library serves this device
    │   ├── DeviceHung                      work queued on a device does not finish; the process is replaced
    │   └── PeerLost                        a member of a process group was lost
    ├── RecoveryError (RuntimeError)        the job cannot recover in place
    │   ├── StateLost                       no remaining rank holds some part of the training state
    │   │   └── ModelsDiffer                the state is there, but is of another model than this process built
    │   └── RecoveryTimeout                 a lost process was not replaced in time
    ├── LoopError (RuntimeError)            a hand-written loop does something that cannot be recovered
    ├── UnitsDiffer (RuntimeError)          ranks ran different sharded modules in one step
    ├── GatheredParametersWritten (RuntimeError)  the program wrote to parameters within a forward
    ├── NonFiniteError (RuntimeError)       the loss or the gradients of a step are not finite
    ├── DataError (RuntimeError)
    │   ├── DatasetDamaged                  a token file that was truncated or altered
    │   └── DatasetChanged                  a sampler state that belongs to other data
    ├── InitializationError (RuntimeError)  a module built on the meta device cannot be initialised
    └── CheckpointError (RuntimeError)
        ├── CheckpointDamaged               not a checkpoint, or an incomplete one
        └── CheckpointMismatch              a checkpoint of another model

A message says what was given, what is allowed, and what to do next, in one paragraph.
"""

import difflib
import math
import re
from collections.abc import Collection, Iterable
from numbers import Real


def format_list(names: Iterable[str], at_most: int = 5) -> str:
    """Join the first `at_most` names for a message, and say how many more there are."""
    listed = list(names)
    more = len(listed) - at_most
    return ", ".join(listed[:at_most]) + (f" and {more} more" if more > 0 else "")


def nearest_name(key: str, names: Collection[str]) -> str:
    """Return the name that is most like a key, also with its words in another order; empty if none is."""

    def likeness(name: str) -> float:
        given = (key, name), ("_".join(sorted(key.split("_"))), "_".join(sorted(name.split("_"))))
        return max(difflib.SequenceMatcher(None, *pair).ratio() for pair in given)

    nearest = max(sorted(names), key=likeness)
    return nearest if likeness(nearest) > 0.6 else ""


def name_pattern(name: str) -> str:
    """Return the name of a module with `*` for each number in it, such as `layers.*.mlp`."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def format_modules(names: Iterable[str], at_most: int = 5) -> str:
    """Like `format_list`, with one pattern, and how many it stands for, for names that differ in numbers only."""
    patterns: dict[str, list[str]] = {}
    for name in names:
        patterns.setdefault(name_pattern(name), []).append(name)
    texts = (alike[0] if len(alike) == 1 else f"{len(alike)} {pattern}" for pattern, alike in patterns.items())
    return format_list(texts, at_most)


def whole_number(name: str, value: object) -> int:
    """Return an option's value as an integer, also if it is NumPy's, or 4.0.

    Raises:
        ConfigError: it is not a whole number; `name` is for the message.
    """
    if type(value) is int:
        return value
    number = math.nan if type(value) is bool or not isinstance(value, Real) else float(value)
    if not number.is_integer():
        raise ConfigError(f"{name} must be a whole number, but is {value!r}.")
    return int(number)


class HyperPodError(Exception):
    """Base class of this package's exceptions."""


class ConfigError(HyperPodError, ValueError):
    """The configuration is invalid."""


class UnknownKeyError(ConfigError):
    """Unknown configuration key."""


class DegreeError(ConfigError):
    """Parallel degrees that do not fit each other, the model or the world size."""


class PlanError(ConfigError):
    """A tensor-parallel plan that matches nothing, or that cannot be applied to the model."""


class NotBuiltYetError(ConfigError):
    """A valid request that this release does not support yet."""


class MissingExtraError(HyperPodError, ImportError):
    """A required optional dependency is not installed."""

    def __init__(self, module: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the Python package {module!r}, which is not installed here. "
            f"Install it with: pip install {module.partition('.')[0]} (it is in the extra [{extra}] of this package)"
        )


class OutdatedExtraError(HyperPodError, ImportError):
    """An optional dependency is installed in an unsuitable version."""

    def __init__(self, package: str, version: str, needed: str, purpose: str, lacking: str = "") -> None:
        lacks = f", and it has no {lacking}" if lacking else ""
        super().__init__(
            f"{purpose} needs {package} {needed}, but version {version} is installed here{lacks}. "
            f"Install a suitable version with: pip install --upgrade '{package}{needed}'"
        )


class CommError(HyperPodError, RuntimeError):
    """Communication between ranks cannot be set up, or has failed."""


class BackendUnavailable(CommError):
    """No collective library, or not the requested one, serves this device."""


class DeviceHung(CommError):
    """Work queued on a device does not finish although its groups were aborted; the process cannot continue."""


class PeerLost(CommError):
    """A member of a process group was lost, and the collective was not inside a step."""


class RecoveryError(HyperPodError, RuntimeError):
    """The job cannot recover in place."""


class StateLost(RecoveryError):
    """No remaining rank holds some part of the training state."""


class ModelsDiffer(StateLost):
    """A training state of another model than this process has built, or has now: nothing can be loaded."""


class RecoveryTimeout(RecoveryError):
    """A lost process was not replaced in time."""


class LoopError(HyperPodError, RuntimeError):
    """A hand-written training loop does something that cannot be recovered after a fault."""


class UnitsDiffer(HyperPodError, RuntimeError):
    """Ranks ran different sharded modules in one step, so an all-gather mixed shards of different modules."""


class GatheredParametersWritten(HyperPodError, RuntimeError):
    """The program wrote to sharded parameters while they were gathered; the optimizer has not stepped."""


class NonFiniteError(HyperPodError, RuntimeError):
    """The loss or a gradient of a step is infinite or NaN; nothing was updated."""


class DataError(HyperPodError, RuntimeError):
    """Training data that cannot be used."""


class DatasetDamaged(DataError):
    """A token file that was truncated or altered, or a file of another format."""


class DatasetChanged(DataError):
    """A saved position for other data, another seed or another sample length."""


class InitializationError(HyperPodError, RuntimeError):
    """A module built on the meta device cannot be given its initial values."""


class CheckpointError(HyperPodError, RuntimeError):
    """A checkpoint that cannot be read or written."""


class CheckpointDamaged(CheckpointError):
    """The path holds no checkpoint, or an incomplete one."""


class CheckpointMismatch(CheckpointError):
    """A readable checkpoint of another model."""
