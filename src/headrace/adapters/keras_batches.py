"""Checks of Keras batches, and conversion of class weights to sample weights.

A batch of a distributed dataset contains the rows of all replicas of a process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from headrace.distribute.iterator import DistributedIterator
from headrace.distribute.values import local_results, map_structure
from headrace.element.spec import BYTES, STR, Spec, spec_of
from headrace.element.structure import NodeKind, describe_component, flatten
from headrace.errors import InvalidArgumentError

__all__ = [
    "GlobalBatchIterator",
    "check_batches",
    "make_sample_weighter",
]


def check_batches(spec: Spec) -> None:
    """Raise an error unless elements are batches that Keras accepts.

    Raises:
        InvalidArgumentError: If they are not; the message names the component.
    """
    leaves, structure = flatten(spec)
    root = structure.root
    if root.kind in (NodeKind.TUPLE, NodeKind.NAMEDTUPLE) and len(root.children) not in (1, 2, 3):
        raise InvalidArgumentError(
            f"an element has {len(root.children)} parts, but Keras accepts x, (x, y) or (x, y, "
            "sample_weight): convert it with map(); put several inputs into a dict or tuple, as in "
            "((a, b), y)"
        )
    if root.kind == NodeKind.DATACLASS:
        raise InvalidArgumentError(
            f"an element is a {root.cls.__name__ if root.cls else 'dataclass'}, but Keras accepts "
            "x, (x, y) or (x, y, sample_weight): convert it with map()"
        )
    for leaf, path in zip(leaves, structure.paths, strict=True):
        if leaf.dtype in (BYTES, STR):
            raise InvalidArgumentError(
                f"{describe_component(path)} holds bytes or str, which Keras cannot convert to "
                "tensors: convert it to numbers with map(), or remove it"
            )
        if not leaf.shape:
            raise InvalidArgumentError(
                f"{describe_component(path)} is a scalar ({leaf}), but Keras requires batches: "
                "call the `batch` method on the dataset"
            )


def make_sample_weighter(class_weight: Mapping[Any, Any]) -> Callable[[Any], Any]:
    """Return a function that adds to each row the weight of its class as sample weight.

    Raises:
        TypeError: If a class is not an integer, or a weight not a number.
    """
    for number, weight in class_weight.items():
        if not isinstance(number, Integral) or not isinstance(weight, Real):
            raise TypeError(
                "`class_weight` must map class numbers to weights, as in {0: 1.0, 1: 5.0}, but "
                f"has {number!r}: {weight!r}"
            )
    classes = {int(number): float(weight) for number, weight in class_weight.items()}

    def weigh(batch: Any) -> Any:
        if not isinstance(batch, tuple) or len(batch) != 2 or not isinstance(batch[1], np.ndarray):
            raise InvalidArgumentError(
                "`class_weight` requires elements (x, y) with a single array of labels, but got "
                f"{spec_of(batch)!r:.200}: add sample weights with map()"
            )
        x, y = batch
        return x, y, _sample_weights(y, classes)

    return weigh


def _sample_weights(labels: NDArray[Any], classes: Mapping[int, float]) -> NDArray[Any]:
    if labels.ndim > 1:
        labels = labels.argmax(axis=-1) if labels.shape[-1] != 1 else labels[..., 0]
    found, inverse = np.unique(np.round(labels).astype(np.int64), return_inverse=True)
    weights = np.array([classes.get(int(number), 1.0) for number in found], keras.config.floatx())
    return weights[inverse.reshape(labels.shape)]


class GlobalBatchIterator:
    """An iterator over one epoch of a distributed dataset; its states are those of `steps`.

    Args:
        steps: Iterator over the replicas' values.
    """

    def __init__(self, steps: DistributedIterator) -> None:
        self._steps = steps
        self.get_state = steps.get_state
        self.set_state = steps.set_state
        self.close = steps.close

    def __next__(self) -> Any:
        return map_structure(_concatenate_replicas, *local_results(next(self._steps)))


def _concatenate_replicas(*replicas: Any) -> NDArray[Any]:
    arrays = [_to_host(each) for each in replicas]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _to_host(leaf: Any) -> NDArray[Any]:
    # A PyTorch tensor may be on a device; NumPy cannot copy it from there.
    return np.asarray(leaf.detach().cpu() if hasattr(leaf, "detach") else leaf)
