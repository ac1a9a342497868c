"""Training state in host memory: where it lies, which bits it gives, and what is refused."""

import copy
import itertools
import types
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from device import DEVICE
from torch import nn
from torch.distributed.tensor import DTensor

from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.parallel import (
    CheckpointWriter,
    ParallelConfig,
    build_mesh,
    clip_grad_norm_,
    gradient_norm,
    host_optimizer,
    load_checkpoint,
    parallelize,
)
from hyperpod_plugins.parallel.checkpoint.state import state_device, step_count_device
from hyperpod_plugins.parallel.host_optimizer import (
    HostMemory,
    _kept,
    _staged,
    check_host_optimizers,
    ids_with_host_state,
    steps_on_host,
    uses_host_memory,
)
from hyperpod_plugins.parallel.hsdp import (
    compute_device,
    from_local_like,
    ids_on_host,
    shards_stay_on_host,
)
from hyperpod_plugins.parallel.local_optimizer import LocalDispatchMode, local_steps, step_locally
from hyperpod_plugins.parallel.unit_watch import fsdp_parameters
from hyperpod_plugins.recovery import TrainingState

WIDTH, NUM_STEPS, GLOBAL_BATCH = 16, 10, 8
ON_HOST = {"param_offload": HostMemory.PARAMETER, "optimizer_offload": HostMemory.STATE}
OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, amsgrad=True),
    "fused adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "foreach adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, foreach=True, weight_decay=0.1),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "plain sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3, momentum=0.9, centered=True),
    "asgd": lambda parameters: torch.optim.ASGD(parameters, lr=0.1),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=1e-3),
    "radam": lambda parameters: torch.optim.RAdam(parameters, lr=1e-3),
    "adamax": lambda parameters: torch.optim.Adamax(parameters, lr=1e-3),
    "adadelta": lambda parameters: torch.optim.Adadelta(parameters),
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.unused = nn.Linear(WIDTH, WIDTH)  # never has a gradient
        self.frozen = nn.Linear(2 * WIDTH, 2 * WIDTH).requires_grad_(False)
        self.last = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x):
        return self.last(torch.tanh(self.frozen(self.first(x)))) * self.scale


@pytest.fixture
def alone():
    """A process group of this process, for models of one rank."""
    dist.init_process_group("hyperpod", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(options, dtype=torch.float32):
    config = ParallelConfig.of(options)
    torch.manual_seed(0)
    return parallelize(Net().to(dtype), build_mesh(config.topology(dist.get_world_size()), DEVICE), config)


def batches():
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(GLOBAL_BATCH, WIDTH, generator=generator) for _ in range(NUM_STEPS)]


def train(net, optimizer, step=lambda optimizer: optimizer.step(), place=0, readers=1):
    share, losses = GLOBAL_BATCH // readers, []
    for batch in batches():
        mine = batch[place * share : (place + 1) * share].to(next(net.buffers()).dtype)
        loss = (net(mine) - mine.flip(1)).square().mean()
        loss.backward()
        clip_grad_norm_(net.parameters(), 0.5)
        step(optimizer)
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def local(tensor):
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def state_of(net, optimizer):
    """Parameters and optimizer state by name, in the optimizer's order."""
    names = {parameter: name for name, parameter in net.named_parameters()}
    found = {name: local(parameter) for name, parameter in net.named_parameters()}
    for parameter, values in optimizer.state.items():
        found |= {f"{names[parameter]}.{key}": value for key, value in values.items()}
    return {name: local(value).clone() if torch.is_tensor(value) else value for name, value in found.items()}


def assert_same_bits(found, wanted):
    assert list(found) == list(wanted)
    assert [name for name, value in wanted.items() if not torch.equal(torch.as_tensor(found[name]), value)] == []


# -- options ----------------------------------------------------------------------------------------------------------


