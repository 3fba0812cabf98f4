"""What readers gave is kept until it is known where an iterator stands: it may be asked for again.

An interruption (Ctrl-C) may leave the steps above a reader anywhere; they are built again from the
last place. A pass over the service cannot be opened in its middle, so the reader stays, and gives
again what came after that place.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any, NamedTuple, Protocol

from headrace.element.chunk import Chunk
from headrace.errors import FailedPreconditionError
from headrace.plan.source import Position
from headrace.service.client.actions import Delivery

__all__ = ["Given", "Keeper", "Kept", "KeptReader"]

_FEW = 8
_FEW_BYTES = 4 << 20
_MOST = 1 << 12
_ENDED = 4
_MOST_BYTES = 64 << 20
_NESTED = (dict, list, tuple)


class Given(NamedTuple):
    """A delivery, as it was given to the consumer."""

    delivery: Delivery
    content: Chunk | Exception
    start: int
    """How many elements and errors were given before it."""
    size: int
    """Elements in it; 1 for an error."""
    bytes: int

    @property
    def stop(self) -> int:
        """How many were given with it."""
        return self.start + self.size


class Kept:
    """What a reader gave, from the oldest that may be asked for again."""

    def __init__(self) -> None:
        self._given: deque[Given] = deque()
        self._bytes = 0
        self._few, self._few_bytes = _FEW, _FEW_BYTES

    @property
    def last(self) -> Given | None:
        """What was given last."""
        return self._given[-1] if self._given else None

    @property
    def is_full(self) -> bool:
        """Whether it is time to say what may be forgotten."""
        return len(self._given) > self._few or self._bytes > self._few_bytes

    def add(self, given: Given) -> None:
        """Keep what is given now."""
        self._given.append(given)
        self._bytes += given.bytes
        while len(self._given) > _MOST or (self._bytes > _MOST_BYTES and len(self._given) > 1):
            self._drop()

    def forget(self, before: int) -> None:
        """Forget what ends before so many elements and errors."""
        while self._given and self._given[0].stop <= before:
            self._drop()
        # Where much is needed, it is looked at less often.
        self._few = max(_FEW, 2 * len(self._given))
        self._few_bytes = max(_FEW_BYTES, 2 * self._bytes)

    def since(self, place: int) -> list[Given] | None:
        """Return what was given from a place on; None: that was forgotten."""
        if self._given and self._given[0].start > place:
            return None
        return [given for given in self._given if given.stop > place]

    def _drop(self) -> None:
        self._bytes -= self._given.popleft().bytes


class KeptReader(Protocol):
    """A reader as its keeper sees it."""

    name: str
    pass_number: tuple[int, ...]

    @property
    def is_full(self) -> bool:
        """`Kept.is_full`."""

    def forget(self, before: int) -> None:
        """`Kept.forget`."""

    def stop_at(self, place: int) -> None:
        """Take note that of what was given, nothing after `place` is used."""

    def said(self, place: int) -> Any:
        """Return a place so that others can go on from there."""

    def go_back(self, place: int) -> bool:
        """Give again what came after `place`; False: that was forgotten."""

    def end(self) -> None:
        """Close, whoever holds it."""


class Keeper:
    """Knows the readers of one source in this process (`plan.source.Keeper`)."""

    def __init__(self) -> None:
        self._readers: weakref.WeakValueDictionary[str, KeptReader] = weakref.WeakValueDictionary()
        self._watchers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._holders: weakref.WeakSet[Any] = weakref.WeakSet()
        #: Closed and still open, to be opened where they were.
        self._left: dict[str, KeptReader] = {}
        #: Names of those of them that were opened again since.
        self._taken: set[str] = set()
        #: Closed at their ends, the last ones, with what they gave last.
        self._ended: deque[KeptReader] = deque(maxlen=_ENDED)
        #: An error about elements that a pass did not get, until it is raised.
        self._loss: Exception | None = None

    def __reduce__(self) -> tuple[type[Keeper], tuple[()]]:
        # Another process reads on its own account.
        return Keeper, ()

    # --- iterators --------------------------------------------------------------------------------

    def watch(self, iterator: Any) -> None:
        """Keep what readers give from now on; the iterator says what may be forgotten."""
        self._watchers.add(iterator)

    def leave_off(self, iterator: Any) -> None:
        """Take note that an iterator is closed, or at its end."""
        self._watchers.discard(iterator)
        self.release(iterator)
        if not self._watchers:
            self._ended.clear()
            self._loss = None

    @property
    def is_full(self) -> bool:
        """Whether much is kept."""
        # Asked before each element, so by the references, without their dictionary's guard.
        for reference in self._readers.valuerefs():
            reader = reference()
            if reader is not None and reader.is_full:
                return True
        return False

    def forget(self, state: Any) -> None:
        """Forget what came before `state`, the place of an iterator."""
        for name, place in _places(state).items():
            reader = self._readers.get(name)
            if reader is not None:
                reader.forget(place)

    def stop_at(self, state: Any) -> None:
        """Take note that nothing after `state`, the place of an iterator, was or will be used."""
        for name, place in _places(state, exactly=True).items():
            reader = self._readers.get(name)
            if reader is not None:
                reader.stop_at(place)

    def said(self, state: Any) -> Any:
        """Return the place of an iterator so that others can go on from there.

        Raises:
            FailedPreconditionError: It is of a reader that is not here any more, or somebody else
                would read other elements on the way.
        """
        if isinstance(state, dict) and "reader" in state and "received" in state:
            reader = self._readers.get(state["reader"])
            if reader is None:
                raise FailedPreconditionError(
                    "the iterator stands where a reader of another process stood; only there it "
                    "has a state"
                )
            return reader.said(state["received"])
        if isinstance(state, dict):
            made = {key: self.said(value) for key, value in state.items()}
            if made != state and state.get("failed") and "input" in state:
                raise FailedPreconditionError(
                    "an element failed that belongs to the batch which is made next, and its place "
                    "over the service has no order: take the state after that batch"
                )
            return made
        return [self.said(each) for each in state] if isinstance(state, list) else state

    def hold(self, iterator: Any) -> None:
        """Leave readers open that are closed from now on, to be opened where they were."""
        self._holders.add(iterator)
        # Opened again and interrupted before anybody had them.
        self._taken.clear()

    def release(self, iterator: Any) -> None:
        """Close those that were not opened again."""
        if self._holders:
            self._holders.discard(iterator)
        while self._left and not self._holders:
            name, reader = next(iter(self._left.items()))
            if name not in self._taken:
                reader.end()
            # At last: an interruption before this ends it once more.
            self._left.pop(name, None)

    # --- what is missing --------------------------------------------------------------------------

    def lose(self, loss: Exception) -> None:
        """Have an error about missing elements raised after the last element.

        Steps after the reader may hold elements. So the iterator raises it at its end, or the next
        pass when it begins, where one iterator reads several. It is raised here where no iterator
        of this process reads this source directly.
        """
        if not self._watchers:
            raise loss
        self._loss = loss

    def take_loss(self) -> Exception | None:
        """Return the error to raise after the last element, once; None: nothing is missing."""
        loss, self._loss = self._loss, None
        return loss

    # --- readers ----------------------------------------------------------------------------------

    @property
    def is_watched(self) -> bool:
        """Whether readers are to keep what they give."""
        return len(self._watchers) > 0

    @property
    def is_holding(self) -> bool:
        """Whether a reader may be opened where it was."""
        return len(self._holders) > 0

    def add(self, reader: KeptReader) -> None:
        """Take note of a new reader."""
        self._readers[reader.name] = reader

    def remember(self, reader: KeptReader) -> None:
        """Take note of a reader that was read to its end."""
        self._ended.append(reader)

    def leave(self, reader: KeptReader) -> bool:
        """Keep a reader that is to be closed, if it may be opened again; else False."""
        if self.is_holding:
            self._taken.discard(reader.name)
            self._left[reader.name] = reader
        return self.is_holding

    def take(self, position: Position, pass_number: tuple[int, ...]) -> KeptReader | None:
        """Return the reader of a position, which gives what comes after it; None: there is none."""
        if position is None or "reader" not in position:
            left = [
                reader
                for name, reader in self._left.items()
                if name not in self._taken and reader.pass_number == pass_number
            ]
            found, place = (left[0] if left else None), 0
        else:
            found, place = self._readers.get(position["reader"]), position["received"]
        if found is None or not found.go_back(place):
            return None
        if found.name in self._left:
            # It stays there until the iterator has got further: before that, an interruption may
            # come between this and whoever asked for it.
            self._taken.add(found.name)
        return found


def _places(state: Any, *, exactly: bool = False) -> dict[str, int]:
    """Return the first place of each reader that a state mentions.

    Args:
        state: Of any plan.
        exactly: Whether to count what came after a reader's place, where the state says so.
    """
    found: dict[str, int] = {}
    left = [(state, 0)]
    while left:
        value, since = left.pop()
        if isinstance(value, dict):
            if "reader" in value and "received" in value:
                name, place = value["reader"], value["received"] + since
                found[name] = min(place, found.get(name, place))
            for key, part in value.items():
                # A hint is a position, and how many elements came after it.
                if exactly and key == "hint" and isinstance(part, list) and len(part) == 2:
                    left.append((part[0], part[1]))
                elif isinstance(part, _NESTED):
                    left.append((part, 0))
        elif isinstance(value, _NESTED):
            left += [(part, 0) for part in value if isinstance(part, _NESTED)]
    return found
