"""Python attributes that a program changes: undone with a step, and given to a replacement."""

import copy
import dataclasses
import enum
import logging
import random
import threading
import types
from collections import Counter, OrderedDict, defaultdict, deque

import numpy as np
import pytest
import torch
import torch.distributed as dist
from device import DEVICE
from recovery.meters import Meter
from recovery.test_life import results
from torch import nn
from torch.distributed._composable import checkpoint as checkpoint_function

from hyperpod_plugins.errors import CheckpointMismatch, ConfigError
from hyperpod_plugins.parallel import ParallelConfig, build_mesh, parallelize
from hyperpod_plugins.recovery import held_objects
from hyperpod_plugins.recovery.attributes import MAX_ENTRIES, PlainAttributes, modules_of_program
from hyperpod_plugins.recovery.local_objects import ProgramState
from hyperpod_plugins.recovery.packing import are_same, pack, unpack
from hyperpod_plugins.recovery.program_collectives import is_of_program
from hyperpod_plugins.recovery.state_digests import object_digests
from hyperpod_plugins.session.state import ScalerWatch


class Owner(nn.Module):
    num_seen = 0

    def __init__(self):
        super().__init__()
        self.register_buffer("buffer", torch.zeros(2))
        self.count, self.name, self.rate, self.nothing = 0, "a", 0.5, None
        self.items, self.table, self.seen = [1, [2]], {"a": {"b": 1}}, {1}
        self.recent, self.tally, self.ordered, self.by_name = (
            deque([1]),
            Counter("ab"),
            OrderedDict(a=1),
            defaultdict(int),
        )
        self.values, self.array, self.pair = torch.zeros(3), np.zeros(3), (1, 2)
        self.function, self.objects, self.large = len, [object()], torch.zeros(MAX_ENTRIES + 1)


CHANGES = {
    "a number": lambda it: vars(it).update(count=3),
    "a number that the class begins with": lambda it: vars(it).update(num_seen=it.num_seen + 1),
    "another type": lambda it: vars(it).update(nothing=1.5, name=b"b"),
    "a new one": lambda it: vars(it).update(late={"x": 1}),
    "a list within a list": lambda it: it.items[1].append(5),
    "a dictionary within one": lambda it: it.table["a"].update(c=(1, 2)),
    "a set": lambda it: it.seen.add(7),
    "a deque": lambda it: it.recent.appendleft(0.5),
    "a counter": lambda it: it.tally.update("b"),
    "an ordered dictionary": lambda it: it.ordered.update(b=2),
    "a dictionary with a default": lambda it: it.by_name.update(x=1),
    "a tensor in place": lambda it: it.values.add_(1),
    "a tensor assigned": lambda it: vars(it).update(values=torch.ones(5, dtype=torch.int64)),
    "a tensor that is no number": lambda it: it.values.fill_(float("nan")),
    "an array in place": lambda it: it.array.__iadd__(2),
    "a tuple": lambda it: vars(it).update(pair=(3, "x")),
}


def plain(owner):
    """The attributes that `Owner` has in common with others of its class, and that a change may touch."""
    left_out = {"function", "objects", "large", *vars(nn.Module())}
    return {key: value for key, value in vars(owner).items() if key not in left_out}


def same(one, other):
    one, other = plain(one), plain(other)
    if one.keys() != other.keys():
        return False
    pairs = [(one[key], other[key]) for key in one]
    return all(
        type(a) is type(b) and (np.array_equal(a, b) if isinstance(a, np.ndarray) else are_same(a, b)) for a, b in pairs
    )


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_undone_and_reaches_another_process(change):
    owner, other = Owner(), Owner()
    attributes, others = (PlainAttributes([("module", each)]) for each in (owner, other))
    assert attributes.state_dict() == {}
    before, kept, identities = copy.deepcopy(plain(owner)), attributes.keep(), {**vars(owner)}
    for _ in range(2):  # twice: a step may be undone again
        change(owner)
        state = attributes.state_dict()
        assert attributes.written({})
        assert not attributes.written(state)
        attributes.put_back(kept)
        assert vars(owner).keys() == identities.keys()
        assert all(vars(owner)[key] is value for key, value in identities.items())
        assert attributes.state_dict() == {}
        restored = copy.copy(owner)
        vars(restored).update(before)
        assert same(owner, restored)
    change(owner)
    others.load_state_dict(unpack(pack(state)))
    assert same(owner, other)
    others.load_state_dict({})
    assert same(other, Owner())


def negate_zeros(owner):
    owner.ordered["a"] *= -1.0
    owner.pair[0][0] *= -1.0


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_state_that_serves_again_is_that_of_now(change):
    owner = Owner()
    asked, not_asked = (PlainAttributes([("module", owner)]) for _ in range(2))
    owner.count, owner.items, owner.ordered = 1, [1, [2]], OrderedDict(a=0.0)
    assert asked.state_dict() is asked.state_dict()
    change(owner)
    assert pack(asked.state_dict()) == pack(not_asked.state_dict())


