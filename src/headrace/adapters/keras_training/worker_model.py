"""The copy of a Keras model on a training worker.

The coordinator sends the model once, and then schedules calls of `train`, `test` and `predict`
(`worker_calls`) with batches as arguments. A call reads variables from the parameter servers,
pushes gradients to them, and returns sums of metrics, or outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import keras
import numpy as np
from numpy.typing import NDArray

from headrace.adapters.keras_training.steps import (
    MissingRows,
    ModelSteps,
    SparseRows,
    WholeWeightNeeded,
    merge_rows,
    record_gradients,
)
from headrace.adapters.keras_training.worker_calls import StepResult, TrainCall
from headrace.parameter_server.arrays import IndexedSlices
from headrace.parameter_server.read_cache import read_with_rows
from headrace.parameter_server.table import EmbeddingTable, TablePull

__all__ = ["WorkerModel"]

Ids: TypeAlias = dict[int, NDArray[np.int64]]
"""Sorted unique ids of rows, by index of the matrix among the trainable variables."""
_NO_IDS = np.zeros(0, np.int64)
_MAX_ATTEMPTS = 8


class WorkerModel:
    """A worker's copy of a model.

    Args:
        data: Model serialized by `dump_model`.
        trainable: Trainable variables on the servers, in Keras' order.
        state: Non-trainable variables on the servers; None for seeds, which count draws of random
            numbers and are not on the servers.
        seeds: Initial values of seeds, by index in `state`.
        optimizer: Optimizer that applies gradients on the servers.
        statistics: Optimizer that applies changes of statistics: gradient descent with learning
            rate 1.
    """

    def __init__(
        self,
        data: bytes,
        trainable: Sequence[Any],
        state: Sequence[Any],
        seeds: dict[int, NDArray[Any]],
        optimizer: Any,
        statistics: Any,
    ) -> None:
        from headrace.adapters.keras_training.model_pickling import (  # noqa: PLC0415 - likewise
            load_objects,
        )

        self.model: Any = load_objects(data)
        if self.model.optimizer is not None:
            record_gradients(self.model.optimizer)
        self._trainable = list(trainable)
        self._state = list(state)
        self._seeds = seeds
        self._optimizer = optimizer
        self._statistics = statistics
        self._steps = _steps_of(self.model)
        if optimizer is not None and optimizer.rule.ema_momentum is not None:
            # Averages of weights change in each step, also those of rows that it does not look up.
            self._steps.use_whole_matrices(list(self._steps.rows))
        self._zeros = [np.zeros(each.shape, each.dtype) for each in self.model.metrics_variables]
        self._draws: dict[int, int] | None = None
        #: Indices of the non-trainable variables that any step so far has changed.
        self._changing: set[int] = set()
        self._version: int | None = None
        self._all: tuple[list[NDArray[Any]], list[NDArray[Any]]] = ([], [])
        #: By index of each trainable variable that is a table: whether gradients change its rows.
        self._tables = {
            index: self._steps.rows[index].layer.trainable
            for index, each in enumerate(self._trainable)
            if isinstance(each, EmbeddingTable)
        }
        #: Rows of tables that the current step has looked up, which a retry does not request again.
        self._looked_up: dict[int, SparseRows] = {}

    # --- training -------------------------------------------------------------------------------

    def train(self, call: TrainCall, batches: Sequence[Any]) -> StepResult:
        """Run a training step for each batch, and push its gradients."""
        metrics: Any = self._zeros
        logs: Any = {}
        non_finite = []
        for number, batch in enumerate(batches, call.first_step):
            outputs, state = self._train_step(call, number, batch, metrics)
            metrics, logs = outputs.metrics, outputs.logs
            gradients = [_gradient(each) for each in outputs.gradients]
            if call.scale is not None:
                non_finite.append(not all(map(_is_finite, gradients)))
            self._push(call, gradients, state, outputs.state)
        return StepResult(len(batches), _arrays(metrics), _to_plain_logs(logs), non_finite)

    def _train_step(
        self, call: TrainCall, number: int, batch: Any, metrics: Any
    ) -> tuple[Any, list[NDArray[Any]]]:
        """Run a training step; return its outputs, and the state before it."""

        def step(known: Ids) -> tuple[Any, list[NDArray[Any]]]:
            is_fresh = self._refresh(call.version)
            state = list(self._all[1])
            self._set_seeds(state, number)
            ids = self._ids("train", state, metrics, batch, known)
            weights, state = self._read(ids, is_fresh, trains=True)
            if self._draws is None:
                self._draws = self._count_draws(weights, state, batch)
                if self._draws:
                    return step(known)  # the seeds changed, and ids may depend on them
            self._set_seeds(state, number)
            self._steps.seed(call.seed, number)
            return self._steps.train(weights, state, metrics, call.scale, batch), state

        return cast("tuple[Any, list[NDArray[Any]]]", self._with_rows(step))

    def _with_rows(self, step: Callable[[Ids], Any]) -> Any:
        """Return a step's result; run it again with more rows until it has all that it looks up.

        Args:
            step: Called with the ids that earlier attempts lacked, in addition to those that it
                predicts itself.
        """
        known: Ids = {}
        self._looked_up = {}
        for _ in range(_MAX_ATTEMPTS):
            try:
                return step(known)
            except MissingRows as missing:
                known = _union_ids(known, missing.ids)
            except WholeWeightNeeded as needed:
                self._use_whole_matrices(needed.indices)
        self._use_whole_matrices(list(self._steps.rows))
        return step({})

    def _use_whole_matrices(self, indices: Sequence[int]) -> None:
        self._steps.use_whole_matrices(indices)
        self._version = None

    def _ids(self, name: str, state: Any, metrics: Any, batch: Any, known: Ids) -> Ids:
        if not self._steps.rows:
            return {}
        predicted_ids = self._steps.ids(name, self._all[0], state, metrics, batch)
        return _union_ids(
            dict.fromkeys(self._steps.rows, _NO_IDS), _union_ids(predicted_ids, known)
        )

    def _refresh(self, version: int) -> bool:
        """Read all values if the version is new; return whether it is."""
        if version == self._version:
            return False
        self._all = self._read_all()
        self._version = version
        return True

    def _read(self, ids: Ids, is_fresh: bool, trains: bool) -> tuple[list[Any], list[NDArray[Any]]]:
        """Return the values of variables; read those that steps change.

        Args:
            ids: Ids of the rows that are looked up.
            is_fresh: Whether all other values have just been read.
            trains: Whether tables create rows for ids without a row.
        """
        weights: list[Any] = list(self._all[0])
        state = list(self._all[1])
        whole = [] if is_fresh else self._whole_indices
        changing = [] if is_fresh else sorted(self._changing)
        variable_ids = {index: each for index, each in ids.items() if index not in self._tables}
        table_ids = self._unread_ids(ids)
        values, rows, table_rows = read_with_rows(
            [*(self._trainable[index] for index in whole), *(self._state[i] for i in changing)],
            [(self._trainable[index], row_ids) for index, row_ids in variable_ids.items()],
            [self._pull_request(index, row_ids, trains) for index, row_ids in table_ids.items()],
        )
        for index, value in zip(whole, values, strict=False):
            weights[index] = value
        for index, value in zip(changing, values[len(whole) :], strict=True):
            state[index] = value
        for (index, row_ids), value in zip(variable_ids.items(), rows, strict=True):
            weights[index] = SparseRows(row_ids, value)
        for (index, row_ids), value in zip(table_ids.items(), table_rows, strict=True):
            found = SparseRows(row_ids, value)
            before = self._looked_up.get(index)
            self._looked_up[index] = found if before is None else merge_rows(before, found)
            weights[index] = self._looked_up[index]
        return weights, state

    def _unread_ids(self, ids: Ids) -> Ids:
        """Return the ids of rows in tables that the current step has not looked up yet."""
        return {
            index: row_ids
            if (rows := self._looked_up.get(index)) is None
            else np.setdiff1d(row_ids, rows.ids, assume_unique=True)
            for index, row_ids in ids.items()
            if index in self._tables
        }

    def _pull_request(self, index: int, ids: NDArray[np.int64], trains: bool) -> TablePull:
        """Return the request for rows of a table.

        If the layer has a fixed number of rows, ids without a row get initial values.
        """
        counts = np.ones(len(ids), np.int64) if trains and self._tables[index] else None
        initialize = self._steps.rows[index].count is not None
        return TablePull(self._trainable[index], ids, counts, initialize=initialize)

    @property
    def _whole_indices(self) -> list[int]:
        """Indices of the trainable variables that are read whole."""
        return [each for each in range(len(self._trainable)) if each not in self._steps.rows]

    def _read_all(self) -> tuple[list[Any], list[NDArray[Any]]]:
        """Return all values; None for matrices whose rows are looked up."""
        whole = self._whole_indices
        on_servers = [index for index, each in enumerate(self._state) if each is not None]
        values, _, _ = read_with_rows(
            [*(self._trainable[i] for i in whole), *(self._state[i] for i in on_servers)], []
        )
        weights: list[Any] = [None] * len(self._trainable)
        for index, value in zip(whole, values, strict=False):
            weights[index] = value
        found = dict(zip(on_servers, values[len(whole) :], strict=True))
        state = [
            found[index] if index in found else self._seeds[index]
            for index in range(len(self._state))
        ]
        return weights, state

    def _count_draws(self, weights: Any, state: list[NDArray[Any]], batch: Any) -> dict[int, int]:
        """Count the draws of a step from each seed, by running a step and dropping its result."""
        if not self._seeds:
            return {}
        outputs = self._steps.train(weights, state, self._zeros, None, batch)
        return {
            index: int(np.asarray(outputs.state[index])[1]) - int(state[index][1])
            for index in self._seeds
            if index in outputs.state
        }

    def _set_seeds(self, state: list[NDArray[Any]], number: int) -> None:
        """Set each seed to its value before a step, which depends only on the step's number."""
        for index, draws in (self._draws or {}).items():
            seed = self._seeds[index].copy()
            seed[1] = (int(seed[1]) + number * draws) % (1 << 32)
            state[index] = seed

    def _push(
        self,
        call: TrainCall,
        gradients: list[NDArray[Any] | IndexedSlices | None],
        before: Sequence[NDArray[Any]],
        after: dict[int, Any],
    ) -> None:
        changes = []
        for index, value in after.items():
            if self._state[index] is None:
                continue
            self._changing.add(index)
            variable, new, old = self._state[index], np.asarray(value), before[index]
            if variable.dtype.kind == "f":
                changes.append((old - new, variable))
            else:
                variable.assign_add(new - old)
        if call.learning_rate is not None:
            self._optimizer.learning_rate = call.learning_rate
        for index, is_trained in self._tables.items():
            gradients[index] = gradients[index] if is_trained else None
        pairs = list(zip(gradients, self._trainable, strict=True))
        if any(each is not None for each in gradients):
            self._optimizer.apply_gradients(pairs)
        if changes:
            self._statistics.apply_gradients(changes)

    # --- evaluation -----------------------------------------------------------------------------

    def test(self, version: int, batches: Sequence[Any]) -> StepResult:
        """Run an evaluation step for each batch, all with the same values of variables."""
        metrics: Any = self._zeros
        logs: Any = {}
        for batch in batches:

            def step(known: Ids, batch: Any = batch, metrics: Any = metrics) -> Any:
                weights, state = self._values("test", version, metrics, batch, known)
                return self._steps.test(weights, state, metrics, batch)

            metrics, logs = self._with_rows(step)
        return StepResult(len(batches), _arrays(metrics), _to_plain_logs(logs), [])

    def predict(self, version: int, batches: Sequence[Any]) -> list[Any]:
        """Return the outputs of each batch."""
        outputs = []
        for batch in batches:

            def step(known: Ids, batch: Any = batch) -> Any:
                weights, state = self._values("predict", version, (), batch, known)
                return self._steps.predict(weights, state, batch)

            outputs.append(keras.tree.map_structure(np.asarray, self._with_rows(step)))
        return outputs

    def _values(
        self, name: str, version: int, metrics: Any, batch: Any, known: Ids
    ) -> tuple[list[Any], list[NDArray[Any]]]:
        """Return the values of a version, and the rows that a batch looks up."""
        self._refresh(version)
        ids = self._ids(name, self._all[1], metrics, batch, known)
        return self._read(ids, is_fresh=True, trains=False)


