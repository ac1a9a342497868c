"""Host memory for tensors that leave the device: pinned on CUDA, pooled, within a budget, near the device.

Pinning costs about 3 ms for each allocation and synchronizes, so blocks are kept and used again: a training step whose
tensors have the sizes of earlier ones allocates nothing. torch's own cache of pinned memory rounds sizes up to powers
of two; blocks here are whole pages of their own, registered with CUDA.

[Note: sizes of blocks] Sequences may have another length in each step. A block is an eighth of a power of two larger
than its tensor at most, so that a few sizes serve all lengths. A tensor takes the smallest free block that is large
enough, if it fills half of it. Where the budget does not allow a new block, it takes a free one of any size; then
free blocks are given back to the system for it, those first that have not been used for longest.
"""

import contextlib
import ctypes
import logging
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hyperpod_plugins.env import WorkerEnv

log = logging.getLogger(__name__)
_MOST_TIMES = 2
"""The size of a free block, of that of the tensor that it serves, unless there is no other."""


@dataclass(slots=True, eq=False)
class HostBlock:
    """Host memory that one tensor uses at a time."""

    memory: torch.Tensor
    """uint8 `(bytes,)`, whole pages; often more than the tensor takes."""
    last_copy: object = None
    """Mark of the last copy that reads it, for which the next copy into it must wait; None for none."""

    @property
    def num_bytes(self) -> int:
        """Size of the memory."""
        return self.memory.numel()


class HostPool:
    """Blocks of host memory. Any thread may use it, also while an object is finalized."""

    def __init__(self, device: torch.device, budget_bytes: int = 0) -> None:
        """Allocate nothing yet.

        Args:
            device: Device that copies from and to the blocks.
            budget_bytes: Upper limit of all blocks together; 0 for half of this rank's part of the host's memory.
        """
        self._device = device
        self.budget_bytes = budget_bytes or host_share() // 2
        self._free: list[HostBlock] = []  # in the order in which they were returned
        self._returned: deque[HostBlock] = deque()  # appending takes no lock: a finalizer may run anywhere
        self._lock = threading.Lock()
        self._used_bytes = 0
        self.allocated_bytes = 0
        """Size of all blocks, in use or free."""
        self.num_allocations = 0
        """Blocks allocated so far; constant in steps with the sizes of earlier ones."""
        self.num_refused = 0
        """Requests that the budget did not allow."""

    @property
    def used_bytes(self) -> int:
        """Size of the blocks that are in use."""
        with self._lock:
            self._take_back()
            return self._used_bytes

    def acquire(self, num_bytes: int) -> HostBlock | None:
        """Return a block of at least `num_bytes`, with any content; None if the budget does not allow it."""
        size = block_size(num_bytes)
        with self._lock:
            self._take_back()
            block = self._best_free(num_bytes, num_bytes * _MOST_TIMES)
            excess = self.allocated_bytes + size - self.budget_bytes
            if block is None and excess > 0:
                block = self._best_free(num_bytes, self.budget_bytes)
            if block is None and excess > 0:
                missing = max(0, excess - self._drop_free(excess))
                size = max(size - missing, _whole_pages(num_bytes, 1))
            if block is None:
                if self.allocated_bytes + size > self.budget_bytes:
                    self.num_refused += 1
                    return None
                block = HostBlock(allocate_near(self._device, size))
                self.allocated_bytes += size
                self.num_allocations += 1
            self._used_bytes += block.num_bytes
            return block

    def release(self, block: HostBlock) -> None:
        """Take back a block that `acquire` returned. Copies from it may be under way: see `HostBlock.last_copy`."""
        self._returned.append(block)

    def _take_back(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            self._used_bytes -= block.num_bytes
            self._free.append(block)

    def _best_free(self, num_bytes: int, most_bytes: float) -> HostBlock | None:
        """The smallest free block that has `num_bytes`, and at most `most_bytes`; of equal ones, the oldest."""
        fitting = [each for each in self._free if num_bytes <= each.num_bytes <= most_bytes]
        best = min(fitting, key=lambda each: each.num_bytes, default=None)
        if best is not None:
            self._free.remove(best)
        return best

    def _drop_free(self, num_bytes: int) -> int:
        """Free blocks until at least `num_bytes` are free, or none is left; returns how many were freed.

        Those that were used last stay: sequence lengths may have changed, and other sizes may never be used again.
        """
        freed = 0
        while self._free and freed < num_bytes:
            block = self._free.pop(0)
            if isinstance(block.last_copy, torch.cuda.Event):
                block.last_copy.synchronize()
            self.allocated_bytes -= block.num_bytes
            freed += block.num_bytes
        return freed


def block_size(num_bytes: int) -> int:
    """Size of a new block: whole pages, rounded up to an eighth of a power of two."""
    step = 1 << max(0, (num_bytes - 1).bit_length() - 4)
    return _whole_pages(num_bytes, step)


def _whole_pages(num_bytes: int, step: int) -> int:
    step = max(step, mmap.PAGESIZE)
    return -(-num_bytes // step) * step


def host_share() -> int:
    """Memory of this host, or of its container, divided by the number of processes of the job on it; in bytes."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total // max(1, WorkerEnv.from_environ().local_world_size)


def allocate_near(device: torch.device, num_bytes: int) -> torch.Tensor:
    """Allocate host memory, uint8 `(num_bytes,)`; for a CUDA device pinned, and on its NUMA node.

    Pages belong to the node of the thread that touches them first.
    """
    if device.type != "cuda":
        return torch.empty(num_bytes, dtype=torch.uint8)
    block = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
    with _on_node_of(device):
        ctypes.memset(block.data_ptr(), 0, num_bytes)  # in this thread, unlike torch's fill
    runtime: Any = torch.cuda.cudart()
    status = int(runtime.cudaHostRegister(block.data_ptr(), num_bytes, 0))
    if status:
        with contextlib.suppress(AttributeError):
            runtime.cudaGetLastError()  # or the next kernel would be blamed
        log.warning("%d bytes of host memory were not pinned (CUDA error %d): copies are slower", num_bytes, status)
    else:
        weakref.finalize(block, _unpin, block.data_ptr())
    return block


def _unpin(address: int) -> None:
    runtime: Any = torch.cuda.cudart()
    runtime.cudaHostUnregister(address)


@contextlib.contextmanager
def _on_node_of(device: torch.device) -> Generator[None]:
    """Run the calling thread on the CPUs next to a CUDA device, if the system says which those are."""
    before = os.sched_getaffinity(0)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        properties = torch.cuda.get_device_properties(device)
        address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        text = Path(f"/sys/bus/pci/devices/{address}/local_cpulist").read_text()
        os.sched_setaffinity(0, parse_cpu_list(text) & before or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def parse_cpu_list(text: str) -> set[int]:
    """Numbers in a list of CPUs as the kernel writes it, such as `0-3,8`."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus
