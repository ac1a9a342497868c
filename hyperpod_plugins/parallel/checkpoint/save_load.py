"""Sharded checkpoints: every rank writes its part, and a world of any size and any degrees can read them.

    writer = CheckpointWriter()
    handle = writer.save(path, model=model, optimizers=[optimizer], extra={"step": 100}, background=True)
    ...                                               # training continues; the state was copied
    handle.wait(timeout_s=600)
    extra = load_checkpoint(path, model=model, optimizers=[optimizer])

Built on torch.distributed.checkpoint (DCP), which stores each tensor as chunks of its global shape.
"""

import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from dataclasses import replace
from datetime import timedelta
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from hyperpod_plugins.comm import generation_of, group_health, pin_generation
from hyperpod_plugins.comm.groups import default_group
from hyperpod_plugins.comm.health import Phase
from hyperpod_plugins.errors import CheckpointError, CheckpointMismatch
from hyperpod_plugins.ledger import TimeCategory, ledger
from hyperpod_plugins.parallel.checkpoint.dcp_storage import (
    CheckedWriter,
    PartsPlanner,
    SafePlanner,
    SafeReader,
    own_error,
    tensor_entries,
)
from hyperpod_plugins.parallel.checkpoint.files import (
    FORMAT,
    any_rank,
    discard,
    find,
    incomplete_path,
    prepare,
    publish,
    raise_on_all_ranks,
    read_document,
)
from hyperpod_plugins.parallel.checkpoint.rank_state import RankStates
from hyperpod_plugins.parallel.checkpoint.state import (
    StateParts,
    TensorPart,
    allocate_optimizer_state,
    check_layouts,
    check_model,
    check_optimizer,
    describe_optimizer,
    extra_states,
    model_tensors,
    optimizer_tensors,
    set_optimizer,
    tied_names,
)

MODEL = "model."
"""Prefix of the names of the model's tensors in a checkpoint."""
_TELL_S = 5.0
"""How often the first rank tells the others that it is still at work, in seconds."""
WRITE_TIMEOUT_S = 3600.0  # maximum wait for a background save, in seconds


class SaveHandle:
    """Handle of a save that may still be in progress."""

    def __init__(self, path: Path, future: "Future[None]") -> None:
        self.path = path
        self._future = future

    @property
    def is_done(self) -> bool:
        """Whether the save has ended, successfully or not."""
        return self._future.done()

    def wait(self, timeout_s: float = WRITE_TIMEOUT_S) -> None:
        """Wait until all ranks have written the checkpoint.

        Raises:
            CheckpointError: it could not be written, or not within `timeout_s` seconds.
        """
        wait_for_futures([self._future], timeout_s)  # a TimeoutError of `result` could be the writer's own
        if not self.is_done:
            raise CheckpointError(
                f"the checkpoint {self.path} is still being written after {timeout_s} s. Wait longer, or write to a "
                "faster disk. The folder does not exist under this name until it is complete."
            )
        self._future.result()


