"""The launcher with real workers: tiny scripts that know the job store and nothing else of this package."""

import importlib.util
import json
import math
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from unittest.mock import create_autospec

import pytest
from launched import Job
from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
from torch.distributed.elastic.rendezvous import RendezvousHandler

from hyperpod_plugins.elastic import JobStore
from hyperpod_plugins.elastic.launcher.main import get_parser, modules_to_preload, program_of, use_local_rendezvous
from hyperpod_plugins.elastic.launcher.round import worker_environ
from hyperpod_plugins.elastic.membership.restart_policy import GAVE_UP, RestartBudget, RestartPolicy, WorkerExit
from hyperpod_plugins.env import JobEnv
from hyperpod_plugins.errors import ConfigError, NotBuiltYetError
from hyperpod_plugins.recovery.protocols import StepFailed


@pytest.fixture(autouse=True)
def started_by_exec(monkeypatch):
    monkeypatch.setattr(Job, "is_warm", False)


@pytest.fixture
def is_forked(monkeypatch):
    """For tests of what an agent decides, however it was started."""
    monkeypatch.setattr(Job, "is_warm", True)


def initial_ranks(count):
    return [(rank, 0) for rank in range(count)]


@pytest.mark.spawns
def test_only_the_lost_worker_is_replaced(launch, tmp_path):
    logs = tmp_path / "logs"
    job = launch("wait('finish')", "--nproc-per-node=4", f"--log-dir={logs}", "--tee=3")
    pids = job.await_here(*initial_ranks(4))
    job_store = job.job_store()
    for pid in pids.values():  # `ps` and `pgrep -f` show what it runs
        assert f"{job.mark}.py" in Path(f"/proc/{pid}/cmdline").read_text()

    os.kill(pids[2, 0], signal.SIGKILL)
    job.await_here((2, 1))
    assert job_store.incarnations(range(4)) == [0, 0, 1, 0]
    assert job_store.exit_of(2, 0).cause == "killed by SIGKILL"
    ended = job_store.ended(0)
    assert (ended.kind, ended.worker_id, ended.incarnation, ended.reporter) == ("process", 2, 0, "agent of node 0")

    os.kill(pids[1, 0], signal.SIGKILL)  # generation 1 has not been formed, so there is nothing to end
    job.await_here((1, 1))
    assert job_store.exit_of(1, 0) is not None
    assert job_store.generation() == 1
    job_store.propose(1, {})
    os.kill(pids[0, 0], signal.SIGKILL)
    job.await_here((0, 1))
    assert job_store.ended(1).worker_id == 0
    assert job_store.generation() == 2

    job_store.ask_to_kill(3, 0)
    now = job.await_here((3, 1))
    job_store.ask_to_kill(3, 0)  # it is gone already
    job_store.ask_to_kill(2, 0)
    os.kill(job.agent.pid, signal.SIGUSR1)
    job.await_(lambda: len(job.said("noticed")) == 4)
    assert set(job.said("noticed")) == {(rank, 1) for rank in range(4)}
    assert job.await_here((2, 1), (3, 1)) == now
    assert job_store.incarnations(range(4)) == [1, 1, 1, 1]

    job_store.set("finish", b"1")
    assert job.code() == 0, job.text()
    job.await_nobody()
    [attempt] = logs.glob("*/attempt_0")
    for rank in range(4):
        first, second = (
            (attempt / str(rank) / each).read_text() for each in ("stdout.log", "incarnation_1/stdout.log")
        )
        assert (first.count("@"), second.count("@")) == (1, 2)
        assert f"@ {rank} 0 here {pids[rank, 0]}" in first
        assert f"@ {rank} 1 noticed" in second
        assert all(f"[default{rank}]:{line}\n" in job.text() for line in (first + second).splitlines())


@pytest.mark.spawns
def test_a_script_that_fails_ends_the_job_with_its_traceback_on_top(launch, tmp_path):
    job = launch(
        """
        def train():
            raise ValueError("it broke")
        if rank == 1:
            train()
        signal.signal(signal.SIGTERM, lambda *_: (say("stopped"), sys.exit(0)))
        wait("never")
        """,
        "--nproc-per-node=2",
        environ={"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")},
    )
    assert job.code() == 1
    text = job.text()
    assert set(job.said()) == {(0, 0), (1, 0), (1, 1), (1, 2)}  # three attempts
    assert (0, 0) in job.said("stopped")
    traceback = text.rindex("Rank 1 failed first:\n\nTraceback (most recent call last):\n")
    assert traceback < text.rindex("ValueError: it broke") < text.rindex("=====")
    assert "exit code 1 (ValueError: it broke); it is not replaced, for it failed 3 times in a row" in text
    assert "launch.py" not in text[traceback:]
    handed_on = json.loads((tmp_path / "error.json").read_text())  # for whoever launched the launcher
    assert handed_on["message"]["message"] == "ValueError: it broke"
    job.await_nobody()