UNSEEN = {
    "a zero of the other sign": negate_zeros,
    "a tensor behind its version": lambda it: it.values.data.add_(1),
    "a tensor in a list behind its version": lambda it: it.items[1].data.add_(1),
    "the middle of a long list": lambda it: it.long.__setitem__(500, 7),
    "a factory": lambda it: setattr(it.by_name, "default_factory", str),
}


@pytest.mark.parametrize("change", UNSEEN.values(), ids=UNSEEN)
def test_a_state_with_values_whose_changes_are_not_all_seen_does_not_serve_again(change):
    owner = Owner()
    asked, not_asked = (PlainAttributes([("module", owner)]) for _ in range(2))
    owner.ordered, owner.pair, owner.by_name = OrderedDict(a=0.0), ([0.0], 1), defaultdict(int, x=1)
    owner.values, owner.items, owner.long = torch.ones(3), [1, torch.ones(2)], [0.0] * (MAX_ENTRIES + 1)
    assert asked.state_dict() is not asked.state_dict()
    change(owner)
    assert pack(asked.state_dict()) == pack(not_asked.state_dict())


def test_a_zero_of_the_other_sign_is_another_value():
    owner = Owner()
    owner.ordered, owner.pair = OrderedDict(a=0.0), ([0.0], 1)
    attributes = PlainAttributes([("module", owner)])
    attributes.keep()
    negate_zeros(owner)
    kept = attributes.keep()
    owner.ordered["a"] = owner.pair[0][0] = 5.0
    attributes.put_back(kept)
    assert repr((owner.ordered["a"], owner.pair)) == "(-0.0, ([-0.0], 1))"


def test_objects_and_large_values_are_undone_and_not_sent(caplog):
    owner = Owner()
    attributes = PlainAttributes([("module x", owner)])
    kept, first = attributes.keep(), owner.objects[0]
    owner.objects.append(object())
    owner.function, owner.count = max, 5
    with caplog.at_level(logging.WARNING):
        assert attributes.state_dict() == attributes.state_dict() == {"module x": None}
    assert len(caplog.records) == 1
    assert "module x" in caplog.text
    assert "function of module x (builtin_function_or_method), objects of module x (list)" in caplog.text
    other = Owner()
    other.count = 7
    others = PlainAttributes([("module x", other)])
    others.load_state_dict({"module x": None})
    assert other.count == 7
    attributes.put_back(kept)
    assert (owner.objects, owner.function, owner.count) == ([first], len, 0)


def test_results_of_a_step_are_sent_without_their_graph(caplog):
    owner, other = Owner(), Owner()
    attributes, others = (PlainAttributes([("module", each)]) for each in (owner, other))
    owner.loss = (torch.ones(2, requires_grad=True) * 2).sum()
    owner.items.append(owner.loss)
    others.load_state_dict(unpack(pack(attributes.state_dict())))
    assert (float(other.loss), other.loss.requires_grad, float(other.items[-1])) == (4.0, False, 4.0)
    assert not caplog.records


class Held:
    """Values that libraries and programs keep in attributes, and that no copy or comparison may stumble over."""

    def __init__(self):
        self.arrays, self.cyclic = {"a": [np.zeros(2)]}, {}
        self.cyclic["self"] = self.cyclic
        self.meta, self.big_endian = torch.empty(2, device="meta"), np.zeros(2, ">f8")
        self.long, self.view, self.frozen = np.zeros(2, np.longdouble), torch.zeros(1).expand(3), frozenset({1})
        self.nested = {"loss": deque([1.0], maxlen=2), "by": defaultdict(list, a=[1])}
        self.order, self.parts = OrderedDict(a=1, b=2), {"a": torch.zeros(800), "b": torch.zeros(800)}
        self.history, self.scalar, self.complex = list(range(MAX_ENTRIES + 5)), np.float64(1.5), 1j
        with torch.inference_mode():
            self.inferred = torch.zeros(2)


def test_odd_values_are_undone_where_they_can_be_and_named_where_they_cannot_be_sent(caplog):
    held = Held()
    attributes = PlainAttributes([("it", held)])
    kept, inner, by = attributes.keep(), held.nested["loss"], held.nested["by"]
    assert attributes.state_dict() == {}
    held.arrays["a"][0] += 1
    held.cyclic["x"] = 1
    held.nested["loss"].extend([2.0, 3.0])
    held.nested["by"]["b"].append(1)
    held.order.move_to_end("a")
    held.parts["a"].add_(1)
    held.history.append(7)
    held.frozen, held.scalar, held.complex, held.long = frozenset({2}), np.float64(2.5), 2j, held.long + 1
    assert attributes.state_dict() == {"it": None}
    assert all(f"{name} of it" in caplog.text for name in ("cyclic", "long"))
    assert not any(f"{name} of it" in caplog.text for name in ("parts", "history", "frozen", "scalar", "complex"))
    attributes.put_back(kept)
    assert held.arrays["a"][0].tolist() == [0, 0]
    assert [*held.cyclic] == ["self"]
    assert held.nested == {"loss": deque([1.0]), "by": {"a": [1]}}
    assert (held.nested["loss"], held.nested["by"]) == (inner, by)
    assert (inner.maxlen, by.default_factory, [*held.order]) == (2, list, ["a", "b"])
    assert float(held.parts["a"].sum()) == 0
    assert held.history == list(range(MAX_ENTRIES + 5))
    assert (held.frozen, held.scalar, held.complex) == (frozenset({1}), 1.5, 1j)


