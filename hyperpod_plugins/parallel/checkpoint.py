"""Sharded checkpoints: every rank writes its part, and any world of any degrees reads them.

    writer = CheckpointWriter()
    handle = writer.save(path, model=model, optimizers=[optimizer], extra={"step": 100}, background=True)
    ...                                               # training goes on; the state was copied
    handle.wait(timeout_s=600)
    extra = load_checkpoint(path, model=model, optimizers=[optimizer])

Built on torch.distributed.checkpoint (DCP), which stores each tensor as chunks of its global shape.
"""

import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from hyperpod_plugins.comm import generation_of, pinned
from hyperpod_plugins.errors import CheckpointError, CheckpointMismatch
from hyperpod_plugins.parallel.agree import agreeing, default_group
from hyperpod_plugins.parallel.checkpoint_files import (
    FORMAT,
    SafeReader,
    find,
    part_of,
    prepare,
    publish,
    read_document,
    tensor_entries,
)
from hyperpod_plugins.parallel.checkpoint_parts import PartsPlanner, StateParts
from hyperpod_plugins.parallel.checkpoint_state import (
    check_model,
    check_optimizer,
    describe_optimizer,
    extra_states,
    model_tensors,
    optimizer_tensors,
    set_optimizer,
    state_to_fill,
)

_MODEL = "model."
WRITE_TIMEOUT_S = 3600.0  # longest wait for a checkpoint in the background, in seconds


class SaveHandle:
    """A save that may still be going on."""

    def __init__(self, path: Path, future: "Future[None]") -> None:
        self.path = path
        self._future = future

    @property
    def is_done(self) -> bool:
        """Whether the save has ended, well or not."""
        return self._future.done()

    def wait(self, timeout_s: float = WRITE_TIMEOUT_S) -> None:
        """Wait until the checkpoint is there for every rank.

        Raises:
            CheckpointError: it could not be written, or not within `timeout_s` seconds.
        """
        try:
            self._future.result(timeout_s)
        except TimeoutError:
            raise CheckpointError(
                f"the checkpoint {self.path} is still being written after {timeout_s} s. Wait longer, or write to a "
                "faster disk; until it is complete it does not exist under its name."
            ) from None


