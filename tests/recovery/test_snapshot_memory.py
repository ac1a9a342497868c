"""Snapshots in shared memory, and the folder that an agent makes for them."""

import os

import pytest

from hyperpod_plugins.elastic import process
from hyperpod_plugins.errors import PeerLost
from hyperpod_plugins.recovery import snapshot_memory
from hyperpod_plugins.recovery.snapshot_memory import CommittedSteps, SharedSlots, Snapshot, leaves_enough

GB = 2**30


@pytest.fixture(autouse=True)
def limits(monkeypatch):
    """Small pieces of work."""
    monkeypatch.setattr(snapshot_memory, "_CHUNK_BYTES", 300)


@pytest.fixture
def any_room(monkeypatch):
    """Where the disk of these tests is nearly full, too."""
    monkeypatch.setattr(snapshot_memory, "_MIN_FREE_PART", 0.0)
    monkeypatch.setattr(snapshot_memory, "_MIN_FREE_BYTES", 0)


def left_by(folder, *steps, whose="rank 0"):
    slots, kept = SharedSlots(folder, "0-own", whose), []
    for step in steps:
        data = slots.allocate(1000, kept[-1:])
        data.fill_(step)
        kept.append(data)
        slots.record(Snapshot(step=step, header=b"header", trainer=b"trainer %d" % step, data=data))
    return slots


def found_by_the_next(folder, whose):
    slots = SharedSlots(folder, "0-own", whose)
    return [each for each in slots.load() if slots.is_intact(each)]


@pytest.mark.usefixtures("any_room")
def test_the_last_two_are_found_by_the_next_process(tmp_path):
    left_by(tmp_path, 1, 2, 3)
    found = {each.step: each for each in found_by_the_next(tmp_path, "rank 0")}
    assert sorted(found) == [2, 3]
    assert found[3].data.eq(3).all()
    assert (found[3].header, found[3].trainer) == (b"header", b"trainer 3")
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.iterdir())


@pytest.mark.usefixtures("any_room")
def test_what_is_damaged_or_of_others_is_not_used(tmp_path):
    left_by(tmp_path, 1, 2)
    assert SharedSlots(tmp_path, "0-own", "rank 1").load() == []
    assert list(tmp_path.iterdir()) == []  # nobody may use it, so it takes no memory
    slots = left_by(tmp_path, 1, 2)
    slots.invalidate(slots.load()[0].data)
    with (tmp_path / "0-own-1.data").open("r+b") as file:
        file.seek(500)
        file.write(b"x")
    assert found_by_the_next(tmp_path, "rank 0") == []
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "0-own-0.head").write_bytes(b"{}\n")
    (tmp_path / "0-own-1.head").write_bytes(b"\xff\n")
    assert SharedSlots(tmp_path, "0-own", "rank 0").load() == []
    left_by(tmp_path, 1, 2).clear()
    assert list(tmp_path.iterdir()) == []


def test_the_next_process_finds_how_many_steps_were_committed(tmp_path):
    path = tmp_path / "0.committed"
    assert CommittedSteps(path, "rank 0").load() is None
    for step in (999, 30):  # all have returned to a snapshot
        CommittedSteps(path, "rank 0").record(step)
    assert CommittedSteps(path, "rank 0").load() == 30
    assert CommittedSteps(path, "rank 1").load() is None
    path.write_bytes(b"x" * 40)
    assert CommittedSteps(path, "rank 0").load() is None
    CommittedSteps(path, "rank 0").clear()
    assert list(tmp_path.iterdir()) == []
    CommittedSteps(tmp_path / "gone" / "0.committed", "rank 0").record(3)  # its agent is gone


def test_a_snapshot_without_room_for_its_head_is_not_one_that_outlives(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot_memory, "leaves_enough", lambda *_: True)
    slots = SharedSlots(tmp_path, "0-own", "rank 0")
    data = slots.allocate(10, [])
    kept = Snapshot(step=1, header=b"", trainer=b"", data=data)
    assert slots.record(kept)
    (tmp_path / "0-own-0.head").unlink()
    (tmp_path / "0-own-0.head").mkdir()  # so that nothing can take its name
    assert not slots.record(kept)


