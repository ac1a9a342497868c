"""Full against hybrid sharding over a slow link, and full sharding in two stages: bytes and time per step.

    sudo python benchmarks/hsdp_traffic.py --megabits 300
    sudo python benchmarks/hsdp_traffic.py --megabits 0      # two stages are not chosen where they gain nothing

Two network namespaces stand for two nodes, with two ranks each; a token bucket limits the link between them. Full
sharding spreads the model over all four ranks, hybrid sharding over the two of a node. In two stages, full sharding has
collectives within nodes and across them (parallel/node_collectives.py); or gathers have, if the job finds at its start
that this is faster. traffic_model.py derives what to expect.
With --megabits 0 the link is not limited.
"""

import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from benchmarks import harness, netns, ranks, report
from benchmarks.netns import Node
from benchmarks.stats import spread
from benchmarks.traffic_model import Sharding, egress_ratio, link_seconds, node_egress_bytes
from hyperpod_plugins.parallel import ParallelConfig, build_mesh, parallelize

NODES = 2
RANKS_PER_NODE = 2
WIDTH = 512
DEPTH = 4
MODEL_BYTES = 4 * DEPTH * WIDTH * WIDTH
PORT = {Sharding.FULL: 29501, Sharding.HYBRID: 29502, Sharding.STAGED: 29503, Sharding.AUTO: 29504}
COLUMNS = ("k", "sharding", "step s", "least s", "node egress MB", "predicted MB", "measured / predicted")


