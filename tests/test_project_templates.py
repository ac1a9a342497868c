"""`hyperpod init`: what it writes, and what becomes of that: the test in it, Slurm, Kubernetes, saved models."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml
from elastic.slurm import PATH, Cluster, why_not

from hyperpod_plugins import cli
from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.project_templates import PROJECT_KINDS, job_name, write_project

ROOT = Path(__file__).parent.parent
SLURM_REFUSAL = why_not()


def test_a_project_has_the_name_of_its_folder(tmp_path, capsys):
    folder = tmp_path / "My first_job"
    assert cli.main(["init", "plain", str(folder)]) == 0
    written = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert written == {
        "train.py",
        "config.toml",
        "README.md",
        ".gitignore",
        "tests/test_recovery.py",
        "slurm/job.sbatch",
        "kubernetes/jobset.yaml",
    }
    texts = {name: (folder / name).read_text() for name in written}
    assert not [name for name, text in texts.items() if "my-job" in text]
    assert "#SBATCH --job-name=my-first-job\n" in texts["slurm/job.sbatch"]
    jobset = yaml.safe_load(texts["kubernetes/jobset.yaml"])
    assert jobset["metadata"]["name"] == "my-first-job"
    (nodes,) = jobset["spec"]["replicatedJobs"]
    (node,) = nodes["template"]["spec"]["template"]["spec"]["containers"]
    endpoint = f"--rdzv-endpoint=my-first-job-{nodes['name']}-0-0.my-first-job:29500"  # of its first pod
    assert endpoint in node["args"]
    assert f"--nnodes={nodes['template']['spec']['completions']}" in node["args"]
    assert capsys.readouterr().out.endswith(f"next: cd '{folder}' && hyperpodrun --nproc-per-node 2 train.py\n")


@pytest.mark.parametrize(
    ("folder", "name"),
    [("llama", "llama"), ("Llama 3.1", "llama-3-1"), ("3rd", "job-3rd"), ("__", "job"), ("x" * 99, "x" * 40)],
)
def test_names_of_jobs_are_those_that_kubernetes_allows(folder, name):
    assert job_name(Path(folder)) == name


def test_nothing_is_written_over(tmp_path, capsys):
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "job.sbatch").write_text("mine")
    assert cli.main(["init", "hf", str(tmp_path)]) != 0
    assert "job.sbatch exists already. Give a folder that does not exist yet." in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["job.sbatch"]
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        write_project("hf", tmp_path / "file" / "project")
    with pytest.raises(ConfigError, match="Available: lightning, accelerate, hf, plain"):
        write_project("keras", tmp_path / "new")


@pytest.mark.parametrize("kind", PROJECT_KINDS)
def test_programs_are_clean(tmp_path, kind):
    write_project(kind, tmp_path / "project")
    rules = ("--isolated", "--select=E,F,I,UP,B,SIM,RET,C4", "--line-length=120", "--target-version=py311")
    command = [sys.executable, "-m", "ruff", "check", *rules, "."]
    done = subprocess.run(command, cwd=tmp_path / "project", capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.spawns
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", PROJECT_KINDS)
def test_the_test_of_a_project_passes(tmp_path, kind):
    """It runs the program twice, and kills a rank in the second run."""
    folder = tmp_path / "project"
    write_project(kind, folder)
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
    if kind == "hf":
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder / "runs" / "model")
        assert sum(each.numel() for each in model.parameters()) > 0


@pytest.mark.spawns
@pytest.mark.timeout(300)
@pytest.mark.skipif(SLURM_REFUSAL is not None, reason=f"no Slurm here: {SLURM_REFUSAL}")
def test_the_job_of_a_project_runs_on_two_nodes_of_slurm(tmp_path):
    folder = tmp_path / "project"
    write_project("plain", folder)
    with tempfile.TemporaryDirectory(prefix="slurm-") as short:
        cluster = Cluster(Path(short), num_nodes=2)
        try:
            try:
                cluster.start()
            except AssertionError as error:
                pytest.skip(f"Slurm does not come up on this machine: {error}")
            environ = {
                "PATH": f"{Path(sys.executable).parent}:{PATH}",
                "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
                "OMP_NUM_THREADS": "1",
                "PORT": str(cluster.port),
                "PROCESSES": "1",
            }
            command = ("sbatch", "--parsable", "slurm/job.sbatch", "--steps", "20")
            number = cluster.call(*command, environ=environ, cwd=folder)
            log = folder / f"project-{number}.log"
            cluster.await_(lambda: log.exists() and "done: 20 steps" in log.read_text(), 150)
            cluster.await_(lambda: not cluster.call("squeue", "-h"), 60)
            assert "rank 1 is process" in log.read_text()
        finally:
            left = cluster.stop()
    assert not left
