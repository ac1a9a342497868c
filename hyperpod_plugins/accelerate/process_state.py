"""Join the process group of the backend `hyperpod`, and set Accelerate's process state accordingly.

[Note: Accelerate and FSDP2 on CPU] Accelerate 1.15 enters its FSDP2 branch only for a list of device types that does
not include CPU: on CPU, `Accelerator(cpu=True, fsdp_plugin=...)` silently trains with DDP, and without `cpu=True`
every process is rank 0 of 1. Its process state (`PartialState`) is therefore created first, from our process group,
with a type that leads into that branch. `AcceleratorState` then changes the type to FSDP, as it does on GPUs. No part
of Accelerate is replaced, and programs that create no Accelerator through the plugin are not affected.
"""

# Accelerate has no public way to set its process state.
# pyright: reportPrivateUsage=false

import warnings
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist

from hyperpod_plugins.accelerate.compat import AcceleratorState, DistributedType, PartialState
from hyperpod_plugins.comm import CommOptions, join_world
from hyperpod_plugins.comm.groups import has_joined
from hyperpod_plugins.env import WorkerEnv, accelerate_variables, choose_cpu
from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.parallel import Topology


class ResizableJob(Protocol):
    """A job that may change its size while it runs, such as a `Session`."""

    @property
    def topology(self) -> Topology:
        """Degrees and rank arithmetic of the present world."""
        ...

    @property
    def has_recovery(self) -> bool:
        """Whether lost processes are to be replaced."""
        ...

    def restores(self, value: object) -> bool:
        """Whether a replacement gets the state of an object."""
        ...

    def when_moved(self, listener: Callable[[], object]) -> None:
        """Call `listener()` each time the world changes."""
        ...

    def when_body_begins(self, listener: Callable[[], object]) -> None:
        """Call `listener()` as the body of a step begins, or begins again."""
        ...

    def reach(self, phase: str) -> None:
        """Let a fault happen in a phase of a body, in a rehearsed job."""
        ...


def uses_cpu() -> bool:
    """Whether training runs on CPU: there is no GPU, or `accelerate launch` was told not to use GPUs."""
    asked = accelerate_variables().get("ACCELERATE_USE_CPU", "false").lower()
    return asked in ("true", "1", "yes") or not torch.cuda.is_available()


def use_cpu() -> None:
    """Train on CPU also where there are GPUs, as `accelerate launch --cpu` does.

    Raises:
        ConfigError: this process has joined its group for a GPU.
    """
    if uses_cpu():
        return
    if has_joined():
        raise ConfigError(
            "accelerator(cpu=True) comes too late: this process has joined its process group with a GPU, as a Session "
            "does. Hide the GPUs from all processes: set CUDA_VISIBLE_DEVICES to an empty string."
        )
    choose_cpu()


def join(comm: CommOptions, timeout_s: float) -> None:
    """Join the process group with the backend `hyperpod`, unless it has been joined; a single process forms one, too.

    Raises:
        ConfigError: the process already belongs to a group with another backend.
    """
    if has_joined():
        return
    env = WorkerEnv.from_environ()
    if (
        env.global_rank == 0
        and "ACCELERATE_MIXED_PRECISION" in accelerate_variables()
        and not torch.cuda.is_available()
    ):
        warnings.warn(
            "accelerate launch has started this job, and there is no GPU here: it trains on CPU, with gloo. The layout "
            "and the precision are those asked for; the speed says nothing.",
            stacklevel=2,
        )
    if not uses_cpu():
        torch.cuda.set_device(env.local_rank % torch.cuda.device_count())
    join_world(comm, rank=env.global_rank, world_size=env.world_size, timeout_s=timeout_s)


def update_process_state() -> None:
    """Update rank and world size in Accelerate's process state after the job has changed its size."""
    for state in (PartialState._shared_state, AcceleratorState._shared_state):
        state["num_processes"], state["process_index"] = dist.get_world_size(), dist.get_rank()


def set_process_state() -> None:
    """Set Accelerate's process state from the process group.

    Raises:
        ConfigError: an Accelerator or a `PartialState` was created before, without the process group.
    """
    state = PartialState._shared_state
    if not state:
        PartialState(cpu=uses_cpu(), **({} if uses_cpu() else {"backend": "hyperpod"}))
    elif state["num_processes"] != dist.get_world_size() or state["distributed_type"] == DistributedType.NO:
        raise ConfigError(
            "Accelerate has taken this process for a job of its own: an Accelerator or a PartialState was made before "
            "the plugin's. Call `plugin.accelerator()` first; later ones share its state."
        )
    if state["distributed_type"] != DistributedType.FSDP:
        state["distributed_type"] = DistributedType.MULTI_GPU
        state["num_processes"], state["process_index"] = dist.get_world_size(), dist.get_rank()
        state["local_process_index"] = WorkerEnv.from_environ().local_rank
        state["backend"] = state["backend"] or "gloo"
