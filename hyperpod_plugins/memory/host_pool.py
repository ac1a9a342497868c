"""Host memory for tensors that leave the device: pinned on CUDA, pooled, within a budget, near the device.

Pinning costs about 3 ms for each allocation and synchronizes, so blocks are kept and used again: a training step whose
tensors have the sizes of earlier ones allocates nothing. torch's own cache of pinned memory rounds sizes up to powers
of two; blocks here are registered with CUDA at their own size.
"""

import contextlib
import ctypes
import logging
import os
import threading
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch

from hyperpod_plugins.env import WorkerEnv

log = logging.getLogger(__name__)
_PAGE = 4096


class HostPool:
    """Blocks of host memory, each used by one tensor at a time. Any thread may use it."""

    def __init__(self, device: torch.device, budget_bytes: int = 0) -> None:
        """Allocate nothing yet.

        Args:
            device: Device that copies from and to the blocks.
            budget_bytes: Upper limit of all blocks together; 0 for half of this rank's part of the host's memory.
        """
        self._device = device
        self.budget_bytes = budget_bytes or host_share() // 2
        self._free: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        self._lock = threading.Lock()
        self.allocated_bytes = 0
        """Size of all blocks, in use or free."""
        self.used_bytes = 0
        self.num_allocations = 0
        """Blocks allocated so far; constant once every size has been seen."""
        self.num_refused = 0
        """Requests that the budget did not allow."""

    def acquire(self, num_bytes: int) -> torch.Tensor | None:
        """Return a block, uint8 `(at least num_bytes,)`, with any content; None if the budget does not allow it."""
        size = -(-num_bytes // _PAGE) * _PAGE
        with self._lock:
            if self._free[size]:
                self.used_bytes += size
                return self._free[size].pop()
            if self.allocated_bytes + size > self.budget_bytes:
                self._drop_free(self.allocated_bytes + size - self.budget_bytes)
            if self.allocated_bytes + size > self.budget_bytes:
                self.num_refused += 1
                return None
            self.allocated_bytes += size
            self.used_bytes += size
            self.num_allocations += 1
        return allocate_near(self._device, size)

    def release(self, block: torch.Tensor) -> None:
        """Take back a block that `acquire` returned, once no copy uses it."""
        with self._lock:
            self.used_bytes -= block.numel()
            self._free[block.numel()].append(block)

    def close(self) -> None:
        """Free all blocks that are not in use."""
        with self._lock:
            self._drop_free(self.allocated_bytes)

    def _drop_free(self, num_bytes: int) -> None:
        """Free blocks of other sizes until `num_bytes` are free, or none is left: sequence lengths may have changed."""
        for size in sorted(self._free, reverse=True):
            while self._free[size] and num_bytes > 0:
                _unpin(self._free[size].pop(), self._device)
                self.allocated_bytes -= size
                num_bytes -= size


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
    block = torch.empty(num_bytes, dtype=torch.uint8)
    with _on_node_of(device):
        ctypes.memset(block.data_ptr(), 0, num_bytes)  # in this thread, unlike torch's fill
    runtime: Any = torch.cuda.cudart()
    status = int(runtime.cudaHostRegister(block.data_ptr(), num_bytes, 0))
    if status:
        log.warning("%d bytes of host memory were not pinned (CUDA error %d): copies are slower", num_bytes, status)
    return block


def _unpin(block: torch.Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        runtime: Any = torch.cuda.cudart()
        runtime.cudaHostUnregister(block.data_ptr())


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
