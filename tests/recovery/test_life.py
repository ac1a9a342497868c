"""A program that does more than one fit or loop: whoever dies wherever in it, it ends as if nothing had happened."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import warm
from recovery.test_in_place import PRELOAD
from torch._C._distributed_c10d import HashStore

from hyperpod_plugins.comm import group_health
from hyperpod_plugins.comm.runtime import runtime
from hyperpod_plugins.elastic import JobStore
from hyperpod_plugins.elastic.membership.admission import publish_initial_world, uses_recovery
from hyperpod_plugins.elastic.membership.restart_policy import (
    GAVE_UP,
    NOT_NEEDED,
    ExitAction,
    JobRestart,
    JobRestartBudget,
    RestartBudget,
    RestartPolicy,
    WorkerExit,
)
from hyperpod_plugins.elastic.store.entry_records import (
    EndedEntry,
    EntryRecords,
    ended_entries,
    existing_folder,
    folder_for,
    new_folder_name,
    record_end,
    restart_from_newest,
)
from hyperpod_plugins.elastic.store.job_store import RESTART_KEY
from hyperpod_plugins.elastic.store.loop_exits import LoopExit, LoopExits
from hyperpod_plugins.elastic.store.records import FailureRecord
from hyperpod_plugins.elastic.store.world import WorldPlan
from hyperpod_plugins.env import JobEnv
from hyperpod_plugins.errors import CheckpointDamaged, ConfigError, RecoveryError
from hyperpod_plugins.recovery import restart_all
from hyperpod_plugins.recovery.engine import RecoveryEngine
from hyperpod_plugins.recovery.entries import Entries, invisible_workers, load_entry_values, save_entry_values
from hyperpod_plugins.recovery.restart_all import SavedCheckpoints
from hyperpod_plugins.recovery.watchdog import HangPolicy

TRAINER = """
    kill:1:script:0 kill:2:first-validate:1 kill:0:first-setup-TrainerFn.FITTING:0 raise:2:first-sanity:0
    kill:3:first-step:3 kill:1:first-train-end:0 kill:0:between:0 crash:2:first-test:1 kill:3:first-predict:1
    kill:2:first-step:8 kill:1:export:0 kill:0:second-step:3 kill:3:end:0
"""
SESSION = """
    2:made:0 0:first:3 3:first-tail:4 1:before-second:0 2:second:3 0:second-tail:1 1:evaluation-one:0
    2:third:3 1:after-third:0 3:evaluation-two:0 0:end:0
"""
JOB = JobEnv(run_id="test", store_host="localhost", store_port=1)
LOST = FailureRecord(kind="process", cause="killed by SIGKILL")


HYPERPODRUN = ("hyperpod_plugins.elastic.launcher.main", "--preload", PRELOAD)
TORCHRUN = ("torch.distributed.run", "--rdzv-backend=hyperpod", "--rdzv-endpoint=localhost:0", "--max-restarts=9")


def run(program, folder, faults, timeout_s, num_nodes=1, launcher=HYPERPODRUN):
    """Run a job of four ranks and return its exit code and what it printed; whatever happens, no process is left."""
    name, *options = *launcher, "--nproc-per-node", str(4 // num_nodes)
    if num_nodes > 1:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            options += ["--nnodes", str(num_nodes), "--rdzv-endpoint", f"localhost:{free.getsockname()[1]}"]
    options += [str(Path(__file__).with_name(program)), str(folder), faults]
    if name == HYPERPODRUN[0]:
        with ThreadPoolExecutor(num_nodes) as pool:
            ended = [*pool.map(lambda _: warm.run(options, timeout_s), range(num_nodes))]
        codes = [code for code, _ in ended]
        return None if None in codes else max(codes), "".join(text for _, text in ended)
    command, environ = [sys.executable, "-m", name, *options], {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as out:
        agent = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env=environ)
        code = None
        try:
            code = agent.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(agent.pid, signal.SIGKILL)
            agent.wait(10)
        out.seek(0)
        return code, out.read()


def results(program, folder, faults, timeout_s=240, **options):
    folder.mkdir()
    code, text = run(program, folder, faults, timeout_s, **options)
    assert code == 0, text[-8000:]
    found = [Path(folder, f"rank{rank}.json").read_text().replace(str(folder), "FOLDER") for rank in range(4)]
    return [json.loads(each) for each in found], text


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The results of a program without faults."""
    return cache(lambda program: results(program, tmp_path_factory.mktemp("life") / program, "")[0])


