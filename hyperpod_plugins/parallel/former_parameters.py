"""Repair optimizers that were made before their model was sharded, and hold parameters that it no longer has.

Sharding replaces a model's parameters. An optimizer that holds the old ones gets no gradients and silently trains
nothing. Names do not change, so each old parameter can be mapped to its replacement.
"""

from collections.abc import Iterable
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.optim import Optimizer

from hyperpod_plugins.errors import ConfigError, format_list

_Names = dict[int, tuple["ref[torch.Tensor]", str]]
_former: "WeakKeyDictionary[nn.Module, _Names]" = WeakKeyDictionary()


def remember_parameters(model: nn.Module) -> None:
    """Record the parameters of a model before it is sharded, by weak references."""
    _former[model] = {id(parameter): (ref(parameter), name) for name, parameter in model.named_parameters()}


def replace_stale_parameters(optimizers: Iterable[Optimizer], model: nn.Module, *, num_ranks: int) -> None:
    """Replace the unsharded parameters that optimizers hold by the sharded parameters of the model.

    Args:
        optimizers: optimizers of `model`.
        model: a sharded model, by `parallelize` or otherwise.
        num_ranks: world size of the job.

    Raises:
        ConfigError: an optimizer already has state for an unsharded parameter; or, with several ranks, it holds
            parameters that are not the model's, which each rank would train independently.
    """
    present = dict(model.named_parameters(remove_duplicate=False))
    held = {id(parameter) for parameter in present.values()}
    names = {
        key: name
        for root, former in _former.items()
        for key, (alive, name) in _names_in(model, root, former).items()
        if alive() is not None and name in present
    }
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        foreign: list[str] = []
        for group in optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                if id(parameter) in held:
                    continue
                name = names.get(id(parameter))
                if name is None:
                    foreign.append(str(tuple(parameter.shape)))
                elif parameter in optimizer.state:
                    raise ConfigError(
                        f"this {kind} has state already, of {name} before it was sharded. Make it from the sharded "
                        "model's parameters (in configure_optimizers, or after session.parallelize), and load saved "
                        "state afterwards."
                    )
                else:
                    group["params"][index] = present[name]
        if foreign and num_ranks > 1:
            raise ConfigError(
                f"this {kind} holds {len(foreign)} parameters that are not in the sharded {type(model).__name__}, of "
                f"shapes {format_list(foreign)}: it would not train the model, or each rank would train its own copy. "
                "Make it from parameters of the sharded model: in configure_optimizers with self.parameters(), or "
                "after session.parallelize(model)."
            )


def _names_in(model: nn.Module, root: nn.Module, former: _Names) -> _Names:
    """Return the record of `root` under the names that its parameters have in `model`, around or inside it."""
    if root is model:
        return former
    for prefix, part in model.named_modules():
        if part is root:
            return {key: (alive, f"{prefix}.{name}") for key, (alive, name) in former.items()}
    for prefix, part in root.named_modules():
        if part is model:
            begin = f"{prefix}."
            inside = {key: (alive, name) for key, (alive, name) in former.items() if name.startswith(begin)}
            return {key: (alive, name.removeprefix(begin)) for key, (alive, name) in inside.items()}
    return {}
