"""Where the agents of a job meet, if that is etcd: no agent serves the store, so any of them may be lost.

Workers have one more store, torch's own, for what a program does with `init_process_group` before its groups recover.
The founders of a round have that of whichever of their agents says first that it serves one. It may be lost later:
from the first step on, groups meet in etcd. Processes that come later get one from their own agent, for their groups
meet nobody before they join. See `docs/design/etcd.md`.
"""

import socket
import threading
import time
from dataclasses import replace

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters

from hyperpod_plugins.elastic.endpoint import ANSWER_S, Endpoint
from hyperpod_plugins.elastic.etcd import LEASE_S, EtcdStore
from hyperpod_plugins.elastic.etcd_gateway import EtcdUrl
from hyperpod_plugins.elastic.limits import allow_connections
from hyperpod_plugins.elastic.roster import Roster
from hyperpod_plugins.elastic.slots import Seat
from hyperpod_plugins.env import JobEnv

_FIRST_ANSWER_S = 10.0
"""Longest wait for the first answer: etcd runs before a job begins."""
_RENEWALS = 6
"""In the time after which the keys would end."""


class EtcdEndpoint(Endpoint):
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

    def tend(self, number: int, roster: Roster) -> None:
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

    def workers_store(self, seat: Seat, roster: Roster) -> tuple[str, int]:
        """See `Endpoint`."""
        host, port = self.newcomers_store(seat.number)
        if seat.claim.number > 0:
            return host, port
        host, _, text = roster.first_master(seat.number, f"{host}:{port}").rpartition(":")
        return host, int(text)

    def newcomers_store(self, number: int) -> tuple[str, int]:
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


def open_etcd(parameters: RendezvousParameters) -> EtcdEndpoint:
    """Reach the cluster that the endpoint names; the job's name is that of its keys there.

    Raises:
        ConfigError: the URL is damaged.
        RendezvousConnectionError: no member answers, or not as etcd does.
    """
    url = EtcdUrl.parse(parameters.endpoint)
    name = f"{url.name or 'hyperpod'}/{parameters.run_id}"
    return EtcdEndpoint(replace(url, name=name), parameters.local_addr or socket.getfqdn())
