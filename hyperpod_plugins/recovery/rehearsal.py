"""Rehearsals: find out what of a program would not come back, before a fault does.

A *rehearsed step* (`RecoveryOptions(rehearse=(2, 100))`) is computed, thrown away as after a fault, and computed again;
then the state of each rank is written and read back as a replacement would get it, and compared between replicas. What
differs by a bit is named, and the job stops before anything was trained wrongly.

A *rehearsed job* (`hyperpod rehearse train.py`, see `rehearsal_jobs.py`) runs briefly without a fault and again with a
SIGKILL in each phase. In both runs each rank writes down digests of all that it holds at each step. They must agree.

[Note: what is compared] Digests are CRC-32 of the bytes of each local tensor, and of each entry of the described
trainer. They tell that something differs and where it showed first, not by how much.
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
from hyperpod_plugins.errors import RecoveryError, few
from hyperpod_plugins.parallel.hsdp import local_part
from hyperpod_plugins.parallel.topology import Topology
from hyperpod_plugins.recovery.kept_state import owned_by
from hyperpod_plugins.recovery.packing import unpacked
from hyperpod_plugins.recovery.replicas import ReplicasDiffer, compare_replicas
from hyperpod_plugins.recovery.state import TrainingState

Digests = Mapping[str, int]
"""Name of each thing, beginning with its kind (`gradient`, `parameter`, `buffer`, `optimizer`, ...), and its CRC-32."""

REASONS = {
    "batch": "the batch is another one: the order of samples, or what the dataset, the collate function or a hook of "
    "the batch draws, is not a function of seed, epoch and sample. Draw from the global generators of torch, NumPy or "
    "Python, which are keyed",
    "gradient": "computing the step again gave other gradients from the same state: it depends on something that is "
    "not put back, such as a Python attribute that the step changes, or a generator of the program's own. Keep it in a "
    "registered buffer, or derive it from the step's number",
    "parameter": "a parameter is another one: it was changed outside of the optimizer's step, or the optimizer keeps "
    "state that its state_dict() does not have",
    "unowned": "no optimizer has this parameter, and its gradient was kept from an earlier step or attempt: give it to "
    "an optimizer, or freeze it with requires_grad_(False)",
    "buffer": "a buffer was not put back: it is no longer the tensor that was registered, or something outside of the "
    "step writes to it. Write to registered buffers in the step alone",
    "optimizer": "the optimizer's state is another one: see that its state_dict() has all that it keeps",
    "callback": "the callback's state is another one: let state_dict() and load_state_dict() have all that it keeps",
    "trainer": "what the loop keeps is another one: let it be in session.state, or in a callback's state_dict()",
}
"""Likely reasons, by the kind of what differs."""


class RehearsalFailed(RecoveryError):
    """A rehearsed step found something that would not come back after a fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What a rank holds with other bits than it should."""

    rank: int
    step: int
    what: str
    """What was compared: `computing the step again`, `a replica`, or the point of a step."""
    names: tuple[str, ...]
    """Of the things that differ, all of the kind that comes first in the order of a step."""

    @property
    def kind(self) -> str:
        """Kind of what differs."""
        return self.names[0].partition(" ")[0]

    @property
    def reason(self) -> str:
        """Why that usually is."""
        return REASONS.get(self.kind, REASONS["trainer"])

    def __str__(self) -> str:
        """One paragraph for people."""
        return f"rank {self.rank}, step {self.step}, {self.what}: {few(self.names, 3)} differs. Likely {self.reason}."


_ORDER = ("batch", "unowned", "gradient", "parameter", "buffer", "optimizer", "callback", "trainer")


def rank_of_kind(kind: str) -> int:
    """Place of a kind in the order of a step."""
    return _ORDER.index(kind) if kind in _ORDER else len(_ORDER)


def first_kind(names: Iterable[str]) -> tuple[str, ...]:
    """Of names that differ, those whose kind comes first in a step: what differs later differs for that reason."""
    by_kind: dict[str, list[str]] = {}
    for name in sorted(names):
        by_kind.setdefault(name.partition(" ")[0], []).append(name)
    for kind in (*_ORDER, *sorted(by_kind)):
        if kind in by_kind:
            return tuple(by_kind[kind])
    return ()


def differing(one: Digests, other: Digests) -> tuple[str, ...]:
    """Names that have other digests in two sets, or that one of them lacks, of the kind that comes first."""
    return first_kind(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def digest(tensor: torch.Tensor) -> int:
    """CRC-32 of a local tensor's bytes."""
    host = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    return zlib.crc32(host.numpy().data)


