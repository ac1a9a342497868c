"""Workers of torchrun end with its agent; only real processes can tell."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import hyperpod_plugins
from hyperpod_plugins.elastic.process import exit_with_agent

PROCESS = Path(hyperpod_plugins.__file__).parent / "elastic" / "process.py"
WORKER = f"""
import importlib.util, os, sys, time
spec = importlib.util.spec_from_file_location("process", {str(PROCESS)!r})  # without torch, which takes seconds
process = importlib.util.module_from_spec(spec)
spec.loader.exec_module(process)
process.exit_with_agent(int(sys.argv[1]))
print(os.getpid(), flush=True)
time.sleep(60)
"""
AGENT = f"""
import os, subprocess, sys
subprocess.run([sys.executable, "-c", {WORKER!r}, str(os.getpid())], start_new_session=True)
"""


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_worker_ends_with_its_agent():
    agent = subprocess.Popen([sys.executable, "-c", AGENT], stdout=subprocess.PIPE, text=True)
    worker = int(agent.stdout.readline())
    try:
        assert is_running(worker)
        agent.kill()
        agent.wait(10)
        until_s = time.monotonic() + 10
        while is_running(worker):
            assert time.monotonic() < until_s
            time.sleep(0.01)
    finally:
        agent.stdout.close()
        if is_running(worker):
            os.kill(worker, signal.SIGKILL)


def test_a_worker_whose_agent_is_gone_does_not_begin():
    agent = subprocess.Popen([sys.executable, "-c", ""])
    agent.wait(10)
    with pytest.raises(SystemExit, match="is gone"):
        exit_with_agent(agent.pid)


def test_a_worker_behind_another_program_goes_on():
    exit_with_agent(os.getpid())  # an agent that lives, and is not the parent
