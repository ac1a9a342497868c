"""A real job that is watched: `hyperpod top`, `status --json` and `serve`, and a rank that is killed by a key."""

import contextlib
import fcntl
import http.client
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
import uuid
from pathlib import Path

import pytest
import warm
from recovery.faults import PRELOAD, left_processes

PROGRAM = Path(__file__).with_name("program_steps.py")
PATIENCE_S = 120.0


class Watched:
    """The job, and commands that look at it."""

    def __init__(self, folder):
        self.folder, self.stop, self.out = folder, folder / "stop", folder / "out"
        self.mark = f"watched-{uuid.uuid4().hex}"
        self.environ = {**os.environ, "XDG_RUNTIME_DIR": str(folder), "JOB_MARK": self.mark, "TERM": "xterm"}
        events = {"HYPERPOD_EVENTS": str(folder / "events")}
        arguments = ["--nproc-per-node", "2", *PRELOAD, str(PROGRAM), str(self.stop)]
        self.agent = warm.start(arguments, self.environ | events, self.out, folder)

    def command(self, *arguments):
        return [sys.executable, "-m", "hyperpod_plugins.cli", *arguments]

    def hyperpod(self, *arguments):
        """Exit code, output and errors of a command."""
        return warm.hyperpod(arguments, PATIENCE_S, self.environ)

    def status(self):
        """The view, once its ranks are there; else None."""
        code, out, _ = self.hyperpod("status", "--json")
        return json.loads(out) if code == 0 else None

    def await_(self, condition):
        """Wait until a condition is true, and return what it returns."""
        until_s = time.monotonic() + PATIENCE_S
        while not (found := condition()):
            assert time.monotonic() < until_s, self.out.read_text()
            assert self.agent.poll() is None, self.out.read_text()
            time.sleep(0.1)
        return found

    def finish(self):
        self.stop.touch()
        assert self.agent.wait(PATIENCE_S) == 0, self.out.read_text()


