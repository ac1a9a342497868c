"""Gradient norms and clipping on mixed meshes equal torch's own on one process."""

import math

import pytest
import torch
import torch.distributed as dist
from device import DEVICE
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hyperpod_plugins.parallel import ParallelConfig, clip_grad_norm_, clip_grad_value_, gradient_norm
from hyperpod_plugins.parallel.unit_watch import reconcile_gradients

NORM_TYPES = (1.0, 2.0, 3.0, math.inf)


def with_gradients(*shapes, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = scale * torch.randn(parameter.shape, generator=generator)
    return parameters


# -- plain tensors, one process: torch's own function is the reference ------------------------------------------------


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("max_norm", [0.01, 1.0, 1e6])
def test_plain_tensors_are_clipped_as_torch_does(norm_type, max_norm):
    ours, torchs = with_gradients((3, 4), (5,), ()), with_gradients((3, 4), (5,), ())
    norm = clip_grad_norm_(ours, max_norm, norm_type)
    wanted = nn.utils.clip_grad_norm_(torchs, max_norm, norm_type)
    torch.testing.assert_close(norm, wanted, rtol=1e-6, atol=0)
    for mine, theirs in zip(ours, torchs, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-6, atol=0)


def test_gradients_below_the_limit_are_left_alone_to_the_last_bit():
    parameters = with_gradients((3, 4), scale=1e-3)
    before = parameters[0].grad.clone()
    clip_grad_norm_(parameters, 1.0)
    assert torch.equal(parameters[0].grad, before)


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_nothing_to_clip(norm_type):
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    for parameters in ([], [frozen], iter([frozen])):
        assert float(clip_grad_norm_(parameters, 1.0, norm_type)) == 0.0
    clip_grad_value_([frozen], 1.0)
    assert frozen.grad is None


def test_a_generator_is_read_once_and_still_clipped():
    """`main_params` of Lightning is a generator: the norm must not use it up."""
    parameters = with_gradients((3, 4), scale=100.0)
    clip_grad_norm_((p for p in parameters), 1.0)
    assert float(parameters[0].grad.norm()) == pytest.approx(1.0, rel=1e-5)


def test_parameters_without_a_gradient_are_skipped():
    parameters = with_gradients((3, 4), (5,))
    reference = with_gradients((3, 4), (5,))
    parameters.insert(1, nn.Parameter(torch.ones(7)))
    torch.testing.assert_close(clip_grad_norm_(parameters, 0.5), nn.utils.clip_grad_norm_(reference, 0.5))
    assert parameters[1].grad is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_shows_in_the_norm(bad):
    parameters = with_gradients((3, 4), (5,))
    parameters[0].grad[0, 0] = bad
    norm = clip_grad_norm_(parameters, 1.0)
    assert math.isnan(norm) if math.isnan(bad) else math.isinf(norm)


def test_the_norm_of_bfloat16_gradients_is_summed_in_float32():
    parameters = [nn.Parameter(torch.zeros(64, dtype=torch.bfloat16)) for _ in range(400)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    norm = gradient_norm(parameters)
    assert norm.dtype == torch.float32
    assert float(norm) == pytest.approx(160.0, rel=1e-5)  # in bfloat16 a sum of 400 * 64 stops growing
    clip_grad_norm_(parameters, 1.0)
    assert parameters[0].grad.dtype == torch.bfloat16


def test_the_factor_is_converted_once_for_all_gradients_of_a_type():
    class Conversions(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += func is torch.ops.aten._to_copy.default
            return func(*args, **(kwargs or {}))

    counts = []
    for number in (1, 20):
        parameters = [nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(number)]
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 2.0)
        norm = gradient_norm(parameters)
        with Conversions() as measuring:
            gradient_norm(parameters)
        with Conversions() as clipping:
            clip_grad_norm_(parameters, 1.0)
        counts.append(clipping.count - measuring.count)
        for parameter in parameters:
            torch.testing.assert_close(parameter.grad.float(), torch.full((3,), 2 / float(norm)), rtol=1e-2, atol=0)
    assert counts == [1, 1]


def test_values_are_clamped_as_torch_does():
    ours, torchs = with_gradients((3, 4), (5,), scale=3.0), with_gradients((3, 4), (5,), scale=3.0)
    clip_grad_value_((p for p in ours), 0.7)
    nn.utils.clip_grad_value_(torchs, 0.7)
    for mine, theirs in zip(ours, torchs, strict=True):
        assert torch.equal(mine.grad, theirs.grad)


# -- two ranks, gradients that are not reduced ------------------------------------------------------------------------


def clip_partial_gradients():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    parts = [torch.tensor([3.0, -1.0]), torch.tensor([1.0, 1.0])]

    def parameter():
        made = nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, [Replicate()]))
        made.grad = DTensor.from_local(parts[dist.get_rank()].clone(), mesh, [Partial()])
        return made

    by_norm, by_value = parameter(), parameter()
    norm = clip_grad_norm_([by_norm], 1.0)
    clip_grad_value_([by_value], 1.5)
    return norm, by_norm.grad.full_tensor(), by_value.grad.full_tensor()


