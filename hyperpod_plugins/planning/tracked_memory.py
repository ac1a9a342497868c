"""Memory that operations on tensors take, counted while they run; also with fake tensors, which have none.

`TrackedMemory` is a dispatch mode that sees the result of every operation, also in backward, and counts the bytes of
each new storage until it is freed. Temporary memory inside an operation and the rounding of an allocator are not seen.
FSDP2 frees and allocates gathered parameters by resizing their storage, which is counted, too.
"""

# Storages have no public identity, and torch's type stubs name the arguments of `resize_` differently.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

import weakref
from collections.abc import Iterator
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from hyperpod_plugins.memory.host_pool import HostBlock, HostPool


class TrackedMemory(TorchDispatchMode):
    """Counts the bytes of storages that operations return, as long as they live; one at a time in a process."""

    def __init__(self) -> None:
        """Count nothing yet."""
        super().__init__()
        self.current = 0
        """Bytes now."""
        self.peak = 0
        """Most bytes so far."""
        self.added = self.peak_added = 0
        """Bytes that `add` has added, now and at the peak."""
        self.divisor = 1
        """Of the bytes of a new storage, one part in so many counts."""
        self._sizes: dict[int, int] = {}  # by storage; -1 for one that is left out
        self._divisors: dict[int, int] = {}  # by storage, above 1

    def leave_out(self, tensor: Tensor) -> None:
        """Do not count the storage of a tensor, now or later."""
        for storage in _storages_of(tensor):
            key = storage._cdata
            if key not in self._sizes:  # another storage may have its place later
                weakref.finalize(storage, self._forget, key)
            self.current -= max(0, self._sizes.get(key, 0)) // self._divisors.pop(key, 1)
            self._sizes[key] = -1

    def __enter__(self) -> Self:
        """Start to count."""
        self._resize = torch.UntypedStorage.resize_
        tracker, resize = self, self._resize

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            tracker.count(storage)
            return result

        torch.UntypedStorage.resize_ = resize_
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        """Stop to count."""
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*args)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count what it returns."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                for storage in _storages_of(leaf):
                    self.count(storage)
        return result

    def count(self, storage: torch.UntypedStorage) -> None:
        """Count a storage that is new, or has another size than before."""
        key, size = storage._cdata, storage.nbytes()
        known = self._sizes.get(key)
        if known == -1 or known == size:
            return
        if known is None:
            weakref.finalize(storage, self._forget, key)
            if self.divisor > 1:
                self._divisors[key] = self.divisor
        self._sizes[key] = size
        self._change((size - (known or 0)) // self._divisors.get(key, 1))

    def add(self, num_bytes: float) -> None:
        """Count memory that no tensor stands for; a negative number takes it away again."""
        self.added += int(num_bytes)
        self._change(int(num_bytes))

    def _change(self, num_bytes: int) -> None:
        self.current += num_bytes
        if self.current > self.peak:
            self.peak, self.peak_added = self.current, self.added

    def _forget(self, key: int) -> None:
        self.current -= max(0, self._sizes.pop(key, 0)) // self._divisors.pop(key, 1)


class UncountedPool(HostPool):
    """Host memory of an offload where the host is the device, or nothing is: it does not count."""

    def __init__(self, device: torch.device, tracker: TrackedMemory, budget_bytes: int = 0) -> None:
        """Let `tracker` leave out all blocks; without `budget_bytes` there is no limit."""
        super().__init__(device, budget_bytes=budget_bytes or 1 << 62)
        self._tracker = tracker

    def acquire(self, num_bytes: int) -> HostBlock | None:
        """Return a block, as `HostPool` does."""
        tracker = self._tracker
        peak = tracker.peak, tracker.peak_added
        block = super().acquire(num_bytes)
        if block is not None:
            tracker.leave_out(block.memory)
            tracker.peak, tracker.peak_added = peak
        return block


def _storages_of(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """Of what a tensor consists of; a tensor around others (of DTensor, of float8) has a storage without memory."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            if isinstance(part := getattr(tensor, name), Tensor):  # a DTensor also names its mesh
                yield from _storages_of(part)
    else:
        yield tensor.untyped_storage()
