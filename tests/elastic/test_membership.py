"""Who belongs to the next generation: a table, and a law."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperpod_plugins.elastic.membership import Action, MembershipPolicy, View, next_action
from hyperpod_plugins.errors import ConfigError

POLICY = MembershipPolicy(replacement_timeout_s=10.0)


@pytest.mark.parametrize(
    ("expected", "arrived", "waited_s", "action"),
    [
        pytest.param({0: 0, 1: 0}, {0: 0, 1: 0}, 0.0, Action.FORM, id="all here"),
        pytest.param({0: 0, 1: 1}, {0: 0, 1: 1}, 99.0, Action.FORM, id="all here, late"),
        pytest.param({0: 0, 1: 1}, {0: 0}, 1.0, Action.WAIT, id="one on its way"),
        pytest.param({0: 0, 1: 1}, {0: 0, 1: 0}, 1.0, Action.WAIT, id="only its predecessor came"),
        pytest.param({0: 0, 1: 1}, {0: 0, 1: -1}, 1.0, Action.WAIT, id="came, and withdrew"),
        pytest.param({0: 0, 1: 1}, {0: 0}, 10.0, Action.WAIT, id="at the limit"),
        pytest.param({0: 0, 1: 1}, {0: 0, 1: 0}, 10.1, Action.GIVE_UP, id="too long"),
    ],
)
def test_next_action(expected, arrived, waited_s, action):
    assert next_action(View(expected=expected, arrived=arrived, waited_s=waited_s), POLICY) is action


INCARNATIONS = st.integers(0, 3)


@given(
    st.dictionaries(st.integers(0, 5), st.tuples(INCARNATIONS, st.none() | INCARNATIONS), min_size=1),
    st.floats(0, 20),
)
def test_a_generation_is_formed_of_exactly_the_present_processes(places, waited_s):
    expected = {rank: present for rank, (present, _) in places.items()}
    arrived = {rank: came for rank, (_, came) in places.items() if came is not None}
    view = View(expected=expected, arrived=arrived, waited_s=waited_s)
    assert (next_action(view, POLICY) is Action.FORM) == (arrived == expected)
    assert set(view.missing) == {rank for rank in expected if arrived.get(rank) != expected[rank]}


@pytest.mark.parametrize("timeout_s", [0.0, -1.0])
def test_a_wait_must_be_positive(timeout_s):
    with pytest.raises(ConfigError, match="replacement_timeout_s"):
        MembershipPolicy(replacement_timeout_s=timeout_s)
