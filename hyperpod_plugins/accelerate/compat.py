"""Names of Accelerate that this package uses; importing this raises a clear error if it is not installed."""

try:
    from accelerate import Accelerator
    from accelerate.data_loader import SeedableRandomSampler, get_sampler
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.scheduler import AcceleratedScheduler
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import (
        AORecipeKwargs,
        DistributedType,
        FullyShardedDataParallelPlugin,
        InitProcessGroupKwargs,
        KwargsHandler,
        TERecipeKwargs,
        convert_outputs_to_fp32,
        get_mixed_precision_context_manager,
        recursively_apply,
    )
    from accelerate.utils.dataclasses import FP8BackendType
except ModuleNotFoundError as error:
    from hyperpod_plugins.errors import MissingExtraError

    raise MissingExtraError(error.name or "accelerate", "accelerate", "hyperpod_plugins.accelerate") from None

__all__ = [
    "AORecipeKwargs",
    "FP8BackendType",
    "AcceleratedOptimizer",
    "AcceleratedScheduler",
    "Accelerator",
    "AcceleratorState",
    "DistributedType",
    "FullyShardedDataParallelPlugin",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "ParallelismConfig",
    "PartialState",
    "SeedableRandomSampler",
    "TERecipeKwargs",
    "convert_outputs_to_fp32",
    "get_mixed_precision_context_manager",
    "get_sampler",
    "recursively_apply",
]
