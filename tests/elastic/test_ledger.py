"""The ledger on a real store: what is written once stays, and many writers agree."""

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from elastic.stores import Counted, Cut, Lost

from hyperpod_plugins.elastic import Incident, Ledger
from hyperpod_plugins.elastic.joining import candidates, stand
from hyperpod_plugins.elastic.succession import write_up_node
from hyperpod_plugins.elastic.world import World
from hyperpod_plugins.env import JobEnv


@pytest.fixture
def job():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield JobEnv(store_host="127.0.0.1", store_port=store.port, run_id="job")
    del store


@pytest.fixture
def ledger(job):
    return Ledger.connect(job)


def incident(cause, rank=0):
    return Incident(kind="process", cause=cause, rank=rank)


def test_the_first_word_on_a_generation_counts(job):
    def end(number):
        return Ledger.connect(job).end(3, incident(f"cause {number}", number))

    with ThreadPoolExecutor(8) as pool:
        said = list(pool.map(end, range(8)))
    assert len(set(said)) == 1
    assert Ledger.connect(job).ended(3) == said[0]


def test_the_first_plan_counts(job):
    def propose(number):
        return Ledger.connect(job).propose(1, {0: f"proposed by {number}", 1: "proposed by all"})

    with ThreadPoolExecutor(8) as pool:
        plans = list(pool.map(propose, range(8)))
    assert all(plan == plans[0] for plan in plans)
    assert plans[0].keys() == {0, 1}
    assert Ledger.connect(job).plan(1) == plans[0]


def test_a_generation_lasts_until_its_end(ledger):
    assert ledger.ended(0) is None
    assert ledger.generation() == 0
    for number in range(3):
        ledger.end(number, incident("gone"))
    assert ledger.generation() == 3
    assert ledger.generation(at_least=2) == 3
    assert ledger.generation(at_least=5) == 5
    assert ledger.plan(3) is None


def test_waiting_for_an_end(job, ledger):
    began_s = time.monotonic()
    assert ledger.wait_ended(0, timeout_s=0.2) is None
    assert time.monotonic() - began_s < 5
    writer = Ledger.connect(job)
    threading.Timer(0.2, lambda: writer.end(0, incident("gone", 2))).start()
    ended = ledger.wait_ended(0, timeout_s=20)
    assert ended is not None
    assert (ended.rank, ended.cause) == (2, "gone")


def test_incarnations_and_exits(ledger):
    assert ledger.incarnations(range(3)) == [0, 0, 0]
    assert ledger.next_incarnation(1) == 1
    assert ledger.next_incarnation(1) == 2
    assert ledger.incarnations(range(3)) == [0, 2, 0]
    gone = Incident(kind="process", cause="killed by SIGKILL", rank=1, incarnation=1)
    ledger.record_exit(gone)
    assert ledger.exit_of(1, 1) == gone
    assert ledger.exit_of(1, 2) is None


def test_every_reader_learns_of_each_replacement(job):
    agent, readers = Ledger.connect(job), [Ledger.connect(job) for _ in range(2)]
    assert readers[0].incarnations(range(4)) == [0, 0, 0, 0]
    agent.next_incarnation(2)
    assert readers[0].incarnations([2, 3]) == [1, 0]
    agent.next_incarnation(2)
    agent.next_incarnation(0)
    for reader in readers:
        assert reader.incarnations(range(4)) == [1, 0, 2, 0]
        assert reader.incarnations([2]) == [2]


def write(ledger, kind, number):
    if kind == "kills":
        ledger.ask_to_kill(number, 0)
    elif kind == "replaced":
        ledger.next_incarnation(number)
    else:
        stand(ledger, number, 0, World.of_founders(1))


def read(ledger, kind):
    if kind == "kills":
        return {rank for rank, _ in ledger.new_kills()}
    if kind == "replaced":
        return {rank for rank, number in enumerate(ledger.incarnations(range(9))) if number}
    return set(candidates(ledger, World.of_founders(1)))


@pytest.mark.parametrize("kind", ["kills", "replaced", "candidates"])
def test_a_writer_that_is_lost_at_any_request_leaves_no_hole(job, ledger, kind):
    early, told = Ledger.connect(job), set()
    write(ledger, kind, 1)
    told |= read(early, kind)
    for fuse in (1, 2, 3):
        writer = Ledger.connect(job)
        writer._store = Cut(writer._store, fuse)
        with pytest.raises(Lost):
            write(writer, kind, 1 + fuse)
        told |= read(early, kind)
    write(ledger, kind, 7)
    told |= read(early, kind)
    assert {1, 7} <= told == read(Ledger.connect(job), kind)


def test_many_write_one_list_at_once(job):
    def append(number):
        mine = Ledger.connect(job)
        return [mine.append("list", lambda at: f"{number} at {at}") for _ in range(20)]

    with ThreadPoolExecutor(8) as pool:
        numbers = list(pool.map(append, range(8)))
    assert sorted(itertools.chain(*numbers)) == list(range(1, 161))
    entries = Ledger.connect(job).listed("list")
    assert [int(text.rpartition(" ")[2]) for text in entries] == list(range(1, 161))
    assert [text for text in entries if text.startswith("3 at")] == [f"3 at {number}" for number in numbers[3]]


