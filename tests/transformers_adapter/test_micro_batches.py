"""The order in which a Trainer reads its data, and what is refused, in one process."""

from itertools import chain
from types import SimpleNamespace

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from transformers import TrainerCallback, TrainingArguments

from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.transformers.micro_batches import MicroBatches, deal
from hyperpod_plugins.transformers.progress import TrainerAttributes
from hyperpod_plugins.transformers.refusals import (
    refuse,
    refused_arguments,
    refused_callbacks,
    refused_model,
    refused_optimizer,
)
from hyperpod_plugins.transformers.trainer import _continued, _plan_in


@given(
    count=st.integers(1, 40),
    batch_size=st.integers(1, 5),
    num_ranks=st.integers(1, 5),
    drop_last=st.booleans(),
)
@settings(deadline=None, max_examples=200)
def test_batches_are_dealt_as_accelerate_deals_them(count, batch_size, num_ranks, drop_last):
    sampler = BatchSampler(SequentialSampler(range(count)), batch_size, drop_last)
    wanted = [list(BatchSamplerShard(sampler, num_ranks, rank)) for rank in range(num_ranks)]
    found = deal(list(sampler), num_ranks, batch_size, drop_last=drop_last)
    assert [found[rank::num_ranks] for rank in range(num_ranks)] == wanted


def test_each_epoch_has_an_order_of_its_own_that_any_process_finds_again():
    def read(slots):
        loader = DataLoader(torch.arange(22), batch_size=2, shuffle=True)
        batches = MicroBatches(loader, seed=3, num_ranks=2, accumulation=4, batch_size=2)
        assert (batches.plan.num_batches, batches.plan.num_steps) == (12, 2)
        return [(found["slot"], found["counts"], found["inputs"].tolist()) for found in map(batches.__getitem__, slots)]

    slots = range(64)
    everything = read(slots)
    assert everything[40:] == read(slots[40:])
    counted = [ids for _, counts, ids in everything if counts]
    assert len(counted) == 4 * 12
    epochs = [[*chain(*counted[first : first + 11])] for first in range(0, 48, 12)]  # the twelfth begins again
    assert all(sorted(epoch) == list(range(22)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert [counts for _, counts, _ in everything[:16]] == [True] * 12 + [False] * 4


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(8))


@pytest.mark.parametrize(
    ("loader", "told"),
    [
        (DataLoader(Stream(), batch_size=2), "is a stream"),
        (DataLoader(torch.arange(8), batch_sampler=[[0, 1], [2, 3]]), "its own batch sampler"),
        (DataLoader(torch.arange(8), batch_size=4), "batch_size=4, and not per_device_train_batch_size=2"),
        (DataLoader(torch.arange(2), batch_size=2, drop_last=True), "fewer than the 2 ranks"),
    ],
)
def test_loaders_that_are_refused(loader, told):
    with pytest.raises(ConfigError, match=told):
        MicroBatches(loader, seed=0, num_ranks=2, accumulation=1, batch_size=2)


def arguments(**options):
    config = {
        "split_batches": False,
        "dispatch_batches": None,
        "even_batches": True,
        "gradient_accumulation_kwargs": None,
    }
    given = {name: options.pop(name) for name in config if name in options}
    fields = {name: each.default for name, each in TrainingArguments.__dataclass_fields__.items()}
    return SimpleNamespace(**(fields | options | {"accelerator_config": SimpleNamespace(**(config | given))}))


def test_ordinary_arguments_are_served():
    assert not [*refused_arguments(arguments()), *refused_optimizer(arguments())]
    assert not [*refused_model(torch.nn.Linear(1, 1)), *refused_callbacks([TrainerCallback()])]
    refuse([])


@pytest.mark.parametrize(
    "option",
    [
        {"deepspeed": {"zero_optimization": {"stage": 2}}},
        {"fsdp": True},
        {"torch_compile": True},
        {"fp16": True},
        {"bf16_full_eval": True},
        {"auto_find_batch_size": True},
        {"eval_on_start": True},
        {"enable_jit_checkpoint": True},
        {"train_sampling_strategy": "batch_rebalance"},
        {"split_batches": True},
        {"dispatch_batches": True},
        {"even_batches": False},
        {"optim": "lomo"},
    ],
    ids=lambda option: next(iter(option)),
)
def test_arguments_that_are_refused_by_name(option):
    args = arguments(**option)
    with pytest.raises(ConfigError, match=rf"HyperPodTrainer cannot serve .*{next(iter(option))}"):
        refuse([*refused_arguments(args), *refused_optimizer(args)])


def test_callbacks_that_want_gradients_are_refused():
    class Watching(TrainerCallback):
        def on_pre_optimizer_step(self, *args, **kwargs):
            pass

    with pytest.raises(ConfigError, match="the callback Watching"):
        refuse(refused_callbacks([Watching()]))


PLAN = {"num_ranks": 2, "accumulation": 4, "batch_size": 2}


def test_a_training_continues_with_the_same_steps():
    assert _continued(PLAN | {"num_ranks": 4, "accumulation": 2}, PLAN, "c", is_elastic=False) == PLAN
    assert _continued(PLAN | {"num_ranks": 3}, PLAN, "c", is_elastic=True) == PLAN
    for other, told in [({"num_ranks": 3}, "here are 3 ranks"), ({"batch_size": 4}, "with 4 and 4")]:
        with pytest.raises(ConfigError, match=told):
            _continued(PLAN | other, PLAN, "c", is_elastic=False)
    with pytest.raises(ConfigError, match="not written by HyperPodTrainer"):
        _continued(PLAN, None, "c", is_elastic=True)


def test_sums_of_a_trainer_are_put_back_in_place():
    trainer = SimpleNamespace(_metrics={"train": {"loss": [1.0]}, "eval": {}}, tokens=3)
    attributes = TrainerAttributes(trainer, ("_metrics", "tokens", "missing"))
    of_train, before = trainer._metrics["train"], attributes.state_dict()
    of_train["loss"].append(2.0)
    of_train["new"] = [4.0]
    trainer.tokens = 9
    attributes.load_state_dict(before)
    assert trainer._metrics["train"] is of_train == {"loss": [1.0]}
    assert trainer.tokens == 3


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"num_ranks": 2, "accumulation": 1}',
        '{"num_ranks": "2", "accumulation": 1, "batch_size": 4}',
        '{"num_ranks": 0, "accumulation": 1, "batch_size": 4}',
        "[" * 100_000,
    ],
)
def test_a_file_that_says_nothing_of_steps_is_no_checkpoint_of_this_class(tmp_path, text):
    plan = {"num_ranks": 2, "accumulation": 1, "batch_size": 4}
    path = tmp_path / "hyperpod.json"
    path.write_text('{"num_ranks": 2, "accumulation": 1, "batch_size": 4, "loader": "of another"}')
    assert _plan_in(str(tmp_path)) == plan
    path.write_text(text)
    assert _plan_in(str(tmp_path)) is None
    with pytest.raises(ConfigError, match="was not written by HyperPodTrainer"):
        _continued(plan, _plan_in(str(tmp_path)), str(tmp_path), is_elastic=False)
