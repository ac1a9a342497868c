"""Rehearsals: what a job that was killed in each phase holds, compared with one to which nothing happened."""

import io
import os
import re
import subprocess
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import warm
from recovery.faults import HYPERPODRUN, PRELOAD
from torch import nn

from hyperpod_plugins import cli
from hyperpod_plugins.env import RehearsalEnv
from hyperpod_plugins.errors import ConfigError, RecoveryError
from hyperpod_plugins.recovery import RecoveryOptions, rehearsal_jobs
from hyperpod_plugins.recovery.rehearsal_jobs import (
    IN_FIRST_FIT,
    REHEARSED_PHASES,
    STATE_COPY,
    STATE_LOST,
    DigestLine,
    DigestLog,
    DigestPoint,
    PhaseResult,
    RehearsalPlan,
    RehearsedCall,
    RehearsedFault,
    ScheduledFaults,
    all_faults,
    first_difference,
    format_table,
    judge,
    parse_schedule,
    read_happened,
    read_lines,
    records,
    unsteady_names,
)
from hyperpod_plugins.recovery.snapshot import SnapshotPolicy
from hyperpod_plugins.recovery.state_digests import (
    Difference,
    Disagreement,
    StepGradients,
    differing,
    suspects_of,
    value_digests,
)

PROGRAM = Path(__file__).with_name("program_rehearsal.py")
PUT_BACK = PROGRAM.with_name("program_putback.py")
FIT = PROGRAM.with_name("program_rehearsed_fit.py")
LIFE = PROGRAM.with_name("program_rehearsed_life.py")


def test_of_what_differs_the_kind_is_told_that_comes_first_in_a_step():
    wanted = {"parameter a": 1, "gradient a": 2, "buffer b": 3, "callback C": 4}
    assert differing(wanted, wanted) == ()
    assert differing(wanted, {**wanted, "parameter a": 9, "gradient a": 9}) == ("gradient a",)
    assert differing(wanted, {**wanted, "callback C": 9, "buffer b": 9}) == ("buffer b",)
    assert differing(wanted, {"parameter a": 1, "gradient a": 2, "buffer b": 3}) == ("callback C",)
    assert differing(wanted, {**wanted, "trainer x": 1}) == ("trainer x",)


def test_values_are_told_apart_whatever_holds_them():
    values = {"trainer epoch": 3, "callback A": {"t": torch.ones(2)}, "callback B": {"n": [1, 2.0, None]}}
    same = {"callback B": {"n": [1, 2.0, None]}, "callback A": {"t": torch.ones(2)}, "trainer epoch": 3}
    assert value_digests(values) == value_digests(same)
    other = {**values, "callback A": {"t": torch.tensor([1.0, 1.0 + 1e-7])}}
    assert differing(value_digests(values), value_digests(other)) == ("callback A.t",)
    saved, again = ({"best": f"/out/step=4{version}.ckpt", "k": {f"/out{version}": 1}} for version in ("", "-v1"))
    assert value_digests(saved) == value_digests(again)  # files of the job before are in the way
    assert value_digests({"o": object()}) == value_digests({"o": object()})  # addresses tell nothing


def test_gradients_of_an_earlier_step_are_not_those_of_a_step():
    model = nn.ModuleDict({name: nn.Linear(2, 1, bias=False) for name in ("stale", "added", "zeroed", "new")})
    for name in ("stale", "added", "zeroed"):
        model[name].weight.grad = torch.ones(1, 2)
    gradients = StepGradients(model)
    model["added"].weight.grad += 1
    model["zeroed"].weight.grad = torch.zeros(1, 2)
    model["new"].weight.grad = torch.zeros(1, 2)
    assert {*gradients.digests()} == {"gradient added.weight", "gradient new.weight"}


