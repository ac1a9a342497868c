"""A job that dies in the second loop of an elastic session: the first one has ended, and is not run again."""

import re
from pathlib import Path

import pytest
import warm


@pytest.mark.spawns
def test_the_second_loop_of_an_elastic_session_is_run_again_alone(tmp_path):
    program = Path(__file__).with_name("program_two_loops.py")
    code, text = warm.run(["--nproc-per-node", "1", program, tmp_path], timeout_s=100, cwd=tmp_path)
    assert code == 0, text[-4000:]
    first, second = [(0, 0), (0, 1)], [(1, 0), (1, 1), (1, 2), (1, 3)]
    steps = [(int(loop), int(step)) for loop, step in re.findall(r"loop (\d) step (\d)", text)]
    assert steps == [*first, *second, *second]
    before, after = re.findall(r"begins with (.+)", text)
    assert before == after  # the parameters
    assert "all processes start again" in text
