"""Who belongs to the next generation, and how long others are waited for: tables, and a law."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperpod_plugins.elastic.membership.quorum_policy import (
    BETWEEN_CALLS,
    ExitWait,
    GenerationBudget,
    QuorumAction,
    QuorumPolicy,
    QuorumView,
    next_action,
)
from hyperpod_plugins.errors import ConfigError

POLICY = QuorumPolicy(replacement_timeout_s=10.0)


@pytest.mark.parametrize(
    ("expected", "arrived", "waited_s", "action"),
    [
        pytest.param({0: 0, 1: 0}, {0: 0, 1: 0}, 0.0, QuorumAction.FORM, id="all here"),
        pytest.param({0: 0, 1: 1}, {0: 0, 1: 1}, 99.0, QuorumAction.FORM, id="all here, late"),
        pytest.param({0: 0, 1: 1}, {0: 0}, 1.0, QuorumAction.WAIT, id="one on its way"),
        pytest.param({0: 0, 1: 1}, {0: 0, 1: 0}, 1.0, QuorumAction.WAIT, id="only its predecessor came"),
        pytest.param({0: 0, 1: 1}, {0: 0, 1: -1}, 1.0, QuorumAction.WAIT, id="came, and withdrew"),
        pytest.param({0: 0, 1: 1}, {0: 0}, 10.0, QuorumAction.WAIT, id="at the limit"),
        pytest.param({0: 0, 1: 1}, {0: 0, 1: 0}, 10.1, QuorumAction.GIVE_UP, id="too long"),
    ],
)
def test_next_action(expected, arrived, waited_s, action):
    assert next_action(QuorumView(expected=expected, arrived=arrived, waited_s=waited_s), POLICY) is action


INCARNATIONS = st.integers(0, 3)


@given(
    st.dictionaries(st.integers(0, 5), st.tuples(INCARNATIONS, st.none() | INCARNATIONS), min_size=1),
    st.floats(0, 20),
)
def test_a_generation_is_formed_of_exactly_the_present_processes(worker_ids, waited_s):
    expected = {rank: present for rank, (present, _) in worker_ids.items()}
    arrived = {rank: came for rank, (_, came) in worker_ids.items() if came is not None}
    view = QuorumView(expected=expected, arrived=arrived, waited_s=waited_s)
    assert (next_action(view, POLICY) is QuorumAction.FORM) == (arrived == expected)
    assert set(view.missing) == {rank for rank in expected if arrived.get(rank) != expected[rank]}


@pytest.mark.parametrize("timeout_s", [0.0, -1.0])
def test_a_wait_must_be_positive(timeout_s):
    with pytest.raises(ConfigError, match="replacement_timeout_s"):
        QuorumPolicy(replacement_timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("rounds", "is_refused"),
    [
        ([(7, 3, 0.0)], False),
        ([(7, 3, 0.0), (7, 22, 500.0)], False),  # 19 rounds
        ([(7, 3, 0.0), (7, 23, 500.0)], True),
        ([(7, 3, 0.0), (7, 99, 300.0)], False),  # the time that replacements have
        ([(7, 3, 0.0), (8, 22, 299.0), (8, 41, 999.0)], False),  # a step in between
        ([(7, 3, 0.0), (8, 22, 299.0), (7, 30, 400.0), (7, 50, 800.0)], True),  # it returned to a snapshot
    ],
)
def test_a_job_does_not_come_together_for_ever(rounds, is_refused):
    budget = GenerationBudget()
    assert [budget.why_not_another(*each, QuorumPolicy()) is not None for each in rounds][-1] == is_refused


def heartbeat(number, activity=BETWEEN_CALLS):
    return {8: {"sequence": number, "activity": activity}}


@pytest.mark.parametrize(
    ("looks", "over"),
    [
        pytest.param([({1}, lambda n: heartbeat(n))] * 4, [False, False, False, True], id="past-the-last-call"),
        pytest.param([({1}, lambda n: heartbeat(n, "computing step 7"))] * 9, [False] * 9, id="in-a-step"),
        pytest.param([({1}, lambda _: heartbeat(3, "computing step 7"))] * 4, [False, False, False, True], id="silent"),
        pytest.param([({1}, lambda _: {})] * 4, [False, False, False, True], id="nobody-in-its-places"),
        pytest.param([({1}, lambda _: None)] * 9, [False] * 9, id="a-program-that-tells-nothing"),
        pytest.param(
            [
                ({1, 2}, heartbeat),
                ({1, 2}, heartbeat),
                ({1}, heartbeat),
                ({1}, heartbeat),
                ({1}, heartbeat),
                ({1}, heartbeat),
            ],
            [False, False, False, False, False, True],
            id="another-finishes-meanwhile",
        ),
    ],
)
def test_the_wait_ends_when_nobody_gets_on(looks, over):
    wait = ExitWait(20.0, 0.0)
    assert [wait.is_over(left, said(number), 10.0 * number) for number, (left, said) in enumerate(looks)] == over
