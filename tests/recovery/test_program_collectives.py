"""Collectives that the program itself calls where a replacement is not connected yet."""

import json
from pathlib import Path

import pytest
import torch
import warm
from recovery.test_in_place import PRELOAD

from hyperpod_plugins.comm import WORLD, GroupKey
from hyperpod_plugins.comm.runtime import runtime
from hyperpod_plugins.elastic import JobStore
from hyperpod_plugins.errors import StateLost
from hyperpod_plugins.recovery import program_collectives
from hyperpod_plugins.recovery.packing import pack
from hyperpod_plugins.recovery.program_collectives import MAX_RESULT_BYTES, ProgramCollectives


class Done:
    def wait(self):
        return True


def restart_all(lost):
    raise lost


@pytest.fixture
def collectives(monkeypatch):
    monkeypatch.setattr(program_collectives, "program_frames", lambda: "setup (train.py:20) < <module> (train.py:90)")
    job_store = JobStore(torch.distributed.HashStore())
    yield lambda worker_id=0, world=0: ProgramCollectives(job_store, worker_id, lambda: world, restart_all)
    runtime.reset()


def record(collectives, *results, kind="all_reduce", key=WORLD):
    for result in results:
        collectives._record(kind, key, result, Done())


def repeat(collectives, place, kind="all_reduce", key=WORLD):
    collectives._repeat(kind, key, place)
    return place


def test_results_come_back_in_the_order_of_the_calls(collectives):
    first, second = [torch.ones(2)], [[torch.zeros(1, dtype=torch.int64), torch.full((3,), 2.5)]]
    record(collectives(), first, second)
    again = collectives()

    def places():
        yield [torch.zeros(2)]
        yield [[torch.ones(1, dtype=torch.int64), torch.zeros(3)]]

    for _ in range(2):
        found = [repeat(again, place) for place in places()]
        assert found[0][0].tolist() == [1.0, 1.0]
        assert [each.tolist() for each in found[1][0]] == [[0], [2.5] * 3]
        again.begin_again()


def test_what_has_no_record_makes_all_start_again(collectives):
    record(collectives(), [torch.ones(2)])
    for place in ([torch.ones(3)], [torch.ones(2, dtype=torch.float64)], [torch.ones(1), torch.ones(1)]):
        with pytest.raises(StateLost, match=r"all_reduce in setup \(train.py:20\) was called before"):
            repeat(collectives(), place)
    with pytest.raises(StateLost, match="its result was not recorded"):
        repeat(collectives(worker_id=1), [torch.ones(2)])
    with pytest.raises(StateLost, match="its result was not recorded"):
        repeat(collectives(world=1), [torch.ones(2)])
    late = collectives()
    late.end_set_up()
    with pytest.raises(StateLost):
        repeat(late, [torch.ones(2)])
    other = collectives()
    other.begin_set_up(1)
    with pytest.raises(StateLost):
        repeat(other, [torch.ones(2)])
    repeat(collectives(), [], kind="barrier")  # which has no result


@pytest.mark.parametrize("data", [b"garbage", pack({"tensors": 1}), pack([3.0])])
def test_a_record_that_no_rank_has_written_counts_as_none(collectives, data):
    ours = collectives()
    record(ours, [torch.ones(2)])
    again = collectives()
    again._job_store.set(
        collectives()._next_name("setup (train.py:20) < <module> (train.py:90)", "all_reduce", WORLD), data
    )
    with pytest.raises(StateLost):
        repeat(again, [torch.ones(2)])


def test_a_broadcast_to_all_is_the_same_on_other_ranks_and_in_other_worlds(collectives):
    record(collectives(), [torch.full((2,), 3.0)], kind="broadcast")
    record(collectives(), [torch.ones(2)], kind="broadcast", key=GroupKey("shard"))
    assert repeat(collectives(worker_id=5, world=2), [torch.zeros(2)], kind="broadcast")[0].tolist() == [3.0, 3.0]
    with pytest.raises(StateLost):
        repeat(collectives(worker_id=5), [torch.zeros(2)], kind="broadcast", key=GroupKey("shard"))


