"""Communication: the c10d backend `hyperpod`, whose groups outlive their connections, and what moves their bytes."""

from hyperpod_plugins.comm.backend import CommOptions, choose_transport
from hyperpod_plugins.comm.ballot import vote
from hyperpod_plugins.comm.breaker import Breaker, Phase, breaker
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
from hyperpod_plugins.comm.roles import WORLD, GroupRole
from hyperpod_plugins.comm.traffic import Traffic, reset_traffic, traffic, wire_bytes
from hyperpod_plugins.comm.works import waiting

__all__ = [
    "Breaker",
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
    "generation_of",
    "inner_spec",
    "join_world",
    "live_groups",
    "new_axis_group",
    "pinned",
    "register",
    "reset_traffic",
    "traffic",
    "vote",
    "waiting",
    "wire_bytes",
]
