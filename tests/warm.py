"""Agents for tests, forked from a process that has imported what they and their workers import.

    agent = warm.start([*options, script], environ, output)     # like subprocess.Popen of `hyperpodrun`
    code, output, errors = warm.hyperpod(["status"], 60)        # the command `hyperpod`, in a process of its own

Importing torch and Lightning, in the agent and again in its fork server, takes most of the processor time of a short
job. So one *template* for each process of pytest imports them once. It forks the agent, and the agent forks, before
it does anything else, the process that becomes its first fork server. All that follows is as in any job: a second fork
server is started by exec. What the start of Python itself does is tested elsewhere (tests/test_hyperpodrun.py).
"""

import array
import atexit
import contextlib
import ctypes
import gc
import json
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

START_S = 240.0
HYPERPODRUN = "hyperpod_plugins.elastic.launcher.main"
HYPERPOD = "hyperpod_plugins.cli"
_OF_TEMPLATE = "TEST_OF_TEMPLATE"
"""In the environment of the template, and so in that of all that it forks."""
_READ_AT_START = ("PYTHON", "LD_", "TORCH")
"""First letters of variables that an interpreter or a library reads as it starts."""


def has_mark(entry, mark):
    """Whether the process of this folder in /proc is of the job with this mark: in its environment, or mapped."""
    with contextlib.suppress(OSError):
        at_start = (entry / "environ").read_bytes()
        if mark.encode() in at_start:
            return True
        return _OF_TEMPLATE.encode() in at_start and f"memfd:{mark}" in (entry / "maps").read_text()
    return False


# -- in the test's process -------------------------------------------------------------------------------------------


class Agent:
    """A forked agent, with the interface of `subprocess.Popen` that tests use."""

    def __init__(self, template, pid, args):
        self._template, self.pid, self.args = template, pid, args

    @property
    def returncode(self):
        return self.poll()

    def poll(self):
        return self._template.code_of(self.pid)

    def wait(self, timeout=None):
        until_s = time.monotonic() + (timeout if timeout is not None else float("inf"))
        while (code := self.poll()) is None:
            if time.monotonic() > until_s:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.01)
        return code

    def send_signal(self, number):
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def terminate(self):
        self.send_signal(signal.SIGTERM)


class Template:
    """The test's end of the template."""

    def __init__(self):
        ours, theirs = socket.socketpair()
        self._socket, self._lock, self._codes, self._rest = ours, threading.Lock(), {}, b""
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # as for the fork server
                    _OF_TEMPLATE: "1",
                },
            )

    def close(self):
        """End the template, and all agents with it."""
        self._socket.close()
        self._process.wait(10)

    def start(self, **request):
        with self._lock:
            self._socket.sendall(json.dumps(request).encode() + b"\n")
            until_s = time.monotonic() + START_S
            while "pid" not in (news := self._read(max(0.0, until_s - time.monotonic()))):
                assert time.monotonic() < until_s, "the template does not answer"
        return Agent(self, news["pid"], request["args"])

    def code_of(self, pid):
        with self._lock:
            while pid not in self._codes and self._read(0.0):
                pass
            return self._codes.get(pid)

    def _read(self, timeout_s):
        """The next message, or an empty one."""
        if b"\n" not in self._rest and select.select([self._socket], [], [], timeout_s)[0]:
            data = self._socket.recv(1 << 16)
            assert data, "the template has ended"
            self._rest += data
        line, found, rest = self._rest.partition(b"\n")
        if not found:
            return {}
        self._rest, news = rest, json.loads(line)
        if "pid" in news:
            self._codes.pop(news["pid"], None)  # of an earlier process that had this number
        if "ended" in news:
            self._codes[news["ended"]] = news["code"]
        return news


_template = None
_lock = threading.Lock()


def start(args, environ, output, cwd=None, *, errors=None, program=HYPERPODRUN):
    """Start `hyperpodrun` with these arguments and this environment; its output goes to a file, or to two."""
    global _template
    Path(output).touch()  # who reads it may come before the agent
    if any(environ.get(name) != os.environ.get(name) for name in environ if name.startswith(_READ_AT_START)):
        with Path(output).open("w") as out, open(errors or os.devnull, "w") as err:
            command, err = [sys.executable, "-m", program, *map(str, args)], err if errors else subprocess.STDOUT
            return subprocess.Popen(command, stdout=out, stderr=err, env=environ, cwd=cwd)
    with _lock:
        if _template is None:
            _template = Template()
            atexit.register(_template.close)
    return _template.start(
        program=program,
        args=list(map(str, args)),
        environ=dict(environ),
        cwd=str(cwd or os.getcwd()),
        output=str(output),
        errors=str(errors or output),
    )


