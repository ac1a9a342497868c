"""The job store, through which members and agents of a job communicate: a c10d store that no worker hosts.

    key                       value                             written by
    incarnation/WORKER        incarnation in a worker slot      the agent, before it starts that process
    list/replaced/NUMBER      "WORKER INCARNATION"              the agent, after that
    exit/WORKER/INCARNATION   FailureRecord                     the agent that saw the process end
    end/GENERATION            FailureRecord                     the first to detect it (compare and set)
    arrive/GENERATION/WORKER  an arrival (text)                 each process that asks to be a member
    arrived/GENERATION        number of arrivals                each of them, after that
    plan/GENERATION           all arrivals (packed), or `void`  the first to see them all (compare and set)
    world/NUMBER              WorldPlan                         the process that plans it (compare and set)
    list/kills/NUMBER         "WORKER INCARNATION"              a member that wants a stuck process killed
    beat/WORKER               JSON                              each process, about once a second
    value/armed               whether members recover, below    members and agents (compare and set)
    value/NAME                bytes                             any process
    count/NAME                a counter                         any process
    list/NAME/NUMBER          an entry, numbered from 1         any process (compare and set)
    listed/NAME               lower bound of their number       each writer of an entry, after that

A generation is over when its `end` exists. The first `plan` forms the next one. Both are written once and never
change, so all processes act on the same values. This module makes no decisions; see `membership/quorum_policy.py`.

WORKER stands for the worker_id, the rank in the initial world, which never changes; see `store/world.py`.

Generations begin at 0 again in each round (see `rendezvous/store.py`). Values that outlive a round are kept beside
these keys.

[Note: whether members recover] `value/armed` is absent at first, `1` while members have something to recover, `over`
when all of that has ended, and `0` once an agent has decided to restart all workers because no member had anything to
recover. Members change it from absent or `over` to `1`, agents from absent or `over` to `0`: the first write decides,
so no step is committed in a round that is about to end.

[Note: lists without holes] A writer adds an entry by compare-and-set right after the last existing one, and
increments the count afterwards. A writer that is lost in between thus leaves no hole, only a count that is too low;
the count only tells readers where to begin. Each entry begins with a word unique to its writer, so that two equal
entries stay two.

Unless its docstring says otherwise, a call makes one to three requests to the store, for any number of workers.
Processes that wait poll rarely enough that thousands can do so at the same time; see `poll_interval_s`.
"""

import contextlib
import itertools
import json
import math
import time
import uuid
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Self, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from hyperpod_plugins.elastic.store.etcd import EtcdStore
from hyperpod_plugins.elastic.store.records import FailureRecord
from hyperpod_plugins.elastic.store.world import WorldPlan
from hyperpod_plugins.env import JobEnv

# Reads of many keys of a c10d store in few requests; unlike `multi_get`, they do not wait for missing keys.


def read_key(store: Store, key: str) -> bytes | None:
    """Return the value of a key; None if it does not exist."""
    return store.get(key) if store.check([key]) else None


def read_keys(store: Store, keys: Sequence[str]) -> dict[str, bytes]:
    """Return the values of those keys that exist: two requests if all do, a few more for each missing key.

    The keys must not be deleted meanwhile.
    """
    found = present_keys(store, keys)
    return dict(zip(found, store.multi_get(found), strict=True)) if found else {}


def present_keys(store: Store, keys: Sequence[str]) -> list[str]:
    """Return those keys that exist, by bisection: `Store.check` only tells whether all of several keys exist."""
    if not keys or store.check(list(keys)):
        return list(keys)
    if len(keys) == 1:
        return []
    half = len(keys) // 2
    return present_keys(store, keys[:half]) + present_keys(store, keys[half:])


BEGUN_KEY = "begun"
"""Name of the value that a member sets when its first step begins."""
_ARMED_KEY, _ARMED, _DISARMED, _TOO_LATE = "value/armed", "1", "over", "0"
_KILLS = "kills"
_REPLACED = "replaced"
_VOID = b"void"
GAVE_UP_KEY = "gave_up"
"""Name of the value, a `FailureRecord`, that a member sets when no process is to be replaced any more."""
RESTART_KEY = "restart"
"""Name of the value, a `JobRestart`, that a member sets when only a restart of all workers can help."""


