"""An infinite gradient on one rank, with finite losses and without clipping: all ranks stop, skip or go on alike."""

import pytest
import torch
from torch import nn

from hyperpod_plugins.elastic import ElasticPolicy
from hyperpod_plugins.session import Session

pytestmark = pytest.mark.spawns

BAD = 1  # the step in which rank 1 has an infinite gradient
KINDS = {
    "FSDP2 averages": {},
    "shards": {"hybrid_shard_degree": 2},
    "in a fixed order": {"global_batch_size": 4, "reproducible": True, "elastic": ElasticPolicy(max_replicas=2)},
    "AdaScale": {"samples_per_replica": 2, "lr_scaling": "adascale"},
}


def train(policy, kind):
    """Three steps of two batches; parameters after each, what was logged, and what was raised."""
    import logging

    from hyperpod_plugins.errors import NonFiniteError

    session = Session(**{"hybrid_shard_degree": 1} | KINDS[kind])
    torch.manual_seed(0)
    model = session.parallelize(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    session.train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), non_finite=policy)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(12, 4)), batch_size=1)
    messages, weights, losses, told = [], [], [], ""
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("hyperpod_plugins.parallel.finite").addHandler(handler)
    try:
        for step in session.steps(loader, epochs=1, max_steps=3):
            with step:

                def loss(batch, step=step):
                    out = model(batch[0])
                    if step.index == BAD and session.rank == 1:
                        out.register_hook(lambda gradient: gradient * torch.inf)
                    return out.square().mean()

                losses.append(float(step.run(loss)))
            weights.append(model[0].weight.to_local().detach().clone())
    except NonFiniteError as error:
        told = str(error)
        weights.append(model[0].weight.to_local().detach().clone())
    return {"weights": weights, "losses": losses, "told": told, "messages": messages}


def train_all():
    return {(policy, kind): train(policy, kind) for policy in ("auto", "skip", "warn", "off") for kind in KINDS}


@pytest.fixture(scope="module")
def trained(run_ranks):
    return run_ranks(train_all, world_size=2)


@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_stop_with_nothing_updated(trained, kind):
    for rank in (0, 1):
        found = trained[rank]["auto", kind]
        assert torch.equal(found["weights"][0], found["weights"][1])
        assert "step 1 of epoch 0 is not finite" in found["told"]
        assert "a gradient is infinite or NaN" in found["told"]


@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_skip(trained, kind):
    for rank in (0, 1):
        found = trained[rank]["skip", kind]
        first, second, third = found["weights"]
        assert torch.equal(first, second)
        assert not torch.equal(second, third)
        assert third.isfinite().all()
        assert kind == "shards" or torch.equal(third, trained[0]["skip", kind]["weights"][2])
        assert torch.tensor(found["losses"]).isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_step_is_made_nevertheless(trained, kind):
    for rank in (0, 1):
        warned, off = (trained[rank][policy, kind] for policy in ("warn", "off"))
        assert not warned["weights"][1].isfinite().all()
        assert not off["weights"][1].isfinite().all()
        assert any("step 1 of epoch 0" in each for each in warned["messages"])
        assert off["messages"] == []
