"""The breaker: what each phase permits, and that a break happens once."""

import threading

import pytest

from hyperpod_plugins.comm.health import GroupHealth, Phase


def cut_nothing():
    pass


def broken(phase):
    breaker = GroupHealth()
    if phase is Phase.DETACHED:
        breaker.detach()
    breaker.mark_broken("a test", cut_nothing)
    return breaker


@pytest.mark.parametrize(
    ("phase", "is_broken", "is_quiet", "is_open"),
    [
        (Phase.STRICT, False, False, False),
        (Phase.STRICT, True, False, True),
        (Phase.TOLERANT, False, False, False),
        (Phase.TOLERANT, True, True, True),
        (Phase.DETACHED, False, True, True),
        (Phase.DETACHED, True, True, True),
    ],
)
def test_phases(phase, is_broken, is_quiet, is_open):
    breaker = GroupHealth()
    if phase is Phase.DETACHED:
        breaker.detach()

    def check():
        if is_broken:
            breaker.mark_broken("a test", cut_nothing)
        assert (breaker.phase, breaker.suppresses_collectives, breaker.is_unavailable) == (phase, is_quiet, is_open)

    if phase is Phase.TOLERANT:
        with breaker.tolerate_breaks():
            check()
        assert breaker.phase is Phase.STRICT
    else:
        check()


def test_a_break_outlasts_the_step():
    breaker = GroupHealth()
    with breaker.tolerate_breaks():
        breaker.mark_broken("first", cut_nothing)
        breaker.mark_broken("second", cut_nothing)
    assert breaker.cause == "first"
    assert not breaker.suppresses_collectives
    breaker.reset()
    assert breaker.cause is None
    assert not breaker.is_unavailable


def test_an_exception_ends_the_tolerance():
    breaker = GroupHealth()
    with pytest.raises(ZeroDivisionError), breaker.tolerate_breaks():
        raise ZeroDivisionError
    assert breaker.phase is Phase.STRICT


def test_a_process_that_is_apart_stays_so_in_a_step():
    breaker = GroupHealth()
    breaker.detach()
    with breaker.tolerate_breaks():
        assert breaker.phase is Phase.DETACHED
    assert breaker.phase is Phase.DETACHED
    breaker.reset()
    assert breaker.phase is Phase.STRICT


def test_parting_in_a_step_outlasts_it():
    breaker = broken(Phase.STRICT)
    with breaker.tolerate_breaks():
        breaker.leave_others()
    assert breaker.phase is Phase.DETACHED
    assert breaker.suppresses_collectives


def test_mending_in_a_step_ends_its_tolerance():
    breaker = GroupHealth()
    with breaker.tolerate_breaks():
        breaker.mark_broken("a test", cut_nothing)
        breaker.reset()
        assert breaker.phase is Phase.STRICT
        breaker.mark_broken("another", cut_nothing)
        assert not breaker.suppresses_collectives


def test_listeners_hear_of_each_break_once_and_after_the_cut():
    breaker, heard = GroupHealth(), []

    def listen(cause):
        heard.append(cause)

    breaker.add_listener(listen)
    assert breaker.mark_broken("one", lambda: heard.append("cut"))
    assert not breaker.mark_broken("two", lambda: heard.append("cut"))
    assert heard == ["cut", "one"]
    breaker.reset()
    breaker.remove_listener(listen)
    assert breaker.mark_broken("three", cut_nothing)
    assert heard == ["cut", "one"]


def test_many_threads_break_it_once():
    breaker, heard, results = GroupHealth(), [], []
    breaker.add_listener(heard.append)
    barrier = threading.Barrier(16)

    def trip(number):
        barrier.wait(10)
        results.append(breaker.mark_broken(str(number), cut_nothing))

    threads = [threading.Thread(target=trip, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sorted(results) == [False] * 15 + [True]
    assert heard == [breaker.cause]
