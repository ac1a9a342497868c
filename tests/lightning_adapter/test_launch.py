"""Real programs under real launchers: Lightning's own, torchrun, and both names of Lightning."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
    import json, sys
    from pathlib import Path
    {imports}
    import torch

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))

        def forward(self, x):
            return self.net(x)

        def training_step(self, x, index):
            return (self(x) - x).square().mean()

        def validation_step(self, x, index):
            self.log("val_loss", self.training_step(x, index), sync_dist=True)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

        def train_dataloader(self):
            samples = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
            return torch.utils.data.DataLoader(samples, batch_size=4)

        val_dataloader = predict_dataloader = train_dataloader

    is_late = "hyperpod_plugins.lightning" not in sys.modules
    trainer = L.Trainer(
        strategy="hyperpod", accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, {arguments}
    )
    module = Module()
    (before,) = trainer.validate(module, verbose=False)
    trainer.fit(module)
    (after,) = trainer.validate(module, verbose=False)
    predicted = trainer.predict(module)
    Path(sys.argv[1], f"{{trainer.global_rank}}.json").write_text(json.dumps(dict(
        is_late=is_late,
        world_size=trainer.world_size,
        backend=torch.distributed.get_backend(),
        strategy=f"{{type(trainer.strategy).__module__}}.{{type(trainer.strategy).__name__}}",
        base=any(kind.__module__.startswith(L.__name__ + ".") for kind in type(trainer.strategy).__mro__),
        topology=str(trainer.strategy.topology),
        steps=trainer.global_step,
        losses=[before["val_loss"], after["val_loss"]],
        num_predicted=sum(map(len, predicted)),
        weights=[float(p.full_tensor().sum()) for p in module.parameters()],
    )))
"""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


@pytest.fixture
def run_program(tmp_path):
    """Run a program under a launcher; return what each rank wrote. Nothing outlives the deadline."""

    def run(imports, arguments, *launcher, autoload=True):
        script, out = tmp_path / "train.py", tmp_path / "out"
        out.mkdir()
        script.write_text(textwrap.dedent(PROGRAM).format(imports=imports, arguments=arguments))
        environ = {
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "OMP_NUM_THREADS": "1",
            "TORCH_DEVICE_BACKEND_AUTOLOAD": str(int(autoload)),
        }
        started = subprocess.Popen(
            [sys.executable, *launcher, str(script), str(out)],
            env=environ,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            log, _ = started.communicate(timeout=120)
        finally:
            if started.poll() is None:
                os.killpg(started.pid, signal.SIGKILL)
                started.wait()
        assert started.returncode == 0, log[-6000:]
        return [json.loads(path.read_text()) for path in sorted(out.iterdir())], log

    return run


def check(ranks, base_name):
    assert len(ranks) == 2
    for found in ranks:
        assert found["strategy"] == "hyperpod_plugins.lightning.strategy.HyperPodStrategy"
        assert found["base"], f"the strategy is no {base_name} strategy"
        assert (found["world_size"], found["backend"]) == (2, "hyperpod")
        assert found["topology"] == "replicate 1 x shard 2 x tensor 1"
        assert (found["steps"], found["num_predicted"]) == (8, 16)
        assert found["losses"][1] < found["losses"][0]
        assert found["losses"] == ranks[0]["losses"]
        assert found["weights"] == ranks[0]["weights"]


@pytest.mark.spawns
def test_lightnings_launcher_with_no_import_of_ours(run_program):
    ranks, _ = run_program("import lightning as L", "devices=2")
    check(ranks, "lightning")
    assert all(found["is_late"] for found in ranks)


@pytest.mark.spawns
def test_torchrun_and_the_old_name_with_autoload_switched_off(run_program):
    ranks, _ = run_program(
        "import hyperpod_plugins; import pytorch_lightning as L", "devices=2", *TORCHRUN, autoload=False
    )
    check(ranks, "pytorch_lightning")


@pytest.mark.spawns
def test_without_autoload_and_without_an_import_the_name_is_unknown(run_program):
    """What the fallback is for; were it to work all the same, the fallback would be dead code."""
    with pytest.raises(AssertionError, match=r"You selected an invalid strategy name.*hyperpod"):
        run_program("import lightning as L", "devices=1", autoload=False)
