"""Hybrid sharding: which modules are units, which shards would be empty, and that uneven shards train the same."""

import pytest
import torch
import torch.distributed as dist
from device import DEVICE
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hyperpod_plugins.errors import ConfigError, DegreeError
from hyperpod_plugins.parallel import ParallelConfig
from hyperpod_plugins.parallel.hsdp import find_blocks, leaves_a_rank_empty, mixed_precision_policy, shard_placement


class Leaf(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.weight


class Nest(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([Leaf(), Leaf()])

    def forward(self, x):
        return sum(expert(x) for expert in self.experts)


class Tree(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Nest(), Nest()])
        self.activations = nn.ModuleList([nn.ReLU(), nn.Tanh()])
        self.heads = nn.ModuleList([Leaf(), Leaf()])
        self.head = Leaf()

    def forward(self, x, task):
        for layer, activation in zip(self.layers, self.activations, strict=True):
            x = activation(layer(x))
        return self.head(self.heads[task](x))


class AnyList(nn.Module):
    """Runs whatever it is given."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


# -- units ----------------------------------------------------------------------------------------------------------


def names_of(model, blocks):
    names = {id(module): name for name, module in model.named_modules()}
    return [names[id(block)] for block in blocks]


def test_elements_of_lists_that_are_run_as_a_whole_are_units_innermost_first():
    model = Tree()
    found = names_of(model, find_blocks(model))
    assert set(found) == {f"layers.{i}{leaf}" for i in (0, 1) for leaf in ("", ".experts.0", ".experts.1")}
    for i in (0, 1):
        assert all(found.index(f"layers.{i}.experts.{j}") < found.index(f"layers.{i}") for j in (0, 1))


def test_class_names_replace_the_discovery():
    model = Tree()
    assert set(names_of(model, find_blocks(model, ("Nest",)))) == {"layers.0", "layers.1"}
    assert "head" in names_of(model, find_blocks(model, ("Leaf",)))
    assert set(names_of(model, find_blocks(model, ("Nest", "Leaf")))) > {"layers.0", "head", "layers.0.experts.1"}


def test_what_cannot_be_a_unit_is_left_out():
    shared = Leaf()
    model = nn.Sequential(AnyList(shared, nn.ReLU(), Leaf()), AnyList(shared), nn.Linear(2, 2))
    assert set(names_of(model, find_blocks(model))) == {"0.layers.0", "0.layers.2"}
    model[1].tasks = nn.ModuleList([shared])  # where it may also be run on a condition
    assert set(names_of(model, find_blocks(model))) == {"0.layers.2"}
    assert list(find_blocks(AnyList())) == []
    assert list(find_blocks(nn.Linear(2, 2))) == []
    assert list(find_blocks(nn.ModuleList([Leaf()]))) == []  # nobody knows what is run of it
    leaf = Leaf()
    assert list(find_blocks(leaf, ("Leaf",))) == []  # the root is sharded anyway


def test_a_module_that_is_never_called_cannot_gather_and_is_no_unit():
    model = AnyList(nn.ModuleDict({"up": nn.Linear(2, 2)}), nn.ModuleList([Leaf()]), nn.Sequential(nn.Linear(2, 2)))
    assert names_of(model, find_blocks(model)) == ["layers.2"]


def test_modules_that_share_a_parameter_are_left_to_the_unit_around_both():
    inner = AnyList(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    inner.layers[1].weight = inner.layers[0].weight
    assert names_of(inner, find_blocks(inner)) == ["layers.2"]
    assert names_of(inner, find_blocks(inner, ("Linear",))) == ["layers.2"]
    outer = AnyList(nn.Sequential(inner), nn.Linear(4, 4))
    assert set(names_of(outer, find_blocks(outer))) == {"layers.0", "layers.0.0.layers.2", "layers.1"}


@pytest.mark.parametrize("names", [("Missing",), ("Leaf", "Missing"), ("leaf", "Missing")])
def test_a_class_the_model_lacks_is_named_with_those_it_has(names):
    with pytest.raises(ConfigError, match=r"'Missing'.*Tree contains no module.*Leaf, ModuleList, Nest"):
        list(find_blocks(Tree(), names))


# -- shards ---------------------------------------------------------------------------------------------------------


@given(st.integers(1, 300), st.integers(1, 40))
def test_empty_shards_are_those_of_torch_chunk(rows, ranks):
    assert leaves_a_rank_empty(rows, ranks) == (len(torch.empty(rows, 1).chunk(ranks)) < ranks)


@pytest.mark.parametrize(
    ("shape", "degree", "dim"),
    [
        ((8, 3), 4, None),  # the first dimension serves
        ((7, 4), 4, None),  # unevenly, but nobody is empty
        ((2, 8), 4, 1),
        ((1, 3, 8), 4, 2),
        ((2, 6), 4, None),  # neither divides
        ((3,), 4, None),
        ((5, 8), 4, 1),  # chunks of two rows: the last rank would have none
        ((0, 3), 4, None),
        ((1,), 1, None),
    ],
)
def test_a_short_parameter_is_split_along_another_dimension(shape, degree, dim):
    placement = shard_placement(torch.empty(shape), degree)
    assert placement == (None if dim is None else torch.distributed.tensor.Shard(dim))


def test_precisions_become_policies():
    assert mixed_precision_policy(ParallelConfig(precision="bf16-mixed")).param_dtype == torch.bfloat16
    assert mixed_precision_policy(ParallelConfig(precision="bf16-mixed")).reduce_dtype == torch.float32
    for precision in ("32-true", "bf16-true"):
        policy = mixed_precision_policy(ParallelConfig(precision=precision))
        assert (policy.param_dtype, policy.reduce_dtype) == (None, None)


# -- four ranks -------------------------------------------------------------------------------------------------------

NUM_STEPS = 5


class Uneven(nn.Module):
    """Nothing divides by four; one bias is shorter than that, one weight is a single row."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(7, 7) for _ in range(2)])
        self.row = nn.Parameter(torch.randn(1, 7))
        self.head = nn.Linear(7, 3)
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x):
        self.steps += 1
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x * self.row).square().mean()


