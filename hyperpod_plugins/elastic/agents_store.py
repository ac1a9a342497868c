"""The store that torch's agent gets from the rendezvous `hyperpod`: answers at once what follows from slots."""

import json
from collections.abc import Callable

from torch._C._distributed_c10d import PrefixStore, Store

_ROLE = "torchelastic/role_info/"
_RANKS = "torchelastic/assigned_ranks/"
_DONE = "torchelastic/agent/terminal_state"


class AgentsStore(PrefixStore):
    """Keys that the agents of a round share, and an ear for two things that torch's agent says nowhere else.

    torch's agents tell the first of them how many workers each has, and wait until it has told them their ranks. Ranks
    follow from slots here, so nobody waits for a node that has been lost meanwhile.
    """

    def __init__(
        self,
        store: Store,
        number: int,
        num_slots: int,
        *,
        on_size: Callable[[int], None],
        on_done: Callable[[], None],
    ) -> None:
        """Use `store`, a connection that nobody else waits on.

        Args:
            store: of the endpoint.
            number: of the round.
            num_slots: nodes of the round.
            on_size: called with the number of this node's workers, before they are started.
            on_done: called when they have come to a good end.
        """
        super().__init__(f"hyperpod/agents/{number}", store)
        self._num_slots = num_slots
        self._on_size = on_size
        self._on_done = on_done
        self._role: str | bytes = ""

    def set(self, key: str, value: str | bytes) -> None:
        """Leave a value for other agents."""
        if key.startswith(_ROLE):
            self._role = value
            self._on_size(self._num_workers)
        super().set(key, value)  # pyright: ignore[reportArgumentType]: bytes are taken, too

    def get(self, key: str) -> bytes:
        """Read a value of another agent, or the ranks of this node's workers."""
        if not key.startswith(_RANKS):
            return super().get(key)
        first = int(key.removeprefix(_RANKS)) * self._num_workers
        world_size = self._num_slots * self._num_workers
        return json.dumps([first, world_size, first, world_size]).encode()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Read several; what the first agent asks of all is the same for all."""
        if not all(key.startswith(_ROLE) for key in keys):
            return super().multi_get(keys)
        return [json.dumps(json.loads(self._role)).encode()] * len(keys)

    def add(self, key: str, value: int) -> int:
        """Count; torch's agents count those that are done."""
        if key.startswith(_DONE):
            self._on_done()
        return super().add(key, value)

    @property
    def _num_workers(self) -> int:
        return json.loads(self._role)["local_world_size"]
