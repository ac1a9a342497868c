"""Communication: the c10d backend `hyperpod`, whose process groups outlive their connections, and its transports."""

from hyperpod_plugins.comm.channel import Channel
from hyperpod_plugins.comm.commit_vote import all_max, commit_vote
from hyperpod_plugins.comm.groups import (
    choose_transport,
    connect,
    create_group,
    create_smddp_group,
    join_world,
    new_axis_group,
    register,
    spec_for_generation,
)
from hyperpod_plugins.comm.health import GroupHealth, Phase
from hyperpod_plugins.comm.options import WORLD, CommOptions, GroupKey
from hyperpod_plugins.comm.process_group import ResilientProcessGroup, generation_of, live_groups, pin_generation
from hyperpod_plugins.comm.reconfigure import Reconfiguration, break_groups, release_broken
from hyperpod_plugins.comm.runtime import device_queue, group_health, reset_traffic, traffic
from hyperpod_plugins.comm.runtime import record_event as record_queue
from hyperpod_plugins.comm.traffic import Traffic, wire_bytes
from hyperpod_plugins.comm.work import current_wait

__all__ = [
    "Channel",
    "CommOptions",
    "GroupHealth",
    "GroupKey",
    "Phase",
    "Reconfiguration",
    "ResilientProcessGroup",
    "Traffic",
    "WORLD",
    "all_max",
    "break_groups",
    "choose_transport",
    "commit_vote",
    "connect",
    "create_group",
    "create_smddp_group",
    "current_wait",
    "device_queue",
    "generation_of",
    "group_health",
    "join_world",
    "live_groups",
    "new_axis_group",
    "pin_generation",
    "record_queue",
    "register",
    "release_broken",
    "reset_traffic",
    "spec_for_generation",
    "traffic",
    "wire_bytes",
]
