"""The rendezvous `hyperpod` with threads for agents: slots are given, kept, vacated, taken over."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.utils.store import barrier

from hyperpod_plugins.checkpoint_names import JOB
from hyperpod_plugins.elastic import FailureRecord, JobStore
from hyperpod_plugins.elastic.membership.admission import arm, publish_initial_world
from hyperpod_plugins.elastic.membership.elastic_spec import ElasticPolicy, ElasticSpec, publish_elastic_spec
from hyperpod_plugins.elastic.membership.restart_policy import JobRestart
from hyperpod_plugins.elastic.rendezvous import backends
from hyperpod_plugins.elastic.rendezvous.backends import ServedStoreBackend, connect_served, serve_store
from hyperpod_plugins.elastic.rendezvous.handler import HyperPodRendezvousHandler, create_rendezvous
from hyperpod_plugins.elastic.rendezvous.keep_alive import request_new_round
from hyperpod_plugins.elastic.rendezvous.slots import LeaseState, NodeAssignment, SlotLease, SlotPolicy
from hyperpod_plugins.elastic.rendezvous.store import RendezvousStore, RoundEnd
from hyperpod_plugins.elastic.rendezvous.torchrun_workers import WorkerMonitor
from hyperpod_plugins.elastic.store.entry_records import EndedEntry, record_end
from hyperpod_plugins.elastic.store.job_store import RESTART_KEY
from hyperpod_plugins.elastic.store.world import WorldPlan
from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.recovery import SavedCheckpoints

pytestmark = pytest.mark.slow_single  # threads that wait for each other

PATIENCE_S = 30.0


class SharedStore(ServedStoreBackend):
    """A store of this process, which needs no connections."""

    def connect(self):
        return self.server


class Nodes:
    """Agents of one job, of which each is a handler and no more."""

    def __init__(self, store):
        self.store = store
        self.endpoint = SharedStore("127.0.0.1", 1, server=store)
        self.handlers = []
        self.pool = ThreadPoolExecutor(8)

    def node(self, min_nodes=2, max_nodes=2, run_id="job", **policy):
        quick = {"last_call_s": 0.1, "heartbeat_s": 0.03, "max_missed_heartbeats": 10, "join_timeout_s": PATIENCE_S}
        policy = quick | policy
        handler = HyperPodRendezvousHandler(
            self.endpoint, SlotPolicy(min_nodes=min_nodes, max_nodes=max_nodes, **policy), run_id
        )
        self.handlers.append(handler)
        return handler

    def enter(self, *handlers, size=2):
        """Let torch's agents find each other and assign ranks; what each would start."""
        return [each.result(PATIENCE_S) for each in [self.pool.submit(begin, handler, size) for handler in handlers]]

    def submit(self, handler, size=2):
        return self.pool.submit(begin, handler, size)

    @staticmethod
    def vanish(handler):
        """As if its machine had been unplugged."""
        handler._keep_alive.stop()

    def close(self):
        for handler in self.handlers:
            handler._keep_alive.stop()
        self.pool.shutdown(cancel_futures=True)


def begin(handler, size):
    """What torch's agent does with a rendezvous: (slot, slots, first rank, world size)."""
    info = handler.next_rendezvous()
    info.store.set(
        f"torchelastic/role_info/{info.rank}",
        json.dumps({"role": "default", "rank": info.rank, "local_world_size": size}).encode(),
    )
    if info.rank == 0:
        roles = info.store.multi_get([f"torchelastic/role_info/{slot}" for slot in range(info.world_size)])
        assert {json.loads(role)["local_world_size"] for role in roles} == {size}
    first, world, _, _ = json.loads(info.store.get(f"torchelastic/assigned_ranks/{info.rank}"))
    return info.rank, info.world_size, first, world


def job_store_of(store, run_id="job"):
    return JobStore.from_store(run_id, store)


def await_(condition):
    until_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.01)


@pytest.fixture
def nodes():
    nodes = Nodes(dist.HashStore())
    yield nodes
    nodes.close()


