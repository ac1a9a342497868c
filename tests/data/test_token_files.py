"""Token files: written whole or not at all, opened at once, shared by all, and never read when damaged."""

import os
import pickle
import random
import signal
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from hyperpod_plugins.data import TokenDataset, build_tokens, write_tokens
from hyperpod_plugins.data import token_file as token_file_module
from hyperpod_plugins.errors import ConfigError, DataError, DatasetChanged, DatasetDamaged


@settings(max_examples=40, deadline=None)
@given(
    chunks=st.lists(st.lists(st.integers(0, 999), max_size=30), min_size=1, max_size=6).filter(
        lambda c: sum(map(len, c)) > 5
    ),
    sequence_length=st.integers(1, 5),
    dtype=st.sampled_from(["auto", "uint16", "uint32"]),
)
def test_samples_are_the_stream_and_labels_are_the_next_tokens(tmp_path_factory, chunks, sequence_length, dtype):
    path = tmp_path_factory.mktemp("tokens") / "t.bin"
    stream = [token for chunk in chunks for token in chunk]
    header = write_tokens(path, chunks, vocab_size=1000, dtype=dtype, progress=False)
    data = TokenDataset(path, sequence_length)
    assert header.num_tokens == len(stream)
    assert len(data) == (len(stream) - 1) // sequence_length
    for index in range(len(data)):
        start = index * sequence_length
        assert data[index]["input_ids"].tolist() == stream[start : start + sequence_length]
        assert data[index]["labels"].tolist() == stream[start + 1 : start + sequence_length + 1]
        assert data[index]["labels"].dtype == torch.int64
    data.verify()


@pytest.mark.parametrize(
    ("vocab_size", "dtype", "token_bytes"), [(1 << 16, "auto", 2), ((1 << 16) + 1, "auto", 4), (100, "uint32", 4)]
)
def test_the_type_follows_the_vocabulary(tmp_path, vocab_size, dtype, token_bytes):
    header = write_tokens(tmp_path / "t", [[vocab_size - 1, 0]], vocab_size=vocab_size, dtype=dtype, progress=False)
    assert header.token_bytes == token_bytes
    assert TokenDataset(tmp_path / "t", 1)[0]["input_ids"].tolist() == [vocab_size - 1]


def test_chunks_of_any_size_are_the_same_file(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 60_000, 1_300_000)
    one = write_tokens(tmp_path / "one", [tokens], vocab_size=60_000, progress=False)
    many = write_tokens(tmp_path / "many", np.array_split(tokens, 77), vocab_size=60_000, progress=False)
    assert one.fingerprint == many.fingerprint
    assert (tmp_path / "one").read_bytes() == (tmp_path / "many").read_bytes()
    TokenDataset(tmp_path / "one", 100).verify()


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([[1, 2], [3, 50]], "number 2 on hold ids from 3 to 50"),
        ([[-1]], "from -1"),
        ([[0.5]], "whole numbers"),
        ([[[1, 2]]], "one row"),
        ([], "no tokens at all"),
        ([[], []], "no tokens at all"),
    ],
)
def test_bad_sources_leave_no_file(tmp_path, chunks, message):
    with pytest.raises(DataError, match=message):
        write_tokens(tmp_path / "t", chunks, vocab_size=50, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == [".t.lock"]


def test_a_failing_source_leaves_the_older_file(tmp_path):
    def broken():
        yield [1, 2, 3]
        raise ArithmeticError("the tokenizer failed")

    write_tokens(tmp_path / "t", [[7, 8, 9]], vocab_size=50, progress=False)
    with pytest.raises(ArithmeticError, match="the tokenizer failed"):
        write_tokens(tmp_path / "t", broken(), vocab_size=50, progress=False)
    assert TokenDataset(tmp_path / "t", 2)[0]["input_ids"].tolist() == [7, 8]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(70_000, "uint16"), (0, "auto"), (1 << 33, "auto"), (10, "int8")])
def test_types_that_cannot_hold_the_vocabulary_are_refused(tmp_path, vocab_size, dtype):
    with pytest.raises(ConfigError, match="vocabulary of"):
        write_tokens(tmp_path / "t", [[1]], vocab_size=vocab_size, dtype=dtype)


