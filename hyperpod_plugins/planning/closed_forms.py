"""Closed forms for the time and capacity that failures cost a training job.

Every function says what it assumes and where it comes from. `simulation.py` simulates the same jobs without the
approximations, and the tests compare the two where the assumptions hold.

[Note: symbols]
Times are in seconds, failure rates in failures per instance-hour. A job runs on `num_instances` instances (nodes) and
stops as a whole when one of them fails, so its failure rate is the sum of theirs; `mtbf_s` is the mean time between
failures of the whole job. A *time ratio* is wall time divided by the time of the same work without failures and without
checkpoints; ETTR, the effective training time ratio, is its inverse.
"""

import math
from collections.abc import Mapping, Sequence

from hyperpod_plugins.errors import ConfigError

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
_MOST_IN_REPAIR = 100_000


def check_numbers(*, positive: dict[str, float] | None = None, at_least_zero: dict[str, float] | None = None) -> None:
    """Check numbers that a user gave, by name.

    Raises:
        ConfigError: One is not finite, or out of its range.
    """
    for name, value in (positive or {}).items():
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{name}={value:g} must be a finite number above 0.")
    for name, value in (at_least_zero or {}).items():
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{name}={value:g} must be a finite number of at least 0.")


def check_whole(names: Mapping[str, object], *, least: int) -> None:
    """Check whole numbers that a user gave, by name.

    Raises:
        ConfigError: One is not an `int`, or below `least`.
    """
    for name, value in names.items():
        if type(value) is not int or value < least:
            raise ConfigError(f"{name} must be a whole number of at least {least}, but is {value!r}.")


# -- rates and sizes --------------------------------------------------------------------------------------------------


def failure_rate_per_hour(num_failures: float, num_instances: float, duration_s: float) -> float:
    """Failures per instance-hour that a run of `duration_s` on `num_instances` instances has shown.

    Assumes that all instances were in use all the time; idle ones count as exposed.
    """
    check_numbers(
        positive={"num_instances": num_instances, "duration_s": duration_s},
        at_least_zero={"num_failures": num_failures},
    )
    return num_failures / (num_instances * duration_s / HOUR_S)


def mean_time_between_failures_s(num_instances: float, failures_per_instance_hour: float) -> float:
    """Mean time between failures of a job, in seconds: `1 / (N f)`.

    Assumes independent failures at a constant rate, equal or not among instances; only the sum of the rates counts.
    """
    check_numbers(positive={"num_instances": num_instances, "failures_per_instance_hour": failures_per_instance_hour})
    return HOUR_S / (num_instances * failures_per_instance_hour)


def wall_time_s(accelerator_hours: float, num_accelerators: float) -> float:
    """Seconds that `accelerator_hours` take on `num_accelerators`; assumes that all are in use all the time."""
    check_numbers(positive={"accelerator_hours": accelerator_hours, "num_accelerators": num_accelerators})
    return accelerator_hours / num_accelerators * HOUR_S


def transfer_s(state_bytes: float, bytes_per_s: float) -> float:
    """Seconds to send the state of a rank to its replacement.

    Assumes that each replacement has a source of its own, so the time does not depend on the number of ranks.
    """
    check_numbers(positive={"bytes_per_s": bytes_per_s}, at_least_zero={"state_bytes": state_bytes})
    return state_bytes / bytes_per_s


def reduction(before: float, after: float) -> float:
    """Relative change from `before` to `after`: -0.84 for 84 % less."""
    check_numbers(positive={"before": before}, at_least_zero={"after": after})
    return after / before - 1


# -- a downtime for each failure --------------------------------------------------------------------------------------


def additive_time_ratio(mtbf_s: float, downtime_s: float) -> float:
    """Time ratio if each failure costs `downtime_s`: `1 + D / M`.

    Assumes that failures happen only while the job makes progress, so there are `work / M` of them. The downtime
    contains everything: detection, replacement, restart and work done again. Source: the vendor's comparison of managed
    and self-managed recovery.
    """
    check_numbers(positive={"mtbf_s": mtbf_s}, at_least_zero={"downtime_s": downtime_s})
    return 1 + downtime_s / mtbf_s


def saturating_time_ratio(mtbf_s: float, downtime_s: float) -> float:
    """Time ratio if failures keep coming during downtimes, and their downtimes add up: `1 / (1 - D / M)`.

    Assumes that every failure costs a whole `downtime_s`, also one that happens during another's. It is infinite from
    `downtime_s = mtbf_s` on: the job makes no progress then.
    """
    check_numbers(positive={"mtbf_s": mtbf_s}, at_least_zero={"downtime_s": downtime_s})
    return math.inf if downtime_s >= mtbf_s else 1 / (1 - downtime_s / mtbf_s)


