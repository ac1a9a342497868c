"""Elastic training in a Trainer: the `ElasticTraining` callback, and `ElasticState` at run time.

`TrainerAveraging` averages gradients outside FSDP2, for reproducible steps and for AdaScale.
"""

# Lightning's loops have no public API.
# pyright: reportPrivateUsage=false

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from hyperpod_plugins.data import BatchSplit, Cursor
from hyperpod_plugins.data.loader import MapStyleData
from hyperpod_plugins.elastic import JobStore
from hyperpod_plugins.elastic.launcher.signal_queue import ignore_notices
from hyperpod_plugins.elastic.membership.elastic_spec import (
    ElasticPolicy,
    ElasticSpec,
    ReplicaLayout,
    elastic_spec_of,
    publish_elastic_spec,
)
from hyperpod_plugins.elastic.scaling.adascale import GradientNoise
from hyperpod_plugins.elastic.scaling.batch import StepBatch
from hyperpod_plugins.elastic.scaling.batch_config import BatchConfig
from hyperpod_plugins.elastic.scaling.lr_scaling import (
    LearningRates,
    LRScaling,
    LRScalingRule,
    find_reference,
    publish_reference,
    warn_of_adaptive,
)
from hyperpod_plugins.env import JobEnv
from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.events import Event, record
from hyperpod_plugins.ledger import ledger
from hyperpod_plugins.lightning.compat import Trainer, original
from hyperpod_plugins.lightning.compat import override as override_method
from hyperpod_plugins.lightning.datamodule import BatchSizeCallback, TrainerLoader, sample_weight_of
from hyperpod_plugins.parallel import ParallelConfig, Topology
from hyperpod_plugins.parallel.config import INSIDE_SHARD_AXIS, refuse_degrees
from hyperpod_plugins.parallel.replica_mean import (
    FixedOrderAveraging,
    GradAveraging,
    NoiseMeasuringAveraging,
    RankMicroStep,
)
from hyperpod_plugins.recovery import Repair
from hyperpod_plugins.recovery.degrees import as_degrees, layouts_of, with_degrees

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize:
    """A change of the number of replicas, as seen by a process that was in the job before it."""

    cause: str
    """Human-readable reason."""
    step: int
    """Steps committed before the change."""
    num_replicas: int
    """Number of replicas after the change."""
    took_s: float
    """Seconds from the request, or from the loss that caused the change, until the next step could begin."""