def test_types_deletions_and_other_shapes_reach_another_process():
    owner, other = Owner(), Owner()
    attributes, others = (PlainAttributes([("module", each)]) for each in (owner, other))
    owner.nothing, owner.count = deque([1], maxlen=3), defaultdict(int, x=2)
    owner.array, owner.values = np.array(1.5), torch.tensor([0.5, 0.7, 0.9], dtype=torch.float64)
    del owner.rate
    owner.replaced = 1
    others.load_state_dict(unpack(pack(attributes.state_dict())))
    assert (other.nothing, other.nothing.maxlen) == (deque([1]), 3)
    assert (type(other.count), other.count.default_factory, other.count) == (defaultdict, int, {"x": 2})
    assert (type(other.array), other.array.shape, float(other.array)) == (np.ndarray, (), 1.5)
    assert other.values.tolist() == [0.5, 0.7, 0.9]
    assert not hasattr(other, "rate")
    assert other.replaced == 1
    assert not others.written(attributes.state_dict())


class Aliases(nn.Module):
    """One list is in a dictionary and an attribute of its own; another is in two attributes until it is replaced."""

    def __init__(self):
        super().__init__()
        self.losses = []
        self.history = {"losses": self.losses, "rows": [[], self.losses]}
        self.one = self.other = self.third = [0]


def test_an_object_that_is_reached_in_two_ways_is_still_one_in_another_process():
    owner, other = Aliases(), Aliases()
    attributes, others = (PlainAttributes([("module", each)]) for each in (owner, other))
    for value in range(2):
        owner.losses.append(value)
        owner.other, owner.third = [value], [0]
        others.load_state_dict(unpack(pack(attributes.state_dict())))
        assert other.history["losses"] is other.history["rows"][1] is other.losses
        assert other.losses == owner.losses
        assert [other.one, other.other, other.third] == [[0], [value], [0]]
    owner.one[0], owner.history["losses"] = 5, [7]
    others.load_state_dict(unpack(pack(attributes.state_dict())))
    assert (other.history, other.losses) == ({"losses": [7], "rows": [[], [0, 1]]}, [0, 1])
    assert [other.one, other.other, other.third] == [[5], [1], [0]]
    others.load_state_dict({})
    assert (other.history, other.losses) == ({"losses": [], "rows": [[], []]}, [])
    assert [other.one, other.other, other.third] == [[0], [0], [0]]


def test_a_module_that_takes_the_place_of_an_attribute_is_not_hidden():
    owner = Owner()
    attributes = PlainAttributes([("module", owner)])
    owner.nothing = nn.Linear(2, 2)
    attributes.load_state_dict({})
    attributes.load_state_dict({"module": {"nothing": 3, "forward": 1, 5: 6, "buffer": 1}})
    assert isinstance(owner.nothing, nn.Linear)
    assert callable(owner.forward)


def test_what_both_set_ups_have_written_differently_stays():
    source, joiner = Owner(), Owner()
    of_source, of_joiner = (PlainAttributes([("module", each)]) for each in (source, joiner))
    for rank, (owner, attributes) in enumerate(((source, of_source), (joiner, of_joiner))):
        owner.my_rank, owner.count = rank, 0
        attributes.mark_own()
    source.count, source.late = 57, [1]
    of_joiner.take_from_replica(unpack(pack(of_source.for_joiner())))
    assert (joiner.my_rank, joiner.count, joiner.late) == (1, 57, [1])


def test_what_each_set_up_makes_for_itself_is_neither_sent_nor_reset(caplog):
    source, joiner = Owner(), Owner()
    of_source, of_joiner = (PlainAttributes([("module", each)]) for each in (source, joiner))
    for owner, attributes in ((source, of_source), (joiner, of_joiner)):
        owner.nothing = owner.bar = object()  # as of on_train_start
        attributes.mark_own()
    source.count = 3
    made = joiner.bar
    of_joiner.take_from_replica(unpack(pack(of_source.for_joiner())))
    of_joiner.load_state_dict(unpack(pack(of_source.state_dict())))
    assert (joiner.count, joiner.bar, joiner.nothing) == (3, made, made)
    assert not caplog.records
    source.bar = object()
    assert of_source.state_dict() == {"module": None}
    assert "bar of module (object)" in caplog.text