def test_the_earliest_difference_is_found_among_the_lines_of_all_processes(tmp_path):
    lines = {
        0: [(2, "state", {"parameter a": 1}), (2, "gradients", {"gradient a": 5}), (3, "state", {"parameter a": 2})],
        1: [(2, "state", {"parameter a": 1}), (2, "gradients", {"gradient a": 6}), (3, "state", {"parameter a": 7})],
    }
    wanted = {
        DigestPoint(0, rank, step, point): digests for rank, said in lines.items() for step, point, digests in said
    }
    wanted[DigestPoint(0, 1, 2, "gradients")] = {"gradient a": 5}
    wanted[DigestPoint(0, 1, 3, "state")] = {"parameter a": 2}
    for rank, said in lines.items():
        log = DigestLog(tmp_path, rank)
        for line in said:
            log.write(*line)
            (tmp_path / "fault-forward.json").write_text("{}")
        with (tmp_path / f"rank-{rank}.jsonl").open("a") as file:
            file.write('{"step": 4, "poi')  # torn by a kill
    found = first_difference(wanted, read_lines(tmp_path))
    assert found == Difference(rank=1, step=2, what="computing it", names=("gradient a",), after=frozenset({"forward"}))
    assert "global variable" in found.reason
    assert first_difference(wanted, read_lines(tmp_path), {"gradient a"}).names == ("parameter a",)
    assert first_difference(records(read_lines(tmp_path)), read_lines(tmp_path)) is None


def test_a_gradient_that_one_job_alone_has_is_of_an_earlier_step_but_a_batch_is_not():
    wanted = {DigestPoint(0, 0, 2, "gradients"): {"batch 0": 1, "batch 1": 2, "gradient a": 3, "gradient b": 4}}

    def found(**digests):
        return first_difference(wanted, [DigestLine(rank=0, step=2, point="gradients", digests=digests)])

    both = {"batch 0": 1, "batch 1": 2}
    assert found(**both, **{"gradient a": 3, "gradient c": 5}) is None
    assert found(**both, **{"gradient a": 6}).names == ("gradient a",)
    assert found(**{"batch 0": 1, "gradient a": 3}).names == ("batch 1",)


def test_another_ranks_logged_value_is_told_apart_from_one_that_is_missing():
    wanted = {DigestPoint(0, 0, 2, "state"): {"logged loss": 1, "logged val": 2, "parameter a": 3}}

    def found(**digests):
        lines = [DigestLine(rank=0, step=2, point="state", digests={"parameter a": 3, **digests})]
        return [first_difference(wanted, lines, of_shown=of_shown) for of_shown in (False, True)]

    whole, shown = found(**{"logged loss": 1, "logged val": 9})
    assert whole is None
    assert shown.names == ("logged val",)
    whole, shown = found(**{"logged loss": 1})
    assert whole.names == ("logged val",)
    assert shown is None


def test_what_differs_without_a_fault_is_not_compared_unless_it_is_what_is_trained():
    places = [DigestPoint(0, 0, 2, "state"), DigestPoint(0, 1, 2, "state")]
    one = {place: {"gradient a": 1, "callback Timer.now": 2} for place in places}
    assert unsteady_names(one, one) == set()
    assert unsteady_names(one, one | {places[1]: {"gradient a": 1}}) == {"callback Timer.now"}
    with pytest.raises(RecoveryError, match=r"two runs without a fault differ: rank 1, step 2, .*gradient a differs"):
        unsteady_names(one, one | {places[1]: {"gradient a": 3, "callback Timer.now": 4}})


FAULTS = parse_schedule("setup:1:0,forward:0:3,vote:1:4")
AT_FOUR = Difference(
    rank=0, step=4, what="at its beginning", names=("buffer b",), after=frozenset({"setup", "forward"})
)


def results(found):
    return {each.phase: (each.is_good, each.step) for each in found}


def test_the_last_fault_before_a_difference_is_the_one_that_it_comes_from():
    happened = {"setup": 0, "forward": 3, "vote": 5}
    good = results(judge(FAULTS, happened, "", None))
    assert good == {"setup": (True, 0), "forward": (True, 3), "vote": (True, 5)}
    assert results(judge(FAULTS, happened, "", AT_FOUR)) == {"setup": (True, 0), "forward": (False, 3)}
    assert results(judge(FAULTS, {"setup": 0, "forward": 3}, "Traceback\nKeyError: 1", None)) == {
        "setup": (True, 0),
        "forward": (False, 3),
    }
    assert results(judge(FAULTS, {}, "boom", None)) == {"setup": (False, None)}
    [told] = [each.failure for each in judge(FAULTS, {}, "Traceback\n  KeyError: 1\nsee above\n=====\n", None)]
    assert told == "the job ended: KeyError: 1"
    shown = replace(AT_FOUR, names=("logged callback_metrics.loss_epoch",))
    told = [each.cells()[3] for each in judge(FAULTS, happened, "", None, shown)]
    assert told[0] == told[2] == "recovered, equal to the last bit"
    assert "except for values that are shown: rank 0, step 4, at its beginning: logged" in told[1]
    assert all(each.is_good for each in judge(FAULTS, happened, "", None, shown))
    again = results(judge(FAULTS, happened, "all processes were started again 3 times from step 0", None))
    assert again == {"setup": (True, 0), "forward": (True, 3)}  # the third is the first one of another job
    assert not results(judge(FAULTS, {"vote": 0}, "all processes were started again 3 times", None))["vote"][0]
    not_reached = judge(FAULTS, {"setup": 0}, "", None)
    assert [each.cells()[3] for each in not_reached] == ["recovered, equal to the last bit"] + ["not reached"] * 2