@pytest.fixture
def pair(nodes):
    """Two nodes of two workers that have begun, in the order of their slots, and the store of a job that recovers."""
    handlers = [nodes.node(), nodes.node()]
    found = nodes.enter(*handlers)
    job_store = job_store_of(nodes.store)
    job_store.arm()
    return [handler for _, handler in sorted(zip(found, handlers, strict=True), key=lambda each: each[0][0])], job_store


def test_ranks_follow_from_slots(nodes):
    found = nodes.enter(*(nodes.node(min_nodes=3, max_nodes=3) for _ in range(3)), size=4)
    assert sorted(found) == [(0, 3, 0, 12), (1, 3, 4, 12), (2, 3, 8, 12)]


def test_workers_learn_the_way_to_the_job_store(pair):
    handlers, _ = pair
    assert handlers[0].job.to_environ().items() <= os.environ.items()
    assert os.environ["HYPERPOD_INCARNATION"] == "0"
    assert os.environ["HYPERPOD_AGENT_PID"] == str(os.getpid())


def test_a_round_begins_with_fewer_after_the_last_call(nodes):
    found = nodes.enter(nodes.node(1, 3), nodes.node(1, 3))
    assert {size for _, size, _, _ in found} <= {2, 1}
    assert max(size for _, size, _, _ in found) == 2


def test_too_few_nodes_are_no_job(nodes):
    handler = nodes.node(join_timeout_s=0.2)
    with pytest.raises(RendezvousTimeoutError, match="only 1 of 2 nodes"):
        handler.next_rendezvous()
    assert handler.shutdown()
    assert nodes.enter(nodes.node(), nodes.node())[0][1] == 2  # the one that left has not ended the job


def test_a_spare_takes_over_the_slot_of_a_node_that_fell_silent(nodes, pair):
    (_, lost), job_store = pair
    job_store.end(0, FailureRecord(kind="request", cause="a test"))
    job_store.propose(1, {rank: "" for rank in range(4)})
    spare = nodes.submit(nodes.node())
    time.sleep(0.3)
    assert not spare.done()
    assert [handler.num_nodes_waiting() for handler in pair[0]] == [0, 0]
    nodes.vanish(lost)
    assert spare.result(PATIENCE_S) == (1, 2, 2, 4)
    assert job_store.incarnations(range(4)) == [0, 0, 1, 1]
    assert os.environ["HYPERPOD_INCARNATION"] == "1"
    assert {job_store.exit_of(rank, 0).kind for rank in (2, 3)} == {"agent"}
    assert (job_store.ended(1).kind, job_store.ended(1).worker_id) == ("agent", 2)
    assert job_store.generation() == 2
    assert pair[0][0].num_nodes_waiting() == 0


def test_a_vacancy_is_made_known_before_anybody_fills_it(nodes, pair):
    (_, lost), job_store = pair
    nodes.vanish(lost)
    await_(lambda: job_store.ended(0) is not None)
    assert job_store.ended(0).kind == "agent"
    assert job_store.incarnations(range(4)) == [0, 0, 0, 0]  # they are void when somebody comes for them
    assert nodes.enter(nodes.node()) == [(1, 2, 2, 4)]
    assert job_store.incarnations(range(4)) == [0, 0, 1, 1]


def test_a_node_that_leaves_gives_its_slot_back_at_once(nodes, pair):
    (_, left), job_store = pair
    left._release()
    assert job_store.ended(0).cause == "its agent has left"
    assert nodes.enter(nodes.node()) == [(1, 2, 2, 4)]


def test_an_agent_whose_workers_died_keeps_its_slot(nodes, pair):
    (_, torchrun), job_store = pair
    for number in (1, 2):
        assert nodes.enter(torchrun) == [(1, 2, 2, 4)]
        assert job_store.incarnations(range(4)) == [0, 0, number, number]
        assert job_store.exit_of(2, number - 1).kind == "process"
    assert torchrun.job.incarnation == 2
    assert job_store.generation() == 1  # nobody has formed generation 1 yet
    assert pair[0][0].num_nodes_waiting() == 0


