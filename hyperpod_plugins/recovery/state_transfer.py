"""The training state of one rank, and its transfer to a rank that holds the same shard.

A rank's state is its local tensors: parameter shards, buffers, and the tensors of optimizer state. Replicas of a
shard hold the same bits, so a copy from one of them is exact. The state travels over a `Channel`, in few large
messages: a large tensor is sent from its own memory into its destination, small ones are packed together. A header
precedes the tensors; reading it runs no code (see `packing`).

[Note: what may differ] The receiver has the same parameters as the sender, or the state is refused: it belongs to
another model. Buffers may differ, because programs register, replace and delete them while they train. The receiver
takes over those that the header describes, in modules that it has.

Optimizer hyperparameters (learning rates and everything else in the parameter groups) are copied separately, by
`hyperparameters` and `load_hyperparameters`. A scheduler's state does not hold them, and a scheduler continues from
the values that it finds: a rank that was interrupted before or after a scheduler's step has other values than the
rank from which all continue.
"""

import logging
import math
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from hyperpod_plugins.comm import Channel
from hyperpod_plugins.errors import ConfigError, ModelsDiffer, RecoveryError, format_list
from hyperpod_plugins.parallel.checkpoint.files import tensor_checksum
from hyperpod_plugins.parallel.checkpoint.state import (
    AVERAGED,
    CURRENT,
    NUM_AVERAGED,
    StateParts,
    TensorPart,
    canonical_name,
    describe_optimizer,
    model_tensors,
    optimizer_tensors,
    parameters_by_saved_name,
    set_optimizer,
    shape_and_offset_of,
    state_device,
    step_count_device,
    to_python_scalars,
)
from hyperpod_plugins.parallel.host_optimizer import ids_with_host_state
from hyperpod_plugins.parallel.hsdp import from_local_like, from_local_with_layout
from hyperpod_plugins.recovery.buffer_layout import BufferRow, PlannedTable, buffer_rows, plan_buffers
from hyperpod_plugins.recovery.optimizer_copy import local_tensor
from hyperpod_plugins.recovery.packing import pack, unpack

log = logging.getLogger(__name__)

MESSAGE_BYTES = 64 * 2**20
ALONE_BYTES = 2**18  # a tensor of this size or more is a message of its own
_HEADER_BYTES = 2**30
_PATIENCE_S = 120.0  # a source may have to commit a step first; a rank that stalls longer is replaced


def frozen_parameters(model: nn.Module) -> list[str]:
    """Names of the parameters that are not trained at present; a program may change that while it trains."""
    return [name for name, parameter in model.named_parameters() if not parameter.requires_grad]


