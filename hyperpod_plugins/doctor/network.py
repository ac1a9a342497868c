"""Name, addresses, interfaces and ports of this machine, and how fast it copies over TCP.

[Note: which interface] gloo listens on the interfaces that GLOO_SOCKET_IFNAME names, else on the address of the host's
name if that is one of this machine, else on the loopback interface. Transfers between ranks, such as those of
snapshots, and the commit vote use the same address (`GroupSockets.own_address`).
"""

import errno
import fcntl
import ipaddress
import socket
import struct
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hyperpod_plugins import env
from hyperpod_plugins.doctor.finding import CheckStatus, Finding, JobSize, file_text, number_of, within

_RESOLVE_S = 5.0
_SLOW_RESOLVE_S = 1.0
_LOOPBACK_S = 0.3
_LOOPBACK_DEADLINE_S = 5.0
_CHUNK_BYTES = 2**20
_SLOW_LOOPBACK = 0.5e9  # bytes a second
_SLOW_MBITS = 10_000
_PORTS_OF_A_MACHINE, _PORTS_PER_RANK = 1000, 64
_SIOCGIFADDR = 0x8915
_IFREQ = struct.Struct("16s2xH20s")
_IFF_UP, _IFF_LOOPBACK = 0x1, 0x8


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """A network interface."""

    name: str
    addresses: tuple[str, ...] = ()
    is_up: bool = True
    is_loopback: bool = False
    mbits: int | None = None
    """Speed in Mb/s; None if the driver does not tell."""

    def __str__(self) -> str:
        """For a message."""
        speed = "of unknown speed" if self.mbits is None else f"{self.mbits / 1000:g} Gb/s"
        return f"{self.name} ({', '.join(self.addresses) or 'no address'}, {speed})"


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkFacts:
    """How this machine is connected."""

    host: str
    """Its name."""
    addresses: tuple[str, ...] = ()
    """Addresses to which the name resolves."""
    resolve_error: str = ""
    """Why it does not."""
    resolve_s: float = 0.0
    interfaces: tuple[Interface, ...] = ()
    variables: Mapping[str, str]
    """See `env.machine_variables`."""
    ports: tuple[int, int] | None = None
    """First and last port that the kernel chooses itself."""
    reserved_ports: str = ""
    """Ports that it leaves out, such as `29400,30000-30010`."""
    port_error: str = ""
    """Why the port of the rendezvous cannot be used; empty if it can, or is 0."""
    loopback_rate: float | None = None
    """Bytes a second of one TCP connection within this machine; None if that could not be measured."""


# -- gathering --------------------------------------------------------------------------------------------------------


def gather_network(port: int) -> NetworkFacts:
    """Look at the network, and measure the loopback interface; `port` is that of the rendezvous."""
    host, began_s = socket.gethostname(), time.monotonic()
    resolved = within(_RESOLVE_S, lambda: resolve(host))
    addresses, error = resolved or ((), f"no answer within {_RESOLVE_S:g} s")
    return NetworkFacts(
        host=host,
        addresses=addresses,
        resolve_error=error,
        resolve_s=time.monotonic() - began_s,
        interfaces=list_interfaces(),
        variables=env.machine_variables(),
        ports=parse_ports(file_text("/proc/sys/net/ipv4/ip_local_port_range")),
        reserved_ports=file_text("/proc/sys/net/ipv4/ip_local_reserved_ports").strip(),
        port_error=port_error(port) if port else "",
        loopback_rate=within(_LOOPBACK_DEADLINE_S, lambda: loopback_rate(_LOOPBACK_S)),
    )


