"""Communication: the c10d backend `hyperpod`, whose groups outlive their connections, and what moves their bytes."""

from hyperpod_plugins.comm.backend import choose_transport
from hyperpod_plugins.comm.ballot import vote
from hyperpod_plugins.comm.breaker import Breaker, Phase, breaker
from hyperpod_plugins.comm.channel import Channel
from hyperpod_plugins.comm.device_queue import device_queue
from hyperpod_plugins.comm.device_queue import record as record_queue
from hyperpod_plugins.comm.generations import Reform, abandon_broken, break_groups
from hyperpod_plugins.comm.groups import (
    connect,
    create_group,
    create_smddp_group,
    inner_spec,
    join_world,
    new_axis_group,
    register,
)
from hyperpod_plugins.comm.resilient import ResilientProcessGroup, generation_of, live_groups, pinned
from hyperpod_plugins.comm.roles import WORLD, CommOptions, GroupRole
from hyperpod_plugins.comm.traffic import Traffic, reset_traffic, traffic, wire_bytes
from hyperpod_plugins.comm.works import current_wait

__all__ = [
    "Breaker",
    "Channel",
    "CommOptions",
    "GroupRole",
    "Phase",
    "Reform",
    "ResilientProcessGroup",
    "Traffic",
    "WORLD",
    "abandon_broken",
    "break_groups",
    "breaker",
    "choose_transport",
    "connect",
    "create_group",
    "create_smddp_group",
    "current_wait",
    "device_queue",
    "generation_of",
    "inner_spec",
    "join_world",
    "live_groups",
    "new_axis_group",
    "pinned",
    "record_queue",
    "register",
    "reset_traffic",
    "traffic",
    "vote",
    "wire_bytes",
]
