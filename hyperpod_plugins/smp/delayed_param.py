"""`DelayedParamIniter`: initializes a model on the meta device when each rank stores only its shard."""

from collections.abc import Callable, Generator
from contextlib import contextmanager

from torch import nn

from hyperpod_plugins.delayed_init.tape import own_tensors
from hyperpod_plugins.errors import ConfigError, InitializationError, format_list


class ParamInit:
    """FSDP's `param_init_fn` for delayed initialization: marks that `wrap` initializes the parameters itself."""

    def __call__(self, module: nn.Module) -> None:
        """Raise `ConfigError`: only torch's own FSDP calls this, which happens without `torch.sagemaker.init`."""
        raise ConfigError(
            f"the parameters of {type(module).__name__} must be initialized by the translated "
            "FullyShardedDataParallel, but torch's own was called. Call torch.sagemaker.init() first."
        )


class DelayedParamIniter:
    """Initializes a model on the meta device with its own initializers, seeded with `random_seed`.

    Supports `reset_parameters` of torch's modules and `_init_weights` of Hugging Face models.

    Args:
        model: built under `torch.device("meta")`, or under `hyperpod_plugins.delayed_init.delayed_init`.
        init_method_using_config: initializes the tensors of one module, in place; for models that have neither.
        verbose: print the number of parameters.

    Raises:
        ConfigError: no parameter or buffer of the model is on the meta device.
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
            print(f"{self.count_num_params()} parameters of {type(model).__name__} not initialized yet")  # noqa: T201

    def count_num_params(self) -> int:
        """Number of parameters of the model, over all ranks."""
        return sum(parameter.numel() for parameter in self._model.parameters())

    def get_param_init_fn(self) -> Callable[[nn.Module], None]:
        """Return the value for FSDP's `param_init_fn`."""
        return ParamInit()

    def get_post_param_init_fn(self) -> Callable[[nn.Module, nn.Module], None]:
        """Return the value for `post_param_init_fn`, with which SMP ties parameters again; here they stay tied."""
        return _stay_tied

    @contextmanager
    def validate_params_and_buffers_inited(self) -> Generator[None]:
        """Check at the end of the context that all parameters and buffers have values.

        Raises:
            InitializationError: some have none.
        """
        yield
        waiting = _without_values(self._model)
        if waiting:
            raise InitializationError(
                f"{format_list(waiting)} of {type(self._model).__name__} are still on the meta device. Wrap the model "
                "in FullyShardedDataParallel inside this context."
            )


def _stay_tied(*_: nn.Module) -> None:
    pass


def _without_values(model: nn.Module) -> list[str]:
    tensors = (*model.named_parameters(), *model.named_buffers())
    return [name for name, tensor in tensors if tensor.is_meta]
