"""Processes forked from a fork server against the same programs started by a fresh interpreter."""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from hyperpod_plugins.elastic.launcher import fork_server as fork_server_module
from hyperpod_plugins.elastic.launcher.fork_client import (
    ForkServerOptions,
    ForkServerProcess,
    ProcessEnded,
    ProcessStarted,
    SpawnRequest,
    wait_readable,
)
from hyperpod_plugins.errors import ConfigError

pytestmark = pytest.mark.spawns
DEADLINE_S = 60.0

PROBE = """
import atexit, json, os, signal, sys, threading
atexit.register(lambda: print("at exit", len(sys.modules["__main__"].seen), flush=False))
seen = [1, 2, 3]
def late():
    import time; time.sleep(0.2); print("from a thread", sys.modules["__main__"].seen)
def probe():
    handlers = {n: str(signal.getsignal(n)) for n in ("SIGINT SIGTERM SIGCHLD SIGPIPE SIGHUP SIGUSR1".split())
                for n in [getattr(signal, n)]}
    return {
        "argv": sys.argv, "orig_argv": sys.orig_argv[1:], "path0": sys.path[0], "file": __file__, "name": __name__,
        "spec": getattr(__spec__, "name", None), "main": sys.modules["__main__"].__dict__ is globals(),
        "cwd": os.getcwd(), "environ": dict(os.environ), "package": __package__,
        "handlers": {int(k): v for k, v in handlers.items()},
        "mask": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
        "descriptors": sorted(int(d) for d in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{d}")),
        "leads": os.getsid(0) == os.getpid(), "threads": threading.active_count(),
    }
print(json.dumps(probe()))
threading.Thread(target=late).start()
"""


class Children:
    """A fork server and what it has started."""

    def __init__(self, folder, preload=()):
        options = ForkServerOptions(python=sys.executable, preload=preload)
        self.fork_server = ForkServerProcess(options, os.environ)
        self.folder = folder
        self.pids, self.codes = {}, {}
        self.last = 0

    def start(self, kind, target, *args, environ=None, cwd=None):
        self.last += 1
        environ = {"PATH": os.environ["PATH"], "PYTHONPATH": "", **(environ or {})}
        files = {stream: str(self.folder / f"{self.last}.{stream}") for stream in ("stdout", "stderr")}
        cwd = str(cwd or self.folder)
        self.fork_server.start(
            SpawnRequest(
                request_id=self.last, kind=kind, target=str(target), args=args, environ=environ, cwd=cwd, **files
            )
        )
        return self.last

    def await_(self, condition, deadline_s=DEADLINE_S):
        until_s = time.monotonic() + deadline_s
        while not condition():
            assert time.monotonic() < until_s, "too late"
            wait_readable([self.fork_server.fileno()], min(until_s, time.monotonic() + 0.05))
            for event in self.fork_server.poll_events():
                match event:
                    case ProcessStarted(ticket, pid):
                        self.pids[ticket] = pid
                    case ProcessEnded(ticket, code):
                        self.codes[ticket] = code

    def pid(self, ticket):
        self.await_(lambda: ticket in self.pids)
        return self.pids[ticket]

    def code(self, ticket):
        self.await_(lambda: ticket in self.codes)
        return self.codes[ticket]

    def output(self, ticket, stream="stdout"):
        return (self.folder / f"{ticket}.{stream}").read_text()

    def await_line(self, ticket):
        file = self.folder / f"{ticket}.stdout"
        self.await_(lambda: file.exists() and "\n" in file.read_text())
        return file.read_text().splitlines()[0]


@pytest.fixture(scope="module")
def children(tmp_path_factory):
    made = Children(tmp_path_factory.mktemp("children"), preload=("numpy", "lightning_utilities.core.rank_zero"))
    yield made
    assert made.fork_server.close() == 0


