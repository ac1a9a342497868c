"""Reading the environment: torchrun's variables, Slurm's, none, and nonsense."""

import ast
import dataclasses
import inspect
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperpod_plugins import env
from hyperpod_plugins.env import JobEnv, WorkerEnv, config_path, instance_type
from hyperpod_plugins.errors import ConfigError

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "node[1-2]",
}
WANTED = WorkerEnv(global_rank=5, world_size=8, local_rank=1, local_world_size=4, node_rank=1)
PAGE = Path(__file__).parent.parent / "docs" / "reference" / "environment.md"


@pytest.mark.parametrize("environ", [TORCHRUN, SLURM, SLURM | TORCHRUN], ids=["torchrun", "slurm", "torchrun in slurm"])
def test_a_launched_process_knows_its_place(environ):
    found = WorkerEnv.from_environ(environ)
    assert found == WANTED
    assert found.is_distributed
    assert found.num_nodes == 2


def test_torchrun_inside_a_slurm_step_wins():
    """srun starts one torchrun a node: Slurm's numbers then count agents, not workers."""
    agents = SLURM | {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_NTASKS_PER_NODE": "1"}
    assert WorkerEnv.from_environ(agents | TORCHRUN) == WANTED


def test_an_allocation_without_a_step_is_no_launcher():
    """`salloc` and the batch script see Slurm's variables too; only srun starts the processes."""
    batch = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_NODELIST"}
    assert WorkerEnv.from_environ(batch) == WorkerEnv()


def test_slurm_without_tasks_per_node_counts_them_itself():
    """SLURM_NTASKS_PER_NODE exists only where `--ntasks-per-node` was given; SLURM_TASKS_PER_NODE always does."""
    environ = {name: value for name, value in SLURM.items() if name != "SLURM_NTASKS_PER_NODE"}
    assert WorkerEnv.from_environ(environ | {"SLURM_TASKS_PER_NODE": "4(x2)"}) == WANTED


def test_a_process_that_nobody_launched_is_alone():
    alone = WorkerEnv.from_environ({})
    assert alone == WorkerEnv() == WorkerEnv.from_environ({"PATH": "/bin"})
    assert not alone.is_distributed
    assert alone.num_nodes == 1


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, {"local_world_size": 2, "node_rank": 0}),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": "1"},
            {"node_rank": 1},
        ),
        ({"RANK": "1", "WORLD_SIZE": "2", "GROUP_RANK": "1", "NODE_RANK": "0"}, {"node_rank": 1}),
        ({"RANK": "0", "WORLD_SIZE": "1"}, {"world_size": 1, "local_world_size": 1}),
    ],
)
def test_what_is_absent_has_a_sensible_value(environ, wanted):
    found = dataclasses.asdict(WorkerEnv.from_environ(environ))
    assert {name: found[name] for name in wanted} == wanted


@pytest.mark.parametrize("name", list(TORCHRUN))
@pytest.mark.parametrize("text", ["", "two", "1.0", "0x1", "1 2"])
def test_what_is_no_number_is_named(name, text):
    with pytest.raises(ConfigError, match=f"{name} must be a whole number, but is '{text}'"):
        WorkerEnv.from_environ(TORCHRUN | {name: text})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"RANK": "8"}, "RANK=8 does not lie in a world of WORLD_SIZE=8.*torchrun"),
        ({"RANK": "-1"}, "RANK=-1 does not lie"),
        ({"WORLD_SIZE": "0"}, "RANK=5 does not lie in a world of WORLD_SIZE=0"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK=4 does not lie on a node of LOCAL_WORLD_SIZE=4"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK=-1 does not lie"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE=0"),
    ],
)
def test_a_rank_outside_its_world_is_refused(values, words):
    with pytest.raises(ConfigError, match=words):
        WorkerEnv.from_environ(TORCHRUN | values)


@given(st.integers(1, 16), st.integers(1, 16), st.data())
def test_the_place_of_every_worker_of_an_even_job_is_read_back(num_nodes, per_node, data):
    rank = data.draw(st.integers(0, num_nodes * per_node - 1))
    node, local = divmod(rank, per_node)
    numbers = {
        "RANK": rank,
        "WORLD_SIZE": num_nodes * per_node,
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": per_node,
        "GROUP_RANK": node,
    }
    found = WorkerEnv.from_environ({name: str(number) for name, number in numbers.items()})
    assert dataclasses.astuple(found) == (rank, num_nodes * per_node, local, per_node, node)
    assert found.num_nodes == num_nodes


def test_the_environment_is_read_when_asked(monkeypatch):
    """The process's own environment is the default, as it is at the call and not as it was at import."""
    for name in (*TORCHRUN, *SLURM):
        monkeypatch.delenv(name, raising=False)
    assert WorkerEnv.from_environ() == WorkerEnv()
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert WorkerEnv.from_environ() == WANTED
    monkeypatch.setenv("HYPERPOD_CONFIG", "/a/b.json")
    assert config_path() == "/a/b.json"


@pytest.mark.parametrize(
    ("environ", "path"), [({}, None), ({"HYPERPOD_CONFIG": ""}, None), ({"HYPERPOD_CONFIG": "a.json"}, "a.json")]
)
def test_an_empty_config_path_is_none(environ, path):
    assert config_path(environ) == path


@pytest.mark.parametrize(
    ("environ", "kind"),
    [
        ({}, None),
        ({"SM_CURRENT_INSTANCE_TYPE": ""}, None),
        ({"SM_CURRENT_INSTANCE_TYPE": "ml.p4d.24xlarge"}, "ml.p4d.24xlarge"),
        ({"HYPERPOD_INSTANCE_TYPE": "ml.p5.48xlarge"}, "ml.p5.48xlarge"),
        ({"SM_CURRENT_INSTANCE_TYPE": "ml.p4d.24xlarge", "HYPERPOD_INSTANCE_TYPE": "x"}, "x"),
    ],
)
def test_the_instance_type_is_what_the_user_says_else_what_the_platform_tells(environ, kind):
    assert instance_type(environ) == kind


def test_the_manual_names_every_variable_that_is_read():
    """A string in capitals in env.py is the name of a variable."""
    strings = [node.value for node in ast.walk(ast.parse(inspect.getsource(env))) if isinstance(node, ast.Constant)]
    names = {text for text in strings if isinstance(text, str) and re.fullmatch(r"[A-Z][A-Z0-9_]+", text)}
    assert {"RANK", "SLURM_STEP_NODELIST", "HYPERPOD_CONFIG"} < names
    assert names <= set(re.findall(r"`([A-Z0-9_]+)`", PAGE.read_text()))


@pytest.mark.parametrize(
    "job",
    [
        JobEnv(store_host="::1", store_port=7, run_id="a", incarnation=2, agent_pid=5, resume_from="here"),
        JobEnv(etcd_url="etcd://a:1,b:2/hyperpod/x", run_id="x.1"),
    ],
)
def test_a_worker_finds_the_store_of_its_job(job):
    assert JobEnv.from_environ(job.to_environ()) == job


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "host:port", "http://host"])
def test_a_damaged_address_is_refused(address):
    with pytest.raises(ConfigError, match="HYPERPOD_STORE"):
        JobEnv.from_environ({"HYPERPOD_STORE": address})
