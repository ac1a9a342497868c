"""Loops as people write them end with the same bits although ranks are killed, or are refused before the first step."""

import json
from pathlib import Path

import pytest
import torch
from recovery.faults import PRELOAD, run_job

pytestmark = pytest.mark.spawns
PROGRAM = str(Path(__file__).with_name("program_loops.py"))


def run(folder, loop, faults=(), num_ranks=4, options=None):
    environ = {"LOOP": loop, "OPTIONS": json.dumps(options or {})}
    return run_job(PROGRAM, folder, faults=faults, num_ranks=num_ranks, environ=environ, args=PRELOAD)


def assert_equal(wanted, found, num_ranks, but=()):
    for one, other in zip(wanted.results(num_ranks), found.results(num_ranks), strict=True):
        assert one.keys() == other.keys()
        mean, same = (each.get("program", {}).pop("mean", torch.zeros(1)) for each in (one, other))
        assert torch.equal(mean, same)
        for name in one.keys() - {"state", *but}:
            assert one[name] == other[name], name
        for name in one["state"].keys() - {*but}:
            assert torch.equal(one["state"][name], other["state"][name]), name


@pytest.mark.parametrize(
    "faults",
    [
        [["loop 0", 2, 2, "kill"], ["entry 1", 0, 2, "sleep1"], ["loop 1", 0, 1, "kill"], ["loop 1", 6, 3, "kill"]],
        [["entry 0", 0, 3, "kill"], ["entry 1", 0, 1, "kill"]],
    ],
)
def test_two_loops_over_one_optimizer(faults, tmp_path):
    """A rank is lost as a loop begins, in the first step of the second one, and after modules left training mode."""
    wanted, found = run(tmp_path / "wanted", "two_loops"), run(tmp_path / "found", "two_loops", faults)
    assert (wanted.code, found.code, found.num_faults) == (0, 0, len(faults)), found.output[-6000:]
    assert_equal(wanted, found, 4)


IN_PLACE = [
    ["compute", 4, 0, "kill"],
    ["committed", 6, 3, "kill"],
    ["between", 8, 2, "kill"],
    ["between", 8, 0, "kill"],
    ["compute", 10, 2, "raise"],
    ["between", 12, 1, "break"],
    ["between", 19, 3, "kill"],
]
LATE = [["begun", 3, 1, "kill"], ["begun", 15, 0, "kill"]]
TO_A_SNAPSHOT = [
    ["compute", 7, 0, "kill"],
    ["compute", 7, 2, "kill"],
    ["between", 13, 1, "kill"],
    ["between", 13, 3, "kill"],
]


@pytest.mark.parametrize(
    ("faults", "options", "but"),
    [
        pytest.param(IN_PLACE, {}, (), id="in place"),
        pytest.param(TO_A_SNAPSHOT, {"snapshot_every_steps": 3}, (), id="with a return to a snapshot"),
        # What a rank alone has changed after a commit is lost with it until its next step begins.
        pytest.param(
            LATE,
            {"rank_local_state": "replica"},
            ("total", "average", "1.running_mean"),
            id="as a body begins, with what a replica has",
        ),
        pytest.param(LATE, {}, (), id="as a body begins"),
        pytest.param(LATE, {"snapshot_every_steps": 2}, (), id="as a body begins, with snapshots"),
    ],
)
def test_what_a_body_changes_counts_once(faults, options, but, tmp_path):
    wanted = run(tmp_path / "wanted", "counts", options=options)
    found = run(tmp_path / "found", "counts", faults, options=options)
    assert (wanted.code, found.code, found.num_faults) == (0, 0, len(faults)), found.output[-6000:]
    assert_equal(wanted, found, 4, but)


