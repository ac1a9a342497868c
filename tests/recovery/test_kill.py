"""Lightning jobs that lose ranks at every point of their life, against undisturbed ones: same bits, same logs."""

import json
import re
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from recovery.faults import run_job

from hyperpod_plugins.fault_injection.chaos import ChaosPlan, schedule
from hyperpod_plugins.parallel.checkpoint.files import read_document
from hyperpod_plugins.parallel.checkpoint.rank_state import load_rank_state

EVERYWHERE = [
    ["sanity", 0, 1, "kill"],
    ["forward", 1, 0, "kill"],
    ["receive", 1, 0, "kill"],  # and again, while it is repaired
    ["backward", 2, 3, "kill"],
    ["received", 2, 3, "kill"],
    ["clip", 3, 2, "kill"],
    ["fit start", 1, 2, "kill"],  # the first process that takes its place
    ["restored", 3, 1, "kill"],  # a survivor, on the way of the next one
    ["validation", 4, 1, "kill"],
    ["clip", 4, 3, "kill"],  # in the step after a validation that was run again
    ["vote", 5, 0, "kill"],
    ["checkpoint", 6, 2, "kill"],
    ["scheduler", 7, 1, "kill"],
    ["epoch end", 8, 3, "kill"],
    ["voted", 9, 1, "kill"],
    ["optimizer", 10, 2, "kill"],
    ["batch end", 11, 1, "kill"],
    ["validation end", 12, 2, "kill"],
    ["dataloader", 13, 3, "kill"],
    ["forward", 14, 0, "kill"],  # a whole replica
    ["forward", 14, 1, "kill"],
    ["batch end", 16, 2, "kill"],  # where a validation and the end of the epoch follow
    ["forward", 17, 0, "kill"],  # one of each shard and each replica
    ["forward", 17, 3, "kill"],
    ["voted", 19, 3, "break"],  # it rolls forward, is outside of a step after that, and gives its state to rank 1
    ["optimizer", 19, 1, "kill"],
    ["train end", 24, 3, "kill"],  # the others have trained to the end, and wait
]
NOBODY_DIES = [
    ["clip", 2, 0, "raise"],
    ["clip", 3, 1, "raise"],
    ["forward", 5, 3, "raise"],
    ["voted", 6, 0, "break"],
    ["backward", 7, 1, "raise"],
    ["clip", 9, 2, "raise"],
    ["voted", 11, 1, "break"],  # the others go on to a validation
    ["forward", 13, 2, "raise"],
    ["voted", 14, 3, "break"],
    ["forward", 16, 1, "pause 2"],
    ["second group", 17, 2, "interrupt"],  # it has written a part of the step, which the others commit
    ["voted", 19, 0, "break"],
    ["clip", 20, 2, "raise"],
]
NOBODY_DIES_OPTIONS = {"NORM": "batch", "HANG_S": "6", "AVERAGE": "1"}
STATISTICS = [  # of BatchNorm, metrics and an average of shards: what no replica has
    ["forward", 1, 1, "kill"],
    ["optimizer", 3, 2, "kill"],
    ["voted", 5, 0, "kill"],
    ["validation", 8, 3, "kill"],
    ["clip", 10, 1, "kill"],
    ["receive", 10, 1, "kill"],  # twice, in the same step
    ["backward", 14, 0, "kill"],
    ["epoch end", 16, 2, "kill"],
    ["forward", 20, 3, "kill"],
]
TENSOR_OPTIONS = {"LAYOUT": "tensor", "BATCH": "4"}  # two batches of 4 a step make as many steps as four of 2
OUTSIDE = [  # a third exception of one rank in its first minute would end the job
    ["dataloader", 1, 1, "raise"],
    ["second group", 2, 2, "raise"],  # in the commit
    ["voted", 2, 1, "sleep 1"],  # its buddy commits that step only when it hears of the fault
    ["validation", 4, 0, "raise"],
    ["checkpoint", 6, 3, "raise"],
    ["scheduler", 7, 0, "raise"],
    ["epoch end", 8, 1, "raise"],
    ["batch end", 11, 3, "raise"],
    ["validation end", 12, 2, "raise"],
]
SENDERS = [
    ["forward", 2, 0, "kill"],
    ["send", 2, 1, "kill"],  # it gives rank 0 its state
    ["send", 2, 2, "kill"],  # and this one does then; only rank 3 is left
]
SENDERS_OPTIONS = {"LAYOUT": "replicas", "STEPS": "6"}
REPLICA = {"LOCAL": "replica"}  # of a rank that is lost with its buddy: means of the epoch, which are not compared
ENDED_BY_THEMSELVES = [
    ["forward", 1, 1, "segfault"],
    ["backward", 2, 3, "exit"],
    ["backward", 4, 0, "raise"],
]
SPLIT = [
    ["forward", 3, 1, "kill"],
    ["validation", 8, 2, "kill"],
    ["forward", 11, 0, "kill"],  # the shorter loader is in its second round
    ["epoch end", 16, 3, "kill"],  # two ranks are in the next step by then, one is not
    ["voted", 17, 0, "kill"],
]
SPLIT_OPTIONS = {"LAYOUT": "tensor", "LOADERS": "2", "INTERVAL": "epoch", "WORKERS": "1"}
IN_BACKGROUND = [
    ["checkpoint", 6, 2, "kill"],
    ["forward", 12, 1, "kill"],  # while the checkpoint of that step is being written
    ["forward", 15, 0, "term"],
    ["batch end", 18, 3, "kill"],
    ["backward", 20, 2, "stop"],
]

