"""Arguments of FSDP1 come to a configuration, or are refused."""

import functools

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

from hyperpod_plugins.errors import ConfigError, NotBuiltYetError
from hyperpod_plugins.parallel import ParallelConfig
from hyperpod_plugins.smp.fsdp import FsdpArguments, translate

PER_NODE = 8
Strategy = ShardingStrategy


class Block(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.inner = nn.Linear(width, width)


MODEL = nn.Sequential(nn.Embedding(3, 4), Block(), Block(), Block(width=8), nn.Linear(4, 3))


def translated(asked=None, **arguments):
    arguments = {"auto_wrap_policy": ModuleWrapPolicy({Block}), "use_orig_params": True} | arguments
    return translate(ParallelConfig.of(asked or {}), FsdpArguments(**arguments), MODEL, PER_NODE)


@pytest.mark.parametrize(
    ("asked", "strategy", "degree", "reshards", "is_told"),
    [
        ({}, None, 0, True, False),
        ({}, Strategy.FULL_SHARD, 0, True, False),
        ({}, Strategy.SHARD_GRAD_OP, 0, False, False),
        ({}, Strategy.HYBRID_SHARD, PER_NODE, True, False),
        ({}, Strategy._HYBRID_SHARD_ZERO2, PER_NODE, False, False),
        ({}, Strategy.NO_SHARD, 1, True, False),
        ({"hybrid_shard_degree": 16}, None, 16, True, False),
        ({"hybrid_shard_degree": 16}, Strategy.HYBRID_SHARD, 16, True, False),
        ({"hybrid_shard_degree": 16}, Strategy._HYBRID_SHARD_ZERO2, 16, False, False),
        ({"hybrid_shard_degree": 16}, Strategy.FULL_SHARD, 16, True, True),
        ({"hybrid_shard_degree": 16}, Strategy.SHARD_GRAD_OP, 16, True, True),
        ({"hybrid_shard_degree": 1}, Strategy.FULL_SHARD, 1, True, True),
        ({"tensor_parallel_degree": 2}, Strategy.FULL_SHARD, 0, True, False),
        ({"tensor_parallel_degree": 2}, Strategy.HYBRID_SHARD, 0, True, False),
    ],
)
def test_the_configuration_wins_over_the_strategy_where_it_says_a_degree(asked, strategy, degree, reshards, is_told):
    result = translated(asked, sharding_strategy=strategy)
    assert result.config.hybrid_shard_degree == degree
    assert result.config.reshard_after_forward is reshards
    assert bool(result.notes) is is_told


@pytest.mark.parametrize(
    ("policy", "precision", "words"),
    [
        (None, "32-true", ""),
        (MixedPrecision(), "32-true", ""),
        (MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), "bf16-mixed", ""),
        (MixedPrecision(param_dtype=torch.bfloat16), "bf16-mixed", "reduced in float32"),
        (
            MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16),
            "bf16-mixed",
            "buffers keep their type",
        ),
    ],
)
def test_precision(policy, precision, words):
    result = translated(mixed_precision=policy)
    assert result.config.precision == precision
    assert words in " ".join(result.notes)
    assert bool(words) == bool(result.notes)


@pytest.mark.parametrize(
    ("policy", "classes", "words"),
    [
        (None, (), "no auto_wrap_policy"),
        (ModuleWrapPolicy({Block}), ("Block",), ""),
        (functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block, nn.Embedding, nn.Conv1d}),
         ("Block", "Embedding"), ""),
        (functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, Block)), ("Block",), ""),
        (CustomPolicy(lambda module: isinstance(module, Block)), ("Block",), ""),
        (functools.partial(size_based_auto_wrap_policy, min_num_params=60), ("Block", "Linear"), "all Block, Linear"),
    ],
)  # fmt: skip
def test_units(policy, classes, words):
    result = translated(auto_wrap_policy=policy)
    assert result.config.block_classes == classes
    assert words in " ".join(result.notes)
    assert bool(words) == bool(result.notes)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"mixed_precision": MixedPrecision(param_dtype=torch.float16)}, ConfigError, "float16.*bfloat16"),
        ({"cpu_offload": CPUOffload(offload_params=True)}, NotBuiltYetError, "hybrid_shard_degree"),
        ({"ignored_modules": [MODEL[0]]}, ConfigError, "Embedding"),
        ({"auto_wrap_policy": ModuleWrapPolicy({nn.Conv1d})}, ConfigError, "Block"),
    ],
)
def test_what_cannot_be_honoured(arguments, error, words):
    with pytest.raises(error, match=words):
        translated(**arguments)


def test_what_is_done_otherwise_is_told():
    told = translated(use_orig_params=False, forward_prefetch=True, backward_prefetch=BackwardPrefetch.BACKWARD_POST)
    assert len(told.notes) == 3
    assert translated(cpu_offload=CPUOffload(offload_params=False)).notes == ()
