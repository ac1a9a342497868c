"""The `hyperpod` command. Its subcommands are listed in `COMMANDS`.

hyperpod init lightning|accelerate|hf|plain my-job
hyperpod chaos --every 30 --seed 1 --kinds kill,stop --pid AGENT_PID
hyperpod scale --replicas 2
hyperpod scale --shard-degree 4
hyperpod status --json
hyperpod top
hyperpod serve --port 8265
hyperpod preset list|show NAME|write NAME [PATH]|NAME
hyperpod rehearse --nproc-per-node 4 train.py ARGUMENTS
hyperpod plan --nodes 256 --failures-per-node-day 0.004 --days 60 --replicas 8 --price 2
hyperpod plan --preset seeds
hyperpod report runs/today
hyperpod export checkpoints/last.ckpt --to lightning
hyperpod doctor --world-size 64 --local-world-size 8 --checkpoint-folder /fsx/run
"""

import argparse
import json
import os
import shlex
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from hyperpod_plugins.elastic.process import exit_at_once
from hyperpod_plugins.elastic.rendezvous.control import Request, Ticket, send
from hyperpod_plugins.elastic.store.records import printable
from hyperpod_plugins.errors import ConfigError, HyperPodError
from hyperpod_plugins.fault_injection.chaos import SIGNALS, ChaosPlan, processes, run_chaos, select_agents
from hyperpod_plugins.fault_injection.faults import FaultKind
from hyperpod_plugins.presets import preset_names, preset_path, preset_summary, write_preset
from hyperpod_plugins.project_templates import PROJECT_KINDS, write_project
from hyperpod_plugins.recovery.rehearsal_jobs import REHEARSED_PHASES, RehearsalPlan, format_table, rehearse


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A subcommand."""

    name: str
    summary: str
    """One line for `hyperpod --help`."""
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    """Runs the command and returns the exit code; raises a `HyperPodError` for the user to act on."""


def _add_chaos_arguments(parser: argparse.ArgumentParser) -> None:
    plan = ChaosPlan()
    parser.add_argument("--every", type=float, default=plan.every_s, help="mean seconds between faults")
    parser.add_argument("--count", type=int, default=plan.count, help="total number of faults")
    parser.add_argument("--seed", type=int, default=plan.seed, help="seed of the fault schedule")
    parser.add_argument("--kinds", default=",".join(plan.kinds), help=f"comma-separated, from {', '.join(SIGNALS)}")
    parser.add_argument(
        "--resume-after", type=float, default=plan.resume_s, help="seconds until a stopped worker is resumed"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--pid", type=int, help="pid of the hyperpodrun agent")
    which.add_argument("--run-id", help="the job's --rdzv-id (default: the only job on this machine)")


def _chaos(arguments: argparse.Namespace) -> int:
    kinds = tuple(filter(None, (kind.strip() for kind in arguments.kinds.split(","))))
    plan = ChaosPlan(
        every_s=arguments.every,
        count=arguments.count,
        seed=arguments.seed,
        kinds=cast("tuple[FaultKind, ...]", kinds),
        resume_s=arguments.resume_after,
    )
    agents = select_agents(processes(), pid=arguments.pid, run_id=arguments.run_id)
    _print(f"workers of hyperpodrun {', '.join(map(str, agents))}: a fault every {plan.every_s:g} s on average")
    done = run_chaos(plan, agents, _print)
    if done < plan.count:
        _print(f"the job ended after {done} of {plan.count} faults")
    return 0


def _add_job_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run-id", help="the job's --rdzv-id (default: the only job whose store this machine serves)")


def _add_scale_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--replicas", type=int, default=0, help="number of replicas to continue with, without a restart"
    )
    parser.add_argument(
        "--shard-degree",
        type=int,
        default=0,
        help="restart all workers from the next step with this shard degree; 0 keeps it",
    )
    parser.add_argument("--tensor-degree", type=int, default=0, help="the same for the tensor degree")
    _add_job_arguments(parser)


def _scale(arguments: argparse.Namespace) -> int:
    asked = arguments.replicas, arguments.shard_degree, arguments.tensor_degree
    if min(asked) < 0 or (asked[0] > 0) == (max(asked[1:]) > 0):
        raise ConfigError(
            "give either --replicas, which needs no restart, or --shard-degree and/or --tensor-degree, which restart "
            "all workers; each must be at least 1."
        )
    ticket = Ticket.find(arguments.run_id)
    request = Request(kind="scale", value=asked[0], shard_degree=asked[1], tensor_degree=asked[2])
    _print(send(ticket.job_store(), ticket.token, request, queue=ticket.queue))
    return 0


def _add_status_arguments(parser: argparse.ArgumentParser) -> None:
    from hyperpod_plugins.report.top_command import add_watch_arguments  # imports what other commands do not need

    parser.add_argument(
        "--json", action="store_true", help="print one JSON object with everything that `hyperpod top` shows"
    )
    add_watch_arguments(parser)


def _status(arguments: argparse.Namespace) -> int:
    from hyperpod_plugins.report.live_text import rank_line
    from hyperpod_plugins.report.watch import JobWatch, WatchOptions, look_twice

    options = WatchOptions(run_id=arguments.run_id, events=arguments.events)
    if arguments.json:
        _print(json.dumps(look_twice(options.watch()).to_dict(), allow_nan=False))
        return 0
    ticket = Ticket.find(arguments.run_id)
    answer = send(ticket.job_store(), ticket.token, Request(kind="status"), queue=ticket.queue)
    try:
        text = describe_status(json.loads(answer))
    except (ValueError, TypeError, KeyError):
        raise ConfigError(f"not a valid answer from an agent: {answer:.100}") from None
    _print(f"job {ticket.run_id}: {text}")
    for rank in JobWatch(ticket, arguments.events or "").look().ranks:
        _print(f"  {rank_line(rank)}")
    return 0


def _add_top_arguments(parser: argparse.ArgumentParser) -> None:
    from hyperpod_plugins.report.top_command import add_top_arguments

    add_top_arguments(parser)


def _top(arguments: argparse.Namespace) -> int:
    from hyperpod_plugins.report.top_command import run_top

    return _watched(run_top, arguments)


def _watched(run: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    """Run a command that watches a job; its thread may be left in the client of a store that does not answer."""
    from hyperpod_plugins.report.watch import WATCHING

    try:
        code = run(arguments)
    except KeyboardInterrupt:
        code = 130
    except SystemExit as ends:
        code = int(ends.code or 0)
    if any(thread.name == WATCHING for thread in threading.enumerate()):
        exit_at_once(code)
    return code


def _add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    from hyperpod_plugins.report.serve_command import add_serve_arguments

    add_serve_arguments(parser)


def _serve(arguments: argparse.Namespace) -> int:
    from hyperpod_plugins.report.serve_command import run_serve

    return _watched(run_serve, arguments)


def describe_status(status: dict[str, int]) -> str:
    """One line for what an agent answers to `hyperpod status`; see `job_status`."""
    ranks, replicas, shard, tensor, waiting, requested, generation = (
        int(status[name])
        for name in ("ranks", "replicas", "shard_degree", "tensor_degree", "waiting", "asked", "generation")
    )
    if not ranks:
        return "no rank has begun to train"

    def counted(number: int, what: str, several: str = "") -> str:
        return f"{number} {what if number == 1 else several or what + 's'}"

    size = f" in {counted(replicas, 'replica')} (shard degree {shard}, tensor degree {tensor})" if replicas else ""
    wait = f"; {counted(waiting, 'process', 'processes')} waiting to join" if waiting else ""
    wish = f"; {counted(requested, 'replica')} requested" if requested else ""
    return f"{counted(ranks, 'rank')}{size}, generation {generation}{wait}{wish}"


def _add_init_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = "; ".join(f"{kind}: {summary}" for kind, summary in PROJECT_KINDS.items())
    parser.add_argument("kind", metavar="KIND", choices=[*PROJECT_KINDS], help=kinds)
    parser.add_argument("folder", metavar="FOLDER", help="where to write it; its name becomes that of the job")


def _init(arguments: argparse.Namespace) -> int:
    for path in write_project(arguments.kind, arguments.folder):
        _print(str(path))
    _print(f"next: cd {shlex.quote(arguments.folder)} && hyperpodrun --nproc-per-node 2 train.py")
    return 0


def _add_preset_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", metavar="list|show|write|NAME", help="a name alone prints the path of its file")
    parser.add_argument("name", nargs="?", help="preset to show or write")
    parser.add_argument("path", nargs="?", help="where to write it; default: NAME.yaml in the working directory")


def _preset(arguments: argparse.Namespace) -> int:
    """List, show or write presets; a bare name prints its path for `accelerate launch --config_file $(...)`."""
    match arguments.what, arguments.name, arguments.path:
        case "list", None, None:
            for name in preset_names():
                _print(f"{name:<16}{preset_summary(name)}")
        case "show", str(name), None:
            _print(preset_path(name).read_text().rstrip())
        case "write", str(name), path:
            _print(str(write_preset(name, path)))
        case "list" | "show" | "write", _, _:
            raise ConfigError("write `preset list`, `preset show NAME` or `preset write NAME [PATH]`")
        case name, None, None:
            _print(str(preset_path(name)))
        case name, *_:
            raise ConfigError(f"`preset {name}` takes no further argument; it prints the path of that preset's file")
    return 0


def _add_rehearse_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nproc-per-node", type=int, default=2, help="number of ranks, as for hyperpodrun")
    parser.add_argument("--phases", default=",".join(REHEARSED_PHASES), help="comma-separated phases to kill a rank in")
    parser.add_argument(
        "--timeout", type=float, default=600.0, help="time limit of each job in seconds; at least two jobs run"
    )
    parser.add_argument(
        "--preload", default="", help="modules that are imported before workers are forked, as with hyperpodrun"
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, help="script and its arguments")


def _rehearse(arguments: argparse.Namespace) -> int:
    plan = RehearsalPlan(
        program=tuple(arguments.program),
        num_ranks=arguments.nproc_per_node,
        phases=tuple(filter(None, (phase.strip() for phase in arguments.phases.split(",")))),
        timeout_s=arguments.timeout,
        launcher=("--preload", arguments.preload) if arguments.preload else (),
    )
    results = rehearse(plan, _print)
    for line in format_table(results):
        _print(line)
    return 0 if all(result.is_good for result in results) else 1


def _add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    from hyperpod_plugins.planning.plan_command import add_plan_arguments  # imports what other commands do not need

    add_plan_arguments(parser)


def _plan(arguments: argparse.Namespace) -> int:
    from hyperpod_plugins.planning.plan_command import plan_text

    lines, is_good = plan_text(arguments)
    for line in lines:
        _print(line)
    return 0 if is_good else 1


def _add_report_arguments(parser: argparse.ArgumentParser) -> None:
    from hyperpod_plugins.report.report_command import add_report_arguments

    add_report_arguments(parser)


def _report(arguments: argparse.Namespace) -> int:
    from hyperpod_plugins.report.report_command import report_text

    lines, is_good = report_text(arguments)
    for line in lines:
        _print(line)
    return 0 if is_good else 1


def _add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    from hyperpod_plugins.doctor.doctor_command import add_doctor_arguments  # imports what other commands do not need

    add_doctor_arguments(parser)


def _doctor(arguments: argparse.Namespace) -> int:
    from hyperpod_plugins.doctor.doctor_command import doctor_report

    def announce(line: str) -> None:
        print(line, file=sys.stderr if arguments.json else sys.stdout, flush=True)

    lines, code = doctor_report(arguments, announce)
    for line in lines:
        _print(line)
    return code


def _add_export_arguments(parser: argparse.ArgumentParser) -> None:
    from hyperpod_plugins.parallel.checkpoint.export_command import add_export_arguments

    add_export_arguments(parser)


def _export(arguments: argparse.Namespace) -> int:
    from hyperpod_plugins.parallel.checkpoint.export_command import run_export

    for line in run_export(arguments):
        _print(line)
    return 0


COMMANDS = (
    Command(
        name="init",
        summary="write a small project: a program, files for Slurm and Kubernetes, a test that kills a rank",
        add_arguments=_add_init_arguments,
        run=_init,
    ),
    Command(
        name="report",
        summary="write a page with what a run's failures cost and where its time went",
        add_arguments=_add_report_arguments,
        run=_report,
    ),
    Command(
        name="doctor",
        summary="check whether this machine, and its network to another node, is fit for a job",
        add_arguments=_add_doctor_arguments,
        run=_doctor,
    ),
    Command(
        name="rehearse",
        summary="run a program briefly with a kill in each phase, and report where it does not recover exactly",
        add_arguments=_add_rehearse_arguments,
        run=_rehearse,
    ),
    Command(
        name="plan",
        summary="expected time and price of a job by policy of recovery, simulated and by closed forms",
        add_arguments=_add_plan_arguments,
        run=_plan,
    ),
    Command(
        name="export",
        summary="write a sharded checkpoint as files that Lightning, transformers or torch open",
        add_arguments=_add_export_arguments,
        run=_export,
    ),
    Command(
        name="scale",
        summary="grow or shrink a running ElasticTraining job, or restart its workers with other degrees",
        add_arguments=_add_scale_arguments,
        run=_scale,
    ),
    Command(
        name="status",
        summary="show the size of a running job, and where its ranks stand",
        add_arguments=_add_status_arguments,
        run=_status,
    ),
    Command(
        name="top",
        summary="watch a running job in the terminal: ranks, heartbeats, rate, goodput, incidents",
        add_arguments=_add_top_arguments,
        run=_top,
    ),
    Command(
        name="serve",
        summary="serve the same as a web page, read-only",
        add_arguments=_add_serve_arguments,
        run=_serve,
    ),
    Command(
        name="preset",
        summary="configuration files for `accelerate launch --config_file`",
        add_arguments=_add_preset_arguments,
        run=_preset,
    ),
    Command(
        name="chaos",
        summary="kill or stop random workers of a running hyperpodrun job on this machine",
        add_arguments=_add_chaos_arguments,
        run=_chaos,
    ),
)


def get_parser(asked: str = "") -> argparse.ArgumentParser:
    """The parser of `hyperpod`, with all commands, and the options of the one that is asked for, or of all."""
    parser = argparse.ArgumentParser(prog="hyperpod", description="Tools for jobs that survive faults.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        sub = commands.add_parser(
            command.name,
            help=command.summary,
            description=command.summary,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        if asked in ("", command.name):
            command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 2 for a `HyperPodError`, as argparse for bad input; 130 for Ctrl-C."""
    given = sys.argv[1:] if argv is None else argv
    arguments = get_parser(next((each for each in given if not each.startswith("-")), "")).parse_args(given)
    try:
        return arguments.run(arguments)
    except HyperPodError as error:
        print(f"hyperpod {arguments.command}: {printable(str(error))}", file=sys.stderr)  # noqa: T201
        return 2
    except KeyboardInterrupt:
        return 130


def _print(line: str) -> None:
    try:
        print(printable(line), flush=True)  # noqa: T201  (text from a store may contain escape sequences)
    except BrokenPipeError:  # the reader is gone, as with `| head`: this line and all others go nowhere
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