def uninterrupted_time_s(mtbf_s: float, duration_s: float) -> float:
    """Mean time until something that takes `duration_s` has run once without a failure: `M (e^(D / M) - 1)`.

    Assumes exponential failures, and that each one starts it again from the beginning.
    """
    check_numbers(positive={"mtbf_s": mtbf_s}, at_least_zero={"duration_s": duration_s})
    return mtbf_s * _expm1(duration_s / mtbf_s)


# -- checkpoint restart -----------------------------------------------------------------------------------------------


def young_interval_s(save_s: float, mtbf_s: float) -> float:
    """Best time between checkpoints, to first order: `sqrt(2 w M)`.

    Assumes that a checkpoint stalls training for `save_s`, much shorter than the interval, which is much shorter than
    `mtbf_s`; a failure costs half an interval on average. Source: Young 1974, Communications of the ACM 17(9).
    """
    check_numbers(positive={"save_s": save_s, "mtbf_s": mtbf_s})
    return math.sqrt(2 * save_s * mtbf_s)


def daly_interval_s(save_s: float, mtbf_s: float) -> float:
    """Best time of work between checkpoints, to higher order.

    `sqrt(2 w M) (1 + sqrt(w / 2M) / 3 + w / 18M) - w` where `w < 2 M`, otherwise `M`. Assumes exponential failures, and
    the same stall for each checkpoint. Source: Daly 2006, Future Generation Computer Systems 22(3).
    """
    young_s = young_interval_s(save_s, mtbf_s)
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    part = save_s / (2 * mtbf_s)
    return young_s * (1 + math.sqrt(part) / 3 + part / 9) - save_s


def daly_time_ratio(mtbf_s: float, interval_s: float, save_s: float, restart_s: float) -> float:
    """Time ratio of checkpoint restart, complete: `M e^(R / M) (e^((t + w) / M) - 1) / t`.

    Assumes exponential failures, which may also happen while a checkpoint is saved and during the restart of
    `restart_s` (detection and wait included), which begins again then. Exact for work of many intervals; the checkpoint
    at the very end, which is not needed, is counted. Source: Daly 2006.
    """
    check_numbers(
        positive={"mtbf_s": mtbf_s, "interval_s": interval_s},
        at_least_zero={"save_s": save_s, "restart_s": restart_s},
    )
    exponent = restart_s / mtbf_s + math.log(max(_expm1((interval_s + save_s) / mtbf_s), 1e-300))
    return math.inf if exponent > 700 else math.exp(exponent) * mtbf_s / interval_s


def kokolis_ettr(mtbf_s: float, restart_s: float, interval_s: float, save_s: float = 0.0) -> float:
    """ETTR of checkpoint restart, to first order: `(1 - (u + t / 2) / M) / (1 + w / t)`; 0 where that is negative.

    Assumes that a failure costs its restart `restart_s` and half an interval of work, that failures are rare compared
    with both, and that none happens during a restart. Without stalls (`save_s = 0`) the interval may be 0. Source:
    Kokolis et al. 2024, arXiv:2410.21680.
    """
    check_numbers(
        positive={"mtbf_s": mtbf_s},
        at_least_zero={"restart_s": restart_s, "interval_s": interval_s, "save_s": save_s},
    )
    if save_s and not interval_s:
        return 0.0
    useful = max(0.0, 1 - (restart_s + interval_s / 2) / mtbf_s)
    return useful / (1 + (save_s / interval_s if save_s else 0))


def saxena_interval_s(save_s: float, mtbf_s: float, recovery_s: float) -> float:
    """Time from one checkpoint to the next with the best availability: `s + sqrt(2 (F + r) s + s^2)`.

    Assumes a renewal cycle of failure-free time `mtbf_s` and recovery `recovery_s`, and that saves stall training.
    Source: Saxena et al. 2024, arXiv:2410.18124.
    """
    check_numbers(positive={"save_s": save_s, "mtbf_s": mtbf_s}, at_least_zero={"recovery_s": recovery_s})
    return save_s + math.sqrt(2 * (mtbf_s + recovery_s) * save_s + save_s**2)


# -- recovery from memory ---------------------------------------------------------------------------------------------