@pytest.mark.spawns
@pytest.mark.parametrize(
    ("program", "faults"),
    [
        pytest.param("program_life.py", " ".join(TRAINER.split()), id="trainer"),
        pytest.param("program_session_life.py", " ".join(SESSION.split()), id="session"),
    ],
)
def test_ranks_that_are_lost_in_all_parts_of_a_program(program, faults, undisturbed, tmp_path):
    disturbed, text = results(program, tmp_path / "disturbed", faults)
    assert disturbed == undisturbed(program)
    assert len(list((tmp_path / "disturbed").glob("done-*"))) == len(faults.split())
    assert "takes its place" in text
    assert not list(tmp_path.rglob("hyperpod-ended-*"))  # removed at the job's end


@pytest.mark.spawns
@pytest.mark.parametrize(
    ("program", "faults"),
    [
        pytest.param("program_life.py", "crash:2:first-test:1 kill:3:second-step:3", marks=pytest.mark.variant),
        ("program_session_life.py", "1:before-second:0 2:second:3"),
    ],
    ids=["trainer", "session"],
)
def test_calls_that_have_ended_are_not_run_again_under_torchrun(program, faults, undisturbed, tmp_path):
    disturbed, _ = results(program, tmp_path / "disturbed", faults, launcher=TORCHRUN)
    assert disturbed == undisturbed(program)
    assert len(list((tmp_path / "disturbed").glob("done-*"))) == len(faults.split())
    places = (tmp_path / "disturbed" / "places-0").read_text().split("\n")
    assert places.count("first-step 0") + places.count("first 0") == 1
    assert not list(tmp_path.rglob("hyperpod-ended-*"))


@pytest.mark.spawns
def test_a_node_that_is_done_starts_again_with_one_that_is_not(tmp_path):
    undisturbed, _ = results("program_life.py", tmp_path / "undisturbed", "", num_nodes=2)
    disturbed, text = results("program_life.py", tmp_path / "disturbed", "late:3:end:0", num_nodes=2)
    assert disturbed == undisturbed
    assert "killed by SIGKILL" in text
    assert not list(tmp_path.rglob("hyperpod-ended-*"))


@pytest.mark.spawns
def test_a_mistake_outside_of_steps_ends_the_job_after_a_second_attempt(tmp_path):
    code, text = run("program_life.py", tmp_path, "always:1:before-fit:0", timeout_s=100)
    assert code == 1
    # Which process an agent hears of first is chance; one that failed because another ended is not blamed.
    ended = ("it failed by itself 2 times at the same place", "all processes were started again 3 times from step 0")
    assert any(why in text for why in ended)
    assert "RuntimeError: fault at before-fit 0" in text[text.index("Rank 1 failed first") :]


