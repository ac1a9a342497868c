"""FSDP1's state dict functions, for a model that FSDP2 has sharded.

Such a model returns sharded state dicts anyway: DTensors by name, which torch's distributed checkpoints read and
write.
"""

import enum
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
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

from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.parallel.hsdp import whole_tensor
from hyperpod_plugins.smp.job import warn_once


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
        full = whole_tensor(value) if isinstance(value, DTensor) else value
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