@pytest.fixture
def write(tmp_path):
    def write(text, name="script.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    return write


def is_alive(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def await_gone(*pids, deadline_s=10.0):
    until_s = time.monotonic() + deadline_s
    while any(map(is_alive, pids)):
        assert time.monotonic() < until_s, [pid for pid in pids if is_alive(pid)]
        time.sleep(0.01)


def fresh(command, cwd, environ):
    return subprocess.run(
        command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=60, check=False, start_new_session=True
    )


@pytest.mark.parametrize("as_module", [False, True], ids=["script", "module"])
def test_a_child_cannot_tell_that_it_was_forked(children, write, tmp_path, as_module):
    path = write(PROBE, "package/inner/probe.py")
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": "", "ONE": "1"}
    target = "package.inner.probe" if as_module else os.path.relpath(path, tmp_path)
    option = ["-m"] if as_module else []
    expected = fresh([sys.executable, "-u", *option, target, "a", "--b"], tmp_path, environ)
    ticket = children.start("module" if as_module else "script", target, "a", "--b", environ=environ, cwd=tmp_path)
    assert children.code(ticket) == expected.returncode == 0, children.output(ticket, "stderr") + expected.stderr
    first, *rest = children.output(ticket).splitlines()
    first_expected, *rest_expected = expected.stdout.splitlines()
    assert rest == rest_expected
    assert len(rest) == 2
    found, wanted = json.loads(first), json.loads(first_expected)
    wanted["environ"].pop("LC_CTYPE", None)  # a new interpreter in the C locale sets this for itself
    assert found == wanted


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("pass", 0),
        ("import sys; sys.exit(3)", 3),
        ("import sys; sys.exit('no way')", 1),
        ("raise SystemExit", 0),
        ("import os; os._exit(7)", 7),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("import os; os.abort()", -signal.SIGABRT),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("import atexit, sys; atexit.register(print, 'bye'); sys.exit(4)", 4),
        ("import sys; sys.stdout.write('no newline')", 0),
        ("def f():\n    raise ValueError('it broke')\nf()", 1),
        ("def f(:\n", 1),
    ],
)
def test_ends_as_a_fresh_interpreter_would(children, write, tmp_path, text, code):
    path = write(text)
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": "", "PYTHONFAULTHANDLER": "1"}
    expected = fresh([sys.executable, "-u", str(path)], tmp_path, environ)
    ticket = children.start("script", path, environ=environ)
    assert children.code(ticket) == expected.returncode == code
    assert children.output(ticket) == expected.stdout
    if "abort" not in text and "Keyboard" not in text:  # the two whose traceback shows how the program was started
        assert children.output(ticket, "stderr") == expected.stderr


def test_an_exception_is_left_in_torchruns_error_file(children, write, tmp_path):
    path, file = write("def f():\n    raise ValueError('it broke')\nf()"), tmp_path / "error.json"
    assert children.code(children.start("script", path, environ={"TORCHELASTIC_ERROR_FILE": str(file)})) == 1
    message = json.loads(file.read_text())["message"]
    assert message["message"] == "ValueError: it broke"
    assert message["extraInfo"]["py_callstack"].startswith(
        f'Traceback (most recent call last):\n  File "{path}", line 3, in <module>\n'
    )


def test_an_executable_is_started_by_exec(children):
    ticket = children.start(
        "executable", "sh", "-c", 'trap; yes | head -1; echo "$ONE" >&2; exit 4', environ={"ONE": "1"}
    )
    assert children.code(ticket) == 4
    assert (children.output(ticket), children.output(ticket, "stderr")) == ("y\n", "1\n")


def test_multiprocessing_spawn_finds_the_script(children, write):
    path = write("""
        import multiprocessing
        def square(x):
            return x * x
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(square, [1, 2, 3]))
    """)
    ticket = children.start("script", path)
    assert children.code(ticket) == 0, children.output(ticket, "stderr")
    assert children.output(ticket) == "[1, 4, 9]\n"


def test_libraries_forget_the_fork_server(children, write):
    path = write("""
        import numpy, random
        from lightning_utilities.core.rank_zero import rank_zero_only
        print(numpy.random.rand(), random.random(), sep="\\n")
        rank_zero_only(print)("zero")
    """)
    tickets = [children.start("script", path, environ={"RANK": str(rank)}) for rank in range(2)]
    assert [children.code(ticket) for ticket in tickets] == [0, 0], children.output(tickets[0], "stderr")
    zero, one = (children.output(ticket).splitlines() for ticket in tickets)
    assert len(set(zero[:2] + one[:2])) == 4
    assert (zero[2:], one[2:]) == (["zero"], [])


