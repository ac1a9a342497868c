"""The store of a job: `ServedStoreBackend`, a store that one agent serves at the rendezvous endpoint, or etcd.

With etcd no agent serves the store, so any of them may be lost.

Workers have one more store, torch's own, which `init_process_group` of the program uses before its groups recover.
With `ServedStoreBackend`, the agent that serves the store serves this one too, a new one for each round. With etcd,
each agent serves one, and the initial workers of a round use the one that is announced first. It may be lost later:
from the first step on, groups meet in etcd. Joiners use that of their own agent, as their groups meet no peers before
they join. See `docs/design/etcd.md`.
"""

import abc
import queue
import socket
import threading
import time
from dataclasses import dataclass, replace
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousTimeoutError,
    utils,
)
from torch.distributed.elastic.utils.logging import get_logger

from hyperpod_plugins.elastic.process import raise_open_file_limit
from hyperpod_plugins.elastic.rendezvous.slots import NodeAssignment
from hyperpod_plugins.elastic.rendezvous.store import RendezvousStore
from hyperpod_plugins.elastic.store.etcd import LEASE_S, EtcdStore, EtcdUrl
from hyperpod_plugins.env import JobEnv

logger = get_logger(__name__)

_DEFAULT_PORT = 29400
CONNECTING = "hyperpod-connect"
"""Name of threads that connect to a store: torch's client may block one for long, and nothing can interrupt it."""
_POLL_S = 0.1
_REPORT_S = 10.0
"""Seconds between two reports of an agent that waits for the store."""
_ATTEMPT_S = 5.0
"""Longest wait for one connection."""
_RETRY_S = 0.2
_LOOPBACK = ("localhost", "127.0.0.1")
_BACKLOG = 4096
_MAX_REFUSALS = 5
"""Number of refused connections in a row that show that a store that was there is gone."""
_SERVED_S = 60.0
"""Longest wait for the workers' store of a round."""
ANSWER_S = 60.0
"""Longest wait for the answer to one request."""
_SLACK_S = 30.0
"""Added to the tolerated silence of the store for the wait for a key, so that an existing key never times out."""


class StoreBackend(abc.ABC):
    """Access to the stores of a job: that of agents and job store, and torch's own store of workers in each round."""

    serves_store = False
    """Whether this process serves the store, so that the store ends with it."""
    answers_in_time = False
    """Whether a request without an answer fails by itself, before TCP gives up."""
    takes_requests = True
    """Whether this process answers `hyperpod scale` and `hyperpod status`."""

    @abc.abstractmethod
    def connect(self) -> Store:
        """Open a new connection to the store.

        Raises:
            RendezvousConnectionError: the store does not answer.
        """

    @abc.abstractmethod
    def job(self, run_id: str) -> JobEnv:
        """Address of the job store of that name, for workers."""

    @abc.abstractmethod
    def keep_alive(self, number: int, rdzv_store: RendezvousStore) -> None:
        """Maintain the store; called about once a second and at the start of each round.

        Args:
            number: number of the present round.
            rdzv_store: connection of the calling thread.
        """

    @abc.abstractmethod
    def workers_store(self, assignment: NodeAssignment, rdzv_store: RendezvousStore) -> tuple[str, int]:
        """Host and port of the workers' own store in a round.

        Raises:
            RendezvousTimeoutError: no agent serves it in time.
        """

    @abc.abstractmethod
    def joiners_store(self, number: int) -> tuple[str, int] | None:
        """The same for replacements of lost workers in that round; None if it is that of `workers_store`.

        Any store will do: their groups are detached until they meet the others in the job's store.
        """

    @abc.abstractmethod
    def loss(self, error: Exception) -> RendezvousConnectionError:
        """The error to raise when the store no longer answers."""

    @abc.abstractmethod
    def must_outlast_others(self, *, job_is_over: bool) -> bool:
        """Whether this process must not leave before the others that use the store."""

    @abc.abstractmethod
    def clear(self) -> None:
        """Delete the keys of the job; called when all other nodes have left."""


