"""torchao's linear layer in float8, and how FSDP2 gathers its weight. Importing this file needs torchao.

With `float8_all_gather`, FSDP2 gathers the weights in float8: one byte a value instead of two. Each rank casts its
shard with the scale of the whole weight, for which ranks compare their largest absolute values: one small all-reduce
for each gather of a unit. Casting each value is independent of the others, so the gathered bits are those of a gather
in bfloat16 followed by the cast, and training gives the same bits with and without.

[Note: shards stay plain] torchao's own float8 gather puts a tensor subclass into the parameters, which optimizers,
checkpoints and recovery would then meet, which keeps scales from one step to the next, and which fails on shards of
unequal size (torchao issues 1938 and 3982). Here a shard stays a plain tensor, and `Float8Shard` stands in for it only
where FSDP2 looks for its extension `fsdp_pre_all_gather` and `fsdp_post_all_gather`. Scales are computed anew for every
gather, so there is no state that a load, a repair or a replacement could leave behind.
"""

# FSDP2's parameters have no public API. Their extension points are documented in [Note: FSDP tensors] of torch.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor

from hyperpod_plugins.errors import ConfigError

_disabled = logging.root.manager.disable
logging.disable(logging.WARNING)  # without a GPU, torchao warns of each of its CUDA libraries
try:
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.distributed_utils import tensor_already_casted_to_fp8
    from torchao.float8.float8_linear import Float8Linear as _Float8Linear
    from torchao.float8.float8_training_tensor import (
        Float8TrainingTensor,
        GemmInputRole,
        hp_tensor_and_scale_to_float8,
    )
    from torchao.float8.float8_utils import amax_to_scale
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


def gather_in_float8(parameter_groups: Iterable[Any]) -> int:
    """Let FSDP2 gather the weights of layers with a scale for a whole tensor in float8, in place.

    Call it after `fully_shard`, and before the model has run. Parameters remain DTensors of the type that they have.
    Weights that are gathered in float8 already are left as they are.

    Args:
        parameter_groups: FSDP2's parameter groups.

    Returns:
        The number of weights for which this is new.

    Raises:
        ConfigError: FSDP2 has gathered such a weight in another type already, whose memory it would use again.
    """
    number = 0
    for group in parameter_groups:
        weights = [each for each in group.fsdp_params if _is_weight_of_float8(each)]
        weights = [each for each in weights if not isinstance(each, _Float8Param)]
        if any("_unsharded_param" in vars(each) for each in weights):
            raise ConfigError(
                "float8_all_gather=True, but this model has run already with weights that FSDP2 gathered in another "
                "type. Ask for it before the model runs for the first time, or leave float8_all_gather out."
            )
        unit = _Float8Unit(weights)
        for each in weights:
            each.__class__ = _Float8Param
            each._float8_shard = Float8Shard(each, unit)
            each._init_extensions()
            each._module_info.module.is_gathered_in_float8 = True
        number += len(weights)
    return number


def _is_weight_of_float8(parameter: Any) -> bool:
    owner = parameter._module_info
    return isinstance(owner.module, Float8Linear) and owner.param_name == "weight"


class _Float8Param(FSDPParam):
    """FSDP2's handle of a parameter, which finds the extension in `Float8Shard`."""

    _float8_shard: "Float8Shard"

    @property
    def _sharded_local_tensor(self) -> Tensor:
        return cast("Tensor", self._float8_shard)


