"""A dispatch mode that runs every op on delayed tensors on the meta device and records it on a tape."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hyperpod_plugins.delayed_init.tape import Constant, GeneratorRef, Op, Tape, View, read_value
from hyperpod_plugins.errors import InitializationError

_aten = torch.ops.aten
_OVERWRITING = {
    _aten.normal_.default,
    _aten.uniform_.default,
    _aten.random_.default,
    _aten.random_.to,
    getattr(_aten.random_, "from"),
    _aten.bernoulli_.float,
    _aten.exponential_.default,
    _aten.log_normal_.default,
    _aten.cauchy_.default,
    _aten.geometric_.default,
    _aten.fill_.Scalar,
    _aten.fill_.Tensor,
    _aten.zero_.default,
    _aten.copy_.default,
}
_WITHOUT_VALUES = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}


class Recorder(TorchDispatchMode):
    """Runs ops on delayed tensors on the meta device and records them; other ops run as usual."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape
        self._is_paused = False

    def value_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Compute a delayed tensor now."""
        with self.paused():
            return read_value(self.tape, tensor)

    @contextmanager
    def paused(self) -> Generator[None]:
        """Run operations in the context as without a recorder."""
        was_paused, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = was_paused

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if self._is_paused:
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
            tensors = _tensors((args, kwargs))
            draws = torch.Tag.nondeterministic_seeded in func.tags
            is_of_skeleton = bool(tensors) and all(map(self._is_on_meta, tensors))
            if is_of_skeleton and not _is_for_cpu(kwargs):
                return func(*args, **kwargs)
            is_recorded = is_of_skeleton or draws or any(self.tape.is_recorded(tensor) for tensor in tensors)
            if tensors and not is_recorded:
                return func(*args, **kwargs)
            if torch.Tag.data_dependent_output in func.tags:
                return self._run_on_values(func, args, kwargs)
            try:
                return self._record(func, args, kwargs, draws=draws)
            except (NotImplementedError, RuntimeError) as error:
                # Output shapes that depend on values (boolean masks, nonzero): meta kernels fail, so use values.
                is_refused = torch.Tag.dynamic_output_shape in func.tags and not func._schema.is_mutable
                if is_refused and not isinstance(error, InitializationError):
                    return self._run_on_values(func, args, kwargs)
                raise

    def record_overwrite(
        self, func: Callable[..., Any], tensor: torch.Tensor, args: tuple[Any, ...], generator: torch.Generator | None
    ) -> None:
        """Record a call `func(tensor, *args, generator=...)` that overwrites the tensor with random numbers."""
        with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
            version = {self._written(tensor, overwrites=True)}
            self._append(func, (tensor, *args), {"generator": generator}, touched=version, changed=version, draws=True)

    def record_source(self, source: Callable[[], torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        """A delayed tensor whose value `source()` returns when the tape is replayed; `source` stays on the tape."""
        with self.paused():
            tensor = torch.empty(shape, dtype=dtype, device="meta")
        version = self.tape.new_version(tensor, is_written=True)
        with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
            outputs = (self.tape.view(tensor),)
        self._append(source, (), {}, outputs=outputs, touched=set(), changed={version}, draws=False, is_source=True)
        return tensor

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, draws: bool) -> Any:
        arguments = func._schema.arguments
        if any(argument.name == "device" for argument in arguments):
            refuse_other_device(func, kwargs.get("device"))
            kwargs["device"] = torch.device("cpu")
        written = _written_arguments(arguments, args, kwargs)
        targets = [tensor for tensor, _ in written]
        if targets and all(map(self._is_on_meta, targets)):
            return func(*_on_meta(args), **_on_meta(kwargs))
        for tensor in targets:
            self._refuse_real(func, tensor)
        result = func(*_on_meta(args), **_on_meta(kwargs))

        read = _read_arguments(arguments, args, kwargs)
        touched = {self.tape.view(tensor).version for tensor in read if self.tape.is_recorded(tensor)}
        for tensor, is_out in written:
            can_overwrite = (is_out or func in _OVERWRITING) and self.tape.view(tensor).version not in touched
            touched.add(self._written(tensor, overwrites=can_overwrite))
        outputs = tuple(self._hold(output, is_written=func not in _WITHOUT_VALUES) for output in _tensors(result))
        changed = {self.tape.view(tensor).version for tensor in targets}
        changed |= {view.version for view in outputs if view is not None}
        if (
            changed or draws
        ) and func not in _WITHOUT_VALUES:  # else it made a view or uninitialised memory: nothing to replay
            self._append(func, args, kwargs, outputs=outputs, touched=touched, changed=changed, draws=draws)
        return result

    def _append(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        outputs: tuple[View | None, ...] = (),
        touched: set[int],
        changed: set[int],
        draws: bool,
        is_source: bool = False,
    ) -> None:
        draw = self.tape.stream(kwargs.get("generator")).draw() if draws else None
        op = Op(
            func=func,
            args=_map(args, self._encode),
            kwargs=_map(kwargs, self._encode),
            outputs=outputs,
            used=frozenset(touched),
            written=frozenset(changed),
            default_dtype=torch.get_default_dtype(),
            draw=draw,
            is_source=is_source,
        )
        self.tape.ops.append(op)

    def _encode(self, value: Any) -> Any:
        if isinstance(value, torch.Generator):
            return GeneratorRef(self.tape.streams.index(self.tape.stream(value)))
        if isinstance(value, torch.Tensor):
            return self.tape.view(value) if self.tape.is_recorded(value) else Constant(value.detach().clone())
        return value

    def _written(self, tensor: torch.Tensor, *, overwrites: bool) -> int:
        """Version of a tensor that an op wrote; a new one if the op overwrote the whole storage."""
        covers_storage = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        if overwrites and covers_storage and _is_dense(tensor):
            return self.tape.new_version(tensor, is_written=True)
        version = self.tape.view(tensor).version
        self.tape.versions[version].is_written = self.tape.versions[version].is_modified = True
        return version

    def _hold(self, output: torch.Tensor, *, is_written: bool) -> View | None:
        if self.tape.is_recorded(output):
            return None
        self.tape.new_version(output, is_written=is_written)
        return self.tape.view(output)

    def _is_on_meta(self, tensor: torch.Tensor) -> bool:
        """Whether the program itself has put a tensor on the meta device, as that of a model's skeleton."""
        return tensor.is_meta and not self.tape.is_recorded(tensor)

    def _refuse_real(self, func: Any, tensor: torch.Tensor) -> None:
        if not self.tape.is_recorded(tensor):
            raise InitializationError(
                f"while initialisation is delayed, {func} writes into a tensor of shape {tuple(tensor.shape)} that "
                "already has memory (it was created outside, or from data by torch.tensor or torch.load). Create the "
                "tensor inside with an op such as torch.zeros, or create and fill it outside, in __init__."
            )

    def _run_on_values(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op whose result depends on values now, on computed values; its outputs are real tensors."""

        def value(argument: Any) -> Any:
            is_delayed = isinstance(argument, torch.Tensor) and self.tape.is_recorded(argument)
            return self.value_of(argument) if is_delayed else argument

        return func(*_map(args, value), **_map(kwargs, value))


def _is_for_cpu(kwargs: dict[str, Any]) -> bool:
    """Whether a call places its result on the CPU."""
    device = kwargs.get("device")
    return device is not None and torch.device(device).type == "cpu"


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements are contiguous in memory, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _read_arguments(arguments: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Tensors that an op reads according to its schema. One that it also writes counts if it is given twice."""
    given = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
    return [
        tensor
        for argument in arguments
        if argument.alias_info is None or not argument.alias_info.is_write
        for tensor in _tensors(given.get(argument.name))
    ]


def _written_arguments(
    arguments: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[torch.Tensor, bool]]:
    """Tensors that an op writes according to its schema, and whether each is an `out=` argument."""
    given = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
    return [
        (tensor, argument.is_out)
        for argument in arguments
        if argument.alias_info is not None and argument.alias_info.is_write and argument.name in given
        for tensor in _tensors(given[argument.name])
    ]


def refuse_other_device(func: Any, device: torch.device | str | int | None) -> None:
    """Raise an InitializationError if a call creates a tensor on a device other than the CPU."""
    if device is not None and torch.device(device).type not in ("cpu", "meta"):
        raise InitializationError(
            f"while initialisation is delayed, {func} places a tensor on {device}. Build the model on the CPU "
            "(without a device argument or a `torch.device` context): its parts are put on their device afterwards."
        )


def _on_meta(value: Any) -> Any:
    def move(item: Any) -> Any:
        if isinstance(item, torch.Tensor) and not item.is_meta:
            return torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device="meta")
        if isinstance(item, torch.device):
            return torch.device("meta")
        return None if isinstance(item, torch.Generator) else item

    return _map(value, move)


def _map(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to the leaves of nested lists, tuples and dicts."""
    if isinstance(value, dict):
        return {key: _map(item, function) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_map(item, function) for item in value)
    return function(value)


def _tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    _map(value, lambda item: found.append(item) if isinstance(item, torch.Tensor) else None)
    return found
