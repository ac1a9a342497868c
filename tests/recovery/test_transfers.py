"""Processes that are lost in the middle of a transfer of state, or all of them at once: same bits in the end."""

import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest
import torch
from recovery.faults import PRELOAD, TORCHRUN, Job, left_processes, run_job, start

pytestmark = pytest.mark.spawns
SCRIPT = "ranks_transfer.py"
RDZV = ("--rdzv-backend", "hyperpod", "--nnodes", "1", "--max-restarts", "5")


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """Undisturbed jobs by their number of ranks and shards, each run once."""
    done = {}

    def undisturbed(num_ranks, shards):
        if (num_ranks, shards) not in done:
            environ = {"SHARDS": str(shards)}
            folder = tmp_path_factory.mktemp("calm")
            job = run_job(SCRIPT, folder, num_ranks=num_ranks, args=PRELOAD, environ=environ)
            assert job.code == 0, job.output[-8000:]
            assert "buddy snapshots: every" in job.output  # measured, and said once
            done[num_ranks, shards] = job
        return done[num_ranks, shards]

    return undisturbed


def assert_same(found, calm, num_ranks):
    for rank, (result, wanted) in enumerate(zip(found.results(num_ranks), calm.results(num_ranks), strict=True)):
        assert result["state"].keys() == wanted["state"].keys()
        for name, value in result["state"].items():
            assert torch.equal(value, wanted["state"][name]), (rank, name)


@pytest.mark.parametrize(
    ("options", "faults", "num_lost"),
    [
        # In an exchange: the snapshot before counts; training went on until the next one was due, and no further.
        ({"EVERY": "2"}, [["snapshot", 4, 1, "kill"], ["snapshot", 8, 0, "kill"], ["forward", 9, 1, "kill"]], (1, 4)),
        ({}, [["forward", 9, 1, "kill"]], (0, 9 - 3)),  # every step, at least until the first three are measured
        (  # no step is committed before the buddies have the snapshot of its beginning, however long that takes
            {"EVERY": "1", "OUTLIVES": "0"},
            [["snapshot", 5, 1, "sleep 0.5"], ["committed", 5, 1, "kill"], ["forward", 9, 0, "kill"]],
            (0, 1),
        ),
        # What a process left is damaged: all return to what its buddy has.
        ({"EVERY": "2", "DAMAGES": "1"}, [["forward", 9, 1, "kill"]], (1, 3)),
    ],
    ids=["exchange", "auto", "each", "damaged"],
)
def test_a_rank_that_is_lost_with_its_shard(calm, tmp_path, options, faults, num_lost):
    environ = {"SHARDS": "2", **options}
    job = run_job(SCRIPT, tmp_path, num_ranks=2, faults=faults, args=PRELOAD, environ=environ, timeout_s=60)
    assert job.code == 0, job.output[-8000:]
    assert job.num_faults == len(faults)
    assert_same(job, calm(2, 2), 2)
    lost = [int(line.split(" steps lost")[0].split()[-1]) for line in job.output.splitlines() if " steps lost" in line]
    num_kills = [action for *_, action in faults].count("kill")
    assert len(lost) >= num_kills
    assert num_lost[0] <= max(lost) <= num_lost[1], lost
    assert job.output.count("all ranks return to the snapshot") >= num_kills


def test_a_source_that_is_lost_while_two_ranks_take_its_state(calm, tmp_path):
    """Five replicas: rank 0 gives its state to ranks 2 and 4 when it is lost, and rank 1 is left for all."""
    faults = [["forward", 3, rank, "kill"] for rank in (2, 3, 4)] + [["tensors", 3, 0, "kill"]]
    job = run_job(SCRIPT, tmp_path, num_ranks=5, faults=faults, args=PRELOAD, environ={"SHARDS": "1"}, timeout_s=90)
    assert job.code == 0, job.output[-8000:]
    assert job.num_faults == len(faults)
    assert_same(job, calm(5, 1), 5)


def test_a_process_that_raises_is_replaced_where_torch_cannot_put_its_modules_back(calm, tmp_path):
    faults, environ = [["forward", 5, 1, "raise"]], {"SHARDS": "1", "CAN_RESET": "0"}
    job = run_job(SCRIPT, tmp_path, num_ranks=5, faults=faults, args=PRELOAD, environ=environ, timeout_s=90)
    assert job.code == 0, job.output[-8000:]
    assert [len({line["pid"] for line in lines}) for lines in job.records("step", 5)] == [1, 2, 1, 1, 1]
    assert " 0 steps lost" in job.output
    assert_same(job, calm(5, 1), 5)


