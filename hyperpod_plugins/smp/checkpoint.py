"""SMP's checkpoint functions: torch's distributed checkpoints, in folders.

Each call blocks until all ranks have done their part; `async_save` only copies the state, and writes it in the
background.
"""

import os
from concurrent.futures import Future
from typing import Any

from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException

from hyperpod_plugins.errors import CheckpointDamaged, CheckpointMismatch, ConfigError, format_list
from hyperpod_plugins.parallel.checkpoint.storage import (
    CheckedWriter,
    SafePlanner,
    SafeReader,
    own_error,
    safe_planner,
    safe_reader,
)
from hyperpod_plugins.smp.job import warn_once

_writing: list[Future[Any]] = []
_TUNING = ("coordinator_rank", "queue", "sharded_strategy", "wait_error_handling", "force_check_all_plans", "s3_region")


def save(state_dict: dict[str, Any], *, checkpoint_id: str | os.PathLike[str], **options: Any) -> None:
    """Write a state dict. All ranks must call this.

    Args:
        state_dict: tensors, DTensors and plain values, by name.
        checkpoint_id: a folder that all ranks can access.
        **options: `storage_writer`, `planner` and `process_group`, as in torch; SMP's options that tune writing are
            ignored, with a warning.

    Raises:
        CheckpointError: the checkpoint was not written, or ranks wrote to folders that they do not share.
        ConfigError: `checkpoint_id` is an address of an object store, or an option is unknown.
    """
    folder, known = _folder(checkpoint_id), _known(options)
    known.setdefault("storage_writer", CheckedWriter(folder))
    try:
        state_dict_saver.save(state_dict, checkpoint_id=folder, **known)
    except CheckpointException as error:
        raise own_error(error, f"the checkpoint {folder} was not written") from error


def async_save(state_dict: dict[str, Any], *, checkpoint_id: str | os.PathLike[str], **options: Any) -> None:
    """Copy a state dict, and write it while the program continues; arguments as for `save`.

    Waits first for earlier saves that are still being written.
    """
    maybe_finalize_async_calls(blocking=True)
    folder, known = _folder(checkpoint_id), _known(options)
    known.setdefault("storage_writer", CheckedWriter(folder))
    future = state_dict_saver.async_save(state_dict, checkpoint_id=folder, **known)
    assert isinstance(future, Future)
    _writing.append(future)


def maybe_finalize_async_calls(blocking: bool = False, process_group: Any = None) -> list[int]:
    """Raise the errors of saves that have ended; with `blocking`, wait for all saves.

    Returns:
        Indices of the saves that have ended, in the order in which they were started.
    """
    ended = [index for index, future in enumerate(_writing) if blocking or future.done()]
    done = [_writing[index] for index in ended]
    _writing[:] = [future for future in _writing if future not in done]
    for future in done:
        try:
            future.result()
        except CheckpointException as error:
            raise own_error(error, "a checkpoint was not written") from error
    return ended


def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str],
    check_keys_matched: bool = True,
    **options: Any,
) -> None:
    """Read a checkpoint, written with any degrees, into the tensors of a state dict. All ranks must call this.

    Args:
        state_dict: what to read; its tensors are overwritten in place.
        checkpoint_id: the folder of the checkpoint.
        check_keys_matched: raise if the checkpoint lacks entries; otherwise these keep their values.
        **options: `storage_reader`, `planner` and `process_group`, as in torch; torch's own reader and planner are
            replaced by safe ones.

    Reading runs no code of the checkpoint: values other than tensors must be plain containers, numbers and strings,
    or of classes allowed with `torch.serialization.add_safe_globals`.

    Raises:
        CheckpointDamaged: there is no checkpoint, it is damaged, or reading it would run code.
        CheckpointMismatch: the checkpoint lacks entries.
        ConfigError: see `save`.
    """
    folder, known = _folder(checkpoint_id), _known(options)
    reader = safe_reader(known.pop("storage_reader", None) or SafeReader(folder))
    try:
        present = reader.read_metadata().state_dict_metadata
    except OSError as error:
        raise CheckpointDamaged(f"{folder} holds no checkpoint that can be read ({error}).") from None
    planner = safe_planner(known.pop("planner", None) or SafePlanner(allow_partial_load=not check_keys_matched))
    missing = [name for name in flatten_state_dict(state_dict)[0] if name not in present]
    if missing and check_keys_matched:
        raise CheckpointMismatch(
            f"the checkpoint {folder} lacks {format_list(missing)}. Load it into the model that it was written from, "
            "or pass check_keys_matched=False to keep the present values of these entries."
        )
    try:
        state_dict_loader.load(state_dict, storage_reader=reader, planner=planner, **known)
    except CheckpointException as error:
        raise own_error(error, f"the checkpoint {folder} was not loaded") from error


def _folder(checkpoint_id: str | os.PathLike[str]) -> str:
    path = os.fspath(checkpoint_id)
    if "://" in path:
        raise ConfigError(
            f"checkpoint_id={path!r} is an address of an object store, but only folders are supported. Use a mounted "
            "folder, or your own storage_writer with torch.distributed.checkpoint."
        )
    return path


def _known(options: dict[str, Any]) -> dict[str, Any]:
    tuning = sorted(set(options) & set(_TUNING))
    if tuning:
        warn_once(f"{', '.join(tuning)}: options that tune how SMP writes checkpoints are ignored.")
    known = {key: value for key, value in options.items() if key not in _TUNING and value is not None}
    unknown = sorted(set(known) - {"storage_writer", "storage_reader", "planner", "process_group"})
    if unknown:
        raise ConfigError(
            f"checkpoints take storage_writer, storage_reader, planner and process_group, not {', '.join(unknown)}."
        )
    return known