def resolve(host: str) -> tuple[tuple[str, ...], str]:
    """Addresses of a name in the resolver's order, and why there are none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return (), str(error)
    return tuple(dict.fromkeys(str(each[4][0]) for each in found)), ""


def list_interfaces(root: Path = Path("/sys/class/net")) -> tuple[Interface, ...]:
    """The interfaces of this machine (of its network namespace)."""
    by_name = ipv6_addresses(file_text("/proc/net/if_inet6"))
    found: list[Interface] = []
    for _, name in socket.if_nameindex():
        flags, speed = file_text(root / name / "flags").strip(), number_of(file_text(root / name / "speed"))
        bits = int(flags, 16) if flags.startswith("0x") and set(flags[2:]) <= set("0123456789abcdef") else _IFF_UP
        address = ipv4_address(name)
        found.append(
            Interface(
                name=name,
                addresses=(*([address] if address else []), *by_name.get(name, ())),
                is_up=bool(bits & _IFF_UP),
                is_loopback=bool(bits & _IFF_LOOPBACK) or name == "lo",
                mbits=speed if speed is not None and speed > 0 else None,  # -1: unknown, as in virtual machines
            )
        )
    return tuple(found)


def ipv4_address(name: str) -> str:
    """The first IPv4 address of an interface; empty if it has none."""
    request = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket, suppress(OSError):
        return socket.inet_ntoa(fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)[20:24])
    return ""


def ipv6_addresses(text: str) -> dict[str, list[str]]:
    """Addresses by interface, from /proc/net/if_inet6; without link-local ones, which need a scope."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) == 6 and len(words[0]) == 32:
            with suppress(ValueError):
                address = ipaddress.IPv6Address(int(words[0], 16))
                if not address.is_link_local:
                    found.setdefault(words[5], []).append(str(address))
    return found


def parse_ports(text: str) -> tuple[int, int] | None:
    """First and last of `ip_local_port_range`."""
    numbers = [number_of(each) for each in text.split()]
    match numbers:
        case [int(first), int(last)] if 0 < first <= last < 2**16:
            return first, last
        case _:
            return None


def is_reserved(port: int, text: str) -> bool:
    """Whether `ip_local_reserved_ports` contains a port."""
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers = number_of(first), number_of(last or first)
        if numbers[0] is not None and numbers[1] is not None and numbers[0] <= port <= numbers[1]:
            return True
    return False


def port_error(port: int) -> str:
    """Why this machine cannot listen on a port; empty if it can."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
            listener.listen(1)
        except OSError as error:
            return "another program listens on it" if error.errno == errno.EADDRINUSE else str(error.strerror)
    return ""


def loopback_rate(duration_s: float) -> float | None:
    """Bytes a second that one TCP connection carries within this machine; None if there is no loopback interface."""
    try:
        with socket.create_server(("127.0.0.1", 0), backlog=1) as listener:
            listener.settimeout(_LOOPBACK_DEADLINE_S)
            sender = socket.create_connection(listener.getsockname(), _LOOPBACK_DEADLINE_S)
            with sender:
                receiver, _ = listener.accept()
                with receiver:
                    receiver.settimeout(_LOOPBACK_DEADLINE_S)
                    return _one_stream(sender, receiver, duration_s)
    except OSError:
        return None


def _one_stream(sender: socket.socket, receiver: socket.socket, duration_s: float) -> float:
    def send() -> None:
        chunk, until_s = bytes(_CHUNK_BYTES), time.monotonic() + duration_s
        with suppress(OSError):
            while time.monotonic() < until_s:
                sender.sendall(chunk)
            sender.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=send, name="hyperpod_doctor_stream", daemon=True)
    began_s, count, buffer = time.monotonic(), 0, bytearray(_CHUNK_BYTES)
    thread.start()
    while received := receiver.recv_into(buffer):
        count += received
    thread.join()
    return count / max(time.monotonic() - began_s, 1e-9)


# -- deciding ---------------------------------------------------------------------------------------------------------


def check_network(facts: NetworkFacts, job: JobSize) -> list[Finding]:
    """All findings of this module."""
    return [
        check_host_name(facts, job),
        check_interface(facts, job),
        check_nccl_interface(facts.interfaces, facts.variables),
        check_rendezvous_port(facts, job),
        check_port_range(facts.ports, job),
        check_loopback(facts.loopback_rate),
    ]


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach itself there."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def check_host_name(facts: NetworkFacts, job: JobSize) -> Finding:
    """Whether the host's name resolves to an address at which others reach this machine."""
    bad: CheckStatus = "error" if job.has_other_nodes and not facts.variables.get("GLOO_SOCKET_IFNAME") else "warning"
    correct = f"have {facts.host} resolve to the address that other nodes reach (/etc/hosts or DNS)"
    use_name = "or set GLOO_SOCKET_IFNAME to an interface of this machine"
    if not facts.addresses:
        found = f"{facts.host} does not resolve ({facts.resolve_error})"
        return Finding(name="host-name", status=bad, found=found, advice=f"{correct}, {use_name}.")
    listed = f"{facts.host} resolves to {', '.join(facts.addresses[:4])}"
    if all(map(is_loopback, facts.addresses)):
        return Finding(
            name="host-name",
            status=bad if job.has_other_nodes else "ok",
            found=f"{listed}, which other nodes cannot reach",
            advice=f"{correct}, {use_name}.",
        )
    own = {address for each in facts.interfaces for address in each.addresses}
    if own and not own & set(facts.addresses):
        return Finding(
            name="host-name",
            status=bad,
            found=f"{listed}, which is not an address of this machine: gloo then uses the loopback interface",
            advice=f"{correct}, {use_name}.",
        )
    if facts.resolve_s > _SLOW_RESOLVE_S:
        return Finding(
            name="host-name",
            status="warning",
            found=f"{listed}, after {facts.resolve_s:.1f} s",
            advice="put the name into /etc/hosts, or correct the name servers in /etc/resolv.conf.",
        )
    return Finding(name="host-name", status="ok", found=listed)


