"""The fork server: it has imported what workers import, and forks them on demand in milliseconds instead of seconds.

    python -m hyperpod_plugins.elastic.launcher.fork_server DESCRIPTOR AGENT_PID MODULE,... [TITLE...]

`DESCRIPTOR` is a socket connected to the agent, and the title is only for `ps`. Messages are `JsonLines`:

    from the agent                              from the fork server
    {"start": {...}}                            {"started": REQUEST_ID, "pid": PID}
    {"signal": N, "request_id": ID, "group": bool, "last": bool}
                                                {"ready": SECONDS}       once, after the imports
                                                {"ended": REQUEST_ID, "code": N}         N < 0: killed by signal -N

The process only imports: it starts no thread, does not initialize CUDA and draws no random numbers. It ends when the
agent dies, and its children end when it dies, as the kernel enforces. Signals are blocked here and unblocked in
workers: a scheduler that signals every process of a job means the workers.

`lightning` and `pytorch_lightning` are usually installed together. The fork server imports `lightning` before it
knows which one the program uses, and hides it from `sys.modules`; importing a hidden module takes no time.
"""

import builtins
import contextlib
import gc
import importlib
import os
import pkgutil
import runpy
import select
import signal
import socket
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import ModuleType, TracebackType
from typing import Literal

import torch
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from hyperpod_plugins.elastic.launcher.fork_client import JsonLines, SpawnRequest
from hyperpod_plugins.elastic.process import clear_parent_death_signal, program_end, set_parent_death_signal
from hyperpod_plugins.errors import ConfigError

# -- preloaded modules, hidden until the program imports them -------------------------------------------------------

_FLAVOURED = "hyperpod_plugins.lightning"  # binds to whichever Lightning the program has imported
_LIGHTNING = "lightning"
_RIVAL = "pytorch_lightning"


def hide_lightning() -> None:
    """Hide the imported modules of `lightning` and of `hyperpod_plugins.lightning`."""
    lightning = take_out(_LIGHTNING)
    if lightning:
        sys.meta_path.insert(0, PreloadedModuleFinder(lightning, take_out(_FLAVOURED)))


def take_out(root: str) -> dict[str, ModuleType]:
    """Remove a package from `sys.modules` and from its parent package; returns its modules."""
    taken = {name: module for name, module in sys.modules.items() if f"{name}.".startswith(f"{root}.")}
    for name in taken:
        del sys.modules[name]
    above, _, name = root.rpartition(".")
    if taken and above in sys.modules:
        vars(sys.modules[above]).pop(name, None)
    return taken


class PreloadedModuleFinder(MetaPathFinder):
    """Meta path finder that restores hidden modules when the program first imports one of them."""

    def __init__(self, lightning: dict[str, ModuleType], flavoured: dict[str, ModuleType]) -> None:
        """Hold the modules of `lightning` and those bound to it, which cannot be used with `pytorch_lightning`."""
        self._lightning = lightning
        self._flavoured = flavoured

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a hidden module; None for any other."""
        module = self._lightning.get(fullname) or self._flavoured.get(fullname)
        if module is None:
            return None
        if fullname in self._flavoured:
            flavoured, self._flavoured = self._flavoured, {}
            if _RIVAL in sys.modules and self._lightning:
                return None  # the program uses pytorch_lightning: it imports our strategy afresh
            sys.modules.update(flavoured)
        sys.modules.update(self._lightning)
        self._lightning = {}
        return ModuleSpec(fullname, _LoadedModuleLoader(module), is_package=True)


class _LoadedModuleLoader(Loader):
    """Loader of a module that is loaded already."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has replaced it with this loader's


# -- the server -----------------------------------------------------------------------------------------------------

_CLEAN_UP_S = 1.0
"""How long processes that a lost worker leaves behind (data loaders, compilers) may take to end by themselves."""
_IDLE_S = 0.02
_FORK_AGAIN_S = 0.5


