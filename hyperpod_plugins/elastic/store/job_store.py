"""What the members and agents of a job tell each other, in a c10d store that no worker hosts.

    key                       value                             written by
    incarnation/RANK          number of the process in a place  the agent, before it starts one
    list/replaced/NUMBER      "RANK INCARNATION"                the agent, after that
    exit/RANK/INCARNATION     Failure                          the agent that saw the process end
    end/GENERATION            Failure                          whoever knows first (compare and set)
    arrive/GENERATION/RANK    an arrival (text)                 each process that wants to be a member
    arrived/GENERATION        how many have arrived             each of them, after that
    plan/GENERATION           all arrivals (packed), or `void`  whoever sees that (compare and set)
    world/NUMBER              World                             whoever plans it (compare and set)
    list/kills/NUMBER         "RANK INCARNATION"                whoever wants a stuck process ended
    beat/RANK                 JSON                              each process, about once a second
    value/armed               whether members recover, below    members and agents (compare and set)
    value/NAME                bytes                             anybody
    count/NAME                a counter                         anybody
    list/NAME/NUMBER          an entry, from 1 on               anybody (compare and set)
    listed/NAME               how many entries at least         each of them, after that

A generation is over when its `end` exists. The next one is formed by the first `plan`; both are written once and never
changed, so everybody acts on the same. Nothing here decides; see `membership.py`.

RANK stands for a process's place: its rank in the first world of the job, and its number for ever; see `world.py`.

What outlives a round (see `rdzv_store.py`), in which generations begin at 0 again, lies beside these keys.

[Note: whether members recover] `value/armed` is not there at first, `1` while members have something to recover, `over`
when all of that has come to its end, and `0` once an agent has decided that all begin again, since none had anything.
Members go from none or `over` to `1`, agents from there to `0`: the first write decides, and no step is committed in a
round that is about to end.

[Note: lists without holes] An entry is written by compare-and-set where the one before it is there already, and counted
afterwards. So a writer that is lost in between leaves no hole, only a count that is too low; it tells where to begin
to look, and no more. Entries begin with a word of their writer's own, for two equal ones are two.

A call makes one to three requests of the store, however many ranks it is about, unless it says otherwise.
"""

import contextlib
import itertools
import json
import math
import uuid
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Self

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from hyperpod_plugins.elastic.store.etcd import EtcdStore
from hyperpod_plugins.elastic.store.records import FailureRecord
from hyperpod_plugins.elastic.store.world import WorldPlan
from hyperpod_plugins.env import JobEnv

# Many keys of a c10d store in few requests, without waiting for those that are missing as `multi_get` does.


def read_key(store: Store, key: str) -> bytes | None:
    """Value of a key, or None."""
    return store.get(key) if store.check([key]) else None


def read_keys(store: Store, keys: Sequence[str]) -> dict[str, bytes]:
    """Values of those keys that are there: two requests if all are, a few more for each one that is missing.

    Nobody may delete them meanwhile.
    """
    found = present_keys(store, keys)
    return dict(zip(found, store.multi_get(found), strict=True)) if found else {}


def present_keys(store: Store, keys: Sequence[str]) -> list[str]:
    """Which keys are there, by halving: a store says of many at once only whether it has them all."""
    if not keys or store.check(list(keys)):
        return list(keys)
    if len(keys) == 1:
        return []
    half = len(keys) // 2
    return present_keys(store, keys[:half]) + present_keys(store, keys[half:])


BEGUN_KEY = "begun"
"""Name of the value that a member leaves when its first step begins."""
RAISED_KEY = "raised"
"""Name, before a place, of the value that a member leaves when a loop's body raises: class and first line of that."""
_ARMED_KEY, _ARMED, _DISARMED, _TOO_LATE = "value/armed", "1", "over", "0"
_KILLS = "kills"
_REPLACED = "replaced"
_VOID = b"void"
GAVE_UP_KEY = "gave_up"
"""Name of the value, an Failure, that a member leaves when nobody is to be replaced any more."""
RESTART_KEY = "restart"
"""Name of the value, a `JobRestart`, that a member leaves when only a restart of all processes can help."""


