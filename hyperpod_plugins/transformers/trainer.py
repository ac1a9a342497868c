"""`HyperPodTrainer`: the Trainer of transformers, whose steps are those of a `Session`.

Arguments, batches, losses, optimizer, scheduler, evaluation, logs, callbacks and the names of checkpoints are the
Trainer's. The loop around them is the session's: each step is a transaction, and what follows it runs again after a
fault. `HyperPodTrainerMixin` does the same for classes that derive from `Trainer`, such as TRL's.

[Note: losses] A Trainer divides each loss by the tokens, or by the micro-batches, of its step, and DDP averages over
the ranks. The session averages over all micro-batches of a step. So a loss is multiplied by the number of
micro-batches of a full step, and divided by the number of processes, for which `compute_loss` has multiplied it.
"""

# The parts of a Trainer's loop are private and not meant to be overridden.
# pyright: reportPrivateUsage=false, reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false

import json
import time
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from typing_extensions import override

from hyperpod_plugins.accelerate import HyperPodAccelerator, HyperPodPlugin
from hyperpod_plugins.accelerate.compat import AcceleratorState
from hyperpod_plugins.env import JobEnv, run_id
from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.parallel import load_checkpoint
from hyperpod_plugins.parallel.hsdp import whole_tensor
from hyperpod_plugins.session import Session
from hyperpod_plugins.session.step import Step
from hyperpod_plugins.transformers.compat import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    Trainer,
    TrainOutput,
)
from hyperpod_plugins.transformers.job import is_elastic, session_of
from hyperpod_plugins.transformers.micro_batches import EpochLength, EpochPlan, MicroBatches, without_labels
from hyperpod_plugins.transformers.progress import TrainerAttributes, TrainerProgress
from hyperpod_plugins.transformers.refusals import (
    is_on_meta,
    refuse,
    refused_arguments,
    refused_callbacks,
    refused_model,
    refused_optimizer,
)

_Base = Trainer if TYPE_CHECKING else object

_SESSION_FOLDER = "hyperpod"
"""Folder in a checkpoint with the sharded state of the session."""
_STATE_FILE = "trainer_state.json"
_PLAN_FILE = "hyperpod.json"
"""File in a checkpoint that says how its steps were divided."""
_MOST = 2**31
"""Of each number in it."""