@pytest.mark.parametrize(
    ("loss", "exit_action"),
    [
        pytest.param({"code": -9, "is_armed": True, "has_begun": True}, ExitAction.REPLACE, id="in a step"),
        pytest.param({"code": -9, "is_armed": True}, ExitAction.REPLACE, id="in the sanity check"),
        pytest.param({"code": 1, "is_armed": True, "has_begun": True}, ExitAction.REPLACE, id="exception after a step"),
        pytest.param({"code": 1, "is_armed": True}, ExitAction.RESTART_ALL, id="exception before the first step"),
        pytest.param({"code": -9}, ExitAction.RESTART_ALL, id="outside of a fit"),
        pytest.param({"code": -9, "uses_recovery": False}, ExitAction.END, id="killed in a program that takes no part"),
        pytest.param({"code": -11, "uses_recovery": False}, ExitAction.END, id="crash of a program that takes no part"),
        pytest.param(
            {"code": 1, "uses_recovery": False}, ExitAction.END, id="exception of a program that takes no part"
        ),
        pytest.param({"code": 1, "error": "ConfigError: no"}, ExitAction.END, id="refused"),
        pytest.param({"code": 1, "error": "DatasetChanged: no"}, ExitAction.END, id="refuses the data"),
        pytest.param({"code": 1, "error": "NonFiniteError: no"}, ExitAction.END, id="not finite"),
        pytest.param({"code": 1, "error": "RehearsalFailed: no"}, ExitAction.END, id="rehearsal"),
        pytest.param({"code": 1, "error": "ConfigErrors: no"}, ExitAction.RESTART_ALL, id="an error of the program"),
        pytest.param(
            {"code": 1, "error": "KeyError: no", "has_left_loop": True, "is_armed": True, "has_begun": True},
            ExitAction.REPLACE,
            id="raised in a loop's body",
        ),
        pytest.param(
            {"code": 1, "error": "LoopError: no", "has_left_loop": True, "is_armed": True, "has_begun": True},
            ExitAction.END,
            id="refused in a loop's body",
        ),
        pytest.param(
            {"code": 1, "error": "KeyError: no", "has_left_loop": True},
            ExitAction.RESTART_ALL,
            id="raised by all ranks",
        ),
        pytest.param({"code": -9, "can_all_start": False}, ExitAction.END, id="another node has ended"),
        pytest.param({"code": -9, "is_needed": False}, ExitAction.END, id="one that waited"),
        pytest.param({"code": -9, "may_restart": False}, ExitAction.END, id="no restarts"),
        pytest.param({"code": GAVE_UP}, ExitAction.REPLACE, id="gave up"),
        pytest.param({"code": NOT_NEEDED}, ExitAction.REPLACE, id="not needed"),
    ],
)
def test_exit_actions(loss, exit_action):
    assert (
        WorkerExit(**{"is_armed": False, "has_begun": False, "uses_recovery": True, **loss}).exit_action is exit_action
    )


@pytest.mark.parametrize(
    ("code", "error", "is_own"),
    [(-9, "", False), (-11, "", True), (1, "ValueError: x", True), (1, "PeerLost: y", False), (1, "", True)],
)
def test_whose_fault_it_is(code, error, is_own):
    assert (
        WorkerExit(code=code, error=error, is_armed=False, has_begun=False, uses_recovery=True).is_own_fault is is_own
    )


def test_restarts_are_counted_by_place():
    budget = JobRestartBudget()
    for entry, step, is_own, is_refused in [
        (0, 0, True, False),
        (0, 0, False, False),
        (0, 0, True, True),
        (1, 0, True, False),
        (1, 5, True, False),
        (1, 5, False, False),
        (1, 5, False, False),
        (1, 5, False, True),
    ]:
        restart = JobRestart(failure=LOST, entry=entry, step=step, is_own_fault=is_own)
        assert (budget.why_not_restart(restart) is not None) is is_refused, (entry, step)


def test_loops_that_were_left():
    job_store = JobStore.from_store("job", HashStore())
    of = {"entry": 1, "committed": 4, "generation": 2}
    first, second = (LoopExit(worker_id=each, incarnation=0, **of) for each in (0, 1))
    loop_exits = LoopExits(job_store, 1)
    assert loop_exits.present() == {}
    first.publish(job_store)
    assert loop_exits.present() == {0: first}
    assert not loop_exits.have_all_left(2, [0, 1])
    assert job_store.next_incarnation(0) == 1  # the process has ended, and is replaced
    assert loop_exits.present() == {}
    assert LoopExit.of_process(job_store, 0, 0) == first
    assert LoopExit.of_process(job_store, 0, 1) is None
    second.publish(job_store)
    assert loop_exits.have_all_left(2, [0, 1])  # all that were part of that generation
    assert not loop_exits.have_all_left(3, [0, 1])
    assert not LoopExits(job_store, 0).have_all_left(2, [0, 1])
    assert loop_exits.present() == {1: second}


