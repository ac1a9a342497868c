"""A Trainer's checkpoints, saved as folders of sharded tensors, optionally in the background."""

import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from hyperpod_plugins.checkpoint_names import checkpoint_at
from hyperpod_plugins.comm.groups import default_group
from hyperpod_plugins.errors import ConfigError, HyperPodError, PeerLost
from hyperpod_plugins.ledger import TimeCategory, ledger
from hyperpod_plugins.lightning.compat import LightningModule
from hyperpod_plugins.lightning.trainer_state import sharded_parts
from hyperpod_plugins.lightning.weight_averaging import CallbackAverage
from hyperpod_plugins.parallel import CheckpointWriter, load_checkpoint
from hyperpod_plugins.parallel.checkpoint.files import raise_on_all_ranks
from hyperpod_plugins.parallel.checkpoint.rank_state import RankStateSelector, load_rank_state, saved_ranks
from hyperpod_plugins.parallel.checkpoint.save_load import has_tensor
from hyperpod_plugins.parallel.checkpoint.single_file import (
    begin_replacing,
    remove_notes,
    shards_path,
    with_shards,
    write_missing_files,
    write_single_file,
)
from hyperpod_plugins.parallel.checkpoint.state import NUM_AVERAGED, StateParts
from hyperpod_plugins.recovery import SavedCheckpoints
from hyperpod_plugins.recovery.packing import are_same


