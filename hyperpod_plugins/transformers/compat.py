"""Names of transformers and Accelerate that this adapter uses; importing this raises a clear error without them."""

try:
    from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin
    from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
    from transformers.trainer_callback import ExportableState, TrainerControl
    from transformers.trainer_utils import TrainOutput
except ModuleNotFoundError as error:
    from hyperpod_plugins.errors import MissingExtraError

    raise MissingExtraError(error.name or "transformers", "transformers", "hyperpod_plugins.transformers") from None

__all__ = [
    "DataLoaderConfiguration",
    "ExportableState",
    "GradientAccumulationPlugin",
    "TrainOutput",
    "Trainer",
    "TrainerCallback",
    "TrainerControl",
    "TrainerState",
    "TrainingArguments",
]
