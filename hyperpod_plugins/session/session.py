"""What a loop written by hand needs of a job: groups, mesh, steps that survive faults, and worlds of any size."""

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from hyperpod_plugins.comm import CommOptions, group_health
from hyperpod_plugins.data import StatefulLoader
from hyperpod_plugins.elastic.launcher.signal_queue import ignore_notices
from hyperpod_plugins.elastic.membership.elastic_spec import ElasticSpec, publish_elastic_spec
from hyperpod_plugins.elastic.scaling.batch import StepBatch
from hyperpod_plugins.elastic.scaling.policy import ElasticPolicy
from hyperpod_plugins.env import JobEnv, WorkerEnv, config_path
from hyperpod_plugins.errors import CheckpointError, ConfigError, LoopError
from hyperpod_plugins.parallel import ParallelConfig, Topology, parallelize
from hyperpod_plugins.parallel.collective_errors import any_rank, default_group
from hyperpod_plugins.parallel.finite import FiniteCheck, NonFinitePolicy
from hyperpod_plugins.parallel.former_parameters import give_shards
from hyperpod_plugins.parallel.hsdp import sharded_parts
from hyperpod_plugins.parallel.unit_watch import watch_units
from hyperpod_plugins.recovery import RecoveryOptions, Repair
from hyperpod_plugins.recovery.entries import Entries, keep_of_rank, read_of_rank, state_folder
from hyperpod_plugins.recovery.local_state import ProgramState
from hyperpod_plugins.recovery.rng import END, seed_micro_step
from hyperpod_plugins.session.context import LoopContext, become_member
from hyperpod_plugins.session.loader import LoopData
from hyperpod_plugins.session.loop import Computation, Extent, Loop
from hyperpod_plugins.session.state import Position, TrainedState
from hyperpod_plugins.session.step import Step
from hyperpod_plugins.session.transaction import Transactions


