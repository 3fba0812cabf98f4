"""Scheduling of a model's steps on workers: in-order delivery of results, and sums of metrics.

Several steps run at a time, and they end in any order. Their results are delivered in the order in
which they were scheduled, so callbacks see batch 0, 1, 2 ..., and sums of metrics do not depend on
the speed of workers.

A worker starts each call with metrics at zero and returns their sums over its batches; the
coordinator adds these sums. That is exact if each variable of a metric is a sum, as in
`keras.metrics`. Other metrics, such as a maximum, are rejected.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from headrace.adapters.keras_training.keras_internals import value_of
from headrace.coordinator.coordinator import ClusterCoordinator
from headrace.coordinator.remote_value import RemoteValue
from headrace.errors import FailedPreconditionError

__all__ = [
    "MetricResults",
    "MetricTotals",
    "check_additive",
    "run_steps",
]

_MAX_UNDELIVERED = 1000
"""Maximum number of results that wait for an earlier one, whose worker is slow or was lost."""


def run_steps(
    coordinator: ClusterCoordinator,
    steps: Iterator[RemoteValue],
    deliver: Callable[[Any], bool],
) -> None:
    """Run steps until `steps` is exhausted, or `deliver` returns False.

    Args:
        coordinator: Coordinator that runs the steps.
        steps: Iterator that schedules the next step and yields its `RemoteValue`.
        deliver: Called with the result of each step, in order; returns whether to continue. If it
            returns False, the remaining steps are waited for, but not delivered; if it raises, they
            are cancelled.

    Raises:
        Exception: The first error of a step, of `steps` or of `deliver`.
    """
    pending: deque[RemoteValue] = deque()
    #: Steps without a result.
    running: list[RemoteValue] = []
    has_ended = False
    may_continue = True
    try:
        while may_continue and not (has_ended and not pending):
            running = [each for each in running if not each.is_ready]
            num_free = coordinator.capacity - len(running)
            while not has_ended and num_free > 0 and len(pending) < len(running) + _MAX_UNDELIVERED:
                value = next(steps, None)
                if value is None:
                    has_ended = True
                else:
                    pending.append(value)
                    running.append(value)
                    num_free -= 1
            if pending and not pending[0].is_ready:
                # Results behind the first one may be ready, so wait for any unfinished step.
                coordinator.wait_for_any(running)
            while may_continue and pending and pending[0].is_ready:
                may_continue = deliver(pending.popleft().fetch())
        coordinator.join()
    except BaseException:
        for value in pending:
            value.cancel()
        raise


class MetricResults:
    """Computes results of a model's metrics; compiled again only if the metrics change.

    Args:
        model: Built and compiled Keras model.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._variables: list[Any] = []
        self._compiled: Callable[[Any], Any] | None = None

    def compute(self, values: Sequence[NDArray[Any]]) -> dict[str, Any]:
        """Return the results of metrics, given the values of their variables."""
        variables = list(self._model.metrics_variables)
        # Compare by identity, since `compile` creates new variables.
        if self._compiled is None or list(map(id, variables)) != list(map(id, self._variables)):
            self._variables, self._compiled = variables, self._compile(variables)
        return dict(self._compiled(values))

    def _compile(self, variables: list[Any]) -> Callable[[Any], Any]:
        def result(values: Any) -> Any:
            mapping = list(zip(variables, values, strict=True))
            with keras.StatelessScope(state_mapping=mapping):
                return self._model.get_metrics_result()

        if keras.backend.backend() != "jax":
            return result
        import jax  # noqa: PLC0415 - optional dependency

        return jax.jit(result)  # type: ignore[no-any-return]


class MetricTotals:
    """Adds up the metrics of a model.

    Args:
        model: Built and compiled Keras model.
        results: Computes the results of its metrics.

    Raises:
        FailedPreconditionError: If the partial results of a metric cannot be added.
    """

    def __init__(self, model: Any, results: MetricResults) -> None:
        model.reset_metrics()
        check_additive(model.metrics, f"the Keras model {model.name!r}")
        self._variables = list(model.metrics_variables)
        self._sums: list[NDArray[Any]] = []
        self._results = results
        self.reset()

    def reset(self) -> None:
        """Reset the sums to zero."""
        self._sums = [np.zeros(each.shape, each.dtype) for each in self._variables]

    def add(self, metrics: Sequence[NDArray[Any]]) -> None:
        """Add the sums that a worker returned."""
        self._sums = [old + new for old, new in zip(self._sums, metrics, strict=True)]

    def get_state(self) -> list[NDArray[Any]]:
        """Return the sums so far."""
        return list(self._sums)

    def set_state(self, state: Sequence[NDArray[Any]]) -> None:
        """Restore the sums."""
        self._sums = list(state)

    def logs(self, last: dict[str, Any]) -> dict[str, Any]:
        """Return the metrics of all batches, and other logs of the last `train_step`.

        Args:
            last: Logs of the last step.
        """
        results = self._results.compute(self._sums)
        if not last or set(results) == set(last):
            return results
        # As in Keras, logs of a user's `train_step` take precedence; metrics cover all batches.
        return {name: results.get(name, value) for name, value in last.items()}

    def assign_to_metrics(self) -> None:
        """Assign the sums to the model's metrics, for callbacks and `model.metrics`."""
        for variable, value in zip(self._variables, self._sums, strict=True):
            variable.assign(value)


def check_additive(metrics: Sequence[Any], owner: str) -> None:
    """Check that partial results of metrics, which have just been reset, can be added.

    Args:
        metrics: Keras metrics.
        owner: Description of their owner, for errors.

    Raises:
        FailedPreconditionError: If the partial results of a metric cannot be added.
    """
    for metric in metrics:
        for variable in metric.variables:
            is_sum = getattr(variable, "aggregation", "sum") == "sum"
            if not is_sum or np.any(value_of(variable)):
                raise FailedPreconditionError(
                    f"the metric {variable.path.rpartition('/')[0]!r} of {owner} cannot be "
                    f"computed in parts: its variable {variable.name!r} "
                    + ("does not start at zero" if is_sum else "is not a sum")
                    + ". The variables of metrics under this strategy must be sums, as in "
                    "keras.metrics"
                )
