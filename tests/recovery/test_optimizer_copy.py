"""What a step may change, put back: buffers, metrics, parameters and optimizer state; one process."""

import functools
import types
import weakref
from collections import UserDict
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torchmetrics import MeanMetric

from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.parallel.local_optimizer import check_no_required_closure, single_use_closure
from hyperpod_plugins.recovery.optimizer_copy import FreshGradients, OptimizerCopy, is_elementwise
from hyperpod_plugins.recovery.state_transfer import hyperparameters, to_python_numbers
from hyperpod_plugins.recovery.undo import StepStart


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head, self.mean = nn.Linear(2, 2), nn.Linear(2, 2), MeanMetric()
        for name in ("written", "assigned", "deleted"):
            self.register_buffer(name, torch.ones(()))


def state_of(model, *optimizers):
    tensors = {name: value.clone() for name, value in [*model.named_parameters(), *model.named_buffers()]}
    for optimizer in optimizers:
        for index, state in enumerate(optimizer.state.values()):
            tensors |= {f"{index}.{key}": torch.as_tensor(value).clone() for key, value in state.items()}
    return {name: value.tolist() for name, value in tensors.items()}


def test_buffers_that_are_written_assigned_deleted_or_added():
    model = Net()
    beginning = StepStart(model, ())
    model.mean.update(1.0)
    beginning.begin()
    before, buffers = state_of(model), dict(model.named_buffers())
    for _ in range(2):  # a step can be undone several times
        model.written.add_(1)
        model.assigned = model.assigned + 1
        del model.deleted
        model.register_buffer("added", torch.zeros(()), persistent=False)
        model.head.register_buffer("first", torch.zeros(()), persistent=False)
        model.mean.update(7.0)
        beginning.put_back()
        assert state_of(model) == before
        assert all(model.get_buffer(name) is buffer for name, buffer in buffers.items())
        assert not model.head._buffers
        assert not model.head._non_persistent_buffers_set
        assert (float(model.mean.compute()), model._non_persistent_buffers_set) == (1.0, set())


@pytest.mark.parametrize("through_data", [False, True], ids=["versions", "data"])
def test_parameters_that_the_program_writes_to_are_put_back_from_the_second_step_on(through_data):
    model = Net()
    optimizer = torch.optim.SGD(model.body.parameters(), lr=0.1)
    beginning = StepStart(model, [optimizer])
    for step in range(3):
        beginning.begin()
        before = state_of(model)
        assert beginning.is_within_reach
        with torch.no_grad():
            for parameter, factor in ((model.body.weight, 0.9), (model.head.weight, 0.8)):
                (parameter.data if through_data else parameter).mul_(factor)
        assert beginning.is_within_reach == (step > 0)
        beginning.end()
        if step:
            beginning.put_back()
            assert state_of(model) == before


@dataclass
class Sample:
    inputs: torch.Tensor


@pytest.mark.parametrize("wrap", [lambda x: {"x": [x]}, lambda x: UserDict(x=x), lambda x: (1, Sample(x))])
@pytest.mark.parametrize("write", [lambda x: x.mul_(2), lambda x: x.unsqueeze_(0), lambda x: x[0].zero_()])
@pytest.mark.parametrize("first", [0, 11])
def test_batches_that_the_program_writes_to_are_put_back_unless_that_is_late_and_new(wrap, write, first):
    beginning = StepStart(Net(), ())
    for step in range(13):
        beginning.begin()
        inputs = torch.arange(1.0, 5.0)
        batch = wrap(inputs)
        for _ in range(2):  # computed again
            beginning.batches.remember(batch)
            if step < first:
                break
            write(inputs)
            assert beginning.is_within_reach == (step != 11 or not first)
            if not beginning.is_within_reach:
                break
            beginning.put_back()
            assert inputs.tolist() == [1, 2, 3, 4]
            write(inputs)
        beginning.end()
        beginning.close()


def test_batches_that_nobody_writes_to_are_copied_in_the_first_steps_alone():
    beginning = StepStart(Net(), ())
    with torch.inference_mode():
        batch = [torch.ones(2), 3]  # has no version
    copied = []
    for _ in range(10):
        beginning.begin()
        beginning.batches.remember([torch.ones(2), batch, Sample, "words"])
        ((_, _, saved),) = beginning.batches._tensors
        copied.append(saved is not None)
        beginning.end()
        assert beginning.is_within_reach
    assert copied == [True] * 8 + [False] * 2


def test_gradients_of_parameters_in_no_optimizer_begin_anew():
    model = Net()
    beginning = StepStart(model, [torch.optim.SGD(model.body.parameters(), lr=0.1)])
    model.head(model.body(torch.ones(1, 2))).sum().backward()
    beginning.begin()
    assert model.head.weight.grad is None
    assert model.body.weight.grad is not None  # an accumulation window may have begun
    model.head(torch.ones(1, 2)).sum().backward()
    beginning.put_back()
    assert model.head.weight.grad is None


