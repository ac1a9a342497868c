"""The breaker: what each phase permits, and that a break happens once."""

import threading

import pytest

from hyperpod_plugins.comm.breaker import Breaker, Phase


def cut_nothing():
    pass


def broken(phase):
    breaker = Breaker()
    if phase is Phase.DETACHED:
        breaker.detach()
    breaker.trip("a test", cut_nothing)
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
    breaker = Breaker()
    if phase is Phase.DETACHED:
        breaker.detach()

    def check():
        if is_broken:
            breaker.trip("a test", cut_nothing)
        assert (breaker.phase, breaker.is_quiet, breaker.is_open) == (phase, is_quiet, is_open)

    if phase is Phase.TOLERANT:
        with breaker.tolerant():
            check()
        assert breaker.phase is Phase.STRICT
    else:
        check()


def test_a_break_outlasts_the_step():
    breaker = Breaker()
    with breaker.tolerant():
        breaker.trip("first", cut_nothing)
        breaker.trip("second", cut_nothing)
    assert breaker.cause == "first"
    assert not breaker.is_quiet
    breaker.close()
    assert breaker.cause is None
    assert not breaker.is_open


def test_an_exception_ends_the_tolerance():
    breaker = Breaker()
    with pytest.raises(ZeroDivisionError), breaker.tolerant():
        raise ZeroDivisionError
    assert breaker.phase is Phase.STRICT


def test_a_process_that_is_apart_stays_so_in_a_step():
    breaker = Breaker()
    breaker.detach()
    with breaker.tolerant():
        assert breaker.phase is Phase.DETACHED
    assert breaker.phase is Phase.DETACHED
    breaker.close()
    assert breaker.phase is Phase.STRICT


def test_parting_in_a_step_outlasts_it():
    breaker = broken(Phase.STRICT)
    with breaker.tolerant():
        breaker.part()
    assert breaker.phase is Phase.DETACHED
    assert breaker.is_quiet


def test_mending_in_a_step_ends_its_tolerance():
    breaker = Breaker()
    with breaker.tolerant():
        breaker.trip("a test", cut_nothing)
        breaker.close()
        assert breaker.phase is Phase.STRICT
        breaker.trip("another", cut_nothing)
        assert not breaker.is_quiet


def test_listeners_hear_of_each_break_once_and_after_the_cut():
    breaker, heard = Breaker(), []

    def listen(cause):
        heard.append(cause)

    breaker.when_broken(listen)
    assert breaker.trip("one", lambda: heard.append("cut"))
    assert not breaker.trip("two", lambda: heard.append("cut"))
    assert heard == ["cut", "one"]
    breaker.close()
    breaker.forget(listen)
    assert breaker.trip("three", cut_nothing)
    assert heard == ["cut", "one"]


def test_many_threads_break_it_once():
    breaker, heard, results = Breaker(), [], []
    breaker.when_broken(heard.append)
    barrier = threading.Barrier(16)

    def trip(number):
        barrier.wait(10)
        results.append(breaker.trip(str(number), cut_nothing))

    threads = [threading.Thread(target=trip, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sorted(results) == [False] * 15 + [True]
    assert heard == [breaker.cause]
