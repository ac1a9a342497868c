"""What optimizers hold beside parameters and their state: learning rates, and all else in their groups.

A scheduler's state does not hold them, and a scheduler goes on from what it finds. A rank that was interrupted before
(or after) a scheduler's step has others than the rank from which all go on.
"""

import math
import zlib
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from hyperpod_plugins.comm import Channel
from hyperpod_plugins.errors import ConfigError, RecoveryError, few
from hyperpod_plugins.parallel.checkpoint.parts import AVERAGED, CURRENT, NUM_AVERAGED, StateParts, TensorPart, place_of
from hyperpod_plugins.parallel.checkpoint.state import (
    count_device,
    describe_optimizer,
    model_tensors,
    optimizer_tensors,
    parameters_of,
    plain,
    plain_name,
    set_optimizer,
)
from hyperpod_plugins.parallel.hsdp import laid_out_as, laid_out_like
from hyperpod_plugins.recovery.kept_state import memory_of
from hyperpod_plugins.recovery.packing import packed, unpacked

# The training state of one rank, and its way to a rank that holds the same shard.
#
# A rank's state is its local tensors: parameter shards, buffers, and the tensors of optimizer state. Replicas of a
# shard hold the same bits, so a copy from one of them is exact. Everything travels over a `Channel`, in few large
# parts: a large tensor is sent from where it lies to where it is to lie, small ones are put together. Before the
# tensors goes one header, which is read without running code (see `packing`).

MESSAGE_BYTES = 64 * 2**20
ALONE_BYTES = 2**18  # a tensor of this size makes up a message of its own
_HEADER_BYTES = 2**30
_PATIENCE_S = 120.0  # a source may have to commit a step first; whoever stands still is replaced afterwards