def _steps_of(model: Any) -> ModelSteps:
    if keras.backend.backend() == "jax":
        from headrace.adapters.keras_training.jax_steps import JaxModelSteps  # noqa: PLC0415

        return JaxModelSteps(model)
    from headrace.adapters.keras_training.torch_steps import TorchModelSteps  # noqa: PLC0415

    return TorchModelSteps(model)


def _union_ids(one: Ids, other: Ids) -> Ids:
    """Return the union of the ids of each matrix."""
    return {
        **one,
        **{key: np.union1d(one[key], ids) if key in one else ids for key, ids in other.items()},
    }


def _gradient(value: Any) -> NDArray[Any] | IndexedSlices | None:
    """Return a gradient in a form that optimizers accept."""
    if isinstance(value, SparseRows):
        return IndexedSlices(value.values, value.ids) if len(value.ids) else None
    return None if value is None else np.asarray(value)


def _is_finite(gradient: NDArray[Any] | IndexedSlices | None) -> bool:
    if gradient is None:
        return True
    values = gradient.values if isinstance(gradient, IndexedSlices) else gradient
    return bool(np.isfinite(values).all())


def _arrays(values: Sequence[Any]) -> list[NDArray[Any]]:
    return [np.asarray(each) for each in values]


def _to_plain_logs(logs: Any) -> dict[str, Any]:
    """Return logs as NumPy arrays, which any process can unpickle."""
    if not isinstance(logs, dict):
        return {}
    return {
        name: _to_plain_logs(value) if isinstance(value, dict) else np.asarray(value)
        for name, value in logs.items()
    }
