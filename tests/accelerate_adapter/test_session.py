"""What Accelerate has prepared can be trained in transactions: ranks are killed, and the bits are the same."""

import json

import pytest
import torch
from recovery.elastic_nodes import Nodes
from recovery.faults import PRELOAD, run_job

SCRIPT = "../accelerate_adapter/program_session.py"


@pytest.mark.spawns
def test_a_killed_rank_is_replaced_under_accelerate(tmp_path):
    faults = [["forward", 2, 3, "kill"], ["evaluated", 4, 1, "raise"], ["backward", 5, 0, "kill"]]
    calm = run_job(SCRIPT, tmp_path / "calm", args=PRELOAD)
    disturbed = run_job(SCRIPT, tmp_path / "disturbed", faults=faults, args=PRELOAD)
    assert calm.code == disturbed.code == 0, disturbed.output[-8000:]
    assert disturbed.num_faults == len(faults)
    for wanted, found in zip(calm.results(), disturbed.results(), strict=True):
        assert len(wanted["losses"]) == 10
        assert found["losses"] == wanted["losses"][10 - len(found["losses"]) :]
        for name, value in wanted["state"].items():
            assert torch.equal(found["state"][name], value), name


def run_bodies(folder, what, faults=(), num_ranks=4):
    script = "../accelerate_adapter/program_bodies.py"
    return run_job(script, folder, faults=faults, num_ranks=num_ranks, environ={"WHAT": what}, args=PRELOAD)


@pytest.mark.spawns
def test_an_evaluation_that_is_interrupted_at_its_last_batch(tmp_path):
    """Accelerate still takes its loader for the active one, and cut the padding off whatever was gathered later."""
    faults = [["batch 1", 3, 1, "kill"], ["batch 1", 6, 2, "kill"]]
    calm, disturbed = run_bodies(tmp_path / "calm", "evaluates"), run_bodies(tmp_path / "found", "evaluates", faults)
    assert calm.code == disturbed.code == 0, disturbed.output[-8000:]
    assert disturbed.num_faults == len(faults)
    assert all(found == {"found": [[[*range(11)], [0, 1] * 4]] * 10} for found in calm.results())
    assert disturbed.results() == calm.results()


@pytest.mark.spawns
@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("accumulates", "gradient_accumulation_steps=4 would divide each loss once more"),
        ("wrapped", "optimizer.optimizer where Accelerate has wrapped it"),
        ("wrapped scheduler", "HyperPodScheduler wraps a scheduler, and advances it by the number of ranks"),
        ("own scheduler", "a scheduler was created for AdamW, but not given to session.train"),
        ("saved by Accelerate", "Linear was given to accelerator.register_for_checkpointing, but not to the session"),
        ("second model", "Linear was prepared by the Accelerator, but is not part of the model given to session.train"),
        ("shuffled", "a loader with shuffle=True was prepared before the loop"),
    ],
)
def test_programs_that_are_refused(what, told, tmp_path):
    job = run_bodies(tmp_path, what, num_ranks=2)
    assert job.code == 1
    assert told in job.output, job.output[-6000:]


class AcceleratedNodes(Nodes):
    """Agents of a job that runs `program_session.py`."""

    script = SCRIPT
    patience_s = 120.0  # Accelerate takes long to import


@pytest.mark.spawns
def test_an_accelerator_follows_its_session_to_other_sizes(tmp_path):
    nodes = AcceleratedNodes(tmp_path, "")
    nodes.environ |= {"REPLICAS": "2"}
    nodes.args += PRELOAD
    try:
        nodes.start("a")
        nodes.await_size(1)  # whoever comes before the first step makes all begin again
        nodes.start("b")
        nodes.await_size(2)
        nodes.lose("b")
        nodes.await_size(1)
        num_steps = nodes.finish()
    finally:
        nodes.clear()
    assert sorted(nodes.steps()) == list(range(num_steps))
    lines = [json.loads(line) for line in (tmp_path / "record-0.jsonl").read_text().splitlines()]
    evaluated = [line for line in lines if line["kind"] == "evaluated"]
    assert {line["size"] for line in evaluated} == {1, 2}
    assert all(sorted(line["ids"]) == list(range(11)) for line in evaluated)  # each once, whatever the size


@pytest.mark.spawns
@pytest.mark.parametrize(
    "state_dict_type", ["SHARDED_STATE_DICT", pytest.param("FULL_STATE_DICT", marks=pytest.mark.variant)]
)
def test_a_job_that_has_loaded_a_state_of_accelerate_is_repaired_in_place(state_dict_type, tmp_path):
    environ = {"SAVED": str(tmp_path / "saved"), "STATE_DICT_TYPE": state_dict_type}
    program = {"script": "../accelerate_adapter/program_load_state.py", "num_ranks": 2, "environ": environ}
    faults = [["forward", 2, 0, "kill"], ["forward", 4, 1, "kill"]]
    first = run_job(folder=tmp_path / "first", args=PRELOAD, **program)
    calm = run_job(folder=tmp_path / "calm", args=PRELOAD, **program)
    disturbed = run_job(folder=tmp_path / "disturbed", faults=faults, args=PRELOAD, **program)
    assert first.code == calm.code == disturbed.code == 0, disturbed.output[-8000:]
    assert disturbed.num_faults == disturbed.output.count("; repaired in") == len(faults)
    assert "start again" not in disturbed.output
    for wanted, found in zip(calm.results(2), disturbed.results(2), strict=True):
        assert wanted["factor"] == found["factor"] == 7
        for name, value in wanted["state"].items():
            assert torch.equal(found["state"][name], value), name
