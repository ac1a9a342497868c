"""Gathers of float8 layers: what is on the wire, what arrives, shards of any size, and the same bits in training."""

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn
from torch.distributed.tensor import DTensor

from hyperpod_plugins.comm import reset_traffic, traffic
from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.parallel import ParallelConfig, build_mesh, parallelize
from hyperpod_plugins.parallel.hsdp import fsdp_units

pytest.importorskip("torchao")
LAYERS = ("up_proj", "down_proj", "narrow", "wide")
PLAN = {"layers.*.up_proj": "colwise", "layers.*.down_proj": "rowwise"}


class Block(nn.Module):
    """Sides of its matrices, over seven ranks: rows in unequal parts, too few rows, and columns instead of rows."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up_proj, self.down_proj = nn.Linear(64, 128), nn.Linear(128, 64, bias=False)
        self.narrow, self.wide = nn.Linear(64, 16, bias=False), nn.Linear(112, 16, bias=False)
        self.unused = nn.Linear(64, 32, bias=False)

    def forward(self, x):
        x = x + self.down_proj(torch.relu(self.up_proj(self.norm(x))))
        return x + self.narrow(x).repeat(1, 4) + self.wide(x.repeat(1, 2)[:, :112]).repeat(1, 4)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(32, 64), nn.Linear(64, 16)
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def sharded(shard, tensor, *, float8_all_gather, precision="bf16-mixed"):
    config = ParallelConfig(
        float8_recipe="tensorwise",
        float8_all_gather=float8_all_gather,
        hybrid_shard_degree=shard,
        tensor_parallel_degree=tensor,
        precision=precision,
        allow_empty_shards=True,
        tensor_plan="auto" if tensor == 1 else PLAN,
    )
    if not dist.is_initialized():
        dist.init_process_group("hyperpod")
    torch.manual_seed(0)
    model = parallelize(Model(), build_mesh(config.topology(dist.get_world_size()), "cpu"), config)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model, optimizer, num_steps=4, num_micro_steps=2):
    """Train with another batch on each data-parallel rank; return this rank's losses."""
    losses = []
    data_rank = dist.get_rank() // (2 if isinstance(model.layers[0].up_proj.weight, DTensor) and is_split(model) else 1)
    for step in range(num_steps):
        for micro_step in range(num_micro_steps):
            seed = 1000 * data_rank + 10 * step + micro_step
            x = torch.randn(16, 32, generator=torch.Generator().manual_seed(seed))
            loss = model(x.bfloat16()).float().square().mean()
            loss.backward()
            losses.append(float(loss))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def is_split(model):
    return "tensor" in (model.layers[0].up_proj.weight.device_mesh.mesh_dim_names or ())


def state_of(model, optimizer):
    tensors = [*model.parameters(), *(value for each in optimizer.state.values() for value in each.values())]
    for each in tensors:
        local = each.to_local() if isinstance(each, DTensor) else each
        assert type(local) is torch.Tensor  # nothing of float8 in what is saved and sent
    return [(each.full_tensor() if isinstance(each, DTensor) else each).detach().clone() for each in tensors]


def compare_with_gathers_in_bfloat16(shard, tensor, precision):
    found = []
    for float8_all_gather in (False, True):
        model, optimizer = sharded(shard, tensor, float8_all_gather=float8_all_gather, precision=precision)
        losses = train(model, optimizer)
        found.append((losses, state_of(model, optimizer)))
    (wanted, wanted_state), (losses, state) = found
    assert len(set(wanted)) == len(wanted)
    assert losses == wanted
    assert len(wanted_state) == len(state) > 20
    assert all(map(torch.equal, wanted_state, state))


def four_ranks():
    compare_with_gathers_in_bfloat16(2, 1, "bf16-mixed")
    compare_with_gathers_in_bfloat16(1, 1, "bf16-mixed")
    compare_with_gathers_in_bfloat16(2, 2, "bf16-mixed")
    compare_with_gathers_in_bfloat16(4, 1, "bf16-true")


@pytest.mark.spawns
def test_training_has_the_same_bits_as_with_gathers_in_bfloat16():
    run_ranks(four_ranks, world_size=4, timeout_s=240)


def whole_weights(model):
    """Cast whole weights as a layer does that got them in bfloat16."""
    from torchao.float8.float8_training_tensor import hp_tensor_and_scale_to_float8
    from torchao.float8.float8_utils import tensor_to_scale

    wanted = {}
    for index, layer in enumerate(model.layers):
        for name in LAYERS:
            whole = getattr(layer, name).weight.full_tensor().detach().bfloat16()
            scale = tensor_to_scale(whole, torch.float8_e4m3fn)
            wanted[index, name] = hp_tensor_and_scale_to_float8(whole, scale, torch.float8_e4m3fn)._data, scale
    return wanted


def check_gathers(shard, tensor):
    model, optimizer = sharded(shard, tensor, float8_all_gather=True)
    train(model, optimizer, num_steps=1)
    num_checked = 0
    for change in (None, "optimizer", "load"):
        if change == "optimizer":
            train(model, optimizer, num_steps=1)
        elif change == "load":
            model.load_state_dict({name: 3 * value for name, value in model.state_dict().items()})
        wanted = whole_weights(model)
        for index, layer in enumerate(model.layers):
            layer.unshard()
            for name in LAYERS:
                found, (data, scale) = getattr(layer, name).weight, wanted[index, name]
                if isinstance(found, DTensor):
                    part = found._local_tensor._data.view(torch.uint8)
                    part = DTensor.from_local(part, found.device_mesh, found.placements).full_tensor()
                    found = found._local_tensor
                else:
                    part = found._data.view(torch.uint8)
                assert torch.equal(found._scale, scale), (name, change)
                assert torch.equal(part, data.view(torch.uint8)), (name, change)
                num_checked += 1
            layer.reshard()
    assert num_checked == 24


