"""What it costs a running job to get another shard degree: asked from outside, all processes start again, resharded."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperpod_plugins.elastic.rendezvous.control import Request, Ticket, send

SHARD_DEGREE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Reshard:
    """One change of the shard degree; seconds."""

    pause_s: float
    """From the last step with the old degree to the first with the new one, less a usual step."""
    until_s: float
    """From the request until that step."""
    steps_again: int
    """Committed steps that were computed again."""


def ask(folder: str) -> None:
    """Do what `hyperpod scale --shard-degree 2` does, without the start of another process in the figure."""
    (path,) = Path(folder, "hyperpod").glob("*.ticket")
    ticket = Ticket.from_json(path.read_text())
    send(ticket.job_store(), ticket.token, Request(kind="scale", shard_degree=SHARD_DEGREE))


def has_resharded(commits: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a step has been made with the degree that was asked for."""
    return any(each["shards"] == SHARD_DEGREE for each in commits)


def reshard_of(commits: Sequence[Mapping[str, Any]], asked_s: float, step_s: float) -> Reshard:
    """Read it out of the commits of the first rank.

    Args:
        commits: of the whole job, by time.
        asked_s: when it was asked for.
        step_s: a usual step.
    """
    before = list(itertools.takewhile(lambda each: each["shards"] != SHARD_DEGREE, commits))
    first, done = commits[len(before)], max(each["step"] for each in before)
    return Reshard(
        pause_s=first["at_s"] - before[-1]["at_s"] - step_s,
        until_s=first["at_s"] - asked_s,
        steps_again=sum(each["step"] <= done for each in commits[len(before) :]),
    )
