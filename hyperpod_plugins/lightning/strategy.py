"""`Trainer(strategy="hyperpod")`: maps Lightning's strategy calls to `parallel`, `comm` and `recovery`."""

# A strategy uses private parts of Lightning.
# pyright: reportPrivateUsage=false

import logging
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader
from typing_extensions import override

from hyperpod_plugins.comm import CommOptions, group_health, register
from hyperpod_plugins.data import StatefulLoader
from hyperpod_plugins.delayed_init import delayed_init, tapes_of
from hyperpod_plugins.elastic.membership.admission import announce
from hyperpod_plugins.env import JobEnv, WorkerEnv, config_path
from hyperpod_plugins.errors import ConfigError, NonFiniteError, PeerLost
from hyperpod_plugins.events import AllocatorWatch
from hyperpod_plugins.lightning.checkpoint_io import TrainerCheckpoints
from hyperpod_plugins.lightning.compat import (
    LightningModule,
    ModelParallelStrategy,
    ParallelStrategy,
    Precision,
    SLURMEnvironment,
    TorchElasticEnvironment,
    Trainer,
    TrainerFn,
    callbacks_of,
    init_dist_connection,
    optimizers_to_device,
    reset_seed,
)
from hyperpod_plugins.lightning.datamodule import refuse_early_ends, sample_weight_of
from hyperpod_plugins.lightning.elastic_training import ElasticState, TrainerAveraging
from hyperpod_plugins.lightning.launcher import STATE_OF_PEERS, RecoveryLauncher
from hyperpod_plugins.lightning.local_state import attributes_of, metrics_of
from hyperpod_plugins.lightning.module_checks import (
    check_same_layout,
    forbid_inference_mode,
    needs_previous_gradients,
    refuse_copying_callbacks,
    refuse_other_layers,
    refuse_validation_by_clock,
    synchronise_metrics_over,
    treat_steps_as_forward,
    warn_of_placement,
)
from hyperpod_plugins.lightning.precision import HyperPodPrecision, reconcile_for
from hyperpod_plugins.lightning.preemption import SigtermConsensus
from hyperpod_plugins.lightning.recovery import NullRecovery, create_recovery
from hyperpod_plugins.lightning.saving_hooks import FOR_PEERS
from hyperpod_plugins.lightning.trainer_entries import ENTRY, entries
from hyperpod_plugins.lightning.trainer_state import LAYOUT, LOCAL, prepare_loader_hooks, rank_local_part, untracked
from hyperpod_plugins.lightning.weight_averaging import CallbackAverage, averaging_callback
from hyperpod_plugins.parallel import (
    ParallelConfig,
    Topology,
    build_data_group,
    build_mesh,
    former_parameters,
    loss_parallel_context,
    parallelize,
)
from hyperpod_plugins.parallel.adopted_model import is_sharded_by_program
from hyperpod_plugins.parallel.checkpoint.rank_state import RankStateSelector
from hyperpod_plugins.parallel.checkpoint.state import StateParts, model_tensors
from hyperpod_plugins.parallel.elementwise import is_elementwise
from hyperpod_plugins.parallel.finite import FiniteCheck, NonFinitePolicy, RankFiniteCheck
from hyperpod_plugins.parallel.host_optimizer import uses_host_memory
from hyperpod_plugins.parallel.hsdp import (
    reduce_root_in_backward,
    reshard,
    root_gathered_for_its_parts,
    shards_stay_on_host,
    without_replica_sync,
)
from hyperpod_plugins.parallel.local_optimizer import check_no_required_closure, single_use_closure, step_locally
from hyperpod_plugins.parallel.parallelize import apply_offload, give_values, match_rank_0
from hyperpod_plugins.parallel.topology import update_group_members
from hyperpod_plugins.parallel.unit_watch import watch_units
from hyperpod_plugins.precision.transformer_engine import float8_region
from hyperpod_plugins.recovery.local_objects import ProgramState
from hyperpod_plugins.recovery.protocols import RESHARD
from hyperpod_plugins.recovery.watchdog import completed_outside_step

log = logging.getLogger(__name__)


