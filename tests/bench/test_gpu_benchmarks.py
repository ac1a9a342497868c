"""Benchmarks of one GPU: how contenders take turns, without a model; and each of them on the CPU, small."""

import argparse
import json
import math
from types import SimpleNamespace

import pytest
import torch

from benchmarks.memory import Taken
from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.memory.offload import HostCopies

pytest.importorskip("transformers")
from benchmarks import memory
from benchmarks.gpu import (
    chunks_and_tiles,
    delayed_load,
    fp8,
    memory_plan,
    offload,
    one_device,
)

ARGUMENTS = argparse.Namespace(rounds=6, seconds=60.0)


def steps_of(seconds, *, fails_at=math.inf, turns=None, name=""):
    """A contender whose steps take a given time each, until there is no memory."""

    def build():
        def step():
            turns.append(name)
            if turns.count(name) > fails_at:
                raise RuntimeError("CUDA error: out of memory")
            return Taken(loss=1.0, seconds=seconds, peak_bytes=1 << 20)

        return step

    return build


def refused():
    raise ConfigError("this device has no such units")


@pytest.fixture
def nothing_to_free(monkeypatch):
    monkeypatch.setattr(one_device, "free", lambda _: None)  # which would collect garbage of the whole process


@pytest.mark.usefixtures("nothing_to_free")
@pytest.mark.parametrize("one_by_one", [False, True])
def test_contenders_take_turns_until_they_cannot(one_by_one):
    found, turns = one_device.Found(reference="first"), []
    builds = {
        "first": steps_of(1.0, turns=turns, name="first"),
        "ours": steps_of(1.004, turns=turns, name="ours"),
        "full": steps_of(1.0, turns=turns, name="full", fails_at=1),
        "refused": refused,
    }
    one_device.compare(found, "512 tokens", builds, ARGUMENTS, tokens=512, one_by_one=one_by_one)
    rounds = 1 if one_by_one else 6
    [comparison] = found.comparisons
    assert [(run.name, len(run.step_s)) for run in comparison.runs] == [("first", rounds), ("ours", rounds)]
    assert found.left == {"full": "out of memory at 512 tokens", "refused": "this device has no such units"}
    assert [(each.way, each.peak_mib) for each in found.samples] == [("first", 1.0), ("ours", 1.0)]
    if one_by_one:
        assert turns == ["first"] * 2 + ["ours"] * 2 + ["full"] * 2
    else:
        assert turns[3:9] == ["first", "ours", "full", "ours", "first", "first"]
    undecided = "not decided by 1 rounds" if one_by_one else ""
    held = [found.judge("", "512 tokens", ("ours", "first"), limit).held for limit in (1.005, 1.003)]
    assert held == ([undecided] * 2 if one_by_one else ["met", "missed"])
    assert found.judge("", "512 tokens", ("ours", "full"), 1.0).held.startswith("not measured: full: out of memory")


@pytest.mark.usefixtures("nothing_to_free")
def test_without_the_reference_there_are_no_ratios():
    found, turns = one_device.Found(reference="first"), []
    builds = {name: steps_of(1.0, turns=turns, name=name, fails_at=3 * (name == "ours")) for name in ("first", "ours")}
    one_device.compare(found, "512 tokens", builds, ARGUMENTS, tokens=512)
    assert (found.comparisons, found.samples) == ([], [])
    assert found.left == dict.fromkeys(("first", "ours"), "out of memory at 512 tokens")


@pytest.mark.usefixtures("nothing_to_free")
def test_limits_of_the_offload_are_those_of_long_steps():
    found = one_device.Found(reference=offload.REFERENCE)
    for tokens in (4096, 32_768, 262_144):
        names = offload.WAYS if tokens < 262_144 else [offload.OURS]
        builds = {name: steps_of(2.0 if name in offload.BUILT_IN else 1.0, turns=[], name=name) for name in names}
        one_device.compare(found, offload.title_of(tokens), builds, ARGUMENTS, tokens=tokens)
    limits = offload.limits_of(found, [4096, 32_768, 262_144])
    assert [limit.held for limit in limits] == ["met"] * 3 + [
        "not measured: recompute + offload: it did not run"
    ] * 3 + ["met"]
    found.left[offload.OURS] = "out of memory at 65536 tokens"
    found.samples = [each for each in found.samples if each.tokens < 262_144]
    assert offload.limits_of(found, [262_144])[-1].held == "missed: out of memory at 65536 tokens"
    assert offload.limits_of(found, [4096])[-1].held == "not measured"


