"""Metrics: sums in variables that replicas or workers update, and results computed from the sums.

In the scope of a parameter server strategy the sums are on the servers, and scheduled functions on
all workers add to them. In the scope of another strategy each replica has separate sums, and the
result includes those of all replicas. Outside of scopes the sums are arrays of this process.

Formulas are those of Keras 3; sums are float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from headrace.arguments import check_int, check_string
from headrace.distribute.current_strategy import get_strategy
from headrace.distribute.execution_context import current_context, variable_refusal
from headrace.distribute.variable import Variable
from headrace.errors import InvalidArgumentError

__all__ = ["AUC", "Accuracy", "Mean", "Metric"]


def __dir__() -> list[str]:
    return list(__all__)


Array = NDArray[np.float64]


class Metric:
    """Base class of metrics. All sums are in one variable, so that an update is one write.

    >>> mean = hr.metrics.Mean()
    >>> isinstance(mean, hr.metrics.Metric)
    True
    >>> mean.update_state([2.0, 4.0])
    >>> mean.sums().tolist(), float(mean.result())  # the sum and the count, and their quotient
    ([6.0, 2.0], 3.0)

    Args:
        shape: Shape of the sums.
        name: Name of the variable; unique in a parameter server strategy.
    """

    def __init__(self, shape: tuple[int, ...], name: str | None) -> None:
        if name is not None:
            check_string("name", name, empty=False)
        on_servers = get_strategy().variable_type is not None
        # A function that evaluates part of a dataset has separate sums, and returns them.
        token = None if on_servers else variable_refusal.set(None)
        try:
            self._sums: Any = _sums_variable(np.zeros(shape), name, on_servers=on_servers)
        finally:
            if token is not None:
                variable_refusal.reset(token)
        self._shape = shape

    @property
    def name(self) -> str:
        """Name of the variable."""
        found: str = self._sums.name
        return found

    @property
    def variables(self) -> list[Any]:
        """Variable with the sums, for checkpoints."""
        return [self._sums]

    def sums(self) -> Array:
        """Return the sums so far, of all replicas and workers."""
        return np.asarray(self._sums.read(), np.float64)

    def reset_state(self) -> None:
        """Reset the sums to zero."""
        self._sums.assign(np.zeros(self._shape))

    reset_states = reset_state

    def merge(self, others: Any) -> Self:
        """Add the sums of other metrics of this kind, and return this metric.

        >>> import headrace as hr
        >>> one, other = hr.metrics.Mean(), hr.metrics.Mean()
        >>> one.update_state([1, 2])
        >>> other.update_state([6])
        >>> hr.metrics.Mean().merge([one, other.sums()]).result()
        np.float64(3.0)

        Args:
            others: A metric, its `sums()`, or an iterable of these.

        Raises:
            TypeError: If one is of another kind.
            ValueError: If one has other sums, such as an `AUC` with other thresholds.
        """
        is_single = isinstance(others, Metric) or (
            isinstance(others, np.ndarray) and others.shape == self._shape
        )
        sums = [self._sums_of(each) for each in ([others] if is_single else others)]
        if sums:
            self._add(np.sum(sums, axis=0))
        return self

    def _sums_of(self, other: Any) -> Array:
        kind = type(self).__name__
        if isinstance(other, Metric):
            if type(other) is not type(self):
                raise TypeError(
                    f"cannot merge a {type(other).__name__} into a metric of class {kind}"
                )
            if not self._has_same_settings(other):
                raise ValueError(f"cannot merge {other!r} into {self!r}: their settings differ")
            return other.sums()
        sums = np.asarray(other)
        if sums.dtype.kind not in "biuf":
            raise TypeError(
                f"expected a metric of class {kind} or its sums(), but got {other!r:.80} of type "
                f"{type(other).__name__}"
            )
        if sums.shape != self._shape:
            raise ValueError(
                f"expected sums of shape {self._shape} to merge into {kind}, but got an array of "
                f"shape {sums.shape}"
            )
        return sums.astype(np.float64)

    def reduce_by_value(self) -> tuple[Any, ...] | None:
        """Return the pickle recipe of the metric with its sums; None if they are on servers.

        For results of a function. A metric that a function captures is refused, since its worker
        would add to a copy.
        """
        if Variable not in type(self._sums).__mro__:
            return None
        settings = {name: value for name, value in vars(self).items() if name != "_sums"}
        return _build_from_sums, (type(self), settings, self.name, self.sums())

    merge_state = merge

    def _has_same_settings(self, other: Any) -> bool:
        return bool(other._shape == self._shape)

    def _add(self, sums: Array) -> None:
        self._sums.assign_add(sums)

    def result(self) -> np.float64:
        """Return the metric of all updates; 0 without updates."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"


def _sums_variable(sums: Array, name: str | None, *, on_servers: bool) -> Any:
    return Variable(
        sums,
        name=name,
        trainable=False,
        aggregation="SUM",
        synchronization="AUTO" if on_servers else "ON_READ",
    )


