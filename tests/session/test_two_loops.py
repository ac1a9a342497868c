"""A job that dies in the second loop of an elastic session: the first one has ended, and is not run again."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.spawns
def test_the_second_loop_of_an_elastic_session_is_run_again_alone(tmp_path):
    launcher = Path(sys.executable).parent / "hyperpodrun"
    command = [launcher, "--nproc-per-node", "1", Path(__file__).with_name("program_two_loops.py"), tmp_path]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path, env=environ, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    first, second = [(0, 0), (0, 1)], [(1, 0), (1, 1), (1, 2), (1, 3)]
    steps = [(int(loop), int(step)) for loop, step in re.findall(r"loop (\d) step (\d)", done.stdout)]
    assert steps == [*first, *second, *second]
    before, after = re.findall(r"begins with (.+)", done.stdout)
    assert before == after  # the parameters
    assert "all processes start again" in done.stderr
