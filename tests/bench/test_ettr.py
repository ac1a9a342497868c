"""What a kill costs, told from when steps were committed."""

import pytest

from benchmarks.ettr import Run, steps_by_all


def committed(step, rank, at_s):
    return {"event": "committed", "step": step, "rank": rank, "at_s": at_s}


def test_a_step_counts_when_all_ranks_have_committed_it_for_the_first_time():
    events = [
        committed(0, 0, 1.0),
        committed(0, 1, 1.1),
        committed(1, 1, 2.0),
        committed(1, 0, 2.2),
        committed(1, 0, 9.0),  # told again by a process that came later
        committed(2, 0, 3.0),  # rank 1 was killed before it could tell
        {"event": "repaired", "rank": 0, "at_s": 3.5},
    ]
    assert steps_by_all(events) == [1.1, 2.2]


def test_what_kills_cost():
    """Steps of 100 ms; the first kill costs 0.5 s at once, the second 0.2 s and then a slow step of 0.2 s."""
    spans_s = [0.1] * 10 + [0.6] + [0.1] * 10 + [0.3, 0.2] + [0.1] * 10
    at_s = [100.0]
    for span_s in spans_s:
        at_s.append(at_s[-1] + span_s)
    run = Run(at_s=at_s, kills_s=[101.05, 102.62, 999.0], fingerprints=set())  # the last one came too late to count
    assert run.step_s == pytest.approx(0.1)
    assert run.lost_s == pytest.approx([0.5, 0.3])
    assert run.ettr == pytest.approx(1 - 0.8 / sum(spans_s))
