"""With one rank a shard, gathered parameters are views of their shards."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hyperpod_plugins.parallel import ParallelConfig, build_mesh, parallelize

STEPS = 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(6, 6), nn.Parameter(torch.rand(6))
        self.kept = {}

    @property
    def seen(self):
        """The weight as the last forward has seen it."""
        return self.kept["weight"]

    def forward(self, rows):
        self.kept["weight"] = self.linear.weight
        return rows + self.scale * self.linear(rows).relu()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(6, 1, bias=False)

    def forward(self, rows):
        for block in self.blocks:
            rows = block(rows)
        return self.head(rows).square().mean()


@pytest.fixture
def one_rank():
    dist.init_process_group("hyperpod", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def made(**options):
    torch.manual_seed(3)
    model = Model()
    if options.pop("is_parallel", True):
        config = ParallelConfig(block_classes=("Block",), **options)
        parallelize(model, build_mesh(config.topology(1), "cpu"), config)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def trained(model, optimizer, num_steps=STEPS, seed=0):
    generator, losses = torch.Generator().manual_seed(seed), []
    for _ in range(num_steps):
        for _ in range(2):  # accumulation
            (loss := model(torch.rand(4, 6, generator=generator))).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses.append(model(torch.rand(4, 6, generator=generator)).item())  # leaves the root gathered
    return losses


def weights(model):
    return {name: local(value).clone() for name, value in model.state_dict().items()}


def assert_same(model, plain):
    found, wanted = weights(model), weights(plain)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_a_gathered_parameter_is_the_memory_of_its_shard(one_rank):
    model, optimizer = made()
    plain, of_plain = made(is_parallel=False)
    assert trained(model, optimizer) == trained(plain, of_plain)
    assert_same(model, plain)
    block = model.blocks[0]
    assert block.seen is not block.linear.weight
    assert block.seen.data_ptr() == local(block.linear.weight).data_ptr()
    assert isinstance(block.linear.weight, DTensor)  # sharded again, and not freed
    assert block.seen.untyped_storage().nbytes() == block.seen.nbytes


@pytest.mark.parametrize("assign", [False, True])
def test_shards_that_the_program_replaces_are_those_that_are_gathered(one_rank, assign):
    model, optimizer = made()
    trained(model, optimizer, num_steps=1)
    other, of_other = made()
    trained(other, of_other, num_steps=2, seed=5)
    plain, _ = made(is_parallel=False)
    plain.load_state_dict(weights(other))
    state = {
        name: DTensor.from_local(local(value).clone(), value.device_mesh, value.placements, run_check=False)
        for name, value in other.state_dict().items()
    }
    model.load_state_dict(state, assign=assign)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    assert trained(model, optimizers[0]) == trained(plain, optimizers[1])
    assert_same(model, plain)


def test_parameters_that_lie_in_memory_of_others_are_copied(one_rank):
    """FSDP2 makes the memory of what it gathers as large as the parameter, and frees it."""
    model, optimizer = made()
    state = model.state_dict()
    sizes = [value.numel() for value in state.values()]
    memory = torch.cat([local(value).reshape(-1) for value in state.values()])
    assigned = {
        name: DTensor.from_local(part.view(value.shape), value.device_mesh, value.placements, run_check=False)
        for (name, value), part in zip(state.items(), memory.split(sizes), strict=True)
    }
    model.load_state_dict(assigned, assign=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plain, of_plain = made(is_parallel=False)
    assert trained(model, optimizer) == trained(plain, of_plain)
    assert_same(model, plain)
    assert memory.untyped_storage().nbytes() == memory.nbytes
    assert model.blocks[0].seen.data_ptr() != local(model.blocks[0].linear.weight).data_ptr()


def test_parameters_of_another_type_are_copied(one_rank):
    model, optimizer = made(precision="bf16-mixed")
    trained(model, optimizer)
    assert model.blocks[0].seen.dtype == torch.bfloat16
    assert local(model.blocks[0].linear.weight).dtype == torch.float32


def test_a_model_that_is_converted_is_gathered_in_its_new_type(one_rank):
    model, optimizer = made()
    trained(model, optimizer, num_steps=1)
    model.double()
    with torch.no_grad():
        assert model(torch.rand(4, 6, dtype=torch.float64)).dtype == torch.float64
    seen = model.blocks[1].seen
    assert seen.dtype == torch.float64
    assert seen.data_ptr() == local(model.blocks[1].linear.weight).data_ptr()
