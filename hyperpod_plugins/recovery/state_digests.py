"""Digests of what a rank holds, by name, what a difference between two of them means, and replicas that differ.

[Note: what is compared] Digests are CRC-32 of the bytes of each local tensor, and of each entry of the captured state
of the trainer or loop. They show that something differs and where it appeared first, not by how much. Replicas of a
shard exchange theirs and compare them.
"""

import os
import socket
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from hyperpod_plugins.comm import group_health
from hyperpod_plugins.errors import RecoveryError, format_list
from hyperpod_plugins.parallel.checkpoint.files import tensor_checksum
from hyperpod_plugins.parallel.hsdp import local_part
from hyperpod_plugins.parallel.topology import Topology
from hyperpod_plugins.recovery.attribute_values import MAX_ENTRIES, encoded, num_entries
from hyperpod_plugins.recovery.attributes import modules_of_program
from hyperpod_plugins.recovery.buffer_states import unpacked_tensors
from hyperpod_plugins.recovery.held_objects import (
    INTERNAL,
    FollowedObject,
    FollowMode,
    find_held,
    packages_of,
    values_of,
)
from hyperpod_plugins.recovery.optimizer_copy import parameters_of
from hyperpod_plugins.recovery.state_transfer import TrainingState

Digests = Mapping[str, int]
"""CRC-32 of each item, by a name that begins with its kind (`gradient`, `parameter`, `buffer`, `optimizer`, ...)."""

