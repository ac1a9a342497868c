"""Checkpointless recovery for a Trainer: what the strategy asks of it, at each point of a fit."""

# Lightning's loops and connectors have no public spelling.
# pyright: reportPrivateUsage=false

import io
import logging
from collections.abc import Callable
from pathlib import PosixPath, PurePosixPath
from typing import Any

import torch
import torch.distributed as dist

from hyperpod_plugins.comm import abandon_broken, breaker
from hyperpod_plugins.elastic import Ledger
from hyperpod_plugins.elastic.joining import find_world
from hyperpod_plugins.elastic.leash import end_with
from hyperpod_plugins.elastic.ledger import ARMED_KEY
from hyperpod_plugins.elastic.world import World
from hyperpod_plugins.env import JobEnv
from hyperpod_plugins.errors import ConfigError, StateLost
from hyperpod_plugins.lightning.checkpointless import CheckpointlessRecovery
from hyperpod_plugins.lightning.elastic import Elasticity, ElasticTraining
from hyperpod_plugins.lightning.fits import fits
from hyperpod_plugins.lightning.flavour import LightningModule, Trainer, TrainerStatus
from hyperpod_plugins.lightning.loggers import continue_runs, keep_rows, name_runs
from hyperpod_plugins.lightning.rest import RestOfEpoch
from hyperpod_plugins.lightning.trainer_state import (
    batches_done,
    begin_afresh,
    finish_epoch,
    forget_loaders,
    forget_logged_metrics,
    is_epoch_end,
    is_epoch_start,
    log_last_batch,
    read_trainer,
    refuse_unreadable,
    restore_last_saves,
    show_epoch,
)
from hyperpod_plugins.lightning.window import Window
from hyperpod_plugins.parallel import Topology
from hyperpod_plugins.parallel.checkpoint_parts import StateParts
from hyperpod_plugins.recovery import (
    NO_STATE,
    Member,
    Repair,
    SavedCheckpoints,
    Snapshot,
    Snapshots,
    StepTransaction,
    TrainingState,
    seed_micro_step,
)
from hyperpod_plugins.recovery.moving import follow
from hyperpod_plugins.recovery.preview import Preview

log = logging.getLogger(__name__)


