"""An optimizer that works on local shards writes what it writes through DTensor, to the last bit."""

import pytest
import torch
import torch.distributed as dist
from device import DEVICE
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from hyperpod_plugins.parallel.local_optimizer import LocalDispatchMode, local_steps, step_locally

SHAPES = ((6, 4), (5,), (3, 2, 2), (1,))
OPTIMIZERS = [
    (torch.optim.AdamW, {"foreach": False}),
    (torch.optim.AdamW, {"foreach": True, "amsgrad": True}),
    (torch.optim.AdamW, {"foreach": False, "amsgrad": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.AdamW, {"fused": True, "lr": torch.tensor(0.01)}),
    (torch.optim.Adam, {"foreach": True, "weight_decay": 0.1}),
    (torch.optim.SGD, {"foreach": True, "momentum": 0.9, "nesterov": True}),
    (torch.optim.SGD, {"foreach": False, "momentum": 0.9}),
    (torch.optim.RMSprop, {"foreach": True, "centered": True}),
    (torch.optim.Adagrad, {"foreach": True}),
    (torch.optim.Adadelta, {"foreach": True}),
    (torch.optim.Adamax, {"foreach": True}),
    (torch.optim.NAdam, {"foreach": False}),
]


@pytest.fixture(scope="module")
def mesh():
    """Of 2 x 2 ranks, of which only this one exists: nothing here may communicate."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("replicate", "shard"))
    dist.destroy_process_group()


def sharded(mesh, shape, seed):
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return distribute_tensor(whole, mesh, [Replicate(), Shard(0)], src_data_rank=None)


def train(mesh, make, options, step):
    parameters = [nn.Parameter(sharded(mesh, shape, seed)) for seed, shape in enumerate(SHAPES)]
    optimizer = make(parameters, **{"lr": 0.01, **options})
    for number in range(3):

        def closure(number=number):
            for index, (parameter, shape) in enumerate(zip(parameters, SHAPES, strict=True)):
                parameter.grad = sharded(mesh, shape, 10 * number + index)
            return number

        assert step(optimizer, closure) == number
    return parameters, optimizer


def step_without_closure(optimizer, closure):
    value = closure()
    with local_steps([optimizer]):
        optimizer.step()
    return value


@pytest.mark.parametrize("step", [step_locally, step_without_closure])
@pytest.mark.parametrize(("make", "options"), OPTIMIZERS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_same_bits_and_same_kind_of_state(mesh, make, options, step):
    through_dtensor, reference = train(mesh, make, options, lambda optimizer, closure: optimizer.step(closure))
    locally, optimizer = train(mesh, make, options, step)
    for mine, theirs in zip(locally, through_dtensor, strict=True):
        assert torch.equal(mine.to_local(), theirs.to_local())
        state, wanted = optimizer.state[mine], reference.state[theirs]
        assert state.keys() == wanted.keys()
        for name, value in wanted.items():
            assert type(state[name]) is type(value)
            if isinstance(value, DTensor):
                assert (state[name].placements, state[name].shape) == (value.placements, value.shape)
                assert torch.equal(state[name].to_local(), value.to_local())
            else:
                assert state[name] == value


def test_what_dtensor_cannot_do_itself_works_too(mesh):
    fused, _ = train(mesh, torch.optim.SGD, {"fused": True, "momentum": 0.9}, step_locally)
    plain, _ = train(mesh, torch.optim.SGD, {"foreach": False, "momentum": 0.9}, step_locally)
    for mine, theirs in zip(fused, plain, strict=True):
        torch.testing.assert_close(mine.to_local(), theirs.to_local())


class Seen(TorchDispatchMode):
    """The operations that reach DTensor."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_no_arithmetic_of_the_step_reaches_dtensor_but_the_closure_does(mesh):
    parameter = nn.Parameter(sharded(mesh, (4, 4), 0))
    optimizer = torch.optim.AdamW([parameter], foreach=True)
    seen = Seen()

    def closure():
        parameter.grad = parameter.detach() * 2

    with seen:
        step_locally(optimizer, closure)
        step_without_closure(optimizer, closure)
    assert seen.names.count("aten::mul") == 2
    assert not [name for name in seen.names if "foreach" in name]
    with seen, local_steps([optimizer]):
        optimizer.step(closure)
    assert seen.names.count("aten::mul") == 3


def test_what_lies_differently_is_left_to_dtensor(mesh):
    one = sharded(mesh, (4, 4), 0)
    replicated = distribute_tensor(torch.ones(4, 4), mesh, [Replicate(), Replicate()], src_data_rank=None)
    row = sharded(mesh, (1, 4), 0)
    partial = DTensor.from_local(torch.ones(4, 4), mesh, [Replicate(), Partial()], run_check=False)
    cases = [
        lambda: one * replicated,
        lambda: one * row,
        lambda: partial * partial,
        lambda: torch._foreach_mul([one, replicated], 2.0)[1],
        lambda: torch._foreach_mul([one, one], [replicated, replicated])[0],
        lambda: torch.mul(one, one, out=torch.zeros_like(one)),
    ]
    for case in cases:
        wanted = case()
        with LocalDispatchMode():
            found = case()
        assert found.placements == wanted.placements
        assert torch.equal(found.to_local(), wanted.to_local())


def adafactor_on(shape, device_mesh, foreach):
    """What it does in three steps, and to what it would do on one process."""
    whole = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(1)))
    split = nn.Parameter(distribute_tensor(whole.detach().clone(), device_mesh, [Shard(0)]))
    alone, together = (torch.optim.Adafactor([each], lr=0.01, foreach=foreach) for each in (whole, split))
    for number in range(3):
        whole.grad = torch.randn(shape, generator=torch.Generator().manual_seed(10 + number))
        split.grad = distribute_tensor(whole.grad.clone(), device_mesh, [Shard(0)])
        alone.step()
        step_locally(together, lambda: None)
    return split.full_tensor().detach(), whole.detach()