def test_a_difference_in_an_earlier_call_comes_first_whatever_its_step(tmp_path):
    """The second call is a fit that begins at step 0 again, the third one a test."""
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    for folder in (calm, killed):
        folder.mkdir()
        first, second = DigestLog(folder, 0), DigestLog(folder, 0, entry=1, call="training 2")
        first.write(5, "state", {"parameter a": 1})
        first.write(6, "end", {"parameter a": 2, "trainer x": 3})
        second.write(0, "state", {"parameter a": 2 if folder == calm else 4})
        (folder / "fault-test.json").write_text("{}")
        first.write(6, "end", {"parameter a": 2})  # all processes run again, and record tensors only
        DigestLog(folder, 0, entry=2, call="test").write(0, "result", {"result t": 5 if folder == calm else 6})
    found = first_difference(records(read_lines(calm)), read_lines(killed))
    assert str(found).startswith("rank 0, training 2, step 0, at its beginning: parameter a differs. Likely a param")
    assert found.after == frozenset()
    found = first_difference(records(read_lines(calm)), read_lines(killed), {"parameter a"})
    assert str(found).startswith("rank 0, test: result t differs. Likely the evaluation depends on")
    assert found.after == {"test"}
    DigestLog(killed, 1).write(6, "end", {"parameter a": 9})
    DigestLog(calm, 1).write(6, "end", {"parameter a": 2})
    found = first_difference(records(read_lines(calm)), read_lines(killed))
    assert str(found).startswith("rank 1, step 6, after its last step: parameter a")


def test_a_call_that_ran_twice_differs_since_the_first_time():
    wanted = {DigestPoint(1, rank, 0, "state"): {"parameter a": 1} for rank in range(2)}
    lines = [
        DigestLine(entry=1, rank=0, step=0, point="state", digests={"parameter a": 1}, after=frozenset({"vote"})),
        DigestLine(
            entry=1, rank=0, step=0, point="state", digests={"parameter a": 2}, after=frozenset({"vote", "test"})
        ),
        DigestLine(entry=1, rank=1, step=0, point="state", digests={"parameter a": 2}, after=frozenset({"vote"})),
    ]
    assert first_difference(wanted, lines).after == {"vote"}


def test_two_faults_of_one_phase(tmp_path):
    plan = RehearsalPlan(program=(str(PROGRAM),))
    [fault] = plan.schedule((STATE_COPY,))
    text = ",".join(each.to_text() for each in all_faults([fault]))
    faults = ScheduledFaults(tmp_path, text, fault.rank)
    assert not faults.is_due(STATE_LOST, 1)
    assert faults.is_due(STATE_LOST, 2)
    assert not faults.is_due(STATE_COPY, 2)  # of the state of another lost rank
    (tmp_path / f"fault-{STATE_LOST}.json").write_text('{"phase": "state_lost", "at_step": 2}')
    assert not faults.is_due(STATE_LOST, 2)
    assert faults.is_due(STATE_COPY, 0)
    assert read_happened(tmp_path) == {STATE_COPY: None}
    assert [each.cells()[3] for each in judge([fault], read_happened(tmp_path), "", None)] == ["not reached"]
    DigestLog(tmp_path, 0).write(2, "state", {})
    assert [line.after for line in read_lines(tmp_path)] == [{STATE_COPY}]
    (tmp_path / f"fault-{STATE_COPY}.json").write_text('{"phase": "state_copy", "at_step": 0}')
    assert not faults.is_due(STATE_COPY, 0)
    assert read_happened(tmp_path) == {STATE_COPY: 2}