class CheckpointWriter:
    """Writes checkpoints, one at a time. Make it, and call `save`, on all ranks alike."""

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout_s: float = 600.0) -> None:
        """Take `group`, or make one of its own over all ranks, so that saving does not disturb training.

        Args:
            group: process group for CPU tensors that nothing else uses.
            timeout_s: longest wait for another rank, where the group is made here.
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

    def save(
        self,
        path: str | PathLike[str],
        *,
        model: nn.Module,
        optimizers: Sequence[Optimizer] = (),
        extra: Mapping[str, Any] | None = None,
        model_state: Mapping[str, torch.Tensor] | None = None,
        background: bool = False,
    ) -> SaveHandle:
        """Save model, optimizers and `extra` (of the group's first rank) as the folder `path`.

        An existing checkpoint of that name is replaced only when the new one is complete. With `background` the state
        is copied into host memory and written while training goes on. `model_state` is written in place of the model's
        own tensors: some of them, or other values under their names.

        Raises:
            CheckpointError: this save failed, or an earlier one in the background that nobody waited for.
        """
        self.wait()
        state = model_tensors(model) if model_state is None else model_state
        tensors = {f"{_MODEL}{name}": tensor for name, tensor in state.items()}
        for index, optimizer in enumerate(optimizers):
            named = optimizer_tensors(model, optimizer)
            tensors |= {f"{_optimizer_prefix(index)}{name}": tensor for name, tensor in named.items()}
        described = [describe_optimizer(model, optimizer) for optimizer in optimizers]
        document = _document(extra_states(model), described, extra or {})  # now, so that later changes are not saved
        target = Path(path)
        if not background:
            _write(tensors, document, target, self._group)
            return SaveHandle(target, _finished())
        copies = BlockingAsyncStager(cache_staged_state_dict=False).stage(tensors)
        generation = generation_of(self._group)
        written = self._thread.submit(_write_apart, generation, copies, document, target, self._group)
        self._last = SaveHandle(target, written)
        return self._last

    def save_parts(
        self, path: str | PathLike[str], parts: StateParts, *, model: nn.Module, extra: Mapping[str, Any]
    ) -> None:
        """Save what the ranks of the group hold together of a model and its optimizers, instead of their present state.

        What is no tensor is that of the group's first rank.

        Raises:
            CheckpointError: it failed.
        """
        named = [replace(part, name=f"{_MODEL}{part.name}") for part in parts.model]
        for index, optimizer in enumerate(parts.optimizers):
            named += [replace(part, name=f"{_optimizer_prefix(index)}{part.name}") for part in optimizer]
        document = _document(extra_states(model), parts.descriptions, extra)
        _write({}, document, Path(path), self._group, PartsPlanner(named))

    def when_written(self, action: Callable[[], None]) -> None:
        """Do something once the last save is complete, in its thread; not at all if it fails.

        Removing an older checkpoint so does not make training wait for the newer one.
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
            CheckpointError: it failed, or takes longer than `timeout_s` seconds.
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
        """Wait for the last save, then end the thread and the group that was made here."""
        try:
            self.wait()
        finally:
            self._thread.shutdown(wait=False)
            own, self._own_group = self._own_group, None
            if own is not None and dist.is_initialized():
                dist.destroy_process_group(own)


def load_checkpoint(
    path: str | PathLike[str],
    *,
    model: nn.Module,
    optimizers: Sequence[Optimizer] = (),
    weights_only: bool = True,
    strict: bool = True,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Load a checkpoint into a model and optimizers of any sharding, on all ranks together.

    Args:
        path: the folder.
        model: sharded or plain; its tensors are written in place.
        optimizers: as many as were saved, in the same order, or none to load the model only.
        weights_only: refuse Python objects in `extra` other than plain containers, numbers, strings and tensors.
        strict: refuse tensors that only the model or only the checkpoint has.
        group: over which ranks agree; the default group if None.

    Returns:
        The `extra` that was saved.

    Raises:
        CheckpointDamaged: no checkpoint, an interrupted or a foreign one.
        CheckpointMismatch: a checkpoint of another model or other optimizers. Nothing has been changed then.
    """
    with agreeing(f"the checkpoint {path} was not loaded", group or default_group()):
        folder = find(Path(path))
        document = read_document(folder, weights_only=weights_only)
        reader = SafeReader(folder)
        saved = tensor_entries(reader, folder)
        tensors, described = _matching(model, optimizers, document, saved, strict=strict)
    states = [
        state_to_fill(model, optimizer, _with_prefix(saved, _optimizer_prefix(index)))
        for index, optimizer in enumerate(optimizers)
    ]

    wanted = {f"{_MODEL}{name}": tensor for name, tensor in tensors.items()}
    for index, state in enumerate(states):
        wanted |= {f"{_optimizer_prefix(index)}{name}": tensor for name, tensor in state.items()}
    _read(wanted, reader, group)
    for optimizer, state, description in zip(optimizers, states, described, strict=True):
        set_optimizer(model, optimizer, state, description)
    if document["module_states"]:
        model.load_state_dict(document["module_states"], strict=False)
    return document["extra"]


def _matching(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    document: Mapping[str, Any],
    saved: Mapping[str, Any],
    *,
    strict: bool,
) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """The tensors to read and the descriptions of the optimizers, after all that can be compared beforehand."""
    tensors, saved_tensors = model_tensors(model), _with_prefix(saved, _MODEL)
    if not strict:
        tensors = {name: tensor for name, tensor in tensors.items() if name in saved_tensors}
        saved_tensors = {name: entry for name, entry in saved_tensors.items() if name in tensors}
    check_model(tensors, saved_tensors)
    described = document["optimizers"] if optimizers else []
    if len(optimizers) != len(described):
        raise CheckpointMismatch(
            f"the checkpoint holds {len(described)} optimizers, but {len(optimizers)} were given. "
            "Give as many, in the same order, or optimizers=() to load the model only."
        )
    for index, optimizer in enumerate(optimizers):
        check_optimizer(model, optimizer, index, described[index])
    return tensors, described


def _document(module_states: Mapping[str, Any], optimizers: Sequence[Any], extra: Mapping[str, Any]) -> bytes:
    """What is written beside the tensors."""
    buffer = io.BytesIO()
    torch.save(
        {
            "format": FORMAT,
            "module_states": dict(module_states),
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
    planner: SavePlanner | None = None,
) -> None:
    is_first = group is None or dist.get_rank(group) == 0
    failure = f"the checkpoint {path} was not written, and an older one of that name is kept"
    with agreeing(failure, group):
        if is_first:
            prepare(path)
    with agreeing(failure, group, expected=(CheckpointException, RuntimeError)):
        with warnings.catch_warnings():
            # torch warns of a save by a single process, which is what was asked for.
            warnings.filterwarnings("ignore", message=".*assuming the intent is to save in a single process.*")
            where = part_of(path)
            save(tensors, checkpoint_id=where, planner=planner, process_group=group, no_dist=group is None)
        if is_first:  # every rank has written when save returns here
            publish(path, document)


def _write_apart(
    generation: int, tensors: dict[str, Any], document: bytes, path: Path, group: dist.ProcessGroup | None
) -> None:
    """Write beside the training. Whoever replaces a rank meanwhile knows nothing of it, so it ends with the group."""
    with pinned(group, generation):
        _write(tensors, document, path, group)


def _read(wanted: dict[str, Any], reader: SafeReader, group: dist.ProcessGroup | None) -> None:
    no_dist = not dist.is_initialized()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*assuming the intent is to load in a single process.*")
            load(wanted, storage_reader=reader, process_group=group, no_dist=no_dist)
    except CheckpointException as error:
        raise CheckpointError(f"the checkpoint {reader.path} could not be read: {error}") from error


def _optimizer_prefix(index: int) -> str:
    return f"optim.{index}."


def _with_prefix(entries: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): entry for name, entry in entries.items() if name.startswith(prefix)}


def _finished() -> "Future[None]":
    future: Future[None] = Future()
    future.set_result(None)
    return future
