"""Validation, test and predict steps of the strategy."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from typing_extensions import override

from hyperpod_plugins.lightning.saving import SavingStrategy
from hyperpod_plugins.parallel import ParallelConfig, loss_parallel_context
from hyperpod_plugins.parallel.hsdp import reshard


class EvaluatingStrategy(SavingStrategy):
    """Abstract strategy that leaves parameters sharded after each evaluation step."""

    config: ParallelConfig

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `validation_step`, then reshard; see `HyperPodStrategy.training_step`."""
        with self._evaluation():
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `test_step`, then reshard; see `HyperPodStrategy.training_step`."""
        with self._evaluation():
            return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `predict_step`, then reshard; see `HyperPodStrategy.training_step`."""
        with self._evaluation():
            return super().predict_step(*args, **kwargs)

    @contextmanager
    def _evaluation(self) -> Generator[None, None, None]:
        """Reshard after the step: callbacks that swap or average weights need the optimizer's parameters."""
        with loss_parallel_context(self.config):
            yield
        assert self.model is not None
        reshard(self.model)
