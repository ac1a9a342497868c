"""A c10d store in etcd: no process of the job serves it, so it survives the loss of any node.

`EtcdStore` behaves like torch's `TCPStore`; `tests/elastic/test_etcd.py` runs the same tests on both. It waits for
keys by etcd watches, not by polling. Requests that fail for the moment (a member that stops, a new leader) are
retried for the store's timeout; see `Gateway`.

The keys of a job are attached to one *lease*, which its agents renew; without renewals the keys expire.

[Note: requests that come twice] The answer to a request can be lost after the request was carried out; the request is
then sent again. That is harmless for set and compare-and-set: a caller that finds the value that it wanted has
succeeded. An addition, however, would count twice. So each caller that adds also records, in the same transaction,
the number of its last request.
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

# Requests use the JSON gateway that etcd members offer beside gRPC (etcd 3.4 and later, `/v3/...`). A request goes to
# the member that answered last. If that one fails, the next is tried, and so on, with growing pauses, until the
# caller's timeout. A request whose answer was lost may have been carried out, so requests must be safe to repeat.

SCHEME = "etcd://"
_DEFAULT_PORT = 2379
_ANSWER_S = 5.0
"""Longest wait for the answer of one member, before the next one is tried."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0
_MOST_IDLE = 4
"""Largest number of idle connections that are kept for later requests."""
_WATCH_S = 60.0
"""Longest life of a watch; an unplugged member sends nothing, so the key must be read from time to time."""
_WATCH_PAUSE_S = 0.1
"""Pause between the loss of a watch and the next read."""
_TRANSIENT = {1, 4, 14}
"""The gRPC codes `cancelled`, `deadline exceeded` and `unavailable`: a member without a leader, or about to stop."""
_BAD_GATEWAY = {502, 503, 504}
"""The HTTP codes for the same, as sent by a proxy in between."""
_HEADERS = {"Content-Type": "application/json"}
_random = random.Random()  # not the global generator, which the program may have seeded

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdUrl:
    """`etcd://HOST:PORT[,HOST:PORT...][/NAME]`: the members of a cluster, and the prefix of the keys."""

    members: tuple[tuple[str, int], ...]
    name: str = ""

    @classmethod
    def parse(cls, url: str) -> Self:
        """Parse a URL; the default port is 2379.

        Raises:
            ConfigError: the URL is malformed.
        """
        hosts, _, name = url.removeprefix(SCHEME).partition("/")
        members: list[tuple[str, int]] = []
        try:
            for part in hosts.split(","):
                where = urlsplit(f"//{part.strip()}")
                if not where.hostname or where.username is not None:
                    raise ValueError(f"{part!r} is not HOST:PORT")
                members.append((where.hostname, where.port or _DEFAULT_PORT))
        except ValueError as error:
            raise ConfigError(f"{url!r} must be {SCHEME}HOST:PORT[,HOST:PORT...]: {error}.") from None
        return cls(members=tuple(members), name=unquote(name.strip("/")))

    @property
    def hosts(self) -> str:
        """The members as `HOST:PORT,...`, for messages and URLs."""
        return ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.members)

    def __str__(self) -> str:
        """Inverse of `parse`."""
        return f"{SCHEME}{self.hosts}" + (f"/{quote(self.name)}" if self.name else "")


class EtcdRefusal(DistStoreError):
    """The cluster has rejected a request."""


class _Unavailable(Exception):
    """A member cannot serve a request at the moment; another one may."""


class Gateway:
    """Connections to an etcd cluster; any number of threads may use it."""

    def __init__(self, members: Sequence[tuple[str, int]]) -> None:
        """Store the members (host, port); opens no connection yet."""
        self._members = tuple(members)
        self._hosts = EtcdUrl(members=self._members).hosts
        self._turn = _random.randrange(len(self._members))  # spreads the processes of a job over the members
        self._idle: list[HTTPConnection] = []
        self._lock = threading.Lock()

    def call(self, path: str, body: Mapping[str, Any], timeout_s: float) -> Json:
        """Send a request and return the answer; retries for up to `timeout_s` seconds if no answer arrives.

        Raises:
            DistNetworkError: no member answered in time.
            EtcdRefusal: the cluster rejected the request.
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
                self.close()  # the other idle connections lead to the same member
                if idle is not None:  # its peer may have been gone for a long time: retry with a new connection
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
        """Wait until a key is written at a given revision of the cluster or later.

        May return early: after `timeout_s` seconds, or if the connection is lost. The caller must read the key again.
        """
        deadline_s = time.monotonic() + min(timeout_s, _WATCH_S)
        wanted = {"key": key, "start_revision": str(revision), "filters": ["NODELETE"]}
        connection = self._connection(timeout_s)
        try:
            connection.request("POST", "/v3/watch", json.dumps({"create_request": wanted}).encode(), _HEADERS)
            transport = connection.sock  # the response may detach it from the connection
            response = connection.getresponse()
            while (left_s := deadline_s - time.monotonic()) > 0:
                transport.settimeout(left_s)
                result = json.loads(response.readline())["result"]
                if "events" in result:
                    return
                if "created" not in result:  # the watch was canceled
                    break
        except (OSError, HTTPException, ValueError, KeyError):
            self._turn += 1
        finally:
            connection.close()
        time.sleep(max(0.0, min(_WATCH_PAUSE_S, deadline_s - time.monotonic())))

    def close(self) -> None:
        """Close the idle connections; later requests open new ones."""
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
    raise EtcdRefusal(f"etcd rejects {path}: {message}")


@cache
def gateway_to(members: tuple[tuple[str, int], ...]) -> Gateway:
    """Return this process's gateway to a cluster."""
    gateway = Gateway(members)
    atexit.register(gateway.close)
    return gateway


