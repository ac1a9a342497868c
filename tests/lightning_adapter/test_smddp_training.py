"""Fits over smddp's stand-in: the losses of the same fits over gloo, bit for bit, wherever a group spans the world."""

import sys

import pytest
import torch
import torch.distributed as dist
from device import ACCELERATOR
from smddp_library import write_library
from torch import nn

NUM_STEPS, BATCH, WIDTH = 4, 4, 8
HSDP, FULL = "hsdp 2x2", "full shard 4"
SHARD_DEGREES = {HSDP: 2, FULL: 4}


@pytest.fixture
def library(tmp_path):
    return write_library(tmp_path)


def make_module():
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))
            self.losses = []

        def training_step(self, batch, index):
            loss = (self.net(batch) - batch).square().mean()
            self.losses.append(float(loss.detach()))
            self.log("mean", loss, sync_dist=True)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)  # unlike Adam, it sees a sum for a mean

        def train_dataloader(self):
            generator = torch.Generator().manual_seed(100 + self.global_rank)
            samples = torch.randn(NUM_STEPS * BATCH, WIDTH, generator=generator)
            return torch.utils.data.DataLoader(samples, batch_size=BATCH)

    torch.manual_seed(0)
    return Module()


def library_of(group):
    """Name of the class that moves a group's bytes."""
    from hyperpod_plugins.comm.smddp import MeanBySumGroup

    return type(group.inner.inner if isinstance(group.inner, MeanBySumGroup) else group.inner).__name__


def fit(transport, shard_degree):
    import lightning.pytorch as pl

    from hyperpod_plugins.comm import CommOptions
    from hyperpod_plugins.lightning import HyperPodStrategy

    comm = CommOptions(transport=transport, strict=True)
    trainer = pl.Trainer(
        accelerator=ACCELERATOR,
        strategy=HyperPodStrategy(comm=comm, hybrid_shard_degree=shard_degree),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    module = make_module()
    trainer.fit(module)
    return {
        "losses": module.losses,
        "mean": float(trainer.callback_metrics["mean"]),
        "parameters": [parameter.full_tensor().tolist() for parameter in module.parameters()],
        "world": library_of(dist.group.WORLD),
        "shard": library_of(trainer.strategy.device_mesh.get_group("shard")),
    }


def fit_all(transport, folder):
    sys.path.insert(0, folder)
    return {name: fit(transport, shard_degree) for name, shard_degree in SHARD_DEGREES.items()}


@pytest.mark.spawns
def test_fits_over_smddp_equal_those_over_gloo_to_the_bit(run_ranks, library):
    environ = {"HYPERPOD_INSTANCE_TYPE": "ml.p4d.24xlarge"}
    over_smddp = run_ranks(fit_all, "smddp", library, world_size=4, environ=environ, timeout_s=80)
    over_gloo = run_ranks(fit_all, "gloo", library, world_size=4, environ=environ, timeout_s=80)
    for rank in range(4):
        for layout in SHARD_DEGREES:
            found, expected = over_smddp[rank][layout], over_gloo[rank][layout]
            assert len(found["losses"]) == NUM_STEPS
            for kind in ("losses", "mean", "parameters"):
                assert found[kind] == expected[kind], f"{layout}, rank {rank}: {kind}"
            assert (found["world"], expected["world"]) == ("SMDDPGroup", "ProcessGroup")
        assert over_smddp[rank][HSDP]["shard"] == "ProcessGroup"  # smddp serves no part of the world
        assert over_smddp[rank][FULL]["shard"] == "SMDDPGroup"
