"""Slurm, Kubernetes, and the folder for checkpoints, which a test leaves as it was."""

import errno
import os
import resource
import stat
import time
from dataclasses import replace

import pytest

from hyperpod_plugins.doctor import checkpoint_folder
from hyperpod_plugins.doctor.checkpoint_folder import FolderFacts, check_folder, file_system_type, gather_folder
from hyperpod_plugins.doctor.cluster import ClusterFacts, check_cluster, gather_cluster, parse_job, signal_of
from hyperpod_plugins.doctor.finding import GIB_BYTES as GIB
from hyperpod_plugins.doctor.finding import MIB_BYTES as MIB
from hyperpod_plugins.doctor.finding import JobSize

OUTSIDE = ClusterFacts(variables={}, slurm_job={})
IN_SLURM = ClusterFacts(
    variables={"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"},
    slurm_version="slurm 24.11.5",
    slurm_job={"Requeue": "1", "TimeLimit": "1-00:00:00"},
    script="#!/bin/bash\n#SBATCH --signal=B:USR1@120\nsrun x\n",
)
IN_POD = ClusterFacts(variables={"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, slurm_job={}, namespace="train")


def cluster_finding(name, facts, shm_total=GIB, memory_limit=GIB):
    return {each.name: each for each in check_cluster(facts, shm_total, memory_limit)}[name]


@pytest.mark.parametrize(
    ("name", "facts", "status", "words"),
    [
        ("slurm", OUTSIDE, "skipped", "not in a job"),
        ("slurm", IN_SLURM, "ok", "job 7 on 1 nodes (slurm 24.11.5)"),
        ("slurm", replace(IN_SLURM, slurm_job={"Requeue": "0"}), "warning", "not be requeued"),
        ("slurm", replace(IN_SLURM, slurm_failure="scontrol ended with code 1"), "warning", "code 1"),
        ("slurm-notice", OUTSIDE, "skipped", "not in a job"),
        ("slurm-notice", IN_SLURM, "ok", "B:USR1@120"),
        ("slurm-notice", replace(IN_SLURM, script="#!/bin/sh\n"), "warning", "no --signal"),
        ("slurm-notice", replace(IN_SLURM, script=""), "skipped", "does not show the batch script"),
        ("slurm-notice", replace(IN_SLURM, script="", slurm_job={"TimeLimit": "UNLIMITED"}), "ok", "no time limit"),
        ("kubernetes", OUTSIDE, "skipped", "not in a pod"),
        ("kubernetes", IN_POD, "ok", "a pod of the namespace train"),
        ("kubernetes", replace(IN_POD, has_service_account=True), "ok", "token"),
        ("kubernetes", ClusterFacts(variables={}, slurm_job={}, has_service_account=True), "ok", "a pod"),
    ],
)
def test_schedulers(name, facts, status, words):
    found = cluster_finding(name, facts)
    assert found.status == status
    assert words in found.found


def test_the_defaults_of_kubernetes_are_too_small():
    found = cluster_finding("kubernetes", IN_POD, shm_total=64 * MIB, memory_limit=None)
    assert found.status == "warning"
    assert "64 MiB" in found.found
    assert "no limit of memory" in found.found


def test_what_scontrol_prints():
    text = "JobId=7 JobName=a b=c Requeue=1 Restarts=0 TimeLimit=01:00:00 NodeList=n[1-2] Command=(null)\n"
    found = parse_job(text)
    assert (found["JobId"], found["Requeue"], found["TimeLimit"]) == ("7", "1", "01:00:00")
    assert parse_job("slurm_load_jobs error: Unable to contact slurm controller") == {}


@pytest.mark.parametrize(
    ("script", "asked"),
    [
        ("#SBATCH --signal=B:USR1@120", "B:USR1@120"),
        ("#!/bin/sh\n#SBATCH -N 2 --signal USR1 # x", "USR1"),
        ("# SBATCH --signal=USR1", ""),
        ("echo --signal=USR1", ""),
        ("#SBATCH --signal=", ""),
        ("", ""),
    ],
)
def test_the_signal_of_a_script(script, asked):
    assert signal_of(script) == asked


def test_schedulers_are_asked_within_a_deadline(monkeypatch):
    """A number of a job that is none is not passed to a command."""
    monkeypatch.setenv("SLURM_JOB_ID", "7; rm -r /")
    began_s = time.monotonic()
    facts = gather_cluster()
    assert facts.slurm_job == {}
    assert time.monotonic() - began_s < 25


# -- the folder -------------------------------------------------------------------------------------------------------

GOOD = FolderFacts(path="/c", num_bytes=32 * MIB, duration_s=0.1, free=100 * GIB, total=200 * GIB, file_system="nfs4")
NODE, CLUSTER = JobSize(world_size=8, local_world_size=8), JobSize(world_size=16, local_world_size=8)


def failed(number, step="write"):
    return {"failed_step": step, "error": os.strerror(number), "error_number": number}


@pytest.mark.parametrize(
    ("changes", "name", "status", "words"),
    [
        ({}, "checkpoint-folder", "ok", "336 MB/s"),
        ({"duration_s": 5.0}, "checkpoint-folder", "warning", "slow"),
        (failed(errno.ENOENT), "checkpoint-folder", "error", "mkdir -p /c"),
        (failed(errno.ENOTDIR), "checkpoint-folder", "error", "is a file"),
        (failed(errno.EACCES), "checkpoint-folder", "error", "uid"),
        (failed(errno.EROFS), "checkpoint-folder", "error", "mount"),
        (failed(errno.ENOSPC), "checkpoint-folder", "error", "quota"),
        (failed(errno.EDQUOT), "checkpoint-folder", "error", "quota"),
        (failed(errno.ETIMEDOUT, "answer"), "checkpoint-folder", "error", "server"),
        (failed(errno.EIO), "checkpoint-folder", "error", "administrator"),
        ({"free": None}, "checkpoint-space", "skipped", "does not report"),
        ({"free": GIB}, "checkpoint-space", "warning", "1.0 GiB free"),
        ({"free_files": 5}, "checkpoint-space", "warning", "only 5 more files"),
        ({}, "checkpoint-space", "ok", "100.0 GiB free"),
        ({"file_system": "tmpfs"}, "checkpoint-file-system", "warning", "tmpfs"),
        ({"file_system": "overlay"}, "checkpoint-file-system", "warning", "overlay"),
        ({"file_system": "ext4"}, "checkpoint-file-system", "ok", "ext4"),
        ({"file_system": ""}, "checkpoint-file-system", "ok", "unknown"),
    ],
)
def test_folders(changes, name, status, words):
    found = {each.name: each for each in check_folder(replace(GOOD, **changes), NODE)}[name]
    assert found.status == status
    assert words in found.found + found.advice


def test_a_local_disk_is_not_shared_by_nodes():
    found = {each.name: each.status for each in check_folder(replace(GOOD, file_system="xfs"), CLUSTER)}
    assert found["checkpoint-file-system"] == "warning"


MOUNTS = """\
21 1 254:0 / / rw - ext4 /dev/vda rw
30 21 0:30 / /fsx rw,relatime shared:1 - lustre 1@tcp:/x rw
31 21 0:31 / /a\\040b rw - nfs4 server:/ rw
32 30 0:32 / /fsx/tmp rw - tmpfs tmpfs rw
33 21 0:33 / /fsx rw - xfs /dev/vdb rw
nonsense
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/x", "ext4"),
        ("/fsx", "xfs"),
        ("/fsx/run/1", "xfs"),
        ("/fsx/tmp/x", "tmpfs"),
        ("/a b/c", "nfs4"),
        ("/fsxx", "ext4"),
    ],
)
def test_the_type_of_a_file_system(tmp_path, path, kind):
    assert file_system_type(MOUNTS, tmp_path / path) == kind
    assert file_system_type("", tmp_path / path) == ""


def test_a_good_folder_is_left_empty(tmp_path):
    facts = gather_folder(tmp_path, 2 * MIB + 5)
    assert (facts.failed_step, facts.num_bytes) == ("", 2 * MIB + 5)
    assert facts.free > 0
    assert list(tmp_path.iterdir()) == []


def test_an_absent_folder_is_not_created(tmp_path):
    facts = gather_folder(tmp_path / "absent" / "below")
    assert (facts.failed_step, facts.error_number) == ("create a file", errno.ENOENT)
    assert [each.status for each in check_folder(facts, NODE)] == ["error"]
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_no_folder(tmp_path):
    """A superuser may write anywhere, so a file stands for a folder that cannot be written."""
    file = tmp_path / "file"
    file.write_text("kept")
    assert gather_folder(file).error_number == errno.ENOTDIR
    assert file.read_text() == "kept"
    assert list(tmp_path.iterdir()) == [file]


def test_a_full_folder_is_left_empty(tmp_path):
    """A limit of file sizes ends the write, as a full disk or a quota does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB + 1000, hard))
    try:
        facts = gather_folder(tmp_path, 4 * MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (facts.failed_step, facts.error_number) == ("write", errno.EFBIG)
    assert list(tmp_path.iterdir()) == []


def test_other_bytes_than_were_written_are_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "pread", lambda file, count, position: b"x" * count)
    facts = gather_folder(tmp_path, MIB)
    assert (facts.failed_step, facts.error) == ("read back", "the bytes read differ from those written")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_synced_is_reported_as_a_checkpoint_would_fail_there(tmp_path, monkeypatch):
    def fsync(file, real=os.fsync):
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    facts = gather_folder(tmp_path, MIB)
    assert (facts.failed_step, facts.error_number) == ("sync the folder (fsync)", errno.EINVAL)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_hangs_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_folder, "_DEADLINE_S", 0.1)
    monkeypatch.setattr(os, "fsync", lambda file: time.sleep(1.0))
    began_s = time.monotonic()
    facts = gather_folder(tmp_path, MIB)
    assert time.monotonic() - began_s < 0.9
    assert facts.error_number == errno.ETIMEDOUT
    assert checkpoint_folder.PREFIX in facts.error
    deadline_s = time.monotonic() + 10
    while list(tmp_path.iterdir()) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert list(tmp_path.iterdir()) == []
