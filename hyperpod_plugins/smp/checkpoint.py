"""Checkpoints of SMP's scripts: FSDP1's state dict functions, and torch's distributed checkpoints in folders.

A model that FSDP2 has sharded returns sharded state dicts anyway: DTensors by name, which torch's distributed
checkpoints read and write. Each call that saves or loads blocks until all ranks have done their part; `async_save` only
copies the state, and writes it in the background.
"""

import enum
import os
from collections.abc import Generator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import StateDictType
from torch.distributed.fsdp.api import FullStateDictConfig, StateDictConfig
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hyperpod_plugins.errors import CheckpointDamaged, CheckpointMismatch, ConfigError, format_list
from hyperpod_plugins.parallel.checkpoint.dcp_storage import (
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


class SMStateDictType(enum.Enum):
    """SMP's own type of state dict."""

    SM_LOCAL_STATE_DICT = "local"
    """In SMP, local to a rank and only for the same shard degree. Here, the sharded type, which has no such limit."""


_REPLACED = ("state_dict", "load_state_dict")

_full_configs: WeakKeyDictionary[nn.Module, FullStateDictConfig] = WeakKeyDictionary()
"""Models whose state dicts are full (not sharded) at present."""


@contextmanager
def sm_state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType | SMStateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: Any = None,
) -> Generator[None]:
    """Context in which the state dicts of a model and `FSDP.optim_state_dict` are sharded or full.

    Raises:
        ConfigError: the type is torch's `LOCAL_STATE_DICT`, whose flat tensors FSDP2 does not have.
    """
    before = _full_configs.get(module)
    _set_type(module, state_dict_type, state_dict_config)
    try:
        yield
    finally:
        _set_type(module, StateDictType.SHARDED_STATE_DICT if before is None else StateDictType.FULL_STATE_DICT, before)


def set_state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType | SMStateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: Any = None,
) -> None:
    """Like `sm_state_dict_type`, but until the next call."""
    _set_type(module, state_dict_type, state_dict_config)


def optim_state_dict(model: nn.Module, optim: Optimizer, *_: Any, **__: Any) -> dict[str, Any]:
    """Return the state of an optimizer by parameter name: full tensors if that type was chosen, else sharded ones."""
    config = _full_configs.get(model)
    options = StateDictOptions(full_state_dict=config is not None, cpu_offload=bool(config and config.offload_to_cpu))
    with _as_sharded(model):
        return dict(get_optimizer_state_dict(model, optim, options=options))


def optim_state_dict_to_load(
    model: nn.Module, optim: Optimizer, optim_state_dict: dict[str, Any], *_: Any, **__: Any
) -> dict[str, Any]:
    """Load a state into an optimizer, and return its `state_dict()`: `optim.load_state_dict` then changes nothing."""
    with _as_sharded(model):
        options = StateDictOptions(full_state_dict=model in _full_configs)
        set_optimizer_state_dict(model, optim, optim_state_dict, options=options)
    return optim.state_dict()


def _set_type(model: nn.Module, kind: StateDictType | SMStateDictType, config: Any) -> None:
    if kind is StateDictType.LOCAL_STATE_DICT:
        raise ConfigError(
            "StateDictType.LOCAL_STATE_DICT holds the flat tensors of FSDP1, which this model does not have. Use "
            "SHARDED_STATE_DICT, which can be loaded with any degrees."
        )
    if kind is SMStateDictType.SM_LOCAL_STATE_DICT:
        warn_once("SM_LOCAL_STATE_DICT is a sharded state dict here: it can be loaded with any degrees.")
    for name in _REPLACED:
        vars(model).pop(name, None)
    _full_configs.pop(model, None)
    if kind is not StateDictType.FULL_STATE_DICT:
        return
    config = config if isinstance(config, FullStateDictConfig) else FullStateDictConfig()
    _full_configs[model] = config
    vars(model)["state_dict"] = lambda *args, **kwargs: _gather(type(model).state_dict(model, *args, **kwargs), config)
    vars(model)["load_state_dict"] = lambda state, *_, **__: _load_full(model, state)


def _gather(sharded: Mapping[str, Any], config: FullStateDictConfig) -> dict[str, Any]:
    keeps = not config.rank0_only or dist.get_rank() == 0
    whole: dict[str, Any] = {}
    for name, value in sharded.items():
        full = value.full_tensor() if isinstance(value, DTensor) else value
        if keeps:
            whole[name] = full.cpu() if config.offload_to_cpu and isinstance(full, torch.Tensor) else full
    return whole


def _load_full(model: nn.Module, whole: dict[str, Any]) -> Any:
    with _as_sharded(model):
        return set_model_state_dict(model, whole, options=StateDictOptions(full_state_dict=True))


@contextmanager
def _as_sharded(model: nn.Module) -> Generator[None]:
    """Context without our replacement methods, which the functions called in it would use."""
    replaced = {name: vars(model).pop(name) for name in _REPLACED if name in vars(model)}
    try:
        yield
    finally:
        vars(model).update(replaced)


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
