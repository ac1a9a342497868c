"""The job store on a real store: what is written once stays, and many writers agree."""

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from elastic.stores import Counted, Cut, Lost

from hyperpod_plugins.elastic import FailureRecord, JobStore
from hyperpod_plugins.elastic.membership.admission import add_candidate, candidates
from hyperpod_plugins.elastic.rendezvous.keep_alive import record_node_exit
from hyperpod_plugins.elastic.store.world import WorldPlan
from hyperpod_plugins.env import JobEnv


@pytest.fixture
def job():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield JobEnv(store_host="127.0.0.1", store_port=store.port, run_id="job")
    del store


@pytest.fixture
def job_store(job):
    return JobStore.connect(job)


def failure(cause, worker_id=0):
    return FailureRecord(kind="process", cause=cause, worker_id=worker_id)


def test_the_first_word_on_a_generation_counts(job):
    def end(number):
        return JobStore.connect(job).end(3, failure(f"cause {number}", number))

    with ThreadPoolExecutor(8) as pool:
        said = list(pool.map(end, range(8)))
    assert len(set(said)) == 1
    assert JobStore.connect(job).ended(3) == said[0]


def test_the_first_plan_counts(job):
    def propose(number):
        return JobStore.connect(job).propose(1, {0: f"proposed by {number}", 1: "proposed by all"})

    with ThreadPoolExecutor(8) as pool:
        plans = list(pool.map(propose, range(8)))
    assert all(plan == plans[0] for plan in plans)
    assert plans[0].keys() == {0, 1}
    assert JobStore.connect(job).plan(1) == plans[0]


def test_a_generation_lasts_until_its_end(job_store):
    assert job_store.ended(0) is None
    assert job_store.generation() == 0
    for number in range(3):
        job_store.end(number, failure("gone"))
    assert job_store.generation() == 3
    assert job_store.generation(at_least=2) == 3
    assert job_store.generation(at_least=5) == 5
    assert job_store.plan(3) is None


def test_waiting_for_an_end(job, job_store):
    began_s = time.monotonic()
    assert job_store.wait_ended(0, timeout_s=0.2) is None
    assert time.monotonic() - began_s < 5
    writer = JobStore.connect(job)
    threading.Timer(0.2, lambda: writer.end(0, failure("gone", 2))).start()
    ended = job_store.wait_ended(0, timeout_s=20)
    assert ended is not None
    assert (ended.worker_id, ended.cause) == (2, "gone")


def test_incarnations_and_exits(job_store):
    assert job_store.incarnations(range(3)) == [0, 0, 0]
    assert job_store.next_incarnation(1) == 1
    assert job_store.next_incarnation(1) == 2
    assert job_store.incarnations(range(3)) == [0, 2, 0]
    gone = FailureRecord(kind="process", cause="killed by SIGKILL", worker_id=1, incarnation=1)
    job_store.record_exit(gone)
    assert job_store.exit_of(1, 1) == gone
    assert job_store.exit_of(1, 2) is None


@pytest.mark.parametrize(
    ("who", "said"),
    [
        ({"worker_id": 3, "reporter": "rank 1"}, "worker 3 (process): lost"),  # its rank may be another
        ({"reporter": "rank 1"}, "rank 1 (process): lost"),
        ({}, "unknown worker (process): lost"),
    ],
)
def test_a_failure_names_the_worker(who, said):
    assert str(FailureRecord(kind="process", cause="lost", **who)) == said


def test_every_reader_learns_of_each_replacement(job):
    agent, readers = JobStore.connect(job), [JobStore.connect(job) for _ in range(2)]
    assert readers[0].incarnations(range(4)) == [0, 0, 0, 0]
    agent.next_incarnation(2)
    assert readers[0].incarnations([2, 3]) == [1, 0]
    agent.next_incarnation(2)
    agent.next_incarnation(0)
    for reader in readers:
        assert reader.incarnations(range(4)) == [1, 0, 2, 0]
        assert reader.incarnations([2]) == [2]


def write(job_store, kind, number):
    if kind == "kills":
        job_store.ask_to_kill(number, 0)
    elif kind == "replaced":
        job_store.next_incarnation(number)
    else:
        add_candidate(job_store, number, 0, WorldPlan.initial(1))


def read(job_store, kind):
    if kind == "kills":
        return {rank for rank, _ in job_store.new_kills()}
    if kind == "replaced":
        return {rank for rank, number in enumerate(job_store.incarnations(range(9))) if number}
    return set(candidates(job_store, WorldPlan.initial(1)))


@pytest.mark.parametrize("kind", ["kills", "replaced", "candidates"])
def test_a_writer_that_is_lost_at_any_request_leaves_no_hole(job, job_store, kind):
    early, told = JobStore.connect(job), set()
    write(job_store, kind, 1)
    told |= read(early, kind)
    for fuse in (1, 2, 3):
        writer = JobStore.connect(job)
        writer._store = Cut(writer._store, fuse)
        with pytest.raises(Lost):
            write(writer, kind, 1 + fuse)
        told |= read(early, kind)
    write(job_store, kind, 7)
    told |= read(early, kind)
    assert {1, 7} <= told == read(JobStore.connect(job), kind)


