"""Reconfiguration: break all groups of this process, and connect new inner groups for the next generation."""

import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from hyperpod_plugins.comm.groups import connect, is_connection_error, spec_for_generation
from hyperpod_plugins.comm.options import CommOptions, GroupKey
from hyperpod_plugins.comm.process_group import ResilientProcessGroup, live_groups, shutdown_all
from hyperpod_plugins.comm.runtime import group_health, runtime
from hyperpod_plugins.comm.transport import InnerGroup, InnerSpec
from hyperpod_plugins.errors import CommError, PeerLost


def break_groups(cause: str) -> bool:
    """Break all groups of this process; their collectives under way end, here and at the peers.

    Any thread may call this.

    Returns:
        Whether this call broke them; False if they were broken already.
    """
    return group_health.mark_broken(cause, shutdown_all)


def release_broken() -> None:
    """End the inner groups of a broken generation; does nothing if the groups are intact.

    gloo takes some 10 ms for each group. `Reconfiguration` does this too, but then the other members wait for this
    one, so call this earlier, while this one waits for them.
    """
    if group_health.is_unavailable:
        runtime.discard_pending()
        for group in live_groups().values():
            inner = group.take_inner()
            if inner is not None:
                inner.discard()


class Reconfiguration:
    """Connects new inner groups under all live groups, for one generation. All members do this at the same time.

    [Note: abandoning] While it connects, gloo can wait for its whole timeout for a peer that was lost at that moment,
    and nothing wakes it. So it connects in a separate thread. If the generation ends meanwhile, that thread is
    abandoned together with the store connection that it uses: the next generation must open another one.

    Args:
        generation: number of the generation; no earlier generation may have had it.
        store: store through which the members find each other; the same for all of them.
        timeout_s: longest wait for another member, in seconds. Collectives keep the timeout of their group.
        members: global ranks of each group, by the name of its key; groups that are not listed keep theirs.
        only_listed_groups: leave groups that are not listed without connections, because the remaining ranks only
            save before the job ends.
    """

    def __init__(
        self,
        generation: int,
        *,
        store: Store,
        timeout_s: float,
        members: Mapping[str, Sequence[int]] | None = None,
        only_listed_groups: bool = False,
    ) -> None:
        self._generation, self._store, self._timeout = generation, store, timedelta(seconds=timeout_s)
        self._members, self._only_listed_groups = dict(members or {}), only_listed_groups
        self._outcome: list[InnerGroup] | Exception | None = None
        self._lock, self._is_decided = threading.Lock(), threading.Event()
        self.is_cancelled = False
        """Whether `cancel` has ended `run`; its thread may still be connecting then."""

    def run(self) -> None:
        """Connect all groups and reset the group health.

        Raises:
            PeerLost: a member did not join, or the attempt was cancelled. The groups are broken then; try again with
                a higher generation.
            CommError: the generation is not higher than that of the groups.
            DeviceHung: see `CommRuntime.finish_aborts`.
        """
        runtime.finish_aborts()
        groups = [
            group for name, group in live_groups().items() if not self._only_listed_groups or name in self._members
        ]
        specs = [self._inner_spec(group) for group in groups]
        runtime.discard_pending()
        wanted = [
            (spec, group.options, spec.size if group.key.axis == "world" else dist.get_world_size(), group.key)
            for group, spec in zip(groups, specs, strict=True)
        ]
        gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # the current device is per thread
        threading.Thread(target=self._connect, args=(wanted, gpu), name="hyperpod_connect", daemon=True).start()
        if not self._is_decided.wait((len(groups) + 1) * self._timeout.total_seconds()):
            self.cancel("connecting took longer than the timeout")
        outcome, self._outcome = self._outcome, None
        if isinstance(outcome, PeerLost):
            group_health.reset()
            break_groups(str(outcome))
            raise PeerLost(f"{outcome}. Another rank was lost meanwhile.")
        if isinstance(outcome, Exception):
            raise outcome
        for group, spec, inner in zip(groups, specs, outcome or [], strict=True):
            inner.group.set_timeout(group.timeout)
            former = group.replace_inner(inner, generation=self._generation, global_ranks=spec.global_ranks)
            if former is not None:
                former.discard()
        group_health.reset()

    def cancel(self, cause: str) -> None:
        """Make `run` raise `PeerLost`, from any thread; does nothing if its outcome is decided already."""
        cause = f"generation {self._generation} ended while it was formed: {cause}"
        self._decide(PeerLost(cause), is_abandoned=True)

    def _inner_spec(self, group: ResilientProcessGroup) -> InnerSpec:
        """Return how this process connects to the other members of a group."""
        group.check_generation_increases(self._generation)  # before any other member could find this process there
        group.root_store = self._store
        ranks = list(self._members.get(group.key.name, dist.get_process_group_ranks(group)))
        return spec_for_generation(
            group,
            generation=self._generation,
            rank=ranks.index(dist.get_rank()),
            global_ranks=ranks,
            timeout=self._timeout,
        )

    def _connect(self, wanted: Sequence[tuple[InnerSpec, CommOptions, int, GroupKey]], gpu: int | None) -> None:
        connected: list[InnerGroup] = []
        try:
            if gpu is not None:
                torch.cuda.set_device(gpu)
            for spec, options, world_size, key in wanted:
                inner = connect(spec, options, world_size, key)
                if self._is_decided.is_set():
                    inner.discard()  # no shutdown: the sockets recorded here may be the next generation's
                    return
                connected.append(inner)
            if self._decide(connected):
                connected = []
        except RuntimeError as error:
            cause = f"the groups could not be formed in generation {self._generation}: {error}".partition("\n")[0]
            self._decide(PeerLost(cause) if is_connection_error(error) else error)
        finally:
            while connected:
                inner = connected.pop()
                inner.sockets.shutdown()  # so that members that are connected already notice
                inner.discard()
            self._decide(CommError("the groups could not be connected; see the traceback of the thread that tried"))

    def _decide(self, outcome: list[InnerGroup] | Exception, *, is_abandoned: bool = False) -> bool:
        """Record an outcome unless there is one already; return whether this one was recorded."""
        with self._lock:
            if self._is_decided.is_set():
                return False
            self._outcome, self.is_cancelled = outcome, is_abandoned
            self._is_decided.set()
            return True