def checkpointless_downtime_s(
    *, detect_s: float, abort_s: float, reinit_s: float, transfer_s: float, first_step_s: float, step_s: float
) -> float:
    """Downtime of a failure if the state comes from a replica, in seconds: the sum of the stages and half a step.

    Args:
        detect_s: Until all ranks know of the failure.
        abort_s: Until their groups are aborted.
        reinit_s: Until a replacement runs and new groups are connected.
        transfer_s: Until it holds the state; see `transfer_s`.
        first_step_s: What the first step takes longer than others.
        step_s: A step; the open one is done again. Failures are equally likely at any time of it.

    Assumes that a replica of each lost shard survives. Then no checkpoint interval is in it.
    """
    stages = {
        "detect_s": detect_s, "abort_s": abort_s, "reinit_s": reinit_s, "transfer_s": transfer_s,
        "first_step_s": first_step_s, "step_s": step_s,
    }  # fmt: skip
    check_numbers(at_least_zero=stages)
    return sum(stages.values()) - step_s / 2


def checkpointless_ettr(
    mtbf_s: float,
    downtime_s: float,
    *,
    fallback_probability: float = 0.0,
    restart_s: float = 0.0,
    interval_s: float = 0.0,
    save_s: float = 0.0,
) -> float:
    """ETTR if a failure costs `downtime_s`, or with `fallback_probability` a restart from a checkpoint.

    `(1 - ((1 - p) D + p (u + t / 2)) / M) / (1 + w / t)`; 0 where that is negative. With probability 1 it is
    `kokolis_ettr`. Assumes what that assumes, and that fallbacks are independent.
    """
    check_numbers(positive={"mtbf_s": mtbf_s}, at_least_zero={"downtime_s": downtime_s})
    _check_probability("fallback_probability", fallback_probability)
    lost_s = downtime_s + fallback_probability * (restart_s + interval_s / 2 - downtime_s)
    useful = max(0.0, 1 - lost_s / mtbf_s)
    if save_s and not interval_s:
        return 0.0
    return useful / (1 + (save_s / interval_s if save_s else 0))


def regained_time_ratio(
    mtbf_s: float,
    downtime_s: float,
    *,
    regain_every_s: float,
    stall_s: float = 0.0,
    interval_s: float = math.inf,
    save_s: float = 0.0,
) -> float:
    """Time ratio if a failure takes the job back to a copy in memory, made every `regain_every_s` of work.

    `e^(D / M) ((1 + s / d) / (1 - d / 2M) + M (e^(w / M) - 1) / t)`, with `d = regain_every_s`: the interval of
    snapshots, which stall training for `stall_s` each, or one step if replicas hold the state. Checkpoints, which stall
    for `save_s` every `interval_s`, are kept for the case that memory does not suffice; one that is interrupted is
    saved again.

    Assumes exponential failures, `regain_every_s` much shorter than `mtbf_s`, a downtime that starts again if another
    failure happens in it, and that a copy always survives. It is infinite where a copy is never reached.
    """
    check_numbers(
        positive={"mtbf_s": mtbf_s, "regain_every_s": regain_every_s},
        at_least_zero={"downtime_s": downtime_s, "stall_s": stall_s, "save_s": save_s},
    )
    lost = regain_every_s / (2 * mtbf_s)
    if lost >= 1:
        return math.inf
    running = (1 + stall_s / regain_every_s) / (1 - lost) + uninterrupted_time_s(mtbf_s, save_s) / interval_s
    return running * (1 + _expm1(downtime_s / mtbf_s))


def replica_groups_ettr(
    mtbf_s: float, survivors_stall_s: float, group_downtime_s: float, num_groups: int, overhead: float = 0.0
) -> float:
    """ETTR if the other replica groups go on while one recovers: `1 - S / M - u / (G M) - overhead`; at least 0.

    Args:
        mtbf_s: Of the whole job.
        survivors_stall_s: How long a failure stalls the other groups.
        group_downtime_s: How long the group that has failed is missing.
        num_groups: Number of groups; each holds the whole state.
        overhead: Part of the time that the protocol takes without failures.

    Assumes that work is proportional to the number of groups, and that few groups are missing at a time. Source: the
    accounting for fault-tolerant HSDP in torchft.
    """
    check_numbers(
        positive={"mtbf_s": mtbf_s, "num_groups": num_groups},
        at_least_zero={"survivors_stall_s": survivors_stall_s, "group_downtime_s": group_downtime_s},
    )
    _check_probability("overhead", overhead)
    return max(0.0, 1 - (survivors_stall_s + group_downtime_s / num_groups) / mtbf_s - overhead)


