"""Checkpoints written from parts of tensors, whoever they belong to: a rank may write what it keeps of another one.

`torch.distributed.checkpoint` plans a save from the tensors that a rank has. Here the plan is made from parts whose
place in the whole is known; what is on disk is the same.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

AVERAGED = "average:"
"""Before the names of the tensors of an average of the model's weights, where both are held together."""
CURRENT = "current."
"""Before the names of the model's own tensors in a checkpoint whose model is the average."""
NUM_AVERAGED = "num_averaged"
"""Name of the number of updates of that average in a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorPart:
    """A part of a tensor."""

    name: str
    size: tuple[int, ...]
    """Shape of the whole."""
    offset: tuple[int, ...]
    """Where the part begins in it."""
    values: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StateParts:
    """Parts of a model's tensors, and of those of its optimizers."""

    model: list[TensorPart] = field(default_factory=list[TensorPart])
    optimizers: list[list[TensorPart]] = field(default_factory=list[list[TensorPart]])
    """Of each optimizer, by `<parameter>.<key>`."""
    beside: list[TensorPart] = field(default_factory=list[TensorPart])
    """Of other tensors, by their names in a checkpoint."""
    descriptions: list[Any] = field(default_factory=list[Any])
    """Of each optimizer; see `describe_optimizer`."""


def place_of(tensor: torch.Tensor) -> tuple[list[int], list[int]]:
    """Shape of a whole tensor, and where this rank's part begins in it."""
    if not isinstance(tensor, DTensor):
        return list(tensor.shape), [0] * tensor.dim()
    (chunk,) = tensor.__create_chunk_list__()  # pyright: ignore[reportUnknownMemberType]
    return list(tensor.shape), list(chunk.offsets)


class PartsPlanner(DefaultSavePlanner):
    """Plans a save of parts; of a part that several ranks give, one is written."""

    def __init__(self, parts: Iterable[TensorPart]) -> None:
        """Take the parts of this rank; empty ones of larger tensors are left out."""
        super().__init__(flatten_state_dict=False)
        kept = [part for part in parts if part.values.numel() or 0 in part.size]
        self._parts = {(part.name, part.offset): part for part in kept}

    def create_local_plan(self) -> SavePlan:
        """See `SavePlanner`."""
        return SavePlan([_item(part) for part in self._parts.values()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """See `SavePlanner`; torch does not look for holes where a single process saves."""
        plans, metadata = super().create_global_plan(all_plans)
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            if sum(math.prod(chunk.sizes) for chunk in entry.chunks) != math.prod(entry.size):
                raise ValueError(f"nobody has all of {name}")
        return plans, metadata

    def lookup_object(self, index: MetadataIndex) -> Any:
        """See `DefaultSavePlanner`."""
        assert index.offset is not None
        return self._parts[index.fqn, tuple(index.offset)].values


def _item(part: TensorPart) -> WriteItem:
    offsets, sizes = torch.Size(part.offset), part.values.shape
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes),
        properties=TensorProperties.create_from_tensor(part.values),
        size=torch.Size(part.size),
    )
    return WriteItem(index=MetadataIndex(part.name, offsets), type=WriteItemType.SHARD, tensor_data=data)
