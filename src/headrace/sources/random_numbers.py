"""A source of random numbers, without end, that can be read at any index."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from headrace.arguments import check_int
from headrace.element.spec import Spec
from headrace.errors import FailedPreconditionError
from headrace.plan.drawn_source import DrawnSource
from headrace.plan.random_words import Key, key_of, words_at
from headrace.plan.source import INDEX_SPEC, INFINITE

__all__ = ["RandomSource"]

_MASK = (1 << 64) - 1
_UPPER_HALF = np.uint64(32)


@dataclass(frozen=True)
class RandomSource(DrawnSource):
    """Random int64 numbers in [0, 2**32): each is a function of the seed and its index.

    Args:
        seed: Names the sequence; None: each iteration over a dataset draws one.
        number: Set by the normal form.
    """

    speed_only: ClassVar[tuple[str, ...]] = ("number",)

    seed: int | None = None
    number: int | None = None
    _key: Key | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.seed is not None:
            seed = check_int("seed", self.seed, minimum=-(1 << 63))
            object.__setattr__(self, "seed", seed)
            object.__setattr__(self, "_key", key_of([5, seed & _MASK]))

    @property
    def size(self) -> int:
        return INFINITE

    @property
    def element_spec(self) -> Spec | None:
        return INDEX_SPEC

    @property
    def is_decided(self) -> bool:
        return self._key is not None

    def numbered(self, number: int) -> RandomSource:
        return dataclasses.replace(self, number=number)

    def drawn_from(self, entropy: Sequence[int]) -> RandomSource:
        return dataclasses.replace(self, _key=key_of(entropy))

    def gather(self, indices: NDArray[np.int64]) -> Any:
        if self._key is None:
            raise FailedPreconditionError(
                "these random numbers have no seed yet: each iteration over a dataset draws one; "
                "give a seed, or read them through a dataset"
            )
        return (words_at(self._key, indices) >> _UPPER_HALF).astype(np.int64)
