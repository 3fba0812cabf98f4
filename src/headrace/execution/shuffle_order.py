"""The arithmetic of a shuffle buffer: which slot is drawn when, and what a slot holds then.

A buffer of `size` slots is filled with the first inputs. Draw number t empties one slot at random
and refills it with input `size + t`; when the input ends, what is left comes out in random order.

The draws come from Philox, a counter-based generator, so draw t is known without the draws
before it. What a slot holds at time t is the last draw before t that chose it; looking backwards
finds all slots after about `size * ln(size)` draws. So a buffer is restored at any position in a
time that depends on its size alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Draws", "Exchange", "slot_ordinals"]

_WORDS_PER_COUNT = 4  # Philox 4x64 makes four words each time that its counter is advanced by one.


class Draws:
    """The slots that are drawn, in order.

    Args:
        entropy: Non-negative integers that name this sequence.
        size: Number of slots.
    """

    def __init__(self, entropy: Sequence[int], size: int) -> None:
        self._key = np.random.SeedSequence(entropy).generate_state(2, np.uint64)
        self._size = np.uint64(size)
        self.size = size
        self._stream = np.random.Philox(key=self._key)

    def take(self, count: int) -> NDArray[np.int64]:
        """Return the next `count` draws, int64 in [0, size)."""
        return self._bounded(self._stream.random_raw(count))

    def seek(self, number: int) -> None:
        """Make `number` the next draw."""
        self._stream = np.random.Philox(key=self._key)
        self._stream.advance(number // _WORDS_PER_COUNT)
        self._stream.random_raw(number % _WORDS_PER_COUNT)

    def between(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return draws `start` to `stop` - 1 without moving on."""
        stream = np.random.Philox(key=self._key)
        stream.advance(start // _WORDS_PER_COUNT)
        lead = start % _WORDS_PER_COUNT
        return self._bounded(stream.random_raw(lead + stop - start)[lead:])

    def last_order(self, count: int) -> NDArray[np.int64]:
        """Return the order in which `count` slots are emptied once the input has ended."""
        # A key of its own: the words of the draws are not used twice.
        rng = np.random.Generator(np.random.Philox(key=self._key ^ np.uint64(1)))
        return rng.permutation(count)

    def _bounded(self, words: NDArray[np.uint64]) -> NDArray[np.int64]:
        # Multiply and shift instead of a remainder: the bias is below size / 2**32.
        return (((words >> np.uint64(32)) * self._size) >> np.uint64(32)).astype(np.int64)


class Exchange:
    """What a number of draws yields and leaves, apart from what the slots hold.

    Args:
        slots: The slots drawn, in order.
    """

    __slots__ = ("_draws", "_filled", "_later", "_source", "slots")

    def __init__(self, slots: NDArray[np.int64]) -> None:
        self.slots = slots
        count = len(slots)
        # Draw t yields what the latest earlier draw of the same slot put there. Sorting by
        # (slot, t) brings these pairs side by side.
        bits = (count - 1).bit_length()
        order = np.sort(slots << bits | np.arange(count))
        slot_of, draw = order >> bits, order & (1 << bits) - 1
        again = slot_of[1:] == slot_of[:-1]
        #: Draws that yield what an earlier one of these put in, and which draw that was.
        self._later, self._source = draw[1:][again], draw[:-1][again]
        last = np.append(~again, True)
        #: The slots that were drawn, each once, and the draw that filled it last.
        self._filled, self._draws = slot_of[last], draw[last]

    def apply(self, held: NDArray[Any], incoming: NDArray[Any]) -> NDArray[Any]:
        """Return what comes out, and leave in `held` what stays.

        Args:
            held: What each slot holds, one row a slot; changed in place.
            incoming: What each draw puts into the slot that it emptied.
        """
        out = held[self.slots]
        out[self._later] = incoming[self._source]
        held[self._filled] = incoming[self._draws]
        return out


def slot_ordinals(draws: Draws, drawn: int, filled: int) -> NDArray[np.int64]:
    """Return the ordinal of the input that each slot holds after `drawn` draws.

    Args:
        draws: The sequence of draws.
        drawn: How many were made.
        filled: Slots in use: fewer than `draws.size` when the input is shorter than the buffer.
    """
    ordinals = np.full(filled, -1, np.int64)
    window = max(4 * draws.size, 4096)
    stop, missing = drawn, filled
    while stop > 0 and missing:
        start = max(0, stop - window)
        latest = np.full(filled, -1, np.int64)
        latest[draws.between(start, stop)] = np.arange(start, stop)  # the last of equals stays
        found = (ordinals < 0) & (latest >= 0)
        ordinals[found] = latest[found] + draws.size
        missing -= int(found.sum())
        stop = start
    untouched = ordinals < 0
    ordinals[untouched] = np.flatnonzero(untouched)
    return ordinals