def test_successors_are_newer_than_all_that_were_there(nodes, pair):
    (_, torchrun), job_store = pair
    job_store.next_incarnation(3)  # our own agent has replaced this one before
    nodes.enter(torchrun)
    assert job_store.incarnations(range(4)) == [0, 0, 2, 2]
    assert [job_store.exit_of(rank, number) is not None for rank, number in ((2, 0), (2, 1), (3, 1))] == [True] * 3


def test_a_node_that_was_only_slow_loses_nothing_but_a_step(nodes, pair):
    (_, slow), job_store = pair
    lease = slow._keep_alive.assignment.lease
    look = slow._keep_alive._look
    slow._keep_alive._look = lambda: None
    await_(lambda: job_store.ended(0) is not None)
    slow._keep_alive._look = look
    rdzv_store = slow._joiner.rdzv_store
    await_(lambda: rdzv_store.leases(0)[1] == lease)
    time.sleep(0.1)
    assert slow.num_nodes_waiting() == 0
    assert job_store.incarnations(range(4)) == [0, 0, 0, 0]


def test_a_node_that_was_replaced_ends_its_workers(nodes, pair):
    (_, slow), job_store = pair
    look = slow._keep_alive._look
    slow._keep_alive._look = lambda: None
    assert nodes.enter(nodes.node()) == [(1, 2, 2, 4)]
    slow._keep_alive._look = look
    await_(lambda: slow.num_nodes_waiting() == 1)
    again = nodes.submit(slow)
    time.sleep(0.3)
    assert not again.done()  # it is the spare now
    nodes.vanish(nodes.handlers[-1])
    assert again.result(PATIENCE_S) == (1, 2, 2, 4)
    assert job_store.incarnations(range(4)) == [0, 0, 2, 2]


def test_programs_that_do_not_recover_begin_again_together(nodes):
    handlers = [nodes.node(), nodes.node()]
    nodes.enter(*handlers)
    first = nodes.submit(handlers[0])
    await_(lambda: handlers[1].num_nodes_waiting() == 1)
    second = nodes.submit(handlers[1])
    assert {each.result(PATIENCE_S)[0] for each in (first, second)} == {0, 1}
    assert {handler.round_number for handler in handlers} == {1}
    assert {handler.job.run_id for handler in handlers} == {"job.1"}
    assert {handler.job.incarnation for handler in handlers} == {0}
    ports = {handler._joiner.rdzv_store.port(number) for handler in handlers for number in (0, 1)}
    assert len(ports) == 2
    assert [handler.num_nodes_waiting() for handler in handlers] == [0, 0]


def test_a_joiner_makes_them_begin_again_with_more(nodes):
    first = nodes.node(1, 2)
    assert nodes.enter(first) == [(0, 1, 0, 2)]
    second = nodes.submit(nodes.node(1, 2))
    await_(lambda: first.num_nodes_waiting() == 1)
    assert {nodes.enter(first)[0][1], second.result(PATIENCE_S)[1]} == {2}


def test_a_joiner_waits_for_those_that_it_makes_begin_again(nodes):
    """Alone, it would be the one that another joiner makes begin again, and so on for ever."""
    first, other = (nodes.node(1, 3, last_call_s=0) for _ in range(2))
    nodes.enter(first)
    second = nodes.submit(other)
    await_(lambda: first.num_nodes_waiting() == 1)
    time.sleep(0.3)  # the first ends its workers
    assert not second.done()
    assert {nodes.enter(first)[0][1], second.result(PATIENCE_S)[1]} == {2}
    third = nodes.submit(nodes.node(1, 3, last_call_s=0))
    await_(lambda: first.num_nodes_waiting() == 1)
    nodes.vanish(other)
    assert {nodes.enter(first)[0][1], third.result(PATIENCE_S)[1]} == {2}