def test_names_that_others_use():
    for name in ("param_offload", "offload_params", "fsdp_offload_params", "cpu_offload"):
        assert ParallelConfig.of({name: True}) == ParallelConfig(param_offload=True)
    for name in ("optimizer_offload", "optimizer_cpu_offload", "offload_optimizer"):
        assert ParallelConfig.of({name: True}) == ParallelConfig(optimizer_offload=True)
    assert not ParallelConfig().param_offload
    assert not ParallelConfig().optimizer_offload
    for name in ON_HOST:
        with pytest.raises(ConfigError, match=f"{name} must be true or false"):
            ParallelConfig.of({name: "yes"})


# -- one rank ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ON_HOST)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_bits_are_those_of_the_device(alone, kind, option):
    found = {}
    for options in ({}, {option: True}):
        net = sharded(options)
        optimizer = OPTIMIZERS[kind](net.parameters())
        losses = train(net, optimizer)
        found[bool(options)] = {**state_of(net, optimizer), "losses": torch.tensor(losses)}
    assert_same_bits(found[True], found[False])


def test_an_optimizer_that_cannot_step_on_dtensors(alone):
    """Rprop, in torch 2.13: on the host it steps on plain tensors, as in one process without sharding."""
    torch.manual_seed(0)
    plain, net = Net(), sharded({"optimizer_offload": True})
    wanted = train(plain, torch.optim.Rprop(plain.parameters(), lr=1e-3))
    assert train(net, torch.optim.Rprop(net.parameters(), lr=1e-3)) == wanted
    for found, parameter in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(local(found), parameter)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_way_to_step(alone, dtype):
    """By hand, with a closure, as the adapters step, as a session with manual optimization lets the program step."""
    ways = {**WAYS, "with a named closure": lambda optimizer: optimizer.step(closure=lambda: None)}
    found = []
    for options, way in [({}, ways["by hand"]), *(({"optimizer_offload": True}, way) for way in ways.values())]:
        net = sharded(options, dtype)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)  # wraps `step`
        train(net, optimizer, lambda optimizer, way=way, scheduler=scheduler: (way(optimizer), scheduler.step()))
        found.append(state_of(net, optimizer))
    for each in found[1:]:
        assert_same_bits(each, found[0])


def test_gradients_that_the_closure_computes(alone):
    def one(options):
        net = sharded(options)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def closure():
            optimizer.zero_grad()
            loss = net(torch.ones(2, WIDTH)).square().mean()
            loss.backward()
            return loss

        results = [float(optimizer.step(closure).detach()) for _ in range(3)]
        return results, state_of(net, optimizer)

    (losses, state), (losses_there, state_there) = one({}), one({"optimizer_offload": True})
    assert losses == losses_there
    assert losses[2] < losses[0]
    assert_same_bits(state_there, state)


def storages(tensors):
    return {each.untyped_storage().data_ptr() for each in map(local, tensors) if each.numel()}


def test_host_state_shares_no_memory_with_the_device(alone):
    net = sharded({"optimizer_offload": True})
    seen = []  # of the memory with which torch's step computes

    class Watched(torch.optim.AdamW):
        def _init_group(self, group, *args, **kwargs):
            seen.append([each for each in group["params"] if each.grad is not None and isinstance(each, DTensor)])
            return super()._init_group(group, *args, **kwargs)

    optimizer = Watched(net.parameters(), lr=1e-2)
    parameters = list(net.parameters())
    train(net, optimizer)
    assert seen == [[]] * NUM_STEPS  # never with the tensors of the device
    moments = [value for values in optimizer.state.values() for value in values.values()]
    on_device = storages(parameters)
    assert not on_device & storages(moments)
    copies = [tensor for each in _staged.values() for tensor in (each.parameter, each.gradient)]
    assert not (on_device | storages(moments)) & storages(copies)
    assert all(local(each).device.type == "cpu" for each in moments)
    assert all(a is b for a, b in zip(parameters, net.parameters(), strict=True))
    held = [each for group in optimizer.param_groups for each in group["params"]]
    assert all(a is b for a, b in zip(held, parameters, strict=True))
    kinds = {key: type(value) for values in optimizer.state.values() for key, value in values.items()}
    assert kinds == {"step": torch.Tensor, "exp_avg": DTensor, "exp_avg_sq": DTensor}


