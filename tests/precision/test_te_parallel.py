"""Layers of Transformer Engine (a stand-in) on several ranks: recomputation, offload, tensor parallelism together."""

import gc
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn
from torch.distributed.tensor import DTensor

from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.memory import offload
from hyperpod_plugins.memory.recompute import recompute_blocks
from hyperpod_plugins.parallel import ParallelConfig, build_mesh, parallelize
from hyperpod_plugins.parallel.tensor_parallel import plan_for, shard_tensors
from hyperpod_plugins.precision import TeScaling, convert_linears
from hyperpod_plugins.precision.transformer_engine import Float8Recomputation

pytestmark = pytest.mark.spawns
CPU = torch.device("cpu")
STAND_INS = str(Path(__file__).parents[1] / "stand_ins")


class Block(nn.Module):
    def __init__(self, has_bias=True):
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.gate_proj, self.up_proj = nn.Linear(32, 64, bias=has_bias), nn.Linear(32, 64, bias=False)
        self.down_proj = nn.Linear(64, 32, bias=has_bias)

    def forward(self, x):
        normed = self.norm(x)
        return x + self.down_proj(torch.relu(self.gate_proj(normed)) * self.up_proj(normed))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(32, 16)

    def forward(self, tokens):
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.full_tensor() if isinstance(x, DTensor) else x)


def tokens_of(seed):
    return torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(seed))


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def noted(name, buffer):
    """A buffer without what this rank alone has noted for the next reduction."""
    return buffer[1:].clone() if "history_fwd" in name else buffer.clone()


def trained(model, *, rank=0, learning_rate=0.05, resumes=False):
    """Losses, and in each step gradients and scales.

    Args:
        model: on this rank.
        rank: of other tokens.
        learning_rate: of SGD.
        resumes: whether steps begin with the buffers of rank 0, which a checkpoint holds.
    """
    optimizer, found = torch.optim.SGD(model.parameters(), lr=learning_rate), {}
    for step in range(4):
        for micro_step in range(2):
            loss = (model(tokens_of(100 * rank + 10 * step + micro_step)).float() * (1 + step)).square().mean()
            loss.backward()
            found[f"{step} {micro_step} loss"] = loss.detach()
        found |= {f"{step} {name} gradient": whole(each.grad) for name, each in model.named_parameters()}
        found |= {f"{step} {name}": noted(name, each) for name, each in model.named_buffers()}
        optimizer.step()
        optimizer.zero_grad()
        for each in model.buffers() if resumes else ():
            dist.broadcast(each, 0)
    return found


def split_or_not(recipe, recomputation):
    """The same in float32 with matrices that are split over all ranks, and on each rank by itself."""
    sys.path.insert(0, STAND_INS)
    dist.init_process_group("hyperpod")
    mesh = build_mesh(ParallelConfig(tensor_parallel_degree=2).topology(2), "cpu")
    config, found = ParallelConfig(tensor_parallel_degree=2), []
    for is_split in (False, True):
        gc.collect()
        model = Net()
        if is_split:
            shard_tensors(model, mesh["tensor"], plan_for(model, config), config)
        blocks = [*model.layers]
        scaling = {"te_scaling": TeScaling(amax_history_len=3)} if recipe == "te-fp8" else {}
        done = convert_linears(model, recipe, CPU, blocks=blocks, **scaling)
        assert len(done.converted) == 9, done
        recompute_blocks(blocks, recomputation, Float8Recomputation.of(model))
        found.append(trained(model, learning_rate=0.0))  # else a value that float8 rounds otherwise counts from then on
        assert isinstance(model.layers[0].down_proj.weight, DTensor) == is_split
        del model, blocks
    return found


@pytest.mark.parametrize(
    ("recipe", "recomputation"),
    [pytest.param("te-fp8", "none", marks=pytest.mark.variant), ("te-fp8", "full"), ("te-mxfp8", "full")],
)
def test_matrices_that_are_split_compute_the_same(recipe, recomputation):
    """Scales are those of whole tensors; sums of two parts differ by rounding."""
    (one, split), (_, other_split) = run_ranks(split_or_not, recipe, recomputation, world_size=2, timeout_s=120)
    assert one.keys() == split.keys()
    for name, wanted in one.items():
        error = (split[name] - wanted).norm() / wanted.norm().clamp_min(1e-30)
        assert error < 2e-6, (name, error)
        assert torch.equal(split[name], other_split[name]), name
    if recipe == "te-fp8":
        assert not torch.equal(split["3 layers.1.down_proj.fp8_scale_fwd"], torch.ones(3))


