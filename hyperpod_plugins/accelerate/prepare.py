"""What `prepare` does to a model and its optimizers."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from types import MethodType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hyperpod_plugins.accelerate.compat import convert_outputs_to_fp32
from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.parallel.hsdp import fsdp_units, reshard_after_evaluations
from hyperpod_plugins.parallel.parallelize import match_rank_0


def shard_with_optimizers(
    model: nn.Module, optimizers: Sequence[Optimizer], shard: Callable[[nn.Module], None], *, is_delayed_alike: bool
) -> None:
    """Shard a model in place, and replace the old parameters in its optimizers by the new ones.

    Accelerate maps parameters by their memory address, which parameters on the meta device and empty shards do not
    have. Here they are mapped by name. Meanwhile the optimizers hold no parameters, so that each can be freed.
    `is_delayed_alike`: see `match_rank_0`.

    Raises:
        ConfigError: an optimizer already has state, or holds a parameter that is not the model's; or tensors have
            values on some ranks only.
    """
    if any(True for _ in fsdp_units(model)):
        return  # by an earlier `prepare`, or by the user: its optimizers hold the shards
    refuse_half_loaded(model, is_delayed_alike=is_delayed_alike)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    held: list[tuple[dict[str, Any], list[str]]] = []
    for optimizer in optimizers:
        if optimizer.state:
            raise ConfigError(
                f"this {type(optimizer).__name__} has state already, of parameters that are not sharded. Prepare it "
                "before its first step, and load saved state with accelerator.load_state afterwards."
            )
        for group in optimizer.param_groups:
            foreign = [tuple(parameter.shape) for parameter in group["params"] if id(parameter) not in names]
            if foreign:
                raise ConfigError(
                    f"this {type(optimizer).__name__} holds {len(foreign)} parameters, the first of shape "
                    f"{foreign[0]}, that are not in the {type(model).__name__} it is prepared with. Make it from "
                    "model.parameters()."
                )
            held.append((group, [names[id(parameter)] for parameter in group["params"]]))
    for group, _ in held:
        group["params"] = []
    shard(model)
    reshard_after_evaluations(model)
    parameters = dict(model.named_parameters())
    for group, in_group in held:
        group["params"] = [parameters[name] for name in in_group]


def refuse_half_loaded(model: nn.Module, *, is_delayed_alike: bool) -> None:
    """Raise `ConfigError` if tensors have values on some ranks only.

    With `cpu_ram_efficient_loading`, which `accelerate launch` enables by default, transformers loads a model only on
    the first rank of each node.
    """
    advice = (
        "With cpu_ram_efficient_loading, only one rank of a node loads values. Make the plugin's Accelerator before "
        "loading the model, or set fsdp_cpu_ram_efficient_loading: false. Large models are built inside "
        "hyperpod_plugins.delayed_init.delayed_init."
    )
    match_rank_0(model, compares_types=False, is_delayed_alike=is_delayed_alike, advice=advice)


def wrap_forward(
    model: nn.Module, context: Callable[[], AbstractContextManager[None]], *, returns_float32: bool
) -> None:
    """Run a model's `forward` in a context; with `returns_float32`, convert floating-point outputs to float32.

    The wrapper is attached like Accelerate's own, so that `Accelerator.unwrap_model` can remove it.
    """
    if "_original_forward" in vars(model):
        return
    original = model.forward
    function = (
        original.__func__ if isinstance(original, MethodType) else lambda _, *args, **kwargs: original(*args, **kwargs)
    )

    @wraps(function)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with context():
            return function(self, *args, **kwargs)

    vars(model)["_original_forward"] = original
    vars(model)["forward"] = MethodType(convert_outputs_to_fp32(forward) if returns_float32 else forward, model)
