"""The fault kit: texts, schedules and the injector; pure, but for two stores."""

import random
from collections import Counter

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from hyperpod_plugins.env import JobEnv
from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.fault_injection.faults import (
    CAUSES,
    KINDS,
    PHASES,
    Fault,
    InjectedFault,
    Injector,
    draw_cause,
    parse_faults,
    random_faults,
)

any_fault = st.builds(
    Fault,
    kind=st.sampled_from(KINDS),
    rank=st.integers(0, 9999),
    step=st.integers(0, 10**9),
    phase=st.sampled_from(PHASES),
    incarnation=st.integers(-1, 9),
    repeat=st.booleans(),
    seconds=st.floats(0.001, 1e6),
)


@given(any_fault)
def test_a_fault_is_read_back_from_its_text(fault):
    assert Fault.parse(str(fault)) == fault


def test_several_faults_in_one_text():
    text = " kill:rank=3,step=7,phase=backward ;\n stop:rank=0, step=9, repeat=true;"
    assert parse_faults(text) == (
        Fault(kind="kill", rank=3, step=7, phase="backward"),
        Fault(kind="stop", rank=0, step=9, repeat=True),
    )
    assert parse_faults(" ; \n") == ()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("kil:rank=1,step=2", "'kil'"),
        ("kill:rank=1", "does not say step"),
        ("kill", "rank and step"),
        ("kill:rank=one,step=2", "rank='one'"),
        ("kill:rank=1,step=2,when=now", "'when=now'"),
        ("kill:rank=1,step=2,repeat", "'repeat'"),
        ("kill:rank=1,step=2,repeat=yes", "repeat='yes'"),
        ("kill:rank=-1,step=2", "rank=-1"),
        ("hang:rank=1,step=2,seconds=0", "seconds=0"),
    ],
)
def test_a_bad_text_is_explained(text, told):
    with pytest.raises(ConfigError) as raised:
        parse_faults(text)
    assert told in str(raised.value)


def test_a_schedule_depends_on_its_arguments_alone():
    arguments = {"steps": 400, "world_size": 8, "rate": 0.1}
    state = random.getstate()
    schedule = random_faults(5, **arguments)
    assert random.getstate() == state
    assert random_faults(5, **arguments) == schedule != random_faults(6, **arguments)
    assert 20 < len(schedule) < 60
    assert {fault.rank for fault in schedule} == set(range(8))
    assert len({fault.step for fault in schedule}) == len(schedule)


@pytest.mark.parametrize(("rate", "count"), [(0.0, 0), (1.0, 50)])
def test_the_rate_is_per_step(rate, count):
    assert len(random_faults(1, steps=50, world_size=2, rate=rate)) == count


@pytest.mark.parametrize("bad", [{"rate": 1.5}, {"rate": -0.1}, {"world_size": 0}, {"phases": ()}, {"kinds": ()}])
def test_an_impossible_schedule_is_refused(bad):
    with pytest.raises(ConfigError):
        random_faults(1, **({"steps": 9, "world_size": 2, "rate": 1.0} | bad))


def test_causes_come_in_their_mix():
    draw = random.Random(3)
    drawn = Counter(draw_cause(draw)[0].name for _ in range(20_000))
    total = sum(cause.count for cause in CAUSES)
    assert total == 419
    for cause in CAUSES:
        assert drawn[cause.name] / 20_000 == pytest.approx(cause.count / total, abs=0.015)


@given(st.integers(0, 999), st.sets(st.sampled_from(KINDS), min_size=1))
def test_only_allowed_kinds_are_drawn(seed, kinds):
    cause, kind = draw_cause(random.Random(seed), sorted(kinds))
    assert kind in kinds
    assert kind in cause.kinds


def happened(injector_of, calls):
    """Kinds of the faults that happen while a process says where it is."""
    seen = []
    injector = injector_of(lambda fault: seen.append(fault.kind))
    for phase, step in calls:
        injector.reach(phase, step)
    return seen


def test_a_fault_happens_once_at_its_place_to_its_rank():
    text = "stop:rank=1,step=2,phase=backward; kill:rank=0,step=2,phase=backward; hang:rank=1,step=3"
    calls = [("forward", 2), ("backward", 1), ("backward", 2), ("backward", 2), ("forward", 3)]
    assert happened(lambda act: Injector(text, rank=1, act=act), calls) == ["stop", "hang"]


def test_repeat_means_every_time():
    text = "stop:rank=0,step=2,repeat=true"
    assert happened(lambda act: Injector(text, rank=0, act=act), [("forward", 2)] * 3) == ["stop"] * 3


def test_an_exception_is_raised_where_it_is_due():
    injector = Injector("exception:rank=0,step=1", rank=0)
    injector.reach("forward", 0)
    with pytest.raises(InjectedFault, match="step=1"):
        injector.reach("forward", 1)
    injector.reach("forward", 1)


def test_a_replacement_does_not_repeat_what_the_lost_process_suffered():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    text = "kill:rank=1,step=2; exit:rank=1,step=2,incarnation=1; stop:rank=1,step=2,repeat=true; hang:rank=1,step=4"
    for incarnation, expected in ((0, ["kill", "stop"]), (1, ["exit", "stop", "hang"]), (2, ["stop"])):
        job = JobEnv(store_host="127.0.0.1", store_port=store.port, run_id="job", incarnation=incarnation)
        calls = [("forward", 2)] + [("forward", 4)] * (incarnation > 0)
        assert happened(lambda act, job=job: Injector(text, rank=1, job=job, act=act), calls) == expected
