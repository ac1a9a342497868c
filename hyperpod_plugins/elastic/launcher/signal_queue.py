"""Signals to the agent, deferred until it can act on them, and signal handling of workers."""

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from types import FrameType
from typing import NoReturn

from torch.distributed.elastic.multiprocessing import SignalException

NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
"""Preemption notices. An elastic job continues without this node; in other jobs the agent passes them on to its
workers. They end nothing by themselves unless `--signals-to-handle` names them."""

STUCK_S = 2.0
"""How long the agent's main thread may take to pass an ending signal on to the workers."""
_END_S = 4.0
"""How long the agent may live after a signal that ends it, once no worker runs here and its store is closed."""
_POLL_S = 0.05
_MAX_WAITS = 20
"""Times that a signal waits `_POLL_S` for the end of a message, which may be blocked by a full pipe."""
_LOGGING_FILE = logging.Logger.handle.__code__.co_filename


def ignore_notices() -> None:
    """Ignore preemption notices in this worker, as a scheduler may send them to every process of a node.

    Handlers of the program are kept. Outside the main thread this has no effect.
    """
    if threading.current_thread() is threading.main_thread():
        for number in NOTICES:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def ended_by_sigterm() -> Generator[None]:
    """Let SIGTERM end this process at once inside this context, whatever handler the program has installed.

    It has no effect outside the main thread or if the present handler was not installed from Python.
    """
    former = signal.getsignal(signal.SIGTERM)
    if former is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


class SignalQueue:
    """Receives signals that end the agent, and preemption notices.

    torch's handler raises in the middle of running code. This one does so only outside `deferred`, and only once;
    otherwise the signal waits for `raise_pending`. So a signal interrupts neither an exchange with the fork server or
    the store, nor the shutdown that follows the first signal. While a message is logged, it waits for the end of that:
    `logging` prints what its handlers raise, and goes on.
    """

    def __init__(self, ending: Sequence[signal.Signals]) -> None:
        """Install handlers for `ending` and the preemption notices; has no effect outside the main thread."""
        self._ending = tuple(ending)
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._is_deferred = self._has_raised = False
        self._pending: list[signal.Signals] = []
        self._notices: list[signal.Signals] = []
        self._num_interrupts = self._num_waits = 0
        if threading.current_thread() is threading.main_thread():
            for number in (*NOTICES, *self._ending):
                if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # respect nohup
                    signal.signal(number, self._receive)

    def fileno(self) -> int:
        """Descriptor that becomes readable when a signal arrives."""
        return self._reader.fileno()

    @property
    def is_impatient(self) -> bool:
        """Whether Ctrl-C was pressed twice, which ends everything at once."""
        return self._num_interrupts > 1

    def on_ending(self, act: Callable[[signal.Signals], None]) -> None:
        """Call `act` with the first ending signal in a separate thread, even while the main thread is blocked.

        Python's signal handlers run in the main thread, and not while it is blocked in C, for example by a store that
        does not answer. The wakeup file descriptor is written even then.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        self._wakeup = writer  # keep it open as long as this object lives
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

        def listen() -> None:
            while numbers := reader.recv(64):
                for number in numbers:
                    if number in self._ending:
                        act(signal.Signals(number))
                        return

        threading.Thread(target=listen, name="hyperpod-signals", daemon=True).start()

    @contextlib.contextmanager
    def deferred(self) -> Generator[None]:
        """Defer signals inside this context: they are kept for `raise_pending`."""
        before, self._is_deferred = self._is_deferred, True
        try:
            yield
        finally:
            self._is_deferred = before

    def raise_pending(self) -> None:
        """Raise for the first deferred signal, if any.

        Raises:
            SignalException: a signal is pending.
        """
        self.drain()
        if self._pending:
            self._has_raised = True
            raise _exception(self._pending.pop(0))

    def take_notices(self) -> list[signal.Signals]:
        """Return the preemption notices since the last call."""
        self.drain()
        notices, self._notices = self._notices, []
        return notices

    def drain(self) -> None:
        """Clear the readable state of the descriptor; pending signals and notices are kept."""
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if _is_logging(frame) and self._num_waits < _MAX_WAITS:
            self._num_waits += 1
            again = threading.Timer(_POLL_S, os.kill, (os.getpid(), number))
            again.daemon = True
            again.start()
            return
        self._num_waits, arrived = 0, signal.Signals(number)
        self._num_interrupts += arrived == signal.SIGINT
        with contextlib.suppress(BlockingIOError):
            self._writer.send(b"!")
        if arrived not in self._ending:
            self._notices.append(arrived)
        elif self._is_deferred or self._has_raised:  # another one must not interrupt what follows the first
            self._pending.append(arrived)
        else:
            self._has_raised = True
            raise _exception(arrived)


def exit_in_time(
    number: signal.Signals,
    running_pids: Callable[[], list[int]],
    is_stopping: Callable[[], bool],
    *,
    workers_s: float,
    closing_s: float,
) -> NoReturn:
    """End the agent after a signal if its main thread, blocked in C, does not; runs in a thread of its own.

    Args:
        number: the signal; it is passed on to the workers if the main thread does not do so in time.
        running_pids: returns the workers that run.
        is_stopping: whether the main thread has begun to stop them.
        workers_s: seconds that they may run.
        closing_s: seconds that the agent may take to close the store that it serves.
    """
    began_s = last_s = time.monotonic()
    is_passed_on = False
    while time.monotonic() < last_s + _END_S + closing_s:
        time.sleep(_POLL_S)
        running, age_s = running_pids(), time.monotonic() - began_s
        if running and age_s < workers_s:
            last_s = time.monotonic()
        if not (is_passed_on or is_stopping()) and age_s > STUCK_S:
            is_passed_on = True
            for pid in running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
    age_s = time.monotonic() - began_s
    print(  # noqa: T201
        f"hyperpodrun: {number.name}: this process did not end by itself within {age_s:.0f} s and exits now",
        file=sys.stderr,
    )
    os._exit(128 + number)  # the fork server ends with this process, and the workers with the fork server


def _is_logging(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == _LOGGING_FILE:
            return True
        frame = frame.f_back
    return False


def _exception(number: signal.Signals) -> SignalException:
    return SignalException(f"process {os.getpid()} got {number.name}", sigval=number)