def run(args, timeout_s, environ=None, cwd=None, meanwhile=lambda: None):
    """Run `hyperpodrun` to its end, and return its exit code, None if it had none in time, and what it printed."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **(environ or {})}
    with tempfile.NamedTemporaryFile("r") as output:
        agent = start(args, variables, output.name, cwd)
        code = None
        try:
            meanwhile()
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = agent.wait(timeout_s)
        finally:
            agent.kill()
            agent.wait(10)
        return code, output.read()


def hyperpod(args, timeout_s, environ=None):
    """Run the command `hyperpod` to its end, and return its exit code, what it printed and its errors."""
    with tempfile.NamedTemporaryFile("r") as output, tempfile.NamedTemporaryFile("r") as errors:
        command = start(args, {**os.environ, **(environ or {})}, output.name, errors=errors.name, program=HYPERPOD)
        try:
            code = command.wait(timeout_s)
        finally:
            command.kill()
            command.wait(10)
        return code, output.read(), errors.read()


# -- in the template, the agents, and what becomes their fork server -------------------------------------------------


def serve(end):
    """Fork an agent for each request. Returns only in an agent, with its request."""
    wakeup, writer = socket.socketpair()
    for each in (wakeup, writer):
        each.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    rest, template = b"", os.getpid()
    while True:
        ready = select.select([end, wakeup], [], [])[0]
        if wakeup in ready:
            wakeup.recv(4096)
            with contextlib.suppress(ChildProcessError):
                while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    code = os.waitstatus_to_exitcode(ended[1])
                    end.sendall(json.dumps({"ended": ended[0], "code": code}).encode() + b"\n")
        if end in ready:
            data = end.recv(1 << 16)
            if not data:
                os._exit(0)  # and the agents with it
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                pid = os.fork()
                if pid == 0:
                    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
                    if os.getppid() != template:
                        os._exit(1)
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for each in (end, wakeup, writer):
                        each.close()
                    return json.loads(line)
                end.sendall(json.dumps({"pid": pid}).encode() + b"\n")


def become_agent(request):
    """Take over the environment, the folder and the output of the job; return a mapping that shows its mark."""
    os.setsid()
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["cwd"])
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    output = os.open(request["output"], flags, 0o666)
    errors = output if request["errors"] == request["output"] else os.open(request["errors"], flags, 0o666)
    os.dup2(output, 1)
    os.dup2(errors, 2)
    for file in {output, errors}:
        os.close(file)
    memory = os.memfd_create(request["environ"].get("JOB_MARK", "job"))
    os.ftruncate(memory, mmap.PAGESIZE)
    marked = mmap.mmap(memory, mmap.PAGESIZE)
    os.close(memory)
    return marked


class ForkServerSeed:
    """In an agent: starts its first fork server in the process that waits for it, and others by exec."""

    TimeoutExpired = subprocess.TimeoutExpired

    def __init__(self, pid, end):
        self.pid, self._end, self._code = pid, end, None

    def Popen(self, command, *, env, pass_fds, **options):
        if self._end is None:
            return subprocess.Popen(command, env=env, pass_fds=pass_fds, **options)
        at = command.index("hyperpod_plugins.elastic.launcher.fork_server")
        message = json.dumps({"args": command[at + 2 :], "environ": dict(env)}).encode()
        with self._end:
            descriptors = array.array("i", pass_fds)
            self._end.sendmsg([len(message).to_bytes(8)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
            self._end.sendall(message)
        self._end = None
        return self

    def poll(self):
        if self._code is None and (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            self._code = os.waitstatus_to_exitcode(ended[1])
        return self._code

    def wait(self, timeout=None):
        until_s = time.monotonic() + (timeout if timeout is not None else float("inf"))
        while (code := self.poll()) is None:
            if time.monotonic() > until_s:
                raise subprocess.TimeoutExpired("fork_server", timeout)
            time.sleep(0.005)
        return code

    def kill(self):
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def fork_seed():
    """Fork what becomes the fork server. Returns its handle in the agent, and the fork server's arguments in it."""
    agent, (ours, theirs) = os.getpid(), socket.socketpair()
    pid = os.fork()
    if pid:
        theirs.close()
        return ForkServerSeed(pid, ours)
    ours.close()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != agent:
        os._exit(1)
    os.setsid()
    size, passed, _, _ = socket.recv_fds(theirs, 8, 1)
    if not size:
        os._exit(0)  # the agent needs none
    message, length = b"", int.from_bytes(size)
    while len(message) < length:
        data = theirs.recv(length - len(message))
        if not data:
            os._exit(0)
        message += data
    theirs.close()
    request = json.loads(message)
    os.environ.clear()
    os.environ.update(request["environ"])
    return [str(passed[0]), *request["args"]]


def run_to_end(main):
    """Call `main` and end this process as the interpreter does, except that what was imported is not freed.

    Threads are joined, `atexit` functions called, output flushed, and the objects of the program and its process groups
    destroyed. To free modules of the template would only have the kernel copy them: 0.3 s of each process.
    """
    code = 0
    try:
        main()
    except SystemExit as ended:
        code = ended.code
        if not isinstance(code, int):
            code = 0 if code is None else print(code, file=sys.stderr) or 1
    except KeyboardInterrupt:
        raise  # the interpreter ends by the signal
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        error.__traceback__ = None  # it holds what the program had
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    # Daemon threads, which the interpreter would stop here, find nothing any more.
    threading.excepthook = lambda _: None
    program = vars(sys.modules["__main__"])
    if program is not globals():
        program.clear()
    if c10d := sys.modules.get("torch.distributed.distributed_c10d"):
        c10d.GroupMember.WORLD = None
        for held in (c10d._pg_map, c10d._pg_names, c10d._pg_group_ranks, c10d._pg_backend_config, c10d._pg_to_tag):
            held.clear()
        c10d._unregister_all_process_groups()
    gc.collect()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code & 0xFF)


if __name__ == "__main__":
    from hyperpod_plugins import cli
    from hyperpod_plugins.elastic.launcher import fork_client, fork_server
    from hyperpod_plugins.elastic.launcher import main as launcher

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the allocator of datasets has a thread
        fork_server.preload(["preloaded"])
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    marked = become_agent(request)
    seed = fork_seed() if request["program"] == HYPERPODRUN else None
    if seed is None:
        sys.argv = [cli.__file__, *request["args"]]
        run_to_end(lambda: sys.exit(cli.main()))
    elif isinstance(seed, list):
        sys.argv = ["fork_server.py", *seed]
        run_to_end(fork_server.main)
    else:
        fork_client.subprocess = seed
        sys.argv = [launcher.__file__, *request["args"]]
        run_to_end(lambda: sys.exit(launcher.main()))