def test_sequence_lengths_that_do_not_fit_are_refused(token_file):
    path = token_file(10)
    with pytest.raises(ConfigError, match="from 1 to 9"):
        TokenDataset(path, 10)
    assert len(TokenDataset(path, 9)) == 1


@pytest.mark.parametrize(
    ("keep", "message"),
    [(0, "not a token file"), *[(keep, "cut short") for keep in (7, 8, 60, 4095, 4096, 5000, -1)]],
)
def test_a_file_cut_short_is_refused(token_file, keep, message):
    path = token_file(3000)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DatasetDamaged, match=message):
        TokenDataset(path, 8)


def test_a_file_with_something_added_is_refused(token_file):
    path = token_file(3000)
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(DatasetDamaged, match="added to"):
        TokenDataset(path, 8)


def test_a_foreign_file_is_refused_and_never_overwritten(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("my only copy " * 1000)
    with pytest.raises(DatasetDamaged, match="not a token file"):
        TokenDataset(path, 8)
    with pytest.raises(DatasetDamaged, match="not a token file"):
        build_tokens(path, lambda: [[1, 2]], vocab_size=10, progress=False)
    assert path.read_text().startswith("my only copy")


@pytest.mark.parametrize("seed", range(40))
def test_any_changed_byte_is_found(token_file, seed):
    """In the header or the table at once; in the tokens by `verify`. The header's padding carries nothing."""
    path = token_file(600_000)
    content = bytearray(path.read_bytes())
    rng = random.Random(seed)
    regions = [range(68), range(4096, 4096 + 2_400_000), range(4096 + 2_400_000, len(content))]
    place = rng.choice(rng.choice(regions))
    content[place] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    with pytest.raises(DatasetDamaged):
        TokenDataset(path, 8).verify()


def test_the_error_names_the_damaged_tokens(token_file):
    path = token_file(600_000)
    content = bytearray(path.read_bytes())
    content[4096 + (1 << 20) + 5] ^= 1
    path.write_bytes(content)
    with pytest.raises(DatasetDamaged, match="number 262144 on"):
        TokenDataset(path, 8).verify()


def test_a_pickle_is_small_and_opens_again(token_file):
    data = TokenDataset(token_file(100_000), 16)
    pickled = pickle.dumps(data)
    assert len(pickled) < 1000
    assert torch.equal(pickle.loads(pickled)[5]["labels"], data[5]["labels"])


def test_a_replaced_file_is_noticed_by_whoever_opens_it_again(token_file):
    data = TokenDataset(token_file(100), 16)
    pickled = pickle.dumps(data)
    token_file(101)
    with pytest.raises(DatasetChanged, match="replaced"):
        pickle.loads(pickled)[0]


def test_a_file_replaced_while_it_is_opened_is_the_old_one_or_the_new_one(token_file, monkeypatch):
    path = token_file(100, vocab_size=200)
    real = token_file_module._parse_header

    def replaced_meanwhile(raw, opened):
        write_tokens(path, [np.arange(101)], vocab_size=70_000, progress=False)  # another type of token
        return real(raw, opened)

    monkeypatch.setattr(token_file_module, "_parse_header", replaced_meanwhile)
    data = TokenDataset(path, 10)
    assert data[1]["input_ids"].tolist() == list(range(10, 20))
    assert data.header.token_bytes == 2


def test_a_file_cut_after_it_was_opened_is_an_error_that_names_it(token_file):
    path = token_file(100_000)
    data = TokenDataset(path, 100)
    os.truncate(path, 100_000)
    assert data[0]["input_ids"].tolist() == list(range(100))
    with pytest.raises(DatasetDamaged, match=r"ends in sample 900, though it was longer"):
        data.__getitems__([0, 900])


def test_a_read_that_gives_less_than_asked_is_gone_on_with(token_file, monkeypatch):
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, into, offset: read(file, [into[0][:7]], offset))
    path = token_file(100_000)
    data = TokenDataset(path, 100)
    assert data[3]["labels"].tolist() == list(range(301, 401))
    os.truncate(path, 100_000)
    with pytest.raises(DatasetDamaged, match=r"ends in sample 900"):
        data[900]


