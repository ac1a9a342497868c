"""The Lightning adapter: translate and delegate."""

from hyperpod_plugins.lightning.datamodule import TokenDataConfig, TokenDataModule
from hyperpod_plugins.lightning.recovery import CheckpointlessRecovery
from hyperpod_plugins.lightning.strategy import HyperPodStrategy

__all__ = ["CheckpointlessRecovery", "HyperPodStrategy", "TokenDataConfig", "TokenDataModule"]
