"""Check that the loss and the gradients of a step are finite, and apply a policy if they are not.

All ranks decide alike. A mean loss and the norm by which gradients are clipped are the same on all of them. What only
one rank sees, its own losses and its parts of the gradients, is sent as a flag along with the comparison of the units
(`reconcile_gradients`), and needs a message of its own only where units are not compared then: in one that averages
gradients outside FSDP2, and for the second of several optimizers that step on one backward. A rank knows the result
before it votes for the step, so a rank that commits it later, after a fault, decides like those that have already
committed it.

[Note: gradient norm]
A rank takes the 2-norm of its local gradients: one read of their memory, and on the device nothing is waited for. It is
infinite or NaN if an element is. It also overflows if elements exceed 1e19, like the norm for clipping; an optimizer
that squares gradients overflows there, too. The exact maximum norm takes 100 times as long on CPU (torch 2.13).
"""

import logging
from collections.abc import Iterable
from enum import IntEnum
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from hyperpod_plugins.errors import ConfigError, NonFiniteError
from hyperpod_plugins.parallel.hsdp import compute_device, local_part
from hyperpod_plugins.parallel.unit_watch import reconcile_gradients, reconcile_gradients_of

log = logging.getLogger(__name__)
NonFinitePolicy = Literal["auto", "stop", "skip", "warn", "off"]


class NonFinite(IntEnum):
    """What is infinite or NaN in a step; ranks exchange the largest."""

    NOTHING = 0
    GRADIENT = 1
    LOSS = 2


@torch.no_grad()
def gradient_flag(parameters: Iterable[Tensor]) -> Tensor:
    """Return whether this rank's part of a gradient is infinite or NaN; see [Note: gradient norm].

    Args:
        parameters: on any mix of meshes, at least one; those without a gradient are skipped.

    Returns:
        `NonFinite.GRADIENT` or 0, a uint8 `()` on the device that computes with the parameters.
    """
    every = list(parameters)
    found = [local_part(each.grad) for each in every if each.grad is not None]
    dense = [each.coalesce().values() if each.is_sparse else each for each in found]
    parts = [each for each in dense if each.numel()]
    if not parts:
        return torch.zeros((), dtype=torch.uint8, device=compute_device(every[0]))
    is_bad = ~get_total_norm(parts).isfinite()
    return is_bad.to(compute_device(every[0]), torch.uint8) * int(NonFinite.GRADIENT)


class FiniteCheck:
    """Checks each step before the optimizers update, and remembers the error if the policy is to stop."""

    def __init__(self, policy: NonFinitePolicy, *, waits_anyway: bool) -> None:
        """Set the policy for steps that are not finite.

        Args:
            policy: "stop" raises on all ranks; "skip" warns and skips the optimizers' step; "warn" warns and steps;
                "off" does not check. "auto" is "stop" if the check is free, otherwise "off".
            waits_anyway: the check is free, because the host waits for the device anyway before a step is committed,
                or because the device is the CPU.

        Raises:
            ConfigError: the policy is unknown.
        """
        allowed = get_args(NonFinitePolicy)
        if policy not in allowed:
            raise ConfigError(f"non_finite={policy!r} is not known. Use one of {', '.join(map(repr, allowed))}.")
        self._policy = ("stop" if waits_anyway else "off") if policy == "auto" else policy
        self._error: NonFiniteError | None = None

    @property
    def is_enabled(self) -> bool:
        """Whether steps are checked."""
        return self._policy != "off"

    def allows_update(
        self,
        loss: Tensor,
        norm: Tensor | None,
        *,
        step: int,
        epoch: int,
        losses: list[Tensor],
        are_gradients_finite: bool = True,
    ) -> bool:
        """Whether the optimizers may step.

        Args:
            loss: mean loss over the global batch, `()`.
            norm: norm of all gradients, `()`; None if unknown.
            step: number of the step.
            epoch: epoch of the step.
            losses: losses of this rank's micro-steps, `()` each.
            are_gradients_finite: whether no rank has found a gradient that is not; the same on all ranks.
        """
        self._error = None
        if self._policy == "off":
            return True
        is_finite = torch.isfinite(loss)
        if norm is not None:
            is_finite = is_finite & torch.isfinite(norm.to(is_finite.device))
        if bool(is_finite) and are_gradients_finite:
            return True
        bad = [index for index, each in enumerate(losses) if not bool(torch.isfinite(each))]
        here = f"batch {', '.join(map(str, bad))} of {len(losses)} of this rank" if bad else "no batch of this rank"
        reason = f"step {step} of epoch {epoch} is not finite: its loss is {float(loss)}"
        if not are_gradients_finite:
            reason += ", and a gradient is infinite or NaN"
        elif norm is not None:
            reason += f" and its gradient norm {float(norm)}"
        return self.decide(f"{reason}; {here} has such a loss.")

    def forget(self) -> None:
        """Clear the error; called at the start of a step."""
        self._error = None

    def decide(self, reason: str) -> bool:
        """Apply the policy to a step that is not finite; return whether the optimizers may step.

        Args:
            reason: a sentence that names the step.
        """
        if self._policy == "warn":
            log.warning("%s The optimizers step anyway.", reason)
            return True
        if self._policy == "skip":
            log.warning("%s The step is skipped.", reason)
            return False
        self._error = NonFiniteError(
            f"{reason} Nothing was updated. Check that batch and the learning rate, go back to a checkpoint, or "
            'allow such steps with non_finite="skip" or "warn".'
        )
        return False

    @property
    def error(self) -> NonFiniteError | None:
        """Error of the last step checked, if it was not finite and the policy is to stop."""
        return self._error

    def raise_if_stopped(self) -> None:
        """Raise the error of the last step checked, if there is one.

        Raises:
            NonFiniteError: the step was not finite, and the policy is to stop.
        """
        if self._error is not None:
            raise self._error