OPTIONS = {
    "none": {},
    "full": {"activation_checkpointing": "full"},
    "selective": {"activation_checkpointing": "selective"},
    "offload": {"sm_activation_offloading": True},
    "auto": {"sm_activation_offloading": "auto"},
}


def with_each_option(base):
    sys.path.insert(0, STAND_INS)
    offload.MIN_BYTES = 1  # the model is tiny
    dist.init_process_group("hyperpod")
    config = ParallelConfig.of({"precision": "bf16-mixed", "block_classes": ["Block"]} | base)
    topology = config.topology(dist.get_world_size())
    mesh, found = build_mesh(topology, "cpu"), {}
    stored, store = [], offload.ActivationOffload._store

    def counted(self, packed):
        store(self, packed)
        stored.append(packed.kept is not None)

    offload.ActivationOffload._store = counted
    for name, option in OPTIONS.items():
        gc.collect()
        stored.clear()
        model = parallelize(Net(), mesh, replace(config, **option))
        assert type(model.layers[0].down_proj).__name__ == "TransformerEngineLinear"
        data_rank = dist.get_rank() // config.tensor_parallel_degree
        found[name] = trained(model, rank=data_rank, resumes=name == "selective")
        assert stored == [True] * (8 * 2 if name == "offload" else 0)  # all blocks but the last
        del model
    return found


@pytest.mark.parametrize(
    "base",
    [
        pytest.param({"float8_recipe": "te-fp8", "hybrid_shard_degree": 2}, id="two replicas of two shards"),
        pytest.param({"float8_recipe": "te-fp8", "tensor_parallel_degree": 2}, id="tensors"),
        pytest.param(
            {"float8_recipe": "te-fp8", "tensor_parallel_degree": 2, "sequence_parallel": True},
            id="sequences",
            marks=pytest.mark.variant,
        ),
        pytest.param(
            {"float8_recipe": "te-mxfp8", "tensor_parallel_degree": 2}, id="scales of blocks", marks=pytest.mark.variant
        ),
        pytest.param({"float8_recipe": "te-nvfp4"}, id="NVFP4", marks=pytest.mark.variant),
    ],
)
def test_recomputation_and_offload_change_no_bit(base):
    all_ranks = run_ranks(with_each_option, base, world_size=4, timeout_s=200)
    for found in all_ranks:
        for name, values in found.items():
            for key, wanted in found["none"].items():
                assert torch.equal(values[key], wanted), (name, key)
    first = all_ranks[0]["none"]
    for key, values in first.items():
        if "fp8_" in key:
            assert all(torch.equal(found["none"][key], values) for found in all_ranks), key


def refuse_styles_of_program():
    sys.path.insert(0, STAND_INS)
    dist.init_process_group("hyperpod")
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel

    class Partly(ColwiseParallel):
        """Leaves the input split along the tokens."""

        @staticmethod
        def _prepare_input_fn(input_layouts, desired, module, inputs, mesh):
            return DTensor.from_local(inputs[0], mesh, [Shard(0)], run_check=False)

    config = ParallelConfig(tensor_parallel_degree=2, tensor_plan={"layers.*.up_proj": Partly()})
    mesh = build_mesh(config.topology(2), "cpu")
    model = Net()
    shard_tensors(model, mesh["tensor"], plan_for(model, config), config)
    convert_linears(model, "te-fp8", CPU, blocks=[*model.layers])
    with pytest.raises(ConfigError, match=r"whose weight is split .* takes a DTensor that is whole.*styles by name"):
        model(tokens_of(0))
    return True


def test_an_input_that_is_split_otherwise_is_refused():
    assert run_ranks(refuse_styles_of_program, world_size=2) == [True, True]
