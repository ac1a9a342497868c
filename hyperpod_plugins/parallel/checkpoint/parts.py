"""Save checkpoints from parts of tensors: a rank may also write the parts that it keeps for another rank.

`torch.distributed.checkpoint` plans a save from the tensors that a rank has. Here the plan is made from parts whose
offset in the global tensor is known; the files are the same.
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
"""Prefix of the names of averaged weights where they are stored together with the model's own."""
CURRENT = "current."
"""Prefix of the names of the model's own weights in a checkpoint whose `model.` entries are the average."""
NUM_AVERAGED = "num_averaged"
"""Name of a checkpoint's entry for the number of updates of the average."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorPart:
    """A part of a global tensor."""

    name: str
    size: tuple[int, ...]
    """Global shape."""
    offset: tuple[int, ...]
    """Where the part begins in the global tensor."""
    values: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StateParts:
    """Parts of the tensors of a model and its optimizers."""

    model: list[TensorPart] = field(default_factory=list[TensorPart])
    optimizers: list[list[TensorPart]] = field(default_factory=list[list[TensorPart]])
    """Parts of each optimizer's state, named `<parameter>.<key>`."""
    extra_parts: list[TensorPart] = field(default_factory=list[TensorPart])
    """Parts of other tensors, named as in the checkpoint."""
    descriptions: list[Any] = field(default_factory=list[Any])
    """Description of each optimizer; see `describe_optimizer`."""


def shape_and_offset_of(tensor: torch.Tensor) -> tuple[list[int], list[int]]:
    """Return the global shape of a tensor, and the offset of this rank's part in it."""
    if not isinstance(tensor, DTensor):
        return list(tensor.shape), [0] * tensor.dim()
    (chunk,) = tensor.__create_chunk_list__()  # pyright: ignore[reportUnknownMemberType]
    return list(tensor.shape), list(chunk.offsets)


class PartsPlanner(DefaultSavePlanner):
    """Plans a save of tensor parts; a part that several ranks hold is written once."""

    def __init__(self, parts: Iterable[TensorPart]) -> None:
        """Take the parts of this rank; empty parts of non-empty tensors are left out."""
        super().__init__(flatten_state_dict=False)
        kept = [part for part in parts if part.values.numel() or 0 in part.size]
        self._parts = {(part.name, part.offset): part for part in kept}

    def create_local_plan(self) -> SavePlan:
        """See `SavePlanner`."""
        return SavePlan([_item(part) for part in self._parts.values()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """See `SavePlanner`. Also checks that no part is missing, which torch omits if a single process saves.

        Raises:
            ValueError: the ranks together do not hold all of a tensor.
        """
        plans, metadata = super().create_global_plan(all_plans)
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            if sum(math.prod(chunk.sizes) for chunk in entry.chunks) != math.prod(entry.size):
                raise ValueError(f"the ranks together do not hold all of {name}")
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
