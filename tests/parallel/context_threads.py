"""A context group whose ranks are threads of one process, for tests of `context_parallel.py` without processes."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import torch

from hyperpod_plugins.parallel import context_attention, context_parallel, ring_attention, sequence_context


class Left(Exception):
    """Another thread does not come, because it has raised an error."""


class ThreadGroup:
    """The collectives that context parallelism uses, between the threads of `run_threads`."""

    def __init__(self, size):
        self._size = size
        self._local = threading.local()
        self._has_come = threading.Condition()
        self._given = {}
        self._is_aborted = False

    def size(self):
        return self._size

    def rank(self):
        return self._local.rank

    def enter(self, rank):
        self._local.rank, self._local.turn = rank, 0

    def abort(self):
        """End the waits of those whom another has left; not of those to whom all have come."""
        with self._has_come:
            self._is_aborted = True
            self._has_come.notify_all()

    def exchange(self, tensor):
        """What each rank has given, in order of ranks."""
        with self._has_come:
            given = self._given.setdefault(self._local.turn, {})
            self._local.turn += 1
            given[self.rank()] = tensor.clone()
            self._has_come.notify_all()
            self._has_come.wait_for(lambda: len(given) == self._size or self._is_aborted, timeout=30)
            if len(given) < self._size:
                raise Left
            return [given[rank] for rank in range(self._size)]


class ThreadDist:
    """Stands for `torch.distributed` in the modules under test."""

    ProcessGroup = ThreadGroup

    @staticmethod
    def get_world_size(group):
        return group.size()

    @staticmethod
    def all_to_all_single(output, input, received=None, sent=None, *, group, async_op=False):
        each = len(input) // group.size()
        sizes = [each] * group.size() if sent is None else sent
        places = group.exchange(torch.tensor(sizes))
        parts = [
            given[int(place[: group.rank()].sum()) :][: int(place[group.rank()])]
            for given, place in zip(group.exchange(input), places, strict=True)
        ]
        assert received is None or [*map(len, parts)] == received
        output.copy_(torch.cat(parts))
        return SimpleNamespace(wait=lambda: None)

    @staticmethod
    def all_gather_into_tensor(output, input, group):
        output.copy_(torch.cat(group.exchange(input)))

    @staticmethod
    def all_reduce(tensor, group):
        tensor.copy_(sum(group.exchange(tensor)))


def run_threads(monkeypatch, degree, compute):
    """Call `compute(rank, group)` in a thread for each rank of a context group, and return the results."""
    group = ThreadGroup(degree)
    for module in (context_attention, ring_attention, sequence_context):
        monkeypatch.setattr(module, "dist", ThreadDist)
    for module in (context_parallel, sequence_context):
        monkeypatch.setattr(module, "context_group", lambda *_: group)

    def call(rank):
        group.enter(rank)
        try:
            return compute(rank, group)
        except BaseException:
            group.abort()
            raise

    with ThreadPoolExecutor(degree) as pool:
        futures = [pool.submit(call, rank) for rank in range(degree)]
        errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None and not isinstance(error, Left):
                raise error
        return [future.result() for future in futures]