def test_datasets_close_their_files(token_file):
    path = token_file(100)
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        data = TokenDataset(path, 10)
        assert pickle.loads(pickle.dumps(data))[0]["input_ids"].tolist() == list(range(10))
    del data
    assert os.listdir("/proc/self/fd") == before


def test_samples_outside_do_not_exist(token_file):
    data = TokenDataset(token_file(100), 9)
    assert len(data) == 11
    for index in (-1, 11):
        with pytest.raises(IndexError, match="0 to 10"):
            data[index]
        with pytest.raises(IndexError, match="0 to 10"):
            data.__getitems__([0, index])


def test_a_batch_is_its_samples(token_file):
    data = TokenDataset(token_file(100_000), 777)
    indices = [len(data) - 1, 0, 50, 50]
    batch = pickle.loads(pickle.dumps(data)).__getitems__(indices)
    assert all(torch.equal(batch[place]["labels"], data[index]["labels"]) for place, index in enumerate(indices))


@pytest.mark.spawns
def test_workers_read_the_same(token_file):
    data = TokenDataset(token_file(1000), 9)
    loader = DataLoader(data, batch_size=16, num_workers=2)
    ids = torch.cat([batch["input_ids"] for batch in loader])
    assert torch.equal(ids, torch.arange(111 * 9).reshape(111, 9))


@pytest.mark.spawns
def test_one_process_builds_and_the_others_wait(run_ranks, tmp_path):
    def build(folder):
        import torch.distributed as dist

        def source():
            (folder / f"built-by-{os.getpid()}").touch()
            for start in range(5):
                time.sleep(0.05)
                yield range(start * 10, start * 10 + 10)

        dist.init_process_group("gloo")
        dist.barrier()
        build_tokens(folder / "t", source, vocab_size=50, progress=False, timeout_s=30)
        return TokenDataset(folder / "t", 49)[0]["input_ids"].tolist()

    assert run_ranks(build, tmp_path, world_size=4, timeout_s=60) == [list(range(49))] * 4
    assert len(list(tmp_path.glob("built-by-*"))) == 1


def start_building_forever(folder):
    """A forked process that writes and never ends; returns its pid when it is inside the file."""
    pid = os.fork()
    if pid == 0:
        try:
            endless = iter(lambda: [1] * 100_000, None)
            build_tokens(folder / "t", lambda: endless, vocab_size=50, progress=False)
        finally:
            os._exit(1)
    partial, deadline = folder / ".t.partial", time.monotonic() + 30
    while not (partial.exists() and partial.stat().st_size > 1_000_000):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return pid


@pytest.mark.spawns
def test_a_killed_builder_blocks_nobody_and_leaves_nothing_under_the_name(tmp_path):
    pid = start_building_forever(tmp_path)
    try:
        with pytest.raises(DataError, match="another process still holds"):
            build_tokens(tmp_path / "t", lambda: [[1, 2]], vocab_size=50, progress=False, timeout_s=0.1)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert not (tmp_path / "t").exists()
    header = build_tokens(tmp_path / "t", lambda: [[1, 2, 3]], vocab_size=50, progress=False, timeout_s=10)
    assert header.num_tokens == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == [".t.lock", "t"]


def test_a_sound_file_is_not_built_again_and_a_damaged_one_is(tmp_path, caplog):
    path = tmp_path / "t"
    build_tokens(path, lambda: [[1, 2, 3]], vocab_size=50, progress=False)
    assert build_tokens(path, lambda: pytest.fail("built again"), vocab_size=50).num_tokens == 3
    with pytest.raises(DatasetChanged, match="vocabulary of 50, but 60"):
        build_tokens(path, lambda: pytest.fail("built again"), vocab_size=60)
    path.write_bytes(path.read_bytes()[:-1])
    assert build_tokens(path, lambda: [[4, 5]], vocab_size=50, progress=False).num_tokens == 2
    assert "cut short" in caplog.text


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        write_tokens(tmp_path / "nowhere" / "t", [[1]], vocab_size=5)


def test_progress_is_shown_on_request(tmp_path, capfd):
    write_tokens(tmp_path / "t", [[1] * 10], vocab_size=5, progress=True)
    assert "writing t" in capfd.readouterr().err
    write_tokens(tmp_path / "t", [[1] * 10], vocab_size=5, progress=False)
    assert capfd.readouterr().err == ""
