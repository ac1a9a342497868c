"""GPUs, their driver and their state, as nvidia-smi and torch tell."""

import csv
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hyperpod_plugins.doctor.finding import (
    GIB_BYTES,
    MIB_BYTES,
    CommandOutput,
    Finding,
    JobSize,
    gib,
    number_of,
    output_of,
)

_SMI_S = 20.0
_TORCH_S = 90.0
_USED_BYTES = GIB_BYTES  # more than an idle driver takes
_FIELDS = ("index", "name", "driver_version", "memory.total", "memory.used")
_ECC_FIELDS = ("index", "ecc.errors.uncorrected.volatile.total")
_ROW_FIELDS = ("gpu_bus_id", "remapped_rows.pending", "remapped_rows.failure")
_MAX_GPUS = 1024
_PROGRAM = """
import json, torch
found = {"count": 0, "nccl": [], "error": ""}
try:
    torch.cuda.init()
    found["count"] = torch.cuda.device_count()
    for index in range(found["count"]):
        torch.zeros(1, device=f"cuda:{index}").add_(1).item()
except Exception as error:
    found["error"] = str(error)[:500]
try:
    found["nccl"] = list(torch.cuda.nccl.version())
except Exception:
    pass
print("FOUND" + json.dumps(found))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU as nvidia-smi describes it; None for what it does not tell."""

    index: int
    name: str
    driver: str
    memory: int | None
    """Bytes."""
    used: int | None
    uncorrected_errors: int | None = None
    """Since the driver was loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchGpus:
    """What torch finds, in a process of its own."""

    count: int = 0
    nccl: tuple[int, ...] | None = None
    error: str = ""
    """Why a GPU cannot be used; empty if all can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """GPUs of this machine."""

    gpus: tuple[Gpu, ...] = ()
    smi_failure: str = ""
    """Why nvidia-smi tells nothing."""
    has_driver: bool = False
    """Whether the kernel has NVIDIA's driver."""
    has_bad_rows: bool = False
    """Whether a GPU must be reset or replaced, as rows of its memory are remapped or cannot be."""
    cuda: str | None = None
    """Version of CUDA of this build of torch; None for a build without."""
    torch: TorchGpus | None = None
    """None if torch was not asked, as its build has no CUDA or there is no driver."""


def gather_gpus() -> GpuFacts:
    """Ask nvidia-smi, and torch in a process of its own, which can be killed if the driver hangs."""
    has_driver = Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists()
    answer = smi("--query-gpu", _FIELDS)
    if not answer.is_installed and not has_driver:
        return GpuFacts(smi_failure=answer.failure, cuda=torch.version.cuda)
    gpus, rows = parse_gpus(answer.text), CommandOutput()
    if gpus and not answer.failure:
        gpus = with_errors(gpus, smi("--query-gpu", _ECC_FIELDS).text)
        rows = smi("--query-remapped-rows", _ROW_FIELDS)
    found = None
    if torch.version.cuda is not None:
        output = output_of([sys.executable, "-c", _PROGRAM], _TORCH_S)
        found = parse_torch(output.text) or TorchGpus(error=output.failure or "torch's answer cannot be read")
    return GpuFacts(
        gpus=gpus,
        smi_failure=answer.failure,
        has_driver=has_driver,
        has_bad_rows=not rows.failure and parse_bad_rows(rows.text),
        cuda=torch.version.cuda,
        torch=found,
    )


def smi(query: str, names: tuple[str, ...]) -> CommandOutput:
    """Ask nvidia-smi for a table."""
    return output_of(["nvidia-smi", f"{query}={','.join(names)}", "--format=csv,noheader,nounits"], _SMI_S)


def parse_table(text: str, num_columns: int) -> list[list[str]]:
    """Rows of exactly that many columns; other lines are remarks of the driver."""
    rows = csv.reader(text.splitlines()[:_MAX_GPUS], skipinitialspace=True)
    return [[each.strip() for each in row] for row in rows if len(row) == num_columns]


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """GPUs from a table of `_FIELDS`."""
    found: list[Gpu] = []
    for index, name, driver, memory, used in parse_table(text, len(_FIELDS)):
        number, total_mib, used_mib = number_of(index), number_of(memory), number_of(used)
        if number is None:
            continue
        found.append(
            Gpu(
                index=number,
                name=name,
                driver=driver,
                memory=None if total_mib is None else total_mib * MIB_BYTES,
                used=None if used_mib is None else used_mib * MIB_BYTES,
            )
        )
    return tuple(found)


def with_errors(gpus: tuple[Gpu, ...], text: str) -> tuple[Gpu, ...]:
    """The same GPUs with their counts of errors, from a table of `_ECC_FIELDS`."""
    counts = {number_of(index): number_of(count) for index, count in parse_table(text, len(_ECC_FIELDS))}
    return tuple(
        Gpu(
            index=each.index,
            name=each.name,
            driver=each.driver,
            memory=each.memory,
            used=each.used,
            uncorrected_errors=counts.get(each.index),
        )
        for each in gpus
    )