def test_each_record_of_a_loop_that_was_left_is_read_once(monkeypatch):
    job_store, read = JobStore.from_store("job", HashStore()), []
    try_get_all = job_store.try_get_all
    monkeypatch.setattr(job_store, "try_get_all", lambda names: read.append(len(names)) or try_get_all(names))
    loop_exits = LoopExits(job_store, 0)
    job_store.count("left_early/0", 1)  # its writer is lost before it writes its record, or late
    for worker_id in range(1, 4):
        LoopExit(worker_id=worker_id, incarnation=0, entry=0, committed=1, generation=0).publish(job_store)
        for _ in range(2):
            assert loop_exits.have_all_left(0, [1, 2, 3]) is (worker_id == 3)
            assert len(loop_exits.present()) == worker_id
    assert sum(read) <= 4 * 3 + 3, read
    late = LoopExit(worker_id=0, incarnation=0, entry=0, committed=1, generation=0)
    job_store.set("left_early/0/1", late.to_json().encode())
    assert loop_exits.have_all_left(0, [0, 1, 2, 3])
    read.clear()
    assert loop_exits.have_all_left(0, [0, 1, 2, 3])
    assert not read


def test_the_wait_for_ranks_that_are_still_in_a_loop_ends():
    """By a rank that has run the loop to its end, or when it has lasted for as long as a wait outside of steps may."""
    job_store = JobStore.from_store("job", HashStore())
    engine = RecoveryEngine.__new__(RecoveryEngine)
    engine._entry, engine._loop_exits = 0, LoopExits(job_store, 0)
    engine.member = SimpleNamespace(
        rank=0,
        worker_id=0,
        generation=1,
        world=SimpleNamespace(size=2, worker_ids=(0, 1)),
        job_store=job_store,
        hangs=HangPolicy(floor_s=0.1, outside_s=0.5),
        unrepaired_loss=lambda: None,
    )
    failure = engine.await_loop_exits()
    assert failure is not None
    assert (failure.kind, failure.worker_id) == ("hang", 0)
    job_store.set("left/0", b"1")
    assert engine.await_loop_exits() is None


def test_how_often_a_loop_may_fail():
    """Three times at one place; elsewhere, one that has run the body of a step was able to start."""
    budget = RestartBudget(RestartPolicy())
    raised = {"code": 1, "error": "KeyError: no", "has_left_loop": True, "is_armed": True}
    for num_attempts, made_progress, is_refused in [
        (1, True, False),
        (1, True, False),
        (1, True, False),
        (2, False, False),
        (1, False, False),
        (1, False, True),
        (2, True, False),
        (3, True, True),
    ]:
        loss = WorkerExit(
            **raised, num_attempts=num_attempts, made_progress=made_progress, has_begun=True, uses_recovery=True
        )
        why_not = budget.why_not_replace(loss, 1.0, 0.0)
        assert (why_not is not None) is is_refused, (num_attempts, made_progress)
    assert why_not == "its loop has failed in 3 attempts at the same place, the last time with KeyError: no"


