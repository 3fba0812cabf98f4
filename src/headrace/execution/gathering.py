"""Elements that are gathered until a window of them is full: what windows and buckets share.

Elements are held in memory and saved nowhere: a state says by their ordinals which are held for
which key, and a restore reads them again (`reread`). A key is found once for an element.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise

import numpy as np

from headrace.element.chunk import Chunk
from headrace.element.ownership import copied
from headrace.element.places import grouped, joined
from headrace.element.structure import Element
from headrace.execution.iterator import ElementIterator, State, position_of
from headrace.execution.places import Places
from headrace.execution.reread import Reread
from headrace.plan.user_function import UserFunction

__all__ = ["Gathering", "Window"]

_FEW = 64
"""Windows that are looked through to find how many elements one of them needs."""
_BLOCKS = 256
"""Blocks that windows lie in."""
_EVERY = 64
"""Elements from one mark to the next, and the most that are read ahead where that is free."""


class Window:
    """Elements of one key."""

    __slots__ = ("_places", "key", "ordinals", "rows", "size")

    def __init__(self, key: int, place: Places | None) -> None:
        self.key = key
        #: That of the first element; where they are origins, those of all.
        self._places = [] if place is None else [place]
        self.rows: list[Element] = []
        #: Which elements of the input they are. Only added to.
        self.ordinals: list[int] = []
        #: How many make it full; None: ask when the next one comes.
        self.size: int | None = None

    @property
    def place(self) -> Places | None:
        """That of the first element, with the origins of all where those are asked for."""
        places = self._places
        return grouped(joined(places), len(self.rows)) if places else None

    def add_origin(self, place: Places) -> None:
        """Take note of the origin of another element."""
        self._places.append(place)


class _Windows:
    """Windows by key. What `held` returned stays what it was, but for what is added later.

    They lie in blocks, so that not all must be copied when one is taken out.
    """

    def __init__(self) -> None:
        self._blocks: list[dict[int, Window]] = [{} for _ in range(_BLOCKS)]
        self.size = 0

    def get(self, key: int) -> Window | None:
        """Return the window of a key, if there is one."""
        return self._blocks[key % _BLOCKS].get(key)

    def add(self, window: Window) -> None:
        """Put in a window whose key has none."""
        self._blocks[window.key % _BLOCKS][window.key] = window
        self.size += 1

    def take_out(self, window: Window) -> None:
        """Take out a window."""
        blocks, number = self._blocks.copy(), window.key % _BLOCKS
        blocks[number] = {key: one for key, one in blocks[number].items() if one is not window}
        self._blocks = blocks
        self.size -= 1

    def held(self) -> Callable[[], list[Window]]:
        """Return what lists the windows that are held now, now or later, the oldest first.

        Later there may be others, of elements that came later.
        """
        blocks = self._blocks

        def listed() -> list[Window]:
            # Lists, each made at once: another thread may gather on. Most blocks are empty.
            windows = [window for block in blocks if block for window in list(block.values())]
            return sorted(windows, key=_first_ordinal)

        return listed


def _first_ordinal(window: Window) -> int:
    return window.ordinals[0]


class Gathering:
    """Reads an input and gathers its elements by key.

    Args:
        input_: The input.
        step: The name of the step, for errors.
        call: Any function of the step: it says what becomes of an error of one.
        key_of: Returns the key of an element.
        size_of: Returns how many elements with a key make a window.
        smallest: The least that it returns.
    """

    def __init__(
        self,
        input_: ElementIterator,
        step: str,
        call: UserFunction,
        key_of: Callable[[Element], int],
        size_of: Callable[[int], int],
        smallest: int = 1,
    ) -> None:
        self._input = Reread(input_, step, _EVERY)
        self._call = call
        self._key_of = key_of
        self._size_of = size_of
        self._smallest = smallest
        self._begin()

    def _begin(self) -> None:
        self._windows = _Windows()
        self._left: list[Window] | None = None  # at the end of the input, the next one last
        self._chunk: Chunk | None = None  # in hand ...
        self._rows: list[Element] = []
        self._offset = 0  # ... from here on
        self._done = 0  # elements of the input that were gathered, or failed
        self._limit = 1
        self._prune_at = 0

    def next_window(self) -> Window | None:
        """Return the next window that is full, or at the end the first that is not; None: none."""
        while True:
            if self._chunk is None and not self._read():
                window = self._next_left()
            else:
                window = self._gather()
                if window is None:
                    continue
            if window is not None:
                self._windows.take_out(window)
            return window

    def _next_left(self) -> Window | None:
        """Return the next window that is left at the end of the input."""
        if self._left is None:
            self._left = self._windows.held()()[::-1]
        return self._left.pop() if self._left else None

    def _read(self) -> bool:
        """Have elements in hand; False: there are no more."""
        below = self._input.input
        if below.reads_ahead_freely:
            limit = self._limit
            self._limit = min(2 * limit, _EVERY)
        else:
            limit = max(below.at_hand, self._sure())
        if self._done >= self._prune_at:
            self._prune()
        chunk = self._input.pull(limit)
        if chunk is None:
            return False
        self._chunk, self._offset = chunk, 0
        # A row of columns would keep all of them in memory for as long as it is held.
        self._rows = list(map(copied, chunk.rows())) if chunk.is_columnar else chunk.rows()
        return True

    def _sure(self) -> int:
        """Return how many elements are needed for the next window at least."""
        if self._smallest == 1 or self._windows.size > _FEW:
            return 1
        windows = self._windows.held()()
        missing = [(window.size or 1) - len(window.rows) for window in windows]
        return max(1, min([*missing, self._smallest]))

    def _prune(self) -> None:
        held = [window.ordinals for window in self._windows.held()()]
        self._input.keep_for(ordinal for ordinals in held for ordinal in ordinals)
        # As rarely as there is much to look through.
        self._prune_at = self._done + max(4 * _EVERY, sum(map(len, held)))

    def _gather(self) -> Window | None:
        """Gather what is in hand until a window is full; return that, if one is."""
        assert self._chunk is not None
        windows, rows, offset = self._windows, self._rows, self._offset
        places = self._chunk.places
        try:
            while offset < len(rows):
                row = rows[offset]
                key = self._key_of(row)
                window = windows.get(key)
                is_new = window is None
                if window is None:
                    window = Window(key, self._chunk.places_of(slice(offset, offset + 1)))
                elif places is not None and places.dtype.names:
                    window.add_origin(places[offset : offset + 1])
                if window.size is None:  # it is new, or was held in a state
                    window.size = self._size_of(key)
                window.rows.append(row)
                window.ordinals.append(self._done)
                if is_new:
                    windows.add(window)
                offset += 1
                self._done += 1
                if len(window.rows) >= window.size:
                    return window
        except BaseException as error:
            failure: Exception | None = self._call.blame(error, self._position(offset), row)
            offset += 1
            self._done += 1
        else:
            failure = None
        finally:
            self._offset = offset
            if offset >= len(rows):
                self._chunk, self._rows = None, []
        if failure is not None:
            raise failure
        return None

    def _position(self, offset: int) -> int:
        assert self._chunk is not None
        return position_of(self._chunk.state_at(offset), self._done)

    # --- state ----------------------------------------------------------------------------------

    def standing(self, taken: Sequence[int] = ()) -> Callable[[], dict[str, State]]:
        """Return what makes the state of what is held now, now or later.

        Args:
            taken: Ordinals of a window that was taken out and is still needed.
        """
        windows, done = self._windows.held(), self._done
        mark, failures = self._input.oldest_mark, self._input.failures

        def state() -> dict[str, State]:
            first = mark.ordinal
            held = [
                [window.key, _gaps(window.ordinals[: bisect_left(window.ordinals, done)], first)]
                for window in windows()
            ]
            saved = {"windows": [one for one in held if one[1]], **mark.saved(done, failures)}
            return {**saved, "taken": _gaps(taken, first)} if taken else saved

        return state

    def restore(self, state: State) -> tuple[list[Element], list[int], Places | None]:
        """Go to a state; return the window that had been taken out: rows, ordinals and place."""
        self._begin()
        first = state["from"]
        held = [(key, _ordinals(gaps, first)) for key, gaps in state["windows"]]
        taken = _ordinals(state.get("taken", ()), first)
        needed = sorted([o for _, ordinals in held for o in ordinals] + taken)
        chunks = self._input.restore(state, np.array(needed, np.int64))
        rows: list[Element] = []
        places: list[Places | None] = []
        for chunk in chunks:
            rows += map(copied, chunk.rows()) if chunk.is_columnar else chunk.rows()
            places += [chunk.places_of(slice(at, at + 1)) for at in range(chunk.size)]
        number = {ordinal: at for at, ordinal in enumerate(needed)}
        for key, ordinals in held:
            window = Window(key, places[number[ordinals[0]]])
            window.rows = [rows[number[ordinal]] for ordinal in ordinals]
            window.ordinals = ordinals
            self._windows.add(window)
        self._done = self._prune_at = state["from"] + state["read"]
        place = places[number[taken[0]]] if taken else None
        return [rows[number[ordinal]] for ordinal in taken], taken, place

    @property
    def input(self) -> ElementIterator:
        """What is read."""
        return self._input.input

    def close(self) -> None:
        """Close the input."""
        self._begin()
        self._input.close()


def _gaps(ordinals: Sequence[int], first: int) -> list[int]:
    """Return increasing ordinals as small numbers: how far each is from the one before."""
    return [after - before for before, after in pairwise([first, *ordinals])]


def _ordinals(gaps: Iterable[int], first: int) -> list[int]:
    return list(accumulate(gaps, initial=first))[1:]
