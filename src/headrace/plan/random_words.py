"""Counter-based random words: word i of a sequence is computed without those before it.

The numbers are a format: draws after a restore, or on another machine, follow from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["RandomKey", "derive_key", "mix_bits", "random_words"]

RandomKey: TypeAlias = tuple[np.uint64, np.uint64]
"""Key of a sequence."""


def derive_key(entropy: Sequence[int]) -> RandomKey:
    """Return the key of the sequence that these non-negative integers identify."""
    first, second = np.random.SeedSequence(entropy).generate_state(2, np.uint64)
    return first, second


def random_words(key: RandomKey, indices: Any) -> NDArray[np.uint64]:
    """Return the words of a sequence at an array of indices, uniform in [0, 2**64)."""
    indices = np.asarray(indices)
    numbers = indices.reshape(-1).astype(np.uint64)
    # Mixed twice, with the second half of the key in between: SplitMix64 alone has one sequence,
    # in which seeds are only offsets.
    return mix_bits(mix_bits(numbers + key[0]) ^ key[1]).reshape(indices.shape)


def mix_bits(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Map each number one-to-one to bits that look random, with SplitMix64's finalizer."""
    numbers = numbers + _GAMMA
    numbers = (numbers ^ numbers >> _30) * _MULTIPLIER_1
    numbers = (numbers ^ numbers >> _27) * _MULTIPLIER_2
    return numbers ^ numbers >> _31


_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
_27, _30, _31 = np.uint64(27), np.uint64(30), np.uint64(31)
