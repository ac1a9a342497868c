"""A c10d store whose keys are in etcd: no process of the job serves it, so no node's loss takes it along.

It behaves like torch's `TCPStore`; `tests/elastic/test_etcd.py` asks both the same. Waiting is watching, not asking
again and again. What is in the way of a request (a member that stops, a new leader) is waited out for the store's
timeout; see `etcd_gateway.py`.

Where `name` is that of a job, its keys hang on one *lease*, which its agents renew: they end when nobody does.

[Note: requests that come twice] The answer to a request can be lost after it was carried out, and it is then sent
again. That changes nothing where a value is set, or compared and set: who finds the value that it wanted has succeeded.
A sum would count twice. So whoever adds writes down, in the same transaction, which request of its own was the last.
"""

import atexit
import hashlib
import itertools
import json
import random
import threading
import time
import uuid
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from http.client import HTTPConnection, HTTPException
from typing import Any, Self
from urllib.parse import quote, unquote, urlsplit

from torch._C._distributed_c10d import Store
from torch.distributed import DistNetworkError, DistStoreError

from hyperpod_plugins.errors import ConfigError

# Requests to an etcd cluster, by the JSON that its members speak beside gRPC (etcd 3.4 and later, `/v3/...`).
#
# A request goes to the member that answered last. When that one is lost, the next is asked, and so on, with growing
# pauses, until the time of the caller is over. A request may have been carried out although its answer was lost, and
# is then sent again: whoever makes requests must make such that can be repeated.

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


_MOST_OPERATIONS = 100
"""Operations in one transaction; etcd allows 128 unless told otherwise."""
_CONFLICT_PAUSE_S = 0.002
"""Before another try to add, where somebody else was faster; grows with the tries."""
LEASE_S = 300
"""How long keys outlive the last agent that could not clear them away."""
_alive: list["EtcdStore"] = []
"""[Note: kept] A C++ store around one of ours keeps only the C++ half of it, and could not call the rest any more. So
stores live as long as their process. They are few, and share their connections."""