class Terminal:
    """A command under a pseudo terminal."""

    def __init__(self, command, environ):
        self.fd, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 120, 0, 0))
        self.before = termios.tcgetattr(inner)
        self.process = subprocess.Popen(
            command, stdin=inner, stdout=inner, stderr=inner, env=environ, start_new_session=True
        )
        self.inner, self.text = inner, ""

    def read(self, timeout_s=0.1):
        while select.select([self.fd], [], [], timeout_s)[0]:
            self.text += os.read(self.fd, 1 << 16).decode(errors="replace")
            timeout_s = 0.0

    def await_(self, pattern):
        """Wait for new output that holds a pattern."""
        until_s = time.monotonic() + PATIENCE_S
        while not (found := re.search(pattern, self.text, re.DOTALL)):
            assert time.monotonic() < until_s, self.text[-3000:]
            assert self.process.poll() is None, self.text[-3000:]
            self.read()
        self.text = self.text[found.end() :]
        return found

    def press(self, keys):
        os.write(self.fd, keys.encode())

    def code(self):
        until_s = time.monotonic() + PATIENCE_S
        while self.process.poll() is None:  # it may wait for its output to be read
            assert time.monotonic() < until_s, self.text[-3000:]
            self.read()
        self.read()
        return self.process.returncode

    @property
    def is_restored(self):
        return termios.tcgetattr(self.inner) == self.before

    def clear(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        os.close(self.fd)
        os.close(self.inner)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    watched = Watched(tmp_path_factory.mktemp("watched"))
    try:
        yield watched
    finally:
        watched.agent.kill()
        watched.agent.wait(10)
        for pid in left_processes(watched.mark, 0.0):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def terminal(job):
    opened = []

    def open_terminal(*arguments):
        opened.append(Terminal(job.command(*arguments), job.environ))
        return opened[-1]

    yield open_terminal
    for each in opened:
        each.clear()


@pytest.mark.spawns
def test_one_view_as_text_and_json_and_for_a_pipe(job):
    view = job.await_(lambda: (found := job.status()) and found["step"] and found["steps_per_s"] and found)
    assert (view["state"], view["num_ranks"], view["generation"]) == ("running", 2, 0)
    assert [(each["rank"], each["state"]) for each in view["ranks"]] == [(0, "running"), (1, "running")]
    assert all(each["host"] and each["pid"] and each["activity"] for each in view["ranks"])
    assert view["steps_per_s"] > 0
    assert 0 < view["goodput"] < 1
    code, out, err = job.hyperpod("top", "--once")
    assert (code, err) == (0, "")
    assert re.search(r"^job \S+: running, 2 ranks, generation 0$", out, re.MULTILINE)
    assert re.search(r"^rank 1: running, step \d+, ", out, re.MULTILINE)
    code, out, _ = job.hyperpod("status")
    assert code == 0
    assert re.fullmatch(r"job \S+: 2 ranks, generation 0", out.splitlines()[0])
    assert re.match(r"  rank 0: running, step \d+", out.splitlines()[1])
    with subprocess.Popen(
        job.command("top", "--interval", "0.2"), env=job.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as piped:
        assert piped.stdout.readline().startswith(b"job ")
        piped.stdout.close()  # as `| head -1`
        assert piped.wait(PATIENCE_S) == 0
        assert piped.stderr.read() == b""


@pytest.mark.spawns
def test_a_rank_is_killed_by_keys_and_the_job_goes_on(job, terminal):
    job.await_(lambda: (found := job.status()) and found["step"])
    top = terminal("top", "--interval", "0.3")
    top.await_(r"pid \d+.*pid \d+.*q: quit")  # the first look is over, and has found both ranks
    assert not top.is_restored
    top.press("k")
    top.await_("kill which rank")
    top.press("1")
    top.await_("kill which rank. 1_")
    top.press("y")
    top.await_("the agent of rank 1 was asked to kill")
    top.await_("last incidents")
    job.await_(lambda: [each["state"] for each in job.status()["ranks"]] == ["running", "running"])
    top.press("q")
    assert top.code() == 0
    assert top.is_restored
    assert "\x1b[?1049l" in top.text  # the usual screen is back
    view = job.status()
    assert [each["incarnation"] for each in view["ranks"]] == [0, 1]
    assert "killed by SIGKILL" in " ".join(view["incidents"])
    step = view["step"]
    job.await_(lambda: job.status()["step"] > step)


@pytest.mark.spawns
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_leave_the_terminal_as_it_was(job, terminal, number, code):
    job.await_(lambda: (found := job.status()) and found["step"])
    top = terminal("top")
    top.await_("q: quit")
    assert not top.is_restored
    top.process.send_signal(number)
    assert top.code() == code
    assert top.is_restored
    assert "Traceback" not in top.text


@pytest.mark.spawns
def test_the_job_ends_while_it_is_watched(job, terminal):
    """In a terminal, in a pipe, and from a browser."""
    job.await_(lambda: (found := job.status()) and found["step"])
    with (
        subprocess.Popen(job.command("serve", "--port", "0"), env=job.environ, stdout=subprocess.PIPE) as server,
        subprocess.Popen(
            job.command("top", "--interval", "0.3"), env=job.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as piped,
    ):
        try:
            port = int(re.search(rb":(\d+)/", server.stdout.readline())[1])

            def asked():
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
                try:
                    connection.request("GET", "/status.json")
                    return json.loads(connection.getresponse().read())
                finally:
                    connection.close()

            assert job.await_(lambda: (found := asked())["state"] == "running" and found)["num_ranks"] == 2
            assert piped.stdout.readline().startswith(b"job ")
            top = terminal("top")
            top.await_("q: quit")
            job.finish()
            assert top.code() == 0
            assert top.is_restored
            assert ": ended: the job has ended" in top.text
            out, err = piped.communicate(timeout=PATIENCE_S)
            assert (piped.returncode, err) == (0, b"")
            assert b": ended: the job has ended" in out
            until_s = time.monotonic() + PATIENCE_S
            while asked()["state"] != "ended":
                assert time.monotonic() < until_s
                time.sleep(0.2)
            server.send_signal(signal.SIGINT)
            assert server.wait(PATIENCE_S) == 130
        finally:
            server.kill()
            piped.kill()
    assert job.hyperpod("top")[0] == 1
    assert not left_processes(job.mark, patience_s=5.0)
