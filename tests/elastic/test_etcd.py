"""etcd for a job's store: it behaves like torch's own, and no node's loss ends the job."""

import os
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
import torch.distributed as dist
from elastic.etcd_server import BINARY, EtcdServer, free_ports
from recovery.elastic_nodes import Nodes, assert_each_once, assert_whole_but_for_losses, samples_of, write_ids
from recovery.faults import HYPERPODRUN, TORCHRUN, left_processes
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters

from hyperpod_plugins import cli
from hyperpod_plugins.comm import sockets
from hyperpod_plugins.elastic import JobStore
from hyperpod_plugins.elastic.launcher.main import main
from hyperpod_plugins.elastic.rendezvous import backends
from hyperpod_plugins.elastic.rendezvous.handler import create_rendezvous
from hyperpod_plugins.elastic.store.etcd import EtcdStore, EtcdUrl
from hyperpod_plugins.env import JobEnv
from hyperpod_plugins.errors import ConfigError

pytestmark = [
    pytest.mark.spawns,
    pytest.mark.skipif(BINARY is None, reason="there is no etcd here (Debian's package etcd-server)"),
]

PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def etcd(tmp_path_factory):
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    yield server
    server.stop()


def new_store(etcd, timeout_s=PATIENCE_S):
    store = EtcdStore(f"{etcd.url}/test/{uuid.uuid4().hex}", timeout_s)
    store.open_lease()
    return store


@pytest.fixture(params=["tcp", "etcd"])
def stores(request, etcd):
    """Two connections to one store, each behind a prefix of its own, as jobs have them."""
    if request.param == "tcp":
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        clients = [dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False) for _ in range(2)]
    else:
        clients = [new_store(etcd)]
        clients.append(EtcdStore(clients[0].url))
    for client in clients:
        client.set_timeout(timedelta(seconds=PATIENCE_S))
    yield [dist.PrefixStore("outer", dist.PrefixStore("inner", client)) for client in clients]
    del request  # a server lives as long as this frame


def put(store, key, value):
    """Set a value; returns when the store has it, which `set` of torch's own does not wait for."""
    store.set(key, value)
    assert store.check([key])


@pytest.mark.parametrize("value", [b"text", b"", b"\x00\xff\n" * 50, "ünï".encode()])
def test_values_come_back_as_they_were(stores, value):
    put(stores[0], "key", value)
    assert stores[1].get("key") == value
    put(stores[1], "key", "another")
    assert stores[0].get("key") == b"another"


@pytest.mark.parametrize(
    ("there", "expected", "desired", "returned", "then"),
    [
        (None, "", "new", b"new", b"new"),
        (None, "old", "new", b"old", None),
        ("old", "", "new", b"old", b"old"),
        ("old", "old", "new", b"new", b"new"),
        ("old", "older", "new", b"old", b"old"),
        ("", "", "new", b"new", b"new"),
        ("old", "old", "", b"", b""),
        (None, "", b"\xff\x00", b"\xff\x00", b"\xff\x00"),
    ],
)
def test_compare_and_set(stores, there, expected, desired, returned, then):
    if there is not None:
        put(stores[0], "key", there)
    assert stores[1].compare_set("key", expected, desired) == returned
    assert stores[0].check(["key"]) == (then is not None)
    if then is not None:
        assert stores[0].get("key") == then


def test_counters(stores):
    assert stores[0].add("count", 0) == 0
    assert stores[1].check(["count"])
    assert [stores[i % 2].add("count", more) for i, more in enumerate((5, -7, 1))] == [5, -2, -1]
    assert stores[0].get("count") == b"-1"
    put(stores[0], "given", "40")
    assert stores[1].add("given", 2) == 42


def test_nobody_counts_the_same(stores):
    with ThreadPoolExecutor(8) as pool:
        counts = list(pool.map(lambda i: stores[i % 2].add("count", 1), range(80)))
    assert sorted(counts) == list(range(1, 81))


def test_one_of_many_sets_the_first_value(stores):
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda i: stores[i % 2].compare_set("key", "", f"from {i}"), range(16)))
    assert found == {stores[0].get("key")}