@pytest.mark.usefixtures("is_forked")
@pytest.mark.spawns
def test_a_worker_that_gave_up_is_not_replaced(launch):
    job = launch(
        f"""
        if rank == 1:
            print("the same step failed thrice", file=sys.stderr)
            sys.exit({GAVE_UP})
        wait("never")
        """,
        *("--nproc-per-node=2", "--redirects=2"),
    )
    assert job.code() == 1
    text = job.text()
    assert set(job.said()) <= {(0, 0), (1, 0)}
    assert text.index("the job ends: worker 1 (process): exit code 65") < text.index("Rank 1 failed first")
    assert "the same step failed thrice" in text[text.index("Rank 1 failed first") :]
    job.await_nobody()


@pytest.mark.usefixtures("is_forked")
@pytest.mark.spawns
def test_a_program_that_takes_no_part_in_recovery_ends_with_its_first_loss(launch):
    script = "time.sleep(0.2 if rank else 60)\nos.kill(os.getpid(), signal.SIGKILL)"
    job = launch(script, "--nproc-per-node", "2", environ={"UNARMED": "1"})
    assert job.code() == 1
    assert "takes part in recovery" in job.text()
    assert "start again" not in job.text()


@pytest.mark.usefixtures("is_forked")
@pytest.mark.spawns
def test_replacements_are_limited(launch):
    job = launch("os.kill(os.getpid(), signal.SIGKILL)", "--max-restarts=1")
    assert job.code() == 1
    assert set(job.said()) == {(0, 0), (0, 1)}
    assert "it was replaced 1 times, and --max-restarts allows no more" in job.text()


@pytest.mark.usefixtures("is_forked")
@pytest.mark.spawns
def test_a_worker_that_fails_after_all_others_have_finished_is_not_replaced(launch):
    job = launch(
        """
        if rank == 0:
            wait("agent/finished/1")
            sys.exit(9)
        """,
        "--nproc-per-node=2",
    )
    assert job.code() == 1
    assert "all others have finished" in job.text()
    assert set(job.said()) == {(0, 0), (1, 0)}


SIGTERM_SCRIPT = """
def leave(*_):
    time.sleep(0.3)
    say("left")
    sys.exit(0)
signal.signal(signal.SIGTERM, leave if rank == 0 else signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
if os.fork() == 0:  # such as a data loader
    time.sleep(60)
say("ready")
time.sleep(60)
"""


@pytest.mark.spawns
def test_sigterm_is_passed_on_and_then_enforced(launch):
    job = launch(SIGTERM_SCRIPT, "--nproc-per-node=2", "--shutdown-timeout=1")
    job.await_(lambda: len(job.said("ready")) == 2)
    began_s = time.monotonic()
    job.agent.send_signal(signal.SIGTERM)
    assert job.code() == 128 + signal.SIGTERM
    assert time.monotonic() - began_s > 1
    assert set(job.said("left")) == {(0, 0)}
    job.await_nobody(timeout_s=2)


@pytest.mark.spawns
def test_sigterm_ends_a_node_that_waits_for_others(launch):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        endpoint = f"localhost:{free.getsockname()[1]}"
    job = launch("", "--nnodes=2", f"--rdzv-endpoint={endpoint}")
    job.await_(lambda: len(job.processes()) == 2)  # agent and fork server: it has its handlers
    time.sleep(1.0)
    job.agent.send_signal(signal.SIGTERM)
    assert job.code() == 128 + signal.SIGTERM
    assert "Traceback" not in job.text()
    job.await_nobody()


@pytest.mark.spawns
def test_a_second_interrupt_ends_everything_at_once(launch):
    job = launch(SIGTERM_SCRIPT, "--nproc-per-node=2", "--shutdown-timeout=120")
    job.await_(lambda: len(job.said("ready")) == 2)
    job.agent.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert job.agent.poll() is None
    job.agent.send_signal(signal.SIGINT)
    assert job.code(timeout_s=20) == 128 + signal.SIGINT, job.text()
    job.await_nobody(timeout_s=2)


