"""The benchmarks as people start them, cut down by `--quick`: they end in time, and every contender was measured."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import context, memory
from benchmarks.data_restart import CONTENDERS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.spawns


def run_quickly(name, folder, *arguments, timeout_s=270):
    """The document that a benchmark wrote."""
    out = folder / "out.json"
    command = [sys.executable, str(BENCHMARKS / name), "--quick", "--json", str(out), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stderr[-8000:]
    return json.loads(out.read_text())


def runs_of(document, names):
    """The runs of a benchmark's only comparison, each with a sample a round."""
    (comparison,) = document["comparisons"]
    runs = comparison["runs"]
    assert [run["name"] for run in runs] == names
    for run in runs:
        assert len(run["step_s"]) == len(run["measures"]["cpu_s"]) == comparison["schedule"]["rounds"]
        assert min(run["step_s"]) > 0
    return runs


def test_ways_to_save_memory_compute_the_same_and_fit_eight_times_the_tokens(tmp_path):
    found = run_quickly("memory.py", tmp_path)["findings"]  # it fails with less than 8 times, or 95 % of the offload
    samples, longest = found["samples"], found["longest"]
    peaks = [sample["peak_mib"] for sample in samples]
    assert max(peaks[1:]) < peaks[0]
    assert {round(sample["loss"], 5) for sample in samples} == {round(samples[0]["loss"], 5)}
    assert longest["tokens"] >= 8 * samples[0]["tokens"]


def test_chunks_tiles_and_offload_train_eight_times_the_tokens_in_the_memory_of_a_plain_step():
    plain, *_, last = memory.WAYS
    tokens, device = 192, torch.device("cpu")
    wanted, found = memory.run(plain, tokens, device), memory.run(last, 8 * tokens, device)
    assert found.peak_mib <= wanted.peak_mib
    theory_mib = (memory.LAYERS - 1) * found.tokens * memory.WIDTH * 4 / 2**20  # the last layer keeps its input
    assert 0.95 * theory_mib <= found.stored_mib <= theory_mib


@pytest.mark.variant
def test_ways_to_load_a_pretrained_model_give_the_same_shards(tmp_path):
    samples = run_quickly("load_pretrained.py", tmp_path, "--ranks", "2")  # it fails where they differ, or take more
    assert {(each["way"], each["rank"]) for each in samples} == {
        (way, rank) for way in ("at once", "delayed", "delayed on rank 0") for rank in range(2)
    }
    for way in ("delayed", "delayed on rank 0"):
        read = [each["disk_bytes"] / each["file_bytes"] for each in samples if each["way"] == way]
        assert sum(read) == 0.0 or 0.9 < sum(read) < 1.15  # each byte once; 0 where the folder is in memory
        if way == "delayed on rank 0":
            assert read[1] < 0.1


def test_checkpoints_are_read_back_as_they_were_saved(tmp_path):
    seconds = run_quickly("checkpoint.py", tmp_path)  # it fails if a value differs
    assert seconds.keys() == {"hyperpod save", "hyperpod load", "dcp save", "dcp load"}
    assert all(len(each) == 2 and min(each) > 0 for each in seconds.values())


def test_the_ledger_is_timed_with_and_without(tmp_path):
    findings = run_quickly("ledger.py", tmp_path)["findings"]
    assert {name: len(each) for name, each in findings["samples_s"].items()} == {"off": 6, "on": 6}
    low, high = findings["share_95"]
    assert low <= findings["share"] <= high
    assert 50 < findings["bytes_per_step"] < 4096


def test_a_run_with_kills_is_forecast_from_its_ledger(tmp_path):
    findings = run_quickly("forecast.py", tmp_path)["findings"]
    assert findings["ledger_s"] > 0
    assert findings["forecast_s"] > 0


def test_the_planner_simulates_every_policy_under_every_model_of_failures(tmp_path):
    findings = run_quickly("planner.py", tmp_path)["findings"]  # it fails with more than 10 s for one of them
    assert len({(each["failures"], each["policy"]) for each in findings["samples"]}) == 2 * 3 * 8
    assert all(each["time_ratio"] > 1 for each in findings["samples"])


def test_the_backend_and_gloo_are_compared_on_the_same_training(tmp_path):
    document = run_quickly("comm_overhead.py", tmp_path)
    plain, again, ours = runs_of(document, ["gloo", "gloo again (control)", "hyperpod"])
    assert len(plain["results"]) == 4
    assert plain["results"] == again["results"] == ours["results"]
    for losses in ours["results"]:
        assert losses[-1] < losses[0]


def test_the_strategy_and_plain_torch_are_compared_on_the_same_curve(tmp_path):
    document = run_quickly("throughput.py", tmp_path, "--only", "torch FSDP2", "Lightning hyperpod")
    names = ["torch FSDP2", "torch FSDP2 again (control)", "Lightning hyperpod"]
    runs = runs_of(document, names)
    assert all(losses[-1] < losses[0] for losses in runs[0]["results"])
    differences = document["findings"]["loss_difference"]
    assert list(differences) == names[1:]
    assert max(differences.values()) < 1e-4


def test_context_parallelism_is_compared_on_the_same_losses(run_ranks):
    for key_value_heads, comm_types in ((8, ("a2a",)), (1, ("all_gather", "p2p"))):
        sizes = (key_value_heads, 32)
        alone = run_ranks(context.train, range(2), 1, "auto", *sizes, world_size=2)
        for comm_type in comm_types:
            together = run_ranks(context.train, range(2), 2, comm_type, *sizes, world_size=2)
            for one, other in zip(alone, together, strict=True):
                assert other == pytest.approx(one, rel=1e-6)


def test_every_way_to_read_gives_a_first_batch_after_a_restart(tmp_path):
    findings = run_quickly("data_restart.py", tmp_path, "--folder", str(tmp_path))["findings"]
    assert findings["gib"] < 0.1
    assert findings["seconds"].keys() == {"warm", "cold"}
    for by_contender in findings["seconds"].values():
        assert by_contender.keys() == {*CONTENDERS}
        assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in by_contender.values())