def test_nobody_begins_again_once_a_member_has_something_to_recover(nodes):
    """Whoever comes first decides: the node that wants to take part, or the member that begins to train."""
    nodes.enter(nodes.node(1, 2))
    job_store, rdzv_store = job_store_of(nodes.store), RendezvousStore(nodes.store)
    assert arm(job_store)
    request_new_round(rdzv_store, job_store, 0, "b")
    assert rdzv_store.round_end(0) is None
    job_store.disarm()  # the first fit is over
    assert not job_store.is_armed
    assert job_store.was_armed
    assert arm(job_store)  # the second has begun
    job_store.disarm()
    request_new_round(rdzv_store, job_store, 0, "b")
    assert rdzv_store.round_end(0) is not None
    job_store.disarm()  # which changes nothing
    handlers = [signal.getsignal(signal.SIGTERM)]
    try:
        signal.signal(signal.SIGTERM, lambda *_: None)  # as a program does that wants to hear of it

        def look():
            handlers.append(signal.getsignal(signal.SIGTERM))
            return len(handlers) > 2

        assert not arm(job_store, look)
        assert handlers[1:] == [signal.SIG_DFL, signal.SIG_DFL]  # its agent's SIGTERM ends it
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, handlers[0])
    job_store.void_restart_all()  # nothing has come of it
    assert arm(job_store)


def test_what_has_ended_is_not_run_again_for_one_more_node(nodes):
    """It waits for the next thing that is trained, or for the end of the job."""
    first = nodes.node(1, 2)
    nodes.enter(first)
    job_store = job_store_of(nodes.store)
    publish_elastic_spec(job_store, ElasticSpec(policy=ElasticPolicy(), replica_size=1, sizes=(1, 2)))
    assert arm(job_store)
    job_store.disarm()
    second = nodes.submit(nodes.node(1, 2))
    time.sleep(0.5)
    assert first.num_nodes_waiting() == 0
    assert not second.done()
    assert arm(job_store)
    assert second.result(PATIENCE_S)[:2] == (1, 2)
    assert first.num_nodes_waiting() == 0


def make_checkpoint(path, run_id="job"):
    path.mkdir()
    (path / JOB).write_text(json.dumps({"run_id": run_id}))
    return path


@pytest.mark.parametrize(
    "whose", ["ours", "a link to ours", "another job's", "open to all", "a stranger's", "not there"]
)
def test_members_can_have_all_begin_again_from_a_checkpoint_of_this_job(nodes, pair, tmp_path, whose):
    checkpoint = make_checkpoint(tmp_path / "7", "another" if whose == "another job's" else "job")
    if whose == "open to all":
        checkpoint.chmod(0o777)
    elif whose == "a stranger's":
        if os.geteuid() != 0:
            pytest.skip("only root can give a folder away")
        os.chown(checkpoint, 65534, -1)
    elif whose == "not there":
        shutil.rmtree(checkpoint)
    named = checkpoint
    if whose == "a link to ours":
        named = tmp_path / "last"
        named.symlink_to(checkpoint)
    handlers, job_store = pair
    failure = FailureRecord(kind="process", cause="all copies of a shard are gone")
    restart = JobRestart(failure=failure, resume_from=str(named), step=7)
    job_store.set(RESTART_KEY, restart.to_json().encode())
    await_(lambda: all(handler.num_nodes_waiting() == 1 for handler in handlers))
    if not whose.endswith("ours"):
        for entered in [nodes.submit(handler) for handler in handlers]:
            with pytest.raises((ConfigError, RendezvousClosedError), match="all processes go on from"):
                entered.result(PATIENCE_S)
        return
    nodes.enter(*handlers)
    assert {handler.job.resume_from for handler in handlers} == {str(checkpoint)}
    assert {handler.job.run_id for handler in handlers} == {"job.1"}


