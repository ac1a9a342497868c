"""What a node does that wants a slot: tables, and a law."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperpod_plugins.elastic.rendezvous.slots import (
    Decision,
    JoinStep,
    LeaseState,
    LivenessTracker,
    RendezvousView,
    SlotLease,
    SlotPolicy,
    initial_nodes,
    next_step,
    policy_from,
    watched_peers,
)
from hyperpod_plugins.errors import ConfigError

POLICY = SlotPolicy(min_nodes=2, max_nodes=3, last_call_s=10.0)


def held(*nodes):
    return tuple(SlotLease(node=node) for node in nodes)


def vacant(leases, *slots):
    return tuple(lease.with_state(LeaseState.VACANT) if slot in slots else lease for slot, lease in enumerate(leases))


def done(leases, *slots):
    return tuple(lease.with_state(LeaseState.DONE) if slot in slots else lease for slot, lease in enumerate(leases))


@pytest.mark.parametrize(
    ("here", "called_s", "step"),
    [
        pytest.param("a", 0.0, JoinStep.WAIT, id="too few"),
        pytest.param("ab", 0.0, JoinStep.WAIT, id="enough, and more may come"),
        pytest.param("ab", 9.9, JoinStep.WAIT, id="last call"),
        pytest.param("ab", 10.0, JoinStep.PROPOSE, id="nobody else came"),
        pytest.param("abc", 0.0, JoinStep.PROPOSE, id="no more are wanted"),
        pytest.param("abcd", 0.0, JoinStep.PROPOSE, id="more than wanted"),
        pytest.param("a", 99.0, JoinStep.WAIT, id="there were enough, and one was lost"),
    ],
)
def test_the_beginning_of_a_round(here, called_s, step):
    view = RendezvousView(node="a", candidates=tuple(here), called_s=called_s)
    assert next_step(view, POLICY) == Decision(step)


@pytest.mark.parametrize(("here", "step"), [("a", JoinStep.WAIT), ("ab", JoinStep.PROPOSE)])
def test_a_round_of_those_that_were_in_the_last_one(here, step):
    view = RendezvousView(node="a", candidates=tuple(here), are_all_back=True)
    assert next_step(view, POLICY) == Decision(step)


@pytest.mark.parametrize(
    ("here", "called_s", "step"),
    [("ab", 39.9, JoinStep.WAIT), ("ab", 40.0, JoinStep.PROPOSE), ("abc", 0.0, JoinStep.PROPOSE)],
)
def test_a_round_waits_for_those_of_the_one_before_that_end_their_workers(here, called_s, step):
    view = RendezvousView(node="a", candidates=tuple(here), called_s=called_s, awaits_former=True)
    assert next_step(view, POLICY) == Decision(step)


ALL = held("a", "b", "c")


@pytest.mark.parametrize(
    ("node", "leases", "has_entered", "can_absorb", "decision"),
    [
        pytest.param("b", ALL, False, False, Decision(JoinStep.ENTER, 1), id="of the first round"),
        pytest.param("b", ALL, True, True, Decision(JoinStep.TAKE_OVER, 1), id="its workers were lost"),
        pytest.param(
            "b", ALL, True, False, Decision(JoinStep.NEW_ROUND, 1), id="its workers were lost, nobody recovers"
        ),
        pytest.param(
            "b", done(ALL, 0), True, True, Decision(JoinStep.REFUSE, 1), id="its workers were lost at the end"
        ),
        pytest.param("b", done(ALL, 0), True, False, Decision(JoinStep.REFUSE, 1), id="the same, nobody recovers"),
        pytest.param("d", ALL, False, True, Decision(JoinStep.WAIT), id="spare"),
        pytest.param("d", ALL, False, False, Decision(JoinStep.WAIT), id="spare, nobody recovers"),
        pytest.param("d", vacant(ALL, 1, 2), False, True, Decision(JoinStep.TAKE_OVER, 1), id="vacancies"),
        pytest.param(
            "d", vacant(ALL, 2), False, False, Decision(JoinStep.NEW_ROUND, 2), id="a vacancy, nobody recovers"
        ),
        pytest.param(
            "d", vacant(done(ALL, 0), 2), False, True, Decision(JoinStep.REFUSE, 2), id="a vacancy at the end"
        ),
        pytest.param("d", done(ALL, 0, 1, 2), False, True, Decision(JoinStep.WAIT), id="all is done"),
        pytest.param("d", held("a", "b"), False, True, Decision(JoinStep.WAIT), id="the job may grow, but not yet"),
        pytest.param(
            "d", held("a", "b"), False, False, Decision(JoinStep.NEW_ROUND, -1), id="all begin again with more"
        ),
        pytest.param("d", done(held("a", "b"), 0), False, False, Decision(JoinStep.WAIT), id="too late for that"),
        pytest.param("c", vacant(ALL, 2), True, True, Decision(JoinStep.TAKE_OVER, 2), id="it was taken for lost"),
        pytest.param("c", held("a", "b", "d"), True, True, Decision(JoinStep.WAIT), id="and replaced"),
    ],
)
def test_a_running_round(node, leases, has_entered, can_absorb, decision):
    view = RendezvousView(node=node, leases=leases, has_entered=has_entered, can_absorb=can_absorb)
    found = next_step(view, POLICY)
    assert found.step is decision.step
    assert found.slot == decision.slot or decision.step is JoinStep.NEW_ROUND


@pytest.mark.parametrize(
    ("leases", "can_absorb", "decision"),
    [
        pytest.param(held("a", "b"), True, Decision(JoinStep.ADD, 2), id="a new slot"),
        pytest.param(vacant(held("a", "b"), 1), True, Decision(JoinStep.TAKE_OVER, 1), id="a vacant one first"),
        pytest.param(ALL, True, Decision(JoinStep.WAIT), id="no more nodes are wanted"),
        pytest.param(held("a", "b"), False, Decision(JoinStep.NEW_ROUND), id="not yet, or no more"),
        pytest.param(done(held("a", "b"), 0), True, Decision(JoinStep.WAIT), id="at the end"),
    ],
)
def test_a_round_that_grows(leases, can_absorb, decision):
    assert next_step(RendezvousView(node="d", leases=leases, can_absorb=can_absorb, can_grow=True), POLICY) == decision


@pytest.mark.parametrize(
    ("leases", "decision"),
    [
        pytest.param(held("a", "b"), Decision(JoinStep.WAIT), id="what has ended is not run again for one more"),
        pytest.param(
            vacant(ALL, 2), Decision(JoinStep.NEW_ROUND, 2), id="without the one that was lost nobody goes on"
        ),
    ],
)
def test_a_round_that_has_trained(leases, decision):
    for can_grow in (False, True):
        assert (
            next_step(RendezvousView(node="d", leases=leases, has_trained=True, can_grow=can_grow), POLICY) == decision
        )


@pytest.mark.parametrize("leases", [ALL, vacant(ALL, 1), done(ALL, 0), done(ALL, 1, 2)])
@pytest.mark.parametrize("node", ["a", "d"])
def test_all_begin_again_where_a_member_wants_it_those_that_are_done_too(leases, node):
    for has_entered in (False, True):
        view = RendezvousView(node=node, leases=leases, has_entered=has_entered, restart_requested=True)
        assert next_step(view, POLICY).step is JoinStep.NEW_ROUND


HOLDINGS = st.sampled_from(LeaseState)


@given(st.lists(st.tuples(st.sampled_from("abc"), HOLDINGS), min_size=1, max_size=3), st.booleans(), st.booleans())
def test_no_slot_is_taken_from_a_living_node(slots, has_entered, can_absorb):
    leases = tuple(SlotLease(node=node, state=holding) for node, holding in slots)
    decision = next_step(
        RendezvousView(node="a", leases=leases, has_entered=has_entered, can_absorb=can_absorb), POLICY
    )
    if decision.step in (JoinStep.ENTER, JoinStep.TAKE_OVER):
        lease = leases[decision.slot]
        assert lease.node == "a" or lease.state is LeaseState.VACANT
        assert lease.state is not LeaseState.DONE
        assert can_absorb or decision.step is JoinStep.ENTER


def test_claims_are_counted_and_written_down():
    first = SlotLease(node="a")
    second = first.with_state(LeaseState.VACANT).next("b")
    assert (second.node, second.number, second.state) == ("b", 1, LeaseState.HELD)
    for lease in (first, second, second.with_state(LeaseState.DONE)):
        assert SlotLease.from_json(lease.to_json()) == lease


def test_initial_nodes_are_those_who_came_first_in_the_order_of_their_hosts():
    came = ("n2/7/x", "n1/9/y", "n1/3/z", "n0/1/w")
    assert initial_nodes(came, POLICY) == ("n1/9/y", "n1/3/z", "n2/7/x")


@pytest.mark.parametrize(
    ("nodes", "node", "found"),
    [
        ("abcdef", "b", "cde"),
        ("abcdef", "e", "fab"),
        ("abc", "b", "ca"),
        ("ab", "b", "a"),
        ("a", "a", ""),
        ("abcd", "spare", "abc"),
        ("", "spare", ""),
    ],
)
def test_whom_a_node_listens_to(nodes, node, found):
    assert watched_peers(list(nodes), node) == list(found)


@given(st.integers(2, 12), st.data())
def test_every_lost_node_is_found_out_by_one_that_is_left(num_nodes, data):
    nodes = list(range(num_nodes))
    lost = data.draw(st.sets(st.sampled_from(nodes), max_size=num_nodes - 1))
    left = list(nodes)
    for _ in nodes:
        heard = {each for node in nodes if node not in lost for each in watched_peers(left, node)}
        left = [node for node in left if not (node in lost and node in heard)]
    assert set(left) == set(nodes) - lost


@pytest.mark.parametrize(
    ("heartbeats", "lost"),
    [
        ([1, 2, 3, 4], False),
        ([1, 1, 1], False),
        ([1, 1, 1, 1], True),
        ([1, 1, 1, 2, 2, 2], False),
        ([1, 1, 1, 1, 2], False),
        ([5, 90, 90, 90], False),
    ],
)
def test_silence_is_counted_in_looks(heartbeats, lost):
    tracker = LivenessTracker(max_missed=3)
    for count in heartbeats:
        tracker.update({"a": count})
    assert tracker.is_lost("a") is lost
    assert not tracker.is_lost("b")
    tracker.update({"b": 1})
    assert not tracker.is_lost("a")  # it does not matter any more


@pytest.mark.parametrize(
    "wrong", [{"min_nodes": 3}, {"min_nodes": 0}, {"heartbeat_s": 0}, {"last_call_s": -1}, {"max_missed_heartbeats": 0}]
)
def test_impossible_policies_are_refused(wrong):
    with pytest.raises(ConfigError, match=r"--nnodes|--rdzv-conf"):
        SlotPolicy(**{"min_nodes": 1, "max_nodes": 2, **wrong})


def test_options_of_the_command_line():
    policy = policy_from({"last_call_timeout": "5", "keep_alive_interval": 0.5, "is_host": "1"}, 1, 4)
    assert policy == SlotPolicy(min_nodes=1, max_nodes=4, last_call_s=5.0, heartbeat_s=0.5)
    with pytest.raises(ConfigError, match="--rdzv-conf"):
        policy_from({"join_timeout": "soon"}, 1, 1)
