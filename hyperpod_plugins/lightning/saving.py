"""What Lightning asks of a strategy about checkpoints."""

# A strategy works with parts of Lightning that have no public spelling.
# pyright: reportPrivateUsage=false

from functools import partial
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from typing_extensions import override

from hyperpod_plugins.comm import CommOptions
from hyperpod_plugins.errors import PeerLost
from hyperpod_plugins.lightning.checkpointing import TrainerCheckpoints
from hyperpod_plugins.lightning.flavour import TrainerFn
from hyperpod_plugins.lightning.launch import STATE_OF_PEERS, LaunchedStrategy
from hyperpod_plugins.lightning.recovery import TrainerRecovery
from hyperpod_plugins.parallel.checkpoint_parts import StateParts
from hyperpod_plugins.parallel.checkpoint_state import model_tensors
from hyperpod_plugins.recovery.repair import RESHARD


class SavingStrategy(LaunchedStrategy):
    """Abstract strategy whose checkpoints are sharded, and whose processes may begin without one."""

    def __init__(self, checkpoints: TrainerCheckpoints, *, comm: CommOptions, timeout_s: float) -> None:
        super().__init__(comm=comm, timeout_s=timeout_s)
        self._checkpoints = checkpoints
        self._recovery: TrainerRecovery | None = None

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """This rank's parts of the module's tensors, not copied; hooks may leave some out or replace them."""
        assert self.lightning_module is not None
        return dict(model_tensors(self.lightning_module))

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Nothing: `save_checkpoint` writes the optimizers itself, shard by shard."""
        return {}

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write a sharded checkpoint, a folder named `filepath`, on all ranks together."""
        try:
            self._write(checkpoint, self.broadcast(filepath), storage_options)
        except PeerLost:
            if self._recovery is not None:
                self._recovery.interrupted(str(filepath))
            raise

    def _write(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        assert self.lightning_module is not None
        self._checkpoints.save(
            path,
            checkpoint,
            module=self.lightning_module,
            optimizers=self.optimizers,
            storage_options=storage_options,
        )

    def _save_again(
        self, checkpoint: dict[str, Any], path: str, is_alone: bool, state: StateParts | None = None
    ) -> str:
        """Write a checkpoint that was interrupted; without a path one beside the others, before the job ends.

        Where only some ranks are left no group works but that of checkpoints, and each knows the path by itself.
        `state` is written in place of the present one.
        """
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        folders = [vars(callback).get("dirpath") for callback in trainer.checkpoint_callbacks]
        folder = Path(next((folder for folder in folders if folder), trainer.default_root_dir))
        if path in ("", RESHARD):
            label = "reshard" if path else "emergency"
            for logger in trainer.loggers:
                logger.save()  # this process does not come to it any more
            path = str((folder / f"{label}-step={checkpoint['global_step']}.ckpt").absolute())
        if not is_alone:
            path = self.broadcast(path)
        if state is not None:
            self._checkpoints.save_parts(path, checkpoint, state, module=self.lightning_module)
            return path
        parts = {"state_dict": self.lightning_module_state_dict(), "optimizer_states": [{} for _ in self.optimizers]}
        self._write({**checkpoint, **parts}, path)
        self._checkpoints.wait()
        return path

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a sharded checkpoint of any degrees, or a checkpoint file that another strategy wrote."""
        assert self.lightning_module is not None
        if self._recovery is not None and checkpoint_path == STATE_OF_PEERS:
            return self._recovery.state_of_peers()
        path = Path(self.broadcast(checkpoint_path))
        if path.is_file():
            return super().load_checkpoint(path, weights_only=weights_only)
        is_fit = self.lightning_module.trainer.state.fn == TrainerFn.FITTING  # after one, optimizers are still here
        checkpoint = self._checkpoints.load(
            path,
            module=self.lightning_module,
            optimizers=self.optimizers if is_fit else (),
            weights_only=weights_only,
        )
        if self._recovery is not None and self._recovery.is_fitting:
            self._recovery.resume_from(checkpoint)
        return checkpoint

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, once the one that is being written in its place is complete."""
        self._checkpoints.remove(filepath, partial(super().remove_checkpoint, filepath))
