"""Where the agents of a job meet, if that is etcd: no agent serves the store, so any of them may be lost.

Workers have one more store, torch's own, for what a program does with `init_process_group` before its groups recover.
The founders of a round have that of whichever of their agents says first that it serves one. It may be lost later:
from the first step on, groups meet in etcd. Processes that come later get one from their own agent, for their groups
meet nobody before they join. See `docs/design/etcd.md`.
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

from hyperpod_plugins.elastic.process import allow_connections
from hyperpod_plugins.elastic.rendezvous.slots import NodeAssignment
from hyperpod_plugins.elastic.rendezvous.store import RendezvousStore
from hyperpod_plugins.elastic.store.etcd import LEASE_S, EtcdStore, EtcdUrl
from hyperpod_plugins.env import JobEnv

# Where the agents of a job meet: a store at the rendezvous's endpoint, served by an agent of that host.
#
# The other kind, where no agent serves it, is in `etcd_endpoint.py`.

logger = get_logger(__name__)

_DEFAULT_PORT = 29400
CONNECTING = "hyperpod-connect"
"""Name of threads that connect to a store: torch's client may keep one for long, and nothing wakes it."""
_POLL_S = 0.1
_REPORT_S = 10.0
"""How often an agent that waits for the store says so."""
_ATTEMPT_S = 5.0
"""Longest wait for one connection."""
_RETRY_S = 0.2
_LOOPBACK = ("localhost", "127.0.0.1")
_BACKLOG = 4096
_MAX_REFUSALS = 5
"""So many refused connections in a row show that a store that was there is gone."""
_SERVED_S = 60.0
"""Longest wait for the workers' store of a round."""
ANSWER_S = 60.0
"""Longest wait for the answer to one question."""
_SLACK_S = 30.0
"""What the wait for a key gets more than the silence that is ridden out: a key that is there must not look late."""


class StoreBackend(abc.ABC):
    """The way to the stores of a job: that of its agents and job store, and in each round one of the workers' own."""

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
        """What workers need to know to reach the job store of that name."""

    @abc.abstractmethod
    def keep_alive(self, number: int, rdzv_store: RendezvousStore) -> None:
        """Do what the store needs done about once a second, and in each round."""

    @abc.abstractmethod
    def workers_store(self, assignment: NodeAssignment, rdzv_store: RendezvousStore) -> tuple[str, int]:
        """Host and port of the workers' store of a round.

        Raises:
            RendezvousTimeoutError: nobody serves it.
        """

    @abc.abstractmethod
    def joiners_store(self, number: int) -> tuple[str, int] | None:
        """The same for processes that take the places of lost ones in that round; None for the same as `workers_store`.

        Their groups are detached until they meet the others in the job store's store, so any will do.
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


class ServedStoreBackend(StoreBackend):
    """A store that one agent serves; whoever serves it also serves the workers' store of each round."""

    def __init__(
        self, host: str, port: int, server: Store | None = None, timeout_s: float = ANSWER_S, answer_s: float = ANSWER_S
    ) -> None:
        """Take what `open_served` found.

        Args:
            host: where the store is.
            port: the same.
            server: the store, where this process serves it.
            timeout_s: longest wait for the agent that serves it.
            answer_s: longest silence of the store that is ridden out.
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
        """See `Endpoint`."""
        timeout_s = self._answer_s if self._was_reached else self._timeout_s
        store = connect_served(self.host, self.port, timeout_s, was_reached=self._was_reached)
        self._was_reached = True
        store.set_timeout(timedelta(seconds=self._answer_s + _SLACK_S))
        return store

    def job(self, run_id: str) -> JobEnv:
        """See `Endpoint`."""
        return JobEnv(store_host=self.host, store_port=self.port, run_id=run_id)

    def keep_alive(self, number: int, rdzv_store: RendezvousStore) -> None:
        """Serve the workers of a round a store of their own: keys of an earlier one would lead them astray."""
        if self.server is None:
            return
        with self._lock:
            if number not in self._servers:
                self._servers[number] = serve_store(self.host, 0)
                rdzv_store.serve(number, self._servers[number].port)
                self._servers.pop(number - 2, None)  # the last one's workers may still be ending

    def workers_store(self, assignment: NodeAssignment, rdzv_store: RendezvousStore) -> tuple[str, int]:
        """See `Endpoint`."""
        deadline_s = time.monotonic() + _SERVED_S
        while (port := rdzv_store.port(assignment.number)) is None:
            if time.monotonic() > deadline_s:
                raise RendezvousTimeoutError(
                    f"no agent of {self.host} has served the workers of round {assignment.number} a store within "
                    f"{_SERVED_S:.0f} s. Is that host overloaded?"
                )
            time.sleep(_POLL_S)
        return self.host, port

    def joiners_store(self, number: int) -> tuple[str, int] | None:
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


def connect_served(host: str, port: int, timeout_s: float, *, was_reached: bool) -> TCPStore:
    """Connect to a store that an agent serves; reports every 10 s what it waits for.

    The resolver and torch's client block in C, where no signal handler of Python runs. They do so in another thread, so
    that SIGTERM ends the wait of the main thread at once.

    Args:
        host: of the store.
        port: the same.
        timeout_s: longest wait.
        was_reached: whether the store was there before, so that one that nobody serves is gone for good.

    Raises:
        RendezvousConnectionError: nobody has answered.
    """
    attempts, is_over = queue.SimpleQueue[TCPStore | _Failure](), threading.Event()

    def attempt() -> None:
        while not is_over.is_set():
            attempts.put(_attempt(host, port))
            is_over.wait(_RETRY_S)

    began_s = time.monotonic()
    next_report_s, num_refusals, why = began_s + 1.0, 0, "it accepts connections, and does not answer"
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
            f"the store at {host}:{port} has not answered for {timeout_s:.0f} s ({why}). Where its machine or the "
            "network is silent for longer, raise read_timeout of --rdzv-conf."
        )
    raise RendezvousConnectionError(
        f"no agent answers at {host}:{port} after {timeout_s:.0f} s ({why}). Start one on that host, or say on which "
        "node to serve the store with --rdzv-conf=is_host=1."
    )


def serve_store(host: str, port: int) -> TCPStore:
    """Serve a store on all addresses, or for this machine alone where it is to be reached as `localhost`.

    Raises:
        DistError: the port is taken.
        OSError: the same.
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
    """Whether that machine says that nobody listens there."""