def test_a_call_ends_after_its_own_number_of_steps_wherever_it_began(tmp_path):
    def call(entry, training_index):
        return RehearsedCall(env, 0, entry, training_index=training_index, kind="")

    env = RehearsalEnv(folder=str(tmp_path), num_steps=7, faults="second_fit:0:1,forward:0:2")
    first, second = call(1, 0), call(2, 1)
    assert not first.is_last(100)  # it is not known yet where it begins
    for step in (10, 14):  # the latter when all processes have started again from a checkpoint
        first.begin_at(step)
    second.begin_at(17)
    assert [call(1, 0).is_last(step) for step in (16, 17)] == [False, True]
    assert [second.is_last(step) for step in (19, 20)] == [False, True]
    assert [first.faults.is_due("forward", step) for step in (11, 12)] == [False, True]
    assert [second.faults.is_due("second_fit", step) for step in (17, 18)] == [False, True]
    assert first.snapshots(SnapshotPolicy()) == SnapshotPolicy(is_measured=False)
    assert first.snapshots(SnapshotPolicy(every_steps=20, is_measured=True)) == SnapshotPolicy(every_steps=2)
    assert RehearsalPlan(program=(str(PROGRAM),)).num_steps == 2 + 2 * len(IN_FIRST_FIT) + 1
    assert RehearsalPlan(program=(str(PROGRAM),), phases=("test",)).num_steps == 5


def test_a_table_tells_all_phases():
    lines = format_table(
        [
            PhaseResult(phase="vote", rank=1, step=4),
            PhaseResult(phase="validation"),
            PhaseResult(phase="test", rank=0, step=0),
        ]
    )
    assert lines[1].split() == ["vote", "1", "4", "recovered,", "equal", "to", "the", "last", "bit"]
    assert lines[2].split() == ["validation", "not", "reached"]
    assert lines[3].split() == ["test", "0", "recovered,", "equal", "to", "the", "last", "bit"]


def test_a_scheduled_fault_is_due_once_and_not_before_its_step(tmp_path):
    text = ",".join(fault.to_text() for fault in FAULTS)
    assert parse_schedule(text) == FAULTS
    mine = ScheduledFaults(tmp_path, text, rank=1)
    assert not mine.is_due("vote", 3)
    assert mine.is_due("vote", 4)
    assert mine.is_due("vote", 9)
    assert not mine.is_due("forward", 9)  # another rank's
    (tmp_path / "fault-vote.json").write_text("{}")
    assert not mine.is_due("vote", 9)


def test_plans_that_cannot_be_are_refused_by_name():
    plan = RehearsalPlan(program=(str(PROGRAM),))
    assert plan.schedule(("setup", "vote")) == (
        RehearsedFault(phase="setup", rank=1, step=0),
        RehearsedFault(phase="vote", rank=0, step=4),
    )
    with pytest.raises(ConfigError, match="phases lunch cannot be rehearsed"):
        replace(plan, phases=("lunch",))
    with pytest.raises(ConfigError, match=r"--phases names vote, setup more than once"):
        replace(plan, phases=("vote", "setup", "vote", "commit", "setup", "vote"))
    with pytest.raises(ConfigError, match="at least 2"):
        replace(plan, num_ranks=1)
    with pytest.raises(ConfigError, match="no program"):
        replace(plan, program=("nowhere.py",))


@pytest.mark.parametrize(
    "phases", [REHEARSED_PHASES[start:] for start in (0, 3, 5)] + [("vote", "commit")], ids=lambda each: each[0]
)
@pytest.mark.parametrize("num_ranks", range(2, 9))
def test_each_fault_is_on_another_rank_than_the_one_before(phases, num_ranks):
    faults = RehearsalPlan(program=(str(PROGRAM),), num_ranks=num_ranks).schedule(phases)
    assert all(one.rank != other.rank for one, other in pairwise(faults))
    assert all(one.step < other.step for one, other in pairwise(faults) if other.phase in IN_FIRST_FIT)
    assert {fault.rank for fault in faults if fault.phase == "vote_result"} <= {0}