def test_unequal_nodes_are_refused_and_say_so(nodes):
    handlers = [nodes.node(), nodes.node()]
    wanted = [nodes.submit(handler, size) for handler, size in zip(handlers, (2, 3), strict=True)]
    errors = [each.exception(PATIENCE_S) for each in wanted]
    [error] = [error for error in errors if error is not None]
    assert isinstance(error, ConfigError)
    assert "--nproc-per-node" in str(error)
    [other] = [handler for handler, error in zip(handlers, errors, strict=True) if error is None]
    await_(lambda: other.num_nodes_waiting() == 1)
    with pytest.raises(RendezvousClosedError, match="--nproc-per-node"):
        other.next_rendezvous()


def test_those_who_wait_begin_again_when_all_who_trained_are_gone(nodes, tmp_path):
    """They go on from the newest checkpoint of those."""
    trained = [nodes.node(1, 3, last_call_s=0.3), nodes.node(1, 3, last_call_s=0.3)]
    nodes.enter(*trained)
    job_store = job_store_of(nodes.store)
    job_store.arm()
    publish_initial_world(job_store, WorldPlan.initial(4))
    publish_elastic_spec(job_store, ElasticSpec(policy=ElasticPolicy(), replica_size=1, sizes=(1, 2, 3, 4)))
    waiting = nodes.node(1, 3)
    assert nodes.enter(waiting) == [(2, 3, 4, 6)]
    nodes.vanish(trained[0])
    await_(lambda: LeaseState.VACANT in [lease.state for lease in waiting._joiner.rdzv_store.leases(0)])
    time.sleep(0.2)
    assert waiting.num_nodes_waiting() == 0  # one is left that can take it in
    for step in (3, 7):
        make_checkpoint(tmp_path / str(step))
        SavedCheckpoints(job_store).add(str(tmp_path / str(step)), step)
    nodes.vanish(trained[1])
    await_(lambda: waiting.num_nodes_waiting() == 1)
    assert nodes.enter(waiting) == [(0, 1, 0, 2)]
    assert waiting.round_number == 1
    assert waiting.job.resume_from == str(tmp_path / "7")


def test_a_round_that_ends_before_its_first_step_is_followed_by_one_from_the_same_checkpoint(tmp_path):
    """A node that comes while models are set up: what was restored is restored again, with the same degrees."""
    store = dist.HashStore()
    rdzv_store, job_store = RendezvousStore(store), job_store_of(store, "job.1")
    asked = RoundEnd(cause="a shard is gone", resume_from=str(tmp_path), step=7, shard_degree=2, tensor_degree=4)
    rdzv_store.end_round(0, asked)
    request_new_round(rdzv_store, job_store, 1, "b")
    end = rdzv_store.round_end(1)
    assert (end.resume_from, end.shard_degree, end.tensor_degree) == (str(tmp_path), 2, 4)
    assert str(tmp_path) in end.cause
    later = job_store_of(store, "job.2")
    record_end(later, EndedEntry(number=0, kind="fit"))  # to which that checkpoint belonged
    request_new_round(rdzv_store, later, 2, "b")
    assert rdzv_store.round_end(2).resume_from == ""


def test_an_unequal_joiner_does_not_harm_the_others(nodes, pair):
    (first, lost), _ = pair
    nodes.vanish(lost)
    with pytest.raises(ConfigError, match="--nproc-per-node"):
        begin(nodes.node(), 3)
    assert nodes.enter(nodes.node()) == [(1, 2, 2, 4)]
    assert first.num_nodes_waiting() == 0


def test_the_end_of_a_job(nodes, pair):
    handlers, _ = pair
    spare = nodes.submit(nodes.node())
    infos = [handler._joiner.rdzv_store.leases(0) for handler in handlers]
    assert infos[0] == infos[1]
    for handler in handlers:
        handler.finish()
    with ThreadPoolExecutor() as pool:
        assert all(pool.map(lambda handler: handler.shutdown(), handlers))
    assert isinstance(spare.exception(PATIENCE_S), SystemExit)
    assert spare.exception().code == 0
    assert handlers[0].is_closed()


