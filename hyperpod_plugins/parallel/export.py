"""Write a sharded model as safetensors files in the layout of Hugging Face, one parameter at a time."""

import importlib.util
import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hyperpod_plugins.errors import MissingExtraError
from hyperpod_plugins.parallel.checkpoint_state import model_tensors

_GIB = 2**30


@runtime_checkable
class _Config(Protocol):
    architectures: list[str] | None

    def save_pretrained(self, save_directory: str) -> None: ...


@runtime_checkable
class _PreTrained(Protocol):
    config: Any
    generation_config: Any

    def save_pretrained(self, save_directory: str) -> None: ...


def plan_files(sizes_bytes: Mapping[str, int], max_file_bytes: int) -> list[list[str]]:
    """Distribute tensors over files in order; a file takes more than the maximum only for a single larger tensor."""
    files: list[list[str]] = []
    room = 0
    for name, size_bytes in sizes_bytes.items():
        if not files or size_bytes > room:
            files.append([])
            room = max_file_bytes
        files[-1].append(name)
        room -= size_bytes
    return files


def export_safetensors(
    model: nn.Module,
    folder: str | PathLike[str],
    *,
    config: _Config | None = None,
    max_file_bytes: int = 4 * _GIB,
) -> None:
    """Write the full model to a folder that `transformers` loads with `from_pretrained`. Call it on all ranks.

    Global rank 0 writes, and holds one file's tensors; the others hold one parameter at a time. Types are kept, tied
    weights are stored once. Configuration and generation configuration of a Hugging Face model are written too.

    Args:
        model: sharded or plain.
        folder: made if absent; files of that name are overwritten.
        config: a Hugging Face configuration, if the model has none.
        max_file_bytes: size above which a further file is begun.

    Raises:
        MissingExtraError: safetensors is not installed.
    """
    if importlib.util.find_spec("safetensors") is None:
        raise MissingExtraError("safetensors", "lightning", "Exporting a model")
    from safetensors.torch import save_file

    tensors = model_tensors(model)
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    files = plan_files(sizes, max_file_bytes)
    is_writer = not dist.is_initialized() or dist.get_rank() == 0
    target = Path(folder)
    if is_writer:
        target.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(files, start=1):
        file_name = f"model-{number:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else "model.safetensors"
        weight_map |= dict.fromkeys(names, file_name)
        gathered: dict[str, torch.Tensor] = {}
        for name in names:
            full = _gather(tensors[name])
            if is_writer:
                gathered[name] = full.cpu().contiguous().clone()
        if is_writer:
            save_file(gathered, target / file_name, metadata={"format": "pt"})
    if is_writer:
        _write_json(target, weight_map, sum(sizes.values()), is_sharded=len(files) > 1)
        _write_config(model, target, config)
    if dist.is_initialized():
        dist.barrier()  # the folder is complete for everybody who returns


def _gather(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _write_json(target: Path, weight_map: dict[str, str], size_bytes: int, *, is_sharded: bool) -> None:
    index = target / "model.safetensors.index.json"
    index.unlink(missing_ok=True)  # of an earlier export with more files
    if is_sharded:
        index.write_text(json.dumps({"metadata": {"total_size": size_bytes}, "weight_map": weight_map}, indent=2))
        (target / "model.safetensors").unlink(missing_ok=True)


def _write_config(model: nn.Module, target: Path, config: _Config | None) -> None:
    if config is None and isinstance(model, _PreTrained):
        config = model.config
    if not isinstance(config, _Config):
        return
    # FSDP2 puts a class of its own before the model's, whose name `from_pretrained` would look for.
    own_class = next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
    config.architectures = [own_class.__name__]
    config.save_pretrained(str(target))
    if isinstance(model, _PreTrained) and model.generation_config is not None:
        model.generation_config.save_pretrained(str(target))
