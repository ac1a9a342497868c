"""A job that dies in the second loop of an elastic session: the first does not begin from the checkpoint of that."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.spawns
def test_a_checkpoint_of_the_second_loop_is_not_loaded_into_the_first(tmp_path):
    launcher = Path(sys.executable).parent / "hyperpodrun"
    command = [launcher, "--nproc-per-node", "1", Path(__file__).with_name("program_two_loops.py"), tmp_path]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path, env=environ, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    once = [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3)]
    steps = [(int(loop), int(step)) for loop, step in re.findall(r"loop (\d) step (\d)", done.stdout)]
    assert steps == [*once, *once]
    assert "all processes start again" in done.stderr
