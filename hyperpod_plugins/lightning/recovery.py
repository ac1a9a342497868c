"""Checkpointless recovery for a Trainer: its options, and `TrainerRecovery`, this process's part in it."""

import io
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import PosixPath, PurePosixPath
from typing import Any, Literal

import torch
import torch.distributed as dist
from typing_extensions import override

from hyperpod_plugins.comm import GroupKey, group_health, new_axis_group
from hyperpod_plugins.comm.health import Phase
from hyperpod_plugins.elastic import JobStore
from hyperpod_plugins.elastic.membership.admission import withdraw_announcement
from hyperpod_plugins.env import JobEnv, WorkerEnv
from hyperpod_plugins.errors import ConfigError, PeerLost, StateLost
from hyperpod_plugins.lightning.accumulation_window import SaveForRecovery
from hyperpod_plugins.lightning.compat import Callback, LightningModule, Trainer, TrainerFn, TrainerStatus, callbacks_of
from hyperpod_plugins.lightning.elastic_training import ElasticState, ElasticTraining
from hyperpod_plugins.lightning.fit_recovery import FitRecovery, NullFitRecovery
from hyperpod_plugins.lightning.loggers import continue_runs
from hyperpod_plugins.lightning.trainer_entries import entries
from hyperpod_plugins.lightning.trainer_state import prepare_data_alone
from hyperpod_plugins.lightning.weight_averaging import CallbackAverage
from hyperpod_plugins.parallel import ParallelConfig, Topology
from hyperpod_plugins.recovery import SAVING_GROUP, RecoveryOptions, Repair, SavedCheckpoints
from hyperpod_plugins.recovery.config import WITHOUT_AGENT, log_once
from hyperpod_plugins.recovery.degrees import form_initial_world
from hyperpod_plugins.recovery.engine import RecoveryEngine, join_job
from hyperpod_plugins.recovery.local_objects import RankLocalState
from hyperpod_plugins.recovery.packing import on_own_device
from hyperpod_plugins.recovery.rng import random_state, set_random_state


