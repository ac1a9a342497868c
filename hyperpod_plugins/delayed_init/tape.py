"""The tape of a delayed build: ops, the memory they write, and random streams; and its replay on real tensors.

[Note: versions]
Tensors are identified by their storage, so views, `.data` and tied weights need no special care. A storage gets a new
*version* each time an op overwrites all of it without reading it. A linear layer that the constructor fills and
`_init_weights` fills again thus has two versions, and only the second must be kept. The first is still drawn, so that
later random numbers are the same, but into memory that is freed at once.

[Note: seeds seen on tape]
User code may read or set the state of a generator during a build (`torch.manual_seed`, `fork_rng`). Delayed ops draw
nothing, so the state of the generator would not advance and a saved state would be meaningless. After every delayed
draw we therefore set the generator to an artificial state that stands for "after draw n". If the next draw finds the
expected state, the generator is unchanged. If it finds the state for "after draw m", user code has restored that one.
Any other state was set by the user and is recorded as it is.
"""

import hashlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hyperpod_plugins.errors import InitializationError, format_list

# Seeds of the artificial states: odd, so that different draws have different ones; large, so that no user picks one.
_TOKEN_STEP = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """The random numbers that one delayed op draws."""

    stream: int
    """Index of the generator on the tape; 0 is torch's default CPU generator."""
    number: int
    """Number of this draw in its stream, from 1."""
    reseed: torch.Tensor | int | None
    """State to set before the draw: the user's, or the one after this draw (0: the start); None keeps the state."""


class RandomStream:
    """A CPU generator while ops are recorded."""

    def __init__(self, generator: torch.Generator, index: int) -> None:
        self.generator = generator
        self.entry_state = generator.get_state()
        self.final: torch.Tensor | int | None = None
        self.kept_numbers: set[int] = set()
        self._index = index
        self._num_draws = 0
        self._expected = _digest(self.entry_state)
        self._numbers = {self._expected: 0}

    def draw(self) -> Draw:
        """Record one draw."""
        reseed = self._reseed()
        self._num_draws += 1
        self.generator.manual_seed(self._num_draws * _TOKEN_STEP % 2**63)
        self._expected = _digest(self.generator.get_state())
        self._numbers[self._expected] = self._num_draws
        return Draw(self._index, self._num_draws, reseed)

    def close(self) -> None:
        """End recording: save the state that the user left, and restore the generator's state from before."""
        self.final = self._reseed()
        self.generator.set_state(self.entry_state)

    def _reseed(self) -> torch.Tensor | int | None:
        state = self.generator.get_state()
        digest = _digest(state)
        if digest == self._expected:
            return None
        number = self._numbers.get(digest)
        if number is None:
            return state
        self.kept_numbers.add(number)
        return number


class StreamReplayer:
    """A generator while the tape is replayed, when it really draws."""

    def __init__(self, stream: RandomStream) -> None:
        self._stream = stream
        self._kept = {0: stream.entry_state}
        stream.generator.set_state(stream.entry_state)

    def before(self, draw: Draw) -> None:
        """Set the generator to the state that eager code would have found."""
        self._set(draw.reseed)

    def after(self, draw: Draw) -> None:
        """Save the state if the build restored it later."""
        if draw.number in self._stream.kept_numbers:
            self._kept[draw.number] = self._stream.generator.get_state()

    def finish(self) -> None:
        """Set the generator to the state that eager code would have left."""
        self._set(self._stream.final)

    def _set(self, reseed: torch.Tensor | int | None) -> None:
        if reseed is not None:
            self._stream.generator.set_state(self._kept[reseed] if isinstance(reseed, int) else reseed)