def _attempt(host: str, port: int) -> TCPStore | _Failure:
    """One attempt to connect; torch's client says too much where nobody listens, so another socket asks first."""
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
    """Serve the store, if the endpoint is this host's and nobody serves it yet, or find the way to it.

    A job of one node that names no endpoint gets a free port: nobody is to find it. On torchelastic's port two such
    jobs of a host, which have the same default id, would be one, and the second end with exit code 0 without a step.

    Args:
        parameters: of the rendezvous; `is_host` in `--rdzv-conf` says what cannot be found out from names.
        timeout_s: longest wait for the agent that serves it.
        answer_s: longest silence of the store that is ridden out.

    Raises:
        RendezvousConnectionError: this node is told to serve the store, and cannot.
    """
    is_alone = parameters.max_nodes == 1 and not parameters.endpoint.strip()
    host, port = utils.parse_rendezvous_endpoint(parameters.endpoint, default_port=0 if is_alone else _DEFAULT_PORT)
    is_told = parameters.get_as_bool("is_host")
    is_here = is_told if is_told is not None else utils._matches_machine_hostname(host)  # pyright: ignore  (as c10d asks)
    server = _serve(host, port, is_told) if is_here else None
    return ServedStoreBackend(host, port if server is None else server.port, server, timeout_s, answer_s)


def _serve(host: str, port: int, is_told: bool | None) -> TCPStore | None:
    allow_connections()
    try:
        return serve_store(host, port)
    except (DistError, OSError) as error:
        if is_told:
            raise RendezvousConnectionError(f"the store cannot be served at {host}:{port}: {error}") from error
        return None  # another agent of this host does


_FIRST_ANSWER_S = 10.0
"""Longest wait for the first answer: etcd runs before a job begins."""
_RENEWALS = 6
"""In the time after which the keys would end."""


class EtcdStoreBackend(StoreBackend):
    """A part of an etcd cluster, whose keys end with the job."""

    answers_in_time = True

    def __init__(self, url: EtcdUrl, host: str) -> None:
        """Reach the cluster, and let the job's keys live.

        Args:
            url: members of the cluster, and the job's name there.
            host: this one, as others reach it.

        Raises:
            RendezvousConnectionError: no member answers, or not as etcd does.
        """
        self.url = url
        self.host = host
        try:
            EtcdStore(url, _FIRST_ANSWER_S).open_lease()
        except DistError as error:
            raise RendezvousConnectionError(
                f"{error}. Start etcd (3.4 or later) there, or name its members, as they serve clients, with "
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
        """See `Endpoint`."""
        return EtcdStore(self.url, ANSWER_S)

    def job(self, run_id: str) -> JobEnv:
        """See `Endpoint`."""
        return JobEnv(etcd_url=str(self.url), run_id=run_id)

    def keep_alive(self, number: int, rdzv_store: RendezvousStore) -> None:
        """Let the keys live on.

        Raises:
            RendezvousConnectionError: they have ended.
        """
        if time.monotonic() < self._renewed_s + LEASE_S / _RENEWALS:
            return
        if not self._lease.renew_lease():
            raise RendezvousConnectionError(
                f"the job's keys at {self} have ended, for no agent has renewed their lease for {LEASE_S} s. Start all "
                "nodes again."
            )
        self._renewed_s = time.monotonic()

    def workers_store(self, assignment: NodeAssignment, rdzv_store: RendezvousStore) -> tuple[str, int]:
        """See `Endpoint`."""
        host, port = self.joiners_store(assignment.number)
        if assignment.lease.number > 0:
            return host, port
        host, _, text = rdzv_store.first_master(assignment.number, f"{host}:{port}").rpartition(":")
        return host, int(text)

    def joiners_store(self, number: int) -> tuple[str, int]:
        """See `Endpoint`."""
        with self._lock:
            if number not in self._servers:
                allow_connections()
                self._servers[number] = TCPStore(self.host, 0, is_master=True, wait_for_workers=False)
                self._servers.pop(number - 2, None)  # the last one's workers may still be ending
            return self.host, self._servers[number].port

    def loss(self, error: Exception) -> RendezvousConnectionError:
        """See `Endpoint`."""
        return RendezvousConnectionError(f"the job's store does not answer any more: {error}. Start all nodes again.")

    def must_outlast_others(self, *, job_is_over: bool) -> bool:
        """See `Endpoint`."""
        return job_is_over

    def clear(self) -> None:
        """See `Endpoint`."""
        self._lease.clear()


def open_etcd(parameters: RendezvousParameters) -> EtcdStoreBackend:
    """Reach the cluster that the endpoint names; the job's name is that of its keys there.

    Raises:
        ConfigError: the URL is damaged.
        RendezvousConnectionError: no member answers, or not as etcd does.
    """
    url = EtcdUrl.parse(parameters.endpoint)
    name = f"{url.name or 'hyperpod'}/{parameters.run_id}"
    return EtcdStoreBackend(replace(url, name=name), parameters.local_addr or socket.getfqdn())