def test_a_node_that_is_done_and_leaves_early_does_not_end_the_job(nodes, pair):
    (first, other), _ = pair
    first.finish(stays=True)
    assert not other.is_any_gone  # it would start its workers again
    assert first.shutdown()
    assert other.is_any_gone
    assert not other.is_closed()
    other.finish(stays=True)
    assert other.shutdown()
    assert other.is_closed()


def test_nobody_takes_over_when_others_are_done(nodes, pair):
    (first, lost), job_store = pair
    first.finish()
    nodes.vanish(lost)
    with pytest.raises(RendezvousClosedError, match="are done"):
        begin(nodes.node(), 2)
    assert job_store.incarnations(range(4)) == [0, 0, 0, 0]


def test_workers_that_are_not_started_again_end_the_job(nodes, pair):
    (first, failed), job_store = pair
    ended = nodes.pool.submit(failed.shutdown)
    await_(lambda: first.num_nodes_waiting() == 1)
    assert job_store.exit_of(2, 0).kind == "agent"
    with pytest.raises(RendezvousClosedError, match="workers of node 1 failed"):
        first.next_rendezvous()
    assert first.shutdown()
    assert ended.result(PATIENCE_S)


def test_the_last_meeting_of_torch_agents_is_overheard(nodes):
    handler = nodes.node(1, 1)
    info = handler.next_rendezvous()
    info.store.set("torchelastic/role_info/0", json.dumps({"local_world_size": 1}).encode())
    barrier(info.store, 1, "torchelastic/agent/terminal_state", PATIENCE_S)
    assert [lease.state for lease in handler._joiner.rdzv_store.leases(0)] == [LeaseState.DONE]


def test_an_endpoint_serves_one_job(nodes):
    nodes.enter(nodes.node(1, 1))
    with pytest.raises(RendezvousConnectionError, match="serves the job 'job', not 'another'"):
        nodes.node(1, 1, run_id="another").next_rendezvous()


def parameters(endpoint, nodes=1, **config):
    return RendezvousParameters("hyperpod", endpoint, "job", nodes, nodes, **{"keep_alive_interval": "0.05", **config})


def test_torchrun_finds_it_and_a_node_serves_the_store(monkeypatch):
    monkeypatch.setenv("TORCH_ELASTIC_WORKER_IDENTICAL", "1")
    handler = rendezvous_handler_registry.create_handler(parameters("localhost:0"))
    try:
        info = handler.next_rendezvous()
        assert handler.use_agent_store
        assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
        assert "TORCH_ELASTIC_WORKER_IDENTICAL" not in os.environ  # with it, nobody hears how many workers there are
        where = info.bootstrap_store_info
        store = dist.TCPStore(where.master_addr, where.master_port, is_master=False, wait_for_workers=False)
        store.set("a worker", "is here")
        assert info.store.check(["a worker"]) is False
    finally:
        handler._keep_alive.stop()


def test_a_store_for_this_machine_alone_listens_nowhere_else():
    store = serve_store("localhost", 0)
    lines = [line for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()]
    listening = [line.split()[1] for line in lines if " 0A " in line]
    assert [each for each in listening if each.endswith(f":{store.port:04X}")] == [f"0100007F:{store.port:04X}"]


@pytest.mark.parametrize(
    ("host", "said"),
    [("127.0.0.1", "is gone"), ("nobody.invalid", r"has not answered for 2 s \(the name")],
)
def test_a_store_is_gone_when_connections_are_refused_and_late_otherwise(host, said):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(RendezvousConnectionError, match=said):
            connect_served(host, taken.getsockname()[1], 2.0, was_reached=True)


