"""Small states of callbacks, which may differ between ranks."""

from collections import defaultdict
from types import SimpleNamespace

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer

from hyperpod_plugins.errors import LoopError
from hyperpod_plugins.lightning import ElasticTraining
from hyperpod_plugins.lightning.callback_states import CallbackStates, _is_other, _is_saving
from hyperpod_plugins.lightning.saving_hooks import FOR_PEERS, SavingHooks
from hyperpod_plugins.recovery.packing import pack, unpack
from hyperpod_plugins.recovery.rng import BATCH


class Seen(pl.Callback):
    """Has an entry that all ranks change in the same way, and one that belongs to its rank."""

    def __init__(self, **values):
        self.values, self.num_loaded = values, 0

    def on_train_batch_start(self, *_):
        self.values["batches"] += 1

    def state_dict(self):
        return self.values

    def load_state_dict(self, state):
        self.values, self.num_loaded = state, self.num_loaded + 1


def states_of(*callbacks, of_checkpoints=False, hooks=None):
    trainer = SimpleNamespace(
        callbacks=list(callbacks), sanity_checking=False, accumulate_grad_batches=1, should_stop=False
    )
    is_kept = _is_saving if of_checkpoints else _is_other
    return CallbackStates(trainer, hooks or SavingHooks(), is_kept, names_parts=not of_checkpoints)


def test_a_replacement_gets_what_belongs_to_its_rank():
    own = EarlyStopping("loss")
    own.best_score, own.wait_count = torch.tensor(0.25), 2
    other = EarlyStopping("loss")
    states_of(other).load_state_dict(states_of(own).state_dict())
    assert (other.best_score, other.wait_count) == (torch.tensor(0.25), 2)


def test_what_hooks_have_written_since_stays():
    sent = states_of(Seen(batches=3, losses=[1.0])).state_dict()
    callback = Seen(batches=4, losses=[2.0])
    states = states_of(callback)
    assert states.written(sent) == {"Seen.batches", "Seen.losses"}
    states.load_state_dict(sent, leave=["Seen.batches"])
    assert callback.values == {"batches": 4, "losses": [1.0]}
    assert states.written(sent) == {"Seen.batches"}


def test_a_state_is_a_copy_and_is_loaded_only_if_it_differs():
    callback = Seen(batches=0, losses=[1.0])
    states = states_of(callback)
    sent = states.state_dict()
    states.load_state_dict(sent)
    assert callback.num_loaded == 0
    callback.values["losses"].append(2.0)
    assert states.written(sent) == {"Seen.losses"}
    states.load_state_dict(sent)
    callback.values["losses"].append(3.0)
    assert sent["Seen"]["losses"] == [1.0]


def test_a_tensor_that_is_written_to_behind_the_back_of_autograd_is_seen():
    callback = Seen(sum=torch.zeros(2))
    states = states_of(callback)
    before = states.state_dict()
    callback.values["sum"].numpy()[:] += 1
    assert states.state_dict()["Seen"]["sum"].tolist() == [1, 1]
    assert before["Seen"]["sum"].tolist() == [0, 0]


def test_the_state_before_the_batch_is_that_of_the_same_rank():
    sending, receiving = SavingHooks(), SavingHooks()
    one, other = Seen(batches=3, losses=[1.0]), Seen(batches=3, losses=[2.0])
    given, taken = states_of(one, hooks=sending), states_of(other, hooks=receiving)
    for states, hooks, callback in ((given, sending, one), (taken, receiving, other)):
        hooks.begin_part(states._trainer, BATCH)
        callback.on_train_batch_start()
        states.describes_step = True
    taken.load_state_dict(given.state_dict())
    assert other.values == {"batches": 4, "losses": [1.0]}
    receiving.put_back(taken._trainer)  # the loops are entered again before the step ends
    assert other.values == {"batches": 3, "losses": [1.0]}


