"""Signals to the agent: kept until it is at a place where it can act on them."""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Generator, Sequence
from types import FrameType

from torch.distributed.elastic.multiprocessing import SignalException

NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
"""An elastic job goes on without this node; to others' workers they are passed on. They stop nothing by themselves,
unless --signals-to-handle names them."""


def ignore_notices() -> None:
    """Let no notice end this process, a worker: a scheduler may send them to every process of a node, not to its agent
    alone. Handlers of the program stay, and threads other than the main one can change nothing.
    """
    if threading.current_thread() is threading.main_thread():
        for number in NOTICES:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def ended_by_sigterm() -> Generator[None]:
    """Let SIGTERM end this process at once inside, whatever its program does about it elsewhere.

    Threads other than the main one can change nothing, and neither is a handler changed that is not Python's.
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


class SignalInbox:
    """Signals that end the job, and notices to pass on.

    torch's handler raises in the middle of whatever runs. This one does so only outside `deferred`, and only once:
    otherwise the signal waits for `raise_pending`, so no conversation with the zygote or the store is cut in two, nor
    is what follows the first signal.
    """

    def __init__(self, ending: Sequence[signal.Signals]) -> None:
        """Take over `ending` and the notices that are not among them; in the main thread only."""
        self._ending = tuple(ending)
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._is_deferred = False
        self._pending: list[signal.Signals] = []
        self._notices: list[signal.Signals] = []
        self._num_interrupts = 0
        if threading.current_thread() is threading.main_thread():
            for number in (*NOTICES, *self._ending):
                if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as nohup asks
                    signal.signal(number, self._receive)

    def fileno(self) -> int:
        """Descriptor that becomes readable when a signal arrives."""
        return self._reader.fileno()

    @property
    def is_impatient(self) -> bool:
        """Whether Ctrl-C was pressed twice: end everything now."""
        return self._num_interrupts > 1

    def on_ending(self, act: Callable[[signal.Signals], None]) -> None:
        """Have a thread of its own call `act` with the first ending signal, wherever the main thread is just then.

        Python's handlers run in the main thread, and not while that waits in C, for example for a store that does not
        answer. The kernel's note of a signal arrives all the same.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        self._wakeup = writer  # as long as this object
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
        """Raise nothing inside."""
        before, self._is_deferred = self._is_deferred, True
        try:
            yield
        finally:
            self._is_deferred = before

    def raise_pending(self) -> None:
        """Raise for the first signal that has arrived, if any.

        Raises:
            SignalException: one has.
        """
        self.drain()
        if self._pending:
            raise _exception(self._pending.pop(0))

    def take_notices(self) -> list[signal.Signals]:
        """Notices since the last call."""
        self.drain()
        notices, self._notices = self._notices, []
        return notices

    def drain(self) -> None:
        """Forget that something arrived, not what."""
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        arrived = signal.Signals(number)
        self._num_interrupts += arrived == signal.SIGINT
        with contextlib.suppress(BlockingIOError):
            self._writer.send(b"!")
        if arrived not in self._ending:
            self._notices.append(arrived)
        elif self._is_deferred:
            self._pending.append(arrived)
        else:
            self._is_deferred = True
            raise _exception(arrived)


def _exception(number: signal.Signals) -> SignalException:
    return SignalException(f"process {os.getpid()} got {number.name}", sigval=number)