REASONS = {
    "batch": "the batch differs: the order of samples, or random numbers drawn by the dataset, the collate function "
    "or a hook of the batch, do not depend on seed, epoch and sample alone. Draw from the global generators of torch, "
    "NumPy or Python, which are seeded from these",
    "gradient": "computing the step again gave other gradients from the same state: it depends on something that is "
    "not restored, such as a global variable that the step changes, an object that is not a module, or a random "
    "generator of the program. Keep it in the module, or derive it from the step number",
    "parameter": "a parameter differs: it was changed outside of the optimizer's step, the optimizer keeps state that "
    "is missing from its state_dict(), or a learning rate was computed from a value that is not restored",
    "unowned": "no optimizer has this parameter, and its gradient was kept from an earlier step or attempt: give it to "
    "an optimizer, or freeze it with requires_grad_(False)",
    "buffer": "a buffer was not restored: it is no longer the tensor that was registered, or something outside of the "
    "step writes to it. Write to registered buffers only in the step",
    "averaged": "the average of a buffer was not restored, which this package should do; please report this",
    "attribute": "a Python attribute was not restored: it cannot be set, or another object changes its contents. Keep "
    "the value in a buffer, or register its object",
    "object": "an object that an attribute holds was not restored: something outside of steps changes "
    "it, or it holds what cannot be restored. Give it state_dict() and load_state_dict(), and register it",
    "metric": "the metric's states cannot be read: add_state must hold tensors, or lists of tensors",
    "registered": "the registered object's state differs: load_state_dict() must restore all that state_dict() returns",
    "optimizer": "the optimizer's state differs: check that its state_dict() contains everything that it keeps",
    "callback": "the callback's state differs: state_dict() and load_state_dict() must cover all that it keeps, in "
    "plain types, and only its own hooks may change it",
    "hook": "what on_save_checkpoint saves differs: keep it in a buffer or an attribute of the module",
    "logged": "what a rank logs without sync_dist=True after its step (in on_train_batch_end, a validation, or at the "
    "end of an epoch) is not sent to another rank before the next vote: a replacement shows another rank's value",
    "trainer": "the state of the loop differs: the step must not change it, and it must be the same on all ranks. Keep "
    "what belongs to one rank, or changes in a step, in a registered object or in a callback's state_dict()",
    "result": "the evaluation depends on something that is not restored when all processes run the program again, such "
    "as a global variable that training changes, or an object that is not a module. Keep it in the module, or compute "
    "it again",
}
"""Likely reasons, by the kind of the item that differs."""
_HOST_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Items on a rank whose bits differ from what they should be."""

    call: str = ""
    """In a rehearsed job: the call of the program, such as `test`; empty for the first one that trains."""
    rank: int
    step: int
    what: str
    """The comparison that found it, for example `computing the step again`; empty for the result of an evaluation."""
    names: tuple[str, ...]
    """Names of the items that differ, only those of the kind that comes first in a step."""
    after: frozenset[str] = frozenset()
    """In a rehearsed job: phases in which a rank had been killed before."""

    @property
    def kind(self) -> str:
        """Kind of the items that differ."""
        return self.names[0].partition(" ")[0]

    @property
    def reason(self) -> str:
        """The usual reason."""
        return REASONS.get(self.kind, REASONS["trainer"])

    def __str__(self) -> str:
        """The difference and its likely reason in one paragraph."""
        place = f"step {self.step}, {self.what}" if self.what else ""
        where = ", ".join(filter(None, (f"rank {self.rank}", self.call, place)))
        return f"{where}: {format_list(self.names, 3)} differs. Likely {self.reason}."


_ORDER = (
    "batch",
    "unowned",
    "gradient",
    "parameter",
    "buffer",
    "averaged",
    "attribute",
    "object",
    "metric",
    "registered",
    "optimizer",
    "callback",
    "hook",
    "logged",
    "trainer",
    "result",
)


def order_of_kind(kind: str) -> int:
    """Position of a kind in the order of a step; unknown kinds come last."""
    return _ORDER.index(kind) if kind in _ORDER else len(_ORDER)


def first_kind(names: Iterable[str]) -> tuple[str, ...]:
    """Of names that differ, those whose kind comes first in a step: later differences follow from these."""
    by_kind: dict[str, list[str]] = {}
    for name in sorted(names):
        by_kind.setdefault(name.partition(" ")[0], []).append(name)
    for kind in (*_ORDER, *sorted(by_kind)):
        if kind in by_kind:
            return tuple(by_kind[kind])
    return ()


def differing(one: Digests, other: Digests) -> tuple[str, ...]:
    """Names whose digests differ between two sets or are missing in one; only those of the kind that comes first."""
    return first_kind(differing_names(one, other))


def differing_names(one: Digests, other: Digests) -> set[str]:
    """Names whose digests differ between two sets or are missing in one."""
    return {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}


def steady_digests(read: Callable[[], Digests]) -> dict[str, int]:
    """Digests, 0 for what differs between two reads with nothing in between: it depends on the clock or on the read."""
    one, other = read(), read()
    return {name: digest if other.get(name) == digest else 0 for name, digest in one.items()}


def state_digests(state: TrainingState) -> dict[str, int]:
    """Digests of this rank's parameters, buffers and optimizer state tensors."""
    return tensor_digests(named_tensors(state))


def named_tensors(state: TrainingState) -> dict[str, torch.Tensor]:
    """This rank's tensors, by names that begin with the kind."""
    return {name.replace(".", " ", 1): each for name, each in state.tensors().items()}


def alike_on_replicas(state: TrainingState) -> dict[str, torch.Tensor]:
    """Tensors that replicas share. Buffers are left out: running statistics are rank-local."""
    return {name: each for name, each in named_tensors(state).items() if not name.startswith("buffer ")}


def tensor_digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Digests of tensors, by their names."""
    return {name: tensor_checksum(each) for name, each in tensors.items()}


class StepGradients:
    """Digests of the gradients that a step computes on this rank.

    A program with manual optimization may leave those of an earlier step until it computes them again, which it does
    not do in each step; a replacement has none. They are left out, and so are zeros in their place, which a step that
    was undone leaves.

    Args:
        model: whose step begins.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._earlier = {name: tensor_checksum(grad) for name, grad in _gradients(model)}

    def digests(self) -> dict[str, int]:
        """Digests by name; parameters without a gradient of this step are left out."""
        found = {name: (grad, tensor_checksum(grad)) for name, grad in _gradients(self._model)}
        return {
            f"gradient {name}": checksum
            for name, (grad, checksum) in found.items()
            if name not in self._earlier or (checksum != self._earlier[name] and bool(grad.any()))
        }