def state_digests(state: TrainingState) -> dict[str, int]:
    """Of each parameter, buffer and tensor of optimizer state that this rank holds."""
    return _digests(_named(state))


def _named(state: TrainingState) -> dict[str, torch.Tensor]:
    """What this rank holds, by names that begin with the kind."""
    return {name.replace(".", " ", 1): each for name, each in state.tensors().items()}


def _digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    return {name: digest(each) for name, each in tensors.items()}


class _DigestsBeside(threading.Thread):
    """Computes digests beside the step, and keeps no process from ending; `found` is empty until it has."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(name="hyperpod-digests", daemon=True)
        self._tensors = tensors
        self.found: dict[str, int] = {}

    @override
    def run(self) -> None:
        self.found = _digests(self._tensors)


def gradient_digests(model: nn.Module) -> dict[str, int]:
    """Of each parameter's gradient on this rank; a parameter without one has none."""
    return {
        f"gradient {name}": digest(local_part(parameter.grad))
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def unowned_digests(state: TrainingState) -> dict[str, int]:
    """Of each gradient of a parameter that no optimizer has."""
    owned = owned_by(state.optimizers)
    return {
        f"unowned gradient {name}": digest(local_part(parameter.grad))
        for name, parameter in state.model.named_parameters()
        if parameter.grad is not None and id(parameter) not in owned
    }


def value_digests(values: Any, kind: str) -> dict[str, int]:
    """Of a described trainer or loop: each entry, and each callback by itself."""
    found: dict[str, int] = {}
    for key, value in values.items() if isinstance(values, dict) else {"": values}.items():
        if key == "callbacks" and isinstance(value, dict):
            for name, each in value.items():
                found.update(_flat(f"callback {name}", each))
        else:
            found.update(_flat(f"{kind} {key}", value))
    return found


def _flat(name: str, value: Any) -> dict[str, int]:
    """Of each entry of nested dicts whose keys are names, by the way there."""
    if not isinstance(value, dict) or not all(isinstance(key, str) and os.sep not in key for key in value):
        return {name: _value_digest(value)}
    return {path: each for key, part in value.items() for path, each in _flat(f"{name}.{key}", part).items()}


def _value_digest(value: Any) -> int:
    """Of plain containers, numbers, strings and tensors, whatever the order of a dict's keys.

    Paths count as equal: a job that is run again finds the files of the one before, and writes beside them.
    """
    if isinstance(value, str) and os.sep in value:
        return zlib.crc32(b"path")
    if isinstance(value, torch.Tensor):
        return digest(local_part(value))
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
    """One process's part in rehearsals; `StepTransaction` calls it at each point of a step, in the step's thread.

    In rehearsed steps, and all steps of a rehearsed job, it also looks at what optimizers do with their closures.

    Args:
        state: of this rank.
        topology: of the job.
        device: of this rank.
        steps: at which a step is rehearsed.
        compare_every: steps from one comparison of replicas to the next; 0 for none.
        job: where digests are written, and which faults are to happen; None outside of a rehearsed job.
        give_up: tells the agents that the job ends, and why.
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
        self._record = None if job is None else Record(Path(job.folder), self._rank)
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

    _hook: ClassVar[RemovableHandle | None] = None  # of the rehearsal that is in use

    @classmethod
    def wanted(
        cls,
        state: TrainingState,
        topology: Topology,
        device: torch.device,
        *,
        steps: Sequence[int],
        compare_every: int,
        give_up: Callable[[str], None],
    ) -> Self | None:
        """The rehearsal that the options or `hyperpod rehearse` ask for; None if neither does."""
        job = RehearsalEnv.from_environ()
        if not (steps or compare_every) and job is None:
            return None
        return cls(state, topology, device, steps=steps, compare_every=compare_every, job=job, give_up=give_up)

    def begin(self, step: int, describe: Callable[[], bytes], *, is_compared: bool = True) -> None:
        """A step begins, and all that the one before changed has been changed.

        Args:
            step: its number.
            describe: describes the trainer or loop.
            is_compared: whether all ranks begin this step together, so that they can compare what they hold.

        Raises:
            PeerLost: somebody was lost meanwhile.
            SystemExit: the rehearsed job has run for as many steps as it should.
            RehearsalFailed: a rehearsed step would not come back.
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
            self._hashed = step, _DigestsBeside(self._alike())  # of tensors taken now: modules swap theirs in a step
            self._hashed[1].start()
        self.at("between", step)

    def begun(self, step: int) -> None:
        """All that the step may change has been remembered, and it is about to be computed."""
        held = state_digests(self._state) | unowned_digests(self._state) if self._looks_at(step) else {}
        if self._record is not None:
            self._record.write(step, "begun", held)
        self._begun = held

    def undone(self, step: int, *, is_compared: bool = False) -> None:
        """The step was thrown away, and is about to be computed again.

        The trainer is left out: hooks of an earlier micro-step may have changed it, and are not run again.

        Args:
            step: its number.
            is_compared: whether all ranks compare what they hold with what the step began with.

        Raises:
            PeerLost: somebody was lost meanwhile.
            RehearsalFailed: something was not put back.
        """
        held = state_digests(self._state) | unowned_digests(self._state) if self._looks_at(step) else {}
        if self._record is not None:
            self._record.write(step, "begun", held)
        if is_compared:
            self._raise_differences(step, "putting the step back", differing(self._begun, held))

    def _looks_at(self, step: int) -> bool:
        return self._record is not None or step in self._steps

    def note_batch(self, index: int, batch: Any) -> None:
        """A batch is about to be trained on."""
        if self._record is not None:
            self._batches[f"batch {index}"] = _value_digest(batch)

    def at(self, phase: str, step: int) -> None:
        """Say that this process is in a phase of a step; a scheduled fault may happen."""
        if self.faults is not None:
            self.faults.at(phase, step)

    @contextlib.contextmanager
    def computing(self, step: int) -> Generator[None]:
        """While a step is computed, faults that are due happen in a module's forward or backward."""
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

    def computed(self, step: int, again: Callable[[], bool]) -> None:
        """The gradients of a step are there, and no rank has voted.

        Args:
            step: its number.
            again: throws the step away and computes it once more; False where that was interrupted by a fault.

        Raises:
            PeerLost: somebody was lost while ranks compared what they had found.
            RehearsalFailed: the second time differed.
            ReplicasDiffer: replicas were to be compared before this step is committed, and differ.
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
        """Of all that this rank holds where a step begins."""
        return state_digests(self._state) | value_digests(_read(describe()), "trainer")

    def _before_update(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """An optimizer begins its step: count how often it evaluates its closure."""
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
                    f"{num_calls} times, but the gradients of a step are computed once, for the parameters that it "
                    "begins with. Use an optimizer that steps once on given gradients."
                )
            return closure()

        return args, {**kwargs, "closure": counted}

    def _raise_refused(self) -> None:
        """Stop where an optimizer did what a job that recovers can not do; all ranks see the same."""
        if self._refused:
            self._give_up(self._refused)
            raise RehearsalFailed(self._refused)

    def _computed(self, *, with_state: bool = False) -> dict[str, int]:
        gradients = gradient_digests(self._state.model)
        return gradients | state_digests(self._state) if with_state else gradients

    def _alike(self) -> dict[str, torch.Tensor]:
        """What replicas have alike: running statistics in buffers are each rank's own."""
        return {name: each for name, each in _named(self._state).items() if not name.startswith("buffer ")}

    def _compare(self, step: int) -> None:
        """Stop all ranks where replicas differ.

        It is a part of the computation, which all ranks run whatever was repaired before. Digests come from a thread
        that computes them beside the step. A difference counts when it is found again with this thread standing still:
        a program may write to parameters in the middle of a step.
        """
        hashed, self._hashed = self._hashed, None
        held: dict[str, int] = {}
        if hashed is not None and hashed[0] == step:
            hashed[1].join()
            held = hashed[1].found
        held = held or _digests(self._alike())
        with group_health.tolerant():
            found = compare_replicas(held, self._topology, self._device)
            if found is not None:
                found = compare_replicas(_digests(self._alike()), self._topology, self._device)
        if found is None:
            return
        reason = f"step {step}: {found}. Nothing of this step was updated; what was trained since the last comparison, "
        reason += f"{self._compare_every} steps before, may be wrong. Go back to a checkpoint from before it, and look "
        reason += "at the memory and the devices of that host."
        if found.names:
            self._give_up(reason)
        raise ReplicasDiffer(reason)

    def _read_back(self) -> tuple[str, ...]:
        """Write the state as a replacement would get it, overwrite what is there, and read it back."""
        before, data = state_digests(self._state), torch.empty(self._state.num_bytes(), dtype=torch.uint8)
        header = self._state.header()
        self._state.copy_to(data)
        with torch.no_grad():
            for tensor in self._state.tensors().values():
                tensor.fill_(1)
        self._state.copy_from(header, data, "the rehearsal")
        return differing(before, state_digests(self._state))

    def _compare_replicas(self) -> tuple[str, ...]:
        """Names of the tensors that another replica of this shard holds with other bits; see `_alike`."""
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
        dist.all_reduce(torch.zeros(1, device=self._device))  # nobody is in the hooks of the step before any more
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _read(description: bytes) -> Any:
    """A described trainer or loop. A peer may have described it, so nothing in it is unpickled."""
    try:
        with torch.serialization.safe_globals([PosixPath, PurePosixPath]):
            return unpacked(description, map_location=None)
    except (RuntimeError, pickle.UnpicklingError, EOFError):  # another format: it is compared as it is
        return {"": description}


class Record:
    """Lines of digests of one rank, which all processes in its place add to."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = folder / f"rank-{rank}.jsonl"

    def write(self, step: int, point: str, digests: Digests) -> None:
        """Add what this rank holds at a point of a step."""
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step, "point": point, "digests": digests}) + "\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledFault:
    """A SIGKILL at the first time that a rank comes to a phase of a step that is not before `step`."""

    phase: str
    rank: int
    step: int

    def to_text(self) -> str:
        """For the environment."""
        return f"{self.phase}:{self.rank}:{self.step}"


class ScheduledFaults:
    """Of one rank in a rehearsed job. Each happens once in the job: a file tells the replacement."""

    def __init__(self, folder: Path, text: str, rank: int) -> None:
        self._folder = folder
        self._faults = [fault for fault in parse_schedule(text) if fault.rank == rank]

    def is_due(self, phase: str, step: int) -> bool:
        """Whether a fault would happen here."""
        return self._due(phase, step) is not None

    def at(self, phase: str, step: int) -> None:
        """This process is in a phase of a step; what is due happens."""
        fault = self._due(phase, step)
        if fault is None:
            return
        with contextlib.suppress(FileExistsError):
            with self._marker(fault).open("x") as file:
                file.write(json.dumps(asdict(fault) | {"at_step": step}))
                file.flush()
                os.fsync(file.fileno())
            os.kill(os.getpid(), signal.SIGKILL)

    def _due(self, phase: str, step: int) -> ScheduledFault | None:
        due = (each for each in self._faults if each.phase == phase and step >= each.step)
        return next((each for each in due if not self._marker(each).exists()), None)

    def _marker(self, fault: ScheduledFault) -> Path:
        return self._folder / f"fault-{fault.phase}.json"


def parse_schedule(text: str) -> list[ScheduledFault]:
    """Inverse of `ScheduledFault.to_text`, for several, separated by commas."""
    parts = (part.split(":") for part in text.split(",") if part)
    return [ScheduledFault(phase=phase, rank=int(rank), step=int(step)) for phase, rank, step in parts]
