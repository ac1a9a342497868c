"""Two ranks with two loader workers each, started by torchrun: the ranks of harness.py may not have children."""

import json
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "loader_ranks.py"


def torchrun(deadline, folder, *arguments):
    """Run the script on two ranks and return what rank 0 wrote; torchrun ends its ranks when it is terminated."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT), str(folder)]
    log = folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen([sys.executable, *launch, *arguments], stdout=output, stderr=output)
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait(40)
        pytest.fail(f"the ranks did not end in time:\n{log.read_text()[-3000:]}")
    assert process.returncode == 0, log.read_text()[-3000:]
    return json.loads((folder / "result.json").read_text())


@pytest.mark.spawns
def test_each_sample_once_over_ranks_with_workers_and_through_a_restart(tmp_path):
    deadline = time.monotonic() + 120
    whole = torchrun(deadline, tmp_path, "100")
    assert sorted(chain.from_iterable(chain.from_iterable(whole["ids"]))) == list(range(40))
    assert [len(ids) for ids in whole["ids"]] == [10, 10]
    assert whole["state"]["epoch"] == 1
    first = torchrun(deadline, tmp_path, "3")  # a step has two micro-steps, and the workers have read ahead
    assert (first["state"]["epoch"], first["state"]["position"]) == (0, 12)
    rest = torchrun(deadline, tmp_path, "100", json.dumps(first["state"]))
    assert [before + after for before, after in zip(first["ids"], rest["ids"], strict=True)] == whole["ids"]