class TrainingState:
    """Parameters, buffers and optimizer state of this rank, by reference."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        average: nn.Module | None = None,
        verify: bool = False,
    ) -> None:
        """Take hold of the state.

        Args:
            model: sharded or plain.
            optimizers: over the model's parameters.
            average: an `AveragedModel` whose tensors are laid out as the model's.
            verify: compare checksums of what was sent and what arrived.
        """
        self.model = model
        self.optimizers = list(optimizers)
        self._average = average
        self._verify = verify
        self._places: dict[str, tuple[list[int], list[int]]] = {}
        self._channel = Channel(None, "state", patience_s=_PATIENCE_S)

    def num_bytes(self) -> int:
        """Size of what would be sent."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def checksum(self) -> int:
        """CRC-32 of every tensor's bytes, in the order of their names; equal on replicas of one shard."""
        return _checksum(tensor for _, tensor in sorted(self.tensors().items()))

    def header(self) -> bytes:
        """What the tensors are, and what optimizers hold beside them, `packed`."""
        described = [describe_optimizer(self.model, optimizer) for optimizer in self.optimizers]
        header = {
            "tensors": [(name, list(tensor.shape), str(tensor.dtype)) for name, tensor in self.tensors().items()],
            "optimizers": described,
            "checksum": self.checksum() if self._verify else 0,
            "places": self._whole_tensors() | self._places_of_state(described),
        }
        return packed(header)

    def make_room(self, header: bytes) -> None:
        """Make the optimizers' tensors that a peer's `header` tells of, and touch their memory, before they are filled.

        Raises:
            RecoveryError: the peer has another model.
        """
        tensors = self._make_room(unpacked(header, map_location=None), "the preview of a peer")
        for name, tensor in tensors.items():
            if _is_optimizer_state(name):
                tensor.zero_()

    def copy_to(self, data: torch.Tensor) -> None:
        """Copy the bytes of all tensors into `data`, which is one-dimensional, of bytes and `num_bytes()` long."""
        tensors = list(self.tensors().values())
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
        found, persistent, averaged = StateParts(), model_tensors(self.model), list[TensorPart]()
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
                place = described["places"].get(full_name)
                if place is None:
                    owner = owners[f"parameter.{entry.rpartition('.')[0]}"]
                    is_laid_out = shape and shape == shapes[owner][0]  # else a count, which is plain
                    place = described["places"][owner] if is_laid_out else (shape, [0] * len(shape))
                size, offset = place
                values = _typed(parts[full_name], torch.empty(shape, dtype=dtype, device="meta"))
                part = TensorPart(
                    name=entry if is_state else plain_name(name), size=tuple(size), offset=tuple(offset), values=values
                )
                if is_state:
                    found.optimizers[int(index)].append(part)
                elif part.name == f"{AVERAGED}n_averaged":
                    found.beside.append(replace(part, name=NUM_AVERAGED))
                elif part.name.startswith(AVERAGED):
                    averaged.append(replace(part, name=part.name.removeprefix(f"{AVERAGED}module.")))
                elif part.name in persistent:
                    found.model.append(part)
        if self._average is not None:  # as the model itself is saved, too
            found.beside.extend(replace(part, name=f"{CURRENT}{part.name}") for part in found.model)
            found.model[:] = [part for part in averaged if part.name in persistent]
        return found

    def _take_apart(self, header: bytes, data: torch.Tensor, whose: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """What a header says, and the bytes of each tensor."""
        described = unpacked(header, map_location=None)
        names = [name for name, _, _ in described["tensors"]]
        sizes = [math.prod(shape) * _dtype(dtype).itemsize for _, shape, dtype in described["tensors"]]
        parts = dict(zip(names, data.split(sizes), strict=True))
        if self._verify:
            _compare(_checksum(part for _, part in sorted(parts.items())), described, whose)
        return described, parts

    def _whole_tensors(self) -> dict[str, tuple[list[int], list[int]]]:
        """Where this rank's parts of parameters and buffers lie in the whole; it never changes."""
        if not self._places:
            self._places = {name: place_of(tensor) for name, tensor in self._named_tensors()}
        return self._places

    def _places_of_state(self, described: Sequence[Mapping[str, Any]]) -> dict[str, tuple[list[int], list[int]]]:
        """The same of optimizer state that lies otherwise than its parameters."""
        found: dict[str, tuple[list[int], list[int]]] = {}
        for index, optimizer in enumerate(self.optimizers):
            if described[index]["layouts"]:
                tensors = optimizer_tensors(self.model, optimizer)
                found |= {f"optimizer.{index}.{name}": place_of(tensors[name]) for name in described[index]["layouts"]}
        return found

    def share(self, sources: Mapping[int, int]) -> None:
        """Take everything from this rank's source, if it has one, and give it to those whose source this rank is.

        Args:
            sources: global rank that gives its state, for each rank that takes one. A source takes none itself.

        Raises:
            PeerLost: a rank was lost meanwhile. The state of a rank that was taking one is undefined then.
            RecoveryError: see `receive`.
        """
        rank = dist.get_rank()
        targets = [target for target, source in sorted(sources.items()) if source == rank]
        if targets:
            self.send(*targets)
        if rank in sources:
            self.receive(sources[rank])

    def send(self, *ranks: int) -> None:
        """Give everything to some global ranks, at the same time; what is small may not have arrived on return."""
        self._channel.send("header", [self.header()], ranks)
        messages: list[torch.Tensor] = []
        for batch in _batches(self.tensors().values()):
            parts = [_bytes(tensor) for tensor in batch]
            messages.append(parts[0] if len(parts) == 1 else torch.cat(parts))
        self._channel.send("tensors", messages, ranks)

    def receive(self, rank: int) -> None:
        """Take everything from a global rank, in place; optimizer state is made without stepping.

        Raises:
            RecoveryError: the sender has another model, or bits changed on the way.
        """
        (header,) = self._channel.receive("header", [_HEADER_BYTES], rank)
        described = unpacked(header.numpy().tobytes(), map_location=None)
        batches = list(_batches(self._make_room(described, f"rank {rank}").values()))
        with torch.no_grad():
            messages = [_room_for(batch) for batch in batches]
            self._channel.receive("tensors", messages, rank)
            for message, batch in zip(messages, batches, strict=True):
                if not _is_in_place(batch):
                    for tensor, part in zip(batch, message.split([each.nbytes for each in batch]), strict=True):
                        tensor.copy_(_typed(part, tensor))
        if self._verify:
            _compare(self.checksum(), described, f"rank {rank}")

    def _make_room(self, described: dict[str, Any], whose: str) -> dict[str, torch.Tensor]:
        """Make optimizer state as the header says, and return all tensors, to be filled."""
        ours = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in self.tensors().items()]
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
        return self.tensors()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Local tensors by name, the same order on every rank of a shard."""
        found: dict[str, torch.Tensor] = {}
        for name, tensor in self._named_tensors():
            found[name] = _local(tensor)
        for index, optimizer in enumerate(self.optimizers):
            for name, tensor in optimizer_tensors(self.model, optimizer).items():
                found[f"optimizer.{index}.{name}"] = _local(tensor)
        return found

    def _named_tensors(self) -> Generator[tuple[str, torch.Tensor]]:
        """Parameters and buffers of the model, and of its average."""
        for module, prefix in ((self.model, ""), (self._average, AVERAGED)):
            if module is not None:
                yield from ((f"parameter.{prefix}{name}", parameter) for name, parameter in module.named_parameters())
                yield from ((f"buffer.{prefix}{name}", buffer) for name, buffer in module.named_buffers())

    def _make_state(self, index: int, optimizer: Optimizer, header: dict[str, Any]) -> None:
        parameters = parameters_of(self.model)
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
            layout = header["optimizers"][index]["layouts"].get(entry)
            state[entry] = _like(parameter, local) if layout is None else laid_out_as(layout, parameter, local)
        set_optimizer(self.model, optimizer, state, header["optimizers"][index])


def _parameters_in(names: Iterable[str]) -> list[str]:
    return [name.removeprefix("parameter.") for name in names if name.startswith("parameter.")]


def _is_in_place(batch: Sequence[torch.Tensor]) -> bool:
    return len(batch) == 1 and batch[0].is_contiguous()


def _room_for(batch: Sequence[torch.Tensor]) -> torch.Tensor:
    """Where the bytes of a batch are received: its only tensor itself, or new memory on the same device."""
    if _is_in_place(batch):
        return _bytes(batch[0])
    return torch.empty(sum(tensor.nbytes for tensor in batch), dtype=torch.uint8, device=batch[0].device)


def _compare(checksum: int, described: dict[str, Any], whose: str) -> None:
    if checksum != described["checksum"]:
        raise RecoveryError(f"the training state of {whose} arrived with other bits; it is not used")


def _is_optimizer_state(name: str) -> bool:
    return name.startswith("optimizer.")


def _groups(described: dict[str, Any]) -> list[list[str]]:
    """Names of the parameters of each group."""
    return [group["params"] for group in described["param_groups"]]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it, as `local_part`, which takes a DTensor's long way through the dispatcher."""
    return memory_of(tensor).detach()


