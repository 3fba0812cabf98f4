"""Helpers that write saved directories with a few streams."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from headrace.element.chunk import Chunk
from headrace.element.spec import describe_spec, relax_lengths, spec_of
from headrace.saved.chunk_file import ChunkFile
from headrace.saved.directory import SavedDirectory
from headrace.saved.format import ChunkRecord, SaveHeader, assign_order
from headrace.saved.writer import StreamWriter

SAVE = "0123456789abcdef"


def begun(path: Path | str, first: Any = None, plan: str = "plan", save: str = SAVE) -> Any:
    """Begin a save, and return its directory."""
    directory = SavedDirectory(path)
    spec = None if first is None else describe_spec(relax_lengths(spec_of(first)))
    directory.begin(SaveHeader(save, plan, spec))
    return directory


def write_stream(
    directory: SavedDirectory,
    stream: int,
    rows: Sequence[Any],
    *,
    each: int = 1 << 30,
    batch_bytes: int = 4 << 20,
    number: int = 0,
    save: str = SAVE,
) -> list[ChunkRecord]:
    """Write rows into files of `size` elements, without publishing or ordering them."""
    writer = StreamWriter(directory, save, stream, number=number, batch_bytes=batch_bytes)
    for start in range(0, len(rows), each):
        writer.append(Chunk.of_rows(list(rows[start : start + each])))
        writer.finish_file()
    return writer.take_finished_files()


def saved(path: Path | str, *streams: Sequence[Any], each: int = 1 << 30) -> SavedDirectory:
    """Save streams of rows in a finished directory."""
    directory = begun(path, next((rows[0] for rows in streams if rows), None))
    written: list[ChunkRecord] = []
    for stream, rows in enumerate(streams):
        written += write_stream(directory, stream, rows, each=each)
    # In turn, as if all streams were equally fast.
    records = publish(directory, sorted(written, key=lambda record: (record.number, record.stream)))
    directory.finish(SAVE, records)
    return directory


def publish(
    directory: SavedDirectory, records: Iterable[ChunkRecord], first: int = 0
) -> list[ChunkRecord]:
    """Publish chunk files in this order, the first one as number `first`."""
    decided = assign_order(records, first)
    directory.publish(SAVE, decided)
    return decided


def read(directory: SavedDirectory, chunks: Iterable[ChunkRecord], limit: int = 1000) -> list[Any]:
    """Read all elements of chunk files."""
    rows: list[Any] = []
    for chunk in chunks:
        file, at = ChunkFile(directory.folder, chunk, SAVE), 0
        while at < file.size:
            part = file.read(at, limit)
            rows += part.rows()
            at += part.size
    return rows