def test_a_steady_step_allocates_nothing_and_keeps_its_tensors(alone):
    net = sharded({"optimizer_offload": True})
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    train(net, optimizer)
    before = [id(value) for values in optimizer.state.values() for value in values.values()]
    staged = {id(each): each.parameter.data_ptr() for each in _staged.values()}
    train(net, optimizer)
    assert [id(value) for values in optimizer.state.values() for value in values.values()] == before
    assert {id(each): each.parameter.data_ptr() for each in _staged.values()} == staged


def test_what_is_recorded_ends_with_the_model(alone):
    import gc

    gc.collect()
    before = len(_kept)
    net = sharded({"optimizer_offload": True})
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    train(net, optimizer)
    assert len(_kept) == before + len(list(net.parameters()))
    del net, optimizer
    gc.collect()
    assert len(_kept) == before


class Fails(torch.optim.AdamW):
    """Raises in torch's step, on request."""

    fails = False

    def _init_group(self, *args, **kwargs):
        if self.fails:
            raise InterruptedError
        return super()._init_group(*args, **kwargs)


def in_a_session(optimizer):
    with local_steps([optimizer]):
        optimizer.step()


WAYS = {
    "by hand": lambda optimizer: optimizer.step(),
    "with a closure": lambda optimizer: optimizer.step(lambda: None),
    "by an adapter": lambda optimizer: step_locally(optimizer, lambda: None),
    "in a session": in_a_session,
}


def backward(net):
    net(torch.ones(2, WIDTH)).square().sum().backward()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("has_stepped", [True, False])
def test_an_exception_in_a_step_leaves_the_optimizer_as_it_was(alone, way, has_stepped):
    """What a program then does acts on its parameters: it drops gradients, loads a checkpoint, trains on."""
    found = []
    for fails in (False, True):
        net = sharded({"optimizer_offload": True})
        optimizer = Fails(net.parameters(), lr=1e-2)
        parameters = list(net.parameters())
        if has_stepped:
            train(net, optimizer)
        before, saved = state_of(net, optimizer), copy.deepcopy(optimizer.state_dict())
        if fails:
            optimizer.fails = True
            backward(net)
            with pytest.raises(InterruptedError):
                WAYS[way](optimizer)
            assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], parameters, strict=True))
            assert_same_bits(state_of(net, optimizer), before)
            assert {type(value) for each in optimizer.state.values() for value in each.values()} <= {
                DTensor,
                torch.Tensor,
            }
            optimizer.zero_grad()
            assert all(parameter.grad is None for parameter in parameters)
            with pytest.raises(ValueError, match="more than one parameter group"):
                optimizer.add_param_group({"params": parameters[:1]})
            optimizer.fails = False
        optimizer.load_state_dict(saved)
        with torch.no_grad():
            for parameter in parameters:
                parameter.fill_(0.5)
        backward(net)
        WAYS[way](optimizer)
        found.append(state_of(net, optimizer))
    assert_same_bits(found[1], found[0])
    assert any((value != 0.5).any() for value in found[0].values())


@pytest.mark.parametrize("place", ["_stage", "_host_part", "_as_state"])
def test_an_exception_while_state_is_copied_loses_none(alone, monkeypatch, place):
    net = sharded({"optimizer_offload": True})
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
    train(net, optimizer)
    if place == "_as_state":
        optimizer.state.clear()  # so that the step creates some
    before = state_of(net, optimizer)
    backward(net)

    def fails(*_):
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(host_optimizer, place, fails)
        with pytest.raises(MemoryError):
            optimizer.step()
    assert_same_bits(state_of(net, optimizer), before)


