"""Steps of a Keras model on the back end JAX, and rows of `Embedding` layers in them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from headrace.adapters.keras_training.embedding_internals import row_values, set_rows_shape
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

__all__ = [
    "JaxEmbeddingRows",
    "JaxModelSteps",
    "check_train_step",
]


class JaxEmbeddingRows(EmbeddingRows):
    """One layer whose rows are looked up.

    Attributes:
        requested_ids: Ids of each call of the layer in the step that is traced.
    """

    def __init__(self, index: int, layer: Any) -> None:
        super().__init__(index, layer)
        self.requested_ids: list[Any] = []
        self._ids: Any = None
        self._found: list[Any] = []
        #: Rows that steps are compiled for.
        self._size = 0

    def begin(self, ids: Any) -> None:
        """Begin a step, with rows of these ids; None: one that only finds ids, with none."""
        self._ids, self.requested_ids, self._found = ids, [], []

    @property
    def has_all_rows(self) -> Any:
        """Whether the step had all rows that it looked up."""
        return jnp.all(jnp.stack(self._found)) if self._found else True

    def look_up(self, ids: Any) -> Any:
        """Return the rows of ids, or zeros where the step only finds ids."""
        ids = self.to_nonnegative(ids)
        self.requested_ids.append(ids)
        if self._ids is None:
            return jnp.zeros((*ids.shape, self.dim), self.variable.dtype)
        positions = jnp.searchsorted(self._ids, ids.astype(self._ids.dtype))
        self._found.append(jnp.all(jnp.take(self._ids, positions, mode="clip") == ids))
        return jnp.take(row_values(self.variable), positions, axis=0, mode="clip")

    def to_nonnegative(self, ids: Any) -> Any:
        """Return ids without negative ones, which count from the end."""
        return ids if self.count is None else jnp.where(ids < 0, ids + self.count, ids)

    def pad_rows(self, rows: SparseRows) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return ids and values of rows, padded to the compiled size."""
        count = len(rows.ids)
        if count > self._size:
            # With some room: it is compiled again when the size grows.
            self._size = 1 << (count + count // 4).bit_length()
            if self.count is not None:
                self._size = min(self.count, self._size)
        dtype = jax.dtypes.canonicalize_dtype(np.int64)
        ids = np.full(max(self._size, 1), np.iinfo(dtype).max, dtype)
        ids[:count] = rows.ids
        values = np.zeros((len(ids), self.dim), rows.values.dtype)
        values[:count] = rows.values
        return ids, values


class JaxModelSteps(ModelSteps):
    """Compiles `train_step`, `test_step` and `predict_step` of a model, depending on `jit_compile`.

    If rows of `Embedding` layers are looked up, another compiled function computes the ids: the
    same step, without the operations that ids do not depend on. The rows then replace the matrix,
    padded to a size that only grows, so that few sizes are compiled. The step returns whether it
    had the rows of all its ids.

    Args:
        model: A built and compiled model, whose optimizer records gradients.
    """

    rows: dict[int, JaxEmbeddingRows]  # type: ignore[assignment]
    rows_kind = JaxEmbeddingRows

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        #: Indices of the non-trainable variables that `train_step` changes; found by tracing it.
        self._changed_indices: list[int] = []
        self._compile()

    def _compile(self) -> None:
        model = self._model
        is_compiled = model.jit_compile and not model.run_eagerly
        jit: Callable[[Any], Any] = jax.jit if is_compiled else lambda function: function
        self._train = jit(self._make_row_function(self._train_step))
        self._test = jit(self._make_row_function(self._test_step))
        self._predict = jit(self._make_row_function(self._predict_step))
        self._id_functions = {
            "train": jit(
                self._make_id_function(
                    lambda w, s, m, batch: self._train_step(w, s, m, None, batch)
                )
            ),
            "test": jit(self._make_id_function(self._test_step)),
            "predict": jit(
                self._make_id_function(lambda w, s, m, batch: self._predict_step(w, s, batch))
            ),
        }

    # --- rows -----------------------------------------------------------------------------------

    def ids(
        self, step: str, weights: Arrays, state: Arrays, metrics: Arrays, batch: Any
    ) -> dict[int, NDArray[np.int64]]:
        """Compute which rows a step looks up; see `ModelSteps.ids`."""
        if not self.rows:
            return {}
        weights = list(weights)
        for index, rows in self.rows.items():
            set_rows_shape(rows.variable, 0)
            weights[index] = np.zeros((0, rows.dim), rows.variable.dtype)
        with self._enable_wide_ids(batch) as batch:
            found = self._call(self._id_functions[step], weights, state, metrics, batch)
        return {index: self._distinct_ids(index, found[index]) for index in self.rows}

    @contextlib.contextmanager
    def _enable_wide_ids(self, batch: Any) -> Iterator[Any]:
        """Keep integers of a batch that have 64 bits, which may be ids of tables.

        By default JAX truncates all numbers to 32 bits; it still does so with other numbers of the
        batch.
        """
        has_tables = any(rows.has_table for rows in self.rows.values())
        if jax.config.jax_enable_x64 or not has_tables:
            yield batch
            return
        batch = map_leaves(lambda each: np.asarray(each, _dtype_with_wide_ids(each)), batch)
        if not any(each.dtype in _WIDE_DTYPES for each in flatten(batch)[0]):
            yield batch
            return
        with jax.enable_x64(True):
            yield batch

    def use_whole_matrices(self, indices: Sequence[int]) -> None:
        """Take variables out of `rows`; see `ModelSteps.use_whole_matrices`."""
        super().use_whole_matrices(indices)
        self._compile()

    def _make_id_function(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def ids_of(*args: Any) -> dict[int, list[Any]]:
            for rows in self.rows.values():
                rows.begin(None)
            step(*args)
            return {index: rows.requested_ids for index, rows in self.rows.items()}

        return ids_of

    def _make_row_function(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def with_rows(ids: dict[int, Any], *args: Any) -> tuple[Any, dict[int, Any], Any]:
            for index, rows in self.rows.items():
                rows.begin(ids[index])
            outputs = step(*args)
            has_all_rows = {index: rows.has_all_rows for index, rows in self.rows.items()}
            table_ids = {
                index: rows.requested_ids for index, rows in self.rows.items() if rows.has_table
            }
            return outputs, has_all_rows, table_ids

        return with_rows

    def _run(self, step: Callable[..., Any], weights: Arrays, *args: Any) -> Any:
        weights = list(weights)
        ids = {}
        with self._enable_wide_ids(args[-1]) as batch:
            for index, rows in self.rows.items():
                ids[index], weights[index] = rows.pad_rows(weights[index])
                set_rows_shape(rows.variable, len(weights[index]))
            outputs, has_all_rows, table_ids = self._call(step, ids, weights, *args[:-1], batch)
        # Ids that depend on weights, or on rows of another layer, were not known before.
        wrong = [index for index, is_complete in has_all_rows.items() if not is_complete]
        if whole := [index for index in wrong if index not in table_ids]:
            raise WholeWeightNeeded(whole)
        if wrong:
            raise MissingRows(
                {index: self._distinct_ids(index, table_ids[index]) for index in wrong}
            )
        return outputs

    def _distinct_ids(self, index: int, looked_up: Sequence[Any]) -> NDArray[np.int64]:
        ids = [np.zeros(0, int), *(np.ravel(each) for each in looked_up)]
        return self.rows[index].distinct(np.concatenate(ids))

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:
            # Keras re-raises errors of layers with a longer message.
            read = [index for index, rows in self.rows.items() if rows.was_read]
            if not read and isinstance(error, jax.errors.UnexpectedTracerError):
                read = [index for index, rows in self.rows.items() if rows.requested_ids]
            if read:
                raise WholeWeightNeeded(read) from error
            raise

    # --- steps ----------------------------------------------------------------------------------

    def train(
        self, weights: Arrays, state: Arrays, metrics: Arrays, scale: float | None, batch: Any
    ) -> TrainOutputs:
        """Run `train_step`; see `ModelSteps.train`."""
        outputs = self._run(self._train, weights, state, metrics, scale, batch)
        gradients, changed, totals, logs = outputs
        gradients = list(gradients)
        for index in self.rows:
            ids = weights[index].ids
            gradients[index] = SparseRows(ids, np.asarray(gradients[index])[: len(ids)])
        return TrainOutputs(
            gradients, dict(zip(self._changed_indices, changed, strict=True)), totals, logs
        )

    def _train_step(
        self,
        weights: Sequence[Any],
        state: Sequence[Any],
        metrics: Sequence[Any],
        scale: Any,
        batch: Any,
    ) -> tuple[Any, ...]:
        self._model.optimizer.scale = scale
        optimizer_state = [each.value for each in self._model.optimizer.variables]
        logs, after = self._model.train_step(
            (list(weights), list(state), optimizer_state, list(metrics)), batch
        )
        new_weights, new_state, gradients, totals = after
        check_train_step(self._model, weights, new_weights, gradients)
        # Known once the function is traced, which is before it returns for the first time.
        self._changed_indices = [
            index
            for index, (new, old) in enumerate(zip(new_state, state, strict=True))
            if new is not old
        ]
        return gradients, [new_state[index] for index in self._changed_indices], totals, logs

    def test(
        self, weights: Arrays, state: Arrays, metrics: Arrays, batch: Any
    ) -> tuple[Arrays, dict[str, Any]]:
        """Run `test_step`; see `ModelSteps.test`."""
        totals, logs = self._run(self._test, weights, state, metrics, batch)
        return totals, logs

    def _test_step(
        self, weights: Sequence[Any], state: Sequence[Any], metrics: Sequence[Any], batch: Any
    ) -> tuple[Any, Any]:
        logs, (_, _, totals) = self._model.test_step(
            (list(weights), list(state), list(metrics)), batch
        )
        return totals, logs

    def predict(self, weights: Arrays, state: Arrays, batch: Any) -> Any:
        """Run `predict_step`; see `ModelSteps.predict`."""
        return self._run(self._predict, weights, state, batch)

    def _predict_step(self, weights: Sequence[Any], state: Sequence[Any], batch: Any) -> Any:
        outputs, _ = self._model.predict_step((list(weights), list(state)), batch)
        return outputs


_WIDE_DTYPES = (np.int64, np.uint64)


def _dtype_with_wide_ids(array: Any) -> Any:
    dtype = np.asarray(array).dtype
    return dtype if dtype in _WIDE_DTYPES else jax.dtypes.canonicalize_dtype(dtype)


def check_train_step(
    model: Any, weights: Sequence[Any], new_weights: Sequence[Any], gradients: Sequence[Any]
) -> None:
    """Check the results of `train_step` with an optimizer that records gradients.

    Args:
        model: The model.
        weights: The weights passed to the step.
        new_weights: The weights that it returned.
        gradients: The optimizer variables that it returned.

    Raises:
        FailedPreconditionError: If it changed weights itself, or did not call the optimizer.
    """
    if any(new is not old for new, old in zip(new_weights, weights, strict=True)):
        raise FailedPreconditionError(
            f"train_step of the model {model.name!r} changes weights without "
            "self.optimizer.stateless_apply: under this strategy only the optimizer may do so"
        )
    if len(gradients) != len(weights):
        raise FailedPreconditionError(
            f"train_step of the model {model.name!r} returned no gradients: it must end "
            "with self.optimizer.stateless_apply(optimizer_variables, gradients, "
            "trainable_variables), and return its result"
        )
