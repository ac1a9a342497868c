"""State of the process: which recipe is on, and the scales of all layers, reduced when a region is left."""

import warnings
from collections import defaultdict

import torch
import torch.distributed as dist

from transformer_engine.common.recipe import DelayedScaling


class FP8GlobalStateManager:
    is_available = is_available_in_blocks = True, ""

    @classmethod
    def reset(cls):
        cls.enabled, cls.recipe, cls.depth, cls.is_first = False, None, 0, False
        cls.amaxes, cls.histories, cls.scales = defaultdict(list), defaultdict(list), defaultdict(list)

    @classmethod
    def is_fp8_available(cls):
        return cls.is_available

    @classmethod
    def is_mxfp8_available(cls):
        return cls.is_available_in_blocks

    @classmethod
    def is_nvfp4_available(cls):
        return cls.is_available_in_blocks

    @classmethod
    def is_fp8_enabled(cls):
        return cls.enabled

    @classmethod
    def get_fp8_recipe(cls):
        return cls.recipe

    @classmethod
    def is_first_fp8_module(cls):
        found, cls.is_first = cls.is_first, False
        return found

    @classmethod
    def add_fp8_tensors_to_global_buffer(cls, fp8_meta):
        if not fp8_meta["recipe"].delayed() or "buffer_index_and_autocast_key" in fp8_meta:
            return
        fp8_meta["buffer_index_and_autocast_key"] = []
        for forward, key in ((True, "scaling_fwd"), (False, "scaling_bwd")):
            state = fp8_meta[key]
            cls.amaxes[forward].append(state.amax_history[0])
            cls.histories[forward].append(state.amax_history)
            cls.scales[forward].append(state.scale)
            fp8_meta["buffer_index_and_autocast_key"].append(len(cls.amaxes[forward]) - 1)
        fp8_meta["recipe_of_buffer"] = cls.recipe

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward=True):
        if not cls.amaxes[forward]:
            return
        amax = torch.cat(cls.amaxes[forward])
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(amax, op=dist.ReduceOp.MAX)
        parts = amax.split([each.numel() for each in cls.amaxes[forward]])
        for part, history, scale in zip(parts, cls.histories[forward], cls.scales[forward], strict=True):
            history[0].copy_(part)
            largest = history.amax(0) if cls.last.amax_compute_algo == "max" else history[0].clone()
            history.copy_(history.roll(-1, 0))
            history[0].zero_()
            limit = getattr(cls.last.fp8_format.value, "max_fwd" if forward else "max_bwd")
            new = (limit / largest) / 2**cls.last.margin
            scale.copy_(torch.where((largest > 0) & largest.isfinite(), new, scale))


FP8GlobalStateManager.reset()


def fp8_autocast(enabled=True, calibrating=False, fp8_recipe=None, fp8_group=None, _graph=False):
    warnings.warn(
        "fp8_autocast is deprecated and will be removed in a future release.", DeprecationWarning, stacklevel=2
    )
    return autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph)


class autocast:
    def __init__(self, enabled=True, calibrating=False, recipe=None, amax_reduction_group=None, _graph=False):
        self.enabled, self.recipe = enabled, DelayedScaling() if recipe is None else recipe

    def __enter__(self):
        manager = FP8GlobalStateManager
        self.saved = manager.enabled, manager.recipe, manager.is_first
        manager.enabled, manager.recipe, manager.last = self.enabled, self.recipe, self.recipe
        if manager.depth == 0:
            manager.is_first = True
        manager.depth += 1
        return self

    def __exit__(self, *_):
        manager = FP8GlobalStateManager
        manager.enabled, manager.recipe, manager.is_first = self.saved
        manager.depth -= 1
        if self.enabled and manager.depth == 0 and torch.is_grad_enabled():
            manager.reduce_and_update_fp8_tensors(forward=True)