def test_objects_that_are_replaced_begin_anew_and_others_keep_their_first_values():
    one, two, three = Owner(), Owner(), Owner()
    former = PlainAttributes([("a", one), ("b", two)])
    one.count = two.count = 4
    three.count = 9
    attributes = PlainAttributes([("a", one), ("b", three)], former=former)
    assert former.is_of([("a", one), ("b", two)])
    assert not former.is_of([("a", one), ("b", three)])
    assert attributes.state_dict() == {"a": {"count": 4}}


def test_only_what_the_program_defines_is_looked_at():
    model = nn.Sequential(nn.Linear(2, 2), Owner())
    assert [name for name, _ in modules_of_program(model)] == ["module 1"]
    assert not is_of_program(nn.Linear)
    assert is_of_program(Owner)
    assert PlainAttributes(modules_of_program(nn.Linear(2, 2))).is_empty


def test_what_fully_shard_keeps_in_a_module_is_left_alone():
    it = Owner()
    checkpoint_function(it)  # keeps its state of a module in an attribute, as `fully_shard` does
    key = next(each for each in vars(it) if "composable" in each)
    attributes = PlainAttributes([("it", it)])
    kept, state = attributes.keep(), vars(it)[key]
    vars(it)[key] = OrderedDict(state, other=1)
    assert not attributes.state_dict()
    attributes.put_back(kept)
    attributes.load_state_dict({"it": {key: 3}})
    assert "other" in vars(it)[key]


def test_what_a_peer_sends_changes_no_attribute_of_a_library():
    owner = Owner()
    attributes = PlainAttributes([("module", owner)], ignored=["rate"])
    attributes.load_state_dict(
        {
            "module": {"_parameters": {}, "training": 0, "rate": 9.0, "count": 2, "forward": 1, "dump_patches": 1},
            "other": {"x": 1},
        }
    )
    assert not {"forward", "dump_patches"} & {*vars(owner)}
    assert (owner.training, owner.rate, owner.count) == (True, 0.5, 2)
    assert "buffer" in dict(owner.named_buffers())


FIT = """
    kill:3:step1:0 kill:0:after3:0 kill:1:save4:0 kill:2:val_batch1:0 kill:1:epoch_end:0
    kill:0:batch2:1 kill:3:save10:1 kill:1:val_end:1 kill:2:epoch_start:2 kill:3:after3:2
"""


@pytest.mark.spawns
def test_attributes_of_modules_and_callbacks_survive_losses_everywhere(tmp_path):
    undisturbed, _ = results("program_attributes.py", tmp_path / "undisturbed", "fit")
    disturbed, text = results("program_attributes.py", tmp_path / "disturbed", " ".join(["fit", *FIT.split()]))
    assert len(list((tmp_path / "disturbed").glob("done-*"))) == len(FIT.split())
    assert text.count(" 0 steps lost") == len(FIT.split()), text[-8000:]
    assert disturbed == undisturbed
    # A third one is lost on the way back to a snapshot, so that its replacement begins with what another rank has.
    faults = "kill:0:step3:0 kill:2:step3:0 kill:1:entry2:0"
    disturbed, text = results("program_attributes.py", tmp_path / "returned", f"fit {faults}")
    assert len(list((tmp_path / "returned").glob("done-*"))) == 3
    assert "all ranks return to the snapshot" in text
    assert disturbed == undisturbed


@pytest.mark.spawns
def test_what_hooks_write_between_micro_steps_is_there_when_a_step_is_run_again(tmp_path):
    faults = "kill:3:step3:0 kill:0:after5:0 kill:2:step1:1"
    undisturbed, _ = results("program_attributes.py", tmp_path / "undisturbed", "fit accumulates")
    disturbed, text = results("program_attributes.py", tmp_path / "disturbed", f"fit accumulates {faults}")
    assert text.count(" 0 steps lost") == 3, text[-8000:]
    assert disturbed == undisturbed


@pytest.mark.spawns
def test_attributes_of_a_model_survive_losses_in_a_loop(tmp_path):
    faults = "kill:1:step2:0 kill:2:step5:0 raise:0:step6:0"
    undisturbed, _ = results("program_attributes.py", tmp_path / "undisturbed", "loop")
    disturbed, text = results("program_attributes.py", tmp_path / "disturbed", f"loop {faults}")
    assert text.count(" 0 steps lost") == 3, text[-8000:]
    assert disturbed == undisturbed


@pytest.mark.spawns
def test_a_hook_that_is_interrupted_in_a_collective_after_its_step_is_not_left_half_done(tmp_path):
    undisturbed, _ = results("program_attributes.py", tmp_path / "undisturbed", "fit communicates")
    disturbed, text = results("program_attributes.py", tmp_path / "disturbed", "fit communicates kill:1:hook3:1")
    assert "Plain.on_train_batch_end was interrupted in a collective" in text
    assert disturbed == undisturbed


@pytest.mark.spawns
def test_a_batch_that_follows_what_its_rank_alone_has_is_not_trained_on_by_a_replacement(tmp_path):
    undisturbed, _ = results("program_attributes.py", tmp_path / "undisturbed", "fit own")
    disturbed, text = results("program_attributes.py", tmp_path / "disturbed", "fit own kill:1:step2:1")
    assert "on_before_batch_transfer has changed the first batch of a replacement by module.last" in text
    assert disturbed == undisturbed