def test_many_keys_at_once(stores):
    keys = [f"key/{i}" for i in range(300)]
    stores[0].multi_set(keys, [f"{i}" for i in range(300)])
    assert stores[0].check(keys)
    assert stores[1].multi_get([*keys[::-1], keys[7]]) == [str(i).encode() for i in (*range(299, -1, -1), 7)]
    assert stores[1].check(keys)
    assert stores[1].check([])
    assert not stores[1].check([*keys, "missing"])
    assert stores[1].has_extended_api()


def test_values_grow(stores):
    stores[0].append("list", "a")
    assert stores[0].check(["list"])
    stores[1].append("list", b"\xff")
    assert stores[1].check(["list"])
    assert stores[0].get("list") == b"a\xff"


def test_keys_are_deleted(stores):
    before = stores[0].num_keys()
    put(stores[0], "a", "1")
    stores[0].add("b", 1)
    assert stores[1].num_keys() == before + 2
    assert stores[1].delete_key("a")
    assert not stores[1].delete_key("a")
    assert not stores[0].check(["a"])
    assert stores[0].num_keys() == before + 1


@pytest.mark.parametrize("how", ["wait", "get", "multi_get"])
def test_a_wait_ends_when_the_last_value_comes(stores, how):
    keys = ["a", "b", "c"]
    waits = {
        "wait": lambda: stores[1].wait(keys, timedelta(seconds=PATIENCE_S)),
        "get": lambda: [stores[1].get(key) for key in keys],
        "multi_get": lambda: stores[1].multi_get(keys),
    }
    ended = []
    thread = threading.Thread(target=lambda: ended.append((waits[how](), time.monotonic())))
    thread.start()
    for key in ("c", "a", "b"):
        time.sleep(0.1)
        assert not ended
        stores[0].set(key, key)
    came_s = time.monotonic()
    thread.join(PATIENCE_S)
    assert ended[0][0] == (None if how == "wait" else [b"a", b"b", b"c"])
    assert ended[0][1] - came_s < 1.0


def test_waits_are_over_in_time(stores):
    began_s = time.monotonic()
    with pytest.raises(dist.DistStoreError, match="wait timeout after 300ms"):
        stores[0].wait(["never"], timedelta(seconds=0.3))
    stores[0].set_timeout(timedelta(seconds=0.3))
    assert stores[0].timeout == timedelta(seconds=0.3)
    for wait in (lambda: stores[0].get("never"), lambda: stores[0].multi_get(["never"])):
        with pytest.raises(dist.DistStoreError):
            wait()
    assert 0.8 < time.monotonic() - began_s < 5.0


def test_gloo_meets_there(etcd):
    """Groups are connected from C++, which knows of no Python."""
    store = new_store(etcd)

    def member(rank):
        group = dist.ProcessGroupGloo(dist.PrefixStore("groups", EtcdStore(store.url)), rank, 3)
        value = torch.tensor([rank + 1.0])
        group.allreduce([value]).wait()
        return float(value)

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(member, range(3))) == [6.0] * 3


# -- what TCPStore has not: a server that goes and comes back, several of them, and an end of the keys -------------


def test_a_cluster_that_comes_back_is_waited_for(tmp_path):
    server = EtcdServer(tmp_path)
    try:
        store = new_store(server)
        store.add("count", 1)
        with ThreadPoolExecutor(2) as pool:
            waits = pool.submit(store.wait, ["late"], timedelta(seconds=PATIENCE_S))
            time.sleep(0.2)
            server.stop()
            counts = pool.submit(store.add, "count", 1)
            time.sleep(0.5)
            server.start()
            assert counts.result(PATIENCE_S) == 2
            store.set("late", "1")
            waits.result(PATIENCE_S)
        server.stop()
        store.set_timeout(timedelta(seconds=0.5))
        for question in (lambda: store.check(["count"]), lambda: store.add("count", 1), lambda: store.get("count")):
            with pytest.raises(dist.DistNetworkError, match=rf"etcd at 127\.0\.0\.1:{server.port} has not answered"):
                question()
    finally:
        server.stop()


