"""Train large models on clusters that fail and change size, with Lightning and Accelerate.

A map for readers, in the order in which a training step meets the packages:

* `hyperpod_plugins.errors`, `hyperpod_plugins.env`: the vocabulary. What can go wrong; who this process is.
* `hyperpod_plugins.events`: what happened, as events.
* `hyperpod_plugins.comm`: the c10d backend `hyperpod`, a process group whose transport can be replaced under it.
* `hyperpod_plugins.data`: memory-mapped tokens, a pure sample order, a sampler that counts in samples.
* `hyperpod_plugins.delayed_init`: delayed initialisation.
* `hyperpod_plugins.parallel`: `apply.py` is the story file: how a plain model becomes a sharded, tensor-parallel one.
* `hyperpod_plugins.elastic`: who is a member of the job: `hyperpodrun`, its agent, the job store, the rendezvous.
* `hyperpod_plugins.recovery`: `step.py` is the story file: the life of a step and of a fault.
* `hyperpod_plugins.lightning`: `Trainer(strategy="hyperpod")`.
* `hyperpod_plugins.accelerate`: `HyperPodPlugin`, whose Accelerator trains the same way.
* `hyperpod_plugins.presets`: configuration files for `accelerate launch`.
* `hyperpod_plugins.smp`: scripts for SMP v2, by `import torch.sagemaker`.
* `hyperpod_plugins.session`: loops written by hand, in plain torch or around an Accelerator.
* `hyperpod_plugins.cli`: the command `hyperpod`.

Importing this package registers the Lightning strategy and the c10d backend where the entry point
`torch.backends` has been switched off (`TORCH_DEVICE_BACKEND_AUTOLOAD=0`).
"""

__version__ = "0.1.0"

from hyperpod_plugins import _autoload

_autoload.autoload()