def check_bytes(shard):
    """A gather carries one byte for a value of a weight that is converted, and two for others, with FSDP2's padding."""
    dist.barrier()
    sizes = {}
    for float8_all_gather in (False, True):
        model, optimizer = sharded(shard, 1, float8_all_gather=float8_all_gather)
        train(model, optimizer, num_steps=1)
        layer = model.layers[1]
        reset_traffic()
        layer.unshard()
        sizes[float8_all_gather] = traffic()["shard"]
        layer.reshard()
    weights = padded = others = 0
    for unit in fsdp_units(model.layers[1]):
        for each in unit._get_fsdp_state()._fsdp_param_group.fsdp_params:
            count = shard * each.padded_sharded_param_size.numel()
            is_converted = each._module_info.param_name == "weight" and each._module_info.module is not layer.norm
            weights, others = (weights + count, others) if is_converted else (weights, others + count)
            padded += each.padded_sharded_param_size != each.sharded_size
    assert weights > 10 * others > 0
    assert sizes[False].payload_bytes == {"all_gather": 2 * (weights + others)}
    assert sizes[True].payload_bytes == {"all_gather": weights + 2 * others, "all_reduce": 4 * (len(LAYERS) + 1)}
    return padded, [tuple(each.shape) for each in (layer.narrow.weight.to_local(), layer.wide.weight.to_local())]


def seven_ranks():
    compare_with_gathers_in_bfloat16(7, 1, "bf16-mixed")
    check_gathers(7, 1)
    return check_bytes(7)


@pytest.mark.spawns
def test_shards_of_unequal_size_and_empty_ones():
    results = run_ranks(seven_ranks, world_size=7, timeout_s=240)
    assert results[6] == (7, [(0, 64), (16, 16)])  # an empty part, and one of the columns
    assert results[0][1] == [(3, 64), (16, 16)]


def four_more_ranks():
    check_gathers(4, 1)
    check_gathers(2, 2)
    check_bytes(4)


@pytest.mark.spawns
def test_what_arrives_is_the_cast_of_the_whole_weight_and_crosses_the_wire_as_one_byte_a_value():
    run_ranks(four_more_ranks, world_size=4, timeout_s=240)


def by_accelerate():
    """Prepared by an Accelerator, with parameters in host memory."""
    from accelerate.state import AcceleratorState, GradientState

    from hyperpod_plugins.accelerate import HyperPodPlugin

    dist.init_process_group("hyperpod")
    found = []
    for float8_all_gather in (False, True):
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        options = {"fp8": "torchao", "float8_all_gather": float8_all_gather, "offload_params": True}
        accelerator = HyperPodPlugin(hybrid_shard_degree=2, block_classes=("Block",), **options).accelerator()
        torch.manual_seed(0)
        model = Model()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        losses = []
        for step in range(3):
            x = torch.randn(16, 32, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            reset_traffic()
            loss = model(x).square().mean()
            losses.append((float(loss.detach()), traffic()["shard"].payload_bytes["all_gather"]))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        found.append(losses)
        accelerator.free_memory()
    (wanted, wanted_bytes), (losses, num_bytes) = (zip(*each, strict=True) for each in found)
    assert losses == wanted
    assert num_bytes[0] < 0.6 * wanted_bytes[0]


@pytest.mark.spawns
def test_a_model_that_accelerate_shards():
    pytest.importorskip("accelerate")
    run_ranks(by_accelerate, world_size=2, timeout_s=120)


def test_the_largest_values_of_shards():
    """Empty ones count as 0, and NaN as infinite, whatever a reduction makes of it."""
    from hyperpod_plugins.precision.float8_linear import _largest_values

    shards = [torch.tensor([1.0, -3.0]), torch.empty(0, 4), torch.tensor([torch.nan, 2.0]), torch.tensor([-torch.inf])]
    for dtype in (torch.float32, torch.bfloat16):
        found = _largest_values([each.to(dtype) for each in shards])
        assert (found.dtype, found.tolist()) == (torch.float32, [3.0, 0.0, torch.inf, torch.inf])


def test_a_weight_that_was_gathered_in_another_type_is_refused():
    """A version of torch that does not ask the extension would gather in bfloat16 without a word."""
    from hyperpod_plugins.precision.float8_linear import to_float8

    layer = nn.Linear(16, 16).bfloat16()
    to_float8(layer, "tensorwise", is_emulated=True)
    layer(torch.ones(16, 16).bfloat16())
    layer.is_gathered_in_float8 = True
    with pytest.raises(
        ConfigError, match=r"to be gathered in float8, but arrived in bfloat16: .*Leave float8_all_gather"
    ):
        layer(torch.ones(16, 16).bfloat16())


@pytest.mark.parametrize("recipe", ["none", "rowwise"])
def test_other_recipes_are_refused(recipe):
    with pytest.raises(ConfigError, match=f"needs float8_recipe='tensorwise', but it is '{recipe}'"):
        ParallelConfig(float8_recipe=recipe, float8_all_gather=True)
