"""The examples for clusters, without one: commands that we accept, and an sbatch script that draws its conclusions."""

import os
import shlex
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from hyperpod_plugins.elastic.launcher.main import get_parser
from hyperpod_plugins.elastic.rendezvous.slots import policy_from

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
SCRIPT = EXAMPLES / "slurm" / "elastic.sbatch"
MANIFESTS = sorted((EXAMPLES / "kubernetes").glob("*.yaml"))
PATIENCE_S = 20.0


def options_of(args):
    """What `hyperpodrun` reads from a command line: its arguments, its limits, and who serves the store."""
    parsed = get_parser().parse_args(args)
    conf = dict(part.split("=") for part in parsed.rdzv_conf.split(","))
    low, high = map(int, parsed.nnodes.split(":"))
    assert (EXAMPLES.parent / parsed.training_script).exists()
    return parsed, policy_from(conf, low, high), conf["is_host"] == "1"


def within(value, key):
    """All values of a key, at any depth."""
    if isinstance(value, list):
        return [found for each in value for found in within(each, key)]
    if not isinstance(value, dict):
        return []
    found = [each for part in value.values() for each in within(part, key)]
    return [value[key], *found] if key in value else found


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_the_pods_of_a_manifest_find_each_other_and_have_time_to_leave(path):
    documents = list(yaml.safe_load_all(path.read_text()))
    job = documents[-1]
    pods = [spec for spec in within(job, "spec") if "containers" in spec]
    options = []
    for pod in pods:
        (container,) = pod["containers"]
        assert container["command"] == ["hyperpodrun"]  # and no shell, which would keep SIGTERM to itself
        options.append(options_of(container["args"]))
        assert pod["restartPolicy"] == "Never"
        assert options[-1][0].shutdown_timeout < pod["terminationGracePeriodSeconds"]
        assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
        assert str(container["resources"]["limits"]["nvidia.com/gpu"]) == options[-1][0].nproc_per_node
    assert [is_host for _, _, is_host in options] == [True, False]
    for name in ("nnodes", "nproc_per_node", "rdzv_id", "rdzv_endpoint", "training_script", "training_script_args"):
        assert len({str(vars(parsed)[name]) for parsed, _, _ in options}) == 1, name
    host = options[0][0].rdzv_endpoint.partition(":")[0]
    if job["kind"] == "JobSet":
        first, others = job["spec"]["replicatedJobs"]
        assert host == f"{job['metadata']['name']}-{first['name']}-0-0.{job['metadata']['name']}"
        assert job["spec"]["successPolicy"]["targetReplicatedJobs"] == [first["name"]]
        count = others["template"]["spec"]["completions"]
        assert count == others["template"]["spec"]["parallelism"]
    else:
        service, (first, others) = documents[0], job["spec"]["replicaSpecs"]
        assert host == service["metadata"]["name"]
        assert service["spec"]["selector"].items() <= first["template"]["metadata"]["labels"].items()
        assert not service["spec"]["selector"].items() <= others["template"]["metadata"]["labels"].items()
        count = others["maxReplicas"]
        assert job["spec"]["nprocPerNode"] == options[0][0].nproc_per_node
    assert options[0][1].max_nodes == 1 + count


class Task:
    """The sbatch script as a task of an array, among stand-ins that write down how they are called."""

    def __init__(self, folder, number, agent):
        self.calls, self.endpoint = folder / "calls", folder / "endpoint"
        self.calls.touch()
        for name in ("scontrol", "scancel"):
            self._write(folder / name, f'echo {name} "$@" >> {self.calls}; echo "JobState=$STATE Reason=None"')
        self._write(folder / "hyperpodrun", f'printf "hyperpodrun %s\\n" "$*" >> {self.calls}\n{agent}')
        self.environ = {
            "PATH": f"{folder}:{os.environ['PATH']}",
            "SLURM_ARRAY_JOB_ID": "7",
            "SLURM_ARRAY_TASK_ID": str(number),
            "SLURM_ARRAY_TASK_MIN": "0",
            "SLURM_ARRAY_TASK_COUNT": "4",
            "SLURM_GPUS_ON_NODE": "8",
            "ENDPOINT_FILE": str(self.endpoint),
        }

    def _write(self, path, text):
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)

    def start(self, **environ):
        command = ["bash", str(SCRIPT)]
        return subprocess.Popen(command, cwd=EXAMPLES.parent, env=self.environ | environ, stdout=subprocess.DEVNULL)

    def called(self):
        return self.calls.read_text().splitlines()


