"""What a program with no Lightning, an old one, or one without a name that is needed, is told."""

import ast
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType

import lightning.pytorch as pl
import lightning.pytorch.callbacks.weight_averaging as weight_averaging
import pytest
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.callbacks.weight_averaging import WeightAveraging
from lightning.pytorch.loops import _EvaluationLoop, _FitLoop, _TrainingEpochLoop
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
from lightning.pytorch.trainer.connectors.data_connector import _DataConnector, _DataLoaderSource
from lightning.pytorch.trainer.connectors.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector

from hyperpod_plugins.errors import MissingExtraError, OutdatedExtraError
from hyperpod_plugins.lightning import compat


def load_anew():
    """Run flavour.py once more, as another module: what it finds now is what a new process would find."""
    spec = importlib.util.spec_from_file_location("flavour_anew", compat.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("version", "wanted"),
    [
        ("2.5.6", True),
        ("1.9", True),
        ("2.6.0", False),
        ("2.6.0.dev20251001", False),
        ("2.10", False),
        ("3.0rc1", False),
        ("unknown", False),
    ],
)
def test_versions(version, wanted):
    assert compat.is_too_old(version) is wanted


def test_it_can_be_loaded_anew():
    assert load_anew().Trainer is compat.Trainer


@pytest.mark.parametrize("version", ["2.5.6", "1.9.5"])
def test_an_old_lightning_is_named_with_what_is_needed(monkeypatch, version):
    monkeypatch.setattr(sys.modules["lightning"], "__version__", version)
    with pytest.raises(OutdatedExtraError) as caught:
        load_anew()
    assert str(caught.value) == (
        f"hyperpod_plugins.lightning needs lightning >=2.6, but version {version} is installed here. "
        "Install a suitable version with: pip install --upgrade 'lightning>=2.6'"
    )


def test_a_lightning_without_a_name_is_told_which(monkeypatch):
    monkeypatch.delattr(weight_averaging, "WeightAveraging")
    with pytest.raises(OutdatedExtraError, match=r"it has no lightning.pytorch.callbacks.weight_averaging.WeightAv"):
        load_anew()


def test_a_lightning_without_a_module_is_told_which(monkeypatch):
    monkeypatch.setitem(sys.modules, "lightning.pytorch.callbacks.weight_averaging", None)
    with pytest.raises(OutdatedExtraError, match=r"has no lightning\.pytorch\.callbacks\.weight_averaging\. Install"):
        load_anew()


def test_no_lightning_is_told_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lightning", None)
    with pytest.raises(MissingExtraError, match=r"'lightning', which is not .*pip install lightning \(it is in the"):
        load_anew()


def test_the_old_name_is_told_under_its_own(monkeypatch):
    old = ModuleType("pytorch_lightning")
    old.__version__ = "2.4.0"
    monkeypatch.setitem(sys.modules, "pytorch_lightning", old)
    monkeypatch.delitem(sys.modules, "lightning.pytorch")
    with pytest.raises(OutdatedExtraError, match=r"2\.4\.0 is installed .*'pytorch_lightning>=2\.6'"):
        load_anew()


OVERRIDDEN = {
    "on_advance_start": ([_FitLoop], []),
    "on_advance_end": ([_FitLoop], []),
    "on_run_start": ([_FitLoop], []),
    "on_run_end": ([_FitLoop], []),
    "setup_data": ([_FitLoop], []),
    "advance": ([_TrainingEpochLoop], ["data_fetcher"]),
    "run": ([_TrainingEpochLoop], ["data_fetcher"]),
    "update_lr_schedulers": ([_TrainingEpochLoop], ["interval", "update_plateau_schedulers"]),
    "_broadcast_sigterm_tensor": ([_TrainingEpochLoop], []),
    "update_restart_stage": ([_TrainingEpochLoop], []),
    "increment_progress_to_evaluation_end": ([_EvaluationLoop], []),
    "_optimizer_step": ([_AutomaticOptimization], ["batch_idx", "train_step_and_backward_closure"]),
    "log": ([_ResultCollection], ["fx", "name", "value"]),
    "metrics": ([_ResultCollection], ["on_step"]),
    "reset": ([_ResultCollection], ["metrics", "fx"]),
    "update_metrics": ([_ResultCollection], ["key", "value", "batch_size"]),
    "log_metrics": ([_LoggerConnector], ["metrics", "step"]),
    "_sigterm_notifier_fn": ([_SignalConnector], ["signum", "_"]),
    "prepare_data": ([_DataConnector], []),
    "dataloader": ([_DataLoaderSource], []),
    "_run_stage": ([pl.Trainer], []),
    "_run_sanity_check": ([pl.Trainer], []),
    "get_metrics": ([ProgressBar], ["trainer", "pl_module"]),
    "save_checkpoint": ([pl.Trainer], ["filepath"]),
    "file_exists": ([pl.callbacks.ModelCheckpoint], ["filepath", "trainer"]),
    "_monitor_candidates": ([pl.callbacks.ModelCheckpoint], ["trainer"]),
    "setup": ([WeightAveraging], ["trainer", "pl_module", "stage"]),
    "on_save_checkpoint": ([pl.Callback, WeightAveraging], ["trainer", "pl_module", "checkpoint"]),
    "on_load_checkpoint": ([pl.Callback, WeightAveraging], ["trainer", "pl_module", "checkpoint"]),
    "state_dict": ([pl.Callback, WeightAveraging, pl.LightningDataModule], []),
    "load_state_dict": ([pl.Callback, WeightAveraging, pl.LightningDataModule], ["state_dict"]),
    "_swap_models": ([WeightAveraging], ["pl_module"]),
    "_copy_average_to_current": ([WeightAveraging], ["pl_module"]),
}
"""Lightning's classes that have each method which is replaced in an object, and the parameters that it begins with."""


def test_lightning_still_has_what_is_overridden():
    assert set(OVERRIDDEN) == compat.OVERRIDDEN
    for name, (owners, parameters) in OVERRIDDEN.items():
        for owner in owners:
            _, *found = inspect.signature(getattr(owner, name)).parameters.values()
            assert [each.name for each in found][: len(parameters)] == parameters, (owner, name)
            rest = found[len(parameters) :]
            assert all(each.default is not each.empty for each in rest), (owner, name)


def test_all_overriding_goes_through_one_function():
    """Nothing else writes to the attributes of an object of Lightning by name."""
    for path in Path(compat.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Subscript) and path.name not in ("compat.py", "local_state.py", "module_checks.py"):
                is_write = isinstance(node.ctx, ast.Store | ast.Del) and isinstance(node.value, ast.Call)
                assert not is_write, f"{path.name}:{node.lineno}"


def test_an_override_is_of_one_object_and_can_be_undone():
    class Loop:
        def run(self):
            return "theirs"

    loop, other = Loop(), Loop()
    undo = compat.override(loop, "run", lambda: "ours")
    again = compat.override(loop, "run", lambda: "again " + compat.original(loop, "run")())
    assert [loop.run(), other.run()] == ["again theirs", "theirs"]
    again()
    assert loop.run() == "ours"
    undo()
    assert loop.run() == "theirs"
    assert not vars(loop)
    with pytest.raises(KeyError, match="walk"):
        compat.override(loop, "walk", lambda: None)
