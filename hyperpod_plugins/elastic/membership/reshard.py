"""Another shard or tensor degree: all processes start again. Whether, and in which, and what somebody has asked for."""

import json
import logging
import time
from collections.abc import Mapping
from typing import NoReturn

from hyperpod_plugins.elastic.membership.admission import candidates, have_left, num_whole, plan_scale_down
from hyperpod_plugins.elastic.membership.elastic_spec import ElasticSpec, Layout, elastic_spec_of, first_that_fits
from hyperpod_plugins.elastic.membership.restart_policy import NOT_NEEDED
from hyperpod_plugins.elastic.store.job_store import JobStore
from hyperpod_plugins.elastic.store.world import WorldPlan

log = logging.getLogger(__name__)
_ASKED = "degrees"  # value: shard and tensor degree that somebody has asked for; the first word of a round counts
_POLL_S = 0.05
_IDLE_S = 1.0
_FOUNDING_S = 1800.0
"""Longest wait of a process that is not needed for the others to begin."""


def layout_without(
    job_store: JobStore, spec: ElasticSpec, world: WorldPlan, missing: Mapping[int, int], waited_s: float
) -> Layout | None:
    """Choose the degrees in which all processes start again, since no world can be made of those that are left.

    The arguments are those of `world_without`. None to wait, and to look again; or where nothing fits.
    """
    healthy = set(world.worker_ids).difference(missing)
    if num_whole(world, healthy, spec.replica_size) >= min(spec.sizes):
        return None
    if waited_s < spec.policy.faulty_scale_down_timeout_s and not have_left(job_store, missing):
        return None
    return first_that_fits(spec.layouts, num_survivors(job_store, world, missing))


def num_survivors(job_store: JobStore, world: WorldPlan, missing: Mapping[int, int]) -> int:
    """Ranks that a start of all processes could have: those that are left, and those that wait to come in."""
    return world.size - len(missing) + len(candidates(job_store, world))


def refusal(
    job_store: JobStore, spec: ElasticSpec, world: WorldPlan, shard_degree: int, tensor_degree: int
) -> str | None:
    """Why a running job cannot be given other degrees; None if it can.

    Args:
        job_store: of the job.
        spec: of the job.
        world: the present one.
        shard_degree: asked for; 0 for the present one.
        tensor_degree: the same.
    """
    wanted = completed(spec, shard_degree, tensor_degree)
    name = f"shard degree {wanted[0]} with tensor degree {wanted[1]}"
    if wanted == spec.degrees:
        return f"the job has {name} already"
    layout = next((each for each in spec.layouts if each.degrees == wanted), None)
    if not spec.layouts:
        return "a loop that is written by hand keeps the degrees that it began with"
    if layout is None:
        allowed = ", ".join(f"{shard} with {tensor}" for shard, tensor in (each.degrees for each in spec.layouts))
        return (
            f"{name} is not possible in this job; {allowed} are. ElasticTraining(shard_degrees=..., "
            "tensor_degrees=...) says so"
        )
    num_ranks = num_survivors(job_store, world, {})
    if not layout.replicas_in(num_ranks):
        return f"the job may have {layout}: there are {num_ranks}"
    asked = asked_degrees(job_store)
    if asked in (None, wanted):
        return None
    return f"the job is about to start again with shard degree {asked[0]} and tensor degree {asked[1]}"


def completed(spec: ElasticSpec, shard_degree: int, tensor_degree: int) -> tuple[int, int]:
    """Both degrees, of which somebody has named one or both."""
    return shard_degree or spec.degrees[0], tensor_degree or spec.degrees[1]


def ask_for_degrees(job_store: JobStore, degrees: tuple[int, int]) -> None:
    """Have all ranks write a checkpoint at the next step, and start again with these degrees."""
    job_store.set_if_absent(_ASKED, json.dumps(degrees).encode())


def asked_degrees(job_store: JobStore) -> tuple[int, int] | None:
    """Shard and tensor degree that somebody has asked for."""
    found = job_store.try_get(_ASKED)
    if found is None:
        return None
    shard, tensor = json.loads(found)
    return shard, tensor


def poll_requests(job_store: JobStore, world: WorldPlan) -> bool:
    """What `joining.heed` does; whether somebody has asked for other degrees."""
    plan_scale_down(job_store, world)
    return asked_degrees(job_store) is not None


def forget_asked(job_store: JobStore) -> None:
    """Nothing comes of what somebody has asked for."""
    job_store.delete(_ASKED)


def stand_aside(job_store: JobStore, worker_id: int, *, is_replaced: bool) -> NoReturn:
    """End a founder that is one more than make up whole replicas, or keep it idle, as soon as the others have begun.

    Args:
        job_store: of the job.
        worker_id: of this process.
        is_replaced: whether its agent starts another in its place, which waits to come in; one that restarts all
            processes of a node together must not see it end.

    Raises:
        SystemExit: always.
    """
    log.warning("worker %d is one more than make up whole replicas", worker_id)
    until_s = time.monotonic() + _FOUNDING_S
    while elastic_spec_of(job_store) is None and time.monotonic() < until_s:
        time.sleep(_POLL_S)
    if is_replaced and job_store.is_armed:
        raise SystemExit(NOT_NEEDED)
    while job_store.is_armed:
        time.sleep(_IDLE_S)
    raise SystemExit(0)