@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="needs Lightning under both names")
def test_a_preloaded_lightning_is_not_the_programs_choice(tmp_path, write):
    """Both of its names are installed; our strategy follows the one that the program has imported."""
    some = Children(tmp_path, preload=("lightning.pytorch", "hyperpod_plugins.lightning"))
    text = """
        import sys, time
        assert not {{"lightning", "pytorch_lightning", "hyperpod_plugins.lightning"}} & set(sys.modules)
        began_s = time.process_time()
        {imports}
        took_s = time.process_time() - began_s
        from hyperpod_plugins.lightning import HyperPodStrategy
        import hyperpod_plugins.lightning.strategy as module
        assert module is sys.modules["hyperpod_plugins.lightning.strategy"]
        assert module.__spec__.name == "hyperpod_plugins.lightning.strategy"
        bases = [base.__module__.partition(".")[0] for base in HyperPodStrategy.__mro__]
        print(next(each for each in bases if "light" in each))
        print(took_s < 0.1, "lightning.pytorch" in sys.modules)
    """
    imports = (
        "import lightning as L; L.Trainer",
        "pass",
        "import lightning.pytorch.strategies",
        "import pytorch_lightning",
    )
    try:
        tickets = [
            some.start("script", write(text.format(imports=each), f"{number}.py"))
            for number, each in enumerate(imports)
        ]
        for ticket in tickets:
            assert some.code(ticket) == 0, some.output(ticket, "stderr")
        *lightning, rival = (some.output(ticket).split() for ticket in tickets)
        assert lightning == [["lightning", "True", "True"]] * 3
        assert rival[::2] == ["pytorch_lightning", "False"]
    finally:
        some.fork_server.close()


def test_signals_reach_the_child_and_its_group(children, write):
    path = write("""
        import os, signal, time
        signal.signal(signal.SIGUSR1, lambda *_: print("noticed"))
        child = os.fork()
        if child:
            print(child)
        while True:
            time.sleep(0.01)
    """)
    ticket = children.start("script", path)
    grandchild = int(children.await_line(ticket))
    children.fork_server.send_signal(ticket, signal.SIGUSR1, group=False, last=False)
    children.await_(lambda: children.output(ticket).count("noticed") == 1)
    assert is_alive(grandchild)
    children.fork_server.send_signal(ticket, signal.SIGKILL, group=True, last=False)
    assert children.code(ticket) == -9
    await_gone(grandchild, children.pid(ticket))


@pytest.mark.parametrize("stubborn", [False, True])
def test_what_a_lost_child_leaves_behind_is_cleared(children, write, stubborn):
    path = write(f"""
        import os, signal, time
        child = os.fork()
        if child:
            print(child)
        elif {stubborn}:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
    """)
    ticket = children.start("script", path)
    grandchild = int(children.await_line(ticket))
    time.sleep(0.1)  # it has set its handler
    os.kill(children.pid(ticket), signal.SIGKILL)
    assert children.code(ticket) == -9
    await_gone(grandchild, deadline_s=3.0 if stubborn else 0.5)


def children_of(process):
    pid = process._process.pid
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("how", ["killed", "left"])
def test_nothing_outlives_a_fork_server(tmp_path, write, how):
    path = write("import time; print(1); time.sleep(60)")
    some = Children(tmp_path)
    ticket = some.start("script", path)
    some.await_line(ticket)
    pids = [*children_of(some.fork_server), some.pid(ticket)]
    if how == "killed":
        some.fork_server._process.kill()
        some.await_(lambda: some.fork_server.is_lost)
    else:
        some.fork_server.close()
    await_gone(*pids)
    some.fork_server.close()


def test_modules_that_fail_or_touch_the_gpu_are_not_preloaded(tmp_path, monkeypatch):
    some = Children(tmp_path, preload=("there_is_no_such_module",))
    some.await_(lambda: some.fork_server.is_lost)
    assert not some.fork_server.is_ready
    assert some.fork_server.close() == 1
    monkeypatch.setattr(fork_server_module, "_holds_cuda", lambda: True)
    with pytest.raises(ConfigError, match="'json' initialised CUDA"):
        fork_server_module.preload(["json"])