def test_a_body_that_only_one_rank_has_not_ended(tmp_path):
    """All run it again: what it writes of its own after the last collective is not left out."""
    faults = [
        ["late", 2, 2, "sleep2"],
        ["compute", 3, 3, "kill"],
        ["late", 5, 2, "sleep2"],
        ["late", 5, 3, "kill in 0.5"],
    ]
    wanted, found = run(tmp_path / "wanted", "one_sided"), run(tmp_path / "found", "one_sided", faults)
    assert (wanted.code, found.code, found.num_faults) == (0, 0, 4), found.output[-6000:]
    assert_equal(wanted, found, 4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        pytest.param({"float8_recipe": "rowwise"}, "rowwise, emulated on the CPU", id="rowwise"),
        pytest.param(
            {"float8_recipe": "tensorwise", "float8_all_gather": True},
            "tensorwise, emulated on the CPU, gathered in float8",
            id="gathered",
        ),
        pytest.param(
            {"float8_recipe": "te-fp8", "block_classes": ["Block"], "te_scaling": {"amax_history_len": 4}},
            "te-fp8",
            id="te",
        ),
        pytest.param(
            {
                "float8_recipe": "te-fp8",
                "block_classes": ["Block"],
                "te_scaling": {"amax_history_len": 4},
                "tensor_parallel_degree": 2,
                "hybrid_shard_degree": 1,
                "tensor_plan": {"*.up": "colwise", "*.down": "rowwise"},
                "activation_offload": True,
            },
            "te-fp8",
            id="te, recomputed, offloaded and split",
        ),
    ],
)
def test_a_model_in_float8(options, said, tmp_path):
    faults = [["compute", 3, 1, "kill"], ["committed", 5, 2, "kill"], ["compute", 7, 0, "raise"]]
    wanted = run(tmp_path / "wanted", "float8", options=options)
    found = run(tmp_path / "found", "float8", faults, options=options)
    assert (wanted.code, found.code, found.num_faults) == (0, 0, 3), found.output[-6000:]
    assert f"float8 ({said}): 6 of 8 linear layers" in found.output
    assert_equal(wanted, found, 4)


TENSOR = {"tensor_parallel_degree": 2, "hybrid_shard_degree": 1}


@pytest.fixture(scope="module")
def undisturbed_with_little_memory(tmp_path_factory):
    pytest.importorskip("transformers")
    job = run(tmp_path_factory.mktemp("wanted"), "saving", options=TENSOR)
    assert job.code == 0, job.output[-6000:]
    return job


def test_offload_chunks_and_tiles_with_tensor_parallelism(undisturbed_with_little_memory, tmp_path):
    """A replacement computes what its tensor-parallel peer does, and with it: it tries no MLP out by itself."""
    faults = [["compute", 3, 1, "kill"], ["committed", 5, 2, "kill"], ["computed", 7, 3, "kill"]]
    found = run(tmp_path, "saving", faults, options=TENSOR)
    assert (found.code, found.num_faults) == (0, 3), found.output[-6000:]
    assert_equal(undisturbed_with_little_memory, found, 4)


def test_tensor_parallel_ranks_keep_the_same_blocks_again_after_a_repair(undisturbed_with_little_memory, tmp_path):
    """A replacement knows nothing of its memory yet, and its peer must not keep a block that it computes again."""
    faults = [["compute", 3, 1, "kill"], ["computed", 6, 2, "raise"], ["committed", 8, 3, "kill"]]
    found = run(tmp_path, "saving", faults, options=TENSOR | {"activation_offload": "auto"})
    assert (found.code, found.num_faults) == (0, 3), found.output[-6000:]
    decided = "activation_offload='auto': blocks kept: 1, computed again: 2; "
    assert found.output.count(decided) == 3  # in the third step, and two steps after each repair but the last
    assert found.output.count("of the ranks that compute a block together, one has room for fewer") == 3
    assert_equal(undisturbed_with_little_memory, found, 4)


@pytest.mark.parametrize(
    ("faults", "options"),
    [
        pytest.param(
            [
                ["between", 0, 2, "kill"],
                ["compute", 3, 0, "raise"],
                ["compute again", 3, 0, "raise"],
                ["between", 5, 1, "break"],
                ["between", 8, 0, "kill"],
                ["compute", 11, 3, "kill"],
            ],
            {},
            id="in place",
        ),
        pytest.param(
            [
                ["compute", 6, 1, "kill"],  # its replacement takes the snapshot of this step
                ["compute", 7, 0, "kill"],
                ["compute", 7, 2, "kill"],
                ["between", 14, 2, "kill"],
                ["begun", 15, 3, "kill"],  # after a body that ran again, which has written
            ],
            {"snapshot_every_steps": 3},
            id="with returns to a snapshot",
        ),
    ],
)
def test_all_that_a_body_writes_counts_once(faults, options, tmp_path):
    wanted = run(tmp_path / "wanted", "writes", options=options)
    found = run(tmp_path / "found", "writes", faults, options=options)
    assert (wanted.code, found.code, found.num_faults) == (0, 0, len(faults)), found.output[-6000:]
    assert_equal(wanted, found, 4)


@pytest.mark.parametrize(
    ("faults", "session"),
    [
        pytest.param([["compute", 5, 1, "kill"], ["between", 11, 0, "kill"]], {}, id="each shard once"),
        pytest.param(
            [["begun", 6, 0, "kill"], ["begun", 6, 1, "kill"], ["between", 13, 1, "kill"], ["between", 13, 0, "kill"]],
            {"hybrid_shard_degree": 1},
            id="all replicas at once",
        ),
    ],
)
def test_what_a_body_reads_before_its_step_after_a_return_to_a_snapshot(faults, session, tmp_path):
    options = {"session": session}
    wanted = run(tmp_path / "wanted", "reads", options=options, num_ranks=2)
    found = run(tmp_path / "found", "reads", faults, options=options, num_ranks=2)
    assert (wanted.code, found.code, found.num_faults) == (0, 0, len(faults)), found.output[-6000:]
    assert_equal(wanted, found, 2)
    assert "return to the snapshot" in found.output


