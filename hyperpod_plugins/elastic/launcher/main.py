"""`hyperpodrun`: torchrun's command line plus a few options, with an agent that replaces lost workers one by one.

    hyperpodrun --nproc-per-node 8 train.py --lr 1e-4

A worker that exits with a nonzero code or is killed by a signal is replaced in its worker slot while the others keep
running. A replacement recognizes itself by HYPERPOD_INCARNATION > 0. The program must be able to take a replacement
in: with Lightning's `Trainer(strategy="hyperpod")` it is.
"""

import argparse
import contextlib
import importlib.util
import math
import os
import signal
import sys
import threading
import uuid
from collections.abc import Sequence
from typing import cast

from torch.distributed import DistError
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
from torch.distributed.elastic.utils.logging import get_logger
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args, get_args_parser, parse_min_max_nnodes

from hyperpod_plugins.elastic.launcher.agent import HyperPodAgent
from hyperpod_plugins.elastic.launcher.fork_client import ForkServerOptions
from hyperpod_plugins.elastic.launcher.local_workers import Program, failure_report
from hyperpod_plugins.elastic.launcher.round import AgentOptions
from hyperpod_plugins.elastic.membership.restart_policy import RestartPolicy
from hyperpod_plugins.elastic.process import (
    RESOLVER_OPTIONS,
    exit_at_once,
    raise_open_file_limit,
    set_snapshot_folder,
)
from hyperpod_plugins.elastic.rendezvous.backends import CONNECTING
from hyperpod_plugins.elastic.rendezvous.handler import NAME as SLOTS
from hyperpod_plugins.elastic.rendezvous.handler import create_rendezvous
from hyperpod_plugins.elastic.rendezvous.keep_alive import KEEPING_ALIVE
from hyperpod_plugins.elastic.store.etcd import SCHEME
from hyperpod_plugins.errors import ConfigError, HyperPodError, NotBuiltYetError

logger = get_logger(__name__)

_TORCH_LOOP_S = 0.001
"""Sleep of torch's loop between calls of `_monitor_workers`. Our agent waits inside that call: an exit wakes it."""

_PRELOAD = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch._dynamo",  # imported by an optimizer's first step, which takes a second
    "numpy",
)
_LIGHTNINGS = ("lightning.pytorch", "pytorch_lightning")  # a program uses one of them


def get_parser() -> argparse.ArgumentParser:
    """The parser of torchrun's options and those of `hyperpodrun`."""
    parser = get_args_parser()
    parser.prog = "hyperpodrun"
    parser.description = "torchrun that replaces a lost worker while the others keep running"
    if parser.get_default("max_restarts") == 0:  # torch's default; PET_MAX_RESTARTS sets no other number
        parser.set_defaults(max_restarts=RestartPolicy().max_restarts)
    if parser.get_default("rdzv_backend") == "static":  # tell the default from a choice; see `use_local_rendezvous`
        parser.set_defaults(rdzv_backend=None)
    if parser.get_default("master_port") == 29500:  # torch 2.10's default, to tell it from a choice of that port
        parser.set_defaults(master_port=None)
    ours = parser.add_argument_group("hyperpodrun")
    with contextlib.suppress(argparse.ArgumentError):  # versions after torch 2.10 have this option
        ours.add_argument(
            "--shutdown-timeout", action=env, type=int, default=30, help="Seconds from the first signal to SIGKILL."
        )
    ours.add_argument(
        "--restart-window",
        "--restart_window",
        action=env,
        type=float,
        default=math.inf,
        help="Length in seconds of the sliding window in which --max-restarts (here: replacements of one worker, 100 "
        "by default) are counted; by default the whole job.",
    )
    ours.add_argument(
        "--preload",
        action=env,
        default="default",
        help="Comma-separated modules to import once, before workers are forked; `default` stands for "
        f"{', '.join(_PRELOAD)}, and, if installed, Lightning with the `hyperpod` strategy.",
    )
    return parser


