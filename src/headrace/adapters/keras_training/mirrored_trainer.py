"""`fit` and `evaluate` of a Keras model on mirrored replicas, in one process or several.

Keras' own training loop runs: it reads data, calls callbacks and keeps the history. With several
workers the dataset is distributed. Only `train_function` and `test_function` of the model are
replaced: a global batch is split into a piece for each replica, and the model's `train_step` runs
on each piece with the same weights. The gradient of the batch is the mean of the pieces' gradients,
weighted by their numbers of rows; the model's optimizer applies it once.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from headrace.adapters.keras_dataset import KerasDataset
from headrace.adapters.keras_training.keras_internals import (
    all_layers,
    check_back_end,
    compiled_losses,
    produces_mask,
    seed_variables,
    step_variables,
)
from headrace.adapters.keras_training.training_data import (
    DatasetCreator,
    are_arrays,
    dataset_of_arrays,
    split_for_validation,
)
from headrace.data.dataset import Dataset
from headrace.distribute.collectives import ReduceOp
from headrace.errors import FailedPreconditionError

__all__ = [
    "MirroredTrainer",
    "ReplicaModelSteps",
    "scaled_sums",
    "split_range",
]

_SEED_STEP = 0x9E3779B9
"""Difference between the seeds of two replicas, so that their random numbers differ."""


class ReplicaModelSteps:
    """Steps of a model on the replicas of a strategy.

    Args:
        model: Compiled Keras model; it may be built later.
        strategy: A strategy with mirrored replicas, in one process or several.
    """

    def __init__(self, model: Any, strategy: Any) -> None:
        self._model = model
        self._strategy = strategy
        self._num_local_replicas = len(strategy.worker_devices)
        self.has_other_workers: bool = strategy.num_replicas_in_sync > self._num_local_replicas
        #: Functions that Keras calls for each batch; `compile` removes them from the model.
        self.train_function: Any = None
        self.test_function: Any = None

    def clear_caches(self) -> None:
        """Drop cached properties of the model, which may have changed."""
        for name in ("indivisible_reason", "state", "seeds"):
            vars(self).pop(name, None)

    @functools.cached_property
    def indivisible_reason(self) -> str | None:
        """Reason why the batch's loss is not the mean of the pieces' losses; None if it is."""
        return _indivisible_reason(self._model)

    @functools.cached_property
    def state(self) -> list[Any]:
        """Non-trainable variables that a step may change."""
        return step_variables(self._model)

    @functools.cached_property
    def seeds(self) -> set[int]:
        """`id` of each variable that counts draws of random numbers."""
        return {id(each) for each in seed_variables(self._model)}

    def split_rows(self, rows: int) -> list[tuple[int, int]]:
        """Return the pieces of a batch for the local replicas, as ranges of rows; none is empty."""
        return split_range(rows, self._num_local_replicas if self.indivisible_reason is None else 1)

    def seed_offset(self, local_replica: int) -> int:
        """Return the offset of a replica's random seeds; 0 for the first replica."""
        replica: int = self._strategy.first_replica + local_replica
        return replica * _SEED_STEP % (1 << 32)

    # --- several workers --------------------------------------------------------------------------

    def total_rows(self, rows: int) -> int:
        """Return the number of rows of a batch on all workers together.

        Raises:
            FailedPreconditionError: If there are several workers, and the loss cannot be computed
                from pieces.
        """
        if not self.has_other_workers:
            return rows
        if self.indivisible_reason is not None:
            raise FailedPreconditionError(
                f"the Keras model {self._model.name!r} has {self.indivisible_reason}, so its loss "
                "on a batch cannot be computed from pieces of the batch, but each worker has only "
                "one: remove it, or use a MirroredStrategy, which runs such a model on one replica"
            )
        return int(self.sum_over_workers([np.array(rows, np.int32)])[0])

    def sum_over_workers(self, arrays: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Return the sums of arrays over all workers. All workers must call it."""
        framework = self._strategy.framework
        columns = [[framework.as_array(each)] for each in arrays]
        sums = self._strategy.reduce_columns(
            ReduceOp.SUM, columns, description="a step of a Keras model"
        )
        return [np.asarray(framework.to_numpy(each)) for each in sums]

    def synchronize_variables(self) -> None:
        """Copy the first worker's values of all variables to the other workers."""
        if not self.has_other_workers:
            return
        variables = list(self._model.variables)
        if self._model.optimizer is not None:
            known = {id(each) for each in variables}
            variables += [v for v in self._model.optimizer.variables if id(v) not in known]
        framework = self._strategy.framework
        for variable in variables:
            own = keras.ops.convert_to_numpy(variable.value)
            value = self._strategy.broadcast_first(own, f"the variable {variable.path}")
            variable.assign(
                np.asarray(framework.to_numpy(framework.as_array(value))).astype(own.dtype)
            )


def split_range(rows: int, replicas: int) -> list[tuple[int, int]]:
    """Split a batch into pieces whose sizes differ by at most one row.

    Returns:
        Ranges of rows, at most one for each replica; empty ones are omitted.
    """
    edges = [rows * number // replicas for number in range(replicas + 1)]
    return [(begin, end) for begin, end in itertools.pairwise(edges) if begin < end]


def _indivisible_reason(model: Any) -> str | None:
    """Return why a model's loss on a batch is not the mean of its pieces' losses, or None."""
    for loss in compiled_losses(model):
        if getattr(loss, "reduction", None) == "mean_with_sample_weight":
            return f"the loss {loss.name!r} with the reduction 'mean_with_sample_weight'"
    for layer in all_layers(model):
        if produces_mask(layer):
            return f"the layer {layer.name!r}, which makes a mask"
    return None


@contextlib.contextmanager
def scaled_sums(model: Any, factor: Any) -> Iterator[None]:
    """Multiply losses with the reduction "sum" within the context.

    Their mean over the pieces, weighted by rows, then equals their sum over the pieces.

    Args:
        model: Built and compiled Keras model.
        factor: Number of rows of the batch, divided by that of the piece.
    """
    kinds = {}
    for loss in compiled_losses(model):
        if getattr(loss, "reduction", None) == "sum":
            kinds[loss] = kind = type(loss)
            loss.__class__ = type(f"Scaled{kind.__name__}", (_ScaledSum, kind), {"factor": factor})
    try:
        yield
    finally:
        for loss, kind in kinds.items():
            loss.__class__ = kind


class _ScaledSum:
    factor: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs) * self.factor  # type: ignore[misc]


class MirroredTrainer:
    """Prepares calls of `fit`, `evaluate` and `predict` of one model on mirrored replicas.

    Args:
        model: Keras model that was created in the scope of the strategy, or passed to
            `hr.keras.distribute`.
        strategy: A `MirroredStrategy` or `MultiWorkerMirroredStrategy` with several replicas.

    Raises:
        FailedPreconditionError: If several replicas of this process are on accelerators, or the
            back end of Keras is neither jax nor torch.
    """

    def __init__(self, model: Any, strategy: Any) -> None:
        check_back_end()
        devices = strategy.worker_devices
        if len(devices) > 1 and not all(each.startswith("cpu") for each in devices):
            raise FailedPreconditionError(
                f"the Keras model {model.name!r} in the scope of {strategy!r}: replicas of a Keras "
                "model in one process must be on logical CPUs. For several accelerators, start one "
                "worker of a MultiWorkerMirroredStrategy for each, or use "
                "keras.distribution.DataParallel"
            )
        self._model = model
        self._strategy = strategy
        self._steps: ReplicaModelSteps | None = None

    def prepare(self, method: str, given: dict[str, Any], opened: contextlib.ExitStack) -> None:
        """Install replica steps in the model, and convert the call's arguments for Keras.

        Args:
            method: Name of the method.
            given: Arguments by name; modified in place.
            opened: Receives the datasets to close after the call.

        Raises:
            FailedPreconditionError: If there are several workers and the method takes a batch
                instead of a dataset.
        """
        has_other_workers = self._strategy.num_replicas_in_sync > len(self._strategy.worker_devices)
        if has_other_workers and method in ("train_on_batch", "test_on_batch"):
            raise FailedPreconditionError(
                f"{method} of the Keras model {self._model.name!r} in the scope of "
                f"{self._strategy!r}: each worker would train on a different batch. Use fit or "
                "evaluate, which distribute a dataset"
            )
        if method == "predict":
            self._open_dataset(given, "x", opened)  # each worker predicts all rows
            return
        if self._model.compiled:
            self._install_steps()
        if given.get("kwargs", {}).get("_use_cached_eval_dataset"):
            return  # called by fit, which has prepared it
        if has_other_workers:
            self._distribute(method, given, opened)
        else:
            self._open_dataset(given, "x", opened)
            self._open_dataset(given, "validation_data", opened)

    def _install_steps(self) -> None:
        """Replace `train_function` and `test_function` of the model, which `compile` removes."""
        model = self._model
        if self._steps is None or model.train_function is not self._steps.train_function:
            self._steps = _make_steps(model, self._strategy)
        self._steps.clear_caches()
        model.train_function = self._steps.train_function
        if self._steps.test_function is not None:
            model.test_function = self._steps.test_function

    # --- data -------------------------------------------------------------------------------------

    def _open_dataset(self, given: dict[str, Any], name: str, opened: contextlib.ExitStack) -> None:
        data = given.get(name)
        if isinstance(data, Dataset):
            given[name] = opened.enter_context(KerasDataset(data))
        elif isinstance(data, DatasetCreator):
            given[name] = opened.enter_context(self._call_creator(data))

    def _call_creator(self, creator: DatasetCreator) -> KerasDataset:
        made = self._strategy.distribute_datasets_from_function(creator, creator.input_options)
        return KerasDataset(made)

    def _distribute(self, method: str, given: dict[str, Any], opened: contextlib.ExitStack) -> None:
        """Distribute the data to all workers, and start them with the same weights."""
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
            validation_rows = given.get("validation_batch_size") or size
            given["validation_data"] = self._local_data(method, opened, validation, validation_rows)
            if are_arrays(validation[0]):
                given["validation_batch_size"] = None
        parts = (given.get("x"), given.get("y"), given.get("sample_weight"))
        shuffle = method == "fit" and given.get("shuffle", True)
        given["x"] = self._local_data(method, opened, parts, size, shuffle)
        if are_arrays(parts[0]):
            given.update(y=None, sample_weight=None, batch_size=None)
        if method == "fit":
            self._add_callback(given)

    def _local_data(
        self,
        method: str,
        opened: contextlib.ExitStack,
        parts: Any,
        batch_size: int | None,
        shuffle: bool = False,
    ) -> KerasDataset:
        """Return a distributed dataset of `parts` (x, y, sample_weight) for this worker."""
        x: Any
        x, *others = parts
        steps = None
        if are_arrays(x):
            y, sample_weight = (*others, None, None)[:2]
            # Without a seed, the strategy uses that of the first worker.
            x = dataset_of_arrays(method, x, y, sample_weight, batch_size or 32, shuffle, None)
        if isinstance(x, DatasetCreator):
            return opened.enter_context(self._call_creator(x))
        class_weight = None
        if isinstance(x, KerasDataset):
            if not isinstance(x.dataset, Dataset):
                return x  # distributed already
            steps, class_weight = x.steps, x.class_weight
            x = x.dataset
        if not isinstance(x, Dataset):
            raise TypeError(
                f"{method} on several workers requires arrays, a Dataset or an hr.keras.dataset, "
                f"so that each worker can read its part, but got a {type(x).__name__}"
            )
        distributed = self._strategy.distribute_dataset(x)
        return opened.enter_context(KerasDataset(distributed, steps, class_weight))

    def _add_callback(self, given: dict[str, Any]) -> None:
        assert self._steps is not None
        steps = self._steps
        # The last callback, since others may restore weights.
        begin = keras.callbacks.LambdaCallback(
            on_train_begin=lambda logs: steps.synchronize_variables()
        )
        callbacks = given.get("callbacks")
        if isinstance(callbacks, keras.callbacks.CallbackList):
            callbacks.append(begin)
        elif isinstance(callbacks, list | tuple):
            given["callbacks"] = [*callbacks, begin]
        else:
            given["callbacks"] = [begin] if callbacks is None else [callbacks, begin]


def _make_steps(model: Any, strategy: Any) -> ReplicaModelSteps:
    if keras.backend.backend() == "jax":
        from headrace.adapters.keras_training.jax_replicas import JaxReplicas  # noqa: PLC0415

        return JaxReplicas(model, strategy)
    from headrace.adapters.keras_training.torch_replicas import TorchReplicas  # noqa: PLC0415

    return TorchReplicas(model, strategy)
