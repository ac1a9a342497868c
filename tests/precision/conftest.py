"""The stand-in for Transformer Engine, as if it were installed."""

import sys
from pathlib import Path

import pytest

STAND_INS = str(Path(__file__).parents[1] / "stand_ins")


@pytest.fixture
def library(monkeypatch):
    monkeypatch.syspath_prepend(STAND_INS)
    import transformer_engine.pytorch as library

    import hyperpod_plugins.precision.transformer_engine as ours

    library.FP8GlobalStateManager.reset()
    ours._trained.clear()
    yield library
    ours._trained.clear()
    ours._layer_class.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
        del sys.modules[name]
