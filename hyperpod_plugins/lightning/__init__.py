"""The Lightning adapter: translate and delegate."""

from hyperpod_plugins.lightning.datamodule import TokenDataConfig, TokenDataModule
from hyperpod_plugins.lightning.strategy import HyperPodStrategy

__all__ = ["HyperPodStrategy", "TokenDataConfig", "TokenDataModule"]
