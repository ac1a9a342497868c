"""Fits over smddp's stand-in: the losses of the same fits over gloo, bit for bit, wherever a group spans the world."""

import sys
import textwrap

import pytest
import torch
import torch.distributed as dist
from torch import nn

NUM_STEPS, BATCH, WIDTH = 4, 4, 8
HSDP, FULL = "hsdp 2x2", "full shard 4"
SHARD_DEGREES = {HSDP: 2, FULL: 4}

# [Note: stand-in] That of test_smddp_standin.py inherits its collectives. torch calls an inherited one with the GIL
# held (WORK_OVERRIDE in PyProcessGroup.hpp), and it waits for gloo's queue. gloo's thread may hold the queue and wait
# for the GIL, to drop a tensor: one fit in ten never ended. Here each collective is called on a group of torch's own.
LIBRARY = """
    import os
    import torch
    import torch.distributed as dist

    COLLECTIVES = (
        "allreduce allreduce_coalesced allgather allgather_coalesced _allgather_base allgather_into_tensor_coalesced "
        "reduce_scatter _reduce_scatter_base reduce_scatter_tensor_coalesced alltoall alltoall_base broadcast reduce "
        "gather scatter send recv recv_anysource barrier"
    ).split()


    class SMDDPGroup(dist.ProcessGroup):
        def __init__(self, store, rank, size, gloo):
            super().__init__(rank, size)
            self.plain = dist.ProcessGroup(store, rank, size)
            for group in (self, self.plain):
                group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
                group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, gloo)


    def handed_on(name):
        def call(self, *arguments, **named):
            options = [each for each in (*arguments, *named.values()) if hasattr(each, "reduceOp")]
            if any(each.reduceOp == dist.ReduceOp.AVG for each in options):
                raise RuntimeError("SMDDP does not support: ReduceOp")
            return getattr(self.plain, name)(*arguments, **named)

        return call


    for name in COLLECTIVES:
        setattr(SMDDPGroup, name, handed_on(name))


    def create(store, rank, size, timeout):
        if size != int(os.environ["WORLD_SIZE"]):
            raise RuntimeError("SMDDP does not support sub-groups")
        return SMDDPGroup(store, rank, size, dist.ProcessGroupGloo(store, rank, size, timeout=timeout))


    dist.Backend.register_backend("smddp", create, devices=["cuda", "cpu"])
"""


@pytest.fixture
def library(tmp_path):
    """Folder of the stand-in, to be put on the path by the ranks."""
    folder = tmp_path / "smdistributed" / "dataparallel" / "torch" / "torch_smddp"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(textwrap.dedent(LIBRARY))
    return str(tmp_path)


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
    from hyperpod_plugins.comm.smddp import SumForMean

    return type(group.inner.inner if isinstance(group.inner, SumForMean) else group.inner).__name__


def fit(transport, shard_degree):
    import lightning.pytorch as pl

    from hyperpod_plugins.comm import CommOptions
    from hyperpod_plugins.lightning import HyperPodStrategy

    comm = CommOptions(transport=transport, strict=True)
    trainer = pl.Trainer(
        accelerator="cpu",
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