class ElasticTraining(BatchSizeCallback):
    """Let the job grow and shrink by whole replicas while it runs; by default every step keeps its global batch.

    Needs `hyperpodrun` or `torchrun --rdzv-backend=hyperpod`, with `--nnodes=MIN:MAX`. Train loaders are ordinary
    `DataLoader`s over map-style datasets, with `batch_size=micro_batch_size`, a `TokenDataModule`, or a
    `TrainerLoader` over an `ElasticSampler`. As always in a distributed Trainer, an ordinary loader's samples are
    shuffled, unless it has a `DistributedSampler(shuffle=False)`; `set_epoch` and its own division of the samples do
    not matter. The Trainer's `accumulate_grad_batches` is overwritten: it follows from the sizes below.

    With `samples_per_replica` the batch follows the world: R replicas have R times as many samples per step. The
    learning rate follows by `lr_scaling`, and schedulers with `interval="step"` advance by samples: one step for each
    reference batch. Each change of the batch is logged, and recorded as the event `elastic.batch`.

    With `lr_scaling="adascale"`, for SGD with momentum, the gradients determine how many reference steps a step is
    worth: its *gain*, between 1 and S, where S is the step's samples / reference batch (between S and 1 for a smaller
    one). The learning rate of the step is multiplied by the gain, and schedulers advance by as many steps. The gain
    follows from averages over earlier steps and this one. A step contributes the gradients of its parts, each
    computed by one replica in one micro-step. A single replica that does not accumulate contributes nothing; its gain
    follows from the existing averages and its own S. Before there are any averages, the gain is 1, or S if that is
    smaller.

    Args:
        global_batch_size: samples of one optimizer step, over all ranks; the same for every number of replicas.
        samples_per_replica: samples of one optimizer step for each replica, instead of `global_batch_size`. Needs
            `max_replicas`.
        micro_batch_size: maximum number of samples of one rank in one forward and backward pass.
        policy: limits on the number of replicas, and how soon it changes: an `ElasticPolicy`, the `elasticPolicy` of a
            HyperPod manifest, the `elastic_policy` of a recipe, DeepSpeed's `elasticity`, or the path of a JSON or
            YAML file with one of these. DeepSpeed's also sets the batch sizes, and so does a whole recipe, with its
            `scale_config` and `uneven_batch`. Default: any number.
        lr_scaling: how the learning rate scales with a batch that is kappa times the reference: `"none"`, `"linear"`
            (kappa), `"sqrt"`, `"adascale"`, or a function of kappa.
        reference_batch_size: batch that the learning rate and schedule were tuned for; 0 for the batch of the initial
            world.
        warmup_samples: samples over which the learning rate moves to its new value.
        scale_adam: with `"sqrt"`, scale Adam's betas and eps too: kappa (1 - beta), and eps / sqrt(kappa).
        shard_degrees: shard degrees that the job may have besides the strategy's. If too few ranks are left for a
            replica of the present degree, or another one is requested (`hyperpod scale --shard-degree`), all
            processes restart and reshard, with the strategy's degree if it fits, else the largest that does.
        tensor_degrees: the same for tensor degrees.
        reproducible: get bitwise identical results whatever the number of replicas, and however often it changes. A
            step is split into logical shards that are computed separately and summed in a fixed order. The number of
            replicas must divide the number of logical shards, and the incomplete batch at the end of an epoch is
            dropped.
        **limits: fields of `ElasticPolicy`, instead of `policy`.

    Attributes:
        resizes: every change of size that this process has been through, in order.
        split: how a step is split in the present world, for an `ElasticSampler`; None before there is a world.
        step_loss: with `reproducible`, the mean loss of the last step over its whole global batch, shape `()`; None
            before the first step.

    Raises:
        ConfigError: invalid limits or sizes, or options that have no effect together.
    """

    def __init__(
        self,
        *,
        global_batch_size: int = 0,
        samples_per_replica: int = 0,
        micro_batch_size: int = 0,
        policy: ElasticPolicy | Mapping[str, Any] | str | Path | None = None,
        lr_scaling: LRScaling = "none",
        reference_batch_size: int = 0,
        warmup_samples: int = 0,
        scale_adam: bool = False,
        shard_degrees: Sequence[int] = (),
        tensor_degrees: Sequence[int] = (),
        reproducible: bool = False,
        **limits: Any,
    ) -> None:
        self._config = BatchConfig.of(
            policy,
            limits,
            global_batch_size=global_batch_size,
            samples_per_replica=samples_per_replica,
            micro_batch_size=micro_batch_size,
            reproducible=reproducible,
        )
        rule = LRScalingRule(
            scaling=lr_scaling,
            reference_batch_size=reference_batch_size,
            warmup_samples=warmup_samples,
            scale_adam=scale_adam,
        )
        self._config.check_rule(rule)
        self.batch = self._config.batch
        if JobEnv.from_environ() is not None:
            ignore_notices()  # already here, because setting up model and data may take long
        self.shard_degrees, self.tensor_degrees = as_degrees(shard_degrees, tensor_degrees, reproducible=reproducible)
        self.rates = LearningRates(rule=rule)
        self.reproducible = reproducible
        self.remarks: tuple[str, ...] = ()
        """Remarks for the user about a recipe, one clause each: what is ignored, and why."""
        self.step_loss: Tensor | None = None
        self.resizes: list[Resize] = []

    @property
    def global_batch_size(self) -> int:
        """Samples of one optimizer step, over all ranks; in the present world if the batch follows the world.

        Raises:
            ConfigError: the batch follows the world, and there is no world yet. There is one when loaders are
                created.
        """
        if self.split is None and self.batch.follows_world:
            raise ConfigError(
                "the number of samples of a step is known only when the Trainer has set up the processes. Read it "
                "where loaders are created, or later."
            )
        return self.batch.global_batch_size if self.split is None else self.split.global_batch_size

    @property
    def lr_factor(self) -> float:
        """Factor that the learning rate of the next step is multiplied by; schedulers and loggers see the base rate.

        With AdaScale it is the gain of the last step, because that of the next one is not known yet.
        """
        return self.rates.factor

    @property
    def schedule_step(self) -> int:
        """Completed steps of the schedule if the batch follows the world, else 0; can serve as a stop condition."""
        return self.rates.schedule_step

    @property
    def averages_replicas(self) -> bool:
        """Whether these options need the gradients of single replicas, so that FSDP2 must not average them."""
        return self.reproducible or self.rates.rule.is_adascale

    @override
    def state_dict(self) -> dict[str, Any]:
        """State of learning rate and schedule; empty if the global batch is constant."""
        return self.rates.state_dict() if self.batch.follows_world else {}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of learning rate and schedule."""
        if self.batch.follows_world:
            self.rates.load_state_dict(state_dict)

    def resolve(self, topology: Topology) -> tuple[ElasticPolicy, StepBatch]:
        """Limits and batch for a topology: policies may count in nodes or GPUs, which are converted to replicas.

        Raises:
            ConfigError: the nodes or GPUs of the policy do not form whole replicas, or do not match those of the job.
        """
        found = self._config.resolve(topology)
        self.batch, self.remarks = found.given, found.remarks
        return found.policy, found.batch


class ElasticState:
    """`ElasticTraining` at run time, in one process of a job with recovery."""

    def __init__(self, options: ElasticTraining, job_store: JobStore) -> None:
        self.options = options
        """The user's callback."""
        self._job_store = job_store
        self._known = elastic_spec_of(job_store)
        self._layouts: tuple[ReplicaLayout, ...] = ()
        self.replica_size = 0 if self._known is None else self._known.replica_size
        """Ranks of one replica; 0 until the first world has been laid out."""
        self._topology: Topology | None = None
        self._trainer: Trainer | None = None
        self._policy: ElasticPolicy | None = None
        self._sizes: tuple[int, ...] = ()

    def setup_world(
        self, config: ParallelConfig, world_size: int, ranks_per_node: int, trainer: Trainer
    ) -> tuple[ParallelConfig, Topology]:
        """Determine the topology of the present world, and split the global batch over it.

        Only the number of replicas differs between worlds; the degrees stay as in the first call.

        Args:
            config: of the strategy; returned with the degrees of the job.
            world_size: of the present world.
            ranks_per_node: in the present world.
            trainer: its `accumulate_grad_batches` is set to the number of micro-steps.

        Raises:
            DegreeError: the world does not consist of whole replicas.
            ConfigError: the batch cannot be split, or the world is smaller or larger than the limits allow.
        """
        is_first = self._topology is None
        if self.options.averages_replicas:
            refuse_degrees(config, ["context_parallel_degree"], "reproducible=True and AdaScale")
        if self.options.shard_degrees or self.options.tensor_degrees:
            refuse_degrees(config, INSIDE_SHARD_AXIS, "shard_degrees and tensor_degrees")
        if is_first:
            self._layouts = layouts_of(self.options, config, ranks_per_node)
            config = with_degrees(config, self._known, self._layouts, world_size)
        first = config.topology(self.replica_size or world_size, ranks_per_node=ranks_per_node)
        topology = replace(first, world_size=world_size)
        self.replica_size, self._topology = topology.replica_size, topology
        self._policy, batch = self.options.resolve(topology)
        serving = batch if self.options.reproducible else self.options.batch  # logical shards allow fewer sizes
        self._sizes = serving.feasible_sizes(self._policy, topology.data_ranks_per_replica)
        for remark in self.options.remarks if is_first else ():
            if trainer.global_rank == 0:
                log.warning("the recipe given to ElasticTraining: %s", remark)
        if topology.replicate_degree not in self._sizes:
            raise ConfigError(
                f"the job has {topology.replicate_degree} replicas of {self.replica_size} ranks, and ElasticTraining "
                f"allows {list(self._sizes)}. Start a different number of processes, or change its limits."
                + "".join(f" The recipe: {remark}." for remark in self.options.remarks)
            )
        split = batch.split(topology.replicate_degree, topology.data_ranks_per_replica)
        self.options.split, self._trainer = split, trainer
        self.options.possible_micro_steps = frozenset(each.num_micro_steps for each in self._splits().values())
        trainer.accumulate_grad_batches = split.num_micro_steps
        if batch.follows_world:
            self.options.rates.begin(find_reference(self._job_store, self.options.rates.rule, split.global_batch_size))
            take_over_schedulers(self.options.rates, trainer)
        return config, topology

    def _splits(self) -> dict[int, BatchSplit]:
        """The split of a step, for each number of replicas that the job may have with its present degrees."""
        assert self._topology is not None
        splits: dict[int, BatchSplit] = {}
        for size in self._sizes:
            topology = replace(self._topology, world_size=size * self.replica_size)
            _, batch = self.options.resolve(topology)
            splits[size] = batch.split(size, topology.data_ranks_per_replica)
        return splits

    def epoch_lengths(self, trainer: Trainer) -> dict[int, tuple[int, int]]:
        """For each number of replicas: micro-steps of a full step, and batches of a full epoch.

        Empty if a loader does not count in samples; `open` raises for such a loader.
        """
        loaders = _train_loaders(trainer)
        if not all(isinstance(each, TrainerLoader) for each in loaders):
            return {}
        combined = trainer.fit_loop._combined_loader
        length = min if combined is not None and combined._mode == "min_size" else max
        samplers = [each.batch_sampler for each in loaders]
        return {
            size: (
                split.num_micro_steps,
                length(split.count(Cursor(), each.num_samples, drop_last=each.drop_last) for each in samplers),
            )
            for size, split in self._splits().items()
        }

    def divided(self, loader: DataLoader[Any], trainer: Trainer, *, seed: int) -> TrainerLoader:
        """A train loader that counts its position in samples, built from an ordinary one for the present world.

        Args:
            loader: as returned by `train_dataloader`, or with the sampler that the Trainer has given it.
            trainer: of the loop.
            seed: see `MapStyleData`.

        Raises:
            ConfigError: see `MapStyleData`; or its batch size is not the micro-batch size of this job.
        """
        topology, split = self._topology, self.options.split
        assert topology is not None
        assert split is not None
        data = MapStyleData(loader, seed=seed, taken_by="ElasticTraining")
        sizes = {self.options.batch.micro_batch_size, *(each.micro_batch_size for each in self._splits().values())}
        if data.micro_batch_size not in sizes:
            raise ConfigError(
                f"the train DataLoader has batch_size={data.micro_batch_size}, but a rank of this job gets at most "
                f"{self.options.batch.micro_batch_size} samples at once (micro_batch_size of ElasticTraining, or of "
                "its policy). Give both the same."
            )
        return data.build_loader(split, topology.data_rank(trainer.global_rank), partial(TrainerLoader, trainer))

    def random_stream_key(self, micro_step: int, rank: int, *, is_computing: bool) -> tuple[int, int]:
        """The two numbers that key the random stream of a micro-step on a rank; see `stream_seed`."""
        topology, split = self._topology, self.options.split
        assert topology is not None
        assert split is not None
        return split.random_stream(
            micro_step, topology.compute_rank(rank) if is_computing else topology.data_rank(rank)
        )

    def publish_spec(self, trainer: Trainer) -> None:
        """Publish the elastic spec, which lets the job change its size from now on.

        Raises:
            ConfigError: a loader counts its position in batches, whose size changes with the size of the world.
        """
        loaders = _train_loaders(trainer)
        self._refuse_uneven(loaders)
        for loader in loaders:
            split = loader.batch_sampler.split if isinstance(loader, TrainerLoader) else None
            own = self.options.split
            assert own is not None
            if split is None or _kind_of(split) != _kind_of(own):
                what = f"a global batch of {split.global_batch_size}" if split else type(loader).__name__
                if split and split.global_batch_size == own.global_batch_size:
                    what += " that does not follow the world" if own.pads_last_step else " that is split differently"
                raise ConfigError(
                    "ElasticTraining needs train loaders that count their position in samples, with its own global "
                    f"batch of {own.global_batch_size}, but found {what}. Return a DataLoader over a map-style "
                    "dataset from train_dataloader, use a TokenDataModule that leaves the sizes to ElasticTraining, or "
                    "return a TrainerLoader over an ElasticSampler, with the callback's `split`."
                )
        assert self._policy is not None
        assert self._topology is not None
        shard, tensor = self._topology.shard_degree, self._topology.tensor_degree
        spec = ElasticSpec(
            policy=self._policy,
            replica_size=self.replica_size,
            sizes=self._sizes,
            tensor_degree=tensor,
            layouts=self._layouts or (ReplicaLayout(shard_degree=shard, tensor_degree=tensor, sizes=self._sizes),),
        )
        if self.options.batch.follows_world:
            batches = [self.options.batch.global_batch_at(size) for size in self._sizes]
            reference = self.options.rates.check(trainer.optimizers, batches)
            publish_reference(self._job_store, reference)
            if self.options.rates.rule.is_adascale and trainer.global_rank == 0:
                warn_of_adaptive(trainer.optimizers)
        publish_elastic_spec(self._job_store, spec)

    def _refuse_uneven(self, loaders: Sequence[Any]) -> None:
        """Raise for several train loaders with unequal shares: a loss over several batches has no single weight.

        Raises:
            ConfigError: some number of replicas would have such shares.
        """
        if len(loaders) < 2:
            return
        for size, split in self._splits().items():
            whole = split.data_world_size * split.num_micro_steps
            is_cut = any(not each.batch_sampler.drop_last for each in loaders if isinstance(each, TrainerLoader))
            if split.global_batch_size % whole or is_cut:
                raise ConfigError(
                    f"there are {len(loaders)} train loaders, and with {size} replicas a step of "
                    f"{split.global_batch_size} samples, or the incomplete last step of an epoch, would be split "
                    "unevenly. The loss of a step with several batches cannot be weighted for that: use one loader, "
                    "or drop_last=True and numbers of replicas that divide the global batch."
                )

    @contextmanager
    def step(self, optimizer: Optimizer) -> Generator[None]:
        """Scale the learning rate for the present batch; the optimizer steps inside this context."""
        options, trainer = self.options, self._trainer
        if not (options.batch.follows_world or ledger.is_active):
            yield
            return
        assert trainer is not None
        loader = _train_loaders(trainer)[0]
        num_samples = loader.batch_sampler.step_size(trainer.fit_loop.epoch_loop.batch_idx)
        ledger.note(samples=num_samples)
        if not options.batch.follows_world:
            yield
            return
        with options.rates.step(
            optimizer,
            batch_size=options.global_batch_size,
            num_samples=num_samples,
            is_first_rank=trainer.global_rank == 0,
        ):
            yield

    def record_resize(self, cause: str, repair: Repair) -> None:
        """Record that the job continues with another number of replicas."""
        assert self._topology is not None
        now = self._topology.replicate_degree
        self.options.resizes.append(Resize(cause=cause, step=repair.step, num_replicas=now, took_s=repair.total_s))
        record(
            Event(
                name="elastic.resize",
                at_s=repair.failure.at_s,
                duration_s=repair.total_s,
                details={"cause": cause, "step": repair.step, "replicas": now},
            )
        )


