"""Processes that the kernel has killed for lack of memory are told from other ones by its counts."""

import pytest

from hyperpod_plugins.elastic import process
from hyperpod_plugins.elastic.process import OutOfMemoryKills


def test_a_count_that_has_just_risen_names_those_that_end_then(tmp_path, monkeypatch):
    now_s = [100.0]
    monkeypatch.setattr(process.time, "monotonic", lambda: now_s[0])
    events = tmp_path / "memory.events"
    events.write_text("low 0\noom 0\noom_kill 2\n")
    kills = OutOfMemoryKills([(tmp_path / "missing", "oom_kill"), (events, "oom_kill")])
    assert not kills.is_victim(10)
    events.write_text("low 0\noom 1\noom_kill 4\n")
    now_s[0] += 0.5
    assert kills.is_victim(11)
    assert kills.is_victim(12), "two of them at once"
    for _ in range(10):
        now_s[0] += 0.5
        kills.look()
    assert not kills.is_victim(13), "that was long ago"
    assert kills.is_victim(11), "the answer stays"
    assert not kills.is_victim(10)


@pytest.mark.parametrize("text", ["", "oom_kill many\n", "oom_kill\n", "\0\n"])
def test_counts_that_cannot_be_read_name_nobody(tmp_path, text):
    (tmp_path / "events").write_text(text)
    kills = OutOfMemoryKills([(tmp_path / "events", "oom_kill"), (tmp_path / "none", "oom_kill")])
    assert not kills.is_victim(1)


def test_the_counts_of_this_machine_are_read():
    assert not OutOfMemoryKills().is_victim(-1)