class TrainerRecovery:
    """Membership, transaction and trainer state of one strategy's process."""

    def __init__(
        self,
        callback: CheckpointlessRecovery,
        elastic: ElasticTraining | None,
        job: JobEnv,
        *,
        place: int,
        world_size: int,
    ) -> None:
        self.options, self._repairs = callback.options, callback.repairs
        ledger, world = Ledger.connect(job), World.of_founders(world_size)
        if job.agent_pid:
            end_with(job.agent_pid)  # it may wait for long now
        if job.is_newcomer:
            world = find_world(ledger, place, job.incarnation)
        self.elastic = None if elastic is None else Elasticity(elastic, ledger)
        """How the job changes its size; None for one that does not."""
        self.member = Member(job, place=place, world=world, policy=self.options.membership, hangs=self.options.hangs)
        self.member.is_elastic = elastic is not None
        self.member.start()
        self.saved = SavedCheckpoints(Ledger.connect(job)) if self.member.rank == 0 else None
        """Where rank 0 writes down which checkpoints there are."""
        self.has_moved = False
        """Whether this process belongs to another world than in the last generation that was formed."""
        self._begins_at, self._owes = NO_STATE, ""
        self._broadcasts = self._skip_batches = 0
        self._window: Window | None = None
        self._transaction: StepTransaction | None = None
        self._seed: Callable[[int, int], None] | None = None
        self._starts_epoch = self._ends_epoch = False
        self._description = b""
        self._is_stopped = self._is_checked = False
        self._snapshots: Snapshots | None = None
        self._returned: Snapshot | None = None
        self._entered_with: dict[str, Any] = {}

    @property
    def seat(self) -> tuple[int, int]:
        """Rank and world size of this process."""
        return self.member.rank, self.member.world.size

    def may_snapshot(self, topology: Topology) -> bool:
        """Whether there are to be snapshots, in this world or in another one."""
        return self.elastic is not None or self.options.snapshots(topology).every_steps > 0

    @property
    def is_apart(self) -> bool:
        """Whether this process enters the loops while its groups are not connected: a newcomer, or after a fault."""
        return breaker.is_open

    @property
    def is_newcomer(self) -> bool:
        """Whether this process takes the place of a lost one."""
        return self.member.job.is_newcomer

    @property
    def is_fitting(self) -> bool:
        """Whether there are transactions."""
        return self._transaction is not None

    # -- setting up ---------------------------------------------------------------------------------------------

    def begin_fit(
        self,
        trainer: Trainer,
        module: LightningModule,
        topology: Topology,
        *,
        seed: int,
        device: torch.device,
        snapshot_group: dist.ProcessGroup | None,
        save: Callable[[dict[str, Any], str, bool, StateParts | None], str],
    ) -> None:
        """Make the transaction, once model and optimizers are there.

        Args:
            trainer: whose `fit` begins, or begins again after a fault.
            module: sharded.
            topology: of the job.
            seed: of the random streams.
            device: of this rank.
            snapshot_group: group of all ranks for nothing but snapshots; None for no snapshots.
            save: see `SavingStrategy._save_again`.

        Raises:
            ConfigError: manual optimization, whose steps cannot be run again.
        """
        if not module.automatic_optimization:
            raise ConfigError(
                "recovery in place needs automatic optimization: a training_step that steps its optimizers by hand "
                "cannot be run again. Use automatic optimization, or CheckpointlessRecovery(enabled=False)."
            )
        state = TrainingState(module, trainer.optimizers, verify=self.options.verify)
        self._window = Window(trainer, state, save)
        self._window.preview = Preview(self.member, state, topology)
        if self._snapshots is None and snapshot_group is not None:
            self._snapshots = Snapshots(self.options.snapshots(topology), state, topology, snapshot_group)
        self._transaction = StepTransaction(
            self.member,
            self._window,
            topology,
            policy=self.options.retries,
            device=device,
            on_repair=self._repaired,
            snapshots=self._snapshots,
        )
        self._transaction.owes = self._owes
        if self.member.rank == 0 and not self.is_newcomer:
            name_runs(self.member.ledger, trainer.loggers)
        self.member.ledger.put(ARMED_KEY, b"1")
        rank, elastic = self.member.rank, self.elastic
        if self.options.step_keyed_random and elastic is not None:
            self._seed = lambda step, micro_step: seed_micro_step(seed, step, *elastic.stream(micro_step, rank))
        elif self.options.step_keyed_random:
            self._seed = lambda step, micro_step: seed_micro_step(seed, step, micro_step, topology.data_rank(rank))

    def continue_runs(self, trainer: Trainer) -> None:
        """Let a newcomer log to where the lost process did."""
        continue_runs(self.member.ledger, trainer.loggers)
        if self.member.rank == 0:
            keep_rows(trainer.loggers)

    def agree(self, value: Any, broadcast: Callable[[], Any]) -> Any:
        """A value that all ranks must share: from the first rank, or for a newcomer from the record.

        Only what is shared before the first step is recorded: run ids, folders of logs.
        """
        if not breaker.is_open and self.member.committed > max(0, self._begins_at):
            return broadcast()
        name = f"broadcast/{self._broadcasts}"
        self._broadcasts += 1
        if breaker.is_open:
            data = self.member.ledger.find(name)
            with torch.serialization.safe_globals([PosixPath, PurePosixPath]):
                return value if data is None else torch.load(io.BytesIO(data), weights_only=True)
        shared = broadcast()
        if self.member.rank == 0:
            buffer = io.BytesIO()
            torch.save(shared, buffer)
            self.member.ledger.put(name, buffer.getvalue())
        return shared

    def leave_loops(self, trainer: Trainer, *, from_checkpoint: bool) -> None:
        """After a fault outside a step: be apart from the others, until the loops have been entered again.

        This rank keeps its tensors, and loses its place in the loops; all get a common one from the trainer that has
        come furthest.

        Args:
            trainer: whose loops.
            from_checkpoint: whether it was to begin from one.
        """
        assert self._window is not None
        if from_checkpoint and self._begins_at == NO_STATE and not self.is_newcomer:
            self.member.begin_again(StateLost("a process was lost while the checkpoint was being loaded"))
        self.member.end_generation()
        log_last_batch(trainer, self.member.committed)
        self._returned = None if self._snapshots is None else self._snapshots.take_returned()
        self._is_stopped = True
        if self._returned is not None:
            self._description = self._returned.trainer
        elif self._transaction is not None and self._transaction.left_with is not None:
            self._description = self._transaction.left_with  # what it said when it stopped in the step still holds
        else:
            self._description = self._window.describe_outside()
            if not self._window.is_empty:
                self._window.undo()
        breaker.part()
        self._move(trainer)
        self._broadcasts = 0
        if self.member.committed == 0:
            begin_afresh(trainer)
        if trainer.evaluating or trainer.sanity_checking:
            trainer.fit_loop.epoch_loop.val_loop._module_mode.restore(trainer.lightning_module)
            forget_logged_metrics(trainer.fit_loop.epoch_loop.val_loop._results)
        trainer.training = True  # a fault in a validation leaves the stage at that
        trainer.fit_loop.epoch_loop.val_loop._has_run = False
        trainer.fit_loop.teardown()
        trainer._logger_connector.teardown()
        trainer._signal_connector.teardown()

    def _move(self, trainer: Trainer) -> None:
        if follow(self.member):
            self.has_moved, self._snapshots = True, None
            forget_loaders(trainer)
            if self.member.rank == 0 and self.saved is None:
                self.saved = SavedCheckpoints(Ledger.connect(self.member.job))
                self.continue_runs(trainer)
        if self.has_moved:
            abandon_broken()

    def _stop_outside(self, number: int) -> None:
        self.member.stop(number, in_step=False, trainer=self._description)

    def join(self, trainer: Trainer) -> None:
        """Meet the others before a validation."""
        if self._transaction is not None:
            self._find_beginning(trainer)
            self._transaction.join()

    def _find_beginning(self, trainer: Trainer) -> None:
        """Count steps from where a checkpoint has brought the trainer, once that is known."""
        if self._begins_at != NO_STATE or self.is_apart or self.member.committed > 0:
            return
        job = self.member.job
        self._begins_at = self.member.committed = trainer.global_step
        if self.saved is not None and job.resume_from:
            self.saved.add(job.resume_from, trainer.global_step)

    def state_of_peers(self) -> dict[str, Any]:
        """What a newcomer resumes from, once the others have stopped at a step: all but the tensors."""
        self.member.whereabouts = "waiting for the trainer's state"
        assert self._window is not None
        self._window.preview.take()
        halt = self.member.wait_for_stops(stopped=self._stop_outside if self._is_stopped else None)
        is_ours = self._returned is not None and halt.step == self._returned.step  # parts of it are this rank's alone
        description = self._returned.trainer if self._returned and is_ours else halt.trainer
        checkpoint = read_trainer(description)
        assert self._transaction is not None
        self._window.entered_with, self._entered_with = description, checkpoint
        self._transaction.entered_at = halt.step
        if halt.step == 0 and not (halt.in_step or is_ours):  # nothing has been trained: begin as everybody began
            checkpoint |= {"loops": None, "lr_schedulers": [], "callbacks": {}}
            return checkpoint
        self._skip_batches = batches_done(checkpoint)
        self._starts_epoch, self._ends_epoch = is_epoch_start(checkpoint), is_epoch_end(checkpoint)
        return checkpoint

    def interrupted(self, path: str) -> None:
        """A checkpoint was not written; it will be when all ranks are there again."""
        self._owes = path

    def finish(self, trainer: Trainer) -> None:
        """Meet the others at the end of a fit, for a rank that was lost there comes back to get its state."""
        if self._transaction is not None and trainer.state.status != TrainerStatus.INTERRUPTED and self.is_apart:
            self._transaction.join()

    def resume_from(self, checkpoint: dict[str, Any]) -> None:
        """Go on where a persistent checkpoint was written, also where a loader cannot be told to."""
        if "loops" in checkpoint:
            self._skip_batches = batches_done(checkpoint)

    def on_train_start(self, trainer: Trainer) -> None:
        """Loops have been restored, and no batch has been fetched."""
        assert self._window is not None
        self._find_beginning(trainer)
        if not self.is_apart and not self._is_checked:
            refuse_unreadable(trainer)
            self._is_checked = True
        if self.elastic is not None and not self.is_apart:
            self.elastic.open(trainer)
        if self._starts_epoch:
            trainer.fit_loop.epoch_loop.restarting = False  # nothing of the epoch has been run: it is not resumed
        if self._ends_epoch:
            finish_epoch(trainer)
            self.join(trainer)  # the hooks at the epoch's end may communicate
        elif self._skip_batches:
            show_epoch(trainer)
        restore_last_saves(trainer, self._entered_with)
        self._entered_with = {}
        self._skip_batches = 0  # every loader has been forwarded; one that is made later begins its epoch
        loader = trainer.fit_loop._combined_loader
        self._window.starts_at([] if loader is None else loader._state_dicts())

    def forwarded(self, loader: Any, trainer: Trainer) -> Any:
        """A loader for the rest of the epoch, where it cannot be told to start there."""
        return RestOfEpoch(loader, self._skip_batches, trainer) if self._skip_batches else loader

    # -- a step -------------------------------------------------------------------------------------------------

    def on_batch(self) -> None:
        """A batch has been fetched."""
        if self._window is not None:
            self._window.fetched()

    @property
    def num_batches_back(self) -> int:
        """How many batches of its window lie after the one that is computed: some, where the window is run again."""
        return 0 if self._window is None else self._window.num_after

    def seed(self) -> None:
        """Begin the random stream of this micro-step."""
        if self._seed is not None and self._window is not None and self._transaction is not None:
            self._seed(self._transaction.step, self._window.micro_step)

    def micro_step(self, closure: Callable[[], Any]) -> None:
        """Run a micro-step that is not the last of its window."""
        assert self._window is not None
        assert self._transaction is not None
        if self._window.is_empty:
            self._transaction.begin()
        self._window.add(closure)
        self._transaction.advance(self._window.compute)

    def step(self, closure: Callable[[], Any], commit: Callable[[Any], Any]) -> Any:
        """Run the last micro-step of a window, and the optimizer."""
        assert self._window is not None
        assert self._transaction is not None
        if self._window.is_empty:
            self._transaction.begin()
        self._window.add(closure)
        result = self._transaction.run(self._window.compute, commit)
        self._window.close()
        return result

    def leave(self, trainer: Trainer | None) -> None:
        """The strategy ends; after a fit that came to its end nobody needs a replacement any more."""
        if trainer is not None and self.is_fitting and trainer.state.status != TrainerStatus.INTERRUPTED:
            fits.is_over = True
            self.member.ledger.forget(ARMED_KEY)
        self.member.leave()

    def _repaired(self, repair: Repair) -> None:
        assert self._window is not None
        self._window.entered_with, self._owes = b"", ""
        self._repairs.append(repair)
        if self.elastic is not None and self.has_moved:
            self.elastic.resized(self.member.world.cause, repair)
        self.has_moved = False
        if repair.is_told_by(self.member.rank, self.member.world.size):
            log.warning("%s", repair)
