"""Memory and time of loading a pretrained model into the shards of several ranks.

    python benchmarks/load_pretrained.py              # a random Llama of 1 B parameters into 4 ranks
    python benchmarks/load_pretrained.py --quick      # one of 20 M

Each way loads the same safetensors files with `from_pretrained` and shards the model over all ranks: `at once`, as
scripts do, where each rank has the whole model first; `delayed`, the same call inside `delayed_init`; and `delayed on
rank 0`, where only the first rank opens the files and the others get their shards from it. The peak is that of the
rank's own memory (`RssAnon`) above the beginning of the load; pages of mapped files, which belong to the system and are
shared by the ranks of a node, are told apart.

Before each load, the kernel forgets the files. What all ranks of a node then cause to be read from the disk is the size
of the files: each byte once. A folder in memory (tmpfs) is never read from a disk, and shows 0.
"""

import argparse
import json
import math
import os
import shutil
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from hyperpod_plugins.delayed_init import delayed_init
from hyperpod_plugins.parallel import ParallelConfig, build_mesh, parallelize
from hyperpod_plugins.parallel.topology import Topology

WAYS = ("at once", "delayed", "delayed on rank 0")
VOCABULARY = 32_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One rank's load."""

    way: str
    rank: int
    seconds: float
    shard_bytes: int
    peak_bytes: int
    mapped_bytes: int
    """Pages of files that the rank has mapped, at the end."""
    disk_bytes: int
    """What the rank's reads have fetched from the disk (`read_bytes` of the kernel), and others need not read again."""
    file_bytes: int
    """Size of the files."""
    digest: float
    """Sum of the rank's shards, which must not depend on the way."""


def config(parameters: int) -> LlamaConfig:
    """A Llama with about that many parameters: 16 layers, embeddings not tied."""
    layers = 16 if parameters > 10**8 else 4
    vocabulary = VOCABULARY if parameters > 10**8 else 4096
    width = 64
    while layers * 11 * width**2 + 2 * vocabulary * width < parameters:  # 4 attention, 7 MLP matrices of width**2
        width += 64
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=width * 7 // 3,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        use_cache=False,
    )


def memory() -> dict[str, int]:
    """The parts of this process's resident memory, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss")}


def bytes_read() -> int:
    """What this process has caused to be read from disks."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"])


def files_of(folder: str) -> list[Path]:
    """The files that hold the weights."""
    return sorted(Path(folder).glob("*.safetensors"))


