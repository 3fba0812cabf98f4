"""Random words that are counted: word i of a sequence is known without those before it.

The numbers are a format: what is drawn after a restore, or on another machine, follows from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["Key", "key_of", "mixed", "words_at"]

Key: TypeAlias = tuple[np.uint64, np.uint64]
"""Names a sequence."""


def key_of(entropy: Sequence[int]) -> Key:
    """Return the key of the sequence that these non-negative integers name."""
    first, second = np.random.SeedSequence(entropy).generate_state(2, np.uint64)
    return first, second


def words_at(key: Key, indices: Any) -> NDArray[np.uint64]:
    """Return the words of a sequence at an array of indices, uniform in [0, 2**64)."""
    indices = np.asarray(indices)
    numbers = indices.reshape(-1).astype(np.uint64)
    # Twice, with the second half of the key between: SplitMix64 alone has one sequence, in which
    # each seed is only another place.
    return mixed(mixed(numbers + key[0]) ^ key[1]).reshape(indices.shape)


def mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return each number mapped one to one onto bits that look random: SplitMix64's finalizer."""
    numbers = numbers + _GAMMA
    numbers = (numbers ^ numbers >> _30) * _FIRST
    numbers = (numbers ^ numbers >> _27) * _SECOND
    return numbers ^ numbers >> _31


_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_27, _30, _31 = np.uint64(27), np.uint64(30), np.uint64(31)
