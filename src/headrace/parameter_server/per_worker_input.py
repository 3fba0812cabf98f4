"""Datasets that workers read, before any worker has them.

`strategy.distribute_dataset` of a strategy of parameter servers returns one: the coordinator's
process reads nothing, `ClusterCoordinator.create_per_worker_dataset` has each worker `build` it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

__all__ = ["PerWorkerInput"]


class PerWorkerInput:
    """A dataset to be built on each worker.

    Args:
        build: Makes it, where it is read.
        refusal: What to say to whoever reads it here.
    """

    def __init__(self, build: Callable[[], Any], refusal: str) -> None:
        self._build = build
        self._refusal = refusal

    def build(self) -> Any:
        """Return the dataset, on a worker."""
        return self._build()

    @property
    def element_spec(self) -> Any:
        """What its elements look like."""
        return self._build().element_spec

    def _refuse(self, *_: Any) -> NoReturn:
        raise ValueError(self._refusal)

    __iter__ = __len__ = __bool__ = _refuse

    def __repr__(self) -> str:
        return "<a dataset that workers read: pass it to create_per_worker_dataset>"
