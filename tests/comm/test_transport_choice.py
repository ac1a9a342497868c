"""Which library moves the bytes, and why another one does not."""

import warnings
from dataclasses import FrozenInstanceError

import pytest

from hyperpod_plugins.comm import CommOptions, choose_transport
from hyperpod_plugins.comm.groups import TRANSPORTS, transport_for_group
from hyperpod_plugins.comm.smddp import Smddp, unsupported_instance_reason
from hyperpod_plugins.comm.transport import Gloo, Nccl
from hyperpod_plugins.errors import BackendUnavailable, ConfigError


@pytest.mark.parametrize(
    ("instance_type", "reason"),
    [
        ("ml.p4d.24xlarge", None),
        ("p4de.24xlarge", None),
        ("ml.p5.48xlarge", "p4d and p4de instances only, and this is ml.p5.48xlarge"),
        ("ml.xp4d.24xlarge", "this is ml.xp4d.24xlarge"),
        (None, "set HYPERPOD_INSTANCE_TYPE=ml.p4d.24xlarge if this is one"),
    ],
)
def test_smddp_names_the_instance_it_refuses(instance_type, reason):
    refusal = unsupported_instance_reason(instance_type)
    assert (refusal is None) if reason is None else (reason in refusal)


@pytest.mark.parametrize(
    ("group_size", "world_size", "serves"), [(8, 8, True), (1, 1, True), (4, 8, False), (1, 8, False)]
)
def test_smddp_serves_groups_that_span_the_world(group_size, world_size, serves):
    refusal = Smddp().unsupported_group_reason(group_size, world_size)
    assert (refusal is None) == serves
    if not serves:
        assert f"{group_size} of {world_size} ranks" in refusal


def test_every_other_transport_serves_every_group():
    assert [t.unsupported_group_reason(2, 8) for t in (Gloo(), Nccl())] == [None, None]


def test_gloo_serves_the_cpu_and_nccl_says_why_not():
    assert choose_transport("cpu").name == "gloo"
    assert choose_transport("cpu", "gloo").name == "gloo"
    assert Nccl().unsupported_reason("cpu") == "it serves cuda tensors only, not cpu"
    assert "not mps" in Gloo().unsupported_reason("mps")


def test_an_explicit_request_that_cannot_be_met_is_an_error_with_every_reason():
    with pytest.raises(BackendUnavailable) as error:
        choose_transport("cpu", "nccl")
    message = str(error.value)
    assert "transport 'nccl' cannot serve cpu tensors here" in message
    assert "nccl: it serves cuda tensors only, not cpu" in message
    assert "smddp: its library cannot be imported" in message
    assert "Ask for gloo, or for 'auto'." in message


def test_no_transport_at_all_names_every_refusal():
    with pytest.raises(BackendUnavailable) as error:
        choose_transport("mps")
    assert "nccl: it serves cuda tensors only, not mps" in str(error.value)
    assert "gloo: it serves cpu and cuda tensors only, not mps" in str(error.value)


def test_smddp_falls_back_after_one_warning_or_raises_if_strict():
    with pytest.warns(UserWarning, match="smddp was asked for, but its library cannot be imported") as caught:
        assert choose_transport("cpu", "smddp").name == "gloo"
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert transport_for_group("cpu", CommOptions(transport="smddp"), 2, 4).name == "gloo"
    with pytest.raises(BackendUnavailable, match="'smddp' cannot serve cpu tensors"):
        choose_transport("cpu", "smddp", strict=True)


def test_options_are_frozen_and_checked():
    with pytest.raises(ConfigError, match=r"transport='mpi' is not known\. Allowed are auto, gloo, nccl, smddp"):
        CommOptions(transport="mpi")
    with pytest.raises(FrozenInstanceError):
        CommOptions().strict = True
    assert {t.name for t in TRANSPORTS} == {"smddp", "nccl", "gloo"}


def test_smddp_is_imported_only_for_those_who_ask_for_it(tmp_path, monkeypatch):
    (tmp_path / "smdistributed").mkdir()
    (tmp_path / "smdistributed" / "__init__.py").write_text("raise LookupError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert transport_for_group("cpu", CommOptions(), 2, 4).name == "gloo"
    with pytest.raises(LookupError, match="imported"):
        choose_transport("cpu", "smddp")
