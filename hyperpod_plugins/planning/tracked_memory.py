"""Memory that operations on tensors take, counted while they run; also with fake tensors, which have none.

`TrackedMemory` is a dispatch mode that sees the result of every operation, also in backward, and counts the bytes of
each new storage until it is freed. Temporary memory inside an operation and the rounding of an allocator are not seen.
FSDP2 frees and allocates gathered parameters by resizing their storage, which is counted, too.
"""

# Storages have no public identity, and torch's type stubs name the arguments of `resize_` differently.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
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
        self.of_kind, self.peak_of_kind = Counter[str](), Counter[str]()
        """Bytes of what has been given a kind, now and at the peak, by kind."""
        self.kind_of: Callable[[Tensor], str] = _no_kind
        """Names the kind of a tensor whose storage is new; an empty name for none."""
        self.divisor = 1
        """Of the bytes of a new storage, one part in so many counts."""
        self._sizes: dict[int, int] = {}  # by storage; -1 for one that is left out
        self._divisors: dict[int, int] = {}  # by storage, above 1
        self._kinds: dict[int, str] = {}  # by storage that has one

    def leave_out(self, tensor: Tensor) -> None:
        """Do not count the storage of a tensor, now or later."""
        for storage in _storages_of(tensor):
            key = storage._cdata
            if key not in self._sizes:  # another storage may have its place later
                weakref.finalize(storage, self._forget, key)
            self._forget(key)
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
                    self.count(storage, self.kind_of(leaf))
        return result

    def count(self, storage: torch.UntypedStorage, kind: str = "") -> None:
        """Count a storage that is new, or has another size than before; the kind of a new one can be named."""
        key, size = storage._cdata, storage.nbytes()
        known = self._sizes.get(key)
        if known == -1 or known == size:
            return
        if known is None:
            weakref.finalize(storage, self._forget, key)
            if self.divisor > 1:
                self._divisors[key] = self.divisor
            if kind:
                self._kinds[key] = kind
        self._sizes[key] = size
        self.add((size - (known or 0)) // self._divisors.get(key, 1), self._kinds.get(key, ""))

    def add(self, num_bytes: float, kind: str = "") -> None:
        """Count memory that no tensor stands for, of a kind; a negative number takes it away again."""
        self.current += int(num_bytes)
        if kind:
            self.of_kind[kind] += int(num_bytes)
        if self.current > self.peak:
            self.peak, self.peak_of_kind = self.current, self.of_kind.copy()

    def _forget(self, key: int) -> None:
        num_bytes = max(0, self._sizes.pop(key, 0)) // self._divisors.pop(key, 1)
        self.add(-num_bytes, self._kinds.pop(key, ""))


class UncountedPool(HostPool):
    """Host memory of an offload where the host is the device, or nothing is: it does not count."""

    def __init__(self, device: torch.device, tracker: TrackedMemory, budget_bytes: int = 0) -> None:
        """Let `tracker` leave out all blocks; without `budget_bytes` there is no limit."""
        super().__init__(device, budget_bytes=budget_bytes or 1 << 62)
        self._tracker = tracker

    def acquire(self, num_bytes: int) -> HostBlock | None:
        """Return a block, as `HostPool` does."""
        tracker = self._tracker
        peak = tracker.peak, tracker.peak_of_kind
        block = super().acquire(num_bytes)
        if block is not None:
            tracker.leave_out(block.memory)
            tracker.peak, tracker.peak_of_kind = peak
        return block


def _no_kind(_: Tensor) -> str:
    return ""


def _storages_of(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """Of what a tensor consists of; a tensor around others (of DTensor, of float8) has a storage without memory."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            if isinstance(part := getattr(tensor, name), Tensor):  # a DTensor also names its mesh
                yield from _storages_of(part)
    else:
        yield tensor.untyped_storage()
