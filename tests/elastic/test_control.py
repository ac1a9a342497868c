"""Requests from a shell: whoever lacks the ticket is refused."""

import json
import os
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch.distributed as dist
from elastic.stores import Cut, Lost

from hyperpod_plugins.cli import main
from hyperpod_plugins.elastic.membership.admission import job_status, publish_initial_world
from hyperpod_plugins.elastic.membership.elastic_spec import (
    ElasticPolicy,
    ElasticSpec,
    ReplicaLayout,
    publish_elastic_spec,
)
from hyperpod_plugins.elastic.membership.reshard import requested_degrees
from hyperpod_plugins.elastic.rendezvous.control import Controller, Request, Ticket, send
from hyperpod_plugins.elastic.store.world import WorldPlan
from hyperpod_plugins.env import JobEnv
from hyperpod_plugins.errors import ConfigError


@pytest.fixture
def job(tmp_path, monkeypatch):
    """(its controller, its ticket, a job store), and a thread that answers."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    controller = Controller(JobEnv(store_host="127.0.0.1", store_port=server.port, run_id="job/1"))
    ticket, over = Ticket.find("job/1"), threading.Event()
    job_store = ticket.job_store()

    def answer():
        own = ticket.job_store()
        while not over.wait(0.02):
            controller.poll("job/1", own)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    yield controller, ticket, job_store
    over.set()
    thread.join(5)
    controller.close()


def write(ticket, mode=0o600):
    ticket.path.write_text(ticket.to_json())
    ticket.path.chmod(mode)


def test_a_job_that_does_not_change_its_size_refuses(job):
    _, ticket, job_store = job
    with pytest.raises(ConfigError, match="it has no ElasticTraining"):
        send(job_store, ticket.token, Request(kind="scale", value=2))


def test_sizes_that_are_possible_are_taken(job):
    _, ticket, job_store = job
    publish_initial_world(job_store, WorldPlan.initial(4))
    publish_elastic_spec(job_store, ElasticSpec(policy=ElasticPolicy(max_replicas=4), replica_size=2, sizes=(1, 2, 4)))
    with pytest.raises(ConfigError, match=r"3 replicas are not possible in this job; \[1, 2, 4\] are"):
        send(job_store, ticket.token, Request(kind="scale", value=3))
    assert "goes to 4 replicas" in send(job_store, ticket.token, Request(kind="scale", value=4))
    size = {"ranks": 4, "replicas": 2, "shard_degree": 2, "tensor_degree": 1}
    assert job_status(job_store) == {**size, "waiting": 0, "asked": 4, "generation": 0}
    assert json.loads(send(job_store, ticket.token, Request(kind="status"))) == job_status(job_store)


def test_one_who_is_interrupted_while_asking_stands_in_nobodys_way(job):
    """By Ctrl-C, at each request of the store that it makes."""
    _, ticket, _ = job
    for fuse in range(1, 4):
        asking = ticket.job_store()
        asking._store = Cut(asking._store, fuse)
        with pytest.raises(Lost):
            send(asking, ticket.token, Request(kind="status"))
    assert json.loads(send(ticket.job_store(), ticket.token, Request(kind="status"), timeout_s=5.0))["ranks"] == 0


def test_other_degrees(job):
    _, ticket, job_store = job
    publish_initial_world(job_store, WorldPlan.initial(4))
    layouts = tuple(ReplicaLayout(shard_degree=degree, sizes=(1, 2, 4)) for degree in (2, 4))
    publish_elastic_spec(job_store, ElasticSpec(policy=ElasticPolicy(), replica_size=2, sizes=(1, 2), layouts=layouts))
    with pytest.raises(ConfigError, match="shard degree 3 with tensor degree 1 is not possible"):
        send(job_store, ticket.token, Request(kind="scale", shard_degree=3))
    assert requested_degrees(job_store) is None
    changed = replace(Request(kind="scale", shard_degree=4).signed(ticket.token, 2), shard_degree=2)
    assert not changed.is_genuine(ticket.token, 2)
    said = send(job_store, ticket.token, Request(kind="scale", shard_degree=4))
    assert said == "all ranks save the next step, and start again with shard degree 4 and tensor degree 1"
    assert requested_degrees(job_store) == (4, 1)


def test_requests_without_the_token_are_refused_and_none_can_be_repeated(job):
    _, ticket, job_store = job
    with pytest.raises(ConfigError, match="not made with this job's ticket"):
        send(job_store, "guessed", Request(kind="status"))
    [seen] = job_store.read_list("control/request")
    genuine = Request(kind="status").signed(ticket.token, 2)
    assert genuine.is_genuine(ticket.token, 2)
    assert not genuine.is_genuine(ticket.token, 3)
    assert ticket.token not in seen
    number = job_store.append("control/request", lambda _: "no json")
    assert b"refused" in job_store.wait_get(f"control/answer/{number}", timeout_s=5.0)


@pytest.mark.parametrize(
    "text",
    [
        '{"kind": "status", "code": null}',
        '{"kind": "status", "code": 3}',
        '{"kind": "status", "code": "\\u00e9"}',
        '{"kind": "status", "value": "2", "code": ""}',
        '{"kind": "status", "value": true, "code": ""}',
        '{"kind": ["scale"], "code": ""}',
        '{"kind": "halt", "code": ""}',
        '{"kind": "status", "code": "", "more": 1}',
        '{"code": ""}',
        "[]",
        "null",
        "[" * 100_000,
        "",
    ],
)
def test_whatever_is_asked_the_answer_is_a_refusal(job, text):
    _, ticket, job_store = job
    number = job_store.append("control/request", lambda _: text)
    assert b"refused" in job_store.wait_get(f"control/answer/{number}", timeout_s=5.0)
    job_store.sub_store("list").set(f"control/request/{number + 1}", b"\xff \xff")
    assert b"refused" in job_store.wait_get(f"control/answer/{number + 1}", timeout_s=5.0)
    assert send(job_store, ticket.token, Request(kind="status"))


def test_only_tickets_of_this_user_are_read_and_a_bad_one_blocks_no_command(job, tmp_path, capsys):
    _, ticket, _ = job
    folder = ticket.path.parent
    (folder / "garbled.ticket").write_bytes(b"\xff{")
    (folder / "garbled.ticket").chmod(0o600)
    (folder / "folder.ticket").mkdir()
    write(replace(ticket, run_id="open to others"), mode=0o644)
    elsewhere = tmp_path / "a file"
    elsewhere.write_text(replace(ticket, run_id="behind a link").to_json())
    elsewhere.chmod(0o600)
    (folder / "link.ticket").symlink_to(elsewhere)
    of_another = replace(ticket, run_id="of another user")
    write(of_another)
    if os.geteuid() == 0:
        os.chown(of_another.path, 12345, -1)
    else:
        of_another.path.unlink()  # only root can give it away
    assert Ticket.find(None) == ticket
    for name in ("open to others", "of another user"):
        with pytest.raises(ConfigError, match="which job is meant"):
            Ticket.find(name)
    write(replace(ticket, run_id="\x1b[2J", port=1, host="\x1b]0;you"))
    assert main(["status", "--run-id", "\x1b[2J"]) == 2
    assert "\x1b" not in capsys.readouterr().err
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="cannot be trusted"):
        Ticket.find(None)


def test_the_ticket_is_for_its_user_alone_and_goes_with_the_agent(job):
    controller, ticket, _ = job
    assert ticket.path.stat().st_mode & 0o077 == 0
    assert Ticket.find(None) == ticket
    with pytest.raises(ConfigError, match="which job is meant"):
        Ticket.find("another")
    controller.close()
    with pytest.raises(ConfigError, match="none"):
        Ticket.find(None)


def test_the_ticket_of_an_agent_that_was_killed_does_not_count(job):
    _, ticket, _ = job
    killed = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    stale = replace(ticket, port=1, pid=int(killed.stdout))
    write(stale)
    assert Ticket.find(None) == ticket
    elsewhere = replace(stale, machine="another machine")
    write(elsewhere)
    with pytest.raises(ConfigError, match=r"job/1 \(port 1\), job/1 \(port \d+\)"):
        Ticket.find("job/1")
    with pytest.raises(ConfigError, match=r"no process answers at 127\.0\.0\.1:1 any more"):
        elsewhere.job_store()
