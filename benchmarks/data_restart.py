"""How long after a restart in the middle of an epoch the first batch is there, for a token file of 1 GiB.

    python -m benchmarks.data_restart [--quick] [--gib 1.0] [--folder /tmp]

Every turn is a fresh process (forked, libraries imported) that opens the file, goes to a position in epoch 3 and reads
one batch. Cold turns drop the file's pages from the page cache first; on a disk they measure mostly the disk.
"""

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks import harness, report, stats
from hyperpod_plugins.data import BatchSplit, ElasticSampler, StatefulLoader, TokenDataset, write_tokens

LIMIT_S = 0.050
SEQUENCE, BATCH, VOCAB, EPOCH = 1024, 8, 50_000, 3
CONTENDERS = ("hyperpod", "np.memmap + randperm", "np.fromfile + randperm", "torch.load + randperm")


def first_batch_hyperpod(folder: Path) -> Tensor:
    """Ours: the state is what a checkpoint holds."""
    data = TokenDataset(folder / "tokens.bin", SEQUENCE)
    split = BatchSplit(global_batch_size=BATCH, micro_batch_size=BATCH, data_world_size=1)
    loader = StatefulLoader(data, ElasticSampler(len(data), split, fingerprint=data.fingerprint))
    position = len(data) // 2 // BATCH * BATCH
    loader.load_state_dict(loader.state_dict() | {"epoch": EPOCH, "position": position, "step_start": position})
    return next(iter(loader))["input_ids"]


def first_batch_of(read: Callable[[], np.ndarray]) -> Tensor:
    """The usual script: all tokens at hand, a table with the epoch's order, the batches before the position skipped."""
    tokens = read()
    num_samples = (len(tokens) - 1) // SEQUENCE
    order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(EPOCH))
    ids = order[num_samples // 2 // BATCH * BATCH :][:BATCH].tolist()
    return torch.stack([torch.from_numpy(tokens[i * SEQUENCE : (i + 1) * SEQUENCE].astype(np.int64)) for i in ids])


def first_batch(name: str, folder: Path) -> Tensor:
    readers: dict[str, Callable[[], np.ndarray]] = {
        "np.memmap + randperm": lambda: np.memmap(folder / "tokens.raw", dtype="<u2", mode="r"),
        "np.fromfile + randperm": lambda: np.fromfile(folder / "tokens.raw", dtype="<u2"),
        "torch.load + randperm": lambda: torch.load(folder / "tokens.pt").numpy(),
    }
    return first_batch_hyperpod(folder) if name == "hyperpod" else first_batch_of(readers[name])


def timed(name: str, folder: Path, pipe: Connection) -> None:
    torch.set_num_threads(1)
    start_s = time.perf_counter()
    batch = first_batch(name, folder)
    elapsed_s = time.perf_counter() - start_s
    assert batch.shape == (BATCH, SEQUENCE)
    pipe.send(elapsed_s)


def measure(name: str, folder: Path, *, is_cold: bool) -> float:
    if is_cold:
        for path in folder.iterdir():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=timed, args=(name, folder, sender), daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(120):
            raise TimeoutError(f"{name} gave no batch within 120 s")
        return receiver.recv()
    finally:
        process.kill()
        process.join()


def make_files(folder: Path, num_tokens: int) -> None:
    """The same tokens in three formats, on disk before anything is timed."""
    chunk_tokens = 1 << 22

    def chunks() -> Iterator[np.ndarray]:
        rng = np.random.default_rng(0)
        for start in range(0, num_tokens, chunk_tokens):
            yield rng.integers(0, VOCAB, min(chunk_tokens, num_tokens - start), dtype=np.uint16)

    write_tokens(folder / "tokens.bin", chunks(), vocab_size=VOCAB)
    with (folder / "tokens.raw").open("wb") as file:
        for chunk in chunks():
            chunk.tofile(file)
    torch.save(torch.from_numpy(np.fromfile(folder / "tokens.raw", dtype="<u2")), folder / "tokens.pt")
    os.sync()


def main() -> None:
    harness.leave_cleanly_on_sigterm()
    parser = harness.argument_parser("First batch after a restart in the middle of an epoch.")
    parser.add_argument("--gib", type=float, default=1.0, help="size of the token file")
    parser.add_argument("--folder", type=Path, help="where to put 3 files of that size (default: the temporary folder)")
    arguments = parser.parse_args()
    rounds = arguments.rounds or (2 if arguments.quick else 15)
    gib = min(arguments.gib, 1 / 64) if arguments.quick else arguments.gib
    samples: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(prefix="data-restart-", dir=arguments.folder) as name:
        folder = Path(name)
        harness.progress(f"writing three files of {gib:g} GiB")
        make_files(folder, int(gib * (1 << 29)))
        for cache in ("warm", "cold"):
            samples[cache] = {contender: [] for contender in CONTENDERS}
            measure("np.fromfile + randperm", folder, is_cold=False)
            for round_index in range(rounds):
                harness.progress(f"{cache} page cache, round {round_index + 1} of {rounds}")
                for contender in stats.rotated(CONTENDERS, round_index):
                    samples[cache][contender].append(measure(contender, folder, is_cold=cache == "cold"))
    harness.progress("")
    for cache, by_contender in samples.items():
        print_samples(f"First batch of {gib:g} GiB, {cache} page cache ({rounds} rounds)", by_contender)
    slowest_s = max(samples["warm"]["hyperpod"])
    print(f"\nslowest warm start of hyperpod: {slowest_s * 1e3:.1f} ms (limit {LIMIT_S * 1e3:.0f} ms)")
    findings = {"limit_s": LIMIT_S, "gib": gib, "seconds": samples}
    report.write_results("data_restart", [], arguments.json, findings)


def print_samples(title: str, by_contender: dict[str, list[float]]) -> None:
    lines = []
    for contender, seconds in by_contender.items():
        spread = stats.spread(seconds)
        ratio = stats.paired_ratio(seconds, by_contender["hyperpod"], [len(seconds)])
        lines.append(
            [
                contender,
                f"{spread.median * 1e3:.2f}",
                f"{spread.low * 1e3:.2f} .. {spread.high * 1e3:.2f}",
                f"{ratio.median:.2f}",
            ]
        )
    report.print_table(title, ["contender", "median ms", "quartiles ms", "times hyperpod"], lines)


if __name__ == "__main__":
    main()