SAVES = [
    ["voted", 3, 2, "kill"],  # before a save
    ["checkpoint", 8, 3, "kill"],
    ["validation", 12, 1, "kill"],
    ["checkpoint", 16, 0, "break"],  # before any rank knows the path
    ["batch end", 20, 0, "kill"],
]
ACCUMULATED = [
    ["forward", 1, 1, "kill"],  # in the first of four micro-steps
    ["forward", 2, 3, "raise"],
    ["validation", 3, 2, "kill"],
    ["backward", 4, 0, "kill"],
    ["validation", 5, 0, "kill"],
]
ACCUMULATED_OPTIONS = {"ACCUMULATE": "4", "VALIDATE_EVERY": "4", "STEPS": "8", "VALIDATE_AFTER": "1"}

IN_BUCKETS = [  # replicas of one rank, whose gradients are averaged while backward goes on
    ["within backward", 1, 1, "kill"],  # some buckets have been sent, others have not
    ["forward", 2, 3, "raise"],
    ["within backward", 3, 2, "raise"],
    ["vote", 4, 0, "kill"],
    ["backward", 5, 2, "kill"],
]
IN_BUCKETS_OPTIONS = {"LAYOUT": "replicas", "STEPS": "8", "ACCUMULATE": "2", "BUCKET_BYTES": "1000"}

pytestmark = pytest.mark.spawns


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    def run(name, faults=(), **environ):
        folder = tmp_path_factory.mktemp(name)
        job = run_job("ranks_lightning.py", folder, faults=faults, environ=environ, timeout_s=150)
        if job.code != 0:
            pytest.fail(f"exit code {job.code}\n{job.output[-8000:]}")
        if job.num_faults != len(faults):
            pytest.fail(f"{job.num_faults} of {len(faults)} faults happened\n{job.output[-8000:]}")
        return job

    return run


@pytest.fixture(scope="module")
def undisturbed(run):
    return run("undisturbed")


@pytest.fixture(scope="module")
def undisturbed_with_batch_norm(run):
    return run("batch_norm", **NOBODY_DIES_OPTIONS)


@pytest.fixture(scope="module")
def replicas(run):
    return run("replicas", **SENDERS_OPTIONS)


@pytest.fixture(scope="module")
def everywhere(run):
    return run("everywhere", EVERYWHERE, **REPLICA)


@pytest.fixture(scope="module")
def unharmed(run):
    return run("unharmed", NOBODY_DIES, **NOBODY_DIES_OPTIONS)


@pytest.fixture(scope="module")
def raised(run):
    return run("raised", OUTSIDE, BAR="1")


def logged(job, rank):
    """(step, name, value) -> how often this rank logged it; means over an epoch are apart."""
    rows = [(line["step"], *row) for line in job.records("metrics")[rank] for row in line["metrics"].items()]
    return Counter(row for row in rows if row[1] not in ("epoch", "loss_epoch", "mean", "drawn"))