def train(turns: Iterator[int], sharding: Sharding, nodes: list[Node], micro_steps: int) -> None:
    """Train with accumulation: gradients are reduce-scattered every micro-step, replicas averaged once a step."""
    join_node(nodes, sharding)
    shard_degree = RANKS_PER_NODE if sharding is Sharding.HYBRID else NODES * RANKS_PER_NODE
    staged = "auto" if sharding is Sharding.AUTO else sharding is Sharding.STAGED
    config = ParallelConfig(hybrid_shard_degree=shard_degree, block_classes=("Linear",), node_collectives=staged)
    mesh = build_mesh(config.topology(dist.get_world_size(), ranks_per_node=RANKS_PER_NODE), "cpu")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
    parallelize(model, mesh, config)
    assert isinstance(model, FSDPModule)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    inputs = torch.randn(8, WIDTH)
    for _ in turns:
        for micro_step in range(micro_steps):
            model.set_requires_all_reduce(micro_step == micro_steps - 1)
            (model(inputs) - inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def join_node(nodes: list[Node], sharding: Sharding) -> None:
    """Enter this rank's namespace and open the process group there; rank 0 hosts the store."""
    rank = int(os.environ["RANK"])
    netns.enter(nodes[rank // RANKS_PER_NODE].namespace)
    os.environ.update(
        GLOO_SOCKET_IFNAME=netns.INTERFACE,
        MASTER_ADDR=nodes[0].address,
        MASTER_PORT=str(PORT[sharding]),
        TORCHELASTIC_USE_AGENT_STORE="False",
    )
    dist.init_process_group("hyperpod")


def node_egress() -> dict[str, float]:
    """What this rank's node has sent, counted once a node."""
    is_first_of_node = int(os.environ["RANK"]) % RANKS_PER_NODE == 0
    return {**ranks.cpu_seconds(), "egress_bytes": netns.sent_bytes() if is_first_of_node else 0}


def measure(micro_steps: int, megabits: float, schedule: harness.Schedule) -> harness.Comparison:
    with netns.two_nodes(megabits) as nodes:
        contenders = [
            ranks.Contender(
                name=sharding.value,
                train=train,
                world_size=NODES * RANKS_PER_NODE,
                kwargs={"sharding": sharding, "nodes": nodes, "micro_steps": micro_steps},
                meter=node_egress,
            )
            for sharding in (Sharding.HYBRID, Sharding.FULL, Sharding.STAGED, Sharding.AUTO)
        ]
        return harness.compare(f"k = {micro_steps}", contenders, schedule)


def finding(run: harness.Run, micro_steps: int, megabits: float) -> dict[str, Any]:
    """Measured and predicted egress of one node in one step, and the time the link alone needs for it."""
    measured = spread(run.measures["egress_bytes"]).median / NODES
    ways = [
        node_egress_bytes(
            sharding=Sharding(run.name),
            model_bytes=MODEL_BYTES,
            nodes=NODES,
            ranks_per_node=RANKS_PER_NODE,
            micro_steps=micro_steps,
            reduce_scatter_is_all_reduce=True,
            gathers_are_staged=are_staged,
        )
        for are_staged in (False, True)
    ]
    predicted = min(ways, key=lambda way: abs(way - measured))  # the bytes tell which one was chosen
    return {
        "micro_steps": micro_steps,
        "sharding": run.name,
        "step_s": spread(run.step_s).median,
        "least_s": link_seconds(predicted, megabits * 1e6) if megabits else 0.0,
        "egress_bytes": measured,
        "predicted_bytes": predicted,
    }


def print_findings(findings: list[dict[str, Any]], megabits: float) -> None:
    lines = [
        [
            str(f["micro_steps"]),
            f["sharding"],
            f"{f['step_s']:.3f}",
            f"{f['least_s']:.3f}",
            f"{f['egress_bytes'] / 1e6:.2f}",
            f"{f['predicted_bytes'] / 1e6:.2f}",
            f"{f['egress_bytes'] / f['predicted_bytes']:.3f}",
        ]
        for f in findings
    ]
    title = f"{NODES} nodes x {RANKS_PER_NODE} ranks, {megabits:.0f} Mbit/s, model of {MODEL_BYTES / 1e6:.2f} MB, gloo"
    report.print_table(title, COLUMNS, lines)


def print_ratios(comparisons: dict[int, harness.Comparison], findings: list[dict[str, Any]]) -> None:
    """Print full over hybrid, beside what gloo, an ideal ring and a large cluster should show."""
    for micro_steps, comparison in comparisons.items():
        hybrid, full, staged, chosen = (f for f in findings if f["micro_steps"] == micro_steps)
        seconds = report.ratio_to_reference(comparison, comparison.runs[1])
        of_staged = report.ratio_to_reference(comparison, comparison.runs[2])
        of_chosen = report.ratio_to_reference(comparison, comparison.runs[3])
        here = {"nodes": NODES, "ranks_per_node": RANKS_PER_NODE, "micro_steps": micro_steps}
        print(
            f"k = {micro_steps}: full / hybrid: time {seconds.median:.2f} ({seconds.low:.2f} .. {seconds.high:.2f}), "
            f"bytes {full['egress_bytes'] / hybrid['egress_bytes']:.2f}; predicted bytes: "
            f"{egress_ratio(**here, reduce_scatter_is_all_reduce=True):.2f} on gloo, "
            f"{egress_ratio(**here):.2f} with ring reduce-scatters, "
            f"{egress_ratio(**{**here, 'nodes': 1000}):.2f} on many nodes"
        )
        print(
            f"k = {micro_steps}: full in two stages / full: time {of_staged.median / seconds.median:.2f}, bytes "
            f"{staged['egress_bytes'] / full['egress_bytes']:.2f}; predicted bytes: "
            f"{staged['predicted_bytes'] / full['predicted_bytes']:.2f}"
        )
        way = "two stages" if chosen["predicted_bytes"] < full["predicted_bytes"] else "one stage"
        print(
            f"k = {micro_steps}: gathers as measured at the start: {way}; time {of_chosen.median / seconds.median:.2f} "
            f"of full, bytes {chosen['egress_bytes'] / full['egress_bytes']:.2f}"
        )


def main() -> None:
    harness.leave_cleanly_on_sigterm()
    parser = harness.argument_parser("Full against hybrid sharding over a slow link.")
    parser.add_argument(
        "--megabits", type=float, default=300, help="bandwidth of the link in each direction, Mbit/s; 0: no limit"
    )
    parser.add_argument("--micro-steps", type=int, nargs="+", default=[1, 2, 4], help="accumulation factors to try")
    arguments = parser.parse_args()
    if reason := netns.why_not():
        print(f"hsdp_traffic: skipped: {reason}")
        return
    schedule = harness.Schedule.from_arguments(arguments, rounds=8, starts=2, steps=2, warmup=1)
    comparisons = {k: measure(k, arguments.megabits, schedule) for k in arguments.micro_steps}
    findings = [finding(run, k, arguments.megabits) for k, comparison in comparisons.items() for run in comparison.runs]
    print_findings(findings, arguments.megabits)
    print_ratios(comparisons, findings)
    report.write_results("hsdp_traffic", list(comparisons.values()), arguments.json, {"egress": findings})


if __name__ == "__main__":
    main()