def adafactor():
    device_mesh = init_device_mesh(DEVICE, (2,))
    return [
        adafactor_on(shape, device_mesh, foreach) for shape in ((6, 4), (5,), (3, 4, 2)) for foreach in (False, True)
    ]


@pytest.mark.spawns
def test_adafactor_squares_norms_in_place(run_ranks):
    """torch 2.13 refuses that where each rank has the norm of its own part."""
    for found in run_ranks(adafactor, world_size=2):
        for together, alone in found:
            torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)


def test_results_keep_their_type_and_place(mesh):
    one = sharded(mesh, (5, 4), 0)
    with LocalDispatchMode():
        root = one.abs().sqrt()
        half = torch.zeros_like(one, dtype=torch.bfloat16)
        same = one.add_(0)
    assert (root.placements, root.shape, root.to_local().shape) == (one.placements, one.shape, one.to_local().shape)
    assert (half.dtype, half.to_local().dtype, half.placements) == (torch.bfloat16, torch.bfloat16, one.placements)
    assert same is one


def test_the_mode_ends_with_the_step_whatever_happens(mesh):
    parameter = nn.Parameter(sharded(mesh, (4, 4), 0))

    def fail():
        raise RuntimeError("closure")

    optimizer = torch.optim.SGD([parameter], lr=0.1)
    with pytest.raises(RuntimeError, match="closure"):
        step_locally(optimizer, fail)
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    with local_steps([optimizer]):
        optimizer.step()
        assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
        optimizer.param_groups[0]["params"] = None
        with pytest.raises(TypeError):
            optimizer.step()
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_a_compiled_step_stays_compiled(mesh):
    parameter = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps the step, to count it
    optimizer.step = torch.compile(optimizer.step, backend=backend)

    def closure():
        parameter.grad = torch.ones(4)

    step_locally(optimizer, closure)
    assert graphs
    assert torch.equal(parameter, torch.full((4,), 0.9))
    with local_steps([optimizer]):
        optimizer.step()
    torch.testing.assert_close(parameter.detach(), torch.full((4,), 0.8))
