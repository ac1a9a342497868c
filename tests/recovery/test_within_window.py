"""Collectives between the micro-steps of one optimizer step: a loss in a later one is repaired, and told of before."""

from pathlib import Path

import pytest
import torch
import warm

pytestmark = pytest.mark.spawns

PROGRAM = """
import os
import signal
import sys
from pathlib import Path

import lightning.pytorch as L
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from hyperpod_plugins.lightning import CheckpointlessRecovery, HyperPodStrategy

torch.set_num_threads(1)
when, snapshots, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
sys.path.append(sys.argv[4])

from device import ACCELERATOR, devices, install_transport

install_transport()


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("total", torch.zeros(()))
        self.num_updates = 0

    def training_step(self, batch, index):
        mark = folder / "killed"
        if self.global_rank == 1 and index == 5 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.linear(batch[0]).square().mean() + 0 * self.total

    def optimizer_step(self, *args, **kwargs):
        super().optimizer_step(*args, **kwargs)
        if when == "rate":
            self.num_updates += 1

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_batch_end(self, outputs, batch, index):
        if when == "rate":
            for group in self.trainer.optimizers[0].param_groups:
                group["lr"] *= 0.9
            return
        if when == "each batch" or index % 2:
            total = torch.ones((), device=self.device)
            dist.all_reduce(total)
            self.total += total


trainer = L.Trainer(
    accelerator=ACCELERATOR,
    devices=devices(2),
    strategy=HyperPodStrategy(hybrid_shard_degree=1),
    callbacks=[CheckpointlessRecovery(snapshot_every_steps=snapshots)],
    accumulate_grad_batches=2,
    max_steps=5,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
module = Module()
data = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
trainer.fit(module, DataLoader(TensorDataset(data), batch_size=2))
weights = [each.full_tensor().cpu() for each in module.linear.parameters()]
assert module.num_updates == (5 if when == "rate" else 0)  # once a step, not once a batch
torch.save((weights, module.total.cpu()), folder / f"rank-{trainer.global_rank}.pt")
"""


def train(folder, when, snapshots, *, is_disturbed):
    folder.mkdir()
    (folder / "train.py").write_text(PROGRAM)
    if not is_disturbed:
        (folder / "killed").touch()
    args = [str(folder / "train.py"), when, str(snapshots), str(folder), str(Path(__file__).parents[1])]
    code, text = warm.run(["--nproc-per-node", "2", *args], timeout_s=120)
    assert code == 0, text[-8000:]
    return text, [torch.load(folder / f"rank-{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize(
    ("when", "snapshots", "repair"),
    [
        ("each batch", 0, "all processes start again"),
        ("each batch", 1, "all ranks return to the snapshot of step 2"),
        ("each step", 0, "killed by SIGKILL; repaired in"),
        ("rate", 0, "killed by SIGKILL; repaired in"),
    ],
)
def test_a_loss_in_a_later_micro_step_is_repaired_to_the_same_bits(when, snapshots, repair, tmp_path):
    calm, wanted = train(tmp_path / "calm", when, snapshots, is_disturbed=False)
    text, found = train(tmp_path / "disturbed", when, snapshots, is_disturbed=True)
    for (weights, total), (others, other) in zip(found, wanted, strict=True):
        assert all(map(lambda a, b: a.equal(b), weights, others))
        assert total.equal(other)
    is_told = "a collective was called between the micro-steps" in calm
    assert is_told == (when == "each batch")
    assert repair in text, text