def test_what_a_step_changes_in_the_optimizer_itself(alone):
    """Attributes, entries of groups, and what a closure changes."""

    class Counts(torch.optim.SGD):
        num_calls = 0

        def _init_group(self, group, *args):
            self.num_calls += 1
            group["seen"] = group.get("seen", 0) + 1
            return super()._init_group(group, *args)

    net = sharded({"optimizer_offload": True})
    optimizer = Counts(net.parameters(), lr=0.1)

    def closure():
        optimizer.note, optimizer.param_groups[0]["lr"] = "written", 0.0
        backward(net)

    before = state_of(net, optimizer)
    optimizer.step(closure)
    optimizer.step(closure)
    assert (optimizer.num_calls, optimizer.param_groups[0]["seen"], optimizer.note) == (2, 2, "written")
    assert_same_bits(state_of(net, optimizer), before)  # with the learning rate of the closure


@pytest.mark.parametrize("fails", [False, True])
def test_an_optimizer_is_freed(alone, fails):
    import gc

    net = sharded({"optimizer_offload": True})
    optimizer = Fails(net.parameters(), lr=1e-2)
    backward(net)
    optimizer.fails = fails
    with pytest.raises(InterruptedError) if fails else nullcontext():
        optimizer.step()
    reference = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert reference() is None


def test_the_memory_of_host_copies_stays_pinned_while_they_are_used(monkeypatch):
    """`allocate_near` unpins a block when the tensor that it has returned is freed."""
    unpinned = []

    def allocate(device, num_bytes):
        block = torch.empty(num_bytes, dtype=torch.uint8)
        weakref.finalize(block, unpinned.append, num_bytes)
        return block

    monkeypatch.setattr(host_optimizer, "allocate_near", allocate)
    staged = host_optimizer._Staged(torch.empty(4, 4))
    assert not unpinned
    del staged
    assert unpinned == [128]


def test_a_step_that_a_compiled_function_calls_is_refused(alone):
    net = sharded({"optimizer_offload": True})
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    before = state_of(net, optimizer)
    backward(net)
    compiled = torch.compile(lambda: optimizer.step(), backend="eager")
    with pytest.raises(ConfigError, match=r"optimizer_offload=True has AdamW .*a compiled function calls its step"):
        compiled()
    assert_same_bits(state_of(net, optimizer), before)
    optimizer.step()
    assert len(optimizer.state) == sum(parameter.grad is not None for parameter in net.parameters())


def test_state_that_an_optimizer_has_created_on_the_device_is_not_used_for_that_on_the_host(alone, tmp_path):
    """As Adagrad's, which its constructor creates beside the parameters; the meta device stands for a GPU."""

    def fresh():
        net = sharded({"optimizer_offload": True})
        return net, torch.optim.Adagrad(net.parameters(), lr=0.1)

    net, optimizer = fresh()
    train(net, optimizer)
    sender = TrainingState(net, [optimizer])
    data = torch.empty(sender.num_bytes(), dtype=torch.uint8)
    sender.copy_to(data)
    CheckpointWriter().save(tmp_path / "saved", model=net, optimizers=[optimizer]).wait(timeout_s=60)

    def receive(there, resumed):
        TrainingState(there, [resumed]).copy_from(sender.header(), data, "a peer")

    def load(there, resumed):
        load_checkpoint(tmp_path / "saved", model=there, optimizers=[resumed])

    for way in (receive, load):
        there, resumed = fresh()
        for parameter, values in resumed.state.items():
            values["sum"] = from_local_like(parameter, values["sum"]._local_tensor.to("meta"))
        way(there, resumed)
        assert_same_bits(state_of(there, resumed), state_of(net, optimizer))


