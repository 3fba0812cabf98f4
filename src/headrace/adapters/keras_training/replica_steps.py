"""Training steps of mirrored replicas, for any back end.

A global batch is cut into a part for each replica, and the model's own `train_step` runs on each
part with the same weights. A gradient of the batch is the mean of those of the parts, weighted by
their numbers of rows; the model's optimizer applies it once. Keras' own `fit` calls this in place
of one `train_step`, so that data, callbacks and logs are as Keras has them.
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

from headrace.adapters.keras_training.keras_internals import (
    all_layers,
    compiled_losses,
    produces_mask,
    seed_variables,
    step_variables,
)
from headrace.distribute.collectives import ReduceOp
from headrace.errors import FailedPreconditionError

__all__ = ["ReplicaSteps", "cut", "scaled_sums"]

_SEED_STEP = 0x9E3779B9
"""Difference between the seeds of two replicas, so that their random numbers differ."""


class ReplicaSteps:
    """Steps of a model on the replicas of a strategy.

    Args:
        model: Compiled; it may be built later.
        strategy: A strategy with mirrored replicas, in one process or several.
    """

    def __init__(self, model: Any, strategy: Any) -> None:
        self._model = model
        self._strategy = strategy
        self._local = len(strategy.worker_devices)
        self.has_other_workers: bool = strategy.num_replicas_in_sync > self._local
        #: What Keras calls; `compile` removes them from the model.
        self.train_function: Any = None
        self.test_function: Any = None

    def begin(self) -> None:
        """Drop cached facts about the model, which may have changed."""
        for name in ("undivided", "state", "seeds"):
            vars(self).pop(name, None)

    @functools.cached_property
    def undivided(self) -> str | None:
        """Why the loss on a batch is not the mean of those on its parts; None if it is."""
        return _undivided(self._model)

    @functools.cached_property
    def state(self) -> list[Any]:
        """The non-trainable variables that a step may change."""
        return step_variables(self._model)

    @functools.cached_property
    def seeds(self) -> set[int]:
        """Ids of the variables that count draws of random numbers."""
        return {id(each) for each in seed_variables(self._model)}

    def parts(self, rows: int) -> list[tuple[int, int]]:
        """Return where the replicas' parts of a batch begin and end, those that have rows."""
        return cut(rows, self._local if self.undivided is None else 1)

    def seed_offset(self, part: int) -> int:
        """Return what is added to the seeds of a model on a replica: 0 for the first one."""
        replica: int = self._strategy.first_replica + part
        return replica * _SEED_STEP % (1 << 32)

    # --- several workers --------------------------------------------------------------------------

    def rows_of_all(self, rows: int) -> int:
        """Return how many rows the parts of a batch have on all workers together.

        Raises:
            FailedPreconditionError: There are several, and the loss cannot be computed on parts.
        """
        if not self.has_other_workers:
            return rows
        if self.undivided is not None:
            raise FailedPreconditionError(
                f"the Keras model {self._model.name!r} has {self.undivided}, so its loss on a "
                "batch does not follow from those on parts of the batch, and each worker has a "
                "part: leave it out, or use a MirroredStrategy, which runs such a model on one "
                "replica"
            )
        return int(self.sums_of_all([np.array(rows, np.int32)])[0])

    def sums_of_all(self, arrays: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Return sums of what all workers have. All workers call this."""
        framework = self._strategy.framework
        columns = [[framework.array(each)] for each in arrays]
        sums = self._strategy.reduce_columns(ReduceOp.SUM, columns, what="a step of a Keras model")
        return [np.asarray(framework.numpy(each)) for each in sums]

    def begin_equal(self) -> None:
        """Give the model of each worker the values that the first worker has."""
        if not self.has_other_workers:
            return
        variables = list(self._model.variables)
        if self._model.optimizer is not None:
            known = {id(each) for each in variables}
            variables += [v for v in self._model.optimizer.variables if id(v) not in known]
        framework = self._strategy.framework
        for variable in variables:
            own = keras.ops.convert_to_numpy(variable.value)
            value = self._strategy.value_of_first(own, f"the variable {variable.path}")
            variable.assign(np.asarray(framework.numpy(framework.array(value))).astype(own.dtype))


def cut(rows: int, replicas: int) -> list[tuple[int, int]]:
    """Return where parts of a batch begin and end: sizes differ by one row at most.

    Returns:
        At most one for each replica; those that would have no rows are left out.
    """
    edges = [rows * number // replicas for number in range(replicas + 1)]
    return [(begin, end) for begin, end in itertools.pairwise(edges) if begin < end]


def _undivided(model: Any) -> str | None:
    """Return what makes a model's loss on a batch more than a mean of those on its parts."""
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

    Their mean over parts, weighted by rows, is then their sum over the parts.

    Args:
        model: Built and compiled.
        factor: The number of rows of all parts, divided by that of this one.
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
