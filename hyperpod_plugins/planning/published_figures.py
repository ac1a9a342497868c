"""Published figures about failures and their costs, computed again: `hyperpod plan --preset seeds`.

The first group are the claims that this package was started from; the others check the closed forms against figures
that follow from the same sources. A figure agrees if it is equal at the number of digits that its source shows.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal

from hyperpod_plugins.planning.closed_forms import (
    DAY_S,
    HOUR_S,
    additive_time_ratio,
    failure_rate_per_hour,
    kokolis_ettr,
    mean_time_between_failures_s,
    reduction,
    saturating_time_ratio,
    wall_time_s,
    young_interval_s,
)

SELF_MANAGED_S, MANAGED_S = 280 * 60.0, 40 * 60.0
"""Downtime of a failure in the vendor's comparison of self-managed and managed clusters, in seconds."""
PAIRS_S = ((292.0, 47.0), (310.0, 50.0))
"""Measured recoveries, in seconds: from a checkpoint, and checkpointless (4:52 and 0:47; 5:10 and 0:50)."""
_MINUTE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedFigure:
    """A figure of a source, and what the closed forms give for it."""

    group: str
    claim: str
    inputs: str
    value: float
    """Computed here, in `unit`."""
    stated: str
    """As the source states it, without the unit; its decimals are the precision of the comparison."""
    unit: str = ""

    @property
    def computed(self) -> str:
        """The value with as many decimals as the source has; halves are rounded away from 0, as in print."""
        unit = Decimal(1).scaleb(-len(self.stated.partition(".")[2]))
        return f"{Decimal(f'{self.value:.12g}').quantize(unit, ROUND_HALF_UP):,}"

    @property
    def agrees(self) -> bool:
        """Whether both are the same at the source's precision."""
        return self.computed == self.stated

    def cells(self) -> tuple[str, str, str, str, str]:
        """Claim, inputs, the figure computed and as stated, and whether they agree."""
        computed, stated = (f"{text} {self.unit}".strip() for text in (self.computed, self.stated))
        return self.claim, self.inputs, computed, stated, "yes" if self.agrees else "NO"


def published_figures() -> list[PublishedFigure]:
    """All figures, computed."""
    groups: tuple[tuple[str, Iterable[tuple[str, str, float, str, str]]], ...] = (
        ("claims", _claims()),
        ("behind the claims", _details()),
        ("mean time between failures", _times_between_failures()),
        ("less total time, 40 instead of 280 min a failure", _reductions()),
        ("goodput on 2,304 GPUs", _goodputs()),
        ("ETTR and interval, 100,000 GPUs", _large_cluster()),
    )
    return [
        PublishedFigure(group=group, claim=claim, inputs=inputs, value=value, stated=stated, unit=unit)
        for group, figures in groups
        for claim, inputs, value, stated, unit in figures
    ]


def _managed(num_instances: int, rate_per_hour: float, before_s: float, after_s: float) -> float:
    """Relative change of the total time in the additive model."""
    mtbf_s = mean_time_between_failures_s(num_instances, rate_per_hour)
    return reduction(additive_time_ratio(mtbf_s, before_s), additive_time_ratio(mtbf_s, after_s))


def _claims() -> Iterator[tuple[str, str, float, str, str]]:
    mtbf_h = mean_time_between_failures_s(512, 4e-4) / HOUR_S
    yield "time between failures", "512 instances, 0.04 %/h", mtbf_h, "4.88", "h"
    opt = failure_rate_per_hour(35 + 70, 124, 60 * DAY_S)
    yield "failure rate of OPT-175B", "35 + 70 failures, 124 instances, 60 days", 100 * opt, "0.0588", "%/h"
    llama = failure_rate_per_hour(417, 2000, 54 * DAY_S)
    yield "failure rate of Llama 3.1", "417 failures, 2,000 instances, 54 days", 100 * llama, "0.0161", "%/h"
    days = wall_time_s(6.5e6, 256 * 8) / DAY_S
    yield "time of Llama 3 70B", "6.5 M GPU-hours on 256 x 8 GPUs", days, "132", "days"
    less = _managed(256, 5e-4, SELF_MANAGED_S, MANAGED_S)
    yield "total time, managed cluster", "256 instances, 0.05 %/h, 280 and 40 min a failure", 100 * less, "-32", "%"
    yield (
        "saved of 10 M GPU-hours ('about $25 M')",
        "that part of their wall time, at $8 a GPU-hour",
        -less * 10 * 8,
        "25.6",
        "M$",
    )
    for before_s, after_s in PAIRS_S:
        inputs = f"{_clock(before_s)} from a checkpoint, {_clock(after_s)} without"
        yield "downtime, checkpointless", inputs, 100 * reduction(before_s, after_s), "-84", "%"


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def _details() -> Iterator[tuple[str, str, float, str, str]]:
    llama = failure_rate_per_hour(419, 2048, 54 * DAY_S)
    yield "failure rate of Llama 3.1", "419 failures, 2,048 instances, 54 days", 100 * llama, "0.0158", "%/h"
    cluster, mtbf_s = "256 instances, 0.05 %/h", mean_time_between_failures_s(256, 5e-4)
    before, after = (additive_time_ratio(mtbf_s, each) for each in (SELF_MANAGED_S, MANAGED_S))
    yield "time ratio, 280 min a failure", cluster, before, "1.5973", ""
    yield "time ratio, 40 min a failure", cluster, after, "1.0853", ""
    yield "total time, managed cluster", cluster, 100 * reduction(before, after), "-32.05", "%"
    saturating = (saturating_time_ratio(mtbf_s, each) for each in (SELF_MANAGED_S, MANAGED_S))
    yield "the same, if downtimes add up", cluster, 100 * reduction(*saturating), "-56", "%"
    extra_h = before - after
    yield "saved of 10 M GPU-hours of useful work", f"{cluster}, $5 a GPU-hour", extra_h * 10 * 5, "25.6", "M$"
    work_h = wall_time_s(10e6, 256 * 8) / HOUR_S
    yield "time of 10 M GPU-hours", "256 x 8 GPUs", work_h, "4,883", "h"
    yield "failures in that time", cluster, work_h * HOUR_S / mtbf_s, "625", ""
    yield "downtime, managed cluster", "280 and 40 min", 100 * reduction(SELF_MANAGED_S, MANAGED_S), "-85.7", "%"
    for (before_s, after_s), stated in zip(PAIRS_S, ("-83.9", "-83.9"), strict=True):
        inputs = f"{_clock(before_s)} and {_clock(after_s)}"
        yield "downtime, checkpointless", inputs, 100 * reduction(before_s, after_s), stated, "%"
    yield "price of a failure", "256 instances, $55 an instance-hour, 20 min", 256 * 55 * 20 / 60, "4,693", "$"
    hour_to_minutes = _managed(256, 5e-4, 60 * _MINUTE_S, 2 * _MINUTE_S)
    yield "total time, 60 to 2 min a failure", cluster, 100 * hour_to_minutes, "-11.0", "%"