@pytest.fixture
def store():
    with socket.create_server(("localhost", 0)) as server:
        yield f"localhost:{server.getsockname()[1]}"


@pytest.mark.parametrize(
    ("number", "code", "consequences"),
    [
        (0, 0, ["scancel --state=PENDING 7"]),
        (1, 0, ["scancel --state=PENDING 7"]),
        (0, 1, ["scancel 7"]),
        (1, 1, ["scontrol requeue 7_1"]),  # the store is gone, and perhaps comes back
    ],
)
def test_what_a_task_does_when_its_agent_ends(tmp_path, store, number, code, consequences):
    task = Task(tmp_path, number, f"exit {code}")
    task.endpoint.write_text(store)
    assert task.start().wait(PATIENCE_S) == code
    command, *rest = task.called()
    assert rest == consequences
    parsed, policy, is_host = options_of(shlex.split(command)[1:])
    assert is_host == (number == 0)
    assert is_host or parsed.rdzv_endpoint == store
    assert (policy.min_nodes, policy.max_nodes, parsed.nproc_per_node) == (1, 4, "8")
    is_over = "requeue" not in rest[0]
    assert (task.endpoint.read_text() == "over\n") == is_over


@pytest.mark.parametrize(
    ("signals", "state", "consequences"),
    [
        ([signal.SIGUSR1], "RUNNING", ["scontrol requeue 7_1"]),
        ([signal.SIGUSR1, signal.SIGTERM], "CANCELLED", []),  # or Slurm requeues it
        ([signal.SIGUSR1, signal.SIGTERM], "TIMEOUT", ["scontrol requeue 7_1"]),
    ],
    ids=["notice", "cancelled", "time limit"],
)
def test_what_a_task_does_when_it_is_signalled(tmp_path, store, signals, state, consequences):
    is_ended = signal.SIGTERM in signals  # then the agent does not leave by notice: it is that of the first task
    on_notice, pid = ":" if is_ended else "exit 0", tmp_path / "pid"
    agent = (
        f"trap '{on_notice}' USR1\necho $$ > {pid}.part; mv {pid}.part {pid}\nfor _ in {{1..2000}}; do sleep 0.01; done"
    )
    task = Task(tmp_path, 1, agent)
    task.endpoint.write_text(store)
    running = task.start(STATE=state)
    until_s = time.monotonic() + PATIENCE_S
    while not pid.exists():
        assert time.monotonic() < until_s
        time.sleep(0.01)
    for number in signals:
        running.send_signal(number)
    if is_ended:  # Slurm sends it to the agent too
        time.sleep(0.2)
        assert running.poll() is None
        os.kill(int(pid.read_text()), signal.SIGTERM)
    assert running.wait(PATIENCE_S) == (128 + signal.SIGTERM if is_ended else 0)
    assert [call for call in task.called()[1:] if "show" not in call] == consequences


def test_a_task_that_comes_when_all_is_over_ends(tmp_path):
    task = Task(tmp_path, 1, "exit 3")
    task.endpoint.write_text("over\n")
    assert task.start().wait(PATIENCE_S) == 0
    assert not task.called()


def test_a_task_gives_its_node_back_when_the_first_one_does_not_come(tmp_path):
    task = Task(tmp_path, 1, "exit 3")
    task.endpoint.write_text("localhost:1\n")
    assert task.start(STORE_WAIT="0").wait(PATIENCE_S) == 0
    assert task.called() == ["scontrol requeue 7_1"]
