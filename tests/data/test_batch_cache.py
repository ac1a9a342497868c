"""Batches outlive their process; damaged, torn and foreign ones are never returned."""

import itertools
import mmap
import os
import random
import signal
import stat
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperpod_plugins.data import MISSING, BatchCache, BatchCacheConfig, cached
from hyperpod_plugins.data.batch_cache import BatchRing, ring_bytes
from hyperpod_plugins.errors import ConfigError, DataError

SLOT = 1 << 12


def open_cache(folder, num_slots=4, slot_bytes=SLOT, fingerprint="v1", name="test"):
    config = BatchCacheConfig(size_bytes=num_slots * slot_bytes, max_batch_bytes=slot_bytes, folder=folder)
    return BatchCache(name, fingerprint=fingerprint, config=config)


def numbers(start, stop=12):
    return iter(range(start, stop))


def test_a_new_process_finds_what_an_old_one_kept(tmp_path):
    batch = {"x": torch.arange(5), "name": "b"}
    assert open_cache(tmp_path).put("k", 7, batch)
    found = open_cache(tmp_path).get("k", 7)
    assert torch.equal(found["x"], batch["x"])
    assert found["name"] == "b"


def test_what_is_returned_stays_when_its_slot_is_used_again(tmp_path):
    cache = open_cache(tmp_path, num_slots=1)
    cache.put("k", 0, torch.zeros(100))
    found = cache.get("k", 0)
    cache.put("k", 1, torch.ones(100))
    assert torch.equal(found, torch.zeros(100))


@pytest.mark.parametrize(("key", "index", "fingerprint"), [("other", 0, "v1"), ("k", 1, "v1"), ("k", 0, "v2")])
def test_other_keys_indices_and_fingerprints_are_not_seen(tmp_path, key, index, fingerprint):
    open_cache(tmp_path).put("k", 0, "batch")
    assert open_cache(tmp_path, fingerprint=fingerprint).get(key, index) is MISSING


def test_none_is_a_batch(tmp_path):
    cache = open_cache(tmp_path)
    cache.put("k", 0, None)
    assert cache.get("k", 0) is None


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=40), st.integers(1, 5))
def test_the_oldest_goes_first(tmp_path_factory, puts, num_slots):
    cache = open_cache(tmp_path_factory.mktemp("ring"), num_slots)
    model = {}
    for index in puts:
        cache.put("k", index, index)
        if index not in model:
            model[index] = index
            if len(model) > num_slots:
                del model[next(iter(model))]
    assert {index: cache.get("k", index) for index in range(10) if cache.get("k", index) is not MISSING} == model


def test_the_file_is_bounded_and_private(tmp_path):
    cache = open_cache(tmp_path, num_slots=4)
    for index in range(50):
        cache.put("k", index, torch.zeros(500))
    status = cache.path.stat()
    assert status.st_size == ring_bytes(4, SLOT) <= 4 * SLOT + 8192
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert stat.S_IMODE(cache.path.parent.stat().st_mode) == 0o700


def test_a_batch_that_is_too_large_is_passed_on_with_one_warning(tmp_path, caplog):
    cache = open_cache(tmp_path)
    big = [torch.full((SLOT,), float(index)) for index in range(3)]
    served = list(cached(lambda start: iter(big[start:]), cache, key="k", indices=range(3)))
    assert all(torch.equal(a, b) for a, b in zip(served, big, strict=True))
    assert cache.get("k", 0) is MISSING
    assert len([record for record in caplog.records if "does not fit" in record.message]) == 1


@pytest.mark.parametrize("seed", range(60))
def test_any_changed_byte_is_noticed_or_harmless(tmp_path, seed):
    rng = random.Random(seed)
    cache = open_cache(tmp_path, num_slots=4)
    for index in range(2):
        cache.put("k", index, torch.full((400,), index))
    content = bytearray(cache.path.read_bytes())
    place = rng.choice([rng.randrange(32), rng.randrange(4096, 4096 + 128), rng.randrange(8192, 8192 + 3200)])
    content[place] ^= 1 << rng.randrange(8)
    cache.path.write_bytes(content)
    reopened = open_cache(tmp_path, num_slots=4)
    for index in range(2):
        found = reopened.get("k", index)
        assert found is MISSING or torch.equal(found, torch.full((400,), index))
    served = list(
        cached(lambda start: (torch.full((400,), i) for i in range(start, 2)), reopened, key="k", indices=range(2))
    )
    assert [int(batch[0]) for batch in served] == [0, 1]
    assert all(torch.equal(reopened.get("k", i), torch.full((400,), i)) for i in range(2))  # made anew and kept


