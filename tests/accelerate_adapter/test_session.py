"""What Accelerate has prepared can be trained in transactions: ranks are killed, and the bits are the same."""

import pytest
import torch
from recovery.faults import PRELOAD, run_job

SCRIPT = "../accelerate_adapter/program_session.py"


@pytest.mark.spawns
def test_a_killed_rank_is_replaced_under_accelerate(tmp_path):
    faults = [["forward", 2, 3, "kill"], ["backward", 5, 0, "kill"]]
    calm = run_job(SCRIPT, tmp_path / "calm", args=PRELOAD)
    disturbed = run_job(SCRIPT, tmp_path / "disturbed", faults=faults, args=PRELOAD)
    assert calm.code == disturbed.code == 0, disturbed.output[-8000:]
    assert disturbed.num_faults == len(faults)
    for wanted, found in zip(calm.results(), disturbed.results(), strict=True):
        assert len(wanted["losses"]) == 10
        assert found["losses"] == wanted["losses"][10 - len(found["losses"]) :]
        for name, value in wanted["state"].items():
            assert torch.equal(found["state"][name], value), name
