"""What a program attaches to parameters: attributes, references and hooks; carried over, or refused by name."""

from collections import deque
from dataclasses import make_dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from device import DEVICE
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import DTensor

from hyperpod_plugins.errors import ConfigError

WIDTH, NUM_STEPS, LATE = 4, 4, 2
NUMBERS_PARAMETERS = hasattr(_fsdp_param, "_get_orig_param_uid")  # torch 2.13


class Net(nn.Module):
    def __init__(self, sparse=False):
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(8, WIDTH, sparse=sparse)
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.inner, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens):
        return self.head(torch.tanh(self.inner(self.block(self.table(tokens)))))


class Penalty:
    """An object of the program, which is no module."""

    def __init__(self, weight):
        self.weight = weight

    def __call__(self):
        return self.weight.square().sum()


def keep_everywhere(net):
    """Keep parameters in all ways that follow them, and return the sum of penalties on them."""
    head, inner, table = net.head, net.inner, net.table
    net.kept = {"deep": [([head.weight], deque([inner.bias]))], 3: head.bias}
    net.penalty = Penalty(inner.weight)
    net.hidden = [SimpleNamespace(twin=nn.Linear(WIDTH, WIDTH))]
    net.hidden[0].twin.weight = head.weight
    captured, weights = table.weight, [inner.weight]
    net.captured = lambda: captured.square().sum() + weights[0].abs().sum()

    def penalties():
        (weights, biases), bias = net.kept["deep"][0], net.kept[3]
        squares = [each.square().sum() for each in (*weights, *biases, bias, net.hidden[0].twin.weight)]
        return sum(squares) + net.penalty() + net.captured()

    return penalties


def tokens_of(step):
    return torch.randint(0, 8, (4,), generator=torch.Generator().manual_seed(step)).to(DEVICE)


def train(net, share, loss_of, *, each_step=lambda step: None):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(NUM_STEPS):
        each_step(step)
        optimizer.zero_grad()
        loss_of(tokens_of(step)[share]).backward()
        optimizer.step()


def sharded(net, **options):
    from hyperpod_plugins.parallel import ParallelConfig, build_mesh, parallelize

    config = ParallelConfig(block_classes=("Sequential",), **options)
    return parallelize(net, build_mesh(config.topology(2), DEVICE), config)


def whole(net):
    named = [(name, each.detach()) for name, each in net.named_parameters()]
    return {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in named}


def own_share():
    return slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)


def refusal(function, *arguments):
    try:
        function(*arguments)
    except ConfigError as error:
        return str(error)
    return "not refused"


# -- what is carried over ---------------------------------------------------------------------------------------------


def carried(_):
    if not dist.is_initialized():
        dist.init_process_group("hyperpod")
    told = {}
    alone, net = Net().to(DEVICE), Net()
    penalties, alone_penalties = keep_everywhere(net), keep_everywhere(alone)
    net.optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    sharded(net, allow_empty_shards=True)
    told["optimizer"] = {id(each) for each in net.optimizer.param_groups[0]["params"]} == set(map(id, net.parameters()))
    told["list"] = net.kept["deep"][0][0][0] is net.head.weight and net.kept[3] is net.head.bias

    def add_another(step):
        if step == 1:
            net.kept["deep"][0][0].insert(0, net.kept["deep"][0][0].pop())  # the program may move them
            net.kept["first"] = net.kept.pop(3)
            net.kept[3] = net.kept.pop("first")

    train(net, own_share(), lambda x: net(x).square().mean() + penalties(), each_step=add_another)
    train(alone, slice(None), lambda x: alone(x).square().mean() + alone_penalties())
    values = whole(alone)
    told["differences"] = {name: float((each - values[name]).abs().max()) for name, each in whole(net).items()}
    return told | attributes() | hooks_of_shards() | second_derivatives() | kept_groups()


def attributes():
    net, told = Net(), {}
    net.head.weight.mark, net.block[0].bias.mark = "head", "block"
    sharded(net, allow_empty_shards=True)

    def marks(kind):
        told[kind] = [each.mark for each in (net.head.weight, net.block[0].bias) if hasattr(each, "mark")]

    marks("sharded")
    net.to(DEVICE)
    net.double().float()
    marks("after module.to")
    net.load_state_dict({name: each.detach().clone() for name, each in net.state_dict().items()}, assign=True)
    marks("after load_state_dict")
    net(tokens_of(0))
    told["gathered"] = net.head.weight.mark, isinstance(net.head.weight, DTensor)
    net.head.weight.seen = True
    net.head.weight.mark = "changed"
    net.reshard()
    marks("after a forward")
    told["set in a forward"] = vars(net.head.weight).get("seen")
    return told


