"""The session of this process, which joins the job as soon as `TrainingArguments` ask for a device.

[Note: who joins the job] `TrainingArguments` make Accelerate create a process group in their constructor. A process
that replaces a lost one would wait there for the others, which are in the middle of a training. So importing this
package makes them ask for our group instead, as the only change to a class of another library. They still are the
ordinary ones, and so are classes that derive from them.
"""

# `TrainingArguments` have no public place for a process group, and neither has Accelerate.
# pyright: reportPrivateUsage=false

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch

from hyperpod_plugins.accelerate.compat import PartialState
from hyperpod_plugins.accelerate.process_state import set_process_state, uses_cpu
from hyperpod_plugins.comm import CommOptions
from hyperpod_plugins.comm.groups import has_joined
from hyperpod_plugins.elastic.membership.elastic_spec import ElasticPolicy
from hyperpod_plugins.env import config_path
from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.parallel import ParallelConfig
from hyperpod_plugins.recovery import RecoveryOptions
from hyperpod_plugins.session import Session
from hyperpod_plugins.transformers.compat import TrainingArguments


@dataclass(kw_only=True)
class TrainerJob:
    """The part of this process in a job, for its Trainers."""

    options: dict[str, Any] = field(default_factory=dict[str, Any])
    """Arguments of the `Session`."""
    session: Session | None = None
    """None until `TrainingArguments` were created."""

    def join(self, args: TrainingArguments) -> Session:
        """Return the session, which joins the job when this is called first."""
        if self.session is None:
            if PartialState._shared_state and not has_joined():
                raise ConfigError(
                    "Accelerate has taken this process for a job of its own: an Accelerator or TrainingArguments were "
                    "created before hyperpod_plugins.transformers was imported. Import it first."
                )
            options = dict(self.options)
            if "config" not in options and not config_path():
                options.setdefault("hybrid_shard_degree", 1)  # as under DDP, each rank has a replica
            folder = Path(args.output_dir or ".") / "hyperpod"
            self.session = Session(
                global_batch_size=max(1, args.gradient_accumulation_steps),  # a Trainer says more when it trains
                checkpoint_folder=folder,
                random_seed=args.seed,
                **options,
            )
        return self.session


_job = TrainerJob()


def configure(
    config: ParallelConfig | dict[str, Any] | str | Path | None = None,
    *,
    elastic: ElasticPolicy | None = None,
    recovery: RecoveryOptions | None = None,
    comm: CommOptions | None = None,
    timeout_s: float = 1800.0,
    **options: Any,
) -> None:
    """Set options of this process's job. Call it before `TrainingArguments` are created; it is not needed otherwise.

    Args:
        config: parallel degrees and policies, as for a `Session`. Default: the file named by `HYPERPOD_CONFIG`, else
            `hybrid_shard_degree=1`: each rank holds the whole model, as under DDP.
        elastic: lets the job grow and shrink within these limits. The batch of a step stays as it is at first.
        recovery: options of fault recovery.
        comm: collective library to use.
        timeout_s: seconds after which a collective that does not complete fails.
        **options: fields of `ParallelConfig`; they override those of `config`.

    Raises:
        ConfigError: this process has joined its job already.
    """
    if _job.session is not None:
        raise ConfigError(
            "configure(...) was called after TrainingArguments were created, which joined the job. Call it first."
        )
    given = {"config": config, "recovery": recovery, "comm": comm}
    _job.options = {name: value for name, value in given.items() if value is not None}
    _job.options |= {"elastic": elastic or False, "timeout_s": timeout_s, **options}


def session_of(args: TrainingArguments) -> Session:
    """The session of this process, for a Trainer with these arguments."""
    return _job.join(args)


def is_elastic() -> bool:
    """Whether the job may grow and shrink."""
    return bool(_job.options.get("elastic"))


def _devices(args: TrainingArguments) -> torch.device:
    """Join the job, and return this rank's device: what `TrainingArguments` call for their devices."""
    if args.use_cpu and not uses_cpu():
        raise ConfigError(
            "use_cpu=True cannot be given to TrainingArguments here: the job would use the GPUs of this machine. Hide "
            "them from all processes: set CUDA_VISIBLE_DEVICES to an empty string."
        )
    session = session_of(args)
    set_process_state()
    args.distributed_state = PartialState()
    args._n_gpu = int(session.device.type != "cpu")
    return session.device


def take_over_devices() -> None:
    """Have `TrainingArguments` that are created from now on use the session's process group."""
    devices = cached_property(_devices)
    devices.__set_name__(TrainingArguments, "_setup_devices")
    cast("Any", TrainingArguments)._setup_devices = devices


take_over_devices()