class RankFiniteCheck:
    """Check for loops that do not average losses over ranks: of this rank's losses in a step, and of its gradients."""

    def __init__(self, check: FiniteCheck) -> None:
        self._check = check
        self._losses: dict[int, Tensor] = {}
        self._found = 0
        """The largest `NonFinite` of all ranks; any number if groups have broken."""
        self._is_decided = False

    def begin(self) -> None:
        """Clear the losses; called before the first batch of a step."""
        self._losses.clear()
        self._is_decided = False

    def record(self, batch: int, loss: Tensor) -> None:
        """Record the loss of a batch; the first one after `allows_update` begins another step.

        If a batch is computed again, its last loss counts.

        Args:
            batch: number of the batch.
            loss: tensor with one element.
        """
        if self._is_decided:
            self.begin()
        self._losses[batch] = local_part(loss.detach())

    def reconcile(self, model: nn.Module, optimizer: Optimizer | None = None) -> None:
        """Call `reconcile_gradients`, which also tells all ranks what is not finite on any of them.

        All gradients of the model count.

        Args:
            model: whose units are compared.
            optimizer: about to step; None if all that train the model are.
        """
        optimizers = None if optimizer is None else [optimizer]
        self._found = reconcile_gradients(model, self._flag(model.parameters()), optimizers=optimizers)

    def reconcile_for(self, optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
        """Like `reconcile`, for the models whose parameters an optimizer holds, right before it steps.

        Args:
            optimizer: about to step.
            parameters: whose gradients count.
        """
        self._found = reconcile_gradients_of(optimizer, self._flag(parameters))

    def _flag(self, parameters: Iterable[Tensor]) -> Tensor:
        """What is not finite on this rank, a uint8 `()`."""
        of_gradients = gradient_flag(parameters)
        if not self._losses:
            return of_gradients
        losses = torch.stack([each.float().reshape(()) for each in self._losses.values()])
        of_losses = (~losses.isfinite().all()).to(of_gradients) * int(NonFinite.LOSS)
        return torch.maximum(of_gradients, of_losses)

    def allows_update(self, norm: Tensor | None, *, step: int, epoch: int | None = None) -> bool:
        """Whether the optimizers may step. Call it after `reconcile`; all ranks decide alike.

        Args:
            norm: norm of all gradients, `()`; None if unknown.
            step: number of the step.
            epoch: epoch of the step; None if the loop does not say.
        """
        self._check.forget()
        self._is_decided = True
        is_norm_bad = norm is not None and not bool(torch.isfinite(norm))
        if not (self._found or is_norm_bad):
            return True
        reason = f"step {step}{'' if epoch is None else f' of epoch {epoch}'} is not finite: "
        bad = {batch: float(each) for batch, each in self._losses.items() if not bool(torch.isfinite(each).all())}
        if bad:
            reason += ", ".join(f"the loss of batch {batch} of this rank is {value}" for batch, value in bad.items())
        elif self._found == NonFinite.LOSS:
            reason += "another rank has such a loss, and no batch of this rank"
        else:
            what = "a gradient is infinite or NaN" if norm is None else f"its gradient norm is {float(norm)}"
            batches = ", ".join(map(str, self._losses)) or "none"
            reason += f"{what}, and all losses are finite; the batches of this rank: {batches}"
        return self._check.decide(f"{reason}.")
