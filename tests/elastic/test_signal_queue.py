"""What the agent does with the signals that it gets."""

import os
import signal

import pytest
from torch.distributed.elastic.multiprocessing import SignalException

from hyperpod_plugins.elastic.launcher.signal_queue import SignalQueue


@pytest.fixture
def inbox():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)}
    inbox = SignalQueue((signal.SIGTERM,))
    yield inbox
    for number, handler in before.items():
        signal.signal(number, handler)
    inbox._reader.close()
    inbox._writer.close()


def get(number):
    os.kill(os.getpid(), number)


def test_a_second_signal_does_not_interrupt_what_follows_the_first(inbox):
    with pytest.raises(SignalException):
        get(signal.SIGTERM)
    get(signal.SIGTERM)  # as the agent logs the first one
    with inbox.deferred():
        pass
    get(signal.SIGTERM)
    for _ in range(2):
        with pytest.raises(SignalException):
            inbox.raise_pending()
    inbox.raise_pending()


def test_a_signal_waits_inside_of_what_must_not_be_cut_in_two(inbox):
    with inbox.deferred():
        get(signal.SIGTERM)
        with pytest.raises(SignalException):
            inbox.raise_pending()
    get(signal.SIGTERM)  # as the agent logs the first one
    with pytest.raises(SignalException):
        inbox.raise_pending()
