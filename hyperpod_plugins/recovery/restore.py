"""The training state of one rank, and its way to a rank that holds the same shard.

A rank's state is its local tensors: parameter shards, buffers, and the tensors of optimizer state. Replicas of a shard
hold the same bits, so a copy from one of them is exact. Everything travels in few large messages: a large tensor is
sent from where it lies to where it is to lie, small ones are put together. Beside the tensors goes one header, which is
read with torch's `weights_only`.
"""

import io
import math
import zlib
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from hyperpod_plugins.errors import RecoveryError, few
from hyperpod_plugins.parallel.checkpoint_parts import StateParts, TensorPart, place_of
from hyperpod_plugins.parallel.checkpoint_state import (
    count_device,
    describe_optimizer,
    model_tensors,
    optimizer_tensors,
    plain_name,
    set_optimizer,
)
from hyperpod_plugins.parallel.shard import laid_out_like, local_part

MESSAGE_BYTES = 64 * 2**20
_AT_ONCE = 8  # messages under way while the next one is prepared
ALONE_BYTES = 2**18  # a tensor of this size makes up a message of its own


class TrainingState:
    """Parameters, buffers and optimizer state of this rank, by reference."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], *, verify: bool = False) -> None:
        """Take hold of the state.

        Args:
            model: sharded or plain.
            optimizers: over the model's parameters.
            verify: compare checksums of what was sent and what arrived.
        """
        self.model = model
        self.optimizers = list(optimizers)
        self._verify = verify
        self._places: dict[str, tuple[list[int], list[int]]] = {}

    def num_bytes(self) -> int:
        """Size of what would be sent."""
        return sum(tensor.nbytes for tensor in self._tensors().values())

    def checksum(self) -> int:
        """CRC-32 of every tensor's bytes, in the order of their names; equal on replicas of one shard."""
        return _checksum(tensor for _, tensor in sorted(self._tensors().items()))

    def header(self) -> bytes:
        """What the tensors are, and what optimizers hold beside them, to be read with `weights_only`."""
        header = {
            "tensors": [(name, list(tensor.shape), str(tensor.dtype)) for name, tensor in self._tensors().items()],
            "optimizers": [describe_optimizer(self.model, optimizer) for optimizer in self.optimizers],
            "checksum": self.checksum() if self._verify else 0,
            "places": self._whole_tensors(),
        }
        buffer = io.BytesIO()
        torch.save(header, buffer)
        return buffer.getvalue()

    def make_room(self, header: bytes) -> None:
        """Make the optimizers' tensors that a peer's `header` tells of, and touch their memory, before they are filled.

        Raises:
            RecoveryError: the peer has another model.
        """
        tensors = self._make_room(_read_header(header), "the preview of a peer")
        for name, tensor in tensors.items():
            if _is_optimizer_state(name):
                tensor.zero_()

    def copy_to(self, data: torch.Tensor) -> None:
        """Copy the bytes of all tensors into `data`, which is one-dimensional, of bytes and `num_bytes()` long."""
        tensors = list(self._tensors().values())
        for tensor, part in zip(tensors, data.split([tensor.nbytes for tensor in tensors]), strict=True):
            part.copy_(_bytes(tensor))

    def copy_from(self, header: bytes, data: torch.Tensor, whose: str) -> None:
        """Take the state that `header` and `copy_to` have recorded; `whose` it was, for the message.

        Raises:
            RecoveryError: the state is of another model, or its bits have changed; nothing of it is taken then.
        """
        described, parts = self._take_apart(header, data, whose)
        tensors = self._make_room(described, whose)
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(_typed(parts[name], tensor))

    def parts_of(self, recorded: Sequence[tuple[bytes, torch.Tensor]], whose: str) -> StateParts:
        """What a checkpoint of this model has of several ranks' states, by the names that it has there.

        Args:
            recorded: header and data of each.
            whose: for the message.

        Raises:
            RecoveryError: bits have changed.
        """
        found, persistent = StateParts(), model_tensors(self.model)
        found.optimizers.extend([] for _ in self.optimizers)
        for header, data in recorded:
            described, parts = self._take_apart(header, data, whose)
            found.descriptions[:] = described["optimizers"]
            shapes = {name: (shape, _dtype(dtype)) for name, shape, dtype in described["tensors"]}
            owners = {f"parameter.{plain_name(name)}": f"parameter.{name}" for name in _parameters_in(shapes)}
            for full_name, (shape, dtype) in shapes.items():
                kind, _, name = full_name.partition(".")
                index, _, entry = name.partition(".")
                is_state = kind == "optimizer"
                owner = owners[f"parameter.{entry.rpartition('.')[0]}"] if is_state else full_name
                is_laid_out = not is_state or (shape and shape == shapes[owner][0])  # else a count, which is plain
                size, offset = described["places"][owner] if is_laid_out else (shape, [0] * len(shape))
                values = _typed(parts[full_name], torch.empty(shape, dtype=dtype, device="meta"))
                part = TensorPart(
                    name=entry if is_state else plain_name(name), size=tuple(size), offset=tuple(offset), values=values
                )
                if is_state:
                    found.optimizers[int(index)].append(part)
                elif part.name in persistent:
                    found.model.append(part)
        return found

    def _take_apart(self, header: bytes, data: torch.Tensor, whose: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """What a header says, and the bytes of each tensor."""
        described = _read_header(header)
        names = [name for name, _, _ in described["tensors"]]
        sizes = [math.prod(shape) * _dtype(dtype).itemsize for _, shape, dtype in described["tensors"]]
        parts = dict(zip(names, data.split(sizes), strict=True))
        if self._verify:
            _compare(_checksum(part for _, part in sorted(parts.items())), described, whose)
        return described, parts

    def _whole_tensors(self) -> dict[str, tuple[list[int], list[int]]]:
        """Where this rank's parts of parameters and buffers lie in the whole; it never changes."""
        if not self._places:
            named = [(f"parameter.{name}", parameter) for name, parameter in self.model.named_parameters()]
            named += [(f"buffer.{name}", buffer) for name, buffer in self.model.named_buffers()]
            self._places = {name: place_of(tensor) for name, tensor in named}
        return self._places

    def send(self, rank: int) -> None:
        """Give everything to a global rank."""
        device = self._device()
        payload = torch.frombuffer(bytearray(self.header()), dtype=torch.uint8).to(device)
        dist.send(torch.tensor([payload.numel()], device=device), rank)
        dist.send(payload, rank)
        under_way: deque[tuple[dist.Work | None, torch.Tensor]] = deque()
        for batch in _batches(self._tensors().values()):
            parts = [_bytes(tensor) for tensor in batch]
            message = parts[0] if len(parts) == 1 else torch.cat(parts)
            under_way.append((dist.isend(message, rank), message))
            if len(under_way) > _AT_ONCE:
                _wait(under_way.popleft()[0])
        for work, _ in under_way:
            _wait(work)

    def receive(self, rank: int) -> None:
        """Take everything from a global rank, in place; optimizer state is made without stepping.

        Raises:
            RecoveryError: the sender has another model, or bits changed on the way.
        """
        device = self._device()
        size = torch.zeros(1, dtype=torch.int64, device=device)
        dist.recv(size, rank)
        payload = torch.empty(int(size), dtype=torch.uint8, device=device)
        dist.recv(payload, rank)
        described = _read_header(payload.cpu().numpy().tobytes())
        tensors = self._make_room(described, f"rank {rank}")
        under_way: deque[tuple[dist.Work | None, torch.Tensor, list[torch.Tensor]]] = deque()
        with torch.no_grad():
            for batch in _batches(tensors.values()):
                is_in_place = len(batch) == 1 and batch[0].is_contiguous()
                num_bytes = sum(tensor.nbytes for tensor in batch)
                message = (
                    _bytes(batch[0])
                    if is_in_place
                    else torch.empty(num_bytes, dtype=torch.uint8, device=batch[0].device)
                )
                under_way.append((dist.irecv(message, rank), message, [] if is_in_place else batch))
                if len(under_way) > _AT_ONCE:
                    _take(*under_way.popleft())
            for each in under_way:
                _take(*each)
        if self._verify:
            _compare(self.checksum(), described, f"rank {rank}")

    def _make_room(self, described: dict[str, Any], whose: str) -> dict[str, torch.Tensor]:
        """Make optimizer state as the header says, and return all tensors, to be filled."""
        ours = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in self._tensors().items()]
        theirs = [(name, tuple(shape), dtype) for name, shape, dtype in described["tensors"]]
        ours, theirs = ([each for each in side if not _is_optimizer_state(each[0])] for side in (ours, theirs))
        if theirs != ours:  # before anything is changed
            different = sorted({name for name, _, _ in set(theirs) ^ set(ours)})
            raise RecoveryError(
                f"{whose} holds other tensors than this process built ({few(different) or 'their order'} differ; "
                f"{len(theirs)} and {len(ours)} tensors). A replacement must run the same program with the same data."
            )
        groups = [_groups(describe_optimizer(self.model, optimizer)) for optimizer in self.optimizers]
        if groups != [_groups(each) for each in described["optimizers"]]:
            raise RecoveryError(f"{whose} holds optimizers with other groups of parameters than this process built")
        for index, optimizer in enumerate(self.optimizers):
            self._make_state(index, optimizer, described)
        return self._tensors()

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Local tensors by name, the same order on every rank of a shard."""
        found: dict[str, torch.Tensor] = {}
        for name, parameter in self.model.named_parameters():
            found[f"parameter.{name}"] = _local(parameter)
        for name, buffer in self.model.named_buffers():
            found[f"buffer.{name}"] = _local(buffer)
        for index, optimizer in enumerate(self.optimizers):
            for name, tensor in optimizer_tensors(self.model, optimizer).items():
                found[f"optimizer.{index}.{name}"] = _local(tensor)
        return found

    def _make_state(self, index: int, optimizer: Optimizer, header: dict[str, Any]) -> None:
        parameters = dict(self.model.named_parameters())
        prefix = f"optimizer.{index}."
        groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
        present = optimizer_tensors(self.model, optimizer)
        state: dict[str, torch.Tensor] = {}
        for full_name, shape, dtype in header["tensors"]:
            if not full_name.startswith(prefix):
                continue
            entry = full_name.removeprefix(prefix)
            there = present.get(entry)
            if there is not None and (list(_local(there).shape), str(there.dtype)) == (list(shape), dtype):
                state[entry] = there  # room that was made before
                continue
            parameter = parameters[entry.rpartition(".")[0]]
            device = parameter.device if shape else count_device(parameter, groups[id(parameter)])
            local = torch.empty(shape, dtype=_dtype(dtype), device=device)
            state[entry] = _like(parameter, local)
        set_optimizer(self.model, optimizer, state, header["optimizers"][index])

    def _device(self) -> torch.device:
        parameter = next(self.model.parameters(), None)
        return torch.device("cpu") if parameter is None else parameter.device


def _parameters_in(names: Iterable[str]) -> list[str]:
    return [name.removeprefix("parameter.") for name in names if name.startswith("parameter.")]


def _take(work: dist.Work | None, message: torch.Tensor, batch: list[torch.Tensor]) -> None:
    """Wait for a message, and copy its parts to the tensors of a batch."""
    _wait(work)
    if batch:
        for tensor, part in zip(batch, message.split([each.nbytes for each in batch]), strict=True):
            tensor.copy_(_typed(part, tensor))


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


def _read_header(header: bytes) -> dict[str, Any]:
    return torch.load(io.BytesIO(header), weights_only=True)


def _compare(checksum: int, described: dict[str, Any], whose: str) -> None:
    if checksum != described["checksum"]:
        raise RecoveryError(f"the training state of {whose} arrived with other bits; it is not used")


def _is_optimizer_state(name: str) -> bool:
    return name.startswith("optimizer.")


def _groups(described: dict[str, Any]) -> list[list[str]]:
    """Names of the parameters of each group."""
    return [group["params"] for group in described["param_groups"]]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return local_part(tensor.detach())


def _like(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A state tensor: sharded as its parameter if it has the parameter's shape, plain (a step count) otherwise."""
    is_part = local.dim() > 0 and local.shape == local_part(parameter).shape
    return laid_out_like(parameter, local) if is_part else local


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of a tensor, one-dimensional; where it is contiguous, the very same memory."""
    return tensor.reshape(-1).view(torch.uint8)


def _typed(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Bytes as a tensor of another type, which must begin at a multiple of its size."""
    is_aligned = part.storage_offset() % like.element_size() == 0
    return (part if is_aligned else part.clone()).view(like.dtype).view(like.shape)


def _dtype(name: str) -> torch.dtype:
    dtype = vars(torch)[name.removeprefix("torch.")]
    assert isinstance(dtype, torch.dtype)
    return dtype


def _batches(tensors: Iterable[torch.Tensor]) -> Generator[list[torch.Tensor]]:
    """Tensors that make up one message: large ones alone, small ones together with others on their device."""
    batch: list[torch.Tensor] = []
    size_bytes = 0
    for tensor in tensors:
        if tensor.nbytes >= ALONE_BYTES:
            yield [tensor]
            continue
        if batch and (size_bytes + tensor.nbytes > MESSAGE_BYTES or tensor.device != batch[0].device):
            yield batch
            batch, size_bytes = [], 0
        batch.append(tensor)
        size_bytes += tensor.nbytes
    if batch:
        yield batch


def _checksum(tensors: Iterable[torch.Tensor]) -> int:
    value = 0
    for tensor in tensors:
        value = zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().data, value)
    return value