def assert_snapshots_were_used(job, num_times):
    """All processes were lost, and of the snapshots in shared memory nothing is left in the end."""
    assert "ALL STEPS SO FAR ARE LOST" not in job.output
    assert job.output.count("all ranks return to the snapshot") in num_times
    assert not [*Path(f"/dev/shm/hyperpod-{os.getuid()}").glob(f"{job.agent_pid}-*")]


def assert_told_steps_lost(job, fault_step, num_ranks):
    """The first return, in step `fault_step`, says how many steps are run again, as no process remembers."""
    [first, *_] = re.findall(r"(\d+) steps lost, going on after step (\d+): all ranks return", job.output)
    assert int(first[0]) == fault_step - int(first[1])
    assert all(len(lines) >= 12 + int(first[0]) for lines in job.records("step", num_ranks))


@pytest.mark.parametrize(
    ("num_ranks", "options"), [(2, {"SHARDS": "2", "EVERY": "2"}), (4, {"SHARDS": "2"})], ids=["each", "replicas"]
)
def test_all_processes_are_lost_at_once(calm, tmp_path, num_ranks, options):
    faults = [["forward", 5, rank, "kill"] for rank in range(num_ranks)]
    job = run_job(SCRIPT, tmp_path, num_ranks=num_ranks, faults=faults, args=PRELOAD, environ=options)
    assert job.code == 0, job.output[-8000:]
    assert job.num_faults == len(faults)
    assert_snapshots_were_used(job, range(1, num_ranks + 1))  # some may reach their fault when the step is run again
    assert_told_steps_lost(job, 5, num_ranks)
    assert_same(job, calm(num_ranks, 2), num_ranks)


def test_torchrun_ends_all_replicas_with_one(calm, tmp_path):
    """The loss of one worker is the loss of all copies of each shard: the next begin from the snapshot of the node."""
    faults = [["forward", 5, 3, "kill"]]
    args = (*RDZV, "--rdzv-endpoint=localhost:0")
    job = run_job(SCRIPT, tmp_path, num_ranks=4, faults=faults, launcher=TORCHRUN, args=args, environ={"SHARDS": "2"})
    assert job.code == 0, job.output[-8000:]
    assert job.num_faults == 1
    assert "costs the steps since the last buddy snapshot" in job.output
    assert_snapshots_were_used(job, [1])
    assert_told_steps_lost(job, 5, 4)
    assert_same(job, calm(4, 2), 4)


def test_torchrun_ends_all_processes_with_one_while_another_node_comes_and_goes(calm, tmp_path):
    """The next processes start on the node whose memory has the snapshots, whichever others wait for a slot."""
    faults = [["forward", 5, 1, "kill"], ["forward", 7, 0, "kill"], ["forward", 9, 1, "kill"]]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    options = {
        "faults": faults,
        "num_ranks": 2,
        "launcher": TORCHRUN,
        "args": (*RDZV, f"--rdzv-endpoint=localhost:{port}", "--rdzv-conf=keep_alive_interval=0.5"),
        "environ": {"SHARDS": "2", "EVERY": "2"},
    }
    agents = [start(SCRIPT, tmp_path, **options)]
    until_s, job = time.monotonic() + 150.0, Job(tmp_path, 0, "")
    try:
        while agents[0].poll() is None and time.monotonic() < until_s:
            is_wanted = (tmp_path / "record-0.jsonl").exists() and job.num_faults != 2
            is_there = len(agents) > 1 and agents[-1].poll() is None
            if is_wanted and not is_there:
                agents.append(start(SCRIPT, tmp_path / f"other-{len(agents)}", **options))
            elif is_there and not is_wanted:
                agents[-1].kill()
            time.sleep(0.1)
    finally:
        for agent in agents:
            agent.kill()
            agent.wait(10)
        # An agent that starts as the job ends begins one of its own; workers that import torch when their agent is
        # killed end once they have.
        left = [pid for agent in agents for pid in left_processes(agent.mark, patience_s=60.0)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    found = Job(tmp_path, agents[0].returncode, (tmp_path / "output").read_text(), agents[0].pid)
    assert found.code == 0, found.output[-8000:]
    assert not left
    assert found.num_faults == len(faults)
    assert len(agents) >= 3  # one was there at the second loss, and another came after the third
    assert_snapshots_were_used(found, [len(faults)])
    assert_same(found, calm(2, 2), 2)
