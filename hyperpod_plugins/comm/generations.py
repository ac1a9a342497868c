"""From one generation of the job to the next: new connections under all groups of this process."""

from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from hyperpod_plugins.comm import wires
from hyperpod_plugins.comm.breaker import breaker
from hyperpod_plugins.comm.groups import connect, inner_spec
from hyperpod_plugins.comm.resilient import ResilientProcessGroup, cut_all, live_groups
from hyperpod_plugins.comm.works import drop_pending, is_transport_error, let_go
from hyperpod_plugins.errors import PeerLost


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
    rank = dist.get_rank()
    for name, group in live_groups().items():
        if is_last and name not in (members or {}):
            continue
        ranks = list((members or {}).get(name, dist.get_process_group_ranks(group)))
        try:
            _reconnect(group, generation, ranks.index(rank), ranks, store, timeout_s)
        except RuntimeError as error:
            if not is_transport_error(error):
                raise
            cause = f"the group {name!r} could not be formed in generation {generation}: {error}".splitlines()[0]
            breaker.close()
            break_groups(cause)
            raise PeerLost(f"{cause}. Another rank was lost meanwhile.") from error
    breaker.close()


def _reconnect(
    group: ResilientProcessGroup, generation: int, rank: int, ranks: list[int], store: Store, timeout_s: float
) -> None:
    group.refuse_former(generation)  # before anybody else could meet this process there
    drop_pending()
    group.root_store = store
    spec = inner_spec(group, generation=generation, rank=rank, global_ranks=ranks, timeout=timedelta(seconds=timeout_s))
    inner = connect(spec, group.options, len(ranks) if group.role.axis == "world" else dist.get_world_size())
    inner.set_timeout(group.timeout)
    _end(group.replace_inner(inner, generation=generation, global_ranks=ranks))


def _end(former: dist.ProcessGroup | None) -> None:
    if former is not None:
        wires.release(former)
        let_go(former)
