"""`hyperpodrun`: torchrun's arguments and ours, on an agent that replaces lost workers one by one.

    hyperpodrun --nproc-per-node 8 train.py --lr 1e-4

A worker that ends with an exit code other than 0, or by a signal, is replaced in its rank; the others keep running,
and its replacement is told by HYPERPOD_INCARNATION that it is one. The program must know how to take it in: Lightning's
`Trainer(strategy="hyperpod")` does.
"""

import argparse
import contextlib
import importlib.util
import math
import os
import signal
import sys
import uuid
from collections.abc import Sequence
from typing import cast

from torch.distributed.argparse_util import env
from torch.distributed.elastic import events
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousParameters,
    registry,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args, get_args_parser, parse_min_max_nnodes

from hyperpod_plugins._autoload import rendezvous_creator
from hyperpod_plugins.elastic.agent import HyperPodAgent
from hyperpod_plugins.elastic.crew import Program
from hyperpod_plugins.elastic.etcd_gateway import SCHEME
from hyperpod_plugins.elastic.failures import story
from hyperpod_plugins.elastic.limits import allow_connections
from hyperpod_plugins.elastic.options import AgentOptions
from hyperpod_plugins.elastic.rendezvous import NAME as SLOTS
from hyperpod_plugins.elastic.restarts import RestartPolicy
from hyperpod_plugins.elastic.worker_environ import RESOLVER
from hyperpod_plugins.elastic.zygote_process import ZygoteOptions
from hyperpod_plugins.errors import ConfigError, HyperPodError, NotBuiltYetError

_LOOP_S = 0.001
"""Sleep of torch's loop between two looks at the workers; ours waits inside the look, where a death wakes it."""

_PRELOAD = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch._dynamo",  # the first step of an optimizer imports it, which takes a second
    "numpy",
)
_LIGHTNINGS = ("lightning.pytorch", "pytorch_lightning")  # a program has one or the other


def get_parser() -> argparse.ArgumentParser:
    """Options of torchrun, and ours."""
    parser = get_args_parser()
    parser.prog = "hyperpodrun"
    parser.description = "torchrun that replaces a lost worker and lets the others go on"
    if parser.get_default("max_restarts") == 0:  # neither torch nor PET_MAX_RESTARTS has another number
        parser.set_defaults(max_restarts=RestartPolicy().max_restarts)
    if parser.get_default("rdzv_backend") == "static":  # to be told from a choice of it; see `use_local_rendezvous`
        parser.set_defaults(rdzv_backend=None)
    if parser.get_default("master_port") == 29500:  # of torch 2.10, where it does not tell whether somebody chose it
        parser.set_defaults(master_port=None)
    ours = parser.add_argument_group("hyperpodrun")
    with contextlib.suppress(argparse.ArgumentError):  # newer ones than torch 2.10 have it
        ours.add_argument(
            "--shutdown-timeout", action=env, type=int, default=30, help="Seconds from the first signal to SIGKILL."
        )
    ours.add_argument(
        "--restart-window",
        "--restart_window",
        action=env,
        type=float,
        default=math.inf,
        help="Seconds in which --max-restarts (here: replacements of one worker, by default 100) are counted; by "
        "default the whole life of the job.",
    )
    ours.add_argument(
        "--preload",
        action=env,
        default="default",
        help="Comma-separated modules to import once, before workers are forked; `default` stands for "
        f"{', '.join(_PRELOAD)}, and Lightning with our strategy where it is installed.",
    )
    ours.add_argument(
        "--spares", action=env, type=int, default=0, help="Forked processes kept waiting; saves a few milliseconds."
    )
    return parser


def modules_to_preload(text: str) -> tuple[str, ...]:
    """The modules that `--preload` names, each once.

    Raises:
        ConfigError: one that was named, rather than meant by `default`, is not installed.
    """
    modules: list[str] = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        if name == "default":
            modules += _PRELOAD
            modules += [each for each in _LIGHTNINGS if _is_installed(each)][:1]
            modules += ["hyperpod_plugins.lightning"] if modules[-1] in _LIGHTNINGS else []
        elif _is_installed(name):
            modules.append(name)
        else:
            raise ConfigError(
                f"--preload names {name!r}, which is not installed for {sys.executable}. Install it, or leave it out."
            )
    return tuple(dict.fromkeys(modules))


def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name.partition(".")[0]) is not None


def use_local_rendezvous(args: argparse.Namespace) -> None:
    """Let a single node find itself, on a free port: `--standalone`, or no rendezvous option at all.

    Several nodes with an endpoint use the rendezvous `hyperpod`, unless the user chose another.
    """
    if args.rdzv_backend is None:
        has_others = parse_min_max_nnodes(args.nnodes)[1] > 1
        has_endpoint = (args.rdzv_endpoint and has_others) or args.rdzv_endpoint.startswith(SCHEME)
        args.rdzv_backend = SLOTS if has_endpoint else "static"
    is_static = args.rdzv_backend == "static" and not args.rdzv_endpoint and args.master_port is None
    if args.standalone or (is_static and parse_min_max_nnodes(args.nnodes)[1] == 1):
        args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id = "c10d", "localhost:0", str(uuid.uuid4())
    if args.master_port is None:
        args.master_port = 29500


