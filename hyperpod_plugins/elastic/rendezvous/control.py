"""Requests to a running job from a shell (`hyperpod scale`, `hyperpod status`), authorized by the job's ticket.

The ticket is a file that only its user can read, with the address of the store and a token. The agent that serves the
store writes it; with etcd, each agent writes one of its own. A request carries not the token but an HMAC made with
it, as anyone who reaches the store can read what is written there.
"""

import contextlib
import hmac
import json
import os
import secrets
import socket
import stat
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self

from torch._C._distributed_c10d import Store
from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.elastic.utils.logging import get_logger

from hyperpod_plugins.elastic.membership.admission import job_status, present_world, request_replicas
from hyperpod_plugins.elastic.membership.elastic_spec import ElasticSpec, elastic_spec_of
from hyperpod_plugins.elastic.membership.reshard import fill_degrees, request_degrees, why_not_reshard
from hyperpod_plugins.elastic.rendezvous.backends import connect_served
from hyperpod_plugins.elastic.rendezvous.store import RendezvousStore, name_of_round
from hyperpod_plugins.elastic.store.job_store import JobStore, connect_store
from hyperpod_plugins.elastic.store.records import JsonRecord, printable
from hyperpod_plugins.env import JobEnv, events_folder, runtime_folder
from hyperpod_plugins.errors import ConfigError

logger = get_logger(__name__)

