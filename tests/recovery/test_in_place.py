"""Jobs that lose ranks again and again end as if nothing had happened: the same bits on every rank."""

import contextlib
import functools
import json
import os
import re
import signal
import tempfile
import time
import zipfile
from pathlib import Path

import pytest
import warm

PROGRAM = Path(__file__).with_name("program_in_place.py")
PRELOAD = "torch,torch.distributed.fsdp,torch.distributed.tensor.parallel,torch._dynamo,lightning.pytorch"
HSDP = json.dumps({"hybrid_shard_degree": 2})
TENSOR = json.dumps(
    {
        "hybrid_shard_degree": 1,
        "tensor_parallel_degree": 2,
        "tensor_plan": {"*.up_proj": "colwise", "*.down_proj": "rowwise"},
    }
)

pytestmark = pytest.mark.spawns


def run(folder, degrees, micro_steps, faults, *more, timeout_s=120, meanwhile=lambda: None, transport="gloo"):
    """Run a job and return its exit code and what it printed; whatever happens, no process is left."""
    args = ["--nproc-per-node", "4", "--preload", PRELOAD, str(PROGRAM), str(folder), degrees, str(micro_steps), faults]
    return warm.run([*args, *more], timeout_s, {"HYPERPOD_TEST_TRANSPORT": transport}, meanwhile=meanwhile)


def results(folder, degrees, micro_steps, faults="", *more, **options):
    code, text = run(folder, degrees, micro_steps, faults, *more, **options)
    assert code == 0, text[-8000:]
    return [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(4)], text


@functools.cache
def undisturbed(degrees, micro_steps):
    with tempfile.TemporaryDirectory() as folder:
        return results(folder, degrees, micro_steps)[0]


def assert_same_end(disturbed, undisturbed):
    for rank, (there, here) in enumerate(zip(disturbed, undisturbed, strict=True)):
        for name in ("state", "step", "epoch", "rate", "val"):
            assert there[name] == here[name], (rank, name)
        expected = {(step, batch): loss for step, batch, loss in here["losses"]}
        for step, batch, loss in there["losses"]:
            assert loss == expected[step, batch], (rank, step, batch)


def assert_same_log(disturbed, undisturbed, num_missing):
    """The run that was begun has a row for each step, but for those with which its writer was killed."""
    assert disturbed["runs"] == undisturbed["runs"] == ["version_0"]
    rows, expected = disturbed["rows"], undisturbed["rows"]
    assert rows == [row for row in expected if row in rows]
    assert len(rows) >= len(expected) - num_missing


@pytest.mark.parametrize(
    ("degrees", "micro_steps", "faults", "num_repairs", "transport"),
    [
        pytest.param(
            HSDP,
            1,
            "kill:rank=3,step=0,phase=forward; kill:rank=0,step=3,phase=backward; "
            "kill:rank=1,step=4,phase=validation; kill:rank=2,step=6,phase=checkpoint; "
            "kill:rank=0,step=9,phase=batch_end; kill:rank=3,step=13,phase=dataloader; "
            "kill:rank=1,step=16,phase=validation; kill:rank=2,step=19,phase=optimizer_step",
            8,
            "gloo",
            id="hsdp-every-phase",
            marks=pytest.mark.gpu,
        ),
        pytest.param(
            TENSOR,
            1,
            "kill:rank=0,step=5,phase=forward; exception:rank=2,step=7,phase=backward; "
            "kill:rank=3,step=11,phase=optimizer_step",
            3,
            "gloo",
            id="tensor-parallel",
            marks=pytest.mark.gpu,
        ),
        pytest.param(
            HSDP,
            2,
            "kill:rank=2,step=4,phase=forward; stop:rank=1,step=9,phase=forward; "
            "hang:rank=3,step=13,phase=fetching; kill:rank=0,step=15,phase=batch_end",
            4,
            "nccl-like",
            id="accumulation-and-ranks-that-stop-and-hang",
        ),
        pytest.param(
            HSDP,
            1,
            "kill:rank=0,step=6,phase=forward; kill:rank=1,step=6,phase=forward; kill:rank=2,step=12,phase=backward; "
            "kill:rank=2,step=12,phase=forward,incarnation=1",
            2,
            "gloo",
            id="a-whole-replica-at-once-and-the-same-rank-twice",
        ),
    ],
)
def test_faults_change_nothing(tmp_path, degrees, micro_steps, faults, num_repairs, transport):
    disturbed, text = results(tmp_path, degrees, micro_steps, faults, transport=transport)
    assert_same_end(disturbed, undisturbed(degrees, micro_steps))
    assert_same_log(disturbed[0], undisturbed(degrees, micro_steps)[0], num_missing=faults.count("kill:rank=0"))
    assert text.count("repaired in") >= num_repairs, text[-6000:]
    for rank in re.findall(r"hang:rank=(\d)", faults):
        hang = rf"worker {rank} \(hang\): did not come to the \S+ collective .*repaired in"
        assert re.search(hang, text), text[-6000:]


