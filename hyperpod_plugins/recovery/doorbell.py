"""Waking a process when a generation gets its plan, without anybody asking for it again and again."""

import threading
from collections.abc import Callable

import torch.distributed as dist

from hyperpod_plugins.elastic import Ledger

_FOREVER_S = 365 * 86400.0  # the wait costs nothing, and torch warns of each one that times out


class Doorbell:
    """A thread that waits in the store, so that the main thread can be interrupted, and can look at its clock.

    It may fail to ring: whoever waits looks for the plan itself from time to time.
    """

    def __init__(self, connect: Callable[[], Ledger]) -> None:
        """Make a connection of one's own with `connect`, in good time: a server is slow while it takes in new ones."""
        self._connect = connect
        self._changed = threading.Condition()
        self._wanted = self._rung = self._awaited = 0
        self._turn = 0
        self._begin()

    def wait(self, generation: int, timeout_s: float) -> None:
        """Until there is a plan of a generation, from 1 on, or for `timeout_s` seconds."""
        with self._changed:
            self._wanted = generation
            if self._awaited not in (0, generation):  # that one has ended without a plan
                self._begin()
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._rung == generation, timeout_s)

    def _begin(self) -> None:
        self._turn, self._awaited = self._turn + 1, 0
        threading.Thread(target=self._run, args=(self._turn,), name="hyperpod_bell", daemon=True).start()

    def _run(self, turn: int) -> None:
        try:
            ledger = self._connect()
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._turn != turn or self._wanted != self._rung)
                    if self._turn != turn:
                        return
                    generation = self._awaited = self._wanted
                while not ledger.wait_planned(generation, timeout_s=_FOREVER_S):
                    pass
                with self._changed:
                    if self._turn != turn:
                        return
                    self._rung, self._awaited = generation, 0
                    self._changed.notify_all()
        except dist.DistError:
            return  # the main thread finds out by itself
