"""Steps of a Keras model on the back end PyTorch, and rows of `Embedding` layers in them.

The parameter that is such a layer's matrix holds the rows of a step, so that their gradient goes
where `train_step` looks for one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import torch
from numpy.typing import NDArray

from headrace.adapters.keras_training.embedding_internals import (
    note_reads,
    row_values,
    stop_noting_reads,
)
from headrace.adapters.keras_training.steps import (
    Arrays,
    EmbeddingRows,
    MissingRows,
    ModelSteps,
    SparseRows,
    TrainOutputs,
    WholeWeightNeeded,
)
from headrace.element.structure import flatten
from headrace.element.transpose import map_leaves
from headrace.errors import FailedPreconditionError

__all__ = ["TorchEmbeddingRows", "TorchModelSteps", "check_weights_unchanged"]

_NO_IDS = np.zeros(0, np.int64)


class TorchEmbeddingRows(EmbeddingRows):
    """One layer whose rows are looked up.

    Attributes:
        missing: Ids that the step looked up and was not given rows for.
    """

    def __init__(self, index: int, layer: Any) -> None:
        super().__init__(index, layer)
        parameter = row_values(self.variable)
        parameter.data = parameter.data.new_zeros((0, self.dim))
        note_reads(parameter, self)
        self.missing = _NO_IDS
        self._parameter = parameter
        self._ids = _NO_IDS
        self._calls: list[NDArray[Any]] = []

    def restore(self) -> None:
        """Restore the layer's own `call` and its matrix, with zeros."""
        super().restore()
        parameter = self._parameter
        stop_noting_reads(parameter)
        parameter.grad = None
        parameter.data = parameter.data.new_zeros((self.count or 0, self.dim))

    def set_rows(self, rows: SparseRows) -> None:
        """Set the rows of the next step."""
        parameter, self._ids = self._parameter, rows.ids
        parameter.grad = None
        # The graph of an earlier step may still exist, and its gradient node for the parameter
        # expects the previous number of rows. Changing the dtype in between drops the node.
        parameter.data = parameter.data.new_zeros(0, dtype=torch.complex64)
        parameter.data = torch.from_numpy(rows.values).to(parameter.device)

    def begin(self) -> None:
        """Begin a step."""
        self.missing, self._calls = _NO_IDS, []

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of ids; zeros if any of them is missing."""
        called = ids.detach().cpu().numpy()
        self._calls.append(called)
        missing_ids = np.setdiff1d(self.distinct(called), self._ids, assume_unique=True)
        if len(missing_ids):
            self.missing = np.union1d(self.missing, missing_ids)
            return self._parameter.data.new_zeros((*ids.shape, self.dim))
        wanted = called
        if self.count is not None:
            wanted = np.where(called < 0, called + self.count, called)
        positions = torch.from_numpy(np.searchsorted(self._ids, wanted)).to(ids.device)
        rows: torch.Tensor = torch.nn.Parameter.__torch_function__(
            torch.nn.functional.embedding, (), (positions, self._parameter), {}
        )
        return rows

    def select_used(self, gradients: NDArray[Any]) -> SparseRows:
        """Return the gradients of the rows that the step looked up, without unused rows."""
        used = self.distinct(np.concatenate([_NO_IDS, *(each.ravel() for each in self._calls)]))
        if len(used) < len(self._ids):
            gradients = gradients[np.searchsorted(self._ids, used)]
        return SparseRows(used, gradients)

    def input_leaf_indices(self, leaves: Sequence[NDArray[Any]]) -> set[int]:
        """Return the numbers of the leaves of a batch that the layer was called with."""
        return {
            number
            for number, leaf in enumerate(leaves)
            for called in self._calls
            if leaf.shape == called.shape
            and leaf.dtype.kind in "iuf"
            and np.array_equal(leaf, called)
        }

    def likely_ids(self, ids: NDArray[Any]) -> NDArray[np.int64]:
        """Return the likely ids that are in range, sorted and without duplicates."""
        if self.count is not None:
            ids = ids[(ids >= -self.count) & (ids < self.count)]
        return self.distinct(ids)


_generator_lock = threading.Lock()
"""Workers in one process, as tests have them, share PyTorch's generator."""


