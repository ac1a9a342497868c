"""Check that the loss and the gradient norm of a step are finite, and apply a policy if they are not.

The check needs no collective of its own, and all ranks decide alike. If the loop averages losses over ranks, the mean
loss and the gradient norm are the same on all of them (`FiniteCheck.allows_update`). If each rank knows only its own
losses, a flag is sent along with the comparison of the units (`RankLosses`). A rank knows the result before it votes
for the step, so a rank that commits it later, after a fault, decides like those that have already committed it.
"""

import logging
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hyperpod_plugins.errors import ConfigError, NonFiniteError
from hyperpod_plugins.parallel.hsdp import local_part
from hyperpod_plugins.parallel.unit_watch import reconcile_gradients, reconcile_gradients_of

log = logging.getLogger(__name__)
NonFinitePolicy = Literal["auto", "stop", "skip", "warn", "off"]


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

    def allows_update(self, loss: Tensor, norm: Tensor | None, *, step: int, epoch: int, losses: list[Tensor]) -> bool:
        """Whether the optimizers may step.

        Args:
            loss: mean loss over the global batch, `()`.
            norm: norm of all gradients, `()`; None if unknown.
            step: number of the step.
            epoch: epoch of the step.
            losses: losses of this rank's micro-steps, `()` each.
        """
        self._error = None
        if self._policy == "off":
            return True
        is_finite = torch.isfinite(loss)
        if norm is not None:
            is_finite = is_finite & torch.isfinite(norm.to(is_finite.device))
        if bool(is_finite):
            return True
        bad = [index for index, each in enumerate(losses) if not bool(torch.isfinite(each))]
        here = f"batch {', '.join(map(str, bad))} of {len(losses)} of this rank" if bad else "no batch of this rank"
        reason = f"step {step} of epoch {epoch} is not finite: its loss is {float(loss)}"
        reason += "" if norm is None else f" and its gradient norm {float(norm)}"
        reason += f"; {here} has such a loss."
        return self.decide(reason)

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


class RankLosses:
    """Losses of this rank's micro-steps in a step, for loops that do not average losses over ranks."""

    def __init__(self, check: FiniteCheck) -> None:
        self._check = check
        self._losses: dict[int, Tensor] = {}
        self._is_any_bad = False

    def begin(self) -> None:
        """Clear the losses; called before the first batch of a step."""
        self._losses.clear()

    def record(self, batch: int, loss: Tensor) -> None:
        """Record the loss of a batch; if a batch is computed again, its last loss counts.

        Args:
            batch: number of the batch.
            loss: tensor with one element.
        """
        self._losses[batch] = local_part(loss.detach())

    def settle(self, model: nn.Module) -> None:
        """Call `reconcile_gradients`, which also tells all ranks whether any of them has a loss that is not finite."""
        self._is_any_bad = reconcile_gradients(model, self._flag(next(model.parameters())))

    def settle_for(self, optimizer: Optimizer) -> None:
        """Like `settle`, for the models whose parameters an optimizer holds, right before it steps."""
        self._is_any_bad = reconcile_gradients_of(optimizer, self._flag(optimizer.param_groups[0]["params"][0]))

    def _flag(self, like: Tensor) -> Tensor:
        """Whether any loss of this rank is not finite, a bool `()`."""
        if not self._losses:
            return torch.zeros((), dtype=torch.bool, device=like.device)
        return ~torch.stack([each.float().reshape(()) for each in self._losses.values()]).isfinite().all()

    def allows_update(self, norm: Tensor | None, *, step: int, epoch: int | None = None) -> bool:
        """Whether the optimizers may step. Call it after `settle`; all ranks decide alike.

        Args:
            norm: norm of all gradients, `()`; None if unknown.
            step: number of the step.
            epoch: epoch of the step; None if the loop does not say.
        """
        self._check.forget()
        is_norm_bad = norm is not None and not bool(torch.isfinite(norm))
        if not (self._is_any_bad or is_norm_bad):
            return True
        reason = f"step {step}{'' if epoch is None else f' of epoch {epoch}'} is not finite: "
        bad = {batch: float(each) for batch, each in self._losses.items() if not bool(torch.isfinite(each).all())}
        if bad:
            reason += ", ".join(f"the loss of batch {batch} of this rank is {value}" for batch, value in bad.items())
        elif self._is_any_bad:
            reason += "another rank has such a loss, and no batch of this rank"
        else:
            reason += f"its gradient norm is {float(norm)}, and all losses are finite" if norm is not None else ""
        return self._check.decide(f"{reason}.")
