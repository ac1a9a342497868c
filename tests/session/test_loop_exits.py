"""What a process does at its exit after it has left a loop early."""

import subprocess
import sys

import pytest

_PROGRAM = """
import atexit
from hyperpod_plugins.session.transaction import Transactions

class Engine:
    def await_loop_exits(self):
        raise {error}("cannot tell")

steps = Transactions.__new__(Transactions)
steps.must_await_others, steps._engine, steps._raised = True, Engine(), ""
atexit.register(steps._await_others_at_exit)
"""


@pytest.mark.parametrize("error", ["ValueError", "KeyboardInterrupt"])
def test_a_failed_wait_at_exit_is_no_success(error: str) -> None:
    """Python ignores exceptions at exit: without care the process would end with code 0."""
    ended = subprocess.run(
        [sys.executable, "-c", _PROGRAM.format(error=error)], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 1, ended.stderr
    assert f"{error}: cannot tell" in ended.stderr
