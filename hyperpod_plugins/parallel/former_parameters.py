"""Optimizers that were made before their model was sharded, and hold parameters that it no longer has.

Sharding puts new parameters in the place of a model's. An optimizer that holds the old ones gets no gradients and
trains nothing, without an error. Names stay, so each old parameter leads to the one in its place.
"""

from collections.abc import Iterable
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.optim import Optimizer

from hyperpod_plugins.errors import ConfigError, few

_Names = dict[int, tuple["ref[torch.Tensor]", str]]
_former: "WeakKeyDictionary[nn.Module, _Names]" = WeakKeyDictionary()


def remember_parameters(model: nn.Module) -> None:
    """Note which parameters a model has, before it is sharded; nothing of them is kept alive."""
    _former[model] = {id(parameter): (ref(parameter), name) for name, parameter in model.named_parameters()}


def give_shards(optimizers: Iterable[Optimizer], model: nn.Module, *, num_ranks: int) -> None:
    """Put the sharded parameters of a model in the place of those that optimizers hold from before.

    Args:
        optimizers: over parameters of `model`.
        model: sharded, by `parallelize` or in another way.
        num_ranks: of the job.

    Raises:
        ConfigError: an optimizer has state of parameters that are not sharded; it holds some that are not the model's,
            which each of several ranks would train by itself.
    """
    present = dict(model.named_parameters(remove_duplicate=False))
    held = {id(parameter) for parameter in present.values()}
    names = {
        key: name
        for root, former in _former.items()
        for key, (alive, name) in _as_seen_from(model, root, former).items()
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
                f"shapes {few(foreign)}, so that it would train nothing of it, or each rank a copy of its own. Make it "
                "from the parameters of the sharded model, of which they must be part: in configure_optimizers with "
                "self.parameters(), or after session.parallelize(model)."
            )


def _as_seen_from(model: nn.Module, root: nn.Module, former: _Names) -> _Names:
    """What was noted of a module, under the names that parameters have in a module around or inside it."""
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