def test_a_worker_that_runs_a_few_steps_and_fails_each_time_is_given_up():
    budget = RestartBudget(RestartPolicy(max_brief_lives=4))
    raised = {"code": 1, "error": "KeyError: no", "has_left_loop": True, "is_armed": True, "num_attempts": 1}
    loss = WorkerExit(**raised, made_progress=True, has_begun=True, uses_recovery=True)
    killed = WorkerExit(code=-9, is_armed=True, has_begun=True, uses_recovery=True)
    for one, uptime_s, is_refused in [
        *[(loss, 1.0, False)] * 3,
        (loss, 100.0, False),  # it had run for long enough
        *[(loss, 1.0, False)] * 3,
        (killed, 1.0, False),  # no fault of its own
        *[(loss, 1.0, False)] * 3,
        (loss, 1.0, True),
    ]:
        why_not = budget.why_not_replace(one, uptime_s, 0.0)
        assert (why_not is not None) is is_refused
    assert "failed 4 times in a row within 60 s of its start" in why_not
    assert "KeyError: no" in why_not


def test_attempts_at_one_place_of_a_loop():
    """Processes that raise at once count as one; a replacement that raises before it joins is of no generation."""
    job_store = JobStore.from_store("job", HashStore())
    for worker_id, generation, committed, number in [
        (0, 0, 4, 1),
        (1, 0, 4, 1),
        (1, 3, 4, 2),
        (1, 4, 5, 1),
        (0, 3, 4, 2),
        (0, 0, 4, 3),
    ]:
        left = LoopExit(worker_id=worker_id, incarnation=0, entry=0, committed=committed, generation=generation)
        assert left.count_attempts(job_store) == number, (worker_id, generation, committed)


def test_a_restart_goes_on_past_what_has_ended(tmp_path):
    store = HashStore()
    job_store = JobStore.from_store("first", store)
    paths = [tmp_path / name for name in ("a", "b")]
    for path in paths:
        path.mkdir()
    began = restart_from_newest(job_store, replace(JOB, resume_from="user"), LOST)
    assert (began.resume_from, began.entry) == ("user", 0)
    SavedCheckpoints(job_store, 0).add(str(paths[0]), 4)
    assert restart_from_newest(job_store, JOB, LOST).resume_from == str(paths[0])
    record_end(job_store, EndedEntry(number=0, kind="fit"))
    after = restart_from_newest(job_store, replace(JOB, resume_from="user"), LOST)
    assert (after.resume_from, after.step, after.entry) == ("", 0, 1)  # both belonged to the fit that has ended
    record_end(job_store, EndedEntry(number=1, kind="test", results=[{"loss": 0.1}]))
    SavedCheckpoints(job_store, 2).add(str(paths[1]), 2)
    folder = folder_for(job_store, str(tmp_path / new_folder_name("job")), "job")
    folder.rmdir()
    restart = restart_from_newest(job_store, JOB, LOST)
    assert (restart.resume_from, restart.step, restart.entry) == (str(paths[1]), 2, 2)

    again = JobStore.from_store("second", store)
    EntryRecords.read(job_store).hand_over(again, restart.entry)
    assert ended_entries(again) == ended_entries(job_store)
    assert restart_from_newest(again, replace(JOB, resume_from="user"), LOST).resume_from == "user"
    assert existing_folder(again, "job") is None
    folder.mkdir()
    assert existing_folder(again, "job") == folder
    assert existing_folder(again, "another") is None


@pytest.mark.parametrize("is_requested", [True, False], ids=["requested", "newest"])
def test_a_round_without_a_checkpoint_of_its_own_knows_the_step_that_it_resumed_from(tmp_path, is_requested):
    store = HashStore()
    rounds = [JobStore.from_store(name, store) for name in ("first", "second", "third")]
    (tmp_path / "a").mkdir()
    SavedCheckpoints(rounds[0]).add(str(tmp_path / "a"), 4)
    path, step = str(tmp_path / "a"), 4
    if is_requested:  # with a checkpoint that is in no list, as for other degrees
        path, step = str(tmp_path / "b"), 7
        rounds[0].set(RESTART_KEY, JobRestart(failure=LOST, resume_from=path, step=step).to_json().encode())
    for before, again in pairwise(rounds):
        EntryRecords.read(before).hand_over(again, 0)
        restart = restart_from_newest(again, replace(JOB, resume_from=path), LOST)
        assert (restart.resume_from, restart.step) == (path, step)
    assert restart_from_newest(rounds[2], JOB, LOST).step == 0  # resumed from nothing
    (tmp_path / "c").mkdir()
    SavedCheckpoints(rounds[2]).add(str(tmp_path / "c"), 9)
    assert restart_from_newest(rounds[2], replace(JOB, resume_from=path), LOST).step == 9