def parse_bad_rows(text: str) -> bool:
    """Whether a row of a table of `_ROW_FIELDS` has a remapping that is pending or has failed."""
    return any((number_of(row[1]) or 0) + (number_of(row[2]) or 0) > 0 for row in parse_table(text, len(_ROW_FIELDS)))


def parse_torch(text: str) -> TorchGpus | None:
    """What `_PROGRAM` prints; None if it is not there."""
    line = next((each for each in reversed(text.splitlines()) if each.startswith("FOUND")), "")
    try:
        found: Any = json.loads(line.removeprefix("FOUND"))
        nccl = tuple(int(each) for each in found["nccl"])
        return TorchGpus(count=int(found["count"]), nccl=nccl or None, error=str(found["error"]))
    except (ValueError, TypeError, KeyError):
        return None


def check_gpus(facts: GpuFacts, job: JobSize) -> list[Finding]:
    """All findings of this module."""
    if not facts.gpus and not facts.has_driver:
        why = facts.smi_failure or "nvidia-smi lists none"
        found = f"no GPU ({why}): ranks compute on the CPU"
        return [Finding(name="gpus", status="skipped", found=found, advice="run this command where the job will run.")]
    return [check_driver(facts, job), check_gpu_health(facts), check_gpu_memory(facts.gpus)]


def check_driver(facts: GpuFacts, job: JobSize) -> Finding:
    """Whether torch can use the GPUs, and each rank has one."""
    names = sorted({each.name for each in facts.gpus})
    drivers = sorted({each.driver for each in facts.gpus})
    found = f"{len(facts.gpus)} x {' and '.join(names) or 'unknown'}, driver {' and '.join(drivers) or 'unknown'}"

    def error(what: str, advice: str) -> Finding:
        return Finding(name="gpus", status="error", found=f"{found}; {what}", advice=advice)

    if facts.smi_failure and not facts.gpus:
        return error(facts.smi_failure, "look at `dmesg` for lines with NVRM or Xid; reload the driver or reboot.")
    if facts.cuda is None:
        return error(
            "this build of torch has no CUDA support", "install a build with CUDA: see pytorch.org/get-started."
        )
    if facts.torch is None or facts.torch.error:
        why = "torch was not asked" if facts.torch is None else facts.torch.error
        advice = f"install a driver for CUDA {facts.cuda}, or a torch for this driver; then look at `dmesg` for Xid."
        return error(f"torch (CUDA {facts.cuda}) cannot use them: {why}", advice)
    if job.local_world_size > facts.torch.count:
        return error(
            f"torch finds {facts.torch.count} for {job.local_world_size} ranks",
            "have a GPU for each rank: nccl rejects two ranks on one; look at CUDA_VISIBLE_DEVICES.",
        )
    if len(names) > 1:
        advice = "all ranks wait for the slowest GPU: use nodes with equal ones."
        return Finding(name="gpus", status="warning", found=found, advice=advice)
    return Finding(name="gpus", status="ok", found=f"{found}; torch (CUDA {facts.cuda}) uses {facts.torch.count}")


def check_gpu_health(facts: GpuFacts) -> Finding:
    """Whether memory of a GPU has failed."""
    bad = [f"GPU {each.index}: {each.uncorrected_errors}" for each in facts.gpus if each.uncorrected_errors]
    if bad or facts.has_bad_rows:
        what = [f"uncorrected memory errors ({', '.join(bad)})"] if bad else []
        what += ["memory rows whose remapping waits for a reset, or has failed"] if facts.has_bad_rows else []
        return Finding(
            name="gpu-health",
            status="error",
            found=" and ".join(what),
            advice="drain the node and reset its GPUs (nvidia-smi -r); replace it if that does not help.",
        )
    if all(each.uncorrected_errors is None for each in facts.gpus):
        found, advice = "nvidia-smi does not report memory errors for these GPUs", "look at `dmesg` for lines with Xid."
        return Finding(name="gpu-health", status="skipped", found=found, advice=advice)
    return Finding(name="gpu-health", status="ok", found="no uncorrected memory errors since the driver was loaded")


def check_gpu_memory(gpus: tuple[Gpu, ...]) -> Finding:
    """Whether others use memory of the GPUs."""
    used = [(each.index, each.used) for each in gpus if each.used is not None and each.used > _USED_BYTES]
    if used:
        return Finding(
            name="gpu-memory",
            status="warning",
            found=", ".join(f"GPU {index}: {gib(size)}" for index, size in used) + " in use by others",
            advice="find them with nvidia-smi; they may be ranks of a job that was killed: end them first.",
        )
    if not gpus:
        return Finding(name="gpu-memory", status="skipped", found="nvidia-smi lists no GPU", advice="see `gpus`.")
    sizes = sorted({each.memory for each in gpus if each.memory is not None})
    return Finding(
        name="gpu-memory", status="ok", found=f"{' or '.join(map(gib, sizes)) or 'unknown size'}, not in use"
    )
