"""A training script for SMP v2, as its users have them. The one line that is ours is marked.

    torchrun --nproc-per-node 4 examples/smp/announced.py --config '{"hybrid_shard_degree": 2}'

It holds what such scripts use: `tsm.init`, `transform`, delayed parameters, FSDP1 with its policies, activation
checkpointing and offload of activations.
"""

import argparse
import functools
import json
import warnings

import hyperpod_plugins.smp; hyperpod_plugins.smp.install()  # fmt: skip  # the line that was added

import torch
import torch.distributed as dist
import torch.sagemaker as tsm
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.sagemaker.delayed_param import DelayedParamIniter
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

VOCABULARY, SEQUENCE, SAMPLES = 64, 16, 2


def model_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=SEQUENCE,
        use_cache=False,
    )


def samples(step: int, data_rank: int) -> torch.Tensor:
    """Tokens `(batch, sequence)` that go up by one, from a random start: easy to learn."""
    generator = torch.Generator().manual_seed(1000 * step + data_rank)
    start = torch.randint(VOCABULARY, (SAMPLES, 1), generator=generator)
    return (start + torch.arange(SEQUENCE)) % VOCABULARY


def train(config: dict, *, num_steps: int, mixed: bool = False, offload: bool = False) -> list[float]:
    tsm.init(config)
    with torch.device("meta"):
        model = LlamaForCausalLM(model_config())
    if tsm.state.tensor_parallel_degree > 1:
        model = tsm.transform(model)
    initer = DelayedParamIniter(model)
    with initer.validate_params_and_buffers_inited():
        model = FullyShardedDataParallel(
            model,
            auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer}),
            mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if mixed else None,
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            use_orig_params=True,
            device_id=torch.cuda.current_device() if torch.cuda.is_available() else torch.device("cpu"),
            param_init_fn=initer.get_param_init_fn(),
            post_param_init_fn=initer.get_post_param_init_fn(),
        )
    if offload:
        apply_activation_checkpointing(
            model,
            checkpoint_wrapper_fn=functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT),
            check_fn=lambda module: isinstance(module, LlamaDecoderLayer),
        )
        model = offload_wrapper(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(num_steps):
        tokens = samples(step, tsm.state.dp_rank).to(next(model.parameters()).device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=json.loads, default={}, help="SMP v2 configuration, as JSON")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--mixed", action="store_true", help="compute in bfloat16")
    parser.add_argument(
        "--offload", action="store_true", help="recompute activations, and keep what is left on the host"
    )
    args = parser.parse_args()
    warnings.simplefilter("default")
    losses = train(args.config, num_steps=args.steps, mixed=args.mixed, offload=args.offload)
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
