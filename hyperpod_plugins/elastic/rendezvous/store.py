"""What the agents of a job write down about each other, in the c10d store of the rendezvous; nothing here decides.

    key                       value                              written by
    job                       name of the job                    the first agent (compare and set)
    beat/NODE                 count                              that node's agent, about once a second
    over/ROUND                RoundEnd                           whoever needs another round (compare and set)
    candidates/ROUND/NUMBER   name of a node                     each agent that wants to take part
    founders/ROUND            names, in the order of slots       whoever sees enough of them (compare and set)
    slot/ROUND/SLOT           Lease, if not the founder's        see `slots.py` (compare and set)
    changes/ROUND/NUMBER      SLOT                               whoever has changed its lease
    size/ROUND                workers a node                     the first agent to know (compare and set)
    port/ROUND                port of the workers' store         the agent that serves the stores
    master/ROUND              HOST:PORT of it, with etcd         the first founder (compare and set)
    closed                    Closing                            whoever ends the job (compare and set)
    left/NUMBER               name of a node                     each agent that needs the store no more
    LIST/count                how many there are of a list       whoever adds to it, before it does

A round is the time between two common starts of all workers; most jobs have one.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from torch._C._distributed_c10d import PrefixStore, Store

from hyperpod_plugins.elastic.membership.restart_policy import JobRestart
from hyperpod_plugins.elastic.rendezvous.slots import LeaseState, SlotLease
from hyperpod_plugins.elastic.store.job_store import read_key, read_keys
from hyperpod_plugins.elastic.store.records import JsonRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundEnd(JsonRecord):
    """Why all workers begin again."""

    cause: str
    resume_from: str = ""
    """Checkpoint to go on from; empty for what the program says."""
    step: int = -1
    """Optimizer steps in it; -1 where no member asked for this."""
    entry: int = 0
    """Entries of the program that had ended then; see `entries.py`."""
    count: int = 0
    """How many rounds in a row have ended for another start from this step of this entry."""
    shard_degree: int = 0
    """What the next round is to have, with the next, because somebody has asked for it; 0 where nobody has."""
    tensor_degree: int = 0

    @classmethod
    def of(cls, restart: JobRestart, before: Self | None) -> Self:
        """What a member asked for, after a round that ended like `before`."""
        worker_id = restart.entry, restart.step
        count = before.count + 1 if before is not None and (before.entry, before.step) == worker_id else 1
        return cls(
            cause=str(restart),
            resume_from=restart.resume_from,
            step=restart.step,
            entry=restart.entry,
            count=count,
            shard_degree=restart.shard_degree,
            tensor_degree=restart.tensor_degree,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousClosing(JsonRecord):
    """Why nobody can join any more."""

    cause: str
    is_success: bool


def name_of_round(run_id: str, number: int) -> str:
    """Name of the job in the job store of a round: generations begin at 0 again in each."""
    return f"{run_id}.{number}" if number else run_id


_LOOKS_AT_ALL = 30
"""Every so many looks at the slots are at all of them: whoever changed one may have died before it said so."""


class RendezvousStore:
    """One connection to the rendezvous store; not to be shared between threads."""

    def __init__(self, store: Store) -> None:
        """Use the part of `store` that is the rendezvous's own."""
        self._store = PrefixStore("hyperpod/rendezvous", store)
        self._lists: defaultdict[str, dict[int, str]] = defaultdict(dict)
        self._claims: dict[int, list[SlotLease]] = {}
        self._num_looks = 0

    def job(self, run_id: str) -> str:
        """The job that this store serves, which is `run_id` if there was none."""
        return self._first("job", run_id)

    # -- nodes --------------------------------------------------------------------------------------------------

    def heartbeat(self, node: str) -> None:
        """Say that a node is alive."""
        self._store.add(f"beat/{node}", 1)

    def heartbeats(self, nodes: Iterable[str]) -> dict[str, int]:
        """How often each heart has beaten; all must have."""
        names = list(nodes)
        if not names:
            return {}
        counts = self._store.multi_get([f"beat/{node}" for node in names])
        return {node: int(count) for node, count in zip(names, counts, strict=True)}

    def leave(self, node: str) -> None:
        """Say that a node needs the store no more."""
        self._append("left", node)

    def left(self) -> Sequence[str]:
        """Who has said so."""
        return self._list("left")

    def close(self, closing: RendezvousClosing) -> RendezvousClosing:
        """End the job, unless somebody has; returns the first word."""
        return RendezvousClosing.from_json(self._first("closed", closing.to_json()))

    def closing(self) -> RendezvousClosing | None:
        """Why the job has ended, or None while it lasts."""
        text = self._read("closed")
        return None if text is None else RendezvousClosing.from_json(text)

    # -- rounds -------------------------------------------------------------------------------------------------

    def round(self, at_least: int = 0) -> int:
        """The first round, from `at_least` on, that is not over: it may be running, or about to begin."""
        number = at_least
        while self._store.check([f"over/{number}"]):
            number += 1
        return number

    def end_round(self, number: int, end: RoundEnd) -> RoundEnd:
        """Have all workers begin again; returns the first word on why."""
        return RoundEnd.from_json(self._first(f"over/{number}", end.to_json()))

    def round_end(self, number: int) -> RoundEnd | None:
        """Why a round is over; None while it lasts, and for one before the first."""
        text = self._read(f"over/{number}")
        return None if text is None else RoundEnd.from_json(text)

    def add_candidate(self, number: int, node: str) -> None:
        """Say that a node, whose heart heartbeats, wants to take part in a round."""
        self._append(f"candidates/{number}", node)

    def candidates(self, number: int) -> Sequence[str]:
        """Who does, in the order in which they came."""
        return self._list(f"candidates/{number}")

    def start_round(self, number: int, nodes: Sequence[str]) -> None:
        """Begin a round with these nodes, unless it has begun."""
        self._first(f"founders/{number}", json.dumps(nodes))

    def leases(self, number: int) -> tuple[SlotLease, ...] | None:
        """The slots of a round, None before it has begun; asks for those that have changed since the last call."""
        if number not in self._claims:
            text = self._read(f"founders/{number}")
            if text is None:
                return None
            self._claims[number] = [SlotLease(node=node) for node in json.loads(text)]
        leases = self._claims[number]
        changed = {int(slot) for slot in self._news(f"changes/{number}")}
        self._num_looks += 1
        if self._num_looks % _LOOKS_AT_ALL == 0:
            changed = set(range(len(leases) + 1))
        changed |= set(range(len(leases), max(changed, default=-1) + 1))  # slots are added one after another
        keys = [f"slot/{number}/{slot}" for slot in sorted(changed)]
        found = read_keys(self._store, keys)
        for slot, key in zip(sorted(changed), keys, strict=True):
            if key in found:
                leases[slot : slot + 1] = [SlotLease.from_json(found[key])]
        return tuple(leases)

    def add_slot(self, number: int, slot: int, lease: SlotLease) -> bool:
        """Lease the slot that comes after those that there are; False if somebody was faster."""
        is_mine = self._first(f"slot/{number}/{slot}", lease.to_json()) == lease.to_json()
        self._append(f"changes/{number}", str(slot))
        return is_mine

    def swap(self, number: int, slot: int, old: SlotLease, new: SlotLease) -> bool:
        """Put one lease in the place of another; False if that was no longer the last."""
        key = f"slot/{number}/{slot}"
        if old.number == 0 and old.state is LeaseState.HELD:
            self._first(key, old.to_json())  # the founder's lease, which nobody had to write down before
        is_mine = self._store.compare_set(key, old.to_json(), new.to_json()).decode() == new.to_json()
        self._append(f"changes/{number}", str(slot))
        return is_mine

    def size(self, number: int, num_workers: int) -> int:
        """Workers a node, as the first to say it said."""
        return int(self._first(f"size/{number}", str(num_workers)))

    def agreed_size(self, number: int) -> int | None:
        """The same, or None if nobody has said it."""
        text = self._read(f"size/{number}")
        return None if text is None else int(text)

    def serve(self, number: int, port: int) -> None:
        """Say where the workers' store of a round is."""
        self._store.set(f"port/{number}", str(port))

    def port(self, number: int) -> int | None:
        """The port of that store, once it is served."""
        text = self._read(f"port/{number}")
        return None if text is None else int(text)

    def first_master(self, number: int, address: str) -> str:
        """Where the founders of a round have the workers' store, as the first to say it said."""
        return self._first(f"master/{number}", address)

    def _first(self, key: str, value: str) -> str:
        return self._store.compare_set(key, "", value).decode()

    def _read(self, key: str) -> str | None:
        value = read_key(self._store, key)
        return None if value is None else value.decode()

    def _append(self, name: str, value: str) -> None:
        self._store.set(f"{name}/{self._store.add(f'{name}/count', 1)}", value)

    def _news(self, name: str) -> list[str]:
        """What was added to a list since the last call.

        One that is being added just now comes with a later call, or never, if whoever adds it dies just now.
        """
        count, known = self._store.add(f"{name}/count", 0), self._lists[name]
        worker_ids = {f"{name}/{worker_id}": worker_id for worker_id in range(1, count + 1) if worker_id not in known}
        found = {worker_ids[key]: value.decode() for key, value in read_keys(self._store, list(worker_ids)).items()}
        known.update(found)
        return list(found.values())

    def _list(self, name: str) -> list[str]:
        """All that was added to a list, in order."""
        self._news(name)
        known = self._lists[name]
        return [known[worker_id] for worker_id in sorted(known)]