def rehearse(*arguments, program=PROGRAM, preload=PRELOAD, words=(), **environ):
    """Exit code and output of `hyperpod rehearse` in this process, whose jobs start as other tests' do."""

    def start(command, *, stdout, env, **_):
        assert command[:3] == [sys.executable, "-m", HYPERPODRUN]
        return warm.start(command[3:], env, stdout.name, folder)

    started = SimpleNamespace(**(vars(subprocess) | {"Popen": start}))
    with (
        tempfile.TemporaryDirectory() as folder,  # for checkpoints
        io.StringIO() as output,
        patch.dict(os.environ, environ),
        patch.object(rehearsal_jobs, "subprocess", started),
        redirect_stdout(output),
        redirect_stderr(output),
    ):
        code = cli.main(["rehearse", *preload, *arguments, str(program), *words])
        return code, output.getvalue()


def train(program, *, num_ranks=2, preload=PRELOAD, **environ):
    """Run a program under `hyperpodrun`, without the command `rehearse`: its exit code and what it printed."""
    return warm.run(["--nproc-per-node", num_ranks, *preload, program], 120, environ)


@pytest.mark.spawns
def test_a_program_that_recovers_exactly_is_said_to(tmp_path):
    """By the command itself, as a process; other tests call what it runs."""
    command = [sys.executable, "-m", "hyperpod_plugins.cli", "rehearse", *PRELOAD]
    command += ["--phases", "setup,backward,commit,validation", str(PROGRAM)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=200)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    assert len(re.findall("recovered, equal to the last bit", text)) == 3
    assert re.search(r"validation +not reached", text)


@pytest.mark.spawns
@pytest.mark.parametrize(
    ("phases", "environ"),
    [
        pytest.param("dataloader,between,batch_end", {"SYNC": "1"}, id="all ranks log one loss"),
        pytest.param("dataloader,optimizer", {}, id="each rank logs its own", marks=pytest.mark.variant),
        pytest.param(
            "setup,forward,optimizer",
            {"READS": "1"},
            id="a step computes with what others logged",
            marks=pytest.mark.variant,
        ),
    ],
)
def test_a_lightning_program_recovers_exactly(phases, environ):
    code, text = rehearse("--phases", phases, program=PUT_BACK, preload=(), ADAPTER="lightning", **environ)
    assert code == 0, text
    assert re.findall(r"(\w+) +\d +\d +recovered, equal to the last bit", text) == phases.split(",")


@pytest.mark.spawns
def test_a_fit_recovers_exactly_at_the_ends_of_its_epochs_in_its_validations_and_its_checkpoints(tmp_path):
    """An epoch has five steps, and a validation follows each third one: the phases lie where parts of the fit meet."""
    phases = ("setup", "commit", "forward", "validation", "checkpoint")
    environ = {"FOLDER": str(tmp_path), "MAX_STEPS": "40"}
    code, text = rehearse("--phases", ",".join(phases), program=FIT, preload=(), **environ)
    assert code == 0, text
    told = re.findall(r"(\w+) +\d +(\d+) +recovered, equal to the last bit\n", text)
    assert told == [("setup", "0"), ("commit", "4"), ("forward", "6"), ("validation", "9"), ("checkpoint", "12")], text
    assert "not compared, as two runs without a fault differ: callback Timer.time_elapsed" in text