def assert_equal(found_job, wanted_job):
    for wanted, found in zip(wanted_job.records("drawn"), found_job.records("drawn"), strict=True):
        expected = {line["at"]: line["value"] for line in wanted}
        assert len(expected) == len(set(expected.values())) == len(wanted)
        assert {(line["at"], line["value"]) for line in found} <= expected.items()
    for rank, (wanted, found) in enumerate(zip(wanted_job.results(), found_job.results(), strict=True)):
        for key in ("lr", "step", "epoch", "early", "validated"):
            assert found[key] == wanted[key], (rank, key)
        assert found["state"].keys() == wanted["state"].keys()
        for name, value in found["state"].items():
            assert torch.equal(value, wanted["state"][name]), (rank, name)


def assert_logged_once(found_job, wanted_job, losses=()):
    """Every row has the value of the undisturbed job, none comes twice; a process that is lost may leave one out."""
    for rank in range(4):
        wanted, found = logged(wanted_job, rank), logged(found_job, rank)
        assert not found - wanted, (rank, sorted(found - wanted), sorted(wanted - found))
        missing = {step for step, _, _ in wanted - found}
        assert len(missing) <= sum(loss[2] == rank for loss in losses), (rank, missing)
    kept = sum((logged(found_job, rank) for rank in range(4)), Counter())
    assert {row[:2] for row in kept} == {row[:2] for row in logged(wanted_job, 0)}


def test_ranks_killed_everywhere(undisturbed, everywhere):
    assert_equal(everywhere, undisturbed)
    assert_logged_once(everywhere, undisturbed, EVERYWHERE)