def test_many_write_one_list_at_once(job):
    def append(number):
        mine = JobStore.connect(job)
        return [mine.append("list", lambda at: f"{number} at {at}") for _ in range(20)]

    with ThreadPoolExecutor(8) as pool:
        numbers = list(pool.map(append, range(8)))
    assert sorted(itertools.chain(*numbers)) == list(range(1, 161))
    entries = JobStore.connect(job).read_list("list")
    assert [int(text.rpartition(" ")[2]) for text in entries] == list(range(1, 161))
    assert [text for text in entries if text.startswith("3 at")] == [f"3 at {number}" for number in numbers[3]]


def test_equal_entries_are_two(job, job_store):
    for writer in (job_store, JobStore.connect(job)):
        writer.append("list", lambda _: "the same")
    assert job_store.read_list("list") == ["the same", "the same"]


def test_looks_at_what_has_not_changed_take_one_request_however_many_ranks_there_are(job, job_store):
    writer = JobStore.connect(job)
    writer._store = Cut(writer._store, 3)
    with pytest.raises(Lost):
        writer.next_incarnation(1)
    job_store.incarnations(range(1024))
    job_store._store = Counted(job_store._store)
    job_store.incarnations(range(1024))
    job_store.new_kills()
    assert job_store._store.num_requests == 2


def test_a_number_only_grows(job):
    assert JobStore.connect(job).raise_to("wanted", 2) == 2
    assert JobStore.connect(job).raise_to("wanted", 1) == 2
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: JobStore.connect(job).raise_to("wanted", number), [3, 9, 4, 8, 5, 7, 6, 1]))
    assert JobStore.connect(job).try_get("wanted") == b"9"


def test_a_plan_can_be_awaited(job, job_store):
    assert not job_store.wait_planned(1, timeout_s=0.1)
    writer = JobStore.connect(job)
    threading.Timer(0.2, lambda: writer.propose(1, {0: "here"})).start()
    assert job_store.wait_planned(1, timeout_s=20)
    assert job_store.plan(1) == {0: "here"}


def test_arrivals_are_counted(job_store):
    assert job_store.arrive(4, 0, "first") == 1
    assert job_store.arrive(4, 2, "other") == 2
    assert job_store.arrivals(4, range(4)) == {0: "first", 2: "other"}
    assert not job_store.all_arrived(4, range(3))
    job_store.withdraw(4, 0, "gone")
    assert job_store.num_arrived(4) == 1
    assert job_store.arrive(4, 0, "again") == 2
    assert job_store.arrive(4, 1, "late") == 3
    assert job_store.arrivals(4, range(3)) == {0: "again", 1: "late", 2: "other"}
    assert job_store.all_arrived(4, range(3))
    assert job_store.arrivals(5, range(3)) == {}
    assert job_store.num_arrived(5) == 0


def test_many_keys_are_read_at_once(job_store):
    kept = [f"name {number}" for number in range(40) if number % 7 and number not in range(20, 30)]
    for name in kept:
        job_store.set(name, name.encode())
    assert job_store.try_get_all([f"name {number}" for number in range(40)]) == {name: name.encode() for name in kept}
    assert job_store.has_all(kept)
    assert not job_store.has_all([*kept, "name 0"])
    assert job_store.try_get_all([]) == {}


def test_counters(job, job_store):
    assert job_store.count("name") == 0
    assert job_store.count("name", 2) == 2
    assert JobStore.connect(job).count("name", -3) == -1
    assert job_store.count("other") == 0


def test_beats(job_store):
    job_store.heartbeat(1, {"place": "here"})
    job_store.heartbeat(1, {"place": "there"})
    assert job_store.heartbeats(range(3)) == {1: {"place": "there"}}


def test_each_reader_sees_each_kill_once(job, job_store):
    other = JobStore.connect(job)
    job_store.ask_to_kill(2, 0)
    assert job_store.new_kills() == [(2, 0)]
    job_store.ask_to_kill(1, 4)
    assert job_store.new_kills() == [(1, 4)]
    assert job_store.new_kills() == []
    assert other.new_kills() == [(2, 0), (1, 4)]


def test_values(job_store):
    assert job_store.try_get("name") is None
    for value in (b"", b"\x00\xff" * 1000):
        job_store.set("name", value)
        assert job_store.try_get("name") == value
        assert job_store.wait_get("name", timeout_s=5) == value
    job_store.delete("name")
    assert job_store.try_get("name") is None
    with pytest.raises(dist.DistError):
        job_store.wait_get("name", timeout_s=0.1)


def test_jobs_do_not_see_each_other(job, job_store):
    other = JobStore.connect(JobEnv(store_host=job.store_host, store_port=job.store_port, run_id="another"))
    job_store.end(0, failure("gone"))
    job_store.set("name", b"value")
    assert other.ended(0) is None
    assert other.try_get("name") is None


def test_successors_on_a_node_have_the_number_that_the_job_store_expects(job_store, monkeypatch):
    """Also where the node that was lost counted one more process of its own just now, which the reader did not see."""
    job_store.next_incarnation(1)
    monkeypatch.setattr(job_store, "incarnations", lambda ranks: [0] * len(ranks))
    number = record_node_exit(job_store, range(2), FailureRecord(kind="agent", cause="silent", worker_id=0))
    assert [job_store.incarnation(rank) for rank in range(2)] == [number, number] == [2, 2]
    assert job_store.exit_of(0, 1) is not None
