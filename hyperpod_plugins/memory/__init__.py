"""Memory of activations: recomputation, prefetching host offload, chunked loss, tiled MLPs."""

from hyperpod_plugins.memory.chunked_loss import chunk_loss, chunked_cross_entropy
from hyperpod_plugins.memory.host_pool import HostPool
from hyperpod_plugins.memory.offload import ActivationOffload
from hyperpod_plugins.memory.recompute import recompute_blocks
from hyperpod_plugins.memory.tiled_mlp import tile_mlps

__all__ = [
    "ActivationOffload",
    "HostPool",
    "chunk_loss",
    "chunked_cross_entropy",
    "recompute_blocks",
    "tile_mlps",
]
