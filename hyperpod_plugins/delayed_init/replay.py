"""Replay a tape on real tensors, freeing each as soon as no later op needs it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hyperpod_plugins.delayed_init.tape import Constant, GeneratorRef, Op, StreamReplayer, Tape, View, plan_replay
from hyperpod_plugins.errors import InitializationError


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """Cost of a replay."""

    num_ops: int
    """Number of ops run."""
    peak_bytes: int
    """Peak size of the tape's storages in bytes, without temporary memory inside ops."""


def replay(tape: Tape, wanted: Sequence[View], fill: Callable[[int, torch.Tensor], None]) -> ReplayReport:
    """Compute views of a tape, passing each to `fill(index in wanted, full value)` as soon as it is final.

    The value is freed after the call. The random generators end in the state that building eagerly would have left.
    """
    waiting: dict[int, list[int]] = {}
    for index, view in enumerate(wanted):
        waiting.setdefault(view.version, []).append(index)
    plan = plan_replay(tape.ops, waiting, with_draws=True)
    memory = _Memory(tape, [StreamReplayer(stream) for stream in tape.streams])

    def finish(version: int) -> None:
        for index in waiting.pop(version, []):
            fill(index, memory.tensor(wanted[index]))
        memory.free(version)

    for step in plan.steps:
        op = tape.ops[step]
        memory.run(op)
        for version in op.used | op.written:
            if plan.last_use[version] == step:
                finish(version)
    for version in list(waiting):  # never touched: `torch.empty` buffers
        finish(version)
    for player in memory.players:
        player.finish()
    return ReplayReport(num_ops=len(plan.steps), peak_bytes=memory.peak_bytes)


def read_value(tape: Tape, tensor: torch.Tensor) -> torch.Tensor:
    """Compute a delayed tensor during a build, for code that reads its value.

    Raises:
        InitializationError: the value depends on random numbers, which are not drawn yet.
    """
    view = tape.view(tensor)
    plan = plan_replay(tape.ops, {view.version}, with_draws=False)
    if any(tape.ops[step].draw for step in plan.steps):
        raise InitializationError(
            "the model's constructor looks at a random value (item(), tolist(), numpy(), a comparison in an `if`), "
            "which does not exist while initialisation is delayed. Build that part of the model outside "
            "configure_model (in __init__), or draw the value from Python's `random` or from numpy."
        )
    memory = _Memory(tape, [])
    for step in plan.steps:
        memory.run(tape.ops[step])
    return memory.tensor(view)


class _Memory:
    """Real storages for the versions of a tape."""

    def __init__(self, tape: Tape, players: list[StreamReplayer]) -> None:
        self.players = players
        self.peak_bytes = 0
        self._tape = tape
        self._storages: dict[int, torch.UntypedStorage] = {}

    def tensor(self, view: View) -> torch.Tensor:
        """Real tensor of a view; a storage that no op has created yet is allocated uninitialised."""
        storage = self._storages.get(view.version)
        if storage is None:
            storage = torch.UntypedStorage(self._tape.versions[view.version].size_bytes)
            self._keep(view.version, storage)
        tensor = torch.empty(0, dtype=view.dtype, device="cpu").set_(storage, view.offset, view.size, view.stride)
        if view.is_conj:
            tensor = tensor.conj()
        return torch._neg_view(tensor) if view.is_neg else tensor  # pyright: ignore

    def free(self, version: int) -> None:
        self._storages.pop(version, None)

    @torch.no_grad()
    def run(self, op: Op) -> None:
        previous_dtype = torch.get_default_dtype()
        torch.set_default_dtype(op.default_dtype)
        try:
            if op.draw is not None:
                self.players[op.draw.stream].before(op.draw)
            result = op.func(*self._real(op.args), **self._real(op.kwargs))
            if op.draw is not None:
                self.players[op.draw.stream].after(op.draw)
        finally:
            torch.set_default_dtype(previous_dtype)
        outputs = [result] if isinstance(result, torch.Tensor) else (result or ())
        for view, output in zip(op.outputs, outputs, strict=False):
            if view is not None:
                if op.is_source and self._tape.versions[view.version].is_modified:
                    output = output.clone()  # it is the memory of a file, which may be read again
                self._keep(view.version, self._laid_out(output, view))

    def _real(self, value: Any) -> Any:
        if isinstance(value, View):
            return self.tensor(value)
        if isinstance(value, Constant):
            return value.value
        if isinstance(value, GeneratorRef):
            return self._tape.streams[value.stream].generator
        if isinstance(value, dict):
            return {key: self._real(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._real(item) for item in value)
        return value

    def _laid_out(self, output: torch.Tensor, view: View) -> torch.UntypedStorage:
        """Storage of an output, copied if the real kernel's memory layout differs from the meta kernel's."""
        expected = self._tape.versions[view.version].size_bytes
        storage = output.untyped_storage()
        is_same = (output.stride(), output.storage_offset()) == (view.stride, view.offset)
        if is_same and storage.nbytes() == expected:
            return storage
        copy = torch.empty(0, dtype=view.dtype, device="cpu").set_(
            torch.UntypedStorage(expected), view.offset, view.size, view.stride
        )
        return copy.copy_(output).untyped_storage()

    def _keep(self, version: int, storage: torch.UntypedStorage) -> None:
        self._storages[version] = storage
        self.peak_bytes = max(self.peak_bytes, sum(kept.nbytes() for kept in self._storages.values()))
