"""Source of the samples in tar archives, in the WebDataset convention.

Consecutive files with the same key form a sample. An index is a part of an archive (`tar_index`).

Rule 1. A position is `[index, offset]`: the offset of the first header of the next sample in the
        (uncompressed) archive. Offset 0 is the start of the index.
Rule 2. Samples before damage are returned before the error is raised; a sample ends where the next
        header has another key. Reading continues with the next sample if a sample cannot be used,
        and with the next index if a header is damaged.
"""

from __future__ import annotations

import bisect
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn, cast

from headrace.element.chunk import Chunk
from headrace.errors import DataLossError, FailedPreconditionError, HeadraceError, UnavailableError
from headrace.plan.source import (
    IndexKind,
    Position,
    Reader,
    Source,
    check_limit,
    check_part_position,
    check_range,
)
from headrace.sources.tar_decoders import find_decoder
from headrace.sources.tar_index import Shard, is_compressed, split_name
from headrace.sources.tar_members import Member, TarMembers
from headrace.storage.compression import Compression
from headrace.storage.files import open_file
from headrace.storage.options import NO_OPTIONS, StorageOptions

__all__ = ["TarSamplesSource"]

_BLOCK_SIZE = 256 << 10
_CHUNK_BYTES = 1 << 20
"""Size of the samples that one read returns, unless a single one is larger."""