@pytest.mark.parametrize(("allocated", "held"), [(0.92, "met"), (1.1, "met"), (1.13, "missed"), (0.89, "missed")])
def test_a_plan_is_compared_with_what_is_allocated(allocated, held):
    plan = SimpleNamespace(peak=10.0, device=10.5)
    peak = memory_plan.Peak(allocated=10 * allocated, reserved=11.0, seconds=1.0, loss=1.0)
    limit = memory_plan.judged("plain", plan, peak)
    assert limit.held == held
    assert f"({1 / allocated:.3f}); reserved" in limit.measured


def test_what_keeps_all_activations_on_the_host_is_left_out_where_it_has_no_room(monkeypatch):
    model = SimpleNamespace(config=SimpleNamespace(num_hidden_layers=36, hidden_size=2560))
    monkeypatch.setattr(offload, "host_share", lambda: 128 * 2**30)
    fits = [tokens for tokens in offload.LENGTHS if offload.fit_on_host(model, tokens, offload.TIMES_INPUTS)]
    assert fits == [4096, 8192]  # 25.7 GB at 4,096 tokens, of 82
    assert offload.needs_host_alone(model, 16_384, [offload.ALL_SAVED])
    assert not offload.needs_host_alone(model, 16_384, [offload.OURS])


@pytest.mark.parametrize(
    ("load", "held"),
    [
        (HostCopies.load, "met"),
        (lambda self, source, target, after: target.zero_(), "missed"),
        (lambda self, source, target, after: target.copy_(torch.rand_like(target)), "missed"),
    ],
    ids=["copied", "not yet", "something else"],
)
def test_an_offload_that_computes_with_other_inputs_is_noticed(monkeypatch, load, held):
    monkeypatch.setattr(HostCopies, "load", load)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model = one_device.with_gradients(memory.build(torch.device("cpu")))
    limit = offload.compare_bits(model, [64, 96], 2)
    assert limit.held == held
    assert limit.measured == f"{2 * (held == 'met')} equal, 0.5 MiB offloaded"  # of 3 blocks, at 1 KiB a token


SMALL = {
    offload: {"recompute", "none", "Accelerate offload", "torch save_on_cpu", "recompute + offload"},
    chunks_and_tiles: {"whole", "chunked loss", "tiled MLP", "chunked loss + tiled MLP"},
    fp8: {"bfloat16", "tensorwise", "rowwise"},
    delayed_load: {"whole", "device_map", "delayed"},
    memory_plan: set(memory_plan.WAYS),
}


@pytest.mark.slow_single
@pytest.mark.parametrize("benchmark", SMALL, ids=[each.__name__.rpartition(".")[2] for each in SMALL])
def test_it_runs_small_on_a_cpu(benchmark, tmp_path, capsys, monkeypatch):
    names, path = SMALL[benchmark], tmp_path / "out.json"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        benchmark.main([])  # in full it needs a GPU
    assert benchmark.main(["--quick", "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    found = document["findings"]
    assert {each["way"] for each in found["samples"]} == names
    assert all({run["name"] for run in each["runs"]} == names for each in document["comparisons"])
    assert found["left"].keys() == ({"transformers offload"} if benchmark is offload else set())
    if benchmark is offload:
        assert (found["limits"][0]["held"], "3 steps" in found["limits"][0]["what"]) == ("met", True)
    if benchmark is memory_plan:
        assert [each["held"] for each in found["limits"]] == ["met"] * len(names)
    if benchmark is fp8:
        assert "tensorwise: 1.15 times as fast as bfloat16" in capsys.readouterr().out
    tolerance = 1e-2 if benchmark is fp8 else 1e-6
    for tokens in {each["tokens"] for each in found["samples"]}:
        losses = [each["loss"] for each in found["samples"] if each["tokens"] == tokens]
        assert losses == pytest.approx([losses[0]] * len(losses), rel=tolerance)