class JobStore:
    """One connection to the job store of a job; not to be shared between threads that wait."""

    def __init__(self, store: Store, lasting: Store | None = None) -> None:
        """Use `store`, whose keys belong to this round of the job alone, and `lasting` for what outlives it."""
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
        """Open a connection of one's own to the store of the job.

        Raises:
            DistNetworkError: nobody answers there within `timeout_s` seconds.
        """
        return cls.of(job.run_id, connect_store(job, timeout_s))

    @classmethod
    def of(cls, run_id: str, store: Store) -> Self:
        """The job store of a job in a store that serves other ends, too."""
        return cls(PrefixStore(f"hyperpod/{run_id}", store), PrefixStore("hyperpod_lasting", store))

    def store(self, name: str) -> Store:
        """A part of the job store's store for other uses, such as the meeting of process groups."""
        return PrefixStore(name, self._store)

    # -- processes ----------------------------------------------------------------------------------------------

    def incarnation(self, rank: int) -> int:
        """Number of the process that is, or is about to be, in this rank's place."""
        return self._store.add(f"incarnation/{rank}", 0)

    def incarnations(self, ranks: Sequence[int]) -> list[int]:
        """`incarnation` of several ranks, as far as their agents have told; reads what is new on this connection."""
        replaced = self.listed(_REPLACED)
        for text in replaced[self._replacements_seen :]:
            rank, incarnation = map(int, text.split())
            self._replaced[rank] = max(incarnation, self._replaced.get(rank, 0))
        self._replacements_seen = len(replaced)
        return [self._replaced.get(rank, 0) for rank in ranks]

    def next_incarnation(self, rank: int) -> int:
        """Count one more process in this rank's place; what an earlier one said is void from now on.

        An agent that is lost in the middle has counted a process that was never started, and of which nobody hears:
        whoever voids the places of its node counts one more.
        """
        incarnation = self._store.add(f"incarnation/{rank}", 1)
        self.append(_REPLACED, lambda _: f"{rank} {incarnation}")
        return incarnation

    def record_exit(self, failure: FailureRecord) -> None:
        """Say how a process ended."""
        self._store.set(f"exit/{failure.worker_id}/{failure.incarnation}", failure.to_json())

    def exit_of(self, rank: int, incarnation: int) -> FailureRecord | None:
        """How a process ended, once its agent has said so."""
        text = self._read(f"exit/{rank}/{incarnation}")
        return None if text is None else FailureRecord.from_json(text)

    # -- generations --------------------------------------------------------------------------------------------

    def end(self, generation: int, failure: FailureRecord) -> FailureRecord:
        """End a generation, unless it has ended; returns the failure that ended it."""
        return FailureRecord.from_json(self._store.compare_set(f"end/{generation}", "", failure.to_json()))

    def ended(self, generation: int) -> FailureRecord | None:
        """What ended a generation, or None while it lasts."""
        text = self._read(f"end/{generation}")
        return None if text is None else FailureRecord.from_json(text)

    def wait_ended(self, generation: int, timeout_s: float) -> FailureRecord | None:
        """Wait until a generation has ended, for at most `timeout_s` seconds."""
        with contextlib.suppress(RuntimeError):  # a timeout; a lost connection shows in the next call
            self._store.wait([f"end/{generation}"], timedelta(seconds=timeout_s))
        return self.ended(generation)

    def generation(self, at_least: int = 0) -> int:
        """The first generation, from `at_least` on, that has not ended: it may be running, or about to be formed."""
        generation = at_least
        while self._store.check([f"end/{generation}"]):
            generation += 1
        return generation

    def propose_world(self, world: WorldPlan) -> WorldPlan:
        """Plan the world of a number, unless somebody has; returns the plan that counts. It begins with an `end`."""
        return WorldPlan.from_json(self._store.compare_set(f"world/{world.number}", "", world.to_json()))

    def world(self, number: int) -> WorldPlan | None:
        """The world of a number, from 1 on, once it is planned."""
        text = self._read(f"world/{number}")
        return None if text is None else WorldPlan.from_json(text)

    def world_number(self, generation: float = math.inf) -> int:
        """Number of the world that a generation is formed for: the last to begin with the end of an earlier one.

        Where worlds are planned at all, it reads the end of each generation since the last call on this connection.

        Args:
            generation: its number; by default the one that is running, or is about to be formed.
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
        """The worlds after that of the founders that have begun."""
        self.world_number()
        return list(self._history)

    def wait_planned(self, generation: int, timeout_s: float) -> bool:
        """Wait until a generation has a plan, for at most `timeout_s` seconds; whether it has one."""
        with contextlib.suppress(RuntimeError):  # a timeout; a lost connection shows in the next call
            self._store.wait([f"plan/{generation}"], timedelta(seconds=timeout_s))
        return self._store.check([f"plan/{generation}"])

    def arrive(self, generation: int, rank: int, arrival: str) -> int:
        """Say that this process wants to be a member of a generation, and what it brings.

        Returns:
            How many have said so. When it is all ranks it is time to look; some may have been replaced since.
        """
        self._store.set(f"arrive/{generation}/{rank}", arrival)
        return self._store.add(f"arrived/{generation}", 1)

    def withdraw(self, generation: int, rank: int, arrival: str) -> None:
        """Put an arrival that nobody waits for in the place of one's own."""
        self._store.set(f"arrive/{generation}/{rank}", arrival)
        self._store.add(f"arrived/{generation}", -1)

    def num_arrived(self, generation: int) -> int:
        """What the last to arrive was told."""
        return self._store.add(f"arrived/{generation}", 0)

    def all_arrived(self, generation: int, ranks: Sequence[int]) -> bool:
        """Whether some process has arrived in the place of each rank."""
        return self._store.check([f"arrive/{generation}/{rank}" for rank in ranks])

    def arrivals(self, generation: int, ranks: Sequence[int]) -> dict[int, str]:
        """Who has arrived so far; takes more requests where some have not."""
        keys = {f"arrive/{generation}/{rank}": rank for rank in ranks}
        return {keys[key]: text.decode() for key, text in read_keys(self._store, list(keys)).items()}

    def void_plan(self, generation: int) -> None:
        """Say that a generation has ended, so that nobody waits for its plan for ever."""
        self._store.compare_set(f"plan/{generation}", "", _VOID.decode())

    def propose(self, generation: int, members: Mapping[int, str]) -> dict[int, str] | None:
        """Propose the members of a generation; returns the plan that counts, the first; None if it has ended."""
        packed: Any = _pack(members)  # bytes are taken, too
        found = self._store.compare_set(f"plan/{generation}", "", packed)
        return None if found == _VOID else _unpack(found)

    def plan(self, generation: int) -> dict[int, str] | None:
        """The plan of a generation, once there is one: what each member brings."""
        packed = read_key(self._store, f"plan/{generation}")
        return None if packed is None or packed == _VOID else _unpack(packed)

    # -- whether the members recover ----------------------------------------------------------------------------

    @property
    def is_armed(self) -> bool:
        """Whether members have something to recover, and take part in doing so."""
        return self._read(_ARMED_KEY) == _ARMED

    @property
    def was_armed(self) -> bool:
        """Whether members had something to recover, and all of it has come to its end."""
        return self._read(_ARMED_KEY) == _DISARMED

    def arm(self) -> bool:
        """Say that this member has something to recover; False where an agent has decided that all begin again."""
        return self._become(_ARMED)

    def arm_again(self) -> None:
        """Void the decision that all begin again, where no agent has acted on it in good time."""
        self._store.compare_set(_ARMED_KEY, _TOO_LATE, _ARMED)

    def disarm(self) -> None:
        """Take that back: what was to be recovered has come to its end."""
        self._store.compare_set(_ARMED_KEY, _ARMED, _DISARMED)

    def end_unarmed(self) -> bool:
        """Decide that all begin again, for nobody has anything to recover; False where somebody has, by now."""
        return self._become(_TOO_LATE)

    def _become(self, state: str) -> bool:
        """Whether `value/armed` is `state` now: it was already, or nothing stood in the way."""
        found = self._store.compare_set(_ARMED_KEY, "", state)
        if found == _DISARMED.encode():
            found = self._store.compare_set(_ARMED_KEY, _DISARMED, state)
        return found == state.encode()

    # -- requests and news --------------------------------------------------------------------------------------

    def ask_to_kill(self, rank: int, incarnation: int) -> None:
        """Ask the agent of a rank to end its process."""
        self.append(_KILLS, lambda _: f"{rank} {incarnation}")

    def new_kills(self) -> list[tuple[int, int]]:
        """Requests `(rank, incarnation)` since the last call on this connection."""
        kills = self.listed(_KILLS)
        new, self._kills_seen = kills[self._kills_seen :], len(kills)
        return [(int(rank), int(incarnation)) for rank, incarnation in map(str.split, new)]

    def heartbeat(self, rank: int, news: Mapping[str, Any]) -> None:
        """Tell where this process is."""
        self._store.set(f"beat/{rank}", json.dumps(news))

    def heartbeats(self, ranks: Sequence[int]) -> dict[int, dict[str, Any]]:
        """What each process told last."""
        keys = {f"beat/{rank}": rank for rank in ranks}
        return {keys[key]: json.loads(text) for key, text in read_keys(self._store, list(keys)).items()}

    def set(self, name: str, value: bytes) -> None:
        """Leave a value for others."""
        self._store.set(f"value/{name}", value)  # pyright: ignore[reportArgumentType]: bytes are taken, too

    def set_if_absent(self, name: str, value: bytes) -> None:
        """Leave a value for others, unless somebody has."""
        self._store.compare_set(f"value/{name}", "", value.decode())

    def raise_to(self, name: str, number: int) -> int:
        """Leave a number for others, unless a higher one is there; returns the higher of the two."""
        while True:
            found = self.try_get(name)
            if found is not None and int(found) >= number:
                return int(found)
            self._store.compare_set(f"value/{name}", "" if found is None else found.decode(), str(number))

    def set_lasting(self, name: str, value: bytes) -> None:
        """Leave a value for others that the later rounds of the job find, too."""
        self._lasting.set(name, value)  # pyright: ignore[reportArgumentType]: bytes are taken, too

    def try_get_lasting(self, name: str) -> bytes | None:
        """Read a value of this round or an earlier one, if it is there."""
        return read_key(self._lasting, name)

    def wait_get(self, name: str, timeout_s: float) -> bytes:
        """Read a value, waiting until somebody has left it.

        Raises:
            DistStoreError: nobody did within `timeout_s` seconds.
        """
        key = f"value/{name}"
        self._store.wait([key], timedelta(seconds=timeout_s))
        return self._store.get(key)

    def try_get(self, name: str) -> bytes | None:
        """Read a value if it is there."""
        return read_key(self._store, f"value/{name}")

    def has_all(self, names: Sequence[str]) -> bool:
        """Whether all these values are there."""
        return self._store.check([f"value/{name}" for name in names])

    def try_get_all(self, names: Sequence[str]) -> dict[str, bytes]:
        """Read those values that are there, and that nobody forgets meanwhile; more requests where some are not."""
        found = read_keys(self._store, [f"value/{name}" for name in names])
        return {key.removeprefix("value/"): value for key, value in found.items()}

    def count(self, name: str, more: int = 0) -> int:
        """Add to a counter, which begins at 0; returns what it is now."""
        return self._store.add(f"count/{name}", more)

    def append(self, name: str, entry_of: Callable[[int], str]) -> int:
        """Add an entry to a list; returns its number, from 1 on.

        Args:
            name: of the list.
            entry_of: makes the entry, given its number; called again with the next one where others are faster.
        """
        number = self._store.add(f"listed/{name}", 0)
        while True:
            number += 1
            text = f"{self._writer}.{next(self._num_written)} {entry_of(number)}"
            if self._store.compare_set(f"list/{name}/{number}", "", text).decode(errors="replace") == text:
                break
        self._store.add(f"listed/{name}", 1)
        return number

    def listed(self, name: str) -> Sequence[str]:
        """All entries of a list, in order; reads those that are new on this connection: one request where none are."""
        known = self._known[name]
        if self._store.check([f"list/{name}/{len(known) + 1}"]):
            last = max(len(known) + 1, self._store.add(f"listed/{name}", 0))
            keys = [f"list/{name}/{number}" for number in range(len(known) + 1, last + 1)]
            found = read_keys(self._store, keys)
            known += [
                found[key].decode(errors="replace").partition(" ")[2]
                for key in itertools.takewhile(found.__contains__, keys)
            ]
            while (text := self._read(f"list/{name}/{len(known) + 1}")) is not None:  # not counted yet, or never
                known.append(text.partition(" ")[2])
        return known

    def delete(self, name: str) -> None:
        """Drop a value that nobody needs any more."""
        self._store.delete_key(f"value/{name}")

    def _read(self, key: str) -> str | None:
        value = read_key(self._store, key)
        return None if value is None else value.decode(errors="replace")


def connect_store(job: JobEnv, timeout_s: float) -> Store:
    """A connection to the store of a job, wherever that is.

    Raises:
        DistNetworkError: nobody answers there within `timeout_s` seconds; of etcd that is found out later.
    """
    if job.etcd_url:
        return EtcdStore(job.etcd_url, timeout_s)
    timeout = timedelta(seconds=timeout_s)
    return TCPStore(job.store_host, job.store_port, is_master=False, wait_for_workers=False, timeout=timeout)


def _pack(members: Mapping[int, str]) -> bytes:
    """Most members bring the same, so: for each thing brought, who brings it."""
    ranks: defaultdict[str, list[int]] = defaultdict(list)
    for rank, brought in sorted(members.items()):
        ranks[brought].append(rank)
    return zlib.compress(json.dumps(ranks).encode(), level=1)


def _unpack(packed: bytes) -> dict[int, str]:
    ranks: dict[str, list[int]] = json.loads(zlib.decompress(packed))
    return {rank: brought for brought, those in ranks.items() for rank in those}
