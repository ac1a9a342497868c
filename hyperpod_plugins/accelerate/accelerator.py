"""`HyperPodAccelerator`: Accelerate's own class, with models sharded by `parallelize`."""

# The steps of Accelerate's `prepare` are private and not meant to be overridden; see docs/design/accelerate.md.
# pyright: reportPrivateUsage=false, reportIncompatibleMethodOverride=false

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from hyperpod_plugins.accelerate.collectives import are_tensors, gathered, gathered_objects, reduced, without_padding
from hyperpod_plugins.accelerate.compat import (
    Accelerator,
    FP8BackendType,
    SeedableRandomSampler,
    get_mixed_precision_context_manager,
    get_sampler,
)
from hyperpod_plugins.accelerate.prepare import (
    FiniteStepCheck,
    HyperPodOptimizer,
    HyperPodScheduler,
    LoopTime,
    shard_with_optimizers,
    wrap_forward,
)
from hyperpod_plugins.accelerate.process_state import (
    ResizableJob,
    join,
    set_process_state,
    update_process_state,
    use_cpu,
    uses_cpu,
)
from hyperpod_plugins.accelerate.spec import AcceleratorSpec, HyperPodParallelism, LoaderMesh
from hyperpod_plugins.delayed_init.api import delay_transformers
from hyperpod_plugins.errors import ConfigError, format_list
from hyperpod_plugins.parallel import (
    ParallelConfig,
    Topology,
    build_data_group,
    clip_grad_norm_,
    clip_grad_value_,
    loss_parallel_context,
    parallelize,
)
from hyperpod_plugins.parallel.finite import FiniteCheck
from hyperpod_plugins.parallel.former_parameters import replace_stale_parameters
from hyperpod_plugins.parallel.hsdp import without_replica_sync
from hyperpod_plugins.parallel.local_optimizer import check_no_required_closure
from hyperpod_plugins.recovery.optimizer_copy import parameters_of

_OF_THE_PLUGIN = ("fsdp_plugin", "parallelism_config", "torch_tp_plugin")
_OF_OTHERS = ("deepspeed_plugin", "deepspeed_plugins", "megatron_lm_plugin", "dynamo_plugin", "dynamo_backend")


