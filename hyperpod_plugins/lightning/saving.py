"""The checkpoint methods of a Lightning strategy: `SavingStrategy`."""

# A strategy uses private parts of Lightning.
# pyright: reportPrivateUsage=false

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from typing_extensions import override

from hyperpod_plugins.comm import CommOptions
from hyperpod_plugins.errors import CheckpointError, CommError, ConfigError, PeerLost, RecoveryError
from hyperpod_plugins.lightning.checkpoint_io import TrainerCheckpoints
from hyperpod_plugins.lightning.compat import Trainer, TrainerFn
from hyperpod_plugins.lightning.entries import entries
from hyperpod_plugins.lightning.launcher import STATE_OF_PEERS, LaunchedStrategy
from hyperpod_plugins.lightning.recovery import TrainerRecovery
from hyperpod_plugins.lightning.trainer_state import LAYOUT, LOCAL, rank_local_part
from hyperpod_plugins.lightning.weight_averaging import CallbackAverage
from hyperpod_plugins.parallel import Topology
from hyperpod_plugins.parallel.checkpoint.rank_state import RankStateSelector
from hyperpod_plugins.parallel.checkpoint.state import StateParts, model_tensors
from hyperpod_plugins.recovery.protocols import RESHARD


class SavingStrategy(LaunchedStrategy):
    """Abstract strategy that saves sharded checkpoints, and can also load its state from other ranks."""

    def __init__(self, checkpoints: TrainerCheckpoints, *, comm: CommOptions, timeout_s: float) -> None:
        super().__init__(comm=comm, timeout_s=timeout_s)
        self._checkpoints = checkpoints
        self._recovery: TrainerRecovery | None = None
        self._average: CallbackAverage | None = None

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """This rank's shards of the module's tensors, not copied; hooks may remove or replace some."""
        assert self.lightning_module is not None
        return dict(model_tensors(self.lightning_module))

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an empty dict: `save_checkpoint` writes the optimizer states itself, sharded."""
        return {}

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write a sharded checkpoint as the folder `filepath`; all ranks call it together."""
        try:
            self._write(checkpoint, self.broadcast(filepath), storage_options)
        except PeerLost:
            if self._recovery is not None:
                self._recovery.note_interrupted_save(str(filepath))
            raise

    def _write(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        assert self.lightning_module is not None
        self._checkpoints.save(
            path,
            checkpoint,
            module=self.lightning_module,
            optimizers=self.optimizers,
            average=self._average,
            rank_state={self.global_rank: self._rank_local_part(checkpoint)},
            storage_options=storage_options,
        )

    @property
    def topology(self) -> Topology:
        """Degrees and rank arithmetic of this job."""
        raise NotImplementedError

    @property
    def _layout(self) -> tuple[int, int, int]:
        return self.topology.world_size, self.topology.shard_degree, self.topology.tensor_degree

    def _rank_local_part(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """This rank's rank-local part of a checkpoint; also adds the job's layout to the checkpoint itself."""
        assert self.lightning_module is not None
        local = checkpoint.pop(LOCAL, None) or ({} if self._recovery is None else self._recovery.local_state)
        checkpoint[LAYOUT] = self._layout
        return {**rank_local_part(checkpoint, self.lightning_module.trainer), LOCAL: local}

    def _save_for_recovery(
        self,
        checkpoint: dict[str, Any],
        path: str,
        is_alone: bool,
        state: tuple[StateParts, Mapping[int, dict[str, Any]]] | None = None,
    ) -> str:
        """Write a checkpoint for recovery: one that was interrupted, an emergency checkpoint, or one to reshard from.

        Args:
            checkpoint: Lightning's checkpoint data.
            path: of the interrupted checkpoint; empty for an emergency checkpoint before the job ends; `RESHARD` for
                one from which all workers restart with other degrees. The latter two are written next to the others.
            is_alone: whether only some ranks are left. Then no group but that of checkpoints works, and the path is
                not broadcast.
            state: written instead of the present state: parts of tensors, and the checkpoint data of the ranks that
                they belong to.

        Returns:
            The path.
        """
        assert self.lightning_module is not None
        trainer, folder = self.lightning_module.trainer, self.checkpoint_root
        if path in ("", RESHARD):
            label = "reshard" if path else "emergency"
            for logger in trainer.loggers:
                logger.save()  # this process will not do so later
            path = str((folder / f"{label}-step={checkpoint['global_step']}.ckpt").absolute())
        if not is_alone:
            path = self.broadcast(path)
        if state is not None:
            parts, described = state
            own = {rank: self._rank_local_part(dict(each)) for rank, each in described.items()}
            checkpoint = {**checkpoint, LAYOUT: self._layout}
            self._checkpoints.save_parts(path, checkpoint, parts, module=self.lightning_module, rank_state=own)
            return path
        parts = {"state_dict": self.lightning_module_state_dict(), "optimizer_states": [{} for _ in self.optimizers]}
        self._write({**checkpoint, **parts}, path)
        self._checkpoints.wait()
        return path

    @property
    def checkpoint_root(self) -> Path:
        """Folder of the trainer's checkpoints, where the strategy adds its own."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        folders = [vars(callback).get("dirpath") for callback in trainer.checkpoint_callbacks]
        return Path(next((folder for folder in folders if folder), trainer.default_root_dir))

    def save_entry_end(self, path: Path) -> None:
        """Write the state after a fit as the folder `path`, and wait for it; all ranks call it together.

        Raises:
            CheckpointError: the state could not be written.
        """
        assert self.lightning_module is not None
        saved, self._checkpoints.saved = self._checkpoints.saved, None  # this is not a checkpoint of the program
        try:
            self.save_checkpoint(self._dump_end(self.lightning_module.trainer), path)
        finally:
            self._checkpoints.close()
            self._checkpoints.saved = saved

    def _dump_end(self, trainer: Trainer) -> dict[str, Any]:
        """Collect the trainer's checkpoint data; if a hook raises on one rank, all ranks raise before they write.

        Raises:
            CheckpointError: a hook failed on some rank.
        """
        checkpoint: dict[str, Any] = {}
        problem: Exception | None = None
        try:
            checkpoint = trainer._checkpoint_connector.dump_checkpoint(False)
        except (CommError, RecoveryError):
            raise
        except Exception as error:  # noqa: BLE001 (reported to all ranks)
            problem = error
        if not self.reduce_boolean_decision(problem is None):
            raise CheckpointError(f"a saving hook failed: {problem or 'on another rank'}") from problem
        return checkpoint

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a sharded checkpoint written with any degrees, or a checkpoint file that another strategy wrote.

        In a joiner, and after a fault, `checkpoint_path` is `STATE_OF_PEERS`, and the state comes from other ranks.
        """
        assert self.lightning_module is not None
        if self._recovery is not None and checkpoint_path == STATE_OF_PEERS:
            return self._recovery.state_of_peers(self.lightning_module.trainer)
        path = Path(checkpoint_path if entries.is_skipping else self.broadcast(checkpoint_path))
        is_fit = self.lightning_module.trainer.state.fn == TrainerFn.FITTING  # after a fit, optimizers still exist
        if path.is_file():
            loaded = super().load_checkpoint(path, weights_only=weights_only)
            if self._average is not None and is_fit:
                if "current_model_state" in loaded:
                    raise ConfigError(
                        f"{path} is a file that another strategy wrote with weights averaged by WeightAveraging. "
                        "With that callback, HyperPodStrategy can only resume from folders that it wrote itself. "
                        "Leave the callback out to train from the averaged weights."
                    )
                self._average.swap_loaded(self.lightning_module, is_averaged=False)
            return loaded
        checkpoint = self._checkpoints.load(
            path,
            module=self.lightning_module,
            optimizers=self.optimizers if is_fit else (),
            average=self._average if is_fit else None,
            weights_only=weights_only,
        )
        layout = checkpoint.pop(LAYOUT, None)
        if entries.is_skipping and is_fit:
            return {**checkpoint, **entries.trainer_state}  # this rank's own: callbacks may differ between ranks
        if layout is not None:
            checkpoint |= self._load_rank_local(
                path, checkpoint, tuple(layout), is_fit=is_fit, weights_only=weights_only
            )
        if self._recovery is not None and self._recovery.is_fitting:
            self._recovery.resume_from(self.lightning_module.trainer, checkpoint)
        return checkpoint

    def _load_rank_local(
        self, path: Path, checkpoint: dict[str, Any], layout: Any, *, is_fit: bool, weights_only: bool | None
    ) -> dict[str, Any]:
        """Load this rank's rank-local part of a checkpoint; apply buffers, metrics and means, and return the rest."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        source = RankStateSelector(
            rank=self.global_rank, topology=self.topology, saved_layout=layout, is_training=is_fit
        )
        first = rank_local_part(checkpoint, trainer)
        own = self._checkpoints.load_own(path, source, first, weights_only=weights_only)
        local = own.pop(LOCAL, {})
        if is_fit and self._recovery is not None:
            self._recovery.load_local_state(local, checkpoint, is_of_another_job=not entries.resumed_from)
        return own

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, once the one that is being written is complete."""
        self._checkpoints.remove(filepath, partial(super().remove_checkpoint, filepath))