class Average:
    """An average of a model: in some programs as tensors, in others as a module."""

    def __init__(self, model):
        self.shadow = {name: each.detach().clone() for name, each in model.named_parameters()}
        self.copy = copy.deepcopy(model)

    def update(self, model):
        with torch.no_grad():
            for name, each in model.named_parameters():
                self.shadow[name] = self.shadow[name] * 0.9 + each * 0.1
            for own, each in zip(self.copy.parameters(), model.parameters(), strict=True):
                own.lerp_(each, 0.1)


@dataclasses.dataclass(slots=True)
class Record:
    phase: "Phase"
    values: list
    parent: "Record | None" = None


class Phase(enum.Enum):
    FIRST, SECOND = "first", "second"


class Holder(nn.Module):
    """Holds objects in all the ways in which programs do."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(2, 2)
        nn.init.ones_(self.net.weight)
        nn.init.ones_(self.net.bias)
        self.meter, self.average = Meter(), Average(self.net)
        nn.init.constant_(self.net.weight, 3.0)
        self.meters, self.same = {"a": Meter(), "b": [Meter()]}, self.meter
        self.generator, self.numbers = torch.Generator().manual_seed(5), np.random.default_rng(3)
        self.chance, self.old = random.Random(7), np.random.RandomState(9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
        self.record = Record(Phase.FIRST, [1])
        self.record.parent = self.record  # a cycle
        self.namespace, self.queue = types.SimpleNamespace(rate=0.5), torch.zeros(64, 32)
        self.losses, self.window = [0.5] * (MAX_ENTRIES + 3), deque([0.5] * 2000, maxlen=2000)
        self.table = np.zeros((64, 32))
        self.late = None
        self.optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])

    def values(self):
        """What the next step would compute with; draws from the generators."""
        average = [*self.average.shadow.values(), *self.average.copy.parameters()]
        meters = [self.meter, self.meters["a"], self.meters["b"][0], self.same]
        return [
            [(each.n, each.mean) for each in meters],
            [each.detach().clone() for each in average],
            torch.rand(2, generator=self.generator),
            *(self.numbers.random(), self.chance.random(), self.chance.gauss(0, 1), self.old.random_sample()),
            float(self.scaler.scale(torch.ones(()))),
            *(self.record.phase.value, self.record.values, self.record.parent is self.record),
            *(self.namespace.rate, self.queue.clone(), self.losses, [*self.window], self.table.tolist()),
            None if self.late is None else (self.late.n, self.late.mean, self.late is self.meters.get("late")),
            self.same is self.meter,
        ]


def scaled_step(it):
    it.optimizer.param_groups[0]["params"][0].grad = it.scaler.scale(torch.ones(1))
    it.scaler.unscale_(it.optimizer)  # an interrupted step leaves this in the scaler


HELD = {
    "an object": lambda it: it.meter.update(2.0),
    "an object in a container": lambda it: it.meters["b"][0].update(3.0),
    "tensors in an object": lambda it: it.average.update(it.net),
    "a generator": lambda it: torch.rand(3, generator=it.generator),
    "a generator of numpy": lambda it: it.numbers.random(3),
    "an old generator of numpy": lambda it: it.old.normal(size=1),
    "a generator of python": lambda it: it.chance.gauss(0, 1),
    "a scaler": lambda it: (it.scaler.scale(torch.ones(())), it.scaler.update(9.0)),
    "an object with slots": lambda it: it.record.values.append(2),
    "an enum": lambda it: setattr(it.record, "phase", Phase.SECOND),
    "a namespace": lambda it: setattr(it.namespace, "rate", 0.25),
    "a large tensor that is replaced": lambda it: setattr(it, "queue", torch.cat([it.queue[1:], torch.ones(1, 32)])),
    "a large tensor in place": lambda it: it.queue[3].add_(1),
    "a large array in place": lambda it: it.table.__iadd__(1),
    "a long list": lambda it: it.losses.append(0.25),
    "an object that is made late": lambda it: (setattr(it, "late", Meter()), it.late.update(4.0)),
    "an object in two places": lambda it: (setattr(it, "late", Meter()), it.meters.update(late=it.late)),
    "an object that replaces one": lambda it: (it.meter.update(1.0), setattr(it, "meter", Meter()), it.meter.update(5)),
    "another one in a container": lambda it: (it.meters["b"].insert(0, Meter()), it.meters["b"][0].update(8.0)),
    "an object that is taken out": lambda it: it.meters.update(a=it.meters["b"][0]),
    "one object in the place of two": lambda it: setattr(it, "same", it.meters["a"]),
    "a new generator": lambda it: setattr(it, "generator", torch.Generator().manual_seed(8)),
}


def equal(one, values):
    return are_same(one.values(), values)


def both(change):
    """An object that has changed, with its attributes; and a new one."""
    owner, other = Holder(), Holder()
    attributes, others = (PlainAttributes([("module", each)], model=each) for each in (owner, other))
    return owner, attributes, other, others


@pytest.mark.parametrize("change", HELD.values(), ids=HELD)
def test_what_held_objects_have_is_undone_and_reaches_another_process(change, caplog):
    owner, attributes, other, others = both(change)
    assert attributes.state_dict() == {}
    first, expected = attributes.keep(), Holder()
    for _ in range(2):
        change(owner)
        state = attributes.state_dict()
        assert attributes.written({})
        assert not attributes.written(state)
        assert attributes.can_put_back(first)
        attributes.put_back(first)
        assert not attributes.written({}) or change is HELD["a large tensor in place"]  # not compared in each step
        kept = attributes.keep()
        assert equal(owner, Holder().values())
        attributes.put_back(kept)  # reading the values has drawn random numbers
    others.load_state_dict(unpack(pack(state)))
    change(owner)
    change(expected)
    for _ in range(2):  # and both go on in the same way
        values = expected.values()
        assert equal(owner, values)
        assert equal(other, values)
        for each in (owner, other, expected):
            change(each)
    attributes.check()
    assert not caplog.records
    others.load_state_dict({})
    assert equal(other, Holder().values())


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self):
        self.a = 1


@pytest.mark.parametrize("is_full", [True, False])
def test_slots_that_get_and_lose_their_values_are_undone_and_sent(is_full):
    owners = [types.SimpleNamespace(it=Slotted()) for _ in range(2)]
    for each in owners if is_full else ():
        each.it.b = 2
    one, other = (PlainAttributes([("owner", each)]) for each in owners)
    it, kept = owners[0].it, one.keep()
    assert one.state_dict() == {}
    it.b = 3
    assert one.state_dict() == {"owner.it": {"b": 3}}
    del it.a
    assert one.state_dict() == {"owner.it": {"a": ("deleted",), "b": 3}}
    it.a = 3
    assert one.state_dict() == {"owner.it": {"a": 3, "b": 3}}
    other.load_state_dict(unpack(pack(one.state_dict())))
    assert (owners[1].it.a, owners[1].it.b) == (3, 3)
    one.put_back(kept)
    assert it.a == 1
    assert getattr(it, "b", None) == (2 if is_full else None)
    assert one.state_dict() == {}


def test_what_cannot_be_sent_is_refused_by_name_once_it_changes():
    owner = Owner()
    attributes = PlainAttributes([("module", owner)])
    attributes.state_dict()
    attributes.check()
    owner.function = max
    attributes.state_dict()
    with pytest.raises(ConfigError, match=r"function of module \(builtin_function_or_method\).*register_buffer"):
        attributes.check()
    owner.function = len
    owner.objects = torch.utils.data.Subset([1, 2], [0])  # data, which a replacement makes again
    attributes.state_dict()
    attributes.check()


class WithState:
    """Holds what cannot be sent, and says itself what its state is."""

    def __init__(self):
        self.made, self.n, self.others = object(), 0, 0

    def state_dict(self):
        return {"n": self.n}

    def load_state_dict(self, state):
        self.n, self.made = state["n"], object()


def test_a_state_dict_stands_for_attributes_that_cannot_be_sent():
    owner, other = Owner(), Owner()
    owner.held, other.held = WithState(), WithState()
    attributes, others = (PlainAttributes([("module", each)]) for each in (owner, other))
    owner.held.made, owner.held.n, owner.held.others = object(), 3, 4
    others.load_state_dict(unpack(pack(attributes.state_dict())))
    attributes.check()
    assert (other.held.n, other.held.others) == (3, 4)
    kept, made = attributes.keep(), owner.held.made
    owner.held.made, owner.held.n = object(), 9
    attributes.put_back(kept)
    assert (owner.held.n, owner.held.made) == (3, made)


def test_a_large_tensor_that_is_first_written_late_cannot_be_undone_once_and_can_from_then_on():
    owner = Owner()
    owner.large = torch.zeros(2**15 + 1)
    attributes = PlainAttributes([("module", owner)])
    for _ in range(40):
        kept = attributes.keep()
    owner.large += 1
    assert not attributes.can_put_back(kept)
    for value in (1.0, 2.0):
        kept = attributes.keep()
        owner.large += 1
        assert attributes.can_put_back(kept)
        attributes.put_back(kept)
        assert owner.large.tolist() == [value] * (2**15 + 1)
        owner.large += 1


class Elsewhere(nn.Module):
    """Holds what other parts restore, and what belongs to libraries."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(2, 2)
        self.parent, self.optimizer = [self.net], torch.optim.SGD(self.net.parameters(), 0.1)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer)
        self.data = torch.utils.data.TensorDataset(torch.zeros(4))
        self.log, self.lock, self.meter = logging.getLogger("x"), threading.Lock(), Meter()