def modules_to_preload(text: str) -> tuple[str, ...]:
    """The modules that `--preload` names, without duplicates.

    Raises:
        ConfigError: a module given by name, not through `default`, is not installed.
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
                f"--preload names {name!r}, which is not installed for {sys.executable}. Install it, or omit it."
            )
    return tuple(dict.fromkeys(modules))


def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name.partition(".")[0]) is not None


def use_local_rendezvous(args: argparse.Namespace) -> None:
    """Choose the rendezvous where the user has not; `args` is changed in place.

    A single node (`--standalone`, or no rendezvous option at all) meets itself on a free local port. Several nodes
    with an endpoint use the rendezvous `hyperpod`, unless the user chose another.
    """
    if args.rdzv_backend is None:
        has_others = parse_min_max_nnodes(args.nnodes)[1] > 1
        has_endpoint = (args.rdzv_endpoint and has_others) or args.rdzv_endpoint.startswith(SCHEME)
        args.rdzv_backend = SLOTS if has_endpoint else "static"
    is_static = args.rdzv_backend == "static" and not args.rdzv_endpoint and args.master_port is None
    if args.standalone or (is_static and parse_min_max_nnodes(args.nnodes)[1] == 1):
        args.rdzv_backend, args.rdzv_endpoint = SLOTS, "localhost:0"
        args.rdzv_id = str(uuid.uuid4()) if args.rdzv_id == "none" else args.rdzv_id
        args.rdzv_conf = ",".join(filter(None, (args.rdzv_conf, "last_call_timeout=0,is_host=1")))
    if args.master_port is None:
        args.master_port = 29500


def program_of(args: argparse.Namespace) -> Program:
    """The program that the workers run.

    Raises:
        ConfigError: both `--no-python` and `--module` are given.
    """
    if args.no_python and args.module:
        raise ConfigError("--no-python and --module exclude each other: only Python can run a module. Omit one.")
    kind = "module" if args.module else "executable" if args.no_python and not args.run_path else "script"
    return Program(kind=kind, target=args.training_script, args=tuple(args.training_script_args))


class ArgumentError(ConfigError):
    """An argument of `hyperpodrun` is invalid; the command ends with exit code 2."""


def check_arguments(args: argparse.Namespace) -> None:
    """Check what torch does not check, or only with an unclear error.

    Raises:
        ArgumentError: an argument is invalid.
    """
    low, _, high = args.nnodes.partition(":")
    if not (
        low.isdecimal() and (high.isdecimal() if ":" in args.nnodes else True) and 1 <= int(low) <= int(high or low)
    ):
        raise ArgumentError(f"--nnodes={args.nnodes} is invalid. Give a number of at least 1, or MIN:MAX.")
    if str(args.nproc_per_node).lstrip("-").isdecimal() and int(args.nproc_per_node) < 1:
        raise ArgumentError(f"--nproc-per-node={args.nproc_per_node} starts no worker. Give a number of at least 1.")
    at_least = {"max_restarts": 0, "shutdown_timeout": 0, "monitor_interval": 0, "restart_window": 0}
    for name, least in at_least.items():
        value = vars(args)[name]
        if value is not None and not value >= least:
            raise ArgumentError(f"--{name.replace('_', '-')}={value} is invalid. Give a number of at least {least}.")
    unknown = [name for name in args.signals_to_handle.split(",") if name.strip() not in signal.Signals.__members__]
    if unknown:
        raise ArgumentError(
            f"--signals-to-handle names {unknown[0]!r}, which is not a signal. Give names such as SIGTERM,SIGINT."
        )
    if wrong := [pair for pair in args.rdzv_conf.split(",") if args.rdzv_conf and "=" not in pair]:
        raise ArgumentError(f"--rdzv-conf={args.rdzv_conf}: {wrong[0]!r} is not NAME=VALUE. Give NAME=VALUE[,...].")


def config_of(args: argparse.Namespace) -> tuple[LaunchConfig, object]:
    """Make torch's `LaunchConfig` of the arguments; returns it and the interpreter.

    Raises:
        ArgumentError: an argument is invalid.
    """
    try:
        config, python, _ = config_from_args(args)
    except OSError as error:
        raise ArgumentError(f"--log-dir={args.log_dir} cannot be written: {error.strerror}.") from None
    except (ValueError, AssertionError, RuntimeError) as error:
        raise ArgumentError(f"invalid arguments: {error}") from None
    return config, python


def rendezvous_parameters(config: LaunchConfig) -> RendezvousParameters:
    """Parameters of the rendezvous of this node."""
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
    """Make torch's `WorkerSpec` for the workers of this node, with its rendezvous handler.

    Raises:
        ArgumentError: the rendezvous options are invalid.
        DistError: the rendezvous store cannot be created.
        RendezvousError: the rendezvous cannot be created.
    """
    parameters = rendezvous_parameters(config)
    with contextlib.suppress(ValueError):  # torch has registered it already, from our entry point
        rendezvous_handler_registry.register(SLOTS, create_rendezvous)
    host = port = None
    try:
        if parameters.backend == "static":
            host, port = parse_rendezvous_endpoint(parameters.endpoint.strip(), default_port=-1)
        handler = registry.get_rendezvous_handler(parameters)
    except ConfigError:
        raise
    except (ValueError, RuntimeError) as error:  # the base classes of DistError and RendezvousError
        if isinstance(error, (DistError, RendezvousError)):
            raise
        raise ArgumentError(
            f"--rdzv-backend={parameters.backend} --rdzv-endpoint={parameters.endpoint} with --rdzv-conf="
            f"{parameters.config} is invalid: {error}"
        ) from None
    return WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=program.target,
        args=program.args,
        rdzv_handler=handler,
        max_restarts=0,  # of all workers together; `HyperPodAgent` counts replacements itself
        monitor_interval=_TORCH_LOOP_S,
        master_addr=host,
        master_port=port,
        local_addr=config.local_addr,
        event_log_handler=config.event_log_handler,
    )


def run(args: argparse.Namespace) -> None:
    """Run the agent of this node until its part of the job has ended.

    Raises:
        ChildFailedError: workers of this node failed and were not replaced.
        SignalException: this process received a signal that ends it.
        HyperPodError: the job cannot be started, or another node ended it.
    """
    check_arguments(args)
    use_local_rendezvous(args)
    if vars(args).get("numa_binding") is not None:  # torch 2.10 may lack this option
        raise NotBuiltYetError(
            f"--numa-binding={args.numa_binding}: hyperpodrun does not support this option of torchrun yet. Omit it "
            "and bind each worker at the start of the program (os.sched_setaffinity), or use torchrun."
        )
    config, python = config_of(args)
    set_snapshot_folder()
    environ = dict(os.environ)  # noqa: TID251  (passed on to the workers, not read)
    os.environ.setdefault("RES_OPTIONS", RESOLVER_OPTIONS)  # noqa: TID251  (for the store that this process serves)
    # If torch shared the rendezvous store with the workers, a joiner would get no address in the second round, and
    # the address of a dead master would stay in use.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # noqa: TID251  (written after `environ` was copied)
    fields = vars(config)  # torch 2.10 lacks some of these fields
    program = program_of(args)
    options = AgentOptions(
        program=program,
        fork_server=ForkServerOptions(
            python=python if isinstance(python, str) and program.kind != "executable" else sys.executable,
            preload=() if program.kind == "executable" else modules_to_preload(args.preload),
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
    raise_open_file_limit()
    if config.rdzv_backend == "c10d":
        logger.warning(
            "--rdzv-backend=c10d selects torch's rendezvous, which unpickles what it reads: anyone who can reach %s "
            "can run code in this job. Omit the option to use the rendezvous `hyperpod`, which reads JSON.",
            config.rdzv_endpoint,
        )
    spec = worker_spec(config, program)
    agent = HyperPodAgent(spec, options)
    is_over = True
    try:
        result = cast("RunResult", agent.run())  # torch's decorator is untyped
        events.record(agent.get_event_succeeded(), config.event_log_handler)
    except SignalException:
        is_over = False  # only this node leaves: the others may continue, and it may come back
        raise
    finally:
        if is_over:
            agent.exit.leave()
    stopped = agent.node.stopped
    if stopped is not None:
        print(f"hyperpodrun: the job ends: {stopped} ({stopped.reporter})", file=sys.stderr)  # noqa: T201
    if result.failures:
        raise ChildFailedError(name=program.target, failures=result.failures)
    if stopped is not None:
        raise HyperPodError("no worker of this node failed")


def main(argv: Sequence[str] | None = None) -> int:
    """Run `hyperpodrun` and return its exit code."""
    code = _run_job(get_parser().parse_args(argv))
    if any(thread.name in (CONNECTING, KEEPING_ALIVE) for thread in threading.enumerate()):
        exit_at_once(code)
    return code


def _run_job(args: argparse.Namespace) -> int:
    try:
        record(run)(args)
    except ArgumentError as error:
        print(f"hyperpodrun: {error}", file=sys.stderr)  # noqa: T201
        return 2
    except ChildFailedError as error:
        print(failure_report(error), file=sys.stderr)  # noqa: T201
    except SignalException as error:
        return 128 + error.sigval
    except (HyperPodError, RendezvousError) as error:
        print(f"hyperpodrun: {error}", file=sys.stderr)  # noqa: T201
    else:
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