def _like(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A state tensor: sharded as its parameter if it has the parameter's shape, plain (a step count) otherwise."""
    is_part = local.dim() > 0 and local.shape == _local(parameter).shape
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


def make_plain(optimizers: Iterable[Optimizer]) -> None:
    """Let hyperparameters be Python's numbers where they are NumPy's, which replacements and checkpoints can not read.

    Raises:
        ConfigError: one has fewer bits than Python's, so that a schedule would go on from it with other roundings.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for key, value in group.items():
                if isinstance(value, np.floating) and not isinstance(value, float):
                    raise ConfigError(
                        f"{key} of {type(optimizer).__name__} is a {type(value).__name__} of NumPy. Give it as "
                        f"float(...), also to the schedule: a process that replaces a lost one goes on from a float."
                    )
                if isinstance(value, np.generic):
                    group[key] = value.item()


def hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """What the groups of an optimizer hold beside parameters."""
    return [
        {key: plain(value) for key, value in group.items() if key not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]


def give_hyperparameters(groups: Sequence[list[dict[str, Any]]], optimizers: Sequence[Optimizer]) -> None:
    """Inverse of `hyperparameters`, for several optimizers. Tensors are filled: compiled code holds on to them."""
    for optimizer, saved in zip(optimizers, groups, strict=False):
        for group, values in zip(optimizer.param_groups, saved, strict=True):
            for key, value in values.items():
                present = group.get(key)
                if isinstance(present, torch.Tensor):
                    present.copy_(torch.as_tensor(value))
                else:
                    group[key] = value