class ServedStoreBackend(StoreBackend):
    """A `TCPStore` that one agent serves; the same agent also serves the workers' store of each round."""

    def __init__(
        self, host: str, port: int, server: Store | None = None, timeout_s: float = ANSWER_S, answer_s: float = ANSWER_S
    ) -> None:
        """Use the store that `open_served` found.

        Args:
            host: host of the store.
            port: port of the store.
            server: the store, if this process serves it.
            timeout_s: longest wait in seconds for the agent that serves it.
            answer_s: longest silence of the store in seconds that is tolerated.
        """
        self._answer_s = answer_s
        self.host = host
        self.port = port
        self.server = server
        self.serves_store = self.takes_requests = server is not None
        self._timeout_s = timeout_s
        self._was_reached = server is not None
        self._lock = threading.Lock()
        self._servers: dict[int, TCPStore] = {}

    def __str__(self) -> str:
        """HOST:PORT."""
        return f"{self.host}:{self.port}"

    def connect(self) -> Store:
        """See `StoreBackend`."""
        timeout_s = self._answer_s if self._was_reached else self._timeout_s
        store = connect_served(self.host, self.port, timeout_s, was_reached=self._was_reached)
        self._was_reached = True
        store.set_timeout(timedelta(seconds=self._answer_s + _SLACK_S))
        return store

    def job(self, run_id: str) -> JobEnv:
        """See `StoreBackend`."""
        return JobEnv(store_host=self.host, store_port=self.port, run_id=run_id)

    def keep_alive(self, number: int, rdzv_store: RendezvousStore) -> None:
        """Serve a new workers' store in each round, as keys of an earlier round would mislead them."""
        if self.server is None:
            return
        with self._lock:
            if number not in self._servers:
                self._servers[number] = serve_store(self.host, 0)
                rdzv_store.publish_port(number, self._servers[number].port)
                self._servers.pop(number - 2, None)  # the last one's workers may still be ending

    def workers_store(self, assignment: NodeAssignment, rdzv_store: RendezvousStore) -> tuple[str, int]:
        """See `StoreBackend`."""
        deadline_s = time.monotonic() + _SERVED_S
        while (port := rdzv_store.port(assignment.round_number)) is None:
            if time.monotonic() > deadline_s:
                raise RendezvousTimeoutError(
                    f"no agent on {self.host} has served a store for the workers of round {assignment.round_number} "
                    f"within {_SERVED_S:.0f} s. Is that host overloaded?"
                )
            time.sleep(_POLL_S)
        return self.host, port

    def joiners_store(self, number: int) -> tuple[str, int] | None:
        """See `StoreBackend`."""
        return None

    def loss(self, error: Exception) -> RendezvousConnectionError:
        """See `StoreBackend`."""
        return RendezvousConnectionError(
            f"the store at {self} no longer answers ({error}). The agent that served it is gone, and the job has "
            "ended with it: restart all nodes."
        )

    def must_outlast_others(self, *, job_is_over: bool) -> bool:
        """See `StoreBackend`."""
        return self.serves_store

    def clear(self) -> None:
        """See `StoreBackend`."""