@pytest.mark.spawns
@pytest.mark.parametrize(
    ("program", "name", "phases"),
    [
        pytest.param(
            "program_gallery.py",
            "warm_up",
            "batch_end,forward",
            id="a rate written between micro-steps",
            marks=pytest.mark.variant,
        ),
        pytest.param(
            "program_gallery.py",
            "logs_between",
            "forward,batch_end",
            id="metrics between micro-steps",
            marks=pytest.mark.variant,
        ),
        pytest.param(
            "program_gallery_session.py",
            "reads_before",
            "forward,commit,batch_end",
            id="a body that reads its state",
            marks=pytest.mark.variant,
        ),
        pytest.param(
            "program_gallery.py",
            "sharded_curriculum",
            "dataloader,commit",
            id="hooks before a snapshot",
            marks=pytest.mark.variant,
        ),
        pytest.param("program_gallery.py", "sharded_logs_before", "batch_end", id="metrics before a snapshot"),
        pytest.param(
            "program_gallery.py",
            "optimizer_on_host",
            "forward,commit",
            id="a snapshot of host state",
            marks=pytest.mark.variant,
        ),
        pytest.param(
            "program_gallery_session.py",
            "optimizer_on_host",
            "forward,commit",
            id="optimizer on the host",
            marks=pytest.mark.variant,
        ),
        pytest.param(
            "program_gallery_accelerate.py",
            "parameters_on_host",
            "commit",
            id="parameters on the host",
            marks=pytest.mark.variant,
        ),
        pytest.param(
            "program_gallery_accelerate.py",
            "images",
            "save_state,forward",
            id="an Accelerator that saves",
            marks=pytest.mark.variant,
        ),
        pytest.param("program_gallery.py", "split_in_setup", "forward,batch_end,validation", id="random splits"),
        pytest.param("program_gallery.py", "registered_curriculum", "forward", id="a hook that reads an object"),
        pytest.param(
            "program_gallery.py",
            "not_synchronized",
            "vote,commit,batch_end,validation,checkpoint",
            id="callbacks that decide by a value of their rank",
        ),
        pytest.param(
            "program_gallery_session.py",
            "language_model",
            "dataloader,batch_end,validation,checkpoint",
            id="a body that evaluates and saves",
            marks=pytest.mark.variant,
        ),
    ],
)
def test_a_program_of_the_gallery_recovers_exactly(program, name, phases, tmp_path):
    """`gallery.py` runs the others."""
    words = (name, str(tmp_path))
    code, text = rehearse("--phases", phases, program=PROGRAM.with_name(program), preload=(), words=words)
    assert code == 0, text
    assert re.findall(r"(\w+) +\d +\d+ +recovered, equal to the last bit", text) == phases.split(",")


@pytest.mark.spawns
def test_a_whole_program_recovers_exactly(tmp_path):
    phases = ("snapshot", "state_copy", "between_fits", "second_fit", "validate", "test", "predict")
    code, text = rehearse("--phases", ",".join(phases), program=LIFE, preload=(), FOLDER=str(tmp_path))
    assert code == 0, text
    assert re.findall(r"(\w+) +\d +\d* +recovered, equal to the last bit\n", text) == list(phases), text


@pytest.mark.spawns
def test_what_an_evaluation_lacks_when_all_processes_run_again_is_named(tmp_path):
    code, text = rehearse("--phases", "forward,test", program=LIFE, preload=(), FOLDER=str(tmp_path), FAULT="global")
    assert code == 1, text
    assert re.search(
        r"test +0 +rank \d, test: result returned, result test/loss differs. Likely .*a global variable", text
    ), text


@pytest.mark.spawns
def test_a_session_recovers_exactly_between_two_loops_and_in_the_second():
    phases = ("state_copy", "between_fits", "second_fit")
    code, text = rehearse("--phases", ",".join(phases), LOOPS="2")
    assert code == 0, text
    assert re.findall(r"(\w+) +\d +\d +recovered, equal to the last bit\n", text) == list(phases), text


@pytest.mark.spawns
def test_a_program_that_its_early_end_breaks_is_told_so():
    with tempfile.NamedTemporaryFile("w", suffix=".py") as program:
        program.write(PROGRAM.read_text() + "\nassert step.index == 19, 'too few steps'\n")
        program.flush()
        code, text = rehearse("--phases", "forward", program=program.name)
    assert code == 2
    assert "failed without a fault" in text
    assert "HYPERPOD_REHEARSAL" in text
    assert "AssertionError: too few steps" in text


@pytest.mark.spawns
def test_what_a_replacement_lacks_is_named_with_the_phase():
    code, text = rehearse("--phases", "vote", FAULT="global")
    assert code == 1, text
    assert re.search(
        r"vote +1 +2 +rank \d, step \d+, computing it: gradient \S+.* differs. Likely .*global variable", text
    )


@pytest.mark.spawns
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("", "trained to"),
        ("A2", r"step 2, putting the step back: buffer scale differs.*no longer the tensor that was registered"),
        ("I3", r"step 2, putting the step back: unowned gradient unowned\.\S+ .*no optimizer has this parameter"),
    ],
)
def test_a_rehearsed_step_names_what_an_old_fault_does_not_put_back(fault, told):
    code, text = train(PUT_BACK, PUT_BACK=fault, REHEARSE="2")
    assert code == (1 if fault else 0), text
    assert re.search(told, text), text


