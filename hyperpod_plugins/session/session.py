"""`Session`: process groups, mesh and fault-tolerant steps for a custom training loop, in a world of any size."""

import io
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
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
from hyperpod_plugins.comm.groups import default_group
from hyperpod_plugins.comm.health import Phase
from hyperpod_plugins.data import BatchSplit, StatefulLoader
from hyperpod_plugins.data.loader import MapStyleData
from hyperpod_plugins.delayed_init.api import delay_transformers
from hyperpod_plugins.elastic import JobStore
from hyperpod_plugins.elastic.launcher.signal_queue import ignore_notices
from hyperpod_plugins.elastic.membership.elastic_spec import ElasticPolicy, ElasticSpec, elastic_spec_of
from hyperpod_plugins.elastic.scaling.batch import StepBatch, refuse_reproducible
from hyperpod_plugins.elastic.scaling.lr_scaling import (
    LearningRates,
    LRScaling,
    LRScalingRule,
    find_reference,
    publish_reference,
    warn_of_adaptive,
)
from hyperpod_plugins.env import JobEnv, WorkerEnv, config_path
from hyperpod_plugins.errors import CheckpointError, ConfigError, LoopError, StateLost
from hyperpod_plugins.parallel import ParallelConfig, Topology, parallelize
from hyperpod_plugins.parallel.checkpoint.files import any_rank
from hyperpod_plugins.parallel.config import INSIDE_SHARD_AXIS, refuse_degrees
from hyperpod_plugins.parallel.finite import FiniteCheck, NonFinitePolicy
from hyperpod_plugins.parallel.former_parameters import replace_stale_parameters, succeed_parameters
from hyperpod_plugins.parallel.hsdp import reshard_after_evaluations, shards_stay_on_host
from hyperpod_plugins.parallel.replica_mean import (
    FixedOrderAveraging,
    GradAveraging,
    NoiseMeasuringAveraging,
)
from hyperpod_plugins.parallel.unit_watch import reshard_gathered, watch_units
from hyperpod_plugins.recovery import NO_STATE, Member, NullMember, RecoveryOptions, Repair
from hyperpod_plugins.recovery.config import WITHOUT_AGENT, log_once
from hyperpod_plugins.recovery.degrees import (
    as_degrees,
    form_initial_world,
    layouts_of,
    with_degrees,
)
from hyperpod_plugins.recovery.engine import join_job
from hyperpod_plugins.recovery.entries import Entries, load_entry_values, save_entry_values, state_folder
from hyperpod_plugins.recovery.local_objects import ProgramState, is_metric
from hyperpod_plugins.recovery.packing import on_own_device
from hyperpod_plugins.recovery.rehearsal_jobs import RehearsedCall
from hyperpod_plugins.recovery.rng import TRAINING_END, seed_micro_step
from hyperpod_plugins.recovery.state_digests import state_digests
from hyperpod_plugins.session.loop import Loop, LoopLimits, StepComputation
from hyperpod_plugins.session.loop_context import LoopContext
from hyperpod_plugins.session.manual_optimization import EqualShares, refuse_session_options, refuse_train_options
from hyperpod_plugins.session.program_checks import (
    check_trained,
    optimizer_of,
    refuse_other_models,
    refuse_own_schedules,
    refuse_unknown_schedulers,
)
from hyperpod_plugins.session.state import Position, SessionState
from hyperpod_plugins.session.step import Step
from hyperpod_plugins.session.transaction import PlainSteps, Transactions

_NOT_KNOWN = Position(committed=NO_STATE)
"""Where a joiner does not know from where its predecessor began, because it does not read the checkpoint."""

_MICRO_BATCH_KEY = "session/micro_batch_size"