class Session:
    """This process in a job, for a loop written by hand.

        session = Session(hybrid_shard_degree=2, global_batch_size=64)
        model = session.parallelize(build_model())
        optimizer = torch.optim.AdamW(model.parameters())
        session.train(model, optimizer)
        for step in session.steps(loader, epochs=2):
            with step:
                loss = step.run(lambda batch: model(**batch).loss)

    Make it first: it joins the process group. Under `hyperpodrun` lost processes are replaced, and with `elastic` the
    job changes its size; without an agent the same program runs as it is.

    Args:
        config: degrees, as for `HyperPodStrategy`: a `ParallelConfig`, a dict, or the path of an SMP v2 JSON file.
        global_batch_size: samples of one optimizer step, over all ranks; 0 for the loader's `batch_size` on each
            data-parallel rank of the first world.
        recovery: how faults are repaired.
        elastic: for a job that grows and shrinks: limits on the number of replicas, or True for as many as the batch
            has samples.
        comm: collective library to use, and whether a fallback is allowed.
        checkpoint_folder: where the checkpoint of an emergency goes.
        timeout_s: seconds after which a collective that does not complete fails.
        **options: fields of `ParallelConfig`; they win over `config`.

    Attributes:
        state: what the loop itself keeps and a replacement needs: plain values, the same on all ranks.
        repairs: every fault that this process has seen repaired, in order.

    Raises:
        ConfigError: unknown options, impossible values or combinations.
    """

    def __init__(
        self,
        config: ParallelConfig | Mapping[str, Any] | str | Path | None = None,
        *,
        global_batch_size: int = 0,
        recovery: RecoveryOptions | None = None,
        elastic: ElasticPolicy | bool = False,
        comm: CommOptions | None = None,
        checkpoint_folder: str | Path = "checkpoints",
        timeout_s: float = 1800.0,
        **options: Any,
    ) -> None:
        self.config = ParallelConfig.of(config_path() if config is None else config, **options)
        self._recovery = recovery or RecoveryOptions()
        if elastic and not (self._recovery.enabled and global_batch_size):
            raise ConfigError(
                "a Session with `elastic` needs global_batch_size, which stays the same in every world, and recovery: "
                "leave out RecoveryOptions(enabled=False)."
            )
        env, job = WorkerEnv.from_environ(), JobEnv.from_environ() if self._recovery.enabled else None
        if job is not None and elastic:
            ignore_notices()  # now, for model and data may take long to set up
        if elastic is True:
            elastic = ElasticPolicy(max_replicas=global_batch_size)
        self._elastic = None if job is None else elastic or None
        self._member = None if job is None else become_member(job, env, self._recovery, is_elastic=bool(elastic))
        self._context = LoopContext(
            self.config, env, self._member, self._recovery, comm=comm or CommOptions(), timeout_s=timeout_s
        )
        self._global_batch_size = global_batch_size
        self._folder = Path(checkpoint_folder)
        self._trained: TrainedState | None = None
        self._computation: Computation | None = None
        self._finite: FiniteCheck | None = None
        self._transactions: Transactions | None = None
        self._begins_at = Position()
        self._num_agreed = 0
        self._entries = Entries()
        self._place = env.global_rank
        self.state: dict[str, Any] = {}
        self.repairs: list[Repair] = []

    # -- who and where ------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Rank in the present world."""
        return self._context.rank

    @property
    def world_size(self) -> int:
        """Size of the present world."""
        return self._context.world_size

    @property
    def device(self) -> torch.device:
        """Of this rank."""
        return self._context.device

    @property
    def topology(self) -> Topology:
        """Degrees and rank arithmetic of the present world."""
        return self._context.topology

    @property
    def mesh(self) -> DeviceMesh:
        """`("replicate", "shard", "tensor")`."""
        return self._context.mesh

    def when_moved(self, listener: Callable[[], object]) -> None:
        """Call `listener()` each time that the job has got another size: rank, world size and topology are others."""
        self._context.when_moved.append(listener)

    # -- setting up ---------------------------------------------------------------------------------------------

    def parallelize(self, model: nn.Module) -> nn.Module:
        """Shard a model over the mesh, in place; see `hyperpod_plugins.parallel.parallelize`."""
        return parallelize(model, self.mesh, self.config).to(self.device)

    def train(
        self,
        model: nn.Module,
        optimizers: Optimizer | Sequence[Optimizer],
        schedulers: LRScheduler | Sequence[LRScheduler] = (),
        *,
        backward: Callable[[Tensor], object] = Tensor.backward,
        max_grad_norm: float = 0.0,
        non_finite: NonFinitePolicy = "auto",
    ) -> None:
        """Say what the steps train. Each step is one step of every optimizer and of every scheduler.

        Args:
            model: sharded, by `parallelize` or in another way over `mesh`.
            optimizers: one or several of torch's, over its parameters; those that were made before it was sharded
                get the shards.
            schedulers: of them.
            backward: computes the gradients of a loss, such as `accelerator.backward`.
            max_grad_norm: largest norm of all gradients as one vector; 0 for no limit.
            non_finite: what to do about a step whose loss, or gradient norm where it is limited, is infinite or not a
                number: "stop" raises `NonFiniteError` on all ranks, with nothing updated; "skip" leaves the step out;
                "warn" goes on; "off" does not look. "auto" is "stop", but "off" on CUDA without recovery, where the
                host would have to wait for the device.

        Raises:
            ConfigError: the model is not sharded, so that ranks would train models of their own; an optimizer holds
                parameters that are not the model's; there is no such policy.
        """
        waits_anyway = self._member is not None or self.device.type == "cpu"
        self._finite = FiniteCheck(non_finite, waits_anyway=waits_anyway)
        if self.world_size > 1 and not any(True for _ in sharded_parts(model)):
            raise ConfigError(
                f"the model {type(model).__name__} is not sharded, so that each of {self.world_size} ranks would train "
                "one of its own. Use model = session.parallelize(model) first."
            )
        give_shards(_listed(optimizers), model, num_ranks=self.world_size)
        watch_units(model)
        self._trained = TrainedState(
            model,
            _listed(optimizers),
            _listed(schedulers),
            state=self.state,
            verify=self._recovery.verify,
            folder=self._folder,
            tensor_degree=self._context.topology.tensor_degree,
        )
        self._computation = Computation(
            model=model,
            config=self.config,
            backward=backward,
            max_grad_norm=max_grad_norm,
            is_step_keyed=self._recovery.step_keyed_random and self._member is not None,
        )
        member = self._member if self._transactions is None else self._transactions.member  # None once it has left
        self._transactions = Transactions(member, self._context, self._trained, self._recovery, self.repairs)

    def register_rank_local(self, name: str, stateful: Stateful) -> None:
        """Keep the state of an object that differs from rank to rank: it comes back where a process is replaced.

        Call it on all ranks alike, after `train` and before `steps`. The state is called for in each step: it is to be
        small, less than 1 MiB a rank with that of others. It is put back where a step is run again. Buffers of the
        model need no call. A checkpoint of `save` holds it for a job of as many ranks with the same tensor degree.

        Args:
            name: of the state, the same on all ranks; the last object of a name counts.
            stateful: with `state_dict` and `load_state_dict`; the state is of tensors, plain containers, numbers and
                strings, and made without communication.

        Raises:
            ConfigError: the state holds other Python objects.
            LoopError: `train` was not called.
        """
        trained, _ = self._trains()
        trained.register(name, ProgramState(name, stateful))

    def agree(self, value: Any) -> Any:
        """The value of rank 0, on all ranks, before the first step: a folder's name, the id of a run.

        A process that comes later gets what was agreed on then. Plain values and tensors only.
        """
        member, name = self._member, f"agreed/{self._num_agreed}"
        self._num_agreed += 1
        data = b""
        if group_health.is_open and member is not None:
            data = member.job_store.try_get(name) or _packed(value)
            return _unpacked(data)
        size = torch.zeros(1, dtype=torch.int64, device=self.device)
        if self.rank == 0:
            data = _packed(value)
            size.fill_(len(data))
            if member is not None:
                member.job_store.set(name, data)
        dist.broadcast(size, src=0)
        payload = torch.empty(int(size), dtype=torch.uint8)
        if self.rank == 0:
            payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        payload = payload.to(self.device)
        dist.broadcast(payload, src=0)
        return _unpacked(payload.cpu().numpy().tobytes())

    # -- checkpoints --------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write a checkpoint of any later degrees, a folder, on all ranks together; in a body after `step.run`.

        A loop that goes on from it begins with the next step: what the body does after saving is not repeated.

        Raises:
            CheckpointError: it could not be written.
        """
        trained, transactions = self._trains()
        position = replace(trained.position(), in_tail=False, result=None)
        trained.write(path, position)
        if transactions.saved is not None:
            transactions.saved.add(str(Path(path).absolute()), position.committed)

    def load(self, path: str | Path) -> None:
        """Go on from a checkpoint, on all ranks together, before the first step.

        In a process that comes later this does nothing: it gets its state from the others.

        Raises:
            CheckpointDamaged: no checkpoint, an interrupted or a foreign one.
            CheckpointMismatch: a checkpoint of another model or other optimizers.
        """
        trained, transactions = self._trains()
        if not transactions.is_joining:
            self._begins_at = trained.read(path, is_of_another_job=True)

    def _keep_end(self, trained: TrainedState) -> None:
        """Keep the state after a loop, on all ranks together, so that no process has to run it again."""
        entries = self._entries
        try:
            folder = entries.folder(self._folder)
            trained.write(state_folder(folder, entries.number), replace(trained.position(), in_tail=False, result=None))
            keep_of_rank(folder, entries.number, self._place, {})
        except (CheckpointError, ConfigError, OSError) as error:
            entries.lose(error)
        if any_rank(not entries.is_complete, default_group()):
            if entries.is_complete:
                entries.lose("another rank could not keep its part; see its log")
        else:
            entries.record("steps", None)

    def _pass(self, trained: TrainedState) -> None:
        """Bring back the state after a loop that has ended."""
        folder = self._entries.folder(self._folder)
        trained.read(state_folder(folder, self._entries.number))
        _, set_random_state = read_of_rank(folder, self._entries.number, self._place)
        set_random_state()

    # -- steps --------------------------------------------------------------------------------------------------

    def steps(self, loader: DataLoader[Any], *, epochs: int = 1, max_steps: int = 0) -> Iterator[Step]:
        """The steps of the job; each is to be used as `with step:`.

        What the body does after `step.run` is repeated on all ranks if a fault comes in it. It may communicate
        (validate, save), and what it keeps for later belongs into `session.state`.

        Args:
            loader: over a map-style dataset; its `batch_size` is the most samples of one rank in one forward and
                backward pass. Ranks get their own parts, in the order that the seed of the configuration gives; each
                sample comes once an epoch, whatever happens.
            epochs: how many.
            max_steps: steps at most, those before a checkpoint included; 0 for no limit.

        Raises:
            LoopError: `train` was not called, or the body does not use its step.
            ConfigError: the loader cannot be continued by another process, or the batch not be spread.
        """
        trained, transactions = self._trains()
        assert self._computation is not None
        data = LoopData(loader, seed=self.config.random_seed)
        batch = StepBatch(
            global_batch_size=self._global_batch_size or data.micro_batch_size * self.topology.data_degree,
            micro_batch_size=data.micro_batch_size,
        )
        if self._elastic is not None:
            self._open(batch, self._elastic)

        def spread() -> StatefulLoader:
            topology = self.topology
            split = batch.split(topology.replicate_degree, topology.shard_degree)
            return data.spread(split, topology.data_rank(self.rank))

        extent = Extent(num_epochs=epochs, max_steps=max_steps)
        assert self._finite is not None
        loop = Loop(self._context, trained, self._computation, transactions, spread, extent, self._finite)
        return self._run(loop, trained, transactions)

    def _run(self, loop: Loop, trained: TrainedState, transactions: Transactions) -> Iterator[Step]:
        """The steps of a loop, unless it has ended before; in a job that recovers it is an entry of the program."""
        begins_at, self._begins_at = self._begins_at, Position()
        job = None if self._member is None else self._member.job
        if job is None:
            yield from loop.run(begins_at)
            return
        entries, is_over = self._entries, False
        entries.member = member = transactions.member
        with entries.enter(job, "steps") as record:
            resumed_from = entries.resume_from("steps")
            if record is not None:
                self._pass(trained)
                return
            if resumed_from and not transactions.is_joining:
                begins_at = trained.read(resumed_from)
            transactions.enter(entries.number, is_complete=entries.is_complete)
            try:
                yield from loop.run(begins_at, resumed_from)
                if self._recovery.step_keyed_random:
                    seed_micro_step(self.config.random_seed, 0, entries.number, self.topology.data_rank(self.rank), END)
                if member is None or member.is_elastic or job.agent_pid:
                    entries.is_complete = False
                else:
                    self._keep_end(trained)
                is_over = True
            finally:
                if not is_over:
                    entries.lose("its loop was left before its end")

    def _open(self, batch: StepBatch, policy: ElasticPolicy) -> None:
        """Let others come in from now on.

        Raises:
            ConfigError: the world is smaller or larger than the limits allow.
        """
        assert self._member is not None
        sizes = batch.serving(policy, self.topology.shard_degree)
        if self.topology.replicate_degree not in sizes:
            raise ConfigError(
                f"the job has {self.topology.replicate_degree} replicas of {self._context.replica_size} ranks, and "
                f"`elastic` allows {list(sizes)}. Start another number of processes, or change its limits."
            )
        if not self._member.is_joining:
            publish_elastic_spec(
                self._member.job_store, ElasticSpec(policy=policy, replica_size=self._context.replica_size, sizes=sizes)
            )

    def _trains(self) -> tuple[TrainedState, Transactions]:
        if self._trained is None or self._transactions is None:
            raise LoopError("say what is trained first: session.train(model, optimizer, scheduler)")
        return self._trained, self._transactions


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, Sequence) else [given]


def _packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpacked(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)