def test_a_mistake_in_the_program_ends_the_job_with_its_own_traceback(tmp_path):
    code, text = run(tmp_path, HSDP, 1, "exception:rank=1,step=7,phase=backward,repeat=true")
    assert code == 1, text[-8000:]
    top = text.index("Rank 1 failed first:\n\nTraceback (most recent call last):\n")
    assert top < text.index("InjectedFault: exception:rank=1", top) < text.index("=====", top)
    assert text.count("gives up") == 1
    assert text.count("repaired in") == 2
    replaced = [line for line in text.splitlines() if "takes its place" in line]
    assert not replaced, replaced
    # What all ranks held was saved before, and training goes on from it as if nothing had happened.
    saved = tmp_path / "checkpoints" / "emergency-step=7.ckpt"
    assert f"step 7 was saved as {saved}" in text, text[-8000:]
    assert_same_end(results(tmp_path, HSDP, 1, "", str(saved))[0], undisturbed(HSDP, 1))


def test_those_that_are_left_save_what_they_hold_if_nobody_comes_for_the_others(tmp_path):
    code, text = run(tmp_path, HSDP, 1, "kill:rank=2,step=7,phase=optimizer_step", "", "6")
    assert code == 1, text[-8000:]
    assert "no process joined for the ranks [2]" in text
    saved = tmp_path / "checkpoints" / "emergency-step=7.ckpt"
    assert f"step 7 was saved as {saved}" in text, text[-8000:]
    assert_same_end(results(tmp_path, HSDP, 1, "", str(saved))[0], undisturbed(HSDP, 1))


def kill_once_stopped(folder):
    """Kill all processes of a job, once all have stopped, so that none can mend anything before."""
    deadline_s = time.monotonic() + 60.0
    while time.monotonic() < deadline_s:
        with contextlib.suppress(OSError, ValueError):  # a file may not be there yet, or be empty still
            pids = [int(Path(folder, f"pid{rank}").read_text()) for rank in range(4)]
            states = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in pids]
            if states == ["T"] * 4:
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)
                return
        time.sleep(0.05)
    pytest.fail("the processes did not all stop")


@pytest.mark.parametrize("step", [pytest.param(3, id="before-a-checkpoint"), pytest.param(9, id="after-a-checkpoint")])
def test_all_processes_lost_at_once_begin_again(tmp_path, step):
    faults = "; ".join(f"stop:rank={rank},step={step},phase=forward" for rank in range(4))
    without_snapshots = "", "60", "0"
    there, text = results(tmp_path, HSDP, 1, faults, *without_snapshots, meanwhile=lambda: kill_once_stopped(tmp_path))
    where = "from the beginning" if step == 3 else f"from {tmp_path}/checkpoints/step=6.ckpt (step 6)"
    assert f"all processes start again {where}" in text, text[-8000:]
    assert_same_end(there, undisturbed(HSDP, 1))


def test_checkpoints_that_are_files_are_as_exact_as_folders(tmp_path):
    """A rank is lost while one is written, and later all ranks begin again from it."""
    files = json.dumps(json.loads(HSDP) | {"save_distributed_checkpoint": False, "background_checkpoints": True})
    faults = "; ".join(
        ["kill:rank=2,step=6,phase=checkpoint", *(f"stop:rank={rank},step=9,phase=forward" for rank in range(4))]
    )
    there, text = results(tmp_path, files, 1, faults, "", "60", "0", meanwhile=lambda: kill_once_stopped(tmp_path))
    assert f"all processes start again from {tmp_path}/checkpoints/.step=6.ckpt.shards (step 6)" in text, text[-8000:]
    assert "repaired in" in text
    assert_same_end(there, undisturbed(HSDP, 1))
    saved = {each.name for each in (tmp_path / "checkpoints").iterdir()}
    assert saved == {name for step in (6, 12, 18) for name in (f"step={step}.ckpt", f".step={step}.ckpt.shards")}
    assert all(zipfile.is_zipfile(tmp_path / "checkpoints" / f"step={step}.ckpt") for step in (6, 12, 18))
