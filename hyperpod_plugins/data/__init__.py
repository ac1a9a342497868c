"""Training data: token files, sample order, resumable samplers and loaders, and a batch cache in shared memory."""

from hyperpod_plugins.data.batch_cache import MISSING, BatchCache, BatchCacheConfig, cached
from hyperpod_plugins.data.batch_split import BatchSplit, Cursor, MicroStep, rank_positions, sample_weight
from hyperpod_plugins.data.loader import LoaderOptions, StatefulLoader
from hyperpod_plugins.data.sampler import ElasticSampler, sample_order
from hyperpod_plugins.data.token_file import TokenDataset, TokenHeader
from hyperpod_plugins.data.token_writer import build_tokens, write_tokens

__all__ = [
    "BatchCache",
    "BatchCacheConfig",
    "BatchSplit",
    "Cursor",
    "ElasticSampler",
    "LoaderOptions",
    "MISSING",
    "MicroStep",
    "StatefulLoader",
    "TokenDataset",
    "TokenHeader",
    "build_tokens",
    "cached",
    "rank_positions",
    "sample_order",
    "sample_weight",
    "write_tokens",
]