@pytest.mark.spawns
def test_nothing_outlives_a_killed_agent(launch):
    job = launch("wait('never')", "--nproc-per-node=2")
    job.await_here(*initial_ranks(2))
    assert len(job.processes()) == 4  # agent, fork server, two workers
    job.agent.kill()
    job.await_nobody(timeout_s=2)


@pytest.mark.spawns
def test_a_killed_fork_server_costs_the_workers_of_its_node_and_not_the_job(launch):
    job = launch("wait('finish')", "--nproc-per-node=2")
    pids = job.await_here(*initial_ranks(2))
    [fork_server] = {int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in pids.values()}
    os.kill(fork_server, signal.SIGKILL)
    job.await_here((0, 1), (1, 1))
    job.job_store().set("finish", b"1")
    assert job.code() == 0, job.text()


def meeting_point():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free.getsockname()[1]}", "--rdzv-id=two"


def two_nodes(launch, script):
    options = ("--nnodes=2", "--nproc-per-node=2", *meeting_point())
    return [launch(script, *options) for _ in range(2)]


@pytest.mark.usefixtures("is_forked")
@pytest.mark.spawns
def test_other_nodes_go_on_until_all_are_done(launch):
    nodes = two_nodes(launch, "wait('finish')")
    for job in nodes:
        job.await_(lambda job=job: len(job.said()) == 2)
    nodes.sort(key=lambda job: min(job.said()))
    first, second = nodes
    pids = {**first.await_here((0, 0), (1, 0)), **second.await_here((2, 0), (3, 0))}
    job_store = first.job_store()
    os.kill(pids[3, 0], signal.SIGKILL)
    second.await_here((3, 1))
    assert job_store.ended(0).reporter == "agent of node 1"
    assert set(first.said()) == {(0, 0), (1, 0)}
    job_store.set("finish", b"1")
    assert [job.code() for job in nodes] == [0, 0], first.text() + second.text()


@pytest.mark.usefixtures("is_forked")
@pytest.mark.spawns
@pytest.mark.parametrize("failing", [0, 3])
def test_other_nodes_stop_with_one_that_gave_up(launch, failing):
    nodes = two_nodes(launch, f"if rank == {failing}: sys.exit(65)\nwait('never')")
    assert [job.code() for job in nodes] == [1, 1]
    for job in nodes:
        assert f"the job ends: worker {failing} (process): exit code 65" in job.text(), job.text()
        job.await_nobody()


@pytest.mark.spawns
def test_a_node_that_joins_a_running_c10d_rendezvous_makes_all_start_again(launch, tmp_path):
    """torch's way for programs that cannot grow in place; its own joiners wait in vain (torch 2.13)."""
    options = ("--nnodes=1:2", "--rdzv-conf=last_call_timeout=1", *meeting_point(), f"--log-dir={tmp_path}")
    script = "say('of', os.environ['WORLD_SIZE'], job_store.generation())\nwait('finish')"
    first = launch(script, *options)
    first.await_(lambda: first.said("of") == {(0, 0): ["1", "0"]})
    os.kill(first.await_here((0, 0))[0, 0], signal.SIGKILL)
    first.await_here((0, 1))
    second = launch(script, *options)
    first.await_(lambda: ["2", "0"] in first.said("of").values())  # a new job store, in which nothing has happened
    second.await_(lambda: ["2", "0"] in second.said("of").values())
    store, run_id = next(iter(second.said().values()))[-2:]
    JobStore.connect(JobEnv.from_environ({"HYPERPOD_STORE": store, "HYPERPOD_RUN_ID": run_id})).set("finish", b"1")
    assert [first.code(), second.code()] == [0, 0], first.text() + second.text()


