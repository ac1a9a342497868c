"""Finds bodies that compute with parameters before their step.

[Note: parameters before a step] Where a body runs again, everything else is put back first to what it was as the body
began. Parameters are not. In a replacement, or after a return to a snapshot, they are those of the step: what precedes
it in the body has written to them. These writes are put back as the step begins, so that they count once; but a body
that also computes with what it has written would compute something else, and is refused. Where only the rest of a body
is to be repeated, all parameters are those after the step; a body that computes with trained ones before it may use
that in the rest, so all ranks return to a snapshot, or to a checkpoint, and run the step again.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from hyperpod_plugins.errors import LoopError, format_list
from hyperpod_plugins.parallel.unit_watch import parameters_by_id
from hyperpod_plugins.recovery.optimizer_copy import local_tensor

NUM_WATCHED = 8
"""First bodies of a process that are watched; later ones only where they run again."""
_SPECIAL = "array bool float int index complex contains"
_VALUES = {"item", "tolist", "numpy", "equal", "allclose", *(f"__{name}__" for name in _SPECIAL.split(" "))}
"""Functions that return the values of a tensor, though not as tensors."""
_IN_PLACE = "add sub mul div truediv floordiv mod pow matmul and or xor lshift rshift"
_OPERATORS = {f"__i{name}__" for name in _IN_PLACE.split(" ")}


class ParameterReads(TorchFunctionMode):
    """Between `open` and `close`, notes the parameters of a model that code writes to, and those it computes with.

    What compiled code does is not seen.
    """

    def __init__(self, model: nn.Module) -> None:
        """Watch nothing yet."""
        super().__init__()
        self._names: dict[int, str] = {}
        for each, name in parameters_by_id(model).values():
            key = _memory_of(each)
            self._names[key] = name if self._names.get(key, name) == name else ""
        self._names = {key: name for key, name in self._names.items() if key and name}  # parts of one memory are not
        self._trained = {name for name, each in model.named_parameters() if each.requires_grad}
        self._is_on = False
        self._read: set[str] = set()
        self._written: set[str] = set()

    def open(self) -> None:
        """Begin to watch."""
        self._is_on = True
        self.__enter__()

    def close(self) -> None:
        """End watching; does nothing if it has ended."""
        if not self._is_on:
            return
        self._is_on = False
        above: list[TorchFunctionMode] = []  # modes that the program has entered since, and has not left
        while (mode := torch.overrides._pop_mode()) is not self:  # pyright: ignore[reportPrivateUsage]: no public API
            above.append(mode)
        for mode in reversed(above):
            torch.overrides._push_mode(mode)  # pyright: ignore[reportPrivateUsage]

    @property
    def of_trained(self) -> list[str]:
        """Names of the trained parameters that were read."""
        return sorted(self._read & self._trained)

    def check(self) -> None:
        """Refuse what was noted.

        Raises:
            LoopError: a parameter was both written and read.
        """
        both = sorted(self._read & self._written)
        if both:
            raise LoopError(
                f"the body of a step writes to {format_list(both)} and also computes with it, before step.run(...). "
                "Where the body runs again after a fault, it would compute with the values after that write. Do this "
                "after step.run(...), in the same block, where all parameters are those with which the next step "
                "begins, or in the function that is given to it."
            )

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        more: Mapping[str, Any] = kwargs or {}
        if not self._is_on or not (given := self._parameters_in((args, more))):
            return func(*args, **more)
        target = next(iter(args), None) if _is_in_place(func) else more.get("out")
        targets = self._parameters_in(target)
        result = func(*args, **more)
        self._written |= targets
        if _name_of(func) in ("__get__", "__set__", "requires_grad_"):
            return result
        others = self._parameters_in((args[1:], [each for name, each in more.items() if name != "out"]))
        if not targets:
            others |= given
        results = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        computed = any(_memory_of(each) not in self._names for each in results)
        if targets or computed or _name_of(func) in _VALUES:
            self._read |= others
        return result

    def _parameters_in(self, values: Any) -> set[str]:
        tensors: Iterable[Any] = (each for each in tree_leaves(values) if isinstance(each, torch.Tensor))
        return {self._names[key] for key in map(_memory_of, tensors) if key in self._names}


def _memory_of(tensor: torch.Tensor) -> int:
    """Address of a tensor's memory, or of that of a DTensor's local part; 0 if it has none."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else local_tensor(tensor)  # pyright: ignore[reportPrivateUsage]
    if local.layout is not torch.strided or local.is_meta or type(local) not in (torch.Tensor, nn.Parameter):
        return 0
    return local.untyped_storage().data_ptr()


def _name_of(func: Callable[..., Any]) -> str:
    return getattr(func, "__name__", "")


def _is_in_place(func: Callable[..., Any]) -> bool:
    """Whether a function writes to its first argument."""
    name = _name_of(func)
    if name.startswith("__"):
        return name == "__setitem__" or name in _OPERATORS
    return name.endswith("_") and name != "requires_grad_"