class Float8Shard:
    """Stands in for the local tensor of a parameter that is gathered in float8; see [Note: shards stay plain]."""

    def __init__(self, parameter: Any, unit: "_Float8Unit") -> None:
        """Create the stand-in.

        Args:
            parameter: FSDP2's handle of the parameter.
            unit: all such parameters that are gathered together.
        """
        self._parameter, self._unit = parameter, unit

    def size(self) -> torch.Size:
        """Shape of the shard, padded to that of the largest one."""
        return self._parameter.padded_sharded_param_size

    def to(self, *_: Any, **__: Any) -> "Float8Shard":
        """Return itself: `fsdp_pre_all_gather` copies shards in host memory to the device."""
        return self

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor], tuple[Tensor]]:
        """Return the shard in float8, as bytes, and the scale of the whole weight; all ranks call this together."""
        shard, scale = self._unit.shard_and_scale(self._parameter)
        linear: Float8Linear = self._parameter._module_info.module
        target = linear.config.cast_config_weight.target_dtype
        part = hp_tensor_and_scale_to_float8(shard, scale, target, linear.linear_mm_config, GemmInputRole.WEIGHT)
        return (part._data.view(torch.uint8),), (scale,)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: tuple[Tensor],
        param_dtype: torch.dtype,
        *,
        out: Any = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Return the gathered weight, still with padding, which FSDP2 cuts off; `out`: the one of an earlier gather."""
        (gathered,), (scale,) = all_gather_outputs, metadata
        if scale.is_cuda:  # allocated on FSDP2's stream for copies, and used on this one
            scale.record_stream(torch.cuda.current_stream(scale.device))
        if out is not None:
            (out._local_tensor if isinstance(out, DTensor) else out)._scale = scale
            return None
        linear: Float8Linear = self._parameter._module_info.module
        whole = Float8TrainingTensor(
            gathered.view(linear.config.cast_config_weight.target_dtype),
            scale,
            param_dtype,
            linear.linear_mm_config,
            GemmInputRole.WEIGHT,
        )
        return whole, ()  # FSDP2 frees and allocates the memory, which is that of its own output


class _Float8Unit:
    """The weights that are gathered together in float8, whose scales ranks compute together."""

    def __init__(self, parameters: Sequence[Any]) -> None:
        self._parameters = list(parameters)
        self._ready: dict[int, tuple[Tensor, Tensor]] = {}

    def shard_and_scale(self, parameter: Any) -> tuple[Tensor, Tensor]:
        """Return the shard of a parameter, padded, in the type in which it computes, and the scale of the whole.

        FSDP2 asks for each parameter once a gather, always in the same order. The first one computes all scales.
        """
        if parameter is self._parameters[0]:
            self._compute_scales()
        return self._ready.pop(id(parameter))

    def _compute_scales(self) -> None:
        shards = [_padded_shard(each) for each in self._parameters]
        values = [_without_padding(each, shard) for each, shard in zip(self._parameters, shards, strict=True)]
        largest = _largest_values(values)
        for group in self._groups():
            if group.size() > 1:
                dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        for parameter, shard, value in zip(self._parameters, shards, largest.unbind(), strict=True):
            config = parameter._module_info.module.config
            scale = amax_to_scale(value, config.cast_config_weight.target_dtype, config.round_scales_to_power_of_2)
            self._ready[id(parameter)] = shard, scale

    def _groups(self) -> list[dist.ProcessGroup]:
        """Groups whose ranks have other parts of the same weights: of the shard axis, and of the tensor axis."""
        groups = [self._parameters[0].mesh_info.shard_process_group]
        for each in self._parameters:
            of_each = vars(each)
            spec = of_each.get("_unsharded_dtensor_spec", of_each.get("_tp_spec"))  # the latter before torch 2.12
            if spec is not None:
                groups += [
                    spec.mesh.get_group(axis) for axis, kind in enumerate(spec.placements) if not kind.is_replicate()
                ]
        return list(dict.fromkeys(groups))


def _padded_shard(parameter: Any) -> Tensor:
    shard = parameter._sharded_param_data
    if parameter.offload_to_cpu:
        shard = shard.to(parameter.device, non_blocking=True)
    return shard.to(parameter.param_dtype or shard.dtype).view(parameter.padded_sharded_param_size)


def _without_padding(parameter: Any, shard: Tensor) -> Tensor:
    axis, own = parameter.fsdp_placement.dim, parameter.sharded_size
    return shard.narrow(axis, 0, own[axis] if own.numel() else 0)


def _largest_values(tensors: Sequence[Tensor]) -> Tensor:
    """Return the largest absolute value of each tensor, `(tensors,)` in float32; 0 for empty ones.

    NaN counts as infinite: reductions of different libraries order NaN differently. Either way, the layer's results
    are NaN.
    """
    found = torch.zeros(len(tensors), dtype=torch.float32, device=tensors[0].device)
    filled = [index for index, each in enumerate(tensors) if each.numel()]
    if filled:
        norms = torch._foreach_norm([tensors[index] for index in filled], math.inf)  # pyright: ignore[reportPrivateImportUsage]
        found[filled] = torch.stack(norms).to(torch.float32)
    return found.nan_to_num(nan=math.inf, posinf=math.inf)