def program_of(args: argparse.Namespace) -> Program:
    """What the workers run."""
    if args.no_python and args.module:
        raise ConfigError("--no-python and --module exclude each other: only Python can run a module. Leave one out.")
    kind = "module" if args.module else "executable" if args.no_python and not args.run_path else "script"
    return Program(kind=kind, target=args.training_script, args=tuple(args.training_script_args))


def rendezvous_parameters(config: LaunchConfig) -> RendezvousParameters:
    """How this node finds the others."""
    return RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )


def worker_spec(config: LaunchConfig, program: Program) -> WorkerSpec:
    """What torch wants to know about the workers of this node."""
    parameters = rendezvous_parameters(config)
    rendezvous_handler_registry.register(SLOTS, rendezvous_creator())  # where torch has not read our entry point
    host = port = None
    if parameters.backend == "static":
        host, port = parse_rendezvous_endpoint(parameters.endpoint.strip(), default_port=-1)
    return WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=program.target,
        args=program.args,
        rdzv_handler=registry.get_rendezvous_handler(parameters),
        max_restarts=0,  # of all workers together; ours are counted by the agent
        monitor_interval=_LOOP_S,
        master_addr=host,
        master_port=port,
        local_addr=config.local_addr,
        event_log_handler=config.event_log_handler,
    )


def run(args: argparse.Namespace) -> None:
    """Run one node's share of the job.

    Raises:
        ChildFailedError: workers of this node failed for good.
        SignalException: somebody ended the job.
        HyperPodError: it cannot be started, or another node ended it.
    """
    use_local_rendezvous(args)
    if vars(args).get("numa_binding") is not None:  # torch 2.10 may not have it
        raise NotBuiltYetError(
            f"--numa-binding={args.numa_binding} is torchrun's, and hyperpodrun does not serve it yet. Leave it out, "
            "and bind each worker at the start of the program (os.sched_setaffinity), or use torchrun."
        )
    config, python, _ = config_from_args(args)
    environ = dict(os.environ)  # noqa: TID251  (handed on to the workers, not read)
    os.environ.setdefault("RES_OPTIONS", RESOLVER)  # noqa: TID251  (for the store that this process serves)
    # torch's sharing of the rendezvous store tells a newcomer nothing in the second round, and keeps a dead master.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # noqa: TID251  (written, and by now not inherited)
    fields = vars(config)  # torch 2.10 lacks some of them
    program = program_of(args)
    options = AgentOptions(
        program=program,
        zygote=ZygoteOptions(
            python=python if isinstance(python, str) and program.kind != "executable" else sys.executable,
            preload=() if program.kind == "executable" else modules_to_preload(args.preload),
            num_spares=args.spares,
            title=(program.target, *program.args),
        ),
        restarts=RestartPolicy(max_restarts=config.max_restarts, window_s=args.restart_window),
        logs=config.logs_specs or DefaultLogsSpecs(),
        environ=environ,
        ending_signals=tuple(signal.Signals[name.strip()] for name in config.signals_to_handle.split(",")),
        shutdown_timeout_s=fields.get("shutdown_timeout", args.shutdown_timeout),
        monitor_interval_s=config.monitor_interval,
        log_line_prefix_template=config.log_line_prefix_template,
        stdout_filters=tuple(fields.get("duplicate_stdout_filters") or ()),
        stderr_filters=tuple(fields.get("duplicate_stderr_filters") or ()),
        virtual_local_rank=fields.get("virtual_local_rank", False),
    )
    allow_connections()
    spec = worker_spec(config, program)
    agent = HyperPodAgent(spec, options)
    is_over = True
    try:
        result = cast("RunResult", agent.run())  # torch decorates it with something untyped
        events.record(agent.get_event_succeeded(), config.event_log_handler)
    except SignalException:
        is_over = False  # this node leaves; the others may go on, and it may come back
        raise
    finally:
        if is_over:
            agent.leave_rendezvous()
    if agent.stopped is not None:
        print(f"hyperpodrun: the job ends: {agent.stopped} ({agent.stopped.reporter})", file=sys.stderr)  # noqa: T201
    if result.failures:
        raise ChildFailedError(name=program.target, failures=result.failures)
    if agent.stopped is not None:
        raise HyperPodError("no worker of this node failed")


def main(argv: Sequence[str] | None = None) -> int:
    """Run `hyperpodrun`; returns its exit code."""
    args = get_parser().parse_args(argv)
    try:
        record(run)(args)
    except ChildFailedError as error:
        print(story(error), file=sys.stderr)  # noqa: T201
    except SignalException as error:
        return 128 + error.sigval
    except (HyperPodError, RendezvousError) as error:
        print(f"hyperpodrun: {error}", file=sys.stderr)  # noqa: T201
    else:
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