@pytest.mark.spawns
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("", "trained to"),
        ("global", "step 2, computing the step again: gradient"),
        ("drift", "step 2, compared with its replicas: parameter first.weight"),
        ("state", "step 2, putting the step back: trainer state.steps differs"),
    ],
)
def test_a_rehearsed_step_ends_the_job_by_name_where_something_would_not_come_back(fault, told):
    code, text = train(PROGRAM, FAULT=fault, REHEARSE="2")
    assert code == (1 if fault else 0), text
    assert told in text


@pytest.mark.spawns
def test_a_rehearsed_fit_names_what_its_steps_do_not_put_back_and_is_left_as_it_was(tmp_path):
    ends = {}
    for fault, steps in (("", ""), ("", "1,2,5,7"), ("another's", "2"), ("callback", "2")):
        folder = str(tmp_path / f"{fault}{steps}")
        code, text = train(FIT, preload=(), FAULT=fault, REHEARSE=steps, FOLDER=folder)
        assert code == (1 if fault else 0), text
        ends[fault, steps] = text
    told = re.findall(r"trained to [^\n]*?\}", ends["", "1,2,5,7"])
    assert len(told) == 2
    assert sorted(told) == sorted(re.findall(r"trained to [^\n]*?\}", ends["", ""]))
    assert "callback Average.last_s" in ends["", "1,2,5,7"]
    assert "step 2, putting the step back: callback Average.num_batches differs" in ends["another's", "2"]
    assert "step 2, reading its state back: callback Average.values differs" in ends["callback", "2"]


@pytest.mark.spawns
def test_a_process_that_is_lost_while_a_step_is_rehearsed_is_replaced(tmp_path):
    results = []
    for index, phase in enumerate(("", "reading its state back", "computing the step again")):
        marker = tmp_path / str(index)
        environ = {"FAULT": "kill" if phase else "", "KILL_AT": phase, "MARKER": str(marker)}
        code, text = train(PROGRAM, REHEARSE="2", **environ)
        assert code == 0, text
        assert marker.exists() == bool(phase), text
        results.append(set(re.findall(r"trained to (0x[0-9a-f.]+p[-+]\d+)", text)))
    assert len(results[0]) == 1
    assert results == [results[0]] * 3


@pytest.mark.parametrize(
    ("digests", "suspects"),
    [
        ({0: 5}, ()),
        ({0: 5, 1: 5}, ()),
        ({0: 5, 1: 6}, (0, 1)),
        ({0: 5, 2: 6, 4: 5}, (2,)),
        ({0: 5, 2: 6, 4: 7}, (0, 2, 4)),
        ({0: 5, 1: 5, 2: 6, 3: 6}, (0, 1, 2, 3)),
        ({0: 5, 1: 5, 2: 5, 3: 6, 4: 7}, (3, 4)),
    ],
)
def test_the_replicas_that_differ_from_a_majority_are_suspected(digests, suspects):
    assert suspects_of(digests) == suspects


def test_a_disagreement_names_rank_host_and_the_first_tensors():
    one = Disagreement(replicas=(0, 2, 4), suspects=(2,), hosts=("b",), names=("parameter w",))
    assert str(one) == "rank 2 (b) does not hold the same bits as its replicas, ranks 0, 4: parameter w"
    both = replace(one, replicas=(0, 2), suspects=(0, 2), hosts=("a", "b"), names=())
    assert "ranks 0 (a), 2 (b) do not hold the same bits, and none has a majority" in str(both)
    with pytest.raises(ConfigError, match="but is -1"):
        RecoveryOptions(compare_replicas_every=-1)


@pytest.mark.spawns
@pytest.mark.parametrize(
    ("fault", "every", "num_ranks", "told"),
    [
        ("flip", "2", 2, "step 4: the replicas on ranks 0 ("),
        ("flip", "2", 3, "step 4: rank 1 ("),
        ("redrawn", "auto", 2, "step 4: the replicas on ranks 0 ("),
    ],
)
def test_replicas_that_drift_apart_end_the_job_by_name(fault, every, num_ranks, told):
    code, text = train(PROGRAM, num_ranks=num_ranks, FAULT=fault, COMPARE=every)
    assert code == 1, text
    assert told in text
    assert "parameter first.weight" in text
    assert "parameter noted" not in text
    assert "step 2:" not in text  # compared and found equal