def connect_served(host: str, port: int, timeout_s: float, *, was_reached: bool) -> TCPStore:
    """Connect to a store that an agent serves; reports every 10 s what it waits for.

    The resolver and torch's client block in C, where Python runs no signal handler. They run in another thread, so
    that SIGTERM ends the wait of the main thread at once.

    Args:
        host: host of the store.
        port: port of the store.
        timeout_s: longest wait in seconds.
        was_reached: whether the store was there before, so that refused connections mean that it is gone for good.

    Raises:
        RendezvousConnectionError: the store did not answer in time, or is gone.
    """
    attempts, is_over = queue.SimpleQueue[TCPStore | _Failure](), threading.Event()

    def attempt() -> None:
        while not is_over.is_set():
            attempts.put(_attempt(host, port))
            is_over.wait(_RETRY_S)

    began_s = time.monotonic()
    next_report_s, num_refusals, why = began_s + 1.0, 0, "it accepts connections but does not answer"
    threading.Thread(target=attempt, name=CONNECTING, daemon=True).start()
    try:
        while (now_s := time.monotonic()) < began_s + timeout_s:
            try:
                found = attempts.get(timeout=max(0.0, min(next_report_s, began_s + timeout_s) - now_s))
            except queue.Empty:
                left_s = began_s + timeout_s - time.monotonic()
                logger.warning("waiting for the store at %s:%d, for %.0f s more: %s", host, port, left_s, why)
                next_report_s = time.monotonic() + _REPORT_S
                continue
            if not isinstance(found, _Failure):
                return found
            why, num_refusals = found.why, num_refusals + 1 if found.is_refused else 0
            if was_reached and num_refusals >= _MAX_REFUSALS:
                break
    finally:
        is_over.set()
    if was_reached and num_refusals:
        raise RendezvousConnectionError(
            f"the store at {host}:{port} is gone ({why}): the agent that served it has ended."
        )
    if was_reached:
        raise RendezvousConnectionError(
            f"the store at {host}:{port} has not answered for {timeout_s:.0f} s ({why}). If its machine or the "
            "network may be silent for longer, raise read_timeout of --rdzv-conf."
        )
    raise RendezvousConnectionError(
        f"no agent answers at {host}:{port} after {timeout_s:.0f} s ({why}). Start one on that host, or choose the "
        "node that serves the store with --rdzv-conf=is_host=1."
    )


