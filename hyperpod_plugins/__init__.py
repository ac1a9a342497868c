"""Train large models on clusters that fail and change size, with Lightning and Accelerate.

Contents, roughly from the bottom up:

* `hyperpod_plugins.errors`: the exceptions that this package raises.
* `hyperpod_plugins.env`: environment variables that describe this process and its job.
* `hyperpod_plugins.events`: events such as repairs, and their listeners.
* `hyperpod_plugins.checkpoint_names`: names under which a checkpoint can lie, also after an interrupted save.
* `hyperpod_plugins.comm`: the c10d backend `hyperpod`, a process group whose transport can be replaced underneath it.
* `hyperpod_plugins.data`: token files, a computed sample order, and a sampler whose position is counted in samples.
* `hyperpod_plugins.delayed_init`: delayed initialisation.
* `hyperpod_plugins.memory`: recomputation, offload and tiles, so that activations take less memory.
* `hyperpod_plugins.precision`: linear layers in float8.
* `hyperpod_plugins.parallel`: turns a plain model into a sharded, tensor-parallel one. Start with `parallelize.py`.
* `hyperpod_plugins.elastic`: membership of the job: `hyperpodrun`, its agent, the job store and the rendezvous.
* `hyperpod_plugins.recovery`: fault-tolerant training steps. Start with `step.py`.
* `hyperpod_plugins.fault_injection`: injects faults, to test that a job recovers.
* `hyperpod_plugins.planning`: memory that a rank needs, counted before a job starts.
* `hyperpod_plugins.lightning`: `Trainer(strategy="hyperpod")`.
* `hyperpod_plugins.accelerate`: `HyperPodPlugin` for Accelerate.
* `hyperpod_plugins.presets`: configuration files for `accelerate launch`.
* `hyperpod_plugins.smp`: runs SMP v2 scripts through `import torch.sagemaker`.
* `hyperpod_plugins.session`: recovery for hand-written training loops, in plain torch or with an Accelerator.
* `hyperpod_plugins.transformers`: `HyperPodTrainer`, the Trainer of transformers on a session.
* `hyperpod_plugins.cli`: the command `hyperpod`.

What most programs need can be imported from here: `from hyperpod_plugins import HyperPodStrategy, Session`. Each name
is imported from its package when it is first used, so a program needs only the libraries that it uses.

Importing this package registers the Lightning strategy and the c10d backends. `import torch` does so by itself
through the entry point `torch.backends`, unless `TORCH_DEVICE_BACKEND_AUTOLOAD=0`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hyperpod_plugins import _autoload

if TYPE_CHECKING:
    from hyperpod_plugins.accelerate import HyperPodAccelerator as HyperPodAccelerator
    from hyperpod_plugins.accelerate import HyperPodPlugin as HyperPodPlugin
    from hyperpod_plugins.data import BatchSplit as BatchSplit
    from hyperpod_plugins.data import StatefulLoader as StatefulLoader
    from hyperpod_plugins.data import TokenDataset as TokenDataset
    from hyperpod_plugins.data import build_tokens as build_tokens
    from hyperpod_plugins.elastic import ElasticPolicy as ElasticPolicy
    from hyperpod_plugins.lightning import CheckpointlessRecovery as CheckpointlessRecovery
    from hyperpod_plugins.lightning import ElasticTraining as ElasticTraining
    from hyperpod_plugins.lightning import FaultInjection as FaultInjection
    from hyperpod_plugins.lightning import Float8Precision as Float8Precision
    from hyperpod_plugins.lightning import HyperPodStrategy as HyperPodStrategy
    from hyperpod_plugins.lightning import TokenDataConfig as TokenDataConfig
    from hyperpod_plugins.lightning import TokenDataModule as TokenDataModule
    from hyperpod_plugins.parallel import CheckpointWriter as CheckpointWriter
    from hyperpod_plugins.parallel import ParallelConfig as ParallelConfig
    from hyperpod_plugins.parallel import build_mesh as build_mesh
    from hyperpod_plugins.parallel import export_safetensors as export_safetensors
    from hyperpod_plugins.parallel import load_checkpoint as load_checkpoint
    from hyperpod_plugins.parallel import parallelize as parallelize
    from hyperpod_plugins.recovery import RecoveryOptions as RecoveryOptions
    from hyperpod_plugins.session import Session as Session

__version__ = "0.1.0"

_EXPORTS = {
    "accelerate": ("HyperPodAccelerator", "HyperPodPlugin"),
    "data": ("BatchSplit", "StatefulLoader", "TokenDataset", "build_tokens"),
    "elastic": ("ElasticPolicy",),
    "lightning": (
        *("CheckpointlessRecovery", "ElasticTraining", "FaultInjection", "Float8Precision", "HyperPodStrategy"),
        *("TokenDataConfig", "TokenDataModule"),
    ),
    "parallel": (
        *("CheckpointWriter", "ParallelConfig", "build_mesh", "export_safetensors", "load_checkpoint", "parallelize"),
    ),
    "recovery": ("RecoveryOptions",),
    "session": ("Session",),
}
_PACKAGE_OF = {name: package for package, names in _EXPORTS.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name from its package (PEP 562)."""
    if name not in _PACKAGE_OF:
        raise AttributeError(f"module 'hyperpod_plugins' has no attribute {name!r}")
    return getattr(import_module(f"hyperpod_plugins.{_PACKAGE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PACKAGE_OF])


_autoload.autoload()
