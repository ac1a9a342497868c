"""Names, interfaces and ports; which interface copies use, and whether other nodes reach it."""

import socket
from dataclasses import replace

import pytest

from hyperpod_plugins.doctor.finding import JobSize
from hyperpod_plugins.doctor.network import (
    Interface,
    NetworkFacts,
    check_network,
    chosen_interface,
    gather_network,
    ipv6_addresses,
    is_reserved,
    parse_ports,
    port_error,
    resolve,
)

LO = Interface(name="lo", addresses=("127.0.0.1", "::1"), is_loopback=True)
ETH = Interface(name="eth0", addresses=("10.0.0.2",), mbits=25_000)
FAST = Interface(name="eth1", addresses=("10.1.0.2",), mbits=100_000)
GOOD = NetworkFacts(
    host="node1",
    addresses=("10.0.0.2",),
    interfaces=(LO, ETH),
    variables={},
    ports=(32768, 60999),
    loopback_rate=3e9,
)
NODE = JobSize(world_size=8, local_world_size=8)
CLUSTER = JobSize(world_size=16, local_world_size=8)


def finding(name, job, **changes):
    return {each.name: each for each in check_network(replace(GOOD, **changes), job)}[name]


@pytest.mark.parametrize("job", [NODE, CLUSTER])
def test_a_good_network(job):
    assert {each.status for each in check_network(GOOD, job)} == {"ok"}


@pytest.mark.parametrize(
    ("changes", "alone", "in_cluster", "words"),
    [
        ({"addresses": (), "resolve_error": "unknown"}, "warning", "error", "does not resolve (unknown)"),
        ({"addresses": ("127.0.1.1",)}, "ok", "error", "cannot reach"),
        ({"addresses": ("127.0.1.1", "::1")}, "ok", "error", "cannot reach"),
        ({"addresses": ("10.9.9.9",)}, "warning", "error", "not an address of this machine"),
        ({"addresses": ("127.0.1.1",), "variables": {"GLOO_SOCKET_IFNAME": "eth0"}}, "ok", "warning", "cannot reach"),
        ({"addresses": ("127.0.1.1", "10.0.0.2")}, "ok", "ok", "node1 resolves to"),
        ({"resolve_s": 3.0}, "warning", "warning", "after 3.0 s"),
    ],
)
def test_the_name_of_the_host(changes, alone, in_cluster, words):
    for job, status in ((NODE, alone), (CLUSTER, in_cluster)):
        found = finding("host-name", job, **changes)
        assert found.status == status
        assert words in found.found


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "eth0"),
        ({"addresses": ("127.0.1.1",)}, "lo"),
        ({"addresses": ("127.0.1.1", "10.0.0.2")}, "lo"),
        ({"addresses": ("10.9.9.9",)}, "lo"),
        ({"addresses": ("10.9.9.9", "10.0.0.2")}, "eth0"),
        ({"addresses": ()}, "lo"),
        ({"variables": {"GLOO_SOCKET_IFNAME": "eth0"}, "addresses": ("127.0.1.1",)}, "eth0"),
        ({"variables": {"GLOO_SOCKET_IFNAME": "eth0,lo"}}, "eth0"),
        ({"variables": {"GLOO_SOCKET_IFNAME": "ib0"}}, None),
        ({"variables": {"GLOO_SOCKET_IFNAME": ""}}, "eth0"),
    ],
)
def test_the_interface_that_gloo_chooses(changes, name):
    chosen, _ = chosen_interface(replace(GOOD, **changes))
    assert (chosen and chosen.name) == name


