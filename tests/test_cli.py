"""`hyperpod`: bad input is explained; whom chaos would strike, and when."""

import pytest

from hyperpod_plugins.cli import describe_status, main
from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.fault_injection.chaos import ChaosPlan, Process, schedule, select_agents, workers_in

FORK_SERVER = (b"python", b"-m", b"hyperpod_plugins.elastic.launcher.fork_server", b"7")


def table_of(*lines):
    """Processes from `(pid, parent, state, command)`."""
    return {pid: Process(pid=pid, parent=parent, state=state, command=command) for pid, parent, state, command in lines}


JOBS = table_of(
    (10, 1, "S", (b"hyperpodrun", b"--rdzv-id=red", b"train.py")),
    (11, 10, "S", FORK_SERVER),
    (12, 11, "S", FORK_SERVER),
    (13, 11, "R", FORK_SERVER),
    (14, 11, "Z", FORK_SERVER),  # lost, and not reaped yet
    (20, 1, "S", (b"hyperpodrun", b"--rdzv_id", b"blue", b"train.py")),
    (21, 20, "S", FORK_SERVER),
    (22, 21, "S", FORK_SERVER),
    (30, 1, "S", (b"python", b"other.py")),
)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "COMMAND"),
        (["chaos", "--kinds", "kill,exit"], "kinds=kill,exit"),
        (["chaos", "--kinds", ""], "none"),
        (["chaos", "--every", "0"], "every_s=0"),
        (["chaos", "--count", "0"], "count=0"),
        (["chaos", "--pid", "1"], "process 1 is not an agent"),
        (["chaos", "--run-id", "nobody's job"], "--rdzv-id=nobody's job"),
        (["chaos", "--pid", "1", "--run-id", "x"], "not allowed with"),
        (["preset"], "list|show|write|NAME"),
        (["preset", "hsdp"], "hsdp-1node"),
        (["preset", "show"], "preset show NAME"),
        (["preset", "hsdp-tp", "here"], "no further argument"),
    ],
)
def test_bad_input_ends_with_code_2_and_says_why(arguments, told, capsys):
    try:
        code = main(arguments)
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert told in capsys.readouterr().err


def test_workers_are_the_live_children_of_the_fork_server():
    assert workers_in(JOBS, [10]) == [12, 13]
    assert workers_in(JOBS, [20]) == [22]
    assert workers_in(JOBS, [10, 20]) == [12, 13, 22]
    assert workers_in(JOBS, [30]) == []


def test_a_job_is_chosen_by_pid_or_name():
    assert select_agents(JOBS, pid=20) == [20]
    assert select_agents(JOBS, run_id="red") == [10]
    assert select_agents(JOBS, run_id="blue") == [20]
    assert select_agents({pid: each for pid, each in JOBS.items() if pid < 20}) == [10]
    for asked in ({}, {"pid": 30}, {"pid": 11}, {"run_id": "train.py"}):
        with pytest.raises(ConfigError):
            select_agents(JOBS, **asked)


def test_the_schedule_of_chaos_is_reproducible_and_keeps_its_pace():
    plan = ChaosPlan(every_s=10, count=500, seed=4, kinds=("kill", "stop"))
    kills = list(schedule(plan))
    assert kills == list(schedule(plan))
    assert sum(kill.wait_s for kill in kills) / 500 == pytest.approx(10, rel=0.15)
    assert {kill.kind for kill in kills} == {"kill", "stop"}
    assert all(0 <= kill.worker_fraction < 1 for kill in kills)


def test_presets_are_listed_shown_and_written(tmp_path, capsys):
    def told(*arguments):
        assert main(["preset", *arguments]) == 0
        return capsys.readouterr().out

    path = told("hsdp-tp").strip()
    assert path.endswith("hsdp-tp.yaml")
    with open(path) as file:
        text = file.read()
    assert told("show", "hsdp-tp") == text
    assert {line.split()[0] for line in told("list").splitlines()} >= {"hsdp-1node", "cpu-smoke", "fp8"}
    assert told("write", "hsdp-tp", str(tmp_path)).strip() == str(tmp_path / "hsdp-tp.yaml")
    assert (tmp_path / "hsdp-tp.yaml").read_text() == text


@pytest.mark.parametrize(
    ("numbers", "says"),
    [
        ((4, 2, 2, 1, 0, 0, 3), "4 ranks in 2 replicas (shard degree 2, tensor degree 1), generation 3"),
        (
            (2, 1, 2, 1, 1, 2, 0),
            "2 ranks in 1 replica (shard degree 2, tensor degree 1), generation 0; 1 process waiting ",
        ),
        ((2, 1, 2, 1, 2, 2, 0), "; 2 processes waiting to join; 2 replicas requested"),
        ((1, 0, 0, 0, 0, 0, 0), "1 rank, generation 0"),
        ((0, 0, 0, 0, 0, 0, 0), "no rank has begun to train"),
    ],
)
def test_the_status_of_a_job_in_words(numbers, says):
    names = ("ranks", "replicas", "shard_degree", "tensor_degree", "waiting", "asked", "generation")
    assert says in describe_status(dict(zip(names, numbers, strict=True)))