def freeze(model: nn.Module, names: Collection[str]) -> None:
    """Have these parameters of a model not trained, and all others trained."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in names)


class WatchedWrites(Protocol):
    """An object that finds out which parameters the program writes; see `undo.StepStart`."""

    def known_writes(self) -> dict[str, Any] | None:
        """What is known of them, as plain data; None if it cannot be told."""
        ...

    def load_known_writes(self, known: object) -> None:
        """Take over what another rank knows of them."""
        ...


class TrainingState:
    """Parameters, buffers and optimizer state of this rank, held by reference."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        average: nn.Module | None = None,
        verify: bool = False,
    ) -> None:
        """Refer to the state; nothing is copied.

        Args:
            model: a sharded or plain model.
            optimizers: optimizers of the model's parameters.
            average: an `AveragedModel` whose tensors have the layout of the model's.
            verify: whether to compare checksums of the sent and the received state.
        """
        self.model = model
        self.optimizers = list(optimizers)
        self._average = average
        self._verify = verify
        self._places: dict[str, tuple[list[int], list[int]]] = {}
        self._channel = Channel(None, "state", patience_s=_PATIENCE_S)
        self.when_receiving: Callable[[], object] = lambda: None
        """Called before the tensors are received, when their description has arrived."""
        self.watched: Sequence[WatchedWrites] = ()
        """Objects that watch the program's writes; those of a receiving rank get what is known on the sending one."""

    def num_bytes(self) -> int:
        """Size of all local tensors."""
        return num_bytes_of(self.tensors())

    def checksum(self) -> int:
        """CRC-32 of every tensor's bytes, in the order of their names; equal on replicas of one shard."""
        return _checksum(tensor for _, tensor in sorted(self.tensors().items()))

    def header(
        self,
        tensors: Mapping[str, torch.Tensor] | None = None,
        *,
        known_writes: Sequence[dict[str, Any] | None] = (),
    ) -> bytes:
        """Description of the tensors, and the optimizers' state beside tensors; `packed` bytes.

        Args:
            tensors: result of `tensors`, if it is known.
            known_writes: of each of `watched`, what a receiver is told.
        """
        tensors = self.tensors() if tensors is None else tensors
        described = [describe_optimizer(self.model, optimizer) for optimizer in self.optimizers]
        header = {
            "tensors": [(name, list(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()],
            "optimizers": described,
            "checksum": self.checksum() if self._verify else 0,
            "places": self._whole_tensors() | self._places_of_state(described),
            "frozen": frozen_parameters(self.model),
            "buffers": self._buffer_rows(),
            "known_writes": [*known_writes],
        }
        return pack(header)

    def preallocate(self, header: bytes) -> None:
        """Create the optimizer state tensors that a peer's `header` describes, and touch their memory in advance.

        Does nothing if the peer had other parameters: one of the two may still change them before the state arrives.
        """
        described = unpack(header, map_location=None)
        if self._differing(described):
            return
        for index, optimizer in enumerate(self.optimizers):
            self._make_state(index, optimizer, described)
        for name, tensor in self.tensors().items():
            if _is_optimizer_state(name):
                tensor.zero_()

    def copy_to(self, data: torch.Tensor, tensors: Mapping[str, torch.Tensor] | None = None) -> None:
        """Copy the bytes of all tensors into `data`, a one-dimensional uint8 tensor of `num_bytes()` elements.

        Args:
            data: to be filled.
            tensors: result of `tensors`, if it is known.
        """
        found = [*(self.tensors() if tensors is None else tensors).values()]
        for tensor, part in zip(found, data.split([tensor.nbytes for tensor in found]), strict=True):
            part.copy_(_bytes(tensor))

    def copy_from(self, header: bytes, data: torch.Tensor, whose: str) -> None:
        """Load the state that `header` and `copy_to` recorded; `whose` names its origin in error messages.

        Raises:
            ModelsDiffer: the state is of another model; nothing is changed then.
            RecoveryError: its bits have changed; no values are loaded then.
        """
        described, parts = self._take_apart(header, data, whose)
        tensors = self._allocate_state(described, whose)
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(_typed(parts[name], tensor))
        freeze(self.model, described["frozen"])

    def copy_all_but_buffers_from(self, header: bytes, data: torch.Tensor, whose: str) -> None:
        """Load the parameters and the optimizers' state of a state that `copy_from` has loaded before.

        Raises:
            RecoveryError: its bits have changed.
        """
        _, parts = self._take_apart(header, data, whose)
        with torch.no_grad():
            for name, tensor in self.tensors().items():
                if name in parts and (_is_parameter(name) or _is_optimizer_state(name)):
                    tensor.copy_(_typed(parts[name], tensor))

    def checkpoint_parts(self, recorded: Sequence[tuple[bytes, torch.Tensor]], whose: str) -> StateParts:
        """The recorded states of several ranks as parts of a checkpoint of this model, under its names.

        Args:
            recorded: header and data of each rank's state.
            whose: names their origin in error messages.

        Raises:
            RecoveryError: bits have changed.
        """
        found, persistent, averaged = StateParts(), model_tensors(self.model), list[TensorPart]()
        found.optimizers.extend([] for _ in self.optimizers)
        for header, data in recorded:
            described, parts = self._take_apart(header, data, whose)
            found.descriptions[:] = described["optimizers"]
            shapes = {name: (shape, _dtype(dtype)) for name, shape, dtype in described["tensors"]}
            owners = {f"parameter.{canonical_name(name)}": f"parameter.{name}" for name in _parameters_in(shapes)}
            for full_name, (shape, dtype) in shapes.items():
                kind, _, name = full_name.partition(".")
                index, _, entry = name.partition(".")
                is_state = kind == "optimizer"
                place = described["places"].get(full_name)
                if place is None:
                    owner = owners[f"parameter.{entry.rpartition('.')[0]}"]
                    is_laid_out = shape and shape == shapes[owner][0]  # otherwise a step count, which is plain
                    place = described["places"][owner] if is_laid_out else (shape, [0] * len(shape))
                size, offset = place
                values = _typed(parts[full_name], torch.empty(shape, dtype=dtype, device="meta"))
                part = TensorPart(
                    name=entry if is_state else canonical_name(name),
                    size=tuple(size),
                    offset=tuple(offset),
                    values=values,
                )
                if is_state:
                    found.optimizers[int(index)].append(part)
                elif part.name == f"{AVERAGED}n_averaged":
                    found.extra_parts.append(replace(part, name=NUM_AVERAGED))
                elif part.name.startswith(AVERAGED):
                    averaged.append(replace(part, name=part.name.removeprefix(f"{AVERAGED}module.")))
                elif part.name in persistent:
                    found.model.append(part)
        if self._average is not None:  # the average is saved as the model, the model itself beside it
            found.extra_parts.extend(replace(part, name=f"{CURRENT}{part.name}") for part in found.model)
            found.model[:] = [part for part in averaged if part.name in persistent]
        return found

    def _take_apart(self, header: bytes, data: torch.Tensor, whose: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """The unpacked header, and the bytes of each tensor by name."""
        described = unpack(header, map_location=None)
        names = [name for name, _, _ in described["tensors"]]
        sizes = [math.prod(shape) * _dtype(dtype).itemsize for _, shape, dtype in described["tensors"]]
        if min(sizes, default=0) < 0 or sum(sizes) > data.numel():
            raise RecoveryError(f"the training state of {whose} holds {data.numel():,} bytes, not {sum(sizes):,}")
        parts = dict(zip(names, data[: sum(sizes)].split(sizes), strict=True))
        if self._verify:
            _compare(_checksum(part for _, part in sorted(parts.items())), described, whose)
        return described, parts

    def _whole_tensors(self) -> dict[str, tuple[list[int], list[int]]]:
        """Size and offset of this rank's part of each parameter and buffer; those of parameters never change."""
        known = self._places
        self._places = {
            name: known[name] if name in known and _is_parameter(name) else shape_and_offset_of(tensor)
            for name, tensor in self._named_tensors()
        }
        return self._places

    def _places_of_state(self, described: Sequence[Mapping[str, Any]]) -> dict[str, tuple[list[int], list[int]]]:
        """The same for optimizer state that is laid out differently from its parameter."""
        found: dict[str, tuple[list[int], list[int]]] = {}
        for index, optimizer in enumerate(self.optimizers):
            if described[index]["layouts"]:
                tensors = optimizer_tensors(self.model, optimizer)
                found |= {
                    f"optimizer.{index}.{name}": shape_and_offset_of(tensors[name])
                    for name in described[index]["layouts"]
                }
        return found

    def share(self, sources: Mapping[int, int]) -> None:
        """Receive the state from this rank's source if it has one, or send it to the ranks whose source this rank is.

        Args:
            sources: for each receiving global rank, the global rank that sends to it. A sender does not receive.

        Raises:
            PeerLost: a rank was lost meanwhile. The state of a receiving rank is undefined then.
            RecoveryError: see `receive`.
        """
        rank = dist.get_rank()
        targets = [target for target, source in sorted(sources.items()) if source == rank]
        if targets:
            self.send(*targets)
        if rank in sources:
            self.receive(sources[rank])

    def send(self, *ranks: int) -> None:
        """Send the state to some global ranks at once; small messages may not have arrived on return."""
        known = [each.known_writes() for each in self.watched]
        self._channel.send("header", [self.header(known_writes=known)], ranks)
        messages = [_message_of(batch) for batch in _batches(self.tensors().values())]
        self._channel.send("tensors", messages, ranks)

    def receive(self, rank: int) -> None:
        """Receive the state from a global rank, in place. Optimizer state is created without a step.

        Raises:
            ModelsDiffer: the sender has another model; nothing is changed then.
            RecoveryError: bits changed in transit.
        """
        (header,) = self._channel.receive("header", [_HEADER_BYTES], rank)
        described = unpack(header.numpy().tobytes(), map_location=None)
        batches = list(_batches(self._allocate_state(described, f"rank {rank}").values()))
        self.when_receiving()
        with torch.no_grad():
            messages = [_room_for(batch) for batch in batches]
            self._channel.receive("tensors", messages, rank)
            for message, batch in zip(messages, batches, strict=True):
                if not _is_in_place(batch):
                    for tensor, part in zip(batch, message.split([each.nbytes for each in batch]), strict=True):
                        tensor.copy_(_typed(part, tensor))
        if self._verify:
            _compare(self.checksum(), described, f"rank {rank}")
        freeze(self.model, described["frozen"])
        match described.get("known_writes"):
            case [*known_writes] if len(known_writes) == len(self.watched):
                for each, known in zip(self.watched, known_writes, strict=True):
                    if known is not None:
                        each.load_known_writes(known)
            case _:  # its first steps find out by themselves
                log.warning("rank %d has not sent what it knows of the program's writes", rank)

    def _allocate_state(self, described: dict[str, Any], whose: str) -> dict[str, torch.Tensor]:
        """Create the buffers and the optimizer state that the header describes, and return all tensors to be filled."""
        different = self._differing(described)
        planned, wrong = self._planned_buffers(described)
        if different or wrong:  # before anything is changed
            raise ModelsDiffer(_other_model(whose, [*different, *wrong]))
        for each in planned:
            each.apply()
        for index, optimizer in enumerate(self.optimizers):
            self._make_state(index, optimizer, described)
        tensors = self.tensors()
        if [*tensors] != (names := [name for name, _, _ in described["tensors"]]):
            raise ModelsDiffer(_other_model(whose, sorted({*tensors} ^ {*names}) or ["the order of tensors"]))
        return tensors

    def _differing(self, described: dict[str, Any]) -> list[str]:
        """Parameters, and groups of optimizers, in which the described state differs from this one."""
        ours = [
            (name, tuple(_local(each).shape), str(each.dtype))
            for name, each in self._named_tensors()
            if _is_parameter(name)
        ]
        theirs = [(name, tuple(shape), dtype) for name, shape, dtype in described["tensors"] if _is_parameter(name)]
        if theirs != ours:
            return sorted({name for name, _, _ in set(theirs) ^ set(ours)}) or ["the order of parameters"]
        groups = [_groups(describe_optimizer(self.model, optimizer)) for optimizer in self.optimizers]
        return [] if groups == [_groups(each) for each in described["optimizers"]] else ["the optimizers' groups"]

    def _planned_buffers(self, described: dict[str, Any]) -> tuple[list[PlannedTable], list[str]]:
        """Tables with the buffers that the header describes, and those that this process cannot have."""
        forms = {name: (tuple(shape), _dtype(dtype)) for name, shape, dtype in described["tensors"]}
        planned: list[PlannedTable] = []
        wrong: list[str] = []
        for module, prefix in self._modules():
            start = f"buffer.{prefix}"
            rows = [BufferRow.from_plain(row) for row in described["buffers"].get(prefix, ())]
            tables, others = plan_buffers(
                module, rows, {name.removeprefix(start): form for name, form in forms.items() if name.startswith(start)}
            )
            planned += tables
            wrong += [f"{start}{name}" for name in others]
        return planned, wrong

    def _buffer_rows(self) -> dict[str, list[list[str | bool]]]:
        return {prefix: [row.to_plain() for row in buffer_rows(module)] for module, prefix in self._modules()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Local tensors by name, in the same order on all replicas of a shard."""
        found: dict[str, torch.Tensor] = {}
        for name, tensor in self._named_tensors():
            found[name] = _local(tensor)
        for index, optimizer in enumerate(self.optimizers):
            for name, tensor in optimizer_tensors(self.model, optimizer).items():
                found[f"optimizer.{index}.{name}"] = _local(tensor)
        return found

    def _named_tensors(self) -> Generator[tuple[str, torch.Tensor]]:
        """Parameters and buffers of the model, and of its average."""
        for module, prefix in self._modules():
            yield from ((f"parameter.{prefix}{name}", parameter) for name, parameter in module.named_parameters())
            yield from ((f"buffer.{prefix}{name}", buffer) for name, buffer in module.named_buffers())

    def _modules(self) -> list[tuple[nn.Module, str]]:
        """The model and its average, each with the prefix of its names."""
        return [(self.model, ""), *([] if self._average is None else [(self._average, AVERAGED)])]

    def _make_state(self, index: int, optimizer: Optimizer, header: dict[str, Any]) -> None:
        parameters = parameters_by_saved_name(self.model)
        prefix = f"optimizer.{index}."
        groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
        present, on_host = optimizer_tensors(self.model, optimizer), ids_with_host_state()
        state: dict[str, torch.Tensor] = {}
        for full_name, shape, dtype in header["tensors"]:
            if not full_name.startswith(prefix):
                continue
            entry = full_name.removeprefix(prefix)
            parameter = parameters[entry.rpartition(".")[0]]
            if shape:
                device = state_device(parameter, on_host)
            else:
                device = step_count_device(parameter, groups[id(parameter)], on_host)
            there = present.get(entry)
            if there is not None and _is_like(_local(there), shape, dtype, device):
                state[entry] = there  # already allocated
                continue
            local = torch.empty(shape, dtype=_dtype(dtype), device=device)
            layout = header["optimizers"][index]["layouts"].get(entry)
            state[entry] = (
                _like(parameter, local) if layout is None else from_local_with_layout(layout, parameter, local)
            )
        set_optimizer(self.model, optimizer, state, header["optimizers"][index])


def num_bytes_of(tensors: Mapping[str, torch.Tensor]) -> int:
    """Size of some tensors."""
    return sum(tensor.nbytes for tensor in tensors.values())


def _parameters_in(names: Iterable[str]) -> list[str]:
    return [name.removeprefix("parameter.") for name in names if name.startswith("parameter.")]


def _is_in_place(batch: Sequence[torch.Tensor]) -> bool:
    return len(batch) == 1 and batch[0].is_contiguous()


def _is_like(tensor: torch.Tensor, shape: Sequence[int], dtype: str, device: torch.device) -> bool:
    return (list(tensor.shape), str(tensor.dtype), tensor.device.type) == (list(shape), dtype, device.type)


def _message_of(batch: Sequence[torch.Tensor]) -> torch.Tensor:
    """The bytes of a batch: the memory of its only tensor, or a copy."""
    if len(batch) == 1:
        return _bytes(batch[0])
    device = _message_device(batch)
    return torch.cat([_bytes(tensor).to(device) for tensor in batch])


def _room_for(batch: Sequence[torch.Tensor]) -> torch.Tensor:
    """Receive buffer of a batch: the memory of its only tensor, or new memory."""
    if _is_in_place(batch):
        return _bytes(batch[0])
    return torch.empty(sum(tensor.nbytes for tensor in batch), dtype=torch.uint8, device=_message_device(batch))


def _message_device(batch: Sequence[torch.Tensor]) -> torch.device:
    """Where the tensors of a batch are packed: on the GPU if one of them is there, otherwise on the CPU."""
    return next((tensor.device for tensor in batch if tensor.device.type != "cpu"), batch[0].device)


def _compare(checksum: int, described: dict[str, Any], whose: str) -> None:
    if checksum != described["checksum"]:
        raise RecoveryError(f"the training state of {whose} arrived with other bits; it is not used")


def _other_model(whose: str, different: Sequence[str]) -> str:
    """Message: a state cannot be taken over."""
    return (
        f"{whose} holds other tensors than this process ({format_list(different)} differ). A process that replaces a "
        "lost one, or returns to an earlier step, builds its model as the program does at its start, and can take over "
        "other values and other buffers, but no other parameters, modules or parameter groups. Create all of them "
        "before training begins, and freeze what is not to be trained yet (requires_grad_(False)); for another model, "
        "start another fit or session.train, from a checkpoint"
    )


def _is_parameter(name: str) -> bool:
    return name.startswith("parameter.")


def _is_optimizer_state(name: str) -> bool:
    return name.startswith("optimizer.")


def _groups(described: dict[str, Any]) -> list[list[str]]:
    """Names of the parameters of each group."""
    return [group["params"] for group in described["param_groups"]]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor. Like `local_part`, but without DTensor's slow way through the dispatcher."""
    return local_tensor(tensor).detach()


def _like(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A state tensor: sharded like its parameter if it has the parameter's shape, otherwise plain (a step count)."""
    is_part = local.dim() > 0 and local.shape == _local(parameter).shape
    return from_local_like(parameter, local) if is_part else local


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of a tensor, one-dimensional; a view if the tensor is contiguous."""
    return tensor.reshape(-1).view(torch.uint8)


def _typed(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Bytes as a tensor like another one; copied if they are not aligned for its dtype."""
    is_aligned = part.storage_offset() % like.element_size() == 0
    return (part if is_aligned else part.clone()).view(like.dtype).view(like.shape)


def _dtype(name: str) -> torch.dtype:
    dtype = vars(torch)[name.removeprefix("torch.")]
    assert isinstance(dtype, torch.dtype)
    return dtype


def _batches(tensors: Iterable[torch.Tensor]) -> Generator[list[torch.Tensor]]:
    """Groups of tensors that form one message: large ones alone, small ones together.

    Only sizes matter, so sender and receiver form the same messages wherever the tensors lie on each of them.
    """
    batch: list[torch.Tensor] = []
    size_bytes = 0
    for tensor in tensors:
        if tensor.nbytes >= ALONE_BYTES:
            yield [tensor]
            continue
        if batch and size_bytes + tensor.nbytes > MESSAGE_BYTES:
            yield batch
            batch, size_bytes = [], 0
        batch.append(tensor)
        size_bytes += tensor.nbytes
    if batch:
        yield batch


def _checksum(tensors: Iterable[torch.Tensor]) -> int:
    value = 0
    for tensor in tensors:
        value = tensor_checksum(tensor, value)
    return value


def to_python_numbers(optimizers: Iterable[Optimizer]) -> None:
    """Convert NumPy hyperparameters to Python numbers, as replacements and checkpoints cannot read NumPy ones.

    Raises:
        ConfigError: a hyperparameter has fewer bits than a Python float, so a schedule would round differently.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for key, value in group.items():
                if isinstance(value, np.floating) and not isinstance(value, float):
                    raise ConfigError(
                        f"{key} of {type(optimizer).__name__} is a NumPy {type(value).__name__}. Pass it as "
                        f"float(...), also to the scheduler: a replacement continues with a Python float."
                    )
                if isinstance(value, np.generic):
                    group[key] = value.item()


NOT_HYPERPARAMETERS = ("params", "param_names")
"""Keys of a parameter group that name its parameters."""
_PYTHON_SCALARS = bool, int, float, str, type(None)
"""Most hyperparameters: they need no conversion, which takes longer than all else here, in each step."""


def hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The parameter groups of an optimizer without their parameters."""
    return [
        {
            key: value if type(value) in _PYTHON_SCALARS else to_python_scalars(value)
            for key, value in group.items()
            if key not in NOT_HYPERPARAMETERS
        }
        for group in optimizer.param_groups
    ]


def load_hyperparameters(groups: Sequence[list[dict[str, Any]]], optimizers: Sequence[Optimizer]) -> None:
    """Load `hyperparameters` into several optimizers. Tensors are filled in place: compiled code refers to them."""
    for optimizer, saved in zip(optimizers, groups, strict=False):
        for group, values in zip(optimizer.param_groups, saved, strict=True):
            for key, value in values.items():
                present = group.get(key)
                if isinstance(present, torch.Tensor):
                    present.copy_(torch.as_tensor(value))
                else:
                    group[key] = value