@pytest.mark.spawns
def test_workers_find_the_environment_that_torchrun_would_give_them(launch, tmp_path):
    script = """
        import json
        (path := f"{os.environ['OUT']}.{rank}") and open(path, "w").write(json.dumps(dict(os.environ)))
    """
    options = ("--nproc-per-node=2", "--standalone")
    job = launch(script, *options, "--max-restarts=3", environ={"OUT": str(tmp_path / "ours")})
    path = tmp_path / "plain.py"
    path.write_text("import os\nrank = os.environ['RANK']\n" + textwrap.dedent(script))
    environ = {**os.environ, "JOB_MARK": job.mark, "OMP_NUM_THREADS": "1", "OUT": str(tmp_path / "theirs")}
    command = [sys.executable, "-m", "torch.distributed.run", *options, "--max-restarts=3", str(path)]
    subprocess.run(command, env=environ, timeout=150, check=True, capture_output=True, cwd=tmp_path)
    assert job.code() == 0, job.text()
    for rank in range(2):
        ours, theirs = (json.loads((tmp_path / f"{whose}.{rank}").read_text()) for whose in ("ours", "theirs"))
        for environ in (ours, theirs):
            for name in ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "OUT"):
                assert environ.pop(name)
            environ.pop("TORCHELASTIC_SIGNALS_TO_HANDLE", None)  # torchrun's note to its own agent
        assert {name: ours.pop(name) for name in [*ours] if name.startswith("HYPERPOD_")}.keys() == {
            *("HYPERPOD_STORE", "HYPERPOD_RUN_ID", "HYPERPOD_INCARNATION", "HYPERPOD_RESUME_FROM", "HYPERPOD_DEGREES"),
            "HYPERPOD_SNAPSHOTS",
        }
        for name in ("RES_OPTIONS", "TORCH_NCCL_ASYNC_ERROR_HANDLING"):  # ours on purpose, see worker_environ.py
            ours.pop(name, None), theirs.pop(name, None)
        assert ours == theirs


@pytest.mark.spawns
def test_other_programs_and_missing_modules(launch, tmp_path):
    shell = tmp_path / "run.sh"
    shell.write_text('#!/bin/sh\necho "@ $RANK $HYPERPOD_INCARNATION $1"\n')
    shell.chmod(0o755)
    command = [
        sys.executable,
        "-m",
        "hyperpod_plugins.elastic.launcher.main",
        "--no-python",
        str(shell),
        "${local_rank}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "@ 0 0 0\n"
    job = launch("", "--preload", "antigravity_")
    assert job.code() == 1
    assert "--preload names 'antigravity_'" in job.text()
    assert "Traceback" not in job.text()


# -- pure -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "ends", "replaced"),
    [
        # ends: (code, uptime in s, clock in s), and the error
        (RestartPolicy(), [(-9, 1, t) for t in range(101)], [True] * 100 + [False]),
        (RestartPolicy(max_restarts=0), [(-9, 1, 0)], [False]),
        (RestartPolicy(max_restarts=1, window_s=10), [(-9, 1, 0), (-9, 1, 11), (-9, 1, 20)], [True, True, False]),
        (RestartPolicy(), [(GAVE_UP, 1000, 0)], [False]),
        (RestartPolicy(), [(1, 1, 0), (1, 1, 1), (1, 1, 2)], [True, True, False]),
        (RestartPolicy(), [(-11, 1, 0), (1, 1, 1), (-6, 1, 2)], [True, True, False]),
        (RestartPolicy(), [(1, 1, 0), (1, 1, 1), (1, 61, 2), (1, 1, 3)], [True] * 4),  # the third had come further
        (RestartPolicy(), [(1, 1, 0), (1, 1, 1), (-9, 1, 2), (1, 1, 3)], [True] * 4),  # the third was killed by others
        (RestartPolicy(), [(-15, 1, t) for t in range(9)], [True] * 9),
        (RestartPolicy(), [(1, 1, t, "PeerLost: it ended with another") for t in range(9)], [True] * 9),
        (RestartPolicy(), [(1, 1, t, f"{StepFailed.__name__}: ValueError") for t in range(3)], [True, True, False]),
    ],
)
def test_budget(policy, ends, replaced):
    budget, found = RestartBudget(policy), []
    for code, uptime_s, now_s, *error in ends:
        loss = WorkerExit(code=code, error="".join(error), is_armed=True, has_begun=True, uses_recovery=True)
        found.append(budget.why_not_replace(loss, uptime_s, now_s) is None)
    assert found == replaced


@pytest.mark.parametrize("wrong", [{"max_restarts": -1}, {"window_s": 0}, {"window_s": math.nan}])
def test_impossible_policies_are_refused(wrong):
    with pytest.raises(ConfigError, match="--max-restarts"):
        RestartPolicy(**wrong)


@pytest.mark.parametrize(("visible", "device"), [(None, "1"), ("4, 6", "6"), ("GPU-a,GPU-b,GPU-c", "GPU-b")])
def test_virtual_local_rank(visible, device):
    spec = WorkerSpec(role="r", local_world_size=2, rdzv_handler=create_autospec(RendezvousHandler), entrypoint="x")
    group = WorkerGroup(spec)
    job = JobEnv(store_host="h", store_port=1, run_id="j")
    inherited = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    options = {"num_rounds": 0, "max_restarts": 1, "virtual": True}
    environ = worker_environ(group, group.workers[1], job, inherited, **options)
    assert (environ["LOCAL_RANK"], environ["CUDA_VISIBLE_DEVICES"]) == ("0", device)
    with pytest.raises(ConfigError, match="one GPU a worker"):
        worker_environ(group, group.workers[1], job, {"CUDA_VISIBLE_DEVICES": "7"}, **options)


