"""The demo runs as a user runs it: by its own launcher, and under torchrun."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
EXAMPLE = EXAMPLES / "train_lm.py"


def run(*command, limit_s=150):
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr  # repairs are told on stderr


@pytest.mark.spawns
def test_the_demo_trains_on_whatever_ranks_there_are_and_prints_a_sample(tmp_path):
    size, report = ["--sequence-length", "32", "--folder", str(tmp_path)], tmp_path / "report.json"
    first = run(sys.executable, EXAMPLE, *size, "--steps", "40", "--report", str(report))
    learnt = json.loads(report.read_text())
    assert learnt["val_loss"] < 0.95 * learnt["unigram_entropy"]
    assert "mesh: replicate 1 x shard 2 x tensor 2" in first
    assert "--- a sample ---\ndef " in first
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    second = run(*torchrun, EXAMPLE, *size, "--steps", "2")
    assert "mesh: replicate 1 x shard 2 x tensor 1" in second


@pytest.mark.spawns
def test_the_show_loses_a_rank_grows_and_shrinks_and_ends_with_the_same_bits(tmp_path):
    command = [sys.executable, EXAMPLES / "show_recovery.py", "--steps", "80", "--folder", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as show:
        killing = threading.Timer(400, show.terminate)  # ends its jobs, too
        killing.start()
        text, told_while_running = "", ""
        for line in show.stdout:
            text += line
            if not (tmp_path / "report.html").exists():
                told_while_running = text
        killing.cancel()
        assert show.wait(20) == 0, text[-3000:]
    assert "kill -9" in told_while_running
    for words in ("kill -9", "0 steps lost: killed by SIGKILL", "the job shrinks from 3 to 2", "equal, bit for bit"):
        assert words in text
    assert "<html" in (tmp_path / "report.html").read_text()
