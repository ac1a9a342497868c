"""The examples of loops as their heads say to run them, each of which loses a process in the middle."""

import contextlib
import difflib
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from recovery.faults import HYPERPODRUN, left_processes

from hyperpod_plugins.fault_injection.chaos import processes, workers_in

EXAMPLES = Path(__file__).parent.parent.parent / "examples" / "loops"
pytestmark = pytest.mark.spawns


def run_and_kill(name, folder, *args):
    """Run an example on two ranks, and kill one after the tenth step; what it printed."""
    mark = f"job-{uuid.uuid4().hex}"
    command = [sys.executable, "-m", HYPERPODRUN, "--nproc-per-node", "2", str(EXAMPLES / name)]
    output = folder / "output"
    with output.open("w") as file:
        agent = subprocess.Popen(
            [*command, *args],
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={**os.environ, "JOB_MARK": mark, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        )
    try:
        until_s = time.monotonic() + 120
        while "step 10: " not in output.read_text():
            assert agent.poll() is None, output.read_text()[-6000:]
            assert time.monotonic() < until_s, output.read_text()[-6000:]
            time.sleep(0.02)
        os.kill(workers_in(processes(), [agent.pid])[-1], signal.SIGKILL)
        assert agent.wait(120) == 0, output.read_text()[-6000:]
    finally:
        for pid in (*left_processes(mark, patience_s=0.0), agent.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        agent.wait(10)
    return output.read_text()


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("plain_torch.py", ["--steps", "60", "--folder", "."]),
        ("hf_trainer.py", ["--steps", "60", "--folder", "."]),
        pytest.param("clm_session.py", ["--max-train-steps", "60"], marks=pytest.mark.variant),
    ],
)
def test_a_process_is_lost_and_the_example_goes_on(name, args, tmp_path):
    text = run_and_kill(name, tmp_path, *args)
    assert "killed by SIGKILL; repaired in" in text
    assert "0 steps lost" in text
    assert "step 50: " in text


def test_ten_lines_make_an_accelerate_loop_survive():
    before, after = ((EXAMPLES / name).read_text() for name in ("clm_accelerate.py", "clm_session.py"))
    before, after = (
        [line.strip() for line in text.partition("import argparse")[2].splitlines()] for text in (before, after)
    )
    changed = [line[2:] for line in difflib.ndiff(before, after) if line.startswith("+ ")]
    assert len(changed) <= 10, changed