class CheckpointlessRecovery(Callback):
    """Repair the job in place when a process is lost or a step fails, without reading a checkpoint.

    Recovery needs an agent that replaces lost processes: start the program with `hyperpodrun`. Under this launcher,
    recovery is on even without this callback, with the defaults below. Under another launcher, this callback only
    warns.

    Args:
        enabled: whether to recover in place. If False, the launcher restarts all processes after a failure.
        replacement_timeout_s: longest wait for a replacement, in seconds. After it, the job ends with an error.
        hang_timeout_s: seconds that other ranks wait for a rank in a collective of a step before that rank is
            replaced, or ten times the job's median step time if that is longer. A rank that loads its batch counts as
            inside a step. The limit is 300 s in the first steps of a process, and 900 s for a rank outside a step.
        max_attempts: attempts at one step that may fail with an exception on the same rank before it is raised.
        verify: compare checksums of the state that a replacement receives.
        step_keyed_random: derive random numbers from the step, so that a repeated step and a replacement draw the
            same numbers as before. Otherwise the job still recovers, but with dropout its results are not bitwise
            identical.
        snapshot_every_steps: steps between buddy snapshots, 0 for none. Snapshots are for shards without a surviving
            replica: all ranks return to the newest complete snapshot and redo at most this many steps, or up to twice
            as many if the interval is longer than one step and the fault interrupts the exchange of a snapshot. If
            all copies of a shard are on one node (each shard exists once, or all replicas share a node), `"auto"`
            takes snapshots as often as they cost less than 0.5 % of the time, or 0.2 % where only the loss of all ranks
            at once needs them; it measures the cost in the first steps and prints the interval. If the copies of each
            shard are on several nodes, `"auto"` takes none: when all of them are lost at once, all ranks return to
            the last checkpoint. `"unreplicated"`: like `"auto"`, but only while each shard exists once.
        snapshot_memory_fraction: largest fraction of a node's memory for the snapshots of all its ranks.
        rank_local_state: what to do when the rank-local state of a lost rank (buffers written by its steps, metrics,
            means of the epoch) is lost, because its buddy was lost too or the state was larger than 1 MiB. If there
            is a complete snapshot, all ranks return to it. Otherwise `"exact"` restarts all ranks from the last
            checkpoint, and `"replica"` continues with the state of a replica of the shard and logs that: the results
            then differ from those of a run without faults.
        rehearse: numbers of steps to rehearse: each is computed, discarded as after a fault, compared with its
            beginning, and computed again. The job ends with an error that names any state (tensors, trainer, callbacks,
            rank-local state) that differs, or that cannot be written and read back.
        compare_replicas_every: steps between comparisons of replicas, 0 for none. The digests of each rank's
            parameters and optimizer state must be the same on all replicas of a shard. A difference ends the job with
            an error that names rank and host. `"auto"` compares samples in steps 0, 1, 2, 4, ..., 1024, 2048, 3072 and
            so on.

    Attributes:
        repairs: every repair that this process has taken part in, in order.
    """

    def __init__(
        self,
        *,
        enabled: bool = True,
        replacement_timeout_s: float = 300.0,
        hang_timeout_s: float = 30.0,
        max_attempts: int = 3,
        verify: bool = False,
        step_keyed_random: bool = True,
        snapshot_every_steps: int | Literal["auto", "unreplicated"] = "auto",
        snapshot_memory_fraction: float = 0.5,
        rank_local_state: Literal["exact", "replica"] = "exact",
        rehearse: Sequence[int] = (),
        compare_replicas_every: int | Literal["auto"] = "auto",
    ) -> None:
        self.options = RecoveryOptions(
            enabled=enabled,
            replacement_timeout_s=replacement_timeout_s,
            hang_timeout_s=hang_timeout_s,
            max_attempts=max_attempts,
            verify=verify,
            step_keyed_random=step_keyed_random,
            snapshot_every_steps=snapshot_every_steps,
            snapshot_memory_fraction=snapshot_memory_fraction,
            rank_local_state=rank_local_state,
            rehearse=tuple(rehearse),
            compare_replicas_every=compare_replicas_every,
        )
        self.repairs: list[Repair] = []
        job = None if enabled else JobEnv.from_environ()
        if job is not None:
            withdraw_announcement(job)


def recovers(trainer: Trainer) -> bool:
    """Whether the trainer's callbacks leave in-place recovery enabled."""
    chosen = [each for each in callbacks_of(trainer) if isinstance(each, CheckpointlessRecovery)]
    return not chosen or chosen[0].options.enabled


class NullRecovery:
    """What a strategy calls without recovery: nothing is prepared, noted or repaired."""

    is_active = False
    """Whether this process takes part in recovery."""
    elastic: ElasticState | None = None
    """How the job changes its size; None for one that does not."""

    def __init__(self) -> None:
        self.fit: NullFitRecovery = NullFitRecovery()
        """Recovery of the present entry into the loops."""

    @property
    def has_moved(self) -> bool:
        """Whether this process has moved to another world since the last generation was formed."""
        return False

    @property
    def rank_and_world_size(self) -> tuple[int, int] | None:
        """Rank and world size of this process; None for those that the launcher assigned."""
        return None

    @property
    def saved(self) -> SavedCheckpoints | None:
        """See `RecoveryEngine.saved`."""
        return None

    @property
    def keys_random_numbers(self) -> bool:
        """Whether random numbers depend on the place in the program where they are drawn; see `data.random_numbers`."""
        return False

    def prepare(self, trainer: Trainer) -> None:
        """Prepare a trainer whose process has just joined the process group, but is not connected to the others."""

    def create_groups(self, topology: Topology) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
        """Create the groups of all ranks for checkpoints and for snapshots; a joiner would lack one created later.

        The second one is None if no snapshots are taken, in this world or in a later one.
        """
        return None, None

    def begin_fit(
        self,
        trainer: Trainer,
        module: LightningModule,
        topology: Topology,
        *,
        seed: int,
        device: torch.device,
        snapshot_group: dist.ProcessGroup | None,
        average: CallbackAverage | None,
        rank_local: Mapping[str, RankLocalState],
        save: SaveForRecovery,
    ) -> None:
        """Make steps transactions, once model and optimizers exist; see `FitRecovery` for the arguments."""

    def broadcast_or_replay(self, value: Any, broadcast: Callable[[], Any], *, caller: str) -> Any:
        """Share a value between all ranks: broadcast it, or in a detached process read it from the job store.

        Only values shared before the first step are recorded there, such as run ids and log folders. They are counted
        for each caller, because a process that enters a fit again does not make every call that the first one made:
        `SaveConfigCallback` skips its own, and no checkpoint path is shared. If a value was not recorded, all ranks
        restart from the last checkpoint.

        Args:
            value: of this rank; returned inside a step that a fault has already ended.
            broadcast: communicates, and returns the shared value.
            caller: name of the function that shares the value.

        Raises:
            PeerLost: a rank was lost, outside a step.
            StateLost: the agents have not restarted a detached process that got no value.
        """
        return broadcast()

    def leave_loops(self, error: PeerLost, *, from_checkpoint: bool) -> bool:
        """Leave the loops after a fault outside a step; see `FitRecovery.leave_loops`."""
        return False

    def give_up(self, reason: str, barrier: Callable[[], None]) -> None:
        """End the job once all ranks have logged why: have no rank replaced that exits from now on."""

    def close(self, trainer: Trainer | None) -> None:
        """End recovery for this strategy; once a fit has completed, lost processes are no longer replaced."""


