"""Two namespaces as two nodes: they join, they go, and what crosses their link is what the model says."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import netns

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "hsdp_traffic.py"
pytestmark = [
    pytest.mark.spawns,
    pytest.mark.skipif(netns.why_not() is not None, reason=f"no namespaces: {netns.why_not()}"),
]


def namespaces(prefix=netns.PREFIX):
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=10, check=True).stdout
    return {line.split()[0] for line in listed.splitlines() if line.startswith(prefix)}


def inside(namespace, code):
    """Run code in a process that has entered the namespace."""
    program = f"from benchmarks import netns; netns.enter({namespace!r}); {code}"
    root = BENCHMARK.parents[1]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=root)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_node_sees_its_own_link_alone_and_counts_what_it_sends():
    with netns.two_nodes(100) as (first, second):
        before = int(inside(first.namespace, "print(netns.sent_bytes())"))
        send = f"[s.sendto(bytes(1000), ({second.address!r}, 9)) for _ in 'abc']"
        inside(first.namespace, f"import socket; s = socket.socket(type=socket.SOCK_DGRAM); {send}")
        assert int(inside(first.namespace, "print(netns.sent_bytes())")) - before >= 3000
        names = inside(first.namespace, "import socket; print(*(name for _, name in socket.if_nameindex()))").split()
        assert {"lo", netns.INTERFACE} <= set(names)
        assert "eth0" not in names


def test_nodes_are_gone_after_a_failure_inside():
    def fail_inside():
        with netns.two_nodes(100) as nodes:
            assert namespaces() >= {node.namespace for node in nodes}
            raise ArithmeticError("scripted trouble")

    with pytest.raises(ArithmeticError, match="scripted trouble"):
        fail_inside()
    assert namespaces(f"{netns.PREFIX}{os.getpid()}-") == set()


def test_what_a_killed_benchmark_left_is_removed_and_what_a_live_one_uses_is_kept():
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait(90)
    left, used = f"{netns.PREFIX}{dead.pid}-0", f"{netns.PREFIX}1-0"
    try:
        for name in (left, used):
            subprocess.run(["ip", "netns", "add", name], check=True, timeout=10)
        netns.remove_stale()
        assert left not in namespaces()
        assert used in namespaces()
    finally:
        for name in namespaces() & {left, used}:
            subprocess.run(["ip", "netns", "del", name], check=True, timeout=10)


def test_bytes_over_the_link_are_those_of_the_model(tmp_path):
    """Not a timing: the counters of the interfaces agree with the derivation, headers and acknowledgements apart."""
    out = tmp_path / "traffic.json"
    arguments = ["--rounds", "3", "--steps", "2", "--micro-steps", "2", "--megabits", "2000", "--json", str(out)]
    done = subprocess.run([sys.executable, str(BENCHMARK), *arguments], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    hybrid, full, staged, chosen = json.loads(out.read_text())["findings"]["egress"]
    names = ["hybrid", "full", "full, two stages", "full, gathers as measured"]
    assert [each["sharding"] for each in (hybrid, full, staged, chosen)] == names
    assert staged["egress_bytes"] == pytest.approx(staged["predicted_bytes"], rel=0.05)
    assert hybrid["egress_bytes"] == pytest.approx(hybrid["predicted_bytes"], rel=0.06)
    assert full["egress_bytes"] == pytest.approx(full["predicted_bytes"], rel=0.03)


@pytest.mark.parametrize("request_to_end", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_benchmark_removes_its_namespaces(request_to_end):
    process = subprocess.Popen(
        [sys.executable, str(BENCHMARK)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        # A shell's background jobs ignore it, and so would what they start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    prefix = f"{netns.PREFIX}{process.pid}-"
    try:
        deadline = time.monotonic() + 60
        while len(namespaces(prefix)) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert len(namespaces(prefix)) == 2
        process.send_signal(request_to_end)
        assert process.wait(90) != 0
        assert namespaces(prefix) == set()
    finally:
        process.kill()
        process.wait(10)