def _digest(state: torch.Tensor) -> bytes:
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=16).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A strided view of one version of a storage."""

    version: int
    """Index into `Tape.versions`."""
    size: tuple[int, ...]
    """Shape of the tensor."""
    stride: tuple[int, ...]
    """Strides in elements."""
    offset: int
    """Storage offset in elements."""
    dtype: torch.dtype
    """Element type of the view."""
    is_conj: bool = False
    """Whether the tensor is lazily conjugated."""
    is_neg: bool = False
    """Whether the tensor is lazily negated."""


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """Copy of a real tensor that a delayed op reads, made when the op was recorded."""

    value: torch.Tensor


@dataclass(frozen=True, slots=True)
class GeneratorRef:
    """Stands for a `torch.Generator` argument, by the index of its stream."""

    stream: int


@dataclass(slots=True)
class Version:
    """The bytes of one storage between two full overwrites."""

    size_bytes: int
    """Size of the storage."""
    is_written: bool = False
    """Whether any op gave it values; memory from `torch.empty` has none."""
    is_modified: bool = False
    """Whether an op changes the values that another one gave it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Op:
    """One recorded call. Tensors in `args` and `kwargs` are `View` or `Constant`."""

    func: Callable[..., Any]
    """Function to call: an aten op, or a function that is replayed as a whole."""
    args: tuple[Any, ...]
    """Positional arguments."""
    kwargs: dict[str, Any]
    """Keyword arguments."""
    outputs: tuple[View | None, ...]
    """Returned tensors in order; None for a tensor whose storage was on the tape before."""
    used: frozenset[int]
    """Versions that the op reads or writes, without outputs."""
    written: frozenset[int]
    """Versions that the op writes, including outputs."""
    default_dtype: torch.dtype
    """`torch.get_default_dtype()` when the op was recorded."""
    draw: Draw | None
    """The random numbers that the op draws, if any."""
    is_source: bool = False
    """Whether it reads a value from elsewhere, such as a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    """Which ops to run in which order, and when to free memory."""

    steps: tuple[int, ...]
    """Indices of the ops in the order to run them."""
    last_use: dict[int, int]
    """Version to the index of the last op that uses it."""


def plan_replay(ops: Sequence[Op], wanted: Iterable[int], *, with_draws: bool) -> ReplayPlan:
    """Choose the ops that the wanted versions depend on and, if `with_draws`, every op that draws random numbers.

    Draws keep their order. Every other op runs as early as its inputs allow, so that `model.bfloat16()` at the end of
    a build does not keep the whole model in memory in float32.
    """
    needed = set(wanted)
    chosen: list[int] = []
    for index in reversed(range(len(ops))):
        op = ops[index]
        if op.written & needed or (with_draws and op.draw):
            chosen.append(index)
            needed |= op.used

    turn_of_op: dict[int, int] = {}
    turn_of_version: dict[int, int] = {}  # turn of the latest op so far that touches the version
    for index in reversed(chosen):
        op = ops[index]
        earlier = [turn_of_version[version] for version in op.used if version in turn_of_version]
        turn_of_op[index] = index if op.draw or not earlier else max(earlier)
        turn_of_version |= dict.fromkeys(op.used | op.written, turn_of_op[index])
    steps = tuple(sorted(turn_of_op, key=lambda index: (turn_of_op[index], index)))
    last_use = {version: index for index in steps for version in ops[index].used | ops[index].written}
    return ReplayPlan(steps=steps, last_use=last_use)


class Tape:
    """The ops on a model's tensors during its build, in order."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.versions: list[Version] = []
        self.streams: list[RandomStream] = [RandomStream(torch.default_generator, 0)]
        # Keep storages alive so that their addresses, used as keys, are not reused. Meta storages take no memory.
        self._held: dict[int, tuple[torch.UntypedStorage, int]] = {}
        self._at_end: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        """Modules' tensors as the recording ended, by `id`, and how often each had been written to by then."""

    @property
    def rng_state(self) -> torch.Tensor:
        """State of the default CPU generator when the build began. Set it to rank 0's before `materialize`."""
        return self.streams[0].entry_state

    @rng_state.setter
    def rng_state(self, state: torch.Tensor) -> None:
        self.streams[0].entry_state = state

    def is_recorded(self, tensor: torch.Tensor) -> bool:
        """Whether the values of this tensor are on the tape rather than in memory."""
        return _key(tensor) in self._held

    def view(self, tensor: torch.Tensor) -> View:
        """The view of a storage version that a delayed tensor stands for."""
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
        """Begin a new version of the storage of `tensor`, which may be new to the tape; returns its index."""
        storage = tensor.untyped_storage()
        self.versions.append(Version(storage.nbytes(), is_written))
        self._held[_key(tensor)] = (storage, len(self.versions) - 1)
        return len(self.versions) - 1

    def stream(self, generator: torch.Generator | None) -> RandomStream:
        """The stream of a generator, added if new; None means torch's default generator."""
        if generator is None:
            return self.streams[0]
        for stream in self.streams:
            if stream.generator is generator:
                return stream
        self.streams.append(RandomStream(generator, len(self.streams)))
        return self.streams[-1]

    def close(self) -> None:
        """End recording."""
        for stream in self.streams:
            stream.close()

    def bind(self, module: torch.nn.Module) -> None:
        """Remember the delayed tensors that a module owns directly, before sharding replaces its parameters."""
        own = own_tensors(module)
        bound = {name: Bound(self, self.view(tensor)) for name, tensor in own.items() if self.is_recorded(tensor)}
        for name in bound:
            self._at_end[id(own[name])] = weakref.ref(own[name]), own[name]._version
        skeleton = frozenset(name for name, tensor in own.items() if tensor.is_meta and name not in bound)
        if bound or skeleton:
            vars(module)[_BINDING] = Binding(bound=bound, skeleton=skeleton)

    def is_changed(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor that a module owned as the recording ended has been written to in place since then."""
        alive, version = self._at_end.get(id(tensor), (None, 0))
        return alive is not None and alive() is tensor and tensor._version != version


@dataclass(frozen=True, slots=True)
class Bound:
    """Where the value of a delayed tensor is."""

    tape: Tape
    """The tape that has it."""
    view: View
    """Its place on the tape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """The delayed tensors of one module. Sharding keeps module objects but replaces parameters."""

    bound: dict[str, Bound]
    """Name in the module to the place of its value."""
    skeleton: frozenset[str] = frozenset()
    """Names of tensors that the program itself put on the meta device inside `delayed_init`."""
    is_copy: bool = False
    """Whether the module is a deep copy, made later; its tensors are other ones."""

    def __deepcopy__(self, memo: object) -> "Binding":
        """The binding of a copied module, whose values are those of the original."""
        return replace(self, is_copy=True)

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickled module has none."""
        return type(None), ()


_BINDING = "_hyperpod_binding"
"""Name of a module's `Binding` among its attributes, with which it is copied."""


def binding_of(module: torch.nn.Module) -> Binding | None:
    """The delayed tensors that a module owns directly, or None."""
    return vars(module).get(_BINDING)


def release_tapes(model: torch.nn.Module) -> None:
    """Drop the tapes of a model, once its tensors have their values."""
    for module in model.modules():
        vars(module).pop(_BINDING, None)


def rebind(model: torch.nn.Module) -> None:
    """Bind delayed tensors to the modules that own them now, which may have changed since `delayed_init` ended.

    Call it before the model is sharded. Tensors that were tied or moved keep their values.

    Raises:
        InitializationError: values were changed since then, so that the tape no longer has them.
    """
    tapes, changed = tapes_of(model), list[str]()
    for module_name, module in model.named_modules():
        binding = binding_of(module) or Binding(bound={})
        bound = dict(binding.bound)
        for key, tensor in own_tensors(module).items():
            if not tensor.is_meta or isinstance(tensor, DTensor):
                continue
            tape = next((each for each in tapes if each.is_recorded(tensor)), None)
            if tape is not None:
                bound[key] = Bound(tape, tape.view(tensor))
                is_changed = tape.is_changed(tensor)
            elif key not in bound:
                continue
            elif binding.is_copy:
                is_changed = tensor._version > 0
            else:  # a cast gives it other memory, and the value is cast when it exists
                view = bound[key].view
                is_changed = (tensor.dtype, tuple(tensor.shape)) == (view.dtype, view.size)
            if is_changed:
                changed.append(full_name(module_name, key))
        if bound and bound != binding.bound:
            vars(module)[_BINDING] = replace(binding, bound=bound)
    if changed:
        raise InitializationError(
            f"{format_list(changed)} changed after delayed_init had ended (written to in place, loaded, or cast there "
            "and back), before there were values to change. Change it inside delayed_init, or once it is sharded."
        )


def tapes_of(model: torch.nn.Module) -> list[Tape]:
    """All tapes that hold delayed tensors of a model, in the order of its modules.

    For the same initial values on all ranks, set the `rng_state` of each tape to rank 0's before `materialize`.
    """
    bindings = (binding_of(module) for module in model.modules())
    return list(dict.fromkeys(each.tape for binding in bindings if binding for each in binding.bound.values()))


def own_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers that a module owns directly, by name."""
    named = [*module.named_parameters(recurse=False, remove_duplicate=False)]
    return dict([*named, *module.named_buffers(recurse=False, remove_duplicate=False)])


def full_name(prefix: str, name: str) -> str:
    """Qualified name of a module's member; `prefix` is the module's name, empty for the model itself."""
    return f"{prefix}.{name}" if prefix else name


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


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