def test_only_programs_that_say_so_are_known():
    store = HashStore()
    silent, announced, refused, running = (
        JobStore.from_store(name, store) for name in ("silent", "said", "refused", "running")
    )
    announced.set_if_absent("recovers", b"1")
    refused.set("recovers", b"0")
    refused.set_if_absent("recovers", b"1")
    publish_initial_world(running, WorldPlan.initial(2))
    assert [uses_recovery(each) for each in (silent, announced, refused, running)] == [False, True, False, True]


@pytest.mark.parametrize(
    "name",
    ["precious", "hyperpod-ended-", new_folder_name("job") + "-more", new_folder_name("another")],
    ids=["precious", "short", "long", "of another job"],
)
def test_no_other_folder_is_removed(tmp_path, name):
    job_store = JobStore(HashStore())
    (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match="names a folder"):
        folder_for(job_store, str(tmp_path / name), "job")
    assert existing_folder(job_store, "job") is None


def test_the_folder_for_ends_is_this_users_alone(tmp_path):
    job_store, path = JobStore(HashStore()), tmp_path / new_folder_name("job")
    assert folder_for(job_store, str(path), "job") == folder_for(job_store, "another", "job") == path
    assert path.stat().st_mode & 0o777 == 0o700
    path.chmod(0o777)
    with pytest.raises(ConfigError, match="all users"):
        folder_for(job_store, str(path), "job")
    path.rmdir()
    path.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="is a link"):
        folder_for(job_store, str(path), "job")


def test_files_of_other_ranks_that_are_not_seen(tmp_path):
    for place in (0, 2):
        save_entry_values(tmp_path, 3, place, {})
    assert invisible_workers(tmp_path, 3, range(4)) == [1, 3]
    assert invisible_workers(tmp_path, 3, (0, 2)) == []


def test_a_node_without_the_state_after_an_entry_is_told_to_share_storage(tmp_path):
    why = rf"{tmp_path} .* call 3 .*3.rank-1.pt nor 3.rank-0.pt.* all nodes share"
    with pytest.raises(CheckpointDamaged, match=why):
        load_entry_values(tmp_path, 3, 1)
    save_entry_values(tmp_path, 3, 0, {"of": 0})
    assert load_entry_values(tmp_path, 3, 1)[0] == {"of": 0}


def test_a_detached_process_that_communicates_between_two_entries_has_all_restart(monkeypatch):
    job_store = JobStore(HashStore())
    monkeypatch.setattr(JobStore, "connect", lambda job: job_store)
    monkeypatch.setattr(restart_all, "_FINAL_SAVE_S", 0.0)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    try:
        with Entries().enter(JOB, "fit"):
            group_health.detach()
        with pytest.raises(RecoveryError, match="already passed"):
            group_health.before_refusal()
    finally:
        runtime.reset()
    failure = JobRestart.from_json(job_store.try_get(RESTART_KEY)).failure
    assert str(failure).startswith("worker 2 (request): a replacement process reached a collective between two calls")


@pytest.mark.parametrize(
    "text", [b"", b"{}", b"[[1, 2]]", b'["a"]', b"nonsense", b"[" * 100000, b"\xff", b"null", b"7"]
)
def test_records_that_no_process_has_written_count_as_none(text):
    job_store = JobStore(HashStore())
    for name in ("entry/0", "checkpoints", "entries_before", "entries_folder", "restart"):
        job_store.set(name, text)
    assert EntryRecords.read(job_store) == EntryRecords()
    assert restart_from_newest(job_store, JOB, LOST).entry == 0
