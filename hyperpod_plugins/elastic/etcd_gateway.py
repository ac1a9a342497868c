"""Requests to an etcd cluster, by the JSON that its members speak beside gRPC (etcd 3.4 and later, `/v3/...`).

A request goes to the member that answered last. When that one is lost, the next is asked, and so on, with growing
pauses, until the time of the caller is over. A request may have been carried out although its answer was lost, and is
then sent again: whoever makes requests must make such that can be repeated.
"""

import atexit
import json
import random
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from http.client import HTTPConnection, HTTPException
from typing import Any, Self
from urllib.parse import quote, unquote, urlsplit

from torch.distributed import DistNetworkError, DistStoreError

from hyperpod_plugins.errors import ConfigError

SCHEME = "etcd://"
_DEFAULT_PORT = 2379
_ANSWER_S = 5.0
"""Longest wait for one member's answer, when others can be asked."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0
_MOST_IDLE = 4
"""Connections kept for the next request."""
_WATCH_S = 60.0
"""Longest life of a watch; a member that was unplugged says nothing, so somebody must ask from time to time."""
_WATCH_PAUSE_S = 0.1
"""Between a watch that was lost and another look."""
_TRANSIENT = {1, 4, 14}
"""gRPC's codes `cancelled`, `deadline exceeded` and `unavailable`: a member without a leader, or about to stop."""
_BAD_GATEWAY = {502, 503, 504}
"""HTTP's codes for the same, as what stands between may say."""
_HEADERS = {"Content-Type": "application/json"}
_random = random.Random()  # not the program's, which may be seeded

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdUrl:
    """`etcd://HOST:PORT[,HOST:PORT...][/NAME]`: members of one cluster, and where in it the keys are."""

    members: tuple[tuple[str, int], ...]
    name: str = ""

    @classmethod
    def parse(cls, url: str) -> Self:
        """Read a URL; the port is 2379 where none is given.

        Raises:
            ConfigError: it is damaged.
        """
        hosts, _, name = url.removeprefix(SCHEME).partition("/")
        members: list[tuple[str, int]] = []
        try:
            for part in hosts.split(","):
                where = urlsplit(f"//{part.strip()}")
                if not where.hostname or where.username is not None:
                    raise ValueError(f"{part!r} is no HOST:PORT")
                members.append((where.hostname, where.port or _DEFAULT_PORT))
        except ValueError as error:
            raise ConfigError(f"{url!r} must be {SCHEME}HOST:PORT[,HOST:PORT...]: {error}.") from None
        return cls(members=tuple(members), name=unquote(name.strip("/")))

    @property
    def hosts(self) -> str:
        """The members, for messages."""
        return ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.members)

    def __str__(self) -> str:
        """Inverse of `parse`."""
        return f"{SCHEME}{self.hosts}" + (f"/{quote(self.name)}" if self.name else "")


class EtcdRefusal(DistStoreError):
    """The cluster has understood a request, and does not do what it asks."""


class _Unavailable(Exception):
    """A member cannot serve now; another one may."""


class Gateway:
    """The way to a cluster, for all threads of a process."""

    def __init__(self, members: Sequence[tuple[str, int]]) -> None:
        """Nobody is asked yet."""
        self._members = tuple(members)
        self._hosts = EtcdUrl(members=self._members).hosts
        self._turn = _random.randrange(len(self._members))  # so that members share the processes of a job
        self._idle: list[HTTPConnection] = []
        self._lock = threading.Lock()

    def call(self, path: str, body: Mapping[str, Any], timeout_s: float) -> Json:
        """Ask, for `timeout_s` seconds at most, and again where an answer is lost.

        Raises:
            DistNetworkError: no member has answered in time.
            EtcdRefusal: one has refused.
        """
        deadline_s, pause_s, num_failures = time.monotonic() + timeout_s, _FIRST_PAUSE_S, 0
        content = json.dumps(body).encode()
        while True:
            left_s = max(deadline_s - time.monotonic(), 0.001)
            idle = self._take_idle()
            connection = idle or self._connection(left_s)
            try:
                answer = _ask(connection, path, content, min(left_s, _ANSWER_S))
            except (OSError, HTTPException, _Unavailable) as error:
                connection.close()
                self.close()  # the others lead there, too
                if idle is not None:  # its other end may have been gone for long
                    continue
                reason = str(error) or type(error).__name__
            except EtcdRefusal:
                self._keep(connection)
                raise
            else:
                self._keep(connection)
                return answer
            self._turn += 1
            num_failures += 1
            if time.monotonic() + pause_s > deadline_s:
                raise DistNetworkError(f"etcd at {self._hosts} has not answered for {timeout_s:.0f} s: {reason}")
            if num_failures % len(self._members) == 0:
                time.sleep(pause_s * _random.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def await_change(self, key: str, revision: int, timeout_s: float) -> None:
        """Wait until a key has been written since a revision of the cluster.

        It may return earlier: after `timeout_s` seconds, or because the connection is lost. Whoever waits looks again.
        """
        deadline_s = time.monotonic() + min(timeout_s, _WATCH_S)
        wanted = {"key": key, "start_revision": str(revision), "filters": ["NODELETE"]}
        connection = self._connection(timeout_s)
        try:
            connection.request("POST", "/v3/watch", json.dumps({"create_request": wanted}).encode(), _HEADERS)
            transport = connection.sock  # the response may take it from the connection
            response = connection.getresponse()
            while (left_s := deadline_s - time.monotonic()) > 0:
                transport.settimeout(left_s)
                result = json.loads(response.readline())["result"]
                if "events" in result:
                    return
                if "created" not in result:  # it was cancelled
                    break
        except (OSError, HTTPException, ValueError, KeyError):
            self._turn += 1
        finally:
            connection.close()
        time.sleep(max(0.0, min(_WATCH_PAUSE_S, deadline_s - time.monotonic())))

    def close(self) -> None:
        """Close connections that nobody uses now; others are made when somebody asks again."""
        while (connection := self._take_idle()) is not None:
            connection.close()

    def _connection(self, left_s: float) -> HTTPConnection:
        host, port = self._members[self._turn % len(self._members)]
        return HTTPConnection(host, port, timeout=min(left_s, _ANSWER_S))

    def _take_idle(self) -> HTTPConnection | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _keep(self, connection: HTTPConnection) -> None:
        with self._lock:
            if len(self._idle) < _MOST_IDLE:
                self._idle.append(connection)
                return
        connection.close()


def _ask(connection: HTTPConnection, path: str, content: bytes, timeout_s: float) -> Json:
    if connection.sock is not None:
        connection.sock.settimeout(timeout_s)
    connection.request("POST", path, content, _HEADERS)
    response = connection.getresponse()
    text = response.read()
    try:
        answer: Json = json.loads(text)
    except ValueError:
        answer = {}
    if response.status == 200 and answer:
        return answer
    code, message = answer.get("code", 0), answer.get("error")
    if code in _TRANSIENT or response.status in _BAD_GATEWAY:
        raise _Unavailable(message or f"HTTP {response.status}")
    if message is None:
        message = f"HTTP {response.status}; is {connection.host}:{connection.port} a member of etcd 3.4 or later?"
    raise EtcdRefusal(f"etcd refuses {path}: {message}")


@cache
def gateway_to(members: tuple[tuple[str, int], ...]) -> Gateway:
    """The one of this process for a cluster."""
    gateway = Gateway(members)
    atexit.register(gateway.close)
    return gateway
