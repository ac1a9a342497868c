"""A node whose network is unplugged: the others go on without it, and it comes back when it is plugged in again."""

import subprocess

import pytest
from recovery.elastic_nodes import PATIENCE_S, Nodes, assert_whole_but_for_losses
from recovery.faults import left_processes

from benchmarks import netns

pytestmark = [
    pytest.mark.spawns,
    pytest.mark.skipif(netns.why_not() is not None, reason=f"no namespaces: {netns.why_not()}"),
]


def within(node, *, serves_store=False):
    """Options of an agent in a namespace."""
    conf = f"--rdzv-conf=keep_alive_interval=0.2,last_call_timeout=0,read_timeout=10,is_host={int(serves_store)}"
    return {"prefix": ("ip", "netns", "exec", node.namespace), "args": (conf, "--local-addr", node.address)}


def plug(node, state):
    command = ["ip", "-n", node.namespace, "link", "set", netns.INTERFACE, state]
    subprocess.run(command, check=True, capture_output=True, timeout=10)


def test_unplugged_and_plugged_in_again(tmp_path, tokens):
    with netns.two_nodes(1000) as (first, second):
        nodes = Nodes(tmp_path, tokens, endpoint=f"{first.address}:29400")
        try:
            nodes.environ["GLOO_SOCKET_IFNAME"] = netns.INTERFACE
            nodes.start("a", **within(first, serves_store=True))
            nodes.start("b", **within(second))
            nodes.await_size(2)
            plug(second, "down")
            nodes.await_size(1)
            cut_off = nodes.agents.pop("b")
            assert cut_off.wait(PATIENCE_S) != 0
            assert not left_processes(cut_off.mark, patience_s=10.0)
            plug(second, "up")
            nodes.start("c", **within(second))
            nodes.await_size(2)
            num_steps = nodes.finish()
        finally:
            nodes.clear()
    assert_whole_but_for_losses(nodes.steps(), num_steps, num_losses=1)
