"""The Trainer of transformers, on a job that survives the loss of any process. Start with `trainer.py`."""

from hyperpod_plugins.transformers.job import configure
from hyperpod_plugins.transformers.trainer import HyperPodTrainer, HyperPodTrainerMixin

__all__ = [
    "HyperPodTrainer",
    "HyperPodTrainerMixin",
    "configure",
]
