"""`fit` and `evaluate` of a Keras model on mirrored replicas, in one process or several.

Keras' own methods run: they read data, call callbacks and keep the history. What they call for a
batch is replaced (`replica_steps`), and with several workers the data are distributed.
"""

from __future__ import annotations

import contextlib
from typing import Any

import keras

from headrace.adapters.keras_dataset import KerasDataset
from headrace.adapters.keras_training.dataset_creator import DatasetCreator
from headrace.adapters.keras_training.keras_internals import check_back_end
from headrace.adapters.keras_training.replica_steps import ReplicaSteps
from headrace.adapters.keras_training.training_data import (
    are_arrays,
    dataset_of_arrays,
    split_for_validation,
)
from headrace.data.dataset import Dataset
from headrace.errors import FailedPreconditionError

__all__ = ["MirroredTrainer", "mirrored_trainer_of"]


class MirroredTrainer:
    """Prepares calls of methods of one model.

    Args:
        model: Made in the scope of the strategy, or given to `hr.keras.distribute`.
        strategy: A `MirroredStrategy` or `MultiWorkerMirroredStrategy` with several replicas.

    Raises:
        FailedPreconditionError: Several replicas of this process are on accelerators, or Keras has
            another back end than jax or torch.
    """

    def __init__(self, model: Any, strategy: Any) -> None:
        check_back_end()
        devices = strategy.worker_devices
        if len(devices) > 1 and not all(each.startswith("cpu") for each in devices):
            raise FailedPreconditionError(
                f"the Keras model {model.name!r} in the scope of {strategy!r}: replicas of a Keras "
                "model in one process are on logical CPUs. With several accelerators start a "
                "worker of a MultiWorkerMirroredStrategy for each, or use "
                "keras.distribution.DataParallel"
            )
        self._model = model
        self._strategy = strategy
        self._steps: ReplicaSteps | None = None

    def prepare(self, method: str, given: dict[str, Any], opened: contextlib.ExitStack) -> None:
        """Make the model train on replicas, and convert the arguments to ones that Keras takes.

        Args:
            method: The name of the method.
            given: Its arguments, by name; changed here.
            opened: Gets what is closed after the call.

        Raises:
            FailedPreconditionError: The method needs all data in one process, and there are several
                workers.
        """
        several = self._strategy.num_replicas_in_sync > len(self._strategy.worker_devices)
        if several and method in ("train_on_batch", "test_on_batch"):
            raise FailedPreconditionError(
                f"{method} of the Keras model {self._model.name!r} in the scope of "
                f"{self._strategy!r}: each worker would have another batch. Use fit or "
                "evaluate, which distribute a dataset"
            )
        if method == "predict":
            self._open_dataset(given, "x", opened)  # each worker predicts all rows
            return
        if self._model.compiled:
            self._have_steps()
        if given.get("kwargs", {}).get("_use_cached_eval_dataset"):
            return  # called by fit, which has prepared it
        if several:
            self._distribute(method, given, opened)
        else:
            self._open_dataset(given, "x", opened)
            self._open_dataset(given, "validation_data", opened)

    def _have_steps(self) -> None:
        """Replace `train_function` and `test_function` of the model, which `compile` removes."""
        model = self._model
        if self._steps is None or model.train_function is not self._steps.train_function:
            self._steps = _replicas(model, self._strategy)
        self._steps.begin()
        model.train_function = self._steps.train_function
        if self._steps.test_function is not None:
            model.test_function = self._steps.test_function

    # --- data -------------------------------------------------------------------------------------

    def _open_dataset(self, given: dict[str, Any], name: str, opened: contextlib.ExitStack) -> None:
        data = given.get(name)
        if isinstance(data, Dataset):
            given[name] = opened.enter_context(KerasDataset(data))
        elif isinstance(data, DatasetCreator):
            given[name] = opened.enter_context(self._created(data))

    def _created(self, creator: DatasetCreator) -> KerasDataset:
        made = self._strategy.distribute_datasets_from_function(creator, creator.input_options)
        return KerasDataset(made)

    def _distribute(self, method: str, given: dict[str, Any], opened: contextlib.ExitStack) -> None:
        """Have each worker read its part of each batch, and begin with the same weights."""
        fraction = given.pop("validation_split", 0.0)
        if fraction and given.get("validation_data") is None:
            training, given["validation_data"] = split_for_validation(
                given.get("x"), given.get("y"), given.get("sample_weight"), fraction
            )
            given.update(zip(("x", "y", "sample_weight"), training, strict=True))
        size = given.get("batch_size")
        validation = given.get("validation_data")
        if validation is not None:
            if not isinstance(validation, tuple | list):
                validation = (validation,)
            rows_of_validation = given.get("validation_batch_size") or size
            given["validation_data"] = self._share(method, opened, validation, rows_of_validation)
            if are_arrays(validation[0]):
                given["validation_batch_size"] = None
        parts = (given.get("x"), given.get("y"), given.get("sample_weight"))
        shuffle = method == "fit" and given.get("shuffle", True)
        given["x"] = self._share(method, opened, parts, size, shuffle)
        if are_arrays(parts[0]):
            given.update(y=None, sample_weight=None, batch_size=None)
        if method == "fit":
            self._add_callback(given)

    def _share(
        self,
        method: str,
        opened: contextlib.ExitStack,
        parts: Any,
        batch_size: int | None,
        shuffle: bool = False,
    ) -> KerasDataset:
        """Return this worker's part of data."""
        x: Any
        x, *others = parts
        steps = None
        if are_arrays(x):
            y, sample_weight = (*others, None, None)[:2]
            # Without a seed: the strategy takes that of the first worker.
            x = dataset_of_arrays(method, x, y, sample_weight, batch_size or 32, shuffle, None)
        if isinstance(x, DatasetCreator):
            return opened.enter_context(self._created(x))
        class_weight = None
        if isinstance(x, KerasDataset):
            if not isinstance(x.dataset, Dataset):
                return x  # distributed already
            steps, class_weight = x.steps, x.class_weight
            x = x.dataset
        if not isinstance(x, Dataset):
            raise TypeError(
                f"{method} on several workers takes arrays, a Dataset or an hr.keras.dataset, of "
                f"which each worker reads its part, but got a {type(x).__name__}"
            )
        distributed = self._strategy.distribute_dataset(x)
        return opened.enter_context(KerasDataset(distributed, steps, class_weight))

    def _add_callback(self, given: dict[str, Any]) -> None:
        assert self._steps is not None
        steps = self._steps
        # Last: others may restore weights.
        begin = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: steps.begin_equal())
        callbacks = given.get("callbacks")
        if isinstance(callbacks, keras.callbacks.CallbackList):
            callbacks.append(begin)
        elif isinstance(callbacks, list | tuple):
            given["callbacks"] = [*callbacks, begin]
        else:
            given["callbacks"] = [begin] if callbacks is None else [callbacks, begin]


def _replicas(model: Any, strategy: Any) -> ReplicaSteps:
    if keras.backend.backend() == "jax":
        from headrace.adapters.keras_training.jax_replicas import JaxReplicas  # noqa: PLC0415

        return JaxReplicas(model, strategy)
    from headrace.adapters.keras_training.torch_replicas import TorchReplicas  # noqa: PLC0415

    return TorchReplicas(model, strategy)


def mirrored_trainer_of(model: Any, strategy: Any) -> MirroredTrainer:
    """Return the trainer of a model under a strategy, the same object each time."""
    found = vars(model).get(_TRAINER)
    if found is None:
        found = MirroredTrainer(model, strategy)
        object.__setattr__(model, _TRAINER, found)
    trainer: MirroredTrainer = found
    return trainer


_TRAINER = "_headrace_trainer"
