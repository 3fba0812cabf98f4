"""Training steps of mirrored replicas on the back end JAX: one compiled function of all parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np

from headrace.adapters.keras_training.jax_steps import check_train_step
from headrace.adapters.keras_training.mirrored_trainer import ReplicaModelSteps, scaled_sums
from headrace.adapters.keras_training.steps import recording_gradients

__all__ = ["JaxReplicas"]


class _Sums(NamedTuple):
    """The sums over the parts of a batch.

    Attributes:
        gradients: The mean over rows, of the trainable variables.
        changes: By index, how non-trainable variables change: the mean over rows of statistics,
            and the sum of other counters than those of random numbers.
        metrics: Values of the variables of metrics.
        logs: The mean over rows of what `train_step` returned beside metrics.
    """

    gradients: list[Any]
    changes: dict[int, Any]
    metrics: list[Any]
    logs: dict[str, Any]


class JaxReplicas(ReplicaModelSteps):
    """Makes `train_function` and `test_function` of a model.

    Args:
        model: Compiled.
        strategy: A strategy with mirrored replicas.
    """

    def __init__(self, model: Any, strategy: Any) -> None:
        super().__init__(model, strategy)
        #: Names of the logs of a step; known once it is traced.
        self._names: list[str] = []
        is_compiled = model.jit_compile and not model.run_eagerly
        jit: Callable[..., Any] = jax.jit if is_compiled else lambda function, **_: function
        if self.has_other_workers:
            self._add_parts = jit(self._sum_parts)
            self._finish = jit(self._apply_sums, donate_argnums=0)
            self._test = jit(self._test_step)
            self._assign_metrics = jit(self._results)
            self.train_function: Any = self._run_for_each_batch(self._train_with_others)
            self.test_function: Any = self._run_for_each_batch(self._test_with_others)
        else:
            step = jit(self._train_step, donate_argnums=0)
            self.train_function = self._run_for_each_batch(step)

    def _run_for_each_batch(self, step: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """Return a function that Keras calls: a step for each batch of an execution."""

        def function(state: Any, iterator: Iterator[Any]) -> Any:
            logs, state = step(state, next(iterator))
            for _ in range(self._model.steps_per_execution - 1):
                batch = next(iterator, None)
                if batch is None:
                    break
                logs, state = step(state, batch)
            return logs, state

        return function

    # --- training ---------------------------------------------------------------------------------

    def _train_step(self, state: Any, batch: Any) -> Any:
        weights, others, slots, metrics = state
        sums = self._sum_parts((weights, others, slots), metrics, batch, _num_rows(batch))
        return self._apply_sums(state, sums)

    def _sum_parts(self, state: Any, metrics: Any, batch: Any, num_global_rows: Any) -> _Sums:
        model = self._model
        weights, others, slots = state
        seeds = self._seed_indices()
        gradients: list[Any] = []
        changes: dict[int, Any] = {}
        extra: dict[str, Any] = {}
        with recording_gradients(model.optimizer):
            for number, (begin, end) in enumerate(self.split_rows(_num_rows(batch))):
                part = jax.tree.map(lambda leaf, a=begin, b=end: leaf[a:b], batch)
                share = (end - begin) / num_global_rows
                before = list(others)
                for index in seeds:
                    before[index] = _offset_seed(before[index], self.seed_offset(number))
                with scaled_sums(model, 1 / share):
                    logs, after = model.train_step(
                        (list(weights), list(before), list(slots), list(metrics)), part
                    )
                new_weights, new_others, found, metrics = after
                check_train_step(model, weights, new_weights, found)
                _add_values(gradients, [share * each for each in found])
                for index, (new, old) in enumerate(zip(new_others, before, strict=True)):
                    if new is not old:
                        is_mean = index in seeds or jnp.issubdtype(old.dtype, jnp.floating)
                        change = share * (new - old) if is_mean else new - old
                        changes[index] = changes.get(index, 0) + change
                results = self._results(metrics)
                self._names = list(logs)
                for name, value in logs.items():
                    if name not in results:
                        extra[name] = extra.get(name, 0) + share * value
        return _Sums(gradients, changes, list(metrics), extra)

    def _apply_sums(self, state: Any, sums: _Sums) -> Any:
        weights, others, slots, _ = state
        gradients = [
            sums.gradients[index].astype(weight.dtype) for index, weight in enumerate(weights)
        ]
        weights, slots = self._model.optimizer.stateless_apply(
            list(slots), gradients, list(weights)
        )
        others, seeds = list(others), self._seed_indices()
        for index, change in sums.changes.items():
            old = others[index]
            change = jnp.rint(change) if index in seeds else change
            others[index] = old + change.astype(old.dtype)
        known = {**self._results(sums.metrics), **sums.logs}
        logs = {name: known[name] for name in self._names}
        return logs, (weights, others, slots, sums.metrics)

    def _seed_indices(self) -> set[int]:
        variables = self._model.non_trainable_variables
        return {index for index, each in enumerate(variables) if id(each) in self.seeds}

    def _results(self, metrics: Sequence[Any]) -> dict[str, Any]:
        mapping = list(zip(self._model.metrics_variables, metrics, strict=True))
        with keras.StatelessScope(state_mapping=mapping):
            return dict(self._model.get_metrics_result())

    # --- several workers --------------------------------------------------------------------------

    def _train_with_others(self, state: Any, batch: Any) -> Any:
        weights, others, slots, metrics = state
        num_local_rows, num_global_rows, batch = self._local_part(batch)
        if not num_global_rows:
            return self._assign_metrics(metrics), state
        zeros = [jnp.zeros_like(each) for each in metrics]
        sums = self._add_parts((weights, others, slots), zeros, batch, num_global_rows)
        sums = self._sum_over_workers(sums, num_local_rows)
        totals = [old + new for old, new in zip(metrics, sums.metrics, strict=True)]
        return self._finish(state, sums._replace(metrics=totals))

    def _test_with_others(self, state: Any, batch: Any) -> Any:
        weights, others, metrics = state
        num_local_rows, num_global_rows, batch = self._local_part(batch)
        if num_global_rows:
            zeros = [jnp.zeros_like(each) for each in metrics]
            sums = self._sum_over_workers(
                self._test((weights, others, zeros), batch, num_global_rows), num_local_rows
            )
            metrics = [old + new for old, new in zip(metrics, sums, strict=True)]
        return self._assign_metrics(metrics), (weights, others, metrics)

    def _test_step(self, state: Any, batch: Any, num_global_rows: Any) -> Any:
        with scaled_sums(self._model, num_global_rows / _num_rows(batch)):
            _, (_, _, metrics) = self._model.test_step(state, batch)
        return list(metrics)

    def _local_part(self, batch: Any) -> tuple[int, int, Any]:
        """Return the numbers of local rows and of all rows, and the local rows or one of zeros."""
        num_local_rows = _num_rows(batch)
        if not num_local_rows:
            batch = jax.tree.map(lambda leaf: np.zeros((1, *leaf.shape[1:]), leaf.dtype), batch)
        return num_local_rows, self.total_rows(num_local_rows), batch

    def _sum_over_workers(self, sums: Any, num_local_rows: int) -> Any:
        """Return sums over all workers. A worker without rows ran a row of zeros for nothing."""
        leaves, structure = jax.tree.flatten(sums)
        arrays = [np.asarray(each) for each in leaves]
        if not num_local_rows:
            arrays = [np.zeros_like(each) for each in arrays]
        return jax.tree.unflatten(structure, self.sum_over_workers(arrays))


def _num_rows(batch: Any) -> int:
    rows: int = jax.tree.leaves(batch)[0].shape[0]
    return rows


def _offset_seed(value: Any, offset: int) -> Any:
    """Return the value of a seed, `[seed, draws]`, for another replica."""
    return value + jnp.array([offset, 0], value.dtype)


def _add_values(totals: list[Any], values: Sequence[Any]) -> None:
    totals[:] = [a + b for a, b in zip(totals, values, strict=True)] if totals else values
