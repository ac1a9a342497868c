"""Where the agents of a job meet: a store at the rendezvous's endpoint, served by an agent of that host.

The other kind, where no agent serves it, is in `etcd_endpoint.py`.
"""

import abc
import threading
import time
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousTimeoutError,
    utils,
)

from hyperpod_plugins.elastic.limits import allow_connections
from hyperpod_plugins.elastic.roster import Roster
from hyperpod_plugins.elastic.slots import Seat
from hyperpod_plugins.env import JobEnv

_DEFAULT_PORT = 29400
_POLL_S = 0.1
_SERVED_S = 60.0
"""Longest wait for the workers' store of a round."""
ANSWER_S = 60.0
"""Longest wait for the answer to one question."""


class Endpoint(abc.ABC):
    """The way to the stores of a job: that of its agents and ledger, and in each round one of the workers' own."""

    serves_store = False
    """Whether this process serves the store, and takes it along when it ends."""
    answers_in_time = False
    """Whether a request that gets no answer ends by itself with an error, before TCP gives up."""
    takes_requests = True
    """Whether this process answers `hyperpod scale` and `hyperpod status`."""

    @abc.abstractmethod
    def connect(self) -> Store:
        """Open a connection of one's own to the store.

        Raises:
            RendezvousConnectionError: nobody answers there.
        """

    @abc.abstractmethod
    def job(self, run_id: str) -> JobEnv:
        """What workers need to know to reach the ledger of that name."""

    @abc.abstractmethod
    def tend(self, number: int, roster: Roster) -> None:
        """Do what the store needs done about once a second, and in each round."""

    @abc.abstractmethod
    def workers_store(self, seat: Seat, roster: Roster) -> tuple[str, int]:
        """Host and port of the workers' store of a round.

        Raises:
            RendezvousTimeoutError: nobody serves it.
        """

    @abc.abstractmethod
    def newcomers_store(self, number: int) -> tuple[str, int] | None:
        """The same for processes that take the places of lost ones in that round; None for the same as `workers_store`.

        Their groups are detached until they meet the others in the ledger's store, so any will do.
        """

    @abc.abstractmethod
    def loss(self, error: Exception) -> RendezvousConnectionError:
        """What is to be raised when the store does not answer any more."""

    @abc.abstractmethod
    def must_outlast_others(self, *, job_is_over: bool) -> bool:
        """Whether this process is to leave after those that still use the store."""

    @abc.abstractmethod
    def clear(self) -> None:
        """All others have left: what they have written is not needed any more."""


class ServedEndpoint(Endpoint):
    """A store that one agent serves; whoever serves it also serves the workers' store of each round."""

    def __init__(self, host: str, port: int, server: Store | None = None, timeout_s: float = ANSWER_S) -> None:
        """Take what `open_served` found.

        Args:
            host: where the store is.
            port: the same.
            server: the store, where this process serves it.
            timeout_s: longest wait for the agent that serves it.
        """
        self.host = host
        self.port = port
        self.server = server
        self.serves_store = self.takes_requests = server is not None
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._servers: dict[int, TCPStore] = {}

    def __str__(self) -> str:
        """HOST:PORT."""
        return f"{self.host}:{self.port}"

    def connect(self) -> Store:
        """See `Endpoint`."""
        timeout = timedelta(seconds=self._timeout_s)
        try:
            store = TCPStore(self.host, self.port, is_master=False, wait_for_workers=False, timeout=timeout)
        except DistError as error:
            raise RendezvousConnectionError(
                f"no agent answers at {self} after {self._timeout_s:.0f} s ({error}). Start one on that host, or say "
                "on which node to serve the store with --rdzv-conf=is_host=1."
            ) from error
        store.set_timeout(timedelta(seconds=ANSWER_S))
        return store

    def job(self, run_id: str) -> JobEnv:
        """See `Endpoint`."""
        return JobEnv(store_host=self.host, store_port=self.port, run_id=run_id)

    def tend(self, number: int, roster: Roster) -> None:
        """Serve the workers of a round a store of their own: keys of an earlier one would lead them astray."""
        if self.server is None:
            return
        with self._lock:
            if number not in self._servers:
                self._servers[number] = TCPStore(self.host, 0, is_master=True, wait_for_workers=False)
                roster.serve(number, self._servers[number].port)
                self._servers.pop(number - 2, None)  # the last one's workers may still be ending

    def workers_store(self, seat: Seat, roster: Roster) -> tuple[str, int]:
        """See `Endpoint`."""
        deadline_s = time.monotonic() + _SERVED_S
        while (port := roster.port(seat.number)) is None:
            if time.monotonic() > deadline_s:
                raise RendezvousTimeoutError(
                    f"no agent of {self.host} has served the workers of round {seat.number} a store within "
                    f"{_SERVED_S:.0f} s. Is that host overloaded?"
                )
            time.sleep(_POLL_S)
        return self.host, port

    def newcomers_store(self, number: int) -> tuple[str, int] | None:
        """See `Endpoint`."""
        return None

    def loss(self, error: Exception) -> RendezvousConnectionError:
        """See `Endpoint`."""
        return RendezvousConnectionError(
            f"the store at {self} does not answer any more ({error}). The agent that served it is gone, and the job "
            "with it: start all nodes again."
        )

    def must_outlast_others(self, *, job_is_over: bool) -> bool:
        """See `Endpoint`."""
        return self.serves_store

    def clear(self) -> None:
        """See `Endpoint`."""


def open_served(parameters: RendezvousParameters, timeout_s: float) -> ServedEndpoint:
    """Serve the store, if the endpoint is this host's and nobody serves it yet, or find the way to it.

    Args:
        parameters: of the rendezvous; `is_host` in `--rdzv-conf` says what cannot be found out from names.
        timeout_s: longest wait for the agent that serves it.

    Raises:
        RendezvousConnectionError: this node is told to serve the store, and cannot.
    """
    host, port = utils.parse_rendezvous_endpoint(parameters.endpoint, default_port=_DEFAULT_PORT)
    is_told = parameters.get_as_bool("is_host")
    is_here = is_told if is_told is not None else utils._matches_machine_hostname(host)  # pyright: ignore  (as c10d asks)
    server = _serve(host, port, is_told) if is_here else None
    return ServedEndpoint(host, port if server is None else server.port, server, timeout_s)


def _serve(host: str, port: int, is_told: bool | None) -> TCPStore | None:
    allow_connections()
    try:
        return TCPStore(host, port, is_master=True, wait_for_workers=False)
    except DistError as error:
        if is_told:
            raise RendezvousConnectionError(f"the store cannot be served at {host}:{port}: {error}") from error
        return None  # another agent of this host does