def checkpoints(job):
    """What each checkpoint holds: the job's progress, the state of its checkpoint callback, and that of each rank."""
    found = {}
    for path in (job.folder / "checkpoints").iterdir():
        if not path.name.startswith("."):
            saved = read_document(path, weights_only=True)["extra"]
            state = next(state for key, state in saved["callbacks"].items() if key.startswith("ModelCheckpoint"))
            counts = saved["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["processed"]
            text = json.dumps(state, default=float, sort_keys=True).replace(str(job.folder), "")
            averages = [load_rank_state(path, rank, weights_only=True)["callbacks"] for rank in range(4)]
            shards = [next(each for key, each in of.items() if key.endswith("Ema")) for of in averages]
            sums = [[float(shard.double().sum()) for shard in each["shards"]] for each in shards]
            found[path.name] = saved["global_step"], counts, text, sorted(saved), sums
    return found


def test_interrupted_checkpoints_are_written_again(undisturbed, everywhere):
    assert checkpoints(everywhere) == checkpoints(undisturbed)


@pytest.mark.parametrize(
    "saves",
    [
        {"filename": "{step}-{loss:.6f}", "save_top_k": 1, "save_last": True},  # of a value that differs between ranks
        # each waits for the value of a validation
        pytest.param({"monitor": "val", "save_top_k": 1}, marks=pytest.mark.variant),
    ],
)
def test_checkpoints_are_those_of_a_job_without_faults(run, saves):
    options = {"SAVES": json.dumps({"every_n_train_steps": 4} | saves)}
    wanted = run("saves", **options)
    steps = {saved[0] for saved in checkpoints(wanted).values()}
    faults = [each for each in SAVES if each[0] != "checkpoint" or "monitor" not in saves or each[1] <= max(steps)]
    found = run("saves_with_faults", faults, **options)
    assert checkpoints(found) == checkpoints(wanted)


def test_a_rank_lost_in_the_first_step_after_a_checkpoint_was_loaded(run):
    """Its running statistics, which differ between ranks, are those of the checkpoint."""
    first = run("first", NORM="batch", STEPS="6")
    resumed = {"NORM": "batch", "STEPS": "9", "RESUME": str(first.folder / "checkpoints" / "step=6.ckpt")}
    assert_equal(run("resumed_with_loss", [["forward", 6, 1, "kill"]], **resumed), run("resumed", **resumed))


def test_faults_without_a_loss(undisturbed_with_batch_norm, unharmed):
    assert_equal(unharmed, undisturbed_with_batch_norm)  # the statistics of BatchNorm, too
    assert_logged_once(unharmed, undisturbed_with_batch_norm, [each for each in NOBODY_DIES if each[3] == "interrupt"])
    # No process was replaced: each has seen every repair. One repair may mend two faults that come close
    # together, and a rank that pauses for less than the limit needs none.
    assert "takes its place" not in unharmed.output
    assert all(result["repairs"] >= len(NOBODY_DIES) - 4 for result in unharmed.results())
    assert all("hang" not in result["causes"] for result in unharmed.results())


def test_repeated_steps_count_once_in_the_means_of_an_epoch(undisturbed_with_batch_norm, unharmed):
    for wanted, found in zip(undisturbed_with_batch_norm.records("metrics"), unharmed.records("metrics"), strict=True):
        means = [line for line in wanted if "mean" in line["metrics"]]
        assert means[0] in found


def test_replacements_get_the_statistics_and_metrics_of_the_rank_that_they_replace(run, undisturbed_with_batch_norm):
    job = run("statistics", STATISTICS, **NOBODY_DIES_OPTIONS)
    assert_equal(job, undisturbed_with_batch_norm)
    assert_logged_once(job, undisturbed_with_batch_norm, STATISTICS)
    assert "goes on after step" not in job.output
    for rank, lines in enumerate(undisturbed_with_batch_norm.records("metrics")):
        means = [line for line in lines if "mean" in line["metrics"]]
        assert means[-1] in job.records("metrics")[rank]  # of the epoch in which rank 3 was replaced after four steps


def test_tensor_parallel_ranks_killed_everywhere(run):
    undisturbed = run("tensor", **TENSOR_OPTIONS)
    everywhere = run("tensor_everywhere", EVERYWHERE, **TENSOR_OPTIONS, **REPLICA)
    assert_equal(everywhere, undisturbed)
    assert_logged_once(everywhere, undisturbed, EVERYWHERE)


def test_exceptions_outside_of_steps(undisturbed, raised):
    assert_equal(raised, undisturbed)
    assert_logged_once(raised, undisturbed, OUTSIDE)


def test_a_progress_bar_shows_each_step_once(raised):
    lines = raised.records("bar")[0]
    assert [(line["shown"], line["total"]) for line in lines] == [((line["step"] - 1) % 8 + 1, 8) for line in lines]
    steps = [line["step"] for line in lines]
    assert steps == sorted(set(steps))
    assert set(range(1, 25)) - set(steps) <= {7}  # where rank 0 was lost between its step and the bar


def test_ranks_that_are_lost_while_they_give_their_state(run, replicas):
    found = run("senders", SENDERS, **SENDERS_OPTIONS, **REPLICA)
    assert_equal(found, replicas)
    assert_logged_once(found, replicas, SENDERS)


@pytest.mark.parametrize("can_reset", ["0", "-1"])
def test_ranks_that_crash_exit_and_raise_where_an_exception_cannot_be_undone(run, replicas, can_reset):
    found = run("old_torch", ENDED_BY_THEMSELVES, CAN_RESET=can_reset, **SENDERS_OPTIONS)
    assert_equal(found, replicas)
    assert_logged_once(found, replicas, ENDED_BY_THEMSELVES)
    assert found.output.count("takes its place") >= len(ENDED_BY_THEMSELVES)  # with torch 2.13, one less
    assert all(end in found.output for end in ("killed by SIGSEGV", "exit code 3"))


@pytest.mark.variant
def test_tensor_parallel_ranks_with_two_loaders_of_different_length(run):
    found, wanted = run("split_disturbed", SPLIT, **SPLIT_OPTIONS), run("split", **SPLIT_OPTIONS)
    assert_equal(found, wanted)
    assert_logged_once(found, wanted, SPLIT)


def test_windows_of_micro_steps_and_a_validation_after_the_fit(run):
    found = run("accumulated_disturbed", ACCUMULATED, **ACCUMULATED_OPTIONS)
    wanted = run("accumulated", **ACCUMULATED_OPTIONS)
    assert_equal(found, wanted)
    assert_logged_once(found, wanted, ACCUMULATED)  # a validation that is run again counts no batch twice
    means = [[line["metrics"].get("drawn") for line in job.records("metrics")[3]] for job in (found, wanted)]
    assert means[0] == means[1]  # of what hooks logged between micro-steps, which rank 3 has run again without them
    assert any(means[0])


def test_replicas_killed_while_their_gradients_are_averaged_in_buckets(run):
    found, wanted = run("buckets_disturbed", IN_BUCKETS, **IN_BUCKETS_OPTIONS), run("buckets", **IN_BUCKETS_OPTIONS)
    assert_equal(found, wanted)
    assert_logged_once(found, wanted, IN_BUCKETS)


def test_a_fit_that_is_asked_to_stop_between_micro_steps(run):
    """Lightning validates at once, in the middle of a step's micro-steps; a rank is lost in that."""
    options = {"ACCUMULATE": "4", "VALIDATE_EVERY": "8", "STEPS": "8", "STOP_AT": "10"}
    found, wanted = run("stopped_disturbed", [["validation", 2, 1, "kill"]], **options), run("stopped", **options)
    assert_equal(found, wanted)
    assert {result["step"] for result in found.results()} == {2}


def test_ranks_killed_while_activations_are_on_the_host(run):
    """The same bits as with recomputation alone, undisturbed."""
    faults = [each for each in EVERYWHERE if each[0] in ("forward", "backward", "receive", "clip", "optimizer")]
    faults += [["backward", 7, 1, "raise"], ["forward", 21, 2, "raise"]]
    found, wanted = run("offloaded", faults, MEMORY="offloaded", **REPLICA), run("recomputed", MEMORY="recomputed")
    assert_equal(found, wanted)
    assert_logged_once(found, wanted, faults)
    assert all(result["offloaded"] > 0 for result in found.results())


@pytest.mark.parametrize("what", [pytest.param("parameters", marks=pytest.mark.variant), "optimizer"])
def test_ranks_killed_with_training_state_in_host_memory(run, undisturbed, what):
    """The same bits as undisturbed and on the device; `optimizer` faults come while the host computes the step."""
    faults = [each for each in EVERYWHERE if each[0] in ("forward", "backward", "receive", "optimizer", "checkpoint")]
    faults += [["second group", 8, 2, "raise"], ["optimizer", 7, 1, "kill"], ["forward", 21, 2, "raise"]]
    found = run(what, faults, MEMORY=f"{what} on the host", **REPLICA)
    assert_equal(found, undisturbed)
    assert_logged_once(found, undisturbed, faults)
    option = {"parameters": "param_offload", "optimizer": "optimizer_offload"}[what]
    assert all(result["on_host"] == [option] for result in found.results())


@pytest.mark.variant
def test_ranks_killed_while_layers_compute_in_float8(run):
    """The same bits as undisturbed, with weights that are gathered in float8."""
    pytest.importorskip("torchao")
    faults = [each for each in EVERYWHERE if each[0] in ("forward", "backward", "receive", "clip", "optimizer")]
    faults += [["backward", 7, 1, "raise"], ["forward", 21, 2, "raise"]]
    found = run("float8_disturbed", faults, MEMORY="in float8", **REPLICA)
    wanted = run("float8", MEMORY="in float8")
    assert_equal(found, wanted)
    assert_logged_once(found, wanted, faults)
    layers = [f"net.layers.{number}.{name}" for number in range(2) for name in ("w1", "w2")]
    assert all(result["in_float8"] == layers for result in found.results())


@pytest.mark.parametrize("transport", [pytest.param("gloo", marks=pytest.mark.variant), "nccl-like"])
def test_ranks_lost_where_the_others_have_gathered_a_metric(run, undisturbed, transport):
    """They have its value; it is computed again with the one that comes, and never of what an abort leaves behind."""
    faults = [
        ["evaluated", 4, 3, "kill"],
        ["gathered", 8, 1, "kill"],
        ["gathered", 16, 0, "kill"],
        ["evaluated", 20, 0, "break"],
        ["gathered", 24, 2, "break"],
    ]
    job = run(f"gathered_{transport}", faults, HYPERPOD_TEST_TRANSPORT=transport)
    assert_equal(job, undisturbed)
    assert_logged_once(job, undisturbed, faults)
    for wanted, found in zip(undisturbed.records("metrics"), job.records("metrics"), strict=True):
        means = [{(row["step"], row["metrics"].get("mean")) for row in rows} for rows in (wanted, found)]
        assert means[1] <= means[0]


def test_a_rank_that_is_busy_outside_of_a_step_is_waited_for(run, undisturbed):
    """While another one is lost: it says that it is there, so it is not taken for stuck."""
    job = run("busy", [["batch end", 7, 0, "sleep 15"], ["batch end", 7, 1, "kill in 2"]], HANG_S="4")
    assert_equal(job, undisturbed)
    assert job.num_faults == 2
    assert {result["repairs"] for result in job.results()} == {1}
    assert "does not come to be repaired" not in job.output


def test_checkpoints_in_the_background(run, undisturbed):
    job = run("background", IN_BACKGROUND, BACKGROUND="1", HANG_S="4")
    assert_equal(job, undisturbed)
    assert any("hang" in result["causes"] for result in job.results())  # the rank that was stopped
    for folder in (job.folder / "checkpoints").glob("step=*.ckpt"):  # complete, or not there
        extra = read_document(folder, weights_only=True)["extra"]
        assert extra["global_step"] == int(folder.stem.removeprefix("step="))
    assert (job.folder / "checkpoints" / "step=24.ckpt").exists()


def test_a_mistake_of_the_program_on_all_ranks_ends_the_job(tmp_path):
    job = run_job("ranks_lightning.py", tmp_path, faults=[["forward", 7, rank, "always"] for rank in range(4)])
    assert job.code == 1
    top = re.search(r"Rank \d failed first:\n\nTraceback \(most recent call last\):\n", job.output).end()
    error = job.output.index("Transient: fault at forward of step 7", top)
    assert error < job.output.index("=====", top)
    assert 'faults.at("forward", self.global_step)' in job.output[top:error]  # the traceback leads into the program
    assert "takes its place" not in job.output
    attempts = [line for line in job.output.splitlines() if "repaired in" in line]
    assert 2 <= len(attempts) <= 8  # until one rank has failed three times by itself


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        pytest.param(["sanity", 0, 1, "always"], "it failed by itself 2 times", id="nothing was trained"),
        pytest.param(["validation", 4, 2, "always"], "it failed 3 times in a row", id="again and again"),
    ],
)
def test_an_exception_outside_of_steps_ends_the_job(tmp_path, fault, why):
    job = run_job("ranks_lightning.py", tmp_path, faults=[fault])
    assert job.code == 1
    assert why in job.output
    assert f"Transient: fault at {fault[0]} of step {fault[1]}" in job.output
    assert "faults.at(" in job.output  # the traceback leads into the program