def test_the_other_members_are_asked_where_one_is_lost(etcd):
    url = etcd.url.replace("etcd://", f"etcd://127.0.0.1:{free_ports(1)[0]},") + f"/test/{uuid.uuid4().hex}"
    store = EtcdStore(url)
    store.open_lease()
    assert [store.add("count", 1) for _ in range(3)] == [1, 2, 3]


def test_an_answer_that_was_lost_counts_once(etcd, monkeypatch):
    """The request is sent again, though it was carried out."""
    store, other = new_store(etcd), None
    other = EtcdStore(store.url)
    call, lost = store._gateway.call, []

    def forgetful(path, wanted, timeout_s):
        answer = call(path, wanted, timeout_s)
        if answer.get("succeeded") and wanted["compare"] and not lost:
            lost.append(answer)
            other.add("count", 10)
            return call(path, wanted, timeout_s)
        return answer

    monkeypatch.setattr(store._gateway, "call", forgetful)
    assert store.add("count", 1) == 1
    assert lost
    assert other.add("count", 0) == 11


def test_keys_end_with_their_lease(etcd):
    store = new_store(etcd)
    other = EtcdStore(EtcdUrl(members=store.url.members, name=f"{store.url.name}x"))
    other.open_lease()
    for each in (store, other):
        each.open_lease()  # by another agent
        each.set("key", "1")
        assert each.renew_lease()
    store.clear()
    store.clear()
    assert not store.renew_lease()
    assert not store.check(["key"])
    assert store.num_keys() == 0
    with pytest.raises(dist.DistStoreError, match="lease not found"):
        store.set("key", "2")
    assert other.check(["key"])
    store.open_lease()
    store.set("key", "3")


@pytest.mark.parametrize(
    ("text", "members", "name"),
    [
        ("etcd://a", (("a", 2379),), ""),
        ("etcd://a:1,b:2/x/y", (("a", 1), ("b", 2)), "x/y"),
        ("etcd://[::1]:7/a%20job", (("::1", 7),), "a job"),
    ],
)
def test_urls(text, members, name):
    url = EtcdUrl.parse(text)
    assert (url.members, url.name) == (members, name)
    assert EtcdUrl.parse(str(url)) == url


@pytest.mark.parametrize("text", ["etcd://", "etcd://a:b", "etcd://a,,b", "etcd://user:secret@a"])
def test_wrong_urls_are_refused(text):
    with pytest.raises(ConfigError, match="must be etcd://HOST:PORT"):
        EtcdUrl.parse(text)


def test_its_connections_are_no_wires_of_a_group(etcd):
    store = EtcdStore(f"{etcd.url},127.0.0.1:7/test/wires")
    assert sockets.server_ports(dist.PrefixStore("a", dist.PrefixStore("b", store))) == {etcd.port, 7}


# -- jobs ------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[HYPERPODRUN, pytest.param(TORCHRUN, marks=pytest.mark.variant)])
def nodes(request, etcd, tmp_path):
    """Agents of one job that meet in etcd."""
    nodes = Nodes(tmp_path, write_ids(tmp_path / "ids"), request.param)
    kept = [arg for arg in nodes.args if not arg.startswith(("--rdzv-endpoint", "--nnodes"))]
    nodes.num_first = 2 if request.param == TORCHRUN else 3
    own = [
        f"--nnodes={nodes.num_first}:4",
        f"--rdzv-endpoint={etcd.url}",
        f"--rdzv-id={request.param}",
        "--local-addr=localhost",
    ]
    nodes.args = (*kept, *own)
    nodes.environ |= {"SHRINK_S": "0.5"}
    nodes.keys = EtcdStore(f"{etcd.url}/hyperpod/{request.param}")
    yield nodes
    nodes.clear()


def await_(nodes, condition):
    until_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until_s, nodes.output()
        time.sleep(0.02)