class EtcdStore(Store):
    """Keys under one name in an etcd cluster; any number of threads may use it."""

    def __init__(self, url: str | EtcdUrl, timeout_s: float = 300.0) -> None:
        """Nobody is asked yet.

        Args:
            url: `etcd://HOST:PORT[,HOST:PORT...][/NAME]`.
            timeout_s: how long to wait for values, and for a cluster that does not answer.

        Raises:
            ConfigError: the URL is damaged.
        """
        super().__init__()
        self.url = EtcdUrl.parse(url) if isinstance(url, str) else url
        self._gateway = gateway_to(self.url.members)
        self._lease = _lease_of(self.url.name)
        self._marker = f"#{uuid.uuid4().hex}"
        self._requests = itertools.count(1)
        self._changing = threading.Lock()
        self.set_timeout(timedelta(seconds=timeout_s))
        _alive.append(self)

    @property
    def server_ports(self) -> frozenset[int]:
        """Ports of the cluster's members."""
        return frozenset(port for _, port in self.url.members)

    @property
    def _timeout(self) -> timedelta:
        return self.timeout  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]: torch's stub lacks it

    # -- the life of a job's keys -----------------------------------------------------------------------------------

    def open_lease(self) -> None:
        """Let the keys of this name live, from now on, as long as somebody renews the lease.

        Raises:
            DistError: the cluster does not answer, or refuses.
        """
        if not self.renew_lease():
            try:
                self._call("lease/grant", {"ID": str(self._lease), "TTL": str(LEASE_S)})
            except EtcdRefusal:  # another agent was faster
                if not self.renew_lease():
                    raise

    def renew_lease(self) -> bool:
        """Let the keys live on; False if they have ended."""
        answer = self._call("lease/keepalive", {"ID": str(self._lease)})
        return int(answer.get("result", {}).get("TTL", 0)) > 0

    def clear(self) -> None:
        """Delete the keys of this name; their owner cannot write others before somebody opens the lease again."""
        try:
            self._call("lease/revoke", {"ID": str(self._lease)})
        except EtcdRefusal:  # it has ended already
            return

    # -- what c10d calls --------------------------------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value."""
        self._transact([self._put(key, _bytes(value))])

    def get(self, key: str) -> bytes:
        """Read a value, waiting until there is one.

        Raises:
            DistStoreError: there was none within the store's timeout.
        """
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Read several, waiting until all are there."""
        found = self._await(keys, self._timeout)
        return [found[key] for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set several."""
        wanted = dict(zip(keys, map(_bytes, values), strict=True))
        for some in _slices(list(wanted)):
            self._transact([self._put(key, wanted[key]) for key in some])

    def add(self, key: str, value: int) -> int:
        """Add to a counter, which begins at 0; returns what it is now."""
        if value == 0:
            found, _ = self._read([key])
            if key in found:
                return int(found[key])
        return int(self._change(key, lambda text: str(int(text or b"0") + value).encode()))

    def append(self, key: str, value: str | bytes) -> None:
        """Put something at the end of a value, which is empty at first."""
        self._change(key, lambda former: (former or b"") + _bytes(value))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Set a value in the place of another, or, where that is empty, of none; returns the value that is there now.

        As in TCPStore: `expected_value` where there is none.
        """
        old, new = _bytes(expected_value), _bytes(desired_value)
        conditions = [_condition("VALUE", _encoded(old))]
        if not old:
            conditions.insert(0, _condition("VERSION", "0"))  # there is none
        former: bytes | None = None
        for condition in conditions:
            answer = self._transact([self._put(key, new)], [condition | {"key": self._key(key)}], [self._look(key)])
            if answer.get("succeeded"):
                return new
            former, _ = _entry(answer["responses"][0])
            if former:
                return former
        return old

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return not set(keys).difference(self._read(keys, keys_only=True)[0])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there.

        Raises:
            DistStoreError: they were not in time.
        """
        self._await(keys, self._timeout if timeout is None else timeout, keys_only=True)

    def delete_key(self, key: str) -> bool:
        """Delete a key; whether there was one."""
        return "deleted" in self._call("kv/deleterange", {"key": self._key(key)})

    def num_keys(self) -> int:
        """How many keys have this store's name."""
        after_all = _encoded(f"/{self.url.name}0".encode())  # 0 comes after /
        all_keys = self._look("", range_end=after_all, count_only=True)
        markers = self._look("#", range_end=self._key("$"), count_only=True)
        answers = self._transact([all_keys, markers])["responses"]
        there, not_ours = (int(each["response_range"].get("count", 0)) for each in answers)
        return there - not_ours

    def has_extended_api(self) -> bool:
        """Whether `append`, `multi_get` and `multi_set` are there."""
        return True

    def clone(self) -> Self:
        """Another store of the same keys."""
        return type(self)(self.url, self._timeout.total_seconds())

    deleteKey = delete_key  # what c10d calls from C++
    getNumKeys = num_keys

    # -- requests ---------------------------------------------------------------------------------------------------

    def _await(self, keys: Sequence[str], timeout: timedelta, *, keys_only: bool = False) -> dict[str, bytes]:
        """The values of keys, once all are there."""
        deadline_s = time.monotonic() + timeout.total_seconds()
        found: dict[str, bytes] = {}
        missing = list(dict.fromkeys(keys))
        while True:
            left_s = deadline_s - time.monotonic()
            patience_s = min(max(left_s, 1.0), self._timeout.total_seconds())
            some, revision = self._read(missing, keys_only=keys_only, timeout_s=patience_s)
            found |= some
            missing = [key for key in missing if key not in some]
            if not missing:
                return found
            if left_s <= 0:
                waited_ms, listed = round(1000 * timeout.total_seconds()), ", ".join(missing[:5])
                raise DistStoreError(f"wait timeout after {waited_ms}ms, {len(missing)} keys are missing: {listed}")
            self._gateway.await_change(self._key(missing[0]), revision + 1, left_s)

    def _read(
        self, keys: Sequence[str], *, keys_only: bool = False, timeout_s: float | None = None
    ) -> tuple[dict[str, bytes], int]:
        """Values of those keys that are there, and a revision of the cluster before which nothing was missed."""
        found: dict[str, bytes] = {}
        revision: int | None = None
        for some in _slices(keys):
            answer = self._transact([self._look(key, keys_only=keys_only) for key in some], timeout_s=timeout_s)
            for key, each in zip(some, answer["responses"], strict=True):
                value, _ = _entry(each)
                if value is not None:
                    found[key] = value
            revision = int(answer["header"]["revision"]) if revision is None else revision
        return found, revision or 0

    def _change(self, key: str, change: Callable[[bytes | None], bytes]) -> bytes:
        """Put what `change` makes of a value in its place, whoever else changes it; see the note above."""
        with self._changing:
            number, tries = str(next(self._requests)).encode(), 0
            looks = [self._look(key), self._look(self._marker)]
            former, revision = _entry(self._transact(looks)["responses"][0])
            while True:
                new = change(former)
                is_last = _condition("MOD", str(revision)) | {"key": self._key(key)}
                answer = self._transact([self._put(key, new), self._put(self._marker, number)], [is_last], looks)
                if answer.get("succeeded"):
                    return new
                (former, revision), (mine, _) = map(_entry, answer["responses"])
                if mine == number:
                    return new
                tries = min(tries + 1, 10)
                time.sleep(_random.uniform(0, tries * _CONFLICT_PAUSE_S))

    def _transact(
        self,
        success: Sequence[Json],
        compare: Sequence[Json] = (),
        failure: Sequence[Json] = (),
        *,
        timeout_s: float | None = None,
    ) -> Json:
        wanted = {"compare": list(compare), "success": list(success), "failure": list(failure)}
        return self._call("kv/txn", wanted, timeout_s)

    def _call(self, path: str, wanted: Json, timeout_s: float | None = None) -> Json:
        return self._gateway.call(
            f"/v3/{path}", wanted, self._timeout.total_seconds() if timeout_s is None else timeout_s
        )

    def _put(self, key: str, value: bytes) -> Json:
        return {"request_put": {"key": self._key(key), "value": _encoded(value), "lease": str(self._lease)}}

    def _look(self, key: str, **options: Any) -> Json:
        return {"request_range": {"key": self._key(key), **options}}

    def _key(self, key: str) -> str:
        return _encoded(f"/{self.url.name}/{key}".encode())


def _lease_of(name: str) -> int:
    """The same for all processes of a job, so that nobody needs to be told."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1 or 1


def _condition(target: str, value: str) -> Json:
    field = {"VALUE": "value", "VERSION": "version", "MOD": "mod_revision"}[target]
    return {"target": target, field: value}


def _entry(response: Json) -> tuple[bytes | None, int]:
    """What a transaction has read: the value, None where there is none, and the revision of its last change."""
    for entry in response["response_range"].get("kvs", ()):
        return b64decode(entry.get("value", "")), int(entry["mod_revision"])
    return None, 0


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _encoded(value: bytes) -> str:
    return b64encode(value).decode()


def _slices(keys: Sequence[str]) -> Iterator[Sequence[str]]:
    for begin in range(0, len(keys), _MOST_OPERATIONS):
        yield keys[begin : begin + _MOST_OPERATIONS]