class TrainerCheckpoints:
    """Saves, loads and removes the checkpoints of one strategy.

    All ranks must call each method together.
    """

    def __init__(self, *, in_background: bool, are_trusted: bool, are_files: bool) -> None:
        """Store the options; the first save creates the writer and, unless `group` is set, its process group.

        Args:
            in_background: write while training continues.
            are_trusted: unpickle Python objects of a checkpoint, which can run arbitrary code.
            are_files: write each of the program's checkpoints as one file, too; see `single_file`.
        """
        self._in_background, self._are_files = in_background, are_files
        self._are_trusted = are_trusted
        self._writer: CheckpointWriter | None = None
        self.group: dist.ProcessGroup | None = None
        """Group of all ranks, used for checkpoints only; None to create one when it is needed."""
        self.saved: SavedCheckpoints | None = None
        """Record of the existing checkpoints; None on ranks that do not keep it."""

    def save(
        self,
        path: str | PathLike[str],
        checkpoint: dict[str, Any],
        *,
        module: LightningModule,
        optimizers: Sequence[Optimizer],
        average: CallbackAverage | None,
        rank_state: Mapping[int, Any],
        storage_options: object,
        may_be_file: bool = True,
    ) -> None:
        """Write Lightning's checkpoint as the folder `path`: tensors sharded, everything else unchanged.

        If checkpoints are files, `path` is the file, and the folder is beside it; not if only this package reads it.

        With an `average`, the averaged weights are the checkpoint's model tensors, as in Lightning's own checkpoints.
        `rank_state` maps this rank to its rank-local state, which is written for each rank if ranks differ.

        Raises:
            CheckpointError: this save failed, or an earlier one in the background.
            ConfigError: `storage_options` is not None; they are not supported.
        """
        if storage_options is not None:
            raise ConfigError(
                f"HyperPodStrategy writes checkpoints to a file system and takes no storage_options, but got "
                f"{storage_options!r}. Leave them out, and give a path that is mounted on every node."
            )
        if self._writer is None:
            self._writer = CheckpointWriter(self.group)
        self._forget_interrupted()
        state, beside = checkpoint.pop("state_dict"), dict[str, Tensor]()
        if average is not None:
            state, beside = average.saved_as(state)
        has_optimizers = checkpoint.pop("optimizer_states", None) is not None
        is_file, folder = self._are_files and may_be_file, Path(path)
        if is_file:
            folder = shards_path(folder)
            self._writer.when_written_by_first(f"{path} was not written", partial(begin_replacing, Path(path)))
        self._writer.save(
            folder,
            model=module,
            optimizers=optimizers if has_optimizers else (),
            extra=checkpoint,
            model_state=state,
            beside=beside,
            rank_state=rank_state,
            background=self._in_background,
        )
        saved = self.saved
        if saved is not None and has_optimizers:
            self._writer.when_written(partial(saved.add, str(folder.absolute()), checkpoint["global_step"]))
        if is_file:
            self._write_file(folder, Path(path))

    @ledger.phase(TimeCategory.CHECKPOINT_SAVE)
    def _write_file(self, folder: Path, file: Path) -> None:
        """Write the checkpoint that is being written to a folder as one file, too."""
        assert self._writer is not None

        def write() -> None:
            write_single_file(folder, file, is_trusted=self._are_trusted)
            try:
                write_missing_files(file, is_trusted=self._are_trusted)
            except (HyperPodError, OSError) as error:
                warnings.warn(f"an earlier checkpoint beside {file} has no file yet: {error}", stacklevel=2)

        failure = f"the file {file} was not written, though its checkpoint is complete as {folder}"
        self._writer.when_written_by_first(failure, write)

    def save_parts(
        self,
        path: str | PathLike[str],
        checkpoint: dict[str, Any],
        parts: StateParts,
        *,
        module: LightningModule,
        rank_state: Mapping[int, Any],
    ) -> None:
        """Write a checkpoint from parts of an earlier state, with the checkpoint data of the same step, as a folder.

        `rank_state` has the rank-local states of the ranks that the parts belong to.

        Raises:
            CheckpointError: the save failed.
        """
        if self._writer is None:
            self._writer = CheckpointWriter(self.group)
        self._forget_interrupted()
        extra = {name: value for name, value in checkpoint.items() if name not in ("state_dict", "optimizer_states")}
        self._writer.save_parts(path, parts, model=module, extra=extra, rank_state=rank_state)

    def _forget_interrupted(self) -> None:
        """Drop a background save that lost a peer: the job has been repaired since then, but the save has not."""
        assert self._writer is not None
        try:
            self._writer.wait()
        except PeerLost as error:
            warnings.warn(f"a checkpoint was not written: {error} The next one is not affected.", stacklevel=2)

    def at(self, path_or_url: str | PathLike[str]) -> str:
        """Where the checkpoint lies that is given by its path or URL, once a pending save is complete."""
        self.wait()
        return str(with_shards(checkpoint_at(path_or_url)))

    def load(
        self,
        path: str | PathLike[str],
        *,
        module: LightningModule,
        optimizers: Sequence[Optimizer],
        average: CallbackAverage | None,
        weights_only: bool | None,
    ) -> dict[str, Any]:
        """Load the folder that `at` returned into module and optimizers, and return the rest as Lightning expects it.

        An `average` is loaded too, or starts from the module's weights if the checkpoint has none.

        Raises:
            CheckpointDamaged: `path` is not a checkpoint, or an interrupted one.
            CheckpointMismatch: the checkpoint is of another model or of other optimizers.
        """
        extra = load_checkpoint(
            path,
            model=module,
            optimizers=optimizers,
            weights_only=self._weights_only(weights_only),
            strict=module.strict_loading,
            beside=None if average is None else average.load_targets(),
        )
        is_averaged = has_tensor(path, NUM_AVERAGED)
        if average is not None:
            average.swap_loaded(module, is_averaged=is_averaged)
        elif is_averaged and optimizers:
            warnings.warn(
                f"{path} was written with weights averaged by Lightning's WeightAveraging. Training continues from "
                "the average, because the Trainer has no such callback. Add it to continue from the weights "
                "themselves.",
                stacklevel=2,
            )
        return {**extra, "state_dict": {}, "optimizer_states": [{} for _ in optimizers]}

    def load_own(
        self, path: Path, source: RankStateSelector, first: Mapping[str, Any], *, weights_only: bool | None
    ) -> dict[str, Any]:
        """Load the rank-local state of this rank, or of the saved rank that stands in for it.

        All ranks must call this together.

        Args:
            path: the folder.
            source: chooses the saved rank.
            first: rank-local state of the first rank.
            weights_only: False to unpickle Python objects; see `torch.load`.

        Returns:
            The state; `first` if it was the same on all saved ranks, or if no rank can stand in and none is needed.

        Raises:
            CheckpointError: the state is damaged, or no saved rank held this rank's shard; raised on all ranks.
        """
        with raise_on_all_ranks(f"the state of each rank in {path} was not loaded", default_group()):
            ranks, plain = saved_ranks(path), self._weights_only(weights_only)
            sharded = sharded_parts(first)
            if sharded and ranks and source.degrees_differ:
                others = [sharded_parts(load_rank_state(path, rank, weights_only=plain)) for rank in ranks]
                sharded = {
                    name: of for name, of in sharded.items() if not all(are_same(of, each.get(name)) for each in others)
                }
            rank = source.choose(ranks, list(sharded)) if ranks else None
            if rank is None:
                return dict(first)
            return load_rank_state(path, rank, weights_only=plain)

    def _weights_only(self, wanted: bool | None) -> bool:
        return not self._are_trusted and wanted is not False

    def remove(self, path: str | PathLike[str], remove: Callable[[Any], None]) -> None:
        """Call `remove` with `path`, once the checkpoint being written is complete; do not wait for it.

        If it is a file with a folder beside it, that is removed, too.
        """
        folder = shards_path(Path(path))
        paths: list[str | PathLike[str]] = [path, *([folder] if folder.exists() else [])]
        if self.saved is not None:
            for each in paths:
                self.saved.discard(str(Path(each).absolute()))

        def remove_all() -> None:
            for each in paths:
                remove(each)
            if len(paths) > 1:
                remove_notes(Path(path))

        if self._writer is None:
            remove_all()
        else:
            self._writer.when_written(remove_all)

    @contextmanager
    def not_of_program(self) -> Generator[None]:
        """Context in which a folder is written that is no checkpoint of the program; at its end, it is complete."""
        before = self.saved, self._are_files
        self.saved, self._are_files = None, False
        try:
            try:
                yield
            finally:
                self.close()
        finally:
            self.saved, self._are_files = before

    def wait(self) -> None:
        """Wait for a checkpoint that is still being written."""
        if self._writer is not None:
            self._writer.wait()

    def close(self) -> None:
        """Wait for a checkpoint that is still being written, and close the writer."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
