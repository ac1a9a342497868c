"""The harness with real ranks: a comparison of two, one that hangs, one that raises, one whose benchmark is killed.

Each runs as a script in a session of its own, as people run benchmarks, so that a process left behind can be found.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.spawns

SCRIPT = """
import sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from benchmarks import harness, ranks, report


def train(turns, trouble):
    dist.init_process_group("gloo")
    total = torch.zeros(1)
    for step in turns:
        if trouble == "raise" and step == 2 and dist.get_rank() == 1:
            raise ArithmeticError("scripted trouble")
        if trouble == "hang" and step == 2 and dist.get_rank() == 1:
            time.sleep(600)
        total += dist.get_rank()
        dist.all_reduce(total)
    return total.item()


if __name__ == "__main__":
    contenders = [
        ranks.Contender(name=name, train=train, world_size=2, kwargs={"trouble": trouble})
        for name, trouble in (("calm", ""), ("other", sys.argv[2]))
    ]
    timeouts = {"setup_timeout_s": 60, "turn_timeout_s": float(sys.argv[3])}
    schedule = harness.Schedule(rounds=2, starts=2, steps=2, lead_in=0, warmup=0, **timeouts)
    print("started", flush=True)
    comparison = harness.compare("smoke", contenders, schedule)
    report.print_comparison(comparison)
    report.write_results("smoke", [comparison], Path(sys.argv[1]))
"""


@pytest.fixture
def start(tmp_path):
    """Start the script in its own session; at the end of the test nothing of that session may be alive."""
    script = tmp_path / "smoke.py"
    script.write_text(SCRIPT)
    started = []

    def start_script(trouble, turn_timeout_s):
        command = [sys.executable, str(script), str(tmp_path / "out.json"), trouble, str(turn_timeout_s)]
        environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, env=environ
        )
        started.append(process)
        return process

    yield start_script
    for process in started:
        for pid in session_members(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=10)


def session_members(session):
    """Live processes of a session, zombies not counted."""
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                members.append(int(entry.name))
    return members


def assert_all_end(session, timeout_s=15):
    deadline = time.monotonic() + timeout_s
    while session_members(session) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert session_members(session) == []


def test_two_contenders_are_compared_and_every_sample_is_written(start, tmp_path):
    process = start("", 60)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "calm" in output
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["machine"]["cores"] >= 1
    assert document["command"].startswith("python ")
    (comparison,) = document["comparisons"]
    assert comparison["reference"] == "calm"
    for run in comparison["runs"]:
        assert len(run["step_s"]) == len(run["measures"]["cpu_s"]) == 2
        assert min(run["step_s"]) > 0
        # x -> 2x + 1 on every step, three steps (warm-up, then one round of two) in each of two starts, on two ranks.
        assert run["results"] == [7.0] * 4
    assert_all_end(process.pid)


@pytest.mark.parametrize(
    ("trouble", "turn_timeout_s", "cause"),
    [
        ("hang", 3, "contender 'other': rank 0, 1 did not report 'turn' within 3 s"),
        ("raise", 60, "ArithmeticError: scripted trouble"),
    ],
)
def test_a_contender_in_trouble_ends_the_benchmark_and_leaves_nobody(start, tmp_path, trouble, turn_timeout_s, cause):
    process = start(trouble, turn_timeout_s)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert cause in errors
    assert not (tmp_path / "out.json").exists()
    assert_all_end(process.pid)


def test_ranks_do_not_outlive_a_benchmark_that_was_killed(start):
    process = start("hang", 60)
    assert process.stdout.readline() == "started\n"
    deadline = time.monotonic() + 60
    while len(session_members(process.pid)) < 6 and time.monotonic() < deadline:  # itself, fork server, tracker, ranks
        time.sleep(0.1)
    assert len(session_members(process.pid)) >= 6
    process.kill()
    assert_all_end(process.pid)
