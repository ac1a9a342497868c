"""`examples/slurm/elastic.sbatch` on a real Slurm: a node is set down and comes back, another gets notice."""

import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from elastic.slurm import PATH, Cluster, why_not
from recovery.elastic_nodes import BATCH, NUM_SAMPLES, Recorded, fill_unwritten, write_ids

from hyperpod_plugins.data.sampler import sample_order

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "examples" / "slurm" / "elastic.sbatch"
PROGRAM = ROOT / "tests" / "recovery" / "ranks_elastic.py"
PATIENCE_S = 120.0
REFUSAL = why_not()

pytestmark = [
    pytest.mark.spawns,
    pytest.mark.timeout(400),  # a minute where nothing else runs; most of it is the import of torch, five times
    pytest.mark.skipif(REFUSAL is not None, reason=f"no Slurm here: {REFUSAL}"),
]


@pytest.fixture
def cluster():
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:  # a socket's path must be short
        cluster = Cluster(Path(folder), num_nodes=3)
        try:
            try:
                cluster.start()
            except AssertionError as error:
                pytest.skip(f"Slurm does not come up on this machine: {error}")
            yield cluster
        finally:
            left = cluster.stop()
    assert not left, f"Slurm left processes: {left}"


class ElasticJob(Recorded):
    """The script, as a user submits it; each committed step is written down with the ids of its samples."""

    patience_s = PATIENCE_S

    def __init__(self, cluster, folder):
        tokens = write_ids(folder / "ids")
        self.cluster, self.folder = cluster, folder
        environ = {
            "PATH": f"{Path(sys.executable).parent}:{PATH}",
            "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
            "OMP_NUM_THREADS": "1",
            "FAULTS_FOLDER": str(folder),
            "TOKENS": str(tokens),
            "STEP_S": "0.05",
            "SHRINK_S": "1",
            "PORT": str(cluster.port),
            "RDZV_CONF": "last_call_timeout=20,keep_alive_interval=0.2",  # three begin together
        }
        self.number = cluster.call(
            "sbatch",
            "--parsable",
            "--array=0-2",
            "--output=%a.output",
            str(SCRIPT),
            str(PROGRAM),
            environ=environ,
            cwd=folder,
        )

    def finish(self):
        """Have the job end after some more steps; how many it has made by then."""
        num_steps = self.stop()
        self.cluster.await_(lambda: not self.cluster.queue(), PATIENCE_S)
        return num_steps

    def output(self):
        logs = [f"--- {path.name}\n{path.read_text()[-4000:]}" for path in sorted(self.folder.glob("*.output"))]
        return f"{self.cluster.queue()}\n" + "\n".join(logs)


def test_a_job_goes_on_without_a_node_and_grows_when_it_comes_back(cluster, tmp_path):
    job = ElasticJob(cluster, tmp_path)
    job.await_size(3)
    lost, warned = cluster.queue()[1][1], cluster.queue()[2][1]

    cluster.call("scontrol", "update", f"nodename={lost}", "state=down", "reason=test")
    job.await_size(2)
    assert cluster.queue()[1] == ("PENDING",)
    cluster.call("scontrol", "update", f"nodename={lost}", "state=resume")
    job.await_size(3)
    assert cluster.queue()[1] == ("RUNNING", lost)

    cluster.call("scancel", "--signal=USR1", "--batch", f"{job.number}_2")  # what --signal=B:USR1@120 does in good time
    job.await_size(2)
    job.await_size(3)
    assert cluster.queue()[2] == ("RUNNING", warned)

    cluster.call("scontrol", "update", f"nodename={lost}", "state=down", "reason=test")
    job.await_size(2)
    num_steps = job.finish()  # nobody waits for the node that is down
    assert "SIGUSR1: this node leaves the job, between two steps" in job.output()
    assert "0 steps lost" in job.output()
    steps = job.steps()
    assert sorted(steps) == list(range(num_steps))
    fill_unwritten(steps, at_most=2)  # one for each node that was taken
    epochs = [
        sample_order(np.arange(NUM_SAMPLES), num_samples=NUM_SAMPLES, seed=0, epoch=epoch)
        for epoch in range(1 + num_steps * BATCH // NUM_SAMPLES)
    ]
    wanted = np.concatenate(epochs)[: num_steps * BATCH].reshape(num_steps, BATCH)
    for step, entries in steps.items():  # the very samples that the order has for this step, each once
        ids = [i for entry in entries for i in entry["ids"]]
        assert sorted(ids) == sorted(wanted[step].tolist()), step
