"""`install`: makes `import torch.sagemaker` find this package. An SMP v2 script needs no other change."""

import importlib.abc
import importlib.machinery
import logging
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.parallel.checkpoint.dcp_storage import CheckedWriter, SafeReader
from hyperpod_plugins.smp import checkpoint, job, torch_classes
from hyperpod_plugins.smp.fsdp import DelayedParamIniter, clip_grad_norm_, wrap
from hyperpod_plugins.smp.transform import MoEConfig, transform

_ROOT = "torch.sagemaker"
_ABSENT = {
    "nn": "transformers' own attention serves: pass attn_implementation='flash_attention_2' or 'sdpa' to the model",
    "context_parallel": "context_parallel_degree needs no call: give the model whole sequences, which it splits itself",
    "tensor_parallel": "call torch.sagemaker.transform(model), which knows the layers of transformers' models",
}


def install() -> None:
    """Provide `torch.sagemaker` and its submodules in this process; a second call does nothing.

    Raises:
        ConfigError: the original library has already been imported.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if _ROOT in sys.modules:
        raise ConfigError(
            f"{_ROOT} has been imported already, and is not ours. Call hyperpod_plugins.smp.install() before, in the "
            "first line of the program; or leave it out to use the library that is installed here."
        )
    sys.meta_path.insert(0, _Finder(_contents()))


def uninstall() -> None:
    """Undo `install` and `init`, for tests and notebooks; process groups and wrapped models remain."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    for name in [name for name in sys.modules if name == _ROOT or name.startswith(f"{_ROOT}.")]:
        del sys.modules[name]
    torch.__dict__.pop("sagemaker", None)
    torch_classes.set_translation(False)
    job.reset()


def get_logger() -> logging.Logger:
    """The logger of this package."""
    return logging.getLogger("hyperpod_plugins.smp")


def get_global_ranks(process_group: dist.ProcessGroup) -> list[int]:
    """Global ranks of a group's members."""
    return dist.get_process_group_ranks(process_group)


def _contents() -> dict[str, dict[str, Any]]:
    """Contents of each module of the library, as far as scripts import them."""
    root = {
        "init": job.init,
        "is_initialized": job.is_initialized,
        "transform": transform,
        "state": job.state,
    }
    saving = {
        "save": checkpoint.save,
        "async_save": checkpoint.async_save,
        "maybe_finalize_async_calls": checkpoint.maybe_finalize_async_calls,
    }
    kinds = {"SMStateDictType": checkpoint.SMStateDictType, "sm_state_dict_type": checkpoint.sm_state_dict_type}
    files = {"DistributedFileSystemReader": SafeReader, "DistributedFileSystemWriter": CheckedWriter}
    inner = {
        "delayed_param": {"DelayedParamIniter": DelayedParamIniter},
        "distributed": {},
        "distributed.checkpoint": {},
        "distributed.checkpoint.filesystem": files,
        "distributed.checkpoint.state_dict_loader": {"load": checkpoint.load},
        "distributed.checkpoint.state_dict_saver": saving,
        "distributed.checkpoint.state_dict_utils": kinds,
        "checkpoint": {},
        "checkpoint.state_dict_loader": {"load": checkpoint.load},
        "checkpoint.state_dict_saver": saving,
        "grad_norm": {"clip_grad_norm_": clip_grad_norm_},
        "logger": {"get_logger": get_logger},
        "moe": {},
        "moe.moe_config": {"MoEConfig": MoEConfig},
        "utils": {},
        "utils.process_group_utils": {"get_global_ranks": get_global_ranks},
    }
    return {_ROOT: root} | {f"{_ROOT}.{name}": held for name, held in inner.items()}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Creates the modules in a table when they are imported."""

    def __init__(self, contents: Mapping[str, Mapping[str, Any]]) -> None:
        self._contents = contents

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in self._contents:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        if fullname.startswith(f"{_ROOT}."):
            why = _ABSENT.get(fullname.split(".")[2], f"there are {', '.join(sorted(self._contents))}")
            raise ModuleNotFoundError(f"{fullname} has no counterpart in hyperpod_plugins: {why}.", name=fullname)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name, "Provided by hyperpod_plugins.smp.")
        vars(module).update(self._contents[spec.name])
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


torch_classes.set_replacements(
    wrap,
    {
        "state_dict_type": checkpoint.sm_state_dict_type,
        "set_state_dict_type": checkpoint.set_state_dict_type,
        "optim_state_dict": checkpoint.optim_state_dict,
        "optim_state_dict_to_load": checkpoint.optim_state_dict_to_load,
    },
    job.config_in_wrapper,
)