def test_the_job_outlives_the_node_that_came_first(nodes, etcd, capsys, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(nodes.folder))  # where the tickets are
    nodes.start("a")
    await_(nodes, lambda: nodes.keys.check(["hyperpod/rendezvous/candidates/0/1"]))
    for name in "bc"[: nodes.num_first - 1]:
        nodes.start(name)
    nodes.await_size(nodes.num_first)
    nodes.lose("a")
    nodes.await_size(nodes.num_first - 1)
    if nodes.launcher == TORCHRUN:  # another node comes
        assert cli.main(["status"]) == 0
        assert "1 rank in 1 replica " in capsys.readouterr().out
        nodes.start("d")
        nodes.await_size(2)
    else:  # etcd goes and comes back; a worker is lost, and the first store for its replacement is gone by now
        etcd.stop()
        time.sleep(1.0)
        etcd.start()
        nodes.kill_rank(1)
        assert "takes its place" in nodes.output()
        last = max(nodes.steps())
        await_(nodes, lambda: max(nodes.steps()) > last + 10)
    num_steps = nodes.finish()
    steps = nodes.steps()
    assert_whole_but_for_losses(steps, num_steps, num_losses=2)
    assert_each_once([i for ids in samples_of(steps) for i in ids])
    assert nodes.keys.num_keys() == 0
    assert not left_processes("FAULTS_FOLDER=" + str(nodes.folder), patience_s=5.0)


def begin(handler):
    """What torch's agent does with a rendezvous, for one worker."""
    info = handler.next_rendezvous()
    info.store.set(f"torchelastic/role_info/{info.rank}", b'{"local_world_size": 1}')
    return info


def test_initial_nodes_share_a_store_of_torch_and_joiners_need_none_of_others(etcd):
    """Of the plain kind, which workers use before they meet in etcd."""
    config = {"keep_alive_interval": "0.05", "last_call_timeout": "0", "local_addr": "localhost"}
    name = uuid.uuid4().hex
    handlers = [create_rendezvous(RendezvousParameters("hyperpod", etcd.url, name, 2, 2, **config)) for _ in range(3)]
    keys = EtcdStore(f"{etcd.url}/hyperpod/{name}")
    with ThreadPoolExecutor() as pool:
        try:
            infos = [each.result(PATIENCE_S) for each in [pool.submit(begin, each) for each in handlers[:2]]]
            assert infos[0].bootstrap_store_info == infos[1].bootstrap_store_info
            assert not any(handler.serves_store for handler in handlers)
            assert JobEnv.from_environ() == replace(handlers[0].job, agent_pid=os.getpid())
            job_store = JobStore.connect(handlers[0].job)
            job_store.arm()
            handlers[0]._keep_alive.stop()  # as if its machine had been unplugged
            info = pool.submit(begin, handlers[2]).result(PATIENCE_S)
            assert info.rank == infos[0].rank
            assert job_store.incarnations(range(2)) == [int(rank == info.rank) for rank in range(2)]
            found = info.bootstrap_store_info
            assert found != infos[0].bootstrap_store_info
            dist.TCPStore(found.master_addr, found.master_port, is_master=False, wait_for_workers=False).set("a", "b")
            assert keys.num_keys() > 0
            for handler in handlers[1:]:
                handler.finish()
            assert all(pool.map(lambda handler: handler.shutdown(), handlers[1:]))
            assert keys.num_keys() == 0
        finally:
            for handler in handlers:
                handler._keep_alive.stop()


def test_nobody_answers_there(capfd, monkeypatch):
    monkeypatch.setattr(backends, "_FIRST_ANSWER_S", 0.5)
    port = free_ports(1)[0]
    assert main([f"--rdzv-endpoint=etcd://127.0.0.1:{port}", "--preload=torch", "a_program.py"]) == 1
    told = capfd.readouterr().err
    assert f"hyperpodrun: etcd at 127.0.0.1:{port} has not answered" in told
    assert "Connection refused" in told
    assert "Start etcd (3.4 or later) there" in told


def test_something_else_answers_there(monkeypatch):
    monkeypatch.setattr(backends, "_FIRST_ANSWER_S", 0.5)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        try:
            for port, why in ((server.port, "has not answered"), (http.server_port, "is .* a member of etcd")):
                parameters = RendezvousParameters("hyperpod", f"etcd://127.0.0.1:{port}", "job", 1, 1)
                with pytest.raises(RendezvousConnectionError, match=f"{why}.*Start etcd"):
                    create_rendezvous(parameters)
        finally:
            http.shutdown()
            thread.join(PATIENCE_S)
