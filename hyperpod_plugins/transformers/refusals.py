"""What a Trainer cannot do on a session: decided from its arguments, and refused by name before anything runs."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.transformers.compat import TrainerCallback, TrainingArguments

SERVED_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "adagrad", "rmsprop", "sgd")
"""Values of `TrainingArguments.optim` whose steps are known to be exact for sharded parameters."""

_PRE_STEP = "on_pre_optimizer_step"


def refused_arguments(args: Any) -> Iterator[str]:
    """Yield a sentence for each argument that cannot be served."""
    instead = {
        "deepspeed": "configure(hybrid_shard_degree=...) shards the model, with its optimizer state",
        "fsdp": "configure(hybrid_shard_degree=...) shards the model",
        "parallelism_config": "give the degrees to configure(...), such as tensor_parallel_degree",
        "torch_compile": "compile the blocks of the model yourself: block.compile()",
        "fp16": "use bf16=True",
        "fp16_full_eval": "an evaluation uses the precision of the training",
        "bf16_full_eval": "an evaluation uses the precision of the training",
        "auto_find_batch_size": "a process that replaces a lost one would begin its search anew",
        "eval_on_start": "call trainer.evaluate() before trainer.train()",
        "enable_jit_checkpoint": "SIGTERM and lost processes are handled by hyperpodrun",
        "use_legacy_prediction_loop": "leave it out",
    }
    for name, why in instead.items():
        if getattr(args, name, None):
            yield f"{name}={getattr(args, name)!r}: {why}"
    if args.train_sampling_strategy == "batch_rebalance":
        yield (
            "train_sampling_strategy='batch_rebalance': its batches are made for one number of ranks. Use 'random', "
            "'sequential' or 'group_by_length'"
        )
    config = args.accelerator_config
    wanted = {"split_batches": (False,), "dispatch_batches": (None, False), "even_batches": (True,)}
    for name, allowed in wanted.items():
        if getattr(config, name, allowed[0]) not in allowed:
            yield f"accelerator_config with {name}={getattr(config, name)!r}: leave it out"
    if (config.gradient_accumulation_kwargs or {}).get("sync_each_batch"):
        yield "accelerator_config with sync_each_batch: gradients of a step are reduced once. Leave it out"


def refused_optimizer(args: TrainingArguments) -> Iterator[str]:
    """Yield a sentence if the optimizer that the arguments name cannot be served."""
    name = str(getattr(args.optim, "value", args.optim))
    if name not in SERVED_OPTIMIZERS:
        yield (
            f"optim={name!r}: it is not known to be exact for sharded parameters. Use one of "
            f"{', '.join(SERVED_OPTIMIZERS)}, or give a torch optimizer: optimizers=(optimizer, None)"
        )


def refused_model(model: Any) -> Iterator[str]:
    """Yield a sentence for each property of a model that cannot be served."""
    if getattr(model, "is_distributed_loading_by_transformers", False) or getattr(model, "_tp_size", None) is not None:
        yield "a model that from_pretrained has divided among ranks: load it without distributed_config and tp_plan"
    if getattr(model, "quantization_method", None) is not None:
        yield "a quantized model: its packed weights cannot be sharded. Load it in bfloat16"
    devices = set((getattr(model, "hf_device_map", None) or {}).values())
    if len(devices) > 1:
        yield "a model with a device_map over several devices: load it without device_map"


def refused_callbacks(callbacks: Iterable[Any]) -> Iterator[str]:
    """Yield a sentence for each callback that wants to see gradients before the optimizer steps."""
    for each in callbacks:
        if getattr(type(each), _PRE_STEP, None) is not getattr(TrainerCallback, _PRE_STEP):
            yield (
                f"the callback {type(each).__name__} with {_PRE_STEP}: a step may have to be repeated until all ranks "
                "have agreed on it. Use on_step_end"
            )


def refuse(reasons: Iterable[str]) -> None:
    """Raise `ConfigError` that lists the reasons, if there is any."""
    found = list(reasons)
    if found:
        raise ConfigError("HyperPodTrainer cannot serve " + "; ".join(found) + ".")


def is_on_meta(model: Any) -> bool:
    """Whether a model has parameters without values."""
    return isinstance(model, torch.nn.Module) and any(each.is_meta for each in model.parameters())
