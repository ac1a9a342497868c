"""What the agent does with the signals that it gets."""

import io
import logging
import os
import signal
import time

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


def test_a_signal_waits_for_the_end_of_a_message(inbox, capsys):
    class Interrupted(io.StringIO):
        def write(self, text):
            get(signal.SIGTERM)
            return super().write(text)

    stream = Interrupted()
    log = logging.Logger("interrupted")
    log.addHandler(logging.StreamHandler(stream))

    def log_and_wait():
        log.warning("waiting")
        time.sleep(10)

    with pytest.raises(SignalException):
        log_and_wait()
    assert stream.getvalue() == "waiting\n"
    assert "Traceback" not in capsys.readouterr().err
