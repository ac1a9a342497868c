"""PyTorch Lightning integration: the strategy, callbacks and data module for a `Trainer`."""

from hyperpod_plugins.lightning.datamodule import TokenDataConfig, TokenDataModule, TrainerLoader
from hyperpod_plugins.lightning.elastic_training import ElasticTraining
from hyperpod_plugins.lightning.fault_injection import FaultInjection
from hyperpod_plugins.lightning.goodput import GoodputMonitor
from hyperpod_plugins.lightning.precision import Float8Precision
from hyperpod_plugins.lightning.recovery import CheckpointlessRecovery
from hyperpod_plugins.lightning.strategy import HyperPodStrategy

__all__ = [
    "CheckpointlessRecovery",
    "ElasticTraining",
    "FaultInjection",
    "Float8Precision",
    "GoodputMonitor",
    "HyperPodStrategy",
    "TokenDataConfig",
    "TokenDataModule",
    "TrainerLoader",
]
