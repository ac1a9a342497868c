"""What a program with no Lightning, an old one, or one without a name that is needed, is told."""

import importlib.util
import sys
from types import ModuleType

import lightning.pytorch.callbacks.weight_averaging as weight_averaging
import pytest

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
