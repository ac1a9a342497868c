"""API of the SageMaker model parallelism library (SMP) v2, on FSDP2 and our meshes. Start with `install.py`.

import hyperpod_plugins.smp; hyperpod_plugins.smp.install()      # the only new line: replaces `torch.sagemaker`

import torch.sagemaker as tsm
tsm.init({"hybrid_shard_degree": 16})
model = FullyShardedDataParallel(tsm.transform(model), ...)      # translated to `parallel.parallelize`
"""

from hyperpod_plugins.smp.checkpoint import (
    SMStateDictType,
    async_save,
    load,
    maybe_finalize_async_calls,
    save,
    sm_state_dict_type,
)
from hyperpod_plugins.smp.fsdp import DelayedParamIniter, clip_grad_norm_, wrap
from hyperpod_plugins.smp.install import install, uninstall
from hyperpod_plugins.smp.job import init, is_initialized, state
from hyperpod_plugins.smp.transform import MoEConfig, transform

__all__ = [
    "DelayedParamIniter",
    "MoEConfig",
    "SMStateDictType",
    "async_save",
    "clip_grad_norm_",
    "init",
    "install",
    "is_initialized",
    "load",
    "maybe_finalize_async_calls",
    "save",
    "sm_state_dict_type",
    "state",
    "transform",
    "uninstall",
    "wrap",
]
