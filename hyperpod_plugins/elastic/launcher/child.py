"""Run the program in a forked child as if a fresh interpreter had started it."""

import builtins
import contextlib
import os
import pkgutil
import runpy
import signal
import sys
from collections.abc import Iterable
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType
from typing import Literal

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from hyperpod_plugins.elastic.launcher.fork_client import SpawnRequest
from hyperpod_plugins.elastic.process import program_end


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
