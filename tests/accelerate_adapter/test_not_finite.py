"""A loss or gradient of one rank of an Accelerate loop is not finite: all ranks stop, skip or go on alike."""

import pytest
import torch
from torch import nn

from hyperpod_plugins.accelerate import HyperPodPlugin
from hyperpod_plugins.errors import ConfigError

BAD = 3  # the second batch of step 1 of rank 1
CASES = (
    ("auto", "loss"),
    ("auto", "gradient"),
    ("skip", "loss"),
    ("skip", "norm"),
    ("skip", "gradient"),
    ("warn", "loss"),
    ("warn", "gradient"),
    ("off", "loss"),
)


def train(policy, what):
    """Three steps of two batches; parameters after each, how often the scheduler advanced, and what was raised."""
    from accelerate.state import AcceleratorState, GradientState

    from hyperpod_plugins.errors import NonFiniteError

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    plugin = HyperPodPlugin(hybrid_shard_degree=1, non_finite=policy)
    accelerator = plugin.accelerator(gradient_accumulation_steps=2)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    loader = torch.utils.data.DataLoader(torch.randn(24, 4), batch_size=2)
    net, optimizer, loader, scheduler = accelerator.prepare(net, optimizer, loader, scheduler)
    weights, skipped, told = [], [], ""
    try:
        for index, x in enumerate(loader):
            with accelerator.accumulate(net):
                is_bad = index == BAD and accelerator.process_index == 1
                loss = net(x).square().mean() * (torch.nan if is_bad and what == "loss" else 1.0)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    if is_bad and what in ("norm", "gradient"):
                        net[0].bias.grad.to_local().fill_(torch.inf)
                    if what == "norm":
                        accelerator.clip_grad_norm_(net.parameters(), 1e6)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                if accelerator.sync_gradients:
                    weights.append(net[0].weight.full_tensor().detach().clone())
                    skipped.append(accelerator.optimizer_step_was_skipped)
    except NonFiniteError as error:
        told = str(error)
        weights.append(net[0].weight.full_tensor().detach().clone())
    return {"weights": weights, "skipped": skipped, "advanced": scheduler.scheduler.last_epoch, "told": told}


def train_all():
    import warnings

    import torch.distributed as dist

    warnings.filterwarnings("ignore")
    dist.init_process_group("hyperpod")
    return {case: train(*case) for case in CASES}


@pytest.fixture(scope="module")
def trained(run_ranks):
    return run_ranks(train_all, world_size=2)


pytestmark = pytest.mark.spawns


def test_all_ranks_stop_with_nothing_updated(trained):
    for rank in (0, 1):
        found = trained[rank]["auto", "loss"]
        assert torch.equal(found["weights"][0], found["weights"][1])
        assert "step 1 is not finite" in found["told"]
    assert "another rank has such a loss" in trained[0]["auto", "loss"]["told"]
    assert "the loss of batch 3 of this rank is nan" in trained[1]["auto", "loss"]["told"]
    for rank in (0, 1):
        found = trained[rank]["auto", "gradient"]
        assert torch.equal(found["weights"][0], found["weights"][1])
        assert "step 1 is not finite: a gradient is infinite or NaN, and all losses are finite" in found["told"]
        assert "the batches of this rank: 2, 3." in found["told"]


def test_all_ranks_skip_and_no_scheduler_advances(trained):
    for rank in (0, 1):
        found = trained[rank]["skip", "loss"]
        first, second, third = found["weights"]
        assert torch.equal(first, second)
        assert not torch.equal(second, third)
        assert third.isfinite().all()
        assert torch.equal(third, trained[0]["skip", "loss"]["weights"][2])
        assert found["skipped"] == [False, True, False]
        assert found["advanced"] == 2 * 2  # by one for each rank that reads its own samples


@pytest.mark.parametrize("what", ["norm", "gradient"])
def test_a_gradient_that_is_not_finite_counts_too(trained, what):
    for rank in (0, 1):
        first, second, _ = trained[rank]["skip", what]["weights"]
        assert torch.equal(first, second)


@pytest.mark.parametrize("policy", ["warn", "off"])
def test_the_step_is_made_nevertheless(trained, policy):
    found = trained[0][policy, "loss"]
    assert not found["weights"][1].isfinite().any()
    assert found["skipped"] == [False, False, False]


def test_a_gradient_may_only_be_warned_of(trained):
    warned = trained[1]["warn", "gradient"]
    assert warned["skipped"] == [False, False, False]
    assert not torch.equal(warned["weights"][0], warned["weights"][1])


def test_an_unknown_policy_is_refused():
    with pytest.raises(ConfigError, match="non_finite='raise' is not known"):
        HyperPodPlugin(non_finite="raise")