def test_large_results_and_those_of_single_ranks_are_told_of(collectives, caplog):
    ours = collectives()
    record(ours, [torch.ones(MAX_RESULT_BYTES // 4)])
    assert not caplog.records
    record(ours, [torch.ones(MAX_RESULT_BYTES // 4 + 1)])
    record(ours, [torch.ones(1)], kind="send")
    assert [each.getMessage().split(" at ")[0] for each in caplog.records] == ["all_reduce", "send"]
    assert "all processes start again from the last checkpoint" in caplog.text


def frames_of(module, function):
    """What `program_frames` says of a collective that a function of another module has called."""
    scope = {"__name__": module, "look": lambda: program_collectives.program_frames()}
    exec(f"def {function}():\n    return look()", scope)
    return scope[function]()


@pytest.mark.parametrize(
    ("module", "function", "is_of_program"),
    [
        ("torch.distributed.distributed_c10d", "all_reduce", True),
        ("torch.distributed.fsdp._fully_shard", "all_reduce", False),
        ("torch.distributed.fsdp._fully_shard._fsdp_state", "_pre_forward", True),
        ("torch.distributed.tensor._redistribute", "redistribute_local_tensor", True),
        ("torch.distributed.tensor._api", "distribute_tensor", False),
        ("lightning.pytorch.core.module", "all_gather", True),
        ("lightning.pytorch.trainer.trainer", "_log_hyperparams", False),
        ("hyperpod_plugins.lightning.strategy", "reduce_boolean_decision", True),
        ("hyperpod_plugins.session.session", "agree", False),
        ("accelerate.accelerator", "gather", True),
        ("accelerate.accelerator", "gather_for_metrics", True),
        ("accelerate.accelerator", "prepare", False),
        ("hyperpod_plugins.accelerate.collectives", "gathered", True),
        ("torch.distributed.checkpoint.utils", "gather", False),
        ("torch.distributed._state_dict_utils", "_broadcast_tensors", True),
    ],
)
def test_who_calls_a_collective(module, function, is_of_program):
    found = frames_of(module, function)
    assert found.startswith("frames_of (test_program_collectives.py:") is is_of_program
    assert bool(found) is is_of_program


def test_a_library_that_shares_objects_counts_as_the_program():
    scope = {"__name__": "torch.distributed.distributed_c10d", "look": lambda: program_collectives.program_frames()}
    exec("def all_gather_object():\n    return look()", scope)
    for module, is_of_program in (
        ("torch.distributed.checkpoint.utils", True),
        ("accelerate.utils.fsdp_utils", True),
        ("lightning.fabric.utilities.distributed", False),
        ("hyperpod_plugins.parallel.checkpoint.dcp_storage", False),
    ):
        outer = {"__name__": module, "all_gather_object": scope["all_gather_object"]}
        exec("def share():\n    return all_gather_object()", outer)
        assert bool(outer["share"]()) is is_of_program, module


def run(folder, kind, places, hooks):
    folder.mkdir()
    program = Path(__file__).with_name("program_own_collectives.py")
    options = ["--nproc-per-node=2", "--preload", PRELOAD, str(program), kind, str(folder), places, hooks]
    code, text = warm.run(options, timeout_s=120)
    assert code == 0, text[-8000:]
    assert len(list(folder.glob("done-*"))) == len(places.split())
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)], text


@pytest.mark.spawns
@pytest.mark.parametrize(
    ("kind", "places", "hooks"),
    [("fit", "step3 validation1", "setup,start"), ("loop", "step2 step5", "setup")],
    ids=["fit", "loop"],
)
def test_a_set_up_that_communicates_is_repaired_in_place(kind, places, hooks, tmp_path):
    undisturbed, _ = run(tmp_path / "undisturbed", kind, "", hooks)
    assert undisturbed[0][0]["setup"] == 3.0
    found, text = run(tmp_path / "disturbed", kind, places, hooks)
    assert found == undisturbed
    assert text.count("repaired in") == len(places.split())
    assert "start again" not in text


@pytest.mark.spawns
def test_hooks_that_communicate_before_a_replacement_is_there_make_all_start_again(tmp_path):
    hooks = "setup,epoch,batch"
    undisturbed, _ = run(tmp_path / "undisturbed", "fit", "", hooks)
    found, text = run(tmp_path / "disturbed", "fit", "epoch1 step3", hooks)
    assert found == undisturbed
    assert "all processes start again from" in text
    assert "all_reduce in total (program_own_collectives.py:" in text
