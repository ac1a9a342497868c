"""How evenly a router spreads tokens over the experts of each layer, for logs."""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hyperpod_plugins.comm import group_health
from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.parallel.expert_parallel import layers_of_experts


class ExpertLoad:
    """Counts the tokens of each expert in the training forwards of a model, with or without expert parallelism.

        load = ExpertLoad(model)  # before or after the model is parallelized
        ...
        self.log_dict(load.values())  # of the tokens of all ranks since the last call

    Each choice of a token counts; nothing is ever dropped. Counted are forwards in training mode or with gradients, and
    what is recomputed in backward counts once. A process that replaces a lost one begins at zero.
    """

    def __init__(self, model: nn.Module) -> None:
        """Count from now on.

        Raises:
            ConfigError: the model has no layer of experts that is known.
        """
        layers = layers_of_experts(model)
        if not layers:
            raise ConfigError(f"{type(model).__name__} has no layer of experts that is known, so it has no load.")
        self._model, self._layers = model, layers
        self._counts: dict[str, Tensor] = {}
        for name, part in layers.items():
            part.register_forward_pre_hook(self._counter(name, part), with_kwargs=True)

    def counts(self) -> dict[str, Tensor]:
        """Return how many tokens of all ranks went to each expert since the last call, by layer; a collective.

        Returns:
            For each layer that has run on any rank, `(num_experts,)`.
        """
        found, self._counts = self._counts, {}
        joined = torch.cat([self._of_layer(name, found.get(name)) for name in self._layers])
        if dist.is_initialized() and dist.get_world_size() > 1 and not group_health.is_unavailable:
            dist.all_reduce(joined)  # of all layers: ranks may have run different ones
            joined //= self._tensor_degree
        parts = joined.split([cast("Any", part).num_experts for part in self._layers.values()])
        has_run = torch.stack([part.sum() for part in parts]).tolist()
        return {name: part for name, part, number in zip(self._layers, parts, has_run, strict=True) if number}

    def _of_layer(self, name: str, counts: Tensor | None) -> Tensor:
        part: Any = self._layers[name]
        device = next(part.parameters()).device
        return torch.zeros(part.num_experts, dtype=torch.int64, device=device) if counts is None else counts

    @property
    def _tensor_degree(self) -> int:
        """Number of ranks that count the same tokens."""
        meshes = [each.device_mesh for each in self._model.parameters() if isinstance(each, DTensor)]
        return max((mesh["tensor"].size() for mesh in meshes if "tensor" in (mesh.mesh_dim_names or ())), default=1)

    def values(self) -> dict[str, float]:
        """Return how evenly tokens were spread since the last call; a collective.

        Returns:
            `router/entropy`: of the distribution of tokens over experts, from 0 (all to one) to 1 (evenly), the mean
            over layers; `router/max_load` and `router/min_load`: tokens of the expert with the most and with the fewest
            of all layers, 1 being its even share. Empty if no layer has run.
        """
        shares = [counts.double() / counts.sum().clamp(min=1) for counts in self.counts().values()]
        if not shares:
            return {}
        loads = torch.cat([share * len(share) for share in shares])
        entropies = torch.stack([torch.special.entr(share).sum() for share in shares])
        limits = torch.tensor([len(share) for share in shares], device=loads.device, dtype=loads.dtype).log()
        entropy = (entropies / limits.clamp(min=1e-12)).mean()
        found = torch.stack([entropy, loads.max(), loads.min()]).tolist()
        return dict(zip(("router/entropy", "router/max_load", "router/min_load"), found, strict=True))

    def _counter(self, name: str, part: Any) -> Callable[..., None]:
        def count(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # Blocks whose activations are recomputed run again in backward, some of them after a forward in no_grad.
            is_counted = part.training or torch.is_grad_enabled()
            if is_counted and torch._C._current_graph_task_id() == -1:  # pyright: ignore[reportPrivateUsage]
                experts: Tensor = [*args, *kwargs.values()][1]
                found = torch.bincount(experts.detach().reshape(-1), minlength=part.num_experts)
                before = self._counts.get(name)
                self._counts[name] = found if before is None else before + found

        return count
