"""A fit whose ranks are lost in the hooks of all its parts, the last ones too, ends as if nothing had happened."""

import pytest
from recovery.test_life import results

EARLY = """
    kill:0:val_batch1:0 kill:3:epoch_end:0 kill:1:epoch_start:1 kill:3:batch3:1 kill:2:val_start:1 raise:1:val_end:1
    kill:3:batch2:2 kill:0:batch_end5:2 kill:2:val_start:3 kill:1:epoch_end:3 kill:0:train_end:4
    late:2:val_end:0 vote:1:epoch:1 vote:1:val:2
"""
# In the last step of an epoch, which can not be undone (it communicates between its micro-steps), one rank goes on only
# when a replica of its shard is gone that has committed the step.
UNHEARD = "deaf:0:batch_end5:2 told:2:batch_end5:2 deaf:3:batch_end5:3 told:1:batch_end5:3"
STEPS = """
    kill:3:before_batch3:0 kill:2:before_batch4:0 kill:1:val_batch0:1 raise:3:val_end:1
    kill:2:epoch_end:1 kill:0:train_end:2 late:1:epoch_end:1
"""


@pytest.mark.spawns
@pytest.mark.parametrize(
    ("fit", "faults", "last"),
    [
        pytest.param(
            "early",
            EARLY.split(),
            {"epoch": 4, "step": 18, "should_stop": True, "waited": 2, "stopped": 3, "scheduler": 4},
            id="stopped early",
        ),
        pytest.param("early", ["vote:1:val:1", "only"], {"epoch": 4}, id="the only one that knows"),
        pytest.param("early", UNHEARD.split(), {"epoch": 4}, id="a vote's result that is not heard"),
        pytest.param("steps", STEPS.split(), {"epoch": 2, "step": 5, "should_stop": False}, id="max_steps"),
    ],
)
def test_hooks_that_are_interrupted_are_run_again_and_count_once(fit, faults, last, tmp_path):
    undisturbed, _ = results("program_parts.py", tmp_path / "undisturbed", fit)
    disturbed, text = results("program_parts.py", tmp_path / "disturbed", " ".join([fit, *faults]))
    done = {mark.name for mark in (tmp_path / "disturbed").glob("done-*")}
    faults = [fault for fault in faults if not fault.startswith("late:")]
    assert done == {f"done-{fault.replace(':', '-')}" for fault in faults}
    losses = [fault for fault in faults if not fault.startswith(("deaf:", "only"))]
    assert disturbed == undisturbed
    assert text.count(" 0 steps lost") == len(losses), text[-8000:]
    assert disturbed == undisturbed
    assert undisturbed[0].items() >= last.items()