@pytest.mark.spawns
def test_a_gradient_of_which_each_rank_holds_a_part_of_the_sum_is_summed_first(run_ranks):
    for norm, by_norm, by_value in run_ranks(clip_partial_gradients, world_size=2, timeout_s=60):
        assert float(norm) == pytest.approx(4.0)
        torch.testing.assert_close(by_norm, torch.tensor([1.0, 0.0]))
        torch.testing.assert_close(by_value, torch.tensor([1.5, 0.0]))


# -- four ranks, mixed meshes -----------------------------------------------------------------------------------------

LAYOUTS = {
    "tp 2 x shard 2": {"tensor_parallel_degree": 2},
    "replicate 2 x tp 2": {"tensor_parallel_degree": 2, "hybrid_shard_degree": 1},
    "hsdp 2x2": {"hybrid_shard_degree": 2},
    "shard 4": {},
}
MAX_NORMS = (0.05, 1e3)


class Mixed(nn.Module):
    """Split and whole linear layers, biases and norms, uneven sizes, a frozen and an unused parameter."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({"w1": nn.Linear(6, 8), "w2": nn.Linear(8, 6)}) for _ in range(2)])
        self.norm = nn.LayerNorm(6)
        self.odd = nn.Parameter(torch.randn(7, 6))  # rows do not divide
        self.tiny = nn.Parameter(torch.randn(1, 5))  # one row: all ranks but one hold nothing
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(6))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer["w2"](torch.tanh(layer["w1"](x)))
        return (self.norm(x * self.frozen) @ self.odd.T).square().mean() + self.tiny.square().sum()


def make_mixed():
    torch.manual_seed(0)
    return Mixed()


def make_batch():
    return 10 * torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


def clip_by_torch():
    """Norms, clipped and clamped gradients in one process, by torch."""
    model, results = make_mixed(), {}
    for norm_type in NORM_TYPES:
        for max_norm in MAX_NORMS:
            model.zero_grad()
            model(make_batch()).backward()
            plain = nn.Parameter(torch.zeros(3))
            plain.grad = torch.tensor([1.0, -2.0, 0.5])
            norm = nn.utils.clip_grad_norm_([*model.parameters(), plain], max_norm, norm_type)
            results[norm_type, max_norm] = (norm, gradients_of(model) | {"plain": plain.grad})
    model.zero_grad()
    model(make_batch()).backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.02)
    results["value"] = (torch.tensor(0.0), gradients_of(model))
    return results


def gradients_of(model):
    whole = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if grad is not None:
            whole[name] = (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).detach().clone()
    return whole


def clip_on_meshes():
    from hyperpod_plugins.parallel import build_mesh, parallelize

    dist.init_process_group("hyperpod")
    results = {}
    for layout, options in LAYOUTS.items():
        config = ParallelConfig.of(options, allow_empty_shards=True)
        topology = config.topology(4)
        model = parallelize(make_mixed(), build_mesh(topology, DEVICE), config)
        share, index = 8 // topology.data_degree, topology.data_rank(dist.get_rank())
        batch = make_batch()[index * share : (index + 1) * share]
        for norm_type in NORM_TYPES:
            for max_norm in MAX_NORMS:
                model.zero_grad()
                model(batch).backward()
                reconcile_gradients(model)
                plain = nn.Parameter(torch.zeros(3))
                plain.grad = torch.tensor([1.0, -2.0, 0.5])
                norm = clip_grad_norm_([*model.parameters(), plain], max_norm, norm_type)
                results[layout, norm_type, max_norm] = (norm, gradients_of(model) | {"plain": plain.grad})
        model.zero_grad()
        model(batch).backward()
        reconcile_gradients(model)
        clip_grad_value_(model.parameters(), 0.02)
        results[layout, "value"] = (torch.tensor(0.0), gradients_of(model))
    return results


@pytest.mark.spawns
def test_clipping_on_mixed_meshes_equals_torch_on_one_process(run_ranks):
    by_rank = run_ranks(clip_on_meshes, world_size=4, timeout_s=120)
    wanted = clip_by_torch()
    assert float(wanted[2.0, 0.05][0]) > 0.05  # so that clipping happens
    for (layout, *case), (norm, gradients) in by_rank[0].items():
        norm_wanted, gradients_wanted = wanted[tuple(case) if len(case) > 1 else case[0]]
        torch.testing.assert_close(
            norm, norm_wanted, rtol=1e-5, atol=0, msg=lambda m, w=(layout, case): f"{w}: norm: {m}"
        )
        assert gradients.keys() == gradients_wanted.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(
                gradient,
                gradients_wanted[name],
                rtol=1e-4,
                atol=1e-6,
                msg=lambda m, w=(layout, case, name): f"{w}: {m}",
            )
    for results in by_rank[1:]:
        for case, (norm, _) in results.items():
            assert torch.equal(norm, by_rank[0][case][0]), f"{case}: ranks disagree about the norm"
