"""Whether the loss and the gradient norm of a step are finite, and what happens where they are not.

The check needs no message of its own, and all ranks decide alike: where a loop averages losses over ranks, the mean and
the norm of the gradients are the same on all of them (`FiniteCheck.allows_update`); where each rank knows its own
losses only, a flag travels with the comparison of the units (`RankLosses`). Either is known to a rank before it votes
for the step: one that commits it later, after a fault, decides as those did that have committed it.
"""

import logging
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hyperpod_plugins.errors import ConfigError, NonFiniteError
from hyperpod_plugins.parallel.hsdp import local_part
from hyperpod_plugins.parallel.unit_watch import settle_gradients, settle_gradients_of

log = logging.getLogger(__name__)
NonFinitePolicy = Literal["auto", "stop", "skip", "warn", "off"]


class FiniteCheck:
    """Looks at each step before the optimizers do."""

    def __init__(self, policy: NonFinitePolicy, *, waits_anyway: bool) -> None:
        """Take what to do about a step that is not finite.

        Args:
            policy: "stop" raises on all ranks, "skip" leaves the optimizers' step out, "warn" does it,
                with a warning each; "off" does not look. "auto" is "stop" where looking is free, otherwise "off".
            waits_anyway: whether the host has waited for the device when a step is committed, or they are the same.

        Raises:
            ConfigError: another policy.
        """
        allowed = get_args(NonFinitePolicy)
        if policy not in allowed:
            raise ConfigError(f"non_finite={policy!r} is not known. Use one of {', '.join(map(repr, allowed))}.")
        self._policy = ("stop" if waits_anyway else "off") if policy == "auto" else policy
        self._error: NonFiniteError | None = None

    @property
    def looks(self) -> bool:
        """Whether there is anything to look at."""
        return self._policy != "off"

    def allows_update(self, loss: Tensor, norm: Tensor | None, *, step: int, epoch: int, losses: list[Tensor]) -> bool:
        """Whether the optimizers may step.

        Args:
            loss: mean over the global batch, `()`.
            norm: of all gradients, `()`, where it is known.
            step: number of the step.
            epoch: of the step.
            losses: of this rank's micro-steps, `()` each.
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
        """A step begins."""
        self._error = None

    def decide(self, reason: str) -> bool:
        """Apply the policy to a step that is not finite; whether the optimizers may step.

        Args:
            reason: a sentence that names the step.
        """
        if self._policy == "warn":
            log.warning("%s The optimizers step nevertheless.", reason)
            return True
        if self._policy == "skip":
            log.warning("%s The step is left out.", reason)
            return False
        self._error = NonFiniteError(
            f"{reason} Nothing was updated. Look at that batch and at the learning rate, go back to a checkpoint, or "
            'let such steps pass: non_finite="skip" or "warn".'
        )
        return False

    @property
    def error(self) -> NonFiniteError | None:
        """Of the step that was looked at last, where it was not finite and the policy is to stop."""
        return self._error

    def raise_if_stopped(self) -> None:
        """Raise for the step that was looked at last.

        Raises:
            NonFiniteError: it was not finite, and the policy is to stop.
        """
        if self._error is not None:
            raise self._error


class RankLosses:
    """The losses of one rank's micro-steps in a step, which are not averaged over ranks."""

    def __init__(self, check: FiniteCheck) -> None:
        self._check = check
        self._losses: dict[int, Tensor] = {}
        self._is_any_bad = False

    def begin(self) -> None:
        """Forget what was noted: the first batch of a step comes next."""
        self._losses.clear()

    def note(self, batch: int, loss: Tensor) -> None:
        """Note the loss of a batch; of one that is computed again, the last counts.

        Args:
            batch: its number.
            loss: with one element.
        """
        self._losses[batch] = local_part(loss.detach())

    def settle(self, model: nn.Module) -> None:
        """`settle_gradients`, which also tells all ranks whether one of them has a loss that is not finite."""
        self._is_any_bad = settle_gradients(model, self._flag(next(model.parameters())))

    def settle_before(self, optimizer: Optimizer) -> None:
        """`settle`, for the models whose parameters an optimizer has, right before it steps."""
        self._is_any_bad = settle_gradients_of(optimizer, self._flag(optimizer.param_groups[0]["params"][0]))

    def _flag(self, like: Tensor) -> Tensor:
        """Whether a loss of this rank is not finite, `()`."""
        if not self._losses:
            return torch.zeros((), dtype=torch.bool, device=like.device)
        return ~torch.stack([each.float().reshape(()) for each in self._losses.values()]).isfinite().all()

    def allows_update(self, norm: Tensor | None, *, step: int, epoch: int | None = None) -> bool:
        """Whether the optimizers may step; all ranks decide alike, after `settle`.

        Args:
            norm: of all gradients, `()`, where it is known.
            step: number of the step.
            epoch: of the step; None where the loop does not tell.
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
