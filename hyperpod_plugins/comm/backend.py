"""Which library moves the bytes of a group: what the user may ask for, and what serves it."""

import warnings
from functools import cache

from hyperpod_plugins.comm.roles import CommOptions, TransportName
from hyperpod_plugins.comm.smddp import Smddp
from hyperpod_plugins.comm.transports import Gloo, Nccl, Transport
from hyperpod_plugins.env import WorkerEnv
from hyperpod_plugins.errors import BackendUnavailable

SMDDP = Smddp()
IN_HOST_MEMORY: Transport = Gloo()
AUTOMATIC: tuple[Transport, ...] = (Nccl(), IN_HOST_MEMORY)
TRANSPORTS: tuple[Transport, ...] = (SMDDP, *AUTOMATIC)


def choose_transport(device_type: str, preferred: TransportName = "auto", *, strict: bool = False) -> Transport:
    """Return the library asked for, or the first of `AUTOMATIC` that serves the device.

    smddp does what nccl does, only faster: a job that asks for it and cannot have it goes on without, after one
    warning. A job that asks for nccl or gloo means it.

    Args:
        device_type: `cpu` or `cuda`.
        preferred: A name, or `auto`.
        strict: Raise also where smddp was asked for.

    Raises:
        BackendUnavailable: the one asked for, or every one, refuses; the message has all reasons.
    """
    candidates = [transport for transport in AUTOMATIC if transport.why_not(device_type) is None]
    if preferred == "auto" and candidates:
        return candidates[0]
    asked = [transport for transport in TRANSPORTS if transport.name == preferred]
    for transport in asked:  # smddp is imported here, so only for those who ask for it
        reason = transport.why_not(device_type)
        if reason is None:
            return transport
        if transport is SMDDP and not strict and candidates:
            substitute = candidates[0]
            _warn_once(f"smddp was asked for, but {reason}. Collectives use {substitute.name} instead.")
            return substitute
    raise BackendUnavailable(_refused(device_type, preferred))


def transport_for_group(device_type: str, options: CommOptions, group_size: int, world_size: int) -> Transport:
    """Like `choose_transport`, for a group of which the chosen library must also serve the size.

    Raises:
        BackendUnavailable: see `choose_transport`.
    """
    chosen = choose_transport(device_type, options.transport, strict=options.strict)
    if chosen.why_not_group(group_size, world_size) is None:
        return chosen
    return choose_transport(device_type)


def _refused(device_type: str, preferred: str) -> str:
    refusals = {transport.name: transport.why_not(device_type) for transport in TRANSPORTS}
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals.items() if reason is not None)
    usable = [name for name, reason in refusals.items() if reason is None]
    advice = f"Ask for {' or '.join(usable)}, or for 'auto'" if usable else "Install a torch that has gloo or nccl"
    return f"transport {preferred!r} cannot serve {device_type} tensors here ({reasons}). {advice}."


@cache
def _warn_once(message: str) -> None:
    """Once in a job: on the first rank."""
    if WorkerEnv.from_environ().global_rank == 0:
        warnings.warn(message, UserWarning, stacklevel=3)
