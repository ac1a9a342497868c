"""Real ranks for tests: forked from a server that has imported torch and this package, with a deadline and a log each.

    results = run_ranks(train, world_size=4, num_steps=10)     # results[r] is what train returned on rank r

Every rank finds torchrun's variables in its environment and a store at MASTER_ADDR:MASTER_PORT that the
test process hosts. A rank that fails, dies or outlives the deadline fails the test with the tail of every rank's log;
no process is left behind.
"""

import ctypes
import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import torch.distributed as dist

_context = multiprocessing.get_context("forkserver")


def start_fork_server() -> None:
    """Start the process that ranks are forked from, unless it runs.

    A process has one, which imports what the last caller said, and what it does not find it leaves out without a word.
    """
    _context.set_forkserver_preload(["preloaded"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parent), before)))
    forkserver.ensure_running()
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


class RanksFailed(AssertionError):
    """At least one rank raised, died or did not end in time."""


def run_ranks(
    fn: Callable[..., Any],
    *args: Any,
    world_size: int,
    timeout_s: float = 90.0,
    environ: Mapping[str, str] | None = None,
    nodes: int = 1,
    **kwargs: Any,
) -> list[Any]:
    """Call `fn(*args, **kwargs)` in `world_size` processes and return their results, ordered by rank."""
    module = sys.modules.get(fn.__module__)
    if module is not None and not fn.__module__.startswith(("torch", "hyperpod_plugins")):
        cloudpickle.register_pickle_by_value(module)
    source = getattr(module, "__file__", None) if module is not None else None
    payload = cloudpickle.dumps((fn, args, kwargs))
    start_fork_server()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        logs = [Path(folder) / f"rank{rank}.log" for rank in range(world_size)]
        pipes = [_context.Pipe(duplex=False) for _ in range(world_size)]
        per_node = world_size // nodes
        workers = []
        for rank in range(world_size):
            variables = {
                "RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_RANK": str(rank % per_node),
                "LOCAL_WORLD_SIZE": str(per_node),
                "GROUP_RANK": str(rank // per_node),
                "NODE_RANK": str(rank // per_node),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RUN_ID": "test",
                "TORCHELASTIC_RESTART_COUNT": "0",
                "OMP_NUM_THREADS": "1",
                **(environ or {}),
            }
            worker = _context.Process(
                target=_rank_main,
                args=(payload, (fn.__module__, source), variables, str(logs[rank]), pipes[rank][1], timeout_s),
                daemon=True,
            )
            worker.start()
            pipes[rank][1].close()
            workers.append(worker)
        try:
            return _collect(workers, [reader for reader, _ in pipes], logs, timeout_s)
        finally:
            for worker in workers:
                if worker.is_alive():
                    worker.kill()
                worker.join(10)
            for reader, _ in pipes:
                reader.close()


def _collect(workers: list[Any], readers: list[Any], logs: list[Path], timeout_s: float) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    waiting = dict(enumerate(readers))
    while waiting and not failures:
        ready = wait(list(waiting.values()), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            failures |= {rank: f"did not end within {timeout_s} s" for rank in waiting}
        for rank in [rank for rank, reader in waiting.items() if reader in ready]:
            try:
                is_ok, value = cloudpickle.loads(waiting.pop(rank).recv_bytes())
            except EOFError:
                workers[rank].join(5)
                is_ok, value = False, f"died with exit code {workers[rank].exitcode}"
            (results if is_ok else failures)[rank] = value
    if not failures:
        for rank, worker in enumerate(workers):
            worker.join(max(0.1, deadline - time.monotonic()))
            if worker.exitcode != 0:
                failures[rank] = f"returned, then ended with exit code {worker.exitcode}"
    if failures:
        time.sleep(0.2)  # the other ranks' last words
        tails = "\n".join(f"--- log of rank {r} ---\n{_tail(log)}" for r, log in enumerate(logs))
        causes = "\n".join(f"rank {r}: {why}" for r, why in sorted(failures.items()))
        raise RanksFailed(f"{causes}\n{tails}")
    return [results[rank] for rank in sorted(results)]


def _tail(log: Path, num_bytes: int = 6000) -> str:
    return log.read_bytes()[-num_bytes:].decode(errors="replace") if log.exists() else "(no log)"


def _rank_main(
    payload: bytes,
    test_module: tuple[str, str | None],
    variables: dict[str, str],
    log: str,
    pipe: Any,
    timeout_s: float,
) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: die with the fork server
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    faulthandler.dump_traceback_later(0.9 * timeout_s)  # where each thread is, of a rank that hangs
    os.environ.update(variables)
    import torch

    name, source = test_module
    if source is not None and name not in sys.modules:  # its classes came by value; the package reads their source
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__file__ = source
    torch.set_num_threads(1)
    try:
        fn, args, kwargs = cloudpickle.loads(payload)
        outcome = (True, fn(*args, **kwargs))
        message = cloudpickle.dumps(outcome)
    except BaseException:
        message = cloudpickle.dumps((False, traceback.format_exc()))
    pipe.send_bytes(message)
    pipe.close()
    sys.stdout.flush()
    sys.stderr.flush()
    if dist.is_initialized():
        dist.destroy_process_group()