@pytest.mark.parametrize("num_steps", [0, 1], ids=["its first step", "its second step"])
def test_a_step_of_an_optimizer_is_put_back(num_steps):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def step():
        optimizer.zero_grad()
        model.head(model.body(torch.ones(1, 2))).square().sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.param_groups[0]["found"] = [1.0]

    for _ in range(num_steps):
        step()
    kept = OptimizerCopy([optimizer], [scheduler])
    kept.save()
    before, rate, count = state_of(model, optimizer), optimizer.param_groups[0]["lr"], scheduler.last_epoch
    model.body.weight.requires_grad_(False)
    model.body.weight.requires_grad_(True)
    step()
    after = state_of(model, optimizer)
    with kept.as_it_began():
        assert (float(rate), scheduler.last_epoch) == (pytest.approx(0.1 * 0.5**num_steps), count)
    assert (float(rate), scheduler.last_epoch) == (pytest.approx(0.05 * 0.5**num_steps), count + 1)
    for _ in range(2):
        kept.restore()
        assert state_of(model, optimizer) == before
        assert optimizer.param_groups[0]["lr"] is rate
        assert ("found" in optimizer.param_groups[0]) == bool(num_steps)
        step()
        assert state_of(model, optimizer) == after


def test_gradients_of_the_step_before_are_not_kept_alive():
    weight = nn.Parameter(torch.ones(2))
    fresh = FreshGradients([torch.optim.SGD([weight], lr=0.1)])
    weight.sum().backward()
    gradient = weakref.ref(weight.grad)
    fresh.begin()
    weight.grad = None
    assert gradient() is None


def test_a_step_that_uses_gradients_of_the_step_before_is_refused():
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    fresh = FreshGradients([optimizer])
    for is_replay in (False, True):
        weight.grad = None
        weight.sum().backward()
        fresh.begin()
        if is_replay:
            optimizer.zero_grad()
            fresh.put_back()
        weight.sum().backward()
        with pytest.raises(ConfigError, match="zero_grad"):
            optimizer.step()
        optimizer.zero_grad()
        weight.sum().backward()
        optimizer.step()


class Own(torch.optim.AdamW):
    """Says nothing of its step."""


class Perturbing(torch.optim.SGD):
    """As sharpness-aware minimisation: gradients at another point."""

    @torch.no_grad()
    def step(self, closure=None):
        self.param_groups[0]["params"][0].add_(0.1)
        return closure()


class Twice(torch.optim.SGD):
    def step(self, closure=None):
        return closure(), closure()


def test_which_optimizers_step_before_the_vote():
    weight = nn.Parameter(torch.ones(2, 2))
    local = [torch.optim.AdamW([weight]), Own([weight]), torch.optim.SGD([weight])]
    torch.optim.lr_scheduler.StepLR(local[-1], 1)  # wraps its step
    assert [is_elementwise(each) for each in local] == [True] * 3
    assert not any(map(is_elementwise, [torch.optim.Muon([weight]), torch.optim.Adafactor([weight]), Twice([weight])]))


def test_a_class_that_inherits_its_step():
    """Torch wraps the step in the first class of which an instance is made: in a new process that may be this one."""

    class Inherited(torch.optim.Adagrad):
        pass

    class Wrapped(torch.optim.Adagrad):
        @functools.wraps(torch.optim.Adagrad.step)
        def step(self, closure=None):
            return closure()

    weight = nn.Parameter(torch.ones(2))
    inherited = Inherited([weight])
    assert is_elementwise(inherited)
    Inherited.step = torch.optim.Optimizer.profile_hook_step(Inherited.step)
    assert is_elementwise(inherited)
    assert not is_elementwise(Wrapped([weight]))


def test_hooks_and_steps_of_the_program_may_communicate():
    weight = nn.Parameter(torch.ones(2, 2))
    hooked, followed, own, wrapped, ours = [torch.optim.SGD([weight], lr=0.1) for _ in range(5)]
    FreshGradients([ours])
    assert is_elementwise(ours)
    hooked.register_step_pre_hook(lambda *_: None)
    followed.register_step_post_hook(lambda *_: None)
    for each in (own, wrapped):
        each.step = types.MethodType(lambda self, closure=None: None, each)
    torch.optim.lr_scheduler.StepLR(wrapped, 1)
    assert not any(map(is_elementwise, [hooked, followed, own, wrapped]))
    handle = register_optimizer_step_pre_hook(lambda *_: None)
    assert not is_elementwise(ours)
    handle.remove()
    assert is_elementwise(ours)


def test_optimizers_that_compute_gradients_are_refused():
    weight = nn.Parameter(torch.ones(2))
    check_no_required_closure([torch.optim.AdamW([weight]), torch.optim.Adafactor([weight])])
    with pytest.raises(ConfigError, match="LBFGS"):
        check_no_required_closure([torch.optim.LBFGS([weight])])
    for kind in (Perturbing, Twice):
        optimizer = kind([weight], lr=0.1)
        with pytest.raises(ConfigError, match=kind.__name__):
            optimizer.step(single_use_closure(optimizer, None))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    assert optimizer.step(single_use_closure(optimizer, 3)) == 3


def test_numbers_of_numpy_become_plain_ones_or_are_refused():
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=np.float64(0.1), momentum=np.int64(0))
    to_python_numbers([optimizer])
    assert [type(optimizer.param_groups[0][key]) for key in ("lr", "momentum")] == [float, int]
    optimizer.param_groups[0]["lr"] = np.float64(0.2)  # of a schedule
    assert type(hyperparameters(optimizer)[0]["lr"]) is float
    with pytest.raises(ConfigError, match="float32"):
        to_python_numbers([torch.optim.SGD([weight], lr=np.float32(0.1))])
