"""From which checkpoints all processes restart: those that this job has written, and that nobody else may change."""

import grp
import json
import os
import pwd
from types import SimpleNamespace

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from hyperpod_plugins.checkpoint_names import JOB
from hyperpod_plugins.elastic import JobStore
from hyperpod_plugins.elastic.launcher.round import RoundStarter
from hyperpod_plugins.elastic.store.entry_records import check_checkpoint, why_untrusted
from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.parallel import CheckpointWriter
from hyperpod_plugins.recovery.restart_all import SavedCheckpoints, known_checkpoints, newest_checkpoint


def checkpoint_of(run_id, path):
    path.mkdir(0o700)
    (path / JOB).write_text(json.dumps({"run_id": run_id}))
    (path / JOB).chmod(0o600)
    return path


def test_a_checkpoint_counts_while_a_newer_one_takes_its_name(tmp_path):
    """A process is killed between the two renames: the job starts again from what the loader then finds."""
    path, job_store = checkpoint_of("job", tmp_path / "last"), JobStore(HashStore())
    SavedCheckpoints(job_store).add(str(path), 3)
    path.rename(tmp_path / ".last.old")
    assert newest_checkpoint(known_checkpoints(job_store)) == (str(path), 3)
    assert check_checkpoint(str(path), "job") == str(path)
    (tmp_path / ".last.old").chmod(0o777)
    with pytest.raises(ConfigError, match="all users of this machine may write to it"):
        check_checkpoint(str(path), "job")
    (tmp_path / ".last.old").chmod(0o700)
    tmp_path.chmod(0o1777)  # another user could take the name that is free now
    with pytest.raises(ConfigError, match="may write to the folder around it"):
        check_checkpoint(str(path), "job")
    (tmp_path / ".last.old").rename(path)
    assert check_checkpoint(str(path), "job") == str(path)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ('{"run_id": "job"}', None),
        ('{"run_id": "another"}', "the job 'another' has written it, and this is the job 'job' (--rdzv-id)"),
        ('{"run_id": ["job"]}', "the job ['job'] has written it"),
        ("{}", "the job None has written it"),
        ("[" * 100_000, "the job None has written it"),
        ("\xff", "the job None has written it"),
        (None, "it does not say which job has written it (it has no job.json)"),
    ],
    ids=["this job's", "another's", "a list", "nobody's", "deep", "garbage", "no file"],
)
def test_only_a_checkpoint_of_this_job_is_trusted(tmp_path, content, why):
    """Whoever reaches the store can name any folder there, but cannot say that this job has written it."""
    path = checkpoint_of("job", tmp_path / "step")
    (path / JOB).unlink()
    if content is not None:
        (path / JOB).write_bytes(content.encode("latin-1"))
    found = why_untrusted(str(path), "job")
    assert found == why if why is None else why in found


def test_a_checkpoint_that_is_saved_names_its_job(tmp_path, monkeypatch):
    model = torch.nn.Linear(2, 2)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    CheckpointWriter().save(tmp_path / "step", model=model)
    assert "which job" in why_untrusted(str(tmp_path / "step"), "job")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    before = os.umask(0)
    try:
        CheckpointWriter().save(tmp_path / "step", model=model)
    finally:
        os.umask(before)
    assert why_untrusted(str(tmp_path / "step"), "job") is None  # nor may others write to it, whatever the umask
    assert "the job 'job' has written it" in why_untrusted(str(tmp_path / "step"), "another")


def people(monkeypatch, *, user, group, primary, members):
    """Names of this user and of the group of files; `primary` is whether it is this user's own."""
    gid = os.getegid()
    monkeypatch.setattr(pwd, "getpwuid", lambda _: SimpleNamespace(pw_name=user, pw_gid=gid if primary else gid + 1))
    monkeypatch.setattr(grp, "getgrgid", lambda _: SimpleNamespace(gr_name=group, gr_mem=members))


@pytest.mark.parametrize(
    ("who", "is_trusted"),
    [
        ({"user": "ann", "group": "ann", "primary": True, "members": []}, True),
        ({"user": "ann", "group": "ann", "primary": True, "members": ["ann"]}, True),
        ({"user": "ann", "group": "ann", "primary": True, "members": ["ben"]}, False),
        ({"user": "ann", "group": "ann", "primary": False, "members": []}, False),
        ({"user": "ann", "group": "staff", "primary": True, "members": []}, False),
    ],
    ids=["private", "private, listed", "with a guest", "of another", "shared"],
)
@pytest.mark.parametrize("name", [".", JOB], ids=["the folder", "a file"])
def test_members_of_a_shared_group_may_not_write(tmp_path, monkeypatch, name, who, is_trusted):
    """With a umask of 002, common where each user has a private group, files are writable to the group."""
    path = checkpoint_of("job", tmp_path / "step")
    people(monkeypatch, **who)
    (path / name).chmod(0o770)
    why = why_untrusted(str(path), "job")
    assert (why is None) is is_trusted
    if not is_trusted:
        assert "members of its group" in why
        assert (JOB in why) is (name == JOB)


def test_a_group_without_a_name_is_shared(tmp_path, monkeypatch):
    path = checkpoint_of("job", tmp_path / "step")
    path.chmod(0o770)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
    assert "members of its group" in why_untrusted(str(path), "job")


def test_what_is_no_folder_is_no_checkpoint(tmp_path):
    (tmp_path / "file").touch()
    assert why_untrusted(str(tmp_path / "file"), "job") == "this is not a folder"
    assert "cannot be read" in why_untrusted(str(tmp_path / "nothing"), "job")
    assert "not a path" in why_untrusted("a\0b", "job")


def test_a_round_of_another_rendezvous_checks_it_too(tmp_path):
    handler = SimpleNamespace(use_agent_store=True, get_run_id=lambda: "job")
    spec = SimpleNamespace(rdzv_handler=handler)
    group = SimpleNamespace(spec=spec, store=HashStore(), group_rank=0, group_world_size=1, workers=[SimpleNamespace()])
    group.master_addr, group.master_port, group.workers[0].world_size = "localhost", 1, 1
    own, foreign = (checkpoint_of(name, tmp_path / name) for name in ("job", "another"))
    assert RoundStarter().begin(group, "").job.resume_from == ""
    assert RoundStarter().begin(group, str(own)).job.resume_from == str(own)
    with pytest.raises(ConfigError, match="the job 'another' has written it"):
        RoundStarter().begin(group, str(foreign))