def test_what_a_body_reads_before_its_step_and_uses_after_it(tmp_path):
    """Where only the rest is repeated: a survivor and a replacement have what they had as the body began."""
    options = {"session": {"hybrid_shard_degree": 2}}
    faults = [["between", 0, 2, "kill"], ["between", 5, 1, "kill"], ["between", 9, 0, "kill"], ["begun", 13, 3, "kill"]]
    wanted = run(tmp_path / "wanted", "reads", options=options)
    found = run(tmp_path / "found", "reads", faults, options=options)
    assert (wanted.code, found.code, found.num_faults) == (0, 0, 4), found.output[-6000:]
    assert_equal(wanted, found, 4)


def test_a_body_that_compares_a_parameter_before_and_after_its_step(tmp_path):
    """Where the rest of the body is to be repeated, only the parameters after the step are known: all return."""
    faults = [["between", 4, 1, "kill"], ["between", 12, 0, "kill"]]
    wanted, found = run(tmp_path / "wanted", "compares"), run(tmp_path / "found", "compares", faults)
    assert (wanted.code, found.code, found.num_faults) == (0, 0, 2), found.output[-6000:]
    assert_equal(wanted, found, 4)
    assert "return to the snapshot" in found.output


def test_a_body_that_computes_with_what_it_has_written_to_parameters_is_refused(tmp_path):
    job = run(tmp_path, "normalizes", num_ranks=2)
    assert job.code == 1
    assert "writes to 0.bias and also computes with it, before step.run" in job.output
    assert "has run a step" not in job.output


@pytest.mark.parametrize("after", [False, True])
def test_parameters_that_a_body_writes_before_the_step(after, tmp_path):
    """They are put back; if the body writes to parameters after the step, too, all ranks return to a snapshot."""
    faults = [
        ["begun", 0, 1, "kill"],
        ["begun", 6, 2, "kill"],
        ["late", 9, 2, "sleep2"],
        ["late", 9, 3, "kill in 0.5"],
        ["begun", 13, 3, "kill"],
    ]
    wanted = run(tmp_path / "wanted", "decays", options={"after": after})
    found = run(tmp_path / "found", "decays", faults, options={"after": after})
    assert (wanted.code, found.code, found.num_faults) == (0, 0, len(faults)), found.output[-6000:]
    print(found.output[-6000:])
    assert_equal(wanted, found, 4)
    assert after or "return to the snapshot" not in found.output


def test_a_body_that_computes_with_the_model(tmp_path):
    """Snapshots are taken where it has left parameters gathered, and ranks are lost while they are."""
    faults = [["compute", 4, 1, "kill"], ["between", 9, 0, "kill"], ["between", 14, 3, "kill"]]
    wanted, found = run(tmp_path / "wanted", "evaluates"), run(tmp_path / "found", "evaluates", faults)
    assert (wanted.code, found.code, found.num_faults) == (0, 0, 3), wanted.output[-3000:] + found.output[-6000:]
    assert_equal(wanted, found, 4)


def test_what_one_rank_alone_writes_after_a_step_costs_the_others_no_step(tmp_path):
    faults = [["compute", 5, 3, "kill"], ["compute", 9, 1, "kill"], ["begun", 13, 3, "kill"]]
    wanted, found = run(tmp_path / "wanted", "alone"), run(tmp_path / "found", "alone", faults)
    assert (wanted.code, found.code, found.num_faults) == (0, 0, 3), found.output[-6000:]
    assert_equal(wanted, found, 4)
    assert "return to the snapshot" not in found.output
    found = run(tmp_path / "of that rank", "alone", [["begun", 13, 0, "kill"]])
    assert found.code == 0
    assert_equal(wanted, found, 4)
    assert "return to the snapshot" in found.output


def test_loops_that_are_made_before_the_first_one_runs(tmp_path):
    faults = [["between", 3, 1, "kill"], ["loop 1", 8, 2, "kill"]]
    wanted, found = run(tmp_path / "wanted", "made_ahead"), run(tmp_path / "found", "made_ahead", faults)
    assert (wanted.code, found.code, found.num_faults) == (0, 0, 2), found.output[-6000:]
    assert_equal(wanted, found, 4)


