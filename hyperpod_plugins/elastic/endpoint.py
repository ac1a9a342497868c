"""Where the agents of a job meet: a store at the rendezvous's endpoint, served by an agent of that host."""

import threading
from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters, utils

from hyperpod_plugins.elastic.limits import allow_connections
from hyperpod_plugins.elastic.roster import Roster

_DEFAULT_PORT = 29400
_ANSWER_S = 60.0
"""Longest wait for the answer to one question."""


class Endpoint:
    """The way to the stores of a job; whoever serves the first also serves the workers' store of each round."""

    def __init__(self, host: str, port: int, connect: Callable[[], Store], server: Store | None = None) -> None:
        """Take what `open_endpoint` found.

        Args:
            host: where the store is.
            port: the same.
            connect: opens a connection of one's own.
            server: the store, where this process serves it.
        """
        self.host = host
        self.port = port
        self.connect = connect
        self.server = server
        self._lock = threading.Lock()
        self._servers: dict[int, TCPStore] = {}

    def serve_round(self, number: int, roster: Roster) -> None:
        """Serve the workers of a round a store of their own: keys of an earlier one would lead them astray."""
        if self.server is None:
            return
        with self._lock:
            if number not in self._servers:
                self._servers[number] = TCPStore(self.host, 0, is_master=True, wait_for_workers=False)
                roster.serve(number, self._servers[number].port)
                self._servers.pop(number - 2, None)  # the last one's workers may still be ending


def open_endpoint(parameters: RendezvousParameters, timeout_s: float) -> Endpoint:
    """Serve the store, if the endpoint is this host's and nobody serves it yet, or find the way to it.

    Args:
        parameters: of the rendezvous; `is_host` in `--rdzv-conf` says what cannot be found out from names.
        timeout_s: longest wait for the agent that serves it.

    Raises:
        RendezvousConnectionError: nobody answers there.
    """
    host, port = utils.parse_rendezvous_endpoint(parameters.endpoint, default_port=_DEFAULT_PORT)
    is_told = parameters.get_as_bool("is_host")
    is_here = is_told if is_told is not None else utils._matches_machine_hostname(host)  # pyright: ignore  (as c10d asks)
    server = _serve(host, port, is_told) if is_here else None
    if server is not None:
        port = server.port

    def connect() -> Store:
        try:
            store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
        except DistError as error:
            raise RendezvousConnectionError(
                f"no agent answers at {host}:{port} after {timeout_s:.0f} s ({error}). Start one on that host, or say "
                "on which node to serve the store with --rdzv-conf=is_host=1."
            ) from error
        store.set_timeout(timedelta(seconds=_ANSWER_S))
        return store

    return Endpoint(host=host, port=port, connect=connect, server=server)


def _serve(host: str, port: int, is_told: bool | None) -> TCPStore | None:
    allow_connections()
    try:
        return TCPStore(host, port, is_master=True, wait_for_workers=False)
    except DistError as error:
        if is_told:
            raise RendezvousConnectionError(f"the store cannot be served at {host}:{port}: {error}") from error
        return None  # another agent of this host does
