"""Manual optimization: steps whose function calls backward and steps the optimizers itself.

[Note: what is exact by hand] FSDP2 averages the gradients of all ranks, and each rank counts the same. With automatic
optimization the session multiplies each loss by a weight before backward, so that samples count the same although
shares are uneven, divides accumulated losses, and clips, averages and scales between backward and the optimizers'
step. A function that does all of this itself leaves no such places. So each rank gets one batch of equal size for the
whole step, in every world that the job may have, and options that need these places are refused. In return, the
number of backward passes and of optimizer steps, and their order, are up to the function.

As optimizers may have stepped when a fault interrupts the function, all that they write is copied when a step begins,
as for optimizers that communicate (see `recovery.optimizer_copy`). The ranks vote when the function has returned.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from torch import Tensor

from hyperpod_plugins.data.sampler import ElasticSampler
from hyperpod_plugins.elastic.scaling.batch import StepBatch
from hyperpod_plugins.errors import ConfigError, LoopError, format_list
from hyperpod_plugins.parallel.finite import NonFinitePolicy


def refuse_session_options(*, samples_per_replica: int, reproducible: bool, has_other_degrees: bool) -> None:
    """Refuse options of a `Session` with which steps by hand would not be exact.

    Args:
        samples_per_replica: as given; 0 for a constant batch.
        reproducible: as given.
        has_other_degrees: whether `shard_degrees` or `tensor_degrees` are given.

    Raises:
        ConfigError: one is set; the message says why it is not possible.
    """
    reasons = {
        "samples_per_replica": (
            samples_per_replica,
            "with a batch that follows the world, shares are uneven at the end of an epoch, and the session scales the "
            "learning rate while the optimizers step. Use global_batch_size",
        ),
        "reproducible=True": (
            reproducible,
            "the session would have to average gradients itself, between backward and the optimizers' steps. Leave it "
            "out",
        ),
        "shard_degrees and tensor_degrees": (
            has_other_degrees,
            "a restart chooses degrees before the program says that shares must be equal. Leave them out",
        ),
    }
    for name, (is_set, why) in reasons.items():
        if is_set:
            raise ConfigError(f"{name} of the Session is not possible with manual_optimization=True: {why}.")


def refuse_train_options(
    *, backward: Callable[[Tensor], object], max_grad_norm: float, non_finite: NonFinitePolicy
) -> None:
    """Refuse options of `Session.train` that apply to what the function now does itself.

    Raises:
        ConfigError: one is given; the message says what the function can do instead.
    """
    reasons = {
        "backward": (backward is not Tensor.backward, "call it in the function"),
        "max_grad_norm": (
            max_grad_norm,
            "call hyperpod_plugins.parallel.clip_grad_norm_(parameters, max_norm) in the function",
        ),
        f"non_finite={non_finite!r}": (
            non_finite not in ("auto", "off"),
            "the optimizers have stepped before the session sees a loss. Check it in the function",
        ),
    }
    for name, (is_given, instead) in reasons.items():
        if is_given:
            raise ConfigError(
                f"{name} is not possible with manual_optimization=True, because the function given to step.run(...) "
                f"calls backward and steps the optimizers itself: {instead}."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualShares:
    """The worlds of a job in which each rank has one batch in each step, of the same size."""

    sizes: tuple[int, ...]
    """Numbers of replicas."""
    data_degrees: tuple[int, ...]
    """Data-parallel ranks of each."""

    @classmethod
    def of(cls, batch: StepBatch, sizes: Sequence[int], *, present: int, data_ranks_per_replica: int) -> "EqualShares":
        """Choose among the numbers of replicas that could share the batch unevenly or by accumulation.

        Args:
            batch: of a step.
            sizes: numbers of replicas that the job allows.
            present: the present one.
            data_ranks_per_replica: ranks of one replica that read different samples.

        Raises:
            ConfigError: the present number is not among the chosen ones.
        """
        chosen = [size for size in sizes if _is_one_equal_batch(batch, size, data_ranks_per_replica)]
        if present not in chosen:
            degree = present * data_ranks_per_replica
            size = batch.global_batch_at(present)
            raise ConfigError(
                f"with manual optimization each rank computes its samples of a step as one batch, and all ranks have "
                f"equally many, but a global batch of {size} over {degree} data-parallel ranks is "
                f"{size / degree:g} samples a rank, and the loader's batch_size is {batch.micro_batch_size}. Use a "
                f"global_batch_size that is a multiple of {degree}, and a batch_size of at least the samples of a "
                "rank. To accumulate gradients, divide the batch in the function."
            )
        return cls(sizes=tuple(chosen), data_degrees=tuple(size * data_ranks_per_replica for size in chosen))

    def refuse_uneven_end(self, sampler: ElasticSampler) -> None:
        """Refuse data whose last step of an epoch the ranks could not share equally.

        Args:
            sampler: at the position from which the loop continues.

        Raises:
            ConfigError: in this epoch or a later one, an incomplete last step would be shared unevenly.
        """
        if sampler.drop_last:
            return
        rests = {
            (sampler.num_samples - start) % sampler.split.global_batch_size for start in (0, sampler.cursor.step_start)
        }
        uneven = sorted(rest for rest in rests if any(rest % degree for degree in self.data_degrees))
        if uneven:
            raise ConfigError(
                f"with manual optimization all ranks have equally many samples in a step, but the last step of an "
                f"epoch of {sampler.num_samples} samples in steps of {sampler.split.global_batch_size} has "
                f"{uneven[0]}, for {format_list(map(str, self.data_degrees))} data-parallel ranks. Use drop_last=True "
                "in the DataLoader, or a number of samples that is a multiple of the global batch."
            )


def _is_one_equal_batch(batch: StepBatch, num_replicas: int, data_ranks_per_replica: int) -> bool:
    split = batch.split(num_replicas, data_ranks_per_replica)
    return split.num_micro_steps == 1 and split.global_batch_size % split.data_world_size == 0


def check_means(returned: Any) -> None:
    """Check what the function given to `Step.run` has returned.

    Raises:
        LoopError: it is neither one number nor a dict of numbers.
    """
    values = list(returned.values()) if isinstance(returned, Mapping) else [returned]
    is_scalar = [each.numel() == 1 if isinstance(each, Tensor) else isinstance(each, Real) for each in values]
    if not values or not all(is_scalar):
        raise LoopError(
            "with manual optimization the function given to step.run(...) must return the losses of its step, which "
            "are averaged over the ranks: a number, a tensor of one element, or a dict of these. It returned "
            f"{type(returned).__name__}."
        )