def _kind_of(split: BatchSplit) -> tuple[int, bool, int]:
    return split.global_batch_size, split.pads_last_step, split.num_logical_shards


def _train_loaders(trainer: Trainer) -> list[Any]:
    combined = trainer.fit_loop._combined_loader
    return [] if combined is None else combined.flattened


# Schedulers of a batch that follows the world advance by samples.


def take_over_schedulers(rates: LearningRates, trainer: Trainer) -> None:
    """Make schedulers with `interval="step"` advance by samples, one step per reference batch, from now on."""
    loop = trainer.fit_loop.epoch_loop
    theirs = original(loop, "update_lr_schedulers")

    def update_lr_schedulers(interval: str, update_plateau_schedulers: bool) -> None:
        if interval != "step":
            theirs(interval, update_plateau_schedulers)
        elif not loop._should_accumulate():
            step_schedulers(rates, trainer, waiting_for_metric=update_plateau_schedulers)

    override_method(loop, "update_lr_schedulers", update_lr_schedulers)


def step_schedulers(rates: LearningRates, trainer: Trainer, *, waiting_for_metric: bool) -> None:
    """Step the schedulers once for each reference batch that has been completed.

    Args:
        rates: counts the reference batches.
        trainer: whose schedulers.
        waiting_for_metric: whether to step those that follow a metric, or the others.

    Raises:
        ConfigError: the metric that a scheduler follows was not logged.
    """
    module, progress = trainer.lightning_module, trainer.fit_loop.epoch_loop.scheduler_progress
    for number in rates.due_schedule_steps(waiting_for_metric=waiting_for_metric):
        for config in trainer.lr_scheduler_configs:
            is_other = config.interval != "step" or config.reduce_on_plateau != waiting_for_metric
            if is_other or number % config.frequency:
                continue
            metric = trainer.callback_metrics.get(config.monitor) if config.monitor and waiting_for_metric else None
            if metric is None and waiting_for_metric:
                if config.strict:
                    raise ConfigError(
                        f"a scheduler waits for the metric {config.monitor!r}, which was not logged; there are "
                        f"{', '.join(trainer.callback_metrics) or 'none'}."
                    )
                continue
            progress.increment_ready()
            module.lr_scheduler_step(config.scheduler, metric)
            progress.increment_completed()


