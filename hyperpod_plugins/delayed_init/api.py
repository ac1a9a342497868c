"""Build a model without allocating memory or drawing random numbers, by recording its construction on a tape.

    with delayed_init() as tape:
        model = build()                # parameters and buffers are on the meta device
    ...                                # shard, parallelise
    materialize(model)                 # bitwise equal to the result of build() alone; each rank makes its own part

Recording a constructor's operations to run them later is the idea of `deferred_init` in torchdistX
(https://github.com/pytorch/torchdistx). This implementation also accounts for the random stream and for overwritten
values, so that the result is exact and the replay needs little memory.

[Note: telling code that tensors are on the CPU]
`torch.nn.init` and many models skip the initialisation of a tensor on the meta device. Inside `delayed_init`, a
delayed tensor therefore reports the CPU as its device, where eager code would have put it.
"""

import importlib.util
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode

from hyperpod_plugins.delayed_init.recorder import Recorder, refuse_other_device
from hyperpod_plugins.delayed_init.tape import Tape
from hyperpod_plugins.delayed_init.weight_files import delayed_files

_recording: ContextVar[Tape | None] = ContextVar("tape of the current build", default=None)
_READING = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__}


@contextmanager
def delayed_init() -> Generator[Tape]:
    """Record tensor operations inside the context on a tape, without allocating memory or drawing random numbers.

    A nested `delayed_init` has no effect: everything goes on the tape of the outer one. Tensors made from data
    (`torch.tensor([...])`, numpy) stay real. The context leaves the random generators unchanged.

    Raises:
        InitializationError: inside, if code reads random values, writes delayed values into real tensors, or places
            tensors on a device other than the CPU.
    """
    outer = _recording.get()
    if outer is not None:
        yield outer  # one tape per build, because both parts draw from the same random stream
        return
    tape = Tape()
    modules: dict[nn.Module, None] = {}
    with ExitStack() as stack:
        stack.callback(_recording.reset, _recording.set(tape))
        stack.callback(tape.close)
        recorder = Recorder(tape)
        stack.enter_context(recorder)
        stack.enter_context(_CpuDeviceMode(recorder))
        stack.enter_context(_whole_trunc_normal(recorder))
        stack.enter_context(_collecting(modules))
        if importlib.util.find_spec("safetensors") is not None:
            stack.enter_context(delayed_files(recorder))
        yield tape
    for module in modules:
        tape.bind(module)


def delay_transformers() -> None:
    """From now on, models of transformers are loaded and built inside `delayed_init`, in the whole process."""
    if importlib.util.find_spec("transformers") is None:
        return
    from transformers import PreTrainedModel

    for name in ("from_pretrained", "_from_config"):
        original = vars(PreTrainedModel)[name].__func__
        if "_delays" not in vars(original):
            setattr(PreTrainedModel, name, classmethod(_delayed(original)))


def _delayed(build: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(build)
    def delayed(*args: Any, **kwargs: Any) -> Any:
        with delayed_init():
            return build(*args, **kwargs)

    vars(delayed)["_delays"] = True
    return delayed


@contextmanager
def _collecting(modules: dict[nn.Module, None]) -> Generator[None]:
    """Collect the modules that are given parameters, buffers or children."""

    def owner(module: nn.Module, name: str, tensor: object) -> None:
        modules[module] = None

    def child(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        if submodule is not None:
            modules.update(dict.fromkeys(submodule.modules()))  # deep copies never register their parameters

    def restored(self: nn.Module, state: Any) -> None:
        set_state(self, state)  # a deep copy of a whole model is registered nowhere
        modules[self] = None

    set_state = nn.Module.__setstate__
    handles = (
        register_module_parameter_registration_hook(owner),
        register_module_buffer_registration_hook(owner),
        register_module_module_registration_hook(child),
    )
    nn.Module.__setstate__ = restored
    try:
        yield
    finally:
        nn.Module.__setstate__ = set_state
        for handle in handles:
            handle.remove()


@contextmanager
def _whole_trunc_normal(recorder: Recorder) -> Generator[None]:
    """Record `trunc_normal_` as one op: it may redraw until all values fit, so its inner ops depend on values."""
    init = cast(Any, torch.nn.init)
    original = init._no_grad_trunc_normal_

    def trunc_normal(
        tensor: torch.Tensor, mean: float, std: float, a: float, b: float, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        if not recorder.tape.is_recorded(tensor):
            return original(tensor, mean, std, a, b, generator=generator)
        recorder.record_overwrite(original, tensor, (mean, std, a, b), generator)
        return tensor

    init._no_grad_trunc_normal_ = trunc_normal
    try:
        yield
    finally:
        init._no_grad_trunc_normal_ = original


class _CpuDeviceMode(TorchFunctionMode):
    """Answers queries of Python code for the device and the values of delayed tensors."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._answers = {
            cast(Any, torch.Tensor.device).__get__: torch.device("cpu"),
            cast(Any, torch.Tensor.is_meta).__get__: False,
            cast(Any, torch.Tensor.is_cpu).__get__: True,
        }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        refuse_other_device(func, device)  # before torch initialises that device
        if device is not None and torch.device(device).type == "meta":
            with self._recorder.paused():  # a skeleton, as the program says: its tensors have no values
                return func(*args, **kwargs)
        first = args[0] if args else None
        if not isinstance(first, torch.Tensor) or not self._recorder.tape.is_recorded(first):
            return func(*args, **kwargs)
        if func in self._answers:
            return self._answers[func]
        if func in _READING:
            return func(self._recorder.value_of(first), *args[1:], **kwargs)
        if func == torch.Tensor.new_tensor:
            return torch.tensor(*args[1:], **{"dtype": first.dtype, **kwargs})
        if func in (torch.tensor, torch.as_tensor):
            copy = first.detach().clone() if func is torch.tensor else first
            return copy.to(kwargs.get("dtype", first.dtype))
        if func == torch.Tensor.cpu:
            return first
        if func == torch.Tensor.to:
            # Not moving the tensor keeps `x.to("cpu")` an alias of x, as in eager code.
            return func(first, *map(_off_cpu, args[1:]), **{key: _off_cpu(item) for key, item in kwargs.items()})
        return func(*args, **kwargs)


def _off_cpu(argument: Any) -> Any:
    is_cpu = isinstance(argument, str | torch.device) and torch.device(argument).type == "cpu"
    return torch.device("meta") if is_cpu else argument