@pytest.mark.usefixtures("any_room")
def test_no_room_is_no_error(tmp_path):
    assert SharedSlots(tmp_path, "0-own", "rank 0").allocate(2**60, []) is None
    assert SharedSlots(tmp_path / "gone", "0-own", "rank 0").allocate(10, []) is None


@pytest.mark.parametrize(
    ("num_bytes", "free", "total", "is_enough"),
    [
        (2**20, 64 * 2**20, 64 * 2**20, False),  # a container's
        (GB // 2, 2 * GB, 2 * GB, True),
        (GB + 1, 2 * GB, 2 * GB, False),
        (4 * GB, 10 * GB, 10 * GB, True),
        (6 * GB, 10 * GB, 10 * GB, False),
        (2 * GB, 6 * GB, 10 * GB, False),  # others have taken of it
    ],
)
def test_half_of_it_and_a_gigabyte_stay_free_for_others(num_bytes, free, total, is_enough):
    assert leaves_enough(num_bytes, free, total) == is_enough


def test_what_would_take_it_from_others_lies_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot_memory, "_MIN_FREE_BYTES", 2**60)
    assert SharedSlots(tmp_path, "0-own", "rank 0").allocate(1000, []) is None
    assert list(tmp_path.iterdir()) == []


class Runtime:
    """Says what CUDA's runtime would say, and notes what it was asked: there is no GPU here."""

    def __init__(self, code):
        self.code, self.registered, self.num_forgotten = code, set(), 0

    def cudaHostRegister(self, address, size, flags):
        if not self.code:
            self.registered.add(address)
        return self.code

    def cudaHostUnregister(self, address):
        self.registered.remove(address)
        return 0

    def forget(self):
        self.num_forgotten += 1


@pytest.mark.usefixtures("any_room")
@pytest.mark.parametrize("code", [0, 1])
def test_what_a_gpu_was_told_of_memory_is_taken_back(tmp_path, monkeypatch, code):
    runtime = Runtime(code)
    monkeypatch.setattr(snapshot_memory.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(snapshot_memory.torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(snapshot_memory, "_forget_error", runtime.forget)
    slots = left_by(tmp_path, 1, 2, 3)
    assert slots.allocate(1000, []).eq(0).all()
    assert len(runtime.registered) == (0 if code else 2)
    assert runtime.num_forgotten == (4 if code else 0)
    del slots
    assert runtime.registered == set()


class Broken:
    """The groups break when it is asked for the n-th time whether they are whole."""

    def __init__(self, num_times):
        self.num_left = num_times

    def __call__(self):
        self.num_left -= 1
        if self.num_left <= 0:
            raise PeerLost("a test")


@pytest.mark.usefixtures("any_room")
@pytest.mark.parametrize("num_times", [1, 3])
def test_broken_groups_end_what_takes_long(tmp_path, num_times):
    slots = SharedSlots(tmp_path, "0-own", "rank 0")
    with pytest.raises(PeerLost):
        slots.allocate(1000, [], Broken(num_times))
    assert list(tmp_path.iterdir()) == []
    data = slots.allocate(1000, [])
    data.fill_(7)
    snapshot = Snapshot(step=7, header=b"header", trainer=b"trainer", data=data)
    with pytest.raises(PeerLost):
        slots.record(snapshot, Broken(num_times))
    assert SharedSlots(tmp_path, "0-own", "rank 0").load() == []


def test_folders_of_agents_that_are_gone_are_removed(tmp_path):
    here = process._namespace()
    mine = tmp_path / f"{os.getpid()}-{process._start_of(os.getpid())}-{here}"
    foreign = tmp_path / "999999999-1-1"  # of another container, where that number may be alive
    gone = [tmp_path / f"999999999-1-{here}", tmp_path / f"{os.getpid()}-1-{here}"]  # the number was used again
    for folder in (mine, foreign, *gone):
        folder.mkdir()
        (folder / "0-own-0.data").write_bytes(b"x")
    process.remove_stale(tmp_path)
    assert set(tmp_path.iterdir()) == {mine, foreign}


def test_a_folder_that_others_can_enter_is_not_used(tmp_path):
    tmp_path.chmod(0o755)
    assert not process.is_private(tmp_path)
    tmp_path.chmod(0o700)
    assert process.is_private(tmp_path)
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    assert not process.is_private(link)
