"""Parts: what a reading gave, kept in a folder, so that it is computed once.

    00000007.json                           part 7: its id, that of the part before it, its files,
                                            and where reading goes on after it
    00000000-00000-000000-<id>.arrow        a file of the part of this id (`saved.format`)

Rule 1. A part counts once its record is there, and only where that names the part before it. So a
        reader goes from record to record; whatever else lies in the folder is ignored.
Rule 2. Whoever has read all parts and reads on writes the next one. Of two that do one wins: the
        first that publishes, or the later one, which removes files that are no part of what is
        there. The other finds that out before it publishes anything.
Rule 3. A part says where reading goes on: as a state, for any process and any cluster. The last one
        says that nothing comes.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

from headrace import saved
from headrace.element.chunk import Chunk
from headrace.element.wire import copied, frame_bytes
from headrace.errors import AbortedError, DataLossError, NotFoundError
from headrace.saved.directory import SavedDirectory
from headrace.saved.format import ChunkRecord, ordered, save_of

__all__ = ["NOTHING", "Part", "PartWriter", "Parts", "Place"]

Place: TypeAlias = dict[str, Any] | None
"""Where reading goes on, as JSON; None: at the beginning."""

NOTHING: Place = {}
"""The place after the last element."""

_FORMAT = "headrace materialized part"
_VERSION = 1
_PART_SECONDS = 60.0
"""What is made in so long is published: whoever is killed loses no more."""


class Part(NamedTuple):
    """One part.

    Attributes:
        id: 16 hexadecimal digits, in the names of its files.
        after: The id of the part before it; "": it is the first.
        chunks: Its files, in order.
        next: Where reading goes on after it.
    """

    id: str
    after: str
    chunks: tuple[ChunkRecord, ...]
    next: Place

    @property
    def elements(self) -> int:
        """How many elements it holds."""
        return sum(chunk.elements for chunk in self.chunks)

    @property
    def is_last(self) -> bool:
        """Whether nothing comes after it."""
        return self.next == NOTHING


class Parts:
    """The parts in a folder.

    Args:
        url: The folder, by path or URL. It need not exist yet.
    """

    def __init__(self, url: str) -> None:
        self.directory = SavedDirectory(url)

    @property
    def url(self) -> str:
        """The folder's path or URL."""
        return self.directory.url

    def find(self, number: int, after: str) -> Part | None:
        """Return a part, if it is there and comes after this one.

        Raises:
            DataLossError: Its record is damaged.
        """
        part = self._part(number)
        return part if part is not None and part.after == after else None

    def begin(self, number: int, after: str, chunk_bytes: int | None = None) -> PartWriter:
        """Return a writer of a part that is not there; what others left unpublished is removed."""
        folder = self.directory.folder
        strange = {*folder.names(), *folder.leftovers()}
        ids = {save_of(name) for name in strange} - {None}
        if len(ids) > number:  # else these are those before it
            known = {part.id for part in self._known(number)}
            for name in sorted(strange):
                if save_of(name) not in {None, *known}:
                    folder.remove(name)
        return PartWriter(self, number, after, chunk_bytes or saved.writer.CHUNK_BYTES)

    def publish(self, number: int, part: Part) -> None:
        """Let others read a part whose files are written.

        Raises:
            AbortedError: Somebody else goes on with what comes here.
            NotFoundError: Likewise: its files are gone.
        """
        before = self._part(number - 1) if number else None
        if number and (before is None or before.id != part.after):
            raise AbortedError(f"part {number - 1} is another one now")
        if self.find(number, part.after) is not None:
            raise AbortedError(f"there is a part {number} already")
        folder = self.directory.folder
        for chunk in part.chunks:
            folder.publish(chunk.name(part.id), chunk.public_name(part.id))
        folder.write(_record_name(number), _encode(part))

    def _known(self, count: int) -> Iterable[Part]:
        after = ""
        for number in range(count):
            part = self.find(number, after)
            if part is None:
                return
            yield part
            after = part.id

    def _part(self, number: int) -> Part | None:
        name = _record_name(number)
        try:
            data = self.directory.folder.read(name)
        except NotFoundError:
            return None
        return _decode(data, self.directory.folder.path(name))


class PartWriter:
    """Writes one part.

    Args:
        parts: Where.
        number: Which one.
        after: Id of the part before it.
        chunk_bytes: How large it is to be.

    Attributes:
        id: Its id.
    """

    def __init__(self, parts: Parts, number: int, after: str, chunk_bytes: int) -> None:
        self.id = secrets.token_hex(8)
        self._parts = parts
        self._number = number
        self._after = after
        self._chunk_bytes = chunk_bytes
        self._bytes = 0
        self._until = time.monotonic() + _PART_SECONDS
        self._chunks: list[ChunkRecord] = []
        self._writer = saved.writer.StreamWriter(
            parts.directory, self.id, 0, chunk_bytes=chunk_bytes
        )

    @property
    def elements(self) -> int:
        """How many elements it holds so far."""
        return self._writer.elements

    @property
    def is_full(self) -> bool:
        """Whether it is time to publish it."""
        return self._bytes >= self._chunk_bytes or (
            self.elements > 0 and time.monotonic() >= self._until
        )

    def append(self, chunk: Chunk) -> None:
        """Add elements, which whoever has them may change then.

        Raises:
            InvalidElementError: One cannot be saved; the message names the component.
            UnavailableError: They cannot be written.
        """
        self._bytes += frame_bytes(chunk)
        self._writer.append(copied(chunk))
        self._chunks += self._writer.take_whole()

    def publish(self, next: Place) -> Part:
        """Let others read it; return it.

        Args:
            next: Where reading goes on.

        Raises:
            AbortedError, NotFoundError: Somebody else goes on with what comes here.
            UnavailableError: It cannot be written.
        """
        self._writer.cut()
        chunks = ordered([*self._chunks, *self._writer.take_whole()])
        part = Part(self.id, self._after, tuple(chunks), next)
        self._parts.publish(self._number, part)
        return part

    def close(self) -> None:
        """Leave off, and remove what was not published. May be called twice."""
        self._writer.close()


def _record_name(number: int) -> str:
    return f"{number:08}.json"


def _encode(part: Part) -> bytes:
    value = {"format": _FORMAT, "version": _VERSION, **part._asdict()}
    return (json.dumps(value) + "\n").encode()


def _decode(data: bytes, path: str) -> Part:
    try:
        value = json.loads(data)
        if value["format"] != _FORMAT or value["version"] != _VERSION:
            raise ValueError(f"it is {value['format']!r}, version {value['version']!r}")
        chunks = tuple(ChunkRecord(*chunk) for chunk in value["chunks"])
        return Part(str(value["id"]), str(value["after"]), chunks, value["next"])
    except (LookupError, TypeError, ValueError) as error:
        raise DataLossError(
            f"{path!r} is no record of materialized elements that can be read: {error}; remove the "
            "folder, and they are made again"
        ) from error