@dataclass(frozen=True)
class TarSamplesSource(Source):
    """The samples of tar archives; an index is a part of an archive.

    Args:
        shards: The archives and their parts.
        decode: Whether to decode files by extension (`tar_decoders`).
        undecoded: Extensions that are not decoded nevertheless.
        storage_options: Options of the file systems of URLs.
    """

    performance_fields: ClassVar[tuple[str, ...]] = ("storage_options",)

    shards: tuple[Shard, ...]
    decode: bool = False
    undecoded: tuple[str, ...] = ()
    storage_options: StorageOptions = field(default=NO_OPTIONS, repr=False)
    #: Number of parts in the shards up to and including each one.
    _counts: list[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        counts = list(itertools.accumulate(len(shard.starts) for shard in self.shards))
        object.__setattr__(self, "_counts", counts)

    @property
    def size(self) -> int:
        return self._counts[-1]

    @property
    def index_kind(self) -> IndexKind:
        return "file"

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple([shard.name for shard in self.shards for _ in shard.starts])

    def open(
        self,
        start: int,
        stop: int,
        position: Position = None,
        *,
        pass_number: tuple[int, ...] = (),
    ) -> Reader:
        check_range(start, stop, self.size)
        return _TarSamplesReader(self, start, stop, position)

    def find_part(self, index: int) -> tuple[Shard, int, int | None]:
        """Return the shard of an index, and where its part starts and ends (None: at the end)."""
        number = bisect.bisect_right(self._counts, index)
        shard = self.shards[number]
        part = index - self._counts[number] + len(shard.starts)
        is_last = part + 1 == len(shard.starts)
        return shard, shard.starts[part], None if is_last else shard.starts[part + 1]


class _TarSamplesReader:
    """Reads the samples of several parts, one part after another."""

    def __init__(self, source: TarSamplesSource, start: int, stop: int, position: Position) -> None:
        self._source = source
        self._stop = stop
        self._index, self._offset = check_part_position(position, start, stop, "[index, offset]")
        self._members: TarMembers | None = None
        self._shard = source.shards[0]
        #: First file of the next sample, if it was read already.
        self._next: tuple[Member, str, str] | None = None
        #: Error to raise next, and the position after it.
        self._error: tuple[HeadraceError, int, int] | None = None
        self._decoders: dict[str, Callable[[bytes], Any] | None] = dict.fromkeys(source.undecoded)
        self._is_closed = False

    def read(self, limit: int) -> Chunk | None:
        check_limit(limit)
        if self._is_closed:
            raise FailedPreconditionError("this reader is closed; open another one")
        if self._error is not None:
            self._raise_error()
        before = self._index, self._offset
        rows: list[Any] = []
        num_bytes = 0
        try:
            while len(rows) < limit and num_bytes < _CHUNK_BYTES:
                if self._members is None and not self._open():
                    break
                sample = self._read_sample()
                if sample is None:
                    if rows:
                        break  # the next index begins with another read
                    self._next_index()
                elif isinstance(sample, HeadraceError):
                    self._error = sample, self._index, self._next_offset()
                    break
                else:
                    rows.append(sample)
                    num_bytes -= self._offset
                    self._offset = self._next_offset()
                    num_bytes += self._offset
        except HeadraceError as error:
            self._close_members()
            self._error = error, self._index + 1, 0
        except BaseException:
            # Out of memory, or interrupted: read these samples again.
            self._close_members()
            self._index, self._offset = before
            raise
        if self._error is not None and not rows:
            self._raise_error()
        return Chunk.of_rows(rows) if rows else None

    def get_position(self) -> Position:
        return [self._index, self._offset]

    def close(self) -> None:
        self._is_closed = True
        self._close_members()

    def _open(self) -> bool:
        """Open the archive of the current index at the current offset; return False at the end."""
        if self._index >= self._stop:
            return False
        shard, start, end = self._source.find_part(self._index)
        self._shard = shard
        offset = self._offset or start
        if offset < start or (end is not None and offset > end):
            raise FailedPreconditionError(
                f"byte {offset} of {shard.name!r} is not in part {self._index}, which starts at "
                f"byte {start}; restore the state with the same data"
            )
        self._offset = offset
        compression: Compression = "GZIP" if is_compressed(shard.name) else ""
        first = offset if shard.num_bytes is None else 0
        stream = open_file(shard.name, compression, first, self._source.storage_options)
        self._members = TarMembers(
            stream, shard.name, offset, _BLOCK_SIZE, can_seek=not compression, stop=end
        )
        if shard.num_bytes is not None:
            self._seek(cast(Any, stream), shard.num_bytes)
        return True

    def _seek(self, stream: Any, expected: int) -> None:
        """Check the size of the archive, and go to the current offset."""
        name, offset = self._shard.name, self._offset
        try:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(offset)
        except UnavailableError:
            raise
        except OSError as error:
            raise UnavailableError(f"{name!r} cannot be read at byte {offset}: {error}") from error
        if size != expected:
            raise FailedPreconditionError(
                f"{name!r} has {size} bytes, but had {expected} when the dataset was created, so "
                f"no sample may begin at byte {offset}; create the dataset again"
            )

    def _read_file(self) -> tuple[Member, str, str] | None:
        """Return the next file of a sample with its key and extension; None at the end."""
        members = self._members
        assert members is not None
        while (member := members.next()) is not None:
            split = split_name(member.name)
            if split is not None:
                return member, *split
        return None

    def _read_sample(self) -> dict[str, Any] | HeadraceError | None:
        """Return the next sample, or why it cannot be used; None at the end of the part.

        A sample is complete only if the next header shows that no file of it follows.
        """
        file, self._next = self._next or self._read_file(), None
        if file is None:
            return None
        members = self._members
        assert members is not None
        sample_key = file[1]
        sample: dict[str, Any] = {"__key__": sample_key}
        failure: HeadraceError | None = None
        while file is not None and file[1] == sample_key:
            member, _, extension = file
            data: Any = members.read(member)
            if extension in sample:
                failure = failure or DataLossError(
                    f"{self._shard.name!r} has a second file {extension!r} of the sample "
                    f"{sample_key!r} at byte {member.start}; names must be unique in a sample"
                )
            elif self._source.decode:
                try:
                    data = self._decode(extension, data)
                except MemoryError:
                    raise
                except Exception as error:
                    failure = failure or self._decoding_error(member, error)
            sample[extension] = data
            file = self._read_file()
        self._next = file
        return failure or sample

    def _decode(self, extension: str, data: bytes) -> Any:
        try:
            decoder = self._decoders[extension]
        except KeyError:
            decoder = self._decoders[extension] = find_decoder(extension)
        return data if decoder is None else decoder(data)

    def _decoding_error(self, member: Member, error: Exception) -> DataLossError:
        result = DataLossError(
            f"{self._shard.name!r}: {member.name!r} at byte {member.data} cannot be decoded: "
            f"{error}"
        )
        result.__cause__ = error
        return result

    def _next_offset(self) -> int:
        """Return the offset of the sample after the one that was read last."""
        assert self._members is not None
        return self._members.offset if self._next is None else self._next[0].start

    def _next_index(self) -> None:
        self._close_members()
        self._index, self._offset = self._index + 1, 0

    def _raise_error(self) -> NoReturn:
        """Raise the pending error, with the position after it."""
        assert self._error is not None
        error, self._index, self._offset = self._error
        self._error = None
        raise error

    def _close_members(self) -> None:
        members, self._members, self._next = self._members, None, None
        if members is not None:
            members.close()
