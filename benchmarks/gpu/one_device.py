"""Contenders in turn on one device, in one process: peak memory and time of a step, and whether limits are held.

Processes of their own, as in `benchmarks.harness`, would need the memory of the device once for each contender. Here
all have the same parameters and gradients, and modules of their own (`shared_copy`). In each round every contender has
one step, in an order that rotates, so a ratio is taken between steps that lie next to each other.
"""

import argparse
import copy
import gc
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import report
from benchmarks.harness import Comparison, Run, Schedule
from benchmarks.memory import Sample, Taken, measured
from benchmarks.stats import paired_ratio, rotated, verdict
from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.planning import TrackedMemory

RECIPES = Path(__file__).parents[2] / "examples" / "recipes"
MIN_ROUNDS = 5
"""With fewer rounds a limit is not decided."""
Step = Callable[[], Taken]
Build = Callable[[], Step]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A limit of a comparison, and whether it is held."""

    what: str
    measured: str = ""
    held: str
    """`met`, `missed`, or why neither can be said."""


@dataclass(slots=True, kw_only=True)
class Found:
    """What a benchmark has measured."""

    reference: str
    """The contender that the others are compared with."""
    comparisons: list[Comparison] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    """The largest peak and the median time of each contender, in each comparison."""
    left: dict[str, str] = field(default_factory=dict)
    """Contenders that did not run, or stopped, and why."""

    def judge(self, what: str, title: str, names: tuple[str, str], limit: float) -> Limit:
        """Whether the first contender's step takes at most `limit` times as long as the second one's."""
        runs = {run.name: run for each in self.comparisons if each.title == title for run in each.runs}
        if absent := [name for name in names if name not in runs]:
            return Limit(what=what, held=f"not measured: {absent[0]}: {self.left.get(absent[0], 'it did not run')}")
        mine, theirs = (runs[name].step_s for name in names)
        ratio = paired_ratio(mine, theirs, [len(mine)])
        held = verdict(ratio, limit) if len(mine) >= MIN_ROUNDS else f"not decided by {len(mine)} rounds"
        return Limit(what=what, measured=f"{ratio.median:.4f} ({ratio.low:.4f} .. {ratio.high:.4f})", held=held)


def arguments_of(description: str, arguments: Sequence[str] | None, **options: Any) -> argparse.Namespace:
    """The arguments that every benchmark here takes, and integers of its own, by name with their defaults."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=20, help="most rounds of a comparison")
    parser.add_argument(
        "--seconds", type=float, default=240.0, help="after which it begins no more rounds, from the sixth on"
    )
    parser.add_argument("--quick", action="store_true", help="small, also on a CPU; the figures mean nothing")
    parser.add_argument("--json", type=Path, help="where to write the samples (default: benchmarks/results/gpu/...)")
    for name, default in options.items():
        parser.add_argument(f"--{name}", type=int, default=default, nargs="+" if isinstance(default, list) else None)
    args = parser.parse_args(arguments)
    if args.quick:
        args.rounds = 1
    has_gpu = torch.cuda.is_available()
    if not args.quick and not has_gpu:
        parser.exit(2, "there is no usable GPU here; --quick shows on a CPU that it works\n")
    if has_gpu and not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & {*os.environ}:
        # What a contender leaves in the allocator's cache has to serve the next one, whose tensors have other sizes.
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    return args


def this_device() -> torch.device:
    """The GPU, or the CPU where there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def recipe_model(name: str, device: torch.device, **sizes: int) -> nn.Module:
    """The model of a recipe in bfloat16, with other sizes where given, of random values, and with gradients."""
    model = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())["model"] | sizes | {"use_cache": False}
    torch.manual_seed(0)
    with torch.device(device):
        built = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(model.pop("model_type"), **model), dtype=torch.bfloat16
        )
    return with_gradients(built.train())


def with_gradients(model: nn.Module) -> nn.Module:
    """Give all parameters gradients, so that steps do not allocate them."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def shared_copy(model: nn.Module) -> nn.Module:
    """A model of its own modules, with the parameters and buffers of another one."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(each): each for each in tensors})


def free(device: torch.device) -> None:
    """Return what caches hold of the device and of pinned host memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()  # of the allocator behind pin_memory=True