class ForkServer:
    """The parent of all workers of a node."""

    def __init__(self, agent: JsonLines, mask: Iterable[int]) -> None:
        """Prepare to serve `agent`, in the main thread; `mask` is the signal mask of children."""
        self._agent = agent
        self._mask = mask
        self._pid = os.getpid()
        self._request_ids: dict[int, int] = {}  # pid of a running worker -> its request_id
        self._leaving: set[int] = set()  # pids of running workers that were told to end
        self._dead: dict[int, float] = {}  # pid of an ended worker, not reaped -> when to kill the rest of its group
        self._wakeup, self._wakeup_writer = socket.socketpair()
        self._wakeup.setblocking(False)
        self._wakeup_writer.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.set_wakeup_fd(self._wakeup_writer.fileno(), warn_on_full_buffer=False)

    def serve(self) -> SpawnRequest:
        """Serve the agent until it is gone. Returns only in a forked child, with the request that the child runs."""
        poll = select.poll()
        poll.register(self._agent.fileno(), select.POLLIN)
        poll.register(self._wakeup.fileno(), select.POLLIN)
        while True:
            for message in self._agent.receive():
                if "start" in message:
                    start = self._start(SpawnRequest(**message["start"]))
                    if start is not None:
                        return start
                else:
                    self._signal(**message)
            if self._agent.is_over:
                self._end()
            self._reap()
            if not poll.poll(_IDLE_S * 1000 if self._dead else None):
                self._reap_groups()
            with contextlib.suppress(BlockingIOError):
                self._wakeup.recv(4096)

    def _start(self, start: SpawnRequest) -> SpawnRequest | None:
        try:
            pid = self._fork()
        except OSError as error:  # a temporary lack of processes or memory
            print(f"hyperpodrun: a worker could not be forked: {error}", file=sys.stderr, flush=True)  # noqa: T201
            time.sleep(_FORK_AGAIN_S)
            self._tell({"ended": start.request_id, "code": -signal.SIGKILL})
            return None
        if pid == 0:
            return start
        self._request_ids[pid] = start.request_id
        self._tell({"started": start.request_id, "pid": pid})
        return None

    def _fork(self) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            set_parent_death_signal(self._pid)
            os.setsid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for end in (self._agent, self._wakeup, self._wakeup_writer):
                end.close()
        return pid

    def _signal(self, signal: int, request_id: int, group: bool, last: bool) -> None:
        """Signal a worker or its process group; `last`: kill what it leaves behind, however it ends."""
        for pid in [pid for pid, known in self._request_ids.items() if known == request_id]:
            if last:
                self._leaving.add(pid)
            with contextlib.suppress(ProcessLookupError):
                if group:
                    os.killpg(pid, signal)
                    return
            os.kill(pid, signal)  # its pid is not reused before it is reaped; also if it has no group of its own yet

    def _reap(self) -> None:
        for pid in [pid for pid in self._request_ids if _has_ended(pid)]:
            code = _code(pid)
            self._tell({"ended": self._request_ids.pop(pid), "code": code})
            is_lost = code != 0 or pid in self._leaving
            self._leaving.discard(pid)
            if not is_lost:
                os.waitpid(pid, 0)
            else:
                # Its forked data loaders hold its sockets open: peers do not notice the loss while one of them lives.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGTERM)
                self._dead[pid] = time.monotonic() + _CLEAN_UP_S  # until it is reaped, its group id is not reused

    def _reap_groups(self) -> None:
        groups = _process_groups() if self._dead else {}
        for pid, deadline in list(self._dead.items()):
            if groups.get(pid, 1) <= 1 or time.monotonic() > deadline:
                self._kill_group(pid)
                os.waitpid(pid, 0)
                del self._dead[pid]

    def _kill_group(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)

    def _tell(self, message: dict[str, object]) -> None:
        with contextlib.suppress(OSError):  # the next `receive` shows that the agent is gone
            self._agent.send(message)

    def _end(self) -> None:
        for pid in (*self._request_ids, *self._dead):
            self._kill_group(pid)
        os._exit(0)


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _code(pid: int) -> int:
    result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    if result is None:
        raise ChildProcessError(f"process {pid} has not ended")
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


def _process_groups() -> dict[int, int]:
    """Number of processes in each process group of this machine, by group id."""
    sizes: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError):
                group = os.getpgid(int(name))
                sizes[group] = sizes.get(group, 0) + 1
    return sizes


def preload(modules: Sequence[str]) -> None:
    """Import `modules`, and warn if one starts a thread.

    Raises:
        ConfigError: a module initialized CUDA, which a forked process cannot use.
    """
    for name in modules:
        importlib.import_module(name)
        if torch.cuda.is_initialized() or _holds_cuda():
            raise ConfigError(
                f"Importing {name!r} initialised CUDA, and a process that is forked afterwards cannot use the GPU. "
                "Remove it from --preload, or find what it does with the GPU on import."
            )
        if _num_threads() > 1:
            _fork_once()  # OpenBLAS starts threads on import, and ends them at a fork
            if _num_threads() > 1:
                warnings.warn(
                    f"importing {name!r} started a thread. A lock that it holds during a fork stays locked in the "
                    "forked worker, which may then hang. Remove it from --preload if workers hang.",
                    stacklevel=2,
                )


