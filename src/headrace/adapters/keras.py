"""Datasets, callbacks and evaluation for Keras 3 models: the public names of `hr.keras`.

Keras is imported on the first use of one of these names.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from headrace.errors import MissingDependencyError
from headrace.lazy_imports import lazy_attributes

if TYPE_CHECKING:
    from headrace.adapters.keras_dataset import KerasDataset, adapter, dataset
    from headrace.adapters.keras_fit import distribute
    from headrace.adapters.keras_training.distributed_embedding import DistributedEmbedding
    from headrace.adapters.keras_training.sidecar_evaluator import (
        BestModelExporter,
        SidecarEvaluator,
    )
    from headrace.adapters.keras_training.table_embedding import Embedding
    from headrace.adapters.keras_training.tensorboard import TensorBoard
    from headrace.adapters.keras_training.training_data import DatasetCreator
else:
    _load, __dir__ = lazy_attributes(
        __name__,
        {
            "BestModelExporter": "headrace.adapters.keras_training.sidecar_evaluator",
            "DatasetCreator": "headrace.adapters.keras_training.training_data",
            "DistributedEmbedding": "headrace.adapters.keras_training.distributed_embedding",
            "Embedding": "headrace.adapters.keras_training.table_embedding",
            "KerasDataset": "headrace.adapters.keras_dataset",
            "SidecarEvaluator": "headrace.adapters.keras_training.sidecar_evaluator",
            "TensorBoard": "headrace.adapters.keras_training.tensorboard",
            "adapter": "headrace.adapters.keras_dataset",
            "dataset": "headrace.adapters.keras_dataset",
            "distribute": "headrace.adapters.keras_fit",
        },
        missing="headrace.data.missing_names:missing_name_message",
    )

    def __getattr__(name: str) -> Any:
        try:
            found = _load(name)
            if name in __all__:
                import_module("headrace.adapters.keras_fit").install()
            return found
        except ModuleNotFoundError as error:
            if error.name == "keras":
                raise MissingDependencyError(
                    f"hr.keras.{name} requires Keras 3, which is not installed: "
                    "pip install 'headrace[keras]', or keras alone"
                ) from error
            if (error.name or "").partition(".")[0] in ("PIL", "tensorboard"):
                raise MissingDependencyError(
                    f"hr.keras.{name} requires the package tensorboard, which is not installed: "
                    "pip install 'headrace[keras]', or tensorboard alone (TensorFlow is not needed)"
                ) from error
            back_end = (error.name or "").partition(".")[0]
            if back_end in ("jax", "tensorflow", "torch"):
                raise MissingDependencyError(
                    f"hr.keras.{name} requires Keras, but its back end {back_end} is not "
                    'installed: set the environment variable KERAS_BACKEND to "jax" or "torch" '
                    "before Keras is imported"
                ) from error
            raise


__all__ = [
    "BestModelExporter",
    "DatasetCreator",
    "DistributedEmbedding",
    "Embedding",
    "KerasDataset",
    "SidecarEvaluator",
    "TensorBoard",
    "adapter",
    "dataset",
    "distribute",
]
