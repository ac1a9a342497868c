"""Rehearsals: find the state of a program that recovery would not restore exactly, before a fault does.

A *rehearsed step* (`RecoveryOptions(rehearse=(2, 100))`) is computed, discarded as after a fault, and computed again.
Then the state of each rank is written and read back as a replacement would receive it, and compared between replicas.
Anything that differs by a bit is reported by name, and the job stops before it trains with wrong values.

A *rehearsed job* (`hyperpod rehearse train.py`, see `rehearsal_jobs.py`) runs briefly without a fault and again with
a SIGKILL in each phase. In both runs each rank records digests of everything that it holds at each step. The digests
of the two runs must agree.

[Note: what is compared] Digests are CRC-32 of the bytes of each local tensor, and of each entry of the captured state
of the trainer or loop. They show that something differs and where it appeared first, not by how much.
"""

import contextlib
import json
import os
import pickle
import signal
import sys
import threading
import zlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PosixPath, PurePosixPath
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_full_backward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from hyperpod_plugins.comm import group_health
from hyperpod_plugins.env import RehearsalEnv
from hyperpod_plugins.errors import RecoveryError, format_list
from hyperpod_plugins.parallel.checkpoint.files import tensor_checksum
from hyperpod_plugins.parallel.hsdp import local_part
from hyperpod_plugins.parallel.topology import Topology
from hyperpod_plugins.recovery.kept_state import parameters_of
from hyperpod_plugins.recovery.packing import unpack
from hyperpod_plugins.recovery.replica_comparison import ReplicasDiffer, compare_replicas
from hyperpod_plugins.recovery.state_transfer import TrainingState

Digests = Mapping[str, int]
"""CRC-32 of each item, by a name that begins with its kind (`gradient`, `parameter`, `buffer`, `optimizer`, ...)."""

REASONS = {
    "batch": "the batch differs: the order of samples, or random numbers drawn by the dataset, the collate function "
    "or a hook of the batch, do not depend on seed, epoch and sample alone. Draw from the global generators of torch, "
    "NumPy or Python, which are seeded from these",
    "gradient": "computing the step again gave other gradients from the same state: it depends on something that is "
    "not restored, such as a global variable that the step changes, an object that is not a module, or a random "
    "generator of the program. Keep it in the module, or derive it from the step number",
    "parameter": "a parameter differs: it was changed outside of the optimizer's step, or the optimizer keeps state "
    "that is missing from its state_dict()",
    "unowned": "no optimizer has this parameter, and its gradient was kept from an earlier step or attempt: give it to "
    "an optimizer, or freeze it with requires_grad_(False)",
    "buffer": "a buffer was not restored: it is no longer the tensor that was registered, or something outside of the "
    "step writes to it. Write to registered buffers only in the step",
    "optimizer": "the optimizer's state differs: check that its state_dict() contains everything that it keeps",
    "callback": "the callback's state differs: state_dict() and load_state_dict() must cover all that it keeps",
    "trainer": "the state of the loop differs: keep it in session.state, or in a callback's state_dict()",
}
"""Likely reasons, by the kind of the item that differs."""


class RehearsalFailed(RecoveryError):
    """A rehearsed step found state that would not be restored after a fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Items on a rank whose bits differ from what they should be."""

    rank: int
    step: int
    what: str
    """The comparison that found it, for example `computing the step again` or `at its beginning`."""
    names: tuple[str, ...]
    """Names of the items that differ, only those of the kind that comes first in a step."""

    @property
    def kind(self) -> str:
        """Kind of the items that differ."""
        return self.names[0].partition(" ")[0]

    @property
    def reason(self) -> str:
        """The usual reason."""
        return REASONS.get(self.kind, REASONS["trainer"])

    def __str__(self) -> str:
        """The difference and its likely reason in one paragraph."""
        names = format_list(self.names, 3)
        return f"rank {self.rank}, step {self.step}, {self.what}: {names} differs. Likely {self.reason}."


_ORDER = ("batch", "unowned", "gradient", "parameter", "buffer", "optimizer", "callback", "trainer")


def order_of_kind(kind: str) -> int:
    """Position of a kind in the order of a step; unknown kinds come last."""
    return _ORDER.index(kind) if kind in _ORDER else len(_ORDER)


