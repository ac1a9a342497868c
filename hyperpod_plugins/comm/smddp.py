"""SageMaker's collective library: when it is available, and workarounds for what it lacks.

[Note: what smddp lacks] The library speeds up all-reduce and all-gather between P4 nodes
(https://docs.aws.amazon.com/sagemaker/latest/dg/data-parallel-intro.html). Its users report that its reductions have
no AVG (Lightning issue 20409) and that it does not support sub-groups. So groups that do not span the world use nccl
or gloo, and a mean is computed as a sum that is divided when it has arrived.
"""

# The creator that a third party registered with c10d is kept in a private table.
# pyright: reportPrivateUsage=false

import importlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllreduceCoalescedOptions,
    AllreduceOptions,
    Backend,
    PrefixStore,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
    _DistributedBackendOptions,
)

from hyperpod_plugins import env
from hyperpod_plugins.comm.process_group import DelegatingGroup
from hyperpod_plugins.comm.traffic import Collective
from hyperpod_plugins.comm.transport import (
    InnerGroup,
    InnerSpec,
    Nccl,
    abort_cuda_backend,
    assemble_group,
    gloo_backend,
)

MODULE = "smdistributed.dataparallel.torch.torch_smddp"
SUPPORTED_INSTANCES = ("p4d", "p4de")


def import_error() -> str | None:
    """Import the library, which registers its own c10d backend; return why that failed, or None."""
    try:
        importlib.import_module(MODULE)
    except ImportError as error:
        return f"its library cannot be imported ({error})"
    plugin = dist.Backend._plugins.get("SMDDP")
    if plugin is None or plugin.creator_fn.__module__.startswith("hyperpod_plugins."):
        return f"{MODULE} was imported but registered no backend"
    return None


def unsupported_instance_reason(instance_type: str | None) -> str | None:
    """Return why the library does not run on an instance type such as `ml.p4d.24xlarge`, or None if it does."""
    supported = " and ".join(SUPPORTED_INSTANCES)
    if instance_type is None:
        return (
            f"the instance type is unknown, and it runs on {supported} only "
            "(set HYPERPOD_INSTANCE_TYPE=ml.p4d.24xlarge if this is one)"
        )
    if not set(instance_type.split(".")) & set(SUPPORTED_INSTANCES):
        return f"it runs on {supported} instances only, and this is {instance_type}"
    return None


class Smddp:
    """Transport over SageMaker's library, for groups that span the world."""

    name = "smddp"

    def unsupported_reason(self, device_type: str) -> str | None:
        """See `Transport`."""
        reason = import_error() or unsupported_instance_reason(env.instance_type())
        if reason is None and device_type not in dist.Backend.backend_capability["smddp"]:
            return f"it does not serve {device_type} tensors"
        return reason

    def unsupported_group_reason(self, group_size: int, world_size: int) -> str | None:
        """See `Transport`."""
        if group_size != world_size:
            return f"it serves groups that span the world, and this one has {group_size} of {world_size} ranks"
        return None

    def create(self, spec: InnerSpec) -> dist.ProcessGroup:
        """See `Transport`."""
        c10d = _DistributedBackendOptions()
        c10d.store, c10d.timeout, c10d.group_id = PrefixStore("smddp", spec.store), spec.timeout, spec.name
        c10d.group_rank, c10d.group_size = spec.rank, spec.size
        c10d.global_ranks_in_group = list(spec.global_ranks)
        made = library_group(c10d)
        if isinstance(made, dist.ProcessGroup):
            return MeanBySumGroup(made)
        backends = {device: ("smddp", made) for device in dist.Backend.backend_capability["smddp"]}
        if "cpu" not in backends:
            backends["cpu"] = ("gloo", gloo_backend(spec))
        return MeanBySumGroup(assemble_group(spec, backends))

    def runs_on_device_queue(self, device_type: str) -> bool:
        """See `Transport`."""
        return device_type == "cuda"

    def abort(self, inner: InnerGroup) -> None:
        """See `Transport`."""
        abort_cuda_backend(inner.group)

    def is_connection_error(self, error: BaseException) -> bool:
        """See `Transport`. How the library words a lost peer is not documented; gloo's and nccl's words are known."""
        return Nccl().is_connection_error(error)


def library_group(c10d: _DistributedBackendOptions) -> Backend | dist.ProcessGroup:
    """Call the backend creator that the library registered, as c10d would."""
    plugin = dist.Backend._plugins["SMDDP"]
    if plugin.extended_api:
        return plugin.creator_fn(c10d, None)
    return plugin.creator_fn(c10d.store, c10d.group_rank, c10d.group_size, c10d.timeout)


_REDUCTIONS = (AllreduceOptions, AllreduceCoalescedOptions, ReduceScatterOptions, ReduceOptions)
_SUM, _MEAN = ReduceOp(ReduceOp.SUM), ReduceOp(ReduceOp.AVG)


class MeanBySumGroup(DelegatingGroup):
    """Adds AVG to a group that lacks it: a mean is computed as a sum that is divided when it has arrived."""

    def __init__(self, inner: dist.ProcessGroup) -> None:
        super().__init__(inner.rank(), inner.size())
        self._inner = inner

    @property
    def inner(self) -> dist.ProcessGroup:
        """The group that runs the collectives."""
        return self._inner

    def shutdown(self) -> None:
        """End the group."""
        self._inner.shutdown()

    def abort(self) -> None:
        """End the group without waiting for its collectives, if the library supports that."""
        self._inner.abort()

    def _issue(
        self, kind: Collective, payload_bytes: int, call: Callable[..., dist.Work], *args: Any, **kwargs: Any
    ) -> dist.Work:
        outputs = [args[0]] if args and isinstance(args[0], Tensor) else args[0] if args else []
        options = next((each for each in (*args, *kwargs.values()) if isinstance(each, _REDUCTIONS)), None)
        if options is None:  # c10d's own methods also take a bare ReduceOp instead of options
            sums = tuple(_SUM if _is_mean(each) else each for each in args)
            named = {name: _SUM if _is_mean(each) else each for name, each in kwargs.items()}
            work = call(*sums, **named)
            is_mean = any(map(_is_mean, (*args, *kwargs.values())))
            return DividedWork(work, outputs, self._size) if is_mean else work
        if options.reduceOp != _MEAN:
            return call(*args, **kwargs)
        options.reduceOp = _SUM
        try:
            return DividedWork(call(*args, **kwargs), outputs, self._size)
        finally:
            options.reduceOp = _MEAN


def _is_mean(argument: Any) -> bool:
    return isinstance(argument, ReduceOp | ReduceOp.RedOpType) and argument == ReduceOp.AVG


class DividedWork(dist.Work):
    """A sum under way that becomes a mean: the first `wait` divides it."""

    def __init__(self, work: dist.Work, outputs: Sequence[Tensor], divisor: int) -> None:
        super().__init__()
        self._work = work
        self._outputs = outputs
        self._divisor = divisor

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the sum and divide it, on CUDA in stream order. Zero means the library's default timeout."""
        done = self._work.wait() if timeout == timedelta(0) else self._work.wait(timeout)
        self._divide()
        return done

    def is_completed(self) -> bool:
        """Whether the sum has arrived."""
        return self._work.is_completed()

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the mean."""
        return self._work.get_future().then(self._divide_arrived)

    def _divide_arrived(self, arrived: torch.futures.Future[Any]) -> Any:
        value = arrived.value()
        self._divide()
        return value

    def _divide(self) -> None:
        outputs, self._outputs = self._outputs, ()
        with torch.no_grad():
            for output in outputs:
                output.div_(self._divisor)