@pytest.mark.parametrize(
    ("host", "why"),
    [("127.0.0.1", "Connection refused"), ("nobody.invalid", "the name 'nobody.invalid' does not resolve")],
)
def test_what_is_waited_for_is_said_again_until_the_wait_ends(host, why, monkeypatch, caplog):
    monkeypatch.setattr(backends, "_REPORT_S", 0.5)
    with socket.socket() as taken, caplog.at_level("WARNING"):
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(RendezvousConnectionError, match="no agent answers"):
            connect_served(host, taken.getsockname()[1], 3.0, was_reached=False)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) >= 3
    assert all("waiting for the store at" in each and why in each for each in said)


def test_nodes_of_a_host_share_one_store(caplog):
    caplog.set_level("WARNING")
    handlers = [create_rendezvous(parameters("localhost:0", nodes=2))]
    endpoint = f"localhost:{handlers[0]._backend.port}"
    handlers += [create_rendezvous(parameters(endpoint, nodes=2)) for _ in range(2)]
    assert [handler._backend.server is not None for handler in handlers] == [True, False, False]
    assert sum("if it is lost, the job ends" in record.getMessage() for record in caplog.records) == 1
    with ThreadPoolExecutor() as pool:
        try:
            found = [pool.submit(begin, handler, 1) for handler in handlers[:2]]
            assert {each.result(PATIENCE_S)[0] for each in found} == {0, 1}
            spare = pool.submit(handlers[2].next_rendezvous)
            ended = []
            for handler in handlers[:2]:
                handler.finish()
                ended.append(pool.submit(handler.shutdown))
            assert isinstance(spare.exception(PATIENCE_S), SystemExit)
            ended.append(pool.submit(handlers[2].shutdown))
            assert all(each.result(PATIENCE_S) for each in ended)
        finally:
            for handler in handlers:
                handler._keep_alive.stop()


@pytest.mark.parametrize("wrong", [{"join_timeout": "soon"}, {"keep_alive_interval": "0"}])
def test_wrong_options_are_refused(wrong):
    with pytest.raises(ConfigError, match="--rdzv-conf"):
        create_rendezvous(parameters("localhost:0", **wrong))


def test_the_workers_of_torchrun_are_watched():
    """The handler's process is their parent; torchrun learns from the kernel itself."""
    assignment = NodeAssignment(
        round_number=0, slot=0, num_slots=1, lease=SlotLease(node="a"), worker_ids=range(4), incarnation=3
    )
    monitor = WorkerMonitor()
    program = "import sys, time; print(flush=True); sys.stdin.read(); sys.exit({})"
    workers = []
    try:
        for rank, code in enumerate((0, 7, 0, 0)):
            environ = {**os.environ, "RANK": str(rank), "HYPERPOD_INCARNATION": "3"}
            command = [sys.executable, "-S", "-c", program.format(code)]
            workers.append(
                subprocess.Popen(command, env=environ, stdin=-1, stdout=subprocess.PIPE, start_new_session=True)
            )
            assert workers[rank].stdout.readline()
        monitor.adopt(assignment)
        monitor.adopt(assignment)

        workers[0].stdin.close()
        assert monitor.watch(time.monotonic() + 0.3) is None  # a good end is none of its business
        workers[1].stdin.close()
        failed = monitor.watch(time.monotonic() + PATIENCE_S)
        assert (failed.worker_id, failed.how, failed.assignment) == (1, "ended with exit code 7", assignment)
        monitor.kill(replace(assignment), 2)  # of another assignment
        monitor.kill(assignment, 2)
        failed = monitor.watch(time.monotonic() + PATIENCE_S)
        assert (failed.worker_id, failed.how) == (2, "was killed by SIGKILL")
        monitor.kill_after_grace()
        assert monitor.watch(time.monotonic() + PATIENCE_S) is None
        assert monitor.watch(time.monotonic() + PATIENCE_S).worker_id == 3
        # All this took no news from torchrun, which waits for the same processes.
        assert [worker.wait(PATIENCE_S) for worker in workers] == [0, 7, -signal.SIGKILL, -signal.SIGKILL]
        monitor.wake()
        assert monitor.watch(time.monotonic() + PATIENCE_S) is None
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
            worker.stdin.close()
            worker.stdout.close()
