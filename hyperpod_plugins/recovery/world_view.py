"""The present and later worlds of a job, as one process reads them from the job store."""

import time
from collections.abc import Callable, Mapping

from hyperpod_plugins.elastic import FailureRecord, JobStore
from hyperpod_plugins.elastic.membership.admission import Admission
from hyperpod_plugins.elastic.membership.elastic_spec import ElasticSpec, elastic_spec_of, what_would_fit
from hyperpod_plugins.elastic.membership.reshard import num_survivors, restart_layout
from hyperpod_plugins.elastic.store.world import WorldPlan
from hyperpod_plugins.errors import RecoveryError, StateLost
from hyperpod_plugins.recovery.watchdog import Heartbeat, HeartbeatAges


class WorldView:
    """The present world of this process, and the worlds that follow it."""

    def __init__(self, job_store: JobStore, current: WorldPlan, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with the world `current`; `job_store` is the calling thread's connection, `clock` returns seconds."""
        self._job_store = job_store
        self._clock = clock
        self._ages = HeartbeatAges()
        self.current = current
        """The world for which this process has been set up."""
        self._spec: ElasticSpec | None = None

    @property
    def may_change(self) -> bool:
        """Whether the job is elastic."""
        self._spec = self._spec or elastic_spec_of(self._job_store)
        return self._spec is not None

    def at(self, generation: int) -> WorldPlan:
        """The world that a generation is formed for.

        Raises:
            RecoveryError: The job store does not hold it.
        """
        number = self._job_store.world_number(generation)
        if number <= self.current.number:
            return self.current
        world = self._job_store.world(number)
        if world is None:
            raise RecoveryError(
                f"the job store has no world {number}, for which generation {generation} is to be formed"
            )
        return world

    def shrink_without(self, generation: int, missing: Mapping[int, int], waited_s: float, reporter: str) -> bool:
        """End a generation that is being formed, if the job can continue in a world without the missing workers.

        If the survivors cannot make up a world, all processes must restart, with degrees that fit.

        Args:
            generation: Number of the generation.
            missing: Worker ids of its world that have not arrived, and the incarnation expected of each.
            waited_s: How long this process has waited for them, in seconds.
            reporter: Reporter named in the `FailureRecord`.

        Returns:
            Whether the generation was ended.

        Raises:
            StateLost: All processes must restart.
        """
        if not missing or not self.may_change:
            return False
        assert self._spec is not None
        present, gone = self.at(generation), self._silent_workers(missing)
        try:
            world = Admission(self._job_store, self._spec).world_without(present, missing, waited_s)
        except StateLost:  # only replacements can continue, from a snapshot
            world = None
        if world is None:
            layout = restart_layout(self._job_store, self._spec, present, gone, waited_s) if gone else None
            if layout is None:
                return False
            raise StateLost(
                f"{len(gone)} of {present.size} ranks are lost and were not replaced within {waited_s:.0f} s, and "
                f"those that are left make up fewer replicas of shard degree {self._spec.degrees[0]} x tensor degree "
                f"{self._spec.degrees[1]} than the job needs; what is there may have {layout}"
            )
        failure = FailureRecord(kind="resize", cause=world.cause, reporter=reporter, world=world.number)
        self._job_store.end(generation, failure)
        return True

    def _silent_workers(self, missing: Mapping[int, int]) -> dict[int, int]:
        """Missing workers whose expected process sends no heartbeats; a process that does is still setting up."""
        heartbeats = {
            worker_id: Heartbeat.from_dict(each)
            for worker_id, each in self._job_store.heartbeats(list(missing)).items()
        }
        silent_s = self._ages.update(heartbeats, self._clock())
        return {
            worker_id: number
            for worker_id, number in missing.items()
            if worker_id not in heartbeats or not heartbeats[worker_id].is_alive(number, silent_s[worker_id])
        }

    def what_would_fit(self, generation: int, missing: Mapping[int, int]) -> str:
        """For a job that must end: a sentence on what the survivors could continue with; empty if not elastic."""
        if not self.may_change:
            return ""
        assert self._spec is not None
        left = num_survivors(self._job_store, self.at(generation), missing)
        return (
            f" {what_would_fit(self._spec.layouts, left)}. Allow smaller degrees with shard_degrees of "
            "ElasticTraining or Session to have all processes start again with those that are left."
        )
