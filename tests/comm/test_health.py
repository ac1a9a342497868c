"""Health of the groups: what each phase permits, and that a break happens once."""

import threading

import pytest

from hyperpod_plugins.comm.health import GroupHealth, Phase
from hyperpod_plugins.errors import PeerLost


def shut_nothing_down():
    pass


def broken(phase):
    health = GroupHealth()
    if phase is Phase.DETACHED:
        health.detach()
    health.mark_broken("a test", shut_nothing_down)
    return health


@pytest.mark.parametrize(
    ("phase", "is_broken", "suppresses", "is_unavailable"),
    [
        (Phase.STRICT, False, False, False),
        (Phase.STRICT, True, False, True),
        (Phase.TOLERANT, False, False, False),
        (Phase.TOLERANT, True, True, True),
        (Phase.DETACHED, False, True, True),
        (Phase.DETACHED, True, True, True),
    ],
)
def test_phases(phase, is_broken, suppresses, is_unavailable):
    health = GroupHealth()
    if phase is Phase.DETACHED:
        health.detach()

    def check():
        if is_broken:
            health.mark_broken("a test", shut_nothing_down)
        assert (health.phase, health.suppresses_collectives, health.is_unavailable) == (
            phase,
            suppresses,
            is_unavailable,
        )

    if phase is Phase.TOLERANT:
        with health.tolerate_breaks():
            check()
        assert health.phase is Phase.STRICT
    else:
        check()


def test_a_break_outlasts_the_step():
    health = GroupHealth()
    with health.tolerate_breaks():
        health.mark_broken("first", shut_nothing_down)
        health.mark_broken("second", shut_nothing_down)
    assert health.cause == "first"
    assert not health.suppresses_collectives
    health.reset()
    assert health.cause is None
    assert not health.is_unavailable


def test_an_exception_ends_the_tolerance():
    health = GroupHealth()
    with pytest.raises(ZeroDivisionError), health.tolerate_breaks():
        raise ZeroDivisionError
    assert health.phase is Phase.STRICT


def test_a_process_that_is_apart_stays_so_in_a_step():
    health = GroupHealth()
    health.detach()
    with health.tolerate_breaks():
        assert health.phase is Phase.DETACHED
    assert health.phase is Phase.DETACHED
    health.reset()
    assert health.phase is Phase.STRICT


def test_parting_in_a_step_outlasts_it():
    health = broken(Phase.STRICT)
    with health.tolerate_breaks():
        health.detach()
    assert health.phase is Phase.DETACHED
    assert health.suppresses_collectives


def test_mending_in_a_step_ends_its_tolerance():
    health = GroupHealth()
    with health.tolerate_breaks():
        health.mark_broken("a test", shut_nothing_down)
        health.reset()
        assert health.phase is Phase.STRICT
        health.mark_broken("another", shut_nothing_down)
        assert not health.suppresses_collectives


def test_collectives_are_forbidden_in_a_block_and_then_as_before():
    health, asked = GroupHealth(), []
    health.forbid_collectives("outer", before=lambda: asked.append("outer"))
    with health.forbid("inner"):
        health.before_refusal()
        assert (health.refusal_reason, asked) == ("inner", [])
    health.before_refusal()
    assert (health.refusal_reason, asked) == ("outer", ["outer"])
    with pytest.raises(ZeroDivisionError), health.forbid("inner"):
        raise ZeroDivisionError
    assert health.refusal_reason == "outer"


def test_listeners_hear_of_each_break_once_and_after_the_cut():
    health, heard = GroupHealth(), []

    def listen(cause):
        heard.append(cause)

    health.add_listener(listen)
    assert health.mark_broken("one", lambda: heard.append("cut"))
    assert not health.mark_broken("two", lambda: heard.append("cut"))
    assert heard == ["cut", "one"]
    health.reset()
    health.remove_listener(listen)
    assert health.mark_broken("three", shut_nothing_down)
    assert heard == ["cut", "one"]


def test_many_threads_break_it_once():
    health, heard, results = GroupHealth(), [], []
    health.add_listener(heard.append)
    barrier = threading.Barrier(16)

    def break_once(number):
        barrier.wait(10)
        results.append(health.mark_broken(str(number), shut_nothing_down))

    threads = [threading.Thread(target=break_once, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sorted(results) == [False] * 15 + [True]
    assert heard == [health.cause]


@pytest.mark.parametrize("error", [None, RuntimeError("cannot allocate 94 TB")])
def test_what_the_host_reads_after_a_break_is_dropped(error):
    health = GroupHealth()

    def read():
        with health.checks_host_read():
            health.mark_broken("rank 1 is gone", shut_nothing_down)
            if error is not None:
                raise error

    with pytest.raises(PeerLost, match="rank 1 is gone") as caught:
        read()
    assert caught.value.__cause__ is error


def test_a_host_read_without_a_break_or_inside_a_step_is_left_alone():
    health = GroupHealth()
    with pytest.raises(ZeroDivisionError), health.checks_host_read():
        raise ZeroDivisionError
    with health.tolerate_breaks(), health.checks_host_read():
        health.mark_broken("a test", shut_nothing_down)
    with pytest.raises(KeyboardInterrupt), health.checks_host_read():
        raise KeyboardInterrupt
