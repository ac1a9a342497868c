"""Loops that a process has left before their end: by an exception of the body, or by `break`.

A process that leaves its loop cannot know whether the program catches the exception, or whether the other ranks leave
the loop, too. It records in the job store that it has left:

* its agent reads the record when the process ends (`LoopExit.of_process`), and counts attempts at one place of
  a loop;
* ranks that stop for a fault look whether another one has left for good (`LoopExits.present`);
* once all ranks have left, the loop is over (`LoopExits.have_all_left`).
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Self

from hyperpod_plugins.elastic.store.job_store import JobStore
from hyperpod_plugins.elastic.store.records import JsonRecord

_OF_PROCESS, _OF_ENTRY, _ATTEMPTS = "left_loop", "left_early", "raised_at"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopExit(JsonRecord):
    """A loop that a process has left before its end."""

    worker_id: int
    incarnation: int
    entry: int
    """Number of the entry of the program."""
    committed: int
    """Number of steps that were committed there."""
    generation: int
    """Number of the last generation that the process was part of."""
    num_bodies: int = 0
    """Number of steps of this loop whose body this process has run to its end."""
    error: str = ""
    """First line of the exception that the body or the loader has raised, with its class; empty if none is known."""

    @classmethod
    def of_process(cls, job_store: JobStore, worker_id: int, incarnation: int) -> Self | None:
        """The loop that a process has left last; None if it has left none.

        Raises:
            ValueError: the value in the store is malformed.
        """
        text = job_store.try_get(f"{_OF_PROCESS}/{worker_id}")
        found = None if text is None else cls.from_json(text)
        return found if found is not None and found.incarnation == incarnation else None

    def publish(self, job_store: JobStore) -> None:
        """Record it for the agent and for the other ranks."""
        value = self.to_json().encode()
        job_store.set(f"{_OF_PROCESS}/{self.worker_id}", value)
        number = job_store.count(f"{_OF_ENTRY}/{self.entry}", 1)
        job_store.set(f"{_OF_ENTRY}/{self.entry}/{number}", value)

    def count_attempts(self, job_store: JobStore) -> int:
        """Count one more process that has ended with an exception here; returns the number of attempts at this place.

        Processes that raise in one generation are one attempt. A replacement that raises before it has joined is part
        of none: then the most processes of one worker count.
        """
        name = f"{_ATTEMPTS}/{self.entry}/{self.committed}"
        job_store.append(name, lambda _: f"{self.generation} {self.worker_id}")
        pairs = [text.partition(" ")[::2] for text in job_store.read_list(name)]
        per_worker = Counter(worker_id for _, worker_id in pairs)
        return max(len({generation for generation, _ in pairs}), *per_worker.values())


class LoopExits:
    """The records of one entry, as one process reads them: each of them once. For one thread."""

    def __init__(self, job_store: JobStore, entry: int) -> None:
        """Read nothing yet; `entry` is the number of the entry."""
        self._job_store, self._name = job_store, f"{_OF_ENTRY}/{entry}"
        self._num_seen = 0
        self._missing: list[int] = []
        """Numbers of records that have been counted, but are not written yet, or never will: their writers were
        lost."""
        self._newest: dict[int, LoopExit] = {}
        """The record of the newest process of each worker."""
        self._members: defaultdict[int, set[int]] = defaultdict(set)
        """The workers that have left, by the last generation that they were part of."""

    def present(self) -> Mapping[int, LoopExit]:
        """By worker_id, the processes that have left the entry early and have not been replaced since.

        Raises:
            ValueError: a value in the store is malformed.
        """
        self._read_new(self._job_store.count(self._name))
        present = dict(zip(self._newest, self._job_store.incarnations(list(self._newest)), strict=True))
        return {worker_id: left for worker_id, left in self._newest.items() if left.incarnation == present[worker_id]}

    def have_all_left(self, generation: int, worker_ids: Collection[int]) -> bool:
        """Whether all members of a generation have left the entry early, so that it is over.

        Args:
            generation: its number.
            worker_ids: of its members.

        Raises:
            ValueError: a value in the store is malformed.
        """
        number = self._job_store.count(self._name)
        if number < len(worker_ids):
            return False
        self._read_new(number)
        return self._members.get(generation, set()) >= set(worker_ids)

    def _read_new(self, number: int) -> None:
        wanted = [*self._missing, *range(self._num_seen + 1, number + 1)]
        names = {f"{self._name}/{each}": each for each in wanted}
        found = self._job_store.try_get_all(list(names)) if names else {}
        for left in map(LoopExit.from_json, found.values()):
            known = self._newest.get(left.worker_id)
            if known is None or known.incarnation <= left.incarnation:
                self._newest[left.worker_id] = left
            self._members[left.generation].add(left.worker_id)
        self._missing = [each for name, each in names.items() if name not in found]
        self._num_seen = max(self._num_seen, number)