def chaos(name, plan, record):
    """Run `hyperpod chaos` once the first step is done, before which a loss ends the job; returns what it says."""
    deadline_s = time.monotonic() + 60.0
    while not (record.exists() and record.read_text()):
        assert time.monotonic() < deadline_s, "no step was done within a minute"
        time.sleep(0.05)
    which = ["--run-id", name, "--seed", str(plan.seed), "--kinds", ",".join(plan.kinds), "--count", str(plan.count)]
    pace = ["--every", str(plan.every_s), "--resume-after", str(plan.resume_s)]
    command = [sys.executable, "-m", "hyperpod_plugins.cli", "chaos", *which, *pace]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def test_chaos_from_outside_does_what_it_says(undisturbed, tmp_path):
    plan = ChaosPlan(every_s=0.5, count=2, seed=8, kinds=("kill", "stop"), resume_s=1.0)
    drawn = [(blow.cause, blow.kind) for blow in schedule(plan)]
    assert {kind for _, kind in drawn} == {"kill", "stop"}
    with ThreadPoolExecutor(1) as pool:
        striking = pool.submit(chaos, str(tmp_path), plan, tmp_path / "record-0.jsonl")
        name = ("--rdzv-id", str(tmp_path))
        job = run_job("ranks_lightning.py", tmp_path, environ={"STEP_S": "0.4"}, args=name, prefix=("env",))  # for `ps`
        said = re.findall(r"fault \d of 2: (.*): SIG(\w+) to worker (\d+)", striking.result(60))
    assert job.code == 0, job.output[-8000:]
    assert [(cause, kind.lower()) for cause, kind, _ in said] == drawn
    [killed] = [pid for _, kind, pid in said if kind == "KILL"]
    assert re.findall(r"pid (\d+), incarnation 0\) ended .* killed by SIGKILL", job.output) == [killed]
    assert job.output.count("takes its place") == 1  # whoever was stopped goes on
    assert_equal(job, undisturbed)
