"""`Trainer(strategy="hyperpod")`: translate Lightning's calls, delegate to `parallel` and `comm`."""

# A strategy works with parts of Lightning that have no public spelling.
# pyright: reportPrivateUsage=false

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from hyperpod_plugins.comm import CommOptions, register
from hyperpod_plugins.env import WorkerEnv, config_path
from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.lightning.flavour import (
    ModelParallelStrategy,
    ParallelStrategy,
    Precision,
    SLURMEnvironment,
    TorchElasticEnvironment,
    Trainer,
    TrainerFn,
    init_dist_connection,
    optimizers_to_device,
    reset_seed,
)
from hyperpod_plugins.lightning.module import (
    forbid_inference_mode,
    refuse_another_layout,
    refuse_weight_averaging,
    synchronise_metrics_over,
    treat_steps_as_forward,
)
from hyperpod_plugins.lightning.precision import HyperPodPrecision
from hyperpod_plugins.memory import delayed_init, materialize
from hyperpod_plugins.memory.allocator import AllocatorWatch
from hyperpod_plugins.parallel import (
    CheckpointWriter,
    ParallelConfig,
    Topology,
    build_data_group,
    build_mesh,
    load_checkpoint,
    loss_parallel_context,
    parallelize,
)
from hyperpod_plugins.parallel.checkpoint_state import model_tensors


