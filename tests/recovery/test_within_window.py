"""Collectives between the micro-steps of one optimizer step are refused by name, before the first step is committed."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.spawns

PROGRAM = """
import sys

import lightning.pytorch as L
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from hyperpod_plugins.lightning import HyperPodStrategy

torch.set_num_threads(1)


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def training_step(self, batch, index):
        return self.linear(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_batch_end(self, outputs, batch, index):
        if sys.argv[1] == "each batch" or index % 2:
            dist.all_reduce(torch.ones(1))
            print("reduced after batch", index, flush=True)


trainer = L.Trainer(
    accelerator="cpu",
    devices=2,
    strategy=HyperPodStrategy(hybrid_shard_degree=1),
    accumulate_grad_batches=2,
    max_steps=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(Module(), DataLoader(TensorDataset(torch.ones(32, 4)), batch_size=2))
print("trained to", trainer.global_step, flush=True)
"""


@pytest.mark.parametrize("when", ["each batch", "each step"])
def test_hooks_communicate_after_the_last_micro_step_of_a_step_only(when, tmp_path):
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    launcher = [sys.executable, "-m", "hyperpod_plugins.elastic.launch", "--nproc-per-node", "2"]
    done = subprocess.run([*launcher, str(program), when], capture_output=True, text=True, timeout=120)
    text = done.stdout + done.stderr
    if when == "each batch":
        assert done.returncode == 1, text
        assert "a collective was called between the micro-steps of one optimizer step" in text
        assert "reduced after batch" not in text
    else:
        assert done.returncode == 0, text
        assert text.count("trained to 2") == 2