class Penalized(Net):
    """Its forward computes a loss with a penalty on the gradient of its output, through parameters of the root."""

    def forward(self, tokens):
        x = self.table(tokens)
        out = self.head(torch.tanh(self.inner(x)))
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.square().mean() + (slope.norm(dim=1) - 1).square().mean()


def second_derivatives():
    alone, net = Penalized().to(DEVICE), sharded(Penalized(), allow_empty_shards=True)
    train(net, own_share(), net)
    train(alone, slice(None), alone)
    values = whole(alone)
    return {"penalized": {name: float((each - values[name]).abs().max()) for name, each in whole(net).items()}}


def turn(parameter):
    parameter.grad.mul_(-0.5)


def hooks_of_shards():
    """A hook that runs once the gradient is reduced is served."""
    alone, net = Net().to(DEVICE), sharded(Net(), allow_empty_shards=True)
    for each in (alone, net):
        for weight in (each.head.weight, each.block[0].weight):
            weight.register_post_accumulate_grad_hook(turn)
    train(net, own_share(), lambda x: net(x).square().mean())
    train(alone, slice(None), lambda x: alone(x).square().mean())
    values = whole(alone)
    return {"hooked": {name: float((each - values[name]).abs().max()) for name, each in whole(net).items()}}


def kept_groups():
    """The program keeps the groups of its optimizer, and computes without gradients before it steps."""
    from hyperpod_plugins.parallel.former_parameters import replace_stale_parameters

    def grouped(net):
        net.groups = [{"params": [net.head.weight, net.table.weight]}, {"params": list(net.block.parameters())}]
        return net, torch.optim.SGD(net.groups, lr=0.1)

    (alone, of_alone), (net, optimizer) = grouped(Net().to(DEVICE)), grouped(Net())
    sharded(net, allow_empty_shards=True)
    replace_stale_parameters([optimizer], net, num_ranks=2)
    for each, own, share in ((net, optimizer, own_share()), (alone, of_alone, slice(None))):
        for step in range(NUM_STEPS):
            each(tokens_of(step)[share]).square().mean().backward()
            with torch.no_grad():
                each(tokens_of(step)[share])
            own.step()
            each.zero_grad()
    values = whole(alone)
    return {"grouped": {name: float((each - values[name]).abs().max()) for name, each in whole(net).items()}}


@pytest.mark.spawns
def test_attributes_and_references_follow_the_sharded_parameters(run_ranks):
    for told in run_ranks(carried, None, world_size=2):
        assert told["optimizer"]
        assert told["list"]
        assert max(told["differences"].values()) < 1e-5, told["differences"]
        assert max(told["hooked"].values()) < 1e-5, told["hooked"]
        assert max(told["grouped"].values()) < 1e-5, told["grouped"]
        assert max(told["penalized"].values()) < 1e-5, told["penalized"]
        for kind in ("sharded", "after module.to", "after load_state_dict"):
            assert told[kind] == ["head", "block"], kind
        assert told["gathered"] == ("head", False)
        assert told["after a forward"] == ["changed", "block"]
        assert told["set in a forward"]


# -- what is refused --------------------------------------------------------------------------------------------------


def attach(net, kind):
    weight = net.head.weight
    if kind == "hook":
        weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    elif kind == "post hook":
        weight.register_post_accumulate_grad_hook(lambda parameter: None)
    elif kind == "multi hook":
        torch.autograd.graph.register_multi_grad_hook([weight], lambda gradients: None)
    elif kind == "tuple":
        net.pair = {"both": (weight, 1)}
    elif kind == "set":
        net.some = {weight}
    elif kind == "key":
        net.rates = {weight: 0.1}
    elif kind == "private slot":

        class Hidden:
            __slots__ = ("__weight",)

            def __init__(self):
                self.__weight = weight

        net.hidden = Hidden()
    elif kind == "slot":
        net.slotted = make_dataclass("Slotted", ["weight"], slots=True)(weight)
    elif kind == "attribute of a parameter":
        net.inner.weight.twin = weight
    elif kind == "optimizer with state":
        net.optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        net(torch.arange(8)).sum().backward()
        net.optimizer.step()


BEFORE = {
    "hook": "gradient hooks of head.weight were registered before Net was sharded.*on_before_optimizer_step",
    "post hook": "gradient hooks of head.weight were registered before Net",
    "multi hook": "gradient hooks of head.weight were registered before Net",
    "tuple": r"Net.pair\['both'\] \(a tuple\) of Net would keep a parameter.*list",
    "set": r"Net.some \(a set\) of Net would keep",
    "key": "a key of Net.rates of Net would keep",
    "private slot": r"Net.hidden._Hidden__weight \(a slot\) of Net would keep",
    "slot": r"Net.slotted.weight \(a slot\) of Net would keep",
    "attribute of a parameter": "inner.weight.twin of Net would keep",
    "optimizer with state": "Net.optimizer, a SGD, has state already",
    "sparse": r"table \(Embedding\) would compute sparse gradients.*sparse=False",
}