def chosen_interface(facts: NetworkFacts) -> tuple[Interface | None, str]:
    """The interface of gloo and of transfers between ranks, and how it is chosen; see [Note: which interface]."""
    names = facts.variables.get("GLOO_SOCKET_IFNAME", "")
    by_name = {each.name: each for each in facts.interfaces}
    if len(names) > 1:  # as torch
        return by_name.get(names.split(",")[0]), f"GLOO_SOCKET_IFNAME={names}"
    for address in facts.addresses:
        for each in facts.interfaces:
            if address in each.addresses or (each.is_loopback and is_loopback(address)):
                return each, f"address of {facts.host}"
    return next((each for each in facts.interfaces if each.is_loopback), None), "no other is found by the host's name"


def check_interface(facts: NetworkFacts, job: JobSize) -> Finding:
    """Whether copies between nodes use an interface that reaches them, and a fast one."""
    chosen, why = chosen_interface(facts)
    others = [each for each in facts.interfaces if each.is_up and not each.is_loopback and each.addresses]
    names = ", ".join(each.name for each in others) or "none has an address"

    def finding(status: CheckStatus, found: str, advice: str = "") -> Finding:
        return Finding(name="interface", status=status, found=found, advice=advice)

    if chosen is None:
        return finding("error", f"{why}, but there is no such interface", f"choose another one: {names}.")
    found = f"{chosen}, by {why}"
    if not chosen.is_up or not chosen.addresses:
        return finding("error", f"{found}; it is down or has no address", f"choose another one: {names}.")
    if chosen.is_loopback:
        status: CheckStatus = "error" if job.has_other_nodes else "ok"
        return finding(
            status, f"{found}: reaches no other node", f"for several nodes, set GLOO_SOCKET_IFNAME to one of: {names}."
        )
    faster = max((each for each in others if (each.mbits or 0) > (chosen.mbits or 0)), key=_speed, default=None)
    if faster is not None and chosen.mbits is not None:
        return finding(
            "warning", f"{found}, although {faster} is faster", f"GLOO_SOCKET_IFNAME={faster.name}, on all nodes alike."
        )
    if job.has_other_nodes and chosen.mbits is not None and chosen.mbits < _SLOW_MBITS:
        return finding(
            "warning",
            f"{found}: slow for gradients and snapshots of several nodes",
            "choose a faster network with GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, or take few large snapshots.",
        )
    return finding("ok", found)


