"""Loops that a process has left before their end: by an exception of the body, or by `break`.

A process that leaves its loop cannot know whether the program catches the exception, or whether the other ranks leave
the loop, too. It records in the job store that it has left:

* its agent reads the record when the process ends (`LeftLoop.of_process`), and counts attempts at one place of a loop;
* ranks that stop for a fault look whether another one has left for good (`departures`);
* once all ranks have left, the loop is over (`have_all_left`).
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Self

from hyperpod_plugins.elastic.store.job_store import JobStore
from hyperpod_plugins.elastic.store.records import JsonRecord

_OF_PROCESS, _OF_ENTRY, _ATTEMPTS = "left_loop", "left_early", "raised_at"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftLoop(JsonRecord):
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


def departures(job_store: JobStore, entry: int) -> Mapping[int, LeftLoop]:
    """By worker_id, the processes that have left an entry early and have not been replaced since.

    Raises:
        ValueError: a value in the store is malformed.
    """
    found = {left.worker_id: left for left in _all_of(job_store, entry)}
    present = dict(zip(found, job_store.incarnations(list(found)), strict=True))
    return {worker_id: left for worker_id, left in found.items() if left.incarnation == present[worker_id]}


def have_all_left(job_store: JobStore, entry: int, generation: int, worker_ids: Collection[int]) -> bool:
    """Whether all members of a generation have left an entry early, so that it is over.

    Args:
        job_store: of the job.
        entry: its number.
        generation: its number.
        worker_ids: of its members.

    Raises:
        ValueError: a value in the store is malformed.
    """
    if job_store.count(f"{_OF_ENTRY}/{entry}") < len(worker_ids):
        return False
    return {left.worker_id for left in _all_of(job_store, entry) if left.generation == generation} >= set(worker_ids)


def _all_of(job_store: JobStore, entry: int) -> list[LeftLoop]:
    """All records of an entry, those of the newest processes last."""
    number = job_store.count(f"{_OF_ENTRY}/{entry}")
    names = [f"{_OF_ENTRY}/{entry}/{each}" for each in range(1, number + 1)]
    found = map(LeftLoop.from_json, job_store.try_get_all(names).values() if names else ())
    return sorted(found, key=lambda left: left.incarnation)