def test_code_after_the_block_does_not_end_the_loop_early(tmp_path):
    """All ranks return to a snapshot: the `break` after the block would end the training steps before its time."""
    wanted = run(tmp_path / "wanted", "leaves_late", num_ranks=2)
    found = run(tmp_path / "found", "leaves_late", [["leaves", 9, 1, "kill"]], num_ranks=2)
    assert (wanted.code, found.code, found.num_faults) == (0, 0, 1), found.output[-6000:]
    assert "inside the block, `break` included" in found.output
    assert_equal(wanted, found, 2)


def test_a_rank_that_is_lost_before_the_others_leave_the_loop_by_break(tmp_path):
    """Its replacement would wait for ranks that do not come back to the loop: all processes start again."""
    wanted = run(tmp_path / "wanted", "breaks", num_ranks=2)
    found = run(tmp_path / "found", "breaks", [["break", 4, 1, "kill"]], num_ranks=2)
    assert (wanted.code, found.code, found.num_faults) == (0, 0, 1), found.output[-6000:]
    assert "Other ranks have left the loop already" in found.output
    assert_equal(wanted, found, 2)


def test_exceptions_outside_of_the_step_end_one_process_each(tmp_path):
    faults = [
        ["before", 2, 1, "raise"],
        ["begun", 4, 2, "raise"],
        ["sample", 50, -1, "raise"],
        ["committed", 10, 3, "raise"],
        ["between", 13, 0, "raise"],
        ["after", 16, 1, "raise"],
    ]
    wanted, found = run(tmp_path / "wanted", "raises"), run(tmp_path / "found", "raises", faults)
    assert (wanted.code, found.code, found.num_faults) == (0, 0, len(faults)), found.output[-6000:]
    assert_equal(wanted, found, 4)
    assert found.output.count("takes its place") == len(faults)
    assert "start again" not in found.output


def test_a_loop_that_is_left_by_an_exception_that_the_program_catches(tmp_path):
    """All ranks may do so, as with `break`. A rank that does so alone is replaced: the others wait for it."""
    faults = [["committed", 3, 1, "raise"], ["before", 5, 0, "raise"]]
    wanted = run(tmp_path / "wanted", "catches", num_ranks=2)
    found = run(tmp_path / "found", "catches", faults, num_ranks=2)
    assert (wanted.code, found.code, found.num_faults) == (0, 0, 2), found.output[-6000:]
    assert_equal(wanted, found, 2)
    assert "takes its place" not in wanted.output
    assert found.output.count("takes its place") == 2
    assert "start again" not in found.output


def test_ranks_that_are_lost_while_the_state_after_a_loop_is_kept(tmp_path):
    """No step runs twice, whatever has been written by then."""
    wanted = run(tmp_path / "wanted", "ends", num_ranks=2)
    faults = [["write", 0, 1, "kill"], ["written", 0, 0, "kill"], ["record", 0, 1, "kill"]]
    found = run(tmp_path / "found", "ends", faults, num_ranks=2)
    assert (wanted.code, found.code, found.num_faults) == (0, 0, 3), found.output[-6000:]
    assert_equal(wanted, found, 2)
    for steps in found.records("step", num_ranks=2):
        assert [step["index"] for step in steps] == [0, 1, 2, 3], found.output[-6000:]


@pytest.mark.parametrize(
    ("faults", "options"),
    [
        pytest.param(
            [
                ["maker", 2, 1, "kill"],  # one optimizer has stepped
                ["vote", 4, 3, "kill"],  # both have, and the function has returned
                ["committed", 6, 0, "kill"],
                ["maker", 8, 2, "raise"],
                ["stepped", 10, 0, "break"],
                ["judge", 12, 3, "kill"],
                ["between", 15, 1, "kill"],
            ],
            {"rehearse": [1, 14]},
            id="in place, with rehearsals",
        ),
        pytest.param(
            [["maker", 7, 0, "kill"], ["maker", 7, 2, "kill"], ["stepped", 13, 1, "kill"], ["vote", 13, 3, "kill"]],
            {"snapshot_every_steps": 3},
            id="with returns to a snapshot",
        ),
    ],
)
def test_two_optimizers_that_are_stepped_by_hand(faults, options, tmp_path):
    wanted = run(tmp_path / "wanted", "gan", options=options)
    found = run(tmp_path / "found", "gan", faults, options=options)
    assert (wanted.code, found.code, found.num_faults) == (0, 0, len(faults)), found.output[-6000:]
    assert_equal(wanted, found, 4)
    assert ("return to the snapshot" in found.output) == ("snapshot_every_steps" in options)


def test_a_sharded_model_that_is_not_trained_is_refused(tmp_path):
    job = run(tmp_path, "beside", num_ranks=2)
    assert job.code == 1
    assert "was sharded by session.parallelize, but is not part of the model given to session.train" in job.output