def test_state_that_was_loaded_and_frozen_parameters_that_thaw(alone):
    found = []
    for options in ({}, {"optimizer_offload": True}):
        net = sharded(options)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        train(net, optimizer)
        optimizer.load_state_dict(optimizer.state_dict())  # replaces all tensors
        net.frozen.requires_grad_(True)
        train(net, optimizer)
        found.append(state_of(net, optimizer))
    assert_same_bits(found[1], found[0])
    assert "frozen.weight.exp_avg" in found[0]


@pytest.mark.parametrize("options", [{name: True} for name in ON_HOST])
@pytest.mark.parametrize("is_saved_on_host", [True, False])
def test_checkpoints_do_not_depend_on_where_the_state_lies(alone, tmp_path, options, is_saved_on_host):
    """Resuming equals never stopping: from the device to the host, and back."""
    first, second = (options, {}) if is_saved_on_host else ({}, options)
    net = sharded(first)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
    train(net, optimizer)
    CheckpointWriter().save(tmp_path / "saved", model=net, optimizers=[optimizer]).wait(timeout_s=60)
    there = sharded(second)
    resumed = torch.optim.AdamW(there.parameters(), lr=1e-2, fused=True)
    load_checkpoint(tmp_path / "saved", model=there, optimizers=[resumed])
    assert_same_bits(state_of(there, resumed), state_of(net, optimizer))
    train(net, optimizer)
    train(there, resumed)
    assert_same_bits(state_of(there, resumed), state_of(net, optimizer))


def test_state_is_allocated_where_it_lies(alone):
    on_host, on_device, there = sharded({"optimizer_offload": True}), sharded({}), sharded({"param_offload": True})
    kept = ids_with_host_state()
    assert {id(each) for each in on_host.parameters()} <= kept
    assert not {id(each) for net in (on_device, there) for each in net.parameters()} & kept
    parameter = nn.Parameter(torch.empty(1, device="meta"))  # stands for one on a GPU
    assert state_device(parameter, ()).type == step_count_device(parameter, {"fused": True}, ()).type == "meta"
    assert state_device(parameter, {id(parameter)}).type == "cpu"
    assert step_count_device(parameter, {"fused": True}, {id(parameter)}).type == "cpu"
    assert step_count_device(parameter, {}, ()).type == "cpu"


class Communicates(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure=None):
        raise AssertionError("was run")