def _build_from_sums(
    kind: type[Metric], settings: dict[str, Any], name: str, sums: Array
) -> Metric:
    """Return a metric of this process, independent of the current scope."""
    metric = object.__new__(kind)
    metric.__dict__.update(settings)
    context_token, refusal_token = current_context.set(None), variable_refusal.set(None)
    try:
        metric._sums = _sums_variable(sums, name, on_servers=False)
    finally:
        variable_refusal.reset(refusal_token)
        current_context.reset(context_token)
    return metric


class Mean(Metric):
    """Weighted mean of values.

    >>> import headrace as hr
    >>> mean = hr.metrics.Mean()
    >>> mean.update_state([1, 3, 5, 7], sample_weight=[1, 1, 0, 0])
    >>> mean.result()
    np.float64(2.0)

    Args:
        name: Name of the variable.
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__((2,), name)

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Add values.

        Args:
            values: Numbers of any shape; without weights, those of one sample (all axes but the
                first) are averaged first.
            sample_weight: One weight per value, per sample, or for all.

        Raises:
            InvalidArgumentError: If the weights do not match.
        """
        found = _convert_numbers("values", values)
        if sample_weight is None:
            samples = _mean_from(found, 1)
            self._add(np.array([samples.sum(), len(samples) if samples.ndim else 1], np.float64))
            return
        found, weights = _match_ranks(found, _convert_numbers("sample_weight", sample_weight))
        rank = weights.ndim
        found = _mean_from(found, rank)
        try:
            weights = np.broadcast_to(weights, found.shape)
        except ValueError:
            raise InvalidArgumentError(
                f"`sample_weight` of shape {weights.shape} cannot be broadcast to values of "
                f"shape {found.shape}"
            ) from None
        weighted = _mean_from(found * weights, 1)
        if rank > 1:
            weights = _mean_from(weights, 1)
        self._add(np.array([weighted.sum(), weights.sum()]))

    def result(self) -> np.float64:
        """Return the mean; 0 without values."""
        total, count = self.sums()
        return np.float64(total / count if count else 0.0)


class Accuracy(Mean):
    """Fraction of predictions that equal the label.

    >>> import headrace as hr
    >>> accuracy = hr.metrics.Accuracy()
    >>> accuracy.update_state([1, 2, 3, 4], [0, 2, 3, 4])
    >>> accuracy.result()
    np.float64(0.75)

    Args:
        name: Name of the variable.
    """

    def update_state(  # type: ignore[override]
        self, y_true: Any, y_pred: Any, sample_weight: Any = None
    ) -> None:
        """Add labels and predictions.

        Args:
            y_true: Labels.
            y_pred: The same number of predictions: labels, not probabilities.
            sample_weight: One weight per prediction, per sample, or for all.

        Raises:
            InvalidArgumentError: If the numbers of labels and predictions differ.
        """
        true, predicted = _match_ranks(np.asarray(y_true), np.asarray(y_pred))
        super().update_state(true == _broadcast_weights(true, predicted), sample_weight)


