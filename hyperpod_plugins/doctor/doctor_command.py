"""`hyperpod doctor`: its arguments, the examination, and the report as a table or JSON."""

import argparse
import json
import secrets
import socket
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hyperpod_plugins.doctor.checkpoint_folder import FolderFacts, check_folder, gather_folder
from hyperpod_plugins.doctor.cluster import ClusterFacts, check_cluster, gather_cluster
from hyperpod_plugins.doctor.finding import CheckStatus, Finding, JobSize
from hyperpod_plugins.doctor.gpus import GpuFacts, check_gpus, gather_gpus
from hyperpod_plugins.doctor.machine import MachineFacts, check_machine, gather_machine
from hyperpod_plugins.doctor.network import NetworkFacts, check_network, gather_network
from hyperpod_plugins.doctor.peer import (
    TOKEN_BYTES,
    PeerFacts,
    check_peer,
    measure_peer,
    open_listener,
    parse_endpoint,
    parse_token,
    serve_one,
)
from hyperpod_plugins.doctor.software import SoftwareFacts, check_nccl, check_software, gather_software
from hyperpod_plugins.errors import ConfigError

_FORMAT = 1
_WIDTH = 118
_STATUSES: tuple[CheckStatus, ...] = ("ok", "warning", "error", "skipped")
_ALL_ADDRESSES = "0.0.0.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All that was gathered."""

    software: SoftwareFacts
    machine: MachineFacts
    gpus: GpuFacts
    network: NetworkFacts
    cluster: ClusterFacts
    folder: FolderFacts | None = None
    """None if no folder was named."""
    peer: PeerFacts | None = None
    """None if no other node was to be measured."""


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `hyperpod doctor`."""
    hidden: dict[str, Any] = {"default": argparse.SUPPRESS}  # so that --help shows no "(default: None)"
    parser.set_defaults(checkpoint_folder=None, listen=None, peer=None, token=None)
    size, defaults = parser.add_argument_group("the job"), JobSize()
    size.add_argument("--world-size", type=int, default=defaults.world_size, help="number of ranks")
    size.add_argument("--local-world-size", type=int, default=0, help="ranks on this machine; 0 for all of them")
    of_snapshot = "size of one rank's snapshot in GiB, such as `hyperpod plan --model` shows; 0 if it is not known"
    size.add_argument("--snapshot-gib", type=float, default=defaults.snapshot_gib, help=of_snapshot)
    size.add_argument("--port", type=int, default=defaults.port, help="port of the rendezvous; 0 for any free one")
    size.add_argument("--checkpoint-folder", help="folder in which to write, and delete, a test file", **hidden)
    other = parser.add_argument_group("another node: compare clocks and measure the network")
    which = other.add_mutually_exclusive_group()
    of_listen = "wait for one --peer, on all addresses or one, and on a free port or one; prints what to run there"
    which.add_argument("--listen", nargs="?", const="0", metavar="[ADDRESS:]PORT", help=of_listen, **hidden)
    which.add_argument("--peer", metavar="HOST:PORT", help="node on which --listen waits", **hidden)
    other.add_argument("--token", help="what --listen has printed; with --listen, a token of your own", **hidden)
    other.add_argument("--wait", type=float, default=60.0, help="longest wait in seconds for the other node")
    parser.add_argument("--strict", action="store_true", help="exit code 1 if there are warnings, but no errors")
    parser.add_argument("--json", action="store_true", help="print JSON")


def doctor_report(arguments: argparse.Namespace, announce: Callable[[str], None]) -> tuple[list[str], int]:
    """Lines of the report, and the exit code: 0, 1 for warnings with `--strict`, or 2 for errors.

    Args:
        arguments: those of `add_doctor_arguments`.
        announce: prints a line at once: how to call this node, with `--listen`.

    Raises:
        ConfigError: an argument is missing or out of range.
    """
    job = JobSize(
        world_size=arguments.world_size,
        local_world_size=arguments.local_world_size or arguments.world_size,
        snapshot_gib=arguments.snapshot_gib,
        port=arguments.port,
    )
    peer = _measure(arguments, announce)  # first, as the other node waits for it
    folder = arguments.checkpoint_folder
    facts = Facts(
        software=gather_software(),
        machine=gather_machine(),
        gpus=gather_gpus(),
        network=gather_network(job.port),
        cluster=gather_cluster(),
        folder=None if folder is None else gather_folder(Path(folder).absolute()),
        peer=peer,
    )
    findings = findings_of(facts, job)
    code = exit_code(findings, is_strict=arguments.strict)
    lines = [as_json(findings, facts.network.host, code)] if arguments.json else as_table(findings)
    return lines, code


def _measure(arguments: argparse.Namespace, announce: Callable[[str], None]) -> PeerFacts | None:
    if not 0 < arguments.wait <= 24 * 3600:
        raise ConfigError(f"--wait {arguments.wait:g} must be a number of seconds, above 0 and at most a day.")
    if arguments.peer is not None:
        if arguments.token is None:
            raise ConfigError("--peer needs --token: give what --listen on the other node prints.")
        host, port = parse_endpoint(arguments.peer, "--peer")
        return measure_peer(host, port, parse_token(arguments.token), arguments.wait)
    if arguments.listen is None:
        if arguments.token is not None:
            raise ConfigError("--token needs --peer or --listen.")
        return None
    token = secrets.token_bytes(TOKEN_BYTES) if arguments.token is None else parse_token(arguments.token)
    host, port = parse_endpoint(arguments.listen, "--listen", default_host=_ALL_ADDRESSES, default_port=0)
    with open_listener(host, port) as listener:
        number = listener.getsockname()[1]
        shown = socket.gethostname() if host in (_ALL_ADDRESSES, "::") else f"[{host}]" if ":" in host else host
        announce(f"run on the other node: hyperpod doctor --peer {shown}:{number} --token {token.hex()}")
        return serve_one(listener, token, arguments.wait)


def findings_of(facts: Facts, job: JobSize) -> list[Finding]:
    """What the facts mean for a job."""
    torch_gpus = facts.gpus.torch
    nccl = check_nccl(
        facts.software,
        None if torch_gpus is None else torch_gpus.nccl,
        num_gpus=len(facts.gpus.gpus),
        local_world_size=job.local_world_size,
    )
    machine = facts.machine
    return [
        *check_software(facts.software),
        nccl,
        *check_gpus(facts.gpus, job),
        *check_machine(machine, job),
        *check_network(facts.network, job),
        *check_cluster(facts.cluster, machine.shm_total, machine.memory_limit),
        *(_without_folder() if facts.folder is None else check_folder(facts.folder, job)),
        *(_without_peer(job) if facts.peer is None else check_peer(facts.peer)),
    ]


def _without_folder() -> list[Finding]:
    advice = "name it: --checkpoint-folder PATH; a test file is written there and deleted."
    return [Finding(name="checkpoint-folder", status="skipped", found="no folder was named", advice=advice)]


def _without_peer(job: JobSize) -> list[Finding]:
    if not job.has_other_nodes:
        advice = "for a job of several nodes, give --world-size and --local-world-size."
        return [Finding(name="peer", status="skipped", found="all ranks are on this machine", advice=advice)]
    advice = "run `hyperpod doctor --listen` on one node, and what it prints on another."
    return [Finding(name="peer", status="skipped", found="no other node was measured", advice=advice)]


def exit_code(findings: Sequence[Finding], *, is_strict: bool) -> int:
    """0 if all is well, 1 if there are warnings and they count, 2 if there are errors."""
    statuses = {each.status for each in findings}
    return 2 if "error" in statuses else 1 if is_strict and "warning" in statuses else 0


def as_json(findings: Sequence[Finding], host: str, code: int) -> str:
    """The report for programs."""
    report = {"format": _FORMAT, "host": host, "exit_code": code, "findings": [asdict(each) for each in findings]}
    return json.dumps(report, indent=2)


def as_table(findings: Sequence[Finding]) -> list[str]:
    """The report for people: a line for each finding, and one below it for what to do."""
    width = max(len(each.name) for each in findings)
    indent = " " * (len("warning  ") + width + 2)
    lines: list[str] = []
    for each in findings:
        start = f"{each.status:<9}{each.name:<{width}}  "
        for begin, text in ((start, each.found), (f"{indent}-> ", each.advice)):
            hanging = indent if begin is start else f"{indent}   "
            lines += textwrap.wrap(text, _WIDTH, initial_indent=begin, subsequent_indent=hanging) if text else []
    counts = {status: sum(each.status == status for each in findings) for status in _STATUSES}
    return [*lines, ", ".join(f"{number} {status}" for status, number in counts.items())]
