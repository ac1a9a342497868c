"""The keys that the agents of a job share in the c10d store of the rendezvous; the decisions are in other files.

    key                       value                                 written by
    job                       name of the job                       the first agent (compare and set)
    beat/NODE                 count                                 that node's agent, about once a second
    over/ROUND                RoundEnd                              an agent that needs a new round (compare and set)
    candidates/ROUND/NUMBER   name of a node                        each agent that wants to take part
    founders/ROUND            initial nodes, by slot                an agent that sees enough nodes (compare and set)
    slot/ROUND/SLOT           SlotLease, if not the initial one     see `slots.py` (compare and set)
    changes/ROUND/NUMBER      SLOT                                  an agent that has changed that lease
    size/ROUND                workers per node                      the first agent to know (compare and set)
    port/ROUND                port of the workers' store            the agent that serves the stores
    master/ROUND              HOST:PORT of that store, with etcd    the first initial node (compare and set)
    closed                    RendezvousClosing                     an agent that ends the job (compare and set)
    left/NUMBER               name of a node                        each agent that no longer needs the store
    LIST/count                number of entries of a list           an agent that adds an entry, before it does

A round is the time between two starts of all workers; most jobs have one.
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
    """Why a round has ended, and how the next one starts."""

    cause: str
    resume_from: str = ""
    """Checkpoint to resume from; empty to leave the choice to the program."""
    step: int = -1
    """Number of optimizer steps in that checkpoint; -1 if no worker requested the restart."""
    entry: int = 0
    """Number of entries of the program that had ended by then; see `store/entry_records.py`."""
    count: int = 0
    """Number of rounds in a row that have ended with a restart from this step of this entry."""
    shard_degree: int = 0
    """Requested shard degree of the next round; 0 if none was requested. The same for `tensor_degree`."""
    tensor_degree: int = 0

    @classmethod
    def of(cls, restart: JobRestart, before: Self | None) -> Self:
        """The end of a round by a worker's request; `before` is the end of the previous round, if any."""
        position = restart.entry, restart.step
        count = before.count + 1 if before is not None and (before.entry, before.step) == position else 1
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
    """Why the job has ended, so that no node can join any more."""

    cause: str
    is_success: bool


def name_of_round(run_id: str, number: int) -> str:
    """Name of the job in the job store of a round; each round has its own, as generations start at 0 in each."""
    return f"{run_id}.{number}" if number else run_id


_LOOKS_AT_ALL = 30
"""Every so many calls, `leases` reads all slots: an agent that changed one may have died before it recorded that."""


