"""Hugging Face Accelerate integration: the plugin, and the `Accelerator` that it creates. Start with `plugin.py`."""

from hyperpod_plugins.accelerate.accelerator import HyperPodAccelerator
from hyperpod_plugins.accelerate.launch_config import AccelerateSettings
from hyperpod_plugins.accelerate.plugin import HyperPodPlugin

__all__ = [
    "AccelerateSettings",
    "HyperPodAccelerator",
    "HyperPodPlugin",
]