def test_what_is_restored_elsewhere_or_belongs_to_a_library_is_not_followed():
    owner = Elsewhere()
    attributes = PlainAttributes([("module", owner)], model=owner)
    followed = {id(each.value) for each in attributes.held.values()}
    assert id(owner.meter) in followed
    held = (owner.net, owner.optimizer, owner.schedule, owner.data, owner.log, owner.lock)
    assert not any(id(each) in followed for each in held)
    attributes.leave_out(owner.meter)  # registered by the program
    owner.meter.update(1.0)
    assert attributes.state_dict() == {}


def test_what_a_peer_sends_makes_no_object_of_a_library_and_sets_no_method():
    owner = Owner()
    attributes = PlainAttributes([("module", owner)])
    for name in ("subprocess:Popen", "torch.nn.modules.linear:Linear", "os:system", "nowhere:X"):
        with pytest.raises(CheckpointMismatch, match="which is not here"):
            attributes.load_state_dict({"module": {"late": ("object", "module.late", name)}})
    given = {"module": {"late": ("object", "x", _NAME)}, "x": {"__class__": _NAME, "n": 2, "update": 3, "__dict__": 4}}
    attributes.load_state_dict(given)
    assert vars(owner.late) == {"n": 2}


_NAME = f"{Meter.__module__}:{Meter.__qualname__}"


