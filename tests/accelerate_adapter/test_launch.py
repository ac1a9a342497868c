"""One script under `accelerate launch` with every preset, under torchrun and under `hyperpodrun`.

The presets are for nodes of 8 GPUs. Here each is launched on two CPU processes, with the degrees that do not fit two
lowered on the command line. Starting Python and importing torch in each worker would cost four seconds of CPU, so for
most of them `accelerate launch` runs in a process that has both, by the function that its command calls, and torch's
agent forks the workers instead of starting them. Where the two are started as users start them, it says so.
"""

import json
import multiprocessing
import os
import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed.run

from hyperpod_plugins.presets import preset_path

SCRIPT = Path(__file__).with_name("train_preset.py")
SCRIPTS = {name: SCRIPT.with_name("train_model_preset.py") for name in ("context", "experts", "long-context")}
ONE_SHARD = ["--parallelism_config_dp_shard_size", "1"]
LAUNCHES = {  # preset: what two processes need, and the layout they train in
    "checkpointless": ([], [1, 2, 1]),
    "context": (ONE_SHARD, [1, 2, 1]),
    "cpu-smoke": ([], [1, 2, 1]),
    "elastic": (
        ["--parallelism_config_dp_shard_size", "2", "--rdzv_backend", "hyperpod", "--rdzv_conf", "last_call_timeout=1"],
        [1, 2, 1],
    ),
    "experts": (["--parallelism_config_dp_shard_size", "2"], [1, 2, 1]),
    "fp8": (ONE_SHARD, [2, 1, 1]),
    "full-shard": ([], [1, 2, 1]),
    "hsdp-1node": (ONE_SHARD, [2, 1, 1]),
    "hsdp-tp": (ONE_SHARD, [1, 1, 2]),
    "long-context": (["--parallelism_config_cp_size", "2"], [1, 2, 1]),
    "offload": ([], [1, 2, 1]),
}
TWO = ["--num_processes", "2"]
ELASTIC = {"PET_NNODES": "1:2", "PET_RDZV_ENDPOINT": "127.0.0.1:0", "PET_RDZV_ID": "presets"}
PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK")
STORE = ("MASTER_ADDR", "MASTER_PORT")


def run_script(script, *arguments):
    sys.argv = [script, *arguments]
    torch.set_num_threads(1)
    runpy.run_path(script, run_name="__main__")


def forking(config_from_args, args):
    """Workers that torch's agent forks, in place of Pythons that it starts."""
    config, _, _ = config_from_args(args)
    config.start_method = "fork"
    return config, run_script, [args.training_script, *args.training_script_args]


def accelerate_launch(preset, *arguments, script=SCRIPT, report):
    """What the command `accelerate launch` does, in this process; the words of the error it ends with, or ''."""
    from accelerate.commands.launch import launch_command, launch_command_parser

    given = ["--config_file", str(preset_path(preset)), *arguments, str(script), str(report)]
    try:
        launch_command(launch_command_parser().parse_args(given))
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return ""


def become_a_launcher():
    import hyperpod_plugins.accelerate  # noqa: F401  # once for all workers

    multiprocessing.current_process()._config["daemon"] = False  # it is to have children
    torch.distributed.run.config_from_args = partial(forking, torch.distributed.run.config_from_args)
    for name in (*PLACE, *STORE):
        os.environ.pop(name, None)


def launch_all(folder):
    become_a_launcher()
    ended = {}
    for preset, (arguments, _) in LAUNCHES.items():
        with pytest.MonkeyPatch.context() as patch:
            if preset == "elastic":
                for name, value in ELASTIC.items():
                    patch.setenv(name, value)
            report = f"{folder}/{preset}.json"
            ended[preset] = accelerate_launch(
                preset, *TWO, *arguments, script=SCRIPTS.get(preset, SCRIPT), report=report
            )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYPERPOD_CONFIG", str(preset_path("checkpointless")))
        script = [str(SCRIPT), f"{folder}/torchrun.json"]
        torch.distributed.run.main(["--nproc-per-node", "2", "--standalone", *script])
    return ended


@pytest.fixture(scope="module")
def launched(run_ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    (ended,) = run_ranks(launch_all, str(folder), world_size=1, timeout_s=150)
    return ended, {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


@pytest.mark.spawns
@pytest.mark.parametrize("preset", LAUNCHES)
def test_accelerate_launch_trains_with_the_preset(launched, preset):
    ended, reports = launched
    assert ended[preset] == ""
    report = reports[preset]
    assert report["layout"] == LAUNCHES[preset][1]
    assert report["precision"] == ("32-true" if preset == "cpu-smoke" else "bf16-mixed")
    assert report["recomputes"] == (preset in ("context", "experts", "full-shard", "long-context", "offload"))
    assert report["offloads"] == (preset in ("long-context", "offload"))
    assert report["float8"] == (preset == "fp8")
    assert report["backend"] == "hyperpod"
    assert report["losses"][-1] < report["losses"][0]


def launch_a_node(folder, port):
    """This process is the launcher of one of two nodes."""
    node = os.environ["RANK"]
    become_a_launcher()
    there = ["--machine_rank", node, "--main_process_ip", "127.0.0.1", "--main_process_port", str(port)]
    return accelerate_launch("hsdp-multinode", *TWO, *ONE_SHARD, *there, report=f"{folder}/two.json")


@pytest.mark.spawns
def test_two_launchers_make_one_job_of_two_nodes(run_ranks, tmp_path):
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert run_ranks(launch_a_node, str(tmp_path), port, world_size=2) == ["", ""]
    assert json.loads((tmp_path / "two.json").read_text())["layout"] == [2, 1, 1]


@pytest.mark.spawns
def test_the_line_of_the_readme(tmp_path):
    preset = f"{sys.executable} -m hyperpod_plugins.cli preset cpu-smoke"
    launch = f"{sys.executable} -m accelerate.commands.accelerate_cli launch"
    line = f"{launch} --config_file $({preset}) {SCRIPT} {tmp_path / 'report.json'}"
    done = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((tmp_path / "report.json").read_text())["layout"] == [1, 2, 1]
    assert done.stderr.count("there is no GPU here: it trains on CPU") == 1


@pytest.mark.spawns
def test_other_launchers_run_the_same_script_with_the_same_file(launched, tmp_path):
    """torchrun ran it with the others; `hyperpodrun` is started as users start it."""
    environ = os.environ | {"HYPERPOD_CONFIG": str(preset_path("checkpointless"))}
    command = [sys.executable, "-m", "hyperpod_plugins.elastic.launcher.main", "--nproc-per-node", "2"]
    command += [str(SCRIPT), str(tmp_path / "report.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environ)
    assert done.returncode == 0, done.stderr[-3000:]
    by_hyperpodrun = json.loads((tmp_path / "report.json").read_text())
    assert by_hyperpodrun == launched[1]["torchrun"] == launched[1]["checkpointless"]
    assert (by_hyperpodrun["layout"], by_hyperpodrun["precision"]) == ([1, 2, 1], "bf16-mixed")