class Session:
    """This process's part in a job, for a custom training loop.

        session = Session(hybrid_shard_degree=2, global_batch_size=64)
        model = session.parallelize(build_model())
        optimizer = torch.optim.AdamW(model.parameters())
        session.train(model, optimizer)
        for step in session.steps(loader, epochs=2):
            with step:
                loss = step.run(lambda batch: model(**batch).loss)

    Create it first: it joins the process group. Under `hyperpodrun`, lost processes are replaced, and with `elastic`
    the job can grow and shrink; without an agent, the same program runs unchanged.

    Args:
        config: parallel degrees, as for `HyperPodStrategy`: a `ParallelConfig`, a dict, or the path of an SMP v2 JSON
            file. Default: the file named by `HYPERPOD_CONFIG`, else hybrid sharding over all ranks.
        global_batch_size: number of samples per optimizer step, over all ranks; 0 for the loader's `batch_size` on
            each data-parallel rank of the initial world.
        samples_per_replica: number of samples per optimizer step for each replica, instead of `global_batch_size`: the
            batch follows the world, and schedulers step once for each reference batch.
        lr_scaling: how the learning rate follows such a batch: `"none"`, `"linear"`, `"sqrt"`, `"adascale"`, a
            function of batch / reference batch, or an `LRScalingRule` with further options.
        reproducible: get bitwise identical results whatever the number of replicas, and however often it changes.
            Needs `elastic`, whose limits determine how a step is split; an agent is not needed.
        recovery: options of fault recovery.
        elastic: lets the job grow and shrink: limits on the number of replicas, or True for as many replicas as
            `global_batch_size` has samples.
        shard_degrees: with `elastic`, shard degrees that the job may have besides that of the configuration. If too
            few ranks are left for a replica, all processes restart with degrees that fit; `hyperpod scale
            --shard-degree` requests the same. Without an agent it has no effect.
        tensor_degrees: the same for tensor degrees.
        comm: collective library to use, and whether a fallback is allowed.
        checkpoint_folder: folder for checkpoints that are written before the job ends (`emergency-step=N`) or restarts
            with other degrees (`reshard-step=N`); the same on all ranks, on a file system that all nodes can read.
        timeout_s: seconds after which a collective that does not complete fails.
        **options: fields of `ParallelConfig`; they override those of `config`.

    Attributes:
        state: the loop's own state that a replacement needs: plain values, the same on all ranks.
        repairs: the faults that this process has seen repaired, in order.

    Raises:
        ConfigError: unknown options, invalid values or combinations.
        DegreeError: a degree is not a whole number, or the processes form no replica with any of the allowed degrees.
        SystemExit: this process is left over after whole replicas have been formed.
    """

    def __init__(
        self,
        config: ParallelConfig | Mapping[str, Any] | str | Path | None = None,
        *,
        global_batch_size: int = 0,
        samples_per_replica: int = 0,
        lr_scaling: LRScaling | LRScalingRule = "none",
        reproducible: bool = False,
        recovery: RecoveryOptions | None = None,
        elastic: ElasticPolicy | bool = False,
        shard_degrees: Sequence[int] = (),
        tensor_degrees: Sequence[int] = (),
        comm: CommOptions | None = None,
        checkpoint_folder: str | Path = "checkpoints",
        timeout_s: float = 1800.0,
        **options: Any,
    ) -> None:
        self.config = ParallelConfig.of(config_path() if config is None else config, **options)
        if self.config.delayed_init:
            delay_transformers()
        self._recovery = recovery or RecoveryOptions()
        self._rule = lr_scaling if isinstance(lr_scaling, LRScalingRule) else LRScalingRule(scaling=lr_scaling)
        self._rule.check_batch(follows_world=samples_per_replica > 0)
        _check_batch(global_batch_size, samples_per_replica, elastic=elastic, reproducible=reproducible)
        if reproducible or self._rule.is_adascale:
            refuse_degrees(self.config, ["context_parallel_degree"], "reproducible=True and AdaScale")
        if elastic and not self._recovery.enabled:
            raise ConfigError("a Session with `elastic` needs recovery: leave out RecoveryOptions(enabled=False).")
        env, job = WorkerEnv.from_environ(), JobEnv.from_environ() if self._recovery.enabled else None
        if job is not None and elastic:
            ignore_notices()  # already now, because setting up model and data may take long
        if elastic is True:
            elastic = ElasticPolicy(max_replicas=global_batch_size)
        self._policy = elastic or None
        self._degrees = as_degrees(shard_degrees, tensor_degrees, reproducible=reproducible)
        if any(self._degrees):
            refuse_degrees(self.config, INSIDE_SHARD_AXIS, "shard_degrees and tensor_degrees")
        if any(self._degrees) and not elastic:
            raise ConfigError("shard_degrees and tensor_degrees need `elastic`: without it a job keeps its processes.")
        self._member: Member | NullMember = NullMember(env.global_rank, env.world_size)
        if job is not None:
            self._member = self._join(job, env, global_batch_size, samples_per_replica)
        elif self._recovery.enabled and env.world_size > 1 and env.global_rank == 0:
            log_once(WITHOUT_AGENT)
        self._context = LoopContext(
            self.config, env, self._member, self._recovery, comm=comm or CommOptions(), timeout_s=timeout_s
        )
        self._global_batch_size = global_batch_size
        self._samples_per_replica = samples_per_replica
        self._reproducible = reproducible
        self._folder = Path(checkpoint_folder)
        self._trained: SessionState | None = None
        self._sharded: list[weakref.ref[nn.Module]] = []
        """The models that `parallelize` has sharded."""
        self._scheduled: list[weakref.ref[Optimizer]] = []
        """The optimizers whose schedulers `train` was ever given."""
        self._computation: StepComputation | None = None
        self._finite: FiniteCheck | None = None
        self._transactions: PlainSteps | None = None
        self._begins_at = Position()
        self._left = PlainSteps()
        """The steps of the last loop that was left."""
        self._num_agreed = 0
        self._entries = Entries()
        self._worker_id = env.global_rank
        self.state: dict[str, Any] = {}
        self.repairs: list[Repair] = []

    def _join(self, job: JobEnv, env: WorkerEnv, global_batch_size: int, samples_per_replica: int) -> Member:
        """Make this process a member of the job, and set the degrees of the job in the configuration."""
        options, self._given_config, world_size = None, self.config, env.world_size
        if self._policy is not None and any(self._degrees):
            batch = StepBatch(
                global_batch_size=global_batch_size,
                samples_per_replica=samples_per_replica,
                micro_batch_size=_former_micro_batch_size(job) or global_batch_size or samples_per_replica,
            )
            options = _Degrees(*self._degrees, self._policy, batch)
            if not job.is_joining:
                world_size = form_initial_world(
                    options,
                    self.config,
                    job,
                    worker_id=env.global_rank,
                    world_size=world_size,
                    ranks_per_node=env.local_world_size,
                )
        member = join_job(
            job,
            self._recovery,
            worker_id=env.global_rank,
            world_size=world_size,
            is_elastic=self._policy is not None,
        )
        if options is not None:
            layouts = layouts_of(options, self.config, env.local_world_size)
            known = elastic_spec_of(member.job_store)
            self.config = with_degrees(self.config, known, layouts, member.world.size)
        return member

    # -- rank, device, topology ---------------------------------------------------------------------------------

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
        """Device of this rank."""
        return self._context.device

    @property
    def topology(self) -> Topology:
        """Degrees and rank arithmetic of the present world."""
        return self._context.topology

    @property
    def mesh(self) -> DeviceMesh:
        """Mesh of the present world, with axes `("replicate", "shard", "tensor")`."""
        return self._context.mesh

    def when_moved(self, listener: Callable[[], object]) -> None:
        """Call `listener()` each time the job changes its size, after rank, world size and topology are updated."""
        self._context.when_moved.append(listener)

    def when_body_begins(self, listener: Callable[[], object]) -> None:
        """Call `listener()` on each rank as the body of a step begins, or begins again after a fault."""
        self._context.when_body_begins.append(listener)

    def reach(self, phase: str) -> None:
        """Let a fault happen in a phase of a body, in a job of `hyperpod rehearse`; elsewhere this does nothing."""
        if self._trained is not None and self._transactions is not None:
            rehearsal = self._transactions.rehearsal
            if rehearsal is not None:
                rehearsal.at(phase, self._trained.get_position().committed)

    @property
    def has_recovery(self) -> bool:
        """Whether lost processes are to be replaced, under an agent."""
        return self._recovery.enabled

    @property
    def lr_factor(self) -> float:
        """Factor of the next step's learning rate if the batch follows the world, else 1; schedulers see the base rate.

        With AdaScale it is the gain of the last step, because that of the next one is not known yet.
        """
        rates = None if self._trained is None else self._trained.rates
        return 1.0 if rates is None else rates.factor

    @property
    def schedule_step(self) -> int:
        """Completed steps of the schedule if the batch follows the world, else 0; can serve as a stop condition."""
        rates = None if self._trained is None else self._trained.rates
        return 0 if rates is None else rates.schedule_step

    # -- setup --------------------------------------------------------------------------------------------------

    def parallelize(self, model: nn.Module) -> nn.Module:
        """Shard a model over the mesh, in place, and move it to the device; see `parallel.parallelize`."""
        averages_replicas = not (self._reproducible or self._rule.is_adascale)
        self._sharded.append(weakref.ref(model))
        parallelize(model, self.mesh, self.config, averages_replicas=averages_replicas)
        with shards_stay_on_host(model):
            return model.to(self.device)

    def train(
        self,
        model: nn.Module,
        optimizers: Optimizer | Sequence[Optimizer],
        schedulers: LRScheduler | Sequence[LRScheduler] = (),
        *,
        backward: Callable[[Tensor], object] = Tensor.backward,
        max_grad_norm: float = 0.0,
        non_finite: NonFinitePolicy = "auto",
        manual_optimization: bool = False,
    ) -> None:
        """Set what the steps train. In each step, every optimizer steps once, and so does every scheduler.

        If the batch follows the world, schedulers step once for each reference batch instead. With
        `manual_optimization`, the program steps optimizers and schedulers itself.

        Args:
            model: a model sharded by `parallelize`, or otherwise over `mesh`.
            optimizers: one or several torch optimizers of its parameters; if they were created before the model was
                sharded, they get the sharded parameters.
            schedulers: one or several schedulers of these optimizers.
            backward: computes the gradients of a loss, such as `accelerator.backward`.
            max_grad_norm: maximum norm of all gradients as one vector; 0 for no limit.
            non_finite: what to do if the loss of a step or a gradient is infinite or NaN. "stop" raises
                `NonFiniteError` on all ranks before parameters or optimizers are updated, "skip" skips the optimizer
                step, "warn" warns and continues, and "off" does not check. "auto" is "stop", except on CUDA without
                recovery, where the host would have to wait for the device; there it is "off".
            manual_optimization: let the function given to `Step.run` compute gradients and step optimizers and
                schedulers itself, in any order and any number of times. It is called once a step, with this rank's
                part of the global batch. What the optimizers write is copied on the device when a step begins, and
                restored after a fault. Excludes `backward`, `max_grad_norm` and `non_finite`.

        Raises:
            ConfigError: the model is not sharded, so each rank would train its own; its sequences or experts are
                divided in another way than the degrees say; a library has wrapped an optimizer or a scheduler; an
                optimizer holds parameters that are not the model's; an embedding computes sparse gradients; the model
                keeps parameters from before it was sharded in a tuple or a set; a scheduler waits for a metric; the
                policy is unknown; an option is not possible with manual optimization.
        """
        if manual_optimization:
            refuse_train_options(backward=backward, max_grad_norm=max_grad_norm, non_finite=non_finite)
            refuse_session_options(
                samples_per_replica=self._samples_per_replica,
                reproducible=self._reproducible,
                has_other_degrees=any(self._degrees),
            )
            non_finite = "off"
        waits_anyway = self._member.recovers or self.device.type == "cpu"
        self._finite = FiniteCheck(non_finite, waits_anyway=waits_anyway)
        check_trained(model, _listed(optimizers), _listed(schedulers), config=self.config, world_size=self.world_size)
        watch_units(model)
        reshard_gathered(model)  # by a forward before; the optimizer holds shards
        replace_stale_parameters(_listed(optimizers), model, num_ranks=self.world_size)
        succeed_parameters(model, is_by_program=True)
        reshard_after_evaluations(model)
        self._scheduled += [weakref.ref(optimizer) for optimizer in map(optimizer_of, _listed(schedulers)) if optimizer]
        self._trained = SessionState(
            model,
            _listed(optimizers),
            _listed(schedulers),
            state=self.state,
            verify=self._recovery.verify,
            folder=self._folder,
            degrees=self._context.topology.layout[1:],
            rates=LearningRates(rule=self._rule) if self._samples_per_replica else None,
            is_manual=manual_optimization,
        )
        self._computation = StepComputation(
            model=model,
            optimizers=_listed(optimizers),
            config=self.config,
            backward=backward,
            max_grad_norm=max_grad_norm,
            is_step_keyed=self._recovery.step_keyed_random and (self._member.recovers or self._reproducible),
            checks_gradients=self._finite.is_enabled,
        )
        self._trained.saving = self._context.saving_group
        has_left = self._transactions is not None and not self._transactions.recovers
        self._transactions = PlainSteps()
        if isinstance(self._member, Member) and not has_left:
            self._transactions = Transactions(self._member, self._context, self._trained, self._recovery, self.repairs)

    def register_rank_local(self, name: str, stateful: Stateful) -> None:
        """Register an object whose state differs between ranks, so that a replacement gets the lost rank's state.

        Call it on all ranks, after `train` and before `steps`. The state is read in each step, so it should be small:
        less than 1 MiB per rank in total. It is restored when a step is run again. Buffers of the model need not be
        registered. A rank by which the job grows begins with the state of the rank that sends it its parameters, but
        for a metric of torchmetrics, which begins anew. A checkpoint written by `save` holds the state. Where it is
        loaded by another number of ranks or with other degrees, only state that was equal on all ranks goes on.

        Args:
            name: name of the state, the same on all ranks; a later object with the same name replaces an earlier one.
            stateful: has `state_dict` and `load_state_dict`. The state consists of tensors, plain containers, numbers
                and strings, and `state_dict` must not communicate.

        Raises:
            ConfigError: the state holds other Python objects.
            LoopError: `train` was not called.
        """
        trained, _ = self._require_train()
        if is_metric(stateful) and not stateful.state_dict():
            raise ConfigError(
                f"the torchmetrics object {name!r} has an empty state_dict, so that a replacement would start it anew. "
                "Call its persistent(True) before it is registered."
            )
        trained.register(name, ProgramState(name, stateful))

    def restores(self, value: object) -> bool:
        """Whether a replacement gets the state of an object: one that `train` or `register_rank_local` was given."""
        trained, _ = self._require_train()
        registered = [state.stateful for state in trained.rank_local.values()]
        held = [*trained.model.modules(), *trained.optimizers, *trained.schedulers, *registered]
        return any(each is value for each in held)

    def agree(self, value: Any) -> Any:
        """Return rank 0's value on all ranks, such as the name of a folder or the id of a run.

        Call it on all ranks in the same order, before the first step. A joiner gets the value that was agreed on
        then; if there is none, all ranks restart from the last checkpoint. Only plain values and tensors are
        supported.

        Raises:
            PeerLost: a rank was lost.
            StateLost: the agents have not restarted a joiner that got no value.
        """
        name = ""
        if isinstance(self._member, Member) and not self._entries.is_inside:  # within a loop, a joiner has joined
            name = f"agreed/{self._num_agreed}"
            self._num_agreed += 1
            if group_health.phase is Phase.DETACHED:
                return self._agreed_before(self._member, name)
        with group_health.checks_host_read():
            return self._shared(value, name)

    def _shared(self, value: Any, name: str) -> Any:
        """Broadcast rank 0's value, and keep it for joiners under `name`, unless that is empty."""
        data = b""
        size = torch.zeros(1, dtype=torch.int64, device=self.device)
        if self.rank == 0:
            data = _packed(value)
            size.fill_(len(data))
            if name:
                self._member.job_store.set(name, data)
        dist.broadcast(size, src=0)
        payload = torch.empty(int(size), dtype=torch.uint8)
        if self.rank == 0:
            payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        payload = payload.to(self.device)
        dist.broadcast(payload, src=0)
        return _unpacked(payload.cpu().numpy().tobytes())

    def _agreed_before(self, member: Member, name: str) -> Any:
        """Return the value that the ranks agreed on before this process joined; without one, restart all of them."""
        data = member.job_store.try_get(name)
        if data is None:
            member.restart_all(
                StateLost(
                    f"a joiner has called session.agree {self._num_agreed} times, but the other ranks have agreed on "
                    f"{self._num_agreed - 1} values outside their loops. A program whose processes are replaced must "
                    "make the same calls in the same order each time that it runs."
                )
            )
        return _unpacked(data)

    # -- checkpoints --------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write a checkpoint, a folder that can be loaded with other degrees.

        Call it on all ranks, in the body of a step after `step.run`. A loop that resumes from it begins with the next
        step: the rest of the body after `save` is not repeated.

        Raises:
            CheckpointError: it could not be written.
        """
        trained, transactions = self._require_train()
        position = replace(trained.position(), after_commit=False, result=None, grad_norm=None)
        self.reach("checkpoint")
        trained.write(path, position)
        if transactions.saved is not None:
            transactions.saved.add(str(Path(path).absolute()), position.committed)

    def load(self, path: str | Path) -> None:
        """Resume from a checkpoint. Call it on all ranks, before the first step.

        In a joiner this does nothing, because it gets its state from the other ranks.

        Raises:
            CheckpointDamaged: there is no checkpoint, or it is incomplete or of a foreign format.
            CheckpointMismatch: the checkpoint is of another model or of other optimizers.
        """
        trained, transactions = self._require_train()
        if transactions.is_joining:
            self._begins_at = _NOT_KNOWN
        else:
            self._begins_at = trained.read(path, is_of_another_job=True)

    def _end_loop(self, trained: SessionState) -> None:
        """End a loop whose steps are all done. All ranks call this, again if a rank is lost meanwhile."""
        entries, rank = self._entries, self.topology.data_rank(self.rank)
        if self._transactions is not None and self._transactions.rehearsal is not None:
            self._transactions.rehearsal.end_call(trained.position().committed)
        if self._recovery.step_keyed_random:
            seed_micro_step(self.config.random_seed, 0, entries.number, rank, TRAINING_END)
        self._member.activity = "keeping the state after a loop"
        self._keep_end(trained)

    def _keep_end(self, trained: SessionState) -> None:
        """Keep the state after a loop, so that no process has to run the loop again. All ranks must call this.

        Raises:
            PeerLost: a rank was lost meanwhile.
        """
        entries, problem = self._entries, None
        try:
            folder = entries.folder(self._folder)
            trained.write(
                state_folder(folder, entries.number),
                replace(trained.position(), after_commit=False, result=None, grad_norm=None),
            )
            save_entry_values(folder, entries.number, self._worker_id, {})
        except (CheckpointError, ConfigError, OSError) as error:
            problem = error
        if not any_rank(problem is not None or not entries.is_complete, default_group()):
            entries.record("steps", None)
        elif problem is not None or entries.is_complete:
            entries.mark_not_kept(problem or "another rank could not keep its part; see its log")

    def _restore_ended(self, trained: SessionState) -> None:
        """Restore the state after a loop that has already ended."""
        folder = self._entries.folder(self._folder)
        position = trained.read(state_folder(folder, self._entries.number))
        _, set_random_state = load_entry_values(folder, self._entries.number, self._worker_id)
        job = RehearsedCall.create(self.rank, self._entries.number, training_index=self._entries.training_index)
        if job is not None:
            job.write(position.committed, "end", state_digests(trained.tensors))
        set_random_state()

    # -- steps --------------------------------------------------------------------------------------------------

    def steps(
        self, loader: DataLoader[Any], *, epochs: int = 1, max_steps: int = 0, global_batch_size: int = 0
    ) -> Iterator[Step]:
        """Return an iterator over the training steps. Use each as `with step:`.

        Code of the body after `step.run` may communicate (validate, save). If a fault interrupts it, the body runs
        again on all ranks; `session.state`, hyperparameters, schedulers, registered objects, buffers and attributes of
        the model are put back to what they were, so that its changes count once.

        Args:
            loader: a loader over a map-style dataset; its `batch_size` is the maximum number of samples per rank in
                one forward and backward pass. Each data-parallel rank reads its own part, in an order that
                `random_seed` of the configuration determines, not the loader's `generator`. Each sample is used once
                per epoch, regardless of faults and changes of the world.
            epochs: number of epochs.
            max_steps: maximum number of steps, including those before a checkpoint; 0 for no limit.
            global_batch_size: number of samples per step of this loop, instead of that of the `Session`.

        Raises:
            LoopError: `train` was not called, or the body does not use its step.
            ConfigError: another process could not continue the loader, its sampler does not yield each sample once,
                or the batch cannot be split over the ranks, with manual optimization equally.
        """
        trained, transactions = self._require_train()
        assert self._computation is not None
        data = MapStyleData(loader, seed=self.config.random_seed, taken_by="session.steps(...)")
        batch = self._batch_of(data.micro_batch_size, global_batch_size)
        split = batch.split(self.topology.replicate_degree, self.topology.data_ranks_per_replica)
        sizes = (self.topology.replicate_degree,)
        if self._policy is not None and self._member.recovers:
            sizes = self._allowed_sizes(batch, self._policy)
        shares = None
        if trained.is_manual:
            present, ranks = self.topology.replicate_degree, self.topology.data_ranks_per_replica
            shares = EqualShares.of(batch, sizes, present=present, data_ranks_per_replica=ranks)
            sizes = shares.sizes
        if trained.rates is not None:
            self._begin_schedule(trained, trained.rates, batch, sizes)
        if self._member.recovers and self._policy is not None and not self._member.is_joining:
            degrees = _Degrees(*self._degrees, self._policy, batch)
            self._member.job_store.set_lasting(_MICRO_BATCH_KEY, str(data.micro_batch_size).encode())
            transactions.elastic_spec = ElasticSpec(
                policy=self._policy,
                replica_size=self._context.replica_size,
                sizes=sizes,
                tensor_degree=self.topology.tensor_degree,
                layouts=layouts_of(degrees, self._given_config, self._context.ranks_per_node),
            )
        averaging = self._averaging_of(trained.model, split)
        computation = replace(self._computation, averaging=averaging, equal_shares=shares)

        def build_loader() -> StatefulLoader:
            topology = self.topology
            split = batch.split(topology.replicate_degree, topology.data_ranks_per_replica)
            return data.build_loader(split, topology.data_rank(self.rank), StatefulLoader)

        limits = LoopLimits(num_epochs=epochs, max_steps=max_steps)
        assert self._finite is not None
        loop = Loop(self._context, trained, computation, transactions, build_loader, limits, self._finite)
        return self._run(loop, trained, transactions)

    def _run(self, loop: Loop, trained: SessionState, transactions: PlainSteps) -> Iterator[Step]:
        """Yield the steps of a loop, or none if it ended before a restart; with recovery, the loop is an entry."""
        self._left.await_others()
        if transactions.has_left:  # at the end of an earlier loop, since `steps` was called
            transactions = loop.transactions = PlainSteps()
        begins_at, self._begins_at = self._begins_at, Position()
        if not isinstance(self._member, Member):
            with transactions.booked(self._context):
                yield from loop.run(begins_at)
            return
        entries, is_over = self._entries, False
        entries.member = self._member if transactions.recovers else None
        with ExitStack() as stack, entries.enter(self._member.job, "steps") as record:
            stack.callback(self._refuse_to_meet_others, transactions)
            resumed_from = entries.resume_from("steps")
            if record is not None:
                self._restore_ended(trained)
                return
            if resumed_from:
                begins_at = _NOT_KNOWN if transactions.is_joining else trained.read(resumed_from)
            refuse_other_models(trained.model, self._sharded)
            refuse_unknown_schedulers(trained, [optimizer() for optimizer in self._scheduled])
            refuse_own_schedules(trained.optimizers, trained.model, is_restored=trained.restores)
            transactions.enter(entries.number, training_index=entries.training_index, is_complete=entries.is_complete)
            try:
                yield from loop.run(begins_at, resumed_from, lambda: self._end_loop(trained))
                is_over = True
            finally:
                if transactions.has_left:
                    self._transactions = PlainSteps()
                if not is_over:
                    entries.mark_not_kept("its loop was left early")

    def _refuse_to_meet_others(self, transactions: PlainSteps) -> None:
        """After a loop that this rank has left early, wait for the other ranks before the next collective."""
        self._left = transactions
        if transactions.must_await_others and group_health.phase is not Phase.DETACHED:

            def wait() -> None:
                transactions.await_others()
                group_health.allow_collectives()

            group_health.forbid_collectives("other ranks are still in the loop that this rank has left", wait)

    def _batch_of(self, micro_batch_size: int, global_batch_size: int) -> StepBatch:
        """The batch of a step in any world.

        Raises:
            ConfigError: a reproducible batch cannot be cut into parts of equal size; a batch of the loop's own, where
                the batch follows the world.
        """
        if global_batch_size and self._samples_per_replica:
            raise ConfigError("give samples_per_replica to the Session, or global_batch_size to steps, not both.")
        constant = global_batch_size or self._global_batch_size or micro_batch_size * self.topology.data_degree
        batch = StepBatch(
            global_batch_size=0 if self._samples_per_replica else constant,
            samples_per_replica=self._samples_per_replica,
            micro_batch_size=micro_batch_size,
        )
        if not self._reproducible:
            return batch
        assert self._policy is not None
        return batch.in_logical_shards(self._policy, self.topology.data_ranks_per_replica)

    def _begin_schedule(
        self, trained: SessionState, rates: LearningRates, batch: StepBatch, sizes: Sequence[int]
    ) -> None:
        """Begin the schedule at its first sample, unless a checkpoint was loaded.

        Raises:
            ConfigError: the learning-rate rule does not fit the optimizers.
        """
        store = self._member.job_store
        rates.begin(find_reference(store, rates.rule, batch.global_batch_at(self.topology.replicate_degree)))
        reference = rates.check(trained.optimizers, [batch.global_batch_at(size) for size in sizes])
        publish_reference(store, reference)
        if rates.rule.is_adascale and self.rank == 0:
            warn_of_adaptive(trained.optimizers)

    def _averaging_of(self, model: nn.Module, split: BatchSplit) -> GradAveraging | None:
        """The averaging of gradients that the options need; None if FSDP2 averages.

        Raises:
            ConfigError: FSDP2 averages over replicas, but the options do not allow it.
        """
        if self._reproducible:
            return FixedOrderAveraging(model, self.mesh, split.num_logical_shards)
        return NoiseMeasuringAveraging(model, self.mesh) if self._rule.is_adascale else None

    def _allowed_sizes(self, batch: StepBatch, policy: ElasticPolicy) -> tuple[int, ...]:
        """The numbers of replicas that the policy allows and that can share the batch.

        Raises:
            ConfigError: the present number of replicas is not among them.
        """
        sizes = batch.feasible_sizes(policy, self.topology.data_ranks_per_replica)
        if self.topology.replicate_degree not in sizes:
            raise ConfigError(
                f"the job has {self.topology.replicate_degree} replicas of {self._context.replica_size} ranks, but "
                f"`elastic` allows {list(sizes)}. Start a different number of processes, or change the limits."
            )
        return sizes

    def _require_train(self) -> tuple[SessionState, PlainSteps]:
        if self._trained is None or self._transactions is None:
            raise LoopError("say what is trained first: session.train(model, optimizer, scheduler)")
        return self._trained, self._transactions


def _former_micro_batch_size(job: JobEnv) -> int:
    """The loader's batch size before all processes restarted; 0 if there was none."""
    text = JobStore.connect(job).try_get_lasting(_MICRO_BATCH_KEY) or b""
    return int(text) if text.isdigit() and len(text) < 10 else 0  # from the store, not trusted