class Contest:
    """One comparison: contenders that are admitted, have turns, and leave."""

    def __init__(self, device: torch.device, left: dict[str, str], tokens: int) -> None:
        self.device, self.left, self.tokens = device, left, tokens
        self.steps: dict[str, Step] = {}
        self.runs: dict[str, Run] = {}
        self.peaks: dict[str, float] = {}
        self.losses: dict[str, float] = {}

    @contextmanager
    def unless_it_cannot(self, name: str) -> Any:
        """Let a contender leave that is refused, lacks a library, or for which there is not enough memory."""
        try:
            yield
        except (ConfigError, ImportError) as error:
            self.left[name] = str(error)
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
            self.left[name] = f"out of memory at {self.tokens} tokens"
        else:
            return
        self.steps.pop(name, None)
        self.runs.pop(name, None)
        free(self.device)

    def admit(self, name: str, build: Build, warmup: int) -> None:
        """Build a contender, and let it have steps that do not count."""
        with self.unless_it_cannot(name):
            self.steps[name] = build()
            for _ in range(warmup):
                self.steps[name]()
            self.runs[name] = Run(name=name, measures={"cpu_s": [], "peak_mib": []})

    def turn(self, name: str) -> None:
        """One step that counts."""
        cpu_s = time.process_time()
        with self.unless_it_cannot(name):
            taken, run = self.steps[name](), self.runs[name]
            run.step_s.append(taken.seconds)
            run.measures["cpu_s"].append(time.process_time() - cpu_s)
            run.measures["peak_mib"].append(taken.peak_bytes / 2**20)
            self.losses[name] = taken.loss


def compare(
    found: Found,
    title: str,
    builds: Mapping[str, Build],
    args: argparse.Namespace,
    *,
    tokens: int,
    warmup: int = 1,
    one_by_one: bool = False,
) -> None:
    """Let contenders have their steps, and add what they took. Without the reference, there are no ratios.

    Args:
        found: where it goes.
        title: of the comparison.
        builds: makes the step of each contender, of the reference first.
        args: see `arguments_of`.
        tokens: of one step.
        warmup: steps of each contender that do not count.
        one_by_one: each contender has its turns alone, because the host has no memory for all at once; one round.
    """
    contest = Contest(device := this_device(), found.left, tokens)
    if one_by_one:
        for name, build in builds.items():
            contest.admit(name, build, warmup)
            if name in contest.steps:
                contest.turn(name)
            contest.steps.pop(name, None)
            free(device)
    else:
        for name, build in builds.items():
            contest.admit(name, build, warmup)
        began_s, index = time.monotonic(), 0
        while contest.steps and index < args.rounds:
            if index >= MIN_ROUNDS and time.monotonic() - began_s > args.seconds:
                break
            for name in rotated([*contest.steps], index):
                contest.turn(name)
            index += 1
        contest.steps.clear()
        free(device)
    runs = list(contest.runs.values())
    found.samples += [
        Sample(
            way=run.name,
            tokens=tokens,
            peak_mib=max(run.measures["peak_mib"]),
            step_s=sorted(run.step_s)[len(run.step_s) // 2],
            loss=contest.losses[run.name],
        )
        for run in runs
    ]
    if runs and runs[0].name == found.reference:
        schedule = Schedule(rounds=len(runs[0].step_s), starts=1, steps=1, lead_in=0, warmup=warmup)
        found.comparisons.append(Comparison(title=title, schedule=schedule, runs=runs))


def tell(name: str, found: Found, limits: Sequence[Limit], args: argparse.Namespace) -> None:
    """Print what was found, and write it down as the benchmark `gpu/NAME`."""
    for comparison in found.comparisons:
        report.print_comparison(comparison)
    peaks = {sample.tokens: sample.peak_mib for sample in found.samples if sample.way == found.reference}
    for sample in found.samples:
        ratio = f", {sample.peak_mib / peak:.2f} of {found.reference}" if (peak := peaks.get(sample.tokens)) else ""
        sys.stdout.write(
            f"{sample.tokens:>8} tokens  {sample.way:24}  loss {sample.loss:.6g}  peak {sample.peak_mib:.1f} MiB"
            f"{ratio}\n"
        )
    for contender, why in found.left.items():
        sys.stdout.write(f"{contender}: {why}\n")
    for limit in limits:
        sys.stdout.write(f"{limit.what}: {limit.measured}{': ' if limit.measured else ''}{limit.held}\n")
    findings = {
        "reference": found.reference,
        "samples": [asdict(each) for each in found.samples],
        "limits": [asdict(each) for each in limits],
        "left": found.left,
    }
    report.write_results(f"gpu/{name}", found.comparisons, args.json, findings)


def tracked_step(model: nn.Module, step: Callable[[], float], tracker: TrackedMemory) -> Step:
    """A step that says what it took."""
    device = this_device()
    return lambda: measured(step, model, device, tracker)