def test_a_rehearsal_sees_what_objects_hold_that_are_not_restored():
    owner = Holder()
    attributes = PlainAttributes([("module", owner)], model=owner, follows=False)
    kept, before = attributes.keep(), object_digests(owner)
    inside = [*HELD][: [*HELD].index("a namespace") + 1]  # the others change what the module itself has
    for name in inside:
        HELD[name](owner)
        attributes.put_back(kept)
        after = object_digests(owner)
        assert after != before, name
        before = after


def test_a_scaler_that_a_replacement_would_not_get_is_refused_by_name():
    known, unknown = (torch.amp.GradScaler("cpu") for _ in range(2))
    off, watch = torch.amp.GradScaler("cpu", enabled=False), ScalerWatch(lambda value: value is known)
    scale = torch.amp.GradScaler.scale
    watch.open()
    known.scale(torch.ones(()))
    off.scale(torch.ones(()))
    watch.check()
    assert unknown.scale(torch.ones(())) == 2.0**16
    with pytest.raises(ConfigError, match=r'session.register_rank_local\("scaler", scaler\)'):
        watch.check()
    watch.close()
    assert torch.amp.GradScaler.scale is scale


def test_a_scaler_that_is_registered_forgets_what_an_interrupted_step_has_done():
    holder = Holder()
    state = ProgramState("scaler", holder.scaler)
    holder.scaler.scale(torch.ones(()))
    kept, before = state.state_dict(), PlainAttributes([("module", holder)], model=holder).keep()
    for put_back in (
        lambda: state.load_state_dict(kept),
        lambda: PlainAttributes([("module", holder)], model=holder).put_back(before),
        lambda: None,
    ):
        scaled_step(holder)
        put_back()
    with pytest.raises(RuntimeError, match="already been called"):
        scaled_step(holder)


class Keys:
    """What an object keeps of parameters, and of itself."""

    __slots__ = ("__count", "steps", "wide")

    def __init__(self, model):
        self.__count, self.wide = 0, [each for each in model.parameters() if each.ndim > 1]
        self.steps = dict.fromkeys(model.parameters(), 0)

    def count(self):
        self.__count += 1
        return self.__count