def test_what_changed_after_the_last_step_also_counts_before_the_batch():
    hooks = SavingHooks()
    sent = states_of(Seen(batches=3, losses=[1.0])).state_dict()
    callback = type("Quiet", (Seen,), {"on_train_batch_start": lambda self, *_: None})(batches=4, losses=[2.0])
    states = states_of(callback, hooks=hooks)
    hooks.begin_part(states._trainer, BATCH)
    states.describes_step = True
    states.load_state_dict({"Quiet": sent["Seen"]}, ["Quiet.batches"])
    assert callback.values == hooks.begun_with("Quiet") == {"batches": 4, "losses": [1.0]}


def test_in_a_window_the_state_is_that_with_which_it_began_to_compute():
    callback, hooks = Seen(batches=3), SavingHooks()
    states = states_of(callback, hooks=hooks)
    states._trainer.accumulate_grad_batches = 2
    hooks.begin_part(states._trainer, BATCH)
    callback.on_train_batch_start()
    hooks.begin_compute(states._trainer)
    callback.on_train_batch_start()  # of the second micro-step, whose hooks a replacement runs
    states.describes_step = True
    assert states.state_dict() == {"Seen": {"batches": 4}, "Seen before its batch": {"batches": 3}}
    states.describes_step = False
    assert states.state_dict() == {"Seen": {"batches": 5}}


def test_no_number_differs_from_itself():
    sent = states_of(Seen(last=float("nan"))).state_dict()
    assert states_of(Seen(last=float("nan"))).written(unpack(pack(sent))) == set()


def test_a_state_after_the_last_step_is_the_one_before_the_batch():
    hooks = SavingHooks()
    sent = states_of(Seen(batches=3, losses=[1.0])).state_dict()
    callback = Seen(batches=3, losses=[2.0])
    states = states_of(callback, hooks=hooks)
    hooks.begin_part(states._trainer, BATCH)
    callback.on_train_batch_start()
    states.describes_step = True
    leave = ["Seen.batches"]  # what the rank that has kept the state has written since
    states.load_state_dict(sent, leave)
    assert callback.values == {"batches": 4, "losses": [1.0]}
    assert hooks.begun_with("Seen") == {"batches": 3, "losses": [1.0]}


def test_checkpoint_callbacks_are_kept_as_a_whole_with_their_score():
    saving = ModelCheckpoint("folder", monitor="loss")
    saving.best_k_models, saving.current_score = {"folder/a.ckpt": torch.tensor(0.5)}, torch.tensor(0.75)
    other = ModelCheckpoint("folder", monitor="loss")
    assert states_of(saving).state_dict() == {}
    sent = states_of(saving, of_checkpoints=True).state_dict()
    assert states_of(other, of_checkpoints=True).written(sent) == {saving.state_key}
    states_of(other, of_checkpoints=True).load_state_dict(sent)
    assert other.best_k_models == saving.best_k_models
    assert other.current_score == 0.75


class Gathers(Seen):
    def state_dict(self):
        raise LoopError(FOR_PEERS)


@pytest.mark.parametrize(
    "callback",
    [
        Timer(),
        Seen(weights=torch.zeros(1025)),
        Seen(many=[0] * 1025),
        Seen(long="x" * 2**16),
        Seen(matrix=np.zeros(2)),
        Seen(counts=defaultdict(int)),
        Seen(folder=object()),
        Gathers(),
        pl.Callback(),
        ElasticTraining(global_batch_size=8, micro_batch_size=2),
    ],
    ids=[
        "times",
        "large",
        "many",
        "long",
        "an array",
        "of another type",
        "an object",
        "communicates",
        "no state",
        "of this package",
    ],
)
def test_other_states_are_left_out(callback):
    states = states_of(callback, small := EarlyStopping("loss"))
    assert states.state_dict().keys() == {small.state_key}


def test_callbacks_created_anew_are_found():
    states = states_of(Seen(batches=1))
    sent = states.state_dict()
    states._trainer.callbacks[:] = [again := Seen(batches=0)]
    states.load_state_dict(sent)
    assert again.values == {"batches": 1}