def serve_store(host: str, port: int) -> TCPStore:
    """Serve a store on all addresses, or only on the loopback interface if `host` is `localhost` or 127.0.0.1.

    Raises:
        DistError: the port is taken.
        OSError: the port is taken.
    """
    if host not in _LOOPBACK:
        return TCPStore(host, port, is_master=True, wait_for_workers=False)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(_BACKLOG)
        chosen = listener.getsockname()[1]
        return TCPStore(host, chosen, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """Why an attempt to connect has failed."""

    why: str
    is_refused: bool = False
    """Whether the machine refused the connection, as nothing listens on the port."""


def _attempt(host: str, port: int) -> TCPStore | _Failure:
    """Try once to connect, first with a plain socket: torch's client logs too much when nothing listens."""
    try:
        socket.create_connection((host, port), _ATTEMPT_S).close()
        timeout = timedelta(seconds=_ATTEMPT_S)
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    except socket.gaierror as error:
        return _Failure(why=f"the name {host!r} does not resolve ({error.strerror})")
    except OSError as error:
        refused = isinstance(error, ConnectionRefusedError)
        return _Failure(why=f"no connection ({error.strerror or error})", is_refused=refused)
    except DistError as error:
        return _Failure(why=str(error).partition("\n")[0])


def open_served(parameters: RendezvousParameters, timeout_s: float, answer_s: float) -> ServedStoreBackend:
    """Serve the store if the endpoint is this host and no other process serves it; otherwise use the endpoint.

    A job of one node without an endpoint gets a free port, as no other node needs to find it. On torchelastic's
    default port, two such jobs on a host, which have the same default id, would be taken for one, and the second would
    end with exit code 0 without a step.

    Args:
        parameters: parameters of the rendezvous; `is_host` in `--rdzv-conf` decides if host names cannot.
        timeout_s: longest wait in seconds for the agent that serves the store.
        answer_s: longest silence of the store in seconds that is tolerated.

    Raises:
        RendezvousConnectionError: this node was told to serve the store and cannot.
    """
    is_alone = parameters.max_nodes == 1 and not parameters.endpoint.strip()
    host, port = utils.parse_rendezvous_endpoint(parameters.endpoint, default_port=0 if is_alone else _DEFAULT_PORT)
    is_told = parameters.get_as_bool("is_host")
    is_here = is_told if is_told is not None else utils._matches_machine_hostname(host)  # pyright: ignore  (as c10d asks)
    server = _serve(host, port, is_told) if is_here else None
    if server is not None and parameters.max_nodes > 1:
        logger.warning(
            "this node serves the store of the job: if it is lost, the job ends. With --rdzv-endpoint=etcd://HOST:PORT "
            "any node may be lost."
        )
    return ServedStoreBackend(host, port if server is None else server.port, server, timeout_s, answer_s)


def _serve(host: str, port: int, is_told: bool | None) -> TCPStore | None:
    raise_open_file_limit()
    try:
        return serve_store(host, port)
    except (DistError, OSError) as error:
        if is_told:
            raise RendezvousConnectionError(f"the store cannot be served at {host}:{port}: {error}") from error
        return None  # another agent on this host serves it


_FIRST_ANSWER_S = 10.0
"""Longest wait for the first answer; short, as etcd is expected to run before a job starts."""
_RENEWALS = 6
"""Renewals of the lease within its lifetime, `LEASE_S`."""


class EtcdStoreBackend(StoreBackend):
    """Keys in an etcd cluster, held by a lease that ends with the job."""

    answers_in_time = True

    def __init__(self, url: EtcdUrl, host: str) -> None:
        """Connect to the cluster, and open the lease of the job's keys.

        Args:
            url: members of the cluster, and the prefix of the job's keys.
            host: name or address at which other nodes reach this host.

        Raises:
            RendezvousConnectionError: no member answers, or the answer is not etcd's.
        """
        self.url = url
        self.host = host
        try:
            EtcdStore(url, _FIRST_ANSWER_S).open_lease()
        except DistError as error:
            raise RendezvousConnectionError(
                f"{error}. Start etcd (3.4 or later) there, or give the client addresses of its members with "
                "--rdzv-endpoint=etcd://HOST:PORT[,HOST:PORT...]."
            ) from error
        self._lease = EtcdStore(url, ANSWER_S)
        self._renewed_s = time.monotonic()
        self._lock = threading.Lock()
        self._servers: dict[int, TCPStore] = {}

    def __str__(self) -> str:
        """The URL."""
        return str(self.url)

    def connect(self) -> Store:
        """See `StoreBackend`."""
        return EtcdStore(self.url, ANSWER_S)

    def job(self, run_id: str) -> JobEnv:
        """See `StoreBackend`."""
        return JobEnv(etcd_url=str(self.url), run_id=run_id)

    def keep_alive(self, number: int, rdzv_store: RendezvousStore) -> None:
        """Renew the lease of the job's keys when it is due.

        Raises:
            RendezvousConnectionError: the lease has expired.
        """
        if time.monotonic() < self._renewed_s + LEASE_S / _RENEWALS:
            return
        if not self._lease.renew_lease():
            raise RendezvousConnectionError(
                f"the job's keys at {self} have expired, as no agent renewed their lease for {LEASE_S} s. "
                "Restart all nodes."
            )
        self._renewed_s = time.monotonic()

    def workers_store(self, assignment: NodeAssignment, rdzv_store: RendezvousStore) -> tuple[str, int]:
        """See `StoreBackend`."""
        host, port = self.joiners_store(assignment.round_number)
        if assignment.lease.number > 0:
            return host, port
        host, _, text = rdzv_store.first_master(assignment.round_number, f"{host}:{port}").rpartition(":")
        return host, int(text)

    def joiners_store(self, number: int) -> tuple[str, int]:
        """See `StoreBackend`."""
        with self._lock:
            if number not in self._servers:
                raise_open_file_limit()
                self._servers[number] = TCPStore(self.host, 0, is_master=True, wait_for_workers=False)
                self._servers.pop(number - 2, None)  # the last one's workers may still be ending
            return self.host, self._servers[number].port

    def loss(self, error: Exception) -> RendezvousConnectionError:
        """See `StoreBackend`."""
        return RendezvousConnectionError(f"the job's store no longer answers: {error}. Restart all nodes.")

    def must_outlast_others(self, *, job_is_over: bool) -> bool:
        """See `StoreBackend`."""
        return job_is_over

    def clear(self) -> None:
        """See `StoreBackend`."""
        self._lease.clear()


def open_etcd(parameters: RendezvousParameters) -> EtcdStoreBackend:
    """Connect to the etcd cluster of the endpoint; the job's keys have its name as prefix.

    Raises:
        ConfigError: the URL is invalid.
        RendezvousConnectionError: no member answers, or the answer is not etcd's.
    """
    url = EtcdUrl.parse(parameters.endpoint)
    name = f"{url.name or 'hyperpod'}/{parameters.run_id}"
    return EtcdStoreBackend(replace(url, name=name), parameters.local_addr or socket.getfqdn())