class TrainerAveraging:
    """Passes a Trainer's micro-steps to the averaging that its `ElasticTraining` needs."""

    def __init__(
        self,
        trainer: Trainer,
        options: ElasticTraining,
        averaging: GradAveraging,
    ) -> None:
        self._trainer = trainer
        self._options = options
        self._averaging = averaging
        self._loss = torch.zeros(())

    @classmethod
    def of(
        cls, trainer: Trainer, module: nn.Module, mesh: DeviceMesh, options: ElasticTraining
    ) -> "TrainerAveraging | None":
        """Return the averaging that these options need; None if FSDP2 averages.

        Raises:
            ConfigError: FSDP2 averages over replicas, but the options do not allow it.
        """
        if options.reproducible:
            assert options.split is not None
            return cls(trainer, options, FixedOrderAveraging(module, mesh, options.split.num_logical_shards))
        return cls(trainer, options, NoiseMeasuringAveraging(module, mesh)) if options.rates.rule.is_adascale else None

    def computed(self, output: Any) -> None:
        """Note the loss that `training_step` returned."""
        loss = output["loss"] if isinstance(output, dict) else output
        self._loss = loss.detach().clone() if isinstance(loss, Tensor) else torch.zeros(())

    def add(self, loss: Tensor, backward: Callable[[Tensor], Tensor], batch_index: int) -> Tensor:
        """Run a backward; after the last one of a step, leave the step's mean as the gradients.

        Lightning has divided the loss by the number of micro-steps. Where it must not be, it is multiplied by that
        number again, so that its gradient is exactly 1.

        Args:
            loss: of a micro-batch, as divided by Lightning, weighted.
            backward: computes the gradients of such a loss.
            batch_index: number of the batch in the epoch.
        """
        trainer = self._trainer
        count, loop = trainer.accumulate_grad_batches, trainer.fit_loop.epoch_loop
        result = backward(loss if self._averaging.divides_loss else loss * count)
        micro_step = RankMicroStep(
            index=batch_index % count,
            count=count,
            is_last=batch_index == loop.batch_idx and not loop._should_accumulate(),
            weight=sample_weight_of(trainer, batch_index),
        )
        self._averaging.add(micro_step, self._loss)
        return result

    def committed(self) -> None:
        """Publish `ElasticTraining.step_loss`, or the noise of the step's gradients, when the step is committed."""
        averaging = self._averaging
        if isinstance(averaging, FixedOrderAveraging):
            self._options.step_loss = averaging.mean_loss
        elif averaging.compared is not None:
            self._options.rates.noise = GradientNoise.of_table(
                averaging.compared.table.tolist(), averaging.compared.num_micro_steps, averaging.data_ranks_per_replica
            )