def test_arguments(monkeypatch):
    args = get_parser().parse_args(["--nproc-per-node", "4", "train.py", "--max-restarts", "7"])
    assert (args.max_restarts, args.restart_window) == (100, math.inf)
    assert program_of(args).args == ("--max-restarts", "7")
    use_local_rendezvous(args)
    assert (args.rdzv_backend, args.rdzv_endpoint) == ("hyperpod", "localhost:0")
    monkeypatch.setenv("PET_MAX_RESTARTS", "0")
    assert get_parser().parse_args(["train.py"]).max_restarts == 0
    args = get_parser().parse_args(["--nnodes=2", "--master-addr=a", "train.py"])
    use_local_rendezvous(args)
    assert (args.rdzv_backend, args.master_port) == ("static", 29500)
    for options, backend in (
        (["--nnodes=2", "--rdzv-endpoint=a:1"], "hyperpod"),
        (["--nnodes=1:4", "--rdzv-endpoint=a:1"], "hyperpod"),
        (["--nnodes=2", "--rdzv-endpoint=a:1", "--rdzv-backend=c10d"], "c10d"),
        (["--nnodes=2", "--rdzv-endpoint=a:1", "--rdzv-backend=static"], "static"),
        (["--nnodes=1", "--rdzv-endpoint=a:1"], "static"),
        (["--nnodes=2"], "static"),
        (["--standalone"], "hyperpod"),
    ):
        args = get_parser().parse_args([*options, "train.py"])
        use_local_rendezvous(args)
        assert args.rdzv_backend == backend, options
    with pytest.raises(ConfigError, match="--no-python and --module"):
        program_of(get_parser().parse_args(["--no-python", "--module", "train"]))


@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="needs Lightning under both names")
def test_preload_names(monkeypatch):
    assert modules_to_preload("") == ()
    assert modules_to_preload("json, numpy,json") == ("json", "numpy")
    assert modules_to_preload("default,json")[-3:] == ("lightning.pytorch", "hyperpod_plugins.lightning", "json")
    with pytest.raises(ConfigError, match="'nowhere_to_be'"):
        modules_to_preload("default,nowhere_to_be")
    find_spec = importlib.util.find_spec
    for hidden, last in (("lightning", "pytorch_lightning"), ("lightning pytorch_lightning", "numpy")):
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, hidden=hidden: None if name in hidden.split() else find_spec(name)
        )
        assert [name for name in modules_to_preload("default") if "plugins" not in name][-1] == last
        assert ("hyperpod_plugins.lightning" in modules_to_preload("default")) == (last != "numpy")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        *((f"--nproc-per-node={wrong}", "--nproc-per-node=" + wrong) for wrong in ("0", "-1")),
        ("--nproc-per-node=two", "two"),
        *((f"--nnodes={wrong}", f"--nnodes={wrong}") for wrong in ("2:1", "a:b", "0", "1:")),
        ("--max-restarts=-1", "--max-restarts=-1"),
        ("--shutdown-timeout=-1", "--shutdown-timeout=-1"),
        ("--rdzv-backend=carrier-pigeon --rdzv-endpoint=a:1", "carrier-pigeon"),
        ("--rdzv-conf=a=b,c", "'c' is not NAME=VALUE"),
        ("--rdzv-backend=hyperpod --rdzv-endpoint=localhost:0 --rdzv-conf=is_host=maybe", "maybe"),
        ("--rdzv-backend=hyperpod --rdzv-endpoint=localhost:99999", "99999"),
        ("--signals-to-handle=FOO", "'FOO'"),
        ("--log-dir=/dev/null/logs", "--log-dir=/dev/null/logs"),
    ],
)
def test_impossible_arguments_end_with_code_2_and_say_why(options, said, capfd):
    from hyperpod_plugins.elastic.launcher.main import main

    assert main([*options.split(), "train.py"]) == 2
    told = capfd.readouterr().err
    assert said in told
    assert "Traceback" not in told


def test_numa_binding_is_refused_rather_than_ignored():
    from hyperpod_plugins.elastic.launcher.main import run

    with pytest.raises(NotBuiltYetError, match="--numa-binding=node"):
        run(get_parser().parse_args(["--numa-binding=node", "train.py"]))
