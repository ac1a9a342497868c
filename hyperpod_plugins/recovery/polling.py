"""How often a process asks the store: seldom enough that thousands can ask at the same time. Pure."""

_POLLS_A_SECOND = 2000.0
"""Of all processes of a job together."""
_SHORTEST_S = 0.005
_LONGEST_S = 1.0
"""Where fewer processes would allow more polls, but the wait has been long."""
_PART_OF_WAIT = 0.05
_LOOK_S = 1.0
"""About the time from one look at everything to the next, by whichever process."""
_GOLDEN = 0.6180339887


def poll_interval_s(rank: int, world_size: int, waited_s: float) -> float:
    """Seconds until this process asks again for news: a small part of its wait so far, or what the store can bear.

    Ranks differ by a little, so that they do not ask all at once.
    """
    fair_s = max(_SHORTEST_S, world_size / _POLLS_A_SECOND, min(_LONGEST_S, waited_s * _PART_OF_WAIT))
    return fair_s * (0.75 + 0.5 * (rank * _GOLDEN % 1.0))


def scan_interval_s(rank: int, num_waiting: int) -> float:
    """Seconds until this process looks at everything although no count says so: a few of all that wait do, a second."""
    return _LOOK_S * (1 + rank % max(1, num_waiting))