class JobStore:
    """One connection to the job store; threads that wait on it need a connection each."""

    def __init__(self, store: Store, lasting: Store | None = None) -> None:
        """Use `store` for the keys of this round of the job, and `lasting` for values that outlive the round."""
        self._store = store
        self._lasting = PrefixStore("lasting", store) if lasting is None else lasting
        self._known: defaultdict[str, list[str]] = defaultdict(list)
        self._writer, self._num_written = uuid.uuid4().hex[:12], itertools.count()
        self._kills_seen = self._replacements_seen = 0
        self._replaced: dict[int, int] = {}
        self._ends_seen = self._world_number = 0
        self._history: list[WorldPlan] = []

    @classmethod
    def connect(cls, job: JobEnv, timeout_s: float = 30.0) -> Self:
        """Open a new connection to the store of the job.

        Raises:
            DistNetworkError: the store does not answer within `timeout_s` seconds.
        """
        return cls.from_store(job.run_id, connect_store(job, timeout_s))

    @classmethod
    def from_store(cls, run_id: str, store: Store) -> Self:
        """Return the job store of a job inside a store that also serves other purposes."""
        return cls(PrefixStore(f"hyperpod/{run_id}", store), PrefixStore("hyperpod_lasting", store))

    def sub_store(self, name: str) -> Store:
        """Return a part of the underlying store for other uses, such as the rendezvous of process groups."""
        return PrefixStore(name, self._store)

    # -- processes ----------------------------------------------------------------------------------------------

    def incarnation(self, worker_id: int) -> int:
        """Incarnation of the process that runs, or is about to start, in this worker slot."""
        return self._store.add(f"incarnation/{worker_id}", 0)

    def incarnations(self, worker_ids: Sequence[int]) -> list[int]:
        """`incarnation` of several workers, as published by their agents; reads only what is new on this connection."""
        replaced = self.read_list(_REPLACED)
        for text in replaced[self._replacements_seen :]:
            worker_id, incarnation = map(int, text.split())
            self._replaced[worker_id] = max(incarnation, self._replaced.get(worker_id, 0))
        self._replacements_seen = len(replaced)
        return [self._replaced.get(worker_id, 0) for worker_id in worker_ids]

    def next_incarnation(self, worker_id: int) -> int:
        """Count and return the next incarnation of this worker; what earlier ones wrote is void from now on.

        An agent that is lost midway has counted a process that was never started and that it has not published. The
        agent that voids the workers of the lost node counts one more.
        """
        incarnation = self._store.add(f"incarnation/{worker_id}", 1)
        self.append(_REPLACED, lambda _: f"{worker_id} {incarnation}")
        return incarnation

    def record_exit(self, failure: FailureRecord) -> None:
        """Record how a process ended."""
        self._store.set(f"exit/{failure.worker_id}/{failure.incarnation}", failure.to_json())

    def exit_of(self, worker_id: int, incarnation: int) -> FailureRecord | None:
        """How a process ended; None until its agent has recorded it."""
        text = self._read(f"exit/{worker_id}/{incarnation}")
        return None if text is None else FailureRecord.from_json(text)

    # -- generations --------------------------------------------------------------------------------------------

    def end(self, generation: int, failure: FailureRecord) -> FailureRecord:
        """End a generation if it has not ended yet; returns the failure that ended it."""
        return FailureRecord.from_json(self._store.compare_set(f"end/{generation}", "", failure.to_json()))

    def ended(self, generation: int) -> FailureRecord | None:
        """The failure that ended a generation; None while it lasts."""
        text = self._read(f"end/{generation}")
        return None if text is None else FailureRecord.from_json(text)

    def wait_ended(self, generation: int, timeout_s: float) -> FailureRecord | None:
        """Wait up to `timeout_s` seconds for a generation to end; returns the failure, or None if it still lasts."""
        with contextlib.suppress(RuntimeError):  # a timeout; a lost connection raises in the next call
            self._store.wait([f"end/{generation}"], timedelta(seconds=timeout_s))
        return self.ended(generation)

    def generation(self, at_least: int = 0) -> int:
        """The first generation, from `at_least` on, that has not ended: it is running or about to be formed."""
        generation = at_least
        while self._store.check([f"end/{generation}"]):
            generation += 1
        return generation

    def propose_world(self, world: WorldPlan) -> WorldPlan:
        """Propose the next world; returns the accepted plan, which is the first. It takes effect with an `end`."""
        return WorldPlan.from_json(self._store.compare_set(f"world/{world.number}", "", world.to_json()))

    def world(self, number: int) -> WorldPlan | None:
        """The planned world of a number, from 1 on; None if it is not planned."""
        text = self._read(f"world/{number}")
        return None if text is None else WorldPlan.from_json(text)

    def world_number(self, generation: float = math.inf) -> int:
        """Number of the world that a generation is formed for: the last one that the end of an earlier one put in
        force.

        If any world has been planned, reads the end of each generation since the last call on this connection.

        Args:
            generation: its number; by default the one that is running or about to be formed.
        """
        if not self._ends_seen and self.world(1) is None:
            return 0
        while self._ends_seen < generation:
            failure = self.ended(self._ends_seen)
            if failure is None:
                break
            self._ends_seen += 1
            if failure.world > self._world_number:
                self._world_number = failure.world
                world = self.world(failure.world)
                self._history += [] if world is None else [world]
        return self._world_number

    def history(self) -> list[WorldPlan]:
        """The worlds that have taken effect after the initial one, in order."""
        self.world_number()
        return list(self._history)

    def wait_planned(self, generation: int, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds for the plan of a generation; returns whether it has one."""
        with contextlib.suppress(RuntimeError):  # a timeout; a lost connection raises in the next call
            self._store.wait([f"plan/{generation}"], timedelta(seconds=timeout_s))
        return self._store.check([f"plan/{generation}"])

    def arrive(self, generation: int, worker_id: int, arrival: str) -> int:
        """Register this process for a generation, with what it brings.

        Returns:
            The number of arrivals. Once it equals the world size, check `arrivals`: some may be outdated since.
        """
        self._store.set(f"arrive/{generation}/{worker_id}", arrival)
        return self._store.add(f"arrived/{generation}", 1)

    def withdraw(self, generation: int, worker_id: int, arrival: str) -> None:
        """Overwrite this process's arrival with one that does not count."""
        self._store.set(f"arrive/{generation}/{worker_id}", arrival)
        self._store.add(f"arrived/{generation}", -1)

    def num_arrived(self, generation: int) -> int:
        """The number of arrivals, as `arrive` last returned it."""
        return self._store.add(f"arrived/{generation}", 0)

    def all_arrived(self, generation: int, worker_ids: Sequence[int]) -> bool:
        """Whether a process of each worker has arrived, of whatever incarnation."""
        return self._store.check([f"arrive/{generation}/{worker_id}" for worker_id in worker_ids])

    def arrivals(self, generation: int, worker_ids: Sequence[int]) -> dict[int, str]:
        """The arrivals so far, by worker_id; makes more requests while some are missing."""
        keys = {f"arrive/{generation}/{worker_id}": worker_id for worker_id in worker_ids}
        return {keys[key]: text.decode() for key, text in read_keys(self._store, list(keys)).items()}

    def void_plan(self, generation: int) -> None:
        """Mark a generation as ended, so that no process waits for its plan forever."""
        self._store.compare_set(f"plan/{generation}", "", _VOID.decode())

    def propose(self, generation: int, members: Mapping[int, str]) -> dict[int, str] | None:
        """Propose the members of a generation; returns the accepted (first) plan, or None if it has ended."""
        packed: Any = _pack(members)  # `compare_set` takes bytes, too
        found = self._store.compare_set(f"plan/{generation}", "", packed)
        return None if found == _VOID else _unpack(found)

    def plan(self, generation: int) -> dict[int, str] | None:
        """The plan of a generation: what each member brings; None without a plan, or if the generation has ended."""
        packed = read_key(self._store, f"plan/{generation}")
        return None if packed is None or packed == _VOID else _unpack(packed)

    # -- whether the members recover ----------------------------------------------------------------------------

    @property
    def is_armed(self) -> bool:
        """Whether members have something to recover and take part in recovery."""
        return self._read(_ARMED_KEY) == _ARMED

    @property
    def was_armed(self) -> bool:
        """Whether members had something to recover and all of it has ended."""
        return self._read(_ARMED_KEY) == _DISARMED

    def arm(self) -> bool:
        """Record that this member has something to recover; False if an agent has decided to restart all workers."""
        return self._become(_ARMED)

    def void_restart_all(self) -> None:
        """Void the decision to restart all workers, if no agent has acted on it in time."""
        self._store.compare_set(_ARMED_KEY, _TOO_LATE, _ARMED)

    def disarm(self) -> None:
        """Undo `arm`: everything that was to be recovered has ended."""
        self._store.compare_set(_ARMED_KEY, _ARMED, _DISARMED)

    def claim_restart_all(self) -> bool:
        """Decide to restart all workers because no member has anything to recover; False if one has by now."""
        return self._become(_TOO_LATE)

    def _become(self, state: str) -> bool:
        """Set `value/armed` to `state` if it is absent or `over`; returns whether it is `state` now."""
        found = self._store.compare_set(_ARMED_KEY, "", state)
        if found == _DISARMED.encode():
            found = self._store.compare_set(_ARMED_KEY, _DISARMED, state)
        return found == state.encode()

    # -- requests, heartbeats and values ------------------------------------------------------------------------

    def ask_to_kill(self, worker_id: int, incarnation: int) -> None:
        """Ask the agent of a worker to kill that process."""
        self.append(_KILLS, lambda _: f"{worker_id} {incarnation}")

    def new_kills(self) -> list[tuple[int, int]]:
        """Kill requests `(worker_id, incarnation)` since the last call on this connection."""
        kills = self.read_list(_KILLS)
        new, self._kills_seen = kills[self._kills_seen :], len(kills)
        return [(int(worker_id), int(incarnation)) for worker_id, incarnation in map(str.split, new)]

    def heartbeat(self, worker_id: int, news: Mapping[str, Any]) -> None:
        """Publish this process's heartbeat: what it does and how far it is."""
        self._store.set(f"beat/{worker_id}", json.dumps(news))

    def heartbeats(self, worker_ids: Sequence[int]) -> dict[int, dict[str, Any]]:
        """The last heartbeat of each worker that has sent one."""
        keys = {f"beat/{worker_id}": worker_id for worker_id in worker_ids}
        return {keys[key]: json.loads(text) for key, text in read_keys(self._store, list(keys)).items()}

    def set(self, name: str, value: bytes) -> None:
        """Set a value of this round."""
        self._store.set(f"value/{name}", value)  # pyright: ignore[reportArgumentType]: bytes are taken, too

    def set_if_absent(self, name: str, value: bytes) -> None:
        """Set a value of this round unless it is set."""
        self._store.compare_set(f"value/{name}", "", value.decode())

    def raise_to(self, name: str, number: int) -> int:
        """Raise a numeric value to at least `number`; returns the resulting value."""
        while True:
            found = self.try_get(name)
            if found is not None and int(found) >= number:
                return int(found)
            self._store.compare_set(f"value/{name}", "" if found is None else found.decode(), str(number))

    def set_lasting(self, name: str, value: bytes) -> None:
        """Set a value that later rounds of the job can read, too."""
        self._lasting.set(name, value)  # pyright: ignore[reportArgumentType]: bytes are taken, too

    def try_get_lasting(self, name: str) -> bytes | None:
        """Read a value that this round or an earlier one has set with `set_lasting`; None if there is none."""
        return read_key(self._lasting, name)

    def wait_get(self, name: str, timeout_s: float) -> bytes:
        """Read a value, waiting until it is set.

        Raises:
            DistStoreError: it was not set within `timeout_s` seconds.
        """
        key = f"value/{name}"
        self._store.wait([key], timedelta(seconds=timeout_s))
        return self._store.get(key)

    def try_get(self, name: str) -> bytes | None:
        """Read a value; None if it is not set."""
        return read_key(self._store, f"value/{name}")

    def has_all(self, names: Sequence[str]) -> bool:
        """Whether all these values are set."""
        return self._store.check([f"value/{name}" for name in names])

    def try_get_all(self, names: Sequence[str]) -> dict[str, bytes]:
        """Read those values that are set; makes more requests if some are not. None may be deleted meanwhile."""
        found = read_keys(self._store, [f"value/{name}" for name in names])
        return {key.removeprefix("value/"): value for key, value in found.items()}

    def count(self, name: str, more: int = 0) -> int:
        """Add `more` to a counter, which begins at 0; returns its new value."""
        return self._store.add(f"count/{name}", more)

    def append(self, name: str, entry_of: Callable[[int], str]) -> int:
        """Append an entry to a list; returns its number, from 1 on.

        Args:
            name: of the list.
            entry_of: makes the entry for a given number; called again with the next number if another writer is
                faster.
        """
        number = self._store.add(f"listed/{name}", 0)
        while True:
            number += 1
            text = f"{self._writer}.{next(self._num_written)} {entry_of(number)}"
            if self._store.compare_set(f"list/{name}/{number}", "", text).decode(errors="replace") == text:
                break
        self._store.add(f"listed/{name}", 1)
        return number

    def read_list(self, name: str) -> Sequence[str]:
        """All entries of a list, in order; reads only those new on this connection: one request if there are none."""
        known = self._known[name]
        if self._store.check([f"list/{name}/{len(known) + 1}"]):
            last = max(len(known) + 1, self._store.add(f"listed/{name}", 0))
            keys = [f"list/{name}/{number}" for number in range(len(known) + 1, last + 1)]
            found = read_keys(self._store, keys)
            known += [
                found[key].decode(errors="replace").partition(" ")[2]
                for key in itertools.takewhile(found.__contains__, keys)
            ]
            while (text := self._read(f"list/{name}/{len(known) + 1}")) is not None:  # written, but not counted (yet)
                known.append(text.partition(" ")[2])
        return known

    def delete(self, name: str) -> None:
        """Delete a value that is no longer needed."""
        self._store.delete_key(f"value/{name}")

    def _read(self, key: str) -> str | None:
        value = read_key(self._store, key)
        return None if value is None else value.decode(errors="replace")


def connect_store(job: JobEnv, timeout_s: float) -> Store:
    """Connect to the store of a job, in etcd or a TCPStore.

    Raises:
        DistNetworkError: the store does not answer within `timeout_s` seconds. For etcd, the first request raises it.
    """
    if job.etcd_url:
        return EtcdStore(job.etcd_url, timeout_s)
    timeout = timedelta(seconds=timeout_s)
    return TCPStore(job.store_host, job.store_port, is_master=False, wait_for_workers=False, timeout=timeout)


def _pack(members: Mapping[int, str]) -> bytes:
    """Compress a plan: since most members bring the same, it lists the worker_ids for each distinct arrival."""
    worker_ids: defaultdict[str, list[int]] = defaultdict(list)
    for worker_id, brought in sorted(members.items()):
        worker_ids[brought].append(worker_id)
    return zlib.compress(json.dumps(worker_ids).encode(), level=1)


def _unpack(packed: bytes) -> dict[int, str]:
    worker_ids: dict[str, list[int]] = json.loads(zlib.decompress(packed))
    return {worker_id: brought for brought, those in worker_ids.items() for worker_id in those}


V = TypeVar("V")

_POLLS_A_SECOND = 2000.0
"""Limit for all processes of a job together."""
_SHORTEST_S = 0.005
_LONGEST_S = 1.0
"""Longest interval after a long wait, in seconds; with many processes it may be longer."""
_PART_OF_WAIT = 0.05
_LOOK_S = 1.0
"""Approximate time between two scans, by any of the waiting processes, in seconds."""
_GOLDEN = 0.6180339887


def poll_interval_s(rank: int, world_size: int, waited_s: float) -> float:
    """Seconds until this process polls again: a small part of its wait so far, or longer if the store needs it.

    The interval differs slightly between ranks, so that they do not all poll at once.
    """
    fair_s = max(_SHORTEST_S, world_size / _POLLS_A_SECOND, min(_LONGEST_S, waited_s * _PART_OF_WAIT))
    return fair_s * (0.75 + 0.5 * (rank * _GOLDEN % 1.0))


def scan_interval_s(rank: int, num_waiting: int) -> float:
    """Seconds until this process scans without a hint from the count: a few of all that wait scan each second."""
    return _LOOK_S * (1 + rank % max(1, num_waiting))


def poll_until(
    look: Callable[[], V],
    is_done: Callable[[V], bool],
    *,
    limit_s: Callable[[], float] | float,
    every_s: Callable[[float], float] | float,
) -> V:
    """Look until a view is done, and a last time after the limit; return the last view.

    Args:
        look: Returns what there is to see.
        is_done: Whether that is enough.
        limit_s: Seconds to wait, at most; a function if `look` may extend it.
        every_s: Seconds between two looks; a function if they depend on the seconds waited so far.
    """
    began_s = time.monotonic()
    while True:
        waited_s = time.monotonic() - began_s
        view = look()
        if is_done(view) or waited_s >= (limit_s() if callable(limit_s) else limit_s):
            return view
        time.sleep(every_s(waited_s) if callable(every_s) else every_s)
