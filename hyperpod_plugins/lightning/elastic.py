"""What a user may choose about a job that changes its size, and what a Trainer does when it has another one."""

# Lightning's loops have no public spelling.
# pyright: reportPrivateUsage=false

from dataclasses import dataclass, replace
from typing import Any

from hyperpod_plugins.elastic import Ledger
from hyperpod_plugins.elastic.joining import Terms, leave_terms, terms_of
from hyperpod_plugins.elastic.policy import ElasticPolicy
from hyperpod_plugins.elastic.rescale import plan_batch
from hyperpod_plugins.elastic.signals import ignore_notices
from hyperpod_plugins.env import JobEnv
from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.lightning.datamodule import TrainerLoader
from hyperpod_plugins.lightning.flavour import Callback, Trainer
from hyperpod_plugins.observability import Event, record
from hyperpod_plugins.parallel import ParallelConfig, Topology
from hyperpod_plugins.recovery import Repair


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize:
    """A change of the number of replicas, as a process saw it that was there before."""

    cause: str
    """Why, in words."""
    step: int
    """Steps committed by then."""
    num_replicas: int
    """Replicas from now on."""
    took_s: float
    """From the word for it, or from the loss that led to it, until the next step could begin; in seconds."""


class ElasticTraining(Callback):
    """Let the job grow and shrink by whole replicas while it runs; every optimizer step keeps its global batch.

    Needs `hyperpodrun` or `torchrun --rdzv-backend=hyperpod`, with `--nnodes=MIN:MAX`, and loaders that count their
    position in samples: a `TokenDataModule`, or a `TrainerLoader` over an `ElasticSampler`. The Trainer's
    `accumulate_grad_batches` follows from the sizes below, whatever it was.

    Args:
        global_batch_size: samples of one optimizer step, over all ranks; the same for every number of replicas.
        micro_batch_size: most samples of one rank in one forward and backward pass.
        policy: limits on the number of replicas, and how soon it changes. Default: any number.
        **limits: fields of `ElasticPolicy`, instead of `policy`.

    Attributes:
        resizes: every change that this process has lived through, in order.

    Raises:
        ConfigError: impossible limits or sizes.
    """

    def __init__(
        self, *, global_batch_size: int, micro_batch_size: int, policy: ElasticPolicy | None = None, **limits: Any
    ) -> None:
        if policy is not None and limits:
            raise ConfigError(f"give ElasticTraining a policy, or limits ({', '.join(limits)}), not both.")
        if min(global_batch_size, micro_batch_size) < 1:
            raise ConfigError(
                f"global_batch_size and micro_batch_size must be at least 1, but are {global_batch_size} and "
                f"{micro_batch_size}."
            )
        limits = {"max_replicas": global_batch_size} | limits
        try:
            self.policy = policy or ElasticPolicy(**limits)
        except TypeError as error:
            raise ConfigError(f"ElasticTraining: {error}. See ElasticPolicy for the limits there are.") from None
        if JobEnv.from_environ() is not None:
            ignore_notices()  # now, for model and data may take long to set up
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size
        self.resizes: list[Resize] = []


class Elasticity:
    """`ElasticTraining` at work in one process."""

    def __init__(self, options: ElasticTraining, ledger: Ledger) -> None:
        self._options = options
        self._ledger = ledger
        known = terms_of(ledger)
        self.replica_size = 0 if known is None else known.replica_size
        """Ranks of one replica; 0 until the first world has been laid out."""
        self._topology: Topology | None = None

    def lay_out(self, config: ParallelConfig, world_size: int, ranks_per_node: int, trainer: Trainer) -> Topology:
        """The degrees in a world, and the shares of the global batch; within a replica nothing ever changes.

        Raises:
            DegreeError: the world does not consist of whole replicas.
            ConfigError: the batch cannot be shared out, or the world is smaller or larger than the limits allow.
        """
        options = self._options
        first = config.topology(self.replica_size or world_size, ranks_per_node=ranks_per_node)
        topology = replace(first, world_size=world_size)
        self.replica_size, self._topology = topology.shard_degree * topology.tensor_degree, topology
        if topology.replicate_degree not in self._sizes(topology):
            raise ConfigError(
                f"the job has {topology.replicate_degree} replicas of {self.replica_size} ranks, and ElasticTraining "
                f"allows {list(self._sizes(topology))}. Start another number of processes, or change its limits."
            )
        split = plan_batch(options.global_batch_size, topology.data_degree, options.micro_batch_size)
        trainer.accumulate_grad_batches = split.micro_steps
        return topology

    def open(self, trainer: Trainer) -> None:
        """Let others come in from now on.

        Raises:
            ConfigError: a loader counts its position in batches, which are others in a world of another size.
        """
        assert self._topology is not None
        combined = trainer.fit_loop._combined_loader
        for loader in [] if combined is None else combined.flattened:
            split = loader.batch_sampler.split if isinstance(loader, TrainerLoader) else None
            if split is None or split.global_batch_size != self._options.global_batch_size:
                what = type(loader).__name__ if split is None else f"a global batch of {split.global_batch_size}"
                raise ConfigError(
                    "ElasticTraining needs train loaders that count their position in samples, with its own global "
                    f"batch of {self._options.global_batch_size}, but found {what}. Use a TokenDataModule, or return a "
                    "TrainerLoader over an ElasticSampler from train_dataloader."
                )
        sizes = self._sizes(self._topology)
        leave_terms(self._ledger, Terms(policy=self._options.policy, replica_size=self.replica_size, sizes=sizes))

    def resized(self, cause: str, repair: Repair) -> None:
        """Write down that the job goes on with another number of replicas."""
        assert self._topology is not None
        now = self._topology.replicate_degree
        self._options.resizes.append(Resize(cause=cause, step=repair.step, num_replicas=now, took_s=repair.total_s))
        record(
            Event(
                name="elastic.resize",
                at_s=repair.incident.at_s,
                duration_s=repair.total_s,
                details={"cause": cause, "step": repair.step, "replicas": now},
            )
        )

    def _sizes(self, topology: Topology) -> tuple[int, ...]:
        options = self._options
        return options.policy.serving(
            global_batch_size=options.global_batch_size,
            ranks_per_replica=topology.shard_degree,
            max_micro_batch=options.micro_batch_size,
        )