def test_damage_is_counted(tmp_path, caplog):
    cache = open_cache(tmp_path)
    cache.put("k", 0, torch.zeros(100))
    with cache.path.open("r+b") as file:
        file.seek(8192 + 200)
        file.write(b"\xff")
    assert cache.get("k", 0) is MISSING
    assert cache.num_damaged == 1
    assert "is damaged" in caplog.text


@pytest.mark.parametrize("spoil", [
    lambda path: path.write_bytes(b"somebody else's file"),
    lambda path: path.write_bytes(bytes(path.stat().st_size)),
    lambda path: os.truncate(path, path.stat().st_size - 1),
    lambda path: path.chmod(0o666),
    lambda path: path.rename(path.with_name("elsewhere")).with_name(path.name).symlink_to("elsewhere"),
])  # fmt: skip
def test_foreign_and_damaged_files_are_replaced(tmp_path, caplog, spoil):
    cache = open_cache(tmp_path)
    cache.put("k", 0, "old")
    spoil(cache.path)
    fresh = open_cache(tmp_path)
    assert fresh.get("k", 0) is MISSING
    assert fresh.put("k", 0, "new")
    assert open_cache(tmp_path).get("k", 0) == "new"
    assert "cannot be used" in caplog.text


def test_another_size_starts_anew(tmp_path):
    open_cache(tmp_path, num_slots=4).put("k", 0, "old")
    assert open_cache(tmp_path, num_slots=8).get("k", 0) is MISSING


def test_a_folder_open_to_others_is_refused(tmp_path):
    (tmp_path / f"hyperpod-{os.geteuid()}").mkdir(mode=0o755)
    with pytest.raises(DataError, match="open to others"):
        open_cache(tmp_path)


def a_file(folder):
    folder.write_text("in the way")


@pytest.mark.parametrize(
    ("spoil", "why"), [(lambda folder: None, "No such file"), (a_file, "Not a directory")], ids=["missing", "a file"]
)
def test_a_folder_that_cannot_hold_a_cache_is_named(tmp_path, spoil, why):
    folder = tmp_path / "shm"
    spoil(folder)
    with pytest.raises(DataError, match=rf"{folder}.*{why}.*BatchCacheConfig\(folder=") as caught:
        open_cache(folder)
    folder.unlink(missing_ok=True)
    folder.mkdir()  # the message's own advice
    assert open_cache(folder).put("k", 0, 1)
    assert "\n" not in str(caught.value)


def test_no_room_is_an_error_now_and_not_a_crash_later(tmp_path):
    with pytest.raises(DataError, match="--shm-size"):
        open_cache(tmp_path, num_slots=1 << 20, slot_bytes=1 << 40)


@pytest.mark.parametrize("name", ["", "a/b", ".hidden"])
def test_bad_names_are_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="plain file name"):
        open_cache(tmp_path, name=name)


def test_bad_sizes_are_refused():
    with pytest.raises(ConfigError, match="max_batch_bytes=2"):
        BatchCacheConfig(size_bytes=1, max_batch_bytes=2)


def test_remove_leaves_only_the_empty_lock(tmp_path):
    cache = open_cache(tmp_path)
    cache.put("k", 0, 1)
    cache.remove()
    [lock] = cache.path.parent.iterdir()
    assert (lock.suffix, lock.stat().st_size) == (".lock", 0)


@pytest.mark.parametrize("read_ahead", [0, 3])
def test_errors_of_the_pipeline_arrive_in_their_place_with_their_traceback(tmp_path, read_ahead):
    def pipeline(start):
        for index in range(start, 10):
            if index == 4:
                raise ArithmeticError("the user's own mistake")
            yield index

    served = []
    with pytest.raises(ArithmeticError, match="own mistake") as caught:  # noqa: PT012
        for batch in cached(pipeline, open_cache(tmp_path), key="k", indices=itertools.count(), read_ahead=read_ahead):
            served.append(batch)
    assert served == [0, 1, 2, 3]
    assert caught.traceback[-1].name == "pipeline"


@settings(max_examples=60, deadline=None)
@given(present=st.sets(st.integers(0, 30)), start=st.integers(0, 30), read_ahead=st.sampled_from([0, 1, 4]))
def test_whatever_is_in_the_cache_the_batches_are_the_same(tmp_path_factory, present, start, read_ahead):
    cache = open_cache(tmp_path_factory.mktemp("mix"), num_slots=40)
    for index in present:
        cache.put("k", index, index)
    made = []

    def pipeline(first):
        for index in range(first, 31):
            made.append(index)
            yield index

    served = list(cached(pipeline, cache, key="k", indices=itertools.count(start), read_ahead=read_ahead))
    assert served == list(range(start, 31))
    assert set(made) >= set(range(start, 31)) - present