class CheckpointWriter:
    """Writes checkpoints, one at a time. Construct it and call `save` on all ranks."""

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout_s: float = 600.0) -> None:
        """Use `group`, or make a gloo group over all ranks, so that saving does not interfere with training.

        Args:
            group: process group for CPU tensors that nothing else uses.
            timeout_s: maximum wait for another rank, in seconds, if the group is made here.
        """
        self._own_group: dist.ProcessGroup | None = None
        if group is None and dist.is_initialized():
            own = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
            assert isinstance(own, dist.ProcessGroup)
            group = own
            self._own_group = own
        self._group = group
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._last: SaveHandle | None = None

    @ledger.phase(TimeCategory.CHECKPOINT_SAVE)
    def save(
        self,
        path: str | PathLike[str],
        *,
        model: nn.Module,
        optimizers: Sequence[Optimizer] = (),
        extra: Mapping[str, Any] | None = None,
        model_state: Mapping[str, torch.Tensor] | None = None,
        beside: Mapping[str, torch.Tensor] | None = None,
        rank_state: Mapping[int, Any] | None = None,
        background: bool = False,
    ) -> SaveHandle:
        """Save model, optimizers and `extra` as the folder `path`. All ranks of the group call this.

        An existing checkpoint of that name is replaced only when the new one is complete.

        Args:
            path: folder of the checkpoint.
            model: sharded or plain.
            optimizers: optimizers of the model.
            extra: further values; those of the group's first rank are saved.
            model_state: tensors to save instead of the model's own: some of them, or other values under their names.
            beside: additional tensors, by their names in the checkpoint.
            rank_state: state specific to this rank, by its global rank; see `load_rank_state`.
            background: copy the state to host memory and write it while training continues.

        Returns:
            A handle to wait for the save.

        Raises:
            CheckpointError: this save failed, or an earlier background save whose error was not raised yet.
        """
        self.wait()
        state = model_tensors(model) if model_state is None else model_state
        tensors = {f"{MODEL}{name}": tensor for name, tensor in state.items()} | dict(beside or {})
        with raise_on_all_ranks(f"the checkpoint {path} was not written", self._group or default_group()):
            check_layouts(model, optimizers)
        for index, optimizer in enumerate(optimizers):
            named = optimizer_tensors(model, optimizer)
            tensors |= {f"{optimizer_prefix(index)}{name}": tensor for name, tensor in named.items()}
        described = [describe_optimizer(model, optimizer) for optimizer in optimizers]
        document = _document(model, described, extra or {})  # now, so that later changes are not saved
        target, of_ranks = Path(path), RankStates(rank_state or {})
        if not background:
            _write(tensors, document, target, self._group, of_ranks)
            return SaveHandle(target, _finished())
        copies = BlockingAsyncStager(cache_staged_state_dict=False).stage(tensors)
        generation = generation_of(self._group)
        written = self._thread.submit(_write_in_background, generation, copies, document, target, self._group, of_ranks)
        self._last = SaveHandle(target, written)
        return self._last

    def save_parts(
        self,
        path: str | PathLike[str],
        parts: StateParts,
        *,
        model: nn.Module,
        extra: Mapping[str, Any],
        rank_state: Mapping[int, Any] | None = None,
    ) -> None:
        """Save parts of a model's and its optimizers' tensors, such as snapshots, instead of their present state.

        Together, the ranks of the group must hold every tensor completely. Other values are those of the group's
        first rank, except `rank_state`, by the global ranks that the states belong to.

        Raises:
            CheckpointError: the save failed.
        """
        named = [*parts.extra_parts, *(replace(part, name=f"{MODEL}{part.name}") for part in parts.model)]
        for index, optimizer in enumerate(parts.optimizers):
            named += [replace(part, name=f"{optimizer_prefix(index)}{part.name}") for part in optimizer]
        document = _document(model, parts.descriptions, extra)
        _write({}, document, Path(path), self._group, RankStates(rank_state or {}), named)

    def when_written_by_first(self, failure: str, action: Callable[[], None]) -> None:
        """Call `action` on the group's first rank once the last save is complete; the others wait until it has ended.

        In the background if the save is written there. All ranks call this, after the save. The action may take any
        time: the ranks hear from the first one every few seconds.

        Args:
            failure: what an error of `action` means, for the message.
            action: must not communicate; called in a thread of its own.

        Raises:
            CheckpointError: the action failed, if no background save is pending; otherwise `wait` raises it.
        """
        group = self._group or default_group()
        generation = generation_of(group)

        def act() -> None:
            with ThreadPoolExecutor(max_workers=1) as thread, pin_generation(group, generation):
                is_first = group is None or dist.get_rank(group) == 0
                acting = thread.submit(action) if is_first else _finished()
                is_done = False
                while not is_done:
                    wait_for_futures([acting], _TELL_S)
                    is_done = not any_rank(not acting.done(), group)
                with raise_on_all_ranks(failure, group, expected=(Exception,)):
                    acting.result()

        self.when_written(act)

    def when_written(self, action: Callable[[], None]) -> None:
        """Call `action` in the writer's thread once the last save is complete; not at all if that save fails.

        Lets the caller remove an older checkpoint without making training wait for the newer one. If no background
        save is pending, `action` is called at once, in the calling thread.
        """
        if self._last is None:
            action()
            return
        last = self._last

        def after() -> None:
            last.wait()
            action()

        self._last = SaveHandle(last.path, self._thread.submit(after))

    def wait(self, timeout_s: float = WRITE_TIMEOUT_S) -> None:
        """Wait for the last save. Its error is raised once.

        Raises:
            CheckpointError: the save failed, or takes longer than `timeout_s` seconds.
        """
        last = self._last
        if last is None:
            return
        try:
            last.wait(timeout_s)
        finally:
            if last.is_done:
                self._last = None

    def close(self) -> None:
        """Wait for the last save, then shut down the thread and destroy the group if the writer made it."""
        try:
            self.wait()
        finally:
            self._thread.shutdown(wait=False)
            own, self._own_group = self._own_group, None
            if own is not None and dist.is_initialized():
                dist.destroy_process_group(own)