def hooked(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    optimizer.register_step_pre_hook(test_names_that_others_use)
    return optimizer


def hooked_from_nowhere(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    hook = types.FunctionType(test_names_that_others_use.__code__, {})
    assert hook.__module__ is None
    optimizer.register_step_pre_hook(hook)
    return optimizer


REFUSED = {
    "communicates": (Communicates, "Communicates .*may communicate"),
    "Adafactor": (lambda parameters: torch.optim.Adafactor(parameters), "Adafactor .*may communicate"),
    "hook": (hooked, "SGD .*hook"),
    "hook of no module": (hooked_from_nowhere, "SGD .*hook"),
    "capturable": (lambda parameters: torch.optim.AdamW(parameters, capturable=True), "AdamW .*capturable=True"),
    "differentiable": (
        lambda parameters: torch.optim.AdamW(parameters, differentiable=True),
        "AdamW .*differentiable=True",
    ),
}


@pytest.mark.parametrize("option", ON_HOST)
@pytest.mark.parametrize("kind", REFUSED)
def test_optimizers_that_are_refused_before_their_first_step(alone, kind, option):
    make, told = REFUSED[kind]
    make(sharded({}).parameters())  # fine without the option
    net = sharded({option: True})
    optimizer = make(net.parameters())
    net(torch.ones(2, WIDTH)).sum().backward()
    before = [local(parameter).clone() for parameter in net.parameters()]
    with pytest.raises(ConfigError, match=rf"{option}=True has {told}"):
        check_host_optimizers([optimizer])
    with pytest.raises(ConfigError, match="leave the option out"):
        optimizer.step()
    assert all(torch.equal(local(a), b) for a, b in zip(net.parameters(), before, strict=True))


def test_a_compiled_step_is_refused(alone):
    net = sharded({"optimizer_offload": True})
    optimizer = torch.optim.AdamW(net.parameters())
    optimizer.step = torch.compile(optimizer.step)
    with pytest.raises(ConfigError, match="compiled"):
        check_host_optimizers([optimizer])


def test_optimizers_of_other_models_step_as_ever(alone):
    sharded({"optimizer_offload": True})
    other = nn.Linear(2, 2)
    optimizer = torch.optim.Adafactor(other.parameters())
    other(torch.ones(2)).sum().backward()
    optimizer.step()
    assert not steps_on_host(optimizer)


def test_a_model_that_the_program_has_sharded(alone):
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    mesh = build_mesh(ParallelConfig().topology(1), DEVICE)
    net = fully_shard(Net(), mesh=mesh["shard"])
    with pytest.raises(ConfigError, match=r"param_offload=True, but 7 of 7 parameters of FSDPNet.*optimizer_offload"):
        parallelize(net, mesh, ParallelConfig(param_offload=True))
    parallelize(net, mesh, ParallelConfig(optimizer_offload=True))
    assert ids_with_host_state() >= {id(each) for each in net.parameters()}
    there = fully_shard(Net(), mesh=mesh["shard"], offload_policy=CPUOffloadPolicy(pin_memory=False))
    parallelize(there, mesh, ParallelConfig(param_offload=True))
    assert ids_on_host(there) == {id(each) for each in there.parameters()}
    assert not ids_with_host_state() & ids_on_host(there)


def test_a_model_of_which_the_program_keeps_a_part_on_the_host(alone):
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    mesh, policy = build_mesh(ParallelConfig().topology(1), DEVICE), CPUOffloadPolicy(pin_memory=False)
    for options in ({}, {"optimizer_offload": True}):
        net = Net()
        fully_shard(net.first, mesh=mesh["shard"], offload_policy=policy)
        parallelize(fully_shard(net, mesh=mesh["shard"]), mesh, ParallelConfig.of(options))
        everything = {id(each) for each in net.parameters()}
        first = {id(each) for each in net.first.parameters()}
        assert ids_on_host(net) == first
        assert ids_with_host_state() & everything == (everything - first if options else set())
        with pytest.raises(ConfigError, match=r"Adafactor .*may communicate"):
            check_host_optimizers([torch.optim.Adafactor(net.parameters())])
        assert uses_host_memory(torch.optim.SGD(net.first.parameters()))
        assert uses_host_memory(torch.optim.SGD(net.last.parameters())) is bool(options)
    with pytest.raises(ConfigError, match="param_offload=True, but 5 of 7 parameters"):
        parallelize(net, mesh, ParallelConfig(param_offload=True))


# -- where host and device differ: a mesh of another device stands for the GPU ----------------------------------------


@pytest.fixture
def other_device(alone, monkeypatch):
    """A model on the host whose mesh says that it is of the meta device, which nothing may be moved to."""
    net = sharded({"param_offload": True})
    for each in fsdp_parameters(net):
        monkeypatch.setattr(each.sharded_param.device_mesh, "_device_type", "meta")
    return net


def test_tensors_made_from_local_parts_stay_on_the_host(other_device):
    for parameter in other_device.parameters():
        made = from_local_like(parameter, torch.ones_like(local(parameter)))
        assert made._local_tensor.device.type == made.device.type == "cpu"
        assert (made.shape, made.placements, made.dtype) == (parameter.shape, parameter.placements, parameter.dtype)
        assert compute_device(parameter).type == "meta"
        half = from_local_like(parameter, torch.ones_like(local(parameter), dtype=torch.bfloat16))
        assert half.dtype == torch.bfloat16
        with LocalDispatchMode():
            wide = torch.zeros_like(parameter, dtype=torch.float64)
        assert wide._local_tensor.device.type == wide.device.type == "cpu"
        assert (wide.shape, wide.placements, wide.dtype) == (parameter.shape, parameter.placements, torch.float64)


def test_norms_are_taken_where_gradients_lie_and_reduced_on_the_device(other_device):
    parameters = list(other_device.parameters())
    for parameter in parameters:
        parameter.grad = from_local_like(parameter, torch.ones_like(local(parameter)))
    assert gradient_norm(parameters).device.type == "meta"
    assert all(local(parameter.grad).device.type == "cpu" for parameter in parameters)


def test_moving_a_module_leaves_its_shards_on_the_host(alone):
    net = sharded({"param_offload": True})
    net(torch.ones(2, WIDTH)).sum().backward()  # gradients are there, too
    before = [local(parameter).data_ptr() for parameter in net.parameters()]
    with shards_stay_on_host(net):
        net.to("meta")
    assert all(each.grad.device.type == "cpu" for each in net.parameters() if each.grad is not None)
    assert net.scale.device.type == "meta"
    assert [local(parameter).data_ptr() for parameter in net.parameters()] == before
    plain = sharded({})
    with shards_stay_on_host(plain):
        plain.to("meta")
    assert all(parameter.device.type == "meta" for parameter in plain.parameters())


def test_delayed_shards_are_allocated_on_the_host(alone):
    from hyperpod_plugins.delayed_init.materialize import allocate
    from hyperpod_plugins.parallel.hsdp import shard_hybrid

    config = ParallelConfig(param_offload=True, delayed_init=True)
    with torch.device("meta"):
        net = Net()
    shard_hybrid(net, build_mesh(config.topology(1), DEVICE)["replicate", "shard"], config)
    on_host = ids_on_host(net)
    assert len(on_host) == len(list(net.parameters()))
    some = set(itertools.islice(on_host, 3))
    allocate(net, torch.device("meta"), some)
    assert {id(each) for each in net.parameters() if not each.is_meta} == some


# -- several ranks ----------------------------------------------------------------------------------------------------


def train_on_mesh(options, kind):
    net = sharded(options)
    optimizer = OPTIMIZERS[kind](net.parameters())
    topology = ParallelConfig.of(options).topology(dist.get_world_size())
    losses = train(net, optimizer, place=topology.data_rank(dist.get_rank()), readers=topology.data_degree)
    whole = {name: parameter.full_tensor().clone() for name, parameter in net.named_parameters()}
    return losses, whole, state_of(net, optimizer)


def train_in_all_ways(layout):
    dist.init_process_group("hyperpod")
    return {
        (kind, option): train_on_mesh(layout | ({option: True} if option else {}), kind)
        for kind in ("adamw", "sgd")
        for option in ("", *ON_HOST)
    }


@pytest.mark.spawns
@pytest.mark.parametrize(
    ("size", "layout"),
    [(2, {}), (4, {"hybrid_shard_degree": 2})],
    ids=["2 ranks", "hsdp 2x2"],
)
def test_ranks_with_training_state_on_the_host_equal_one_process(run_ranks, size, layout):
    alone = {}
    for kind in ("adamw", "sgd"):
        torch.manual_seed(0)
        net = Net()
        optimizer = OPTIMIZERS[kind](net.parameters())
        alone[kind] = train(net, optimizer), dict(net.named_parameters())
    ranks = run_ranks(train_in_all_ways, layout, world_size=size, timeout_s=90)
    for kind, option in ranks[0]:
        losses = torch.tensor([rank[kind, option][0] for rank in ranks]).mean(0)
        wanted, parameters = alone[kind]
        torch.testing.assert_close(losses, torch.tensor(wanted), rtol=5e-7, atol=0)
        for rank in ranks:
            _, whole, state = rank[kind, option]
            assert_same_bits(state, rank[kind, ""][2])
            for name, value in whole.items():
                difference = (value - parameters[name]).norm() / parameters[name].norm()
                assert difference <= 5e-7, (kind, option, name)
