"""`hyperpod plan`: its arguments, and the plan or the published figures that it prints."""

import argparse
import json
import math
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from hyperpod_plugins.errors import ConfigError, UnknownKeyError, format_list
from hyperpod_plugins.planning.closed_forms import DAY_S, HOUR_S, check_numbers
from hyperpod_plugins.planning.failures import (
    NO_LEMONS,
    ExponentialFailures,
    FailureModel,
    LemonNodes,
    TraceFailures,
    WeibullFailures,
)
from hyperpod_plugins.planning.plan import make_plan, spares_for
from hyperpod_plugins.planning.plan_model import add_model_arguments, plan_of_model, refuse_without_model
from hyperpod_plugins.planning.plan_page import write_plan_page
from hyperpod_plugins.planning.published_figures import figure_lines, published_figures
from hyperpod_plugins.planning.scenario import FIELD_RETRIES, NODE_LOSS_FRACTION, RetryChain, Scenario, StageTimes

_STAGE_HELP = {
    "step_s": "a step",
    "detect_s": "from a failure until all ranks know of it",
    "assemble_s": "until a replacement process is connected",
    "restore_s": "until it has the state from memory",
    "startup_s": "until all processes have been started again",
    "checkpoint_restore_s": "until a checkpoint is read",
    "checkpoint_save_s": "how long a checkpoint stalls training",
    "snapshot_s": "how long a snapshot stalls training",
    "resize_s": "pause to continue with another number of replicas",
    "repair_s": "until a lost node is back or replaced",
    "spare_start_s": "until a spare node is ready",
}
NAMED_RETRIES = {"none": RetryChain(), "field": FIELD_RETRIES}
"""Values of `--retries`."""
_WITHOUT_DEFAULT = (
    "preset", "nodes", "days", "steps", "replicas", "spares", "failures_per_node_day", "mtbf_hours", "trace", "model",
    "host_memory_gib", "activation_offload", "hybrid_shard_degree", "tensor_parallel_degree", "stage_times",
    *_STAGE_HELP,
)  # fmt: skip


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `hyperpod plan`."""
    parser.set_defaults(**dict.fromkeys(_WITHOUT_DEFAULT))
    hidden: dict[str, Any] = {"default": argparse.SUPPRESS}  # so that --help shows no "(default: None)"
    parser.add_argument(
        "--preset",
        choices=["seeds"],
        help="only print published figures beside those that this package computes",
        **hidden,
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--page", help="also write the plan as a page of HTML to this file", default=argparse.SUPPRESS)
    job = parser.add_argument_group("the job")
    job.add_argument("--nodes", type=int, help="nodes that train, without spares", **hidden)
    job.add_argument("--accelerators-per-node", type=int, default=8, help="accelerators per node")
    length = job.add_mutually_exclusive_group()
    length.add_argument("--days", type=float, help="length of the work without failures, in days", **hidden)
    length.add_argument("--steps", type=int, help="length of the work in steps of --step-s", **hidden)
    of_replicas = "copies of the training state, on whole nodes (default: 2, or 1 if the number of nodes is odd)"
    job.add_argument("--replicas", type=int, help=of_replicas, **hidden)
    of_spares = "idle nodes (default: such that at most 1 %% of the lost nodes find none)"
    job.add_argument("--spares", type=int, help=of_spares, **hidden)
    job.add_argument("--price", type=float, default=0.0, help="price of an accelerator-hour")
    rate = parser.add_argument_group("failures")
    which = rate.add_mutually_exclusive_group()
    which.add_argument("--failures-per-node-day", type=float, help="failures per node and day", **hidden)
    which.add_argument("--mtbf-hours", type=float, help="hours between failures of the whole job", **hidden)
    of_trace = 'failures of a real run, as JSON: {"duration_s": ..., "failures": [[time_s, node], ...]}'
    which.add_argument("--trace", help=of_trace, **hidden)
    of_loss = "fraction of the failures that take a node down"
    rate.add_argument("--node-loss-fraction", type=float, default=round(NODE_LOSS_FRACTION, 3), help=of_loss)
    of_shape = (
        "shape of a Weibull distribution: below 1, nodes fail most often just after a repair; 1 is a constant rate"
    )
    rate.add_argument("--weibull-shape", type=float, default=1.0, help=of_shape)
    of_equality = "all nodes fail alike; otherwise 3 of 63 cause half of the failures"
    rate.add_argument("--equal-nodes", action="store_true", help=of_equality)
    of_exchange = "failures after which a node is replaced for good; 0: never"
    rate.add_argument("--exclude-after", type=int, default=0, help=of_exchange)
    of_retries = "whether recoveries can fail and are retried, with published frequencies"
    rate.add_argument("--retries", choices=list(NAMED_RETRIES), default="none", help=of_retries)
    _add_stage_arguments(parser.add_argument_group("times of stages, in seconds"))
    add_model_arguments(parser.add_argument_group("memory plan"))
    simulation = parser.add_argument_group("simulation")
    simulation.add_argument("--runs", type=int, default=200, help="simulated runs for each policy")
    simulation.add_argument("--seed", type=int, default=0, help="seed of all random numbers")


def _add_stage_arguments(group: Any) -> None:
    of_file = "JSON file with these times, or lists of measured ones from which each failure draws; options win"
    group.add_argument("--stage-times", help=of_file, default=argparse.SUPPRESS)
    for each in fields(StageTimes):
        option, text = f"--{each.name.replace('_', '-')}", f"{_STAGE_HELP[each.name]} (default: {each.default:g})"
        group.add_argument(option, type=float, help=text, default=argparse.SUPPRESS)


def plan_text(arguments: argparse.Namespace) -> tuple[list[str], bool]:
    """Lines of the output of `hyperpod plan`, and whether all published figures agree, if they were asked for.

    Raises:
        ConfigError: An argument is missing or out of range.
    """
    if arguments.preset is not None:
        _check_alone(arguments)
        figures = published_figures()
        rows = [asdict(each) | {"computed": each.computed, "agrees": each.agrees} for each in figures]
        lines = [json.dumps(rows, indent=2)] if arguments.json else figure_lines(figures)
        return lines, all(each.agrees for each in figures)
    if arguments.nodes is None:
        raise ConfigError("give --nodes, the number of nodes that train; or --preset seeds for published figures.")
    check_numbers(positive={"--nodes": arguments.nodes, "--accelerators-per-node": arguments.accelerators_per_node})
    failures = _failures(arguments)
    scenario, remarks = _scenario(arguments, failures)
    lemons = NO_LEMONS if arguments.equal_nodes else LemonNodes(exclude_after=arguments.exclude_after)
    plan = make_plan(
        scenario, failures=failures, lemons=lemons, num_runs=arguments.runs, seed=arguments.seed, remarks=remarks
    )
    page: str | None = vars(arguments).get("page")
    if page is not None:
        try:
            write_plan_page(plan, page)
        except OSError as error:
            raise ConfigError(f"the page cannot be written to {page}: {error.strerror}") from error
    return ([json.dumps(plan.as_dict(), indent=2)] if arguments.json else plan.lines()), True


def _check_alone(arguments: argparse.Namespace) -> None:
    """Refuse the options of a job beside --preset, which has none."""
    parser = argparse.ArgumentParser()
    add_plan_arguments(parser)
    defaults = vars(parser.parse_args([])) | {"page": None}
    given = vars(arguments)
    others = [name for name, default in defaults.items() if given.get(name, default) != default]
    if unused := [f"--{name.replace('_', '-')}" for name in others if name not in ("preset", "json")]:
        raise ConfigError(
            f"--preset {arguments.preset} prints published figures, whose inputs are fixed: leave out "
            f"{format_list(unused)}."
        )


def _failures(arguments: argparse.Namespace) -> FailureModel:
    if arguments.trace is None:
        shape = arguments.weibull_shape
        return ExponentialFailures() if shape == 1 else WeibullFailures(shape=shape)
    content = _read_json(arguments.trace, "--trace")
    if content.get("failures") == []:
        raise ConfigError(
            f"--trace {arguments.trace}: the run had no failure: use --mtbf-hours, or --failures-per-node-day."
        )
    try:
        num_nodes = int(content.get("num_nodes", arguments.nodes))
        times_s, nodes = zip(*((float(time_s), int(node)) for time_s, node in content["failures"]), strict=True)
        trace = TraceFailures(times_s=times_s, nodes=nodes, duration_s=float(content["duration_s"]))
    except (TypeError, KeyError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f'--trace {arguments.trace} is not of the form {{"duration_s": 86400, "failures": [[3600.5, 7], ...]}}, '
            "with the time in seconds and the node of at least one failure."
        ) from None
    if num_nodes != arguments.nodes:
        per_node_day = trace.failures_per_hour * DAY_S / HOUR_S / max(1, num_nodes)
        raise ConfigError(
            f"--trace {arguments.trace} is of a run with num_nodes={num_nodes}, and has the failures of as many nodes, "
            f"not those of --nodes {arguments.nodes}. Give --nodes {num_nodes}; or, instead of the trace, its rate, "
            f"which holds for any number of nodes: --failures-per-node-day {per_node_day:.4g}."
        )
    return trace


def _scenario(arguments: argparse.Namespace, failures: FailureModel) -> tuple[Scenario, tuple[str, ...]]:
    stages, measured = _stages(arguments)
    if arguments.days is None and arguments.steps is None:
        raise ConfigError("give --days or --steps, the length of the work without failures.")
    of_steps = "--steps", arguments.steps, stages.step_s
    name, length, unit_s = of_steps if arguments.days is None else ("--days", arguments.days, DAY_S)
    check_numbers(positive={name: length})
    work_s = length * unit_s
    num_replicas, remarks = _replicas(arguments)
    scenario = Scenario(
        num_nodes=arguments.nodes,
        failures_per_node_hour=_failures_per_node_hour(arguments, failures),
        work_s=work_s,
        accelerators_per_node=arguments.accelerators_per_node,
        num_replicas=num_replicas,
        num_spares=arguments.spares or 0,
        price_per_accelerator_hour=arguments.price,
        node_loss_fraction=arguments.node_loss_fraction,
        stages=stages,
        measured=measured,
        retries=NAMED_RETRIES[arguments.retries],
    )
    if arguments.spares is None:
        scenario.check_number_of_failures()  # before a search that needs as many steps
        scenario = replace(scenario, num_spares=spares_for(scenario))
    return scenario, remarks


def _failures_per_node_hour(arguments: argparse.Namespace, failures: FailureModel) -> float:
    if isinstance(failures, TraceFailures):
        return failures.failures_per_hour / arguments.nodes
    if arguments.mtbf_hours is not None:
        check_numbers(positive={"--mtbf-hours": arguments.mtbf_hours})
        return 1 / (arguments.mtbf_hours * arguments.nodes)
    if arguments.failures_per_node_day is None:
        raise ConfigError(
            "give how often nodes fail: --failures-per-node-day, --mtbf-hours of the whole job, or --trace."
        )
    check_numbers(positive={"--failures-per-node-day": arguments.failures_per_node_day})
    return arguments.failures_per_node_day * HOUR_S / DAY_S


def _stages(arguments: argparse.Namespace) -> tuple[StageTimes, dict[str, tuple[float, ...]]]:
    """Times from a file, and from the options, which win; and lists of measured times in the file."""
    path = arguments.stage_times
    given: dict[str, Any] = {} if path is None else _read_json(path, "--stage-times")
    names = [each.name for each in fields(StageTimes)]
    if unknown := sorted(set(given) - set(names)):
        raise UnknownKeyError(f"--stage-times {path} has {format_list(unknown)}; allowed are {', '.join(names)}.")
    lists = {name: value if isinstance(value, list) else [value] for name, value in given.items()}
    if wrong := [name for name, values in lists.items() if not values or not all(map(_is_number, values))]:
        raise ConfigError(
            f"--stage-times {path}: {format_list(wrong)} must be a number of seconds, or a list of at least one."
        )
    options = {name: value for name in names if (value := vars(arguments)[name]) is not None}
    stages = replace(StageTimes.means_of(lists), **options)
    return stages, {name: tuple(each) for name, each in lists.items() if len(each) > 1 and name not in options}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _read_json(path: str, option: str) -> dict[str, Any]:
    try:
        content = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option} {path} cannot be read as JSON: {error}.") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{option} {path} must hold a JSON object, but holds a {type(content).__name__}.")
    return content


def _replicas(arguments: argparse.Namespace) -> tuple[int, tuple[str, ...]]:
    """Number of replicas on whole nodes; with a model, the most that its smallest degrees allow."""
    if arguments.model is None:
        refuse_without_model(arguments)
        return (2 - arguments.nodes % 2 if arguments.replicas is None else arguments.replicas), ()
    per_node, num_ranks = arguments.accelerators_per_node, arguments.nodes * arguments.accelerators_per_node
    plan, remark = plan_of_model(arguments, num_ranks)
    shard, tensor = plan.topology.shard_degree, plan.topology.tensor_degree
    most = num_ranks // math.lcm(shard * tensor, per_node)  # on whole nodes
    if arguments.replicas is not None and arguments.replicas > most:
        raise ConfigError(
            f"--replicas {arguments.replicas} are more than fit: {remark}, so at most {most} replicas on whole nodes. "
            "Give fewer, or more nodes or memory."
        )
    return (most if arguments.replicas is None else arguments.replicas), (remark,)
