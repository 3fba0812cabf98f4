"""Replay of delivered elements that an iterator may request again.

An interrupt (Ctrl-C) can leave the steps that use a reader in any state, so the iterator rebuilds
them at its last position. The service cannot open an epoch at such a position: the reader stays
open instead, and replays the elements after it.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any, NamedTuple, Protocol

from headrace.element.chunk import Chunk
from headrace.errors import FailedPreconditionError
from headrace.plan.source import Position
from headrace.service.client.actions import ReceivedBatch

__all__ = ["ReplayBuffer", "ReplayEntry", "ReplayRegistry", "ReplayableReader"]

_FULL_ENTRIES = 8
_FULL_BYTES = 4 << 20
_MAX_ENTRIES = 1 << 12
_MAX_ENDED_READERS = 4
_MAX_BYTES = 64 << 20
_NESTED = (dict, list, tuple)


class ReplayEntry(NamedTuple):
    """A batch as it was delivered to the consumer."""

    batch: ReceivedBatch
    content: Chunk | Exception
    start: int
    """Number of elements and errors delivered before it."""
    size: int
    """Number of its elements; 1 for an error."""
    bytes: int

    @property
    def stop(self) -> int:
        """Number of elements and errors delivered up to its end."""
        return self.start + self.size


class ReplayBuffer:
    """Delivered batches of a reader, from the oldest that may be requested again."""

    def __init__(self) -> None:
        self._entries: deque[ReplayEntry] = deque()
        self._bytes = 0
        self._full_entries, self._full_bytes = _FULL_ENTRIES, _FULL_BYTES

    @property
    def last(self) -> ReplayEntry | None:
        """The last delivered batch."""
        return self._entries[-1] if self._entries else None

    @property
    def is_full(self) -> bool:
        """Whether the iterator should report which batches may be discarded."""
        return len(self._entries) > self._full_entries or self._bytes > self._full_bytes

    def add(self, entry: ReplayEntry) -> None:
        """Add a delivered batch."""
        self._entries.append(entry)
        self._bytes += entry.bytes
        while len(self._entries) > _MAX_ENTRIES or (
            self._bytes > _MAX_BYTES and len(self._entries) > 1
        ):
            self._drop()

    def forget(self, before: int) -> None:
        """Discard batches that end at or before position `before`, in elements and errors."""
        while self._entries and self._entries[0].stop <= before:
            self._drop()
        # If many batches are still needed, the next check comes later.
        self._full_entries = max(_FULL_ENTRIES, 2 * len(self._entries))
        self._full_bytes = max(_FULL_BYTES, 2 * self._bytes)

    def entries_since(self, position: int) -> list[ReplayEntry] | None:
        """Return the batches after a position; None if they were discarded."""
        if self._entries and self._entries[0].start > position:
            return None
        return [entry for entry in self._entries if entry.stop > position]

    def _drop(self) -> None:
        self._bytes -= self._entries.popleft().bytes


class ReplayableReader(Protocol):
    """Interface of the readers in a `ReplayRegistry`."""

    name: str
    epoch: tuple[int, ...]

    @property
    def is_full(self) -> bool:
        """Whether the iterator should report its position (`ReplayBuffer.is_full`)."""

    def forget(self, before: int) -> None:
        """Discard batches before a position (`ReplayBuffer.forget`)."""

    def stop_at(self, position: int) -> None:
        """Record that no element after `position` was consumed."""

    def portable_position(self, received: int) -> Any:
        """Return a position that other processes can resume."""

    def rewind(self, received: int) -> bool:
        """Replay the elements after `received`; return False if they were discarded."""

    def close_for_good(self) -> None:
        """Close the reader, even if the registry retains it."""


class ReplayRegistry:
    """Readers of one source in this process (`plan.source.ReplayBuffers`)."""

    def __init__(self) -> None:
        self._readers: weakref.WeakValueDictionary[str, ReplayableReader] = (
            weakref.WeakValueDictionary()
        )
        self._iterators: weakref.WeakSet[Any] = weakref.WeakSet()
        self._holders: weakref.WeakSet[Any] = weakref.WeakSet()
        #: Readers that were closed but retained, so that they can be reopened at their position.
        self._open_readers: dict[str, ReplayableReader] = {}
        #: Names of the retained readers that have been reopened.
        self._reopened: set[str] = set()
        #: The last readers that reached their ends, with their last batches.
        self._ended_readers: deque[ReplayableReader] = deque(maxlen=_MAX_ENDED_READERS)
        #: Error about undelivered elements of an epoch, until it is raised.
        self._loss: Exception | None = None

    def __reduce__(self) -> tuple[type[ReplayRegistry], tuple[()]]:
        # Each process has its own readers.
        return ReplayRegistry, ()

    # --- iterators --------------------------------------------------------------------------------

    def register_iterator(self, iterator: Any) -> None:
        """Retain delivered batches from now on; the iterator reports which may be discarded."""
        self._iterators.add(iterator)

    def unregister_iterator(self, iterator: Any) -> None:
        """Record that an iterator was closed or reached its end."""
        self._iterators.discard(iterator)
        self.release_readers(iterator)
        if not self._iterators:
            self._ended_readers.clear()
            self._loss = None

    @property
    def is_full(self) -> bool:
        """Whether any reader's buffer is full."""
        # Called for each element, so it avoids the overhead of the weak dictionary's iteration
        # guard.
        for reference in self._readers.valuerefs():
            reader = reference()
            if reader is not None and reader.is_full:
                return True
        return False

    def discard_before(self, state: Any) -> None:
        """Discard what was delivered before `state`, the state of an iterator."""
        for name, position in _find_positions(state).items():
            reader = self._readers.get(name)
            if reader is not None:
                reader.forget(position)

    def mark_end(self, state: Any) -> None:
        """Record that no element after an iterator's `state` was or will be consumed."""
        for name, position in _find_positions(state, exactly=True).items():
            reader = self._readers.get(name)
            if reader is not None:
                reader.stop_at(position)

    def export_state(self, state: Any) -> Any:
        """Return a portable form of an iterator's state.

        Raises:
            FailedPreconditionError: If the state belongs to a reader that no longer exists, or if
                another process would read different elements after it.
        """
        if isinstance(state, dict) and "reader" in state and "received" in state:
            reader = self._readers.get(state["reader"])
            if reader is None:
                raise FailedPreconditionError(
                    "the iterator is at a position of a reader in another process; only that "
                    "process can save the state"
                )
            return reader.portable_position(state["received"])
        if isinstance(state, dict):
            exported = {key: self.export_state(value) for key, value in state.items()}
            if exported != state and state.get("failed") and "input" in state:
                raise FailedPreconditionError(
                    "cannot save a state here, because an element of the next batch has failed and "
                    "unordered reading does not record its position: save the state after that "
                    "batch"
                )
            return exported
        return [self.export_state(each) for each in state] if isinstance(state, list) else state

    def hold_readers(self, iterator: Any) -> None:
        """Retain readers that are closed from now on, so that they can be reopened."""
        self._holders.add(iterator)
        # An interrupt came after these were reopened and before they were used.
        self._reopened.clear()

    def release_readers(self, iterator: Any) -> None:
        """Close the retained readers that were not reopened."""
        if self._holders:
            self._holders.discard(iterator)
        while self._open_readers and not self._holders:
            name, reader = next(iter(self._open_readers.items()))
            if name not in self._reopened:
                reader.close_for_good()
            # Last, so that a repeated call after an interrupt closes it again.
            self._open_readers.pop(name, None)

    # --- undelivered elements ---------------------------------------------------------------------

    def schedule_loss_error(self, loss: Exception) -> None:
        """Store an error about undelivered elements, to be raised after the last element.

        Steps after the reader may still hold elements, so the iterator takes the error
        (`take_loss_error`) and raises it at its end, or at the start of the next epoch if one
        iterator reads several. If no iterator of this process reads this source directly, the error
        is raised here.
        """
        if not self._iterators:
            raise loss
        self._loss = loss

    def take_loss_error(self) -> Exception | None:
        """Return the error to raise after the last element, once; None if there is none."""
        loss, self._loss = self._loss, None
        return loss

    # --- readers ----------------------------------------------------------------------------------

    @property
    def has_iterators(self) -> bool:
        """Whether readers must retain what they deliver."""
        return len(self._iterators) > 0

    @property
    def can_reopen(self) -> bool:
        """Whether readers can be reopened."""
        return len(self._holders) > 0

    def add(self, reader: ReplayableReader) -> None:
        """Add a new reader."""
        self._readers[reader.name] = reader

    def add_ended(self, reader: ReplayableReader) -> None:
        """Add a reader that was read to its end."""
        self._ended_readers.append(reader)

    def retain(self, reader: ReplayableReader) -> bool:
        """Retain a reader that is being closed, if it may be reopened; else return False."""
        if self.can_reopen:
            self._reopened.discard(reader.name)
            self._open_readers[reader.name] = reader
        return self.can_reopen

    def reopen(self, position: Position, epoch: tuple[int, ...]) -> ReplayableReader | None:
        """Return the reader of a position, rewound to it; None if there is none."""
        if position is None or "reader" not in position:
            candidates = [
                reader
                for name, reader in self._open_readers.items()
                if name not in self._reopened and reader.epoch == epoch
            ]
            reader, received = (candidates[0] if candidates else None), 0
        else:
            reader, received = self._readers.get(position["reader"]), position["received"]
        if reader is None or not reader.rewind(received):
            return None
        if reader.name in self._open_readers:
            # It stays retained until the iterator has advanced: an interrupt may still keep the
            # caller from receiving it.
            self._reopened.add(reader.name)
        return reader


def _find_positions(state: Any, *, exactly: bool = False) -> dict[str, int]:
    """Return the first position of each reader in a state.

    Args:
        state: State of any plan.
        exactly: Whether to add the number of elements after a reader's position, if the state has
            it.
    """
    positions: dict[str, int] = {}
    pending = [(state, 0)]
    while pending:
        value, num_after = pending.pop()
        if isinstance(value, dict):
            if "reader" in value and "received" in value:
                name, position = value["reader"], value["received"] + num_after
                positions[name] = min(position, positions.get(name, position))
            for key, part in value.items():
                # A hint is a position and the number of elements after it.
                if exactly and key == "hint" and isinstance(part, list) and len(part) == 2:
                    pending.append((part[0], part[1]))
                elif isinstance(part, _NESTED):
                    pending.append((part, 0))
        elif isinstance(value, _NESTED):
            pending += [(part, 0) for part in value if isinstance(part, _NESTED)]
    return positions
