"""A `JobView` as plain lines, and as a table of rich for a terminal."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from hyperpod_plugins.report.live import JobView, RankView
from hyperpod_plugins.report.text import counted, duration

if TYPE_CHECKING:
    from rich.console import RenderableType

_STATE_STYLES = {"running": "green", "late": "yellow", "joining": "cyan", "gone": "bold red"}
_JOB_STYLES = {"running": "green", "starting": "cyan", "ended": "bold", "unreachable": "bold red"}
_SHOWN_WAIT_S = 0.5
_COLUMNS = ("rank", "state", "step", "heartbeat", "what it does", "process")


def plain_lines(view: JobView) -> list[str]:
    """The view as lines of text."""
    lines = [title(view)]
    if view.message:
        lines.append(view.message)
    lines += [f"{name}: {value}" for name, value in figures(view)]
    lines += [rank_line(each) for each in view.ranks]
    lines += [f"incident {each}" for each in view.incidents]
    return lines


def title(view: JobView) -> str:
    """One line: the job, its state and its size."""
    parts = [f"job {view.run_id}: {view.state}"]
    if view.num_ranks:
        parts.append(counted(view.num_ranks, "rank"))
    if view.num_replicas:
        degrees = f"shard degree {view.shard_degree}, tensor degree {view.tensor_degree}"
        parts[-1] += f" in {counted(view.num_replicas, 'replica')} ({degrees})"
    parts.append(f"generation {view.generation}")
    if view.round:
        parts.append(counted(view.round, "restart"))
    if view.num_waiting:
        parts.append(f"{counted(view.num_waiting, 'process', 'processes')} waiting to join")
    if view.num_requested:
        parts.append(f"{counted(view.num_requested, 'replica')} requested")
    return ", ".join(parts)


def figures(view: JobView) -> list[tuple[str, str]]:
    """The figures that are known, with their names."""
    found: list[tuple[str, str]] = []
    if view.step is not None:
        rate = "" if view.steps_per_s is None else f", {rate_text(view.steps_per_s)}"
        found.append(("step", f"{view.step}{rate}"))
    for name, value in (("goodput", view.goodput), ("ETTR", view.ettr)):
        if value is not None:
            found.append((name, f"{value:.1%}"))
    for name, value in (("last snapshot", view.snapshot_age_s), ("last checkpoint", view.checkpoint_age_s)):
        if value is not None:
            found.append((name, f"{age(value)} ago"))
    if view.part_read < 0.995:
        found.append(("ledgers", f"{view.part_read:.0%} read so far"))
    return found


def age(seconds: float) -> str:
    """An age, in tenths of a second or longer units."""
    return f"{seconds:.1f} s" if seconds < 99.95 else duration(seconds)


def rate_text(steps_per_s: float) -> str:
    """A rate, or a time if a step takes longer than a second."""
    if 0 < steps_per_s < 1:
        return f"{duration(1 / steps_per_s)} a step"
    return f"{steps_per_s:.3g} steps/s" if steps_per_s < 100 else f"{steps_per_s:.0f} steps/s"


def rank_line(rank: RankView) -> str:
    """A rank in one line."""
    parts = [f"rank {rank.rank}: {rank.state}"]
    if rank.step is not None:
        parts.append(f"step {rank.step}")
    if what := activity(rank):
        parts.append(what)
    if rank.heartbeat_age_s is not None and rank.state != "running":
        parts.append(f"last heartbeat {age(rank.heartbeat_age_s)} ago")
    if rank.host:
        parts.append(place(rank))
    return ", ".join(parts)


def activity(rank: RankView) -> str:
    """What a rank does, and where it waits, if it has waited for half a second: all wait briefly in each step."""
    if not rank.waits_for or rank.waited_s < _SHOWN_WAIT_S:
        return rank.activity
    number = f" {rank.collective}" if rank.collective else ""
    wait = f"waits for {age(rank.waited_s)} in collective{number} of the {rank.waits_for} group"
    return f"{wait}; {rank.activity}" if rank.activity else wait


def place(rank: RankView) -> str:
    """Where the process of a rank runs, as far as the ledgers say."""
    which = f"process {rank.incarnation + 1}" if rank.incarnation else ""  # of this worker
    if not rank.host:
        return which
    return f"{rank.host}, pid {rank.pid}{which and f' ({which})'}"


def shown_ranks(ranks: Sequence[RankView], at_most: int) -> Sequence[RankView]:
    """The ranks for which there is room: those that do not run, then those that are furthest behind, in order."""
    if len(ranks) <= at_most:
        return ranks
    worst_first = sorted(ranks, key=lambda each: (each.state == "running", each.step or 0, each.rank))
    return sorted(worst_first[: max(0, at_most)], key=lambda each: each.rank)


def screen(view: JobView, prompt: str, width: int, height: int) -> "RenderableType":
    """The view for a terminal of that size. All texts are plain `Text`, never markup."""
    from rich.console import Group  # the extra `cli`
    from rich.text import Text

    style = _JOB_STYLES[view.state]
    above = [Text(title(view), style=style)]
    if view.message:
        above.append(Text(view.message, style=style))
    parts = [Text.assemble((f"{name} ", "dim"), (value, "bold")) for name, value in figures(view)]
    if parts:
        above.append(Text("   ").join(parts))
    below = [Text(each) for each in view.incidents]
    below = [Text(""), Text("last incidents", style="dim"), *below] if below else []
    num_lines = sum(1 + each.cell_len // max(1, width - 10) for each in [*above, *below])  # broken between words
    ranks = _ranks(view, height - num_lines - 7)
    keys = Text(prompt, style="reverse" if "?" in prompt else "dim")
    return Group(*above, Text(""), *ranks, *below, Text(""), keys)


def _ranks(view: JobView, at_most: int) -> "Iterator[RenderableType]":
    from rich import box
    from rich.table import Table
    from rich.text import Text

    ranks = shown_ranks(view.ranks, max(1, at_most))
    if not ranks:
        return
    with_place = any(place(each) for each in ranks)
    table = Table(box=box.SIMPLE_HEAD, expand=True, padding=(0, 1), pad_edge=False, show_edge=False)
    for name in _COLUMNS[: None if with_place else -1]:
        is_text = name in _COLUMNS[4:]
        table.add_column(
            name,
            justify="right" if name in ("rank", "step", "heartbeat") else "left",
            no_wrap=True,
            overflow="ellipsis",
            ratio=None if not is_text else 3 if name == "what it does" else 2,
            header_style="dim",
        )
    for each in ranks:
        silent = "" if each.heartbeat_age_s is None else age(each.heartbeat_age_s)
        cells = [
            Text(str(each.rank)),
            Text(each.state, style=_STATE_STYLES[each.state]),
            Text("" if each.step is None else str(each.step)),
            Text(silent, style=_STATE_STYLES[each.state] if each.state != "running" else ""),
            Text(activity(each)),
            Text(place(each), style="dim"),
        ]
        table.add_row(*cells[: None if with_place else -1])
    yield table
    if len(ranks) < view.num_ranks:
        yield Text(f"and {counted(view.num_ranks - len(ranks), 'more rank')}, further ahead", style="dim")