class AUC(Metric):
    """Area under a curve over thresholds, computed like `keras.metrics.AUC`.

    >>> import headrace as hr
    >>> auc = hr.metrics.AUC(num_thresholds=3)
    >>> auc.update_state([0, 0, 1, 1], [0, 0.5, 0.3, 0.9])
    >>> auc.result()
    np.float64(0.75)

    Args:
        num_thresholds: Number of thresholds, evenly spaced in [0, 1].
        curve: "ROC", or "PR" (precision and recall).
        summation_method: "interpolation", "minoring" or "majoring".
        name: Name of the variable.
        from_logits: Whether predictions are logits; otherwise they are in [0, 1].
    """

    def __init__(
        self,
        num_thresholds: int = 200,
        curve: Literal["ROC", "PR"] = "ROC",
        summation_method: Literal["interpolation", "minoring", "majoring"] = "interpolation",
        name: str | None = None,
        *,
        from_logits: bool = False,
    ) -> None:
        self.num_thresholds: int = check_int("num_thresholds", num_thresholds, minimum=2)
        for argument, value, known in (
            ("curve", curve, ("ROC", "PR")),
            ("summation_method", summation_method, ("interpolation", "minoring", "majoring")),
        ):
            if value not in known:
                raise ValueError(f"`{argument}` must be one of {', '.join(known)}, not {value!r}")
        self.curve = curve
        self.summation_method = summation_method
        self.from_logits = from_logits
        # Columns are buckets of predictions; rows are the weights of true and false labels.
        super().__init__((2, self.num_thresholds), name)

    def _has_same_settings(self, other: Any) -> bool:
        return super()._has_same_settings(other) and (other.curve, other.summation_method) == (
            self.curve,
            self.summation_method,
        )

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Add labels and predictions.

        Args:
            y_true: 0 and 1, or bools.
            y_pred: The same number of values in [0, 1], or logits.
            sample_weight: One weight per prediction, per sample, or for all.

        Raises:
            InvalidArgumentError: If shapes do not match, or a prediction is outside of [0, 1].
        """
        predicted = _convert_numbers("y_pred", y_pred, np.float32)
        if self.from_logits:
            with np.errstate(over="ignore"):
                predicted = 1 / (1 + np.exp(-predicted))
        true, predicted = _match_ranks(np.asarray(y_true), predicted)
        true = _broadcast_weights(predicted, true).astype(bool)
        if predicted.size and not (predicted.min() >= 0 and predicted.max() <= 1):
            raise InvalidArgumentError(
                f"`y_pred` must be in [0, 1], but ranges from {predicted.min()} to "
                f"{predicted.max()}; for logits, create the metric with from_logits=True"
            )
        weights = np.ones(predicted.shape)
        if sample_weight is not None:
            sample_weights, _ = _match_ranks(
                _convert_numbers("sample_weight", sample_weight), predicted
            )
            sample_weights = sample_weights.reshape(
                *sample_weights.shape, *[1] * (predicted.ndim - sample_weights.ndim)
            )
            try:
                weights = np.broadcast_to(sample_weights, predicted.shape)
            except ValueError:
                raise InvalidArgumentError(
                    f"`sample_weight` of shape {sample_weights.shape} cannot be broadcast to "
                    f"predictions of shape {predicted.shape}"
                ) from None
        # In float32, as in Keras, so that values at a threshold fall on the same side.
        buckets = np.ceil(predicted * np.float32(self.num_thresholds - 1)) - 1
        bucket = np.maximum(buckets, 0).astype(np.int64).reshape(-1)
        size, is_true, weight = self.num_thresholds, true.reshape(-1), weights.reshape(-1)
        self._add(
            np.stack(
                [
                    np.bincount(bucket, weight * is_true, minlength=size),
                    np.bincount(bucket, weight * ~is_true, minlength=size),
                ]
            )
        )

    def result(self) -> np.float64:
        """Return the area; 0 without predictions."""
        # A prediction is positive for all thresholds below it.
        true, false = np.cumsum(self.sums()[:, ::-1], axis=1)[:, ::-1]
        all_true, all_false = true[0], false[0]
        if self.curve == "PR" and self.summation_method == "interpolation":
            return _precision_area(true, false, all_true)
        recall = _ratio(true, all_true)
        if self.curve == "ROC":
            x, y = _ratio(false, all_false), recall
        else:
            x, y = recall, _ratio(true, true + false)
        heights = {
            "interpolation": (y[:-1] + y[1:]) / 2,
            "minoring": np.minimum(y[:-1], y[1:]),
            "majoring": np.maximum(y[:-1], y[1:]),
        }[self.summation_method]
        return np.float64(((x[:-1] - x[1:]) * heights).sum())


def _precision_area(true: Array, false: Array, all_true: Any) -> np.float64:
    """Return the area under precision over recall, both linear in counts between thresholds."""
    positive = true + false
    steps = true[:-1] - true[1:]
    slope = _ratio(steps, np.maximum(positive[:-1] - positive[1:], 0))
    intercept = true[1:] - slope * positive[1:]
    both = (positive[:-1] > 0) & (positive[1:] > 0)
    ratio = np.where(both, _ratio(positive[:-1], positive[1:]), 1.0)
    return np.float64(_ratio(slope * (steps + intercept * np.log(ratio)), all_true).sum())


def _ratio(above: Array, below: Any) -> Array:
    shape = np.broadcast_shapes(np.shape(above), np.shape(below))
    found: Array = np.zeros(shape)
    np.divide(above, below, out=found, where=np.broadcast_to(below != 0, shape))
    return found


def _convert_numbers(name: str, values: Any, dtype: Any = np.float64) -> NDArray[Any]:
    array = np.asarray(values)
    if array.size and array.dtype.kind in "OUSV" and array.dtype.isbuiltin != 2:
        raise TypeError(f"`{name}` must be numbers, but has dtype {array.dtype}")
    return array.astype(dtype)


def _mean_from(values: NDArray[Any], axis: int) -> NDArray[Any]:
    """Return the mean over all axes from the given one on."""
    if values.ndim <= axis:
        return values
    return np.asarray(values.mean(axis=tuple(range(axis, values.ndim))))


def _match_ranks(one: NDArray[Any], other: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return both arrays with equal rank, by removing a last axis of length 1 from one."""
    if one.ndim == other.ndim + 1 and one.shape[-1] == 1:
        return (one, other[..., None]) if other.ndim == 1 else (one[..., 0], other)
    if other.ndim == one.ndim + 1 and other.shape[-1] == 1:
        return (one[..., None], other) if one.ndim == 1 else (one, other[..., 0])
    return one, other


def _broadcast_weights(labels: NDArray[Any], values: NDArray[Any]) -> NDArray[Any]:
    if labels.shape != values.shape:
        shapes: Sequence[Any] = (labels.shape, values.shape)
        raise InvalidArgumentError(
            f"labels and predictions must have one shape, but have {shapes[0]} and {shapes[1]}"
        )
    return values
