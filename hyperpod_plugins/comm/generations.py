"""From one generation of the job to the next: new connections under all groups of this process."""

import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from hyperpod_plugins.comm import wires
from hyperpod_plugins.comm.breaker import breaker
from hyperpod_plugins.comm.groups import connect, inner_spec
from hyperpod_plugins.comm.resilient import ResilientProcessGroup, cut_all, live_groups
from hyperpod_plugins.comm.works import drop_pending, is_transport_error, let_go
from hyperpod_plugins.errors import CommError, PeerLost


def break_groups(cause: str) -> bool:
    """Break all groups of this process, from any thread: collectives under way end, here and at their peers.

    Returns:
        Whether they were whole until now.
    """
    return breaker.trip(cause, cut_all)


def abandon_broken() -> None:
    """End the inner groups of the generation that is over.

    gloo takes some 10 ms for each. `reform` does it too, but then the other members wait for this one: better is while
    this one waits for them.
    """
    if breaker.is_open:
        drop_pending()
        for group in live_groups().values():
            _end(group.part_with_inner())


class Reform:
    """New inner groups under all living groups, for one generation of the job.

    [Note: abandoning] While gloo connects it can wait in vain, until its timeout, for a peer that was lost in the same
    moment, and nothing wakes it. So it connects in a thread of its own. If the generation ends meanwhile, that thread
    is left to itself, and so is the store that it asks: the next generation needs another connection to it.
    """

    def __init__(
        self,
        generation: int,
        *,
        store: Store,
        timeout_s: float,
        members: Mapping[str, Sequence[int]] | None = None,
        is_last: bool = False,
    ) -> None:
        """See `reform` for the arguments."""
        self._generation, self._store, self._timeout = generation, store, timedelta(seconds=timeout_s)
        self._members, self._is_last = dict(members or {}), is_last
        self._outcome: list[dist.ProcessGroup] | Exception | None = None
        self._deciding, self._is_decided = threading.Lock(), threading.Event()
        self.is_abandoned = False
        """Whether a thread may still be connecting."""

    def run(self) -> None:
        """Connect all groups and mend the breaker.

        Raises:
            PeerLost: a member did not come, or the attempt was abandoned. The groups are broken then.
        """
        groups = {name: group for name, group in live_groups().items() if not self._is_last or name in self._members}
        ranks = {name: list(self._members.get(name, dist.get_process_group_ranks(groups[name]))) for name in groups}
        for group in groups.values():
            group.refuse_former(self._generation)  # before anybody else could meet this process there
            group.root_store = self._store
        drop_pending()
        gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # each thread has its own
        arguments = (list(groups.values()), list(ranks.values()), dist.get_rank(), dist.get_world_size(), gpu)
        threading.Thread(target=self._connect, args=arguments, name="hyperpod_connect", daemon=True).start()
        if not self._is_decided.wait((len(groups) + 1) * self._timeout.total_seconds()):
            self.abandon("connections took longer than their timeout")
        outcome, self._outcome = self._outcome, None
        if isinstance(outcome, PeerLost):
            breaker.close()
            break_groups(str(outcome))
            raise PeerLost(f"{outcome}. Another rank was lost meanwhile.")
        if isinstance(outcome, Exception):
            raise outcome
        for name, inner in zip(groups, outcome or [], strict=True):
            inner.set_timeout(groups[name].timeout)
            _end(groups[name].replace_inner(inner, generation=self._generation, global_ranks=ranks[name]))
        breaker.close()

    def abandon(self, cause: str) -> None:
        """End `run` with an error, from another thread; nothing happens where it has ended by itself."""
        cause = f"generation {self._generation} ended while it was formed: {cause}"
        self._decide(PeerLost(cause), is_abandoned=True)

    def _connect(
        self,
        groups: Sequence[ResilientProcessGroup],
        ranks: Sequence[Sequence[int]],
        rank: int,
        world_size: int,
        gpu: int | None,
    ) -> None:
        connected: list[dist.ProcessGroup] = []
        try:
            if gpu is not None:
                torch.cuda.set_device(gpu)
            for group, members in zip(groups, ranks, strict=True):
                inner = self._connect_one(group, members, rank, world_size)
                if self._is_decided.is_set():
                    _end(inner)  # without a cut: the next generation's sockets may be taken for its own
                    return
                connected.append(inner)
            if self._decide(connected):
                connected = []
        except RuntimeError as error:
            cause = f"the groups could not be formed in generation {self._generation}: {error}".partition("\n")[0]
            self._decide(PeerLost(cause) if is_transport_error(error) else error)
        finally:
            while connected:
                inner = connected.pop()
                wires.cut(inner)  # members that have made their connections notice
                _end(inner)
            self._decide(CommError("the groups could not be connected; see the traceback of the thread that tried"))

    def _connect_one(
        self, group: ResilientProcessGroup, members: Sequence[int], rank: int, world_size: int
    ) -> dist.ProcessGroup:
        spec = inner_spec(
            group,
            generation=self._generation,
            rank=members.index(rank),
            global_ranks=members,
            timeout=self._timeout,
        )
        return connect(spec, group.options, len(members) if group.role.axis == "world" else world_size)

    def _decide(self, outcome: list[dist.ProcessGroup] | Exception, *, is_abandoned: bool = False) -> bool:
        """Whether this outcome is the first, and counts."""
        with self._deciding:
            if self._is_decided.is_set():
                return False
            self._outcome, self.is_abandoned = outcome, is_abandoned
            self._is_decided.set()
            return True


def reform(
    generation: int,
    *,
    store: Store,
    timeout_s: float,
    members: Mapping[str, Sequence[int]] | None = None,
    is_last: bool = False,
) -> None:
    """Build new inner groups under all living groups, and mend the breaker. All members call it at the same time.

    Args:
        generation: its number, which no generation had before.
        store: where the members meet; all name the same.
        timeout_s: longest wait for another member. Collectives keep the timeout of their group.
        members: global ranks of each group, by the name of its role; groups that are not named keep theirs.
        is_last: leave groups that are not named as they are, without connections: what is left of the job only wants
            to save before it ends.

    Raises:
        PeerLost: a member did not come. The groups are broken then; try again with a higher number.
    """
    Reform(generation, store=store, timeout_s=timeout_s, members=members, is_last=is_last).run()


def _end(former: dist.ProcessGroup | None) -> None:
    if former is not None:
        wires.release(former)
        let_go(former)