class KeepsParameters(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
        self.listed, self.names = list(self.parameters()), {each: name for name, each in self.named_parameters()}
        self.first, self.random, self.thread = [self.layers[0].weight], random.SystemRandom(), threading.Thread()
        self.keys = Keys(self)


def test_parameters_of_the_model_that_attributes_refer_to_are_sent_by_name(caplog):
    model, other = KeepsParameters(), KeepsParameters()
    attributes, others = (PlainAttributes(modules_of_program(each), model=each) for each in (model, other))
    kept = attributes.keep()
    with torch.no_grad():
        for each in model.parameters():
            each.add_(1)
    assert attributes.state_dict() == {}  # the parameters themselves are restored in other ways
    model.keys.count()
    model.keys.steps[model.layers[1].weight] = 5
    model.first[0] = model.listed[2]
    model.listed.reverse()
    attributes.check()
    before = [each.clone() for each in other.parameters()]
    sent = attributes.state_dict()
    others.load_state_dict(unpack(pack(sent)))
    assert other.keys.count() == 2
    assert other.keys.steps[other.layers[1].weight] == 5
    assert other.first[0] is other.layers[1].weight
    assert other.listed[0] is other.layers[2].bias
    assert all(torch.equal(each, old) for each, old in zip(other.parameters(), before, strict=True))
    values = [each.clone() for each in model.parameters()]
    attributes.put_back(kept)
    assert model.keys.count() == 1
    assert model.keys.steps[model.layers[1].weight] == 0
    assert model.first[0] is model.layers[0].weight
    assert model.listed[0] is model.layers[0].weight
    assert all(torch.equal(each, old) for each, old in zip(model.parameters(), values, strict=True))
    model.names[nn.Parameter(torch.ones(1))] = "not of the model"
    attributes.state_dict()
    with pytest.raises(ConfigError, match="names of module"):
        attributes.check()


class Log:
    """A thread of the program writes to it."""

    def __init__(self):
        self.lines, self.counts, self.is_open = deque(maxlen=500), {}, True

    def write(self):
        number = 0
        while self.is_open:
            number += 1
            self.lines.append({"number": number})
            self.counts[number % 50] = [number]
            if number % 49 == 0:
                self.counts.clear()


def test_a_thread_may_write_to_what_attributes_hold():
    model = nn.Linear(2, 2)
    model.log = Log()
    attributes = PlainAttributes([("module", model)], model=model)
    thread = threading.Thread(target=model.log.write, daemon=True)
    thread.start()
    try:
        for _ in range(100):
            attributes.keep()
            attributes.state_dict()
    finally:
        model.log.is_open = False
        thread.join()


def test_tensors_that_are_trained_beside_the_model_stay_so():
    """An optimizer of the program holds them: the same leaf gets other values, or a new one needs gradients, too."""
    owner, other, lacking = Owner(), Owner(), Owner()
    attributes, others, lackings = (PlainAttributes([("module", each)]) for each in (owner, other, lacking))
    owner.scale = torch.full((1,), 3.0, requires_grad=True)
    other.scale = held = torch.zeros(1, requires_grad=True)
    sent = unpack(pack(attributes.state_dict()))
    others.load_state_dict(sent)
    lackings.load_state_dict(sent)
    assert other.scale is held
    for each in (held, lacking.scale):
        assert (each.item(), each.requires_grad, each.is_leaf) == (3.0, True, True)


def averages_from_another_process():
    """A list of averages that only the sending process has made, as a callback does in its first hook."""
    dist.init_process_group("hyperpod")
    config = ParallelConfig(hybrid_shard_degree=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    parallelize(model, build_mesh(config.topology(2), DEVICE), config)
    owner, other = Owner(), Owner()
    attributes, others = (PlainAttributes([("callback", each)], model=model) for each in (owner, other))
    owner.averages = [each.detach() * 2 for each in model.parameters()]
    others.load_state_dict(unpack(pack(attributes.state_dict())))
    assert [each.placements for each in other.averages] == [each.placements for each in owner.averages]
    return [
        torch.equal(*(each.full_tensor() for each in pair)) for pair in zip(owner.averages, other.averages, strict=True)
    ]


@pytest.mark.spawns
def test_a_list_of_averages_of_shards_reaches_a_process_that_has_none(run_ranks):
    assert run_ranks(averages_from_another_process, world_size=2) == [[True] * 4] * 2


class OfLibrary:
    """Of an installed library: a large tensor and a small one, which are followed by `state_dict`."""

    def __init__(self):
        self.large, self.count = torch.zeros(5 * MAX_ENTRIES), torch.zeros(1)

    def state_dict(self):
        return {"large": self.large.detach(), "count": self.count, "fresh": [self.large[:3].clone(), 1]}

    def load_state_dict(self, state):
        self.large.copy_(state["large"])
        self.count.copy_(state["count"])


OfLibrary.__module__ = "torch.averages"
AVERAGES = {
    "in place": lambda it: it.large.add_(1),
    "a part": lambda it: it.large[7:9].fill_(2),
    "hidden": lambda it: it.large.data[7:9].fill_(2),
    "another tensor": lambda it: vars(it).update(large=it.large + 1),
    "a small one": lambda it: it.count.data.add_(1),
}


@pytest.mark.parametrize("name", AVERAGES)
def test_the_state_of_an_object_of_a_library_is_copied_again_when_it_changes(name):
    owner = Owner()
    owner.average = OfLibrary()
    attributes = PlainAttributes([("module", owner)])
    (first,), (second,) = (attributes.keep().states.values() for _ in range(2))
    assert second is first
    assert first["large"].data_ptr() != owner.average.large.data_ptr()
    wanted, sent = copy.deepcopy(first), attributes.state_dict()
    for _ in range(3):
        kept = attributes.keep()
        AVERAGES[name](owner.average)
        assert attributes.state_dict() != sent
        (changed,) = attributes.keep().states.values()
        assert are_same(changed, owner.average.state_dict())
        assert not are_same(changed, wanted)
        attributes.put_back(kept)
        assert are_same(owner.average.state_dict(), wanted)
        assert are_same(attributes.state_dict(), sent)


def test_an_object_of_a_library_with_a_large_state_is_named_once(caplog, monkeypatch):
    monkeypatch.setattr(held_objects, "_MANY_BYTES", 2**12)
    owner = Owner()
    owner.average = OfLibrary()
    with caplog.at_level(logging.WARNING):
        attributes = PlainAttributes([("module", owner)])
        attributes.keep()
    assert caplog.text.count("the state_dict() of module.average (OfLibrary) holds") == 1