def test_a_warm_start_does_not_open_the_pipeline(tmp_path):
    list(cached(numbers, open_cache(tmp_path, 16), key="k", indices=range(12)))
    warm = cached(lambda start: pytest.fail("opened"), open_cache(tmp_path, 16), key="k", indices=range(12))
    assert list(warm) == list(range(12))


def test_an_abandoned_iteration_leaves_no_thread(tmp_path):
    before = threading.active_count()
    ahead = cached(
        lambda start: itertools.count(start), open_cache(tmp_path), key="k", indices=itertools.count(), read_ahead=3
    )
    assert [next(ahead), next(ahead)] == [0, 1]
    assert threading.active_count() == before + 1
    ahead.close()
    assert threading.active_count() == before


def in_child(action):
    """Fork, run `action` and keep the process alive after it."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
            time.sleep(60)
        finally:
            os._exit(1)
    return pid


def wait_for(condition, timeout_s=30):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.0005)


def kill(pid):
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@pytest.mark.spawns
def test_batches_read_ahead_survive_sigkill(tmp_path):
    cache = open_cache(tmp_path, num_slots=16)

    def consume_two():
        ahead = cached(numbers, open_cache(tmp_path, 16), key="k", indices=itertools.count(), read_ahead=6)
        next(ahead), next(ahead)
        time.sleep(60)

    pid = in_child(consume_two)
    try:
        wait_for(lambda: cache.get("k", 7) is not MISSING)
    finally:
        kill(pid)
    first_made = []

    def pipeline(start):
        first_made.append(start)
        return numbers(start)

    assert list(cached(pipeline, open_cache(tmp_path, 16), key="k", indices=range(2, 12))) == list(range(2, 12))
    assert first_made == [8]


@pytest.mark.spawns
def test_a_writer_killed_in_the_middle_of_a_batch_is_not_believed(tmp_path):
    """The watcher sees the first bytes of a 64 MiB batch in its slot and kills the writer before the commit.

    The slot held an older batch, which is torn with it.
    """
    slot_bytes, num_torn = 65 << 20, 0
    big = torch.ones(64 << 20, dtype=torch.uint8)
    for attempt in range(10):
        cache = open_cache(tmp_path, num_slots=1, slot_bytes=slot_bytes, name=f"torn{attempt}")
        cache.put("k", 0, "older")
        start = ring_bytes(1, slot_bytes) - slot_bytes
        with cache.path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as watched:
            pid = in_child(lambda cache=cache: cache.put("k", 1, big))
            try:
                older = watched[start : start + 64]
                wait_for(lambda: watched[start : start + 64] != older)  # noqa: B023
            finally:
                kill(pid)
        found = cache.get("k", 1)
        assert found is MISSING or torch.equal(found, big)
        assert cache.get("k", 0) is MISSING
        assert cache.num_damaged == 0  # torn is not damaged: the slot was marked empty before
        num_torn += found is MISSING
        assert cache.put("k", 2, "after")  # the dead writer's lock is gone
        assert open_cache(tmp_path, 1, slot_bytes, name=f"torn{attempt}").get("k", 2) == "after"
        cache.remove()
        if num_torn == 2:
            return
    pytest.fail("the writer was never caught in the middle of a batch")


def test_a_slot_that_gets_another_batch_while_it_is_looked_up_is_a_miss(tmp_path, monkeypatch):
    cache = open_cache(tmp_path, num_slots=1)
    cache.put("k", 1, "one")
    find = BatchRing._slots_of

    def find_then_overwritten(ring, key, index):
        slots = find(ring, key, index)
        monkeypatch.setattr(BatchRing, "_slots_of", find)
        cache.put("k", 2, "two")
        return slots

    monkeypatch.setattr(BatchRing, "_slots_of", find_then_overwritten)
    assert cache.get("k", 1) is MISSING
    assert cache.get("k", 2) == "two"
    assert cache.num_damaged == 0


@pytest.mark.spawns
def test_many_processes_may_write_and_read_at_once(run_ranks, tmp_path):
    def hammer(folder, slot_bytes):
        import random

        import torch

        from hyperpod_plugins.data import MISSING, BatchCache, BatchCacheConfig

        config = BatchCacheConfig(size_bytes=3 * slot_bytes, max_batch_bytes=slot_bytes, folder=folder)
        cache = BatchCache("busy", fingerprint="f", config=config)
        rng, hits = random.Random(int.from_bytes(os.urandom(4), "big")), 0
        for _ in range(300):
            index = rng.randrange(6)
            found = cache.get("k", index)
            if found is MISSING:
                cache.put("k", index, torch.full((2000,), index))
            else:
                hits += 1
                assert torch.equal(found, torch.full((2000,), index))
        return hits, cache.num_damaged

    results = run_ranks(hammer, tmp_path, 1 << 15, world_size=3, timeout_s=60)
    assert all(hits > 10 and num_damaged == 0 for hits, num_damaged in results)