def _speed(interface: Interface) -> int:
    return interface.mbits or 0


def check_nccl_interface(interfaces: tuple[Interface, ...], variables: Mapping[str, str]) -> Finding:
    """Whether NCCL_SOCKET_IFNAME names interfaces that exist."""
    text = variables.get("NCCL_SOCKET_IFNAME", "")
    if not text:
        found = "NCCL_SOCKET_IFNAME is not set: nccl chooses by itself"
        return Finding(name="nccl-interface", status="ok", found=found)
    is_negated, is_exact = text.startswith("^"), text.lstrip("^").startswith("=")
    asked = [each for each in text.lstrip("^=").split(",") if each]
    usable = [
        each.name
        for each in interfaces
        if each.is_up
        and each.addresses
        and is_negated != any(each.name == name if is_exact else each.name.startswith(name) for name in asked)
    ]
    up = ", ".join(each.name for each in interfaces if each.is_up and each.addresses) or "none is up"
    if usable:
        found = f"NCCL_SOCKET_IFNAME={text} allows {', '.join(usable)}"
        return Finding(name="nccl-interface", status="ok", found=found)
    return Finding(
        name="nccl-interface",
        status="error",
        found=f"NCCL_SOCKET_IFNAME={text} allows no interface of this machine that is up",
        advice=f"name one of: {up}.",
    )


def check_rendezvous_port(facts: NetworkFacts, job: JobSize) -> Finding:
    """Whether the port of the rendezvous is free, and stays so."""
    name, port = "rendezvous-port", job.port
    if port == 0:
        return Finding(name=name, status="ok", found="any free port")
    if facts.port_error:
        return Finding(
            name=name,
            status="warning",
            found=f"port {port} cannot be used: {facts.port_error}",
            advice="end the job that uses it, or choose another with --rdzv-endpoint=HOST:PORT, on all nodes alike.",
        )
    if facts.ports and facts.ports[0] <= port <= facts.ports[1] and not is_reserved(port, facts.reserved_ports):
        return Finding(
            name=name,
            status="warning",
            found=f"port {port} is free, but the kernel may give it to any connection: it chooses from "
            f"{facts.ports[0]} to {facts.ports[1]}",
            advice=f"sysctl -w net.ipv4.ip_local_reserved_ports={port}, or choose a port outside of that range.",
        )
    return Finding(name=name, status="ok", found=f"port {port} is free")


def check_port_range(ports: tuple[int, int] | None, job: JobSize) -> Finding:
    """Whether there are enough ports for the connections of the ranks."""
    if ports is None:
        found, advice = "the kernel does not report it", "look at `sysctl net.ipv4.ip_local_port_range`."
        return Finding(name="port-range", status="skipped", found=found, advice=advice)
    count, needed = ports[1] - ports[0] + 1, _PORTS_OF_A_MACHINE + _PORTS_PER_RANK * job.local_world_size
    found = f"{count:,} ports for connections, {ports[0]} to {ports[1]}"
    if count >= needed:
        return Finding(name="port-range", status="ok", found=found)
    return Finding(
        name="port-range",
        status="warning",
        found=f"{found}; {job.local_world_size} ranks need about {needed:,}",
        advice="sysctl -w net.ipv4.ip_local_port_range='32768 60999'.",
    )


def check_loopback(rate: float | None) -> Finding:
    """Whether this machine copies over TCP at a usual speed."""
    if rate is None:
        return Finding(
            name="loopback",
            status="error",
            found="no connection to 127.0.0.1",
            advice="ip link set lo up; launchers and ranks of a node meet there.",
        )
    found = f"{rate / 1e9:.2f} GB/s over one TCP connection within this machine"
    if rate >= _SLOW_LOOPBACK:
        return Finding(name="loopback", status="ok", found=found)
    return Finding(
        name="loopback",
        status="warning",
        found=f"{found}: slow",
        advice="see whether others use the cores (`top`), or a sandbox handles the network (gVisor).",
    )