class HyperPodStrategy(ModelParallelStrategy):
    """Hybrid sharding (HSDP on FSDP2) and tensor parallelism for any LightningModule.

    The module needs no change: the strategy parallelises it after `configure_model`. A module that shards itself
    in `configure_model` (with `self.device_mesh`, whose axes are `replicate`, `shard` and `tensor`) is left as it is.

    Args:
        config: a `ParallelConfig`, a dict, or the path of an SMP v2 JSON file. Default: the file named by
            `HYPERPOD_CONFIG`, else hybrid sharding over all ranks.
        comm: collective library to use, and whether a fallback is allowed.
        background_checkpoints: write checkpoints while training goes on.
        trust_checkpoints: unpickle Python objects of a checkpoint (hyper-parameters of your own classes), which runs
            code. By default only tensors, plain containers, numbers and strings are read.
        timeout_s: seconds after which a collective that does not complete fails.
        **options: fields of `ParallelConfig`; they win over `config`.

    Raises:
        ConfigError: unknown options, impossible values or combinations.
    """

    def __init__(
        self,
        config: ParallelConfig | Mapping[str, Any] | str | Path | None = None,
        *,
        comm: CommOptions | None = None,
        background_checkpoints: bool = False,
        trust_checkpoints: bool = False,
        timeout_s: float = 1800.0,
        **options: Any,
    ) -> None:
        self._env = WorkerEnv.from_environ()
        self._num_nodes = 1
        super().__init__(timeout=timedelta(seconds=timeout_s), process_group_backend="hyperpod")
        self.config = ParallelConfig.of(config_path() if config is None else config, **options)
        self._precision_was_chosen = "precision" in options or self.config.precision != ParallelConfig().precision
        self._comm = comm or CommOptions()
        self._background_checkpoints = background_checkpoints
        self._trust_checkpoints = trust_checkpoints
        self._writer: CheckpointWriter | None = None
        self._topology: Topology | None = None
        self._data_group: dist.ProcessGroup | None = None
        self._allocator_watch: AllocatorWatch | None = None

    # -- who and where ------------------------------------------------------------------------------------------

    @property
    def topology(self) -> Topology:
        """Degrees and rank arithmetic of this job; known once the environment is set up."""
        if self._topology is None:
            raise ConfigError("the topology is known only after the Trainer has set up the processes")
        return self._topology

    @property
    def num_nodes(self) -> int:
        """Nodes of the job: what the launcher says, else `Trainer(num_nodes=...)`."""
        return self._env.num_nodes if self._env.is_launched and self._is_launched_outside else self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    @override
    def parallel_devices(self) -> list[torch.device] | None:
        """One device for each rank of this node."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, parallel_devices: list[torch.device] | None) -> None:
        # Under a launcher Lightning counts one CPU "device" whatever the number of processes.
        if parallel_devices and parallel_devices[0].type == "cpu" and self._is_launched_outside:
            parallel_devices = [torch.device("cpu")] * self._env.local_world_size
        self._parallel_devices = parallel_devices

    @property
    def _is_launched_outside(self) -> bool:
        """Whether a launcher that `WorkerEnv` reads made the processes, not Lightning by `Trainer(...)`."""
        return isinstance(self.cluster_environment, TorchElasticEnvironment | SLURMEnvironment)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Number of ranks that read different samples, and this rank's index among them."""
        return {"num_replicas": self.topology.data_degree, "rank": self.topology.data_rank(self.global_rank)}

    # -- precision ----------------------------------------------------------------------------------------------

    @property
    @override
    def precision_plugin(self) -> Precision:
        """Lightning's plugin, replaced by its counterpart that can clip on mixed meshes."""
        return self._precision_plugin if self._precision_plugin is not None else Precision()

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        if precision_plugin is not None and not isinstance(precision_plugin, HyperPodPrecision):
            asked = HyperPodPrecision.replacing(precision_plugin, self._device_type)
            if self._precision_was_chosen and asked.precision != "32-true" and asked.precision != self.config.precision:
                raise ConfigError(
                    f"Trainer(precision={asked.precision!r}) contradicts the strategy's precision="
                    f"{self.config.precision!r}: give one of them, or the same in both."
                )
            if not self._precision_was_chosen:
                self.config = ParallelConfig.of(self.config, precision=asked.precision)
            precision_plugin = HyperPodPrecision(self.config.precision, self._device_type)
        self._precision_plugin = precision_plugin

    @property
    def _device_type(self) -> str:
        return self.accelerator.name().replace("gpu", "cuda") if self.accelerator is not None else "cpu"

    # -- setting up ---------------------------------------------------------------------------------------------

    @override
    def setup_environment(self) -> None:
        """Join the process group and make the mesh."""
        ParallelStrategy.setup_environment(self)
        reset_seed()
        self.set_world_ranks()
        assert self.cluster_environment is not None
        register()  # in case `import hyperpod_plugins` came before torch, with the entry point switched off
        init_dist_connection(self.cluster_environment, "hyperpod", timeout=self._timeout, pg_options=self._comm)
        self._topology = self.config.topology(self.world_size, ranks_per_node=self.num_processes)
        self._device_mesh = build_mesh(self._topology, self.root_device.type)
        self._data_group = build_data_group(self._topology)
        assert self.lightning_module is not None
        refuse_another_layout(self.lightning_module, self._device_mesh)
        refuse_weight_averaging(self.lightning_module.trainer)
        self.lightning_module._device_mesh = self._device_mesh

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Context of `Trainer.init_module`: with `empty_init=True` a model takes no memory until it is sharded."""
        with delayed_init() if empty_init else nullcontext():
            yield

    @override
    def setup(self, trainer: Trainer) -> None:
        """Parallelise the module, then make the optimizers over its sharded parameters."""
        module = self.lightning_module
        assert module is not None
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        if any(isinstance(part, FSDPModule) for part in module.modules()):
            materialize(module, device=self.root_device, seed=self.config.random_seed)
        else:
            parallelize(module, self.device_mesh, self.config)
            treat_steps_as_forward(module)
        if self.config.fsdp_cache_flush_warnings:
            self._allocator_watch = AllocatorWatch(self.root_device)
        self.model = module
        self.model_to_device()
        assert self._data_group is not None
        synchronise_metrics_over(module, self._data_group)
        forbid_inference_mode(trainer)
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            optimizers_to_device(self.optimizers, self.root_device)

    # -- a step -------------------------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's step; the loss may be computed from logits that are split over the vocabulary."""
        with loss_parallel_context(self.config):
            return super().training_step(*args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's step; see `training_step`."""
        with self._evaluation():
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's step; see `training_step`."""
        with self._evaluation():
            return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's step; see `training_step`."""
        with self._evaluation():
            return super().predict_step(*args, **kwargs)

    @contextmanager
    def _evaluation(self) -> Generator[None, None, None]:
        """Make the root's parameters shards again after a step without backward, which FSDP2 leaves to backward.

        Callbacks that swap or average weights must find the parameters that the optimizer holds.
        """
        with loss_parallel_context(self.config):
            yield
        for part in self._sharded_modules():
            part.reshard()

    @override
    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run backward in the context the loss was computed in."""
        with loss_parallel_context(self.config):
            return super().backward(closure_loss, *args, **kwargs)

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the closure and the optimizer, then look at the allocator."""
        result = super().optimizer_step(*args, **kwargs)
        if self._allocator_watch is not None:
            self._allocator_watch.after_step()
        return result

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Leave out the all-reduce between replicas: an accumulation window needs it once, in its last micro-step.

        The reduce-scatter inside a replica stays, so that gradients never take more than a shard's memory.
        """
        for part in self._sharded_modules():
            part.set_requires_all_reduce(False, recurse=False)
        try:
            yield
        finally:
            for part in self._sharded_modules():
                part.set_requires_all_reduce(True, recurse=False)

    def _sharded_modules(self) -> Iterator[FSDPModule]:
        assert self.model is not None
        return (part for part in self.model.modules() if isinstance(part, FSDPModule))

    # -- collectives --------------------------------------------------------------------------------------------

    @override
    def reduce(self, tensor: Tensor | Any, group: Any | None = None, reduce_op: Any | None = "mean") -> Any:
        """Reduce over the ranks that read different samples (tensor peers hold the same value), or over `group`.

        A mean is a sum and a division: not every collective library can average.
        """
        if not isinstance(tensor, Tensor) or not dist.is_initialized():
            return tensor
        is_mean = reduce_op in (None, "mean", "avg") or reduce_op == dist.ReduceOp.AVG
        operation: Any = "sum" if is_mean else reduce_op
        if isinstance(operation, str):
            operation = getattr(dist.ReduceOp, operation.upper())
        members = self._data_group if group is None else group
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor  # a loss from split logits
        result = whole.detach().clone()
        if is_mean and not result.is_floating_point():
            result = result.float()
        dist.all_reduce(result, op=operation, group=members)
        return result / dist.get_world_size(members) if is_mean else result

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks (or any rank) decided so."""
        votes = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(votes, op=dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(votes)

    # -- checkpoints --------------------------------------------------------------------------------------------

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """This rank's parts of the module's tensors, not copied; hooks may leave some out or replace them."""
        assert self.lightning_module is not None
        return dict(model_tensors(self.lightning_module))

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Nothing: `save_checkpoint` writes the optimizers itself, shard by shard."""
        return {}

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write a sharded checkpoint, a folder named `filepath`, on all ranks together."""
        if storage_options is not None:
            raise ConfigError(
                f"HyperPodStrategy writes checkpoints to a file system and takes no storage_options, but got "
                f"{storage_options!r}. Drop them, and give a path that is mounted on every node."
            )
        assert self.lightning_module is not None
        if self._writer is None:
            self._writer = CheckpointWriter()
        state = checkpoint.pop("state_dict")
        optimizers = self.optimizers if checkpoint.pop("optimizer_states", None) is not None else []
        self._writer.save(
            self.broadcast(filepath),
            model=self.lightning_module,
            optimizers=optimizers,
            extra=checkpoint,
            model_state=state,
            background=self._background_checkpoints,
        )

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a sharded checkpoint of any degrees, or a checkpoint file that another strategy wrote.

        Raises:
            CheckpointDamaged: no checkpoint, or an interrupted one.
            CheckpointMismatch: a checkpoint of another model or other optimizers.
        """
        assert self.lightning_module is not None
        path = Path(self.broadcast(checkpoint_path))
        if path.is_file():
            return super().load_checkpoint(path, weights_only=weights_only)
        if self._writer is not None:
            self._writer.wait()
        extra = load_checkpoint(
            path,
            model=self.lightning_module,
            optimizers=self.optimizers,
            weights_only=not self._trust_checkpoints and weights_only is not False,
            strict=self.lightning_module.strict_loading,
        )
        return {**extra, "state_dict": {}, "optimizer_states": [{} for _ in self.optimizers]}

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, once the one that is being written in its place is complete."""
        remove = partial(super().remove_checkpoint, filepath)
        if self._writer is None:
            remove()
        else:
            self._writer.when_written(remove)

    @override
    def teardown(self) -> None:
        """Wait for a checkpoint that is still being written."""
        writer, self._writer = self._writer, None
        try:
            if writer is not None:
                writer.close()
        finally:
            super().teardown()
