"""`transform`: marks models for tensor parallelism. The FSDP wrap splits them, together with sharding."""

from dataclasses import dataclass
from typing import Any, Literal, cast, get_args
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hyperpod_plugins.errors import ConfigError, NotBuiltYetError
from hyperpod_plugins.parallel.expert_balancing import Method, balance_experts
from hyperpod_plugins.parallel.tensor_parallel import plan_for
from hyperpod_plugins.smp.job import current_job

LoadBalancing = Literal["sinkhorn", "balanced", "aux_loss", "none"]
CpCommType = Literal["p2p", "all_gather"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """How experts are balanced; the layers of experts stay those of transformers.

    Raises:
        ConfigError: `moe_load_balancing` is unknown.
        NotBuiltYetError: `global_token_shuffle=True`, or `moe_load_balancing="balanced"`.
    """

    smp_moe: bool = True
    """Whether to balance experts as the other options say; SMP puts a layer of its own into the model's place."""
    random_seed: int = 12345
    """Seed of the parameters of SMP's layer; without effect, as the model keeps its own."""
    moe_load_balancing: LoadBalancing = "sinkhorn"
    """How the router chooses experts; see `balance_experts`."""
    global_token_shuffle: bool = False
    """Whether tokens are shuffled among ranks."""
    moe_all_to_all_dispatcher: bool = True
    """Whether tokens travel to experts by all-to-all; they always do."""
    moe_aux_loss_coeff: float = 0.001
    """Weight of the load balancing loss, for `aux_loss`."""
    moe_z_loss_coeff: float = 0.001
    """Weight of the loss that keeps the router's logits small."""

    def __post_init__(self) -> None:
        """Check the options."""
        if self.moe_load_balancing not in get_args(LoadBalancing):
            raise ConfigError(
                f"moe_load_balancing must be one of {', '.join(get_args(LoadBalancing))}, but is "
                f"{self.moe_load_balancing!r}"
            )
        if self.smp_moe and (self.global_token_shuffle or self.moe_load_balancing == "balanced"):
            raise NotBuiltYetError(
                f"MoEConfig(global_token_shuffle={self.global_token_shuffle}, moe_load_balancing="
                f"{self.moe_load_balancing!r}) is not served yet. Use global_token_shuffle=False, and 'sinkhorn', "
                "'aux_loss' or 'none'."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformed:
    """What `transform` was told of a model."""

    guard: RemovableHandle
    """Refuses its use before it is wrapped."""
    from_first_rank: bool
    """Whether rank 0's parameters are used."""
    cp_comm_type: CpCommType | None
    """How context parallelism communicates; None if it was not said."""


_transformed: WeakKeyDictionary[nn.Module, Transformed] = WeakKeyDictionary()


def transform(
    model: nn.Module,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    config: MoEConfig | None = None,
    load_state_dict_from_rank0: bool = False,
    cp_comm_type: CpCommType | None = None,
) -> nn.Module:
    """Mark a model for tensor parallelism, and check that it can be split. The FSDP wrap that follows splits it.

    Args:
        model: a model with real parameters, or on the meta device.
        device: `meta`, the type of device that the job trains on, or None; the wrap places parameters.
        dtype: dtype to convert floating-point parameters to.
        config: how experts are balanced, if `smp_moe` is set; None for a model without, or as it balances itself.
        load_state_dict_from_rank0: use rank 0's parameters; those of other ranks may be on the meta device. Holds if
            any call for this model asks for it.
        cp_comm_type: how context parallelism communicates: keys and values go round a ring ("p2p"), or are gathered
            ("all_gather"). Left out, ranks exchange heads where these divide, and gather keys and values otherwise.

    Returns:
        The same model.

    Raises:
        ConfigError: `init` was not called, `device` is another one, or the tensor plan does not fit the model; see also
            `balance_experts`.
        NotBuiltYetError: a tensor plan with styles for experts; see also `balance_experts`.
    """
    job = current_job()
    if cp_comm_type is not None and cp_comm_type not in get_args(CpCommType):
        raise ConfigError(f"cp_comm_type must be one of {', '.join(get_args(CpCommType))}, but is {cp_comm_type!r}")
    if device is not None and torch.device(device).type not in ("meta", job.mesh.device_type):
        raise ConfigError(
            f"transform(device={str(device)!r}) in a job on {job.mesh.device_type!r}: leave device out, or say 'meta'."
        )
    if device is not None and torch.device(device).type == "meta":
        model.to("meta")
    if dtype is not None:
        model.to(dtype)
    plan_for(model, job.config)
    if config is not None and config.smp_moe:
        balance_experts(
            model,
            method=cast("Method", config.moe_load_balancing),
            aux_loss_coeff=config.moe_aux_loss_coeff,
            z_loss_coeff=config.moe_z_loss_coeff,
        )
    former = _transformed.get(model)
    guard = model.register_forward_pre_hook(_refuse_unwrapped) if former is None else former.guard
    from_first_rank = load_state_dict_from_rank0 or (former is not None and former.from_first_rank)
    if cp_comm_type is None and former is not None:
        cp_comm_type = former.cp_comm_type
    _transformed[model] = Transformed(guard=guard, from_first_rank=from_first_rank, cp_comm_type=cp_comm_type)
    return model


def take_transformed(model: nn.Module) -> list[Transformed]:
    """Remove the marks of `transform`, and return them."""
    found = [_transformed.pop(part) for part in list(model.modules()) if part in _transformed]
    for each in found:
        each.guard.remove()
    return found


def _refuse_unwrapped(model: nn.Module, _: Any) -> None:
    raise ConfigError(
        f"{type(model).__name__} was given to transform() and then run without FullyShardedDataParallel(...) around "
        "it, so it is neither split nor sharded. Wrap it, or call hyperpod_plugins.smp.wrap(model)."
    )
