"""`import torch.sagemaker` works after `install` only, and what it lacks says what to use instead."""

import importlib
import sys
import types

import pytest
import torch

import hyperpod_plugins.smp
from hyperpod_plugins.errors import ConfigError, NotBuiltYetError
from hyperpod_plugins.parallel import Topology
from hyperpod_plugins.smp import job as smp_job


@pytest.fixture
def installed():
    hyperpod_plugins.smp.install()
    yield
    hyperpod_plugins.smp.uninstall()


def test_only_after_install():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("torch.sagemaker")
    hyperpod_plugins.smp.install()
    try:
        tsm = importlib.import_module("torch.sagemaker")
        assert torch.sagemaker is tsm
        assert tsm.init is hyperpod_plugins.smp.init
    finally:
        hyperpod_plugins.smp.uninstall()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("torch.sagemaker")
    with pytest.raises(AttributeError):
        _ = torch.sagemaker


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch.sagemaker", "transform"),
        ("torch.sagemaker", "is_initialized"),
        ("torch.sagemaker.delayed_param", "DelayedParamIniter"),
        ("torch.sagemaker.distributed.checkpoint.state_dict_saver", "maybe_finalize_async_calls"),
        ("torch.sagemaker.distributed.checkpoint.filesystem", "DistributedFileSystemReader"),
        ("torch.sagemaker.grad_norm", "clip_grad_norm_"),
        ("torch.sagemaker.logger", "get_logger"),
        ("torch.sagemaker.moe.moe_config", "MoEConfig"),
        ("torch.sagemaker.utils.process_group_utils", "get_global_ranks"),
    ],
)
def test_what_scripts_import(installed, module, name):
    assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("nn.attn", "attn_implementation"),
        ("context_parallel.utils", "whole sequences"),
        ("other", "torch.sagemaker.moe"),
    ],
)
def test_what_is_not_there(installed, module, words):
    with pytest.raises(ModuleNotFoundError, match=words):
        importlib.import_module(f"torch.sagemaker.{module}")


def test_the_library_itself_is_not_pushed_aside(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.sagemaker", types.ModuleType("torch.sagemaker"))
    with pytest.raises(ConfigError, match="first line"):
        hyperpod_plugins.smp.install()


def test_state_before_init(installed):
    tsm = importlib.import_module("torch.sagemaker")
    assert not tsm.is_initialized()
    with pytest.raises(ConfigError, match="init"):
        _ = tsm.state.tp_rank
    with pytest.raises(ConfigError, match="init"):
        tsm.transform(torch.nn.Linear(2, 2))


def test_what_is_not_there_of_the_state(installed):
    tsm = importlib.import_module("torch.sagemaker")
    with pytest.raises(
        AttributeError,
        match=r"get_rng_state_tracker has no counterpart.*Leave Transformer Engine.s checkpoint",
    ):
        _ = tsm.state.get_rng_state_tracker
    with pytest.raises(AttributeError, match=r"state\.other has no counterpart.*there are .*cp_rank, .*world_size"):
        _ = tsm.state.other
    assert not hasattr(tsm.state, "get_rng_state_tracker")


def test_ranks_share_gpus_that_are_too_few(monkeypatch):
    class Chosen(Exception):
        """Ends `init` as soon as it has chosen a device."""

    def choose(device):
        raise Chosen(device)

    for name, value in {"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 3, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", choose)
    with pytest.raises(Chosen, match=r"^1$"):
        hyperpod_plugins.smp.init()


@pytest.mark.parametrize("name", ["context", "expert"])
def test_degrees_need_groups_of_this_package(monkeypatch, name):
    topology = Topology(world_size=2, shard_degree=2, **{f"{name}_degree": 2})
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "gloo")
    with pytest.raises(NotBuiltYetError, match=f"{name}_parallel_degree=2 needs groups of the backend 'hyperpod'"):
        smp_job._mesh(topology)


def test_an_unknown_way_to_balance():
    with pytest.raises(ConfigError, match="sinkhorn"):
        hyperpod_plugins.smp.MoEConfig(moe_load_balancing="sinkhole")


@pytest.mark.parametrize("options", [{"global_token_shuffle": True}, {"moe_load_balancing": "balanced"}])
def test_what_is_not_served_of_balancing(options):
    with pytest.raises(NotBuiltYetError, match="global_token_shuffle=False, and 'sinkhorn', 'aux_loss' or 'none'"):
        hyperpod_plugins.smp.MoEConfig(**options)
    hyperpod_plugins.smp.MoEConfig(smp_moe=False, **options)
