"""Reads what is materialized, and goes on over the service, keeping what comes.

Rule 1. What was read from the service and is not known to be kept is never published: a part holds
        all elements up to the place that it says.
Rule 2. What fails about the keeping is a warning, and the reading goes on; but for an element that
        cannot be kept at all.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Any

from headrace.element.chunk import Chunk, States
from headrace.errors import (
    AbortedError,
    DataLossError,
    FailedPreconditionError,
    HeadraceError,
    InvalidElementError,
    NotFoundError,
    UnavailableError,
)
from headrace.plan.source import Position, Reader, Source
from headrace.service.client.parts import NOTHING, Part, Parts, PartWriter, Place
from headrace.service.client.source import RemoteSource
from headrace.service.modes.ordered.consumers_source import InTurns
from headrace.sources.saved import SavedChunksSource

__all__ = ["MaterializedReader"]

_log = logging.getLogger(__name__)

_POSITION = {"part": int, "after": str, "id": str, "row": int, "next": dict | None}


class MaterializedReader:
    """Reads parts, and then what the service gives.

    Its position is `{"part", "after", "id", "row", "next"}`: the number of a part, the id of the
    one before it, its own, elements of it that were passed, and where the service is to go on if
    the part is not there. Before a part was looked for its id is empty; where nothing is kept the
    number is -1.

    Args:
        remote: What the service gives.
        parts: What is kept.
        stop: The number after the last index of `remote`.
        position: Where to begin.
        pass_number: The pass, if nothing was begun.
    """

    def __init__(
        self,
        remote: RemoteSource | InTurns,
        parts: Parts,
        stop: int,
        position: Position,
        pass_number: tuple[int, ...],
    ) -> None:
        self._source = remote
        self._parts = parts
        self._stop = stop
        self._pass = pass_number
        self._pid = os.getpid()
        #: Held while elements are read and kept, which go together.
        self._lock = threading.Lock()
        self._number, self._after, self._id, self._row = 0, "", "", 0
        self._next: Place = None
        #: What is open: files of a part, or the service.
        self._stored: Reader | None = None
        self._remote: Reader | None = None
        self._fixed: tuple[int, ...] = ()
        self._writer: PartWriter | None = None
        self._is_at_end = self._is_closed = False
        if position is not None:
            self._go_to(position)

    # --- where it stands ------------------------------------------------------------------------

    def _go_to(self, position: Any) -> None:
        if not isinstance(position, dict) or not all(
            isinstance(position.get(name), kind) for name, kind in _POSITION.items()
        ):
            raise FailedPreconditionError(
                f"the state does not stand among materialized elements: {position!r:.80}; restore "
                "a state as `get_state` returned it, or begin the pass again"
            )
        self._number, self._after = position["part"], position["after"]
        self._id, self._row, self._next = position["id"], position["row"], position["next"]
        if not self._id:
            return
        part = self._parts.find(self._number, self._after)
        if part is not None and part.id == self._id:
            self._open_part(part)
        elif self._next is None:
            raise DataLossError(
                f"the state stands among materialized elements that {self._parts.url!r} does not "
                "hold any more: bring them back, or begin the pass again"
            )
        else:
            self._id, self._row, self._number = "", 0, -1

    def get_position(self) -> Position:
        """Return the place before the next element."""
        if self._remote is not None:
            place = self._place(self._remote.get_position())
        else:
            place = None if self._id else self._next
        return self._standing(self._row, lambda index: place)(0)

    def _standing(self, row: int, place_at: Callable[[int], Place] = lambda index: None) -> States:
        """Return the places before elements of this part from a row on.

        Args:
            row: The first one's.
            place_at: Returns where the service goes on before each.
        """
        number, after, id_ = self._number, self._after, self._id
        return lambda index: {
            "part": number,
            "after": after,
            "id": id_,
            "row": row + index,
            "next": place_at(index),
        }

    def _place(self, position: Position, since: int = 0) -> Place:
        """Return where the service goes on, so many elements after a position."""
        place = {"pass": list(self._pass), "fixed": list(self._fixed), "at": position}
        return {**place, "since": since} if since else place

    # --- reading --------------------------------------------------------------------------------

    def read(self, limit: int) -> Chunk | None:
        """Return at most `limit` of the next elements; None at the end."""
        with self._lock:
            while not (self._is_at_end or self._is_closed):
                if self._remote is not None:
                    return self._read_remote(self._remote, limit)
                if self._stored is not None:
                    chunk = self._stored.read(limit)
                    if chunk is not None:
                        row = self._row
                        self._row += chunk.size
                        return chunk.with_states(self._standing(row))
                    self._end_part()
                    continue
                part = self._parts.find(self._number, self._after) if self._number >= 0 else None
                if part is not None:
                    self._open_part(part)
                else:
                    self._open_remote()
            return None

    def _open_part(self, part: Part) -> None:
        file, row = 0, self._row
        while file < len(part.chunks) and row >= part.chunks[file].elements:
            row -= part.chunks[file].elements
            file += 1
        chunks = SavedChunksSource(self._parts.url, part.id, None, part.chunks, None)
        self._stored = chunks.open(0, chunks.size, [file, row])
        self._id, self._next = part.id, part.next

    def _end_part(self) -> None:
        self._stored = None
        if self._next == NOTHING:
            self._is_at_end = True
            return
        self._number, self._after, self._id, self._row = self._number + 1, self._id, "", 0

    def _open_remote(self) -> None:
        source: Source = self._source
        place = self._next
        if place is not None:
            self._pass = tuple(place["pass"])
            source = source.with_fixed_seeds(tuple(place["fixed"]))
        self._fixed = source.fixed_seeds
        at = None if place is None else place["at"]
        self._remote = source.open(0, self._stop, at, pass_number=self._pass)
        since = 0 if place is None else place.get("since", 0)
        while since:
            passed = self._remote.read(since)
            since -= since if passed is None else passed.size
        if self._number >= 0:
            self._begin_part()

    def _begin_part(self) -> None:
        try:
            self._writer = self._parts.begin(self._number, self._after)
            self._id = self._writer.id
        except HeadraceError as error:
            self._give_up(error)

    def _read_remote(self, remote: Reader, limit: int) -> Chunk | None:
        before = remote.get_position()
        # Until it is kept: an interruption may come between.
        writer, self._writer = self._writer, None
        try:
            chunk = remote.read(limit)
        except BaseException as error:
            if writer is not None:
                self._publish_until(writer, before)
            if writer is not None and isinstance(error, Exception):
                # A later pass meets the same element, and the same error.
                self._say_given_up(f"it failed: {error}")
            raise
        if chunk is None:
            self._is_at_end = True
            if writer is not None and self._is_closed:  # by another thread: it is no end
                writer.close()
            elif writer is not None:
                self._finish(writer)
            return None
        row = self._row
        self._row += chunk.size
        place = self._place
        if chunk.has_states:
            known = chunk.states
            states = self._standing(row, lambda index: place(known(index)))
        else:
            states = self._standing(row, lambda index: place(before, index))
        if writer is not None:
            self._keep(writer, chunk)
        return chunk.with_states(states)

    # --- keeping --------------------------------------------------------------------------------

    def _keep(self, writer: PartWriter, chunk: Chunk) -> None:
        try:
            writer.append(chunk)
            if writer.is_full:
                self._publish(writer)
            else:
                self._writer = writer
        except InvalidElementError:
            writer.close()
            self._number, self._id = -1, ""
            raise
        except HeadraceError as error:
            writer.close()
            self._give_up(error)

    def _publish(self, writer: PartWriter) -> None:
        assert self._remote is not None
        at = self._source.keeper.said(self._remote.get_position())
        part = self._published(writer, self._place(at))
        self._number, self._after, self._id, self._row = self._number + 1, part.id, "", 0
        self._begin_part()

    def _publish_until(self, writer: PartWriter, position: Position) -> None:
        """Let others read what was kept, up to a position, and keep no more."""
        try:
            if writer.elements:
                self._published(writer, self._place(self._source.keeper.said(position)))
        except HeadraceError as error:
            self._give_up(error)
        finally:
            writer.close()
            self._number, self._id = -1, ""

    def _published(self, writer: PartWriter, next: Place) -> Part:
        if self._source.has_gaps:  # a later pass may have what this one lost
            raise UnavailableError("it lacks elements of the dataset, which the log names")
        return writer.publish(next)

    def _finish(self, writer: PartWriter) -> None:
        try:
            self._published(writer, NOTHING)
        except HeadraceError as error:
            self._give_up(error)
        finally:
            writer.close()

    def _give_up(self, error: HeadraceError) -> None:
        self._writer, self._number = None, -1
        if isinstance(error, AbortedError | NotFoundError):
            self._say_given_up("another reader has begun to keep the same elements since")
        else:
            self._say_given_up(str(error))

    def _say_given_up(self, why: str) -> None:
        _log.warning(
            "the rest of this pass is not kept in %r: %s; a later pass goes on after what is there",
            self._parts.url,
            why,
        )

    def close(self) -> None:
        """Keep what was read so far, and close. May be called twice."""
        # Where another thread reads, nobody knows what it has.
        if self._lock.acquire(blocking=False):
            try:
                self._leave_off()
            finally:
                self._lock.release()
        self._is_closed = True
        if self._remote is not None:
            self._remote.close()

    def _leave_off(self) -> None:
        writer, self._writer = self._writer, None
        self._stored = None
        if writer is None or self._remote is None or self._pid != os.getpid():
            return
        self._publish_until(writer, self._remote.get_position())