@pytest.mark.parametrize(
    ("changes", "alone", "in_cluster", "words"),
    [
        ({"variables": {"GLOO_SOCKET_IFNAME": "ib0"}}, "error", "error", "no such interface"),
        ({"addresses": ("127.0.1.1",)}, "ok", "error", "reaches no other node"),
        ({"interfaces": (LO, ETH, FAST)}, "warning", "warning", "although eth1"),
        ({"interfaces": (LO, replace(ETH, mbits=None), FAST)}, "ok", "ok", "unknown speed"),
        ({"interfaces": (LO, ETH, replace(FAST, is_up=False))}, "ok", "ok", "25 Gb/s"),
        ({"interfaces": (LO, replace(ETH, mbits=1000))}, "ok", "warning", "1 Gb/s"),
        ({"interfaces": (LO, replace(ETH, is_up=False))}, "error", "error", "is down"),
    ],
)
def test_the_interface_of_copies(changes, alone, in_cluster, words):
    for job, status in ((NODE, alone), (CLUSTER, in_cluster)):
        found = finding("interface", job, **changes)
        assert found.status == status
        assert words in found.found


@pytest.mark.parametrize(
    ("text", "status", "words"),
    [
        ("", "ok", "not set"),
        ("eth", "ok", "allows eth0"),
        ("=eth0", "ok", "allows eth0"),
        ("=eth", "error", "no interface"),
        ("ib", "error", "no interface"),
        ("^lo", "ok", "allows eth0"),
        ("^lo,eth", "error", "no interface"),
        ("ib0,lo", "ok", "allows lo"),
    ],
)
def test_the_interface_of_nccl(text, status, words):
    found = finding("nccl-interface", NODE, variables={"NCCL_SOCKET_IFNAME": text})
    assert found.status == status
    assert words in found.found


@pytest.mark.parametrize(
    ("name", "changes", "port", "status", "words"),
    [
        ("rendezvous-port", {}, 0, "ok", "any free port"),
        ("rendezvous-port", {"port_error": "another program listens on it"}, 29400, "warning", "another program"),
        ("rendezvous-port", {}, 40000, "warning", "may give it"),
        ("rendezvous-port", {"reserved_ports": "1,39999-40001"}, 40000, "ok", "is free"),
        ("port-range", {"ports": None}, 29400, "skipped", "does not report"),
        ("port-range", {"ports": (60000, 60999)}, 29400, "warning", "need about 1,512"),
        ("loopback", {"loopback_rate": None}, 29400, "error", "127.0.0.1"),
        ("loopback", {"loopback_rate": 1e8}, 29400, "warning", "0.10 GB/s"),
    ],
)
def test_ports_and_loopback(name, changes, port, status, words):
    found = finding(name, replace(NODE, port=port), **changes)
    assert found.status == status
    assert words in found.found


@pytest.mark.parametrize(
    ("text", "ports"),
    [
        ("32768\t60999\n", (32768, 60999)),
        ("5 4", None),
        ("1", None),
        ("", None),
        ("a b", None),
        ("1 99999", None),
    ],
)
def test_the_range_of_ports(text, ports):
    assert parse_ports(text) == ports


@pytest.mark.parametrize(("text", "is_in"), [("", False), ("7", True), ("1-6,8", False), ("5-7", True), ("x-y", False)])
def test_reserved_ports(text, is_in):
    assert is_reserved(7, text) == is_in


def test_ipv6_addresses_by_interface():
    lines = [
        "00000000000000000000000000000001 01 80 10 80       lo",
        "fe800000000000000000000000000001 02 40 20 80     eth0",
        "fd000000000000000000000000000002 02 40 00 80     eth0",
        "zz000000000000000000000000000002 02 40 00 80     eth0",
        "nonsense",
    ]
    assert ipv6_addresses("\n".join(lines)) == {"lo": ["::1"], "eth0": ["fd00::2"]}


def test_a_name_that_does_not_resolve():
    for name in ("no-such-host.invalid", "x" * 300, "a..b"):
        addresses, error = resolve(name)
        assert addresses == ()
        assert error


def test_a_taken_port_is_noticed():
    with socket.create_server(("", 0)) as listener:
        assert port_error(listener.getsockname()[1]) == "another program listens on it"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        free = listener.getsockname()[1]
    assert port_error(free) == ""


def test_this_machine_is_examined():
    facts = gather_network(0)
    assert any(each.is_loopback and "127.0.0.1" in each.addresses for each in facts.interfaces)
    assert facts.loopback_rate > 1e6
    assert facts.host == socket.gethostname()