class Doing(Net):
    """Does something in forward, in some steps of some ranks."""

    def __init__(self, kind, ranks):
        super().__init__()
        self.kind, self.ranks, self.step = kind, ranks, 0

    def forward(self, tokens):
        is_on = self.step == LATE and dist.get_rank() in self.ranks
        if is_on and self.kind.endswith("in forward"):
            attach(self, self.kind.removesuffix(" in forward"))
        if is_on and self.kind == "functional sparse":
            self.table.sparse = True
        return super().forward(tokens)


IN_A_STEP = {
    "hook": ("a gradient hook is registered on head.weight.*on_before_optimizer_step", (1,)),
    "multi hook": ("a gradient hook is registered on head.weight", (0, 1)),
    "hook in forward": ("a gradient hook is registered on head.weight", (0,)),
    "post hook in forward": ("a gradient hook is registered on head.weight", (0, 1)),
    "functional sparse": ("the gradient of table.weight is sparse", (1,)),
    "create_graph": ("a backward with create_graph=True.*training_step", (0, 1)),
}


def refused(_):
    from hyperpod_plugins.parallel.hsdp import reshard

    if not dist.is_initialized():
        dist.init_process_group("hyperpod")
    told = {}
    for kind in BEFORE:
        net = Net(sparse=kind == "sparse")
        attach(net, kind)
        told[kind, "before"] = refusal(sharded, net)
    for kind, (_, ranks) in IN_A_STEP.items():
        net, before = sharded(Doing(kind, ranks)), {}

        def each_step(step, net=net, kind=kind, ranks=ranks, before=before):
            net.step = step
            before.update({name: each.to_local().clone() for name, each in net.named_parameters()})
            if step == LATE and dist.get_rank() in ranks:
                attach(net, kind)

        def loss_of(x, net=net, kind=kind):
            y = net(x)
            if kind == "create_graph" and net.step == LATE:
                (slope,) = torch.autograd.grad(y.sum(), net.head.bias, create_graph=True)
                return slope.square().sum()
            return y.square().mean()

        text = refusal(lambda net=net, loss_of=loss_of, run=each_step: train(net, own_share(), loss_of, each_step=run))
        reshard(net)
        is_kept = all(torch.equal(each.to_local(), before[name]) for name, each in net.named_parameters())
        told[kind, "in a step"] = net.step, is_kept, text
    return told | by_the_program()


def by_the_program():
    """A model that the program has sharded: its attributes, and what refers to its former parameters."""
    from torch.distributed.fsdp import fully_shard

    from hyperpod_plugins.parallel.former_parameters import remember_attributes, succeed_parameters
    from hyperpod_plugins.parallel.unit_watch import watch_units

    def shard(net):
        remember_attributes(net)
        fully_shard(net.block)
        fully_shard(net)
        watch_units(net)
        succeed_parameters(net, is_by_program=True)
        return net

    net = Net().to(DEVICE)
    net.head.weight.mark, net.head.bias.mark, net.kept = "head", "old", [net.inner.weight]
    remember_attributes(net)
    net.head.bias = nn.Parameter(net.head.bias.detach()[: WIDTH // 2].repeat(2).reshape(2, 2))
    with_tuple, hooked = Net().to(DEVICE), Net().to(DEVICE)
    fully_shard(net)
    watch_units(net)
    succeed_parameters(net, is_by_program=True)
    attach(with_tuple, "tuple")
    attach(hooked, "hook")
    return {
        "marks": [getattr(each, "mark", None) for each in (net.head.weight, net.head.bias)],
        "list": net.kept[0] is net.inner.weight,
        "tuple": refusal(shard, with_tuple),
        "hooked": refusal(shard, hooked),
        "sparse by the program": refusal(shard, Net(sparse=True).to(DEVICE)),
    }


@pytest.mark.spawns
def test_what_cannot_be_served_is_refused_by_name(run_ranks):
    for told in run_ranks(refused, None, world_size=2):
        for kind, text in BEFORE.items():
            with pytest.raises(ConfigError, match=text):
                raise ConfigError(told[kind, "before"])
        for kind, (text, _) in IN_A_STEP.items():
            step, is_kept, found = told[kind, "in a step"]
            assert (step, is_kept) == (LATE, True), (kind, found)
            with pytest.raises(ConfigError, match=text):
                raise ConfigError(found)
        assert told["marks"] == ["head", None]
        assert told["hooked"].startswith("gradient hooks of head.weight")
        assert "table (Embedding) would compute sparse gradients" in told["sparse by the program"]
        if NUMBERS_PARAMETERS:
            assert told["list"]
            assert "(a tuple) of Net would keep" in told["tuple"]
