"""The tape of a delayed build: which op wrote which memory, and the pure plan of replaying it in little memory.

[Note: versions]
Tensors are named by the storage they look into, so views, `.data` and tied weights need no care of their own.
A storage has a new *version* each time an op overwrites all of it without reading it. A linear layer that the
constructor fills and `_init_weights` fills again thus has two versions, and only the second must be kept. The first
is still drawn, because the random numbers must come out the same, but into memory that is freed at once.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from hyperpod_plugins.delayed_init.rng import Draw, Stream


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One strided look into one version of a storage."""

    version: int
    """Index into `Tape.versions`."""
    size: tuple[int, ...]
    """Shape of the tensor."""
    stride: tuple[int, ...]
    """Elements to step per dimension."""
    offset: int
    """Elements before the first one."""
    dtype: torch.dtype
    """Element type under which the bytes are read."""
    is_conj: bool = False
    """Whether the tensor is lazily conjugated."""
    is_neg: bool = False
    """Whether the tensor is lazily negated."""


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """A real tensor that a delayed op reads, as it was then."""

    value: torch.Tensor


@dataclass(frozen=True, slots=True)
class GeneratorRef:
    """The place of a `torch.Generator` argument."""

    stream: int


@dataclass(slots=True)
class Version:
    """The bytes of one storage between two full overwrites."""

    size_bytes: int
    """Size of the storage."""
    is_written: bool = False
    """Whether any op gave it values; memory from `torch.empty` has none."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Op:
    """One recorded call. Tensors in `args` and `kwargs` are `View` or `Constant`."""

    func: Callable[..., Any]
    """What to call: an aten op, or a function that is replayed as a whole."""
    args: tuple[Any, ...]
    """Positional arguments."""
    kwargs: dict[str, Any]
    """Keyword arguments."""
    outputs: tuple[View | None, ...]
    """New memory it returns, in order; None for a tensor that was known before."""
    touched: frozenset[int]
    """Versions it reads or writes, outputs not included."""
    changed: frozenset[int]
    """Versions it writes, outputs included."""
    default_dtype: torch.dtype
    """`torch.get_default_dtype()` at the time."""
    draw: Draw | None
    """The random numbers it takes, if any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    """Which ops to run, and when memory may go."""

    steps: tuple[int, ...]
    """Indices of the ops, in the order to run them."""
    last_use: dict[int, int]
    """Version: index of the last op that touches it."""


def plan_replay(ops: Sequence[Op], wanted: Iterable[int], *, with_draws: bool) -> ReplayPlan:
    """Choose the ops that the wanted versions depend on and, with draws, every op that draws random numbers.

    Draws keep their order. Every other op comes as early as its inputs allow, so that `model.bfloat16()` at the end of
    a build does not keep the whole model alive in float32.
    """
    needed = set(wanted)
    chosen: list[int] = []
    for index in reversed(range(len(ops))):
        op = ops[index]
        if op.changed & needed or (with_draws and op.draw):
            chosen.append(index)
            needed |= op.touched

    turn_of_op: dict[int, int] = {}
    turn_of_version: dict[int, int] = {}  # of the last op so far that touches it
    for index in reversed(chosen):
        op = ops[index]
        earlier = [turn_of_version[version] for version in op.touched if version in turn_of_version]
        turn_of_op[index] = index if op.draw or not earlier else max(earlier)
        turn_of_version |= dict.fromkeys(op.touched | op.changed, turn_of_op[index])
    steps = tuple(sorted(turn_of_op, key=lambda index: (turn_of_op[index], index)))
    last_use = {version: index for index in steps for version in ops[index].touched | ops[index].changed}
    return ReplayPlan(steps=steps, last_use=last_use)


class Tape:
    """What was done to the tensors of a model while it was built, in order."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.versions: list[Version] = []
        self.streams: list[Stream] = [Stream(torch.default_generator, 0)]
        # Storages are held so that their addresses, which name them, are not used again. On meta they take no memory.
        self._held: dict[int, tuple[torch.UntypedStorage, int]] = {}

    @property
    def rng_state(self) -> torch.Tensor:
        """State of the default CPU generator when the build began. Set it to rank 0's before materializing."""
        return self.streams[0].entry_state

    @rng_state.setter
    def rng_state(self, state: torch.Tensor) -> None:
        self.streams[0].entry_state = state

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the values of this tensor are on tape rather than in memory."""
        return _key(tensor) in self._held

    def view(self, tensor: torch.Tensor) -> View:
        """Name a delayed tensor by what it looks into."""
        return View(
            version=self._held[_key(tensor)][1],
            size=tuple(tensor.shape),
            stride=tensor.stride(),
            offset=int(tensor.storage_offset()),
            dtype=tensor.dtype,
            is_conj=tensor.is_conj(),
            is_neg=tensor.is_neg(),
        )

    def new_version(self, tensor: torch.Tensor, *, is_written: bool) -> int:
        """Begin a version of the storage behind `tensor`, which may be new to the tape."""
        storage = tensor.untyped_storage()
        self.versions.append(Version(storage.nbytes(), is_written))
        self._held[_key(tensor)] = (storage, len(self.versions) - 1)
        return len(self.versions) - 1

    def stream(self, generator: torch.Generator | None) -> Stream:
        """The stream of a generator, the default one for None."""
        if generator is None:
            return self.streams[0]
        for stream in self.streams:
            if stream.generator is generator:
                return stream
        self.streams.append(Stream(generator, len(self.streams)))
        return self.streams[-1]

    def close(self) -> None:
        """End recording."""
        for stream in self.streams:
            stream.close()

    def bind(self, module: torch.nn.Module) -> None:
        """Note the delayed tensors that a module owns itself, before sharding replaces its parameters by others."""
        views = {name: self.view(tensor) for name, tensor in own_tensors(module).items() if self.holds(tensor)}
        if views:
            _bindings[module] = Binding(tape=self, views=views)


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """The tape of one module's tensors. Modules stay the same objects when they are sharded; parameters do not."""

    tape: Tape
    """What holds the values."""
    views: dict[str, View]
    """Name in the module: which value."""


_bindings: WeakKeyDictionary[torch.nn.Module, Binding] = WeakKeyDictionary()


def binding_of(module: torch.nn.Module) -> Binding | None:
    """The tape of the tensors that a module owns itself, or None."""
    return _bindings.get(module)


def release(model: torch.nn.Module) -> None:
    """Forget the tapes of a model, whose tensors have their values now."""
    for module in model.modules():
        _bindings.pop(module, None)


def tapes_of(model: torch.nn.Module) -> list[Tape]:
    """All tapes with delayed tensors of a model, in the order of its modules.

    Ranks that must build the same model set `rng_state` of each to that of the first rank before `materialize`.
    """
    bindings = (binding_of(module) for module in model.modules())
    return list(dict.fromkeys(binding.tape for binding in bindings if binding is not None))


def own_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers that a module owns itself, by their names in it."""
    named = [*module.named_parameters(recurse=False, remove_duplicate=False)]
    return dict([*named, *module.named_buffers(recurse=False, remove_duplicate=False)])


def full_name(prefix: str, name: str) -> str:
    """Name of something in a module, seen from the model: `prefix` is the module's name, empty for the model itself."""
    return f"{prefix}.{name}" if prefix else name


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