def forget_files(folder: str) -> None:
    """Let the kernel drop what it keeps of the files in memory, so that loads read from the disk."""
    for path in files_of(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Peak(threading.Thread):
    """Watches this process's own memory."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.begin = self.peak = memory()["RssAnon"]
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.wait(0.002):
            self.peak = max(self.peak, memory()["RssAnon"])

    def stop(self) -> int:
        self._done.set()
        self.join()
        return max(self.peak, memory()["RssAnon"]) - self.begin


def load(rank: int, world_size: int, way: str, folder: str, store: str, out: str) -> None:
    """One rank: load, shard, and write down what it took."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    torch.set_num_threads(1)
    dist.init_process_group("hyperpod", init_method=f"file://{store}", rank=rank, world_size=world_size)
    is_rank_0_only = way == "delayed on rank 0"
    settings = ParallelConfig(
        hybrid_shard_degree=world_size, delayed_values="rank_0" if is_rank_0_only else "every_rank"
    )
    mesh = build_mesh(Topology(world_size=world_size, shard_degree=world_size), "cpu")
    small = torch.nn.Sequential(torch.nn.Linear(4, 4))  # so that what a first use takes does not count
    parallelize(small, mesh, settings)
    dist.barrier()
    read_before = bytes_read()
    peak = Peak()
    peak.start()
    began_s = time.perf_counter()
    if way == "at once":
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    else:
        with delayed_init():
            if is_rank_0_only and rank:
                model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
            else:
                model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    parallelize(model, mesh, settings)
    shards = [parameter.to_local().detach() for parameter in model.parameters()]
    sample = Sample(
        way=way,
        rank=rank,
        seconds=time.perf_counter() - began_s,
        shard_bytes=sum(each.numel() * each.element_size() for each in shards),
        peak_bytes=peak.stop(),
        mapped_bytes=memory()["RssFile"],
        disk_bytes=bytes_read() - read_before,
        file_bytes=sum(path.stat().st_size for path in files_of(folder)),
        digest=sum(float(each.double().sum()) for each in shards),
    )
    Path(out, f"{rank}.json").write_text(json.dumps(asdict(sample)))
    dist.barrier()
    dist.destroy_process_group()


def measure(way: str, folder: str, world_size: int) -> list[Sample]:
    """All ranks of one way, in new processes."""
    forget_files(folder)
    with tempfile.TemporaryDirectory() as out:
        spawn(load, (world_size, way, folder, f"{out}/store", out), nprocs=world_size)
        return [Sample(**json.loads(Path(out, f"{rank}.json").read_text())) for rank in range(world_size)]


def write_random(folder: str, parameters: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
    """Write a model of random values with about that many parameters, made on a device."""
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config(parameters), dtype=dtype)
    sys.stdout.write(f"writing {sum(each.numel() for each in model.parameters()) / 1e6:.0f} M parameters\n")
    model.save_pretrained(folder, max_shard_size="500MB")


def default_ways(folder: str, num_ranks: int) -> list[str]:
    """All ways, without `at once` for a model that this machine could not hold once for each rank."""
    num_bytes = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
    needed = (num_ranks + 1) * num_bytes
    if needed <= os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        return list(WAYS)
    sys.stdout.write(f"  at once: left out, as it needs {needed / 2**30:.1f} GiB of free memory\n")
    return list(WAYS[1:])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--parameters", type=int, default=10**9)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, help="default: all, but `at once` only where this machine has the memory"
    )
    parser.add_argument("--folder", help="of a pretrained model to load; by default one is made, of random values")
    parser.add_argument(
        "--scratch", help="folder on a disk for the model that is made; by default that for temporary files"
    )
    parser.add_argument("--json", type=Path, help="write the samples there")
    parser.add_argument("--quick", action="store_true", help="20 M parameters")
    args = parser.parse_args(arguments)
    made = "" if args.folder else tempfile.mkdtemp(dir=args.scratch)
    folder = args.folder or made
    try:
        if made:
            write_random(folder, 2 * 10**7 if args.quick else args.parameters)
        ways = args.ways or default_ways(folder, args.ranks)
        samples = [sample for way in ways for sample in measure(way, folder, args.ranks)]
    finally:
        if made:
            shutil.rmtree(made)
    digests = {way: [each.digest for each in samples if each.way == way] for way in ways}
    worst = dict.fromkeys(ways, 0.0)
    for way in ways:
        of_way = [each for each in samples if each.way == way]
        worst[way] = max(each.peak_bytes / each.shard_bytes for each in of_way)
        sys.stdout.write(
            f"  {way:18} peak of a rank {worst[way]:5.2f} shards, mapped files "
            f"{max(each.mapped_bytes / each.shard_bytes for each in of_way):5.2f} shards, "
            f"{max(each.seconds for each in of_way):6.1f} s, "
            f"{sum(each.disk_bytes for each in of_way) / of_way[0].file_bytes:5.2f} of the files read from disk\n"
        )
    if args.json:
        args.json.write_text(json.dumps([asdict(each) for each in samples], indent=1))
    is_same = all(each == digests[ways[0]] for each in digests.values())
    if args.quick:  # what does not grow with the model weighs as much as a shard
        return int(not is_same or max(worst.values()) > worst.get("at once", math.inf))
    return int(not is_same or any(peak > 1.3 for way, peak in worst.items() if way != "at once"))


if __name__ == "__main__":
    sys.exit(main())
