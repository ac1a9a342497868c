"""`JobWatch`: reads a running job again and again in a thread, so a store that does not answer blocks no key.

It reads the job store as agents and members do, a few requests at each look for any number of ranks, and writes
nothing there: a request for each look, as `hyperpod status` makes one, would stay in the store for as long as the job
lasts. Only `ask_to_kill` writes, as a member does that has found a hanging rank.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import Store
from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from hyperpod_plugins.elastic.membership.admission import job_status, world_or_none
from hyperpod_plugins.elastic.rendezvous.control import Ticket
from hyperpod_plugins.elastic.rendezvous.store import RendezvousStore, name_of_round
from hyperpod_plugins.elastic.store.job_store import JobStore
from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.recovery.watchdog import HEARTBEATS_MISSED_S, Heartbeat, HeartbeatAges
from hyperpod_plugins.report.live import MAX_RANKS, JobReading, JobView, RankView, StepRate, heartbeat_from, job_view
from hyperpod_plugins.report.live_ledgers import LiveLedgers

_MALFORMED = (ValueError, TypeError, KeyError, OverflowError, RecursionError)
_LOST = (DistError, RendezvousConnectionError)
_MAX_EXITS_READ = 16
"""Ranks at a look of which it is read whether their processes have ended, a request each."""
_HANGS_S = 5.0
"""A look takes some milliseconds."""
WATCHING = "hyperpod-watch"
"""Name of the thread that reads the store."""
_STOP_S = 1.0
RETRY_S = 60.0
"""How long a store that does not answer is asked again."""


class JobWatch:
    """Watches the job of a ticket. Use either `look`, or `start` and `view`; `look` is for one thread."""

    def __init__(self, ticket: Ticket, events: str = "", *, interval_s: float = 1.0) -> None:
        """Connect to nothing yet.

        Args:
            ticket: of the job.
            events: folder of its ledgers; empty for the one that the ticket names.
            interval_s: seconds between two updates.
        """
        self._ticket, self._interval_s = ticket, interval_s
        self._had_file = ticket.path.exists()
        self._events = events or ticket.events
        self._ledgers = LiveLedgers(Path(self._events)) if self._events else None
        self._store: Store | None = None
        self._rdzv_store: RendezvousStore | None = None
        self._round, self._job_store = -1, None
        self._ages, self._rate = HeartbeatAges(), StepRate()
        self._kills: queue.SimpleQueue[RankView] = queue.SimpleQueue()
        self._is_stopped, self._is_due = threading.Event(), threading.Event()
        self._lost_since_s: float | None = None
        """When the store was first found not to answer."""
        self._looking_since_s: float | None = None
        """When the present look began; None between two."""
        self._view = JobView(run_id=ticket.run_id, state="starting", message="waiting for the job's store")
        self._is_given_up = False
        self._thread: threading.Thread | None = None

    @property
    def events(self) -> str:
        """Folder of the ledgers; empty if none is known."""
        return self._events

    @property
    def view(self) -> JobView:
        """The last view; it says if the store has not answered since."""
        if self._has_failed:
            return self._view.unreachable("the thread that reads the job's store has failed; start this command again")
        hangs_s = self._hangs_s()
        if hangs_s <= _HANGS_S or self._view.state == "unreachable":
            return self._view
        return self._view.unreachable(f"the job's store has not answered for {hangs_s:.0f} s")

    @property
    def is_given_up(self) -> bool:
        """Whether the store has not answered for so long that it is not worth the wait."""
        return self._is_given_up or self._has_failed or self._hangs_s() > RETRY_S

    @property
    def _has_failed(self) -> bool:
        """Whether the thread has ended by an exception."""
        is_over = self._is_given_up or self._is_stopped.is_set() or self._view.state == "ended"
        return self._thread is not None and not self._thread.is_alive() and not is_over

    def _hangs_s(self) -> float:
        since_s = self._looking_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name=WATCHING, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; one whose store does not answer is left."""
        self._is_stopped.set()
        self._is_due.set()
        if self._thread is not None:
            self._thread.join(_STOP_S)

    def ask_to_kill(self, rank: RankView) -> None:
        """Ask the agent of this rank to kill the process that was shown, soon and not in this thread."""
        self._kills.put(rank)
        self._is_due.set()

    def _run(self) -> None:
        while not self._is_stopped.is_set() and not self._is_given_up and self._view.state != "ended":
            self.look()
            self._is_due.wait(self._interval_s)
            self._is_due.clear()

    def look(self) -> JobView:
        """Read the job once; the view says if its store does not answer."""
        self._looking_since_s = time.monotonic()
        try:
            self._view = self._look()
            self._lost_since_s = None
        except _LOST as error:
            self._view = self._without_store(str(error).partition("\n")[0])
        except _MALFORMED as error:
            self._view = self._view.unreachable(
                f"the job's store holds a value that no process of a job writes: {error}"
            )
        finally:
            self._looking_since_s = None
        return self._view

    def _look(self) -> JobView:
        job_store = self._connected()
        rdzv_store = self._rdzv_store
        assert rdzv_store is not None
        closing = rdzv_store.closing()
        if closing is not None:
            how = "normally" if closing.is_success else closing.cause
            return self._view.ended(f"the job has ended: {how}")
        if self._had_file and not self._ticket.path.exists():
            return self._view.ended("the job, or its agent on this machine, has ended")
        with contextlib.suppress(queue.Empty):
            while True:
                rank = self._kills.get_nowait()
                job_store.ask_to_kill(rank.worker_id, rank.incarnation)
        return job_view(self._read(job_store))

    def _connected(self) -> JobStore:
        """The job store of the present round; connects if that is necessary."""
        if self._store is None or self._rdzv_store is None:
            self._store = self._ticket.connect()
            self._rdzv_store, self._round = RendezvousStore(self._store), -1
        number = self._rdzv_store.round(max(self._round, 0))
        if number != self._round or self._job_store is None:
            self._round = number
            self._job_store = JobStore.from_store(name_of_round(self._ticket.run_id, number), self._store)
            self._ages, self._rate = HeartbeatAges(), StepRate()
        return self._job_store

    def _read(self, job_store: JobStore) -> JobReading:
        status, world = job_status(job_store), world_or_none(job_store)
        worker_ids = () if world is None else world.worker_ids[:MAX_RANKS]
        incarnations = dict(zip(worker_ids, job_store.incarnations(worker_ids), strict=True))
        heartbeats = valid_heartbeats(job_store, worker_ids)
        now_s = time.monotonic()
        silent_s = self._ages.update(heartbeats, now_s)
        committed = [each.committed for each in heartbeats.values() if each.committed >= 0]
        figures = None if self._ledgers is None else self._ledgers.read(now_s)
        silent = [
            each
            for each in worker_ids
            if each not in heartbeats
            or heartbeats[each].incarnation < incarnations[each]
            or silent_s[each] > HEARTBEATS_MISSED_S / 2
        ]
        return JobReading(
            run_id=self._ticket.run_id,
            status=status,
            round=self._round,
            worker_ids=worker_ids,
            incarnations=incarnations,
            heartbeats=heartbeats,
            silent_s=silent_s,
            exited=frozenset(
                each for each in silent[:_MAX_EXITS_READ] if job_store.exit_of(each, incarnations[each]) is not None
            ),
            steps_per_s=self._rate.update(max(committed, default=None), now_s),
            events=self._events,
            figures=figures,
        )

    def _without_store(self, why: str) -> JobView:
        """The store does not answer: the job has ended, or this process tries again."""
        self._store = self._rdzv_store = self._job_store = None
        if self._had_file and not self._ticket.path.exists():
            return self._view.ended("the job has ended")
        now_s = time.monotonic()
        since_s = self._lost_since_s = now_s if self._lost_since_s is None else self._lost_since_s
        if self._ticket.is_stale and not self._ticket.etcd_url:
            self._is_given_up = True
            return self._view.unreachable("the agent that served the job's store was killed, and the job ended with it")
        self._is_given_up = now_s - since_s > RETRY_S
        return self._view.unreachable(f"the job's store has not answered for {now_s - since_s:.0f} s: {why}")


