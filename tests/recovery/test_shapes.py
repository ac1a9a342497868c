"""Programs that register, resize and delete buffers as they train are recovered; other parameters are refused."""

import pytest
from recovery.test_life import results, run

FIT = """
    kill:3:step1:0 kill:0:after3:0 kill:1:epoch_end:0 kill:2:epoch_start:1 kill:0:step2:1 raise:1:after3:1
    kill:3:batch_end4:1 kill:1:step3:2
"""


@pytest.mark.spawns
def test_buffers_that_change_are_those_of_an_undisturbed_fit(tmp_path):
    undisturbed, _ = results("program_shapes.py", tmp_path / "undisturbed", "fit")
    disturbed, text = results("program_shapes.py", tmp_path / "disturbed", " ".join(["fit", *FIT.split()]))
    assert text.count(" 0 steps lost") == len(FIT.split()), text[-8000:]
    assert undisturbed[0]["buffers"] != undisturbed[1]["buffers"]  # or less is tested
    assert disturbed == undisturbed


@pytest.mark.spawns
def test_buffers_that_change_are_those_of_an_undisturbed_loop(tmp_path):
    faults = "kill:1:step1:0 kill:2:step4:0 raise:0:step6:0 kill:1:step7:0 kill:3:step9:0"
    undisturbed, _ = results("program_shapes.py", tmp_path / "undisturbed", "loop")
    disturbed, text = results("program_shapes.py", tmp_path / "disturbed", f"loop {faults}")
    assert text.count(" 0 steps lost") == 4, text[-8000:]
    assert disturbed == undisturbed


@pytest.mark.spawns
def test_what_hooks_write_is_that_of_the_snapshot_to_which_all_return(tmp_path):
    faults = "fit snapshots kill:0:step5:0 kill:2:step5:0 kill:1:step1:2 kill:3:step1:2"
    undisturbed, _ = results("program_shapes.py", tmp_path / "undisturbed", "fit snapshots")
    disturbed, text = results("program_shapes.py", tmp_path / "disturbed", faults)
    assert "going on after step 4: all ranks return to" in text, text[-8000:]
    assert disturbed == undisturbed


@pytest.mark.spawns
def test_a_job_whose_parameters_change_starts_again_once_and_ends_by_name(tmp_path):
    tmp_path.joinpath("job").mkdir()
    faults = "fit exchanges kill:3:step4:0 kill:2:step5:0 kill:1:step4:1"
    code, text = run("program_shapes.py", tmp_path / "job", faults, 200)
    assert code != 0
    assert len([*tmp_path.joinpath("job").glob("done-*")]) == 2, text[-8000:]  # each was replaced once
    assert "holds other tensors than this process (parameter.criterion.bias, parameter.criterion.weight" in text
    assert "it failed by itself 2 times at the same place" in text