def test_equal_entries_are_two(job, ledger):
    for writer in (ledger, Ledger.connect(job)):
        writer.append("list", lambda _: "the same")
    assert ledger.listed("list") == ["the same", "the same"]


def test_looks_at_what_has_not_changed_take_one_request_however_many_ranks_there_are(job, ledger):
    writer = Ledger.connect(job)
    writer._store = Cut(writer._store, 3)
    with pytest.raises(Lost):
        writer.next_incarnation(1)
    ledger.incarnations(range(1024))
    ledger._store = Counted(ledger._store)
    ledger.incarnations(range(1024))
    ledger.new_kills()
    assert ledger._store.num_requests == 2


def test_a_number_only_grows(job):
    assert Ledger.connect(job).raise_to("wanted", 2) == 2
    assert Ledger.connect(job).raise_to("wanted", 1) == 2
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: Ledger.connect(job).raise_to("wanted", number), [3, 9, 4, 8, 5, 7, 6, 1]))
    assert Ledger.connect(job).find("wanted") == b"9"


def test_a_plan_can_be_awaited(job, ledger):
    assert not ledger.wait_planned(1, timeout_s=0.1)
    writer = Ledger.connect(job)
    threading.Timer(0.2, lambda: writer.propose(1, {0: "here"})).start()
    assert ledger.wait_planned(1, timeout_s=20)
    assert ledger.plan(1) == {0: "here"}


def test_arrivals_are_counted(ledger):
    assert ledger.arrive(4, 0, "first") == 1
    assert ledger.arrive(4, 2, "other") == 2
    assert ledger.arrivals(4, range(4)) == {0: "first", 2: "other"}
    assert not ledger.all_arrived(4, range(3))
    ledger.withdraw(4, 0, "gone")
    assert ledger.num_arrived(4) == 1
    assert ledger.arrive(4, 0, "again") == 2
    assert ledger.arrive(4, 1, "late") == 3
    assert ledger.arrivals(4, range(3)) == {0: "again", 1: "late", 2: "other"}
    assert ledger.all_arrived(4, range(3))
    assert ledger.arrivals(5, range(3)) == {}
    assert ledger.num_arrived(5) == 0


def test_many_keys_are_read_at_once(ledger):
    kept = [f"name {number}" for number in range(40) if number % 7 and number not in range(20, 30)]
    for name in kept:
        ledger.put(name, name.encode())
    assert ledger.find_all([f"name {number}" for number in range(40)]) == {name: name.encode() for name in kept}
    assert ledger.has_all(kept)
    assert not ledger.has_all([*kept, "name 0"])
    assert ledger.find_all([]) == {}


def test_counters(job, ledger):
    assert ledger.count("name") == 0
    assert ledger.count("name", 2) == 2
    assert Ledger.connect(job).count("name", -3) == -1
    assert ledger.count("other") == 0


def test_beats(ledger):
    ledger.beat(1, {"place": "here"})
    ledger.beat(1, {"place": "there"})
    assert ledger.beats(range(3)) == {1: {"place": "there"}}


def test_each_reader_sees_each_kill_once(job, ledger):
    other = Ledger.connect(job)
    ledger.ask_to_kill(2, 0)
    assert ledger.new_kills() == [(2, 0)]
    ledger.ask_to_kill(1, 4)
    assert ledger.new_kills() == [(1, 4)]
    assert ledger.new_kills() == []
    assert other.new_kills() == [(2, 0), (1, 4)]


def test_values(ledger):
    assert ledger.find("name") is None
    for value in (b"", b"\x00\xff" * 1000):
        ledger.put("name", value)
        assert ledger.find("name") == value
        assert ledger.take("name", timeout_s=5) == value
    ledger.forget("name")
    assert ledger.find("name") is None
    with pytest.raises(dist.DistError):
        ledger.take("name", timeout_s=0.1)


def test_jobs_do_not_see_each_other(job, ledger):
    other = Ledger.connect(JobEnv(store_host=job.store_host, store_port=job.store_port, run_id="another"))
    ledger.end(0, incident("gone"))
    ledger.put("name", b"value")
    assert other.ended(0) is None
    assert other.find("name") is None


def test_successors_on_a_node_have_the_number_that_the_ledger_expects(ledger, monkeypatch):
    """Also where the node that was lost counted one more process of its own just now, which the reader did not see."""
    ledger.next_incarnation(1)
    monkeypatch.setattr(ledger, "incarnations", lambda ranks: [0] * len(ranks))
    number = write_up_node(ledger, range(2), Incident(kind="agent", cause="silent", rank=0))
    assert [ledger.incarnation(rank) for rank in range(2)] == [number, number] == [2, 2]
    assert ledger.exit_of(0, 1) is not None
