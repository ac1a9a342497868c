"""Export a sharded model as safetensors files in the Hugging Face layout, gathering one parameter at a time."""

import importlib.util
import json
import shutil
from collections.abc import Mapping
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hyperpod_plugins.comm.groups import default_group
from hyperpod_plugins.errors import ConfigError, MissingExtraError
from hyperpod_plugins.parallel.checkpoint.files import raise_on_all_ranks
from hyperpod_plugins.parallel.checkpoint.state import model_tensors
from hyperpod_plugins.parallel.hsdp import whole_tensor

_GIB = 2**30
_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PART = ".export.part"  # subfolder that holds the files until all are complete


@runtime_checkable
class _Config(Protocol):
    architectures: list[str] | None

    def save_pretrained(self, save_directory: str) -> None: ...


@runtime_checkable
class _SavesItself(Protocol):
    def save_pretrained(self, save_directory: str) -> None: ...


@runtime_checkable
class _PreTrained(Protocol):
    config: Any
    generation_config: Any

    def save_pretrained(self, save_directory: str) -> None: ...


def plan_files(sizes_bytes: Mapping[str, int], max_file_bytes: int) -> list[list[str]]:
    """Distribute tensors over files in order; a file exceeds the maximum only to hold a single larger tensor."""
    files: list[list[str]] = []
    room = 0
    for name, size_bytes in sizes_bytes.items():
        if not files or size_bytes > room:
            files.append([])
            room = max_file_bytes
        files[-1].append(name)
        room -= size_bytes
    return files


def name_of_file(number: int, num_files: int) -> str:
    """Return the name of a model's file, counted from 1, as transformers names them."""
    return f"model-{number:05d}-of-{num_files:05d}.safetensors" if num_files > 1 else _WHOLE


def check_installed() -> None:
    """Check that the library is there.

    Raises:
        MissingExtraError: it is not.
    """
    if importlib.util.find_spec("safetensors") is None:
        raise MissingExtraError("safetensors", "lightning", "exporting a model")


def export_safetensors(
    model: nn.Module,
    folder: str | PathLike[str],
    *,
    config: _Config | None = None,
    max_file_bytes: int = 4 * _GIB,
) -> None:
    """Write the full model to a folder that `transformers` loads with `from_pretrained`. Call it on all ranks.

    Global rank 0 writes, and holds one file's tensors in memory; the others hold one parameter at a time. Dtypes are
    kept, and tied weights are stored once. The configuration and generation configuration of a Hugging Face model are
    written too.

    Files are renamed to their final names once all of them are complete: an export that fails keeps the folder's
    files.

    Args:
        model: sharded or plain.
        folder: created if absent; existing files of the same names are overwritten.
        config: a Hugging Face configuration, if the model has none.
        max_file_bytes: size above which a new file is started.

    Raises:
        MissingExtraError: safetensors is not installed.
        CheckpointError: global rank 0 could not write; raised on all ranks.
    """
    check_installed()
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors = model_tensors(model)
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    files = plan_files(sizes, max_file_bytes)
    group = default_group()
    is_writer = group is None or dist.get_rank(group) == 0
    target, part = Path(folder), Path(folder) / _PART
    failure = f"the model was not exported to {target}, and files that were there are kept"
    try:
        with raise_on_all_ranks(failure, group):
            if is_writer:
                _make_empty(part)
        weight_map: dict[str, str] = {}
        for number, names in enumerate(files, start=1):
            file_name = name_of_file(number, len(files))
            weight_map |= dict.fromkeys(names, file_name)
            gathered: dict[str, torch.Tensor] = {}
            for name in names:
                full = whole_tensor(tensors[name])
                if is_writer:
                    gathered[name] = full.cpu().contiguous().clone()
            with raise_on_all_ranks(failure, group, expected=(SafetensorError,)):
                if is_writer:
                    save_file(gathered, part / file_name, metadata={"format": "pt"})
        with raise_on_all_ranks(
            failure, group, expected=(ValueError,)
        ):  # ValueError: a configuration that contradicts itself
            if is_writer:
                if len(files) > 1:
                    write_index(part, weight_map, sum(sizes.values()))
                _write_config(model, part, config)
                _move_into_place(part, target)
    finally:
        if is_writer:
            shutil.rmtree(part, ignore_errors=True)


def explain_save_pretrained(model: nn.Module) -> None:
    """Have `save_pretrained` of a sharded model, and of its parts, tell how to gather the weights.

    Otherwise it fails in safetensors, with a message about storages, when the configuration has been written. A
    method that the program has given to one object stays.
    """
    for part in model.modules():
        if isinstance(part, _SavesItself) and "save_pretrained" not in vars(part):
            vars(part)["save_pretrained"] = partial(_save_pretrained, part)


def _save_pretrained(model: nn.Module, save_directory: str | PathLike[str], *args: Any, **kwargs: Any) -> Any:
    """`save_pretrained` of transformers or peft, which write tensors of this process.

    Raises:
        ConfigError: the model is sharded, and no gathered weights were passed.
    """
    has_weights = kwargs.get("state_dict") is not None or any(isinstance(each, Mapping) for each in args)
    is_gathered = has_weights or kwargs.get("distributed_checkpoint", False)
    if not is_gathered and any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ConfigError(
            f"{type(model).__name__}.save_pretrained: the model is sharded, so its weights must be gathered, which all "
            "ranks do together. Call on all ranks, with Accelerate, model.save_pretrained(folder, "
            "is_main_process=accelerator.is_main_process, state_dict=accelerator.get_state_dict(model)); in any "
            "program, hyperpod_plugins.parallel.export_safetensors(model, folder), which holds one file in memory. "
            "Nothing was written."
        )
    of_class: Any = type(model)
    return of_class.save_pretrained(model, save_directory, *args, **kwargs)


def _make_empty(part: Path) -> None:
    """Create the folder for incomplete files. It lies inside the target, to share its disk and permissions."""
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)


def _move_into_place(part: Path, target: Path) -> None:
    """Move complete files to the target, and remove a file of an earlier export that would be read instead."""
    written = [file.name for file in part.iterdir()]
    blocked = [name for name in written if (target / name).is_dir()]
    if blocked:
        raise IsADirectoryError(f"{target / blocked[0]} is a folder, but a file of that name is to be written")
    for name in written:
        (part / name).replace(target / name)
    for stale in {_WHOLE, _INDEX} - {*written}:
        (target / stale).unlink(missing_ok=True)


def write_index(target: Path, weight_map: dict[str, str], size_bytes: int) -> None:
    """Write the index of a model's files, with the file of each tensor and the bytes of all."""
    content = {"metadata": {"total_size": size_bytes}, "weight_map": weight_map}
    (target / _INDEX).write_text(json.dumps(content, indent=2))


def _write_config(model: nn.Module, target: Path, config: _Config | None) -> None:
    if config is None and isinstance(model, _PreTrained):
        config = model.config
    if not isinstance(config, _Config):
        return
    # FSDP2 replaces the model's class by a subclass, whose name `from_pretrained` would look for.
    own_class = next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
    config.architectures = [own_class.__name__]
    config.save_pretrained(str(target))
    if isinstance(model, _PreTrained) and model.generation_config is not None:
        model.generation_config.save_pretrained(str(target))
