"""How agents begin and end: what they wait for is said, and SIGTERM and the job's end are heard wherever they are."""

import contextlib
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from elastic import endings

from hyperpod_plugins.elastic.membership.admission import publish_initial_world
from hyperpod_plugins.elastic.membership.elastic_spec import ElasticPolicy, ElasticSpec, publish_elastic_spec
from hyperpod_plugins.elastic.store.records import FailureRecord
from hyperpod_plugins.elastic.store.world import WorldPlan

pytestmark = pytest.mark.spawns

END_S = 5.0
"""Longest time from SIGTERM, or the job's end, to an agent's."""


def assert_ends(job, number):
    began_s = time.monotonic()
    job.agent.send_signal(number)
    assert job.code() == 128 + number, job.text()
    assert time.monotonic() - began_s < END_S
    assert "Traceback" not in job.text(), job.text()
    job.await_nobody()


def test_what_an_agent_waits_for_is_said_and_signals_end_the_wait(launch):
    with contextlib.ExitStack() as stack:
        nobody, silent = (stack.enter_context(socket.socket()) for _ in range(2))
        for listener in (nobody, silent):
            listener.bind(("127.0.0.1", 0))
        silent.listen(16)  # and answers nothing
        ports = [each.getsockname()[1] for each in (nobody, silent)]
        cases = (
            (f"127.0.0.1:{ports[0]}", signal.SIGTERM, "Connection refused"),
            (f"127.0.0.1:{ports[1]}", signal.SIGINT, "does not answer"),
            ("no-such-node0.invalid:29400", signal.SIGTERM, "'no-such-node0.invalid' does not resolve"),
        )
        jobs = [
            launch("", "--nnodes=2", f"--rdzv-endpoint={endpoint}", "--rdzv-conf=is_host=0") for endpoint, _, _ in cases
        ]
        for job, (endpoint, number, said) in zip(jobs, cases, strict=True):
            for part in (f"waiting for the store at {endpoint}", said):
                job.await_(lambda job=job, part=part: part in job.text())
            assert_ends(job, number)


def test_two_jobs_of_one_host_that_name_no_endpoint_are_two_jobs(launch):
    """Both have the id `none`: on a common port the second was a spare node of the first one, and ran nothing."""
    jobs = [launch("wait('finish')", "--rdzv-backend=hyperpod", "--nnodes=1") for _ in range(2)]
    for job in jobs:
        job.await_(job.said)
    for job in jobs:
        assert_ends(job, signal.SIGTERM)


def options(port, *, is_host, nodes, **conf):
    """Of one of several agents on this machine."""
    pairs = {"is_host": int(is_host), "keep_alive_interval": 0.2, "last_call_timeout": 0, **conf}
    return (
        *(f"--nnodes={nodes}", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-backend=hyperpod", "--rdzv-id=job"),
        f"--rdzv-conf={','.join(f'{name}={value}' for name, value in pairs.items())}",
    )


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_a_broken_node_that_joins_leaves_the_job_alone(launch):
    """Where it is to be taken in, and where it takes the slot of a lost one."""
    port = free_port()
    good, broken = "wait('finish')", "sys.exit(3)"

    def start(script, *, is_host=False):
        return launch(script, *options(port, is_host=is_host, nodes="2:3"))

    first, second = start(good, is_host=True), start(good)
    for job in (first, second):
        job.await_(lambda job=job: job.said())
    job_store = first.job_store()
    publish_initial_world(job_store, WorldPlan.initial(2))
    publish_elastic_spec(job_store, ElasticSpec(policy=ElasticPolicy(), replica_size=1, sizes=(1, 2, 3)))

    joins = start(broken)
    assert joins.code() == 1
    assert "the job goes on without the workers of this node" in joins.text()
    [lost] = {rank for rank, _ in second.said()}
    second.agent.kill()
    first.await_(lambda: f"slot {lost} is vacant" in first.text())
    replaces = start(broken)
    assert replaces.code() == 1
    assert "the job goes on without the workers of this node" in replaces.text()
    assert {rank for rank, _ in replaces.said()} == {lost}
    last = start(good)
    last.await_(lambda: lost in {rank for rank, _ in last.said()})
    job_store.set("finish", b"1")
    assert [first.code(), last.code()] == [0, 0], first.text() + last.text()


def test_a_node_that_only_serves_the_store_any_more_succeeds_with_the_job(launch):
    """Its own worker is outside of the world, and fails at each start: the result then named no worker of this node."""
    port = free_port()
    host = launch("wait('fail'); sys.exit(3)", *options(port, is_host=True, nodes=2))
    other = launch("wait('finish')", *options(port, is_host=False, nodes=2))
    for job in (host, other):
        job.await_(lambda job=job: job.said())
    job_store, [(trains, _)] = host.job_store(), other.said()
    publish_initial_world(job_store, WorldPlan.initial(2))
    job_store.propose_world(WorldPlan(worker_ids=(trains,), number=1))
    job_store.end(0, FailureRecord(kind="resize", cause="a test", world=1))
    job_store.set("fail", b"1")
    host.await_(lambda: "this node only serves the job's store from now on" in host.text())
    job_store.set("finish", b"1")
    assert [host.code(), other.code()] == [0, 0], host.text() + other.text()


def test_a_stall_of_the_store_is_ridden_out_and_signals_are_heard_in_it(launch):
    port = free_port()
    serves = launch("wait('finish')", *options(port, is_host=True, nodes=4))
    patient, told = (launch("wait('finish')", *options(port, is_host=False, nodes=4)) for _ in range(2))
    impatient = launch("wait('finish')", *options(port, is_host=False, nodes=4, read_timeout=1))
    for job in (serves, patient, told, impatient):
        job.await_(lambda job=job: job.said())
    serves.agent.send_signal(signal.SIGSTOP)
    began_s = time.monotonic()
    time.sleep(1.0)
    told.agent.send_signal(signal.SIGTERM)
    assert told.code() == 128 + signal.SIGTERM
    told.await_nobody()
    assert impatient.code() != 0  # its budget is spent
    assert "the store has not answered for" in impatient.text()
    time.sleep(max(0.0, began_s + 23.0 - time.monotonic()))
    assert patient.agent.poll() is None
    assert "for 60 s at most (read_timeout of --rdzv-conf)" in patient.text()
    serves.agent.send_signal(signal.SIGCONT)
    patient.await_(lambda: "the store answers again" in patient.text())
    serves.job_store().set("finish", b"1")
    assert [serves.code(), patient.code()] == [0, 0], serves.text() + patient.text()


def test_agents_that_come_go_and_die_around_the_end_of_a_job():
    with ThreadPoolExecutor(2) as pool:
        wrong = list(pool.map(lambda seed: endings.run(seed, end_s=20.0), range(8)))
    assert wrong == [None] * 8, "\n".join(filter(None, wrong))
