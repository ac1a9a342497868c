"""A few kills of `soak.py`, at random points in time: does the script still kill, and compare?"""

import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).with_name("soak.py")


@pytest.mark.spawns
def test_a_soak_of_a_few_kills():
    command = [sys.executable, str(SOAK), "--kills", "3", "--rests", "0", "--steps", "70", "--limit-s", "120"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    told = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok   kills 3" in told
    assert [line for line in told if line.startswith("kill ")] == [f"kill {number}" for number in range(1, 4)]
    assert [line.strip() for line in told if "ledger" in line] == ["ok   ledger"]
    assert sum(line.startswith(("ok   bits of rank", "ok   log of rank")) for line in told) == 8
