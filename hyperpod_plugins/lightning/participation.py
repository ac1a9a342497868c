"""Whether a Trainer's process takes part in recovery, and the `TrainerRecovery` of one that does."""

import warnings
from typing import Any

from hyperpod_plugins.elastic import JobStore
from hyperpod_plugins.elastic.membership.reshard import exit_surplus
from hyperpod_plugins.elastic.process import exit_with_agent
from hyperpod_plugins.env import JobEnv, WorkerEnv
from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.lightning.checkpointless import CheckpointlessRecovery
from hyperpod_plugins.lightning.compat import Trainer, TrainerFn
from hyperpod_plugins.lightning.elastic_training import ElasticTraining, initial_world_size
from hyperpod_plugins.lightning.entries import entries
from hyperpod_plugins.lightning.recovery import TrainerRecovery
from hyperpod_plugins.parallel import ParallelConfig
from hyperpod_plugins.recovery.config import WITHOUT_AGENT, log_once


def create_recovery(
    trainer: Trainer, config: ParallelConfig, env: WorkerEnv, *, ranks_per_node: int
) -> TrainerRecovery | None:
    """Create the recovery that the trainer's callbacks ask for; None without an agent, or if recovery is disabled.

    Args:
        trainer: about to fit.
        config: of its strategy.
        env: worker_id of this process and size of the initial world, from the launcher.
        ranks_per_node: of this node.

    Raises:
        ConfigError: the job is elastic but recovery is disabled, or none of the allowed degrees fits.
        SystemExit: this process is left over after whole replicas have been formed.
    """
    callbacks: list[Any] = vars(trainer)["callbacks"]
    chosen = next((callback for callback in callbacks if isinstance(callback, CheckpointlessRecovery)), None)
    elastic = next((callback for callback in callbacks if isinstance(callback, ElasticTraining)), None)
    callback, job = chosen or CheckpointlessRecovery(), JobEnv.from_environ()
    options = callback.options
    if elastic is not None and not options.enabled:
        raise ConfigError("ElasticTraining needs recovery: leave out CheckpointlessRecovery(enabled=False), or it.")
    if job is None:
        wants = [type(callback).__name__ for callback in (chosen, elastic) if callback is not None]
        if wants and options.enabled:
            warnings.warn(
                f"{' and '.join(wants)} has no effect, because there is no agent to replace or add processes. Start "
                "the program with `hyperpodrun` instead of `torchrun` or `python`.",
                stacklevel=2,
            )
        elif options.enabled and env.world_size > 1 and env.global_rank == 0 and trainer.state.fn == TrainerFn.FITTING:
            log_once(WITHOUT_AGENT)
        return None
    if not options.enabled or _warn_if_left(trainer):
        return None
    if elastic is not None and entries.member is not None:  # this member belongs to entries that keep their size
        entries.member.leave()
        entries.member = None
    worker_id, world_size = env.global_rank, env.world_size
    if elastic is not None and not job.is_joining:
        world_size = initial_world_size(elastic, config, world_size, ranks_per_node)
        if worker_id >= world_size:
            if job.agent_pid:
                exit_with_agent(job.agent_pid)
            exit_surplus(JobStore.connect(job), worker_id, is_replaced=not job.agent_pid)
    return TrainerRecovery(callback, elastic, job, worker_id=worker_id, world_size=world_size)


def _warn_if_left(trainer: Trainer) -> bool:
    """Whether this process no longer takes part in recovery; warns if it is about to fit."""
    if entries.has_left and trainer.state.fn == TrainerFn.FITTING:
        warnings.warn(
            "this fit is not repaired in place, because the job may have changed its size in an earlier fit, or that "
            "fit was interrupted: after the loss of a process, all workers restart. Run later fits in a separate "
            "program.",
            stacklevel=3,
        )
    return entries.has_left
