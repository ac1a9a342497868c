"""Flatten all gradients of a rank into one vector, for code that averages them over replicas in place of FSDP2."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.parallel.hsdp import from_local_like, local_part
from hyperpod_plugins.parallel.unit_watch import reconcile_gradients


class GradientVector:
    """Moves the gradients of a model's parameters into one vector, and back.

    The vector is float32. It holds the local part of each gradient, then for each parameter 1 or 0 for whether it has
    a gradient, then values added by the caller, then padding. A sum of such vectors holds the sum of the gradients,
    and shows which parameters have a gradient anywhere.
    """

    def __init__(self, model: nn.Module, option: str) -> None:
        """Record the trainable parameters of `model`.

        Args:
            model: model that is sharded only within each replica.
            option: option that the user has set, for the error message.

        Raises:
            ConfigError: the model is sharded such that FSDP2 averages gradients over replicas itself.
        """
        for name, parameter in model.named_parameters():
            if isinstance(parameter, DTensor) and "replicate" in (parameter.device_mesh.mesh_dim_names or ()):
                raise ConfigError(
                    f"{name} is sharded over a mesh with an axis for replicas, so FSDP2 adds up their gradients, and "
                    f"those of a single replica are never seen. For {option} shard over the axis 'shard' alone, or "
                    "leave sharding to the strategy or the session."
                )
        self._model = model
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        """Trainable parameters, in the order of their gradients in the vector."""
        self._sizes = [local_part(parameter).numel() for parameter in self.parameters]

    def flatten(self, *more: Tensor, multiple_of: int = 1) -> Tensor:
        """Return the vector and clear the gradients. All ranks call this together.

        Args:
            more: values to append, each `()`.
            multiple_of: the length is padded with zeros to a multiple of this.
        """
        reconcile_gradients(self._model)
        parts: list[Tensor] = []
        has_one: list[float] = []
        for parameter in self.parameters:
            gradient, parameter.grad = parameter.grad, None
            has_one.append(float(gradient is not None))
            parts.append(local_part(parameter if gradient is None else gradient).detach().reshape(-1).float())
            if gradient is None:
                parts[-1] = torch.zeros_like(parts[-1])
        device = parts[0].device
        parts += [torch.tensor(has_one, device=device), *(each.detach().to(device).float().reshape(1) for each in more)]
        parts.append(torch.zeros(-sum(part.numel() for part in parts) % multiple_of, device=device))
        return torch.cat(parts)

    def unflatten(self, vector: Tensor) -> Tensor:
        """Set the gradients from a vector; return the appended values and the padding."""
        counts = vector[sum(self._sizes) :][: len(self._sizes)]
        for parameter, part, has_one in zip(self.parameters, self.parts(vector), counts.tolist(), strict=True):
            if has_one:
                local = part.view(local_part(parameter).shape).to(parameter.dtype)
                parameter.grad = from_local_like(parameter, local)
        return vector[sum(self._sizes) + len(self._sizes) :]

    def parts(self, vector: Tensor) -> list[Tensor]:
        """Return views of the local part of each gradient, flat."""
        return list(vector[: sum(self._sizes)].split(self._sizes))
