"""Loggers of a process that replaces the first rank go on with its run."""

import csv

import pytest
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger

from hyperpod_plugins.elastic import JobStore
from hyperpod_plugins.lightning.loggers import append_to_csv, record_runs, restore_runs


@pytest.fixture
def job_store():
    return JobStore(dist.HashStore())


def rows(logger):
    with open(f"{logger.log_dir}/metrics.csv", newline="") as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


def test_a_replacement_adds_to_the_rows_of_the_run(job_store, tmp_path):
    lost = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    record_runs(job_store, 0, [lost])
    lost.log_metrics({"loss": 3.0}, step=0)
    lost.log_metrics({"loss": 2.0}, step=1)
    with open(f"{lost.log_dir}/metrics.csv", "a") as file:
        file.write("1.5,")  # killed while it wrote

    replacement = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    restore_runs(job_store, 0, [replacement])
    append_to_csv([replacement])
    assert replacement.log_dir == lost.log_dir
    replacement.log_metrics({"loss": 1.0}, step=2)
    replacement.log_metrics({"loss": 0.5, "val_loss": 0.7}, step=3)
    assert rows(replacement) == [
        {"loss": 3.0, "step": 0.0},
        {"loss": 2.0, "step": 1.0},
        {"loss": 1.0, "step": 2.0},
        {"loss": 0.5, "val_loss": 0.7, "step": 3.0},
    ]
    assert [path.name for path in (tmp_path / "lightning_logs").iterdir()] == ["version_0"]


def test_a_run_without_rows_is_gone_on_with_too(job_store, tmp_path):
    record_runs(job_store, 0, [CSVLogger(tmp_path)])
    replacement = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    restore_runs(job_store, 0, [replacement])
    append_to_csv([replacement])
    replacement.log_metrics({"loss": 1.0}, step=0)
    assert rows(replacement) == [{"loss": 1.0, "step": 0.0}]


def test_a_version_that_the_program_chose_stays(job_store, tmp_path):
    record_runs(job_store, 0, [CSVLogger(tmp_path, version=7)])
    replacement = CSVLogger(tmp_path, version=8)
    restore_runs(job_store, 0, [replacement])
    assert replacement.version == 8


def test_nothing_to_go_on_with(job_store, tmp_path):
    logger = CSVLogger(tmp_path)
    restore_runs(job_store, 0, [logger])
    append_to_csv([logger])
    assert logger.version == 0
