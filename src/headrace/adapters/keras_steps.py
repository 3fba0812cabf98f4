"""Steps of a distributed dataset, as Keras reads batches: the rows of all replicas of a process."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.distribute.iterator import DistributedIterator
from headrace.distribute.values import local_results, map_structure

__all__ = ["JoinedSteps"]


class JoinedSteps:
    """An iterator over a pass; its states are those of the steps.

    Args:
        steps: What the replicas get.
    """

    def __init__(self, steps: DistributedIterator) -> None:
        self._steps = steps
        self.get_state = steps.get_state
        self.set_state = steps.set_state
        self.close = steps.close

    def __next__(self) -> Any:
        return map_structure(_joined, *local_results(next(self._steps)))


def _joined(*replicas: Any) -> NDArray[Any]:
    arrays = [_on_host(each) for each in replicas]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _on_host(leaf: Any) -> NDArray[Any]:
    # A tensor of PyTorch may be on a device, and NumPy does not fetch it from there.
    return np.asarray(leaf.detach().cpu() if hasattr(leaf, "detach") else leaf)