def first_kind(names: Iterable[str]) -> tuple[str, ...]:
    """Of names that differ, those whose kind comes first in a step: later differences follow from these."""
    by_kind: dict[str, list[str]] = {}
    for name in sorted(names):
        by_kind.setdefault(name.partition(" ")[0], []).append(name)
    for kind in (*_ORDER, *sorted(by_kind)):
        if kind in by_kind:
            return tuple(by_kind[kind])
    return ()


def differing(one: Digests, other: Digests) -> tuple[str, ...]:
    """Names whose digests differ between two sets or are missing in one; only those of the kind that comes first."""
    return first_kind(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def state_digests(state: TrainingState) -> dict[str, int]:
    """Digests of this rank's parameters, buffers and optimizer state tensors."""
    return _digests(_named(state))


def _named(state: TrainingState) -> dict[str, torch.Tensor]:
    """This rank's tensors, by names that begin with the kind."""
    return {name.replace(".", " ", 1): each for name, each in state.tensors().items()}


def _digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    return {name: tensor_checksum(each) for name, each in tensors.items()}


class _DigestsBeside(threading.Thread):
    """Computes digests in a daemon thread beside the step; `found` is empty until it has finished."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(name="hyperpod-digests", daemon=True)
        self._tensors = tensors
        self.found: dict[str, int] = {}

    @override
    def run(self) -> None:
        self.found = _digests(self._tensors)


def gradient_digests(model: nn.Module) -> dict[str, int]:
    """Digests of this rank's gradients; parameters without a gradient are left out."""
    return {
        f"gradient {name}": tensor_checksum(local_part(parameter.grad))
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def unowned_digests(state: TrainingState) -> dict[str, int]:
    """Digests of the gradients of parameters that no optimizer owns."""
    owned = parameters_of(state.optimizers)
    return {
        f"unowned gradient {name}": tensor_checksum(local_part(parameter.grad))
        for name, parameter in state.model.named_parameters()
        if parameter.grad is not None and id(parameter) not in owned
    }


def value_digests(values: Any, kind: str) -> dict[str, int]:
    """Digests of the captured state of a trainer or loop: of each entry, and of each callback separately."""
    found: dict[str, int] = {}
    for key, value in values.items() if isinstance(values, dict) else {"": values}.items():
        if key == "callbacks" and isinstance(value, dict):
            for name, each in value.items():
                found.update(_flat(f"callback {name}", each))
        else:
            found.update(_flat(f"{kind} {key}", value))
    return found


def _flat(name: str, value: Any) -> dict[str, int]:
    """Digests of the entries of nested dicts with string keys, by dotted path."""
    if not isinstance(value, dict) or not all(isinstance(key, str) and os.sep not in key for key in value):
        return {name: _value_digest(value)}
    return {path: each for key, part in value.items() for path, each in _flat(f"{name}.{key}", part).items()}


def _value_digest(value: Any) -> int:
    """Digest of plain containers, numbers, strings and tensors, independent of the order of a dict's keys.

    All paths have the same digest: a job that runs again finds the files of the previous run, and writes to others.
    """
    if isinstance(value, str) and os.sep in value:
        return zlib.crc32(b"path")
    if isinstance(value, torch.Tensor):
        return tensor_checksum(local_part(value))
    if isinstance(value, dict):
        parts = sorted(f"{_value_digest(key)}:{_value_digest(each)}" for key, each in value.items())
        return zlib.crc32("".join(parts).encode(), 1)
    if isinstance(value, list | tuple):
        return zlib.crc32(" ".join(str(_value_digest(each)) for each in value).encode(), 2)
    if isinstance(value, np.ndarray):
        return zlib.crc32(value.tobytes(), 3)
    is_plain = value is None or isinstance(value, bool | int | float | complex | str | bytes | np.generic)
    return zlib.crc32(f"{type(value).__name__}:{value if is_plain else ''!r}".encode())


class Rehearsal:
    """Rehearsals in one process. `StepTransaction` calls it at each point of a step, in the thread of the step.

    In rehearsed steps, and in all steps of a rehearsed job, it also checks how optimizers call their closures.

    Args:
        state: training state of this rank.
        topology: topology of the job.
        device: device of this rank.
        steps: numbers of the steps to rehearse.
        compare_every: steps from one comparison of replicas to the next; 0 for none.
        job: folder for digests and scheduled faults; None outside of a rehearsed job.
        give_up: tells the agents to end the job, with the reason.
    """

    def __init__(
        self,
        state: TrainingState,
        topology: Topology,
        device: torch.device,
        *,
        steps: Sequence[int],
        compare_every: int,
        job: RehearsalEnv | None,
        give_up: Callable[[str], None],
    ) -> None:
        self._give_up = give_up
        self._state = state
        self._topology = topology
        self._device = device
        self._steps = frozenset(steps)
        self._compare_every = compare_every
        self._hashed: tuple[int, _DigestsBeside] | None = None
        self._rank = dist.get_rank()
        self._record = None if job is None else DigestLog(Path(job.folder), self._rank)
        self._last_step = 0 if job is None else job.last_step
        self.faults = None if job is None else ScheduledFaults(Path(job.folder), job.faults, self._rank)
        self._batches: dict[str, int] = {}
        self._step = -1
        self._begun: Digests = {}
        self._refused = ""
        if Rehearsal._hook is not None:
            Rehearsal._hook.remove()
            Rehearsal._hook = None
        if steps or job is not None:
            Rehearsal._hook = register_optimizer_step_pre_hook(self._before_update)

    _hook: ClassVar[RemovableHandle | None] = None  # of the rehearsal in use

    @classmethod
    def create(
        cls,
        state: TrainingState,
        topology: Topology,
        device: torch.device,
        *,
        steps: Sequence[int],
        compare_every: int,
        give_up: Callable[[str], None],
    ) -> Self | None:
        """The rehearsal that the options or `hyperpod rehearse` request; None if neither does."""
        job = RehearsalEnv.from_environ()
        if not (steps or compare_every) and job is None:
            return None
        return cls(state, topology, device, steps=steps, compare_every=compare_every, job=job, give_up=give_up)

    def begin(self, step: int, describe: Callable[[], bytes], *, is_compared: bool = True) -> None:
        """Handle the beginning of a step, when all changes of the previous one are complete.

        Ends the process with exit code 0 if the rehearsed job has run all of its steps.

        Args:
            step: number of the step.
            describe: captures the state of the trainer or loop.
            is_compared: whether all ranks begin this step together, so that they can compare their states.

        Raises:
            PeerLost: a rank was lost meanwhile.
            RehearsalFailed: state would not be restored after a fault.
        """
        self._step = step
        self._raise_refused()
        if self._record is not None:
            self._record.write(step, "state", self._held(describe))
        if is_compared and step in self._steps:
            self._raise_differences(step, "reading its state back", self._read_back())
            self._raise_differences(step, "compared with its replicas", self._compare_replicas())
        if self._last_step and step >= self._last_step:
            self._end()
        if self._compare_every and step % self._compare_every == 0:
            self._hashed = step, _DigestsBeside(self._alike())  # of tensors taken now: modules replace them in a step
            self._hashed[1].start()
        self.at("between", step)

    def before_compute(self, step: int) -> None:
        """Record the state before the step is computed, when everything that it may change has been saved."""
        held = state_digests(self._state) | unowned_digests(self._state) if self._looks_at(step) else {}
        if self._record is not None:
            self._record.write(step, "begun", held)
        self._begun = held

    def after_undo(self, step: int, *, is_compared: bool = False) -> None:
        """Record the state after the step was undone, before it is computed again.

        The trainer is left out: hooks of an earlier micro-step may have changed it, and do not run again.

        Args:
            step: number of the step.
            is_compared: whether all ranks compare their state with that at the beginning of the step.

        Raises:
            PeerLost: a rank was lost meanwhile.
            RehearsalFailed: something was not restored.
        """
        held = state_digests(self._state) | unowned_digests(self._state) if self._looks_at(step) else {}
        if self._record is not None:
            self._record.write(step, "begun", held)
        if is_compared:
            self._raise_differences(step, "putting the step back", differing(self._begun, held))

    def _looks_at(self, step: int) -> bool:
        return self._record is not None or step in self._steps

    def note_batch(self, index: int, batch: Any) -> None:
        """Record the digest of a batch before training on it."""
        if self._record is not None:
            self._batches[f"batch {index}"] = _value_digest(batch)

    def at(self, phase: str, step: int) -> None:
        """Announce that this process is in a phase of a step; a scheduled fault may kill it here."""
        if self.faults is not None:
            self.faults.reach(phase, step)

    @contextlib.contextmanager
    def computing(self, step: int) -> Generator[None]:
        """Context of a step's computation, in which due faults happen in a module's forward or backward."""
        hooks: list[RemovableHandle] = []
        if self.faults is not None and self.faults.is_due("forward", step):
            hooks.append(register_module_forward_hook(lambda *_: self.at("forward", step)))
        if self.faults is not None and self.faults.is_due("backward", step):
            hooks.append(register_module_full_backward_pre_hook(lambda *_: self.at("backward", step)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def after_compute(self, step: int, again: Callable[[], bool]) -> None:
        """Check a step when its gradients are computed and no rank has voted.

        Args:
            step: number of the step.
            again: discards the step and computes it once more; returns False if a fault interrupted that.

        Raises:
            PeerLost: a rank was lost while ranks compared their results.
            RehearsalFailed: the second computation differed.
            ReplicasDiffer: a comparison of replicas was due in this step, and they differ.
        """
        self._raise_refused()
        if self._record is not None:
            self._record.write(step, "gradients", self._batches | self._computed())
        if self._compare_every and step % self._compare_every == 0:
            self._compare(step)
        if step not in self._steps:
            return
        before = self._computed(with_state=True)
        if again():
            self._raise_differences(
                step, "computing the step again", differing(before, self._computed(with_state=True))
            )

    def _held(self, describe: Callable[[], bytes]) -> dict[str, int]:
        """Digests of everything that this rank holds when a step begins."""
        return state_digests(self._state) | value_digests(_read(describe()), "trainer")

    def _before_update(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Step hook of all optimizers: count how often each evaluates its closure."""
        self.at("optimizer", self._step)
        closure, num_calls = kwargs.get("closure"), 0
        if closure is None or not self._looks_at(self._step):
            return None

        def counted() -> Any:
            nonlocal num_calls
            num_calls += 1
            if num_calls > 1:
                self._refused = (
                    f"rank {self._rank}, step {self._step}: optimizer {type(optimizer).__name__} evaluated its closure "
                    f"{num_calls} times, but recovery computes the gradients of a step once, for the parameters at "
                    "its beginning. Use an optimizer that evaluates its closure once."
                )
            return closure()

        return args, {**kwargs, "closure": counted}

    def _raise_refused(self) -> None:
        """Stop if an optimizer did what recovery does not support; it does so on all ranks alike."""
        if self._refused:
            self._give_up(self._refused)
            raise RehearsalFailed(self._refused)

    def _computed(self, *, with_state: bool = False) -> dict[str, int]:
        gradients = gradient_digests(self._state.model)
        return gradients | state_digests(self._state) if with_state else gradients

    def _alike(self) -> dict[str, torch.Tensor]:
        """Tensors that replicas share. Buffers are left out: running statistics are rank-local."""
        return {name: each for name, each in _named(self._state).items() if not name.startswith("buffer ")}

    def _compare(self, step: int) -> None:
        """Stop all ranks if replicas differ.

        This is part of the computation, which all ranks run whatever was repaired before. A background thread
        computes the digests beside the step. As a program may write to parameters in the middle of a step, a
        difference counts only if digests that are computed here, in the thread of the step, differ too.
        """
        hashed, self._hashed = self._hashed, None
        held: dict[str, int] = {}
        if hashed is not None and hashed[0] == step:
            hashed[1].join()
            held = hashed[1].found
        held = held or _digests(self._alike())
        with group_health.tolerate_breaks():
            found = compare_replicas(held, self._topology, self._device)
            if found is not None:
                found = compare_replicas(_digests(self._alike()), self._topology, self._device)
        if found is None:
            return
        reason = f"step {step}: {found}. This step has updated nothing, but training since the last comparison, "
        reason += f"{self._compare_every} steps before, may be wrong. Return to a checkpoint from before that, and "
        reason += "check the memory and the devices of that host."
        if found.names:
            self._give_up(reason)
        raise ReplicasDiffer(reason)

    def _read_back(self) -> tuple[str, ...]:
        """Write the state as a replacement would receive it, overwrite the tensors, and read it back."""
        before, data = state_digests(self._state), torch.empty(self._state.num_bytes(), dtype=torch.uint8)
        header = self._state.header()
        self._state.copy_to(data)
        with torch.no_grad():
            for tensor in self._state.tensors().values():
                tensor.fill_(1)
        self._state.copy_from(header, data, "the rehearsal")
        return differing(before, state_digests(self._state))

    def _compare_replicas(self) -> tuple[str, ...]:
        """Names of the tensors that differ on another replica of this shard; see `_alike`."""
        found = compare_replicas(_digests(self._alike()), self._topology, self._device)
        return () if found is None else first_kind(found.names)

    def _raise_differences(self, step: int, what: str, names: tuple[str, ...]) -> None:
        """Stop all ranks if one of them found a difference."""
        flag = torch.tensor([int(bool(names))], device=self._device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if names:
            found = Difference(rank=self._rank, step=step, what=what, names=names)
            self._give_up(str(found))
            raise RehearsalFailed(str(found))
        if int(flag):
            raise RehearsalFailed(f"step {step}, {what}: another rank found a difference; see its message.")

    def _end(self) -> None:
        dist.all_reduce(torch.zeros(1, device=self._device))  # until all ranks have left the hooks of the last step
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _read(description: bytes) -> Any:
    """Read captured state of a trainer or loop. It may come from a peer, so no objects are unpickled."""
    try:
        with torch.serialization.safe_globals([PosixPath, PurePosixPath]):
            return unpack(description, map_location=None)
    except (RuntimeError, pickle.UnpicklingError, EOFError):  # another format: compared as bytes
        return {"": description}


class DigestLog:
    """Digest log of one rank, to which all processes of its worker slot append."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = folder / f"rank-{rank}.jsonl"

    def write(self, step: int, point: str, digests: Digests) -> None:
        """Append the digests of this rank at a point of a step."""
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step, "point": point, "digests": digests}) + "\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsedFault:
    """A SIGKILL when a rank first reaches a phase at `step` or later."""

    phase: str
    rank: int
    step: int

    def to_text(self) -> str:
        """Text form, for an environment variable."""
        return f"{self.phase}:{self.rank}:{self.step}"


class ScheduledFaults:
    """The scheduled faults of one rank in a rehearsed job. Each happens once: a marker file tells the replacement."""

    def __init__(self, folder: Path, text: str, rank: int) -> None:
        self._folder = folder
        self._faults = [fault for fault in parse_schedule(text) if fault.rank == rank]

    def is_due(self, phase: str, step: int) -> bool:
        """Whether a fault would happen here."""
        return self._due(phase, step) is not None

    def reach(self, phase: str, step: int) -> None:
        """Kill this process if a fault is due in this phase of a step."""
        fault = self._due(phase, step)
        if fault is None:
            return
        with contextlib.suppress(FileExistsError):
            with self._marker(fault).open("x") as file:
                file.write(json.dumps(asdict(fault) | {"at_step": step}))
                file.flush()
                os.fsync(file.fileno())
            os.kill(os.getpid(), signal.SIGKILL)

    def _due(self, phase: str, step: int) -> RehearsedFault | None:
        due = (each for each in self._faults if each.phase == phase and step >= each.step)
        return next((each for each in due if not self._marker(each).exists()), None)

    def _marker(self, fault: RehearsedFault) -> Path:
        return self._folder / f"fault-{fault.phase}.json"


def parse_schedule(text: str) -> list[RehearsedFault]:
    """Parse comma-separated faults, each as `ScheduledFault.to_text` returns it."""
    parts = (part.split(":") for part in text.split(",") if part)
    return [RehearsedFault(phase=phase, rank=int(rank), step=int(step)) for phase, rank, step in parts]
