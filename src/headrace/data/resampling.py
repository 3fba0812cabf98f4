"""`rejection_resample`, built from other steps: random words, a map or scan, a filter, a map."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.arguments import check_callable
from headrace.errors import InvalidElementError
from headrace.plan.elementwise import Filter, Map, Scan
from headrace.plan.node import Node
from headrace.plan.random_map import DrawRandomWords

__all__ = ["resample"]

_INITIAL_COUNT = 10
"""Elements of each class assumed to have been seen before the first, as in tf.data. Without them,
the first elements would be rejected or accepted by chance."""
_SUM_TOLERANCE = 1e-3


def resample(
    plan: Node,
    class_func: Callable[..., Any],
    target_dist: Any,
    initial_dist: Any,
    seed: int | None,
    location: str,
) -> Node:
    """Return the plan of `(class, element)` for elements that are accepted.

    Args:
        plan: The plan.
        class_func: Returns the class of an element.
        target_dist: Probability of each class in the result.
        initial_dist: Probability of each class in the plan; None estimates it.
        seed: Seed of the decisions.
        location: The user's file and line.
    """
    check_callable("class_func", class_func)
    target = _check_distribution("target_dist", target_dist)
    # A separate step draws the random words, so that workers run it even if the client estimates.
    words = DrawRandomWords(input=plan, seed=seed, location=location)
    location = f"{location}, rejection_resample"
    decided: Node
    if initial_dist is None:
        decided = Scan(
            input=words,
            initial_state=np.full(len(target), _INITIAL_COUNT),
            fn=_EstimateAndDecide(class_func, target),
            location=location,
        )
    else:
        initial = _check_distribution("initial_dist", initial_dist)
        if len(initial) != len(target):
            raise ValueError(
                f"`initial_dist` must have a probability for each of the {len(target)} classes of "
                f"`target_dist`, but has {len(initial)}"
            )
        impossible = np.flatnonzero((initial == 0) & (target > 0))
        if len(impossible):
            raise ValueError(
                f"`initial_dist` is 0 for class {impossible[0]}, so no rejection leads to its "
                f"probability of {target[impossible[0]]} in `target_dist`"
            )
        probabilities = _acceptance_probabilities(target, initial)
        decided = Map(input=words, fn=_Decide(class_func, probabilities), location=location)
    accepted = Filter(input=decided, predicate=_is_accepted, location=location)
    return Map(input=accepted, fn=_without_decision, location=location)


def _check_distribution(name: str, values: Any) -> NDArray[np.float64]:
    """Return probabilities as an array; they sum to exactly 1."""
    try:
        probabilities = np.array(values, np.float64)
    except (TypeError, ValueError):
        raise TypeError(
            f"`{name}` must be a list of probabilities, but got {values!r:.80}"
        ) from None
    if probabilities.ndim != 1 or not len(probabilities):
        raise ValueError(f"`{name}` must be a list of probabilities, but got {values!r:.80}")
    total = probabilities.sum()
    if not (probabilities >= 0).all() or not abs(total - 1) < _SUM_TOLERANCE:
        raise ValueError(
            f"`{name}` must have probabilities of at least 0 that sum to 1, but got {values!r:.80}"
        )
    normalized: NDArray[np.float64] = probabilities / total
    return normalized


def _acceptance_probabilities(
    target: NDArray[np.float64], initial: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the probability of accepting an element of each class; the largest is 1."""
    ratios = np.divide(target, initial, out=np.zeros_like(target), where=initial > 0)
    scaled: NDArray[np.float64] = ratios / ratios.max()
    return scaled


@dataclass(frozen=True, eq=False)
class _Classifier:
    class_func: Callable[..., Any]

    def __getattr__(self, name: str) -> Any:
        # Errors and saved states name the user's function.
        if name in ("__code__", "__qualname__"):
            return getattr(self.class_func, name)
        raise AttributeError(name)

    def classify(self, element: Any, num_classes: int) -> int:
        found = self.class_func(*element) if type(element) is tuple else self.class_func(element)
        try:
            label = operator.index(
                found.item() if isinstance(found, np.ndarray | np.bool_) else found
            )
        except (TypeError, ValueError):
            label = -1
        if not 0 <= label < num_classes:
            raise InvalidElementError(
                f"`class_func` must return a class, an integer from 0 to {num_classes - 1}, but "
                f"returned {found!r:.80}"
            )
        return label


@dataclass(frozen=True, eq=False)
class _Decide(_Classifier):
    """Decides with known probabilities of acceptance."""

    probabilities: NDArray[np.float64]

    @property
    def saved_arguments(self) -> list[float]:
        """What must be equal for a state to be restored."""
        return list(map(float, self.probabilities))

    def __call__(self, element: Any, word: Any) -> tuple[Any, ...]:
        label = self.classify(element, len(self.probabilities))
        return _uniform(word) < self.probabilities[label], np.int64(label), element


@dataclass(frozen=True, eq=False)
class _EstimateAndDecide(_Classifier):
    """Counts the classes, and decides with probabilities of acceptance from the counts."""

    target: NDArray[np.float64]

    @property
    def saved_arguments(self) -> list[float]:
        """What must be equal for a state to be restored."""
        return list(map(float, self.target))

    def __call__(
        self, counts: NDArray[np.int64], pair: tuple[Any, Any]
    ) -> tuple[NDArray[np.int64], tuple[Any, ...]]:
        element, word = pair
        label = self.classify(element, len(counts))
        counts[label] += 1
        probability = _acceptance_probabilities(self.target, counts / counts.sum())[label]
        return counts, (_uniform(word) < probability, np.int64(label), element)


def _uniform(word: Any) -> float:
    """Return a random number in [0, 1) from a random word."""
    return (int(word) >> 11) * 2.0**-53


def _is_accepted(decision: Any, label: Any, element: Any) -> bool:
    return bool(decision)


def _without_decision(decision: Any, label: Any, element: Any) -> tuple[Any, Any]:
    return label, element