class HyperPodStrategy(ModelParallelStrategy):
    """Hybrid sharding (HSDP on FSDP2) and tensor parallelism for any LightningModule.

    The module needs no change: the strategy parallelizes it after `configure_model`. The strategy does not touch a
    module that shards itself in `configure_model` (with `self.device_mesh`, whose axes are `replicate`, `shard` and
    `tensor`).

    Args:
        config: a `ParallelConfig`, a dict, or the path of an SMP v2 JSON file. Default: the file named by
            `HYPERPOD_CONFIG`, else hybrid sharding over all ranks.
        comm: collective library to use, and whether a fallback is allowed.
        background_checkpoints: write checkpoints while training continues.
        save_distributed_checkpoint: False also writes each checkpoint as one file for any strategy; see `single_file`.
        trust_checkpoints: unpickle Python objects of a checkpoint (such as hyperparameters of your own classes),
            which can run arbitrary code. By default, only tensors, plain containers, numbers and strings are read.
        timeout_s: seconds after which a collective that does not complete fails.
        non_finite: what to do if a rank's loss or a gradient is infinite or NaN in a step. "stop" raises
            `NonFiniteError` on all ranks before anything is updated, "skip" skips the optimizer step, "warn" warns and
            continues, and "off" does not check. "auto" is "stop", except, without recovery, where the host would have
            to wait for the device (on CUDA in one process, or with clipping) or the optimizer's step is not torch's
            own; there it is "off". With manual optimization, each step of an optimizer of `self.optimizers()` is
            checked.
        **options: fields of `ParallelConfig`; they override those of `config`.

    Raises:
        ConfigError: unknown options, invalid values or combinations.
    """

    def __init__(
        self,
        config: ParallelConfig | Mapping[str, Any] | str | Path | None = None,
        *,
        comm: CommOptions | None = None,
        background_checkpoints: bool = False,
        save_distributed_checkpoint: bool = True,
        trust_checkpoints: bool = False,
        timeout_s: float = 1800.0,
        non_finite: NonFinitePolicy = "auto",
        **options: Any,
    ) -> None:
        FiniteCheck(non_finite, waits_anyway=True)  # validates the value
        self._non_finite: NonFinitePolicy = non_finite
        self._finite: FiniteCheck | None = None
        self._rank_check: RankFiniteCheck | None = None
        self._env = WorkerEnv.from_environ()
        self._rank_and_world_size: tuple[int, int] | None = None
        self._num_nodes = 1
        self._comm = comm or CommOptions()
        super().__init__(timeout=timedelta(seconds=timeout_s), process_group_backend="hyperpod")
        forms = {"in_background": background_checkpoints, "are_files": not save_distributed_checkpoint}
        self._checkpoints = TrainerCheckpoints(are_trusted=trust_checkpoints, **forms)
        self._recovery = NullRecovery()
        self._average: CallbackAverage | None = None
        job = JobEnv.from_environ()
        if job is not None:
            announce(job)
        self.config = ParallelConfig.of(config_path() if config is None else config, **options)
        self._precision_was_chosen = "precision" in options or self.config.precision != ParallelConfig().precision
        self._topology: Topology | None = None
        self._data_group: dist.ProcessGroup | None = None
        self._snapshot_group: dist.ProcessGroup | None = None
        self._allocator_watch: AllocatorWatch | None = None
        self._averaging: TrainerAveraging | None = None
        self._drops_gradients = self._is_set_up = False
        self._rank_local: dict[str, ProgramState] = {}
        self._sigterm_consensus: SigtermConsensus | None = None

    # -- processes ----------------------------------------------------------------------------------------------

    @property
    @override
    def global_rank(self) -> int:
        """Rank in the present world; in the initial world, the one that the launcher assigned."""
        return super().global_rank if self._rank_and_world_size is None else self._rank_and_world_size[0]

    @property
    @override
    def world_size(self) -> int:
        """Size of the present world."""
        return super().world_size if self._rank_and_world_size is None else self._rank_and_world_size[1]

    @property
    def num_nodes(self) -> int:
        """Nodes of the job, as set by the launcher, else by `Trainer(num_nodes=...)`."""
        return self._env.num_nodes if self._env.is_distributed and self._is_launched_outside else self._num_nodes

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
        # Under a launcher, Lightning counts one CPU "device" whatever the number of processes. Ranks share GPUs
        # round-robin.
        if parallel_devices and self._is_launched_outside:
            here, given = self._env.local_world_size, parallel_devices
            if given[0].type == "cpu" or len(given) < here:
                parallel_devices = [given[index % len(given)] for index in range(here)]
        self._parallel_devices = parallel_devices

    @property
    def _is_launched_outside(self) -> bool:
        """Whether a launcher that `WorkerEnv` knows started the processes, rather than Lightning itself."""
        return isinstance(self.cluster_environment, TorchElasticEnvironment | SLURMEnvironment)

    @property
    def _device_type(self) -> str:
        return self.accelerator.name().replace("gpu", "cuda") if self.accelerator is not None else "cpu"

    @override
    def _configure_launcher(self) -> None:
        """Use a `RecoveryLauncher` under a HyperPod agent."""
        super()._configure_launcher()
        if self._launcher is None and JobEnv.from_environ() is not None:
            self._launcher = RecoveryLauncher(self._leave_loops)

    def _leave_loops(self, error: PeerLost, from_checkpoint: bool) -> bool:
        return self._recovery.leave_loops(error, from_checkpoint=from_checkpoint)

    def _join(self) -> None:
        """Set this rank's device, and join the process group."""
        ParallelStrategy.setup_environment(self)
        reset_seed()
        self.set_world_ranks()
        assert self.cluster_environment is not None
        register()  # in case `hyperpod_plugins` was imported before torch, with the entry point disabled
        init_dist_connection(
            self.cluster_environment,
            "hyperpod",
            global_rank=self.global_rank,
            world_size=self.world_size,
            timeout=self._timeout,
            pg_options=self._comm,
        )

    # -- topology and rank-local state --------------------------------------------------------------------------

    @property
    def topology(self) -> Topology:
        """Degrees and rank arithmetic of this job.

        Raises:
            ConfigError: the Trainer has not set up the processes yet.
        """
        if self._topology is None:
            raise ConfigError("the topology is known only once the Trainer has set up the processes: from setup() on")
        return self._topology

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Number of ranks that read different samples, and this rank's index among them."""
        return {"num_replicas": self.topology.data_degree, "rank": self.topology.data_rank(self.global_rank)}

    @property
    def saves_for_peers(self) -> bool:
        """Whether saving hooks are being called to describe the trainer for a replacement; they must not communicate.

        A hook that gathers, such as one that calls `full_tensor()`, should return early if this is true.
        """
        return group_health.refusal_reason == FOR_PEERS

    def register_rank_local(self, name: str, stateful: Stateful) -> None:
        """Register an object whose state differs between ranks, so that a replacement gets the lost rank's state.

        Call it on all ranks, in `setup` or `configure_model` of the module or a callback; a replacement runs these
        hooks too. The state is read in each step, so it should be small: less than 1 MiB per rank in total. It is
        restored when a step is run again, and checkpoints hold it for each rank. Buffers and torchmetrics objects of
        the module need not be registered. Without in-place recovery this has no effect.

        Args:
            name: of the state, the same on all ranks; a later object with the same name replaces an earlier one.
            stateful: has `state_dict` and `load_state_dict`. The state consists of tensors, plain containers, numbers
                and strings, and `state_dict` must not communicate.

        Raises:
            ConfigError: the state holds other Python objects, or the model has already been set up.
        """
        if self._is_set_up:
            raise ConfigError(
                f"register_rank_local({name!r}) was called after the model was set up; other ranks may already send "
                "their state. Call it in setup() or configure_model() of the module or the callback."
            )
        self._rank_local[name] = ProgramState(name, stateful)

    # -- precision ----------------------------------------------------------------------------------------------

    @property
    @override
    def precision_plugin(self) -> Precision:
        """The precision plugin: Lightning's is replaced by a `HyperPodPrecision`, which can clip on mixed meshes."""
        return self._precision_plugin if self._precision_plugin is not None else Precision()

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        if precision_plugin is not None and not isinstance(precision_plugin, HyperPodPrecision):
            precision_plugin, self.config = HyperPodPrecision.replacing(
                precision_plugin, self._device_type, self.config, was_chosen=self._precision_was_chosen
            )
        self._precision_plugin = precision_plugin

    # -- setting up ---------------------------------------------------------------------------------------------

    @override
    def setup_environment(self) -> None:
        """Join the process group and build the device mesh."""
        trainer = self._trainer
        if not self._recovery.is_active:
            self._recovery = create_recovery(trainer, self.config, self._env, ranks_per_node=self.num_processes)
        recovery = self._recovery
        self._rank_and_world_size = recovery.rank_and_world_size or self._rank_and_world_size
        self._checkpoints.saved = recovery.saved
        is_keyed = recovery.keys_random_numbers
        prepare_loader_hooks(trainer, (self.config.random_seed, entries.number) if is_keyed else None)
        self._join()
        recovery.prepare(trainer)
        if self._elastic is None:
            self._topology = self.config.topology(self.world_size, ranks_per_node=self.num_processes)
        else:
            here = self.world_size, self.num_processes
            self.config, self._topology = self._elastic.setup_world(self.config, *here, trainer)
        if self.global_rank == 0:
            warn_of_placement(self._topology)
        if recovery.has_moved:
            update_group_members(self._topology, self.global_rank)
        self._device_mesh = build_mesh(self._topology, self.root_device.type)
        self._data_group = build_data_group(self._topology)
        saving_group, self._snapshot_group = recovery.create_groups(self._topology)
        if saving_group is not None:
            self._checkpoints.group = saving_group
        self._is_set_up = False
        check_same_layout(self._module, self._device_mesh)
        self._average = averaging_callback(trainer, self._average)
        self._module._device_mesh = self._device_mesh
        former_parameters.remember_attributes(self._module)  # in configure_model, the program may shard it

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Context of `configure_model` and `Trainer.init_module`.

        With `empty_init=True`, or by default where the configuration says `delayed_init`, a model takes no memory until
        it is sharded.
        """
        is_delayed = self.config.delayed_init if empty_init is None else empty_init
        with delayed_init() if is_delayed else nullcontext():
            yield

    @override
    def setup(self, trainer: Trainer) -> None:
        """Parallelize the module, then create the optimizers over its sharded parameters."""
        module = self._module
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        if is_sharded_by_program(module):
            refuse_other_layers(module, self.config)
            if tapes_of(module):
                match_rank_0(module, is_delayed_alike=self.config.delayed_values != "rank_0")
            give_values(module, self.root_device, self.config)
            watch_units(module)
            apply_offload(module, self.config)
        else:
            elastic = self._elastic
            averages = elastic is None or not elastic.options.averages_replicas
            parallelize(module, self.device_mesh, self.config, averages_replicas=averages, watches_allocator=False)
            treat_steps_as_forward(module)
        former_parameters.succeed_parameters(module, callbacks_of(trainer), is_by_program=True)
        if self.config.fsdp_cache_flush_warnings:
            self._allocator_watch = AllocatorWatch(self.root_device)
        self.model = module
        with shards_stay_on_host(module):
            self.model_to_device()
        assert self._data_group is not None
        synchronise_metrics_over(metrics_of(trainer).values(), self._data_group)
        forbid_inference_mode(trainer)
        if self.world_size > 1:
            refuse_validation_by_clock(trainer)
        self.barrier()
        is_replay = self._recovery.fit.is_active  # the optimizers then keep their state
        if trainer.state.fn == TrainerFn.FITTING and not is_replay:
            refuse_copying_callbacks(trainer)
            self.setup_optimizers(trainer)
            former_parameters.replace_stale_parameters(self.optimizers, module, num_ranks=self.world_size)
            check_no_required_closure(self.optimizers)
        self.setup_precision_plugin()
        if isinstance(self.precision_plugin, HyperPodPrecision):
            recovery = self._recovery
            self.precision_plugin.when_fetched = lambda: recovery.fit.seed_batch()
            self.precision_plugin.reconcile = reconcile_for
            self.precision_plugin.region = partial(float8_region, module)
        is_fit = trainer.state.fn == TrainerFn.FITTING
        # After a fault, ranks may be at different batches, so with recovery they do not agree on SIGTERM.
        self._sigterm_consensus = SigtermConsensus(
            trainer, agrees=is_fit and self.world_size > 1 and not self._recovery.is_active
        )
        if is_fit:
            self._drops_gradients = not needs_previous_gradients(trainer, module)
            optimizers_to_device([each for each in self.optimizers if not uses_host_memory(each)], self.root_device)
            if self._average is not None and not is_replay:
                self._average.begin(module)
            self._begin_fit(trainer, module)
            self._setup_finite_check(trainer)
        self._is_set_up = True

    def _begin_fit(self, trainer: Trainer, module: LightningModule) -> None:
        """Begin recovery of a fit, if there is any; of one that is skipped, only note the attributes."""
        if entries.is_skipping:
            attributes_of(trainer)  # their first values are those of here, as where the fit was run
        else:
            if self._elastic is not None:
                self._averaging = TrainerAveraging.of(trainer, module, self.device_mesh, self._elastic.options)
            self._recovery.begin_fit(
                trainer,
                module,
                self.topology,
                seed=self.config.random_seed,
                device=self.root_device,
                snapshot_group=self._snapshot_group,
                average=self._average,
                rank_local=self._rank_local,
                save=self._save_for_recovery,
            )

    def _setup_finite_check(self, trainer: Trainer) -> None:
        """Set up the check of each step's losses and gradients according to `non_finite`."""
        self._finite = self._rank_check = None
        precision, policy = self.precision_plugin, self._non_finite
        is_free = self.root_device.type == "cpu" or (self.world_size > 1 and trainer.gradient_clip_val is None)
        # Another optimizer may compute gradients more than once in a step, which cannot be checked.
        is_free = self._recovery.is_active or (is_free and all(map(is_elementwise, self.optimizers)))
        finite = FiniteCheck(policy, waits_anyway=is_free)
        if finite.is_enabled and isinstance(precision, HyperPodPrecision):
            self._finite, self._rank_check = finite, RankFiniteCheck(finite)
            precision.reconcile = self._rank_check.reconcile

    @property
    def _elastic(self) -> ElasticState | None:
        return self._recovery.elastic

    # -- a step -------------------------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `training_step`; the loss may be computed from logits that are split over the vocabulary.

        With recovery and manual optimization, the whole `training_step` is one transaction.
        """
        compute = partial(self._training_step, *args, **kwargs)
        if self._module.automatic_optimization:
            return compute()
        result = self._recovery.fit.step(partial(self._until_stopped, compute), lambda loss: loss)
        self._stop_if_not_finite()
        return result

    def _until_stopped(self, compute: Callable[[], Any]) -> Any:
        """Compute a step with manual optimization, up to where it stops because it is not finite; no retry helps."""
        try:
            return compute()
        except NonFiniteError as error:
            if self._finite is None or error is not self._finite.error:
                raise

    def _training_step(self, *args: Any, **kwargs: Any) -> Any:
        fit = self._recovery.fit
        fit.begin_micro_step((args, kwargs))
        if fit.is_active and (kwargs or not all(map(_is_leaf, args))):
            # Copy the containers: the module may remove items from the batch, and the step may run again.
            args, kwargs = tree_map(lambda leaf: leaf, (args, kwargs))
        if self._drops_gradients and self._begins_window:
            for optimizer in self.optimizers:
                optimizer.zero_grad()
        is_automatic = self._module.automatic_optimization
        inner = nullcontext() if is_automatic else root_gathered_for_its_parts(self._module)
        with loss_parallel_context(self.config), inner:
            output = super().training_step(*args, **kwargs)
        if self._averaging is not None:
            self._averaging.computed(output)
        return output

    @override
    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run backward in the context of the forward, with the loss weighted so that all samples count equally."""
        trainer = self._trainer
        batch_index = trainer.fit_loop.epoch_loop.batch_idx - self._recovery.fit.num_batches_back
        weight = sample_weight_of(trainer, batch_index)
        if self._rank_check is not None:
            self._rank_check.record(batch_index, closure_loss)
        if not self._module.automatic_optimization:
            reduce_root_in_backward(self._module, closure_loss)
        with loss_parallel_context(self.config):
            if weight != 1.0:
                closure_loss = closure_loss * weight
            backward = super().backward
            if self._averaging is None:
                return backward(closure_loss, *args, **kwargs)
            return self._averaging.add(closure_loss, lambda loss: backward(loss, *args, **kwargs), batch_index)

    @override
    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any | None = None, **kwargs: Any
    ) -> Any:
        """Run the closure and the optimizer, as one transaction with recovery; then check the allocator."""
        module, fit, check = self._trainer.lightning_module, self._recovery.fit, self._rank_check
        is_transaction = fit.is_active and module.automatic_optimization
        if not is_transaction and check is None:
            result = super().optimizer_step(optimizer, closure, model, **kwargs)
        else:
            compute = partial(self.precision_plugin._wrap_closure, module, optimizer, closure)
            update = partial(self._update, optimizer, **kwargs)
            result = fit.step(compute, update) if module.automatic_optimization else update(compute())
        if not module.automatic_optimization:
            reshard(module)  # gathered parameters have the old values; see `hsdp.py`
        if self._finite is not None and check is not None:
            if module.automatic_optimization:
                check.begin()
                self._stop_if_not_finite()
            else:
                self._finite.raise_if_stopped()  # the transaction, if there is one, is that of `training_step`
        if self._allocator_watch is not None:
            self._allocator_watch.after_step()
        return result

    def _stop_if_not_finite(self) -> None:
        """Raise on all ranks, without having any rank replaced, if the step was not finite.

        Raises:
            NonFiniteError: the step was not finite, and the policy is to stop.
        """
        error = None if self._finite is None else self._finite.error
        if error is None:
            return
        log.error("rank %d stops: %s", self.global_rank, error)
        self._recovery.give_up(str(error), self.barrier)
        raise error

    def _update(self, optimizer: Optimizer, loss: Any, **kwargs: Any) -> Any:
        if self._rank_check is not None:
            trainer = self._trainer
            norm = self.precision_plugin.norm if isinstance(self.precision_plugin, HyperPodPrecision) else None
            if not self._rank_check.allows_update(norm, step=trainer.global_step, epoch=trainer.current_epoch):
                if trainer.lightning_module.automatic_optimization:
                    optimizer.zero_grad()  # otherwise the program does; another optimizer of this step must see them
                return loss
        if self._averaging is not None:
            self._averaging.committed()
        with nullcontext() if self._elastic is None else self._elastic.step(optimizer):
            return step_locally(optimizer, single_use_closure(optimizer, loss), **kwargs)

    @property
    @override
    def handles_gradient_accumulation(self) -> bool:
        """Whether Lightning passes every micro-step to the strategy; see `AccumulationWindow.accumulates`.

        With recovery it does, because the strategy may have to run the whole window again.
        """
        return self._recovery.fit.accumulates

    def micro_step(self, closure: Callable[[], Any]) -> None:
        """Run a micro-step that is not the last of its step, with recovery; it does not synchronize gradients."""
        self._recovery.fit.micro_step(partial(self._unsynchronised, closure))

    def _unsynchronised(self, closure: Callable[[], Any]) -> Any:
        with self.block_backward_sync():
            return closure()

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _trainer(self) -> Trainer:
        return self._module.trainer

    @property
    def _begins_window(self) -> bool:
        trainer = self._trainer
        return trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Skip the all-reduce between replicas: an accumulation window needs it once, in its last micro-step."""
        assert self.model is not None
        with without_replica_sync(self.model):
            yield

    @override
    def on_train_start(self) -> None:
        """Prepare recovery once the loops have been restored."""
        if self._rank_check is not None:
            self._rank_check.begin()
        refuse_early_ends(self._trainer)
        self._recovery.fit.on_train_start()

    @override
    def on_validation_start(self) -> None:
        """Agree on SIGTERM, and join the other ranks if this process is not connected yet."""
        if self._sigterm_consensus is not None:
            self._sigterm_consensus.agree()
        self._recovery.fit.begin_evaluation()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Tell recovery that a batch has been fetched."""
        self._recovery.fit.on_batch()

    @override
    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks; a barrier named `*_dataloader()` also restarts the numbering of loaders."""
        if name is not None and name.endswith("_dataloader()"):
            self._recovery.fit.count_loaders()
        super().barrier(name)

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        """Return the loader with random numbers keyed by the sample; in a resumed epoch, skip the batches done."""
        trainer = self._trainer
        if self._elastic is not None and trainer.training and isinstance(dataloader, DataLoader):
            dataloader = self._elastic.divided(dataloader, trainer, seed=self.config.random_seed)
        if isinstance(dataloader, StatefulLoader):
            return self._recovery.fit.follow_loader(dataloader)
        return self._recovery.fit.process_loader(dataloader)

    # -- evaluation ---------------------------------------------------------------------------------------------

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `validation_step`, then reshard; see `training_step`."""
        with self._evaluation():
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `test_step`, then reshard; see `training_step`."""
        with self._evaluation():
            return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `predict_step`, then reshard; see `training_step`."""
        with self._evaluation():
            return super().predict_step(*args, **kwargs)

    @contextmanager
    def _evaluation(self) -> Generator[None, None, None]:
        """Reshard after the step: callbacks that swap or average weights need the optimizer's parameters."""
        with loss_parallel_context(self.config):
            yield
        assert self.model is not None
        reshard(self.model)

    # -- checkpoints --------------------------------------------------------------------------------------------

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """This rank's shards of the module's tensors, not copied; hooks may remove or replace some."""
        return dict(model_tensors(self._module))

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an empty dict: `save_checkpoint` writes the optimizer states itself, sharded."""
        return {}

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write a sharded checkpoint as the folder `filepath`; all ranks call it together."""
        path = self.broadcast(filepath)
        self._recovery.fit.note_save(str(filepath), str(path))
        self._write(checkpoint, path, storage_options)

    def _write(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None, *, may_be_file: bool = True
    ) -> None:
        self._checkpoints.save(
            path,
            checkpoint,
            module=self._module,
            optimizers=self.optimizers,
            average=self._average,
            rank_state={self.global_rank: self._rank_local_part(checkpoint)},
            storage_options=storage_options,
            may_be_file=may_be_file,
        )

    def _rank_local_part(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """This rank's rank-local part of a checkpoint; also adds the job's layout to the checkpoint itself."""
        local = checkpoint.pop(LOCAL, None) or self._recovery.fit.local_state
        checkpoint |= {LAYOUT: self.topology.layout, ENTRY: entries.number}
        checkpoint.update(untracked(self._trainer) | checkpoint)
        return {**rank_local_part(checkpoint, self._trainer), LOCAL: local}

    def _save_for_recovery(
        self,
        checkpoint: dict[str, Any],
        path: str,
        is_alone: bool,
        state: tuple[StateParts, Mapping[int, dict[str, Any]]] | None = None,
    ) -> str:
        """Write a checkpoint for recovery: one that was interrupted, an emergency checkpoint, or one to reshard from.

        Args:
            checkpoint: Lightning's checkpoint data.
            path: of a checkpoint whose saving was interrupted; empty for an emergency checkpoint before the job ends;
                `RESHARD` for one from which all workers restart with other degrees. The latter two are written next to
                the others.
            is_alone: whether only some ranks are left. Then no group but that of checkpoints works, and the path is
                not broadcast.
            state: written instead of the present state: parts of tensors, and the checkpoint data of the ranks that
                they belong to.

        Returns:
            The path.
        """
        trainer, folder, is_of_program = self._trainer, self.checkpoint_root, path not in ("", RESHARD)
        if not is_of_program:
            label = "reshard" if path else "emergency"
            for logger in trainer.loggers:
                logger.save()  # this process will not do so later
            path = str((folder / f"{label}-step={checkpoint['global_step']}.ckpt").absolute())
        if not is_alone:
            path = self.broadcast(path)
        if state is not None:
            parts, described = state
            own = {rank: self._rank_local_part(dict(each)) for rank, each in described.items()}
            checkpoint = {**checkpoint, LAYOUT: self.topology.layout, ENTRY: entries.number}
            self._checkpoints.save_parts(path, checkpoint, parts, module=self._module, rank_state=own)
            return path
        tensors: dict[str, Any] = {"state_dict": self.lightning_module_state_dict()}
        if "lr_schedulers" in checkpoint:  # it is not for weights only
            tensors["optimizer_states"] = [{} for _ in self.optimizers]
        self._write({**checkpoint, **tensors}, path, may_be_file=is_of_program)
        self._checkpoints.wait()
        return path

    @property
    def checkpoint_root(self) -> Path:
        """Folder of the trainer's checkpoints, where the strategy adds its own."""
        trainer = self._trainer
        folders = [getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks]
        return Path(next((folder for folder in folders if folder), trainer.default_root_dir))

    def save_entry_end(self, checkpoint: dict[str, Any], path: Path) -> None:
        """Write the state after a fit as the folder `path`, and wait for it; all ranks call it together.

        Raises:
            CheckpointError: the state could not be written.
        """
        with self._checkpoints.not_of_program():
            self.save_checkpoint(checkpoint, path)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a sharded checkpoint written with any degrees, or a checkpoint file that another strategy wrote.

        In a joiner, and after a fault, `checkpoint_path` is `STATE_OF_PEERS`, and the state comes from other ranks.
        """
        if self._recovery.fit.is_active and checkpoint_path == STATE_OF_PEERS:
            return self._recovery.fit.state_of_peers()
        here = self._checkpoints.at(checkpoint_path)
        path = Path(here if entries.is_skipping else self.broadcast(here))
        is_fit = self._trainer.state.fn == TrainerFn.FITTING  # after a fit, optimizers still exist
        if path.is_file():
            loaded = super().load_checkpoint(path, weights_only=weights_only)
            if self._average is not None and is_fit:
                if "current_model_state" in loaded:
                    raise ConfigError(
                        f"{path} is a single file with weights averaged by WeightAveraging. With that callback, "
                        "HyperPodStrategy can only resume from the folders that it writes. "
                        "Leave the callback out to train from the averaged weights."
                    )
                self._average.swap_loaded(self._module, is_averaged=False)
            return loaded
        checkpoint = self._checkpoints.load(
            path,
            module=self._module,
            optimizers=self.optimizers if is_fit else (),
            average=self._average if is_fit else None,
            weights_only=weights_only,
        )
        layout = checkpoint.pop(LAYOUT, None)
        if entries.is_skipping and is_fit:
            return {**checkpoint, **entries.trainer_state}  # this rank's own: callbacks may differ between ranks
        if layout is not None:
            checkpoint |= self._load_rank_local(
                path, checkpoint, tuple(layout), is_fit=is_fit, weights_only=weights_only
            )
        self._recovery.fit.resume_from(checkpoint)
        return checkpoint

    def _load_rank_local(
        self, path: Path, checkpoint: dict[str, Any], layout: Any, *, is_fit: bool, weights_only: bool | None
    ) -> dict[str, Any]:
        """Load this rank's rank-local part of a checkpoint; apply buffers, metrics and means, and return the rest."""
        trainer = self._trainer
        source = RankStateSelector(
            rank=self.global_rank, topology=self.topology, saved_layout=layout, is_training=is_fit
        )
        first = rank_local_part(checkpoint, trainer)
        own = self._checkpoints.load_own(path, source, first, weights_only=weights_only)
        local = own.pop(LOCAL, {})
        self._recovery.fit.load_local_state(local, checkpoint, is_of_another_job=not entries.resumed_from)
        return own

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, once the one that is being written is complete."""
        self._checkpoints.remove(filepath, super().remove_checkpoint)

    # -- collectives --------------------------------------------------------------------------------------------

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Send an object from rank `src` to all; a joiner reads what was sent before it joined from the job store."""
        frame = sys._getframe(1)
        caller = f"{frame.f_globals['__name__']}.{frame.f_code.co_qualname}"
        send = partial(super().broadcast, obj, src)

        def checked() -> Any:
            with group_health.checks_host_read():
                return send()

        return self._recovery.broadcast_or_replay(obj, checked, caller=caller)

    @override
    def reduce(self, tensor: Tensor | Any, group: Any | None = None, reduce_op: Any | None = "mean") -> Any:
        """Reduce a copy of a tensor over `group`, by default the ranks that read different samples.

        Tensor and context peers hold the same value.

        Args:
            tensor: the same shape on all ranks; a DTensor (such as a loss from split logits) is gathered first.
            group: to reduce over.
            reduce_op: a `ReduceOp`, or the name of one; `mean`, `avg` or None for the mean, which is floating point.
        """
        if not isinstance(tensor, Tensor) or not dist.is_initialized():
            return tensor
        if group is None:
            group = self._data_group
        is_mean = reduce_op in (None, "mean", "avg") or reduce_op == dist.ReduceOp.AVG
        operation: Any = "sum" if is_mean else reduce_op
        if isinstance(operation, str):
            operation = getattr(dist.ReduceOp, operation.upper())
        result = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
        if is_mean and not result.is_floating_point():
            result = result.float()
        with self._completed(result.device):
            dist.all_reduce(result, op=operation, group=group)
        return result / dist.get_world_size(group) if is_mean else result  # not every library can average

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Gather a tensor of the same shape from all ranks of `group`, by default all ranks: `(ranks, *shape)`."""
        with self._completed(tensor.device):
            return super().all_gather(tensor, group, sync_grads)

    def _completed(self, device: torch.device) -> AbstractContextManager[None]:
        """Context for a collective whose result is used; without recovery, nothing is waited for."""
        return completed_outside_step(device) if self._recovery.is_active else nullcontext()

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether `decision` is true on all ranks, or on any rank if `all` is False."""
        votes = torch.tensor(int(decision), device=self.root_device)
        with group_health.checks_host_read():
            dist.all_reduce(votes, op=dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
            return bool(votes)

    @override
    def on_train_end(self) -> None:
        """Agree on SIGTERM; with recovery, wait until all ranks have run the hooks at the end of the fit."""
        if self._sigterm_consensus is not None:
            self._sigterm_consensus.agree()
        if self._recovery.fit.is_active:
            self.barrier()

    @override
    def teardown(self) -> None:
        """Wait for a checkpoint that is still being written, and end this rank's part in recovery."""
        self._recovery.fit.finish()
        try:
            self._checkpoints.close()
        finally:
            self._checkpoints.saved = None  # later saves belong to another entry of the program, or to none
            recovery, self._recovery = self._recovery, NullRecovery()
            recovery.close(None if self.lightning_module is None else self.lightning_module.trainer)
            super().teardown()


def _is_leaf(value: object) -> bool:
    """Whether an argument of `training_step` is a tensor or an integer, and so certainly not a container."""
    return isinstance(value, Tensor | int)