@ledger.phase(TimeCategory.CHECKPOINT_RESTORE)
def load_checkpoint(
    path: str | PathLike[str],
    *,
    model: nn.Module,
    optimizers: Sequence[Optimizer] = (),
    weights_only: bool = True,
    strict: bool = True,
    beside: Mapping[str, torch.Tensor] | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Load a checkpoint into a model and optimizers with any sharding. All ranks call this.

    Args:
        path: folder of the checkpoint.
        model: sharded or plain; its tensors are written in place.
        optimizers: as many as were saved, in the same order, or none to load only the model.
        weights_only: reject Python objects in `extra` other than plain containers, numbers, strings and tensors.
        strict: reject tensors that only the model or only the checkpoint has.
        beside: additional tensors to load, by their names in the checkpoint; those it does not have are skipped.
        group: process group over which ranks agree; the default group if None.

    Returns:
        The `extra` that was saved.

    Raises:
        CheckpointDamaged: the checkpoint is missing, incomplete, foreign or altered. If the checksum of a tensor
            differs, other tensors may already have been loaded.
        CheckpointMismatch: the checkpoint belongs to another model or other optimizers, or, with optimizers, has
            other dtypes. Nothing has been changed.
    """
    with raise_on_all_ranks(f"the checkpoint {path} was not loaded", group or default_group()):
        folder = find(Path(path))
        document = read_document(folder, weights_only=weights_only)
        reader = SafeReader(folder)
        saved = tensor_entries(reader, folder)
        tensors, described = _matching(model, optimizers, document, saved, strict=strict)
    states = [
        allocate_optimizer_state(model, optimizer, with_prefix(saved, optimizer_prefix(index)), description)
        for index, (optimizer, description) in enumerate(zip(optimizers, described, strict=True))
    ]

    wanted = {f"{MODEL}{name}": tensor for name, tensor in tensors.items()}
    wanted |= {name: tensor for name, tensor in (beside or {}).items() if name in saved}
    for index, state in enumerate(states):
        wanted |= {f"{optimizer_prefix(index)}{name}": tensor for name, tensor in state.items()}
    read_tensors(wanted, reader, group)
    for optimizer, state, description in zip(optimizers, states, described, strict=True):
        set_optimizer(model, optimizer, state, description)
    if document["module_states"]:
        model.load_state_dict(document["module_states"], strict=False)
    return document["extra"]


def has_tensor(path: str | PathLike[str], name: str) -> bool:
    """Whether a checkpoint contains a tensor named `name`."""
    folder = find(Path(path))
    return name in tensor_entries(SafeReader(folder), folder)


def _matching(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    document: Mapping[str, Any],
    saved: Mapping[str, Any],
    *,
    strict: bool,
) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """Return the tensors to read and the saved descriptions of the optimizers, after checking both for mismatches."""
    tensors, saved_tensors = model_tensors(model), with_prefix(saved, MODEL)
    if not strict:
        tensors = {name: tensor for name, tensor in tensors.items() if name in saved_tensors}
        saved_tensors = {name: entry for name, entry in saved_tensors.items() if name in tensors}
    check_model(tensors, saved_tensors, is_training=bool(optimizers))
    described = document["optimizers"] if optimizers else []
    if len(optimizers) != len(described):
        raise CheckpointMismatch(
            f"the checkpoint holds {len(described)} optimizers, but {len(optimizers)} were given. "
            "Give as many, in the same order, or optimizers=() to load the model only."
        )
    for index, optimizer in enumerate(optimizers):
        check_optimizer(model, optimizer, index, described[index])
    return tensors, described


def _document(model: nn.Module, optimizers: Sequence[Any], extra: Mapping[str, Any]) -> bytes:
    """Serialize the part of a checkpoint that is not tensors (`meta.pt`)."""
    buffer = io.BytesIO()
    torch.save(
        {
            "format": FORMAT,
            "has_checksums": True,
            "module_states": extra_states(model),
            "tied": tied_names(model),
            "optimizers": list(optimizers),
            "extra": dict(extra),
        },
        buffer,
    )
    return buffer.getvalue()


def _write(
    tensors: dict[str, Any],
    document: bytes,
    path: Path,
    group: dist.ProcessGroup | None,
    of_ranks: RankStates,
    parts: Sequence[TensorPart] | None = None,
) -> None:
    """Write tensors, or parts instead of them, and the states of single ranks."""
    is_first = group is None or dist.get_rank(group) == 0
    failure = f"the checkpoint {path} was not written, and an older one of that name is kept"
    with raise_on_all_ranks(failure, group):
        if is_first:
            prepare(path)
    entries, planner = of_ranks.entries(group), None
    if parts is not None:
        named = [TensorPart(name=name, size=tuple(e.shape), offset=(0,), values=e) for name, e in entries.items()]
        planner = PartsPlanner([*parts, *named])
    with raise_on_all_ranks(failure, group, expected=(RuntimeError,)):
        with warnings.catch_warnings():
            # torch warns about a save by a single process, which is intended here.
            warnings.filterwarnings("ignore", message=".*assuming the intent is to save in a single process.*")
            files = CheckedWriter(incomplete_path(path))
            try:
                save(
                    tensors | entries, storage_writer=files, planner=planner, process_group=group, no_dist=group is None
                )
            except CheckpointException as error:  # raised on all ranks
                discard(path)
                raise own_error(error, failure) from error
        if is_first:  # every rank has written once save returns here
            publish(path, document)


def _write_in_background(
    generation: int,
    tensors: dict[str, Any],
    document: bytes,
    path: Path,
    group: dist.ProcessGroup | None,
    of_ranks: RankStates,
) -> None:
    """Write in the background, pinned to one generation: a joiner knows nothing of this save."""
    with pin_generation(group, generation):
        _write(tensors, document, path, group, of_ranks)


def read_tensors(
    wanted: dict[str, Any], reader: SafeReader, group: dist.ProcessGroup | None, *, is_alone: bool = False
) -> None:
    """Read tensors of a checkpoint, given by their names in it, in place.

    Args:
        wanted: tensors by name.
        reader: of the checkpoint.
        group: whose ranks all call this; the default group if None.
        is_alone: whether this process reads without the others, although there may be a group.

    Raises:
        CheckpointError: they cannot be read; a checksum that differs is a `CheckpointDamaged`.
    """
    is_detached = group_health.phase is Phase.DETACHED  # a joiner, which reads alone
    no_dist = is_alone or is_detached or not dist.is_initialized()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*assuming the intent is to load in a single process.*")
            load(wanted, storage_reader=reader, planner=SafePlanner(), process_group=group, no_dist=no_dist)
    except CheckpointException as error:
        raise own_error(error, f"the checkpoint {reader.path} could not be read") from error


def optimizer_prefix(index: int) -> str:
    """Return the prefix of the names of an optimizer's tensors in a checkpoint."""
    return f"optim.{index}."


def with_prefix(entries: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the entries whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): entry for name, entry in entries.items() if name.startswith(prefix)}


def _finished() -> "Future[None]":
    future: Future[None] = Future()
    future.set_result(None)
    return future
