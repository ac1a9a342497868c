"""Changes of the shard or tensor degree, which restart all workers: when, to which degrees, and requests for them."""

import json
import logging
import time
from collections.abc import Mapping
from typing import NoReturn

from hyperpod_plugins.elastic.membership.admission import (
    Admission,
    all_preempted,
    candidates,
    num_complete_replicas,
)
from hyperpod_plugins.elastic.membership.elastic_spec import (
    ElasticSpec,
    ReplicaLayout,
    elastic_spec_of,
    first_that_fits,
)
from hyperpod_plugins.elastic.membership.restart_policy import NOT_NEEDED
from hyperpod_plugins.elastic.store.job_store import JobStore
from hyperpod_plugins.elastic.store.world import WorldPlan

log = logging.getLogger(__name__)
_DEGREES_KEY = "degrees"  # value: requested shard and tensor degree; the first request of a round counts
_POLL_S = 0.05
_IDLE_S = 1.0
_INITIAL_WORLD_WAIT_S = 1800.0
"""Longest wait of a surplus process for the initial world to begin, in seconds."""


def restart_layout(
    job_store: JobStore, spec: ElasticSpec, world: WorldPlan, missing: Mapping[int, int], waited_s: float
) -> ReplicaLayout | None:
    """Choose the layout with which all workers restart if the survivors cannot form a world with the present degrees.

    The arguments are those of `Admission.world_without`. Returns None if they can, to wait and call again, or if no
    layout fits.
    """
    healthy = set(world.worker_ids).difference(missing)
    if num_complete_replicas(world, healthy, spec.replica_size) >= min(spec.sizes):
        return None
    if waited_s < spec.policy.faulty_scale_down_timeout_s and not all_preempted(job_store, missing):
        return None
    return first_that_fits(spec.layouts, num_survivors(job_store, world, missing))


def num_survivors(job_store: JobStore, world: WorldPlan, missing: Mapping[int, int]) -> int:
    """Number of ranks available to a restart of all workers: survivors and candidates."""
    return world.size - len(missing) + len(candidates(job_store, world))


def why_not_reshard(
    job_store: JobStore, spec: ElasticSpec, world: WorldPlan, shard_degree: int, tensor_degree: int
) -> str | None:
    """Return why a running job cannot change to the requested degrees; None if it can.

    Args:
        job_store: of the job.
        spec: of the job.
        world: the present one.
        shard_degree: requested shard degree; 0 for the present one.
        tensor_degree: requested tensor degree; 0 for the present one.
    """
    wanted = fill_degrees(spec, shard_degree, tensor_degree)
    name = f"shard degree {wanted[0]} with tensor degree {wanted[1]}"
    if wanted == spec.degrees:
        return f"the job has {name} already"
    layout = next((each for each in spec.layouts if each.degrees == wanted), None)
    if not spec.layouts:
        return (
            "the job keeps the degrees that it began with; shard_degrees and tensor_degrees of its Session allow others"
        )
    if layout is None:
        allowed = ", ".join(f"{shard} with {tensor}" for shard, tensor in (each.degrees for each in spec.layouts))
        return (
            f"{name} is not possible in this job; allowed shard degrees (each with a tensor degree): {allowed}. "
            "shard_degrees and tensor_degrees of ElasticTraining or Session set them"
        )
    num_ranks = num_survivors(job_store, world, {})
    if not layout.replicas_in(num_ranks):
        return f"the job may have {layout}: there are {num_ranks}"
    asked = requested_degrees(job_store)
    if asked in (None, wanted):
        return None
    return f"the job is about to start again with shard degree {asked[0]} and tensor degree {asked[1]}"


def fill_degrees(spec: ElasticSpec, shard_degree: int, tensor_degree: int) -> tuple[int, int]:
    """Return both degrees, with the present one in place of a 0."""
    return shard_degree or spec.degrees[0], tensor_degree or spec.degrees[1]


def request_degrees(job_store: JobStore, degrees: tuple[int, int]) -> None:
    """Request that all ranks write a checkpoint at the next step and restart with these degrees."""
    job_store.set_if_absent(_DEGREES_KEY, json.dumps(degrees).encode())


def requested_degrees(job_store: JobStore) -> tuple[int, int] | None:
    """The requested shard and tensor degree; None without a request."""
    found = job_store.try_get(_DEGREES_KEY)
    if found is None:
        return None
    shard, tensor = json.loads(found)
    return shard, tensor


def poll_requests(job_store: JobStore, world: WorldPlan) -> bool:
    """Call `Admission.scale_down` if the job is elastic, then return whether other degrees were requested."""
    spec = elastic_spec_of(job_store)
    if spec is not None:
        Admission(job_store, spec).scale_down(world)
    return requested_degrees(job_store) is not None


def drop_request(job_store: JobStore) -> None:
    """Drop the request for other degrees."""
    job_store.delete(_DEGREES_KEY)


def exit_surplus(job_store: JobStore, worker_id: int, *, is_replaced: bool) -> NoReturn:
    """End an initial process that is left over after whole replicas are formed, or keep it idle until the job ends.

    Waits first for the initial world to publish the elastic spec.

    Args:
        job_store: of the job.
        worker_id: of this process.
        is_replaced: whether its agent starts another process in its worker slot, which waits as a candidate. An agent
            that restarts all processes of a node together must not see this one exit.

    Raises:
        SystemExit: always.
    """
    log.warning("worker %d is surplus: it completes no replica", worker_id)
    until_s = time.monotonic() + _INITIAL_WORLD_WAIT_S
    while elastic_spec_of(job_store) is None and time.monotonic() < until_s:
        time.sleep(_POLL_S)
    if is_replaced and job_store.is_armed:
        raise SystemExit(NOT_NEEDED)
    while job_store.is_armed:
        time.sleep(_IDLE_S)
    raise SystemExit(0)