@dataclass(frozen=True, slots=True)
class _Degrees:
    """Degrees that a session allows, and the batch that their replicas share; `DegreeOptions`."""

    shard_degrees: tuple[int, ...]
    tensor_degrees: tuple[int, ...]
    policy: ElasticPolicy
    batch: StepBatch

    def resolve(self, topology: Topology) -> tuple[ElasticPolicy, StepBatch]:
        """Limits and batch, which are the same for replicas of any size."""
        return self.policy, self.batch


def _check_batch(
    global_batch_size: int, samples_per_replica: int, *, elastic: ElasticPolicy | bool, reproducible: bool
) -> None:
    """Check the options of a `Session` that determine the batch.

    Raises:
        ConfigError: they do not go together.
    """
    if global_batch_size and samples_per_replica:
        raise ConfigError("give global_batch_size or samples_per_replica, not both.")
    if elastic and not (global_batch_size or samples_per_replica):
        raise ConfigError(
            "a Session with `elastic` needs global_batch_size, which stays the same in every world, or "
            "samples_per_replica, with which the batch follows the world."
        )
    if elastic is True and samples_per_replica:
        raise ConfigError(
            "samples_per_replica needs elastic=ElasticPolicy(max_replicas=...): nothing else limits the batch."
        )
    if reproducible:
        refuse_reproducible(follows_world=samples_per_replica > 0)
        if not elastic:
            raise ConfigError(
                "reproducible=True needs `elastic`: a step is split such that all its numbers of replicas can share it."
            )


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, Sequence) else [given]


def _packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpacked(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True, map_location=on_own_device)
