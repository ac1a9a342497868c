"""What a Trainer knows of its training besides tensors, as `session.state` and as an object of this rank."""

import dataclasses
import json
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

import torch

from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.session import Session
from hyperpod_plugins.transformers.compat import ExportableState, TrainerControl, TrainerState

_NOT_SHARED = {"log_history", "stateful_callbacks", "is_local_process_zero", "is_world_process_zero"}
_STATE, _HISTORY, _LOSS = "trainer", "trainer log_history", "trainer loss"


class TrainerProgress:
    """Keeps the state of a Trainer in `session.state`: for replacements, checkpoints, and bodies that run again.

    It is text, because the session copies what is there in each step, and text is never copied.
    """

    NUMBERS = (
        "_total_loss_scalar",
        "_globalstep_last_logged",
        "_initial_global_step",
        "_initial_num_input_tokens_seen",
        "_start_time",
    )
    """Attributes of the Trainer that its loop keeps in variables or in itself."""

    def __init__(self, trainer: Any, session: Session, call: str, continue_from: Callable[[], object]) -> None:
        """Keep nothing yet.

        Args:
            trainer: has `state`, `control`, `callback_handler`, and the attributes in `NUMBERS`.
            session: the session whose loop trains.
            call: identifies this call of `train`, the same on all ranks.
            continue_from: called when the progress of another call was taken over, from a checkpoint.
        """
        self._trainer, self._session = trainer, session
        self._call, self._continue_from = call, continue_from
        self._length = trainer.state.max_steps, trainer.state.num_train_epochs
        self._known: tuple[Any, Any] = None, None
        self._history = 0, "[]"

    def push(self) -> None:
        """Put the present progress into `session.state`.

        Raises:
            ConfigError: it cannot be written as text.
        """
        trainer = self._trainer
        if len(trainer.state.log_history) != self._history[0]:
            self._history = len(trainer.state.log_history), _text(trainer.state.log_history)
        text = _text(
            {
                "call": self._call,
                "state": {name: getattr(trainer.state, name) for name in _names_of(trainer.state)},
                "control": trainer.control.state()["args"],
                "numbers": {name: getattr(trainer, name) for name in self.NUMBERS},
                "callbacks": [each.state() for each in self._stateful()],
            }
        )
        self._known = text, self._history[1]
        loss: torch.Tensor = trainer._tr_loss
        self._session.state |= {_STATE: text, _HISTORY: self._history[1], _LOSS: loss.detach().clone()}

    def pull(self) -> None:
        """Take the progress over from `session.state`, unless the Trainer has it; and this process's place.

        States of callbacks are not taken from another call of `train`, unless the arguments say so.
        """
        trainer, kept = self._trainer, self._session.state
        trainer.state.is_local_process_zero = trainer.is_local_process_zero()
        trainer.state.is_world_process_zero = trainer.is_world_process_zero()
        if _STATE not in kept or (kept[_STATE] is self._known[0] and kept[_HISTORY] is self._known[1]):
            return
        self._known = kept[_STATE], kept[_HISTORY]
        values = json.loads(kept[_STATE])
        for name in _names_of(trainer.state):
            if name in values["state"]:  # not of a checkpoint by another version of transformers
                setattr(trainer.state, name, values["state"][name])
        trainer.state.max_steps, trainer.state.num_train_epochs = self._length
        trainer.state.log_history = json.loads(kept[_HISTORY])
        self._history = len(trainer.state.log_history), kept[_HISTORY]
        for name in self.NUMBERS:
            setattr(trainer, name, values["numbers"][name])
        trainer._tr_loss = kept[_LOSS].detach().clone().to(trainer.args.device)
        is_own = values["call"] == self._call
        if is_own or trainer.args.restore_callback_states_from_checkpoint:
            trainer.control = TrainerControl(**values["control"])
            for callback, state in zip(self._stateful(), values["callbacks"], strict=True):
                for name in callback.state()["attributes"].keys() & state["attributes"].keys():
                    setattr(callback, name, state["attributes"][name])
        if not is_own:
            self._continue_from()

    def _stateful(self) -> list[Any]:
        found: Sequence[Any] = self._trainer.callback_handler.callbacks
        return [each for each in found if isinstance(each, ExportableState)]


class TrainerAttributes:
    """Attributes of a Trainer that its own code fills in each step, such as sums for its logs: state of this rank."""

    def __init__(self, trainer: Any, names: Sequence[str]) -> None:
        """Keep the attributes of these names that the Trainer has."""
        self._trainer = trainer
        self.names = [name for name in names if name in vars(trainer)]

    def state_dict(self) -> dict[str, Any]:
        """The attributes, as plain containers."""
        return {name: _plain(getattr(self._trainer, name)) for name in self.names}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned; containers stay the same objects."""
        for name, value in state_dict.items():
            setattr(self._trainer, name, _filled(getattr(self._trainer, name), value))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value


def _filled(present: Any, value: Any) -> Any:
    """The present container with other contents, or the value where there is none."""
    if isinstance(present, MutableMapping) and isinstance(value, Mapping):
        for key in [key for key in present if key not in value]:
            del present[key]
        for key, each in value.items():
            present[key] = _filled(present.get(key), each)
        return present
    if isinstance(present, MutableSequence) and isinstance(value, Sequence):
        present[:] = value
        return present
    return value


def _text(value: Any) -> str:
    try:
        return json.dumps(value)
    except TypeError as error:
        raise ConfigError(
            f"the state of the Trainer cannot be given to another process: {error}. Log plain numbers and text, and "
            "return such from the state() of callbacks."
        ) from None


def _names_of(state: TrainerState) -> list[str]:
    """The attributes of a Trainer's state that all ranks share."""
    return [field.name for field in dataclasses.fields(state) if field.name not in _NOT_SHARED]
