"""The Accelerate adapter: translate and delegate. Begin with `plugin.py`."""

from hyperpod_plugins.accelerate.accelerator import HyperPodAccelerator
from hyperpod_plugins.accelerate.plugin import HyperPodPlugin
from hyperpod_plugins.accelerate.settings import AccelerateSettings

__all__ = ["AccelerateSettings", "HyperPodAccelerator", "HyperPodPlugin"]
