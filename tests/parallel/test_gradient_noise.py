"""Gradients of single replicas and micro-steps, compared on meshes, are those of one process that has all samples."""

import pytest
import torch
import torch.distributed as dist
from device import DEVICE
from torch import nn

from hyperpod_plugins.data import BatchSplit, sample_weight
from hyperpod_plugins.data.batch_split import Cursor, rank_positions
from hyperpod_plugins.elastic.scaling.adascale import GradientNoise
from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.parallel import ParallelConfig
from hyperpod_plugins.parallel.replica_mean import NoiseMeasuringMean

LAYOUTS = {
    "2 replicas of 2 shards": {"hybrid_shard_degree": 2},
    "2 replicas of 2 tensor ranks": {"tensor_parallel_degree": 2, "hybrid_shard_degree": 1},
    "4 replicas": {"hybrid_shard_degree": 1},
    "1 replica of 4 shards": {"hybrid_shard_degree": 4},
    "1 replica of 2 shards of 2 tensor ranks": {"tensor_parallel_degree": 2, "hybrid_shard_degree": 2},
}
STEPS = {
    "two micro-steps, uneven": (26, 26, 4),
    "one micro-step, uneven": (26, 26, 8),
    "the end of an epoch": (26, 3, 4),
}
WIDTH = 6


class Model(nn.Module):
    """Layers that tensor parallelism splits, one that it leaves alone, uneven rows, and one that nobody uses."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({"w1": nn.Linear(WIDTH, 8), "w2": nn.Linear(8, WIDTH)})])
        self.norm = nn.LayerNorm(WIDTH)
        self.odd = nn.Parameter(torch.randn(7, WIDTH))
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer["w2"](torch.tanh(layer["w1"](x)))
        return (self.norm(x * self.frozen) @ self.odd.T).square().mean()


def make_model():
    torch.manual_seed(0)
    return Model()


def samples(ids):
    return torch.stack([torch.randn(WIDTH, generator=torch.Generator().manual_seed(i)) for i in ids])


def gradients_of(model):
    found = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if grad is not None:
            found[name] = (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).detach().clone()
    return found


def micro_steps_of(case, data_degree):
    """Of a step that begins an epoch of so many samples: size of the step, and each rank's ids in each micro-step."""
    batch, num_samples, micro = STEPS[case]
    split = BatchSplit(
        global_batch_size=batch, micro_batch_size=micro, data_world_size=data_degree, pads_last_step=True
    )
    found = list(split.walk(Cursor(), num_samples, drop_last=False))
    return num_samples, [
        [rank_positions(each, rank=rank, world_size=data_degree) for rank in range(data_degree)] for each in found
    ]


def compare_on_meshes():
    from hyperpod_plugins.parallel import build_mesh, parallelize

    dist.init_process_group("hyperpod")
    results = {}
    for layout, options in LAYOUTS.items():
        config = ParallelConfig.of(options, allow_empty_shards=True)
        topology = config.topology(4)
        mesh = build_mesh(topology, DEVICE)
        model = parallelize(make_model(), mesh, config, averages_replicas=False)
        mean, rank = NoiseMeasuringMean(model, mesh), topology.data_rank(dist.get_rank())
        for case in STEPS:
            step_size, micro_steps = micro_steps_of(case, topology.data_degree)
            for attempt in range(2):  # the first one is undone
                model.zero_grad()
                for index, shares in enumerate(micro_steps[:1] if attempt == 0 else micro_steps):
                    weight = sample_weight(
                        len(shares[rank]),
                        step_size=step_size,
                        data_degree=topology.data_degree,
                        num_micro_steps=len(micro_steps),
                    )
                    loss = model(samples(shares[rank] or [0])) * weight / len(micro_steps)
                    loss.backward()
                    is_last = attempt == 1 and index == len(micro_steps) - 1
                    compared = mean.add(weight, is_first=index == 0, is_last=is_last)
            results[layout, case] = (
                GradientNoise.of_table(compared.table.tolist(), compared.num_micro_steps, mesh.size(1)),
                gradients_of(model),
            )
    return results


def compared_by_hand(layout, case):
    """Squared norm and share of each part, and the gradient of the step."""
    topology = ParallelConfig.of(LAYOUTS[layout]).topology(4)
    step_size, micro_steps = micro_steps_of(case, topology.data_degree)
    model, norms, shares = make_model(), [], []
    for replica in range(topology.replicate_degree):
        ranks = range(replica * topology.shard_degree, (replica + 1) * topology.shard_degree)
        for micro_step in micro_steps:
            ids = [i for rank in ranks for i in micro_step[rank]]
            shares.append(len(ids) / step_size)
            norms.append(0.0)
            if ids:
                model.zero_grad()
                model(samples(ids)).backward()
                norms[-1] = sum(float(grad.double().square().sum()) for grad in gradients_of(model).values())
    model.zero_grad()
    model(samples(range(step_size))).backward()
    return norms, shares, gradients_of(model)


@pytest.mark.spawns
def test_parts_of_a_step_on_any_mesh(run_ranks):
    by_rank = run_ranks(compare_on_meshes, world_size=4, timeout_s=120)
    for key, (gradient_noise, gradients) in by_rank[0].items():
        norms, shares, wanted = compared_by_hand(*key)
        assert gradient_noise.squared_norms == pytest.approx(norms, rel=1e-4), key
        assert gradient_noise.shares == pytest.approx(shares), key
        of_mean = sum(float(grad.double().square().sum()) for grad in wanted.values())
        assert gradient_noise.mean_squared_norm == pytest.approx(of_mean, rel=1e-4), key
        assert gradients.keys() == wanted.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-6, msg=lambda m, w=key: f"{w}: {m}")
    for results in by_rank[1:]:
        for key, (gradient_noise, _) in results.items():
            assert gradient_noise == by_rank[0][key][0], f"{key}: ranks disagree"


def averaged_by_fsdp():
    from hyperpod_plugins.parallel import build_mesh, parallelize

    dist.init_process_group("hyperpod")
    config = ParallelConfig(hybrid_shard_degree=1)
    mesh = build_mesh(config.topology(1), DEVICE)
    model = parallelize(make_model(), mesh, config)
    with pytest.raises(ConfigError, match=r"For lr_scaling='adascale' shard over the axis 'shard' alone"):
        NoiseMeasuringMean(model, mesh)


@pytest.mark.spawns
def test_a_model_whose_replicas_fsdp_averages(run_ranks):
    run_ranks(averaged_by_fsdp, world_size=1)