Kind = Literal["scale", "status"]
_REQUEST = "control/request"  # list of Request; followed by /QUEUE if there is one
_ANSWER = "control/answer"  # key .../NUMBER: text; QUEUE/ before the number if there is one
_POLL_S = 0.1
_CONNECT_S = 10.0
_MAX_TICKET_BYTES = 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket(JsonRecord):
    """Address of a job's store, and the token that permits requests to the job."""

    host: str
    port: int
    run_id: str
    token: str
    machine: str
    """Host name of the agent that wrote it."""
    pid: int
    """Process id of that agent."""
    etcd_url: str = ""
    """URL of the store, if that is in etcd."""
    queue: str = ""
    """Name of the requests that this agent answers; empty if it is the only agent that does."""
    events: str = ""
    """Folder in which the processes write their ledgers, from the agent's `HYPERPOD_EVENTS`; empty if there is none."""

    @property
    def is_stale(self) -> bool:
        """Whether the agent was killed before it could remove the ticket, as far as this machine can tell."""
        return self.machine == socket.gethostname() and not Path(f"/proc/{self.pid}").exists()

    @property
    def path(self) -> Path:
        """Path of the ticket on the agent's machine; it is unique even if two jobs have the same name."""
        name = "".join(each if each.isalnum() or each in "-_." else "_" for each in self.run_id)
        return runtime_folder() / f"{name}@{self.queue or self.port}.ticket"

    @classmethod
    def find(cls, run_id: str | None) -> Self:
        """Find the ticket of a job whose store this machine serves.

        Args:
            run_id: `--rdzv-id` of the job; None for the only job.

        Raises:
            ConfigError: there is no such ticket, or several jobs match.
        """
        found = [ticket for path in _files(runtime_folder()) if (ticket := cls._read(path)) is not None]
        there = [ticket for ticket in found if not ticket.is_stale]
        if not there:
            raise ConfigError(
                f"which job is meant? This machine serves the store of none. Start one with hyperpodrun; if it runs on "
                f"another machine, copy the ticket from {runtime_folder()} of that one."
            )
        meant = {ticket.job: ticket for ticket in there if run_id in (None, ticket.run_id)}
        if len(meant) != 1:
            listed = ", ".join(f"{each.run_id} ({each.etcd_url or f'port {each.port}'})" for each in there)
            raise ConfigError(
                f"which job is meant? Give --run-id, the --rdzv-id of a job whose store this machine serves: "
                f"{listed}. On another machine, copy the ticket from {runtime_folder()} of that one."
            )
        return next(iter(meant.values()))

    @classmethod
    def _read(cls, path: Path) -> Self | None:
        """Read a ticket of this user; None with a warning for any other file, which may lead to a foreign store."""
        try:
            with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
                    logger.warning("%s is ignored: it belongs to another user or is open to others (chmod 600)", path)
                    return None
                return cls.from_json(file.read(_MAX_TICKET_BYTES))
        except (OSError, ValueError) as error:
            logger.warning("%s is ignored, as it is not a ticket: %s", path, printable(str(error)))
            return None

    @property
    def job(self) -> JobEnv:
        """Address of the job's store."""
        return JobEnv(store_host=self.host, store_port=self.port, etcd_url=self.etcd_url, run_id=self.run_id)

    def connect(self) -> Store:
        """Open a new connection to the job's store.

        Raises:
            RendezvousConnectionError: no process answers, or it does not in time.
            DistError: the same, for etcd.
        """
        if self.etcd_url:
            return connect_store(self.job, _CONNECT_S)
        return connect_served(self.host, self.port, _CONNECT_S, was_reached=True)

    def job_store(self) -> JobStore:
        """Connect to the job store of the job's present round.

        Raises:
            ConfigError: the store does not answer.
        """
        try:
            store = self.connect()
            return JobStore.from_store(name_of_round(self.run_id, RendezvousStore(store).round()), store)
        except (DistError, RendezvousConnectionError) as error:
            where = self.etcd_url or f"{self.host}:{self.port}"
            raise ConfigError(
                f"no process answers at {where} any more, where the job {self.run_id!r} was ({error}). If the job has "
                f"ended, remove {self.path}."
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(JsonRecord):
    """A request to a running job."""

    kind: Kind
    value: int = 0
    """Number of replicas for `scale`; 0 to change the degrees instead."""
    shard_degree: int = 0
    """Shard degree for `scale` without replicas; 0 to keep the present one. The same for `tensor_degree`."""
    tensor_degree: int = 0
    code: str = ""
    """HMAC of the request and its number in the list."""

    def signed(self, token: str, number: int) -> Self:
        """The same request with its HMAC, which is valid for one number only, so that no request can be replayed."""
        return replace(self, code=self._code(token, number))

    def is_genuine(self, token: str, number: int) -> bool:
        """Whether the request was signed with `token` for this number."""
        return hmac.compare_digest(self.code.encode(errors="replace"), self._code(token, number).encode())

    def _code(self, token: str, number: int) -> str:
        said = f"{number} {self.kind} {self.value} {self.shard_degree} {self.tensor_degree}"
        return hmac.new(token.encode(), said.encode(), "sha256").hexdigest()


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    try:
        _check_folder(folder)
    except OSError as error:
        raise ConfigError(f"tickets in {folder} cannot be trusted: {error}. Remove that folder.") from None
    return sorted(folder.glob("*.ticket"))


def _check_folder(folder: Path) -> None:
    """Check that only this user can write to a folder.

    Raises:
        PermissionError: others can, or it is a link.
    """
    status = folder.lstat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022 or not stat.S_ISDIR(status.st_mode):
        raise PermissionError(f"{folder} belongs to another user, is open to others, or is a link")


class Controller:
    """The agent's side: writes the ticket, and carries out requests of its holders."""

    def __init__(self, job: JobEnv) -> None:
        """Write the ticket.

        Args:
            job: address of the job's store.

        Raises:
            OSError: the ticket cannot be written.
        """
        self._ticket = Ticket(
            host=job.store_host,
            port=job.store_port,
            run_id=job.run_id,
            etcd_url=job.etcd_url,
            queue=secrets.token_hex(4) if job.etcd_url else "",
            token=secrets.token_hex(16),
            machine=socket.gethostname(),
            pid=os.getpid(),
            events=str(Path(events).absolute()) if (events := events_folder()) is not None else "",
        )
        path = self._ticket.path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_folder(path.parent)
        unfinished = path.with_name(f".{secrets.token_hex(8)}")
        with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as file:
            file.write(self._ticket.to_json())
        unfinished.replace(path)
        self._seen: dict[str, int] = {}

    def poll(self, name: str, job_store: JobStore) -> None:
        """Carry out and answer the requests since the last call; `name` is the job's name in the present round."""
        request, answer = _names(self._ticket.queue)
        first = self._seen.get(name, 0)
        for number, text in enumerate(job_store.read_list(request)[first:], first + 1):
            self._seen[name] = number
            job_store.set(f"{answer}/{number}", self._answer(number, text, job_store).encode())

    def close(self) -> None:
        """Remove the ticket."""
        self._ticket.path.unlink(missing_ok=True)

    def _answer(self, number: int, text: str, job_store: JobStore) -> str:
        request = None
        with contextlib.suppress(ValueError):
            request = Request.from_json(text)
        if request is None or not request.is_genuine(self._ticket.token, number):
            return "refused: the request was not made with this job's ticket"
        if request.kind == "status":
            return json.dumps(job_status(job_store))
        spec = elastic_spec_of(job_store)
        if spec is None:
            return "refused: the job cannot change its size, as it has no ElasticTraining, or has not started"
        if not request.value:
            return _reshard(job_store, spec, request)
        if request.value not in spec.sizes:
            return f"refused: {request.value} replicas are not possible in this job; {list(spec.sizes)} are"
        request_replicas(job_store, request.value)
        return f"the job goes to {request.value} replicas, as soon as there are enough"


def _reshard(job_store: JobStore, spec: ElasticSpec, request: Request) -> str:
    """Request a restart of all workers with other degrees, if they are possible; returns the answer."""
    why_not = why_not_reshard(job_store, spec, present_world(job_store), request.shard_degree, request.tensor_degree)
    if why_not is not None:
        return f"refused: {why_not}"
    shard, tensor = fill_degrees(spec, request.shard_degree, request.tensor_degree)
    request_degrees(job_store, (shard, tensor))
    return f"all ranks save the next step, and start again with shard degree {shard} and tensor degree {tensor}"


def _names(queue: str) -> tuple[str, str]:
    """Names of the requests and the answers of a queue."""
    return (f"{_REQUEST}/{queue}", f"{_ANSWER}/{queue}") if queue else (_REQUEST, _ANSWER)


def send(job_store: JobStore, token: str, request: Request, timeout_s: float = 15.0, queue: str = "") -> str:
    """Send a request to the job, and return the answer.

    Args:
        job_store: job store of the present round.
        token: token of the ticket.
        request: the request, unsigned.
        timeout_s: longest wait in seconds for the answer.
        queue: queue of the ticket.

    Raises:
        ConfigError: the agent does not answer in time, or refuses.
    """
    requests, answers = _names(queue)
    number = job_store.append(requests, lambda number: request.signed(token, number).to_json())
    deadline_s = time.monotonic() + timeout_s
    while (answer := job_store.try_get(f"{answers}/{number}")) is None:
        if time.monotonic() > deadline_s:
            raise ConfigError(f"the agent that wrote the job's ticket did not answer within {timeout_s:.0f} s.")
        time.sleep(_POLL_S)
    text = answer.decode()
    if text.startswith("refused: "):
        raise ConfigError(text.removeprefix("refused: ") + ".")
    return text