def _gradients(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            yield name, local_part(parameter.grad)


def unowned_digests(state: TrainingState) -> dict[str, int]:
    """Digests of the gradients of parameters that no optimizer owns."""
    owned = parameters_of(state.optimizers)
    return {
        f"unowned gradient {name}": tensor_checksum(local_part(parameter.grad))
        for name, parameter in state.model.named_parameters()
        if parameter.grad is not None and id(parameter) not in owned
    }


def value_digests(values: Mapping[str, Any]) -> dict[str, int]:
    """Digests of values by name, and of the entries of dictionaries among them by dotted path."""
    return {key: each for name, value in values.items() for key, each in entry_digests(name, value).items()}


def local_digests(states: Mapping[str, dict[str, Any]]) -> dict[str, int]:
    """Digests of rank-local states: of each buffer, attribute and state of a metric separately."""
    found: dict[str, int] = {}
    for name, state in states.items():
        first = name.partition(" ")[0]
        prefix = f"{first.removesuffix('s')} " if first.endswith("s") else f"{name}."  # `buffers`, but `registered 'x'`
        for key, value in _unpacked(state).items():
            found.update(entry_digests(f"{prefix}{key}", value))
    return found


def object_digests(model: nn.Module) -> dict[str, int]:
    """Digests of what the objects hold that attributes of a model's modules hold, whether they are restored or not."""
    inside, modules = set(model.modules()), modules_of_program(model)
    found, _ = find_held(
        [FollowedObject(name, each, FollowMode.ATTRIBUTES, (vars(each),), ignored=INTERNAL) for name, each in modules],
        packages=packages_of(each for _, each in modules),
        is_left_out=lambda value: isinstance(value, nn.Module) and value in inside,
    )
    names, digests = {id(each.value): ("object", name) for name, each in found.items()}, dict[str, int]()
    for held in [*found.values()][len(modules) :]:
        for key, value in values_of(held).items():
            is_known = num_entries(value, names) <= MAX_ENTRIES
            form = encoded(value, names) if is_known else type(value).__name__
            digests[f"object {held.name}.{key}"] = value_digest(form)
    return digests


def _unpacked(state: dict[str, Any]) -> dict[str, Any]:
    """A rank-local state with the tensors that `packed_tensors` has put into one piece."""
    if not {"forms", "data"} <= state.keys() <= {"forms", "data", "layout"}:
        return state
    tensors = unpacked_tensors({key: state[key] for key in ("forms", "data")})
    layout = {"layout": state["layout"]} if "layout" in state else {}  # of buffers
    return {key if isinstance(key, str) else ".".join(key): each for key, each in tensors} | layout


def entry_digests(name: str, value: Any) -> dict[str, int]:
    """Digests of the entries of nested dicts with string keys, by dotted path."""
    if not isinstance(value, dict) or not all(isinstance(key, str) and os.sep not in key for key in value):
        return {name: value_digest(value)}
    return {path: each for key, part in value.items() for path, each in entry_digests(f"{name}.{key}", part).items()}


def value_digest(value: Any) -> int:
    """Digest of plain containers, numbers, strings and tensors, independent of the order of a dict's keys.

    All paths have the same digest: a job that runs again finds the files of the previous run, and writes to others.
    """
    if isinstance(value, str) and os.sep in value:
        return zlib.crc32(b"path")
    if isinstance(value, torch.Tensor):
        return tensor_checksum(local_part(value))
    if isinstance(value, dict):
        parts = sorted(f"{value_digest(key)}:{value_digest(each)}" for key, each in value.items())
        return zlib.crc32("".join(parts).encode(), 1)
    if isinstance(value, set | frozenset):
        return zlib.crc32(" ".join(sorted(str(value_digest(each)) for each in value)).encode(), 4)
    if isinstance(value, list | tuple | deque):
        return zlib.crc32(" ".join(str(value_digest(each)) for each in value).encode(), 2)
    if isinstance(value, np.ndarray):
        return zlib.crc32(value.tobytes(), 3)
    is_plain = value is None or isinstance(value, bool | int | float | complex | str | bytes | np.generic)
    return zlib.crc32(f"{type(value).__name__}:{value if is_plain else ''!r}".encode())


class ReplicasDiffer(RecoveryError):
    """Replicas of a shard differ bitwise although they have run the same steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """Replicas of one shard that differ."""

    replicas: tuple[int, ...]
    """Ranks of all replicas of the shard."""
    suspects: tuple[int, ...]
    """Ranks that differ from the majority; all replicas if there is no majority."""
    hosts: tuple[str, ...]
    """Host names of the suspects."""
    names: tuple[str, ...]
    """Tensors that differ, if this rank is one of the replicas; otherwise empty."""

    def __str__(self) -> str:
        """The disagreement in one sentence."""
        suspects = ", ".join(f"{rank} ({host})" for rank, host in zip(self.suspects, self.hosts, strict=True))
        others = [rank for rank in self.replicas if rank not in self.suspects]
        if others:
            who = f"rank {suspects} does not hold the same bits as its replicas, ranks {', '.join(map(str, others))}"
        else:
            who = f"the replicas on ranks {suspects} do not hold the same bits, and none has a majority"
        return f"{who}: {format_list(self.names, 3)}" if self.names else f"{who}; see their messages for the tensors"


def suspects_of(digests: Mapping[int, int]) -> tuple[int, ...]:
    """Ranks that differ from the majority of a shard's replicas; all of them if no more than half agree.

    Args:
        digests: digest of each replica's whole shard, by rank.
    """
    counts = Counter(digests.values())
    value, count = counts.most_common(1)[0]
    if count == len(digests):
        return ()
    return tuple(rank for rank, each in sorted(digests.items()) if 2 * count <= len(digests) or each != value)


def compare_replicas(digests: Mapping[str, int], topology: Topology, device: torch.device) -> Disagreement | None:
    """Compare the replicas of each shard. A collective call: all ranks reach the same verdict.

    Gathers one digest from each rank, and the digests of single tensors only if these differ.

    Args:
        digests: digests of this rank's tensors, by name.
        topology: topology of the job.
        device: device of this rank.

    Returns:
        The first shard whose replicas differ, preferring this rank's own; None if all agree, or if a rank was lost
        meanwhile (the groups are broken then).
    """
    rank, names = dist.get_rank(), sorted(digests)
    whole = zlib.crc32(" ".join(f"{name}={digests[name]}" for name in names).encode())
    rows = _gathered(torch.tensor([whole, len(names)], dtype=torch.int64, device=device))
    if group_health.cause is not None:
        return None
    totals = [int(row[0]) for row in rows]
    shards = {tuple(sorted({each, *topology.peers(each, "replicate")})) for each in range(topology.world_size)}
    bad = [shard for shard in sorted(shards) if suspects_of({each: totals[each] for each in shard})]
    if not bad:
        return None
    shard = next((each for each in bad if rank in each), bad[0])
    mine = torch.full((max(int(row[1]) for row in rows),), -1, dtype=torch.int64, device=device)
    mine[: len(names)] = torch.tensor([digests[name] for name in names], dtype=torch.int64, device=device)
    singles = _gathered(mine)
    host = socket.gethostname().encode()[:_HOST_BYTES].ljust(_HOST_BYTES, b"\0")
    hosts = _gathered(torch.tensor(list(host), dtype=torch.uint8, device=device))
    if group_health.cause is not None:
        return None
    suspects = suspects_of({each: totals[each] for each in shard})
    differing = [
        name for index, name in enumerate(names) if len({int(singles[each][index]) for each in shard}) > 1
    ] or names  # only the names differ
    return Disagreement(
        replicas=shard,
        suspects=suspects,
        hosts=tuple(bytes(hosts[each].tolist()).rstrip(b"\0").decode(errors="replace") for each in suspects),
        names=tuple(differing) if rank in shard else (),
    )


def _gathered(value: torch.Tensor) -> Sequence[torch.Tensor]:
    """The values of all ranks, in host memory."""
    rows = [torch.zeros_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, value)
    return list(torch.stack(rows).cpu())