class TorchModelSteps(ModelSteps):
    """Runs `train_step`, `test_step` and `predict_step` of a model, whose variables it sets.

    Where rows of `Embedding` layers are looked up, ids are expected to be those parts of the batch
    that they were in the last step. A step that looks up others stops before its backward pass, and
    is run again.

    Args:
        model: Built and compiled; its optimizer records gradients.
    """

    rows: dict[int, TorchEmbeddingRows]  # type: ignore[assignment]
    rows_kind = TorchEmbeddingRows

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._seed = 0
        #: By step and layer, which leaves of the batch were ids.
        self._sources: dict[tuple[str, int], set[int]] = {}
        if model.optimizer is not None:
            model.optimizer.before_backward = self._check_rows

    # --- rows -----------------------------------------------------------------------------------

    def ids(
        self, step: str, weights: Arrays, state: Arrays, metrics: Arrays, batch: Any
    ) -> dict[int, NDArray[np.int64]]:
        """Guess which rows a step looks up; see `ModelSteps.ids`."""
        leaves = flatten(batch)[0]
        found = {}
        for index, rows in self.rows.items():
            if chosen := self._sources.get((step, index)):
                parts = [np.asarray(leaves[each]).ravel() for each in chosen if each < len(leaves)]
                found[index] = rows.likely_ids(np.concatenate([np.zeros(0, int), *parts]))
        return found

    def _call(self, step: str, function: Callable[[Any], Any], batch: Any) -> Any:
        for rows in self.rows.values():
            rows.begin()
        try:
            outputs = function(_tensors(batch))
        except Exception:
            # Keras re-raises errors of layers with a longer message.
            self._check_rows()
            raise
        self._check_rows()
        if self.rows:
            leaves = [np.asarray(each) for each in flatten(batch)[0]]
            for index, rows in self.rows.items():
                self._sources[step, index] = rows.input_leaf_indices(leaves)
        return outputs

    def _check_rows(self) -> None:
        if read := [index for index, rows in self.rows.items() if rows.was_read]:
            raise WholeWeightNeeded(read)
        missing = {index: rows.missing for index, rows in self.rows.items() if len(rows.missing)}
        if missing:
            raise MissingRows(missing)

    # --- steps ----------------------------------------------------------------------------------

    def seed(self, seed: int, step: int) -> None:
        """Seed the generator of PyTorch for the next step; see `ModelSteps.seed`."""
        self._seed = (seed * 1_000_003 + step) % (1 << 63)

    def train(
        self, weights: Arrays, state: Arrays, metrics: Arrays, scale: float | None, batch: Any
    ) -> TrainOutputs:
        """Run `train_step`; see `ModelSteps.train`."""
        with _generator_lock:
            # Dropout of Keras draws from the generator of the process.
            torch.manual_seed(self._seed)
            return self._train(weights, state, metrics, scale, batch)

    def _train(
        self, weights: Arrays, state: Arrays, metrics: Arrays, scale: float | None, batch: Any
    ) -> TrainOutputs:
        model = self._model
        self._set(weights, state, metrics)
        model.optimizer.scale = scale
        model.optimizer.recorded.clear()
        model.train()
        local_weights = [
            each for index, each in enumerate(model.trainable_variables) if index not in self.rows
        ]
        with check_weights_unchanged(model, local_weights):
            logs = self._call("train", model.train_step, batch)
        recorded = {
            id(variable): gradient
            for gradient, variable in model.optimizer.recorded
            if gradient is not None
        }
        gradients: list[Any] = [
            None if (found := recorded.get(id(each))) is None else _array(found)
            for each in model.trainable_variables
        ]
        for index, rows in self.rows.items():
            if gradients[index] is not None:
                gradients[index] = rows.select_used(gradients[index])
        model.optimizer.recorded.clear()
        after = [_array(each.value) for each in model.non_trainable_variables]
        changed = {
            index: new
            for index, (new, old) in enumerate(zip(after, state, strict=True))
            if not np.array_equal(new, old)
        }
        return TrainOutputs(gradients, changed, self._metrics(), map_leaves(_to_plain, logs))

    def test(
        self, weights: Arrays, state: Arrays, metrics: Arrays, batch: Any
    ) -> tuple[Arrays, dict[str, Any]]:
        """Run `test_step`; see `ModelSteps.test`."""
        self._set(weights, state, metrics)
        self._model.eval()
        with torch.no_grad():
            logs = self._call("test", self._model.test_step, batch)
        return self._metrics(), map_leaves(_to_plain, logs)

    def predict(self, weights: Arrays, state: Arrays, batch: Any) -> Any:
        """Run `predict_step`; see `ModelSteps.predict`."""
        self._set(weights, state, None)
        self._model.eval()
        with torch.no_grad():
            outputs = self._call("predict", self._model.predict_step, batch)
            return keras.tree.map_structure(_to_plain, outputs)

    def _set(self, weights: Arrays, state: Arrays, metrics: Arrays | None) -> None:
        model = self._model
        with torch.no_grad():
            for variable, value in zip(model.trainable_variables, weights, strict=True):
                if not isinstance(value, SparseRows):
                    variable.value.copy_(_tensor(value))
            for variable, value in zip(model.non_trainable_variables, state, strict=True):
                variable.value.copy_(_tensor(value))
            for variable, value in zip(model.metrics_variables, metrics or (), strict=False):
                variable.value.copy_(_tensor(value))
        for index, rows in self.rows.items():
            rows.set_rows(weights[index])

    def _metrics(self) -> Arrays:
        return [_array(each.value) for each in self._model.metrics_variables]


@contextlib.contextmanager
def check_weights_unchanged(model: Any, weights: Sequence[Any]) -> Iterator[None]:
    """Check that a step in this context, whose optimizer records gradients, changes no weights.

    Raises:
        FailedPreconditionError: If it does.
    """

    def versions() -> list[tuple[int, int]]:
        """Return which tensors the weights are, and how often each was changed."""
        return [(id(each.value), each.value._version) for each in weights]

    before = versions()
    yield
    if versions() != before:
        raise FailedPreconditionError(
            f"train_step of the model {model.name!r} changes weights without "
            "self.optimizer.apply: under this strategy only the optimizer may do so"
        )


def _tensor(value: Any) -> Any:
    return torch.from_numpy(np.array(value))


def _tensors(batch: Any) -> Any:
    # In memory of PyTorch's own: sums of some kernels depend on how memory is aligned, and a step
    # that runs again elsewhere must give the same bits.
    return map_leaves(lambda array: keras.ops.convert_to_tensor(array).clone(), batch)


def _array(tensor: Any) -> Any:
    return keras.ops.convert_to_numpy(tensor).copy()


def _to_plain(value: Any) -> Any:
    return _array(value) if isinstance(value, torch.Tensor) else value
