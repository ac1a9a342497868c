"""Two "nodes" on one machine: network namespaces joined by one link of limited bandwidth.

Needs root and iproute2; `why_not()` says what is missing. The names of the namespaces carry the process id of their
maker, so that what a killed benchmark left behind is recognised and removed by the next one.
"""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PREFIX = "hpbench"
INTERFACE = "link0"
_CLONE_NEWNET = 0x40000000
_COMMAND_TIMEOUT_S = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One namespace and its end of the link."""

    namespace: str
    address: str


def why_not() -> str | None:
    """Why no namespaces can be made here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root; run it as root, for example in a container with --privileged"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"the command {' and '.join(missing)} is missing; install iproute2"
    probe = f"{PREFIX}{os.getpid()}-probe"
    try:
        _run(f"ip netns add {probe}")
        _run(f"ip netns del {probe}")
    except subprocess.CalledProcessError as error:
        return f"this kernel or container forbids network namespaces: {error.stderr.strip()}"
    return None


@contextmanager
def two_nodes(megabits_per_s: float) -> Iterator[list[Node]]:
    """Two namespaces joined by a link of that bandwidth in each direction, 0: no limit; gone when the block is left."""
    remove_stale()
    nodes = [Node(namespace=f"{PREFIX}{os.getpid()}-{index}", address=f"10.231.0.{index + 1}") for index in range(2)]
    try:
        for node in nodes:
            _run(f"ip netns add {node.namespace}")
        first, second = (node.namespace for node in nodes)
        _run(f"ip link add {INTERFACE} netns {first} type veth peer name {INTERFACE} netns {second}")
        for node in nodes:
            inside = f"ip -n {node.namespace}"
            _run(f"{inside} addr add {node.address}/24 dev {INTERFACE}")
            _run(f"{inside} link set lo up")
            _run(f"{inside} link set {INTERFACE} up")
            limit = f"tbf rate {megabits_per_s}mbit burst 128kb latency 100ms"
            if megabits_per_s:
                _run(f"tc -n {node.namespace} qdisc add dev {INTERFACE} root {limit}")
        yield nodes
    finally:
        for node in nodes:
            subprocess.run(
                ["ip", "netns", "del", node.namespace], capture_output=True, timeout=_COMMAND_TIMEOUT_S, check=False
            )


def remove_stale() -> None:
    """Remove the namespaces of benchmarks that were killed before they could."""
    for line in _run("ip netns list").splitlines():
        name = line.split()[0]
        maker = name.removeprefix(PREFIX).partition("-")[0]
        if name.startswith(PREFIX) and maker.isdigit() and not Path(f"/proc/{maker}").exists():
            _run(f"ip netns del {name}")


def enter(namespace: str) -> None:
    """Move this thread, and the threads it will start, into a namespace; call it before anything opens a socket."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/run/netns/{namespace}").open() as handle:
        if libc.setns(handle.fileno(), _CLONE_NEWNET) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"cannot enter the network namespace {namespace}: {os.strerror(code)}")


def sent_bytes(interface: str = INTERFACE) -> int:
    """Bytes this process's namespace has sent over an interface, headers included."""
    # Not /sys/class/net: that shows the namespace in which /sys was mounted.
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    raise LookupError(f"this process's network namespace has no interface {interface}")


def _run(command: str) -> str:
    done = subprocess.run(command.split(), capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=True)
    return done.stdout
