"""torchao's linear layer in float8. Importing this file needs torchao."""

import logging

import torch
from torch import Tensor, nn

from hyperpod_plugins.errors import ConfigError

_disabled = logging.root.manager.disable
logging.disable(logging.WARNING)  # without a GPU, torchao warns of each of its CUDA libraries
try:
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.distributed_utils import tensor_already_casted_to_fp8
    from torchao.float8.float8_linear import Float8Linear as _Float8Linear
finally:
    logging.disable(_disabled)


class Float8Linear(_Float8Linear):
    """torchao's layer, which also takes the type of an autocast region of a device other than CUDA."""

    is_gathered_in_float8 = False
    """Whether FSDP2 gathers the weight in float8; set by `gather_in_float8`."""

    def forward(self, input: Tensor) -> Tensor:
        """Compute the layer; see `torchao.float8.float8_linear.Float8Linear`.

        Raises:
            ConfigError: the weight was to be gathered in float8, but was not.
        """
        if self.is_gathered_in_float8 and not tensor_already_casted_to_fp8(self.weight):
            raise ConfigError(
                f"the weight of a {self.in_features} x {self.out_features} layer was to be gathered in float8, but "
                f"arrived in {str(self.weight.dtype).removeprefix('torch.')}: FSDP2 of torch {torch.__version__} does "
                "it differently, or the layer was run outside of FSDP2. Leave float8_all_gather out."
            )
        if torch.is_autocast_enabled(input.device.type):
            input = input.to(torch.get_autocast_dtype(input.device.type))
        return super().forward(input)


def to_float8(linear: nn.Linear, recipe: str, *, is_emulated: bool, pads_inner_dim: bool = False) -> None:
    """Make a linear layer compute in float8, in place: whatever refers to the module or its parameters still does.

    Args:
        linear: exactly an `nn.Linear`.
        recipe: name of a recipe of torchao.
        is_emulated: cast to float8 and back, and multiply in the layer's own type: for devices without float8 units.
        pads_inner_dim: pad the inner sides of products to multiples of 16.
    """
    config = Float8LinearConfig.from_recipe_name(recipe)
    object.__setattr__(config, "emulate", is_emulated)
    object.__setattr__(config, "pad_inner_dim", pads_inner_dim)
    with torch.device("meta"):
        like = Float8Linear(linear.in_features, linear.out_features, bias=False, config=config)
    own = vars(linear)
    own |= {name: value for name, value in vars(like).items() if name not in own}
    linear.__class__ = Float8Linear