# -- elastic jobs and spares ------------------------------------------------------------------------------------------


def waiting_cost_s(num_replicas: int, replace_s: float) -> float:
    """Replica-seconds that a failure costs if the job waits for the replacement: `N t`."""
    check_numbers(positive={"num_replicas": num_replicas}, at_least_zero={"replace_s": replace_s})
    return num_replicas * replace_s


def shrinking_cost_s(num_replicas: int, num_lost: int, resize_s: float, replace_s: float) -> float:
    """Replica-seconds that a failure costs if the job shrinks and grows again: `2 N t_resize + k t_replace`.

    Assumes that throughput is proportional to the number of replicas, and that nothing else fails meanwhile.
    """
    check_numbers(positive={"num_replicas": num_replicas}, at_least_zero={"resize_s": resize_s, "replace_s": replace_s})
    _check_lost(num_replicas, num_lost)
    return 2 * num_replicas * resize_s + num_lost * replace_s


def shrink_break_even_s(num_replicas: int, num_lost: int, resize_s: float) -> float:
    """Time to a replacement from which on shrinking is cheaper than waiting: `2 t_resize N / (N - k)`.

    Equates `waiting_cost_s` and `shrinking_cost_s`. It is infinite if all replicas are lost.
    """
    check_numbers(positive={"num_replicas": num_replicas}, at_least_zero={"resize_s": resize_s})
    _check_lost(num_replicas, num_lost)
    return math.inf if num_lost == num_replicas else 2 * resize_s * num_replicas / (num_replicas - num_lost)


def elastic_useful(durations_s: Sequence[float], replicas: Sequence[float], num_granted: float) -> float:
    """Part of the granted capacity that an elastic job used: `sum(t_i n_i) / (N sum(t_i))`.

    Args:
        durations_s: Length of each part of the run.
        replicas: Replicas that trained in each part, times the efficiency of that size; 0 for pauses.
        num_granted: Replicas that were paid for, idle spares included.
    """
    check_numbers(positive={"num_granted": num_granted, "the sum of durations_s": sum(durations_s)})
    if len(durations_s) != len(replicas):
        raise ConfigError(f"{len(durations_s)} durations and {len(replicas)} numbers of replicas; give one for each.")
    used = sum(duration_s * number for duration_s, number in zip(durations_s, replicas, strict=True))
    return used / (num_granted * sum(durations_s))


def spares_shortage(num_spares: int, mtbf_s: float, repair_s: float) -> float:
    """Probability that a failure finds no spare: that at least `num_spares` nodes are in repair.

    Assumes exponential failures and that each lost node, or another in its place, is a spare after a mean of
    `repair_s`, however many are in repair. Then their number has a Poisson distribution of mean `repair_s / mtbf_s`,
    for any distribution of the repair time (Palm's theorem, M/G/infinity).
    """
    check_numbers(positive={"mtbf_s": mtbf_s}, at_least_zero={"num_spares": num_spares, "repair_s": repair_s})
    mean = repair_s / mtbf_s
    if num_spares == 0:
        return 1.0
    if mean == 0:
        return 0.0
    logs = [number * math.log(mean) - mean - math.lgamma(number + 1) for number in range(num_spares)]
    return max(0.0, 1 - math.fsum(math.exp(log) for log in logs))


def spares_needed(mtbf_s: float, repair_s: float, shortage: float = 0.01) -> int:
    """Smallest number of spares with which at most this part of the failures finds none; see `spares_shortage`.

    Raises:
        ConfigError: So many nodes would be in repair at a time that it is not computed.
    """
    if not 0 < shortage < 1:
        raise ConfigError(f"shortage={shortage:g} must be between 0 and 1: the part of failures that find no spare.")
    check_numbers(positive={"mtbf_s": mtbf_s}, at_least_zero={"repair_s": repair_s})
    mean = repair_s / mtbf_s
    if mean == 0:
        return 1
    if mean > _MOST_IN_REPAIR:
        raise ConfigError(
            f"with a failure every {mtbf_s:g} s and repairs of {repair_s:g} s, {mean:g} nodes are in repair "
            f"at any time; spares are computed for at most {_MOST_IN_REPAIR:,}. "
            "Give shorter repairs, or a lower rate of failures."
        )
    number, log, missing = 0, -mean, 1.0
    while missing > shortage:
        missing -= math.exp(log)
        number += 1
        log += math.log(mean) - math.log(number)
        if number > mean + 100 + 20 * math.sqrt(mean):  # the sum has lost its digits
            break
    return number