class Scalar(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.tensor(1.0))


class Shared(nn.Module):
    """Two blocks share a weight, and a block shares one with the root's head."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(7, 7) for _ in range(4)])
        self.head = nn.Linear(7, 7)
        self.layers[1].weight = self.layers[0].weight
        self.head.weight = self.layers[2].weight

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x).square().mean()


class SeveralTypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen = nn.Parameter(torch.ones(8, dtype=torch.float64), requires_grad=False)
        self.linear = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))


def make_shared():
    torch.manual_seed(0)
    return Shared()


def make_uneven():
    torch.manual_seed(0)
    return Uneven()


def train(model, batch):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(NUM_STEPS):
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses), {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in model.state_dict().items()
    }


def make_batch():
    return torch.randn(8, 7, generator=torch.Generator().manual_seed(1))


def message_of(make, mesh, config):
    from hyperpod_plugins.parallel import parallelize

    try:
        parallelize(make(), mesh, config)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def shard_unevenly():
    from hyperpod_plugins.parallel import build_mesh, parallelize

    dist.init_process_group("hyperpod")
    results, sizes = {}, {}
    for degree in (4, 2, 1):
        config = ParallelConfig(hybrid_shard_degree=degree, allow_empty_shards=True)
        mesh = build_mesh(config.topology(4), DEVICE)
        model = parallelize(make_uneven(), mesh, config)
        assert parallelize(model, mesh, config) is model  # a second time changes nothing
        sizes[degree] = {name: p.to_local().numel() for name, p in model.named_parameters()}
        results[degree] = train(model, make_batch()[2 * dist.get_rank() : 2 * dist.get_rank() + 2])
    strict, lax = ParallelConfig(), ParallelConfig(allow_empty_shards=True)
    mesh = build_mesh(strict.topology(4), DEVICE)
    errors = {
        "empty": message_of(make_uneven, mesh, strict),
        "scalar": message_of(Scalar, mesh, strict),
        "types": message_of(SeveralTypes, mesh, strict),
        "types in units": message_of(SeveralTypes, mesh, ParallelConfig(block_classes=("Linear",))),
        "scalar, empty allowed": message_of(Scalar, mesh, lax),
        "class": message_of(make_uneven, mesh, ParallelConfig(block_classes=("Missing",))),
    }
    shared = parallelize(make_shared(), mesh, lax)
    assert shared.layers[1].weight is shared.layers[0].weight
    assert shared.head.weight is shared.layers[2].weight
    results["shared"] = train(shared, make_batch()[2 * dist.get_rank() : 2 * dist.get_rank() + 2])
    return results, sizes, errors


@pytest.mark.spawns
def test_uneven_shards_train_as_one_process_does(run_ranks):
    by_rank = run_ranks(shard_unevenly, world_size=4, timeout_s=120)
    alone = {"shared": train(make_shared(), make_batch())} | dict.fromkeys(
        (4, 2, 1), train(make_uneven(), make_batch())
    )
    for case, (losses_alone, state_alone) in alone.items():
        losses = torch.stack([results[case][0] for results, _, _ in by_rank]).mean(0)
        torch.testing.assert_close(losses, losses_alone, rtol=2e-6, atol=0, msg=lambda m, w=case: f"{w}: losses: {m}")
        for results, _, _ in by_rank:
            state = results[case][1]
            assert state.keys() == state_alone.keys()
            for name, value in state.items():
                torch.testing.assert_close(
                    value, state_alone[name], rtol=0, atol=2e-5, msg=lambda m, w=(case, name): f"{w}: {m}"
                )
    sizes = [by_rank[rank][1][4] for rank in range(4)]
    assert [size["layers.0.bias"] for size in sizes] == [2, 2, 2, 1]
    assert [size["head.bias"] for size in sizes] == [1, 1, 1, 0]
    assert [size["row"] for size in sizes] == [7, 0, 0, 0]
    assert by_rank[0][1][1]["layers.0.weight"] == 49  # a shard degree of one shards nothing

    for _, _, errors in by_rank:
        kind, text = errors["empty"]
        assert kind == DegreeError.__name__
        for word in ("over 4 ranks", "row (1, 7)", "head.bias (3,)", "allow_empty_shards=True", "hybrid_shard_degree"):
            assert word in text
        assert "layers" not in text
        for case in ("scalar", "scalar, empty allowed"):
            kind, text = errors[case]
            assert kind == ConfigError.__name__, case
            assert "scale" in text
            assert "torch.ones(1)" in text or "one element" in text, case
            assert "allow_empty_shards" not in text, case
        kind, text = errors["types"]
        assert kind == ConfigError.__name__
        assert "scale (bfloat16), linear.weight (float32)" in text
        assert errors["types in units"] == ("", "")
        kind, text = errors["class"]
        assert (kind, "Missing" in text, "Uneven" in text) == (ConfigError.__name__, True, True)
