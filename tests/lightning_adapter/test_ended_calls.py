"""Which calls of a program are run again when all its processes start again: those whose end could not be kept."""

import logging
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from device import ACCELERATOR, devices

from hyperpod_plugins.elastic import JobStore
from hyperpod_plugins.elastic.store.entry_records import EndedEntry, EntryRecords, ended_entry, record_end
from hyperpod_plugins.env import JobEnv
from hyperpod_plugins.lightning import trainer_entries
from hyperpod_plugins.recovery.entries import Entries

LIMIT_BYTES = 10_000


class Prediction:
    """No plain value."""


@pytest.mark.parametrize(
    ("results", "kind", "can_be_kept"),
    [
        pytest.param([torch.ones(2), {"label": "a"}], "predict", True, id="plain"),
        pytest.param([torch.ones(LIMIT_BYTES)], "predict", False, id="large"),
        pytest.param([Prediction()], "predict", False, id="not read without pickle"),
        pytest.param([lambda: None], "predict", False, id="not even pickled"),
        pytest.param([{"loss": 0.5}], "test", True, id="metrics"),
    ],
)
def test_what_can_be_kept_of_results(monkeypatch, results, kind, can_be_kept):
    monkeypatch.setattr(trainer_entries, "_MAX_PREDICTIONS_BYTES", LIMIT_BYTES)
    assert trainer_entries.can_keep(results, kind) is can_be_kept


@pytest.fixture
def job():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield JobEnv(store_host="127.0.0.1", store_port=store.port, run_id="first")
    del store


def test_a_call_of_another_kind_than_before_is_told_so(job):
    record_end(JobStore.connect(job), EndedEntry(number=0, kind="validate"))
    words = "call 0 of the program was `validate` before, and is `fit` now"
    with pytest.raises(RuntimeError, match=words), Entries().enter(job, "fit"):
        pass
    with Entries().enter(job, "validate") as record:
        assert record.kind == "validate"


def test_no_call_is_passed_after_one_whose_end_is_not_kept(job):
    for number in range(3):
        record_end(JobStore.connect(job), EndedEntry(number=number, kind="test"))
    entries, passed = Entries(), []
    for number in range(3):
        with entries.enter(job, "test") as record:
            passed.append(record is not None)
            if number == 1:
                entries.mark_not_kept("a test")
    assert passed == [True, True, False]


@pytest.mark.parametrize(("of_call", "of_skipped", "is_kept"), [((0,), (0, 1), True), ((0, 1), (0,), False)])
def test_files_of_the_ranks_of_this_call_are_looked_for(
    job, tmp_path, monkeypatch, caplog, of_call, of_skipped, is_kept
):
    """A fit that was only skipped has left the job in the world that it began with, and the present one changed it."""
    entries = Entries()
    monkeypatch.setattr(trainer_entries, "entries", entries)
    monkeypatch.setattr(trainer_entries, "_values_of", lambda *_: {})
    strategy = SimpleNamespace(
        checkpoint_root=tmp_path, global_rank=0, world_size=1, reduce_boolean_decision=lambda each: each
    )
    with entries.enter(job, "validate"):
        entries.worker_ids = of_skipped
        trainer_entries.save_entry_end(SimpleNamespace(strategy=strategy), "validate", [], 0, worker_ids=of_call)
    assert (entries.is_complete, ended_entry(JobStore.connect(job), 0) is not None) == (is_kept, is_kept)
    assert ("does not see the files of workers 1" in caplog.text) is not is_kept


def predict_and_validate(root, returns):
    """A program of two calls; which of them it ran, what it found, and what it was told."""
    import lightning.pytorch as pl

    from hyperpod_plugins.lightning import CheckpointlessRecovery, HyperPodStrategy

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer, self.ran = torch.nn.Linear(4, 4), []

        def predict_step(self, batch, index):
            self.ran.append("predict")
            is_rank_1 = self.global_rank == 1
            return Prediction() if is_rank_1 and returns == "objects" else self.layer(batch)

        def validation_step(self, batch, index):
            self.ran.append("validate")
            self.log("loss", self.layer(batch).square().mean(), sync_dist=True)

    told, handler = [], logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("hyperpod_plugins.recovery.entries").addHandler(handler)
    if returns == "much":
        trainer_entries._MAX_PREDICTIONS_BYTES = 100
    torch.manual_seed(0)
    trainer = pl.Trainer(
        strategy=HyperPodStrategy(hybrid_shard_degree=1),
        accelerator=ACCELERATOR,
        devices=devices(2),
        default_root_dir=root,
        callbacks=[CheckpointlessRecovery()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module, loader = Module(), torch.utils.data.DataLoader(torch.ones(2, 4))
    predicted = trainer.predict(module, loader)
    return {
        "predicted": [each for each in predicted if isinstance(each, torch.Tensor)],
        "validated": trainer.validate(module, loader, verbose=False),
        "ran": module.ran,
        "told": told,
    }


@pytest.mark.spawns
@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("plain values", ""),
        ("much", "what `predict` returned is large"),
        ("objects", "what `predict` returned is large, or holds Python objects"),
        ("no folder", "File exists"),
    ],
)
def test_what_is_not_kept_is_run_again_with_all_that_follows(run_ranks, tmp_path, job, case, told):
    root = tmp_path / "root"
    if case == "no folder":
        root.touch()  # nothing can be made in it
    rounds, records = [], EntryRecords()
    for restart_count, run_id in enumerate(("first", "second")):
        variables = job.to_environ() | {"HYPERPOD_RUN_ID": run_id, "TORCHELASTIC_RESTART_COUNT": str(restart_count)}
        job_store = JobStore.connect(JobEnv.from_environ(variables))
        records.hand_over(job_store, len(records.ended))
        rounds.append(run_ranks(predict_and_validate, str(root), case, world_size=2, environ=variables))
        records = EntryRecords.read(job_store)
    is_kept = not told
    assert [entry.kind for entry in records.ended] == (["predict", "validate"] if is_kept else [])
    for first, second in zip(*rounds, strict=True):
        assert first["ran"] == ["predict", "validate"]
        assert second["ran"] == ([] if is_kept else ["predict", "validate"])
        assert all(map(torch.equal, first["predicted"], second["predicted"]))
        assert first["validated"] == second["validated"]
        for each in (first, second):
            assert bool(each["told"]) == (not is_kept)
    assert told in " ".join(rounds[0][1]["told"])
    if case == "objects":
        assert "another rank could not keep its part" in rounds[0][0]["told"][0]
