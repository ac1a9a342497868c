"""Loading a safetensors model onto a device: inside `delayed_init`, against loading it whole and moving it.

    python benchmarks/gpu/delayed_load.py                       # a random Llama of 4 B parameters in bfloat16
    python benchmarks/gpu/delayed_load.py --parameters 8000000000

`whole` is `from_pretrained` and then `.to(device)`; `device_map` is transformers' own way to load onto a device;
`delayed` is the same call inside `delayed_init`, and then `materialize`. The peak is that of the device; on a CPU it is
that of the process's own memory, to which mapped files do not count. The first load does not count: it puts the files
into the system's cache.
`benchmarks/load_pretrained.py` measures the same for shards of several ranks.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks import load_pretrained
from benchmarks.gpu import one_device
from benchmarks.gpu.one_device import Found, Step
from benchmarks.memory import Taken
from hyperpod_plugins.delayed_init import delayed_init, materialize

REFERENCE = "whole"


def load_whole(folder: str, device: torch.device) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device)


def load_by_device_map(folder: str, device: torch.device) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map=str(device))


def load_delayed(folder: str, device: torch.device) -> Any:
    with delayed_init():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    materialize(model, device=device)
    return model


LOADS: dict[str, Callable[[str, torch.device], Any]] = {
    REFERENCE: load_whole,
    "device_map": load_by_device_map,
    "delayed": load_delayed,
}


def build(load: Callable[[str, torch.device], Any], folder: str, hosts: list[float]) -> Step:
    """A contender; the digest of the values, which must not depend on it, takes the place of a loss."""
    device = one_device.this_device()
    is_cuda = device.type == "cuda"

    def step() -> Taken:
        one_device.free(device)
        peak = load_pretrained.Peak()
        peak.start()
        if is_cuda:
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if is_cuda else 0
        began_s = time.perf_counter()
        model = load(folder, device)
        if is_cuda:
            torch.cuda.synchronize()
        seconds, on_host = time.perf_counter() - began_s, peak.stop()
        hosts.append(on_host / 2**20)
        on_device = torch.cuda.max_memory_allocated() - before if is_cuda else on_host
        digest = sum(float(each.detach().double().sum()) for each in model.parameters())
        return Taken(loss=digest, seconds=seconds, peak_bytes=on_device)

    return step


def main(arguments: list[str] | None = None) -> int:
    args = one_device.arguments_of(__doc__.splitlines()[0], arguments, parameters=4 * 10**9)
    if args.quick:
        args.parameters = 2 * 10**7
    found, hosts = Found(reference=REFERENCE), {name: list[float]() for name in LOADS}
    with tempfile.TemporaryDirectory() as folder:
        device = one_device.this_device()
        load_pretrained.write_random(folder, args.parameters, str(device), torch.bfloat16)
        builds = {name: partial(build, load, folder, hosts[name]) for name, load in LOADS.items()}
        one_device.compare(found, f"{args.parameters:,} parameters", builds, args, tokens=0)
    one_device.tell("delayed_load", found, [], args)
    for name, peaks in hosts.items():
        sys.stdout.write(f"{name}: peak of the process's own host memory {max(peaks):.0f} MiB\n" if peaks else "")
    return int(len({sample.loss for sample in found.samples}) != 1)


if __name__ == "__main__":
    sys.exit(main())