class TrainerRecovery(NullRecovery):
    """Membership and engine of this process, for one strategy; `fit` is its recovery within the loops.

    Use it in the main thread only.
    """

    is_active = True

    def __init__(
        self,
        callback: CheckpointlessRecovery,
        elastic: ElasticTraining | None,
        job: JobEnv,
        *,
        worker_id: int,
        world_size: int,
    ) -> None:
        super().__init__()
        self.options = callback.options
        self.elastic = None if elastic is None else ElasticState(elastic, JobStore.connect(job))
        self.member = entries.member or join_job(
            job, self.options, worker_id=worker_id, world_size=world_size, is_elastic=elastic is not None
        )
        if elastic is None:
            entries.member = self.member
        self.engine = RecoveryEngine(self.member, self.options, callback.repairs, on_repair=self._repaired)
        """What recovery of a Trainer shares with that of a loop written by hand."""
        self.engine.begin_entry(entries.number, training_index=entries.training_index, is_complete=entries.is_complete)
        self.member.collectives.begin_set_up(entries.number)
        self._broadcasts: Counter[str] = Counter()
        self._at_set_up: tuple[int, dict[str, Any]] = -1, {}
        """Number of the last entry whose set-up has begun, and the state of the random generators then."""

    @property
    @override
    def has_moved(self) -> bool:
        return self.engine.has_moved

    @property
    @override
    def rank_and_world_size(self) -> tuple[int, int]:
        return self.member.rank, self.member.world.size

    @property
    @override
    def saved(self) -> SavedCheckpoints | None:
        return self.engine.saved

    @property
    @override
    def keys_random_numbers(self) -> bool:
        return self.options.step_keyed_random

    @override
    def prepare(self, trainer: Trainer) -> None:
        if self.keys_random_numbers:
            self._begin_set_up()
        if group_health.is_unavailable:
            prepare_data_alone(trainer)
            if self.member.is_joining:
                continue_runs(self.member, entries.number, trainer.loggers)

    def _begin_set_up(self) -> None:
        """Have hooks of the set-up (`setup`) draw the same numbers each time that the loops of a fit are entered."""
        number, state = self._at_set_up
        if number == entries.number:
            set_random_state(state)
        else:
            self._at_set_up = entries.number, random_state()

    @override
    def create_groups(self, topology: Topology) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
        ranks = range(topology.world_size)
        saving, snapshots = new_axis_group(GroupKey(SAVING_GROUP, is_strict=True), ranks), None
        if self.elastic is not None or self.options.snapshots(topology).every_steps > 0:
            snapshots = new_axis_group(GroupKey("snapshot", is_strict=True), ranks)
        return saving, snapshots

    @override
    def begin_fit(self, trainer: Trainer, module: LightningModule, topology: Topology, **parts: Any) -> None:
        former = self.fit if isinstance(self.fit, FitRecovery) else None
        fit = FitRecovery(self.engine, self.elastic, trainer, module, topology, former=former, **parts)
        self.fit = fit
        fit.begin()

    @override
    def broadcast_or_replay(self, value: Any, broadcast: Callable[[], Any], *, caller: str) -> Any:
        is_detached = group_health.phase is Phase.DETACHED
        if not is_detached and group_health.suppresses_collectives:
            return value
        if not is_detached and self.member.committed > max(0, self.engine.begins_at):
            return broadcast()
        name = f"broadcast/{entries.number}/{caller}/{self._broadcasts[caller]}"
        self._broadcasts[caller] += 1
        if is_detached:
            return self._replay(name, caller)
        shared = broadcast()
        if self.member.rank == 0:
            buffer = io.BytesIO()
            torch.save(shared, buffer)
            self.member.job_store.set(name, buffer.getvalue())
        return shared

    def _replay(self, name: str, caller: str) -> Any:
        """Return a value that was shared before the first step; without one, restart all ranks."""
        data = self.member.job_store.try_get(name)
        if data is None:
            self.member.restart_all(
                StateLost(
                    f"call {self._broadcasts[caller]} of strategy.broadcast in {caller} came before this process had "
                    "joined the other ranks, and they have not made that call before their first step. Make it in each "
                    "process in setup or on_train_start, or in training_step, or in a hook of the validation."
                )
            )
        with torch.serialization.safe_globals([PosixPath, PurePosixPath]):
            return torch.load(io.BytesIO(data), weights_only=True, map_location=on_own_device)

    @override
    def leave_loops(self, error: PeerLost, *, from_checkpoint: bool) -> bool:
        has_left = self.fit.leave_loops(error, from_checkpoint=from_checkpoint)
        self._broadcasts.clear()  # saving hooks, which have been called by now, may have counted
        return has_left

    @override
    def give_up(self, reason: str, barrier: Callable[[], None]) -> None:
        with suppress(PeerLost):
            barrier()  # all ranks have logged the error before the first one exits
        self.member.give_up(reason)

    @override
    def close(self, trainer: Trainer | None) -> None:
        is_interrupted = trainer is not None and trainer.state.status == TrainerStatus.INTERRUPTED
        has_fitted = trainer is not None and self.fit.is_active and not is_interrupted
        self.fit.close(has_ended=has_fitted)
        leaves = is_interrupted or self.elastic is not None
        self.engine.end_entry(has_ended=has_fitted, leaves=leaves)
        if leaves:
            entries.has_left = entries.has_left or self.fit.is_active
            entries.member, entries.worker_ids = None, self.member.world.worker_ids
        if has_fitted and self.elastic is None:
            self.engine.check_left()

    def _repaired(self, repair: Repair) -> None:
        self.fit.repaired()
        if self.elastic is not None and self.engine.has_moved:
            self.elastic.record_resize(self.member.world.cause, repair)


def create_recovery(trainer: Trainer, config: ParallelConfig, env: WorkerEnv, *, ranks_per_node: int) -> "NullRecovery":
    """Create the recovery that the trainer's callbacks ask for; a null object without an agent, or if disabled.

    Args:
        trainer: about to fit.
        config: of its strategy.
        env: worker_id of this process and size of the initial world, from the launcher.
        ranks_per_node: of this node.

    Raises:
        ConfigError: the job is elastic but recovery is disabled, or none of the allowed degrees fits.
        SystemExit: this process is left over after whole replicas have been formed.
    """
    callbacks = callbacks_of(trainer)
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
        return NullRecovery()
    if not options.enabled or _warn_if_left(trainer):
        return NullRecovery()
    if elastic is not None and entries.member is not None:  # this member belongs to entries that keep their size
        entries.member.leave()
        entries.member = None
    worker_id, world_size = env.global_rank, env.world_size
    if elastic is not None and not job.is_joining:
        world_size = form_initial_world(
            elastic, config, job, worker_id=worker_id, world_size=world_size, ranks_per_node=ranks_per_node
        )
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