_MOST_OPERATIONS = 100
"""Operations in one transaction; etcd allows 128 by default."""
_CONFLICT_PAUSE_S = 0.002
"""Longest pause in seconds before an addition is retried after a conflict, multiplied by the number of tries."""
LEASE_S = 300
"""How long keys outlive the last agent, if it could not delete them, in seconds."""
_alive: list["EtcdStore"] = []
"""[Note: kept] A C++ store that wraps one of ours (such as a `PrefixStore`) keeps only its C++ half alive, and could
no longer call the Python half. So stores live as long as their process. They are few and share their connections."""


class EtcdStore(Store):
    """A c10d store of the keys under one name in an etcd cluster; any number of threads may use it."""

    def __init__(self, url: str | EtcdUrl, timeout_s: float = 300.0) -> None:
        """Parse the URL; sends no request yet.

        Args:
            url: `etcd://HOST:PORT[,HOST:PORT...][/NAME]`.
            timeout_s: how long to wait for values and for a cluster that does not answer, in seconds.

        Raises:
            ConfigError: the URL is malformed.
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

    # -- lease of a job's keys --------------------------------------------------------------------------------------

    def open_lease(self) -> None:
        """Open the lease of this name, unless it is open; its keys live as long as an agent renews it.

        Raises:
            DistError: the cluster does not answer, or rejects the request.
        """
        if not self.renew_lease():
            try:
                self._call("lease/grant", {"ID": str(self._lease), "TTL": str(LEASE_S)})
            except EtcdRefusal:  # another agent was faster
                if not self.renew_lease():
                    raise

    def renew_lease(self) -> bool:
        """Renew the lease; False if it has expired, and the keys with it."""
        answer = self._call("lease/keepalive", {"ID": str(self._lease)})
        return int(answer.get("result", {}).get("TTL", 0)) > 0

    def clear(self) -> None:
        """Delete the keys of this name by revoking the lease; `open_lease` must precede any further write."""
        try:
            self._call("lease/revoke", {"ID": str(self._lease)})
        except EtcdRefusal:  # the lease has expired already
            return

    # -- the interface of c10d stores -------------------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value."""
        self._transact([self._put(key, _bytes(value))])

    def get(self, key: str) -> bytes:
        """Read a value, waiting until the key exists.

        Raises:
            DistStoreError: the key did not exist within the store's timeout.
        """
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Read several values, waiting until all keys exist."""
        found = self._await(keys, self._timeout)
        return [found[key] for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set several values."""
        wanted = dict(zip(keys, map(_bytes, values), strict=True))
        for some in _slices(list(wanted)):
            self._transact([self._put(key, wanted[key]) for key in some])

    def add(self, key: str, value: int) -> int:
        """Add to a counter, which begins at 0; returns its new value."""
        if value == 0:
            found, _ = self._read([key])
            if key in found:
                return int(found[key])
        return int(self._change(key, lambda text: str(int(text or b"0") + value).encode()))

    def append(self, key: str, value: str | bytes) -> None:
        """Append to a value, which is empty at first."""
        self._change(key, lambda former: (former or b"") + _bytes(value))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Set a value if the present one equals `expected_value`; an empty one also matches a missing key.

        Returns:
            The present value afterwards; `expected_value` if there is none, as in TCPStore.
        """
        old, new = _bytes(expected_value), _bytes(desired_value)
        conditions = [_condition("VALUE", _encoded(old))]
        if not old:
            conditions.insert(0, _condition("VERSION", "0"))  # the key does not exist
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
        """Whether all keys exist."""
        return not set(keys).difference(self._read(keys, keys_only=True)[0])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist.

        Raises:
            DistStoreError: a key did not exist in time.
        """
        self._await(keys, self._timeout if timeout is None else timeout, keys_only=True)

    def delete_key(self, key: str) -> bool:
        """Delete a key; returns whether it existed."""
        return "deleted" in self._call("kv/deleterange", {"key": self._key(key)})

    def num_keys(self) -> int:
        """Number of keys under this store's name, without the store's own markers."""
        after_all = _encoded(f"/{self.url.name}0".encode())  # "0" follows "/"
        all_keys = self._look("", range_end=after_all, count_only=True)
        markers = self._look("#", range_end=self._key("$"), count_only=True)
        answers = self._transact([all_keys, markers])["responses"]
        there, not_ours = (int(each["response_range"].get("count", 0)) for each in answers)
        return there - not_ours

    def has_extended_api(self) -> bool:
        """Whether `append`, `multi_get` and `multi_set` are supported."""
        return True

    def clone(self) -> Self:
        """Return another store of the same keys."""
        return type(self)(self.url, self._timeout.total_seconds())

    deleteKey = delete_key  # the names that c10d calls from C++
    getNumKeys = num_keys

    # -- requests ---------------------------------------------------------------------------------------------------

    def _await(self, keys: Sequence[str], timeout: timedelta, *, keys_only: bool = False) -> dict[str, bytes]:
        """Wait until all keys exist; returns their values."""
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
        """Return the values of those keys that exist, and the cluster revision up to which they are current."""
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
        """Replace a value by `change(value)`, atomically; see [Note: requests that come twice]."""
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
    """Derive the lease's ID from the name, so that all processes of a job know it."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1 or 1


def _condition(target: str, value: str) -> Json:
    field = {"VALUE": "value", "VERSION": "version", "MOD": "mod_revision"}[target]
    return {"target": target, field: value}


def _entry(response: Json) -> tuple[bytes | None, int]:
    """Return what a transaction has read: the value (None if there is none), and the revision of its last change."""
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