class HyperPodTrainerMixin(_Base):
    """Makes a class that derives from `Trainer` train on a session: `class MySFT(HyperPodTrainerMixin, SFTTrainer)`.

    It comes first among the bases. `training_step` of the class must call `self.accelerator.backward` once, as the
    Trainer's own does: the session computes the gradients when it has returned.

    Attributes:
        kept_attributes: names of attributes that the class's own code fills in each step, such as sums for its logs;
            plain containers and numbers. A replacement gets them, and a step that runs again begins with the old ones.

    Raises:
        ConfigError: an argument, the model, a callback or the dataset cannot be served.
    """

    kept_attributes: tuple[str, ...] = ("_metrics", "_total_train_tokens")

    accelerator: HyperPodAccelerator
    _session: Session
    _plan: EpochPlan
    _progress: TrainerProgress
    _call: str
    _start_time: float
    _num_calls = 0
    _resume_from = ""
    _num_items: Any = None

    # -- set-up -------------------------------------------------------------------------------------------------

    @override
    def create_accelerator_and_postprocess(self) -> None:
        """Create the session's Accelerator; called by the constructor of `Trainer`."""
        args = self.args
        refuse((*refused_arguments(args), *refused_model(self.model)))
        self._session = session_of(args)
        config: Any = args.accelerator_config
        loaders = DataLoaderConfiguration(
            use_seedable_sampler=config.use_seedable_sampler, non_blocking=config.non_blocking
        )
        AcceleratorState._reset_state(reset_partial_state=True)
        self.accelerator = HyperPodPlugin(self._session.config).accelerator(
            session=self._session,
            mixed_precision=args.mixed_precision,
            dataloader_config=loaders,
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        )
        self.gather_function = partial(
            self.accelerator.gather_for_metrics, use_gather_object=args.eval_use_gather_object
        )
        self.is_deepspeed_enabled = self.is_fsdp_enabled = False

    @override
    def _validate_args(self) -> None:
        super()._validate_args()
        reasons = [] if self.optimizer is not None or self.optimizer_cls_and_kwargs else [*refused_optimizer(self.args)]
        if self.args.save_only_model and self.args.load_best_model_at_end:
            reasons.append(
                "save_only_model with load_best_model_at_end: the best model is read from a whole checkpoint"
            )
        refuse(reasons)

    @override
    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if not is_on_meta(model):
            super()._move_model_to_device(model, device)

    @override
    def get_tp_size(self) -> int:
        """1: tensor peers read the same samples, and count once in what the Accelerator gathers."""
        return 1

    @override
    def get_cp_size(self) -> int:
        """1: see `get_tp_size`."""
        return 1

    @override
    def get_sp_size(self) -> int:
        """1: see `get_tp_size`."""
        return 1

    @override
    def get_total_train_batch_size(self, args: Any) -> int:
        """Samples of a step, over all ranks."""
        return self._train_batch_size * self._plan.step_size

    @override
    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: a process that replaces a lost one would not know of the trials before.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("HyperPodTrainer cannot search hyperparameters: start one job for each trial.")

    def _make_ready(self, max_steps: int) -> nn.Module:
        """Create optimizer and scheduler, and shard the model."""
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        self.create_optimizer()
        model, prepared = self.accelerator.prepare(self.model, self.optimizer)
        self.optimizer = prepared.optimizer
        scheduler: Any = self.create_scheduler(num_training_steps=max_steps)
        self.model = self.model_wrapped = model
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        waits = isinstance(scheduler, ReduceLROnPlateau) or not isinstance(scheduler, LRScheduler)  # for a metric
        self._session.train(
            model,
            self.optimizer,
            () if waits else scheduler,
            backward=partial(HyperPodAccelerator.backward, self.accelerator),
            max_grad_norm=self.args.max_grad_norm or float("inf"),  # the norm is logged in any case
        )
        if waits:
            self._session.register_rank_local("lr_scheduler", scheduler)
        return model

    # -- the loop -----------------------------------------------------------------------------------------------

    @override
    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train, as `Trainer.train` does.

        Args:
            resume_from_checkpoint: folder of a checkpoint that this class has written, or True for the newest complete
                one in `output_dir`.
            trial: not served.
            ignore_keys_for_eval: see `Trainer.train`.

        Raises:
            ConfigError: see the class; or there is no such checkpoint.
        """
        refuse(refused_callbacks(self.callback_handler.callbacks))
        if trial is not None:
            refuse(["a trial of a hyperparameter search"])
        self._resume_from = _checkpoint_of(resume_from_checkpoint, Path(self.args.output_dir or "."))
        if self._resume_from and self.args.ignore_data_skip:
            refuse(["ignore_data_skip=True with resume_from_checkpoint: the position in the data is part of it"])
        return super().train(None, None, ignore_keys_for_eval)

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: Any = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Run the loop; called by `Trainer.train`."""
        args, session = self.args, self._session
        self.accelerator.free_memory()
        batches = self._read_batches()
        numbers = self.set_initial_training_values(args, cast("Any", EpochLength(batches)))
        num_epochs, num_samples, max_steps = numbers[0], numbers[3], numbers[6]
        self._init_training_state(max_steps, batches.plan.num_steps, num_epochs, None, None)
        model = self._make_ready(max_steps)
        kept = TrainerAttributes(self, self.kept_attributes)
        if kept.names:
            session.register_rank_local("trainer", kept)
        self.state.init_training_references(self, max_steps, num_epochs, None)
        progress = self._begin_progress()
        self.control = self.callback_handler.on_train_begin(args, self.state, self.control)
        if not self._resume_from:
            progress.push()
        loader = batches.as_loader()
        for step in session.steps(loader, max_steps=max_steps, global_batch_size=batches.plan.step_size):
            with step:
                progress.pull()
                learning_rate = self._begin_step(step, model)
                progress.push()
                result = step.run(partial(self._micro_loss, step, model))
                progress.pull()
                self._end_step(step, result)
                report = partial(self._report, step, model, learning_rate, ignore_keys_for_eval)
                report()
                if self.control.should_epoch_stop:
                    refuse(
                        ["a callback that sets control.should_epoch_stop: only should_training_stop can end an epoch"]
                    )
                if self.control.should_training_stop or (step.index + 1) % batches.plan.num_steps == 0:
                    self.control = self.callback_handler.on_epoch_end(args, self.state, self.control)
                    report()
                progress.push()
                if self.control.should_training_stop and step.index + 1 < max_steps:
                    break
        progress.pull()
        return self._finalize_training(None, num_samples, self._start_time)

    def _read_batches(self) -> MicroBatches:
        """The batches of the training, of whose order and division all ranks are told by the first."""
        with _unprepared_loaders(self.accelerator):
            loader = self.get_train_dataloader()
        plan = {
            "num_ranks": self._session.topology.data_degree,
            "accumulation": self.args.gradient_accumulation_steps,
            "batch_size": self._train_batch_size,
        }
        seed = torch.initial_seed() if self.args.data_seed is None else self.args.data_seed
        former = _plan_in(self._resume_from) if self._resume_from else None
        HyperPodTrainerMixin._num_calls += 1
        call = f"{run_id() or uuid.uuid4().hex} {self._num_calls}"
        told = self._session.agree(
            {"plan": plan, "former": former, "seed": seed, "resume_from": self._resume_from, "call": call}
        )
        self._resume_from, self._call, plan, former = (told[name] for name in ("resume_from", "call", "plan", "former"))
        if self._resume_from:
            plan = _continued(plan, former, self._resume_from, is_elastic=is_elastic())
        cast("Any", self.callback_handler).train_dataloader = loader
        batches = MicroBatches(loader, seed=told["seed"], **plan)
        self._plan = batches.plan
        return batches

    def _begin_progress(self) -> TrainerProgress:
        """Keep the progress from now on; it begins with the checkpoint to resume from, if there is one."""
        begins_at = time.time()

        def begin() -> None:
            self._tr_loss, self._total_loss_scalar = torch.tensor(0.0, device=self.args.device), 0.0
            self._initial_global_step = self._globalstep_last_logged = self.state.global_step
            self._initial_num_input_tokens_seen, self._start_time = self.state.num_input_tokens_seen, begins_at

        begin()
        self._session.state.clear()
        self._progress = TrainerProgress(self, self._session, self._call, begin)
        self._progress.push()
        if self._resume_from:
            self._session.load(Path(self._resume_from, _SESSION_FOLDER))
            self._progress.pull()
        return self._progress

    def _begin_step(self, step: Step, model: nn.Module) -> float:
        """Tell callbacks that a step begins, and return its learning rate."""
        if step.index % self._plan.num_steps == 0:
            self.control = self.callback_handler.on_epoch_begin(self.args, self.state, self.control)
        self.control = self.callback_handler.on_step_begin(self.args, self.state, self.control)
        model.train()
        return self._get_learning_rate()

    def _micro_loss(self, step: Step, model: nn.Module, batch: dict[str, Any]) -> dict[str, Tensor]:
        """The loss of a micro-batch as the session wants it; see `[Note: losses]`."""
        if batch["slot"] == step.batches[0]["slot"]:
            self._count_items(step)
        inputs, size = batch["inputs"], self._plan.step_size
        attributes = TrainerAttributes(self, () if batch["counts"] else self.kept_attributes)
        before = attributes.state_dict()
        losses = list[Tensor]()
        with _kept_losses(self.accelerator, losses):
            self.training_step(model, inputs, self._num_items)
        if len(losses) != 1:
            raise ConfigError(
                f"{type(self).__name__}.training_step called self.accelerator.backward {len(losses)} times for one "
                "batch. HyperPodTrainer needs one loss, whose gradients the session computes: add up the losses."
            )
        attributes.load_state_dict(before)
        factor = size / self.accelerator.num_processes if batch["counts"] else 0.0
        num_operations = self.floating_point_ops(inputs) * size if batch["counts"] else 0
        return {"loss": losses[0] * factor, "operations": losses[0].new_tensor(num_operations)}

    def _count_items(self, step: Step) -> None:
        """Count what the losses of a step are divided by, over all ranks."""
        own = [each["inputs"] for each in step.batches if each["counts"]]
        found = own or [without_labels(step.batches[0]["inputs"])]
        _, self._num_items = self.get_batch_samples(iter(found), len(found), self.args.device)
        self.current_gradient_accumulation_steps = self._plan.size_of(step.index) / self.accelerator.num_processes

    def _end_step(self, step: Step, result: dict[str, Tensor]) -> None:
        """Note what a step has done, and tell callbacks."""
        loss = result["loss"]
        if self.args.logging_nan_inf_filter and not bool(loss.isfinite()):
            loss = self._tr_loss / (1 + self.state.global_step - self._globalstep_last_logged)
        self._tr_loss += loss
        self.state.total_flos += float(result["operations"])
        self.state.global_step, self.state.epoch = step.index + 1, self._plan.epoch_at(step.index + 1)
        if self.args.include_num_input_tokens_seen != "no":
            self._count_tokens(step)
        self.control = self.callback_handler.on_optimizer_step(self.args, self.state, self.control)
        self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)

    def _count_tokens(self, step: Step) -> None:
        """Add the tokens that all ranks have read in a step."""
        seen, gather = self.state.num_input_tokens_seen, self.accelerator.gather
        with _replaced(self.accelerator, "gather", lambda tensor: tensor):
            for each in step.batches:
                if each["counts"]:
                    self._track_num_input_tokens(each["inputs"])
        own = torch.tensor([self.state.num_input_tokens_seen - seen], device=self.args.device)
        self.state.num_input_tokens_seen = seen + int(gather(own).sum())

    def _report(self, step: Step, model: nn.Module, learning_rate: float, ignore_keys: list[str] | None) -> None:
        """Log, evaluate and save, as the callbacks have asked for."""
        epoch, start_time = self.state.epoch, self._start_time
        self._maybe_log_save_evaluate(
            self._tr_loss, step.grad_norm, model, None, epoch, ignore_keys, start_time, learning_rate=learning_rate
        )

    @override
    def store_flos(self) -> None:
        """Do nothing: the operations of each step have been counted."""

    # -- checkpoints --------------------------------------------------------------------------------------------

    @override
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the whole model, or its adapter, such that `from_pretrained` opens it. Call it on all ranks."""
        weights = self._whole_weights()
        self._save(output_dir, state_dict=weights)
        dist.barrier()
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _whole_weights(self) -> dict[str, Tensor]:
        """The weights of the model in host memory, or those of its adapter; empty on ranks that do not write."""
        model = self.accelerator.unwrap_model(self.model)
        only_trained = getattr(model, "peft_config", None) is not None
        found, known = dict[str, Tensor](), dict[int, Tensor]()
        for name, tensor in model.state_dict(keep_vars=True).items():
            if only_trained and isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
                continue
            if id(tensor) not in known:
                whole = whole_tensor(tensor.detach())
                known[id(tensor)] = whole.cpu() if self.args.should_save else torch.empty(0)
            if self.args.should_save:
                found[name] = known[id(tensor)]
        return found

    @override
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self._progress.push()
        self._session.save(Path(output_dir, _SESSION_FOLDER))
        if self.args.should_save:
            Path(output_dir, _PLAN_FILE).write_text(json.dumps(self._plan.to_dict()))

    @override
    def _load_best_model(self) -> None:
        load_checkpoint(Path(str(self.state.best_model_checkpoint), _SESSION_FOLDER), model=self.model)


class HyperPodTrainer(HyperPodTrainerMixin, Trainer):
    """`transformers.Trainer`, with the same arguments, in a job that survives the loss of any process.

        from hyperpod_plugins.transformers import HyperPodTrainer
        trainer = HyperPodTrainer(model=model, args=TrainingArguments(...), train_dataset=data)
        trainer.train()

    Import it before `TrainingArguments` are created. Under `hyperpodrun`, lost processes are replaced; under torchrun,
    or in a single process, the same program runs unchanged. `configure` sets options of the job.
    """


def _checkpoint_of(given: str | bool | None, folder: Path) -> str:
    """The checkpoint to resume from; empty if there is none to resume from.

    Raises:
        ConfigError: the folder that was asked for is not there.
    """
    job = JobEnv.from_environ()
    if job is not None and _plan_in(str(Path(job.resume_from).parent)) is not None:
        return str(Path(job.resume_from).parent)  # all processes restarted; an earlier one may have been deleted since
    if isinstance(given, str):
        return given
    if not given:
        return ""
    found = [each.parent for each in folder.glob(f"checkpoint-*/{_STATE_FILE}") if (each.parent / _PLAN_FILE).exists()]
    numbered = {int(name): each for each in found if (name := each.name.rpartition("-")[2]).isdecimal()}
    if not numbered:
        raise ConfigError(
            f"resume_from_checkpoint=True, but {folder} has no complete checkpoint that HyperPodTrainer has written."
        )
    return str(numbered[max(numbered)])


def _plan_in(checkpoint: str) -> dict[str, int] | None:
    """How the steps of a checkpoint were divided; None if the folder is not there, or was not written by this class."""
    try:
        found = json.loads(Path(checkpoint, _PLAN_FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    match found:
        case {"num_ranks": int(num_ranks), "accumulation": int(accumulation), "batch_size": int(batch_size)}:
            plan = {"num_ranks": num_ranks, "accumulation": accumulation, "batch_size": batch_size}
            return plan if all(0 < each <= _MOST for each in plan.values()) else None
        case _:
            return None


def _continued(
    plan: dict[str, int], former: dict[str, int] | None, checkpoint: str, *, is_elastic: bool
) -> dict[str, int]:
    """How the steps of a training are divided that continues from a checkpoint.

    Args:
        plan: as the arguments and the world say.
        former: as the checkpoint says.
        checkpoint: path of the checkpoint.
        is_elastic: whether the job may share the same steps among another number of ranks.

    Raises:
        ConfigError: the checkpoint is foreign, or its steps have other samples.
    """
    if former is None:
        raise ConfigError(
            f"resume_from_checkpoint: {checkpoint} is not there, or was not written by HyperPodTrainer. To begin with "
            "weights of another Trainer, load the model from that folder: from_pretrained."
        )
    is_same = plan["num_ranks"] * plan["accumulation"] == former["num_ranks"] * former["accumulation"]
    if former["batch_size"] == plan["batch_size"] and (is_same or is_elastic):
        return former
    raise ConfigError(
        f"{checkpoint} was written by {former['num_ranks']} ranks with gradient_accumulation_steps="
        f"{former['accumulation']} and per_device_train_batch_size={former['batch_size']}; here are "
        f"{plan['num_ranks']} ranks with {plan['accumulation']} and {plan['batch_size']}. Use the same "
        "per_device_train_batch_size, and a gradient_accumulation_steps with which its product with the number of "
        "ranks is the same."
    )


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Generator[None]:
    """Context in which an object has another method."""
    vars(owner)[name] = value
    try:
        yield
    finally:
        del vars(owner)[name]


def _unprepared_loaders(accelerator: Any) -> Any:
    """Context in which the Accelerator returns loaders as they are."""
    return _replaced(accelerator, "prepare_data_loader", lambda loader, *args, **kwargs: loader)


def _kept_losses(accelerator: Any, losses: list[Tensor]) -> Any:
    """Context in which `accelerator.backward` only keeps the loss."""
    return _replaced(accelerator, "backward", lambda loss, **kwargs: losses.append(loss))