def valid_heartbeats(job_store: JobStore, worker_ids: Sequence[int]) -> dict[int, Heartbeat]:
    """The last heartbeat of each worker that has sent a valid one."""
    found: dict[int, Any] = {}
    try:
        found = job_store.heartbeats(worker_ids)
    except (ValueError, RecursionError):  # one of them is damaged; find out which
        for each in worker_ids:
            with contextlib.suppress(ValueError, RecursionError):
                found |= job_store.heartbeats([each])
    checked = {worker_id: heartbeat_from(values) for worker_id, values in found.items()}
    return {worker_id: each for worker_id, each in checked.items() if each is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchOptions:
    """Which job to watch, and how often to look."""

    run_id: str | None = None
    """The job's `--rdzv-id`; None for the only job whose store this machine serves."""
    events: str | None = None
    """Folder of its ledgers; None for the one that the job's agent has told."""
    interval_s: float = 1.0

    def __post_init__(self) -> None:
        """Check the values."""
        if not 0.1 <= self.interval_s <= 3600:
            raise ConfigError(f"--interval={self.interval_s:g} must be between 0.1 and 3600 seconds.")
        if self.events is not None and not Path(self.events).is_dir():
            raise ConfigError(
                f"--events={self.events} is not a folder. Give the value of HYPERPOD_EVENTS of the job's processes."
            )

    def watch(self) -> JobWatch:
        """Find the job.

        Raises:
            ConfigError: there is none, or several.
        """
        return JobWatch(Ticket.find(self.run_id), self.events or "", interval_s=self.interval_s)


def look_twice(watch: JobWatch, between_s: float = 1.5) -> JobView:
    """Look at a job twice, since ages of heartbeats and the step rate need two looks.

    Raises:
        ConfigError: its store does not answer.
    """
    view = watch.look()
    if view.state not in ("ended", "unreachable"):
        until_s = time.monotonic() + between_s
        while time.monotonic() < until_s or (view.part_read < 1.0 and view.state == "running"):
            time.sleep(max(0.0, until_s - time.monotonic()))
            view = watch.look()
    if view.state == "unreachable":
        raise ConfigError(f"{view.message}.")
    return view