class HyperPodAccelerator(Accelerator):
    """An `Accelerator` on the backend `hyperpod`; `HyperPodPlugin.accelerator` creates it.

    `prepare` returns the same model, whose parameters are now DTensors over `mesh`, and wraps torch optimizers of
    these parameters.

    Args:
        plugin: configuration of the job.
        session: see `HyperPodPlugin.accelerator`.
        **options: arguments of `accelerate.Accelerator`, except those that the plugin creates.

    Raises:
        ConfigError: see `HyperPodPlugin.accelerator`.
    """

    def __init__(self, plugin: AcceleratorSpec, session: ResizableJob | None = None, **options: Any) -> None:
        self.plugin = plugin
        self._config = plugin.config
        if session is not None:  # all processes may have restarted with other degrees
            degrees = session.topology
            self._config = ParallelConfig.of(
                plugin.config,
                hybrid_shard_degree=degrees.shard_degree,
                tensor_parallel_degree=degrees.tensor_degree,
                context_parallel_degree=degrees.context_degree,
                expert_parallel_degree=degrees.expert_degree,
            )
        self._data_group: dist.ProcessGroup | None = None
        self._has_begun = False
        self._time = LoopTime()
        self._reach: Callable[[str], object] = lambda phase: None
        if self._config.delayed_init:
            delay_transformers()
        if session is not None and plugin.non_finite != "auto":
            raise ConfigError(
                f"non_finite={plugin.non_finite!r} cannot be given to HyperPodPlugin where a Session steps the "
                f"optimizers. Use session.train(..., non_finite={plugin.non_finite!r})."
            )
        handlers = _with_ours(plugin, _checked(options))
        join(plugin.comm, plugin.timeout_s)
        set_process_state()
        self._parallelism = HyperPodParallelism.from_topology(plugin.topology if session is None else session.topology)
        super().__init__(
            mixed_precision=plugin.mixed_precision,
            cpu=uses_cpu(),
            fsdp_plugin=plugin.fsdp_plugin,
            parallelism_config=self._parallelism,
            kwargs_handlers=handlers,
            **options,
        )
        if session is not None:
            self._refuse_with_session()
        if self.topology.shares_samples:
            if self.dataloader_config.dispatch_batches:
                raise ConfigError(
                    "dispatch_batches=True gives every rank the same samples where there is tensor or context "
                    "parallelism. Leave it out: each rank then reads its own."
                )
            self.dataloader_config = replace(self.dataloader_config, dispatch_batches=False)
        self._data_group = build_data_group(self.topology)
        is_free = self.device.type == "cpu"  # elsewhere the host would wait for the norm of the gradients
        finite = FiniteCheck(plugin.non_finite if session is None else "off", waits_anyway=is_free)
        self._check = FiniteStepCheck(finite, lambda: parameters_of(self._optimizers).values())
        if session is None and self.log_with:
            topology = self.topology
            self._time.begin(rank=self.process_index, world_size=self.num_processes, replicas=topology.replicate_degree)
        if session is not None:
            self._reach = session.reach
            session.when_moved(lambda: self._moved(session.topology))
            session.when_body_begins(lambda: self._body_begins(session))

    def _refuse_with_session(self) -> None:
        """Refuse options that a session excludes.

        Raises:
            ConfigError: such an option was given.
        """
        if self.project_configuration.automatic_checkpoint_naming:
            raise ConfigError(
                "automatic_checkpoint_naming counts checkpoints in each process, and a process that replaces a lost "
                "one counts from 0. With a session, name them yourself: accelerator.save_state(f'step-{step.index}')."
            )
        if self.gradient_accumulation_steps > 1:
            raise ConfigError(
                f"gradient_accumulation_steps={self.gradient_accumulation_steps} would divide each loss once more: a "
                "session accumulates gradients itself. Leave it out: the session's global_batch_size and the loader's "
                "batch_size say how often."
            )

    def _body_begins(self, session: ResizableJob) -> None:
        """Forget loaders whose reading was interrupted: until they are read again, Accelerate takes them for active.

        Raises:
            ConfigError: a loader that was prepared before the loop draws its order in a way that a replacement cannot
                repeat; Accelerate saves an object, or has prepared a model, that a replacement would not get.
        """
        self.gradient_state.dataloader_references = [None]
        if self._has_begun:
            return
        self._has_begun = True
        if not session.has_recovery:
            return
        saved = [type(each).__name__ for each in self._custom_objects if not session.restores(each)]
        if saved:
            raise ConfigError(
                f"{format_list(saved)} was given to accelerator.register_for_checkpointing, but not to the session: a "
                'replacement would begin with a new one. Call session.register_rank_local("name", object), too.'
            )
        beside = [type(each).__name__ for each in self._models if not session.restores(each)]
        if beside:
            raise ConfigError(
                f"{format_list(beside)} was prepared by the Accelerator, but is not part of the model given to "
                "session.train. With recovery, only that model is reset after a fault and sent to a replacement. Put "
                "both into one module (nn.ModuleDict) and give that to train, or leave the other one unprepared."
            )
        if any(map(_counts_its_orders, self._dataloaders)):
            raise ConfigError(
                "a loader with shuffle=True was prepared before the loop: its order depends on how often it was read, "
                "which a replacement does not know. The loader of the training belongs to session.steps alone; prepare "
                "another one in the body of the step that reads it, or leave shuffle out."
            )

    def _moved(self, topology: Topology) -> None:
        """Follow the job to another number of replicas; models, optimizers and groups stay the same objects."""
        update_process_state()
        self._parallelism.move(topology, self.device.type)
        self._data_group = build_data_group(topology)

    # -- topology and groups ------------------------------------------------------------------------------------

    @property
    def topology(self) -> Topology:
        """Degrees and rank arithmetic of this job."""
        return self._parallelism.topology

    @property
    def mesh(self) -> DeviceMesh:
        """Mesh `("replicate", "shard", "tensor")`; `torch_device_mesh` names the same groups as Accelerate does."""
        assert self._parallelism.mesh is not None
        return self._parallelism.mesh

    @property
    def data_group(self) -> dist.ProcessGroup:
        """Group of this rank and those that read other samples; tensor and context peers read the same samples."""
        assert self._data_group is not None
        return self._data_group

    @property
    @override
    def fp8_backend(self) -> FP8BackendType:
        """What Accelerate itself converts: nothing, as `use_float8` does it, whatever its variables say."""
        return FP8BackendType.NO

    # -- prepare ------------------------------------------------------------------------------------------------

    @override
    def _prepare_tp(self, *args: Any) -> Any:
        """Do nothing: `parallelize` applies tensor parallelism."""
        return args

    @override
    def _prepare_fsdp2(self, *args: Any) -> Any:
        """Shard the model, give its optimizers the sharded parameters, and prepare the rest as usual."""
        model = next((each for each in args if isinstance(each, nn.Module)), None)
        if model is None:
            return super()._prepare_fsdp2(*args)
        optimizers = [each for each in args if isinstance(each, Optimizer)]
        is_alike = self._config.delayed_values != "rank_0"
        shard_with_optimizers(model, optimizers, self._parallelize, is_delayed_alike=is_alike)
        self._wrap_forward(model)
        if model not in self._models:
            self._models.append(model)
        ready = [each if each is model else self._prepare_one(each, first_pass=True) for each in args]
        return tuple(each if each is model else self._prepare_one(each) for each in ready)

    def _parallelize(self, model: nn.Module) -> None:
        parallelize(model, self.mesh, self._config)

    def _wrap_forward(self, model: nn.Module) -> None:
        if self.native_amp or self._config.loss_parallel or self._time.is_active:
            wrap_forward(model, partial(self._forward_context, model), returns_float32=self.native_amp)

    @contextmanager
    def _forward_context(self, model: nn.Module) -> Generator[None]:
        self._time.note_forward(model)
        autocast = get_mixed_precision_context_manager(self.native_amp, cast("Any", self.autocast_handler))
        with loss_parallel_context(self._config), autocast:
            yield

    @override
    def _prepare_device_mesh(self) -> DeviceMesh | None:
        """Return the mesh by which data loaders divide samples; None if every rank reads its own.

        Accelerate takes any axis `tp`, even one of size 1, as a sign that ranks read the same samples.
        """
        if self.topology.context_degree > 1:
            return cast("DeviceMesh", LoaderMesh.of(self.topology))
        return super()._prepare_device_mesh() if self.topology.tensor_degree > 1 else None

    @override
    @contextmanager
    def maybe_context_parallel(self, *args: Any, **kwargs: Any) -> Generator[None]:
        """Do nothing: with `context_parallel_degree` above 1, the model itself splits its sequences."""
        yield

    @override
    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> HyperPodOptimizer:
        """Wrap an optimizer so that its arithmetic runs on local shards.

        Raises:
            ConfigError: it computes gradients itself, has state of parameters that were not sharded, or holds others
                than those of the prepared model.
        """
        if isinstance(optimizer, HyperPodOptimizer):
            return optimizer
        check_no_required_closure([optimizer])
        for model in self._models if len(self._models) == 1 else ():  # others may hold the rest of its parameters
            replace_stale_parameters([optimizer], model, num_ranks=self.num_processes)
        placed = self.device_placement if device_placement is None else device_placement
        prepared = HyperPodOptimizer(
            optimizer, check=self._check, time=self._time, device_placement=placed, scaler=self.scaler
        )
        self._optimizers.append(prepared)
        return prepared

    @override
    def prepare_scheduler(self, scheduler: LRScheduler) -> HyperPodScheduler:
        """Wrap a scheduler so that it advances by one for each rank that reads its own samples."""
        if isinstance(scheduler, HyperPodScheduler):
            return scheduler
        own = [each for each in self._optimizers if each.optimizer is scheduler.optimizer]
        prepared = HyperPodScheduler(
            scheduler,
            own or self._optimizers,
            step_with_optimizer=self.step_scheduler_with_optimizer,
            split_batches=self.split_batches,
            data_group=self.data_group,
        )
        self._schedulers.append(prepared)
        return prepared

    @override
    def end_training(self) -> None:
        """End the trackers, and the booking of time for `goodput_metrics`."""
        super().end_training()
        self._time.end()

    @override
    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Save as Accelerate does; a rehearsed job may lose a rank as it begins."""
        self._reach("save_state")
        return super().save_state(output_dir, *args, **kwargs)

    # -- a step -------------------------------------------------------------------------------------------------

    @override
    @contextmanager
    def no_sync(self, model: nn.Module) -> Generator[None]:
        """Skip the all-reduce between replicas; gradients stay sharded, whereas Accelerate would keep them whole."""
        with without_replica_sync(model):
            yield

    @override
    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Divide the loss by the accumulation steps and run backward, in the context in which it was computed."""
        self._check.note_loss(loss)
        self._time.note_backward()
        with loss_parallel_context(self._config):
            super().backward(loss, **kwargs)

    @override
    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor:
        """Scale gradients so that their norm over all ranks and meshes is at most `max_norm`; return the old norm."""
        norm = clip_grad_norm_(parameters, max_norm, norm_type)
        self._check.note_norm(norm)
        return norm

    @override
    def clip_grad_value_(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        """Clamp every element of every gradient, which Accelerate refuses for sharded gradients."""
        clip_grad_value_(parameters, clip_value)

    # -- collectives: tensor and context peers hold the same values and count once --------------------------------

    @override
    def gather(self, tensor: Any) -> Any:
        """Concatenate the tensors of all ranks that read different samples, along the first dimension."""
        return gathered(tensor, self.data_group)

    @override
    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Like `gather`, without the samples that only pad the last batch."""
        if not self.topology.shares_samples:
            return super().gather_for_metrics(input_data, use_gather_object)
        gather = gathered if are_tensors(input_data) and not use_gather_object else gathered_objects
        return without_padding(gather(input_data, self.data_group), self.gradient_state)

    @override
    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Sum, average or take the maximum over the ranks that read different samples."""
        return reduced(tensor, self.data_group, reduction)


def _counts_its_orders(loader: Any) -> bool:
    """Whether the order of a prepared loader depends on how often it was read before, in this process."""
    if getattr(loader, "synchronized_generator", None) is not None:
        return True
    sampler = get_sampler(loader)
    return isinstance(sampler, SeedableRandomSampler) or getattr(sampler, "generator", None) is not None


def _checked(options: dict[str, Any]) -> list[Any]:
    """Check the arguments of an Accelerator; remove and return the user's handlers.

    Raises:
        ConfigError: an argument is one that the plugin creates itself, or belongs to another engine.
    """
    if str(options.get("dynamo_backend", "")).rpartition(".")[2].lower() == "no":
        del options["dynamo_backend"]
    for name in (*_OF_THE_PLUGIN, *_OF_OTHERS):
        if options.get(name) is not None:
            what = "the plugin makes it" if name in _OF_THE_PLUGIN else "this plugin trains with FSDP2 and eager torch"
            raise ConfigError(f"accelerator({name}=...) cannot be given: {what}. Use an argument of HyperPodPlugin.")
    if options.pop("cpu", None):
        use_cpu()
    return list(options.pop("kwargs_handlers", None) or [])


def _with_ours(plugin: AcceleratorSpec, given: list[Any]) -> list[Any]:
    ours = plugin.kwargs_handlers
    twice = [type(each).__name__ for each in given if type(each) in map(type, ours)]
    if twice:
        raise ConfigError(
            f"kwargs_handlers has {', '.join(twice)}, which the plugin makes itself: give timeout_s or comm to "
            "HyperPodPlugin instead."
        )
    return [*ours, *given]