# -- loss of all copies -----------------------------------------------------------------------------------------------


def simultaneous_loss_probability(
    num_shards: int, num_copies: int, failures_per_instance_hour: float, window_s: float
) -> float:
    """Probability that all copies of some shard are lost within one window: about `shards (f W)^r`.

    Computed as `1 - (1 - (1 - e^(-f W))^r)^shards`, which is at most that. Assumes independent failures of the
    instances that hold copies, so no rack or switch in common. Source: as in Gemini, Wang et al., SOSP 2023.
    """
    _check_copies(num_shards, num_copies)
    check_numbers(
        positive={"failures_per_instance_hour": failures_per_instance_hour}, at_least_zero={"window_s": window_s}
    )
    one = -math.expm1(-failures_per_instance_hour * window_s / HOUR_S)
    return 1.0 if one == 1 else -math.expm1(num_shards * math.log1p(-(one**num_copies)))


def mean_time_to_loss_s(num_shards: int, num_copies: int, failures_per_instance_hour: float, window_s: float) -> float:
    """Mean time until all copies of some shard are lost, in seconds: `1 / (shards r f (f W)^(r - 1))`.

    A copy is missing for `window_s` after the failure of its instance; loss needs the other copies to fail within it.
    Assumes independent failures and `f W` much below 1. With `r` copies, the factor `r` counts which one fails first.
    """
    _check_copies(num_shards, num_copies)
    check_numbers(
        positive={"failures_per_instance_hour": failures_per_instance_hour}, at_least_zero={"window_s": window_s}
    )
    rate_s = failures_per_instance_hour / HOUR_S
    loss_rate_s = num_shards * num_copies * rate_s * (rate_s * window_s) ** (num_copies - 1)
    return 1 / loss_rate_s if loss_rate_s else math.inf


def copies_needed(
    num_shards: int, failures_per_instance_hour: float, window_s: float, duration_s: float, risk: float = 0.01
) -> int:
    """Smallest number of copies with which the risk that all of some shard are lost during a run is at most `risk`.

    Assumes what `mean_time_to_loss_s` does.
    """
    if not 0 < risk < 1:
        raise ConfigError(f"risk={risk:g} must be between 0 and 1: the probability of a loss during the run.")
    check_numbers(positive={"duration_s": duration_s})
    if failures_per_instance_hour * window_s / HOUR_S >= 1:
        raise ConfigError(
            f"with {failures_per_instance_hour:g} failures per instance-hour and a window of {window_s:g} s, an "
            "instance fails about once in each window: no number of copies helps. Give a shorter window."
        )
    number = 1
    while (
        -math.expm1(-duration_s / mean_time_to_loss_s(num_shards, number, failures_per_instance_hour, window_s)) > risk
    ):
        number += 1
    return number


# -- goodput ----------------------------------------------------------------------------------------------------------


def goodput(scheduling: float, runtime: float, program: float, statistical: float = 1.0) -> float:
    """Product of the parts of capacity that are useful.

    Args:
        scheduling: Part of the time in which the job has its resources.
        runtime: Part of that in which it makes progress: the ETTR.
        program: Part of the peak speed that its steps reach: the MFU.
        statistical: Progress for each sample, compared with the best batch size (Pollux, Qiao et al., OSDI 2021).

    Assumes that the parts are independent. Source: Google's definition of ML productivity goodput.
    """
    for name, value in {
        "scheduling": scheduling, "runtime": runtime, "program": program, "statistical": statistical
    }.items():  # fmt: skip
        _check_probability(name, value)
    return scheduling * runtime * program * statistical


def _expm1(exponent: float) -> float:
    return math.inf if exponent > 700 else math.expm1(exponent)


def _check_probability(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ConfigError(f"{name}={value:g} must be between 0 and 1.")


def _check_lost(num_replicas: int, num_lost: int) -> None:
    if not 0 < num_lost <= num_replicas:
        raise ConfigError(f"num_lost={num_lost} must be between 1 and the number of replicas, {num_replicas}.")


def _check_copies(num_shards: int, num_copies: int) -> None:
    if num_shards < 1 or num_copies < 1:
        raise ConfigError(f"num_shards={num_shards} and num_copies={num_copies} must be at least 1.")