def _holds_cuda() -> bool:
    """Whether any library has initialized the CUDA driver in this process."""
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith("/dev/nvidia-uvm"):
                return True
    return False


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _fork_once() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def main() -> None:
    """Import the modules, then serve the agent; in a forked child, run its program."""
    descriptor, agent_pid, modules, *_title = sys.argv[1:]
    set_parent_death_signal(int(agent_pid))
    began_s = time.monotonic()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - {signal.SIGCHLD})
    preload(list(filter(None, modules.split(","))))
    hide_lightning()
    gc.collect()
    gc.freeze()  # the garbage collector of children never writes to these objects, so the pages stay shared
    agent = JsonLines(socket.socket(fileno=int(descriptor)))
    # From now on the closed connection shows that the agent is gone, and `serve` kills all process groups.
    clear_parent_death_signal()
    with contextlib.suppress(OSError):  # the agent ended during the imports: `serve` notices
        agent.send({"ready": time.monotonic() - began_s})
    exec_program(ForkServer(agent, mask).serve(), mask)


# -- in a forked child ----------------------------------------------------------------------------------------------


def exec_program(start: SpawnRequest, mask: Iterable[int]) -> None:
    """Run the program in this process; `mask` is the set of signals that are blocked at its start.

    Returns or raises SystemExit when the program ends, so that the interpreter shuts down as usual: it joins threads,
    calls `atexit` functions and flushes output.
    """
    environ = os.environ  # noqa: TID251  (written here, not read)
    environ.clear()
    environ.update(start.environ)
    os.chdir(start.cwd)
    for descriptor, path in ((1, start.stdout), (2, start.stderr)):
        if path:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            os.dup2(file, descriptor)
            os.close(file)
    if start.kind == "executable":
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these; other programs rely on them
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.execvpe(start.target, [start.target, *start.args], start.environ)
    _mend_libraries(start.environ)
    sys.argv = [start.target, *start.args]
    option = ["-m"] if start.kind == "module" else []
    sys.orig_argv = [sys.executable, "-u", *option, *sys.argv]
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    with _Reporting():
        _run(start)


def _run(start: SpawnRequest) -> None:
    path = os.path.abspath(start.target)
    if start.kind == "module":
        _put_on_path(start.cwd)
        _make_main()
        # `python -m` calls this. The public `run_module` removes `__main__` afterwards, as `run_path` does.
        runpy._run_module_as_main(start.target)  # pyright: ignore
    elif path.endswith(".pyc") or pkgutil.get_importer(path) is not None:  # or a folder or archive with a __main__.py
        _put_on_path(path)
        runpy.run_path(path, run_name="__main__")
    else:
        _put_on_path(os.path.dirname(os.path.realpath(path)))
        _run_file(path)


def _put_on_path(entry: str) -> None:
    """Replace the first entry of the search path, which `python -m` set for the fork server."""
    if not sys.flags.safe_path:
        sys.path[0] = entry


def _run_file(path: str) -> None:
    """Run a file as `__main__`, and keep that module.

    `runpy.run_path` removes it after the last line, when threads and `atexit` functions that pickle still need it.
    """
    main = _make_main()
    main.__file__ = path
    main.__loader__ = SourceFileLoader("__main__", path)
    main.__dict__.update(__cached__=None)
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def _make_main() -> ModuleType:
    main = ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins)
    sys.modules["__main__"] = main
    return main


def _mend_libraries(environ: dict[str, str]) -> None:
    """Reset what libraries took over from the process that imported them, the fork server.

    A fresh interpreter seeds numpy's global generator from the system; without this, all workers would share a state.
    """
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    rank_zero = sys.modules.get("lightning_utilities.core.rank_zero")  # Lightning reads RANK once, at import
    if rank_zero is not None and "RANK" in environ:
        rank_zero.rank_zero_only.rank = int(environ["RANK"])


class _Reporting:
    """Context manager that writes an uncaught exception to torchrun's error file, prints it and exits with code 1."""

    def __enter__(self) -> None:
        get_error_handler().initialize()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> Literal[False]:
        if isinstance(error, SystemExit) and error.code:
            program_end.has_failed = True
        if kind is None or error is None or not isinstance(error, Exception):
            return False
        ours = {__file__, runpy.run_module.__code__.co_filename}
        while where is not None and where.tb_frame.f_code.co_filename in ours:
            where = where.tb_next
        error.__traceback__ = where
        with contextlib.suppress(OSError):
            get_error_handler().record_exception(error)
        sys.excepthook(kind, error, where)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