class RendezvousStore:
    """Typed access to the rendezvous store over one connection. Do not share it between threads."""

    def __init__(self, store: Store) -> None:
        """Use the keys of `store` under the rendezvous's prefix."""
        self._store = PrefixStore("hyperpod/rendezvous", store)
        self._lists: defaultdict[str, dict[int, str]] = defaultdict(dict)
        self._leases: dict[int, list[SlotLease]] = {}
        self._num_looks = 0

    def job(self, run_id: str) -> str:
        """Name of the job that this store serves; registers `run_id` if it serves none yet."""
        return self._first("job", run_id)

    # -- nodes --------------------------------------------------------------------------------------------------

    def heartbeat(self, node: str) -> None:
        """Send a heartbeat of a node."""
        self._store.add(f"beat/{node}", 1)

    def heartbeats(self, nodes: Iterable[str]) -> dict[str, int]:
        """Number of heartbeats of each node; blocks until each has sent one."""
        names = list(nodes)
        if not names:
            return {}
        counts = self._store.multi_get([f"beat/{node}" for node in names])
        return {node: int(count) for node, count in zip(names, counts, strict=True)}

    def leave(self, node: str) -> None:
        """Record that a node no longer needs the store."""
        self._append("left", node)

    def left(self) -> Sequence[str]:
        """The nodes that no longer need the store."""
        return self._list("left")

    def close(self, closing: RendezvousClosing) -> RendezvousClosing:
        """End the job unless it has ended; returns the first recorded closing."""
        return RendezvousClosing.from_json(self._first("closed", closing.to_json()))

    def closing(self) -> RendezvousClosing | None:
        """Why the job has ended, or None while it lasts."""
        text = self._read("closed")
        return None if text is None else RendezvousClosing.from_json(text)

    # -- rounds -------------------------------------------------------------------------------------------------

    def round(self, at_least: int = 0) -> int:
        """The first round from `at_least` on that has not ended: it may be running or about to start."""
        number = at_least
        while self._store.check([f"over/{number}"]):
            number += 1
        return number

    def end_round(self, number: int, end: RoundEnd) -> RoundEnd:
        """End a round, which restarts all workers, unless it has ended; returns the first recorded end."""
        return RoundEnd.from_json(self._first(f"over/{number}", end.to_json()))

    def round_end(self, number: int) -> RoundEnd | None:
        """Why a round has ended; None while it lasts, and for round -1."""
        text = self._read(f"over/{number}")
        return None if text is None else RoundEnd.from_json(text)

    def add_candidate(self, number: int, node: str) -> None:
        """Record that a node, which already sends heartbeats, wants to take part in a round."""
        self._append(f"candidates/{number}", node)

    def candidates(self, number: int) -> Sequence[str]:
        """The nodes that want to take part in a round, in the order of arrival."""
        return self._list(f"candidates/{number}")

    def start_round(self, number: int, nodes: Sequence[str]) -> None:
        """Start a round with these nodes, in the order of slots, unless it has started."""
        self._first(f"founders/{number}", json.dumps(nodes))

    def leases(self, number: int) -> tuple[SlotLease, ...] | None:
        """The leases of a round, by slot; None before it has started. Reads what changed since the last call."""
        if number not in self._leases:
            text = self._read(f"founders/{number}")
            if text is None:
                return None
            self._leases[number] = [SlotLease(node=node) for node in json.loads(text)]
        leases = self._leases[number]
        changed = {int(slot) for slot in self._new_entries(f"changes/{number}")}
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
        """Add the next slot, with its first lease; False if another node was faster."""
        is_mine = self._first(f"slot/{number}/{slot}", lease.to_json()) == lease.to_json()
        self._append(f"changes/{number}", str(slot))
        return is_mine

    def swap(self, number: int, slot: int, old: SlotLease, new: SlotLease) -> bool:
        """Replace a lease by another; False if `old` was no longer the last."""
        key = f"slot/{number}/{slot}"
        if old.number == 0 and old.state is LeaseState.HELD:
            self._first(key, old.to_json())  # the initial node's lease has no key until it changes
        is_mine = self._store.compare_set(key, old.to_json(), new.to_json()).decode() == new.to_json()
        self._append(f"changes/{number}", str(slot))
        return is_mine

    def agree_workers_per_node(self, number: int, num_workers: int) -> int:
        """Agree on the number of workers per node; the first agent's `num_workers` is used."""
        return int(self._first(f"size/{number}", str(num_workers)))

    def workers_per_node(self, number: int) -> int | None:
        """The agreed number of workers per node; None if no agent has set it."""
        text = self._read(f"size/{number}")
        return None if text is None else int(text)

    def publish_port(self, number: int, port: int) -> None:
        """Publish the port of the workers' store of a round."""
        self._store.set(f"port/{number}", str(port))

    def port(self, number: int) -> int | None:
        """Port of the workers' store of a round; None until it is served."""
        text = self._read(f"port/{number}")
        return None if text is None else int(text)

    def first_master(self, number: int, address: str) -> str:
        """Agree on HOST:PORT of the store of a round's initial workers; the first agent's `address` is used."""
        return self._first(f"master/{number}", address)

    def _first(self, key: str, value: str) -> str:
        return self._store.compare_set(key, "", value).decode()

    def _read(self, key: str) -> str | None:
        value = read_key(self._store, key)
        return None if value is None else value.decode()

    def _append(self, name: str, value: str) -> None:
        self._store.set(f"{name}/{self._store.add(f'{name}/count', 1)}", value)

    def _new_entries(self, name: str) -> list[str]:
        """Entries added to a list since the last call.

        An entry that is just being added comes with a later call, or never if its writer dies meanwhile.
        """
        count, known = self._store.add(f"{name}/count", 0), self._lists[name]
        numbers = {f"{name}/{number}": number for number in range(1, count + 1) if number not in known}
        found = {numbers[key]: value.decode() for key, value in read_keys(self._store, list(numbers)).items()}
        known.update(found)
        return list(found.values())

    def _list(self, name: str) -> list[str]:
        """All entries of a list, in order."""
        self._new_entries(name)
        known = self._lists[name]
        return [known[number] for number in sorted(known)]
