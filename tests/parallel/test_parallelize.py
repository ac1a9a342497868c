"""`parallelize` gives a delayed model the very values of building it eagerly on rank 0, sharded or split."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from device import DEVICE
from torch import nn

LAYOUTS = (
    {"hybrid_shard_degree": 2},
    {"tensor_parallel_degree": 2},
    {"tensor_parallel_degree": 2, "precision": "bf16-true"},
)


class Rotary(nn.Module):
    """A buffer that is computed, not drawn, and not saved."""

    def __init__(self, size):
        super().__init__()
        self.register_buffer("frequencies", 1.0 / 10000 ** (torch.arange(0, size, 2) / size), persistent=False)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(32, 16)
        self.rotary = Rotary(16)
        self.layers = nn.ModuleList(
            [nn.ModuleDict({"w1": nn.Linear(16, 32), "norm": nn.BatchNorm1d(16), "w2": nn.Linear(32, 16)})]
        )
        self.output = nn.Linear(16, 32, bias=False)
        self.output.weight = self.tok_embeddings.weight
        nn.init.normal_(self.output.weight, std=0.02)


def values(model):
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {n: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone() for n, t in named}


@pytest.fixture
def one_rank():
    dist.init_process_group("hyperpod", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class OfMlps(nn.Module):
    """Two blocks with MLPs, of which one is in no layer that tiles could serve."""

    def __init__(self):
        super().__init__()
        mlps = [nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2)]
        self.layers = nn.ModuleList([nn.ModuleDict({"mlp": mlp}) for mlp in mlps])
        self.mlp = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"activation_host_memory_gib": 2.5}, "activation_host_memory_gib=2.5 has no effect without"),
        ({"delayed_values": "rank_0"}, "delayed_values='rank_0' has no effect on Model, which has all its values"),
        ({"delayed_values": "rank_0", "is_delayed": True}, ""),
        ({"activation_loading_horizon": 3}, ""),
        ({"mlp_tiles": 2}, "mlp_tiles=2: tiled: 2 layers.*.mlp; not: mlp"),
    ],
)
def test_what_has_no_effect_and_what_is_tiled_is_told_once(one_rank, caplog, options, told):
    from hyperpod_plugins.delayed_init import delayed_init
    from hyperpod_plugins.parallel import ParallelConfig, build_mesh, parallelize

    with delayed_init() if options.pop("is_delayed", False) else nullcontext():
        model = OfMlps() if "mlp_tiles" in options else Model()
    config = ParallelConfig(**options)
    with caplog.at_level("WARNING", "hyperpod_plugins.parallel"):
        parallelize(model, build_mesh(config.topology(1), "cpu"), config)
    assert len(caplog.messages) == bool(told)
    assert "".join(caplog.messages).startswith(told)


def build_delayed():
    from hyperpod_plugins.delayed_init import delayed_init
    from hyperpod_plugins.parallel import ParallelConfig, build_mesh, parallelize

    dist.init_process_group("hyperpod")
    results = []
    for options in LAYOUTS:
        torch.manual_seed(dist.get_rank())
        with delayed_init():
            model = Model()
        config = ParallelConfig.of(options)
        parallelize(model, build_mesh(config.topology(4), DEVICE), config)
        after = torch.rand(1)
        is_tied = model.output.weight is model.tok_embeddings.weight
        assert parallelize(model, build_mesh(config.topology(4), DEVICE), config) is model  # a second time: nothing
        results.append((values(model), is_tied, float(after)))
    return results


@pytest.mark.spawns
def test_delayed_model_has_the_values_of_rank_0s_eager_model(run_ranks):
    torch.manual_seed(0)
    eager = values(Model())
    after = float(torch.rand(1))
    for rank, results in enumerate(run_ranks(build_delayed, world_size=4)):
        for options, (found, is_tied, then) in zip(LAYOUTS, results, strict=True):
            assert is_tied
            assert found.keys() == eager.keys()
            assert then == after, "every rank's random stream goes on as rank 0's would have"
            for name, value in found.items():
                assert torch.equal(value, eager[name].to(value.dtype)), (rank, options, name)
            is_half = options.get("precision") == "bf16-true"
            assert found["output.weight"].dtype == (torch.bfloat16 if is_half else torch.float32)
            assert found["rotary.frequencies"].dtype == torch.float32, "unsaved buffers keep their precision"


def draw_after_parallelize():
    from hyperpod_plugins.parallel import ParallelConfig, build_mesh, parallelize

    dist.init_process_group("hyperpod")
    drawn = []
    for options in ({"tensor_parallel_degree": 2}, {"hybrid_shard_degree": 2}):
        torch.manual_seed(dist.get_rank())
        config = ParallelConfig.of(options)
        parallelize(Model(), build_mesh(config.topology(4), DEVICE), config)
        drawn.append(float(torch.rand(1)))
    return drawn


@pytest.mark.spawns
def test_tensor_peers_draw_alike_and_others_as_they_would_have(run_ranks):
    """Dropout that differs between tensor peers would make their copies of the activations drift apart."""
    with_tensor, without = zip(*run_ranks(draw_after_parallelize, world_size=4), strict=True)
    assert with_tensor[0] == with_tensor[1] != with_tensor[2] == with_tensor[3]
    assert len(set(without)) == 4


UNLIKE = {
    # name: (what rank 0 builds, what rank 1 builds, words of the message)
    "meta on rank 1": ((), ("meta",), "0.weight has values on rank 0 and is on the meta device on rank 1"),
    "meta on rank 0": (("meta",), (), "0.weight is on the meta device on rank 0 and has values on rank 1"),
    "delayed on rank 0": (("delayed",), ("meta",), "0.weight was built under delayed_init on rank 0"),
    "another shape": ((8,), (4,), "0.weight has the shape (8, 8) on rank 0 and has the shape (4, 8) on rank 1"),
    "another type": ((8, torch.bfloat16), (8,), "0.weight is torch.bfloat16 on rank 0 and is torch.float32 on rank 1"),
    "tied": (("tied",), (), "1.weight is 0.weight on rank 0 and is a tensor of its own on rank 1"),
    "another layer": ((), ("no bias",), "1.bias has values on rank 0 and does not exist on rank 1"),
}


def parallelize_unlike_models():
    from hyperpod_plugins.comm import group_health
    from hyperpod_plugins.delayed_init import delayed_init
    from hyperpod_plugins.errors import ConfigError
    from hyperpod_plugins.parallel import ParallelConfig, build_mesh, parallelize

    dist.init_process_group("hyperpod")
    config = ParallelConfig()
    mesh = build_mesh(config.topology(2), DEVICE)

    def build(how="values", dtype=torch.float32):
        if how == "meta":
            with torch.device("meta"):
                return build()
        if how == "delayed":
            with delayed_init():
                return build()
        width = how if isinstance(how, int) else 8
        model = nn.Sequential(nn.Linear(8, width), nn.Linear(width, 8, bias=how != "no bias")).to(dtype)
        if how == "tied":
            model[1].weight = model[0].weight
        return model

    told = {}
    for name, (*hows, _) in UNLIKE.items():
        try:
            parallelize(build(*hows[dist.get_rank()]), mesh, config)
        except ConfigError as refusal:
            told[name] = str(refusal)
    group_health.detach()  # as in a process that replaces another and sets itself up alone
    if dist.get_rank() == 1:
        parallelize(build(), mesh, config)
    group_health.reset()
    dist.barrier()
    return told


@pytest.mark.spawns
def test_ranks_that_build_unlike_models_are_refused_by_name(run_ranks):
    """Each would wait for the other, or take the values of one tensor for those of another."""
    results = run_ranks(parallelize_unlike_models, world_size=2, timeout_s=40)
    for name, (_, _, words) in UNLIKE.items():
        assert words in results[0][name], name
        assert results[0][name] == results[1][name], name
