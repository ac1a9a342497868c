"""`DelayedParamIniter`: parameters of a model on the meta device are made when each rank stores only its shard."""

from collections.abc import Callable, Generator
from contextlib import contextmanager

from torch import nn

from hyperpod_plugins.delayed_init.tape import own_tensors
from hyperpod_plugins.errors import ConfigError, InitializationError, few


class ParamInit:
    """What FSDP is given as `param_init_fn`: it says that the wrap makes the values itself."""

    def __call__(self, module: nn.Module) -> None:
        """Refuse: torch's own FSDP calls this, which happens only without `torch.sagemaker.init`."""
        raise ConfigError(
            f"the parameters of {type(module).__name__} are to be made by the translated FullyShardedDataParallel, but "
            "torch's own one was called. Call torch.sagemaker.init() before."
        )


class DelayedParamIniter:
    """Says how a model on the meta device gets its values: by its own initialisers, from `random_seed`.

    `reset_parameters` of torch's modules and `_init_weights` of Hugging Face models are known.

    Args:
        model: built under `torch.device("meta")`, or under `hyperpod_plugins.delayed_init.delayed_init`.
        init_method_using_config: gives values to the tensors of one module, in place; for models with neither.
        verbose: print how many parameters wait.

    Raises:
        ConfigError: nothing of the model is on the meta device.
    """

    def __init__(
        self,
        model: nn.Module,
        init_method_using_config: Callable[[nn.Module], None] | None = None,
        verbose: bool = False,
    ) -> None:
        self._model = model
        waiting = _without_values(model)
        if not waiting:
            raise ConfigError(
                f"DelayedParamIniter got a {type(model).__name__} whose parameters all have values. Build it under "
                'torch.device("meta"), or leave DelayedParamIniter out.'
            )
        if init_method_using_config is not None:
            for module in model.modules():
                if own_tensors(module):
                    vars(module)["_init_weights"] = init_method_using_config
        if verbose:
            print(f"{self.count_num_params()} parameters of {type(model).__name__} are made later")  # noqa: T201

    def count_num_params(self) -> int:
        """Number of parameters of the model, over all ranks."""
        return sum(parameter.numel() for parameter in self._model.parameters())

    def get_param_init_fn(self) -> Callable[[nn.Module], None]:
        """For FSDP's `param_init_fn`."""
        return ParamInit()

    def get_post_param_init_fn(self) -> Callable[[nn.Module, nn.Module], None]:
        """For `post_param_init_fn` of SMP's FSDP, where tied parameters are tied again; here they stay tied."""
        return _stay_tied

    @contextmanager
    def validate_params_and_buffers_inited(self) -> Generator[None]:
        """Check at the end that everything has a value.

        Raises:
            InitializationError: something has none.
        """
        yield
        waiting = _without_values(self._model)
        if waiting:
            raise InitializationError(
                f"{few(waiting)} of {type(self._model).__name__} are still on the meta device. Wrap the model in "
                "FullyShardedDataParallel inside this context."
            )


def _stay_tied(*_: nn.Module) -> None:
    pass


def _without_values(model: nn.Module) -> list[str]:
    tensors = (*model.named_parameters(), *model.named_buffers())
    return [name for name, tensor in tensors if tensor.is_meta]