_MTBF_H = {
    4: ("2,500", "1,250", "625", "312.5"),
    8: ("1,250", "625", "312.5", "156.3"),
    16: ("625", "312.5", "156.3", "78.1"),
    32: ("312.5", "156.3", "78.1", "39.1"),
    64: ("156.3", "78.1", "39.1", "19.5"),
    128: ("78.1", "39.1", "19.5", "9.77"),
    256: ("39.1", "19.5", "9.77", "4.88"),
    512: ("19.5", "9.77", "4.88", "2.44"),
}
"""By number of instances: at 0.01, 0.02, 0.04 and 0.08 % an hour."""


def _times_between_failures() -> Iterator[tuple[str, str, float, str, str]]:
    for num_instances, row in _MTBF_H.items():
        for percent, stated in zip((0.01, 0.02, 0.04, 0.08), row, strict=True):
            mtbf_h = mean_time_between_failures_s(num_instances, percent / 100) / HOUR_S
            yield "time between failures", f"{num_instances} instances, {percent} %/h", mtbf_h, stated, "h"


_REDUCTIONS = {
    16: ("-0.6", "-2.5", "-3.1", "-4.8"),
    64: ("-2.5", "-9.1", "-11.1", "-16.5"),
    256: ("-9.1", "-27.7", "-32.1", "-41.9"),
    512: ("-16.5", "-41.9", "-46.7", "-56.3"),
}
"""By number of instances: at 0.01, 0.04, 0.05 and 0.08 % an hour."""


def _reductions() -> Iterator[tuple[str, str, float, str, str]]:
    for num_instances, row in _REDUCTIONS.items():
        for percent, stated in zip((0.01, 0.04, 0.05, 0.08), row, strict=True):
            less = _managed(num_instances, percent / 100, SELF_MANAGED_S, MANAGED_S)
            yield "total time", f"{num_instances} instances, {percent} %/h", 100 * less, stated, "%"


def _goodputs() -> Iterator[tuple[str, str, float, str, str]]:
    figures = ((5e-4, 30, "93.3"), (5e-4, 20, "95.4"), (5e-4, 1.5, "99.6"))
    llama = failure_rate_per_hour(417, 2000, 54 * DAY_S)
    for rate, minutes, stated in (*figures, (llama, 20, "98.5"), (llama, 1.5, "99.9")):
        ratio = additive_time_ratio(mean_time_between_failures_s(288, rate), minutes * _MINUTE_S)
        yield "useful time", f"288 instances, {100 * rate:.2g} %/h, {minutes} min", 100 / ratio, stated, "%"


def _large_cluster() -> Iterator[tuple[str, str, float, str, str]]:
    """Failures in 1,000 node-days, minutes to restart and between checkpoints without stalls; 8 GPUs a node."""
    ettrs = (
        (2.34, 2, 2, "0.939"), (2.34, 2, 5, "0.909"), (6.5, 2, 2, "0.831"), (6.5, 2, 5, "0.746"),
        (2.34, 0.8, 0, "0.984"), (6.5, 0.8, 0, "0.955"),
    )  # fmt: skip
    for rate, restart, interval, stated in ettrs:
        ettr = kokolis_ettr(_mtbf_s(rate), restart * _MINUTE_S, interval * _MINUTE_S)
        yield "ETTR", f"r_f = {rate}, restart {restart} min, interval {interval} min", ettr, stated, ""
    for save, stated in ((0.5, "7.0"), (1, "9.9"), (2, "14.0"), (5, "22.2")):
        interval_s = young_interval_s(save * _MINUTE_S, _mtbf_s(2.34))
        yield "best interval (Young)", f"r_f = 2.34, {save} min a checkpoint", interval_s / _MINUTE_S, stated, "min"


def _mtbf_s(failures_per_1000_node_days: float) -> float:
    return mean_time_between_failures_s(100_000 / 8, failures_per_1000_node_days / 1000 / 24)


def figure_lines(figures: Sequence[PublishedFigure]) -> list[str]:
    """Lines of a table, group by group."""
    lines: list[str] = []
    header = ("claim", "inputs", "computed", "stated", "agrees")
    for group in dict.fromkeys(each.group for each in figures):
        rows = [header, *(each.cells() for each in figures if each.group == group)]
        lines += ["", group, *aligned(rows, right=(2, 3))]
    return lines[1:]


def aligned(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Rows of cells as lines of columns, which are aligned to the left, or to the right if listed in `right`."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
