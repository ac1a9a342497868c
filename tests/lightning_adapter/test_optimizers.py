"""Optimizers that a module returns from `configure_optimizers`: which are refused, and what they train."""

import pytest
import torch
from device import ACCELERATOR

from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.lightning import HyperPodStrategy

pytestmark = pytest.mark.spawns


def fit(make_optimizer, *, is_made_early=False):
    """The weights after two steps, or why the optimizer was refused, and the number of steps made."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(4, 4)
            self.optimizer = make_optimizer(self.parameters()) if is_made_early else None

        def training_step(self, batch, index):
            return self.layer(batch).square().mean()

        def configure_optimizers(self):
            return self.optimizer or make_optimizer(self.parameters())

    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = pl.Trainer(strategy=HyperPodStrategy(), accelerator=ACCELERATOR, max_steps=2, **quiet)
    module = Module()
    try:
        trainer.fit(module, torch.utils.data.DataLoader(torch.eye(4)))
    except ConfigError as error:
        return str(error), trainer.global_step
    return {name: value.full_tensor().tolist() for name, value in module.named_parameters()}, trainer.global_step


def make_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def fits():
    return fit(make_sgd), fit(make_sgd, is_made_early=True), fit(torch.optim.LBFGS)


@pytest.fixture(scope="module")
def results(run_ranks):
    [results] = run_ranks(fits, world_size=1)
    return results


def test_one_that_was_made_before_the_module_was_sharded_trains_it(results):
    made_later, made_before, _ = results
    assert made_before == made_later
    assert made_before[1] == 2


def test_one_that_computes_gradients_itself_is_refused_before_the_first_step(results):
    told, num_steps = results[2]
    assert "LBFGS" in told
    assert num_steps == 0
